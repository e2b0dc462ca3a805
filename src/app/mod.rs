//! One sidecar's life and its heart, the [`Core`]: what the running sidecar knows and may do.
//!
//! [`life`] starts and stops it and is the only place that decides to exit; [`endpoint`] answers
//! HTTP with it; [`calls`] carries a `tools/call` from caller to host and back, [`relay`] any other
//! method the host offers, both as an [`exchange`] with a resumable stream ([`streams`]);
//! [`reply`] chooses between JSON and stream; [`listeners`] holds the sessions' server streams,
//! [`questions`] what the host asks callers, [`wants`] what sessions asked to hear of; [`stall`] tells
//! callers of a host that does not respond; [`peer`] takes what the shim sends unasked; [`operate`]
//! does what the operator asks for; [`share`] serves files, [`tunnel`] keeps the public name the operator
//! may open, [`programs`] finds what both run; [`host_llm`] switches the host's own model requests;
//! [`bind`] finds the port, [`keeping`] has the keeper hold it; [`log`] owns stderr.
//!
//! Everything runs on one thread, so the core's parts sit in `RefCell`s and are borrowed for the
//! length of a statement, never over an await.

pub mod bind;
pub mod calls;
mod endpoint;
pub mod exchange;
mod host_llm;
pub mod keeping;
pub mod life;
mod listeners;
pub mod log;
pub mod lossy;
pub mod operate;
mod peer;
mod programs;
mod questions;
mod relay;
mod reply;
mod share;
mod stall;
pub mod streams;
pub mod tunnel;
mod wants;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use foldhash::{HashMap, HashSet};
use tokio::sync::{Notify, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::audit::Audit;
use crate::config::{AgentDir, Config, Proxy, Token};
use crate::frame::envelope::LARGE;
use crate::frame::messages::{Hello, HostLlm, Level, Notice, RpcError, Server};
use crate::host::Link;
use crate::install::Installer;
use crate::ledger::Ledger;
use crate::mcp::catalogue::{Catalogue, Denied};
use crate::mcp::session::Sessions;
use crate::process::Identity;
use crate::state::{self, State};
use exchange::Exchange;
use keeping::Keeping;
use tunnel::Tunnel;

/// The version of this build.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// How long the first catalogue is waited for (contract 4).
const CATALOGUE_WAIT: Duration = Duration::from_secs(20);

/// What a running sidecar knows. Handles are cheap clones; the rest is reached through methods.
pub struct Core {
    /// The validated config of this start.
    pub config: Config,
    /// Where the files are.
    pub dir: AgentDir,
    /// What the shim said at the start.
    pub hello: Hello,
    /// The host process.
    pub host: Identity,
    /// Where the endpoint listens.
    pub address: SocketAddr,
    /// The link to the shim.
    pub link: Link,
    /// The audit file.
    pub audit: Audit,
    /// Names the config removes.
    pub denied: Denied,
    /// Finds and fetches the programs of children.
    pub installer: Installer,
    /// The companion that holds the listening socket.
    pub keeping: Keeping,
    /// The operator's way in from the internet.
    pub tunnel: Tunnel,
    /// Tasks that must end before the process does.
    pub tasks: TaskTracker,
    /// What the main loop waits for.
    pub wishes: Wishes,
    /// When this sidecar started.
    pub started: Instant,
    token: RefCell<Token>,
    token_mark: RefCell<String>,
    sessions: RefCell<Sessions>,
    ledger: RefCell<Ledger>,
    /// Calls and relayed requests whose outcome somebody may still want, by key.
    exchanges: RefCell<HashMap<String, Rc<Exchange>>>,
    /// What the shim keeps of each call for a later sidecar.
    notes: RefCell<HashMap<String, calls::Note>>,
    /// Calls whose callers sent them again.
    attached: RefCell<HashSet<String>>,
    /// Calls of an earlier sidecar whose results are still to come.
    late_results: RefCell<HashMap<String, oneshot::Sender<Result<Bytes, RpcError>>>>,
    /// Calls the shim may forget and has not been told so.
    acknowledged: RefCell<Vec<String>>,
    /// Responses handed to a connection that may still break, by connection.
    deliveries: RefCell<HashMap<u64, Vec<String>>>,
    /// Questions of the host that wait for a caller, by our id.
    questions: RefCell<HashMap<String, questions::Question>>,
    early_answers: RefCell<questions::Early>,
    listeners: RefCell<listeners::Listeners>,
    missed: RefCell<listeners::Missed>,
    /// The resources the host was asked to watch.
    subscribed: RefCell<BTreeSet<String>>,
    /// The log level the host was told.
    host_level: Cell<Option<usize>>,
    epoch: Cell<u64>,
    call_ended: Notify,
    sweep_wanted: Notify,
    acks_wanted: Notify,
    catalogue: watch::Sender<Option<Rc<Catalogue>>>,
    catalogue_wanted: Notify,
    main: Cell<Option<bool>>,
    /// The server behind a host that only wraps one.
    server: RefCell<Option<Server>>,
    /// The switch on the host's model requests and the requests refused, as the host last said.
    host_llm: Cell<Option<(HostLlm, u64)>>,
    /// The id of a `bridge/stop` that waits for its answer.
    stop_request: RefCell<Option<Bytes>>,
    saved: watch::Sender<u64>,
    save_wanted: Notify,
    save_number: Cell<u64>,
    /// The keeper that the state file names.
    saved_keeper: Cell<Option<Identity>>,
    shares: share::Shares,
    unauthorized: Cell<u64>,
    paused: Cell<bool>,
    /// What callers were last told about the host.
    stalled: Cell<bool>,
    phase: Cell<Phase>,
}

/// Where the sidecar stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It serves.
    Serving,
    /// It drains before the next one starts.
    Restarting,
    /// It ends.
    Stopping,
}

