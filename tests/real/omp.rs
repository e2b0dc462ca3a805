//! One omp in rpc mode with the installed shim, in a home directory of its own and an environment that
//! holds nothing else. Its stdin is held open, its stdout is collected line by line.
//!
//! Dropping it kills everything that names its home and fails the test when something outlived the
//! host for longer than the contract allows.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{self, http};
use crate::{parts, processes};

/// omp needs about two seconds of a core to start; the machine may be busy with others.
const START: Duration = Duration::from_secs(90);
/// For everything that should happen at once.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// omp starts only when some model is configured; nothing ever asks this one. Images come as images
/// because the model says it can see.
const MODELS: &str = "\
providers:
  a2mcp:
    baseUrl: http://a2mcp.invalid/v1
    api: anthropic-messages
    apiKey: not-a-real-key
    models:
      - id: offline
        name: unreachable
        contextWindow: 100000
        input: [text, image]
";

/// A home directory with what omp needs in it, but no omp yet.
pub(crate) struct Home {
    directory: TempDir,
}

impl Home {
    /// With the shim that `a2mcp install omp` writes.
    pub(crate) fn with_shim() -> Self {
        let home = Self::bare();
        let installed = home.a2mcp(&["install", "omp", "--force"]);
        assert!(installed.status.success(), "the shim was not installed: {installed:?}");
        home
    }

    pub(crate) fn bare() -> Self {
        let home = Self { directory: tempfile::Builder::new().prefix("a2mcp-real-").tempdir().unwrap() };
        std::fs::create_dir_all(home.agent_dir()).unwrap();
        std::fs::create_dir(home.work()).unwrap();
        home.models(MODELS);
        home
    }

    pub(crate) fn models(&self, yaml: &str) {
        std::fs::write(self.agent("models.yml"), yaml).unwrap();
    }

    /// The bridge's config, before it starts.
    pub(crate) fn config(self, config: &Value) -> Self {
        std::fs::write(self.agent("a2mcp.json"), config.to_string()).unwrap();
        self
    }

    /// Starts this shell script, with the arguments of a sidecar, where the sidecar was.
    pub(crate) fn point_at_script(&self, body: &str) {
        let script = self.path().join("sidecar.sh");
        std::fs::write(&script, format!("#!/bin/sh\n{body}\n")).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        let marker = json!({"binary": script, "version": "0"});
        std::fs::write(self.agent("extensions/a2mcp/binary.json"), marker.to_string()).unwrap();
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn agent_dir(&self) -> PathBuf {
        self.path().join(".omp/agent")
    }

    /// A file of the agent directory.
    pub(crate) fn agent(&self, name: &str) -> PathBuf {
        self.agent_dir().join(name)
    }

    /// Where omp works.
    pub(crate) fn work(&self) -> PathBuf {
        self.path().join("work")
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.agent(name)).unwrap_or_default()
    }

    pub(crate) fn token(&self) -> String {
        let config: Value = serde_json::from_str(&self.read("a2mcp.json")).unwrap_or_default();
        config["token"].as_str().unwrap_or_default().to_owned()
    }

    /// The audit records, oldest first.
    pub(crate) fn audit(&self) -> Vec<Value> {
        support::audit_records(&self.agent("a2mcp.log"))
    }

    /// Every audit record of a call has its second one: nobody was left in doubt.
    pub(crate) fn assert_every_call_has_its_end(&self) {
        let records = self.audit();
        let of = |phase: &str| -> Vec<String> {
            let records = records.iter().filter(|record| record["phase"] == phase);
            records.filter_map(|record| record["id"].as_str().map(str::to_owned)).collect()
        };
        let done = of("done");
        for start in of("start") {
            let ends = done.iter().filter(|id| **id == start).count();
            assert_eq!(ends, 1, "call {start} has {ends} ends: {records:#?}");
        }
    }

