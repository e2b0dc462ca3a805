//! The real dufs, confined to what is shared: whoever swaps links in while it looks and opens gets nothing
//! of what is outside, and what takes the place of what is shared is served.

use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde_json::json;

use crate::reads::{begin, noise, rest};
use crate::share::{Shared, VERSIONS, error, ok};
use crate::support::http::Connection;
use crate::support::{Setup, eventually};

/// What nobody shared; no archive makes it smaller, so it is in there as it is.
fn secret() -> Vec<u8> {
    noise(8192)[4096..].to_vec()
}

/// Whether some of the secret is in it.
fn tells(bytes: &[u8]) -> bool {
    let secret = secret();
    let part = &secret[1000..1064];
    bytes.windows(part.len()).any(|window| window == part)
}

fn share(shared: &mut Shared, path: &Path) {
    ok(&shared.client.call("xfer_share", &json!({ "path": path }).to_string()));
}

/// Exchanges the two names over and over while `meanwhile` runs; both are what they were afterwards.
fn exchanging(one: &Path, other: &Path, meanwhile: impl FnOnce()) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                for _ in 0..2 {
                    renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).unwrap();
                }
            }
        });
        let end = ends(&is_over);
        meanwhile();
        drop(end);
    });
}

/// Ends the exchange also when what runs meanwhile fails.
fn ends(is_over: &AtomicBool) -> impl Drop + '_ {
    struct End<'a>(&'a AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    End(is_over)
}

/// What comes of a reply, however it ends.
fn got(shared: &Shared, path: &str) -> Vec<u8> {
    let mut connection = Connection::open(shared.host.port);
    let bearer = format!("Bearer {}", shared.host.token);
    let head = [("Authorization", bearer.as_str()), ("Connection", "close")];
    connection.send("GET", &format!("/xfer{path}"), &head, b"").unwrap();
    let mut all = Vec::new();
    let _ = connection.socket().read_to_end(&mut all);
    all
}

#[test]
fn an_archive_holds_nothing_that_links_swapped_in_lead_to() {
    // Of its own beginning: what it is made of is the same.
    let content = noise(24 << 20).split_off(8192);
    for version in VERSIONS {
        let shared = Shared::start(version);
        std::fs::write(shared.outside().join("secret"), secret()).unwrap();
        for n in 1..=4 {
            shared.write(&format!("a/{n}"), &content);
        }
        let mut connection = begin(&shared);
        let mut start = connection.read_chunk().unwrap().unwrap();
        while start.len() < 31 {
            start.extend(connection.read_chunk().unwrap().unwrap());
        }
        // The name of the first is in the head of the archive.
        for n in (1..=4).filter(|n| n.to_string().as_bytes()[0] != start[30]) {
            let file = shared.root().join(format!("a/{n}"));
            std::fs::remove_file(&file).unwrap();
            symlink(shared.outside().join("secret"), &file).unwrap();
        }
        let (zip, in_order) = rest(&mut connection);
        assert!(!tells(&zip), "{version}: it is in the archive");
        assert!(!in_order, "{version}: {} bytes and a clean end", zip.len());
        assert_eq!(shared.get("/?json").status, 200, "and it still works");
    }
}

#[test]
fn nothing_outside_is_read_or_written_through_a_link_that_comes_and_goes() {
    for version in VERSIONS {
        let mut shared = Shared::start(version);
        shared.write("d/f", "inside");
        std::fs::write(shared.outside().join("f"), secret()).unwrap();
        let (folder, link) = (shared.root().join("d"), shared.root().join("l"));
        symlink(shared.outside(), &link).unwrap();
        let mut inside = 0;
        exchanging(&folder, &link, || {
            for _ in 0..400 {
                for path in ["/d/f", "/d/f?edit", "/d?zip", "/l?zip", "/d?simple"] {
                    let got = got(&shared, path);
                    assert!(!tells(&got), "{version}: {path}");
                    inside += u32::from(got.ends_with(b"inside"));
                }
                shared.ask("MKCOL", "/d/made", &[], b"");
                let _ = std::fs::remove_dir(folder.join("made"));
            }
        });
        assert!(inside > 0, "what is inside is served in between");
        assert!(!shared.outside().join("made").exists(), "{version}: made outside");

        // One file; what is beside it is not shared.
        std::fs::write(shared.root().join("beside"), secret()).unwrap();
        let (file, link) = (folder.join("f"), shared.root().join("k"));
        symlink(shared.root().join("beside"), &link).unwrap();
        share(&mut shared, &file);
        let mut inside = 0;
        exchanging(&file, &link, || {
            for _ in 0..2000 {
                let got = got(&shared, "/f");
                assert!(!tells(&got), "{version}");
                inside += u32::from(got.ends_with(b"inside"));
            }
        });
        assert!(inside > 0, "what is shared is served in between");
    }
}

