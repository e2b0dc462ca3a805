//! The parts of the file route `/xfer/` (contract 6) that know neither sessions nor the keeper: what a
//! path names ([`path`]), what a caller may do ([`rules`]), the folder an upload goes to ([`place`]),
//! whether an archive is whole ([`archive`]), the file server as a program ([`dufs`]) and as a peer
//! ([`upstream`]).
//!
//! dufs reads and writes all file contents; it lets whoever may upload copy over files and change them
//! in place, which callers may not, so every request is judged here first. When a share begins and ends
//! is [`crate::app`]'s.

pub mod archive;
pub mod dufs;
pub mod path;
pub mod place;
pub mod rules;
pub mod upstream;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Where the route begins.
pub const ROUTE: &str = "/xfer/";

/// What stays the same of a share while it lives; also what a later sidecar is told of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Terms {
    /// Random, eight hex digits.
    pub id: String,
    /// What is shared, canonical.
    pub path: PathBuf,
    /// It is one single file.
    pub is_file: bool,
    /// When it began, in milliseconds since the epoch.
    pub started_ms: u64,
    /// When it ends, in milliseconds since the epoch.
    pub expires_ms: u64,
    /// For how long it was asked for.
    pub ttl_seconds: u64,
}

impl Terms {
    /// Whether its time is over.
    pub fn is_over(&self, now_ms: u64) -> bool {
        now_ms >= self.expires_ms
    }

    /// Whether these are the terms of the same share.
    pub fn is_same(&self, other: &Self) -> bool {
        self.id == other.id && self.started_ms == other.started_ms
    }

    /// What is shared, as text.
    pub fn shown_path(&self) -> String {
        self.path.to_string_lossy().into_owned()
    }
}

/// A program this bridge installed for the share.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Installed {
    /// Its version.
    pub version: String,
    /// Where it is.
    pub path: PathBuf,
    /// Its hash.
    pub sha256: String,
}
