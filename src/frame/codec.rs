//! The length-prefixed codec, and [`Frame`], an outgoing frame that shares its large parts.

use std::io;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio_util::codec::{Decoder, Encoder};

/// The largest payload of a frame in bytes (contract 17: 192 MiB).
pub const MAX_FRAME: usize = 192 << 20;

/// From this size on a received frame gets memory of its own, so that the read buffer does not
/// keep the capacity of the largest frame ever seen.
const OWN_ALLOCATION: usize = 256 << 10;

/// Why a link of frames ended or a frame was not sent.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The peer announced, or the sender tried, a frame over [`MAX_FRAME`]. The stream is unusable.
    #[error("frame of {0} bytes exceeds the frame limit of {MAX_FRAME}")]
    TooLarge(u64),
    /// The stream ended inside a frame.
    #[error("stream ended inside a frame, {missing} of {len} bytes missing")]
    Cut {
        /// The announced length, 4 when the header itself was cut.
        len: usize,
        /// How many bytes never came.
        missing: usize,
    },
    /// The stream itself failed.
    #[error("reading or writing frames failed")]
    Io(#[from] io::Error),
}

/// Decoder and encoder of frame payloads for [`tokio_util::codec`].
///
/// A frame of length zero comes out as an empty payload: it is the receiver's to count.
#[derive(Debug, Default)]
pub struct FrameCodec {
    _private: (),
}

impl Decoder for FrameCodec {
    type Item = Bytes;
    type Error = FrameError;

    fn decode(&mut self, src: &mut BytesMut) -> Result<Option<Bytes>, FrameError> {
        let Some(header) = src.first_chunk::<4>() else {
            return Ok(None);
        };
        let len = u32::from_be_bytes(*header) as usize;
        if len > MAX_FRAME {
            return Err(FrameError::TooLarge(len as u64));
        }
        if src.len() < 4 + len {
            src.reserve(4 + len - src.len());
            return Ok(None);
        }
        src.advance(4);
        let payload = src.split_to(len).freeze();
        if len >= OWN_ALLOCATION {
            *src = BytesMut::from(&src[..]);
        }
        Ok(Some(payload))
    }

    fn decode_eof(&mut self, src: &mut BytesMut) -> Result<Option<Bytes>, FrameError> {
        if let Some(payload) = self.decode(src)? {
            return Ok(Some(payload));
        }
        match src.first_chunk::<4>() {
            _ if src.is_empty() => Ok(None),
            None => Err(FrameError::Cut { len: 4, missing: 4 - src.len() }),
            Some(header) => {
                let len = u32::from_be_bytes(*header) as usize;
                Err(FrameError::Cut { len, missing: 4 + len - src.len() })
            }
        }
    }
}

impl Encoder<Frame> for FrameCodec {
    type Error = FrameError;

    fn encode(&mut self, frame: Frame, dst: &mut BytesMut) -> Result<(), FrameError> {
        dst.reserve(4 + frame.len);
        dst.put_u32(frame.len as u32);
        for part in frame.parts {
            dst.extend_from_slice(&part);
        }
        Ok(())
    }
}

/// One outgoing payload, possibly in several parts that are written one after the other.
#[derive(Debug, Clone)]
pub struct Frame {
    parts: Vec<Bytes>,
    len: usize,
}

impl Frame {
    /// A frame of one part.
    ///
    /// # Errors
    /// [`FrameError::TooLarge`] over [`MAX_FRAME`]: a sender never sends such a frame.
    pub fn new(payload: impl Into<Bytes>) -> Result<Self, FrameError> {
        Self::from_parts(vec![payload.into()])
    }

    /// A frame of several parts, in order.
    ///
    /// # Errors
    /// [`FrameError::TooLarge`] when their sum is over [`MAX_FRAME`].
    pub fn from_parts(parts: Vec<Bytes>) -> Result<Self, FrameError> {
        let len = parts.iter().map(Bytes::len).sum();
        if len > MAX_FRAME {
            return Err(FrameError::TooLarge(len as u64));
        }
        Ok(Self { parts, len })
    }
}

/// Bytes on their way to a writer: small parts are joined, so that many frames go out in one
/// write; large ones are passed on without a copy.
#[derive(Debug, Default)]
pub struct OutBuffer {
    ready: std::collections::VecDeque<Bytes>,
    tail: BytesMut,
    len: usize,
}

/// Parts up to this size are copied together.
const JOIN_BELOW: usize = 16 << 10;

