#![allow(clippy::unwrap_used)]

use super::*;

const WINDOW: u64 = 30_000;

fn newcomer<'a>(sid: &'a str, rpc_id: &'a str, arguments: &str) -> Newcomer<'a> {
    Newcomer { sid, rpc_id, tool: "t", digest: digest("t", arguments.as_bytes()) }
}

/// A ledger with one call `a` of session `s`, id 1, arguments `x`.
fn one() -> Ledger {
    let mut ledger = Ledger::new(WINDOW);
    assert_eq!(ledger.admit("a", &newcomer("s", "1", "x"), 1000), Verdict::New);
    ledger
}

fn attach(call_id: &str) -> Verdict {
    Verdict::Attach(call_id.into())
}

#[test]
fn digests_keep_tool_and_arguments_apart() {
    assert_ne!(digest("ab", b"c"), digest("a", b"bc"));
    assert_eq!(digest("a", b"{}"), digest("a", b"{}"));
    assert_ne!(digest("a", b"{}"), digest("a", b"{ }"));
}

#[test]
fn two_connected_callers_of_the_same_command_both_run() {
    let mut ledger = one();
    assert_eq!(ledger.admit("b", &newcomer("t", "1", "x"), 1001), Verdict::New);
    assert_eq!(ledger.admit("c", &newcomer("s", "2", "x"), 1002), Verdict::New);
    assert_eq!(ledger.running_count(), 3);
}

#[test]
fn an_orphan_is_reached_from_any_session_and_moves_there() {
    let mut ledger = one();
    ledger.left("a", 2000);
    assert_eq!(ledger.admit("b", &newcomer("t", "9", "x"), 60_000), attach("a"));
    assert_eq!((ledger.hold("s"), ledger.hold("t")), (Hold::Idle, Hold::Call));
    assert_eq!(ledger.find("t", "9"), ["a"]);
    // It has a caller again: the next one runs by itself.
    assert_eq!(ledger.admit("c", &newcomer("u", "1", "x"), 60_001), Verdict::New);
}

#[test]
fn other_arguments_never_attach() {
    let mut ledger = one();
    ledger.left("a", 2000);
    assert_eq!(ledger.admit("b", &newcomer("s", "1", "y"), 2001), Verdict::New);
    assert_eq!(
        ledger.admit("c", &newcomer("s", "1", "x"), 2002),
        attach("a"),
        "within two seconds it may be parallel"
    );
}

#[test]
fn a_session_that_moves_on_gives_its_orphans_up() {
    let mut ledger = one();
    ledger.left("a", 2000);
    assert_eq!(ledger.admit("b", &newcomer("s", "2", "edit"), 2000 + MOVED_ON_MS + 1), Verdict::New);
    assert_eq!(
        ledger.admit("c", &newcomer("s", "3", "x"), 4100),
        Verdict::New,
        "edit and rerun never gets the old output"
    );
    // Its own stream still leads to it: a client with other calls in flight only resumes late.
    ledger.ended("a", 10, 4200);
    assert_eq!(ledger.sweep(4300), Sweep::default());
    // Another session's different call changes nothing.
    let mut ledger = one();
    ledger.left("a", 2000);
    ledger.admit("b", &newcomer("t", "2", "edit"), 9000);
    assert_eq!(ledger.admit("c", &newcomer("s", "3", "x"), 9001), attach("a"));
}

#[test]
fn the_same_request_attaches_while_the_first_connection_still_looks_alive() {
    let mut ledger = one();
    assert_eq!(ledger.admit("b", &newcomer("s", "1", "x"), 1001), attach("a"));
    ledger.ended("a", 10, 1002);
    assert_eq!(ledger.admit("b", &newcomer("s", "1", "x"), 1003), attach("a"), "not written in full yet");
    ledger.handed_over("a", 1004);
    assert_eq!(
        ledger.admit("b", &newcomer("s", "1", "x"), 1005),
        Verdict::New,
        "the first response went out: ids may be used again"
    );
}

