//! The keeper's children: started, drained, signalled, reaped.
//!
//! Each leads a process group of its own and dies with the keeper (death signal; the keeper has one
//! thread). Their pipes are always drained into bounded buffers, so that none ever waits for a
//! reader. After a leader's end its whole group is killed, before the leader is reaped: until then
//! its id cannot name anybody else.
//!
//! ```text
//! running ──signal──▶ running, SIGKILL due ──▶ ended (kept for a while for whoever asks)
//! ```

use std::collections::VecDeque;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};

use super::wire::{ChildSignal, ChildStatus, Exit, MAX_NOTE, Note, Output, Spawn};
use crate::process::{self, Identity};
use crate::text::clean;

/// Most children that run at a time.
const MAX_RUNNING: usize = 8;
/// Most children that are remembered, running ones included.
const MAX_KNOWN: usize = 16;
/// So much of each stream's end is kept, in bytes.
const MAX_TAIL: usize = 64 << 10;
/// So much of the output a status shows, in characters.
const LAST_WORDS: usize = 300;
/// Most bytes read of one stream before others get their turn.
const TURN: usize = 256 << 10;

/// All children.
#[derive(Default)]
pub(super) struct Children {
    list: Vec<Child>,
    last_id: u64,
}

struct Child {
    id: u64,
    purpose: String,
    process: Identity,
    leader: std::process::Child,
    pidfd: Option<OwnedFd>,
    stdout: Tail,
    stderr: Tail,
    note: Note,
    started: Instant,
    kill_at: Option<Instant>,
    exit: Option<Exit>,
}

/// The end of a stream.
#[derive(Default)]
struct Tail {
    pipe: Option<std::fs::File>,
    kept: VecDeque<u8>,
    total: u64,
}

impl Children {
    /// Starts one.
    pub(super) fn spawn(&mut self, spawn: Spawn) -> Result<ChildStatus, String> {
        if self.running().count() >= MAX_RUNNING {
            return Err(format!("{MAX_RUNNING} children run already"));
        }
        if spawn.note.0.len() > MAX_NOTE {
            return Err(format!("the note is longer than {MAX_NOTE} bytes"));
        }
        if !spawn.program.starts_with('/') {
            return Err(format!("{} is not an absolute path", clean(&spawn.program, 200)));
        }
        let cannot = |error: io::Error| format!("cannot start {}: {error}", clean(&spawn.program, 200));
        let mut command = Command::new(&spawn.program);
        command.args(&spawn.args).current_dir(spawn.dir.as_deref().unwrap_or("/"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for (name, _) in std::env::vars_os() {
            let unwanted = |prefix: &String| name.as_encoded_bytes().starts_with(prefix.as_bytes());
            if spawn.remove_env.iter().any(unwanted) {
                command.env_remove(name);
            }
        }
        command.envs(spawn.env.iter().map(|(name, value)| (name, value)));
        let mut leader = process::spawn_child(&mut command, Signal::KILL).map_err(cannot)?;
        let process = Identity::of(leader.id()).unwrap_or(Identity { pid: leader.id(), start_time: 0 });
        let stdout = leader.stdout.take().map(OwnedFd::from);
        let stderr = leader.stderr.take().map(OwnedFd::from);
        let pidfd = Pid::from_raw(leader.id().cast_signed())
            .and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok());
        self.last_id += 1;
        let child = Child {
            id: self.last_id,
            purpose: clean(&spawn.purpose, 40).into_owned(),
            process,
            leader,
            pidfd,
            stdout: Tail::of(stdout).map_err(cannot)?,
            stderr: Tail::of(stderr).map_err(cannot)?,
            note: spawn.note,
            started: Instant::now(),
            kill_at: None,
            exit: None,
        };
        let status = child.status();
        self.list.push(child);
        while self.list.len() > MAX_KNOWN
            && let Some(oldest) = self.list.iter().position(|child| child.exit.is_some())
        {
            self.list.remove(oldest);
        }
        Ok(status)
    }

    /// Signals a child's group; SIGKILL follows after `kill_after`. Fine when it has ended.
    pub(super) fn signal(
        &mut self,
        id: u64,
        signal: ChildSignal,
        kill_after: Option<Duration>,
    ) -> Result<(), String> {
        let child = self.get_mut(id)?;
        if child.exit.is_none() {
            child.signal(match signal {
                ChildSignal::Term => Signal::TERM,
                ChildSignal::Interrupt => Signal::INT,
                ChildSignal::HangUp => Signal::HUP,
                ChildSignal::Kill => Signal::KILL,
            });
            child.kill_by(kill_after);
        }
        Ok(())
    }

    /// SIGTERM to all, SIGKILL after `grace`.
    pub(super) fn stop(&mut self, grace: Duration) {
        for child in self.list.iter_mut().filter(|child| child.exit.is_none()) {
            child.signal(Signal::TERM);
            child.kill_by(Some(grace));
        }
    }

    /// Replaces a note.
    pub(super) fn set_note(&mut self, id: u64, note: Note) -> Result<(), String> {
        if note.0.len() > MAX_NOTE {
            return Err(format!("the note is longer than {MAX_NOTE} bytes"));
        }
        self.get_mut(id)?.note = note;
        Ok(())
    }

    /// What a child wrote last.
    pub(super) fn output(&mut self, id: u64, max_bytes: usize) -> Result<Output, String> {
        let child = self.get_mut(id)?;
        Ok(Output {
            stdout: child.stdout.text(max_bytes),
            stdout_total: child.stdout.total,
            stderr: child.stderr.text(max_bytes),
            stderr_total: child.stderr.total,
        })
    }

    /// All that are known.
    pub(super) fn status(&self) -> Vec<ChildStatus> {
        self.list.iter().map(Child::status).collect()
    }

    /// How many run.
    pub(super) fn running(&self) -> impl Iterator<Item = u64> {
        self.list.iter().filter(|child| child.exit.is_none()).map(|child| child.id)
    }

    /// What to wait for: readable means that [`Children::turn`] has something to do.
    pub(super) fn sources(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.list.iter().filter(|child| child.exit.is_none()).flat_map(|child| {
            let pipes =
                [&child.stdout.pipe, &child.stderr.pipe].into_iter().flatten().map(|pipe| pipe.as_fd());
            pipes.chain(child.pidfd.as_ref().map(|pidfd| pidfd.as_fd()))
        })
    }

    /// When [`Children::turn`] is due without an event.
    pub(super) fn due(&self) -> Option<Instant> {
        let running = self.list.iter().filter(|child| child.exit.is_none());
        running
            .filter_map(|child| {
                // Without a pidfd (an old kernel, or none left) it is looked at now and then.
                let look = child.pidfd.is_none().then(|| Instant::now() + Duration::from_millis(200));
                look.into_iter().chain(child.kill_at).min()
            })
            .min()
    }

    /// Drains, kills who is due, reaps; the children that ended.
    pub(super) fn turn(&mut self) -> Vec<ChildStatus> {
        let mut ended = Vec::new();
        for child in self.list.iter_mut().filter(|child| child.exit.is_none()) {
            child.stdout.drain();
            child.stderr.drain();
            if child.kill_at.is_some_and(|at| at <= Instant::now()) {
                child.kill_at = None;
                child.signal(Signal::KILL);
            }
            if child.has_ended() {
                ended.push(child.status());
            }
        }
        ended
    }

    fn get_mut(&mut self, id: u64) -> Result<&mut Child, String> {
        let found = self.list.iter_mut().find(|child| child.id == id);
        found.ok_or_else(|| format!("there is no child {id}"))
    }
}

impl Child {
    /// To the group; the leader is not reaped yet, so its id is still ours.
    fn signal(&self, signal: Signal) {
        if let Some(group) = Pid::from_raw(self.process.pid.cast_signed()) {
            let _ = rustix::process::kill_process_group(group, signal);
        }
    }

