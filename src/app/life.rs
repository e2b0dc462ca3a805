//! A sidecar from its first frame to its exit code. The only place that decides to exit.
//!
//! ```text
//! hello ─▶ config ─▶ host_llm ─▶ port ─▶ state ─▶ serve ─▶ drain ─▶ exit
//!             │                    │                          ├ stop: 0, after goodbye
//!             └ 78                 └ 1 (port held)            ├ restart: 75, after goodbye
//!                                                             └ the host is gone: 0, at once
//! ```

use std::cell::{OnceCell, RefCell};
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use super::exchange::Cancel;
use super::keeping::{self, Keeping};
use super::peer::Shim;
use super::share::FILE_THREADS;
use super::{Core, Parts, Phase, VERSION, bind, host_llm, log, now_ms, operate, tunnel, url};
use crate::audit::Audit;
use crate::config::{AgentDir, Env, Proxy, store};
use crate::frame::messages::{Goodbye, GoodbyeReason, Hello, HelloResult, Level, PROTOCOL, RpcError, code};
use crate::frame::{Envelope, Shape};
use crate::host::link::{self, LinkEnd};
use crate::host::{Incoming, Link, Peer, stdio};
use crate::install::Installer;
use crate::mcp::session::Sessions;
use crate::process::{self, Identity};
use crate::signals::Watch;
use crate::text::{clean, with_causes};
use crate::{control, http, keeper, state};

/// Exit code of a refused config (contract 16).
pub const EXIT_REFUSED: u8 = 78;
/// Exit code that asks the shim for the next sidecar.
pub const EXIT_RESTART: u8 = 75;

/// How long cancelled calls may take to be answered.
const CANCEL_TIME: Duration = Duration::from_millis(500);
/// How long the end of the share may take.
const SHARE_TIME: Duration = Duration::from_secs(3);
/// How long connections may take to end once nothing is in flight.
const CLOSE_TIME: Duration = Duration::from_millis(400);
/// How long an idle keep-alive connection may still send its next request before a restart.
const KEEP_ALIVE_TIME: Duration = Duration::from_secs(2);
/// What the shim may say before hello is answered.
const MAX_EARLY: usize = 64;
/// How often it is looked whether the connections are gone.
const POLL: Duration = Duration::from_millis(20);
/// Threads for large messages and our own files, besides those for shared files.
const MESSAGE_THREADS: usize = 4;
/// How long the last frames may take into the pipe.
const FLUSH_TIME: Duration = Duration::from_millis(500);

/// `a2mcp sidecar`: runs until the host, the operator or a signal ends it.
pub fn run(dir: AgentDir, env: &Env) -> ExitCode {
    process::detach_from_terminal();
    process::outlive_large_files();
    process::raise_open_files();
    log::start();
    let threads = MESSAGE_THREADS + FILE_THREADS;
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = match builder.enable_all().max_blocking_threads(threads).build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "cannot start");
            return ExitCode::FAILURE;
        }
    };
    let local = tokio::task::LocalSet::new();
    let code = local.block_on(&runtime, live(dir, env));
    drop(local);
    runtime.shutdown_background();
    ExitCode::from(code)
}

/// `a2mcp sidecar --check`: whether a sidecar could start here; reads only.
///
/// # Errors
/// What it would refuse, for people.
pub async fn check(dir: &AgentDir, state_file: Option<&Path>) -> Result<(), String> {
    store::load_readonly(dir).map_err(|error| with_causes(&error))?;
    if let Some(file) = state_file {
        let state = state::read(file).map_err(|error| with_causes(&error))?;
        if let Some(state) = state.filter(|state| state.host.is_alive())
            && let Ok(path) = keeper::socket_path(&state.instance)
        {
            keeper::client::check(&path, state.host).await?;
        }
    }
    Ok(())
}

