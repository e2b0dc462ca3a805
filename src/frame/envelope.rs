//! The JSON-RPC 2.0 envelope of one message, found in one pass; payloads stay raw text.

use std::borrow::Cow;

use bytes::Bytes;
use serde_json::value::RawValue;

use super::raw::{self, RawObject};

/// The longest `id` that is echoed, in bytes of its JSON text (contract 1, step 8).
pub const MAX_ID: usize = 1024;

/// The members of a JSON-RPC message. Absent is `None`; an explicit `null` is `Some("null")`.
#[derive(Debug, Default)]
pub struct Envelope<'a> {
    /// `jsonrpc` is exactly the string `"2.0"`.
    pub is_version_2: bool,
    /// The id's own text.
    pub id: Option<&'a RawValue>,
    /// The method; `None` also when `method` is no string.
    pub method: Option<Cow<'a, str>>,
    /// Whether a member `method` exists at all.
    pub has_method: bool,
    /// The parameters.
    pub params: Option<&'a RawValue>,
    /// The result of an answer.
    pub result: Option<&'a RawValue>,
    /// The error of an answer.
    pub error: Option<&'a RawValue>,
}

/// What kind of message an envelope is.
#[derive(Debug, Default, PartialEq, Eq, Clone, Copy)]
pub enum Shape {
    /// `id` and `method`.
    Request,
    /// `method` without `id`.
    Notification,
    /// `id` with `result` or `error`, no `method`.
    Answer,
    /// Anything else.
    #[default]
    Invalid,
}

/// Why bytes are no envelope.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeError {
    /// Not UTF-8 or not JSON.
    #[error("not valid JSON")]
    NotJson,
    /// JSON, but not an object.
    #[error("not a JSON object")]
    NotAnObject,
}

impl<'a> Envelope<'a> {
    /// Reads one message.
    ///
    /// # Errors
    /// [`EnvelopeError`]; depth is no limit, payloads are scanned without recursion.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, EnvelopeError> {
        let text = std::str::from_utf8(bytes).map_err(|_| EnvelopeError::NotJson)?;
        if !text.trim_start_matches([' ', '\t', '\r', '\n']).starts_with('{') {
            return match serde_json::from_str::<&RawValue>(text) {
                Ok(_) => Err(EnvelopeError::NotAnObject),
                Err(_) => Err(EnvelopeError::NotJson),
            };
        }
        let object: RawObject<'a> = serde_json::from_str(text).map_err(|_| EnvelopeError::NotJson)?;
        let mut envelope = Self::default();
        for (key, value) in object.members {
            match raw::string(key).as_deref() {
                Some("jsonrpc") => envelope.is_version_2 = raw::key_is(value, "2.0"),
                Some("id") => envelope.id = Some(value),
                Some("method") => {
                    envelope.has_method = true;
                    envelope.method = raw::string(value);
                }
                Some("params") => envelope.params = Some(value),
                Some("result") => envelope.result = Some(value),
                Some("error") => envelope.error = Some(value),
                _ => {}
            }
        }
        Ok(envelope)
    }

    /// What kind of message this is; `jsonrpc` and the id's type are not looked at.
    pub fn shape(&self) -> Shape {
        match (self.id, &self.method) {
            (Some(_), Some(_)) => Shape::Request,
            (None, Some(_)) => Shape::Notification,
            (Some(_), None) if !self.has_method && (self.result.is_some() || self.error.is_some()) => {
                Shape::Answer
            }
            _ => Shape::Invalid,
        }
    }

    /// Whether the id may be echoed: a number, a string or `null`, at most [`MAX_ID`] bytes.
    pub fn has_usable_id(&self) -> bool {
        self.id.is_none_or(|id| {
            let text = id.get();
            text.len() <= MAX_ID && !text.starts_with(['{', '[', 't', 'f'])
        })
    }

    /// The id to answer with: the sender's own text, or `null`.
    pub fn reply_id(&self) -> &'a str {
        match self.id {
            Some(id) if self.has_usable_id() => id.get(),
            _ => "null",
        }
    }
}

/// From this size on a message is read beside the one thread that everything else runs on: a scan of
/// 100 MB takes longer than a ping may wait.
pub const LARGE: usize = 256 << 10;

