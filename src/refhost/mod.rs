//! The host's side of the frames, in Rust.
//!
//! [`shim`] starts a sidecar, serves it and starts the next when it dies; it works for any host
//! that implements [`tools::Tools`]. [`demo_tools`] are the tools of the reference host, [`host`]
//! is its process (`a2mcp reference-host`), [`demo`] is `a2mcp demo`, which runs one in a temporary
//! agent directory, [`announce`] says that it serves. `a2mcp wrap` uses the same shim ([`crate::wrap`]).
//! Shares no state with the sidecar: the two know each other by frames only.

pub mod announce;
mod bash;
mod canned;
pub mod demo;
pub mod demo_tools;
pub mod execution;
pub mod host;
pub mod launch;
mod life;
mod lines;
pub mod shim;
pub mod store;
pub mod supervise;
pub mod tools;
mod wire;

/// The signals that ask a host, or a demo, to end.
pub(crate) const END_SIGNALS: [i32; 3] =
    [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP];
