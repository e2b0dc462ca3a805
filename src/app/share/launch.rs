//! A file server from its config file to its first answer, and what a later sidecar is told of it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper::{Method, StatusCode};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, timeout};

use super::owner::{Owner, PURPOSE};
use super::{Inode, Share};
use crate::app::keeping::ChildEvent;
use crate::config::Token;
use crate::confine::{self, ConfineArgs};
use crate::install::Tool;
use crate::keeper::wire::{ChildSignal, ChildStatus, Exit, Note, Spawn};
use crate::process::{self, Identity};
use crate::rundir;
use crate::text::with_causes;
use crate::xfer::upstream::Sent;
use crate::xfer::{Installed, Terms, dufs};

/// The format of a note.
const NOTE_VERSION: u32 = 1;
/// How long a file server may take until it answers.
const READY: Duration = Duration::from_secs(10);
const READY_STEP: Duration = Duration::from_millis(5);
/// So many ports are tried when others are faster.
const PORT_TRIES: usize = 5;

/// What a later sidecar is told of a file server.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Told {
    v: u32,
    pub(super) terms: Terms,
    pub(super) port: u16,
    pub(super) password: String,
    pub(super) program: PathBuf,
    #[serde(default)]
    pub(super) installed: Option<Installed>,
    /// See [`Share::held`].
    #[serde(default)]
    pub(super) held: Option<Inode>,
    /// Its caller was told that it serves: until then it does not count.
    #[serde(default)]
    pub(super) has_begun: bool,
    /// The share is over; if it still runs, it is to end.
    #[serde(default)]
    pub(super) is_over: bool,
}

impl Told {
    /// Of a share that is over: whatever still runs of it is to end.
    pub(super) fn over(share: &Share) -> Self {
        let terms = share.terms.clone();
        let (port, password, program) = (share.port.get(), String::new(), PathBuf::new());
        Self {
            v: NOTE_VERSION,
            terms,
            port,
            password,
            program,
            installed: None,
            held: None,
            has_begun: true,
            is_over: true,
        }
    }

    /// What an earlier sidecar said; `None` when it is not understood.
    pub(super) fn read(note: &Note) -> Option<Self> {
        let told: Self = serde_json::from_str(&note.0).ok()?;
        (told.v == NOTE_VERSION).then_some(told)
    }

    pub(super) fn note(&self) -> Note {
        Note(serde_json::to_string(self).unwrap_or_default())
    }
}

impl Owner {
    /// The private socket and the config file of a share.
    pub(super) fn files(&self, id: &str) -> (PathBuf, PathBuf) {
        let dir = rundir::open().unwrap_or_default();
        dufs::files(&dir, self.core.address.port(), id)
    }

    /// What a later sidecar is told of the share's file server.
    pub(super) fn told(&self, share: &Share, password: &str, has_begun: bool) -> Told {
        Told {
            v: NOTE_VERSION,
            terms: share.terms.clone(),
            port: share.port.get(),
            password: password.to_owned(),
            program: share.program.clone(),
            installed: share.installed.clone(),
            held: share.held.get(),
            has_begun,
            is_over: false,
        }
    }

    /// Starts a file server for the share and waits until it answers. `has_begun`: it served before.
    pub(super) async fn launch(
        &mut self,
        share: &Share,
        password: &str,
        has_begun: bool,
    ) -> Result<(u64, Identity), String> {
        let (socket, config) = self.files(&share.terms.id);
        let mut wanted = Some(share.port.get()).filter(|port| *port != 0);
        let mut tries = 0;
        loop {
            tries += 1;
            let port = dufs::free_port(wanted.take())
                .map_err(|error| format!("no loopback port is free: {error}"))?;
            let run = dufs::Run { root: &share.terms.path, port, socket: &socket, password };
            run.write(&config).map_err(|error| format!("cannot write {}: {error}", config.display()))?;
            // One that was killed left it, and it may make its socket but not remove another.
            let _ = std::fs::remove_file(&socket);
            let is_confined = confine::is_possible(&share.program);
            let held = if is_confined { share.inode().await } else { None };
            let (program, args) = command(share, &config, is_confined);
            let told = Told { port, held, ..self.told(share, password, has_begun) };
            let spawn = Spawn {
                purpose: PURPOSE.into(),
                program,
                args,
                dir: None,
                remove_env: Tool::Dufs.scrubbed_env().iter().map(|&prefix| prefix.into()).collect(),
                env: Vec::new(),
                note: told.note(),
            };
            let launched = match self.core.keeping.spawn(spawn).await {
                Ok(child) => {
                    let ready = self.ready(share, &child).await.map(|()| (child.child, child.process));
                    if ready.is_err() && !has_begun {
                        // It never began: no later sidecar makes anything of it.
                        let told = Told { has_begun: false, ..Told::over(share) };
                        let _ = self.core.keeping.set_note(child.child, told.note()).await;
                    }
                    ready
                }
                Err(error) => Err(format!("the file server cannot be started: {}", with_causes(&error))),
            };
            let _ = std::fs::remove_file(&config);
            match launched {
                Err(reason) if reason.contains(dufs::PORT_TAKEN) && tries < PORT_TRIES => {}
                Err(reason) => {
                    let _ = std::fs::remove_file(&socket);
                    return Err(reason);
                }
                Ok(child) => {
                    share.port.set(port);
                    share.held.set(held);
                    return Ok(child);
                }
            }
        }
    }

