//! The life of an open tunnel: what it survives, what replaces it, what ends it, and what passes
//! through it meanwhile.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use a2mcp::process::Identity;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::refhost::gone;
use crate::streams::call_id;
use crate::support::edge::Way;
use crate::support::http::{Client, Connection};
use crate::support::reference::{self, Program, identity};
use crate::support::sse::Item;
use crate::support::{Answer, eventually, result_of, within};
use crate::tunnel::{Bridge, command, setup};

/// What a dead host may take to leave nothing behind (contract 15).
const GONE: Duration = Duration::from_secs(3);

impl Bridge {
    /// The cloudflared that runs.
    fn process(&self) -> Identity {
        identity(&self.standin.starts().last().expect("it was started")["pid"])
    }

    /// The next sidecar of the same host.
    fn succeed(&mut self) {
        let resume = json!({ "resume": { "port": self.host.port } });
        self.host = setup(&self.standin, &self.edge).in_dir_of(&self.host).hello(resume).start();
    }

    fn crash(&mut self) {
        self.host.child.kill().unwrap();
        self.host.child.wait().unwrap();
    }

    fn keeper(&self) -> Identity {
        identity(&self.host.status()["keeper"]["pid"])
    }

    /// Waits for another tunnel than `name`, open and verified; its name.
    fn replaced(&self, name: &str) -> String {
        self.until("another name", |tunnel| {
            tunnel["state"] == "open" && tunnel["url"].as_str().is_some_and(|url| !url.contains(name))
        });
        self.name()
    }

    /// What the audit file says: action, whether with an error.
    fn audited(&self) -> Vec<(String, bool)> {
        let records = self.records();
        let read = |record: &Value| {
            let args: Value = serde_json::from_str(record["args"].as_str().unwrap()).unwrap();
            assert_eq!(record["isError"] == true, args["error"].is_string(), "{record}");
            (args["action"].as_str().unwrap().to_owned(), args["error"].is_string())
        };
        records.iter().map(read).collect()
    }

    /// The state file's word.
    fn saved(&self) -> bool {
        let file = self.host.path(&format!("a2mcp.state/{}.json", self.host.port));
        let state: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        state["tunnel"] == true
    }
}

#[test]
fn it_keeps_its_name_through_a_crash_and_a_restart_of_the_sidecar() {
    let mut bridge = Bridge::start(json!({}));
    let name = bridge.opened();
    let process = bridge.process();
    eventually("a word in the state file", || bridge.saved().then_some(()));
    bridge.crash();
    let (_, public) = bridge.standin.name();
    let mut caller = Connection::open(public);
    caller.send("GET", "/livez", &[], b"").unwrap();
    bridge.succeed();
    assert_eq!(caller.read().unwrap().status, 200, "a request through it waited for the next sidecar");
    assert_eq!((bridge.name(), bridge.tunnel()["state"].clone()), (name.clone(), json!("open")));
    let body = crate::support::http::INITIALIZE.as_bytes();
    assert_eq!(bridge.host.http("POST", "/", &[("Host", &name)], body).status, 200, "its name is allowed");
    bridge.host.signal(Signal::HUP);
    assert_eq!(bridge.host.ends_within(Duration::from_secs(5)), Some(75));
    bridge.succeed();
    assert_eq!(bridge.name(), name);
    assert!(process.is_alive());
    assert_eq!(bridge.standin.starts().len(), 1);
    assert_eq!(bridge.host.count("bridge/notify"), 0, "nothing to tell: {:?}", bridge.host.frames());
    assert_eq!(bridge.audited(), [("start".into(), false)]);
    assert_eq!(command(&bridge.host, "close", &["tunnel", "stop"])["text"], "the tunnel is closed");
    assert!(!process.is_alive());
    assert_eq!(bridge.audited().last().unwrap(), &("stop".into(), false));
    eventually("a word in the state file", || (!bridge.saved()).then_some(()));
}

#[test]
fn an_opening_goes_on_in_the_next_sidecar() {
    let mut bridge = Bridge::start(json!({"connectDelay": 600}));
    std::thread::scope(|scope| {
        let asked = bridge.host.dir.path().to_owned();
        scope
            .spawn(move || crate::support::cli(&["tunnel"], Some(&asked), &std::collections::HashMap::new()));
        let named = |tunnel: &Value| tunnel["why"].as_str().is_some_and(|why| why.contains("connecting "));
        bridge.until("a name", named);
        bridge.crash();
        bridge.succeed();
        bridge.until("the opening", named);
        bridge.standin.scenario(json!({}));
        bridge.until("the open tunnel", |tunnel| tunnel["state"] == "open");
    });
    assert_eq!(bridge.standin.starts().len(), 1);
    bridge.host.notice("the tunnel is open");
}