async fn live(dir: AgentDir, env: &Env) -> u8 {
    let halves = match stdio::take() {
        Ok(halves) => halves,
        Err(error) => {
            tracing::error!("{error}: a host's shim starts this command; try `a2mcp demo`");
            return 2;
        }
    };
    let (link, mut unstarted) = link::open(halves);
    let (id, hello) = match unstarted.first_frame().await.and_then(|frame| read_hello(&frame)) {
        Ok(hello) => hello,
        Err(error) => {
            tracing::error!("no hello from the host: {error}");
            return 1;
        }
    };
    let door = Rc::new(Door::default());
    let owner = tokio::task::spawn_local(unstarted.run(door.clone()));
    let mut early = EarlyLink { link, owner, door, id };
    if hello.protocol != PROTOCOL {
        let text = format!(
            "this sidecar ({VERSION}) speaks frame protocol {PROTOCOL}, the shim {}; run `a2mcp install omp` again",
            hello.protocol
        );
        return early.refuse(code::PROTOCOL_NOT_SPOKEN, text, EXIT_REFUSED).await;
    }
    let loaded = match dir.create().map_err(|error| format!("cannot use {}: {error}", dir.root().display())) {
        Err(error) => Err(error),
        Ok(()) => operate::aside(&dir, store::load).await.map_err(|error| with_causes(&error)),
    };
    let mut loaded = match loaded {
        Ok(loaded) => loaded,
        Err(error) => return early.refuse(code::CONFIG_REFUSED, error, EXIT_REFUSED).await,
    };
    if let Some(port) = hello.port {
        loaded.config.port = port;
    }
    let host = host_identity(&hello);
    let link = early.link.clone();
    let opening = async {
        // Bound afterwards: no early caller may meet a host that still asks its model.
        let start = host_llm::deny_at_start(&loaded.config, &hello, &link).await;
        (start, keeping::listen(&loaded.config, &dir, &hello, host).await)
    };
    let (start, listening) = tokio::select! {
        opened = opening => opened,
        // A session may be long in coming, a busy port is tried for seconds: nobody may be there any more.
        _ = &mut early.owner => return gone_early(),
        () = process::ended(host) => return gone_early(),
    };
    let (bound, found) = match listening {
        Ok(listening) => listening,
        Err(error @ bind::BindError::Busy { .. }) => {
            return early.refuse(code::PORT_BUSY, error.to_string(), 1).await;
        }
        Err(error) => {
            let file = dir.config_file().to_string_lossy();
            let text = format!("{}: {}", clean(&file, 400), with_causes(&error));
            return early.refuse(code::CONFIG_REFUSED, text, EXIT_REFUSED).await;
        }
    };
    let installer = Installer::new(&dir, env);
    serve(dir, (installer, env.proxy.clone()), early, hello, loaded, (bound, found), start).await
}

/// The link before hello is answered.
struct EarlyLink {
    link: Link,
    owner: JoinHandle<LinkEnd>,
    door: Rc<Door>,
    id: Bytes,
}

impl EarlyLink {
    async fn refuse(self, code: i32, message: String, exit: u8) -> u8 {
        tracing::error!("{message}");
        let answer: Result<(), _> = Err(RpcError { code: code.into(), message });
        let _ = self.link.answer(&self.id, &answer).await;
        let _ = timeout(FLUSH_TIME, self.link.flush()).await;
        self.owner.abort();
        exit
    }
}

/// Keeps what the shim sends before there is a core to take it.
#[derive(Default)]
struct Door {
    core: OnceCell<Shim>,
    early: RefCell<Vec<Incoming>>,
}

impl Door {
    fn open(&self, core: Rc<Core>) {
        let shim = self.core.get_or_init(|| Shim(core));
        for message in self.early.take() {
            shim.incoming(message);
        }
    }
}

impl Peer for Door {
    fn incoming(&self, message: Incoming) {
        match self.core.get() {
            Some(shim) => shim.incoming(message),
            None if self.early.borrow().len() < MAX_EARLY => self.early.borrow_mut().push(message),
            None => tracing::warn!("the host says more before the hello is answered than is kept"),
        }
    }
}

fn read_hello(frame: &Bytes) -> Result<(Bytes, Hello), String> {
    let envelope = Envelope::parse(frame).map_err(|error| error.to_string())?;
    let (Shape::Request, Some("bridge/hello")) = (envelope.shape(), envelope.method.as_deref()) else {
        return Err("the first frame is not bridge/hello".into());
    };
    let id = envelope.id.map_or_else(Bytes::new, |id| frame.slice_ref(id.get().as_bytes()));
    let params = envelope.params.map_or("{}", |params| params.get());
    Ok((id, serde_json::from_str(params).map_err(|error| format!("bridge/hello: {error}"))?))
}

fn host_identity(hello: &Hello) -> Identity {
    let pid = hello.host.pid;
    match hello.host.start_time {
        Some(start_time) => Identity { pid, start_time },
        None => Identity::of(pid).unwrap_or(Identity { pid, start_time: 0 }),
    }
}

fn gone_early() -> u8 {
    tracing::info!("the host went away before the endpoint was open");
    0
}

