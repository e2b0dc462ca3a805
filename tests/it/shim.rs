//! The shim's side of the frames against a scripted sidecar on pipes of memory (contract 15, 17).

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use a2mcp::frame::codec::{Frame, FrameCodec};
use a2mcp::frame::messages::{Hello, HelloResult, Notice};
use a2mcp::refhost::demo_tools::{DemoTools, Offer};
use a2mcp::refhost::launch::{Exit, Launch, Sidecar};
use a2mcp::refhost::shim::{Observer, Order, Shim, ShimConfig, ShimEnd, ShimHandle};
use a2mcp::refhost::tools::HostState;
use bytes::BytesMut;
use futures_util::StreamExt;
use serde_json::{Value, json};
use tokio::io::{AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, LocalSet};
use tokio_util::codec::{Encoder, FramedRead};
use tokio_util::sync::CancellationToken;

use crate::schema::{assert_speaks, wire_fixtures};
use crate::support::whole_lines;

/// Everything here is answered at once; this only turns a hang into a failure.
const SOON: Duration = Duration::from_secs(20);
const PIPE: usize = 64 << 10;

fn call_id(n: u32) -> String {
    format!("00000000-0000-4000-8000-{n:012}")
}

/// The scripted end of one sidecar.
struct Fake {
    input: FramedRead<ReadHalf<DuplexStream>, FrameCodec>,
    output: WriteHalf<DuplexStream>,
    exit: Option<oneshot::Sender<Exit>>,
    killed: CancellationToken,
    /// Read already, not looked at yet.
    backlog: VecDeque<Value>,
}

impl Fake {
    async fn send(&mut self, message: Value) {
        self.send_text(&message.to_string()).await;
    }

    async fn send_text(&mut self, text: &str) {
        self.output.write_all(&wire(text)).await.unwrap();
    }

    /// The next message that is no ping and no state.
    async fn next(&mut self) -> Value {
        loop {
            let message = self.any().await.expect("the shim closed its end");
            if !matches!(message["method"].as_str(), Some("bridge/ping" | "bridge/state")) {
                return message;
            }
        }
    }

    /// Returns when the shim says that this tool waits for the operator.
    async fn awaits_approval(&mut self, tool: &str) {
        while self.any().await.expect("the shim says what waits")["params"]["approvals"][0]["tool"] != tool {}
    }

    async fn any(&mut self) -> Option<Value> {
        match self.backlog.pop_front() {
            Some(message) => Some(message),
            None => self.receive().await,
        }
    }

    async fn receive(&mut self) -> Option<Value> {
        let frame = tokio::time::timeout(SOON, self.input.next()).await.expect("a frame, or the end");
        frame.map(|frame| {
            let message = serde_json::from_slice(&frame.unwrap()).unwrap();
            assert_speaks("shim", &message);
            message
        })
    }

    /// Takes the hello and answers it; returns its parameters when the shim has read the answer.
    async fn greet(&mut self) -> Value {
        let hello = self.next().await;
        assert_eq!(hello["method"], "bridge/hello");
        let result = json!({
            "protocol": 1, "version": "0", "pid": 1, "url": "http://127.0.0.1:4444/", "port": 4444,
            "tokenPrefix": "abcdef", "features": [],
        });
        self.send(json!({ "jsonrpc": "2.0", "id": hello["id"], "result": result })).await;
        self.send(json!({ "jsonrpc": "2.0", "id": "read", "method": "bridge/ping", "params": {} })).await;
        loop {
            match self.receive().await.expect("the shim closed its end") {
                message if message["id"] == "read" => return hello["params"].clone(),
                message => self.backlog.push_back(message),
            }
        }
    }

    async fn call(&mut self, id: u32, name: &str, arguments: Value) {
        self.send(call(id, name, arguments)).await;
    }

    /// The sidecar's process ends; what was written before stays readable.
    async fn die(mut self, exit: Exit) {
        self.output.shutdown().await.unwrap();
        let _ = self.exit.take().unwrap().send(exit);
    }
}

/// One frame as it goes over the wire.
fn wire(text: &str) -> BytesMut {
    let mut wire = BytesMut::new();
    let frame = Frame::new(text.as_bytes().to_vec()).unwrap();
    FrameCodec::default().encode(frame, &mut wire).unwrap();
    wire
}

