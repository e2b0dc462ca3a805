//! One installation, from the lock to the list: wait for other processes, fetch or copy into a
//! temporary file beside the target, check, unpack, put in place by a rename, note it down.
//!
//! A crash at any point leaves the old program or the new one, and at most temporary files, which
//! the next installation sweeps away. What is not ours is looked at before a byte is fetched: an
//! installation that cannot succeed must not download anything, however often it is asked for.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use sha2::{Digest as _, Sha256};
use tempfile::NamedTempFile;

use super::fetch::{self, FetchError};
use super::lookup;
use super::registry::{self, Entry};
use super::unpack::{self, UnpackError};
use super::{InstallError, Installed, Installer, Pin, Progress, Tool, blocking};
use crate::outbound::Url;

/// Where releases are, unless `A2MCP_DOWNLOAD_BASE` names a mirror.
const BASE: &str = "https://github.com";
/// How often a lock that another process holds is looked at.
const LOCK_LOOK: Duration = Duration::from_millis(100);
/// What another process may take beyond its download.
const LOCK_MARGIN: Duration = Duration::from_secs(60);
/// Ending of the temporary files.
const PART: &str = ".part";

/// Where the bytes come from.
enum Source {
    Url(Url),
    File(PathBuf),
}

impl Installer {
    /// Installs, with the process's turn held.
    pub(super) async fn install_alone(
        &self,
        tool: Tool,
        from: Option<&Path>,
        mut announce: impl AsyncFnMut(Progress),
    ) -> Result<Installed, InstallError> {
        let pin = self.pin(tool)?;
        let source = match from {
            Some(file) => Source::File(self.cwd.join(file)),
            None => Source::Url(self.mirror()?.below(&format!("{}/{}", pin.folder, pin.asset))),
        };
        let bin = self.bin().ok_or(InstallError::NoHome { tool })?;
        let _lock = self.lock(tool, &bin, &mut announce).await?;
        let lists = [Some(self.registry.clone()), self.shared_registry()];
        let target = bin.join(pin.program());
        let (looked_at, known) = (target.clone(), lists.clone());
        let standing = blocking(move || Standing::of(&pin, &looked_at, &known)).await?;
        let entry = match standing {
            Standing::Current(entry) => {
                let noted = entry.clone();
                blocking(move || {
                    // It works without as well: the other list says whose the file is.
                    if let Err(error) = note_down(tool, &noted, &lists) {
                        tracing::warn!("{error}");
                    }
                })
                .await;
                entry
            }
            Standing::Free | Standing::Ours => {
                announce(Progress::Installing {
                    asset: pin.asset,
                    sha256: pin.sha256,
                    version: pin.version,
                    from: match &source {
                        Source::Url(url) => url.to_string(),
                        Source::File(file) => super::shown(file),
                    },
                })
                .await;
                let asset = self.bring(&pin, &bin, &source, &mut announce).await?;
                announce(Progress::Unpacking).await;
                let limit = self.limits.unpacked;
                let replace = matches!(standing, Standing::Ours);
                blocking(move || {
                    let (program, entry) = unpacked(&pin, asset, &bin, target, limit)?;
                    // First: a program that no list names would be taken for somebody else's.
                    note_down(tool, &entry, &lists)?;
                    put_in_place(tool, program, &entry.path, replace)?;
                    Ok::<_, InstallError>(entry)
                })
                .await?
            }
        };
        // Something may take it away at once (an antivirus program), or change it.
        match self.installed(tool).await? {
            Some(Entry { path, .. }) => self.describe(tool, path, true).await,
            None => {
                let Entry { path, sha256, .. } = entry;
                Err(InstallError::Vanished { tool, path, sha256, found: None })
            }
        }
    }

    fn mirror(&self) -> Result<Url, InstallError> {
        let base = match &self.base {
            None => BASE,
            Some(given) => given.to_str().ok_or(InstallError::Mirror { why: "it is not Unicode" })?,
        };
        let url = Url::parse(base).map_err(|why| InstallError::Mirror { why })?;
        if url.has_query() { Err(InstallError::Mirror { why: "it has a query" }) } else { Ok(url) }
    }

