//! A sidecar's endpoint as the load sees it: one session, and the requests made for it.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::load::{COUNTER, Request, exchange};

const PROTOCOL: &str = "2025-11-25";

/// An endpoint with an open session.
pub(crate) struct Endpoint {
    pub(crate) address: SocketAddr,
    token: String,
    session: String,
}

impl Endpoint {
    /// Opens a session at `address` with the token from the agent directory's config.
    pub(crate) fn open(address: SocketAddr, agent_dir: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct Config {
            token: String,
        }
        let path = agent_dir.join("a2mcp.json");
        let config = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let Config { token } = serde_json::from_slice(&config)?;
        Self::with_token(address, &token)
    }

    /// Opens a session with this token.
    pub(crate) fn with_token(address: SocketAddr, token: &str) -> Result<Self> {
        Self { address, token: token.to_owned(), session: String::new() }.another()
    }

    /// The header line that shows the token.
    pub(crate) fn authorization(&self) -> String {
        format!("Authorization: Bearer {}\r\n", self.token)
    }

    /// Another session at the same endpoint.
    pub(crate) fn another(&self) -> Result<Self> {
        let mut endpoint = Self { address: self.address, token: self.token.clone(), session: String::new() };
        let initialize = endpoint.post(&json!({
            "jsonrpc": "2.0", "id": 0, "method": "initialize",
            "params": {
                "protocolVersion": PROTOCOL, "capabilities": {},
                "clientInfo": { "name": "a2mcp-bench", "version": "1" },
            },
        }))?;
        let reply = exchange(self.address, &initialize)?;
        ensure!(reply.status == 200, "initialize was answered with status {}", reply.status);
        endpoint.session = reply.header("mcp-session-id").context("initialize opened no session")?.to_owned();
        Ok(endpoint)
    }

    /// The second half of the handshake.
    pub(crate) fn initialized(&self) -> Result<()> {
        let message = self.post(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }))?;
        let reply = exchange(self.address, &message)?;
        ensure!(reply.status == 202, "notifications/initialized was answered with status {}", reply.status);
        Ok(())
    }

    /// Opens a server stream and reads its head.
    pub(crate) fn listen(&self) -> Result<TcpStream> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        let mut request = Vec::new();
        write!(
            request,
            "GET / HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {}\r\nmcp-session-id: {}\r\nAccept: text/event-stream\r\n\r\n",
            self.address, self.token, self.session
        )?;
        stream.write_all(&request)?;
        let mut head = [0; 4096];
        let count = stream.read(&mut head)?;
        ensure!(
            head[..count].starts_with(b"HTTP/1.1 200"),
            "no stream: {}",
            String::from_utf8_lossy(&head[..count])
        );
        Ok(stream)
    }

    pub(crate) fn ping(&self) -> Result<Request> {
        Request::calibrate(self.address, self.request("ping", None)?, |answer| {
            ensure!(answer["result"] == json!({}));
            Ok(())
        })
    }

    pub(crate) fn list(&self) -> Result<Request> {
        Request::calibrate(self.address, self.request("tools/list", None)?, |answer| {
            let tools = answer["result"]["tools"].as_array().context("no tools")?;
            ensure!(tools.iter().any(|tool| tool["name"] == "echo"), "no tool `echo`");
            Ok(())
        })
    }

    /// With the counter in the text too: no two calls are equal.
    pub(crate) fn echo(&self) -> Result<Request> {
        let text = format!("bench {COUNTER}");
        self.call("echo", json!({ "text": text }), |echoed| echoed.contains(&text))
    }

    /// The same at an endpoint that answers calls by streams.
    pub(crate) fn streamed_echo(&self) -> Result<Request> {
        self.streamed("echo", json!({ "text": format!("bench {COUNTER}") }))
    }

    /// Any call at an endpoint that answers calls by streams.
    pub(crate) fn streamed(&self, name: &str, arguments: Value) -> Result<Request> {
        let params = json!({ "name": name, "arguments": arguments });
        Ok(Request::streamed(self.request("tools/call", Some(params))?))
    }

    /// Any call; `judge` looks at the text of the result.
    pub(crate) fn call(
        &self,
        name: &str,
        arguments: Value,
        judge: impl FnOnce(&str) -> bool,
    ) -> Result<Request> {
        let params = json!({ "name": name, "arguments": arguments });
        Request::calibrate(self.address, self.request("tools/call", Some(params))?, |answer| {
            let result = &answer["result"];
            ensure!(result["isError"] != true, "the tool failed");
            ensure!(result["content"][0]["text"].as_str().is_some_and(judge), "not the expected text");
            Ok(())
        })
    }

    fn request(&self, method: &str, params: Option<Value>) -> Result<Vec<u8>> {
        let counter: u64 = COUNTER.parse()?;
        let mut message = json!({ "jsonrpc": "2.0", "id": counter, "method": method });
        if let Some(params) = params {
            message["params"] = params;
        }
        self.post(&message)
    }

    fn post(&self, message: &Value) -> Result<Vec<u8>> {
        let body = serde_json::to_vec(message)?;
        let mut bytes = Vec::new();
        write!(bytes, "POST /mcp HTTP/1.1\r\nHost: {}\r\n", self.address)?;
        write!(bytes, "Authorization: Bearer {}\r\n", self.token)?;
        write!(bytes, "Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n")?;
        if !self.session.is_empty() {
            write!(bytes, "Mcp-Session-Id: {}\r\nMCP-Protocol-Version: {PROTOCOL}\r\n", self.session)?;
        }
        write!(bytes, "Content-Length: {}\r\n\r\n", body.len())?;
        bytes.extend_from_slice(&body);
        Ok(bytes)
    }
}
