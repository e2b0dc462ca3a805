//! The config file on disk. Reading never needs the lock; writing a token does: two hosts started
//! together end with one token, and a rotation never loses somebody's other edits.
//!
//! A write changes the token's bytes and nothing else (unknown fields, key order, spacing and numbers
//! stay as they are), goes through a 0600 file in the same directory and a rename, and follows a
//! symbolic link to the file it names. Calls here block, up to [`LOCK_WAIT`] in the worst case: from
//! a running sidecar use a blocking task.

use std::fs::{File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use super::error::shown;
use super::fields::Fields;
use super::{AgentDir, Config, ConfigError, MAX_BYTES, Token};

/// How long a writer waits for another one. A dead holder gives the lock up by itself.
pub const LOCK_WAIT: Duration = Duration::from_secs(10);

/// What [`load`] found or made.
#[derive(Debug)]
pub struct Loaded {
    /// The validated settings; their `token` is the one below.
    pub config: Config,
    /// The token of the file, generated if there was none.
    pub token: Token,
    /// For the operator, one line each.
    pub warnings: Vec<String>,
}

/// Reads and validates the config. A missing file or token is made and written back.
pub fn load(dir: &AgentDir) -> Result<Loaded, ConfigError> {
    Store::of(dir, LOCK_WAIT).load()
}

/// Replaces the token and returns the new one; a missing file is created.
pub fn rotate(dir: &AgentDir) -> Result<Token, ConfigError> {
    Store::of(dir, LOCK_WAIT).rotate()
}

/// Reads and validates without writing anything, for `--check`; a missing file means the defaults.
pub fn load_readonly(dir: &AgentDir) -> Result<(Config, Vec<String>), ConfigError> {
    match Store::of(dir, LOCK_WAIT).read()? {
        Some(found) => Ok((found.config, found.warnings)),
        None => Ok((Config::default(), Vec::new())),
    }
}

/// One config file: the name people know it by, and the file behind the links.
struct Store<'a> {
    dir: &'a AgentDir,
    file: &'a Path,
    target: PathBuf,
    lock_wait: Duration,
}

struct Found {
    text: Vec<u8>,
    config: Config,
    warnings: Vec<String>,
}

impl<'a> Store<'a> {
    fn of(dir: &'a AgentDir, lock_wait: Duration) -> Store<'a> {
        let file = dir.config_file();
        Store { dir, file, target: super::follow_links(file), lock_wait }
    }

    fn load(&self) -> Result<Loaded, ConfigError> {
        let found = self.read()?;
        if let Some(loaded) = found.and_then(Found::complete) {
            return Ok(loaded);
        }
        let _lock = self.lock()?;
        // Somebody else may have been faster; the file is looked at again under the lock.
        let found = self.read()?;
        let (text, mut config, warnings) = match found {
            None => (None, Config::default(), Vec::new()),
            Some(Found { text, config, warnings }) => match config.token.clone() {
                Some(token) => return Ok(Loaded { config, token, warnings }),
                None => (Some(text), config, warnings),
            },
        };
        let token = self.write_new_token(text.as_deref())?;
        config.token = Some(token.clone());
        Ok(Loaded { config, token, warnings })
    }

    fn rotate(&self) -> Result<Token, ConfigError> {
        let _lock = self.lock()?;
        let text = self.read()?.map(|found| found.text);
        self.write_new_token(text.as_deref())
    }

    /// `None` when there is no file.
    fn read(&self) -> Result<Option<Found>, ConfigError> {
        let failed = |source| ConfigError::Read { file: self.file.to_path_buf(), source };
        // Without NONBLOCK, opening a pipe would wait for its writer.
        let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
        let file = match OpenOptions::new().read(true).custom_flags(flags).open(&self.target) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(ConfigError::NotAFile { file: self.file.to_path_buf() });
        }
        let mut text = Vec::new();
        (&file).take(MAX_BYTES as u64 + 1).read_to_end(&mut text).map_err(failed)?;
        let (config, mut warnings) = Config::parse(&text, self.file)?;
        if metadata.mode() & 0o077 != 0 && config.token.is_some() {
            let name = shown(self.file);
            warnings.push(format!(
                "{name}: other users of this machine may read the token (mode {:03o}); run: chmod 600 {name}",
                metadata.mode() & 0o777,
            ));
        }
        Ok(Some(Found { text, config, warnings }))
    }

