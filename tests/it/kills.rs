//! The kill proof of the ledger (contract 4.2): the sidecar dies at each point of a call's way, by the
//! crash points of a debug build. One execution, one result, an audit that says so, nothing left over.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::caller::{Caller, Got, Way};
use crate::support::reference::{Host, token};
use crate::support::{Host as InTest, Setup, eventually, result_of, within};

/// Large enough to be on its way in pieces.
const BODY: usize = 300_000;

/// Points before the host has the whole call: sent again, it runs for the first time.
const BEFORE: [&str; 3] = ["before-audit-start", "after-audit-start", "frame-half"];
/// Points after that: it has run or runs, and is never run again.
const AFTER: [&str; 5] = ["frame-whole", "result-read", "done-written", "response-half", "response-whole"];

/// Within this time acknowledgements have usually been sent.
const ACKNOWLEDGED: Duration = Duration::from_millis(400);

struct Case {
    host: Host,
    caller: Caller,
}

impl Case {
    fn new(point: &str, way: Way, config: &Value) -> Self {
        let host = Host::crashing_at(point, &config.to_string());
        std::fs::write(host.dir.path().join("file"), "x".repeat(BODY)).unwrap();
        let caller = Caller::new(host.port(), &token(host.dir.path()), way);
        Self { host, caller }
    }

    fn arguments(&self) -> Value {
        json!({ "path": self.host.dir.path().join("file") })
    }

    fn call(&mut self) -> Got {
        let arguments = self.arguments();
        let got = self.caller.call("read", &arguments);
        assert!(got.text().len() == BODY && got.result["isError"] == false, "not the file");
        got
    }

    /// The audit's phases by call id.
    fn audit(&self) -> BTreeMap<String, Vec<String>> {
        let mut calls: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        for record in self.host.audit() {
            calls.entry(text(&record["id"])).or_default().push(text(&record["phase"]));
        }
        calls
    }

    /// One execution, its audit, and nothing that a sidecar or the host still keeps of it.
    fn check(&mut self, point: &str, attached: bool) {
        let executed = self.host.executed();
        assert_eq!(executed.len(), 1, "{point}: {executed:?}");
        let mut audit = self.audit();
        let mut phases = audit.remove(&executed[0]).unwrap_or_default();
        phases.sort_unstable();
        let expected: &[&str] = if attached { &["attached", "done", "start"] } else { &["done", "start"] };
        assert_eq!(phases, expected, "{point}");
        // What died before the host had it never had an end.
        let lost = if BEFORE[1..].contains(&point) { vec![vec!["start".to_owned()]] } else { Vec::new() };
        assert_eq!(audit.into_values().collect::<Vec<_>>(), lost, "{point}");

        // The sidecar lets go of it, and then the host: acknowledgements go out in batches, so a kill may
        // come before one, and the next sidecar lets go in its turn.
        for tries in 1.. {
            let is_empty = |host: &Host| host.calls_in_flight() == json!([]);
            eventually("an empty ledger", || is_empty(&self.host).then_some(()));
            std::thread::sleep(ACKNOWLEDGED);
            self.host.kill_sidecar();
            if is_empty(&self.host) {
                break;
            }
            assert!(tries < 3, "{point}: the host still keeps {}", self.host.calls_in_flight());
        }
        assert_eq!(self.host.executed().len(), 1, "{point}");
    }
}

fn a_call_outlives(way: Way, config: &Value, points: &[&str]) {
    std::thread::scope(|scope| {
        for &point in points {
            scope.spawn(move || {
                let mut case = Case::new(point, way, config);
                let got = case.call();
                case.host.next_sidecar();
                assert_eq!(case.host.ready["restarts"], 1);
                let has_run = AFTER.contains(&point);
                match point {
                    // It had everything.
                    "response-whole" => assert_eq!((got.sent, got.resumed, got.attached()), (1, 0, None)),
                    _ if way == Way::Stream && has_run => assert_eq!((got.sent, got.attached()), (1, None)),
                    _ => assert_eq!((got.sent, got.attached().is_some()), (2, has_run), "{point}"),
                }
                if point != "response-whole" {
                    case.caller.ping();
                }
                case.check(point, got.attached().is_some());
            });
        }
    });
}

#[test]
fn a_json_caller_that_sends_again_under_a_new_id_has_one_execution_and_its_result() {
    let config = json!({ "replayWindowSeconds": 4 });
    a_call_outlives(Way::JsonNewId, &config, &BEFORE);
    a_call_outlives(Way::JsonNewId, &config, &AFTER);
}

