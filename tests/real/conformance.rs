//! Issue 3, point 6: the official conformance suite against a real sidecar whose host has the fixtures
//! the suite looks for. Two releases of it (the newest with its frozen requirement set, and the last
//! stable one with every scenario), each with every reply a stream and with JSON wherever it is chosen.

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::parts::installed;
use crate::support::{Host, fixtures, proxy, within};

/// A run takes a few seconds; a busy machine gets time.
const LIMIT: Duration = Duration::from_secs(240);

#[test]
fn the_frozen_requirements_pass_when_every_reply_is_a_stream() {
    frozen_requirements(0);
}

#[test]
fn the_frozen_requirements_pass_when_replies_are_json() {
    frozen_requirements(60_000);
}

#[test]
fn the_stable_suite_passes_when_every_reply_is_a_stream() {
    every_scenario(0);
}

#[test]
fn the_stable_suite_passes_when_replies_are_json() {
    every_scenario(60_000);
}

/// 30 of 30 scored scenarios of the requirement set for 2025-11-25, and none of the others failed.
fn frozen_requirements(stream_after_ms: u64) {
    let summary = run("conformance-a", &["--requirements", "2025-11-25"], stream_after_ms);
    assert_scored(&summary);
    assert_eq!(summary.failed(), 0, "{}", summary.text);
}

/// Every scored scenario checked something.
pub(crate) fn assert_scored(summary: &Summary) {
    let file = installed("conformance-a/node_modules/@modelcontextprotocol/conformance/requirements")
        .join("2025-11-25.yaml");
    let requirements = std::fs::read_to_string(file).unwrap();
    let scored = requirements.split("\nserver:\n").nth(1).unwrap().lines();
    let scored: Vec<&str> = scored.map_while(|line| line.strip_prefix("  - ")).collect();
    assert_eq!(scored.len(), 30);
    for scenario in scored {
        assert!(summary.checks(scenario) > 0, "{scenario} checked nothing: {}", summary.text);
    }
}

/// Not one failed check in any scenario.
fn every_scenario(stream_after_ms: u64) {
    let summary = run("conformance-b", &["--suite", "all"], stream_after_ms);
    assert_eq!(summary.scenarios.len(), 32, "{}", summary.text);
    assert_eq!(summary.failed(), 0, "{}", summary.text);
    if stream_after_ms == 0 {
        assert!(summary.checks("server-sse-polling") > 0, "{}", summary.text);
    }
}

fn run(part: &str, arguments: &[&str], stream_after_ms: u64) -> Summary {
    let config = format!(r#"{{"streamAfterMs":{stream_after_ms}}}"#);
    let host: Host = fixtures::setup().config(&config).start();
    let (status, summary) = suite(part, arguments, host.port, &host.token);
    host.assert_only_frames();
    assert_eq!(status, Some(0), "{}", summary.text);
    summary
}

/// Runs the suite against an endpoint; its exit code and what it found.
pub(crate) fn suite(part: &str, arguments: &[&str], port: u16, token: &str) -> (Option<i32>, Summary) {
    let port = proxy::start(port, token);
    let results = tempfile::tempdir().unwrap();
    let log = results.path().join("output");
    let output = std::fs::File::create(&log).unwrap();
    let mut suite = Command::new(installed("conformance-a/node_modules/.bin/node"))
        .arg(installed(&format!("{part}/node_modules/@modelcontextprotocol/conformance/dist/index.js")))
        .args(["server", "--url", &format!("http://127.0.0.1:{port}/mcp")])
        .args(arguments)
        .current_dir(results.path())
        .stdin(Stdio::null())
        .stdout(output.try_clone().unwrap())
        .stderr(output)
        .spawn()
        .unwrap();
    let status = within(LIMIT, "the suite's end", || suite.try_wait().unwrap());
    let text = std::fs::read_to_string(log).unwrap();
    (status.code(), Summary::read(text))
}

/// What the suite says at its end: each scenario with its checks, passed and failed.
pub(crate) struct Summary {
    pub(crate) scenarios: Vec<(String, u32, u32)>,
    pub(crate) text: String,
}

impl Summary {
    fn read(text: String) -> Self {
        let line = |line: &str| {
            let (name, counts) = line.trim_start_matches(['\u{2713}', '\u{2717}', ' ']).split_once(": ")?;
            let (passed, failed) = counts.split_once(", ")?;
            let passed = passed.strip_suffix(" passed")?.parse().ok()?;
            let failed = failed.split(' ').next()?.parse().ok()?;
            (name != "Total").then(|| (name.to_owned(), passed, failed))
        };
        let summary = text.split("=== SUMMARY ===").nth(1).unwrap_or_default();
        let scenarios: Vec<_> = summary.lines().filter_map(line).collect();
        eprintln!(
            "conformance: {} scenarios, {} checks passed",
            scenarios.len(),
            scenarios.iter().map(|(_, passed, _)| passed).sum::<u32>()
        );
        Self { scenarios, text }
    }

    fn checks(&self, scenario: &str) -> u32 {
        self.scenarios.iter().find(|(name, ..)| name == scenario).map_or(0, |(_, passed, _)| *passed)
    }

    pub(crate) fn failed(&self) -> u32 {
        self.scenarios.iter().map(|(.., failed)| failed).sum()
    }
}
