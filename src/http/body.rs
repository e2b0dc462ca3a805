//! Bodies: replies as parts or as a stream, requests read whole within limits.
//!
//! All large request bodies together stay under a budget; a body keeps its share until the last
//! slice of it is gone.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::Stream;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::Refusal;

/// The largest request body in bytes (contract 1, step 6).
pub const MAX_BODY: usize = 128 << 20;
/// All large bodies at once, in KiB.
const BUDGET_KIB: u32 = 512 << 10;
/// Bodies up to this size are outside the budget.
const SMALL: usize = 64 << 10;
/// Longest pause between two chunks of a body.
const IDLE: Duration = Duration::from_secs(30);
/// Longest time for a whole body, and for waiting for the budget.
const TOTAL: Duration = Duration::from_secs(30 * 60);
const BUDGET_WAIT: Duration = Duration::from_secs(60);
/// What is still read of a body that was refused, so that its sender sees the answer.
const DRAIN_TIME: Duration = Duration::from_secs(10);

/// A reply's body.
#[derive(Default)]
pub enum Body {
    /// Nothing.
    #[default]
    Empty,
    /// Known in full.
    Parts(VecDeque<Bytes>),
    /// Known in full, and somebody wants to know whether the connection took it.
    Receipted(VecDeque<Bytes>, Receipt),
    /// Comes piece by piece.
    Stream(Pin<Box<dyn Stream<Item = Bytes>>>),
    /// Another server's; when it breaks, so does the connection it goes out on.
    Relayed(Pin<Box<dyn HttpBody<Data = Bytes, Error = io::Error>>>),
    /// Any other; the passage is held as long as it.
    Crossing(Box<Body>, Passage),
}

/// Held from a request's head until its response is written or given up; dropping it tells whoever
/// counts.
pub struct Passage(Option<Box<dyn FnOnce()>>);

impl Passage {
    /// `ended` is called at the end.
    pub fn new(ended: impl FnOnce() + 'static) -> Self {
        Self(Some(Box::new(ended)))
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        if let Some(ended) = self.0.take() {
            ended();
        }
    }
}

/// Told, when the body is dropped, whether the connection had taken all of it.
pub struct Receipt(Option<Box<dyn FnOnce(bool)>>);

impl Receipt {
    /// A receipt for `told`.
    pub fn new(told: impl FnOnce(bool) + 'static) -> Self {
        Self(Some(Box::new(told)))
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if let Self::Receipted(parts, receipt) = self
            && let Some(told) = receipt.0.take()
        {
            told(parts.is_empty());
        }
    }
}

impl From<Vec<Bytes>> for Body {
    fn from(parts: Vec<Bytes>) -> Self {
        Self::Parts(parts.into())
    }
}

impl From<Bytes> for Body {
    fn from(part: Bytes) -> Self {
        Self::Parts([part].into())
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self.get_mut() {
            Self::Empty => Poll::Ready(None),
            Self::Parts(parts) | Self::Receipted(parts, _) => {
                Poll::Ready(parts.pop_front().map(|part| Ok(Frame::data(part))))
            }
            Self::Stream(pieces) => {
                pieces.as_mut().poll_next(cx).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
            }
            Self::Relayed(body) => body.as_mut().poll_frame(cx),
            Self::Crossing(body, _) => Pin::new(&mut **body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Empty => true,
            Self::Parts(parts) | Self::Receipted(parts, _) => parts.is_empty(),
            Self::Stream(_) => false,
            Self::Relayed(body) => body.is_end_stream(),
            Self::Crossing(body, _) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Empty => SizeHint::with_exact(0),
            Self::Parts(parts) | Self::Receipted(parts, _) => {
                SizeHint::with_exact(parts.iter().map(|part| part.len() as u64).sum())
            }
            Self::Stream(_) => SizeHint::default(),
            Self::Relayed(body) => body.size_hint(),
            Self::Crossing(body, _) => body.size_hint(),
        }
    }
}

/// The shared budget of all large request bodies.
#[derive(Debug, Clone)]
pub struct Budget(Arc<Semaphore>);

impl Default for Budget {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(BUDGET_KIB as usize)))
    }
}

/// A body together with its share of the budget.
struct Charged {
    bytes: Bytes,
    _share: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Charged {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads a body whole.
///
/// # Errors
/// [`Refusal::TooLarge`] (judged by `Content-Length` before reading, and while reading),
/// [`Refusal::TimedOut`], [`Refusal::Overloaded`], [`Refusal::Cut`].
pub async fn read(mut body: Incoming, budget: &Budget) -> Result<Bytes, Refusal> {
    let announced = body.size_hint().exact();
    if announced.is_some_and(|length| length > MAX_BODY as u64) {
        drain(body, 2 * MAX_BODY);
        return Err(Refusal::TooLarge);
    }
    let announced = announced.map(|length| length as usize);
    let share = match announced {
        Some(length) if length > SMALL => Some(budget.share(length).await?),
        _ => None,
    };
    let collected = timeout(TOTAL, collect(&mut body, announced, share, budget)).await;
    match collected.unwrap_or(Err(Refusal::TimedOut)) {
        Err(Refusal::TooLarge) => {
            drain(body, 2 * MAX_BODY);
            Err(Refusal::TooLarge)
        }
        other => other,
    }
}

impl Budget {
    async fn share(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Refusal> {
        let kib = bytes.div_ceil(1024).min(BUDGET_KIB as usize) as u32;
        match timeout(BUDGET_WAIT, self.0.clone().acquire_many_owned(kib)).await {
            Ok(Ok(share)) => Ok(share),
            _ => Err(Refusal::Overloaded),
        }
    }
}

async fn collect(
    body: &mut Incoming,
    announced: Option<usize>,
    mut share: Option<OwnedSemaphorePermit>,
    budget: &Budget,
) -> Result<Bytes, Refusal> {
    let mut first = Bytes::new();
    let mut buffer = BytesMut::new();
    loop {
        let data = match timeout(IDLE, body.frame()).await {
            Err(_) => return Err(Refusal::TimedOut),
            Ok(None) => break,
            Ok(Some(Err(_))) => return Err(Refusal::Cut),
            Ok(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
        };
        if first.is_empty() && buffer.is_empty() {
            first = data;
            continue;
        }
        if buffer.is_empty() {
            buffer.reserve(announced.unwrap_or(first.len() + data.len()));
            buffer.extend_from_slice(&std::mem::take(&mut first));
        }
        let length = buffer.len() + data.len();
        if length > MAX_BODY {
            return Err(Refusal::TooLarge);
        }
        // A chunked body tells its size late: it is charged for the largest one.
        if length > SMALL && share.is_none() {
            share = Some(budget.share(MAX_BODY).await?);
        }
        buffer.extend_from_slice(&data);
    }
    let bytes = if buffer.is_empty() { first } else { buffer.freeze() };
    Ok(match share {
        Some(share) => Bytes::from_owner(Charged { bytes, _share: share }),
        None => bytes,
    })
}

/// Reads on and throws away for a while, so that a sender that writes everything before it reads
/// still gets the answer instead of a reset.
pub fn drain(mut body: Incoming, limit: usize) {
    if body.is_end_stream() {
        return;
    }
    tokio::task::spawn_local(timeout(DRAIN_TIME, async move {
        let mut left = limit;
        while let Some(Ok(frame)) = body.frame().await {
            let length = frame.data_ref().map_or(0, Bytes::len);
            if length > left {
                return;
            }
            left -= length;
        }
    }));
}
