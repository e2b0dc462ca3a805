//! What a host offers, as the generic shim sees it: [`Tools`], the [`Call`] a tool is given, and
//! how it reports while it runs. Results and arguments are JSON text; nothing here parses them.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use bytes::Bytes;
use serde_json::value::RawValue;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use super::store::Outcome;
use crate::frame::messages::{Approval, HostLlm, RpcError, Server, State, code};
use crate::frame::raw;

/// A future of this thread.
pub type Pending<T> = Pin<Box<dyn Future<Output = T>>>;

/// A host's tools and whatever else of MCP it answers.
pub trait Tools: 'static {
    /// The text of the `tools/list` result.
    fn list(&self) -> Pending<Result<Bytes, RpcError>>;

    /// Runs a tool. What a tool throws is a result with `isError`; an error is for calls that
    /// could not be made. The future is never dropped before its end as long as the host lives;
    /// it should end soon after [`Call::cancelled`].
    fn call(&self, call: Call) -> Pending<Outcome>;

    /// Any other request of the sidecar: `resources/*`, `prompts/*`, `bridge/hostLlm`, … As with calls,
    /// the future should end soon after [`Request::cancelled`].
    fn request(&self, request: Request) -> Pending<Outcome> {
        let outcome = error_outcome(code::METHOD_NOT_FOUND, &format!("method not found: {}", request.method));
        Box::pin(std::future::ready(outcome))
    }

    /// Any other notification of the sidecar.
    fn notification(&self, _method: &str, _params: Bytes) {}
}

/// One call.
#[derive(Debug)]
pub struct Call {
    /// The sidecar's id.
    pub call_id: String,
    /// The tool's name; empty when it was no string.
    pub name: String,
    /// The text of the arguments, of any shape.
    pub arguments: Bytes,
    /// The text of all parameters, the arguments and `_meta` among them.
    pub params: Bytes,
    /// Fires when the caller, or the operator, gave the call up.
    pub cancelled: CancellationToken,
    /// Says how it goes.
    pub reporter: Reporter,
}

/// One request that is no call.
#[derive(Debug)]
pub struct Request {
    /// The method.
    pub method: String,
    /// The text of its parameters; empty when there are none.
    pub params: Bytes,
    /// Fires when nobody waits for the answer any more.
    pub cancelled: CancellationToken,
}

/// A notification on its way to the sidecar.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) method: Cow<'static, str>,
    pub(super) params: Bytes,
}

/// Reports of a running call. They are lossy: under pressure they are dropped, results never are.
#[derive(Debug, Clone)]
pub struct Reporter {
    call_id: Rc<str>,
    tool: Rc<str>,
    reports: mpsc::Sender<Report>,
    state: Rc<HostState>,
}

impl Reporter {
    pub(super) fn new(
        call_id: &str,
        tool: &str,
        reports: mpsc::Sender<Report>,
        state: Rc<HostState>,
    ) -> Self {
        Self { call_id: call_id.into(), tool: tool.into(), reports, state }
    }

    /// `progress` must grow from report to report.
    pub fn progress(&self, progress: f64, total: Option<f64>, message: Option<&str>) {
        let mut params = serde_json::json!({ "progressToken": &*self.call_id, "progress": progress });
        if let Some(total) = total {
            params["total"] = total.into();
        }
        if let Some(message) = message {
            params["message"] = message.into();
        }
        self.report("notifications/progress", params);
    }

    fn report(&self, method: &'static str, mut params: serde_json::Value) {
        params["_meta"] = serde_json::json!({ "a2mcp/call": { "callId": &*self.call_id } });
        // A full queue means that nobody keeps up: one report less is what lossy means.
        let _ = self.reports.try_send(Report { method: method.into(), params: params.to_string().into() });
    }

    /// Shows the call as waiting for an approval until the guard is dropped.
    pub fn await_approval(&self) -> AwaitingApproval {
        self.state.approvals.borrow_mut().insert(self.call_id.to_string(), self.tool.to_string());
        self.state.changed.notify_one();
        AwaitingApproval { call_id: self.call_id.clone(), state: self.state.clone() }
    }
}

/// See [`Reporter::await_approval`].
#[derive(Debug)]
pub struct AwaitingApproval {
    call_id: Rc<str>,
    state: Rc<HostState>,
}

impl Drop for AwaitingApproval {
    fn drop(&mut self) {
        self.state.approvals.borrow_mut().remove(&*self.call_id);
        self.state.changed.notify_one();
    }
}

/// What `bridge/state` tells, whole, whenever it changed.
#[derive(Debug)]
pub struct HostState {
    main: Cell<bool>,
    host_llm: Cell<Option<HostLlm>>,
    approvals: RefCell<BTreeMap<String, String>>,
    server: RefCell<Option<Server>>,
    pub(super) changed: Notify,
}

impl Default for HostState {
    fn default() -> Self {
        Self {
            main: Cell::new(true),
            host_llm: Cell::new(None),
            approvals: RefCell::default(),
            server: RefCell::default(),
            changed: Notify::new(),
        }
    }
}

impl HostState {
    /// Whether the host has a live Main session; a reference host has one unless told otherwise.
    pub fn set_main(&self, main: bool) {
        self.main.set(main);
        self.changed.notify_one();
    }

    /// See [`HostState::set_main`].
    pub fn main(&self) -> bool {
        self.main.get()
    }

    /// `armed`, `refused`, `allow` or `degraded`.
    pub fn set_host_llm(&self, state: HostLlm) {
        self.host_llm.set(Some(state));
        self.changed.notify_one();
    }

    /// How the server behind this host fares.
    pub fn set_server(&self, server: Server) {
        if self.server.replace(Some(server.clone())) != Some(server) {
            self.changed.notify_one();
        }
    }

    pub(super) fn message(&self) -> State {
        let approvals = self.approvals.borrow();
        State {
            main: self.main.get(),
            host_llm: self.host_llm.get(),
            denied: None,
            approvals: approvals
                .iter()
                .map(|(call_id, tool)| Approval { call_id: call_id.clone(), tool: tool.clone() })
                .collect(),
            server: self.server.borrow().clone(),
        }
    }
}

/// A result of one text block.
pub fn text_result(text: &str, is_error: bool) -> Outcome {
    let text = raw::quote(text);
    Outcome::Result(format!(r#"{{"content":[{{"type":"text","text":{text}}}],"isError":{is_error}}}"#).into())
}

/// A JSON-RPC error.
pub fn error_outcome(code: i32, message: &str) -> Outcome {
    Outcome::Error(format!(r#"{{"code":{code},"message":{}}}"#, raw::quote(message)).into())
}

/// `bytes` as raw JSON; `null` when they are none, which only a mistake in this crate can cause.
pub fn raw_json(bytes: &Bytes) -> Box<RawValue> {
    serde_json::from_slice(bytes).unwrap_or_default()
}
