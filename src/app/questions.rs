//! The host's questions to callers (sampling, elicitation, roots, whatever else their capabilities
//! name) and the way back of the answers (contract 17, "relayed as is").
//!
//! A question belongs to a call, or to the one session that can answer it. It goes out under an id of
//! ours, which no caller can guess into another session; it is answered by the caller's POST, or by
//! us with an error when the call ends, the session ends, or the caller stays away.
//!
//! A host that names its question (`questionId`) and asks it again after our restart finds it under the
//! same id: the answer to the first asking counts, even one that comes before the host asks again.

use std::collections::HashMap;
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
/// What begins the ids of our questions.
const PREFIX: &str = "a2mcp-";
/// For so long after a restart an answer may come before its question.
const EARLY: Duration = Duration::from_secs(10);
/// Most such answers, and their bytes.
const MAX_EARLY: usize = 64;
const MAX_EARLY_BYTES: usize = 8 << 20;

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

/// The answer of a caller: `result` or `error`, and its text.
type Answer = (&'static str, Bytes);

/// Answers to questions that an earlier sidecar asked and the host has not asked again yet, by session
/// and id: nobody answers for another, or stands in its way.
#[derive(Default)]
pub(super) struct Early(HashMap<(String, String), Answer>);

impl Early {
    fn has_room_for(&self, len: usize) -> bool {
        let kept: usize = self.0.values().map(|(_, text)| text.len()).sum();
        self.0.len() < MAX_EARLY && kept + len <= MAX_EARLY_BYTES
    }
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
        // A name that is in use is no name.
        let id = question_id(params).filter(|id| !self.questions.borrow().contains_key(id));
        let id = id.unwrap_or_else(|| id_of(uuid::Uuid::new_v4()));
        if let Some(answer) = self.early_answers.borrow_mut().0.remove(&(sid.clone(), id.clone())) {
            tracing::info!(method, "a question that an earlier sidecar asked is answered already");
            self.pass_answer(host_id.clone(), answer);
            return Ok(());
        }
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

    /// A caller's answer.
    pub(super) fn caller_answers(self: &Rc<Self>, sid: &str, message: &Message) {
        let id = text(message.id.as_ref()).and_then(|id| serde_json::from_str::<String>(id).ok());
        let Some(id) = id else { return };
        let answer = match (message.result.clone(), message.error.clone()) {
            (_, Some(error)) => ("error", error),
            (result, None) => ("result", result.unwrap_or_else(|| Bytes::from_static(b"{}"))),
        };
        let asked = self.questions.borrow().get(&*id).map(|question| question.sid == sid);
        match asked {
            Some(true) => {
                let Some(question) = self.questions.borrow_mut().remove(&*id) else { return };
                self.pass_answer(question.host_id, answer);
            }
            None if self.hello.resume.is_some() && id.starts_with(PREFIX) => {
                self.keep_early((sid.to_owned(), id), answer);
            }
            _ => tracing::debug!("an answer that nobody waits for"),
        }
    }

    fn pass_answer(&self, host_id: Bytes, (member, text): Answer) {
        let link = self.link.clone();
        self.tasks.spawn_local(async move {
            let _ = link.answer_raw(&host_id, member, text).await;
        });
    }

    /// Keeps an answer whose question may still come; the first one counts.
    fn keep_early(self: &Rc<Self>, key: (String, String), (member, text): Answer) {
        let age = self.started.elapsed();
        let mut early = self.early_answers.borrow_mut();
        if age >= EARLY || early.0.contains_key(&key) || !early.has_room_for(text.len()) {
            tracing::debug!("an answer that nobody waits for");
            return;
        }
        if early.0.is_empty() {
            let core = self.clone();
            self.tasks.spawn_local(async move {
                tokio::time::sleep(EARLY.saturating_sub(age)).await;
                core.early_answers.borrow_mut().0.clear();
            });
        }
        // A copy: what it is a part of may be far larger.
        early.0.insert(key, (member, Bytes::copy_from_slice(&text)));
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
        let call = call_meta(params)?;
        let call_id = crate::frame::raw::string(call.get("callId")?)?;
        self.exchanges.borrow().get(&*call_id).cloned()
    }
}

/// What a message of the host says in its `_meta["a2mcp/call"]`.
fn call_meta(params: &Bytes) -> Option<RawObject<'_>> {
    let text = std::str::from_utf8(params).ok()?;
    let meta = RawObject::parse(RawObject::parse(text)?.get("_meta")?.get())?;
    RawObject::parse(meta.get("a2mcp/call")?.get())
}

/// The id of the question that the host named.
fn question_id(params: &Bytes) -> Option<String> {
    let call = call_meta(params)?;
    let name = crate::frame::raw::string(call.get("questionId")?)?;
    uuid::Uuid::parse_str(&name).ok().map(id_of)
}

fn id_of(question: uuid::Uuid) -> String {
    format!("{PREFIX}{}", question.simple())
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
