//! JSON-RPC answers as bytes. Ids are the sender's own text.

use bytes::Bytes;

use crate::frame::raw::quote;

/// JSON-RPC error codes that callers see.
pub mod code {
    /// Not JSON.
    pub const PARSE: i32 = -32700;
    /// JSON, but no message.
    pub const INVALID_REQUEST: i32 = -32600;
    /// No such method.
    pub const METHOD_NOT_FOUND: i32 = -32601;
    /// Parameters that do not fit.
    pub const INVALID_PARAMS: i32 = -32602;
    /// A fault of the bridge.
    pub const INTERNAL: i32 = -32603;
    /// The bridge's own refusals.
    pub const REFUSED: i32 = -32000;
    /// The call was cancelled by its caller.
    pub const CANCELLED: i32 = -32800;
}

/// An answer in parts, so that a large result is not copied.
pub fn result(id: &str, result: Bytes) -> Vec<Bytes> {
    vec![format!(r#"{{"jsonrpc":"2.0","id":{id},"result":"#).into(), result, Bytes::from_static(b"}")]
}

/// An answer whose result is short.
pub fn short_result(id: &str, result: &str) -> Vec<Bytes> {
    vec![format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#).into()]
}

/// An error answer.
pub fn error(id: &str, code: i32, message: &str) -> Vec<Bytes> {
    let message = quote(message);
    vec![format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":{code},"message":{message}}}}}"#).into()]
}

/// A relayed error object, verbatim.
pub fn raw_error(id: &str, error: Bytes) -> Vec<Bytes> {
    vec![format!(r#"{{"jsonrpc":"2.0","id":{id},"error":"#).into(), error, Bytes::from_static(b"}")]
}
