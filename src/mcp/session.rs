//! MCP sessions (contract 3): who may speak, bound to a token, expiring after 24 idle hours, at most
//! 64. Pure: the caller brings the time, in milliseconds since the epoch, and says which sessions
//! are busy.

use foldhash::HashMap;
use serde::{Deserialize, Serialize};

/// Most sessions at a time.
pub const MAX_SESSIONS: usize = 64;
/// Idle time after which a session ends, in milliseconds.
pub const IDLE_MS: u64 = 24 * 60 * 60 * 1000;
/// A session's last use may move by this much before it is worth writing down again.
const SEEN_STEP_MS: u64 = 10 * 60 * 1000;
/// Longest client name or version that is kept, in characters.
const MAX_CLIENT_TEXT: usize = 120;

/// Longest list of one session's subscriptions, in bytes of their URIs.
const MAX_SUBSCRIBED_BYTES: usize = 32 << 10;

/// One session.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Session {
    /// The id in the `mcp-session-id` header.
    pub id: String,
    /// When it was opened.
    pub created_ms: u64,
    /// When its last request came.
    pub seen_ms: u64,
    /// The version that was negotiated.
    pub protocol: String,
    /// `clientInfo.name`, as the client gave it (for people: clean it first).
    #[serde(default)]
    pub client_name: String,
    /// `clientInfo.version`.
    #[serde(default)]
    pub client_version: String,
    /// The client's capabilities, verbatim JSON.
    #[serde(default)]
    pub capabilities: String,
    /// The least severe log messages it wants; absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_level: Option<String>,
    /// The resources it wants to hear of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub subscriptions: Vec<String>,
    /// The use that was last written to disk.
    #[serde(skip)]
    saved_seen_ms: u64,
}

impl Session {
    /// A new session; client texts are cut to a bounded length.
    pub fn new(id: String, now_ms: u64, protocol: &str, client: (&str, &str), capabilities: String) -> Self {
        let cut = |text: &str| text.chars().take(MAX_CLIENT_TEXT).collect();
        Self {
            id,
            created_ms: now_ms,
            seen_ms: now_ms,
            protocol: protocol.to_owned(),
            client_name: cut(client.0),
            client_version: cut(client.1),
            capabilities,
            log_level: None,
            subscriptions: Vec::new(),
            saved_seen_ms: now_ms,
        }
    }

    /// It wants to hear of a resource; twice is once.
    ///
    /// # Errors
    /// All its subscriptions together are too long.
    pub fn subscribe(&mut self, uri: &str) -> Result<(), &'static str> {
        if self.subscriptions.iter().any(|known| known == uri) {
            return Ok(());
        }
        let bytes: usize = self.subscriptions.iter().map(String::len).sum();
        if bytes + uri.len() > MAX_SUBSCRIBED_BYTES {
            return Err("too many subscriptions");
        }
        self.subscriptions.push(uri.to_owned());
        Ok(())
    }

    /// It does not want to hear of a resource any more; whether it did.
    pub fn unsubscribe(&mut self, uri: &str) -> bool {
        let before = self.subscriptions.len();
        self.subscriptions.retain(|known| known != uri);
        self.subscriptions.len() < before
    }

    fn is_expired(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.seen_ms) > IDLE_MS
    }
}

/// How firmly a session holds its place when the table is full; smaller goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hold {
    /// Neither stream nor call.
    Idle,
    /// An open stream.
    Stream,
    /// A call in flight: never evicted.
    Call,
}

/// All places are taken by sessions with calls in flight.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("all {MAX_SESSIONS} sessions have calls in flight")]
pub struct Full;

/// The live sessions.
#[derive(Debug, Default)]
pub struct Sessions {
    by_id: HashMap<String, Session>,
    changed: bool,
}

impl Sessions {
    /// A table whose first [`Sessions::take_changed`] gives something even when it is empty.
    pub fn unsaved() -> Self {
        Self { changed: true, ..Self::default() }
    }

    /// Takes over sessions from the state file; expired ones are left out.
    pub fn restore(&mut self, sessions: Vec<Session>, now_ms: u64) {
        for mut session in sessions.into_iter().take(MAX_SESSIONS) {
            // A clock that went back must not keep a session for ever.
            session.seen_ms = session.seen_ms.min(now_ms);
            session.saved_seen_ms = session.seen_ms;
            if !session.is_expired(now_ms) {
                self.by_id.insert(session.id.clone(), session);
            }
        }
    }

    /// Adds a session; the one evicted for it, if any, is returned.
    ///
    /// # Errors
    /// [`Full`] when every session has a call in flight.
    pub fn open(&mut self, session: Session, hold: impl Fn(&str) -> Hold) -> Result<Option<Session>, Full> {
        let now_ms = session.created_ms;
        self.by_id.retain(|id, old| !old.is_expired(now_ms) || hold(id) == Hold::Call);
        let mut evicted = None;
        if self.by_id.len() >= MAX_SESSIONS {
            let (_, _, id) = self
                .by_id
                .values()
                .map(|old| (hold(&old.id), old.seen_ms, &old.id))
                .filter(|(hold, ..)| *hold != Hold::Call)
                .min()
                .ok_or(Full)?;
            let id = id.clone();
            evicted = self.by_id.remove(&id);
        }
        self.changed = true;
        self.by_id.insert(session.id.clone(), session);
        Ok(evicted)
    }

