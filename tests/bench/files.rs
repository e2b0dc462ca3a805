//! Files through `/xfer/` next to the same dufs asked directly, in one run: a large download and upload
//! in turns, small downloads by the load generator, and what a transfer at full speed does to calls.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tempfile::TempDir;

use crate::load::{Connections, Request, Segment, Until};
use crate::process;
use crate::report::median;
use crate::server::Bridge;

/// The published version that is measured; `tests/setup` builds it.
const DUFS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/tools/bin/dufs");
const SMALL_GETS: u64 = 10_000;
const SMALL_AT_ONCE: usize = 16;
/// The content of a small file: a JSON string of 1 KB, because the generator judges JSON.
const SMALL: usize = 1024;
/// Read and written at once.
const STEP: usize = 1 << 20;

/// What one run found; the pairs are seconds or segments directly and through the bridge.
pub(crate) struct Files {
    pub(crate) bytes: u64,
    get: Vec<(f64, f64)>,
    put: Vec<(f64, f64)>,
    small: Vec<(Segment, Segment)>,
    /// `echo` without and with a transfer.
    echo: Vec<(Segment, Segment)>,
    /// Growth of the sidecar over the large transfers, in KiB.
    pub(crate) growth_kib: u64,
}

impl Files {
    fn share(pairs: &[(f64, f64)]) -> f64 {
        median(pairs.iter().map(|(direct, bridged)| direct / bridged))
    }

    pub(crate) fn get_share(&self) -> f64 {
        Self::share(&self.get)
    }

    pub(crate) fn put_share(&self) -> f64 {
        Self::share(&self.put)
    }

    pub(crate) fn small_share(&self) -> f64 {
        median(self.small.iter().map(|(direct, bridged)| bridged.rate() / direct.rate()))
    }

    /// The 99th percentile of `echo` during a transfer, times that without one.
    pub(crate) fn echo_times(&self) -> f64 {
        let p99 = |segment: &Segment| segment.percentile(0.99).as_secs_f64();
        median(self.echo.iter().map(|(idle, busy)| p99(busy) / p99(idle)))
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        let rate = |pairs: &[(f64, f64)], pick: fn(&(f64, f64)) -> f64| {
            self.bytes as f64 / 1e6 / median(pairs.iter().map(pick))
        };
        let large = |name: &str, pairs: &[(f64, f64)]| {
            format!(
                "{name} of {} MB: {:.0} MB/s directly, {:.0} MB/s through the bridge ({:.0} %)",
                self.bytes / 1_000_000,
                rate(pairs, |pair| pair.0),
                rate(pairs, |pair| pair.1),
                Self::share(pairs) * 100.0
            )
        };
        let small = |pick: fn(&(Segment, Segment)) -> f64| median(self.small.iter().map(pick));
        let echo = |pick: fn(&(Segment, Segment)) -> &Segment| {
            median(self.echo.iter().map(|pair| pick(pair).percentile(0.99).as_secs_f64() * 1e6))
        };
        vec![
            large("GET", &self.get),
            large("PUT", &self.put),
            format!(
                "{SMALL_GETS} GETs of 1 KB, {SMALL_AT_ONCE} at once: {:.0}/s directly, {:.0}/s through the bridge ({:.0} %)",
                small(|pair| pair.0.rate()),
                small(|pair| pair.1.rate()),
                self.small_share() * 100.0
            ),
            format!(
                "echo p99: {:.0} µs alone, {:.0} µs during a download at full speed",
                echo(|pair| &pair.0),
                echo(|pair| &pair.1)
            ),
        ]
    }
}

