//! The wrapped server over all its processes: starts it, introduces us to it once per process, starts it
//! again when it ends, and passes on what it says.
//!
//! ```text
//! starting ──initialize──▶ running ──end──▶ starting (see respawn)        stop ──▶ ended
//! ```
//! Calls wait while it is starting and are told when it failed. What callers together asked it to
//! remember (log level, subscriptions) is told to each new process.

use std::borrow::Cow;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::value::RawValue;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::child::{Pipes, ServerProcess, Stderr};
use super::config::Spec;
use super::connection::{Addressee, Connection, Peer};
use super::params::for_sidecar;
use super::respawn::{Next, Respawn};
use crate::frame::messages::Server;
use crate::frame::raw::{RawObject, string};
use crate::mcp::VERSIONS;
use crate::refhost::launch::Exit;
use crate::refhost::shim::{Order, ShimHandle};
use crate::refhost::store::Outcome;
use crate::refhost::tools::{HostState, Pending};
use crate::supervise;
use crate::text::clean;

/// How long a server may take to answer `initialize`: `npx` may have to download it first.
const START: Duration = Duration::from_secs(180);
/// How long its output is read on after its end, should somebody else hold it open.
const DRAIN: Duration = Duration::from_secs(1);
/// For so long what the server says waits for a sidecar that takes nothing; then it is lost, so that the
/// answers behind it are not held up.
const ROOM: Duration = Duration::from_secs(1);
/// How long counts are collected before they are told.
const TELL_AFTER: Duration = Duration::from_millis(100);
/// What we can do for a server: relay its questions to a caller. Roots only answer when asked during a
/// call: no caller changes what a server may touch for the others.
const CAPABILITIES: &str = r#"{"roots":{},"sampling":{},"elicitation":{}}"#;

/// How the reason begins when not even a process was started.
pub(super) const NOT_STARTED: &str = "it cannot be started: ";

/// What a server said of itself.
#[derive(Debug, Clone, Default)]
pub(super) struct ServerInfo {
    pub(super) name: String,
    pub(super) title: Option<String>,
    pub(super) version: String,
    pub(super) instructions: Option<String>,
    pub(super) capabilities: Option<Box<RawValue>>,
}

impl ServerInfo {
    pub(super) fn offers(&self, capability: &str) -> bool {
        let capabilities = self.capabilities.as_ref().and_then(|text| RawObject::parse(text.get()));
        capabilities.is_some_and(|all| all.get(capability).is_some_and(|value| value.get().starts_with('{')))
    }

    fn of(result: &Bytes) -> Result<Self, String> {
        let unreadable = || "its answer to initialize is no object".to_owned();
        let object = std::str::from_utf8(result).ok().and_then(RawObject::parse).ok_or_else(unreadable)?;
        let text = |object: &RawObject<'_>, key| object.get(key).and_then(string).map(Cow::into_owned);
        let version = text(&object, "protocolVersion").unwrap_or_default();
        if !VERSIONS.contains(&version.as_str()) {
            return Err(format!(
                "it speaks protocol version \"{}\"; known are {}",
                clean(&version, 40),
                VERSIONS.join(", ")
            ));
        }
        let info = object.get("serverInfo").and_then(|info| RawObject::parse(info.get())).unwrap_or_default();
        Ok(Self {
            name: text(&info, "name").unwrap_or_default(),
            title: text(&info, "title"),
            version: text(&info, "version").unwrap_or_default(),
            instructions: text(&object, "instructions"),
            capabilities: object.get("capabilities").map(ToOwned::to_owned),
        })
    }
}

/// Where the server stands.
#[derive(Debug, Clone)]
pub(super) enum Phase {
    /// Not yet, or not again.
    Starting,
    /// It serves.
    Running(Rc<Connection>, Rc<ServerInfo>),
    /// It is tried now and then; why it failed, for people.
    Failed(String),
    /// For good.
    Ended,
}

/// How far a process came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It has not answered `initialize`.
    Started,
    /// It has, but nothing else yet.
    Introduced,
    /// It serves.
    Serving,
}

/// How a process ended.
struct End {
    had_served: bool,
    /// For people, callers included: nothing of what it wrote.
    reason: String,
}

