//! Complaints C6 and P9: what stands still for a while, a host, or everything at once (a laptop's lid),
//! goes on where it was; what was killed with its files open stops no later start.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;

use crate::streams::heard;
use crate::support::http::Connection;
use crate::support::{Host, Setup, eventually, reference, within};

const EMPTY: &str = r#"{"content":[],"isError":false}"#;

/// P9: a sidecar killed in the middle of everything leaves nothing that stops the next one.
#[test]
fn what_a_killed_sidecar_leaves_stops_no_start() {
    let mut host = Host::start();
    let port = host.port;
    for round in 0..5 {
        let mut client = host.client();
        client.start_call("1", "hang", "{}");
        host.call_frame("hang");
        rustix::process::kill_process(host.pid(), Signal::KILL).unwrap();
        host.wait();
        // A torn temporary file of a write that never ended.
        std::fs::write(host.path("a2mcp.state/.a2mcp-torn"), "{").unwrap();
        let next = Setup::default().in_dir_of(&host).start();
        assert_eq!((next.port, next.token.as_str()), (port, host.token.as_str()), "round {round}");
        assert_eq!(next.status()["pid"], next.child.id());
        host = next;
    }
}

/// C6: the host is stopped. In real time, because the sidecar's clock is.
#[test]
fn a_stalled_host_shows_and_nothing_is_lost() {
    let host = Host::start();
    let mut dispatched = host.client();
    dispatched.start_call("1", "hang", "{}");
    let frame = host.call_frame("hang");
    let before = dispatched.ask_call("7", "hang", r#"{"n":1}"#, None).stream();
    host.fall_silent();
    let readyz = || Connection::open(host.port).request("GET", "/readyz", &[], b"");
    within(Duration::from_secs(15), "the stall showing", || (readyz().status == 503).then_some(()));
    assert_eq!(readyz().json()["reason"], "host_stalled");
    assert_eq!(host.status()["health"], "host_stalled");
    assert_eq!(Connection::open(host.port).request("GET", "/livez", &[], b"").status, 200);
    let mut client = host.client();
    assert!(client.rpc("ping", "{}")["result"].is_object());
    assert!(client.rpc("tools/list", "{}")["result"]["tools"].is_array());
    // Those that take a stream are told, whether they came before or after.
    let mut streams = [before, client.ask_call("8", "hang", r#"{"n":2}"#, None).stream()];
    for stream in &mut streams {
        assert_eq!(heard(stream), "the host does not respond; the call waits for it");
    }
    let mut late = client.again();
    late.start_call("2", "echo", "{}");
    let late_frame = host.call_frame("echo");
    for waiting in [&dispatched, &late] {
        let socket = waiting.connection.socket();
        socket.set_nonblocking(true).unwrap();
        let error = socket.peek(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "a call gets no error for it");
        socket.set_nonblocking(false).unwrap();
    }

    // The host goes on: it answers everything that lay in its pipe.
    for ping in host.frames().iter().filter(|frame| frame.contains("bridge/ping")) {
        host.answer(&serde_json::from_str(ping).unwrap(), "{}");
    }
    // Shown until the next ping is answered, which is not before the host speaks.
    eventually("the lag", || (host.status()["host"]["lagMs"].as_u64()? > 5000).then_some(()));
    host.speak_again();
    eventually("recovery", || (readyz().status == 200).then_some(()));
    for stream in &mut streams {
        assert_eq!(heard(stream), "the host responds again");
    }
    host.answer(&frame, EMPTY);
    host.answer(&late_frame, EMPTY);
    assert!(dispatched.read().json()["result"]["isError"] == false);
    assert!(late.read().json()["result"]["isError"] == false);
}

/// P9: in real time, because the clocks of all processes are. Longer than a hung sidecar is given.
#[test]
fn a_machine_that_slept_goes_on_where_it_was() {
    let host = reference::Host::start(&[]);
    let keeper = reference::identity(&host.status()["keeper"]["pid"]);
    let mut client = host.session();
    let mut waiting = client.again();
    waiting.start_call("1", "sleep", r#"{"seconds":18}"#);
    eventually("the call", || (host.executions().len() == 1).then_some(()));
    let everything = [host.program.identity(), host.sidecar(), keeper];
    // In this order the sidecar misses its host, and the host its sidecar.
    everything.iter().for_each(|process| assert!(process.signal(Signal::STOP)));
    std::thread::sleep(Duration::from_secs(17));
    everything.iter().for_each(|process| assert!(process.signal(Signal::CONT)));
    let result = waiting.read().json()["result"].clone();
    assert_eq!(result["content"][0]["text"], "slept 18000 ms", "{result}");
    within(Duration::from_secs(15), "readiness", || {
        let readyz = Connection::open(host.port()).request("GET", "/readyz", &[], b"");
        (readyz.status == 200).then_some(())
    });
    assert_eq!(client.call_text("echo", r#"{"n":1}"#), r#"{"n":1}"#);
    let status = host.status();
    let pid = |status: &serde_json::Value| reference::identity(&status["pid"]);
    assert_eq!(pid(&status), host.sidecar(), "nobody was killed for sleeping: {status}");
    assert_eq!(status["keeper"]["pid"], json!(keeper.pid));
    assert_eq!(host.executed().len(), 2);
}
