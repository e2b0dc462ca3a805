//! The reference host as a process with a real sidecar, for tests that kill either: it supervises as a
//! shim must, and its execution log says what really ran.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Instant;

use a2mcp::process::Identity;
use rustix::process::Signal;
use serde_json::Value;

use super::http::Client;
use super::{SOON, binary, eventually};

/// A process that prints JSON lines. Dropping it kills it.
pub struct Program {
    pub child: Child,
    pub stdin: Option<ChildStdin>,
    pub lines: mpsc::Receiver<Value>,
}

impl Program {
    pub fn start(command: &mut Command) -> Self {
        Self::start_with(command, Stdio::null())
    }

    pub fn start_with(command: &mut Command, stderr: Stdio) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (to, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let value = serde_json::from_str(&line).unwrap_or(Value::String(line));
                if to.send(value).is_err() {
                    return;
                }
            }
        });
        Self { stdin: child.stdin.take(), child, lines }
    }

    pub fn identity(&self) -> Identity {
        Identity::of(self.child.id()).expect("the program runs")
    }

    /// The next line for which `wanted` holds.
    pub fn line(&self, wanted: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + SOON;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).expect("the line comes");
            if wanted(&line) {
                return line;
            }
        }
    }

    pub fn event(&self, name: &str) -> Value {
        self.line(|line| line["event"] == name)
    }

    pub fn send(&mut self, line: &Value) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    pub fn end(&mut self) -> ExitStatus {
        eventually("the end of the program", || self.child.try_wait().unwrap())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn a2mcp(args: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.args(args).env_remove("A2MCP_CONFIG").env_remove("A2MCP_AUDIT");
    command
}

/// A reference host whose sidecar serves.
pub struct Host {
    pub program: Program,
    pub dir: tempfile::TempDir,
    pub ready: Value,
}

impl Host {
    pub fn start(args: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), args)
    }

    /// In a directory that holds something already: a config, a script.
    pub fn start_in(dir: tempfile::TempDir, args: &[&str]) -> Self {
        let mut command = a2mcp(&["reference-host", "--agent-dir"]);
        command.arg(dir.path()).arg("--execution-log").arg(dir.path().join("executions")).args(args);
        let program = Program::start(&mut command);
        let ready = program.event("ready");
        Self { program, dir, ready }
    }

    /// Its first sidecar dies at a crash point of its first call; the ones after it do not.
    pub fn crashing_at(point: &str, config: &str) -> Self {
        if !cfg!(debug_assertions) {
            panic!("a release build has no crash points: run this test without --release");
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a2mcp.json"), config).unwrap();
        let script = dir.path().join("sidecar.sh");
        let text = format!(
            "#!/bin/sh\nif [ ! -e \"$3/crashed\" ]; then : > \"$3/crashed\"; export A2MCP_CRASH_AT={point}:1; fi\nexec '{}' \"$@\"\n",
            binary().display()
        );
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).unwrap();
        let script = script.to_str().unwrap().to_owned();
        Self::start_in(dir, &["--sidecar", &script])
    }

    /// Waits for the sidecar after the current one, which becomes the current one.
    pub fn next_sidecar(&mut self) {
        self.ready = self.program.event("ready");
    }

    /// Kills the sidecar and waits for the next one.
    pub fn kill_sidecar(&mut self) {
        self.sidecar().signal(Signal::KILL);
        self.next_sidecar();
    }

    /// What the sidecar says of itself.
    pub fn status(&self) -> Value {
        let (code, out, err) = super::cli(&["status", "--json"], Some(self.dir.path()), &HashMap::new());
        assert_eq!(code, 0, "{err}");
        serde_json::from_str(&out).unwrap()
    }

    /// What the sidecar's own status says of calls in flight.
    pub fn calls_in_flight(&self) -> Value {
        self.status()["calls"].clone()
    }

    pub fn audit(&self) -> Vec<Value> {
        super::audit_records(&self.dir.path().join("a2mcp.log"))
    }

    /// The executions' records.
    pub fn execution_log(&self) -> Vec<Value> {
        let log = super::whole_lines(&self.dir.path().join("executions"));
        log.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The call ids of what ran, in the order of their start; each ran to its end.
    pub fn executed(&self) -> Vec<String> {
        let of = |event: &str| -> Vec<String> {
            let log = self.execution_log().into_iter().filter(|line| line["event"] == event);
            log.map(|line| line["callId"].as_str().unwrap().to_owned()).collect()
        };
        let (started, mut ended) = (of("start"), of("done"));
        let mut sorted = started.clone();
        sorted.sort_unstable();
        ended.sort_unstable();
        assert_eq!(sorted, ended, "what began has not ended");
        started
    }

    pub fn port(&self) -> u16 {
        u16::try_from(self.ready["port"].as_u64().unwrap()).unwrap()
    }

    pub fn sidecar(&self) -> Identity {
        identity(&self.ready["pid"])
    }

    pub fn session(&self) -> Client {
        Client::initialize(self.port(), &token(self.dir.path()))
    }

    /// Event and tool of each record.
    pub fn executions(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        self.execution_log().iter().map(|line| (text(&line["event"]), text(&line["tool"]))).collect()
    }
}

pub fn token(dir: &Path) -> String {
    let config: Value = serde_json::from_slice(&std::fs::read(dir.join("a2mcp.json")).unwrap()).unwrap();
    config["token"].as_str().unwrap().to_owned()
}

pub fn identity(pid: &Value) -> Identity {
    Identity::of(u32::try_from(pid.as_u64().unwrap()).unwrap()).expect("the process runs")
}
