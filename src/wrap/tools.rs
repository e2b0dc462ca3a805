//! The wrapped server as the shim sees it: its tools, and whatever else of MCP it offers. What is
//! listed is what the server lists, and only that can be called. While it does not run, or fails to list
//! its tools, its last list stands.

use std::borrow::Cow;
use std::collections::HashSet;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use super::connection::{Connection, Sent, Unanswered};
use super::params::for_server;
use super::wrapped::{Phase, ServerInfo, Wrapped};
use crate::frame::messages::{RpcError, code};
use crate::frame::raw::{RawObject, quote, string};
use crate::mcp::call::NOT_EXPOSED;
use crate::refhost::store::Outcome;
use crate::refhost::tools::{Call, Pending, Request, Tools, error_outcome, text_result};
use crate::text::clean;

/// Most pages of a list, and bytes of them together.
const MAX_PAGES: usize = 1000;
const MAX_LIST: usize = 64 << 20;

/// A server that has not listed its tools by then is said to be slow, and its last list stands.
const LIST_PATIENCE: Duration = Duration::from_secs(10);

/// Why there is no list of tools; for people.
#[derive(Debug, thiserror::Error)]
enum Unlisted {
    #[error("the server ended")]
    Ended,
    #[error("{0}")]
    Failed(String),
}

/// See the module.
pub(super) struct WrappedTools(pub(super) Rc<Wrapped>);

impl Tools for WrappedTools {
    fn list(&self) -> Pending<Result<Bytes, RpcError>> {
        let wrapped = self.0.clone();
        Box::pin(async move {
            let last = || wrapped.listed.borrow().clone();
            // Who asks now need not wait for a server that is started again: it tells of a change itself.
            let is_starting = matches!(&*wrapped.phase.borrow(), Phase::Starting);
            if let Some(last) = last().filter(|_| is_starting) {
                return Ok(last);
            }
            let listed = match wrapped.running(&CancellationToken::new()).await {
                Ok((connection, info)) => {
                    wrapped.list_in_time(connection, info).await.map_err(|error| error.to_string())
                }
                Err(reason) => Err(reason),
            };
            // A sidecar that knows the last list passes calls on, and they are told why nothing runs.
            listed.or_else(|message| last().ok_or(RpcError { code: code::FAILED.into(), message }))
        })
    }

    fn call(&self, call: Call) -> Pending<Outcome> {
        let wrapped = self.0.clone();
        let running = match &*wrapped.phase.borrow() {
            Phase::Running(connection, _) if wrapped.names.borrow().contains(&call.name) => {
                Some(connection.clone())
            }
            _ => None,
        };
        // The way of nearly every call: it is on its way before anything is awaited.
        if let Some(connection) = running {
            let sent = send(&connection, &call);
            return Box::pin(async move { finish(sent, &call).await });
        }
        Box::pin(async move {
            let (connection, info) = match wrapped.running(&call.cancelled).await {
                Ok(running) => running,
                Err(reason) => return text_result(&reason, true),
            };
            if !wrapped.names.borrow().contains(&call.name) {
                // The server may have more by now than it said.
                let listed = wrapped.list_in_time(connection.clone(), info);
                let listed = tokio::select! {
                    listed = listed => listed,
                    () = call.cancelled.cancelled() => Err(Unlisted::Failed("cancelled".to_owned())),
                };
                if let Err(error) = listed {
                    return text_result(&format!("the server's tools cannot be listed: {error}"), true);
                }
                if !wrapped.names.borrow().contains(&call.name) {
                    return text_result(NOT_EXPOSED, true);
                }
            }
            let sent = send(&connection, &call);
            finish(sent, &call).await
        })
    }

