//! The link to the shim: one task owns the stream of frames, both directions, and the requests that
//! wait for an answer.
//!
//! Everybody else holds a [`Link`]: a bounded queue into that task. What the shim sends unasked goes
//! to the [`Peer`], synchronously: the reader never waits for a consumer. Frames that are no
//! messages are counted and logged, never answered. When the stream ends, every pending request
//! learns it.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use foldhash::HashMap;
use futures_util::StreamExt;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_util::codec::FramedRead;

use super::stdio::Halves;
use crate::frame::codec::OutBuffer;
use crate::frame::envelope::{EnvelopeError, LARGE, text};
use crate::frame::messages::{RpcError, code};
use crate::frame::{Frame, FrameCodec, FrameError, Message, Shape};

/// Frames that may wait in the queue; further senders wait.
const QUEUE: usize = 1024;
/// Bytes taken from the queue before the pipe has to catch up.
const HIGH_WATER: usize = 1 << 20;
/// How often the shim is pinged.
const PING_EVERY: Duration = Duration::from_secs(5);
/// When the first ping goes out, so that the lag is soon known.
const FIRST_PING: Duration = Duration::from_secs(1);
/// A ping unanswered for so long, with no byte received, means a stalled host (contract 10).
const STALLED_AFTER: Duration = Duration::from_secs(8);

/// A handle on the link; clones share it.
#[derive(Clone)]
pub struct Link {
    queue: mpsc::Sender<Command>,
    shared: Rc<Shared>,
}

struct Shared {
    next_id: Cell<u64>,
    heard: Cell<Instant>,
    ping_sent: Cell<Option<Instant>>,
    lag: Cell<Option<Duration>>,
    bad_frames: Cell<u64>,
    end: RefCell<Option<String>>,
}

enum Command {
    Request { id: u64, frame: Frame, reply: oneshot::Sender<Result<Answer, LinkError>> },
    Cancel { id: u64, frame: Frame },
    Send(Frame),
    Flush(oneshot::Sender<()>),
}

/// A successful answer, or the shim's error.
#[derive(Debug, Clone)]
pub enum Answer {
    /// The text of `result`.
    Result(Bytes),
    /// The text of `error`.
    Error(Bytes),
}

impl Answer {
    /// The result's text, or the error's message.
    ///
    /// # Errors
    /// The shim's error, for people.
    pub fn into_result(self) -> Result<Bytes, RpcError> {
        match self {
            Self::Result(text) => Ok(text),
            Self::Error(text) => Err(serde_json::from_slice(&text).unwrap_or_else(|_| RpcError {
                code: code::FAILED.into(),
                message: "unreadable error".into(),
            })),
        }
    }
}

/// Why a request got no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The stream ended before the answer came; whether the request was read is unknown.
    #[error("the link to the host ended")]
    Ended,
    /// The request was larger than a frame may be, and was not sent.
    #[error("{0}")]
    TooLarge(String),
}

/// What the shim sends unasked.
#[derive(Debug)]
pub enum Incoming {
    /// Wants an answer under `id` (its own text).
    Request {
        /// The id's text.
        id: Bytes,
        /// The method.
        method: String,
        /// The text of `params`; empty when absent.
        params: Bytes,
    },
    /// Wants none.
    Notification {
        /// The method.
        method: String,
        /// The text of `params`; empty when absent.
        params: Bytes,
    },
}

/// Who takes what the shim sends. Must not block.
pub trait Peer {
    /// One message.
    fn incoming(&self, message: Incoming);
}

/// How a link ended.
#[derive(Debug)]
pub enum LinkEnd {
    /// The shim closed its side.
    Closed,
    /// The stream failed or cannot be trusted any more.
    Broken(FrameError),
}

/// Builds a link and the task that owns it; the future ends with the stream.
pub fn open(halves: Halves) -> (Link, Unstarted) {
    let (queue, commands) = mpsc::channel(QUEUE);
    let shared = Rc::new(Shared {
        next_id: Cell::new(1),
        heard: Cell::new(Instant::now()),
        ping_sent: Cell::new(None),
        lag: Cell::new(None),
        bad_frames: Cell::new(0),
        end: RefCell::new(None),
    });
    let reader = FramedRead::with_capacity(
        Heard { inner: halves.0, shared: shared.clone() },
        FrameCodec::default(),
        64 << 10,
    );
    let link = Link { queue, shared: shared.clone() };
    (link, Unstarted { reader, writer: halves.1, commands, shared })
}

