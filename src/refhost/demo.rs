//! `a2mcp demo`: a reference host in a temporary agent directory, and what a person needs to reach
//! it. Owns the directory and the host's process; both are gone when it ends, also after SIGKILL
//! (the host sees its stdin end, ends its sidecar and removes the directory).

use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};

use super::announce::{self, Serving};
use super::host::DEMO_PREFIX;
use crate::config::{AgentDir, Env};
use crate::process::{self, Identity};
use crate::signals::Watch;

/// How long the host may take until its sidecar serves.
const START: Duration = Duration::from_secs(30);
/// How long a polite stop may take: the host's grace and its margins.
const STOP: Duration = Duration::from_secs(16);
/// How long the directory's removal is tried: longer than anything of a dead host lives.
const REMOVE_TIME: Duration = Duration::from_secs(4);
const REMOVE_STEP: Duration = Duration::from_millis(100);
/// How long the host may take to kill its sidecar.
const KILL: Duration = Duration::from_secs(1);
/// The longest line of the host.
const MAX_LINE: u64 = 1 << 20;

/// Arguments of `a2mcp demo`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DemoArgs {
    /// The port of the endpoint; any free one by default
    #[arg(long, value_name = "N")]
    pub port: Option<u16>,
    /// Print one line of JSON for machines
    #[arg(long)]
    pub json: bool,
    /// Stand in front of the options of all commands, which have no meaning here.
    #[arg(long, hide = true, value_name = "DIR")]
    pub agent_dir: Option<PathBuf>,
    /// As above.
    #[arg(long, hide = true, value_name = "PID")]
    pub pid: Option<u32>,
}

/// Why a demo did not run, or not to its proper end.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// The machine did not let us.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The sidecar refused the config.
    #[error("the sidecar refuses to start: {0}")]
    Refused(String),
    /// The host ended before anything served, or by itself later.
    #[error("the reference host ended: {0}")]
    Ended(String),
    /// Nothing served in time.
    #[error("the endpoint was not ready within {} s", START.as_secs())]
    Slow,
}

impl DemoError {
    /// The exit code of the command (contract 16).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Refused(_) => crate::app::life::EXIT_REFUSED,
            _ => 1,
        }
    }
}

fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> DemoError {
    move |source| DemoError::Io { what, source }
}

/// A line of the reference host, as far as it matters here.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Event {
    event: String,
    url: String,
    pid: u32,
    host_pid: u32,
    features: Vec<String>,
    reason: String,
}

/// Runs a demo until it is interrupted; prints to `out` when it is ready.
///
/// # Errors
/// [`DemoError`]; nothing is left behind then either.
pub fn run(args: &DemoArgs, env: &Env, out: &mut dyn Write) -> Result<(), DemoError> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io_error("start"))?;
    let end = runtime.block_on(demo(args, env, out));
    runtime.shutdown_background();
    end
}

async fn demo(args: &DemoArgs, env: &Env, out: &mut dyn Write) -> Result<(), DemoError> {
    let mut signals = Watch::open(&super::END_SIGNALS).map_err(io_error("watch for signals"))?;
    let dir = tempfile::Builder::new()
        .prefix(DEMO_PREFIX)
        .permissions(Permissions::from_mode(0o700))
        .tempdir()
        .map_err(io_error("make a temporary directory"))?;
    if let Some(port) = args.port {
        write_config(dir.path(), port).map_err(io_error("write the config"))?;
    }
    let (mut child, mut events) = spawn(dir.path()).map_err(io_error("start the reference host"))?;
    let served = serve(args, env, out, dir.path(), &mut events, &mut signals).await;
    let stopped = stop(&mut child, &mut signals, matches!(served, Ok(Served::Interrupted))).await;
    // The host removes the directory too; whoever comes last finds nothing.
    remove(dir.keep()).await;
    match served? {
        Served::Interrupted => Ok(()),
        Served::HostEnded => Err(DemoError::Ended(stopped)),
    }
}

