//! The tools of the reference host: `read`, `write`, `list`, `bash`, `sleep`, `echo`, `image`,
//! `fail`, and `needs_approval` where an approval file is given. Further ones come from a file of
//! definitions with canned results; that is how tests offer odd names and schemas.
//!
//! A tool's failure is a result with `isError`. Outputs are bounded; [`super::bash`] runs commands.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use super::bash;
use super::canned::{self, CannedTool};
use super::execution::ExecutionLog;
use super::store::Outcome;
use super::tools::{Call, HostState, Pending, Request, Tools, error_outcome, text_result};
use crate::frame::messages::{HostLlm, RpcError, code};
use crate::mcp::call::{NO_MAIN, NOT_EXPOSED};

/// The largest file `read` returns.
const MAX_READ: u64 = 16 << 20;
/// The most names `list` returns.
const MAX_NAMES: usize = 10_000;
/// The longest `sleep`: a day.
const MAX_SLEEP: Duration = Duration::from_secs(86_400);
/// How often the approval file is looked for.
const APPROVAL_EVERY: Duration = Duration::from_millis(25);
/// An 8 x 8 PNG, base64.
const PNG: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEUlEQVR42mM4EaCBFTEMLQkAaplQAbIh774AAAAASUVORK5CYII=";

/// What the reference host offers besides its fixed tools.
#[derive(Debug, Default)]
pub struct Offer {
    /// Where each execution is recorded.
    pub execution_log: Option<ExecutionLog>,
    /// A JSON array of tool definitions, see [`super::canned`].
    pub tools_file: Option<PathBuf>,
    /// `needs_approval` waits until this file exists.
    pub approval_file: Option<PathBuf>,
    /// Whether `bridge/hostLlm` is answered (there is no model: it only keeps the switch).
    pub host_llm: bool,
}

/// See the module.
pub struct DemoTools {
    offer: Rc<Offer>,
    state: Rc<HostState>,
    canned: RefCell<Rc<Vec<CannedTool>>>,
}

const FIXED: &str = r#"[
{"name":"read","description":"Returns the text of a file. Relative paths are those of the host.","inputSchema":{"type":"object","properties":{"path":{"type":"string"}},"required":["path"],"additionalProperties":false},"annotations":{"readOnlyHint":true}},
{"name":"write","description":"Writes a file, replacing one of that name; makes missing directories.","inputSchema":{"type":"object","properties":{"path":{"type":"string"},"content":{"type":"string"}},"required":["path","content"],"additionalProperties":false}},
{"name":"list","description":"Names what is in a directory; directories end in a slash.","inputSchema":{"type":"object","properties":{"path":{"type":"string","default":"."}},"additionalProperties":false},"annotations":{"readOnlyHint":true}},
{"name":"bash","description":"Runs a command with bash and returns its output, stdout and stderr together.","inputSchema":{"type":"object","properties":{"command":{"type":"string"},"timeout":{"type":"number","description":"seconds"}},"required":["command"],"additionalProperties":false}},
{"name":"sleep","description":"Waits, then says so; reports progress in the given number of steps.","inputSchema":{"type":"object","properties":{"ms":{"type":"number"},"seconds":{"type":"number"},"steps":{"type":"integer","minimum":0,"maximum":1000}},"additionalProperties":false}},
{"name":"echo","description":"Returns its arguments as text, as they came.","inputSchema":{"type":"object"}},
{"name":"image","description":"Returns a small PNG.","inputSchema":{"type":"object","additionalProperties":false}},
{"name":"fail","description":"Fails with the given message.","inputSchema":{"type":"object","properties":{"message":{"type":"string"}},"additionalProperties":false}}
"#;
const NEEDS_APPROVAL: &str = r#",{"name":"needs_approval","description":"Waits until it is approved at the host.","inputSchema":{"type":"object"}}"#;

impl DemoTools {
    /// # Errors
    /// A tools file that cannot be read or is no list of definitions; the text names it.
    pub fn new(offer: Offer, state: Rc<HostState>) -> Result<Self, String> {
        let tools = Self { offer: Rc::new(offer), state, canned: RefCell::default() };
        tools.reload()?;
        Ok(tools)
    }

    /// Reads the tools file again.
    ///
    /// # Errors
    /// As [`DemoTools::new`]; the tools stay as they were.
    pub fn reload(&self) -> Result<(), String> {
        if let Some(path) = &self.offer.tools_file {
            *self.canned.borrow_mut() = Rc::new(canned::load(path)?);
        }
        Ok(())
    }

