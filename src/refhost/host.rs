//! The reference host's process, `a2mcp reference-host`: a shim with the demo tools, for `a2mcp
//! demo` and for tests. It lives as long as its stdin is open.
//!
//! stdout carries one JSON object per line, `{"event": …}`: `ready` (each time a sidecar serves),
//! `notice`, `restarting`, `command` (an answer), and last `stopped`, `refused` or `failed`. stdin
//! takes one per line: `{"do": …}`, see [`Input`].

use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

use super::demo_tools::{DemoTools, Offer};
use super::execution::ExecutionLog;
use super::launch::LaunchProgram;
use super::lines::{Lines, read_stdin};
use super::shim::{Observer, Order, Shim, ShimConfig, ShimEnd, ShimHandle};
use super::tools::{HostState, Tools};
use crate::app::log;
use crate::config::{AgentDir, Env};
use crate::frame::messages::{Hello, HelloResult, HostInfo, Notice, PROTOCOL};
use crate::process::{self, Identity};
use crate::signals::Watch;

/// How long calls may take after SIGTERM (contract 15).
const GRACE: Duration = Duration::from_secs(10);
/// The directory names that [`HostArgs::remove_agent_dir`] accepts begin so.
pub(super) const DEMO_PREFIX: &str = "a2mcp-demo-";

/// Arguments of `a2mcp reference-host`.
#[derive(Debug, Clone, clap::Args)]
pub struct HostArgs {
    /// The agent directory; the command line's own `--agent-dir`
    #[arg(skip)]
    pub agent_dir: PathBuf,
    /// Append a JSON line for each tool that runs, before it runs
    #[arg(long, value_name = "FILE")]
    pub execution_log: Option<PathBuf>,
    /// A JSON array of further tools, each with `result` and `delayMs`
    #[arg(long, value_name = "FILE")]
    pub tools: Option<PathBuf>,
    /// Offer `needs_approval`, which waits until this file exists
    #[arg(long, value_name = "FILE")]
    pub approval_file: Option<PathBuf>,
    /// Answer bridge/hostLlm
    #[arg(long)]
    pub host_llm: bool,
    /// The binary to start as the sidecar, instead of this one
    #[arg(long, value_name = "PATH")]
    pub sidecar: Option<PathBuf>,
    /// How often the sidecar is pinged
    #[arg(long, value_name = "MS", default_value_t = 5000)]
    pub ping_every_ms: u64,
    /// Remove the agent directory at the end; only for one that `a2mcp demo` made
    #[arg(long)]
    pub remove_agent_dir: bool,
}

/// One line of stdin.
#[derive(Debug, Deserialize)]
#[serde(tag = "do", rename_all = "camelCase", rename_all_fields = "camelCase")]
enum Input {
    /// What an operator types after `/a2mcp`; answered by a `command` line.
    Command { argv: Vec<String> },
    /// Whether there is a Main session.
    Main { live: bool },
    /// Reads the tools file again and says that the list changed.
    ReloadTools,
    /// Ends a call's stream resumable.
    CloseStream { call_id: String },
    /// Any notification to the sidecar.
    Notify { method: String, params: Value },
    /// As SIGTERM, with a grace.
    Stop { grace_ms: u64 },
}

/// Runs the reference host until its stdin ends, a signal comes, or no sidecar can be had.
pub fn run(args: &HostArgs, env: &Env) -> ExitCode {
    log::start();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "cannot start");
            return ExitCode::FAILURE;
        }
    };
    let code = tokio::task::LocalSet::new().block_on(&runtime, live(args, env));
    runtime.shutdown_background();
    if args.remove_agent_dir {
        remove(&args.agent_dir);
    }
    code
}

/// Removes a demo's directory, and nothing else.
fn remove(agent_dir: &std::path::Path) {
    let is_demo = agent_dir.file_name().and_then(|name| name.to_str());
    if is_demo.is_some_and(|name| name.starts_with(DEMO_PREFIX)) {
        match std::fs::remove_dir_all(agent_dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(%error, dir = ?agent_dir, "the temporary directory stays");
            }
            _ => {}
        }
    }
}

