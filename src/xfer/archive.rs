//! Whether an archive of a folder is whole. The file server writes it as it goes: what it cannot open
//! ends the archive early, in good order as far as HTTP is concerned, and a folder it cannot read is
//! left out without a word.
//!
//! So we look at the folder ourselves before the first byte leaves ([`Survey`]), and at the end of what
//! passes ([`Ending`]): between the two a file may vanish or change its rights.

use std::collections::HashSet;
use std::fs::ReadDir;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags};

use super::path::{RoutePath, is_part};

/// So many entries are looked at in one step.
const STEP: usize = 4096;

/// A walk through a folder that finds what an archive of it would lack. Links are followed where the file
/// server follows them; what leads out of the share, to nothing, or is neither file nor folder does not
/// belong to an archive. Blocking, in steps: others wait for the same few threads.
pub struct Survey {
    root: PathBuf,
    folders: Vec<PathBuf>,
    open: Option<ReadDir>,
    /// Device and inode of the folders met so far: links may lead around in circles.
    seen: HashSet<(u64, u64)>,
}

/// How a step of a [`Survey`] ended.
#[derive(Debug)]
pub enum Step {
    /// There is more to look at.
    Goes,
    /// Everything can be read.
    Fine,
    /// This, as it is named below the root, cannot be.
    Lacks(PathBuf, io::Error),
}

impl Survey {
    /// Of the folder `path` below `root`, which is canonical.
    pub fn new(root: &Path, path: &RoutePath) -> Self {
        let folder = path.names().iter().fold(root.to_path_buf(), |folder, name| folder.join(name));
        Self { root: root.to_path_buf(), folders: vec![folder], open: None, seen: HashSet::new() }
    }

    /// Looks at the next entries.
    pub fn step(&mut self) -> Step {
        for _ in 0..STEP {
            let (path, looked) = match self.open.as_mut().map(Iterator::next) {
                Some(Some(Ok(entry))) => {
                    let path = entry.path();
                    let looked = self.look(&entry);
                    (path, looked)
                }
                // The rest of this folder is unknown.
                Some(Some(Err(error))) => (self.root.clone(), Err(error)),
                Some(None) | None => {
                    let Some(folder) = self.folders.pop() else { return Step::Fine };
                    let opened = self.enter(&folder);
                    (folder, opened)
                }
            };
            match looked {
                // It has gone meanwhile: nothing to lack.
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    let path = path.strip_prefix(&self.root).map(Path::to_path_buf).unwrap_or(path);
                    return Step::Lacks(path, error);
                }
                _ => {}
            }
        }
        Step::Goes
    }

    fn enter(&mut self, folder: &Path) -> io::Result<()> {
        self.open = None;
        let meta = folder.metadata()?;
        if self.seen.insert((meta.dev(), meta.ino())) {
            self.open = Some(folder.read_dir()?);
        }
        Ok(())
    }

    fn look(&mut self, entry: &std::fs::DirEntry) -> io::Result<()> {
        let (path, name) = (entry.path(), entry.file_name());
        let mut kind = entry.file_type()?;
        if kind.is_symlink() {
            match path.canonicalize() {
                Ok(target) if target.starts_with(&self.root) => kind = target.symlink_metadata()?.file_type(),
                _ => return Ok(()),
            }
        }
        let Some(name) = name.to_str() else {
            let error = io::Error::new(io::ErrorKind::InvalidFilename, "its name is not UTF-8");
            return if kind.is_dir() || kind.is_file() { Err(error) } else { Ok(()) };
        };
        if kind.is_dir() {
            self.folders.push(path);
        } else if kind.is_file() && !is_part(name) {
            rustix::fs::accessat(rustix::fs::CWD, &path, Access::READ_OK, AtFlags::EACCESS)?;
        }
        Ok(())
    }
}

/// The end record of an archive without a comment.
const END: usize = 22;
const END_SIGNATURE: &[u8] = b"PK\x05\x06";
/// What stands before it when the archive is too large for 32 bits: another end record, and where that is.
const END64: usize = 56;
const LOCATOR: usize = 20;
const LOCATOR_SIGNATURE: &[u8] = b"PK\x06\x07";

/// The end of an archive that passes by.
pub struct Ending {
    length: u64,
    /// The last bytes so far.
    tail: [u8; LOCATOR + END],
}

impl Default for Ending {
    fn default() -> Self {
        Self { length: 0, tail: [0; LOCATOR + END] }
    }
}

