//! The config file `<agentDir>/a2mcp.json` (contract 13), the token (2) and the names of our files.
//!
//! [`Config::parse`] is pure and fail-closed: a field that is present but malformed refuses the whole
//! file and names file, field and expectation, never the value. Unknown fields warn. [`store`] reads
//! and writes the file under a lock; nothing here applies a setting or keeps one up to date.

mod env;
mod error;
mod fields;
mod paths;
mod proxy;
pub mod store;
mod token;

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

pub use env::Env;
pub use error::ConfigError;
pub(crate) use paths::follow_links;
pub use paths::{AgentDir, create_private_dir};
pub use proxy::{Proxy, Through};
pub use store::Loaded;
pub use token::Token;

use fields::{Fields, Reader};

/// A config file larger than this is refused unread.
pub const MAX_BYTES: usize = 1024 * 1024;

/// The validated settings. [`Config::default`] is what an empty object means.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The port to listen on; 0 = the one used last, else any free one.
    pub port: u16,
    /// The address to listen on: an IP literal without brackets, or a name.
    pub host: String,
    /// `host_llm: "deny"`: the host's own model requests are refused from its start.
    pub deny_inference: bool,
    /// Tool names that are neither listed nor callable.
    pub deny: Vec<String>,
    /// Adds `mcp__*` to [`Config::deny`].
    pub deny_mcp_tools: bool,
    /// Where dufs is: a path when it holds a slash, else a name to look up.
    pub xfer_dufs: String,
    /// Where cloudflared is, like [`Config::xfer_dufs`].
    pub xfer_cloudflared: String,
    /// False with `streaming: "off"`: every reply is `application/json`.
    pub streaming: bool,
    /// How long a call may stay silent before its reply becomes a stream.
    pub stream_after: Duration,
    /// How long the result of an orphaned call can still be reached; zero = not at all.
    pub replay_window: Duration,
    /// A closed socket cancels its call.
    pub cancel_on_disconnect: bool,
    /// Names that pass the `Host` and `Origin` checks besides the built-in ones; lower case.
    pub allowed_hosts: Vec<String>,
    /// The bearer token, when the file has one.
    pub token: Option<Token>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            port: 0,
            host: "127.0.0.1".into(),
            deny_inference: false,
            deny: Vec::new(),
            deny_mcp_tools: false,
            xfer_dufs: "dufs".into(),
            xfer_cloudflared: "cloudflared".into(),
            streaming: true,
            stream_after: Duration::from_millis(1000),
            replay_window: Duration::from_secs(30),
            cancel_on_disconnect: false,
            allowed_hosts: Vec::new(),
            token: None,
        }
    }
}

impl Config {
    /// Validates the bytes of `file`; the second value holds one warning per line for the operator.
    ///
    /// An empty file is refused: it is what a crash leaves of a real one, and taking it for `{}`
    /// would silently replace the token that somebody's remotes use.
    pub fn parse(bytes: &[u8], file: &Path) -> Result<(Config, Vec<String>), ConfigError> {
        let fields = Fields::parse(bytes, file)?;
        let mut config = Config::default();
        let mut warnings = Vec::new();
        for (name, value) in fields.iter() {
            let read = Reader::new(file, name, value);
            match name {
                "$schema" => {}
                "port" => config.port = read.number(0..=65535)? as u16,
                "host" => config.host = read.host()?,
                "token" => {
                    let text = read.string(Token::EXPECTATION)?;
                    config.token = Some(Token::parse(&text).ok_or(read.malformed(Token::EXPECTATION))?);
                }
                "host_llm" => config.deny_inference = read.choice(["allow", "deny"])? == 1,
                "deny" => config.deny = read.names()?,
                "denyMCPTools" => config.deny_mcp_tools = read.bool()?,
                "xfer" => {
                    let nested = read.object()?;
                    for (inner, value) in nested.iter() {
                        let full = format!("xfer.{inner}");
                        let read = Reader::new(file, &full, value);
                        match inner {
                            "dufs" => config.xfer_dufs = read.program()?,
                            "cloudflared" => config.xfer_cloudflared = read.program()?,
                            _ => warnings.push(fields::unknown(
                                file,
                                &full,
                                &["xfer.dufs", "xfer.cloudflared"],
                            )),
                        }
                    }
                }
                "streaming" => config.streaming = read.choice(["off", "auto"])? == 1,
                "streamAfterMs" => {
                    config.stream_after = Duration::from_millis(read.number(0..=600_000)?);
                }
                "replayWindowSeconds" => {
                    config.replay_window = Duration::from_secs(read.number(0..=86_400)?);
                }
                "cancelOnDisconnect" => config.cancel_on_disconnect = read.bool()?,
                "allowedHosts" => config.allowed_hosts = read.hosts()?,
                _ => warnings.push(fields::unknown(file, name, KNOWN)),
            }
        }
        if !is_loopback(&config.host) {
            warnings.push(format!(
                "{}: `host` {} is reachable from other machines over plain HTTP, token included; \
                 prefer 127.0.0.1 with an SSH port forward or the tunnel",
                error::shown(file),
                crate::text::clean(&config.host, 100),
            ));
        }
        Ok((config, warnings))
    }
}

const KNOWN: &[&str] = &[
    "port",
    "host",
    "token",
    "host_llm",
    "deny",
    "denyMCPTools",
    "xfer",
    "streaming",
    "streamAfterMs",
    "replayWindowSeconds",
    "cancelOnDisconnect",
    "allowedHosts",
];

/// True when `host` cannot be reached from another machine. A name other than `localhost` counts as
/// reachable: what it resolves to is not known here.
pub fn is_loopback(host: &str) -> bool {
    match host.parse::<IpAddr>() {
        Ok(IpAddr::V4(ip)) => ip.is_loopback(),
        Ok(IpAddr::V6(ip)) => ip.is_loopback() || ip.to_ipv4_mapped().is_some_and(|ip| ip.is_loopback()),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}

#[cfg(test)]
mod tests;
