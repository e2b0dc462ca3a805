//! Reads a JSON object field by field without losing anything: order, spelling and position stay
//! known, so that [`super::store`] can replace one value and leave every other byte alone.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::ops::{Range, RangeInclusive};
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::error::Category;
use serde_json::value::RawValue;

use super::error::{ConfigError, shown};
use crate::text;

/// Most entries of a list.
const MAX_ENTRIES: usize = 4096;

/// A JSON object's fields in the order of the file; names are unique.
pub(super) struct Fields<'a>(Vec<(String, &'a RawValue)>);

impl<'a> Fields<'a> {
    pub(super) fn parse(bytes: &'a [u8], file: &Path) -> Result<Fields<'a>, ConfigError> {
        let file = || file.to_path_buf();
        if bytes.len() > super::MAX_BYTES {
            return Err(ConfigError::TooLarge { file: file() });
        }
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let (line, column) = position(bytes, error.valid_up_to());
            ConfigError::Syntax { file: file(), line, column, problem: "a byte that is not UTF-8" }
        })?;
        if text.trim().is_empty() {
            return Err(ConfigError::Empty { file: file() });
        }
        let raw: &RawValue = serde_json::from_str(text).map_err(|error| ConfigError::Syntax {
            file: file(),
            line: error.line(),
            column: error.column(),
            problem: match error.classify() {
                Category::Eof => "the text ends too early",
                _ => "unexpected text",
            },
        })?;
        let fields = Fields::of(raw).ok_or_else(|| ConfigError::NotObject { file: file() })?;
        match fields.repeated() {
            None => Ok(fields),
            Some(field) => Err(ConfigError::Repeated { file: file(), field: field.to_owned() }),
        }
    }

    /// `None` when `raw` is no object, or one with a name that is no Unicode text.
    fn of(raw: &'a RawValue) -> Option<Fields<'a>> {
        serde_json::from_str(raw.get()).ok()
    }

    fn repeated(&self) -> Option<&str> {
        let mut names: Vec<&str> = self.0.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &'a RawValue)> {
        self.0.iter().map(|(name, value)| (name.as_str(), *value))
    }

    /// Where the value of `name` stands in the text these fields were read from.
    pub(super) fn position(&self, text: &str, name: &str) -> Option<Range<usize>> {
        let (_, value) = self.iter().find(|(known, _)| *known == name)?;
        let start = (value.get().as_ptr() as usize).checked_sub(text.as_ptr() as usize)?;
        let range = start..start + value.get().len();
        (text.get(range.clone()) == Some(value.get())).then_some(range)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Fields<'a>, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Vec<(String, &'de RawValue)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut fields = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    fields.push(entry);
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(Collect).map(Fields)
    }
}

/// One field's value on its way into a type; every refusal names the field.
pub(super) struct Reader<'a> {
    file: &'a Path,
    name: &'a str,
    value: &'a RawValue,
}

impl<'a> Reader<'a> {
    pub(super) fn new(file: &'a Path, name: &'a str, value: &'a RawValue) -> Reader<'a> {
        Reader { file, name, value }
    }

    pub(super) fn malformed(&self, expected: &str) -> ConfigError {
        self.malformed_at(self.name.to_owned(), expected)
    }

    fn malformed_at(&self, field: String, expected: &str) -> ConfigError {
        ConfigError::Field { file: self.file.to_path_buf(), field, expected: expected.to_owned() }
    }

    fn read<T: Deserialize<'a>>(&self, expected: &str) -> Result<T, ConfigError> {
        serde_json::from_str(self.value.get()).map_err(|_| self.malformed(expected))
    }

    pub(super) fn bool(&self) -> Result<bool, ConfigError> {
        self.read("true or false")
    }

    pub(super) fn number(&self, bounds: RangeInclusive<u64>) -> Result<u64, ConfigError> {
        let expected = format!("a whole number from {} to {}", bounds.start(), bounds.end());
        let number = self.read(&expected)?;
        if bounds.contains(&number) { Ok(number) } else { Err(self.malformed(&expected)) }
    }

    pub(super) fn string(&self, expected: &str) -> Result<String, ConfigError> {
        self.read(expected)
    }

