//! Remote calls go through the host's own approval gate and through nothing else.

use std::sync::Arc;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::omp::{Home, Omp};
use crate::processes::kill;
use crate::streams::Events;
use crate::support::eventually;

fn always_asking() -> Omp {
    Omp::setup(Arc::new(Home::with_shim())).arguments(&["--approval-mode=always-ask"]).bridged()
}

fn is_question(line: &Value) -> bool {
    line["type"] == "extension_ui_request" && line["method"] == "select"
}

/// The calls that the status shows as waiting for the operator.
fn waiting(omp: &Omp) -> Vec<Value> {
    let calls = omp.status()["calls"].as_array().unwrap().clone();
    calls.into_iter().filter(|call| call["phase"] == "awaiting approval").collect()
}

#[test]
fn the_operators_answer_decides() {
    let omp = always_asking();
    let mut client = omp.client();
    let answers = [("Deny", true), ("Approve", false)];
    for (round, (answer, is_error)) in (1..).zip(answers) {
        let proof = omp.home.work().join(answer);
        client.start_call("1", "bash", &json!({"command": format!("echo {answer} >> {answer}")}).to_string());
        let question = omp.nth_line("omp did not ask", round, is_question);
        assert!(question["title"].as_str().unwrap().contains("bash"), "{question}");
        // The host's own question does not say who asks; a notice does, once for each.
        let who =
            format!("\"bash\", asked by raw (session {}), waits for your approval", &client.session[..8]);
        omp.notice(&who);
        let told = omp.notices().iter().filter(|notice| notice.contains(&who)).count();
        assert_eq!(told, round, "{:#?}", omp.notices());
        assert!(!proof.exists(), "it ran before it was approved");
        omp.send(&json!({"type": "extension_ui_response", "id": question["id"], "value": answer}));
        let reply = client.read().json();
        assert_eq!(reply["result"]["isError"], is_error, "{reply}");
        assert_eq!(
            reply["result"]["content"][0]["text"].as_str().unwrap().contains("denied by user"),
            is_error,
            "{reply}"
        );
        assert_eq!(
            std::fs::read_to_string(proof).unwrap_or_default(),
            if is_error { "" } else { "Approve\n" }
        );
    }
    assert_eq!(waiting(&omp), Vec::<Value>::new());

    // A caller with a stream hears what it waits for, by a log message and by progress.
    let params = json!({
        "name": "bash", "arguments": {"command": "echo heard"}, "_meta": {"progressToken": "mine"},
    });
    let mut events = Events::call(client, &params);
    for method in ["notifications/message", "notifications/progress"] {
        let said = events.until(method, |message| message["method"] == method);
        assert!(said["params"].to_string().contains("awaiting approval"), "{said}");
    }
    let question = omp.nth_line("omp did not ask", 3, is_question);
    omp.send(&json!({"type": "extension_ui_response", "id": question["id"], "value": "Approve"}));
    let answer = events.until("the result", |message| message["id"] == "streamed");
    assert!(answer["result"].to_string().contains("heard"), "{answer}");
}

/// The call waits, everything else works, status says so, a new sidecar knows it, and the end of the
/// host ends it.
#[test]
fn an_approval_nobody_answers_waits_and_holds_nothing_up() {
    let omp = always_asking();
    let client = omp.client();
    let mut caller = client.again();
    caller.start_call("1", "bash", r#"{"command":"touch proof"}"#);
    omp.line("omp did not ask", is_question);
    let seen = eventually("the status", || waiting(&omp).pop());
    assert_eq!(seen["tool"], "bash", "{seen}");
    let mut other = client.again();
    assert_eq!(other.rpc("ping", "{}")["result"], json!({}));
    assert!(other.rpc("tools/list", "{}")["result"]["tools"].is_array());

    let before = omp.sidecar();
    kill(before, Signal::KILL);
    omp.notice("stopped unexpectedly");
    omp.next_sidecar(before);
    let again = eventually("the status of the next sidecar", || waiting(&omp).pop());
    assert_eq!(again["id"], seen["id"]);
    assert_eq!(client.again().rpc("ping", "{}")["result"], json!({}));

    omp.close_stdin();
    omp.assert_all_gone();
    assert!(!omp.home.work().join("proof").exists(), "it ran without approval");
    omp.home.assert_every_call_has_its_end();
}
