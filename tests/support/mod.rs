//! What the integration tests share: a host that speaks frames with a real sidecar process from
//! inside the test, and a plain HTTP/1.1 client that shows every byte.
//!
//! Everything waits for events with a deadline; nothing sleeps for a while and hopes.

#![allow(dead_code, clippy::unwrap_used, missing_docs, unreachable_pub)]

pub mod http;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Longest wait for anything that should happen at once.
pub const SOON: Duration = Duration::from_secs(20);

/// The binary under test.
pub fn binary() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_a2mcp"))
}

/// Waits until `ready` gives something.
pub fn eventually<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + SOON;
    loop {
        if let Some(found) = ready() {
            return found;
        }
        assert!(Instant::now() < end, "{what} did not happen within {SOON:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What the test's host answers to a `tools/call`.
pub enum Answer {
    /// This result, raw JSON.
    Result(String),
    /// This error message.
    Error(String),
    /// Nothing; the test answers later with [`Host::answer`], or never.
    Later,
}

/// A result of one text block.
pub fn text_result(text: &str) -> Answer {
    Answer::Result(format!(
        r#"{{"content":[{{"type":"text","text":{}}}],"isError":false}}"#,
        Value::from(text)
    ))
}

type Handler = Arc<dyn Fn(&str, &Value, &str) -> Answer + Send + Sync>;

/// How a [`Host`] is to start.
pub struct Setup {
    pub dir: Option<Arc<tempfile::TempDir>>,
    pub config: Option<String>,
    pub tools: String,
    pub handler: Handler,
    pub env: Vec<(String, String)>,
    pub hello: Value,
    /// Answer `tools/list`.
    pub lists: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            dir: None,
            config: None,
            tools: r#"[{"name":"echo","description":"gives its arguments back","inputSchema":{"type":"object"}},{"name":"hang","description":"never answers","inputSchema":{"type":"object"}},{"name":"fail","description":"throws","inputSchema":{"type":"object"}}]"#.into(),
            handler: Arc::new(|name, _, raw| match name {
                "echo" => text_result(raw),
                "fail" => Answer::Result(r#"{"content":[{"type":"text","text":"it broke"}],"isError":true}"#.into()),
                "hang" => Answer::Later,
                _ => Answer::Result(r#"{"content":[{"type":"text","text":"not exposed: no tool of that name is offered here (see tools/list)"}],"isError":true}"#.into()),
            }),
            env: Vec::new(),
            hello: serde_json::json!({}),
            lists: true,
        }
    }
}

impl Setup {
    pub fn config(mut self, config: &str) -> Self {
        self.config = Some(config.into());
        self
    }

    pub fn tools(mut self, tools: &str) -> Self {
        self.tools = tools.into();
        self
    }

    pub fn handler(mut self, handler: impl Fn(&str, &Value, &str) -> Answer + Send + Sync + 'static) -> Self {
        self.handler = Arc::new(handler);
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    pub fn hello(mut self, members: Value) -> Self {
        self.hello = members;
        self
    }

    /// Uses the agent directory of an earlier host.
    pub fn in_dir_of(mut self, host: &Host) -> Self {
        self.dir = Some(host.dir.clone());
        self
    }

    pub fn in_dir(mut self, dir: Arc<tempfile::TempDir>) -> Self {
        self.dir = Some(dir);
        self
    }

    /// Starts and waits until the endpoint listens and has the tool list.
    pub fn start(self) -> Host {
        let lists = self.lists;
        let mut host = self.spawn();
        host.expect_hello();
        if lists {
            host.until_ready();
        }
        host
    }

    /// Starts, says hello, and leaves the rest to the test.
    pub fn spawn(self) -> Host {
        let dir = self.dir.unwrap_or_else(|| Arc::new(tempfile::tempdir().unwrap()));
        if let Some(config) = &self.config {
            std::fs::write(dir.path().join("a2mcp.json"), config).unwrap();
        }
        let stderr =
            std::fs::OpenOptions::new().append(true).create(true).open(dir.path().join("a2mcp.start.stderr"));
        let mut child = Command::new(binary())
            .args(["sidecar", "--agent-dir"])
            .arg(dir.path())
            .env_remove("A2MCP_CONFIG")
            .env_remove("A2MCP_AUDIT")
            .envs(self.env.iter().map(|(name, value)| (name.as_str(), value.as_str())))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr.unwrap())
            .spawn()
            .unwrap();
        let stdin = Arc::new(Mutex::new(child.stdin.take()));
        let frames = Arc::new(Frames::default());
        let mut stdout = child.stdout.take().unwrap();
        let reactor = Reactor {
            frames: frames.clone(),
            stdin: stdin.clone(),
            tools: Arc::new(Mutex::new(self.tools)),
            handler: self.handler,
            lists: self.lists,
        };
        let tools = reactor.tools.clone();
        std::thread::spawn(move || reactor.run(&mut stdout));
        let host = Host { child, stdin, frames, dir, tools, port: 0, token: String::new() };
        let mut params = serde_json::json!({
            "protocol": 1, "instance": format!("test-{}", std::process::id()), "features": [],
            "capabilities": {"tools": {"listChanged": true}},
            "host": {"name": "test", "version": "0", "pid": std::process::id(), "cwd": "/", "home": "/"},
            "inFlight": [],
        });
        for (name, value) in self.hello.as_object().unwrap() {
            params[name] = value.clone();
        }
        host.send(
            &serde_json::json!({"jsonrpc": "2.0", "id": "hello", "method": "bridge/hello", "params": params})
                .to_string(),
        );
        host
    }
}

/// The frames a sidecar has sent, in order.
#[derive(Default)]
struct Frames {
    seen: Mutex<Vec<String>>,
    ended: Mutex<bool>,
    changed: Condvar,
}

struct Reactor {
    frames: Arc<Frames>,
    stdin: Arc<Mutex<Option<ChildStdin>>>,
    tools: Arc<Mutex<String>>,
    handler: Handler,
    lists: bool,
}

impl Reactor {
    fn run(self, stdout: &mut impl Read) {
        loop {
            let mut header = [0; 4];
            if stdout.read_exact(&mut header).is_err() {
                break;
            }
            let mut payload = vec![0; u32::from_be_bytes(header) as usize];
            if stdout.read_exact(&mut payload).is_err() {
                break;
            }
            let text = String::from_utf8(payload).expect("frames are UTF-8");
            self.frames.seen.lock().unwrap().push(text.clone());
            self.react(&text);
            self.frames.changed.notify_all();
        }
        *self.frames.ended.lock().unwrap() = true;
        self.frames.changed.notify_all();
    }

    fn react(&self, text: &str) {
        let message = parse(text).expect("every stdout byte parses as frames");
        let id = &message["id"];
        let answer = match message["method"].as_str() {
            Some("tools/list") if self.lists => format!(r#"{{"tools":{}}}"#, self.tools.lock().unwrap()),
            Some("bridge/ping") => "{}".to_owned(),
            Some("tools/call") => {
                let name = message["params"]["name"].as_str().unwrap_or_default();
                let raw = raw_arguments(text);
                match (self.handler)(name, &message, raw) {
                    Answer::Later => return,
                    Answer::Result(result) => result,
                    Answer::Error(error) => {
                        let error = serde_json::json!({"code": -32000, "message": error});
                        return send(
                            &self.stdin,
                            format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#).as_bytes(),
                        );
                    }
                }
            }
            _ => return,
        };
        send(&self.stdin, format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{answer}}}"#).as_bytes());
    }
}

/// A frame as a value; a lone surrogate, which Rust cannot hold, becomes U+FFFD.
fn parse(text: &str) -> serde_json::Result<Value> {
    serde_json::from_str(text).or_else(|_| serde_json::from_str(&text.replace(r"\ud800", r"\ufffd")))
}

/// The arguments' own text inside a `tools/call` frame.
pub fn raw_arguments(frame: &str) -> &str {
    #[derive(serde::Deserialize)]
    struct Call<'a> {
        #[serde(borrow)]
        params: Params<'a>,
    }
    #[derive(serde::Deserialize)]
    struct Params<'a> {
        #[serde(borrow)]
        arguments: &'a serde_json::value::RawValue,
    }
    serde_json::from_str::<Call<'_>>(frame).map_or("", |call| call.params.arguments.get())
}