/// Removes the directory; a sidecar whose host was killed writes there for a moment longer.
async fn remove(dir: PathBuf) {
    let end = Instant::now() + REMOVE_TIME;
    let mut was_gone = false;
    while Instant::now() < end {
        let is_gone = match std::fs::remove_dir_all(&dir) {
            Ok(()) => false,
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        if is_gone && was_gone {
            return;
        }
        was_gone = is_gone;
        tokio::time::sleep(REMOVE_STEP).await;
    }
}

enum Served {
    Interrupted,
    HostEnded,
}

async fn serve(
    args: &DemoArgs,
    env: &Env,
    out: &mut dyn Write,
    dir: &Path,
    events: &mut Events,
    signals: &mut Watch,
) -> Result<Served, DemoError> {
    let ready = tokio::select! {
        ready = events.ready() => ready?,
        () = tokio::time::sleep(START) => return Err(DemoError::Slow),
        () = signals.next() => return Ok(Served::Interrupted),
    };
    // A demo shares nothing with the bridge somebody may have set up.
    let env = Env { config: None, audit: None, ..env.clone() };
    let agent_dir = AgentDir::new(dir, &env);
    let serving = Serving {
        what: "The reference host serves",
        url: &ready.url,
        pid: ready.pid,
        host_pid: ready.host_pid,
        features: &ready.features,
        agent_dir: &agent_dir,
        files: "everything it made is",
    };
    let token = announce::token(&agent_dir).map_err(DemoError::Ended)?;
    announce::announce(&serving, &token, args.json, out).map_err(io_error("print"))?;
    loop {
        tokio::select! {
            event = events.next() => match event {
                None => return Ok(Served::HostEnded),
                Some(event) if event.event == "refused" => return Err(DemoError::Refused(event.reason)),
                Some(event) if event.event == "failed" => return Err(DemoError::Ended(event.reason)),
                Some(_) => {}
            },
            () = signals.next() => return Ok(Served::Interrupted),
        }
    }
}

fn write_config(dir: &Path, port: u16) -> io::Result<()> {
    let path = dir.join("a2mcp.json");
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(format!("{{\"port\": {port}}}\n").as_bytes())
}

fn spawn(dir: &Path) -> io::Result<(Child, Events)> {
    let mut command = Command::new(process::own_binary());
    command.arg("reference-host").arg("--agent-dir").arg(dir).arg("--remove-agent-dir");
    // A demo shares nothing with the bridge somebody may have set up.
    command.env_remove("A2MCP_CONFIG").env_remove("A2MCP_AUDIT");
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    // A group of its own: ^C reaches this process only, which then stops the host in order.
    let mut child = process::spawn_dying_with_parent(&mut command, Signal::TERM)?;
    let output = child.stdout.take().ok_or_else(|| io::Error::other("the child has no stdout"))?;
    Ok((child, Events { output: BufReader::new(output) }))
}

/// Ends the host: politely after an interrupt, at once after a second one or an error. Returns how
/// it ended.
async fn stop(child: &mut Child, signals: &mut Watch, politely: bool) -> String {
    let host = child.id().and_then(Identity::of);
    let tell = |signal| host.is_some_and(|host| host.signal(signal));
    if politely {
        tell(Signal::TERM);
        tokio::select! {
            _ = child.wait() => {}
            () = tokio::time::sleep(STOP) => {}
            () = signals.next() => {}
        }
    }
    tell(Signal::TERM);
    // Its end of the pipe, should it not have seen the signal.
    drop(child.stdin.take());
    let patience = if politely { KILL } else { KILL * 3 };
    if tokio::time::timeout(patience, child.wait()).await.is_err() {
        let _ = child.start_kill();
    }
    match child.wait().await {
        Ok(status) => status.to_string(),
        Err(error) => error.to_string(),
    }
}

/// The host's lines.
struct Events {
    output: BufReader<ChildStdout>,
}

impl Events {
    /// The next event; `None` at the end. Dropping the future may lose the line it waits for.
    async fn next(&mut self) -> Option<Event> {
        let mut line = Vec::new();
        match (&mut self.output).take(MAX_LINE).read_until(b'\n', &mut line).await {
            Ok(1..) => Some(serde_json::from_slice(&line).unwrap_or_default()),
            Ok(_) | Err(_) => None,
        }
    }

    async fn ready(&mut self) -> Result<Event, DemoError> {
        loop {
            match self.next().await {
                Some(event) if event.event == "ready" => return Ok(event),
                Some(event) if event.event == "refused" => return Err(DemoError::Refused(event.reason)),
                Some(event) if event.event == "failed" => return Err(DemoError::Ended(event.reason)),
                Some(_) => {}
                None => return Err(DemoError::Ended("before anything served".to_owned())),
            }
        }
    }
}