fn call(id: u32, name: &str, arguments: Value) -> Value {
    json!({
        "jsonrpc": "2.0", "id": id, "method": "tools/call",
        "params": { "name": name, "arguments": arguments, "_meta": {
            "progressToken": call_id(id),
            "a2mcp/call": { "callId": call_id(id), "note": { "n": id } },
            "a2mcp/client": { "sid": "s", "name": "test" },
        }},
    })
}

struct LaunchFakes(mpsc::UnboundedSender<Fake>);

impl Launch for LaunchFakes {
    fn launch(&mut self) -> io::Result<Sidecar> {
        let (ours, theirs) = tokio::io::duplex(PIPE);
        let (output, input) = tokio::io::split(ours);
        let (their_input, their_output) = tokio::io::split(theirs);
        let (exit, exited) = oneshot::channel();
        let kill = CancellationToken::new();
        let killed = kill.clone();
        let fake = Fake {
            input: FramedRead::new(their_input, FrameCodec::default()),
            output: their_output,
            exit: Some(exit),
            killed: kill.clone(),
            backlog: VecDeque::new(),
        };
        self.0.send(fake).map_err(io::Error::other)?;
        Ok(Sidecar {
            input: Box::new(input),
            output: Box::new(output),
            exited: Box::pin(async move {
                tokio::select! {
                    exit = exited => exit.unwrap_or(Exit::Unknown),
                    () = killed.cancelled() => Exit::Signal(9),
                }
            }),
            kill,
            last_words: Box::new(|| Some("last words".into())),
        })
    }
}

#[derive(Default)]
struct Seen {
    ready: Cell<u64>,
    notices: RefCell<Vec<String>>,
    restarts: RefCell<Vec<String>>,
}

impl Observer for Seen {
    fn ready(&self, _: &HelloResult, restarts: u64) {
        self.ready.set(restarts + 1);
    }
    fn notice(&self, notice: &Notice) {
        self.notices.borrow_mut().push(notice.text.clone());
    }
    fn restarting(&self, reason: &str, _: Duration) {
        self.restarts.borrow_mut().push(reason.to_owned());
    }
}

struct World {
    fakes: mpsc::UnboundedReceiver<Fake>,
    handle: ShimHandle,
    seen: Rc<Seen>,
    state: Rc<HostState>,
    dir: tempfile::TempDir,
    shim: JoinHandle<ShimEnd>,
}

impl World {
    fn new(ping_every: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let state = Rc::new(HostState::default());
        let offer = Offer {
            execution_log: Some(
                a2mcp::refhost::execution::ExecutionLog::open(&dir.path().join("executions")).unwrap(),
            ),
            approval_file: Some(dir.path().join("approved")),
            ..Offer::default()
        };
        let tools = Rc::new(DemoTools::new(offer, state.clone()).unwrap());
        let hello: Hello = serde_json::from_value(json!({
            "protocol": 1, "instance": "instance-1", "features": ["approvals"], "capabilities": {},
            "host": { "name": "test", "version": "0", "pid": 1, "cwd": "/", "home": "/" }, "inFlight": [],
        }))
        .unwrap();
        let (fakes_to, fakes) = mpsc::unbounded_channel();
        let seen = Rc::new(Seen::default());
        let config = ShimConfig { hello, ping_every };
        let (shim, handle) = Shim::new(config, tools, state.clone(), seen.clone(), LaunchFakes(fakes_to));
        let shim = tokio::task::spawn_local(shim.run());
        Self { fakes, handle, seen, state, dir, shim }
    }

    async fn sidecar(&mut self) -> Fake {
        tokio::time::timeout(SOON, self.fakes.recv()).await.expect("a sidecar is started").unwrap()
    }

    async fn end(self) -> ShimEnd {
        tokio::time::timeout(SOON, self.shim).await.expect("the shim ends").unwrap()
    }

    /// How often a tool really ran.
    fn executions(&self, event: &str) -> usize {
        let log = whole_lines(&self.dir.path().join("executions"));
        log.lines().filter(|line| line.contains(&format!("\"event\":\"{event}\""))).count()
    }
}

