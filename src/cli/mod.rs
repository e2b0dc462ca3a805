//! The command line (contract 16): arguments, exit codes, what a terminal shows.
//!
//! One file per family of commands: [`operate`] asks running sidecars. Results go to stdout and what
//! is said about them to stderr, both through [`out`].

pub mod operate;
pub mod out;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::app::life;
use crate::config::{AgentDir, Env};

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
    /// The agent directory; default: the only one with a running sidecar, else the host's own.
    #[arg(long, global = true, value_name = "DIR")]
    agent_dir: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// What a host's shim spawns: frames on stdin and stdout.
    Sidecar(SidecarArgs),
    #[command(flatten)]
    Operate(operate::Operate),
}

#[derive(clap::Args)]
struct SidecarArgs {
    /// Only says whether a sidecar could start here.
    #[arg(long)]
    check: bool,
    /// With --check: also judge this state file.
    #[arg(long, value_name = "FILE", requires = "check")]
    state: Option<PathBuf>,
}

/// Runs the command of this process; the library's only entry for `main`.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { exit::USAGE } else { 0 });
        }
    };
    let env = Env::capture();
    let given = cli.agent_dir.map(|root| AgentDir::new(root, &env));
    match cli.command {
        Command::Sidecar(args) => sidecar(given, &args),
        Command::Operate(command) => operate::run(command, given, &env),
    }
}

fn sidecar(dir: Option<AgentDir>, args: &SidecarArgs) -> ExitCode {
    let Some(dir) = dir else {
        out::note("`a2mcp sidecar` needs --agent-dir DIR; it is started by a host's shim, try `a2mcp demo`");
        return ExitCode::from(exit::USAGE);
    };
    if !args.check {
        return life::run(dir);
    }
    match life::check(&dir, args.state.as_deref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            out::note(&why);
            ExitCode::from(exit::REFUSED)
        }
    }
}
