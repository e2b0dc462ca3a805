//! Waiting for the signals that ask a process to end. Each arrives as a byte in a socket pair.

use std::io;
use std::os::unix::net::UnixStream as StdStream;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::pipe;
use tokio::net::UnixStream;

/// SIGINT, SIGTERM and SIGHUP.
pub(super) struct EndSignals {
    stream: UnixStream,
}

impl EndSignals {
    /// From now on the signals do nothing but wake [`EndSignals::next`].
    pub(super) fn open() -> io::Result<Self> {
        let (read, write) = StdStream::pair()?;
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            pipe::register(signal, write.try_clone()?)?;
        }
        read.set_nonblocking(true)?;
        Ok(Self { stream: UnixStream::from_std(read)? })
    }

    /// Completes at the next signal; safe to drop.
    pub(super) async fn next(&mut self) {
        let mut byte = [0];
        loop {
            // The writing ends live as long as the process: there is no end of stream.
            if self.stream.readable().await.is_ok() && self.stream.try_read(&mut byte).is_ok() {
                return;
            }
        }
    }
}