async fn live(args: &HostArgs, env: &Env) -> ExitCode {
    let agent_dir = AgentDir::new(&args.agent_dir, env);
    let parts = match parts(args, env, &agent_dir) {
        Ok(parts) => parts,
        Err(error) => {
            tracing::error!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let Parts { tools, state, hello, mut signals } = parts;
    let lines = Rc::new(Lines::to_stdout());
    let (shim, handle) = Shim::new(
        ShimConfig { hello, ping_every: Duration::from_millis(args.ping_every_ms.max(10)) },
        tools.clone() as Rc<dyn Tools>,
        state.clone(),
        Rc::new(Reporting { lines: lines.clone(), agent_dir: agent_dir.clone() }),
        LaunchProgram {
            program: args.sidecar.clone().unwrap_or_else(process::own_binary),
            agent_dir: agent_dir.root().to_owned(),
        },
    );
    let running = shim.run();
    tokio::pin!(running);
    let mut input = Some(read_stdin());
    let mut signalled = false;
    let console = Console { handle: handle.clone(), tools, state, lines: lines.clone() };
    let end = loop {
        tokio::select! {
            end = &mut running => break end,
            line = next_line(&mut input) => match line {
                Some(line) => console.obey(&line),
                None => give(&handle, Order::StopNow),
            },
            () = signals.next() => {
                let order = if signalled { Order::Kill } else { Order::Stop(GRACE) };
                signalled = true;
                give(&handle, order);
            }
        }
    };
    drop(console);
    let (event, code) = match end {
        ShimEnd::Stopped => (json!({ "event": "stopped" }), ExitCode::SUCCESS),
        ShimEnd::Refused(reason) => {
            tracing::error!("the sidecar refuses to start: {reason}");
            (json!({ "event": "refused", "reason": reason }), ExitCode::from(crate::app::life::EXIT_REFUSED))
        }
        ShimEnd::Failed(reason) => {
            tracing::error!("the sidecar cannot be started: {reason}");
            (json!({ "event": "failed", "reason": reason }), ExitCode::FAILURE)
        }
    };
    lines.write(&event);
    if let Some(lines) = Rc::into_inner(lines) {
        lines.flush().await;
    }
    code
}

struct Parts {
    tools: Rc<DemoTools>,
    state: Rc<HostState>,
    hello: Hello,
    signals: Watch,
}

fn parts(args: &HostArgs, env: &Env, agent_dir: &AgentDir) -> Result<Parts, String> {
    agent_dir.create().map_err(|error| format!("cannot use {}: {error}", agent_dir.root().display()))?;
    let signals =
        Watch::open(&super::END_SIGNALS).map_err(|error| format!("cannot watch for signals: {error}"))?;
    let execution_log = match &args.execution_log {
        Some(path) => Some(ExecutionLog::open(path).map_err(|error| format!("{}: {error}", path.display()))?),
        None => None,
    };
    let state = Rc::new(HostState::default());
    let offer = Offer {
        execution_log,
        tools_file: args.tools.clone(),
        approval_file: args.approval_file.clone(),
        host_llm: args.host_llm,
    };
    let tools = Rc::new(DemoTools::new(offer, state.clone())?);
    Ok(Parts { tools, state, hello: hello(args, env), signals })
}

fn hello(args: &HostArgs, env: &Env) -> Hello {
    let identity = Identity::current();
    let mut features = vec!["approvals".to_owned()];
    if args.host_llm {
        features.push("hostLlm".to_owned());
    }
    let capabilities = json!({ "tools": { "listChanged": true }, "logging": {} });
    Hello {
        protocol: PROTOCOL,
        instance: uuid::Uuid::new_v4().simple().to_string(),
        features,
        capabilities: serde_json::value::to_raw_value(&capabilities).ok(),
        instructions: None,
        title: Some("a2mcp reference host".to_owned()),
        host: HostInfo {
            name: "reference-host".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: identity.pid,
            start_time: (identity.start_time > 0).then_some(identity.start_time),
            cwd: env.cwd.to_string_lossy().into_owned(),
            home: env.home.as_deref().unwrap_or(&env.cwd).to_string_lossy().into_owned(),
        },
        port: None,
        resume: None,
        in_flight: Vec::new(),
    }
}

/// The next line, once `None` at the end, then never again.
async fn next_line(input: &mut Option<mpsc::Receiver<String>>) -> Option<String> {
    match input {
        None => std::future::pending().await,
        Some(lines) => {
            let line = lines.recv().await;
            if line.is_none() {
                *input = None;
            }
            line
        }
    }
}

/// Queues an order without making the loop that drives the shim wait for the shim.
fn give(handle: &ShimHandle, order: Order) {
    let handle = handle.clone();
    tokio::task::spawn_local(async move { handle.order(order).await });
}

/// What stdin asks for.
struct Console {
    handle: ShimHandle,
    tools: Rc<DemoTools>,
    state: Rc<HostState>,
    lines: Rc<Lines>,
}

impl Console {
    fn obey(&self, line: &str) {
        match serde_json::from_str(line) {
            Ok(Input::Command { argv }) => self.command(argv),
            Ok(Input::Main { live }) => self.state.set_main(live),
            Ok(Input::ReloadTools) => match self.tools.reload() {
                Ok(()) => {
                    let method = "notifications/tools/list_changed".to_owned();
                    give(&self.handle, Order::Notify(method, Bytes::new()));
                }
                Err(error) => tracing::error!("{error}"),
            },
            Ok(Input::CloseStream { call_id }) => give(&self.handle, Order::CloseStream(call_id)),
            Ok(Input::Notify { method, params }) => {
                give(&self.handle, Order::Notify(method, params.to_string().into()));
            }
            Ok(Input::Stop { grace_ms }) => {
                give(&self.handle, Order::Stop(Duration::from_millis(grace_ms)));
            }
            Err(error) => tracing::error!(%error, "a line of stdin is not understood"),
        }
    }

    fn command(&self, argv: Vec<String>) {
        let (reply, answer) = oneshot::channel();
        give(&self.handle, Order::Command(argv, reply));
        let lines = Rc::downgrade(&self.lines);
        tokio::task::spawn_local(async move {
            let event = match answer.await {
                Ok(Ok(notice)) => json!({ "event": "command", "text": notice.text, "level": notice.level }),
                Ok(Err(error)) => json!({ "event": "command", "text": error, "level": "error" }),
                Err(_) => json!({ "event": "command", "text": "the sidecar ended first", "level": "error" }),
            };
            if let Some(lines) = lines.upgrade() {
                lines.write(&event);
            }
        });
    }
}

/// Turns what the shim says into lines.
struct Reporting {
    lines: Rc<Lines>,
    agent_dir: AgentDir,
}

impl Observer for Reporting {
    fn ready(&self, hello: &HelloResult, restarts: u64) {
        self.lines.write(&json!({
            "event": "ready",
            "url": hello.url,
            "port": hello.port,
            "pid": hello.pid,
            "hostPid": std::process::id(),
            "agentDir": self.agent_dir.root(),
            "version": hello.version,
            "tokenPrefix": hello.token_prefix,
            "features": hello.features,
            "restarts": restarts,
        }));
    }

    fn notice(&self, notice: &Notice) {
        tracing::info!(level = ?notice.level, text = ?notice.text, "notice");
        self.lines.write(&json!({ "event": "notice", "level": notice.level, "text": notice.text }));
    }

    fn restarting(&self, reason: &str, pause: Duration) {
        let pause_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
        tracing::warn!(reason = ?reason, pause_ms, "the next sidecar starts");
        self.lines.write(&json!({ "event": "restarting", "reason": reason, "pauseMs": pause_ms }));
    }
}
