//! Contract 16 and 2: the operator's commands, from a terminal and from inside the host.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;

use crate::support::http::INITIALIZE;
use crate::support::{Answer, Host, Setup, binary, cli, eventually, reference, result_of};

const PING: &[u8] = br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;

/// What must never reach a terminal: controls, and what reorders a line.
fn is_harmless(text: &str) -> bool {
    text.chars().all(|c| c == '\n' || !a2mcp::text::is_unsafe(c))
}

/// `/a2mcp WORDS` typed in the host.
fn command(host: &Host, words: &[&str]) -> (String, String) {
    static COMMANDS: AtomicU64 = AtomicU64::new(0);
    let id = format!("command-{}", COMMANDS.fetch_add(1, Ordering::Relaxed));
    let params = serde_json::json!({ "argv": words });
    let answer = host.ask(&id, "bridge/command", &params.to_string());
    let text = |member: &str| answer["result"][member].as_str().unwrap_or_default().to_owned();
    (text("level"), text("text"))
}

#[test]
fn status_shows_on_one_screen_what_is_going_on() {
    let host = Setup::default()
        .hello(serde_json::json!({"host": {
        "name": "omp", "version": "18.2.3", "pid": std::process::id(), "cwd": "/", "home": "/"}}))
        .start();
    host.http("POST", "/", &[("Authorization", "Bearer no")], b"{}");
    host.send("[]");
    let mut client = host.client();
    client.call("echo", "{}");
    client.start_call("1", "hang", "{}");
    let call_id =
        host.call_frame("hang")["params"]["_meta"]["a2mcp/call"]["callId"].as_str().unwrap().to_owned();
    let (code, screen, _) = host.cli(&["status"]);
    assert_eq!(code, 0);
    for part in [
        format!("http://127.0.0.1:{}/ · ready · token {}…", host.port, &host.token[..6]),
        format!("omp 18.2.3 · pid {}", std::process::id()),
        format!("pid {}", host.child.id()),
        "sessions  1".into(),
        format!("{}  raw 1 · 2025-11-25", &client.session[..8]),
        "1 in flight · 1 served".into(),
        format!("{call_id}  hang · running"),
        "0 failed write(s)".into(),
        "1 unauthorized · 1 bad frame(s)".into(),
    ] {
        assert!(screen.contains(&part), "{part}:\n{screen}");
    }
    for secret in [&host.token[..], &client.session] {
        assert!(!screen.contains(secret), "{screen}");
    }
    let status = host.status();
    assert_eq!(status["pid"], host.child.id());
    assert_eq!(status["port"], host.port);
    assert_eq!(status["calls"][0]["id"], call_id.as_str());
    assert_eq!(status["calls"][0]["tool"], "hang");
    assert_eq!(status["sessions"][0]["id"], client.session[..8]);
    assert!(!status.to_string().contains(&host.token) && !status.to_string().contains(&client.session));
    assert_eq!(command(&host, &["status"]).1.lines().count(), screen.lines().count());
    assert_eq!(command(&host, &[]).0, "info");
}

#[test]
fn the_token_goes_to_stdout_alone_and_nowhere_else() {
    let host = Host::start();
    let (code, out, err) = host.cli(&["token"]);
    assert_eq!((code, out, err), (0, format!("{}\n", host.token), String::new()));
    let (level, text) = command(&host, &["token"]);
    assert!(level == "info" && text.contains(&host.token), "the operator asked for it");
    assert!(!host.log().contains(&host.token));

    let none = tempfile::tempdir().unwrap();
    let (code, out, err) = cli(&["token"], Some(none.path()), &HashMap::new());
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.contains("no token yet"), "{err}");
    assert_eq!(std::fs::read_dir(none.path()).unwrap().count(), 0, "asking makes nothing");
}

