//! What an earlier sidecar of this host left: a share that goes on, file servers that serve nothing any
//! more, the traces of uploads. Looked at once, before the owner runs.
//!
//! What the keeper runs is taken over from the note it was started with; what the keeper lost with its
//! own life is started again from the state file, with other credentials.

use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;

use tokio::time::Instant;

use super::launch::Told;
use super::owner::{KILL_AFTER, Owner, PURPOSE};
use super::{Phase, Share};
use crate::app::keeping::Followed;
use crate::app::{Core, now_ms};
use crate::keeper::wire::{ChildSignal, ChildStatus};
use crate::rundir;
use crate::supervise::Restarts;
use crate::xfer::{Terms, dufs, path, place};

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
            last: None,
            password: String::new(),
            restarts: Restarts::default(),
            again_at: None,
        };
        let named = saved.as_ref().filter(|(_, is_ours)| *is_ours).map(|(terms, _)| terms);
        let (was_inherited, is_over) = owner.inherit(&inherited, named);
        if let Ok(dir) = rundir::open() {
            let current = self.share_terms();
            dufs::sweep(&dir, self.address.port(), current.as_ref().map(|terms| terms.id.as_str()));
        }
        match saved {
            Some((terms, true)) if !was_inherited && !is_over && !terms.is_over(now_ms()) => {
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
}

impl Owner {
    /// Takes over one of the children: the newest that runs and served a share, or else the newest ended
    /// one of the share that the state file names. One whose share is over, or that never began to serve,
    /// does not count. Whether there was any, and whether the notes say that the named share is over.
    fn inherit(&mut self, children: &[ChildStatus], named: Option<&Terms>) -> (bool, bool) {
        let known: Vec<_> =
            children.iter().rev().filter_map(|child| Some((child, Told::read(&child.note)?))).collect();
        let over: Vec<&Terms> = known
            .iter()
            .filter(|(_, told)| told.is_over && told.has_begun)
            .map(|(_, told)| &told.terms)
            .collect();
        let is_over = |terms: &Terms| over.iter().any(|over| over.is_same(terms));
        let is_named = |terms: &Terms| named.is_some_and(|named| named.is_same(terms));
        let runs = |(child, told): &&(&ChildStatus, Told)| {
            child.exit.is_none() && (told.has_begun || is_named(&told.terms)) && !is_over(&told.terms)
        };
        let has_ended = |(_, told): &&(&ChildStatus, Told)| is_named(&told.terms) && !is_over(&told.terms);
        let chosen = known.iter().find(runs).or_else(|| known.iter().find(has_ended));
        for child in children.iter().filter(|child| child.exit.is_none()) {
            if chosen.is_none_or(|(chosen, _)| chosen.child != child.child) {
                self.end_stranger(child.child);
            }
        }
        let Some((child, told)) = chosen else { return (false, named.is_some_and(is_over)) };
        let (child, told) = (*child, told.clone());
        let share = self.share(told.terms, told.program, told.installed, &told.password, told.port);
        let share = Share { is_inherited: true, held: Cell::new(told.held), ..share };
        self.password = told.password;
        self.last = Some(child.child);
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
        (true, false)
    }

    /// Ends a file server that serves no share of ours.
    pub(super) fn end_stranger(&self, id: u64) {
        let core = self.core.clone();
        self.core.tasks.spawn_local(async move {
            let _ = core.keeping.signal(id, ChildSignal::Term, Some(KILL_AFTER)).await;
        });
    }

    /// The keeper died with the earlier sidecar: the share goes on with other credentials.
    fn revive(&mut self, terms: Terms) {
        let share = Share { is_inherited: true, ..self.share(terms, PathBuf::new(), None, "", 0) };
        self.core.shares.current.replace(Some(Rc::new(share)));
        self.again_at = Some(Instant::now());
    }
}
