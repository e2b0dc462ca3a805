//! Starting a sidecar and owning its process. [`Sidecar`] is what the shim drives; tests give it
//! pipes of memory instead of a process.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

use super::tools::Pending;

/// The start log is begun anew when it is longer than this.
const MAX_START_LOG: u64 = 256 << 10;
/// So much of its end is looked at for a reason.
const LAST_WORDS: u64 = 4096;

/// A running sidecar: its frames and its process.
pub struct Sidecar {
    /// Where frames to it go.
    pub input: Box<dyn AsyncWrite + Unpin>,
    /// Where its frames come from.
    pub output: Box<dyn AsyncRead + Unpin>,
    /// Completes when the process has ended and is reaped.
    pub exited: Pending<Exit>,
    /// Kills the process at once, as long as `exited` is polled.
    pub kill: CancellationToken,
    /// The last line it wrote to stderr, for people.
    pub last_words: Box<dyn Fn() -> Option<String>>,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(i32),
    /// Nobody knows.
    Unknown,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
            Self::Unknown => f.write_str("an unknown end"),
        }
    }
}

impl From<ExitStatus> for Exit {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Unknown,
        }
    }
}

/// Starts sidecars.
pub trait Launch {
    /// Starts one.
    ///
    /// # Errors
    /// As spawning a process.
    fn launch(&mut self) -> io::Result<Sidecar>;
}

/// Starts `PROGRAM sidecar --agent-dir DIR`, its stderr appended to `DIR/a2mcp.start.stderr`.
#[derive(Debug)]
pub struct LaunchProgram {
    /// The binary.
    pub program: PathBuf,
    /// The agent directory.
    pub agent_dir: PathBuf,
}

impl Launch for LaunchProgram {
    fn launch(&mut self) -> io::Result<Sidecar> {
        let (log, begin) = start_log(&self.agent_dir)?;
        let mut command = Command::new(&self.program);
        command.arg("sidecar").arg("--agent-dir").arg(&self.agent_dir);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log.try_clone()?);
        // The sidecar follows its host by itself; this is for an unwinding panic of ours.
        let mut child = command.kill_on_drop(true).spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("the child has no pipes"));
        };
        let kill = CancellationToken::new();
        Ok(Sidecar {
            input: Box::new(input),
            output: Box::new(output),
            exited: Box::pin(exited(child, kill.clone())),
            kill,
            last_words: Box::new(move || last_words(&log, begin)),
        })
    }
}

async fn exited(mut child: Child, kill: CancellationToken) -> Exit {
    let status = tokio::select! {
        status = child.wait() => status,
        () = kill.cancelled() => {
            let _ = child.start_kill();
            child.wait().await
        }
    };
    status.map_or(Exit::Unknown, Exit::from)
}

/// Opens the start log, and says where this life's part of it begins.
fn start_log(agent_dir: &Path) -> io::Result<(File, u64)> {
    let path = agent_dir.join("a2mcp.start.stderr");
    let log = OpenOptions::new().append(true).read(true).create(true).mode(0o600).open(path)?;
    let mut begin = log.metadata()?.len();
    if begin > MAX_START_LOG {
        log.set_len(0)?;
        begin = 0;
    }
    Ok((log, begin))
}

fn last_words(mut log: &File, begin: u64) -> Option<String> {
    let end = log.metadata().ok()?.len();
    log.seek(SeekFrom::Start(begin.max(end.saturating_sub(LAST_WORDS)))).ok()?;
    let mut text = Vec::new();
    log.take(LAST_WORDS).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
}
