//! What the path of a request names below the shared folder, and the hidden names uploads have until
//! they are whole. Pure.
//!
//! A path is decoded once, as the file server does it: `%252e` is the name `%2e`, no dot. What could
//! lead out of the folder on any system is refused, whatever the file server would make of it.

use std::fmt;
use std::path::Path;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use sha2::{Digest as _, Sha256};

/// Everything but the unreserved characters of RFC 3986.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// The longest name Linux takes, in bytes.
const MAX_NAME: usize = 255;
/// The most names in a path.
const MAX_DEPTH: usize = 256;
/// How hidden names begin.
const PART: &str = ".a2mcp-";
/// Hidden names as the file server's pattern; it shows none of them.
pub const PART_PATTERN: &str = ".a2mcp-????????-????????????????";

/// The names from the shared folder down; none at all is the folder itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RoutePath {
    names: Vec<String>,
}

/// Why a path names nothing; the texts are for callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadPath {
    /// It is not UTF-8 once decoded.
    #[error("the path is not UTF-8")]
    NotUtf8,
    /// It holds `.`, `..` or a NUL.
    #[error("the path may not leave the shared folder: no '.', '..' or NUL in any spelling")]
    Traversal,
    /// A name is longer than file systems take.
    #[error("a name in the path is longer than 255 bytes, or there are more than 256 of them")]
    TooLong,
}

impl RoutePath {
    /// Reads the path of a request, `/xfer` or below it, as it was sent.
    ///
    /// # Errors
    /// [`BadPath`].
    pub fn parse(path: &str) -> Result<Self, BadPath> {
        let below = path.strip_prefix("/xfer").unwrap_or(path);
        let decoded = percent_decode_str(below).decode_utf8().map_err(|_| BadPath::NotUtf8)?;
        if decoded.contains('\0') || decoded.split(['/', '\\']).any(|name| name == "." || name == "..") {
            return Err(BadPath::Traversal);
        }
        let names: Vec<String> =
            decoded.split('/').filter(|name| !name.is_empty()).map(str::to_owned).collect();
        if names.len() > MAX_DEPTH || names.iter().any(|name| name.len() > MAX_NAME) {
            return Err(BadPath::TooLong);
        }
        Ok(Self { names })
    }

    /// The file `name` in `folder`, which is relative to the shared one; `None` when that cannot be written
    /// as the path of a request.
    pub fn beneath(folder: &Path, name: &str) -> Option<Self> {
        let folders = folder.iter().map(|name| name.to_str().map(str::to_owned));
        let names = folders.chain([Some(name.to_owned())]).collect::<Option<_>>()?;
        let path = Self { names };
        (Self::parse(&path.to_string()).as_ref() == Ok(&path)).then_some(path)
    }

    /// The names.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The folder's names and the last one; `None` for the shared folder itself.
    pub fn split(&self) -> Option<(&[String], &str)> {
        self.names.split_last().map(|(last, folder)| (folder, last.as_str()))
    }

    /// The last name; empty for the shared folder itself.
    pub fn name(&self) -> &str {
        self.names.last().map_or("", String::as_str)
    }

    /// Whether any of the names is one of ours for an unfinished upload.
    pub fn is_hidden(&self) -> bool {
        self.names.iter().any(|name| is_part(name))
    }

    /// The hidden name beside this one, in the share `id`, for what has arrived of an upload. It follows
    /// from both, so that a later sidecar finds it again.
    pub fn part(&self, id: &str) -> Self {
        let digest = Sha256::digest(self.to_string().as_bytes());
        let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let mut names = self.names.clone();
        names.pop();
        names.push(format!("{}{digest}", part_prefix(id)));
        Self { names }
    }
}

/// Whether the path of a request ends in a slash, in any spelling: it names a folder, there or not.
pub fn names_a_folder(path: &str) -> bool {
    percent_decode_str(path).last() == Some(b'/')
}

/// How the hidden names of the share `id` begin.
pub fn part_prefix(id: &str) -> String {
    format!("{PART}{id}-")
}

/// Whether a name is one of ours for an unfinished upload; some file systems do not mind the case.
pub fn is_part(name: &str) -> bool {
    let name = name.as_bytes();
    let is_hex = |bytes: &[u8]| bytes.iter().all(u8::is_ascii_hexdigit);
    name.len() == PART_PATTERN.len()
        && name[..7].eq_ignore_ascii_case(PART.as_bytes())
        && is_hex(&name[7..15])
        && name[15] == b'-'
        && is_hex(&name[16..])
}

/// One name as it stands in a URL.
pub fn escaped(name: &str) -> String {
    utf8_percent_encode(name, ESCAPED).to_string()
}

