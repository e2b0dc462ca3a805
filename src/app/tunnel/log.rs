//! What cloudflared's output says, read as a whole each time: its form is text or JSON, by version.
//! The second source; host name and readiness are asked from its metrics port.

use serde_json::Value;

use super::failure::{Failure, words};
use crate::http::guard::{Name, host_name};

/// Longest host name.
const MAX_NAME: usize = 253;

/// What the output says so far.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// The tunnel's host name, from the box.
    pub(super) name: Option<String>,
    /// Where its metrics are.
    pub(super) metrics: Option<u16>,
    /// What it speaks with the edge, since it is registered.
    pub(super) protocol: Option<String>,
    /// QUIC did not get out.
    pub(super) fell_back: bool,
    /// What was wrong last, unless it has registered since.
    pub(super) trouble: Option<Failure>,
    /// Why it ends, when it says so.
    pub(super) fatal: Option<Failure>,
    /// The flag it does not know.
    pub(super) unknown_flag: Option<String>,
    /// The last line.
    pub(super) last: String,
}

impl Facts {
    /// Reads the end of both streams.
    pub(super) fn read(stdout: &str, stderr: &str) -> Self {
        let mut facts = Self::default();
        for line in stderr.lines().filter(|line| !line.trim().is_empty()) {
            facts.line(line);
        }
        if let Some(usage) = stdout.lines().find_map(|line| line.strip_prefix("Incorrect Usage. ")) {
            let flag = usage.strip_prefix("flag provided but not defined: -").map(str::trim);
            facts.unknown_flag = flag.map(|flag| flag.trim_start_matches('-').to_owned());
            facts.fatal = Some(Failure::Usage(words(usage)));
        }
        facts
    }

    fn line(&mut self, line: &str) {
        let (message, fields) = parts(line);
        self.last = words(&message);
        if let Some(boxed) = message.strip_prefix('|') {
            self.name = self.name.take().or_else(|| name_in_box(boxed));
        } else if let Some(at) = message.strip_prefix("Starting metrics server on ") {
            let port = at.split('/').next().and_then(|at| at.rsplit(':').next());
            self.metrics = port.and_then(|port| port.parse().ok());
        } else if message.starts_with("Registered tunnel connection") {
            self.protocol = field(&message, &fields, "protocol").map(|protocol| words(&protocol));
            self.trouble = None;
        } else if message.starts_with("Switching to fallback protocol http2") {
            self.fell_back = true;
        } else if message.starts_with("Error unmarshaling QuickTunnel response") {
            let status = field(&message, &fields, "status_code").unwrap_or_default();
            let is_limit = status.starts_with("429") || message.contains("error code: 1015");
            let page = if status.is_empty() { "not JSON".to_owned() } else { words(&status) };
            self.fatal = Some(if is_limit { Failure::RateLimited } else { Failure::Page(page) });
        } else if message.starts_with("failed to unmarshal quick Tunnel") {
            self.fatal.get_or_insert_with(|| Failure::Page("not JSON".into()));
        } else if message.starts_with("failed to parse quick Tunnel ID") {
            self.fatal = Some(Failure::NoTunnel);
        } else if let Some(why) = message.strip_prefix("failed to request quick Tunnel: ") {
            self.fatal = Some(service(why));
        } else if let Some(trouble) = trouble(&message, &fields) {
            self.trouble = Some(trouble);
        }
    }
}

/// Message, and the fields of a line in JSON.
fn parts(line: &str) -> (String, Value) {
    let line = line.trim();
    if line.starts_with('{')
        && let Ok(mut fields) = serde_json::from_str::<Value>(line)
        && let Some(message) = fields["message"].take().as_str()
    {
        return (message.trim().to_owned(), fields);
    }
    // `2026-11-29T19:35:36Z INF message key=value`
    let mut rest = line.splitn(3, ' ');
    let message = match (rest.next(), rest.next(), rest.next()) {
        (Some(time), Some(level), Some(message))
            if time.ends_with('Z')
                && level.len() == 3
                && level.bytes().all(|byte| byte.is_ascii_uppercase()) =>
        {
            message
        }
        _ => line,
    };
    (message.trim().to_owned(), Value::Null)
}

