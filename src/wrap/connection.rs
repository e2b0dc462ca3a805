//! The JSON-RPC connection to one server process: requests that wait for their answers, lines out, lines
//! in. It lives as long as the process; what was not answered by then learns how the process ended.
//!
//! Requests of callers say whose they are ([`Who`]); that is how a question of the server finds the one
//! session it can belong to. One that its caller gave up stays that session's until the server has answered
//! it, for a minute at most: it may still be at work there. Payloads are slices of what was read; nothing here parses them.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

use super::lines::{Cut, Cutter, on_one_line};
use crate::frame::codec::OutBuffer;
use crate::frame::envelope::{EnvelopeError, LARGE};
use crate::frame::messages::code;
use crate::frame::raw;
use crate::frame::{Message, Shape};
use crate::refhost::store::Outcome;
use crate::refhost::tools::{Pending as Future, error_outcome};

/// So many bytes may wait for a server that does not read its input; then calls are refused.
const MAX_UNREAD: usize = 256 << 20;
/// So many requests that were given up are remembered until the server answers them. With more nobody can
/// say any more whose its questions are.
const MAX_GIVEN_UP: usize = 10_000;
/// For so long one is waited for: a server that keeps to the specification never answers what was
/// cancelled, and must not lose its questions to all other sessions for that.
const GIVEN_UP_TIME: Duration = Duration::from_secs(60);
/// Least room for a read.
const READ: usize = 64 << 10;

/// Takes what the server says unasked. Must not block.
pub(super) trait Peer {
    /// It wants an answer under `id` (its own text).
    fn request(self: Rc<Self>, connection: &Rc<Connection>, id: Bytes, method: &str, params: Bytes);
    /// It wants none; `false` when there is no room for it now and it can come again in a moment.
    fn notification(self: Rc<Self>, connection: &Rc<Connection>, method: &str, params: &Bytes) -> bool;
    /// Completes when there is room for a notification again, or it is not worth waiting for.
    fn room(self: Rc<Self>) -> Future<()>;
    /// A line was no message.
    fn skipped(self: Rc<Self>, what: &str);
}

/// The caller a request belongs to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Who {
    /// The caller's session.
    pub(super) sid: String,
    /// The sidecar's id of the call or relayed request.
    pub(super) key: String,
}

/// Whom the server can mean by what it says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Addressee {
    /// The only session with requests that it has not answered; the newest one that is waited for.
    Waiting(Who),
    /// As above, but all of them were given up.
    Gone,
    /// Nobody, or one of several.
    Unclear,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Connection {
    out: RefCell<OutBuffer>,
    /// Bytes not taken by the server yet.
    unread: Cell<usize>,
    out_wanted: Notify,
    pending: RefCell<HashMap<u64, Pending>>,
    last_id: Cell<u64>,
    /// How many of the pending ones nobody waits for any more.
    given_up: Cell<usize>,
    /// There were too many of them to remember.
    has_forgotten: Cell<bool>,
    /// How the process ended.
    end: RefCell<Option<String>>,
}

#[derive(Debug)]
struct Pending {
    /// Absent once it was given up.
    reply: Option<oneshot::Sender<Outcome>>,
    given_up_at: Option<Instant>,
    who: Option<Who>,
}

/// A request that was sent. Dropped before its answer it is given up, not cancelled.
#[derive(Debug)]
pub(super) struct Sent {
    connection: Rc<Connection>,
    id: u64,
    answer: oneshot::Receiver<Outcome>,
}

/// Why there is no answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unanswered {
    /// It was given up; the server has been told.
    Cancelled,
    /// The server ended; how, for people.
    Ended(String),
}