#[test]
fn what_was_lost_while_no_sidecar_ran_is_opened_again_with_a_notice() {
    let mut bridge = Bridge::start(json!({}));
    let name = bridge.opened();
    eventually("a word in the state file", || bridge.saved().then_some(()));
    bridge.crash();
    bridge.process().signal(Signal::KILL);
    eventually("its end", || bridge.standin.names().is_empty().then_some(()));
    bridge.succeed();
    bridge.host.notice("the tunnel was lost: cloudflared was ended by signal 9");
    let next = bridge.replaced(&name);
    bridge.host.notice(&next);
}

/// P8 as well: the end of the old process touches nothing of the new one.
#[test]
fn one_that_dies_is_opened_again_with_another_name_and_a_notice() {
    let bridge = Bridge::start(json!({}));
    let name = bridge.opened();
    bridge.process().signal(Signal::KILL);
    let lost = bridge.host.notice("the tunnel was lost");
    assert_eq!(lost["level"], "warning");
    assert!(lost["text"].as_str().unwrap().contains("another name"), "{lost}");
    let next = bridge.replaced(&name);
    bridge.host.notice(&next);
    assert_eq!(bridge.audited(), [("start".into(), false), ("stop".into(), true), ("start".into(), false)]);
    let forbidden = |name: &str| bridge.host.http("POST", "/", &[("Host", name)], b"").status == 403;
    assert!(forbidden(&name) && !forbidden(&next));
}

/// P8.
#[test]
fn one_that_ends_at_once_again_and_again_is_given_up() {
    let bridge = Bridge::start(json!({}));
    bridge.opened();
    bridge.standin.scenario(json!({"service": "html"}));
    bridge.process().signal(Signal::KILL);
    let failed = bridge.until("the end of all tries", |tunnel| tunnel["state"] == "failed");
    assert!(failed["why"].as_str().unwrap().contains("ended five times in 30 s"), "{failed}");
    assert!(failed["why"].as_str().unwrap().contains("500 Internal Server Error"), "{failed}");
    assert_eq!(bridge.host.notice("could not be opened again")["level"], "error");
    assert_eq!(bridge.standin.starts().len(), 5, "the one that was open, and four more");
    assert!(bridge.host.cli(&["doctor"]).1.contains("the tunnel failed"));
    bridge.standin.scenario(json!({}));
    assert_eq!(bridge.open().1["state"], "open", "the operator may try again");
}

#[test]
fn one_that_cloudflare_has_deleted_is_replaced() {
    let bridge = Bridge::start(json!({}));
    let name = bridge.opened();
    let old = bridge.process();
    bridge.standin.scenario(json!({"edge": "deleted", "retryPause": 0.1}));
    bridge.host.notice("Cloudflare has deleted the tunnel");
    bridge.standin.scenario(json!({}));
    bridge.replaced(&name);
    assert!(gone(&[old]) < GONE, "the old one would try for ever");
}

#[test]
fn a_dropped_link_is_shown_and_comes_back_under_its_name() {
    let bridge = Bridge::start(json!({}));
    let name = bridge.opened();
    bridge.standin.scenario(json!({"edge": "dropped", "retryPause": 0.1}));
    let shown = bridge.until("the drop", |tunnel| tunnel["state"] != "open");
    assert_eq!(shown["state"], "open, not verified");
    assert!(shown["why"].as_str().unwrap().contains("link to Cloudflare is down"), "{shown}");
    bridge.standin.scenario(json!({}));
    bridge.until("the link", |tunnel| tunnel["state"] == "open");
    assert_eq!((bridge.name(), bridge.standin.starts().len()), (name, 1));
    assert_eq!(bridge.host.count("bridge/notify"), 1, "the opening alone: {:?}", bridge.host.frames());
}

#[test]
fn a_silent_loss_is_found_by_probing_and_mended() {
    let bridge = Bridge::start(json!({}));
    let name = bridge.opened();
    // Its process says that all is well.
    bridge.edge.set(Way::Forgotten);
    // The operator doubts; the slow probe would have found it within a minute.
    let shown = bridge.open().1;
    assert_eq!(shown["state"], "open, not verified", "{shown}");
    bridge.host.notice("nothing comes through the tunnel any more (Cloudflare does not reach the tunnel");
    bridge.edge.set(Way::Open);
    bridge.replaced(&name);
    assert_eq!(bridge.standin.starts().len(), 2);
}

