//! Both small clients, this one and the Python script, against a scripted bridge.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::*;
use crate::cli::connect::PYTHON;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

struct Asked {
    method: String,
    headers: HashMap<String, String>,
    body: Value,
    raw: String,
}

/// What the scripted bridge does with a `tools/call`, by the tool's name, and what it saw.
#[derive(Default)]
struct Seen {
    calls: Vec<Value>,
    bodies: Vec<String>,
    deletes: usize,
    initializes: usize,
    resumed_with: Vec<String>,
    /// Every request is answered with 401 from now on.
    is_rotated: bool,
    /// Nobody listens from now on.
    is_gone: bool,
}

/// Serves until the test process ends; one request per connection, as raw bytes, so that a reply can
/// be cut anywhere.
fn bridge() -> (String, Arc<Mutex<Seen>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    let seen = Arc::new(Mutex::new(Seen::default()));
    let shared = seen.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            if shared.lock().unwrap().is_gone {
                return;
            }
            let (stream, seen) = (stream.unwrap(), shared.clone());
            let address = listener.local_addr().unwrap();
            std::thread::spawn(move || {
                let mut stream = stream;
                if let Some(asked) = read(&stream) {
                    let reply = reply(&asked, &seen);
                    let is_gone = seen.lock().unwrap().is_gone;
                    while is_gone && std::net::TcpStream::connect(address).is_ok() {}
                    let _ = stream.write_all(reply.as_bytes());
                    if reply.is_empty() {
                        // Never answers: until the client gives up.
                        let _ = stream.read(&mut [0; 16]);
                    }
                }
            });
        }
    });
    (url, seen)
}

fn read(stream: &std::net::TcpStream) -> Option<Asked> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let method = line.split(' ').next()?.to_owned();
    let mut headers = HashMap::new();
    loop {
        line.clear();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let raw = String::from_utf8(body).unwrap();
    // A lone surrogate is JSON that `Value` cannot hold.
    let body = serde_json::from_str(&raw.replace("\\ud800", "?")).unwrap_or(Value::Null);
    Some(Asked { method, headers, body, raw })
}

fn http(status: &str, kind: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// An event stream that ends with the connection, as a cut one does.
fn stream(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n{body}")
}

fn text(id: &Value, text: &str, is_error: bool) -> String {
    let result = json!({"content": [{"type": "text", "text": text}], "isError": is_error});
    json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string()
}

fn reply(asked: &Asked, seen: &Mutex<Seen>) -> String {
    let mut seen = seen.lock().unwrap();
    let header = |name: &str| asked.headers.get(name).map_or("", String::as_str);
    if header("authorization") != format!("Bearer {TOKEN}") || seen.is_rotated {
        return http(
            "401 Unauthorized",
            "application/json",
            r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"unauthorized"}}"#,
        );
    }
    let id = &asked.body["id"];
    if asked.body["method"] == "initialize" {
        seen.initializes += 1;
        let result = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "x", "version": "1"}});
        let body = json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string();
        let session = format!("HTTP/1.1 200 OK\r\nmcp-session-id: s{}", seen.initializes);
        return http("200 OK", "application/json", &body).replacen("HTTP/1.1 200 OK", &session, 1);
    }
    assert_eq!(header("mcp-protocol-version"), "2025-11-25");
    if header("mcp-session-id") != format!("s{}", seen.initializes) {
        return http(
            "404 Not Found",
            "application/json",
            r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"unknown session"}}"#,
        );
    }
    match asked.method.as_str() {
        "DELETE" => {
            seen.deletes += 1;
            return "HTTP/1.1 204 No Content\r\n\r\n".into();
        }
        "GET" => {
            let last = header("last-event-id").to_owned();
            seen.resumed_with.push(last);
            return match seen.resumed_with.len() {
                1 => stream("id: c-2\nretry: 1\ndata:\n\n: tick\n\n"),
                2 => http("503 Service Unavailable", "text/plain", "later"),
                _ => {
                    let call = seen.calls.last().unwrap()["id"].clone();
                    stream(&format!("data: {}\n\n", text(&call, "resumed", false)))
                }
            };
        }
        _ => {}
    }
    match asked.body["method"].as_str() {
        Some("notifications/initialized") => "HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n".into(),
        Some("tools/list") => {
            let tools = json!([{"name": "read", "description": "Reads a file.\nMore."}, {"name": "x\u{1b}[2J", "inputSchema": {}}]);
            http(
                "200 OK",
                "application/json",
                &json!({"jsonrpc": "2.0", "id": id, "result": {"tools": tools}}).to_string(),
            )
        }
        Some("tools/call") => {
            seen.calls.push(asked.body.clone());
            seen.bodies.push(asked.raw.clone());
            match asked.body["params"]["name"].as_str().unwrap() {
                "json" => http("200 OK", "application/json; charset=utf-8", &text(id, "plain", false)),
                "fail" => http("200 OK", "application/json", &text(id, "went wrong", true)),
                name @ ("vanish" | "rotate") => {
                    (seen.is_gone, seen.is_rotated) = (name == "vanish", name == "rotate");
                    stream("id: c-0\nretry: 1\ndata:\n\n")
                }
                "structured" => {
                    let result = json!({"content": [], "structuredContent": {"answer": 42}});
                    let body = json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string();
                    http("200 OK", "application/json", &body)
                }
                "refuse" => {
                    let error = json!({"code": -32000, "message": "host not ready", "data": {"why": [1, 2]}});
                    let error = json!({"jsonrpc": "2.0", "id": id, "error": error});
                    http("200 OK", "application/json", &error.to_string())
                }
                "sse" => {
                    let log = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "awaiting approval"}});
                    stream(&format!(
                        "id: c-0\nretry: 1\ndata:\n\ndata: {log}\n\nid: c-1\ndata: {}\n\n",
                        text(id, "streamed", false)
                    ))
                }
                "cut" => stream(
                    "id: c-0\nretry: 1\ndata:\n\nid: c-1\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\"}\n\ndata: {\"half",
                ),
                "lost" => stream(": no id ever\n\n"),
                "half" => {
                    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{\"json"
                        .into()
                }
                "image" => {
                    let content = json!([{"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"}]);
                    http(
                        "200 OK",
                        "application/json",
                        &json!({"jsonrpc": "2.0", "id": id, "result": {"content": content}}).to_string(),
                    )
                }
                "surrogate" => http(
                    "200 OK",
                    "application/json",
                    &format!(
                        r#"{{"jsonrpc":"2.0","id":{id},"result":{{"content":[{{"type":"text","text":"a\ud800b"}}],"isError":false}}}}"#
                    ),
                ),
                _ => String::new(),
            }
        }
        _ => http("200 OK", "text/html", "<p>hello"),
    }
}

