//! Finding a program that is there already, and saying which one it is: path, hash, and the version
//! it gives itself. Blocks for as long as the disk does; called from `spawn_blocking`.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use super::Tool;
use crate::process;

/// How long a program may think about its version.
const VERSION_LIMIT: Duration = Duration::from_secs(5);

/// The first file called `name` in the directories of `path` that may be run. Relative directories
/// are passed over: what they mean would depend on where the host was started.
pub(super) fn on_path(path: &OsStr, name: &str) -> Option<PathBuf> {
    std::env::split_paths(path)
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(name))
        .find(|file| file.is_file() && may_run(file).is_ok())
}

/// Whether this user may run `file`.
pub(super) fn may_run(file: &Path) -> io::Result<()> {
    if !std::fs::metadata(file)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file"));
    }
    Ok(rustix::fs::access(file, rustix::fs::Access::EXEC_OK)?)
}

/// The hash of a file, lower-case hex.
pub(super) fn sha256(file: &Path) -> io::Result<String> {
    let mut file = File::open(file)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 256 * 1024];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hex(&hash.finalize())),
            Ok(n) => hash.update(&buffer[..n]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What the program calls its version: the first word of `--version`'s output that begins with a
/// digit. `None` when it gives none in time.
///
/// # Errors
/// When it cannot be run at all.
pub(super) async fn version(tool: Tool, program: &Path) -> io::Result<Option<String>> {
    let args = [OsStr::from_bytes(b"--version")];
    let said = process::ask(program, &args, tool.scrubbed_env(), VERSION_LIMIT).await?;
    let mut words = said.split_whitespace().take(20);
    let version = words.find(|word| word.trim_start_matches('v').starts_with(|c: char| c.is_ascii_digit()));
    Ok(version.map(|word| crate::text::clean(word.trim_start_matches('v'), 40).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn put(file: &Path, mode: u32) {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, "x").unwrap();
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn the_first_file_that_may_be_run_is_found() {
        let tmp = tempfile::tempdir().unwrap();
        let at = |name: &str| tmp.path().join(name);
        std::fs::create_dir_all(at("a/dufs")).unwrap();
        put(&at("b/dufs"), 0o644);
        put(&at("c/dufs"), 0o755);
        put(&at("d/dufs"), 0o755);
        let path = std::env::join_paths([at("none"), at("a"), at("b"), at("c"), at("d")]).unwrap();
        assert_eq!(on_path(&path, "dufs"), Some(at("c/dufs")));
        assert_eq!(on_path(&path, "cloudflared"), None);
        // Tests run in the package's directory, which has such a file.
        assert!(Path::new("tests/setup").is_file());
        assert_eq!(on_path(OsStr::new("::.:tests"), "setup"), None);
    }

    #[test]
    fn the_hash_is_that_of_the_bytes() {
        let tmp = tempfile::tempdir().unwrap();
        put(&tmp.path().join("x"), 0o600);
        let expected = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881";
        assert_eq!(sha256(&tmp.path().join("x")).unwrap(), expected);
    }
}
