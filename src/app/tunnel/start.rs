//! How cloudflared is found and started, and what a later sidecar is told of it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::PURPOSE;
use super::failure::{Failure, words};
use super::machine::{Child, Up};
use crate::app::{Core, now_ms};
use crate::config::AgentDir;
use crate::install::{InstallError, Installed, Progress, Tool};
use crate::keeper::client::KeeperError;
use crate::keeper::wire::{Note, Spawn};
use crate::text::with_causes;

/// The config it reads instead of whatever lies in the home directory. Not empty: that is complained of.
const CONFIG: &str = "{}\n";

/// A cloudflared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Program {
    /// Absolute.
    pub(super) path: PathBuf,
    /// Lower-case hex.
    pub(super) sha256: String,
    /// What it says its version is.
    pub(super) version: Option<String>,
}

impl Program {
    /// It is not there any more.
    pub(super) fn vanished(&self) -> Failure {
        Failure::Vanished { path: words(&self.path.to_string_lossy()), sha256: self.sha256.clone() }
    }
}

/// Whether there is no such file.
pub(super) fn is_gone(path: &Path) -> bool {
    std::fs::metadata(path).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}

/// Finds cloudflared, or fetches it; `told` hears how far that is.
pub(super) async fn obtain(core: &Core, told: impl AsyncFn(String)) -> Result<Program, Failure> {
    let found = core.obtain(Tool::Cloudflared, async |progress| told(step(progress)).await).await;
    match found {
        Ok(Installed { version, path, sha256, .. }) => Ok(Program { path, sha256, version }),
        Err(InstallError::Vanished { path, sha256, .. }) => {
            Err(Failure::Vanished { path: words(&path.to_string_lossy()), sha256 })
        }
        Err(error) => Err(Failure::NoProgram(error.to_string())),
    }
}

fn step(progress: &Progress) -> String {
    match progress {
        Progress::Waiting => "cloudflared is being installed already; waiting for it".into(),
        Progress::Installing { asset, version, .. } => format!("fetching cloudflared {version} ({asset})"),
        Progress::Received { bytes, total } => {
            format!("fetching cloudflared: {:.1} of {:.1} MB", *bytes as f64 / 1e6, *total as f64 / 1e6)
        }
        Progress::Unpacking => "unpacking cloudflared".into(),
    }
}

/// Has the keeper start it in front of the endpoint, without the flags it does not know.
pub(super) async fn spawn(
    core: &Core,
    program: &Program,
    dropped: &BTreeSet<String>,
) -> Result<Child, Failure> {
    let config = config_file(&core.dir).map_err(|error| {
        Failure::NotStarted(format!("cannot write {}: {error}", core.dir.state_dir().display()))
    })?;
    let origin = core.url();
    let wanted = Spawn {
        purpose: PURPOSE.into(),
        program: program.path.to_string_lossy().into_owned(),
        args: arguments(&config.to_string_lossy(), origin.trim_end_matches('/'), dropped),
        dir: None,
        remove_env: Tool::Cloudflared.scrubbed_env().iter().map(|name| (*name).to_owned()).collect(),
        // As a flag it exists since 2026.5.0 only; older builds ignore the variable.
        env: vec![("TUNNEL_NO_PRECHECKS".into(), "true".into())],
        note: Note::default(),
    };
    match core.keeping.spawn(wanted).await {
        Ok(child) => Ok(Child { number: child.child, process: child.process }),
        Err(_) if core.keeping.keeper().is_none() => Err(Failure::NoKeeper),
        Err(KeeperError::Refused(_)) if is_gone(&program.path) => Err(program.vanished()),
        Err(KeeperError::Refused(why)) => Err(Failure::NotStarted(words(&why))),
        Err(error) => Err(Failure::NotStarted(words(&with_causes(&error)))),
    }
}

