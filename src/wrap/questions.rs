//! The server's own requests (sampling, elicitation, roots) on their way to a caller.
//!
//! A stdio server has one client and says not whom it asks. A question is attributed when exactly one
//! session has requests that the server has not answered, cancelled ones included; otherwise it is answered
//! with an error: one caller's prompt never shows at another. It goes out on the newest request of that
//! session; should that one end first, on another of the same session. When the sidecar ends, it goes out
//! again under the same name, so that an answer to the first asking is the answer.

use std::rc::Rc;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::connection::{Addressee, Connection};
use super::params::question_for_sidecar;
use super::wrapped::Wrapped;
use crate::frame::messages::code;
use crate::frame::raw::{RawObject, string};
use crate::refhost::shim::Order;

/// Most questions that are open at a time.
const MAX_OPEN: usize = 256;
/// What we said we can do; the first words of the methods.
const KNOWN: [&str; 3] = ["sampling", "elicitation", "roots"];

impl Wrapped {
    pub(super) fn asked(
        self: &Rc<Self>,
        connection: &Rc<Connection>,
        id: Bytes,
        method: &str,
        params: Bytes,
    ) {
        if method == "ping" {
            return connection.answer(&id, "result", Bytes::from_static(b"{}"));
        }
        let is_known = method.split_once('/').is_some_and(|(word, _)| KNOWN.contains(&word));
        if !is_known {
            return connection.refuse(&id, code::METHOD_NOT_FOUND, &format!("method not found: {method}"));
        }
        if self.questions.borrow().len() >= MAX_OPEN {
            return connection.refuse(&id, code::FAILED, "too many questions wait for their answers");
        }
        let (wrapped, connection, method) = (self.clone(), connection.clone(), method.to_owned());
        let tag = self.next_tag.get() + 1;
        self.next_tag.set(tag);
        self.questions.borrow_mut().insert(id.clone(), tag);
        tokio::task::spawn_local(async move {
            let answer = wrapped.ask(&connection, tag, &id, &method, &params).await;
            // A question withdrawn meanwhile wants no answer.
            if wrapped.questions.borrow().get(&id) == Some(&tag) {
                wrapped.questions.borrow_mut().remove(&id);
                match answer {
                    Ok(result) => connection.answer(&id, "result", result),
                    Err((code, message)) => connection.refuse(&id, code, &message),
                }
            }
        });
    }

    async fn ask(
        &self,
        connection: &Rc<Connection>,
        tag: u64,
        id: &Bytes,
        method: &str,
        params: &Bytes,
    ) -> Result<Bytes, (i32, String)> {
        let failed = |message: &str| Err((code::FAILED, message.to_owned()));
        let mut asked_before: Option<String> = None;
        // The call it went out on last, and its name there.
        let mut named: Option<(String, uuid::Uuid)> = None;
        loop {
            let who = match connection.addressee() {
                Addressee::Waiting(who) => who,
                Addressee::Gone => {
                    return failed("the caller this question belongs to has given its call up");
                }
                Addressee::Unclear => {
                    return failed(
                        "it is not known which caller this question belongs to: not exactly one session has calls in flight, cancelled ones that you have not answered included",
                    );
                }
            };
            if asked_before.as_ref().is_some_and(|sid| *sid != who.sid) {
                return failed("the session this question belonged to has no call in flight any more");
            }
            let mut serving = self.serving.subscribe();
            if serving.wait_for(|serving| *serving).await.is_err() {
                return failed("the bridge is stopping");
            }
            // Withdrawn before it went out: then it must not.
            if self.questions.borrow().get(id) != Some(&tag) {
                return failed("the question was withdrawn");
            }
            // While the bridge was restarting the call may have ended.
            if !connection.has(&who.key) {
                asked_before = Some(who.sid);
                continue;
            }
            let question = match &named {
                Some((key, question)) if *key == who.key => *question,
                _ => named.insert((who.key.clone(), uuid::Uuid::new_v4())).1,
            };
            let (reply, answer) = oneshot::channel();
            let order = Order::Request {
                tag,
                method: method.to_owned(),
                params: question_for_sidecar(params, &who.key, question),
                reply,
            };
            if !self.order(order).await {
                return failed("the bridge is stopping");
            }
            let answer = answer.await;
            if self.questions.borrow().get(id) != Some(&tag) {
                return failed("the question was withdrawn");
            }
            match answer {
                Ok(Ok(result)) => return Ok(result),
                // The call it went out on ended first: that says nothing about the question.
                Ok(Err(_)) if !connection.has(&who.key) => {}
                Ok(Err(error)) => {
                    return Err((i32::try_from(error.code).unwrap_or(code::FAILED), error.message));
                }
                // The sidecar ended; the next one asks again.
                Err(_) => {}
            }
            asked_before = Some(who.sid);
        }
    }

    /// `notifications/cancelled` of the server.
    pub(super) fn withdraw(self: &Rc<Self>, params: &Bytes) {
        let Some(params) = std::str::from_utf8(params).ok().and_then(RawObject::parse) else { return };
        let Some(id) = params.get("requestId") else { return };
        let Some(tag) = self.questions.borrow_mut().remove(id.get().as_bytes()) else { return };
        let reason = params.get("reason").and_then(string).unwrap_or("withdrawn by the server".into());
        self.give(Order::CancelRequest { tag, reason: reason.into_owned() });
    }

    /// The server ended: nobody wants the answers to its questions.
    pub(super) fn withdraw_all(self: &Rc<Self>) {
        let open = std::mem::take(&mut *self.questions.borrow_mut());
        for tag in open.into_values() {
            self.give(Order::CancelRequest { tag, reason: "the server that asked has ended".to_owned() });
        }
    }
}
