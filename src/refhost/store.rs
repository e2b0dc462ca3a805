//! What the shim's side remembers of calls: the running ones with the sidecar's note, and the
//! results until they are acknowledged (contract 17). It is what `hello` lists as `inFlight`.
//!
//! Bounded: 256 results / 64 MiB, the oldest goes first and leaves its id behind as `dropped`; a
//! single larger result is kept alone. Pure: no I/O, the clock is the caller's.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::value::RawValue;

use crate::frame::messages::{InFlight, InFlightState};

/// Results kept without acknowledgement.
pub const MAX_RESULTS: usize = 256;
/// Their bytes together.
pub const MAX_RESULT_BYTES: usize = 64 << 20;
/// How long the id of a dropped or cancelled call is kept without acknowledgement.
pub const KEEP_IDS: Duration = Duration::from_secs(600);
/// So many of these ids are kept at most.
const MAX_IDS: usize = 10_000;
/// The longest note that is kept; a longer one is a sidecar's mistake and is not stored.
pub const MAX_NOTE: usize = 8 << 10;

/// How a call ended: the text of a JSON-RPC `result` or `error`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The MCP result.
    Result(Bytes),
    /// A JSON-RPC error.
    Error(Bytes),
}

impl Outcome {
    /// The member of a JSON-RPC message and its text.
    pub(super) fn member(&self) -> (&'static str, &Bytes) {
        match self {
            Self::Result(text) => ("result", text),
            Self::Error(text) => ("error", text),
        }
    }

    fn len(&self) -> usize {
        self.member().1.len()
    }
}

/// The calls of one host process.
#[derive(Debug, Default)]
pub struct CallStore {
    calls: HashMap<String, Entry>,
    /// Finished calls by the order of their end.
    finished: BTreeMap<u64, String>,
    finished_bytes: usize,
    /// Dropped and cancelled calls by the order in which they became so.
    ids: BTreeMap<u64, (Instant, String)>,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    tool: String,
    started_at: u64,
    note: Option<Box<RawValue>>,
    generation: u64,
    began: u64,
    state: State,
}

#[derive(Debug)]
enum State {
    Running,
    Finished { order: u64, outcome: Outcome },
    Cancelled { order: u64 },
    Dropped { order: u64 },
}

/// What a new call is.
#[derive(Debug)]
pub struct NewCall {
    /// The sidecar's id of the call.
    pub call_id: String,
    /// The tool's name.
    pub tool: String,
    /// Unix milliseconds.
    pub started_at: u64,
    /// The sidecar's note.
    pub note: Option<Box<RawValue>>,
    /// The sidecar it came from, counted up.
    pub generation: u64,
}

impl CallStore {
    /// Remembers a call; `false` when its id is known already: it must not run again.
    pub fn begin(&mut self, call: NewCall) -> bool {
        if self.calls.contains_key(&call.call_id) {
            return false;
        }
        let began = self.order();
        let entry = Entry {
            tool: call.tool,
            started_at: call.started_at,
            note: call.note.filter(|note| note.get().len() <= MAX_NOTE),
            generation: call.generation,
            began,
            state: State::Running,
        };
        self.calls.insert(call.call_id, entry);
        true
    }

    /// Replaces the note of a call; `false` when the call is not known or the note too long.
    pub fn set_note(&mut self, call_id: &str, note: Box<RawValue>) -> bool {
        match self.calls.get_mut(call_id) {
            Some(entry) if note.get().len() <= MAX_NOTE => {
                entry.note = Some(note);
                true
            }
            _ => false,
        }
    }

    /// A running call was cancelled: its result will not be kept.
    pub fn cancel(&mut self, call_id: &str, now: Instant) {
        let order = self.order();
        if let Some(entry) = self.calls.get_mut(call_id)
            && matches!(entry.state, State::Running)
        {
            entry.state = State::Cancelled { order };
            self.ids.insert(order, (now, call_id.to_owned()));
            self.forget_old_ids(now);
        }
    }

