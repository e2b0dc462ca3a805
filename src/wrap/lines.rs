//! Newline-delimited JSON-RPC, both ways: cutting messages out of a server's stdout, and making a
//! message a line. Pure.
//!
//! A server may write anything to its stdout: half characters at a time, a byte order mark, CRLF, blank
//! lines, log lines, lines without end. [`Cutter`] bounds what it keeps, and of a line over the limit it
//! finds the id, so that whoever waits for that answer is told.

use bytes::{Buf, Bytes, BytesMut};
use memchr::{memchr, memchr2};

/// The longest line that is read: 128 MiB of content, and room for what is around it.
pub(super) const MAX_LINE: usize = (128 << 20) + (64 << 10);
/// From this size on a line gets memory of its own, so that the buffer does not keep the capacity of the
/// largest one ever seen.
const OWN_ALLOCATION: usize = 256 << 10;
/// So much of both ends of a line over the limit is looked at for its id.
const ENDS: usize = 512;

/// What was cut out.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// A line without its end, a byte order mark and surrounding white space.
    Line(Bytes),
    /// Nothing but white space.
    Blank,
    /// A line over the limit, thrown away: its length, and the id of the answer it was.
    TooLong { bytes: u64, id: Option<u64> },
}

/// Cuts lines out of chunks.
#[derive(Debug)]
pub(super) struct Cutter {
    /// See [`MAX_LINE`].
    limit: usize,
    /// What is not cut yet; readers append to it.
    pub(super) buffer: BytesMut,
    /// So much of the buffer holds no line end.
    scanned: usize,
    /// A line over the limit that has not ended yet.
    skipped: Option<Skipped>,
}

#[derive(Debug)]
struct Skipped {
    bytes: u64,
    head: BytesMut,
    tail: BytesMut,
}

impl Default for Cutter {
    fn default() -> Self {
        Self::with_limit(MAX_LINE)
    }
}

impl Cutter {
    fn with_limit(limit: usize) -> Self {
        Self { limit, buffer: BytesMut::new(), scanned: 0, skipped: None }
    }

    /// The next line; `None` when more bytes are needed.
    pub(super) fn next(&mut self) -> Option<Cut> {
        let found = memchr(b'\n', &self.buffer[self.scanned..]);
        let Some(end) = found.map(|at| self.scanned + at) else {
            self.scanned = self.buffer.len();
            if self.skipped.is_some() || self.buffer.len() > self.limit {
                let len = self.buffer.len();
                self.skip(len);
            }
            return None;
        };
        self.scanned = 0;
        if self.skipped.is_some() || end > self.limit {
            self.skip(end);
            self.buffer.advance(1);
            return self.skipped.take().map(Skipped::end);
        }
        let line = self.buffer.split_to(end + 1).freeze();
        if end >= OWN_ALLOCATION {
            self.buffer = BytesMut::from(&self.buffer[..]);
        }
        Some(trimmed(&line))
    }

    /// The last line, when the stream ended without a line end.
    pub(super) fn end(&mut self) -> Option<Cut> {
        if let Some(skipped) = self.skipped.take() {
            return Some(skipped.end());
        }
        let rest = std::mem::take(&mut self.buffer).freeze();
        self.scanned = 0;
        (!rest.is_empty()).then(|| trimmed(&rest))
    }

    /// Throws away the first `count` bytes of the buffer, which belong to a line over the limit.
    fn skip(&mut self, count: usize) {
        let bytes = &self.buffer[..count];
        let skipped = self.skipped.get_or_insert_with(|| Skipped {
            bytes: 0,
            head: BytesMut::from(&bytes[..count.min(ENDS)]),
            tail: BytesMut::new(),
        });
        skipped.bytes += count as u64;
        skipped.tail.extend_from_slice(&bytes[count.saturating_sub(ENDS)..]);
        let excess = skipped.tail.len().saturating_sub(ENDS);
        skipped.tail.advance(excess);
        if count == self.buffer.len() {
            self.buffer = BytesMut::new();
        } else {
            self.buffer.advance(count);
        }
        self.scanned = 0;
    }
}

impl Skipped {
    fn end(self) -> Cut {
        let head = String::from_utf8_lossy(&self.head);
        let tail = String::from_utf8_lossy(&self.tail);
        let id = id_before(&head, "\"result\"").or_else(|| id_at_end(&tail));
        Cut::TooLong { bytes: self.bytes, id }
    }
}

