//! The only full proof that a tunnel works: a nonce fetched through its public name (contract 10),
//! out to Cloudflare and back to this very process. Also asks cloudflared's metrics port.

use std::cell::RefCell;
use std::time::Duration;

use http_body_util::{BodyExt as _, Limited};
use serde::Deserialize;
use tokio::time::timeout;

use super::log;
use crate::outbound::{Outbound, OutboundError, Url};
use crate::text::clean;

/// How long a probe may take.
const PROBE_TIME: Duration = Duration::from_secs(10);
/// How long a bare connection may take, when a probe got no answer.
const GREET_TIME: Duration = Duration::from_secs(5);
/// How long cloudflared may take to say how it is.
const METRICS_TIME: Duration = Duration::from_secs(2);
/// Longest answer that is read, in bytes.
const MAX_ANSWER: usize = 64 << 10;

/// What a probe has shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The answer of this process came back.
    Right,
    /// Nothing is shown: Cloudflare cannot be reached from here, or it carries the tunnel and has reasons
    /// of its own (too many requests, an origin that is just being replaced).
    Unclear(String),
    /// Cloudflare was reached, and nothing came through the tunnel.
    Wrong(String),
}

/// The nonce that is out now, and the answer to it.
#[derive(Default)]
pub(super) struct Nonce(RefCell<Option<(String, String)>>);

impl Nonce {
    /// The answer to `nonce`, while a probe of it runs.
    pub(super) fn answer(&self, nonce: &str) -> Option<String> {
        self.0.borrow().as_ref().filter(|(out, _)| out == nonce).map(|(_, answer)| answer.clone())
    }

    /// Fetches a new nonce through `name`.
    pub(super) async fn probe(&self, outbound: &Outbound, name: &str) -> Verdict {
        let random = || uuid::Uuid::new_v4().simple().to_string();
        let (nonce, answer) = (random(), random());
        self.0.replace(Some((nonce.clone(), answer.clone())));
        let Ok(url) = Url::parse(&format!("https://{name}/livez/{nonce}")) else {
            return Verdict::Unclear("its name makes no URL".into());
        };
        let verdict = timeout(PROBE_TIME, fetch(outbound, &url, &answer)).await;
        self.0.take();
        if let Ok(verdict) = verdict {
            return verdict;
        }
        // Silence in the tunnel, or on the way to it?
        match timeout(GREET_TIME, outbound.greet(&url)).await {
            Ok(Ok(())) => Verdict::Wrong(format!("no answer within {} s", PROBE_TIME.as_secs())),
            Ok(Err(error)) => Verdict::Unclear(format!("no way to it from this machine: {error}")),
            Err(_) => Verdict::Unclear("no way to it from this machine: no answer to a connection".into()),
        }
    }
}

async fn fetch(outbound: &Outbound, url: &Url, answer: &str) -> Verdict {
    let response = match outbound.get(url).await {
        Ok(answer) => answer,
        Err(OutboundError::Insecure { why, .. }) => {
            return Verdict::Unclear(format!(
                "somebody on the way re-signs TLS, or this machine's roots are old: {why}"
            ));
        }
        Err(error @ OutboundError::Unreachable { .. }) => {
            return Verdict::Unclear(format!("no way to it from this machine: {error}"));
        }
        Err(error @ OutboundError::NoAnswer { .. }) => return Verdict::Wrong(error.to_string()),
    };
    let status = response.response.status().as_u16();
    let body = Limited::new(response.response.into_body(), MAX_ANSWER).collect().await;
    judge(status, &body.map(|body| body.to_bytes()).unwrap_or_default(), answer)
}

/// What an answer of the public name shows.
fn judge(status: u16, body: &[u8], answer: &str) -> Verdict {
    match status {
        200 if body == answer.as_bytes() => Verdict::Right,
        429 => Verdict::Unclear("Cloudflare lets no more requests through for now (429)".into()),
        // cloudflared's own answer: the tunnel carries.
        502..=504 => Verdict::Unclear(format!("cloudflared cannot reach this bridge ({status})")),
        520..=530 => {
            let said = String::from_utf8_lossy(body);
            Verdict::Wrong(format!(
                "Cloudflare does not reach the tunnel ({status} {})",
                clean(said.trim(), 60)
            ))
        }
        200..=299 => Verdict::Wrong("something else answers under the public name".into()),
        _ => Verdict::Wrong(format!("the public name answers with status {status}")),
    }
}

/// What the metrics port says; `None` where it does not answer.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Metrics {
    /// The tunnel's host name.
    pub(super) name: Option<String>,
    /// Whether the edge is connected.
    pub(super) ready: Option<bool>,
}

/// Asks cloudflared how it is.
pub(super) async fn metrics(port: u16, wants_name: bool) -> Metrics {
    #[derive(Deserialize)]
    struct Quick {
        hostname: String,
    }
    let ready = ask(port, "ready").await.and_then(|(status, _)| match status {
        200 => Some(true),
        503 => Some(false),
        _ => None,
    });
    let quick = if wants_name { ask(port, "quicktunnel").await } else { None };
    let quick: Option<Quick> = quick.and_then(|(_, body)| serde_json::from_slice(&body).ok());
    Metrics { name: quick.and_then(|quick| log::name(&quick.hostname)), ready }
}

async fn ask(port: u16, what: &str) -> Option<(u16, bytes::Bytes)> {
    let asked = async {
        let url = Url::parse(&format!("http://127.0.0.1:{port}/{what}")).ok()?;
        let answer = Outbound::default().get(&url).await.ok()?;
        let status = answer.response.status().as_u16();
        let body = Limited::new(answer.response.into_body(), MAX_ANSWER).collect().await.ok()?;
        Some((status, body.to_bytes()))
    };
    timeout(METRICS_TIME, asked).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_shows_a_loss_counts_as_one() {
        assert_eq!(judge(200, b"abc", "abc"), Verdict::Right);
        for (status, body) in
            [(200, "abcd"), (204, ""), (403, ""), (404, "abc"), (524, ""), (530, "error code: 1033")]
        {
            assert!(matches!(judge(status, body.as_bytes(), "abc"), Verdict::Wrong(_)), "{status}");
        }
        // A crowd must not cost the tunnel that carries it.
        for status in [429, 502, 503, 504] {
            assert!(matches!(judge(status, b"", "abc"), Verdict::Unclear(_)), "{status}");
        }
    }

    #[test]
    fn a_nonce_is_answered_while_it_is_out() {
        let nonce = Nonce::default();
        assert_eq!(nonce.answer(""), None);
        nonce.0.replace(Some(("n".into(), "a".into())));
        assert_eq!((nonce.answer("n").as_deref(), nonce.answer("x")), (Some("a"), None));
    }
}
