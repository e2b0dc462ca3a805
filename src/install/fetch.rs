//! Fetches one asset into a file and hashes it on the way: redirects, limits and silence are judged
//! here, the hash by the caller. Bytes are written and hashed in pieces beside the one thread.

use std::fs::File;
use std::io::{self, Write as _};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::StatusCode;
use hyper::header::{CONTENT_LENGTH, HeaderMap, LOCATION};
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, timeout_at};

use super::error::Download;
use super::lookup::hex;
use super::{Limits, Progress, blocking};
use crate::outbound::{Answer, Outbound, OutboundError, Url};
use crate::text::clean;

/// How much is collected before it is written.
const PIECE: usize = 256 * 1024;
/// How often progress is told.
const TELL_EVERY: Duration = Duration::from_millis(500);

/// Why the bytes are not in the file.
pub(super) enum FetchError {
    /// They did not arrive.
    Download(Download),
    /// They could not be written.
    Disk(io::Error),
}

impl From<Download> for FetchError {
    fn from(problem: Download) -> Self {
        FetchError::Download(problem)
    }
}

/// What is in the file.
pub(super) struct Fetched {
    /// How much.
    pub(super) bytes: u64,
    /// Lower-case hex.
    pub(super) sha256: String,
}

/// Fetches `url` into `file`. `expected` is only what progress is measured against.
pub(super) async fn fetch(
    outbound: &Outbound,
    url: &Url,
    limits: &Limits,
    expected: u64,
    file: File,
    announce: &mut impl AsyncFnMut(Progress),
) -> Result<Fetched, FetchError> {
    // Before the request: a server that takes it and says nothing must not go unnoticed.
    let mut clock = Clock::start(limits);
    let answer = request(outbound, url, limits, &mut clock).await?;
    let too_large = Download::TooLarge { limit: limits.bytes };
    if length(answer.response.headers()).is_some_and(|length| length > limits.bytes) {
        return Err(too_large.into());
    }
    let mut body = answer.response.into_body();
    let mut sink = Sink { file, hash: Sha256::new(), waiting: Vec::with_capacity(PIECE) };
    let mut received = 0;
    let mut tell_at = Instant::now();
    while let Some(frame) = clock.bound(body.frame()).await? {
        let frame = frame.map_err(|error| Download::Broken {
            bytes: received,
            why: clean(&crate::text::with_causes(&error), 200).into_owned(),
        })?;
        let Ok(bytes) = frame.into_data() else { continue };
        received += bytes.len() as u64;
        if received > limits.bytes {
            return Err(too_large.into());
        }
        if !bytes.is_empty() {
            clock.heard();
        }
        sink = sink.take(&bytes).await.map_err(FetchError::Disk)?;
        if Instant::now() >= tell_at {
            tell_at = Instant::now() + TELL_EVERY;
            announce(Progress::Received { bytes: received, total: expected }).await;
        }
    }
    let sha256 = sink.end().await.map_err(FetchError::Disk)?;
    Ok(Fetched { bytes: received, sha256 })
}

/// Follows redirects to the answer that has the bytes.
async fn request(
    outbound: &Outbound,
    url: &Url,
    limits: &Limits,
    clock: &mut Clock,
) -> Result<Answer, Download> {
    let mut at = url.clone();
    for _ in 0..=limits.redirects {
        let answer = clock.bound(outbound.get(&at)).await?.map_err(unreachable)?;
        clock.heard();
        let status = answer.response.status();
        match status {
            StatusCode::OK => return Ok(answer),
            StatusCode::MOVED_PERMANENTLY
            | StatusCode::FOUND
            | StatusCode::SEE_OTHER
            | StatusCode::TEMPORARY_REDIRECT
            | StatusCode::PERMANENT_REDIRECT => {}
            _ => {
                return Err(Download::Status { status: clean(&status.to_string(), 60).into_owned() });
            }
        }
        let location = answer.response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
        let location = location.ok_or(Download::Redirect { why: "it names none" })?;
        let next = at.join(location).map_err(|why| Download::Redirect { why })?;
        if at.is_tls() && !next.is_tls() {
            return Err(Download::Redirect { why: "it leads from https to plain http" });
        }
        at = next;
    }
    Err(Download::Redirects { limit: limits.redirects })
}

fn unreachable(error: OutboundError) -> Download {
    match error {
        OutboundError::Insecure { host, why } => Download::Insecure { host, why },
        OutboundError::Unreachable { host, why } | OutboundError::NoAnswer { host, why } => {
            Download::Unreachable { host, why }
        }
    }
}

fn length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// The two limits of time.
struct Clock {
    silence: Duration,
    total: Duration,
    quiet_until: Instant,
    end: Instant,
}

impl Clock {
    fn start(limits: &Limits) -> Clock {
        let now = Instant::now();
        Clock {
            silence: limits.silence,
            total: limits.total,
            quiet_until: now + limits.silence,
            end: now + limits.total,
        }
    }

    fn heard(&mut self) {
        self.quiet_until = Instant::now() + self.silence;
    }

    async fn bound<T>(&self, work: impl Future<Output = T>) -> Result<T, Download> {
        let is_last = self.end <= self.quiet_until;
        // A body that is always ready would never let the timer speak.
        if Instant::now() >= self.end {
            return Err(Download::TooSlow(self.total));
        }
        timeout_at(self.end.min(self.quiet_until), work).await.map_err(|_| match is_last {
            true => Download::TooSlow(self.total),
            false => Download::Stalled(self.silence),
        })
    }
}

/// Where bytes go.
struct Sink {
    file: File,
    hash: Sha256,
    waiting: Vec<u8>,
}

impl Sink {
    async fn take(mut self, bytes: &Bytes) -> io::Result<Sink> {
        self.waiting.extend_from_slice(bytes);
        if self.waiting.len() < PIECE { Ok(self) } else { self.write().await }
    }

    async fn write(mut self) -> io::Result<Sink> {
        blocking(move || {
            self.file.write_all(&self.waiting)?;
            self.hash.update(&self.waiting);
            self.waiting.clear();
            Ok(self)
        })
        .await
    }

    async fn end(self) -> io::Result<String> {
        Ok(hex(&self.write().await?.hash.finalize()))
    }
}
