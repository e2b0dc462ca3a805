//! The frames between a [`super::Host`] and its sidecar: what came is kept in order and answered, what goes
//! is framed.

use std::io::{Read, Write};
use std::process::ChildStdin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Answer, Handler, Hook, Peer};

/// The frames a sidecar has sent, in order.
#[derive(Default)]
pub(super) struct Frames {
    pub(super) seen: Mutex<Vec<Arc<(String, Value)>>>,
    pub(super) ended: Mutex<bool>,
    /// What was wrong with the sidecar's output, if anything ever was.
    pub(super) broken: Mutex<Option<String>>,
    pub(super) changed: Condvar,
}

impl Frames {
    /// The first frame, of all that came or will come within `limit`, for which `wanted` holds.
    pub(super) fn find(&self, limit: Duration, wanted: impl Fn(&Value) -> bool) -> Option<(String, Value)> {
        let end = Instant::now() + limit;
        let mut seen = self.seen.lock().unwrap();
        let mut next = 0;
        loop {
            if let Some(found) = seen[next..].iter().find(|frame| wanted(&frame.1)) {
                return Some((**found).clone());
            }
            next = seen.len();
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            seen = self.changed.wait_timeout(seen, left).unwrap().0;
        }
    }
}

/// Lets a test stop reading the sidecar's stdout.
#[derive(Default)]
pub(super) struct Gate {
    pub(super) closed: Mutex<bool>,
    pub(super) opened: Condvar,
}

pub(super) struct Gated<R> {
    pub(super) inner: R,
    pub(super) gate: Arc<Gate>,
}

impl<R: Read> Read for Gated<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let step = buffer.len().min(64 << 10);
        drop(self.gate.opened.wait_while(self.gate.closed.lock().unwrap(), |closed| *closed).unwrap());
        self.inner.read(&mut buffer[..step])
    }
}

pub(super) struct Reactor {
    pub(super) frames: Arc<Frames>,
    pub(super) stdin: Arc<Mutex<Option<ChildStdin>>>,
    pub(super) tools: Arc<Mutex<String>>,
    pub(super) silent: Arc<AtomicBool>,
    pub(super) handler: Handler,
    pub(super) hook: Option<Hook>,
    pub(super) lists: bool,
}

impl Reactor {
    pub(super) fn run(self, stdout: &mut impl Read) {
        if let Err(broken) = self.read(stdout) {
            *self.frames.broken.lock().unwrap() = Some(broken);
        }
        *self.frames.ended.lock().unwrap() = true;
        self.frames.changed.notify_all();
    }

    /// Reads to the end; an error is a fault of the sidecar. A frame cut by the end is none: the
    /// sidecar may have been killed.
    fn read(&self, stdout: &mut impl Read) -> Result<(), String> {
        loop {
            let mut header = [0; 4];
            if stdout.read_exact(&mut header).is_err() {
                return Ok(());
            }
            let length = u32::from_be_bytes(header) as usize;
            if length == 0 || length > a2mcp::frame::codec::MAX_FRAME {
                return Err(format!("no frame begins with {header:?}"));
            }
            let mut payload = vec![0; length];
            if stdout.read_exact(&mut payload).is_err() {
                return Ok(());
            }
            let text = String::from_utf8(payload).map_err(|error| error.to_string())?;
            let message = parse(&text).map_err(|error| format!("{error}: {:.200}", text))?;
            // Seen before it is answered: what follows from the answer finds its cause.
            let frame = Arc::new((text, message));
            self.frames.seen.lock().unwrap().push(frame.clone());
            if !self.silent.load(Ordering::SeqCst) {
                self.react(&frame.0, &frame.1);
            }
            self.frames.changed.notify_all();
        }
    }

    fn react(&self, text: &str, message: &Value) {
        if let Some(hook) = &self.hook {
            let peer = Peer { stdin: self.stdin.clone(), frames: self.frames.clone() };
            if hook(&peer, message) {
                return;
            }
        }
        let id = &message["id"];
        let answer = match message["method"].as_str() {
            Some("tools/list") if self.lists => format!(r#"{{"tools":{}}}"#, self.tools.lock().unwrap()),
            Some("bridge/ping") => "{}".to_owned(),
            Some("tools/call") => {
                let name = message["params"]["name"].as_str().unwrap_or_default();
                let raw = raw_arguments(text);
                match (self.handler)(name, message, raw) {
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

/// A frame: the payload behind its header.
pub fn framed(payload: impl AsRef<[u8]>) -> Vec<u8> {
    let payload = payload.as_ref();
    let mut frame = (payload.len() as u32).to_be_bytes().to_vec();
    frame.extend_from_slice(payload);
    frame
}

pub(super) fn send(stdin: &Mutex<Option<ChildStdin>>, payload: &[u8]) {
    let frame = framed(payload);
    if let Some(stdin) = stdin.lock().unwrap().as_mut() {
        let _ = stdin.write_all(&frame);
    }
}
