//! The ledger: which calls are in flight, for whom, and in which phase. Pure: no I/O, no clock; the
//! caller brings the time.
//!
//! A call enters before it is audited and leaves after its end is. What a person sees in `status`,
//! what a cancel or the end of a session reaches, and which session may not be evicted, is read
//! here.

use std::collections::HashMap;

use crate::mcp::session::Hold;

/// Most calls in flight.
pub const MAX_CALLS: usize = 4096;

/// Where a call stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Waits for the host's first catalogue, or for its turn on the link.
    Waiting,
    /// The host was asked.
    Running,
    /// The operator was asked.
    AwaitingApproval,
}

impl Phase {
    /// The word people see.
    pub fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::AwaitingApproval => "awaiting approval",
        }
    }
}

/// One call in flight.
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
    /// When it came, in milliseconds since the epoch.
    pub started_ms: u64,
    /// Where it stands.
    pub phase: Phase,
}

/// The table is full.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{MAX_CALLS} calls are in flight")]
pub struct TooMany;

/// The calls in flight.
#[derive(Debug, Default)]
pub struct Ledger {
    calls: HashMap<String, Entry>,
    per_session: HashMap<String, usize>,
    served: u64,
}

impl Ledger {
    /// Enters a call.
    ///
    /// # Errors
    /// [`TooMany`].
    pub fn begin(&mut self, entry: Entry) -> Result<(), TooMany> {
        if self.calls.len() >= MAX_CALLS {
            return Err(TooMany);
        }
        *self.per_session.entry(entry.sid.clone()).or_default() += 1;
        self.calls.insert(entry.call_id.clone(), entry);
        Ok(())
    }

    /// Strikes a call out.
    pub fn end(&mut self, call_id: &str) -> Option<Entry> {
        let entry = self.calls.remove(call_id)?;
        self.served += 1;
        if let Some(count) = self.per_session.get_mut(&entry.sid) {
            *count -= 1;
            if *count == 0 {
                self.per_session.remove(&entry.sid);
            }
        }
        Some(entry)
    }

    /// Moves a call to another phase; unknown ids are ignored.
    pub fn set_phase(&mut self, call_id: &str, phase: Phase) {
        if let Some(entry) = self.calls.get_mut(call_id) {
            entry.phase = phase;
        }
    }

    /// The host says which calls wait for an approval; all others that did are running again.
    pub fn set_approvals<'a>(&mut self, waiting: impl Iterator<Item = &'a str>) {
        for entry in self.calls.values_mut().filter(|entry| entry.phase == Phase::AwaitingApproval) {
            entry.phase = Phase::Running;
        }
        for call_id in waiting {
            self.set_phase(call_id, Phase::AwaitingApproval);
        }
    }

    /// The calls a `notifications/cancelled` of this session means: ids compare as their own text.
    pub fn find(&self, sid: &str, rpc_id: &str) -> Vec<String> {
        self.ids(|entry| entry.sid == sid && entry.rpc_id == rpc_id)
    }

    /// The calls of a session.
    pub fn of_session(&self, sid: &str) -> Vec<String> {
        self.ids(|entry| entry.sid == sid)
    }

    /// All calls.
    pub fn all(&self) -> Vec<String> {
        self.ids(|_| true)
    }

    fn ids(&self, wanted: impl Fn(&Entry) -> bool) -> Vec<String> {
        self.calls.values().filter(|entry| wanted(entry)).map(|entry| entry.call_id.clone()).collect()
    }

    /// How firmly calls hold a session's place.
    pub fn hold(&self, sid: &str) -> Hold {
        if self.per_session.contains_key(sid) { Hold::Call } else { Hold::Idle }
    }

    /// For people: all calls, oldest first.
    pub fn list(&self) -> Vec<&Entry> {
        let mut entries: Vec<_> = self.calls.values().collect();
        entries.sort_by(|a, b| (a.started_ms, &a.call_id).cmp(&(b.started_ms, &b.call_id)));
        entries
    }

    /// How many calls are in flight.
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// How many have ended since the start.
    pub fn served(&self) -> u64 {
        self.served
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(call_id: &str, sid: &str, rpc_id: &str) -> Entry {
        Entry {
            call_id: call_id.into(),
            sid: sid.into(),
            rpc_id: rpc_id.into(),
            tool: "t".into(),
            started_ms: 0,
            phase: Phase::Waiting,
        }
    }

    #[test]
    fn a_cancel_finds_only_its_own_session_and_the_id_of_its_own_type() {
        let mut ledger = Ledger::default();
        for (call, sid, id) in [("a", "s", "1"), ("b", "s", "\"1\""), ("c", "t", "1"), ("d", "s", "0")] {
            ledger.begin(entry(call, sid, id)).unwrap();
        }
        assert_eq!(ledger.find("s", "1"), ["a"]);
        assert_eq!(ledger.find("s", "\"1\""), ["b"]);
        assert!(ledger.find("u", "1").is_empty());
    }

    #[test]
    fn a_session_is_held_as_long_as_one_of_its_calls_runs() {
        let mut ledger = Ledger::default();
        ledger.begin(entry("a", "s", "1")).unwrap();
        ledger.begin(entry("b", "s", "2")).unwrap();
        ledger.end("a");
        ledger.end("a");
        assert_eq!(ledger.hold("s"), Hold::Call);
        ledger.end("b");
        assert_eq!(ledger.hold("s"), Hold::Idle);
        assert_eq!((ledger.served(), ledger.len()), (2, 0));
    }

    #[test]
    fn approvals_are_what_the_host_last_said() {
        let mut ledger = Ledger::default();
        for call in ["a", "b"] {
            ledger.begin(entry(call, "s", "1")).unwrap();
            ledger.set_phase(call, Phase::Running);
        }
        ledger.set_approvals(["a", "unknown"].into_iter());
        ledger.set_approvals(["b"].into_iter());
        let phases: Vec<_> = ledger.list().iter().map(|entry| entry.phase).collect();
        assert_eq!(phases, [Phase::Running, Phase::AwaitingApproval]);
    }

    #[test]
    fn the_table_is_bounded() {
        let mut ledger = Ledger::default();
        for call in 0..MAX_CALLS {
            ledger.begin(entry(&call.to_string(), "s", "1")).unwrap();
        }
        assert_eq!(ledger.begin(entry("x", "s", "1")), Err(TooMany));
    }
}
