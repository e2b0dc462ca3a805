//! What a sidecar says of itself, and how that looks on one screen. Everything is asked for at the
//! moment; what is not known is shown as unknown.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::frame::messages::{self, Server};
use crate::text::clean;

/// A sidecar's own account.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Its version.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// Its endpoint.
    pub url: String,
    /// Its endpoint's port.
    pub port: u16,
    /// The token's first six characters.
    pub token_prefix: String,
    /// Its agent directory.
    pub agent_dir: String,
    /// The config file it reads.
    #[serde(default)]
    pub config_file: String,
    /// Since when it runs, in milliseconds.
    pub uptime_ms: u64,
    /// `ready`, or why not.
    pub health: String,
    /// New calls are refused by the operator.
    pub paused: bool,
    /// The host.
    pub host: Host,
    /// The companion that holds the listening socket; absent when there is none.
    #[serde(default)]
    pub keeper: Option<Keeper>,
    /// What is shared; absent when nothing is.
    #[serde(default)]
    pub share: Option<Share>,
    /// The operator's tunnel.
    #[serde(default)]
    pub tunnel: Option<Tunnel>,
    /// Tools on offer; absent before the first list came.
    pub tools: Option<usize>,
    /// Tool names that at least one known client refuses.
    #[serde(default)]
    pub odd_names: Vec<String>,
    /// The live sessions.
    pub sessions: Vec<Session>,
    /// The calls in flight.
    pub calls: Vec<Call>,
    /// Calls that ended since the start.
    pub served: u64,
    /// Where calls are recorded.
    pub audit_file: String,
    /// Audit records that could not be written.
    pub audit_failures: u64,
    /// Requests without the right token.
    pub unauthorized: u64,
    /// Frames of the host that were no messages.
    pub bad_frames: u64,
    /// Resident memory in bytes.
    pub resident_bytes: Option<u64>,
    /// What only acts at the host's next start.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// The host, as the sidecar knows it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Host {
    /// For people.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// Whether it has a live Main session; absent when it has not said.
    pub main: Option<bool>,
    /// The switch on its own model requests; absent when it has none or has not said.
    #[serde(default)]
    pub llm: Option<HostLlm>,
    /// Round trip of the last ping, in milliseconds.
    pub lag_ms: Option<u64>,
    /// When its last byte came, in milliseconds.
    pub heard_ago_ms: u64,
    /// The server behind a host that only wraps one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<Server>,
}

/// The switch on the host's own model requests.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HostLlm {
    /// Where it stands.
    pub state: messages::HostLlm,
    /// Requests refused since the host started.
    pub denied: u64,
}

/// The keeper, as the sidecar knows it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Keeper {
    /// Its process id.
    pub pid: u32,
    /// Its version: it goes on with the code it was started with.
    pub version: String,
    /// Why it is of limited use.
    pub note: Option<String>,
    /// Since when it runs, in milliseconds; absent when it does not answer.
    pub uptime_ms: Option<u64>,
    /// What it runs, and what ended lately; absent when it does not answer.
    pub children: Option<Vec<Child>>,
}

/// A child of the keeper.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Child {
    /// What it is for.
    pub purpose: String,
    /// Its process id.
    pub pid: u32,
    /// Since when it runs or ran, in milliseconds.
    pub age_ms: u64,
    /// `running`, or how it ended.
    pub state: String,
}

/// What `/xfer/` serves.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// The shared file or folder.
    pub path: String,
    /// The file server's own port.
    pub port: u16,
    /// When it ends.
    pub expires_at: String,
    /// In how many milliseconds.
    pub left_ms: u64,
    /// Requests in flight.
    pub transfers: usize,
    /// Cut uploads that can be continued.
    pub cut_uploads: usize,
    /// `serving`, or why not.
    pub state: String,
}

