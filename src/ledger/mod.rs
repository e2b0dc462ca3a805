//! The ledger (contract 4.2): which calls exist, for whom, and which of them a caller that comes back
//! may have instead of running the same thing again. Pure: no I/O, no clock; the caller brings the
//! time in milliseconds and is told what to forget.
//!
//! ```text
//!            admit ──▶ Connected ──handed over──▶ Delivered ──acknowledged──▶ gone
//!                       │  ▲                          │
//!                 left  ▼  │ attach, resume           │ the connection broke after all
//!                       Left ◀────────────────────────┘
//!                       (an orphan: attachable until its window is over, its session moves on,
//!                        or it is cancelled)
//! ```
//!
//! Beside that, every call is running or has ended; a result that nobody claimed is dropped when
//! there are too many, and then its end is still known: it never runs again.

use foldhash::HashMap;
use sha2::{Digest as _, Sha256};

use crate::mcp::session::Hold;

/// Most calls that run at a time.
pub const MAX_CALLS: usize = 4096;
/// Most results that wait unclaimed, and their bytes (contract 4.2).
pub const MAX_UNCLAIMED: usize = 256;
/// See [`MAX_UNCLAIMED`].
pub const MAX_UNCLAIMED_BYTES: usize = 64 << 20;
/// A caller that dispatches something else later than this after its connection broke has moved on.
const MOVED_ON_MS: u64 = 2000;
/// A response handed over counts as received when its connection had no error for so long.
const DELIVERED_MS: u64 = 5000;

/// A SHA-256 that stands for bytes that must be equal.
pub type Digest = [u8; 32];

/// The digest of a tool and its arguments, byte for byte.
pub fn digest(tool: &str, arguments: &[u8]) -> Digest {
    let mut hash = Sha256::new();
    hash.update((tool.len() as u64).to_be_bytes());
    hash.update(tool.as_bytes());
    hash.update(arguments);
    hash.finalize().into()
}

/// Where a running call stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Waits for the host's first catalogue, or for its turn on the link.
    Waiting,
    /// The host was asked.
    Running,
    /// The operator was asked.
    AwaitingApproval,
    /// It has ended; its result waits for the caller.
    Ended,
}

impl Phase {
    /// The word people see.
    pub fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::AwaitingApproval => "awaiting approval",
            Self::Ended => "ended, unclaimed",
        }
    }
}

/// Whether somebody waits for the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Caller {
    Connected,
    Left { at_ms: u64 },
    Delivered { at_ms: u64 },
}

/// One call.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The call id, a UUID of ours.
    pub call_id: String,
    /// The session it belongs to.
    pub sid: String,
    /// The caller's JSON-RPC id, its own text.
    pub rpc_id: String,
    /// The tool's name as the caller wrote it.
    pub tool: String,
    /// See [`digest`].
    pub digest: Digest,
    /// When it came, in milliseconds since the epoch.
    pub started_ms: u64,
    /// Where it stands.
    pub phase: Phase,
    caller: Caller,
    ended_ms: Option<u64>,
    /// Size of the result that waits; `None` when it was dropped.
    bytes: Option<usize>,
    attachable: bool,
    /// Its session has done something else since its caller left: only `Last-Event-ID` reaches it.
    has_moved_on: bool,
}

/// A `tools/call` that asks to be admitted.
#[derive(Debug, Clone)]
pub struct Newcomer<'a> {
    /// Its session.
    pub sid: &'a str,
    /// Its JSON-RPC id, its own text.
    pub rpc_id: &'a str,
    /// Its tool.
    pub tool: &'a str,
    /// Its [`digest`].
    pub digest: Digest,
}

/// What becomes of a newcomer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is a call of its own, and is in the ledger now.
    New,
    /// It is this call, sent again; it belongs to the newcomer's session now.
    Attach(String),
    /// Too many calls run.
    TooMany,
}

/// The calls.
#[derive(Debug)]
pub struct Ledger {
    calls: HashMap<String, Entry>,
    /// Which calls a newcomer could be again.
    by_digest: HashMap<Digest, Vec<String>>,
    orphans: usize,
    per_session: HashMap<String, usize>,
    running: usize,
    served: u64,
    window_ms: u64,
    /// Orphans whose sessions have moved on since this was last asked for.
    moved_on: Vec<String>,
}

impl Ledger {
    /// An empty ledger; `window_ms` is how long an ended orphan can be reached, 0 = not at all.
    pub fn new(window_ms: u64) -> Self {
        Self {
            calls: HashMap::default(),
            by_digest: HashMap::default(),
            orphans: 0,
            per_session: HashMap::default(),
            running: 0,
            served: 0,
            window_ms,
            moved_on: Vec::new(),
        }
    }

