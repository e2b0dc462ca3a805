//! Contract 17 from the shim's side, and complaints P1 and P2: hostile frames cost themselves and
//! nothing else. Where the link lives on, every case ends with a call that passes.

use std::time::Duration;

use a2mcp::frame::codec::MAX_FRAME;
use a2mcp::frame::envelope::EnvelopeError;
use a2mcp::frame::{Envelope, FrameCodec, FrameError};
use base64::Engine as _;
use bytes::BytesMut;
use serde_json::Value;
use tokio_util::codec::Decoder as _;

use crate::support::frames::framed;
use crate::support::{Answer, Host, Setup, eventually, result_of, text_result};

const FIXTURES: &str = include_str!("../../ipc-schema/fixtures/frames.json");

/// A case of `frames.json`.
struct Fixture {
    name: String,
    bytes: Vec<u8>,
    expect: Vec<Value>,
}

fn fixtures() -> Vec<Fixture> {
    let cases: Vec<Value> = serde_json::from_str(FIXTURES).unwrap();
    cases
        .into_iter()
        .map(|case| Fixture {
            name: case["name"].as_str().unwrap().to_owned(),
            bytes: pieces(&case["bytes"], |text| {
                base64::engine::general_purpose::STANDARD.decode(text).unwrap()
            }),
            expect: case["expect"].as_array().unwrap().clone(),
        })
        .collect()
}

/// One piece, or a list of pieces, each perhaps repeated.
fn pieces(value: &Value, decode: fn(&str) -> Vec<u8>) -> Vec<u8> {
    match value {
        Value::String(text) => decode(text),
        Value::Array(list) => list.iter().flat_map(|piece| pieces(piece, decode)).collect(),
        Value::Object(piece) => {
            let times = piece["times"].as_u64().unwrap() as usize;
            decode(piece["repeat"].as_str().unwrap()).repeat(times)
        }
        other => panic!("no piece: {other}"),
    }
}

