//! HTTP/1.1: accepts connections, judges each request in the order of contract 1, reads bodies
//! within limits, and hands what is left to an [`Endpoint`].
//!
//! Knows paths, methods, `Host`, `Origin`, `Authorization` and sizes; knows no JSON-RPC, no session
//! and no tool. [`guard`] holds the pure rules, [`body`] the bodies both ways, [`route`] the order.

pub mod body;
pub mod guard;
mod patient;
mod route;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::TcpListener as StdListener;
use std::rc::Rc;
use std::time::{Duration, Instant};

use hyper::Response;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::crash::{self, Carries};

pub use body::{Body, MAX_BODY, Passage};
use patient::Patient;

/// Most connections at a time. A newcomer then takes the place of the oldest one that has not shown the
/// token yet, so that strangers cannot shut everybody out; without such a one it waits in the
/// listener's queue.
const MAX_CONNECTIONS: usize = 4096;
/// A caller that takes no byte of its response for so long is gone: its call is an orphan then.
const WRITE_STALL: Duration = Duration::from_secs(60);
/// A request's head must be complete within this time; an idle keep-alive connection ends by it too.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a connection that was just accepted may take to send its first request when all end.
const NEWCOMER_TIME: Duration = Duration::from_millis(200);
/// For how long it is looked then whether a request has come.
const LAST_LOOK: Duration = Duration::from_millis(5);
/// Longest head of a request in bytes.
const MAX_HEAD: usize = 64 << 10;

/// What a request asks for once route, host and token are judged.
#[derive(Debug, Clone, Default)]
pub struct Head {
    /// `mcp-session-id`, when it is one plain value.
    pub session: Option<String>,
    /// `MCP-Protocol-Version`.
    pub protocol_version: Option<String>,
    /// `Last-Event-ID`.
    pub last_event_id: Option<String>,
    /// `Accept` names `text/event-stream`.
    pub accepts_stream: bool,
    /// The connection it came on; see [`Endpoint::connection`].
    pub connection: u64,
}

/// Why a request was refused before its message was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// `Host` is missing, stands twice, or the target is in absolute form.
    BadHost,
    /// `Host` names something else.
    ForbiddenHost,
    /// `Origin` names something else.
    ForbiddenOrigin,
    /// No or wrong bearer token.
    Unauthorized,
    /// The body is over [`MAX_BODY`].
    TooLarge,
    /// The body stopped coming.
    TimedOut,
    /// The body ended before its announced end.
    Cut,
    /// Too many large bodies at once.
    Overloaded,
    /// A fault of ours.
    Internal,
}

/// What tells whether the responses written to a connection arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionEvent {
    /// The next request came: whoever sent it has read what went before.
    NextRequest,
    /// It was closed in order.
    Closed,
    /// It broke.
    Broken,
}

/// Whether the bridge can do its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// It can.
    Ready,
    /// It cannot, for this reason.
    Unready(&'static str),
}

/// What stands behind the checks.
#[allow(async_fn_in_trait)] // One thread: no caller needs the futures to be `Send`.
pub trait Endpoint: 'static {
    /// For `/readyz`.
    fn health(&self) -> Health;
    /// Whether `Host` or `Origin` may name `name` (lower case, no port) beyond IP literals and
    /// `localhost`.
    fn allows_name(&self, name: &str) -> bool;
    /// The answer to a nonce that is out now (`/livez/<nonce>`).
    fn answers(&self, nonce: &str) -> Option<String>;
    /// Told of each request's `Host` (lower case); the passage is held until the response is done with.
    fn crosses(&self, name: &str) -> Option<Passage>;
    /// Judges the value of `Authorization`; `None` when it is absent or stands twice.
    fn authorizes(&self, authorization: Option<&[u8]>) -> bool;
    /// Something happened on a connection that a response went out on.
    fn connection(&self, connection: u64, event: ConnectionEvent);
    /// Whether connections are to end after the reply they are writing.
    fn is_draining(&self) -> bool;
    /// The answer to a refused request.
    fn refuse(&self, refusal: Refusal) -> Response<Body>;
    /// A POSTed message.
    async fn post(self: Rc<Self>, head: Head, body: bytes::Bytes) -> Response<Body>;
    /// A GET for a stream.
    async fn get(self: Rc<Self>, head: Head) -> Response<Body>;
    /// The end of a session.
    async fn delete(self: Rc<Self>, head: Head) -> Response<Body>;
    /// `POST /host-llm`.
    async fn host_llm(self: Rc<Self>, head: Head, body: bytes::Bytes) -> Response<Body>;
    /// Anything below `/xfer`.
    async fn xfer(self: Rc<Self>, request: hyper::Request<hyper::body::Incoming>) -> Response<Body>;
}