    /// Takes the lock file beside the config. It is never removed: a removed lock file can be held by
    /// two processes at once.
    fn lock(&self) -> Result<File, ConfigError> {
        self.dir.create().map_err(|source| self.write_failed(source))?;
        let mut name = self.target.clone().into_os_string();
        name.push(".lock");
        let lock = PathBuf::from(name);
        let flags = OFlags::NOFOLLOW.bits() as i32;
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(flags)
            .open(&lock)
            .map_err(|source| self.write_failed(source))?;
        let until = Instant::now() + self.lock_wait;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(ConfigError::Locked { lock, waited: self.lock_wait });
                }
                Err(TryLockError::Error(source)) => return Err(self.write_failed(source)),
            }
        }
    }

    /// Puts a new token into `text` (`None`: a new file) and the result in place. Needs the lock.
    fn write_new_token(&self, text: Option<&[u8]>) -> Result<Token, ConfigError> {
        let token = Token::generate().map_err(|source| self.write_failed(source))?;
        let edited = match text {
            None => format!("{{\n  \"token\": \"{}\"\n}}\n", token.expose()),
            Some(text) => with_token(text, self.file, &token)?,
        };
        // What is about to replace a person's file must mean what they wrote, plus this token.
        let (check, _) = Config::parse(edited.as_bytes(), self.file)?;
        if check.token.as_ref() != Some(&token) {
            return Err(self.write_failed(io::Error::other("the token could not be placed in the text")));
        }
        self.replace(edited.as_bytes()).map_err(|source| self.write_failed(source))?;
        Ok(token)
    }

    fn replace(&self, bytes: &[u8]) -> io::Result<()> {
        let dir = self.target.parent().unwrap_or(Path::new("/"));
        let mut file = tempfile::Builder::new()
            .prefix(".a2mcp.json.")
            .permissions(Permissions::from_mode(0o600))
            .tempfile_in(dir)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(&self.target)?;
        Ok(())
    }

    fn write_failed(&self, source: io::Error) -> ConfigError {
        ConfigError::Write { file: self.file.to_path_buf(), source }
    }
}

impl Found {
    fn complete(self) -> Option<Loaded> {
        let Found { config, warnings, .. } = self;
        config.token.clone().map(|token| Loaded { config, token, warnings })
    }
}

/// `text` with its token replaced, or with one added as the first field in the file's own spacing.
fn with_token(text: &[u8], file: &Path, token: &Token) -> Result<String, ConfigError> {
    let fields = Fields::parse(text, file)?;
    let text = String::from_utf8_lossy(text);
    let quoted = format!("\"{}\"", token.expose());
    // `Fields` borrows from the bytes that `text` borrows too, so positions agree.
    if let Some(range) = fields.position(&text, "token") {
        return Ok(format!("{}{quoted}{}", &text[..range.start], &text[range.end..]));
    }
    let inside = text.find('{').map_or(0, |at| at + 1);
    let (head, rest) = text.split_at(inside);
    if fields.iter().next().is_none() {
        return Ok(format!("{head}\n  \"token\": {quoted}\n{}", rest.trim_start()));
    }
    let spacing = &rest[..rest.len() - rest.trim_start().len()];
    let after_colon = if spacing.is_empty() { "" } else { " " };
    Ok(format!("{head}{spacing}\"token\":{after_colon}{quoted},{rest}"))
}

#[cfg(test)]
mod tests {
    use super::super::Env;
    use super::*;

    struct Place {
        tmp: tempfile::TempDir,
        dir: AgentDir,
    }

    fn place() -> Place {
        let tmp = tempfile::tempdir().unwrap();
        let dir = AgentDir::new(tmp.path().join("agent"), &Env::default());
        Place { tmp, dir }
    }

    impl Place {
        fn with(text: &str) -> Place {
            let place = place();
            place.dir.create().unwrap();
            std::fs::write(place.dir.config_file(), text).unwrap();
            std::fs::set_permissions(place.dir.config_file(), Permissions::from_mode(0o600)).unwrap();
            place
        }

        fn text(&self) -> String {
            std::fs::read_to_string(self.dir.config_file()).unwrap()
        }

        fn mode(&self) -> u32 {
            std::fs::metadata(self.dir.config_file()).unwrap().mode() & 0o777
        }
    }

    #[test]
    fn a_missing_file_is_made_private_with_a_token() {
        let place = place();
        let loaded = load(&place.dir).unwrap();
        assert_eq!(loaded.config.token.as_ref(), Some(&loaded.token));
        assert_eq!(place.mode(), 0o600);
        assert_eq!(place.text(), format!("{{\n  \"token\": \"{}\"\n}}\n", loaded.token.expose()));
        assert_eq!(load(&place.dir).unwrap().token, loaded.token);
        let names: Vec<_> =
            std::fs::read_dir(place.dir.root()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "nothing but config and lock: {names:?}");
    }

