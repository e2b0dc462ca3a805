//! The reference host's own stdin and stdout: JSON lines, on threads of their own. A reader or
//! writer that blocks for ever keeps neither the host's loop nor its end waiting.

use std::io::{self, BufRead, Read, Write};
use std::sync::mpsc as blocking;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

/// The longest line that is read.
const MAX_LINE: u64 = 1 << 20;
/// Lines that may wait in either direction.
const QUEUE: usize = 256;
/// How long the last lines may take at the end.
const FLUSH: Duration = Duration::from_millis(500);

/// Lines of stdin; the channel closes at its end.
pub(super) fn read_stdin() -> mpsc::Receiver<String> {
    let (lines, receiver) = mpsc::channel(QUEUE);
    std::thread::spawn(move || {
        let mut input = io::stdin().lock();
        loop {
            let mut line = Vec::new();
            match input.by_ref().take(MAX_LINE).read_until(b'\n', &mut line) {
                Ok(1..) => {}
                Ok(_) | Err(_) => return,
            }
            if lines.blocking_send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Writes lines to stdout. Lossy: with nobody reading, further lines are dropped.
#[derive(Debug)]
pub(super) struct Lines {
    lines: blocking::SyncSender<String>,
    written: oneshot::Receiver<()>,
}

impl Lines {
    pub(super) fn to_stdout() -> Self {
        let (lines, receiver) = blocking::sync_channel::<String>(QUEUE);
        let (done, written) = oneshot::channel();
        std::thread::spawn(move || {
            let mut output = io::stdout().lock();
            for line in receiver {
                if output.write_all(line.as_bytes()).and_then(|()| output.flush()).is_err() {
                    break;
                }
            }
            let _ = done.send(());
        });
        Self { lines, written }
    }

    pub(super) fn write(&self, value: &Value) {
        if self.lines.try_send(format!("{value}\n")).is_err() {
            tracing::debug!("a line for stdout was dropped");
        }
    }

    /// Waits a moment until everything is written.
    pub(super) async fn flush(self) {
        drop(self.lines);
        let _ = tokio::time::timeout(FLUSH, self.written).await;
    }
}
