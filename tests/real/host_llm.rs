//! The switch on the host's own model requests, and what omp does with long commands, in a real omp. A
//! sink on loopback plays the providers, so that "no request left" is something seen.

use serde_json::{Value, json};

use crate::model::Model;
use crate::omp::{Home, Omp};
use crate::support::eventually;
use crate::support::http::Connection;

/// What a refused turn ends with.
const DENIED: &str = "a2mcp takeover: host inference is disabled in this mode";

fn providers(providers: &[String]) -> String {
    format!("providers:\n{}", providers.concat())
}

fn home(rows: &[String]) -> Home {
    let home = Home::with_shim();
    home.models(&providers(rows));
    home
}

fn request(omp: &Omp, method: &str, token: &str, session: Option<&str>, body: &str) -> (u16, Value) {
    let bearer = format!("Bearer {token}");
    let mut headers = vec![("Authorization", bearer.as_str())];
    headers.extend(session.map(|session| ("Mcp-Session-Id", session)));
    let reply = Connection::open(omp.port).request(method, "/host-llm", &headers, body.as_bytes());
    (reply.status, serde_json::from_slice(&reply.body).unwrap_or_default())
}

fn post(omp: &Omp, enabled: bool) -> (u16, Value) {
    request(omp, "POST", &omp.home.token(), None, &json!({ "enabled": enabled }).to_string())
}

fn switch(omp: &Omp, enabled: bool) -> Value {
    let (status, answer) = post(omp, enabled);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["enabled"], enabled, "{answer}");
    answer
}

/// One prompt; the assistant's last message of its turn.
fn turn(omp: &Omp, prompt: &str) -> Value {
    let from = omp.position();
    omp.send(&json!({"type": "prompt", "id": format!("turn-{from}"), "message": prompt}));
    let end = omp.line_from(from, "the turn did not end", |line| line["type"] == "agent_end");
    let messages = end["messages"].as_array().unwrap();
    let retries = omp.lines().iter().skip(from).filter(|line| line["type"] == "auto_retry_start").count();
    assert_eq!(retries, 0, "the turn was tried again");
    messages.iter().rev().find(|message| message["role"] == "assistant").cloned().unwrap_or_default()
}

fn assert_answered(message: &Value) {
    assert_eq!(message["stopReason"], "stop", "{message}");
}

fn assert_denied(message: &Value) {
    assert_eq!(message["stopReason"], "error", "{message}");
    assert!(says_denied(message), "{message}");
}

/// The deny's own row says the sentence and nothing else, a provider's client says it in its own way.
fn says_denied(message: &Value) -> bool {
    message["errorMessage"].as_str().is_some_and(|text| text.contains(DENIED))
}

fn host(omp: &Omp) -> Value {
    omp.probe(&json!({"op": "host"}))
}

fn ask(omp: &Omp, provider: &str, registry: &str) -> Value {
    omp.probe(&json!({"op": "ask", "provider": provider, "registry": registry}))
}

/// A model as an extension registers it.
fn row(id: &str) -> Value {
    json!({
        "id": id, "name": id, "reasoning": false, "input": ["text"], "contextWindow": 1000, "maxTokens": 100,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    })
}

/// The `host_llm` records: `sid`, whether it was an error, and the arguments.
fn records(home: &Home) -> Vec<(Value, bool, Value)> {
    let records = home.audit().into_iter().filter(|record| record["tool"] == "host_llm");
    records
        .map(|record| {
            assert_eq!((&record["phase"], &record["id"]), (&json!("done"), &Value::Null), "{record}");
            let args = serde_json::from_str(record["args"].as_str().unwrap()).unwrap();
            (record["sid"].clone(), record["isError"] == true, args)
        })
        .collect()
}

