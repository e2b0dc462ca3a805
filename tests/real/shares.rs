//! A share's life on the real dufs: who may die, what comes back, what is left behind.

use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::processes;
use crate::share::{Shared, VERSIONS, config, dufs, dufs_pid, listens, ok};
use crate::support::cloudflared::Standin;
use crate::support::edge::Edge;
use crate::support::http::Connection;
use crate::support::{Host, Setup, eventually, within};

/// Our files of an endpoint in the private directory.
fn left(port: u16) -> Vec<String> {
    let names = crate::share::names(&a2mcp::rundir::open().unwrap());
    names.into_iter().filter(|name| name.starts_with(&format!("{port}-"))).collect()
}

/// The same host's next sidecar, after the death of this one.
fn next(host: &Host, program: &std::path::Path) -> Host {
    let resume = json!({"resume": {"port": host.port}});
    Setup::default().config(&with_token(host, program)).in_dir_of(host).hello(resume).start()
}

fn with_token(host: &Host, program: &std::path::Path) -> String {
    let mut config: Value = serde_json::from_str(&config(program)).unwrap();
    config["token"] = host.token.clone().into();
    config.to_string()
}

fn kill(host: &mut Host) {
    host.child.kill().unwrap();
    host.wait();
}

#[test]
fn a_dufs_that_dies_comes_back_with_the_same_terms() {
    for version in VERSIONS {
        let mut shared = Shared::start(version);
        shared.write("f", "x");
        shared.cut_put("/cut", b"0123", 8);
        let before = shared.status();
        processes::kill(shared.dufs_pid(), Signal::KILL);
        let mut seen = Vec::new();
        eventually("its return", || {
            let reply = shared.get("/f");
            if reply.status == 502 {
                assert!(!reply.text().contains(&before["port"].to_string()), "the detail is the log's");
            }
            seen.push(reply.status);
            (reply.status == 200).then_some(())
        });
        assert!(seen.iter().all(|status| matches!(status, 200 | 502)) && seen.contains(&502), "{seen:?}");
        assert_eq!(shared.status(), before, "the port too");
        assert!(left(shared.host.port).iter().all(|name| !name.ends_with(".yaml")));
        assert_eq!(shared.part("/cut"), Some(4));
        let headers = [("X-Update-Range", "append"), ("X-Upload-Length", "8")];
        assert_eq!(shared.ask("PATCH", "/cut?part", &headers, b"4567").status, 201);
    }
}

#[test]
fn an_upload_whose_dufs_dies_is_kept() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        shared.write("f", "old");
        let mut connection = shared.begin_put("/f", 1000);
        connection.write(&[b'x'; 500]).unwrap();
        eventually("the first half", || (shared.arrived("/f")? == 500).then_some(()));
        processes::kill(shared.dufs_pid(), Signal::KILL);
        eventually("its end", || (shared.get("/f").status == 502).then_some(()));
        let _ = connection.write(&[b'y'; 500]);
        if let Ok(reply) = connection.read() {
            assert_eq!(reply.status, 502);
        }
        shared.until_served();
        assert_eq!(shared.read("f").unwrap(), b"old");
        let kept = shared.part("/f").unwrap();
        assert!((500..=1000).contains(&kept), "{kept}");
        assert_eq!(shared.put("/f", "new"), 201, "and it still works");
    }
}

#[test]
fn five_deaths_in_thirty_seconds_are_a_failure_with_its_reason() {
    let mut shared = Shared::start("0.46.0");
    shared.write("f", "x");
    for _ in 0..5 {
        shared.until_served();
        let pid = eventually("dufs", || dufs_pid(&shared.host));
        processes::kill(pid, Signal::KILL);
        eventually("its end", || (shared.get("/f").status != 200).then_some(()));
    }
    let failed = eventually("the failure", || {
        let status = shared.client.again().call("xfer_status", "{}");
        let status = ok(&status);
        (status["serving"] == false).then_some(status)
    });
    assert!(failed["failed"].as_str().unwrap().contains("signal 9"), "{failed}");
    assert!(shared.host.notice("keeps dying")["text"].as_str().unwrap().contains("signal 9"));
    assert!(shared.host.status()["share"]["state"].as_str().unwrap().starts_with("failed: "));
    assert_eq!(shared.get("/f").status, 502);
    shared.share();
    assert_eq!(shared.get("/f").text(), "x", "shared again, it works");
}

