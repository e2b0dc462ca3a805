//! JSON objects read and rewritten byte for byte: keys and values stay the sender's own text, so
//! numbers keep their digits, strings their escapes (lone surrogates too), objects their order and
//! their duplicate keys. Where one key stands twice, the last one counts, as in JavaScript.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// An object as the ordered list of its members.
#[derive(Debug, Default)]
pub struct RawObject<'a> {
    /// Key (its JSON text, quotes included) and value.
    pub members: Vec<(&'a RawValue, &'a RawValue)>,
}

impl<'a> RawObject<'a> {
    /// Reads `json` as an object; `None` when it is anything else.
    pub fn parse(json: &'a str) -> Option<Self> {
        serde_json::from_str(json).ok()
    }

    /// The last value under `key`.
    pub fn get(&self, key: &str) -> Option<&'a RawValue> {
        self.members.iter().rev().find(|(name, _)| key_is(name, key)).map(|(_, value)| *value)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for RawObject<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members<'a>(std::marker::PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for Members<'a> {
            type Value = RawObject<'a>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawObject<'a>, A::Error> {
                let mut members = Vec::with_capacity(map.size_hint().unwrap_or(4));
                while let Some(member) = map.next_entry::<&RawValue, &RawValue>()? {
                    members.push(member);
                }
                Ok(RawObject { members })
            }
        }
        deserializer.deserialize_map(Members(std::marker::PhantomData))
    }
}

/// Whether the JSON text `raw` is the string `expected`, however it is escaped.
pub fn key_is(raw: &RawValue, expected: &str) -> bool {
    let text = raw.get();
    let inner = text.get(1..text.len() - 1).unwrap_or_default();
    if inner.contains('\\') { string(raw).is_some_and(|value| value == expected) } else { inner == expected }
}

/// The text of a JSON string; `None` when `raw` is no string. A lone surrogate, which no Rust
/// string can hold, becomes U+FFFD: the raw text is what travels on.
pub fn string(raw: &RawValue) -> Option<Cow<'_, str>> {
    let text = raw.get();
    if !text.starts_with('"') {
        return None;
    }
    let inner = text.get(1..text.len() - 1)?;
    if !inner.contains('\\') {
        return Some(Cow::Borrowed(inner));
    }
    match serde_json::from_str::<String>(text) {
        Ok(value) => Some(Cow::Owned(value)),
        Err(_) => {
            struct Wtf8(Vec<u8>);
            impl<'de> Deserialize<'de> for Wtf8 {
                fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                    struct Octets;
                    impl Visitor<'_> for Octets {
                        type Value = Wtf8;
                        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                            f.write_str("a string")
                        }
                        fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Wtf8, E> {
                            Ok(Wtf8(bytes.to_vec()))
                        }
                    }
                    deserializer.deserialize_bytes(Octets)
                }
            }
            let Wtf8(bytes) = serde_json::from_str(text).ok()?;
            Some(Cow::Owned(String::from_utf8_lossy(&bytes).into_owned()))
        }
    }
}

/// `text` as a JSON string literal.
pub fn quote(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_else(|_| "\"\"".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_keep_their_text_order_and_duplicates() {
        let object =
            RawObject::parse(r#" { "b" : 1.50, "\u0061":"\ud800", "b":12345678901234567890123 } "#).unwrap();
        let texts: Vec<_> = object.members.iter().map(|(k, v)| (k.get(), v.get())).collect();
        assert_eq!(
            texts,
            [("\"b\"", "1.50"), ("\"\\u0061\"", "\"\\ud800\""), ("\"b\"", "12345678901234567890123")]
        );
        assert_eq!(object.get("b").unwrap().get(), "12345678901234567890123");
        assert_eq!(object.get("a").unwrap().get(), "\"\\ud800\"");
        assert!(RawObject::parse("[]").is_none());
        assert!(RawObject::parse("{").is_none());
    }

    #[test]
    fn a_lone_surrogate_reads_as_a_replacement_character() {
        let raw: &RawValue = serde_json::from_str(r#""a\ud800b""#).unwrap();
        let text = string(raw).unwrap();
        assert!(text.starts_with('a') && text.ends_with('b') && text.contains('\u{FFFD}'), "{text}");
    }

    #[test]
    fn nesting_without_end_is_read_without_recursion() {
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(200_000), "]".repeat(200_000));
        assert!(RawObject::parse(&deep).is_some());
    }
}