#[test]
fn a_prompt_reaches_the_model_but_not_while_it_is_denied() {
    let sink = Model::start();
    let openai = sink.provider("loop-openai", "openai-completions");
    let anthropic = sink.provider("loop-anthropic", "anthropic-messages");
    let omp = Omp::setup(home(&[openai, anthropic])).bridged();
    let choose = |provider: &str| {
        let chosen = omp.rpc(&json!({"type": "set_model", "provider": provider, "modelId": "loopback"}));
        assert_eq!(chosen["success"], true, "{chosen}");
    };
    let before = host(&omp);
    let mut denied = 0;
    for (first, second) in [("loop-openai", "loop-anthropic"), ("loop-anthropic", "loop-openai")] {
        choose(first);
        assert_answered(&turn(&omp, "before"));
        let asked = sink.asked();
        assert!(asked >= 1);

        assert_eq!(switch(&omp, false), json!({"enabled": false, "denied": denied, "degraded": false}));
        let message = turn(&omp, "the session's own row");
        assert_denied(&message);
        assert_eq!(message["errorMessage"], DENIED);
        denied += 1;
        assert_eq!(switch(&omp, false)["denied"], denied, "one attempt, one refusal");
        // A row chosen meanwhile is a real one: it ends on the tripwire.
        choose(second);
        assert_denied(&turn(&omp, "another row"));
        denied += 1;
        assert_eq!(switch(&omp, false)["denied"], denied, "one attempt, one refusal");
        assert_eq!(sink.asked(), asked, "{:?}", sink.requests());
        let (_, shown) = omp.types("/a2mcp");
        assert!(shown.contains(&format!("host_llm=deny denied={denied}")), "{shown}");

        switch(&omp, true);
        assert_answered(&turn(&omp, "after"));
        assert!(sink.asked() > asked);
    }
    choose(before["model"].as_str().unwrap().split('/').next().unwrap());
    assert_eq!(host(&omp), before);
    assert!(omp.types("/a2mcp").1.contains("host_llm=allow"));
    let log = omp.home.read(&format!("a2mcp.{}.stderr", omp.port));
    assert!(
        log.contains("takeover armed: 3 provider(s) shadowed (anthropic, cursor, openai-codex), "),
        "{log}"
    );
    assert!(log.contains("tripwire key(s), model pushed: loop-openai/loopback"), "{log}");
    assert!(!log.contains("takeover restore left"), "{log}");
}

/// The key of the model is what a program prints: it does not run for a turn that is refused.
#[test]
fn a_denied_turn_looks_up_no_credential() {
    let sink = Model::start();
    let home = Home::with_shim();
    let marker = home.path().join("key-was-asked");
    let program = format!("apiKey: \"!sh -c 'echo x >> {}; echo key'\"", marker.display());
    let rows = sink.provider("loop", "openai-completions").replace("apiKey: not-a-real-key", &program);
    home.models(&providers(&[rows]));
    let omp = Omp::setup(home.config(&json!({"host_llm": "deny"}))).bridged();
    let asked = std::fs::read_to_string(&marker).unwrap_or_default();
    assert_denied(&turn(&omp, "refused"));
    assert_eq!(std::fs::read_to_string(&marker).unwrap_or_default(), asked);
    switch(&omp, true);
    assert_answered(&turn(&omp, "answered"));
    assert!(marker.exists());
}

/// Requests that are no fetch: node:https for Anthropic, HTTP/2 for Cursor.
#[test]
fn providers_that_bypass_fetch_are_stopped_too() {
    let (https, h2) = (Model::start(), Model::start());
    // node:https takes no address for a TLS name.
    let url = format!("https://{}", https.address().replace("127.0.0.1", "localhost"));
    let anthropic = https.provider_at("anthropic", "anthropic-messages", &url);
    let cursor = format!("  cursor:\n    baseUrl: http://{}\n    apiKey: not-a-real-key\n", h2.address());
    let omp = Omp::setup(home(&[anthropic, cursor]).config(&json!({"host_llm": "deny"}))).bridged();
    // Before the deny omp opens a connection to its model, and asks Cursor which models there are.
    eventually("what omp does at its start", || {
        (https.connections() > 0 && h2.connections() > 0).then_some(())
    });
    let before = (https.connections(), h2.connections());
    for provider in ["anthropic", "cursor"] {
        let answer = ask(&omp, provider, "session");
        assert_eq!(answer["api"], "a2mcp-deny", "{answer}");
        assert_eq!(answer["errorMessage"], DENIED, "{answer}");
    }
    assert_denied(&turn(&omp, "refused"));
    // omp drops what no extension's path registered, whenever it builds a session.
    omp.probe(&json!({"op": "prune"}));
    assert_eq!(ask(&omp, "anthropic", "session")["errorMessage"], DENIED);
    assert_eq!((https.connections(), h2.connections()), before);

    switch(&omp, true);
    for (provider, sink, before) in [("anthropic", &https, before.0), ("cursor", &h2, before.1)] {
        // The sink answers neither: it is enough that it is asked.
        let answer = omp.probe(&json!({"op": "ask", "provider": provider, "millis": 2000}));
        assert!(!says_denied(&answer), "{answer}");
        assert!(sink.connections() > before, "{provider} was not asked: {answer}");
    }
}