/// Every argument has its reason in children.md 1; none is a secret.
fn arguments(config: &str, origin: &str, dropped: &BTreeSet<String>) -> Vec<String> {
    let flags = [
        ("config", Some(config)),
        ("no-autoupdate", None),
        ("metrics", Some("127.0.0.1:0")),
        // Without it the protocol is QUIC for good, and a network that blocks UDP never connects.
        ("protocol", Some("auto")),
        // The defaults fall back after two minutes, and come back after minutes from a drop.
        ("retries", Some("1")),
        ("max-edge-addr-retries", Some("1")),
        ("grace-period", Some("1s")),
        ("output", Some("json")),
        // The name is in a line of that level.
        ("loglevel", Some("info")),
        ("url", Some(origin)),
    ];
    let kept = flags.into_iter().filter(|(name, _)| !dropped.contains(*name));
    let mut arguments = vec!["tunnel".to_owned()];
    arguments.extend(
        kept.flat_map(|(name, value)| [Some(format!("--{name}")), value.map(str::to_owned)]).flatten(),
    );
    if !dropped.contains("management-diagnostics") {
        // A boolean takes its value only so.
        arguments.push("--management-diagnostics=false".into());
    }
    arguments
}

fn config_file(dir: &AgentDir) -> std::io::Result<PathBuf> {
    let folder = dir.state_dir();
    crate::config::create_private_dir(&folder)?;
    let file = folder.join("cloudflared.yml");
    if std::fs::read(&file).is_ok_and(|content| content == CONFIG.as_bytes()) {
        return Ok(file);
    }
    // Another sidecar of this directory may be reading it.
    let mut fresh = tempfile::Builder::new().prefix(".a2mcp-").tempfile_in(&folder)?;
    std::io::Write::write_all(&mut fresh, CONFIG.as_bytes())?;
    fresh.persist(&file).map_err(|error| error.error)?;
    Ok(file)
}

/// What the keeper's note of the child holds. Unknown fields are left out, absent ones mean little.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Memory {
    /// The tunnel's host name.
    pub(super) name: Option<String>,
    /// Its metrics port.
    pub(super) metrics: Option<u16>,
    /// What it speaks with the edge.
    pub(super) protocol: Option<String>,
    /// UDP is blocked.
    pub(super) fell_back: bool,
    /// Since when it is open, in milliseconds since the epoch.
    pub(super) open_since_ms: Option<u64>,
    /// A probe came through at some time.
    pub(super) was_verified: bool,
    /// Flags it was started without.
    pub(super) dropped: BTreeSet<String>,
    /// What it is.
    pub(super) program: Option<Program>,
}

impl Memory {
    /// Of a process that runs.
    pub(super) fn of(up: &Up, program: &Program, dropped: &BTreeSet<String>) -> Self {
        Self {
            name: up.name.clone(),
            metrics: up.metrics,
            protocol: up.protocol.clone(),
            fell_back: up.fell_back,
            // To the second, so that the note changes only when something has.
            open_since_ms: up
                .open_since
                .map(|at| (now_ms() - at.elapsed().as_millis() as u64 + 500) / 1000 * 1000),
            was_verified: up.was_verified,
            dropped: dropped.clone(),
            program: Some(program.clone()),
        }
    }

    /// From a note; an unreadable one says nothing.
    pub(super) fn read(note: &str) -> Self {
        serde_json::from_str(note).unwrap_or_default()
    }

    /// As a note.
    pub(super) fn write(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_a_program_does_not_know_are_left_out() {
        let all = arguments("/c.yml", "http://127.0.0.1:7", &BTreeSet::new());
        assert_eq!(all[..3], ["tunnel", "--config", "/c.yml"]);
        assert!(all.windows(2).any(|two| two == ["--output", "json"]));
        let dropped = ["output", "management-diagnostics"].map(str::to_owned).into();
        let some = arguments("/c.yml", "http://127.0.0.1:7", &dropped);
        assert_eq!(some.len(), all.len() - 3, "{some:?}");
        assert!(!some.iter().any(|argument| argument.contains("output") || argument.contains("diagnostics")));
    }

    #[test]
    fn a_note_comes_back_and_a_foreign_one_says_nothing() {
        let memory = Memory { name: Some("a.example".into()), fell_back: true, ..Memory::default() };
        assert_eq!(Memory::read(&memory.write()), memory);
        assert_eq!(Memory::read("{\"name\":5}"), Memory::default());
        assert_eq!(Memory::read(""), Memory::default());
    }
}
