//! Many calls of many kinds, and a sidecar that is killed again and again at random moments: as many
//! executions as calls, every result in its caller's hands.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::caller::{Caller, Way};
use crate::support::reference::{Host, identity, token};

/// For the test command; `A2MCP_KILL_SCALE=10` for the full size, by hand.
const CALLS: usize = 200;
const KILLS: usize = 20;
/// How long it may all take, machines that do other things included (two free cores: half a minute).
const LIMIT: Duration = Duration::from_secs(120);
const SEED: u64 = 0x5eed_0004;
const MEGABYTE: usize = 1 << 20;

/// Numbers that look random and are the same in every run (a 64-bit linear congruential generator).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// The `n`th call: tool, arguments, and the beginning of its result.
fn nth(n: usize, dir: &std::path::Path) -> (&'static str, Value, String) {
    match n % 4 {
        0 => ("echo", json!({ "n": n }), format!(r#"{{"n":{n}}}"#)),
        1 => {
            let ms = 300 + (n * 37) % 1700;
            ("sleep", json!({ "ms": ms, "seconds": 0, "steps": n % 100 }), format!("slept {ms} ms"))
        }
        2 => {
            let path = dir.join(format!("megabyte-{n}"));
            std::fs::write(&path, format!("{n} ").repeat(MEGABYTE / 4)).unwrap();
            ("read", json!({ "path": path }), format!("{n} {n} "))
        }
        _ => ("bash", json!({ "command": format!("sleep 0.{}; echo {n}", n % 10) }), format!("{n}\n")),
    }
}

#[test]
fn every_call_runs_once_and_arrives_whatever_the_sidecar_dies_of() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a2mcp.json"), r#"{"streamAfterMs":200}"#).unwrap();
    let mut host = Host::start_in(dir, &[]);
    let scale: usize =
        std::env::var("A2MCP_KILL_SCALE").ok().map_or(1, |scale| scale.parse().expect("a number"));
    let (calls, kills) = (CALLS * scale, KILLS * scale);
    let begun = Instant::now();
    let (next, finished) = (AtomicUsize::new(0), AtomicBool::new(false));
    let ways = [Way::JsonNewId, Way::Stream, Way::JsonSameId, Way::Stream, Way::JsonNewId, Way::Stream];
    let token = token(host.dir.path());
    let port = host.port();
    let path = host.dir.path().to_path_buf();
    let killed = std::thread::scope(|scope| {
        let callers = ways.map(|way| {
            let mut caller = Caller::new(port, &token, way);
            let (next, path) = (&next, &path);
            scope.spawn(move || {
                let (mut sent, mut resumed) = (0, 0);
                loop {
                    let n = next.fetch_add(1, Ordering::SeqCst);
                    if n >= calls {
                        return (sent, resumed);
                    }
                    let (tool, arguments, beginning) = nth(n, path);
                    let got = caller.call(tool, &arguments);
                    assert!(
                        got.text().starts_with(&beginning),
                        "call {n} got something else: {:.80}",
                        got.text()
                    );
                    if let Some(path) = arguments["path"].as_str() {
                        std::fs::remove_file(path).unwrap();
                    }
                    sent += got.sent;
                    resumed += got.resumed;
                }
            })
        });
        let killer = scope.spawn(|| {
            let mut numbers = Numbers(SEED);
            for kill in 0..kills {
                if finished.load(Ordering::SeqCst) {
                    return kill;
                }
                std::thread::sleep(Duration::from_millis(50 + numbers.below(900)));
                identity(&host.ready["pid"]).signal(Signal::KILL);
                host.next_sidecar();
            }
            kills
        });
        let all: Vec<_> = callers.into_iter().map(|caller| caller.join().unwrap()).collect();
        finished.store(true, Ordering::SeqCst);
        let (sent, resumed) = all.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        assert!(sent > calls && resumed > 0, "the kills met nobody: sent {sent}, resumed {resumed}");
        killer.join().unwrap()
    });
    assert!(killed >= kills / 2, "the calls were over after {killed} kills");
    assert_eq!(host.executed().len(), calls);
    let ends = host.audit().iter().filter(|record| record["phase"] == "done").count();
    assert_eq!(ends, calls, "one end on record for each");
    assert!(begun.elapsed() < LIMIT * u32::try_from(scale).unwrap(), "{:?}", begun.elapsed());
}
