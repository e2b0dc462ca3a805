//! The command line (contract 16): arguments, exit codes, what a terminal shows.
//!
//! One file per family of commands: [`operate`] asks running sidecars, [`client`] is an MCP client,
//! [`mod@connect`] configures other clients, [`install`] puts the shim into a host, [`programs`] gets dufs
//! and cloudflared, [`doctor`] looks for what is wrong. Results go to stdout and what is said about them to stderr, both through [`out`].

pub mod client;
pub mod connect;
pub mod doctor;
pub mod install;
pub mod operate;
pub mod out;
pub mod programs;
pub mod target;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use target::Target;

use crate::app::{life, log, lossy};
use crate::config::{AgentDir, Env, store};
use crate::install::Tool;
use crate::{confine, keeper, process, refhost, wrap};

/// How long the last lines of `wrap` may take when nobody reads them.
const LAST_LINES: Duration = Duration::from_millis(200);

/// Exit codes that every command shares (contract 16).
pub mod exit {
    /// It failed; stderr says why.
    pub const FAILED: u8 = 1;
    /// The arguments make no sense.
    pub const USAGE: u8 = 2;
    /// The config was refused.
    pub const REFUSED: u8 = 78;
}

#[derive(Parser)]
#[command(
    name = "a2mcp",
    version,
    about = "Serves a coding agent's live tools to remote agents as an MCP server"
)]
struct Cli {
    /// The agent directory [default: the only one with a running sidecar, else ~/.omp/agent if it exists,
    /// else ~/.a2mcp]
    #[arg(long, global = true, value_name = "DIR")]
    agent_dir: Option<PathBuf>,
    /// The process id of the sidecar, or of its host, when several run.
    #[arg(long, global = true, value_name = "PID")]
    pid: Option<u32>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// What a host's shim spawns: frames on stdin and stdout.
    Sidecar(SidecarArgs),
    /// Serves a few tools (read, write, bash, …), no agent needed, until interrupted.
    Demo(refhost::demo::DemoArgs),
    /// Serves any stdio MCP server: `a2mcp wrap -- COMMAND ARGS…`.
    Wrap(wrap::WrapArgs),
    /// What stands between a wrapped server and its host.
    #[command(hide = true)]
    Guard(wrap::guard::GuardArgs),
    /// What becomes the file server, once it may touch nothing but the share.
    #[command(hide = true)]
    Confine(confine::ConfineArgs),
    /// The demo's host: plays the shim's part in a process of its own.
    #[command(hide = true)]
    ReferenceHost(refhost::host::HostArgs),
    /// What a sidecar spawns to hold its listening socket.
    #[command(hide = true)]
    Keeper(keeper::server::KeeperArgs),
    #[command(flatten)]
    Operate(operate::Operate),
    /// Looks for what is wrong and says what to do about it.
    Doctor(doctor::DoctorArgs),
    /// Prints the configuration of a client for this bridge.
    Connect(connect::ConnectArgs),
    /// Lists the tools of a bridge.
    Tools(client::ClientArgs),
    /// Calls a tool of a bridge.
    Call(client::CallArgs),
    /// Puts the shim into a host, or gets a program that the bridge runs.
    #[command(subcommand)]
    Install(Install),
    /// Takes the shim out of a host; config and audit stay.
    #[command(subcommand)]
    Uninstall(Uninstall),
}

#[derive(Subcommand)]
enum Install {
    /// The extension for Oh My Pi, in its agent directory.
    Omp(install::OmpArgs),
    /// The file server behind shares.
    Dufs(programs::ProgramArgs),
    /// The program behind the tunnel.
    Cloudflared(programs::ProgramArgs),
}

#[derive(Subcommand)]
enum Uninstall {
    /// The extension for Oh My Pi, in its agent directory.
    Omp(install::OmpArgs),
}

#[derive(clap::Args)]
struct SidecarArgs {
    /// The host's agent directory
    // Stands in front of the option of all commands: this one has no default.
    #[arg(long, value_name = "DIR")]
    agent_dir: Option<PathBuf>,
    /// Only says whether a sidecar could start here.
    #[arg(long)]
    check: bool,
    /// With --check: also judge this state file.
    #[arg(long, value_name = "FILE", requires = "check")]
    state: Option<PathBuf>,
}

