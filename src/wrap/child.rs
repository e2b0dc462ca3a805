//! One server process under its guard: its pipes, the end of its stderr, and how it is ended (its input
//! is closed first, then SIGTERM, then SIGKILL for the whole group).

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io;
use std::process::Stdio;
use std::rc::Rc;
use std::time::Duration;

use rustix::process::Signal;
use std::cell::RefCell;
use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout};

use super::config::Spec;
use super::guard::CANNOT_RUN;
use crate::app::lossy;
use crate::process::{self, Identity};
use crate::refhost::launch::Exit;
use crate::text::{clean, clean_block};

/// So much of its stderr is kept for error messages.
const MAX_TAIL: usize = 64 << 10;
/// The longest line of it that is shown, in characters.
const MAX_SHOWN: usize = 2000;
/// How long a server may take to end by the end of its input …
const END_OF_INPUT: Duration = Duration::from_secs(2);
/// … and its guard to end it.
const GUARD: Duration = Duration::from_secs(3);

/// A started server.
pub(super) struct ServerProcess {
    guard: Child,
    process: Identity,
}

/// Its pipes.
pub(super) struct Pipes {
    pub(super) input: ChildStdin,
    pub(super) output: ChildStdout,
    pub(super) errors: ChildStderr,
}

impl ServerProcess {
    /// Starts it.
    ///
    /// # Errors
    /// As spawning a process. That the command itself cannot be run is its guard's to say.
    pub(super) fn spawn(spec: &Spec) -> io::Result<(Self, Pipes)> {
        let mut args = vec![OsStr::new("guard"), OsStr::new("--")];
        args.extend(spec.command.iter().map(|arg| arg.as_os_str()));
        let mut guard = process::spawn_guard(&args, |command| {
            command.envs(spec.env.iter().map(|(name, value)| (name, value)));
            if let Some(cwd) = &spec.cwd {
                command.current_dir(cwd);
            }
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        })?;
        let pid = guard.id().unwrap_or_default();
        let process = Identity::of(pid).unwrap_or(Identity { pid, start_time: 0 });
        match (guard.stdin.take(), guard.stdout.take(), guard.stderr.take()) {
            (Some(input), Some(output), Some(errors)) => {
                Ok((Self { guard, process }, Pipes { input, output, errors }))
            }
            _ => Err(io::Error::other("the child has no pipes")),
        }
    }

    /// The guard's process id.
    pub(super) fn pid(&self) -> u32 {
        self.process.pid
    }

    /// Completes at its end; safe to drop.
    pub(super) async fn ended(&mut self) -> Exit {
        let exit = self.guard.wait().await.map_or(Exit::Unknown, Exit::from);
        // A guard that was killed could not do this.
        process::kill_group_of(self.process);
        match exit {
            // The guard speaks like a shell.
            Exit::Code(code @ 129..=192) => Exit::Signal(code - 128),
            exit => exit,
        }
    }

    /// Ends it; its input is closed already.
    pub(super) async fn end(&mut self) -> Exit {
        if let Ok(exit) = tokio::time::timeout(END_OF_INPUT, self.ended()).await {
            return exit;
        }
        self.terminate().await
    }

    /// Ends it without asking it first.
    pub(super) async fn terminate(&mut self) -> Exit {
        self.process.signal(Signal::TERM);
        if let Ok(exit) = tokio::time::timeout(GUARD, self.ended()).await {
            return exit;
        }
        process::kill_group_of(self.process);
        self.ended().await
    }
}

/// What a server wrote to its stderr: always read, shown line by line, its end kept.
#[derive(Default)]
pub(super) struct Stderr {
    kept: RefCell<VecDeque<u8>>,
}

impl Stderr {
    /// Reads to the end.
    pub(super) async fn read(self: Rc<Self>, mut errors: ChildStderr) {
        self.kept.borrow_mut().clear();
        let mut line = Vec::new();
        let mut chunk = [0; 8 << 10];
        while let Ok(count @ 1..) = errors.read(&mut chunk).await {
            {
                let mut kept = self.kept.borrow_mut();
                kept.extend(&chunk[..count]);
                let excess = kept.len().saturating_sub(MAX_TAIL);
                kept.drain(..excess);
            }
            for piece in chunk[..count].split_inclusive(|byte| *byte == b'\n') {
                line.extend_from_slice(piece);
                if piece.ends_with(b"\n") || line.len() > MAX_TAIL {
                    Self::show(&std::mem::take(&mut line));
                }
            }
        }
        if !line.is_empty() {
            Self::show(&line);
        }
    }

    fn show(line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        if line.starts_with(CANNOT_RUN) {
            // The guard's, who says why nothing runs: that is part of the error, or of the word on its end.
            return;
        }
        lossy::foreign(format!("[server] {}\n", clean(line.trim_end(), MAX_SHOWN)));
    }

    /// The end of what the last one wrote, for people.
    pub(super) fn tail(&self) -> String {
        let kept = self.kept.borrow();
        let bytes: Vec<u8> = kept.iter().copied().collect();
        clean_block(String::from_utf8_lossy(&bytes).trim()).into_owned()
    }
}
