//! The keeper (issue "long sessions", contract 15, design "who may die"): nothing is refused while
//! a sidecar is missing, nothing outlives the host, and its private socket is private.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use a2mcp::keeper;
use a2mcp::keeper::wire::{self, Inbox};
use a2mcp::process::{self, Identity};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::refhost::gone;
use crate::support::http::Connection;
use crate::support::reference::{self, identity};
use crate::support::{Host, SOON, Setup, binary, eventually, within};

/// What a dead host may take to leave nothing behind (contract 15).
const GONE: Duration = Duration::from_secs(3);
const PING: &[u8] = br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;

/// A client of the private socket that hides nothing.
struct Link {
    stream: UnixStream,
    inbox: Inbox,
    events: Vec<Value>,
}

impl Link {
    fn over(stream: UnixStream) -> Self {
        Self { stream, inbox: Inbox::default(), events: Vec::new() }
    }

    /// Another client than the sidecar.
    fn visit(path: &Path) -> Self {
        let mut link = Self::over(UnixStream::connect(path).unwrap());
        link.ask(json!({ "verb": "hello", "protocol": 1 })).unwrap();
        link
    }

    fn ask(&mut self, request: Value) -> Result<Value, String> {
        self.ask_with(request, None).map(|(value, _)| value)
    }

    fn ask_with(
        &mut self,
        request: Value,
        descriptor: Option<OwnedFd>,
    ) -> Result<(Value, Option<OwnedFd>), String> {
        let line = wire::line(&request).unwrap();
        assert_eq!(wire::send(&self.stream, &line, descriptor.as_ref()).unwrap(), line.len());
        let answer = loop {
            let message = self.message();
            match message["event"].as_object() {
                Some(_) => self.events.push(message["event"].clone()),
                None => break message,
            }
        };
        match answer["error"].as_str() {
            Some(why) => Err(why.to_owned()),
            None => Ok((answer["ok"].clone(), self.inbox.take_descriptor())),
        }
    }

    fn message(&mut self) -> Value {
        let line = eventually("a line of the keeper", || {
            self.inbox.next_line().or_else(|| {
                let received = self.inbox.receive(&self.stream);
                assert!(!matches!(received, Ok(0)), "the keeper has closed the connection");
                self.inbox.next_line()
            })
        });
        serde_json::from_slice(&line).unwrap()
    }

    fn event(&mut self) -> Value {
        if self.events.is_empty() {
            let message = self.message();
            self.events.push(message["event"].clone());
        }
        self.events.remove(0)
    }

    fn is_closed(&mut self) -> bool {
        eventually("an end or an answer", || match self.inbox.receive(&self.stream) {
            Ok(0) => Some(true),
            Ok(_) => Some(false),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => None,
            Err(_) => Some(true),
        })
    }
}

/// A keeper with the test as its sidecar, and a process as its host.
struct Keeper {
    child: Child,
    host: Child,
    instance: String,
    link: Link,
}

impl Keeper {
    fn start(args: &[&str]) -> Self {
        Self::start_with(true, args)
    }

    /// With `sidecar` the test is the keeper's sidecar: then the host must not die.
    fn start_with(sidecar: bool, args: &[&str]) -> Self {
        let host =
            Command::new("sleep").arg("600").stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let instance = format!("keeper-{}", uuid::Uuid::new_v4());
        let (ours, theirs) = UnixStream::pair().unwrap();
        let child =
            Self::command(&instance, Identity::of(host.id()).unwrap(), theirs).args(args).spawn().unwrap();
        let mut link = Link::over(ours);
        let greeting = link.ask(json!({ "verb": "hello", "protocol": 1, "sidecar": sidecar })).unwrap();
        assert_eq!((&greeting["protocol"], &greeting["keeper"]["pid"]), (&json!(1), &json!(child.id())));
        Self { child, host, instance, link }
    }

    fn command(instance: &str, host: Identity, first: UnixStream) -> Command {
        let mut command = Command::new(binary());
        command.args(["keeper", "--socket", &keeper::socket_name(instance)]);
        command.args(["--host-pid", &host.pid.to_string(), "--host-start", &host.start_time.to_string()]);
        command.env("DUFS_ALLOW_ALL", "true").env("SEEN", "yes");
        command.stdin(OwnedFd::from(first)).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    fn socket(&self) -> PathBuf {
        keeper::socket_path(&self.instance).unwrap()
    }

    fn adopt(&mut self) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        self.link.ask_with(json!({ "verb": "adopt" }), Some(listener.into())).unwrap();
        port
    }

