//! Contract 4, `tools/list`, and complaints T1, T2, T3, C7: the host's tools reach every client, and
//! the list needs no host once it has been seen.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::http::{Client, INITIALIZE};
use crate::support::{Answer, Host, Setup, eventually, result_of, text_result};

/// The sidecar's own tools; they end every list.
const OWN: [&str; 3] = ["xfer_share", "xfer_status", "xfer_stop"];

/// The reply's text of a `tools/list` with id 1, without the sidecar's own tools at its end.
fn list(client: &mut Client) -> String {
    hosts_part(&client.post(r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#).text())
}

fn hosts_part(list: &str) -> String {
    let (hosts, own) = list.split_once(r#",{"name":"xfer_share","#).expect("the own tools");
    let own: Value =
        serde_json::from_str(&format!(r#"[{{"name":"xfer_share",{}"#, own.trim_end_matches("}}")))
            .expect("nothing but tools");
    let named: Vec<_> = own.as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert_eq!(named, OWN);
    format!("{hosts}]}}}}")
}

fn listed(tools: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":1,"result":{{"tools":{tools}}}}}"#)
}

fn names(client: &mut Client) -> Vec<String> {
    let mut names = all_names(client);
    assert_eq!(names.split_off(names.len() - OWN.len()), OWN);
    names
}

fn all_names(client: &mut Client) -> Vec<String> {
    let reply = client.post(r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#).json();
    let tools = reply["result"]["tools"].as_array().unwrap();
    tools.iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn the_hosts_list_is_served_verbatim_and_in_its_order() {
    let tools = r#"[{"name":"zeta","description":"d\u00e9j\ud800","inputSchema":{"type":"object","properties":{"n":{"maximum":1.50e400,"default":null}},"x-big":12345678901234567890123},"annotations":{"readOnlyHint":true},"outputSchema":{"type":"object"},"_meta":{"a":[1.0]}},{"name":"alpha","inputSchema":{"required":[],"type":"object"}}]"#;
    let host = Setup::default().tools(tools).start();
    let mut client = host.client();
    for _ in 0..3 {
        assert_eq!(list(&mut client), listed(tools));
    }
    let with_cursor = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"cursor":"abc","x":1}}"#;
    assert_eq!(hosts_part(&client.post(with_cursor).text()), listed(tools), "one page, whatever the cursor");
    assert_eq!(host.count("tools/list"), 1, "asked once, served from memory");
}

#[test]
fn one_odd_schema_removes_no_tool() {
    let odd = [
        (
            r#"{"anyOf":[{"type":"null"},{"required":["a"]}]}"#,
            r#"{"type":"object","anyOf":[{"type":"null"},{"required":["a"]}]}"#,
        ),
        (r#"{"oneOf":[true],"allOf":[{}]}"#, r#"{"type":"object","oneOf":[true],"allOf":[{}]}"#),
        (r#"{"type":"string","minLength":1}"#, r#"{"type":"object","minLength":1}"#),
        (r#"{"properties":{"a":{}}}"#, r#"{"type":"object","properties":{"a":{}}}"#),
        ("true", r#"{"type":"object"}"#),
        ("false", r#"{"type":"object"}"#),
        ("null", r#"{"type":"object"}"#),
        (
            r##"{"type":"object","$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}"##,
            r##"{"type":"object","$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}"##,
        ),
        (
            r#"{"$schema":"http://json-schema.org/draft-07/schema#","type":"object","definitions":{}}"#,
            r#"{"$schema":"http://json-schema.org/draft-07/schema#","type":"object","definitions":{}}"#,
        ),
        (
            r#"{"type":"object","properties":null,"required":null,"additionalProperties":false}"#,
            r#"{"type":"object","additionalProperties":false}"#,
        ),
    ];
    let tools = |schema: fn(&(&'static str, &'static str)) -> &'static str| {
        let tools: Vec<String> = odd
            .iter()
            .enumerate()
            .map(|(at, pair)| format!(r#"{{"name":"t{at}","inputSchema":{}}}"#, schema(pair)))
            .collect();
        format!("[{}]", tools.join(","))
    };
    let host = Setup::default().tools(&tools(|pair| pair.0)).handler(|_, _, raw| text_result(raw)).start();
    let mut client = host.client();
    assert_eq!(list(&mut client), listed(&tools(|pair| pair.1)));
    for at in 0..odd.len() {
        let arguments = r#"{"a":null,"b":[1.50]}"#;
        assert_eq!(client.call_text(&format!("t{at}"), arguments), arguments, "the original arguments pass");
    }
}

#[test]
fn explicit_nulls_and_broken_entries_reach_no_client() {
    let host = Setup::default()
        .tools(r#"[7,{"name":null},{"name":"a","title":null,"description":null,"outputSchema":null,"annotations":{"title":null,"readOnlyHint":true}},{"name":"a","description":"again"},{"description":"nameless"},{"name":"b"}]"#)
        .start();
    assert_eq!(
        list(&mut host.client()),
        listed(
            r#"[{"name":"a","annotations":{"readOnlyHint":true},"inputSchema":{"type":"object"}},{"name":"b","inputSchema":{"type":"object"}}]"#
        )
    );
    assert!(host.log().contains("count=4"), "{}", host.log());
}

#[test]
fn odd_names_pass_verbatim_and_status_names_them() {
    let odd = ["a.b", "a/b", "ns:tool", "\u{9577}\u{3044}\u{540D}\u{524D}", "with space", &"n".repeat(120)];
    let tools: Vec<Value> = odd
        .iter()
        .chain(&["plain_name-1"])
        .map(|name| serde_json::json!({"name": name, "inputSchema": {"type": "object"}}))
        .collect();
    let host = Setup::default()
        .tools(&Value::from(tools).to_string())
        .handler(|name, _, _| text_result(name))
        .start();
    let mut client = host.client();
    assert_eq!(names(&mut client), [&odd[..], &["plain_name-1"]].concat());
    for name in odd {
        assert_eq!(client.call_text(name, "{}"), name);
    }
    assert_eq!(host.status()["oddNames"], serde_json::json!(odd));
    let screen = host.cli(&["status"]).1;
    assert!(screen.contains("some clients refuse these tool names: a.b, a/b"), "{screen}");
}

#[test]
fn results_hold_only_what_clients_know() {
    let host = Setup::default()
        .handler(|_, _, raw| {
            let arguments: Value = serde_json::from_str(raw).unwrap();
            Answer::Result(arguments["result"].as_str().unwrap().to_owned())
        })
        .start();
    let mut client = host.client();
    for (given, got) in [
        // Known kinds and their members pass byte for byte.
        (
            r#"{"content":[{"type":"text","text":"\ud800","annotations":{"priority":1.0}},{"type":"image","data":"AA==","mimeType":"image/png"},{"type":"audio","data":"AA==","mimeType":"audio/wav"},{"type":"resource","resource":{"uri":"a:b","text":""}},{"type":"resource_link","uri":"a:b","name":"n"}],"isError":false}"#,
            r#"{"content":[{"type":"text","text":"\ud800","annotations":{"priority":1.0}},{"type":"image","data":"AA==","mimeType":"image/png"},{"type":"audio","data":"AA==","mimeType":"audio/wav"},{"type":"resource","resource":{"uri":"a:b","text":""}},{"type":"resource_link","uri":"a:b","name":"n"}],"isError":false}"#,
        ),
        // Any other kind becomes text holding its JSON.
        (
            r#"{"content":[{"type":"video","n":1.50},"bare"],"isError":false}"#,
            r#"{"content":[{"type":"text","text":"{\"type\":\"video\",\"n\":1.50}"},{"type":"text","text":"\"bare\""}],"isError":false}"#,
        ),
        (
            r#"{"content":[],"structuredContent":{"a":1.50},"isError":false}"#,
            r#"{"content":[],"structuredContent":{"a":1.50},"isError":false}"#,
        ),
        (r#"{"content":[],"structuredContent":{"a":1},"isError":true}"#, r#"{"content":[],"isError":true}"#),
        (r#"{"content":[],"structuredContent":7,"isError":false}"#, r#"{"content":[],"isError":false}"#),
        (r#"{"structuredContent":{}}"#, r#"{"content":[],"structuredContent":{},"isError":false}"#),
    ] {
        let arguments = serde_json::json!({"result": given});
        client.start_call("1", "echo", &arguments.to_string());
        assert_eq!(client.read().text(), format!(r#"{{"jsonrpc":"2.0","id":1,"result":{got}}}"#), "{given}");
    }
    for no_result in ["7", "null", "[]", "\"text\""] {
        let result = client.call("echo", &serde_json::json!({"result": no_result}).to_string());
        assert_eq!(result["isError"], true, "{no_result}");
        assert!(result["content"][0]["text"].as_str().unwrap().contains("no MCP tool result"));
    }
}

#[test]
fn denied_names_are_not_listed_and_called_like_unknown_ones() {
    let tools = r#"[{"name":"bash"},{"name":"read"},{"name":"mcp__self__read"},{"name":"mcp_other"}]"#;
    let host = Setup::default()
        .config(r#"{"deny":["bash","xfer_share","nobody"],"denyMCPTools":true}"#)
        .tools(tools)
        .handler(|name, _, _| match name {
            "bash" | "mcp__self__read" => text_result("it ran"),
            "read" | "mcp_other" => text_result("ok"),
            _ => Answer::Result(result_of(a2mcp::mcp::call::NOT_EXPOSED, true)),
        })
        .start();
    let mut client = host.client();
    assert_eq!(all_names(&mut client), ["read", "mcp_other", "xfer_status", "xfer_stop"]);
    let unknown = client.call("no_such_tool", "{}");
    for name in ["bash", "mcp__self__read", "mcp__unknown", "xfer_share", "nobody"] {
        assert_eq!(client.call(name, "{}"), unknown, "{name}");
    }
    assert_eq!(client.call_text("read", "{}"), "ok");
    assert_eq!(client.call_text("mcp_other", "{}"), "ok");
    let asked = host.frames().iter().filter(|frame| frame.contains("tools/call")).count();
    assert_eq!(asked, 3, "the host is not asked for denied ones");

    // The next list is filtered in the same way.
    host.set_tools(r#"[{"name":"bash"},{"name":"mcp__x"},{"name":"new"}]"#);
    eventually("the new list", || (all_names(&mut client)[0] == "new").then_some(()));
}

#[test]
fn a_tool_of_the_host_never_takes_the_place_of_an_own_one() {
    let host = Setup::default()
        .tools(r#"[{"name":"xfer_status","description":"the host's"},{"name":"echo"}]"#)
        .handler(|_, _, _| text_result("the host's"))
        .start();
    let mut client = host.client();
    assert_eq!(names(&mut client), ["echo"]);
    let status: Value = serde_json::from_str(&client.call_text("xfer_status", "{}")).unwrap();
    assert_eq!(status, serde_json::json!({"serving": false}));
    assert_eq!(host.count("tools/call"), 0);
}

/// C7: the host is blocked after its first catalogue.
#[test]
fn a_blocked_host_holds_up_no_handshake() {
    let host = Host::start();
    host.fall_silent();
    host.stop_reading();
    let mut waiting = host.client();
    waiting.start_call("1", "echo", "{}");
    let ping = br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    for _ in 0..20 {
        let begun = Instant::now();
        let reply = host.http("POST", "/", &[], INITIALIZE.as_bytes());
        assert_eq!(reply.status, 200);
        assert!(begun.elapsed() < Duration::from_millis(500), "initialize: {:?}", begun.elapsed());
        let session = ("mcp-session-id", reply.header("mcp-session-id").unwrap());
        let begun = Instant::now();
        let list = br#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
        let reply = host.http("POST", "/", &[session], list).json();
        assert_eq!(reply["result"]["tools"][0]["name"], "echo");
        assert!(begun.elapsed() < Duration::from_millis(2000), "tools/list: {:?}", begun.elapsed());
        assert_eq!(host.http("POST", "/", &[session], ping).status, 200);
    }
    host.read_again();
    let call = host.call_frame("echo");
    host.answer(&call, &result_of("at last", false));
    assert_eq!(waiting.read().json()["result"]["content"][0]["text"], "at last");
}

#[test]
fn before_the_first_list_requests_wait_for_it_and_no_longer() {
    let mut host = Setup::default().without_list().spawn();
    host.expect_hello();
    let (mut lists, mut calls) = (host.client(), host.client());
    lists.send("POST", &[], br#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#);
    calls.start_call("1", "echo", r#"{"early":true}"#);
    let mut free = host.client();
    assert!(free.rpc("ping", "{}")["result"].is_object());
    let question = host.frame(|frame| frame["method"] == "tools/list");
    assert_eq!(host.count("tools/call"), 0, "no call before the list");
    host.answer(&question, r#"{"tools":[{"name":"echo"}]}"#);
    let begun = Instant::now();
    let tools = r#"[{"name":"echo","inputSchema":{"type":"object"}}]"#;
    assert_eq!(hosts_part(&lists.read().text()), listed(tools));
    assert_eq!(calls.read().json()["result"]["content"][0]["text"], r#"{"early":true}"#);
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    host.until_ready();
}

/// A host whose Main session is not there yet has no list; it says so, then announces itself.
#[test]
fn a_host_without_a_list_is_asked_again_when_it_has_one() {
    let mut host = Setup::default().without_list().spawn();
    host.expect_hello();
    let mut client = host.client();
    client.send("POST", &[], br#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#);
    let no_list = |question: &Value| {
        let id = &question["id"];
        host.send(&format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-32000,"message":"no main"}}}}"#));
    };
    let first = host.frame(|frame| frame["method"] == "tools/list");
    no_list(&first);
    host.send(r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#);
    let second = host.frame(|frame| frame["method"] == "tools/list" && frame["id"] != first["id"]);
    host.answer(&second, r#"{"no":"list"}"#);
    host.send(r#"{"jsonrpc":"2.0","method":"bridge/state","params":{"main":true,"approvals":[]}}"#);
    let third = host.frame(|frame| {
        frame["method"] == "tools/list" && frame["id"] != first["id"] && frame["id"] != second["id"]
    });
    host.answer(&third, r#"{"tools":[{"name":"late"}]}"#);
    assert_eq!(client.read().json()["result"]["tools"][0]["name"], "late");
}

/// Contract 4: after 20 s without a first catalogue, callers hear it.
#[test]
fn without_any_list_callers_are_told_after_twenty_seconds() {
    let mut host = Setup::default().without_list().spawn();
    host.expect_hello();
    let (mut lists, mut calls) = (host.client(), host.client());
    for client in [&lists, &calls] {
        client.connection.socket().set_read_timeout(Some(Duration::from_secs(40))).unwrap();
    }
    let begun = Instant::now();
    lists.send("POST", &[], br#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#);
    calls.start_call("2", "echo", "{}");
    let reply = lists.read();
    assert_eq!(reply.status, 200);
    assert_eq!(
        reply.text(),
        r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"host not ready"}}"#
    );
    let result = calls.read().json()["result"].clone();
    assert_eq!(result["isError"], true);
    assert_eq!(result["content"][0]["text"], "main session not available");
    assert!(begun.elapsed() >= Duration::from_secs(19), "{:?}", begun.elapsed());
    assert_eq!(host.count("tools/call"), 0);
}

#[test]
fn a_changed_list_is_fetched_and_an_empty_one_keeps_the_last() {
    let host = Host::start();
    let mut client = host.client();
    host.set_tools(r#"[{"name":"one"},{"name":"two"}]"#);
    eventually("the new list", || (names(&mut client) == ["one", "two"]).then_some(()));

    // The host is between two sessions.
    let asked = host.count("tools/list");
    host.set_tools("[]");
    eventually("the question", || (host.count("tools/list") == asked + 1).then_some(()));
    eventually("the answer", || host.log().contains("the last one stays").then_some(()));
    assert_eq!(names(&mut client), ["one", "two"]);
    host.set_tools(r#"[{"name":"three"}]"#);
    eventually("the next list", || (names(&mut client) == ["three"]).then_some(()));
}

#[test]
fn a_burst_of_changes_is_one_more_question() {
    let mut host = Setup::default().without_list().spawn();
    host.expect_hello();
    let first = host.frame(|frame| frame["method"] == "tools/list");
    for _ in 0..200 {
        host.send(r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#);
    }
    // Frames are read in order: once this is answered, the burst has been seen.
    host.ask("after", "bridge/ping", "{}");
    host.answer(&first, r#"{"tools":[{"name":"first"}]}"#);
    let second = host.frame(|frame| frame["method"] == "tools/list" && frame["id"] != first["id"]);
    host.answer(&second, r#"{"tools":[{"name":"second"}]}"#);
    let mut client = host.client();
    eventually("the second list", || (names(&mut client) == ["second"]).then_some(()));
    host.ask("again", "bridge/ping", "{}");
    assert_eq!(host.count("tools/list"), 2);
}

#[test]
fn a_list_of_usual_size_passes_whole() {
    let tools: Vec<Value> = (0..40)
        .map(|n| {
            serde_json::json!({
                "name": format!("tool_{n}"),
                "description": "d".repeat(1250),
                "inputSchema": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
            })
        })
        .collect();
    let tools = Value::from(tools).to_string();
    assert!(tools.len() > 54_000, "{}", tools.len());
    let host = Setup::default().tools(&tools).start();
    let mut client = host.client();
    for _ in 0..50 {
        assert_eq!(list(&mut client), listed(&tools));
    }
}

#[test]
fn the_sidecar_serves_the_last_list_without_a_live_main() {
    let host = Host::start();
    let mut client = host.client();
    host.send(r#"{"jsonrpc":"2.0","method":"bridge/state","params":{"main":false,"approvals":[]}}"#);
    eventually("the state", || (host.status()["host"]["main"] == false).then_some(()));
    assert_eq!(names(&mut client), ["echo", "hang", "fail"]);
}
