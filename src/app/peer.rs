//! What the shim sends unasked (contract 17). Called from the link's task: nothing here waits;
//! what takes time becomes a task.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;

use super::{Core, operate};
use crate::audit::{Args, Record};
use crate::frame::messages::{self, Command, GoodbyeReason, InFlight, Notice, RpcError, code};
use crate::host::{Incoming, Peer};
use crate::mcp::call::ToolResult;

/// The core as the link sees it.
pub(super) struct Shim(pub(super) Rc<Core>);

impl Peer for Shim {
    fn incoming(&self, message: Incoming) {
        match message {
            Incoming::Request { id, method, params } => self.request(id, &method, &params),
            Incoming::Notification { method, params } => self.notification(&method, &params),
        }
    }
}

impl Shim {
    fn request(&self, id: Bytes, method: &str, params: &Bytes) {
        let core = self.0.clone();
        match method {
            "bridge/command" => {
                let command: Result<Command, _> = read(method, params);
                self.0.tasks.spawn_local(async move {
                    let answer: Result<Notice, RpcError> = match command {
                        Ok(command) => Ok(operate::host_command(&core, &command.argv).await),
                        Err(error) => Err(error),
                    };
                    let _ = core.link.answer(&id, &answer).await;
                });
            }
            "bridge/stop" => {
                let stop: messages::Stop = read(method, params).unwrap_or(messages::Stop { grace_ms: 0 });
                core.wishes.grace.set(Duration::from_millis(stop.grace_ms));
                core.stop_request.replace(Some(id));
                core.wishes.stop.cancel();
            }
            _ => {
                tracing::debug!(method, "a request this sidecar does not know");
                let answer: Result<(), _> = Err(RpcError {
                    code: code::METHOD_NOT_FOUND.into(),
                    message: format!("{method}: method not found"),
                });
                self.0.tasks.spawn_local(async move {
                    let _ = core.link.answer(&id, &answer).await;
                });
            }
        }
    }

    fn notification(&self, method: &str, params: &Bytes) {
        let core = &self.0;
        match method {
            "notifications/tools/list_changed" => core.catalogue_wanted.notify_one(),
            "bridge/state" => {
                if let Ok(state) = read::<messages::State>(method, params) {
                    core.learn_state(state);
                }
            }
            "bridge/result" => self.late_result(params),
            "bridge/goodbye" => {
                if let Ok(goodbye) = read::<messages::Goodbye>(method, params) {
                    tracing::info!(reason = ?goodbye.reason, "the host says goodbye");
                    if goodbye.reason == GoodbyeReason::Restart {
                        core.wishes.restart.cancel();
                    } else {
                        core.wishes.stop.cancel();
                    }
                }
            }
            // Progress and log messages have no stream to go to yet.
            "notifications/progress" | "notifications/message" => {}
            _ => tracing::debug!(method, "a notification this sidecar does not know"),
        }
    }

    /// The end of a call of an earlier sidecar: its caller's connection died with that sidecar, so
    /// the end is audited and the shim may forget the result.
    fn late_result(&self, params: &Bytes) {
        let Ok(text) = std::str::from_utf8(params) else { return };
        let Ok(late) = serde_json::from_str::<messages::CallResult<'_>>(text) else {
            tracing::warn!("bridge/result without a callId ignored");
            return;
        };
        let Some(call) = self.0.inherited.borrow_mut().remove(&late.call_id) else {
            tracing::debug!("bridge/result for a call that is not known");
            return;
        };
        let is_error = late.result.is_none_or(|result| {
            ToolResult::from_host(Bytes::copy_from_slice(result.get().as_bytes())).is_error
        });
        let core = self.0.clone();
        core.clone().tasks.spawn_local(async move {
            let note = Inherited::of(&call);
            let args = Args::redacted_before(&note.args);
            core.audit.write(Record::done(&call.call_id, &note.sid, &call.tool, &args, is_error)).await;
            let _ = core.link.notify("bridge/ack", &serde_json::json!({ "callIds": [call.call_id] })).await;
        });
    }
}

/// What a call's note tells a later sidecar; a note of another format tells nothing.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Inherited {
    sid: String,
    args: String,
}

impl Inherited {
    fn of(call: &InFlight) -> Self {
        call.note.as_ref().and_then(|note| serde_json::from_str(note.get()).ok()).unwrap_or_default()
    }
}

fn read<'a, T: Deserialize<'a>>(method: &str, params: &'a Bytes) -> Result<T, RpcError> {
    serde_json::from_slice(params).map_err(|error| {
        tracing::warn!(method, %error, "parameters do not fit");
        RpcError { code: code::INVALID_PARAMS.into(), message: format!("{method}: {error}") }
    })
}

impl Core {
    fn learn_state(&self, state: messages::State) {
        let came_alive = state.main && self.main.replace(Some(state.main)) != Some(true);
        self.main.set(Some(state.main));
        if came_alive {
            self.catalogue_wanted.notify_one();
        }
        self.ledger
            .borrow_mut()
            .set_approvals(state.approvals.iter().map(|approval| approval.call_id.as_str()));
        *self.approvals.borrow_mut() = state.approvals;
    }
}
