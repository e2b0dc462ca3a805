//! What sessions want to hear of: log messages from some level on, subscribed resources. Kept with the
//! session, so both outlive the sidecar; the host hears what all of them want together: the lowest
//! level, the first and the last subscriber of a resource.

use std::rc::Rc;

use bytes::Bytes;

use super::Core;
use super::relay::uri_of;
use crate::frame::raw::{RawObject, string};

/// The levels of `logging/setLevel`, least severe first (RFC 5424).
const LEVELS: [&str; 8] = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"];

/// A level's rank; `None` for what is none.
fn rank(level: &str) -> Option<usize> {
    LEVELS.iter().position(|known| *known == level)
}

impl Core {
    /// `logging/setLevel`; whether there is such a level.
    pub(super) async fn set_level(self: &Rc<Self>, sid: &str, params: Option<&str>) -> bool {
        let level = params
            .and_then(RawObject::parse)
            .and_then(|params| string(params.get("level")?).map(std::borrow::Cow::into_owned))
            .filter(|level| rank(level).is_some());
        let Some(level) = level else { return false };
        self.sessions.borrow_mut().update(sid, |session| session.log_level = Some(level));
        self.tell_host_level();
        self.save().await;
        true
    }

    /// Whether a session wants messages of this level; what has no level reaches everybody.
    pub(super) fn wants_level(&self, sid: &str, level: &str) -> bool {
        let sessions = self.sessions.borrow();
        let wanted = sessions.get(sid).and_then(|session| rank(session.log_level.as_deref()?));
        rank(level).is_none_or(|level| level >= wanted.unwrap_or_default())
    }

    fn tell_host_level(&self) {
        let sessions = self.sessions.borrow();
        let levels = sessions.list().into_iter().filter_map(|session| rank(session.log_level.as_deref()?));
        // Without any level the host goes on as it does.
        let Some(lowest) = levels.min() else { return };
        if self.host_capability("logging").is_none() || self.host_level.replace(Some(lowest)) == Some(lowest)
        {
            return;
        }
        self.tell_host("logging/setLevel", format!(r#"{{"level":"{}"}}"#, LEVELS[lowest]));
    }

    /// `resources/subscribe` and `unsubscribe`; whether the host must hear of it.
    ///
    /// # Errors
    /// What is wrong with the request, for the caller.
    pub(super) async fn subscribe(
        self: &Rc<Self>,
        sid: &str,
        method: &str,
        params: Option<&str>,
    ) -> Result<bool, &'static str> {
        let uri = uri_of(params).ok_or("uri is missing")?;
        let is_for_host = if method.ends_with("/unsubscribe") {
            let was = self.sessions.borrow_mut().update(sid, |session| session.unsubscribe(&uri));
            was == Some(true)
                && self.subscribers(&uri).is_empty()
                && self.subscribed.borrow_mut().remove(&uri)
        } else {
            let added = self.sessions.borrow_mut().update(sid, |session| session.subscribe(&uri));
            added.unwrap_or(Ok(()))?;
            self.subscribed.borrow_mut().insert(uri)
        };
        self.save().await;
        Ok(is_for_host)
    }

    /// The host refused: nobody is subscribed, and the next one asks it again.
    pub(super) fn subscription_refused(&self, uri: &str) {
        self.subscribed.borrow_mut().remove(uri);
        for sid in self.subscribers(uri) {
            self.sessions.borrow_mut().update(&sid, |session| session.unsubscribe(uri));
        }
        self.save_wanted.notify_one();
    }

    /// The sessions that are subscribed.
    pub(super) fn subscribers(&self, uri: &str) -> Vec<String> {
        let sessions = self.sessions.borrow();
        let subscribed = |session: &&crate::mcp::session::Session| {
            session.subscriptions.iter().any(|subscribed| subscribed == uri)
        };
        sessions.list().into_iter().filter(subscribed).map(|session| session.id.clone()).collect()
    }

    /// A session has ended: the host hears of what nobody wants any more.
    pub(super) fn settle_wants(&self) {
        self.tell_host_level();
        let subscribed: Vec<String> = self.subscribed.borrow().iter().cloned().collect();
        for uri in subscribed {
            if self.subscribers(&uri).is_empty() {
                self.subscribed.borrow_mut().remove(&uri);
                self.tell_host("resources/unsubscribe", serde_json::json!({ "uri": uri }).to_string());
            }
        }
    }

    /// The start of a sidecar: sessions of an earlier one want what they wanted, and the host may be
    /// another one.
    pub(super) fn restore_wants(&self) {
        self.tell_host_level();
        if !self.host_offers("resources/subscribe") {
            return;
        }
        let sessions = self.sessions.borrow();
        let wanted = sessions.list().into_iter().flat_map(|session| session.subscriptions.iter().cloned());
        self.subscribed.borrow_mut().extend(wanted);
        for uri in &*self.subscribed.borrow() {
            self.tell_host("resources/subscribe", serde_json::json!({ "uri": uri }).to_string());
        }
    }

    /// A request whose answer changes nothing.
    fn tell_host(&self, method: &'static str, params: String) {
        let link = self.link.clone();
        self.tasks.spawn_local(async move {
            let _ = link.request(method, vec![Bytes::from(params)]).await;
        });
    }
}
