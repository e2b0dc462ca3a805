//! What people, machines and the audit file read of the tunnel.

use std::time::{Duration, Instant};

use super::failure::Failure;
use super::machine::{Machine, Proof, State};
use super::start::Program;
use crate::control::status;

/// How the tunnel stands, as everybody but its driver sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Shown {
    /// `closed`, `opening`, `open`, `open, not verified` or `failed`; empty means closed.
    state: &'static str,
    /// Where it stands while it opens; why it is not verified; why it failed.
    pub why: Option<String>,
    advice: Option<&'static str>,
    /// The host name, from the moment it is known.
    pub name: Option<String>,
    /// Whether the outcome of an opening or a probe is still to come.
    pub is_pending: bool,
    protocol: Option<String>,
    fell_back: bool,
    since: Option<Instant>,
    verified: Option<Instant>,
    program: Option<String>,
    /// Requests under way through it.
    pub in_flight: u64,
    /// Most there were at a time.
    pub peak: u64,
}

/// The machine as it is shown.
pub(super) fn shown(machine: &Machine, program: Option<&Program>) -> Shown {
    let name = machine.name().map(str::to_owned);
    let about = program.map(|program| match &program.version {
        Some(version) => format!("{} ({version})", program.path.display()),
        None => program.path.display().to_string(),
    });
    let blank = Shown { name, program: about, ..Shown::default() };
    match machine.state() {
        State::Closed => Shown { state: "closed", program: None, ..blank },
        State::Opening(step) => Shown { state: "opening", why: Some(step), is_pending: true, ..blank },
        State::Failed(failure) => {
            Shown { state: "failed", why: Some(failure.to_string()), advice: failure.advice(), ..blank }
        }
        State::Open(up) => {
            let why = up.doubt();
            Shown {
                state: if why.is_some() { "open, not verified" } else { "open" },
                why,
                is_pending: !up.is_judged(),
                protocol: up.protocol.clone(),
                fell_back: up.fell_back,
                since: up.open_since,
                verified: match up.proof {
                    Proof::Verified(at) => Some(at),
                    _ => None,
                },
                ..blank
            }
        }
    }
}

impl Shown {
    /// The public URL, from `open…` on.
    pub fn url(&self) -> Option<String> {
        self.name.as_ref().filter(|_| self.is_open()).map(|name| format!("https://{name}"))
    }

    /// Whether it is open, verified or not.
    pub fn is_open(&self) -> bool {
        self.state.starts_with("open") && self.state != "opening"
    }

    /// Whether it could not be opened.
    pub fn has_failed(&self) -> bool {
        self.state == "failed"
    }

    /// Whether there is none, and none on the way.
    pub fn is_closed(&self) -> bool {
        matches!(self.state, "" | "closed")
    }

    /// For status and machines.
    pub fn status(&self) -> status::Tunnel {
        let ago = |at: Option<Instant>| at.map(|at| at.elapsed().as_millis() as u64);
        status::Tunnel {
            state: if self.state.is_empty() { "closed".into() } else { self.state.into() },
            why: self.why.clone(),
            advice: self.advice.map(str::to_owned),
            url: self.url().map(|url| url + "/"),
            pending: self.is_pending,
            protocol: self.protocol.clone(),
            udp_blocked: self.fell_back,
            open_ms: ago(self.since),
            verified_ago_ms: ago(self.verified),
            in_flight: self.in_flight,
            peak_in_flight: self.peak,
            program: self.program.clone(),
        }
    }
}

/// One sentence: what became reachable from the internet, with what.
pub fn opened(shown: &Shown, tools: Option<usize>) -> String {
    let url = shown.url().unwrap_or_default();
    let state = match &shown.why {
        None => "open".to_owned(),
        Some(why) => format!("open, not verified: {why}"),
    };
    let tools = tools.map_or_else(|| "all tools".into(), |count| format!("all {count} tools"));
    let way = if shown.fell_back { " (over HTTP/2: UDP port 7844 is blocked here)" } else { "" };
    format!(
        "the tunnel is {state}{way}. From the internet, whoever has the token now reaches {tools} of this bridge at \
         {url}/ and, while something is shared, its files at {url}/xfer/; `tunnel stop` closes it"
    )
}

pub(super) fn verified(shown: &Shown) -> String {
    format!("the tunnel is verified now: {}/ is reachable from the internet", shown.url().unwrap_or_default())
}

pub(super) fn reopening(why: &Failure) -> String {
    format!("the tunnel was lost: {why}. It is opened again, with another name")
}

/// It is not there, and will not be.
pub(super) fn failed(why: &Failure) -> String {
    format!("the tunnel was lost and could not be opened again: {}", why.with_advice())
}

pub(super) fn crowded() -> String {
    format!(
        "a2mcp: more than {} requests are under way through the tunnel; a quick tunnel carries 200 at a time and \
         refuses the rest (429). An SSH port forward has no such limit",
        super::crossing::CROWDED
    )
}

pub(super) fn wait(wait: Duration) -> String {
    let failure = Failure::RateLimited;
    let advice = failure.advice().unwrap_or_default();
    format!("{failure}; it is not asked again for {} s: {advice}", wait.as_secs().max(1))
}

/// One record of the audit file.
pub(super) struct Audited<'a> {
    pub(super) action: &'static str,
    pub(super) url: Option<&'a str>,
    pub(super) error: Option<&'a Failure>,
}

impl Audited<'_> {
    pub(super) fn args(&self, port: u16) -> String {
        let mut args = serde_json::json!({ "action": self.action });
        if let Some(name) = self.url {
            args["url"] = format!("https://{name}").into();
        }
        args["port"] = port.into();
        if let Some(error) = self.error {
            args["error"] = error.to_string().into();
        }
        args.to_string()
    }
}
