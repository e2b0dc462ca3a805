//! The switch on the host's own model requests and the placeholder model, in a real omp. A sink on
//! loopback plays the providers, so that "no request left" is something seen.

use serde_json::{Value, json};

use crate::model::Model;
use crate::omp::{Home, Omp};
use crate::support::http::Connection;

/// What a refused turn ends with.
const DENIED: &str = "a2mcp takeover: host inference is disabled in this mode";

fn providers(providers: &[String]) -> String {
    format!("providers:\n{}", providers.concat())
}

fn post(omp: &Omp, body: &str) -> (u16, Value) {
    let bearer = format!("Bearer {}", omp.home.token());
    let reply = Connection::open(omp.port).request(
        "POST",
        "/host-llm",
        &[("Authorization", &bearer)],
        body.as_bytes(),
    );
    (reply.status, serde_json::from_slice(&reply.body).unwrap_or_default())
}

fn switch(omp: &Omp, enabled: bool) -> Value {
    let (status, answer) = post(omp, &json!({ "enabled": enabled }).to_string());
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
    messages.iter().rev().find(|message| message["role"] == "assistant").cloned().unwrap_or_default()
}

fn assert_denied(message: &Value) {
    assert_eq!(message["stopReason"], "error", "{message}");
    assert_eq!(message["errorMessage"], DENIED, "{message}");
}

#[test]
fn a_prompt_reaches_the_model_but_not_while_it_is_denied() {
    let sink = Model::start();
    let home = Home::with_shim();
    home.models(&providers(&[sink.provider("loop", "openai-completions")]));
    let omp = Omp::setup(home).bridged();

    let message = turn(&omp, "one");
    assert_eq!(message["stopReason"], "stop", "{message}");
    let asked = sink.asked();
    assert!(asked >= 1);

    assert_eq!(switch(&omp, false), json!({"enabled": false, "denied": 0, "degraded": false}));
    assert_denied(&turn(&omp, "two"));
    assert_eq!(sink.asked(), asked);

    switch(&omp, true);
    let message = turn(&omp, "three");
    assert_eq!(message["stopReason"], "stop", "{message}");
    assert!(sink.asked() > asked);
}