/// Runs the command of this process; the library's only entry for `main`.
pub fn main() -> ExitCode {
    // Before anybody can move it.
    crate::process::own_binary();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { exit::USAGE } else { 0 });
        }
    };
    let env = Env::capture();
    let given = cli.agent_dir.map(|root| AgentDir::new(root, &env));
    let target = Target { dir: given.clone(), pid: cli.pid };
    // The option of a command stands before the one of all commands.
    let own = |dir: &Option<PathBuf>| dir.as_ref().map(|root| AgentDir::new(root, &env)).or(given.clone());
    let done = match cli.command {
        Command::Sidecar(args) => return sidecar(own(&args.agent_dir), &args, &env),
        Command::Keeper(args) => return keep(&args),
        Command::Demo(args) => {
            if given.is_some() || args.agent_dir.is_some() || cli.pid.is_some() || args.pid.is_some() {
                out::note(
                    "`demo` starts everything itself, in a directory that it makes and removes: without \
                     --agent-dir and --pid; `a2mcp wrap` has a directory that stays",
                );
                return ExitCode::from(exit::USAGE);
            }
            return demo(&args, &env);
        }
        Command::Wrap(args) => return wrap_server(&args, own(&args.agent_dir), &env),
        Command::Guard(args) => {
            let run = wrap::guard::run(&args);
            return ExitCode::from(run.unwrap_or_else(|error| {
                out::note(&error);
                wrap::guard::NOT_RUN
            }));
        }
        Command::Confine(args) => {
            out::note(&confine::run(&args));
            return ExitCode::from(confine::NOT_RUN);
        }
        Command::ReferenceHost(mut args) => {
            let Some(dir) = given else {
                out::note("`a2mcp reference-host` needs --agent-dir DIR; try `a2mcp demo`");
                return ExitCode::from(exit::USAGE);
            };
            args.agent_dir = dir.root().to_owned();
            return refhost::host::run(&args, &env);
        }
        Command::Operate(command) => blocking(operate::perform(command, target, &env)),
        Command::Doctor(args) => blocking(doctor::run(args, &target, &env)),
        Command::Connect(args) => blocking(connect(args, &target, &env)),
        Command::Tools(args) => blocking(async {
            let bridge = reach(&args, &target, &env).await;
            Ok(match bridge {
                Ok(bridge) => client::tools(&bridge, &args).await,
                Err(code) => code,
            })
        }),
        Command::Call(args) => blocking(async {
            let bridge = reach(&args.client, &target, &env).await;
            Ok(match bridge {
                Ok(bridge) => client::call(&bridge, &args).await,
                Err(code) => code,
            })
        }),
        Command::Install(Install::Omp(args)) => blocking(async {
            let dir = omp_dir(given, &env)?;
            let binary = install::this_binary().map_err(|error| error.to_string())?;
            let done = install::install(&dir, install::OMP_SHIM, &binary, args);
            operate::print(&done.map_err(|error| crate::text::with_causes(&error))?)
        }),
        Command::Install(Install::Dufs(args)) => blocking(programs::install(Tool::Dufs, args, &target, &env)),
        Command::Install(Install::Cloudflared(args)) => {
            blocking(programs::install(Tool::Cloudflared, args, &target, &env))
        }
        Command::Uninstall(Uninstall::Omp(args)) => blocking(async {
            let dir = omp_dir(given, &env)?;
            let done = install::uninstall(&dir, args);
            operate::print(&done.map_err(|error| crate::text::with_causes(&error))?)
        }),
    };
    ExitCode::from(done.unwrap_or_else(|error| {
        out::note(&error);
        exit::FAILED
    }))
}

/// Where omp looks for extensions: never guessed from what happens to run.
fn omp_dir(given: Option<AgentDir>, env: &Env) -> Result<AgentDir, String> {
    let root = given.map(Ok).or_else(|| AgentDir::omp_root(env).map(|root| Ok(AgentDir::new(root, env))));
    root.unwrap_or_else(|| {
        Err("no home directory is known; name omp's agent directory with --agent-dir DIR".into())
    })
}

