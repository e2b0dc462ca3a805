//! Contract 6, reading on the real dufs: archives that are whole or fail so that it shows, refusals in
//! words, and pages that promise callers nothing they may not do.

use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use serde_json::{Value, json};

use crate::share::{Shared, VERSIONS, dufs, ok};
use crate::support::Setup;
use crate::support::http::Connection;

/// Takes from root what makes every file readable to it; nobody else has it.
const BOUND: &str = "setpriv --bounding-set=-dac_override,-dac_read_search --";

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A sidecar that cannot read every file.
fn bound() -> Setup {
    let setup = Setup::default();
    if is_root() { setup.before(&format!("exec {BOUND} \"$0\" \"$@\"")) } else { setup }
}

fn allow(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn error(text: &str) -> String {
    serde_json::from_str::<Value>(text).unwrap()["error"].as_str().unwrap().to_owned()
}

/// The names in an archive; fails when it is none.
pub(crate) fn names(shared: &Shared, zip: &[u8]) -> Vec<String> {
    let file = shared.outside().join("read.zip");
    std::fs::write(&file, zip).unwrap();
    let script = "import sys,zipfile,json; z=zipfile.ZipFile(sys.argv[1]); assert z.testzip() is None; \
                  print(json.dumps(sorted(n for n in z.namelist() if not n.endswith('/'))))";
    let output = std::process::Command::new("python3").args(["-c", script]).arg(&file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Asks for the archive of `/a` and reads no more than its head.
pub(crate) fn begin(shared: &Shared) -> Connection {
    let mut connection = Connection::open(shared.host.port);
    let bearer = format!("Bearer {}", shared.host.token);
    connection.send("GET", "/xfer/a?zip", &[("Authorization", &bearer)], b"").unwrap();
    let head = connection.read_head().unwrap();
    assert_eq!((head.status, head.header("transfer-encoding")), (200, Some("chunked")));
    connection
}

/// The rest of a chunked reply, and whether it ended in order.
pub(crate) fn rest(connection: &mut Connection) -> (Vec<u8>, bool) {
    let mut all = Vec::new();
    loop {
        match connection.read_chunk() {
            Ok(Some(chunk)) => all.extend(chunk),
            Ok(None) => return (all, true),
            Err(_) => return (all, false),
        }
    }
}

/// Bytes that do not get smaller.
pub(crate) fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(length.div_ceil(8)).flatten().take(length).collect()
}

#[test]
fn no_page_promises_callers_what_is_refused() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        shared.write("a/one.txt", "text");
        for path in ["/", "/a", "/a?json=1", "/a?sort=name&order=desc", "/a/one.txt?edit", "/a/one.txt?view"]
        {
            let page = shared.get(path).text();
            let at = page.find("id=\"index-data\">").expect("a page of dufs") + "id=\"index-data\">".len();
            let data = page[at..].split('<').next().unwrap();
            let data = base64::engine::general_purpose::STANDARD.decode(data).unwrap();
            let data: Value = serde_json::from_slice(&data).unwrap();
            let rights = (&data["allow_upload"], &data["allow_delete"]);
            assert_eq!(rights, (&json!(true), &json!(false)), "{path}: {data}");
        }
        for path in ["/?json", "/a?json&sort=name", "/a?json=1&json"] {
            let data = shared.get(path).json();
            let rights = (&data["allow_upload"], &data["allow_archive"], &data["allow_delete"]);
            assert_eq!(rights, (&json!(true), &json!(true), &json!(false)), "{path}");
        }
        // What they do promise.
        assert_eq!(shared.put("/a/one.txt", "saved"), 201);
        assert_eq!(shared.get("/a/one.txt").text(), "saved");
    }
}

