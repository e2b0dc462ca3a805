//! The folder an upload goes to, opened beneath the shared one: makes missing folders, and the empty
//! file under its hidden name that the file server then fills.
//!
//! Every step goes from an open folder to the next name and looks where it has arrived, so a link that
//! is swapped meanwhile never leads outside. Blocking: for a thread of its own.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::path::RoutePath;

/// Longest path that a program can name, in bytes.
const MAX_PATH: usize = 4096;
/// Most entries of a share that are looked at for left-over uploads.
const MAX_SWEPT: usize = 1_000_000;

/// Why an upload cannot go where it wants to.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// A link on the way leads out of the shared folder, or to nothing.
    #[error("a link in the path leads out of the shared folder, or to nothing")]
    Outside,
    /// A file stands where a folder is needed.
    #[error("a part of the path is a file, not a folder")]
    NotAFolder,
    /// A folder has this name.
    #[error("a folder has this name")]
    IsAFolder,
    /// The folder it is to be in does not exist.
    #[error("the folder it is to be in does not exist")]
    NoFolder,
    /// A pipe, a socket or a device has this name.
    #[error("something that is neither a file nor a folder has this name (a pipe, a socket, a device)")]
    NotAFile,
    /// The hidden name of what arrives is a folder's.
    #[error("a folder has the hidden name under which the upload would arrive; remove it")]
    PartIsAFolder,
    /// What arrived is not what has the hidden name now.
    #[error("what had arrived was removed or replaced meanwhile")]
    PartChanged,
    /// Something has this name that was to be new.
    #[error("a file of this name exists")]
    Exists,
    /// The file system says no.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for PlaceError {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}

/// The folder of one name, opened.
pub struct Place {
    folder: OwnedFd,
    name: String,
}

