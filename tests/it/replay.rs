//! Contract 4.2, complaint C1: a call whose caller lost its connection is never run twice. It is
//! reached by its stream or by sending it again, also in the next sidecar.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::streams::{call_id, hang_up, heard, say, streaming};
use crate::support::http::Client;
use crate::support::{Host, Setup, eventually, result_of};

const ARGUMENTS: &str = r#"{"once":1}"#;

/// A JSON caller that sent a call, and the host's frame of it.
fn calling(host: &Host, client: &Client, id: &str, arguments: &str) -> (Client, Value) {
    let mut caller = client.again();
    let count = host.count("tools/call");
    caller.start_call(id, "hang", arguments);
    let frame = eventually("the call", || {
        let frames = host.frames();
        let frames = frames.iter().filter_map(|text| serde_json::from_str::<Value>(text).ok());
        frames.filter(|frame| frame["method"] == "tools/call").nth(count)
    });
    (caller, frame)
}

/// A call whose caller is gone.
fn orphan(host: &Host, client: &Client, id: &str, arguments: &str) -> Value {
    let (caller, frame) = calling(host, client, id, arguments);
    hang_up(host, caller);
    frame
}

/// Sends the call again; the caller that waits, once the ledger has taken it for the earlier one.
fn attached(host: &Host, client: &Client, id: &str, arguments: &str) -> Client {
    let before = attachments(host).len();
    let mut caller = client.again();
    caller.start_call(id, "hang", arguments);
    eventually("the attachment", || (attachments(host).len() > before).then_some(()));
    caller
}

fn attachments(host: &Host) -> Vec<Value> {
    host.audit().into_iter().filter(|record| record["phase"] == "attached").collect()
}

fn acknowledged(host: &Host, frame: &Value) {
    host.frame(|seen| {
        let ids = seen["params"]["callIds"].as_array();
        seen["method"] == "bridge/ack" && ids.is_some_and(|ids| ids.iter().any(|id| id == call_id(frame)))
    });
}

fn is_acknowledged(host: &Host, frame: &Value) -> bool {
    host.frames().iter().any(|text| text.contains("bridge/ack") && text.contains(call_id(frame)))
}

/// A result that says which call it is of, and that it was not run again.
fn assert_attached(result: &Value, frame: &Value, text: &str) {
    let id = call_id(frame);
    assert_eq!(result["_meta"]["a2mcp/attached"], id, "{result}");
    let blocks = result["content"].as_array().unwrap();
    assert_eq!(blocks.len(), 2, "{result}");
    assert_eq!(blocks[0]["text"], text);
    let words = blocks[1]["text"].as_str().unwrap();
    let rest = words.strip_prefix("[a2mcp] result of the same call started ").unwrap();
    let time = rest.strip_suffix(&format!(" (call {id}); it was not run again")).unwrap();
    assert!(time.len() == 24 && time.ends_with('Z'), "{words}");
}

/// What the shim hands to the next sidecar about a call.
fn in_flight(host: &Host, frame: &Value, state: &str) -> Value {
    let id = call_id(frame);
    let renewed = host.frames().into_iter().rev().find_map(|text| {
        let frame: Value = serde_json::from_str(&text).ok()?;
        let is_it = frame["method"] == "bridge/note" && frame["params"]["callId"] == id;
        is_it.then(|| frame["params"]["note"].clone())
    });
    let note = renewed.unwrap_or_else(|| frame["params"]["_meta"]["a2mcp/call"]["note"].clone());
    assert!(note.to_string().len() <= 8 << 10);
    json!({"callId": id, "tool": "hang", "state": state, "startedAt": 1, "note": note})
}

/// The next sidecar of a host.
fn next(host: &Host, calls: &[Value]) -> Host {
    let hello = json!({"resume": {"port": host.port}, "inFlight": calls});
    Setup::default().in_dir_of(host).hello(hello).start()
}

fn kill(host: &mut Host) {
    host.child.kill().unwrap();
    host.child.wait().unwrap();
}

