//! Contract 4, `tools/call`: outcomes, crowds, cancels, and what is rewritten on the way.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::frames::raw_arguments;
use crate::support::http::Client;
use crate::support::{Answer, Host, Setup, eventually, result_of, text_result};

const EMPTY: &str = r#"{"content":[],"isError":false}"#;

/// Sends `notifications/cancelled` for the request `id` of the client's session.
fn cancel(client: &Client, id: &str) {
    let body = format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id},"reason":"changed my mind"}}}}"#
    );
    let reply = client.again().post(&body);
    assert_eq!((reply.status, reply.body.len()), (202, 0));
}

/// The cancel that the host got for the call of `frame`.
fn cancelled_at_host(host: &Host, frame: &Value) -> bool {
    host.frames().iter().any(|text| {
        let sent: Value = serde_json::from_str(text).unwrap();
        sent["method"] == "notifications/cancelled" && sent["params"]["requestId"] == frame["id"]
    })
}

/// Reads the frames up to now: everything the sidecar queued before this is at the host afterwards.
fn settle(host: &Host, name: &str) {
    host.ask(name, "bridge/ping", "{}");
}

#[test]
fn results_errors_and_refusals_have_their_own_shapes() {
    let host = Setup::default()
        .config(r#"{"deny":["denied"]}"#)
        .handler(|name, _, raw| match name {
            "echo" => text_result(raw),
            "throws" => Answer::Result(result_of("Tool call denied by user: bash", true)),
            "error" => Answer::Error("the host's own words: \u{1F980} \"quoted\"".into()),
            _ => Answer::Result(result_of(a2mcp::mcp::call::NOT_EXPOSED, true)),
        })
        .start();
    let mut client = host.client();

    // 1: the tool's own result, or what it threw, verbatim.
    client.start_call("1", "echo", r#"{"a":1}"#);
    assert_eq!(
        client.read().text(),
        r#"{"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"{\"a\":1}"}],"isError":false}}"#
    );
    client.start_call("2", "throws", "{}");
    assert_eq!(
        client.read().text(),
        r#"{"jsonrpc":"2.0","id":2,"result":{"content":[{"type":"text","text":"Tool call denied by user: bash"}],"isError":true}}"#
    );
    let error = client.call("error", "{}");
    assert_eq!(error["isError"], true);
    assert_eq!(error["content"][0]["text"], "the host's own words: \u{1F980} \"quoted\"");
    // Absent arguments are an empty object; other shapes are the tool's to judge.
    let absent = client.rpc("tools/call", r#"{"name":"echo"}"#);
    assert_eq!(absent["result"]["content"][0]["text"], "{}");
    assert_eq!(client.call_text("echo", "[1]"), "[1]");
    assert_eq!(client.call_text("echo", "null"), "null");

    // 2: the same words for everything that is not exposed.
    let unknown = client.call("no_such_tool", "{}");
    assert_eq!(unknown["isError"], true);
    assert!(unknown["content"][0]["text"].as_str().unwrap().contains("not exposed"));
    for params in [
        r#"{"name":"denied"}"#,
        r#"{"name":"xd://bash"}"#,
        r#"{"name":""}"#,
        r#"{"name":7}"#,
        r#"{"name":null}"#,
        r#"{"name":{"a":1}}"#,
        r#"{"arguments":{}}"#,
        "{}",
        "[]",
        "7",
        "null",
    ] {
        assert_eq!(client.rpc("tools/call", params)["result"], unknown, "{params}");
    }
    let reply = client.post(r#"{"jsonrpc":"2.0","id":9,"method":"tools/call"}"#).json();
    assert_eq!(reply["result"], unknown, "no parameters at all");
}

#[test]
fn a_host_without_a_main_session_says_so_itself() {
    let host = Setup::default()
        .handler(|_, _, _| Answer::Result(result_of(a2mcp::mcp::call::NO_MAIN, true)))
        .start();
    let result = host.client().call("echo", "{}");
    assert_eq!(result["isError"], true);
    assert_eq!(result["content"][0]["text"], "main session not available");
}

#[test]
fn clients_that_share_their_ids_never_see_each_others_answers() {
    let host = Setup::default().handler(|_, _, _| Answer::Later).start();
    let ids = ["1", "\"1\"", "0"];
    let mut waiting = Vec::new();
    for number in 0..20 {
        let client = host.client();
        for (at, id) in ids.iter().enumerate() {
            let mut connection = client.again();
            connection.start_call(id, "echo", &format!(r#"{{"who":{}}}"#, number * 3 + at));
            waiting.push((connection, *id, number * 3 + at));
        }
    }
    // Answered in an order that has nothing to do with that of the calls.
    for step in 0..60_u64 {
        let who = (step * 37 + 11) % 60;
        let frame = host.call_with("who", who);
        host.answer(&frame, &result_of(&format!("for {who}"), false));
    }
    for (connection, id, who) in &mut waiting {
        let text = connection.read().text();
        assert_eq!(
            text,
            format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{}}}"#, result_of(&format!("for {who}"), false))
        );
    }
}

#[test]
fn sixty_four_calls_run_at_once_and_each_has_a_call_id_of_its_own() {
    let host = Setup::default().handler(|_, _, _| Answer::Later).start();
    let first = host.client();
    let mut waiting: Vec<_> = (0..64)
        .map(|number| {
            let mut client = first.again();
            client.start_call(&number.to_string(), "echo", &format!(r#"{{"who":{number}}}"#));
            client
        })
        .collect();
    eventually("all calls at the host", || (host.count("tools/call") == 64).then_some(()));
    let mut call_ids = HashSet::new();
    for number in (0..64).rev() {
        let frame = host.call_with("who", number);
        let meta = &frame["params"]["_meta"];
        assert_eq!(meta["progressToken"], meta["a2mcp/call"]["callId"]);
        assert!(call_ids.insert(meta["a2mcp/call"]["callId"].as_str().unwrap().to_owned()));
        host.answer(&frame, &result_of(&number.to_string(), false));
    }
    for (number, client) in waiting.iter_mut().enumerate() {
        let reply = client.read().json();
        assert_eq!(
            (&reply["id"], &reply["result"]["content"][0]["text"]),
            (&number.into(), &number.to_string().into())
        );
    }
    assert_eq!(host.status()["served"], 64);
}

#[test]
fn ping_answers_while_every_call_hangs() {
    let host = Host::start();
    let first = host.client();
    let mut hanging: Vec<_> = (0..50)
        .map(|number| {
            let mut client = first.again();
            client.start_call(&number.to_string(), "hang", "{}");
            client
        })
        .collect();
    eventually("all calls at the host", || (host.count("tools/call") == 50).then_some(()));
    let mut client = first.again();
    for _ in 0..20 {
        let begun = Instant::now();
        assert!(client.rpc("ping", "{}")["result"].is_object());
        assert!(begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());
    }
    assert_eq!(client.call_text("echo", r#"{"x":1}"#), r#"{"x":1}"#, "other calls pass too");
    let frames = host.frames();
    for frame in frames.iter().filter(|frame| frame.contains(r#""name":"hang""#)) {
        host.answer(&serde_json::from_str(frame).unwrap(), EMPTY);
    }
    for client in &mut hanging {
        assert!(client.read().json()["result"].is_object());
    }
}

#[test]
fn a_cancel_reaches_the_host_at_once_and_its_caller_gets_an_error() {
    let host = Host::start();
    let mut client = host.client();
    client.start_call("\"a\"", "hang", "{}");
    let frame = host.call_frame("hang");
    let begun = Instant::now();
    cancel(&client, "\"a\"");
    let cancelled = host.frame(|frame| frame["method"] == "notifications/cancelled");
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert_eq!(cancelled["params"]["requestId"], frame["id"]);
    let reply = client.read();
    assert_eq!(reply.status, 200);
    assert_eq!(reply.text(), r#"{"jsonrpc":"2.0","id":"a","error":{"code":-32800,"message":"cancelled"}}"#);
    // What the host still answers is nobody's.
    host.answer(&frame, EMPTY);
    assert_eq!(client.call_text("echo", "{}"), "{}");
}

#[test]
fn a_cancel_before_dispatch_keeps_the_call_from_the_host() {
    let mut host = Setup::default().without_list().spawn();
    host.expect_hello();
    let mut client = host.client();
    client.start_call("1", "echo", "{}");
    eventually("the call", || (host.status()["calls"][0]["phase"] == "waiting").then_some(()));
    cancel(&client, "1");
    assert_eq!(client.read().json()["error"]["code"], -32800);
    let question = host.frame(|frame| frame["method"] == "tools/list");
    host.answer(&question, r#"{"tools":[{"name":"echo"}]}"#);
    assert_eq!(client.call_text("echo", r#"{"next":1}"#), r#"{"next":1}"#);
    assert_eq!(host.count("tools/call"), 1);
    assert_eq!(host.count("notifications/cancelled"), 0);
}

/// The frame of the call waits in the sidecar because the pipe is full.
#[test]
fn a_cancel_while_the_pipe_is_full_keeps_the_call_from_the_host() {
    let host = Setup::default().handler(|_, _, _| Answer::Later).start();
    host.stop_reading();
    let first = host.client();
    let big = format!(r#"{{"who":"big","pad":"{}"}}"#, "x".repeat(3 << 20));
    let running = |count: usize| {
        eventually("the calls on their way", || {
            let status = host.status();
            let calls = status["calls"].as_array().unwrap();
            (calls.iter().filter(|call| call["phase"] == "running").count() == count).then_some(())
        });
    };
    let mut filler = first.again();
    filler.start_call("1", "echo", &big);
    running(1);
    let mut small = first.again();
    small.start_call("2", "echo", r#"{"who":"small"}"#);
    running(2);
    cancel(&first, "2");
    assert_eq!(small.read().json()["error"]["code"], -32800, "answered while the pipe is full");
    host.read_again();
    let frame = host.call_with("who", "big");
    host.answer(&frame, EMPTY);
    assert!(filler.read().json()["result"].is_object());
    settle(&host, "settled");
    assert_eq!(host.count("tools/call"), 1, "it was never sent");
    assert_eq!(host.count("notifications/cancelled"), 0);
    assert!(!cancelled_at_host(&host, &frame));
}

#[test]
fn a_cancel_after_the_result_is_ignored() {
    let host = Host::start();
    let mut client = host.client();
    client.start_call("1", "echo", "{}");
    assert!(client.read().json()["result"].is_object());
    for id in ["1", "2", "\"1\"", "null", "{}", "[]"] {
        cancel(&client, id);
    }
    let odd = client.again().post(r#"{"jsonrpc":"2.0","method":"notifications/cancelled"}"#);
    assert_eq!(odd.status, 202);
    assert_eq!(client.call_text("echo", "{}"), "{}");
    settle(&host, "settled");
    assert_eq!(host.count("notifications/cancelled"), 0);
}

/// Result and cancel cross: whichever wins, there is one answer and one end in the audit file.
#[test]
fn a_cancel_that_crosses_the_result_ends_the_call_once() {
    let host = Setup::default().handler(|_, _, _| Answer::Later).start();
    let mut client = host.client();
    for round in 0..50 {
        client.start_call("1", "echo", &format!(r#"{{"round":{round}}}"#));
        let frame = host.call_with("round", round);
        std::thread::scope(|scope| {
            scope.spawn(|| host.answer(&frame, EMPTY));
            cancel(&client, "1");
        });
        let reply = client.read().json();
        assert!(reply["result"].is_object() || reply["error"]["code"] == -32800, "{reply}");
    }
    let records = host.audit();
    assert_eq!(records.iter().filter(|record| record["phase"] == "done").count(), 50);
    assert_eq!(host.status()["calls"], serde_json::json!([]));
}

#[test]
fn a_cancel_touches_only_its_own_session_and_the_id_of_its_own_type() {
    let host = Setup::default().handler(|_, _, _| Answer::Later).start();
    let (one, other) = (host.client(), host.client());
    let start = |client: &Client, id: &str, who: &str| {
        let mut connection = client.again();
        connection.start_call(id, "echo", &format!(r#"{{"who":"{who}"}}"#));
        (connection, host.call_with("who", who))
    };
    let (mut hit, hit_frame) = start(&one, "1", "hit");
    let (mut string, string_frame) = start(&one, "\"1\"", "string");
    let (mut foreign, foreign_frame) = start(&other, "1", "foreign");
    cancel(&one, "1");
    assert_eq!(hit.read().json()["error"]["code"], -32800);
    settle(&host, "settled");
    assert!(cancelled_at_host(&host, &hit_frame));
    for (client, frame) in [(&mut string, &string_frame), (&mut foreign, &foreign_frame)] {
        assert!(!cancelled_at_host(&host, frame));
        host.answer(frame, EMPTY);
        assert!(client.read().json()["result"].is_object());
    }
}

#[test]
fn a_caller_that_leaves_cancels_nothing() {
    let host = Setup::default().config(r#"{"replayWindowSeconds":1}"#).start();
    let mut first = host.client();
    first.call("echo", "{}"); // Opens the audit file.
    let before = host.descriptors();
    let mut leaving: Vec<_> = (0..5)
        .map(|number| {
            let mut client = first.again();
            client.start_call(&number.to_string(), "hang", &format!(r#"{{"who":{number}}}"#));
            host.call_with("who", number);
            client
        })
        .collect();
    // Two by an orderly close, three by a reset.
    for client in &leaving[..3] {
        let linger = Some(Duration::ZERO);
        rustix::net::sockopt::set_socket_linger(client.connection.socket(), linger).unwrap();
    }
    leaving.clear();
    eventually("the sidecar noticed", || (host.descriptors() <= before).then_some(()));
    settle(&host, "settled");
    assert_eq!(host.count("notifications/cancelled"), 0);
    assert_eq!(host.status()["calls"].as_array().unwrap().len(), 5, "they run on");
    for number in 0..5 {
        host.answer(&host.call_with("who", number), EMPTY);
    }
    eventually("their ends in the audit file", || {
        let done =
            host.audit().into_iter().filter(|record| record["phase"] == "done" && record["isError"] == false);
        (done.count() == 6).then_some(())
    });
    eventually("the end of the window", || (host.status()["calls"] == serde_json::json!([])).then_some(()));
}

#[test]
fn meta_of_the_bridge_is_its_own_and_the_rest_passes() {
    let host = Host::start();
    let mut client = host.client();
    let reply = client.rpc(
        "tools/call",
        r#"{"task":{"ttl":1.50},"_meta":{"progressToken":7,"x/y":[1.50],"a2mcp/call":{"callId":"forged"},"a2mcp/client":{"sid":"forged"},"a2mcp/new":1},"name":"echo","arguments":{"_meta":{"a2mcp/call":1}}}"#,
    );
    assert_eq!(reply["result"]["content"][0]["text"], r#"{"_meta":{"a2mcp/call":1}}"#);
    let (text, frame) = host.frame_text(|frame| frame["method"] == "tools/call");
    let params = &frame["params"];
    let meta = params["_meta"].as_object().unwrap();
    let call_id = meta["a2mcp/call"]["callId"].as_str().unwrap();
    assert!(uuid::Uuid::parse_str(call_id).is_ok(), "{call_id}");
    assert_eq!(meta["progressToken"], call_id, "the caller's token stays here");
    assert_eq!(meta["a2mcp/client"], serde_json::json!({"sid": client.session, "name": "raw"}));
    assert!(text.contains(r#""x/y":[1.50]"#) && text.contains(r#""task":{"ttl":1.50}"#), "{text}");
    assert!(!text.contains("forged") && !text.contains("a2mcp/new"), "{text}");
    let note = meta["a2mcp/call"]["note"].to_string();
    assert!(note.len() <= 8 << 10 && !note.contains(&host.token));
    assert!(text.starts_with(r#"{"jsonrpc":"2.0","id":"#), "{text}");
}

/// 30 MB of arguments lie in the pipe, and what needs no pipe stays quick.
#[test]
fn a_large_call_in_the_pipe_holds_up_nothing_that_needs_no_host() {
    let host = Setup::default().handler(|_, _, raw| text_result(&raw.len().to_string())).start();
    let first = host.client();
    host.stop_reading();
    let arguments = format!(r#"{{"pad":"{}"}}"#, "0123456789".repeat(3_000_000));
    let mut large = first.again();
    std::thread::scope(|scope| {
        let length = arguments.len();
        let sender = scope.spawn(|| {
            large.start_call("1", "echo", &arguments);
            large.read()
        });
        let mut client = first.again();
        let mut measured = 0;
        let mut quick = |what: &str| {
            let begun = Instant::now();
            assert!(client.rpc("ping", "{}")["result"].is_object());
            assert!(client.rpc("tools/list", "{}")["result"]["tools"].is_array());
            assert!(begun.elapsed() < Duration::from_secs(2), "{what}: {:?}", begun.elapsed());
            measured += 1;
        };
        eventually("the call is on its way to the host", || {
            quick("while the body comes");
            (host.status()["calls"][0]["phase"] == "running").then_some(())
        });
        for _ in 0..20 {
            quick("while the frame is in the pipe");
        }
        assert_eq!(host.count("tools/call"), 0);
        host.read_again();
        assert_eq!(sender.join().unwrap().json()["result"]["content"][0]["text"], length.to_string());
        assert!(measured >= 20);
    });
    assert!(host.frames().iter().any(|frame| raw_arguments(frame) == arguments), "byte for byte");
}

#[test]
fn a_large_result_arrives_whole() {
    let text = "r\u{e9}sult ".repeat((17 << 20) / 8);
    let result = result_of(&text, false);
    let host = Setup::default()
        .handler({
            let result = result.clone();
            move |_, _, _| Answer::Result(result.clone())
        })
        .start();
    let mut client = host.client();
    client.start_call("1", "echo", "{}");
    let reply = client.read();
    assert!(reply.body.len() > 17 << 20);
    assert!(reply.text() == format!(r#"{{"jsonrpc":"2.0","id":1,"result":{result}}}"#));
    assert!(client.rpc("ping", "{}")["result"].is_object());
}

#[test]
fn the_operator_pauses_and_resumes() {
    let host = Host::start();
    let mut client = host.client();
    let mut running = client.again();
    running.start_call("1", "hang", "{}");
    let frame = host.call_frame("hang");
    assert_eq!(host.cli(&["pause"]).0, 0);
    let refused = client.call("echo", "{}");
    assert_eq!(refused["isError"], true);
    assert_eq!(refused["content"][0]["text"], "paused by the operator");
    assert!(client.rpc("ping", "{}")["result"].is_object());
    assert!(client.rpc("tools/list", "{}")["result"]["tools"].is_array());
    assert!(host.status()["paused"] == true);
    host.answer(&frame, EMPTY);
    assert!(running.read().json()["result"]["isError"] == false, "what runs is not touched");
    assert_eq!(host.cli(&["resume"]).0, 0);
    assert_eq!(client.call_text("echo", "{}"), "{}");
    assert_eq!(host.count("tools/call"), 2);
}

#[test]
fn the_operator_cancels_by_the_beginning_of_an_id() {
    let host = Host::start();
    let first = host.client();
    let start = |who: &str| {
        let mut client = first.again();
        client.start_call("1", "hang", &format!(r#"{{"who":"{who}"}}"#));
        (client, host.call_with("who", who))
    };
    let (mut one, one_frame) = start("one");
    let (mut two, two_frame) = start("two");
    let call_id =
        |frame: &Value| frame["params"]["_meta"]["a2mcp/call"]["callId"].as_str().unwrap().to_owned();
    let (one_id, two_id) = (call_id(&one_frame), call_id(&two_frame));
    let shared = one_id.chars().zip(two_id.chars()).take_while(|(a, b)| a == b).count();
    assert_eq!(host.cli(&["cancel", &one_id[..=shared]]).0, 0);
    let result = one.read().json()["result"].clone();
    assert_eq!(
        (&result["isError"], &result["content"][0]["text"]),
        (&true.into(), &"cancelled by the operator".into())
    );
    let told = host.frame(|frame| {
        frame["method"] == "notifications/cancelled" && frame["params"]["requestId"] == one_frame["id"]
    });
    assert_eq!(told["params"]["reason"], "cancelled by the operator");
    let (code, _, said) = host.cli(&["cancel", &one_id]);
    assert!(code == 1 && said.contains("no call in flight has that id"), "{code} {said}");
    assert!(!cancelled_at_host(&host, &two_frame));
    let (code, said, _) = host.cli(&["cancel", "--all"]);
    assert!(code == 0 && said.contains("1 call(s) cancelled"), "{code} {said}");
    assert_eq!(two.read().json()["result"]["content"][0]["text"], "cancelled by the operator");
}

#[test]
fn an_approval_shows_in_status_and_the_call_waits() {
    let host = Host::start();
    let mut client = host.client();
    client.start_call("1", "hang", "{}");
    let frame = host.call_frame("hang");
    let call_id = &frame["params"]["_meta"]["a2mcp/call"]["callId"];
    let state = |approvals: &Value| {
        host.send(&format!(
            r#"{{"jsonrpc":"2.0","method":"bridge/state","params":{{"main":true,"approvals":{approvals}}}}}"#
        ));
    };
    state(&serde_json::json!([{"callId": call_id, "tool": "hang"}, {"callId": "unknown", "tool": "x"}]));
    eventually("the approval", || (host.status()["calls"][0]["phase"] == "awaiting approval").then_some(()));
    assert!(client.again().rpc("ping", "{}")["result"].is_object());
    state(&serde_json::json!([]));
    eventually("its end", || (host.status()["calls"][0]["phase"] == "running").then_some(()));
    host.answer(&frame, EMPTY);
    assert!(client.read().json()["result"].is_object());
}