impl Place {
    /// Opens the folder that `path`, a file below `root`, is in; `root` is canonical. Missing folders are
    /// made when `make` says so: none of them when the path is too long for the file server.
    ///
    /// # Errors
    /// [`PlaceError`].
    pub fn open(root: &Path, path: &RoutePath, make: bool) -> Result<Self, PlaceError> {
        let (folders, name) = path.split().ok_or(PlaceError::IsAFolder)?;
        if make {
            let below: usize = path.names().iter().map(|name| name.len() + 1).sum();
            if root.as_os_str().len() + below >= MAX_PATH {
                return Err(Errno::NAMETOOLONG.into());
            }
        }
        let open = |at: rustix::fd::BorrowedFd<'_>, name: &Path| {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::openat(at, name, flags, Mode::empty())
        };
        let mut folder = match open(rustix::fs::CWD, root) {
            Err(Errno::NOTDIR) => return Err(PlaceError::NotAFolder),
            folder => folder?,
        };
        for name in folders {
            let next = match open(folder.as_fd(), Path::new(name)) {
                Err(Errno::NOENT) if make => {
                    match rustix::fs::mkdirat(&folder, name.as_str(), Mode::from_raw_mode(0o777)) {
                        // Somebody was faster, or it is a link to nothing.
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(error) => return Err(error.into()),
                    }
                    open(folder.as_fd(), Path::new(name))
                }
                opened => opened,
            };
            folder = match next {
                Ok(next) => next,
                Err(Errno::NOENT) if !make => return Err(PlaceError::NoFolder),
                Err(Errno::NOENT | Errno::LOOP) => return Err(PlaceError::Outside),
                Err(Errno::NOTDIR) => return Err(PlaceError::NotAFolder),
                Err(error) => return Err(error.into()),
            };
            if !whereabouts(&folder)?.starts_with(root) {
                return Err(PlaceError::Outside);
            }
        }
        Ok(Self { folder, name: name.to_owned() })
    }

    /// Where it really is below `root`, whichever links led here; `None` when that cannot be written as the
    /// path of a request.
    ///
    /// # Errors
    /// [`PlaceError::Outside`] when the folder was moved out of `root` meanwhile.
    pub fn real_path(&self, root: &Path) -> Result<Option<RoutePath>, PlaceError> {
        let folder = whereabouts(&self.folder)?;
        let folder = folder.strip_prefix(root).map_err(|_| PlaceError::Outside)?;
        Ok(RoutePath::beneath(folder, &self.name))
    }

    /// Whether something may be made in the folder.
    ///
    /// # Errors
    /// As the file system's.
    pub fn may_write(&self) -> Result<(), PlaceError> {
        Ok(rustix::fs::accessat(&self.folder, ".", Access::WRITE_OK, AtFlags::EACCESS)?)
    }

    /// Puts the file of the name `part` beside this name over it, in one step, with the rights of the file it
    /// replaces; where nothing may have the name, only if nothing has. It is to have `size` bytes. A link of
    /// this name is replaced itself, not what it leads to.
    ///
    /// # Errors
    /// [`PlaceError`]; nothing has changed then.
    pub fn put(&self, root: &Path, part: &str, size: u64, only_new: bool) -> Result<(), PlaceError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.folder, part, flags, Mode::empty()) {
            // Gone, a link, a socket.
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Err(PlaceError::PartChanged),
            file => file?,
        };
        let stat = rustix::fs::fstat(&file)?;
        if !is_ours(&stat) || stat.st_size.unsigned_abs() != size {
            return Err(PlaceError::PartChanged);
        }
        if let Some(rights) = self.rights(root)? {
            rustix::fs::fchmod(&file, rights)?;
        }
        let flags = if only_new { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
        match rustix::fs::renameat_with(&self.folder, part, &self.folder, self.name.as_str(), flags) {
            Err(Errno::EXIST) if only_new => Err(PlaceError::Exists),
            // A file system that has no such step: what was looked at last must do.
            Err(Errno::INVAL) if only_new => match self.stat() {
                Ok(None) => Ok(rustix::fs::renameat(&self.folder, part, &self.folder, self.name.as_str())?),
                _ => Err(PlaceError::Exists),
            },
            put => Ok(put?),
        }
    }

    /// The rights of an upload of this name: those of the file it replaces; `None` when there is none. Ours
    /// must stay writable until the upload is whole: the file server opens it by name.
    fn rights(&self, root: &Path) -> Result<Option<Mode>, PlaceError> {
        let Some(old) = self.look(root)? else { return Ok(None) };
        match FileType::from_raw_mode(old.st_mode) {
            FileType::RegularFile => {
                Ok(Some(Mode::from_raw_mode(old.st_mode & 0o777) | Mode::RUSR | Mode::WUSR))
            }
            FileType::Directory => Err(PlaceError::IsAFolder),
            _ => Err(PlaceError::NotAFile),
        }
    }

    /// What has the name itself.
    fn stat(&self) -> Result<Option<Stat>, PlaceError> {
        match rustix::fs::statat(&self.folder, self.name.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            stat => Ok(Some(stat?)),
        }
    }

    /// What has the name now; `None` for nothing. Links within the share are followed.
    ///
    /// # Errors
    /// [`PlaceError::Outside`] for a link that leads elsewhere or nowhere.
    pub fn look(&self, root: &Path) -> Result<Option<Stat>, PlaceError> {
        let Some(stat) = self.stat()? else { return Ok(None) };
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
            return Ok(Some(stat));
        }
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let target = match rustix::fs::openat(&self.folder, self.name.as_str(), flags, Mode::empty()) {
            Err(Errno::NOENT | Errno::LOOP) => return Err(PlaceError::Outside),
            target => target?,
        };
        if !whereabouts(&target)?.starts_with(root) {
            return Err(PlaceError::Outside);
        }
        Ok(Some(rustix::fs::fstat(&target)?))
    }

    /// Makes an empty file of the name `part` beside this name, with the rights of the file it is to
    /// replace, if there is one. Whatever had that name before makes way.
    ///
    /// # Errors
    /// [`PlaceError`].
    pub fn begin(&self, root: &Path, part: &str) -> Result<(), PlaceError> {
        let rights = self.rights(root)?;
        self.remove(part);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        // Nobody else looks into it before it has the rights of the one it replaces.
        let first = if rights.is_some() { 0o600 } else { 0o666 };
        let file = match rustix::fs::openat(&self.folder, part, flags, Mode::from_raw_mode(first)) {
            Err(Errno::EXIST) => return Err(PlaceError::PartIsAFolder),
            file => file?,
        };
        if let Some(rights) = rights {
            rustix::fs::fchmod(&file, rights)?;
        }
        Ok(())
    }

    /// Bytes of the file of the name `part` beside this name; `None` when there is none, or something that
    /// [`Place::begin`] did not make.
    ///
    /// # Errors
    /// As the file system's.
    pub fn part_size(&self, part: &str) -> Result<Option<u64>, PlaceError> {
        match rustix::fs::statat(&self.folder, part, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
            Ok(stat) => Ok(is_ours(&stat).then_some(stat.st_size.unsigned_abs())),
        }
    }

    /// Cuts the file of the name `part` beside this name to `size` bytes.
    ///
    /// # Errors
    /// As the file system's; [`PlaceError::NotAFile`] for something that [`Place::begin`] did not make.
    pub fn cut_part(&self, part: &str, size: u64) -> Result<(), PlaceError> {
        // A pipe would wait for its reader.
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.folder, part, flags, Mode::empty())?;
        if !is_ours(&rustix::fs::fstat(&file)?) {
            return Err(PlaceError::NotAFile);
        }
        Ok(rustix::fs::ftruncate(&file, size)?)
    }

    /// Removes the file of the name `part` beside this name; whether there was one.
    pub fn remove(&self, part: &str) -> bool {
        rustix::fs::unlinkat(&self.folder, part, AtFlags::empty()).is_ok()
    }
}

