//! The log: `tracing` events on stderr, one line each, no control character in them.
//!
//! The shim gives stderr as a start file; once it has its port the sidecar moves its stderr (panics
//! included) onto a file of its own and keeps two generations of 1 MB (contract 16).

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Size in bytes after which a log file becomes the old generation.
const ROTATE_AT: u64 = 1_000_000;
/// Longest line in characters.
const MAX_LINE: usize = 4000;

thread_local! {
    static FILE: RefCell<Option<Rotating>> = const { RefCell::new(None) };
}

struct Rotating {
    path: PathBuf,
    written: u64,
    /// Another process makes and rotates it; this one only writes where it is now.
    is_followed: bool,
}

/// Starts logging; `A2MCP_LOG` sets the level: `error`, `warn`, `info` (default), `debug`, `trace`.
pub fn start() {
    let wanted = std::env::var("A2MCP_LOG").ok();
    let level = wanted.as_deref().and_then(|level| level.parse().ok()).unwrap_or(LevelFilter::INFO);
    let _ = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(false)
        .with_target(false)
        .with_writer(Lines)
        .try_init();
    std::panic::set_hook(Box::new(|panic| {
        let text = panic.to_string();
        tracing::error!("[a2mcp] internal error: {}", text.replace('\n', " "));
    }));
}

/// Moves stderr onto `path` (0600, appended to).
///
/// # Errors
/// As the file system's; stderr is then what it was.
pub fn move_to(path: &Path) -> io::Result<()> {
    let file = open(path)?;
    let written = file.metadata()?.len();
    rustix::stdio::dup2_stderr(&file)?;
    FILE.set(Some(Rotating { path: path.to_owned(), written, is_followed: false }));
    Ok(())
}

/// From the next line on stderr is the file at `path`, as long as there is one.
pub fn follow(path: &Path) {
    FILE.set(Some(Rotating { path: path.to_owned(), written: 0, is_followed: true }));
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// Writes whole events to whatever stderr is.
struct Lines;

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line;
    fn make_writer(&'a self) -> Line {
        Line(Vec::new())
    }
}

/// One event; written when it is dropped.
struct Line(Vec<u8>);

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let text = String::from_utf8_lossy(&self.0);
        let mut line = crate::text::clean(text.trim_end_matches('\n'), MAX_LINE).into_owned();
        line.push('\n');
        let _ = FILE.try_with(|file| {
            if let Ok(file) = file.try_borrow()
                && let Some(file) = file.as_ref().filter(|file| file.is_followed)
            {
                file.catch_up();
            }
        });
        let length = line.len() as u64;
        super::lossy::line(line);
        let _ = FILE.try_with(|file| {
            if let Ok(mut file) = file.try_borrow_mut()
                && let Some(file) = file.as_mut()
            {
                file.count(length);
            }
        });
    }
}

impl Rotating {
    /// Makes stderr the file that has the name now; leaves it when there is none.
    fn catch_up(&self) {
        use std::os::unix::fs::MetadataExt as _;
        let Ok(named) = std::fs::metadata(&self.path) else { return };
        let is_same = rustix::fs::fstat(rustix::stdio::stderr())
            .is_ok_and(|ours| (ours.st_dev, ours.st_ino) == (named.dev(), named.ino()));
        if !is_same && let Ok(file) = OpenOptions::new().append(true).open(&self.path) {
            let _ = rustix::stdio::dup2_stderr(&file);
        }
    }

    fn count(&mut self, bytes: u64) {
        self.written += bytes;
        if self.is_followed || self.written <= ROTATE_AT {
            return;
        }
        self.written = 0;
        let mut old = self.path.clone().into_os_string();
        old.push(".1");
        if std::fs::rename(&self.path, old).is_ok()
            && let Ok(file) = open(&self.path)
        {
            let _ = rustix::stdio::dup2_stderr(&file);
        }
    }
}
