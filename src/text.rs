//! Makes foreign text safe for people: names, paths, tools, client names and child output may hold
//! control characters that drive a terminal, or bidi controls that reorder a line (contract 16).
//!
//! Three forms: [`clean`] for anything that must stay on one line (logs, notices, tables),
//! [`clean_block`] for a tool's own text, where line breaks and tabs are content, and [`clean_json`]. Nothing here decides
//! *when* text is shown. Both borrow when there is nothing to change, which is nearly always.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// True for characters that must not reach a terminal, a notice or a log line: C0 and C1 controls,
/// DEL, the bidi controls, and the two Unicode line breaks.
pub fn is_unsafe(c: char) -> bool {
    if matches!(c, ' '..='~') {
        return false;
    }
    matches!(
        c,
        '\u{0}'..='\u{1f}'
            | '\u{7f}'..='\u{9f}'
            | '\u{61c}'
            | '\u{200e}'
            | '\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2066}'..='\u{206f}'
    )
}

/// `text` as one harmless line of at most `max_chars` characters.
///
/// An unsafe character is shown as its escape (`\n`, `\u{1b}`); what does not fit is replaced by one
/// `…`. An escape is never cut in half.
pub fn clean(text: &str, max_chars: usize) -> Cow<'_, str> {
    if fits(text, max_chars) && !text.chars().any(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len().min(max_chars.saturating_mul(4)));
    let mut used = 0;
    // Where to cut should the rest not fit: the last length that leaves room for the ellipsis.
    let mut cut = 0;
    for c in text.chars() {
        let before = out.len();
        let width = push_clean(&mut out, c);
        if used + width > max_chars {
            out.truncate(if used < max_chars { before } else { cut });
            if max_chars > 0 {
                out.push('…');
            }
            break;
        }
        if used < max_chars {
            cut = before;
        }
        used += width;
    }
    Cow::Owned(out)
}

/// `text` with its line feeds and tabs, everything else unsafe shown as an escape. For the body of a
/// tool's result on a terminal; a carriage return before a line feed is dropped.
pub fn clean_block(text: &str) -> Cow<'_, str> {
    let keeps = |c: char| matches!(c, '\n' | '\t') || !is_unsafe(c);
    if text.chars().all(keeps) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\r' if chars.peek() == Some(&'\n') => {}
            c if keeps(c) => out.push(c),
            c => {
                push_clean(&mut out, c);
            }
        }
    }
    Cow::Owned(out)
}

