//! The two servers under load, as child processes: the reference host with its sidecar, and the
//! floor.
//!
//! The floor is this same binary: hyper on a `current_thread` runtime with TCP_NODELAY, as the
//! sidecar has it, which reads each request and answers a fixed body. Both live as long as their
//! stdin is open, so nothing is left behind however this process ends.

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
use serde::Deserialize;
use tempfile::{NamedTempFile, TempDir};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;

use crate::endpoint::Endpoint;
use crate::load::Request;
use crate::process;

const START_LIMIT: Duration = Duration::from_secs(20);
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// The reference host with a sidecar that serves.
pub(crate) struct Bridge {
    host: Child,
    _agent_dir: TempDir,
    pub(crate) endpoint: Endpoint,
    /// The sidecar's.
    pub(crate) pid: u32,
    /// From the spawn of the host, which spawns the sidecar, to the first answered request.
    pub(crate) first_answer: Duration,
}

/// The line of the host that says that the sidecar serves.
#[derive(Deserialize)]
struct Ready {
    url: String,
    pid: u32,
}

impl Bridge {
    pub(crate) fn start(binary: &Path, catalogue: &Path, config: &str) -> Result<Self> {
        let agent_dir = tempfile::tempdir()?;
        std::fs::write(agent_dir.path().join("a2mcp.json"), config)?;
        let log = NamedTempFile::new()?;
        let spawned = Instant::now();
        let mut host = Command::new(binary)
            .args(["reference-host", "--tools"])
            .arg(catalogue)
            .arg("--agent-dir")
            .arg(agent_dir.path())
            .env_remove("A2MCP_CONFIG")
            .env_remove("A2MCP_AUDIT")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log.reopen()?)
            .spawn()
            .with_context(|| format!("cannot start {}", binary.display()))?;
        let met = Self::meet(&mut host, agent_dir.path(), spawned);
        let (endpoint, pid, first_answer) = met.map_err(|error| {
            let said = std::fs::read_to_string(log.path()).unwrap_or_default();
            error.context(format!("the reference host did not come up (it said: {:?})", said.trim()))
        })?;
        Ok(Self { host, _agent_dir: agent_dir, endpoint, pid, first_answer })
    }

    fn meet(host: &mut Child, agent_dir: &Path, spawned: Instant) -> Result<(Endpoint, u32, Duration)> {
        let line = first_line(host)?;
        let ready: Ready = serde_json::from_str(&line).with_context(|| format!("not ready but: {line}"))?;
        let endpoint = Endpoint::open(address_of(&ready.url)?, agent_dir)?;
        let first_answer = spawned.elapsed();
        endpoint.initialized()?;
        let command_line = process::command_line(ready.pid)?;
        ensure!(command_line.contains("sidecar"), "`pid` is not the sidecar's but of: {command_line}");
        Ok((endpoint, ready.pid, first_answer))
    }

    /// Ends the host as its own end would, and waits until it and the sidecar are gone.
    pub(crate) fn stop(mut self) -> Result<()> {
        drop(self.host.stdin.take());
        let deadline = Instant::now() + STOP_LIMIT;
        while self.host.try_wait()?.is_none() || process::memory(self.pid).is_ok() {
            ensure!(Instant::now() < deadline, "host or sidecar did not end within {STOP_LIMIT:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

pub(crate) fn address_of(url: &str) -> Result<SocketAddr> {
    let authority = url.strip_prefix("http://").and_then(|rest| rest.split('/').next());
    authority.and_then(|authority| authority.parse().ok()).with_context(|| format!("no address in {url}"))
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
pub(crate) fn first_line(child: &mut Child) -> Result<String> {
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
