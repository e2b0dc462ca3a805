//! The two servers under load, as child processes: `a2mcp demo` and the floor.
//!
//! The floor is this same binary: hyper on a `current_thread` runtime with TCP_NODELAY, as the
//! sidecar has it, which reads each request and answers a fixed body. Both end when this process
//! ends, however it ends: the floor at the end of its stdin, the demo by a signal.

use std::convert::Infallible;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request as HttpRequest, Response};
use hyper_util::rt::TokioIo;
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;

use crate::load::{COUNTER, Request, exchange};
use crate::process;

const PROTOCOL: &str = "2025-11-25";
const START_LIMIT: Duration = Duration::from_secs(20);
const STOP_LIMIT: Duration = Duration::from_secs(15);

/// A running `a2mcp demo`.
pub(crate) struct Bridge {
    child: Child,
    log: tempfile::NamedTempFile,
    pub(crate) address: SocketAddr,
    token: String,
    /// The sidecar's, not the demo's.
    pub(crate) pid: u32,
    /// From the spawn of the demo (which spawns host and sidecar) to the first answered `initialize`.
    pub(crate) first_answer: Duration,
    session: String,
}

/// What the load sends.
pub(crate) struct Requests {
    pub(crate) ping: Request,
    pub(crate) list: Request,
    pub(crate) echo: Request,
    pub(crate) floor: Option<Request>,
}

#[derive(Deserialize)]
struct Ready {
    url: String,
    token: String,
    pid: u32,
}