    /// Starts `sh -c SCRIPT`; the child's number and process.
    fn sh(&mut self, script: &str) -> (u64, Identity) {
        let child = self
            .link
            .ask(json!({ "verb": "spawn", "purpose": "test", "program": "/bin/sh", "args": ["-c", script],
                "removeEnv": ["DUFS_"], "env": [["ADDED", "too"]], "note": "opaque" }))
            .unwrap();
        (child["child"].as_u64().unwrap(), serde_json::from_value(child["process"].clone()).unwrap())
    }

    fn output(&mut self, child: u64) -> Value {
        self.link.ask(json!({ "verb": "output", "child": child, "maxBytes": 65536 })).unwrap()
    }

    /// Waits for a line of a child's stdout.
    fn line(&mut self, child: u64) -> String {
        eventually("output", || {
            let output = self.output(child);
            let text = output["stdout"].as_str().unwrap();
            text.contains('\n').then(|| text.trim().to_owned())
        })
    }

    fn ends(&mut self) {
        eventually("the keeper's end", || self.child.try_wait().unwrap());
    }

    fn kill_host(&mut self) {
        self.host.kill().unwrap();
        self.host.wait().unwrap();
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // The keeper first: it would end its sidecar with the host, and that is this process.
        for child in [&mut self.child, &mut self.host] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn is_open(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_ok()
}

fn descriptors(pid: u32) -> Vec<(String, String)> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    entries
        .filter_map(|entry| {
            let target = std::fs::read_link(entry.path()).ok()?;
            Some((entry.file_name().into_string().unwrap(), target.display().to_string()))
        })
        .collect()
}

/// The keeper of a running sidecar.
fn keeper_of(status: &Value) -> Identity {
    identity(&status["keeper"]["pid"])
}

fn status_in(dir: &Path) -> Value {
    let (code, out, err) =
        crate::support::cli(&["status", "--json"], Some(dir), &std::collections::HashMap::new());
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn the_keeper_holds_the_port_and_nothing_of_the_sidecar_it_comes_from() {
    let host = Host::start();
    let status = host.status();
    let keeper = keeper_of(&status);
    assert_eq!(process::name(keeper.pid).unwrap(), process::COMPANION_NAME);
    let pid = rustix::process::Pid::from_raw(keeper.pid.cast_signed());
    assert_eq!(rustix::process::getsid(pid).unwrap(), pid.unwrap(), "a session of its own");
    let ours = descriptors(keeper.pid);
    let of = |number: &str| ours.iter().find(|(fd, _)| fd == number).unwrap().1.clone();
    assert_eq!((of("0").as_str(), of("1").as_str()), ("/dev/null", "/dev/null"));
    assert!(of("2").ends_with(&format!("a2mcp.{}.stderr", host.port)), "{ours:?}");
    assert!(ours.iter().all(|(_, target)| !target.starts_with("pipe:")), "{ours:?}");
    let command = std::fs::read(format!("/proc/{}/cmdline", keeper.pid)).unwrap();
    let command = String::from_utf8_lossy(&command).into_owned();
    assert!(!command.contains(&host.token) && !command.contains(&host.instance), "{command}");
    assert!(host.log().contains("keeper: holding the listening socket"), "{}", host.log());
    let shown = host.cli(&["status"]).1;
    assert!(shown.contains(&format!("pid {} · up", keeper.pid)), "{shown}");
    let state: Value = serde_json::from_slice(
        &std::fs::read(host.path(&format!("a2mcp.state/{}.json", host.port))).unwrap(),
    )
    .unwrap();
    assert_eq!(state["keeper"]["pid"], keeper.pid);
}

#[test]
fn newcomers_wait_while_no_sidecar_runs_and_are_answered_by_the_next_one() {
    let mut host = Host::start();
    let session = host.client().session;
    host.child.kill().unwrap();
    host.child.wait().unwrap();
    let bearer = format!("Bearer {}", host.token);
    let mut waiting: Vec<_> = (0..200)
        .map(|_| {
            let mut connection = Connection::open(host.port);
            let headers = [("Authorization", bearer.as_str()), ("mcp-session-id", session.as_str())];
            connection.send("POST", "/", &headers, PING).unwrap();
            connection
        })
        .collect();
    let next = Setup::default().in_dir_of(&host).hello(json!({ "resume": { "port": host.port } })).start();
    assert_eq!(next.port, host.port);
    for connection in &mut waiting {
        assert_eq!(connection.read().unwrap().status, 200);
    }
    assert_eq!(keeper_of(&next.status()), keeper_of(&next.status()));
    assert_eq!(next.count("bridge/notify"), 0, "{:?}", next.frames());
}

#[test]
fn a_sidecar_that_died_before_it_said_its_port_is_followed_on_the_same_one() {
    let mut host = Host::start();
    let keeper = keeper_of(&host.status());
    host.child.kill().unwrap();
    host.child.wait().unwrap();
    // The shim knows no port, and the config names another one: the port of this host stays.
    let mut config = host.config();
    config["port"] = 1.into();
    let next = Setup::default().in_dir_of(&host).config(&config.to_string()).start();
    assert_eq!((next.port, keeper_of(&next.status())), (host.port, keeper));
}

#[test]
fn a_killed_keeper_is_followed_by_one_that_holds_the_same_port() {
    let mut host = Host::start();
    let session = host.client().session;
    for _ in 0..2 {
        let keeper = keeper_of(&host.status());
        let (stop, refused) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    refused.fetch_add(usize::from(!is_open(host.port)), Ordering::SeqCst);
                }
            });
            keeper.signal(Signal::KILL);
            eventually("the next keeper", || {
                host.status()["keeper"]["pid"].as_u64().filter(|pid| *pid != u64::from(keeper.pid))
            });
            stop.store(true, Ordering::SeqCst);
        });
        assert_eq!(refused.into_inner(), 0);
        // It holds the port: the sidecar's death closes nothing.
        host.child.kill().unwrap();
        host.child.wait().unwrap();
        assert!(is_open(host.port));
        host = Setup::default().in_dir_of(&host).hello(json!({ "resume": { "port": host.port } })).start();
        assert_eq!(host.http("POST", "/", &[("mcp-session-id", &session)], PING).status, 200);
    }
}

