//! The typed `bridge/*` messages of contract 17. Unknown fields are ignored; payloads that only
//! pass through stay raw.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// The frame protocol this build speaks.
pub const PROTOCOL: u32 = 1;

/// JSON-RPC error codes of a refused hello.
pub mod code {
    /// The config was refused; the message names file, field and expectation.
    pub const CONFIG_REFUSED: i32 = -32001;
    /// The peer speaks another frame protocol.
    pub const PROTOCOL_NOT_SPOKEN: i32 = -32002;
    /// The port of a respawned sidecar is held by somebody else.
    pub const PORT_BUSY: i32 = -32003;
    /// The answer to a `tools/call` that may have run to its end or not: what ran it is gone.
    pub const OUTCOME_UNKNOWN: i32 = -32004;
    /// Any other failure of this side.
    pub const FAILED: i32 = -32000;
    /// The method is not known.
    pub const METHOD_NOT_FOUND: i32 = -32601;
    /// The parameters do not fit the method.
    pub const INVALID_PARAMS: i32 = -32602;
}

/// `bridge/hello`: the first frame of a sidecar's life, shim → sidecar.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hello {
    /// See [`PROTOCOL`].
    pub protocol: u32,
    /// Random, chosen once per host process.
    pub instance: String,
    /// What the host can do beyond tools, e.g. `hostLlm`, `approvals`.
    #[serde(default)]
    pub features: Vec<String>,
    /// MCP ServerCapabilities of the host, verbatim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Box<RawValue>>,
    /// The host's instructions to MCP clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions: Option<String>,
    /// The host's title.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// Who the host is.
    pub host: HostInfo,
    /// The port the host was told to have, before any in the config; any free one when it is busy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Present from the second sidecar of a host process on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume: Option<Resume>,
    /// Calls of an earlier sidecar whose results were not acknowledged.
    #[serde(default)]
    pub in_flight: Vec<InFlight>,
}

/// The host's identity.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HostInfo {
    /// For people, e.g. `omp`.
    pub name: String,
    /// The host's version.
    #[serde(default)]
    pub version: String,
    /// Process id of the host.
    pub pid: u32,
    /// Field 22 of `/proc/<pid>/stat`; number or string.
    #[serde(default, deserialize_with = "start_time", skip_serializing_if = "Option::is_none")]
    pub start_time: Option<u64>,
    /// The host's working directory.
    #[serde(default)]
    pub cwd: String,
    /// The host's home directory.
    #[serde(default)]
    pub home: String,
}

fn start_time<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Number(u64),
        Text(String),
    }
    Ok(match Option::<Either>::deserialize(deserializer)? {
        None => None,
        Some(Either::Number(ticks)) => Some(ticks),
        Some(Either::Text(text)) => text.parse().ok(),
    })
}

/// What a respawned sidecar must keep.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Resume {
    /// The port the endpoint has.
    pub port: u16,
}

/// A call of an earlier sidecar.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InFlight {
    /// The earlier sidecar's call id.
    pub call_id: String,
    /// The tool's name.
    #[serde(default)]
    pub tool: String,
    /// Where the call stands.
    pub state: InFlightState,
    /// When the shim began it: RFC 3339 or milliseconds, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Box<RawValue>>,
    /// The earlier sidecar's own memory of the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Box<RawValue>>,
}

/// See [`InFlight`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InFlightState {
    /// The tool runs.
    Running,
    /// Its result follows as `bridge/result`.
    Finished,
    /// It was cancelled.
    Cancelled,
    /// It ended, its result was dropped for lack of room.
    Dropped,
}

/// The answer to `bridge/hello`, once the endpoint listens.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HelloResult {
    /// See [`PROTOCOL`].
    pub protocol: u32,
    /// The sidecar's version.
    pub version: String,
    /// The sidecar's process id.
    pub pid: u32,
    /// The endpoint, e.g. `http://127.0.0.1:41234/`.
    pub url: String,
    /// The endpoint's port.
    pub port: u16,
    /// The token's first six characters.
    pub token_prefix: String,
    /// What this sidecar can do beyond the table of contract 17.
    pub features: Vec<String>,
}

/// `bridge/result`: the end of a call from before a restart, shim → sidecar.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CallResult<'a> {
    /// The call's id.
    pub call_id: String,
    /// The MCP result, verbatim.
    #[serde(borrow, default)]
    pub result: Option<&'a RawValue>,
    /// Or the error.
    #[serde(borrow, default)]
    pub error: Option<&'a RawValue>,
}

/// `bridge/stop`, shim → sidecar.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stop {
    /// How long calls in flight may still take, in milliseconds.
    #[serde(default)]
    pub grace_ms: u64,
}

/// `bridge/state`, shim → sidecar, on change.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    /// Whether the host has a live Main session.
    #[serde(default)]
    pub main: bool,
    /// The switch on the host's model requests; absent when the host has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_llm: Option<HostLlm>,
    /// The host's model requests that were refused since it started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub denied: Option<u64>,
    /// Calls that wait for the operator's approval.
    #[serde(default)]
    pub approvals: Vec<Approval>,
    /// The server behind a host that only wraps one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<Server>,
}

/// A wrapped server, as its host knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Server {
    /// `running`, `starting` or `failed`.
    pub state: String,
    /// The process id of the guard around what was started; absent while nothing runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// How often it was started again.
    #[serde(default)]
    pub restarts: u64,
    /// Lines of its stdout that were no messages: blank ones, log lines, lines over the limit.
    #[serde(default)]
    pub skipped_lines: u64,
    /// Why it ended the last time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Why its tools cannot be listed; absent when they can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub list_error: Option<String>,
}

/// Where the switch on the host's own model requests stands (contract 8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HostLlm {
    /// They are refused.
    Armed,
    /// They go on: a deny was asked for and could not be put on.
    Refused,
    /// They go on.
    Allow,
    /// Only the tripwire on fetch refuses them.
    Degraded,
    /// A word of a later shim.
    #[serde(other)]
    Unknown,
}

/// `bridge/log`, shim → sidecar: a line for the log.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LogLine {
    /// The line.
    pub text: String,
}

/// `bridge/hostLlmRefused`, shim → sidecar: a deny that was on could not be put on a new session.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HostLlmRefused {
    /// Why.
    pub error: String,
}

/// One call that waits for an approval.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Approval {
    /// The call's id.
    pub call_id: String,
    /// The tool's name.
    #[serde(default)]
    pub tool: String,
}

/// `bridge/command`, shim → sidecar: what the operator typed after `/a2mcp`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Command {
    /// The words.
    #[serde(default)]
    pub argv: Vec<String>,
}

/// The answer to `bridge/command`, and `bridge/notify`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Notice {
    /// What to show.
    pub text: String,
    /// How to show it.
    pub level: Level,
}

/// See [`Notice`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Plain news.
    Info,
    /// Something to look at.
    Warning,
    /// Something that failed.
    Error,
}

/// `bridge/goodbye`: the last frame of a graceful end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Goodbye {
    /// Why.
    pub reason: GoodbyeReason,
}

/// See [`Goodbye`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GoodbyeReason {
    /// Not to be retried.
    Stop,
    /// Start the next one.
    Restart,
    /// The host is going away.
    Host,
}

/// A JSON-RPC error object.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RpcError {
    /// The code.
    #[serde(default)]
    pub code: i64,
    /// What happened, for people.
    #[serde(default)]
    pub message: String,
}