impl Bridge {
    pub(crate) fn start(binary: &Path, catalogue: &Path) -> Result<Self> {
        let log = tempfile::NamedTempFile::new()?;
        let spawned = Instant::now();
        let child = Command::new(binary)
            .args(["demo", "--json", "--tools"])
            .arg(catalogue)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log.reopen()?)
            .spawn()
            .with_context(|| format!("cannot start {}", binary.display()))?;
        let mut bridge = Self {
            child,
            log,
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            token: String::new(),
            pid: 0,
            first_answer: Duration::ZERO,
            session: String::new(),
        };
        bridge.meet(spawned).map_err(|error| {
            let log = std::fs::read_to_string(bridge.log.path()).unwrap_or_default();
            error.context(format!("`a2mcp demo` did not come up (it said: {:?})", log.trim()))
        })?;
        Ok(bridge)
    }

    fn meet(&mut self, spawned: Instant) -> Result<()> {
        let ready: Ready = serde_json::from_str(&first_line(&mut self.child)?)?;
        let authority = ready.url.strip_prefix("http://").context("the demo's URL is not http://")?;
        let authority = authority.split('/').next().unwrap_or_default();
        self.address = authority.parse().with_context(|| format!("no address: {authority}"))?;
        self.token = ready.token;
        self.pid = ready.pid;

        let initialize = self.post(&json!({
            "jsonrpc": "2.0", "id": 0, "method": "initialize",
            "params": {
                "protocolVersion": PROTOCOL, "capabilities": {},
                "clientInfo": { "name": "a2mcp-bench", "version": "1" },
            },
        }))?;
        let reply = exchange(self.address, &initialize)?;
        self.first_answer = spawned.elapsed();
        ensure!(reply.status == 200, "initialize was answered with status {}", reply.status);
        self.session = reply.header("mcp-session-id").context("initialize opened no session")?.to_owned();
        let initialized = self.post(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }))?;
        let reply = exchange(self.address, &initialized)?;
        ensure!(reply.status == 202, "notifications/initialized was answered with status {}", reply.status);

        let command_line = process::command_line(self.pid)?;
        ensure!(command_line.contains("sidecar"), "`pid` is not the sidecar's but of: {command_line}");
        Ok(())
    }

    /// The requests of the load, each tried once.
    pub(crate) fn requests(&self) -> Result<Requests> {
        let counter: u64 = COUNTER.parse()?;
        let request = |method: &str, params: Value| -> Result<Vec<u8>> {
            let mut message = json!({ "jsonrpc": "2.0", "id": counter, "method": method });
            if !params.is_null() {
                message["params"] = params;
            }
            self.post(&message)
        };
        let ping = Request::calibrate(self.address, request("ping", Value::Null)?, |answer| {
            ensure!(answer["result"] == json!({}));
            Ok(())
        })?;
        let list = Request::calibrate(self.address, request("tools/list", Value::Null)?, |answer| {
            let tools = answer["result"]["tools"].as_array().context("no tools")?;
            ensure!(tools.iter().any(|tool| tool["name"] == "echo"), "no tool `echo`");
            Ok(())
        })?;
        let text = format!("bench {COUNTER}");
        let params = json!({ "name": "echo", "arguments": { "text": text } });
        let echo = Request::calibrate(self.address, request("tools/call", params)?, |answer| {
            let result = &answer["result"];
            ensure!(result["isError"] != true, "the tool failed");
            ensure!(result["content"][0]["text"].as_str().is_some_and(|echoed| echoed.contains(&text)));
            Ok(())
        })?;
        Ok(Requests { ping, list, echo, floor: None })
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

    /// Interrupts the demo and waits until it and the sidecar are gone.
    pub(crate) fn stop(mut self) -> Result<()> {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::INT).context("cannot stop the demo")?;
        let deadline = Instant::now() + STOP_LIMIT;
        while self.child.try_wait()?.is_none() || process::memory(self.pid).is_ok() {
            ensure!(Instant::now() < deadline, "the demo or its sidecar did not end within {STOP_LIMIT:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        // Reached with a live child only on the way out of a failure.
        if let Ok(None) = self.child.try_wait() {
            let _ = kill_process(Pid::from_child(&self.child), Signal::INT);
        }
    }
}

/// The floor, as a child process.
pub(crate) struct Floor {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Floor {
    pub(crate) fn start(body_len: usize) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--floor", &body_len.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the floor")?;
        let port: u16 = first_line(&mut child)?.trim().parse().context("the floor named no port")?;
        Ok(Self { child, address: SocketAddr::from((Ipv4Addr::LOCALHOST, port)) })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The very bytes of a ping, so that both servers parse the same.
    pub(crate) fn request(&self, ping: &Request) -> Result<Request> {
        Request::calibrate(self.address, ping.bytes().to_vec(), |_| Ok(()))
    }

    pub(crate) fn stop(mut self) -> Result<()> {
        drop(self.child.stdin.take());
        self.child.wait()?;
        Ok(())
    }
}

/// The floor's own life: prints its port, serves until stdin ends.
pub(crate) fn serve_floor(body_len: usize) -> Result<()> {
    // A JSON string of that length, so that the generator can treat it like any answer.
    let body = Bytes::from(format!("\"{}\"", "x".repeat(body_len.saturating_sub(2))));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = tokio::task::LocalSet::new();
    let end = local.block_on(&runtime, async move {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        writeln!(std::io::stdout(), "{}", listener.local_addr()?.port())?;
        let serve = async {
            loop {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                let body = body.clone();
                tokio::task::spawn_local(hyper::server::conn::http1::Builder::new().serve_connection(
                    TokioIo::new(stream),
                    service_fn(move |request| answer(request, body.clone())),
                ));
            }
        };
        let mut stdin =
            tokio::net::unix::pipe::Receiver::from_owned_fd(rustix::io::dup(rustix::stdio::stdin())?)?;
        let mut rest = Vec::new();
        tokio::select! {
            ended = serve => ended,
            ended = stdin.read_to_end(&mut rest) => ended.map(drop).map_err(anyhow::Error::from),
        }
    });
    runtime.shutdown_background();
    end
}

async fn answer(request: HttpRequest<Incoming>, body: Bytes) -> Result<Response<Full<Bytes>>, Infallible> {
    // A request that breaks off leaves nobody to answer.
    let _ = request.into_body().collect().await;
    let mut response = Response::new(Full::new(body));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

/// The first line a child prints; the rest is read and dropped, so that it never blocks.
fn first_line(child: &mut Child) -> Result<String> {
    let stdout = child.stdout.take().context("the child has no stdout")?;
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        let mut lines = BufReader::new(stdout).lines();
        if let Some(line) = lines.next() {
            let _ = send.send(line);
        }
        drop(send);
        lines.for_each(drop);
    });
    match receive.recv_timeout(START_LIMIT) {
        Ok(line) => Ok(line?),
        Err(mpsc::RecvTimeoutError::Disconnected) => bail!("it ended without a line on stdout"),
        Err(mpsc::RecvTimeoutError::Timeout) => Err(anyhow!("no line on stdout within {START_LIMIT:?}")),
    }
}