fn send(stdin: &Mutex<Option<ChildStdin>>, payload: &[u8]) {
    let mut frame = (payload.len() as u32).to_be_bytes().to_vec();
    frame.extend_from_slice(payload);
    if let Some(stdin) = stdin.lock().unwrap().as_mut() {
        let _ = stdin.write_all(&frame);
    }
}

/// A running sidecar with the test as its host. Dropping it kills the sidecar.
pub struct Host {
    pub child: Child,
    pub dir: Arc<tempfile::TempDir>,
    pub port: u16,
    pub token: String,
    stdin: Arc<Mutex<Option<ChildStdin>>>,
    frames: Arc<Frames>,
    tools: Arc<Mutex<String>>,
}

impl Host {
    pub fn start() -> Self {
        Setup::default().start()
    }

    /// Waits for the answer to hello; the endpoint listens then.
    pub fn expect_hello(&mut self) -> Value {
        let answer = self.frame(|frame| frame["id"] == "hello");
        self.port = answer["result"]["port"].as_u64().unwrap_or_default() as u16;
        self.token = self.config()["token"].as_str().unwrap_or_default().to_owned();
        answer
    }

    pub fn until_ready(&self) {
        eventually("readiness", || (self.http("GET", "/readyz", &[], b"").status == 200).then_some(()));
    }

