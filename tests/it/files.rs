//! Contract 5 as far as it needs no file server: the tools' words, and that they are the sidecar's alone.

use serde_json::{Value, json};

use crate::support::wrap::{self, Wrap};
use crate::support::{Answer, Host, Setup, eventually};

fn error(result: &Value) -> &str {
    assert_eq!(result["isError"], true, "{result}");
    result["content"][0]["text"].as_str().unwrap()
}

#[test]
fn without_a_share_the_tools_say_so_and_the_host_hears_nothing() {
    let host = Setup::default().handler(|_, _, _| Answer::Error("asked".into())).start();
    let mut client = host.client();
    let say = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    assert_eq!(say(&client.call_text("xfer_status", "{}")), json!({"serving": false}));
    let stopped = json!({"stopped": false, "note": "nothing was shared"});
    assert_eq!(say(&client.call_text("xfer_stop", r#"{"ignored":1}"#)), stopped);
    let refused = client.call("xfer_share", "{}");
    assert_eq!(error(&refused), "xfer_share needs a 'path' — the file or directory to serve");
    let refused = client.call("xfer_share", r#"{"path":"/no/such/thing"}"#);
    assert_eq!(error(&refused), "cannot serve /no/such/thing: No such file or directory (os error 2)");
    assert_eq!(host.count("tools/call"), 0);

    // Each call is a pair in the audit; what did not happen is no action.
    let records = host.audit();
    let phases: Vec<_> = records
        .iter()
        .map(|record| (record["tool"].as_str().unwrap(), record["phase"].as_str().unwrap()))
        .collect();
    assert_eq!(
        phases,
        [
            ("xfer_status", "start"),
            ("xfer_status", "done"),
            ("xfer_stop", "start"),
            ("xfer_stop", "done"),
            ("xfer_share", "start"),
            ("xfer_share", "done"),
            ("xfer_share", "start"),
            ("xfer_share", "done"),
        ]
    );
    assert_eq!(records[7]["isError"], true);
}

#[test]
fn a_missing_file_server_is_named_with_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let host = Setup::default().config(r#"{"xfer":{"dufs":"/no/such/dufs"}}"#).start();
    let mut client = host.client();
    let refused = client.call("xfer_share", &json!({ "path": dir.path() }).to_string());
    assert!(error(&refused).contains("/no/such/dufs"), "{refused}");
    assert_eq!(host.http("GET", "/xfer/", &[], b"").status, 404);
}

/// Nothing is served that leads to another bridge's token, or to a program that is run.
#[test]
fn agents_directories_and_our_programs_are_never_shared() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().canonicalize().unwrap();
    let (elsewhere, agents) = (path.join("elsewhere"), [".a2mcp", ".omp/agent"]);
    let programs = ".local/share/a2mcp";
    for dir in
        agents.iter().copied().chain([".local/share/a2mcp/bin", ".a2mcp/deep", "fine", "elsewhere/bin"])
    {
        std::fs::create_dir_all(path.join(dir)).unwrap();
    }
    std::fs::write(path.join(".a2mcp/a2mcp.json"), "{}").unwrap();
    std::fs::write(path.join(".local/share/a2mcp/bin/dufs"), "").unwrap();
    std::os::unix::fs::symlink(path.join(".omp"), path.join("fine/link")).unwrap();
    let host = Setup::default()
        .config(r#"{"xfer":{"dufs":"/no/such/dufs"}}"#)
        .env("HOME", path.to_str().unwrap())
        .hello(json!({"host": {
            "name": "test", "version": "0", "pid": std::process::id(), "cwd": path, "home": path,
        }}))
        .start();
    let mut client = host.client();
    let mut refused = |shared: &str| {
        let answer = client.call("xfer_share", &json!({ "path": shared }).to_string());
        error(&answer).to_owned()
    };
    for (shared, why) in [
        ("~", "it holds this bridge's own files"),
        (".", "it holds this bridge's own files"),
        ("~/.a2mcp", "it is this bridge's own files (an agent directory)"),
        ("~/.a2mcp/a2mcp.json", "it is inside this bridge's own files (an agent directory)"),
        (".a2mcp/deep", "it is inside this bridge's own files (an agent directory)"),
        (".omp", "it holds this bridge's own files (an agent directory)"),
        ("~/.omp/agent", "it is this bridge's own files (an agent directory)"),
        ("fine/link", "it holds this bridge's own files (an agent directory)"),
        (programs, "it is this bridge's own files (the directory of its programs)"),
        (".local/share/a2mcp/bin", "it is inside this bridge's own files (the directory of its programs)"),
        (
            ".local/share/a2mcp/bin/dufs",
            "it is inside this bridge's own files (the directory of its programs)",
        ),
        (".local", "it holds this bridge's own files (the directory of its programs)"),
        (host.path("").to_str().unwrap(), "it is this bridge's own files (its agent directory)"),
    ] {
        let said = refused(shared);
        assert!(said.starts_with("cannot serve ") && said.contains(why), "{shared}: {said}");
    }
    // The file server is what is missing here, not the permission.
    assert!(refused("fine").contains("/no/such/dufs"));
    // A program that an installation put somewhere else.
    let registry = json!({ "installed": { "dufs": {
        "version": "0.46.0", "asset": "dufs.tar.gz", "assetSha256": "0".repeat(64),
        "path": elsewhere.join("bin/dufs"), "sha256": "0".repeat(64),
    }}});
    assert!(refused("elsewhere").contains("/no/such/dufs"));
    std::fs::write(host.path("a2mcp.installs.json"), registry.to_string()).unwrap();
    assert!(
        refused("elsewhere").contains("it holds this bridge's own files (the directory of its programs)")
    );
    // Nor is what holds another bridge that runs.
    let other = tempfile::tempdir_in(path.join("fine")).unwrap();
    let mut server = std::process::Command::new("python3");
    server.arg(wrap::script());
    let wrap = Wrap::start_command(other, "{}", &[], &server);
    assert!(refused("fine").contains("it holds the files of another bridge"));
    drop(wrap);
    assert!(refused("fine").contains("/no/such/dufs"), "and it still works");
}

#[test]
fn the_operator_decides_over_the_own_tools_too() {
    let host = Host::start();
    let mut client = host.client();
    assert_eq!(host.cli(&["pause"]).0, 0);
    assert_eq!(error(&client.call("xfer_status", "{}")), "paused by the operator");
    assert_eq!(host.cli(&["resume"]).0, 0);
    assert_eq!(client.call("xfer_status", "{}")["isError"], false);
    let denied = Setup::default().config(r#"{"deny":["xfer_stop"]}"#).start();
    let mut client = denied.client();
    assert!(error(&client.call("xfer_stop", "{}")).contains("not exposed"));
}

/// The own tools need no host that answers.
#[test]
fn a_silent_host_holds_up_no_own_tool() {
    let mut host = Setup::default().without_list().spawn();
    host.expect_hello();
    host.fall_silent();
    let mut client = host.client();
    assert_eq!(client.call("xfer_status", "{}")["isError"], false);
    eventually("the record", || (host.audit().len() == 2).then_some(()));
}

#[test]
fn the_hello_names_the_feature() {
    let mut host = Setup::default().spawn();
    assert_eq!(host.expect_hello()["result"]["features"], json!(["xfer"]));
}