/// A link whose task does not run yet: the first frame can be awaited on it.
pub struct Unstarted {
    reader: FramedRead<Heard, FrameCodec>,
    writer: Box<dyn AsyncWrite + Unpin>,
    commands: mpsc::Receiver<Command>,
    shared: Rc<Shared>,
}

impl Unstarted {
    /// Waits for the first frame.
    ///
    /// # Errors
    /// The end of the stream as text for people.
    pub async fn first_frame(&mut self) -> Result<Bytes, String> {
        match self.reader.next().await {
            Some(Ok(frame)) => Ok(frame),
            Some(Err(error)) => Err(error.to_string()),
            None => Err("stdin was closed before the first frame".into()),
        }
    }

    /// Runs the link until the stream ends.
    pub async fn run(self, peer: Rc<dyn Peer>) -> LinkEnd {
        let shared = self.shared.clone();
        let mut owner = Owner {
            shared: self.shared,
            peer,
            pending: HashMap::default(),
            out: OutBuffer::default(),
            parsing: JoinSet::new(),
        };
        let end = owner.run(self.reader, self.writer, self.commands).await;
        *shared.end.borrow_mut() = Some(match &end {
            LinkEnd::Closed => "the host closed the link".into(),
            LinkEnd::Broken(error) => error.to_string(),
        });
        end
    }
}

impl Link {
    /// Sends a request and waits for its answer. Dropping the future drops the answer, not the
    /// request.
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn request(&self, method: &str, params: Vec<Bytes>) -> Result<Answer, LinkError> {
        let id = self.next_id();
        self.request_with_id(id, method, params).await
    }

    /// The id that the next [`Link::request_with_id`] may use, for requests that may be cancelled.
    pub fn next_id(&self) -> u64 {
        let id = self.shared.next_id.get();
        self.shared.next_id.set(id + 1);
        id
    }

    /// As [`Link::request`], under an id of [`Link::next_id`].
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn request_with_id(
        &self,
        id: u64,
        method: &str,
        params: Vec<Bytes>,
    ) -> Result<Answer, LinkError> {
        // The shim relies on this very beginning: it can name the request even when the rest is
        // more than its own JSON parser takes.
        let method = crate::frame::raw::quote(method);
        let head = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":{method},"params":"#);
        let frame = compose(head, params)?;
        let (reply, answer) = oneshot::channel();
        self.queue.send(Command::Request { id, frame, reply }).await.map_err(|_| LinkError::Ended)?;
        answer.await.unwrap_or(Err(LinkError::Ended))
    }

