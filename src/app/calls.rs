//! One `tools/call` on its way: ledger, audit `start`, host, audit `done`, answer.
//!
//! A call is a task of its own. The caller's handler only waits for the outcome: it may vanish at any
//! moment, and what must still happen (the audit's end, striking the call out) happens here.

use std::cell::Cell;
use std::rc::Rc;

use bytes::Bytes;
use serde::Serialize;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::Core;
use crate::audit::{Args, Outcome as AuditOutcome, Record};
use crate::host::LinkError;
use crate::ledger::{Entry, Phase, TooMany};
use crate::mcp::call::{NO_MAIN, NOT_EXPOSED, ToolCall, ToolResult};

/// The format of a call's note (contract 17).
const NOTE_VERSION: u32 = 1;

/// How a call ended, for its caller.
#[derive(Debug)]
pub enum Outcome {
    /// With a result, be it an error of the tool or of ours.
    Result(ToolResult),
    /// Its caller cancelled it, or the session ended: nobody waits for a result.
    Cancelled,
}

/// Why a call was cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancel {
    /// `notifications/cancelled`.
    Caller,
    /// The session ended, or its token was replaced.
    SessionEnded,
    /// The operator said so.
    Operator,
    /// The bridge ends and the grace is over.
    Stopping,
    /// The next sidecar takes over; the tool goes on in the host.
    Restarting,
}

impl Cancel {
    fn reason(self) -> &'static str {
        match self {
            Self::Caller => "cancelled by the caller",
            Self::SessionEnded => "the caller's session ended",
            Self::Operator => "cancelled by the operator",
            Self::Stopping => "the bridge is stopping",
            Self::Restarting => "the bridge restarted",
        }
    }
}

/// The way to reach a running call.
#[derive(Clone)]
pub(super) struct Handle {
    cancelled: CancellationToken,
    cause: Rc<Cell<Option<Cancel>>>,
}

/// What the shim keeps for a later sidecar and hands back in `inFlight`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Note<'a> {
    v: u32,
    sid: &'a str,
    rpc_id: &'a str,
    args: &'a str,
}

/// Who asks.
pub struct Caller {
    /// The session's id.
    pub sid: String,
    /// The client's name, for people.
    pub client_name: String,
}

impl Core {
    /// Starts a call; its outcome comes through the receiver, unless the call's task dies.
    ///
    /// # Errors
    /// [`TooMany`]: nothing was dispatched.
    pub fn start_call(
        self: &Rc<Self>,
        caller: Caller,
        rpc_id: &str,
        call: Option<ToolCall>,
    ) -> Result<oneshot::Receiver<Outcome>, TooMany> {
        let call_id = uuid::Uuid::new_v4().to_string();
        let entry = Entry {
            call_id: call_id.clone(),
            sid: caller.sid.clone(),
            rpc_id: rpc_id.to_owned(),
            tool: call.as_ref().map(|call| call.name.clone()).unwrap_or_default(),
            started_ms: super::now_ms(),
            phase: Phase::Waiting,
        };
        self.ledger.borrow_mut().begin(entry)?;
        let handle = Handle { cancelled: CancellationToken::new(), cause: Rc::default() };
        self.running.borrow_mut().insert(call_id.clone(), handle.clone());
        let (answer, outcome) = oneshot::channel();
        let core = self.clone();
        let rpc_id = rpc_id.to_owned();
        self.tasks.spawn_local(async move {
            let guard = Struck { core: &core, call_id: &call_id };
            let outcome = core.run_call(&call_id, &caller, &rpc_id, call, &handle).await;
            drop(guard);
            let _ = answer.send(outcome);
        });
        Ok(outcome)
    }

    async fn run_call(
        &self,
        call_id: &str,
        caller: &Caller,
        rpc_id: &str,
        call: Option<ToolCall>,
        handle: &Handle,
    ) -> Outcome {
        let name = call.as_ref().map_or("", |call| &call.name);
        let args = call.as_ref().map_or_else(
            || Args::redact("{}"),
            |call| Args::redact(std::str::from_utf8(call.arguments()).unwrap_or("{}")),
        );
        self.audit.write(Record::start(call_id, &caller.sid, name, &args)).await;
        let asked = tokio::select! {
            answer = self.ask_host(call_id, caller, rpc_id, call.as_ref(), &args, &handle.cause) => answer,
            () = handle.cancelled.cancelled() => {
                Err(Unanswered::Cancelled(handle.cause.get().unwrap_or(Cancel::Caller)))
            }
        };
        let (outcome, record) = match asked {
            Ok(result) => {
                let record = Record::done(call_id, &caller.sid, name, &args, result.is_error);
                (Outcome::Result(result), record)
            }
            Err(Unanswered::Cancelled(Cancel::Restarting)) => {
                // Its end is audited by the sidecar that learns it.
                let text = format!(
                    "the bridge restarted during call {call_id}: the tool goes on in the host, its result cannot be delivered"
                );
                return Outcome::Result(ToolResult::error(&text));
            }
            Err(Unanswered::Cancelled(cause)) => {
                let record = Record::ended(call_id, &caller.sid, name, &args, AuditOutcome::Cancelled);
                let outcome = match cause {
                    Cancel::Caller | Cancel::SessionEnded => Outcome::Cancelled,
                    Cancel::Operator | Cancel::Stopping | Cancel::Restarting => {
                        Outcome::Result(ToolResult::error(cause.reason()))
                    }
                };
                (outcome, record)
            }
            Err(Unanswered::Unknown) => {
                let record = Record::ended(call_id, &caller.sid, name, &args, AuditOutcome::Unknown);
                let text = format!(
                    "outcome unknown: the host went away during call {call_id}; the tool may or may not have run to its end"
                );
                (Outcome::Result(ToolResult::error(&text)), record)
            }
        };
        self.audit.write(record).await;
        outcome
    }

