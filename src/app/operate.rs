//! What the operator asks for, whether through the control socket or as `/a2mcp …` in the host.

use std::ffi::OsStr;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use super::exchange::Cancel;
use super::{Core, Phase, VERSION, now_ms, tunnel};
use crate::audit::Record;
use crate::config::{AgentDir, ConfigError, Token, store};
use serde::{Deserialize, Serialize};

use crate::control::status::{self, Status};
use crate::control::{self, Found, Reply, Request};
use crate::frame::messages::{Level, Notice};
use crate::http::{Endpoint as _, Health};
use crate::process::Identity;
use crate::text::with_causes;
use crate::{process, state};

/// How long calls may still take at a restart or stop, unless the operator says otherwise.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(10);
/// How long the next binary may take to say that it can run.
const CHECK_LIMIT: Duration = Duration::from_secs(10);

/// How long a command typed in the host waits for the tunnel; the host itself waits 120 s.
const TUNNEL_WAIT: Duration = Duration::from_secs(100);
/// How long it is waited for after that; a download alone may take ten minutes.
const TUNNEL_LATER: Duration = Duration::from_secs(15 * 60);

/// For so long a sidecar that could not be told of a new token may be ending, or starting …
const SETTLE: Duration = Duration::from_secs(2);
/// … and so often it is looked at.
const SETTLE_LOOK: Duration = Duration::from_millis(100);

const USAGE: &str =
    "/a2mcp: status | token | rotate | restart | stop | cancel ID|--all | pause | resume | tunnel [stop]";

/// Does what a control request asks.
pub async fn perform(core: Rc<Core>, request: Request) -> Reply {
    match request {
        Request::Status => match serde_json::to_value(core.status().await) {
            Ok(status) => Reply::Ok(status),
            Err(error) => Reply::Error(error.to_string()),
        },
        Request::Rotate => match rotate(&core.dir, Some(&core), control::find()).await {
            Ok(rotated) => match serde_json::to_value(rotated) {
                Ok(rotated) => Reply::Ok(rotated),
                Err(error) => Reply::Error(error.to_string()),
            },
            Err(error) => Reply::Error(with_causes(&error)),
        },
        Request::ReloadToken { salt, hash } => match aside(&core.dir, store::load).await {
            Ok(loaded) if state::keyed_hash(&salt, &loaded.token) == hash => {
                core.take_token(loaded.token).await;
                done("the new token is in force")
            }
            Ok(_) => Reply::Error(format!("it reads another config, {}", core.dir.config_file().display())),
            Err(error) => Reply::Error(with_causes(&error)),
        },
        Request::Restart { grace_ms } => match core.may_restart().await {
            Err(why) => Reply::Error(format!("not restarted: {why}")),
            Ok(()) => {
                core.wishes.grace.set(Duration::from_millis(grace_ms));
                core.wishes.restart.cancel();
                done("restarting")
            }
        },
        Request::Stop { grace_ms } => {
            core.wishes.grace.set(Duration::from_millis(grace_ms));
            core.wishes.stop.cancel();
            done("stopping")
        }
        Request::Cancel { id } => {
            let calls: Vec<String> =
                core.ledger.borrow().running().into_iter().filter(|call| call.starts_with(&id)).collect();
            match calls.len() {
                _ if id.is_empty() => Reply::Error("which call? `a2mcp status` shows their ids".into()),
                0 => Reply::Error("no call in flight has that id; `a2mcp status` shows them".into()),
                1 => core.operator_cancels(&calls).await,
                count => Reply::Error(format!("{count} calls begin with that id; give more of it")),
            }
        }
        Request::CancelAll => {
            let calls = core.ledger.borrow().running();
            core.operator_cancels(&calls).await
        }
        Request::Pause => core.pause(true).await,
        Request::Resume => core.pause(false).await,
        Request::Tunnel if core.phase.get() == Phase::Stopping => {
            Reply::Error("the bridge is stopping; no tunnel is opened".into())
        }
        Request::Tunnel => match core.open_tunnel().await {
            Ok(()) => core.tunnel_reply(),
            Err(why) => Reply::Error(why),
        },
        Request::TunnelStop => {
            done(if core.close_tunnel().await { "the tunnel is closed" } else { "there was no tunnel" })
        }
        Request::TunnelStatus => core.tunnel_reply(),
    }
}