/// See the module.
pub(super) struct Wrapped {
    spec: Spec,
    stderr: Rc<Stderr>,
    pub(super) phase: watch::Sender<Phase>,
    /// Whether a sidecar serves at the moment.
    pub(super) serving: watch::Sender<bool>,
    shim: OnceCell<ShimHandle>,
    state: Rc<HostState>,
    /// The result of the last `tools/list` that succeeded, all pages, and the names in it.
    pub(super) listed: RefCell<Option<Bytes>>,
    pub(super) names: RefCell<HashSet<String>>,
    /// The parameters of the last `logging/setLevel`.
    pub(super) level: RefCell<Option<Bytes>>,
    /// The parameters of `resources/subscribe`, by URI.
    pub(super) subscriptions: RefCell<BTreeMap<String, Bytes>>,
    /// The server's open questions by their ids.
    pub(super) questions: RefCell<HashMap<Bytes, u64>>,
    pub(super) next_tag: Cell<u64>,
    status: RefCell<Server>,
    telling: Cell<bool>,
    /// A sidecar took nothing for [`ROOM`], and has not since.
    is_crowded: Cell<bool>,
    stop: CancellationToken,
}

impl Wrapped {
    pub(super) fn new(spec: Spec, state: Rc<HostState>) -> Rc<Self> {
        Rc::new(Self {
            spec,
            stderr: Rc::default(),
            phase: watch::Sender::new(Phase::Starting),
            serving: watch::Sender::new(false),
            shim: OnceCell::new(),
            state,
            listed: RefCell::default(),
            names: RefCell::default(),
            level: RefCell::default(),
            subscriptions: RefCell::default(),
            questions: RefCell::default(),
            next_tag: Cell::new(0),
            status: RefCell::new(Server { state: "starting".to_owned(), ..Server::default() }),
            telling: Cell::new(false),
            is_crowded: Cell::new(false),
            stop: CancellationToken::new(),
        })
    }

    /// Connects it with the shim that speaks for it.
    pub(super) fn connect(&self, shim: ShimHandle) {
        let _ = self.shim.set(shim);
    }

    /// Ends it; [`Wrapped::keep`] returns when that is done.
    pub(super) fn stop(&self) {
        self.stop.cancel();
    }

    /// The end of what it wrote to stderr, for the operator.
    pub(super) fn last_words(&self) -> String {
        self.stderr.tail()
    }