/// What asks without the session: a registry of its own, and omp's own sub-agents.
#[test]
fn whoever_asks_without_the_session_ends_on_the_tripwire() {
    let sink = Model::start();
    let omp = Omp::setup(home(&[
        sink.provider("loop-openai", "openai-completions"),
        sink.provider("loop-anthropic", "anthropic-messages"),
    ]))
    .bridged();
    switch(&omp, false);
    for provider in ["loop-openai", "loop-anthropic"] {
        let answer = ask(&omp, provider, "own");
        assert_ne!(answer["api"], "a2mcp-deny", "{answer}");
        assert!(says_denied(&answer), "{answer}");
    }
    let mut client = omp.client();
    let tasks = json!([{"agent": "task", "task": "Report.", "name": "Denied"}]);
    let result = client.call("task", &json!({"context": "a test", "tasks": tasks}).to_string());
    assert_eq!(result["isError"], false, "{result}");
    eventually("the end of the sub-agent", || {
        let seen = omp.probe(&json!({"op": "agents"}));
        let running = seen["agents"].as_array().unwrap().iter().filter(|agent| agent["status"] == "running");
        (seen["started"] == 2 && running.count() == 1).then_some(())
    });
    assert_eq!(sink.asked(), 0, "{:?}", sink.requests());
    assert!(switch(&omp, false)["denied"].as_u64() >= Some(3));

    switch(&omp, true);
    assert_eq!(ask(&omp, "loop-openai", "own")["stopReason"], "stop");
    assert_eq!(ask(&omp, "loop-anthropic", "own")["stopReason"], "stop");
}

/// A deny of the config: nobody reaches an endpoint whose host still asks its model; a crash of the
/// sidecar changes nothing.
#[test]
fn a_deny_of_the_config_is_there_before_the_endpoint_and_outlives_a_sidecar() {
    let sink = Model::start();
    let rows = [sink.provider("loop", "openai-completions")];
    let omp = Omp::setup(home(&rows).config(&json!({"host_llm": "deny"}))).bridged();
    assert_denied(&turn(&omp, "refused"));
    assert_eq!(records(&omp.home), [(Value::Null, false, json!({"enabled": false}))]);

    let sidecar = omp.sidecar();
    crate::processes::kill(sidecar, rustix::process::Signal::KILL);
    omp.next_sidecar(sidecar);
    assert_eq!(omp.status()["host"]["llm"], json!({"state": "armed", "denied": 1}));
    assert_denied(&turn(&omp, "refused again"));
    assert_eq!(switch(&omp, true)["denied"], 2);
    assert_answered(&turn(&omp, "answered"));

    // Nor does the end of the sidecar bring back what the config says.
    let sidecar = omp.sidecar();
    omp.types("/a2mcp restart");
    omp.next_sidecar(sidecar);
    assert_eq!(omp.status()["host"]["llm"]["state"], "allow");
    assert_answered(&turn(&omp, "answered again"));
    assert_eq!(records(&omp.home).len(), 2);
}

