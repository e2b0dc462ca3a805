//! The sidecar's end of the keeper's private socket. A [`Keeper`] is a handle; a task owns the
//! connection and ends with it. Requests are answered in order; events come through a channel.
//!
//! Decides nothing: when a keeper is started, and what its absence means, is [`crate::app`]'s.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::path::Path;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::wire::{self, Event, Greeting, Inbox, Message, PROTOCOL, Request, Status};
use crate::process::{self, Identity};
use crate::{rundir, text};

/// Longest wait for an answer.
const ANSWER: Duration = Duration::from_secs(3);
/// Events that may wait to be looked at; the oldest go first.
const MAX_EVENTS: usize = 64;

/// Why a keeper did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// There is none, or the connection broke.
    #[error("the keeper cannot be reached")]
    Gone(#[source] io::Error),
    /// It said no.
    #[error("the keeper refused: {0}")]
    Refused(String),
    /// It follows another host.
    #[error("the keeper with process {0} follows another host")]
    OtherHost(u32),
}

impl KeeperError {
    fn gone(why: &'static str) -> Self {
        Self::Gone(io::Error::new(io::ErrorKind::BrokenPipe, why))
    }
}

/// A connection to a keeper that has greeted; clones share it.
#[derive(Clone)]
pub struct Keeper {
    /// What it said of itself.
    pub greeting: std::rc::Rc<Greeting>,
    asks: mpsc::Sender<Ask>,
}

/// What the keeper says unasked; ends when the connection does.
pub type Events = mpsc::Receiver<Event>;

struct Ask {
    line: Vec<u8>,
    descriptor: Option<OwnedFd>,
    answer: oneshot::Sender<Answer>,
}

type Answer = (Result<Value, String>, Option<OwnedFd>);

impl Keeper {
    /// Whether its verbs beyond `hello`, `socket` and `end` are the ones this build knows.
    pub fn is_understood(&self) -> bool {
        self.greeting.protocol == PROTOCOL
    }

