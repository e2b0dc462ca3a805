//! `a2mcp wrap -- COMMAND`: any stdio MCP server behind the endpoint (contract 16).
//!
//! ```text
//! caller ──HTTP──▶ sidecar ══frames══▶ wrap host ──guard──▶ server      newline-delimited JSON-RPC
//! ```
//! This process is the host: the shim of [`crate::refhost`] towards the sidecar, [`wrapped`] towards the
//! server, which is its child and not the sidecar's, so that a sidecar's end never takes it along. One
//! server process serves all sessions. [`connection`] owns one process's messages, [`child`] the process,
//! [`guard`] the process in between that ends all of it, [`respawn`] when it starts again, [`questions`]
//! what it asks callers, [`config`] what is to be started. Knows no HTTP; sessions only by their ids.

mod child;
pub mod config;
mod connection;
pub mod guard;
mod lines;
mod params;
mod questions;
mod respawn;
mod tools;
mod wrapped;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::app::{life, log, lossy};
use crate::config::{AgentDir, Env};
use crate::frame::messages::{Hello, HelloResult, HostInfo, Level, Notice, PROTOCOL};
use crate::process::{self, Identity};
use crate::refhost::announce::{self, Serving};
use crate::refhost::launch::LaunchProgram;
use crate::refhost::shim::{Observer, Order, Shim, ShimConfig, ShimEnd, ShimHandle};
use crate::refhost::tools::HostState;
use crate::signals::Watch;
use crate::text::clean;
use config::{Spec, SpecError};
use tools::WrappedTools;
use wrapped::{NOT_STARTED, Phase, ServerInfo, Wrapped};

/// How long calls may take after SIGTERM (contract 15).
const GRACE: Duration = Duration::from_secs(10);
/// When a server that has not answered yet is worth a word.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest instructions that reach callers, in characters.
const MAX_INSTRUCTIONS: usize = 64 << 10;

/// Arguments of `a2mcp wrap`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct WrapArgs {
    /// Where config, token, log and audit are [default: ~/.a2mcp]
    // Stands in front of the option of all commands, whose default is another one.
    #[arg(long, value_name = "DIR")]
    pub agent_dir: Option<PathBuf>,
    /// The port of the endpoint; by default what the config says, else the last one
    #[arg(long, value_name = "N")]
    pub port: Option<u16>,
    /// Print one line of JSON for machines
    #[arg(long)]
    pub json: bool,
    /// Take the server from this file, the `mcpServers` JSON of MCP clients
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Which server of the file
    #[arg(long, value_name = "NAME")]
    pub server: Option<String>,
    /// Stands in front of the option of all commands, which has no meaning here.
    #[arg(long, hide = true, value_name = "PID")]
    pub pid: Option<u32>,
    /// The server's command and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Why nothing is wrapped, or not to its proper end.
#[derive(Debug, thiserror::Error)]
pub enum WrapError {
    /// What is to be wrapped is not clear.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The machine did not let us.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The server did not start.
    #[error("the server `{program}` cannot be started: {reason}")]
    Server {
        /// What was to be started.
        program: String,
        /// How it failed.
        reason: String,
        /// What it wrote to stderr.
        stderr: String,
    },
    /// The sidecar refused the config.
    #[error("the sidecar refuses to start: {0}")]
    Refused(String),
    /// The sidecar cannot be kept running.
    #[error("the sidecar cannot be started: {0}")]
    Failed(String),
}

impl WrapError {
    /// The exit code of the command (contract 16).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Spec(SpecError::Usage(_)) => 2,
            Self::Refused(_) => life::EXIT_REFUSED,
            _ => 1,
        }
    }

    /// What the server wrote, when that explains it.
    pub fn explanation(&self) -> Option<&str> {
        match self {
            Self::Server { stderr, .. } if !stderr.is_empty() => Some(stderr),
            _ => None,
        }
    }
}

fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> WrapError {
    move |source| WrapError::Io { what, source }
}

/// Where `wrap` keeps its files when no directory is named.
pub fn default_dir(env: &Env) -> Option<PathBuf> {
    env.home.as_deref().filter(|home| home.is_absolute()).map(|home| home.join(".a2mcp"))
}

