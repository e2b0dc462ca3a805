//! The operator's commands: each finds the sidecar it means and asks it over its control socket.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Subcommand;
use tokio_util::task::TaskTracker;

use super::{exit, out};
use crate::app::operate as app;
use crate::audit::{Audit, Record};
use crate::config::{AgentDir, ConfigError, Env, Token, store};
use crate::control::status::{self, Status};
use crate::control::{self, Found, Reply, Request};
use crate::text::{self, with_causes};

/// How often a followed file is looked at.
const FOLLOW: Duration = Duration::from_millis(200);

/// Commands that ask a running sidecar, or read what it left.
#[derive(Subcommand)]
pub enum Operate {
    /// Shows what a sidecar says of itself: endpoint, host, sessions, calls.
    Status(Which),
    /// Makes way for the next sidecar: same URL, token and sessions.
    Restart(Ending),
    /// Ends the bridge until the host (or its operator) starts it again.
    Stop(Ending),
    /// Prints the token.
    Token,
    /// Replaces the token; sessions and calls of the old one end at once.
    Rotate,
    /// Cancels a call; its caller is told that the operator did it.
    Cancel(Cancel),
    /// Refuses new calls until `resume`.
    Pause(Which),
    /// Serves calls again.
    Resume(Which),
    /// Prints the sidecar's log, both generations.
    Logs(Reading),
    /// Prints the audit records, both generations.
    Audit(Reading),
}

/// Which sidecar is meant.
#[derive(clap::Args)]
pub struct Which {
    /// The sidecar's process id, when several run.
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// Machine-readable output.
    #[arg(long)]
    json: bool,
}

/// How a sidecar is to end.
#[derive(clap::Args)]
pub struct Ending {
    #[command(flatten)]
    which: Which,
    /// Seconds that calls in flight may still take.
    #[arg(long, value_name = "SECONDS", default_value_t = app::DEFAULT_GRACE.as_secs())]
    grace: u64,
}

/// Which call to cancel.
#[derive(clap::Args)]
pub struct Cancel {
    /// The call's id, or a unique beginning of it.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    id: Option<String>,
    /// All calls in flight.
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    which: Which,
}

/// How a file is to be read.
#[derive(clap::Args)]
pub struct Reading {
    /// Goes on as the file grows.
    #[arg(short, long)]
    follow: bool,
    #[command(flatten)]
    which: Which,
}

/// Does one command; its exit code, or why it failed.
///
/// # Errors
/// For people.
pub async fn perform(command: Operate, dir: Option<AgentDir>, env: &Env) -> Result<u8, String> {
    let grace_ms = |ending: &Ending| ending.grace.saturating_mul(1000);
    match command {
        Operate::Status(which) => show_status(which, dir).await,
        Operate::Restart(ending) => {
            let request = Request::Restart { grace_ms: grace_ms(&ending) };
            ask(&ending.which, dir, request).await
        }
        Operate::Stop(ending) => {
            let request = Request::Stop { grace_ms: grace_ms(&ending) };
            ask(&ending.which, dir, request).await
        }
        Operate::Cancel(cancel) => {
            let request = cancel.id.map_or(Request::CancelAll, |id| Request::Cancel { id });
            ask(&cancel.which, dir, request).await
        }
        Operate::Pause(which) => ask(&which, dir, Request::Pause).await,
        Operate::Resume(which) => ask(&which, dir, Request::Resume).await,
        Operate::Token => {
            let dir = agent_dir(dir, env).await?;
            if !dir.config_file().exists() {
                let file = dir.config_file().display();
                return Err(format!("there is no token yet: {file} is made when the bridge first starts"));
            }
            let (config, warnings) = match store::load_readonly(&dir) {
                Ok(found) => found,
                Err(error) => return Ok(refused(&error)),
            };
            warnings.iter().for_each(|warning| out::note(warning));
            let token = config
                .token
                .ok_or("the config holds no token yet: it is made when the bridge first starts")?;
            print(token.expose())
        }
        Operate::Rotate => rotate(&agent_dir(dir, env).await?).await,
        Operate::Logs(reading) => {
            let (dir, port) = match choose(&reading.which, dir.as_ref()).await {
                Ok(found) => {
                    let root = found.agent_dir.clone();
                    (AgentDir::new(root, env), Some(found.port))
                }
                // A sidecar that is gone has left its log.
                Err(error) => {
                    let dir = agent_dir(dir, env).await.map_err(|_| error)?;
                    let port = crate::state::remembered_port(&dir);
                    (dir, port)
                }
            };
            let file = port.map(|port| dir.stderr(port)).filter(|file| file.exists());
            show_file(&file.unwrap_or_else(|| dir.start_stderr()), reading.follow).await
        }
        Operate::Audit(reading) => show_file(agent_dir(dir, env).await?.audit_file(), reading.follow).await,
    }
}

