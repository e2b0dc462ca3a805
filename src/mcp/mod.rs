//! MCP as far as the bridge must understand it (contract 3 and 4): [`session`] keeps who may speak,
//! [`catalogue`] makes the host's tool list safe for every client, [`call`] rewrites a `tools/call`
//! for the host and its result for the caller, [`reply`] builds JSON-RPC answers, [`sse`] events.
//!
//! Pure: no sockets, no files, no clock. What need not be understood stays raw text.

pub mod call;
pub mod catalogue;
pub mod reply;
pub mod session;
pub mod sse;

/// The protocol versions this bridge speaks, newest first.
pub const VERSIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];

/// The version to answer `initialize` with: the requested one if it is spoken, else the newest.
pub fn negotiate(requested: Option<&str>) -> &'static str {
    VERSIONS.into_iter().find(|version| Some(*version) == requested).unwrap_or(VERSIONS[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_version_is_echoed_and_anything_else_gets_the_newest() {
        for version in VERSIONS {
            assert_eq!(negotiate(Some(version)), version);
        }
        for version in [None, Some("2026-07-28"), Some("1999-01-01"), Some("")] {
            assert_eq!(negotiate(version), "2025-11-25");
        }
    }
}
