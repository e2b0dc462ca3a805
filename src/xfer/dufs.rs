//! The file server as a program: how it is configured for one share, and the files it needs meanwhile.
//!
//! It listens twice: on a loopback port, which is what a share's result names, and on a socket in this
//! user's private directory, which is what we use: nobody else can take that one's place when it is
//! gone. Everything is in a config file, 0600 and removed once it is ready; the command line names only
//! that. Spawning is the keeper's.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::path::PART_PATTERN;

/// The user name of every share. Listings show it, so only the password is a secret.
pub const USER: &str = "a2mcp";
/// What it says when somebody else has its port.
pub const PORT_TAKEN: &str = "Failed to bind";
/// Answered by it, whatever is shared.
pub const HEALTH: &str = "/xfer/__dufs__/health";
/// How our files in the private directory end.
const SOCKET: &str = "dufs";
const CONFIG: &str = "yaml";

/// What one run is told.
pub struct Run<'a> {
    /// The shared file or folder, canonical.
    pub root: &'a Path,
    /// The loopback port.
    pub port: u16,
    /// The private socket.
    pub socket: &'a Path,
    /// The share's password.
    pub password: &'a str,
}

impl Run<'_> {
    /// Writes the config file; its arguments are `-c` and this path.
    ///
    /// # Errors
    /// As the file system's; a path that is not UTF-8.
    pub fn write(&self, file: &Path) -> io::Result<()> {
        let not_utf8 = || io::Error::new(io::ErrorKind::InvalidInput, "the path is not UTF-8");
        let config = json!({
            "serve-path": self.root.to_str().ok_or_else(not_utf8)?,
            "bind": ["127.0.0.1", self.socket.to_str().ok_or_else(not_utf8)?],
            "port": self.port,
            "path-prefix": "xfer",
            "auth": [format!("{USER}:{}@/:rw", self.password)],
            "hidden": [PART_PATTERN],
            "allow-upload": true,
            // As its pages say to callers, who may not; we need it for nothing.
            "allow-delete": false,
            "allow-archive": true,
            "log-format": "",
        });
        let _ = std::fs::remove_file(file);
        let mut out = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
        // JSON is YAML.
        out.write_all(config.to_string().as_bytes())
    }
}

/// The value of `Authorization` for a password.
pub fn authorization(password: &str) -> String {
    use base64::Engine as _;
    let pair = format!("{USER}:{password}");
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(pair))
}

/// A port that is free on the loopback address now; `wanted` if it is.
///
/// # Errors
/// When none is.
pub fn free_port(wanted: Option<u16>) -> io::Result<u16> {
    if let Some(port) = wanted.filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()) {
        return Ok(port);
    }
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// The private socket and the config file of the share `id` of the endpoint on `port`.
pub fn files(dir: &Path, port: u16, id: &str) -> (PathBuf, PathBuf) {
    (dir.join(format!("{port}-{id}.{SOCKET}")), dir.join(format!("{port}-{id}.{CONFIG}")))
}

/// Removes what earlier shares of the endpoint on `port` left; holding that port is the lock.
pub fn sweep(dir: &Path, port: u16, except: Option<&str>) {
    let begins = format!("{port}-");
    let keeps = except.map(|id| format!("{begins}{id}."));
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_ours = name.starts_with(&begins)
            && [SOCKET, CONFIG]
                .iter()
                .any(|end| name.strip_suffix(end).is_some_and(|rest| rest.ends_with('.')));
        if is_ours && !keeps.as_ref().is_some_and(|keeps| name.starts_with(keeps)) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