/// A field of a line, from JSON or from `key=value` and `key="value"`.
fn field(message: &str, fields: &Value, key: &str) -> Option<String> {
    if let Some(value) = fields[key].as_str() {
        return Some(value.to_owned());
    }
    let (_, rest) = message.split_once(&format!(" {key}="))?;
    match rest.strip_prefix('"') {
        Some(quoted) => quoted.split('"').next().map(str::to_owned),
        None => rest.split(' ').next().map(str::to_owned),
    }
}

/// The name in a line of the box, which holds nothing but the URL.
fn name_in_box(boxed: &str) -> Option<String> {
    let inner = boxed.trim().strip_suffix('|')?.trim();
    name(inner.strip_prefix("https://")?)
}

/// A host name that may stand in a `Host` header and in a URL; `None` for anything else.
pub(super) fn name(text: &str) -> Option<String> {
    let is_name = text.len() <= MAX_NAME && text.contains('.') && !text.contains(':');
    match host_name(text) {
        Some(Name::Other(name)) if is_name => Some(name.to_ascii_lowercase()),
        _ => None,
    }
}

/// Why the quick service could not be asked. `why` is `Post "URL": reason`.
fn service(why: &str) -> Failure {
    let reason = why.rsplit_once("\": ").map_or(why, |(_, reason)| reason);
    if reason.contains("no such host") || reason.contains("lookup ") {
        Failure::ServiceDns(words(reason))
    } else if reason.contains("timeout") || reason.contains("deadline exceeded") {
        Failure::ServiceTimeout
    } else {
        Failure::ServiceUnreachable(if reason == "EOF" {
            "it closed the connection".into()
        } else {
            words(reason)
        })
    }
}

