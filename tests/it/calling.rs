//! Contract 16: `a2mcp call` against a real bridge; what it prints, and what it says when a call is cut off.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use a2mcp::process::Identity;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::reference::{a2mcp, identity};
use crate::support::wrap::Wrap;
use crate::support::{cli, eventually};

/// Begins a call that never ends by itself, and waits until the server runs it.
fn hanging(wrap: &Wrap) -> Child {
    let mut command = a2mcp(&["call", "hang", "--agent-dir"]);
    command.arg(wrap.dir.path());
    begun(wrap, command)
}

/// Runs a command that calls `hang`, and waits until the server runs it.
fn begun(wrap: &Wrap, mut command: Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    wrap.until_noted("call", 1);
    child
}

/// Exit code and stderr of a call that had no result.
fn ended(child: Child) -> (Option<i32>, String) {
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_result_without_blocks_is_its_structured_content() {
    let wrap = Wrap::start(&[]);
    let call = |odd: Value, more: &[&str]| {
        let odd = odd.to_string();
        let args = [&["call", "odd", odd.as_str()], more].concat();
        let (code, out, err) = cli(&args, Some(wrap.dir.path()), &Default::default());
        (code, out.trim_end().to_owned(), err)
    };
    let structured = json!({"result": {"content": [], "structuredContent": {"n": 12345678901234567890_u64}}});
    let (code, out, err) = call(structured, &[]);
    assert_eq!((code, out.as_str()), (0, r#"{"n": 12345678901234567890}"#), "{err}");
    let both =
        json!({"result": {"content": [{"type": "text", "text": "words"}], "structuredContent": {"n": 1}}});
    assert_eq!(call(both, &[]).1, "words");
}

/// A bridge that answers every call with `error`; its URL.
fn refusing(error: &Value) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    let bodies = [
        json!({"jsonrpc": "2.0", "id": 1, "result": {"protocolVersion": "2025-11-25"}}),
        json!({}),
        json!({"jsonrpc": "2.0", "id": 2, "error": error}),
    ];
    std::thread::spawn(move || {
        // A session for each command: greeting, notification, call, and its end, which nobody waits for.
        for body in bodies.iter().chain([&Value::Null]).cycle() {
            let mut stream = listener.accept().unwrap().0;
            let mut asked = BufReader::new(&stream);
            let (mut line, mut length) = (String::new(), 0);
            while asked.read_line(&mut line).unwrap() > 2 {
                let value = line.to_ascii_lowercase();
                let value = value.strip_prefix("content-length:").map(|value| value.trim().parse().unwrap());
                length = value.unwrap_or(length);
                line.clear();
            }
            asked.read_exact(&mut vec![0; length]).unwrap();
            let body = body.to_string();
            let head =
                "HTTP/1.1 200 OK\r\nMcp-Session-Id: s\r\nContent-Type: application/json\r\nContent-Length:";
            stream.write_all(format!("{head} {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
        }
    });
    url
}

#[test]
fn an_error_is_printed_whole_for_machines() {
    let error = json!({"code": -32099, "message": "not today", "data": {"until": "tomorrow"}});
    let url = refusing(&error);
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "0123456789abcdef0123456789abcdef").unwrap();
    let call = ["call", "x", "--url", &url, "--token-file", token.to_str().unwrap()];
    let (code, out, err) = cli(&[&call[..], &["--json"]].concat(), None, &Default::default());
    assert_eq!((code, serde_json::from_str::<Value>(&out).unwrap()), (1, error), "{err}");
    let (code, out, err) = cli(&call, None, &Default::default());
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.contains("not today (-32099)"), "{err}");
}

#[test]
fn a_call_whose_bridge_is_gone_ends_soon_and_says_who_does_not_listen() {
    let wrap = Wrap::start_with(r#"{"streamAfterMs":0}"#, &[], &[]);
    let child = hanging(&wrap);
    // Asked for after the call's stream has begun.
    let status = wrap.status();
    let begun = Instant::now();
    let keeper: Identity = identity(&status["keeper"]["pid"]);
    // Stopped first: it shall not have time to answer.
    let sidecar = identity(&status["pid"]);
    sidecar.signal(Signal::STOP);
    for process in [wrap.host(), keeper, sidecar] {
        process.signal(Signal::KILL);
    }
    let (code, err) = ended(child);
    assert_eq!(code, Some(3), "{err}");
    assert!(err.contains(&format!("nobody listens at 127.0.0.1:{} any more", wrap.port())), "{err}");
    assert!(err.contains("refused") && !err.contains("run the same command again"), "{err}");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn a_call_under_a_token_that_is_replaced_says_so() {
    let wrap = Wrap::start(&[]);
    let child = hanging(&wrap);
    let (code, _, err) = cli(&["rotate"], Some(wrap.dir.path()), &Default::default());
    assert_eq!(code, 0, "{err}");
    let (code, err) = ended(child);
    assert_eq!(code, Some(4), "{err}");
    assert!(err.contains("the token was replaced after the call had been sent"), "{err}");
}

/// What `a2mcp connect python` prints, about to call `hang`.
fn script(wrap: &Wrap) -> Command {
    let url = format!("http://127.0.0.1:{}/mcp", wrap.port());
    let (code, script, err) = cli(&["connect", "python", "--url", &url], None, &Default::default());
    assert_eq!(code, 0, "{err}");
    let mut command = Command::new("python3");
    command.args(["-c", &script, "--url", &url, "call", "hang"]).env("A2MCP_TOKEN", wrap.token());
    command
}

#[test]
fn a_call_whose_connection_breaks_says_that_it_may_be_sent_again() {
    for by_script in [false, true] {
        let wrap = Wrap::start_with(r#"{"streamAfterMs":60000}"#, &[], &[]);
        let child = if by_script { begun(&wrap, script(&wrap)) } else { hanging(&wrap) };
        wrap.sidecar().signal(Signal::KILL);
        let (code, err) = ended(child);
        assert_eq!(code, Some(3), "{err}");
        assert!(
            err.contains("the connection was lost") && err.contains("run the same command again"),
            "{err}"
        );
        assert_eq!(wrap.noted("call").len(), 1);
    }
}

#[test]
fn an_interrupt_cancels_the_call_and_says_so() {
    for streams in [0, 60_000] {
        for by_script in [false, true] {
            let wrap = Wrap::start_with(&json!({ "streamAfterMs": streams }).to_string(), &[], &[]);
            let child = if by_script { begun(&wrap, script(&wrap)) } else { hanging(&wrap) };
            Identity::of(child.id()).unwrap().signal(Signal::INT);
            let (code, err) = ended(child);
            assert_eq!(code, Some(130), "{err}");
            assert!(err.contains("interrupted; the call was cancelled"), "{err}");
            wrap.until_noted("cancelled", 1);
            let records = || wrap.audit().into_iter().filter(|record| record["tool"] == "hang");
            let done = || records().find(|record| record["phase"] == "done");
            assert_eq!(eventually("its end", done)["outcome"], "cancelled");
        }
    }
}
