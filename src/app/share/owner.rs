//! The owner of the share: the one task that starts its file server in the keeper, starts it again when
//! it dies, and ends it.
//!
//! ```text
//! (none) ──share──▶ running ──dies──▶ down ──after a pause──▶ running
//!    ▲                 │               └──five times in 30 s──▶ failed
//!    └── ttl expired, stop, replaced, bridge stopped ◀── from any of them
//! ```
//!
//! A later sidecar takes over what the keeper runs ([`super::takeover`]). Time is the wall clock's, so that
//! a suspended machine's share ends when it was said to.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use super::launch::{Told, last_words, random};
use super::tools::aside;
use super::upload::remove_part;
use super::{Phase, Share};
use crate::app::keeping::ChildEvent;
use crate::app::{Core, now_ms};
use crate::audit::Record;
use crate::frame::messages::Level;
use crate::keeper::wire::{ChildSignal, ChildStatus};
use crate::process::{self, Identity};
use crate::supervise::{Next, Restarts, chance};
use crate::text::clean;
use crate::xfer::upstream::Upstream;
use crate::xfer::{Installed, ROUTE, Terms, dufs, path, place};

/// What the keeper knows the file server by.
pub(super) const PURPOSE: &str = "xfer";

/// SIGKILL follows SIGTERM after this.
pub(super) const KILL_AFTER: Duration = Duration::from_secs(2);
/// How long its end is waited for.
const GONE: Duration = Duration::from_secs(4);
/// How often at least the wall clock is looked at while something is shared.
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
    /// Another file or folder may be in the place of the one that is served: serve that.
    Renew { answer: oneshot::Sender<()> },
    /// The bridge ends.
    End { answer: oneshot::Sender<()> },
}

