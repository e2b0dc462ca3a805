//! A client that does not give up when its connection breaks: it sends the call again, or resumes its
//! stream, as the real ones do. It never opens another session: its own must outlive every sidecar.

use std::io;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::http::{Client, Connection, Reply};
use super::sse::{BOTH, Item, Stream};

/// Longest wait for a call's result, whatever dies meanwhile.
const PATIENCE: Duration = Duration::from_secs(40);

/// How a caller comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Takes JSON only; sends the call again under another id.
    JsonNewId,
    /// Takes JSON only; sends the very same bytes again.
    JsonSameId,
    /// Takes streams; resumes by `Last-Event-ID`, and sends again what is unknown there.
    Stream,
}

/// See the module.
pub struct Caller {
    port: u16,
    token: String,
    pub session: String,
    way: Way,
    next_id: u64,
    connection: Option<Connection>,
}

/// What a call came to.
#[derive(Debug, Default)]
pub struct Got {
    pub result: Value,
    /// How often the call was sent.
    pub sent: usize,
    /// How often its stream was resumed.
    pub resumed: usize,
}

impl Got {
    pub fn text(&self) -> &str {
        self.result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text in {self:?}"))
    }

    /// The call id in the mark of a result that was attached.
    pub fn attached(&self) -> Option<&str> {
        self.result["_meta"]["a2mcp/attached"].as_str()
    }
}

impl Caller {
    pub fn new(port: u16, token: &str, way: Way) -> Self {
        let session = Client::initialize(port, token).session;
        Self { port, token: token.to_owned(), session, way, next_id: 0, connection: None }
    }

    /// The same session's caller that comes back in another way.
    pub fn by(&self, way: Way) -> Self {
        let (token, session) = (self.token.clone(), self.session.clone());
        Self { port: self.port, token, session, way, next_id: 1000, connection: None }
    }

    /// Calls, and comes back until there is a result.
    pub fn call(&mut self, tool: &str, arguments: &Value) -> Got {
        self.next_id += 1;
        let mut got = Got::default();
        let mut last_event = String::new();
        let end = Instant::now() + PATIENCE;
        loop {
            let tried = if last_event.is_empty() {
                if got.sent > 0 && self.way == Way::JsonNewId {
                    self.next_id += 1;
                }
                self.send(tool, arguments, &mut got, &mut last_event)
            } else {
                self.resume(&mut got, &mut last_event)
            };
            match tried {
                Ok(Some(result)) => {
                    got.result = result;
                    return got;
                }
                Ok(None) => {}
                Err(error) => {
                    self.connection = None;
                    assert!(Instant::now() < end, "{tool} {arguments}: no result; {got:?}; last: {error}");
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
    }

    /// Asks something small on the connection that a result came over: that result has arrived.
    pub fn ping(&mut self) {
        let body = r#"{"jsonrpc":"2.0","id":"ping","method":"ping"}"#;
        let reply = self.request("POST", &[], body.as_bytes()).and_then(|mut connection| connection.read());
        assert_eq!(reply.unwrap().status, 200);
    }

    /// On the connection of before, when there is one.
    fn request(&mut self, method: &str, headers: &[(&str, &str)], body: &[u8]) -> io::Result<Connection> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            // However dead the sidecar is, the keeper holds the port: nobody is ever refused.
            None => Connection::open(self.port),
        };
        let bearer = format!("Bearer {}", self.token);
        let mut all = vec![("Authorization", bearer.as_str()), ("mcp-session-id", self.session.as_str())];
        all.extend_from_slice(headers);
        connection.send(method, "/", &all, body)?;
        Ok(connection)
    }

    fn send(
        &mut self,
        tool: &str,
        arguments: &Value,
        got: &mut Got,
        last_event: &mut String,
    ) -> io::Result<Option<Value>> {
        let body = format!(
            r#"{{"jsonrpc":"2.0","id":{},"method":"tools/call","params":{{"name":"{tool}","arguments":{arguments}}}}}"#,
            self.next_id
        );
        let accept = if self.way == Way::Stream { BOTH } else { ("Accept", "application/json") };
        let mut connection = self.request("POST", &[accept], body.as_bytes())?;
        got.sent += 1;
        let head = connection.read_head()?;
        assert_eq!(head.status, 200, "the call was refused: {head:?}");
        if head.header("content-type") == Some("text/event-stream") {
            return self.follow(Stream::of(connection, head), last_event);
        }
        let body = read_body(&mut connection, &head)?;
        self.connection = Some(connection);
        let answer: Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(answer["id"], self.next_id, "{answer}");
        assert!(answer["result"].is_object(), "{answer}");
        Ok(Some(answer["result"].clone()))
    }

    /// `None`: the stream is unknown there, so its call never reached the host.
    fn resume(&mut self, got: &mut Got, last_event: &mut String) -> io::Result<Option<Value>> {
        let headers = [("Accept", "text/event-stream"), ("Last-Event-ID", last_event.as_str())];
        let mut connection = self.request("GET", &headers, b"")?;
        let head = connection.read_head()?;
        if head.status == 400 {
            let body = read_body(&mut connection, &head)?;
            assert!(String::from_utf8_lossy(&body).contains("unknown stream"));
            last_event.clear();
            return Ok(None);
        }
        assert_eq!(head.status, 200, "{head:?}");
        got.resumed += 1;
        self.follow(Stream::of(connection, head), last_event)
    }

    fn follow(&mut self, mut stream: Stream, last_event: &mut String) -> io::Result<Option<Value>> {
        let mut response = None;
        // To the very end of the stream: only then is the connection free for the next request.
        while let Some(item) = stream.try_next().or_else(|error| match response {
            // A client has what it wants once the response is there.
            Some(_) => Ok(None),
            None => Err(error),
        })? {
            let Item::Event(event) = item else { continue };
            if !event.id.is_empty() {
                last_event.clone_from(&event.id);
            }
            if !event.data.is_empty() {
                let message: Value = serde_json::from_str(&event.data).expect("JSON");
                if message["id"] == self.next_id && message["result"].is_object() {
                    response = Some(message["result"].clone());
                }
            }
        }
        match response {
            None => Err(io::Error::other("the stream ended without a response")),
            Some(_) => {
                self.connection = Some(stream.connection);
                Ok(response)
            }
        }
    }
}

fn read_body(connection: &mut Connection, head: &Reply) -> io::Result<Vec<u8>> {
    let length = head.header("content-length").and_then(|length| length.parse().ok());
    connection.read_exactly(length.expect("a length"))
}