#[test]
fn a_keeper_that_hangs_or_lost_its_socket_costs_a_warning_and_not_the_port() {
    type Spoil = fn(&Host, Identity);
    let faults: [(&str, Spoil); 2] = [
        ("hangs", |_, keeper| _ = keeper.signal(Signal::STOP)),
        ("lost", |host, _| std::fs::remove_file(keeper::socket_path(&host.instance).unwrap()).unwrap()),
    ];
    for (fault, spoil) in faults {
        let mut host = Host::start();
        let keeper = keeper_of(&host.status());
        spoil(&host, keeper);
        if fault == "hangs" {
            assert!(host.cli(&["status"]).1.contains("does not answer"));
            let said = host.cli(&["doctor"]).1;
            assert!(said.contains("does not answer") && said.contains("kill -KILL"), "{said}");
        }
        host.child.kill().unwrap();
        host.child.wait().unwrap();
        let next =
            Setup::default().in_dir_of(&host).hello(json!({ "resume": { "port": host.port } })).start();
        assert_eq!(next.port, host.port, "{fault}");
        next.notice("did not answer and was ended");
        assert!(!keeper.is_alive(), "{fault}");
        assert_ne!(keeper_of(&next.status()), keeper, "{fault}");
        assert!(next.cli(&["doctor"]).1.contains("its port is held by the keeper"), "{fault}");
    }
}

#[test]
fn a_sidecar_that_lost_only_its_connection_comes_back_to_the_same_keeper() {
    let fake = FakeKeeper::start(wire::PROTOCOL);
    let host = Setup::default().hello(fake.hello()).start();
    let connection = fake.connections.recv_timeout(SOON).unwrap();
    connection.shutdown(std::net::Shutdown::Both).unwrap();
    fake.connections.recv_timeout(SOON).expect("another connection");
    host.notice("there is one again");
    assert_eq!(host.status()["keeper"]["pid"], std::process::id());
}

