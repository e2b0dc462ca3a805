//! The stand-in for cloudflared (`tests/standins/cloudflared.py`) as a program a config can name: its
//! scenario, its starts, the names it serves.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

use super::{eventually, http};

/// One installed stand-in with a scenario of its own.
pub struct Standin {
    pub dir: tempfile::TempDir,
}

impl Standin {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/standins/cloudflared.py");
        let wrapper = format!(
            "#!/bin/sh\nSTANDIN_DIR='{}' exec '{}' -I -S '{}' \"$@\"\n",
            dir.path().display(),
            python(),
            script.display()
        );
        let standin = Self { dir };
        standin.install(&wrapper);
        standin
    }

    pub fn with(scenario: Value) -> Self {
        let standin = Self::new();
        standin.scenario(scenario);
        standin
    }

    /// Puts another program in its place.
    pub fn install(&self, wrapper: &str) {
        use std::os::unix::fs::PermissionsExt as _;
        // Written under another name first: a file that is open for writing cannot be run.
        let unfinished = self.dir.path().join("unfinished");
        std::fs::write(&unfinished, wrapper).unwrap();
        std::fs::set_permissions(&unfinished, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::rename(unfinished, self.program()).unwrap();
    }

    pub fn program(&self) -> PathBuf {
        self.dir.path().join("cloudflared")
    }

    /// Changes the weather, also while it runs.
    pub fn scenario(&self, scenario: Value) {
        let unfinished = self.dir.path().join("scenario.unfinished");
        std::fs::write(&unfinished, scenario.to_string()).unwrap();
        std::fs::rename(unfinished, self.dir.path().join("scenario.json")).unwrap();
    }

    /// Every start so far: `pid`, `argv`, `env`.
    pub fn starts(&self) -> Vec<Value> {
        let text = super::whole_lines(&self.dir.path().join("starts"));
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The names that are served now, and the public port of each. One that was killed leaves its file.
    pub fn names(&self) -> Vec<(String, u16)> {
        let entries = std::fs::read_dir(self.dir.path().join("names"));
        let files = entries.map(|entries| entries.flatten().map(|entry| entry.path()).collect::<Vec<_>>());
        let served = files.unwrap_or_default().into_iter().filter_map(|file| {
            let port = std::fs::read_to_string(&file).ok()?.parse().ok()?;
            std::net::TcpStream::connect(("127.0.0.1", port)).ok()?;
            Some((file.file_name()?.to_str()?.to_owned(), port))
        });
        served.filter(|(name, _)| !name.ends_with(".tmp")).collect()
    }

    /// The one name that is served, once there is one.
    pub fn name(&self) -> (String, u16) {
        eventually("a name that is served", || self.names().pop())
    }

    /// A connection to the public side.
    pub fn public(&self) -> http::Connection {
        http::Connection::open(self.name().1)
    }

    /// Runs it directly, without the product.
    pub fn command(&self) -> Command {
        let mut command = Command::new(self.program());
        command.env_clear().env("HOME", self.dir.path()).stdin(Stdio::null());
        command
    }
}

/// The interpreter itself: what is on PATH may be a slow shim.
fn python() -> &'static str {
    static PYTHON: OnceLock<String> = OnceLock::new();
    PYTHON.get_or_init(|| {
        let asked = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
        let output = asked.expect("the stand-in for cloudflared needs python3 on PATH");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    })
}
