//! The load generator: one thread, one epoll, a closed loop over keep-alive connections.
//!
//! A request is a byte template with a counter of fixed width in it (the JSON-RPC id, and for `echo`
//! the payload too), so that no two requests are equal and nothing is formatted while the clock
//! runs. The first answer to a template is judged as JSON by the caller; every later one must have
//! the same status, the same length and its own counter in the same places.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use serde_json::Value;

/// Ten digits and no leading zero: the width never changes within a run.
pub(crate) const FIRST_ID: u64 = 1_000_000_001;
const DIGITS: usize = 10;
/// What stands in a template where the counter goes.
pub(crate) const COUNTER: &str = "1000000000";

/// An answer may take this long before the run is given up.
const PATIENCE: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
/// No answer head is longer; a longer one is a fault.
const HEAD_LIMIT: usize = 8 * 1024;

/// A request that can be sent any number of times, and the shape of its answer.
pub(crate) struct Request {
    bytes: Vec<u8>,
    counters: Vec<usize>,
    answer: Answer,
}

struct Answer {
    /// A stream: chunked, with its own counter somewhere in it.
    is_stream: bool,
    body_len: usize,
    /// Whether every answer is as long as the first one.
    same_len: bool,
    counters: Vec<usize>,
}

impl Request {
    /// Sends `bytes` once and takes the answer as the model of all later ones. `judge` says what is
    /// wrong with it.
    pub(crate) fn calibrate(
        address: SocketAddr,
        bytes: Vec<u8>,
        judge: impl FnOnce(&Value) -> Result<()>,
    ) -> Result<Self> {
        let reply = exchange(address, &bytes)?;
        ensure!(reply.status == 200, "status {} in place of 200: {}", reply.status, reply.text());
        let json = serde_json::from_slice(&reply.body).context("the answer is not JSON")?;
        judge(&json).with_context(|| format!("an unexpected answer: {}", reply.text()))?;
        let answer = Answer {
            is_stream: false,
            body_len: reply.body.len(),
            same_len: true,
            counters: counters(&reply.body),
        };
        Ok(Self { counters: counters(&bytes), bytes, answer })
    }

    /// A request whose answers are streams that hold its counter.
    pub(crate) fn streamed(bytes: Vec<u8>) -> Self {
        let answer = Answer { is_stream: true, body_len: 0, same_len: false, counters: Vec::new() };
        Self { counters: counters(&bytes), bytes, answer }
    }

    /// For a tool whose text changes from call to call.
    pub(crate) fn with_answers_of_any_length(mut self) -> Self {
        self.answer.same_len = false;
        self
    }

    pub(crate) fn body_len(&self) -> usize {
        self.answer.body_len
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

fn counters(bytes: &[u8]) -> Vec<usize> {
    let places = bytes.windows(DIGITS).enumerate();
    places.filter(|(_, window)| *window == COUNTER.as_bytes()).map(|(at, _)| at).collect()
}

fn digits(mut number: u64) -> [u8; DIGITS] {
    let mut digits = [b'0'; DIGITS];
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
    digits
}

/// When a run ends. Requests under way are waited for.
#[derive(Clone, Copy)]
pub(crate) enum Until {
    /// No new request after this time.
    Elapsed(Duration),
    /// So many requests in all.
    Count(u64),
}

/// What one run found.
pub(crate) struct Segment {
    pub(crate) elapsed: Duration,
    /// One per request, sorted.
    latencies: Vec<Duration>,
}

impl Segment {
    pub(crate) fn requests(&self) -> u64 {
        self.latencies.len() as u64
    }

    pub(crate) fn rate(&self) -> f64 {
        self.requests() as f64 / self.elapsed.as_secs_f64()
    }

    /// The latency that `share` (0 to 1) of the requests did not exceed.
    pub(crate) fn percentile(&self, share: f64) -> Duration {
        let last = self.latencies.len().saturating_sub(1);
        let at = (last as f64 * share).round() as usize;
        self.latencies.get(at).copied().unwrap_or_default()
    }
}

/// Open connections; each has at most one request under way.
pub(crate) struct Connections {
    epoll: std::os::fd::OwnedFd,
    all: Vec<Connection>,
}

struct Connection {
    stream: TcpStream,
    request: Vec<u8>,
    inbox: Vec<u8>,
    filled: usize,
    sent: Instant,
    digits: [u8; DIGITS],
}

impl Connections {
    pub(crate) fn open(address: SocketAddr, count: usize) -> Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut all = Vec::new();
        for index in 0..count {
            let stream =
                TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            epoll::add(&epoll, &stream, epoll::EventData::new_u64(index as u64), epoll::EventFlags::IN)?;
            all.push(Connection {
                stream,
                request: Vec::new(),
                inbox: vec![0; 128 * 1024],
                filled: 0,
                sent: Instant::now(),
                digits: digits(0),
            });
        }
        Ok(Self { epoll, all })
    }

    /// Keeps every connection busy until `until` and returns when the last answer is there.
    pub(crate) fn drive(&mut self, request: &Request, until: Until, next_id: &mut u64) -> Result<Segment> {
        let mut latencies = Vec::with_capacity(1 << 18);
        let started = Instant::now();
        let first_id = *next_id;
        let goes_on = |now: Instant, next_id: u64| match until {
            Until::Elapsed(time) => now - started < time,
            Until::Count(count) => next_id - first_id < count,
        };
        let mut under_way = 0_usize;
        for connection in &mut self.all {
            if goes_on(started, *next_id) {
                connection.request.clear();
                connection.request.extend_from_slice(&request.bytes);
                connection.send(request, next_id)?;
                under_way += 1;
            }
        }
        let mut events = Vec::with_capacity(self.all.len());
        while under_way > 0 {
            events.clear();
            epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&PATIENCE))?;
            ensure!(!events.is_empty(), "no answer within {} s", PATIENCE.tv_sec);
            for event in &events {
                let index = usize::try_from(event.data.u64())?;
                let connection = self.all.get_mut(index).context("an event for no connection")?;
                if !connection.receive(&request.answer)? {
                    continue;
                }
                let now = Instant::now();
                latencies.push(now - connection.sent);
                if goes_on(now, *next_id) {
                    connection.send(request, next_id)?;
                } else {
                    under_way -= 1;
                }
            }
        }
        let elapsed = started.elapsed();
        latencies.sort_unstable();
        Ok(Segment { elapsed, latencies })
    }
}

