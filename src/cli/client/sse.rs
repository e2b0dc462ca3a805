//! Server-sent events, incrementally: bytes in, events out. Lines end in LF or CRLF.

/// An event stream that sends more than this without finishing an event is given up.
const EVENT_BYTES: usize = 256 * 1024 * 1024;

/// One finished event. `id` and `retry` act for the stream whether or not there is data.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) id: Option<String>,
    pub(super) retry_ms: Option<u64>,
    pub(super) data: String,
}

/// The stream's events so far.
#[derive(Default)]
pub(super) struct Events {
    buffer: Vec<u8>,
    /// How much of the buffer holds no line feed.
    scanned: usize,
    event: Event,
    has_data: bool,
    data_bytes: usize,
}

/// A single event, or one line of it, is larger than [`EVENT_BYTES`].
#[derive(Debug)]
pub(super) struct TooLarge;

impl Events {
    /// Takes the next bytes and calls `emit` for every event they finish.
    pub(super) fn push(&mut self, bytes: &[u8], mut emit: impl FnMut(Event)) -> Result<(), TooLarge> {
        self.buffer.extend_from_slice(bytes);
        let mut start = 0;
        while let Some(at) = self.buffer[self.scanned..].iter().position(|b| *b == b'\n') {
            let end = self.scanned + at;
            let line = self.buffer[start..end].strip_suffix(b"\r").unwrap_or(&self.buffer[start..end]);
            let line = String::from_utf8_lossy(line).into_owned();
            if let Some(event) = self.line(&line) {
                emit(event);
            }
            start = end + 1;
            self.scanned = start;
        }
        self.buffer.drain(..start);
        self.scanned = self.buffer.len();
        if self.buffer.len() + self.data_bytes > EVENT_BYTES { Err(TooLarge) } else { Ok(()) }
    }

    fn line(&mut self, line: &str) -> Option<Event> {
        if line.is_empty() {
            self.has_data = false;
            self.data_bytes = 0;
            let event = std::mem::take(&mut self.event);
            return (event != Event::default()).then_some(event);
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => {
                if self.has_data {
                    self.event.data.push('\n');
                }
                self.has_data = true;
                self.data_bytes += value.len();
                self.event.data.push_str(value);
            }
            "id" if !value.contains('\0') => self.event.id = Some(value.to_owned()),
            "retry" => self.event.retry_ms = value.parse().ok(),
            // Comments (an empty field name) and unknown fields.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = ": hello\n\nid: a-0\nretry: 2000\ndata:\n\r\ndata: {\"a\":\r\ndata: 1}\r\nid:a-1\r\n\r\n: tick\n\ndata: é\n\n";

    fn expected() -> Vec<Event> {
        let event = |id: Option<&str>, retry_ms, data: &str| Event {
            id: id.map(str::to_owned),
            retry_ms,
            data: data.to_owned(),
        };
        vec![
            event(Some("a-0"), Some(2000), ""),
            event(Some("a-1"), None, "{\"a\":\n1}"),
            event(None, None, "é"),
        ]
    }

    #[test]
    fn events_are_the_same_however_the_bytes_are_cut() {
        for size in 1..STREAM.len() {
            let (mut events, mut got) = (Events::default(), Vec::new());
            for chunk in STREAM.as_bytes().chunks(size) {
                events.push(chunk, |event| got.push(event)).unwrap();
            }
            assert_eq!(got, expected(), "{size}");
        }
    }
}
