//! Frames between shim and sidecar (contract 17): a four-byte big-endian length, then that many
//! bytes of UTF-8 JSON-RPC 2.0.
//!
//! [`codec`] cuts frames out of a byte stream, [`envelope`] finds the JSON-RPC members without
//! touching the payloads, [`raw`] reads and rewrites objects byte for byte, [`messages`] are the
//! typed `bridge/*` messages. Nothing here does I/O. `ipc-schema/` is the same law as JSON Schema.

pub mod codec;
pub mod envelope;
pub mod messages;
pub mod raw;

pub use codec::{Frame, FrameCodec, FrameError, MAX_FRAME};
pub use envelope::{Envelope, Message, Shape};