/// The id in what comes before the first payload: `{"jsonrpc":"2.0","id":7,"result":…`.
fn id_before(head: &str, payload: &str) -> Option<u64> {
    number_after_id(head.get(..head.find(payload)?)?)
}

/// The id in what comes after the payload: `…},"jsonrpc":"2.0","id":7}`.
fn id_at_end(tail: &str) -> Option<u64> {
    let rest = tail.trim_end().strip_suffix('}')?;
    let rest = rest.get(rest.rfind("\"id\"")? + 4..)?.trim_start().strip_prefix(':')?.trim();
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (number, rest) = rest.split_at(digits);
    let is_end = rest.is_empty() || rest.replace(' ', "") == ",\"jsonrpc\":\"2.0\"";
    number.parse().ok().filter(|_| is_end)
}

fn number_after_id(text: &str) -> Option<u64> {
    let rest = text.get(text.find("\"id\"")? + 4..)?.trim_start().strip_prefix(':')?.trim_start();
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

fn trimmed(line: &Bytes) -> Cut {
    let text = line.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(line).trim_ascii();
    if text.is_empty() { Cut::Blank } else { Cut::Line(line.slice_ref(text)) }
}

/// A part of a message as a part of a line: JSON has line ends only between its tokens, where a space
/// means the same.
pub(super) fn on_one_line(part: Bytes) -> Bytes {
    if memchr2(b'\n', b'\r', &part).is_none() {
        return part;
    }
    let mut part = Vec::from(part);
    for byte in &mut part {
        if matches!(byte, b'\n' | b'\r') {
            *byte = b' ';
        }
    }
    part.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 4096;

    fn cut_all(bytes: &[u8], step: usize) -> Vec<Cut> {
        let mut cutter = Cutter::with_limit(LIMIT);
        let mut cuts = Vec::new();
        for chunk in bytes.chunks(step) {
            cutter.buffer.extend_from_slice(chunk);
            while let Some(cut) = cutter.next() {
                cuts.push(cut);
            }
        }
        cuts.extend(cutter.end());
        cuts
    }

    #[test]
    fn lines_are_the_same_however_they_arrive() {
        let text = "\u{feff}{\"a\":\"\u{1F600}\"}\r\n\n \t\r\nlog line\n{}\nlast";
        let line = |text: &'static str| Cut::Line(Bytes::from_static(text.as_bytes()));
        let expected = [
            line("{\"a\":\"\u{1F600}\"}"),
            Cut::Blank,
            Cut::Blank,
            line("log line"),
            line("{}"),
            line("last"),
        ];
        for step in 1..text.len() {
            assert_eq!(cut_all(text.as_bytes(), step), expected, "{step} bytes at a time");
        }
    }

    #[test]
    fn a_line_over_the_limit_is_skipped_by_its_id_and_the_next_one_is_read() {
        let long = |head: &str, tail: &str| {
            let mut text = head.as_bytes().to_vec();
            text.resize(LIMIT + 10, b'x');
            text.extend_from_slice(tail.as_bytes());
            text.extend_from_slice(b"\n{}\n");
            text
        };
        for (head, tail, id) in [
            ("{\"jsonrpc\":\"2.0\",\"id\":7,\"result\":{\"a\":\"", "\"}}", Some(7)),
            ("{\"result\":{\"id\":1,\"a\":\"", "\"},\"jsonrpc\":\"2.0\",\"id\":8}", Some(8)),
            ("{\"result\":{\"a\":\"", "\"},\"id\": 9,\"jsonrpc\":\"2.0\"}", Some(9)),
            ("log: ", "", None),
        ] {
            let text = long(head, tail);
            let bytes = text.len() as u64 - 4;
            for step in [1, 100, LIMIT, 2 * LIMIT] {
                let cuts = cut_all(&text, step);
                assert_eq!(cuts, [Cut::TooLong { bytes, id }, Cut::Line("{}".into())], "{head} by {step}");
            }
        }
    }

    #[test]
    fn a_line_of_the_limit_passes() {
        let mut text = vec![b'x'; LIMIT];
        text.push(b'\n');
        assert!(matches!(&cut_all(&text, 100)[..], [Cut::Line(line)] if line.len() == LIMIT));
    }

    #[test]
    fn a_message_of_several_lines_becomes_one() {
        assert_eq!(on_one_line("{\r\n\"a\": \"\\n\"\n}".into()), "{  \"a\": \"\\n\" }");
    }
}
