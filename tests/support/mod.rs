//! What the integration tests share: a host that speaks frames with a real sidecar process from
//! inside the test, and a plain HTTP/1.1 client that shows every byte.
//!
//! Everything waits for events with a deadline; nothing sleeps for a while and hopes.

#![allow(dead_code, clippy::unwrap_used, missing_docs, unreachable_pub)]

pub mod assets;
pub mod caller;
pub mod cloudflared;
pub mod edge;
pub mod fixtures;
pub mod frames;
pub mod http;
pub mod proxy;
pub mod reference;
pub mod sse;
pub mod wrap;

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use a2mcp::mcp::call::NOT_EXPOSED;
use a2mcp::process::Identity;
use frames::{Frames, Gate, Gated, Reactor, send};
use rustix::process::{Pid, Signal};
use serde_json::Value;

/// Longest wait for anything that should happen at once.
pub const SOON: Duration = Duration::from_secs(20);

/// The binary under test.
pub fn binary() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_a2mcp"))
}

/// Waits until `ready` gives something.
pub fn eventually<T>(what: &str, ready: impl FnMut() -> Option<T>) -> T {
    within(SOON, what, ready)
}

/// Waits until `ready` gives something, no longer than `limit`.
pub fn within<T>(limit: Duration, what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + limit;
    loop {
        if let Some(found) = ready() {
            return found;
        }
        assert!(Instant::now() < end, "{what} did not happen within {limit:?}");
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
    Answer::Result(result_of(text, false))
}

/// The JSON of a result of one text block.
pub fn result_of(text: &str, is_error: bool) -> String {
    format!(r#"{{"content":[{{"type":"text","text":{}}}],"isError":{is_error}}}"#, Value::from(text))
}

type Handler = Arc<dyn Fn(&str, &Value, &str) -> Answer + Send + Sync>;

/// Looks at a frame before anybody else; whether it has taken it.
type Hook = Arc<dyn Fn(&Peer, &Value) -> bool + Send + Sync>;

/// The sidecar as a [`Setup::hook`] sees it.
#[derive(Clone)]
pub struct Peer {
    stdin: Arc<Mutex<Option<ChildStdin>>>,
    frames: Arc<Frames>,
}

impl Peer {
    /// One frame to the sidecar.
    pub fn send(&self, payload: &str) {
        send(&self.stdin, payload.as_bytes());
    }

    pub fn notify(&self, method: &str, params: &Value) {
        self.send(&format!(r#"{{"jsonrpc":"2.0","method":"{method}","params":{params}}}"#));
    }

    pub fn answer(&self, id: &Value, result: &str) {
        self.send(&format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#));
    }

    pub fn fail(&self, id: &Value, error: &Value) {
        self.send(&format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#));
    }

    /// Sends a request and waits for its answer; not from the hook itself.
    pub fn ask(&self, method: &str, params: &Value) -> Value {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = format!("ask-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        self.send(&format!(r#"{{"jsonrpc":"2.0","id":"{id}","method":"{method}","params":{params}}}"#));
        let wanted = |frame: &Value| frame["id"] == id.as_str() && frame.get("method").is_none();
        self.frames.find(Duration::from_secs(60), wanted).map(|found| found.1).unwrap_or_default()
    }
}

/// How a [`Host`] is to start.
pub struct Setup {
    pub dir: Option<Arc<tempfile::TempDir>>,
    pub config: Option<String>,
    pub tools: String,
    pub handler: Handler,
    pub hook: Option<Hook>,
    pub env: Vec<(String, String)>,
    pub hello: Value,
    /// Sent instead of `bridge/hello`, header included.
    pub first: Option<Vec<u8>>,
    /// Answer `tools/list`.
    pub lists: bool,
    /// Shell commands before the sidecar takes their process over.
    pub before: String,
    /// The host's name for its bridge; a new one when not given.
    pub instance: Option<String>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            dir: None,
            config: None,
            tools: r#"[{"name":"echo","description":"gives its arguments back","inputSchema":{"type":"object"}},{"name":"hang","description":"never answers","inputSchema":{"type":"object"}},{"name":"fail","description":"throws","inputSchema":{"type":"object"}}]"#.into(),
            handler: Arc::new(|name, _, raw| match name {
                "echo" => text_result(raw),
                "fail" => Answer::Result(result_of("it broke", true)),
                "hang" => Answer::Later,
                _ => Answer::Result(result_of(NOT_EXPOSED, true)),
            }),
            hook: None,
            env: Vec::new(),
            hello: serde_json::json!({}),
            first: None,
            lists: true,
            before: String::new(),
            instance: None,
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

    /// Shows every frame to `hook` first; a frame it takes is nobody else's.
    pub fn hook(mut self, hook: impl Fn(&Peer, &Value) -> bool + Send + Sync + 'static) -> Self {
        self.hook = Some(Arc::new(hook));
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

    /// Sends these bytes instead of `bridge/hello`.
    pub fn first(mut self, bytes: Vec<u8>) -> Self {
        self.first = Some(bytes);
        self
    }

    /// Runs these shell commands in the process that becomes the sidecar.
    pub fn before(mut self, commands: &str) -> Self {
        self.before = commands.into();
        self
    }

    /// Leaves `tools/list` to the test.
    pub fn without_list(mut self) -> Self {
        self.lists = false;
        self
    }

    /// Uses the agent directory of another host; when that one's sidecar has ended, this is the same
    /// host with its next sidecar.
    pub fn in_dir_of(mut self, host: &Host) -> Self {
        self.dir = Some(host.dir.clone());
        if Identity::of(host.child.id()).is_none() {
            self.instance = Some(host.instance.clone());
            host.is_succeeded.store(true, Ordering::SeqCst);
        }
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
        let mut child = Command::new("sh")
            .args(["-c", &format!("{}\nexec \"$0\" \"$@\"", self.before)])
            .arg(binary())
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
        let gate = Arc::new(Gate::default());
        let silent = Arc::new(AtomicBool::new(false));
        let mut stdout = Gated { inner: child.stdout.take().unwrap(), gate: gate.clone() };
        let reactor = Reactor {
            frames: frames.clone(),
            stdin: stdin.clone(),
            tools: Arc::new(Mutex::new(self.tools)),
            silent: silent.clone(),
            handler: self.handler,
            hook: self.hook,
            lists: self.lists,
        };
        let tools = reactor.tools.clone();
        std::thread::spawn(move || reactor.run(&mut stdout));
        let instance = self.instance.unwrap_or_else(|| format!("test-{}", uuid::Uuid::new_v4()));
        let mut host = Host {
            child,
            stdin,
            frames,
            gate,
            silent,
            dir,
            tools,
            port: 0,
            token: String::new(),
            instance,
            is_succeeded: AtomicBool::new(false),
        };
        if let Some(first) = self.first {
            host.send_bytes(&first);
            return host;
        }
        let mut params = serde_json::json!({
            "protocol": 1, "instance": host.instance, "features": [],
            "capabilities": {"tools": {"listChanged": true}},
            "host": {"name": "test", "version": "0", "pid": std::process::id(), "cwd": "/", "home": "/"},
            "inFlight": [],
        });
        for (name, value) in self.hello.as_object().unwrap() {
            params[name] = value.clone();
        }
        host.instance = params["instance"].as_str().unwrap_or_default().to_owned();
        host.send(
            &serde_json::json!({"jsonrpc": "2.0", "id": "hello", "method": "bridge/hello", "params": params})
                .to_string(),
        );
        host
    }
}

/// A running sidecar with the test as its host. Dropping it kills the sidecar.
pub struct Host {
    pub child: Child,
    pub dir: Arc<tempfile::TempDir>,
    pub port: u16,
    pub token: String,
    /// The host's name for its bridge.
    pub instance: String,
    /// Another sidecar of the same host follows: the keeper is its.
    is_succeeded: AtomicBool,
    stdin: Arc<Mutex<Option<ChildStdin>>>,
    frames: Arc<Frames>,
    gate: Arc<Gate>,
    silent: Arc<AtomicBool>,
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

    pub fn notify(&self, method: &str, params: &Value) {
        self.peer().notify(method, params);
    }

    /// The sidecar as a hook sees it.
    pub fn peer(&self) -> Peer {
        Peer { stdin: self.stdin.clone(), frames: self.frames.clone() }
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
        self.frames.find(SOON, wanted).unwrap_or_else(|| {
            let seen = self.frames();
            let shown: Vec<String> = seen.iter().map(|frame| frame.chars().take(200).collect()).collect();
            panic!("the frame did not come; seen: {shown:#?}; log: {}", self.log());
        })
    }

    /// The first such frame, if it comes within `limit`.
    pub fn frame_within(&self, limit: Duration, wanted: impl Fn(&Value) -> bool) -> Option<Value> {
        self.frames.find(limit, wanted).map(|found| found.1)
    }

    /// The `tools/call` frame of tool `name`.
    pub fn call_frame(&self, name: &str) -> Value {
        self.frame(|frame| frame["method"] == "tools/call" && frame["params"]["name"] == name)
    }

    /// The `tools/call` frame whose argument `key` is `value`.
    pub fn call_with(&self, key: &str, value: impl Into<Value>) -> Value {
        let value = value.into();
        self.frame(|frame| frame["method"] == "tools/call" && frame["params"]["arguments"][key] == value)
    }

    /// The notice (`bridge/notify`) whose text contains `part`.
    pub fn notice(&self, part: &str) -> Value {
        self.frame(|frame| {
            frame["method"] == "bridge/notify"
                && frame["params"]["text"].as_str().is_some_and(|text| text.contains(part))
        })["params"]
            .clone()
    }

    /// Sends a request as the shim and waits for its answer.
    pub fn ask(&self, id: &str, method: &str, params: &str) -> Value {
        self.send(&format!(r#"{{"jsonrpc":"2.0","id":"{id}","method":"{method}","params":{params}}}"#));
        self.frame(|frame| frame["id"] == id && frame.get("method").is_none())
    }

    pub fn frames(&self) -> Vec<String> {
        self.frames.seen.lock().unwrap().iter().map(|frame| frame.0.clone()).collect()
    }

    /// The method of the last frame.
    pub fn last_frame(&self) -> Value {
        self.frames.seen.lock().unwrap().last().map(|frame| frame.1.clone()).unwrap_or_default()
    }

    pub fn count(&self, method: &str) -> usize {
        self.frames.seen.lock().unwrap().iter().filter(|frame| frame.1["method"] == method).count()
    }

    /// The host goes on reading but answers nothing any more.
    pub fn fall_silent(&self) {
        self.silent.store(true, Ordering::SeqCst);
    }

    /// The host answers again; what came meanwhile stays unanswered.
    pub fn speak_again(&self) {
        self.silent.store(false, Ordering::SeqCst);
    }

    /// The host stops reading: the pipe fills.
    pub fn stop_reading(&self) {
        *self.gate.closed.lock().unwrap() = true;
    }

    pub fn read_again(&self) {
        *self.gate.closed.lock().unwrap() = false;
        self.gate.opened.notify_all();
    }

    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed()).unwrap()
    }

    /// What `a2mcp status --json` says.
    pub fn status(&self) -> Value {
        let (code, out, err) = self.cli(&["status", "--json"]);
        assert_eq!(code, 0, "{err}");
        serde_json::from_str(&out).unwrap()
    }

    /// What the sidecar on `port` says, when several serve the same directory.
    pub fn status_of(&self, port: u16) -> Value {
        let sockets = a2mcp::rundir::open().unwrap();
        let mut socket = UnixStream::connect(sockets.join(format!("{port}.sock"))).unwrap();
        socket.write_all(b"{\"verb\":\"status\"}\n").unwrap();
        let answer = BufReader::new(socket).lines().next().unwrap().unwrap();
        serde_json::from_str::<Value>(&answer).unwrap()["ok"].clone()
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
        audit_records(&self.path("a2mcp.log"))
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
        self.wait_for(SOON)
    }

    /// Waits for the sidecar's end, no longer than `limit`; its exit code.
    pub fn ends_within(&mut self, limit: Duration) -> Option<i32> {
        self.wait_for(limit).code()
    }

    fn wait_for(&mut self, limit: Duration) -> ExitStatus {
        within(limit, "the sidecar's end", || self.child.try_wait().unwrap())
    }

    /// Waits until the sidecar's stdout has ended too.
    pub fn drained(&self) {
        let end = self.frames.ended.lock().unwrap();
        let (ended, _) = self.frames.changed.wait_timeout_while(end, SOON, |ended| !*ended).unwrap();
        assert!(*ended, "stdout is still open");
        drop(ended);
        self.assert_only_frames();
    }

    /// Every byte of the sidecar's stdout so far was part of a frame.
    pub fn assert_only_frames(&self) {
        let broken = self.frames.broken.lock().unwrap();
        assert!(broken.is_none(), "stdout holds something else than frames: {broken:?}");
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
        if !self.is_succeeded.load(Ordering::SeqCst) {
            end_keeper(&self.instance);
        }
        self.read_again();
        if !std::thread::panicking() {
            self.assert_only_frames();
        }
    }
}

/// Ends the keeper of an instance, should there be one; returns when its port is free.
pub fn end_keeper(instance: &str) {
    let Ok(mut keeper) = UnixStream::connect(a2mcp::keeper::socket_path(instance).unwrap()) else { return };
    let _ = keeper.write_all(b"{\"verb\":\"hello\",\"protocol\":1}\n{\"verb\":\"end\"}\n");
    let _ = keeper.set_read_timeout(Some(SOON));
    let _ = BufReader::new(keeper).lines().nth(1);
}

/// The records of an audit file, both generations, oldest first.
pub fn audit_records(file: &Path) -> Vec<Value> {
    let text = whole_lines(&PathBuf::from(format!("{}.1", file.display()))) + &whole_lines(file);
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("audit line {line:?}")))
        .collect()
}

/// The lines of a file that another process appends to, without the one that is still being written: a
/// reader may see a part of a single write. Nothing, when there is no such file.
pub fn whole_lines(file: &Path) -> String {
    let mut bytes = std::fs::read(file).unwrap_or_default();
    bytes.truncate(bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1));
    String::from_utf8(bytes).unwrap()
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
