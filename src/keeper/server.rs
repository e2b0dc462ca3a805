//! The keeper's process: one thread around one `poll`. Owns the listening socket, the private socket
//! and the [`Children`]; knows nothing of HTTP and decides nothing about shares or tunnels.
//!
//! ```text
//! serving ──end asked for · host dead · no sidecar for 60 s──▶ ending ──▶ gone
//! ```
//! Ending closes the listening socket first, then stops the children (SIGTERM, SIGKILL to the groups
//! after 2 s), and kills a sidecar that is still there when it should not be.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::Serialize;
use serde_json::Value;

use super::children::Children;
use super::wire::{self, Event, Greeting, Inbox, Message, PROTOCOL, Request, Status};
use crate::process::Identity;
use crate::rundir;

/// How long the host may be without a sidecar (design, "who may die").
pub const ABSENCE: Duration = Duration::from_secs(60);
/// Most clients at a time; the sidecar is one of them.
const MAX_CLIENTS: usize = 8;
/// A client must have said hello by then.
const HELLO_TIME: Duration = Duration::from_secs(5);
/// Bytes that may wait for a client that does not read.
const MAX_UNREAD: usize = 4 << 20;
/// What children get between SIGTERM and SIGKILL.
const CHILD_GRACE: Duration = Duration::from_secs(2);
/// What a sidecar gets that asked for the end, before it is killed.
const SIDECAR_GRACE: Duration = Duration::from_secs(3);
/// How often something is looked at that gives no event.
const LOOK: Duration = Duration::from_millis(50);
/// A longer pause between two looks at the sidecar's absence counts as this one: all processes were
/// stopped then, not the sidecar alone.
const LONGEST_STEP: Duration = Duration::from_secs(2);

/// Arguments of `a2mcp keeper`.
#[derive(Debug, Clone, clap::Args)]
pub struct KeeperArgs {
    /// The file name of its private socket
    #[arg(long, value_name = "NAME")]
    pub socket: String,
    /// The host's process id
    #[arg(long, value_name = "PID")]
    pub host_pid: u32,
    /// The host's start time
    #[arg(long, value_name = "TICKS")]
    pub host_start: u64,
    /// The log file, once the sidecar has one
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// How long the host may be without a sidecar, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = ABSENCE.as_millis() as u64)]
    pub absence_ms: u64,
}

/// Runs until the host, a sidecar or a sidecar's absence ends it; `first` is the connection to the
/// sidecar that started it.
///
/// # Errors
/// When the private socket cannot be made, or `poll` fails.
pub fn run(args: &KeeperArgs, first: OwnedFd) -> io::Result<()> {
    let path = rundir::open()?.join(&args.socket);
    let private = open_socket(&path)?;
    let host = Identity { pid: args.host_pid, start_time: args.host_start };
    let host_pidfd = Pid::from_raw(host.pid.cast_signed())
        .and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok());
    let mut keeper = Keeper {
        path,
        private: Some(private),
        listening: None,
        host,
        host_pidfd,
        clients: vec![Client::new(UnixStream::from(first))],
        children: Children::default(),
        sidecar: None,
        absence: Duration::from_millis(args.absence_ms),
        absent: None,
        looked: Instant::now(),
        started: Instant::now(),
        ending: None,
    };
    tracing::info!(host = host.pid, version = env!("CARGO_PKG_VERSION"), "keeper: serving");
    while keeper.turn()? {}
    tracing::info!("keeper: ended");
    Ok(())
}