async fn serve(
    dir: AgentDir,
    (installer, proxy): (Installer, Proxy),
    early: EarlyLink,
    hello: Hello,
    loaded: store::Loaded,
    (bound, found): (bind::Bound, keeping::Found),
    start: host_llm::Start,
) -> u8 {
    let port = bound.address.port();
    let EarlyLink { link, owner, door, id } = early;
    let mut warnings = loaded.warnings;
    warnings.extend(bound.warnings);
    if let Err(error) = log::move_to(&dir.stderr(port)) {
        warnings.push(format!("the log stays in {}: {error}", dir.start_stderr().display()));
    }
    let mut sessions = Sessions::unsaved();
    let host = host_identity(&hello);
    let (mut shared, mut had_tunnel, mut was_paused) = (None, false, false);
    match state::read(&dir.state_file(port)) {
        Ok(Some(state)) => {
            let is_same_host = state.host == host && state.instance == hello.instance;
            if state.is_bound_to(&loaded.token) {
                sessions.restore(state.sessions, now_ms());
            }
            shared = state.share.map(|terms| (terms, is_same_host));
            had_tunnel = state.tunnel && is_same_host;
            was_paused = state.paused && is_same_host;
        }
        Ok(None) => {}
        Err(error) => warnings.push(format!("earlier sessions are lost: {}", with_causes(&error))),
    }
    let (keeping, keeper_events) =
        Keeping::begin(found, &bound.listener, &hello, host, dir.stderr(port), &mut warnings).await;
    let tasks = TaskTracker::new();
    let audit = Audit::start(dir.audit_file(), &tasks);
    let core = Core::new(Parts {
        config: loaded.config,
        token: loaded.token,
        dir,
        proxy,
        hello,
        host,
        address: bound.address,
        link: link.clone(),
        audit,
        installer,
        keeping,
        tasks,
        sessions,
    });
    core.keep_share(shared);
    let tunnels = core.keeping.follow(tunnel::PURPOSE);
    core.paused.set(was_paused);
    // At once, not at the first session: it says that this port's holder lives (contract 13).
    core.write_state();
    core.inherit_calls();
    door.open(core.clone());
    let operator = core.clone();
    let control = match control::serve(port, move |request| operate::perform(operator.clone(), request)).await
    {
        Ok(control) => Some(control),
        Err(error) => {
            warnings.push(format!("operator commands cannot reach this sidecar: {error}"));
            None
        }
    };
    tokio::task::spawn_local(core.clone().keep_state());
    core.catch_up_with_rotations().await;
    let server = match http::serve(bound.listener, core.clone()) {
        Ok(server) => server,
        Err(error) => {
            tracing::error!(%error, "cannot serve");
            return 1;
        }
    };
    let result = HelloResult {
        protocol: PROTOCOL,
        version: VERSION.into(),
        pid: std::process::id(),
        url: url(bound.address),
        port,
        token_prefix: core.token().prefix().into(),
        features: vec!["xfer".into()],
    };
    tracing::info!(version = VERSION, pid = std::process::id(), url = result.url, "serving");
    let _ = link.answer(&id, &Ok::<_, RpcError>(result)).await;
    core.note_inherited();
    core.cancel_replaced();
    core.note_start(&start).await;
    for warning in warnings {
        core.notify(Level::Warning, format!("a2mcp: {warning}"));
    }
    core.restore_wants();
    tokio::task::spawn_local(core.clone().keep_catalogue());
    tokio::task::spawn_local(core.clone().keep_tunnel(tunnels, had_tunnel));
    tokio::task::spawn_local(core.clone().keep_keeper(keeper_events));
    tokio::task::spawn_local(core.clone().keep_ledger());
    tokio::task::spawn_local(core.clone().watch_host());
    let code = core.clone().until_the_end(owner, server).await;
    drop(control);
    code
}

/// Why serving ends.
enum End {
    Stop,
    Restart,
    HostGone(String),
}