    /// Decides whether a `tools/call` is a new one (then it is entered as `call_id`) or an earlier
    /// one sent again.
    pub fn admit(&mut self, call_id: &str, newcomer: &Newcomer<'_>, now_ms: u64) -> Verdict {
        if let Some(found) = self.find_same(newcomer, now_ms) {
            self.adopt(&found, newcomer.sid, newcomer.rpc_id);
            return Verdict::Attach(found);
        }
        let orphans = if self.orphans > 0 { Some(self.calls.values_mut()) } else { None };
        for orphan in orphans.into_iter().flatten() {
            if let Caller::Left { at_ms } = orphan.caller
                && orphan.sid == newcomer.sid
                && now_ms > at_ms + MOVED_ON_MS
                && !orphan.has_moved_on
            {
                orphan.has_moved_on = true;
                self.moved_on.push(orphan.call_id.clone());
            }
        }
        if self.running >= MAX_CALLS {
            return Verdict::TooMany;
        }
        self.enter(Entry {
            call_id: call_id.to_owned(),
            sid: newcomer.sid.to_owned(),
            rpc_id: newcomer.rpc_id.to_owned(),
            tool: newcomer.tool.to_owned(),
            digest: newcomer.digest,
            started_ms: now_ms,
            phase: Phase::Waiting,
            caller: Caller::Connected,
            ended_ms: None,
            bytes: None,
            attachable: true,
            has_moved_on: false,
        });
        Verdict::New
    }

    /// The call that a re-sent one means: the same session's same id (also while the first caller
    /// still looks connected), else the oldest orphan with the same tool and arguments.
    fn find_same(&self, newcomer: &Newcomer<'_>, now_ms: u64) -> Option<String> {
        if self.window_ms == 0 {
            return None;
        }
        let same = self.by_digest.get(&newcomer.digest)?;
        let is_resent = |entry: &&Entry| {
            entry.sid == newcomer.sid
                && entry.rpc_id == newcomer.rpc_id
                && !matches!(entry.caller, Caller::Delivered { .. })
        };
        let is_orphan = |entry: &&Entry| {
            matches!(entry.caller, Caller::Left { .. })
                && entry.ended_ms.is_none_or(|ended| now_ms <= ended + self.window_ms)
        };
        let candidates = || {
            let calls = same.iter().filter_map(|id| self.calls.get(id));
            calls.filter(|entry| entry.attachable && !entry.has_moved_on)
        };
        candidates()
            .find(is_resent)
            .or_else(|| {
                candidates().filter(is_orphan).min_by_key(|entry| (entry.started_ms, entry.call_id.clone()))
            })
            .map(|entry| entry.call_id.clone())
    }

    fn adopt(&mut self, call_id: &str, sid: &str, rpc_id: &str) {
        let Some(entry) = self.calls.get_mut(call_id) else { return };
        let from = std::mem::replace(&mut entry.sid, sid.to_owned());
        entry.rpc_id = rpc_id.to_owned();
        self.set_caller(call_id, Caller::Connected);
        self.release(&from);
        *self.per_session.entry(sid.to_owned()).or_default() += 1;
    }

    fn enter(&mut self, entry: Entry) {
        *self.per_session.entry(entry.sid.clone()).or_default() += 1;
        self.running += usize::from(entry.ended_ms.is_none());
        self.orphans += usize::from(entry.is_orphan());
        self.by_digest.entry(entry.digest).or_default().push(entry.call_id.clone());
        self.calls.insert(entry.call_id.clone(), entry);
    }

    fn release(&mut self, sid: &str) {
        if let Some(count) = self.per_session.get_mut(sid) {
            *count -= 1;
            if *count == 0 {
                self.per_session.remove(sid);
            }
        }
    }

    /// The orphans whose sessions have moved on since the last time this was asked.
    pub fn take_moved_on(&mut self) -> Vec<String> {
        std::mem::take(&mut self.moved_on)
    }

    /// Enters a call of an earlier sidecar: its caller's connection broke with that one at the latest.
    pub fn inherit(&mut self, call: Inherited, now_ms: u64) {
        self.enter(Entry {
            call_id: call.call_id,
            sid: call.sid,
            rpc_id: call.rpc_id,
            tool: call.tool,
            digest: call.digest,
            started_ms: call.started_ms.min(now_ms),
            phase: Phase::Running,
            caller: Caller::Left { at_ms: call.left_ms.unwrap_or(now_ms).min(now_ms) },
            ended_ms: None,
            bytes: None,
            attachable: call.attachable,
            has_moved_on: call.has_moved_on,
        });
    }

