//! What Linux says about a process: CPU time and memory.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// Linux counts CPU time towards user space in hundredths of a second on every machine.
const TICK: Duration = Duration::from_millis(10);

/// CPU time of the whole process so far, user and system.
pub(crate) fn cpu(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    // The name in parentheses may hold anything; the fields after it start with the third.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |number: usize| -> Result<u32> {
        let field = fields.get(number - 3).with_context(|| format!("{path} has no field {number}"))?;
        Ok(field.parse()?)
    };
    Ok(TICK * (ticks(14)? + ticks(15)?))
}

/// Resident memory, in KiB.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) resident_kib: u64,
    /// The part that is not backed by a file: heap and stacks.
    pub(crate) private_kib: u64,
    pub(crate) peak_kib: u64,
}

pub(crate) fn memory(pid: u32) -> Result<Memory> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let kib = |name: &str| -> Result<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let value = line.and_then(|line| line.split_whitespace().next());
        Ok(value.with_context(|| format!("{path} has no {name}"))?.parse()?)
    };
    Ok(Memory { resident_kib: kib("VmRSS")?, private_kib: kib("RssAnon")?, peak_kib: kib("VmHWM")? })
}

/// The command line of a process, for telling which one it is.
pub(crate) fn command_line(pid: u32) -> Result<String> {
    let path = format!("/proc/{pid}/cmdline");
    let bytes = fs::read(&path).with_context(|| format!("cannot read {path}"))?;
    Ok(String::from_utf8_lossy(&bytes).replace('\0', " "))
}

/// How busy the machine was in the last minute.
pub(crate) fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or_default()
}