/// Why the share ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Why<'a> {
    Replaced,
    Expired,
    BridgeStopped,
    /// What is at its path may not be served, for this reason.
    Unservable(&'a str),
    /// `xfer_stop` of this session.
    Stopped(&'a str),
}

/// See the module.
pub(super) struct Owner {
    pub(super) core: Rc<Core>,
    pub(super) events: mpsc::Receiver<ChildEvent>,
    pub(super) child: Option<(u64, Identity)>,
    /// The last one that served the share, ended or not: its note says when the share is over.
    pub(super) last: Option<u64>,
    pub(super) password: String,
    pub(super) restarts: Restarts,
    pub(super) again_at: Option<Instant>,
}

impl Core {
    /// Has the share serve what is at its path now, when that is another than what is served.
    pub(super) async fn renew_share(&self) {
        let (answer, answered) = oneshot::channel();
        if self.shares.commands.send(Command::Renew { answer }).await.is_ok() {
            let _ = answered.await;
        }
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
    pub(super) fn share(
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
            has_strays: Cell::new(false),
            is_inherited: false,
            has_ended: Cell::new(false),
            held: Cell::default(),
        }
    }

    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        loop {
            let share = self.core.shares.current.borrow().clone();
            let again_at = self.again_at;
            let pause = share.as_ref().map_or(LOOK, |share| look(&share.terms, now_ms()));
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
                    Some(Command::Renew { answer }) => {
                        self.renew().await;
                        let _ = answer.send(());
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
                () = tokio::time::sleep(pause), if share.is_some() => {}
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
        let child = self.launch(&share, &password, false).await?;
        let replaced = self.core.shares.current.borrow().is_some();
        if replaced {
            self.close(Why::Replaced).await;
        }
        let note = self.told(&share, &password, true).note();
        let _ = self.core.keeping.set_note(child.0, note).await;
        self.child = Some(child);
        self.last = Some(child.0);
        self.password = password;
        self.restarts = Restarts::default();
        self.again_at = None;
        share.phase.replace(Phase::Running);
        self.core.shares.current.replace(Some(share.clone()));
        self.core.shares.unservable.take();
        self.audit(&share.terms, share.port.get(), "share", None, Some(sid)).await;
        self.core.save_share().await;
        Ok((share, replaced))
    }

    pub(super) fn hear(&mut self, event: ChildEvent) {
        let is_ours = |ended: &ChildStatus| self.child.is_some_and(|(child, _)| child == ended.child);
        match event {
            ChildEvent::Ended(ended) if is_ours(&ended) => {
                self.child = None;
                self.died(&last_words(&ended));
            }
            ChildEvent::Ended(_) => {}
            ChildEvent::KeeperLost => {
                self.last = None;
                if let Some(share) = self.lost() {
                    tracing::warn!(port = share.port.get(), "the file server died with the keeper");
                    // Whoever runs next gets other credentials: see `start_again`.
                    self.password.clear();
                    self.again_at = None;
                }
            }
            ChildEvent::KeeperBack(children) => {
                // What was to end while the keeper could not be reached.
                let current = self.core.share_terms();
                for child in children.iter().filter(|child| child.exit.is_none()) {
                    let is_current = |told: &Told| current.as_ref().is_some_and(|it| it.is_same(&told.terms));
                    if Told::read(&child.note).is_some_and(|told| told.has_begun && !is_current(&told)) {
                        self.end_stranger(child.child);
                    }
                }
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

    /// A file server that is confined to what is no longer at the path starts anew, for what is there now.
    async fn renew(&mut self) {
        let Some(share) = self.core.shares.current.borrow().clone() else { return };
        // Of many requests that saw it, the first has it done.
        if !share.is_another(share.inode().await) {
            return;
        }
        let Some((id, process)) = self.child.take() else { return };
        tracing::info!("what is shared was replaced; the file server starts anew for it");
        // Whoever asks meanwhile sees it, too, and waits for its turn here.
        let _ = self.core.keeping.signal(id, ChildSignal::Term, Some(KILL_AFTER)).await;
        if timeout(GONE, process::ended(process)).await.is_err() {
            tracing::warn!(pid = process.pid, "the file server does not end");
        }
        self.start_again().await;
    }

    async fn start_again(&mut self) {
        self.again_at = None;
        let Some(mut share) = self.core.shares.current.borrow().clone() else { return };
        if share.terms.is_over(now_ms()) {
            return;
        }
        if let Err(reason) = self.core.judge_again(&share.terms).await {
            return self.close(Why::Unservable(&reason)).await;
        }
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
        match self.launch(&share, &password, true).await {
            Ok(child) => {
                self.child = Some(child);
                self.last = Some(child.0);
                // It follows links when it starts, and that was a moment after the first look.
                if let Err(reason) = self.core.judge_again(&share.terms).await {
                    return self.close(Why::Unservable(&reason)).await;
                }
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
        share.has_ended.set(true);
        self.again_at = None;
        let unservable = match why {
            Why::Unservable(reason) => {
                let path = share.terms.shown_path();
                tracing::warn!(path, reason, "the share ends");
                Some((path, reason.to_owned()))
            }
            _ => None,
        };
        self.core.shares.unservable.replace(unservable);
        // A sidecar that comes while we wait finds it over, whether its file server runs or not.
        if let Some(id) = self.last.take() {
            let _ = self.core.keeping.set_note(id, Told::over(&share).note()).await;
        }
        let child = self.child.take();
        if child.is_none() {
            self.core.save_share().await;
        }
        if let Some((id, process)) = child {
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
            Why::Unservable(reason) => ("close", Some(reason), None),
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
        let (at, of) = (root.clone(), id.clone());
        let missing = aside(move || parts.iter().filter(|path| !remove_part(&at, &of, path)).count()).await;
        // Some were moved with their folder, or nobody here knows them.
        let has_strays = share.is_inherited || share.has_strays.get() || missing > 0;
        if has_strays && !share.terms.is_file {
            self.core.tasks.spawn_local(async move {
                let prefix = path::part_prefix(&id);
                let shown = root.display().to_string();
                if !aside(move || place::sweep(&root, &prefix)).await {
                    tracing::warn!(root = shown, "too many files to look for what cut uploads left");
                }
            });
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

/// From `now_ms` until the wall clock is to be looked at again. Never for the whole rest of a share: the
/// clock may be set meanwhile, and stands still for our timers in a suspend.
fn look(terms: &Terms, now_ms: u64) -> Duration {
    LOOK.min(Duration::from_millis(terms.expires_ms.saturating_sub(now_ms)))
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_of_the_wall_clock_ends_a_share_at_the_next_look() {
        const HOUR: u64 = 3_600_000;
        let begun = 1_800_000_000_000;
        let terms = Terms {
            id: "0123abcd".into(),
            path: "/shared".into(),
            is_file: false,
            started_ms: begun,
            expires_ms: begun + HOUR,
            ttl_seconds: 3600,
        };
        // Seen at most so long after a jump, however far the end was.
        assert_eq!(look(&terms, begun), LOOK);
        assert!(!terms.is_over(begun + HOUR - 1));
        assert_eq!(look(&terms, begun + HOUR - 1), Duration::from_millis(1));
        for after in [begun + HOUR, begun + 24 * HOUR, u64::MAX] {
            assert!(terms.is_over(after));
            assert_eq!(look(&terms, after), Duration::ZERO);
        }
        // Set back: it ends at the time it was said to, not at once and not never.
        for before in [begun - HOUR, 0] {
            assert!(!terms.is_over(before));
            assert_eq!(look(&terms, before), LOOK);
        }
    }
}