impl OutBuffer {
    /// Appends a frame, header first.
    pub fn push(&mut self, frame: Frame) {
        self.tail.put_u32(frame.len as u32);
        self.len += 4;
        self.push_parts(frame.parts);
    }

    /// Appends bytes as they are.
    pub fn push_parts(&mut self, parts: impl IntoIterator<Item = Bytes>) {
        for part in parts {
            self.len += part.len();
            if part.len() <= JOIN_BELOW {
                self.tail.extend_from_slice(&part);
            } else {
                if !self.tail.is_empty() {
                    self.ready.push_back(self.tail.split().freeze());
                }
                self.ready.push_back(part);
            }
        }
    }

    /// Bytes that wait.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Buf for OutBuffer {
    fn remaining(&self) -> usize {
        self.len
    }

    fn chunk(&self) -> &[u8] {
        self.ready.front().map_or(&self.tail[..], |part| &part[..])
    }

    fn chunks_vectored<'a>(&'a self, dst: &mut [io::IoSlice<'a>]) -> usize {
        let parts = self.ready.iter().map(|part| &part[..]).chain([&self.tail[..]]);
        let mut filled = 0;
        for (slot, part) in dst.iter_mut().zip(parts.filter(|part| !part.is_empty())) {
            *slot = io::IoSlice::new(part);
            filled += 1;
        }
        filled
    }

    fn advance(&mut self, mut count: usize) {
        self.len -= count;
        while count > 0 {
            match self.ready.front_mut() {
                Some(part) if part.len() <= count => {
                    count -= part.len();
                    self.ready.pop_front();
                }
                Some(part) => {
                    part.advance(count);
                    return;
                }
                None => {
                    self.tail.advance(count);
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode_all(bytes: &[u8], cut: usize) -> Result<Vec<Bytes>, FrameError> {
        let mut codec = FrameCodec::default();
        let mut buffer = BytesMut::new();
        let mut frames = Vec::new();
        for half in [&bytes[..cut], &bytes[cut..]] {
            buffer.extend_from_slice(half);
            while let Some(frame) = codec.decode(&mut buffer)? {
                frames.push(frame);
            }
        }
        while let Some(frame) = codec.decode_eof(&mut buffer)? {
            frames.push(frame);
        }
        Ok(frames)
    }

    #[test]
    fn frames_survive_being_cut_at_every_byte() {
        let mut wire = BytesMut::new();
        let mut codec = FrameCodec::default();
        for text in ["{}", "{\"a\":\"\u{1F600}\"}", "x"] {
            codec.encode(Frame::new(text).unwrap(), &mut wire).unwrap();
        }
        for cut in 0..=wire.len() {
            let frames = decode_all(&wire, cut).unwrap();
            assert_eq!(frames, ["{}", "{\"a\":\"\u{1F600}\"}", "x"], "cut at {cut}");
        }
        for end in 1..6 {
            assert!(matches!(decode_all(&wire[..end], 0), Err(FrameError::Cut { .. })), "ended at {end}");
        }
    }

    #[test]
    fn an_oversize_header_ends_the_stream_before_anything_is_reserved() {
        let mut buffer = BytesMut::from(&0xC000_0001_u32.to_be_bytes()[..]);
        let error = FrameCodec::default().decode(&mut buffer).unwrap_err();
        assert!(matches!(error, FrameError::TooLarge(0xC000_0001)));
        assert!(buffer.capacity() < 1024);
    }

    #[test]
    fn a_zero_length_frame_is_an_empty_payload_and_the_next_one_follows() {
        let frames = decode_all(&[0, 0, 0, 0, 0, 0, 0, 1, b'x'], 4).unwrap();
        assert_eq!(frames, ["", "x"]);
    }

    #[test]
    fn the_out_buffer_writes_the_same_bytes_as_the_encoder() {
        let big = Bytes::from(vec![7_u8; JOIN_BELOW + 1]);
        let frame = Frame::from_parts(vec!["head".into(), big, "tail".into()]).unwrap();
        let mut expected = BytesMut::new();
        FrameCodec::default().encode(frame.clone(), &mut expected).unwrap();
        FrameCodec::default().encode(Frame::new("next").unwrap(), &mut expected).unwrap();
        let mut out = OutBuffer::default();
        out.push(frame);
        out.push(Frame::new("next").unwrap());
        let mut written = Vec::new();
        while out.has_remaining() {
            let chunk = out.chunk();
            let step = chunk.len().min(1000);
            written.extend_from_slice(&chunk[..step]);
            out.advance(step);
        }
        assert_eq!(written, expected);
        assert!(out.is_empty());
    }
}