#[test]
fn a_json_caller_that_sends_the_same_request_again_has_one_execution_and_its_result() {
    let config = json!({ "replayWindowSeconds": 4 });
    a_call_outlives(Way::JsonSameId, &config, &BEFORE);
    a_call_outlives(Way::JsonSameId, &config, &AFTER);
}

#[test]
fn a_caller_that_resumes_its_stream_has_one_execution_and_its_result() {
    let config = json!({ "streamAfterMs": 0, "replayWindowSeconds": 4 });
    a_call_outlives(Way::Stream, &config, &BEFORE);
    a_call_outlives(Way::Stream, &config, &AFTER);
}

/// The response was written in full, but something between lost it: to the sidecar after the kill, the
/// caller that sends it again has not had it.
#[test]
fn a_response_that_was_written_and_lost_is_had_again() {
    for (way, again) in
        [(Way::JsonNewId, Way::JsonNewId), (Way::JsonSameId, Way::JsonSameId), (Way::Stream, Way::JsonNewId)]
    {
        let mut case = Case::new("response-whole", way, &json!({}));
        case.call();
        case.host.next_sidecar();
        let mut caller = case.caller.by(again);
        let got = caller.call("read", &case.arguments());
        assert_eq!(got.sent, 1);
        assert_eq!(got.attached(), Some(case.host.executed()[0].as_str()));
        caller.ping();
        case.check("response-whole", true);
    }
}

/// A host whose sidecar is killed under a `bash` that waits for a file.
struct Waiting {
    host: Host,
    command: Value,
}

impl Waiting {
    fn start() -> Self {
        let host = Host::start(&[]);
        let dir = host.dir.path().display();
        let script = format!("cat {dir}/text; while [ ! -e {dir}/go ]; do sleep 0.02; done");
        std::fs::write(host.dir.path().join("text"), "old").unwrap();
        Self { host, command: json!({ "command": script }) }
    }

    fn caller(&self) -> Caller {
        Caller::new(self.host.port(), &token(self.host.dir.path()), Way::JsonNewId)
    }

    fn started(&self) -> usize {
        self.host.executions().iter().filter(|(event, tool)| event == "start" && tool == "bash").count()
    }

    fn until_started(&self, count: usize) {
        eventually("the executions", || (self.started() == count).then_some(()));
    }

    fn go(&self) {
        std::fs::write(self.host.dir.path().join("go"), "").unwrap();
    }
}

#[test]
fn an_edit_between_two_runs_of_the_same_command_never_meets_the_old_output() {
    let mut case = Waiting::start();
    let caller = case.caller();
    let mut first = case.host.session();
    first.session.clone_from(&caller.session);
    first.start_call("1", "bash", &case.command.to_string());
    case.until_started(1);
    case.host.kill_sidecar();
    // Contract 4.2: a different call later than two seconds after the break.
    std::thread::sleep(Duration::from_millis(2100));
    let mut caller = caller.by(Way::JsonNewId);
    let text = case.host.dir.path().join("text");
    caller.call("write", &json!({ "path": text, "content": "new" }));
    case.go();
    let got = caller.call("bash", &case.command);
    assert_eq!((got.text(), got.attached()), ("new", None));
    assert_eq!(case.started(), 2);
}

#[test]
fn two_sessions_with_the_same_command_both_run_across_a_kill() {
    let mut case = Waiting::start();
    let command = &case.command.clone();
    let results = std::thread::scope(|scope| {
        let callers = [case.caller(), case.caller()];
        let calls = callers.map(|mut caller| scope.spawn(move || caller.call("bash", command)));
        case.until_started(2);
        case.host.kill_sidecar();
        // Both are back.
        eventually("both", || {
            let attached = case.host.audit().iter().filter(|record| record["phase"] == "attached").count();
            (attached == 2).then_some(())
        });
        case.go();
        calls.map(|call| call.join().unwrap())
    });
    assert!(results.iter().all(|got| got.text() == "old"));
    let mut attached = results.map(|got| got.attached().unwrap().to_owned());
    attached.sort_unstable();
    let mut executed = case.host.executed();
    executed.sort_unstable();
    assert_eq!(executed, attached, "each has an execution of its own");
}

/// A call of a first sidecar, as a hello tells the next one of it.
fn inherited(host: &InTest, state: &str) -> Setup {
    let call = host.call_frame("hang")["params"]["_meta"]["a2mcp/call"].clone();
    Setup::default()
        .in_dir_of(host)
        .hello(json!({"instance": host.instance, "resume": {"port": host.port}, "inFlight": [{
        "callId": call["callId"], "tool": "hang", "state": state, "startedAt": 1, "note": call["note"]}]}))
}

