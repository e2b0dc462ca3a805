//! The keeper: a small companion process of the sidecar that holds what must outlive it, namely the
//! listening socket and the children (design, "who may die"). It lives as long as the host does.
//!
//! ```text
//! sidecar ──adopt: the listening socket──▶ keeper ──socket: a copy──▶ the next sidecar
//!         ──spawn, signal, status, …────▶        ◀──childEnded──
//! ```
//!
//! [`server`] is the process (`a2mcp keeper`): one thread, one `poll` loop, no runtime; [`children`]
//! what it runs; [`wire`] what is said on its private socket; [`client`] the sidecar's end. It parses
//! nothing from the network and accepts no connection of the endpoint: while no sidecar accepts,
//! newcomers wait in the kernel's queue.
//!
//! Its socket is named by the host's `instance`, so that a sidecar finds the keeper of its own host
//! and no other. The binary on disk may be replaced meanwhile: a keeper goes on with the code it has.

pub mod children;
pub mod client;
pub mod server;
pub mod wire;

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use sha2::{Digest as _, Sha256};

use crate::rundir;

/// How the names of keepers' sockets end.
const SOCKET_KIND: &str = "keeper";

/// The file name of the socket of an instance's keeper. The instance is foreign text, hence hashed.
pub fn socket_name(instance: &str) -> String {
    let digest = Sha256::digest(instance.as_bytes());
    let hex: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("{hex}.{SOCKET_KIND}")
}

/// The process ids of this user's keepers.
///
/// # Errors
/// When the directory of their sockets is not ours alone, or cannot be read.
pub fn live() -> io::Result<Vec<u32>> {
    let listener = |path: PathBuf| {
        let peer = rustix::net::sockopt::socket_peercred(UnixStream::connect(path).ok()?).ok()?;
        peer.pid.as_raw_nonzero().get().try_into().ok()
    };
    Ok(rundir::sockets(SOCKET_KIND)?.into_iter().filter_map(listener).collect())
}

/// The socket of an instance's keeper.
///
/// # Errors
/// When the directory is not ours alone.
pub fn socket_path(instance: &str) -> io::Result<PathBuf> {
    Ok(rundir::open()?.join(socket_name(instance)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_instance_makes_a_short_plain_file_name() {
        for instance in ["", "../../etc/passwd", "a\0b", &"x".repeat(100_000)] {
            let name = socket_name(instance);
            assert_eq!(name.len(), 39, "{name}");
            assert!(name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'.'), "{name}");
        }
        assert_ne!(socket_name("a"), socket_name("b"));
    }
}