/// Measures both ways; `None` when there is no dufs.
pub(crate) fn measure(
    binary: &Path,
    catalogue: &Path,
    is_quick: bool,
    next_id: &mut u64,
) -> Result<Option<Files>> {
    if !Path::new(DUFS).exists() {
        eprintln!("bench: /xfer/ is not measured: there is no {DUFS} (tests/setup builds it)");
        return Ok(None);
    }
    let bytes: u64 = 1 << 30;
    let rounds = if is_quick { 3 } else { 5 };
    // In memory where there is room: a disk's moods would hide what is compared.
    let dir = match TempDir::new_in("/dev/shm") {
        Ok(dir) if has_room(dir.path(), 3 * bytes) => dir,
        _ => tempfile::tempdir()?,
    };
    let root = dir.path().canonicalize()?;
    // Real content: a hole is read from one page that stays in the processor's cache.
    let mut large = std::fs::File::create(root.join("large"))?;
    for step in 0..bytes / STEP as u64 {
        large.write_all(&vec![step as u8; STEP])?;
    }
    std::fs::write(root.join("small"), format!("\"{}\"", "x".repeat(SMALL - 2)))?;
    let bridge = Bridge::start(binary, catalogue, &json!({ "xfer": { "dufs": DUFS } }).to_string())?;
    let path = root.to_str().context("the directory's name is not UTF-8")?;
    bridge.endpoint.call("xfer_share", json!({ "path": path }), |text| text.contains("/xfer/"))?;
    let direct = Direct::start(&root)?;
    let (through, bearer) = (bridge.endpoint.address, bridge.endpoint.authorization());
    let sides = [(direct.address, String::new()), (through, bearer)];

    let mut files =
        Files { bytes, get: Vec::new(), put: Vec::new(), small: Vec::new(), echo: Vec::new(), growth_kib: 0 };
    let smalls = sides.clone().map(|(address, headers)| {
        let request = format!("GET /xfer/small HTTP/1.1\r\nHost: {address}\r\n{headers}\r\n");
        Request::calibrate(address, request.into_bytes(), |_| Ok(()))
    });
    let [small_direct, small_bridged] = smalls;
    let smalls = [small_direct?, small_bridged?];
    let before = process::memory(bridge.pid)?.resident_kib;
    for _ in 0..rounds {
        let mut pair = [0.0; 2];
        for ((address, headers), seconds) in sides.iter().zip(&mut pair) {
            *seconds = get(*address, headers, bytes, &AtomicBool::new(false))?.as_secs_f64();
        }
        files.get.push(pair.into());
        for ((address, headers), seconds) in sides.iter().zip(&mut pair) {
            *seconds = put(*address, headers, bytes)?.as_secs_f64();
        }
        files.put.push(pair.into());
        let after = process::memory(bridge.pid)?.resident_kib;
        files.growth_kib = files.growth_kib.max(after.saturating_sub(before));
    }
    let echo = bridge.endpoint.echo()?;
    for _ in 0..rounds {
        let mut drive = |side: usize| {
            let mut connections = Connections::open(sides[side].0, SMALL_AT_ONCE)?;
            connections.drive(&smalls[side], Until::Count(SMALL_GETS), next_id)
        };
        files.small.push((drive(0)?, drive(1)?));
        let mut calls = Connections::open(through, 1)?;
        calls.drive(&echo, Until::Elapsed(Duration::from_millis(100)), next_id)?;
        let pause = Until::Elapsed(Duration::from_millis(1000));
        let idle = calls.drive(&echo, pause, next_id)?;
        let busy = during_a_transfer(&sides[1], bytes, || calls.drive(&echo, pause, next_id))?;
        files.echo.push((idle, busy));
    }
    direct.stop()?;
    bridge.stop()?;
    Ok(Some(files))
}

fn during_a_transfer<T>(
    (address, headers): &(SocketAddr, String),
    bytes: u64,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let transfer = scope.spawn(|| -> Result<()> {
            while !over.load(Ordering::Relaxed) {
                get(*address, headers, bytes, &over)?;
            }
            Ok(())
        });
        // It has begun to flow by then.
        std::thread::sleep(Duration::from_millis(50));
        let done = work();
        over.store(true, Ordering::Relaxed);
        transfer.join().map_err(|_| anyhow::anyhow!("the transfer failed"))??;
        done
    })
}

fn has_room(dir: &Path, bytes: u64) -> bool {
    rustix::fs::statvfs(dir).is_ok_and(|disk| disk.f_bavail.saturating_mul(disk.f_frsize) > bytes)
}

fn open(address: SocketAddr, request: &str) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    stream.write_all(request.as_bytes())?;
    Ok(stream)
}

/// Downloads the large file and throws it away; stops early when `over` says so.
fn get(address: SocketAddr, headers: &str, bytes: u64, over: &AtomicBool) -> Result<Duration> {
    let begun = Instant::now();
    let mut stream = open(
        address,
        &format!("GET /xfer/large HTTP/1.1\r\nHost: {address}\r\n{headers}Connection: close\r\n\r\n"),
    )?;
    let mut buffer = vec![0; STEP];
    let mut received = 0;
    loop {
        match stream.read(&mut buffer)? {
            0 => break,
            _ if over.load(Ordering::Relaxed) => return Ok(begun.elapsed()),
            count => received += count as u64,
        }
    }
    ensure!(received > bytes && received < bytes + 8192, "{received} bytes came in place of {bytes}");
    Ok(begun.elapsed())
}

/// Uploads as much as the large file has.
fn put(address: SocketAddr, headers: &str, bytes: u64) -> Result<Duration> {
    let begun = Instant::now();
    let mut stream = open(
        address,
        &format!(
            "PUT /xfer/uploaded HTTP/1.1\r\nHost: {address}\r\n{headers}Content-Length: {bytes}\r\n\r\n"
        ),
    )?;
    let buffer = vec![7; STEP];
    for _ in 0..bytes / STEP as u64 {
        stream.write_all(&buffer)?;
    }
    let mut head = [0; 1024];
    let count = stream.read(&mut head)?;
    let head = String::from_utf8_lossy(&head[..count]);
    ensure!(head.starts_with("HTTP/1.1 201"), "the upload was answered with {head}");
    Ok(begun.elapsed())
}

/// A dufs of our own, without a bridge in front of it.
struct Direct {
    child: Child,
    address: SocketAddr,
}

impl Direct {
    fn start(root: &PathBuf) -> Result<Self> {
        let free = std::net::TcpListener::bind("127.0.0.1:0")?;
        let address = free.local_addr()?;
        drop(free);
        let child = Command::new(DUFS)
            .arg(root)
            .args(["-b", "127.0.0.1", "-p", &address.port().to_string(), "--path-prefix", "/xfer"])
            .args(["--allow-upload", "--allow-delete", "--log-format", ""])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start dufs")?;
        let direct = Self { child, address };
        let deadline = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(address).is_err() {
            ensure!(Instant::now() < deadline, "dufs does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(direct)
    }

    fn stop(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Direct {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