#[test]
fn a_cancelled_call_never_attaches_after_a_restart() {
    let host = InTest::start();
    let mut client = host.client();
    client.start_call("1", "hang", r#"{"n":1}"#);
    host.call_frame("hang");
    client.cancel("1");
    host.frame(|frame| frame["method"] == "notifications/cancelled");
    let next = inherited(&host, "cancelled");
    drop(host);
    let next = next.start();
    let mut callers = [client.again(), client.again()];
    for (id, caller) in callers.iter_mut().enumerate() {
        caller.start_call(&(id + 1).to_string(), "hang", r#"{"n":1}"#);
        eventually("an execution of its own", || (next.count("tools/call") == id + 1).then_some(()));
    }

    // Cancelled only under the next sidecar: the same.
    let last = inherited(&next, "running");
    drop(next);
    let last = last.start();
    client.cancel("1");
    last.frame(|frame| frame["method"] == "bridge/cancel");
    let mut caller = client.again();
    caller.start_call("3", "hang", r#"{"n":1}"#);
    last.call_frame("hang");
}

#[test]
fn a_dropped_result_says_so_and_is_not_run_again() {
    let host = InTest::start();
    let mut client = host.client();
    client.start_call("1", "hang", r#"{"n":1}"#);
    let frame = host.call_frame("hang");
    let call_id = frame["params"]["_meta"]["a2mcp/call"]["callId"].as_str().unwrap().to_owned();
    let next = inherited(&host, "dropped");
    drop(host);
    let next = next.start();
    let result = client.again().call("hang", r#"{"n":1}"#);
    let text = result["content"][0]["text"].as_str().unwrap();
    assert_eq!(result["isError"], true);
    assert!(text.contains("dropped") && text.contains(&call_id) && text.contains("not run again"), "{text}");
    assert_eq!(next.count("tools/call"), 0);
}

/// More results than a host keeps, none of them ever fetched: the oldest is dropped, and its caller is
/// told so after the restart.
#[test]
fn the_hosts_own_bound_on_results_drops_and_never_runs_again() {
    let dir = tempfile::tempdir().unwrap();
    let approved = dir.path().join("approved");
    let mut host = Host::start(&["--approval-file", approved.to_str().unwrap()]);
    let total = a2mcp::refhost::store::MAX_RESULTS + 4;
    let client = host.session();
    let arguments = |n: usize| json!({ "n": n }).to_string();
    let count =
        |host: &Host, wanted: &str| host.executions().iter().filter(|(event, _)| event == wanted).count();
    let waiting: Vec<_> = (0..total)
        .map(|n| {
            let mut client = client.again();
            client.start_call(&n.to_string(), "needs_approval", &arguments(n));
            client
        })
        .collect();
    within(Duration::from_secs(40), "all calls", || (count(&host, "start") == total).then_some(()));
    // Nobody fetches the results: the sidecar does not even read them.
    host.sidecar().signal(rustix::process::Signal::STOP);
    std::fs::write(approved, "").unwrap();
    within(Duration::from_secs(40), "all ends", || (count(&host, "done") == total).then_some(()));
    host.kill_sidecar();
    drop(waiting);
    let mut dropped = 0;
    for n in 0..total {
        let result = client.again().call("needs_approval", &arguments(n));
        let text = result["content"][0]["text"].as_str().unwrap();
        match result["isError"] == true {
            true => {
                assert!(text.contains("dropped"), "{text}");
                dropped += 1;
            }
            false => assert_eq!(text, "approved"),
        }
    }
    assert_eq!((dropped, count(&host, "start")), (4, total));
}

#[test]
fn a_result_that_came_before_the_next_sidecar_is_delivered_by_it() {
    let host = InTest::start();
    let mut client = host.client();
    client.start_call("1", "hang", r#"{"n":1}"#);
    let frame = host.call_frame("hang");
    let call_id = frame["params"]["_meta"]["a2mcp/call"]["callId"].clone();
    let next = inherited(&host, "finished");
    drop(host);
    let next = next.start();
    let mut again = client.again();
    again.start_call("1", "hang", r#"{"n":1}"#);
    let result = result_of("ran once", false);
    next.send(&format!(
        r#"{{"jsonrpc":"2.0","method":"bridge/result","params":{{"callId":{call_id},"result":{result}}}}}"#
    ));
    assert_eq!(again.read().json()["result"]["content"][0]["text"], "ran once");
    assert_eq!(next.count("tools/call"), 0);
}