impl Ending {
    /// The next bytes.
    pub fn pass(&mut self, piece: &[u8]) {
        self.length += piece.len() as u64;
        let new = &piece[piece.len().saturating_sub(self.tail.len())..];
        self.tail.rotate_left(new.len());
        let at = self.tail.len() - new.len();
        self.tail[at..].copy_from_slice(new);
    }

    /// Whether what passed ends as an archive does: with the record that says where its directory is, and
    /// that is right. (Files in an archive may be archives; an early end behind one is none.)
    pub fn is_whole(&self) -> bool {
        let Some(end_at) = self.length.checked_sub(END as u64) else { return false };
        let (locator, end) = self.tail.split_at(LOCATOR);
        let number =
            |bytes: &[u8]| bytes.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
        let has_comment = end[20..] != [0, 0];
        if !end.starts_with(END_SIGNATURE) || has_comment {
            return false;
        }
        let is_behind_directory = number(&end[12..16]) + number(&end[16..20]) == end_at;
        let is_behind_locator = locator.starts_with(LOCATOR_SIGNATURE)
            && number(&locator[8..16]).saturating_add((END64 + LOCATOR) as u64) == end_at;
        is_behind_directory || is_behind_locator
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn survey(root: &Path, path: &str) -> Step {
        let path = RoutePath::parse(&format!("/xfer/{path}")).unwrap();
        let mut survey = Survey::new(root, &path);
        loop {
            match survey.step() {
                Step::Goes => {}
                end => return end,
            }
        }
    }

    #[test]
    fn what_belongs_to_an_archive_is_looked_at_and_nothing_else() {
        use std::os::unix::ffi::OsStrExt as _;
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        let (root, outside) = (base.join("root"), base.join("outside"));
        let odd = std::ffi::OsStr::from_bytes(b"odd\xff");
        for folder in [root.join("a/b"), root.join("c"), outside.clone()] {
            std::fs::create_dir_all(folder).unwrap();
        }
        std::fs::write(outside.join(odd), "").unwrap();
        std::fs::write(root.join("a/b/f"), "").unwrap();
        for n in 0..STEP {
            std::fs::write(root.join("a/b").join(n.to_string()), "").unwrap();
        }
        symlink(&outside, root.join("a/out")).unwrap();
        symlink("nothing", root.join("a/dangling")).unwrap();
        symlink("itself", root.join("a/itself")).unwrap();
        symlink("..", root.join("a/around")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(root.join("a/socket")).unwrap();
        assert!(matches!(survey(&root, ""), Step::Fine));
        std::fs::write(root.join("c").join(odd), "").unwrap();
        // Only what is in the folder, or what links in it lead to.
        assert!(matches!(survey(&root, "a/b"), Step::Fine));
        let Step::Lacks(path, _) = survey(&root, "a") else { panic!("not met through the link") };
        assert_eq!(path.as_os_str().as_bytes(), b"a/around/c/odd\xff");
    }

    fn end(size: u32, offset: u32) -> Vec<u8> {
        [END_SIGNATURE, &[0; 8], &size.to_le_bytes(), &offset.to_le_bytes(), &[0, 0]].concat()
    }

    fn is_whole(bytes: &[u8], piece: usize) -> bool {
        let mut ending = Ending::default();
        bytes.chunks(piece).for_each(|piece| ending.pass(piece));
        ending.is_whole()
    }

    #[test]
    fn an_archive_is_whole_when_its_last_record_is_right() {
        let one = [&[1; 30][..], &[2; 46], &end(46, 30)].concat();
        let locator = [LOCATOR_SIGNATURE, &[0; 4], &76u64.to_le_bytes(), &[1, 0, 0, 0]].concat();
        let large = [&[1; 30][..], &[2; 46], &[3; 56], &locator, &end(u32::MAX, u32::MAX)].concat();
        for whole in [end(0, 0), one.clone(), large] {
            for piece in [1, 7, 21, 22, 42, 1000] {
                assert!(is_whole(&whole, piece), "{} by {piece}", whole.len());
                for length in 0..whole.len() {
                    assert!(!is_whole(&whole[..length], piece), "{length} of {}", whole.len());
                }
            }
        }
        // An archive that was packed into one that broke off.
        assert!(!is_whole(&[&[1; 30][..], &one].concat(), 9));
        assert!(!is_whole(&[&one[..], &[0; 16]].concat(), 9));
    }
}