#[test]
fn what_a_child_started_goes_with_a_killed_keeper() {
    let mut host = Host::start();
    let keeper = keeper_of(&host.status());
    let mut link = Link::visit(&keeper::socket_path(&host.instance).unwrap());
    let child = link
        .ask(json!({ "verb": "spawn", "purpose": "stub", "program": "/bin/sh", "args": ["-c", "sleep 300 & echo $!; wait"] }))
        .unwrap();
    let grandchild = eventually("the grandchild", || {
        let output = link.ask(json!({ "verb": "output", "child": child["child"], "maxBytes": 100 })).unwrap();
        Identity::of(output["stdout"].as_str().unwrap().trim().parse().ok()?)
    });
    // The next sidecar learns of it from the keeper.
    host.child.kill().unwrap();
    host.child.wait().unwrap();
    let next = Setup::default().in_dir_of(&host).hello(json!({ "resume": { "port": host.port } })).start();
    assert_eq!(next.status()["keeper"]["children"][0]["state"], "running");
    keeper.signal(Signal::KILL);
    assert!(gone(&[keeper, grandchild]) < GONE);
}

#[test]
fn a_stop_by_any_name_ends_the_keeper_and_a_restart_does_not() {
    type Stop = fn(&Host);
    let stops: [(&str, Stop); 4] = [
        ("SIGTERM", |host| host.signal(Signal::TERM)),
        ("a2mcp stop", |host| assert_eq!(host.cli(&["stop"]).0, 0)),
        ("bridge/stop", |host| {
            host.send(r#"{"jsonrpc":"2.0","id":"stop","method":"bridge/stop","params":{"graceMs":1000}}"#);
        }),
        ("end of stdin", Host::close_stdin),
    ];
    for (name, stop) in stops {
        let mut host = Host::start();
        let keeper = keeper_of(&host.status());
        host.signal(Signal::HUP);
        assert_eq!(host.ends_within(Duration::from_secs(5)), Some(75));
        let mut host =
            Setup::default().in_dir_of(&host).hello(json!({ "resume": { "port": host.port } })).start();
        assert_eq!(keeper_of(&host.status()), keeper, "{name}");
        stop(&host);
        assert_eq!(host.ends_within(Duration::from_secs(3)), Some(0), "{name}");
        assert!(gone(&[keeper]) < GONE, "{name}");
        assert!(!is_open(host.port), "{name}");
        assert!(!keeper::socket_path(&host.instance).unwrap().exists(), "{name}");
    }
}

#[test]
fn two_hosts_do_not_mix() {
    let first = Host::start();
    let second = Setup::default().in_dir_of(&first).start();
    let (one, two) = (keeper_of(&first.status_of(first.port)), keeper_of(&second.status_of(second.port)));
    assert_ne!(one, two);
    two.signal(Signal::KILL);
    eventually("the next keeper of the second", || {
        second.status_of(second.port)["keeper"]["pid"].as_u64().filter(|pid| *pid != u64::from(two.pid))
    });
    assert_eq!(keeper_of(&first.status_of(first.port)), one);
    assert!(one.is_alive());
}

/// Plays a keeper of the test as the host, with a listening socket.
struct FakeKeeper {
    instance: String,
    path: PathBuf,
    port: u16,
    /// Those of sidecars, once they have said hello.
    connections: mpsc::Receiver<UnixStream>,
}

impl FakeKeeper {
    fn start(protocol: u32) -> Self {
        let instance = format!("fake-{}", uuid::Uuid::new_v4());
        let path = keeper::socket_path(&instance).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let (came, connections) = mpsc::channel();
        std::thread::spawn(move || {
            for stream in socket.incoming().map_while(Result::ok) {
                let listener = listener.try_clone().unwrap();
                let came = came.clone();
                std::thread::spawn(move || Self::answer(protocol, &stream, &listener, &came));
            }
        });
        Self { instance, path, port, connections }
    }

    fn answer(protocol: u32, stream: &UnixStream, listener: &TcpListener, came: &mpsc::Sender<UnixStream>) {
        let me = Identity::current();
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let request: Value = serde_json::from_str(&line).unwrap();
            let (answer, socket) = match request["verb"].as_str().unwrap() {
                "hello" => {
                    if request["sidecar"] == true {
                        let _ = came.send(stream.try_clone().unwrap());
                    }
                    let greeting = json!({ "protocol": protocol, "version": "9", "keeper": me, "host": me });
                    (json!({ "ok": greeting }), None)
                }
                "socket" => (json!({ "ok": null }), Some(listener.try_clone().unwrap().into())),
                "status" if protocol == wire::PROTOCOL => {
                    let address = listener.local_addr().unwrap();
                    (json!({ "ok": { "uptimeMs": 1, "address": address, "children": [] } }), None)
                }
                verb => (json!({ "error": format!("{verb} is not for me") }), None),
            };
            wire::send(stream, &wire::line(&answer).unwrap(), socket.as_ref()).unwrap();
        }
    }

    fn hello(&self) -> Value {
        let me = Identity::current();
        json!({ "instance": self.instance, "resume": { "port": self.port }, "host": {
            "name": "test", "version": "0", "pid": me.pid, "startTime": me.start_time, "cwd": "/", "home": "/" } })
    }
}

