//! The execution log of the reference host: one JSON line when a tool starts, one when it was told
//! to stop, one when it ended. Each is on its way to the disk before the tool goes on, so a test
//! that kills anything at any moment can count what really ran.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::rc::Rc;

use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::shim::unix_millis;

/// See the module.
#[derive(Debug, Clone)]
pub struct ExecutionLog {
    file: Rc<File>,
}

/// One execution.
#[derive(Debug)]
pub(super) struct Execution {
    log: ExecutionLog,
    call_id: String,
    tool: String,
    digest: String,
}

impl ExecutionLog {
    /// # Errors
    /// When the file cannot be opened for appending.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
        Ok(Self { file: Rc::new(file) })
    }

    pub(super) fn begin(&self, call_id: &str, tool: &str, arguments: &Bytes) -> Execution {
        let digest = Sha256::digest(arguments).iter().map(|byte| format!("{byte:02x}")).collect();
        let execution =
            Execution { log: self.clone(), call_id: call_id.to_owned(), tool: tool.to_owned(), digest };
        execution.write("start");
        execution
    }
}

impl Execution {
    pub(super) fn cancelled(&self) {
        self.write("cancelled");
    }

    pub(super) fn done(self) {
        self.write("done");
    }

    fn write(&self, event: &str) {
        let line = serde_json::json!({
            "event": event,
            "callId": self.call_id,
            "tool": self.tool,
            "args": self.digest,
            "at": unix_millis(),
        });
        if let Err(error) = self.log.file.as_ref().write_all(format!("{line}\n").as_bytes()) {
            tracing::error!(%error, "the execution log cannot be written");
        }
    }
}