/// What cannot be held back: refused before anything is touched, in the caller's words; while a deny is
/// on, the tripwire stays.
#[test]
fn a_provider_with_a_transport_of_its_own_is_a_reason() {
    let sink = Model::start();
    let omp = Omp::setup(home(&[sink.provider("loop", "openai-completions")])).bridged();
    let native = json!({
        "baseUrl": "http://native.invalid/v1", "apiKey": "k", "api": "openai-completions",
        "models": [row("n")],
    });
    let register = || {
        omp.probe(&json!({"op": "provider", "name": "native", "config": native, "transport": "pi-native"}))
    };
    let unregister = || omp.probe(&json!({"op": "no-provider", "name": "native"}));
    register();
    let before = host(&omp);
    let sid = omp.client().session;
    let body = r#"{"enabled":false}"#;
    let (status, answer) = request(&omp, "POST", &omp.home.token(), Some(&sid), body);
    let reason = answer["error"].as_str().unwrap_or_default().to_owned();
    assert_eq!(status, 500, "{answer}");
    assert!(reason.contains("\"native\"") && reason.contains("pi-native"), "{answer}");
    assert_eq!(host(&omp), before);
    let refused = json!({"enabled": false, "error": reason});
    let (by, is_error, args) = records(&omp.home).pop().unwrap();
    assert_eq!((by, is_error), (json!(sid), true));
    assert_eq!(args["enabled"], refused["enabled"]);
    assert!(args["error"].is_string(), "{args}");
    assert!(omp.types("/a2mcp").1.contains("host_llm=allow (deny was refused)"));

    unregister();
    assert_eq!(switch(&omp, false)["degraded"], false);
    register();
    omp.probe(&json!({"op": "session-start"}));
    eventually("the word of it", || (omp.status()["host"]["llm"]["state"] == "degraded").then_some(()));
    assert_eq!(switch(&omp, false), json!({"enabled": false, "denied": 0, "degraded": true}));
    assert!(omp.types("/a2mcp").1.contains("host_llm=deny (tripwire only)"));
    omp.notice("only the tripwire holds");
    assert_denied(&turn(&omp, "refused by the tripwire"));
    assert_eq!(sink.asked(), 0);
    let last = records(&omp.home).into_iter().rfind(|(_, is_error, _)| *is_error).unwrap();
    assert_eq!((last.0, &last.2["enabled"]), (Value::Null, &json!(false)));

    unregister();
    omp.probe(&json!({"op": "session-start"}));
    assert_eq!(switch(&omp, false)["degraded"], false);
    switch(&omp, true);
    assert_answered(&turn(&omp, "answered"));
    assert_eq!(host(&omp)["fetch"], true);
}

#[test]
fn a_refusal_at_the_start_is_told_and_leaves_the_host_alone() {
    let sink = Model::start();
    let native = "  groq:\n    baseUrl: http://native.invalid/v1\n    apiKey: k\n    transport: pi-native\n";
    let home = home(&[sink.provider("loop", "openai-completions"), native.to_owned()])
        .config(&json!({"host_llm": "deny"}));
    let omp = Omp::setup(home).bridged();
    omp.notice("host_llm \"deny\" of the config was refused");
    let told = records(&omp.home);
    assert_eq!(told.len(), 1);
    assert_eq!((&told[0].0, told[0].1, &told[0].2["enabled"]), (&Value::Null, true, &json!(false)));
    assert_eq!(switch(&omp, true), json!({"enabled": true, "denied": 0, "degraded": false}));
    let log = omp.home.read(&format!("a2mcp.{}.stderr", omp.port));
    assert!(log.contains("takeover refused: "), "{log}");
    assert_eq!(host(&omp)["fetch"], true);
}

#[test]
fn whatever_fails_while_arming_leaves_the_host_as_it_was() {
    let sink = Model::start();
    let omp = Omp::setup(home(&[sink.provider("loop", "openai-completions")])).bridged();
    let before = host(&omp);
    for step in [
        "rows",
        "fetch",
        "credentials",
        "first setting",
        "later setting",
        "first provider",
        "later provider",
        "model",
    ] {
        omp.probe(&json!({"op": "break", "step": step}));
        let (status, answer) = post(&omp, false);
        omp.probe(&json!({"op": "mend"}));
        assert_eq!(status, 500, "{step}: {answer}");
        assert!(answer["error"].as_str().is_some_and(|reason| !reason.is_empty()), "{step}: {answer}");
        assert_eq!(host(&omp), before, "after a throw at: {step}");
        assert_eq!(switch(&omp, true)["degraded"], false);
    }
    assert_answered(&turn(&omp, "answered"));
    switch(&omp, false);
    assert_denied(&turn(&omp, "refused"));
}

#[test]
fn twenty_switches_and_an_extensions_own_rows() {
    let sink = Model::start();
    let omp = Omp::setup(home(&[sink.provider("loop", "openai-completions")])).bridged();
    let own = json!({
        "baseUrl": format!("http://{}/v1", sink.address()), "apiKey": "k", "api": "openai-completions",
        "models": [row("a"), row("b")],
    });
    omp.probe(&json!({"op": "provider", "name": "extension-own", "config": own}));
    let before = host(&omp);
    for round in 0..20 {
        switch(&omp, false);
        let armed = host(&omp);
        assert_eq!((&armed["fetch"], &armed["api"]), (&json!(false), &json!(true)), "round {round}");
        assert_eq!(armed["rows"], before["rows"], "round {round}");
        assert!(armed["denied"].as_u64() > Some(0));
        switch(&omp, true);
        assert_eq!(host(&omp), before, "round {round}");
    }
    assert_eq!(ask(&omp, "extension-own", "session")["stopReason"], "stop");
    assert_answered(&turn(&omp, "answered"));
    assert_eq!(records(&omp.home).len(), 40);
}