impl Sent {
    /// The answer; a cancel is passed on to the server.
    pub(super) async fn answer(mut self, cancelled: &CancellationToken) -> Result<Outcome, Unanswered> {
        tokio::select! {
            biased;
            answer = &mut self.answer => answer.map_err(|_| Unanswered::Ended(self.connection.ended())),
            () = cancelled.cancelled() => {
                let params = format!(r#"{{"requestId":{},"reason":"cancelled"}}"#, self.id);
                self.connection.notify("notifications/cancelled", params.into());
                Err(Unanswered::Cancelled)
            }
        }
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.connection.give_up(self.id, Instant::now());
    }
}

impl Connection {
    /// Sends a request; `params` is the text of its parameters in parts.
    ///
    /// # Errors
    /// The outcome, when the server has ended or does not read its input.
    pub(super) fn request(
        self: &Rc<Self>,
        method: &str,
        params: impl IntoIterator<Item = Bytes>,
        who: Option<Who>,
    ) -> Result<Sent, Outcome> {
        if self.end.borrow().is_some() {
            return Err(error_outcome(code::FAILED, &format!("the server has ended ({})", self.ended())));
        }
        if self.unread.get() > MAX_UNREAD {
            return Err(error_outcome(code::FAILED, "the server does not read its input; try again"));
        }
        let id = self.last_id.get() + 1;
        self.last_id.set(id);
        let (reply, answer) = oneshot::channel();
        self.pending.borrow_mut().insert(id, Pending { reply: Some(reply), given_up_at: None, who });
        let head = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":{},"params":"#, raw::quote(method));
        self.push(head, params);
        Ok(Sent { connection: self.clone(), id, answer })
    }

