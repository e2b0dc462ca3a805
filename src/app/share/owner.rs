//! The owner of the share: the one task that starts its file server in the keeper, starts it again when
//! it dies, and ends it.
//!
//! ```text
//! (none) ──share──▶ running ──dies──▶ down ──after a pause──▶ running
//!    ▲                 │               └──five times in 30 s──▶ failed
//!    └── ttl expired, stop, replaced, bridge stopped ◀── from any of them
//! ```
//!
//! A later sidecar takes over what the keeper runs, from the note it was started with; what the keeper
//! lost with its own life is started again from the state file, with other credentials. Time is the
//! wall clock's, so that a suspended machine's share ends when it was said to.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use hyper::{Method, StatusCode};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use super::tools::aside;
use super::{Phase, Share};
use crate::app::keeping::{ChildEvent, Followed};
use crate::app::{Core, now_ms};
use crate::audit::Record;
use crate::config::Token;
use crate::frame::messages::Level;
use crate::install::Tool;
use crate::keeper::wire::{ChildSignal, ChildStatus, Exit, Note, Spawn};
use crate::process::{self, Identity};
use crate::rundir;
use crate::supervise::{Next, Restarts, chance};
use crate::text::{clean, with_causes};
use crate::xfer::upstream::{Sent, Upstream};
use crate::xfer::{Installed, ROUTE, Terms, dufs, path, place};

/// What the keeper knows the file server by.
const PURPOSE: &str = "xfer";

/// The format of a note.
const NOTE_VERSION: u32 = 1;
/// How long a file server may take until it answers.
const READY: Duration = Duration::from_secs(10);
const READY_STEP: Duration = Duration::from_millis(5);
/// So many ports are tried when others are faster.
const PORT_TRIES: usize = 5;
/// SIGKILL follows SIGTERM after this.
const KILL_AFTER: Duration = Duration::from_secs(2);
/// How long its end is waited for.
const GONE: Duration = Duration::from_secs(4);
/// How often the wall clock is looked at while something is shared.
const LOOK: Duration = Duration::from_secs(2);
/// How long uploads may take to notice that the file server is gone.
const UPLOADS_END: Duration = Duration::from_secs(1);

/// What the owner is asked.
pub(super) enum Command {
    /// Share this, in the place of what is shared.
    Share {
        terms: Terms,
        program: PathBuf,
        installed: Option<Installed>,
        sid: String,
        answer: oneshot::Sender<Result<(Rc<Share>, bool), String>>,
    },
    /// End the share; the path of what was shared.
    Stop { sid: String, answer: oneshot::Sender<Option<String>> },
    /// The bridge ends.
    End { answer: oneshot::Sender<()> },
}

/// What a later sidecar is told of a file server.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Told {
    v: u32,
    terms: Terms,
    port: u16,
    password: String,
    program: PathBuf,
    #[serde(default)]
    installed: Option<Installed>,
    /// The share is over; if it still runs, it is to end.
    #[serde(default)]
    is_over: bool,
}

/// Why the share ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Why<'a> {
    Replaced,
    Expired,
    BridgeStopped,
    /// `xfer_stop` of this session.
    Stopped(&'a str),
}

pub(super) struct Owner {
    core: Rc<Core>,
    events: mpsc::Receiver<ChildEvent>,
    child: Option<(u64, Identity)>,
    password: String,
    restarts: Restarts,
    again_at: Option<Instant>,
}

