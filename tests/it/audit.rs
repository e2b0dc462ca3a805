//! Contract 11 through the boundary: what stands in the audit file, and when.

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::support::{Host, Setup, audit_records, eventually, result_of, text_result};

/// The phases of each call, in the order of the file.
fn phases(records: &[Value]) -> HashMap<String, Vec<String>> {
    let mut phases: HashMap<String, Vec<String>> = HashMap::new();
    for record in records.iter().filter(|record| record["id"].is_string()) {
        let phase = record["phase"].as_str().unwrap().to_owned();
        phases.entry(record["id"].as_str().unwrap().to_owned()).or_default().push(phase);
    }
    phases
}

/// Every call has its pair, in order; how many calls there are.
fn check_pairs(records: &[Value]) -> usize {
    let phases = phases(records);
    for (id, phases) in &phases {
        assert_eq!(phases, &["start", "done"], "{id}");
    }
    phases.len()
}

#[test]
fn start_is_written_before_the_host_is_asked_and_done_before_the_answer_leaves() {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let file = dir.path().join("a2mcp.log");
    let at_dispatch = Arc::new(Mutex::new(Vec::new()));
    let host = Setup::default()
        .in_dir(dir)
        .handler({
            let (file, at_dispatch) = (file.clone(), at_dispatch.clone());
            move |_, message, _| {
                let id = message["params"]["_meta"]["a2mcp/call"]["callId"].as_str().unwrap();
                let mut phases = phases(&audit_records(&file));
                at_dispatch.lock().unwrap().push(phases.remove(id).unwrap_or_default());
                text_result("ok")
            }
        })
        .start();
    let mut client = host.client();
    for number in 0..20 {
        client.call_text("echo", &format!(r#"{{"n":{number}}}"#));
        let records = audit_records(&file);
        assert_eq!(records.len(), 2 * (number + 1), "both are there when the answer is");
        check_pairs(&records);
    }
    let at_dispatch = at_dispatch.lock().unwrap();
    assert_eq!(at_dispatch.len(), 20);
    assert!(at_dispatch.iter().all(|phases| phases == &["start"]), "{at_dispatch:?}");

    let records = audit_records(&file);
    let (start, done) = (&records[0], &records[1]);
    for record in [start, done] {
        assert_eq!(record["tool"], "echo");
        assert_eq!(record["args"], r#"{"n":0}"#);
        assert_eq!(record["sid"], client.session.as_str());
        let ts = record["ts"].as_str().unwrap();
        assert!(ts.len() == 24 && ts.ends_with('Z'), "{ts}");
    }
    assert!(start.get("isError").is_none());
    assert_eq!(done["isError"], false);
    assert!(done.get("outcome").is_none());
}

#[test]
fn refused_calls_leave_a_pair_too() {
    let host = Setup::default().config(r#"{"deny":["echo"]}"#).start();
    let mut client = host.client();
    for params in [
        r#"{"name":"nobody","arguments":{"a":1}}"#,
        r#"{"name":"echo","arguments":{"a":1}}"#,
        r#"{"arguments":{"a":1}}"#,
        r#"{"name":7}"#,
        r#"{"name":"fail"}"#,
    ] {
        let reply = client.rpc("tools/call", params);
        assert_eq!(reply["result"]["isError"], true, "{params}: {reply}");
    }
    assert_eq!(host.cli(&["pause"]).0, 0);
    assert_eq!(client.call_text("fail", "{}"), "paused by the operator");
    let records = host.audit();
    assert_eq!(check_pairs(&records), 6);
    let done = records.iter().filter(|record| record["phase"] == "done" && record["id"].is_string());
    assert!(done.clone().all(|record| record["isError"] == true), "{records:#?}");
    let tools: Vec<_> = done.map(|record| record["tool"].as_str().unwrap()).collect();
    assert_eq!(tools, ["nobody", "echo", "", "", "fail", "fail"]);
    let pause = records.iter().find(|record| record["tool"] == "operator").expect("the pause is audited");
    assert_eq!((&pause["id"], &pause["sid"], &pause["phase"]), (&Value::Null, &Value::Null, &"done".into()));
    assert_eq!(pause["args"], r#"{"action":"pause"}"#);
}

#[test]
fn what_is_no_call_is_not_audited() {
    let host = Host::start();
    let mut client = host.client();
    client.rpc("ping", "{}");
    client.rpc("tools/list", "{}");
    client.rpc("no/such", "{}");
    client.post(r#"{"jsonrpc":"2.0","id":1}"#);
    host.http("POST", "/", &[("mcp-session-id", "x")], br#"{"jsonrpc":"2.0","id":1,"method":"tools/call"}"#);
    client.delete();
    assert!(host.audit().is_empty());
    assert!(!host.path("a2mcp.log").exists(), "nothing to record, no file");
}

#[test]
fn long_strings_become_their_length_and_digest() {
    let host = Setup::default().handler(|_, _, _| text_result("ok")).start();
    let mut client = host.client();
    let marker = |text: &str| {
        let hash: String = Sha256::digest(text).iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        format!("<len:{},sha256:{hash}>", text.chars().count())
    };
    let (kept, long, wide) = ("k".repeat(120), "secret ".repeat(40), "\u{1F980}".repeat(121));
    let name = "n".repeat(121);
    let arguments = serde_json::json!({
        "kept": kept, "wide_kept": "\u{1F980}".repeat(120), "long": long, "deep": [[{"in": wide}]],
        (long.as_str()): 1,
    });
    client.call_text(&name, &arguments.to_string());
    client.call_text("echo", &format!("{}{}", "[".repeat(60), "]".repeat(60)));
    client.call_text("echo", &format!("[{}1]", "1,".repeat(3000)));
    client.call_text("echo", r#"{"n":12345678901234567890123,"m":1.50,"m":-0}"#);
    let records = host.audit();
    let args = |at: usize| records[at]["args"].as_str().unwrap();
    assert_eq!(records[0]["tool"], marker(&name).as_str());
    for record in &records[..2] {
        let args: Value = serde_json::from_str(record["args"].as_str().unwrap()).unwrap();
        assert_eq!(args["kept"], kept.as_str());
        assert_eq!(args["wide_kept"].as_str().unwrap().chars().count(), 120);
        assert_eq!(args["long"], marker(&long).as_str());
        assert_eq!(args["deep"][0][0]["in"], marker(&wide).as_str());
        assert_eq!(args[marker(&long)], 1, "names too");
    }
    assert!(args(2).contains("<max-depth>"), "{}", args(2));
    assert!(args(4).len() <= 1024);
    assert_eq!(args(6), r#"{"n":12345678901234567890123,"m":1.50,"m":-0}"#, "numbers keep their spelling");
    let text = std::fs::read_to_string(host.path("a2mcp.log")).unwrap();
    assert!(!text.contains("secret secret") && !text.contains(&host.token));
}

#[test]
fn a_cancelled_call_is_done_with_that_outcome() {
    let host = Host::start();
    let mut client = host.client();
    client.start_call("1", "hang", r#"{"how":"caller"}"#);
    host.call_with("how", "caller");
    let cancel = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#;
    client.again().post(cancel);
    client.read();
    client.start_call("2", "hang", r#"{"how":"operator"}"#);
    host.call_with("how", "operator");
    assert_eq!(host.cli(&["cancel", "--all"]).0, 0);
    client.read();
    client.start_call("3", "hang", r#"{"how":"session"}"#);
    host.call_with("how", "session");
    client.again().delete();
    client.read();
    let records = host.audit();
    assert_eq!(check_pairs(&records), 3);
    for record in records.iter().filter(|record| record["id"].is_string() && record["phase"] == "done") {
        assert_eq!((&record["outcome"], &record["isError"]), (&"cancelled".into(), &true.into()), "{record}");
    }
}

#[test]
fn a_call_that_the_host_took_with_it_has_an_unknown_outcome() {
    let mut host = Host::start();
    let mut client = host.client();
    client.start_call("1", "hang", "{}");
    host.call_frame("hang");
    host.close_stdin();
    assert!(client.read().json()["result"]["isError"] == true);
    host.wait();
    let records = host.audit();
    assert_eq!(check_pairs(&records), 1);
    assert_eq!((&records[1]["outcome"], &records[1]["isError"]), (&"unknown".into(), &true.into()));
}

#[test]
fn a_thousand_concurrent_calls_lose_no_record() {
    let host = Host::start();
    let first = host.client();
    std::thread::scope(|scope| {
        for thread in 0..50 {
            let mut client = first.again();
            scope.spawn(move || {
                for number in 0..20 {
                    let arguments = format!(r#"{{"n":{}}}"#, thread * 20 + number);
                    assert_eq!(client.call_text("echo", &arguments), arguments);
                }
            });
        }
    });
    let records = host.audit();
    assert_eq!((records.len(), check_pairs(&records)), (2000, 1000));
    let mut arguments: Vec<_> = records.iter().map(|record| record["args"].as_str().unwrap()).collect();
    arguments.sort_unstable();
    arguments.dedup();
    assert_eq!(arguments.len(), 1000, "each call has its own");
}

#[test]
fn two_sidecars_on_one_file_lose_nothing_across_a_rotation() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("shared.log");
    let line = format!("{{\"filler\":\"{}\"}}\n", "f".repeat(186));
    std::fs::write(&file, line.repeat(2000)).unwrap();
    let start = || Setup::default().env("A2MCP_AUDIT", file.to_str().unwrap()).start();
    let hosts = [start(), start()];
    std::thread::scope(|scope| {
        for host in &hosts {
            let first = host.client();
            for _ in 0..4 {
                let mut client = first.again();
                scope.spawn(move || {
                    for _ in 0..100 {
                        client.call_text("echo", "{}");
                    }
                });
            }
        }
    });
    let rotated = place.path().join("shared.log.1");
    assert!(std::fs::metadata(&rotated).unwrap().len() > 512 * 1024, "it was rotated past the limit");
    assert!(std::fs::metadata(&file).unwrap().len() < 400 * 1024);
    let records = audit_records(&file);
    assert_eq!(records.iter().filter(|record| record.get("filler").is_some()).count(), 2000);
    assert_eq!(check_pairs(&records), 800);
    for host in &hosts {
        assert_eq!(host.status()["auditFailures"], 0);
        assert!(!host.path("a2mcp.log").exists());
    }
}

#[test]
fn a_file_that_cannot_be_written_fails_no_call_and_is_counted_and_said() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("file");
    std::fs::write(&file, "").unwrap();
    let below_a_file = file.join("audit.log");
    for path in [Path::new("/dev/full"), place.path(), &below_a_file] {
        let host = Setup::default().env("A2MCP_AUDIT", path.to_str().unwrap()).start();
        let mut client = host.client();
        for _ in 0..3 {
            assert_eq!(client.call_text("echo", "{}"), "{}");
        }
        assert_eq!(host.status()["auditFailures"], 6, "{}", path.display());
        let said = || {
            let log = host.log();
            log.lines()
                .filter(|line| line.contains("audit record not written"))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(said().len(), 1, "once for the path: {}", host.log());
        assert!(said()[0].contains(path.to_str().unwrap()), "{:?}", said());
        for _ in 0..50 {
            client.call_text("echo", "{}");
        }
        assert_eq!(said().len(), 2, "and at the hundredth");
        assert_eq!(host.status()["auditFailures"], 106);
    }
}

#[test]
fn the_file_is_private_from_its_first_byte() {
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let host = Host::start();
    host.client().call_text("echo", "{}");
    assert_eq!(mode(&host.path("a2mcp.log")), 0o600);

    // One that somebody opened to others is closed again.
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let file = dir.path().join("a2mcp.log");
    std::fs::write(&file, "").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let host = Setup::default().in_dir(dir).start();
    host.client().call_text("echo", "{}");
    assert_eq!(mode(&file), 0o600);
}

#[test]
fn a_call_of_an_earlier_sidecar_gets_its_end_from_the_next_one() {
    let host = Host::start();
    let mut client = host.client();
    client.start_call("1", "hang", r#"{"q":"x"}"#);
    let frame = host.call_frame("hang");
    let meta = &frame["params"]["_meta"]["a2mcp/call"];
    let (port, dir, instance) = (host.port, host.dir.clone(), host.instance.clone());
    let mut config = host.config();
    config["replayWindowSeconds"] = 1.into();
    drop(host);
    let in_flight = serde_json::json!([{
        "callId": meta["callId"], "tool": "hang", "state": "finished", "startedAt": 1, "note": meta["note"],
    }]);
    let next = Setup::default()
        .in_dir(dir)
        .config(&config.to_string())
        .hello(serde_json::json!({"instance": instance, "resume": {"port": port}, "inFlight": in_flight}))
        .start();
    next.send(&format!(
        r#"{{"jsonrpc":"2.0","method":"bridge/result","params":{{"callId":{},"result":{}}}}}"#,
        meta["callId"],
        result_of("late", false)
    ));
    let records =
        eventually("the end of the call", || Some(next.audit()).filter(|records| records.len() == 2));
    let ack = next.frame(|frame| frame["method"] == "bridge/ack");
    assert_eq!(ack["params"]["callIds"], serde_json::json!([meta["callId"]]), "once nobody can claim it");
    assert_eq!(check_pairs(&records), 1);
    assert_eq!(records[1]["sid"], client.session.as_str());
    assert_eq!((&records[1]["args"], &records[1]["isError"]), (&r#"{"q":"x"}"#.into(), &false.into()));
}