/// Prints a result.
///
/// # Errors
/// When stdout does not take it.
pub fn print(text: &str) -> Result<u8, String> {
    out::print(text).map(|()| 0).map_err(|error| format!("cannot write the output: {error}"))
}

/// Prints a value for machines.
pub fn print_json(value: &impl serde::Serialize) -> Result<u8, String> {
    let json = serde_json::to_string(value).map_err(|error| error.to_string())?;
    print(&text::clean_json(&json))
}

/// All sidecars of this user that answered, of `dir` if one was named; those that did not are named.
async fn running(dir: Option<&AgentDir>) -> Result<Vec<(PathBuf, Status)>, String> {
    let found = control::find().await.map_err(|error| format!("cannot look for sidecars: {error}"))?;
    let mut running = Vec::new();
    for Found { socket, status } in found {
        match status {
            Ok(status) => running.push((socket, status)),
            Err(error) => {
                out::note(&format!("the sidecar behind {} does not answer: {error}", socket.display()))
            }
        }
    }
    if let Some(dir) = dir {
        let root = dir.root().display().to_string();
        running.retain(|(_, status)| status.agent_dir == root);
    }
    Ok(running)
}

/// The one sidecar that is meant.
pub async fn choose(which: &Which, dir: Option<&AgentDir>) -> Result<Status, String> {
    choose_with_socket(which, dir).await.map(|(_, status)| status)
}

async fn choose_with_socket(which: &Which, dir: Option<&AgentDir>) -> Result<(PathBuf, Status), String> {
    let mut running = running(dir).await?;
    if let Some(pid) = which.pid {
        running.retain(|(_, status)| status.pid == pid || status.host.pid == pid);
    }
    match running.len() {
        1 => Ok(running.remove(0)),
        0 => Err(match (which.pid, dir) {
            (Some(pid), _) => format!("no sidecar has pid {pid}"),
            (None, Some(dir)) => format!("no sidecar runs for {}", dir.root().display()),
            (None, None) => "no sidecar runs; a host with the shim starts one, or try `a2mcp demo`".into(),
        }),
        _ => {
            let list: Vec<String> = running.iter().map(|(_, status)| brief(status)).collect();
            Err(format!("several sidecars run; choose one with --pid: {}", list.join(" | ")))
        }
    }
}

fn brief(status: &Status) -> String {
    format!("pid {} {} {} ({})", status.pid, status.url, status.host.name, status.agent_dir)
}

/// The agent directory that is meant (contract 16).
pub async fn agent_dir(given: Option<AgentDir>, env: &Env) -> Result<AgentDir, String> {
    if let Some(dir) = given {
        return Ok(dir);
    }
    let mut roots: Vec<String> =
        running(None).await.unwrap_or_default().into_iter().map(|(_, status)| status.agent_dir).collect();
    roots.dedup();
    if let [root] = &roots[..] {
        return Ok(AgentDir::new(root, env));
    }
    let root =
        AgentDir::default_root(env).ok_or("no home directory is known; name one with --agent-dir DIR")?;
    Ok(AgentDir::new(root, env))
}

