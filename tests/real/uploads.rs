//! Contract 6, uploads: atomic, never harmful when cut, and continued with two curl lines.

use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

use crate::share::{Shared, VERSIONS, names, ok};
use crate::support::http::Connection;
use crate::support::{Setup, eventually};

#[test]
fn an_upload_makes_folders_and_replaces_in_one_step() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        assert_eq!(shared.put("/new/deep/er/f", "one"), 201);
        assert_eq!(shared.read("new/deep/er/f").unwrap(), b"one");
        let file = shared.root().join("new/deep/er/f");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o750)).unwrap();
        let before = std::fs::metadata(&file).unwrap().ino();
        let mut connection = shared.begin_put("/new/deep/er/f", 6);
        connection.write(b"two").unwrap();
        eventually("the first half", || (shared.arrived("/new/deep/er/f")? == 3).then_some(()));
        assert_eq!(shared.get("/new/deep/er/f").text(), "one", "the old one until all is there");
        connection.write(b"two").unwrap();
        assert_eq!(connection.read().unwrap().status, 201);
        let after = std::fs::metadata(&file).unwrap();
        assert_eq!(shared.read("new/deep/er/f").unwrap(), b"twotwo");
        assert_ne!(after.ino(), before, "another file took its place");
        assert_eq!(after.mode() & 0o777, 0o750, "with the rights of the one before");
        assert_eq!(shared.put("/empty", ""), 201);
        assert_eq!(shared.read("empty").unwrap(), b"");
        // Chunked, without a length.
        let mut connection = Connection::open(shared.host.port);
        let bearer = format!("Bearer {}", shared.host.token);
        let headers = [("Authorization", bearer.as_str()), ("Transfer-Encoding", "chunked")];
        connection.send("PUT", "/xfer/chunked", &headers, b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n").unwrap();
        assert_eq!(connection.read().unwrap().status, 201);
        assert_eq!(shared.read("chunked").unwrap(), b"abcdefg");
        // The connection goes on.
        connection.send("GET", "/xfer/chunked", &headers[..1], b"").unwrap();
        assert_eq!(connection.read().unwrap().text(), "abcdefg");
        assert_eq!(shared.names(""), ["chunked", "empty", "new"], "nothing hidden is left");
    }
}

#[test]
fn an_upload_replaces_a_link_and_not_what_it_leads_to() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        shared.write("a/f", "the file");
        symlink("a/f", shared.root().join("link")).unwrap();
        assert_eq!(shared.get("/link").text(), "the file");
        assert_eq!(shared.put("/link", "new"), 201);
        assert!(shared.root().join("link").symlink_metadata().unwrap().is_file());
        assert_eq!(
            (shared.read("link").unwrap(), shared.read("a/f").unwrap()),
            (b"new".into(), b"the file".into())
        );
    }
}

#[test]
fn a_cut_upload_harms_nothing_and_is_hidden() {
    for version in VERSIONS {
        let mut shared = Shared::start(version);
        shared.write("a/f", "the old one");
        shared.cut_put("/a/f", b"half of it", 1000);
        shared.cut_put("/a/new", b"half", 1000);
        assert_eq!(shared.read("a/f").unwrap(), b"the old one");
        assert!(shared.read("a/new").is_none() && shared.get("/a/new").status == 404);
        let hidden: Vec<_> = shared.names("a").into_iter().filter(|name| name.starts_with('.')).collect();
        assert_eq!(hidden.len(), 2, "what came is kept");
        for listing in ["/a?json", "/a?simple", "/a/", "/a?zip"] {
            let reply = shared.get(listing);
            let text = reply.text();
            assert!(!hidden.iter().any(|name| text.contains(name.as_str())), "{listing}");
        }
        assert!(!shared.ask("PROPFIND", "/a", &[("Depth", "1")], b"").text().contains(".a2mcp"));
        for name in &hidden {
            for name in [name.clone(), name.to_uppercase()] {
                for method in ["GET", "HEAD", "PUT", "PROPFIND", "MKCOL"] {
                    let reply = shared.ask(method, &format!("/a/{name}"), &[], b"");
                    assert_eq!(reply.status, 404, "{method} {name}");
                }
                assert_eq!(shared.ask("HEAD", &format!("/a/{name}?part"), &[], b"").status, 404);
                assert_eq!(shared.get(&format!("/a/{name}/x")).status, 404);
            }
        }
        assert_eq!(shared.host.status()["share"]["cutUploads"], 2);
        ok(&shared.client.call("xfer_stop", "{}"));
        assert_eq!(shared.names("a"), ["f"], "gone with the share");
    }
}

