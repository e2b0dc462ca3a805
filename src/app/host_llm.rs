//! The switch on the host's own model requests (contract 8): asks the host, which does it, and records
//! every switch in the audit. What a deny is made of is the shim's business.
//!
//! With `host_llm: "deny"` in the config the host is asked before the endpoint is bound
//! ([`deny_at_start`]); a respawned sidecar asks nothing.

use std::rc::Rc;

use bytes::Bytes;
use serde::Deserialize;
use tokio::sync::oneshot;

use super::Core;
use crate::audit::Record;
use crate::config::Config;
use crate::frame::messages::{Hello, Level};
use crate::frame::raw::quote;
use crate::host::Link;
use crate::http::Head;
use crate::text::clean;

/// What a host that can do it says in its hello.
const FEATURE: &str = "hostLlm";
/// How much of the host's reason goes to the log and the operator; the caller gets all of it.
const SHOWN: usize = 400;

/// How a `POST /host-llm` ends.
pub(super) enum Answer {
    /// No object with a boolean `enabled`.
    Malformed,
    /// The host does not offer it.
    NotOffered,
    /// The host's `{enabled, denied, degraded}`.
    Switched(Bytes),
    /// Why the host did not do it.
    Refused(String),
}

/// What became of the config's word at the host's start.
pub(super) enum Start {
    /// There was nothing to ask for.
    Unasked,
    /// The host denies.
    Armed,
    /// It does not, for this reason: its model requests go on.
    Refused(String),
}

/// Has the host deny from its start when the config says so. Waits as long as the host takes to have a
/// session.
pub(super) async fn deny_at_start(config: &Config, hello: &Hello, link: &Link) -> Start {
    if !config.deny_inference || hello.resume.is_some() {
        return Start::Unasked;
    }
    if !is_offered(hello) {
        return Start::Refused("this host cannot switch its model requests off".into());
    }
    match ask(link, false).await {
        Ok(_) => Start::Armed,
        Err(reason) => Start::Refused(reason),
    }
}

fn is_offered(hello: &Hello) -> bool {
    hello.features.iter().any(|feature| feature == FEATURE)
}

async fn ask(link: &Link, enabled: bool) -> Result<Bytes, String> {
    let params = format!(r#"{{"enabled":{enabled}}}"#);
    match link.request("bridge/hostLlm", vec![params.into()]).await {
        Ok(answer) => answer.into_result().map_err(|error| error.message),
        Err(error) => Err(error.to_string()),
    }
}

impl Core {
    /// `POST /host-llm`.
    pub(super) async fn switch_host_llm(self: Rc<Self>, head: &Head, body: &[u8]) -> Answer {
        let Some(enabled) = wanted(body) else { return Answer::Malformed };
        if !is_offered(&self.hello) {
            return Answer::NotOffered;
        }
        let sid = head.session.as_deref().and_then(|sid| {
            self.sessions.borrow_mut().touch(sid, super::now_ms()).map(|session| session.id.clone())
        });
        // Whoever asked may leave: the record is written all the same.
        let (done, waits) = oneshot::channel();
        let core = self.clone();
        self.tasks.spawn_local(async move {
            let switched = ask(&core.link, enabled).await;
            core.audit_switch(enabled, sid.as_deref(), switched.as_ref().err().map(String::as_str)).await;
            let _ = done.send(switched);
        });
        match waits.await {
            Ok(Ok(switched)) => Answer::Switched(switched),
            Ok(Err(reason)) => Answer::Refused(reason),
            Err(_) => Answer::Refused("the bridge is stopping".into()),
        }
    }

    /// Records the start's switch and tells the operator when it was refused.
    pub(super) async fn note_start(&self, start: &Start) {
        let refused = match start {
            Start::Unasked => return,
            Start::Armed => None,
            Start::Refused(reason) => Some(reason.as_str()),
        };
        self.audit_switch(false, None, refused).await;
        if let Some(reason) = refused {
            let reason = clean(reason, SHOWN);
            self.notify(
                Level::Warning,
                format!("a2mcp: host_llm \"deny\" of the config was refused, the host's model requests go on: {reason}"),
            );
        }
    }

    /// A session that came while a deny was on could not be denied: only the tripwire is left.
    pub(super) async fn host_llm_refused(&self, reason: &str) {
        tracing::warn!(reason = %clean(reason, SHOWN), "the deny of the host's model requests is degraded");
        self.audit_switch(false, None, Some(reason)).await;
    }

    async fn audit_switch(&self, enabled: bool, sid: Option<&str>, refused: Option<&str>) {
        let error = refused.map(|reason| format!(r#","error":{}"#, quote(reason))).unwrap_or_default();
        let args = format!(r#"{{"enabled":{enabled}{error}}}"#);
        self.audit.write(Record::action("host_llm", sid, &args, refused.is_some())).await;
    }
}

/// The body's `enabled`.
fn wanted(body: &[u8]) -> Option<bool> {
    #[derive(Deserialize)]
    struct Wanted {
        enabled: bool,
    }
    // An array would do for the struct.
    body.trim_ascii_start()
        .starts_with(b"{")
        .then(|| serde_json::from_slice::<Wanted>(body).ok())?
        .map(|it| it.enabled)
}
