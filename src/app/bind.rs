//! Finding the port (contract 13): the fixed one, the remembered one, or any; a respawned sidecar
//! takes exactly the one it had.

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::time::{Duration, Instant};

use crate::config::{AgentDir, Config};
use crate::{process, state};

/// How long a busy port is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;
const RETRY_STEP: Duration = Duration::from_millis(50);

/// A bound listener and what the operator should know about it.
pub struct Bound {
    /// Listens already.
    pub listener: TcpListener,
    /// Its address.
    pub address: SocketAddr,
    /// To be shown to the operator.
    pub warnings: Vec<String>,
}

/// Why there is no listener.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The port of a respawned sidecar is held by somebody else.
    #[error("port {port} of this bridge is held by {holder}; stop it, then run `/a2mcp restart`")]
    Busy {
        /// The port.
        port: u16,
        /// Who holds it, for people.
        holder: String,
    },
    /// The configured host is none of this machine's addresses.
    #[error("cannot listen on host \"{host}\" (field \"host\" of the config)")]
    Host {
        /// The configured host.
        host: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Binds for a host's first start, or with `resume` the port of a sidecar that was there before.
/// `is_asked`: the port of `config` is one that the host's command line named.
///
/// # Errors
/// [`BindError`].
pub async fn bind(
    config: &Config,
    dir: &AgentDir,
    resume: Option<u16>,
    is_asked: bool,
) -> Result<Bound, BindError> {
    let host_error = |source| BindError::Host { host: config.host.clone(), source };
    // A changed `host` acts at the host's next start: a respawned sidecar listens where it did.
    let before = resume.and_then(|port| state::read(&dir.state_file(port)).ok().flatten()?.address);
    let ip = match before {
        Some(ip) => ip,
        None => (config.host.as_str(), 0)
            .to_socket_addrs()
            .map_err(host_error)?
            .next()
            .ok_or_else(|| host_error(io::Error::other("the name has no address")))?
            .ip(),
    };
    let at = |port: u16| SocketAddr::new(ip, port);
    let is_busy = |error: &io::Error| error.kind() == io::ErrorKind::AddrInUse;
    let mut warnings = Vec::new();

    if let Some(port) = resume {
        let listener = match retry(at(port)).await {
            Err(error) if is_busy(&error) => return Err(BindError::Busy { port, holder: holder(port) }),
            other => other.map_err(host_error)?,
        };
        return bound(listener, warnings).map_err(host_error);
    }
    let first_choice = match config.port {
        0 => state::remembered_port(dir).map(|port| TcpListener::bind(at(port))),
        port => match TcpListener::bind(at(port)) {
            Err(error) if is_busy(&error) => {
                let holder = holder(port);
                tracing::warn!(port, holder, "the configured port is busy; trying for 5 s");
                let retried = retry(at(port)).await;
                if retried.is_err() {
                    let whose = if is_asked { "--port" } else { "field \"port\" of the config" };
                    warnings.push(format!("port {port} ({whose}) is held by {holder}"));
                }
                Some(retried)
            }
            first => Some(first),
        },
    };
    let listener = match first_choice {
        Some(Ok(listener)) => listener,
        Some(Err(error)) if !is_busy(&error) && config.port != 0 => return Err(host_error(error)),
        _ => TcpListener::bind(at(0)).map_err(host_error)?,
    };
    let mut bound = bound(listener, warnings).map_err(host_error)?;
    let port = bound.address.port();
    for warning in &mut bound.warnings {
        warning.push_str(&format!("; this bridge listens on port {port} instead"));
    }
    if let Err(error) = state::remember_port(dir, port) {
        bound.warnings.push(format!("the port cannot be remembered for the next start: {error}"));
    }
    Ok(bound)
}

/// A listener that is bound already.
///
/// # Errors
/// When it has no address.
pub fn bound(listener: TcpListener, warnings: Vec<String>) -> io::Result<Bound> {
    let address = listener.local_addr()?;
    // While no sidecar accepts, newcomers wait here; as many as the kernel allows.
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(Bound { listener, address, warnings })
}

async fn retry(address: SocketAddr) -> io::Result<TcpListener> {
    let end = Instant::now() + RETRY;
    loop {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < end => {
                tokio::time::sleep(RETRY_STEP).await;
            }
            other => return other,
        }
    }
}

/// Who holds a port, for people.
pub fn holder(port: u16) -> String {
    match process::listener_on(port) {
        Some((pid, name)) => format!("process {pid} ({})", crate::text::clean(&name, 40)),
        None => "another user's process".into(),
    }
}