/// A claim takes the provider's name from an extension that had it, and cannot give it back: it says so.
#[test]
fn a_provider_that_does_not_come_back_is_named() {
    let sink = Model::start();
    let omp = Omp::setup(home(&[sink.provider("loop", "openai-completions")])).bridged();
    let own = json!({
        "baseUrl": format!("http://{}/v1", sink.address()), "apiKey": "k", "api": "openai-codex-responses",
        "models": [row("of-an-extension")],
    });
    omp.probe(&json!({"op": "provider", "name": "openai-codex", "config": own}));
    switch(&omp, false);
    switch(&omp, true);
    let log = || omp.home.read(&format!("a2mcp.{}.stderr", omp.port));
    let line = "takeover restore left 1 provider(s) not serving their pre-arm rows (openai-codex)";
    eventually("the line", || log().contains(line).then_some(()));
    assert_answered(&turn(&omp, "answered"));
}

#[test]
fn the_route_answers_as_the_contract_says() {
    let sink = Model::start();
    let omp = Omp::setup(home(&[sink.provider("loop", "openai-completions")])).bridged();
    let token = omp.home.token();
    let status = |method: &str, token: &str, body: &str| request(&omp, method, token, None, body).0;
    assert_eq!(status("GET", &token, ""), 405);
    assert_eq!(status("DELETE", "wrong", ""), 405);
    assert_eq!(status("POST", "wrong", r#"{"enabled":false}"#), 401);
    for body in
        ["", "no", "[false]", "{}", r#"{"enabled":0}"#, r#"{"enabled":"false"}"#, r#"{"enabled":null}"#]
    {
        assert_eq!(status("POST", &token, body), 400, "{body}");
    }
    assert!(records(&omp.home).is_empty());
    // A session the sidecar did not issue is nobody.
    let (status, _) = request(&omp, "POST", &token, Some("not-issued"), r#" {"enabled": true, "more": 1}"#);
    assert_eq!(status, 200);
    assert_eq!(records(&omp.home), [(Value::Null, false, json!({"enabled": true}))]);
    assert_answered(&turn(&omp, "and it still works"));
}

/// omp answers a command that outlasts its own patience at once, and its session with a model turn later.
#[test]
fn a_remote_command_ends_with_its_own_output() {
    let sink = Model::start();
    let omp = Omp::setup(home(&[sink.provider("loop", "openai-completions")])).bridged();
    let mut client = omp.client();
    let mut bash = |command: &str, timeout: u32| {
        client.call("bash", &json!({"command": command, "timeout": timeout}).to_string())
    };
    let result = bash("echo $((6*7))", 1);
    assert_eq!(result["isError"], false, "{result}");
    assert!(result.to_string().contains("42"), "{result}");
    let result = bash("sleep 1.4; echo $((6*7))", 2);
    assert_eq!(result["isError"], false, "{result}");
    let text = result["content"][0]["text"].as_str().unwrap();
    assert!(text.starts_with("42") && !text.contains("Backgrounded"), "{text}");
    let result = bash("sleep 1.2; echo out; exit 3", 2);
    assert_eq!(result["isError"], true, "{result}");
    assert!(result.to_string().contains("out"), "{result}");
    let result = bash("echo begun; sleep 60", 2);
    assert_eq!(result["isError"], true, "{result}");
    assert!(result.to_string().contains("begun") && result.to_string().contains("timed out"), "{result}");

    // Nothing of it came to the session: a turn of its own is the first.
    assert_answered(&turn(&omp, "hello"));
    let turns = omp.lines().iter().filter(|line| line["type"] == "agent_start").count();
    assert_eq!(turns, 1);
    eventually("the end of the commands", || {
        let commands = crate::processes::of(omp.home.path());
        commands.iter().all(|seen| !seen.arguments.iter().any(|argument| argument == "sleep")).then_some(())
    });
}
