//! Issue 3, point 6: what the public SDKs make of streams, against a host with the suite's fixtures:
//! progress, cancelling, a call that is silent for longer than their HTTP clients wait, a large result.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::parts::{installed, program, root};
use crate::support::{Host, fixtures, within};

/// Longer than any SDK's HTTP client waits for a byte (300 s).
const SILENCE: u64 = 330;

pub(crate) const SDKS: [&str; 5] = ["ts-sdk-v1", "ts-sdk-v2", "py-1", "py-2", "rmcp"];

/// How to start the program of one SDK.
pub(crate) fn sdk(name: &str) -> Command {
    let script = |file: &str| root().join("tests/clients").join(name).join(file);
    if name == "rmcp" {
        return Command::new(installed("rmcp/debug/rmcp-client"));
    }
    let (interpreter, script) = if name.starts_with("ts-") {
        installed(name);
        (program("node"), script("client.mjs"))
    } else {
        (installed(&format!("{name}/bin/python")), script("client.py"))
    };
    let mut command = Command::new(interpreter);
    command.arg(script);
    command
}

/// Runs one scenario to its end, which must be a good one; what the program found.
fn scenario(host: &Host, name: &str, scenario: &str, parameters: &Value, limit: Duration) -> Value {
    scenario_at((host.port, &host.token), name, scenario, parameters, limit)
}

pub(crate) fn scenario_at(
    (port, token): (u16, &str),
    name: &str,
    scenario: &str,
    parameters: &Value,
    limit: Duration,
) -> Value {
    let mut child = sdk(name)
        .args([scenario, &parameters.to_string()])
        .env("A2MCP_URL", format!("http://127.0.0.1:{port}/mcp"))
        .env("A2MCP_TOKEN", token)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    within(limit, &format!("the end of {name} {scenario}"), || child.try_wait().unwrap());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{name} {scenario}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{name} {scenario}: {output:?}"))
}

fn soon(host: &Host, name: &str, what: &str, parameters: &Value) -> Value {
    scenario(host, name, what, parameters, Duration::from_secs(60))
}

fn call(tool: &str, arguments: Value) -> Value {
    json!({"call": {"name": tool, "arguments": arguments}})
}

/// Everything quick that one SDK does.
fn check(name: &str) {
    // A large result stays JSON however busy the machine is.
    let host = fixtures::setup().config(r#"{"streamAfterMs":20000}"#).start();
    let listed = soon(&host, name, "list", &json!({}));
    assert!(listed["tools"].as_array().unwrap().iter().any(|tool| tool == "json_schema_2020_12_tool"));
    let calls = json!({"calls": [{"name": "test_multiple_content_types", "arguments": {}}]});
    let found = soon(&host, name, "basics", &calls);
    assert_eq!(found["ping"], true, "{name}: {found}");
    let kinds: Vec<&Value> = found["results"][0]["content"]
        .as_array()
        .unwrap_or_else(|| panic!("{name}: {found}"))
        .iter()
        .map(|block| &block["type"])
        .collect();
    assert_eq!(kinds, ["text", "image", "resource"], "{name}");

    let found = soon(&host, name, "progress", &call("test_tool_with_progress", json!({})));
    assert_eq!(found["results"][0]["content"][0]["text"], "progress reported", "{name}: {found}");
    // One that nobody has read yet when the next one comes gives way to it; the last one always arrives.
    let steps = found["progress"].as_array().unwrap();
    let numbers: Vec<f64> = steps.iter().filter_map(|step| step["progress"].as_f64()).collect();
    let known = [0.0, 50.0, 100.0];
    assert!(numbers.is_sorted() && numbers.iter().all(|number| known.contains(number)), "{name}: {found}");
    assert_eq!(steps.last().unwrap()["message"], "step 100 of 100", "{name}: {found}");

    let found = soon(&host, name, "cancel", &call("hang", json!({})));
    assert_eq!(found["ping"], true, "{name}: {found}");
    let hang = host.call_frame("hang");
    let cancelled = host.frame(|frame| frame["method"] == "notifications/cancelled");
    assert_eq!(cancelled["params"]["requestId"], hang["id"], "{name}: the host hears of it");

    let large = 17 << 20;
    let found = soon(&host, name, "large", &call("large", json!({"bytes": large})));
    assert_eq!((&found["characters"], &found["ping"]), (&json!([large]), &json!(true)), "{name}");
    if let Some(http) = found["http"].as_array() {
        assert!(http.iter().any(|line| line == "POST tools/call 200"), "{name}: {http:?}");
    }
}

#[test]
fn ts_sdk_v1_streams() {
    check("ts-sdk-v1");
}

#[test]
fn ts_sdk_v2_streams() {
    check("ts-sdk-v2");
}

#[test]
fn py_1_streams() {
    check("py-1");
}

#[test]
fn py_2_streams() {
    check("py-2");
}

#[test]
fn rmcp_streams() {
    check("rmcp");
}

#[test]
fn every_sdk_sits_through_a_long_silence() {
    let host = fixtures::setup().start();
    let mut parameters = call("silent", json!({"seconds": SILENCE}));
    parameters["seconds"] = json!(SILENCE + 60);
    std::thread::scope(|scope| {
        for name in SDKS {
            let (host, parameters) = (&host, &parameters);
            scope.spawn(move || {
                let limit = Duration::from_secs(SILENCE + 90);
                let found = scenario(host, name, "silent", parameters, limit);
                assert_eq!(found["results"][0]["content"][0]["text"], "done", "{name}: {found}");
            });
        }
    });
    assert_eq!(host.count("tools/call"), SDKS.len(), "nobody sent it twice");
}
