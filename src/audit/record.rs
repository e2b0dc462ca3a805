//! One line of the audit file: which fields, in which order (contract 11). A record is redacted by
//! construction: arguments enter as [`Args`], a tool's name is redacted here.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::SystemTime;

use super::redact;
use crate::text::push_rfc3339;

/// A call's redacted arguments: JSON text of at most [`redact::ARGS_BYTES`] bytes. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Args(Arc<str>);

impl Args {
    /// Redacts raw JSON; see [`redact::args`] for what that costs.
    pub fn redact(json: &str) -> Args {
        Args(redact::args(json).into())
    }

    /// Arguments that were redacted by an earlier sidecar and came back in a call's note.
    pub fn redacted_before(text: &str) -> Args {
        let mut text = text.to_owned();
        redact::cut(&mut text, redact::ARGS_BYTES);
        Args(text.into())
    }

    /// The redacted JSON.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// How a call ended when it did not end by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The caller or the operator cancelled it.
    Cancelled,
    /// The host is gone; whether the tool finished cannot be known.
    Unknown,
}

/// A record on its way into the file. Build it when the thing happens: that is its `ts`.
#[derive(Clone, Debug)]
pub struct Record<'a> {
    at: SystemTime,
    id: Option<&'a str>,
    sid: Option<&'a str>,
    phase: &'static str,
    tool: Cow<'a, str>,
    is_error: Option<bool>,
    outcome: Option<Outcome>,
    args: Cow<'a, Args>,
}

impl<'a> Record<'a> {
    /// A call is about to be given to the host, or refused. `id` is the call id.
    pub fn start(id: &'a str, sid: &'a str, tool: &'a str, args: &'a Args) -> Self {
        Self::call("start", id, sid, tool, Cow::Borrowed(args))
    }

    /// The call is over and its response may leave.
    pub fn done(id: &'a str, sid: &'a str, tool: &'a str, args: &'a Args, is_error: bool) -> Self {
        Self { is_error: Some(is_error), ..Self::call("done", id, sid, tool, Cow::Borrowed(args)) }
    }

    /// The call is over without a result of its tool; `isError` is true.
    pub fn ended(id: &'a str, sid: &'a str, tool: &'a str, args: &'a Args, outcome: Outcome) -> Self {
        Self { outcome: Some(outcome), ..Self::done(id, sid, tool, args, true) }
    }

    /// A re-sent call was attached to the running or finished call `id`.
    pub fn attached(id: &'a str, sid: &'a str, tool: &'a str, args: &'a Args) -> Self {
        Self::call("attached", id, sid, tool, Cow::Borrowed(args))
    }

    /// An action of the bridge or its operator (`xfer`, `tunnel`, `host_llm`, `token`, `operator`).
    /// `args` is JSON; `sid` is the session that asked for it, if one did.
    pub fn action(tool: &'a str, sid: Option<&'a str>, args: &str, is_error: bool) -> Self {
        Self {
            id: None,
            sid,
            is_error: Some(is_error),
            ..Self::call("done", "", "", tool, Cow::Owned(Args::redact(args)))
        }
    }

    fn call(phase: &'static str, id: &'a str, sid: &'a str, tool: &'a str, args: Cow<'a, Args>) -> Self {
        Self {
            at: SystemTime::now(),
            id: Some(id),
            sid: Some(sid),
            phase,
            tool: redact::string(tool),
            is_error: None,
            outcome: None,
            args,
        }
    }

    /// The record as one line of JSON.
    pub(super) fn line(&self) -> String {
        // The fixed part, a UUID and a session id take about 200 bytes.
        let mut out = String::with_capacity(256 + self.tool.len() + self.args.0.len() * 5 / 4);
        self.write_line(&mut out);
        out
    }

    fn write_line(&self, out: &mut String) {
        out.push_str("{\"ts\":\"");
        push_rfc3339(out, self.at);
        out.push_str("\",\"id\":");
        push_optional(out, self.id);
        out.push_str(",\"sid\":");
        push_optional(out, self.sid);
        out.push_str(",\"phase\":\"");
        out.push_str(self.phase);
        out.push_str("\",\"tool\":");
        redact::push_json(out, &self.tool);
        if let Some(is_error) = self.is_error {
            let _ = write!(out, ",\"isError\":{is_error}");
        }
        out.push_str(",\"args\":");
        redact::push_json(out, self.args.as_str());
        out.push_str(match self.outcome {
            None => "",
            Some(Outcome::Cancelled) => ",\"outcome\":\"cancelled\"",
            Some(Outcome::Unknown) => ",\"outcome\":\"unknown\"",
        });
        out.push_str("}\n");
    }
}

fn push_optional(out: &mut String, text: Option<&str>) {
    match text {
        Some(text) => redact::push_json(out, text),
        None => out.push_str("null"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

    fn line(record: Record<'_>) -> String {
        Record { at: UNIX_EPOCH, ..record }.line()
    }

    #[test]
    fn fields_stand_in_the_order_of_the_contract() {
        let args = Args::redact(r#"{"path":"/etc/hostname"}"#);
        let ts = r#"{"ts":"1970-01-01T00:00:00.000Z","#;
        let quoted = r#""{\"path\":\"/etc/hostname\"}""#;
        let cases = [
            (
                Record::start("i", "s", "read", &args),
                format!(r#""id":"i","sid":"s","phase":"start","tool":"read","args":{quoted}}}"#),
            ),
            (
                Record::done("i", "s", "read", &args, false),
                format!(r#""id":"i","sid":"s","phase":"done","tool":"read","isError":false,"args":{quoted}}}"#),
            ),
            (
                Record::ended("i", "s", "read", &args, Outcome::Cancelled),
                format!(
                    r#""id":"i","sid":"s","phase":"done","tool":"read","isError":true,"args":{quoted},"outcome":"cancelled"}}"#
                ),
            ),
            (
                Record::attached("i", "s", "read", &args),
                format!(r#""id":"i","sid":"s","phase":"attached","tool":"read","args":{quoted}}}"#),
            ),
            (
                Record::action("token", None, r#"{"action":"rotate"}"#, false),
                r#""id":null,"sid":null,"phase":"done","tool":"token","isError":false,"args":"{\"action\":\"rotate\"}"}"#
                    .to_owned(),
            ),
        ];
        for (record, expected) in cases {
            assert_eq!(line(record), format!("{ts}{expected}\n"));
        }
    }

    #[test]
    fn a_hostile_name_cannot_forge_a_line_or_drive_a_terminal() {
        let args = Args::redact("{}");
        let text = line(Record::start("i", "s", "x\"}\n{\u{1b}[2J\u{9b}\u{202e}", &args));
        assert_eq!(text.matches('\n').count(), 1);
        assert!(!text.trim_end().chars().any(crate::text::is_unsafe));
        let back: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(back["tool"], "x\"}\n{\u{1b}[2J\u{9b}\u{202e}");
    }

    #[test]
    fn long_tool_names_are_redacted() {
        let name = "n".repeat(121);
        let text = line(Record::start("i", "s", &name, &Args::redact("{}")));
        assert!(!text.contains(&name) && text.contains("\"tool\":\"<len:121,sha256:"), "{text}");
    }
}
