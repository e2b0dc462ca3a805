//! The sidecar's side of its keeper (design, "who may die"): finds the one of its host or starts one,
//! gives it the listening socket, and does so again should it die.
//!
//! The sidecar always accepts on its own copy of the socket; without a keeper it serves just as well,
//! only its death closes the port then. A keeper of another protocol version gives its socket and is
//! left alone otherwise.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::TcpListener;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::time::timeout;

use super::Core;
use super::bind::{self, BindError, Bound};
use crate::config::{AgentDir, Config};
use crate::control::status;
use crate::frame::messages::{Hello, Level};
use crate::keeper::client::{self, Events, Keeper, KeeperError};
use crate::keeper::wire::{ChildSignal, ChildStatus, Event, Note, Output, Request, Spawn};
use crate::keeper::{self};
use crate::process::{self, Identity};
use crate::state;
use crate::text::with_causes;

/// How long a respawned sidecar looks for its port, in a keeper or free.
const HANDOVER: Duration = Duration::from_secs(1);
const HANDOVER_STEP: Duration = Duration::from_millis(50);
/// How long closing and ending may hold up a stop.
const CLOSE_TIME: Duration = Duration::from_millis(500);
/// A keeper whose connection ended and that still lives then has not ended.
const END_TIME: Duration = Duration::from_secs(1);
/// How long a status waits for the keeper's part.
const STATUS_TIME: Duration = Duration::from_millis(500);
/// After a keeper's death the next one starts at once; when that fails, after this, doubled each time …
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// … up to this.
const LAST_PAUSE: Duration = Duration::from_secs(60);
/// Events of children that one follower may leave unread; it then lost some and asks for the status.
const MAX_UNREAD: usize = 64;
/// A keeper that lived so long counts as having started well.
const LIVED_WELL: Duration = Duration::from_secs(10);

/// What a search for the host's keeper found.
#[derive(Default)]
pub struct Found {
    keeper: Option<(Keeper, Events)>,
    listener: Option<TcpListener>,
    /// To be shown to the operator.
    pub warnings: Vec<String>,
}

/// Takes the endpoint's socket from the host's keeper, or binds it.
///
/// # Errors
/// As [`bind::bind`].
pub async fn listen(
    config: &Config,
    dir: &AgentDir,
    hello: &Hello,
    host: Identity,
) -> Result<(Bound, Found), BindError> {
    let resume = hello.resume.as_ref().map(|resume| resume.port);
    let mut end = Instant::now() + HANDOVER;
    let mut evicted = None;
    loop {
        let mut found = find(&hello.instance, host).await;
        let taken = found.listener.take().and_then(|listener| bind::bound(listener, Vec::new()).ok());
        if let Some(bound) = taken {
            tracing::info!(address = %bound.address, "the listening socket comes from the keeper");
            return Ok((bound, found));
        }
        match bind::bind(config, dir, resume, hello.port.is_some()).await {
            // A keeper that is just starting, or just ending, may have it.
            Err(BindError::Busy { .. }) if Instant::now() < end => tokio::time::sleep(HANDOVER_STEP).await,
            Err(BindError::Busy { port, .. }) if evicted.is_none() && evict(dir, port, hello, host) => {
                evicted = Some("the keeper did not answer and was ended; a new one holds the port now");
                end = Instant::now() + HANDOVER;
            }
            Err(error) => return Err(error),
            Ok(bound) => {
                found.warnings.extend(evicted.map(str::to_owned));
                return Ok((bound, found));
            }
        }
    }
}

/// Kills the keeper of this very host that has the port and cannot be reached: it hangs, or its
/// socket was removed. The state file names it; another host's is never touched.
fn evict(dir: &AgentDir, port: u16, hello: &Hello, host: Identity) -> bool {
    let state = state::read(&dir.state_file(port)).ok().flatten();
    let keeper = state.filter(|state| state.instance == hello.instance && state.host == host);
    keeper.and_then(|state| state.keeper).is_some_and(|keeper| {
        let is_keeper = process::name(keeper.pid).is_some_and(|name| name == process::COMPANION_NAME);
        is_keeper && keeper.signal(rustix::process::Signal::KILL)
    })
}