/// U5.
#[test]
fn a_binary_that_vanishes_is_named_and_not_tried_for_ever() {
    let bridge = Bridge::start(json!({}));
    bridge.opened();
    std::fs::remove_file(bridge.standin.program()).unwrap();
    bridge.process().signal(Signal::KILL);
    let failed = bridge.until("the failure", |tunnel| tunnel["state"] == "failed");
    let why = failed["why"].as_str().unwrap();
    let path = bridge.standin.program().display().to_string();
    assert!(why.contains("binary vanished") && why.contains(&path) && why.contains("sha256"), "{why}");
    assert!(failed["advice"].as_str().unwrap().contains("antivirus"), "{failed}");
    assert_eq!(bridge.standin.starts().len(), 1);
}

#[test]
fn the_next_keeper_gets_a_new_tunnel_and_the_operator_is_told() {
    let bridge = Bridge::start(json!({}));
    let name = bridge.opened();
    let old = bridge.process();
    bridge.keeper().signal(Signal::KILL);
    bridge.host.notice("the keeper that ran it has died");
    bridge.replaced(&name);
    assert!(!old.is_alive(), "it dies with its keeper");
}

#[test]
fn closing_ends_an_opening_at_any_moment() {
    for scenario in [json!({"serviceDelay": 600}), json!({"metricsDelay": 600}), json!({"connectDelay": 600})]
    {
        let bridge = Bridge::start(scenario);
        std::thread::scope(|scope| {
            let opening = scope.spawn(|| bridge.host.cli(&["tunnel"]));
            let process = eventually("a start", || bridge.standin.starts().pop());
            assert_eq!(bridge.host.cli(&["tunnel", "stop"]).1.trim(), "the tunnel is closed");
            assert!(Identity::of(process["pid"].as_u64().unwrap() as u32).is_none());
            let (code, _, err) = opening.join().unwrap();
            assert!(code == 1 && err.contains("no tunnel: closed"), "{code} {err}");
        });
        bridge.standin.scenario(json!({}));
        bridge.opened();
    }
}

/// P5: SIGKILL of everybody in turn.
#[test]
fn it_never_outlives_the_host_whatever_kills_whom() {
    for victim in ["host", "sidecar and host", "keeper and host"] {
        let bridge = Bridge::start(json!({}));
        drop(bridge.host);
        let dir = tempfile::tempdir().unwrap();
        let config = json!({ "xfer": { "cloudflared": bridge.standin.program() } });
        std::fs::write(dir.path().join("a2mcp.json"), config.to_string()).unwrap();
        let mut start = reference::a2mcp(&["reference-host", "--agent-dir"]);
        start.arg(dir.path()).arg("--execution-log").arg(dir.path().join("executions"));
        let program = Program::start(start.envs(bridge.edge.env()));
        let ready = program.event("ready");
        let host = reference::Host { program, dir, ready };
        let cli = |args: &[&str]| {
            crate::support::cli(args, Some(host.dir.path()), &std::collections::HashMap::new())
        };
        let opening = std::thread::scope(|scope| {
            scope.spawn(|| cli(&["tunnel", "--json"]));
            eventually("a tunnel", || bridge.standin.names().pop())
        });
        assert!(opening.0.ends_with(".trycloudflare.com"));
        let status: Value = serde_json::from_str(&cli(&["status", "--json"]).1).unwrap();
        let (sidecar, keeper) = (host.sidecar(), identity(&status["keeper"]["pid"]));
        let process = identity(&bridge.standin.starts().last().unwrap()["pid"]);
        match victim {
            "sidecar and host" => _ = sidecar.signal(Signal::KILL),
            "keeper and host" => _ = keeper.signal(Signal::KILL),
            _ => {}
        }
        host.program.identity().signal(Signal::KILL);
        assert!(gone(&[process, sidecar, keeper]) < GONE, "{victim}");
        let later: Vec<Identity> = bridge
            .standin
            .starts()
            .iter()
            .filter_map(|start| Identity::of(start["pid"].as_u64()? as u32))
            .collect();
        assert!(gone(&later) < GONE, "{victim}: one that was started meanwhile");
    }
}

/// Contract 15: the tunnel closes first of all.
#[test]
fn at_a_stop_it_closes_before_anything_else_and_calls_end_in_peace() {
    let mut bridge = Bridge::start(json!({}));
    bridge.opened();
    let process = bridge.process();
    let mut client = bridge.host.client();
    client.start_call("1", "hang", "{}");
    bridge.host.call_frame("hang");
    let begun = Instant::now();
    bridge.host.signal(Signal::TERM);
    within(Duration::from_secs(4), "the tunnel's end", || (!process.is_alive()).then_some(()));
    assert!(bridge.host.child.try_wait().unwrap().is_none(), "a call still runs: {:?}", begun.elapsed());
    let call = bridge.host.call_frame("hang");
    bridge.host.answer(&call, &result_of("done", false));
    assert!(client.read().text().contains("done"));
    assert_eq!(bridge.host.ends_within(Duration::from_secs(5)), Some(0));
    assert_eq!(bridge.audited(), [("start".into(), false), ("stop".into(), false)]);
}

