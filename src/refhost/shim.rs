//! The shim's side of the frames for any host written in Rust: starts a sidecar, answers it,
//! keeps results until they are acknowledged, and starts the next one when it dies.
//!
//! One task owns everything: the store, the running tools, the pipes ([`super::life`] is one
//! sidecar's life within it). Others hold a [`ShimHandle`]. Tools run as tasks of the same thread; when
//! the pipe is full their results wait, and reading goes on.

use std::borrow::Cow;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use serde_json::value::RawValue;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::launch::Launch;
use super::life::{self, Life};
use super::store::{CallStore, NewCall, Outcome};
use super::supervise::{Ending, Next, PING_EVERY, RestartPolicy};
use super::tools::{Call, HostState, Report, Reporter, Request, Tools, text_result};
use crate::frame::MAX_FRAME;
use crate::frame::messages::{Hello, HelloResult, Notice, RpcError, code};

/// Calls that may run at once; the sidecar's own limits are far below.
const MAX_RUNNING: usize = 10_000;
/// Reports that may wait; further ones are dropped.
const REPORT_QUEUE: usize = 256;
/// Orders that may wait.
const ORDER_QUEUE: usize = 64;
/// Room for the envelope around a result.
const ENVELOPE: usize = 4096;

/// What a shim is told once.
pub struct ShimConfig {
    /// The first `hello`; `resume` and `inFlight` are filled in by the shim.
    pub hello: Hello,
    /// How often the sidecar is pinged.
    pub ping_every: Duration,
}

impl ShimConfig {
    /// With the contract's ping interval.
    pub fn new(hello: Hello) -> Self {
        Self { hello, ping_every: PING_EVERY }
    }
}

/// Hears what happens. Must not block.
pub trait Observer {
    /// A sidecar serves; `restarts` counts the ones before it.
    fn ready(&self, hello: &HelloResult, restarts: u64);
    /// The sidecar has something to tell the operator.
    fn notice(&self, notice: &Notice);
    /// A sidecar ended and the next one starts after the pause.
    fn restarting(&self, reason: &str, pause: Duration);
}

/// How a shim's work ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShimEnd {
    /// It was stopped.
    Stopped,
    /// The sidecar refuses config or protocol; the reason is for people.
    Refused(String),
    /// No sidecar can be started; the reason is for people.
    Failed(String),
}

/// What a shim can be asked.
#[derive(Debug)]
pub enum Order {
    /// Stop politely; calls get so long.
    Stop(Duration),
    /// The host goes: no grace, but an orderly end of the pipe.
    StopNow,
    /// Kill the sidecar and end.
    Kill,
    /// `/a2mcp …`; the answer, or why there is none.
    Command(Vec<String>, oneshot::Sender<Result<Notice, String>>),
    /// End a call's stream resumable.
    CloseStream(String),
    /// A notification, e.g. `notifications/tools/list_changed`, with the text of its parameters.
    Notify(String, Bytes),
    /// A request to a caller.
    Request {
        /// Names it in [`Order::CancelRequest`]; unique among those unanswered.
        tag: u64,
        /// The method.
        method: String,
        /// The text of its parameters.
        params: Bytes,
        /// The answer; dropped when the sidecar ends first.
        reply: oneshot::Sender<Result<Bytes, RpcError>>,
    },
    /// The answer to a request to a caller is not wanted any more.
    CancelRequest {
        /// Which one.
        tag: u64,
        /// Why, for the caller.
        reason: String,
    },
}

/// Gives orders to a shim.
#[derive(Debug, Clone)]
pub struct ShimHandle {
    orders: mpsc::Sender<Order>,
    reports: mpsc::Sender<Report>,
}

impl ShimHandle {
    /// Queues an order; `false` when the shim has ended.
    pub async fn order(&self, order: Order) -> bool {
        self.orders.send(order).await.is_ok()
    }