async fn find(instance: &str, host: Identity) -> Found {
    let mut found = Found::default();
    let reached = match keeper::socket_path(instance) {
        Ok(path) => client::connect(&path, host).await,
        Err(error) => Err(KeeperError::Gone(error)),
    };
    let (keeper, events) = match reached {
        Ok(Some(reached)) => reached,
        Ok(None) => return found,
        Err(error) => {
            found.warnings.push(format!("the earlier keeper is of no use: {}", with_causes(&error)));
            return found;
        }
    };
    match keeper.socket().await {
        Ok(listener) => found.listener = listener,
        Err(error) => tracing::warn!(%error, "the keeper does not give its socket"),
    }
    if !keeper.is_understood() {
        found.warnings.push(client::not_understood(&keeper.greeting));
    }
    found.keeper = Some((keeper, events));
    found
}

/// The keeper as the running sidecar has it.
pub struct Keeping {
    host: Identity,
    instance: String,
    log: PathBuf,
    /// For the next keeper; gone once the sidecar stops.
    listener: RefCell<Option<TcpListener>>,
    keeper: RefCell<Option<Keeper>>,
    /// Leaders of children that run, for the case that the keeper dies before them.
    leaders: RefCell<Vec<Identity>>,
    is_closed: Cell<bool>,
    /// What the keeper held when this sidecar came, until somebody follows it.
    inherited: RefCell<Vec<ChildStatus>>,
    followers: RefCell<HashMap<&'static str, mpsc::Sender<ChildEvent>>>,
}

/// A purpose's children from now on.
pub struct Followed {
    /// What the keeper had already when this sidecar came, the oldest first; ended ones among it.
    pub inherited: Vec<ChildStatus>,
    /// What happens to them.
    pub events: mpsc::Receiver<ChildEvent>,
}

/// What happens to the children of one purpose.
#[derive(Debug)]
pub enum ChildEvent {
    /// One has ended, told to or not.
    Ended(ChildStatus),
    /// The keeper has died and all of them with it.
    KeeperLost,
    /// There is a keeper again, a new one or the same after its connection had broken: these are its
    /// children.
    KeeperBack(Vec<ChildStatus>),
}

impl Keeping {
    /// Takes over the keeper that was found, or starts one; returns when it holds the socket, or
    /// with a warning when that failed (it is tried again later).
    pub(super) async fn begin(
        found: Found,
        listener: &TcpListener,
        hello: &Hello,
        host: Identity,
        log: PathBuf,
        warnings: &mut Vec<String>,
    ) -> (Self, Option<Events>) {
        let keeping = Self {
            host,
            instance: hello.instance.clone(),
            log,
            listener: RefCell::new(listener.try_clone().ok()),
            keeper: RefCell::new(None),
            leaders: RefCell::default(),
            is_closed: Cell::new(false),
            inherited: RefCell::default(),
            followers: RefCell::default(),
        };
        warnings.extend(found.warnings);
        let taken = match found.keeper {
            Some((keeper, events)) => keeping.take(keeper, events).await,
            None => keeping.start().await,
        };
        match taken {
            Ok(events) => (keeping, Some(events)),
            Err(error) => {
                warnings.push(without(&error));
                (keeping, None)
            }
        }
    }

    async fn start(&self) -> Result<Events, KeeperError> {
        let name = keeper::socket_name(&self.instance);
        let (keeper, events) = client::start(&name, self.host, &self.log).await?;
        self.take(keeper, events).await
    }

    /// The keeper that lives, if only the connection to it was lost; else a new one.
    async fn start_again(&self) -> Result<Events, KeeperError> {
        let path = keeper::socket_path(&self.instance).map_err(KeeperError::Gone)?;
        match client::connect(&path, self.host).await? {
            Some((keeper, events)) => self.take(keeper, events).await,
            None => self.start().await,
        }
    }