#[test]
fn a_cut_upload_goes_on_with_two_curl_lines() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        let whole: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
        let total = whole.len();
        shared.write("f", "old");
        shared.cut_put("/f", &whole[..500_000], total as u64);
        let local = shared.outside().join("local");
        std::fs::write(&local, &whole).unwrap();
        // The two lines of the README.
        let readme = include_str!("../../README.md");
        let line = |begin: &str| readme.lines().map(str::trim).find(|line| line.starts_with(begin)).unwrap();
        let script = format!(
            "set -eu\nurl={}\n{}\ntest $at = 500000\n{}\n",
            shared.url(""),
            line("at=$(curl").replace("big.iso", "f"),
            line("test -n \"$at\"").replace("big.iso", "f"),
        );
        std::fs::rename(&local, shared.outside().join("f")).unwrap();
        let header = format!("Authorization: Bearer {}\n", shared.host.token);
        std::fs::write(shared.outside().join("h"), header).unwrap();
        let bash = std::process::Command::new("bash")
            .args(["-c", &script])
            .current_dir(shared.outside())
            .output()
            .unwrap();
        assert!(bash.status.success(), "{bash:?}");
        assert_eq!(shared.read("f").unwrap(), whole);
        // Nothing is kept any more: they do nothing.
        let script =
            script.replace("set -eu", "set -u").replace("test $at = 500000", "test -z \"$at\" || exit 9");
        let bash = std::process::Command::new("bash")
            .args(["-c", &script])
            .current_dir(shared.outside())
            .output()
            .unwrap();
        assert_eq!((bash.status.code(), bash.stdout.len()), (Some(1), 0), "{bash:?}");
        assert_eq!(shared.read("f").unwrap(), whole);
        assert_eq!(shared.part("/f"), None);
        assert_eq!(shared.names(""), ["f"]);
    }
}

#[test]
fn the_rest_comes_in_pieces_and_is_checked() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        shared.cut_put("/d/f", b"0123", 10);
        let patch = |total: &str, body: &[u8]| {
            let headers = [("X-Update-Range", "append"), ("X-Upload-Length", total)];
            shared.ask("PATCH", "/d/f?part", &headers, body).status
        };
        assert_eq!(shared.ask("PATCH", "/d/f?part", &[("X-Upload-Length", "10")], b"45").status, 400);
        assert_eq!(shared.ask("PATCH", "/d/f?part", &[("X-Update-Range", "append")], b"45").status, 400);
        let bytes = [("X-Update-Range", "bytes=0-1"), ("X-Upload-Length", "10")];
        assert_eq!(shared.ask("PATCH", "/d/f?part", &bytes, b"45").status, 400);
        assert_eq!(patch("10", b"456789too long"), 409);
        assert_eq!(patch("3", b""), 409);
        assert_eq!(patch("-1", b""), 400);
        assert_eq!(shared.part("/d/f"), Some(4), "nothing of these came in");
        assert_eq!(patch("10", b"45"), 204);
        assert_eq!(shared.part("/d/f"), Some(6));
        // Chunked: it shows only at the end that it is too long.
        let chunked =
            [("X-Update-Range", "append"), ("X-Upload-Length", "10"), ("Transfer-Encoding", "chunked")];
        let reply = shared.ask("PATCH", "/d/f?part", &chunked, b"6\r\n6789AB\r\n0\r\n\r\n");
        assert_eq!(reply.status, 400, "{}", reply.text());
        assert_eq!(shared.part("/d/f"), Some(6));
        // Nor is what came before it showed, be it the end of another file or of this one from elsewhere.
        let from = |offset: &str, body: &[u8]| {
            let headers = [&chunked[..], &[("X-Upload-Offset", offset)]].concat();
            shared.ask("PATCH", "/d/f?part", &headers, body)
        };
        let reply = shared.ask("PATCH", "/d/f?part", &chunked, b"2\r\nAB\r\n6\r\n6789CD\r\n0\r\n\r\n");
        assert_eq!(reply.status, 400, "{}", reply.text());
        assert!(reply.text().contains("6 bytes are here"), "{}", reply.text());
        assert_eq!((shared.part("/d/f"), shared.arrived("/d/f")), (Some(6), Some(6)));
        for (offset, status) in [("4", 409), ("7", 409), ("x", 400), ("-6", 400), ("", 400)] {
            let reply = from(offset, b"1\r\n6\r\n0\r\n\r\n");
            assert_eq!(reply.status, status, "{offset}: {}", reply.text());
        }
        assert_eq!(from("6", b"1\r\n6\r\n0\r\n\r\n").status, 204);
        assert_eq!(from("6", b"1\r\n6\r\n0\r\n\r\n").status, 409, "the same piece again");
        assert_eq!(patch("10", b"789"), 201);
        assert_eq!(shared.read("d/f").unwrap(), b"0123456789");
        assert_eq!(patch("10", b""), 404, "there is nothing to continue any more");
        assert_eq!(shared.ask("PATCH", "/none/f?part", &chunked[..2], b"x").status, 404);
        assert_eq!(shared.ask("HEAD", "/none/f?part", &[], b"").status, 404);
        // All bytes came, the answer did not: nothing more is needed than to ask for the end.
        shared.cut_put("/g", b"0123", 5);
        let headers = [("X-Update-Range", "append"), ("X-Upload-Length", "4")];
        assert_eq!(shared.ask("PATCH", "/g?part", &headers, b"").status, 201);
        assert_eq!(shared.read("g").unwrap(), b"0123");
        // A new upload takes the place of a cut one.
        shared.cut_put("/h", b"0123", 10);
        assert_eq!(shared.put("/h", "new"), 201);
        assert_eq!((shared.read("h").unwrap(), shared.part("/h")), (b"new".to_vec(), None));
    }
}

