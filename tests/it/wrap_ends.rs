//! `a2mcp wrap`: who dies with whom. The server's death costs its calls, and nobody else anything; the
//! sidecar's death costs nothing; the host's death leaves nothing (issue 8, P5, P8, C1).

use std::time::{Duration, Instant};

use a2mcp::process::Identity;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::refhost::gone;
use crate::support::caller::{Caller, Way};
use crate::support::eventually;
use crate::support::http::{Client, Connection, INITIALIZE};
use crate::support::reference::identity;
use crate::support::wrap::{Wrap, script, wrapping};

/// What a dead host may take to leave nothing behind (contract 15).
const GONE: Duration = Duration::from_secs(3);
const STREAMS: &str = r#"{"streamAfterMs":0}"#;

fn text(result: &Value) -> &str {
    result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text in {result}"))
}

/// The server and all it left, wherever that went.
fn family(wrap: &Wrap) -> Vec<Identity> {
    let left = wrap.until_noted("grandchildren", 1);
    let left = left.last().unwrap()["pids"].as_array().unwrap().clone();
    let mut all: Vec<Identity> = left.iter().map(identity).collect();
    all.extend([wrap.process(), wrap.guard()]);
    assert!(all.iter().all(Identity::is_alive));
    all
}

#[test]
fn the_hosts_death_leaves_nothing_of_the_server() {
    for (signal, args) in [
        (Signal::KILL, &["--grandchild"][..]),
        (Signal::KILL, &["--grandchild", "--deaf"]),
        (Signal::TERM, &["--grandchild"]),
        (Signal::INT, &["--grandchild"]),
    ] {
        let mut wrap = Wrap::start(args);
        let mut all = family(&wrap);
        all.push(wrap.sidecar());
        let mut session = wrap.session();
        session.start_call("1", "test_simple_text", "{}");
        assert_eq!(session.read().status, 200);
        wrap.host().signal(signal);
        let took = gone(&all);
        assert!(took < GONE, "{signal:?} {args:?}: {took:?}");
        let status = wrap.program.end();
        assert_eq!(status.success(), signal != Signal::KILL, "{signal:?}: {status}");
    }
}

/// A call in flight gets its grace; a second signal ends it.
#[test]
fn a_polite_end_waits_for_calls_and_a_second_signal_does_not() {
    let mut wrap = Wrap::start(&[]);
    let mut session = wrap.session();
    session.start_call("1", "slow", r#"{"seconds":0.5}"#);
    wrap.until_noted("call", 1);
    let host = wrap.host();
    host.signal(Signal::TERM);
    let result = session.read().json()["result"].clone();
    assert_eq!(text(&result), "slept 0.5 s");
    assert!(wrap.program.end().success());
    assert_eq!(wrap.noted("end of input").len(), 1, "the server was asked to end");

    let wrap = Wrap::start(&["--deaf"]);
    let mut session = wrap.session();
    session.start_call("1", "hang", "{}");
    wrap.until_noted("call", 1);
    let all = [wrap.host(), wrap.process(), wrap.guard(), wrap.sidecar()];
    all[0].signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(50));
    all[0].signal(Signal::TERM);
    let took = gone(&all);
    assert!(took < Duration::from_secs(6), "{took:?}");
    drop(wrap);
}

