//! The private directory of this user's local sockets: `/run/user/<uid>/a2mcp`, or else
//! `/tmp/a2mcp-<uid>`; 0700 and ours, or refused, and never taken from the environment.
//!
//! Knows the place and who may come in; what is said on the sockets belongs to [`crate::control`]
//! (names end in `.sock`) and [`crate::keeper`] (names end in `.keeper`).

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// The real user id of this process.
pub fn own_uid() -> u32 {
    rustix::process::getuid().as_raw()
}

/// The directory, made when missing.
///
/// # Errors
/// When it cannot be made, or is not ours alone.
pub fn open() -> io::Result<PathBuf> {
    let uid = own_uid();
    let runtime = PathBuf::from(format!("/run/user/{uid}"));
    let is_ours = std::fs::symlink_metadata(&runtime).is_ok_and(|meta| meta.is_dir() && meta.uid() == uid);
    let dir = if is_ours { runtime.join("a2mcp") } else { PathBuf::from(format!("/tmp/a2mcp-{uid}")) };
    match std::fs::DirBuilder::new().mode(0o700).create(&dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // Somebody else may have been first in /tmp: a link, or a directory that is not ours, is refused.
    let meta = std::fs::symlink_metadata(&dir)?;
    if !meta.is_dir() || meta.uid() != uid {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{} is not a directory of this user; remove it", dir.display()),
        ));
    }
    if meta.permissions().mode() & 0o077 != 0 {
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o700))?;
    }
    Ok(dir)
}

/// The sockets in it whose names end in `.` and `kind`, in the order of their names.
///
/// # Errors
/// As [`open`]'s, or the file system's.
pub fn sockets(kind: &str) -> io::Result<Vec<PathBuf>> {
    let mut sockets: Vec<PathBuf> = match std::fs::read_dir(open()?) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    sockets.retain(|path| path.extension().is_some_and(|extension| extension == kind));
    sockets.sort();
    Ok(sockets)
}

/// Held while a socket is judged stale, removed and made anew; released when it is dropped, and by
/// the holder's death.
pub struct Lock(#[allow(dead_code)] File);

/// Waits for the directory's lock. Its holders do nothing slow.
///
/// # Errors
/// As the file system's.
pub fn lock() -> io::Result<Lock> {
    let dir = File::open(open()?)?;
    rustix::fs::flock(&dir, rustix::fs::FlockOperation::LockExclusive)?;
    Ok(Lock(dir))
}

/// Whether somebody listens on the socket at `path`. To be acted upon only with the directory's [`lock`]
/// held: else the next one may have put its own there since.
pub fn is_live(path: &Path) -> bool {
    // A full queue is a sign of life too.
    !matches!(
        UnixStream::connect(path),
        Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
    )
}

/// Whether the process behind a connected socket belongs to this user.
pub fn is_peer_ours(socket: impl AsFd) -> bool {
    rustix::net::sockopt::socket_peercred(socket).is_ok_and(|peer| peer.uid.as_raw() == own_uid())
}