/// Works on the config file beside the one thread everything else runs on: it may wait for a lock.
pub(super) async fn aside<T: Send + 'static>(
    dir: &AgentDir,
    work: impl FnOnce(&AgentDir) -> Result<T, ConfigError> + Send + 'static,
) -> Result<T, ConfigError> {
    let dir = dir.clone();
    match tokio::task::spawn_blocking(move || work(&dir)).await {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

fn done(text: &str) -> Reply {
    Reply::Ok(serde_json::Value::from(text))
}

/// Does what was typed after `/a2mcp`.
pub async fn host_command(core: &Rc<Core>, argv: &[String]) -> Notice {
    let words: Vec<&str> = argv.iter().map(String::as_str).collect();
    let grace_ms = DEFAULT_GRACE.as_millis() as u64;
    let request = match words[..] {
        [] | ["status"] => return info(status::render(&core.status().await)),
        ["token"] => return info(format!("the token of {} is {}", core.url(), core.token().expose())),
        ["rotate"] => {
            return match rotate(&core.dir, Some(core), control::find()).await {
                Ok(rotated) => rotated.notice(),
                Err(error) => Notice { text: with_causes(&error), level: Level::Error },
            };
        }
        ["restart"] => Request::Restart { grace_ms },
        ["stop"] => Request::Stop { grace_ms },
        ["cancel", "--all"] => Request::CancelAll,
        ["cancel", id] => Request::Cancel { id: id.to_owned() },
        ["tunnel"] => return core.tunnel_command().await,
        ["tunnel", "stop"] => Request::TunnelStop,
        ["pause"] => Request::Pause,
        ["resume"] => Request::Resume,
        _ => return Notice { text: USAGE.into(), level: Level::Warning },
    };
    match perform(core.clone(), request).await {
        Reply::Ok(value) => info(value.as_str().unwrap_or("done").to_owned()),
        Reply::Error(text) => Notice { text, level: Level::Error },
    }
}

fn info(text: String) -> Notice {
    Notice { text, level: Level::Info }
}

/// What a rotation reached.
#[derive(Debug, Serialize, Deserialize)]
pub struct Rotated {
    /// The new token.
    pub token: String,
    /// Running sidecars that took it at once.
    pub told: usize,
    /// Running sidecars that did not take it, each named for people.
    pub silent: Vec<String>,
}

impl Rotated {
    fn notice(&self) -> Notice {
        let prefix: String = self.token.chars().take(6).collect();
        let text = format!("the token was replaced; the new one begins with {prefix}");
        if self.silent.is_empty() {
            return info(format!("{text}; clients need it now (/a2mcp token)"));
        }
        Notice {
            text: format!(
                "{text}. These did not take it and still serve the old one: {}",
                self.silent.join(", ")
            ),
            level: Level::Warning,
        }
    }
}

/// Replaces the token of an agent directory and tells every running sidecar of it; `own` is the
/// sidecar this runs in, where it acts at once; `find` is [`control::find`], which a hung sidecar may
/// hold up. Whoever did not take it is named: by its control socket, or by the state it has in the
/// directory.
///
/// # Errors
/// When the config cannot be read or written; nothing has changed then.
pub async fn rotate(
    dir: &AgentDir,
    own: Option<&Rc<Core>>,
    find: impl Future<Output = io::Result<Vec<Found>>>,
) -> Result<Rotated, ConfigError> {
    let token = aside(dir, store::rotate).await?;
    let mut rotated = Rotated { token: token.expose().to_owned(), told: 0, silent: Vec::new() };
    let salt = uuid::Uuid::new_v4().simple().to_string();
    let hash = state::keyed_hash(&salt, &token);
    let reload = Request::ReloadToken { salt, hash };
    let mut met = vec![std::process::id()];
    if let Some(core) = own {
        core.audit.write(Record::action("token", None, r#"{"action":"rotate"}"#, false)).await;
        core.take_token(token).await;
        rotated.told += 1;
    }
    let root = dir.root().display().to_string();
    let found = find.await.unwrap_or_else(|error| {
        rotated.silent.push(format!("whatever runs (cannot look for sidecars: {error})"));
        Vec::new()
    });
    for found in found {
        let socket = found.socket.display().to_string();
        match found.status {
            Ok(status) if status.agent_dir != root || status.pid == std::process::id() => {}
            Ok(status) => {
                met.push(status.pid);
                let why = match control::ask(&found.socket, &reload).await {
                    Ok(Reply::Ok(_)) => {
                        rotated.told += 1;
                        continue;
                    }
                    Ok(Reply::Error(why)) => why,
                    Err(error) => match settled(status.pid, &reload).await {
                        Settled::Ended => continue,
                        Settled::Told => {
                            rotated.told += 1;
                            continue;
                        }
                        Settled::Not => error.to_string(),
                    },
                };
                let who = format!("the sidecar with pid {} on port {}", status.pid, status.port);
                rotated.silent.push(format!("{who} ({why})"));
            }
            // Each sidecar of this directory has its state in it: another's.
            Err(_) if found.port().is_some_and(|port| !dir.state_file(port).exists()) => {}
            // Whose it is cannot be known: better named than forgotten.
            Err(_) => {
                let state = found.port().and_then(|port| state::read(&dir.state_file(port)).ok().flatten());
                met.extend(state.map(|state| state.sidecar.pid));
                rotated.silent.push(format!("the sidecar behind {socket}"));
            }
        }
    }
    for state in state::all(dir) {
        let pid = state.sidecar.pid;
        if !state.sidecar.is_alive() || met.contains(&pid) {
            continue;
        }
        match settled(pid, &reload).await {
            Settled::Ended => {}
            Settled::Told => rotated.told += 1,
            Settled::Not => {
                rotated.silent.push(format!("the sidecar with pid {pid} (its control socket is gone)"));
            }
        }
    }
    Ok(rotated)
}

/// How a sidecar fares that could not be told of the new token.
enum Settled {
    /// It has ended: the next one reads the new token.
    Ended,
    /// It was just starting, and has been told.
    Told,
    /// It goes on with the old one.
    Not,
}

async fn settled(pid: u32, reload: &Request) -> Settled {
    let Some(process) = Identity::of(pid) else { return Settled::Ended };
    let settles = async {
        loop {
            tokio::time::sleep(SETTLE_LOOK).await;
            if !process.is_alive() {
                return Settled::Ended;
            }
            for found in control::find().await.unwrap_or_default() {
                if found.status.is_ok_and(|status| status.pid == pid)
                    && matches!(control::ask(&found.socket, reload).await, Ok(Reply::Ok(_)))
                {
                    return Settled::Told;
                }
            }
        }
    };
    tokio::time::timeout(SETTLE, settles).await.unwrap_or(Settled::Not)
}

impl Core {
    /// A token that was replaced between our look at the config and the moment we could be told of it.
    pub(super) async fn catch_up_with_rotations(&self) {
        let now = aside(&self.dir, store::load_readonly).await;
        // A config that is wrong by now is the next sidecar's trouble.
        if let Some(token) = now.ok().and_then(|(config, _)| config.token) {
            self.take_token(token).await;
        }
    }

    /// The new token is in force: sessions and calls of the old one end.
    async fn take_token(&self, token: Token) {
        if *self.token.borrow() == token {
            return;
        }
        *self.token_mark.borrow_mut() = state::keyed_hash(&self.hello.instance, &token);
        self.token.replace(token);
        let sids: Vec<String> =
            self.sessions.borrow().list().iter().map(|session| session.id.clone()).collect();
        self.sessions.borrow_mut().clear();
        let calls = self.ledger.borrow().running();
        self.cancel_calls(&calls, Cancel::SessionEnded);
        self.cut_transfers();
        for sid in sids {
            self.session_gone(&sid);
        }
        self.save().await;
        tracing::info!("the token was replaced; sessions, calls and transfers of the old one ended");
    }

    /// Whether the next sidecar could start: config, state and the binary now on disk.
    async fn may_restart(&self) -> Result<(), String> {
        store::load_readonly(&self.dir).map_err(|error| with_causes(&error))?;
        let state = self.dir.state_file(self.address.port());
        let args = [
            OsStr::new("sidecar"),
            OsStr::new("--check"),
            OsStr::new("--agent-dir"),
            self.dir.root().as_os_str(),
            OsStr::new("--state"),
            state.as_os_str(),
        ];
        process::try_run(&process::own_binary(), &args, CHECK_LIMIT).await
    }

    fn tunnel_reply(&self) -> Reply {
        match serde_json::to_value(self.tunnel_shown().status()) {
            Ok(status) => Reply::Ok(status),
            Err(error) => Reply::Error(error.to_string()),
        }
    }

    /// `/a2mcp tunnel`: answered when it is clear how it went.
    async fn tunnel_command(self: &Rc<Self>) -> Notice {
        if let Err(text) = self.open_tunnel().await {
            return Notice { text, level: Level::Error };
        }
        let shown = self.tunnel_settled(TUNNEL_WAIT, true).await;
        if shown.is_open() {
            let level = if shown.why.is_none() { Level::Info } else { Level::Warning };
            return Notice { text: tunnel::opened(&shown, self.tool_count()), level };
        }
        let text = format!("tunnel: {}", status::tunnel(&shown.status()));
        if shown.has_failed() {
            return Notice { text, level: Level::Error };
        }
        if shown.is_closed() {
            return info(text);
        }
        // A long download, most likely. Its success is told to everybody anyway.
        let core = self.clone();
        self.tasks.spawn_local(async move {
            let shown = core.tunnel_settled(TUNNEL_LATER, false).await;
            if shown.has_failed() {
                core.notify(Level::Error, format!("a2mcp: tunnel: {}", status::tunnel(&shown.status())));
            }
        });
        info(format!("{text}; a notice follows"))
    }

    async fn operator_cancels(&self, calls: &[String]) -> Reply {
        let count = self.cancel_calls(calls, Cancel::Operator);
        self.audit_operator(&format!(r#"{{"action":"cancel","calls":{count}}}"#)).await;
        done(&format!("{count} call(s) cancelled"))
    }

    async fn pause(&self, paused: bool) -> Reply {
        self.paused.set(paused);
        // The next sidecar of this host goes on with it.
        self.sessions.borrow_mut().save_again();
        self.save().await;
        let action = if paused { "pause" } else { "resume" };
        self.audit_operator(&format!(r#"{{"action":"{action}"}}"#)).await;
        done(if paused { "paused: new calls are refused until resume" } else { "serving calls again" })
    }

    async fn audit_operator(&self, args: &str) {
        self.audit.write(Record::action("operator", None, args, false)).await;
    }

    /// Everything a person wants to know, asked for now.
    pub async fn status(&self) -> Status {
        let keeper = self.keeping.status().await;
        let now = now_ms();
        let sessions = self.sessions.borrow();
        let ledger = self.ledger.borrow();
        let catalogue = self.known_catalogue();
        let short = |sid: &str| sid.chars().take(8).collect::<String>();
        Status {
            version: VERSION.into(),
            pid: std::process::id(),
            url: self.url(),
            port: self.address.port(),
            token_prefix: self.token.borrow().prefix().into(),
            agent_dir: self.dir.root().display().to_string(),
            config_file: self.dir.config_file().display().to_string(),
            uptime_ms: self.started.elapsed().as_millis() as u64,
            health: match (self.phase.get(), self.health()) {
                (Phase::Restarting, _) => "restarting".into(),
                (_, Health::Ready) => "ready".into(),
                (_, Health::Unready(reason)) => reason.into(),
            },
            paused: self.paused.get(),
            host: status::Host {
                name: self.hello.host.name.clone(),
                version: self.hello.host.version.clone(),
                pid: self.host.pid,
                main: self.main.get(),
                llm: self.host_llm.get().map(|(state, denied)| status::HostLlm { state, denied }),
                lag_ms: self.link.lag().map(|lag| lag.as_millis() as u64),
                heard_ago_ms: self.link.heard_ago().as_millis() as u64,
                server: self.server.borrow().clone(),
            },
            keeper,
            share: self.share_status(),
            tunnel: Some(self.tunnel_shown().status()),
            tools: catalogue.as_ref().map(|catalogue| catalogue.names.len()),
            odd_names: catalogue.map(|catalogue| catalogue.odd_names.clone()).unwrap_or_default(),
            sessions: sessions
                .list()
                .into_iter()
                .map(|session| status::Session {
                    id: short(&session.id),
                    client: format!("{} {}", session.client_name, session.client_version).trim().to_owned(),
                    protocol: session.protocol.clone(),
                    seen_ago_ms: now.saturating_sub(session.seen_ms),
                })
                .collect(),
            calls: ledger
                .list()
                .into_iter()
                .map(|call| status::Call {
                    id: call.call_id.clone(),
                    tool: call.tool.clone(),
                    age_ms: now.saturating_sub(call.started_ms),
                    phase: call.phase.word().into(),
                    session: short(&call.sid),
                    client: sessions
                        .get(&call.sid)
                        .map(|session| session.client_name.clone())
                        .unwrap_or_default(),
                })
                .collect(),
            served: ledger.served(),
            audit_file: self.dir.audit_file().display().to_string(),
            audit_failures: self.audit.failures(),
            unauthorized: self.unauthorized.get(),
            bad_frames: self.link.bad_frames(),
            resident_bytes: process::resident_bytes(std::process::id()),
            notes: self.notes(),
        }
    }

    /// What the config on disk says that acts only at the host's next start.
    fn notes(&self) -> Vec<String> {
        match store::load_readonly(&self.dir) {
            Err(error) => {
                vec![format!("the config would be refused at the next restart: {}", with_causes(&error))]
            }
            Ok((config, _)) => {
                let changed = [
                    ("port", self.hello.port.unwrap_or(config.port) != self.config.port),
                    ("host", config.host != self.config.host),
                ];
                let changed = changed.into_iter().filter(|(_, changed)| *changed);
                changed
                    .map(|(field, _)| {
                        format!("the changed \"{field}\" of the config acts at the host's next start")
                    })
                    .collect()
            }
        }
    }
}