#[test]
fn an_archive_that_would_lack_something_is_refused_in_words() {
    for version in VERSIONS {
        let shared = Shared::with(version, bound());
        shared.write("a/one", "1");
        shared.write("a/b/two", "2");
        shared.write("c/three", "3");
        let refused = |missing: &str| {
            let reply = shared.get("/a?zip");
            let said = error(&reply.text());
            assert!(said.contains(missing) && said.contains("cannot be read"), "{missing}: {said}");
            assert_eq!(shared.ask("HEAD", "/a?zip", &[], b"").status, 200);
            reply.status
        };
        let whole = || {
            let reply = shared.get("/a?zip");
            assert_eq!(reply.status, 200, "{}", reply.text());
            names(&shared, &reply.body)
        };
        let (file, folder, other) =
            (shared.root().join("a/b/two"), shared.root().join("a/b"), shared.root().join("c"));
        allow(&file, 0);
        assert_eq!(refused("'a/b/two'"), 403);
        allow(&file, 0o644);
        allow(&folder, 0);
        assert_eq!(refused("'a/b'"), 403);
        // It may be listed, but not what is in it.
        allow(&folder, 0o600);
        assert_eq!(refused("'a/b/two'"), 403);
        allow(&folder, 0o755);
        assert_eq!(whole(), ["b/two", "one"]);
        symlink("../c", shared.root().join("a/link")).unwrap();
        assert_eq!(whole(), ["b/two", "link/three", "one"]);
        allow(&other, 0);
        assert_eq!(refused("'a/link'"), 403);
        allow(&other, 0o755);
        let odd = shared.root().join("a").join(std::ffi::OsStr::from_bytes(b"odd\xff"));
        std::fs::write(&odd, "x").unwrap();
        assert_eq!(refused("odd"), 500);
        std::fs::remove_file(&odd).unwrap();
        // What is no file of the folder hinders nothing.
        symlink(shared.outside(), shared.root().join("a/out")).unwrap();
        symlink("nothing", shared.root().join("a/dangling")).unwrap();
        let _socket = UnixListener::bind(shared.root().join("a/socket")).unwrap();
        assert_eq!(whole(), ["b/two", "link/three", "one"]);
    }
}

/// dufs leaves out what lies too deep for the file system's calls.
#[test]
fn a_path_that_is_too_long_is_missed_in_no_archive() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        shared.write("a/one", "1");
        let name = "n".repeat(250);
        let script = "import os,sys\nos.chdir(sys.argv[1])\nfor _ in range(20):\n os.mkdir(sys.argv[2]); os.chdir(sys.argv[2])\nopen('f','w').close()";
        let mut python = std::process::Command::new("python3");
        let made = python.args(["-c", script]).arg(shared.root().join("a")).arg(&name).status().unwrap();
        assert!(made.success());
        let reply = shared.get("/a?zip");
        let said = error(&reply.text());
        assert!(reply.status == 500 && said.contains("File name too long"), "{said}");
        assert!(said.len() < 1000);
    }
}

#[test]
fn an_empty_folder_is_an_archive_too() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        std::fs::create_dir_all(shared.root().join("a/b")).unwrap();
        for path in ["/a/b?zip", "/a?zip", "/?zip"] {
            let reply = shared.get(path);
            assert_eq!(reply.status, 200, "{path}");
            assert_eq!(names(&shared, &reply.body), [""; 0], "{path}");
        }
        // A file is a file, whatever is asked of it.
        shared.write("f.zip", "no archive");
        assert_eq!(shared.get("/f.zip?zip").text(), "no archive");
    }
}

/// Several steps of our own look at the folder.
#[test]
fn an_archive_of_many_files_is_whole() {
    const FILES: usize = 9000;
    for version in VERSIONS {
        let shared = Shared::start(version);
        std::fs::create_dir(shared.root().join("a")).unwrap();
        for n in 0..FILES {
            std::fs::write(shared.root().join(format!("a/{n}")), "").unwrap();
        }
        let (zip, in_order) = rest(&mut begin(&shared));
        assert!(in_order);
        assert_eq!(names(&shared, &zip).len(), FILES);
    }
}

