//! Processes: who they are (pid and start time, because a pid alone never identifies one), whether
//! they still live, and how this crate spawns children. The only module that spawns, and the only
//! one allowed `unsafe`.

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::process::{Pid, PidfdFlags, Signal};

/// A process, identified beyond the reuse of its pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Identity {
    /// Process id.
    pub pid: u32,
    /// Field 22 of `/proc/<pid>/stat`, in clock ticks since boot; 0 when it could not be read.
    pub start_time: u64,
}

impl Identity {
    /// The process that has `pid` now; `None` when there is none (a zombie counts as none).
    pub fn of(pid: u32) -> Option<Self> {
        let (state, start_time) = stat(pid)?;
        (!matches!(state, 'Z' | 'X')).then_some(Self { pid, start_time })
    }

    /// This process.
    pub fn current() -> Self {
        Self::of(std::process::id()).unwrap_or(Self { pid: std::process::id(), start_time: 0 })
    }

    /// Whether this very process still runs.
    pub fn is_alive(&self) -> bool {
        Self::of(self.pid).is_some_and(|now| self.start_time == 0 || now.start_time == self.start_time)
    }

    /// Sends a signal, unless the process is gone.
    pub fn signal(&self, signal: Signal) -> bool {
        self.is_alive()
            && Pid::from_raw(self.pid.cast_signed())
                .is_some_and(|pid| rustix::process::kill_process(pid, signal).is_ok())
    }
}

/// State letter and start time from `/proc/<pid>/stat`; the name in between may hold anything.
fn stat(pid: u32) -> Option<(char, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let rest = &text[text.rfind(')')? + 1..];
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let start_time = fields.nth(18)?.parse().ok()?;
    Some((state, start_time))
}

/// The name a person knows a process by; `None` when it is not ours to see.
pub fn name(pid: u32) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).ok().map(|name| name.trim_end().to_owned())
}

/// Completes when the process has ended; at once when it already has, or is another by now.
#[allow(unsafe_code)]
pub async fn ended(process: Identity) {
    let pidfd = Pid::from_raw(process.pid.cast_signed())
        .and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK).ok());
    if !process.is_alive() {
        return;
    }
    // SAFETY: the registration owns the descriptor, which stays open until it is dropped.
    if let Some(Ok(pidfd)) = pidfd.map(|pidfd| unsafe { tokio::io::unix::AsyncFd::register(pidfd) }) {
        let _ = pidfd.readable().await;
        return;
    }
    // No pidfd (an old kernel, or none left): look twice a second.
    while process.is_alive() {
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    }
}

/// Resident memory of a process in bytes.
pub fn resident_bytes(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = text.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// Raises the soft limit on open files to the hard one, so that the connection limit is ours.
pub fn raise_open_files() {
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current = limit.maximum;
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, limit);
}

/// The process that listens on a TCP port of this machine, as far as this user may see:
/// pid and name. Reads `/proc/net/tcp*` and the descriptors of this user's processes.
pub fn listener_on(port: u16) -> Option<(u32, String)> {
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"].iter().find_map(|file| {
        let table = std::fs::read_to_string(file).ok()?;
        table.lines().skip(1).find_map(|line| {
            let mut fields = line.split_ascii_whitespace();
            let local = fields.nth(1)?;
            let state = fields.nth(1)?;
            let inode = fields.nth(5)?;
            let local_port = u16::from_str_radix(local.rsplit(':').next()?, 16).ok()?;
            (state == "0A" && local_port == port).then(|| format!("socket:[{inode}]"))
        })
    })?;
    let wanted = Path::new(&inode);
    let mut holders = std::fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let mut descriptors = std::fs::read_dir(entry.path().join("fd")).ok()?.flatten();
        descriptors
            .any(|fd| std::fs::read_link(fd.path()).is_ok_and(|target| target == wanted))
            .then(|| (pid, name(pid).unwrap_or_else(|| "?".to_owned())))
    });
    // A sidecar is the better answer than the keeper that holds the socket with it.
    let first = holders.next()?;
    let is_companion = first.1 == COMPANION_NAME;
    Some(is_companion.then(|| holders.find(|holder| holder.1 != COMPANION_NAME)).flatten().unwrap_or(first))
}

/// The name of a keeper's process.
pub const COMPANION_NAME: &str = "a2mcp-keeper";

/// Makes this process the leader of a session of its own: a terminal's hang-up or ^C never reaches
/// it. Fails harmlessly when it already leads a group.
pub fn detach_from_terminal() {
    let _ = rustix::process::setsid();
}

