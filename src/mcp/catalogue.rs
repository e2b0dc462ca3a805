//! The host's tool list made safe for every client (contract 4, `tools/list`): one odd schema or one
//! explicit null makes real clients refuse the whole list. Everything else stays verbatim.

use std::fmt::Write as _;

use bytes::Bytes;
use foldhash::HashSet;
use serde_json::value::RawValue;

use crate::frame::raw::{RawObject, key_is, string};

/// Longest tool name that every known client takes.
const MAX_PORTABLE_NAME: usize = 64;

/// Which names the operator's config removes.
#[derive(Debug, Clone, Default)]
pub struct Denied {
    names: HashSet<String>,
    mcp_tools: bool,
}

impl Denied {
    /// From the config fields `deny` and `denyMCPTools`.
    pub fn new(names: &[String], mcp_tools: bool) -> Self {
        Self { names: names.iter().cloned().collect(), mcp_tools }
    }

    /// Whether calling `name` must be the same as calling an unknown name.
    pub fn covers(&self, name: &str) -> bool {
        self.names.contains(name) || (self.mcp_tools && name.starts_with("mcp__"))
    }
}

/// The list as it is served.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Catalogue {
    /// The result of `tools/list`: `{"tools":[…]}`.
    pub result: Bytes,
    /// The names in it, in order.
    pub names: Vec<String>,
    /// Names that at least one known client refuses.
    pub odd_names: Vec<String>,
    /// None of them is the host's.
    pub is_host_empty: bool,
    /// Entries of the host that are no tools, or whose name came before.
    pub skipped: usize,
}

impl Catalogue {
    /// Builds the list from the host's `tools/list` result; `own` are the sidecar's own tools, name and
    /// entry, which come last and whose names are nobody else's.
    ///
    /// # Errors
    /// A sentence for the log when the result holds no list.
    pub fn from_host(result: &[u8], denied: &Denied, own: &[(&str, &str)]) -> Result<Self, String> {
        let text = std::str::from_utf8(result).map_err(|_| "the host's tool list is not UTF-8")?;
        let object = RawObject::parse(text).ok_or("the host's tool list is no object")?;
        let tools = object.get("tools").ok_or("the host's tool list has no member `tools`")?;
        let tools: Vec<&RawValue> =
            serde_json::from_str(tools.get()).map_err(|_| "the host's `tools` is no array")?;
        let mut catalogue = Self::default();
        let mut seen = HashSet::default();
        let mut json = String::with_capacity(result.len() + 16);
        json.push_str(r#"{"tools":["#);
        for tool in tools {
            let Some((tool, name)) = RawObject::parse(tool.get())
                .and_then(|tool| Some((string(tool.get("name")?)?.into_owned(), tool)))
                .map(|(name, tool)| (tool, name))
            else {
                catalogue.skipped += 1;
                continue;
            };
            if denied.covers(&name) {
                continue;
            }
            if own.iter().any(|(own, _)| *own == name) {
                catalogue.skipped += 1;
                continue;
            }
            if !seen.insert(name.clone()) {
                catalogue.skipped += 1;
                continue;
            }
            if !catalogue.names.is_empty() {
                json.push(',');
            }
            write_tool(&mut json, &tool);
            if !is_portable(&name) {
                catalogue.odd_names.push(name.clone());
            }
            catalogue.names.push(name);
        }
        catalogue.is_host_empty = catalogue.names.is_empty();
        for (name, entry) in own.iter().filter(|(name, _)| !denied.covers(name)) {
            json.push_str(if catalogue.names.is_empty() { "" } else { "," });
            json.push_str(entry);
            catalogue.names.push((*name).to_owned());
        }
        json.push_str("]}");
        catalogue.result = json.into();
        Ok(catalogue)
    }
}

/// Whether every known client takes this name.
fn is_portable(name: &str) -> bool {
    (1..=MAX_PORTABLE_NAME).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
}

fn write_tool(json: &mut String, tool: &RawObject<'_>) {
    let mut members = Members::begin(json);
    let mut has_schema = false;
    for (key, value) in &tool.members {
        if key_is(key, "inputSchema") {
            // Where a key stands twice the last one counts; one is enough on the way out.
            if !has_schema {
                has_schema = true;
                members.key(key.get());
                write_schema(members.json, tool.get("inputSchema"));
            }
        } else if value.get() != "null" {
            members.key(key.get());
            match RawObject::parse(value.get()) {
                Some(object) if key_is(key, "annotations") => write_without_nulls(members.json, &object),
                _ => members.json.push_str(value.get()),
            }
        }
    }
    if !has_schema {
        members.key("\"inputSchema\"");
        write_schema(members.json, None);
    }
    members.end();
}

/// The schema verbatim, but its root says `type: "object"` and holds no explicit nulls.
fn write_schema(json: &mut String, schema: Option<&RawValue>) {
    let Some(schema) = schema.and_then(|schema| RawObject::parse(schema.get())) else {
        json.push_str(r#"{"type":"object"}"#);
        return;
    };
    let is_object = schema.get("type").is_some_and(|kind| key_is(kind, "object"));
    let mut members = Members::begin(json);
    if !is_object {
        members.key("\"type\"");
        members.json.push_str("\"object\"");
    }
    for (key, value) in &schema.members {
        let is_type = key_is(key, "type");
        // In `default` and `const` a null is a value; elsewhere at the root it means "absent".
        let is_value = key_is(key, "default") || key_is(key, "const");
        if (is_type && !is_object) || (value.get() == "null" && !is_value) {
            continue;
        }
        members.key(key.get());
        members.json.push_str(value.get());
    }
    members.end();
}

fn write_without_nulls(json: &mut String, object: &RawObject<'_>) {
    let mut members = Members::begin(json);
    for (key, value) in object.members.iter().filter(|(_, value)| value.get() != "null") {
        members.key(key.get());
        members.json.push_str(value.get());
    }
    members.end();
}

/// Writes an object member by member.
struct Members<'a> {
    json: &'a mut String,
    first: bool,
}

impl<'a> Members<'a> {
    fn begin(json: &'a mut String) -> Self {
        json.push('{');
        Self { json, first: true }
    }