impl Connection {
    fn send(&mut self, request: &Request, next_id: &mut u64) -> Result<()> {
        self.digits = digits(*next_id);
        *next_id += 1;
        for &at in &request.counters {
            self.request[at..at + DIGITS].copy_from_slice(&self.digits);
        }
        self.sent = Instant::now();
        // Far below the size of a socket buffer that is empty: it goes out whole or something broke.
        let written = self.stream.write(&self.request).context("cannot send")?;
        ensure!(written == self.request.len(), "sent {written} of {} bytes", self.request.len());
        Ok(())
    }

    /// Reads what is there; true when the answer is complete and right.
    fn receive(&mut self, answer: &Answer) -> Result<bool> {
        loop {
            if self.filled == self.inbox.len() {
                self.inbox.resize(self.inbox.len() * 2, 0);
            }
            match self.stream.read(&mut self.inbox[self.filled..]) {
                Ok(0) => bail!("the server closed a connection with a request under way"),
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error).context("cannot receive"),
            }
            let Some(head) = Head::parse(&self.inbox[..self.filled])? else { continue };
            if answer.is_stream {
                ensure!(head.is_chunked && head.status == 200, "no stream, status {}", head.status);
                let body = &self.inbox[head.len..self.filled];
                if !body.ends_with(b"\r\n0\r\n\r\n") {
                    continue;
                }
                let own = body.windows(DIGITS).any(|window| window == self.digits);
                ensure!(own, "a stream without its own counter: {}", excerpt(body));
                self.filled = 0;
                return Ok(true);
            }
            let end = head.len + head.content_length;
            if self.filled < end {
                continue;
            }
            ensure!(self.filled == end, "{} bytes after the end of an answer", self.filled - end);
            self.filled = 0;
            let body = &self.inbox[head.len..end];
            let right = head.status == 200
                && (body.len() == answer.body_len || !answer.same_len)
                && answer.counters.iter().all(|&at| body.get(at..at + DIGITS) == Some(&self.digits));
            if !right {
                bail!(
                    "a wrong answer, status {}, {} bytes in place of {}: {}",
                    head.status,
                    body.len(),
                    answer.body_len,
                    excerpt(body)
                );
            }
            return Ok(true);
        }
    }
}

/// As much of an HTTP/1.1 response head as the load needs.
struct Head {
    status: u16,
    content_length: usize,
    is_chunked: bool,
    /// Up to and with the empty line.
    len: usize,
}

impl Head {
    /// `None` when the head is not complete yet.
    fn parse(bytes: &[u8]) -> Result<Option<Self>> {
        let within = &bytes[..bytes.len().min(HEAD_LIMIT)];
        let Some(end) = within.windows(4).position(|window| window == b"\r\n\r\n") else {
            ensure!(bytes.len() < HEAD_LIMIT, "an answer's head is longer than {HEAD_LIMIT} bytes");
            return Ok(None);
        };
        let head = std::str::from_utf8(&within[..end]).context("an answer's head is not text")?;
        let status: Option<u16> = head.get(9..12).and_then(|status| status.parse().ok());
        let status = status.with_context(|| format!("not an HTTP answer: {head}"))?;
        let length = head.lines().skip(1).find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
        });
        let is_chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
        ensure!(length.is_some() || is_chunked || status == 202, "an answer of unknown length: {head}");
        Ok(Some(Self { status, content_length: length.unwrap_or(0), is_chunked, len: end + 4 }))
    }
}

/// One whole answer, for the few exchanges that are not load.
pub(crate) struct Reply {
    pub(crate) status: u16,
    head: Vec<u8>,
    pub(crate) body: Vec<u8>,
}

impl Reply {
    pub(crate) fn header(&self, wanted: &str) -> Option<&str> {
        std::str::from_utf8(&self.head).ok()?.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case(wanted).then(|| value.trim())
        })
    }

    fn text(&self) -> String {
        excerpt(&self.body)
    }
}

fn excerpt(body: &[u8]) -> String {
    String::from_utf8_lossy(&body[..body.len().min(1000)]).into_owned()
}

/// Sends one request on a connection of its own and waits for the answer.
pub(crate) fn exchange(address: SocketAddr, request: &[u8]) -> Result<Reply> {
    let mut stream = TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(request)?;
    let mut bytes = Vec::new();
    let mut chunk = [0; 64 * 1024];
    loop {
        if let Some(head) = Head::parse(&bytes)?
            && bytes.len() >= head.len + head.content_length
        {
            let body = bytes.split_off(head.len);
            return Ok(Reply { status: head.status, head: bytes, body });
        }
        match stream.read(&mut chunk)? {
            0 => bail!("the server closed the connection before it had answered"),
            count => bytes.extend_from_slice(&chunk[..count]),
        }
    }
}