    /// Tells the host that a request's answer is not wanted any more; a request that was never sent,
    /// or has been answered, needs no word.
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn cancel(&self, id: u64, reason: &str) -> Result<(), LinkError> {
        let params = format!(r#"{{"requestId":{id},"reason":{}}}"#, crate::frame::raw::quote(reason));
        let head = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":"#;
        let frame = compose(head.into(), vec![params.into()])?;
        self.queue.send(Command::Cancel { id, frame }).await.map_err(|_| LinkError::Ended)
    }

    /// Sends a notification.
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn notify(&self, method: &str, params: &impl Serialize) -> Result<(), LinkError> {
        let params = serde_json::to_vec(params).unwrap_or_else(|_| b"{}".to_vec());
        let frame =
            compose(format!(r#"{{"jsonrpc":"2.0","method":"{method}","params":"#), vec![params.into()])?;
        self.queue.send(Command::Send(frame)).await.map_err(|_| LinkError::Ended)
    }

    /// Answers a request of the shim.
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn answer(
        &self,
        id: &Bytes,
        result: &Result<impl Serialize, RpcError>,
    ) -> Result<(), LinkError> {
        let (member, text) = match result {
            Ok(value) => ("result", serde_json::to_vec(value)),
            Err(error) => ("error", serde_json::to_vec(error)),
        };
        let id = String::from_utf8_lossy(id);
        let head = format!(r#"{{"jsonrpc":"2.0","id":{id},"{member}":"#);
        let frame = compose(head, vec![text.unwrap_or_else(|_| b"{}".to_vec()).into()])?;
        self.queue.send(Command::Send(frame)).await.map_err(|_| LinkError::Ended)
    }

    /// Answers a request of the shim with `member` (`result` or `error`) as it is.
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn answer_raw(&self, id: &Bytes, member: &str, text: Bytes) -> Result<(), LinkError> {
        let id = String::from_utf8_lossy(id);
        let frame = compose(format!(r#"{{"jsonrpc":"2.0","id":{id},"{member}":"#), vec![text])?;
        self.queue.send(Command::Send(frame)).await.map_err(|_| LinkError::Ended)
    }

    /// Sends a notification whose parameters are text already.
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn notify_raw(&self, method: &str, params: Bytes) -> Result<(), LinkError> {
        let head = format!(r#"{{"jsonrpc":"2.0","method":{},"params":"#, crate::frame::raw::quote(method));
        self.queue.send(Command::Send(compose(head, vec![params])?)).await.map_err(|_| LinkError::Ended)
    }

    /// Returns when everything queued before has been handed to the pipe, or the link has ended.
    pub async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        if self.queue.send(Command::Flush(done)).await.is_ok() {
            let _ = flushed.await;
        }
    }

    /// Whether the host has not answered for [`STALLED_AFTER`].
    pub fn is_stalled(&self) -> bool {
        self.shared.ping_sent.get().is_some_and(|sent| sent.elapsed() > STALLED_AFTER)
            && self.shared.heard.get().elapsed() > STALLED_AFTER
    }

    /// How long ago the last byte came.
    pub fn heard_ago(&self) -> Duration {
        self.shared.heard.get().elapsed()
    }

    /// The round trip of the last answered ping.
    pub fn lag(&self) -> Option<Duration> {
        self.shared.lag.get()
    }

    /// Frames that were no messages.
    pub fn bad_frames(&self) -> u64 {
        self.shared.bad_frames.get()
    }

    /// Why the link ended, if it has.
    pub fn end(&self) -> Option<String> {
        self.shared.end.borrow().clone()
    }
}

fn compose(head: String, params: Vec<Bytes>) -> Result<Frame, LinkError> {
    let mut parts = Vec::with_capacity(params.len() + 2);
    parts.push(Bytes::from(head));
    if params.is_empty() {
        parts.push(Bytes::from_static(b"{}"));
    }
    parts.extend(params);
    parts.push(Bytes::from_static(b"}"));
    Frame::from_parts(parts).map_err(|error| LinkError::TooLarge(error.to_string()))
}

/// What only the owning task touches.
struct Owner {
    shared: Rc<Shared>,
    peer: Rc<dyn Peer>,
    pending: HashMap<u64, oneshot::Sender<Result<Answer, LinkError>>>,
    out: OutBuffer,
    parsing: JoinSet<(Result<Message, EnvelopeError>, usize)>,
}

impl Owner {
    async fn run(
        &mut self,
        mut reader: FramedRead<Heard, FrameCodec>,
        mut writer: Box<dyn AsyncWrite + Unpin>,
        mut commands: mpsc::Receiver<Command>,
    ) -> LinkEnd {
        let mut flushes: Vec<oneshot::Sender<()>> = Vec::new();
        let mut pings = tokio::time::interval_at(tokio::time::Instant::now() + FIRST_PING, PING_EVERY);
        pings.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut ping_id = None;
        loop {
            if self.out.is_empty() {
                for flushed in flushes.drain(..) {
                    let _ = flushed.send(());
                }
            }
            tokio::select! {
                frame = reader.next() => match frame {
                    Some(Ok(frame)) => self.receive(frame, &mut ping_id),
                    Some(Err(error)) => return self.end(LinkEnd::Broken(error), ping_id).await,
                    None => return self.end(LinkEnd::Closed, ping_id).await,
                },
                command = commands.recv(), if self.out.len() < HIGH_WATER => {
                    let mut next = command;
                    while let Some(command) = next {
                        self.accept(command, &mut flushes);
                        next = if self.out.len() < HIGH_WATER { commands.try_recv().ok() } else { None };
                    }
                }
                written = writer.write_buf(&mut self.out), if !self.out.is_empty() => match written {
                    Ok(0) => return LinkEnd::Closed,
                    Ok(_) => {}
                    Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return LinkEnd::Closed,
                    Err(error) => return LinkEnd::Broken(error.into()),
                },
                Some(Ok((message, bytes))) = self.parsing.join_next() => self.take(message, bytes, &mut ping_id),
                _ = pings.tick() => self.ping(&mut ping_id),
            }
        }
    }

    /// What came in full before the end still counts.
    async fn end(&mut self, end: LinkEnd, mut ping_id: Option<u64>) -> LinkEnd {
        while let Some(parsed) = self.parsing.join_next().await {
            if let Ok((message, bytes)) = parsed {
                self.take(message, bytes, &mut ping_id);
            }
        }
        end
    }

    fn accept(&mut self, command: Command, flushes: &mut Vec<oneshot::Sender<()>>) {
        match command {
            // A request nobody waits for any more is not sent: its cancel came first.
            Command::Request { reply, .. } if reply.is_closed() => {}
            Command::Request { id, frame, reply } => {
                self.pending.insert(id, reply);
                self.out.push(frame);
            }
            Command::Cancel { id, frame } => {
                if self.pending.remove(&id).is_some() {
                    self.out.push(frame);
                }
            }
            Command::Send(frame) => self.out.push(frame),
            Command::Flush(done) => flushes.push(done),
        }
    }

    fn ping(&mut self, ping_id: &mut Option<u64>) {
        if ping_id.is_some() {
            return;
        }
        let id = self.shared.next_id.get();
        self.shared.next_id.set(id + 1);
        let head = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"bridge/ping","params":"#);
        if let Ok(frame) = compose(head, Vec::new()) {
            self.out.push(frame);
            *ping_id = Some(id);
            self.shared.ping_sent.set(Some(Instant::now()));
        }
    }

    /// A small frame is read at once, a large one beside this thread; it then comes back through
    /// `parsing`, after smaller ones that came later.
    fn receive(&mut self, frame: Bytes, ping_id: &mut Option<u64>) {
        if frame.len() < LARGE {
            let message = Message::parse(&frame);
            self.take(message, frame.len(), ping_id);
        } else {
            let bytes = frame.len();
            self.parsing.spawn_blocking(move || (Message::parse(&frame), bytes));
        }
    }

    fn take(&mut self, message: Result<Message, EnvelopeError>, bytes: usize, ping_id: &mut Option<u64>) {
        let message = match message {
            Ok(message) if message.shape != Shape::Invalid => message,
            Ok(message) => {
                // An answer without content still ends the request it names.
                let id = text(message.id.as_ref()).and_then(|id| id.parse::<u64>().ok());
                if let Some(waiter) = id.and_then(|id| self.pending.remove(&id)) {
                    let error =
                        r#"{"code":-32603,"message":"the host's answer has neither result nor error"}"#;
                    let _ = waiter.send(Ok(Answer::Error(Bytes::from_static(error.as_bytes()))));
                }
                return self.bad_frame(bytes, "neither request nor answer");
            }
            Err(error) => return self.bad_frame(bytes, &error.to_string()),
        };
        let params = message.params.unwrap_or_default();
        match (message.shape, message.method) {
            (Shape::Request, Some(method)) if method == "bridge/ping" => {
                let head = format!(r#"{{"jsonrpc":"2.0","id":{},"result":"#, message.reply_id);
                if let Ok(frame) = compose(head, Vec::new()) {
                    self.out.push(frame);
                }
            }
            (Shape::Request, Some(method)) => {
                let id = message.id.unwrap_or_default();
                self.peer.incoming(Incoming::Request { id, method, params });
            }
            (Shape::Notification, Some(method)) => {
                self.peer.incoming(Incoming::Notification { method, params });
            }
            _ => {
                let id = text(message.id.as_ref()).and_then(|id| id.parse::<u64>().ok());
                if id.is_some() && id == *ping_id {
                    *ping_id = None;
                    self.shared.lag.set(self.shared.ping_sent.take().map(|sent| sent.elapsed()));
                    return;
                }
                let answer = match message.error {
                    Some(error) => Answer::Error(error),
                    None => Answer::Result(message.result.unwrap_or_default()),
                };
                match id.and_then(|id| self.pending.remove(&id)) {
                    // The waiter may be gone: then nobody wants the answer.
                    Some(waiter) => drop(waiter.send(Ok(answer))),
                    None => tracing::debug!("an answer that nobody waits for"),
                }
            }
        }
    }

    fn bad_frame(&self, bytes: usize, why: &str) {
        let count = self.shared.bad_frames.get() + 1;
        self.shared.bad_frames.set(count);
        if count == 1 || count.is_multiple_of(50) {
            tracing::warn!(count, bytes, why, "frame ignored");
        }
    }
}

/// Notes when the last byte came: any byte counts as life.
struct Heard {
    inner: Box<dyn AsyncRead + Unpin>,
    shared: Rc<Shared>,
}

impl AsyncRead for Heard {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let poll = Pin::new(&mut self.inner).poll_read(cx, buf);
        if poll.is_ready() {
            self.shared.heard.set(Instant::now());
        }
        poll
    }
}
