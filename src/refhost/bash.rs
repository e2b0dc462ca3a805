//! The `bash` tool: a command in a process group of its own, its output bounded. Cancel, time-out
//! and the command's own end all end the whole group, so nothing it left in the background stays.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use serde::Deserialize;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

use super::launch::Exit;
use super::store::Outcome;
use super::tools::text_result;
use crate::process;

/// The most output that is kept; the rest is read and counted.
const MAX_OUTPUT: usize = 1 << 20;
/// Between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_millis(300);
/// How long output is read after the command's end.
const DRAIN: Duration = Duration::from_millis(200);
/// The longest time-out: a day.
const MAX_TIMEOUT: f64 = 86_400.0;

/// The tool's arguments.
#[derive(Debug, Deserialize)]
pub(super) struct BashArguments {
    command: String,
    /// Seconds.
    #[serde(default)]
    timeout: Option<f64>,
}

/// Why the command ended.
enum Why {
    Itself(Exit),
    Cancelled,
    TimedOut,
}

pub(super) async fn run(arguments: BashArguments, cancelled: &CancellationToken) -> Outcome {
    match output(arguments, cancelled).await {
        Ok((text, is_error)) => text_result(&text, is_error),
        Err(error) => text_result(&format!("bash: {error}"), true),
    }
}

async fn output(arguments: BashArguments, cancelled: &CancellationToken) -> Result<(String, bool), String> {
    let timeout = match arguments.timeout {
        Some(seconds) if (0.0..=MAX_TIMEOUT).contains(&seconds) => seconds,
        Some(_) => return Err("timeout: a number of seconds, at most a day".to_owned()),
        None => MAX_TIMEOUT,
    };
    let (mut child, mut output) = spawn(&arguments.command).map_err(|error| error.to_string())?;
    let group = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let mut kept = Vec::new();
    let mut dropped = 0;
    let why = {
        let reading = collect(&mut output, &mut kept, &mut dropped);
        tokio::pin!(reading);
        let mut is_reading = true;
        let deadline = tokio::time::sleep(Duration::from_secs_f64(timeout));
        tokio::pin!(deadline);
        let why = loop {
            tokio::select! {
                () = &mut reading, if is_reading => is_reading = false,
                status = child.wait() => break Why::Itself(status.map_or(Exit::Unknown, Exit::from)),
                () = cancelled.cancelled() => break Why::Cancelled,
                () = &mut deadline => break Why::TimedOut,
            }
        };
        if !matches!(why, Why::Itself(_)) {
            signal(group, Signal::TERM);
            if tokio::time::timeout(GRACE, child.wait()).await.is_err() {
                signal(group, Signal::KILL);
                let _ = child.wait().await;
            }
        }
        // The leader is gone; what it left behind goes too, and with it the last writer.
        signal(group, Signal::KILL);
        if is_reading {
            let _ = tokio::time::timeout(DRAIN, reading).await;
        }
        why
    };
    let mut text = String::from_utf8_lossy(&kept).into_owned();
    let mut add = |line: String| {
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(&line);
    };
    if dropped > 0 {
        add(format!("[{dropped} more bytes of output were dropped]"));
    }
    let is_error = match why {
        Why::Itself(Exit::Code(0)) => false,
        Why::Itself(exit) => {
            add(format!("[{exit}]"));
            true
        }
        Why::Cancelled => {
            add("[command aborted]".to_owned());
            true
        }
        Why::TimedOut => {
            add(format!("[timed out after {timeout} s]"));
            true
        }
    };
    Ok((text, is_error))
}

fn spawn(command: &str) -> std::io::Result<(Child, pipe::Receiver)> {
    let (output, input) = std::io::pipe()?;
    let output = pipe::Receiver::from_owned_fd(output.into())?;
    let mut bash = Command::new("bash");
    bash.arg("-c").arg(command).stdin(Stdio::null());
    bash.stdout(input.try_clone()?).stderr(input).kill_on_drop(true);
    let child = process::spawn_dying_with_parent(&mut bash, Signal::KILL)?;
    Ok((child, output))
}

async fn collect(output: &mut pipe::Receiver, kept: &mut Vec<u8>, dropped: &mut usize) {
    let mut buffer = [0; 8192];
    while let Ok(len @ 1..) = output.read(&mut buffer).await {
        let room = len.min(MAX_OUTPUT - kept.len());
        kept.extend_from_slice(&buffer[..room]);
        *dropped += len - room;
    }
}

/// Signals the whole group. Its leader's pid stays reserved while any member lives.
fn signal(group: Option<Pid>, signal: Signal) {
    if let Some(group) = group {
        let _ = rustix::process::kill_process_group(group, signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn bash(command: &str, timeout: Option<f64>, cancelled: &CancellationToken) -> (String, bool) {
        output(BashArguments { command: command.into(), timeout }, cancelled).await.unwrap()
    }

    #[tokio::test]
    async fn output_and_exit_code_come_back() {
        let none = CancellationToken::new();
        assert_eq!(bash("echo out; echo err >&2", None, &none).await, ("out\nerr\n".into(), false));
        assert_eq!(bash("printf x; exit 3", None, &none).await, ("x\n[exit code 3]".into(), true));
        assert_eq!(bash("kill -9 $$", None, &none).await, ("[signal 9]".into(), true));
    }

    #[tokio::test]
    async fn output_is_bounded_and_the_command_still_ends() {
        let (text, is_error) =
            bash("head -c 3000000 /dev/zero | tr '\\0' x", None, &CancellationToken::new()).await;
        assert!(!is_error);
        assert!(text.len() < MAX_OUTPUT + 100 && text.ends_with("more bytes of output were dropped]"));
    }

    #[tokio::test]
    async fn a_cancel_ends_the_whole_group() {
        let cancelled = CancellationToken::new();
        cancelled.cancel();
        let (text, is_error) =
            bash("trap '' TERM; (trap '' TERM; sleep 60) & wait; sleep 60", None, &cancelled).await;
        assert!(is_error && text.ends_with("[command aborted]"), "{text}");
    }

    #[tokio::test]
    async fn what_was_left_in_the_background_goes_with_the_command() {
        let (text, _) = bash("sleep 61 & echo $!", None, &CancellationToken::new()).await;
        let pid: u32 = text.trim().parse().unwrap();
        if let Some(left) = process::Identity::of(pid) {
            tokio::time::timeout(Duration::from_secs(5), process::ended(left)).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_timeout_is_an_error_that_says_so() {
        let (text, is_error) = bash("sleep 60", Some(0.05), &CancellationToken::new()).await;
        assert!(is_error && text == "[timed out after 0.05 s]", "{text}");
    }
}
