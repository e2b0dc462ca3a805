//! What a remote caller gets from a live omp session. All of these share one omp and leave it as it is.

use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::omp::{Omp, shared};
use crate::support::http::{Client, INITIALIZE};

/// 8 x 8 pixels.
pub(crate) const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAbElEQVR4nA3JQQEAMAgDMZSgpEqqhOepQAlKqmjLN1VFFypcTLHFFSmqmm7UuJlmm2vSP0QLCYsRK05EP0wbGZsxa87EP4YeNHiYYYcbMj+WXrR4mWWXW7I/jj50+JhjjztyP0IHBYcJGy4kPLAsVIExyOP/AAAAAElFTkSuQmCC";

/// The names that the sidecar itself adds to the host's, once they work.
const OWN_TOOLS: [&str; 3] = ["xfer_share", "xfer_status", "xfer_stop"];

fn text(result: &Value) -> &str {
    result["content"][0]["text"].as_str().unwrap_or_default()
}

#[test]
fn the_handshake_is_the_specs() {
    let omp = shared();
    let mut client = omp.client();
    let reply = client.post(INITIALIZE);
    let result = &reply.json()["result"];
    assert_eq!(result["protocolVersion"], "2025-11-25");
    assert_eq!(result["serverInfo"]["name"], "a2mcp");
    assert_eq!(result["capabilities"]["tools"]["listChanged"], true, "{result}");

    let reply = client.post(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
    assert_eq!((reply.status, reply.text().as_str()), (202, ""));
    assert_eq!(client.rpc("ping", "{}")["result"], json!({}));
}

/// Names, descriptions and schemas as omp itself has them, in its order; the only difference is that
/// every root says what it is.
#[test]
fn the_list_is_the_hosts_registry() {
    let omp = shared();
    let expected = omp.probe(&json!({"op": "catalogue"}));
    let registry = omp.probe(&json!({"op": "names"}));
    let list = omp.client().rpc("tools/list", "{}")["result"].clone();
    assert!(list["nextCursor"].is_null());
    let tools = list["tools"].as_array().unwrap();
    let expected = expected.as_array().unwrap();
    assert!(expected.len() >= 15, "{expected:?}");

    for (tool, expected) in tools.iter().zip(expected) {
        let mut schema = expected["inputSchema"].clone();
        schema["type"] = json!("object");
        let expected = json!({
            "name": expected["name"], "description": expected["description"], "inputSchema": schema,
        });
        assert_eq!(tool, &expected);
    }
    let names: Vec<&str> = tools.iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    let (host, own) = names.split_at(expected.len());
    assert_eq!(json!(host), registry);
    assert!(own.is_empty() || own == OWN_TOOLS, "{own:?}");
}

/// One tool whose schema is not what the spec wants costs nobody anything.
#[test]
fn an_odd_schema_is_listed_and_its_arguments_pass() {
    let mut client = shared().client();
    let list = client.rpc("tools/list", "{}");
    let tools = list["result"]["tools"].as_array().unwrap();
    let odd = tools.iter().find(|tool| tool["name"] == "probe_odd").unwrap();
    assert_eq!(odd["inputSchema"]["type"], "object");
    assert_eq!(odd["inputSchema"]["anyOf"].as_array().unwrap().len(), 2);
    assert_eq!(client.call_text("probe_odd", r#"{"z":1,"a":[null,"ü"]}"#), r#"{"z":1,"a":[null,"ü"]}"#);
}

#[test]
fn read_gives_the_file() {
    let omp = shared();
    std::fs::write(omp.home.work().join("read.txt"), "first line\nsecond line\n").unwrap();
    let result = omp.client().call("read", r#"{"path":"read.txt"}"#);
    assert_eq!(result["isError"], false);
    assert!(text(&result).contains("first line") && text(&result).contains("second line"), "{result}");
    // What the host keeps for itself stays there.
    assert_eq!(result.as_object().unwrap().len(), 2, "{result}");
}

#[test]
fn bash_gives_stdout_and_the_exit_code() {
    let mut client = shared().client();
    let result = client.call("bash", r#"{"command":"echo from-stdout; pwd"}"#);
    assert_eq!(result["isError"], false);
    assert!(text(&result).contains("from-stdout"), "{result}");
    assert!(text(&result).contains(shared().home.work().to_str().unwrap()), "the host's directory: {result}");

    let result = client.call("bash", r#"{"command":"echo before; exit 3"}"#);
    assert_eq!(result["isError"], true);
    assert!(text(&result).contains("before") && text(&result).contains("code 3"), "{result}");
}

#[test]
fn what_was_written_can_be_read() {
    let omp = shared();
    let mut client = omp.client();
    let content = "written by a remote agent: \u{4f60}\u{597d} \u{1f600}\n";
    let result = client.call("write", &json!({"path": "written.txt", "content": content}).to_string());
    assert_eq!(result["isError"], false, "{result}");
    assert_eq!(std::fs::read_to_string(omp.home.work().join("written.txt")).unwrap(), content);
    assert!(client.call_text("read", r#"{"path":"written.txt"}"#).contains(content.trim()));
}

#[test]
fn an_image_comes_as_an_image() {
    let omp = shared();
    std::fs::write(omp.home.work().join("image.png"), STANDARD.decode(PNG).unwrap()).unwrap();
    let result = omp.client().call("read", r#"{"path":"image.png"}"#);
    assert_eq!(result["isError"], false, "{result}");
    let blocks = result["content"].as_array().unwrap();
    let image = blocks.iter().find(|block| block["type"] == "image");
    let image = image.unwrap_or_else(|| panic!("no image block: {result}"));
    assert!(image["mimeType"].as_str().unwrap().starts_with("image/"), "{image}");
    // omp re-encodes what it shows; it is an image all the same.
    let bytes = STANDARD.decode(image["data"].as_str().unwrap()).unwrap();
    assert!(bytes.len() > 50, "{} bytes", bytes.len());
}

/// A caller cannot find out what exists by how it is refused.
#[test]
fn what_is_not_exposed_is_refused_in_the_same_words() {
    let mut client = shared().client();
    let mut refusals = Vec::new();
    for params in [
        r#"{"name":"no_such_tool","arguments":{}}"#,
        r#"{"name":"xd://bash","arguments":{"command":"touch proof"}}"#,
        r#"{"name":"BASH","arguments":{"command":"touch proof"}}"#,
        r#"{"name":"","arguments":{}}"#,
        r#"{"name":7,"arguments":{}}"#,
        r#"{"arguments":{}}"#,
    ] {
        let result = client.rpc("tools/call", params)["result"].clone();
        assert_eq!(result["isError"], true, "{params}: {result}");
        assert!(text(&result).contains("not exposed"), "{params}: {result}");
        refusals.push(result);
    }
    refusals.dedup();
    assert_eq!(refusals.len(), 1, "{refusals:#?}");
    assert!(!shared().home.work().join("proof").exists());
}

#[test]
fn what_a_tool_throws_is_its_answer() {
    let mut client = shared().client();
    for (tool, arguments, expected) in [
        ("probe_throw", "{}", "the probe threw: \u{201c}as told\u{201d}"),
        ("probe_throw_string", "{}", "a bare string"),
        ("read", r#"{"path":"no such file"}"#, "Path 'no such file' not found"),
    ] {
        let result = client.call(tool, arguments);
        assert_eq!(result["isError"], true, "{result}");
        assert_eq!(text(&result), expected);
    }
    // Whatever the host makes of arguments it cannot use, it is an answer.
    for arguments in ["{}", r#"{"path":42}"#, "[]", "7", r#""text""#, "null"] {
        let result = client.call("read", arguments);
        assert_eq!(result["isError"], true, "{arguments}: {result}");
        assert!(!text(&result).is_empty(), "{arguments}: {result}");
    }
}

#[test]
fn content_of_an_unknown_kind_is_folded_into_text() {
    let result = shared().client().call("probe_kinds", "{}");
    let folded = result["content"][1]["text"].as_str().unwrap();
    let folded: Value = serde_json::from_str(folded).unwrap();
    assert_eq!(folded, json!({"type": "thinking", "thinking": "a kind MCP does not know"}));
    assert!(!result.to_string().contains("secret"), "{result}");
}

#[test]
fn sixty_four_calls_at_once_each_get_their_own_answer() {
    let omp = shared();
    let client = omp.client();
    let mut callers: Vec<Client> = (0..64).map(|_| client.again()).collect();
    for (index, caller) in callers.iter_mut().enumerate() {
        let arguments = match index % 4 {
            0 => {
                std::fs::write(omp.home.work().join(format!("many-{index}")), format!("answer-{index}-"))
                    .unwrap();
                ("read", json!({"path": format!("many-{index}")}))
            }
            1 => ("bash", json!({"command": format!("echo answer-{index}-")})),
            _ => ("probe_odd", json!({"a": format!("answer-{index}-")})),
        };
        // All with the same id: it says nothing about whose the answer is.
        caller.start_call("1", arguments.0, &arguments.1.to_string());
    }
    for (index, caller) in callers.iter_mut().enumerate() {
        let reply = caller.read().json();
        assert_eq!(reply["result"]["isError"], false, "{reply}");
        assert!(text(&reply["result"]).contains(&format!("answer-{index}-")), "{index}: {reply}");
    }
}

/// What the operator sees of remote calls: one card each, never the same id twice.
#[test]
fn a_remote_call_is_drawn_in_the_host() {
    let omp = shared();
    let mut client = omp.client();
    for round in 1..=2 {
        assert_eq!(client.call_text("probe_odd", r#"{"drawn":true}"#), r#"{"drawn":true}"#);
        let mut ids = Vec::new();
        for n in 1..=round {
            let started = omp.nth_line("no card", n, |line| {
                line["type"] == "tool_execution_start" && line["args"] == json!({"drawn": true})
            });
            assert_eq!(started["toolName"], "probe_odd");
            let who = format!("asked by raw (session {})", &client.session[..8]);
            assert_eq!(started["intent"], format!("probe_odd, {who}"));
            let ended = omp.line("no end of the card", |line| {
                line["type"] == "tool_execution_end" && line["toolCallId"] == started["toolCallId"]
            });
            assert_eq!(ended["isError"], false, "{ended}");
            assert!(ended["result"]["content"][0]["text"].as_str().unwrap().ends_with(&format!("[{who}]")));
            ids.push(started["toolCallId"].to_string());
        }
        ids.dedup();
        assert_eq!(ids.len(), round);
    }
}

/// Whoever can look at processes or run commands does not learn the token by it.
#[test]
fn the_token_is_in_no_argument_and_no_environment() {
    let omp = shared();
    let token = omp.home.token();
    let mut seen = 0;
    for process in crate::processes::of(omp.home.path()) {
        for file in ["cmdline", "environ"] {
            let bytes = std::fs::read(format!("/proc/{}/{file}", process.pid)).unwrap_or_default();
            assert!(!String::from_utf8_lossy(&bytes).contains(&token), "{file} of {process:?}");
            seen += usize::from(!bytes.is_empty());
        }
    }
    assert!(seen >= 4, "omp and the sidecar at least");
    let text = omp.client().call_text("bash", r#"{"command":"env; set"}"#);
    assert!(text.contains("HOME=") && !text.contains(&token), "{text}");
}

/// The host works for half a second on these; nobody else notices.
#[test]
fn thirty_megabytes_of_arguments_pass_and_ping_answers_meanwhile() {
    const SIZE: usize = 30_000_000;
    let omp = shared();
    let mut writer = omp.client();
    let mut pinging = omp.client();
    let content = "0123456789abcdef".repeat(SIZE / 16);
    let done = std::thread::spawn(move || {
        let result = writer.call("write", &format!(r#"{{"path":"large.txt","content":"{content}"}}"#));
        assert_eq!(result["isError"], false, "{result}");
    });
    let mut times = Vec::new();
    while !done.is_finished() {
        let began = Instant::now();
        assert_eq!(pinging.rpc("ping", "{}")["result"], json!({}));
        times.push(began.elapsed());
    }
    done.join().unwrap();
    assert_eq!(std::fs::metadata(omp.home.work().join("large.txt")).unwrap().len(), SIZE as u64);

    times.sort();
    let at = |per_mille: usize| times[(times.len() - 1) * per_mille / 1000];
    eprintln!(
        "{} pings during a write of 30 MB: p50 {:?}, p99 {:?}, worst {:?}",
        times.len(),
        at(500),
        at(990),
        at(1000)
    );
    assert!(times.len() > 20, "{}", times.len());
    assert!(at(990) < Duration::from_millis(500), "{:?}", at(990));
}

/// omp's own loop stands still for three seconds: what the sidecar knows, it goes on saying.
#[test]
fn a_blocked_host_does_not_block_the_endpoint() {
    const BLOCKED: Duration = Duration::from_secs(3);
    let omp: &Omp = shared();
    let mut client = omp.client();
    let list = client.rpc("tools/list", "{}");
    let mut waiting = client.again();
    omp.probe(&json!({"op": "block", "millis": BLOCKED.as_millis() as u64}));

    // Newcomers are few: each is one of 64 sessions, and the others here need theirs.
    let began = Instant::now();
    let mut longest = Duration::ZERO;
    for _ in 0..8 {
        let before = Instant::now();
        let mut newcomer = omp.client();
        assert_eq!(newcomer.rpc("ping", "{}")["result"], json!({}));
        assert_eq!(newcomer.rpc("tools/list", "{}")["result"], list["result"]);
        longest = longest.max(before.elapsed());
    }
    // A call that the host answers late shows that it was blocked all the while.
    while began.elapsed() < BLOCKED / 10 {
        assert_eq!(client.rpc("ping", "{}")["result"], json!({}));
    }
    let call_sent = Instant::now();
    waiting.start_call("1", "probe_odd", "{}");
    while began.elapsed() < BLOCKED / 2 {
        let before = Instant::now();
        assert_eq!(client.rpc("tools/list", "{}")["result"], list["result"]);
        longest = longest.max(before.elapsed());
    }
    let answer = waiting.read().json();
    assert_eq!(answer["result"]["isError"], false, "{answer}");
    assert!(call_sent.elapsed() > BLOCKED / 2, "the host was not blocked");
    eprintln!("while omp was blocked, the slowest answer took {longest:?}");
    assert!(longest < Duration::from_secs(1), "{longest:?}");
}