/// Wraps a server until it is interrupted; prints to `out` when it is ready.
///
/// # Errors
/// [`WrapError`]; nothing is left running then either.
pub fn run(
    args: &WrapArgs,
    agent_dir: &AgentDir,
    env: &Env,
    out: impl Write + Send + 'static,
) -> Result<(), WrapError> {
    if args.pid.is_some() {
        let text = "--pid names a running sidecar; `wrap` starts its own";
        return Err(SpecError::Usage(text.to_owned()).into());
    }
    let spec = Spec::choose(&args.command, args.config.as_deref(), args.server.as_deref())?;
    process::raise_open_files();
    // Nothing here may wait for who reads our stderr.
    lossy::start();
    log::start();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io_error("start"))?;
    let end =
        tokio::task::LocalSet::new().block_on(&runtime, wrap(args, spec, agent_dir, env, Box::new(out)));
    runtime.shutdown_background();
    end
}

async fn wrap(
    args: &WrapArgs,
    spec: Spec,
    agent_dir: &AgentDir,
    env: &Env,
    out: Box<dyn Write + Send>,
) -> Result<(), WrapError> {
    let mut signals = Watch::open(&crate::refhost::END_SIGNALS).map_err(io_error("watch for signals"))?;
    agent_dir.create().map_err(io_error("use the agent directory"))?;
    let program = spec.program();
    let state = Rc::new(HostState::default());
    let wrapped = Wrapped::new(spec, state.clone());
    let mut keeping = tokio::task::spawn_local(wrapped.clone().keep());
    let started = tokio::select! {
        started = first_start(&wrapped, &program) => Some(started),
        () = signals.next() => None,
    };
    let end = match started {
        // Its last word is with the task that keeps it.
        Some(None) => Ok(()),
        Some(Some(info)) => serve(args, &wrapped, &info, (state, agent_dir, env), &mut signals, out).await,
        None => Ok(()),
    };
    wrapped.stop();
    // Ends by itself within seconds; a second signal does not make it faster.
    match (&mut keeping).await {
        Ok(Err(reason)) if end.is_ok() => {
            // The error itself says that.
            let reason = reason.strip_prefix(NOT_STARTED).unwrap_or(&reason).to_owned();
            let said = wrapped.last_words();
            Err(match said.strip_prefix(guard::CANNOT_RUN) {
                Some(why) => {
                    let why =
                        why.strip_prefix(&*program).and_then(|why| why.strip_prefix(": ")).unwrap_or(why);
                    WrapError::Server { program, reason: why.to_owned(), stderr: String::new() }
                }
                None => WrapError::Server { program, reason, stderr: said },
            })
        }
        _ => end,
    }
}

/// What the server says of itself, once it runs; `None` when it never does.
async fn first_start(wrapped: &Wrapped, program: &str) -> Option<Rc<ServerInfo>> {
    let mut phase = wrapped.phase.subscribe();
    let settled = phase.wait_for(|phase| !matches!(phase, Phase::Starting));
    tokio::pin!(settled);
    let settled = match tokio::time::timeout(PATIENCE, &mut settled).await {
        Ok(settled) => settled,
        Err(_) => {
            tracing::info!("waiting for `{program}` to answer initialize");
            settled.await
        }
    };
    match settled.as_deref() {
        Ok(Phase::Running(_, info)) => Some(info.clone()),
        _ => None,
    }
}

