//! Takes stdin and stdout over for frames. The descriptors 0 and 1 are replaced afterwards (by
//! `/dev/null` and by stderr), so that nothing printed by mistake reaches the protocol and no child
//! ever inherits it.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{FileType, Mode, OFlags};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;

use crate::crash::{self, Carries};

/// The frames' two directions.
pub type Halves = (Box<dyn AsyncRead + Unpin>, Box<dyn AsyncWrite + Unpin>);

/// Takes stdin and stdout of this process; call once, inside the runtime.
///
/// # Errors
/// When either is no pipe or socket (a terminal, a file): a shim spawns the sidecar, nobody else.
pub fn take() -> io::Result<Halves> {
    let input = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    let output = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?;
    let halves = (reader(input)?, writer(output)?);
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(rustix::stdio::stderr())?;
    Ok(halves)
}

/// A non-blocking reader over a pipe or a socket.
///
/// # Errors
/// When `fd` is neither.
pub fn reader(fd: OwnedFd) -> io::Result<Box<dyn AsyncRead + Unpin>> {
    Ok(match kind(&fd)? {
        FileType::Fifo => Box::new(pipe::Receiver::from_owned_fd(fd)?),
        _ => Box::new(socket(fd)?),
    })
}

/// A non-blocking writer over a pipe or a socket.
///
/// # Errors
/// When `fd` is neither.
pub fn writer(fd: OwnedFd) -> io::Result<Box<dyn AsyncWrite + Unpin>> {
    Ok(match kind(&fd)? {
        FileType::Fifo => Box::new(crash::watch(pipe::Sender::from_owned_fd(fd)?, Carries::Frames)),
        _ => Box::new(crash::watch(socket(fd)?, Carries::Frames)),
    })
}

fn kind(fd: &OwnedFd) -> io::Result<FileType> {
    match FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) {
        kind @ (FileType::Fifo | FileType::Socket) => Ok(kind),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "stdin and stdout must be pipes or sockets")),
    }
}

fn socket(fd: OwnedFd) -> io::Result<UnixStream> {
    let stream = std::os::unix::net::UnixStream::from(fd);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}
