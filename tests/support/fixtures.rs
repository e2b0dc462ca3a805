//! A host with the fixtures that the official conformance suite looks for (tools, resources,
//! prompts, questions to the caller), and a few tools of our own for the real clients.
//!
//! It plays the shim: what a tool does before its result (progress, log messages, questions, closing
//! its stream) are frames.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Peer, Setup};

const PNG: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg==";
const WAV: &str = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAA=";
/// Between two steps of a tool that takes its time.
const STEP: Duration = Duration::from_millis(50);

/// A host that has them all.
pub fn setup() -> Setup {
    Setup::default().tools(&tools().to_string()).hello(hello()).hook(serve)
}

/// What it declares at the start.
pub fn hello() -> Value {
    json!({
        "capabilities": {
            "tools": {"listChanged": true},
            "resources": {"subscribe": true, "listChanged": true},
            "prompts": {"listChanged": true},
            "completions": {},
            "logging": {},
        },
        "title": "Fixture host",
    })
}

fn tools() -> Value {
    let none = || json!({"type": "object"});
    let string =
        |name: &str| json!({"type": "object", "properties": {name: {"type": "string"}}, "required": [name]});
    let number =
        |name: &str| json!({"type": "object", "properties": {name: {"type": "number"}}, "required": [name]});
    let tool = |name: &str, schema: Value| json!({"name": name, "description": format!("fixture {name}"), "inputSchema": schema});
    json!([
        tool("test_simple_text", none()),
        tool("test_image_content", none()),
        tool("test_audio_content", none()),
        tool("test_embedded_resource", none()),
        tool("test_multiple_content_types", none()),
        tool("test_error_handling", none()),
        tool("test_tool_with_progress", none()),
        tool("test_tool_with_logging", none()),
        tool("test_sampling", string("prompt")),
        tool("test_elicitation", string("message")),
        tool("test_elicitation_sep1034_defaults", none()),
        tool("test_elicitation_sep1330_enums", none()),
        tool("test_reconnection", none()),
        tool("json_schema_2020_12_tool", json_schema_2020_12()),
        tool("hang", none()),
        tool("silent", number("seconds")),
        tool("large", number("bytes")),
    ])
}

