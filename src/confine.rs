//! Confining the file server to what is shared, with Landlock, in `a2mcp confine -- PROGRAM ARGS`: a
//! process that gives up its rights and then becomes the program, under the same id.
//!
//! The file server looks where a path leads and opens it afterwards, so a link that is swapped in between
//! takes it out of the share. The kernel then says no: the program may read what it needs to run, and
//! touch nothing else but the share and its own socket. The rights are those of the file or folder that is
//! opened here, not of its name: whoever puts another in its place has to start the program anew
//! ([`crate::app`] does).
//!
//! Not every kernel has it (Linux 5.13, switched on); without it the program runs as any other.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;

use landlock::{
    ABI, Access as _, AccessFs, BitFlags, LandlockStatus, PathBeneath, PathFd, RestrictSelf, Ruleset,
    RulesetAttr as _, RulesetCreated, RulesetCreatedAttr as _, RulesetError, make_bitflags,
};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};

use crate::process;

/// The command's exit code when the program was not run; as in a shell.
pub const NOT_RUN: u8 = 126;

/// The rights that are given up: those of this version, as far as the kernel knows them. Later ones are
/// not, until somebody has looked at what they mean for the file server.
const VERSION: ABI = ABI::V5;
/// Where the libraries of a program are that is linked to any, and what loads them.
const LIBRARIES: [&str; 9] = [
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/nix/store",
    "/gnu/store",
    "/home/linuxbrew/.linuxbrew/lib",
    "/home/linuxbrew/.linuxbrew/Cellar",
];
/// What else it reads: where its libraries are, the local time, how many processors it may use. Of `/etc`
/// and `/proc` nothing more: there is much in them that is nobody's business.
const READ: [&str; 7] = [
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/localtime",
    "/usr/share/zoneinfo",
    "/proc/self/cgroup",
    "/sys/fs/cgroup",
    "/dev/urandom",
];

/// Arguments of `a2mcp confine`.
#[derive(Debug, Clone, clap::Args)]
pub struct ConfineArgs {
    /// What it may work with: a folder, or one file that it may read
    #[arg(long, value_name = "PATH")]
    share: PathBuf,
    /// The file it reads first
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The folder its socket is made in
    #[arg(long, value_name = "DIR")]
    sockets: PathBuf,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<std::ffi::OsString>,
}

impl ConfineArgs {
    /// As the arguments of a process.
    pub fn of(share: &str, config: &str, sockets: &str, program: &str, args: &[String]) -> Vec<String> {
        let own = ["confine", "--share", share, "--config", config, "--sockets", sockets, "--", program];
        own.into_iter().map(str::to_owned).chain(args.iter().cloned()).collect()
    }
}

/// Whether this kernel confines, and this program can be: what a script starts is not for us to know. Says
/// so once, when it is not.
pub fn is_possible(program: &Path) -> bool {
    static SAID: Once = Once::new();
    // Asks the kernel and changes nothing.
    let status = RestrictSelf::default().no_new_privs(false).apply().map(|status| status.landlock);
    if !matches!(status, Ok(LandlockStatus::Available { .. })) {
        SAID.call_once(|| {
            tracing::info!(
                ?status,
                "this kernel has no Landlock: the file server is not confined to the share"
            );
        });
        return false;
    }
    let is_binary = is_binary(program);
    if !is_binary {
        SAID.call_once(|| {
            let program = program.display().to_string();
            tracing::info!(program, "a script in the file server's place is not confined to the share");
        });
    }
    is_binary
}

fn is_binary(program: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(program).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *b"\x7fELF"
}

/// Confines this process and becomes the program; why it could not, for people.
pub fn run(args: &ConfineArgs) -> String {
    let Some((program, rest)) = args.command.split_first() else { return "no program is named".into() };
    let program = Path::new(program);
    let share = match open(&args.share) {
        Ok(share) => share,
        Err(error) => return format!("cannot open {}: {error}", args.share.display()),
    };
    let confined = rules(args, share, program).and_then(RulesetCreated::restrict_self);
    if let Err(error) = confined {
        return format!(
            "the file server cannot be confined to the share: {}",
            crate::text::with_causes(&error)
        );
    }
    let error = process::become_program(Command::new(program).args(rest));
    format!("cannot run {}: {error}", program.display())
}

/// What is shared. Its path was followed to its end before: a link in it is somebody's swap.
fn open(share: &Path) -> io::Result<(OwnedFd, bool)> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let share = rustix::fs::openat2(CWD, share, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    let is_folder = FileType::from_raw_mode(rustix::fs::fstat(&share)?.st_mode) == FileType::Directory;
    Ok((share, is_folder))
}

fn rules(
    args: &ConfineArgs,
    (share, is_folder): (OwnedFd, bool),
    program: &Path,
) -> Result<RulesetCreated, RulesetError> {
    let file = make_bitflags!(AccessFs::{ReadFile});
    let folder = make_bitflags!(AccessFs::{ReadFile | ReadDir});
    let run = make_bitflags!(AccessFs::{Execute | ReadFile | ReadDir});
    let work = make_bitflags!(AccessFs::{
        ReadFile | ReadDir | WriteFile | Truncate | MakeReg | MakeDir | RemoveFile
    });
    let null = make_bitflags!(AccessFs::{ReadFile | WriteFile});
    let socket = make_bitflags!(AccessFs::{MakeSock});
    let mut rules = Ruleset::default().handle_access(AccessFs::from_all(VERSION))?.create()?;
    rules = allow(rules, share, if is_folder { work } else { file })?;
    let libraries = LIBRARIES.iter().map(|path| (Path::new(path), run));
    let read = READ.iter().map(|path| (Path::new(path), folder));
    let own = [
        (program, run),
        (args.config.as_path(), file),
        (args.sockets.as_path(), socket),
        (Path::new("/dev/null"), null),
    ];
    for (path, access) in libraries.chain(read).chain(own) {
        // What is not there is not needed; the program says so itself if it is.
        if let Ok(opened) = PathFd::new(path) {
            let access = if path.is_dir() { access } else { access & AccessFs::from_file(VERSION) };
            rules = allow(rules, opened, access)?;
        }
    }
    Ok(rules)
}

fn allow(
    rules: RulesetCreated,
    beneath: impl AsFd,
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, RulesetError> {
    rules.add_rule(PathBeneath::new(beneath, access))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_binary_is_confined() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("dufs");
        std::fs::write(&script, "#!/bin/sh\n").unwrap();
        assert!(!is_binary(&script) && !is_binary(dir.path()) && !is_binary(&dir.path().join("none")));
        assert!(is_binary(&std::env::current_exe().unwrap()));
    }

    #[test]
    fn a_link_on_the_way_to_what_is_shared_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("real")).unwrap();
        std::fs::write(root.join("real/file"), "").unwrap();
        std::os::unix::fs::symlink("real", root.join("link")).unwrap();
        assert!(open(&root.join("real")).unwrap().1);
        assert!(!open(&root.join("real/file")).unwrap().1);
        assert!(open(&root.join("link")).is_err());
        assert!(open(&root.join("link/file")).is_err());
    }
}
