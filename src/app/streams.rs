//! One resumable stream of messages to a caller (contract 4.1): a call's, or a session's server
//! stream.
//!
//! ```text
//! host ──push──▶ [bounded buffer] ◀──pull── Reader (an HTTP body) ──▶ caller
//! ```
//!
//! The reader pulls, so a slow or dead caller costs exactly the buffer. Old progress and log messages
//! fall out of it; questions and the response never do. A stream has one reader at a time: the newest,
//! who may begin anywhere the buffer still reaches. It does not know what its messages mean.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream as FutureStream;
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep};

use crate::mcp::sse::{self, Position};

/// A silent stream says so this often (contract 4.1: at least every 15 s).
const KEEP_ALIVE: Duration = Duration::from_secs(14);
/// Messages kept for a reader that is slow or away.
const MAX_EVENTS: usize = 4096;
/// Their bytes, the response not counted.
const MAX_BYTES: usize = 1 << 20;

/// What kind of message an event holds; decides what may be lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Progress: a newer one replaces one that nobody has read yet.
    Progress,
    /// A notification: the oldest go when there are too many.
    Notification,
    /// A question to the caller: stays.
    Question,
    /// The response: stays, and is the last.
    Response,
}

struct Event {
    number: u64,
    kind: Kind,
    payload: Vec<Bytes>,
}

impl Event {
    fn len(&self) -> usize {
        self.payload.iter().map(Bytes::len).sum()
    }
}

/// See the module.
pub struct Stream {
    name: String,
    epoch: u64,
    state: RefCell<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    events: VecDeque<Event>,
    bytes: usize,
    last: u64,
    ended: bool,
    /// Which reader is the current one; earlier ones end.
    reader: u64,
    is_read: bool,
    /// The last event the current reader has taken.
    taken: u64,
    waker: Option<Waker>,
}

impl Stream {
    /// A stream named `name` of the sidecar `epoch`.
    pub fn new(name: String, epoch: u64) -> Rc<Self> {
        Rc::new(Self { name, epoch, state: RefCell::default(), changed: Notify::new() })
    }

    /// Its name, as in its events' ids.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Appends a message; ignored after the end.
    pub fn push(&self, kind: Kind, payload: Vec<Bytes>) {
        let mut state = self.state.borrow_mut();
        if state.ended {
            return;
        }
        state.last += 1;
        let event = Event { number: state.last, kind, payload };
        let unread = state.events.back().filter(|last| last.number > state.taken || !state.is_read);
        if kind == Kind::Progress && unread.is_some_and(|last| last.kind == Kind::Progress) {
            let replaced = state.events.pop_back().map_or(0, |last| last.len());
            state.bytes -= replaced;
        }
        if kind == Kind::Response {
            state.ended = true;
        } else {
            state.bytes += event.len();
        }
        state.events.push_back(event);
        while state.events.len() > MAX_EVENTS || state.bytes > MAX_BYTES {
            let droppable = |event: &Event| matches!(event.kind, Kind::Progress | Kind::Notification);
            let Some(index) = state.events.iter().position(droppable) else { break };
            let dropped = state.events.remove(index).map_or(0, |event| event.len());
            state.bytes -= dropped;
        }
        self.wake(state);
    }

    /// Nothing more will come, not even a response.
    pub fn end(&self) {
        let mut state = self.state.borrow_mut();
        state.ended = true;
        self.wake(state);
    }

