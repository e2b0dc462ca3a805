//! The sidecar dies, hangs, cannot start: the host never notices more than a notice.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use a2mcp::process::resident_bytes;
use rustix::process::Signal;
use serde_json::json;

use crate::omp::{Home, Omp};
use crate::processes::{self, kill};
use crate::support::eventually;

fn count(omp: &Omp, part: &str) -> usize {
    omp.notices().iter().filter(|notice| notice.contains(part)).count()
}

#[test]
fn a_killed_sidecar_comes_back_with_url_sessions_and_calls() {
    let omp = Omp::start();
    let mut client = omp.client();
    assert_eq!(client.call_text("probe_odd", "{}"), "{}");
    let file = omp.home.path().join("now");
    let mut waiting = client.again();
    waiting.start_call("1", "probe_wait", &json!({ "file": file }).to_string());
    omp.line("the call did not reach the host", |line| {
        line["type"] == "tool_execution_start" && line["toolName"] == "probe_wait"
    });

    let before = omp.sidecar();
    kill(before, Signal::KILL);
    let told = omp.notice("stopped unexpectedly");
    assert!(told.contains("URL and sessions are unchanged"), "{told}");
    omp.next_sidecar(before);

    // The session and the URL are the old ones; the call goes on.
    let mut client = client.again();
    assert_eq!(client.call_text("probe_odd", r#"{"after":1}"#), r#"{"after":1}"#);
    let calls = omp.status()["calls"].clone();
    let running: Vec<_> =
        calls.as_array().unwrap().iter().filter(|call| call["phase"] == "running").collect();
    assert_eq!(running.len(), 1, "{calls}");
    assert_eq!(running[0]["tool"], "probe_wait", "{calls}");
    std::fs::write(&file, "").unwrap();
    eventually("the call's end", || {
        omp.home
            .audit()
            .into_iter()
            .find(|record| record["phase"] == "done" && record["tool"] == "probe_wait")
    });
    omp.home.assert_every_call_has_its_end();
    omp.assert_alive();
    assert_eq!(count(&omp, "unexpectedly"), 1, "{:#?}", omp.notices());
    assert_eq!(count(&omp, "are served at"), 1, "{:#?}", omp.notices());
}

/// Killed just when the host writes megabytes to it, again and again: the host lives, and says only so
/// much about it.
#[test]
fn a_sidecar_killed_while_it_is_written_to_harms_nobody() {
    let omp = Omp::start();
    let mut sidecar = omp.sidecar();
    omp.client();
    let descriptors = processes::descriptors(omp.pid());
    for round in 1..=4 {
        let mut client = omp.client();
        let id = format!("\"round {round}\"");
        // Never the same arguments: that would be the same call sent again.
        client.start_call(&id, "probe_big", &json!({"bytes": 20_000_000 + round}).to_string());
        let ends = |line: &serde_json::Value| {
            line["type"] == "tool_execution_end" && line["toolName"] == "probe_big"
        };
        omp.nth_line("the tool did not end", round, ends);
        kill(sidecar, Signal::KILL);
        sidecar = omp.next_sidecar(sidecar);
    }
    omp.assert_alive();
    let told: Vec<_> = omp.notices().into_iter().filter(|notice| notice.contains("unexpectedly")).collect();
    // The third death within ten seconds says that there is a pause from now on; a slow machine may
    // have spread them further.
    assert!(told.len() <= 4 && !told.is_empty(), "{told:#?}");
    assert_eq!(processes::zombies_of(omp.pid()), Vec::<u32>::new());
    eventually("the end of the descriptors of the dead", || {
        (processes::descriptors(omp.pid()) <= descriptors + 1).then_some(())
    });
    assert_eq!(omp.client().call_text("probe_odd", "{}"), "{}");
}

/// Kills in one host: what the test command does in a minute (from the third death within ten seconds
/// on, a pause of a second comes before each start). `A2MCP_KILL_CYCLES=500` for the full size, by hand.
const CYCLES: usize = 40;
/// From here on nothing may grow; what Bun warms up is warm.
const WARM: usize = 20;
/// What the host's memory may swing by: its heap breathes, it does not follow the kills.
const SWING: u64 = 24 << 20;

#[test]
fn many_kills_leave_the_host_as_it_was() {
    let cycles =
        std::env::var("A2MCP_KILL_CYCLES").ok().map_or(CYCLES, |count| count.parse().expect("a number"));
    let omp = Omp::start();
    let mut client = omp.client();
    assert_eq!(client.call_text("probe_odd", "{}"), "{}");
    let measure = || (resident_bytes(omp.pid()).unwrap(), processes::descriptors(omp.pid()));
    let (mut sidecar, mut warm) = (omp.sidecar(), (0, 0));
    for cycle in 1..=cycles {
        kill(sidecar, Signal::KILL);
        sidecar = omp.next_sidecar(sidecar);
        if cycle == WARM {
            warm = measure();
        }
    }
    eventually("the end of the descriptors of the dead", || (measure().1 <= warm.1 + 1).then_some(()));
    let resident = measure().0;
    assert!(resident <= warm.0 + SWING, "from {} after {WARM} kills to {resident} after {cycles}", warm.0);
    eprintln!(
        "{cycles} kills: {} MiB -> {} MiB, {} -> {} descriptors",
        warm.0 >> 20,
        resident >> 20,
        warm.1,
        measure().1
    );
    assert_eq!(processes::zombies_of(omp.pid()), Vec::<u32>::new());
    omp.assert_alive();
    // One notice each for the first ones; then that there is a pause, and no more of the same.
    let told: Vec<_> = omp.notices().into_iter().filter(|notice| notice.contains("unexpectedly")).collect();
    assert!(!told.is_empty() && told.len() <= cycles, "{told:#?}");
    let mut client = client.again();
    assert_eq!(client.call_text("probe_odd", r#"{"after":1}"#), r#"{"after":1}"#);
}

#[test]
fn a_hung_sidecar_is_replaced() {
    let omp = Omp::start();
    let before = omp.sidecar();
    kill(before, Signal::STOP);
    // Meanwhile a rotation cannot reach it and says so; one of another directory has nothing to say.
    let rotate = |home: &Home| home.a2mcp(&["rotate"]);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| rotate(&Home::bare()));
        let output = rotate(&omp.home);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(&omp.port.to_string()), "{output:?}");
        let other = other.join().unwrap();
        assert!(other.status.success(), "{other:?}");
    });
    let told = omp.notice("did not answer for 15 s");
    assert!(told.contains("URL and sessions are unchanged"), "{told}");
    omp.next_sidecar(before);
    assert_eq!(omp.client().call_text("probe_odd", "{}"), "{}");
    assert_eq!(count(&omp, "unexpectedly"), 1, "{:#?}", omp.notices());
}

