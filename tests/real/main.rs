//! Real hosts and real clients.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../support/mod.rs"]
mod support;

mod parts;

mod conformance;