    /// Makes sure that the keeper holds the socket, and learns what else it holds.
    async fn take(&self, keeper: Keeper, events: Events) -> Result<Events, KeeperError> {
        let listener = self.listener.borrow().as_ref().and_then(|listener| listener.try_clone().ok());
        if keeper.is_understood() {
            let status = keeper.status().await?;
            if let (None, Some(listener)) = (status.address, listener) {
                keeper.adopt(listener).await?;
            }
            let running = status.children.iter().filter(|child| child.exit.is_none());
            self.leaders.replace(running.map(|child| child.process).collect());
            self.inherited.replace(status.children);
        }
        self.keeper.replace(Some(keeper));
        Ok(events)
    }

    /// The keeper, when there is one whose verbs this build knows.
    pub fn keeper(&self) -> Option<Keeper> {
        self.keeper.borrow().clone().filter(Keeper::is_understood)
    }

    /// The keeper's process.
    pub fn identity(&self) -> Option<Identity> {
        self.keeper.borrow().as_ref().map(|keeper| keeper.greeting.keeper)
    }

    /// Starts a child in the keeper.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub async fn spawn(&self, spawn: Spawn) -> Result<ChildStatus, KeeperError> {
        let none = || KeeperError::Refused("there is no keeper to run it".into());
        let child: ChildStatus = self.keeper().ok_or_else(none)?.ask(&Request::Spawn(spawn)).await?;
        self.leaders.borrow_mut().push(child.process);
        Ok(child)
    }

    /// Follows the children of one purpose; the last one to ask for a purpose is told.
    pub fn follow(&self, purpose: &'static str) -> Followed {
        let (told, events) = mpsc::channel(MAX_UNREAD);
        self.followers.borrow_mut().insert(purpose, told);
        let inherited =
            self.inherited.borrow_mut().extract_if(.., |child| child.purpose == purpose).collect();
        Followed { inherited, events }
    }

    /// Signals a child's group; SIGKILL follows after `kill_after`. Fine when it has ended.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub async fn signal(
        &self,
        child: u64,
        signal: ChildSignal,
        kill_after: Option<Duration>,
    ) -> Result<(), KeeperError> {
        let kill_after_ms = kill_after.map(|after| after.as_millis() as u64);
        self.ask(&Request::Signal { child, signal, kill_after_ms }).await
    }

    /// Replaces what a later sidecar is told of a child.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub async fn set_note(&self, child: u64, note: Note) -> Result<(), KeeperError> {
        self.ask(&Request::Note { child, note }).await
    }

    /// The end of what a child wrote, at most `max_bytes` of each stream.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub async fn output(&self, child: u64, max_bytes: usize) -> Result<Output, KeeperError> {
        self.ask(&Request::Output { child, max_bytes }).await
    }

    async fn ask<T: serde::de::DeserializeOwned>(&self, request: &Request) -> Result<T, KeeperError> {
        let none = || KeeperError::Refused("there is no keeper".into());
        self.keeper().ok_or_else(none)?.ask(request).await
    }

    fn tell(&self, purpose: &str, event: ChildEvent) {
        let follower = self.followers.borrow().get(purpose).cloned();
        if follower.is_some_and(|follower| follower.try_send(event).is_err()) {
            tracing::warn!(purpose, "an event of a child is lost: nobody reads them");
        }
    }

    fn tell_all(&self, event: impl Fn(&str) -> ChildEvent) {
        let purposes: Vec<&'static str> = self.followers.borrow().keys().copied().collect();
        for purpose in purposes {
            self.tell(purpose, event(purpose));
        }
    }

    /// New connections are refused from now on.
    pub(super) async fn close(&self) {
        self.is_closed.set(true);
        self.listener.take();
        if let Some(keeper) = self.keeper() {
            let _ = timeout(CLOSE_TIME, keeper.ask::<()>(&Request::Close)).await;
        }
    }

    /// Ends the keeper and everything it runs; waits for that a moment only, it goes on by itself.
    pub(super) async fn end(&self) {
        self.is_closed.set(true);
        self.listener.take();
        let keeper = self.keeper.borrow().clone();
        if let Some(keeper) = keeper {
            let _ = timeout(CLOSE_TIME, keeper.ask::<()>(&Request::End)).await;
        }
    }

    /// What it holds, for a status; `None` when there is no keeper.
    pub async fn status(&self) -> Option<status::Keeper> {
        let keeper = self.keeper.borrow().clone()?;
        let greeting = &keeper.greeting;
        let asked = match keeper.is_understood() {
            true => timeout(STATUS_TIME, keeper.status()).await.ok().and_then(Result::ok),
            false => None,
        };
        Some(status::Keeper {
            pid: greeting.keeper.pid,
            version: greeting.version.clone(),
            note: (!keeper.is_understood()).then(|| client::not_understood(greeting)),
            uptime_ms: asked.as_ref().map(|status| status.uptime_ms),
            children: asked.map(|status| worth_showing(&status.children).map(child).collect()),
        })
    }
}