/// Runs a command that needs a runtime for a while; its exit code, or why it failed.
fn blocking(command: impl Future<Output = Result<u8, String>>) -> Result<u8, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start: {error}"))?;
    tokio::task::LocalSet::new().block_on(&runtime, command)
}

fn keep(args: &keeper::server::KeeperArgs) -> ExitCode {
    let sidecar = process::become_companion();
    process::outlive_large_files();
    if let Some(file) = &args.log {
        log::follow(file);
    }
    log::start();
    match sidecar.and_then(|sidecar| keeper::server::run(args, sidecar)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "keeper: cannot go on");
            ExitCode::FAILURE
        }
    }
}

fn demo(args: &refhost::demo::DemoArgs, env: &Env) -> ExitCode {
    match refhost::demo::run(args, env, &mut out::Stdout) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            out::note(&error.to_string());
            ExitCode::from(error.exit_code())
        }
    }
}

fn wrap_server(args: &wrap::WrapArgs, given: Option<AgentDir>, env: &Env) -> ExitCode {
    let Some(dir) = given.or_else(|| wrap::default_dir(env).map(|root| AgentDir::new(root, env))) else {
        out::note("no home directory is known; name a directory for config and logs with --agent-dir DIR");
        return ExitCode::from(exit::USAGE);
    };
    let code = match wrap::run(args, &dir, env, out::Stdout) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            out::note(&error.to_string());
            if let Some(said) = error.explanation() {
                out::explain(&format!("It wrote to stderr:\n{said}"));
            }
            ExitCode::from(error.exit_code())
        }
    };
    lossy::flush(LAST_LINES);
    code
}

/// The bridge that `tools` and `call` mean: the one named, else the sidecar that runs here.
async fn reach(args: &client::ClientArgs, target: &Target, env: &Env) -> Result<client::Endpoint, u8> {
    let bridge = async {
        let (url, token) = match (&args.url, &args.token_file) {
            (Some(url), Some(file)) => (url.clone(), client::read_token(file)?),
            (url, file) => {
                let (running, token) = target.bridge(env).await.map_err(client::Failure::Unreachable)?;
                let token = match file {
                    Some(file) => client::read_token(file)?,
                    None => token,
                };
                (url.clone().unwrap_or(running), token)
            }
        };
        client::Endpoint::new(&url, &token)
    };
    bridge.await.map_err(|failure| {
        out::note(&failure.to_string());
        client::exit_code(&failure)
    })
}

async fn connect(args: connect::ConnectArgs, target: &Target, env: &Env) -> Result<u8, String> {
    let named = args.token_file.as_deref().map(client::read_token).transpose();
    let named = named.map_err(|failure| failure.to_string())?;
    let bridge = match (args.url, named) {
        (Some(url), token @ Some(_)) => connect::Bridge { url, token },
        (Some(url), None) => {
            // A bridge elsewhere has a token of its own; one here can be looked up, if it is clear which.
            let dir = target.agent_dir(env).await.ok();
            let config = dir.and_then(|dir| store::load_readonly(&dir).ok());
            connect::Bridge { url, token: config.and_then(|(config, _)| config.token) }
        }
        (None, named) => {
            let (url, token) = target.bridge(env).await?;
            connect::Bridge { url, token: Some(named.unwrap_or(token)) }
        }
    };
    let guide = connect::guide(args.client, &bridge, args.timeout, args.env);
    let printed = operate::print(&guide.config)?;
    out::explain(&guide.note);
    Ok(printed)
}

fn sidecar(dir: Option<AgentDir>, args: &SidecarArgs, env: &Env) -> ExitCode {
    let Some(dir) = dir else {
        out::note("`a2mcp sidecar` needs --agent-dir DIR; it is started by a host's shim, try `a2mcp demo`");
        return ExitCode::from(exit::USAGE);
    };
    if !args.check {
        return life::run(dir, env);
    }
    match blocking(async { life::check(&dir, args.state.as_deref()).await.map(|()| 0) }) {
        Ok(code) => ExitCode::from(code),
        Err(why) => {
            out::note(&why);
            ExitCode::from(exit::REFUSED)
        }
    }
}