#[test]
fn so_many_cut_uploads_are_kept_and_no_more() {
    const KEPT: u32 = 1024;
    let shared = Shared::start(VERSIONS[0]);
    let kept = || shared.host.status()["share"]["cutUploads"].clone();
    for n in 0..KEPT {
        shared.cut_put(&format!("/{n}"), b"01", 10);
    }
    eventually("all that can be kept", || (kept() == KEPT).then_some(()));
    let mut connection = shared.begin_put("/more", 10);
    connection.write(b"01").unwrap();
    eventually("its bytes", || (shared.arrived("/more")? == 2).then_some(()));
    drop(connection);
    eventually("nothing of it", || shared.arrived("/more").is_none().then_some(()));
    assert_eq!(kept(), KEPT);
    // One that is kept may be continued, cut again and replaced.
    let headers = [("X-Update-Range", "append"), ("X-Upload-Length", "10")];
    assert_eq!(shared.ask("PATCH", "/7?part", &headers, b"234").status, 204);
    assert_eq!(shared.part("/7"), Some(5));
    shared.cut_put("/8", b"0123", 10);
    assert_eq!((shared.part("/8"), kept()), (Some(4), KEPT.into()));
    assert_eq!(shared.ask("PATCH", "/7?part", &headers, b"56789").status, 201);
    assert_eq!(shared.read("7").unwrap(), b"0123456789");
    shared.cut_put("/more", b"01", 10);
    assert_eq!(kept(), KEPT, "there was room again");
}