    async fn ask_host(
        &self,
        call_id: &str,
        caller: &Caller,
        rpc_id: &str,
        call: Option<&ToolCall>,
        args: &Args,
        cause: &Cell<Option<Cancel>>,
    ) -> Result<ToolResult, Unanswered> {
        let call = match call {
            Some(call) if !self.denied.covers(&call.name) => call,
            _ => return Ok(ToolResult::error(NOT_EXPOSED)),
        };
        if self.paused.get() {
            return Ok(ToolResult::error("paused by the operator"));
        }
        if self.catalogue().await.is_none() {
            return Ok(ToolResult::error(NO_MAIN));
        }
        self.ledger.borrow_mut().set_phase(call_id, Phase::Running);
        let note = Note { v: NOTE_VERSION, sid: &caller.sid, rpc_id, args: args.as_str() };
        let note = serde_json::to_string(&note).unwrap_or_else(|_| "{}".into());
        let params = call.host_params(call_id, &note, &caller.sid, &caller.client_name);
        let id = self.link.next_id();
        // Dropped by a cancel, it tells the host; answered, it has nothing to tell.
        let mut dispatched = Dispatched { core: self, id, cause, answered: false };
        let answer = self.link.request_with_id(id, "tools/call", params).await;
        dispatched.answered = true;
        match answer.map(crate::host::Answer::into_result) {
            Ok(Ok(result)) => Ok(ToolResult::from_host(result)),
            Ok(Err(error)) => Ok(ToolResult::error(&error.message)),
            Err(LinkError::TooLarge(reason)) => Ok(ToolResult::error(&reason)),
            Err(LinkError::Ended) => Err(Unanswered::Unknown),
        }
    }

    /// Cancels calls; how many of them were still running.
    pub fn cancel_calls(&self, call_ids: &[String], cause: Cancel) -> usize {
        let running = self.running.borrow();
        let handles = call_ids.iter().filter_map(|call_id| running.get(call_id));
        handles
            .filter(|handle| !handle.cancelled.is_cancelled())
            .map(|handle| {
                handle.cause.set(Some(cause));
                handle.cancelled.cancel();
            })
            .count()
    }
}

enum Unanswered {
    Cancelled(Cancel),
    /// The host is gone; what it did is not known.
    Unknown,
}

/// Strikes the call out of the tables, also when its task is dropped.
struct Struck<'a> {
    core: &'a Core,
    call_id: &'a str,
}

impl Drop for Struck<'_> {
    fn drop(&mut self) {
        self.core.running.borrow_mut().remove(self.call_id);
        self.core.ledger.borrow_mut().end(self.call_id);
        self.core.call_ended.notify_waiters();
    }
}

/// A request that went to the host; a drop before its answer aborts the tool.
struct Dispatched<'a> {
    core: &'a Core,
    id: u64,
    cause: &'a Cell<Option<Cancel>>,
    answered: bool,
}

impl Drop for Dispatched<'_> {
    fn drop(&mut self) {
        if self.answered || self.cause.get() == Some(Cancel::Restarting) {
            return;
        }
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Cancelled {
            request_id: u64,
        }
        let (link, id) = (self.core.link.clone(), self.id);
        self.core.tasks.spawn_local(async move {
            let _ = link.notify("notifications/cancelled", &Cancelled { request_id: id }).await;
        });
    }
}

/// The answer to a call's own parts, for the wire.
impl Outcome {
    /// The JSON-RPC reply.
    pub fn reply(self, rpc_id: &str) -> Vec<Bytes> {
        match self {
            Self::Result(result) => crate::mcp::reply::result(rpc_id, result.text),
            Self::Cancelled => {
                crate::mcp::reply::error(rpc_id, crate::mcp::reply::code::CANCELLED, "cancelled")
            }
        }
    }
}
