//! What is said on the keeper's private socket: one JSON line per request, one JSON line per answer,
//! in order, and events in between. A line may carry one descriptor (`SCM_RIGHTS`).
//!
//! `hello`, `socket` and `end` keep their form in every protocol version: a sidecar of another
//! version can always take the listening socket, and an operator can always end the keeper.
//! Everything here is bounded; what is no request is answered with an error and nothing else.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::process::Identity;

/// The version of the verbs other than `hello`, `socket` and `end`.
pub const PROTOCOL: u32 = 1;
/// Longest line in bytes, each way.
pub const MAX_LINE: usize = 1 << 20;
/// Longest note of a child in bytes.
pub const MAX_NOTE: usize = 8 << 10;
/// Most descriptors that wait for their request.
const MAX_DESCRIPTORS: usize = 4;

/// What a client of the keeper may ask.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Request {
    /// Who is there; answered with [`Greeting`]. The first request of a connection.
    Hello {
        /// The client's [`PROTOCOL`].
        protocol: u32,
        /// It is the sidecar: while it is connected, the keeper stays.
        #[serde(default)]
        sidecar: bool,
    },
    /// A copy of the listening socket, carried by the answer.
    Socket,
    /// Take the listening socket this request carries.
    Adopt,
    /// Stop listening.
    Close,
    /// Start a child; answered with its [`ChildStatus`].
    Spawn(Spawn),
    /// Send a child's group a signal.
    Signal {
        /// Which child.
        child: u64,
        /// Which signal.
        signal: ChildSignal,
        /// SIGKILL follows after so many milliseconds, unless it has ended.
        kill_after_ms: Option<u64>,
    },
    /// Replace a child's note.
    Note {
        /// Which child.
        child: u64,
        /// The new note.
        note: Note,
    },
    /// Everything; answered with [`Status`].
    Status,
    /// The last output of a child; answered with [`Output`].
    Output {
        /// Which child.
        child: u64,
        /// At most so many bytes of each stream.
        max_bytes: usize,
    },
    /// Close the socket, stop the children, end; answered when that is done.
    End,
}

/// A signal for a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ChildSignal {
    /// SIGTERM.
    Term,
    /// SIGINT.
    Interrupt,
    /// SIGHUP.
    HangUp,
    /// SIGKILL.
    Kill,
}

/// A child to start.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spawn {
    /// What it is for, e.g. `tunnel`.
    pub purpose: String,
    /// Absolute path of the program.
    pub program: String,
    /// Its arguments; no secret belongs here, everybody on the machine sees them.
    #[serde(default)]
    pub args: Vec<String>,
    /// Its working directory; default `/`.
    #[serde(default)]
    pub dir: Option<String>,
    /// Variables whose names begin so are not inherited.
    #[serde(default)]
    pub remove_env: Vec<String>,
    /// Variables it gets beyond the inherited ones.
    #[serde(default)]
    pub env: Vec<(String, String)>,
    /// See [`Note`].
    #[serde(default)]
    pub note: Note,
}

/// What a sidecar tells its successors of a child. Opaque to the keeper and in its memory only: it
/// may hold credentials, so it is never shown.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note(pub String);

impl fmt::Debug for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Note({} bytes)", self.0.len())
    }
}

/// One line of the keeper.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Message {
    /// The answer to the oldest unanswered request.
    Ok(Value),
    /// It was refused; why, for people.
    Error(String),
    /// Something happened.
    Event(Event),
}

/// What the keeper tells its sidecar unasked.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Event {
    /// A child has ended.
    ChildEnded(ChildStatus),
}

/// The answer to `hello`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Greeting {
    /// The keeper's [`PROTOCOL`].
    pub protocol: u32,
    /// The keeper's build.
    pub version: String,
    /// The keeper's process.
    pub keeper: Identity,
    /// The host it follows.
    pub host: Identity,
}

/// The answer to `status`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Since when it runs, in milliseconds.
    pub uptime_ms: u64,
    /// Where it listens; absent when it does not.
    pub address: Option<SocketAddr>,
    /// Its children, the oldest first; the last ended ones among them.
    pub children: Vec<ChildStatus>,
}

/// A child.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ChildStatus {
    /// The keeper's number for it, never used twice.
    pub child: u64,
    /// What it is for.
    pub purpose: String,
    /// Its process.
    pub process: Identity,
    /// Since when it runs or ran, in milliseconds.
    pub age_ms: u64,
    /// How it ended; absent while it runs.
    pub exit: Option<Exit>,
    /// What the sidecar that started it says of it.
    pub note: Note,
    /// The end of its output, both streams, for people.
    pub last_words: String,
}

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Exit {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(i32),
}

