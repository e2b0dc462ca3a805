use futures_util::future::join_all;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;

use super::*;

/// Runs `body` as the sidecar runs: one thread, a `LocalSet`; waits for every task it started.
fn run<F: AsyncFnOnce(&TaskTracker)>(body: F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        let tasks = TaskTracker::new();
        body(&tasks).await;
        tasks.close();
        tasks.wait().await;
    });
}

fn record(id: &str) -> Record<'_> {
    static ARGS: std::sync::OnceLock<Args> = std::sync::OnceLock::new();
    let args = ARGS.get_or_init(|| Args::redact(r#"{"path":"/etc/hostname"}"#));
    Record::start(id, "sid", "read", args)
}

fn ids(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .map(|value| value["id"].as_str().unwrap().to_owned())
        .collect()
}

fn generation(path: &Path) -> std::path::PathBuf {
    format!("{}.1", path.display()).into()
}

#[test]
fn a_record_is_in_the_file_when_the_write_returns() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("a2mcp.log");
    run(async |tasks| {
        let audit = Audit::start(&path, tasks);
        for id in ["a", "b", "c"] {
            audit.write(record(id)).await;
            assert_eq!(ids(&path).last().unwrap(), id);
        }
        assert_eq!(audit.failures(), 0);
    });
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn records_of_callers_that_left_are_written_in_order() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("log");
    run(async |tasks| {
        let audit = Audit::start(&path, tasks);
        for n in 0..1000 {
            drop(audit.write(record(&n.to_string())));
        }
        audit.flush().await;
        assert_eq!(ids(&path), (0..1000).map(|n| n.to_string()).collect::<Vec<_>>());
        drop(audit.write(record("last")));
    });
    assert_eq!(ids(&path).len(), 1001, "what is queued is written after the last handle is gone");
}

#[test]
fn a_thousand_concurrent_writers_lose_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("log");
    run(async |tasks| {
        let audit = Audit::start(&path, tasks);
        let calls: Vec<_> = (0..1000)
            .map(|n| {
                let audit = audit.clone();
                tokio::task::spawn_local(async move {
                    let args = Args::redact("{}");
                    let id = n.to_string();
                    audit.write(Record::start(&id, "s", "echo", &args)).await;
                    tokio::task::yield_now().await;
                    audit.write(Record::done(&id, "s", "echo", &args, false)).await;
                })
            })
            .collect();
        for call in calls {
            call.await.unwrap();
        }
        assert_eq!(audit.failures(), 0);
    });
    let ids = ids(&path);
    assert_eq!(ids.len(), 2000);
    assert_eq!(ids.into_iter().collect::<BTreeSet<_>>().len(), 1000);
}

#[test]
fn past_the_limit_the_file_becomes_the_older_generation() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("log");
    let old = format!("{{\"id\":\"old\",\"x\":\"{}\"}}\n", "x".repeat(ROTATE_BYTES as usize));
    std::fs::write(&path, &old).unwrap();
    run(async |tasks| {
        let audit = Audit::start(&path, tasks);
        audit.write(record("new")).await;
    });
    assert_eq!(ids(&path), ["new"]);
    assert_eq!(std::fs::read_to_string(generation(&path)).unwrap(), old);
}

#[test]
fn two_sidecars_on_one_file_lose_nothing_across_a_rotation() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("log");
    let line = "{\"id\":\"before\"}\n";
    let before = (ROTATE_BYTES as usize - 4096) / line.len();
    std::fs::write(&path, line.repeat(before)).unwrap();
    std::thread::scope(|scope| {
        for name in ["a", "b"] {
            let path = &path;
            scope.spawn(move || {
                run(async |tasks| {
                    let audit = Audit::start(path, tasks);
                    for n in 0..400 {
                        audit.write(record(&format!("{name}{n}"))).await;
                    }
                    assert_eq!(audit.failures(), 0);
                })
            });
        }
    });
    let (old, new) = (ids(&generation(&path)), ids(&path));
    assert!(!new.is_empty());
    assert_eq!(old.len() + new.len(), before + 800);
}

#[test]
fn many_rotations_by_three_sidecars_leave_no_hole() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("log");
    let args = format!("[{}1]", "1,".repeat(500));
    const EACH: usize = 2000;
    std::thread::scope(|scope| {
        for name in ["a", "b", "c"] {
            let (path, args) = (&path, &args);
            scope.spawn(move || {
                run(async |tasks| {
                    let audit = Audit::start(path, tasks);
                    let args = Args::redact(args);
                    for n in 0..EACH {
                        let written = audit.write(Record::start(&format!("{name}-{n}"), "s", "t", &args));
                        if n % 7 == 0 {
                            written.await;
                        }
                    }
                    audit.flush().await;
                })
            });
        }
    });
    // One generation is kept, so the oldest are gone; what is left of each writer is its unbroken end.
    let mut left: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for id in ids(&generation(&path)).into_iter().chain(ids(&path)) {
        let (name, n) = id.split_once('-').unwrap();
        left.entry(name.to_owned()).or_default().push(n.parse().unwrap());
    }
    for (name, numbers) in left {
        let expected: Vec<usize> = (numbers[0]..numbers[0] + numbers.len()).collect();
        assert_eq!(numbers, expected, "{name}");
    }
}