impl Core {
    /// Takes over what an earlier sidecar shared, and becomes the owner of shares. `saved` is what the
    /// state file says was shared, and whether by this host; of another's only the traces are cared for.
    pub(in crate::app) fn keep_share(self: &Rc<Self>, saved: Option<(Terms, bool)>) {
        let Some(commands) = self.shares.asked.take() else { return };
        let Followed { inherited, events } = self.keeping.follow(PURPOSE);
        let mut owner = Owner {
            core: self.clone(),
            events,
            child: None,
            password: String::new(),
            restarts: Restarts::default(),
            again_at: None,
        };
        let was_inherited = owner.inherit(&inherited);
        if let Ok(dir) = rundir::open() {
            let current = self.share_terms();
            dufs::sweep(&dir, self.address.port(), current.as_ref().map(|terms| terms.id.as_str()));
        }
        match saved {
            Some((terms, true)) if !was_inherited && !terms.is_over(now_ms()) => {
                owner.revive(terms);
            }
            // Nobody serves it any more; what was cut of uploads goes.
            Some((terms, _)) if self.share_terms().is_none_or(|current| current.id != terms.id) => {
                tokio::task::spawn_blocking(move || {
                    place::sweep(&terms.path, &path::part_prefix(&terms.id));
                });
            }
            _ => {}
        }
        tokio::task::spawn_local(owner.run(commands));
    }

    /// Ends the share for good, because the bridge ends.
    pub(in crate::app) async fn end_share(&self) {
        let (answer, answered) = oneshot::channel();
        if self.shares.commands.send(Command::End { answer }).await.is_ok() {
            let _ = answered.await;
        }
    }
}

impl Owner {
    /// Takes over the newest of the children; whether there was any that is known.
    fn inherit(&mut self, children: &[ChildStatus]) -> bool {
        let read = |child: &ChildStatus| {
            let told: Told = serde_json::from_str(&child.note.0).ok()?;
            (told.v == NOTE_VERSION).then_some(told)
        };
        let newest = children.iter().rev().find_map(|child| Some((child.clone(), read(child)?)));
        for child in children.iter().filter(|child| child.exit.is_none()) {
            let is_newest =
                newest.as_ref().is_some_and(|(newest, told)| newest.child == child.child && !told.is_over);
            if !is_newest {
                let (core, id) = (self.core.clone(), child.child);
                self.core.tasks.spawn_local(async move {
                    let _ = core.keeping.signal(id, ChildSignal::Term, Some(KILL_AFTER)).await;
                });
            }
        }
        let Some((child, told)) = newest else { return false };
        if told.is_over {
            return true;
        }
        let share = self.share(told.terms, told.program, told.installed, &told.password, told.port);
        let share = Share { is_inherited: true, ..share };
        self.password = told.password;
        if child.exit.is_none() {
            self.child = Some((child.child, child.process));
            share.phase.replace(Phase::Running);
            // Its config file may still be there: the earlier one may have died before it was ready.
            let _ = std::fs::remove_file(self.files(&share.terms.id).1);
        } else {
            self.again_at = Some(Instant::now());
        }
        tracing::info!(port = told.port, "the share is taken over");
        self.core.shares.current.replace(Some(Rc::new(share)));
        true
    }

    /// The keeper died with the earlier sidecar: the share goes on with other credentials.
    fn revive(&mut self, terms: Terms) {
        let share = Share { is_inherited: true, ..self.share(terms, PathBuf::new(), None, "", 0) };
        self.core.shares.current.replace(Some(Rc::new(share)));
        self.again_at = Some(Instant::now());
    }

    fn share(
        &self,
        terms: Terms,
        program: PathBuf,
        installed: Option<Installed>,
        password: &str,
        port: u16,
    ) -> Share {
        let upstream = Upstream::new(self.files(&terms.id).0, &dufs::authorization(password));
        Share {
            terms,
            port: Cell::new(port),
            phase: RefCell::new(Phase::Down),
            upstream: RefCell::new(upstream),
            program,
            installed,
            uploading: RefCell::default(),
            parts: RefCell::default(),
            is_inherited: false,
        }
    }

    /// The private socket and the config file of a share.
    fn files(&self, id: &str) -> (PathBuf, PathBuf) {
        let dir = rundir::open().unwrap_or_default();
        dufs::files(&dir, self.core.address.port(), id)
    }

