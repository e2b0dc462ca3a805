//! The audit file (contract 11): who called what, as JSON lines. Its only writer.
//!
//! [`Audit`] is a handle; one task owns the file. [`Audit::write`] queues at once and its future ends
//! when write(2) has returned, so a caller can put the record before the deed. The owner drains
//! everything queued when it wakes and writes it in one go: group commit without a timer. A failed
//! write is counted and logged, never an error to the caller: the bridge does not stop for its log.
//! What is audited is decided elsewhere; [`redact`] says what of it is shown.

mod file;
mod record;
pub mod redact;

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashSet;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use file::{Locking, Log};

pub use file::ROTATE_BYTES;
pub use record::{Args, Outcome, Record};

/// Most records in one write. More wait for the next one, which follows at once.
const BATCH: usize = 512;
/// How long a batch waits for another sidecar's turn.
const LOCK_WAIT: Duration = Duration::from_secs(2);
/// After waiting in vain, for how long the lock is tried but not waited for.
const LOCK_PENALTY: Duration = Duration::from_secs(30);
/// Every how many failures the log says so again.
const FAILURES_PER_LINE: u64 = 100;

/// Handle to the audit file. The owner task ends when the last handle is gone and all is written.
#[derive(Clone)]
pub struct Audit {
    // Unbounded on purpose: queueing must not wait (a dropped caller would lose its record), and every
    // caller waits for its own record before it does anything else, so calls bound the queue.
    queue: mpsc::UnboundedSender<Pending>,
    failures: Rc<Cell<u64>>,
}

struct Pending {
    /// One line, or nothing for a flush.
    line: String,
    written: oneshot::Sender<()>,
}

impl Audit {
    /// Starts the owner of the file at `path`; needs a `LocalSet`. Nothing is opened before the first
    /// record, so a path that cannot be written shows as failures, not as an error here.
    pub fn start(path: &Path, tasks: &TaskTracker) -> Audit {
        Audit::start_with(path, tasks, LOCK_WAIT)
    }

    fn start_with(path: &Path, tasks: &TaskTracker, lock_wait: Duration) -> Audit {
        let (queue, pending) = mpsc::unbounded_channel();
        let failures = Rc::new(Cell::new(0));
        let log = Log::new(path);
        tasks.spawn_local(
            Owner { log, failures: failures.clone(), lock_wait, lock_penalty: None }.run(pending),
        );
        Audit { queue, failures }
    }

    /// Queues `record` now; the future ends when it is in the file, or has failed and was counted.
    /// Dropping the future does not take the record back.
    pub fn write(&self, record: Record<'_>) -> impl Future<Output = ()> + use<> {
        self.enqueue(record.line())
    }

    /// Ends when everything queued before is written.
    pub fn flush(&self) -> impl Future<Output = ()> + use<> {
        self.enqueue(String::new())
    }

    /// How many records could not be written so far.
    pub fn failures(&self) -> u64 {
        self.failures.get()
    }

    fn enqueue(&self, line: String) -> impl Future<Output = ()> + use<> {
        let (written, done) = oneshot::channel();
        if let Err(mpsc::error::SendError(lost)) = self.queue.send(Pending { line, written }) {
            // The owner was aborted with its runtime; nobody is left to write.
            self.failures.set(self.failures.get() + u64::from(!lost.line.is_empty()));
        }
        async move {
            let _ = done.await;
        }
    }
}

/// Which of these calls have their `done` record in the file at `path`: an earlier sidecar may have
/// written it and died before it could say so. Reads both generations, so not for every call.
pub fn ended<'a>(path: &Path, call_ids: &[&'a str]) -> HashSet<&'a str> {
    #[derive(serde::Deserialize)]
    struct Line<'a> {
        #[serde(borrow, default)]
        id: Option<Cow<'a, str>>,
        #[serde(borrow, default)]
        phase: Cow<'a, str>,
    }
    if call_ids.is_empty() {
        return HashSet::new();
    }
    let text = Log::new(path).generations();
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Line<'_>>(line).ok());
    let done: HashSet<_> = lines.filter(|line| line.phase == "done").filter_map(|line| line.id).collect();
    call_ids.iter().copied().filter(|id| done.contains(*id)).collect()
}

struct Owner {
    log: Log,
    failures: Rc<Cell<u64>>,
    lock_wait: Duration,
    /// Until when the lock is not waited for.
    lock_penalty: Option<Instant>,
}

impl Owner {
    async fn run(mut self, mut pending: mpsc::UnboundedReceiver<Pending>) {
        let mut batch = Vec::with_capacity(BATCH);
        while pending.recv_many(&mut batch, BATCH).await > 0 {
            self.commit(&batch).await;
            for Pending { written, .. } in batch.drain(..) {
                let _ = written.send(());
            }
        }
    }

    async fn commit(&mut self, batch: &[Pending]) {
        let joined: String;
        let lines = match batch {
            [one] => &one.line,
            many => {
                joined = many.iter().map(|pending| pending.line.as_str()).collect();
                &joined
            }
        };
        if lines.is_empty() {
            return;
        }
        // An error of the look is met again, and counted, by the write.
        if self.log.look().is_ok_and(|is_due| is_due) && self.lock().await {
            self.log.rotate();
            self.log.unlock();
        }
        let result = self.log.append(lines.as_bytes());
        if let Err((error, written)) = result {
            let mut end = 0;
            let ends = batch.iter().filter(|pending| !pending.line.is_empty()).map(|pending| {
                end += pending.line.len();
                end
            });
            let lost = ends.filter(|end| *end > written).count();
            self.count(lost as u64, &error);
        }
    }

    /// True when this process may rotate: it holds the lock, or there is none to hold.
    async fn lock(&mut self) -> bool {
        let until = Instant::now() + self.lock_wait;
        let mut tries = 0;
        loop {
            match self.log.try_lock() {
                Locking::Held | Locking::Without => {
                    self.lock_penalty = None;
                    return true;
                }
                Locking::Busy => {}
            }
            let now = Instant::now();
            if self.lock_penalty.is_some_and(|end| now < end) {
                return false;
            }
            if now >= until {
                tracing::warn!(
                    path = %self.log.shown(),
                    "another process holds the audit lock; writing without rotation"
                );
                self.lock_penalty = Some(now + LOCK_PENALTY);
                return false;
            }
            // A holder needs microseconds: first only let others run, then sleep.
            tries += 1;
            if tries <= 3 {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }

    fn count(&self, lost: u64, error: &std::io::Error) {
        let before = self.failures.get();
        let now = before + lost;
        self.failures.set(now);
        let first = before == 0 && now > 0;
        if first || now / FAILURES_PER_LINE > before / FAILURES_PER_LINE {
            tracing::warn!(path = %self.log.shown(), failures = now, %error, "audit record not written");
        }
    }
}

#[cfg(test)]
mod tests;