    /// Waits until no other process installs this program.
    async fn lock(
        &self,
        tool: Tool,
        bin: &Path,
        announce: &mut impl AsyncFnMut(Progress),
    ) -> Result<File, InstallError> {
        let (dir, limit) = (bin.to_owned(), self.limits.total + LOCK_MARGIN);
        let path = bin.join(format!(".a2mcp-{tool}.lock"));
        let opened = path.clone();
        let file = blocking(move || {
            fs::create_dir_all(&dir).map_err(stored(tool, "create", &dir))?;
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(false).mode(0o600);
            options.custom_flags(OFlags::NOFOLLOW.bits() as i32);
            options.open(&opened).map_err(stored(tool, "write", &opened))
        })
        .await?;
        let asked = Instant::now();
        let mut told = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(error)) => return Err(stored(tool, "lock", &path)(error)),
                Err(TryLockError::WouldBlock) if asked.elapsed() >= limit => {
                    return Err(InstallError::Busy { tool, lock: path, waited: asked.elapsed() });
                }
                Err(TryLockError::WouldBlock) => {}
            }
            if !told {
                announce(Progress::Waiting).await;
                told = true;
            }
            tokio::time::sleep(LOCK_LOOK).await;
        }
    }

    /// The checked asset, in a temporary file.
    async fn bring(
        &self,
        pin: &Pin,
        bin: &Path,
        source: &Source,
        announce: &mut impl AsyncFnMut(Progress),
    ) -> Result<Checked, InstallError> {
        let (tool, dir) = (pin.tool, bin.to_owned());
        let file = blocking(move || {
            sweep(&dir, tool);
            temporary(&dir, tool)
        })
        .await?;
        let (bytes, found) = match source {
            Source::Url(url) => {
                let writer = file.as_file().try_clone().map_err(stored(tool, "write", bin))?;
                let fetched =
                    fetch::fetch(&self.outbound, url, &self.limits, pin.bytes, writer, announce).await;
                let fetched = fetched.map_err(|error| match error {
                    FetchError::Disk(error) => stored(tool, "write to", bin)(error),
                    FetchError::Download(problem) => {
                        InstallError::Download { tool, asset: pin.asset, url: url.to_string(), problem }
                    }
                })?;
                (fetched.bytes, fetched.sha256)
            }
            Source::File(from) => {
                let writer = file.as_file().try_clone().map_err(stored(tool, "write", bin))?;
                let (from, bin, limit) = (from.clone(), bin.to_owned(), self.limits.unpacked);
                blocking(move || copied(tool, &from, writer, &bin, limit)).await?
            }
        };
        if found == pin.sha256 {
            return Ok(Checked { file, is_program: pin.format == super::pins::Format::Bare });
        }
        // Somebody may have unpacked it already.
        let is_download = matches!(source, Source::Url(_));
        if !is_download && Some(found.as_str()) == pin.program_sha256 {
            return Ok(Checked { file, is_program: true });
        }
        let from = match source {
            Source::Url(url) => format!("what {url} gave ({bytes} bytes)"),
            Source::File(file) => format!("{} ({bytes} bytes)", super::shown(file)),
        };
        Err(InstallError::WrongHash {
            tool,
            asset: pin.asset,
            from,
            is_download,
            found,
            expected: pin.sha256,
        })
    }
}

/// An asset whose hash is the pinned one.
struct Checked {
    file: NamedTempFile,
    is_program: bool,
}

/// What is at the target.
enum Standing {
    /// Nothing.
    Free,
    /// Another version that we put there, or one that is to be put there again.
    Ours,
    /// The pinned build.
    Current(Entry),
}

impl Standing {
    fn of(pin: &Pin, target: &Path, lists: &[Option<PathBuf>]) -> Result<Standing, InstallError> {
        let tool = pin.tool;
        let found = match fs::symlink_metadata(target) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Standing::Free),
            Err(error) => return Err(stored(tool, "look at", target)(error)),
            Ok(found) => found,
        };
        let hash = lookup::sha256(target).map_err(stored(tool, "read", target))?;
        let known = lists.iter().flatten().filter_map(|list| registry::read(list, tool));
        let ours = known.into_iter().find(|entry| entry.path == target && entry.sha256 == hash);
        match ours {
            // A link was made by somebody else, whatever it leads to.
            _ if !found.is_file() => {}
            Some(entry) if entry.asset_sha256 == pin.sha256 => return Ok(Standing::Current(entry)),
            Some(_) => return Ok(Standing::Ours),
            // The lists were lost, but these are the very bytes.
            None if pin.known_program_hash() == Some(&hash) => {
                return Ok(Standing::Current(entry(pin, target.to_owned(), hash)));
            }
            None => {}
        }
        Err(InstallError::Foreign { tool, path: target.to_owned(), sha256: hash })
    }
}