/// The tunnel.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Tunnel {
    /// `closed`, `opening`, `open`, `open, not verified` or `failed`.
    pub state: String,
    /// Where it stands while it opens; why it is not verified; why it failed.
    pub why: Option<String>,
    /// What to do about that.
    pub advice: Option<String>,
    /// The public URL; absent unless it is open.
    pub url: Option<String>,
    /// The outcome of an opening or a probe is still to come.
    pub pending: bool,
    /// What cloudflared speaks with Cloudflare's edge.
    pub protocol: Option<String>,
    /// QUIC did not get out, so it is HTTP/2.
    pub udp_blocked: bool,
    /// Since when it is open, in milliseconds.
    pub open_ms: Option<u64>,
    /// When a probe last came through, in milliseconds.
    pub verified_ago_ms: Option<u64>,
    /// Requests under way through it.
    pub in_flight: u64,
    /// Most there were at a time.
    pub peak_in_flight: u64,
    /// The program that runs it.
    pub program: Option<String>,
}

/// One session.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Session {
    /// The id's first eight characters: the whole one is a capability.
    pub id: String,
    /// The client's name and version.
    pub client: String,
    /// The protocol it speaks.
    pub protocol: String,
    /// When its last request came, in milliseconds.
    pub seen_ago_ms: u64,
}

/// One call in flight.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Call {
    /// The call id.
    pub id: String,
    /// The tool.
    pub tool: String,
    /// Since when, in milliseconds.
    pub age_ms: u64,
    /// `waiting`, `running` or `awaiting approval`.
    pub phase: String,
    /// The session's first eight characters.
    pub session: String,
    /// The client's name; empty when the session has ended.
    pub client: String,
}

/// The screen.
pub fn render(status: &Status) -> String {
    let mut out = String::new();
    let mut line = |label: &str, text: String| {
        let _ = writeln!(out, "{label:<10}{text}");
    };
    line(
        "endpoint",
        format!("{} · {} · token {}…", status.url, health(status), clean(&status.token_prefix, 6)),
    );
    let main = match status.host.main {
        Some(true) => "main session live",
        Some(false) => "no main session",
        None => "main session unknown",
    };
    let lag = status.host.lag_ms.map_or_else(|| "lag unknown".into(), |lag| format!("lag {lag} ms"));
    line(
        "host",
        format!(
            "{} {} · pid {} · {main} · {lag} · heard {} ago",
            clean(&status.host.name, 40),
            clean(&status.host.version, 20),
            status.host.pid,
            age(status.host.heard_ago_ms)
        ),
    );
    if let Some(server) = &status.host.server {
        let pid = server.pid.map(|pid| format!(" · guard pid {pid}")).unwrap_or_default();
        let unlisted = server.list_error.as_ref();
        let unlisted = unlisted.map(|error| format!(" · tools cannot be listed: {}", clean(error, 200)));
        let reason = server.reason.as_ref().map(|reason| format!(" · last end: {}", clean(reason, 200)));
        line(
            "server",
            format!(
                "{}{pid} · {} restart(s) · {} stdout line(s) skipped{}{}",
                clean(&server.state, 20),
                server.restarts,
                server.skipped_lines,
                unlisted.unwrap_or_default(),
                reason.unwrap_or_default()
            ),
        );
    }
    if let Some(llm) = &status.host.llm {
        line("inference", inference(llm));
    }
    let memory = status
        .resident_bytes
        .map_or_else(|| "memory unknown".into(), |bytes| format!("{:.1} MiB", bytes as f64 / 1_048_576.0));
    line(
        "sidecar",
        format!("a2mcp {} · pid {} · up {} · {memory}", status.version, status.pid, age(status.uptime_ms)),
    );
    match &status.keeper {
        None => line("keeper", "none: should the sidecar die, the port is closed for a moment".into()),
        Some(keeper) => {
            let up =
                keeper.uptime_ms.map_or_else(|| "does not answer".into(), |ms| format!("up {}", age(ms)));
            line("keeper", format!("a2mcp {} · pid {} · {up}", clean(&keeper.version, 20), keeper.pid));
            for child in keeper.children.iter().flatten() {
                let purpose = clean(&child.purpose, 40);
                line(
                    "",
                    format!(
                        "{purpose} · pid {} · {} · {}",
                        child.pid,
                        clean(&child.state, 60),
                        age(child.age_ms)
                    ),
                );
            }
            if let Some(note) = &keeper.note {
                line("note", clean(note, 300).into_owned());
            }
        }
    }
    if let Some(share) = &status.share {
        let cut = match share.cut_uploads {
            0 => String::new(),
            count => format!(" · {count} cut upload(s)"),
        };
        line(
            "share",
            format!(
                "{} · {} · {} in flight{cut} · ends in {}",
                clean(&share.path, 200),
                clean(&share.state, 200),
                share.transfers,
                age(share.left_ms)
            ),
        );
    }
    if let Some(tunnel) = &status.tunnel {
        line("tunnel", self::tunnel(tunnel));
    }
    line(
        "tools",
        status
            .tools
            .map_or_else(|| "unknown (the host has sent no list yet)".into(), |count| count.to_string()),
    );
    line("sessions", status.sessions.len().to_string());
    for session in &status.sessions {
        line(
            "",
            format!(
                "{}  {} · {} · seen {} ago",
                session.id,
                clean(&session.client, 60),
                session.protocol,
                age(session.seen_ago_ms)
            ),
        );
    }
    line("calls", format!("{} in flight · {} served", status.calls.len(), status.served));
    for call in &status.calls {
        let client = if call.client.is_empty() { "session ended".into() } else { clean(&call.client, 40) };
        line(
            "",
            format!(
                "{}  {} · {} · {} · {} ({client})",
                call.id,
                clean(&call.tool, 60),
                call.phase,
                age(call.age_ms),
                call.session
            ),
        );
    }
    line("audit", format!("{} · {} failed write(s)", clean(&status.audit_file, 200), status.audit_failures));
    if status.unauthorized > 0 || status.bad_frames > 0 {
        line("refused", format!("{} unauthorized · {} bad frame(s)", status.unauthorized, status.bad_frames));
    }
    if !status.odd_names.is_empty() {
        let names: Vec<_> = status.odd_names.iter().take(10).map(|name| clean(name, 40)).collect();
        line("note", format!("some clients refuse these tool names: {}", names.join(", ")));
    }
    for note in &status.notes {
        line("note", clean(note, 300).into_owned());
    }
    out.truncate(out.trim_end().len());
    out
}

