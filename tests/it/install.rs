//! Contract 14: how dufs and cloudflared are found and fetched. The library with pins of the test's own
//! against asset servers on loopback, and the command as a process.

use std::collections::HashMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use a2mcp::config::{AgentDir, Env};
use a2mcp::install::pins::Format;
use a2mcp::install::{Installed, Installer, Limits, Pin, Progress, Tool};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::support::assets::{Assets, Gate, Serve, proxy};
use crate::support::{audit_records, binary, eventually};

const FOLDER: &str = "releases/9.9.9";
/// What every failed download offers.
const WAYS_OUT: [&str; 4] =
    ["a2mcp install dufs --from FILE", "A2MCP_DOWNLOAD_BASE", "on the PATH", "`xfer.dufs`"];

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A program that says its version, and what it should not see.
fn program(version: &str) -> Vec<u8> {
    let text = format!("#!/bin/sh\necho \"dufs {version}$DUFS_SUFFIX$TUNNEL_SUFFIX\"\n");
    // Some size, which does not compress, so that a download takes more than one piece.
    let noise = (0..200_000_u32).map(|n| char::from(b'a' + (n.wrapping_mul(2_654_435_761) >> 24) as u8 % 26));
    format!("{text}exit 0\n{}", noise.collect::<String>()).into_bytes()
}

fn tgz(name: &str, content: &[u8]) -> Vec<u8> {
    let gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let mut builder = tar::Builder::new(gz);
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    builder.append_data(&mut header, name, content).unwrap();
    builder.into_inner().unwrap().finish().unwrap()
}

fn zipped(name: &str, content: &[u8]) -> Vec<u8> {
    let mut writer = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    writer.start_file(name, zip::write::SimpleFileOptions::default()).unwrap();
    writer.write_all(content).unwrap();
    writer.finish().unwrap().into_inner()
}

fn pin(asset: &'static str, bytes: &[u8], format: Format) -> Pin {
    Pin {
        tool: Tool::Dufs,
        os: std::env::consts::OS,
        arch: std::env::consts::ARCH,
        version: "9.9.9",
        folder: FOLDER,
        asset,
        sha256: sha256(bytes).leak(),
        bytes: bytes.len() as u64,
        format,
        program_sha256: None,
    }
}

/// A home with an agent directory, a server with one asset, and the pin that fits it.
struct Place {
    home: tempfile::TempDir,
    assets: Assets,
    pin: Pin,
    asset: Vec<u8>,
    program: Vec<u8>,
}

impl Place {
    fn new() -> Place {
        let program = program("9.9.9");
        let asset = tgz("dufs", &program);
        Place::with(pin("dufs.tar.gz", &asset, Format::TarGz), asset, program)
    }

    fn with(pin: Pin, asset: Vec<u8>, program: Vec<u8>) -> Place {
        let place =
            Place { home: tempfile::tempdir().unwrap(), assets: Assets::start(), pin, asset, program };
        place.serve(Serve::Bytes(place.asset.clone()));
        place
    }

    fn serve(&self, page: Serve) {
        self.assets.put(&format!("/{FOLDER}/{}", self.pin.asset), page);
    }

    fn requests(&self) -> usize {
        self.assets.asked().len()
    }

