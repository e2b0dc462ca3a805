//! What a caller that accepts event streams sees of a live omp: progress, cancelling, an approval that
//! is awaited, a list that changed.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::omp::{SOON, shared};
use crate::support::eventually;
use crate::support::http::{Client, Connection};

const STREAM: (&str, &str) = ("Accept", "application/json, text/event-stream");

/// The messages of one event stream.
pub(crate) struct Events {
    connection: Connection,
    unread: String,
}

impl Events {
    /// Sends a call and reads the head of its answer, which must be a stream.
    pub(crate) fn call(client: Client, params: &Value) -> Self {
        let body = json!({"jsonrpc": "2.0", "id": "streamed", "method": "tools/call", "params": params});
        Self::open(client, "POST", body.to_string().as_bytes())
    }

    /// The session's own stream.
    pub(crate) fn of_session(client: Client) -> Self {
        Self::open(client, "GET", b"")
    }

    fn open(mut client: Client, method: &str, body: &[u8]) -> Self {
        client.send(method, &[STREAM], body);
        let mut connection = client.connection;
        let head = connection.read_head().unwrap();
        assert_eq!(head.header("content-type"), Some("text/event-stream"), "{head:?}");
        Self { connection, unread: String::new() }
    }

    /// The next message; `None` at the stream's end. Comments and empty events are none.
    pub(crate) fn next(&mut self) -> Option<Value> {
        loop {
            while let Some((event, rest)) = self.unread.split_once("\n\n") {
                let data: String =
                    event.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim).collect();
                self.unread = rest.to_owned();
                if !data.is_empty() {
                    return Some(serde_json::from_str(&data).unwrap_or_else(|_| panic!("no JSON: {data}")));
                }
            }
            let chunk = self.connection.read_chunk().expect("the stream goes on or ends in order")?;
            self.unread += std::str::from_utf8(&chunk).unwrap();
        }
    }

    /// The first message that `wanted` asks for.
    pub(crate) fn until(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + SOON;
        let mut seen = Vec::new();
        while Instant::now() < end {
            let Some(message) = self.next() else { break };
            if wanted(&message) {
                return message;
            }
            seen.push(message);
        }
        panic!("{what} did not come; seen: {seen:#?}")
    }
}

#[test]
fn progress_of_a_command_arrives_while_it_runs() {
    let client = shared().client();
    let command = "echo step-one; while [ ! -e go-on ]; do sleep 0.1; done; echo step-two";
    let params = json!({
        "name": "bash", "arguments": {"command": command}, "_meta": {"progressToken": 7},
    });
    let mut events = Events::call(client, &params);
    let progress = events.until("progress", |message| message["method"] == "notifications/progress");
    assert_eq!(progress["params"]["progressToken"], 7, "{progress}");
    assert!(progress.to_string().contains("step-one"), "{progress}");
    assert!(
        !progress.to_string().contains("a2mcp/"),
        "what is between shim and sidecar stays there: {progress}"
    );

    std::fs::write(shared().home.work().join("go-on"), "").unwrap();
    let answer = events.until("the result", |message| message["id"] == "streamed");
    assert!(answer["result"].to_string().contains("step-two"), "{answer}");
    assert_eq!(events.next(), None, "the stream ends with the result");
}

/// A cancel reaches the tool itself: an extension's by its signal, a command by the end of its process.
#[test]
fn a_cancel_reaches_the_tool() {
    let omp = shared();
    let mut client = omp.client();
    let file = omp.home.work().join("cancelled");
    let aborted = omp.home.work().join("cancelled.aborted");
    // omp's own loop stands still for a second when it has just started: it answers once that is over.
    omp.probe(&json!({"op": "names"}));
    let mut caller = client.again();
    caller.start_call("\"to cancel\"", "probe_wait", &json!({ "file": file }).to_string());
    let is_running = |tool: &str, part: &str| {
        let calls = omp.home.audit();
        let args = |record: &Value| record["args"].as_str().unwrap_or_default().contains(part);
        calls
            .iter()
            .any(|record| record["phase"] == "start" && record["tool"] == tool && args(record))
            .then_some(())
    };
    eventually("the call", || is_running("probe_wait", "/cancelled"));
    let cancelled = |client: &mut Client, id: &str| {
        let body =
            json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}});
        assert_eq!(client.post(&body.to_string()).status, 202);
        Instant::now()
    };
    let at = cancelled(&mut client, "to cancel");
    eventually("the tool's own end", || aborted.exists().then_some(()));
    eprintln!("the tool saw the cancel after {:?}", at.elapsed());
    assert!(at.elapsed() < Duration::from_secs(2), "{:?}", at.elapsed());
    let reply = caller.read().json();
    assert_eq!(reply["error"]["code"], -32800, "{reply}");

    let mut caller = client.again();
    caller.start_call("\"to cancel too\"", "bash", r#"{"command":"/bin/sleep 3601; echo over"}"#);
    let sleeps = || {
        let seen = crate::processes::of(omp.home.path());
        seen.iter().any(|seen| seen.arguments.iter().any(|argument| argument == "3601"))
    };
    eventually("the command", || sleeps().then_some(()));
    cancelled(&mut client, "to cancel too");
    eventually("the command's end", || (!sleeps()).then_some(()));
    assert_eq!(caller.read().json()["error"]["code"], -32800);
}
