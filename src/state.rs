//! What outlives a sidecar: the state file of a port (sessions, who served it) and the port an agent
//! directory used last.
//!
//! `<agentDir>/a2mcp.state/<port>.json`, 0600, replaced atomically. Holding the port is the lock: a
//! process reads and writes the file of a port only while it listens there. It holds no token; a
//! keyed hash binds the sessions to the one they were made under. A file that is unreadable or
//! newer costs a warning and the old sessions, never the start.

use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::config::{AgentDir, Token};
use crate::mcp::session::Session;
use crate::process::Identity;
use crate::xfer::Terms;

/// The format this build writes.
const VERSION: u32 = 1;
/// A state file larger than this is not ours.
const MAX_FILE: u64 = 4 << 20;

/// The content of a state file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    version: u32,
    /// The host process' random name for its bridge.
    pub instance: String,
    /// The sidecar that wrote the file.
    pub sidecar: Identity,
    /// The keeper that held the port.
    #[serde(default)]
    pub keeper: Option<Identity>,
    /// The host it served.
    pub host: Identity,
    /// Hex of a random key.
    salt: String,
    /// Hex of HMAC-SHA256 over the token under that key.
    token_hash: String,
    /// Where the endpoint listens: a respawned sidecar listens there again, whatever the config says by
    /// then.
    #[serde(default)]
    pub address: Option<std::net::IpAddr>,
    /// What was shared.
    #[serde(default)]
    pub share: Option<Terms>,
    /// Whether a tunnel is open. Only a later sidecar of the same host makes something of it.
    #[serde(default)]
    pub tunnel: bool,
    /// Whether the operator has paused it; as with the tunnel.
    #[serde(default)]
    pub paused: bool,
    /// The live sessions.
    pub sessions: Vec<Session>,
}

impl State {
    /// A state of this process.
    pub fn new(
        instance: &str,
        host: Identity,
        address: std::net::IpAddr,
        token: &Token,
        sessions: Vec<Session>,
    ) -> Self {
        let salt = uuid::Uuid::new_v4().simple().to_string();
        let token_hash = keyed_hash(&salt, token);
        let sidecar = Identity::current();
        Self {
            version: VERSION,
            instance: instance.to_owned(),
            sidecar,
            keeper: None,
            host,
            salt,
            token_hash,
            address: Some(address),
            share: None,
            tunnel: false,
            paused: false,
            sessions,
        }
    }

    /// Whether the sessions were made under `token`.
    pub fn is_bound_to(&self, token: &Token) -> bool {
        use subtle::ConstantTimeEq as _;
        keyed_hash(&self.salt, token).as_bytes().ct_eq(self.token_hash.as_bytes()).into()
    }
}

/// HMAC-SHA256 over a token under `salt`, in hex: tells tokens apart without being one.
pub fn keyed_hash(salt: &str, token: &Token) -> String {
    // Any length of key is fine for HMAC.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(salt.as_bytes()) else { return String::new() };
    mac.update(token.expose().as_bytes());
    mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Why a state file could not be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It cannot be read.
    #[error("cannot read {file}")]
    Unreadable {
        /// The file.
        file: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is no state file, or a newer build's.
    #[error("{file} is not a state file this version understands: {reason}")]
    NotUnderstood {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
}

/// Reads a state file; `None` when there is none.
///
/// # Errors
/// [`StateError`]: to warn about, not to fail for.
pub fn read(path: &Path) -> Result<Option<State>, StateError> {
    let file = path.display().to_string();
    let unreadable = |source| StateError::Unreadable { file: file.clone(), source };
    let metadata = match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(unreadable)?,
    };
    let not_understood = |reason: String| StateError::NotUnderstood { file: file.clone(), reason };
    if metadata.len() > MAX_FILE {
        return Err(not_understood(format!("it has {} bytes", metadata.len())));
    }
    let text = std::fs::read(path).map_err(unreadable)?;
    let state: State = serde_json::from_slice(&text).map_err(|error| not_understood(error.to_string()))?;
    if state.version != VERSION {
        return Err(not_understood(format!("version {}", state.version)));
    }
    Ok(Some(state))
}

/// The states of all ports of an agent directory; what cannot be read is left out.
pub fn all(dir: &AgentDir) -> Vec<State> {
    let entries = std::fs::read_dir(dir.state_dir())
        .map(|entries| entries.flatten().collect())
        .unwrap_or_else(|_| Vec::new());
    let files = entries.into_iter().map(|entry| entry.path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.filter_map(|path| read(&path).ok().flatten()).collect()
}

/// Replaces a state file: a crash at any point leaves the old or the new one whole.
///
/// # Errors
/// As the file system's.
pub fn write(path: &Path, state: &State) -> io::Result<()> {
    replace(path, &serde_json::to_vec(state)?)
}

/// The port this agent directory used last.
pub fn remembered_port(dir: &AgentDir) -> Option<u16> {
    std::fs::read_to_string(dir.port_file()).ok()?.trim().parse().ok().filter(|port| *port != 0)
}

/// Remembers `port`, unless a live sidecar of this directory holds the one remembered so far.
///
/// # Errors
/// As the file system's.
pub fn remember_port(dir: &AgentDir, port: u16) -> io::Result<()> {
    if let Some(old) = remembered_port(dir) {
        let holder = read(&dir.state_file(old)).ok().flatten().map(|state| state.sidecar);
        if old == port || holder.is_some_and(|holder| holder != Identity::current() && holder.is_alive()) {
            return Ok(());
        }
    }
    replace(&dir.port_file(), format!("{port}\n").as_bytes())
}

/// Replaces a private file of ours as a whole.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    crate::config::create_private_dir(dir)?;
    let mut file = tempfile::Builder::new().prefix(".a2mcp-").tempfile_in(dir)?;
    file.as_file().set_permissions(std::fs::Permissions::from_mode(0o600))?;
    file.write_all(content)?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}