/// The tunnel in one line.
pub fn tunnel(tunnel: &Tunnel) -> String {
    let mut parts: Vec<String> = tunnel.url.iter().map(|url| clean(url, 300).into_owned()).collect();
    let state = clean(&tunnel.state, 40);
    match (tunnel.state.as_str(), &tunnel.why) {
        ("failed", Some(why)) => {
            let advice = tunnel.advice.as_ref().map(|advice| format!("; {advice}")).unwrap_or_default();
            parts.push(clean(&format!("failed({why}){advice}"), 800).into_owned());
        }
        (_, Some(why)) => parts.push(format!("{state}: {}", clean(why, 300))),
        (_, None) => parts.push(state.into_owned()),
    }
    parts.extend(tunnel.verified_ago_ms.map(|ms| format!("verified {} ago", age(ms))));
    if let Some(protocol) = &tunnel.protocol {
        let blocked = if tunnel.udp_blocked { " (UDP port 7844 is blocked)" } else { "" };
        parts.push(format!("{}{blocked}", clean(protocol, 20)));
    }
    if let Some(ms) = tunnel.open_ms {
        parts.push(format!("{} in flight, {} at most", tunnel.in_flight, tunnel.peak_in_flight));
        parts.push(format!("up {}", age(ms)));
    }
    parts.join(" · ")
}

fn inference(llm: &HostLlm) -> String {
    match llm.state {
        messages::HostLlm::Armed => format!("host_llm=deny denied={}", llm.denied),
        messages::HostLlm::Degraded => "host_llm=deny (tripwire only)".into(),
        messages::HostLlm::Allow => "host_llm=allow".into(),
        messages::HostLlm::Refused => "host_llm=allow (deny was refused)".into(),
        messages::HostLlm::Unknown => "host_llm=unknown".into(),
    }
}

fn health(status: &Status) -> String {
    let health = clean(&status.health, 40).into_owned();
    if status.paused { format!("{health} · PAUSED by the operator") } else { health }
}

/// A duration as people say it.
pub fn age(ms: u64) -> String {
    match ms / 1000 {
        0 => format!("{ms} ms"),
        s @ 1..=119 => format!("{s} s"),
        s @ 120..=7199 => format!("{} min", s / 60),
        s @ 7200..=172_799 => format!("{} h", s / 3600),
        s => format!("{} days", s / 86_400),
    }
}
