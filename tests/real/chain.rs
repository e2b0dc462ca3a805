//! omp as the client of omp: a second omp with the `mcp.json` that `a2mcp connect omp` prints sees the
//! first one's tools as its own and calls them with its own MCP client.

use std::sync::Arc;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::omp::{Home, Omp};
use crate::processes::kill;
use crate::support::{SOON, binary, eventually, within};

/// Puts the configuration that `server` prints for omp into `home`.
fn connect(home: &Home, server: &Omp) {
    let printed = server.home.a2mcp(&["connect", "omp"]);
    assert!(printed.status.success(), "{printed:?}");
    std::fs::write(home.agent("mcp.json"), printed.stdout).unwrap();
}

fn names(omp: &Omp) -> Vec<String> {
    serde_json::from_value(omp.probe(&json!({"op": "names"}))).unwrap()
}

/// Waits until `client` has the other's tools; its name for each of them begins with this.
fn until_connected(client: &Omp) {
    // Its own client tries again with pauses.
    within(SOON * 3, "the other omp's tools", || {
        names(client).iter().any(|name| name == "mcp__a2mcp_read").then_some(())
    });
}

fn execute(client: &Omp, tool: &str, arguments: Value) -> Value {
    client.probe(&json!({"op": "execute", "tool": format!("mcp__a2mcp_{tool}"), "arguments": arguments}))
}

#[test]
fn a_second_omp_uses_the_first_ones_tools() {
    let server = Omp::start();
    // The client needs no bridge of its own.
    let home = Home::bare();
    connect(&home, &server);
    let client = Omp::setup(home).spawn();
    until_connected(&client);

    std::fs::write(server.home.work().join("where.txt"), "in the first one's directory").unwrap();
    let result = execute(&client, "read", json!({"path": "where.txt"}));
    assert!(result.to_string().contains("in the first one's directory"), "{result}");
    let result = execute(&client, "bash", json!({"command": "pwd"}));
    assert!(result.to_string().contains(server.home.work().to_str().unwrap()), "{result}");
    let result = execute(&client, "bash", json!({"command": "exit 3"}));
    assert!(result.to_string().contains("code 3"), "{result}");
    let result = execute(&client, "probe_throw", json!({}));
    assert!(result.to_string().contains("the probe threw"), "{result}");
    // Long enough for a stream.
    let result = execute(&client, "bash", json!({"command": "sleep 1.5; echo slept"}));
    assert!(result.to_string().contains("slept"), "{result}");

    // Every tool of the first has its counterpart, the odd one too.
    let there = names(&server);
    let here = names(&client);
    for name in &there {
        assert!(here.contains(&format!("mcp__a2mcp_{name}")), "no counterpart of {name} in {here:#?}");
    }
    server.home.assert_every_call_has_its_end();
}

/// The sidecar dies under a running call of omp's own client, which comes back on its own: the call runs
/// once, and its result arrives.
fn survives_the_sidecar(config: &Value) {
    let server = Omp::setup(Home::with_shim().config(config)).bridged();
    let home = Home::bare();
    connect(&home, &server);
    let client = Omp::setup(home).spawn();
    until_connected(&client);

    let log = server.home.path().join("executions");
    let go = server.home.path().join("go");
    let script = format!(
        "echo run >> {}; while [ ! -e {} ]; do sleep 0.05; done; echo finished",
        log.display(),
        go.display()
    );
    let before = server.sidecar();
    let result = std::thread::scope(|scope| {
        let call = scope.spawn(|| execute(&client, "bash", json!({ "command": script })));
        eventually("the execution", || log.exists().then_some(()));
        kill(before, Signal::KILL);
        eventually("the next sidecar", || {
            let now = server.home.sidecars();
            (now.len() == 1 && now[0] != before).then_some(())
        });
        // The caller is back when the next sidecar knows a caller again, or has given up.
        std::fs::write(&go, "").unwrap();
        call.join().unwrap()
    });
    assert!(result.to_string().contains("finished"), "{result}");
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "run\n", "it ran more than once");
    server.home.assert_every_call_has_its_end();
}