/// Every keyword that a careless relay would lose.
fn json_schema_2020_12() -> Value {
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {"address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }},
        "properties": {
            "name": {"type": "string"},
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": {"type": "string"},
            "email": {"type": "string"},
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "anyOf": [{"required": ["phone"]}, {"required": ["email"]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": false,
    })
}

fn text(text: impl Into<String>) -> Value {
    json!({"type": "text", "text": text.into()})
}

fn content(blocks: Value) -> Value {
    json!({"content": blocks, "isError": false})
}

/// Takes every frame that it understands.
fn serve(peer: &Peer, frame: &Value) -> bool {
    let Some(method) = frame["method"].as_str() else { return false };
    let (id, params) = (frame["id"].clone(), &frame["params"]);
    if method == "tools/call" {
        let (peer, params) = (peer.clone(), params.clone());
        // A tool that takes its time must not stop the host from hearing.
        std::thread::spawn(move || {
            let call = Call { peer: &peer, id: params["_meta"]["progressToken"].clone(), params: &params };
            if let Some(result) = call.run() {
                peer.answer(&id, &result.to_string());
            }
        });
        return true;
    }
    let result = match method {
        "resources/list" => Ok(resources()),
        "resources/templates/list" => Ok(json!({"resourceTemplates": [{
            "uriTemplate": "test://template/{id}/data", "name": "template", "description": "by id", "mimeType": "application/json",
        }]})),
        "resources/read" => read_resource(params["uri"].as_str().unwrap_or_default()),
        "resources/subscribe" | "resources/unsubscribe" | "logging/setLevel" => Ok(json!({})),
        "prompts/list" => Ok(prompts()),
        "prompts/get" => prompt(params),
        "completion/complete" => {
            Ok(json!({"completion": {"values": ["alpha", "beta"], "total": 2, "hasMore": false}}))
        }
        _ => return false,
    };
    match result {
        Ok(result) => peer.answer(&id, &result.to_string()),
        Err(error) => peer.fail(&id, &error),
    }
    true
}

struct Call<'a> {
    peer: &'a Peer,
    /// The call id, which is also its progress token.
    id: Value,
    params: &'a Value,
}

impl Call<'_> {
    /// The tool's result; `None` when it never gives one.
    fn run(&self) -> Option<Value> {
        let arguments = &self.params["arguments"];
        let image = json!({"type": "image", "data": PNG, "mimeType": "image/png"});
        Some(match self.params["name"].as_str().unwrap_or_default() {
            "test_simple_text" => content(json!([text("This is a simple text response for testing.")])),
            "test_image_content" => content(json!([image])),
            "test_audio_content" => {
                content(json!([{"type": "audio", "data": WAV, "mimeType": "audio/wav"}]))
            }
            "test_embedded_resource" => content(json!([{"type": "resource", "resource": {
                "uri": "test://embedded-resource", "mimeType": "text/plain", "text": "This is an embedded resource content.",
            }}])),
            "test_multiple_content_types" => content(json!([text("Multiple content types test:"), image, {
                "type": "resource",
                "resource": {"uri": "test://mixed-content-resource", "mimeType": "application/json", "text": "{\"test\":\"data\",\"value\":123}"},
            }])),
            "test_error_handling" => json!({
                "content": [text("This tool intentionally returns an error for testing")], "isError": true,
            }),
            "test_tool_with_progress" => {
                for done in [0, 50, 100] {
                    self.progress(json!({"progress": done, "total": 100, "message": format!("step {done} of 100")}));
                    std::thread::sleep(STEP);
                }
                content(json!([text("progress reported")]))
            }
            "test_tool_with_logging" => {
                for step in ["started", "processing data", "completed"] {
                    self.log("info", &format!("Tool execution {step}"));
                    std::thread::sleep(STEP);
                }
                content(json!([text("logs written")]))
            }
            "test_sampling" => {
                let prompt = json!({"role": "user", "content": text(arguments["prompt"].as_str().unwrap_or_default())});
                match self.ask("sampling/createMessage", json!({"messages": [prompt], "maxTokens": 100})) {
                    Ok(answer) => content(json!([text(format!("LLM response: {}", answer["content"]["text"].as_str().unwrap_or_default()))])),
                    Err(error) => failed(&error),
                }
            }
            "test_elicitation" => self.elicit(
                arguments["message"].as_str().unwrap_or_default(),
                json!({"type": "object", "properties": {"response": {"type": "string", "description": "User's response"}}, "required": ["response"]}),
                "User response",
            ),
            "test_elicitation_sep1034_defaults" => self.elicit("Check the defaults", defaults(), "Elicitation completed"),
            "test_elicitation_sep1330_enums" => self.elicit("Choose", enums(), "Elicitation completed"),
            "test_reconnection" => {
                self.peer.send(&json!({"jsonrpc": "2.0", "method": "bridge/closeStream", "params": {"callId": self.id}}).to_string());
                std::thread::sleep(2 * STEP);
                content(json!([text("Reconnection test completed successfully.")]))
            }
            "json_schema_2020_12_tool" => content(json!([text(arguments.to_string())])),
            "hang" => {
                self.progress(json!({"progress": 1}));
                return None;
            }
            "silent" => {
                std::thread::sleep(Duration::from_secs_f64(arguments["seconds"].as_f64().unwrap_or_default()));
                content(json!([text("done")]))
            }
            "large" => {
                let bytes = arguments["bytes"].as_u64().unwrap_or_default() as usize;
                content(json!([text("x".repeat(bytes))]))
            }
            unknown => json!({"content": [text(format!("{unknown}: not exposed"))], "isError": true}),
        })
    }

    fn progress(&self, mut params: Value) {
        params["progressToken"] = self.id.clone();
        self.peer.notify("notifications/progress", &params);
    }

    fn log(&self, level: &str, data: &str) {
        let params = json!({"level": level, "logger": "fixture", "data": data, "_meta": self.meta()});
        self.peer.notify("notifications/message", &params);
    }

    fn meta(&self) -> Value {
        json!({"a2mcp/call": {"callId": self.id}})
    }

    /// Asks the caller; its answer, or the error's message.
    fn ask(&self, method: &str, mut params: Value) -> Result<Value, String> {
        params["_meta"] = self.meta();
        let answer = self.peer.ask(method, &params);
        match answer.get("result") {
            Some(result) => Ok(result.clone()),
            None => Err(answer["error"]["message"].as_str().unwrap_or_default().to_owned()),
        }
    }

    fn elicit(&self, message: &str, schema: Value, words: &str) -> Value {
        match self
            .ask("elicitation/create", json!({"mode": "form", "message": message, "requestedSchema": schema}))
        {
            Ok(answer) => {
                let given = answer.get("content").cloned().unwrap_or_else(|| json!({}));
                content(json!([text(format!(
                    "{words}: action={}, content={given}",
                    answer["action"].as_str().unwrap_or_default()
                ))]))
            }
            Err(error) => failed(&error),
        }
    }
}