/// The program, ready to be put in place, and what is to be said of it.
fn unpacked(
    pin: &Pin,
    asset: Checked,
    bin: &Path,
    target: PathBuf,
    limit: u64,
) -> Result<(NamedTempFile, Entry), InstallError> {
    let tool = pin.tool;
    let (program, hash) = if asset.is_program {
        (asset.file, pin.known_program_hash().unwrap_or(pin.sha256).to_owned())
    } else {
        let mut program = temporary(bin, tool)?;
        let hash = unpack::unpack(asset.file.as_file(), pin, program.as_file_mut(), limit);
        let hash = hash.map_err(|error| match error {
            UnpackError::Archive(why) => InstallError::Unpack { tool, asset: pin.asset, why },
            UnpackError::Disk(error) => stored(tool, "write to", bin)(error),
        })?;
        if let Some(expected) = pin.program_sha256.filter(|expected| *expected != hash) {
            let why = format!("the program inside has sha256 {hash}, expected {expected}");
            return Err(InstallError::Unpack { tool, asset: pin.asset, why });
        }
        (program, hash)
    };
    let file = program.as_file();
    let finished = file.set_permissions(Permissions::from_mode(0o755)).and_then(|()| file.sync_all());
    finished.map_err(stored(tool, "write to", bin))?;
    Ok((program, entry(pin, target, hash)))
}

fn put_in_place(
    tool: Tool,
    program: NamedTempFile,
    target: &Path,
    replace: bool,
) -> Result<(), InstallError> {
    if replace {
        program.persist(target).map_err(|error| stored(tool, "write", target)(error.error))?;
    } else {
        program.persist_noclobber(target).map_err(|error| match error.error.kind() {
            io::ErrorKind::AlreadyExists => {
                let sha256 = lookup::sha256(target).unwrap_or_else(|error| error.to_string());
                InstallError::Foreign { tool, path: target.to_owned(), sha256 }
            }
            _ => stored(tool, "write", target)(error.error),
        })?;
    }
    Ok(())
}

fn note_down(tool: Tool, entry: &Entry, lists: &[Option<PathBuf>]) -> Result<(), InstallError> {
    lists
        .iter()
        .flatten()
        .try_for_each(|list| registry::write(list, tool, entry).map_err(stored(tool, "write", list)))
}

fn entry(pin: &Pin, path: PathBuf, sha256: String) -> Entry {
    Entry {
        version: pin.version.to_owned(),
        asset: pin.asset.to_owned(),
        asset_sha256: pin.sha256.to_owned(),
        path,
        sha256,
    }
}

fn temporary(bin: &Path, tool: Tool) -> Result<NamedTempFile, InstallError> {
    let prefix = prefix(tool);
    let made = tempfile::Builder::new().prefix(&prefix).suffix(PART).tempfile_in(bin);
    made.map_err(stored(tool, "write to", bin))
}

fn prefix(tool: Tool) -> String {
    format!(".a2mcp-{tool}-")
}

/// Removes what an installation that was killed left behind. Needs the lock.
fn sweep(bin: &Path, tool: Tool) {
    let prefix = prefix(tool);
    let is_left =
        |name: &OsStr| name.to_str().is_some_and(|name| name.starts_with(&prefix) && name.ends_with(PART));
    for left in fs::read_dir(bin).into_iter().flatten().flatten().filter(|left| is_left(&left.file_name())) {
        let _ = fs::remove_file(left.path());
    }
}

/// Copies a file that somebody fetched by other means; its size and hash.
fn copied(
    tool: Tool,
    from: &Path,
    mut to: File,
    bin: &Path,
    limit: u64,
) -> Result<(u64, String), InstallError> {
    // Opening a pipe would wait for its writer.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(from);
    let mut from_file = opened.map_err(stored(tool, "read", from))?;
    let found = from_file.metadata().map_err(stored(tool, "read", from))?;
    if !found.is_file() {
        return Err(stored(tool, "read", from)(io::Error::other("it is not a file")));
    }
    if found.len() > limit {
        return Err(stored(tool, "read", from)(io::Error::other(format!("it is larger than {limit} bytes"))));
    }
    let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; 256 * 1024]);
    loop {
        let n = from_file.read(&mut buffer).map_err(stored(tool, "read", from))?;
        if n == 0 {
            return Ok((bytes, lookup::hex(&hash.finalize())));
        }
        to.write_all(&buffer[..n]).map_err(stored(tool, "write to", bin))?;
        hash.update(&buffer[..n]);
        bytes += n as u64;
    }
}

fn stored(tool: Tool, step: &'static str, path: &Path) -> impl Fn(io::Error) -> InstallError + use<> {
    let path = path.to_owned();
    move |source| InstallError::Store { tool, step, path: path.clone(), cause: Arc::new(source) }
}