#[test]
fn an_archive_that_breaks_off_does_not_end_in_order() {
    const SIZE: usize = 48 << 20;
    for version in VERSIONS {
        let shared = Shared::start(version);
        let content = noise(SIZE);
        shared.write("a/1", &content);
        shared.write("a/2", &content);
        let (zip, in_order) = rest(&mut begin(&shared));
        assert!(in_order);
        assert_eq!(names(&shared, &zip), ["1", "2"]);
        // While the first of them passes, the other becomes something that cannot be opened.
        let mut connection = begin(&shared);
        let mut first = connection.read_chunk().unwrap().unwrap();
        while first.len() < 31 {
            first.extend(connection.read_chunk().unwrap().unwrap());
        }
        let other = shared.root().join(if first[30] == b'1' { "a/2" } else { "a/1" });
        std::fs::remove_file(&other).unwrap();
        let _socket = UnixListener::bind(&other).unwrap();
        let (zip, in_order) = rest(&mut connection);
        assert!(!in_order, "{version}: {} bytes and a clean end", zip.len());
        assert!(zip.len() > SIZE / 2, "what could be read came");
        assert!(shared.host.log().contains("ended an archive early"));
        assert_eq!(shared.get("/?json").status, 200, "and it still works");
    }
}

/// What dufs alone cannot read: nothing of the archive comes, or some of it.
#[test]
fn an_archive_of_nothing_at_all_is_an_error() {
    if !is_root() {
        // Whoever is not root has no way to let dufs see less than the sidecar does.
        return;
    }
    for version in VERSIONS {
        let dir = tempfile::tempdir().unwrap();
        let program = wrapper(dir.path(), version);
        let shared = Shared::of(&program, Setup::default());
        shared.write("a/one", "1");
        allow(&shared.root().join("a/one"), 0);
        let reply = shared.get("/a?zip");
        assert_eq!(reply.status, 500);
        let said = error(&reply.text());
        assert_eq!(said, "the archive cannot be made: something in this folder cannot be read");
        for n in 0..20 {
            shared.write(&format!("a/{n}"), noise(100_000));
        }
        let mut connection = Connection::open(shared.host.port);
        let bearer = format!("Bearer {}", shared.host.token);
        connection.send("GET", "/xfer/a?zip", &[("Authorization", &bearer)], b"").unwrap();
        if connection.read_head().unwrap().status == 200 {
            assert!(!rest(&mut connection).1, "{version}");
        }
        allow(&shared.root().join("a/one"), 0o600);
        assert_eq!(names(&shared, &shared.get("/a?zip").body).len(), 21);
    }
}

/// A dufs that cannot read every file, unlike the sidecar.
fn wrapper(dir: &Path, version: &str) -> PathBuf {
    let program = dir.join("dufs");
    let mut file = std::fs::File::create(&program).unwrap();
    write!(file, "#!/bin/sh\nexec {BOUND} '{}' \"$@\"\n", dufs(version).display()).unwrap();
    drop(file);
    allow(&program, 0o755);
    program
}

const DENIED: &str = "the user that the bridge runs as may not do this here: Permission denied (os error 13)";

#[test]
fn what_cannot_be_read_is_refused_in_words() {
    for version in VERSIONS {
        let mut shared = Shared::with(version, bound());
        shared.write("a/f", "secret");
        let file = shared.root().join("a/f");
        ok(&shared.client.call("xfer_share", &json!({ "path": shared.root() }).to_string()));
        allow(&file, 0);
        let refused = |path: &str| {
            let reply = shared.get(path);
            assert_eq!(reply.status, 403, "{path}");
            assert_eq!(error(&reply.text()), DENIED, "{path}");
            assert_eq!(shared.ask("HEAD", path, &[], b"").status, 403);
        };
        refused("/a/f");
        refused("/a/f?edit");
        symlink("a/f", shared.root().join("link")).unwrap();
        refused("/link");
        allow(&file, 0o644);
        assert_eq!(shared.get("/a/f").text(), "secret");
        ok(&shared.client.call("xfer_share", &json!({ "path": file }).to_string()));
        allow(&file, 0);
        let reply = shared.get("/f");
        assert_eq!((reply.status, error(&reply.text()).as_str()), (403, DENIED));
        allow(&file, 0o644);
        assert_eq!(shared.get("/f").text(), "secret");
    }
}
