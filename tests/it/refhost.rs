//! The reference host and `a2mcp demo` as a user runs them: real processes, a real sidecar, HTTP.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use a2mcp::process::Identity;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::eventually;
use crate::support::http::Client;
use crate::support::reference::{Host, Program, a2mcp, identity};

/// What a dead host may take to leave nothing behind (contract 15).
const GONE: Duration = Duration::from_secs(3);

/// Waits until all are gone and says how long that took.
pub(crate) fn gone(processes: &[Identity]) -> Duration {
    let begun = Instant::now();
    eventually("the end of every process", || {
        processes.iter().all(|process| !process.is_alive()).then_some(())
    });
    begun.elapsed()
}

fn text(result: &Value) -> &str {
    result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text in {result}"))
}

fn call(session: &mut Client, tool: &str, arguments: &Value) -> Value {
    session.call(tool, &arguments.to_string())
}

#[test]
fn every_demo_tool_does_its_work() {
    let host = Host::start(&[]);
    let mut session = host.session();
    let file = host.dir.path().join("new/file.txt");
    let written = call(&mut session, "write", &json!({ "path": file, "content": "grüße" }));
    assert!(text(&written).starts_with("wrote 7 bytes"), "{written}");
    assert_eq!(text(&call(&mut session, "read", &json!({ "path": file }))), "grüße");
    let names = call(&mut session, "list", &json!({ "path": host.dir.path() }));
    assert!(text(&names).lines().any(|name| name == "new/"), "{names}");
    let failed = call(&mut session, "bash", &json!({ "command": "echo hi; exit 3" }));
    assert_eq!((text(&failed), &failed["isError"]), ("hi\n[exit code 3]", &json!(true)));
    let image = call(&mut session, "image", &json!({}));
    assert_eq!(image["content"][0]["mimeType"], "image/png");
    assert_eq!(text(&call(&mut session, "sleep", &json!({ "ms": 1 }))), "slept 1 ms");
    let thrown = call(&mut session, "fail", &json!({ "message": "no" }));
    assert_eq!((text(&thrown), &thrown["isError"]), ("no", &json!(true)));
    let echoed = session.call("echo", r#"{"z":1.50,"a":12345678901234567890123}"#);
    assert_eq!(text(&echoed), r#"{"z":1.50,"a":12345678901234567890123}"#);
    assert!(text(&call(&mut session, "read", &json!({}))).contains("missing field `path`"));
    assert!(text(&call(&mut session, "nothing", &json!({}))).contains("not exposed"));
    let started = host.executions().iter().filter(|(event, _)| event == "start").count();
    assert_eq!(started, 9, "each tool that ran once, and nothing else");
}

#[test]
fn tools_of_a_file_are_listed_as_they_are_and_changes_are_announced() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tools.json");
    std::fs::write(&file, r#"[{"name":"odd.name/読","inputSchema":{"type":"object","x":1.50},"result":{"content":[{"type":"text","text":"canned"}]},"delayMs":1}]"#)
        .unwrap();
    let mut host = Host::start(&["--tools", file.to_str().unwrap()]);
    let mut session = host.session();
    let names = |session: &mut Client| -> Vec<String> {
        let list = session.rpc("tools/list", "{}");
        let tools = list["result"]["tools"].as_array().unwrap().clone();
        tools.iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
    };
    assert!(names(&mut session).contains(&"odd.name/読".to_owned()));
    assert_eq!(text(&call(&mut session, "odd.name/読", &json!({}))), "canned");
    std::fs::write(&file, r#"[{"name":"second"}]"#).unwrap();
    host.program.send(&json!({ "do": "reloadTools" }));
    eventually("the new list", || names(&mut session).contains(&"second".to_owned()).then_some(()));
}

#[test]
fn a_killed_sidecar_is_followed_by_one_with_the_same_url_and_sessions() {
    let host = Host::start(&[]);
    let mut session = host.session();
    assert_eq!(text(&call(&mut session, "echo", &json!({ "n": 1 }))), r#"{"n":1}"#);
    // Sessions are in the state file before their id leaves the process, so a kill loses none.
    host.sidecar().signal(Signal::KILL);
    let next = host.program.event("ready");
    assert_eq!((&next["url"], &next["restarts"]), (&host.ready["url"], &json!(1)));
    assert_ne!(next["pid"], host.ready["pid"]);
    let mut again = session.again();
    assert_eq!(text(&call(&mut again, "echo", &json!({ "n": 2 }))), r#"{"n":2}"#);
}

#[test]
fn the_hosts_death_by_any_cause_leaves_nothing_behind() {
    type Kill = fn(&mut Host);
    let causes: [(&str, Kill); 3] = [
        ("SIGKILL", |host| drop(host.program.child.kill())),
        ("SIGTERM", |host| _ = host.program.identity().signal(Signal::TERM)),
        ("end of stdin", |host| drop(host.program.stdin.take())),
    ];
    for (cause, kill) in causes {
        let mut host = Host::start(&[]);
        let processes = [host.program.identity(), host.sidecar()];
        let left = host.dir.path().join("left");
        let mut session = host.session();
        if cause != "SIGTERM" {
            // A call in flight, with a grandchild that holds what it inherited.
            let command = format!("sleep 300 & echo $! > {}; wait", left.display());
            session.start_call("1", "bash", &json!({ "command": command }).to_string());
            eventually("the grandchild", || {
                std::fs::read_to_string(&left).ok().filter(|pid| pid.ends_with('\n'))
            });
        }
        kill(&mut host);
        let took = gone(&processes);
        assert!(took < GONE, "{cause}: {took:?}");
        if let Ok(pid) = std::fs::read_to_string(&left) {
            let grandchild = Identity::of(pid.trim().parse().unwrap());
            if cause == "SIGKILL" {
                // That gives the host's tools no chance; only their direct child dies with it.
                grandchild.map(|grandchild| grandchild.signal(Signal::KILL));
            }
            let took = gone(&grandchild.into_iter().collect::<Vec<_>>());
            assert!(took < GONE, "{cause}, grandchild: {took:?}");
        }
    }
}

#[test]
fn a_second_signal_ends_the_host_at_once() {
    let mut host = Host::start(&[]);
    let mut session = host.session();
    session.start_call("1", "sleep", r#"{"seconds":300}"#);
    eventually("the call", || host.executions().iter().any(|(event, _)| event == "start").then_some(()));
    let processes = [host.program.identity(), host.sidecar()];
    let begun = Instant::now();
    processes[0].signal(Signal::TERM);
    eventually("the drain", || {
        let log =
            std::fs::read_to_string(host.dir.path().join(format!("a2mcp.{}.stderr", host.port()))).ok()?;
        log.contains("draining").then_some(())
    });
    processes[0].signal(Signal::TERM);
    gone(&processes);
    host.program.end();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[test]
fn an_approval_is_shown_waited_for_and_executed_once() {
    let dir = tempfile::tempdir().unwrap();
    let approved = dir.path().join("approved");
    let host = Host::start(&["--approval-file", approved.to_str().unwrap()]);
    let mut session = host.session();
    session.start_call("5", "needs_approval", "{}");
    eventually("the call", || host.executions().iter().any(|(event, _)| event == "start").then_some(()));
    // Meanwhile the endpoint answers others.
    assert_eq!(session.again().rpc("ping", "{}")["result"], json!({}));
    std::fs::write(&approved, "").unwrap();
    assert!(session.read().text().contains("approved"));
    let events: Vec<_> = host.executions().into_iter().map(|(event, _)| event).collect();
    assert_eq!(events, ["start", "done"]);
}

#[test]
fn what_the_operator_types_reaches_the_sidecar() {
    let mut host = Host::start(&[]);
    host.program.send(&json!({ "do": "command", "argv": ["status"] }));
    let answer = host.program.event("command");
    assert!(answer["text"].as_str().unwrap().contains(&host.port().to_string()), "{answer}");
}

#[test]
fn a_refused_config_is_told_with_its_reason_and_exit_78() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a2mcp.json"), r#"{"port": "many"}"#).unwrap();
    let mut command = a2mcp(&["reference-host", "--agent-dir"]);
    let mut program = Program::start(command.arg(dir.path()));
    let refused = program.event("refused");
    assert!(refused["reason"].as_str().unwrap().contains("port"), "{refused}");
    assert_eq!(program.end().code(), Some(78));
}

#[test]
fn a_sidecar_that_exits_at_once_is_tried_five_times_and_its_last_words_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let broken = script(dir.path(), "echo started >> \"$3/starts\"; echo 'no such luck' >&2; exit 1");
    let mut command = a2mcp(&["reference-host", "--agent-dir"]);
    command.arg(dir.path()).arg("--sidecar").arg(broken);
    let mut program = Program::start(&mut command);
    let failed = program.event("failed");
    assert!(failed["reason"].as_str().unwrap().contains("no such luck"), "{failed}");
    assert_eq!(program.end().code(), Some(1));
    let starts = std::fs::read_to_string(dir.path().join("starts")).unwrap();
    assert_eq!(starts.lines().count(), 5);
}

#[test]
fn a_sidecar_that_cannot_be_run_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = a2mcp(&["reference-host", "--agent-dir"]);
    command.arg(dir.path()).arg("--sidecar").arg(dir.path().join("missing"));
    let program = Program::start(&mut command);
    let failed = program.event("failed");
    assert!(failed["reason"].as_str().unwrap().contains("cannot be started"), "{failed}");
}

pub(crate) fn script(dir: &Path, body: &str) -> PathBuf {
    let path = dir.join("sidecar.sh");
    std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
    path
}

struct Demo {
    program: Program,
    ready: Value,
}

impl Demo {
    fn start(args: &[&str]) -> Self {
        let program = Program::start(a2mcp(&["demo", "--json"]).args(args));
        let ready = program.line(|_| true);
        Self { program, ready }
    }

    fn processes(&self) -> [Identity; 3] {
        [self.program.identity(), identity(&self.ready["hostPid"]), identity(&self.ready["pid"])]
    }

    fn dir(&self) -> PathBuf {
        PathBuf::from(self.ready["agentDir"].as_str().unwrap())
    }
}

#[test]
fn a_demo_prints_one_line_serves_and_leaves_nothing_after_an_interrupt() {
    for signal in [Signal::INT, Signal::TERM] {
        let mut demo = Demo::start(&[]);
        assert_eq!(demo.ready.as_object().unwrap().len(), 5, "{}", demo.ready);
        assert_eq!(std::fs::metadata(demo.dir()).unwrap().permissions().mode() & 0o777, 0o700);
        let url = demo.ready["url"].as_str().unwrap();
        let port = url.trim_end_matches('/').rsplit(':').next().unwrap().parse().unwrap();
        let mut session = Client::initialize(port, demo.ready["token"].as_str().unwrap());
        assert_eq!(text(&call(&mut session, "bash", &json!({ "command": "echo $((6*7))" }))), "42\n");
        let processes = demo.processes();
        processes[0].signal(signal);
        assert!(demo.program.end().success());
        gone(&processes);
        assert!(!demo.dir().exists());
    }
}

#[test]
fn a_killed_demo_leaves_no_process_and_no_directory() {
    for victim in [0, 1] {
        let mut demo = Demo::start(&[]);
        let processes = demo.processes();
        processes[victim].signal(Signal::KILL);
        let took = gone(&processes);
        assert!(took < GONE, "victim {victim}: {took:?}");
        eventually("the end of the directory", || (!demo.dir().exists()).then_some(()));
        assert!(!demo.program.end().success());
        assert!(!demo.dir().exists(), "nor comes back");
    }
}

#[test]
fn a_demo_outlives_its_sidecar() {
    let demo = Demo::start(&[]);
    let [_, host, sidecar] = demo.processes();
    sidecar.signal(Signal::KILL);
    gone(&[sidecar]);
    let url = demo.ready["url"].as_str().unwrap().to_owned();
    let port: u16 = url.trim_end_matches('/').rsplit(':').next().unwrap().parse().unwrap();
    eventually("the next sidecar", || {
        a2mcp::process::listener_on(port).filter(|(pid, _)| *pid != sidecar.pid)
    });
    assert!(host.is_alive());
    let mut session = Client::initialize(port, demo.ready["token"].as_str().unwrap());
    assert_eq!(text(&call(&mut session, "echo", &json!({}))), "{}");
}

#[test]
fn a_demo_has_a_directory_of_its_own() {
    let none = Default::default();
    let elsewhere = tempfile::tempdir().unwrap();
    for args in [&["demo"][..], &["--pid", "1", "demo"]] {
        let dir = (args.len() == 1).then_some(elsewhere.path());
        let (code, out, err) = crate::support::cli(args, dir, &none);
        assert_eq!((code, out.as_str()), (2, ""), "{err}");
        assert!(err.contains("in a directory that it makes and removes"), "{err}");
    }
    let (_, help, _) = crate::support::cli(&["demo", "--help"], None, &none);
    assert!(!help.contains("--agent-dir") && !help.contains("--pid"), "{help}");
    let (_, help, _) = crate::support::cli(&["sidecar", "--help"], None, &none);
    assert!(help.contains("--agent-dir") && !help.contains("default:"), "{help}");
    let (_, help, _) = crate::support::cli(&["status", "--help"], None, &none);
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        help.contains("with a running sidecar, else ~/.omp/agent if it exists, else ~/.a2mcp]"),
        "{help}"
    );
}

#[test]
fn a_demo_for_people_names_everything_they_need() {
    let program = Program::start(&mut a2mcp(&["demo"]));
    let mut lines = Vec::new();
    while !lines.last().is_some_and(|line: &String| line.contains("until you press ^C")) {
        lines.push(match program.line(|_| true) {
            Value::String(line) => line,
            other => other.to_string(),
        });
    }
    let text = lines.join("\n");
    for needed in ["http://127.0.0.1:", "\"mcpServers\"", "Authorization: Bearer ", "curl -s"] {
        assert!(text.contains(needed), "{needed} is missing in:\n{text}");
    }
}
