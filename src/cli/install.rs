//! `a2mcp install omp` and `a2mcp uninstall omp`: the shim as `<agentDir>/extensions/a2mcp/`, from
//! files inside this binary, with the path of this binary beside them. No other file is touched.
//!
//! A directory is ours when it holds a `binary.json` as we write it; anything else is left alone
//! unless forced. The new directory is made outside `extensions/` (the host loads whatever it finds
//! there) and moved into place whole, so a host that starts meanwhile finds the old or the new one.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::config::AgentDir;
use crate::text;

/// Names the binary the shim spawns, and marks the directory as ours.
pub const BINARY_FILE: &str = "binary.json";

/// A file of the shim: its path inside the extension directory, and its text.
pub type ShimFile = (&'static str, &'static str);

macro_rules! shim_files {
    ($($name:literal)*) => { &[$(($name, include_str!(concat!("../../host-shim/omp/", $name)))),*] };
}

/// The shim for omp: what its `package.json` names as its files, and that file itself.
pub const OMP_SHIM: &[ShimFile] = shim_files![
    "approvals.ts"
    "asker.ts"
    "background.ts"
    "bridge.ts"
    "calls.ts"
    "cards.ts"
    "catalogue.ts"
    "command.ts"
    "deny-api.ts"
    "deny-plan.ts"
    "deny.ts"
    "environment.ts"
    "frames.ts"
    "host-llm.ts"
    "index.ts"
    "link.ts"
    "main.ts"
    "notices.ts"
    "outcome.ts"
    "package.json"
    "placeholder.ts"
    "progress.ts"
    "quiet.ts"
    "replace.ts"
    "results.ts"
    "supervisor.ts"
    "tripwire.ts"
];

/// Arguments of `a2mcp install omp` and `a2mcp uninstall omp`.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct OmpArgs {
    /// Install a binary from a build directory; replace or remove what a2mcp did not install.
    #[arg(long)]
    pub force: bool,
}