#[test]
fn the_window_begins_at_the_end_of_the_call() {
    let mut ledger = one();
    ledger.left("a", 2000);
    assert_eq!(ledger.sweep(10_000_000), Sweep::default(), "a running orphan runs to its end");
    ledger.ended("a", 10, 10_000_000);
    assert_eq!(ledger.sweep(10_000_000 + WINDOW), Sweep::default());
    assert_eq!(ledger.admit("b", &newcomer("t", "1", "x"), 10_000_000 + WINDOW + 1), Verdict::New);
    assert_eq!(ledger.sweep(10_000_000 + WINDOW + 1).forget, ["a"]);
}

#[test]
fn a_caller_that_leaves_after_the_end_has_the_whole_window() {
    let mut ledger = one();
    ledger.ended("a", 10, 2000);
    ledger.left("a", 50_000);
    assert!(ledger.sweep(50_000 + WINDOW).forget.is_empty());
}

#[test]
fn without_a_window_nothing_attaches_and_nothing_is_kept() {
    let mut ledger = Ledger::new(0);
    ledger.admit("a", &newcomer("s", "1", "x"), 0);
    ledger.left("a", 10);
    assert_eq!(ledger.admit("b", &newcomer("s", "1", "x"), 11), Verdict::New);
    ledger.ended("a", 1, 20);
    assert_eq!(ledger.sweep(21).forget, ["a"]);
}

#[test]
fn a_cancelled_call_never_attaches_and_is_forgotten_at_its_end() {
    let mut ledger = one();
    ledger.left("a", 2000);
    ledger.cancelled("a");
    assert_eq!(ledger.admit("b", &newcomer("t", "1", "x"), 2001), Verdict::New);
    ledger.ended("a", 1, 2002);
    assert_eq!(ledger.sweep(2003).forget, ["a"]);
}

#[test]
fn a_delivered_response_is_forgotten_after_five_quiet_seconds_or_comes_back() {
    let mut ledger = one();
    ledger.ended("a", 10, 2000);
    ledger.handed_over("a", 2000);
    assert!(ledger.sweep(2000 + DELIVERED_MS - 1).forget.is_empty());
    ledger.left("a", 4000);
    assert_eq!(
        ledger.admit("b", &newcomer("t", "1", "x"), 4001),
        attach("a"),
        "the connection broke after all"
    );
    ledger.handed_over("a", 5000);
    assert_eq!(ledger.sweep(5000 + DELIVERED_MS).forget, ["a"]);
    assert_eq!((ledger.running_count(), ledger.served(), ledger.hold("t")), (0, 1, Hold::Idle));
}

#[test]
fn too_many_unclaimed_results_drop_the_oldest_but_not_the_memory_of_them() {
    let mut ledger = Ledger::new(WINDOW);
    for call in 0..MAX_UNCLAIMED as u64 + 2 {
        let id = call.to_string();
        ledger.admit(&id, &newcomer(&id, "1", &id), call);
        ledger.ended(&id, 1, 1000 + call);
        ledger.left(&id, 1000 + call);
    }
    assert_eq!(ledger.sweep(2000).drop, ["0", "1"]);
    assert!(ledger.is_dropped("0") && !ledger.is_dropped("2"));
    assert_eq!(ledger.admit("x", &newcomer("z", "1", "0"), 2001), attach("0"), "it never runs again");
}

#[test]
fn the_bytes_of_unclaimed_results_are_bounded_but_one_alone_is_kept() {
    let mut ledger = Ledger::new(WINDOW);
    for (call, bytes) in [("a", MAX_UNCLAIMED_BYTES), ("b", 1)] {
        ledger.admit(call, &newcomer(call, "1", call), 0);
        ledger.ended(call, bytes, if call == "a" { 1 } else { 2 });
        ledger.left(call, 2);
    }
    assert_eq!(ledger.sweep(3).drop, ["a"]);
    let mut ledger = one();
    ledger.ended("a", 2 * MAX_UNCLAIMED_BYTES, 1);
    ledger.left("a", 2);
    assert_eq!(ledger.sweep(3), Sweep::default());
}

#[test]
fn the_end_of_a_session_reaches_connected_calls_only() {
    let mut ledger = one();
    ledger.admit("b", &newcomer("s", "2", "y"), 1001);
    ledger.left("b", 1002);
    assert_eq!(ledger.connected_of_session("s"), ["a"]);
}

