//! What of a call's arguments may stand in the audit file (contract 11). Pure: raw JSON in, at most
//! [`ARGS_BYTES`] of redacted JSON out.
//!
//! One pass over the text, no tree and no recursion: arguments may be 128 MiB and nested as deeply as
//! a peer likes, and the pass stops once the output is full. Numbers stay byte-identical, key order
//! and duplicate keys are kept, strings are re-encoded (so that escapes cannot hide a word from
//! `grep`), a lone surrogate stays the escape it was. Text that is no JSON gives rubbish, not a panic.

use std::borrow::Cow;
use std::fmt::Write as _;

use sha2::{Digest, Sha256};

use crate::text;

/// Longest string kept as it is, in Unicode scalar values; longer ones become their digest.
pub const STRING_CHARS: usize = 120;
/// A value inside more than this many arrays and objects becomes `"<max-depth>"`.
pub const DEPTH: usize = 32;
/// The redacted arguments are cut here, on a character boundary.
pub const ARGS_BYTES: usize = 1024;

/// Redacts the raw JSON of a call's arguments.
///
/// Costs a hash over every string longer than [`STRING_CHARS`] that begins before the output is full:
/// for arguments of many megabytes call it from a blocking task.
pub fn args(json: &str) -> String {
    let mut redactor = Redactor { json, at: 0, depth: 0, out: String::with_capacity(json.len().min(256)) };
    redactor.run();
    let mut out = redactor.out;
    cut(&mut out, ARGS_BYTES);
    out
}

/// Redacts one string, such as a tool's name.
pub fn string(text: &str) -> Cow<'_, str> {
    if text.len() <= STRING_CHARS || text.chars().nth(STRING_CHARS).is_none() {
        return Cow::Borrowed(text);
    }
    let mut long = Long { chars: text.chars().count(), hash: Sha256::new() };
    long.hash.update(text);
    Cow::Owned(long.marker())
}

/// Appends `text` as a JSON string. Controls, DEL, C1 and bidi controls are escaped beyond what JSON
/// asks, so that showing the file on a terminal is harmless.
pub(super) fn push_json(out: &mut String, text: &str) {
    out.push('"');
    let mut rest = text;
    // Nearly all text is plain ASCII: it goes over in runs.
    let is_special = |byte: u8| !matches!(byte, b' '..=b'~') || matches!(byte, b'"' | b'\\');
    while let Some(at) = rest.bytes().position(is_special) {
        let (plain, special) = rest.split_at(at);
        out.push_str(plain);
        let mut chars = special.chars();
        chars.next().into_iter().for_each(|c| push_json_char(out, c));
        rest = chars.as_str();
    }
    out.push_str(rest);
    out.push('"');
}

pub(super) fn cut(text: &mut String, bytes: usize) {
    if text.len() > bytes {
        let at = (0..=bytes).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(at);
    }
}

fn push_json_char(out: &mut String, c: char) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c if text::is_unsafe(c) => push_escape(out, u32::from(c)),
        c => out.push(c),
    }
}

/// `unit` is a UTF-16 code unit; no character escaped here needs two.
fn push_escape(out: &mut String, unit: u32) {
    let _ = write!(out, "\\u{unit:04x}");
}

struct Redactor<'a> {
    json: &'a str,
    at: usize,
    /// How many arrays and objects are open at `at`.
    depth: usize,
    out: String,
}

