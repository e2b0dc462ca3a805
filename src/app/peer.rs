//! What the shim sends unasked (contract 17). Called from the link's task: nothing here waits;
//! what takes time becomes a task.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;

use super::{Core, operate};
use crate::frame::messages::{self, Command, GoodbyeReason, Notice, RpcError, code};
use crate::host::{Incoming, Peer};
use crate::text::clean;

/// Longer lines of the shim are cut in the log.
const MAX_LOG_LINE: usize = 2000;

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
            _ if !method.starts_with("bridge/") => core.ask_caller(id, method, params),
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
            "bridge/log" => {
                if let Ok(line) = read::<messages::LogLine>(method, params) {
                    tracing::info!("{}", clean(&line.text, MAX_LOG_LINE));
                }
            }
            "bridge/hostLlmRefused" => {
                if let Ok(refused) = read::<messages::HostLlmRefused>(method, params) {
                    let core = core.clone();
                    self.0.tasks.spawn_local(async move { core.host_llm_refused(&refused.error).await });
                }
            }
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
            "bridge/closeStream" => {
                #[derive(Deserialize)]
                #[serde(rename_all = "camelCase")]
                struct CloseStream {
                    call_id: String,
                }
                if let Ok(close) = read::<CloseStream>(method, params)
                    && let Some(exchange) = core.exchanges.borrow().get(&close.call_id)
                {
                    exchange.stream().dismiss_reader();
                }
            }
            "notifications/progress" => core.relay_progress(params),
            "notifications/message" => core.relay_message(params),
            _ if method.starts_with("notifications/") => core.relay_notification(method, params),
            _ => tracing::debug!(method, "a notification this sidecar does not know"),
        }
    }

    /// The end of a call of an earlier sidecar.
    fn late_result(&self, params: &Bytes) {
        let Ok(late) = serde_json::from_slice::<messages::CallResult<'_>>(params) else {
            tracing::warn!("bridge/result without a callId ignored");
            return;
        };
        let Some(waiting) = self.0.late_results.borrow_mut().remove(&late.call_id) else {
            tracing::debug!("bridge/result for a call that is not known");
            return;
        };
        let failed = |message: &str| RpcError { code: code::FAILED.into(), message: message.to_owned() };
        let answer = match (late.result, late.error) {
            (Some(result), _) => Ok(params.slice_ref(result.get().as_bytes())),
            (None, Some(error)) => {
                Err(serde_json::from_str(error.get()).unwrap_or_else(|_| failed(error.get())))
            }
            (None, None) => Err(failed("the host gave no result")),
        };
        let _ = waiting.send(answer);
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
        if state.server.is_some() {
            *self.server.borrow_mut() = state.server;
        }
        self.host_llm.set(state.host_llm.map(|word| (word, state.denied.unwrap_or(0))));
        if came_alive {
            self.catalogue_wanted.notify_one();
        }
        let waiting = state.approvals.iter().map(|approval| approval.call_id.as_str());
        let begun = self.ledger.borrow_mut().set_approvals(waiting);
        for call_id in begun {
            self.tell_awaiting_approval(&call_id);
        }
    }
}