    fn at(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn bin(&self) -> PathBuf {
        self.at(".local/share/a2mcp/bin")
    }

    fn target(&self) -> PathBuf {
        self.bin().join("dufs")
    }

    fn env(&self) -> Env {
        Env {
            home: Some(self.home.path().into()),
            path: Some(self.at("path").into()),
            download_base: Some(self.assets.base().into()),
            cwd: self.home.path().into(),
            ..Env::default()
        }
    }

    fn installer(&self) -> Installer {
        self.installer_of("agent", &self.env())
    }

    fn installer_of(&self, agent: &str, env: &Env) -> Installer {
        Installer::new(&AgentDir::new(self.at(agent), env), env).with_pins(&[self.pin])
    }

    /// Quick to lose patience.
    fn limited(&self, limits: Limits) -> Installer {
        self.installer().with_limits(limits)
    }

    fn registry(&self, agent: &str) -> Value {
        let text = fs::read(self.at(agent).join("a2mcp.installs.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    fn put(&self, file: &Path, content: &[u8], mode: u32) {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, content).unwrap();
        fs::set_permissions(file, fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Nothing but these is in the directory of the programs.
    fn holds(&self, names: &[&str]) {
        let mut found: Vec<String> = fs::read_dir(self.bin())
            .map(|entries| entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect())
            .unwrap_or_default();
        found.retain(|name| name != ".a2mcp-dufs.lock");
        found.sort();
        assert_eq!(found, names);
    }

    /// The asset, fetched as it should be, is what there is then.
    fn still_works(&self) {
        self.serve(Serve::Bytes(self.asset.clone()));
        self.is_ours(&obtain(&self.installer(), "dufs").unwrap());
    }

    fn is_ours(&self, found: &Installed) {
        let expected = Installed {
            version: Some("9.9.9".into()),
            path: self.target(),
            sha256: sha256(&self.program),
            downloaded: true,
        };
        assert_eq!(*found, expected);
        assert_eq!(fs::read(self.target()).unwrap(), self.program);
        assert_eq!(fs::metadata(self.target()).unwrap().permissions().mode() & 0o777, 0o755);
        self.holds(&["dufs"]);
    }

    /// The command as a process, with these pins.
    fn command(&self, args: &[&str]) -> Command {
        let pins = json!([{
            "tool": "dufs", "version": self.pin.version, "folder": self.pin.folder, "asset": self.pin.asset,
            "sha256": self.pin.sha256, "bytes": self.pin.bytes,
            "format": if self.pin.format == Format::Bare { "bare" } else { "tar.gz" },
        }]);
        fs::write(self.at("pins.json"), pins.to_string()).unwrap();
        let mut command = Command::new(binary());
        command.args(args).arg("--agent-dir").arg(self.at("agent")).stdin(Stdio::null());
        for name in ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"] {
            command.env_remove(name);
        }
        command.env_remove("A2MCP_CONFIG").env_remove("A2MCP_AUDIT");
        command
            .env("HOME", self.home.path())
            .env("PATH", format!("{}:/usr/bin:/bin", self.at("path").display()));
        command.env("A2MCP_DOWNLOAD_BASE", self.assets.base()).env("A2MCP_TEST_PINS", self.at("pins.json"));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

fn run<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, work)
}

fn obtain(installer: &Installer, value: &str) -> Result<Installed, String> {
    run(async { installer.obtain(Tool::Dufs, value, async |_| {}).await.map_err(|error| error.to_string()) })
}

fn install(installer: &Installer, from: Option<&Path>) -> Result<Installed, String> {
    run(async { installer.install(Tool::Dufs, from, async |_| {}).await.map_err(|error| error.to_string()) })
}

fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part}: {text}");
    }
}

fn said(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_path_is_used_as_it_is_and_nothing_is_downloaded_for_it() {
    let place = Place::new();
    let installer = place.installer();
    let own = place.at("own/dufs");
    place.put(&own, b"#!/bin/sh\necho dufs v1.2.3\n", 0o755);
    for value in [own.to_str().unwrap(), "own/dufs", "./own/dufs", "~/own/dufs"] {
        let found = obtain(&installer, value).unwrap();
        assert_eq!((found.path, found.version.as_deref()), (own.clone(), Some("1.2.3")), "{value}");
        assert!(!found.downloaded && found.sha256.len() == 64);
    }
    for (value, why) in [("~/none", "no such file"), ("/", "not a file"), ("a\\dufs", "no such file")] {
        has(&obtain(&installer, value).unwrap_err(), &[why, "xfer.dufs"]);
    }
    place.put(&own, b"#!/no/such/interpreter\n", 0o755);
    has(&obtain(&installer, "~/own/dufs").unwrap_err(), &["cannot be run", "`xfer.dufs`"]);
    place.put(&own, b"", 0o644);
    // Root may do anything but run a file that nobody may run.
    has(&obtain(&installer, "~/own/dufs").unwrap_err(), &["it may not be run"]);
    assert_eq!(place.requests(), 0);
    place.holds(&[]);
}

#[test]
fn path_comes_before_an_earlier_installation_and_that_before_a_download() {
    let place = Place::new();
    let installer = place.installer();
    place.is_ours(&obtain(&installer, "dufs").unwrap());
    place.is_ours(&obtain(&installer, "dufs").unwrap());
    assert_eq!(place.assets.asked(), ["/releases/9.9.9/dufs.tar.gz"]);
    place.put(&place.at("path/dufs"), b"#!/bin/sh\necho dufs 0.47.0\n", 0o755);
    let found = obtain(&installer, "dufs").unwrap();
    assert_eq!((found.path, found.downloaded), (place.at("path/dufs"), false));
    // Another name is looked up under that name.
    place.is_ours(&obtain(&installer, "my-dufs").unwrap());
    assert_eq!(place.requests(), 1);
}

#[test]
fn every_format_is_installed_and_noted_down() {
    let program = program("9.9.9");
    for (name, format, asset) in [
        ("dufs.tar.gz", Format::TarGz, tgz("dufs", &program)),
        ("dufs.tgz", Format::TarGz, tgz("./dufs", &program)),
        ("dufs.zip", Format::Zip, zipped("dufs", &program)),
        ("dufs-bare", Format::Bare, program.clone()),
    ] {
        let place = Place::with(pin(name, &asset, format), asset, program.clone());
        let mut seen = Vec::new();
        let installer = place.installer();
        let found = run(installer.obtain(Tool::Dufs, "dufs", async |progress| seen.push(progress)));
        place.is_ours(&found.unwrap());
        let first = Progress::Installing {
            asset: name,
            sha256: place.pin.sha256,
            version: "9.9.9",
            from: format!("{}/{FOLDER}/{name}", place.assets.base()),
        };
        assert_eq!((seen.first(), seen.last()), (Some(&first), Some(&Progress::Unpacking)));
        assert!(
            matches!(seen[1], Progress::Received { bytes, total } if bytes > 0 && total == place.pin.bytes)
        );
        let noted = json!({"installed": {"dufs": {
            "version": "9.9.9", "asset": name, "assetSha256": place.pin.sha256,
            "path": place.target(), "sha256": sha256(&program),
        }}});
        assert_eq!(place.registry("agent"), noted);
        assert_eq!(place.registry(".local/share/a2mcp/../../../agent"), noted);
    }
}

#[test]
fn the_record_can_be_written_before_a_byte_is_asked_for() {
    let place = Place::new();
    let installer = place.installer();
    let mut asked = None;
    let found = run(installer.obtain(Tool::Dufs, "dufs", async |progress| {
        if let Some(args) = progress.audit_args() {
            tokio::time::sleep(Duration::from_millis(50)).await;
            asked = Some((place.requests(), args));
        }
    }));
    found.unwrap();
    let (requests, args) = asked.unwrap();
    assert_eq!(requests, 0);
    assert_eq!((&args["action"], &args["sha256"]), (&json!("install"), &json!(place.pin.sha256)));
}

/// Two obtain at once: the second asks while the first installs, and then lets its download go on.
fn together(place: &Place, bytes: Vec<u8>) -> [Result<Installed, String>; 2] {
    let gate = Arc::new(Gate::default());
    place.serve(Serve::Behind(gate.clone(), bytes));
    let (installer, started) = (place.installer(), tokio::sync::Notify::new());
    let first = installer.obtain(Tool::Dufs, "dufs", async |progress| {
        if progress.audit_args().is_some() {
            started.notify_one();
        }
    });
    let second = async {
        started.notified().await;
        let waits = async |progress: Progress| {
            assert_eq!(progress, Progress::Waiting);
            gate.open();
        };
        installer.obtain(Tool::Dufs, "dufs", waits).await
    };
    let (first, second) = run(async { tokio::join!(first, second) });
    [first, second].map(|done| done.map_err(|error| error.to_string()))
}

#[test]
fn those_who_ask_together_get_one_download() {
    let place = Place::new();
    for found in together(&place, place.asset.clone()) {
        place.is_ours(&found.unwrap());
    }
    assert_eq!(place.requests(), 1);

    // A failure is shared as well; who asks afterwards causes another try.
    let place = Place::new();
    let [first, second] = together(&place, vec![0; 10]);
    assert_eq!(first.unwrap_err(), second.unwrap_err());
    assert_eq!(place.requests(), 1);
    place.still_works();
}

#[test]
fn the_one_thread_goes_on_with_other_work() {
    let mut program = program("9.9.9");
    program.resize(48 << 20, b'\n');
    let asset = tgz("dufs", &program);
    let place = Place::with(pin("dufs.tar.gz", &asset, Format::TarGz), asset, program);
    let installer = place.installer();
    let began = Instant::now();
    let longest = run(async {
        let mut longest = Duration::ZERO;
        let watch = async {
            loop {
                let asked = Instant::now();
                tokio::time::sleep(Duration::from_millis(2)).await;
                longest = longest.max(asked.elapsed());
            }
        };
        tokio::select! {
            found = installer.obtain(Tool::Dufs, "dufs", async |_| {}) => place.is_ours(&found.unwrap()),
            () = watch => {}
        }
        longest
    });
    // Unpacking and hashing take most of the time; on the one thread they would be one gap.
    let whole = began.elapsed();
    assert!(longest < whole / 2, "{longest:?} of {whole:?}");
}

#[test]
fn who_gives_up_waiting_leaves_nothing_behind() {
    let place = Place::new();
    let gate = Arc::new(Gate::default());
    place.serve(Serve::Behind(gate.clone(), place.asset.clone()));
    let installer = place.installer();
    run(async {
        let obtaining = installer.obtain(Tool::Dufs, "dufs", async |_| {});
        assert!(tokio::time::timeout(Duration::from_millis(200), obtaining).await.is_err());
    });
    gate.open();
    place.still_works();
}

#[test]
fn other_bytes_than_the_pinned_ones_are_never_unpacked() {
    let place = Place::new();
    let other = tgz("dufs", b"#!/bin/sh\necho evil\n");
    for bytes in [other, b"<html>captive portal</html>".to_vec(), Vec::new()] {
        place.serve(Serve::Bytes(bytes.clone()));
        let error = obtain(&place.installer(), "dufs").unwrap_err();
        let size = format!("({} bytes)", bytes.len());
        has(
            &error,
            &[place.pin.sha256, &sha256(&bytes), &size, "nothing was unpacked", &place.assets.base()],
        );
        has(&error, &WAYS_OUT);
        place.holds(&[]);
    }
    assert!(!place.at("agent/a2mcp.installs.json").exists());
    place.still_works();
}

#[test]
fn the_program_inside_is_checked_as_well_where_its_hash_is_known() {
    let mut place = Place::new();
    // The trap: the release notes' hash, which is the program's, taken for the archive's.
    let right = place.pin;
    place.pin = Pin { sha256: sha256(&place.program).leak(), ..right };
    has(&obtain(&place.installer(), "dufs").unwrap_err(), &["sha256", right.sha256]);
    place.pin = Pin { program_sha256: Some(right.sha256), ..right };
    let error = obtain(&place.installer(), "dufs").unwrap_err();
    has(&error, &["the program inside has sha256", &sha256(&place.program), "nothing was installed"]);
    place.holds(&[]);
    place.pin = Pin { program_sha256: Some(sha256(&place.program).leak()), ..right };
    place.still_works();
}

#[test]
fn a_pinned_archive_that_holds_something_else_is_refused() {
    for (asset, part) in [
        (tgz("other", b"x"), "there is no dufs at its top"),
        (b"no archive".to_vec(), "cannot be read"),
        (tgz("dufs", b"x")[..20].to_vec(), "cut off"),
    ] {
        let place = Place::with(pin("dufs.tar.gz", &asset, Format::TarGz), asset, Vec::new());
        let error = obtain(&place.installer(), "dufs").unwrap_err();
        has(&error, &["dufs.tar.gz is not what it should be", part, "`xfer.dufs`"]);
        place.holds(&[]);
    }
}

#[test]
fn a_server_that_fails_is_told_apart() {
    let place = Place::new();
    let (asset, half) = (place.asset.clone(), place.asset.len() / 2);
    let limits = Limits {
        bytes: 1 << 20,
        silence: Duration::from_millis(300),
        total: Duration::from_secs(60),
        ..Limits::default()
    };
    let own = format!("/{FOLDER}/dufs.tar.gz");
    place.assets.put("/a", Serve::Redirect("/b".into())).put("/b", Serve::Redirect("/a".into()));
    for (page, part) in [
        (Serve::Status("404 Not Found"), "the server answered 404 Not Found"),
        (Serve::Status("503 Service Unavailable"), "503"),
        (Serve::Status("204 No Content"), "204"),
        (Serve::Redirect(own), "redirected more than 5 times"),
        (Serve::Redirect("/a".into()), "redirected more than 5 times"),
        (Serve::Redirect("ftp://127.0.0.1/x".into()), "does not begin with http:// or https://"),
        (Serve::Redirect("http://user:secret@127.0.0.1/".into()), "it holds a user name"),
        (Serve::Silence, "no byte arrived for 0.3 s"),
        (Serve::Stall(asset.clone(), 0), "no byte arrived for 0.3 s"),
        (Serve::Stall(asset.clone(), half), "no byte arrived for 0.3 s"),
        (Serve::Drip(Duration::from_millis(20)), "it was not done after 1.2 s"),
        (Serve::Part(asset.clone(), half), "the connection broke after"),
        (Serve::Bytes(vec![0; (1 << 20) + 1]), "larger than 1048576 bytes"),
        (Serve::Endless, "larger than 1048576 bytes"),
        (Serve::Garbage, "no connection to 127.0.0.1"),
    ] {
        let is_drip = matches!(page, Serve::Drip(_));
        let total = if is_drip { Duration::from_millis(1200) } else { limits.total };
        place.serve(page);
        let began = Instant::now();
        let error = obtain(&place.limited(Limits { total, ..limits }), "dufs").unwrap_err();
        has(&error, &["cannot download dufs.tar.gz from http://127.0.0.1:", part]);
        has(&error, &WAYS_OUT);
        assert!(!error.contains("secret"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(10), "{part}");
        place.holds(&[]);
    }
    // Nobody there at all.
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let env = Env { download_base: Some(format!("http://{gone}").into()), ..place.env() };
    let error = obtain(&place.installer_of("agent", &env), "dufs").unwrap_err();
    has(&error, &[&format!("no connection to {gone}"), "refused"]);
    let env = Env { download_base: Some("http://no-such-host.invalid".into()), ..place.env() };
    has(
        &obtain(&place.installer_of("agent", &env), "dufs").unwrap_err(),
        &["no connection to no-such-host.invalid"],
    );
    place.still_works();
}

#[test]
fn redirects_are_followed_and_signed_addresses_stay_unsaid() {
    let place = Place::new();
    place.serve(Serve::Redirect("//127.0.0.1:PORT/one".replace("PORT", &place.assets.port.to_string())));
    place.assets.put("/one", Serve::Redirect("two?sig=secret".into()));
    place.assets.put("/two", Serve::Status("403 Forbidden"));
    let error = obtain(&place.installer(), "dufs").unwrap_err();
    assert!(error.contains("403") && !error.contains("secret"), "{error}");
    place.assets.put("/two", Serve::Bytes(place.asset.clone()));
    place.is_ours(&obtain(&place.installer(), "dufs").unwrap());
    assert_eq!(place.assets.asked().last().unwrap(), "/two?sig=secret");
}

#[test]
fn what_somebody_else_put_there_is_never_replaced() {
    let place = Place::new();
    let foreign = b"#!/bin/sh\necho mine\n";
    place.put(&place.target(), foreign, 0o755);
    for _ in 0..3 {
        let error = obtain(&place.installer(), "dufs").unwrap_err();
        let path = place.target();
        has(&error, &["was not installed by a2mcp", &sha256(foreign), path.to_str().unwrap(), "`xfer.dufs`"]);
    }
    has(&install(&place.installer(), None).unwrap_err(), &["was not installed by a2mcp"]);
    assert_eq!(fs::read(place.target()).unwrap(), foreign);
    // Neither is a link, even to something of ours.
    fs::remove_file(place.target()).unwrap();
    place.put(&place.at("real"), foreign, 0o755);
    symlink(place.at("real"), place.target()).unwrap();
    has(&obtain(&place.installer(), "dufs").unwrap_err(), &["was not installed by a2mcp"]);
    assert_eq!(fs::read(place.at("real")).unwrap(), foreign);
    // It cannot succeed, so nothing was asked for.
    assert_eq!(place.requests(), 0);
    fs::remove_file(place.target()).unwrap();
    place.still_works();
}

#[test]
fn what_vanished_is_reported_and_not_fetched_over_and_over() {
    let place = Place::new();
    place.is_ours(&obtain(&place.installer(), "dufs").unwrap());
    let (path, hash) = (place.target(), sha256(&place.program));
    fs::remove_file(&path).unwrap();
    for _ in 0..3 {
        let error = obtain(&place.installer(), "dufs").unwrap_err();
        has(
            &error,
            &["binary vanished", path.to_str().unwrap(), &hash, "not there any more", "`a2mcp install dufs`"],
        );
    }
    assert_eq!(place.requests(), 1);
    // Asked for by name it is fetched once more.
    place.is_ours(&install(&place.installer(), None).unwrap());
    place.is_ours(&obtain(&place.installer(), "dufs").unwrap());
    assert_eq!(place.requests(), 2);
    // Tampered with: reported, not run, not replaced.
    fs::write(&path, b"#!/bin/sh\necho dufs 9.9.9\n").unwrap();
    let tampered = sha256(b"#!/bin/sh\necho dufs 9.9.9\n");
    has(&obtain(&place.installer(), "dufs").unwrap_err(), &["binary vanished", &hash, &tampered]);
    has(&install(&place.installer(), None).unwrap_err(), &["was not installed by a2mcp", &tampered]);
    assert_eq!(place.requests(), 2);
    fs::remove_file(&path).unwrap();
    place.is_ours(&install(&place.installer(), None).unwrap());
}

#[test]
fn agent_directories_share_what_is_installed() {
    let mut place = Place::new();
    place.is_ours(&obtain(&place.installer(), "dufs").unwrap());
    let other = place.installer_of("other", &place.env());
    place.is_ours(&obtain(&other, "dufs").unwrap());
    assert_eq!(place.requests(), 1);
    // A lost list is an empty one, and garbage as well.
    fs::write(place.at("agent/a2mcp.installs.json"), "{").unwrap();
    place.is_ours(&obtain(&place.installer(), "dufs").unwrap());
    // A newer pin: what is there is still used, until it is asked for by name; then everybody has it.
    let program = program("10.0.0");
    let asset = tgz("dufs", &program);
    place.pin = Pin { version: "10.0.0", ..pin("dufs-10.tar.gz", &asset, Format::TarGz) };
    place.serve(Serve::Bytes(asset));
    place.is_ours(&obtain(&place.installer(), "dufs").unwrap());
    assert_eq!(place.requests(), 1);
    assert_eq!(install(&place.installer(), None).unwrap().version.as_deref(), Some("10.0.0"));
    let other = place.installer_of("other", &place.env());
    assert_eq!(obtain(&other, "dufs").unwrap().version.as_deref(), Some("10.0.0"));
    assert_eq!(place.requests(), 2);
    assert_eq!(place.registry("agent")["installed"]["dufs"]["version"], "10.0.0");
}

#[test]
fn a_file_fetched_by_other_means_is_as_good() {
    let mut place = Place::new();
    place.pin.program_sha256 = Some(sha256(&place.program).leak());
    let installer = place.installer();
    for (name, content) in [("archive", place.asset.clone()), ("program", place.program.clone())] {
        place.put(&place.at(name), &content, 0o600);
        place.is_ours(&install(&installer, Some(Path::new(name))).unwrap());
        fs::remove_file(place.target()).unwrap();
    }
    place.put(&place.at("other"), b"other", 0o600);
    let error = install(&installer, Some(&place.at("other"))).unwrap_err();
    has(&error, &["/other (5 bytes) is not dufs.tar.gz", &sha256(b"other"), place.pin.sha256, "`xfer.dufs`"]);
    rustix::fs::mkfifoat(rustix::fs::CWD, place.at("pipe"), 0o600.into()).unwrap();
    for (name, why) in [("none", "No such file"), ("agent", "not a file"), ("pipe", "not a file")] {
        has(&install(&installer, Some(&place.at(name))).unwrap_err(), &["cannot read", why, "`xfer.dufs`"]);
    }
    place.holds(&[]);
    assert_eq!(place.requests(), 0);
    place.is_ours(&install(&installer, None).unwrap());
}

#[test]
fn what_cannot_be_is_said_before_anything_is_tried() {
    let place = Place::new();
    let offered = place.installer().with_pins(&[Pin { arch: "vax", ..place.pin }]);
    has(
        &obtain(&offered, "dufs").unwrap_err(),
        &["not offered", std::env::consts::ARCH, "on the PATH", "`xfer.dufs`"],
    );
    let homeless = place.installer_of("agent", &Env { home: None, ..place.env() });
    has(&obtain(&homeless, "dufs").unwrap_err(), &["HOME is not set", "`xfer.dufs`"]);
    for (base, why) in [
        ("ftp://mirror/", "does not begin with http"),
        ("mirror", "does not begin with http"),
        ("https://user:secret@mirror/", "it holds a user name"),
        ("https://mirror/?key=secret", "it has a query"),
    ] {
        let env = Env { download_base: Some(base.into()), ..place.env() };
        let error = obtain(&place.installer_of("agent", &env), "dufs").unwrap_err();
        has(&error, &["A2MCP_DOWNLOAD_BASE", why, "https://github.com"]);
        assert!(!error.contains("secret"), "{error}");
    }
    assert_eq!(place.requests(), 0);
    place.holds(&[]);
    // A mirror may sit below a path.
    let env = Env { download_base: Some(format!("{}/github/", place.assets.base()).into()), ..place.env() };
    place.assets.put(&format!("/github/{FOLDER}/dufs.tar.gz"), Serve::Bytes(place.asset.clone()));
    place.is_ours(&obtain(&place.installer_of("agent", &env), "dufs").unwrap());
}

#[test]
fn a_directory_that_cannot_be_written_is_named() {
    let place = Place::new();
    place.put(&place.at(".local/share/a2mcp"), b"a file", 0o600);
    let error = obtain(&place.installer(), "dufs").unwrap_err();
    has(&error, &["cannot create", ".local/share/a2mcp/bin", "`xfer.dufs`"]);
    assert_eq!(place.requests(), 0);
    fs::remove_file(place.at(".local/share/a2mcp")).unwrap();
    // A list that cannot be written: the program is not left there as if it were somebody else's.
    place.put(&place.at("agent"), b"a file", 0o600);
    has(&obtain(&place.installer(), "dufs").unwrap_err(), &["cannot write", "agent/a2mcp.installs.json"]);
    place.holds(&[]);
    fs::remove_file(place.at("agent")).unwrap();
    place.still_works();
}

/// In a mount namespace of its own, with a file system of these options where programs go.
fn on_a_mount(place: &Place, options: &str, args: &[&str]) -> Option<Output> {
    fs::create_dir_all(place.bin()).unwrap();
    let plain = place.command(args);
    let mut command = Command::new("unshare");
    let script = "mount -t tmpfs -o \"$1\" none \"$2\" || exit 99; shift 2; exec \"$@\"";
    command
        .args(["--map-root-user", "--user", "--mount", "sh", "-c", script, "sh", options])
        .arg(place.bin());
    command.arg(plain.get_program()).args(plain.get_args()).stdin(Stdio::null());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let output = command.output().ok()?;
    let may_mount = !matches!(output.status.code(), Some(1) if !said(&output).2.contains("a2mcp:"))
        && output.status.code() != Some(99);
    if !may_mount {
        eprintln!("no mounts of one's own here: {}", said(&output).2);
    }
    may_mount.then_some(output)
}

#[test]
fn a_full_disk_and_a_read_only_one_are_told_apart() {
    let place = Place::new();
    let Some(full) = on_a_mount(&place, "size=64k", &["install", "dufs"]) else { return };
    let (code, _, error) = said(&full);
    assert_eq!(code, 1);
    has(
        &error,
        &["cannot write to", ".local/share/a2mcp/bin", "the disk is full", "make room", "`xfer.dufs`"],
    );
    let read_only = on_a_mount(&place, "ro", &["install", "dufs"]).unwrap();
    has(&said(&read_only).2, &[".local/share/a2mcp/bin", "cannot be written to", "Read-only", "`xfer.dufs`"]);
    assert!(!place.at("agent/a2mcp.installs.json").exists());
    place.still_works();
}

#[test]
fn the_command_installs_says_so_and_leaves_a_record() {
    let place = Place::new();
    let output = place.command(&["install", "dufs"]).env("DUFS_SUFFIX", "-leaked").output().unwrap();
    let (code, out, err) = said(&output);
    assert_eq!(code, 0, "{err}");
    let path = place.target();
    let expected = format!("Installed dufs 9.9.9: {}\nsha256 {}\n", path.display(), sha256(&place.program));
    assert_eq!(out, expected);
    has(&err, &["installing dufs.tar.gz (sha256 ", place.pin.sha256, &place.assets.base()]);
    let records = audit_records(&place.at("agent/a2mcp.log"));
    assert_eq!(records.len(), 1);
    assert_eq!(
        (&records[0]["tool"], &records[0]["phase"], &records[0]["isError"]),
        (&json!("xfer"), &json!("done"), &json!(false))
    );
    has(records[0]["args"].as_str().unwrap(), &["\"install\"", "dufs.tar.gz", place.pin.sha256]);

    let again = place.command(&["install", "dufs", "--json"]).output().unwrap();
    let report: Value = serde_json::from_str(&said(&again).1).unwrap();
    assert_eq!(
        (&report["installed"], &report["version"], &report["path"]),
        (&json!(false), &json!("9.9.9"), &json!(path))
    );
    assert_eq!(place.requests(), 1);
    assert_eq!(audit_records(&place.at("agent/a2mcp.log")).len(), 1);

    // Another one is used first: that must not stay unsaid.
    place.put(&place.at("path/dufs"), b"#!/bin/sh\necho dufs 1\n", 0o755);
    let (_, out, err) = said(&place.command(&["install", "dufs"]).output().unwrap());
    has(&out, &["Installed already: dufs 9.9.9"]);
    has(&err, &["not this one is used", "path/dufs"]);
    let (_, out, _) = said(&place.command(&["doctor"]).output().unwrap());
    has(&out, &["dufs 1: ", "cloudflared is not offered"]);
    fs::remove_file(place.at("path/dufs")).unwrap();
    fs::remove_file(&path).unwrap();
    let (_, out, _) = said(&place.command(&["doctor"]).output().unwrap());
    has(&out, &["WRONG binary vanished", "a2mcp install dufs"]);
}

#[test]
fn a_failed_command_leaves_its_reason_in_the_record() {
    let place = Place::new();
    place.serve(Serve::Status("404 Not Found"));
    let (code, out, err) = said(&place.command(&["install", "dufs"]).output().unwrap());
    assert_eq!((code, out.as_str()), (1, ""));
    has(&err, &["404 Not Found"]);
    has(&err, &WAYS_OUT);
    let records = audit_records(&place.at("agent/a2mcp.log"));
    assert_eq!(records.len(), 2);
    assert_eq!(records[1]["isError"], json!(true));
    has(records[1]["args"].as_str().unwrap(), &["\"install\"", place.pin.sha256, "\"error\""]);
    // As the message says.
    fs::write(place.at("fetched"), &place.asset).unwrap();
    let fetched = place.at("fetched");
    let args = ["install", "dufs", "--from", fetched.to_str().unwrap()];
    let (code, _, err) = said(&place.command(&args).output().unwrap());
    assert_eq!(code, 0, "{err}");
    place.is_ours(&obtain(&place.installer(), "dufs").unwrap());
}

#[test]
fn processes_that_install_together_make_one_download() {
    let place = Place::new();
    let gate = Arc::new(Gate::default());
    place.serve(Serve::Behind(gate.clone(), place.asset.clone()));
    let first = place.command(&["install", "dufs", "--json"]).spawn().unwrap();
    eventually("the first asks for the asset", || (place.requests() == 1).then_some(()));
    let mut second = place.command(&["install", "dufs", "--json"]).spawn().unwrap();
    let mut notes = std::io::BufReader::new(second.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut notes, &mut line).unwrap();
    has(&line, &["waiting for it"]);
    gate.open();
    let results = [first, second].map(|child| {
        let (code, out, err) = said(&child.wait_with_output().unwrap());
        assert_eq!(code, 0, "{err}");
        serde_json::from_str::<Value>(&out).unwrap()["installed"].clone()
    });
    assert_eq!(results, [json!(true), json!(false)]);
    assert_eq!(place.requests(), 1);
    place.is_ours(&obtain(&place.installer(), "dufs").unwrap());
}

#[test]
fn a_killed_installation_blocks_nobody_and_its_leavings_are_swept() {
    let place = Place::new();
    place.serve(Serve::Stall(place.asset.clone(), 1000));
    let mut first = place.command(&["install", "dufs"]).spawn().unwrap();
    eventually("a temporary file", || {
        let mut names = fs::read_dir(place.bin()).ok()?.flatten().map(|entry| entry.file_name());
        names.any(|name| name.to_str().unwrap().ends_with(".part")).then_some(())
    });
    first.kill().unwrap();
    first.wait().unwrap();
    place.still_works();
}

#[test]
fn a_program_that_does_not_say_its_version_is_left_alone() {
    let place = Place::new();
    let own = place.at("own/dufs");
    let pid = place.at("pid");
    let script = format!("#!/bin/sh\nsleep 300 & echo $! > {}\nwait\n", pid.display());
    place.put(&own, script.as_bytes(), 0o755);
    assert_eq!(obtain(&place.installer(), "~/own/dufs").unwrap().version, None);
    let grandchild = fs::read_to_string(pid).unwrap().trim().to_owned();
    eventually("what it started is gone", || {
        let stat = fs::read_to_string(format!("/proc/{grandchild}/stat")).unwrap_or_default();
        (stat.is_empty() || stat.contains(") Z")).then_some(())
    });
}

#[test]
fn tls_is_spoken_to_those_who_prove_who_they_are() {
    let mut place = Place::new();
    let (assets, certificate) = Assets::start_tls();
    let base = format!("https://127.0.0.1:{}", assets.port);
    place.assets = assets;
    place.serve(Serve::Bytes(place.asset.clone()));
    let roots = place.at("roots.pem");
    let install = |roots: &Path, more: &HashMap<&str, String>| {
        let mut command = place.command(&["install", "dufs"]);
        command.env("A2MCP_DOWNLOAD_BASE", &base).envs(more);
        command.env("SSL_CERT_FILE", roots).env("SSL_CERT_DIR", place.at("none"));
        said(&command.output().unwrap())
    };
    fs::write(&roots, "").unwrap();
    has(&install(&roots, &HashMap::new()).2, &["no secure connection to 127.0.0.1", "ca-certificates"]);
    let (_, stranger) = Assets::start_tls();
    fs::write(&roots, stranger).unwrap();
    let error = install(&roots, &HashMap::new()).2;
    has(&error, &["no secure connection to 127.0.0.1", "certificate"]);
    has(&error, &WAYS_OUT);
    assert_eq!(place.requests(), 0);

    fs::write(&roots, &certificate).unwrap();
    place.serve(Serve::Redirect("http://127.0.0.1:1/x".into()));
    has(&install(&roots, &HashMap::new()).2, &["from https to plain http"]);
    place.serve(Serve::Bytes(place.asset.clone()));

    // Through a proxy; its password is for the proxy alone.
    let (port, heads) = proxy("407 Proxy Authentication Required");
    let through =
        |port: u16| HashMap::from([("HTTPS_PROXY", format!("http://me:pass%3Aword@127.0.0.1:{port}"))]);
    let error = install(&roots, &through(port)).2;
    has(&error, &["does not let us through", "407", "HTTPS_PROXY"]);
    assert!(!error.contains("word"), "{error}");
    // "me:pass:word"
    has(
        &heads.lock().unwrap()[0],
        &["CONNECT 127.0.0.1:", "Proxy-Authorization: Basic bWU6cGFzczp3b3Jk\r\n"],
    );
    let socks = HashMap::from([("ALL_PROXY", "socks5://127.0.0.1:1".to_owned())]);
    has(&install(&roots, &socks).2, &["only a proxy that begins with http:// is supported"]);
    let (port, heads) = proxy("200 OK");
    let (code, _, error) = install(&roots, &through(port));
    assert_eq!(code, 0, "{error}");
    assert_eq!(heads.lock().unwrap().len(), 1);
    place.is_ours(&obtain(&place.installer(), "dufs").unwrap());
}

#[test]
fn without_a_mirror_github_is_asked() {
    let place = Place::new();
    let (port, heads) = proxy("403 Forbidden");
    let mut command = place.command(&["install", "dufs"]);
    command.env_remove("A2MCP_DOWNLOAD_BASE").env_remove("A2MCP_TEST_PINS");
    command.env("https_proxy", format!("http://127.0.0.1:{port}"));
    let (code, _, error) = said(&command.output().unwrap());
    assert_eq!(code, 1);
    has(&error, &["https://github.com/sigoden/dufs/releases/download/v0.46.0/dufs-v0.46.0-", "403"]);
    has(&heads.lock().unwrap()[0], &["CONNECT github.com:443 HTTP/1.1\r\n"]);
}