    /// The session of a request, its idle timer refreshed; `None` when unknown or expired.
    pub fn touch(&mut self, id: &str, now_ms: u64) -> Option<&Session> {
        if self.by_id.get(id)?.is_expired(now_ms) {
            self.close(id);
            return None;
        }
        let session = self.by_id.get_mut(id)?;
        session.seen_ms = session.seen_ms.max(now_ms);
        if session.seen_ms - session.saved_seen_ms > SEEN_STEP_MS {
            self.changed = true;
        }
        Some(session)
    }

    /// Looks without touching.
    pub fn get(&self, id: &str) -> Option<&Session> {
        self.by_id.get(id)
    }

    /// Changes what a session wants; `None` when there is no such session.
    pub fn update<T>(&mut self, id: &str, change: impl FnOnce(&mut Session) -> T) -> Option<T> {
        let session = self.by_id.get_mut(id)?;
        self.changed = true;
        Some(change(session))
    }

    /// Ends a session; whether there was one.
    pub fn close(&mut self, id: &str) -> bool {
        let closed = self.by_id.remove(id).is_some();
        self.changed |= closed;
        closed
    }

    /// Ends all (the token was rotated).
    pub fn clear(&mut self) {
        self.changed |= !self.by_id.is_empty();
        self.by_id.clear();
    }

    /// All sessions, longest known first.
    pub fn list(&self) -> Vec<&Session> {
        let mut sessions: Vec<_> = self.by_id.values().collect();
        sessions.sort_by_key(|session| session.created_ms);
        sessions
    }

    /// The next [`Sessions::take_changed`] gives something.
    pub fn save_again(&mut self) {
        self.changed = true;
    }

    /// A copy for the state file when something changed since the last one.
    pub fn take_changed(&mut self) -> Option<Vec<Session>> {
        if !std::mem::take(&mut self.changed) {
            return None;
        }
        for session in self.by_id.values_mut() {
            session.saved_seen_ms = session.seen_ms;
        }
        Some(self.list().into_iter().cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(id: usize, now_ms: u64) -> Session {
        Session::new(id.to_string(), now_ms, "2025-11-25", ("test", "1"), String::new())
    }

    fn full(hold: impl Fn(&str) -> Hold) -> Sessions {
        let mut sessions = Sessions::default();
        for id in 0..MAX_SESSIONS {
            sessions.open(session(id, id as u64), &hold).unwrap();
        }
        sessions
    }

    #[test]
    fn the_least_recently_seen_goes_first_but_never_one_with_a_call() {
        let hold = |id: &str| match id {
            "0" => Hold::Call,
            "1" => Hold::Stream,
            _ => Hold::Idle,
        };
        let mut sessions = full(hold);
        sessions.touch("2", 1000);
        let evicted = sessions.open(session(100, 1001), hold).unwrap().unwrap();
        assert_eq!(evicted.id, "3");
        for id in 101..101 + 10_000 {
            sessions.open(session(id, id as u64 + 1001), hold).unwrap();
        }
        assert!(sessions.get("0").is_some(), "a call in flight holds its session");
        assert!(sessions.get("1").is_some(), "a stream outlives idle ones");
        assert_eq!(sessions.list().len(), MAX_SESSIONS);
    }

    #[test]
    fn a_table_full_of_calls_refuses_the_newcomer() {
        let mut sessions = full(|_| Hold::Call);
        assert_eq!(sessions.open(session(100, 100), |_| Hold::Call).unwrap_err(), Full);
        assert_eq!(sessions.list().len(), MAX_SESSIONS);
    }

    #[test]
    fn sessions_expire_after_a_day_without_a_request() {
        let mut sessions = Sessions::default();
        sessions.open(session(1, 0), |_| Hold::Idle).unwrap();
        assert!(sessions.touch("1", IDLE_MS).is_some());
        assert!(sessions.touch("1", 2 * IDLE_MS).is_some(), "each request refreshes");
        assert!(sessions.touch("1", 3 * IDLE_MS + 1).is_none());
        assert!(sessions.take_changed().is_some());
    }

    #[test]
    fn a_restored_session_from_the_future_does_not_live_longer() {
        let mut sessions = Sessions::default();
        sessions.restore(vec![session(1, 10 * IDLE_MS)], IDLE_MS);
        assert!(sessions.touch("1", 2 * IDLE_MS + 1).is_none());
    }

    #[test]
    fn subscriptions_are_counted_once_and_bounded() {
        let mut session = session(1, 0);
        for _ in 0..3 {
            session.subscribe("a:b").unwrap();
        }
        assert!(session.subscribe(&"x".repeat(MAX_SUBSCRIBED_BYTES)).is_err());
        assert_eq!(session.subscriptions, ["a:b"]);
        assert!(session.unsubscribe("a:b") && !session.unsubscribe("a:b"));
    }

    #[test]
    fn only_a_use_that_moved_far_is_written_again() {
        let mut sessions = Sessions::default();
        sessions.open(session(1, 0), |_| Hold::Idle).unwrap();
        assert_eq!(sessions.take_changed().unwrap().len(), 1);
        sessions.touch("1", 1000);
        assert!(sessions.take_changed().is_none());
        sessions.touch("1", SEEN_STEP_MS + 1);
        assert!(sessions.take_changed().is_some());
    }
}