    fn key(&mut self, key: &str) {
        let comma = if std::mem::take(&mut self.first) { "" } else { "," };
        let _ = write!(self.json, "{comma}{key}:");
    }

    fn end(self) {
        self.json.push('}');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(tools: &str) -> String {
        let catalogue =
            Catalogue::from_host(format!("{{\"tools\":[{tools}]}}").as_bytes(), &Denied::default(), &[])
                .unwrap();
        String::from_utf8(catalogue.result.to_vec()).unwrap()
    }

    #[test]
    fn a_proper_tool_passes_byte_for_byte() {
        let tool = r#"{"name":"a","description":"d","inputSchema":{"type":"object","properties":{"n":{"default":null,"maximum":1.50e400}}},"x":"\ud800"}"#;
        assert_eq!(served(tool), format!("{{\"tools\":[{tool}]}}"));
    }

    #[test]
    fn every_root_says_object_and_the_rest_is_verbatim() {
        for (schema, expected) in [
            (r#"{"anyOf":[{"type":"null"}]}"#, r#"{"type":"object","anyOf":[{"type":"null"}]}"#),
            (r#"{"type":"string","minLength":1}"#, r#"{"type":"object","minLength":1}"#),
            (r#"{"type":["object","null"]}"#, r#"{"type":"object"}"#),
            (
                r#"{"$schema":"http://json-schema.org/draft-07/schema#","type":"object"}"#,
                r#"{"$schema":"http://json-schema.org/draft-07/schema#","type":"object"}"#,
            ),
            (
                r##"{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}"##,
                r##"{"type":"object","$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}"##,
            ),
            (
                r#"{"type":"object","properties":null,"required":null,"default":null}"#,
                r#"{"type":"object","default":null}"#,
            ),
            ("true", r#"{"type":"object"}"#),
            ("null", r#"{"type":"object"}"#),
            ("{}", r#"{"type":"object"}"#),
            ("[1]", r#"{"type":"object"}"#),
        ] {
            assert_eq!(
                served(&format!(r#"{{"name":"a","inputSchema":{schema}}}"#)),
                format!(r#"{{"tools":[{{"name":"a","inputSchema":{expected}}}]}}"#),
            );
        }
        assert_eq!(served(r#"{"name":"a"}"#), r#"{"tools":[{"name":"a","inputSchema":{"type":"object"}}]}"#);
    }

    #[test]
    fn explicit_nulls_go() {
        assert_eq!(
            served(
                r#"{"name":"a","title":null,"annotations":{"title":null,"readOnlyHint":true},"inputSchema":{"type":"object"}}"#
            ),
            r#"{"tools":[{"name":"a","annotations":{"readOnlyHint":true},"inputSchema":{"type":"object"}}]}"#
        );
    }

    #[test]
    fn one_broken_entry_costs_only_itself() {
        let catalogue = Catalogue::from_host(
            br#"{"tools":[1,{"name":7},{"name":"a"},{"name":"a","description":"again"},{"name":"b c/\u4e2d"}]}"#,
            &Denied::default(),
            &[],
        )
        .unwrap();
        assert_eq!(catalogue.names, ["a", "b c/\u{4e2d}"]);
        assert_eq!(catalogue.odd_names, ["b c/\u{4e2d}"]);
        assert_eq!(catalogue.skipped, 3);
        for bad in ["", "[]", "{}", r#"{"tools":{}}"#] {
            assert!(Catalogue::from_host(bad.as_bytes(), &Denied::default(), &[]).is_err());
        }
    }

    #[test]
    fn denied_names_are_not_listed() {
        let denied = Denied::new(&["bash".into()], true);
        let list = br#"{"tools":[{"name":"bash"},{"name":"mcp__a2mcp__read"},{"name":"read"}]}"#;
        assert_eq!(Catalogue::from_host(list, &denied, &[]).unwrap().names, ["read"]);
    }

    #[test]
    fn own_tools_come_last_and_their_names_are_taken() {
        let own = [("x", r#"{"name":"x"}"#), ("y", r#"{"name":"y"}"#)];
        let list = br#"{"tools":[{"name":"y","description":"the host's"},{"name":"read"}]}"#;
        let catalogue = Catalogue::from_host(list, &Denied::default(), &own).unwrap();
        assert_eq!(catalogue.names, ["read", "x", "y"]);
        assert!(catalogue.result.ends_with(br#",{"name":"x"},{"name":"y"}]}"#) && !catalogue.is_host_empty);
        let alone =
            Catalogue::from_host(br#"{"tools":[]}"#, &Denied::new(&["x".into()], false), &own).unwrap();
        assert_eq!(alone.result, r#"{"tools":[{"name":"y"}]}"#);
        assert!(alone.is_host_empty);
    }
}
