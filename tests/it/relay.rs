//! Issue 3, point 2: whatever else of MCP the host declared crosses both ways. Requests of callers,
//! subscriptions, and the host's questions back to callers.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::streams::{call_id, hang_up, streaming};
use crate::support::http::{Client, INITIALIZE};
use crate::support::sse::Stream;
use crate::support::{Host, Setup, eventually, result_of};

const ALL: &str = r#"{"sampling":{},"elicitation":{"form":{}},"roots":{"listChanged":true}}"#;

/// A host that declared `capabilities`; requests are left to the test.
fn declaring(capabilities: Value) -> Host {
    streaming().hello(json!({"capabilities": capabilities})).start()
}

fn request(id: &str, method: &str, params: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}}}"#)
}

fn asked(host: &Host, method: &str) -> Value {
    host.frame(|frame| frame["method"] == method)
}

/// A running call, its stream and its frame.
fn running(host: &Host, client: &Client, id: &str, who: &str) -> (Stream, Value) {
    let mut stream = client.ask_call(id, "hang", &format!(r#"{{"who":"{who}"}}"#), None).stream();
    stream.priming();
    (stream, host.call_with("who", who))
}

/// The host asks the caller of `frame`.
fn question(host: &Host, id: &str, method: &str, frame: &Value) {
    host.send(&format!(
        r#"{{"jsonrpc":"2.0","id":"{id}","method":"{method}","params":{{"message":"\u00e4 1.50","_meta":{{"a2mcp/call":{{"callId":"{}"}}}}}}}}"#,
        call_id(frame)
    ));
}

/// What the host hears in answer to its question.
fn heard_back(host: &Host, id: &str) -> Value {
    host.frame(|frame| frame["id"] == id && frame.get("method").is_none())
}

#[test]
fn initialize_advertises_what_there_is_and_nothing_else() {
    let advertised = |setup: Setup| {
        let host = setup.start();
        host.http("POST", "/", &[], INITIALIZE.as_bytes()).json()["result"]["capabilities"].clone()
    };
    assert_eq!(advertised(Setup::default()), json!({"tools": {"listChanged": true}, "logging": {}}));
    let hello = |capabilities: Value| Setup::default().hello(json!({"capabilities": capabilities}));
    assert_eq!(
        advertised(hello(json!({
            "tools": {"listChanged": false, "odd": 1}, "logging": {"odd": 1}, "tasks": {"list": {}},
            "resources": {"subscribe": true}, "prompts": {}, "completions": {},
            "experimental": {"x": {"deep": [1.5]}}, "nothing": null, "wrong": true,
        }))),
        json!({"tools": {"listChanged": true}, "logging": {}, "resources": {"subscribe": true},
            "prompts": {}, "completions": {}, "experimental": {"x": {"deep": [1.5]}}})
    );
    assert_eq!(advertised(hello(Value::Null)), json!({"tools": {"listChanged": true}, "logging": {}}));
}

#[test]
fn what_the_host_declared_crosses_verbatim_both_ways() {
    let host = declaring(json!({"tools": {}, "resources": {}, "prompts": {}, "completions": {}, "new": {}}));
    let client = host.client();
    let cases = [
        ("resources/list", r#"{}"#),
        ("resources/read", r#"{"uri":"a:b","n":12345678901234567890123,"f":1.50,"u":"\u00e9"}"#),
        ("resources/templates/list", r#"{"cursor":"c"}"#),
        ("prompts/list", "{}"),
        ("prompts/get", r#"{"name":"p","arguments":{"b":"1","a":"2"}}"#),
        ("completion/complete", r#"{"ref":{"type":"ref/prompt","name":"p"},"argument":{}}"#),
        ("new/method", r#"{"of":"tomorrow"}"#),
    ];
    for (number, (method, params)) in cases.into_iter().enumerate() {
        let id = format!(r#""id {number}""#);
        let pending = client.ask(&request(&id, method, params));
        let (text, frame) = host.frame_text(|frame| frame["method"] == method);
        let members = params.trim_start_matches('{').trim_end_matches('}');
        assert!(text.contains(members), "{text}");
        assert_eq!(frame["params"]["_meta"]["a2mcp/client"]["sid"], client.session.as_str());
        let result = format!(r#"{{"z":1.50,"a":[],"text":"\u00e9","number":{number}}}"#);
        host.answer(&frame, &result);
        let mut stream = pending.stream();
        stream.priming();
        let event = stream.event().unwrap();
        assert_eq!(event.data, format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#));
        assert_eq!(stream.next(), None);
    }
    // A JSON caller gets the same, and an error is the host's own in every member.
    let mut plain = client.again();
    plain.send("POST", &[], request("5", "prompts/get", r#"{"name":"none"}"#).as_bytes());
    let frame = host.frame(|frame| frame["params"]["name"] == "none");
    let error = r#"{"code":-32002,"message":"no such thing","data":{"uri":"a:b","n":1.50}}"#;
    host.send(&format!(r#"{{"jsonrpc":"2.0","id":{},"error":{error}}}"#, frame["id"]));
    let reply = plain.read();
    assert_eq!(reply.status, 200);
    assert_eq!(reply.text(), format!(r#"{{"jsonrpc":"2.0","id":5,"error":{error}}}"#));
    assert!(host.audit().is_empty(), "only calls are audited");
}

#[test]
fn what_the_host_did_not_declare_is_no_method() {
    let host = declaring(json!({"tools": {}, "prompts": {}, "resources": false, "completions": null}));
    let mut client = host.client();
    let methods = [
        "resources/list",
        "resources/subscribe",
        "completion/complete",
        "sampling/createMessage",
        "roots/list",
        "tasks/list",
        "tools/nonsense",
        "logging/nonsense",
        "bridge/ping",
        "bridge/stop",
        "initialized",
        "",
        "/",
    ];
    for method in methods {
        let reply = client.rpc(method, "{}");
        assert_eq!(reply["error"], json!({"code": -32601, "message": "method not found"}), "{method}");
    }
    let relayed = ["resources/list", "completion/complete", "bridge/stop", "tools/nonsense"];
    assert!(relayed.iter().all(|method| host.count(method) == 0));
}

#[test]
fn meta_of_the_bridge_is_its_own_in_relayed_requests_too() {
    let host = declaring(json!({"tools": {}, "resources": {}}));
    let client = host.client();
    let meta = r#"{"uri":"a:b","_meta":{"a2mcp/call":{"callId":"forged"},"a2mcp/client":{},"theirs":1.50,"progressToken":"t"}}"#;
    let pending = client.ask(&request("1", "resources/read", meta));
    let (text, frame) = host.frame_text(|frame| frame["method"] == "resources/read");
    let key = call_id(&frame).to_owned();
    assert_eq!(frame["params"]["_meta"]["a2mcp/call"]["callId"], key.as_str());
    assert!(text.contains(r#""theirs":1.50"#) && !text.contains("forged"), "{text}");
    // Its progress and messages find it as a call's do.
    host.notify("notifications/progress", &json!({"progressToken": key, "progress": 1}));
    let mut stream = pending.stream();
    assert_eq!(stream.message().unwrap()["params"], json!({"progressToken": "t", "progress": 1}));
    host.answer(&frame, "{}");
    assert_eq!(stream.message().unwrap()["result"], json!({}));
}

#[test]
fn subscriptions_are_counted_and_updates_go_to_subscribers() {
    let host = declaring(json!({"tools": {}, "resources": {"subscribe": true}}));
    let (one, two, three) = (host.client(), host.client(), host.client());
    let subscribe = |client: &Client, method: &str| {
        let body = request("1", &format!("resources/{method}"), r#"{"uri":"a:b"}"#);
        let mut sent = client.again();
        sent.send("POST", &[], body.as_bytes());
        sent
    };
    let nth = |method: &str, number: usize| {
        eventually("the request", || {
            let frames = host.frames();
            let frames = frames.iter().filter_map(|text| serde_json::from_str::<Value>(text).ok());
            frames.filter(|frame| frame["method"] == method).nth(number)
        })
    };
    // The first is refused by the host: nobody is subscribed then, and the next one asks again.
    let mut refused = subscribe(&one, "subscribe");
    let frame = nth("resources/subscribe", 0);
    host.send(&format!(
        r#"{{"jsonrpc":"2.0","id":{},"error":{{"code":-32002,"message":"no"}}}}"#,
        frame["id"]
    ));
    assert_eq!(refused.read().json()["error"]["code"], -32002);
    let mut first = subscribe(&one, "subscribe");
    host.answer(&nth("resources/subscribe", 1), "{}");
    assert_eq!(first.read().json()["result"], json!({}));
    assert_eq!(subscribe(&two, "subscribe").read().json()["result"], json!({}));
    assert_eq!(host.count("resources/subscribe"), 2, "the host hears the first only");

    let (mut ones, mut twos, mut threes) = (one.listen(), two.listen(), three.listen());
    host.notify("notifications/resources/updated", &json!({"uri": "a:other"}));
    host.notify("notifications/resources/updated", &json!({"uri": "a:b", "title": "x"}));
    host.notify("notifications/resources/list_changed", &json!({}));
    for stream in [&mut ones, &mut twos] {
        let updated = stream.message().unwrap();
        assert_eq!(updated["method"], "notifications/resources/updated");
        assert_eq!(updated["params"], json!({"uri": "a:b", "title": "x"}));
        assert_eq!(stream.message().unwrap()["method"], "notifications/resources/list_changed");
    }
    assert_eq!(threes.message().unwrap()["method"], "notifications/resources/list_changed");

    // The last one who leaves, one way or the other, ends it at the host.
    assert_eq!(subscribe(&two, "unsubscribe").read().json()["result"], json!({}));
    assert_eq!(subscribe(&two, "unsubscribe").read().json()["result"], json!({}), "twice is once");
    assert_eq!(host.count("resources/unsubscribe"), 0);
    one.again().delete();
    let frame = asked(&host, "resources/unsubscribe");
    assert_eq!(frame["params"]["uri"], "a:b");
    let missing = three.again().rpc("resources/subscribe", "{}");
    assert_eq!(missing["error"]["code"], -32602);
}

#[test]
fn what_sessions_want_to_hear_outlives_the_sidecar() {
    let capabilities =
        json!({"capabilities": {"tools": {}, "logging": {}, "resources": {"subscribe": true}}});
    let mut host = streaming().hello(capabilities.clone()).start();
    let (client, other) = (host.client(), host.client());
    let mut subscriber = client.again();
    subscriber.send("POST", &[], request("1", "resources/subscribe", r#"{"uri":"a:b"}"#).as_bytes());
    host.answer(&asked(&host, "resources/subscribe"), "{}");
    assert_eq!(subscriber.read().status, 200);
    other.again().rpc("logging/setLevel", r#"{"level":"error"}"#);
    host.child.kill().unwrap();
    host.child.wait().unwrap();

    let mut hello = capabilities;
    hello["resume"] = json!({"port": host.port});
    let host = Setup::default().in_dir_of(&host).hello(hello).start();
    assert_eq!(asked(&host, "resources/subscribe")["params"]["uri"], "a:b", "it may be another host");
    assert_eq!(asked(&host, "logging/setLevel")["params"]["level"], "error");
    let (mut stream, mut others) = (client.listen(), other.listen());
    for level in ["info", "error"] {
        host.notify("notifications/message", &json!({"level": level, "data": level}));
    }
    host.notify("notifications/resources/updated", &json!({"uri": "a:b"}));
    let heard: Vec<Value> = (0..3).map(|_| stream.message().unwrap()["method"].clone()).collect();
    assert_eq!(heard[2], "notifications/resources/updated");
    assert_eq!(others.message().unwrap()["params"]["data"], "error");
    assert!(others.is_silent_for(Duration::from_millis(50)));
    // Nobody can fill the bridge with what he wants.
    let long = format!(r#"{{"uri":"{}"}}"#, "x".repeat(100_000));
    let refused = other.again().rpc("resources/subscribe", &long);
    assert_eq!(refused["error"], json!({"code": -32602, "message": "too many subscriptions"}));
}

#[test]
fn a_question_reaches_the_calls_caller_and_its_answer_the_host() {
    let host = Setup::default().config(r#"{"streamAfterMs":60000}"#).start();
    let client = Client::declaring(host.port, &host.token, ALL);
    for (number, method) in
        ["sampling/createMessage", "elicitation/create", "roots/list"].into_iter().enumerate()
    {
        let pending = client.ask_call("1", "hang", &format!(r#"{{"n":{number}}}"#), None);
        let frame = host.call_with("n", number);
        question(&host, method, method, &frame);
        // The question begins the stream.
        let mut stream = pending.stream();
        stream.priming();
        let event = stream.event().unwrap();
        let asked: Value = serde_json::from_str(&event.data).unwrap();
        assert_eq!(asked["method"], method);
        assert!(event.data.ends_with(r#""params":{"message":"\u00e4 1.50"}}"#), "{}", event.data);
        assert!(asked["id"].is_string() && asked["id"] != method, "an id of the bridge");
        let answer = r#""result":{"z":1.50,"text":"\u00e9","n":12345678901234567890123}"#;
        let reply = client.answer(&asked["id"], answer);
        assert_eq!((reply.status, reply.body.len()), (202, 0));
        let (text, _) = host.frame_text(|frame| frame["id"] == method && frame.get("method").is_none());
        assert!(text.contains(answer), "{text}");
        // Only the first answer counts.
        assert_eq!(client.answer(&asked["id"], r#""result":{"second":1}"#).status, 202);
        host.answer(&frame, &result_of("done", false));
        assert_eq!(stream.message().unwrap()["result"]["content"][0]["text"], "done");
        assert_eq!(stream.next(), None);
    }
    // An error is an answer too.
    let (mut stream, frame) = {
        let pending = client.ask_call("2", "hang", r#"{"n":9}"#, None);
        let frame = host.call_with("n", 9);
        question(&host, "declined", "elicitation/create", &frame);
        (pending.stream(), frame)
    };
    let id = stream.message().unwrap()["id"].clone();
    client.answer(&id, r#""error":{"code":-1,"message":"user rejected","data":{"why":1.50}}"#);
    let (text, _) = host.frame_text(|frame| frame["id"] == "declined" && frame.get("method").is_none());
    assert!(text.contains(r#""error":{"code":-1,"message":"user rejected","data":{"why":1.50}}"#), "{text}");
    host.answer(&frame, &result_of("done", false));
    host.ask("settled", "bridge/ping", "{}");
    assert!(!host.frames().iter().any(|text| text.contains("second")));
}

/// Contract 4.2: the call belongs to the session that attached, and so does what it waits for.
#[test]
fn a_question_goes_to_whoever_sends_the_call_again() {
    let host = streaming().start();
    let (one, two) =
        (Client::declaring(host.port, &host.token, ALL), Client::declaring(host.port, &host.token, ALL));
    let (mut stream, frame) = running(&host, &one, "1", "asked");
    question(&host, "q1", "sampling/createMessage", &frame);
    let asked = stream.message().unwrap();
    hang_up(&host, stream);
    let mut again = two.ask_call("9", "hang", r#"{"who":"asked"}"#, None).stream();
    let repeated = again.message().unwrap();
    assert_eq!((&repeated["id"], &repeated["method"]), (&asked["id"], &asked["method"]));
    // Whose it was before has no say in it any more.
    assert_eq!(one.answer(&asked["id"], r#""result":{"by":"one"}"#).status, 202);
    assert_eq!(two.answer(&asked["id"], r#""result":{"by":"two"}"#).status, 202);
    assert_eq!(heard_back(&host, "q1")["result"]["by"], "two");
    // One that cannot answer ends the waiting.
    question(&host, "q2", "roots/list", &frame);
    again.message().unwrap();
    hang_up(&host, again);
    let mut plain = two.again();
    plain.start_call("10", "hang", r#"{"who":"asked"}"#);
    let error = heard_back(&host, "q2")["error"]["message"].clone();
    assert!(error.as_str().unwrap().contains("cannot be asked any more"), "{error}");
    host.answer(&frame, &result_of("done", false));
    assert_eq!(plain.read().json()["result"]["content"][0]["text"], "done");
}

#[test]
fn only_callers_that_declared_it_and_can_hear_it_are_asked() {
    let host = streaming().start();
    let none = host.client();
    let some = Client::declaring(host.port, &host.token, r#"{"sampling":{},"elicitation":null}"#);
    let (mut first, first_frame) = running(&host, &none, "1", "none");
    let (mut second, second_frame) = running(&host, &some, "1", "some");
    let mut json = some.again();
    json.start_call("2", "hang", r#"{"who":"json"}"#);
    let json_frame = host.call_with("who", "json");
    let refused = |id: &str, method: &str, frame: &Value, words: &str| {
        question(&host, id, method, frame);
        let error = heard_back(&host, id)["error"].clone();
        assert_eq!(error["code"], -32601, "{error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    };
    refused("q1", "sampling/createMessage", &first_frame, "did not declare");
    refused("q2", "elicitation/create", &second_frame, "did not declare");
    refused("q3", "roots/list", &second_frame, "did not declare");
    refused("q4", "sampling/createMessage", &json_frame, "takes no stream");
    // Without a call there must be one single session that can answer.
    let ask = |id: &str| host.ask(id, "sampling/createMessage", "{}")["error"]["message"].to_string();
    assert!(ask("q5").contains("no caller listens"));
    let mut listening = some.listen();
    host.send(r#"{"jsonrpc":"2.0","id":"q6","method":"sampling/createMessage","params":{}}"#);
    let asked = listening.message().unwrap();
    assert_eq!(some.answer(&asked["id"], r#""result":{"fine":true}"#).status, 202);
    assert_eq!(heard_back(&host, "q6")["result"]["fine"], true);
    let other = Client::declaring(host.port, &host.token, ALL);
    let _others = other.listen();
    assert!(ask("q7").contains("several callers"));
    for (stream, frame) in [(&mut first, &first_frame), (&mut second, &second_frame)] {
        host.answer(frame, &result_of("done", false));
        assert_eq!(stream.message().unwrap()["result"]["content"][0]["text"], "done", "nobody was asked");
    }
}

#[test]
fn answers_of_another_session_or_to_nobody_do_nothing() {
    let host = streaming().start();
    let (one, two) =
        (Client::declaring(host.port, &host.token, ALL), Client::declaring(host.port, &host.token, ALL));
    let (mut ones, one_frame) = running(&host, &one, "1", "one");
    let (mut twos, two_frame) = running(&host, &two, "1", "two");
    // The host's ids collide with the callers' ids and with each other's form.
    question(&host, "1", "roots/list", &one_frame);
    let first = ones.message().unwrap()["id"].clone();
    question(&host, "2", "roots/list", &two_frame);
    let second = twos.message().unwrap()["id"].clone();
    assert_ne!(first, second);
    for id in [&first, &json!("1"), &json!(1), &json!(null), &json!("x".repeat(500))] {
        let status = two.answer(id, r#""result":{"forged":true}"#).status;
        assert!(status == 202 || status == 400, "{status}");
    }
    assert_eq!(one.answer(&second, r#""result":{"forged":true}"#).status, 202);
    two.answer(&second, r#""result":{"own":2}"#);
    one.answer(&first, r#""result":{"own":1}"#);
    assert_eq!(heard_back(&host, "1")["result"]["own"], 1);
    assert_eq!(heard_back(&host, "2")["result"]["own"], 2);
    assert!(!host.frames().iter().any(|text| text.contains("forged")));
    // The session is judged as for every message.
    let body = r#"{"jsonrpc":"2.0","id":"a","result":{}}"#;
    assert_eq!(host.http("POST", "/", &[], body.as_bytes()).status, 400);
    let forged = ("mcp-session-id", "00000000-0000-4000-8000-000000000000");
    assert_eq!(host.http("POST", "/", &[forged], body.as_bytes()).status, 404);
}

#[test]
fn a_question_that_cannot_be_answered_any_more_is_an_error_for_the_host() {
    let host = streaming().start();
    let caller = || Client::declaring(host.port, &host.token, ALL);
    // The call ends.
    let client = caller();
    let (mut stream, frame) = running(&host, &client, "1", "ends");
    question(&host, "ends", "roots/list", &frame);
    let id = stream.message().unwrap()["id"].clone();
    host.answer(&frame, &result_of("without the answer", false));
    assert!(heard_back(&host, "ends")["error"]["message"].as_str().unwrap().contains("ended"));
    assert_eq!(client.answer(&id, r#""result":{"late":true}"#).status, 202);
    // It is cancelled.
    let (mut stream, frame) = running(&host, &client, "2", "cancelled");
    question(&host, "cancelled", "roots/list", &frame);
    stream.message().unwrap();
    client.cancel("2");
    assert!(heard_back(&host, "cancelled")["error"].is_object());
    // The session ends.
    let (mut stream, frame) = running(&host, &client, "3", "leaves");
    question(&host, "leaves", "roots/list", &frame);
    stream.message().unwrap();
    let begun = Instant::now();
    client.again().delete();
    assert!(heard_back(&host, "leaves")["error"].is_object());
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    // There never was such a call.
    let unknown = json!({"params": {"_meta": {"progressToken": "unknown"}}});
    question(&host, "unknown", "roots/list", &unknown);
    assert!(heard_back(&host, "unknown")["error"].is_object());
    assert!(!host.frames().iter().any(|text| text.contains("late")));
}

#[test]
fn a_question_waits_for_a_caller_that_comes_back() {
    let host = streaming().start();
    let client = Client::declaring(host.port, &host.token, ALL);
    let (stream, frame) = running(&host, &client, "1", "it");
    let position = stream.last_id.clone();
    drop(stream);
    question(&host, "q", "elicitation/create", &frame);
    let mut resumed = client.resume(&position);
    let asked = resumed.message().unwrap();
    assert_eq!(asked["method"], "elicitation/create");
    // Read once and lost with the connection: it is there again.
    drop(resumed);
    let mut resumed = client.resume(&position);
    assert_eq!(resumed.message().unwrap()["id"], asked["id"]);
    client.answer(&asked["id"], r#""result":{"action":"accept"}"#);
    assert_eq!(heard_back(&host, "q")["result"]["action"], "accept");
}

#[test]
fn a_question_the_host_withdraws_is_withdrawn_under_the_callers_id() {
    let host = streaming().start();
    let client = Client::declaring(host.port, &host.token, ALL);
    let bystander = host.client().listen();
    let (mut stream, frame) = running(&host, &client, "1", "it");
    question(&host, "q", "elicitation/create", &frame);
    let id = stream.message().unwrap()["id"].clone();
    host.notify("notifications/cancelled", &json!({"requestId": "unknown"}));
    host.notify("notifications/cancelled", &json!({"requestId": "q", "reason": "never mind"}));
    assert_eq!(
        stream.message().unwrap(),
        json!({"jsonrpc": "2.0", "method": "notifications/cancelled",
            "params": {"requestId": id, "reason": "never mind"}})
    );
    assert_eq!(client.answer(&id, r#""result":{"late":true}"#).status, 202);
    host.answer(&frame, &result_of("done", false));
    assert_eq!(stream.message().unwrap()["result"]["content"][0]["text"], "done");
    assert!(bystander.is_silent_for(Duration::from_millis(50)), "others hear nothing of it");
    assert!(!host.frames().iter().any(|text| text.contains("late")));
}

#[test]
fn a_caller_that_stays_away_does_not_hang_the_host() {
    let host = streaming().start();
    let client = Client::declaring(host.port, &host.token, ALL);
    let (mut stream, frame) = running(&host, &client, "1", "it");
    question(&host, "q", "elicitation/create", &frame);
    stream.message().unwrap();
    drop(stream);
    let begun = Instant::now();
    // A tool that goes on talking is no sign of the caller.
    let answer = loop {
        crate::streams::say(&host, &frame, "still waiting");
        let is_answer = |frame: &Value| frame["id"] == "q" && frame.get("method").is_none();
        if let Some(answer) = host.frame_within(Duration::from_secs(1), is_answer) {
            break answer;
        }
        assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    };
    assert!(answer["error"]["message"].as_str().unwrap().contains("went away"), "{answer}");
    assert!(begun.elapsed() > Duration::from_secs(25), "{:?}", begun.elapsed());
}

#[test]
fn notifications_nobody_here_knows_go_to_their_call_or_to_who_listens() {
    let host = streaming().start();
    let (client, other) = (host.client(), host.client());
    let mut server = other.listen();
    let (mut stream, frame) = running(&host, &client, "1", "it");
    let meta = json!({"a2mcp/call": {"callId": call_id(&frame)}, "theirs": 1});
    host.notify("notifications/elicitation/complete", &json!({"elicitationId": "e", "_meta": meta}));
    host.notify("notifications/of/tomorrow", &json!({"a": [1]}));
    assert_eq!(
        stream.message().unwrap(),
        json!({"jsonrpc": "2.0", "method": "notifications/elicitation/complete",
            "params": {"elicitationId": "e", "_meta": {"theirs": 1}}})
    );
    assert_eq!(
        server.message().unwrap(),
        json!({"jsonrpc": "2.0", "method": "notifications/of/tomorrow", "params": {"a": [1]}})
    );
    host.answer(&frame, &result_of("done", false));
    assert_eq!(stream.rest().len(), 1);
    assert!(server.is_silent_for(Duration::from_millis(50)));
}

#[test]
fn changed_roots_are_told_to_the_host() {
    let host = declaring(json!({"tools": {}}));
    let client = Client::declaring(host.port, &host.token, ALL);
    client.tell("notifications/roots/list_changed", "{}");
    asked(&host, "notifications/roots/list_changed");
    client.tell("notifications/initialized", "{}");
    client.tell("notifications/nonsense", r#"{"a":1}"#);
    host.ask("settled", "bridge/ping", "{}");
    assert_eq!(host.count("notifications/initialized") + host.count("notifications/nonsense"), 0);
}

/// The host asks again after a restart, under the name it gave the question.
#[test]
fn an_answer_may_come_before_the_question_is_asked_again() {
    let mut host = streaming().start();
    let declaring = |host: &Host| Client::declaring(host.port, &host.token, ALL);
    let (one, two) = (declaring(&host), declaring(&host));
    let (mut stream, frame) = running(&host, &one, "1", "one");
    let named = |host: &Host, id: &str, name: &str| {
        host.send(&format!(
            r#"{{"jsonrpc":"2.0","id":"{id}","method":"elicitation/create","params":{{"_meta":{{"a2mcp/call":{{"callId":"{}","questionId":"{name}"}}}}}}}}"#,
            call_id(&frame)
        ));
    };
    let names: Vec<String> = (1..=3).map(|n| format!("5c1d8d5e-1f0b-4c53-8a3b-6f3f0a9f3c2{n}")).collect();
    let mut ids = Vec::new();
    for name in &names {
        named(&host, name, name);
        ids.push(stream.message().unwrap()["id"].clone());
    }
    // A name twice, or one that is none, is an id of ours.
    for name in [&names[0], "7"] {
        named(&host, "odd", name);
        let id = stream.message().unwrap()["id"].clone();
        assert!(id.is_string() && !ids.contains(&id), "{id}");
    }
    let call = &frame["params"]["_meta"]["a2mcp/call"];
    let in_flight = json!([{"callId": call["callId"], "tool": "hang", "state": "running", "startedAt": 1, "note": call["note"]}]);
    host.child.kill().unwrap();
    host.child.wait().unwrap();
    let hello = json!({"instance": host.instance, "resume": {"port": host.port}, "inFlight": in_flight});
    let host = Setup::default().in_dir_of(&host).hello(hello).start();

    let by = |who: &str| format!(r#""result":{{"by":"{who}"}}"#);
    let early =
        |client: &Client, n: usize, who: &str| assert_eq!(client.answer(&ids[n], &by(who)).status, 202);
    early(&one, 0, "one");
    early(&one, 0, "one again");
    early(&two, 1, "two");
    for n in 0..100 {
        two.answer(&json!(format!("a2mcp-{n}")), &by("two"));
    }
    named(&host, "q0", &names[0]);
    assert_eq!(heard_back(&host, "q0")["result"], json!({"by": "one"}), "the first answer counts");
    // Another session's answer is none: the question is asked.
    let mut stream = one.ask_call("1", "hang", r#"{"who":"one"}"#, None).stream();
    for n in [1, 2] {
        named(&host, &format!("q{n}"), &names[n]);
        let asked = stream.until(|message| message["method"] == "elicitation/create");
        assert_eq!(asked["id"], ids[n], "as before");
        one.answer(&ids[n], &by("one"));
        assert_eq!(heard_back(&host, &format!("q{n}"))["result"], json!({"by": "one"}));
    }
}
