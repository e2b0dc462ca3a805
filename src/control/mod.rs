//! The operator's local socket (contract 16, design "Operator"): one JSON request per line, one JSON
//! answer per line. [`serve`] is the sidecar's end, [`ask`] and [`find`] the other one, [`status`]
//! what a status says.
//!
//! The socket lies in [`rundir`]'s directory and is named by the port. What a verb does is decided in
//! [`crate::app::operate`].

pub mod status;

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use interprocess::local_socket::tokio::{Listener, Stream};
use interprocess::local_socket::traits::tokio::{Listener as _, Stream as _};
use interprocess::local_socket::{GenericFilePath, ListenerOptions, ToFsName as _};
use interprocess::os::unix::local_socket::ListenerOptionsExt as _;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::time::timeout;

use crate::rundir;

/// Longest request or answer in bytes.
const MAX_LINE: u64 = 4 << 20;
/// A client that says nothing for so long is dropped.
const IDLE: Duration = Duration::from_secs(60);
/// How long [`ask`] waits for an answer, unless the verb itself takes longer.
const ANSWER: Duration = Duration::from_secs(10);
/// How long [`find`] waits for a status. Shorter: a sidecar may have to look for all others before it
/// answers whoever asked it.
const STATUS_ANSWER: Duration = Duration::from_secs(4);

/// What an operator may ask a sidecar.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Request {
    /// Everything [`status::Status`] holds.
    Status,
    /// Replace the token, here and in every other sidecar of this agent directory.
    Rotate,
    /// Read the token from the config file again; sessions and calls of the old one end. The keyed
    /// hash says which token is to be in force then.
    ReloadToken {
        /// The key.
        salt: String,
        /// [`crate::state::keyed_hash`] of the token under it.
        hash: String,
    },
    /// Make way for the next sidecar.
    Restart {
        /// How long calls in flight may still take.
        grace_ms: u64,
    },
    /// End for good.
    Stop {
        /// How long calls in flight may still take.
        grace_ms: u64,
    },
    /// Cancel the call with this id, or a unique beginning of it.
    Cancel {
        /// The call's id.
        id: String,
    },
    /// Cancel all calls.
    CancelAll,
    /// Answer new calls with `paused by the operator`.
    Pause,
    /// Serve calls again.
    Resume,
    /// Open the tunnel, or verify the open one anew; answered with [`status::Tunnel`] at once.
    Tunnel,
    /// Close the tunnel; answered when it is gone.
    TunnelStop,
    /// Only say how the tunnel stands.
    TunnelStatus,
}

/// The answer to a [`Request`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Reply {
    /// It was done; some verbs have something to say.
    Ok(Value),
    /// It was not; why, for people.
    Error(String),
}

/// The sidecar's end: accepts until it is dropped, then removes the socket.
pub struct Server {
    path: PathBuf,
    inode: Option<u64>,
    tasks: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // The socket is open until the task is dropped, so nobody else's has this inode.
        if let Ok(_lock) = rundir::lock()
            && inode(&self.path) == self.inode
        {
            let _ = std::fs::remove_file(&self.path);
        }
        self.tasks.abort();
    }
}

/// Opens the socket of the sidecar on `port`; `handle` answers requests.
///
/// # Errors
/// When the directory is not ours alone, or the socket cannot be made.
pub async fn serve<F, A>(port: u16, handle: F) -> io::Result<Server>
where
    F: Fn(Request) -> A + 'static,
    A: Future<Output = Reply> + 'static,
{
    let dir = rundir::open()?;
    let mut path = dir.join(format!("{port}.sock"));
    if path.exists() && Stream::connect(path.as_path().to_fs_name::<GenericFilePath>()?).await.is_ok() {
        // Another address, same port: its socket is alive and stays.
        path = dir.join(format!("{port}-{}.sock", std::process::id()));
    }
    // Under its name only once it listens: one that refuses connections is taken for a dead one's.
    let unfinished = dir.join(format!(".{port}-{}", std::process::id()));
    let _ = std::fs::remove_file(&unfinished);
    let listener = ListenerOptions::new()
        .name(unfinished.as_path().to_fs_name::<GenericFilePath>()?)
        .mode(0o600)
        .create_tokio()?;
    let inode = inode(&unfinished);
    {
        // Whoever takes the old one for a dead one's, or ends, removes that, not this.
        let _lock = rundir::lock().ok();
        std::fs::rename(&unfinished, &path)?;
    }
    let tasks = tokio::task::spawn_local(accept(listener, Rc::new(handle)));
    Ok(Server { path, inode, tasks })
}

