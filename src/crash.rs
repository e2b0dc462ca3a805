//! Crash points for the tests: a debug build dies by SIGKILL at a named point, when
//! `A2MCP_CRASH_AT=<point>:<nth>` said so at its start. No unwinding and no flush: what the kernel has
//! by then is all that is left. Read once per process; in a release build nothing of this exists.
//!
//! A call meets its points in this order: `before-audit-start`, `after-audit-start`, `frame-half` (half
//! of its frame is in the pipe), `frame-whole`, `result-read`, `done-written`, `response-half` (half of
//! the response is on the socket), `response-whole`. The code marks a point with [`at`]; the halves of
//! writes are the business of [`Watched`], which knows a call by its text.

#[cfg(debug_assertions)]
pub(crate) use armed::{Watched, at};

/// Dies here when this point is the one.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub(crate) fn at(_point: &str) {}

/// A pipe or a socket that carries calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Carries {
    /// Requests to the host.
    Frames,
    /// Responses to callers.
    Responses,
}

/// Watches what is written: nothing to do.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub(crate) fn watch<T>(writer: T, _carries: Carries) -> T {
    writer
}

/// Watches what is written to `writer`.
#[cfg(debug_assertions)]
pub(crate) fn watch<T>(writer: T, carries: Carries) -> Watched<T> {
    Watched::new(writer, carries)
}

#[cfg(debug_assertions)]
mod armed {
    use std::io;
    use std::pin::Pin;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::{Context, Poll};

    use rustix::process::{Signal, getpid, kill_process};
    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

    use super::Carries;

    /// The point and how often it may still be passed, this time included.
    fn armed() -> Option<&'static (String, AtomicU32)> {
        static ARMED: OnceLock<Option<(String, AtomicU32)>> = OnceLock::new();
        let read = || {
            let wanted = std::env::var("A2MCP_CRASH_AT").ok()?;
            let (point, nth) = wanted.split_once(':')?;
            Some((point.to_owned(), AtomicU32::new(nth.parse().ok()?)))
        };
        ARMED.get_or_init(read).as_ref()
    }

    /// Dies here when this point is the one.
    pub(crate) fn at(point: &str) {
        if is_now(point) {
            die();
        }
    }

    /// Counts; whether it is the time.
    fn is_now(point: &str) -> bool {
        armed().is_some_and(|(wanted, left)| wanted == point && left.fetch_sub(1, Ordering::Relaxed) == 1)
    }

    fn die() -> ! {
        let _ = kill_process(getpid(), Signal::KILL);
        unreachable!("the kernel has ended this process")
    }

    /// A writer that may die with half of a call's text written, or with all of it.
    pub(crate) struct Watched<T> {
        inner: T,
        /// `None`: neither half nor whole is wanted, and everything passes as it is.
        watches: Option<Watch>,
        /// Its text has begun; the time has come when its end is written too.
        awaits_end: bool,
        /// The last bytes that were written since then.
        tail: Vec<u8>,
    }

    #[derive(Clone, Copy)]
    struct Watch {
        /// What a call's text contains and nothing else does.
        mark: &'static [u8],
        /// How it may end: as JSON, as the last event in a chunk of its own, or with the last chunk.
        ends: &'static [&'static [u8]],
        half: &'static str,
        whole: &'static str,
    }

    impl<T> Watched<T> {
        pub(super) fn new(inner: T, carries: Carries) -> Self {
            let watch = match carries {
                Carries::Frames => Watch {
                    mark: br#""method":"tools/call""#,
                    ends: &[b"}"],
                    half: "frame-half",
                    whole: "frame-whole",
                },
                Carries::Responses => Watch {
                    mark: br#"{"content":["#,
                    ends: &[b"}}", b"\n\n\r\n", b"\r\n0\r\n\r\n"],
                    half: "response-half",
                    whole: "response-whole",
                },
            };
            let is_wanted =
                armed().is_some_and(|(point, _)| [watch.half, watch.whole].contains(&point.as_str()));
            Self { inner, watches: is_wanted.then_some(watch), awaits_end: false, tail: Vec::new() }
        }
    }

    impl<T> Watched<T> {
        /// Dies when that was the end. Ends are looked for at the ends of writes: a text that only
        /// contains one goes on in the same write.
        fn has_written(&mut self, bytes: &[u8]) {
            self.tail.extend_from_slice(bytes);
            self.tail.drain(..self.tail.len().saturating_sub(8));
            let ends = self.watches.map_or(&[][..], |watch| watch.ends);
            if ends.iter().any(|end| self.tail.ends_with(end)) {
                die();
            }
        }
    }

    impl<T: AsyncWrite + Unpin> AsyncWrite for Watched<T> {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            let mut wanted = bytes;
            let mut dies = false;
            if let Some(watch) = self.watches
                && let Some(found) = bytes.windows(watch.mark.len()).position(|part| part == watch.mark)
            {
                dies = is_now(watch.half);
                if dies {
                    wanted = &bytes[..found + (bytes.len() - found) / 2];
                }
                self.awaits_end |= is_now(watch.whole);
            }
            let written = Pin::new(&mut self.inner).poll_write(cx, wanted);
            if let Poll::Ready(Ok(count)) = written {
                if dies {
                    die();
                }
                if self.awaits_end {
                    self.has_written(&bytes[..count]);
                }
            }
            written
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            slices: &[io::IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            if self.watches.is_none() {
                return Pin::new(&mut self.inner).poll_write_vectored(cx, slices);
            }
            let joined: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
            self.poll_write(cx, &joined)
        }

        fn is_write_vectored(&self) -> bool {
            self.inner.is_write_vectored()
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.inner).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.inner).poll_shutdown(cx)
        }
    }

    impl<T: AsyncRead + Unpin> AsyncRead for Watched<T> {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.inner).poll_read(cx, buffer)
        }
    }
}
