//! a2mcp serves the live tools of a running coding agent (the *host*) to remote agents (*callers*)
//! as an MCP server over Streamable HTTP.
//!
//! ```text
//!  caller ──HTTP──▶ http ─▶ mcp ─▶ ledger ─▶ host link ══frames══▶ shim, inside the host's process
//!  operator ──local socket──▶ control ─▶ app
//!                                         └──private socket──▶ keeper (a process of its own)
//! ```
//!
//! The host loads a small shim; the shim spawns `a2mcp sidecar` and speaks length-prefixed JSON
//! frames with it over stdin and stdout. The sidecar is this crate. A crash here never touches the
//! host: the shim spawns the next one, which serves the same port, token and sessions.
//!
//! # The way of a call
//!
//! [`http`] judges route, `Host`, token and size; [`mcp`] judges the message's shape; the
//! [`ledger`] gives it a call id and remembers it; [`audit`] writes `start`; [`host`] sends the
//! frame. The result comes back the same way: ledger, audit `done`, response. One direction, and
//! no task in between that only forwards.
//!
//! # Where to find what
//!
//! | module | owns | deliberately does not |
//! | --- | --- | --- |
//! | [`cli`] | arguments, exit codes, what a terminal shows | know how a sidecar works inside |
//! | [`app`] | one sidecar's life: config, hello, bind, serve, stop; the only one that decides to exit | parse HTTP or JSON-RPC |
//! | [`http`] | connections, the order of checks, bodies | know JSON-RPC methods |
//! | [`control`] | the operator's local socket, both ends | decide what a verb does |
//! | [`keeper`] | the companion process that holds the listening socket and the children | accept a connection, know HTTP |
//! | [`host`] | the link to the shim: pending requests, catalogue, liveness; the only writer of stdout | know callers or HTTP |
//! | [`audit`] | the audit file: redaction, group commit, rotation; its only writer | decide what is audited |
//! | [`install`] | finding dufs and cloudflared, or fetching pinned builds of them | run them, audit |
//! | [`mcp`] | messages, sessions, catalogue rules | touch sockets or files |
//! | [`ledger`] | which calls run, for whom | do I/O or read a clock |
//! | [`frame`] | the codec and the typed `bridge/*` messages | do I/O |
//! | [`config`] | the config file: validation (pure) and the locked store | apply it |
//! | [`refhost`] | the host's side of the frames in Rust: supervises a sidecar, offers demo tools | share state with the sidecar |
//! | [`wrap`] | `a2mcp wrap`: a stdio MCP server as the host, its guard and its respawn | know callers or HTTP |
//! | [`outbound`] | a request to a server elsewhere, TLS and proxy included | follow redirects, keep time |
//! | [`state`] | the state file and the remembered port | decide what to keep |
//! | [`process`] | spawning, identity (pid and start time), death signals; the only spawner | know what it spawns |
//! | [`confine`] | giving up the rights to all files but those of a share (Landlock), then becoming the file server | decide what is confined |
//! | [`rundir`] | the private directory of the local sockets | say anything on them |
//! | [`supervise`] | when a child that died is started again (pure) | start it |
//! | [`signals`] | waiting for signals | decide what one means |
//! | `crash` | points where the tests let a debug build die | exist in a release build |
//! | [`text`] | making foreign text safe for terminals and logs | – |
//!
//! Layers point down only: `main → cli → app → {http, control, keeper, host, audit, install} → {mcp, ledger, frame,
//! config}`. The whole sidecar runs on one thread (a `current_thread` runtime with a `LocalSet`):
//! state has one owner and is reached through handles that never hold a borrow over an await.

pub mod app;
pub mod audit;
pub mod cli;
pub mod config;
pub mod confine;
pub mod control;
mod crash;
pub mod frame;
pub mod host;
pub mod http;
pub mod install;
pub mod keeper;
pub mod ledger;
pub mod mcp;
pub mod outbound;
pub mod process;
pub mod refhost;
pub mod rundir;
pub mod signals;
pub mod state;
pub mod supervise;
pub mod text;
pub mod wrap;
pub mod xfer;
