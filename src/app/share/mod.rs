//! The share (contract 5): what is served on `/xfer/` now, and the three tools that open, show and close
//! it. At most one at a time.
//!
//! [`owner`] is the one task that starts, watches and ends its file server; [`route`] answers `/xfer/`,
//! [`archive`] the requests for one, [`upload`] those that write; [`takeover`] finds what an earlier
//! sidecar shared. They and the tools read the [`Share`] of the moment.

mod archive;
mod launch;
mod owner;
mod route;
mod takeover;
mod tools;
mod upload;

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::{Core, now_ms};
use crate::control::status;
use crate::text::rfc3339;
use crate::xfer::path::RoutePath;
use crate::xfer::upstream::Upstream;
use crate::xfer::{Installed, Terms};

use owner::Command;
use tools::aside;
pub(super) use tools::{FILE_THREADS, OWN_TOOLS, OwnTool};

/// Requests to the owner that wait.
const MAX_COMMANDS: usize = 16;

/// How its file server is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    /// It answers.
    Running,
    /// It has died, or is just starting again.
    Down,
    /// It died too often; why, for people.
    Failed(String),
}

/// The share of the moment.
pub(super) struct Share {
    terms: Terms,
    port: Cell<u16>,
    phase: RefCell<Phase>,
    upstream: RefCell<Rc<Upstream>>,
    /// The file server's program.
    program: PathBuf,
    installed: Option<Installed>,
    /// Files that are being uploaded, each by where it really is.
    uploading: RefCell<HashSet<RoutePath>>,
    /// Those whose upload was cut: what came of them is kept.
    parts: RefCell<HashSet<RoutePath>>,
    /// What was kept of some upload is no longer where it was: somebody moved its folder.
    has_strays: Cell<bool>,
    /// An earlier sidecar served it: there may be parts that nobody here knows of.
    is_inherited: bool,
    /// It is over: what is still in flight of it is cut.
    has_ended: Cell<bool>,
    /// What was at the path when its file server started, if that is confined to it: it serves nothing
    /// that is put there later.
    held: Cell<Option<Inode>>,
}

/// A file or folder, whatever its name: device and number. Names nothing else while a file server is
/// confined to it.
type Inode = (u64, u64);

impl Share {
    /// What is at the path now; `None` when it is no longer a file or a folder as it was shared, or a link
    /// leads there: the file server would follow one.
    async fn inode(&self) -> Option<Inode> {
        use std::os::unix::fs::MetadataExt as _;
        let (path, is_file) = (self.terms.path.clone(), self.terms.is_file);
        aside(move || {
            let found = path.symlink_metadata().ok()?;
            let is_alike = if is_file { found.is_file() } else { found.is_dir() };
            let is_there = is_alike && path.canonicalize().is_ok_and(|leads_to| leads_to == path);
            is_there.then(|| (found.dev(), found.ino()))
        })
        .await
    }

    /// Whether what was found at the path took the place of what its file server is confined to.
    fn is_another(&self, found: Option<Inode>) -> bool {
        self.held.get().is_some_and(|held| found.is_some_and(|found| found != held))
    }
}

/// What the core has of shares.
pub(super) struct Shares {
    current: RefCell<Option<Rc<Share>>>,
    /// Path and reason of the last share, when it ended because its path is no longer what was shared.
    unservable: RefCell<Option<(String, String)>>,
    commands: mpsc::Sender<Command>,
    /// For the owner, until it runs.
    asked: Cell<Option<mpsc::Receiver<Command>>>,
    transfers: Cell<usize>,
    /// Cancelled when the bridge's token is replaced.
    token: RefCell<CancellationToken>,
}

impl Default for Shares {
    fn default() -> Self {
        let (commands, asked) = mpsc::channel(MAX_COMMANDS);
        let asked = Cell::new(Some(asked));
        Self {
            current: RefCell::default(),
            unservable: RefCell::default(),
            commands,
            asked,
            transfers: Cell::new(0),
            token: RefCell::default(),
        }
    }
}

/// One request on `/xfer/` from its head to the last byte of its answer, or to the end of its token.
struct Transfer {
    core: Rc<Core>,
    token: CancellationToken,
    /// Made when a body has to wait for the first time.
    revoked: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
}

impl Transfer {
    fn begin(core: &Rc<Core>) -> Self {
        core.shares.transfers.set(core.shares.transfers.get() + 1);
        Self { core: core.clone(), token: core.shares.token.borrow().clone(), revoked: None }
    }

    /// Cancelled when the token it came with was replaced.
    fn revoked(&self) -> CancellationToken {
        self.token.clone()
    }

    /// The next piece of its body, or an error once its token was replaced.
    fn allow<T>(
        &mut self,
        piece: Poll<Option<io::Result<T>>>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<T>>> {
        let is_revoked = match &piece {
            Poll::Ready(_) => self.token.is_cancelled(),
            Poll::Pending => {
                let token = &self.token;
                let revoked = self.revoked.get_or_insert_with(|| Box::pin(token.clone().cancelled_owned()));
                revoked.as_mut().poll(cx).is_ready()
            }
        };
        if is_revoked { Poll::Ready(Some(Err(io::Error::other("the token was replaced")))) } else { piece }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        let transfers = &self.core.shares.transfers;
        transfers.set(transfers.get() - 1);
        if transfers.get() == 0 {
            self.core.call_ended.notify_waiters();
        }
    }
}

impl Core {
    /// What is shared now. A share whose time is over is none, also in the moment before its end: after
    /// a suspend that may be a while.
    fn current_share(&self) -> Option<Rc<Share>> {
        self.shares.current.borrow().clone().filter(|share| !share.terms.is_over(now_ms()))
    }

    /// The terms of the share, for the state file.
    pub(super) fn share_terms(&self) -> Option<Terms> {
        self.shares.current.borrow().as_ref().map(|share| share.terms.clone())
    }

    /// Cuts every transfer that came with the token of so far.
    pub(super) fn cut_transfers(&self) {
        self.shares.token.take().cancel();
    }

    /// Waits until no transfer is in flight.
    pub(super) async fn no_transfers(&self) {
        while self.shares.transfers.get() > 0 {
            self.call_ended.notified().await;
        }
    }

    /// The share as a status shows it.
    pub(super) fn share_status(&self) -> Option<status::Share> {
        let share = self.current_share()?;
        let state = match &*share.phase.borrow() {
            Phase::Running => "serving".into(),
            Phase::Down => "the file server is starting again".into(),
            Phase::Failed(reason) => format!("failed: {reason}"),
        };
        Some(status::Share {
            path: share.terms.shown_path(),
            port: share.port.get(),
            expires_at: rfc3339(share.terms.expires_ms),
            left_ms: share.terms.expires_ms.saturating_sub(now_ms()),
            transfers: self.shares.transfers.get(),
            cut_uploads: share.parts.borrow().len(),
            state,
        })
    }
}