/// The answer to `output`: the end of what a child wrote, and how much it wrote in all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Output {
    /// On stdout.
    pub stdout: String,
    /// Bytes on stdout so far.
    pub stdout_total: u64,
    /// On stderr.
    pub stderr: String,
    /// Bytes on stderr so far.
    pub stderr_total: u64,
}

/// A message as a line.
///
/// # Errors
/// When it is longer than [`MAX_LINE`].
pub fn line(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    if line.len() > MAX_LINE {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a message of {} bytes is longer than the keeper takes", line.len()),
        ));
    }
    Ok(line)
}

/// Sends some of `bytes`, with the descriptor on the first of them; never blocks.
///
/// # Errors
/// As `sendmsg`; `WouldBlock` when the peer does not read.
pub fn send(socket: impl AsFd, bytes: &[u8], descriptor: Option<&OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(AsFd::as_fd);
    if let Some(descriptor) = &descriptors {
        control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(descriptor)));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?)
}

/// Collects what a peer sends into lines and descriptors.
#[derive(Debug, Default)]
pub struct Inbox {
    bytes: Vec<u8>,
    searched: usize,
    descriptors: VecDeque<OwnedFd>,
}

impl Inbox {
    /// Takes what has arrived; never blocks. 0 at the end.
    ///
    /// # Errors
    /// As `recvmsg`; `WouldBlock` when nothing has arrived, `InvalidData` when a line is too long.
    pub fn receive(&mut self, socket: impl AsFd) -> io::Result<usize> {
        let mut buffer = [0; 8 << 10];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received =
            rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut buffer)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                // Those beyond the limit are closed here.
                let room = MAX_DESCRIPTORS - self.descriptors.len();
                self.descriptors.extend(descriptors.take(room));
            }
        }
        self.bytes.extend_from_slice(&buffer[..received.bytes]);
        if self.bytes.len() > MAX_LINE && !self.bytes.contains(&b'\n') {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a line is too long"));
        }
        Ok(received.bytes)
    }

    /// The next whole line, without its end.
    pub fn next_line(&mut self) -> Option<Vec<u8>> {
        let Some(end) = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n') else {
            self.searched = self.bytes.len();
            return None;
        };
        let rest = self.bytes.split_off(self.searched + end + 1);
        let mut line = std::mem::replace(&mut self.bytes, rest);
        line.pop();
        self.searched = 0;
        Some(line)
    }

    /// The oldest descriptor that came.
    pub fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop_front()
    }

    /// Closes descriptors that nothing asked for; call when no line is left.
    pub fn drop_strays(&mut self) {
        if self.bytes.is_empty() {
            self.descriptors.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn lines_come_whole_however_they_are_cut_and_bring_their_descriptor() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut inbox = Inbox::default();
        let carried = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        for piece in [&b"{\"a\""[..], b":1}\n{\"b", b"\":2}\n"] {
            assert_eq!(send(&theirs, piece, None).unwrap(), piece.len());
            inbox.receive(&ours).unwrap();
        }
        assert_eq!(inbox.next_line().unwrap(), b"{\"a\":1}");
        assert_eq!(inbox.next_line().unwrap(), b"{\"b\":2}");
        assert!(inbox.next_line().is_none() && inbox.take_descriptor().is_none());
        send(&theirs, b"x\n", Some(&carried)).unwrap();
        inbox.receive(&ours).unwrap();
        assert_eq!(inbox.next_line().unwrap(), b"x");
        let flags = rustix::io::fcntl_getfd(inbox.take_descriptor().unwrap()).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "no child inherits it");
    }

    #[test]
    fn strays_are_closed_and_long_lines_end_the_connection() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut inbox = Inbox::default();
        let carried = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        for _ in 0..20 {
            send(&theirs, b"x\n", Some(&carried)).unwrap();
            inbox.receive(&ours).unwrap();
        }
        assert_eq!(inbox.descriptors.len(), MAX_DESCRIPTORS);
        while inbox.next_line().is_some() {}
        inbox.drop_strays();
        assert!(inbox.take_descriptor().is_none());
        let error = loop {
            send(&theirs, &[b'x'; 4096], None).unwrap();
            if let Err(error) = inbox.receive(&ours) {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_note_is_never_shown() {
        assert_eq!(format!("{:?}", Note("secret".into())), "Note(6 bytes)");
    }
}
