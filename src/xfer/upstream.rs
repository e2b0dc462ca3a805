//! The file server as a peer: keep-alive connections over its private socket, requests with its own
//! credentials, bodies that pass piece by piece without a copy.
//!
//! A connection is taken for one exchange and comes back when the reply's body has been read to its
//! end; a reply nobody reads to its end takes its connection with it, and the file server lets go of the
//! file. Knows no rules: see [`super::rules`].

use std::cell::{Cell, RefCell};
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{AUTHORIZATION, HOST, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Most connections that wait for their next exchange.
const MAX_IDLE: usize = 64;
/// So much of a reply is read at once, in bytes.
const READ_AT_ONCE: usize = 64 << 10;

/// Why the file server did not answer.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// It cannot be reached.
    #[error("cannot connect to the file server")]
    Unreachable(#[source] io::Error),
    /// The connection broke before it answered.
    #[error("the file server did not answer")]
    Broken(#[source] hyper::Error),
    /// The request cannot be written.
    #[error("the request cannot be passed on")]
    Unsendable(#[source] hyper::http::Error),
}

/// One file server; a handle shared by everything that asks it.
pub struct Upstream {
    socket: PathBuf,
    authorization: HeaderValue,
    idle: RefCell<Vec<SendRequest<Sent>>>,
}

impl Upstream {
    /// The one that listens on `socket`; `authorization` is what it expects in that header.
    pub fn new(socket: PathBuf, authorization: &str) -> Rc<Self> {
        let mut authorization =
            HeaderValue::from_str(authorization).unwrap_or_else(|_| HeaderValue::from_static(""));
        authorization.set_sensitive(true);
        Rc::new(Self { socket, authorization, idle: RefCell::default() })
    }

    /// Asks it; returns when the head of its reply is there.
    ///
    /// # Errors
    /// [`UpstreamError`].
    pub async fn ask(
        self: &Rc<Self>,
        method: Method,
        target: &str,
        mut headers: HeaderMap,
        body: Sent,
    ) -> Result<Response<Reply>, UpstreamError> {
        let progress = match &body {
            Sent::Upload(upload) => Some(upload.progress.clone()),
            Sent::Nothing => None,
        };
        headers.insert(AUTHORIZATION, self.authorization.clone());
        headers.insert(HOST, HeaderValue::from_static("localhost"));
        let mut request =
            Request::builder().method(method).uri(target).body(body).map_err(UpstreamError::Unsendable)?;
        *request.headers_mut() = headers;
        loop {
            let (mut connection, is_fresh) = match self.take_idle().await {
                Some(connection) => (connection, false),
                None => (self.connect().await?, true),
            };
            match connection.try_send_request(request).await {
                Ok(reply) => {
                    // Answered before it had the whole body: nobody else waits for the rest of that.
                    let is_done = progress.is_none_or(|progress| progress.end.get() != UploadEnd::Running);
                    let connection = is_done.then_some(connection);
                    let lease = Lease { upstream: self.clone(), connection };
                    return Ok(reply.map(|body| Reply::new(body, lease)));
                }
                Err(mut refused) => match refused.take_message() {
                    // It had died while it waited: nothing was sent.
                    Some(again) if !is_fresh => request = again,
                    _ => return Err(UpstreamError::Broken(refused.into_error())),
                },
            }
        }
    }

    async fn take_idle(&self) -> Option<SendRequest<Sent>> {
        loop {
            let mut connection = self.idle.borrow_mut().pop()?;
            if connection.is_closed() {
                continue;
            }
            if connection.ready().await.is_ok() {
                return Some(connection);
            }
        }
    }

    async fn connect(&self) -> Result<SendRequest<Sent>, UpstreamError> {
        let stream = UnixStream::connect(&self.socket).await.map_err(UpstreamError::Unreachable)?;
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(READ_AT_ONCE)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(UpstreamError::Broken)?;
        // Ends when its sender is gone.
        tokio::task::spawn_local(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to the file server ended early");
            }
        });
        Ok(sender)
    }
}

/// A connection in use.
struct Lease {
    upstream: Rc<Upstream>,
    connection: Option<SendRequest<Sent>>,
}

impl Lease {
    fn give_back(&mut self) {
        let Some(connection) = self.connection.take().filter(|connection| !connection.is_closed()) else {
            return;
        };
        let mut idle = self.upstream.idle.borrow_mut();
        if idle.len() < MAX_IDLE {
            idle.push(connection);
        }
    }
}

/// The body of a reply.
pub struct Reply {
    body: Incoming,
    lease: Lease,
}

impl Reply {
    fn new(body: Incoming, mut lease: Lease) -> Self {
        if body.is_end_stream() {
            lease.give_back();
        }
        Self { body, lease }
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if frame.is_none() || self.body.is_end_stream() {
            self.lease.give_back();
        }
        Poll::Ready(frame.map(|frame| frame.map_err(io::Error::other)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of a request to the file server.
pub enum Sent {
    /// None.
    Nothing,
    /// A caller's.
    Upload(Box<Upload>),
}

/// How an upload ended, as far as the caller is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UploadEnd {
    /// It goes on.
    Running,
    /// All of it came.
    Whole,
    /// The caller's connection broke, or it sent nothing for too long.
    Cut,
    /// What came is no body: its chunks are not written as they must be.
    Malformed,
    /// It is longer than announced.
    TooLong,
    /// Its caller may not send it any more.
    Revoked,
}

/// What is known of an upload, also after its body is gone.
pub struct Progress {
    /// Bytes passed on.
    pub received: Cell<u64>,
    /// How it ended.
    pub end: Cell<UploadEnd>,
}

/// A caller's body on its way to the file server. However it ends, for the file server it ends in
/// order: then it has written all it got, and says so, before anybody goes on with the rest.
pub struct Upload {
    /// Absent once it has ended.
    body: Option<Incoming>,
    announced: Option<u64>,
    rules: UploadRules,
    progress: Rc<Progress>,
    waits: Option<Pin<Box<Sleep>>>,
    revoked: Pin<Box<WaitForCancellationFutureOwned>>,
}

/// What holds for an upload.
pub struct UploadRules {
    /// At most so many bytes pass.
    pub limit: Option<u64>,
    /// It is cut when nothing comes for so long.
    pub patience: Duration,
    /// It is cut when its caller may not send it any more.
    pub revoked: CancellationToken,
    /// Takes the rest of a body that the file server did not want.
    pub dismiss: fn(Incoming),
}

impl Upload {
    /// `body` on its way.
    pub fn new(body: Incoming, rules: UploadRules) -> (Self, Rc<Progress>) {
        let progress = Rc::new(Progress { received: Cell::new(0), end: Cell::new(UploadEnd::Running) });
        let announced = body.size_hint().exact();
        let revoked = Box::pin(rules.revoked.clone().cancelled_owned());
        (
            Self { body: Some(body), announced, rules, progress: progress.clone(), waits: None, revoked },
            progress,
        )
    }

    fn end(&mut self, end: UploadEnd) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if matches!(end, UploadEnd::Whole | UploadEnd::Cut | UploadEnd::Malformed) {
            self.body = None;
        }
        self.progress.end.set(end);
        Poll::Ready(None)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.progress.end.get() != UploadEnd::Running {
            return Poll::Ready(None);
        }
        if self.revoked.as_mut().poll(cx).is_ready() {
            return self.end(UploadEnd::Revoked);
        }
        loop {
            let Some(body) = &mut self.body else { return Poll::Ready(None) };
            let frame = match Pin::new(body).poll_frame(cx) {
                Poll::Ready(frame) => frame,
                Poll::Pending => {
                    let patience = self.rules.patience;
                    let waits = self
                        .waits
                        .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + patience)));
                    ready!(waits.as_mut().poll(cx));
                    return self.end(UploadEnd::Cut);
                }
            };
            self.waits = None;
            let received = self.progress.received.get();
            match frame {
                None if self.announced.is_some_and(|announced| received != announced) => {
                    return self.end(UploadEnd::Cut);
                }
                None => return self.end(UploadEnd::Whole),
                Some(Err(error)) if is_malformed(&error) => return self.end(UploadEnd::Malformed),
                Some(Err(_)) => return self.end(UploadEnd::Cut),
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    let received = received + data.len() as u64;
                    if self.rules.limit.is_some_and(|limit| received > limit) {
                        return self.end(UploadEnd::TooLong);
                    }
                    self.progress.received.set(received);
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
            }
        }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Some(body) = self.body.take() {
            (self.rules.dismiss)(body);
        }
    }
}

/// Whether a caller's body is not written as HTTP has it, rather than broken off.
fn is_malformed(error: &hyper::Error) -> bool {
    use io::ErrorKind::{InvalidData, InvalidInput};
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<io::Error>());
    cause.is_some_and(|cause| matches!(cause.kind(), InvalidData | InvalidInput))
}

impl Body for Sent {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self.get_mut() {
            Self::Nothing => Poll::Ready(None),
            Self::Upload(upload) => upload.poll(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Nothing)
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Nothing => SizeHint::with_exact(0),
            // Its end may come early: it goes in chunks.
            Self::Upload(_) => SizeHint::default(),
        }
    }
}
