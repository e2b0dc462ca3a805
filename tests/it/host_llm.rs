//! The sidecar's side of `/host-llm` (contract 8) with a scripted host: the order at the start, the
//! answers, the audit, what people are shown.

use std::sync::{Arc, Condvar, Mutex};

use serde_json::{Value, json};

use crate::support::http::Connection;
use crate::support::{Host, Setup};

/// A host that offers the switch.
fn offering() -> Setup {
    Setup::default().hello(json!({"features": ["hostLlm"]}))
}

/// One that answers each switch with what `answer` makes of it.
fn answering(answer: impl Fn(bool) -> Result<Value, Value> + Send + Sync + 'static) -> Setup {
    offering().hook(move |peer, frame| {
        if frame["method"] != "bridge/hostLlm" {
            return false;
        }
        match answer(frame["params"]["enabled"] == true) {
            Ok(status) => peer.answer(&frame["id"], &status.to_string()),
            Err(error) => peer.fail(&frame["id"], &error),
        }
        true
    })
}

fn obedient() -> Setup {
    answering(|enabled| Ok(json!({"enabled": enabled, "denied": 3, "degraded": false})))
}

fn post(host: &Host, headers: &[(&str, &str)], body: &str) -> (u16, Value) {
    let reply = host.http("POST", "/host-llm", headers, body.as_bytes());
    (reply.status, serde_json::from_slice(&reply.body).unwrap_or_default())
}

/// The `host_llm` records: `sid`, `isError`, arguments.
fn records(host: &Host) -> Vec<(Value, Value, Value)> {
    let records = host.audit().into_iter().filter(|record| record["tool"] == "host_llm");
    records
        .map(|record| {
            assert_eq!((&record["phase"], &record["id"]), (&json!("done"), &Value::Null), "{record}");
            let args = serde_json::from_str(record["args"].as_str().unwrap()).unwrap();
            (record["sid"].clone(), record["isError"].clone(), args)
        })
        .collect()
}