    /// The index of the one of `words` that the value is.
    pub(super) fn choice<const N: usize>(&self, words: [&str; N]) -> Result<usize, ConfigError> {
        let expected = words.map(|word| format!("\"{word}\"")).join(" or ");
        let given = self.string(&expected)?;
        words.iter().position(|word| *word == given).ok_or_else(|| self.malformed(&expected))
    }

    pub(super) fn object(&self) -> Result<Fields<'a>, ConfigError> {
        let fields = Fields::of(self.value).ok_or_else(|| self.malformed("an object"))?;
        match fields.repeated() {
            None => Ok(fields),
            Some(inner) => Err(ConfigError::Repeated {
                file: self.file.to_path_buf(),
                field: format!("{}.{inner}", self.name),
            }),
        }
    }

    /// A program's path or bare name.
    pub(super) fn program(&self) -> Result<String, ConfigError> {
        const EXPECTED: &str = "a program name, or a path with a slash";
        let program = self.string(EXPECTED)?;
        let plain = !program.trim().is_empty() && !program.chars().any(char::is_control);
        if plain { Ok(program) } else { Err(self.malformed(EXPECTED)) }
    }

    /// The address to listen on, without the brackets of an IPv6 literal.
    pub(super) fn host(&self) -> Result<String, ConfigError> {
        const EXPECTED: &str = "an IP address or a host name, without scheme or port";
        let given = self.string(EXPECTED)?;
        host(&given).map(Cow::into_owned).ok_or_else(|| self.malformed(EXPECTED))
    }

    pub(super) fn names(&self) -> Result<Vec<String>, ConfigError> {
        self.list("a list of at most 4096 tool names", "a tool name", |name| {
            (!name.is_empty()).then(|| name.to_owned())
        })
    }

    pub(super) fn hosts(&self) -> Result<Vec<String>, ConfigError> {
        self.list(
            "a list of at most 4096 host names",
            "a host name or an IP address, without scheme, port or path",
            |name| host(name).map(|host| host.to_ascii_lowercase()),
        )
    }

    fn list(
        &self,
        expected: &str,
        entry: &str,
        check: impl Fn(&str) -> Option<String>,
    ) -> Result<Vec<String>, ConfigError> {
        let raw: Vec<&RawValue> = self.read(expected)?;
        if raw.len() > MAX_ENTRIES {
            return Err(self.malformed(expected));
        }
        raw.iter()
            .enumerate()
            .map(|(at, value)| {
                let text = serde_json::from_str::<Cow<'_, str>>(value.get()).ok();
                text.and_then(|text| check(&text))
                    .ok_or_else(|| self.malformed_at(format!("{}[{at}]", self.name), entry))
            })
            .collect()
    }
}

/// The warning about a field nobody knows. A near miss is named: `denyMcpTools` must not pass for a
/// lock that was set.
pub(super) fn unknown(file: &Path, name: &str, known: &[&str]) -> String {
    let flat = |name: &str| name.replace(['_', '-'], "").to_ascii_lowercase();
    let meant = known.iter().find(|known| flat(known) == flat(name));
    let hint = meant.map(|known| format!("; did you mean `{known}`?")).unwrap_or_default();
    format!("{}: unknown field `{}` is ignored{hint}", shown(file), text::clean(name, 100))
}

/// A bare host: an IP literal (brackets removed) or a name of letters, digits, `-`, `_` and `.`.
fn host(text: &str) -> Option<Cow<'_, str>> {
    let inner = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    if let Some(inner) = inner {
        return matches!(inner.parse(), Ok(IpAddr::V6(_))).then_some(Cow::Borrowed(inner));
    }
    if text.parse::<IpAddr>().is_ok() {
        return Some(Cow::Borrowed(text));
    }
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
    };
    (text.len() <= 253 && text.split('.').all(label)).then_some(Cow::Borrowed(text))
}

/// Line and column, both from 1, of the byte at `offset`.
fn position(bytes: &[u8], offset: usize) -> (usize, usize) {
    let before = &bytes[..offset.min(bytes.len())];
    let line_start = before.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    (before.iter().filter(|b| **b == b'\n').count() + 1, before.len() - line_start + 1)
}
