//! Contract 4.1 on cancelling, complaint C5, for callers that take streams: every moment a cancel can
//! come at, and what is no cancel. (Callers of JSON: `calls`.)

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::streams::{call_id, hang_up, heard, say, streaming};
use crate::support::{Host, Setup, eventually, result_of};

/// What may pass between a cancel and the tool's abort: the aim is 100 ms.
const AT_ONCE: Duration = Duration::from_secs(1);

fn cancelled_at_host(host: &Host) -> Value {
    host.frame(|frame| frame["method"] == "notifications/cancelled")["params"].clone()
}

fn done_records(host: &Host) -> Vec<Value> {
    host.audit().into_iter().filter(|record| record["phase"] == "done").collect()
}

#[test]
fn a_cancel_while_it_streams_reaches_the_tool_and_ends_the_stream_without_a_response() {
    let host = streaming().start();
    let client = host.client();
    let mut stream = client.ask_call(r#""x""#, "hang", "{}", Some("1")).stream();
    stream.priming();
    let frame = host.call_frame("hang");
    say(&host, &frame, "working");
    assert_eq!(heard(&mut stream), "working");
    let begun = Instant::now();
    client.cancel(r#""x""#);
    let cancelled = cancelled_at_host(&host);
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    assert_eq!(cancelled["requestId"], frame["id"]);
    assert_eq!(stream.next(), None, "in order, and without a response");
    let records = eventually("the record", || Some(done_records(&host)).filter(|found| found.len() == 1));
    assert_eq!(
        (&records[0]["outcome"], &records[0]["isError"], &records[0]["id"]),
        (&json!("cancelled"), &json!(true), &json!(call_id(&frame)))
    );
    // What the tool still says goes nowhere; the stream cannot be resumed to anything.
    say(&host, &frame, "too late");
    host.answer(&frame, &result_of("too late", false));
    host.ask("settled", "bridge/ping", "{}");
    let reply = client.get(Some(&stream.last_id)).reply();
    assert!(!reply.text().contains("too late"), "{}", reply.text());
    assert_eq!(client.again().call_text("echo", "{}"), "{}");
}

#[test]
fn a_cancel_before_the_stream_was_chosen_ends_in_a_stream_without_a_response() {
    let host = Setup::default().config(r#"{"streamAfterMs":60000}"#).start();
    let client = host.client();
    let asked = client.ask_call("1", "hang", "{}", None);
    let frame = host.call_frame("hang");
    client.cancel("1");
    assert_eq!(cancelled_at_host(&host)["requestId"], frame["id"]);
    let mut stream = asked.stream();
    stream.priming();
    assert_eq!(stream.next(), None);
}

#[test]
fn a_cancel_before_dispatch_keeps_the_call_from_the_host() {
    // Without a catalogue calls wait.
    let host = Setup::default().config(r#"{"streamAfterMs":0}"#).without_list().start();
    let client = host.client();
    let mut stream = client.ask_call("1", "hang", "{}", None).stream();
    stream.priming();
    client.cancel("1");
    assert_eq!(stream.next(), None);
    let list = host.frame(|frame| frame["method"] == "tools/list");
    host.answer(&list, r#"{"tools":[{"name":"hang","description":"h","inputSchema":{"type":"object"}}]}"#);
    host.until_ready();
    host.ask("settled", "bridge/ping", "{}");
    assert_eq!(host.count("tools/call"), 0);
}

#[test]
fn a_cancel_after_the_result_changes_nothing() {
    let host = streaming().start();
    let client = host.client();
    let mut stream = client.ask_call("1", "hang", "{}", None).stream();
    stream.priming();
    let frame = host.call_frame("hang");
    host.answer(&frame, &result_of("done", false));
    eventually("the end", || (done_records(&host).len() == 1).then_some(()));
    client.cancel("1");
    assert_eq!(stream.message().unwrap()["result"]["content"][0]["text"], "done");
    host.ask("settled", "bridge/ping", "{}");
    assert_eq!(host.count("notifications/cancelled"), 0);
}

#[test]
fn a_cancel_that_crosses_the_result_ends_the_call_once() {
    let host = streaming().start();
    let client = host.client();
    for number in 0..40 {
        let id = number.to_string();
        let mut stream = client.ask_call(&id, "hang", &format!(r#"{{"n":{number}}}"#), None).stream();
        stream.priming();
        let frame = host.call_with("n", number);
        if number % 2 == 0 {
            host.answer(&frame, &result_of("done", false));
            client.cancel(&id);
        } else {
            client.cancel(&id);
            host.answer(&frame, &result_of("done", false));
        }
        let rest = stream.rest();
        assert!(rest.len() <= 1 && rest.iter().all(|message| message["id"] == number), "{rest:?}");
    }
    let records = eventually("all ends", || Some(done_records(&host)).filter(|done| done.len() >= 40));
    assert_eq!(records.len(), 40, "one end each");
}

#[test]
fn cancels_that_mean_nothing_do_nothing() {
    let host = streaming().start();
    let (client, other) = (host.client(), host.client());
    let mut stream = client.ask_call("1", "hang", "{}", None).stream();
    stream.priming();
    let frame = host.call_frame("hang");
    for params in [
        r#"{"requestId":2}"#,
        r#"{"requestId":"1"}"#,
        r#"{"requestId":1.0}"#,
        "{}",
        "[]",
        r#"{"requestId":{}}"#,
    ] {
        client.tell("notifications/cancelled", params);
    }
    other.cancel("1");
    host.ask("settled", "bridge/ping", "{}");
    assert_eq!(host.count("notifications/cancelled"), 0);
    host.answer(&frame, &result_of("done", false));
    assert_eq!(stream.message().unwrap()["result"]["content"][0]["text"], "done");
}

#[test]
fn a_closed_connection_cancels_nothing_unless_the_config_says_so() {
    for (config, cancels) in
        [(r#"{"streamAfterMs":0}"#, false), (r#"{"streamAfterMs":0,"cancelOnDisconnect":true}"#, true)]
    {
        let host = Setup::default().config(config).start();
        let client = host.client();
        let mut stream = client.ask_call("1", "hang", "{}", None).stream();
        stream.priming();
        let frame = host.call_frame("hang");
        hang_up(&host, stream);
        if cancels {
            assert_eq!(cancelled_at_host(&host)["requestId"], frame["id"]);
        } else {
            assert_eq!(host.count("notifications/cancelled"), 0);
            host.answer(&frame, &result_of("done", false));
        }
    }
}

#[test]
fn a_json_caller_that_cancels_gets_the_error_and_its_connection_lives_on() {
    let host = streaming().start();
    let mut client = host.client();
    client.start_call("1", "hang", "{}");
    host.call_frame("hang");
    client.cancel("1");
    let reply = client.read();
    assert_eq!(
        (reply.status, reply.text().as_str()),
        (200, r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32800,"message":"cancelled"}}"#)
    );
    client.rpc("ping", "{}");
}

#[test]
fn a_relayed_request_is_cancelled_as_a_call_is() {
    let setup = Setup::default().config(r#"{"streamAfterMs":0}"#);
    let host = setup.hello(json!({"capabilities": {"tools": {}, "resources": {}}})).start();
    let client = host.client();
    let ask = r#"{"jsonrpc":"2.0","id":"r","method":"resources/read","params":{"uri":"a:b"}}"#;
    let mut stream = client.ask(ask).stream();
    stream.priming();
    let frame = host.frame(|frame| frame["method"] == "resources/read");
    client.cancel(r#""r""#);
    assert_eq!(cancelled_at_host(&host)["requestId"], frame["id"]);
    assert_eq!(stream.next(), None);
    let mut json = client.again();
    json.send("POST", &[("Accept", "application/json")], ask.as_bytes());
    eventually("the request", || (host.count("resources/read") == 2).then_some(()));
    client.cancel(r#""r""#);
    assert_eq!(json.read().json()["error"]["code"], -32800);
}