fn failed(error: &str) -> Value {
    json!({"content": [text(error)], "isError": true})
}

/// SEP-1034: a default for every primitive type.
fn defaults() -> Value {
    json!({"type": "object", "required": [], "properties": {
        "name": {"type": "string", "description": "User name", "default": "John Doe"},
        "age": {"type": "integer", "description": "User age", "default": 30},
        "score": {"type": "number", "description": "User score", "default": 95.5},
        "status": {"type": "string", "description": "User status", "enum": ["active", "inactive", "pending"], "default": "active"},
        "verified": {"type": "boolean", "description": "Verification status", "default": true},
    }})
}

/// SEP-1330: every kind of choice.
fn enums() -> Value {
    let titled = json!([
        {"const": "value1", "title": "First Option"},
        {"const": "value2", "title": "Second Option"},
        {"const": "value3", "title": "Third Option"},
    ]);
    json!({"type": "object", "required": [], "properties": {
        "untitledSingle": {"type": "string", "enum": ["option1", "option2", "option3"]},
        "titledSingle": {"type": "string", "oneOf": titled},
        "legacyEnum": {"type": "string", "enum": ["opt1", "opt2", "opt3"], "enumNames": ["Option One", "Option Two", "Option Three"]},
        "untitledMulti": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "string", "enum": ["option1", "option2", "option3"]}},
        "titledMulti": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"anyOf": titled}},
    }})
}

fn resources() -> Value {
    let resource = |name: &str, mime: &str| json!({"uri": format!("test://{name}"), "name": name, "description": format!("fixture {name}"), "mimeType": mime});
    json!({"resources": [
        resource("static-text", "text/plain"),
        resource("static-binary", "image/png"),
        resource("watched-resource", "text/plain"),
    ]})
}

fn read_resource(uri: &str) -> Result<Value, Value> {
    let contents = |member: Value| {
        let mut contents = json!({"uri": uri});
        contents.as_object_mut().unwrap().extend(member.as_object().unwrap().clone());
        Ok(json!({"contents": [contents]}))
    };
    match uri {
        "test://static-text" => contents(
            json!({"mimeType": "text/plain", "text": "This is the content of the static text resource."}),
        ),
        "test://static-binary" => contents(json!({"mimeType": "image/png", "blob": PNG})),
        "test://watched-resource" => {
            contents(json!({"mimeType": "text/plain", "text": "Watched resource content"}))
        }
        _ => match uri.strip_prefix("test://template/").and_then(|rest| rest.strip_suffix("/data")) {
            Some(id) => contents(json!({
                "mimeType": "application/json",
                "text": json!({"id": id, "templateTest": true, "data": format!("Data for ID: {id}")}).to_string(),
            })),
            None => Err(json!({"code": -32002, "message": "Resource not found", "data": {"uri": uri}})),
        },
    }
}

fn prompts() -> Value {
    let argument =
        |name: &str| json!({"name": name, "description": format!("argument {name}"), "required": true});
    let prompt = |name: &str, arguments: Value| json!({"name": name, "description": format!("fixture {name}"), "arguments": arguments});
    json!({"prompts": [
        prompt("test_simple_prompt", json!([])),
        prompt("test_prompt_with_arguments", json!([argument("arg1"), argument("arg2")])),
        prompt("test_prompt_with_embedded_resource", json!([argument("resourceUri")])),
        prompt("test_prompt_with_image", json!([])),
    ]})
}

fn prompt(params: &Value) -> Result<Value, Value> {
    let argument = |name: &str| params["arguments"][name].as_str().unwrap_or_default().to_owned();
    let user = |content: Value| json!({"role": "user", "content": content});
    let messages = match params["name"].as_str().unwrap_or_default() {
        "test_simple_prompt" => json!([user(text("This is a simple prompt for testing."))]),
        "test_prompt_with_arguments" => json!([user(text(format!(
            "Prompt with arguments: arg1='{}', arg2='{}'",
            argument("arg1"),
            argument("arg2")
        )))]),
        "test_prompt_with_embedded_resource" => json!([
            user(
                json!({"type": "resource", "resource": {"uri": argument("resourceUri"), "mimeType": "text/plain", "text": "Embedded resource content for testing."}})
            ),
            user(text("Please process the embedded resource above.")),
        ]),
        "test_prompt_with_image" => json!([
            user(json!({"type": "image", "data": PNG, "mimeType": "image/png"})),
            user(text("Please analyze the image above.")),
        ]),
        unknown => return Err(json!({"code": -32602, "message": format!("unknown prompt {unknown}")})),
    };
    Ok(json!({"messages": messages}))
}
