//! Replies that may be streams: server-sent events read one by one, nothing retried, nothing hidden.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::http::{Client, Connection, Reply};

/// What a caller accepts that takes both kinds of reply.
pub const BOTH: (&str, &str) = ("Accept", "application/json, text/event-stream");

/// One event; a field that did not come is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Event {
    pub id: String,
    pub event: String,
    pub data: String,
    pub retry: Option<u64>,
}

/// What comes between two blank lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    Event(Event),
    Comment(String),
}

/// A request whose reply has not been looked at.
pub struct Asked {
    pub connection: Connection,
}

impl Asked {
    pub fn reply(mut self) -> Reply {
        self.connection.read().expect("a reply comes")
    }

    /// The reply, which must be JSON.
    pub fn json(self) -> Value {
        let reply = self.reply();
        assert_eq!(reply.header("content-type"), Some("application/json"), "{}", reply.text());
        reply.json()
    }

    /// The reply, which must be a stream.
    pub fn stream(mut self) -> Stream {
        let head = self.connection.read_head().expect("a reply comes");
        assert_eq!(head.status, 200);
        assert_eq!(head.header("content-type"), Some("text/event-stream"), "{head:?}");
        Stream::of(self.connection, head)
    }

    /// Whether no byte comes for `limit`.
    pub fn is_silent_for(&self, limit: Duration) -> bool {
        is_silent_for(&self.connection, limit)
    }
}

fn is_silent_for(connection: &Connection, limit: Duration) -> bool {
    let socket = connection.socket();
    let before = socket.read_timeout().unwrap();
    socket.set_read_timeout(Some(limit)).unwrap();
    let is_silent = connection.is_empty() && socket.peek(&mut [0]).is_err();
    socket.set_read_timeout(before).unwrap();
    is_silent
}

/// A reply of events.
pub struct Stream {
    pub connection: Connection,
    pub head: Reply,
    text: String,
    /// The id of the last event that had one.
    pub last_id: String,
}

impl Stream {
    /// What follows a reply's head on its connection.
    pub fn of(connection: Connection, head: Reply) -> Self {
        Self { connection, head, text: String::new(), last_id: String::new() }
    }

    /// The next event or comment; `None` at the orderly end.
    ///
    /// # Errors
    /// The stream was cut.
    pub fn try_next(&mut self) -> std::io::Result<Option<Item>> {
        while !self.text.contains("\n\n") {
            match self.connection.read_chunk()? {
                Some(chunk) => self.text += &String::from_utf8(chunk).expect("UTF-8"),
                None => {
                    assert!(self.text.is_empty(), "half an event at the end: {:?}", self.text);
                    return Ok(None);
                }
            }
        }
        let end = self.text.find("\n\n").unwrap();
        let block = self.text[..end].to_owned();
        self.text.drain(..end + 2);
        if let Some(comment) = block.strip_prefix(':') {
            return Ok(Some(Item::Comment(comment.trim().to_owned())));
        }
        let mut event = Event::default();
        for line in block.lines() {
            let (field, value) = line.split_once(':').expect("a field");
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "id" => event.id = value.to_owned(),
                "event" => event.event = value.to_owned(),
                "data" => event.data += value,
                "retry" => event.retry = Some(value.parse().unwrap()),
                other => panic!("unknown field {other:?}"),
            }
        }
        if !event.id.is_empty() {
            self.last_id.clone_from(&event.id);
        }
        Ok(Some(Item::Event(event)))
    }

    pub fn next(&mut self) -> Option<Item> {
        self.try_next().expect("the stream is not cut")
    }

    pub fn event(&mut self) -> Option<Event> {
        let end = Instant::now() + super::SOON;
        loop {
            match self.next()? {
                Item::Event(event) => return Some(event),
                Item::Comment(_) => assert!(Instant::now() < end, "only comments came"),
            }
        }
    }

    /// The first event: an id to resume from, and nothing else.
    pub fn priming(&mut self) -> Event {
        let event = self.event().expect("a first event");
        assert!(event.data.is_empty() && !event.id.is_empty() && event.retry == Some(2000), "{event:?}");
        event
    }

    /// The next message; priming events and comments are passed over.
    pub fn message(&mut self) -> Option<Value> {
        loop {
            let event = self.event()?;
            if !event.data.is_empty() {
                assert_eq!(event.event, "message");
                return Some(serde_json::from_str(&event.data).expect("JSON"));
            }
        }
    }

    /// All messages to the end.
    pub fn rest(&mut self) -> Vec<Value> {
        std::iter::from_fn(|| self.message()).collect()
    }

    /// The messages up to and with the first for which `wanted` holds, which is returned.
    pub fn until(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + super::SOON;
        loop {
            let message = self.message().expect("the message comes before the end");
            if wanted(&message) {
                return message;
            }
            assert!(Instant::now() < end, "other messages came all the time");
        }
    }

    /// The next message of this method.
    pub fn notification(&mut self, method: &str) -> Value {
        self.until(|message| message["method"] == method)
    }

    pub fn is_silent_for(&self, limit: Duration) -> bool {
        self.text.is_empty() && is_silent_for(&self.connection, limit)
    }

    pub fn set_timeout(&self, limit: Duration) {
        self.connection.socket().set_read_timeout(Some(limit)).unwrap();
    }
}