    /// One frame to the sidecar.
    pub fn send(&self, payload: &str) {
        send(&self.stdin, payload.as_bytes());
    }

    /// Bytes to the sidecar's stdin, as they are.
    pub fn send_bytes(&self, bytes: &[u8]) {
        if let Some(stdin) = self.stdin.lock().unwrap().as_mut() {
            let _ = stdin.write_all(bytes);
        }
    }

    pub fn close_stdin(&self) {
        self.stdin.lock().unwrap().take();
    }

    /// Answers a call that was left for later.
    pub fn answer(&self, frame: &Value, result: &str) {
        self.send(&format!(r#"{{"jsonrpc":"2.0","id":{},"result":{result}}}"#, frame["id"]));
    }

    pub fn set_tools(&self, tools: &str) {
        *self.tools.lock().unwrap() = tools.into();
        self.send(r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#);
    }

    /// The first frame, of all that came or will come, for which `wanted` holds.
    pub fn frame(&self, wanted: impl Fn(&Value) -> bool) -> Value {
        self.frame_text(|frame| wanted(frame)).1
    }

    pub fn frame_text(&self, wanted: impl Fn(&Value) -> bool) -> (String, Value) {
        let end = Instant::now() + SOON;
        let mut seen = self.frames.seen.lock().unwrap();
        let mut next = 0;
        loop {
            while next < seen.len() {
                let frame = parse(&seen[next]).unwrap();
                if wanted(&frame) {
                    return (seen[next].clone(), frame);
                }
                next += 1;
            }
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the frame did not come; seen: {seen:#?}; log: {}", self.log());
            seen = self.frames.changed.wait_timeout(seen, left).unwrap().0;
        }
    }

    /// The `tools/call` frame of tool `name`.
    pub fn call_frame(&self, name: &str) -> Value {
        self.frame(|frame| frame["method"] == "tools/call" && frame["params"]["name"] == name)
    }

    pub fn frames(&self) -> Vec<String> {
        self.frames.seen.lock().unwrap().clone()
    }

    pub fn count(&self, method: &str) -> usize {
        let wanted = format!(r#""method":"{method}""#);
        self.frames.seen.lock().unwrap().iter().filter(|frame| frame.contains(&wanted)).count()
    }

    /// The sidecar's own JSON config.
    pub fn config(&self) -> Value {
        let text = std::fs::read_to_string(self.dir.path().join("a2mcp.json")).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Everything the sidecar logged.
    pub fn log(&self) -> String {
        let mut log = std::fs::read_to_string(self.path("a2mcp.start.stderr")).unwrap_or_default();
        log +=
            &std::fs::read_to_string(self.path(&format!("a2mcp.{}.stderr", self.port))).unwrap_or_default();
        log
    }

    /// The audit records of both generations.
    pub fn audit(&self) -> Vec<Value> {
        let read = |name| std::fs::read_to_string(self.path(name)).unwrap_or_default();
        let text = read("a2mcp.log.1") + &read("a2mcp.log");
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("audit line {line:?}")))
            .collect()
    }

    /// One request on a connection of its own, with the token and without a session.
    pub fn http(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> http::Reply {
        let bearer = format!("Bearer {}", self.token);
        let mut all = vec![("Authorization", bearer.as_str())];
        all.extend_from_slice(headers);
        http::Connection::open(self.port).request(method, path, &all, body)
    }

    pub fn client(&self) -> http::Client {
        http::Client::initialize(self.port, &self.token)
    }

    /// `a2mcp ARGS --agent-dir …`: exit code, stdout, stderr.
    pub fn cli(&self, args: &[&str]) -> (i32, String, String) {
        cli(args, Some(self.dir.path()), &HashMap::new())
    }

    pub fn wait(&mut self) -> ExitStatus {
        eventually("the sidecar's end", || self.child.try_wait().unwrap())
    }

    /// Waits until the sidecar's stdout has ended too.
    pub fn drained(&self) {
        let end = self.frames.ended.lock().unwrap();
        let (ended, _) = self.frames.changed.wait_timeout_while(end, SOON, |ended| !*ended).unwrap();
        assert!(*ended, "stdout is still open");
    }

    /// Open descriptors of the sidecar.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).map_or(0, Iterator::count)
    }

    /// Resident memory of the sidecar in bytes.
    pub fn resident(&self) -> u64 {
        a2mcp::process::resident_bytes(self.child.id()).unwrap_or_default()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the binary to its end.
pub fn cli(args: &[&str], dir: Option<&Path>, env: &HashMap<&str, &str>) -> (i32, String, String) {
    let mut command = Command::new(binary());
    command.args(args).envs(env).env_remove("A2MCP_CONFIG").env_remove("A2MCP_AUDIT").stdin(Stdio::null());
    if let Some(dir) = dir {
        command.arg("--agent-dir").arg(dir);
    }
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}