    /// Keeps it running until it is stopped, or its very first start fails: the reason then.
    pub(super) async fn keep(self: Rc<Self>) -> Result<(), String> {
        let mut respawn = Respawn::default();
        let mut has_run = false;
        loop {
            let end = self.live().await;
            if self.stop.is_cancelled() {
                self.phase.send_replace(Phase::Ended);
                return Ok(());
            }
            has_run |= end.had_served;
            if !has_run {
                self.phase.send_replace(Phase::Ended);
                return Err(end.reason);
            }
            tracing::warn!(
                "the server ended: {}; it wrote last: {}",
                end.reason,
                last_line(&self.last_words())
            );
            let next = respawn.ended(end.had_served, Instant::now(), supervise::chance());
            let (Next::Start(pause) | Next::Failed(pause)) = next;
            let (state, phase) = match next {
                Next::Start(_) => ("starting", Phase::Starting),
                Next::Failed(_) => {
                    let reason = format!("it ended again and again, the last time: {}", end.reason);
                    tracing::error!(
                        "the server failed: {reason}; it is tried again every {} s",
                        pause.as_secs()
                    );
                    ("failed", Phase::Failed(reason))
                }
            };
            self.tell(|status| {
                status.state = state.to_owned();
                status.pid = None;
                status.list_error = None;
                status.restarts += 1;
                status.reason = Some(end.reason.clone());
            });
            self.phase.send_replace(phase);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.stop.cancelled() => {}
            }
            if self.stop.is_cancelled() {
                self.phase.send_replace(Phase::Ended);
                return Ok(());
            }
        }
    }

    /// One process, from its start to its end.
    async fn live(self: &Rc<Self>) -> End {
        let (mut process, pipes) = match ServerProcess::spawn(&self.spec) {
            Ok(started) => started,
            Err(error) => {
                let reason = match &self.spec.cwd {
                    Some(cwd) if !cwd.is_dir() => {
                        let cwd = clean(&cwd.to_string_lossy(), 400).into_owned();
                        format!("{NOT_STARTED}its working directory {cwd} (\"cwd\") is no directory")
                    }
                    _ => format!("{NOT_STARTED}{error}"),
                };
                return End { had_served: false, reason };
            }
        };
        let pid = process.pid();
        self.tell(|status| status.pid = Some(pid));
        let connection = Rc::new(Connection::default());
        let Pipes { input, output, errors } = pipes;
        let mut reading = JoinSet::new();
        reading.spawn_local(connection.clone().read(output, self.clone()));
        let mut reading_errors = JoinSet::new();
        reading_errors.spawn_local(self.stderr.clone().read(errors));
        let mut writing = JoinSet::new();
        writing.spawn_local(connection.clone().write(input));

        let stage = Cell::new(Stage::Started);
        let how = {
            let introduced = tokio::time::timeout(START, self.introduce(&connection, &stage));
            tokio::select! {
                biased;
                introduced = introduced => match introduced {
                    Ok(Ok(info)) => {
                        stage.set(Stage::Serving);
                        self.serve(&connection, info);
                        None
                    }
                    Ok(Err(reason)) => Some(reason),
                    Err(_) => Some(format!("it did not answer within {} s", START.as_secs())),
                },
                exit = process.ended() => Some(describe(exit)),
                _ = reading.join_next() => None,
                _ = writing.join_next() => None,
                () = self.stop.cancelled() => None,
            }
        };
        let how = match how {
            Some(how) => how,
            None => tokio::select! {
                exit = process.ended() => describe(exit),
                // It closed its output, mostly because it ends: nothing more can come of it.
                _ = reading.join_next() => {
                    drop(std::mem::take(&mut writing));
                    describe(process.end().await)
                }
                // No call reaches it any more. Mostly because it ends, and then that says more.
                _ = writing.join_next() => {
                    let exit = tokio::time::timeout(DRAIN, process.ended()).await;
                    exit.map_or_else(|_| "it closed its input, so it was ended".to_owned(), describe)
                }
                () = self.stop.cancelled() => {
                    drop(std::mem::take(&mut writing));
                    describe(process.end().await)
                }
            },
        };
        // Whatever stands: nothing of it may stay.
        drop(writing);
        process.terminate().await;
        let drained = async {
            while reading.join_next().await.is_some() {}
            while reading_errors.join_next().await.is_some() {}
        };
        let _ = tokio::time::timeout(DRAIN, drained).await;
        // Newcomers wait for the next one from here on.
        if matches!(&*self.phase.borrow(), Phase::Running(..)) {
            self.phase.send_replace(Phase::Starting);
        }
        connection.end(&how);
        self.withdraw_all();
        let reason = match stage.get() {
            Stage::Started => format!("before it answered initialize: {how}"),
            Stage::Introduced => format!("after it answered initialize: {how}"),
            Stage::Serving => how,
        };
        End { had_served: stage.get() == Stage::Serving, reason }
    }

    /// `initialize`, and everything before the first call.
    async fn introduce(
        &self,
        connection: &Rc<Connection>,
        stage: &Cell<Stage>,
    ) -> Result<ServerInfo, String> {
        let ask = async |method: &str, params: String| {
            let sent = connection.request(method, [params.into()], None);
            let sent = sent.map_err(|_| "it ended".to_owned())?;
            match sent.answer(&CancellationToken::new()).await {
                Ok(outcome) => Ok::<_, String>(outcome),
                // Its exit says more.
                Err(_) => std::future::pending().await,
            }
        };
        let params = format!(
            r#"{{"protocolVersion":"{}","capabilities":{CAPABILITIES},"clientInfo":{{"name":"a2mcp","version":"{}"}}}}"#,
            VERSIONS[0],
            crate::app::VERSION
        );
        let info = match ask("initialize", params).await? {
            Outcome::Result(result) => ServerInfo::of(&result)?,
            Outcome::Error(error) => {
                return Err(format!("it refused initialize: {}", message_of(&error)));
            }
        };
        stage.set(Stage::Introduced);
        connection.notify("notifications/initialized", Bytes::from_static(b"{}"));
        // What it asks on its own right now concerns no caller; when it has answered this, that is over.
        ask("ping", "{}".to_owned()).await?;
        if let Some(level) = self.level.borrow().clone() {
            let _ = connection.request("logging/setLevel", [level], None);
        }
        for params in self.subscriptions.borrow().values() {
            let _ = connection.request("resources/subscribe", [params.clone()], None);
        }
        Ok(info)
    }

    fn serve(self: &Rc<Self>, connection: &Rc<Connection>, info: ServerInfo) {
        tracing::info!(
            server = %clean(&info.name, 60), version = %clean(&info.version, 20), "the server is ready"
        );
        let is_another = self.status.borrow().restarts > 0;
        self.tell(|status| status.state = "running".to_owned());
        self.phase.send_replace(Phase::Running(connection.clone(), Rc::new(info.clone())));
        if is_another {
            // Another process may offer other things.
            for what in ["tools", "resources", "prompts"] {
                if info.offers(what) {
                    self.changed(&format!("notifications/{what}/list_changed"));
                }
            }
        }
    }

    /// Changes the status and tells the sidecar.
    pub(super) fn tell(&self, change: impl FnOnce(&mut Server)) {
        change(&mut self.status.borrow_mut());
        self.state.set_server(self.status.borrow().clone());
    }

    /// As [`Wrapped::tell`] for what changes often: soon.
    fn tell_soon(self: &Rc<Self>, change: impl FnOnce(&mut Server)) {
        change(&mut self.status.borrow_mut());
        if !self.telling.replace(true) {
            let wrapped = self.clone();
            tokio::task::spawn_local(async move {
                tokio::time::sleep(TELL_AFTER).await;
                wrapped.telling.set(false);
                wrapped.state.set_server(wrapped.status.borrow().clone());
            });
        }
    }

    pub(super) fn changed(self: &Rc<Self>, method: &str) {
        self.give(Order::Notify(method.to_owned(), Bytes::from_static(b"{}")));
    }

    /// Gives the shim an order; whether it was taken.
    pub(super) async fn order(&self, order: Order) -> bool {
        match self.shim.get() {
            Some(shim) => shim.order(order).await,
            None => false,
        }
    }

    /// As [`Wrapped::order`], without waiting for it.
    pub(super) fn give(self: &Rc<Self>, order: Order) {
        let wrapped = self.clone();
        tokio::task::spawn_local(async move { wrapped.order(order).await });
    }
}

