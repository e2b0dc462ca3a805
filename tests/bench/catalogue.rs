//! A catalogue as large as omp's: 19 tools, about 54 KB as a `tools/list` answer.

use std::io::Write as _;

use anyhow::Result;
use serde_json::{Value, json};
use tempfile::NamedTempFile;

/// omp's list is 54,632 bytes. The tools of the reference host and the envelope make up the difference.
const TOOLS: usize = 19;
const BYTES_PER_TOOL: usize = 2_666;

/// Writes the definitions for `a2mcp reference-host --tools FILE`.
pub(crate) fn write() -> Result<NamedTempFile> {
    let tools: Vec<Value> = (0..TOOLS).map(tool).collect();
    let mut file = NamedTempFile::with_suffix(".json")?;
    file.write_all(&serde_json::to_vec(&tools)?)?;
    Ok(file)
}

/// The shape of a real definition: a long text with line breaks and quotes, a schema of some depth.
fn tool(number: usize) -> Value {
    let property = |name: &str| {
        let description = format!("The {name} this tool works on, relative to the \"working directory\".");
        json!({ "type": "string", "description": description })
    };
    let mut tool = json!({
        "name": format!("catalogue_{number:02}"),
        "description": "",
        "inputSchema": {
            "type": "object",
            "properties": {
                "path": property("path"),
                "pattern": property("pattern"),
                "limit": { "type": "integer", "minimum": 1, "maximum": 1000, "default": 100 },
                "mode": { "enum": ["content", "files", "count"], "description": "What is returned." },
                "edits": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": { "old": property("old text"), "new": property("new text") },
                        "required": ["old", "new"],
                        "additionalProperties": false,
                    },
                },
            },
            "required": ["path"],
            "additionalProperties": false,
        },
    });
    let rest = BYTES_PER_TOOL.saturating_sub(tool.to_string().len());
    let line =
        "Reads, searches or edits files; \"ranges\" count from 1, and `\u{2026}` marks what was cut.\n";
    let description: String = line.chars().cycle().take(rest).collect();
    tool["description"] = Value::String(description);
    tool
}