    async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        loop {
            let share = self.core.shares.current.borrow().clone();
            let again_at = self.again_at;
            tokio::select! {
                command = commands.recv() => match command {
                    None => return,
                    Some(Command::Share { terms, program, installed, sid, answer }) => {
                        let opened = self.open(terms, program, installed, &sid).await;
                        let _ = answer.send(opened);
                    }
                    Some(Command::Stop { sid, answer }) => {
                        let path = share.map(|share| share.terms.shown_path());
                        self.close(Why::Stopped(&sid)).await;
                        let _ = answer.send(path);
                    }
                    Some(Command::End { answer }) => {
                        self.close(Why::BridgeStopped).await;
                        let _ = answer.send(());
                        return;
                    }
                },
                event = self.events.recv() => match event {
                    None => return,
                    Some(event) => self.hear(event),
                },
                () = sleep_until(again_at), if again_at.is_some() => self.start_again().await,
                () = tokio::time::sleep(LOOK), if share.is_some() => {}
            }
            let is_over = |share: &Rc<Share>| share.terms.is_over(now_ms());
            if self.core.shares.current.borrow().as_ref().is_some_and(is_over) {
                self.close(Why::Expired).await;
            }
        }
    }

    /// Opens a share, then closes the one before: a file server that cannot start replaces nothing.
    async fn open(
        &mut self,
        terms: Terms,
        program: PathBuf,
        installed: Option<Installed>,
        sid: &str,
    ) -> Result<(Rc<Share>, bool), String> {
        let password = random()?;
        let share = Rc::new(self.share(terms, program, installed, &password, 0));
        let child = self.launch(&share, &password).await?;
        let replaced = self.core.shares.current.borrow().is_some();
        if replaced {
            self.close(Why::Replaced).await;
        }
        self.child = Some(child);
        self.password = password;
        self.restarts = Restarts::default();
        self.again_at = None;
        share.phase.replace(Phase::Running);
        self.core.shares.current.replace(Some(share.clone()));
        self.audit(&share.terms, share.port.get(), "share", None, Some(sid)).await;
        self.core.save_share().await;
        Ok((share, replaced))
    }

    /// Starts a file server for the share and waits until it answers.
    async fn launch(&mut self, share: &Share, password: &str) -> Result<(u64, Identity), String> {
        let (socket, config) = self.files(&share.terms.id);
        let mut wanted = Some(share.port.get()).filter(|port| *port != 0);
        let mut tries = 0;
        loop {
            tries += 1;
            let port = dufs::free_port(wanted.take())
                .map_err(|error| format!("no loopback port is free: {error}"))?;
            let run = dufs::Run { root: &share.terms.path, port, socket: &socket, password };
            run.write(&config).map_err(|error| format!("cannot write {}: {error}", config.display()))?;
            let told = Told {
                v: NOTE_VERSION,
                terms: share.terms.clone(),
                port,
                password: password.to_owned(),
                program: share.program.clone(),
                installed: share.installed.clone(),
                is_over: false,
            };
            let spawn = Spawn {
                purpose: PURPOSE.into(),
                program: share.program.to_string_lossy().into_owned(),
                args: vec!["-c".into(), config.to_string_lossy().into_owned()],
                dir: None,
                remove_env: Tool::Dufs.scrubbed_env().iter().map(|&prefix| prefix.into()).collect(),
                env: Vec::new(),
                note: Note(serde_json::to_string(&told).unwrap_or_default()),
            };
            let launched = match self.core.keeping.spawn(spawn).await {
                Ok(child) => self.ready(share, &child).await.map(|()| (child.child, child.process)),
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
            let health = format!("{ROUTE}__dufs__/health");
            let asked = upstream.ask(Method::GET, &health, Default::default(), Sent::Nothing);
            if let Ok(Ok(reply)) = timeout(READY, asked).await
                && reply.status() == StatusCode::OK
            {
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

    fn hear(&mut self, event: ChildEvent) {
        let is_ours = |ended: &ChildStatus| self.child.is_some_and(|(child, _)| child == ended.child);
        match event {
            ChildEvent::Ended(ended) if is_ours(&ended) => {
                self.child = None;
                self.died(&last_words(&ended));
            }
            ChildEvent::Ended(_) => {}
            ChildEvent::KeeperLost => {
                if let Some(share) = self.lost() {
                    tracing::warn!(port = share.port.get(), "the file server died with the keeper");
                    // Whoever runs next gets other credentials: see `start_again`.
                    self.password.clear();
                    self.again_at = None;
                }
            }
            ChildEvent::KeeperBack(children) => {
                let known =
                    |child: &&ChildStatus| self.child.is_some_and(|(_, process)| process == child.process);
                match children.iter().find(known) {
                    Some(child) if child.exit.is_none() => {}
                    Some(child) => {
                        let words = last_words(child);
                        self.child = None;
                        self.died(&words);
                    }
                    None => {
                        if self.lost().is_some() {
                            self.again_at = Some(Instant::now());
                        }
                    }
                }
            }
        }
    }

    /// The file server is gone without having died by itself.
    fn lost(&mut self) -> Option<Rc<Share>> {
        self.child = None;
        let share = self.core.shares.current.borrow().clone()?;
        if matches!(*share.phase.borrow(), Phase::Failed(_)) {
            return None;
        }
        share.phase.replace(Phase::Down);
        Some(share)
    }

    /// It died by itself, or did not even start: again after a while, or never.
    fn died(&mut self, reason: &str) {
        let Some(share) = self.core.shares.current.borrow().clone() else { return };
        match self.restarts.ended(std::time::Instant::now(), chance()) {
            Next::After(pause) => {
                tracing::warn!(reason, ?pause, "the file server has died and starts again");
                share.phase.replace(Phase::Down);
                self.again_at = Some(Instant::now() + pause);
            }
            Next::Failed => {
                share.phase.replace(Phase::Failed(reason.to_owned()));
                self.again_at = None;
                self.core.notify(
                    Level::Error,
                    format!(
                        "a2mcp: the file server of the share of {} keeps dying ({reason}); share it again once that is mended",
                        clean(&share.terms.shown_path(), 200)
                    ),
                );
            }
        }
    }

    async fn start_again(&mut self) {
        self.again_at = None;
        let Some(share) = self.core.shares.current.borrow().clone() else { return };
        let mut share = share;
        if share.program.as_os_str().is_empty() {
            // From the state file, which does not name the program.
            match self.core.file_server(None).await {
                Err(reason) => return self.died(&reason),
                Ok((program, installed)) => {
                    let again = Share {
                        is_inherited: true,
                        ..self.share(share.terms.clone(), program, installed, "", share.port.get())
                    };
                    share = Rc::new(again);
                    self.core.shares.current.replace(Some(share.clone()));
                }
            }
        }
        if self.password.is_empty() {
            match random() {
                Ok(password) => self.password = password,
                Err(reason) => return self.died(&reason),
            }
            let socket = self.files(&share.terms.id).0;
            share.upstream.replace(Upstream::new(socket, &dufs::authorization(&self.password)));
        }
        let password = self.password.clone();
        match self.launch(&share, &password).await {
            Ok(child) => {
                self.child = Some(child);
                share.phase.replace(Phase::Running);
                tracing::info!(port = share.port.get(), "the file server runs again");
                self.core.save_share().await;
            }
            // Without a keeper there is nothing to count: its return starts it.
            Err(_) if self.core.keeping.keeper().is_none() => {}
            Err(reason) => self.died(&reason),
        }
    }

    /// Ends the share, if there is one: from now on nothing is there; then the file server goes, then
    /// what is left of cut uploads, then it is on record.
    async fn close(&mut self, why: Why<'_>) {
        let Some(share) = self.core.shares.current.take() else { return };
        self.again_at = None;
        let child = self.child.take();
        if let Some((id, process)) = child {
            let told = Told {
                v: NOTE_VERSION,
                terms: share.terms.clone(),
                port: share.port.get(),
                password: String::new(),
                program: PathBuf::new(),
                installed: None,
                is_over: true,
            };
            // A sidecar that comes while we wait finds it over.
            let note = Note(serde_json::to_string(&told).unwrap_or_default());
            let _ = self.core.keeping.set_note(id, note).await;
            let _ = self.core.keeping.signal(id, ChildSignal::Term, Some(KILL_AFTER)).await;
            if timeout(GONE, process::ended(process)).await.is_err() {
                tracing::warn!(pid = process.pid, "the file server does not end");
            }
        }
        let (socket, config) = self.files(&share.terms.id);
        let _ = std::fs::remove_file(socket);
        let _ = std::fs::remove_file(config);
        self.remove_parts(&share).await;
        let (action, reason, sid) = match why {
            Why::Replaced => ("close", Some("replaced"), None),
            Why::Expired => ("close", Some("ttl expired"), None),
            Why::BridgeStopped => ("close", Some("bridge stopped"), None),
            Why::Stopped(sid) => ("stop", None, Some(sid)),
        };
        self.audit(&share.terms, share.port.get(), action, reason, sid).await;
        self.core.save_share().await;
    }

    /// What came of cut uploads is gone with the share.
    async fn remove_parts(&self, share: &Rc<Share>) {
        let _ = timeout(UPLOADS_END, async {
            while !share.uploading.borrow().is_empty() {
                self.core.call_ended.notified().await;
            }
        })
        .await;
        let mut parts = share.parts.take();
        parts.extend(share.uploading.borrow().iter().cloned());
        let (root, id) = (share.terms.path.clone(), share.terms.id.clone());
        if share.is_inherited && !share.terms.is_file {
            self.core.tasks.spawn_local(async move {
                let prefix = path::part_prefix(&id);
                let shown = root.display().to_string();
                if !aside(move || place::sweep(&root, &prefix)).await {
                    tracing::warn!(root = shown, "too many files to look for what cut uploads left");
                }
            });
        } else if !parts.is_empty() {
            aside(move || remove(&root, &id, parts)).await;
        }
    }

    async fn audit(&self, terms: &Terms, port: u16, action: &str, why: Option<&str>, sid: Option<&str>) {
        let mut args = serde_json::json!({
            "action": action,
            "path": terms.shown_path(),
            "port": port,
            "ttlSeconds": terms.ttl_seconds,
            "route": ROUTE,
        });
        if let Some(why) = why {
            args["why"] = why.into();
        }
        self.core.audit.write(Record::action("xfer", sid, &args.to_string(), false)).await;
    }
}

fn remove(root: &Path, id: &str, files: impl IntoIterator<Item = path::RoutePath>) {
    for file in files {
        let part = file.part(id);
        if let (Ok(place), Some((_, name))) = (place::Place::open(root, &file, false), part.split()) {
            place.remove(name);
        }
    }
}

/// What a file server that ended says of it.
fn last_words(ended: &ChildStatus) -> String {
    let how = match ended.exit {
        Some(Exit::Code(code)) => format!("exit code {code}"),
        Some(Exit::Signal(signal)) => format!("signal {signal}"),
        None => "it ended".into(),
    };
    match ended.last_words.trim() {
        "" => format!("the file server ended: {how}"),
        // What it says when it is ready is no reason.
        words if words.starts_with("Listening on") => format!("the file server ended: {how}"),
        words => format!("{words} (the file server ended: {how})"),
    }
}

fn random() -> Result<String, String> {
    match Token::generate() {
        Ok(token) => Ok(token.expose().to_owned()),
        Err(error) => Err(format!("no random bytes: {error}")),
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