    /// Waits until a file server answers; its own words when it ends instead.
    async fn ready(&mut self, share: &Share, child: &ChildStatus) -> Result<(), String> {
        let until = Instant::now() + READY;
        loop {
            let upstream = share.upstream.borrow().clone();
            let asked = upstream.ask(Method::GET, dufs::HEALTH, Default::default(), Sent::Nothing);
            if let Ok(Ok(reply)) = timeout(READY, asked).await
                && reply.status() == StatusCode::OK
            {
                // The directory is ours alone; so is the socket.
                let (socket, _) = self.files(&share.terms.id);
                let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
                if let Err(error) = std::fs::set_permissions(&socket, mode) {
                    tracing::warn!(%error, "the file server's socket keeps its mode");
                }
                return Ok(());
            }
            match timeout(READY_STEP, self.events.recv()).await {
                Ok(Some(ChildEvent::Ended(ended))) if ended.child == child.child => {
                    return Err(last_words(&ended));
                }
                Ok(Some(ChildEvent::KeeperLost)) => {
                    self.hear(ChildEvent::KeeperLost);
                    return Err("the keeper died while the file server was starting; try again".into());
                }
                Ok(Some(event)) => self.hear(event),
                Ok(None) => return Err("the bridge is stopping".into()),
                Err(_) if Instant::now() > until => {
                    let _ = self.core.keeping.signal(child.child, ChildSignal::Kill, None).await;
                    let seconds = READY.as_secs();
                    return Err(format!("the file server did not answer within {seconds} s"));
                }
                Err(_) => {}
            }
        }
    }
}

/// The program and its arguments, by way of what confines it.
fn command(share: &Share, config: &Path, is_confined: bool) -> (String, Vec<String>) {
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let (program, config_file) = (text(&share.program), text(config));
    let args = vec!["-c".to_owned(), config_file.clone()];
    if !is_confined {
        return (program, args);
    }
    let sockets = text(config.parent().unwrap_or(Path::new("/")));
    let args = ConfineArgs::of(&text(&share.terms.path), &config_file, &sockets, &program, &args);
    // The keeper may be of another build, and so may the file on disk.
    (text(&process::this_build_from_elsewhere()), args)
}

/// What a file server that ended says of it.
pub(super) fn last_words(ended: &ChildStatus) -> String {
    let how = match ended.exit {
        Some(Exit::Code(code)) => format!("exit code {code}"),
        Some(Exit::Signal(signal)) => format!("signal {signal}"),
        None => "it ended".into(),
    };
    let password = Told::read(&ended.note).map(|told| told.password).unwrap_or_default();
    let words = without_password(ended.last_words.trim(), &password);
    match words.as_str() {
        "" => format!("the file server ended: {how}"),
        // What it says when it is ready is no reason.
        words if words.starts_with("Listening on") => format!("the file server ended: {how}"),
        words => format!("{words} (the file server ended: {how})"),
    }
}

/// What a file server said, with `***` for its password; only the end of its words is kept, so they may
/// begin within it.
fn without_password(words: &str, password: &str) -> String {
    const SHORTEST: usize = 4;
    if password.is_empty() {
        return words.to_owned();
    }
    let pair = dufs::authorization(password);
    let pair = pair.trim_start_matches("Basic ");
    let mut words = words.to_owned();
    for secret in [password, pair] {
        words = words.replace(secret, "***");
        let mut tails = (1..secret.len()).filter_map(|at| secret.get(at..));
        if let Some(tail) = tails.find(|tail| tail.len() >= SHORTEST && words.starts_with(tail)) {
            words.replace_range(..tail.len(), "***");
        }
        let words_end = words.trim_end_matches('…').len();
        let mut heads = (SHORTEST..secret.len()).rev().filter_map(|to| secret.get(..to));
        if let Some(head) = heads.find(|head| words[..words_end].ends_with(head)) {
            words.replace_range(words_end - head.len()..words_end, "***");
        }
    }
    words
}

/// A new password.
pub(super) fn random() -> Result<String, String> {
    match Token::generate() {
        Ok(token) => Ok(token.expose().to_owned()),
        Err(error) => Err(format!("no random bytes: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_servers_words_hold_no_password() {
        let password = "0123456789abcdefghijklmnopqrstuv";
        let pair = dufs::authorization(password);
        for (words, clean) in [
            (format!("bad auth a2mcp:{password}@/ in {password}"), "bad auth a2mcp:***@/ in ***"),
            (format!("{}@/:rw is bad", &password[10..]), "***@/:rw is bad"),
            (format!("bad a2mcp:{}…", &password[..20]), "bad a2mcp:***…"),
            (format!("sent {pair}"), "sent Basic ***"),
            ("nothing".into(), "nothing"),
        ] {
            assert_eq!(without_password(&words, password), clean);
        }
        assert_eq!(without_password("words", ""), "words");
    }
}