/// It got nothing yet: it sends the call again.
#[test]
fn a_call_that_waits_for_its_answer_survives_the_sidecar_and_runs_once() {
    survives_the_sidecar(&json!({"streaming": "off"}));
}

/// It has a stream: it resumes it.
#[test]
fn a_call_on_a_stream_survives_the_sidecar_and_runs_once() {
    survives_the_sidecar(&json!({"streamAfterMs": 0}));
}

/// The sidecar dies at one point of a call's way after the other, always under a call of omp's own
/// client: each runs once, and its result arrives.
fn survives_at(points: &[&str], config: &Value) {
    let home = Home::with_shim().config(config);
    let armed = home.path().join("crash-at");
    home.point_at_script(&format!(
        "if [ -e {armed} ]; then A2MCP_CRASH_AT=$(cat {armed}); export A2MCP_CRASH_AT; rm {armed}; fi\nexec '{binary}' \"$@\"",
        armed = armed.display(),
        binary = binary().display(),
    ));
    let server = Omp::setup(home).bridged();
    let home = Home::bare();
    connect(&home, &server);
    let client = Omp::setup(home).spawn();
    until_connected(&client);
    for point in points {
        std::fs::write(&armed, format!("{point}:1")).unwrap();
        let before = server.sidecar();
        kill(before, Signal::KILL);
        let doomed = server.next_sidecar(before);
        let log = server.home.path().join(point);
        let script = format!("echo run >> {}; sleep 0.4; echo finished {point}", log.display());
        let result = execute(&client, "bash", json!({ "command": script }));
        assert!(result.to_string().contains(&format!("finished {point}")), "{point}: {result}");
        server.next_sidecar(doomed);
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "run\n", "{point}: it ran more than once");
    }
    let records = server.home.audit();
    let of = |phase: &str| records.iter().filter(|record| record["phase"] == phase).count();
    assert_eq!(of("done"), points.len(), "{records:#?}");
    let lost = points.iter().filter(|point| ["after-audit-start", "frame-half"].contains(point)).count();
    assert_eq!(of("start"), points.len() + lost, "{records:#?}");
}

/// What takes JSON only is sent again by it.
#[test]
fn a_call_of_omp_that_waits_for_json_survives_a_kill_at_each_point() {
    let points = [
        "before-audit-start",
        "frame-half",
        "frame-whole",
        "done-written",
        "response-half",
        "response-whole",
    ];
    survives_at(&points, &json!({"streaming": "off"}));
}

/// A stream that has begun is resumed by it, and only that: it never sends such a call again. So the
/// points before the host has the call are not for it, nor `frame-whole`: a stream that breaks within
/// a millisecond of its first event is one that its HTTP client never saw an event of.
#[test]
fn a_call_of_omp_on_a_stream_survives_a_kill_at_each_point() {
    survives_at(
        &["result-read", "done-written", "response-half", "response-whole"],
        &json!({"streamAfterMs": 0}),
    );
}

/// A host whose own MCP list names its own bridge would list itself for ever: `denyMCPTools` is the
/// cure.
#[test]
fn a_host_that_lists_itself_is_cured_by_deny_mcp_tools() {
    let home = Arc::new(Home::with_shim().config(&json!({"denyMCPTools": true})));
    let first = Omp::setup(home.clone()).bridged();
    connect(&home, &first);
    let port = first.port;
    drop(first);
    eventually("the end of the first", || home.sidecars().is_empty().then_some(()));

    // The URL is remembered: the same host is its own client now.
    let omp = Omp::setup(home.clone()).bridged();
    assert_eq!(omp.port, port);
    until_connected(&omp);
    let mut client = omp.client();
    // Its own client has seen the list once more when it lists nothing of itself.
    let listed = client.rpc("tools/list", "{}")["result"]["tools"].to_string();
    assert!(listed.contains("\"read\"") && !listed.contains("mcp__"), "{listed}");
    let result = client.call("mcp__a2mcp_read", r#"{"path":"x"}"#);
    assert_eq!(result["isError"], true);
    assert!(result["content"][0]["text"].as_str().unwrap().contains("not exposed"), "{result}");
    assert!(!names(&omp).iter().any(|name| name.contains("mcp__a2mcp_mcp__")), "{:#?}", names(&omp));
    drop(home);
}