    fn request(&self, request: Request) -> Pending<Outcome> {
        let wrapped = self.0.clone();
        Box::pin(async move {
            if request.method.starts_with("bridge/") {
                let message = format!("method not found: {}", request.method);
                return error_outcome(code::METHOD_NOT_FOUND, &message);
            }
            let connection = match wrapped.running(&request.cancelled).await {
                Ok((connection, _)) => connection,
                Err(reason) => {
                    // For the next one.
                    wrapped.remember(&request);
                    return error_outcome(code::FAILED, &reason);
                }
            };
            let (params, who) = for_server(&request.params);
            let sent = match connection.request(&request.method, params, Some(who)) {
                Ok(sent) => sent,
                Err(outcome) => return outcome,
            };
            let outcome = match sent.answer(&request.cancelled).await {
                Ok(outcome) => outcome,
                Err(Unanswered::Cancelled) => error_outcome(code::FAILED, "cancelled"),
                Err(Unanswered::Ended(how)) => {
                    error_outcome(code::FAILED, &format!("the server ended ({how}) before it answered"))
                }
            };
            if matches!(outcome, Outcome::Result(_)) {
                wrapped.remember(&request);
            }
            outcome
        })
    }

    // Notifications of callers concern the sidecar alone. That a caller's roots changed is not passed on:
    // a server would take one caller's roots for everybody's.
}

fn send(connection: &Rc<Connection>, call: &Call) -> Result<Sent, Outcome> {
    let (params, who) = for_server(&call.params);
    connection.request("tools/call", params, Some(who))
}

async fn finish(sent: Result<Sent, Outcome>, call: &Call) -> Outcome {
    let sent = match sent {
        Ok(sent) => sent,
        Err(outcome) => return outcome,
    };
    match sent.answer(&call.cancelled).await {
        Ok(outcome) => outcome,
        Err(Unanswered::Cancelled) => text_result("cancelled", true),
        Err(Unanswered::Ended(how)) => error_outcome(
            code::OUTCOME_UNKNOWN,
            &format!(
                "outcome unknown: the server ended ({how}) during call {}; the tool may or may not have run to its end",
                call.call_id
            ),
        ),
    }
}

impl Wrapped {
    /// The running server; waits while it is starting.
    ///
    /// # Errors
    /// Why there is none, for people.
    async fn running(
        &self,
        cancelled: &CancellationToken,
    ) -> Result<(Rc<Connection>, Rc<ServerInfo>), String> {
        let mut phase = self.phase.subscribe();
        let settled = async {
            let phase = phase.wait_for(|phase| !matches!(phase, Phase::Starting)).await;
            phase.map(|phase| phase.clone()).unwrap_or(Phase::Ended)
        };
        let phase = tokio::select! {
            phase = settled => phase,
            () = cancelled.cancelled() => return Err("cancelled".to_owned()),
        };
        match phase {
            Phase::Running(connection, info) => Ok((connection, info)),
            Phase::Failed(reason) => Err(format!("the server behind this bridge does not run: {reason}")),
            Phase::Starting | Phase::Ended => Err("the server behind this bridge has ended".to_owned()),
        }
    }

    /// The list that the server gives, or its last one when that takes long; the new one is told of then.
    async fn list_in_time(
        self: &Rc<Self>,
        connection: Rc<Connection>,
        info: Rc<ServerInfo>,
    ) -> Result<Bytes, Unlisted> {
        let wrapped = self.clone();
        let mut listing = tokio::task::spawn_local(async move { wrapped.list(&connection, &info).await });
        if let Ok(listed) = tokio::time::timeout(LIST_PATIENCE, &mut listing).await {
            return listed.unwrap_or(Err(Unlisted::Ended));
        }
        let error = format!("it has not answered tools/list for {} s", LIST_PATIENCE.as_secs());
        tracing::warn!("the server's tools cannot be listed: {error}");
        self.tell(|status| status.list_error = Some(error));
        let last = self.listed.borrow().clone();
        let Some(last) = last else { return listing.await.unwrap_or(Err(Unlisted::Ended)) };
        let (wrapped, before) = (self.clone(), last.clone());
        tokio::task::spawn_local(async move {
            if listing.await.is_ok_and(|listed| listed.is_ok_and(|list| list != before)) {
                wrapped.changed("notifications/tools/list_changed");
            }
        });
        Ok(last)
    }