/// The end of a call from before a restart.
fn late_result(host: &Host, frame: &Value, text: &str) {
    host.send(&format!(
        r#"{{"jsonrpc":"2.0","method":"bridge/result","params":{{"callId":"{}","result":{}}}}}"#,
        call_id(frame),
        result_of(text, false)
    ));
}

#[test]
fn an_orphan_sent_again_attaches_from_any_session_and_belongs_to_it() {
    let host = streaming().start();
    let (first, second) = (host.client(), host.client());
    let mut stream = first.ask_call("1", "hang", ARGUMENTS, Some("1")).stream();
    let position = stream.priming().id;
    let frame = host.call_frame("hang");
    hang_up(&host, stream);
    let mut again = attached(&host, &second, r#""other id""#, ARGUMENTS);
    let record = &attachments(&host)[0];
    assert_eq!(record["id"], call_id(&frame));
    assert_eq!(record["sid"], second.session.as_str());
    assert_eq!(record["tool"], "hang");
    host.frame(|seen| {
        let params = &seen["params"];
        params["callId"] == *call_id(&frame) && params["note"]["sid"] == second.session
    });
    // The session it came from has nothing to do with it any more.
    assert_eq!(first.get(Some(&position)).reply().status, 400);
    first.again().delete();
    host.ask("settled", "bridge/ping", "{}");
    assert_eq!(host.count("notifications/cancelled"), 0);
    host.answer(&frame, &result_of("ran once", false));
    let reply = again.read().json();
    assert_eq!(reply["id"], "other id");
    assert_attached(&reply["result"], &frame, "ran once");
    assert_eq!(host.count("tools/call"), 1);
}

#[test]
fn a_result_waits_for_the_caller_that_comes_back() {
    let host = Host::start();
    let client = host.client();
    let frame = orphan(&host, &client, "1", ARGUMENTS);
    host.answer(&frame, &result_of("ran once", false));
    eventually("the end", || host.audit().iter().any(|record| record["phase"] == "done").then_some(()));
    let mut again = client.again();
    again.start_call("2", "hang", ARGUMENTS);
    assert_attached(&again.read().json()["result"], &frame, "ran once");
    // Having it, whoever asks again wants another run.
    hang_up(&host, again);
    acknowledged(&host, &frame);
    let (_waiting, second) = calling(&host, &client, "3", ARGUMENTS);
    assert_ne!(call_id(&second), call_id(&frame));
}

#[test]
fn however_often_it_is_sent_again_it_runs_once_and_says_so_once() {
    let host = Host::start();
    let client = host.client();
    let frame = orphan(&host, &client, "1", ARGUMENTS);
    for id in ["2", "3"] {
        let again = attached(&host, &client, id, ARGUMENTS);
        hang_up(&host, again);
    }
    host.answer(&frame, &result_of("ran once", false));
    eventually("the end", || host.audit().iter().any(|record| record["phase"] == "done").then_some(()));
    let mut last = attached(&host, &client, "4", ARGUMENTS);
    assert_attached(&last.read().json()["result"], &frame, "ran once");
    assert_eq!(host.count("tools/call"), 1);
}

#[test]
fn a_reply_that_was_cut_is_given_again() {
    let host = Host::start();
    let client = host.client();
    let (mut caller, frame) = calling(&host, &client, "1", ARGUMENTS);
    let text = "x".repeat(32 << 20);
    host.answer(&frame, &result_of(&text, false));
    assert_eq!(caller.connection.read_head().unwrap().status, 200);
    // Half of the body is on its way; the connection is reset.
    hang_up(&host, caller);
    let mut again = client.again();
    again.start_call("2", "hang", ARGUMENTS);
    let reply = again.read().json();
    assert_eq!(reply["result"]["_meta"]["a2mcp/attached"], call_id(&frame));
    assert_eq!(reply["result"]["content"][0]["text"], text.as_str());
    assert_eq!(host.count("tools/call"), 1);
}

#[test]
fn other_arguments_never_attach() {
    let host = Host::start();
    let client = host.client();
    let frame = orphan(&host, &client, "1", r#"{"a":1,"b":2}"#);
    let others = [r#"{"b":2,"a":1}"#, r#"{"a":1, "b":2}"#, r#"{"a":1.0,"b":2}"#, r#"{"a":1}"#, "{}"];
    for (number, arguments) in others.into_iter().enumerate() {
        let (_, other) = calling(&host, &client, &format!("1{number}"), arguments);
        assert_ne!(call_id(&other), call_id(&frame), "{arguments}");
    }
    let mut tool = client.again();
    tool.start_call("20", "echo", r#"{"a":1,"b":2}"#);
    assert!(tool.read().json()["result"].get("_meta").is_none());
    // None of them came late enough to say that the session has moved on.
    let mut again = attached(&host, &client, "21", r#"{"a":1,"b":2}"#);
    host.answer(&frame, &result_of("ran once", false));
    assert_attached(&again.read().json()["result"], &frame, "ran once");
}

#[test]
fn a_caller_that_has_moved_on_gets_a_run_of_its_own_and_its_stream_still_leads_back() {
    let host = streaming().start();
    let client = host.client();
    let mut stream = client.ask_call("1", "hang", ARGUMENTS, None).stream();
    let position = stream.priming().id;
    let frame = host.call_frame("hang");
    hang_up(&host, stream);
    let left = Instant::now();
    // Another session's different call changes nothing.
    eventually("two seconds", || (left.elapsed() > Duration::from_millis(2100)).then_some(()));
    client.again().call_text("echo", r#"{"edited":true}"#);
    let (_waiting, second) = calling(&host, &client, "3", ARGUMENTS);
    assert_ne!(call_id(&second), call_id(&frame), "edit and rerun never gets the old output");
    host.answer(&frame, &result_of("the first", false));
    let mut resumed = client.resume(&position);
    assert_eq!(resumed.message().unwrap()["result"]["content"][0]["text"], "the first");
}

#[test]
fn after_the_window_it_is_a_new_call() {
    let host = Setup::default().config(r#"{"replayWindowSeconds":1}"#).start();
    let client = host.client();
    let frame = orphan(&host, &client, "1", ARGUMENTS);
    host.answer(&frame, &result_of("ran once", false));
    acknowledged(&host, &frame);
    let (mut again, second) = calling(&host, &client, "2", ARGUMENTS);
    host.answer(&second, &result_of("ran again", false));
    let result = again.read().json()["result"].clone();
    assert_eq!((&result["content"][0]["text"], result.get("_meta")), (&json!("ran again"), None));
}

#[test]
fn without_a_window_nothing_is_kept() {
    let host = Setup::default().config(r#"{"replayWindowSeconds":0,"streamAfterMs":0}"#).start();
    let client = host.client();
    let frame = orphan(&host, &client, "1", ARGUMENTS);
    let (_waiting, second) = calling(&host, &client, "1", ARGUMENTS);
    assert_ne!(call_id(&second), call_id(&frame));
    host.answer(&frame, &result_of("for nobody", false));
    acknowledged(&host, &frame);
}

#[test]
fn connected_callers_of_the_same_call_each_get_their_own() {
    let host = Host::start();
    let (one, two) = (host.client(), host.client());
    let (mut first, first_frame) = calling(&host, &one, "1", ARGUMENTS);
    let (mut second, second_frame) = calling(&host, &two, "1", ARGUMENTS);
    let (mut third, third_frame) = calling(&host, &one, "2", ARGUMENTS);
    for (caller, frame, text) in [
        (&mut third, &third_frame, "third"),
        (&mut first, &first_frame, "first"),
        (&mut second, &second_frame, "second"),
    ] {
        host.answer(frame, &result_of(text, false));
        let result = caller.read().json()["result"].clone();
        assert_eq!((&result["content"][0]["text"], result.get("_meta")), (&json!(text), None));
    }
    assert!(attachments(&host).is_empty());
}

#[test]
fn the_same_request_again_attaches_while_the_first_connection_still_looks_alive() {
    let host = Setup::default().config(r#"{"streamAfterMs":60000}"#).start();
    let client = host.client();
    // A client that opens its second connection before it closes the first.
    let (mut first, frame) = calling(&host, &client, r#""a""#, ARGUMENTS);
    let mut second = attached(&host, &client, r#""a""#, ARGUMENTS);
    let gone = first.read();
    assert_eq!(gone.status, 200, "nothing that makes a client send it once more");
    assert!(gone.json()["error"]["message"].as_str().unwrap().contains("another connection"));
    // A streaming caller: its stream ends.
    let streamed = client.ask_call(r#""a""#, "hang", ARGUMENTS, None);
    eventually("the second attachment", || (attachments(&host).len() == 2).then_some(()));
    assert!(second.read().json()["error"].is_object());
    say(&host, &frame, "here");
    let mut streamed = streamed.stream();
    assert_eq!(heard(&mut streamed), "here");
    let mut last = attached(&host, &client, r#""a""#, ARGUMENTS);
    assert_eq!(streamed.next(), None);
    host.answer(&frame, &result_of("ran once", false));
    assert_attached(&last.read().json()["result"], &frame, "ran once");
    assert_eq!(host.count("tools/call"), 1);
    assert_eq!(host.count("notifications/cancelled"), 0);
    // Its response has been written: the same id may be used again.
    last.start_call(r#""a""#, "echo", "{}");
    assert!(last.read().json()["result"].is_object());
    let (_waiting, second) = calling(&host, &client, r#""a""#, ARGUMENTS);
    assert_ne!(call_id(&second), call_id(&frame));
}

#[test]
fn what_was_cancelled_never_attaches() {
    let host = Host::start();
    let client = host.client();
    let frame = orphan(&host, &client, "1", ARGUMENTS);
    client.cancel("1");
    let cancelled = host.frame(|frame| frame["method"] == "notifications/cancelled");
    assert_eq!(cancelled["params"]["requestId"], frame["id"]);
    let (_waiting, second) = calling(&host, &client, "1", ARGUMENTS);
    assert_ne!(call_id(&second), call_id(&frame));
    assert!(attachments(&host).is_empty());
}

#[test]
fn two_parallel_calls_of_a_broken_client_are_both_found_again() {
    let host = Host::start();
    let client = host.client();
    // Even equal ones: two ran, and two are handed out.
    let (a, a_frame) = calling(&host, &client, "1", ARGUMENTS);
    let (b, b_frame) = calling(&host, &client, "2", ARGUMENTS);
    hang_up(&host, a);
    hang_up(&host, b);
    // As omp does it: the old session is deleted, a new one is opened.
    client.again().delete();
    let fresh = host.client();
    let mut a = attached(&host, &fresh, "1", ARGUMENTS);
    let mut b = attached(&host, &fresh, "2", ARGUMENTS);
    host.answer(&a_frame, &result_of("a", false));
    host.answer(&b_frame, &result_of("b", false));
    assert_attached(&a.read().json()["result"], &a_frame, "a");
    assert_attached(&b.read().json()["result"], &b_frame, "b");
    assert_eq!(host.count("tools/call"), 2);
    assert_eq!(host.count("notifications/cancelled"), 0);
}

#[test]
fn a_result_that_had_to_be_dropped_says_so_and_is_not_run_again() {
    let host = Host::start();
    let client = host.client();
    let calls: Vec<(Client, Value)> =
        (0..257).map(|n| calling(&host, &client, &n.to_string(), &format!(r#"{{"n":{n}}}"#))).collect();
    let (callers, frames): (Vec<Client>, Vec<Value>) = calls.into_iter().unzip();
    let open = host.descriptors();
    drop(callers);
    eventually("all gone", || (host.descriptors() + 257 <= open).then_some(()));
    let ended = |count: usize| {
        let done = || host.audit().iter().filter(|record| record["phase"] == "done").count();
        eventually("the ends", || (done() == count).then_some(()));
    };
    for (number, frame) in frames.iter().enumerate() {
        host.answer(frame, &result_of(&format!("result {number}"), false));
        if number == 0 {
            // So that it is the oldest to the millisecond.
            ended(1);
            let first = Instant::now();
            eventually("the next", || (first.elapsed() > Duration::from_millis(2)).then_some(()));
        }
    }
    ended(257);
    // When this one's acknowledgement is out, the ledger has been swept.
    let (mut caller, frame) = calling(&host, &client, "1000", "{}");
    host.answer(&frame, &result_of("done", false));
    caller.read();
    caller.rpc("ping", "{}");
    acknowledged(&host, &frame);
    let asked = |n: usize| {
        let mut again = client.again();
        again.start_call(&format!("9{n}"), "hang", &format!(r#"{{"n":{n}}}"#));
        again.read().json()["result"].clone()
    };
    let dropped = asked(0);
    assert_eq!(dropped["isError"], true, "{dropped}");
    assert!(dropped["content"][0]["text"].as_str().unwrap().contains("was dropped"), "{dropped}");
    assert_attached(&asked(256), &frames[256], "result 256");
    assert_eq!(host.count("tools/call"), 258);
}

#[test]
fn unclaimed_results_cost_a_bounded_amount_of_memory() {
    // A window that no busy machine outlasts.
    let host = Setup::default().config(r#"{"replayWindowSeconds":3600}"#).start();
    let client = host.client();
    let frames: Vec<Value> =
        (0..30).map(|n| orphan(&host, &client, &n.to_string(), &format!(r#"{{"n":{n}}}"#))).collect();
    let text = "x".repeat(4 << 20);
    let result = result_of(&text, false);
    for (number, frame) in frames.iter().enumerate() {
        host.answer(frame, &result);
        let ended = number + 1;
        eventually("the end", || (host.status()["served"] == ended).then_some(()));
    }
    eventually("no more than the bound", || (host.resident() < 95 << 20).then_some(()));
    let mut again = client.again();
    again.start_call("100", "hang", r#"{"n":29}"#);
    assert_eq!(again.read().json()["result"]["content"][0]["text"], text.as_str(), "the newest is kept");
    let mut again = client.again();
    again.start_call("101", "hang", r#"{"n":0}"#);
    assert_eq!(again.read().json()["result"]["isError"], true);
    assert_eq!(host.count("tools/call"), 30);
}

#[test]
fn a_result_is_acknowledged_when_it_has_arrived_for_certain() {
    let host = Host::start();
    let client = host.client();
    // Its caller's next request on the connection.
    let (mut caller, frame) = calling(&host, &client, "1", r#"{"n":1}"#);
    host.answer(&frame, &result_of("done", false));
    caller.read();
    host.ask("settled 1", "bridge/ping", "{}");
    assert!(!is_acknowledged(&host, &frame), "written is not received");
    caller.rpc("ping", "{}");
    acknowledged(&host, &frame);
    // The orderly end of the connection.
    let (mut caller, frame) = calling(&host, &client, "2", r#"{"n":2}"#);
    host.answer(&frame, &result_of("done", false));
    caller.read();
    drop(caller);
    acknowledged(&host, &frame);
    // Five quiet seconds.
    let (mut caller, frame) = calling(&host, &client, "3", r#"{"n":3}"#);
    host.answer(&frame, &result_of("done", false));
    caller.read();
    let begun = Instant::now();
    acknowledged(&host, &frame);
    assert!(begun.elapsed() > Duration::from_secs(4), "{:?}", begun.elapsed());
    // A stream that was read to its end, and a cancelled call, are done with at once.
    let mut stream = client.ask_call("4", "hang", r#"{"n":4}"#, None).stream();
    let frame = host.call_with("n", 4);
    host.answer(&frame, &result_of("done", false));
    stream.rest();
    hang_up(&host, stream);
    acknowledged(&host, &frame);
    let (mut caller, frame) = calling(&host, &client, "5", r#"{"n":5}"#);
    client.cancel("5");
    caller.read();
    acknowledged(&host, &frame);
}

#[test]
fn a_killed_sidecars_call_is_resumed_by_its_stream_in_the_next_one() {
    let mut host = streaming().start();
    let client = host.client();
    let mut stream = client.ask_call(r#""x""#, "hang", ARGUMENTS, Some(r#""t""#)).stream();
    stream.priming();
    let frame = host.call_frame("hang");
    say(&host, &frame, "before");
    assert_eq!(heard(&mut stream), "before");
    kill(&mut host);
    assert!(stream.try_next().is_err(), "cut, not ended");
    let host = next(&host, &[in_flight(&host, &frame, "running")]);
    let mut stream = client.resume(&stream.last_id);
    stream.priming();
    host.notify(
        "notifications/progress",
        &json!({"progressToken": call_id(&frame), "progress": 7, "message": "after"}),
    );
    let progress = stream.message().unwrap();
    assert_eq!(
        (&progress["params"]["progressToken"], &progress["params"]["progress"]),
        (&json!("t"), &json!(7))
    );
    late_result(&host, &frame, "ran once");
    let response = stream.message().unwrap();
    assert_eq!(response["id"], "x");
    assert_eq!(response["result"]["content"][0]["text"], "ran once");
    assert_eq!(response["result"].get("_meta"), None);
    assert_eq!(stream.next(), None);
    hang_up(&host, stream);
    acknowledged(&host, &frame);
    assert_eq!(host.count("tools/call"), 0, "executed once, by the first");
    let phases: Vec<Value> = host.audit().iter().map(|record| record["phase"].clone()).collect();
    assert_eq!(phases, ["start", "done"]);
}

#[test]
fn a_killed_sidecars_calls_are_found_again_by_sending_them_again() {
    let mut host = Host::start();
    let client = host.client();
    let (_one, running) = calling(&host, &client, "1", r#"{"n":"running"}"#);
    let (_two, finished) = calling(&host, &client, "2", r#"{"n":"finished"}"#);
    let (_three, dropped) = calling(&host, &client, "3", r#"{"n":"dropped"}"#);
    let (_four, cancelled) = calling(&host, &client, "4", r#"{"n":"cancelled"}"#);
    kill(&mut host);
    let states = ["running", "finished", "dropped", "cancelled"];
    let frames = [&running, &finished, &dropped, &cancelled];
    let calls: Vec<Value> =
        frames.iter().zip(states).map(|(frame, state)| in_flight(&host, frame, state)).collect();
    let host = next(&host, &calls);
    late_result(&host, &finished, "finished before");
    let again = |id: &str, which: &str| {
        let mut again = client.again();
        again.start_call(id, "hang", &format!(r#"{{"n":"{which}"}}"#));
        again
    };
    let mut one = again("1", "running");
    assert_attached(&again("12", "finished").read().json()["result"], &finished, "finished before");
    let lost = again("3", "dropped").read().json()["result"].clone();
    assert_eq!(lost["isError"], true);
    assert!(lost["content"][0]["text"].as_str().unwrap().contains("was dropped"), "{lost}");
    late_result(&host, &running, "ran on");
    assert_attached(&one.read().json()["result"], &running, "ran on");
    assert_eq!(host.count("tools/call"), 0);
    // Only what was cancelled runs again when it is asked for again.
    let _waiting = again("4", "cancelled");
    host.call_with("n", "cancelled");
    assert_eq!(host.count("tools/call"), 1);
}

#[test]
fn the_window_of_a_finished_orphan_does_not_begin_anew_with_each_sidecar() {
    let mut host = Host::start();
    let client = host.client();
    let frame = orphan(&host, &client, "1", ARGUMENTS);
    host.answer(&frame, &result_of("the first", false));
    let noted = host.frame(|frame| frame["params"]["note"]["endedMs"].is_u64());
    let note = &noted["params"]["note"];
    assert!(note["leftMs"].as_u64().unwrap() <= note["endedMs"].as_u64().unwrap(), "{note}");
    kill(&mut host);
    // Its end is on record, and the file may be gone by now: nobody writes it again.
    let audit = host.dir.path().join("a2mcp.log");
    std::fs::remove_file(&audit).unwrap();
    // Within the window, whoever says when it began: the next one finds it …
    let fresh = in_flight(&host, &frame, "finished");
    let mut second = next(&host, std::slice::from_ref(&fresh));
    late_result(&second, &frame, "the first");
    assert_attached(&attached(&second, &client, "2", ARGUMENTS).read().json()["result"], &frame, "the first");
    kill(&mut second);
    // … and after it has passed, however new the sidecar is, nobody does.
    let mut past = fresh;
    for key in ["leftMs", "endedMs"] {
        past["note"][key] = json!(past["note"][key].as_u64().unwrap() - 31_000);
    }
    let third = next(&second, &[past]);
    late_result(&third, &frame, "the first");
    acknowledged(&third, &frame);
    calling(&third, &client, "3", ARGUMENTS);
    let id = call_id(&frame);
    let again: Vec<_> = third.audit().into_iter().filter(|record| record["id"] == id).collect();
    assert!(again.iter().all(|record| record["phase"] == "attached") && again.len() == 1, "{again:?}");
}

#[test]
fn a_caller_that_left_or_moved_on_before_a_crash_has_done_so_for_the_next_sidecar_too() {
    let mut host = Host::start();
    let client = host.client();
    let (_waits, connected) = calling(&host, &client, "1", r#"{"n":"connected"}"#);
    let left = orphan(&host, &client, "2", ARGUMENTS);
    host.frame(|frame| frame["params"]["note"]["leftMs"].is_u64());
    kill(&mut host);
    let mut running = [in_flight(&host, &connected, "running"), in_flight(&host, &left, "running")];
    assert_eq!(running[0]["note"].get("leftMs"), None);
    running[1]["note"]["leftMs"] = json!(running[1]["note"]["leftMs"].as_u64().unwrap() - 2_100);
    let mut second = next(&host, &running);
    // Whoever was connected left with that sidecar: said at once, for the one after the next.
    second.frame(|frame| {
        frame["params"]["callId"] == *call_id(&connected) && frame["params"]["note"]["leftMs"].is_u64()
    });
    client.again().call_text("echo", r#"{"edited":true}"#);
    second.frame(|frame| frame["params"]["note"]["hasMovedOn"] == true);
    kill(&mut second);
    let third = next(&second, &[in_flight(&second, &left, "running")]);
    let (_waiting, own) = calling(&third, &client, "4", ARGUMENTS);
    assert_ne!(call_id(&own), call_id(&left), "edit and rerun never gets the old output");
}

#[test]
fn a_call_that_moved_to_another_session_is_found_there_by_the_next_sidecar() {
    let mut host = streaming().start();
    let (first, second) = (host.client(), host.client());
    let frame = orphan(&host, &first, "1", ARGUMENTS);
    let mut stream = second.ask_call(r#""moved""#, "hang", ARGUMENTS, Some("5")).stream();
    let position = stream.priming().id;
    host.frame(|frame| frame["params"]["note"]["rpcId"] == r#""moved""#);
    kill(&mut host);
    let host = next(&host, &[in_flight(&host, &frame, "running")]);
    assert_eq!(first.get(Some(&position)).reply().status, 400);
    let mut stream = second.resume(&position);
    stream.priming();
    host.notify("notifications/progress", &json!({"progressToken": call_id(&frame), "progress": 1}));
    assert_eq!(stream.message().unwrap()["params"]["progressToken"], 5);
    late_result(&host, &frame, "ran once");
    assert_eq!(stream.message().unwrap()["id"], "moved");
}

#[test]
fn an_approval_outlives_the_sidecar_and_is_executed_once() {
    let mut host = streaming().start();
    let client = host.client();
    let mut stream = client.ask_call("1", "hang", ARGUMENTS, Some("1")).stream();
    let frame = host.call_frame("hang");
    let state = json!({"main": true, "approvals": [{"callId": call_id(&frame), "tool": "hang"}]});
    host.notify("bridge/state", &state);
    assert_eq!(heard(&mut stream), "awaiting approval");
    kill(&mut host);
    let host = next(&host, &[in_flight(&host, &frame, "running")]);
    host.notify("bridge/state", &state);
    let mut stream = client.resume(&stream.last_id);
    assert_eq!(heard(&mut stream), "awaiting approval", "whoever comes back learns it too");
    assert_eq!(host.status()["calls"][0]["phase"], "awaiting approval");
    host.notify("bridge/state", &json!({"main": true, "approvals": []}));
    late_result(&host, &frame, "approved");
    let response = stream.until(|message| message["id"] == 1);
    assert_eq!(response["result"]["content"][0]["text"], "approved");
    assert_eq!(host.count("tools/call"), 0);
}

#[test]
fn calls_of_before_are_cancelled_by_their_call_id() {
    let mut host = streaming().start();
    let client = host.client();
    let mut stream = client.ask_call("1", "hang", ARGUMENTS, None).stream();
    let position = stream.priming().id;
    let frame = host.call_frame("hang");
    kill(&mut host);
    let host = next(&host, &[in_flight(&host, &frame, "running")]);
    let mut stream = client.resume(&position);
    stream.priming();
    client.cancel("1");
    let cancel = host.frame(|frame| frame["method"] == "bridge/cancel");
    assert_eq!(cancel["params"], json!({"callId": call_id(&frame), "reason": "cancelled by the caller"}));
    assert_eq!(stream.next(), None);
    let record = eventually("the record", || host.audit().pop().filter(|last| last["phase"] == "done"));
    assert_eq!(record["outcome"], "cancelled");
}

#[test]
fn the_host_hears_that_it_was_the_operator_who_cancelled_a_call_of_before() {
    let mut host = streaming().start();
    let client = host.client();
    client.ask_call("1", "hang", ARGUMENTS, None).stream().priming();
    let frame = host.call_frame("hang");
    kill(&mut host);
    let host = next(&host, &[in_flight(&host, &frame, "running")]);
    let (code, said, _) = host.cli(&["cancel", call_id(&frame)]);
    assert_eq!(code, 0, "{said}");
    let cancel = host.frame(|frame| frame["method"] == "bridge/cancel");
    assert_eq!(cancel["params"], json!({"callId": call_id(&frame), "reason": "cancelled by the operator"}));
}

#[test]
fn notes_that_are_not_understood_lead_nobody_to_a_call() {
    let mut host = Host::start();
    let client = host.client();
    let (_one, frame) = calling(&host, &client, "1", ARGUMENTS);
    kill(&mut host);
    let mut odd = in_flight(&host, &frame, "running");
    let id = call_id(&frame).to_owned();
    odd["note"] = json!({"v": 99, "surprise": true});
    let host = next(&host, &[odd]);
    let (_waiting, second) = calling(&host, &client, "1", ARGUMENTS);
    assert_ne!(call_id(&second), id);
    late_result(&host, &frame, "for nobody");
    eventually("its end on record", || {
        host.audit()
            .iter()
            .any(|record| record["phase"] == "done" && record["id"] == id.as_str())
            .then_some(())
    });
}

#[test]
fn a_planned_restart_ends_streams_and_the_next_sidecar_goes_on_with_them() {
    let mut host = streaming().start();
    let client = host.client();
    let mut call = client.ask_call("1", "hang", ARGUMENTS, None).stream();
    call.priming();
    let mut server = client.listen();
    let frame = host.call_frame("hang");
    host.signal(Signal::HUP);
    assert_eq!(call.next(), None, "it ends in order, and resumable");
    assert_eq!(server.next(), None);
    assert_eq!(host.ends_within(Duration::from_secs(15)), Some(75));
    assert_eq!(host.count("notifications/cancelled"), 0);
    let host = next(&host, &[in_flight(&host, &frame, "running")]);
    let mut call = client.resume(&call.last_id);
    call.priming();
    let mut server = client.resume(&server.last_id);
    server.priming();
    host.set_tools(r#"[{"name":"new","description":"n","inputSchema":{"type":"object"}}]"#);
    server.notification("notifications/tools/list_changed");
    late_result(&host, &frame, "ran once");
    assert_eq!(call.message().unwrap()["result"]["content"][0]["text"], "ran once");
    assert_eq!(host.count("tools/call"), 0);
}
