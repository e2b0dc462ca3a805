//! Contract 15 (start, stop, death of the host), 13 (config, ports) and complaints C6, P3, P7:
//! what a sidecar's beginning and end look like from outside.

use std::collections::HashMap;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use a2mcp::process::Identity;
use rustix::process::Signal;
use serde_json::Value;

use crate::support::http::{Connection, INITIALIZE};
use crate::support::{Answer, Host, Setup, cli, eventually, result_of, within};

const EMPTY: &str = r#"{"content":[],"isError":false}"#;
const PING: &[u8] = br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;

/// A process that plays the host's, while the test holds the pipes as its grandchild would.
struct HostProcess(Child);

impl HostProcess {
    fn start() -> Self {
        Self(Command::new("sleep").arg("600").stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
    }

    fn hello(&self, start_time: u64) -> Value {
        serde_json::json!({"host": {
            "name": "test", "version": "0", "pid": self.0.id(), "startTime": start_time, "cwd": "/", "home": "/",
        }})
    }

    fn start_time(&self) -> u64 {
        Identity::of(self.0.id()).unwrap().start_time
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn call_id(frame: &Value) -> String {
    frame["params"]["_meta"]["a2mcp/call"]["callId"].as_str().unwrap().to_owned()
}

/// The text of an `isError` result.
fn error_text(reply: &Value) -> String {
    assert_eq!(reply["result"]["isError"], true, "{reply}");
    reply["result"]["content"][0]["text"].as_str().unwrap().to_owned()
}

#[test]
fn the_end_of_stdin_ends_everything_with_calls_in_flight_and_full_queues() {
    let mut host = Setup::default().handler(|_, _, _| Answer::Later).start();
    let first = host.client();
    let mut dispatched = first.again();
    dispatched.start_call("1", "echo", r#"{"who":"dispatched"}"#);
    let frame = host.call_with("who", "dispatched");
    host.stop_reading();
    let pad = format!(r#"{{"pad":"{}"}}"#, "x".repeat(300_000));
    let mut queued: Vec<_> = (0..40)
        .map(|id| {
            let mut client = first.again();
            client.start_call(&id.to_string(), "echo", &pad);
            client
        })
        .collect();
    eventually("all calls on their way", || {
        let status = host.status();
        let calls = status["calls"].as_array().unwrap();
        (calls.iter().filter(|call| call["phase"] == "running").count() == 41).then_some(())
    });
    host.close_stdin();
    assert_eq!(host.ends_within(Duration::from_secs(2)), Some(0));
    let text = error_text(&dispatched.read().json());
    assert!(text.contains("outcome unknown") && text.contains(&call_id(&frame)), "{text}");
    for client in &mut queued {
        assert!(error_text(&client.read().json()).contains("outcome unknown"));
    }
    assert_eq!(host.count("bridge/goodbye"), 0);
}

#[test]
fn the_end_of_stdin_ends_an_idle_sidecar() {
    let mut host = Host::start();
    let mut idle = host.client();
    host.close_stdin();
    assert_eq!(host.ends_within(Duration::from_secs(2)), Some(0));
    assert!(idle.connection.is_closed());
    // The keeper's copy of the socket goes with it, by itself.
    within(Duration::from_secs(3), "the port's end", || Connection::try_open(host.port).err());
    host.drained();
}

#[test]
fn the_hosts_death_ends_the_sidecar_though_its_pipes_stay_open() {
    let mut process = HostProcess::start();
    let mut host = Setup::default().hello(process.hello(process.start_time())).start();
    let mut client = host.client();
    client.start_call("1", "hang", "{}");
    let frame = host.call_frame("hang");
    process.kill();
    assert_eq!(host.ends_within(Duration::from_secs(3)), Some(0));
    assert!(error_text(&client.read().json()).contains(&call_id(&frame)));
    assert!(host.log().contains("the host process has ended"), "{}", host.log());
}

#[test]
fn another_process_with_the_hosts_pid_is_not_the_host() {
    let process = HostProcess::start();
    let mut host = Setup::default().hello(process.hello(process.start_time() + 1)).spawn();
    assert_eq!(host.ends_within(Duration::from_secs(3)), Some(0));
}

#[test]
fn a_terminate_signal_gives_calls_their_grace_and_a_second_one_none() {
    let mut host = Setup::default().handler(|_, _, _| Answer::Later).start();
    let first = host.client();
    let start = |who: &str| {
        let mut client = first.again();
        client.start_call("1", "echo", &format!(r#"{{"who":"{who}"}}"#));
        (client, host.call_with("who", who))
    };
    let (mut quick, quick_frame) = start("quick");
    let (mut slow, slow_frame) = start("slow");
    host.signal(Signal::TERM);
    eventually("the listener closed", || Connection::try_open(host.port).is_err().then_some(()));
    host.answer(&quick_frame, &result_of("in time", false));
    assert_eq!(quick.read().json()["result"]["content"][0]["text"], "in time");
    assert!(host.child.try_wait().unwrap().is_none(), "the other call has its grace");
    host.signal(Signal::TERM);
    assert_eq!(host.ends_within(Duration::from_secs(3)), Some(0));
    assert_eq!(error_text(&slow.read().json()), "the bridge is stopping");
    host.drained();
    let cancelled = host.frame(|frame| frame["method"] == "notifications/cancelled");
    assert_eq!(cancelled["params"]["requestId"], slow_frame["id"]);
    let goodbye = host.last_frame();
    assert_eq!(
        (&goodbye["method"], &goodbye["params"]["reason"]),
        (&"bridge/goodbye".into(), &"stop".into())
    );
    let records = host.audit();
    let end = records.iter().find(|record| record["phase"] == "done" && record["id"] == call_id(&slow_frame));
    assert_eq!(end.unwrap()["outcome"], "cancelled");
}

/// The whole grace of contract 15, in real time.
#[test]
fn a_terminate_signal_ends_a_call_after_ten_seconds() {
    let mut host = Host::start();
    let mut client = host.client();
    client.start_call("1", "hang", "{}");
    host.call_frame("hang");
    let begun = Instant::now();
    host.signal(Signal::TERM);
    assert_eq!(error_text(&client.read().json()), "the bridge is stopping");
    assert!(begun.elapsed() > Duration::from_secs(9), "{:?}", begun.elapsed());
    assert_eq!(host.ends_within(Duration::from_secs(3)), Some(0));
}

#[test]
fn an_idle_sidecar_stops_at_once() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut host = Host::start();
        let _idle = host.client();
        host.signal(signal);
        assert_eq!(host.ends_within(Duration::from_secs(2)), Some(0), "{signal:?}");
        host.drained();
        assert_eq!(host.last_frame()["params"]["reason"], "stop");
    }
}

#[test]
fn a_stop_of_the_shim_is_answered_when_all_is_closed_and_then_comes_goodbye() {
    let mut host = Setup::default().handler(|_, _, _| Answer::Later).start();
    let first = host.client();
    let start = |who: &str| {
        let mut client = first.again();
        client.start_call("1", "echo", &format!(r#"{{"who":"{who}"}}"#));
        (client, host.call_with("who", who))
    };
    let (mut quick, quick_frame) = start("quick");
    let (mut slow, _) = start("slow");
    host.send(r#"{"jsonrpc":"2.0","id":"stop","method":"bridge/stop","params":{"graceMs":1000}}"#);
    host.answer(&quick_frame, EMPTY);
    assert!(quick.read().json()["result"]["isError"] == false, "results still flow");
    assert_eq!(error_text(&slow.read().json()), "the bridge is stopping");
    assert_eq!(host.ends_within(Duration::from_secs(5)), Some(0));
    host.drained();
    let frames = host.frames();
    let [.., answer, goodbye] = &frames[..] else { panic!("{frames:?}") };
    assert_eq!(answer, r#"{"jsonrpc":"2.0","id":"stop","result":{}}"#);
    assert_eq!(goodbye, r#"{"jsonrpc":"2.0","method":"bridge/goodbye","params":{"reason":"stop"}}"#);
}

#[test]
fn a_stop_without_grace_waits_for_nothing() {
    let mut host = Host::start();
    let mut client = host.client();
    client.start_call("1", "hang", "{}");
    host.call_frame("hang");
    host.send(r#"{"jsonrpc":"2.0","id":"stop","method":"bridge/stop","params":{"graceMs":0}}"#);
    assert_eq!(host.ends_within(Duration::from_secs(2)), Some(0));
    assert_eq!(error_text(&client.read().json()), "the bridge is stopping");
}

#[test]
fn a_host_that_says_goodbye_is_followed() {
    let mut host = Host::start();
    host.send(r#"{"jsonrpc":"2.0","method":"bridge/goodbye","params":{"reason":"host"}}"#);
    assert_eq!(host.ends_within(Duration::from_secs(3)), Some(0));
}

#[test]
fn a_hang_up_makes_way_for_the_next_sidecar() {
    let mut host = Host::start();
    let session = host.client().session;
    host.signal(Signal::HUP);
    assert_eq!(host.ends_within(Duration::from_secs(5)), Some(75));
    host.drained();
    assert_eq!(host.last_frame()["params"]["reason"], "restart");
    let resume = serde_json::json!({"resume": {"port": host.port}});
    let next = Setup::default().in_dir_of(&host).hello(resume).start();
    assert_eq!(next.port, host.port);
    assert_eq!(next.http("POST", "/", &[("mcp-session-id", &session)], PING).status, 200);
}

/// The caller takes JSON only, so its connection ends without an answer; it sends the call again.
#[test]
fn a_call_that_outlasts_a_restart_runs_once_and_is_answered_by_the_next_sidecar() {
    let mut host = Host::start();
    let mut client = host.client();
    client.start_call("1", "hang", r#"{"once":1}"#);
    let frame = host.call_frame("hang");
    assert_eq!(host.cli(&["restart", "--grace", "0"]).0, 0);
    assert_eq!(host.ends_within(Duration::from_secs(5)), Some(75));
    assert!(client.connection.is_closed());
    host.drained();
    assert_eq!(host.count("notifications/cancelled"), 0, "the tool goes on");
    let phases: Vec<_> = host.audit().iter().map(|record| record["phase"].clone()).collect();
    assert_eq!(phases, ["start"], "its end is the next sidecar's to write");

    let call = &frame["params"]["_meta"]["a2mcp/call"];
    let in_flight = serde_json::json!({"resume": {"port": host.port}, "inFlight": [{
        "callId": call["callId"], "tool": "hang", "state": "running", "startedAt": 1, "note": call["note"]}]});
    let next = Setup::default().in_dir_of(&host).hello(in_flight).start();
    let mut again = client.again();
    again.start_call("7", "hang", r#"{"once":1}"#);
    eventually("the attachment", || {
        next.audit().iter().any(|record| record["phase"] == "attached").then_some(())
    });
    next.send(&format!(
        r#"{{"jsonrpc":"2.0","method":"bridge/result","params":{{"callId":{},"result":{}}}}}"#,
        call["callId"],
        result_of("ran once", false)
    ));
    let result = again.read().json()["result"].clone();
    assert_eq!(result["content"][0]["text"], "ran once");
    assert_eq!(result["_meta"]["a2mcp/attached"], call["callId"]);
    assert_eq!(next.count("tools/call"), 0);
    let phases: Vec<_> = next.audit().iter().map(|record| record["phase"].clone()).collect();
    assert_eq!(phases, ["start", "attached", "done"]);
}

#[test]
fn a_refused_config_names_file_field_and_expectation_and_no_secret() {
    let secret = "hunter2-hunter2-hunter2";
    let token = format!(r#""token":"{secret}""#);
    for (config, field, expectation) in [
        (r#"{"port":65536}"#.to_owned(), "`port`", "from 0 to 65535"),
        (r#"{"port":"8080"}"#.into(), "`port`", "from 0 to 65535"),
        (r#"{"host":"http://x"}"#.into(), "`host`", "an IP address or a host name"),
        (format!("{{{token}}}"), "`token`", "32 to 4096 characters"),
        (r#"{"token":"has white space but is long enough for it"}"#.into(), "`token`", "without white space"),
        (r#"{"host_llm":"no"}"#.into(), "`host_llm`", "\"allow\" or \"deny\""),
        (r#"{"deny":"bash"}"#.into(), "`deny`", "a list"),
        (r#"{"deny":[1]}"#.into(), "`deny[0]`", "a tool name"),
        (r#"{"denyMCPTools":"yes"}"#.into(), "`denyMCPTools`", "true or false"),
        (r#"{"xfer":[]}"#.into(), "`xfer`", "an object"),
        (r#"{"xfer":{"dufs":1}}"#.into(), "`xfer.dufs`", "a program name"),
        (r#"{"streaming":"sometimes"}"#.into(), "`streaming`", "\"off\" or \"auto\""),
        (r#"{"streamAfterMs":-1}"#.into(), "`streamAfterMs`", "a whole number"),
        (r#"{"replayWindowSeconds":1.5}"#.into(), "`replayWindowSeconds`", "a whole number"),
        (r#"{"cancelOnDisconnect":1}"#.into(), "`cancelOnDisconnect`", "true or false"),
        (r#"{"allowedHosts":["a:80"]}"#.into(), "`allowedHosts[0]`", "a host name"),
        (r#"{"port":1,"port":2}"#.into(), "`port`", "more than once"),
        (format!("{{{token},"), "", "not valid JSON"),
        ("[]".into(), "", "must be a JSON object"),
        (String::new(), "", "the file is empty"),
    ] {
        let mut host = Setup::default().config(&config).spawn();
        let answer = host.expect_hello();
        assert_eq!(answer["error"]["code"], -32001, "{config}: {answer}");
        assert_eq!(host.ends_within(Duration::from_secs(3)), Some(78), "{config}");
        host.drained();
        let message = answer["error"]["message"].as_str().unwrap();
        let file = host.path("a2mcp.json").display().to_string();
        assert!(message.contains(&file), "{config}: {message}");
        assert!(message.contains(field) && message.contains(expectation), "{config}: {message}");
        let log = host.log();
        assert!(log.contains(&file) && log.contains(expectation), "{config}: {log}");
        for text in [message, &log] {
            assert!(!text.contains(secret) && !text.contains("hunter2"), "{text}");
        }
        assert_eq!(std::fs::read_to_string(host.path("a2mcp.json")).unwrap(), config, "left as it was");
    }
}

#[test]
fn a_config_that_is_no_file_is_refused() {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    std::fs::create_dir(dir.path().join("a2mcp.json")).unwrap();
    let mut host = Setup::default().in_dir(dir).spawn();
    let answer = host.expect_hello();
    assert_eq!(answer["error"]["code"], -32001);
    assert!(answer["error"]["message"].as_str().unwrap().contains("not a regular file"), "{answer}");
    assert_eq!(host.ends_within(Duration::from_secs(3)), Some(78));
}

#[test]
fn a_config_that_cannot_be_read_says_why() {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    std::os::unix::fs::symlink("a2mcp.json", dir.path().join("a2mcp.json")).unwrap();
    let mut host = Setup::default().in_dir(dir).spawn();
    let answer = host.expect_hello();
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("a2mcp.json") && message.contains("symbolic links"), "{message}");
    assert_eq!(host.ends_within(Duration::from_secs(3)), Some(78));
}

#[test]
fn a_host_that_is_not_this_machine_is_refused_with_file_field_and_cause() {
    // An address of the documentation range: no machine has it.
    let mut host = Setup::default().config(r#"{"host":"192.0.2.1"}"#).spawn();
    let answer = host.expect_hello();
    assert_eq!(answer["error"]["code"], -32001);
    let message = answer["error"]["message"].as_str().unwrap();
    let file = host.path("a2mcp.json").display().to_string();
    for part in [&file, "192.0.2.1", "\"host\"", "Cannot assign requested address"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert_eq!(host.ends_within(Duration::from_secs(3)), Some(78));
}

#[test]
fn unknown_fields_warn_and_near_misses_are_named() {
    let host = Setup::default().config(r#"{"denyMcpTools":true,"whatever":1}"#).start();
    let notice = host.notice("denyMcpTools");
    assert_eq!(notice["level"], "warning");
    assert!(notice["text"].as_str().unwrap().contains("did you mean `denyMCPTools`?"), "{notice}");
    host.notice("whatever");
}

#[test]
fn two_hosts_on_one_fixed_port_both_serve_and_the_second_says_so() {
    let first = Host::start();
    let config = format!(r#"{{"port":{}}}"#, first.port);
    let begun = Instant::now();
    let second = Setup::default().config(&config).start();
    assert!(begun.elapsed() >= Duration::from_secs(5), "it was tried for 5 s: {:?}", begun.elapsed());
    assert_ne!(second.port, first.port);
    let notice = second.notice("instead");
    assert_eq!(notice["level"], "warning");
    let text = notice["text"].as_str().unwrap();
    for part in [
        format!("port {}", first.port),
        format!("process {}", first.child.id()),
        "a2mcp".into(),
        format!("port {} instead", second.port),
    ] {
        assert!(text.contains(&part), "{part}: {text}");
    }
    assert!(second.log().contains(text), "{}", second.log());
    for host in [&first, &second] {
        assert_eq!(host.client().call_text("echo", "{}"), "{}");
    }
}

#[test]
fn a_fixed_port_that_becomes_free_in_time_is_taken() {
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = holder.local_addr().unwrap().port();
    let mut host = Setup::default().config(&format!(r#"{{"port":{port}}}"#)).spawn();
    eventually("the first try", || host.log().contains("the configured port is busy").then_some(()));
    drop(holder);
    host.expect_hello();
    assert_eq!(host.port, port);
    host.until_ready();
    assert_eq!(host.count("bridge/notify"), 0, "{:?}", host.frames());
}

#[test]
fn a_host_that_goes_while_its_port_is_tried_is_followed() {
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let config = format!(r#"{{"port":{}}}"#, holder.local_addr().unwrap().port());
    let waits = |host: &Host| {
        eventually("the first try", || host.log().contains("the configured port is busy").then_some(()));
    };
    let mut host = Setup::default().config(&config).spawn();
    waits(&host);
    host.close_stdin();
    assert_eq!(host.ends_within(Duration::from_secs(2)), Some(0));

    let mut process = HostProcess::start();
    let mut host = Setup::default().config(&config).hello(process.hello(process.start_time())).spawn();
    waits(&host);
    process.kill();
    assert_eq!(host.ends_within(Duration::from_secs(3)), Some(0));
}

#[test]
fn what_the_shim_sends_before_the_hello_is_answered_is_not_lost() {
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let config = format!(r#"{{"port":{}}}"#, holder.local_addr().unwrap().port());
    let mut host = Setup::default().config(&config).spawn();
    host.send(r#"{"jsonrpc":"2.0","method":"bridge/state","params":{"main":true,"approvals":[]}}"#);
    host.send(r#"{"jsonrpc":"2.0","id":"early","method":"bridge/ping"}"#);
    eventually("the first try", || host.log().contains("the configured port is busy").then_some(()));
    drop(holder);
    host.expect_hello();
    assert_eq!(host.frame(|frame| frame["id"] == "early")["result"], serde_json::json!({}));
    assert_eq!(host.status()["host"]["main"], true);
}

#[test]
fn a_busy_port_of_a_respawned_sidecar_is_an_error_that_names_the_owner() {
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = holder.local_addr().unwrap().port();
    let mut host = Setup::default().hello(serde_json::json!({"resume": {"port": port}})).spawn();
    let answer = host.expect_hello();
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(
        message.contains(&format!("port {port}"))
            && message.contains(&format!("process {}", std::process::id()))
            && message.contains("/a2mcp restart"),
        "{message}"
    );
    assert_eq!(host.ends_within(Duration::from_secs(3)), Some(1));
}

#[test]
fn the_remembered_port_belongs_to_the_first_live_host_of_the_directory() {
    let remembered = |host: &Host| -> u16 {
        std::fs::read_to_string(host.path("a2mcp.state/port")).unwrap().trim().parse().unwrap()
    };
    let first = Host::start();
    assert_eq!(remembered(&first), first.port);
    let second = Setup::default().in_dir_of(&first).start();
    assert_ne!(second.port, first.port);
    assert_eq!(remembered(&first), first.port, "a live sidecar holds it");
    assert_eq!(first.token, second.token);
    for host in [&first, &second] {
        assert_eq!(host.client().call_text("echo", "{}"), "{}");
    }

    // Somebody else has the port now: another one is taken and remembered.
    let (port, dir) = (first.port, first.dir.clone());
    drop((first, second));
    let _holder = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let third = Setup::default().in_dir(dir).start();
    assert_ne!(third.port, port);
    assert_eq!(remembered(&third), third.port);
}

#[test]
fn two_sidecars_that_start_together_end_with_one_token() {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    for _ in 0..5 {
        let _ = std::fs::remove_file(dir.path().join("a2mcp.json"));
        let mut hosts: Vec<_> = (0..4).map(|_| Setup::default().in_dir(dir.clone()).spawn()).collect();
        let prefixes: Vec<_> =
            hosts.iter_mut().map(|host| host.expect_hello()["result"]["tokenPrefix"].clone()).collect();
        assert_eq!(hosts[0].token.len(), 43);
        for (host, prefix) in hosts.iter().zip(&prefixes) {
            assert!(host.token.starts_with(prefix.as_str().unwrap()), "{prefixes:?}");
            assert_eq!(host.token, hosts[0].token);
            assert_eq!(host.http("POST", "/", &[], INITIALIZE.as_bytes()).status, 200);
        }
    }
}

#[test]
fn everything_it_makes_is_private_whatever_the_umask() {
    let host = Setup::default().before("umask 0; rm -r \"$3\"").start();
    host.client().call("echo", "{}");
    assert_eq!(host.cli(&["rotate"]).0, 0);
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let mut files = vec![host.path("")];
    for dir in [host.path(""), host.path("a2mcp.state")] {
        files.extend(std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()));
    }
    for name in ["a2mcp.json", "a2mcp.log", "a2mcp.state", "port"] {
        assert!(files.iter().any(|file| file.ends_with(name)), "{name}: {files:?}");
    }
    for file in &files {
        let expected = if file.is_dir() { 0o700 } else { 0o600 };
        assert_eq!(mode(file), expected, "{}", file.display());
    }
}

#[test]
fn the_process_shows_no_secret_and_leads_a_session_of_its_own() {
    let mut host = Host::start();
    host.client().call("echo", r#"{"argument":"a-tool-argument"}"#);
    let pid = host.pid();
    assert_eq!(rustix::process::getsid(Some(pid)).unwrap(), pid);
    for file in ["cmdline", "environ"] {
        let bytes = std::fs::read(format!("/proc/{}/{file}", host.child.id())).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.contains("a2mcp"), "{file}: {text}");
        assert!(!text.contains(&host.token) && !text.contains("a-tool-argument"), "{file}");
    }
    // Nothing of the protocol is left where a child would inherit it.
    let fd = |number| std::fs::read_link(format!("/proc/{}/fd/{number}", host.child.id())).unwrap();
    let stderr = host.path(&format!("a2mcp.{}.stderr", host.port));
    assert_eq!((fd(0), fd(1) == fd(2)), ("/dev/null".into(), false), "{:?}", fd(1));
    assert_eq!(fd(2), std::fs::canonicalize(&stderr).unwrap());
    assert!(std::fs::read_to_string(&stderr).unwrap().contains("serving"));
    let log = host.log();
    assert!(!log.contains(&host.token) && !log.contains("a-tool-argument"), "{log}");
    host.close_stdin();
    host.wait();
}

#[test]
fn a_restart_that_would_fail_leaves_the_old_one_running() {
    let mut host = Host::start();
    let config = host.config().to_string();
    std::fs::write(host.path("a2mcp.json"), r#"{"port":"soon"}"#).unwrap();
    let (code, _, said) = host.cli(&["restart"]);
    assert_eq!(code, 1);
    assert!(said.contains("not restarted") && said.contains("`port`") && said.contains("65535"), "{said}");
    host.signal(Signal::HUP);
    let notice = host.notice("not restarted");
    assert_eq!(notice["level"], "error");
    assert!(notice["text"].as_str().unwrap().contains("a2mcp.json"), "{notice}");
    let answer = host.ask("cmd", "bridge/command", r#"{"argv":["restart"]}"#);
    assert_eq!(answer["result"]["level"], "error");
    assert!(answer["result"]["text"].as_str().unwrap().contains("`port`"), "{answer}");
    assert_eq!(host.client().call_text("echo", "{}"), "{}");
    assert!(host.status()["notes"][0].as_str().unwrap().contains("would be refused"), "{}", host.status());

    std::fs::write(host.path("a2mcp.json"), config).unwrap();
    assert_eq!(host.cli(&["restart"]).0, 0);
    assert_eq!(host.ends_within(Duration::from_secs(5)), Some(75));
}

#[test]
fn a_changed_port_acts_at_the_hosts_next_start_and_status_says_so() {
    let host = Host::start();
    let mut config = host.config();
    config["port"] = 1.into();
    std::fs::write(host.path("a2mcp.json"), config.to_string()).unwrap();
    let notes = host.status()["notes"].to_string();
    assert!(notes.contains("\\\"port\\\"") && notes.contains("next start"), "{notes}");
    assert!(host.cli(&["status"]).1.contains("next start"));
}

#[test]
fn the_check_reads_only() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("agent");
    let none = HashMap::new();
    assert_eq!(cli(&["sidecar", "--check"], Some(&dir), &none).0, 0);
    assert!(!dir.exists());
    std::fs::create_dir(&dir).unwrap();
    let check = |config: &str, state: &str| {
        std::fs::write(dir.join("a2mcp.json"), config).unwrap();
        std::fs::write(dir.join("state"), state).unwrap();
        let state = dir.join("state");
        let (code, _, said) =
            cli(&["sidecar", "--check", "--state", state.to_str().unwrap()], Some(&dir), &none);
        assert_eq!(std::fs::read_to_string(dir.join("a2mcp.json")).unwrap(), config);
        (code, said)
    };
    let (code, said) = check("{}", r#"{"version":99}"#);
    assert!(code == 78 && said.contains("not a state file this version understands"), "{code} {said}");
    let (code, said) = check(r#"{"port":-1}"#, "{}");
    assert!(code == 78 && said.contains("`port`"), "{code} {said}");

    let host = Host::start();
    host.client();
    let state = host.path(&format!("a2mcp.state/{}.json", host.port));
    let (code, _, said) = host.cli(&["sidecar", "--check", "--state", state.to_str().unwrap()]);
    assert_eq!((code, said.as_str()), (0, ""));
}

#[test]
fn a_person_who_starts_the_sidecar_by_hand_is_told_what_it_is() {
    let none = HashMap::new();
    let (code, out, said) = cli(&["sidecar"], None, &none);
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(said.contains("--agent-dir") && said.contains("a2mcp demo"), "{said}");
    let place = tempfile::tempdir().unwrap();
    let (code, out, said) = cli(&["sidecar"], Some(place.path()), &none);
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(said.contains("pipes or sockets") && said.contains("a2mcp demo"), "{said}");
}

#[test]
fn the_control_socket_is_private_and_goes_with_the_sidecar() {
    let mut host = Host::start();
    let uid = rustix::process::getuid().as_raw();
    let dirs = [format!("/run/user/{uid}/a2mcp"), format!("/tmp/a2mcp-{uid}")];
    let socket = dirs
        .iter()
        .map(|dir| Path::new(dir).join(format!("{}.sock", host.port)))
        .find(|socket| socket.exists())
        .expect("a control socket");
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&socket), mode(socket.parent().unwrap())), (0o600, 0o700));
    host.signal(Signal::TERM);
    host.wait();
    assert!(!socket.exists());
}