    /// The call has ended with a result of `bytes`.
    pub fn ended(&mut self, call_id: &str, bytes: usize, now_ms: u64) {
        if let Some(entry) = self.calls.get_mut(call_id)
            && entry.ended_ms.is_none()
        {
            entry.ended_ms = Some(now_ms);
            entry.bytes = Some(bytes);
            entry.phase = Phase::Ended;
            self.running -= 1;
            self.served += 1;
        }
    }

    /// The caller's connection broke, or ended before the response was out.
    pub fn left(&mut self, call_id: &str, now_ms: u64) {
        self.set_caller(call_id, Caller::Left { at_ms: now_ms });
    }

    /// The caller came back by `Last-Event-ID`.
    pub fn returned(&mut self, call_id: &str) {
        self.set_caller(call_id, Caller::Connected);
    }

    /// The response was handed to the connection in full.
    pub fn handed_over(&mut self, call_id: &str, now_ms: u64) {
        self.set_caller(call_id, Caller::Delivered { at_ms: now_ms });
    }

    fn set_caller(&mut self, call_id: &str, caller: Caller) {
        if let Some(entry) = self.calls.get_mut(call_id) {
            self.orphans -= usize::from(entry.is_orphan());
            entry.caller = caller;
            entry.has_moved_on = false;
            self.orphans += usize::from(entry.is_orphan());
        }
    }

    /// The caller has its response, or nobody is to have it: the call is forgotten.
    pub fn forget(&mut self, call_id: &str) -> Option<Entry> {
        let entry = self.calls.remove(call_id)?;
        if entry.ended_ms.is_none() {
            self.running -= 1;
            self.served += 1;
        }
        self.orphans -= usize::from(entry.is_orphan());
        if let Some(same) = self.by_digest.get_mut(&entry.digest) {
            same.retain(|id| id != call_id);
            if same.is_empty() {
                self.by_digest.remove(&entry.digest);
            }
        }
        self.release(&entry.sid);
        Some(entry)
    }

    /// A cancelled call never attaches.
    pub fn cancelled(&mut self, call_id: &str) {
        if let Some(entry) = self.calls.get_mut(call_id) {
            entry.attachable = false;
        }
    }

    /// What the time and the bounds say: calls to forget, and results to drop (their calls stay
    /// known until their window is over).
    pub fn sweep(&mut self, now_ms: u64) -> Sweep {
        let mut sweep = Sweep::default();
        let mut unclaimed: Vec<(u64, &str, usize)> = Vec::new();
        for entry in self.calls.values() {
            match (entry.caller, entry.ended_ms) {
                (Caller::Delivered { at_ms }, _) if now_ms >= at_ms + DELIVERED_MS => {
                    sweep.forget.push(entry.call_id.clone());
                }
                (Caller::Left { at_ms }, Some(ended)) => {
                    if !entry.attachable || now_ms > ended.max(at_ms) + self.window_ms {
                        sweep.forget.push(entry.call_id.clone());
                    } else if let Some(bytes) = entry.bytes {
                        unclaimed.push((ended, &entry.call_id, bytes));
                    }
                }
                _ => {}
            }
        }
        unclaimed.sort_unstable();
        let mut bytes: usize = unclaimed.iter().map(|(.., bytes)| bytes).sum();
        let mut count = unclaimed.len();
        for (_, call_id, size) in unclaimed {
            // One result that is larger than the bound alone is kept.
            if count <= MAX_UNCLAIMED && (bytes <= MAX_UNCLAIMED_BYTES || count == 1) {
                break;
            }
            sweep.drop.push(call_id.to_owned());
            bytes -= size;
            count -= 1;
        }
        for call_id in &sweep.drop {
            if let Some(entry) = self.calls.get_mut(call_id) {
                entry.bytes = None;
            }
        }
        for call_id in &sweep.forget {
            self.forget(call_id);
        }
        sweep
    }

    /// Whether [`Ledger::sweep`] has anything to look at later.
    pub fn needs_sweeping(&self) -> bool {
        self.calls.len() > self.running
    }

    /// Moves a running call to another phase; unknown ids are ignored.
    pub fn set_phase(&mut self, call_id: &str, phase: Phase) {
        if let Some(entry) = self.calls.get_mut(call_id)
            && entry.ended_ms.is_none()
        {
            entry.phase = phase;
        }
    }

