//! Waiting for signals. Each arrives as a byte in a socket pair.

use std::io;
use std::os::unix::net::UnixStream as StdStream;

use signal_hook::low_level::pipe;
use tokio::net::UnixStream;

/// A set of signals that are waited for together.
pub struct Watch {
    stream: UnixStream,
}

impl Watch {
    /// From now on these signals do nothing but wake [`Watch::next`].
    ///
    /// # Errors
    /// As the system's.
    pub fn open(signals: &[i32]) -> io::Result<Self> {
        let (read, write) = StdStream::pair()?;
        for signal in signals {
            pipe::register(*signal, write.try_clone()?)?;
        }
        read.set_nonblocking(true)?;
        Ok(Self { stream: UnixStream::from_std(read)? })
    }

    /// Completes at the next signal; safe to drop.
    pub async fn next(&mut self) {
        let mut byte = [0];
        loop {
            // The writing ends live as long as the process: there is no end of stream.
            if self.stream.readable().await.is_ok() && self.stream.try_read(&mut byte).is_ok() {
                return;
            }
        }
    }
}