/// Runs a test on one thread, as the shim is.
fn check<F: Future<Output = ()>>(test: impl FnOnce(World) -> F) {
    check_with_pings(Duration::from_secs(60), test);
}

fn check_with_pings<F: Future<Output = ()>>(every: Duration, test: impl FnOnce(World) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, async { test(World::new(every)).await });
}

fn text_of(message: &Value) -> &str {
    let result = if message["method"].is_null() { &message["result"] } else { &message["params"]["result"] };
    result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text in {message}"))
}

#[test]
fn calls_are_answered_and_arguments_pass_byte_for_byte() {
    check(|mut world| async move {
        let mut sidecar = world.sidecar().await;
        let hello = sidecar.greet().await;
        assert_eq!(hello["inFlight"], json!([]));
        assert!(hello["resume"].is_null());
        let arguments = r#"{"b":12345678901234567890123,"a":"\ud800","a":1.50}"#;
        let message = call(7, "echo", json!(0))
            .to_string()
            .replace("\"arguments\":0", &format!("\"arguments\":{arguments}"));
        sidecar.send_text(&message).await;
        let answer = sidecar.next().await;
        assert_eq!((answer["id"].as_u64(), text_of(&answer)), (Some(7), arguments));
        sidecar.send(json!({ "jsonrpc": "2.0", "id": "l", "method": "tools/list", "params": {} })).await;
        let list = sidecar.next().await;
        assert_eq!(list["id"], "l");
        let names: Vec<_> =
            list["result"]["tools"].as_array().unwrap().iter().map(|tool| &tool["name"]).collect();
        assert_eq!(
            names,
            ["read", "write", "list", "bash", "sleep", "echo", "image", "fail", "needs_approval"]
        );
        sidecar.send(json!({ "jsonrpc": "2.0", "id": 9, "method": "resources/list", "params": {} })).await;
        assert_eq!(sidecar.next().await["error"]["code"], -32601);
    });
}

#[test]
fn a_call_survives_its_sidecar_and_its_end_reaches_the_next_one_once() {
    check(|mut world| async move {
        let mut first = world.sidecar().await;
        first.greet().await;
        first.call(1, "needs_approval", json!({})).await;
        first.awaits_approval("needs_approval").await;
        let note = json!({ "callId": call_id(1), "note": "second" });
        first.send(json!({ "jsonrpc": "2.0", "method": "bridge/note", "params": note })).await;
        first.die(Exit::Signal(9)).await;

        let mut second = world.sidecar().await;
        let hello = second.greet().await;
        assert_eq!(hello["resume"]["port"], 4444);
        let in_flight = &hello["inFlight"][0];
        assert_eq!((&in_flight["state"], &in_flight["note"]), (&json!("running"), &json!("second")));
        std::fs::write(world.dir.path().join("approved"), "").unwrap();
        let result = second.next().await;
        assert_eq!((&result["method"], text_of(&result)), (&json!("bridge/result"), "approved"));

        // Not acknowledged, so the third hears of it as well, after its hello.
        second.die(Exit::Code(1)).await;
        let mut third = world.sidecar().await;
        assert_eq!(third.greet().await["inFlight"][0]["state"], "finished");
        assert_eq!(third.next().await["method"], "bridge/result");
        let ack = json!({ "callIds": [call_id(1)] });
        third.send(json!({ "jsonrpc": "2.0", "method": "bridge/ack", "params": ack })).await;
        third.die(Exit::Code(75)).await;

        let mut fourth = world.sidecar().await;
        assert_eq!(fourth.greet().await["inFlight"], json!([]));
        assert_eq!((world.executions("start"), world.executions("done")), (1, 1));
        assert_eq!(world.seen.restarts.borrow()[0], "signal 9; its last words: last words");
        assert_eq!(world.seen.ready.get(), 4);
    });
}