    /// A program in this home's environment: nothing of the test's own leaks into it.
    pub(crate) fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command
            .current_dir(self.work())
            .env_clear()
            .env("PATH", parts::path_variable())
            .env("HOME", self.path())
            .env("LANG", "C.UTF-8")
            .env("TERM", "dumb")
            .stdin(Stdio::null());
        command
    }

    /// `a2mcp ARGS --agent-dir …` to its end.
    pub(crate) fn a2mcp(&self, args: &[&str]) -> Output {
        let mut command = self.command(support::binary());
        command.args(args).arg("--agent-dir").arg(self.agent_dir());
        run(command, Vec::new())
    }

    pub(crate) fn sidecars(&self) -> Vec<u32> {
        let seen = processes::of(self.path()).into_iter();
        seen.filter(processes::Seen::is_sidecar).map(|seen| seen.pid).collect()
    }

    /// What is written to help whoever reads a failed test.
    fn logs(&self) -> String {
        let mut logs = String::new();
        let files = std::fs::read_dir(self.agent_dir()).into_iter().flatten().flatten();
        for file in
            files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|it| it == "stderr"))
        {
            logs +=
                &format!("\n--- {}\n{}", file.display(), std::fs::read_to_string(&file).unwrap_or_default());
        }
        logs += &format!(
            "\n--- omp\n{}",
            std::fs::read_to_string(self.path().join("omp.stderr")).unwrap_or_default()
        );
        logs
    }
}

/// Runs a command to its end, which must come within a minute.
pub(crate) fn run(mut command: Command, stdin: Vec<u8>) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let name = format!("{:?}", command.get_program());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{name} cannot be started: {error}"));
    let pid = child.id();
    let mut input = child.stdin.take().unwrap();
    let feeder = std::thread::spawn(move || {
        // A program that does not read to the end says so by its output.
        let _ = input.write_all(&stdin);
    });
    let (done, waited) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(child.wait_with_output()));
    let output = waited.recv_timeout(Duration::from_secs(60)).unwrap_or_else(|_| {
        processes::kill(pid, Signal::KILL);
        panic!("{name} did not end within a minute")
    });
    feeder.join().unwrap();
    output.unwrap()
}