#[test]
fn an_upload_that_is_to_replace_only_what_its_sender_knows_replaces_nothing_else() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        shared.write("f", "old");
        let reply = shared.get("/f");
        let (tag, time) = (reply.header("etag").unwrap(), reply.header("last-modified").unwrap());
        let put = |path: &str, name: &str, value: &str| shared.ask("PUT", path, &[(name, value)], b"new");
        for (name, value) in [
            ("If-Match", "\"another\""),
            ("If-Unmodified-Since", "Thu, 01 Jan 1970 00:00:00 GMT"),
            ("If-None-Match", "*"),
            ("If-None-Match", tag),
        ] {
            let refused = put("/f", name, value);
            assert_eq!(refused.status, 412, "{name}: {value}: {}", refused.text());
            assert_eq!(shared.read("f").unwrap(), b"old");
        }
        for value in ["\"another\"", "*"] {
            assert_eq!(put("/none/g", "If-Match", value).status, 412, "{value}");
        }
        assert_eq!(shared.names(""), ["f"], "not even a folder was made");
        assert_eq!(put("/new", "If-Unmodified-Since", time).status, 201, "there is nothing to lose");
        assert_eq!(put("/f", "If-None-Match", "\"another\"").status, 201);
        assert_eq!(put("/f", "If-Match", "*").status, 201);
        let tag = shared.get("/f").header("etag").unwrap().to_owned();
        assert_eq!(put("/f", "If-Match", &tag).status, 201);
        assert_eq!(shared.read("f").unwrap(), b"new");
        // The same for the rest of one that was cut.
        shared.cut_put("/f", b"01", 4);
        let rest = |name: &str, value: &str| {
            let headers = [("X-Update-Range", "append"), ("X-Upload-Length", "4"), (name, value)];
            shared.ask("PATCH", "/f?part", &headers, b"23").status
        };
        assert_eq!(rest("If-Match", "\"another\""), 412);
        assert_eq!(rest("If-None-Match", "*"), 412);
        assert_eq!((shared.read("f").unwrap(), shared.part("/f")), (b"new".to_vec(), Some(2)));
        assert_eq!(rest("If-Match", shared.get("/f").header("etag").unwrap()), 201);
        assert_eq!(shared.read("f").unwrap(), b"0123");
        // And it holds when the new file takes the old one's place, not only when it begins to come.
        let tag = shared.get("/f").header("etag").unwrap().to_owned();
        let conditions = [("f", format!("If-Match: {tag}\r\n")), ("g", "If-None-Match: *\r\n".to_owned())];
        for (name, condition) in conditions {
            let path = format!("/{name}");
            let mut connection = shared.begin_put_if(&path, 4, &condition);
            connection.write(b"AB").unwrap();
            eventually("the first half", || (shared.arrived(&path)? == 2).then_some(()));
            shared.write(name, "somebody else's");
            connection.write(b"CD").unwrap();
            let reply = connection.read().unwrap();
            assert_eq!(reply.status, 412, "{condition}: {}", reply.text());
            assert_eq!(shared.read(name).unwrap(), b"somebody else's");
            assert_eq!(shared.part(&path), Some(4), "what came is not lost");
            let headers = [("X-Update-Range", "append"), ("X-Upload-Length", "4")];
            assert_eq!(shared.ask("PATCH", &format!("{path}?part"), &headers, b"").status, 201);
            assert_eq!(shared.read(name).unwrap(), b"ABCD");
        }
    }
}

