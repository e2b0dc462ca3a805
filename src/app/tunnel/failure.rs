//! Why there is no tunnel, or why it was lost: a name for each reason, with what to do about it.

use std::time::Duration;

use crate::keeper::wire::Exit;
use crate::text::clean;

/// Longest piece of a foreign text that is shown, in characters.
const WORDS: usize = 300;

/// A reason. Its text says what happened; [`Failure::advice`] what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Failure {
    /// There is no program to run; the text has its own advice.
    #[error("{0}")]
    NoProgram(String),
    /// The keeper could not start it.
    #[error("{0}")]
    NotStarted(String),
    /// There is no keeper to run it.
    #[error("there is no keeper to run it")]
    NoKeeper,
    /// It was there when it was looked for, and is not any more.
    #[error("binary vanished: {path} (sha256 {sha256})")]
    Vanished {
        /// Where it was.
        path: String,
        /// What it was.
        sha256: String,
    },
    /// A flag it does not know, and that matters.
    #[error("this cloudflared does not understand how it was started: {0}")]
    Usage(String),
    /// 429, 1015.
    #[error("Cloudflare gives this address no new quick tunnel for now (429, error 1015)")]
    RateLimited,
    /// Something that is no JSON; the text is its HTTP status, when known.
    #[error("Cloudflare's quick tunnel service did not answer with a tunnel but with a page ({0})")]
    Page(String),
    /// JSON without a tunnel in it.
    #[error("Cloudflare's quick tunnel service answered with an error instead of a tunnel")]
    NoTunnel,
    /// Its name is in no DNS.
    #[error("the name of Cloudflare's quick tunnel service cannot be resolved: {0}")]
    ServiceDns(String),
    /// No answer in time.
    #[error("Cloudflare's quick tunnel service did not answer in time")]
    ServiceTimeout,
    /// No connection to it.
    #[error("Cloudflare's quick tunnel service cannot be reached: {0}")]
    ServiceUnreachable(String),
    /// No name came.
    #[error("no host name within {} s", .0.as_secs())]
    NoName(Duration),
    /// The edge was never reached.
    #[error("no connection to Cloudflare's edge within {} s{}", .0.as_secs(), because(.1))]
    NotConnected(Duration, Option<Box<Failure>>),
    /// No way to the edge.
    #[error("Cloudflare's edge cannot be reached: {0}")]
    EdgeUnreachable(String),
    /// The edge hung up.
    #[error("Cloudflare's edge closed the connection")]
    EdgeClosed,
    /// The edge does not take it.
    #[error("Cloudflare's edge refused the tunnel: {0}")]
    Refused(String),
    /// Gone on the other side.
    #[error("Cloudflare has deleted the tunnel")]
    Deleted,
    /// The link says it is up and carries nothing.
    #[error("nothing comes through the tunnel any more ({0})")]
    Silent(String),
    /// The link stays down while Cloudflare can be reached.
    #[error("the link to Cloudflare's edge has been down for {} min", .0.as_secs() / 60)]
    Down(Duration),
    /// It has ended, for a reason with no name.
    #[error("cloudflared {}{}", ended(*.0), said(.1))]
    Ended(Exit, String),
    /// Its keeper has died, and it with it.
    #[error("the keeper that ran it has died")]
    KeeperLost,
    /// It is started no more.
    #[error("it ended five times in 30 s, the last time because: {0}")]
    TooOften(Box<Failure>),
}

impl Failure {
    /// What a person can do about it.
    pub(super) fn advice(&self) -> Option<&'static str> {
        Some(match self {
            Self::NoProgram(_) => return None,
            Self::NotStarted(_) => {
                "look whether that file is a cloudflared for this machine (`cloudflared --version`)"
            }
            Self::NoKeeper => "see `a2mcp logs`; `a2mcp restart` tries to start one",
            Self::Vanished { .. } => {
                "an antivirus program may have removed it: allow it there, or name another cloudflared in the config \
                 (`xfer.cloudflared`); it is looked for again when the tunnel is opened again"
            }
            Self::Usage(_) => {
                "use a newer cloudflared, or the pinned one: remove `xfer.cloudflared` from the config"
            }
            Self::RateLimited => {
                "wait a few minutes before opening it again; each try makes the wait longer. Until then: \
                 an SSH port forward to the bridge's port"
            }
            Self::Page(_) => {
                "a proxy or a sign-in page may stand between here and Cloudflare, or the service has a \
                 fault: open https://api.trycloudflare.com in a browser, try again later"
            }
            Self::NoTunnel => "the service has a fault or refuses this address: try again later",
            Self::ServiceDns(_) => "look at this machine's network and DNS; cloudflared does not use a proxy",
            Self::ServiceTimeout | Self::ServiceUnreachable(_) => {
                "look at this machine's network: cloudflared connects to api.trycloudflare.com:443 directly, \
                 HTTPS_PROXY does not help it"
            }
            Self::NoName(_) => {
                "look at this machine's network and DNS; `a2mcp logs` has cloudflared's last words"
            }
            Self::NotConnected(_, Some(cause)) if cause.advice().is_some() => return cause.advice(),
            Self::NotConnected(..) | Self::EdgeUnreachable(_) | Self::EdgeClosed | Self::Down(_) => {
                "a firewall may be in the way: cloudflared needs port 7844 outbound, UDP or TCP, to Cloudflare"
            }
            Self::Refused(_) => "open it again: a new tunnel gets a new name",
            Self::Deleted | Self::Silent(_) => "open it again; the new tunnel has another name",
            Self::Ended(..) => "`a2mcp logs` may say more; open it again",
            Self::KeeperLost => "open it again",
            Self::TooOften(cause) => return cause.advice(),
        })
    }

    /// Reason and advice in one line.
    pub(super) fn with_advice(&self) -> String {
        match self.advice() {
            Some(advice) => format!("{self}; {advice}"),
            None => self.to_string(),
        }
    }

    /// Whether another try makes things worse for a while.
    pub(super) fn is_rate_limit(&self) -> bool {
        matches!(self, Self::RateLimited)
    }
}

/// A foreign text as a failure may show it.
pub(super) fn words(text: &str) -> String {
    clean(text.trim(), WORDS).into_owned()
}

fn because(cause: &Option<Box<Failure>>) -> String {
    cause.as_ref().map_or_else(String::new, |cause| format!(": {cause}"))
}

fn ended(exit: Exit) -> String {
    match exit {
        Exit::Code(code) => format!("ended with exit code {code}"),
        Exit::Signal(signal) => format!("was ended by signal {signal}"),
    }
}

fn said(last: &str) -> String {
    if last.is_empty() { String::new() } else { format!(": {last}") }
}
