//! Requests and notifications of callers that the sidecar does not know, passed to a host that declared
//! them (contract 17, "any other MCP request or notification the features name"), and what such a host
//! says on its own. What the sidecar must know of it because it is per session is in [`super::wants`].

use std::rc::Rc;

use bytes::Bytes;

use super::Core;
use super::calls::Caller;
use super::exchange::{Exchange, Outcome, Seat};
use super::streams::Stream;
use crate::frame::raw::{RawObject, key_is, quote, string};
use crate::host::{Answer, LinkError};

impl Core {
    /// Whether the host declared the capability that a method's first word names.
    pub(super) fn host_offers(&self, method: &str) -> bool {
        let capability = match method.split('/').next().unwrap_or_default() {
            "completion" => "completions",
            // These the sidecar serves itself.
            "tools" | "logging" | "" => return false,
            word => word,
        };
        self.host_capability(capability).is_some()
    }

    pub(super) fn host_capability(&self, name: &str) -> Option<&str> {
        let capabilities = RawObject::parse(self.hello.capabilities.as_ref()?.get())?;
        capabilities.get(name).map(|value| value.get()).filter(|value| value.starts_with('{'))
    }

    /// What `initialize` advertises: what the sidecar does itself, and what the host adds.
    pub(super) fn server_capabilities(&self) -> String {
        let mut json = String::from(r#"{"tools":{"listChanged":true},"logging":{}"#);
        let host = self
            .hello
            .capabilities
            .as_ref()
            .and_then(|text| RawObject::parse(text.get()))
            .unwrap_or_default();
        for (key, value) in &host.members {
            let is_ours = ["tools", "logging", "tasks"].iter().any(|own| key_is(key, own));
            if !is_ours && value.get().starts_with('{') {
                json.push_str(&format!(",{}:{}", key.get(), value.get()));
            }
        }
        json.push('}');
        json
    }

    /// Starts a relayed request.
    pub(super) fn start_relay(
        self: &Rc<Self>,
        caller: Caller,
        rpc_id: &str,
        accepts_stream: bool,
        method: &str,
        params: Option<&str>,
    ) -> Rc<Exchange> {
        let key = uuid::Uuid::new_v4().to_string();
        let subscribed = (method == "resources/subscribe").then(|| uri_of(params)).flatten();
        let (params, progress_token) = for_host(params, &key, &caller);
        let seat = Seat {
            sid: caller.sid,
            rpc_id: rpc_id.to_owned(),
            progress_token,
            accepts_stream,
            stream: Stream::new(key.clone(), self.next_epoch()),
        };
        let exchange = Exchange::new(key.clone(), false, seat);
        self.exchanges.borrow_mut().insert(key.clone(), exchange.clone());
        let (core, method, running) = (self.clone(), method.to_owned(), exchange.clone());
        self.tasks.spawn_local(async move {
            let id = core.link.next_id();
            let outcome = tokio::select! {
                answer = core.link.request_with_id(id, &method, vec![params.into()]) => match answer {
                    Ok(Answer::Result(result)) => Outcome::Relayed(result),
                    Ok(Answer::Error(error)) => Outcome::RelayedError(error),
                    Err(LinkError::TooLarge(reason)) => relay_error(&reason),
                    Err(LinkError::Ended) => relay_error("the host went away"),
                },
                () = running.cancelled.cancelled() => {
                    let _ = core.link.cancel(id, running.cause().reason()).await;
                    Outcome::Cancelled
                }
            };
            if let Some(uri) = &subscribed
                && !matches!(outcome, Outcome::Relayed(_))
            {
                // The next one who subscribes asks the host again.
                core.subscription_refused(uri);
            }
            core.drop_questions_of(&running.key, "the request has ended");
            core.exchanges.borrow_mut().remove(&running.key);
            running.finish(outcome);
        });
        exchange
    }

    /// A log message of the host: onto its call's stream, else to every session that listens.
    pub(super) fn relay_message(&self, params: &Bytes) {
        let level = std::str::from_utf8(params)
            .ok()
            .and_then(RawObject::parse)
            .and_then(|params| string(params.get("level")?).map(std::borrow::Cow::into_owned))
            .unwrap_or_default();
        let call = self.call_of(params);
        let payload = notification("notifications/message", &super::questions::without_ours(params));
        match call {
            Some(exchange) => {
                if self.wants_level(&exchange.seat().sid, &level) {
                    exchange.tell(vec![payload]);
                }
            }
            None => self.tell_sessions(&payload, |sid| self.wants_level(sid, &level)),
        }
    }

    /// Progress of the host: its token is the key of the exchange it belongs to.
    pub(super) fn relay_progress(&self, params: &Bytes) {
        let Some(params) = std::str::from_utf8(params).ok().and_then(RawObject::parse) else { return };
        let token = params.get("progressToken").and_then(string);
        let exchange = token.and_then(|token| self.exchanges.borrow().get(&*token).cloned());
        let Some((exchange, progress)) = exchange.zip(params.get("progress")) else { return };
        let Ok(value) = progress.get().parse::<f64>() else { return };
        let mut members = String::new();
        for (key, value) in &params.members {
            let is_known = ["progressToken", "progress", "_meta"].iter().any(|own| key_is(key, own));
            if !is_known && value.get() != "null" {
                members.push_str(&format!(",{}:{}", key.get(), value.get()));
            }
        }
        exchange.tell_progress(value, progress.get(), &members);
    }

    /// The operator is being asked: the caller's stream says so (contract 4.3).
    pub(super) fn tell_awaiting_approval(&self, call_id: &str) {
        let Some(exchange) = self.exchanges.borrow().get(call_id).cloned() else { return };
        if self.wants_level(&exchange.seat().sid, "notice") {
            let params = r#"{"level":"notice","logger":"a2mcp","data":"awaiting approval"}"#;
            exchange
                .tell(vec![notification("notifications/message", &Bytes::from_static(params.as_bytes()))]);
        }
        if !exchange.has_progress() {
            exchange.tell_progress(0.0, "0", r#","message":"awaiting approval""#);
        }
    }

    /// Any other notification of the host.
    pub(super) fn relay_notification(&self, method: &str, params: &Bytes) {
        if method == "notifications/resources/updated" {
            let uri = uri_of(std::str::from_utf8(params).ok());
            let sids = uri.map(|uri| self.subscribers(&uri)).unwrap_or_default();
            let payload = notification(method, &super::questions::without_ours(params));
            self.tell_sessions(&payload, |sid| sids.iter().any(|subscribed| subscribed == sid));
        } else if method == "notifications/cancelled" {
            self.host_cancels(params);
        } else if method.ends_with("/list_changed") {
            self.tell_list_changed(method);
        } else {
            let payload = notification(method, &super::questions::without_ours(params));
            match self.call_of(params) {
                Some(exchange) => exchange.tell(vec![payload]),
                None => self.tell_sessions(&payload, |_| true),
            }
        }
    }
}

pub(super) fn uri_of(params: Option<&str>) -> Option<String> {
    let params = RawObject::parse(params?)?;
    string(params.get("uri")?).map(std::borrow::Cow::into_owned)
}

fn relay_error(message: &str) -> Outcome {
    Outcome::RelayedError(format!(r#"{{"code":-32000,"message":{}}}"#, quote(message)).into())
}

fn notification(method: &str, params: &Bytes) -> Bytes {
    let params = std::str::from_utf8(params).unwrap_or("{}");
    format!(r#"{{"jsonrpc":"2.0","method":{},"params":{params}}}"#, quote(method)).into()
}

/// A caller's parameters for the host: the progress token becomes the exchange's key, `a2mcp/*` goes,
/// and the host is told who asks.
fn for_host(params: Option<&str>, key: &str, caller: &Caller) -> (String, Option<Bytes>) {
    let object = params.and_then(RawObject::parse).unwrap_or_default();
    let mut token = None;
    let mut json = String::from("{");
    for (member, value) in &object.members {
        if !key_is(member, "_meta") {
            json.push_str(&format!("{}:{},", member.get(), value.get()));
        }
    }
    json.push_str(&format!(
        r#""_meta":{{"progressToken":"{key}","a2mcp/call":{{"callId":"{key}"}},"a2mcp/client":{{"sid":"{}","name":{}}}"#,
        caller.sid,
        quote(&caller.client_name)
    ));
    let meta = object.get("_meta").and_then(|meta| RawObject::parse(meta.get())).unwrap_or_default();
    for (member, value) in &meta.members {
        if key_is(member, "progressToken") {
            token = Some(Bytes::copy_from_slice(value.get().as_bytes()));
        } else if !string(member).is_some_and(|member| member.starts_with("a2mcp/")) {
            json.push_str(&format!(",{}:{}", member.get(), value.get()));
        }
    }
    json.push_str("}}");
    (json, token)
}