#[test]
fn the_share_outlives_its_sidecar() {
    for version in VERSIONS {
        let mut shared = Shared::start(version);
        shared.write("f", "x");
        shared.cut_put("/sub/cut", b"0123", 8);
        let mut running = shared.begin_put("/sub/running", 1000);
        running.write(&[b'x'; 500]).unwrap();
        eventually("the first half", || (shared.arrived("/sub/running")? == 500).then_some(()));
        let (pid, before) = (shared.dufs_pid(), shared.status());
        for way in ["killed", "restarted"] {
            if way == "killed" {
                kill(&mut shared.host);
            } else {
                let restarted = shared.host.cli(&["restart", "--grace", "0"]);
                assert_eq!(restarted.0, 0, "{restarted:?}");
                shared.host.wait();
            }
            shared.host = next(&shared.host, &dufs(version));
            shared.client = shared.host.client();
            assert_eq!(shared.get("/f").text(), "x", "at once, {way}");
            assert_eq!(shared.dufs_pid(), pid);
            assert_eq!(shared.status(), before);
        }
        // What was cut goes on; what the crash cut, too, however small it was.
        assert_eq!((shared.part("/sub/cut"), shared.part("/sub/running")), (Some(4), Some(500)));
        let headers = [("X-Update-Range", "append"), ("X-Upload-Length", "8")];
        assert_eq!(shared.ask("PATCH", "/sub/cut?part", &headers, b"4567").status, 201);
        ok(&shared.client.call("xfer_stop", "{}"));
        eventually("the sweep", || (shared.names("sub") == ["cut"]).then_some(()));
        assert_eq!(left(shared.host.port), Vec::<String>::new());
        let actions: Vec<_> = shared.audited().iter().map(|record| record["action"].clone()).collect();
        assert_eq!(actions, ["share", "stop"]);
    }
}

/// Nobody was there when dufs died; the next sidecar starts it again.
#[test]
fn a_dufs_that_dies_while_no_sidecar_runs_comes_back() {
    let mut shared = Shared::start("0.46.0");
    shared.write("f", "x");
    let (pid, before) = (shared.dufs_pid(), shared.status());
    kill(&mut shared.host);
    processes::kill(pid, Signal::KILL);
    shared.host = next(&shared.host, &dufs("0.46.0"));
    shared.client = shared.host.client();
    shared.until_served();
    assert_eq!(shared.status(), before);
    assert_ne!(shared.dufs_pid(), pid);
}

/// A dufs that is broken as long as the returned file exists.
fn breakable(dir: &std::path::Path) -> (std::path::PathBuf, std::path::PathBuf) {
    use std::os::unix::fs::PermissionsExt as _;
    let (program, broken) = (dir.join("dufs"), dir.join("broken"));
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = -c ] && [ -e {} ] && {{ cat \"$2\"; exit 3; }}\nexec {} \"$@\"\n",
        broken.display(),
        dufs("0.46.0").display()
    );
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    (program, broken)
}

fn fails(shared: &mut Shared) {
    eventually("the failure", || {
        (shared.client.again().call("xfer_status", "{}").to_string().contains("failed")).then_some(())
    });
}

