//! The operator's commands: each finds the sidecar it means and asks it over its control socket.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::time::Duration;

use clap::Subcommand;
use tokio_util::task::TaskTracker;

use super::target::{Target, dir_of};
use super::{exit, out};
use crate::app::operate as app;
use crate::audit::{Audit, Record};
use crate::config::{ConfigError, Env, store};
use crate::control::status;
use crate::control::{self, Reply, Request};
use crate::text::{self, with_causes};

/// How often the tunnel is looked at while it opens.
const TUNNEL_LOOK: Duration = Duration::from_millis(200);
/// So many looks in a row may stay unanswered.
const TUNNEL_SILENCE: u32 = 25;
/// How often a followed file is looked at.
const FOLLOW: Duration = Duration::from_millis(200);

/// Commands that ask a running sidecar, or read what it left.
#[derive(Subcommand)]
pub enum Operate {
    /// Shows what a sidecar says of itself: endpoint, host, sessions, calls.
    Status(Show),
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
    Pause(Show),
    /// Serves calls again.
    Resume(Show),
    /// Opens a public name for the bridge (a quick tunnel of cloudflared), or closes it.
    Tunnel(Tunnel),
    /// Prints the sidecar's log, both generations.
    Logs(Reading),
    /// Prints the audit records, both generations.
    Audit(Reading),
}

/// How the answer is to look.
#[derive(clap::Args)]
pub struct Show {
    /// Machine-readable output.
    #[arg(long)]
    json: bool,
}

/// How a sidecar is to end.
#[derive(clap::Args)]
pub struct Ending {
    #[command(flatten)]
    show: Show,
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
    show: Show,
}