/// In force at once, in every running sidecar of the directory; `rotate` gives the new token.
fn check_rotation(rotate: impl Fn(&Host) -> String) {
    let config = r#"{"x-mine":[1.50],"allowedHosts":[]}"#;
    let first = Setup::default().config(config).start();
    let second = Setup::default().in_dir_of(&first).start();
    let stranger = Host::start();
    let hosts = [&first, &second];
    let old = first.token.clone();
    let mut sessions = Vec::new();
    let mut calls = Vec::new();
    for host in hosts {
        let mut client = host.client();
        client.start_call("1", "hang", "{}");
        host.call_frame("hang");
        sessions.push(host.client().session);
        calls.push(client);
    }
    let new = rotate(&first);
    assert_ne!(new, old);
    assert_eq!(new.len(), 43);
    for ((host, session), call) in hosts.iter().zip(&sessions).zip(&mut calls) {
        let session = ("mcp-session-id", session.as_str());
        assert_eq!(host.http("POST", "/", &[session], PING).status, 401, "the old token");
        let bearer = format!("Bearer {new}");
        let mut connection = crate::support::http::Connection::open(host.port);
        let new = ("Authorization", bearer.as_str());
        assert_eq!(
            connection.request("POST", "/", &[new, session], PING).status,
            404,
            "its sessions are gone"
        );
        assert_eq!(connection.request("POST", "/", &[new], INITIALIZE.as_bytes()).status, 200);
        host.frame(|frame| frame["method"] == "notifications/cancelled");
        assert_eq!(call.read().json()["error"]["code"], -32800);
    }
    assert_eq!(stranger.client().call_text("echo", "{}"), "{}", "another directory is not touched");
    let config = std::fs::read_to_string(first.path("a2mcp.json")).unwrap();
    assert!(config.contains(r#""x-mine":[1.50]"#) && config.contains(&new), "{config}");
    let records = first.audit();
    let rotations: Vec<_> = records.iter().filter(|record| record["tool"] == "token").collect();
    assert_eq!(rotations.len(), 1, "{records:#?}");
    assert_eq!(rotations[0]["args"], r#"{"action":"rotate"}"#);
    assert_eq!((&rotations[0]["sid"], &rotations[0]["phase"]), (&Value::Null, &"done".into()));
    for text in [first.log(), second.log(), records.iter().map(Value::to_string).collect()] {
        assert!(!text.contains(&new) && !text.contains(&old));
    }
}

#[test]
fn a_rotation_from_the_terminal_acts_at_once_in_every_sidecar_of_the_directory() {
    check_rotation(|host| {
        let (code, out, err) = host.cli(&["rotate"]);
        assert_eq!(code, 0, "{err}");
        assert!(err.contains("2 running sidecar(s) took it at once"), "{err}");
        out.trim_end().to_owned()
    });
}

#[test]
fn a_rotation_from_the_host_acts_at_once_in_every_sidecar_of_the_directory() {
    check_rotation(|host| {
        let (level, text) = command(host, &["rotate"]);
        assert_eq!(level, "info", "{text}");
        let new = host.config()["token"].as_str().unwrap().to_owned();
        assert!(text.contains(&new[..6]) && !text.contains(&new), "{text}");
        new
    });
}

#[test]
fn a_rotation_without_a_sidecar_replaces_the_token_in_the_file() {
    let host = Host::start();
    let (dir, old) = (host.dir.clone(), host.token.clone());
    drop(host);
    let (code, out, _) = cli(&["rotate"], Some(dir.path()), &HashMap::new());
    assert_eq!(code, 0);
    let host = Setup::default().in_dir(dir).start();
    assert_eq!(host.token, out.trim_end());
    assert_ne!(host.token, old);
}

#[test]
fn a_refused_config_is_the_exit_code_of_commands_that_need_it() {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("a2mcp.json"), r#"{"token":"short-secret"}"#).unwrap();
    for command in ["token", "rotate"] {
        let (code, out, err) = cli(&[command], Some(place.path()), &HashMap::new());
        assert_eq!((code, out.as_str()), (78, ""), "{command}: {err}");
        assert!(err.contains("a2mcp.json") && err.contains("`token`"), "{err}");
        assert!(!err.contains("short-secret"));
    }
}

#[test]
fn stop_and_restart_end_the_sidecar_with_their_own_code_and_frame() {
    for (words, code, reason) in [(["stop"], 0, "stop"), (["restart"], 75, "restart")] {
        // From a terminal.
        let mut host = Host::start();
        let _idle = host.client();
        let (exit, out, _) = host.cli(&words);
        assert_eq!(exit, 0, "{out}");
        assert_eq!(host.ends_within(Duration::from_secs(5)), Some(code));
        host.drained();
        let goodbye = host.last_frame();
        assert_eq!(
            (&goodbye["method"], &goodbye["params"]["reason"]),
            (&"bridge/goodbye".into(), &reason.into())
        );
        // From the host.
        let mut host = Host::start();
        assert_eq!(command(&host, &words).0, "info");
        assert_eq!(host.ends_within(Duration::from_secs(5)), Some(code));
        host.drained();
        assert_eq!(host.last_frame()["params"]["reason"], reason);
    }
}

#[test]
fn a_stop_gives_calls_the_grace_it_was_told() {
    let mut host = Setup::default().handler(|_, _, _| Answer::Later).start();
    let mut client = host.client();
    client.start_call("1", "echo", "{}");
    let frame = host.call_frame("echo");
    assert_eq!(host.cli(&["stop", "--grace", "600"]).0, 0);
    eventually("the drain", || host.log().contains("draining").then_some(()));
    host.answer(&frame, &result_of("in time", false));
    assert_eq!(client.read().json()["result"]["content"][0]["text"], "in time");
    assert_eq!(host.ends_within(Duration::from_secs(5)), Some(0));
}

#[test]
fn exit_codes_tell_usage_from_failure() {
    let none = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| cli(args, Some(none.path()), &HashMap::new());
    for args in [
        &["nonsense"][..],
        &["cancel"],
        &["cancel", "x", "--all"],
        &["status", "--what"],
        &["restart", "--grace", "x"],
        &[],
    ] {
        let (code, out, err) = run(args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}");
        assert!(!err.is_empty());
    }
    for args in [
        &["status"][..],
        &["status", "--json"],
        &["restart"],
        &["stop"],
        &["pause"],
        &["resume"],
        &["cancel", "--all"],
        &["status", "--pid", "1"],
        &["logs"],
        &["audit"],
    ] {
        let (code, out, err) = run(args);
        assert_eq!((code, out.as_str()), (1, ""), "{args:?}: {err}");
        assert!(err.starts_with("a2mcp: "), "{args:?}: {err}");
    }
    let (_, _, err) = run(&["status"]);
    assert!(err.contains("no sidecar runs for") && err.contains(none.path().to_str().unwrap()), "{err}");
    for args in [["--help"], ["--version"]] {
        let (code, out, _) = cli(&args, None, &HashMap::new());
        assert!(code == 0 && out.contains("a2mcp"), "{args:?}");
    }
}

#[test]
fn one_of_several_sidecars_is_chosen_by_pid() {
    let first = Host::start();
    let second = Setup::default().in_dir_of(&first).start();
    let pids = [first.child.id().to_string(), second.child.id().to_string()];
    let (code, _, err) = first.cli(&["pause"]);
    assert_eq!(code, 1);
    for part in ["several sidecars run", "--pid", &pids[0], &pids[1], &first.port.to_string()] {
        assert!(err.contains(part), "{part}: {err}");
    }
    let (code, screens, _) = first.cli(&["status"]);
    assert!(code == 0 && pids.iter().all(|pid| screens.contains(&format!("pid {pid}"))), "{screens}");
    assert_eq!(first.cli(&["status", "--json"]).0, 1, "one object is asked for, there are two");
    assert_eq!(first.cli(&["pause", "--pid", &pids[1]]).0, 0);
    assert_eq!(first.client().call_text("echo", "{}"), "{}");
    assert_eq!(second.client().call_text("echo", "{}"), "paused by the operator");
    let (code, one, _) = first.cli(&["status", "--json", "--pid", &pids[0]]);
    assert_eq!(code, 0);
    assert_eq!(serde_json::from_str::<Value>(&one).unwrap()["port"], first.port);
    assert_eq!(first.cli(&["pause", "--pid", "1"]).0, 1);
}

#[test]
fn hostile_names_reach_neither_terminal_nor_log() {
    let hostile = "x\u{1b}[2J\u{9b}31m\u{7f}\u{202e}\u{2066}\r\nforged line\u{0}";
    let tools = serde_json::json!([{"name": hostile}, {"name": "echo"}]).to_string();
    let host = Setup::default()
        .tools(&tools)
        .config(&serde_json::json!({ hostile: 1 }).to_string())
        .hello(serde_json::json!({"title": hostile, "host": {
            "name": hostile, "version": hostile, "pid": std::process::id(), "cwd": hostile, "home": "/"}}))
        .handler(|_, _, _| Answer::Later)
        .start();
    let initialize = serde_json::json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": hostile, "clientInfo": {"name": hostile, "version": hostile}}});
    let reply = host.http("POST", "/", &[], initialize.to_string().as_bytes());
    let session = reply.header("mcp-session-id").unwrap().to_owned();
    let mut client = crate::support::http::Client::initialize(host.port, &host.token);
    client.session = session;
    client.start_call("1", hostile, &serde_json::json!({ hostile: hostile }).to_string());
    host.call_frame(hostile);
    for args in [&["status"][..], &["status", "--json"], &["logs"], &["audit"], &["cancel", "--all"]] {
        let (code, out, err) = host.cli(args);
        assert_eq!(code, 0, "{args:?}: {err}");
        assert!(is_harmless(&out) && is_harmless(&err), "{args:?}: {out:?} {err:?}");
        assert!(!out.lines().any(|line| line.starts_with("forged")), "{args:?}: {out}");
    }
    assert!(host.cli(&["status"]).1.contains(r"x\u{1b}[2J"), "shown, not hidden");
    assert!(is_harmless(&host.log()), "{:?}", host.log());
    let notice = host.notice("unknown field");
    assert!(is_harmless(notice["text"].as_str().unwrap()), "{notice}");
    let (_, text) = command(&host, &["status"]);
    assert!(is_harmless(&text), "{text:?}");
    let (_, text) = command(&host, &[hostile]);
    assert!(is_harmless(&text), "{text:?}");
    let (code, out, err) = host.cli(&["cancel", hostile.trim_end_matches('\0')]);
    assert!(code == 1 && is_harmless(&out) && is_harmless(&err), "{err:?}");
}

#[test]
fn logs_and_audit_show_both_generations_and_outlive_the_sidecar() {
    let host = Host::start();
    host.client().call("echo", r#"{"n":1}"#);
    let old = r#"{"ts":"2026-01-01T00:00:00.000Z","id":"old","phase":"start"}"#;
    std::fs::write(host.path("a2mcp.log.1"), format!("{old}\n")).unwrap();
    std::fs::write(host.path(&format!("a2mcp.{}.stderr.1", host.port)), "an older line\n").unwrap();
    let check = |host: &Host| {
        let (code, out, _) = host.cli(&["audit"]);
        let lines: Vec<_> = out.lines().collect();
        assert_eq!((code, lines.len(), lines[0]), (0, 3, old), "{out}");
        assert!(lines[1].contains(r#""phase":"start""#) && lines[2].contains(r#""phase":"done""#));
        let (code, out, _) = host.cli(&["logs"]);
        assert!(code == 0 && out.starts_with("an older line\n") && out.contains("serving"), "{out}");
    };
    check(&host);
    let mut host = host;
    host.close_stdin();
    host.wait();
    check(&host);
}

#[test]
fn the_audit_is_found_where_the_running_sidecar_writes_it() {
    let elsewhere = tempfile::tempdir().unwrap();
    let file = elsewhere.path().join("records");
    let mut host = Setup::default().env("A2MCP_AUDIT", file.to_str().unwrap()).start();
    host.client().call("echo", r#"{"n":1}"#);
    let (code, out, err) = host.cli(&["audit"]);
    assert_eq!((code, out.lines().count()), (0, 2), "{out}{err}");
    assert!(host.cli(&["logs"]).1.contains("serving"));
    host.close_stdin();
    host.wait();
    let (code, out, err) = host.cli(&["audit"]);
    assert_eq!((code, out.as_str()), (1, ""), "{err}");
    assert!(
        err.contains("cannot read ") && err.contains("A2MCP_AUDIT") && err.contains("--agent-dir"),
        "{err}"
    );
    let (code, _, err) = host.cli(&["audit", "--pid", &u32::MAX.to_string()]);
    assert!(code == 1 && err.contains("no sidecar has pid"), "{err}");
}

#[test]
fn a_followed_audit_goes_on_across_a_rotation() {
    let host = Host::start();
    let mut client = host.client();
    client.call("echo", r#"{"n":"before"}"#);
    let mut follower = Command::new(binary())
        .args(["audit", "-f", "--agent-dir"])
        .arg(host.dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (sender, lines) = std::sync::mpsc::channel();
    let stdout = BufReader::new(follower.stdout.take().unwrap());
    std::thread::spawn(move || {
        stdout.lines().map_while(Result::ok).for_each(|line| drop(sender.send(line)));
    });
    let wait_for = |part: &str| loop {
        let line =
            lines.recv_timeout(crate::support::SOON).unwrap_or_else(|_| panic!("{part} was not shown"));
        if line.contains(part) && line.contains("done") {
            return;
        }
    };
    wait_for("before");
    client.call("echo", r#"{"n":"appended"}"#);
    wait_for("appended");
    let file = host.path("a2mcp.log");
    std::fs::rename(&file, host.path("a2mcp.log.1")).unwrap();
    client.call("echo", r#"{"n":"rotated"}"#);
    wait_for("rotated");
    follower.kill().unwrap();
    follower.wait().unwrap();
}

/// A reader may come between two halves of a line, or of a character.
#[test]
fn a_followed_line_is_shown_when_it_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap().join("a2mcp.log");
    let mut file = std::fs::File::create(&path).unwrap();
    let mut follower = Command::new(binary())
        .args(["audit", "-f", "--agent-dir"])
        .arg(dir.path())
        .env_remove("A2MCP_AUDIT")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(follower.stdout.take().unwrap());
    // How far it has read.
    let position = || {
        let process = format!("/proc/{}", follower.id());
        let files = std::fs::read_dir(format!("{process}/fd")).unwrap().flatten();
        let mut files = files.filter(|file| std::fs::read_link(file.path()).is_ok_and(|to| to == path));
        let number = files.next()?.file_name().into_string().unwrap();
        let info = std::fs::read_to_string(format!("{process}/fdinfo/{number}")).ok()?;
        info.lines().next()?.strip_prefix("pos:")?.trim().parse::<u64>().ok()
    };
    let line = "{\"tool\":\"ü\"}\n".as_bytes();
    let mut written = 0;
    for _ in 0..2 {
        for half in [&line[..10], &line[10..]] {
            file.write_all(half).unwrap();
            written += half.len() as u64;
            eventually("the follower", || (position()? == written).then_some(()));
        }
        let mut shown = Vec::new();
        stdout.read_until(b'\n', &mut shown).unwrap();
        assert_eq!(shown, line);
    }
    follower.kill().unwrap();
    follower.wait().unwrap();
}

#[test]
fn unknown_words_in_the_host_get_the_usage() {
    let host = Host::start();
    for words in [&["nonsense"][..], &["cancel"], &["status", "x"], &["token", "--json"], &["--help"], &[""]]
    {
        let (level, text) = command(&host, words);
        assert_eq!(level, "warning", "{words:?}: {text}");
        assert!(text.contains("status | token | rotate | restart"), "{words:?}: {text}");
    }
    let (level, text) = command(&host, &["cancel", "nothing"]);
    assert!(level == "error" && text.contains("no call in flight"), "{text}");
    assert_eq!(command(&host, &["pause"]).0, "info");
    assert_eq!(host.client().call_text("echo", "{}"), "paused by the operator");
    assert_eq!(command(&host, &["resume"]).0, "info");
    assert_eq!(host.client().call_text("echo", "{}"), "{}");
}

#[test]
fn the_control_socket_survives_nonsense() {
    use std::io::{Read as _, Write as _};
    let host = Host::start();
    let uid = rustix::process::getuid().as_raw();
    let dirs = [format!("/run/user/{uid}/a2mcp"), format!("/tmp/a2mcp-{uid}")];
    let name = format!("{}.sock", host.port);
    let socket = dirs.iter().map(|dir| Path::new(dir).join(&name)).find(|path| path.exists()).unwrap();
    let long = vec![b'x'; 1 << 20];
    for bytes in [
        &b"\n"[..],
        b"not json\n",
        b"{}\n",
        b"{\"verb\":\"unheardOf\"}\n",
        b"[1,2]\n",
        b"\xff\xfe\n",
        b"half a line",
        &long,
    ] {
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        let _ = stream.write_all(bytes);
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        assert!(answer.is_empty() || answer.contains("error"), "{answer}");
    }
    assert_eq!(host.status()["pid"], host.child.id());
    // Several requests on one connection are answered in order.
    let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    stream.write_all(b"{\"verb\":\"pause\"}\n{\"verb\":\"resume\"}\n").unwrap();
    let answers: Vec<String> = BufReader::new(stream).lines().take(2).map(Result::unwrap).collect();
    assert!(answers[0].contains("paused") && answers[1].contains("serving"), "{answers:?}");
}

/// What the operator has stopped stays stopped: neither a crash nor a restart brings it back.
#[test]
fn a_pause_outlives_the_sidecar_and_ends_with_resume() {
    let mut host = reference::Host::start(&[]);
    let operator = |host: &reference::Host, verb: &str| {
        let (code, _, err) = cli(&[verb], Some(host.dir.path()), &HashMap::new());
        assert_eq!(code, 0, "{err}");
    };
    let client = host.session();
    operator(&host, "pause");
    host.kill_sidecar();
    assert_eq!(client.again().call_text("echo", "{}"), "paused by the operator");
    operator(&host, "restart");
    host.next_sidecar();
    assert_eq!(client.again().call_text("echo", "{}"), "paused by the operator");
    operator(&host, "resume");
    host.kill_sidecar();
    assert_eq!(client.again().call_text("echo", "{}"), "{}");
}