#[test]
fn what_the_shares_end_cuts_is_not_found() {
    let mut shared = Shared::start("0.46.0");
    for way in ["stop", "ttl"] {
        if way == "ttl" {
            let share = json!({ "path": shared.root(), "ttlSeconds": 2 }).to_string();
            ok(&shared.client.call("xfer_share", &share));
        }
        let mut upload = shared.begin_put("/f", 1000);
        upload.write(&[b'x'; 500]).unwrap();
        eventually("the first half", || (shared.arrived("/f")? == 500).then_some(()));
        if way == "stop" {
            ok(&shared.client.call("xfer_stop", "{}"));
        }
        let reply = upload.read().unwrap();
        assert_eq!(reply.status, 404, "{way}: {}", reply.text());
        assert!(reply.text().contains("has ended"), "{way}: {}", reply.text());
    }
}

#[test]
fn what_was_stopped_while_dufs_was_dead_stays_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let (program, broken) = breakable(dir.path());
    for is_given_up in [false, true] {
        let mut shared = Shared::of(&program, Setup::default());
        shared.write("f", "x");
        std::fs::write(&broken, "").unwrap();
        processes::kill(shared.dufs_pid(), Signal::KILL);
        eventually("its end", || (shared.get("/f").status == 502).then_some(()));
        if is_given_up {
            fails(&mut shared);
            let given_up = shared.get("/f").text();
            assert!(given_up.contains("given up") && given_up.contains("xfer_share"), "{given_up}");
            // The program shows its config file with the password in its last words.
            let said = format!("{}{}{}", shared.status(), shared.host.log(), shared.host.status());
            assert!(shared.status()["failed"].as_str().unwrap().contains("a2mcp:***@/"), "{said}");
            assert!(
                said.matches("a2mcp:").count()
                    == said.matches("a2mcp:***").count() + said.matches("a2mcp: ").count()
            );
        }
        assert_eq!(ok(&shared.client.call("xfer_stop", "{}"))["stopped"], true);
        std::fs::remove_file(&broken).unwrap();
        kill(&mut shared.host);
        shared.host = next(&shared.host, &program);
        shared.client = shared.host.client();
        assert_eq!((shared.status(), shared.get("/f").status), (json!({"serving": false}), 404));
        shared.share();
        assert_eq!(shared.result["replaced"], false);
        let actions: Vec<_> = shared.audited().iter().map(|record| record["action"].clone()).collect();
        assert_eq!(actions, ["share", "stop", "share"]);
    }
}

#[test]
fn a_share_that_never_began_does_not_begin_later() {
    let dir = tempfile::tempdir().unwrap();
    let (program, broken) = breakable(dir.path());
    let mut shared = Shared::of(&program, Setup::default());
    shared.write("f", "x");
    let before = shared.status();
    std::fs::write(&broken, "").unwrap();
    let other = json!({ "path": shared.outside() }).to_string();
    crate::share::error(&shared.client.call("xfer_share", &other));
    std::fs::remove_file(&broken).unwrap();
    for dufs_dies in [false, true] {
        let pid = shared.dufs_pid();
        kill(&mut shared.host);
        if dufs_dies {
            processes::kill(pid, Signal::KILL);
        }
        shared.host = next(&shared.host, &program);
        shared.client = shared.host.client();
        shared.until_served();
        assert_eq!((shared.status(), shared.get("/f").text()), (before.clone(), "x".into()));
    }
}

#[test]
fn a_path_that_became_something_else_is_not_served_again() {
    for (how, is_restarted) in [("link", false), ("link", true), ("gone", false), ("file", true)] {
        let mut shared = Shared::start("0.46.0");
        std::fs::write(shared.outside().join("f"), "SECRET").unwrap();
        let (root, pid) = (shared.root(), shared.dufs_pid());
        std::fs::rename(&root, shared.outside().join("old")).unwrap();
        match how {
            "link" => std::os::unix::fs::symlink(shared.outside(), &root).unwrap(),
            "file" => std::fs::write(&root, "SECRET").unwrap(),
            _ => {}
        }
        if is_restarted {
            kill(&mut shared.host);
        }
        processes::kill(pid, Signal::KILL);
        if is_restarted {
            shared.host = next(&shared.host, &dufs("0.46.0"));
            shared.client = shared.host.client();
        }
        eventually("the end", || {
            let reply = shared.get("/f");
            assert!(!reply.text().contains("SECRET"), "{how}");
            (reply.status == 404 && reply.text().contains("had to end")).then_some(())
        });
        let status = shared.status();
        assert!(status["serving"] == false && status["failed"].is_string(), "{how}: {status}");
        eventually("the record", || (shared.audited().len() == 2).then_some(()));
        assert_eq!(shared.audited()[1]["why"], status["failed"]);
        assert_eq!(dufs_pid(&shared.host), None);
    }
}