impl<'a> Redactor<'a> {
    fn run(&mut self) {
        let bytes = self.json.as_bytes();
        while self.out.len() < ARGS_BYTES {
            let Some(&byte) = bytes.get(self.at) else { return };
            match byte {
                b' ' | b'\t' | b'\n' | b'\r' => self.at += 1,
                b'{' | b'[' if self.depth > DEPTH => self.too_deep(),
                b'{' | b'[' => {
                    self.depth += 1;
                    self.punctuation(byte);
                }
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    self.punctuation(byte);
                }
                b',' | b':' => self.punctuation(byte),
                // A key at this depth names a value that is too deep, but it belongs to its object.
                b'"' if self.depth > DEPTH && !self.is_key() => self.too_deep(),
                b'"' => self.string(),
                _ if self.depth > DEPTH => self.too_deep(),
                _ => self.scalar(),
            }
        }
    }

    fn punctuation(&mut self, byte: u8) {
        self.out.push(char::from(byte));
        self.at += 1;
    }

    /// A number, `true`, `false` or `null`, as it is.
    fn scalar(&mut self) {
        let end = self.scalar_end();
        let room = ARGS_BYTES - self.out.len();
        let mut end_shown = end.min(self.at + room);
        while !self.json.is_char_boundary(end_shown) {
            end_shown -= 1;
        }
        self.out.push_str(&self.json[self.at..end_shown]);
        self.at = end;
    }

    fn scalar_end(&self) -> usize {
        let rest = &self.json.as_bytes()[self.at..];
        let ends = |b: &u8| {
            matches!(b, b',' | b':' | b'{' | b'}' | b'[' | b']' | b'"' | b' ' | b'\t' | b'\n' | b'\r')
        };
        self.at + rest.iter().position(ends).unwrap_or(rest.len())
    }

    fn string(&mut self) {
        let (body, end) = self.string_at();
        push_redacted(&mut self.out, body);
        self.at = end;
    }

    /// The raw text between the quotes of the string at `at`, and where the text after it begins.
    fn string_at(&self) -> (&'a str, usize) {
        let json = self.json;
        let bytes = json.as_bytes();
        let start = self.at + 1;
        let mut at = start;
        while let Some(&byte) = bytes.get(at) {
            match byte {
                b'"' => return (&json[start..at], at + 1),
                b'\\' => at += 2,
                _ => at += 1,
            }
        }
        (json.get(start..).unwrap_or(""), bytes.len())
    }

    fn is_key(&self) -> bool {
        let (_, end) = self.string_at();
        self.json.as_bytes()[end..].iter().find(|b| !b.is_ascii_whitespace()) == Some(&b':')
    }

    /// Writes the marker for the value at `at` and goes past all of it.
    fn too_deep(&mut self) {
        self.out.push_str("\"<max-depth>\"");
        let bytes = self.json.as_bytes();
        let mut open = 0usize;
        while let Some(&byte) = bytes.get(self.at) {
            match byte {
                b'"' => self.at = self.string_at().1,
                b'{' | b'[' => {
                    open += 1;
                    self.at += 1;
                }
                b'}' | b']' => {
                    open = open.saturating_sub(1);
                    self.at += 1;
                }
                b',' | b':' | b' ' | b'\t' | b'\n' | b'\r' => self.at += 1,
                _ => self.at = self.scalar_end(),
            }
            if open == 0 {
                return;
            }
        }
    }
}

/// Appends the JSON string whose raw body is `raw`, redacted.
fn push_redacted(out: &mut String, raw: &str) {
    let start = out.len();
    out.push('"');
    let mut short = 0;
    for unit in Units(raw) {
        short += 1;
        if short > STRING_CHARS {
            out.truncate(start);
            push_json(out, &Long::of(raw).marker());
            return;
        }
        match unit {
            Unit::Char(c) => push_json_char(out, c),
            Unit::LoneSurrogate(unit) => push_escape(out, unit),
        }
    }
    out.push('"');
}

/// Length and digest of a string that is too long to keep.
struct Long {
    chars: usize,
    hash: Sha256,
}

impl Long {
    fn of(raw: &str) -> Long {
        let mut long = Long { chars: 0, hash: Sha256::new() };
        let mut rest = raw;
        // Whole runs without an escape are hashed in place.
        while let Some(at) = rest.find('\\') {
            long.push(&rest[..at]);
            rest = &rest[at..];
            let mut units = Units(rest);
            match units.next() {
                Some(Unit::Char(c)) => long.push(c.encode_utf8(&mut [0; 4])),
                // UTF-8 has no form for it; the replacement character is what encoders write.
                Some(Unit::LoneSurrogate(_)) => long.push("\u{fffd}"),
                None => break,
            }
            rest = units.0;
        }
        long.push(rest);
        long
    }

