//! Contract 4.1, complaint S1: JSON or stream, chosen late; the events' form; server streams; coming
//! back by `Last-Event-ID`; streams that end and live on.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::http::Client;
use crate::support::sse::{BOTH, Item, Stream};
use crate::support::{Host, Setup, eventually, result_of};

/// Every call is answered with a stream.
pub(crate) fn streaming() -> Setup {
    Setup::default().config(r#"{"streamAfterMs":0}"#)
}

pub(crate) fn call_id(frame: &Value) -> &str {
    frame["params"]["_meta"]["progressToken"].as_str().unwrap()
}

/// A log message of the host on the stream of the call of `frame`.
pub(crate) fn say(host: &Host, frame: &Value, data: impl Into<Value>) {
    let data: Value = data.into();
    let meta = json!({"a2mcp/call": {"callId": call_id(frame)}});
    host.notify("notifications/message", &json!({"level": "info", "data": data, "_meta": meta}));
}

/// Closes a connection and waits until the sidecar has seen it.
pub(crate) fn hang_up(host: &Host, connection: impl Sized) {
    let open = host.descriptors();
    drop(connection);
    eventually("the connection's end", || (host.descriptors() < open).then_some(()));
}

/// The data of the next log message.
pub(crate) fn heard(stream: &mut Stream) -> Value {
    stream.notification("notifications/message")["params"]["data"].clone()
}

fn text(message: &Value) -> &str {
    message["result"]["content"][0]["text"].as_str().unwrap_or_default()
}

fn assert_stream_headers(stream: &Stream) {
    let header = |name| stream.head.header(name);
    assert_eq!(header("content-type"), Some("text/event-stream"));
    assert_eq!(header("cache-control"), Some("no-cache, no-transform"));
    assert_eq!(header("x-accel-buffering"), Some("no"));
    assert_eq!(header("content-length"), None);
    assert_eq!(header("content-encoding"), None);
    assert!(!stream.head.headers.iter().any(|(name, _)| name.starts_with("access-control")));
}

#[test]
fn a_result_that_is_ready_soon_is_json_and_nothing_is_sent_before_it() {
    // Long enough that a busy machine never reaches it.
    let host = Setup::default().config(r#"{"streamAfterMs":20000}"#).start();
    let client = host.client();
    let asked = client.ask_call("7", "hang", "{}", None);
    let frame = host.call_frame("hang");
    assert!(asked.is_silent_for(Duration::from_millis(200)));
    host.answer(&frame, &result_of("ready", false));
    let reply = asked.reply();
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    assert!(reply.header("content-length").is_some());
    assert_eq!(text(&reply.json()), "ready");
    assert_eq!(reply.json()["id"], 7);
}

#[test]
fn a_result_that_is_late_comes_on_a_stream_that_begins_at_its_time() {
    let host = Setup::default().config(r#"{"streamAfterMs":300}"#).start();
    let client = host.client();
    let begun = Instant::now();
    let mut stream = client.ask_call(r#""a""#, "hang", "{}", None).stream();
    let first = stream.event().unwrap();
    let after = begun.elapsed();
    assert!(after >= Duration::from_millis(290), "{after:?}");
    assert_stream_headers(&stream);
    assert!(!first.id.is_empty() && first.data.is_empty() && first.event.is_empty(), "{first:?}");
    assert_eq!(first.retry, Some(2000));
    host.answer(&host.call_frame("hang"), &result_of("late", false));
    let event = stream.event().unwrap();
    assert_eq!(event.event, "message");
    assert!(!event.id.is_empty() && event.id != first.id && event.retry.is_none(), "{event:?}");
    let message: Value = serde_json::from_str(&event.data).unwrap();
    assert_eq!((text(&message), &message["id"]), ("late", &json!("a")));
    assert_eq!(stream.next(), None, "it ends after the response");
    // The connection lives on.
    let reply = stream.connection.request(
        "POST",
        "/",
        &[("Authorization", &format!("Bearer {}", host.token)), ("mcp-session-id", &client.session)],
        br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#,
    );
    assert_eq!(reply.text(), r#"{"jsonrpc":"2.0","id":1,"result":{}}"#);
}

#[test]
fn something_to_say_before_the_result_begins_the_stream_at_once() {
    let host = Setup::default().config(r#"{"streamAfterMs":60000}"#).start();
    let client = host.client();
    let asked = client.ask_call("1", "hang", "{}", None);
    let frame = host.call_frame("hang");
    say(&host, &frame, "first words");
    let mut stream = asked.stream();
    stream.priming();
    assert_eq!(heard(&mut stream), "first words");
    host.answer(&frame, &result_of("done", false));
    assert_eq!(text(&stream.message().unwrap()), "done");
    assert_eq!(stream.next(), None);
}

#[test]
fn with_no_grace_every_call_is_a_stream_and_all_else_is_json() {
    let host = streaming().start();
    let client = host.client();
    let mut stream = client.ask_call("1", "echo", "{}", None).stream();
    assert_stream_headers(&stream);
    stream.priming();
    assert_eq!(text(&stream.message().unwrap()), "{}");
    assert_eq!(stream.next(), None);
    for (method, params) in [
        ("tools/list", "{}"),
        ("ping", "{}"),
        ("logging/setLevel", r#"{"level":"info"}"#),
        ("nonsense", "{}"),
    ] {
        let body = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{params}}}"#);
        client.ask(&body).json();
    }
    let mut initialize = client.again();
    initialize.send("POST", &[BOTH], crate::support::http::INITIALIZE.as_bytes());
    assert_eq!(initialize.read().header("content-type"), Some("application/json"));
}

#[test]
fn callers_that_take_no_stream_get_json_always() {
    let host = streaming().start();
    let mut client = host.client();
    let accepts = [None, Some("application/json"), Some("*/*"), Some("text/html, application/json;q=0.9")];
    for (number, accept) in accepts.into_iter().enumerate() {
        let headers: Vec<_> = accept.map(|value| ("Accept", value)).into_iter().collect();
        let call = format!(
            r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"hang","arguments":{{"n":{number}}},"_meta":{{"progressToken":1}}}}}}"#
        );
        client.send("POST", &headers, call.as_bytes());
        let frame = host.call_with("n", number);
        say(&host, &frame, "nobody hears this");
        host.notify("notifications/progress", &json!({"progressToken": call_id(&frame), "progress": 1}));
        host.answer(&frame, &result_of("json", false));
        let reply = client.read();
        assert_eq!(reply.header("content-type"), Some("application/json"), "{accept:?}");
        assert_eq!(text(&reply.json()), "json");
    }
    // A list of types that names it among others is enough.
    let mut stream = client.again();
    stream.send(
        "POST",
        &[("Accept", "text/html, Text/Event-Stream;q=0.1")],
        br#"{"jsonrpc":"2.0","id":9,"method":"tools/call","params":{"name":"echo","arguments":{}}}"#,
    );
    assert_eq!(stream.connection.read_head().unwrap().header("content-type"), Some("text/event-stream"));
}

#[test]
fn streaming_can_be_switched_off() {
    let host = Setup::default().config(r#"{"streaming":"off","streamAfterMs":0}"#).start();
    let client = host.client();
    let asked = client.ask_call("1", "hang", "{}", Some("1"));
    let frame = host.call_frame("hang");
    say(&host, &frame, "nobody hears this");
    host.answer(&frame, &result_of("json", false));
    assert_eq!(text(&asked.json()), "json");
    let reply = client.get(None).reply();
    assert_eq!((reply.status, reply.body.len()), (405, 0));
    assert_eq!(reply.header("allow"), Some("POST, DELETE"));
}

#[test]
fn a_result_with_line_breaks_is_one_event() {
    let host = streaming().start();
    let client = host.client();
    let mut stream = client.ask_call("1", "hang", "{}", None).stream();
    host.answer(&host.call_frame("hang"), "{\r\n \"content\":\n[]\r,\"isError\":false}");
    let message = stream.message().unwrap();
    assert_eq!(message["result"], json!({"content": [], "isError": false}));
    assert_eq!(stream.next(), None);
}

#[test]
fn a_get_opens_a_server_stream() {
    let host = Host::start();
    let client = host.client();
    let mut stream = client.get(None).stream();
    assert_stream_headers(&stream);
    stream.priming();
    host.set_tools(r#"[{"name":"new","description":"n","inputSchema":{"type":"object"}}]"#);
    let begun = Instant::now();
    let event = stream.event().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert_eq!(event.data, r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#);
    assert!(!event.id.is_empty());

    // GET rules beside the happy one (contract 1).
    let bearer = format!("Bearer {}", host.token);
    let get = |headers: &[(&str, &str)]| {
        let mut all = vec![("Authorization", bearer.as_str())];
        all.extend_from_slice(headers);
        crate::support::http::Connection::open(host.port).request("GET", "/", &all, b"")
    };
    let accept = ("Accept", "text/event-stream");
    assert_eq!(get(&[accept]).status, 405, "no session");
    let forged = ("mcp-session-id", "00000000-0000-4000-8000-000000000000");
    assert_eq!(get(&[accept, forged]).status, 404);
    let session = ("mcp-session-id", client.session.as_str());
    assert_eq!(get(&[("Accept", "application/json"), session]).status, 405, "no Accept for streams");
    assert_eq!(get(&[accept, session, ("MCP-Protocol-Version", "1999-01-01")]).status, 400);
    assert_eq!(get(&[accept, session, ("Origin", "http://evil.example")]).status, 403);
}

#[test]
fn of_several_server_streams_one_gets_each_message() {
    let host = Host::start();
    let (one, other) = (host.client(), host.client());
    let mut ones = [one.listen(), one.listen(), one.listen()];
    let mut others = other.listen();
    host.set_tools(r#"[{"name":"new","description":"n","inputSchema":{"type":"object"}}]"#);
    others.notification("notifications/tools/list_changed");
    // What came to the other session has been sent to this one too: exactly one of the three has it.
    let mut got = 0;
    for stream in &mut ones {
        if !stream.is_silent_for(Duration::from_millis(300)) {
            stream.notification("notifications/tools/list_changed");
            got += 1;
        }
    }
    assert_eq!(got, 1);
    // When that one is gone another one gets the next.
    drop(ones);
    let mut last = one.listen();
    host.set_tools(r#"[{"name":"newer","description":"n","inputSchema":{"type":"object"}}]"#);
    last.notification("notifications/tools/list_changed");
    assert!(last.is_silent_for(Duration::from_millis(100)), "once");
}

#[test]
fn a_change_nobody_listened_to_is_told_at_the_next_chance() {
    let host = Host::start();
    let client = host.client();
    let new =
        |name: &str| format!(r#"[{{"name":"{name}","description":"n","inputSchema":{{"type":"object"}}}}]"#);
    let listed = |name: &str| {
        eventually("the new list", || {
            (client.again().rpc("tools/list", "{}")["result"]["tools"][0]["name"] == name).then_some(())
        });
    };
    host.set_tools(&new("a"));
    listed("a");
    host.set_tools(&new("b"));
    listed("b");
    let mut stream = client.listen();
    stream.notification("notifications/tools/list_changed");
    assert!(stream.is_silent_for(Duration::from_millis(100)), "two changes are one message");
    let last_id = stream.last_id.clone();
    hang_up(&host, stream);
    // The same for a stream that is resumed instead of opened anew.
    host.set_tools(&new("c"));
    listed("c");
    let mut stream = client.resume(&last_id);
    stream.notification("notifications/tools/list_changed");
    // A session that never had a stream is not owed what came before it.
    let newcomer = host.client().listen();
    assert!(newcomer.is_silent_for(Duration::from_millis(100)));
}

#[test]
fn a_call_is_resumed_after_its_position_before_and_after_the_result() {
    let host = streaming().start();
    let client = host.client();
    let mut stream = client.ask_call("1", "hang", "{}", None).stream();
    let priming = stream.priming().id;
    let frame = host.call_frame("hang");
    say(&host, &frame, 1);
    say(&host, &frame, 2);
    assert_eq!((heard(&mut stream), heard(&mut stream)), (json!(1), json!(2)));
    let after_two = stream.last_id.clone();
    drop(stream);

    // Before the result, from the last event on.
    let mut stream = client.resume(&after_two);
    assert_stream_headers(&stream);
    stream.priming();
    say(&host, &frame, 3);
    assert_eq!(heard(&mut stream), 3);
    drop(stream);

    // From the very beginning: everything again.
    let mut stream = client.resume(&priming);
    for number in 1..=3 {
        assert_eq!(heard(&mut stream), number);
    }
    drop(stream);

    // After the result.
    host.answer(&frame, &result_of("done", false));
    let mut stream = client.resume(&after_two);
    assert_eq!(heard(&mut stream), 3);
    let response = stream.message().unwrap();
    assert_eq!((text(&response), &response["id"]), ("done", &json!(1)));
    assert_eq!(response["result"].get("_meta"), None, "a resumed result is the call's own");
    assert_eq!(stream.next(), None);
    assert_eq!(host.count("tools/call"), 1);
}

#[test]
fn a_second_reader_takes_over_from_the_first() {
    let host = streaming().start();
    let client = host.client();
    let mut first = client.ask_call("1", "hang", "{}", None).stream();
    let position = first.priming().id;
    let frame = host.call_frame("hang");
    let mut second = client.resume(&position);
    second.priming();
    assert_eq!(first.next(), None, "the first one ends, in order and without a response");
    say(&host, &frame, "to the second");
    assert_eq!(heard(&mut second), "to the second");
    host.answer(&frame, &result_of("done", false));
    assert_eq!(text(&second.message().unwrap()), "done");
    assert_eq!(host.count("notifications/cancelled"), 0);

    // Server streams alike.
    let mut first = client.listen();
    let mut second = client.resume(&first.last_id);
    second.priming();
    assert_eq!(first.next(), None);
    host.set_tools(r#"[{"name":"new","description":"n","inputSchema":{"type":"object"}}]"#);
    second.notification("notifications/tools/list_changed");
}

#[test]
fn only_known_streams_of_the_own_session_are_resumed() {
    let host = streaming().start();
    let (client, stranger) = (host.client(), host.client());
    let mut stream = client.ask_call("1", "hang", "{}", None).stream();
    let position = stream.priming().id;
    let frame = host.call_frame("hang");
    let unknown = |client: &Client, id: &str| {
        let reply = client.get(Some(id)).reply();
        assert_eq!(
            (reply.status, reply.text().as_str()),
            (400, r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"unknown stream"}}"#),
            "{id}"
        );
    };
    unknown(&stranger, &position);
    unknown(&client, "00000000-0000-4000-8000-000000000000.1.1");
    for malformed in ["x", "1", "a.b.c", "..", "server-", "*", "a b.1.1", "-1", &"9".repeat(500)] {
        unknown(&client, malformed);
    }
    // The stranger's attempt did the reader no harm.
    say(&host, &frame, "still here");
    assert_eq!(heard(&mut stream), "still here");
    host.answer(&frame, &result_of("done", false));
    assert_eq!(text(&stream.message().unwrap()), "done");
    let last_id = stream.last_id.clone();
    assert_eq!(stream.next(), None);
    // Its next request on the connection says that it has the response: the call is forgotten.
    let bearer = format!("Bearer {}", host.token);
    let headers = [("Authorization", bearer.as_str()), ("mcp-session-id", client.session.as_str())];
    stream.connection.request("POST", "/", &headers, br#"{"jsonrpc":"2.0","id":2,"method":"ping"}"#);
    unknown(&client, &last_id);

    // A server stream is accepted from whatever time it is, and goes on as a new one.
    for id in ["server-00000000-0000-4000-8000-000000000000.1.7", "server-x.99999999999999.0"] {
        let mut stream = client.resume(id);
        stream.priming();
    }
    // Nobody reads somebody else's server stream by naming it.
    let mut own = client.listen();
    let mut named = stranger.resume(&own.last_id);
    named.priming();
    host.set_tools(r#"[{"name":"new","description":"n","inputSchema":{"type":"object"}}]"#);
    own.notification("notifications/tools/list_changed");
    named.notification("notifications/tools/list_changed");
}

#[test]
fn the_host_ends_a_stream_and_the_call_goes_on() {
    let host = streaming().start();
    let client = host.client();
    let mut stream = client.ask_call("1", "hang", "{}", None).stream();
    stream.priming();
    let frame = host.call_frame("hang");
    say(&host, &frame, "before");
    assert_eq!(heard(&mut stream), "before");
    host.notify("bridge/closeStream", &json!({"callId": call_id(&frame)}));
    assert_eq!(stream.next(), None, "it ends in order");
    let mut resumed = client.resume(&stream.last_id);
    resumed.priming();
    say(&host, &frame, "after");
    assert_eq!(heard(&mut resumed), "after");
    host.answer(&frame, &result_of("done", false));
    assert_eq!(text(&resumed.message().unwrap()), "done");
    assert_eq!(host.count("notifications/cancelled"), 0);
    // Nonsense does nothing.
    for params in [json!({}), json!({"callId": 1}), json!({"callId": "x"}), json!(null)] {
        host.notify("bridge/closeStream", &params);
    }
    client.again().rpc("ping", "{}");
}

#[test]
fn deleting_the_session_ends_its_streams_and_aborts_its_calls() {
    let host = streaming().start();
    let client = host.client();
    let mut call = client.ask_call("1", "hang", "{}", None).stream();
    call.priming();
    let mut server = client.listen();
    let frame = host.call_frame("hang");
    let begun = Instant::now();
    client.again().delete();
    let cancelled = host.frame(|frame| frame["method"] == "notifications/cancelled");
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert_eq!(cancelled["params"]["requestId"], frame["id"]);
    assert_eq!(call.next(), None);
    assert_eq!(server.next(), None);
    assert_eq!(client.get(Some(&call.last_id)).reply().status, 404);
}

#[test]
fn a_silent_stream_says_that_it_lives() {
    let host = streaming().start();
    let client = host.client();
    let mut call = client.ask_call("1", "hang", "{}", None).stream();
    call.priming();
    let mut server = client.listen();
    let begun = Instant::now();
    for stream in [&mut call, &mut server] {
        let item = stream.next().unwrap();
        assert!(matches!(item, Item::Comment(_)), "{item:?}");
        assert!(begun.elapsed() < Duration::from_millis(15_500), "{:?}", begun.elapsed());
    }
    host.answer(&host.call_frame("hang"), &result_of("done", false));
    assert_eq!(text(&call.message().unwrap()), "done");
}

#[test]
fn a_session_with_a_stream_outlives_idle_ones_but_not_sessions_with_calls() {
    let host = streaming().start();
    let (listening, idle) = (host.client(), host.client());
    let mut stream = listening.listen();
    let mut others: Vec<Client> = (0..62).map(|_| host.client()).collect();
    // Full now. The first newcomer takes the place of the oldest idle session, not of the oldest.
    others.push(host.client());
    assert_eq!(idle.again().post(r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#).status, 404);
    host.notify("notifications/message", &json!({"level": "info", "data": "still here"}));
    assert_eq!(heard(&mut stream), "still here");
    // When every other session has a call, the one with a stream goes, and its stream ends.
    let calls: Vec<Stream> = others
        .iter()
        .map(|client| {
            let mut call = client.ask_call("1", "hang", "{}", None).stream();
            call.priming();
            call
        })
        .collect();
    let mut newcomer = host.client();
    newcomer.rpc("ping", "{}");
    assert_eq!(stream.next(), None);
    assert_eq!(listening.again().post(r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#).status, 404);
    drop(calls);
}

#[test]
fn another_token_ends_the_streams_of_the_old_one() {
    let host = streaming().start();
    let client = host.client();
    let mut server = client.listen();
    let mut call = client.ask_call("1", "hang", "{}", None).stream();
    call.priming();
    let frame = host.call_frame("hang");
    assert_eq!(host.cli(&["rotate"]).0, 0);
    assert_eq!(server.next(), None);
    assert_eq!(call.next(), None);
    let cancelled = host.frame(|frame| frame["method"] == "notifications/cancelled");
    assert_eq!(cancelled["params"]["requestId"], frame["id"]);
    assert_eq!(client.get(Some(&call.last_id)).reply().status, 401);
}

#[test]
fn a_stop_lets_streams_have_their_results_and_then_ends_them() {
    let mut host = streaming().start();
    let client = host.client();
    let mut server = client.listen();
    let (mut quick, mut slow) = (
        client.ask_call("1", "hang", r#"{"n":1}"#, None).stream(),
        client.ask_call("2", "hang", r#"{"n":2}"#, None).stream(),
    );
    let quick_frame = host.call_with("n", 1);
    host.call_with("n", 2);
    host.send(r#"{"jsonrpc":"2.0","id":"stop","method":"bridge/stop","params":{"graceMs":1500}}"#);
    eventually("the endpoint closed", || {
        crate::support::http::Connection::try_open(host.port).is_err().then_some(())
    });
    host.answer(&quick_frame, &result_of("in time", false));
    assert_eq!(text(&quick.message().unwrap()), "in time");
    assert_eq!(quick.next(), None);
    let stopped = slow.message().unwrap();
    assert_eq!((text(&stopped), &stopped["result"]["isError"]), ("the bridge is stopping", &json!(true)));
    assert_eq!(slow.next(), None);
    assert_eq!(server.next(), None, "it ends in order");
    assert_eq!(host.ends_within(Duration::from_secs(5)), Some(0));
}

#[test]
fn an_idle_server_stream_costs_little() {
    let host = Host::start();
    let clients: Vec<Client> = (0..50).map(|_| host.client()).collect();
    let before = host.resident();
    let streams: Vec<Stream> = clients.iter().flat_map(|client| (0..10).map(|_| client.listen())).collect();
    let each = host.resident().saturating_sub(before) / streams.len() as u64;
    // The bench judges the aim of 20 KiB; this is for a build without optimization.
    assert!(each < 40 << 10, "{each} bytes");
}