#[test]
fn a_holder_that_never_lets_go_stops_rotation_and_nothing_else() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("log");
    std::fs::write(&path, format!("{{\"id\":\"{}\"}}\n", "x".repeat(ROTATE_BYTES as usize))).unwrap();
    let lock = std::fs::File::create(tmp.path().join("log.lock")).unwrap();
    lock.lock().unwrap();
    run(async |tasks| {
        let audit = Audit::start_with(&path, tasks, Duration::from_millis(20));
        audit.write(record("a")).await;
        // Within the penalty it is not waited for again.
        let begun = std::time::Instant::now();
        join_all((0..50).map(|n| audit.write(record(&n.to_string())))).await;
        assert!(begun.elapsed() < Duration::from_secs(5));
        assert_eq!((ids(&path).len(), audit.failures()), (52, 0));
        lock.unlock().unwrap();
        audit.write(record("after")).await;
        assert_eq!(ids(&path), ["after"]);
    });
    assert_eq!(ids(&generation(&path)).len(), 52);
}

#[test]
fn a_file_that_went_away_between_look_and_write_gets_the_record_again() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("log");
    let mut log = Log::new(&path);
    assert!(!log.look().unwrap());
    // Another sidecar rotates twice.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "{\"id\":\"another\"}\n").unwrap();
    log.append(b"{\"id\":\"ours\"}\n").unwrap();
    assert_eq!(ids(&path), ["another", "ours"]);
    // Once: the file we have open is in the older generation then, which counts.
    std::fs::rename(&path, generation(&path)).unwrap();
    log.append(b"{\"id\":\"late\"}\n").unwrap();
    assert_eq!(ids(&generation(&path)), ["another", "ours", "late"]);
    assert!(!log.look().unwrap());
    log.append(b"{\"id\":\"next\"}\n").unwrap();
    assert_eq!(ids(&path), ["next"]);
}

#[test]
fn a_cut_line_is_not_glued_to_the_next_record() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("log");
    run(async |tasks| {
        let audit = Audit::start(&path, tasks);
        audit.write(record("a")).await;
        use std::io::Write;
        let mut other = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        other.write_all(b"{\"ts\":\"cut").unwrap();
        audit.write(record("b")).await;
        audit.write(record("c")).await;
    });
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 4);
    assert_eq!(lines[1], "{\"ts\":\"cut");
    assert!(lines[2].contains("\"id\":\"b\"") && lines[3].contains("\"id\":\"c\""));
}

#[test]
fn failures_are_counted_and_never_stop_a_caller() {
    let tmp = tempfile::tempdir().unwrap();
    for path in [Path::new("/dev/full"), &tmp.path().join("missing/log"), tmp.path()] {
        run(async |tasks| {
            let audit = Audit::start(path, tasks);
            for n in 0..10 {
                audit.write(record(&n.to_string())).await;
            }
            audit.flush().await;
            assert_eq!(audit.failures(), 10, "{}", path.display());
        });
    }
    assert!(!Path::new("/dev/full.lock").exists());
}

#[test]
fn a_directory_that_appears_later_is_used() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("later/log");
    run(async |tasks| {
        let audit = Audit::start(&path, tasks);
        audit.write(record("lost")).await;
        std::fs::create_dir(tmp.path().join("later")).unwrap();
        audit.write(record("kept")).await;
        std::fs::remove_file(&path).unwrap();
        audit.write(record("again")).await;
        assert_eq!((ids(&path), audit.failures()), (vec!["again".to_owned()], 1));
    });
}

#[test]
fn a_linked_path_rotates_beside_its_target() {
    let tmp = tempfile::tempdir().unwrap();
    let (link, target) = (tmp.path().join("link"), tmp.path().join("real/log"));
    std::fs::create_dir(tmp.path().join("real")).unwrap();
    std::fs::write(&target, format!("{{\"id\":\"{}\"}}\n", "x".repeat(ROTATE_BYTES as usize))).unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    run(async |tasks| Audit::start(&link, tasks).write(record("new")).await);
    assert!(link.is_symlink());
    assert_eq!(ids(&link), ["new"]);
    assert_eq!(ids(&generation(&target)).len(), 1);
}

#[test]
fn ends_on_record_are_found_in_both_generations() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("log");
    assert!(ended(&path, &["a"]).is_empty());
    let args = Args::redact("{}");
    let end = |id: &'static str| Record::done(id, "sid", "read", &args, false);
    run(async |tasks| Audit::start(&path, tasks).write(end("old")).await);
    std::fs::rename(&path, generation(&path)).unwrap();
    run(async |tasks| {
        let audit = Audit::start(&path, tasks);
        audit.write(end("new")).await;
        audit.write(record("running")).await;
    });
    std::fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"id\":\"cut").unwrap();
    assert_eq!(ended(&path, &["new", "running", "old", "cut"]), HashSet::from(["old", "new"]));
    assert!(ended(Path::new("/dev/null"), &["a"]).is_empty());
}
