//! What a2mcp installed: `<agentDir>/a2mcp.installs.json`, and the same list beside the programs
//! themselves, because several agent directories share those.
//!
//! Read at any time; written, replaced as a whole, only under the lock of the directory of the
//! programs. A file that is missing or makes no sense is an empty list: then nothing is ours, so
//! nothing is replaced.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Tool;

/// A longer file is not ours.
const MAX_BYTES: u64 = 1 << 20;

/// One installed program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Entry {
    /// The version of its pin.
    pub(super) version: String,
    /// What it came out of.
    pub(super) asset: String,
    /// The asset's pinned hash.
    pub(super) asset_sha256: String,
    /// Where it is.
    pub(super) path: PathBuf,
    /// The program's own hash.
    pub(super) sha256: String,
}

#[derive(Default, Serialize, Deserialize)]
struct Content {
    #[serde(default)]
    installed: BTreeMap<String, Entry>,
}

/// What the list at `file` says of `tool`.
pub(super) fn read(file: &Path, tool: Tool) -> Option<Entry> {
    content(file).installed.remove(tool.name())
}

/// Adds or replaces one entry.
pub(super) fn write(file: &Path, tool: Tool, entry: &Entry) -> io::Result<()> {
    let mut content = content(file);
    if content.installed.get(tool.name()) == Some(entry) {
        return Ok(());
    }
    content.installed.insert(tool.name().to_owned(), entry.clone());
    let mut text = serde_json::to_vec_pretty(&content)?;
    text.push(b'\n');
    crate::state::replace(file, &text)
}

fn content(file: &Path) -> Content {
    let text = match std::fs::metadata(file) {
        Ok(found) if found.is_file() && found.len() <= MAX_BYTES => std::fs::read(file),
        Ok(_) => Err(io::ErrorKind::InvalidData.into()),
        Err(error) => Err(error),
    };
    let content = text.and_then(|text| Ok(serde_json::from_slice(&text)?));
    content.unwrap_or_else(|error: io::Error| {
        if error.kind() != io::ErrorKind::NotFound {
            let file = super::shown(file);
            tracing::warn!(%error, file, "list of installed programs ignored");
        }
        Content::default()
    })
}
