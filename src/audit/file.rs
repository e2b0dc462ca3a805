//! The audit file itself: appending, and rotation that loses nothing while other sidecars append to
//! the same file.
//!
//! Writers take a `flock` on `<file>.lock` around *look at inode and size, perhaps rotate, write*; so
//! no record can land in a file that has been rotated away twice. Whoever cannot get the lock (its
//! holder was stopped) still writes, and only leaves rotation alone. Where locks do not exist, one
//! sidecar alone still rotates. Devices and pipes are written without lock and rotation.

use std::fs::{File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// A file larger than this becomes `.1` before the next record is written.
pub const ROTATE_BYTES: u64 = 512 * 1024;

/// Every so many batches it is looked whether the lock file is still the one others take.
const LOOK_EVERY: u32 = 64;

pub(super) struct Log {
    path: PathBuf,
    open: Option<Open>,
    lock: Option<File>,
    batches: u32,
    /// Said once, not at every batch.
    cannot_rotate: bool,
}

/// What [`Log::try_lock`] says.
pub(super) enum Locking {
    /// Held until [`Log::unlock`].
    Held,
    /// Somebody else holds it.
    Busy,
    /// There is nothing to lock: no regular file, or a place where files cannot be made or locked.
    Without,
}

struct Open {
    file: File,
    regular: bool,
    /// Identity on disk, to notice that somebody else rotated.
    inode: (u64, u64),
    /// The size after our last write: while it is still that, nobody else wrote since.
    end: u64,
}

impl Log {
    /// Follows links now: a rotation must rename the real file, not the link.
    pub(super) fn new(path: &Path) -> Log {
        Log {
            path: crate::config::follow_links(path),
            open: None,
            lock: None,
            batches: 0,
            cannot_rotate: false,
        }
    }

    pub(super) fn try_lock(&mut self) -> io::Result<Locking> {
        if !self.open()?.regular {
            return Ok(Locking::Without);
        }
        // A lock file that somebody tidied away excludes nobody any more; looked at now and then.
        self.batches = self.batches.wrapping_add(1);
        let is_due = self.batches % LOOK_EVERY == 1;
        let gone = |lock: &File| is_due && lock.metadata().is_ok_and(|found| found.nlink() == 0);
        if self.lock.as_ref().is_none_or(gone) {
            let flags = OFlags::NOFOLLOW.bits() as i32;
            self.lock = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(flags)
                .open(self.beside(".lock"))
                .ok();
        }
        Ok(match self.lock.as_ref().map(File::try_lock) {
            Some(Ok(())) => Locking::Held,
            Some(Err(TryLockError::WouldBlock)) => Locking::Busy,
            Some(Err(TryLockError::Error(_))) | None => Locking::Without,
        })
    }

    pub(super) fn unlock(&mut self) {
        if let Some(Err(_)) = self.lock.as_ref().map(File::unlock) {
            // Closing gives it up as well.
            self.lock = None;
        }
    }

    /// Appends `lines`, whole records, with one write(2) where the system takes them at once.
    /// On error the second value says how many bytes of them are in the file.
    pub(super) fn append(&mut self, lines: &[u8], may_rotate: bool) -> Result<(), (io::Error, usize)> {
        let result = self.prepare(may_rotate).map_err(|error| (error, 0)).and_then(|(open, torn)| {
            if !torn {
                return open.write(lines);
            }
            // Somebody's last line was cut (a full disk, a crash): keep ours apart from it.
            let apart = [b"\n", lines].concat();
            open.write(&apart).map_err(|(error, written)| (error, written.saturating_sub(1)))
        });
        if result.is_err() {
            // Opened and looked at afresh next time: the disk or the directory may have changed.
            self.open = None;
        }
        result
    }

    /// Makes the open file the one at the path, rotates it if that is due, and tells whether it ends
    /// inside a line.
    fn prepare(&mut self, may_rotate: bool) -> io::Result<(&mut Open, bool)> {
        let (regular, inode) = self.open().map(|open| (open.regular, open.inode))?;
        if !regular {
            return Ok((self.open()?, false));
        }
        let mut size = match std::fs::metadata(&self.path) {
            Ok(found) if (found.dev(), found.ino()) == inode => found.len(),
            _ => self.reopen()?,
        };
        if may_rotate && size > ROTATE_BYTES {
            match std::fs::rename(&self.path, self.beside(".1")) {
                Ok(()) => size = self.reopen()?,
                Err(error) if !self.cannot_rotate => {
                    self.cannot_rotate = true;
                    tracing::warn!(path = %self.shown(), %error, "audit file not rotated; it keeps growing");
                }
                Err(_) => {}
            }
        }
        let open = self.open()?;
        let torn = size > 0 && size != open.end && !open.ends_a_line(size);
        open.end = size;
        Ok((open, torn))
    }

    fn reopen(&mut self) -> io::Result<u64> {
        self.open = None;
        Ok(self.open()?.file.metadata()?.len())
    }

    fn open(&mut self) -> io::Result<&mut Open> {
        let open = match self.open.take() {
            Some(open) => open,
            None => Open::at(&self.path)?,
        };
        Ok(self.open.insert(open))
    }

    /// What both generations hold now, the older one first. Nothing where there is no regular file.
    pub(super) fn generations(&self) -> String {
        let read = |path: &Path| {
            let regular = std::fs::metadata(path).is_ok_and(|found| found.is_file());
            if regular { std::fs::read(path).unwrap_or_default() } else { Vec::new() }
        };
        let both = [read(&self.beside(".1")), read(&self.path)].concat();
        String::from_utf8_lossy(&both).into_owned()
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(suffix);
        name.into()
    }

    pub(super) fn shown(&self) -> String {
        crate::text::clean(&self.path.to_string_lossy(), 400).into_owned()
    }
}

impl Open {
    fn at(path: &Path) -> io::Result<Open> {
        // NONBLOCK: opening a pipe that nobody reads fails instead of waiting. Regular files ignore it.
        let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .custom_flags(flags)
            .open(path)?;
        let metadata = file.metadata()?;
        if metadata.is_file() && metadata.mode() & 0o077 != 0 {
            // Not ours to change when it fails; the records still belong here.
            let _ = file.set_permissions(Permissions::from_mode(0o600));
        }
        let inode = (metadata.dev(), metadata.ino());
        Ok(Open { file, regular: metadata.is_file(), inode, end: 0 })
    }

    /// Unreadable counts as ended: the worst case is one line that readers skip.
    fn ends_a_line(&self, size: u64) -> bool {
        let mut last = [b'\n'];
        let _ = self.file.read_at(&mut last, size - 1);
        last == [b'\n']
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), (io::Error, usize)> {
        let mut written = 0;
        while written < bytes.len() {
            match self.file.write(&bytes[written..]) {
                Ok(0) => return Err((io::ErrorKind::WriteZero.into(), written)),
                Ok(n) => written += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err((error, written)),
            }
        }
        self.end += bytes.len() as u64;
        Ok(())
    }
}
