//! Contract 1, 2, 9 and 10: who may knock, and in which order it is judged.

use crate::support::http::{Connection, INITIALIZE};
use crate::support::{Host, Setup};

const SSE: (&str, &str) = ("Accept", "text/event-stream");

#[test]
fn the_order_of_checks_is_the_contracts() {
    let host = Host::start();
    let bearer = format!("Bearer {}", host.token);
    let good = ("Authorization", bearer.as_str());
    let evil_host = ("Host", "evil.example");
    let evil_origin = ("Origin", "https://evil.example");
    type Case<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], &'a str, u16, &'a str);
    let cases: &[Case<'_>] = &[
        // 0: fixed paths come before Host and token.
        ("GET", "/livez", &[evil_host], "", 200, "ok"),
        ("GET", "/readyz", &[evil_host, evil_origin], "", 200, "ok"),
        ("GET", "/mcp/v1/health", &[], "", 200, "ok"),
        ("GET", "/livez/guess", &[], "", 404, "not_found"),
        ("GET", "/.well-known/oauth-protected-resource", &[], "", 404, "not_found"),
        ("GET", "/.well-known/oauth-authorization-server", &[good], "", 404, "not_found"),
        ("POST", "/register", &[], "{}", 404, "not_found"),
        ("GET", "/authorize", &[], "", 404, "not_found"),
        ("POST", "/token", &[good], "", 404, "not_found"),
        ("POST", "/livez", &[], "", 405, ""),
        // 1: path and method come before Host and token.
        ("GET", "/", &[], "", 405, ""),
        ("GET", "/", &[good, evil_host], "", 405, ""),
        ("PUT", "/mcp", &[evil_host], "x", 405, ""),
        ("OPTIONS", "/", &[evil_origin], "", 405, ""),
        ("HEAD", "/", &[], "", 405, ""),
        ("GET", "/host-llm", &[good], "", 405, ""),
        ("DELETE", "/host-llm", &[good], "", 405, ""),
        // 2: Host and Origin come before the token.
        ("POST", "/", &[evil_host], "{}", 403, "forbidden host"),
        ("POST", "/", &[good, evil_host], "{}", 403, "forbidden host"),
        ("POST", "/", &[good, evil_origin], "{}", 403, "forbidden origin"),
        ("POST", "/", &[good, ("Origin", "null")], "{}", 403, "forbidden origin"),
        (
            "POST",
            "/",
            &[good, ("Origin", "http://localhost:3000"), evil_origin],
            "{}",
            403,
            "forbidden origin",
        ),
        ("GET", "/", &[SSE, good, evil_origin], "", 403, "forbidden origin"),
        ("DELETE", "/", &[good, evil_origin], "", 403, "forbidden origin"),
        ("GET", "/xfer/a", &[good, evil_host], "", 403, "forbidden host"),
        // 3: the token comes before the body.
        ("POST", "/", &[], "not json", 401, "unauthorized"),
        ("POST", "/", &[("Authorization", "Bearer wrong")], "{}", 401, "unauthorized"),
        ("POST", "/", &[("Authorization", "Basic YTpi")], "{}", 401, "unauthorized"),
        ("POST", "/", &[good, good], "{}", 401, "unauthorized"),
        ("DELETE", "/", &[], "", 401, "unauthorized"),
        ("GET", "/", &[SSE], "", 401, "unauthorized"),
        ("PROPFIND", "/xfer/", &[], "", 401, "unauthorized"),
        ("POST", "/host-llm", &[], "{}", 401, "unauthorized"),
        // 4, 5: no share, no switch.
        ("GET", "/xfer", &[good], "", 404, "nothing is shared"),
        ("PUT", "/xfer/a/b", &[good], "x", 404, "nothing is shared"),
        ("POST", "/host-llm", &[good], "no", 400, "enabled"),
        ("POST", "/host-llm", &[good], r#"{"enabled":1}"#, 400, "enabled"),
        ("POST", "/host-llm", &[good], r#"{"enabled":true}"#, 501, "cannot"),
        // Every path is the endpoint.
        ("POST", "/mcp", &[good], INITIALIZE, 200, "a2mcp"),
        ("POST", "/mcp/", &[good], INITIALIZE, 200, "a2mcp"),
        ("POST", "/mcp/v1/rpc?x=1", &[good], INITIALIZE, 200, "a2mcp"),
        ("POST", "/xferred", &[good], INITIALIZE, 200, "a2mcp"),
        // What passes.
        ("POST", "/", &[good, ("Host", "localhost:1")], INITIALIZE, 200, "a2mcp"),
        ("POST", "/", &[good, ("Host", "[::1]")], INITIALIZE, 200, "a2mcp"),
        ("POST", "/", &[good, ("Origin", "http://127.0.0.1:5173")], INITIALIZE, 200, "a2mcp"),
    ];
    for (method, path, headers, body, status, text) in cases {
        let reply = Connection::open(host.port).request(method, path, headers, body.as_bytes());
        let said = reply.text();
        assert_eq!(reply.status, *status, "{method} {path} {headers:?}: {said}");
        assert!(said.contains(text), "{method} {path} {headers:?}: {said}");
        for never in ["access-control-allow-origin", "www-authenticate", "location"] {
            assert!(reply.header(never).is_none(), "{method} {path}: {never}");
        }
        match status {
            405 => {
                assert!(
                    reply.body.is_empty() && reply.header("allow").is_some(),
                    "{method} {path}: {reply:?}"
                );
            }
            _ => assert_eq!(reply.header("content-type"), Some("application/json"), "{method} {path}"),
        }
    }
    assert_eq!(host.count("tools/call"), 0);
    host.client().call_text("echo", "{}");
}

#[test]
fn the_exact_words_of_refusals() {
    let host = Host::start();
    let reply = Connection::open(host.port).request("POST", "/", &[], b"{}");
    assert_eq!(
        reply.text(),
        r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"unauthorized"}}"#
    );
    let reply = host.http("POST", "/", &[("Host", "a.example")], b"{}");
    assert_eq!(
        reply.text(),
        r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"forbidden host"}}"#
    );
}

