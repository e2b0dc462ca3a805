//! The host's questions to callers (sampling, elicitation, roots, whatever else their capabilities
//! name) and the way back of the answers (contract 17, "relayed as is").
//!
//! A question belongs to a call, or to the one session that can answer it. It goes out under an id of
//! ours, which no caller can guess into another session; it is answered by the caller's POST, or by
//! us with an error when the call ends, the session ends, or the caller stays away.

use std::rc::Rc;

use bytes::Bytes;
use tokio::time::{Duration, Instant};

use super::Core;
use super::exchange::Exchange;
use super::streams::{Kind, Stream};
use crate::frame::Message;
use crate::frame::envelope::text;
use crate::frame::messages::{RpcError, code};
use crate::frame::raw::RawObject;
use crate::mcp::session::Session;

/// How long a caller may be away before its host stops waiting for an answer.
const AWAY: Duration = Duration::from_secs(30);
/// Most questions that wait at a time.
const MAX_QUESTIONS: usize = 256;

/// One that waits.
pub(super) struct Question {
    /// The host's id for it, its own text.
    host_id: Bytes,
    sid: String,
    /// The call it belongs to.
    call: Option<String>,
    /// Where it was asked.
    stream: Rc<Stream>,
    method: String,
    /// The message as the caller gets it.
    payload: Vec<Bytes>,
}

impl Core {
    /// The host asks a caller.
    pub(super) fn ask_caller(self: &Rc<Self>, host_id: Bytes, method: &str, params: &Bytes) {
        if let Err(message) = self.try_ask_caller(&host_id, method, params) {
            tracing::info!(method, message, "a question of the host cannot be asked");
            self.answer_host(host_id, code::METHOD_NOT_FOUND, &message);
        }
    }

    fn try_ask_caller(self: &Rc<Self>, host_id: &Bytes, method: &str, params: &Bytes) -> Result<(), String> {
        if self.questions.borrow().len() >= MAX_QUESTIONS {
            return Err("too many questions wait for their answers".into());
        }
        let call = self.call_of(params);
        let (sid, stream) = match &call {
            Some(exchange) => {
                let seat = exchange.seat();
                if !seat.accepts_stream {
                    return Err("the caller takes no stream: it cannot be asked".into());
                }
                (seat.sid.clone(), seat.stream.clone())
            }
            None => self.only_session_for(method)?,
        };
        if !self.sessions.borrow().get(&sid).is_some_and(|session| declares(session, method)) {
            return Err(format!("the caller did not declare the capability for {method}"));
        }
        let id = format!("a2mcp-{}", uuid::Uuid::new_v4().simple());
        let text = format!(
            r#"{{"jsonrpc":"2.0","id":"{id}","method":{},"params":"#,
            crate::frame::raw::quote(method)
        );
        let payload = vec![text.into(), without_ours(params), Bytes::from_static(b"}")];
        let question = Question {
            host_id: host_id.clone(),
            sid,
            call: call.map(|call| call.key.clone()),
            stream: stream.clone(),
            method: method.to_owned(),
            payload: payload.clone(),
        };
        self.questions.borrow_mut().insert(id.clone(), question);
        stream.push(Kind::Question, payload);
        let core = self.clone();
        self.tasks.spawn_local(async move { core.watch_question(&id).await });
        Ok(())
    }

    /// A call's caller sent it again: what the call waits for is asked there, under the same id.
    pub(super) fn ask_again(&self, exchange: &Exchange) {
        let seat = exchange.seat();
        let can_answer = |method: &str| {
            let sessions = self.sessions.borrow();
            seat.accepts_stream && sessions.get(&seat.sid).is_some_and(|session| declares(session, method))
        };
        let mut unanswerable = Vec::new();
        for (id, question) in self.questions.borrow_mut().iter_mut() {
            if question.call.as_deref() != Some(&*exchange.key) {
                continue;
            }
            if can_answer(&question.method) {
                question.stream = seat.stream.clone();
                question.sid.clone_from(&seat.sid);
                seat.stream.push(Kind::Question, question.payload.clone());
            } else {
                unanswerable.push(id.clone());
            }
        }
        for id in unanswerable {
            self.drop_question(&id, "the caller sent the call again and cannot be asked any more");
        }
    }

    /// Without a call, a question goes to the only session that listens and can answer.
    fn only_session_for(&self, method: &str) -> Result<(String, Rc<Stream>), String> {
        let listeners = self.listeners.borrow();
        let sessions = self.sessions.borrow();
        let mut able = listeners.iter().filter_map(|(sid, streams)| {
            let stream = streams.iter().rev().find(|stream| stream.is_read())?;
            declares(sessions.get(sid)?, method).then(|| (sid.clone(), stream.clone()))
        });
        match (able.next(), able.next()) {
            (Some(only), None) => Ok(only),
            (None, _) => Err(format!("no caller listens that can answer {method}")),
            _ => Err(format!("several callers could answer {method}; the question names no call")),
        }
    }

    /// Ends a question whose caller stays away; what else happens on the stream meanwhile is no sign
    /// of the caller.
    async fn watch_question(self: Rc<Self>, id: &str) {
        let asked = || self.questions.borrow().get(id).map(|question| question.stream.clone());
        let mut away_since = None;
        while let Some(stream) = asked() {
            if stream.is_read() {
                away_since = None;
                let _ = tokio::time::timeout(AWAY, stream.change()).await;
                continue;
            }
            let since = *away_since.get_or_insert_with(Instant::now);
            let changed = tokio::time::timeout_at(since + AWAY, stream.change());
            if changed.await.is_err() && !stream.is_read() {
                self.drop_question(id, "the caller went away");
            }
        }
    }