/// Between the keeper's death and the next dufs the path became one that may not be shared.
#[test]
fn after_the_keepers_death_the_path_is_judged_again() {
    let mut shared = Shared::start("0.46.0");
    shared.write("f", "x");
    let (root, agent) = (shared.root(), shared.host.path(""));
    std::fs::rename(&root, shared.outside().join("old")).unwrap();
    std::os::unix::fs::symlink(&agent, &root).unwrap();
    let keeper = shared.host.status()["keeper"]["pid"].as_u64().unwrap() as u32;
    processes::kill(keeper, Signal::KILL);
    eventually("the end", || {
        // Whatever is answered meanwhile, nothing of the agent directory is.
        let config = shared.get("/a2mcp.json");
        assert!(matches!(config.status, 404 | 502), "{} {}", config.status, config.text());
        assert!(!config.text().contains(&shared.host.token));
        config.text().contains("had to end").then_some(())
    });
    let status = shared.status();
    assert_eq!((&status["serving"], &status["path"]), (&json!(false), &json!(root)), "{status}");
    let why = status["failed"].as_str().unwrap();
    assert!(why.contains("its agent directory"), "{why}");
    assert_eq!(shared.host.status()["share"], Value::Null);
    eventually("the record", || (shared.audited().len() == 2).then_some(()));
    assert_eq!(shared.audited()[1]["why"], why);
    eventually("another keeper", || {
        shared.host.status()["keeper"]["pid"]
            .as_u64()
            .is_some_and(|now| now != u64::from(keeper))
            .then_some(())
    });
    assert_eq!(dufs_pid(&shared.host), None);
    std::fs::remove_file(&root).unwrap();
    std::fs::rename(shared.outside().join("old"), &root).unwrap();
    shared.share();
    assert_eq!(shared.get("/f").text(), "x", "shared again, it works");
}

#[test]
fn the_keepers_death_costs_only_a_moment() {
    let mut shared = Shared::start("0.46.0");
    shared.write("f", "x");
    let (pid, before) = (shared.dufs_pid(), shared.status());
    let keeper = shared.host.status()["keeper"]["pid"].as_u64().unwrap() as u32;
    processes::kill(keeper, Signal::KILL);
    eventually("the end of dufs with its keeper", || dufs_gone(pid).then_some(()));
    eventually("another keeper", || {
        shared.host.status()["keeper"]["pid"]
            .as_u64()
            .is_some_and(|now| now != u64::from(keeper))
            .then_some(())
    });
    shared.until_served();
    let after = shared.status();
    assert_eq!((&after["expiresAt"], &after["path"]), (&before["expiresAt"], &before["path"]));
    // Both at once: the state file knows.
    let keeper = shared.host.status()["keeper"]["pid"].as_u64().unwrap() as u32;
    kill(&mut shared.host);
    processes::kill(keeper, Signal::KILL);
    shared.host = next(&shared.host, &dufs("0.46.0"));
    shared.client = shared.host.client();
    shared.until_served();
    assert_eq!(shared.get("/f").text(), "x");
    assert_eq!(shared.status()["expiresAt"], before["expiresAt"]);
}

fn dufs_gone(pid: u32) -> bool {
    a2mcp::process::Identity::of(pid).is_none()
}