/// Somebody on the host's machine may write in the shared folder, too.
#[test]
fn what_somebody_puts_under_the_hidden_name_harms_nothing() {
    let shared = Shared::start(VERSIONS[0]);
    let victim = shared.outside().join("victim");
    std::fs::write(&victim, "untouched").unwrap();
    let mkfifo = |path: &std::path::Path| {
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    shared.write("f", "old");
    for round in 0..8 {
        shared.cut_put("/f", b"01", 4);
        let hidden = shared.names("").into_iter().find(|name| name.starts_with('.')).unwrap();
        let hidden = shared.root().join(hidden);
        std::fs::remove_file(&hidden).unwrap();
        match round {
            // As many pipes as there are threads for them, and more.
            0..6 => mkfifo(&hidden),
            6 => symlink(&victim, &hidden).unwrap(),
            _ => std::fs::hard_link(&victim, &hidden).unwrap(),
        }
        let headers = [("X-Update-Range", "append"), ("X-Upload-Length", "4")];
        assert_eq!(shared.ask("PATCH", "/f?part", &headers, b"23").status, 404, "{round}");
        assert_eq!(shared.part("/f"), None, "{round}");
        assert_eq!(shared.put("/f", format!("new {round}")), 201);
        assert_eq!(shared.read("f").unwrap(), format!("new {round}").as_bytes());
    }
    // Nor does it get the file's name when it comes while the bytes do.
    for trap in ["gone", "pipe", "link"] {
        let mut connection = shared.begin_put("/f", 4);
        connection.write(b"AB").unwrap();
        eventually("the first half", || (shared.arrived("/f")? == 2).then_some(()));
        let hidden = shared.names("").into_iter().find(|name| name.starts_with('.')).unwrap();
        let hidden = shared.root().join(hidden);
        std::fs::remove_file(&hidden).unwrap();
        match trap {
            "gone" => {}
            "pipe" => mkfifo(&hidden),
            _ => symlink(&victim, &hidden).unwrap(),
        }
        connection.write(b"CD").unwrap();
        let reply = connection.read().unwrap();
        assert!(
            reply.status == 409 && reply.text().contains("PUT the whole file"),
            "{trap}: {}",
            reply.text()
        );
        assert_eq!(shared.names(""), ["f"], "{trap}");
        assert_eq!(shared.read("f").unwrap(), b"new 7", "{trap}");
    }
    assert_eq!(std::fs::read(&victim).unwrap(), b"untouched");
    // Nor does a caller take away what is no file.
    mkfifo(&shared.root().join("pipe"));
    let socket = std::os::unix::net::UnixListener::bind(shared.root().join("socket")).unwrap();
    for name in ["/pipe", "/socket"] {
        assert_eq!(shared.get(name).status, 404);
        let reply = shared.ask("PUT", name, &[], b"x");
        assert!(
            reply.status == 409 && reply.text().contains("neither a file nor a folder"),
            "{}",
            reply.text()
        );
    }
    drop(socket);
    assert_eq!(shared.names(""), ["f", "pipe", "socket"]);
}

#[test]
fn a_replaced_token_cuts_the_transfers_that_came_with_it() {
    let mut shared = Shared::start(VERSIONS[0]);
    const SIZE: usize = 64 << 20;
    shared.write("big", vec![7; SIZE]);
    let mut up = shared.begin_put("/up", 1000);
    up.write(&[1; 500]).unwrap();
    eventually("the first half", || (shared.arrived("/up")? == 500).then_some(()));
    let bearer = format!("Bearer {}", shared.host.token);
    let mut down = Connection::open(shared.host.port);
    down.send("GET", "/xfer/big", &[("Authorization", &bearer)], b"").unwrap();
    let mut first = [0; 4096];
    down.socket().read_exact(&mut first).unwrap();
    assert!(first.starts_with(b"HTTP/1.1 200"), "it has begun");
    let (code, _, err) = shared.host.cli(&["rotate"]);
    assert_eq!(code, 0, "{err}");
    let reply = up.read().unwrap();
    assert!(reply.status == 401 && reply.text().contains("the token was replaced"), "{}", reply.text());
    let mut rest = Vec::new();
    let _ = down.socket().read_to_end(&mut rest);
    assert!(rest.len() < SIZE - (8 << 20), "{} bytes came in all", rest.len());
    // The new token goes on with what was cut.
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(shared.host.path("a2mcp.json")).unwrap()).unwrap();
    shared.host.token = config["token"].as_str().unwrap().to_owned();
    eventually("the end of the upload", || (shared.part("/up")? == 500).then_some(()));
    let headers = [("X-Update-Range", "append"), ("X-Upload-Length", "1000")];
    assert_eq!(shared.ask("PATCH", "/up?part", &headers, &[1; 500]).status, 201);
    assert_eq!(shared.get("/big").body.len(), SIZE);
}

#[test]
fn names_that_no_file_system_takes_leave_nothing_behind() {
    let shared = Shared::start(VERSIONS[0]);
    let (name, folder) = ("n".repeat(256), "d".repeat(200));
    let long = vec![folder.as_str(); 21].join("/");
    for path in [format!("/a/b/{name}"), format!("/a/{name}/f"), format!("/{long}/f")] {
        let reply = shared.ask("PUT", &path, &[], b"x");
        let text = reply.text();
        assert!(
            reply.status == 400 && (text.contains("longer than 255") || text.contains("too long")),
            "{text}"
        );
    }
    assert!(shared.names("").is_empty());
    let path = format!("/a/{}", "n".repeat(255));
    assert_eq!(shared.put(&path, "x"), 201);
    assert_eq!(shared.get(&path).text(), "x");
    // `?part` is not PUT's.
    assert_eq!(shared.ask("PUT", "/q?part", &[], b"x").status, 403);
    assert_eq!(shared.names(""), ["a"]);
}