/// JSON whose strings hold no unsafe character as such: each is written as its `\uXXXX` escape, which
/// means the same to a machine. `json` is valid JSON on one line.
pub fn clean_json(json: &str) -> Cow<'_, str> {
    if !json.chars().any(is_unsafe) {
        return Cow::Borrowed(json);
    }
    let mut out = String::with_capacity(json.len() + 64);
    for c in json.chars() {
        // Every unsafe character is in the basic plane: one escape is enough.
        if is_unsafe(c) {
            let _ = write!(out, "\\u{:04x}", u32::from(c));
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// Looks at no more of `text` than it must: callers pass whole documents and want 80 characters.
fn fits(text: &str, max_chars: usize) -> bool {
    text.len() <= max_chars || text.chars().nth(max_chars).is_none()
}

/// Appends the safe form of `c` and returns how many characters that took.
fn push_clean(out: &mut String, c: char) -> usize {
    if !is_unsafe(c) {
        out.push(c);
        return 1;
    }
    let before = out.len();
    match c {
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c => {
            let _ = write!(out, "\\u{{{:x}}}", u32::from(c));
        }
    }
    out.len() - before
}

/// `2026-11-29T22:20:05.123Z`. Times before 1970 are shown as 1970.
pub fn push_rfc3339(out: &mut String, at: SystemTime) {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Days to a civil date, by eras of 400 years that begin on 1 March (Hinnant).
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let fields = [
        (year, 4, '-'),
        (month, 2, '-'),
        (day, 2, 'T'),
        (seconds / 3600, 2, ':'),
        (seconds / 60 % 60, 2, ':'),
        (seconds % 60, 2, '.'),
        (u64::from(since.subsec_millis()), 3, 'Z'),
    ];
    // Twice per call: by hand, the formatter takes ten times as long.
    for (value, digits, follows) in fields {
        let places = [1000, 100, 10, 1];
        for place in places.iter().skip(places.len() - digits) {
            out.push(char::from(b'0' + (value / place % 10) as u8));
        }
        out.push(follows);
    }
}

/// RFC 3339 in UTC with milliseconds, of milliseconds since the epoch.
pub fn rfc3339(ms: u64) -> String {
    let mut text = String::with_capacity(24);
    push_rfc3339(&mut text, UNIX_EPOCH + Duration::from_millis(ms));
    text
}

/// An error and what caused it, in one line.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn harmless_text_is_borrowed() {
        assert!(matches!(clean("naïve 日本 🦀", 80), Cow::Borrowed("naïve 日本 🦀")));
        assert!(matches!(clean_block("a\n\tb"), Cow::Borrowed("a\n\tb")));
    }

    #[test]
    fn every_control_and_bidi_character_becomes_visible() {
        let hostile: String =
            ('\u{0}'..='\u{2100}').filter(|c| is_unsafe(*c)).flat_map(|c| ['x', c]).collect();
        let out = clean(&hostile, usize::MAX);
        assert!(!out.chars().any(is_unsafe));
        assert!(out.contains("\\u{1b}") && out.contains("\\u{7f}") && out.contains("\\u{9b}"));
        assert!(out.contains("\\u{202e}") && out.contains("\\u{2066}") && out.contains("\\u{61c}"));
        assert!(out.contains("\\u{2028}") && out.contains("\\n") && out.contains("\\r"));
        assert!(!clean_block(&hostile).chars().any(|c| is_unsafe(c) && c != '\n' && c != '\t'));
    }

    #[test]
    fn long_text_is_cut_with_an_ellipsis_and_escapes_stay_whole() {
        assert_eq!(clean("abcdef", 6), "abcdef");
        assert_eq!(clean("abcdefg", 6), "abcde…");
        assert_eq!(clean("日本日本", 3), "日本…");
        assert_eq!(clean("ab\u{1b}cd", 4), "ab…");
        assert_eq!(clean("abcd\u{1b}", 4), "abc…");
        assert_eq!(clean("x", 0), "");
        assert_eq!(clean("xy", 1), "…");
        for max in 0..40 {
            let out = clean("a\u{1b}b\u{202e}\nc\u{7f}defg hij", max);
            assert!(out.chars().count() <= max, "{max}: {out}");
        }
    }

    #[test]
    fn json_means_the_same_without_its_controls() {
        let value = "a\u{9b}\u{7f}\u{202e}\n\u{1b}";
        let json = serde_json::to_string(&(value, 1)).unwrap();
        let clean = clean_json(&json);
        assert!(!clean.chars().any(is_unsafe), "{clean}");
        let back: Vec<serde_json::Value> = serde_json::from_str(&clean).unwrap();
        assert_eq!(back[0], value);
        assert!(matches!(clean_json("[\"\\u001b\"]"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_block_keeps_its_lines() {
        assert_eq!(clean_block("a\r\nb\rc\u{1b}[2J\n"), "a\nb\\rc\\u{1b}[2J\n");
    }

    #[test]
    fn times_are_utc_milliseconds() {
        let shown = rfc3339;
        assert_eq!(shown(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(shown(951_782_399_999), "2000-02-28T23:59:59.999Z");
        assert_eq!(shown(951_782_400_000), "2000-02-29T00:00:00.000Z");
        assert_eq!(shown(951_868_800_000), "2000-03-01T00:00:00.000Z");
        assert_eq!(shown(1_798_761_599_001), "2026-12-31T23:59:59.001Z");
        assert_eq!(shown(4_107_542_400_000), "2100-03-01T00:00:00.000Z");
    }
}
