//! Contract 15: callers notice neither that sidecars are killed nor that they are restarted. The keeper
//! holds the socket meanwhile; nothing is refused, nothing is lost.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use crate::refhost::script;
use crate::support::http::{Client, Connection};
use crate::support::reference::{self, identity, token};
use crate::support::{binary, eventually};

const PING: &[u8] = br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;

/// Asks again and again over connections of its own; what was refused and what was answered.
fn knock(port: u16, bearer: &str, session: &str, stop: &AtomicBool, answered: &AtomicUsize) -> usize {
    let mut refused = 0;
    while !stop.load(Ordering::SeqCst) {
        let Ok(mut connection) = Connection::try_open(port) else {
            refused += 1;
            continue;
        };
        let headers = [("Authorization", bearer), ("mcp-session-id", session)];
        // A connection the dead sidecar had accepted breaks: then the same is asked on the next one.
        if connection.send("POST", "/", &headers, PING).is_ok()
            && let Ok(reply) = connection.read()
        {
            assert_eq!(reply.status, 200, "{}", reply.text());
            answered.fetch_add(1, Ordering::SeqCst);
        }
    }
    refused
}

/// Waits until so many more were answered.
fn answers(answered: &AtomicUsize, more: usize) {
    let before = answered.load(Ordering::SeqCst);
    eventually("more answers", || (answered.load(Ordering::SeqCst) >= before + more).then_some(()));
}

#[test]
fn nothing_is_refused_while_sidecars_are_killed() {
    let place = tempfile::tempdir().unwrap();
    // Each sidecar takes a while to start: whoever comes meanwhile waits in the queue.
    let slow = script(place.path(), &format!("sleep 0.3; exec {} \"$@\"", binary().display()));
    let host = reference::Host::start(&["--sidecar", slow.to_str().unwrap()]);
    let (port, token) = (host.port(), token(host.dir.path()));
    let session = Client::initialize(port, &token).session;
    let bearer = format!("Bearer {token}");
    let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut sidecar = host.sidecar();
    std::thread::scope(|scope| {
        let knocking: Vec<_> =
            (0..4).map(|_| scope.spawn(|| knock(port, &bearer, &session, &stop, &answered))).collect();
        for _ in 0..4 {
            answers(&answered, 40);
            sidecar.signal(Signal::KILL);
            let next = host.program.event("ready");
            assert_eq!(next["port"], port);
            sidecar = identity(&next["pid"]);
        }
        answers(&answered, 40);
        stop.store(true, Ordering::SeqCst);
        for knocker in knocking {
            assert_eq!(knocker.join().unwrap(), 0, "refused");
        }
    });
}

#[test]
fn ten_planned_restarts_cost_no_request_of_clients_that_keep_their_connections() {
    let mut host = reference::Host::start(&[]);
    let (port, token) = (host.port(), token(host.dir.path()));
    let session = Client::initialize(port, &token).session;
    let bearer = format!("Bearer {token}");
    let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let headers = [("Authorization", bearer.as_str()), ("mcp-session-id", session.as_str())];
    std::thread::scope(|scope| {
        // 8 clients x 25 requests a second.
        let clients: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let (mut connection, mut slowest) = (None, Duration::ZERO);
                    while !stop.load(Ordering::SeqCst) {
                        let begun = Instant::now();
                        // Since before it was opened, or asked something the last time: a busy machine
                        // may hold this thread up at any point.
                        let (mut open, idle_since) =
                            connection.take().unwrap_or_else(|| (Connection::open(port), begun));
                        let sent = open.send("POST", "/", &headers, PING);
                        let was_idle = idle_since.elapsed();
                        let reply = match sent.and_then(|()| open.read()) {
                            Ok(reply) => reply,
                            // This thread was held up: its request came after an idle connection's time.
                            Err(_) if was_idle > Duration::from_millis(200) => continue,
                            Err(error) => panic!("a request {was_idle:?} after the last one: {error}"),
                        };
                        assert_eq!(reply.status, 200, "{}", reply.text());
                        if reply.header("connection") != Some("close") {
                            connection = Some((open, begun));
                        }
                        answered.fetch_add(1, Ordering::SeqCst);
                        slowest = slowest.max(begun.elapsed());
                        std::thread::sleep(Duration::from_millis(40).saturating_sub(begun.elapsed()));
                    }
                    slowest
                })
            })
            .collect();
        // 50 by hand.
        let rounds = std::env::var("A2MCP_RESTARTS").ok().map_or(10, |count| count.parse().unwrap());
        for round in 1..=rounds {
            answers(&answered, 100);
            host.program.send(&json!({ "do": "command", "argv": ["restart"] }));
            let next = host.program.event("ready");
            assert_eq!((&next["restarts"], &next["port"]), (&json!(round), &json!(port)));
        }
        answers(&answered, 100);
        stop.store(true, Ordering::SeqCst);
        for client in clients {
            let slowest = client.join().unwrap();
            // A second is the promise; a busy machine gets ten.
            assert!(slowest < Duration::from_secs(10), "the next answer took {slowest:?}");
        }
    });
}