    /// The host does not want an answer any more: the caller is told under the id it knows.
    pub(super) fn host_cancels(&self, params: &Bytes) {
        let Some(params) = std::str::from_utf8(params).ok().and_then(RawObject::parse) else { return };
        let Some(host_id) = params.get("requestId").map(|id| id.get()) else { return };
        let questions = self.questions.borrow();
        let found = questions.iter().find(|(_, question)| question.host_id == host_id);
        let Some(id) = found.map(|(id, _)| id.clone()) else { return };
        drop(questions);
        let Some(question) = self.questions.borrow_mut().remove(&id) else { return };
        let reason =
            params.get("reason").map(|text| format!(r#","reason":{}"#, text.get())).unwrap_or_default();
        let text = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":"{id}"{reason}}}}}"#
        );
        question.stream.push(Kind::Notification, vec![text.into()]);
    }

    /// A caller's answer; whether anybody waited for it.
    pub(super) fn caller_answers(&self, sid: &str, message: &Message) {
        let id = text(message.id.as_ref()).and_then(|id| serde_json::from_str::<String>(id).ok());
        let Some(id) = id else { return };
        let is_theirs = self.questions.borrow().get(&*id).is_some_and(|question| question.sid == sid);
        if !is_theirs {
            tracing::debug!("an answer that nobody waits for");
            return;
        }
        let Some(question) = self.questions.borrow_mut().remove(&*id) else { return };
        let (member, text) = match (message.result.clone(), message.error.clone()) {
            (_, Some(error)) => ("error", error),
            (result, None) => ("result", result.unwrap_or_else(|| Bytes::from_static(b"{}"))),
        };
        let link = self.link.clone();
        self.tasks.spawn_local(async move {
            let _ = link.answer_raw(&question.host_id, member, text).await;
        });
    }

    /// The questions of a call that has ended.
    pub(super) fn drop_questions_of(&self, call: &str, why: &str) {
        self.drop_questions(why, |question| question.call.as_deref() == Some(call));
    }

    /// The questions to a session that has ended.
    pub(super) fn drop_questions_to(&self, sid: &str) {
        self.drop_questions("the caller's session ended", |question| question.sid == sid);
    }

    fn drop_questions(&self, why: &str, wanted: impl Fn(&Question) -> bool) {
        let questions = self.questions.borrow();
        let ids: Vec<String> =
            questions.iter().filter(|(_, q)| wanted(q)).map(|(id, _)| id.clone()).collect();
        drop(questions);
        for id in ids {
            self.drop_question(&id, why);
        }
    }

    fn drop_question(&self, id: &str, why: &str) {
        if let Some(question) = self.questions.borrow_mut().remove(id) {
            self.answer_host(question.host_id, code::FAILED, why);
        }
    }

    fn answer_host(&self, id: Bytes, code: i32, message: &str) {
        let answer: Result<(), _> = Err(RpcError { code: code.into(), message: message.to_owned() });
        let link = self.link.clone();
        self.tasks.spawn_local(async move {
            let _ = link.answer(&id, &answer).await;
        });
    }

    /// The exchange that a message of the host names in its `_meta["a2mcp/call"]`.
    pub(super) fn call_of(&self, params: &Bytes) -> Option<Rc<Exchange>> {
        let text = std::str::from_utf8(params).ok()?;
        let meta = RawObject::parse(RawObject::parse(text)?.get("_meta")?.get())?;
        let call = RawObject::parse(meta.get("a2mcp/call")?.get())?;
        let call_id = crate::frame::raw::string(call.get("callId")?)?;
        self.exchanges.borrow().get(&*call_id).cloned()
    }
}

/// Whether a session declared the capability that a method's first word names.
fn declares(session: &Session, method: &str) -> bool {
    let capability = method.split('/').next().unwrap_or_default();
    RawObject::parse(&session.capabilities).is_some_and(|capabilities| {
        capabilities.get(capability).is_some_and(|value| value.get() != "null" && value.get() != "false")
    })
}

/// Parameters of the host without the part of `_meta` that is between shim and sidecar.
pub(super) fn without_ours(params: &Bytes) -> Bytes {
    let strip = || -> Option<String> {
        let object = RawObject::parse(std::str::from_utf8(params).ok()?)?;
        let meta = RawObject::parse(object.get("_meta")?.get())?;
        let kept: Vec<String> = meta
            .members
            .iter()
            .filter(|(key, _)| !crate::frame::raw::string(key).is_some_and(|key| key.starts_with("a2mcp/")))
            .map(|(key, value)| format!("{}:{}", key.get(), value.get()))
            .collect();
        let mut members: Vec<String> = Vec::new();
        for (key, value) in &object.members {
            if !crate::frame::raw::key_is(key, "_meta") {
                members.push(format!("{}:{}", key.get(), value.get()));
            } else if !kept.is_empty() {
                members.push(format!("\"_meta\":{{{}}}", kept.join(",")));
            }
        }
        Some(format!("{{{}}}", members.join(",")))
    };
    match strip() {
        Some(text) => text.into(),
        None if params.is_empty() => Bytes::from_static(b"{}"),
        None => params.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_between_shim_and_sidecar_stays_there() {
        let stripped = |text: &'static str| without_ours(&Bytes::from_static(text.as_bytes()));
        assert_eq!(
            stripped(r#"{"a":1.50,"_meta":{"a2mcp/call":{"callId":"c"}},"b":"\ud800"}"#),
            r#"{"a":1.50,"b":"\ud800"}"#
        );
        assert_eq!(stripped(r#"{"_meta":{"a2mcp/call":{},"x":1}}"#), r#"{"_meta":{"x":1}}"#);
        assert_eq!(stripped(r#"{ "a":1 }"#), r#"{ "a":1 }"#);
        assert_eq!(stripped(""), "{}");
    }
}
