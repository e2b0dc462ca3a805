//! Large, slow and cut transfers: nothing is held in memory, and everything is let go.

use std::io::{Read as _, Write as _};
use std::time::Duration;

use rustix::process::Signal;

use crate::processes;
use crate::share::{Shared, VERSIONS};
use crate::support::http::Connection;
use crate::support::{eventually, within};

const MIB: u64 = 1 << 20;
/// What a transfer may take of memory.
const FLAT: u64 = 16 * MIB;

/// A file of `size` bytes that takes no disk.
fn sparse(shared: &Shared, name: &str, size: u64) {
    std::fs::File::create(shared.root().join(name)).unwrap().set_len(size).unwrap();
}

/// Sends a GET and reads the head of its answer.
fn begin_get(shared: &Shared, path: &str) -> Connection {
    let mut connection = Connection::open(shared.host.port);
    let bearer = format!("Bearer {}", shared.host.token);
    connection.send("GET", &format!("/xfer{path}"), &[("Authorization", &bearer)], b"").unwrap();
    assert_eq!(connection.read_head().unwrap().status, 200);
    connection
}

#[test]
fn a_gigabyte_passes_both_ways_in_flat_memory() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        shared.write("warm", "x");
        shared.get("/warm");
        let idle = shared.host.resident();
        let size = 1024 * MIB;
        sparse(&shared, "down", size);
        let mut connection = begin_get(&shared, "/down");
        let (mut peak, mut buffer, mut left) = (0, vec![0; 1 << 20], size);
        while left > 0 {
            let step = buffer.len().min(left as usize);
            let bytes = connection.read_exactly(step).unwrap();
            left -= bytes.len() as u64;
            if left.is_multiple_of(64 * MIB) {
                peak = peak.max(shared.host.resident());
            }
        }
        let mut connection = shared.begin_put("/up", size);
        for (at, byte) in buffer.iter_mut().enumerate() {
            *byte = at as u8;
        }
        for part in 0..size / MIB {
            connection.write(&buffer).unwrap();
            if part % 64 == 0 {
                peak = peak.max(shared.host.resident());
            }
        }
        assert_eq!(connection.read().unwrap().status, 201);
        let uploaded = std::fs::metadata(shared.root().join("up")).unwrap().len();
        assert_eq!(uploaded, size);
        assert!(peak <= idle + FLAT, "idle {} MiB, peak {} MiB", idle / MIB, peak / MIB);
    }
}

#[test]
fn slow_readers_and_writers_hold_little() {
    let shared = Shared::start("0.46.0");
    sparse(&shared, "down", 4096 * MIB);
    shared.get("/");
    let idle = shared.host.resident();
    let readers: Vec<_> = (0..20).map(|_| begin_get(&shared, "/down")).collect();
    let mut writers: Vec<_> = (0..20).map(|at| shared.begin_put(&format!("/up{at}"), 4096 * MIB)).collect();
    for writer in &mut writers {
        writer.write(b"a little").unwrap();
    }
    eventually("all of them", || (shared.host.status()["share"]["transfers"] == 40).then_some(()));
    // 40 of them: about 1 MiB each at the most.
    let peak = shared.host.resident();
    assert!(peak <= idle + 40 * MIB, "idle {} MiB, peak {} MiB", idle / MIB, peak / MIB);
    assert_eq!(shared.put("/quick", "x"), 201, "others are served meanwhile");
    drop((readers, writers));
    eventually("their end", || (shared.host.status()["share"]["transfers"] == 0).then_some(()));
}

#[test]
fn cut_connections_release_everything() {
    let shared = Shared::start("0.46.0");
    sparse(&shared, "down", 256 * MIB);
    shared.get("/");
    let dufs = shared.dufs_pid();
    let idle = (shared.host.descriptors(), processes::descriptors(dufs));
    for round in 0..3 {
        let mut readers: Vec<_> = (0..30).map(|_| begin_get(&shared, "/down")).collect();
        let mut writers: Vec<_> =
            (0..30).map(|at| shared.begin_put(&format!("/up{at}"), 256 * MIB)).collect();
        for (reader, writer) in readers.iter_mut().zip(&mut writers) {
            reader.read_exactly(100_000).unwrap();
            writer.write(&[7; 100_000]).unwrap();
        }
        for (at, connection) in readers.iter().chain(&writers).enumerate() {
            if at % 2 == 0 {
                let _ = rustix::net::sockopt::set_socket_linger(connection.socket(), Some(Duration::ZERO));
            }
        }
        drop((readers, writers));
        eventually("their end", || (shared.host.status()["share"]["transfers"] == 0).then_some(()));
        assert_eq!(shared.part("/up0"), Some(100_000), "round {round}");
    }
    // Idle connections to dufs may stay.
    within(Duration::from_secs(20), "the release", || {
        let now = (shared.host.descriptors(), processes::descriptors(dufs));
        (now.0 <= idle.0 + 66 && now.1 <= idle.1 + 66).then_some(())
    });
    let open = std::fs::read_dir(format!("/proc/{dufs}/fd")).unwrap().flatten();
    let files = open.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to.starts_with(shared.root())));
    assert_eq!(files.count(), 0, "no file is open");
    assert_eq!(shared.put("/f", "and it still works"), 201);
}

/// A transfer whose file server dies must not look complete.
#[test]
fn a_download_that_breaks_does_not_look_whole() {
    let shared = Shared::start("0.46.0");
    sparse(&shared, "down", 1024 * MIB);
    let path = shared.root().join("folder");
    std::fs::create_dir(&path).unwrap();
    std::fs::File::create(path.join("big")).unwrap().set_len(1024 * MIB).unwrap();
    for target in ["/down", "/folder?zip"] {
        let mut connection = begin_get(&shared, target);
        connection.read_exactly(1000).unwrap();
        processes::kill(shared.dufs_pid(), Signal::KILL);
        let mut rest = Vec::new();
        let mut socket = connection.socket();
        let ended = socket.read_to_end(&mut rest);
        assert!(ended.is_err() || !rest.ends_with(b"0\r\n\r\n"), "{target}: it ended as if it were whole");
        assert!((rest.len() as u64) < 1000 * MIB);
        shared.until_served();
    }
    let mut connection = Connection::open(shared.host.port);
    connection.socket().flush().unwrap();
    let bearer = format!("Bearer {}", shared.host.token);
    assert_eq!(connection.request("GET", "/xfer/", &[("Authorization", &bearer)], b"").status, 200);
}
