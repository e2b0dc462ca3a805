//! The audit file itself: appending, and rotation that loses nothing while other sidecars append to
//! the same file.
//!
//! Records are appended without a lock: *look at inode and size, write, see that the file still has a
//! name*. One that lands in the file that was just rotated away is in the older generation, where it
//! belongs; one that lands in a file that has been rotated away twice is written again. Rotation takes a
//! `flock` on `<file>.lock` and looks again, so that nobody rotates a file that is new. Whoever cannot get
//! the lock (its holder was stopped) still writes, and only leaves rotation alone. Where locks do not
//! exist, one sidecar alone still rotates. Devices and pipes are written without look and rotation.

use std::fs::{File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, OFlags};

/// A file larger than this becomes `.1` before the next record is written.
pub const ROTATE_BYTES: u64 = 512 * 1024;
/// So often it is looked for the end of a line while others write.
const SETTLE_LOOKS: u32 = 5;

pub(super) struct Log {
    path: PathBuf,
    open: Option<Open>,
    lock: Option<File>,
    /// Said once, not at every batch.
    cannot_rotate: bool,
}

/// What [`Log::try_lock`] says.
pub(super) enum Locking {
    /// Held until [`Log::unlock`].
    Held,
    /// Somebody else holds it.
    Busy,
    /// There is nothing to lock: files cannot be made or locked in this place.
    Without,
}

struct Open {
    file: File,
    regular: bool,
    /// Identity on disk, to notice that somebody else rotated.
    inode: (u64, u64),
    /// As it was found.
    size: u64,
    /// The size after our last write: while it is still that, nobody else wrote since.
    end: u64,
}

impl Log {
    /// Follows links now: a rotation must rename the real file, not the link.
    pub(super) fn new(path: &Path) -> Log {
        Log { path: crate::config::follow_links(path), open: None, lock: None, cannot_rotate: false }
    }

    /// Only to be called once [`Log::look`] has found a file that is due.
    pub(super) fn try_lock(&mut self) -> Locking {
        // A lock file that somebody tidied away excludes nobody any more.
        let gone = |lock: &File| lock.metadata().is_ok_and(|found| found.nlink() == 0);
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
        match self.lock.as_ref().map(File::try_lock) {
            Some(Ok(())) => Locking::Held,
            Some(Err(TryLockError::WouldBlock)) => Locking::Busy,
            Some(Err(TryLockError::Error(_))) | None => Locking::Without,
        }
    }

    pub(super) fn unlock(&mut self) {
        if let Some(Err(_)) = self.lock.as_ref().map(File::unlock) {
            // Closing gives it up as well.
            self.lock = None;
        }
    }

    /// Makes the open file the one at the path; whether it is so large that it should be rotated first.
    pub(super) fn look(&mut self) -> io::Result<bool> {
        let result = self.find().map(|open| open.regular && open.size > ROTATE_BYTES);
        self.forget_after(result)
    }

    /// Makes the file at the path the older generation, when it is still due. To be called with the lock
    /// held.
    pub(super) fn rotate(&mut self) {
        if !self.look().is_ok_and(|is_due| is_due) {
            return;
        }
        match std::fs::rename(&self.path, self.beside(".1")) {
            Ok(()) => self.open = None,
            Err(error) if !self.cannot_rotate => {
                self.cannot_rotate = true;
                tracing::warn!(path = %self.shown(), %error, "audit file not rotated; it keeps growing");
            }
            Err(_) => {}
        }
    }

    /// Appends `lines`, whole records, with one write(2) where the system takes them at once; to the file
    /// that was found by [`Log::look`], if any.
    /// On error the second value says how many bytes of them are in the file.
    pub(super) fn append(&mut self, lines: &[u8]) -> Result<(), (io::Error, usize)> {
        let result = match self.open.as_mut() {
            Some(open) => open.append(lines),
            None => self.find().map_err(|error| (error, 0)).and_then(|open| open.append(lines)),
        };
        self.forget_after(result)?;
        let Some(open) = self.open.as_ref().filter(|open| open.is_nameless()) else { return Ok(()) };
        // Removed, or rotated away twice, since it was found. (Some file systems count no names: there the
        // file at the path is still the same.)
        let was = open.inode;
        let result = self
            .find()
            .map_err(|error| (error, 0))
            .and_then(|open| if open.inode == was { Ok(()) } else { open.append(lines) });
        self.forget_after(result)
    }

    /// After an error the file is opened and looked at afresh: the disk or the directory may have changed.
    fn forget_after<T, E>(&mut self, result: Result<T, E>) -> Result<T, E> {
        if result.is_err() {
            self.open = None;
        }
        result
    }

    /// The open file, which is the one at the path by now, and its size.
    fn find(&mut self) -> io::Result<&mut Open> {
        let open = match self.open.take() {
            Some(open) if open.regular => match std::fs::metadata(&self.path) {
                Ok(found) if (found.dev(), found.ino()) == open.inode => Open { size: found.len(), ..open },
                _ => Open::at(&self.path)?,
            },
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
        Ok(Open { file, regular: metadata.is_file(), inode, size: metadata.len(), end: 0 })
    }

    /// Whether somebody's last line was cut. A line that is just being written looks the same (the size
    /// grows page by page), so that is waited for. Unreadable counts as ended: the worst case is one line
    /// that readers skip.
    fn ends_inside_a_line(&mut self) -> bool {
        for _ in 0..SETTLE_LOOKS {
            let mut last = [b'\n'];
            if self.size > 0 {
                let _ = self.file.read_at(&mut last, self.size - 1);
            }
            if last == [b'\n'] {
                return false;
            }
            // Changes nothing (the file has a first byte), but waits its turn among the writes.
            let turn = rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, 1);
            let before = self.size;
            self.size = self.file.metadata().map_or(before, |found| found.len());
            if turn.is_err() || self.size == before {
                return true;
            }
        }
        // Others write without a pause; whoever cut a line is not the one at the end.
        false
    }

    fn append(&mut self, lines: &[u8]) -> Result<(), (io::Error, usize)> {
        if self.regular && self.size != self.end && self.ends_inside_a_line() {
            // Somebody's last line was cut (a full disk, a crash): keep ours apart from it.
            let apart = [b"\n", lines].concat();
            self.write(&apart).map_err(|(error, written)| (error, written.saturating_sub(1)))
        } else {
            self.write(lines)
        }
    }

    fn is_nameless(&self) -> bool {
        self.regular && self.file.metadata().is_ok_and(|found| found.nlink() == 0)
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
        self.end = self.size + bytes.len() as u64;
        Ok(())
    }
}
