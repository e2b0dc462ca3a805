//! The guard of a wrapped server, `a2mcp guard -- COMMAND`: a small process between the wrap host and
//! the server that outlives neither.
//!
//! It gets SIGTERM when the wrap host dies, however that happens, and then ends everything that descends
//! from the server, `npx`'s grandchildren and whatever left its process group included: orphans become
//! its own children, so it is done when it has none. When the server itself ends, what it left behind
//! goes at once, and the exit code is the server's (128 and the number for a signal, as in a shell).

use std::ffi::OsString;
use std::io;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Signal, WaitOptions, WaitStatus};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::pipe;

use crate::process::{self, Identity};
use crate::text::clean;

/// Between SIGTERM and SIGKILL. With what comes before and after it stays below the 3 s in which
/// everything is gone (contract 15).
const GRACE: Duration = Duration::from_millis(1500);
/// How often what must end is looked at.
const LOOK: Duration = Duration::from_millis(20);
/// The command cannot be run; as in a shell.
pub const NOT_RUN: u8 = 127;
/// How the only line begins that a guard itself writes, to the server's stderr.
pub(super) const CANNOT_RUN: &str = "a2mcp: cannot run ";

/// Arguments of `a2mcp guard`.
#[derive(Debug, Clone, clap::Args)]
pub struct GuardArgs {
    /// The command and its arguments
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Runs the command and its end; its exit code.
///
/// # Errors
/// Why it cannot be run, for people.
pub fn run(args: &GuardArgs) -> Result<u8, String> {
    guard(&args.command).map_err(|error| {
        let program = args.command.first().map(|program| program.to_string_lossy()).unwrap_or_default();
        format!("cannot run {}: {error}", clean(&program, 400))
    })
}

fn guard(command: &[OsString]) -> io::Result<u8> {
    let (ended, child_signals) = signals(&[SIGCHLD])?;
    let (stop, stop_signals) = signals(&[SIGTERM, SIGINT, SIGHUP])?;
    process::adopt_orphans();
    let (program, args) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let server = process::spawn_guarded(Command::new(program).args(args))?;
    let leader = server.id();
    // The server's pipes are its own: their ends must be seen when it closes them.
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;

    let mut exit = None;
    let mut kill_at = None;
    loop {
        if !reap(leader, &mut exit) {
            break;
        }
        let now = Instant::now();
        if exit.is_some() || kill_at.is_some_and(|at| at <= now) {
            signal_all(Signal::KILL);
        }
        let patience = if exit.is_some() || kill_at.is_some() { Some(LOOK) } else { None };
        let timeout =
            patience.map(|patience| Timespec { tv_sec: 0, tv_nsec: patience.subsec_nanos().into() });
        let mut polled = [PollFd::new(&ended, PollFlags::IN), PollFd::new(&stop, PollFlags::IN)];
        match rustix::event::poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // Not what `poll` says: a signal that interrupts it has written its byte already.
        let mut bytes = [0; 64];
        let _ = rustix::io::read(&ended, &mut bytes);
        let is_stop = matches!(rustix::io::read(&stop, &mut bytes), Ok(1..));
        if is_stop && kill_at.is_none() {
            kill_at = Some(now + GRACE);
            signal_all(Signal::TERM);
        }
    }
    drop((child_signals, stop_signals));
    Ok(exit.unwrap_or_default())
}

/// Readable when one of the signals has come.
fn signals(signals: &[i32]) -> io::Result<(UnixStream, UnixStream)> {
    let (read, write) = UnixStream::pair()?;
    read.set_nonblocking(true)?;
    for signal in signals {
        pipe::register(*signal, write.try_clone()?)?;
    }
    Ok((read, write))
}

/// Reaps what has ended; `false` when there is no child left.
fn reap(leader: u32, exit: &mut Option<u8>) -> bool {
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if pid.as_raw_nonzero().get().cast_unsigned() == leader => {
                *exit = Some(code(status));
            }
            Ok(Some(_)) | Err(rustix::io::Errno::INTR) => {}
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

fn code(status: WaitStatus) -> u8 {
    let signal = status.terminating_signal().map(|signal| 128 + signal);
    status.exit_status().or(signal).and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

fn signal_all(signal: Signal) {
    for descendant in process::descendants(Identity::current().pid) {
        descendant.signal(signal);
    }
}
