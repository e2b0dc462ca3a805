//! One `tools/call`: the caller's parameters rewritten for the host, and the host's result made safe
//! for the caller (contract 4). Arguments and results pass as the sender's own text.

use std::fmt::Write as _;

use bytes::Bytes;
use serde_json::value::RawValue;

use crate::frame::raw::{RawObject, key_is, quote, string};

/// What every name that is not offered gets, whatever the reason (contract 4, outcome 2).
pub const NOT_EXPOSED: &str = "not exposed: no tool of that name is offered here (see tools/list)";
/// Without a live Main session (contract 4, outcome 3).
pub const NO_MAIN: &str = "main session not available";
/// In place of what no client could read.
const NO_RESULT: &str = "the tool's answer is no MCP tool result (an object with a list `content`, or with an object `structuredContent`); it may have run";

/// The parameters of a `tools/call`.
#[derive(Debug, Clone)]
pub struct ToolCall {
    /// The tool's name.
    pub name: String,
    /// The caller's progress token, its own text.
    pub progress_token: Option<Bytes>,
    name_text: Bytes,
    arguments: Bytes,
    /// Further members of `params`, each `,"key":value`.
    rest: String,
    /// Further members of `_meta`, each `,"key":value`.
    meta: String,
}

impl ToolCall {
    /// Reads `params`; `None` when there is no name or it is no string.
    pub fn parse(params: Option<&Bytes>) -> Option<Self> {
        let body = params?;
        let params = RawObject::parse(std::str::from_utf8(body).ok()?)?;
        let name_text = params.get("name")?;
        let mut call = Self {
            name: string(name_text)?.into_owned(),
            progress_token: None,
            name_text: body.slice_ref(name_text.get().as_bytes()),
            arguments: Bytes::from_static(b"{}"),
            rest: String::new(),
            meta: String::new(),
        };
        if let Some(arguments) = params.get("arguments") {
            call.arguments = body.slice_ref(arguments.get().as_bytes());
        }
        for (key, value) in &params.members {
            if !["name", "arguments", "_meta"].iter().any(|own| key_is(key, own)) {
                let _ = write!(call.rest, ",{}:{}", key.get(), value.get());
            }
        }
        let meta = params.get("_meta").and_then(|meta| RawObject::parse(meta.get())).unwrap_or_default();
        for (key, value) in &meta.members {
            if key_is(key, "progressToken") {
                let token = value.get();
                let is_token =
                    token.starts_with('"') || token.starts_with(|c: char| c == '-' || c.is_ascii_digit());
                call.progress_token = is_token.then(|| body.slice_ref(token.as_bytes()));
            } else if !string(key).is_some_and(|key| key.starts_with("a2mcp/")) {
                let _ = write!(call.meta, ",{}:{}", key.get(), value.get());
            }
        }
        Some(call)
    }

    /// The arguments' own text.
    pub fn arguments(&self) -> &[u8] {
        &self.arguments
    }

    /// The parameters of the frame to the host; `note` is JSON.
    pub fn host_params(&self, call_id: &str, note: &str, sid: &str, client_name: &str) -> Vec<Bytes> {
        let head = [&b"{\"name\":"[..], &self.name_text, b",\"arguments\":"].concat();
        let tail = format!(
            r#"{rest},"_meta":{{"progressToken":"{call_id}","a2mcp/call":{{"callId":"{call_id}","note":{note}}},"a2mcp/client":{{"sid":"{sid}","name":{name}}}{meta}}}}}"#,
            rest = self.rest,
            name = quote(client_name),
            meta = self.meta,
        );
        vec![head.into(), self.arguments.clone(), tail.into()]
    }
}

/// A result as the caller gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolResult {
    /// The MCP result's text.
    pub text: Bytes,
    /// Its `isError`.
    pub is_error: bool,
}