#[test]
fn a_server_that_dies_costs_its_calls_and_nothing_else() {
    let wrap = Wrap::start(&[]);
    let mut session = wrap.session();
    let mut stream = session.listen();
    let grown = session.call_text("grow", "{}");
    stream.notification("notifications/tools/list_changed");
    assert!(session.rpc("tools/list", "{}").to_string().contains(&grown));
    session.rpc("logging/setLevel", r#"{"level":"warning"}"#);
    session.rpc("resources/subscribe", r#"{"uri":"test://watched-resource"}"#);
    let mut waiting = session.again();
    waiting.start_call("1", "slow", r#"{"seconds":60}"#);
    wrap.until_noted("call", 2);
    let result = session.call("die", r#"{"code":7}"#);
    assert_eq!(result["isError"], true);
    for result in [result, waiting.read().json()["result"].clone()] {
        assert!(text(&result).contains("outcome unknown: the server ended (exit code 7)"), "{result}");
        assert!(!text(&result).contains("dying as asked"), "what it wrote is the operator's: {result}");
    }
    let ends: Vec<_> = wrap.audit().into_iter().filter(|record| record["outcome"] == "unknown").collect();
    assert_eq!(ends.len(), 2, "{ends:?}");
    // The next one serves the same session and knows what callers want; its list is another.
    stream.notification("notifications/tools/list_changed");
    assert!(!session.rpc("tools/list", "{}").to_string().contains(&grown));
    let said: Value = serde_json::from_str(&session.call_text("level", "{}")).unwrap();
    assert_eq!(said, json!({"levels": ["warning"], "subscribed": ["test://watched-resource"]}));
    let has_restarted = |server: &Value| server["restarts"] == 1 && server["state"] == "running";
    let server = eventually("the status", || Some(wrap.server()).filter(has_restarted));
    assert_eq!(server["reason"], "exit code 7", "{server}");
    assert!(wrap.stderr().contains("it wrote last: dying as asked"), "{}", wrap.stderr());
    assert_eq!(wrap.noted("initialize").len(), 2);

    // However it ends, and whoever of the two is killed.
    for (round, victim) in ["server", "guard"].into_iter().enumerate() {
        let guard = wrap.guard();
        let victim = if victim == "guard" { guard } else { wrap.process() };
        let before = [wrap.process(), guard];
        victim.signal(Signal::KILL);
        gone(&before);
        wrap.until_noted("initialize", 3 + round);
        assert_eq!(
            session.call_text("test_simple_text", "{}"),
            "This is a simple text response for testing."
        );
    }
    assert_eq!(wrap.host(), identity(&wrap.ready["hostPid"]));
    assert_eq!(wrap.sidecar(), identity(&wrap.ready["pid"]), "the sidecar noticed nothing");
}

/// It would never hear of another call.
#[test]
fn a_server_that_closes_its_input_is_started_again() {
    let wrap = Wrap::start(&[]);
    let mut session = wrap.session();
    let mut waiting = session.again();
    waiting.start_call("1", "slow", r#"{"seconds":0.5}"#);
    wrap.until_noted("call", 1);
    let first = [wrap.process(), wrap.guard()];
    assert_eq!(session.call_text("close_input", "{}"), "closed");
    wrap.until_noted("end of input", 1);
    let result = session.call("echo", "{}");
    assert_eq!(result["isError"], true);
    assert!(text(&result).contains("the server ended (it closed its input, so it was ended)"), "{result}");
    assert_eq!(
        waiting.read().json()["result"]["content"][0]["text"],
        "slept 0.5 s",
        "it was answered in time"
    );
    gone(&first);
    assert_eq!(session.call_text("test_simple_text", "{}"), "This is a simple text response for testing.");
    assert_eq!(wrap.noted("start").len(), 2);
}

/// A pipe that has no room left.
fn full_pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    use std::io::Write as _;
    let (reader, mut writer) = std::io::pipe().unwrap();
    let flags = rustix::fs::fcntl_getfl(&writer).unwrap();
    rustix::fs::fcntl_setfl(&writer, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
    while writer.write(&[b'.'; 4096]).is_ok() {}
    while writer.write(b".").is_ok() {}
    rustix::fs::fcntl_setfl(&writer, flags).unwrap();
    (reader, writer)
}

/// A terminal that stands still, or a log collector that hangs.
#[test]
fn a_stderr_that_nobody_reads_stops_nothing() {
    use std::io::Read as _;
    for is_read_later in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (mut reader, writer) = full_pipe();
        let mut command = wrapping(dir.path(), "{}", &["--", "python3"]);
        command.arg(script()).arg("--note").arg(dir.path().join("note"));
        let mut wrap = Wrap::run_with(dir, &mut command, writer.into());
        drop(command);
        let mut session = wrap.session();
        for round in 1..4 {
            let result = session.call("die", "{}");
            assert!(text(&result).contains("outcome unknown"), "{result}");
            wrap.until_noted("initialize", 1 + round);
        }
        // More lines than may wait.
        session.call("chatter", r#"{"lines":2000}"#);
        let said = is_read_later.then(|| {
            std::thread::spawn(move || {
                let mut said = String::new();
                reader.read_to_string(&mut said).unwrap();
                said
            })
        });
        let all = [wrap.host(), wrap.process(), wrap.guard(), wrap.sidecar()];
        all[0].signal(Signal::TERM);
        let took = gone(&all);
        assert!(took < GONE, "{took:?}");
        assert!(wrap.program.end().success());
        if let Some(said) = said.map(|said| said.join().unwrap()) {
            assert_eq!(said.matches("the server ended: exit code 7").count(), 3, "{said}");
            assert!(said.contains("line(s) are missing here"), "{said}");
        }
    }
}

/// Its stdout likewise: whoever started it may never read the line.
#[test]
fn a_stdout_that_nobody_reads_does_not_hold_up_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let (_reader, writer) = full_pipe();
    let mut command = wrapping(dir.path(), "{}", &["--", "python3"]);
    command.arg(script()).arg("--note").arg(dir.path().join("note"));
    let mut child = command.stdout(writer).stderr(std::process::Stdio::null()).spawn().unwrap();
    drop(command);
    let host = Identity::of(child.id()).unwrap();
    eventually("a running server", || {
        let (code, out, _) =
            crate::support::cli(&["status", "--json"], Some(dir.path()), &Default::default());
        (code == 0 && out.contains("running")).then_some(())
    });
    host.signal(Signal::TERM);
    let took = gone(&[host]);
    assert!(took < GONE, "{took:?}");
    assert!(child.wait().unwrap().success());
}

/// P8.
#[test]
fn a_server_that_dies_again_and_again_is_not_started_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let broken = dir.path().join("broken");
    let wrap = Wrap::start(&["--exit-at-start", "3", "--exit-while", broken.to_str().unwrap()]);
    let mut session = wrap.session();
    std::fs::write(&broken, "").unwrap();
    let begun = Instant::now();
    session.call("die", "{}");
    // Who calls meanwhile waits, and is told in the end.
    let result = session.call("echo", "{}");
    let reason = text(&result);
    assert!(reason.contains("does not run") && reason.contains("exit code 3"), "{reason}");
    assert!(begun.elapsed() > Duration::from_millis(1800), "the pauses grow");
    let server = wrap.server();
    assert_eq!(server["state"], "failed", "whoever was told sees it: {server}");
    let (code, out, err) = crate::support::cli(&["doctor"], Some(wrap.dir.path()), &Default::default());
    assert_eq!(code, 1, "{err}");
    assert!(out.contains("WRONG the wrapped server ended again and again"), "{out}");
    assert!(out.contains("exit code 3") && out.contains("try its command by itself"), "{out}");
    assert!(server["reason"].as_str().unwrap().contains("exit code 3"), "{server}");
    assert_eq!(server.get("pid"), None, "{server}");
    assert_eq!(wrap.noted("start").len(), 5);
    assert!(wrap.stderr().contains("cannot start: \\u{1b}[31mno database"), "{}", wrap.stderr());
    // The endpoint itself is well, and so is its list.
    let listed = session.rpc("tools/list", "{}");
    assert!(listed["result"]["tools"].as_array().unwrap().len() > 20);
    assert_eq!(session.rpc("ping", "{}")["result"], json!({}));
    // And those of the next sidecar.
    wrap.restart();
    let begun = Instant::now();
    let mut session = session.again();
    assert_eq!(session.rpc("tools/list", "{}")["result"], listed["result"]);
    let result = session.call("echo", "{}");
    assert!(text(&result).contains("does not run: ") && text(&result).contains("exit code 3"), "{result}");
    assert!(begun.elapsed() < Duration::from_secs(10), "nothing waits for a server that failed");
    assert_eq!(wrap.status()["health"], "ready");
}

#[test]
fn a_sidecar_that_is_started_while_the_server_is_has_its_last_list_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let slow = dir.path().join("slow");
    let wrap = Wrap::start(&["--wait-while", slow.to_str().unwrap()]);
    let mut session = wrap.session();
    let listed = session.rpc("tools/list", "{}")["result"].clone();
    std::fs::write(&slow, "").unwrap();
    session.call("die", "{}");
    wrap.until_noted("start", 2);
    wrap.restart();
    let mut session = session.again();
    let begun = Instant::now();
    assert_eq!(session.rpc("tools/list", "{}")["result"], listed);
    assert!(begun.elapsed() < Duration::from_secs(10), "it waits for no server: {:?}", begun.elapsed());
    assert_eq!(wrap.server()["state"], "starting");
    // Calls do.
    session.start_call("1", "grow", "{}");
    std::fs::remove_file(&slow).unwrap();
    assert_eq!(session.read().json()["result"]["content"][0]["text"], "grown_0");
}

#[test]
fn a_command_right_after_a_restart_waits_for_the_next_sidecar() {
    let wrap = Wrap::start(&[]);
    let run = |args: &[&str]| crate::support::cli(args, Some(wrap.dir.path()), &Default::default());
    let commands = [&["call", "test_simple_text"][..], &["status"], &["pause"], &["resume"], &["tools"]];
    for (at, args) in commands.into_iter().enumerate() {
        let before = wrap.sidecar();
        // A crash is no different; of many in a row, hosts have enough.
        if at < 2 {
            before.signal(Signal::KILL);
        } else {
            assert_eq!(run(&["restart"]).0, 0);
        }
        let (code, _, err) = run(args);
        assert_eq!(code, 0, "{args:?}: {err}");
        gone(&[before]);
    }
}

/// Whatever moment it comes in: no sidecar serves the old token, and none of its calls goes on.
#[test]
fn a_rotation_between_two_sidecars_counts() {
    let wrap = Wrap::start(&[]);
    let run = |args: &[&str]| crate::support::cli(args, Some(wrap.dir.path()), &Default::default());
    let status = |token: &str| {
        let bearer = format!("Bearer {token}");
        let mut connection = Connection::open(wrap.port());
        connection.request("POST", "/", &[("Authorization", &bearer)], INITIALIZE.as_bytes()).status
    };
    for moment in 0..12 {
        let old = wrap.token();
        let mut session = wrap.session();
        session.start_call("1", "hang", "{}");
        wrap.until_noted("call", moment + 1);
        let (code, new, err) = std::thread::scope(|scope| {
            let before = wrap.sidecar();
            let restart = (moment >= 2).then(|| scope.spawn(|| run(&["restart", "--grace", "0"])));
            if restart.is_none() {
                before.signal(Signal::KILL);
            }
            // Not for something to happen: to come at another moment each time.
            std::thread::sleep(Duration::from_millis(5 * moment as u64));
            run(&["rotate"])
        });
        assert_eq!(code, 0, "{moment}: {err}");
        assert_eq!(wrap.token(), new.trim_end(), "{moment}: it is what was printed");
        assert_eq!((status(&old), status(new.trim_end())), (401, 200), "{moment}");
        wrap.until_noted("cancelled", moment + 1);
    }
}

#[test]
fn a_server_that_does_not_list_its_tools_is_said_so_and_its_last_list_stands() {
    let dir = tempfile::tempdir().unwrap();
    let busy = dir.path().join("busy");
    let wrap = Wrap::start(&["--list-unless", busy.to_str().unwrap()]);
    let mut session = wrap.session();
    let listed = session.rpc("tools/list", "{}")["result"].clone();
    let grown = session.call_text("grow", "{}");
    std::fs::write(&busy, "").unwrap();
    wrap.restart();
    assert_eq!(wrap.server()["listError"], Value::Null);
    let mut session = session.again();
    let result = session.rpc("tools/list", "{}")["result"].clone();
    assert!(result == listed || result.to_string().contains(&grown), "{result}");
    assert_eq!(wrap.server()["listError"], "it has not answered tools/list for 10 s");
    assert_eq!(session.call_text("test_simple_text", "{}"), "This is a simple text response for testing.");
    let mut stream = session.listen();
    session.call_text("grow", "{}");
    std::fs::remove_file(&busy).unwrap();
    stream.notification("notifications/tools/list_changed");
    eventually("a list", || wrap.server().get("listError").is_none().then_some(()));
    eventually("the new one", || {
        session.rpc("tools/list", "{}").to_string().contains("grown_1").then_some(())
    });
}

/// C1: the sidecar's death, in the worst moment.
#[test]
fn a_call_outlives_the_sidecar_and_runs_once() {
    for way in [Way::JsonNewId, Way::JsonSameId, Way::Stream] {
        let config = if way == Way::Stream { STREAMS } else { "{}" };
        let wrap = Wrap::start_with(config, &[], &[]);
        let mut caller = Caller::new(wrap.port(), &wrap.token(), way);
        let sidecar = wrap.sidecar();
        let got = std::thread::scope(|scope| {
            let calling = scope.spawn(|| caller.call("slow", &json!({"seconds": 0.7})));
            wrap.until_noted("call", 1);
            sidecar.signal(Signal::KILL);
            calling.join().unwrap()
        });
        assert_eq!(got.text(), "slept 0.7 s");
        assert_eq!(wrap.noted("call").len(), 1, "it ran once");
        assert_eq!(wrap.noted("start").len(), 1, "the server noticed nothing");
        assert_ne!(wrap.sidecar(), sidecar);
    }
}

#[test]
fn a_restart_of_the_sidecar_keeps_server_session_and_open_question() {
    let wrap = Wrap::start_with(STREAMS, &[], &[]);
    let session = Client::declaring(wrap.port(), &wrap.token(), r#"{"elicitation":{}}"#);
    let mut stream =
        session.ask_call("1", "test_elicitation", r#"{"message":"still there?"}"#, None).stream();
    let first = stream.priming();
    stream.until(|message| message["method"] == "elicitation/create");
    wrap.sidecar().signal(Signal::KILL);
    // The next one asks again, on the stream the caller comes back to.
    let mut stream = eventually("the stream", || {
        let mut stream = session.resume(&first.id);
        stream.try_next().ok().flatten().map(|_| stream)
    });
    let question = stream.until(|message| message["method"] == "elicitation/create");
    session.answer(&question["id"], r#""result":{"action":"accept","content":{"response":"yes"}}"#);
    let result = stream.until(|message| message["id"] == 1)["result"].clone();
    assert!(text(&result).contains("action=accept"), "{result}");
    assert_eq!((wrap.noted("start").len(), wrap.noted("call").len()), (1, 1));

    let second = wrap.sidecar();
    let (code, _, err) = crate::support::cli(&["restart"], Some(wrap.dir.path()), &Default::default());
    assert_eq!(code, 0, "{err}");
    eventually("the next sidecar", || (wrap.status()["pid"] != json!(second.pid)).then_some(()));
    let mut again = session.again();
    assert_eq!(again.call_text("test_simple_text", "{}"), "This is a simple text response for testing.");
    let (code, _, err) = crate::support::cli(&["stop"], Some(wrap.dir.path()), &Default::default());
    assert_eq!(code, 0, "{err}");
    gone(&[wrap.host(), wrap.process()]);
}

/// Whoever is asking a person when the sidecar dies does not ask twice for nothing: the answer to the first
/// asking is the answer, whichever sidecar gets it and whether or not it has asked again.
#[test]
fn an_answer_counts_under_the_id_of_before_a_restart() {
    let wrap = Wrap::start_with(STREAMS, &[], &[]);
    let session = Client::declaring(wrap.port(), &wrap.token(), r#"{"elicitation":{}}"#);
    let other = Client::declaring(wrap.port(), &wrap.token(), r#"{"elicitation":{}}"#);
    for (round, (is_kill, is_asked_again)) in
        [(true, false), (true, true), (false, true)].into_iter().enumerate()
    {
        let id = format!("{}", round + 1);
        // Equal arguments would attach to the call before (contract 4.2).
        let arguments = format!(r#"{{"message":"you, {round}?"}}"#);
        let mut stream = session.ask_call(&id, "test_elicitation", &arguments, None).stream();
        let first = stream.priming();
        let question = stream.until(|message| message["method"] == "elicitation/create");
        let sidecar = wrap.sidecar();
        if is_kill {
            sidecar.signal(Signal::KILL);
        } else {
            let (code, _, err) =
                crate::support::cli(&["restart"], Some(wrap.dir.path()), &Default::default());
            assert_eq!(code, 0, "{err}");
            eventually("the next sidecar", || (wrap.status()["pid"] != json!(sidecar.pid)).then_some(()));
        }
        let resumed = || {
            eventually("the stream", || {
                let mut stream = session.resume(&first.id);
                stream.try_next().ok().flatten().map(|_| stream)
            })
        };
        let mut stream = if is_asked_again {
            let mut stream = resumed();
            let again = stream.until(|message| message["method"] == "elicitation/create");
            assert_eq!(again, question, "the same question under the same id");
            stream
        } else {
            stream
        };
        let answer = |by: &str| format!(r#""result":{{"action":"accept","content":{{"response":"{by}"}}}}"#);
        // Nobody answers for another session.
        assert_eq!(other.answer(&question["id"], &answer("other")).status, 202);
        assert_eq!(session.answer(&question["id"], &answer("me")).status, 202);
        if !is_asked_again {
            stream = resumed();
        }
        let result = stream.until(|message| message["id"] == json!(round + 1))["result"].clone();
        assert!(text(&result).contains("action=accept") && text(&result).contains("\"me\""), "{result}");
        assert_eq!((wrap.noted("start").len(), wrap.noted("call").len()), (1, round + 1));
        // Late and twice: nobody minds.
        assert_eq!(session.answer(&question["id"], &answer("again")).status, 202);
    }
}