/// The path as it is sent to the file server.
impl fmt::Display for RoutePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("/xfer")?;
        if self.names.is_empty() {
            return f.write_str("/");
        }
        self.names.iter().try_for_each(|name| write!(f, "/{}", utf8_percent_encode(name, ESCAPED)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_decoded_once_and_written_back_verbatim() {
        for (path, names, written) in [
            ("/xfer", &[][..], "/xfer/"),
            ("/xfer/", &[], "/xfer/"),
            ("/xfer//a///b/", &["a", "b"], "/xfer/a/b"),
            ("/xfer/a%20b%25%23%3F", &["a b%#?"], "/xfer/a%20b%25%23%3F"),
            ("/xfer/%E6%97%A5/\u{65e5}", &["\u{65e5}", "\u{65e5}"], "/xfer/%E6%97%A5/%E6%97%A5"),
            ("/xfer/..a/...", &["..a", "..."], "/xfer/..a/..."),
            ("/xfer/%252e%252e", &["%2e%2e"], "/xfer/%252e%252e"),
            ("/xfer/a%2fb", &["a", "b"], "/xfer/a/b"),
            ("/xfer/a%5cb", &["a\\b"], "/xfer/a%5Cb"),
        ] {
            let parsed = RoutePath::parse(path).unwrap();
            assert_eq!(parsed.names(), names, "{path}");
            assert_eq!(parsed.to_string(), written);
            assert_eq!(RoutePath::parse(&parsed.to_string()), Ok(parsed));
        }
    }

    #[test]
    fn whatever_could_leave_the_folder_is_refused() {
        for path in [
            "/xfer/..",
            "/xfer/a/../b",
            "/xfer/%2e%2e/a",
            "/xfer/.%2E",
            "/xfer/..%2fa",
            "/xfer/a%2f..",
            "/xfer/..%5ca",
            "/xfer/a%5c..",
            "/xfer/..\\a",
            "/xfer/.",
            "/xfer/./a",
            "/xfer/a%00",
        ] {
            assert_eq!(RoutePath::parse(path), Err(BadPath::Traversal), "{path}");
        }
        for path in ["/xfer/%ff", "/xfer/%c0%ae%c0%ae/a", "/xfer/%ed%a0%80"] {
            assert_eq!(RoutePath::parse(path), Err(BadPath::NotUtf8), "{path}");
        }
        assert!(RoutePath::parse(&format!("/xfer/{}", "n".repeat(255))).is_ok());
        assert_eq!(RoutePath::parse(&format!("/xfer/{}", "n".repeat(256))), Err(BadPath::TooLong));
        assert_eq!(RoutePath::parse(&format!("/xfer{}", "/a".repeat(257))), Err(BadPath::TooLong));
    }

    #[test]
    fn a_slash_at_the_end_names_a_folder() {
        for path in ["/xfer/", "/xfer/a/", "/xfer/a%2f", "/xfer/a//"] {
            assert!(names_a_folder(path), "{path}");
        }
        for path in ["/xfer", "/xfer/a", "/xfer/a%252f", "/xfer/a%5c"] {
            assert!(!names_a_folder(path), "{path}");
        }
    }

    #[test]
    fn a_folder_of_the_file_system_is_a_path_when_it_can_be_asked_for() {
        use std::os::unix::ffi::OsStrExt as _;
        let beneath = |folder: &str, name| RoutePath::beneath(Path::new(folder), name);
        assert_eq!(beneath("a b/\u{65e5}", "f"), RoutePath::parse("/xfer/a%20b/\u{65e5}/f").ok());
        assert_eq!(beneath("", "f"), RoutePath::parse("/xfer/f").ok());
        assert_eq!(beneath("a\\..", "f"), None);
        assert_eq!(RoutePath::beneath(Path::new(std::ffi::OsStr::from_bytes(b"\xff")), "f"), None);
    }

    #[test]
    fn a_part_is_beside_its_file_and_known_by_its_name() {
        let file = RoutePath::parse("/xfer/a/b").unwrap();
        let part = file.part("0123abcd");
        assert_eq!(part.names()[0], "a");
        assert_eq!(part, file.part("0123abcd"));
        assert_ne!(part, file.part("0123abce"));
        assert_ne!(part, RoutePath::parse("/xfer/a/c").unwrap().part("0123abcd"));
        assert!(part.is_hidden() && !file.is_hidden());
        assert!(part.names()[1].starts_with(&part_prefix("0123abcd")));
        assert!(is_part(&part.names()[1].to_uppercase()));
        for name in [".a2mcp-x", ".a2mcp-0123abcd-0123456789abcdeg", "a2mcp-0123abcd-0123456789abcdef1"] {
            assert!(!is_part(name), "{name}");
        }
    }
}
