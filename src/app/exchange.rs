//! One request of a caller that the host answers, a tool call or a relayed method, as long as somebody
//! may want its outcome: who asked, the stream of what comes before the answer, the answer itself.
//!
//! The seat is what changes when a caller comes back by sending the request again: another session,
//! another JSON-RPC id, another stream; the exchange with the host stays the same one.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use bytes::Bytes;
use tokio_util::sync::CancellationToken;

use super::streams::{Kind, Stream};
use crate::mcp::call::ToolResult;
use crate::mcp::reply;

/// How an exchange ended, for its caller.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// A tool's result, be it an error of the tool or of ours.
    Result(ToolResult),
    /// The host's answer to a relayed request: the text of `result`.
    Relayed(Bytes),
    /// The host's error to a relayed request: the text of `error`.
    RelayedError(Bytes),
    /// Its caller cancelled it, or the session ended: nobody waits for a result.
    Cancelled,
}

impl Outcome {
    /// The JSON-RPC reply.
    pub fn reply(&self, rpc_id: &str) -> Vec<Bytes> {
        match self {
            Self::Result(result) => reply::result(rpc_id, result.text.clone()),
            Self::Relayed(result) => reply::result(rpc_id, result.clone()),
            Self::RelayedError(error) => reply::raw_error(rpc_id, error.clone()),
            Self::Cancelled => reply::error(rpc_id, reply::code::CANCELLED, "cancelled"),
        }
    }

    /// The bytes that are kept for a caller that is away.
    pub fn weight(&self) -> usize {
        match self {
            Self::Result(result) => result.text.len(),
            Self::Relayed(text) | Self::RelayedError(text) => text.len(),
            Self::Cancelled => 0,
        }
    }
}

/// Why an exchange was cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancel {
    /// `notifications/cancelled`, or a broken connection with `cancelOnDisconnect`.
    Caller,
    /// The session ended, or its token was replaced.
    SessionEnded,
    /// The operator said so.
    Operator,
    /// The bridge ends and the grace is over.
    Stopping,
}

impl Cancel {
    /// For the host and, where somebody still waits, the caller.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Caller => "cancelled by the caller",
            Self::SessionEnded => "the caller's session ended",
            Self::Operator => "cancelled by the operator",
            Self::Stopping => "the bridge is stopping",
        }
    }
}

/// Who waits for an outcome.
#[derive(Clone)]
pub struct Seat {
    /// The session.
    pub sid: String,
    /// The JSON-RPC id, its own text.
    pub rpc_id: String,
    /// The caller's progress token, its own text.
    pub progress_token: Option<Bytes>,
    /// Whether the caller takes a stream.
    pub accepts_stream: bool,
    /// What comes before the answer, and the answer.
    pub stream: Rc<Stream>,
}

impl Seat {
    /// The progress token as text.
    pub fn token_text(&self) -> Option<String> {
        self.progress_token.as_ref().map(|token| String::from_utf8_lossy(token).into_owned())
    }

    /// The same caller on a fresh stream of the same name.
    pub fn again(&self, epoch: u64) -> Self {
        let stream = Stream::new(self.stream.name().to_owned(), epoch);
        Self { stream, ..self.clone() }
    }
}

/// See the module.
pub struct Exchange {
    /// What the host knows it by: the call id, or a key of the same form for a relayed request.
    pub key: String,
    /// Whether the ledger knows it: a tool call.
    pub is_call: bool,
    seat: RefCell<Rc<Seat>>,
    /// Counts those who took the seat.
    pub takeovers: Cell<u64>,
    outcome: RefCell<Option<Outcome>>,
    progress: Cell<Option<f64>>,
    /// Cancelled when the host is to be told to stop.
    pub cancelled: CancellationToken,
    cause: Cell<Option<Cancel>>,
}

impl Exchange {
    /// A new one.
    pub fn new(key: String, is_call: bool, seat: Seat) -> Rc<Self> {
        Rc::new(Self {
            key,
            is_call,
            seat: RefCell::new(Rc::new(seat)),
            takeovers: Cell::new(0),
            outcome: RefCell::default(),
            progress: Cell::new(None),
            cancelled: CancellationToken::new(),
            cause: Cell::new(None),
        })
    }

    /// Who waits now.
    pub fn seat(&self) -> Rc<Seat> {
        self.seat.borrow().clone()
    }

    /// The stream of who waits now.
    pub fn stream(&self) -> Rc<Stream> {
        self.seat.borrow().stream.clone()
    }

    /// Whether whoever waits now takes a stream.
    pub fn accepts_stream(&self) -> bool {
        self.seat.borrow().accepts_stream
    }

    /// Whether it belongs to this session.
    pub fn belongs_to(&self, sid: &str) -> bool {
        self.seat.borrow().sid == sid
    }

    /// Another caller takes the seat; the one before gets nothing more.
    pub fn take_seat(&self, seat: Seat) {
        self.takeovers.set(self.takeovers.get() + 1);
        self.progress.set(None);
        let before = self.seat.replace(Rc::new(seat));
        before.stream.end();
        self.offer();
    }

    /// The outcome, once there is one.
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome.borrow().clone()
    }

    /// Replaces the outcome by a smaller one: it was dropped for lack of room.
    pub fn replace_outcome(&self, outcome: Outcome) {
        self.outcome.replace(Some(outcome));
    }

    /// It has ended.
    pub fn finish(&self, outcome: Outcome) {
        self.outcome.replace(Some(outcome));
        self.offer();
    }

    /// Puts the outcome, if there is one, onto the current stream.
    fn offer(&self) {
        let seat = self.seat.borrow();
        match &*self.outcome.borrow() {
            None => {}
            Some(Outcome::Cancelled) => seat.stream.end(),
            Some(outcome) => seat.stream.push(Kind::Response, outcome.reply(&seat.rpc_id)),
        }
    }

    /// Asks for an end; whether it was the first to ask.
    pub fn cancel(&self, cause: Cancel) -> bool {
        if self.cancelled.is_cancelled() || self.outcome.borrow().is_some() {
            return false;
        }
        self.cause.set(Some(cause));
        self.cancelled.cancel();
        true
    }

    /// Why it was cancelled.
    pub fn cause(&self) -> Cancel {
        self.cause.get().unwrap_or(Cancel::Caller)
    }

    /// Progress for the caller, under its own token; dropped when it has none, or when the value does
    /// not increase (a MUST of the specification that hosts do not always keep). `members` are the
    /// further ones, each `,"key":value`.
    pub fn tell_progress(&self, value: f64, value_text: &str, members: &str) {
        let seat = self.seat.borrow();
        let Some(token) = &seat.progress_token else { return };
        if !value.is_finite() || self.progress.get().is_some_and(|last| value <= last) {
            return;
        }
        self.progress.set(Some(value));
        let token = String::from_utf8_lossy(token);
        let text = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":{value_text}{members}}}}}"#
        );
        seat.stream.push(Kind::Progress, vec![text.into()]);
    }

    /// Whether any progress was told.
    pub fn has_progress(&self) -> bool {
        self.progress.get().is_some()
    }

    /// A notification for the caller.
    pub fn tell(&self, payload: Vec<Bytes>) {
        self.seat.borrow().stream.push(Kind::Notification, payload);
    }
}
