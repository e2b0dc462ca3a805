//! `_meta` on its way through: what is between sidecar and shim does not reach the server, and what the
//! server says of a caller is ours to say. Everything else stays the sender's own text. Pure.

use std::fmt::Write as _;

use bytes::Bytes;

use super::connection::Who;
use crate::frame::raw::{RawObject, key_is, quote, string};

/// The caller's parameters for the server, in parts, and whose they are.
pub(super) fn for_server(params: &Bytes) -> (Vec<Bytes>, Who) {
    let Some((object, text)) =
        std::str::from_utf8(params).ok().and_then(|text| Some((RawObject::parse(text)?, text)))
    else {
        return (vec![Bytes::from_static(b"{}")], Who::default());
    };
    let Some(meta) = object.get("_meta") else { return (vec![params.clone()], Who::default()) };
    let mut who = Who::default();
    let mut kept = String::from("{");
    for (key, value) in &RawObject::parse(meta.get()).unwrap_or_default().members {
        let name = string(key).unwrap_or_default();
        let member = |member: &str| {
            let object = RawObject::parse(value.get())?;
            string(object.get(member)?).map(std::borrow::Cow::into_owned)
        };
        match &*name {
            "a2mcp/call" => who.key = member("callId").unwrap_or_default(),
            "a2mcp/client" => who.sid = member("sid").unwrap_or_default(),
            name if name.starts_with("a2mcp/") => {}
            _ => {
                let comma = if kept.len() > 1 { "," } else { "" };
                let _ = write!(kept, "{comma}{}:{}", key.get(), value.get());
            }
        }
    }
    kept.push('}');
    // The value is a part of the text: what stands before and after it needs no copy.
    let start = meta.get().as_ptr() as usize - text.as_ptr() as usize;
    let end = start + meta.get().len();
    (vec![params.slice(..start), kept.into(), params.slice(end..)], who)
}

/// The server's parameters for the sidecar, naming the call they belong to, if any.
pub(super) fn for_sidecar(params: &Bytes, call: Option<&str>) -> Bytes {
    with_call(params, call, "")
}

/// As [`for_sidecar`], for a question, which has a name of its own.
pub(super) fn question_for_sidecar(params: &Bytes, call: &str, question: uuid::Uuid) -> Bytes {
    with_call(params, Some(call), &format!(",\"questionId\":\"{question}\""))
}

/// `more` are further members of what names the call.
fn with_call(params: &Bytes, call: Option<&str>, more: &str) -> Bytes {
    let text = std::str::from_utf8(params).unwrap_or_default();
    let object = RawObject::parse(text).unwrap_or_default();
    let meta = object.get("_meta").and_then(|meta| RawObject::parse(meta.get()));
    if call.is_none() && meta.is_none() {
        return if params.is_empty() { Bytes::from_static(b"{}") } else { params.clone() };
    }
    let mut json = String::with_capacity(text.len() + 128);
    json.push('{');
    for (key, value) in object.members.iter().filter(|(key, _)| !key_is(key, "_meta")) {
        let _ = write!(json, "{}:{},", key.get(), value.get());
    }
    json.push_str("\"_meta\":{");
    if let Some(call) = call {
        let _ = write!(json, "\"a2mcp/call\":{{\"callId\":{}{more}}},", quote(call));
    }
    for (key, value) in &meta.unwrap_or_default().members {
        if !string(key).is_some_and(|key| key.starts_with("a2mcp/")) {
            let _ = write!(json, "{}:{},", key.get(), value.get());
        }
    }
    json.truncate(json.trim_end_matches(',').len());
    json.push_str("}}");
    json.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_between_sidecar_and_shim_stays_there() {
        let params = Bytes::from_static(
            br#"{"name":"a","arguments":{ "n":1.50,"n":12345678901234567890123,"s":"\ud800" },"_meta":{"progressToken":"c1","a2mcp/call":{"callId":"c1","note":{}},"a2mcp/client":{"sid":"s1","name":"x"},"x/y":[1.0]},"z":1}"#,
        );
        let (parts, who) = for_server(&params);
        assert_eq!(
            parts.concat(),
            br#"{"name":"a","arguments":{ "n":1.50,"n":12345678901234567890123,"s":"\ud800" },"_meta":{"progressToken":"c1","x/y":[1.0]},"z":1}"#
        );
        assert_eq!(who, Who { sid: "s1".into(), key: "c1".into() });
        assert_eq!(for_server(&Bytes::new()).0.concat(), b"{}");
        assert_eq!(for_server(&Bytes::from_static(b"{ }")).0.concat(), b"{ }");
    }

    #[test]
    fn a_server_cannot_say_whose_its_words_are() {
        let said = |text: &'static str, call| for_sidecar(&Bytes::from_static(text.as_bytes()), call);
        assert_eq!(
            said(r#"{"a":1.50,"_meta":{"a2mcp/call":{"callId":"evil"},"x":1}}"#, Some("c1")),
            r#"{"a":1.50,"_meta":{"a2mcp/call":{"callId":"c1"},"x":1}}"#
        );
        assert_eq!(said(r#"{"_meta":{"a2mcp/call":{"callId":"evil"}}}"#, None), r#"{"_meta":{}}"#);
        assert_eq!(said("", None), "{}");
        assert_eq!(said(r#"{ "a":1 }"#, None), r#"{ "a":1 }"#);
        assert_eq!(said("", Some("c")), r#"{"_meta":{"a2mcp/call":{"callId":"c"}}}"#);
        let question = question_for_sidecar(&Bytes::from_static(b"{}"), "c", uuid::Uuid::nil());
        assert_eq!(
            question,
            r#"{"_meta":{"a2mcp/call":{"callId":"c","questionId":"00000000-0000-0000-0000-000000000000"}}}"#
        );
    }
}
