//! Sub-agents and second loads of the extension: one process, one bridge, as long as its Main session.

use serde_json::json;

use crate::model::Model;
use crate::omp::{Home, Omp};
use crate::support;
use crate::support::http::Connection;

fn announced(omp: &Omp) -> usize {
    omp.notices().iter().filter(|notice| notice.contains("are served at")).count()
}

/// Thirty times the extension's factory, `session_start` and for half of them `session_shutdown`, all
/// at once: what omp does for sub-agents.
#[test]
fn sub_agents_find_the_bridge_and_do_not_end_it() {
    let omp = Omp::start();
    let sidecar = omp.sidecar();
    let mut client = omp.client();
    let shim = omp.home.agent("extensions/a2mcp/index.ts");
    let found = omp.probe(&json!({"op": "sub-agents", "shim": shim, "count": 30}));
    assert_eq!(found["told"], 0, "a sub-agent has no operator to tell");
    assert_eq!(client.call_text("probe_odd", "{}"), "{}");
    assert_eq!(omp.sidecar(), sidecar);
    assert_eq!(announced(&omp), 1, "{:#?}", omp.notices());

    omp.close_stdin();
    omp.assert_all_gone();
}

/// The same extension from two places, loaded into one host.
#[test]
fn an_extension_loaded_twice_is_one_bridge() {
    let home = Home::with_shim();
    let copy = home.path().join("copy");
    std::fs::create_dir(&copy).unwrap();
    for file in std::fs::read_dir(home.agent("extensions/a2mcp")).unwrap().flatten() {
        std::fs::copy(file.path(), copy.join(file.file_name())).unwrap();
    }
    let second = copy.join("index.ts");
    let omp = Omp::setup(home).arguments(&["-e", second.to_str().unwrap()]).bridged();
    assert_eq!(omp.client().call_text("probe_odd", "{}"), "{}");
    assert_eq!(omp.home.sidecars().len(), 1);
    assert!(omp.types("/a2mcp").1.contains("main session live"));
    assert_eq!(announced(&omp), 1, "{:#?}", omp.notices());
    omp.close_stdin();
    omp.assert_all_gone();
}

/// omp's own sub-agents, started by a remote caller with the host's `task` tool.
#[test]
fn real_sub_agents_find_the_bridge_and_do_not_end_it() {
    let model = Model::start();
    let home = Home::with_shim();
    home.models(&model.yaml());
    let omp = Omp::setup(home).bridged();
    let sidecar = omp.sidecar();
    let mut client = omp.client();
    let tasks: Vec<_> = (0..3)
        .map(|index| json!({"agent": "task", "task": "Report.", "name": format!("Agent{index}")}))
        .collect();
    let result = client.call("task", &json!({"context": "a test", "tasks": tasks}).to_string());
    assert_eq!(result["isError"], false, "{result}");

    // omp loads the extension for each of them and tells it of each one's start.
    support::eventually("the start of the sub-agents", || {
        let seen = omp.probe(&json!({"op": "agents"}));
        (seen["factory"] == 4 && seen["started"] == 4).then_some(())
    });
    assert_eq!(client.call_text("probe_odd", "{}"), "{}");
    support::eventually("the end of the sub-agents", || {
        let seen = omp.probe(&json!({"op": "agents"}));
        let running = seen["agents"].as_array().unwrap().iter().filter(|agent| agent["status"] == "running");
        (model.asked() >= 3 && running.count() == 1).then_some(())
    });

    assert_eq!(omp.sidecar(), sidecar);
    assert_eq!(client.call_text("probe_odd", "{}"), "{}");
    assert_eq!(announced(&omp), 1, "{:#?}", omp.notices());
    omp.close_stdin();
    omp.assert_all_gone();
}

/// A process that outlives its Main session, as under ACP: no bridge without one, a new one with the
/// next, at the same URL.
#[test]
fn the_bridge_lives_as_long_as_the_main_session() {
    let mut omp = Omp::start();
    let port = omp.port;
    omp.probe(&json!({"op": "main-ends"}));
    support::eventually("the end of the bridge", || omp.home.sidecars().is_empty().then_some(()));
    assert!(Connection::try_open(port).is_err());
    omp.assert_alive();

    omp.probe(&json!({"op": "main-comes"}));
    omp.nth_line("the bridge was not announced again", 2, |line| {
        line["message"].as_str().is_some_and(|text| text.contains("are served at"))
    });
    omp.until_announced();
    assert_eq!(omp.port, port, "the URL is another one");
    assert_eq!(omp.client().call_text("probe_odd", "{}"), "{}");
    assert_eq!(announced(&omp), 2, "{:#?}", omp.notices());
}