    fn has_fixed(&self, name: &str) -> bool {
        match name {
            "needs_approval" => self.offer.approval_file.is_some(),
            _ => ["read", "write", "list", "bash", "sleep", "echo", "image", "fail"].contains(&name),
        }
    }
}

impl Tools for DemoTools {
    fn list(&self) -> Pending<Result<Bytes, RpcError>> {
        let mut text = format!(r#"{{"tools":{FIXED}"#);
        if self.offer.approval_file.is_some() {
            text.push_str(NEEDS_APPROVAL);
        }
        for tool in self.canned.borrow().iter() {
            text.push(',');
            text.push_str(&tool.definition);
        }
        text.push_str("]}");
        Box::pin(std::future::ready(Ok(text.into())))
    }

    fn call(&self, call: Call) -> Pending<Outcome> {
        if !self.state.main() {
            return ready(NO_MAIN);
        }
        let canned = self.canned.borrow().clone();
        let position = canned.iter().position(|tool| tool.name == call.name);
        if position.is_none() && !self.has_fixed(&call.name) {
            return ready(NOT_EXPOSED);
        }
        let offer = self.offer.clone();
        if position.is_none() && offer.execution_log.is_none() && call.name == "echo" {
            return Box::pin(std::future::ready(echo(&call)));
        }
        Box::pin(async move {
            let log = offer.execution_log.as_ref();
            let execution = log.map(|log| log.begin(&call.call_id, &call.name, &call.arguments));
            let cancelled = call.cancelled.clone();
            let work = async {
                match position.and_then(|position| canned.get(position)) {
                    Some(tool) => tool.call(&call.cancelled).await,
                    None => run(&call, &offer).await,
                }
            };
            tokio::pin!(work);
            // The tool sees the cancel too: it is recorded before the tool can end by it.
            let outcome = tokio::select! {
                biased;
                () = cancelled.cancelled() => {
                    if let Some(execution) = &execution {
                        execution.cancelled();
                    }
                    work.await
                }
                outcome = &mut work => outcome,
            };
            if let Some(execution) = execution {
                execution.done();
            }
            outcome
        })
    }

    fn request(&self, request: Request) -> Pending<Outcome> {
        #[derive(Deserialize)]
        struct Switch {
            enabled: bool,
        }
        let method = &request.method;
        let answer = match serde_json::from_slice::<Switch>(&request.params) {
            _ if method != "bridge/hostLlm" || !self.offer.host_llm => {
                error_outcome(code::METHOD_NOT_FOUND, &format!("method not found: {method}"))
            }
            Err(error) => error_outcome(code::INVALID_PARAMS, &error.to_string()),
            Ok(Switch { enabled }) => {
                self.state.set_host_llm(if enabled { HostLlm::Allow } else { HostLlm::Armed });
                Outcome::Result(format!(r#"{{"enabled":{enabled},"denied":0,"degraded":false}}"#).into())
            }
        };
        Box::pin(std::future::ready(answer))
    }
}

fn ready(error: &str) -> Pending<Outcome> {
    Box::pin(std::future::ready(text_result(error, true)))
}

fn echo(call: &Call) -> Outcome {
    text_result(&String::from_utf8_lossy(&call.arguments), false)
}

async fn run(call: &Call, offer: &Offer) -> Outcome {
    let result = match call.name.as_str() {
        "read" => read(call).await,
        "write" => write(call).await,
        "list" => list(call).await,
        "sleep" => sleep(call).await,
        "fail" => fail(call),
        "needs_approval" => approve(call, offer).await,
        "bash" => match arguments(call) {
            // Boxed: it holds a buffer, which every other tool's call would have the room for.
            Ok(arguments) => return Box::pin(bash::run(arguments, &call.cancelled)).await,
            Err(error) => Err(error),
        },
        "image" => {
            let image = format!(
                r#"{{"content":[{{"type":"image","data":"{PNG}","mimeType":"image/png"}}],"isError":false}}"#
            );
            return Outcome::Result(image.into());
        }
        _ => return echo(call),
    };
    match result {
        Ok(text) => text_result(&text, false),
        Err(text) => text_result(&text, true),
    }
}

/// The arguments as a tool wants them.
fn arguments<T: DeserializeOwned>(call: &Call) -> Result<T, String> {
    serde_json::from_slice(&call.arguments).map_err(|error| format!("{}: bad arguments: {error}", call.name))
}

#[derive(Deserialize)]
struct ReadArguments {
    path: String,
}

async fn read(call: &Call) -> Result<String, String> {
    let ReadArguments { path } = arguments(call)?;
    blocking(move || {
        // Opening a named pipe would wait for its other end, and nothing could cancel that.
        let metadata = std::fs::metadata(&path).map_err(|error| about(&path, &error))?;
        if !metadata.is_file() {
            return Err(format!("{path}: not a regular file"));
        }
        let file = std::fs::File::open(&path).map_err(|error| about(&path, &error))?;
        let len = metadata.len();
        if len > MAX_READ {
            return Err(format!("{path}: {len} bytes, more than the {MAX_READ} this tool returns"));
        }
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut std::io::Read::take(file, MAX_READ), &mut bytes)
            .map_err(|error| about(&path, &error))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    })
    .await
}

#[derive(Deserialize)]
struct WriteArguments {
    path: String,
    content: String,
}

async fn write(call: &Call) -> Result<String, String> {
    let WriteArguments { path, content } = arguments(call)?;
    blocking(move || {
        if let Some(parent) = Path::new(&path).parent().filter(|parent| !parent.as_os_str().is_empty()) {
            std::fs::create_dir_all(parent).map_err(|error| about(&path, &error))?;
        }
        if std::fs::metadata(&path).is_ok_and(|metadata| !metadata.is_file()) {
            return Err(format!("{path}: not a regular file"));
        }
        std::fs::write(&path, &content).map_err(|error| about(&path, &error))?;
        Ok(format!("wrote {} bytes to {path}", content.len()))
    })
    .await
}

#[derive(Deserialize)]
struct ListArguments {
    #[serde(default = "here")]
    path: String,
}

fn here() -> String {
    ".".to_owned()
}

async fn list(call: &Call) -> Result<String, String> {
    let ListArguments { path } = arguments(call)?;
    blocking(move || {
        let entries = std::fs::read_dir(&path).map_err(|error| about(&path, &error))?;
        let mut names: Vec<String> = entries
            .flatten()
            .take(MAX_NAMES)
            .map(|entry| {
                let slash = if entry.file_type().is_ok_and(|kind| kind.is_dir()) { "/" } else { "" };
                format!("{}{slash}", entry.file_name().to_string_lossy())
            })
            .collect();
        names.sort_unstable();
        Ok(names.join("\n"))
    })
    .await
}

#[derive(Deserialize)]
struct SleepArguments {
    #[serde(default)]
    ms: f64,
    #[serde(default)]
    seconds: f64,
    #[serde(default)]
    steps: u32,
}

async fn sleep(call: &Call) -> Result<String, String> {
    let SleepArguments { ms, seconds, steps } = arguments(call)?;
    let total = Duration::try_from_secs_f64(ms / 1000.0 + seconds)
        .ok()
        .filter(|total| *total <= MAX_SLEEP && steps <= 1000)
        .ok_or("sleep: at most a day and 1000 steps")?;
    let parts = steps.max(1);
    for part in 1..=parts {
        sleep_or_cancelled(total / parts, &call.cancelled).await?;
        if steps > 0 {
            call.reporter.progress(part.into(), Some(parts.into()), Some("sleeping"));
        }
    }
    Ok(format!("slept {} ms", total.as_millis()))
}

async fn sleep_or_cancelled(pause: Duration, cancelled: &CancellationToken) -> Result<(), String> {
    tokio::select! {
        () = tokio::time::sleep(pause) => Ok(()),
        () = cancelled.cancelled() => Err("sleep cancelled".to_owned()),
    }
}

#[derive(Deserialize)]
struct FailArguments {
    #[serde(default)]
    message: Option<String>,
}

fn fail(call: &Call) -> Result<String, String> {
    let FailArguments { message } = arguments(call)?;
    Err(message.unwrap_or_else(|| "failed as asked".to_owned()))
}

async fn approve(call: &Call, offer: &Offer) -> Result<String, String> {
    let file = offer.approval_file.as_deref().ok_or("nobody can approve")?;
    let _awaiting = call.reporter.await_approval();
    while !file.exists() {
        tokio::select! {
            () = tokio::time::sleep(APPROVAL_EVERY) => {}
            () = call.cancelled.cancelled() => return Err("cancelled while awaiting approval".to_owned()),
        }
    }
    Ok("approved".to_owned())
}

/// File work off the thread that answers the sidecar.
async fn blocking(work: impl FnOnce() -> Result<String, String> + Send + 'static) -> Result<String, String> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| Err("internal error".to_owned()))
}

fn about(path: &str, error: &std::io::Error) -> String {
    format!("{path}: {error}")
}
