//! Issue 8, point 5: public stdio servers behind `a2mcp wrap`, listed and called by the public SDKs,
//! progress and cancel included; and the official conformance suite through it, in front of a stdio server
//! that has the suite's fixtures.

use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::conformance::{assert_scored, suite};
use crate::parts::{installed, program, root};
use crate::sdks::{SDKS, scenario_at};
use crate::support::within;
use crate::support::wrap::Wrap;

const LIMIT: Duration = Duration::from_secs(90);

fn conformance(part: &str, arguments: &[&str], stream_after_ms: u64) -> crate::conformance::Summary {
    let wrap = Wrap::start_with(&format!(r#"{{"streamAfterMs":{stream_after_ms}}}"#), &[], &[]);
    let (status, summary) = suite(part, arguments, wrap.port(), &wrap.token());
    assert_eq!(wrap.noted("start").len(), 1, "one process serves the whole suite");
    // A stdio server cannot close its caller's stream: that scenario, which is not scored, has nothing to
    // call.
    let failed: Vec<_> = summary
        .scenarios
        .iter()
        .filter(|(name, _, failed)| *failed > 0 && name != "server-sse-polling")
        .collect();
    assert!(failed.is_empty(), "{failed:?}, exit code {status:?}: {}", summary.text);
    summary
}

#[test]
fn the_frozen_requirements_pass_through_wrap() {
    for stream_after_ms in [0, 60_000] {
        assert_scored(&conformance("conformance-a", &["--requirements", "2025-11-25"], stream_after_ms));
    }
}

#[test]
fn the_stable_suite_passes_through_wrap() {
    for stream_after_ms in [0, 60_000] {
        let summary = conformance("conformance-b", &["--suite", "all"], stream_after_ms);
        assert_eq!(summary.scenarios.len(), 32, "{}", summary.text);
    }
}

/// A public server, and calls that show that it works.
struct Public {
    /// Names that are listed, among others.
    tools: &'static [&'static str],
    /// A call, whether its result is an error, and what that contains.
    cases: Vec<(Value, bool, &'static str)>,
    /// A call that reports progress in three steps, and one that does so for a minute.
    progress: Option<[Value; 2]>,
}

fn node(script: &str) -> Command {
    let mut command = Command::new(program("node"));
    command.arg(installed("servers/node_modules/@modelcontextprotocol").join(script).join("dist/index.js"));
    command
}

fn start(command: &Command) -> Wrap {
    Wrap::start_command(tempfile::tempdir().unwrap(), r#"{"streamAfterMs":20000}"#, &[], command)
}

fn call(name: &str, arguments: Value) -> Value {
    json!({"name": name, "arguments": arguments})
}

/// Every SDK lists and calls it; then its end leaves nothing.
fn check(mut wrap: Wrap, public: &Public) {
    let (port, token) = (wrap.port(), wrap.token());
    std::thread::scope(|scope| {
        for sdk in SDKS {
            let token = &token;
            scope.spawn(move || check_sdk(public, sdk, (port, token)));
        }
    });
    let all = [wrap.guard(), wrap.host(), wrap.sidecar()];
    wrap.host().signal(Signal::INT);
    assert!(wrap.program.end().success());
    within(Duration::from_secs(3), "the end of all", || {
        all.iter().all(|process| !process.is_alive()).then_some(())
    });
}

fn check_sdk(public: &Public, sdk: &str, bridge: (u16, &str)) {
    let calls: Vec<&Value> = public.cases.iter().map(|(call, ..)| call).collect();
    let found = scenario_at(bridge, sdk, "basics", &json!({"calls": calls}), LIMIT);
    let listed = found["tools"].as_array().unwrap_or_else(|| panic!("{sdk}: {found}"));
    for tool in public.tools {
        assert!(listed.iter().any(|name| name == tool), "{sdk}: no {tool} in {listed:?}");
    }
    assert_eq!(found["ping"], true, "{sdk}: {found}");
    for ((call, is_error, contains), result) in public.cases.iter().zip(found["results"].as_array().unwrap())
    {
        assert_eq!(result["isError"], *is_error, "{sdk}: {call} -> {result}");
        assert!(result["content"].to_string().contains(contains), "{sdk}: {call} -> {result}");
    }
    let Some([short, endless]) = &public.progress else { return };
    let found = scenario_at(bridge, sdk, "progress", &json!({"call": short}), LIMIT);
    let steps: Vec<f64> =
        found["progress"].as_array().unwrap().iter().filter_map(|step| step["progress"].as_f64()).collect();
    // On a busy machine a step takes the place of one that was not read yet, and one that comes together
    // with the result may find its handler gone: some SDKs handle notifications later than answers.
    let are_known = steps.iter().all(|step| [1.0, 2.0, 3.0].contains(step));
    assert!(!steps.is_empty() && are_known && steps.is_sorted(), "{sdk}: {found}");
    assert_eq!(found["results"][0]["isError"], false, "{sdk}: {found}");
    let found = scenario_at(bridge, sdk, "cancel", &json!({"call": endless}), LIMIT);
    assert_eq!(found["ping"], true, "{sdk}: {found}");
}

#[test]
fn server_everything() {
    let long = |duration: u64, steps: u64| {
        call("trigger-long-running-operation", json!({"duration": duration, "steps": steps}))
    };
    check(
        start(&node("server-everything")),
        &Public {
            tools: &[
                "echo",
                "get-sum",
                "trigger-sampling-request",
                "trigger-elicitation-request",
                "get-roots-list",
            ],
            cases: vec![
                (
                    call("echo", json!({"message": "\u{4f60}\u{597d} \u{1f600}"})),
                    false,
                    "\u{4f60}\u{597d} \u{1f600}",
                ),
                (call("get-sum", json!({"a": 2, "b": 40})), false, "42"),
                (call("get-tiny-image", json!({})), false, "image/png"),
                (call("get-structured-content", json!({"location": "Chicago"})), false, "temperature"),
                (call("no-such-tool", json!({})), true, "not exposed"),
            ],
            progress: Some([long(1, 3), long(60, 60)]),
        },
    );
}

#[test]
fn server_filesystem() {
    let files = tempfile::tempdir().unwrap();
    std::fs::write(files.path().join("a b.txt"), "read through wrap\n").unwrap();
    let at = |name: &str| files.path().join(name).to_str().unwrap().to_owned();
    let mut command = node("server-filesystem");
    command.arg(files.path());
    check(
        start(&command),
        &Public {
            tools: &["read_text_file", "list_directory", "write_file"],
            cases: vec![
                (call("read_text_file", json!({"path": at("a b.txt")})), false, "read through wrap"),
                (call("list_directory", json!({"path": at("")})), false, "a b.txt"),
                (call("read_text_file", json!({"path": "/etc/hostname"})), true, "denied"),
            ],
            progress: None,
        },
    );
}

#[test]
fn server_memory() {
    let file = tempfile::tempdir().unwrap();
    let mut command = node("server-memory");
    command.env("MEMORY_FILE_PATH", file.path().join("memory.json"));
    let entity = json!({"name": "bridge", "entityType": "thing", "observations": ["carries"]});
    check(
        start(&command),
        &Public {
            tools: &["create_entities", "read_graph"],
            cases: vec![
                (call("create_entities", json!({"entities": [entity]})), false, ""),
                (call("search_nodes", json!({"query": "bridge"})), false, "carries"),
            ],
            progress: None,
        },
    );
}

#[test]
fn server_sequential_thinking() {
    let thought = json!({"thought": "t", "nextThoughtNeeded": false, "thoughtNumber": 1, "totalThoughts": 1});
    check(
        start(&node("server-sequential-thinking")),
        &Public {
            tools: &["sequentialthinking"],
            cases: vec![(call("sequentialthinking", thought), false, "thoughtNumber")],
            progress: None,
        },
    );
}

#[test]
fn a_python_fastmcp_server() {
    let mut command = Command::new(installed("py-1/bin/python"));
    command.arg(root().join("tests/clients/py-1/server.py"));
    let count = |steps: u64, pause: f64| call("count", json!({"steps": steps, "pause": pause}));
    check(
        start(&command),
        &Public {
            tools: &["add", "count", "fail"],
            cases: vec![
                (call("add", json!({"a": 2, "b": 40})), false, "42"),
                (call("add", json!({"a": "x"})), true, "validation error"),
                (call("fail", json!({"reason": "as told"})), true, "as told"),
            ],
            progress: Some([count(3, 0.3), count(600, 0.1)]),
        },
    );
}

/// The longest line there may be, both ways' heaviest message.
#[test]
fn a_result_of_128_mib_passes() {
    let wrap = Wrap::start(&[]);
    let bytes = (128 << 20) - 1024;
    let found = scenario_at(
        (wrap.port(), &wrap.token()),
        "ts-sdk-v1",
        "large",
        &json!({"call": call("large", json!({"bytes": bytes}))}),
        LIMIT,
    );
    assert_eq!((&found["characters"], &found["ping"]), (&json!([bytes]), &json!(true)));
    let mut session = wrap.session();
    let result = session.call("large", &json!({"bytes": (129 << 20)}).to_string());
    assert_eq!(result["isError"], true);
    assert!(result["content"][0]["text"].as_str().unwrap().contains("exceeds the limit"), "{result}");
    assert_eq!(session.call_text("test_simple_text", "{}"), "This is a simple text response for testing.");
}
