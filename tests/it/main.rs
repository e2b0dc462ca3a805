//! The quick tests: real sidecar processes, real frames, real HTTP, all on loopback.
//!
//! One file per boundary or promise: `endpoint` (who may knock and in which order that is judged),
//! `host_llm` (the switch on the host's model), `messages` (JSON-RPC shapes, ids, byte fidelity), `sessions`, `catalogue`, `calls`, `frames`
//! (hostile ones), `life` (start, stop, death, ports), `audit`, `operate` (the command line), `load`
//! (limits and crowds), `calling` (`a2mcp call`), `keeper` (what outlives a sidecar), `install`
//! (getting dufs and cloudflared), `files` (the tools around a share), `schema` (the fixtures of `ipc-schema/`),
//! `shim` (the Rust shim against a scripted sidecar), `kills` and `kill_loop` (the sidecar dies at the
//! worst moments: one execution, one result), `streams`, `progress`, `cancel`, `relay`, `replay` and
//! `proxies` (what crosses on streams, and coming back), `cloudflared` (the stand-in against what was
//! observed), `tunnel` and `tunnel_life` (the operator's tunnel through it), `refhost` (the reference
//! host and `a2mcp demo` as processes), `wrap` and `wrap_ends` (a stdio server behind the endpoint; who
//! dies with whom).

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../support/mod.rs"]
mod support;

mod audit;
mod calling;
mod calls;
mod cancel;
mod catalogue;
mod cloudflared;
mod endpoint;
mod files;
mod frames;
mod handover;
mod host_llm;
mod install;
mod keeper;
mod kill_loop;
mod kills;
mod life;
mod load;
mod messages;
mod operate;
mod progress;
mod proxies;
mod refhost;
mod relay;
mod replay;
mod schema;
mod sessions;
mod shim;
mod stalls;
mod streams;
mod tunnel;
mod tunnel_life;
mod upgrade;
mod wrap;
mod wrap_ends;