/// The running server; clones share it.
#[derive(Clone)]
pub struct Server {
    /// Cancel to stop accepting; open connections live on.
    pub stop_accepting: CancellationToken,
    /// Cancel to let every connection end after the reply it is writing.
    pub close_connections: CancellationToken,
    /// The connections' tasks.
    pub connections: TaskTracker,
}

/// Starts to serve `listener`; must run inside a `LocalSet`.
///
/// # Errors
/// When the listener cannot be made non-blocking.
pub fn serve<E: Endpoint>(listener: StdListener, endpoint: Rc<E>) -> std::io::Result<Server> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let server = Server {
        stop_accepting: CancellationToken::new(),
        close_connections: CancellationToken::new(),
        connections: TaskTracker::new(),
    };
    tokio::task::spawn_local(accept(listener, endpoint, server.clone()));
    Ok(server)
}

/// Connections that have not shown the token, oldest first, and the way to end them.
type Strangers = Rc<RefCell<BTreeMap<u64, CancellationToken>>>;

async fn accept<E: Endpoint>(listener: TcpListener, endpoint: Rc<E>, server: Server) {
    let places = std::sync::Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let budget = body::Budget::default();
    let strangers = Strangers::default();
    let mut number = 0;
    loop {
        if places.available_permits() == 0
            && let Some((_, oldest)) = strangers.borrow_mut().pop_first()
        {
            oldest.cancel();
        }
        // Whoever is not taken off the queue by then waits there for the next sidecar: taken later, they would
        // go with this process.
        let place = tokio::select! {
            biased;
            () = server.stop_accepting.cancelled() => return,
            place = places.clone().acquire_owned() => place,
        };
        let stream = tokio::select! {
            biased;
            () = server.stop_accepting.cancelled() => return,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of descriptors, or a connection that died in the queue: the listener lives on.
                    tracing::warn!(%error, "accepting a connection failed");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    continue;
                }
            },
        };
        number += 1;
        let close = server.close_connections.clone();
        let evicted = CancellationToken::new();
        strangers.borrow_mut().insert(number, evicted.clone());
        let connection =
            connection(stream, number, endpoint.clone(), budget.clone(), close, strangers.clone());
        let strangers = strangers.clone();
        server.connections.spawn_local(async move {
            tokio::select! {
                () = connection => {}
                () = evicted.cancelled() => {}
            }
            strangers.borrow_mut().remove(&number);
            drop(place);
        });
    }
}

async fn connection<E: Endpoint>(
    stream: TcpStream,
    number: u64,
    endpoint: Rc<E>,
    budget: body::Budget,
    close: CancellationToken,
    strangers: Strangers,
) {
    let _ = stream.set_nodelay(true);
    let known = || drop(strangers.borrow_mut().remove(&number));
    let has_asked = Cell::new(false);
    let service = service_fn(|request| {
        has_asked.set(true);
        route::handle(endpoint.clone(), number, budget.clone(), &known, request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD)
        .serve_connection(
            TokioIo::new(Patient::new(crash::watch(stream, Carries::Responses), WRITE_STALL)),
            service,
        );
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = close.cancelled() => {
            // A newcomer's request is on its way, and anybody's may have arrived unread: the end would
            // reach it instead of an answer. So the last look comes after the time is over, however long
            // this process was held up in between.
            let until = Instant::now() + NEWCOMER_TIME;
            let (mut ended, mut is_over) = (None, false);
            while ended.is_none() && !is_over {
                is_over = has_asked.get() || Instant::now() >= until;
                ended = tokio::time::timeout(LAST_LOOK, connection.as_mut()).await.ok();
            }
            match ended {
                Some(ended) => ended,
                None => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            }
        }
    };
    match ended {
        Ok(()) => endpoint.connection(number, ConnectionEvent::Closed),
        Err(error) => {
            tracing::debug!(%error, "a connection ended early");
            endpoint.connection(number, ConnectionEvent::Broken);
        }
    }
}
