//! Contract 3, and complaint C2: sessions outlive what they can.

use crate::support::http::{Client, INITIALIZE};
use crate::support::{Host, Setup};

#[test]
fn initialize_always_opens_a_new_session() {
    let host = Host::start();
    let client = host.client();
    let stale = host.http("POST", "/", &[("mcp-session-id", &client.session)], INITIALIZE.as_bytes());
    let fresh = stale.header("mcp-session-id").unwrap();
    assert_ne!(fresh, client.session);
    assert_eq!(fresh.len(), 36);
}

#[test]
fn delete_is_idempotent_and_ends_the_session() {
    let host = Host::start();
    let mut client = host.client();
    assert_eq!(client.delete().status, 204);
    assert_eq!(client.delete().status, 204);
    assert_eq!(host.http("DELETE", "/", &[], b"").status, 204);
    assert_eq!(client.post(r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#).status, 404);
}

#[test]
fn delete_cancels_the_sessions_calls_and_no_others() {
    let host = Host::start();
    let (mut one, mut other) = (host.client(), host.client());
    one.start_call("1", "hang", r#"{"who":"one"}"#);
    other.start_call("1", "hang", r#"{"who":"other"}"#);
    let call = |who: &str| {
        host.frame(|frame| frame["method"] == "tools/call" && frame["params"]["arguments"]["who"] == who)
    };
    let (ones, others) = (call("one"), call("other"));
    one.again().delete();
    let cancelled = host.frame(|frame| frame["method"] == "notifications/cancelled");
    assert_eq!(cancelled["params"]["requestId"], ones["id"]);
    assert_eq!(one.read().json()["error"]["code"], -32800);
    host.answer(&others, r#"{"content":[]}"#);
    assert!(other.read().json()["result"].is_object());
}

#[test]
fn sessions_and_url_survive_the_sidecar_and_the_host() {
    let mut host = Host::start();
    let (port, token) = (host.port, host.token.clone());
    let session = host.client().session;
    let ping = br#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;

    // The sidecar is killed; the shim starts the next one on the same port.
    host.child.kill().unwrap();
    host.child.wait().unwrap();
    let resumed =
        Setup::default().in_dir_of(&host).hello(serde_json::json!({"resume": {"port": port}})).start();
    assert_eq!((resumed.port, &resumed.token), (port, &token));
    assert_eq!(resumed.http("POST", "/", &[("mcp-session-id", &session)], ping).status, 200);

    // The host ends and comes back: another process, no `resume`.
    drop(resumed);
    let again = Setup::default().in_dir_of(&host).start();
    assert_eq!((again.port, &again.token), (port, &token), "the port is remembered");
    assert_eq!(again.http("POST", "/", &[("mcp-session-id", &session)], ping).status, 200);
    let forged = ("mcp-session-id", "00000000-0000-4000-8000-000000000000");
    assert_eq!(again.http("POST", "/", &[forged], ping).status, 404);
}

#[test]
fn sessions_do_not_survive_another_token() {
    let host = Host::start();
    let session = host.client().session;
    let dir = host.dir.clone();
    drop(host);
    std::fs::write(dir.path().join("a2mcp.json"), r#"{"token":"another-token-of-at-least-32-characters"}"#)
        .unwrap();
    let host = Setup::default().in_dir(dir).start();
    assert_eq!(
        host.http(
            "POST",
            "/",
            &[("mcp-session-id", &session)],
            b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}"
        )
        .status,
        404
    );
}

#[test]
fn a_session_with_a_call_outlives_a_crowd_of_newcomers() {
    let host = Host::start();
    let mut busy = host.client();
    busy.start_call("1", "hang", "{}");
    let call = host.call_frame("hang");
    let mut idle = host.client();
    for _ in 0..100 {
        Client::initialize(host.port, &host.token);
    }
    assert_eq!(
        idle.post(r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#).status,
        404,
        "the oldest idle one went"
    );
    host.answer(&call, r#"{"content":[]}"#);
    assert!(busy.read().json()["result"].is_object());
    assert_eq!(busy.post(r#"{"jsonrpc":"2.0","id":2,"method":"ping"}"#).status, 200);
}

#[test]
fn a_full_table_of_busy_sessions_refuses_politely() {
    let host = Host::start();
    let mut clients: Vec<Client> = (0..64).map(|_| host.client()).collect();
    for client in &mut clients {
        client.start_call("1", "hang", "{}");
    }
    crate::support::eventually("64 calls", || (host.count("tools/call") == 64).then_some(()));
    let reply = host.http("POST", "/", &[], INITIALIZE.as_bytes());
    assert_eq!(reply.status, 503);
    assert!(reply.header("retry-after").is_some());
    assert_eq!(clients[0].again().post(r#"{"jsonrpc":"2.0","id":2,"method":"ping"}"#).status, 200);
}

#[test]
fn a_damaged_state_file_costs_a_warning_and_the_old_sessions() {
    for content in ["", "{", r#"{"version":99}"#, "\u{0}\u{0}"] {
        let host = Host::start();
        let (port, dir) = (host.port, host.dir.clone());
        let session = host.client().session;
        drop(host);
        let file = dir.path().join(format!("a2mcp.state/{port}.json"));
        std::fs::write(&file, content).unwrap();
        let host = Setup::default().in_dir(dir).start();
        assert_eq!(host.port, port);
        let warning = host.frame(|frame| frame["method"] == "bridge/notify");
        assert!(
            warning["params"]["text"].as_str().unwrap().contains("earlier sessions are lost"),
            "{warning}"
        );
        let ping = br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
        assert_eq!(host.http("POST", "/", &[("mcp-session-id", &session)], ping).status, 404);
        host.client().call_text("echo", "{}");
    }
}