    /// A call ended. Keeps the outcome until [`CallStore::acknowledge`], dropping the oldest ones
    /// when there is no room.
    pub fn finish(&mut self, call_id: &str, outcome: Outcome, now: Instant) {
        let order = self.order();
        if let Some(entry) = self.calls.get_mut(call_id)
            && matches!(entry.state, State::Running)
        {
            self.finished_bytes += outcome.len();
            entry.state = State::Finished { order, outcome };
            self.finished.insert(order, call_id.to_owned());
        }
        while self.finished.len() > MAX_RESULTS
            || (self.finished_bytes > MAX_RESULT_BYTES && self.finished.len() > 1)
        {
            self.drop_oldest(now);
        }
        self.forget_old_ids(now);
    }

    /// Whether the call's outcome is kept.
    pub fn is_finished(&self, call_id: &str) -> bool {
        self.calls.get(call_id).is_some_and(|entry| matches!(entry.state, State::Finished { .. }))
    }

    /// The sidecar needs these calls no more. One that still runs stays: its end is yet to come.
    pub fn acknowledge<'a>(&mut self, call_ids: impl IntoIterator<Item = &'a str>) {
        for call_id in call_ids {
            match self.calls.get(call_id).map(|entry| &entry.state) {
                None | Some(State::Running) => continue,
                Some(State::Finished { order, outcome }) => {
                    self.finished_bytes -= outcome.len();
                    self.finished.remove(order);
                }
                Some(State::Cancelled { order } | State::Dropped { order }) => {
                    self.ids.remove(order);
                }
            }
            self.calls.remove(call_id);
        }
    }

    /// Everything unacknowledged, oldest first, for `hello`.
    pub fn in_flight(&self) -> Vec<InFlight> {
        let mut calls: Vec<_> = self.calls.iter().collect();
        calls.sort_unstable_by_key(|(_, entry)| entry.began);
        calls
            .into_iter()
            .map(|(call_id, entry)| InFlight {
                call_id: call_id.clone(),
                tool: entry.tool.clone(),
                state: match entry.state {
                    State::Running => InFlightState::Running,
                    State::Finished { .. } => InFlightState::Finished,
                    State::Cancelled { .. } => InFlightState::Cancelled,
                    State::Dropped { .. } => InFlightState::Dropped,
                },
                started_at: serde_json::value::to_raw_value(&entry.started_at).ok(),
                note: entry.note.clone(),
            })
            .collect()
    }

    /// The kept results of calls that began under a sidecar before `generation`, oldest first.
    pub fn finished_before(&self, generation: u64) -> impl Iterator<Item = (&str, &Outcome)> {
        self.finished.values().filter_map(move |call_id| {
            let entry = self.calls.get(call_id)?;
            match &entry.state {
                State::Finished { outcome, .. } if entry.generation < generation => {
                    Some((call_id.as_str(), outcome))
                }
                _ => None,
            }
        })
    }

    fn order(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn drop_oldest(&mut self, now: Instant) {
        let Some((order, call_id)) = self.finished.pop_first() else { return };
        if let Some(entry) = self.calls.get_mut(&call_id) {
            if let State::Finished { outcome, .. } = &entry.state {
                self.finished_bytes -= outcome.len();
            }
            entry.state = State::Dropped { order };
            self.ids.insert(order, (now, call_id));
        }
    }

    fn forget_old_ids(&mut self, now: Instant) {
        while let Some(oldest) = self.ids.first_entry() {
            let is_old = now.saturating_duration_since(oldest.get().0) > KEEP_IDS;
            if !is_old && self.ids.len() <= MAX_IDS {
                return;
            }
            if let Some((_, (_, call_id))) = self.ids.pop_first() {
                self.calls.remove(&call_id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(store: &mut CallStore, call_id: &str, generation: u64) -> bool {
        store.begin(NewCall {
            call_id: call_id.into(),
            tool: "read".into(),
            started_at: 1,
            note: None,
            generation,
        })
    }

    fn result(len: usize) -> Outcome {
        Outcome::Result(vec![b'x'; len].into())
    }

    fn states(store: &CallStore) -> Vec<(String, InFlightState)> {
        store.in_flight().into_iter().map(|call| (call.call_id, call.state)).collect()
    }

    #[test]
    fn a_result_is_kept_until_it_is_acknowledged() {
        let (mut store, now) = (CallStore::default(), Instant::now());
        assert!(begin(&mut store, "a", 1));
        assert!(begin(&mut store, "b", 1));
        store.finish("b", result(3), now);
        store.acknowledge(["a", "unknown"]);
        assert_eq!(
            states(&store),
            [("a".into(), InFlightState::Running), ("b".into(), InFlightState::Finished)]
        );
        store.acknowledge(["b"]);
        store.finish("a", result(1), now);
        store.acknowledge(["a"]);
        assert!(store.in_flight().is_empty());
        assert_eq!(store.finished_bytes, 0);
    }

    #[test]
    fn a_call_id_never_runs_twice() {
        let (mut store, now) = (CallStore::default(), Instant::now());
        assert!(begin(&mut store, "a", 1));
        assert!(!begin(&mut store, "a", 2));
        store.finish("a", result(1), now);
        assert!(!begin(&mut store, "a", 2));
    }

    #[test]
    fn the_257th_result_drops_the_oldest_and_keeps_its_id() {
        let (mut store, now) = (CallStore::default(), Instant::now());
        for n in 0..=MAX_RESULTS {
            begin(&mut store, &n.to_string(), 1);
        }
        // The end decides the order, not the beginning.
        for n in (0..=MAX_RESULTS).rev() {
            store.finish(&n.to_string(), result(1), now);
        }
        let dropped: Vec<_> =
            states(&store).into_iter().filter(|(_, state)| *state == InFlightState::Dropped).collect();
        assert_eq!(dropped, [(MAX_RESULTS.to_string(), InFlightState::Dropped)]);
        store.acknowledge([MAX_RESULTS.to_string().as_str()]);
        assert_eq!(store.in_flight().len(), MAX_RESULTS);
    }

    #[test]
    fn bytes_are_bounded_but_one_large_result_is_kept_alone() {
        let (mut store, now) = (CallStore::default(), Instant::now());
        for id in ["a", "b", "c"] {
            begin(&mut store, id, 1);
        }
        store.finish("a", result(MAX_RESULT_BYTES / 2), now);
        store.finish("b", result(MAX_RESULT_BYTES / 2), now);
        assert_eq!(store.finished_before(2).count(), 2);
        store.finish("c", result(MAX_RESULT_BYTES + 1), now);
        assert_eq!(store.finished_before(2).map(|(id, _)| id).collect::<Vec<_>>(), ["c"]);
    }

    #[test]
    fn dropped_and_cancelled_ids_are_forgotten_after_ten_minutes() {
        let (mut store, start) = (CallStore::default(), Instant::now());
        begin(&mut store, "a", 1);
        store.cancel("a", start);
        store.finish("a", result(1), start);
        assert_eq!(states(&store), [("a".into(), InFlightState::Cancelled)]);
        assert_eq!(store.finished_before(2).count(), 0, "a cancelled call has no result");
        begin(&mut store, "b", 1);
        store.finish("b", result(1), start + KEEP_IDS + Duration::from_secs(1));
        assert_eq!(states(&store), [("b".into(), InFlightState::Finished)]);
    }

    #[test]
    fn a_cancel_after_the_end_changes_nothing() {
        let (mut store, now) = (CallStore::default(), Instant::now());
        begin(&mut store, "a", 1);
        store.finish("a", result(1), now);
        store.cancel("a", now);
        assert_eq!(states(&store), [("a".into(), InFlightState::Finished)]);
    }

    #[test]
    fn only_results_of_earlier_sidecars_are_sent_again() {
        let (mut store, now) = (CallStore::default(), Instant::now());
        for (id, generation) in [("a", 1), ("b", 2), ("c", 1)] {
            begin(&mut store, id, generation);
        }
        for id in ["c", "b", "a"] {
            store.finish(id, result(1), now);
        }
        assert_eq!(store.finished_before(2).map(|(id, _)| id).collect::<Vec<_>>(), ["c", "a"]);
    }

    #[test]
    fn notes_are_replaced_and_bounded() {
        let mut store = CallStore::default();
        begin(&mut store, "a", 1);
        let note = |text: String| serde_json::value::to_raw_value(&text).unwrap();
        assert!(store.set_note("a", note("new".into())));
        assert!(!store.set_note("a", note("x".repeat(MAX_NOTE))));
        assert!(!store.set_note("b", note("new".into())));
        assert_eq!(store.in_flight()[0].note.as_deref().map(RawValue::get), Some("\"new\""));
    }
}