impl Peer for Wrapped {
    fn request(self: Rc<Self>, connection: &Rc<Connection>, id: Bytes, method: &str, params: Bytes) {
        self.asked(connection, id, method, params);
    }

    fn notification(self: Rc<Self>, connection: &Rc<Connection>, method: &str, params: &Bytes) -> bool {
        let Some(shim) = self.shim.get() else { return true };
        let report = |method: &'static str, params: Bytes| {
            let is_taken = shim.report(Cow::Borrowed(method), params);
            if is_taken {
                self.is_crowded.set(false);
            }
            is_taken
        };
        match method {
            // Its token names the call.
            "notifications/progress" => report("notifications/progress", for_sidecar(params, None)),
            "notifications/message" => {
                let call = match connection.addressee() {
                    Addressee::Waiting(who) => Some(who.key),
                    // Nobody's any more, and not everybody's.
                    Addressee::Gone => return true,
                    Addressee::Unclear => None,
                };
                report("notifications/message", for_sidecar(params, call.as_deref()))
            }
            "notifications/cancelled" => {
                self.withdraw(params);
                true
            }
            _ if method.starts_with("notifications/") => {
                self.give(Order::Notify(method.to_owned(), for_sidecar(params, None)));
                true
            }
            _ => {
                tracing::debug!(method = %clean(method, 80), "a notification of the server that nobody knows");
                true
            }
        }
    }

    fn room(self: Rc<Self>) -> Pending<()> {
        Box::pin(async move {
            match self.shim.get() {
                Some(shim) if *self.serving.borrow() && !self.is_crowded.get() => {
                    self.is_crowded.set(tokio::time::timeout(ROOM, shim.room()).await.is_err());
                }
                // The shim gets a turn.
                _ => tokio::task::yield_now().await,
            }
        })
    }

    fn skipped(self: Rc<Self>, what: &str) {
        self.tell_soon(|status| status.skipped_lines += 1);
        let count = self.status.borrow().skipped_lines;
        if count == 1 || count.is_multiple_of(50) {
            tracing::warn!(count, what, "the server's stdout: line skipped");
        }
    }
}

fn describe(exit: Exit) -> String {
    exit.to_string()
}

fn message_of(error: &Bytes) -> String {
    let message = std::str::from_utf8(error).ok().and_then(RawObject::parse);
    let message = message.and_then(|error| error.get("message").and_then(string).map(Cow::into_owned));
    clean(&message.unwrap_or_else(|| "no reason given".to_owned()), 400).into_owned()
}

fn last_line(text: &str) -> String {
    let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty());
    clean(line.unwrap_or("nothing"), 400).into_owned()
}