    #[test]
    fn a_token_is_added_in_the_spacing_of_the_file_and_nothing_else_changes() {
        let cases = [
            ("{}", "{\n  \"token\": \"T\"\n}"),
            (" { \n } \n", " {\n  \"token\": \"T\"\n} \n"),
            ("{\"port\":1}", "{\"token\":\"T\",\"port\":1}"),
            ("{ \"port\": 1 }", "{ \"token\": \"T\", \"port\": 1 }"),
            (
                "{\n\t\"z\": 1.0e+2,\n\t\"a\": 12345678901234567890123,\n\t\"port\": 0\n}\n",
                "{\n\t\"token\": \"T\",\n\t\"z\": 1.0e+2,\n\t\"a\": 12345678901234567890123,\n\t\"port\": 0\n}\n",
            ),
        ];
        for (before, after) in cases {
            let place = Place::with(before);
            let token = load(&place.dir).unwrap().token;
            assert_eq!(place.text().replace(token.expose(), "T"), after);
            assert_eq!(place.mode(), 0o600);
        }
    }

    #[test]
    fn rotation_replaces_the_token_alone() {
        let old = "x".repeat(40);
        let text = format!("{{\"b\":1.10,\n \"\\u0074oken\" : \"{old}\" ,\"a\":{{\"token\":\"inner\"}} }}\n");
        let place = Place::with(&text);
        let token = rotate(&place.dir).unwrap();
        assert_eq!(place.text(), text.replace(&old, token.expose()));
        assert_eq!(load(&place.dir).unwrap().token, token);
        assert_ne!(rotate(&place.dir).unwrap(), token);
    }

    #[test]
    fn rotation_makes_a_missing_file() {
        let place = place();
        let token = rotate(&place.dir).unwrap();
        assert_eq!(load(&place.dir).unwrap().token, token);
    }

    #[test]
    fn a_malformed_file_is_left_untouched() {
        for text in ["", "{\"port\":true}", "{\"token\":\"short\"}"] {
            let place = Place::with(text);
            assert!(load(&place.dir).is_err());
            assert!(rotate(&place.dir).is_err());
            assert!(load_readonly(&place.dir).is_err());
            assert_eq!(place.text(), text);
        }
    }

    #[test]
    fn starting_together_ends_with_one_token() {
        let place = Place::with("{\"port\":7}");
        let tokens: Vec<Token> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(|| load(&place.dir).unwrap().token)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(tokens.iter().all(|token| *token == tokens[0]));
        assert!(place.text().contains(tokens[0].expose()));
    }

    #[test]
    fn a_held_lock_is_not_waited_for_for_ever() {
        let place = place();
        let store = Store::of(&place.dir, Duration::from_millis(30));
        let held = store.lock().unwrap();
        let error = store.rotate().unwrap_err().to_string();
        assert!(error.contains("a2mcp.json.lock"), "{error}");
        drop(held);
        store.rotate().unwrap();
    }

    #[test]
    fn a_link_is_written_through() {
        let place = place();
        place.dir.create().unwrap();
        std::fs::create_dir(place.tmp.path().join("dotfiles")).unwrap();
        std::os::unix::fs::symlink("../dotfiles/bridge.json", place.dir.config_file()).unwrap();
        let token = load(&place.dir).unwrap().token;
        let target = place.tmp.path().join("dotfiles/bridge.json");
        assert!(std::fs::read_to_string(target).unwrap().contains(token.expose()));
        assert!(place.dir.config_file().is_symlink());
        rotate(&place.dir).unwrap();
        assert!(place.dir.config_file().is_symlink());
    }

    #[test]
    fn a_config_others_can_read_warns_and_names_chmod() {
        let place = Place::with(&format!("{{\"token\":\"{}\"}}", "x".repeat(40)));
        assert_eq!(load(&place.dir).unwrap().warnings, Vec::<String>::new());
        std::fs::set_permissions(place.dir.config_file(), Permissions::from_mode(0o644)).unwrap();
        let warnings = load(&place.dir).unwrap().warnings;
        assert!(warnings[0].contains("mode 644") && warnings[0].contains("chmod 600"), "{warnings:?}");
    }

    #[test]
    fn a_check_writes_nothing() {
        let place = place();
        let (config, warnings) = load_readonly(&place.dir).unwrap();
        assert_eq!((config, warnings.len()), (Config::default(), 0));
        assert!(!place.dir.root().exists());
        let place = Place::with("{\"port\":7}");
        assert_eq!(load_readonly(&place.dir).unwrap().0.port, 7);
        assert_eq!(place.text(), "{\"port\":7}");
    }

    #[test]
    fn what_is_no_file_is_refused_at_once() {
        let place = place();
        std::fs::create_dir_all(place.dir.config_file()).unwrap();
        assert!(matches!(load(&place.dir), Err(ConfigError::NotAFile { .. })));
    }
}