#[test]
fn one_name_is_uploaded_once_at_a_time() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        let mut first = shared.begin_put("/a/f", 6);
        first.write(b"abc").unwrap();
        eventually("the first half", || (shared.arrived("/a/f")? == 3).then_some(()));
        assert_eq!(shared.put("/a/f", "other"), 409);
        assert_eq!(shared.put("/a//%66", "other"), 409, "however it is written");
        let headers = [("X-Update-Range", "append"), ("X-Upload-Length", "6")];
        assert_eq!(shared.ask("PATCH", "/a/f?part", &headers, b"xyz").status, 409);
        assert_eq!(shared.put("/a/g", "other"), 201);
        first.write(b"def").unwrap();
        assert_eq!(first.read().unwrap().status, 201);
        assert_eq!(shared.read("a/f").unwrap(), b"abcdef");
        assert_eq!(shared.put("/a/f", "again"), 201);
    }
}

#[test]
fn one_file_is_uploaded_once_at_a_time_whichever_link_leads_to_it() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        shared.write("a/f", "old");
        symlink("a", shared.root().join("alias")).unwrap();
        for (path, other) in [("/a/f", "/alias/f"), ("/alias/f", "/a/f")] {
            let mut first = shared.begin_put(path, 6);
            first.write(b"abc").unwrap();
            eventually("the first half", || (shared.arrived(path)? == 3).then_some(()));
            for path in [path, other] {
                let asked = shared.ask("HEAD", &format!("{path}?part"), &[], b"");
                assert_eq!(asked.status, 409, "it still grows");
            }
            assert_eq!(shared.put(other, "other"), 409, "{other} while {path}");
            let headers = [("X-Update-Range", "append"), ("X-Upload-Length", "6")];
            assert_eq!(shared.ask("PATCH", &format!("{other}?part"), &headers, b"xyz").status, 409);
            first.write(b"def").unwrap();
            assert_eq!(first.read().unwrap().status, 201);
            assert_eq!(shared.read("a/f").unwrap(), b"abcdef");
            assert_eq!(shared.put(other, "again"), 201);
        }
        // What is cut at one path goes on at the other.
        shared.cut_put("/alias/new", b"0123", 8);
        let headers = [("X-Update-Range", "append"), ("X-Upload-Length", "8")];
        assert_eq!(shared.ask("PATCH", "/a/new?part", &headers, b"4567").status, 201);
        assert_eq!(shared.read("a/new").unwrap(), b"01234567");
        assert_eq!(shared.names("a"), ["f", "new"]);
        assert!(shared.root().join("alias").is_symlink());
        assert_eq!(shared.host.status()["share"]["cutUploads"], 0);
    }
}

/// Somebody at the machine renames the folder of a cut upload: what is kept goes with the share all the
/// same.
#[test]
fn what_is_kept_in_a_renamed_folder_is_gone_with_the_share() {
    for how in ["cut", "uploaded again", "running"] {
        let mut shared = Shared::start("0.46.0");
        shared.write("deep/d/old", "old");
        let rename = || {
            std::fs::rename(shared.root().join("deep/d"), shared.root().join("deep/e")).unwrap();
        };
        if how == "running" {
            let mut upload = shared.begin_put("/deep/d/f", 6);
            upload.write(b"abc").unwrap();
            eventually("the first half", || (shared.arrived("/deep/d/f")? == 3).then_some(()));
            rename();
            upload.write(b"def").unwrap();
            assert_eq!(upload.read().unwrap().status, 409);
        } else {
            shared.cut_put("/deep/d/f", b"half", 1000);
            rename();
        }
        if how == "uploaded again" {
            assert_eq!(shared.put("/deep/d/f", "whole"), 201);
        }
        assert_eq!(shared.names("deep/e").len(), 2, "{how}: what came is still there");
        ok(&shared.client.call("xfer_stop", "{}"));
        eventually("the sweep", || (shared.names("deep/e") == ["old"]).then_some(()));
        assert_eq!(shared.read("deep/d/f").is_some(), how == "uploaded again", "{how}");
    }
}