/// URL and token of the sidecar that runs here.
///
/// # Errors
/// When there is none, or several, or its config cannot be read.
pub async fn local_bridge(given: Option<AgentDir>, env: &Env) -> Result<(String, Token), String> {
    let which = Which { pid: None, json: false };
    let status = choose(&which, given.as_ref()).await?;
    let dir = given.unwrap_or_else(|| AgentDir::new(&status.agent_dir, env));
    let (config, _) = store::load_readonly(&dir).map_err(|error| error.to_string())?;
    Ok((status.url, config.token.ok_or("the config holds no token")?))
}

async fn show_status(which: Which, dir: Option<AgentDir>) -> Result<u8, String> {
    if which.pid.is_none() && !which.json {
        let running = running(dir.as_ref()).await?;
        if running.len() > 1 {
            let screens: Vec<String> = running.iter().map(|(_, status)| status::render(status)).collect();
            return print(&screens.join("\n\n"));
        }
    }
    let status = choose(&which, dir.as_ref()).await?;
    if which.json {
        return print_json(&status);
    }
    print(&status::render(&status))
}

async fn ask(which: &Which, dir: Option<AgentDir>, request: Request) -> Result<u8, String> {
    let (socket, _) = choose_with_socket(which, dir.as_ref()).await?;
    match control::ask(&socket, &request).await {
        Ok(Reply::Ok(value)) if which.json => print_json(&value),
        Ok(Reply::Ok(value)) => print(value.as_str().unwrap_or("done")),
        Ok(Reply::Error(error)) => Err(error),
        Err(error) => Err(format!("the sidecar did not answer: {error}")),
    }
}

async fn rotate(dir: &AgentDir) -> Result<u8, String> {
    let rotated = match app::rotate(dir, None).await {
        Ok(rotated) => rotated,
        Err(error) => return Ok(refused(&error)),
    };
    let audit = Audit::start(dir.audit_file(), &TaskTracker::new());
    audit.write(Record::action("token", None, r#"{"action":"rotate"}"#, false)).await;
    out::note(&format!("the token was replaced; {} running sidecar(s) took it at once", rotated.told));
    let printed = print(rotated.token.expose())?;
    if rotated.silent.is_empty() {
        return Ok(printed);
    }
    Err(format!(
        "these did not take the new token and still serve the old one: {}",
        rotated.silent.join(", ")
    ))
}

/// Says why a config cannot be used; the exit code for that.
fn refused(error: &ConfigError) -> u8 {
    out::note(&with_causes(error));
    match error {
        ConfigError::Locked { .. } => exit::FAILED,
        _ => exit::REFUSED,
    }
}

/// Prints a file and its older generation, and goes on with it if wanted.
async fn show_file(path: &Path, follow: bool) -> Result<u8, String> {
    let mut old = path.as_os_str().to_owned();
    old.push(".1");
    let mut text = std::fs::read(&old).unwrap_or_default();
    let mut file =
        std::fs::File::open(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    file.read_to_end(&mut text).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let write = |text: &[u8]| {
        out::print_foreign(&String::from_utf8_lossy(text))
            .map_err(|error| format!("cannot write the output: {error}"))
    };
    write(&text)?;
    if !follow {
        return Ok(0);
    }
    loop {
        tokio::time::sleep(FOLLOW).await;
        text.clear();
        file.read_to_end(&mut text).map_err(|error| error.to_string())?;
        if text.is_empty() && has_moved_on(&file, path) {
            file = std::fs::File::open(path).map_err(|error| error.to_string())?;
        } else if !text.is_empty() {
            write(&text)?;
        } else if file.metadata().is_ok_and(|meta| file.stream_position().is_ok_and(|at| at > meta.len())) {
            file.seek(SeekFrom::Start(0)).map_err(|error| error.to_string())?;
        }
    }
}

/// Whether `path` is another file by now: the one at hand was rotated away.
fn has_moved_on(file: &std::fs::File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(open), Ok(now)) => (open.dev(), open.ino()) != (now.dev(), now.ino()),
        _ => false,
    }
}