/// Those that run, and the last one of a purpose that has none running.
fn worth_showing(children: &[ChildStatus]) -> impl Iterator<Item = &ChildStatus> {
    let is_last = |at: usize, child: &ChildStatus| {
        children[at + 1..].iter().all(|later| later.purpose != child.purpose)
    };
    let is_followed = |child: &ChildStatus| {
        children.iter().any(|other| other.purpose == child.purpose && other.exit.is_none())
    };
    let shown = move |(at, child): &(usize, &ChildStatus)| {
        child.exit.is_none() || (is_last(*at, child) && !is_followed(child))
    };
    children.iter().enumerate().filter(shown).map(|(_, child)| child)
}

fn child(child: &ChildStatus) -> status::Child {
    status::Child {
        purpose: child.purpose.clone(),
        pid: child.process.pid,
        age_ms: child.age_ms,
        state: match child.exit {
            None => "running".into(),
            Some(keeper::wire::Exit::Code(code)) => format!("ended with exit code {code}"),
            Some(keeper::wire::Exit::Signal(signal)) => format!("ended by signal {signal}"),
        },
    }
}

fn without(error: &KeeperError) -> String {
    format!(
        "no keeper: {}. Everything works, but should this process die, the port is closed until the next one runs",
        with_causes(error)
    )
}

impl Core {
    /// Follows the keeper; starts the next one when it is gone.
    pub(super) async fn keep_keeper(self: Rc<Self>, mut events: Option<Events>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let since = Instant::now();
            if let Some(events) = &mut events {
                self.hear_keeper(events).await;
                let lost = self.keeping.keeper.take();
                if self.keeping.is_closed.get() {
                    return;
                }
                let has_ended = match lost {
                    Some(keeper) => timeout(END_TIME, process::ended(keeper.greeting.keeper)).await.is_ok(),
                    None => true,
                };
                let leaders = self.keeping.leaders.take();
                for leader in leaders.into_iter().filter(|_| has_ended) {
                    // It died with the keeper; what it had started may not have.
                    process::kill_group_of(leader);
                }
                tracing::warn!(has_ended, "the connection to the keeper has ended");
                if has_ended {
                    self.keeping.tell_all(|_| ChildEvent::KeeperLost);
                }
            }
            if events.is_none() || since.elapsed() < LIVED_WELL {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LAST_PAUSE);
            } else {
                pause = FIRST_PAUSE;
            }
            if self.keeping.is_closed.get() {
                return;
            }
            events = match self.keeping.start_again().await {
                Ok(events) => Some(events),
                Err(error) => {
                    tracing::warn!("{}", without(&error));
                    None
                }
            };
            if events.is_some() {
                self.notify(
                    Level::Info,
                    "a2mcp: the keeper was lost; there is one again that holds the port".into(),
                );
                self.write_state();
                let children = self.keeping.inherited.take();
                let of = |purpose: &str| {
                    children.iter().filter(|child| child.purpose == purpose).cloned().collect()
                };
                self.keeping.tell_all(|purpose| ChildEvent::KeeperBack(of(purpose)));
            }
        }
    }

    async fn hear_keeper(&self, events: &mut Events) {
        while let Some(Event::ChildEnded(child)) = events.recv().await {
            tracing::info!(purpose = child.purpose, exit = ?child.exit, "a child has ended");
            self.keeping.leaders.borrow_mut().retain(|leader| *leader != child.process);
            let purpose = child.purpose.clone();
            self.keeping.tell(&purpose, ChildEvent::Ended(child));
        }
    }
}
