//! What the person at the host can do, from omp's prompt and from a terminal, and what happens to the
//! list of tools when the host changes it.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::omp::{Home, Omp};
use crate::streams::Events;
use crate::support::eventually;
use crate::support::http::{Client, Connection, INITIALIZE};

fn status_of_initialize(port: u16, token: &str) -> u16 {
    let bearer = format!("Bearer {token}");
    Connection::open(port).request("POST", "/", &[("Authorization", &bearer)], INITIALIZE.as_bytes()).status
}

#[test]
fn the_prompt_commands_do_what_they_say() {
    let omp = Omp::start();
    let url = format!("http://127.0.0.1:{}", omp.port);
    let old = omp.home.token();
    let mut client = omp.client();

    let (level, text) = omp.types("/a2mcp");
    assert_eq!(level, "info");
    for part in [url.as_str(), "omp 18.2.3", "main session live", &old[..6]] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert!(!text.contains(&old), "the status shows the token");
    let (_, text) = omp.types("/a2mcp token");
    assert!(text.contains(&old) && text.contains(&url), "{text}");
    let (level, text) = omp.types("/a2mcp nonsense \u{1b}[31m");
    assert_eq!(level, "warning");
    assert!(text.contains("rotate") && text.contains("restart") && !text.contains('\u{1b}'), "{text}");

    let (level, text) = omp.types("/a2mcp rotate");
    let new = omp.home.token();
    assert_eq!(level, "info", "{text}");
    assert!(text.contains(&new[..6]) && !text.contains(&new) && new != old, "{text}");
    assert_eq!(status_of_initialize(omp.port, &old), 401);
    client.token = new.clone();
    assert_eq!(
        client.post(r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#).status,
        404,
        "a session of the old token"
    );

    let mut client = omp.client();
    let before = omp.sidecar();
    let (level, text) = omp.types("/a2mcp restart");
    assert_eq!(level, "info", "{text}");
    omp.next_sidecar(before);
    client = client.again();
    assert_eq!(client.call_text("probe_odd", "{}"), "{}");
    assert!(!omp.notices().iter().any(|notice| notice.contains("unexpectedly")), "{:#?}", omp.notices());
    // Nothing the operator did was put where others read.
    for file in ["a2mcp.log", "a2mcp.start.stderr", &format!("a2mcp.{}.stderr", omp.port)] {
        let text = omp.home.read(file);
        assert!(!text.contains(&old) && !text.contains(&new), "{file} holds a token");
    }
}

#[test]
fn the_terminal_commands_do_what_they_say() {
    let mut omp = Omp::start();
    let client = omp.client();
    let home = omp.home.clone();
    let ok = |args: &[&str]| -> String {
        let output = home.a2mcp(args);
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(ok(&["status"]).contains("main session live"));
    assert_eq!(ok(&["token"]).trim(), omp.home.token());
    assert!(ok(&["doctor"]).contains(&omp.port.to_string()));

    let mut caller = client.again();
    caller.start_call("1", "probe_wait", r#"{"file":"/nowhere/at/all"}"#);
    omp.line("the call did not reach the host", |line| {
        line["type"] == "tool_execution_start" && line["toolName"] == "probe_wait"
    });
    ok(&["cancel", "--all"]);
    let reply = caller.read();
    assert!(reply.text().contains("cancelled by the operator"), "{}", reply.text());

    ok(&["pause"]);
    let result = client.again().call("probe_odd", "{}");
    assert_eq!(result["isError"], true);
    assert!(result.to_string().contains("paused by the operator"), "{result}");
    ok(&["resume"]);
    assert_eq!(client.again().call_text("probe_odd", "{}"), "{}");
    assert!(ok(&["audit"]).contains("probe_wait"));

    let before = omp.sidecar();
    ok(&["restart"]);
    omp.next_sidecar(before);
    assert_eq!(client.again().call_text("probe_odd", "{}"), "{}");

    ok(&["stop"]);
    omp.notice("the bridge was stopped");
    eventually("the end of the sidecar", || omp.home.sidecars().is_empty().then_some(()));
    omp.assert_alive();
    omp.types("/a2mcp restart");
    omp.notice("running at");
    omp.until_announced();
    assert_eq!(omp.client().call_text("probe_odd", "{}"), "{}");
}

/// The names a client sees once they are those that `wanted` asks for.
fn until_listed(client: &mut Client, wanted: impl Fn(&[String]) -> bool) -> Vec<String> {
    eventually("the changed list", || {
        let list = client.rpc("tools/list", "{}");
        let tools = list["result"]["tools"].as_array().unwrap();
        let names: Vec<String> = tools.iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect();
        wanted(&names).then_some(names)
    })
}

/// Tools that come and go while the session runs, and a session that is begun anew: the bridge stays.
#[test]
fn the_list_follows_the_host() {
    let omp = Omp::start();
    let sidecar = omp.sidecar();
    let mut client = omp.client();
    let host_tool = json!({
        "name": "from_the_rpc_host", "description": "given by omp's own client", "label": "t",
        "parameters": {"type": "object", "properties": {}},
    });
    let mut events = Events::of_session(client.again());
    assert_eq!(omp.rpc(&json!({"type": "set_host_tools", "tools": [host_tool]}))["success"], true);
    events.until("the change", |message| message["method"] == "notifications/tools/list_changed");
    until_listed(&mut client, |names| names.iter().any(|name| name == "from_the_rpc_host"));
    assert_eq!(omp.rpc(&json!({"type": "set_host_tools", "tools": []}))["success"], true);
    let names = until_listed(&mut client, |names| names.iter().all(|name| name != "from_the_rpc_host"));

    for _ in 0..3 {
        assert_eq!(omp.rpc(&json!({"type": "new_session"}))["success"], true);
        assert_eq!(client.call_text("probe_odd", "{}"), "{}");
    }
    let hosts = names.iter().filter(|name| !name.starts_with("xfer_")).collect::<Vec<_>>();
    assert_eq!(json!(hosts), omp.probe(&json!({"op": "names"})));
    assert_eq!(omp.sidecar(), sidecar);
    let announced = omp.notices().iter().filter(|notice| notice.contains("are served at")).count();
    assert_eq!(announced, 1, "{:#?}", omp.notices());
}

/// Two hosts of one agent directory: two bridges, one token, one audit file.
#[test]
fn two_hosts_share_an_agent_directory() {
    let home = Arc::new(Home::with_shim());
    let first = Omp::setup(home.clone()).bridged();
    let second = Omp::setup(home.clone()).bridged();
    assert_ne!(first.port, second.port);
    assert_eq!(home.sidecars().len(), 2);
    for omp in [&first, &second] {
        assert_eq!(omp.client().call_text("probe_odd", "{}"), "{}");
    }
    // A rotation reaches both.
    let old = home.token();
    let output = home.a2mcp(&["rotate"]);
    assert!(output.status.success(), "{output:?}");
    for omp in [&first, &second] {
        assert_eq!(status_of_initialize(omp.port, &old), 401);
        assert_eq!(omp.client().call_text("probe_odd", "{}"), "{}");
    }
    // The terminal wants to know which one is meant.
    let output = home.a2mcp(&["status"]);
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(&first.port.to_string()) && said.contains(&second.port.to_string()), "{said}");
    home.assert_every_call_has_its_end();

    // One ends, the other does not notice.
    let port = first.port;
    first.close_stdin();
    first.wait();
    eventually("the end of the first bridge", || (home.sidecars().len() == 1).then_some(()));
    assert!(Connection::try_open(port).is_err());
    assert_eq!(second.client().call_text("probe_odd", "{}"), "{}");
    drop((first, home));
}

/// Two hosts that insist on one port: the second says who holds it and what it took instead.
#[test]
fn a_busy_fixed_port_is_named() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let home = Arc::new(Home::with_shim().config(&json!({ "port": free })));
    let first = Omp::setup(home.clone()).bridged();
    assert_eq!(first.port, free);
    let second = Omp::setup(home.clone()).bridged();
    assert_ne!(second.port, free);
    let notices: Vec<Value> = second.notices().into_iter().map(Value::from).collect();
    let warned = second.notice(&free.to_string());
    assert!(warned.contains(&second.port.to_string()), "{warned}; all: {notices:#?}");
    assert_eq!(second.client().call_text("probe_odd", "{}"), "{}");
    drop((first, home));
}