async fn accept<F, A>(listener: Listener, handle: Rc<F>)
where
    F: Fn(Request) -> A + 'static,
    A: Future<Output = Reply> + 'static,
{
    loop {
        match listener.accept().await {
            Ok(stream) => {
                let handle = handle.clone();
                tokio::task::spawn_local(async move {
                    if let Err(error) = talk(stream, &*handle).await {
                        tracing::debug!(%error, "a control connection ended early");
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a control connection failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn talk<F, A>(stream: Stream, handle: &F) -> io::Result<()>
where
    F: Fn(Request) -> A,
    A: Future<Output = Reply>,
{
    if !is_peer_ours(&stream) {
        return Ok(());
    }
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        let mut limited = (&mut stream).take(MAX_LINE);
        match timeout(IDLE, limited.read_until(b'\n', &mut line)).await {
            Ok(Ok(1..)) => {}
            _ => return Ok(()),
        }
        let reply = match serde_json::from_slice(&line) {
            Ok(request) => handle(request).await,
            Err(error) => Reply::Error(format!("not a request: {error}")),
        };
        let mut text = serde_json::to_vec(&reply)?;
        text.push(b'\n');
        stream.get_mut().write_all(&text).await?;
    }
}

fn is_peer_ours(stream: &Stream) -> bool {
    use std::os::fd::AsFd as _;
    let Stream::UdSocket(socket) = stream;
    rundir::is_peer_ours(socket.as_fd())
}

/// Asks one sidecar.
///
/// # Errors
/// When nobody listens, or no answer came in time.
pub async fn ask(socket: &Path, request: &Request) -> io::Result<Reply> {
    let grace = match request {
        Request::Restart { grace_ms } | Request::Stop { grace_ms } => Duration::from_millis(*grace_ms),
        _ => Duration::ZERO,
    };
    ask_within(ANSWER + grace, socket, request).await
}

async fn ask_within(limit: Duration, socket: &Path, request: &Request) -> io::Result<Reply> {
    timeout(limit, async {
        let mut stream = BufReader::new(Stream::connect(socket.to_fs_name::<GenericFilePath>()?).await?);
        let mut text = serde_json::to_vec(request)?;
        text.push(b'\n');
        stream.get_mut().write_all(&text).await?;
        let mut line = Vec::new();
        (&mut stream).take(MAX_LINE).read_until(b'\n', &mut line).await?;
        if line.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&line)?)
    })
    .await
    .unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time")))
}

/// A control socket of this user and what its sidecar said of itself.
pub struct Found {
    /// The socket.
    pub socket: PathBuf,
    /// Its status, or why there is none.
    pub status: io::Result<status::Status>,
}

impl Found {
    /// The port of its endpoint, which names the socket.
    pub fn port(&self) -> Option<u16> {
        self.socket.file_stem()?.to_str()?.split('-').next()?.parse().ok()
    }
}

/// All sidecars of this user; sockets nobody listens on are removed.
///
/// # Errors
/// When the directory is not ours alone.
pub async fn find() -> io::Result<Vec<Found>> {
    // All at once: one that hangs costs its time-out, not one time-out each.
    let found = futures_util::future::join_all(rundir::sockets("sock")?.into_iter().map(meet)).await;
    Ok(found.into_iter().flatten().collect())
}

/// Asks the sidecar behind one socket; `None` when there is none any more.
async fn meet(socket: PathBuf) -> Option<Found> {
    let mut answer = ask_within(STATUS_ANSWER, &socket, &Request::Status).await;
    if answer.as_ref().is_err_and(has_hung_up) {
        // It was just ending: then it is gone now, or the next one is there.
        answer = ask_within(STATUS_ANSWER, &socket, &Request::Status).await;
    }
    let status = match answer {
        Ok(Reply::Ok(value)) => serde_json::from_value(value).map_err(io::Error::other),
        Ok(Reply::Error(error)) => Err(io::Error::other(error)),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            remove_dead(&socket);
            return None;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => Err(error),
    };
    Some(Found { socket, status })
}

fn inode(path: &Path) -> Option<u64> {
    std::fs::symlink_metadata(path).ok().map(|found| found.ino())
}

/// Removes the socket that nobody listens on. The next sidecar may have put its own in the same place
/// since it was met: that one stays.
fn remove_dead(socket: &Path) {
    let Ok(_lock) = rundir::lock() else { return };
    if !rundir::is_live(socket) {
        let _ = std::fs::remove_file(socket);
    }
}

/// Whether the connection ended without an answer.
fn has_hung_up(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_dead_socket_goes_and_its_successor_in_the_same_place_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, next) = (dir.path().join("1.sock"), dir.path().join(".1-2"));
        let bind = |path: &Path| UnixListener::bind(path).unwrap();
        drop(bind(&socket));
        let successor = bind(&next);
        std::fs::rename(&next, &socket).unwrap();
        remove_dead(&socket);
        assert!(socket.exists());
        std::os::unix::net::UnixStream::connect(&socket).unwrap();
        drop(successor);
        remove_dead(&socket);
        assert!(!socket.exists());
    }

    #[tokio::test(flavor = "local")]
    async fn a_sidecar_that_ends_late_leaves_its_successors_socket() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let serve = async || serve(port, async |_| Reply::Ok(Value::Null)).await.unwrap();
        let ending = serve().await;
        let next = ending.path.with_extension("next");
        let _successor = UnixListener::bind(&next).unwrap();
        std::fs::rename(&next, &ending.path).unwrap();
        let path = ending.path.clone();
        drop(ending);
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let last = serve().await;
        assert_eq!(last.path, path);
        drop(last);
        assert!(!path.exists());
    }
}