impl ToolResult {
    /// A result of one text block.
    pub fn error(text: &str) -> Self {
        let text = quote(text);
        Self {
            text: format!(r#"{{"content":[{{"type":"text","text":{text}}}],"isError":true}}"#).into(),
            is_error: true,
        }
    }

    /// The host's result: verbatim when every known client takes it, else repaired. Content of
    /// unknown kinds is folded into text holding its JSON; `structuredContent` goes when it is no
    /// object or the result is an error; explicit nulls go.
    pub fn from_host(result: Bytes) -> Self {
        let Some(repaired) = std::str::from_utf8(&result).ok().and_then(repair) else {
            return Self::error(NO_RESULT);
        };
        let (is_error, text) = repaired;
        Self { text: text.map_or(result, Bytes::from), is_error }
    }
}

/// `isError`, and the result's new text when it needs one; `None` when it is no result at all.
fn repair(text: &str) -> Option<(bool, Option<String>)> {
    let result = RawObject::parse(text)?;
    let is_error = result.get("isError").is_some_and(|flag| flag.get() == "true");
    let content = match result.get("content") {
        Some(content) => serde_json::from_str::<Vec<&RawValue>>(content.get()).ok(),
        None => None,
    };
    let has_object = |key: &str| result.get(key).is_some_and(|value| value.get().starts_with('{'));
    if content.is_none() && !has_object("structuredContent") && !has_object("task") {
        return None;
    }
    let blocks: Vec<Option<String>> = content.iter().flatten().map(|block| repair_block(block)).collect();
    let is_sound = |(key, value): &(&RawValue, &RawValue)| {
        let value = value.get();
        if key_is(key, "isError") {
            value == "true" || value == "false"
        } else if key_is(key, "structuredContent") {
            value.starts_with('{') && !is_error
        } else {
            value != "null"
        }
    };
    if content.is_some() && blocks.iter().all(Option::is_none) && result.members.iter().all(is_sound) {
        return Some((is_error, None));
    }
    let mut json = String::with_capacity(text.len() + 64);
    json.push_str(r#"{"content":["#);
    for (index, (block, repaired)) in content.iter().flatten().zip(&blocks).enumerate() {
        if index > 0 {
            json.push(',');
        }
        json.push_str(repaired.as_deref().unwrap_or(block.get()));
    }
    json.push(']');
    for member in &result.members {
        let (key, value) = member;
        if !key_is(key, "content") && !key_is(key, "isError") && is_sound(member) {
            let _ = write!(json, ",{}:{}", key.get(), value.get());
        }
    }
    let _ = write!(json, r#","isError":{is_error}}}"#);
    Some((is_error, Some(json)))
}

/// A content block's new text, when clients would refuse the old one.
fn repair_block(block: &RawValue) -> Option<String> {
    let fold = || Some(format!(r#"{{"type":"text","text":{}}}"#, quote(block.get())));
    let Some(object) = RawObject::parse(block.get()) else {
        return fold();
    };
    let has = |key: &str, first: char| object.get(key).is_some_and(|value| value.get().starts_with(first));
    let is_known = match object.get("type").and_then(string).as_deref() {
        Some("text") => has("text", '"'),
        Some("image" | "audio") => has("data", '"') && has("mimeType", '"'),
        Some("resource") => has("resource", '{'),
        Some("resource_link") => has("uri", '"') && has("name", '"'),
        _ => false,
    };
    if !is_known {
        return fold();
    }
    if object.members.iter().all(|(_, value)| value.get() != "null") {
        return None;
    }
    let kept: Vec<String> = object
        .members
        .iter()
        .filter(|(_, value)| value.get() != "null")
        .map(|(key, value)| format!("{}:{}", key.get(), value.get()))
        .collect();
    Some(format!("{{{}}}", kept.join(",")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(params: &str) -> Option<ToolCall> {
        ToolCall::parse(Some(&Bytes::from(params.to_owned())))
    }

    fn sent(params: &str) -> String {
        let parts = parse(params).unwrap().host_params("c1", r#"{"v":1}"#, "s1", "client \"x\"");
        String::from_utf8(parts.concat()).unwrap()
    }

    const META: &str = r#""_meta":{"progressToken":"c1","a2mcp/call":{"callId":"c1","note":{"v":1}},"a2mcp/client":{"sid":"s1","name":"client \"x\""}"#;

    #[test]
    fn arguments_reach_the_host_byte_for_byte() {
        let arguments = r#"{ "b":1.50, "b":12345678901234567890123,"\ud800":[ ] }"#;
        assert_eq!(
            sent(&format!(r#"{{"arguments":{arguments},"name":"\u0061"}}"#)),
            format!(r#"{{"name":"\u0061","arguments":{arguments},{META}}}}}"#)
        );
        for shape in ["null", "[1]", "\"x\"", "7"] {
            assert!(
                sent(&format!(r#"{{"name":"a","arguments":{shape}}}"#))
                    .contains(&format!(r#""arguments":{shape},"#))
            );
        }
        assert!(sent(r#"{"name":"a"}"#).contains(r#""arguments":{},"#));
    }

    #[test]
    fn meta_of_the_caller_passes_but_not_ours() {
        let call = r#"{"name":"a","task":{"ttl":1},"_meta":{"progressToken":7.0,"x/y":[1],"a2mcp/call":{"callId":"evil"},"a2mcp\/client":1}}"#;
        assert_eq!(
            sent(call),
            format!(r#"{{"name":"a","arguments":{{}},"task":{{"ttl":1}},{META},"x/y":[1]}}}}"#)
        );
        assert_eq!(parse(call).unwrap().progress_token.unwrap(), "7.0");
    }

    #[test]
    fn a_call_without_a_name_is_no_call() {
        for params in ["{}", "[]", "7", r#"{"name":null}"#, r#"{"name":7}"#, r#"{"name":{}}"#] {
            assert!(parse(params).is_none(), "{params}");
        }
        assert!(ToolCall::parse(None).is_none());
    }

    #[test]
    fn sound_results_pass_verbatim() {
        for (text, is_error) in [
            (r#"{"content":[{"type":"text","text":"\ud800"}],"isError":false}"#, false),
            (r#"{"content":[],"structuredContent":{"n":1.50},"_meta":{"a":1}}"#, false),
            (r#"{ "isError":true, "content":[{"type":"image","data":"","mimeType":"image/png"}] }"#, true),
            (
                r#"{"content":[{"type":"resource","resource":{"uri":"a:b","text":""}},{"type":"resource_link","uri":"a:b","name":"n"},{"type":"audio","data":"","mimeType":"audio/wav"}]}"#,
                false,
            ),
        ] {
            assert_eq!(ToolResult::from_host(text.into()), ToolResult { text: text.into(), is_error });
        }
    }

    #[test]
    fn results_that_clients_refuse_are_repaired() {
        for (text, expected) in [
            (
                r#"{"content":[{"type":"video","x":1}]}"#,
                r#"{"content":[{"type":"text","text":"{\"type\":\"video\",\"x\":1}"}],"isError":false}"#,
            ),
            (
                r#"{"content":["a",{"type":"text"}]}"#,
                r#"{"content":[{"type":"text","text":"\"a\""},{"type":"text","text":"{\"type\":\"text\"}"}],"isError":false}"#,
            ),
            (
                r#"{"content":[{"type":"text","text":"a","annotations":null}],"isError":null,"_meta":null}"#,
                r#"{"content":[{"type":"text","text":"a"}],"isError":false}"#,
            ),
            (
                r#"{"content":[],"isError":true,"structuredContent":{"a":1}}"#,
                r#"{"content":[],"isError":true}"#,
            ),
            (r#"{"content":[],"structuredContent":[1]}"#, r#"{"content":[],"isError":false}"#),
            (
                r#"{"structuredContent":{"a":1}}"#,
                r#"{"content":[],"structuredContent":{"a":1},"isError":false}"#,
            ),
        ] {
            assert_eq!(ToolResult::from_host(text.into()).text, expected, "{text}");
        }
        for text in
            ["7", "", "null", "[]", "\"ok\"", "{}", r#"{"content":"ok"}"#, r#"{"result":{"content":[]}}"#]
        {
            let result = ToolResult::from_host(text.into());
            assert!(
                result.is_error && result.text.ends_with(br#"it may have run"}],"isError":true}"#),
                "{text}"
            );
        }
    }
}