/// Whether what `path` names below `root` may be read; links are followed. `root` may be a file, which
/// every path names then.
///
/// # Errors
/// [`PlaceError`].
pub fn may_read(root: &Path, path: &RoutePath) -> Result<(), PlaceError> {
    match Place::open(root, path, false) {
        Ok(place) => {
            Ok(rustix::fs::accessat(&place.folder, place.name.as_str(), Access::READ_OK, AtFlags::EACCESS)?)
        }
        Err(PlaceError::IsAFolder | PlaceError::NotAFolder) => {
            Ok(rustix::fs::accessat(rustix::fs::CWD, root, Access::READ_OK, AtFlags::EACCESS)?)
        }
        Err(error) => Err(error),
    }
}

/// Whether it can be what [`Place::begin`] made: a file with one name.
fn is_ours(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && stat.st_nlink == 1
}

/// Where an opened file is, as the kernel says.
fn whereabouts(fd: &OwnedFd) -> io::Result<PathBuf> {
    use std::os::fd::AsRawFd as _;
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Removes every hidden file whose name begins with `prefix` below `root`; for a share whose uploads
/// nobody remembers. Whether all of it was seen.
pub fn sweep(root: &Path, prefix: &str) -> bool {
    let mut seen = 0;
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        for entry in entries.flatten() {
            seen += 1;
            if seen > MAX_SWEPT {
                return false;
            }
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file()
                && entry
                    .file_name()
                    .to_str()
                    .is_some_and(|name| name.starts_with(prefix) && super::path::is_part(name))
            {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn path(text: &str) -> RoutePath {
        RoutePath::parse(&format!("/xfer/{text}")).unwrap()
    }

    fn root() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        let (root, outside) = (base.join("root"), base.join("outside"));
        std::fs::create_dir(&root).unwrap();
        std::fs::create_dir(&outside).unwrap();
        (dir, root, outside)
    }

    fn pipe(at: &Path) {
        rustix::fs::mknodat(rustix::fs::CWD, at, FileType::Fifo, Mode::RWXU, 0).unwrap();
    }

    #[test]
    fn missing_folders_are_made_beneath_the_root_only() {
        let (_dir, root, outside) = root();
        symlink(&outside, root.join("out")).unwrap();
        symlink(outside.join("nothing"), root.join("dangling")).unwrap();
        std::fs::create_dir(root.join("in")).unwrap();
        symlink(root.join("in"), root.join("alias")).unwrap();
        std::fs::write(root.join("file"), "x").unwrap();
        assert!(matches!(Place::open(&root, &path("a/b/c"), false), Err(PlaceError::NoFolder)));
        Place::open(&root, &path("a/b/c"), true).unwrap();
        assert!(root.join("a/b").is_dir() && !root.join("a/b/c").exists());
        let aliased = Place::open(&root, &path("alias/sub/f"), true).unwrap();
        assert!(root.join("in/sub").is_dir());
        assert_eq!(
            aliased.real_path(&root).unwrap(),
            Some(path("in/sub/f")),
            "whichever way it was asked for"
        );
        for to in ["out/f", "out/new/f", "dangling/f"] {
            assert!(matches!(Place::open(&root, &path(to), true), Err(PlaceError::Outside)), "{to}");
        }
        assert!(matches!(Place::open(&root, &path("file/f"), true), Err(PlaceError::NotAFolder)));
        assert!(matches!(Place::open(&root, &path(""), true), Err(PlaceError::IsAFolder)));
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
    }

    #[test]
    fn a_part_begins_empty_with_the_rights_of_what_it_replaces() {
        let (_dir, root, outside) = root();
        let part = path("f").part("0123abcd");
        let part = part.name();
        std::fs::write(root.join("f"), "old").unwrap();
        std::fs::set_permissions(root.join("f"), std::fs::Permissions::from_mode(0o750)).unwrap();
        let place = Place::open(&root, &path("f"), true).unwrap();
        assert_eq!(place.part_size(part).unwrap(), None);
        place.begin(&root, part).unwrap();
        let meta = std::fs::metadata(root.join(part)).unwrap();
        assert_eq!((meta.len(), meta.permissions().mode() & 0o777), (0, 0o750));
        std::fs::write(root.join(part), "12345").unwrap();
        assert_eq!(place.part_size(part).unwrap(), Some(5));
        place.begin(&root, part).unwrap();
        assert_eq!(place.part_size(part).unwrap(), Some(0));
        std::fs::create_dir(root.join("d")).unwrap();
        symlink(outside.join("secret"), root.join("out")).unwrap();
        let begin = |name: &str| Place::open(&root, &path(name), true).unwrap().begin(&root, part);
        assert!(matches!(begin("d"), Err(PlaceError::IsAFolder)));
        assert!(matches!(begin("out"), Err(PlaceError::Outside)));
        // What somebody puts under the hidden name makes way, and is nothing that was kept.
        std::fs::write(outside.join("victim"), "untouched").unwrap();
        for trap in ["a link", "a pipe", "another name of a file"] {
            assert!(place.remove(part));
            match trap {
                "a link" => symlink(outside.join("new"), root.join(part)).unwrap(),
                "a pipe" => pipe(&root.join(part)),
                _ => std::fs::hard_link(outside.join("victim"), root.join(part)).unwrap(),
            }
            assert_eq!(place.part_size(part).unwrap(), None, "{trap}");
            assert!(place.cut_part(part, 0).is_err(), "{trap}");
            place.begin(&root, part).unwrap();
            assert_eq!(place.part_size(part).unwrap(), Some(0), "{trap}");
        }
        assert_eq!(std::fs::read(outside.join("victim")).unwrap(), b"untouched");
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
        // Nor does an upload take away what is no file.
        pipe(&root.join("pipe"));
        assert!(matches!(begin("pipe"), Err(PlaceError::NotAFile)));
        assert!(root.join("pipe").exists());
    }

    #[test]
    fn what_is_to_be_new_replaces_nothing() {
        let (_dir, root, _) = root();
        let part = path("f").part("0123abcd");
        let part = part.name();
        let place = Place::open(&root, &path("f"), true).unwrap();
        for only_new in [true, false] {
            place.begin(&root, part).unwrap();
            place.put(&root, part, 0, only_new).unwrap();
        }
        place.begin(&root, part).unwrap();
        assert!(matches!(place.put(&root, part, 0, true), Err(PlaceError::Exists)));
        assert_eq!(place.part_size(part).unwrap(), Some(0), "it is still there");
    }

    #[test]
    fn only_what_arrived_is_put_in_place_and_only_over_a_file() {
        let (_dir, root, outside) = root();
        let part = path("f").part("0123abcd");
        let part = part.name();
        let place = Place::open(&root, &path("f"), true).unwrap();
        let put = || place.put(&root, part, 2, false);
        std::fs::write(outside.join("victim"), "AB").unwrap();
        for trap in ["nothing", "a link", "a pipe", "another name of a file", "another size", "a folder"] {
            place.begin(&root, part).unwrap();
            assert!(place.remove(part));
            let hidden = root.join(part);
            match trap {
                "nothing" => {}
                "a link" => symlink(outside.join("victim"), &hidden).unwrap(),
                "a pipe" => pipe(&hidden),
                "another name of a file" => std::fs::hard_link(outside.join("victim"), &hidden).unwrap(),
                "another size" => std::fs::write(&hidden, "ABC").unwrap(),
                _ => std::fs::create_dir(&hidden).unwrap(),
            }
            assert!(matches!(put(), Err(PlaceError::PartChanged)), "{trap}");
            assert!(!root.join("f").exists(), "{trap}");
        }
        assert!(matches!(place.begin(&root, part), Err(PlaceError::PartIsAFolder)));
        std::fs::remove_dir(root.join(part)).unwrap();
        // What has the name now counts, not what had it at the beginning.
        place.begin(&root, part).unwrap();
        std::fs::write(root.join(part), "CD").unwrap();
        pipe(&root.join("f"));
        assert!(matches!(put(), Err(PlaceError::NotAFile)));
        std::fs::remove_file(root.join("f")).unwrap();
        std::fs::write(root.join("f"), "old").unwrap();
        std::fs::set_permissions(root.join("f"), std::fs::Permissions::from_mode(0o604)).unwrap();
        put().unwrap();
        assert_eq!(std::fs::read(root.join("f")).unwrap(), b"CD");
        assert_eq!(std::fs::metadata(root.join("f")).unwrap().permissions().mode() & 0o777, 0o604);
    }

    #[test]
    fn a_sweep_takes_only_the_parts_of_its_share() {
        let (_dir, root, outside) = root();
        let name = |id: &str| path("f").part(id).name().to_owned();
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        symlink(&outside, root.join("out")).unwrap();
        let (ours, others) = (name("0123abcd"), name("0123abce"));
        for file in [root.join("a/b").join(&ours), root.join("a").join(&others), outside.join(&ours)] {
            std::fs::write(file, "x").unwrap();
        }
        assert!(sweep(&root, &super::super::path::part_prefix("0123abcd")));
        assert!(!root.join("a/b").join(&ours).exists());
        assert!(root.join("a").join(&others).exists() && outside.join(&ours).exists());
    }
}