/// Why nothing was installed or removed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// The path of the running binary is not known or stale.
    #[error("cannot tell where this binary is ({reason}); start it by its full path")]
    NoBinary {
        /// What is wrong.
        reason: String,
    },
    /// Built from a source tree without the shim's files.
    #[error("this binary was built without the shim; build it from a complete source tree")]
    NoShim,
    /// A build tree is cleaned or rebuilt at any time, under the running host.
    #[error(
        "{} lies in a build directory (target/), where it may vanish; copy it to a lasting place such as \
         ~/.local/bin and run that one, or use --force",
        shown(.binary)
    )]
    BuildTree {
        /// This binary.
        binary: PathBuf,
    },
    /// The directory is there and was not made by a2mcp.
    #[error("{} was not installed by a2mcp; move it away, or use --force to {verb} it", shown(.dir))]
    Foreign {
        /// The extension directory.
        dir: PathBuf,
        /// What force would do: `replace` or `remove`.
        verb: &'static str,
    },
    /// A step failed; what was there before is still there.
    #[error("cannot {step} {}", shown(.path))]
    Io {
        /// What was being done.
        step: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

#[derive(Serialize, Deserialize)]
struct Binary {
    binary: PathBuf,
    version: String,
}

/// Installs `files` for the binary at `binary`; the text says what was done, what is next and how to
/// undo it.
pub fn install(
    dir: &AgentDir,
    files: &[ShimFile],
    binary: &Path,
    args: OmpArgs,
) -> Result<String, InstallError> {
    if files.is_empty() {
        return Err(InstallError::NoShim);
    }
    let build_tree = binary.components().any(|part| part == Component::Normal("target".as_ref()));
    if build_tree && !args.force {
        return Err(InstallError::BuildTree { binary: binary.to_path_buf() });
    }
    let target = dir.extension_dir();
    let found = Found::at(&target)?;
    if found == Found::Foreign && !args.force {
        return Err(InstallError::Foreign { dir: target, verb: "replace" });
    }
    let marker = Binary { binary: binary.to_path_buf(), version: env!("CARGO_PKG_VERSION").to_owned() };
    let marker = serde_json::to_string_pretty(&marker)
        .map_err(|_| InstallError::NoBinary { reason: "its path is not Unicode".into() })?;
    let mut contents: Vec<(&str, &str)> = files.to_vec();
    contents.push((BINARY_FILE, &marker));

    let done = if found == Found::Ours && is_current(&target, &contents) {
        "The shim is installed and up to date"
    } else {
        dir.create().map_err(io_error("create", dir.root()))?;
        let extensions = target.parent().unwrap_or(dir.root());
        crate::config::create_private_dir(extensions).map_err(io_error("create", extensions))?;
        let staged = stage(dir.root(), &contents)?;
        swap(dir.root(), staged.path(), &target)?;
        if found == Found::Nothing { "Installed the shim" } else { "Replaced the shim" }
    };
    Ok(format!(
        "{done}: {}\nIt starts {} (version {}).\n\
         Next: start omp, or restart one that runs; it then shows the bridge's URL. `a2mcp connect` configures a client.\n\
         Undo: {}",
        shown(&target),
        shown(binary),
        env!("CARGO_PKG_VERSION"),
        undo(binary, dir),
    ))
}

/// Removes the shim. Config, token, audit and state stay; nothing installed is fine.
pub fn uninstall(dir: &AgentDir, args: OmpArgs) -> Result<String, InstallError> {
    let target = dir.extension_dir();
    match Found::at(&target)? {
        Found::Nothing => return Ok(format!("Nothing to remove: {} does not exist", shown(&target))),
        Found::Foreign if !args.force => return Err(InstallError::Foreign { dir: target, verb: "remove" }),
        Found::Ours | Found::Foreign => {}
    }
    let aside = move_aside(dir.root(), &target)?;
    remove(&aside)?;
    Ok(format!(
        "Removed {}.\nAn omp that runs keeps its bridge until it ends. Config and audit stay: {} and {}",
        shown(&target),
        shown(dir.config_file()),
        shown(dir.audit_file()),
    ))
}

/// The absolute path of the running binary, links resolved: what the shim will spawn.
pub fn this_binary() -> Result<PathBuf, InstallError> {
    let no_binary = |reason: String| InstallError::NoBinary { reason };
    let path = std::env::current_exe().map_err(|error| no_binary(error.to_string()))?;
    // After a replacement Linux reports "… (deleted)", which does not exist.
    path.canonicalize().map_err(|error| no_binary(format!("{}: {error}", shown(&path))))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Nothing,
    Ours,
    Foreign,
}

impl Found {
    fn at(target: &Path) -> Result<Found, InstallError> {
        match target.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
            Err(error) => return Err(io_error("look at", target)(error)),
            // A link is somebody's working copy.
            Ok(found) if !found.is_dir() => return Ok(Found::Foreign),
            Ok(_) => {}
        }
        let marker = fs::read(target.join(BINARY_FILE)).ok();
        let ours = marker.is_some_and(|bytes| serde_json::from_slice::<Binary>(&bytes).is_ok());
        Ok(if ours { Found::Ours } else { Found::Foreign })
    }
}

fn is_current(target: &Path, contents: &[(&str, &str)]) -> bool {
    let same = contents
        .iter()
        .all(|(name, text)| fs::read(target.join(name)).is_ok_and(|found| found == text.as_bytes()));
    // A file of an older version that is no longer part of the shim must go, too.
    same && count_files(target).is_ok_and(|count| count == contents.len())
}

fn count_files(dir: &Path) -> io::Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        count += if entry.file_type()?.is_dir() { count_files(&entry.path())? } else { 1 };
    }
    Ok(count)
}

/// Writes everything into a new private directory beside `extensions/`.
fn stage(root: &Path, contents: &[(&str, &str)]) -> Result<tempfile::TempDir, InstallError> {
    let staged = tempfile::Builder::new()
        .prefix(".a2mcp-install-")
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in(root)
        .map_err(io_error("create a directory in", root))?;
    for (name, text) in contents {
        let path = staged.path().join(name);
        let parent = path.parent().unwrap_or(staged.path());
        DirBuilder::new().recursive(true).mode(0o700).create(parent).map_err(io_error("create", parent))?;
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
            .map_err(io_error("write", &path))?;
    }
    Ok(staged)
}

