//! Why a program is not to be had, each with the way out.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{Tool, shown};
use crate::text::clean;

/// Why [`super::Installer`] has no program to give. Cheap to clone: everybody who waited for the same
/// download gets the same answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum InstallError {
    /// The config names a path that cannot be used.
    #[error(
        "cannot use {} as {tool}: {why}; correct `xfer.{tool}` in the config, or write \"{tool}\" there to have it looked up",
        shown(.path)
    )]
    Configured {
        /// Which program.
        tool: Tool,
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// It is there and does not start.
    #[error("{} cannot be run: {cause}; {}", shown(.path), own_program(*.tool))]
    NotRunnable {
        /// Which program.
        tool: Tool,
        /// Where it is.
        path: PathBuf,
        /// Why not. Part of the text, so that the way out comes last.
        cause: Arc<io::Error>,
    },
    /// What was installed earlier is gone, or is no longer what it was.
    #[error(
        "binary vanished: {} (sha256 {sha256}), installed by a2mcp, {}; an antivirus program may have taken it. \
         It is not fetched again by itself: `a2mcp install {tool}` does that, or {}",
        shown(.path),
        now(.found.as_deref()),
        own_program(*.tool)
    )]
    Vanished {
        /// Which program.
        tool: Tool,
        /// Where it was.
        path: PathBuf,
        /// Its hash at the time.
        sha256: String,
        /// The hash of what is there now.
        found: Option<String>,
    },
    /// No attested build.
    #[error("{tool} is not offered for {platform}: no build with an attested hash is known; {}", own_program(*.tool))]
    NotOffered {
        /// Which program.
        tool: Tool,
        /// Operating system and architecture.
        platform: String,
    },
    /// Nowhere to install to.
    #[error("{tool} cannot be installed: HOME is not set to an absolute path; {}", own_program(*.tool))]
    NoHome {
        /// Which program.
        tool: Tool,
    },
    /// Somebody else's file is in the way.
    #[error(
        "{} exists and was not installed by a2mcp (sha256 {sha256}); it stays as it is. \
         Move it away, or use it: name it in the config field `xfer.{tool}`",
        shown(.path)
    )]
    Foreign {
        /// Which program.
        tool: Tool,
        /// The file.
        path: PathBuf,
        /// Its hash.
        sha256: String,
    },
    /// Another process installs, and does not come to an end.
    #[error("another process has been installing {tool} for {} s; end it (it holds {}) and try again", .waited.as_secs(), shown(.lock))]
    Busy {
        /// Which program.
        tool: Tool,
        /// What it holds.
        lock: PathBuf,
        /// For how long.
        waited: Duration,
    },
    /// The mirror's address makes no sense. It is not shown: it may hold a password.
    #[error(
        "A2MCP_DOWNLOAD_BASE is not a URL to download from: {why}; it replaces https://github.com, so write http(s)://HOST[:PORT][/PATH], without a password"
    )]
    Mirror {
        /// What is wrong.
        why: &'static str,
    },
    /// The bytes did not arrive.
    #[error("cannot download {asset} from {url}: {problem}; {}", by_hand(*.tool))]
    Download {
        /// Which program.
        tool: Tool,
        /// What was asked for.
        asset: &'static str,
        /// From where, without query.
        url: String,
        /// What went wrong.
        problem: Download,
    },
    /// Other bytes than those pinned.
    #[error(
        "{from} is not {asset} as it is pinned: sha256 {found}, expected {expected}; nothing was unpacked or installed. {}",
        wrong_hash(*.tool, *.is_download)
    )]
    WrongHash {
        /// Which program.
        tool: Tool,
        /// What was wanted.
        asset: &'static str,
        /// Where the bytes came from.
        from: String,
        /// Whether they were downloaded.
        is_download: bool,
        /// Their hash.
        found: String,
        /// The pinned one.
        expected: &'static str,
    },
    /// The pinned bytes hold another program than expected.
    #[error("{asset} is not what it should be: {why}; nothing was installed; {}", own_program(*.tool))]
    Unpack {
        /// Which program.
        tool: Tool,
        /// What was unpacked.
        asset: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// A file of our own cannot be read or written.
    #[error("cannot {step} {}: {}; {}", shown(.path), reason(.cause), own_program(*.tool))]
    Store {
        /// Which program.
        tool: Tool,
        /// What was being done.
        step: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        cause: Arc<io::Error>,
    },
}

/// What may go wrong on the way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Download {
    /// No connection.
    #[error("no connection to {host}: {why}")]
    Unreachable {
        /// To whom.
        host: String,
        /// Why.
        why: String,
    },
    /// No trust.
    #[error("no secure connection to {host}: {why}")]
    Insecure {
        /// To whom.
        host: String,
        /// Why.
        why: String,
    },
    /// An answer other than the file.
    #[error("the server answered {status}")]
    Status {
        /// In its words.
        status: String,
    },
    /// Too many redirects.
    #[error("it was redirected more than {limit} times")]
    Redirects {
        /// How many are followed.
        limit: usize,
    },
    /// A redirect that is not followed.
    #[error("it was redirected to a place that is not followed ({why})")]
    Redirect {
        /// Why not.
        why: &'static str,
    },
    /// Nothing came.
    #[error("no byte arrived for {} s", .0.as_secs_f32())]
    Stalled(Duration),
    /// It dragged on.
    #[error("it was not done after {} s", .0.as_secs_f32())]
    TooSlow(Duration),
    /// It grew and grew.
    #[error("it is larger than {limit} bytes")]
    TooLarge {
        /// The limit.
        limit: u64,
    },
    /// It broke off.
    #[error("the connection broke after {bytes} bytes: {why}")]
    Broken {
        /// How far it got.
        bytes: u64,
        /// Why.
        why: String,
    },
}

fn own_program(tool: Tool) -> String {
    format!("put a {tool} of your own on the PATH, or its path into the config field `xfer.{tool}`")
}

fn by_hand(tool: Tool) -> String {
    format!(
        "fetch that file by other means and run `a2mcp install {tool} --from FILE`, set A2MCP_DOWNLOAD_BASE to a \
         mirror of https://github.com, or {}",
        own_program(tool)
    )
}

fn wrong_hash(tool: Tool, is_download: bool) -> String {
    if is_download {
        format!("Somebody on the way, or the mirror, changes what is downloaded: {}", by_hand(tool))
    } else {
        format!("`a2mcp install {tool} --from` takes this one build only; for another, {}", own_program(tool))
    }
}

fn now(found: Option<&str>) -> String {
    match found {
        Some(hash) => format!("has another content now (sha256 {hash})"),
        None => "is not there any more".to_owned(),
    }
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            format!("the disk is full ({}); make room and try again", clean(&error.to_string(), 100))
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            format!("it cannot be written to ({})", clean(&error.to_string(), 100))
        }
        _ => clean(&error.to_string(), 200).into_owned(),
    }
}