#[test]
fn a_switch_is_the_hosts_word_and_is_audited() {
    let host = obedient().start();
    let client = host.client();
    let session = [("Mcp-Session-Id", client.session.as_str())];
    let off = post(&host, &session, r#"{"enabled":false}"#);
    assert_eq!(off, (200, json!({"enabled": false, "denied": 3, "degraded": false})));
    let on = post(&host, &[("Mcp-Session-Id", "not-issued")], r#" {"more": [], "enabled": true} "#);
    assert_eq!(on, (200, json!({"enabled": true, "denied": 3, "degraded": false})));
    assert_eq!(
        records(&host),
        [
            (json!(client.session), json!(false), json!({"enabled": false})),
            (Value::Null, json!(false), json!({"enabled": true})),
        ]
    );
    for body in
        ["", "[true]", "{}", r#"{"enabled":1}"#, r#"{"enabled":true,"enabled":false}"#, "{\"enabled\":tru"]
    {
        assert_eq!(post(&host, &[], body).0, 400, "{body}");
    }
    assert_eq!(records(&host).len(), 2);
    let tools = host.client().rpc("tools/list", "{}");
    assert!(!tools.to_string().contains("host_llm"), "{tools}");
}

#[test]
fn a_refusal_is_told_in_the_hosts_words() {
    let reason = "provider \"x\" has a transport of its own \u{1b}[31m";
    let host = answering(move |_| Err(json!({"code": -32000, "message": reason}))).start();
    assert_eq!(post(&host, &[], r#"{"enabled":false}"#), (500, json!({ "error": reason })));
    assert_eq!(records(&host), [(Value::Null, json!(true), json!({"enabled": false, "error": reason}))]);
    assert!(!host.log().contains('\u{1b}'));
}

#[test]
fn a_caller_that_leaves_changes_nothing_about_the_record() {
    let host = offering().start();
    let bearer = format!("Bearer {}", host.token);
    let mut connection = Connection::open(host.port);
    connection.send("POST", "/host-llm", &[("Authorization", &bearer)], br#"{"enabled":false}"#).unwrap();
    let asked = host.frame(|frame| frame["method"] == "bridge/hostLlm");
    drop(connection);
    host.answer(&asked, r#"{"enabled":false,"denied":0,"degraded":false}"#);
    crate::support::eventually("the record", || (records(&host).len() == 1).then_some(()));
}

/// Hello, then the switch, then the endpoint: no early caller meets a host that still asks its model.
#[test]
fn a_deny_of_the_config_comes_before_the_endpoint() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let opened = gate.clone();
    let mut host = offering()
        .config(&json!({"host_llm": "deny", "port": free}).to_string())
        .hook(move |peer, frame| {
            if frame["method"] != "bridge/hostLlm" {
                return false;
            }
            assert_eq!(frame["params"], json!({"enabled": false}));
            // The host's session is long in coming; the reader must go on meanwhile.
            let (peer, id, gate) = (peer.clone(), frame["id"].clone(), opened.clone());
            std::thread::spawn(move || {
                drop(gate.1.wait_while(gate.0.lock().unwrap(), |open| !*open).unwrap());
                peer.answer(&id, r#"{"enabled":false,"denied":0,"degraded":false}"#);
            });
            true
        })
        .spawn();
    host.frame(|frame| frame["method"] == "bridge/hostLlm");
    // It waits and lives: it answers the shim's pings, and nobody else.
    let pong = host.ask("p", "bridge/ping", "{}");
    assert!(pong["result"].is_object(), "{pong}");
    assert!(Connection::try_open(free).is_err());
    assert!(host.frame_within(std::time::Duration::ZERO, |frame| frame["id"] == "hello").is_none());
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    let hello = host.expect_hello();
    assert_eq!(hello["result"]["port"], free, "{hello}");
    host.until_ready();
    assert_eq!(records(&host), [(Value::Null, json!(false), json!({"enabled": false}))]);
}

#[test]
fn a_refused_deny_of_the_config_is_told_everywhere() {
    let config = json!({"host_llm": "deny"}).to_string();
    let unable = Setup::default().config(&config).start();
    let refusing = answering(|_| Err(json!({"code": -32000, "message": "no live Main session"})));
    let refusing = refusing.config(&config).start();
    for (host, reason) in [(unable, "this host cannot switch"), (refusing, "no live Main session")] {
        let notice = host.notice("host_llm \"deny\" of the config was refused");
        assert_eq!(notice["level"], "warning");
        assert!(notice["text"].as_str().unwrap().contains(reason), "{notice}");
        assert!(host.log().contains(reason), "{}", host.log());
        let told = records(&host);
        assert_eq!((told.len(), &told[0].0, &told[0].1), (1, &Value::Null, &json!(true)));
        assert!(told[0].2["error"].as_str().unwrap().contains(reason), "{told:?}");
        assert_eq!(host.client().call_text("echo", "{}"), "{}");
    }
}

#[test]
fn a_host_that_ends_while_its_session_is_awaited_takes_the_sidecar_along() {
    let mut host = offering().config(&json!({"host_llm": "deny"}).to_string()).spawn();
    host.frame(|frame| frame["method"] == "bridge/hostLlm");
    host.close_stdin();
    assert_eq!(host.ends_within(std::time::Duration::from_secs(3)), Some(0));
}

/// The host keeps its state: a later sidecar neither asks nor changes.
#[test]
fn a_respawned_sidecar_changes_nothing() {
    let mut first = obedient().config(&json!({"host_llm": "deny"}).to_string()).start();
    first.signal(rustix::process::Signal::KILL);
    first.wait();
    let resume = json!({"features": ["hostLlm"], "resume": {"port": first.port}});
    let next = obedient().in_dir_of(&first).hello(resume).start();
    assert_eq!(next.count("bridge/hostLlm"), 0);
    assert_eq!(post(&next, &[], r#"{"enabled":true}"#).0, 200);
    assert_eq!(records(&next).len(), 2);
}

#[test]
fn status_shows_what_the_host_says() {
    let host = obedient().start();
    assert_eq!(host.status()["host"]["llm"], Value::Null);
    let (_, shown, _) = host.cli(&["status"]);
    assert!(!shown.contains("host_llm"), "{shown}");
    for (state, denied, line) in [
        ("armed", json!(2), "host_llm=deny denied=2"),
        ("degraded", json!(7), "host_llm=deny (tripwire only)"),
        ("refused", json!(0), "host_llm=allow (deny was refused)"),
        ("allow", json!(0), "host_llm=allow"),
        ("of a later shim", json!(0), "host_llm=unknown"),
    ] {
        host.notify(
            "bridge/state",
            &json!({"main": true, "hostLlm": state, "denied": denied, "approvals": []}),
        );
        let answer = host.ask(state, "bridge/command", r#"{"argv":[]}"#);
        let text = answer["result"]["text"].as_str().unwrap();
        assert!(text.lines().any(|shown| shown.ends_with(line)), "no {line:?} in {text}");
    }
    let (_, shown, _) = host.cli(&["status"]);
    assert!(shown.contains("host_llm=unknown"), "{shown}");
}

#[test]
fn a_deny_that_is_degraded_is_logged_and_audited_and_log_lines_are_cleaned() {
    let host = obedient().start();
    host.notify("bridge/log", &json!({"text": "takeover armed: 2\u{1b}[2J\nforged line"}));
    host.notify("bridge/hostLlmRefused", &json!({"error": "another session"}));
    crate::support::eventually("the record", || (records(&host).len() == 1).then_some(()));
    let expected = json!({"enabled": false, "error": "another session"});
    assert_eq!(records(&host), [(Value::Null, json!(true), expected)]);
    let log = host.log();
    assert!(log.contains("another session") && log.contains("takeover armed: 2"), "{log}");
    assert!(!log.contains('\u{1b}') && !log.contains("\nforged"), "{log}");
    // What does not fit is no reason to stop.
    host.notify("bridge/log", &json!({"text": 7}));
    host.notify("bridge/hostLlmRefused", &json!({}));
    assert_eq!(host.client().call_text("echo", "{}"), "{}");
}