    fn push(&mut self, text: &str) {
        self.chars += text.chars().count();
        self.hash.update(text);
    }

    fn marker(self) -> String {
        let mut marker = format!("<len:{},sha256:", self.chars);
        for byte in &self.hash.finalize()[..4] {
            let _ = write!(marker, "{byte:02x}");
        }
        marker.push('>');
        marker
    }
}

enum Unit {
    Char(char),
    LoneSurrogate(u32),
}

/// Decodes a JSON string's raw body.
struct Units<'a>(&'a str);

impl Iterator for Units<'_> {
    type Item = Unit;

    fn next(&mut self) -> Option<Unit> {
        let mut chars = self.0.chars();
        let first = chars.next()?;
        if first != '\\' {
            self.0 = chars.as_str();
            return Some(Unit::Char(first));
        }
        let kind = chars.next().unwrap_or('\\');
        self.0 = chars.as_str();
        Some(match kind {
            'b' => Unit::Char('\u{8}'),
            'f' => Unit::Char('\u{c}'),
            'n' => Unit::Char('\n'),
            'r' => Unit::Char('\r'),
            't' => Unit::Char('\t'),
            'u' => self.code_unit(),
            other => Unit::Char(other),
        })
    }
}

impl Units<'_> {
    /// After `\u`: one code unit, or two that make a pair.
    fn code_unit(&mut self) -> Unit {
        let Some(unit) = self.hex() else { return Unit::Char('\u{fffd}') };
        if let Some(c) = char::from_u32(unit) {
            return Unit::Char(c);
        }
        let here = self.0;
        if unit < 0xdc00 && self.0.starts_with("\\u") {
            self.0 = &self.0[2..];
            if let Some(low @ 0xdc00..=0xdfff) = self.hex() {
                let pair = 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
                return Unit::Char(char::from_u32(pair).unwrap_or('\u{fffd}'));
            }
            self.0 = here;
        }
        Unit::LoneSurrogate(unit)
    }

    fn hex(&mut self) -> Option<u32> {
        let digits = self.0.get(..4).filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()))?;
        self.0 = &self.0[4..];
        u32::from_str_radix(digits, 16).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn marker(text: &str) -> String {
        let hash = Sha256::digest(text);
        let hex: String = hash[..4].iter().map(|b| format!("{b:02x}")).collect();
        format!("<len:{},sha256:{hex}>", text.chars().count())
    }

    #[track_caller]
    fn check(json: &str, expected: &str) {
        assert_eq!(args(json), expected);
    }

    #[test]
    fn what_is_short_stays_as_it_is() {
        check(r#"{}"#, "{}");
        check(
            r#"{ "b" : 1.0e+2, "a": [ 12345678901234567890123 , -0 ], "b": null, "t":true }"#,
            r#"{"b":1.0e+2,"a":[12345678901234567890123,-0],"b":null,"t":true}"#,
        );
        check(r#""just text""#, r#""just text""#);
        check("7", "7");
    }

    #[test]
    fn strings_are_reencoded_so_that_escapes_hide_nothing() {
        check(
            r#"["\u0072\u006d -rf \/","\ud83e\udd80 日本","\b\f\n\"\\"]"#,
            r#"["rm -rf /","🦀 日本","\u0008\u000c\n\"\\"]"#,
        );
        check("[\"\u{7f}\u{9b}\u{202e}\"]", r#"["\u007f\u009b\u202e"]"#);
    }

    #[test]
    fn lone_surrogates_are_carried() {
        check(
            r#"["\ud800","\udc00x","\ud800\ud800\udc00","\uD83Ex"]"#,
            r#"["\ud800","\udc00x","\ud800𐀀","\ud83ex"]"#,
        );
    }

    #[test]
    fn long_strings_become_their_length_and_digest_wherever_they_are() {
        let at_limit = "é".repeat(120);
        let long = "é".repeat(121);
        check(&format!(r#"{{"a":"{at_limit}"}}"#), &format!(r#"{{"a":"{at_limit}"}}"#));
        let m = marker(&long);
        check(
            &format!(r#"{{"{long}":["{long}",{{"x":{{"oldText":"{long}"}}}}]}}"#),
            &format!(r#"{{"{m}":["{m}",{{"x":{{"oldText":"{m}"}}}}]}}"#),
        );
        let escaped = format!(r#"["{}\u00e9\n{}"]"#, "é".repeat(60), "é".repeat(60));
        let plain = format!("{}é\n{}", "é".repeat(60), "é".repeat(60));
        check(&escaped, &format!(r#"["{}"]"#, marker(&plain)));
        let lone = format!(r#"["{}\ud800"]"#, "a".repeat(120));
        check(&lone, &format!(r#"["{}"]"#, marker(&format!("{}\u{fffd}", "a".repeat(120)))));
    }

    #[test]
    fn depth_is_counted_not_recursed() {
        let nest = |n: usize, inner: &str| format!("{}{inner}{}", "[".repeat(n), "]".repeat(n));
        check(&nest(32, "\"x\""), &nest(32, "\"x\""));
        check(
            &nest(33, "\"x\",{\"k\":\"]\"},7"),
            &nest(33, "\"<max-depth>\",\"<max-depth>\",\"<max-depth>\""),
        );
        check(&nest(40, "\"secret\""), &nest(33, "\"<max-depth>\""));
        check(
            &nest(32, "{\"k\":\"v\",\"l\":[1]}"),
            &nest(32, "{\"k\":\"<max-depth>\",\"l\":\"<max-depth>\"}"),
        );
        check(&nest(1_000_000, "1"), &nest(33, "\"<max-depth>\""));
    }

    #[test]
    fn the_output_is_cut_on_a_character_boundary() {
        let json = format!("[{}]", vec!["\"日本語\""; 400].join(","));
        let out = args(&json);
        assert!((1022..=1024).contains(&out.len()), "{}", out.len());
        assert!(json.starts_with(&out));
        let digits = format!("[{}]", "1".repeat(5000));
        assert_eq!(args(&digits).len(), 1024);
    }

    #[test]
    fn huge_arguments_are_left_early() {
        let many = format!("[{}1]", "1,".repeat(8_000_000));
        assert_eq!(args(&many).len(), 1024);
    }

    #[test]
    fn a_long_tool_name_is_redacted_too() {
        assert_eq!(string("read"), "read");
        assert_eq!(string(&"日".repeat(120)), "日".repeat(120));
        assert_eq!(string(&"日".repeat(121)), marker(&"日".repeat(121)));
    }

    #[test]
    fn broken_text_gives_no_panic() {
        for text in ["", "\"", "\"\\", "\"\\u", "[\"\\ud8", "]]]", "\"\\ud800\\u12", "日", "{\"a", "\"\\日\""]
        {
            args(text);
            args(&format!("{}{text}", "[".repeat(40)));
        }
    }

    proptest! {
        #[test]
        fn any_text_is_bounded_and_harmless(text in "(?s)[\\[\\]{}:,\"\\\\ua-f0-9 \u{1b}\u{202e}é🦀]{0,300}") {
            let out = args(&text);
            prop_assert!(out.len() <= ARGS_BYTES);
        }

        #[test]
        fn valid_json_stays_valid_and_equal(strings in proptest::collection::vec("(?s).{0,20}", 0..8)) {
            let json = serde_json::to_string(&strings).unwrap();
            let back: Vec<String> = serde_json::from_str(&args(&json)).unwrap();
            prop_assert_eq!(back, strings);
        }
    }
}