/// What the reader makes of `bytes` that arrive in chunks of `chunk`, in the words of the fixtures.
fn read(bytes: &[u8], chunk: usize) -> Vec<Value> {
    let mut codec = FrameCodec::default();
    let mut buffer = BytesMut::new();
    let mut seen = Vec::new();
    for part in bytes.chunks(chunk) {
        buffer.extend_from_slice(part);
        loop {
            match codec.decode(&mut buffer) {
                Ok(Some(payload)) => seen.push(judge(&payload)),
                Ok(None) => break,
                Err(FrameError::TooLarge(_)) => {
                    seen.push(serde_json::json!({"end": "frame too large"}));
                    return seen;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    match codec.decode_eof(&mut buffer) {
        Ok(None) => {}
        Err(FrameError::Cut { .. }) => seen.push(serde_json::json!({"incomplete": true})),
        other => panic!("{other:?}"),
    }
    seen
}

fn judge(payload: &[u8]) -> Value {
    let skipped = |reason| serde_json::json!({"skipped": reason});
    match (Envelope::parse(payload), std::str::from_utf8(payload)) {
        (Ok(_), Ok(text)) => serde_json::json!({"frame": text}),
        (Err(_), _) if payload.is_empty() => skipped("zero length"),
        (Err(EnvelopeError::NotJson), Err(_)) => skipped("invalid utf-8"),
        (Err(EnvelopeError::NotJson), Ok(_)) => skipped("invalid json"),
        (Err(EnvelopeError::NotAnObject), _) => skipped("not an object"),
        (Ok(_), Err(error)) => panic!("accepted though {error}"),
    }
}

#[test]
fn the_fixtures_mean_to_the_codec_what_they_say() {
    for case in fixtures() {
        let expected: Vec<Value> = case
            .expect
            .iter()
            .map(|entry| match entry.get("frame") {
                Some(text) => {
                    let text = pieces(text, |text| text.as_bytes().to_vec());
                    serde_json::json!({"frame": String::from_utf8(text).unwrap()})
                }
                None => entry.clone(),
            })
            .collect();
        let step = if case.bytes.len() > 1 << 16 { 4096 } else { 1 };
        for chunk in [usize::MAX, 7, step] {
            assert!(read(&case.bytes, chunk) == expected, "{} in chunks of {chunk}", case.name);
        }
        if case.bytes.len() < 512 {
            for cut in 1..case.bytes.len() {
                let mut codec = FrameCodec::default();
                let mut buffer = BytesMut::from(&case.bytes[..cut]);
                while let Ok(Some(_)) = codec.decode(&mut buffer) {}
                assert!(buffer.capacity() < 2 * MAX_FRAME, "{} cut at {cut}", case.name);
            }
        }
    }
}

#[test]
fn the_fixtures_that_leave_the_link_alive_leave_the_bridge_working() {
    let host = Host::start();
    let mut client = host.client();
    let mut bad = 0;
    for case in fixtures() {
        if case.expect.iter().any(|entry| entry.get("end").is_some() || entry.get("incomplete").is_some()) {
            continue;
        }
        host.send_bytes(&case.bytes);
        assert_eq!(client.call_text("echo", r#"{"n":1}"#), r#"{"n":1}"#, "after {}", case.name);
        bad += case.expect.iter().filter(|entry| entry.get("skipped").is_some()).count();
        // A frame that is an object but no message is counted as well.
        bad += case.expect.iter().filter(|entry| entry["frame"] == "{}").count();
    }
    assert_eq!(host.status()["badFrames"], bad);
    assert!(bad > 15);
    host.assert_only_frames();
}

#[test]
fn the_fixtures_that_end_the_link_end_the_sidecar_with_the_reason() {
    for case in fixtures() {
        if !case.expect.iter().any(|entry| entry.get("end").is_some()) {
            continue;
        }
        let mut host = Host::start();
        host.send_bytes(&case.bytes);
        assert_eq!(host.ends_within(Duration::from_secs(3)), Some(0), "{}", case.name);
        host.drained();
        let log = host.log();
        assert!(log.contains("exceeds the frame limit of 201326592"), "{}: {log}", case.name);
        assert_eq!(host.count("bridge/goodbye"), 0, "nothing is said on a link that is not trusted");
    }
}

#[test]
fn a_frame_cut_by_the_end_of_the_input_is_dropped() {
    for case in fixtures() {
        if !case.expect.iter().any(|entry| entry.get("incomplete").is_some()) {
            continue;
        }
        let mut host = Host::start();
        // An answer to a ping would complete the frame.
        host.fall_silent();
        host.send_bytes(&case.bytes);
        host.close_stdin();
        assert_eq!(host.ends_within(Duration::from_secs(3)), Some(0), "{}", case.name);
        assert!(host.log().contains("stream ended inside a frame"), "{}: {}", case.name, host.log());
    }
}

#[test]
fn frames_may_be_split_anywhere() {
    let host = Setup::default().handler(|_, _, _| Answer::Later).start();
    let mut client = host.client();
    client.start_call("1", "echo", "{}");
    let call = host.call_frame("echo");
    let mut bytes = framed("");
    bytes.extend(framed("[]"));
    bytes.extend(framed(format!(
        r#"{{"jsonrpc":"2.0","id":{},"result":{}}}"#,
        call["id"],
        result_of("in \u{1F980} pieces", false)
    )));
    bytes.extend(framed(r#"{"jsonrpc":"2.0","id":"p","method":"bridge/ping"}"#));
    // Each byte is a write of its own; the sidecar reads while we write.
    for byte in &bytes {
        host.send_bytes(std::slice::from_ref(byte));
    }
    assert_eq!(client.read().json()["result"]["content"][0]["text"], "in \u{1F980} pieces");
    assert_eq!(host.frame(|frame| frame["id"] == "p")["result"], serde_json::json!({}));
    assert_eq!(host.status()["badFrames"], 2);
}

#[test]
fn unknown_messages_provoke_nothing() {
    let host = Host::start();
    let mut client = host.client();
    let before = host.frames().len();
    for message in [
        r#"{"jsonrpc":"2.0","method":"bridge/unheard-of","params":{"x":1}}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/unheard-of"}"#,
        r#"{"jsonrpc":"2.0","method":"bridge/state"}"#,
        r#"{"jsonrpc":"2.0","method":"bridge/state","params":[7]}"#,
        r#"{"jsonrpc":"2.0","method":"bridge/result","params":{"callId":"00000000-0000-4000-8000-000000000000","result":{}}}"#,
        r#"{"jsonrpc":"2.0","method":"bridge/result","params":7}"#,
        r#"{"jsonrpc":"2.0","method":"bridge/closeStream","params":{"callId":"x"}}"#,
        r#"{"jsonrpc":"2.0","method":"bridge/goodbye","params":{"reason":"unheard-of"}}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"x","progress":1}}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/message","params":null}"#,
        // Answers that nobody waits for.
        r#"{"jsonrpc":"2.0","id":99999999,"result":{}}"#,
        r#"{"jsonrpc":"2.0","id":"text","result":{}}"#,
        r#"{"jsonrpc":"2.0","id":1.5,"error":{"code":1,"message":"x"}}"#,
        r#"{"jsonrpc":"2.0","id":null,"result":{}}"#,
        r#"{"jsonrpc":"2.0","id":-1,"result":{}}"#,
        r#"{"jsonrpc":"2.0","id":18446744073709551616,"result":{}}"#,
        r#"{"id":{},"result":{}}"#,
        // No messages at all.
        "{}",
        r#"{"jsonrpc":"2.0"}"#,
        r#"{"jsonrpc":"2.0","id":1}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":7,"result":{}}"#,
    ] {
        host.send(message);
        assert_eq!(client.call_text("echo", "{}"), "{}", "after {message}");
    }
    let methods: Vec<Value> = host.frames()[before..]
        .iter()
        .map(|frame| serde_json::from_str::<Value>(frame).unwrap()["method"].clone())
        .filter(|method| method != "tools/call" && method != "bridge/ping" && method != "bridge/ack")
        .collect();
    assert!(methods.is_empty(), "{methods:?}");
    assert_eq!(host.status()["badFrames"], 4);
}

#[test]
fn unknown_requests_get_method_not_found_under_their_own_id() {
    let host = Host::start();
    let answer = |id: &str, method: &str| {
        host.send(&format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{{}}}}"#));
        let begins = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":"#);
        eventually("the answer", || host.frames().into_iter().find(|frame| frame.starts_with(&begins)))
    };
    for (id, method) in
        [("\"a\"", "bridge/unheard-of"), ("\"\"", "bridge/hello"), ("12345678901234567890123", "bridge/")]
    {
        let answer = answer(id, method);
        assert!(answer.contains(&format!("-32601,\"message\":\"{method}: method not found")), "{answer}");
    }
    // Questions for a caller, when there is none.
    for (id, method) in [("7", "sampling/createMessage"), ("\"\\ud83e\\udd80\"", "tools/list"), ("0", "")] {
        let answer = answer(id, method);
        assert!(answer.contains("no caller"), "{answer}");
    }
    host.send(r#"{"jsonrpc":"2.0","id":"bad","method":"bridge/command","params":{"argv":7}}"#);
    let answer = host.frame(|frame| frame["id"] == "bad");
    assert_eq!(answer["error"]["code"], -32602);
    assert_eq!(host.client().call_text("echo", "{}"), "{}");
}

#[test]
fn unknown_members_are_ignored() {
    let host = Setup::default()
        .hello(serde_json::json!({
            "xNew": {"a": [1]}, "features": ["unheard-of", "approvals"], "titleX": null,
            "host": {
                "name": "test", "version": "0", "pid": std::process::id(), "cwd": "/", "home": "/",
                "x": [], "startTime": null
            },
        }))
        .handler(|_, _, _| Answer::Later)
        .start();
    let mut client = host.client();
    client.start_call("1", "echo", "{}");
    let call = host.call_frame("echo");
    host.send(r#"{"x":1,"jsonrpc":"2.0","method":"bridge/state","params":{"main":true,"approvals":[],"x":{}},"y":[]}"#);
    host.send(&format!(
        r#"{{"x":null,"id":{},"jsonrpc":"2.0","result":{}}}"#,
        call["id"],
        result_of("ok", false)
    ));
    assert_eq!(client.read().json()["result"]["content"][0]["text"], "ok");
    assert_eq!(host.status()["host"]["main"], true);
}

#[test]
fn the_first_of_two_answers_counts() {
    let host = Setup::default().handler(|_, _, _| Answer::Later).start();
    let mut client = host.client();
    for round in 0..10 {
        client.start_call("1", "echo", &format!(r#"{{"round":{round}}}"#));
        let call = host.call_with("round", round);
        host.answer(&call, &result_of("first", false));
        host.answer(&call, &result_of("second", false));
        let late =
            serde_json::json!({"jsonrpc": "2.0", "id": call["id"], "error": {"code": 1, "message": "third"}});
        host.send(&late.to_string());
        assert_eq!(client.read().json()["result"]["content"][0]["text"], "first");
    }
}

#[test]
fn the_shims_ping_is_answered() {
    let host = Host::start();
    for id in ["\"p\"", "0", "12345678901234567890123"] {
        host.send(&format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"bridge/ping","params":{{}}}}"#));
        let wanted = format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{}}}}"#);
        eventually("the answer", || host.frames().contains(&wanted).then_some(()));
    }
}

#[test]
fn a_first_frame_that_is_no_hello_ends_the_sidecar() {
    for first in [
        framed(r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#),
        framed(r#"{"jsonrpc":"2.0","method":"bridge/hello"}"#),
        framed(r#"{"jsonrpc":"2.0","id":1,"result":{}}"#),
        framed("[]"),
        framed("not json"),
        framed(""),
        framed(r#"{"jsonrpc":"2.0","id":1,"method":"bridge/hello"}"#),
        framed(r#"{"jsonrpc":"2.0","id":1,"method":"bridge/hello","params":[]}"#),
        framed(
            r#"{"jsonrpc":"2.0","id":1,"method":"bridge/hello","params":{"protocol":"1","instance":"x","host":{"name":"x","pid":1}}}"#,
        ),
        framed(
            r#"{"jsonrpc":"2.0","id":1,"method":"bridge/hello","params":{"protocol":1,"instance":"x","host":{"name":"x"}}}"#,
        ),
        b"Content-Length: 2\r\n\r\n{}".to_vec(),
        vec![0, 0, 1],
    ] {
        let shown = String::from_utf8_lossy(&first).into_owned();
        let mut host = Setup::default().first(first).spawn();
        host.close_stdin();
        assert_eq!(host.ends_within(Duration::from_secs(3)), Some(1), "{shown}");
        host.drained();
        assert!(host.log().contains("no hello from the host"), "{shown}: {}", host.log());
        assert!(!host.path("a2mcp.json").exists(), "nothing was made: {shown}");
    }
}

#[test]
fn another_frame_protocol_is_refused_with_the_way_out() {
    let mut host = Setup::default().hello(serde_json::json!({"protocol": 2})).spawn();
    let answer = host.expect_hello();
    assert_eq!(answer["error"]["code"], -32002);
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("protocol 1") && message.contains("a2mcp install omp"), "{message}");
    assert_eq!(host.ends_within(Duration::from_secs(3)), Some(78));
    assert!(!host.path("a2mcp.json").exists());
}

/// P2: whatever is logged, stdout stays the protocol.
#[test]
fn the_loudest_log_never_reaches_the_protocol() {
    let mut host = Setup::default().env("A2MCP_LOG", "trace").handler(|_, _, raw| text_result(raw)).start();
    host.send("[]");
    host.send_bytes(&framed(""));
    host.send(r#"{"jsonrpc":"2.0","id":99999999,"result":{}}"#);
    let mut client = host.client();
    let arguments = r#"{"key":"an-argument-that-must-not-be-logged"}"#;
    for _ in 0..20 {
        assert_eq!(client.call_text("echo", arguments), arguments);
    }
    host.http("POST", "/", &[("Host", "a.example")], b"{}");
    client.post("nonsense");
    host.close_stdin();
    host.wait();
    host.drained();
    let log = host.log();
    assert!(log.contains("TRACE") || log.contains("DEBUG"), "the level was taken: {log}");
    assert!(!log.contains(&host.token), "no token");
    assert!(!log.contains("must-not-be-logged"), "no argument");
}
