//! `a2mcp wrap`: a stdio server behind the endpoint (issue 8). What it says of itself and what callers say
//! crosses byte for byte, whatever else it writes; its questions reach the one caller they can belong to.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::http::{Client, INITIALIZE};
use crate::support::wrap::{Wrap, script, wrapping};
use crate::support::{cli, eventually};

/// Every reply a stream: progress and questions need one.
const STREAMS: &str = r#"{"streamAfterMs":0}"#;
const ALL: &str = r#"{"sampling":{},"elicitation":{},"roots":{}}"#;

fn names(session: &mut Client) -> Vec<String> {
    let list = session.rpc("tools/list", "{}");
    let tools = list["result"]["tools"].as_array().unwrap_or_else(|| panic!("{list}")).clone();
    tools.iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
}

fn text(result: &Value) -> &str {
    result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text in {result}"))
}

#[test]
fn what_the_server_says_of_itself_reaches_every_caller_and_it_is_asked_once() {
    let wrap = Wrap::start(&[]);
    for _ in 0..3 {
        let mut session = wrap.session();
        let result = session.post(INITIALIZE).json()["result"].clone();
        assert_eq!(result["serverInfo"]["name"], "a2mcp");
        assert_eq!(result["serverInfo"]["title"], "The fixture server");
        assert_eq!(result["instructions"], "Be kind to fixtures.");
        assert_eq!(
            result["capabilities"],
            json!({"tools": {"listChanged": true}, "logging": {}, "completions": {},
                "resources": {"subscribe": true, "listChanged": true}, "prompts": {"listChanged": true}})
        );
        assert_eq!(
            session.call_text("test_simple_text", "{}"),
            "This is a simple text response for testing."
        );
    }
    let introduced = wrap.noted("initialize");
    assert_eq!(introduced.len(), 1, "{introduced:?}");
    let params = &introduced[0]["params"];
    assert_eq!(params["capabilities"], json!({"roots": {}, "sampling": {}, "elicitation": {}}));
    assert_eq!(
        (&params["clientInfo"]["name"], &params["protocolVersion"]),
        (&json!("a2mcp"), &json!("2025-11-25"))
    );
    assert_eq!(wrap.noted("start").len(), 1, "one process serves all sessions");

    let status = wrap.status();
    assert_eq!((&status["host"]["name"], &status["host"]["version"]), (&json!("fixture"), &json!("1.2.3")));
    assert_eq!(status["host"]["pid"], wrap.ready["hostPid"]);
    assert_eq!(status["sessions"].as_array().unwrap().len(), 6);
    let mut http = crate::support::http::Connection::open(wrap.port());
    let bearer = format!("Bearer {}", wrap.token());
    let reply = http.request("POST", "/host-llm", &[("Authorization", &bearer)], br#"{"enabled":false}"#);
    assert_eq!(reply.status, 501);
    // Each call is on record, the server's as any other's.
    let audit = wrap.audit();
    assert_eq!(audit.iter().filter(|record| record["phase"] == "done").count(), 3, "{audit:?}");
}

#[test]
fn payloads_cross_byte_for_byte_and_on_one_line() {
    let wrap = Wrap::start(&[]);
    let mut session = wrap.session();
    for (sent, arrived) in [
        (r#"{ "b":1.50, "b":12345678901234567890123,"\ud800":[ ], "ü":"😀\n" }"#, None),
        ("{\n  \"a\": [\r\n 1e400 ]\n}", Some("{   \"a\": [   1e400 ] }")),
        ("[1]", None),
    ] {
        let body = format!(
            r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"echo","arguments":{sent},"task":{{"ttl":1.0}},"_meta":{{"x/y":[1.50],"a2mcp/call":{{"callId":"evil"}}}}}}}}"#
        );
        let reply = session.post(&body).json();
        let line = text(&reply["result"]);
        let arrived = arrived.unwrap_or(sent);
        assert!(line.contains(&format!(r#""arguments":{arrived},"#)), "{line}");
        assert!(line.contains(r#""task":{"ttl":1.0}"#) && line.contains(r#""x/y":[1.50]"#), "{line}");
        assert!(!line.contains("a2mcp/") && !line.contains("evil"), "{line}");
    }
    // An error of the server keeps what is in it.
    let error = session.rpc("resources/read", r#"{"uri":"test://none"}"#);
    assert_eq!(error["error"]["code"], -32002, "{error}");
    assert!(error.to_string().contains("test://none"), "{error}");
}

#[test]
fn whatever_the_server_writes_between_its_messages_does_no_harm() {
    let wrap = Wrap::start(&["--noise"]);
    let mut session = wrap.session();
    for round in 0..5 {
        let line = session.call_text("echo", &format!(r#"{{"text":"ü😀 {round}"}}"#));
        assert!(line.contains(&format!("ü😀 {round}")), "{line}");
    }
    let skipped =
        eventually("the count", || wrap.server()["skippedLines"].as_u64().filter(|count| *count >= 35));
    assert_eq!(skipped % 5, 0, "five lines around each message: {skipped}");
    assert_eq!(session.call_text("test_simple_text", "{}"), "This is a simple text response for testing.");
}

#[test]
fn large_answers_foreign_bytes_and_loud_errors_pass() {
    let wrap = Wrap::start(&[]);
    let mut session = wrap.session();
    let bytes = 16 << 20;
    let result = session.call("large", &format!(r#"{{"bytes":{bytes}}}"#));
    assert_eq!(text(&result).len(), bytes);
    assert_eq!(session.call_text("latin", "{}"), "caf\u{fffd}");
    assert_eq!(session.call_text("shout", r#"{"bytes":3000000}"#), "shouted");
    let large = format!(r#"{{"text":"{}"}}"#, "y".repeat(4 << 20));
    assert!(session.call_text("echo", &large).len() > 4 << 20);
    eventually("the last line on our stderr", || {
        wrap.stderr().contains("[server] the last line").then_some(())
    });
}

#[test]
fn the_list_is_the_servers_over_all_its_pages_and_only_that_can_be_called() {
    let wrap = Wrap::start(&["--pages", "4"]);
    let mut session = wrap.session();
    let mut listed = names(&mut session);
    assert_eq!(listed.split_off(34), ["xfer_share", "xfer_status", "xfer_stop"], "the sidecar's own");
    assert_eq!((listed[0].as_str(), listed[33].as_str()), ("test_simple_text", "argv"));
    assert!(text(&session.call("no_such_tool", "{}")).contains("not exposed"));
    let mut stream = session.listen();
    let grown = session.call_text("grow", "{}");
    stream.notification("notifications/tools/list_changed");
    assert!(names(&mut session).contains(&grown));
    assert_eq!(session.call_text(&grown, "{}"), format!("{grown} is here"));
}

/// A server may have no tools any more; that it fails to say what it has means nothing.
#[test]
fn an_empty_list_is_shown_and_a_failed_one_is_not() {
    let wrap = Wrap::start(&[]);
    let mut session = wrap.session();
    let stream = session.listen();
    let all = names(&mut session);
    for (how, why) in [("failed", "no list today"), ("missing", "has no `tools`")] {
        assert_eq!(session.call_text("shed", &format!(r#"{{"how":"{how}"}}"#)), "shed");
        eventually("a word in the status", || {
            let error = wrap.server()["listError"].clone();
            error.as_str().is_some_and(|error| error.contains(why)).then_some(())
        });
        assert_eq!(names(&mut session), all, "{how}");
    }
    assert!(stream.is_silent_for(Duration::from_millis(50)), "nothing changed");
    // Nor does it to a sidecar that never had a list.
    wrap.restart();
    let mut session = session.again();
    assert_eq!(names(&mut session), all);
    let mut stream = session.listen();
    assert!(stream.is_silent_for(Duration::from_millis(50)), "nothing changed");
    assert_eq!(session.call_text("shed", r#"{"how":"empty"}"#), "shed");
    stream.notification("notifications/tools/list_changed");
    assert_eq!(names(&mut session), ["xfer_share", "xfer_status", "xfer_stop"]);
    assert!(text(&session.call("echo", "{}")).contains("not exposed"));
    assert_eq!(wrap.server().get("listError"), None);
}

#[test]
fn that_the_tools_cannot_be_listed_is_said_with_the_reason() {
    let wrap = Wrap::start(&["--list", "failed"]);
    eventually("a word in the status", || (wrap.server()["listError"] == "no list today").then_some(()));
    let run = |args: &[&str]| cli(args, Some(wrap.dir.path()), &Default::default());
    let (code, screen, err) = run(&["status"]);
    assert_eq!(code, 0, "{err}");
    let guard = format!("running · guard pid {} · ", wrap.server()["pid"]);
    assert!(screen.contains(&guard), "{screen}");
    assert!(screen.contains("tools cannot be listed: no list today"), "{screen}");
    let (code, out, err) = run(&["doctor"]);
    assert_eq!(code, 1, "{err}");
    assert!(out.contains("WRONG the wrapped server's tools cannot be listed: no list today"), "{out}");
    assert!(!out.contains("main session") && out.contains("wait for the wrapped server to list"), "{out}");
}

#[test]
fn an_answer_that_is_no_result_is_an_error_and_says_so() {
    let wrap = Wrap::start(&[]);
    let mut session = wrap.session();
    for result in ["null", "\"done\"", "[]", "7", "{}", r#"{"text":"done"}"#, r#"{"content":"done"}"#] {
        let result = session.call("odd", &format!(r#"{{"result":{result}}}"#));
        assert_eq!(result["isError"], true, "{result}");
        assert!(
            text(&result).contains("no MCP tool result") && text(&result).contains("may have run"),
            "{result}"
        );
    }
    for (members, expected) in [
        ("{}", "neither a result nor an error"),
        (r#"{"error":null}"#, "unreadable error"),
        (r#"{"error":{"code":7,"message":"not today"},"result":null}"#, "not today"),
    ] {
        let result = session.call("odd", &format!(r#"{{"members":{members}}}"#));
        assert_eq!(result["isError"], true, "{result}");
        assert!(text(&result).contains(expected), "{members}: {result}");
    }
    for (members, content, structured) in [
        (r#"{"result":{"content":[]}}"#, json!([]), Value::Null),
        (r#"{"result":{"structuredContent":{"a":1}}}"#, json!([]), json!({"a": 1})),
        (r#"{"result":{"content":[]},"error":null}"#, json!([]), Value::Null),
    ] {
        let result = session.call("odd", &format!(r#"{{"members":{members}}}"#));
        assert_ne!(result["isError"], true, "{result}");
        assert_eq!((&result["content"], &result["structuredContent"]), (&content, &structured), "{result}");
    }
    let audit = wrap.audit();
    let failed = audit.iter().filter(|record| record["phase"] == "done" && record["isError"] == true);
    assert_eq!(failed.count(), 10, "{audit:?}");
}

#[test]
fn progress_and_log_messages_come_on_the_calls_stream() {
    let wrap = Wrap::start_with(STREAMS, &[], &[]);
    let session = wrap.session();
    let mut stream = session.ask_call("1", "test_tool_with_progress", "{}", Some("7.50")).stream();
    let messages = stream.rest();
    let steps: Vec<&Value> =
        messages.iter().filter(|message| message["method"] == "notifications/progress").collect();
    assert_eq!(steps.len(), 3, "{messages:?}");
    assert_eq!(
        steps[1]["params"],
        json!({"progressToken": 7.50, "progress": 50, "total": 100, "message": "step 50 of 100"})
    );
    let mut stream = session.ask_call("2", "test_tool_with_logging", "{}", None).stream();
    let messages = stream.rest();
    let logs = messages.iter().filter(|message| message["method"] == "notifications/message").count();
    assert_eq!(logs, 3, "{messages:?}");
    let mut stream = session.ask_call("3", "progress_burst", r#"{"steps":2000}"#, Some("3")).stream();
    let messages = stream.rest();
    let last = messages.iter().rev().find(|message| message["method"] == "notifications/progress").unwrap();
    assert_eq!(last["params"]["progress"], 2000, "the last one is worth the most");
    assert_eq!(text(&messages.last().unwrap()["result"]), "burst");
    let mut stream = session.ask_call("4", "log_burst", r#"{"lines":3000}"#, None).stream();
    let messages = stream.rest();
    let logs = messages.iter().filter(|message| message["method"] == "notifications/message");
    let logs: Vec<&Value> = logs.map(|message| &message["params"]["data"]).collect();
    assert!(logs.iter().copied().eq(&(0..3000).map(Value::from).collect::<Vec<_>>()), "{}", logs.len());
}

/// C5.
#[test]
fn a_cancel_reaches_the_server_for_calls_and_for_other_requests() {
    let wrap = Wrap::start_with(STREAMS, &[], &[]);
    let session = wrap.session();
    let stream = session.ask_call("7", "hang", "{}", None).stream();
    wrap.until_noted("call", 1);
    session.cancel("7");
    wrap.until_noted("cancelled", 1);
    assert!(drained(stream).iter().all(|message| message.get("result").is_none()));
    let reading =
        session.ask(r#"{"jsonrpc":"2.0","id":8,"method":"resources/read","params":{"uri":"test://slow"}}"#);
    eventually("the request is under way", || {
        wrap.noted("request").iter().any(|request| request["method"] == "resources/read").then_some(())
    });
    session.cancel("8");
    wrap.until_noted("cancelled", 2);
    drop(reading);
    // After the end, and of what never was: nothing happens.
    session.cancel("7");
    session.cancel("99");
    assert_eq!(
        wrap.session().call_text("test_simple_text", "{}"),
        "This is a simple text response for testing."
    );
    assert_eq!(wrap.noted("cancelled").len(), 2);
    let audit = wrap.audit();
    assert!(audit.iter().any(|record| record["outcome"] == "cancelled"), "{audit:?}");
}

fn drained(mut stream: crate::support::sse::Stream) -> Vec<Value> {
    stream.rest()
}

#[test]
fn a_question_goes_to_the_only_session_with_calls_in_flight() {
    let wrap = Wrap::start_with(STREAMS, &[], &[]);
    let (port, token) = (wrap.port(), wrap.token());
    let first = Client::declaring(port, &token, ALL);
    let second = Client::declaring(port, &token, ALL);
    let bystander = second.listen();

    let mut stream = first.ask_call("1", "test_elicitation", r#"{"message":"who are you?"}"#, None).stream();
    let question = stream.until(|message| message["method"] == "elicitation/create");
    assert_eq!(question["params"]["message"], "who are you?");
    assert!(question["params"].get("_meta").is_none(), "{question}");
    first.answer(&question["id"], r#""result":{"action":"accept","content":{"response":"me"}}"#);
    let result = stream.until(|message| message["id"] == 1)["result"].clone();
    assert!(text(&result).contains("action=accept") && text(&result).contains("\"me\""), "{result}");

    // A call of another session is in flight: nobody can say whose the question is.
    let other = second.ask_call("1", "hang", "{}", None).stream();
    wrap.until_noted("call", 2);
    let mut stream = first.ask_call("2", "test_elicitation", r#"{"message":"secret"}"#, None).stream();
    let result = stream.until(|message| message["id"] == 2)["result"].clone();
    assert_eq!(result["isError"], true, "{result}");
    assert!(text(&result).contains("not exactly one session"), "{result}");
    second.cancel("1");
    drained(other);

    // Two calls of one session are fine.
    let more = first.ask_call("3", "hang", "{}", None).stream();
    wrap.until_noted("call", 4);
    let mut stream = first.ask_call("4", "test_sampling", r#"{"prompt":"p"}"#, None).stream();
    let question = stream.until(|message| message["method"] == "sampling/createMessage");
    first.answer(
        &question["id"],
        r#""result":{"role":"assistant","model":"m","content":{"type":"text","text":"sampled"}}"#,
    );
    let result = stream.until(|message| message["id"] == 4)["result"].clone();
    assert_eq!(text(&result), "LLM response: sampled");
    first.cancel("3");
    drained(more);
    assert!(
        bystander.is_silent_for(Duration::from_millis(100)),
        "one caller's prompt never shows at another"
    );

    // Who declared nothing is not asked; the server hears why.
    let plain = wrap.session();
    let mut stream = plain.ask_call("1", "roots", "{}", None).stream();
    let result = stream.until(|message| message["id"] == 1)["result"].clone();
    assert!(text(&result).contains("did not declare"), "{result}");
}

/// A server that works on although its call was cancelled asks nobody else what it wanted to ask.
#[test]
fn what_a_cancelled_calls_server_asks_reaches_nobody_else() {
    let wrap = Wrap::start_with(STREAMS, &[], &[]);
    let (port, token) = (wrap.port(), wrap.token());
    let second = Client::declaring(port, &token, ALL);
    let mut asked = 0;
    for is_end in [false, true] {
        let first = Client::declaring(port, &token, ALL);
        let give_up = |rpc_id: &str, cancels: usize| {
            if is_end {
                assert_eq!(first.again().delete().status, 204);
            } else {
                first.cancel(rpc_id);
            }
            wrap.until_noted("cancelled", cancels)
        };
        let stream = first.ask_call("1", "stubborn", r#"{"until":"poke"}"#, None).stream();
        wrap.until_noted("call", asked * 2 + 1);
        give_up("1", asked + 1);
        drained(stream);
        // The only one who waits is the second.
        let messages = second.ask_call("1", "poke", "{}", None).stream().rest();
        assert!(messages.iter().all(|message| message["method"] != "elicitation/create"), "{messages:?}");
        assert_eq!(text(&messages.last().unwrap()["result"]), "poked");
        asked += 1;
        let noted = wrap.until_noted("stubborn", asked);
        let error = noted[asked - 1]["error"].as_str().unwrap();
        assert!(error.contains("not exactly one session"), "{error}");
    }
    // Nobody waits at all: its log message is nobody's either.
    let first = Client::declaring(port, &token, ALL);
    let bystander = second.listen();
    let stream = first.ask_call("1", "stubborn", "{}", None).stream();
    wrap.until_noted("call", asked * 2 + 1);
    first.cancel("1");
    drained(stream);
    let noted = wrap.until_noted("stubborn", asked + 1);
    let error = noted[asked]["error"].as_str().unwrap();
    assert!(error.contains("has given its call up"), "{error}");
    assert!(bystander.is_silent_for(Duration::from_millis(100)), "a log message of another's call");

    // All of them are answered now: who asks is known again.
    let mut stream = second.ask_call("2", "test_elicitation", r#"{"message":"m"}"#, None).stream();
    let question = stream.until(|message| message["method"] == "elicitation/create");
    second.answer(&question["id"], r#""result":{"action":"decline"}"#);
    stream.until(|message| message["id"] == 2);
}

#[test]
fn a_question_that_the_server_withdraws_is_withdrawn_from_the_caller() {
    let wrap = Wrap::start_with(STREAMS, &[], &[]);
    let session = Client::declaring(wrap.port(), &wrap.token(), ALL);
    let mut stream = session.ask_call("1", "timed", "{}", None).stream();
    let question = stream.until(|message| message["method"] == "elicitation/create");
    // Withdrawn right before the answer that ends the stream.
    assert_eq!(session.again().call_text("poke", "{}"), "poked");
    let withdrawn = stream.until(|message| message["method"] == "notifications/cancelled");
    assert_eq!(withdrawn["params"], json!({"requestId": question["id"], "reason": "took too long"}));
    let result = stream.until(|message| message["id"] == 1)["result"].clone();
    assert_eq!(text(&result), "nobody answered");
    // Too late, and nobody minds.
    assert_eq!(session.answer(&question["id"], r#""result":{"action":"accept"}"#).status, 202);
    assert_eq!(
        wrap.session().call_text("test_simple_text", "{}"),
        "This is a simple text response for testing."
    );
}

/// The question outlives the call it went out on, as long as its session has another one.
#[test]
fn a_question_moves_to_another_call_of_its_session() {
    let wrap = Wrap::start_with(STREAMS, &[], &[]);
    let session = Client::declaring(wrap.port(), &wrap.token(), ALL);
    let mut asking = session.ask_call("1", "test_elicitation", r#"{"message":"m"}"#, None).stream();
    let question = asking.until(|message| message["method"] == "elicitation/create");
    session.answer(&question["id"], r#""result":{"action":"decline"}"#);
    asking.until(|message| message["id"] == 1);

    let mut newer = session.ask_call("2", "slow", r#"{"seconds":1}"#, None).stream();
    wrap.until_noted("call", 2);
    let mut newest = session.ask_call("3", "slow", r#"{"seconds":0.6}"#, None).stream();
    wrap.until_noted("call", 3);
    // It goes out on the newest one; which call asked is not known.
    let mut asking = session.ask_call("4", "roots", "{}", None).stream();
    let question = asking.until(|message| message["method"] == "roots/list");
    session.cancel("4");
    let moved = newest.until(|message| message["method"] == "roots/list");
    assert_ne!(moved["id"], question["id"]);
    newest.until(|message| message["id"] == 3);
    let moved = newer.until(|message| message["method"] == "roots/list");
    assert_eq!(session.answer(&moved["id"], r#""result":{"roots":[]}"#).status, 202);
    newer.until(|message| message["id"] == 2);
}

/// What a server asks on its own at its start concerns no caller: no caller's roots become everybody's.
#[test]
fn what_the_server_asks_at_its_start_reaches_nobody() {
    let wrap = Wrap::start_with(STREAMS, &[], &["--roots-at-start"]);
    let roots = wrap.until_noted("roots", 1);
    assert!(roots[0]["error"].as_str().unwrap().contains("not exactly one session"), "{roots:?}");
    let session = Client::declaring(wrap.port(), &wrap.token(), ALL);
    session.tell("notifications/roots/list_changed", "{}");
    assert_eq!(
        wrap.session().call_text("test_simple_text", "{}"),
        "This is a simple text response for testing."
    );
    assert!(wrap.noted("notifications/roots/list_changed").is_empty(), "a caller's roots are its own");
}

#[test]
fn everything_else_of_mcp_crosses() {
    let wrap = Wrap::start(&[]);
    let mut session = wrap.session();
    let read = session.rpc("resources/read", r#"{"uri":"test://template/7/data"}"#);
    assert!(read["result"]["contents"][0]["text"].as_str().unwrap().contains("Data for ID: 7"), "{read}");
    let prompt = session
        .rpc("prompts/get", r#"{"name":"test_prompt_with_arguments","arguments":{"arg1":"a","arg2":"b"}}"#);
    assert!(prompt.to_string().contains("arg1='a'"), "{prompt}");
    let completion = session.rpc("completion/complete", "{}");
    assert_eq!(completion["result"]["completion"]["values"], json!(["alpha", "beta"]));
    let mut stream = session.listen();
    assert_eq!(
        session.rpc("resources/subscribe", r#"{"uri":"test://watched-resource"}"#)["result"],
        json!({})
    );
    session.call("touch", r#"{"uri":"test://watched-resource"}"#);
    let updated = stream.notification("notifications/resources/updated");
    assert_eq!(updated["params"], json!({"uri": "test://watched-resource"}));
    assert_eq!(session.rpc("nothing/known", "{}")["error"]["code"], -32601);
}

#[test]
fn arguments_reach_the_server_as_they_are_also_from_a_config_file() {
    let odd = ["a b", "\"q\"", "$HOME;`ls`", "", "ü\t*"];
    let mut args = vec!["--"];
    args.extend(odd);
    let wrap = Wrap::start(&args);
    let said: Value = serde_json::from_str(&wrap.session().call_text("argv", "{}")).unwrap();
    assert_eq!(said["rest"], json!(odd));
    drop(wrap);

    let dir = tempfile::tempdir().unwrap();
    let cwd = std::fs::canonicalize(dir.path()).unwrap();
    let mut args = vec![script().to_str().unwrap().to_owned(), "--".to_owned()];
    args.extend(odd.map(str::to_owned));
    let file = dir.path().join("mcp.json");
    let servers = json!({"mcpServers": {
        "other": {"command": "false"},
        "the one": {"command": "python3", "args": args, "env": {"FIXTURE": "from \"the\" file"}, "cwd": cwd},
    }});
    std::fs::write(&file, servers.to_string()).unwrap();
    let mut command = wrapping(dir.path(), "{}", &["--server", "the one", "--config"]);
    let wrap = Wrap::run(dir, command.arg(&file));
    let said: Value = serde_json::from_str(&wrap.session().call_text("argv", "{}")).unwrap();
    assert_eq!(said, json!({"rest": odd, "env": "from \"the\" file", "cwd": cwd}));
}

#[test]
fn what_cannot_be_wrapped_is_said_with_what_it_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let none = Default::default();
    let run = |args: &[&str]| cli(&[&["wrap"], args].concat(), Some(dir.path()), &none);
    let script = script();
    let script = script.to_str().unwrap();
    for (args, code, expected) in [
        (&[][..], 2, "what is to be wrapped?"),
        (&["--server", "x"], 2, "what is to be wrapped?"),
        (&["--config", "/nowhere.json", "--server", "x"], 1, "/nowhere.json: No such file"),
        (&["--config", "x", "--", "cat"], 2, "not both"),
        (&["--pid", "1", "--", "cat"], 2, "--pid names a running sidecar"),
        (&["--agent-dir", "x", "--", ""], 2, "the command behind `--` is empty"),
    ] {
        let (got, out, err) = run(args);
        assert_eq!((got, out.as_str()), (code, ""), "{args:?}: {err}");
        assert!(err.contains(expected), "{args:?}: {err}");
    }
    // `--agent-dir` of these helpers stands last, behind `--` it would be the server's.
    let start = |command: &[&str]| {
        let output = wrapping(dir.path(), "{}", &["--"]).args(command).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{command:?}: {err}");
        err
    };
    let err = start(&["no-such-program-anywhere"]);
    assert!(
        err.contains("`no-such-program-anywhere` cannot be started") && err.contains("No such file"),
        "{err}"
    );
    assert_eq!(err.matches("No such file").count(), 1, "once is enough: {err}");
    assert!(!err.contains("it cannot be started") && !err.contains("127"), "{err}");
    let file = dir.path().join("mcp.json");
    std::fs::write(&file, r#"{"mcpServers":{"s":{"command":"cat","cwd":"/no/such/place"}}}"#).unwrap();
    let output = wrapping(dir.path(), "{}", &["--server", "s", "--config"]).arg(&file).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(err.contains("`cat` cannot be started: its working directory /no/such/place (\"cwd\")"), "{err}");
    let (_, help, _) = run(&["--help"]);
    assert!(help.contains("[default: ~/.a2mcp]") && !help.contains("--pid"), "{help}");
    assert!(!help.contains("running sidecar"), "the default of other commands: {help}");
    let err = start(&["python3", script, "--exit-at-start", "3"]);
    assert!(err.contains("exit code 3") && err.contains("no database"), "{err}");
    assert!(!err.contains('\u{1b}'), "nothing of it drives a terminal: {err:?}");
    let err = start(&["sh", "-c", "kill -9 $$"]);
    assert!(err.contains("signal 9"), "{err}");
    let err = start(&[
        "sh",
        "-c",
        r#"read x; echo '{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"not today"}}'; cat"#,
    ]);
    assert!(err.contains("refused initialize: not today"), "{err}");
    let err = start(&[
        "sh",
        "-c",
        r#"read x; echo '{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"1999"}}'; cat"#,
    ]);
    assert!(err.contains("protocol version \"1999\""), "{err}");
    let err = start(&[
        "sh",
        "-c",
        r#"read x; echo '{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-06-18"}}'; read x; exit 9"#,
    ]);
    assert!(err.contains("after it answered initialize: exit code 9") && !err.contains("before"), "{err}");
}

#[test]
fn the_port_of_the_command_line_stands_before_the_configs() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let wrap = Wrap::start_with(r#"{"port":1}"#, &["--port", &port.to_string()], &[]);
    assert_eq!(wrap.port(), port);
    assert_eq!(wrap.status()["notes"], json!([]), "the config's port is no news");
    let text = std::fs::read_to_string(wrap.dir.path().join("a2mcp.json")).unwrap();
    assert!(text.contains("\"port\""), "the config is the operator's: {text}");
    let other = Wrap::start_with("{}", &["--port", &port.to_string()], &[]);
    let expected = format!("port {port} (--port) is held by");
    eventually("a word on the port", || other.stderr().contains(&expected).then_some(()));
}