/// U6.
#[test]
fn a_crowd_is_counted_warned_about_once_and_runs_nothing_twice() {
    const CALLS: usize = 250;
    let bridge = Bridge::start_with(json!({}), |setup| {
        setup.handler(|name, _, _| match name {
            "hang" => Answer::Later,
            _ => Answer::Result(result_of("ok", false)),
        })
    });
    bridge.opened();
    let (_, public) = bridge.standin.name();
    let session = Client::initialize(public, &bridge.host.token).session;
    let (refused, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for number in 0..CALLS {
            let (refused, done, session) = (&refused, &done, &session);
            let bearer = format!("Bearer {}", bridge.host.token);
            scope.spawn(move || {
                let body = format!(
                    r#"{{"jsonrpc":"2.0","id":{number},"method":"tools/call","params":{{"name":"hang","arguments":{{"n":{number}}}}}}}"#
                );
                let headers = [("Authorization", bearer.as_str()), ("mcp-session-id", session.as_str())];
                let mut connection = Connection::open(public);
                connection.send("POST", "/", &headers, body.as_bytes()).unwrap();
                match connection.read().unwrap().status {
                    429 => refused.fetch_add(1, Ordering::SeqCst),
                    200 => done.fetch_add(1, Ordering::SeqCst),
                    status => panic!("{status}"),
                };
            });
        }
        eventually("the crowd", || {
            (bridge.host.count("tools/call") + refused.load(Ordering::SeqCst) == CALLS).then_some(())
        });
        let tunnel = bridge.tunnel();
        assert_eq!(tunnel["inFlight"], bridge.host.count("tools/call"), "{tunnel}");
        assert!(bridge.host.cli(&["status"]).1.contains("in flight,"), "{tunnel}");
        for frame in bridge.host.frames() {
            let frame: Value = serde_json::from_str(&frame).unwrap();
            if frame["method"] == "tools/call" {
                bridge.host.answer(&frame, &result_of("ok", false));
            }
        }
    });
    assert_eq!((refused.load(Ordering::SeqCst), done.load(Ordering::SeqCst)), (CALLS - 200, 200));
    assert_eq!(bridge.host.count("tools/call"), 200, "none ran twice");
    let warnings =
        bridge.host.frames().into_iter().filter(|frame| frame.contains("under way through the tunnel"));
    assert_eq!(warnings.count(), 1);
    eventually("an empty tunnel", || (bridge.tunnel()["inFlight"] == 0).then_some(()));
    assert_eq!(bridge.tunnel()["peakInFlight"], 200);
    // And it still works.
    assert_eq!(bridge.standin.public().request("GET", "/livez", &[], b"").status, 200);
    assert_eq!(bridge.open().1["state"], "open");
}

/// S1: quick tunnels hold the replies of GETs back until they end; nothing here depends on them.
#[test]
fn calls_stream_through_it_while_gets_are_held_back() {
    let bridge = Bridge::start(json!({"sseGetHeld": true}));
    bridge.opened();
    let (_, public) = bridge.standin.name();
    let caller = Client::initialize(public, &bridge.host.token);
    let listening = caller.get(None);
    let mut stream = caller.ask_call("7", "hang", "{}", Some("\"p\"")).stream();
    let call = bridge.host.call_frame("hang");
    stream.priming();
    let progress = json!({"progressToken": call_id(&call), "progress": 1});
    bridge.host.notify("notifications/progress", &progress);
    assert_eq!(stream.notification("notifications/progress")["params"]["progressToken"], "p");
    assert_eq!(bridge.tunnel()["inFlight"], 2, "what streams is under way");
    assert!(listening.is_silent_for(Duration::from_millis(50)), "the GET is held back");
    let begun = Instant::now();
    let item = stream.next();
    assert!(matches!(item, Some(Item::Comment(_))), "{item:?}");
    assert!(begun.elapsed() <= Duration::from_secs(16), "a sign of life each 15 s: {:?}", begun.elapsed());
    bridge.host.answer(&call, &result_of("at last", false));
    let result = stream.until(|message| message["id"] == 7);
    assert!(result.to_string().contains("at last"), "{result}");
}