    fn kill_by(&mut self, after: Option<Duration>) {
        let at = after.and_then(|after| Instant::now().checked_add(after));
        self.kill_at = self.kill_at.into_iter().chain(at).min();
    }

    fn has_ended(&mut self) -> bool {
        // Looked at without reaping: the group must be killed before that.
        let leader = Pid::from_raw(self.process.pid.cast_signed());
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if leader.is_some_and(|pid| matches!(rustix::process::waitid(WaitId::Pid(pid), options), Ok(None))) {
            return false;
        }
        self.signal(Signal::KILL);
        let exit = match self.leader.try_wait() {
            Ok(None) => return false,
            Ok(Some(status)) => match (status.code(), status.signal()) {
                (Some(code), _) => Exit::Code(code),
                (None, signal) => Exit::Signal(signal.unwrap_or_default()),
            },
            Err(_) => Exit::Code(-1),
        };
        self.exit = Some(exit);
        self.kill_at = None;
        self.pidfd = None;
        for tail in [&mut self.stdout, &mut self.stderr] {
            tail.drain();
            tail.pipe = None;
        }
        true
    }

    fn status(&self) -> ChildStatus {
        let words = if self.stderr.kept.is_empty() { &self.stdout } else { &self.stderr };
        ChildStatus {
            child: self.id,
            purpose: self.purpose.clone(),
            process: self.process,
            age_ms: self.started.elapsed().as_millis() as u64,
            exit: self.exit,
            note: self.note.clone(),
            last_words: clean(words.text(LAST_WORDS).trim(), LAST_WORDS).into_owned(),
        }
    }
}

impl Tail {
    fn of(pipe: Option<OwnedFd>) -> io::Result<Self> {
        let Some(pipe) = pipe else { return Ok(Self::default()) };
        rustix::io::ioctl_fionbio(&pipe, true)?;
        Ok(Self { pipe: Some(pipe.into()), ..Self::default() })
    }

    fn drain(&mut self) {
        let mut buffer = [0; 8 << 10];
        let mut turn = 0;
        while turn < TURN
            && let Some(pipe) = &mut self.pipe
        {
            match pipe.read(&mut buffer) {
                Ok(0) => self.pipe = None,
                Ok(count) => {
                    turn += count;
                    self.total += count as u64;
                    self.kept.extend(&buffer[..count]);
                    let excess = self.kept.len().saturating_sub(MAX_TAIL);
                    self.kept.drain(..excess);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.pipe = None,
            }
        }
    }

    fn text(&self, max_bytes: usize) -> String {
        let skipped = self.kept.len().saturating_sub(max_bytes);
        let bytes: Vec<u8> = self.kept.iter().skip(skipped).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