    /// A notification that may be lost, in order with the results that come after it; `false` when
    /// there is no room for it now.
    pub fn report(&self, method: Cow<'static, str>, params: Bytes) -> bool {
        !matches!(self.reports.try_send(Report { method, params }), Err(mpsc::error::TrySendError::Full(_)))
    }

    /// Returns when there is room for a report, or the shim has ended.
    pub async fn room(&self) {
        drop(self.reports.reserve().await);
    }
}

/// See the module.
pub struct Shim<L> {
    core: Core,
    launch: L,
    policy: RestartPolicy,
    orders: mpsc::Receiver<Order>,
    port: Option<u16>,
    restarts: u64,
}

/// What outlives a sidecar.
pub(super) struct Core {
    pub(super) config: ShimConfig,
    pub(super) observer: Rc<dyn Observer>,
    pub(super) state: Rc<HostState>,
    pub(super) store: CallStore,
    pub(super) reports: mpsc::Receiver<Report>,
    pub(super) tasks: JoinSet<Outcome>,
    pub(super) generation: u64,
    tools: Rc<dyn Tools>,
    report_to: mpsc::Sender<Report>,
    origins: HashMap<Id, Origin>,
    running: HashMap<String, Running>,
    /// Requests of the current sidecar that are no calls, by their id's text.
    requests: HashMap<Bytes, CancellationToken>,
}

/// A `tools/call` of the sidecar.
pub(super) struct AskedCall {
    pub(super) id: Bytes,
    pub(super) call_id: String,
    pub(super) name: String,
    pub(super) note: Option<Box<RawValue>>,
    pub(super) arguments: Bytes,
    pub(super) params: Bytes,
}

/// The request a task works for.
pub(super) struct Origin {
    /// The sidecar that asked.
    pub(super) generation: u64,
    /// The id's text.
    pub(super) id: Bytes,
    /// Set for `tools/call`.
    pub(super) call_id: Option<String>,
}

/// A call whose tool runs.
struct Running {
    cancelled: CancellationToken,
    generation: u64,
    id: Bytes,
}