/// Where a limit on the size of files (`ulimit -f`) is set, writing beyond it is an error from now on, here
/// and in what is spawned from here, and no longer the end of the process.
#[allow(unsafe_code)]
pub fn outlive_large_files() {
    // SAFETY: no handler is installed; to ignore a signal touches nothing of this process.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// Lets a spawned child die with the thread that spawned it (the trap of a pool thread: only call
/// this from a thread that lives as long as the process) and gives it a process group of its own.
///
/// # Errors
/// As [`std::process::Command::spawn`].
pub fn spawn_dying_with_parent(
    command: &mut tokio::process::Command,
    signal: Signal,
) -> io::Result<tokio::process::Child> {
    die_with_parent(command.as_std_mut(), signal);
    command.spawn()
}

/// As [`spawn_dying_with_parent`], for a process without a runtime.
///
/// # Errors
/// As [`std::process::Command::spawn`].
pub fn spawn_child(command: &mut std::process::Command, signal: Signal) -> io::Result<std::process::Child> {
    die_with_parent(command, signal);
    command.spawn()
}

/// Spawns this very build as the guard of a child: it gets SIGTERM when this process (its thread) ends,
/// and leads a process group of its own.
///
/// # Errors
/// As [`std::process::Command::spawn`].
pub fn spawn_guard(
    args: &[&std::ffi::OsStr],
    set_up: impl FnOnce(&mut tokio::process::Command),
) -> io::Result<tokio::process::Child> {
    let mut command = this_build();
    command.args(args);
    set_up(&mut command);
    spawn_dying_with_parent(&mut command, Signal::TERM)
}

/// As [`spawn_child`] with SIGKILL, but in this process's own group: for a guard, whose group is ended
/// as one.
///
/// # Errors
/// As [`std::process::Command::spawn`].
pub fn spawn_guarded(command: &mut std::process::Command) -> io::Result<std::process::Child> {
    follow_parent(command, Signal::KILL);
    command.spawn()
}

/// From now on what its descendants leave behind becomes this process's own child: nothing that
/// leaves its group is lost sight of.
pub fn adopt_orphans() {
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
}

/// All that descend from a process, as `/proc` shows it at the moment.
pub fn descendants(of: u32) -> Vec<Identity> {
    let mut parents = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        if let Some((pid, parent)) = pid.and_then(|pid| Some((pid, parent(pid)?))) {
            parents.push((pid, parent));
        }
    }
    let mut found = vec![of];
    let mut next = 0;
    while let Some(&ancestor) = found.get(next) {
        next += 1;
        found.extend(parents.iter().filter(|(_, parent)| *parent == ancestor).map(|(pid, _)| *pid));
    }
    found.into_iter().skip(1).filter_map(Identity::of).collect()
}

fn parent(pid: u32) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text[text.rfind(')')? + 1..].split_ascii_whitespace().nth(1)?.parse().ok()
}

fn die_with_parent(command: &mut std::process::Command, signal: Signal) {
    use std::os::unix::process::CommandExt as _;
    follow_parent(command, signal);
    command.process_group(0);
}

#[allow(unsafe_code)]
fn follow_parent(command: &mut std::process::Command, signal: Signal) {
    use std::os::unix::process::CommandExt as _;
    let parent = std::process::id();
    // SAFETY: the closure runs between fork and exec and makes two async-signal-safe system calls;
    // it touches no memory of the parent but two integers it owns.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(signal))?;
            if rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent.cast_signed())
            {
                return Err(io::Error::other("the parent is gone"));
            }
            Ok(())
        });
    }
}

/// Kills the process group of a leader that is gone: while a member lives, its id names nobody else.
pub fn kill_group_of(leader: Identity) {
    let is_another = Identity::of(leader.pid).is_some_and(|now| now != leader);
    if let Some(group) = Pid::from_raw(leader.pid.cast_signed()).filter(|_| !is_another) {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
}

/// Spawns this very build as a companion that outlives this process: `stdin` is its connection to
/// us, stdout goes to `/dev/null`, stderr is ours.
///
/// # Errors
/// As [`std::process::Command::spawn`].
pub fn spawn_companion(args: &[&std::ffi::OsStr], stdin: OwnedFd) -> io::Result<tokio::process::Child> {
    let mut command = this_build();
    command.args(args).current_dir("/");
    command.stdin(stdin).stdout(std::process::Stdio::null());
    command.spawn()
}

/// The file on disk may be another build by now; the one that runs is this.
fn this_build() -> tokio::process::Command {
    let running = Path::new("/proc/self/exe");
    let mut command = if running.exists() {
        tokio::process::Command::new(running)
    } else {
        tokio::process::Command::new(own_binary())
    };
    command.arg0(own_binary());
    command
}

/// The build that runs here, as another process finds it for as long as this one lives.
pub fn this_build_from_elsewhere() -> PathBuf {
    let running = PathBuf::from(format!("/proc/{}/exe", std::process::id()));
    if running.exists() { running } else { own_binary() }
}

/// Becomes the program, with the id and the parent this process has; why not, when it returns.
pub fn become_program(command: &mut std::process::Command) -> io::Error {
    use std::os::unix::process::CommandExt as _;
    command.exec()
}

/// Makes a just started companion independent of who started it: a session of its own, no
/// descriptor beyond its connection and stderr, a name of its own. Returns what was its stdin.
///
/// # Errors
/// When descriptors cannot be duplicated.
#[allow(unsafe_code)]
pub fn become_companion() -> io::Result<OwnedFd> {
    detach_from_terminal();
    let _ = std::fs::write("/proc/self/comm", COMPANION_NAME);
    // Whatever a careless ancestor left open would be held open for as long as we live.
    let inherited: Vec<i32> = std::fs::read_dir("/proc/self/fd")
        .map(|entries| {
            entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
        })
        .unwrap_or_default();
    for fd in inherited.into_iter().filter(|fd| *fd > 2) {
        // SAFETY: called once at the start of the process, before anything in it owns a descriptor
        // above 2. The one of the directory just read is closed already, which is looked at first.
        unsafe {
            if rustix::io::fcntl_getfd(BorrowedFd::borrow_raw(fd)).is_ok() {
                drop(OwnedFd::from_raw_fd(fd));
            }
        }
    }
    let connection = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    Ok(connection)
}

/// The path this process was started from: what whoever starts the next one starts, whatever is there
/// by then. Looked at once, at the start: later the system names wherever the old file was moved.
pub fn own_binary() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        // As it was called: links on the way there are followed anew each time.
        let called = std::env::args_os().next().map(PathBuf::from);
        if let Some(path) = called.filter(|path| path.is_absolute() && path.is_file()) {
            return path;
        }
        let path = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("a2mcp"));
        // Linux marks a replaced binary in the name of the old one.
        match path.to_str().and_then(|path| path.strip_suffix(" (deleted)")) {
            Some(replaced) => PathBuf::from(replaced),
            None => path,
        }
    })
    .clone()
}

