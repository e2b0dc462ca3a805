//! A host without a model: the placeholder that lets it run, and that it never stands before a real one.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::model::Model;
use crate::omp::{Home, Omp};
use crate::serves::PNG;
use crate::support::eventually;

fn home_without_models() -> Home {
    let home = Home::with_shim();
    std::fs::remove_file(home.agent("models.yml")).unwrap();
    home
}

fn chosen(omp: &Omp) -> String {
    let state = omp.rpc(&json!({"type": "get_state"}));
    let model = &state["data"]["model"];
    format!("{}/{}", model["provider"].as_str().unwrap_or_default(), model["id"].as_str().unwrap_or_default())
}

fn available(omp: &Omp) -> Vec<String> {
    let models = omp.rpc(&json!({"type": "get_available_models"}));
    let models = models["data"]["models"].as_array().unwrap().iter();
    models.map(|model| model["provider"].as_str().unwrap().to_owned()).collect()
}

/// Headless, omp would end at once.
#[test]
fn a_host_without_a_model_runs_and_serves() {
    let omp = Omp::setup(home_without_models()).bridged();
    assert_eq!(chosen(&omp), "a2mcp/offline");
    omp.notice("the placeholder a2mcp/offline was selected");
    assert_eq!(omp.client().call_text("probe_odd", "{}"), "{}");

    // Its images are images.
    std::fs::write(omp.home.work().join("image.png"), STANDARD.decode(PNG).unwrap()).unwrap();
    let result = omp.client().call("read", r#"{"path":"image.png"}"#);
    let kinds: Vec<&Value> =
        result["content"].as_array().unwrap().iter().map(|block| &block["type"]).collect();
    assert!(kinds.contains(&&json!("image")), "{result}");

    // omp drops what no extension's path registered, whenever it builds a session.
    eventually("its own source", || {
        omp.probe(&json!({"op": "prune"}));
        available(&omp).is_empty().then_some(())
    });
    omp.probe(&json!({"op": "session-start"}));
    assert_eq!(available(&omp), ["a2mcp"]);
    assert_eq!(chosen(&omp), "a2mcp/offline");
    let told = omp.notices().iter().filter(|notice| notice.contains("placeholder")).count();
    assert_eq!(told, 1, "{:#?}", omp.notices());

    omp.close_stdin();
    omp.assert_all_gone();
    assert!(!omp.home.agent("models.yml").exists());
    for file in std::fs::read_dir(omp.home.agent_dir()).unwrap().flatten().map(|file| file.path()) {
        if file.is_file() {
            let bytes = std::fs::read(&file).unwrap();
            let holds = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
            assert!(!holds("a2mcp/offline") && !holds("a2mcp.invalid"), "{} names it", file.display());
        }
    }
}

#[test]
fn it_is_denied_like_any_other() {
    let home = home_without_models().config(&json!({"host_llm": "deny"}));
    let omp = Omp::setup(home).bridged();
    let from = omp.position();
    omp.send(&json!({"type": "prompt", "id": "p", "message": "hello"}));
    let end = omp.line_from(from, "the turn did not end", |line| line["type"] == "agent_end");
    assert!(end.to_string().contains("host inference is disabled in this mode"), "{end}");
}

#[test]
fn a_real_model_goes_first_and_the_placeholder_goes() {
    let sink = Model::start();
    for provider in ["aaa", "zzz"] {
        let home = Home::with_shim();
        home.models(&format!("providers:\n{}", sink.provider(provider, "openai-completions")));
        let omp = Omp::setup(home).bridged();
        assert_eq!(chosen(&omp), format!("{provider}/loopback"));
        eventually("the end of the placeholder", || (available(&omp) == [provider]).then_some(()));
        assert!(!omp.notices().iter().any(|notice| notice.contains("placeholder")), "{:#?}", omp.notices());
    }
    let omp = Omp::setup(home_without_models()).env("ANTHROPIC_API_KEY", "not-a-real-key").bridged();
    assert!(chosen(&omp).starts_with("anthropic/"), "{}", chosen(&omp));
    eventually("the end of the placeholder", || {
        available(&omp).iter().all(|provider| provider != "a2mcp").then_some(())
    });
}

/// A provider whose models are only known after it was asked.
#[test]
fn a_model_that_is_found_later_takes_its_place() {
    let sink = Model::start();
    let home = Home::with_shim();
    home.models(&format!(
        "providers:\n  listing:\n    baseUrl: http://{}/v1\n    api: openai-completions\n    apiKey: k\n    \
         discovery:\n      type: openai-models-list\n",
        sink.address()
    ));
    let omp = Omp::setup(home).bridged();
    eventually("the listed model", || (chosen(&omp) == "listing/listed").then_some(()));
    eventually("the end of the placeholder", || (available(&omp) == ["listing"]).then_some(()));
}

/// The operator's own provider of that name, e.g. from the predecessor's instructions.
#[test]
fn a_provider_of_that_name_is_left_alone() {
    let sink = Model::start();
    let home = Home::with_shim();
    home.models(&sink.yaml());
    let omp = Omp::setup(home).bridged();
    assert_eq!(chosen(&omp), "a2mcp/loopback");
    let answer = omp.probe(&json!({"op": "ask", "provider": "a2mcp"}));
    assert_eq!(answer["stopReason"], "stop", "{answer}");
}