#[test]
fn an_ambiguous_target_is_refused() {
    let host = Host::start();
    let port = host.port;
    for request in [
        format!("POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n{{}}"),
        "POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n{}".to_owned(),
        "POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}".to_owned(),
        "POST / HTTP/1.1\r\nHost: a@127.0.0.1\r\nContent-Length: 2\r\n\r\n{}".to_owned(),
    ] {
        let mut connection = Connection::open(port);
        connection.write(request.as_bytes()).unwrap();
        assert_eq!(connection.read().unwrap().status, 400, "{request}");
    }
    host.client().call_text("echo", "{}");
}

#[test]
fn configured_names_pass() {
    let host = Setup::default().config(r#"{"allowedHosts":["bridge.example"]}"#).start();
    let allowed = [("Host", "Bridge.Example:8443"), ("Origin", "https://bridge.example")];
    assert_eq!(host.http("POST", "/", &allowed, INITIALIZE.as_bytes()).status, 200);
    assert_eq!(host.http("POST", "/", &[("Host", "sub.bridge.example")], b"{}").status, 403);
}

#[test]
fn failed_auth_is_logged_first_and_every_fiftieth_time_and_never_audited() {
    let host = Host::start();
    let mut connection = Connection::open(host.port);
    let secret = "Bearer this-is-a-wrong-token-that-must-not-be-logged";
    for _ in 0..100 {
        assert_eq!(connection.request("POST", "/", &[("Authorization", secret)], b"{}").status, 401);
    }
    let log = host.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("unauthorized attempt(s)")).collect();
    assert_eq!(lines.len(), 3, "{log}");
    assert!(lines[2].contains("[a2mcp] 100 unauthorized attempt(s)"), "{log}");
    assert!(!log.contains("wrong-token") && !log.contains(&host.token));
    assert!(host.audit().is_empty());
}

#[test]
fn probes_never_touch_the_host() {
    let host = Host::start();
    let before = host.frames().len();
    for path in ["/livez", "/readyz", "/mcp/v1/health"] {
        for method in ["GET", "HEAD"] {
            assert_eq!(Connection::open(host.port).request(method, path, &[], b"").status, 200);
        }
    }
    assert_eq!(host.frames().len(), before);
}

#[test]
fn readiness_says_that_the_bridge_is_starting() {
    let mut host = Setup { lists: false, ..Setup::default() }.spawn();
    host.expect_hello();
    let reply = Connection::open(host.port).request("GET", "/readyz", &[], b"");
    assert_eq!((reply.status, reply.json()["reason"].as_str().unwrap()), (503, "starting"));
    assert_eq!(Connection::open(host.port).request("GET", "/livez", &[], b"").status, 200);
}