/// What somebody asked the main loop for.
#[derive(Clone, Default)]
pub struct Wishes {
    /// End for good; the grace is in the cell.
    pub stop: CancellationToken,
    /// Make way for the next sidecar.
    pub restart: CancellationToken,
    /// How long calls in flight may still take.
    pub grace: Rc<Cell<Duration>>,
}

/// What a new [`Core`] is made of.
pub struct Parts {
    pub(crate) config: Config,
    pub(crate) token: Token,
    pub(crate) dir: AgentDir,
    pub(crate) proxy: Proxy,
    pub(crate) hello: Hello,
    pub(crate) host: Identity,
    pub(crate) address: SocketAddr,
    pub(crate) link: Link,
    pub(crate) audit: Audit,
    pub(crate) installer: Installer,
    pub(crate) keeping: Keeping,
    pub(crate) tasks: TaskTracker,
    pub(crate) sessions: Sessions,
}

impl Core {
    /// A core that serves.
    pub fn new(parts: Parts) -> Rc<Self> {
        let window_ms = parts.config.replay_window.as_millis() as u64;
        Rc::new(Self {
            ledger: RefCell::new(Ledger::new(window_ms)),
            denied: Denied::new(&parts.config.deny, parts.config.deny_mcp_tools),
            config: parts.config,
            dir: parts.dir,
            tunnel: Tunnel::new(parts.proxy),
            host: parts.host,
            address: parts.address,
            link: parts.link,
            audit: parts.audit,
            installer: parts.installer,
            keeping: parts.keeping,
            tasks: parts.tasks,
            wishes: Wishes::default(),
            started: Instant::now(),
            token_mark: RefCell::new(state::keyed_hash(&parts.hello.instance, &parts.token)),
            token: RefCell::new(parts.token),
            hello: parts.hello,
            sessions: RefCell::new(parts.sessions),
            exchanges: RefCell::default(),
            notes: RefCell::default(),
            attached: RefCell::default(),
            late_results: RefCell::default(),
            acknowledged: RefCell::default(),
            deliveries: RefCell::default(),
            questions: RefCell::default(),
            early_answers: RefCell::default(),
            listeners: RefCell::default(),
            missed: RefCell::default(),
            subscribed: RefCell::default(),
            host_level: Cell::new(None),
            epoch: Cell::new(now_ms()),
            call_ended: Notify::new(),
            sweep_wanted: Notify::new(),
            acks_wanted: Notify::new(),
            catalogue: watch::Sender::new(None),
            catalogue_wanted: Notify::new(),
            main: Cell::new(None),
            server: RefCell::default(),
            host_llm: Cell::new(None),
            stop_request: RefCell::default(),
            saved: watch::Sender::new(0),
            save_wanted: Notify::new(),
            save_number: Cell::new(0),
            saved_keeper: Cell::new(None),
            shares: share::Shares::default(),
            unauthorized: Cell::new(0),
            paused: Cell::new(false),
            stalled: Cell::new(false),
            phase: Cell::new(Phase::Serving),
        })
    }

    /// The number of the next stream's epoch: never one of an earlier sidecar.
    fn next_epoch(&self) -> u64 {
        self.epoch.set(self.epoch.get() + 1);
        self.epoch.get()
    }

    /// Tells tokens apart in notes without being one.
    fn token_mark(&self) -> String {
        self.token_mark.borrow().clone()
    }

    /// The endpoint's URL as people and clients use it.
    pub fn url(&self) -> String {
        url(self.address)
    }

    /// The current token.
    pub fn token(&self) -> Token {
        self.token.borrow().clone()
    }

    /// Shows something to the operator, in the host and in the log.
    pub fn notify(&self, level: Level, text: String) {
        match level {
            Level::Info => tracing::info!("{text}"),
            Level::Warning | Level::Error => tracing::warn!("{text}"),
        }
        let link = self.link.clone();
        self.tasks.spawn_local(async move {
            let _ = link.notify("bridge/notify", &Notice { text, level }).await;
        });
    }