#[test]
fn complete_calls_in_a_dead_sidecars_output_are_executed_and_a_cut_one_is_dropped() {
    check(|mut world| async move {
        let mut first = world.sidecar().await;
        first.greet().await;
        // More than the pipe holds, so that much of it is read after the death.
        for id in 1..=50 {
            first.call(id, "echo", json!({ "pad": "x".repeat(8000) })).await;
        }
        let cut = wire(&call(51, "echo", json!({})).to_string());
        first.output.write_all(&cut[..40]).await.unwrap();
        first.die(Exit::Signal(9)).await;

        let mut second = world.sidecar().await;
        let hello = second.greet().await;
        let in_flight: Vec<_> = hello["inFlight"]
            .as_array()
            .unwrap()
            .iter()
            .map(|call| call["callId"].as_str().unwrap())
            .collect();
        assert_eq!(in_flight, (1..=50).map(call_id).collect::<Vec<_>>());
        for _ in 0..50 {
            assert_eq!(second.next().await["method"], "bridge/result");
        }
        assert_eq!(world.executions("start"), 50);
    });
}

#[test]
fn cancels_reach_the_tool_by_request_id_and_later_by_call_id() {
    check(|mut world| async move {
        let mut first = world.sidecar().await;
        first.greet().await;
        first.call(1, "sleep", json!({ "seconds": 1000 })).await;
        first.call(2, "bash", json!({ "command": "sleep 1000" })).await;
        let unknown = json!({ "requestId": "unknown" });
        first.send(json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": unknown })).await;
        let known = json!({ "requestId": 1, "reason": "test" });
        first.send(json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": known })).await;
        let answer = first.next().await;
        assert_eq!((answer["id"].as_u64(), text_of(&answer)), (Some(1), "sleep cancelled"));
        first.die(Exit::Signal(9)).await;

        let mut second = world.sidecar().await;
        let hello = second.greet().await;
        let states: Vec<_> =
            hello["inFlight"].as_array().unwrap().iter().map(|call| &call["state"]).collect();
        assert_eq!(states, ["cancelled", "running"]);
        let earlier = json!({ "callId": call_id(2) });
        second.send(json!({ "jsonrpc": "2.0", "method": "bridge/cancel", "params": earlier })).await;
        while world.executions("done") < 2 {
            tokio::task::yield_now().await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(world.executions("cancelled"), 2);
    });
}

#[test]
fn the_state_says_which_calls_wait_for_an_approval_and_whether_main_lives() {
    check(|mut world| async move {
        let mut sidecar = world.sidecar().await;
        sidecar.greet().await;
        let state = async |sidecar: &mut Fake| loop {
            let message = sidecar.any().await.unwrap();
            if message["method"] == "bridge/state" {
                return message["params"].clone();
            }
        };
        assert_eq!(state(&mut sidecar).await, json!({ "main": true, "approvals": [] }));
        sidecar.call(1, "needs_approval", json!({})).await;
        let waits = json!([{ "callId": call_id(1), "tool": "needs_approval" }]);
        assert_eq!(state(&mut sidecar).await["approvals"], waits);
        std::fs::write(world.dir.path().join("approved"), "").unwrap();
        assert_eq!(state(&mut sidecar).await["approvals"], json!([]));
        world.state.set_main(false);
        assert_eq!(state(&mut sidecar).await["main"], false);
        sidecar.call(2, "echo", json!({})).await;
        let mut answer = sidecar.next().await;
        while answer["id"] != 2 {
            answer = sidecar.next().await;
        }
        assert_eq!(
            (text_of(&answer), &answer["result"]["isError"]),
            ("main session not available", &json!(true))
        );
    });
}

#[test]
fn progress_comes_before_the_result_it_belongs_to() {
    check(|mut world| async move {
        let mut sidecar = world.sidecar().await;
        sidecar.greet().await;
        sidecar.call(1, "sleep", json!({ "ms": 5, "steps": 5 })).await;
        for step in 1..=5 {
            let progress = sidecar.next().await;
            assert_eq!(progress["method"], "notifications/progress");
            assert_eq!(progress["params"]["progressToken"], call_id(1));
            assert_eq!(progress["params"]["progress"].as_f64(), Some(step.into()));
        }
        assert_eq!(text_of(&sidecar.next().await), "slept 5 ms");
    });
}

#[test]
fn a_sidecar_that_does_not_read_costs_no_result() {
    check(|mut world| async move {
        let mut sidecar = world.sidecar().await;
        sidecar.greet().await;
        let pad = "x".repeat(60_000);
        for id in 1..=300 {
            sidecar.call(id, "echo", json!({ "pad": pad })).await;
        }
        let mut answered: Vec<_> = Vec::new();
        while answered.len() < 300 {
            answered.push(sidecar.next().await["id"].as_u64().unwrap());
        }
        answered.sort_unstable();
        assert_eq!(answered, (1..=300).collect::<Vec<u64>>());
    });
}

#[test]
fn a_call_id_that_comes_twice_runs_once() {
    check(|mut world| async move {
        let mut sidecar = world.sidecar().await;
        sidecar.greet().await;
        sidecar.call(1, "bash", json!({ "command": "true" })).await;
        sidecar.call(1, "bash", json!({ "command": "true" })).await;
        let texts = [sidecar.next().await, sidecar.next().await].map(|message| text_of(&message).to_owned());
        assert!(texts.iter().any(|text| text.contains("was not run")), "{texts:?}");
        assert_eq!(world.executions("start"), 1);
    });
}

#[test]
fn a_polite_stop_is_asked_for_answered_and_ends_the_pipe() {
    check(|mut world| async move {
        let mut sidecar = world.sidecar().await;
        sidecar.greet().await;
        world.handle.order(Order::Stop(Duration::from_millis(1500))).await;
        let stop = sidecar.next().await;
        assert_eq!((&stop["method"], &stop["params"]["graceMs"]), (&json!("bridge/stop"), &json!(1500)));
        sidecar.send(json!({ "jsonrpc": "2.0", "id": stop["id"], "result": {} })).await;
        let goodbye = json!({ "reason": "stop" });
        sidecar.send(json!({ "jsonrpc": "2.0", "method": "bridge/goodbye", "params": goodbye })).await;
        assert_eq!(sidecar.next().await["params"]["reason"], "host");
        assert_eq!(sidecar.any().await, None, "the shim closes its end");
        sidecar.die(Exit::Code(0)).await;
        assert_eq!(world.end().await, ShimEnd::Stopped);
    });
}

#[test]
fn the_hosts_end_closes_the_pipe_at_once_and_a_sidecar_that_stays_is_killed() {
    check(|mut world| async move {
        let mut sidecar = world.sidecar().await;
        sidecar.greet().await;
        sidecar.call(1, "sleep", json!({ "seconds": 1000 })).await;
        let begun = std::time::Instant::now();
        world.handle.order(Order::StopNow).await;
        while sidecar.any().await.is_some() {}
        tokio::time::timeout(SOON, sidecar.killed.cancelled()).await.unwrap();
        assert_eq!(world.end().await, ShimEnd::Stopped);
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    });
}

#[test]
fn goodbye_decides_whether_another_one_starts() {
    for (reason, exit, expected) in [("stop", 0, Some(ShimEnd::Stopped)), ("restart", 75, None)] {
        check(|mut world| async move {
            let mut sidecar = world.sidecar().await;
            sidecar.greet().await;
            let goodbye = json!({ "reason": reason });
            sidecar.send(json!({ "jsonrpc": "2.0", "method": "bridge/goodbye", "params": goodbye })).await;
            sidecar.die(Exit::Code(exit)).await;
            match expected {
                Some(end) => assert_eq!(world.end().await, end),
                None => drop(world.sidecar().await),
            }
        });
    }
}

#[test]
fn refusals_and_a_held_port_are_final_and_give_their_reason() {
    for (code, exit, expected) in [
        (-32001, 78, ShimEnd::Refused("the reason".into())),
        (-32002, 78, ShimEnd::Refused("the reason".into())),
        (-32003, 1, ShimEnd::Failed("the reason".into())),
    ] {
        check(|mut world| async move {
            let mut sidecar = world.sidecar().await;
            let hello = sidecar.next().await;
            let error = json!({ "code": code, "message": "the reason" });
            sidecar.send(json!({ "jsonrpc": "2.0", "id": hello["id"], "error": error })).await;
            sidecar.die(Exit::Code(exit)).await;
            assert_eq!(world.end().await, expected);
        });
    }
    check(|mut world| async move {
        world.sidecar().await.die(Exit::Code(78)).await;
        assert_eq!(world.end().await, ShimEnd::Refused("last words".into()));
    });
}

#[test]
fn five_starts_that_fail_end_it() {
    check(|mut world| async move {
        for _ in 0..5 {
            world.sidecar().await.die(Exit::Code(1)).await;
        }
        let ShimEnd::Failed(reason) = world.end().await else { panic!("it failed") };
        assert!(reason.contains("exit code 1; its last words: last words"), "{reason}");
    });
}

#[test]
fn a_silent_sidecar_is_killed_and_followed_by_another() {
    check_with_pings(Duration::from_millis(20), |mut world| async move {
        let mut first = world.sidecar().await;
        first.greet().await;
        tokio::time::timeout(SOON, first.killed.cancelled()).await.unwrap();
        drop(first);
        world.sidecar().await.greet().await;
        assert!(world.seen.restarts.borrow()[0].contains("hung"));
    });
}

#[test]
fn a_sidecar_that_answers_pings_stays() {
    check_with_pings(Duration::from_millis(20), |mut world| async move {
        let mut sidecar = world.sidecar().await;
        sidecar.greet().await;
        for _ in 0..20 {
            let message = sidecar.any().await.unwrap();
            if message["method"] == "bridge/ping" {
                sidecar.send(json!({ "jsonrpc": "2.0", "id": message["id"], "result": {} })).await;
            }
        }
        assert!(!sidecar.killed.is_cancelled());
        sidecar.send(json!({ "jsonrpc": "2.0", "id": "p", "method": "bridge/ping", "params": {} })).await;
        while sidecar.any().await.unwrap()["id"] != "p" {}
    });
}

#[test]
fn notices_reach_the_observer_and_commands_the_sidecar() {
    check(|mut world| async move {
        let mut sidecar = world.sidecar().await;
        sidecar.greet().await;
        let notice = json!({ "level": "warning", "text": "hello" });
        sidecar.send(json!({ "jsonrpc": "2.0", "method": "bridge/notify", "params": notice })).await;
        let (reply, answer) = oneshot::channel();
        world.handle.order(Order::Command(vec!["status".into()], reply)).await;
        let command = sidecar.next().await;
        assert_eq!(command["params"], json!({ "argv": ["status"] }));
        let result = json!({ "text": "fine", "level": "info" });
        sidecar.send(json!({ "jsonrpc": "2.0", "id": command["id"], "result": result })).await;
        assert_eq!(answer.await.unwrap().unwrap().text, "fine");
        assert_eq!(*world.seen.notices.borrow(), ["hello"]);
    });
}

/// Every wire fixture, in one piece and byte by byte: the shim lives on and still answers, or ends
/// the link where the fixture says so and starts the next sidecar. Nothing hostile is answered.
#[test]
fn hostile_frames_are_survived() {
    for fixture in &wire_fixtures() {
        let bytes = fixture.bytes();
        let ends = fixture.expect.iter().any(|event| event.get("end").is_some());
        let is_cut = fixture.expect.iter().any(|event| event.get("incomplete").is_some());
        let step = if bytes.len() > 4096 { 997 } else { 1 };
        for step in [usize::MAX, step] {
            let bytes = &bytes;
            check(|mut world| async move {
                let mut sidecar = world.sidecar().await;
                sidecar.greet().await;
                for chunk in bytes.chunks(step.min(bytes.len()).max(1)) {
                    if sidecar.output.write_all(chunk).await.is_err() {
                        break;
                    }
                }
                if ends {
                    tokio::time::timeout(SOON, sidecar.killed.cancelled()).await.expect(&fixture.name);
                    assert!(world.seen.restarts.borrow().len() <= 1);
                } else if is_cut {
                    sidecar.die(Exit::Signal(9)).await;
                } else {
                    sidecar
                        .send(json!({ "jsonrpc": "2.0", "id": "p", "method": "bridge/ping", "params": {} }))
                        .await;
                    assert_eq!(
                        sidecar.next().await["id"],
                        "p",
                        "{}: the ping is the first answer",
                        fixture.name
                    );
                    return;
                }
                world.sidecar().await.greet().await;
            });
        }
    }
}