/// Runs `work` as the command line does.
fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

fn endpoint(url: &str) -> Endpoint {
    Endpoint::new(url, &Token::parse(TOKEN).unwrap()).unwrap()
}

fn call_args(tool: &str, arguments: &str, timeout: u32) -> CallArgs {
    let client = ClientArgs { url: None, token_file: None, timeout, json: false };
    CallArgs { tool: tool.into(), arguments: arguments.into(), out: None, client }
}

fn code(url: &str, tool: &str) -> u8 {
    run(call(&endpoint(url), &call_args(tool, "{}", 20)))
}

fn python(url: &str, token: &str, args: &[&str]) -> Output {
    let tmp = tempfile::tempdir().unwrap();
    let script = tmp.path().join("call.py");
    fs::write(&script, PYTHON).unwrap();
    Command::new("python3")
        .arg("-B")
        .arg(script)
        .args(args)
        .env("A2MCP_URL", url)
        .env("A2MCP_TOKEN", token)
        .stdin(Stdio::null())
        .output()
        .expect("the script's tests need python3")
}

/// Exit code and stdout of the script calling `tool`.
fn python_call(url: &str, tool: &str) -> (i32, String) {
    let output = python(url, TOKEN, &["--timeout", "20", "call", tool]);
    assert!(!String::from_utf8_lossy(&output.stderr).contains("Traceback"), "{output:?}");
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn json_and_streamed_answers_are_results() {
    let (url, seen) = bridge();
    assert_eq!((code(&url, "json"), code(&url, "sse"), code(&url, "surrogate")), (0, 0, 0));
    assert_eq!(run(tools(&endpoint(&url), &call_args("", "", 20).client)), 0);
    assert_eq!(python_call(&url, "json"), (0, "plain\n".into()));
    assert_eq!(python_call(&url, "sse"), (0, "streamed\n".into()));
    assert_eq!(python_call(&url, "surrogate"), (0, "a?b\n".into()));
    let listed = String::from_utf8(python(&url, TOKEN, &["list"]).stdout).unwrap();
    assert!(listed.starts_with("read                     Reads a file.\n"), "{listed}");
    let seen = seen.lock().unwrap();
    assert_eq!((seen.initializes, seen.deletes), (8, 8), "each run ends its session");
}

#[test]
fn arguments_arrive_byte_for_byte() {
    let (url, seen) = bridge();
    let arguments = r#"{"n": 12345678901234567890123, "f": 1.0e+2, "s": "é\ud800"}"#;
    assert_eq!(run(call(&endpoint(&url), &call_args("json", arguments, 20))), 0);
    assert_eq!(python(&url, TOKEN, &["call", "json", arguments]).status.code(), Some(0));
    for call in &seen.lock().unwrap().bodies {
        assert!(call.contains(&format!(r#""arguments":{arguments}}}"#)), "{call}");
    }
    assert_eq!(run(call(&endpoint(&url), &call_args("json", "{nonsense", 20))), 2);
    for nonsense in ["{nonsense", "[NaN]", ""] {
        assert_eq!(python(&url, TOKEN, &["call", "json", nonsense]).status.code(), Some(2));
    }
}

#[test]
fn a_tool_error_and_a_bridge_error_exit_with_1() {
    let (url, _) = bridge();
    assert_eq!((code(&url, "fail"), code(&url, "refuse")), (1, 1));
    assert_eq!(python_call(&url, "fail"), (1, "went wrong\n".into()));
    assert_eq!(python_call(&url, "refuse"), (1, String::new()));
    let said = python(&url, TOKEN, &["--json", "call", "refuse"]);
    assert_eq!(said.status.code(), Some(1));
    let error: Value = serde_json::from_slice(&said.stdout).unwrap();
    assert_eq!(error, json!({"code": -32000, "message": "host not ready", "data": {"why": [1, 2]}}));
}

#[test]
fn a_result_without_blocks_is_its_structured_content() {
    let (url, _) = bridge();
    assert_eq!(code(&url, "structured"), 0);
    assert_eq!(python_call(&url, "structured"), (0, "{\"answer\": 42}\n".into()));
}

#[test]
fn a_bridge_that_is_gone_is_given_up_soon_and_with_its_address() {
    let begun = std::time::Instant::now();
    let (url, seen) = bridge();
    let failure = run(super::run(&endpoint(&url), &call_args("vanish", "{}", 60))).unwrap_err();
    let address = url.strip_prefix("http://").unwrap().strip_suffix("/mcp").unwrap();
    let said = failure.to_string();
    assert!(said.contains(&format!("nobody listens at {address} any more")), "{said}");
    assert!(said.contains("refused") && !said.contains("run the same command again"), "{said}");
    assert_eq!((exit_code(&failure), seen.lock().unwrap().calls.len()), (3, 1));
    let (url, _) = bridge();
    let output = python(&url, TOKEN, &["call", "vanish"]);
    assert_eq!(output.status.code(), Some(3));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains(&format!("nobody listens at {url} any more")), "{said}");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn a_token_that_is_replaced_during_a_call_is_said() {
    let (url, _) = bridge();
    let failure = run(super::run(&endpoint(&url), &call_args("rotate", "{}", 20))).unwrap_err();
    let said = failure.to_string();
    assert!(said.contains("unauthorized: the token was replaced") && said.contains("cancelled"), "{said}");
    assert_eq!(exit_code(&failure), 4);
    let (url, _) = bridge();
    let output = python(&url, TOKEN, &["call", "rotate"]);
    assert_eq!(output.status.code(), Some(4));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("unauthorized: the token was replaced") && said.contains("cancelled"), "{said}");
}

#[test]
fn a_stream_that_ends_early_is_resumed_and_the_call_sent_once() {
    let (url, seen) = bridge();
    assert_eq!(code(&url, "cut"), 0);
    assert_eq!(seen.lock().unwrap().resumed_with, ["c-1", "c-2", "c-2"]);
    assert_eq!(seen.lock().unwrap().calls.len(), 1);
    let (url, seen) = bridge();
    assert_eq!(python_call(&url, "cut"), (0, "resumed\n".into()));
    assert_eq!(seen.lock().unwrap().resumed_with, ["c-1", "c-2", "c-2"]);
    assert_eq!(seen.lock().unwrap().calls.len(), 1);
}

#[test]
fn a_connection_that_is_lost_is_never_followed_by_a_second_call() {
    let (url, seen) = bridge();
    assert_eq!((code(&url, "lost"), code(&url, "half")), (3, 3));
    assert_eq!((python_call(&url, "lost").0, python_call(&url, "half").0), (3, 3));
    assert_eq!(seen.lock().unwrap().calls.len(), 4);
}

#[test]
fn a_forgotten_session_is_begun_again_once() {
    let (url, seen) = bridge();
    run(async {
        let endpoint = endpoint(&url);
        let mut session = Session::new(&endpoint, |_| {});
        let params = RawValue::from_string(r#"{"name":"json"}"#.into()).unwrap();
        session.request("tools/call", &params).await.unwrap();
        seen.lock().unwrap().initializes += 7;
        session.request("tools/call", &params).await.unwrap();
    });
    assert_eq!(seen.lock().unwrap().initializes, 9);
}

#[test]
fn nobody_there_a_wrong_token_and_silence_have_their_own_codes() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let closed = format!("http://{closed}/mcp");
    assert_eq!(code(&closed, "json"), 3);
    assert_eq!(python_call(&closed, "json").0, 3);

    let (url, _) = bridge();
    let wrong = Endpoint::new(&url, &Token::parse(&"x".repeat(40)).unwrap()).unwrap();
    assert_eq!(run(call(&wrong, &call_args("json", "{}", 20))), 4);
    let output = python(&url, "wrong-token", &["call", "json"]);
    assert_eq!(output.status.code(), Some(4));
    assert!(!String::from_utf8_lossy(&output.stderr).contains("wrong-token"));

    assert_eq!(run(call(&endpoint(&url), &call_args("silent", "{}", 1))), 5);
    let output = python(&url, TOKEN, &["--timeout", "0.5", "call", "silent"]);
    assert_eq!(output.status.code(), Some(5));
    assert!(String::from_utf8_lossy(&output.stderr).contains("time-out after 0.5 s"));

    assert_eq!(python(&url, TOKEN, &["nonsense"]).status.code(), Some(2));
    assert_eq!(python("ftp://x", TOKEN, &["list"]).status.code(), Some(2));
    assert_eq!(python(&url, "", &["list"]).status.code(), Some(2));
}

#[test]
fn images_are_saved_only_where_asked() {
    let (url, _) = bridge();
    let tmp = tempfile::tempdir().unwrap();
    let args = CallArgs { out: Some(tmp.path().join("o")), ..call_args("image", "{}", 20) };
    for name in ["image-1.png", "image-1-1.png"] {
        assert_eq!(run(call(&endpoint(&url), &args)), 0);
        assert_eq!(fs::read(tmp.path().join("o").join(name)).unwrap(), b"hello");
    }
    let dir = tmp.path().join("p");
    let said = python(&url, TOKEN, &["call", "image", "--out", dir.to_str().unwrap()]);
    assert_eq!(fs::read(dir.join("image-1.png")).unwrap(), b"hello");
    assert!(String::from_utf8_lossy(&said.stdout).contains("saved as"));
    assert!(python_call(&url, "image").1.contains("use --out DIR"));
}

#[test]
fn urls_are_checked_before_anything_is_sent() {
    let token = Token::parse(TOKEN).unwrap();
    for (url, words) in [
        ("https://x.trycloudflare.com/mcp", "a2mcp connect python"),
        ("127.0.0.1:80", "http://"),
        ("http://user:secret@h/", "must not hold"),
        ("ftp://h/", "http://"),
    ] {
        let Err(failure) = Endpoint::new(url, &token) else { panic!("{url}") };
        let said = failure.to_string();
        assert!(said.contains(words) && !said.contains("secret"), "{said}");
        assert_eq!(exit_code(&failure), 2);
    }
    for url in ["http://127.0.0.1:8765", "http://[::1]:1/mcp?x", "http://localhost/"] {
        assert!(Endpoint::new(url, &token).is_ok(), "{url}");
    }
}

#[test]
fn a_token_is_read_from_its_file_or_from_the_config() {
    let tmp = tempfile::tempdir().unwrap();
    let file = tmp.path().join("token");
    fs::write(&file, format!("{TOKEN}\n")).unwrap();
    assert_eq!(read_token(&file).unwrap().expose(), TOKEN);
    fs::write(&file, format!("{{\"port\":1,\"token\":\"{TOKEN}\"}}")).unwrap();
    assert_eq!(read_token(&file).unwrap().expose(), TOKEN);
    fs::write(&file, "hunter2").unwrap();
    let said = read_token(&file).unwrap_err().to_string();
    assert!(said.contains("must hold the token") && !said.contains("hunter2"), "{said}");
    assert!(read_token(&tmp.path().join("none")).is_err());
}