/// P5.
#[test]
fn two_hundred_shares_leave_nothing() {
    let mut shared = Shared::start("0.46.0");
    let keeper = shared.host.status()["keeper"]["pid"].as_u64().unwrap() as u32;
    ok(&shared.client.call("xfer_stop", "{}"));
    let before = (shared.host.descriptors(), processes::descriptors(keeper));
    for _ in 0..200 {
        shared.share();
        ok(&shared.client.call("xfer_stop", "{}"));
    }
    // The keeper may be just about to reap the last one.
    eventually("nothing that is left", || {
        let after = (shared.host.descriptors(), processes::descriptors(keeper));
        let mut zombies = [shared.host.child.id(), keeper].into_iter().flat_map(processes::zombies_of);
        (after.0 <= before.0 + 2 && after.1 <= before.1 + 2 && zombies.next().is_none()).then_some(())
    });
    assert_eq!(dufs_pid(&shared.host), None);
    assert_eq!(left(shared.host.port), Vec::<String>::new());
    assert!(!listens(shared.result["port"].as_u64().unwrap()));
    assert_eq!(shared.audited().len(), 402);
    shared.share();
    assert_eq!(shared.get("/").status, 200, "and it still works");
}

#[test]
fn a_stop_ends_the_share_in_order_and_the_hosts_death_at_once() {
    for by in ["stop", "signal", "host"] {
        let mut shared = Shared::start("0.46.0");
        shared.cut_put("/cut", b"0123", 8);
        let pid = shared.dufs_pid();
        match by {
            "stop" => assert_eq!(shared.host.cli(&["stop"]).0, 0),
            "signal" => shared.host.signal(Signal::TERM),
            _ => shared.host.close_stdin(),
        }
        let since = Instant::now();
        within(Duration::from_secs(5), "the end of dufs", || dufs_gone(pid).then_some(()));
        assert_eq!(shared.host.ends_within(Duration::from_secs(5)), Some(0), "{by}");
        if by == "host" {
            assert!(since.elapsed() < Duration::from_secs(3), "{:?}", since.elapsed());
        }
        let last = shared.audited().pop().unwrap();
        assert_eq!((&last["action"], &last["why"]), (&json!("close"), &json!("bridge stopped")), "{by}");
        assert_eq!(shared.names(""), Vec::<String>::new(), "{by}");
        assert_eq!(left(shared.host.port), Vec::<String>::new(), "{by}");
    }
}

#[test]
fn a_restart_lets_transfers_end() {
    let mut shared = Shared::start("0.46.0");
    let mut upload = shared.begin_put("/f", 6);
    upload.write(b"abc").unwrap();
    eventually("the first half", || (shared.arrived("/f")? == 3).then_some(()));
    let restart = std::thread::scope(|scope| {
        let restart = scope.spawn(|| shared.host.cli(&["restart", "--grace", "20"]));
        eventually("the draining", || (shared.host.status()["health"] == "restarting").then_some(()));
        upload.write(b"def").unwrap();
        let reply = upload.read().unwrap();
        assert_eq!((reply.status, reply.header("connection")), (201, Some("close")));
        restart.join().unwrap()
    });
    assert_eq!(restart.0, 0, "{restart:?}");
    assert_eq!(shared.host.ends_within(Duration::from_secs(15)), Some(75));
    assert_eq!(shared.read("f").unwrap(), b"abcdef");
    shared.host = next(&shared.host, &dufs("0.46.0"));
    assert_eq!(shared.get("/f").text(), "abcdef");
}

