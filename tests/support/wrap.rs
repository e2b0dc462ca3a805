//! `a2mcp wrap` as a process, in front of the scripted server beside this file (or another one).

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use a2mcp::process::Identity;
use serde_json::Value;

use super::http::Client;
use super::reference::{Program, a2mcp, identity, token};
use super::{SOON, cli, eventually, within};

/// The scripted server.
pub fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/stdio_server.py")
}

/// A running `a2mcp wrap`. Dropping it kills it.
pub struct Wrap {
    pub program: Program,
    pub dir: tempfile::TempDir,
    pub ready: Value,
}

impl Wrap {
    /// In front of the scripted server with these arguments, whose note is kept.
    pub fn start(args: &[&str]) -> Self {
        Self::start_with("{}", &[], args)
    }

    /// As [`Wrap::start`], with a config and arguments for `wrap` itself.
    pub fn start_with(config: &str, wrap_args: &[&str], args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("python3");
        command.arg(script()).arg("--note").arg(dir.path().join("note")).args(args);
        Self::start_command(dir, config, wrap_args, &command)
    }

    /// In front of any command.
    pub fn start_command(
        dir: tempfile::TempDir,
        config: &str,
        wrap_args: &[&str],
        command: &Command,
    ) -> Self {
        let mut wrap = wrapping(dir.path(), config, wrap_args);
        wrap.arg("--").arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            wrap.env(name, value.unwrap_or_else(|| OsStr::new("")));
        }
        Self::run(dir, &mut wrap)
    }

    pub fn run(dir: tempfile::TempDir, command: &mut Command) -> Self {
        let errors = std::fs::File::create(dir.path().join("wrap.stderr")).unwrap();
        Self::run_with(dir, command, errors.into())
    }

    /// With another stderr than a file.
    pub fn run_with(dir: tempfile::TempDir, command: &mut Command, errors: Stdio) -> Self {
        let mut program = Program::start_with(command, errors);
        let ready = within(SOON * 3, "the line of `wrap`", || {
            if let Some(status) = program.child.try_wait().unwrap() {
                let said = std::fs::read_to_string(dir.path().join("wrap.stderr")).unwrap_or_default();
                panic!("`wrap` ended with {status}: {said}");
            }
            program.lines.try_recv().ok()
        });
        assert!(ready["url"].is_string(), "{ready}");
        Self { program, dir, ready }
    }

    pub fn port(&self) -> u16 {
        let url = self.ready["url"].as_str().unwrap();
        url.trim_end_matches('/').rsplit(':').next().unwrap().parse().unwrap()
    }

    pub fn token(&self) -> String {
        token(self.dir.path())
    }

    pub fn session(&self) -> Client {
        Client::initialize(self.port(), &self.token())
    }

    /// The wrap host.
    pub fn host(&self) -> Identity {
        self.program.identity()
    }

    /// The sidecar that serves now.
    pub fn sidecar(&self) -> Identity {
        identity(&self.status()["pid"])
    }

    /// `a2mcp restart`, until the next sidecar answers.
    pub fn restart(&self) {
        let last = self.status()["pid"].clone();
        let (code, _, err) = cli(&["restart"], Some(self.dir.path()), &Default::default());
        assert_eq!(code, 0, "{err}");
        eventually("the next sidecar", || (self.status()["pid"] != last).then_some(()));
    }

    /// The guard of the server that runs now.
    pub fn guard(&self) -> Identity {
        eventually("a running server", || {
            let server = &self.server();
            (server["state"] == "running").then(|| identity(&server["pid"]))
        })
    }

    pub fn status(&self) -> Value {
        eventually("a status", || {
            let (code, out, _) = cli(&["status", "--json"], Some(self.dir.path()), &Default::default());
            (code == 0).then(|| serde_json::from_str(&out).unwrap())
        })
    }

    /// What the status says of the server.
    pub fn server(&self) -> Value {
        self.status()["host"]["server"].clone()
    }

    /// What the server noted of this kind of event, so far.
    pub fn noted(&self, event: &str) -> Vec<Value> {
        let text = super::whole_lines(&self.dir.path().join("note"));
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|line| line["event"] == event).collect()
    }

    /// Waits until it noted at least so many.
    pub fn until_noted(&self, event: &str, count: usize) -> Vec<Value> {
        eventually(&format!("{count} x {event}"), || {
            Some(self.noted(event)).filter(|noted| noted.len() >= count)
        })
    }

    /// The server's process.
    pub fn process(&self) -> Identity {
        identity(&self.noted("start").last().unwrap()["pid"])
    }

    /// What `wrap` said on stderr.
    pub fn stderr(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("wrap.stderr")).unwrap_or_default()
    }

    /// What the sidecars say.
    pub fn log(&self) -> String {
        let file = self.dir.path().join(format!("a2mcp.{}.stderr", self.port()));
        std::fs::read_to_string(file).unwrap_or_default()
    }

    pub fn audit(&self) -> Vec<Value> {
        super::audit_records(&self.dir.path().join("a2mcp.log"))
    }
}

/// The beginning of a command line, up to `--`.
pub fn wrapping(dir: &Path, config: &str, args: &[&str]) -> Command {
    std::fs::write(dir.join("a2mcp.json"), config).unwrap();
    let mut command = a2mcp(&["wrap", "--json", "--agent-dir"]);
    command.arg(dir).args(args);
    command
}