impl<L: Launch + 'static> Shim<L> {
    /// A shim that has not started anything yet.
    pub fn new(
        config: ShimConfig,
        tools: Rc<dyn Tools>,
        state: Rc<HostState>,
        observer: Rc<dyn Observer>,
        launch: L,
    ) -> (Self, ShimHandle) {
        let (orders_to, orders) = mpsc::channel(ORDER_QUEUE);
        let (report_to, reports) = mpsc::channel(REPORT_QUEUE);
        let handle = ShimHandle { orders: orders_to, reports: report_to.clone() };
        let core = Core {
            config,
            observer,
            state,
            store: CallStore::default(),
            reports,
            tasks: JoinSet::new(),
            generation: 0,
            tools,
            report_to,
            origins: HashMap::new(),
            running: HashMap::new(),
            requests: HashMap::new(),
        };
        let shim = Self { core, launch, policy: RestartPolicy::default(), orders, port: None, restarts: 0 };
        (shim, handle)
    }

    /// Runs until it is stopped or no sidecar can be had. Needs a `LocalSet`. Afterwards every
    /// tool has been told to end and had a moment to do so.
    pub async fn run(mut self) -> ShimEnd {
        // A task of its own, whoever awaits this: what wakes the outermost future costs an extra look at
        // the driver each time.
        let task = tokio::task::spawn_local(async move {
            let end = self.supervise().await;
            self.core.end_tools().await;
            end
        });
        match AbortOnDropHandle::new(task).await {
            Ok(end) => end,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    async fn supervise(&mut self) -> ShimEnd {
        loop {
            self.core.generation += 1;
            self.core.drop_requests();
            let ending = match self.launch.launch() {
                Ok(sidecar) => {
                    tracing::debug!(generation = self.core.generation, "sidecar started");
                    let life = Life::new(sidecar, self.core.config.ping_every, self.restarts);
                    match life.run(&mut self.core, &mut self.orders, &mut self.port).await {
                        life::End::Stopped => return ShimEnd::Stopped,
                        life::End::Ended { greeted, ending } => {
                            if greeted {
                                self.policy.greeted();
                            }
                            ending
                        }
                    }
                }
                Err(error) => Ending::Died(format!("it cannot be started: {error}")),
            };
            let reason = match &ending {
                Ending::Died(reason) | Ending::Refused(reason) | Ending::Hopeless(reason) => reason.clone(),
                Ending::AskedForRestart => "a restart was asked for".to_owned(),
                Ending::Stopped => "it was stopped".to_owned(),
            };
            tracing::info!(generation = self.core.generation, reason = ?reason, "sidecar ended");
            match self.policy.ended(ending, Instant::now()) {
                Next::Stopped => return ShimEnd::Stopped,
                Next::Refused(reason) => return ShimEnd::Refused(reason),
                Next::Failed(reason) => return ShimEnd::Failed(reason),
                Next::Start(pause) => {
                    self.core.observer.restarting(&reason, pause);
                    self.restarts += 1;
                    if self.pause(pause).await {
                        return ShimEnd::Stopped;
                    }
                }
            }
        }
    }

    /// Waits while tools go on; `true` when the shim was told to stop meanwhile.
    async fn pause(&mut self, pause: Duration) -> bool {
        let over = tokio::time::sleep(pause);
        tokio::pin!(over);
        loop {
            tokio::select! {
                () = &mut over => return false,
                Some(done) = self.core.tasks.join_next_with_id(), if !self.core.tasks.is_empty() => {
                    self.core.finished(done);
                }
                order = self.orders.recv() => match order {
                    None | Some(Order::Stop(_) | Order::StopNow | Order::Kill) => return true,
                    // Its reply is dropped, as if the sidecar had ended a moment later.
                    Some(Order::Request { .. }) => {}
                    Some(order) => refuse(order),
                },
            }
        }
    }
}

/// Tells whoever asked that there is no sidecar at the moment.
pub(super) fn refuse(order: Order) {
    let reason = "the sidecar does not serve at the moment; try again in a second";
    match order {
        Order::Command(_, reply) => drop(reply.send(Err(reason.to_owned()))),
        Order::Request { reply, .. } => {
            let error = RpcError { code: code::FAILED.into(), message: reason.to_owned() };
            drop(reply.send(Err(error)));
        }
        _ => {}
    }
}

impl Core {
    /// Runs the tool of a new call as a task. `Some` is the outcome when it is not run at all.
    pub(super) fn begin(&mut self, asked: AskedCall) -> Option<Outcome> {
        let AskedCall { id, call_id, name, note, arguments, params } = asked;
        if self.running.len() >= MAX_RUNNING {
            return Some(text_result("too many calls at once", true));
        }
        let call = NewCall {
            call_id: call_id.clone(),
            tool: name.clone(),
            started_at: unix_millis(),
            note,
            generation: self.generation,
        };
        if !self.store.begin(call) {
            tracing::error!(call = ?call_id, "a call id came twice; the call is not run again");
            return Some(text_result("this call id has been used before; the call was not run", true));
        }
        let cancelled = CancellationToken::new();
        let reporter = Reporter::new(&call_id, &name, self.report_to.clone(), self.state.clone());
        let call = Call {
            call_id: call_id.clone(),
            name,
            arguments,
            params,
            cancelled: cancelled.clone(),
            reporter,
        };
        let task = self.tasks.spawn_local(self.tools.call(call));
        let generation = self.generation;
        let origin = Origin { generation, id: id.clone(), call_id: Some(call_id.clone()) };
        self.origins.insert(task.id(), origin);
        self.running.insert(call_id, Running { cancelled, generation, id });
        None
    }

    /// Answers a request of the sidecar as a task.
    pub(super) fn answer_later(&mut self, id: Bytes, method: &str, params: Bytes) {
        let task = if method == "tools/list" {
            let list = self.tools.list();
            self.tasks.spawn_local(async move {
                match list.await {
                    Ok(result) => Outcome::Result(result),
                    Err(error) => Outcome::Error(error_text(&error)),
                }
            })
        } else {
            let cancelled = CancellationToken::new();
            self.requests.insert(id.clone(), cancelled.clone());
            let request = Request { method: method.to_owned(), params, cancelled };
            self.tasks.spawn_local(self.tools.request(request))
        };
        self.origins.insert(task.id(), Origin { generation: self.generation, id, call_id: None });
    }

    pub(super) fn relay_notification(&self, method: &str, params: Bytes) {
        self.tools.notification(method, params);
    }

    /// Aborts a call; its tool ends by itself.
    pub(super) fn cancel(&mut self, call_id: &str) {
        if let Some(running) = self.running.get(call_id) {
            running.cancelled.cancel();
            self.store.cancel(call_id, Instant::now());
        }
    }

    /// Aborts what runs for a request of the current sidecar, a call or not.
    pub(super) fn cancel_request(&mut self, id: &str) {
        let is_it = |running: &Running| running.generation == self.generation && running.id == id.as_bytes();
        if let Some(cancelled) = self.requests.get(id.as_bytes()) {
            cancelled.cancel();
        } else if let Some((call_id, _)) = self.running.iter().find(|(_, running)| is_it(running)) {
            let call_id = call_id.clone();
            self.cancel(&call_id);
        }
    }

    /// A sidecar has ended: nobody waits for its requests, while its calls go on.
    fn drop_requests(&mut self) {
        for (_, cancelled) in self.requests.drain() {
            cancelled.cancel();
        }
    }

    /// Books the end of a task and says whose outcome it is.
    pub(super) fn finished(&mut self, done: Result<(Id, Outcome), JoinError>) -> Option<(Origin, Outcome)> {
        let (task, outcome) = match done {
            Ok((task, outcome)) => (task, within_frame_limit(outcome)),
            Err(error) => {
                tracing::error!(%error, "a tool's task failed");
                (error.id(), text_result("the host's tool failed: internal error", true))
            }
        };
        let origin = self.origins.remove(&task)?;
        if let Some(call_id) = &origin.call_id {
            self.running.remove(call_id);
            self.store.finish(call_id, outcome.clone(), Instant::now());
        } else if origin.generation == self.generation {
            self.requests.remove(&origin.id);
        }
        Some((origin, outcome))
    }

    /// Tells every tool to end: nobody will hear of its result.
    pub(super) fn cancel_all(&self) {
        for running in self.running.values() {
            running.cancelled.cancel();
        }
    }

    /// Tells every tool to end and waits a moment.
    async fn end_tools(&mut self) {
        self.cancel_all();
        let all = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(Duration::from_millis(500), all).await.is_err() {
            self.tasks.abort_all();
        }
    }
}

fn within_frame_limit(outcome: Outcome) -> Outcome {
    match &outcome {
        Outcome::Result(text) | Outcome::Error(text) if text.len() > MAX_FRAME - ENVELOPE => {
            text_result(&format!("result of {} bytes exceeds the frame limit", text.len()), true)
        }
        _ => outcome,
    }
}

pub(super) fn error_text(error: &RpcError) -> Bytes {
    serde_json::to_vec(error).unwrap_or_else(|_| b"{}".to_vec()).into()
}

/// Now, as Unix milliseconds.
pub(super) fn unix_millis() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_over_the_frame_limit_becomes_an_error_that_says_so() {
        let outcome = within_frame_limit(Outcome::Result(vec![0; MAX_FRAME].into()));
        let Outcome::Result(text) = outcome else { panic!("a result") };
        let text = String::from_utf8_lossy(&text);
        assert!(text.contains(&format!("result of {MAX_FRAME} bytes exceeds the frame limit")), "{text}");
        assert!(text.ends_with("\"isError\":true}"), "{text}");
        let fits = Outcome::Result(vec![0; MAX_FRAME - ENVELOPE].into());
        assert_eq!(within_frame_limit(fits.clone()), fits);
    }
}