/// The omp that tests share which only look: one start for all of them. It ends with the test binary,
/// whose death closes its stdin; a watcher then removes its home.
pub(crate) fn shared() -> &'static Omp {
    static SHARED: OnceLock<Omp> = OnceLock::new();
    SHARED.get_or_init(|| {
        let omp = Omp::start();
        let mut watcher = Command::new("/bin/sh");
        watcher
            .args(["-c", r#"cat; while kill -0 "$1" 2>/dev/null; do sleep 0.1; done; rm -rf "$2""#, "sh"])
            .arg(omp.pid().to_string())
            .arg(omp.home.path())
            .stdin(Stdio::piped())
            .process_group(0);
        // Its stdin ends when this process does, however that happens.
        std::mem::forget(watcher.spawn().expect("sh can be started"));
        omp
    })
}

/// How to start an omp.
pub(crate) struct Start {
    home: Arc<Home>,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Start {
    pub(crate) fn arguments(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|&argument| argument.to_owned()));
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts and waits for the session; the bridge may or may not come.
    pub(crate) fn spawn(self) -> Omp {
        let home = self.home;
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let socket = home.path().join(format!("probe-{number}"));
        let log = std::fs::OpenOptions::new().create(true).append(true).open(home.path().join("omp.stderr"));
        let mut command = home.command(parts::installed("omp/node_modules/.bin/omp"));
        command.args(["--mode", "rpc"]).args(&self.arguments).envs(self.environment);
        command.arg("-e").arg(parts::root().join("tests/real/probe.ts")).env("A2MCP_PROBE", &socket);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log.unwrap()).process_group(0);
        let mut child = command.spawn().expect("omp can be started");
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().unwrap();
        let output = Arc::new(Lines::default());
        let lines = output.clone();
        std::thread::spawn(move || lines.collect(stdout));
        let omp = Omp { child: Mutex::new(child), stdin: Mutex::new(stdin), output, socket, home, port: 0 };
        omp.output
            .wait(START, |line| line["type"] == "ready")
            .unwrap_or_else(|| omp.fail("omp did not start"));
        let end = Instant::now() + START;
        while UnixStream::connect(&omp.socket).is_err() {
            if Instant::now() > end {
                omp.fail("the session did not start");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        omp
    }

    /// Starts and waits until the bridge is announced.
    pub(crate) fn bridged(self) -> Omp {
        let mut omp = self.spawn();
        omp.until_announced();
        omp
    }
}

/// A running omp.
pub(crate) struct Omp {
    child: Mutex<Child>,
    stdin: Mutex<Option<ChildStdin>>,
    output: Arc<Lines>,
    socket: PathBuf,
    pub(crate) home: Arc<Home>,
    /// Of the bridge; 0 before it was announced.
    pub(crate) port: u16,
}

impl Omp {
    /// With the probe, in a home of its own.
    pub(crate) fn start() -> Self {
        Self::setup(Home::with_shim()).bridged()
    }

    pub(crate) fn setup(home: impl Into<Arc<Home>>) -> Start {
        Start { home: home.into(), arguments: Vec::new(), environment: Vec::new() }
    }

    /// Waits for the notice that names the URL.
    pub(crate) fn until_announced(&mut self) {
        let announced = self.notice("this session's tools are served at");
        let url = announced.split_whitespace().find(|word| word.starts_with("http://")).unwrap();
        self.port = url.trim_start_matches("http://").split([':', '/']).nth(1).unwrap().parse().unwrap();
        // What it says is what the directory remembers of the host that came last.
        assert!(announced.contains(&self.home.token()[..6]), "{announced}");
        assert!(!announced.contains(&self.home.token()), "the notice shows the token");
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.lock().unwrap().id()
    }

    pub(crate) fn client(&self) -> http::Client {
        http::Client::initialize(self.port, &self.home.token())
    }

    /// One command of omp's rpc protocol; its response.
    pub(crate) fn rpc(&self, command: &Value) -> Value {
        let id = format!("t{}", self.output.count());
        let mut command = command.clone();
        command["id"] = json!(id);
        self.send(&command);
        let response = self.output.wait(SOON, |line| line["type"] == "response" && line["id"] == id.as_str());
        response.unwrap_or_else(|| self.fail(&format!("omp did not answer {command}")))
    }

    pub(crate) fn send(&self, line: &Value) {
        let mut stdin = self.stdin.lock().unwrap();
        writeln!(stdin.as_mut().expect("stdin is open"), "{line}").unwrap();
    }

    /// What the operator types; the first notice after it.
    pub(crate) fn types(&self, text: &str) -> (String, String) {
        let from = self.output.count();
        self.send(&json!({"type": "prompt", "id": format!("p{from}"), "message": text}));
        let notice = self.output.wait_from(from, SOON, is_notice);
        let (_, notice) = notice.unwrap_or_else(|| self.fail(&format!("nothing was said to {text:?}")));
        (field(&notice, "notifyType"), field(&notice, "message"))
    }

    /// The first notice, of all that came or will come, that contains `part`.
    pub(crate) fn notice(&self, part: &str) -> String {
        let found = self.output.wait(START, |line| is_notice(line) && field(line, "message").contains(part));
        field(&found.unwrap_or_else(|| self.fail(&format!("no notice says {part:?}"))), "message")
    }

    /// What the bridge told so far.
    pub(crate) fn notices(&self) -> Vec<String> {
        let seen = self.output.seen.lock().unwrap();
        seen.iter().filter(|line| is_notice(line)).map(|line| field(line, "message")).collect()
    }

    /// The first line of omp's stdout, of all that came or will come, for which `wanted` holds.
    pub(crate) fn line(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        self.output.wait(SOON, wanted).unwrap_or_else(|| self.fail(what))
    }

    /// All lines of its stdout so far.
    pub(crate) fn lines(&self) -> Vec<Value> {
        self.output.seen.lock().unwrap().clone()
    }

    /// Where the next line of omp's stdout will stand.
    pub(crate) fn position(&self) -> usize {
        self.output.count()
    }

    /// The first such line at or after a [`Omp::position`].
    pub(crate) fn line_from(&self, from: usize, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        self.output.wait_from(from, SOON, wanted).unwrap_or_else(|| self.fail(what)).1
    }

    /// The `n`th such line, counted from 1.
    pub(crate) fn nth_line(&self, what: &str, n: usize, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut from = 0;
        for round in 1.. {
            let found = self.output.wait_from(from, SOON, &wanted).unwrap_or_else(|| self.fail(what));
            if round == n {
                return found.1;
            }
            from = found.0 + 1;
        }
        unreachable!("the loop has no end")
    }

    /// Asks the probe.
    pub(crate) fn probe(&self, order: &Value) -> Value {
        let mut connection = UnixStream::connect(&self.socket).expect("the probe listens");
        connection.set_read_timeout(Some(2 * SOON)).unwrap();
        writeln!(connection, "{order}").unwrap();
        let mut line = String::new();
        BufReader::new(connection).read_line(&mut line).unwrap();
        let answer: Value =
            serde_json::from_str(&line).unwrap_or_else(|_| panic!("no answer of the probe: {line:?}"));
        assert!(answer["error"].is_null(), "the probe failed at {order}: {answer}");
        answer["ok"].clone()
    }

    /// The host is alive and answers its own protocol.
    pub(crate) fn assert_alive(&self) {
        assert_eq!(self.rpc(&json!({"type": "get_state"}))["success"], true);
    }

    pub(crate) fn close_stdin(&self) {
        self.stdin.lock().unwrap().take();
    }

    pub(crate) fn kill(&self, signal: Signal) {
        processes::kill(self.pid(), signal);
    }

    pub(crate) fn wait(&self) -> ExitStatus {
        support::eventually("omp's end", || self.child.lock().unwrap().try_wait().unwrap())
    }

    /// The one sidecar of this home.
    pub(crate) fn sidecar(&self) -> u32 {
        let sidecars = self.home.sidecars();
        assert_eq!(sidecars.len(), 1, "{sidecars:?}");
        sidecars[0]
    }

    /// Waits for the next sidecar after `before`, until it serves. Nobody is refused meanwhile.
    pub(crate) fn next_sidecar(&self, before: u32) -> u32 {
        let is_ready = || {
            let mut connection = http::Connection::open(self.port);
            connection.send("GET", "/readyz", &[], b"")?;
            connection.read().map(|reply| reply.status == 200)
        };
        support::eventually("the next sidecar", || {
            let now = self.home.sidecars();
            let is_next = now.len() == 1 && now[0] != before;
            (is_next && is_ready().unwrap_or(false)).then(|| now[0])
        })
    }

    pub(crate) fn status(&self) -> Value {
        let output = self.home.a2mcp(&["status", "--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
    }

    /// omp has ended (how long that takes is its own affair), and everything of this home is gone in
    /// time after it.
    pub(crate) fn assert_all_gone(&self) {
        support::eventually("omp's end", || self.child.lock().unwrap().try_wait().unwrap());
        if let Err(left) = processes::until_gone(self.home.path()) {
            panic!("still there {:?} after the host's end: {left:#?}{}", processes::GONE, self.home.logs());
        }
    }

    fn fail(&self, what: &str) -> ! {
        let status = self.child.lock().unwrap().try_wait();
        panic!("{what} (omp: {status:?}; notices: {:#?}){}", self.notices(), self.home.logs())
    }
}

impl Drop for Omp {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap();
        let _ = child.kill();
        let _ = child.wait();
        let stray: Vec<_> =
            self.output.seen.lock().unwrap().iter().filter(|line| line.is_string()).cloned().collect();
        if !std::thread::panicking() {
            assert!(stray.is_empty(), "something wrote into omp's protocol: {stray:#?}");
        }
        // Others may run in the same home: theirs are not ours to judge.
        if Arc::strong_count(&self.home) > 1 {
            return;
        }
        if let Err(left) = processes::until_gone(self.home.path()) {
            processes::end(&left);
            if !std::thread::panicking() {
                panic!("outlived its host for {:?}: {left:#?}", processes::GONE);
            }
        }
    }
}

/// The JSON lines of a process's stdout, in order.
#[derive(Default)]
struct Lines {
    seen: Mutex<Vec<Value>>,
    changed: Condvar,
}

impl Lines {
    fn collect(&self, stdout: impl std::io::Read) {
        for line in BufReader::new(stdout).lines() {
            let Ok(line) = line else { break };
            // Whatever is no JSON corrupted the protocol: kept as a string, found by the tests.
            let value = serde_json::from_str(&line).unwrap_or(Value::String(line));
            self.seen.lock().unwrap().push(value);
            self.changed.notify_all();
        }
    }

    fn count(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    fn wait(&self, limit: Duration, wanted: impl Fn(&Value) -> bool) -> Option<Value> {
        Some(self.wait_from(0, limit, wanted)?.1)
    }

    /// With its index.
    fn wait_from(
        &self,
        from: usize,
        limit: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> Option<(usize, Value)> {
        let end = Instant::now() + limit;
        let mut seen = self.seen.lock().unwrap();
        let mut next = from;
        loop {
            if let Some(found) = (next..seen.len()).find(|&index| wanted(&seen[index])) {
                return Some((found, seen[found].clone()));
            }
            next = seen.len();
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            seen = self.changed.wait_timeout(seen, left).unwrap().0;
        }
    }
}

fn is_notice(line: &Value) -> bool {
    line["type"] == "extension_ui_request" && line["method"] == "notify"
}

fn field(line: &Value, name: &str) -> String {
    line[name].as_str().unwrap_or_default().to_owned()
}