/// Puts `staged` at `target`; what was there is removed afterwards, or put back on failure.
fn swap(root: &Path, staged: &Path, target: &Path) -> Result<(), InstallError> {
    let old = if target.symlink_metadata().is_ok() { Some(move_aside(root, target)?) } else { None };
    if let Err(error) = fs::rename(staged, target) {
        if let Some(old) = &old {
            let _ = fs::rename(old, target);
        }
        return Err(io_error("move the new shim to", target)(error));
    }
    old.as_deref().map_or(Ok(()), remove)
}

/// Moves `target` out of the host's sight, to a fresh name beside `extensions/`.
fn move_aside(root: &Path, target: &Path) -> Result<PathBuf, InstallError> {
    let aside = root.join(format!(".a2mcp-old-{}", uuid::Uuid::new_v4().simple()));
    fs::rename(target, &aside).map_err(io_error("move away", target))?;
    Ok(aside)
}

fn remove(path: &Path) -> Result<(), InstallError> {
    let is_dir = path.symlink_metadata().is_ok_and(|found| found.is_dir());
    let result = if is_dir { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    result.map_err(io_error("remove", path))
}

fn undo(binary: &Path, dir: &AgentDir) -> String {
    let quoted = |path: &Path| format!("'{}'", shown(path).replace('\'', r"'\''"));
    format!("{} uninstall omp --agent-dir {}", quoted(binary), quoted(dir.root()))
}

fn io_error(step: &'static str, path: &Path) -> impl Fn(io::Error) -> InstallError {
    let path = path.to_path_buf();
    move |source| InstallError::Io { step, path: path.clone(), source }
}

fn shown(path: &Path) -> String {
    text::clean(&path.to_string_lossy(), 400).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Env;

    #[test]
    fn the_embedded_shim_is_what_its_package_json_names() {
        #[derive(Deserialize)]
        struct Package {
            files: Vec<String>,
            version: String,
        }
        let embedded = |wanted: &str| OMP_SHIM.iter().find(|(name, _)| *name == wanted).unwrap().1;
        let package: Package = serde_json::from_str(embedded("package.json")).unwrap();
        let mut expected = package.files;
        expected.push("package.json".into());
        expected.sort();
        let mut names: Vec<_> = OMP_SHIM.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        assert_eq!(names, expected);
        assert_eq!(package.version, env!("CARGO_PKG_VERSION"), "shim and binary carry one version");
    }

    const FILES: &[ShimFile] = &[("index.ts", "export default 1;\n"), ("lib/frames.ts", "// frames\n")];
    const FORCE: OmpArgs = OmpArgs { force: true };
    const PLAIN: OmpArgs = OmpArgs { force: false };

    fn place() -> (tempfile::TempDir, AgentDir) {
        let tmp = tempfile::tempdir().unwrap();
        let dir = AgentDir::new(tmp.path().join("agent"), &Env::default());
        (tmp, dir)
    }

    fn bin() -> &'static Path {
        Path::new("/opt/a2mcp/bin/a2mcp")
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    /// What is in the agent directory besides `extensions`: leftovers of a swap.
    fn leftovers(dir: &AgentDir) -> Vec<PathBuf> {
        let entries = fs::read_dir(dir.root()).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| !path.ends_with("extensions")).collect()
    }

    #[test]
    fn the_shim_is_written_privately_with_the_path_of_the_binary() {
        let (_tmp, dir) = place();
        let said = install(&dir, FILES, bin(), PLAIN).unwrap();
        let target = dir.extension_dir();
        assert_eq!(fs::read_to_string(target.join("lib/frames.ts")).unwrap(), "// frames\n");
        let marker: serde_json::Value =
            serde_json::from_slice(&fs::read(target.join(BINARY_FILE)).unwrap()).unwrap();
        assert_eq!(marker["binary"], "/opt/a2mcp/bin/a2mcp");
        assert_eq!(marker["version"], env!("CARGO_PKG_VERSION"));
        assert_eq!((mode(&target), mode(&target.join("index.ts"))), (0o700, 0o600));
        assert_eq!(leftovers(&dir), Vec::<PathBuf>::new());
        let undo =
            format!("Undo: '/opt/a2mcp/bin/a2mcp' uninstall omp --agent-dir '{}'", dir.root().display());
        assert!(said.starts_with("Installed the shim: ") && said.ends_with(&undo), "{said}");
    }

    #[test]
    fn installing_again_changes_nothing_and_an_upgrade_replaces_everything() {
        let (_tmp, dir) = place();
        install(&dir, FILES, bin(), PLAIN).unwrap();
        assert!(install(&dir, FILES, bin(), PLAIN).unwrap().contains("up to date"));
        let newer: &[ShimFile] = &[("index.ts", "export default 2;\n")];
        assert!(install(&dir, newer, bin(), PLAIN).unwrap().starts_with("Replaced"));
        assert!(!dir.extension_dir().join("lib").exists());
        assert!(install(&dir, newer, Path::new("/usr/bin/a2mcp"), PLAIN).unwrap().starts_with("Replaced"));
        assert_eq!(leftovers(&dir), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_binary_in_a_build_tree_needs_force() {
        let (_tmp, dir) = place();
        let built = Path::new("/home/x/a2mcp/target/release/a2mcp");
        let error = install(&dir, FILES, built, PLAIN).unwrap_err().to_string();
        assert!(error.contains("target/") && error.contains("--force"), "{error}");
        assert!(!dir.root().exists());
        install(&dir, FILES, built, FORCE).unwrap();
    }

    #[test]
    fn what_somebody_else_put_there_needs_force() {
        let (tmp, dir) = place();
        let target = dir.extension_dir();
        fs::create_dir_all(&target).unwrap();
        fs::write(target.join("index.ts"), "mine").unwrap();
        assert!(matches!(install(&dir, FILES, bin(), PLAIN), Err(InstallError::Foreign { .. })));
        assert!(matches!(uninstall(&dir, PLAIN), Err(InstallError::Foreign { .. })));
        assert_eq!(fs::read_to_string(target.join("index.ts")).unwrap(), "mine");
        install(&dir, FILES, bin(), FORCE).unwrap();
        uninstall(&dir, PLAIN).unwrap();
        // A link to a working copy: only the link is ever removed.
        let copy = tmp.path().join("copy");
        fs::create_dir(&copy).unwrap();
        fs::write(copy.join(BINARY_FILE), r#"{"binary":"/x","version":"0"}"#).unwrap();
        std::os::unix::fs::symlink(&copy, &target).unwrap();
        assert!(matches!(install(&dir, FILES, bin(), PLAIN), Err(InstallError::Foreign { .. })));
        install(&dir, FILES, bin(), FORCE).unwrap();
        assert!(copy.join(BINARY_FILE).exists() && !target.is_symlink());
    }

    #[test]
    fn uninstalling_leaves_everything_else() {
        let (_tmp, dir) = place();
        assert!(uninstall(&dir, PLAIN).unwrap().starts_with("Nothing to remove"));
        install(&dir, FILES, bin(), PLAIN).unwrap();
        fs::write(dir.config_file(), "{}").unwrap();
        fs::create_dir(dir.extension_dir().with_file_name("other")).unwrap();
        assert!(uninstall(&dir, PLAIN).unwrap().starts_with("Removed"));
        assert!(!dir.extension_dir().exists());
        assert!(dir.config_file().exists() && dir.extension_dir().with_file_name("other").exists());
        assert_eq!(leftovers(&dir), [dir.config_file()]);
    }

    #[test]
    fn the_running_binary_has_an_absolute_path() {
        assert!(this_binary().unwrap().is_absolute());
    }
}