impl Client {
    /// A session that declares `capabilities`.
    pub fn declaring(port: u16, token: &str, capabilities: &str) -> Self {
        let body = super::http::INITIALIZE
            .replace(r#""capabilities":{}"#, &format!(r#""capabilities":{capabilities}"#));
        Self::initialize_with(port, token, &body)
    }

    /// Sends a message on a connection of its own; the reply may be JSON or a stream.
    pub fn ask(&self, body: &str) -> Asked {
        let mut client = self.again();
        client.send("POST", &[BOTH, ("Content-Type", "application/json")], body.as_bytes());
        Asked { connection: client.connection }
    }

    /// As [`Client::ask`], a `tools/call`; `token` is a progress token's JSON text.
    pub fn ask_call(&self, id: &str, tool: &str, arguments: &str, token: Option<&str>) -> Asked {
        let meta = token.map(|token| format!(r#","_meta":{{"progressToken":{token}}}"#)).unwrap_or_default();
        self.ask(&format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":{},"arguments":{arguments}{meta}}}}}"#,
            Value::from(tool)
        ))
    }

    /// Opens a server stream, or resumes the stream that `last_event_id` names.
    pub fn get(&self, last_event_id: Option<&str>) -> Asked {
        let mut client = self.again();
        let mut headers = vec![("Accept", "text/event-stream")];
        headers.extend(last_event_id.map(|id| ("Last-Event-ID", id)));
        client.send("GET", &headers, b"");
        Asked { connection: client.connection }
    }

    pub fn listen(&self) -> Stream {
        let mut stream = self.get(None).stream();
        stream.priming();
        stream
    }

    pub fn resume(&self, last_event_id: &str) -> Stream {
        self.get(Some(last_event_id)).stream()
    }

    /// A notification on a connection of its own.
    pub fn tell(&self, method: &str, params: &str) {
        let body = format!(r#"{{"jsonrpc":"2.0","method":"{method}","params":{params}}}"#);
        assert_eq!(self.again().post(&body).status, 202);
    }

    pub fn cancel(&self, id: &str) {
        self.tell("notifications/cancelled", &format!(r#"{{"requestId":{id},"reason":"test"}}"#));
    }

    /// Answers a question of the host; `member` is `"result":…` or `"error":…`.
    pub fn answer(&self, id: &Value, member: &str) -> Reply {
        self.again().post(&format!(r#"{{"jsonrpc":"2.0","id":{id},{member}}}"#))
    }
}