    /// The host's list, once there is one; waits for the first for at most 20 s.
    async fn catalogue(&self) -> Option<Rc<Catalogue>> {
        let mut latest = self.catalogue.subscribe();
        let wait = latest.wait_for(Option::is_some);
        let found = tokio::time::timeout(CATALOGUE_WAIT, wait).await.ok()?.ok()?;
        found.clone()
    }

    /// The host's list as last seen.
    fn known_catalogue(&self) -> Option<Rc<Catalogue>> {
        self.catalogue.borrow().clone()
    }

    /// Owner of the catalogue: asks the host whenever somebody says it changed; one question at a
    /// time, and an unchanged answer changes nothing.
    async fn keep_catalogue(self: Rc<Self>) {
        loop {
            match self.link.request("tools/list", Vec::new()).await.map(crate::host::Answer::into_result) {
                Err(_) => return,
                Ok(Err(error)) => tracing::info!(error = error.message, "the host has no tool list yet"),
                Ok(Ok(result)) => match Catalogue::from_host(&result, &self.denied, &share::OWN_TOOLS) {
                    Err(error) => tracing::warn!("tool list ignored, the last one stays: {error}"),
                    Ok(catalogue) => self.learn_catalogue(catalogue),
                },
            }
            self.catalogue_wanted.notified().await;
        }
    }

    fn learn_catalogue(&self, catalogue: Catalogue) {
        if self.catalogue.borrow().as_deref() == Some(&catalogue) {
            return;
        }
        if catalogue.skipped > 0 {
            tracing::warn!(
                count = catalogue.skipped,
                "entries of the host's tool list left out: no name, or a name twice"
            );
        }
        let is_wrapped = self.server.borrow().is_some();
        if catalogue.is_host_empty && !is_wrapped && self.catalogue.borrow().is_some() {
            // A host between two sessions: an empty list would make clients forget their tools. A wrapped
            // server has no sessions to be between: what it lists is what it has.
            tracing::warn!("the host's tool list is empty; the last one stays");
            return;
        }
        tracing::info!(tools = catalogue.names.len(), "tool list");
        if self.catalogue.send_replace(Some(Rc::new(catalogue))).is_some() {
            self.tell_list_changed("notifications/tools/list_changed");
        }
    }

    /// Returns when the sessions as they are now are in the state file (or could not be written:
    /// then the log says so, and serving goes on).
    async fn save(&self) {
        let number = self.save_number.get() + 1;
        self.save_number.set(number);
        self.save_wanted.notify_one();
        let mut saved = self.saved.subscribe();
        let _ = saved.wait_for(|saved| *saved >= number).await;
    }

    /// As [`Core::save`], for the share.
    async fn save_share(&self) {
        self.sessions.borrow_mut().save_again();
        self.save().await;
    }

    /// Makes the state file say whether a tunnel is open, at once: what the operator closed must not
    /// come back after a crash.
    fn save_tunnel(&self) {
        self.sessions.borrow_mut().save_again();
        self.write_state();
    }

    /// Tools on offer; `None` before the first list came.
    fn tool_count(&self) -> Option<usize> {
        self.known_catalogue().map(|catalogue| catalogue.names.len())
    }

    /// Owner of the state file: one write for everything asked for meanwhile.
    async fn keep_state(self: Rc<Self>) {
        loop {
            self.save_wanted.notified().await;
            // Let every request that is ready in this turn join.
            tokio::task::yield_now().await;
            self.write_state();
        }
    }

    /// Writes the state file when something changed.
    fn write_state(&self) {
        let number = self.save_number.get();
        let keeper = self.keeping.identity();
        if self.saved_keeper.replace(keeper) != keeper {
            self.sessions.borrow_mut().save_again();
        }
        if let Some(sessions) = self.sessions.borrow_mut().take_changed() {
            let mut state = State::new(
                &self.hello.instance,
                self.host,
                self.address.ip(),
                &self.token.borrow(),
                sessions,
            );
            state.keeper = keeper;
            state.share = self.share_terms();
            state.tunnel = self.tunnel.is_open();
            state.paused = self.paused.get();
            let file = self.dir.state_file(self.address.port());
            if let Err(error) = state::write(&file, &state) {
                tracing::warn!(%error, file = %file.display(), "sessions cannot be saved: they will not survive a restart");
            }
        }
        self.saved.send_replace(number);
    }
}

/// The endpoint's URL; an unspecified address is shown as its loopback.
fn url(address: SocketAddr) -> String {
    let port = address.port();
    match address {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => format!("http://127.0.0.1:{port}/"),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => format!("http://[::1]:{port}/"),
        address => format!("http://{address}/"),
    }
}

/// Does work on a message of `bytes` at once when it is small, else beside the one thread that
/// everything else runs on.
async fn beside<T: Send + 'static>(bytes: usize, work: impl FnOnce() -> T + Send + 'static) -> T {
    if bytes < LARGE {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Milliseconds since the epoch.
pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
