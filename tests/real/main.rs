//! Real hosts and real clients: omp 18.2.3 headless with the installed shim, and the public SDKs.
//!
//! `tests/setup` installs what they need into `target/real-parts/`; a missing part is a failure with a
//! sentence, never a skip. One file per question: `serves` (what a remote caller gets from a live
//! session), `streams` (progress, cancelling), `approval`, `ends` (who dies with whom), `restarts` (the
//! sidecar dies, the host does not), `host_llm` (the switch on the host's own model requests),
//! `placeholder` (a host without a model), `operator` (`/a2mcp …`, install), `agents` (sub-agents and second
//! loads), `clients` (the SDKs, the command line, the printed script), `chain` (omp as the client of
//! omp), `conformance` (the official suite), `sdks` (what the SDKs make of streams), `wrap` (public
//! stdio servers behind `a2mcp wrap`). `omp`, `model`,
//! `parts` and `processes` are what they share. `files` (the route), `uploads`, `shares` (who dies with
//! whom), `confined` (links swapped in, limits), `transfers` (large, slow, cut) and `webdav` drive the real dufs, both versions, through `share`.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../support/mod.rs"]
mod support;

mod model;
mod omp;
mod parts;
mod processes;
mod share;

mod agents;
mod approval;
mod chain;
mod clients;
mod confined;
mod conformance;
mod ends;
mod files;
mod host_llm;
mod install;
mod operator;
mod placeholder;
mod reads;
mod restarts;
mod sdks;
mod serves;
mod shares;
mod streams;
mod transfers;
mod uploads;
mod webdav;
mod wrap;
