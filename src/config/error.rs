//! Why a config was refused, in words for the operator. No message ever holds a field's value.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::text;

/// Everything but [`ConfigError::Locked`] means: the file must be mended by a person (exit 78).
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A known field holds something else than it must.
    #[error("{}: field `{}` must be {expected}", shown(.file), text::clean(.field, 100))]
    Field {
        /// The config file.
        file: PathBuf,
        /// The field, dotted and indexed where nested: `xfer.dufs`, `deny[3]`.
        field: String,
        /// What it must be.
        expected: String,
    },
    /// A field is given twice; readers disagree on which one counts.
    #[error("{}: field `{}` is given more than once; keep one", shown(.file), text::clean(.field, 100))]
    Repeated {
        /// The config file.
        file: PathBuf,
        /// The field.
        field: String,
    },
    /// The file is not JSON.
    #[error("{}: not valid JSON: {problem} at line {line} column {column}", shown(.file))]
    Syntax {
        /// The config file.
        file: PathBuf,
        /// 1-based.
        line: usize,
        /// 1-based, in bytes.
        column: usize,
        /// Which kind of mistake.
        problem: &'static str,
    },
    /// The file is JSON, but no object.
    #[error("{}: must be a JSON object, `{{…}}`", shown(.file))]
    NotObject {
        /// The config file.
        file: PathBuf,
    },
    /// The file is there and holds nothing.
    #[error(
        "{}: the file is empty (cut short by a crash or a full disk?); restore it, or remove it to start \
         with defaults and a new token",
        shown(.file)
    )]
    Empty {
        /// The config file.
        file: PathBuf,
    },
    /// The file is larger than [`super::MAX_BYTES`].
    #[error("{}: larger than 1 MiB, not a config file", shown(.file))]
    TooLarge {
        /// The config file.
        file: PathBuf,
    },
    /// The path is a directory, a pipe or a device.
    #[error("{}: not a regular file", shown(.file))]
    NotAFile {
        /// The config file.
        file: PathBuf,
    },
    /// The file exists and cannot be read.
    #[error("cannot read {}", shown(.file))]
    Read {
        /// The config file.
        file: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A token must be written back and cannot.
    #[error("cannot write {} (a token must be stored there)", shown(.file))]
    Write {
        /// The config file.
        file: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another process holds the lock.
    #[error(
        "another process has held the lock {} for {} s; end it, or remove that file if nothing runs",
        shown(.lock),
        .waited.as_secs()
    )]
    Locked {
        /// The lock file.
        lock: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
}

/// A path as it may be shown: one line, no control characters.
pub(super) fn shown(path: &Path) -> String {
    text::clean(&path.to_string_lossy(), 400).into_owned()
}
