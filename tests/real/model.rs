//! A model on loopback, for what omp does only when a model answers. It speaks as much of Anthropic's
//! Messages API as one turn needs, and gives the same answer to everything: the sub-agent's result.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

/// What a sub-agent of this model reports.
pub(crate) const ANSWER: &str = "reported by the sub-agent";

pub(crate) struct Model {
    port: u16,
    asked: Arc<AtomicUsize>,
}

impl Model {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = asked.clone();
        // Ends with the test binary; it holds nothing but its socket.
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let counter = counter.clone();
                std::thread::spawn(move || answer(connection, &counter));
            }
        });
        Self { port, asked }
    }

    /// How often it was asked.
    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    /// omp's `models.yml` with this model and no other.
    pub(crate) fn yaml(&self) -> String {
        format!(
            "providers:\n  a2mcp:\n    baseUrl: http://127.0.0.1:{}\n    api: anthropic-messages\n    \
             apiKey: not-a-real-key\n    models:\n      - id: loopback\n        name: on loopback\n        \
             contextWindow: 100000\n",
            self.port
        )
    }
}

/// One request, one answer; the peer ends or is ended with the test.
fn answer(connection: TcpStream, counter: &AtomicUsize) -> Option<()> {
    let mut reader = BufReader::new(connection);
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|&read| read > 0)?;
        let line = line.trim().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let request: Value = serde_json::from_slice(&body).ok()?;
    counter.fetch_add(1, Ordering::Relaxed);
    let text: String = turn(&request)
        .iter()
        .map(|event| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap_or_default()))
        .collect();
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";
    reader.get_mut().write_all(format!("{head}{text}").as_bytes()).ok()
}

/// The events of one turn: the result tool when there is one, words otherwise.
fn turn(request: &Value) -> Vec<Value> {
    let usage = json!({"input_tokens": 1, "output_tokens": 1});
    let tools = request["tools"].as_array();
    let result_tool = tools.and_then(|tools| tools.iter().find(|tool| tool["name"] == "yield"));
    let (block, delta, reason) = if result_tool.is_some() {
        let input = json!({"result": {"data": ANSWER}}).to_string();
        (
            json!({"type": "tool_use", "id": "toolu_1", "name": "yield", "input": {}}),
            json!({"type": "input_json_delta", "partial_json": input}),
            "tool_use",
        )
    } else {
        (json!({"type": "text", "text": ""}), json!({"type": "text_delta", "text": ANSWER}), "end_turn")
    };
    vec![
        json!({"type": "message_start", "message": {
            "id": "msg_1", "type": "message", "role": "assistant", "model": request["model"], "content": [],
            "stop_reason": null, "stop_sequence": null, "usage": usage,
        }}),
        json!({"type": "content_block_start", "index": 0, "content_block": block}),
        json!({"type": "content_block_delta", "index": 0, "delta": delta}),
        json!({"type": "content_block_stop", "index": 0}),
        json!({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": null}, "usage": usage}),
        json!({"type": "message_stop"}),
    ]
}
