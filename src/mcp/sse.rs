//! Server-sent events (WHATWG HTML, section 9.2) as the bridge writes them, and the ids of its events.
//!
//! An event's id names its stream, the sidecar that wrote it and its number:
//! `<stream>.<epoch>.<number>`. A stream outlives a sidecar, its numbering does not; the epoch tells
//! the two apart.

use bytes::Bytes;

/// How long a client waits before it resumes, in milliseconds.
pub const RETRY_MS: u32 = 2000;
/// Longest `Last-Event-ID` that is looked at.
const MAX_ID: usize = 200;

/// Keeps a silent stream alive through proxies.
pub const COMMENT: &[u8] = b": keep-alive\n\n";

/// The position a client has reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    /// The stream's name.
    pub stream: String,
    /// The sidecar that wrote the event.
    pub epoch: u64,
    /// The event's number; 0 before the first.
    pub number: u64,
}

impl Position {
    /// Reads a `Last-Event-ID`; `None` when it is none of ours.
    pub fn parse(id: &str) -> Option<Self> {
        if id.len() > MAX_ID {
            return None;
        }
        let mut parts = id.rsplitn(3, '.');
        let number = parts.next()?.parse().ok()?;
        let epoch = parts.next()?.parse().ok()?;
        let stream = parts.next()?.to_owned();
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-';
        (!stream.is_empty() && stream.chars().all(is_name)).then_some(Self { stream, epoch, number })
    }

    /// The id as it stands in the event.
    pub fn id(&self) -> String {
        format!("{}.{}.{}", self.stream, self.epoch, self.number)
    }
}

/// The first event of every stream: no data, but an id to resume from, and when.
pub fn priming(position: &Position) -> Bytes {
    format!("id: {}\nretry: {RETRY_MS}\ndata:\n\n", position.id()).into()
}

/// One message as an event.
pub fn event(position: &Position, payload: &[Bytes]) -> Vec<Bytes> {
    let mut parts = Vec::with_capacity(payload.len() + 2);
    parts.push(Bytes::from(format!("id: {}\nevent: message\ndata: ", position.id())));
    parts.extend(payload.iter().cloned().map(one_line));
    parts.push(Bytes::from_static(b"\n\n"));
    parts
}

/// In JSON a line break is only ever white space between tokens: a blank means the same.
fn one_line(text: Bytes) -> Bytes {
    if !text.iter().any(|byte| matches!(byte, b'\n' | b'\r')) {
        return text;
    }
    text.iter()
        .map(|byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { *byte })
        .collect::<Vec<u8>>()
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_back() {
        let position = Position { stream: "0b1e-7".into(), epoch: 17, number: 3 };
        assert_eq!(Position::parse(&position.id()), Some(position));
        for id in ["", "a", "a.1", ".1.2", "a.b.1", "a.1.-1", "a b.1.1", "\u{e9}.1.1", &"a".repeat(300)] {
            assert_eq!(Position::parse(id), None, "{id}");
        }
    }

    #[test]
    fn a_message_is_one_line_of_data() {
        let position = Position { stream: "s".into(), epoch: 1, number: 2 };
        let event = event(&position, &["{\r\n\"a\":\n".into(), "\"\\n\"}".into()]).concat();
        assert_eq!(event, b"id: s.1.2\nevent: message\ndata: {  \"a\": \"\\n\"}\n\n");
        assert_eq!(priming(&position), "id: s.1.2\nretry: 2000\ndata:\n\n");
    }
}