/// The tunnel's address is read at each call, and files cross it both ways (contract 5, 7).
#[test]
fn the_public_address_follows_the_tunnel() {
    let standin = Standin::new();
    let edge = Edge::start(&standin);
    let path = std::env::var("PATH").unwrap_or_default();
    let mut setup = Setup::default().env("PATH", &format!("{}:{path}", standin.dir.path().display()));
    setup.env.extend(edge.env());
    let mut shared = Shared::with("0.46.0", setup);
    shared.write("f", "through");
    assert_eq!(
        (shared.status()["publicUrl"].clone(), &shared.result["publicUrl"]),
        (Value::Null, &Value::Null)
    );
    assert!(
        shared.result["usage"]["public"].as_str().unwrap().starts_with("no public address — `/a2mcp tunnel`")
    );
    assert_eq!(shared.host.cli(&["tunnel"]).0, 0);
    let (name, public) = standin.name();
    assert_eq!(shared.status()["publicUrl"], format!("https://{name}/xfer/"));
    let bearer = format!("Bearer {}", shared.host.token);
    let through = |method: &str, path: &str, body: &[u8]| {
        Connection::open(public).request(method, path, &[("Authorization", &bearer)], body)
    };
    assert_eq!(through("GET", "/xfer/f", b"").text(), "through");
    let large = vec![b'x'; 3 << 20];
    assert_eq!(through("PUT", "/xfer/large", &large).status, 201);
    assert!(shared.read("large").unwrap() == large && through("GET", "/xfer/large", b"").body == large);
    assert_eq!(Connection::open(public).request("GET", "/xfer/f", &[], b"").status, 401);
    shared.share();
    let usage = shared.result["usage"]["public"].as_str().unwrap();
    assert!(usage.contains(&format!("https://{name}/xfer/")) && usage.contains("<TOKEN>"), "{usage}");
    assert_eq!(shared.host.cli(&["tunnel", "stop"]).0, 0);
    assert_eq!(shared.status()["publicUrl"], Value::Null);
}

/// A gigabyte through the public name, and both kinds of a sidecar's end under it: whoever downloads
/// goes on with a Range at the same name (contract 15).
#[test]
fn a_download_and_the_tunnels_name_outlive_ten_restarts() {
    const PART: usize = 1 << 20;
    const PARTS: usize = 1024;
    const ENDS: usize = 10;
    let standin = Standin::new();
    let edge = Edge::start(&standin);
    let setup = || {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut setup = Setup::default().env("PATH", &format!("{}:{path}", standin.dir.path().display()));
        setup.env.extend(edge.env());
        setup
    };
    let mut shared = Shared::with("0.46.0", setup());
    // Each part begins with its number; the rest takes no disk.
    let file = std::fs::File::create(shared.root().join("large")).unwrap();
    file.set_len((PART * PARTS) as u64).unwrap();
    for part in 0..PARTS {
        file.write_all_at(&part.to_be_bytes(), (part * PART) as u64).unwrap();
    }
    assert_eq!(shared.host.cli(&["tunnel"]).0, 0);
    let (name, public) = standin.name();
    let before = shared.status();
    let dufs = shared.dufs_pid();
    let bearer = format!("Bearer {}", shared.host.token);
    let mut part = 0;
    for end in 0..=ENDS {
        let mut connection = Connection::open(public);
        let range = format!("bytes={}-", part * PART);
        let headers = [("Authorization", bearer.as_str()), ("Range", range.as_str())];
        connection.send("GET", "/xfer/large", &headers, b"").unwrap();
        assert_eq!(connection.read_head().unwrap().status, 206, "after {end} ends");
        while part < PARTS * (end + 1) / (ENDS + 1) {
            let bytes = connection.read_exactly(PART).unwrap();
            assert_eq!(bytes[..8], part.to_be_bytes());
            part += 1;
        }
        if end == ENDS {
            break;
        }
        if end % 2 == 0 {
            kill(&mut shared.host);
        } else {
            let restarted = shared.host.cli(&["restart", "--grace", "0"]);
            assert_eq!(restarted.0, 0, "{restarted:?}");
            shared.host.wait();
        }
        let resume = json!({"resume": {"port": shared.host.port}});
        let config = with_token(&shared.host, &crate::share::dufs("0.46.0"));
        shared.host = setup().config(&config).in_dir_of(&shared.host).hello(resume).start();
        shared.client = shared.host.client();
    }
    assert_eq!(part, PARTS);
    assert_eq!((standin.name(), standin.starts().len()), ((name, public), 1), "the same tunnel all the time");
    assert_eq!((shared.status(), shared.dufs_pid()), (before, dufs), "and the same share");
}
