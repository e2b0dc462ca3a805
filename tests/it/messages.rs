//! Contract 1 from step 6 on, and the byte fidelity of contract 17.

use crate::support::frames::raw_arguments;
use crate::support::http::INITIALIZE;
use crate::support::{Host, Setup, text_result};

#[test]
fn bad_messages_get_the_exact_answers() {
    let host = Host::start();
    let mut client = host.client();
    let long_id = format!("\"{}\"", "x".repeat(1023));
    let bad = |id: &str, code: i32, message: &str| {
        format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":{code},"message":"{message}"}}}}"#)
    };
    let cases: Vec<(String, u16, String)> = vec![
        ("".into(), 400, bad("null", -32700, "parse error")),
        ("{".into(), 400, bad("null", -32700, "parse error")),
        ("nope".into(), 400, bad("null", -32700, "parse error")),
        ("{} {}".into(), 400, bad("null", -32700, "parse error")),
        ("\u{feff}{}".into(), 400, bad("null", -32700, "parse error")),
        ("[]".into(), 400, bad("null", -32600, "invalid request")),
        (r#"[{"jsonrpc":"2.0","id":1,"method":"ping"}]"#.into(), 400, bad("null", -32600, "invalid request")),
        ("7".into(), 400, bad("null", -32600, "invalid request")),
        ("null".into(), 400, bad("null", -32600, "invalid request")),
        ("\"ping\"".into(), 400, bad("null", -32600, "invalid request")),
        ("{}".into(), 400, bad("null", -32600, "invalid request")),
        (r#"{"jsonrpc":"1.0","id":1,"method":"ping"}"#.into(), 400, bad("1", -32600, "invalid request")),
        (r#"{"jsonrpc":2.0,"id":1,"method":"ping"}"#.into(), 400, bad("1", -32600, "invalid request")),
        (r#"{"id":"a","method":"ping"}"#.into(), 400, bad("\"a\"", -32600, "invalid request")),
        (r#"{"jsonrpc":"2.0","id":1,"method":7}"#.into(), 400, bad("1", -32600, "invalid request")),
        (r#"{"jsonrpc":"2.0","id":1}"#.into(), 400, bad("1", -32600, "invalid request")),
        (r#"{"jsonrpc":"2.0","id":{},"method":"ping"}"#.into(), 400, bad("null", -32600, "invalid request")),
        (r#"{"jsonrpc":"2.0","id":[1],"method":"ping"}"#.into(), 400, bad("null", -32600, "invalid request")),
        (
            r#"{"jsonrpc":"2.0","id":true,"method":"ping"}"#.into(),
            400,
            bad("null", -32600, "invalid request"),
        ),
        (
            format!(r#"{{"jsonrpc":"2.0","id":{long_id},"method":"ping"}}"#),
            400,
            bad("null", -32600, "invalid request"),
        ),
        (r#"{"jsonrpc":"2.0","id":1,"method":"nope"}"#.into(), 200, bad("1", -32601, "method not found")),
        (
            r#"{"jsonrpc":"2.0","id":1,"method":"server/discover"}"#.into(),
            200,
            bad("1", -32601, "method not found"),
        ),
        (
            r#"{"jsonrpc":"2.0","method":"ping"}"#.into(),
            200,
            r#"{"jsonrpc":"2.0","id":null,"result":{}}"#.into(),
        ),
        (
            r#"{"jsonrpc":"2.0","id":null,"method":"ping"}"#.into(),
            200,
            r#"{"jsonrpc":"2.0","id":null,"result":{}}"#.into(),
        ),
        (r#"{"jsonrpc":"2.0","method":"notifications/whatever"}"#.into(), 202, "".into()),
        (r#"{"jsonrpc":"2.0","id":5,"method":"notifications/initialized"}"#.into(), 202, "".into()),
        (r#"{"jsonrpc":"2.0","id":5,"result":{}}"#.into(), 202, "".into()),
        (r#"{"jsonrpc":"2.0","id":"q","error":{"code":1,"message":"no"}}"#.into(), 202, "".into()),
    ];
    for (body, status, text) in cases {
        let reply = client.post(&body);
        assert_eq!((reply.status, reply.text()), (status, text), "{body}");
    }
    assert_eq!(client.post("{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}").status, 200);
    client.send("POST", &[], b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"p\xff\"}");
    assert_eq!(client.read().text(), bad("null", -32700, "parse error"));
}

#[test]
fn the_session_is_judged_before_the_method_and_before_the_version() {
    let host = Host::start();
    let ping = br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    let client = host.client();
    let session = ("mcp-session-id", client.session.as_str());
    let unknown = ("mcp-session-id", "00000000-0000-4000-8000-000000000000");
    let bad_version = ("MCP-Protocol-Version", "2031-01-01");
    let error = |message: &str| {
        format!(r#"{{"jsonrpc":"2.0","id":1,"error":{{"code":-32000,"message":"{message}"}}}}"#)
    };
    for (headers, status, text) in [
        (vec![], 400, error("missing mcp-session-id")),
        (vec![bad_version], 400, error("missing mcp-session-id")),
        (vec![unknown, bad_version], 404, error("unknown session")),
        (vec![session, bad_version], 400, error("unsupported protocol version")),
        (
            vec![session, ("MCP-Protocol-Version", "2025-03-26")],
            200,
            r#"{"jsonrpc":"2.0","id":1,"result":{}}"#.into(),
        ),
        (vec![session], 200, r#"{"jsonrpc":"2.0","id":1,"result":{}}"#.into()),
    ] {
        let reply = host.http("POST", "/", &headers, ping);
        assert_eq!((reply.status, reply.text()), (status, text), "{headers:?}");
    }
    // Notifications and answers are judged the same way.
    for body in [
        &br#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#[..],
        br#"{"jsonrpc":"2.0","id":1,"result":1}"#,
    ] {
        assert_eq!(host.http("POST", "/", &[], body).status, 400);
        assert_eq!(host.http("POST", "/", &[unknown], body).status, 404);
        assert_eq!(host.http("POST", "/", &[session], body).status, 202);
    }
    // `initialize` and DELETE are not.
    assert_eq!(host.http("POST", "/", &[unknown, bad_version], INITIALIZE.as_bytes()).status, 200);
    assert_eq!(host.http("DELETE", "/", &[unknown], b"").status, 204);
}

#[test]
fn ids_come_back_byte_for_byte() {
    let host = Host::start();
    let mut client = host.client();
    for id in [
        "0",
        "-0",
        "1.50",
        "1e3",
        "12345678901234567890123",
        "\"\"",
        "\"\\u0041\\ud800\"",
        "\"\u{1F600}\"",
        "\" \\n \"",
        "null",
    ] {
        for method in ["ping", "tools/list", "nope"] {
            let reply = client.post(&format!(r#"{{"id":{id},"method":"{method}","jsonrpc":"2.0"}}"#)).text();
            assert!(reply.starts_with(&format!(r#"{{"jsonrpc":"2.0","id":{id},"#)), "{method} {id}: {reply}");
        }
        client.start_call(id, "echo", "{}");
        assert!(client.read().text().starts_with(&format!(r#"{{"jsonrpc":"2.0","id":{id},"result":"#)));
    }
}

#[test]
fn arguments_and_results_cross_byte_for_byte() {
    let host = Setup::default()
        .handler(|_, _, raw| {
            crate::support::Answer::Result(format!(
                r#"{{"content":[],"isError":false,"_meta":{{"x":{raw}}}}}"#
            ))
        })
        .start();
    let mut client = host.client();
    for arguments in [
        r#"{ "b" : 1.50, "a":12345678901234567890123 ,"b":-0.0e+10 }"#,
        r#"{"lone":"\ud800","pair":"\ud83d\ude00","raw":"😀","esc":"\u0041\/\b","":[[],{}]}"#,
        "null",
        "[1, 2]",
        "\"text\"",
        "7",
    ] {
        let body = format!(
            r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"echo","arguments":{arguments}}}}}"#
        );
        let reply = client.post(&body).text();
        assert_eq!(
            reply,
            format!(
                r#"{{"jsonrpc":"2.0","id":1,"result":{{"content":[],"isError":false,"_meta":{{"x":{arguments}}}}}}}"#
            )
        );
        assert!(host.frames().iter().any(|frame| raw_arguments(frame) == arguments), "{arguments}");
    }
}

#[test]
fn where_a_member_stands_twice_the_last_one_counts_everywhere() {
    let host = Host::start();
    let mut client = host.client();
    let reply = client.post(r#"{"jsonrpc":"2.0","id":1,"id":2,"method":"nope","method":"tools/call","params":{"name":"fail","name":"echo","arguments":{"a":1},"arguments":{"b":2}}}"#).json();
    assert_eq!(reply["id"], 2);
    assert_eq!(reply["result"]["content"][0]["text"], r#"{"b":2}"#);
    assert_eq!(host.audit()[0]["tool"], "echo");
}

#[test]
fn versions_are_negotiated() {
    let host = Host::start();
    for (asked, got) in [
        (r#""2024-11-05""#, "2024-11-05"),
        (r#""2025-03-26""#, "2025-03-26"),
        (r#""2025-06-18""#, "2025-06-18"),
        (r#""2025-11-25""#, "2025-11-25"),
        (r#""2026-07-28""#, "2025-11-25"),
        (r#""1999-01-01""#, "2025-11-25"),
        ("7", "2025-11-25"),
        ("null", "2025-11-25"),
    ] {
        let body = format!(
            r#"{{"jsonrpc":"2.0","id":1,"method":"initialize","params":{{"protocolVersion":{asked}}}}}"#
        );
        let reply = host.http("POST", "/", &[], body.as_bytes());
        let result = &reply.json()["result"];
        assert_eq!(result["protocolVersion"], got, "{asked}");
        assert_eq!(result["serverInfo"]["name"], "a2mcp");
        assert!(result.get("instructions").is_none(), "nothing the host did not give: {result}");
        assert!(reply.header("mcp-session-id").is_some());
    }
    for params in ["", r#","params":null"#, r#","params":[1]"#] {
        let body = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"initialize"{params}}}"#);
        assert_eq!(host.http("POST", "/", &[], body.as_bytes()).status, 200, "{params}");
    }
}

#[test]
fn the_hosts_title_and_instructions_reach_callers() {
    let host = Setup::default()
        .hello(serde_json::json!({"title": "My \"host\"", "instructions": "be\nkind"}))
        .start();
    let result = host.http("POST", "/", &[], INITIALIZE.as_bytes()).json()["result"].clone();
    assert_eq!(result["serverInfo"]["title"], "My \"host\"");
    assert_eq!(result["instructions"], "be\nkind");
}

#[test]
fn a_probe_for_the_next_protocol_falls_back() {
    // Python's default client asks `server/discover` without a session first.
    let host = Host::start();
    let body = br#"{"jsonrpc":"2.0","id":1,"method":"server/discover","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}}}"#;
    let reply = host.http("POST", "/", &[("MCP-Protocol-Version", "2026-07-28")], body);
    assert_eq!((reply.status, reply.json()["id"].clone()), (400, 1.into()));
}

#[test]
fn deep_nesting_is_only_text_to_the_bridge() {
    let host = Setup::default().handler(|_, _, _| text_result("ok")).start();
    let mut client = host.client();
    let deep = format!("{}{}", "[".repeat(100), "]".repeat(100));
    assert_eq!(client.call_text("echo", &deep), "ok");
    let bomb = format!("{}{}", "[".repeat(300_000), "]".repeat(300_000));
    let body = format!(r#"{{"jsonrpc":"2.0","id":{bomb},"method":"ping"}}"#);
    assert_eq!(client.post(&body).status, 400);
    assert_eq!(client.call_text("echo", "{}"), "ok");
}