    /// All pages of `tools/list` as one; remembers them, or says in the status why there are none.
    async fn list(&self, connection: &Rc<Connection>, info: &ServerInfo) -> Result<Bytes, Unlisted> {
        let listed = self.list_pages(connection, info).await;
        let list_error = match &listed {
            Ok((list, names)) => {
                *self.listed.borrow_mut() = Some(list.clone());
                self.names.borrow_mut().clone_from(names);
                None
            }
            // Its end says more.
            Err(Unlisted::Ended) => return Err(Unlisted::Ended),
            Err(Unlisted::Failed(error)) => {
                let error = clean(error, 400).into_owned();
                tracing::warn!("the server's tools cannot be listed: {error}");
                Some(error)
            }
        };
        self.tell(|status| status.list_error = list_error);
        listed.map(|(list, _)| list)
    }

    async fn list_pages(
        &self,
        connection: &Rc<Connection>,
        info: &ServerInfo,
    ) -> Result<(Bytes, HashSet<String>), Unlisted> {
        let failed = |error: &str| Unlisted::Failed(error.to_owned());
        let mut json = String::from(r#"{"tools":["#);
        let mut names = HashSet::new();
        let mut cursor: Option<String> = None;
        let never = CancellationToken::new();
        for _ in 0..MAX_PAGES {
            if !info.offers("tools") {
                break;
            }
            let params = cursor.map_or("{}".to_owned(), |cursor| format!(r#"{{"cursor":{cursor}}}"#));
            let sent = connection.request("tools/list", [params.into()], None);
            let sent = sent.map_err(|_| Unlisted::Ended)?;
            let page = match sent.answer(&never).await {
                Ok(Outcome::Result(page)) => page,
                Ok(Outcome::Error(error)) => {
                    let error: Option<RpcError> = serde_json::from_slice(&error).ok();
                    return Err(error.map_or(failed("unreadable error"), |error| failed(&error.message)));
                }
                Err(_) => return Err(Unlisted::Ended),
            };
            let page = std::str::from_utf8(&page).ok().and_then(RawObject::parse);
            let page = page.ok_or_else(|| failed("its answer to tools/list is no object"))?;
            let tools = page.get("tools");
            let tools = tools.ok_or_else(|| failed("its answer to tools/list has no `tools`"))?;
            let tools: Vec<&RawValue> =
                serde_json::from_str(tools.get()).map_err(|_| failed("its `tools` is no array"))?;
            for tool in tools {
                let name = RawObject::parse(tool.get()).and_then(|tool| tool.get("name").and_then(string));
                names.extend(name.map(Cow::into_owned));
                if json.len() + tool.get().len() > MAX_LIST {
                    return Err(failed(&format!("its list of tools is over {MAX_LIST} bytes")));
                }
                let comma = if json.ends_with('[') { "" } else { "," };
                json.push_str(comma);
                json.push_str(tool.get());
            }
            let next = page.get("nextCursor").filter(|next| next.get().starts_with('"'));
            cursor = next.and_then(string).map(|next| quote(&next));
            if cursor.is_none() {
                break;
            }
        }
        if cursor.is_some() {
            tracing::warn!(
                "the server's list of tools has more than {MAX_PAGES} pages; the rest is left out"
            );
        }
        json.push_str("]}");
        Ok((json.into(), names))
    }

    /// What the next process must be told too.
    fn remember(&self, request: &Request) {
        let uri = || {
            let params = std::str::from_utf8(&request.params).ok().and_then(RawObject::parse)?;
            string(params.get("uri")?).map(Cow::into_owned)
        };
        let params = || Bytes::from(for_server(&request.params).0.concat());
        match request.method.as_str() {
            "logging/setLevel" => *self.level.borrow_mut() = Some(params()),
            "resources/subscribe" => {
                self.subscriptions.borrow_mut().extend(uri().map(|uri| (uri, params())));
            }
            "resources/unsubscribe" => {
                if let Some(uri) = uri() {
                    self.subscriptions.borrow_mut().remove(&uri);
                }
            }
            _ => {}
        }
    }
}
