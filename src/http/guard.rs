//! The pure rules about who may knock: `Host` and `Origin` (contract 9), the bearer scheme
//! (contract 2).

use std::net::{IpAddr, Ipv6Addr};

/// What a host name in `Host` or `Origin` is.
#[derive(Debug, PartialEq, Eq)]
pub enum Name<'a> {
    /// An IP literal or `localhost`: a rebinding attack needs a name, so these always pass.
    Local,
    /// Any other name, as it was written.
    Other(&'a str),
}

/// Reads the value of `Host`, or the authority of an `Origin`; the port is ignored. `None` when it
/// is no host at all.
pub fn host_name(authority: &str) -> Option<Name<'_>> {
    let authority = authority.trim_matches([' ', '\t']);
    if let Some(rest) = authority.strip_prefix('[') {
        let (address, port) = rest.split_once(']')?;
        address.parse::<Ipv6Addr>().ok()?;
        return (port.is_empty() || is_port(port.strip_prefix(':')?)).then_some(Name::Local);
    }
    let name = match authority.split_once(':') {
        Some((name, port)) if is_port(port) => name,
        Some(_) => return None,
        None => authority,
    };
    if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte)) {
        return None;
    }
    let is_local = name.parse::<IpAddr>().is_ok() || name.eq_ignore_ascii_case("localhost");
    Some(if is_local { Name::Local } else { Name::Other(name) })
}

/// Reads an `Origin`; `None` for `null` and whatever is no web origin.
pub fn origin_name(origin: &str) -> Option<Name<'_>> {
    let (scheme, authority) = origin.split_once("://")?;
    (scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https")).then_some(())?;
    host_name(authority)
}

fn is_port(port: &str) -> bool {
    port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit())
}

/// The credentials of an `Authorization: Bearer …`; the scheme in any case, then white space.
pub fn bearer(authorization: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = authorization.split_at_checked(6)?;
    if !scheme.eq_ignore_ascii_case(b"bearer") || !rest.first()?.is_ascii_whitespace() {
        return None;
    }
    Some(rest.trim_ascii()).filter(|token| !token.is_empty())
}

/// Whether an `Accept` value names `text/event-stream`.
pub fn names_event_stream(accept: &str) -> bool {
    accept.split(',').any(|range| {
        let kind = range.split(';').next().unwrap_or_default();
        kind.trim().eq_ignore_ascii_case("text/event-stream")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_names_pass_and_others_are_named() {
        for host in
            ["127.0.0.1", "127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]", "[::1]:80", "10.1.2.3"]
        {
            assert_eq!(host_name(host), Some(Name::Local), "{host}");
        }
        for (host, name) in [
            ("evil.example", "evil.example"),
            ("A.b:80", "A.b"),
            ("localhost.evil.example", "localhost.evil.example"),
            ("127.0.0.1.evil.example:1", "127.0.0.1.evil.example"),
        ] {
            assert_eq!(host_name(host), Some(Name::Other(name)), "{host}");
        }
        for host in [
            "",
            ":80",
            "a b",
            "a@b",
            "user:pw@127.0.0.1",
            "[::1",
            "[x]",
            "[::1]x",
            "a:b",
            "a/b",
            "127.0.0.1:80:80",
        ] {
            assert_eq!(host_name(host), None, "{host}");
        }
    }

    #[test]
    fn origins_are_web_origins() {
        assert_eq!(origin_name("http://localhost:3000"), Some(Name::Local));
        assert_eq!(origin_name("https://evil.example"), Some(Name::Other("evil.example")));
        for origin in ["null", "", "file://", "chrome-extension://abc", "localhost", "http://"] {
            assert_eq!(origin_name(origin), None, "{origin}");
        }
    }

    #[test]
    fn the_bearer_scheme_is_read_in_any_case() {
        for value in ["Bearer abc", "bearer abc", "BEARER \t abc  "] {
            assert_eq!(bearer(value.as_bytes()), Some(&b"abc"[..]), "{value}");
        }
        for value in ["", "Bearer", "Bearer ", "Bearerabc", "Basic abc", "Bearer\u{a0}abc"] {
            assert_eq!(bearer(value.as_bytes()), None, "{value}");
        }
    }

    #[test]
    fn accept_is_read_range_by_range() {
        assert!(names_event_stream("application/json, Text/Event-Stream;q=0.5"));
        assert!(!names_event_stream("application/json, text/*, */*"));
    }
}