impl Drop for FakeKeeper {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[test]
fn the_check_refuses_a_keeper_of_another_protocol_and_a_respawn_takes_its_socket_all_the_same() {
    let fake = FakeKeeper::start(99);
    let host = Setup::default().hello(fake.hello()).start();
    assert_eq!(host.port, fake.port);
    let notice = host.notice("protocol 99");
    assert_eq!(notice["level"], "warning");
    assert_eq!(host.client().call_text("echo", "{}"), "{}");
    assert!(host.cli(&["status"]).1.contains("protocol 99"));
    let (code, _, said) = host.cli(&["restart"]);
    assert!(code == 1 && said.contains("not restarted") && said.contains("protocol 99"), "{code} {said}");
    assert_eq!(host.client().call_text("echo", "{}"), "{}", "the old one goes on");
}

#[test]
fn the_hosts_death_leaves_neither_keeper_nor_sidecar_nor_child_nor_grandchild() {
    let mut host = reference::Host::start(&[]);
    let status = status_in(host.dir.path());
    let keeper = keeper_of(&status);
    let socket = socket_of(keeper);
    let mut link = Link::visit(&socket);
    // One that ignores SIGTERM, with a grandchild in its group.
    let child = link
        .ask(json!({ "verb": "spawn", "purpose": "stub", "program": "/bin/sh",
            "args": ["-c", "trap '' TERM; sleep 300 & echo $!; while :; do wait; done"] }))
        .unwrap();
    let process: Identity = serde_json::from_value(child["process"].clone()).unwrap();
    let grandchild = eventually("the grandchild", || {
        let output = link.ask(json!({ "verb": "output", "child": child["child"], "maxBytes": 100 })).unwrap();
        Identity::of(output["stdout"].as_str().unwrap().trim().parse().ok()?)
    });
    assert!(status_in(host.dir.path())["keeper"]["children"][0]["purpose"] == "stub");
    let sidecar = host.sidecar();
    // The sidecar is stopped, so it cannot see the death by itself.
    sidecar.signal(Signal::STOP);
    let everything = [keeper, sidecar, process, grandchild];
    host.program.child.kill().unwrap();
    let killed = Instant::now();
    eventually("the port closed", || (!is_open(host.port())).then_some(()));
    assert!(killed.elapsed() < Duration::from_secs(1), "the port closes first");
    assert!(gone(&everything) < GONE);
    assert!(!socket.exists());
}

/// The private socket of a running keeper.
fn socket_of(keeper: Identity) -> PathBuf {
    let command = std::fs::read(format!("/proc/{}/cmdline", keeper.pid)).unwrap();
    let mut words = command.split(|byte| *byte == 0).skip_while(|word| *word != b"--socket");
    let name = String::from_utf8(words.nth(1).unwrap().to_vec()).unwrap();
    a2mcp::rundir::open().unwrap().join(name)
}

#[test]
fn a_keeper_without_a_sidecar_closes_the_port_and_ends_in_its_time() {
    let mut keeper = Keeper::start(&["--absence-ms", "1500"]);
    let port = keeper.adopt();
    let (_, child) = keeper.sh("sleep 300");
    let begun = Instant::now();
    drop(std::mem::replace(&mut keeper.link, Link::over(UnixStream::pair().unwrap().0)));
    // A visitor is no sidecar.
    let mut visitor = Link::visit(&keeper.socket());
    visitor.ask(json!({ "verb": "status" })).unwrap();
    // The next sidecar stops the clock.
    within(Duration::from_secs(1), "still there", || is_open(port).then_some(()));
    let mut next = Link::over(UnixStream::connect(keeper.socket()).unwrap());
    next.ask(json!({ "verb": "hello", "protocol": 1, "sidecar": true })).unwrap();
    eventually("twice the time", || (begun.elapsed() > Duration::from_secs(3)).then_some(()));
    let (_, socket) = next.ask_with(json!({ "verb": "socket" }), None).unwrap();
    assert_eq!(TcpListener::from(socket.unwrap()).local_addr().unwrap().port(), port);
    drop(next);
    keeper.ends();
    assert!(!is_open(port) && !child.is_alive() && !keeper.socket().exists());
}

#[test]
fn a_hosts_death_ends_a_keeper_at_once() {
    let mut keeper = Keeper::start_with(false, &[]);
    let port = keeper.adopt();
    let (_, child) = keeper.sh("sleep 300");
    let instance = keeper.instance.clone();
    keeper.kill_host();
    let begun = Instant::now();
    keeper.ends();
    assert!(begun.elapsed() < Duration::from_secs(1));
    assert!(!is_open(port) && !child.is_alive() && !keeper::socket_path(&instance).unwrap().exists());
}

#[test]
fn children_are_drained_scrubbed_told_of_and_forgotten_in_order() {
    let mut keeper = Keeper::start(&[]);
    let (child, process) =
        keeper.sh("echo \"$DUFS_ALLOW_ALL/$SEEN/$ADDED\"; read line || echo end >&2; sleep 300");
    assert_eq!(keeper.line(child), "/yes/too");
    let fds = descriptors(process.pid);
    let of = |number: &str| fds.iter().find(|(fd, _)| fd == number).unwrap().1.clone();
    assert_eq!(of("0"), "/dev/null");
    assert!(of("1").starts_with("pipe:") && of("2").starts_with("pipe:") && fds.len() == 3, "{fds:?}");
    let group = rustix::process::getpgid(rustix::process::Pid::from_raw(process.pid.cast_signed())).unwrap();
    assert_eq!(group.as_raw_nonzero().get().cast_unsigned(), process.pid);
    let status = keeper.link.ask(json!({ "verb": "status" })).unwrap();
    assert_eq!(
        (&status["children"][0]["note"], &status["children"][0]["exit"]),
        (&json!("opaque"), &Value::Null)
    );
    keeper.link.ask(json!({ "verb": "note", "child": child, "note": "changed" })).unwrap();
    keeper
        .link
        .ask(json!({ "verb": "signal", "child": child, "signal": "term", "killAfterMs": 5000 }))
        .unwrap();
    let ended = keeper.link.event()["childEnded"].clone();
    assert_eq!(
        (&ended["child"], &ended["exit"], &ended["note"]),
        (&json!(child), &json!({ "signal": 15 }), &json!("changed"))
    );
    assert_eq!(ended["lastWords"], "end");
    assert!(!Path::new(&format!("/proc/{}", process.pid)).exists(), "no zombie either");

    // More output than anybody reads: it never blocks, the end of it is kept.
    let (loud, _) = keeper.sh("head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last; exit 7");
    let ended = keeper.link.event()["childEnded"].clone();
    assert_eq!((&ended["child"], &ended["exit"]), (&json!(loud), &json!({ "code": 7 })));
    let output = keeper.output(loud);
    assert_eq!(output["stdoutTotal"], 5_000_006);
    let text = output["stdout"].as_str().unwrap();
    assert!(text.len() <= 65536 && text.ends_with("x\nlast\n"));

    // A leader's end takes its group with it; one that ignores SIGTERM is killed.
    let (_, _) = keeper.sh("exit 0");
    keeper.link.event();
    let (left, _) = keeper.sh("sleep 300 & echo $!");
    keeper.link.event();
    let grandchild = Identity::of(keeper.line(left).parse().unwrap());
    assert!(gone(&grandchild.into_iter().collect::<Vec<_>>()) < GONE);
    let (deaf, _) = keeper.sh("trap '' TERM; echo ready; while :; do sleep 1; done");
    keeper.line(deaf);
    keeper
        .link
        .ask(json!({ "verb": "signal", "child": deaf, "signal": "term", "killAfterMs": 100 }))
        .unwrap();
    assert_eq!(keeper.link.event()["childEnded"]["exit"], json!({ "signal": 9 }));

    // Bounds: so many at a time, so many remembered.
    let running: Vec<_> = (0..8).map(|_| keeper.sh("sleep 300").1).collect();
    let spawn = json!({ "verb": "spawn", "purpose": "one more", "program": "/bin/sh", "args": [] });
    assert!(keeper.link.ask(spawn).unwrap_err().contains("8 children run already"));
    for _ in 0..2 {
        assert_eq!(
            keeper.link.ask(json!({ "verb": "status" })).unwrap()["children"].as_array().unwrap().len(),
            13
        );
    }
    // They die with a keeper that is killed.
    keeper.child.kill().unwrap();
    keeper.child.wait().unwrap();
    assert!(gone(&running) < GONE);
}

#[test]
fn what_cannot_be_started_is_said() {
    let mut keeper = Keeper::start(&[]);
    let mut spawn = |program: &str, note: &str| {
        keeper
            .link
            .ask(json!({ "verb": "spawn", "purpose": "x", "program": program, "note": note }))
            .unwrap_err()
    };
    assert!(spawn("/no/such/program", "").contains("cannot start /no/such/program"));
    assert!(spawn("sh", "").contains("not an absolute path"));
    assert!(spawn("/bin/sh", &"x".repeat(9000)).contains("note is longer"));
    for verb in ["signal", "note", "output"] {
        let request = json!({ "verb": verb, "child": 7, "signal": "term", "note": "", "maxBytes": 1 });
        assert!(keeper.link.ask(request).unwrap_err().contains("no child 7"));
    }
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_never() {
    let first = Keeper::start(&[]);
    let host = Identity::of(first.host.id()).unwrap();
    // A second one for the same host gives up.
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let mut second = Keeper::command(&first.instance, host, theirs).spawn().unwrap();
    assert_eq!(eventually("its end", || second.try_wait().unwrap()).code(), Some(1));
    Link::visit(&first.socket());
    // Killed, it leaves its socket behind (until any other keeper sweeps); the next one takes the name.
    let (socket, instance) = (first.socket(), first.instance.clone());
    let mut first = first;
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut third = Keeper::command(&instance, host, theirs).spawn().unwrap();
    Link::over(ours).ask(json!({ "verb": "hello", "protocol": 1 })).unwrap();
    let mut visitor = Link::visit(&socket);
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&socket).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    // Whoever belongs to this user may end it.
    visitor.ask(json!({ "verb": "end" })).unwrap();
    assert_eq!(eventually("its end", || third.try_wait().unwrap()).code(), Some(0));
    assert!(!socket.exists());
}

#[test]
fn garbage_on_the_private_socket_is_only_garbage() {
    let mut keeper = Keeper::start(&[]);
    let port = keeper.adopt();
    let mut rude = Link::over(UnixStream::connect(keeper.socket()).unwrap());
    assert!(rude.ask(json!({ "verb": "end" })).unwrap_err().contains("hello"), "not before hello");
    let mut rude = Link::visit(&keeper.socket());
    for line in
        [&b"\n"[..], b"{\n", b"[]\n", b"{\"verb\":\"explode\"}\n", b"\xff\xfe\n", b"{\"verb\":\"spawn\"}\n"]
    {
        wire::send(&rude.stream, line, None).unwrap();
        assert!(rude.message()["error"].as_str().unwrap().contains("not a request"));
    }
    // Descriptors nobody asked for, and one that is no listening socket.
    let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let before = descriptors(keeper.child.id()).len();
    for _ in 0..50 {
        rude.ask_with(json!({ "verb": "status" }), Some(null())).unwrap();
    }
    assert_eq!(descriptors(keeper.child.id()).len(), before);
    assert!(rude.ask(json!({ "verb": "adopt" })).unwrap_err().contains("no socket"));
    let connected = UnixStream::pair().unwrap().0.into();
    assert!(
        rude.ask_with(json!({ "verb": "adopt" }), Some(connected))
            .unwrap_err()
            .contains("no listening socket")
    );
    assert!(
        rude.ask_with(json!({ "verb": "adopt" }), Some(null())).unwrap_err().contains("no listening socket")
    );
    // A line without end.
    let mut endless = UnixStream::connect(keeper.socket()).unwrap();
    endless.set_write_timeout(Some(SOON)).unwrap();
    assert!((0..64).any(|_| endless.write_all(&[b'x'; 64 << 10]).is_err()));
    // A crowd that says nothing never takes the sidecar's place.
    let crowd: Vec<_> = (0..50).map(|_| UnixStream::connect(keeper.socket()).unwrap()).collect();
    let status = keeper.link.ask(json!({ "verb": "status" })).unwrap();
    assert_eq!(status["address"], format!("127.0.0.1:{port}"));
    assert!(rude.is_closed(), "visitors make room");
    drop(crowd);
    assert_eq!(keeper.link.ask(json!({ "verb": "close" })).unwrap(), Value::Null);
    assert!(!is_open(port));
}
