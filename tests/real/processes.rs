//! Which processes belong to a private home directory: those that name it in their environment or in
//! their arguments. Nothing else is ever looked at or ended.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Everything is gone so soon after the host's end (contract 15).
pub(crate) const GONE: Duration = Duration::from_secs(3);

/// A process as it was seen.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) pid: u32,
    pub(crate) arguments: Vec<String>,
}

impl Seen {
    pub(crate) fn is_sidecar(&self) -> bool {
        self.arguments.get(1).is_some_and(|argument| argument == "sidecar")
    }
}

/// The processes of `home`, zombies excluded.
pub(crate) fn of(home: &Path) -> Vec<Seen> {
    let home = home.to_str().unwrap().as_bytes();
    let names_home = |bytes: &[u8]| bytes.windows(home.len()).any(|window| window == home);
    let own = std::process::id();
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|&pid| pid != own && !is_zombie(pid))
        .filter_map(|pid| {
            // Whatever is gone by now, or another user's, is none of ours.
            let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            (names_home(&arguments) || names_home(&environment)).then(|| Seen {
                pid,
                arguments: arguments
                    .split(|&byte| byte == 0)
                    .map(|argument| String::from_utf8_lossy(argument).into_owned())
                    .collect(),
            })
        })
        .collect()
}

/// Waits until no process of `home` is left; what is left after [`GONE`], otherwise.
pub(crate) fn until_gone(home: &Path) -> Result<(), Vec<Seen>> {
    let end = Instant::now() + GONE;
    loop {
        let left = of(home);
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(left);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Ends what is left of `home` by force.
pub(crate) fn end(left: &[Seen]) {
    for seen in left {
        kill(seen.pid, Signal::KILL);
    }
}

/// Sends one signal to one process; one that is gone is fine.
pub(crate) fn kill(pid: u32, signal: Signal) {
    let _ = kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal);
}

/// The children of `parent` that have ended and that it has not looked at.
pub(crate) fn zombies_of(parent: u32) -> Vec<u32> {
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|&pid| matches!(state(pid), Some((b'Z', of)) if of == parent)).collect()
}

/// The open descriptors of a process.
pub(crate) fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

fn is_zombie(pid: u32) -> bool {
    state(pid).is_none_or(|(state, _)| matches!(state, b'Z' | b'X'))
}

/// Its state's letter and its parent. The name before them may hold anything.
fn state(pid: u32) -> Option<(u8, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.bytes().next()?, fields.next()?.parse().ok()?))
}