/// Runs a program to its end, bounded; its stderr when it fails.
///
/// # Errors
/// What it said, or why it could not be run, for people.
pub async fn try_run(
    program: &Path,
    args: &[&std::ffi::OsStr],
    limit: std::time::Duration,
) -> Result<(), String> {
    let mut command = tokio::process::Command::new(program);
    command.args(args).stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
    command.stderr(std::process::Stdio::piped()).kill_on_drop(true);
    let output = match tokio::time::timeout(limit, command.output()).await {
        Ok(output) => output.map_err(|error| format!("cannot run {}: {error}", program.display()))?,
        Err(_) => return Err(format!("{} did not end within {} s", program.display(), limit.as_secs())),
    };
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!(
        "{} ended with {}: {}",
        program.display(),
        output.status,
        crate::text::clean(said.trim(), 500)
    ))
}

/// Runs a program to its end, bounded, without the variables whose names begin with one of
/// `remove_env`; what it wrote to stdout, as far as it is read (64 KiB). Empty when it took too long.
///
/// # Errors
/// When it cannot be started.
pub async fn ask(
    program: &Path,
    args: &[&std::ffi::OsStr],
    remove_env: &[&str],
    limit: std::time::Duration,
) -> io::Result<String> {
    use tokio::io::AsyncReadExt as _;
    const MAX_ANSWER: u64 = 64 * 1024;
    let mut command = tokio::process::Command::new(program);
    command.args(args).current_dir("/").kill_on_drop(true);
    command.stdin(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    command.stdout(std::process::Stdio::piped());
    for (name, _) in std::env::vars_os() {
        if remove_env.iter().any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes())) {
            command.env_remove(name);
        }
    }
    let mut child = start_patiently(&mut command).await?;
    let leader = child.id().and_then(Identity::of);
    let mut said = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        let read = async {
            let _ = stdout.take(MAX_ANSWER).read_to_end(&mut said).await;
        };
        let _ = tokio::time::timeout(limit, read).await;
    }
    // It has no business any more, and neither has what it may have started.
    let _ = child.start_kill();
    let _ = child.wait().await;
    if let Some(leader) = leader {
        kill_group_of(leader);
    }
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// A file that was just written may still be open for writing in a child that another thread is
/// starting; the kernel refuses to run it until that one is through.
async fn start_patiently(command: &mut tokio::process::Command) -> io::Result<tokio::process::Child> {
    const TRIES: u32 = 50;
    const PAUSE: std::time::Duration = std::time::Duration::from_millis(20);
    die_with_parent(command.as_std_mut(), Signal::KILL);
    for _ in 1..TRIES {
        match command.spawn() {
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {
                tokio::time::sleep(PAUSE).await;
            }
            done => return done,
        }
    }
    command.spawn()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_tells_a_process_from_a_later_one_with_its_pid() {
        let me = Identity::current();
        assert!(me.is_alive() && me.start_time > 0);
        assert!(!Identity { start_time: me.start_time + 1, ..me }.is_alive());
        assert!(Identity::of(u32::MAX >> 1).is_none());
    }

    #[test]
    fn the_holder_of_a_port_is_named() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(listener_on(port).unwrap().0, std::process::id());
    }
}
