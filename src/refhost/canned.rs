//! Tools from a file: a JSON array of MCP tool definitions, each with two members of ours that are
//! not listed: `result` (what a call returns, verbatim; default: an empty result) and `delayMs`.
//! Everything else is listed byte for byte.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use super::store::Outcome;
use super::tools::text_result;
use crate::frame::raw::{self, RawObject};

/// The largest tools file.
const MAX_FILE: u64 = 64 << 20;

/// One tool of the file.
#[derive(Debug)]
pub(super) struct CannedTool {
    pub(super) name: String,
    /// The definition's text, without `result` and `delayMs`.
    pub(super) definition: String,
    result: String,
    delay: Duration,
}

impl CannedTool {
    pub(super) async fn call(&self, cancelled: &CancellationToken) -> Outcome {
        if !self.delay.is_zero() {
            tokio::select! {
                () = tokio::time::sleep(self.delay) => {}
                () = cancelled.cancelled() => return text_result("cancelled", true),
            }
        }
        Outcome::Result(self.result.clone().into())
    }
}

/// Reads the file.
///
/// # Errors
/// A text that names the file and what is wrong with it.
pub(super) fn load(path: &Path) -> Result<Vec<CannedTool>, String> {
    let about = |what: String| format!("{}: {what}", path.display());
    let len = std::fs::metadata(path).map_err(|error| about(error.to_string()))?.len();
    if len > MAX_FILE {
        return Err(about(format!("{len} bytes, at most {MAX_FILE} are read")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| about(error.to_string()))?;
    let tools: Vec<&RawValue> = serde_json::from_str(&text)
        .map_err(|error| about(format!("expected an array of tool definitions: {error}")))?;
    tools.into_iter().map(|tool| parse(tool).map_err(about)).collect()
}

fn parse(tool: &RawValue) -> Result<CannedTool, String> {
    let object = RawObject::parse(tool.get()).ok_or("a tool definition is an object")?;
    let name = object.get("name").and_then(raw::string).ok_or("a tool definition has a name")?;
    let delay = match object.get("delayMs") {
        Some(delay) => {
            u64::deserialize(delay).map_err(|_| format!("{name}: delayMs is a number of milliseconds"))?
        }
        None => 0,
    };
    let listed: Vec<String> = object
        .members
        .iter()
        .filter(|(key, _)| !raw::key_is(key, "result") && !raw::key_is(key, "delayMs"))
        .map(|(key, value)| format!("{}:{}", key.get(), value.get()))
        .collect();
    let result = object.get("result").map_or(r#"{"content":[],"isError":false}"#, RawValue::get);
    Ok(CannedTool {
        definition: format!("{{{}}}", listed.join(",")),
        result: result.to_owned(),
        delay: Duration::from_millis(delay),
        name: name.into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_is_listed_byte_for_byte_without_what_is_ours() {
        let tool = serde_json::from_str(
            r#"{"name":"\u0061.b", "inputSchema": {"anyOf":[ true ],"x":1.50}, "result": {"content":[]}, "delayMs":5, "x":null}"#,
        )
        .unwrap();
        let tool = parse(tool).unwrap();
        assert_eq!(tool.name, "a.b");
        assert_eq!(
            tool.definition,
            r#"{"name":"\u0061.b","inputSchema":{"anyOf":[ true ],"x":1.50},"x":null}"#
        );
        assert_eq!(tool.result, r#"{"content":[]}"#);
        assert_eq!(tool.delay, Duration::from_millis(5));
    }
}