    /// A copy of the listening socket; `None` when it has none.
    ///
    /// # Errors
    /// [`KeeperError::Gone`].
    pub async fn socket(&self) -> Result<Option<TcpListener>, KeeperError> {
        match self.exchange(&Request::Socket, None).await {
            Ok((_, socket)) => Ok(socket.map(TcpListener::from)),
            Err(KeeperError::Refused(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Gives it the listening socket.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub async fn adopt(&self, socket: TcpListener) -> Result<(), KeeperError> {
        self.exchange(&Request::Adopt, Some(socket.into())).await.map(drop)
    }

    /// What it holds.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub async fn status(&self) -> Result<Status, KeeperError> {
        self.ask(&Request::Status).await
    }

    /// Asks it anything that carries no socket.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub async fn ask<T: DeserializeOwned>(&self, request: &Request) -> Result<T, KeeperError> {
        let (value, _) = self.exchange(request, None).await?;
        serde_json::from_value(value)
            .map_err(|error| KeeperError::Refused(format!("an answer that is not understood: {error}")))
    }

    async fn exchange(
        &self,
        request: &Request,
        descriptor: Option<OwnedFd>,
    ) -> Result<(Value, Option<OwnedFd>), KeeperError> {
        let line = wire::line(request).map_err(|error| KeeperError::Refused(error.to_string()))?;
        let (answer, answered) = oneshot::channel();
        let asked = async {
            self.asks
                .send(Ask { line, descriptor, answer })
                .await
                .map_err(|_| KeeperError::gone("the connection has ended"))?;
            answered.await.map_err(|_| KeeperError::gone("the connection ended before the answer"))
        };
        let (answer, descriptor) =
            timeout(ANSWER, asked).await.map_err(|_| KeeperError::gone("no answer in time"))??;
        answer.map(|value| (value, descriptor)).map_err(KeeperError::Refused)
    }
}

/// Connects to the keeper at `path`, if one is there, as the sidecar of `host`.
///
/// # Errors
/// [`KeeperError`]; no keeper at all is `Ok(None)`.
pub async fn connect(path: &Path, host: Identity) -> Result<Option<(Keeper, Events)>, KeeperError> {
    let stream = match UnixStream::connect(path).await {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Ok(None);
        }
        Err(error) => return Err(KeeperError::Gone(error)),
    };
    if !rundir::is_peer_ours(&stream) {
        return Err(KeeperError::Refused("it belongs to another user".into()));
    }
    greet(stream, host, true).await.map(Some)
}

/// Asks the keeper at `path`, if one is there, for its protocol; changes nothing.
///
/// # Errors
/// When there is one and this build does not understand it; the text is for people.
pub async fn check(path: &Path, host: Identity) -> Result<(), String> {
    let Ok(stream) = UnixStream::connect(path).await else { return Ok(()) };
    match greet(stream, host, false).await {
        Ok((keeper, _)) if !keeper.is_understood() => Err(not_understood(&keeper.greeting)),
        // Another host's keeper is none of ours, and a silent one cannot be judged.
        _ => Ok(()),
    }
}

/// What to say of a keeper of another protocol.
pub fn not_understood(greeting: &Greeting) -> String {
    format!(
        "the running keeper (process {}, version {}) speaks protocol {}, this build {PROTOCOL}; \
         stop the bridge and start it again to replace it (a tunnel gets a new name then)",
        greeting.keeper.pid,
        text::clean(&greeting.version, 20),
        greeting.protocol,
    )
}

/// Starts a keeper of `host`; `socket` is the name of its private socket, `log` its log file.
///
/// # Errors
/// [`KeeperError`].
pub async fn start(socket: &str, host: Identity, log: &Path) -> Result<(Keeper, Events), KeeperError> {
    let (ours, theirs) = StdStream::pair().map_err(KeeperError::Gone)?;
    let (pid, start_time) = (host.pid.to_string(), host.start_time.to_string());
    let args = ["keeper", "--socket", socket, "--host-pid", &pid, "--host-start", &start_time, "--log"];
    let mut args: Vec<&OsStr> = args.iter().map(OsStr::new).collect();
    args.push(log.as_os_str());
    let mut child = process::spawn_companion(&args, theirs.into()).map_err(KeeperError::Gone)?;
    // Reaped when it ends, should it end before us.
    tokio::task::spawn_local(async move { child.wait().await });
    ours.set_nonblocking(true).map_err(KeeperError::Gone)?;
    greet(UnixStream::from_std(ours).map_err(KeeperError::Gone)?, host, true).await
}

async fn greet(stream: UnixStream, host: Identity, sidecar: bool) -> Result<(Keeper, Events), KeeperError> {
    let (asks, asked) = mpsc::channel(16);
    let (events, heard) = mpsc::channel(MAX_EVENTS);
    tokio::task::spawn_local(talk(stream, asked, events));
    let unknown = Identity { pid: 0, start_time: 0 };
    let nobody = Greeting { protocol: 0, version: String::new(), keeper: unknown, host: unknown };
    let mut keeper = Keeper { greeting: nobody.into(), asks };
    let greeting: Greeting = keeper.ask(&Request::Hello { protocol: PROTOCOL, sidecar }).await?;
    if greeting.host != host {
        return Err(KeeperError::OtherHost(greeting.keeper.pid));
    }
    keeper.greeting = greeting.into();
    Ok((keeper, heard))
}

/// Owner of the connection; ends when the keeper or every handle is gone.
async fn talk(stream: UnixStream, mut asked: mpsc::Receiver<Ask>, events: mpsc::Sender<Event>) {
    let mut inbox = Inbox::default();
    let mut waiting: VecDeque<oneshot::Sender<Answer>> = VecDeque::new();
    loop {
        tokio::select! {
            ask = asked.recv() => {
                let Some(Ask { line, descriptor, answer }) = ask else { return };
                waiting.push_back(answer);
                if let Err(error) = send(&stream, &line, descriptor).await {
                    tracing::debug!(%error, "the keeper does not listen");
                    return;
                }
            }
            received = stream.async_io(Interest::READABLE, || inbox.receive(&stream)) => {
                match received {
                    Ok(1..) => {}
                    Ok(_) | Err(_) => return,
                }
            }
        }
        while let Some(line) = inbox.next_line() {
            let answer = match serde_json::from_slice(&line) {
                Ok(Message::Event(event)) => {
                    // A sidecar that does not look asks for the status when it does.
                    let _ = events.try_send(event);
                    continue;
                }
                Ok(Message::Ok(value)) => Ok(value),
                Ok(Message::Error(why)) => Err(text::clean(&why, 500).into_owned()),
                Err(error) => Err(format!("an answer that is not understood: {error}")),
            };
            if let Some(waits) = waiting.pop_front() {
                let _ = waits.send((answer, inbox.take_descriptor()));
            }
        }
        inbox.drop_strays();
    }
}

async fn send(stream: &UnixStream, line: &[u8], mut descriptor: Option<OwnedFd>) -> io::Result<()> {
    let mut sent = 0;
    while sent < line.len() {
        let write = || wire::send(stream, &line[sent..], descriptor.as_ref());
        sent += stream.async_io(Interest::WRITABLE, write).await?;
        descriptor = None;
    }
    Ok(())
}
