use super::*;

const FILE: &str = "/agent/a2mcp.json";
const SECRET: &str = "0123456789abcdef0123456789abcdef";

fn parse(text: &str) -> Result<(Config, Vec<String>), ConfigError> {
    Config::parse(text.as_bytes(), Path::new(FILE))
}

#[track_caller]
fn accepted(text: &str) -> Config {
    let (config, warnings) = parse(text).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    config
}

/// The refusal's text; it always begins with the file.
#[track_caller]
fn refused(text: &str) -> String {
    let error = parse(text).unwrap_err().to_string();
    assert!(error.starts_with("/agent/a2mcp.json: "), "{error}");
    error
}

#[test]
fn an_empty_object_means_the_defaults() {
    assert_eq!(accepted(" {} "), Config::default());
    assert_eq!(accepted(r#"{"$schema":"x"}"#), Config::default());
}

#[test]
fn every_field_is_read() {
    let config = accepted(&format!(
        r#"{{"port":8130,"host":"[::1]","token":"{SECRET}","host_llm":"deny","deny":["a","mcp__x"],
        "denyMCPTools":true,"xfer":{{"dufs":"/opt/dufs","cloudflared":"cf"}},"streaming":"off",
        "streamAfterMs":0,"replayWindowSeconds":86400,"cancelOnDisconnect":true,
        "allowedHosts":["Bridge.Example.COM","10.0.0.7","[fe80::1]"]}}"#
    ));
    let expected = Config {
        port: 8130,
        host: "::1".into(),
        deny_inference: true,
        deny: vec!["a".into(), "mcp__x".into()],
        deny_mcp_tools: true,
        xfer_dufs: "/opt/dufs".into(),
        xfer_cloudflared: "cf".into(),
        streaming: false,
        stream_after: Duration::ZERO,
        replay_window: Duration::from_secs(86400),
        cancel_on_disconnect: true,
        allowed_hosts: vec!["bridge.example.com".into(), "10.0.0.7".into(), "fe80::1".into()],
        token: Token::parse(SECRET),
    };
    assert_eq!(config, expected);
    assert!(accepted(r#"{"streaming":"auto"}"#).streaming);
    assert!(!accepted(r#"{"host_llm":"allow"}"#).deny_inference);
}

#[test]
fn a_malformed_field_refuses_and_names_field_and_expectation() {
    let cases = [
        (r#"{"port":65536}"#, "field `port` must be a whole number from 0 to 65535"),
        (r#"{"port":-1}"#, "field `port` must be a whole number from 0 to 65535"),
        (r#"{"port":1.5}"#, "field `port` must be a whole number from 0 to 65535"),
        (r#"{"port":"80"}"#, "field `port` must be a whole number from 0 to 65535"),
        (r#"{"port":null}"#, "field `port` must be a whole number from 0 to 65535"),
        (r#"{"host":""}"#, "field `host` must be an IP address or a host name"),
        (r#"{"host":"http://x"}"#, "field `host` must be an IP address or a host name"),
        (r#"{"host":"127.0.0.1:80"}"#, "field `host` must be an IP address or a host name"),
        (r#"{"host_llm":"Deny"}"#, r#"field `host_llm` must be "allow" or "deny""#),
        (r#"{"host_llm":true}"#, r#"field `host_llm` must be "allow" or "deny""#),
        (r#"{"deny":"bash"}"#, "field `deny` must be a list"),
        (r#"{"deny":["a",7]}"#, "field `deny[1]` must be a tool name"),
        (r#"{"deny":[""]}"#, "field `deny[0]` must be a tool name"),
        (r#"{"denyMCPTools":1}"#, "field `denyMCPTools` must be true or false"),
        (r#"{"xfer":[]}"#, "field `xfer` must be an object"),
        (r#"{"xfer":{"dufs":""}}"#, "field `xfer.dufs` must be a program name"),
        (r#"{"xfer":{"cloudflared":false}}"#, "field `xfer.cloudflared` must be a program name"),
        (r#"{"streaming":true}"#, r#"field `streaming` must be "off" or "auto""#),
        (r#"{"streamAfterMs":600001}"#, "field `streamAfterMs` must be a whole number from 0 to 600000"),
        (r#"{"replayWindowSeconds":1e3}"#, "field `replayWindowSeconds` must be a whole number"),
        (r#"{"cancelOnDisconnect":"no"}"#, "field `cancelOnDisconnect` must be true or false"),
        (r#"{"allowedHosts":["a:80"]}"#, "field `allowedHosts[0]` must be a host name"),
        (r#"{"allowedHosts":["https://a"]}"#, "field `allowedHosts[0]` must be a host name"),
        (r#"{"port":1,"port":2}"#, "field `port` is given more than once"),
        (r#"{"xfer":{"dufs":"a","dufs":"b"}}"#, "field `xfer.dufs` is given more than once"),
        ("", "the file is empty"),
        (" \n", "the file is empty"),
        ("[]", "must be a JSON object"),
        ("7", "must be a JSON object"),
        ("{\n  \"port\": 1", "not valid JSON: the text ends too early at line 2"),
        ("{\n  \"port\" 1}", "not valid JSON: unexpected text at line 2"),
        ("{} x", "not valid JSON: unexpected text at line 1"),
    ];
    for (text, expected) in cases {
        let error = refused(text);
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn bytes_that_are_not_text_and_huge_files_are_refused() {
    let file = Path::new(FILE);
    let error = Config::parse(b"{\n\"a\": \"\xff\"}", file).unwrap_err().to_string();
    assert!(error.contains("not UTF-8 at line 2 column 7"), "{error}");
    let error = Config::parse(&vec![b' '; MAX_BYTES + 1], file).unwrap_err().to_string();
    assert!(error.contains("larger than 1 MiB"), "{error}");
    let deep = format!("{{\"x\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(parse(&deep).unwrap().1.len(), 1, "depth alone is harmless");
}

#[test]
fn a_refused_token_never_shows() {
    let spaced = format!("{SECRET} x");
    for token in ["hunter2-hunter2", spaced.as_str()] {
        let error = refused(&format!(r#"{{"token":"{token}"}}"#));
        assert!(error.contains("field `token` must be a string of 32 to 4096 characters"), "{error}");
        assert!(!error.contains(token) && !error.contains(&token[..8]), "{error}");
    }
    for text in
        [format!("\"{SECRET}\""), format!("{{\"token\":{SECRET}}}"), format!("{{\"token\":\"{SECRET}")]
    {
        assert!(!refused(&text).contains(SECRET));
    }
    assert!(refused(r#"{"token":null}"#).contains("field `token`"));
    let shown = format!("{:?}", accepted(&format!(r#"{{"token":"{SECRET}"}}"#)));
    assert!(!shown.contains(SECRET), "{shown}");
}

#[test]
fn unknown_fields_warn_and_near_misses_are_named() {
    let (config, warnings) =
        parse(r#"{"a\u001bb":1,"denyMcpTools":true,"xfer":{"Dufs":"x"},"allowed_hosts":[]}"#).unwrap();
    assert_eq!(config, Config::default());
    assert_eq!(
        warnings,
        [
            r"/agent/a2mcp.json: unknown field `a\u{1b}b` is ignored",
            "/agent/a2mcp.json: unknown field `denyMcpTools` is ignored; did you mean `denyMCPTools`?",
            "/agent/a2mcp.json: unknown field `xfer.Dufs` is ignored; did you mean `xfer.dufs`?",
            "/agent/a2mcp.json: unknown field `allowed_hosts` is ignored; did you mean `allowedHosts`?",
        ]
    );
}

#[test]
fn a_host_others_can_reach_warns_of_plain_http() {
    for host in ["0.0.0.0", "::", "192.168.1.4", "bridge.example.com"] {
        let (config, warnings) = parse(&format!(r#"{{"host":"{host}"}}"#)).unwrap();
        assert_eq!(config.host, host);
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].contains("plain HTTP") && warnings[0].contains("SSH"), "{warnings:?}");
    }
    for host in ["127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST", "::1", "[::1]", "::ffff:127.0.0.1"] {
        accepted(&format!(r#"{{"host":"{host}"}}"#));
    }
}
