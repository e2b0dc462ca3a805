//! A plain HTTP/1.1 client on one keep-alive connection: nothing is retried, nothing is hidden.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value;

use super::SOON;

/// A reply, body included.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }
}

/// One connection.
pub struct Connection {
    stream: BufReader<TcpStream>,
    port: u16,
}

impl Connection {
    pub fn open(port: u16) -> Self {
        Self::try_open(port).expect("the endpoint accepts connections")
    }

    pub fn try_open(port: u16) -> std::io::Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SOON))?;
        Ok(Self { stream: BufReader::new(stream), port })
    }

    /// The socket below, for tests that break it.
    pub fn socket(&self) -> &TcpStream {
        self.stream.get_ref()
    }

    /// Whether nothing that has arrived waits to be read.
    pub fn is_empty(&self) -> bool {
        self.stream.buffer().is_empty()
    }

    pub fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// Sends a whole request without waiting for the reply; adds `Host` and `Content-Length` unless
    /// they are given.
    pub fn send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> std::io::Result<()> {
        let has = |name: &str| headers.iter().any(|(key, _)| key.eq_ignore_ascii_case(name));
        let mut head = format!("{method} {path} HTTP/1.1\r\n");
        if !has("host") {
            head += &format!("Host: 127.0.0.1:{}\r\n", self.port);
        }
        if !has("content-length") && !has("transfer-encoding") && (!body.is_empty() || method == "POST") {
            head += &format!("Content-Length: {}\r\n", body.len());
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += "\r\n";
        self.write(head.as_bytes())?;
        self.write(body)
    }

    /// Reads the head of a reply.
    pub fn read_head(&mut self) -> std::io::Result<Reply> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let status = line.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_default();
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line)?;
            match line.trim_end().split_once(": ").or_else(|| line.trim_end().split_once(':')) {
                Some((name, value)) => headers.push((name.to_owned(), value.to_owned())),
                None => break,
            }
        }
        Ok(Reply { status, headers, body: Vec::new() })
    }

    /// Reads a whole reply: by `Content-Length`, chunked, or none.
    pub fn read(&mut self) -> std::io::Result<Reply> {
        let mut reply = self.read_head()?;
        if reply.status == 204 || reply.status == 304 {
            return Ok(reply);
        }
        if reply.header("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked")) {
            while let Some(chunk) = self.read_chunk()? {
                reply.body.extend(chunk);
            }
        } else if let Some(length) = reply.header("content-length").and_then(|length| length.parse().ok()) {
            reply.body = vec![0; length];
            self.stream.read_exact(&mut reply.body)?;
        }
        Ok(reply)
    }

    pub fn read_exactly(&mut self, length: usize) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// One chunk of a chunked body; `None` at its end.
    pub fn read_chunk(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let size = usize::from_str_radix(line.trim(), 16).map_err(std::io::Error::other)?;
        let mut chunk = vec![0; size + 2];
        self.stream.read_exact(&mut chunk)?;
        chunk.truncate(size);
        Ok((size > 0).then_some(chunk))
    }

    /// Whether the peer has closed (waits for it).
    pub fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0; 64]), Ok(0) | Err(_))
    }

    pub fn request(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        self.send(method, path, headers, body).expect("the request can be sent");
        if method == "HEAD" { self.read_head() } else { self.read() }.expect("a reply comes")
    }
}

/// An MCP client that answers JSON only.
pub struct Client {
    pub connection: Connection,
    pub token: String,
    pub session: String,
    port: u16,
}

/// JSON-RPC ids of requests that choose none: never the same twice, on whatever connection.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

pub const INITIALIZE: &str = r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"raw","version":"1"}}}"#;

impl Client {
    pub fn initialize(port: u16, token: &str) -> Self {
        Self::initialize_with(port, token, INITIALIZE)
    }

    pub fn initialize_with(port: u16, token: &str, body: &str) -> Self {
        let mut connection = Connection::open(port);
        let bearer = format!("Bearer {token}");
        let reply = connection.request("POST", "/", &[("Authorization", &bearer)], body.as_bytes());
        assert_eq!(reply.status, 200, "{}", reply.text());
        let session = reply.header("mcp-session-id").expect("a session id").to_owned();
        Self { connection, token: token.into(), session, port }
    }

    /// The same session on another connection.
    pub fn again(&self) -> Self {
        Self {
            connection: Connection::open(self.port),
            token: self.token.clone(),
            session: self.session.clone(),
            port: self.port,
        }
    }

    pub fn send(&mut self, method: &str, headers: &[(&str, &str)], body: &[u8]) {
        self.try_send(method, headers, body).expect("the request can be sent");
    }

    pub fn try_send(&mut self, method: &str, headers: &[(&str, &str)], body: &[u8]) -> std::io::Result<()> {
        let bearer = format!("Bearer {}", self.token);
        let mut all = vec![("Authorization", bearer.as_str()), ("mcp-session-id", self.session.as_str())];
        all.extend_from_slice(headers);
        self.connection.send(method, "/", &all, body)
    }

    pub fn post(&mut self, body: &str) -> Reply {
        self.send("POST", &[("Content-Type", "application/json")], body.as_bytes());
        self.connection.read().expect("a reply comes")
    }

    /// A request with an id of its own; the JSON of the whole reply.
    pub fn rpc(&mut self, method: &str, params: &str) -> Value {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let reply =
            self.post(&format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}}}"#));
        assert_eq!(reply.status, 200, "{}", reply.text());
        let json = reply.json();
        assert_eq!(json["id"], id, "{json}");
        json
    }

    pub fn call(&mut self, tool: &str, arguments: &str) -> Value {
        self.rpc("tools/call", &format!(r#"{{"name":{},"arguments":{arguments}}}"#, Value::from(tool)))["result"].clone()
    }

    pub fn call_text(&mut self, tool: &str, arguments: &str) -> String {
        self.call(tool, arguments)["content"][0]["text"].as_str().unwrap_or_default().to_owned()
    }

    /// Sends a call and does not wait for it.
    pub fn start_call(&mut self, id: &str, tool: &str, arguments: &str) {
        let body = format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":{},"arguments":{arguments}}}}}"#,
            Value::from(tool)
        );
        self.send("POST", &[], body.as_bytes());
    }

    pub fn read(&mut self) -> Reply {
        self.connection.read().expect("a reply comes")
    }

    pub fn delete(&mut self) -> Reply {
        self.send("DELETE", &[], b"");
        self.connection.read().expect("a reply comes")
    }
}