impl Core {
    async fn until_the_end(self: Rc<Self>, mut owner: JoinHandle<LinkEnd>, server: http::Server) -> u8 {
        let mut signals = match Signals::open() {
            Ok(signals) => signals,
            Err(error) => {
                tracing::error!(%error, "cannot watch for signals");
                return 1;
            }
        };
        let end = loop {
            tokio::select! {
                ended = &mut owner => break End::HostGone(match ended {
                    Ok(LinkEnd::Closed) => "the host closed the link".into(),
                    Ok(LinkEnd::Broken(error)) => with_causes(&error),
                    Err(error) => error.to_string(),
                }),
                () = process::ended(self.host) => break End::HostGone("the host process has ended".into()),
                () = self.wishes.stop.cancelled() => break End::Stop,
                () = self.wishes.restart.cancelled() => break End::Restart,
                signal = signals.next() => {
                    self.wishes.grace.set(operate::DEFAULT_GRACE);
                    match signal {
                        Signal::Terminate => break End::Stop,
                        Signal::Restart => {
                            if let control::Reply::Error(why) = operate::perform(
                                self.clone(),
                                control::Request::Restart { grace_ms: operate::DEFAULT_GRACE.as_millis() as u64 },
                            ).await {
                                self.notify(Level::Error, format!("a2mcp: {why}"));
                            }
                        }
                    }
                }
            }
        };
        let (code, goodbye) = match &end {
            End::Stop => {
                self.phase.set(Phase::Stopping);
                self.end_tunnel("the bridge stops").await;
                server.stop_accepting.cancel();
                self.keeping.close().await;
                (0, Some(GoodbyeReason::Stop))
            }
            End::Restart => {
                self.phase.set(Phase::Restarting);
                (EXIT_RESTART, Some(GoodbyeReason::Restart))
            }
            End::HostGone(why) => {
                tracing::info!(why, "the host is gone");
                self.phase.set(Phase::Stopping);
                let ending = self.clone();
                tokio::task::spawn_local(async move { ending.end_tunnel("the host is gone").await });
                server.stop_accepting.cancel();
                owner.abort();
                // Asked for now; it goes on by itself while we end.
                let ending = self.clone();
                tokio::task::spawn_local(async move { ending.keeping.end().await });
                (0, None)
            }
        };
        let signalled = signals.next();
        match &end {
            End::Stop => {
                let idle = async { tokio::join!(self.no_calls(), self.no_transfers()) };
                self.drain(&mut owner, signalled, idle).await;
                let calls = self.ledger.borrow().running();
                self.cancel_calls(&calls, Cancel::Stopping);
            }
            // Calls go on in the host; the next sidecar inherits them.
            End::Restart => self.drain(&mut owner, signalled, self.no_json_waits(&server)).await,
            End::HostGone(_) => self.late_results.borrow_mut().clear(),
        }
        server.stop_accepting.cancel();
        if matches!(end, End::Restart) {
            self.dismiss_readers();
        } else {
            let _ = timeout(CANCEL_TIME, self.no_calls()).await;
            let _ = timeout(SHARE_TIME, self.end_share()).await;
            self.end_listeners();
        }
        server.close_connections.cancel();
        server.connections.close();
        let _ = timeout(CLOSE_TIME, server.connections.wait()).await;
        self.send_acks().await;
        self.write_state();
        let _ = timeout(FLUSH_TIME, self.audit.flush()).await;
        if matches!(end, End::Stop) {
            self.keeping.end().await;
        }
        if let Some(reason) = goodbye {
            self.say_goodbye(reason).await;
        }
        tracing::info!(code, "ending");
        code
    }

    async fn say_goodbye(&self, reason: GoodbyeReason) {
        let stop_request = self.stop_request.take();
        let _ = timeout(FLUSH_TIME, async {
            if let Some(id) = stop_request {
                let _ = self.link.answer(&id, &Ok::<_, RpcError>(serde_json::json!({}))).await;
            }
            let _ = self.link.notify("bridge/goodbye", &Goodbye { reason }).await;
            self.link.flush().await;
        })
        .await;
    }

    /// Waits for `drained`, at most the grace; the end of the host or a second signal cuts it short.
    async fn drain(
        &self,
        owner: &mut JoinHandle<LinkEnd>,
        signalled: impl Future<Output = Signal>,
        drained: impl Future,
    ) {
        let grace = self.wishes.grace.get();
        tracing::info!(?grace, calls = self.ledger.borrow().running_count(), "draining");
        tokio::select! {
            _ = timeout(grace, drained) => {}
            _ = owner => {}
            () = process::ended(self.host) => {}
            signal = signalled => tracing::info!(?signal, "second signal: at once"),
        }
    }

    async fn no_calls(&self) {
        while self.ledger.borrow().running_count() > 0 {
            self.call_ended.notified().await;
        }
    }

    /// Before a restart: JSON replies cannot be resumed, so they are waited for; a keep-alive
    /// connection gets a moment for its next request, whose reply tells it to go.
    async fn no_json_waits(&self, server: &http::Server) {
        let _ = timeout(KEEP_ALIVE_TIME, async {
            while !server.connections.is_empty() {
                tokio::time::sleep(POLL).await;
            }
        })
        .await;
        let is_streamed = |call_id: &str| {
            self.exchanges.borrow().get(call_id).is_some_and(|exchange| exchange.accepts_stream())
        };
        while self.ledger.borrow().waits_for_json(is_streamed) {
            self.call_ended.notified().await;
        }
        self.no_transfers().await;
    }
}

#[derive(Debug)]
enum Signal {
    Terminate,
    Restart,
}

/// SIGTERM and SIGINT end, SIGHUP restarts.
struct Signals {
    terminate: Watch,
    restart: Watch,
}

impl Signals {
    fn open() -> std::io::Result<Self> {
        Ok(Self { terminate: Watch::open(&[SIGTERM, SIGINT])?, restart: Watch::open(&[SIGHUP])? })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            () = self.terminate.next() => Signal::Terminate,
            () = self.restart.next() => Signal::Restart,
        }
    }
}