/// Makes the private socket. A stale one is replaced, a live one never.
fn open_socket(path: &Path) -> io::Result<UnixListener> {
    let _lock = rundir::lock()?;
    sweep(path);
    if rundir::is_live(path) {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another keeper serves this host"));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // The directory is 0700; the mode of the file is the second fence.
    let socket = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Removes what killed keepers left.
fn sweep(own: &Path) {
    let Some(entries) = own.parent().and_then(|dir| std::fs::read_dir(dir).ok()) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_keeper = path.extension().is_some_and(|extension| extension == "keeper");
        if is_keeper && path != own && !rundir::is_live(&path) {
            let _ = std::fs::remove_file(path);
        }
    }
}

struct Keeper {
    path: PathBuf,
    /// Gone as soon as the end begins: the next keeper of this host may take the name.
    private: Option<UnixListener>,
    listening: Option<TcpListener>,
    host: Identity,
    host_pidfd: Option<OwnedFd>,
    clients: Vec<Client>,
    children: Children,
    /// The sidecar that said hello last.
    sidecar: Option<Identity>,
    absence: Duration,
    /// How long there has been no sidecar; `None` while there is one.
    absent: Option<Duration>,
    looked: Instant,
    started: Instant,
    ending: Option<Ending>,
}

struct Ending {
    why: Why,
    /// When a sidecar that is still there is killed.
    kill_sidecar_at: Instant,
    children_gone: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Asked,
    HostDead,
    NoSidecar,
}

/// What a descriptor that is ready stands for.
enum Source {
    Private,
    Host,
    Client(usize),
    Child,
}

impl Keeper {
    /// Waits for something and does it; `false` when all is done.
    fn turn(&mut self) -> io::Result<bool> {
        let timeout = self.timeout();
        let mut sources = Vec::new();
        let mut polled = Vec::new();
        if let Some(private) = &self.private {
            sources.push(Source::Private);
            polled.push(PollFd::new(private, PollFlags::IN));
        }
        if let Some(pidfd) = self.host_pidfd.as_ref().filter(|_| self.ending.is_none()) {
            sources.push(Source::Host);
            polled.push(PollFd::new(pidfd, PollFlags::IN));
        }
        for (number, client) in self.clients.iter().enumerate() {
            let wanted =
                if client.unsent.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
            sources.push(Source::Client(number));
            polled.push(PollFd::new(&client.stream, wanted));
        }
        for child in self.children.sources() {
            sources.push(Source::Child);
            polled.push(PollFd::from_borrowed_fd(child, PollFlags::IN));
        }
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs().cast_signed(),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        match rustix::event::poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(polled);
        let mut accept = false;
        for source in sources.iter().zip(is_ready).filter_map(|(source, is_ready)| is_ready.then_some(source))
        {
            match source {
                Source::Private => accept = true,
                Source::Host if !self.host.is_alive() => self.end(Why::HostDead),
                Source::Host | Source::Child => {}
                Source::Client(number) => self.hear(*number),
            }
        }
        if accept {
            self.accept();
        }
        for ended in self.children.turn() {
            tracing::info!(child = ended.child, purpose = ended.purpose, exit = ?ended.exit, "keeper: a child has ended");
            let event = Message::Event(Event::ChildEnded(ended));
            for client in self.clients.iter_mut().filter(|client| client.sidecar) {
                client.tell(&event, None);
            }
        }
        self.dismiss();
        Ok(self.look())
    }

    fn timeout(&self) -> Option<Duration> {
        let now = Instant::now();
        let left = |at: Instant| at.saturating_duration_since(now);
        let child = self.children.due().map(left);
        let hello = self.clients.iter().filter(|client| !client.greeted).map(|client| left(client.hello_by));
        let absence = (!self.has_sidecar()).then(|| {
            let absent = self.absent.unwrap_or_default();
            self.absence.saturating_sub(absent).clamp(Duration::from_millis(1), LONGEST_STEP / 2)
        });
        let host = self.host_pidfd.is_none().then_some(LOOK * 10);
        let ending = self.ending.as_ref().map(|_| LOOK);
        child.into_iter().chain(hello).chain(absence).chain(host).chain(ending).min()
    }

    fn has_sidecar(&self) -> bool {
        self.clients.iter().any(|client| client.sidecar)
    }

    /// Looks at what gives no event; `false` when the keeper is done.
    fn look(&mut self) -> bool {
        let now = Instant::now();
        let step = now.duration_since(std::mem::replace(&mut self.looked, now)).min(LONGEST_STEP);
        if self.ending.is_none() {
            let absent = self.absent.map_or(Duration::ZERO, |absent| absent + step);
            self.absent = (!self.has_sidecar()).then_some(absent);
            if !self.host.is_alive() {
                self.end(Why::HostDead);
            } else if self.absent.is_some_and(|absent| absent >= self.absence) {
                self.end(Why::NoSidecar);
            }
        }
        let children_gone = self.children.running().next().is_none();
        let Some(ending) = &mut self.ending else { return true };
        if children_gone && !std::mem::replace(&mut ending.children_gone, true) {
            for client in &mut self.clients {
                if std::mem::take(&mut client.waits_for_end) {
                    client.tell(&Message::Ok(Value::Null), None);
                }
            }
            self.dismiss();
        }
        let Some(ending) = &self.ending else { return true };
        let sidecar = self.sidecar.filter(|sidecar| ending.why != Why::NoSidecar && sidecar.is_alive());
        if let Some(sidecar) = sidecar
            && now >= ending.kill_sidecar_at
        {
            tracing::warn!(pid = sidecar.pid, why = ?ending.why, "keeper: the sidecar did not end and is killed");
            sidecar.signal(Signal::KILL);
            self.sidecar = None;
            return !children_gone;
        }
        !children_gone || sidecar.is_some()
    }

    /// Begins the end, once.
    fn end(&mut self, why: Why) {
        if self.ending.is_some() {
            return;
        }
        tracing::info!(?why, "keeper: ending");
        self.stop_listening();
        if let Some(private) = self.private.take() {
            // While it is open nobody takes the name: what is removed is ours.
            let _ = std::fs::remove_file(&self.path);
            drop(private);
        }
        self.children.stop(CHILD_GRACE);
        let patience = if why == Why::Asked { SIDECAR_GRACE } else { CHILD_GRACE };
        let kill_sidecar_at = Instant::now() + patience;
        self.ending = Some(Ending { why, kill_sidecar_at, children_gone: false });
    }

    /// Refuses newcomers at once, also when a sidecar that hangs still has its copy of the socket.
    fn stop_listening(&mut self) {
        if let Some(listening) = self.listening.take() {
            let _ = rustix::net::shutdown(&listening, rustix::net::Shutdown::Both);
        }
    }

    fn accept(&mut self) {
        while let Some(Ok((stream, _))) = self.private.as_ref().map(UnixListener::accept) {
            if !rundir::is_peer_ours(&stream) {
                tracing::warn!("keeper: a connection of another user was refused");
                continue;
            }
            if self.clients.len() >= MAX_CLIENTS {
                // The sidecar's place is never taken.
                match self.clients.iter().position(|client| !client.sidecar) {
                    Some(oldest) => drop(self.clients.remove(oldest)),
                    None => continue,
                }
            }
            self.clients.push(Client::new(stream));
        }
    }

    /// Reads what a client sent and answers it.
    fn hear(&mut self, number: usize) {
        let client = &mut self.clients[number];
        client.flush();
        match client.inbox.receive(&client.stream) {
            Ok(0) => client.gone = true,
            Ok(_) => {}
            Err(error) if is_nothing_yet(&error) => return,
            Err(_) => client.gone = true,
        }
        while let Some(line) = self.clients[number].inbox.next_line() {
            match serde_json::from_slice(&line) {
                Ok(request) => self.answer(number, request),
                Err(error) => {
                    self.clients[number].tell(&Message::Error(format!("not a request: {error}")), None)
                }
            }
        }
        self.clients[number].inbox.drop_strays();
    }

    /// Removes the clients that are gone.
    fn dismiss(&mut self) {
        let now = Instant::now();
        self.clients.retain(|client| !client.gone && (client.greeted || client.hello_by > now));
    }

    fn answer(&mut self, number: usize, request: Request) {
        let (answer, descriptor) = match self.perform(number, request) {
            Ok(Answer::Value(value)) => (Message::Ok(value), None),
            Ok(Answer::Socket(socket)) => (Message::Ok(Value::Null), Some(socket)),
            Ok(Answer::Later) => return,
            Err(why) => (Message::Error(why), None),
        };
        self.clients[number].tell(&answer, descriptor);
    }

    fn perform(&mut self, number: usize, request: Request) -> Result<Answer, String> {
        let client = &mut self.clients[number];
        if !client.greeted && !matches!(request, Request::Hello { .. }) {
            return Err("say hello first".into());
        }
        if self.ending.is_some()
            && !matches!(request, Request::Status | Request::End | Request::Output { .. })
        {
            return Err("the keeper is ending".into());
        }
        match request {
            Request::Hello { protocol: _, sidecar } => {
                client.greeted = true;
                if sidecar {
                    client.sidecar = true;
                    let peer = rustix::net::sockopt::socket_peercred(&client.stream).ok();
                    self.sidecar = peer.and_then(|peer| Identity::of(peer.pid.as_raw_pid().cast_unsigned()));
                }
                value(&Greeting {
                    protocol: PROTOCOL,
                    version: env!("CARGO_PKG_VERSION").into(),
                    keeper: Identity::current(),
                    host: self.host,
                })
            }
            Request::Socket => {
                let listening = self.listening.as_ref().ok_or("nothing is listening")?;
                let copy = listening.try_clone().map_err(|error| error.to_string())?;
                Ok(Answer::Socket(copy.into()))
            }
            Request::Adopt => {
                let socket = client.inbox.take_descriptor().ok_or("no socket came with the request")?;
                let listening = rustix::net::sockopt::socket_acceptconn(&socket).unwrap_or(false);
                let socket = TcpListener::from(socket);
                match socket.local_addr() {
                    Ok(address) if listening => {
                        tracing::info!(%address, "keeper: holding the listening socket");
                        self.listening = Some(socket);
                        Ok(Answer::Value(Value::Null))
                    }
                    _ => Err("what came with the request is no listening socket".into()),
                }
            }
            Request::Close => {
                self.stop_listening();
                Ok(Answer::Value(Value::Null))
            }
            Request::Spawn(spawn) => {
                let started = self.children.spawn(spawn)?;
                tracing::info!(
                    child = started.child,
                    purpose = started.purpose,
                    pid = started.process.pid,
                    "keeper: a child was started"
                );
                value(&started)
            }
            Request::Signal { child, signal, kill_after_ms } => {
                self.children.signal(child, signal, kill_after_ms.map(Duration::from_millis))?;
                Ok(Answer::Value(Value::Null))
            }
            Request::Note { child, note } => {
                self.children.set_note(child, note)?;
                Ok(Answer::Value(Value::Null))
            }
            Request::Status => value(&Status {
                uptime_ms: self.started.elapsed().as_millis() as u64,
                address: self.address(),
                children: self.children.status(),
            }),
            Request::Output { child, max_bytes } => value(&self.children.output(child, max_bytes)?),
            Request::End => {
                client.waits_for_end = true;
                if let Some(ending) = &mut self.ending {
                    ending.children_gone = false;
                }
                self.end(Why::Asked);
                Ok(Answer::Later)
            }
        }
    }

    fn address(&self) -> Option<SocketAddr> {
        self.listening.as_ref().and_then(|socket| socket.local_addr().ok())
    }
}

enum Answer {
    Value(Value),
    Socket(OwnedFd),
    Later,
}

fn value(answer: &impl Serialize) -> Result<Answer, String> {
    serde_json::to_value(answer).map(Answer::Value).map_err(|error| error.to_string())
}

fn is_nothing_yet(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

struct Client {
    stream: UnixStream,
    inbox: Inbox,
    /// Lines that wait for it to read, each with what it carries and how much of it is sent.
    unsent: VecDeque<(Vec<u8>, Option<OwnedFd>, usize)>,
    hello_by: Instant,
    greeted: bool,
    sidecar: bool,
    waits_for_end: bool,
    gone: bool,
}

impl Client {
    fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            inbox: Inbox::default(),
            unsent: VecDeque::new(),
            hello_by: Instant::now() + HELLO_TIME,
            greeted: false,
            sidecar: false,
            waits_for_end: false,
            gone: false,
        }
    }

    fn tell(&mut self, message: &Message, descriptor: Option<OwnedFd>) {
        let line = wire::line(message).or_else(|error| wire::line(&Message::Error(error.to_string())));
        let waiting: usize = self.unsent.iter().map(|(line, ..)| line.len()).sum();
        match line {
            Ok(line) if waiting + line.len() <= MAX_UNREAD => self.unsent.push_back((line, descriptor, 0)),
            _ => self.gone = true,
        }
        self.flush();
    }

    fn flush(&mut self) {
        while let Some((line, descriptor, sent)) = self.unsent.front_mut() {
            match wire::send(&self.stream, &line[*sent..], descriptor.as_ref()) {
                Ok(count) => {
                    // The descriptor travels with the first byte.
                    *descriptor = None;
                    *sent += count;
                    if *sent == line.len() {
                        self.unsent.pop_front();
                    }
                }
                Err(error) if is_nothing_yet(&error) => return,
                Err(_) => {
                    self.gone = true;
                    return;
                }
            }
        }
    }
}