/// Names another binary in what `install` wrote.
fn point_at(home: &Home, binary: &Path) {
    let marker = json!({"binary": binary, "version": "0"});
    std::fs::write(home.agent("extensions/a2mcp/binary.json"), marker.to_string()).unwrap();
}

#[test]
fn a_missing_binary_is_said_once_and_the_host_lives() {
    let home = Home::with_shim();
    point_at(&home, Path::new("/nowhere/a2mcp"));
    let mut omp = Omp::setup(home).spawn();
    let told = omp.notice("cannot be started");
    assert!(told.contains("/nowhere/a2mcp") && told.contains("a2mcp install omp"), "{told}");
    omp.assert_alive();
    let (level, text) = omp.types("/a2mcp");
    assert_eq!(level, "error");
    assert!(text.contains("not running") && text.contains("/nowhere/a2mcp"), "{text}");
    assert_eq!(count(&omp, "cannot be started"), 1, "{:#?}", omp.notices());
    assert!(omp.home.sidecars().is_empty());

    // What the notice says to do is the cure, without a restart of omp.
    assert!(omp.home.a2mcp(&["install", "omp", "--force"]).status.success());
    omp.types("/a2mcp restart");
    omp.until_announced();
    assert_eq!(omp.client().call_text("probe_odd", "{}"), "{}");
}

#[test]
fn a_binary_that_ends_at_once_is_started_five_times_and_said_once() {
    let home = Home::with_shim();
    let broken = home.path().join("broken");
    std::fs::write(
        &broken,
        "#!/bin/sh\necho start >> \"$HOME/starts\"\necho 'it is broken today' >&2\nexit 1\n",
    )
    .unwrap();
    std::fs::set_permissions(&broken, std::fs::Permissions::from_mode(0o755)).unwrap();
    point_at(&home, &broken);
    let omp = Omp::setup(home).spawn();
    let told = omp.notice("cannot be started");
    assert!(told.contains("it is broken today"), "{told}");
    omp.assert_alive();
    let starts = std::fs::read_to_string(omp.home.path().join("starts")).unwrap();
    assert_eq!(starts.lines().count(), 5);
    assert_eq!(count(&omp, "cannot be started"), 1, "{:#?}", omp.notices());
}

#[test]
fn a_refused_config_is_named_and_the_host_lives() {
    let home = Home::with_shim().config(&json!({"port": "eighty"}));
    let mut omp = Omp::setup(home).spawn();
    let told = omp.notice("refused to start");
    assert!(told.contains("a2mcp.json") && told.contains("`port`"), "{told}");
    omp.assert_alive();
    assert_eq!(count(&omp, "refused to start"), 1, "{:#?}", omp.notices());
    assert!(omp.home.sidecars().is_empty());

    std::fs::write(omp.home.agent("a2mcp.json"), "{}").unwrap();
    omp.types("/a2mcp restart");
    omp.until_announced();

    // In a running one, a bad config costs nothing: the old one goes on and says so.
    let sidecar = omp.sidecar();
    let mut client = omp.client();
    let good = omp.home.read("a2mcp.json");
    std::fs::write(omp.home.agent("a2mcp.json"), "{\"deny\": 7}").unwrap();
    // What the restart before had to say may come first.
    omp.types("/a2mcp restart");
    let text = omp.notice("not restarted");
    assert!(text.contains("`deny`"), "{text}");
    assert_eq!(omp.sidecar(), sidecar);
    assert_eq!(client.call_text("probe_odd", "{}"), "{}");
    std::fs::write(omp.home.agent("a2mcp.json"), good).unwrap();
}