async fn serve(
    args: &WrapArgs,
    wrapped: &Rc<Wrapped>,
    info: &ServerInfo,
    (state, agent_dir, env): (Rc<HostState>, &AgentDir, &Env),
    signals: &mut Watch,
    out: Box<dyn Write + Send>,
) -> Result<(), WrapError> {
    let reporting = Rc::new(Reporting { wrapped: wrapped.clone(), first: watch::Sender::new(None) });
    let mut first = reporting.first.subscribe();
    let (shim, handle) = Shim::new(
        ShimConfig::new(hello(args, info, env)),
        Rc::new(WrappedTools(wrapped.clone())),
        state,
        reporting.clone(),
        LaunchProgram { program: process::own_binary(), agent_dir: agent_dir.root().to_owned() },
    );
    wrapped.connect(handle.clone());
    let running = shim.run();
    tokio::pin!(running);
    let mut out = Some(out);
    // A task that is left behind when nobody reads our stdout.
    let mut printing = JoinSet::new();
    let mut signalled = false;
    let mut printed = Ok(());
    let end = loop {
        tokio::select! {
            end = &mut running => break end,
            served = first.wait_for(Option::is_some), if out.is_some() => {
                let Some(mut out) = out.take() else { continue };
                let Ok(Some(hello)) = served.map(|hello| hello.clone()) else { continue };
                let said = say(args, info, &hello, agent_dir);
                printing.spawn_blocking(move || {
                    let said = said?;
                    out.write_all(&said).and_then(|()| out.flush()).map_err(io_error("print"))
                });
            }
            Some(done) = printing.join_next() => {
                printed = done.unwrap_or(Ok(()));
                if printed.is_err() {
                    give(&handle, Order::Stop(Duration::ZERO));
                }
            }
            () = signals.next() => {
                let order = if signalled { Order::Kill } else { Order::Stop(GRACE) };
                signalled = true;
                give(&handle, order);
            }
        }
    };
    match end {
        ShimEnd::Stopped => printed,
        ShimEnd::Refused(reason) => Err(WrapError::Refused(reason)),
        ShimEnd::Failed(reason) => Err(WrapError::Failed(reason)),
    }
}

/// What is printed when it serves.
fn say(
    args: &WrapArgs,
    info: &ServerInfo,
    hello: &HelloResult,
    agent_dir: &AgentDir,
) -> Result<Vec<u8>, WrapError> {
    let token = announce::token(agent_dir).map_err(WrapError::Failed)?;
    let name = if info.name.is_empty() { "The server" } else { &info.name };
    let serving = Serving {
        what: &format!("{name} is served"),
        url: &hello.url,
        pid: hello.pid,
        host_pid: std::process::id(),
        features: &hello.features,
        agent_dir,
        files: "config, log and audit are",
    };
    let mut text = Vec::new();
    announce::announce(&serving, &token, args.json, &mut text).map_err(io_error("print"))?;
    Ok(text)
}

fn hello(args: &WrapArgs, info: &ServerInfo, env: &Env) -> Hello {
    let identity = Identity::current();
    let name = if info.name.is_empty() { "wrapped server".to_owned() } else { info.name.clone() };
    Hello {
        protocol: PROTOCOL,
        instance: uuid::Uuid::new_v4().simple().to_string(),
        features: Vec::new(),
        capabilities: info.capabilities.clone().or_else(|| serde_json::from_str("{}").ok()),
        instructions: info.instructions.as_ref().map(|text| text.chars().take(MAX_INSTRUCTIONS).collect()),
        title: Some(info.title.clone().filter(|title| !title.is_empty()).unwrap_or_else(|| name.clone())),
        host: HostInfo {
            name,
            version: info.version.clone(),
            pid: identity.pid,
            start_time: (identity.start_time > 0).then_some(identity.start_time),
            cwd: env.cwd.to_string_lossy().into_owned(),
            home: env.home.as_deref().unwrap_or(&env.cwd).to_string_lossy().into_owned(),
        },
        port: args.port,
        resume: None,
        in_flight: Vec::new(),
    }
}

/// Queues an order without making the loop that drives the shim wait for the shim.
fn give(handle: &ShimHandle, order: Order) {
    let handle = handle.clone();
    tokio::task::spawn_local(async move { handle.order(order).await });
}

/// Hears what happens to the sidecar.
struct Reporting {
    wrapped: Rc<Wrapped>,
    /// The first sidecar's answer.
    first: watch::Sender<Option<HelloResult>>,
}

impl Observer for Reporting {
    fn ready(&self, hello: &HelloResult, restarts: u64) {
        self.wrapped.serving.send_replace(true);
        if restarts == 0 || self.first.borrow().is_none() {
            self.first.send_replace(Some(hello.clone()));
        } else {
            tracing::info!(restarts, "the sidecar serves again");
        }
    }

    fn notice(&self, notice: &Notice) {
        let text = clean(&notice.text, 1000);
        match notice.level {
            Level::Info => tracing::info!("{text}"),
            Level::Warning | Level::Error => tracing::warn!("{text}"),
        }
    }

    fn restarting(&self, reason: &str, pause: Duration) {
        self.wrapped.serving.send_replace(false);
        let pause_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
        tracing::warn!(reason = ?reason, pause_ms, "the next sidecar starts");
    }
}
