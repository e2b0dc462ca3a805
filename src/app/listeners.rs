//! Server streams (the GETs of contract 4.1) and what goes out on them: list changes, updates of
//! subscribed resources, log messages that belong to no call.
//!
//! A session may hold several; each message goes to exactly one of them. What changed while a session
//! had none is told as soon as it has one again.

use std::collections::BTreeSet;
use std::rc::Rc;

use bytes::Bytes;
use foldhash::HashMap;

use super::Core;
use super::streams::{Kind, Reader, Stream};
use crate::mcp::sse::Position;

/// Most server streams of one session; the oldest ends when there are more.
const MAX_STREAMS: usize = 16;
/// Streams with these names are server streams.
const PREFIX: &str = "server-";

/// The server streams of all sessions.
pub(super) type Listeners = HashMap<String, Vec<Rc<Stream>>>;

/// What a session missed while it had no server stream: methods of `list_changed` notifications.
pub(super) type Missed = HashMap<String, BTreeSet<String>>;

impl Core {
    /// Opens a server stream, or resumes the one that `position` names.
    pub(super) fn listen(&self, sid: &str, position: Option<&Position>) -> Reader {
        let mut listeners = self.listeners.borrow_mut();
        let streams = listeners.entry(sid.to_owned()).or_default();
        let known =
            position.and_then(|position| streams.iter().find(|stream| stream.name() == position.stream));
        let (stream, position) = match known {
            Some(stream) => (stream.clone(), position),
            None => {
                let stream = Stream::new(format!("{PREFIX}{}", uuid::Uuid::new_v4()), self.next_epoch());
                streams.retain(|stream| stream.is_read() || stream.has_events());
                streams.push(stream.clone());
                if streams.len() > MAX_STREAMS {
                    streams.remove(0).end();
                }
                (stream, None)
            }
        };
        drop(listeners);
        let reader = stream.read(position);
        for method in self.missed.borrow_mut().remove(sid).unwrap_or_default() {
            stream.push(Kind::Notification, vec![notification(&method)]);
        }
        reader
    }

    /// Whether a `Last-Event-ID` names a server stream, of this sidecar or an earlier one.
    pub(super) fn is_server_stream(position: &Position) -> bool {
        position.stream.starts_with(PREFIX)
    }

    /// Whether a session has a server stream that somebody reads.
    pub(super) fn is_listening(&self, sid: &str) -> bool {
        self.listeners.borrow().get(sid).is_some_and(|streams| streams.iter().any(|stream| stream.is_read()))
    }

    /// One message to one of a session's server streams; whether there was one.
    fn tell_session(&self, sid: &str, payload: Bytes) -> bool {
        let listeners = self.listeners.borrow();
        let streams = listeners.get(sid).map(Vec::as_slice).unwrap_or_default();
        let newest = streams.iter().rev();
        // One that is just being resumed keeps the message for its reader.
        let stream = newest.clone().find(|stream| stream.is_read()).or_else(|| newest.clone().next());
        match stream {
            Some(stream) => stream.push(Kind::Notification, vec![payload]),
            None => return false,
        }
        true
    }

    /// A list changed: one message per session, now or when it next listens.
    pub(super) fn tell_list_changed(&self, method: &str) {
        let sids: Vec<String> =
            self.sessions.borrow().list().iter().map(|session| session.id.clone()).collect();
        for sid in sids {
            if !self.is_listening(&sid) || !self.tell_session(&sid, notification(method)) {
                self.missed.borrow_mut().entry(sid).or_default().insert(method.to_owned());
            }
        }
    }

    /// A notification of the host that belongs to no call, to the sessions that `wanted` picks.
    pub(super) fn tell_sessions(&self, payload: &Bytes, wanted: impl Fn(&str) -> bool) {
        let sids: Vec<String> = self.listeners.borrow().keys().cloned().collect();
        for sid in sids.iter().filter(|sid| wanted(sid)) {
            self.tell_session(sid, payload.clone());
        }
    }

    /// A session has ended: its streams end, and what was kept for it goes.
    pub(super) fn session_ended(&self, sid: &str) {
        for stream in self.listeners.borrow_mut().remove(sid).unwrap_or_default() {
            stream.end();
        }
        self.missed.borrow_mut().remove(sid);
        self.drop_questions_to(sid);
    }

    /// Every server stream ends for good.
    pub(super) fn end_listeners(&self) {
        for stream in self.listeners.borrow().values().flatten() {
            stream.end();
        }
    }

    /// Every stream ends resumable, once and at the very end: some clients resume only once, and the
    /// next sidecar is there before they do.
    pub(super) fn dismiss_readers(&self) {
        for stream in self.listeners.borrow().values().flatten() {
            stream.dismiss_reader();
        }
        for exchange in self.exchanges.borrow().values() {
            exchange.stream().dismiss_reader();
        }
    }
}

/// A notification without parameters.
fn notification(method: &str) -> Bytes {
    format!(r#"{{"jsonrpc":"2.0","method":"{method}"}}"#).into()
}
