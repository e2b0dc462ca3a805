//! Stderr for a process that must not wait for it: lines go through a bounded queue to a thread of its
//! own. A terminal that stands still, or a pipe that nobody reads, stops that thread and nobody else;
//! what finds no room meanwhile is dropped, and a later line says how much that was.

use std::io::{self, Write as _};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Lines that may wait.
const QUEUE: usize = 512;
/// So many of them may be another program's: those crowd out none of ours.
const FOREIGN: usize = 256;

static STDERR: OnceLock<Lossy> = OnceLock::new();

struct Lossy {
    lines: SyncSender<String>,
    count: Mutex<Count>,
    written: Condvar,
}

#[derive(Default)]
struct Count {
    /// Lines on their way, the one that is being written included.
    waiting: usize,
    dropped: u64,
}

/// From now on this process's lines go this way.
pub fn start() {
    let (lines, queue) = sync_channel(QUEUE);
    let is_first = STDERR.set(Lossy { lines, count: Mutex::default(), written: Condvar::new() }).is_ok();
    if is_first {
        std::thread::spawn(move || write(&queue));
    }
}

fn write(queue: &Receiver<String>) {
    let Some(lossy) = STDERR.get() else { return };
    for line in queue {
        let dropped = lossy.with(|count| std::mem::take(&mut count.dropped));
        if dropped > 0 {
            let told = format!("[a2mcp] {dropped} line(s) are missing here: nobody read them fast enough\n");
            let _ = io::stderr().write_all(told.as_bytes());
        }
        let _ = io::stderr().write_all(line.as_bytes());
        lossy.with(|count| count.waiting -= 1);
        lossy.written.notify_all();
    }
}

impl Lossy {
    fn with<T>(&self, change: impl FnOnce(&mut Count) -> T) -> T {
        change(&mut self.count.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn offer(&self, line: String, limit: usize) {
        self.with(|count| {
            if count.waiting < limit && self.lines.try_send(line).is_ok() {
                count.waiting += 1;
            } else {
                count.dropped += 1;
            }
        });
    }
}

/// A line of ours, its line feed included; straight to stderr when it may wait.
pub fn line(line: String) {
    match STDERR.get() {
        Some(lossy) => lossy.offer(line, QUEUE),
        None => drop(io::stderr().write_all(line.as_bytes())),
    }
}

/// As [`line()`], for what another program wrote.
pub fn foreign(line: String) {
    match STDERR.get() {
        Some(lossy) => lossy.offer(line, FOREIGN),
        None => drop(io::stderr().write_all(line.as_bytes())),
    }
}

/// Lets what waits be written, for so long at most.
pub fn flush(limit: Duration) {
    let Some(lossy) = STDERR.get() else { return };
    let count = lossy.count.lock().unwrap_or_else(PoisonError::into_inner);
    drop(lossy.written.wait_timeout_while(count, limit, |count| count.waiting > 0));
}