/// What a line says of the way to the edge.
fn trouble(message: &str, fields: &Value) -> Option<Failure> {
    let error = || field(message, fields, "error").unwrap_or_default();
    if message.contains("Tunnel not found") || error().contains("Tunnel not found") {
        Some(Failure::Deleted)
    } else if message.starts_with("Register tunnel error from server side") {
        Some(Failure::Refused(words(&error())))
    } else if let Some(why) = message.strip_prefix("initial tunnel connection failed") {
        Some(Failure::Refused(words(why.trim_start_matches(':'))))
    } else if message.contains("connection with edge closed")
        || error().contains("connection with edge closed")
    {
        Some(Failure::EdgeClosed)
    } else if message.starts_with("Failed to dial a quic connection") {
        Some(Failure::EdgeUnreachable(format!("QUIC (UDP): {}", words(&error()))))
    } else if message.starts_with("Unable to establish connection with Cloudflare edge") {
        Some(Failure::EdgeUnreachable(words(&error())))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(stderr: &str) -> Facts {
        Facts::read("", stderr)
    }

    #[test]
    fn text_and_json_say_the_same() {
        let text = of(concat!(
            "2026-11-29T19:35:36Z INF |  https://inlet-jade-pearl-river.trycloudflare.com       |\n",
            "2026-11-29T19:35:36Z INF Starting metrics server on 127.0.0.1:45895/metrics\n",
            "2026-11-29T19:35:36Z INF Registered tunnel connection connIndex=0 location=ams01 protocol=http2\n",
        ));
        let json = of(concat!(
            r#"{"level":"info","time":"t","message":"|  https://inlet-jade-pearl-river.trycloudflare.com       |"}"#,
            "\n",
            r#"{"level":"info","message":"Starting metrics server on 127.0.0.1:45895/metrics","time":"t"}"#,
            "\n",
            r#"{"level":"info","connIndex":0,"protocol":"http2","time":"t","message":"Registered tunnel connection"}"#,
        ));
        for facts in [&text, &json] {
            assert_eq!(facts.name.as_deref(), Some("inlet-jade-pearl-river.trycloudflare.com"));
            assert_eq!((facts.metrics, facts.protocol.as_deref()), (Some(45895), Some("http2")));
            assert_eq!((&facts.trouble, &facts.fatal), (&None, &None));
        }
    }

    #[test]
    fn only_the_box_names_the_tunnel() {
        let other = of(concat!(
            "failed to request quick Tunnel: Post \"https://api.trycloudflare.com/tunnel\": EOF\n",
            "2026-11-29T19:35:36Z INF |  Your quick Tunnel has been created! Visit https://x.example |\n",
            "2026-11-29T19:35:36Z INF |  https://                  |\n",
            "2026-11-29T19:35:36Z INF |  https://user@x.example/path  |\n",
        ));
        assert_eq!(other.name, None);
        assert_eq!(other.fatal, Some(Failure::ServiceUnreachable("it closed the connection".into())));
    }

    #[test]
    fn each_failure_has_its_name() {
        let unparsed = "2026-11-29T19:35:36Z ERR Error unmarshaling QuickTunnel response: ";
        let post = r#"failed to request quick Tunnel: Post "https://api.trycloudflare.com/tunnel": "#;
        let limit = format!(
            "{unparsed}error code: 1015 error=\"invalid character 'e'\" status_code=\"429 Too Many Requests\"\nfailed to unmarshal quick Tunnel: invalid character 'e' looking for beginning of value"
        );
        let page = format!(
            "{unparsed}<html> error=\"x\" status_code=\"500 Internal Server Error\"\nfailed to unmarshal quick Tunnel: x"
        );
        for (log, failure) in [
            (limit.as_str(), Failure::RateLimited),
            (&page, Failure::Page("500 Internal Server Error".into())),
            ("failed to unmarshal quick Tunnel: invalid character", Failure::Page("not JSON".into())),
            ("failed to parse quick Tunnel ID: invalid UUID length: 0", Failure::NoTunnel),
            (&format!("{post}net/http: timeout awaiting response headers"), Failure::ServiceTimeout),
            (
                &format!("{post}dial tcp: lookup api.trycloudflare.com on 127.0.0.53:53: no such host"),
                Failure::ServiceDns(
                    "dial tcp: lookup api.trycloudflare.com on 127.0.0.53:53: no such host".into(),
                ),
            ),
            (
                &format!("{post}dial tcp 1.2.3.4:443: connect: connection refused"),
                Failure::ServiceUnreachable("dial tcp 1.2.3.4:443: connect: connection refused".into()),
            ),
        ] {
            assert_eq!(of(log).fatal, Some(failure), "{log}");
        }
        let usage = Facts::read("Incorrect Usage. flag provided but not defined: -output\n\nNAME:\n", "");
        assert_eq!(usage.unknown_flag.as_deref(), Some("output"));
        assert!(matches!(usage.fatal, Some(Failure::Usage(_))));
    }

    #[test]
    fn trouble_lasts_until_it_registers() {
        let gone = r#"{"level":"error","error":"Unauthorized: Tunnel not found","message":"Register tunnel error from server side"}"#;
        let registered = "2026-11-29T19:35:36Z INF Registered tunnel connection connIndex=0 protocol=quic";
        assert_eq!(of(gone).trouble, Some(Failure::Deleted));
        assert_eq!(of(&format!("{gone}\n{registered}")).trouble, None);
        assert_eq!(of(&format!("{registered}\n{gone}")).trouble, Some(Failure::Deleted));
        let quic = "2026-11-29T19:35:36Z ERR Failed to dial a quic connection error=\"timeout: no recent network activity\" connIndex=0";
        assert_eq!(
            of(quic).trouble,
            Some(Failure::EdgeUnreachable("QUIC (UDP): timeout: no recent network activity".into()))
        );
        let fallback = "2026-11-29T19:35:36Z INF Switching to fallback protocol http2 connIndex=0";
        assert!(of(&format!("{quic}\n{fallback}\n{registered}")).fell_back);
    }

    #[test]
    fn hostile_output_is_only_text() {
        let facts = of("\u{1b}[31mboo\u{202e}\n{\"message\":7}\n|\n||\n=\nZ INF\n\"\"\" =\"");
        assert!(facts.name.is_none() && facts.fatal.is_none() && !facts.last.contains('\u{1b}'));
        for bad in
            ["", "x", "a b.example", "localhost", "127.0.0.1", "a.example:80", "a/b.c", &"a.".repeat(200)]
        {
            assert_eq!(name(bad), None, "{bad}");
        }
        assert_eq!(name("A-b.TryCloudflare.com").as_deref(), Some("a-b.trycloudflare.com"));
    }
}