/// What is to become of the tunnel.
#[derive(clap::Args)]
pub struct Tunnel {
    /// `stop` closes it; nothing opens it, or verifies the open one anew.
    #[arg(value_enum, value_name = "stop")]
    action: Option<TunnelAction>,
    #[command(flatten)]
    show: Show,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum TunnelAction {
    Stop,
}

/// How a file is to be read.
#[derive(clap::Args)]
pub struct Reading {
    /// Goes on as the file grows.
    #[arg(short, long)]
    follow: bool,
    #[command(flatten)]
    show: Show,
}

/// Does one command; its exit code, or why it failed.
///
/// # Errors
/// For people.
pub async fn perform(command: Operate, target: Target, env: &Env) -> Result<u8, String> {
    let grace_ms = |ending: &Ending| ending.grace.saturating_mul(1000);
    match command {
        Operate::Status(show) => show_status(&show, &target).await,
        Operate::Restart(ending) => {
            let request = Request::Restart { grace_ms: grace_ms(&ending) };
            ask(&ending.show, &target, request).await
        }
        Operate::Stop(ending) => {
            let request = Request::Stop { grace_ms: grace_ms(&ending) };
            ask(&ending.show, &target, request).await
        }
        Operate::Cancel(cancel) => {
            let request = cancel.id.map_or(Request::CancelAll, |id| Request::Cancel { id });
            ask(&cancel.show, &target, request).await
        }
        Operate::Pause(show) => ask(&show, &target, Request::Pause).await,
        Operate::Resume(show) => ask(&show, &target, Request::Resume).await,
        Operate::Tunnel(Tunnel { action: Some(TunnelAction::Stop), show }) => {
            ask(&show, &target, Request::TunnelStop).await
        }
        Operate::Tunnel(Tunnel { action: None, show }) => open_tunnel(&show, &target).await,
        Operate::Token => {
            let dir = target.agent_dir(env).await?;
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
        Operate::Rotate => rotate(&target, env).await,
        Operate::Logs(reading) => {
            let (dir, port) = match target.sidecar().await {
                Ok((_, status)) => (dir_of(&status, env), Some(status.port)),
                // A sidecar that is gone has left its log.
                Err(error) => {
                    let dir = target.agent_dir(env).await.map_err(|_| error)?;
                    let port = crate::state::remembered_port(&dir);
                    (dir, port)
                }
            };
            let file = port.map(|port| dir.stderr(port)).filter(|file| file.exists());
            let file = file.unwrap_or_else(|| dir.start_stderr());
            let way_out = "a bridge that once ran here has left it; name its directory with --agent-dir DIR";
            show_file(&file, reading.follow, way_out).await
        }
        Operate::Audit(reading) => {
            let way_out = "no call was recorded there yet; or the bridge had another agent directory (--agent-dir \
                           DIR) or another A2MCP_AUDIT: set that here too while it does not run";
            show_file(target.files(env).await?.audit_file(), reading.follow, way_out).await
        }
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

async fn show_status(show: &Show, target: &Target) -> Result<u8, String> {
    if show.json {
        return print_json(&target.sidecar().await?.1);
    }
    let running = target.running().await?;
    if running.answered.is_empty() {
        return Err(target.none(&running));
    }
    let screens: Vec<String> = running.answered.iter().map(|(_, status)| status::render(status)).collect();
    print(&screens.join("\n\n"))
}

async fn ask(show: &Show, target: &Target, request: Request) -> Result<u8, String> {
    let (socket, _) = target.sidecar().await?;
    match control::ask(&socket, &request).await {
        Ok(Reply::Ok(value)) if show.json => print_json(&value),
        Ok(Reply::Ok(value)) => print(value.as_str().unwrap_or("done")),
        Ok(Reply::Error(error)) => Err(error),
        Err(error) => Err(format!("the sidecar did not answer: {error}")),
    }
}

/// Opens the tunnel and shows how far it is until the outcome is clear.
async fn open_tunnel(show: &Show, target: &Target) -> Result<u8, String> {
    let (socket, _) = target.sidecar().await?;
    let mut progress = out::Progress::default();
    let mut request = Request::Tunnel;
    let mut silent = 0;
    let tunnel: status::Tunnel = loop {
        match control::ask(&socket, &request).await {
            Ok(Reply::Ok(value)) => {
                let tunnel: status::Tunnel =
                    serde_json::from_value(value).map_err(|error| error.to_string())?;
                if !tunnel.pending {
                    break tunnel;
                }
                // Without what changes by itself: a line for each change of state.
                let still = status::Tunnel { open_ms: None, verified_ago_ms: None, ..tunnel };
                progress.show(&status::tunnel(&still));
                silent = 0;
            }
            Ok(Reply::Error(error)) => return Err(error),
            // It may be making way for the next one; the tunnel goes on.
            Err(_) if silent < TUNNEL_SILENCE && matches!(request, Request::TunnelStatus) => silent += 1,
            Err(error) => return Err(format!("the sidecar did not answer: {error}")),
        }
        request = Request::TunnelStatus;
        tokio::time::sleep(TUNNEL_LOOK).await;
    };
    drop(progress);
    let printed = match (&tunnel.url, show.json) {
        (_, true) => print_json(&tunnel)?,
        (Some(url), false) => print(url)?,
        (None, false) => return Err(format!("no tunnel: {}", status::tunnel(&tunnel))),
    };
    if tunnel.url.is_none() {
        return Ok(exit::FAILED);
    }
    out::note(&format!(
        "the tunnel is {}. Whoever has the token reaches this session's tools, and the files of an open share below \
         /xfer/, at that address from the internet; `a2mcp tunnel stop` closes it",
        match &tunnel.why {
            Some(why) => format!("{}: {why}", tunnel.state),
            None => "open and verified".into(),
        }
    ));
    Ok(printed)
}

/// A running sidecar replaces the token itself, in the file that it reads; without one it is done here.
async fn rotate(target: &Target, env: &Env) -> Result<u8, String> {
    let found = control::find().await;
    let running = target.pick(found.iter().flatten());
    let dir = target.dir_among(&running, env)?;
    let root = dir.root().display().to_string();
    let of_dir = running.iter().find(|(_, status)| status.agent_dir == root).map(|(socket, _)| *socket);
    let answer = match of_dir {
        Some(socket) => control::ask(socket, &Request::Rotate).await.ok(),
        None => None,
    };
    let rotated = match answer {
        Some(Reply::Ok(value)) => serde_json::from_value(value).map_err(|error| error.to_string())?,
        Some(Reply::Error(error)) => return Err(error),
        // There is none, or it has just ended, or hangs; whether it did it or not, this does.
        None => {
            // They are looked for after the token was replaced: one that starts later reads the new one.
            let rotated = match app::rotate(&dir, None, control::find()).await {
                Ok(rotated) => rotated,
                Err(error) => return Ok(refused(&error)),
            };
            let audit = Audit::start(dir.audit_file(), &TaskTracker::new());
            audit.write(Record::action("token", None, r#"{"action":"rotate"}"#, false)).await;
            rotated
        }
    };
    out::note(&format!("the token was replaced; {} running sidecar(s) took it at once", rotated.told));
    let printed = print(&rotated.token)?;
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

/// Prints a file and its older generation, and goes on with it if wanted. What to do when there is no
/// such file is `way_out`.
async fn show_file(path: &Path, follow: bool, way_out: &str) -> Result<u8, String> {
    let unreadable = |error: std::io::Error| {
        let way_out = match error.kind() {
            std::io::ErrorKind::NotFound => format!("; {way_out}"),
            _ => String::new(),
        };
        format!("cannot read {}: {error}{way_out}", path.display())
    };
    let mut old = path.as_os_str().to_owned();
    old.push(".1");
    let mut text = std::fs::read(&old).unwrap_or_default();
    let mut file = std::fs::File::open(path).map_err(unreadable)?;
    file.read_to_end(&mut text).map_err(unreadable)?;
    let write = |text: &[u8]| {
        out::print_foreign(&String::from_utf8_lossy(text))
            .map_err(|error| format!("cannot write the output: {error}"))
    };
    if !follow {
        write(&text)?;
        return Ok(0);
    }
    loop {
        // A line that is still being written waits for its end: half a character is none.
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        write(&text[..whole])?;
        text.drain(..whole);
        tokio::time::sleep(FOLLOW).await;
        let is_new = file.read_to_end(&mut text).map_err(|error| error.to_string())? > 0;
        if is_new {
            continue;
        }
        if has_moved_on(&file, path) {
            write(&std::mem::take(&mut text))?;
            file = std::fs::File::open(path).map_err(|error| error.to_string())?;
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