#[test]
fn a_chunked_upload_that_is_malformed_is_said_so() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        shared.write("f", "old");
        let chunked = [("Transfer-Encoding", "chunked")];
        for (rest, kept) in
            [("nonsense\r\n", 3), ("-1\r\n", 3), ("fffffffffffffffff\r\n", 3), ("2\r\ndeX\r\n", 5)]
        {
            let body = format!("3\r\nabc\r\n{rest}");
            let reply = shared.ask("PUT", "/f", &chunked, body.as_bytes());
            assert_eq!((reply.status, shared.part("/f")), (400, Some(kept)), "{rest}: {}", reply.text());
            assert_eq!(shared.read("f").unwrap(), b"old", "{rest}");
            let headers = [("X-Update-Range", "append"), ("X-Upload-Length", "9"), chunked[0]];
            let reply = shared.ask("PATCH", "/f?part", &headers, b"nonsense\r\n");
            assert_eq!(reply.status, 400, "{}", reply.text());
        }
        assert_eq!(shared.put("/f", "and it still works"), 201);
        assert_eq!(shared.names(""), ["f"]);
    }
}

/// F3: what the path means changes while the bytes come.
#[test]
fn a_link_swapped_in_meanwhile_leads_nowhere() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        std::fs::write(shared.outside().join("f"), "untouched").unwrap();
        shared.write("d/f", "old");
        let mut connection = shared.begin_put("/d/f", 6);
        connection.write(b"abc").unwrap();
        eventually("the first half", || (shared.arrived("/d/f")? == 3).then_some(()));
        std::fs::rename(shared.root().join("d"), shared.root().join("moved")).unwrap();
        symlink(shared.outside(), shared.root().join("d")).unwrap();
        connection.write(b"def").unwrap();
        let reply = connection.read().unwrap();
        assert_eq!(reply.status, 409, "{}", reply.text());
        assert_eq!(names(&shared.outside()), ["f"]);
        assert_eq!(std::fs::read(shared.outside().join("f")).unwrap(), b"untouched");
        assert_eq!(shared.read("moved/f").unwrap(), b"old");

        // The name itself becomes a link, or a folder.
        for swap in ["link", "folder"] {
            let mut connection = shared.begin_put("/moved/f", 6);
            connection.write(b"abc").unwrap();
            eventually("the first half", || (shared.arrived("/moved/f")? == 3).then_some(()));
            let name = shared.root().join("moved/f");
            std::fs::remove_file(&name).unwrap();
            if swap == "link" {
                symlink(shared.outside().join("f"), &name).unwrap();
            } else {
                std::fs::create_dir(&name).unwrap();
            }
            connection.write(b"def").unwrap();
            assert_eq!(connection.read().unwrap().status, 409, "{swap}");
            assert_eq!(std::fs::read(shared.outside().join("f")).unwrap(), b"untouched");
            std::fs::remove_file(&name).or_else(|_| std::fs::remove_dir(&name)).unwrap();
            std::fs::write(&name, "old").unwrap();
        }
        assert_eq!(shared.put("/moved/f", "and it still works"), 201);
        assert_eq!(shared.read("moved/f").unwrap(), b"and it still works");
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_said_so() {
    let mut setup = Setup::default();
    if rustix::process::getuid().is_root() {
        // Nothing is locked for it, unless the bridge and its children may not override permissions.
        setup = setup.before(r#"exec setpriv --bounding-set -dac_override,-dac_read_search "$0" "$@""#);
    }
    let shared = Shared::with("0.46.0", setup);
    let folder = shared.root().join("locked");
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o555)).unwrap();
    for path in ["/locked/f", "/locked/deep/er/f"] {
        let reply = shared.ask("PUT", path, &[], b"x");
        assert_eq!(reply.status, 403, "{}", reply.text());
        assert!(reply.text().contains("Permission denied"), "{}", reply.text());
    }
    assert_eq!(shared.ask("MKCOL", "/locked/new", &[], b"").status, 403);
    assert_eq!(shared.names("locked"), Vec::<String>::new());
    // An old file in it stays as it is.
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    shared.write("locked/old", "old");
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o555)).unwrap();
    assert_eq!(shared.put("/locked/old", "new"), 403);
    assert_eq!(shared.read("locked/old").unwrap(), b"old");
    assert_eq!(shared.host.status()["share"]["cutUploads"], 0);
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(shared.put("/locked/f", "and it still works"), 201);
}