    pub(super) fn notify(&self, method: &str, params: Bytes) {
        self.push(format!(r#"{{"jsonrpc":"2.0","method":{},"params":"#, raw::quote(method)), [params]);
    }

    /// Answers a request of the server with `member` (`result` or `error`).
    pub(super) fn answer(&self, id: &Bytes, member: &str, text: Bytes) {
        let id = String::from_utf8_lossy(id);
        self.push(format!(r#"{{"jsonrpc":"2.0","id":{id},"{member}":"#), [text]);
    }

    /// Answers a request of the server with an error.
    pub(super) fn refuse(&self, id: &Bytes, code: i32, message: &str) {
        let (member, text) = match error_outcome(code, message) {
            Outcome::Error(text) => ("error", text),
            Outcome::Result(text) => ("result", text),
        };
        self.answer(id, member, text);
    }

    /// `head`, the parts, and the two closing characters of a message.
    fn push(&self, head: String, parts: impl IntoIterator<Item = Bytes>) {
        let mut out = self.out.borrow_mut();
        let before = out.len();
        let parts = parts.into_iter().map(on_one_line);
        out.push_parts(std::iter::once(Bytes::from(head)).chain(parts).chain([Bytes::from_static(b"}\n")]));
        self.unread.set(self.unread.get() + out.len() - before);
        self.out_wanted.notify_one();
    }

    /// Whom the server can mean by what it says now.
    pub(super) fn addressee(&self) -> Addressee {
        self.addressee_at(Instant::now())
    }

    fn addressee_at(&self, now: Instant) -> Addressee {
        if self.has_forgotten.get() {
            return Addressee::Unclear;
        }
        self.let_go(now);
        let pending = self.pending.borrow();
        let mut sid: Option<&str> = None;
        let mut newest: Option<(u64, &Who)> = None;
        for (id, waiting) in pending.iter() {
            let Some(who) = &waiting.who else { continue };
            if sid.is_some_and(|sid| sid != who.sid) {
                return Addressee::Unclear;
            }
            sid = Some(&who.sid);
            if waiting.reply.is_some() && newest.is_none_or(|(newer, _)| newer < *id) {
                newest = Some((*id, who));
            }
        }
        match (newest, sid) {
            (Some((_, who)), _) => Addressee::Waiting(who.clone()),
            (None, Some(_)) => Addressee::Gone,
            (None, None) => Addressee::Unclear,
        }
    }

    /// Whether somebody still waits for this request.
    pub(super) fn has(&self, key: &str) -> bool {
        let is_it = |waiting: &Pending| waiting.who.as_ref().is_some_and(|who| who.key == key);
        self.pending.borrow().values().any(|waiting| waiting.reply.is_some() && is_it(waiting))
    }

    /// The server has answered this request: who waits for it, if anybody does.
    fn answered(&self, id: u64) -> Option<oneshot::Sender<Outcome>> {
        let reply = self.pending.borrow_mut().remove(&id)?.reply;
        if reply.is_none() {
            self.given_up.set(self.given_up.get() - 1);
        }
        reply
    }

    /// Nobody waits for this request any more; whose it is stays known until the server has answered it.
    fn give_up(&self, id: u64, now: Instant) {
        let mut pending = self.pending.borrow_mut();
        let Some(waiting) = pending.get_mut(&id) else { return };
        if waiting.who.is_none() {
            pending.remove(&id);
        } else if self.given_up.get() >= MAX_GIVEN_UP {
            pending.remove(&id);
            self.has_forgotten.set(true);
        } else if waiting.reply.take().is_some() {
            waiting.given_up_at = Some(now);
            self.given_up.set(self.given_up.get() + 1);
        }
    }

    /// What was given up long ago counts no more.
    fn let_go(&self, now: Instant) {
        let is_over =
            |waiting: &Pending| waiting.given_up_at.is_some_and(|at| now.duration_since(at) > GIVEN_UP_TIME);
        let mut pending = self.pending.borrow_mut();
        let before = pending.len();
        pending.retain(|_, waiting| !is_over(waiting));
        self.given_up.set(self.given_up.get() - (before - pending.len()));
    }

    fn ended(&self) -> String {
        self.end.borrow().clone().unwrap_or_else(|| "an unknown end".to_owned())
    }

    /// The process has ended and its output is read: whoever still waits learns it.
    pub(super) fn end(&self, how: &str) {
        *self.end.borrow_mut() = Some(how.to_owned());
        let unanswered = std::mem::take(&mut *self.pending.borrow_mut());
        drop(unanswered);
    }

    /// Writes what is to be written; returns when the server takes no more.
    pub(super) async fn write(self: Rc<Self>, mut input: impl AsyncWrite + Unpin) {
        let mut writing = OutBuffer::default();
        loop {
            while self.out.borrow().is_empty() {
                self.out_wanted.notified().await;
            }
            std::mem::swap(&mut writing, &mut *self.out.borrow_mut());
            while writing.has_remaining() {
                match input.write_buf(&mut writing).await {
                    Ok(count @ 1..) => self.unread.set(self.unread.get().saturating_sub(count)),
                    Ok(_) | Err(_) => {
                        tracing::debug!("the server does not take its input any more");
                        return;
                    }
                }
            }
        }
    }

    /// Reads messages to the end of the server's output.
    pub(super) async fn read(self: Rc<Self>, mut output: impl AsyncRead + Unpin, peer: Rc<dyn Peer>) {
        let mut cutter = Cutter::default();
        loop {
            while let Some(cut) = cutter.next() {
                self.take(cut, &peer).await;
            }
            cutter.buffer.reserve(READ);
            match output.read_buf(&mut cutter.buffer).await {
                Ok(1..) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => break,
            }
        }
        if let Some(cut) = cutter.end() {
            self.take(cut, &peer).await;
        }
    }

    async fn take(self: &Rc<Self>, cut: Cut, peer: &Rc<dyn Peer>) {
        let line = match cut {
            Cut::Line(line) => line,
            Cut::Blank => return peer.clone().skipped("a blank line"),
            Cut::TooLong { bytes, id } => {
                let error = format!("the server's answer of {bytes} bytes exceeds the limit of a line");
                if let Some(reply) = id.and_then(|id| self.answered(id)) {
                    let _ = reply.send(error_outcome(code::FAILED, &error));
                }
                return peer.clone().skipped("a line over the limit");
            }
        };
        match parse(&line).await {
            Ok(message) => self.receive(message, peer).await,
            Err(EnvelopeError::NotAnObject) if line.starts_with(b"[") => {
                // A batch, as a protocol version of 2025 allowed it.
                let messages: Vec<&serde_json::value::RawValue> =
                    serde_json::from_slice(&line).unwrap_or_default();
                for message in messages {
                    match Message::parse(&line.slice_ref(message.get().as_bytes())) {
                        Ok(message) => self.receive(message, peer).await,
                        Err(_) => peer.clone().skipped("no message in a batch"),
                    }
                }
            }
            Err(_) => peer.clone().skipped("no JSON-RPC message"),
        }
    }

    async fn receive(self: &Rc<Self>, message: Message, peer: &Rc<dyn Peer>) {
        let params = message.params.clone().unwrap_or_default();
        match (message.shape, message.method.as_deref()) {
            (Shape::Answer, _) => {
                let id = message.id.as_ref().and_then(|id| std::str::from_utf8(id).ok()?.parse().ok());
                let waiting = id.and_then(|id: u64| self.answered(id));
                // Some write every member, also the one they do not mean.
                let error = message.error.filter(|error| &error[..] != b"null" || message.result.is_none());
                match (waiting, error, message.result) {
                    (Some(reply), Some(error), _) => drop(reply.send(Outcome::Error(error))),
                    (Some(reply), None, Some(result)) => drop(reply.send(Outcome::Result(result))),
                    // Mostly the answer to what was cancelled meanwhile.
                    _ => tracing::debug!("an answer of the server that nobody waits for"),
                }
            }
            (Shape::Request, Some(method)) => {
                peer.clone().request(self, message.id.clone().unwrap_or_default(), method, params);
            }
            (Shape::Notification, Some(method)) => {
                if !peer.clone().notification(self, method, &params) {
                    // What still finds none then is lost.
                    peer.clone().room().await;
                    peer.clone().notification(self, method, &params);
                }
            }
            _ => {
                let id = message.id.as_ref().filter(|_| message.method.is_none());
                let id = id.and_then(|id| std::str::from_utf8(id).ok()?.parse().ok());
                if let Some(reply) = id.and_then(|id| self.answered(id)) {
                    let error = "the server's answer has neither a result nor an error";
                    let _ = reply.send(error_outcome(code::FAILED, error));
                }
                peer.clone().skipped("neither request nor answer");
            }
        }
    }
}

/// A large message is read beside the thread that everything else runs on. What is no UTF-8 is tried
/// again with replacement characters: better a wrong character than an answer that never comes.
async fn parse(line: &Bytes) -> Result<Message, EnvelopeError> {
    fn blocking(line: &Bytes) -> Result<Message, EnvelopeError> {
        match Message::parse(line) {
            Err(EnvelopeError::NotJson) if line.starts_with(b"{") && std::str::from_utf8(line).is_err() => {
                Message::parse(&String::from_utf8_lossy(line).into_owned().into())
            }
            parsed => parsed,
        }
    }
    if line.len() < LARGE {
        return blocking(line);
    }
    let line = line.clone();
    tokio::task::spawn_blocking(move || blocking(&line)).await.unwrap_or(Err(EnvelopeError::NotJson))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was asked of the server, by session; the request's id.
    fn ask(connection: &Rc<Connection>, sid: &str) -> (u64, Sent) {
        let who = Who { sid: sid.into(), key: format!("{sid} asks") };
        let sent = connection.request("tools/call", ["{}".into()], Some(who)).unwrap();
        (sent.id, sent)
    }

    #[test]
    fn what_was_given_up_is_its_sessions_for_a_minute_or_until_it_is_answered() {
        let connection = Rc::new(Connection::default());
        let start = Instant::now();
        let waiting = |sid: &str| Addressee::Waiting(Who { sid: sid.into(), key: format!("{sid} asks") });
        assert_eq!(connection.addressee_at(start), Addressee::Unclear);
        let (old, _old) = ask(&connection, "one");
        connection.give_up(old, start);
        assert_eq!(connection.addressee_at(start), Addressee::Gone);
        let (_, _other) = ask(&connection, "two");
        let later = start + GIVEN_UP_TIME;
        assert_eq!(connection.addressee_at(later), Addressee::Unclear, "it may still be the first one's");
        assert_eq!(connection.given_up.get(), 1);
        assert_eq!(connection.addressee_at(later + Duration::from_millis(1)), waiting("two"));
        assert_eq!((connection.given_up.get(), connection.pending.borrow().len()), (0, 1));
        // Too late, and nobody minds.
        assert!(connection.answered(old).is_none());
        connection.give_up(old, later);

        // An answer ends it at once; given up twice is once, and from then on.
        let (third, _third) = ask(&connection, "three");
        connection.give_up(third, later);
        connection.give_up(third, later + GIVEN_UP_TIME);
        assert_eq!((connection.addressee_at(later), connection.given_up.get()), (Addressee::Unclear, 1));
        assert!(connection.answered(third).is_none());
        assert_eq!((connection.addressee_at(later), connection.given_up.get()), (waiting("two"), 0));
        // What still has somebody who waits stays however long it takes.
        assert_eq!(connection.addressee_at(start + 1000 * GIVEN_UP_TIME), waiting("two"));
    }
}
