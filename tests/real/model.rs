//! A model on loopback, for what omp does only when a model answers, and to see that nothing is asked.
//! It speaks as much of Anthropic's Messages API and of OpenAI's chat completions as one turn needs, and
//! gives the same answer to everything, the sub-agent's result; it also lists its one model. What reaches it is kept: turns apart
//! from anything else, connections apart from requests.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

/// What a sub-agent of this model reports.
pub(crate) const ANSWER: &str = "reported by the sub-agent";

pub(crate) struct Model {
    port: u16,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    connections: AtomicUsize,
    turns: AtomicUsize,
    /// `METHOD path` of everything.
    requests: Mutex<Vec<String>>,
}

impl Model {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Seen::default());
        let counted = seen.clone();
        // Ends with the test binary; it holds nothing but its socket.
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let seen = counted.clone();
                seen.connections.fetch_add(1, Ordering::SeqCst);
                std::thread::spawn(move || answer(connection, &seen));
            }
        });
        Self { port, seen }
    }

    /// How many turns it was asked for.
    pub(crate) fn asked(&self) -> usize {
        self.seen.turns.load(Ordering::SeqCst)
    }

    /// How many connections it got, also of those that speak no HTTP.
    pub(crate) fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::SeqCst)
    }

    /// All that was requested.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.seen.requests.lock().unwrap().clone()
    }

    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// One provider of omp's `models.yml`, named `provider`, whose one model is `loopback`.
    pub(crate) fn provider(&self, provider: &str, api: &str) -> String {
        self.provider_at(provider, api, &format!("http://{}/v1", self.address()))
    }

    pub(crate) fn provider_at(&self, provider: &str, api: &str, url: &str) -> String {
        format!(
            "  {provider}:\n    baseUrl: {url}\n    api: {api}\n    apiKey: not-a-real-key\n    models:\n      \
             - id: loopback\n        name: on loopback\n        contextWindow: 100000\n"
        )
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
fn answer(connection: TcpStream, seen: &Seen) -> Option<()> {
    let mut reader = BufReader::new(connection);
    let mut length = 0;
    // Whoever speaks TLS is only counted.
    reader.fill_buf().ok()?.first().filter(|byte| byte.is_ascii_uppercase())?;
    let mut first = String::new();
    reader.read_line(&mut first).ok().filter(|&read| read > 0)?;
    let request: Vec<&str> = first.split_whitespace().take(2).collect();
    seen.requests.lock().unwrap().push(request.join(" "));
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
    if first.starts_with("GET") && first.contains("/models ") {
        let list = json!({"object": "list", "data": [{"id": "listed", "object": "model"}]}).to_string();
        let head =
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length:";
        return reader.get_mut().write_all(format!("{head} {}\r\n\r\n{list}", list.len()).as_bytes()).ok();
    }
    if !first.starts_with("POST") {
        let empty = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        return reader.get_mut().write_all(empty.as_bytes()).ok();
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let request: Value = serde_json::from_slice(&body).ok()?;
    seen.turns.fetch_add(1, Ordering::SeqCst);
    let text: String = if first.contains("/chat/completions") {
        let events = completion(&request).into_iter().map(|event| format!("data: {event}\n\n"));
        events.chain(["data: [DONE]\n\n".to_owned()]).collect()
    } else {
        let named = |event: &Value| {
            format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap_or_default())
        };
        turn(&request).iter().map(named).collect()
    };
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";
    reader.get_mut().write_all(format!("{head}{text}").as_bytes()).ok()
}

/// The chunks of one chat completion, in words only.
fn completion(request: &Value) -> Vec<Value> {
    let chunk = |delta: Value, reason: Value| {
        json!({"id": "c_1", "object": "chat.completion.chunk", "created": 1, "model": request["model"],
               "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
    };
    vec![
        chunk(json!({"role": "assistant", "content": ANSWER}), Value::Null),
        chunk(json!({}), json!("stop")),
        json!({"id": "c_1", "object": "chat.completion.chunk", "created": 1, "model": request["model"], "choices": [],
               "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}),
    ]
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