#[test]
fn dufs_runs_confined_also_when_it_has_started_again() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        let confined = |pid: u32| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            assert!(status.contains("NoNewPrivs:\t1"), "{status}");
            let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
            let args: Vec<_> = command.trim_end_matches('\0').split('\0').collect();
            assert!(args.len() == 3 && args[0].ends_with("/dufs") && args[1] == "-c", "{args:?}");
        };
        let first = shared.dufs_pid();
        confined(first);
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(first as i32).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
        eventually("another dufs", || (crate::share::dufs_pid(&shared.host)? != first).then_some(()));
        shared.until_served();
        confined(shared.dufs_pid());
    }
}

#[test]
fn what_takes_the_place_of_what_is_shared_is_served() {
    for version in VERSIONS {
        let mut shared = Shared::start(version);
        shared.write("f", "old");
        assert_eq!(shared.get("/f").text(), "old");
        let first = shared.dufs_pid();
        std::fs::remove_dir_all(shared.root()).unwrap();
        assert_eq!(shared.get("/f").status, 404);
        shared.write("f", "new");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert_eq!(shared.get("/f").text(), "new", "{version}"));
            }
        });
        assert_eq!(shared.put("/g", "up"), 201);
        let second = shared.dufs_pid();
        assert_ne!(second, first);
        assert_eq!(shared.get("/?simple").text().lines().count(), 2);
        assert_eq!(shared.dufs_pid(), second, "for the same folder it stays");

        // As editors write.
        let file = shared.root().join("f");
        share(&mut shared, &file);
        for n in 0..5 {
            let text = format!("{n}");
            let old = file.metadata().unwrap().ino();
            shared.write("f~", &text);
            std::fs::rename(shared.root().join("f~"), &file).unwrap();
            assert_ne!(file.metadata().unwrap().ino(), old);
            assert_eq!(shared.get("/f").text(), text, "{version}");
        }
        let closed: Vec<_> = shared.audited().into_iter().filter(|args| args["action"] == "close").collect();
        assert_eq!(closed.len(), 1, "the first share alone: {closed:?}");
    }
}

#[test]
fn a_limit_on_file_sizes_costs_an_upload_and_not_dufs() {
    for version in VERSIONS {
        // In blocks of 512 bytes.
        let shared = Shared::with(version, Setup::default().before("ulimit -f 8192"));
        let pid = shared.dufs_pid();
        // A little more than the limit: what is still on its way at the refusal is read to its end.
        let reply = shared.ask("PUT", "/large", &[], &noise((4 << 20) + (64 << 10)));
        assert_eq!(reply.status, 500, "{version}: {}", reply.text());
        assert!(reply.text().contains("could not write the file"), "{}", reply.text());
        assert!(shared.read("large").is_none());
        assert_eq!(shared.put("/small", "fits"), 201);
        assert_eq!(shared.get("/small").text(), "fits");
        assert_eq!(shared.dufs_pid(), pid, "it lives");
    }
}

#[test]
fn a_program_that_cannot_be_run_is_said_so() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("dufs");
    std::fs::write(&program, b"\x7fELF and nothing else").unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let shared = Shared::start(VERSIONS[0]);
    let host = Setup::default().config(&crate::share::config(&program)).start();
    let refused = host.client().call("xfer_share", &json!({ "path": shared.root() }).to_string());
    let said = error(&refused);
    assert!(said.contains("cannot ") && said.contains(program.to_str().unwrap()), "{said}");
}