    /// The host says which calls wait for an approval; all others that did are running again.
    /// Returns those that have begun to wait.
    pub fn set_approvals<'a>(&mut self, waiting: impl Iterator<Item = &'a str>) -> Vec<String> {
        let mut before = Vec::new();
        for entry in self.calls.values_mut().filter(|entry| entry.phase == Phase::AwaitingApproval) {
            entry.phase = Phase::Running;
            before.push(entry.call_id.clone());
        }
        let mut begun = Vec::new();
        for call_id in waiting {
            self.set_phase(call_id, Phase::AwaitingApproval);
            if self.calls.contains_key(call_id) && !before.iter().any(|known| known == call_id) {
                begun.push(call_id.to_owned());
            }
        }
        begun
    }

    /// The running calls a `notifications/cancelled` of this session means: ids compare as their own
    /// text.
    pub fn find(&self, sid: &str, rpc_id: &str) -> Vec<String> {
        self.running_ids(|entry| entry.sid == sid && is_same_id(&entry.rpc_id, rpc_id))
    }

    /// The running calls of a session whose callers are still connected (the others are orphans,
    /// which the end of a session does not touch).
    pub fn connected_of_session(&self, sid: &str) -> Vec<String> {
        self.running_ids(|entry| entry.sid == sid && entry.caller == Caller::Connected)
    }

    /// All running calls.
    pub fn running(&self) -> Vec<String> {
        self.running_ids(|_| true)
    }

    fn running_ids(&self, wanted: impl Fn(&Entry) -> bool) -> Vec<String> {
        let running = self.calls.values().filter(|entry| entry.ended_ms.is_none());
        running.filter(|entry| wanted(entry)).map(|entry| entry.call_id.clone()).collect()
    }

    /// Whether every running call's caller waits on a stream or is away; `is_streamed` says which.
    pub fn waits_for_json(&self, is_streamed: impl Fn(&str) -> bool) -> bool {
        self.calls.values().any(|entry| {
            entry.ended_ms.is_none() && entry.caller == Caller::Connected && !is_streamed(&entry.call_id)
        })
    }

    /// One call.
    pub fn get(&self, call_id: &str) -> Option<&Entry> {
        self.calls.get(call_id)
    }

    /// Whether the result of an ended call was dropped for lack of room.
    pub fn is_dropped(&self, call_id: &str) -> bool {
        self.calls.get(call_id).is_some_and(|entry| entry.ended_ms.is_some() && entry.bytes.is_none())
    }

    /// How firmly calls hold a session's place.
    pub fn hold(&self, sid: &str) -> Hold {
        if self.per_session.contains_key(sid) { Hold::Call } else { Hold::Idle }
    }

    /// For people: all calls that run or wait to be claimed, oldest first.
    pub fn list(&self) -> Vec<&Entry> {
        let mut entries: Vec<_> = self.calls.values().collect();
        entries.retain(|entry| entry.ended_ms.is_none() || matches!(entry.caller, Caller::Left { .. }));
        entries.sort_by(|a, b| (a.started_ms, &a.call_id).cmp(&(b.started_ms, &b.call_id)));
        entries
    }

    /// How many calls run.
    pub fn running_count(&self) -> usize {
        self.running
    }

    /// How many have ended since the start.
    pub fn served(&self) -> u64 {
        self.served
    }
}

impl Entry {
    /// Whether its caller is gone.
    pub fn is_orphan(&self) -> bool {
        self.left_ms().is_some()
    }

    /// Since when its caller is gone.
    pub fn left_ms(&self) -> Option<u64> {
        if let Caller::Left { at_ms } = self.caller { Some(at_ms) } else { None }
    }

    /// When it ended.
    pub fn ended_ms(&self) -> Option<u64> {
        self.ended_ms
    }

    /// See [`Ledger::admit`].
    pub fn has_moved_on(&self) -> bool {
        self.has_moved_on
    }
}

/// Whether two JSON-RPC ids are the same one: numbers by their own text, strings by what they say.
pub fn is_same_id(one: &str, other: &str) -> bool {
    if one == other {
        return true;
    }
    let said = |id: &str| serde_json::from_str::<String>(id).ok();
    one.starts_with('"') && other.starts_with('"') && said(one).is_some_and(|one| said(other) == Some(one))
}

/// A call of an earlier sidecar, as its note tells it.
#[derive(Debug, Clone)]
pub struct Inherited {
    /// See [`Entry`].
    pub call_id: String,
    /// See [`Entry`].
    pub sid: String,
    /// See [`Entry`].
    pub rpc_id: String,
    /// See [`Entry`].
    pub tool: String,
    /// See [`Entry`].
    pub digest: Digest,
    /// See [`Entry`].
    pub started_ms: u64,
    /// When its caller left, if that was before the earlier sidecar's end.
    pub left_ms: Option<u64>,
    /// See [`Entry`].
    pub has_moved_on: bool,
    /// Not cancelled, of this token, and its note was understood.
    pub attachable: bool,
}

/// See [`Ledger::sweep`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Sweep {
    /// Gone from the ledger; the shim may forget them too.
    pub forget: Vec<String>,
    /// Their results are to be dropped.
    pub drop: Vec<String>,
}

#[cfg(test)]
mod tests;