#[test]
fn a_cancel_finds_only_its_own_session_and_the_id_of_its_own_type() {
    let mut ledger = Ledger::new(WINDOW);
    for (call, sid, id) in [("a", "s", "1"), ("b", "s", "\"1\""), ("c", "t", "1"), ("d", "s", "0")] {
        ledger.admit(call, &newcomer(sid, id, call), 0);
    }
    assert_eq!(ledger.find("s", "1"), ["a"]);
    assert_eq!(ledger.find("s", "\"1\""), ["b"]);
    assert!(ledger.find("u", "1").is_empty());
}

#[test]
fn inherited_calls_are_orphans() {
    let mut ledger = Ledger::new(WINDOW);
    let call = Inherited {
        call_id: "a".into(),
        sid: "s".into(),
        rpc_id: "1".into(),
        tool: "t".into(),
        digest: digest("t", b"x"),
        started_ms: 5,
        left_ms: None,
        has_moved_on: false,
        attachable: true,
    };
    ledger.inherit(call.clone(), 1000);
    ledger.inherit(
        Inherited { call_id: "b".into(), attachable: false, digest: digest("t", b"y"), ..call },
        1000,
    );
    assert_eq!(ledger.admit("x", &newcomer("s", "7", "x"), 1001), attach("a"));
    assert_eq!(ledger.admit("y", &newcomer("s", "8", "y"), 1001), Verdict::New);
}

#[test]
fn an_inherited_call_is_as_old_as_its_note_says() {
    let mut ledger = Ledger::new(WINDOW);
    let call = |id: &str, left_ms, has_moved_on| Inherited {
        call_id: id.into(),
        sid: "s".into(),
        rpc_id: "1".into(),
        tool: "t".into(),
        digest: digest("t", id.as_bytes()),
        started_ms: 5,
        left_ms,
        has_moved_on,
        attachable: true,
    };
    let now = 1_000_000;
    ledger.inherit(call("past", Some(10), false), now);
    ledger.inherit(call("moved", Some(10), true), now);
    ledger.inherit(call("future", Some(now + 9), false), now);
    assert_eq!(ledger.get("future").unwrap().left_ms(), Some(now), "a clock that was put back");
    ledger.ended("past", 1, 20);
    assert_eq!(ledger.admit("x", &newcomer("s", "7", "past"), now), Verdict::New, "its window is long over");
    assert_eq!(ledger.sweep(now).forget, ["past"]);
    assert_eq!(ledger.admit("y", &newcomer("s", "8", "moved"), now), Verdict::New);
    // A different call of the same session, later than 2 s after the break of `future`: said once.
    assert_eq!(ledger.admit("z", &newcomer("s", "9", "z"), now + 3000), Verdict::New);
    assert_eq!(ledger.take_moved_on(), ["past", "future"]);
    assert!(ledger.take_moved_on().is_empty());
}

#[test]
fn approvals_are_what_the_host_last_said() {
    let mut ledger = Ledger::new(WINDOW);
    for call in ["a", "b"] {
        ledger.admit(call, &newcomer("s", "1", call), 0);
        ledger.set_phase(call, Phase::Running);
    }
    assert_eq!(ledger.set_approvals(["a", "unknown"].into_iter()), ["a"]);
    assert!(ledger.set_approvals(["a"].into_iter()).is_empty(), "told once");
    assert_eq!(ledger.set_approvals(["b"].into_iter()), ["b"]);
    let phases: Vec<_> = ledger.list().iter().map(|entry| entry.phase).collect();
    assert_eq!(phases, [Phase::Running, Phase::AwaitingApproval]);
}

#[test]
fn running_calls_are_bounded() {
    let mut ledger = Ledger::new(WINDOW);
    for call in 0..MAX_CALLS {
        let id = call.to_string();
        assert_eq!(ledger.admit(&id, &newcomer("s", &id, &id), 0), Verdict::New);
    }
    assert_eq!(ledger.admit("x", &newcomer("s", "x", "x"), 0), Verdict::TooMany);
}