    fn wake(&self, mut state: std::cell::RefMut<'_, State>) {
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_waiters();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether there is anything to send.
    pub fn has_events(&self) -> bool {
        !self.state.borrow().events.is_empty()
    }

    /// Whether there is anything to send besides the response.
    pub fn has_more_than_the_response(&self) -> bool {
        self.state.borrow().events.iter().any(|event| event.kind != Kind::Response)
    }

    /// Whether somebody reads it.
    pub fn is_read(&self) -> bool {
        self.state.borrow().is_read
    }

    /// Returns at the next message, end, or coming or going of a reader.
    pub async fn change(&self) {
        self.changed.notified().await;
    }

    /// Ends the current reader; the stream goes on and can be resumed.
    pub fn dismiss_reader(&self) {
        let mut state = self.state.borrow_mut();
        state.reader += 1;
        state.is_read = false;
        self.wake(state);
    }

    /// A reader that begins after `position` (at the oldest kept event without one); the one before
    /// it ends.
    pub fn read(self: &Rc<Self>, position: Option<&Position>) -> Reader {
        let mut state = self.state.borrow_mut();
        state.reader += 1;
        state.is_read = true;
        let taken =
            position.filter(|position| position.epoch == self.epoch).map_or(0, |position| position.number);
        state.taken = taken.min(state.last);
        let reader = Reader {
            stream: self.clone(),
            number: state.reader,
            pending: VecDeque::from([sse::priming(&self.position(state.taken))]),
            silence: Box::pin(tokio::time::sleep(KEEP_ALIVE)),
        };
        self.wake(state);
        reader
    }

    fn position(&self, number: u64) -> Position {
        Position { stream: self.name.clone(), epoch: self.epoch, number }
    }
}

/// The body of an HTTP reply: the stream's events from a position on, until the stream ends or
/// another reader takes over.
pub struct Reader {
    stream: Rc<Stream>,
    number: u64,
    pending: VecDeque<Bytes>,
    silence: Pin<Box<Sleep>>,
}

impl Reader {
    /// Whether it ended because another took over, or was told to: the stream itself goes on.
    pub fn is_superseded(&self) -> bool {
        self.stream.state.borrow().reader != self.number
    }
}

impl FutureStream for Reader {
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let this = &mut *self;
        if this.pending.is_empty() {
            let mut state = this.stream.state.borrow_mut();
            if state.reader != this.number {
                return Poll::Ready(None);
            }
            let taken = state.taken;
            match state.events.iter().find(|event| event.number > taken) {
                Some(event) => {
                    let number = event.number;
                    this.pending = sse::event(&this.stream.position(number), &event.payload).into();
                    state.taken = number;
                }
                None if state.ended => return Poll::Ready(None),
                None => state.waker = Some(cx.waker().clone()),
            }
        }
        if let Some(piece) = this.pending.pop_front() {
            this.silence.as_mut().reset(Instant::now() + KEEP_ALIVE);
            return Poll::Ready(Some(piece));
        }
        if this.silence.as_mut().poll(cx).is_ready() {
            this.silence.as_mut().reset(Instant::now() + KEEP_ALIVE);
            // Registers the timer anew.
            let _ = this.silence.as_mut().poll(cx);
            return Poll::Ready(Some(Bytes::from_static(sse::COMMENT)));
        }
        Poll::Pending
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = self.stream.state.borrow_mut();
        if state.reader == self.number {
            state.is_read = false;
            self.stream.wake(state);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt as _;

    use super::*;

    fn text(number: u64) -> Vec<Bytes> {
        vec![format!("{number}").into()]
    }

    /// What a reader has to give right now.
    async fn now(reader: &mut Reader) -> (String, bool) {
        let mut seen = String::new();
        loop {
            match futures_util::poll!(reader.next()) {
                Poll::Ready(Some(piece)) => seen.push_str(std::str::from_utf8(&piece).unwrap()),
                Poll::Ready(None) => return (seen, true),
                Poll::Pending => return (seen, false),
            }
        }
    }

    fn data(seen: &str) -> Vec<&str> {
        seen.lines().filter_map(|line| line.strip_prefix("data: ")).collect()
    }

    #[tokio::test]
    async fn a_reader_gets_everything_in_order_and_then_the_end() {
        let stream = Stream::new("s".into(), 9);
        stream.push(Kind::Notification, text(1));
        let mut reader = stream.read(None);
        let (seen, ended) = now(&mut reader).await;
        assert!(seen.starts_with("id: s.9.0\nretry: 2000\ndata:\n\nid: s.9.1\n") && !ended, "{seen}");
        stream.push(Kind::Progress, text(2));
        assert_eq!(data(&now(&mut reader).await.0), ["2"]);
        stream.push(Kind::Response, text(3));
        stream.push(Kind::Notification, text(4));
        let (seen, ended) = now(&mut reader).await;
        assert_eq!((data(&seen), ended), (vec!["3"], true));
    }

    #[tokio::test]
    async fn a_resumed_reader_goes_on_after_its_position_and_ends_the_one_before() {
        let stream = Stream::new("s".into(), 9);
        let mut first = stream.read(None);
        for number in 1..=3 {
            stream.push(Kind::Notification, text(number));
        }
        now(&mut first).await;
        let at = |epoch, number| Position { stream: "s".into(), epoch, number };
        let mut second = stream.read(Some(&at(9, 2)));
        assert!(now(&mut first).await.1, "the earlier reader ended");
        assert_eq!(data(&now(&mut second).await.0), ["3"]);
        // A position of an earlier sidecar: everything that is kept.
        let mut third = stream.read(Some(&at(8, 2)));
        assert_eq!(data(&now(&mut third).await.0), ["1", "2", "3"]);
        drop(second);
        assert!(stream.is_read(), "only the current reader counts");
        drop(third);
        assert!(!stream.is_read());
    }

    #[tokio::test]
    async fn a_flood_costs_a_bounded_buffer_and_never_the_response() {
        let stream = Stream::new("s".into(), 9);
        for number in 0..10_000 {
            stream.push(Kind::Notification, vec![Bytes::from(vec![b'x'; 1000 + number % 7])]);
        }
        stream.push(Kind::Question, text(1));
        for number in 0..1000 {
            stream.push(Kind::Progress, text(number));
            stream.push(Kind::Notification, text(number));
        }
        stream.push(Kind::Response, text(77));
        assert!(stream.state.borrow().events.len() <= MAX_EVENTS && stream.state.borrow().bytes <= MAX_BYTES);
        let mut reader = stream.read(None);
        let (seen, ended) = now(&mut reader).await;
        assert!(ended && data(&seen).last() == Some(&"77") && data(&seen).contains(&"1"));
    }

    #[tokio::test]
    async fn unread_progress_is_replaced_by_newer_progress() {
        let stream = Stream::new("s".into(), 9);
        for number in 0..100 {
            stream.push(Kind::Progress, text(number));
        }
        let mut reader = stream.read(None);
        assert_eq!(data(&now(&mut reader).await.0), ["99"]);
        stream.push(Kind::Progress, text(100));
        assert_eq!(data(&now(&mut reader).await.0), ["100"], "what was read is not taken back");
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_stream_says_that_it_lives() {
        let stream = Stream::new("s".into(), 9);
        let mut reader = stream.read(None);
        now(&mut reader).await;
        for _ in 0..3 {
            let comment = tokio::time::timeout(Duration::from_secs(15), reader.next()).await.unwrap();
            assert_eq!(comment.unwrap(), sse::COMMENT);
        }
    }
}