/// An envelope whose parts share the message's memory.
#[derive(Debug, Default, Clone)]
pub struct Message {
    /// See [`Envelope::is_version_2`].
    pub is_version_2: bool,
    /// See [`Envelope::id`].
    pub id: Option<Bytes>,
    /// See [`Envelope::method`].
    pub method: Option<String>,
    /// See [`Envelope::params`].
    pub params: Option<Bytes>,
    /// See [`Envelope::result`].
    pub result: Option<Bytes>,
    /// See [`Envelope::error`].
    pub error: Option<Bytes>,
    /// See [`Envelope::shape`].
    pub shape: Shape,
    /// See [`Envelope::has_usable_id`].
    pub has_usable_id: bool,
    /// See [`Envelope::reply_id`].
    pub reply_id: String,
}

impl Message {
    /// Reads one message; blocks for as long as it is.
    ///
    /// # Errors
    /// As [`Envelope::parse`].
    pub fn parse(bytes: &Bytes) -> Result<Self, EnvelopeError> {
        let envelope = Envelope::parse(bytes)?;
        let part = |raw: Option<&RawValue>| raw.map(|raw| bytes.slice_ref(raw.get().as_bytes()));
        Ok(Self {
            is_version_2: envelope.is_version_2,
            id: part(envelope.id),
            params: part(envelope.params),
            result: part(envelope.result),
            error: part(envelope.error),
            shape: envelope.shape(),
            has_usable_id: envelope.has_usable_id(),
            reply_id: envelope.reply_id().to_owned(),
            method: envelope.method.map(Cow::into_owned),
        })
    }

    /// The parameters' text.
    pub fn params_text(&self) -> Option<&str> {
        text(self.params.as_ref())
    }
}

/// A part of a message as text: it was checked when the message was read.
pub fn text(part: Option<&Bytes>) -> Option<&str> {
    part.and_then(|part| std::str::from_utf8(part).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_told_apart() {
        for (text, shape) in [
            (r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#, Shape::Request),
            (r#"{"jsonrpc":"2.0","id":null,"method":"ping"}"#, Shape::Request),
            (r#"{"jsonrpc":"2.0","method":"notifications/x"}"#, Shape::Notification),
            (r#"{"jsonrpc":"2.0","id":"a","result":null}"#, Shape::Answer),
            (r#"{"id":1,"error":{}}"#, Shape::Answer),
            (r#"{"id":1,"method":7,"result":1}"#, Shape::Invalid),
            (r"{}", Shape::Invalid),
        ] {
            assert_eq!(Envelope::parse(text.as_bytes()).unwrap().shape(), shape, "{text}");
        }
    }

    #[test]
    fn what_is_no_json_is_told_from_what_is_no_object() {
        for text in ["[]", "1", "\"a\"", "null", " [1,{}] "] {
            assert_eq!(Envelope::parse(text.as_bytes()).unwrap_err(), EnvelopeError::NotAnObject, "{text}");
        }
        for text in ["", "[", "{", "{}{}", "{\"a\":}", "\u{feff}{}", "nul"] {
            assert_eq!(Envelope::parse(text.as_bytes()).unwrap_err(), EnvelopeError::NotJson, "{text}");
        }
        assert_eq!(Envelope::parse(b"{\"a\":\"\xff\"}").unwrap_err(), EnvelopeError::NotJson);
    }

    #[test]
    fn ids_keep_their_text() {
        for id in ["1.50", "12345678901234567890123", "-0", "1e3", "\"\\u0041\"", "\"\\ud800\"", "0", "null"]
        {
            let text = format!("{{\"id\":{id},\"method\":\"m\"}}");
            assert_eq!(Envelope::parse(text.as_bytes()).unwrap().reply_id(), id);
        }
        for id in ["{}", "[]", "true", "false"] {
            let text = format!("{{\"id\":{id},\"method\":\"m\"}}");
            assert!(!Envelope::parse(text.as_bytes()).unwrap().has_usable_id());
        }
        let long = format!("{{\"id\":\"{}\",\"method\":\"m\"}}", "a".repeat(MAX_ID));
        assert!(!Envelope::parse(long.as_bytes()).unwrap().has_usable_id());
    }
}
