//! Contract 5 and 6 on the real dufs: what callers get from a share, and what they do not.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::symlink;

use serde_json::{Value, json};

use crate::share::{Shared, VERSIONS, audited, config, dufs, error, listens, ok};
use crate::support::http::Connection;
use crate::support::{Setup, eventually};

/// Names that arrive as they are.
fn odd_names() -> Vec<String> {
    let mut names: Vec<String> = [
        "with space",
        "per%cent",
        "%41",
        "hash#",
        "question?",
        "a+b&c=d",
        "\u{65e5}\u{672c}\u{8a9e}.txt",
        "\u{1f600}",
        "quote'\"`",
        "back\\slash",
        ".hidden",
        "...",
        "-rf",
        "semi;colon",
        "[x](y){z}",
        "tab\tnew\nline",
        "e\u{301}",
        "%2e%2e",
        ".a2mcp-x",
    ]
    .map(str::to_owned)
    .into();
    names.push("n".repeat(255));
    names.push("\u{65e5}".repeat(85));
    names
}

/// As a client must write a name in a URL.
fn escape(name: &str) -> String {
    name.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' | b'_' | b'~' => {
                char::from(byte).to_string()
            }
            byte => format!("%{byte:02x}"),
        })
        .collect()
}

#[test]
fn the_tools_say_what_the_contract_says() {
    for version in VERSIONS {
        let mut shared = Shared::start(version);
        let port = shared.host.port;
        let result = shared.result.clone();
        let base = format!("http://127.0.0.1:{port}/xfer/");
        assert_eq!(result["url"], base);
        assert_eq!((&result["publicUrl"], &result["route"]), (&Value::Null, &json!("/xfer/")));
        assert_eq!(result["path"], json!(shared.root()));
        assert_eq!((&result["replaced"], &result["installed"]), (&json!(false), &json!({"dufs": null})));
        assert_eq!(
            result["usage"],
            json!({
                "download": format!("curl -H 'Authorization: Bearer <TOKEN>' -O {base}<name>"),
                "upload": format!("curl -H 'Authorization: Bearer <TOKEN>' -T <local> {base}<name>"),
                "public": "no public address — `/a2mcp tunnel` is closed; use an SSH port forward to the bridge port, or ask the operator to run `/a2mcp tunnel`",
            })
        );
        assert!(listens(result["port"].as_u64().unwrap()) && result["port"] != port);
        let mut status = result.clone();
        for only_in_share in ["replaced", "usage", "installed"] {
            status.as_object_mut().unwrap().remove(only_in_share);
        }
        status["serving"] = true.into();
        assert_eq!(shared.status(), status);

        shared.share();
        assert_eq!(shared.result["replaced"], true);
        assert!(!listens(result["port"].as_u64().unwrap()), "the first is gone");
        let stopped = ok(&shared.client.call("xfer_stop", "{}"));
        assert_eq!(stopped, json!({"stopped": true, "path": shared.root()}));
        assert_eq!(shared.get("/").status, 404);
        let stopped = ok(&shared.client.call("xfer_stop", "{}"));
        assert_eq!(stopped, json!({"stopped": false, "note": "nothing was shared"}));
        assert_eq!(shared.status(), json!({"serving": false}));

        let root = json!(shared.root());
        let record = |action: &str, result: &Value| json!({"action": action, "path": root, "port": result["port"], "ttlSeconds": 3600, "route": "/xfer/"});
        let mut replaced = record("close", &result);
        replaced["why"] = "replaced".into();
        assert_eq!(
            shared.audited(),
            [
                record("share", &result),
                replaced,
                record("share", &shared.result),
                record("stop", &shared.result)
            ]
        );
    }
}

#[test]
fn paths_are_the_hosts_and_bad_ones_are_refused_in_words() {
    let home = tempfile::tempdir().unwrap();
    let home_path = home.path().canonicalize().unwrap();
    std::fs::create_dir_all(home_path.join("work/sub")).unwrap();
    std::fs::write(home_path.join("work/one file.txt"), "one").unwrap();
    let host = json!({"host": {"name": "t", "version": "0", "pid": std::process::id(), "cwd": home_path.join("work"), "home": home_path}});
    let host = Setup::default().config(&config(&dufs("0.46.0"))).hello(host).start();
    let mut client = host.client();
    let mut share = |path: &str| client.call("xfer_share", &json!({ "path": path }).to_string());
    for (path, served) in
        [("~", ""), ("~/work", "work"), ("sub", "work/sub"), ("./sub/../sub", "work/sub"), ("..", "")]
    {
        // The temporary home is beside the agent directory, not above it.
        let served = home_path.join(served).components().collect::<std::path::PathBuf>();
        assert_eq!(ok(&share(path))["path"], json!(served), "{path}");
    }
    assert!(error(&share("~other/x")).starts_with("cannot serve "));
    let missing = error(&share("no/such"));
    assert_eq!(
        missing,
        format!(
            "cannot serve {}: No such file or directory (os error 2)",
            home_path.join("work/no/such").display()
        )
    );
    for path in [
        "/",
        "/dev/null",
        host.dir.path().to_str().unwrap(),
        host.dir.path().parent().unwrap().to_str().unwrap(),
        "/usr/..",
    ] {
        assert!(error(&share(path)).starts_with("cannot serve "), "{path}");
    }
    let run = a2mcp::rundir::open().unwrap();
    std::fs::create_dir_all(home_path.join(".omp/agent/x")).unwrap();
    for dir in [&run, run.parent().unwrap(), &home_path, &home_path.join(".omp/agent/x")] {
        assert!(error(&share(dir.to_str().unwrap())).contains("this bridge's own files"), "{dir:?}");
    }
    std::fs::remove_dir_all(home_path.join(".omp")).unwrap();
    std::fs::create_dir(host.path("exports")).unwrap();
    for name in ["a2mcp.json", "a2mcp.log", "a2mcp.state", "exports"] {
        let path = host.path(name);
        assert!(error(&share(path.to_str().unwrap())).starts_with("cannot serve "), "{name}");
    }
    for arguments in ["{}", r#"{"path":7}"#, r#"{"path":""}"#, "[]", "7"] {
        let refused = error(&client.call("xfer_share", arguments));
        assert_eq!(refused, "xfer_share needs a 'path' — the file or directory to serve", "{arguments}");
    }
    for ttl in ["0", "-1", "1.5", "\"x\"", "1e99"] {
        let refused = error(&client.call("xfer_share", &format!(r#"{{"path":"sub","ttlSeconds":{ttl}}}"#)));
        assert!(refused.contains("ttlSeconds"), "{refused}");
    }
    // What was shared last still is.
    assert_eq!(ok(&client.call("xfer_status", "{}"))["path"], json!(home_path));
    assert_eq!(audited(&host).iter().filter(|record| record["action"] == "share").count(), 5);
}

#[test]
fn a_file_server_that_cannot_start_says_why_and_replaces_nothing() {
    let mut shared = Shared::start("0.46.0");
    shared.write("a", "kept");
    let bad = tempfile::tempdir().unwrap();
    let program = bad.path().join("dufs");
    let mut setup = Setup::default().config(&config(&program)).start();
    let share = json!({ "path": shared.root() }).to_string();
    let mut client = setup.client();
    assert!(error(&client.call("xfer_share", &share)).contains("no such file"), "missing");
    std::fs::write(
        &program,
        "#!/bin/sh\n[ \"$1\" = --version ] && exec echo 'dufs 0.46.0'\necho 'it is broken' >&2\nexit 3\n",
    )
    .unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let refused = error(&client.call("xfer_share", &share));
    assert!(refused.contains("it is broken") && refused.contains("exit code 3"), "{refused}");
    assert_eq!(ok(&client.call("xfer_status", "{}")), json!({"serving": false}));
    setup.child.kill().unwrap();
    setup.wait();
    assert_eq!(shared.get("/a").text(), "kept");
    assert_eq!(shared.status()["serving"], true);
}

/// What a2mcp installed itself is named with version and hash.
#[test]
fn an_installed_file_server_is_named() {
    let (home, program) = (tempfile::tempdir().unwrap(), dufs("0.46.0"));
    let sum = std::process::Command::new("sha256sum").arg(&program).output().unwrap();
    let hash = String::from_utf8_lossy(&sum.stdout).split(' ').next().unwrap().to_owned();
    let entry =
        json!({"version": "0.46.0", "asset": "a", "assetSha256": "", "path": program, "sha256": hash});
    let dir = std::sync::Arc::new(tempfile::tempdir().unwrap());
    std::fs::write(dir.path().join("a2mcp.installs.json"), json!({"installed": {"dufs": entry}}).to_string())
        .unwrap();
    let setup = Setup::default().env("HOME", home.path().to_str().unwrap()).env("PATH", "/usr/bin:/bin");
    let host = setup.config(r#"{"xfer":{"dufs":"dufs"}}"#).in_dir(dir).start();
    let shared = tempfile::tempdir().unwrap();
    let result = ok(&host.client().call("xfer_share", &json!({ "path": shared.path() }).to_string()));
    assert_eq!(result["installed"], json!({"dufs": {"version": "0.46.0", "path": program, "sha256": hash}}));
}

#[test]
fn every_name_arrives_verbatim_up_and_down() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        for (at, name) in odd_names().iter().enumerate() {
            let content = format!("content {at}");
            for path in [format!("/{}", escape(name)), format!("/{}/{}", escape(name), escape(name))] {
                if path.matches('/').count() == 2 {
                    std::fs::rename(shared.root().join(name), shared.root().join("moved")).unwrap();
                }
                assert_eq!(shared.put(&path, &content), 201, "PUT {path}");
                let reply = shared.get(&path);
                assert_eq!((reply.status, reply.text()), (200, content.clone()), "GET {path}");
                assert_eq!(shared.get(&format!("{path}/")).status, 200);
            }
            assert_eq!(shared.read(&format!("{name}/{name}")).unwrap(), content.as_bytes(), "{name}");
            std::fs::remove_file(shared.root().join("moved")).unwrap();
        }
        let listed: Value = shared.get("/?json").json();
        let mut listed: Vec<_> = listed["paths"]
            .as_array()
            .unwrap()
            .iter()
            .map(|path| path["name"].as_str().unwrap().to_owned())
            .collect();
        let mut expected = odd_names();
        listed.sort();
        expected.sort();
        assert_eq!(listed, expected);
        // Raw bytes, as some clients send them.
        shared.write("\u{65e5}", "raw");
        assert_eq!(shared.get("/\u{65e5}").text(), "raw");
        assert_eq!(shared.put(&format!("/{}", "n".repeat(256)), "x"), 400);
    }
}

#[test]
fn listings_archives_ranges_and_properties_work() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        shared.write("a/one.txt", "hello world\n");
        shared.write("a/b/two.txt", "two");
        let html = shared.get("/a/");
        assert_eq!((html.status, html.header("content-type").unwrap()), (200, "text/html; charset=utf-8"));
        assert_eq!(shared.get("/a?json").json()["paths"].as_array().unwrap().len(), 2);
        assert_eq!(shared.get("/a?simple").text(), "b/\none.txt\n");
        let zip = shared.get("/a?zip");
        assert_eq!(zip.status, 200);
        let file = shared.outside().join("a.zip");
        std::fs::write(&file, &zip.body).unwrap();
        let python = std::process::Command::new("python3")
            .args(["-c", "import sys,zipfile; z=zipfile.ZipFile(sys.argv[1]); assert z.testzip() is None; print(sorted(n for n in z.namelist() if not n.endswith('/')))"])
            .arg(&file)
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&python.stdout).trim(), "['b/two.txt', 'one.txt']", "{python:?}");

        let range = |range: &str| {
            let reply = shared.ask("GET", "/a/one.txt", &[("Range", range)], b"");
            (reply.status, reply.text(), reply.header("content-range").unwrap_or_default().to_owned())
        };
        let part = |status: u16, text: &str, range: &str| (status, text.to_owned(), range.to_owned());
        assert_eq!(range("bytes=0-4"), part(206, "hello", "bytes 0-4/12"));
        assert_eq!(range("bytes=6-999"), part(206, "world\n", "bytes 6-11/12"), "as far as it goes");
        assert_eq!(range("bytes=0-12"), part(206, "hello world\n", "bytes 0-11/12"));
        assert_eq!(range("bytes=-6"), part(206, "world\n", "bytes 6-11/12"));
        assert_eq!(range("bytes=-999"), part(206, "hello world\n", "bytes 0-11/12"));
        assert_eq!(range("bytes=12-").0, 416);
        assert_eq!(range("bytes=50-60"), part(416, "", "bytes */12"));
        let several = range("bytes=0-0,2-3");
        assert!(several.0 == 206 && several.1.contains("bytes 2-3/12"), "{several:?}");
        let past = range("bytes=0-0,10-99");
        assert!(past.0 == 206 && past.1.contains("bytes 10-11/12"), "{past:?}");
        assert_eq!(range(&format!("bytes={}0-", "0-,".repeat(1000))).0, 200, "no amplification");

        let head = shared.ask("HEAD", "/a/one.txt", &[], b"");
        assert_eq!((head.status, head.header("content-length").unwrap()), (200, "12"));
        let etag = shared.get("/a/one.txt").header("etag").unwrap().to_owned();
        assert_eq!(shared.ask("GET", "/a/one.txt", &[("If-None-Match", &etag)], b"").status, 304);
        let options = shared.ask("OPTIONS", "/a", &[], b"");
        assert_eq!(options.header("allow").unwrap(), "GET, HEAD, OPTIONS, PROPFIND, PUT, PATCH, MKCOL");
        assert_eq!(options.header("dav").unwrap(), "1");
        let properties = shared.ask("PROPFIND", "/a", &[("Depth", "1")], b"<propfind xmlns=\"DAV:\"/>");
        assert!(properties.status == 207 && properties.text().contains("<D:href>/xfer/a/one.txt</D:href>"));
        for missing in ["/none", "/none/", "/none/?json", "/a/one.txt/x", "/none?zip"] {
            assert_eq!(shared.get(missing).status, 404, "{missing}");
        }
    }
}

#[test]
fn what_callers_may_not_do_is_refused_and_changes_nothing() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        shared.write("a/f", "precious");
        let to = [("Destination", "/xfer/a/g"), ("X-Update-Range", "bytes=0-1"), ("Overwrite", "T")];
        for method in [
            "DELETE",
            "MOVE",
            "COPY",
            "PATCH",
            "POST",
            "PROPPATCH",
            "LOCK",
            "UNLOCK",
            "TRACE",
            "CHECKAUTH",
            "LOGOUT",
            "REPORT",
        ] {
            for path in ["/a/f", "/a", "/", "/a/f?x=part"] {
                let reply = shared.ask(method, path, &to, b"");
                assert_eq!(reply.status, 403, "{method} {path}");
                assert!(!reply.json()["error"].as_str().unwrap().is_empty());
            }
        }
        for query in ["?tokengen", "?tokengen=", "?%74okengen", "?json&tokengen"] {
            for method in ["GET", "HEAD", "OPTIONS"] {
                assert_eq!(shared.ask(method, &format!("/a/f{query}"), &[], b"").status, 403, "{query}");
            }
        }
        // Not even through a header that names itself hop-by-hop.
        let tricks = [("Connection", "authorization"), ("Proxy-Authorization", "Basic YQ==")];
        assert_eq!(shared.ask("DELETE", "/a/f", &tricks, b"").status, 403);
        assert_eq!(shared.ask("GET", "/a/f", &tricks, b"").status, 200);
        assert_eq!(shared.ask("MKCOL", "/a", &[], b"").status, 405);
        assert_eq!(shared.ask("MKCOL", "/x/y", &[], b"").status, 409);
        assert_eq!(shared.ask("MKCOL", "/x", &[], b"").status, 201);
        assert_eq!(shared.ask("MKCOL", "/x/y", &[], b"").status, 201);
        assert_eq!(shared.put("/a", "x"), 405);
        assert_eq!(shared.put("/", "x"), 405);
        for folder in ["/a/", "/new/", "/new%2f", "/new/er/"] {
            let reply = shared.ask("PUT", folder, &[], b"x");
            assert_eq!(reply.status, 405, "{folder}");
            assert!(reply.text().contains("names a folder") && reply.header("allow").is_some(), "{folder}");
        }
        assert_eq!(shared.names(""), ["a", "x"], "nothing was made of that");
        assert_eq!(shared.put("/a/f/g", "x"), 409, "a file is no folder");
        assert_eq!(shared.ask("PUT", "/a/f", &[("Content-Range", "bytes 0-0/9")], b"x").status, 400);
        assert_eq!(shared.ask("PUT", "/a/f", &[("If-None-Match", "*")], b"x").status, 412);
        assert_eq!(shared.names("a"), ["f"]);
        assert_eq!(shared.read("a/f").unwrap(), b"precious");
        assert_eq!(shared.get("/a/f").text(), "precious", "and it still works");
    }
}

/// F3.
#[test]
fn nothing_leaves_the_shared_folder() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        std::fs::write(shared.outside().join("secret"), "SECRET").unwrap();
        shared.write("in/f", "inside");
        symlink(shared.outside(), shared.root().join("out")).unwrap();
        symlink(shared.outside().join("secret"), shared.root().join("file")).unwrap();
        symlink(shared.outside().join("new"), shared.root().join("dangling")).unwrap();
        symlink("in", shared.root().join("alias")).unwrap();
        for path in [
            "/..%2foutside%2fsecret",
            "/../outside/secret",
            "/%2e%2e/outside/secret",
            "/%2e%2e%2foutside%2fsecret",
            "/in/../../outside/secret",
            "/..%5coutside%5csecret",
            "/..\\outside\\secret",
            "/.%2e/outside/secret",
            "/in%00",
            "/%00",
            "/%c0%ae%c0%ae/outside/secret",
            "/%ff",
            "/./in/f",
        ] {
            for method in ["GET", "PUT", "MKCOL", "PROPFIND", "HEAD", "PATCH"] {
                let reply = shared.ask(method, path, &[], b"");
                assert!(matches!(reply.status, 400 | 403), "{method} {path}: {}", reply.status);
            }
        }
        for path in
            ["/out", "/out/secret", "/out/", "/file", "/out?zip", "/out?json", "/dangling", "/%252e%252e/x"]
        {
            let reply = shared.get(path);
            assert_eq!(reply.status, 404, "GET {path}");
            assert!(!reply.text().contains("SECRET"));
        }
        for path in ["/out/new", "/out/secret", "/file", "/dangling", "/out/deep/new", "/dangling/x"] {
            assert_eq!(shared.put(path, "overwritten"), 403, "PUT {path}");
        }
        assert_eq!(shared.ask("MKCOL", "/out/new", &[], b"").status, 403);
        let listing = shared.get("/?json").text();
        assert!(!listing.contains("\"out\"") && !listing.contains("\"file\""), "{listing}");
        assert_eq!(crate::share::names(&shared.outside()), ["secret"]);
        assert_eq!(std::fs::read(shared.outside().join("secret")).unwrap(), b"SECRET");

        // The rest of the target's forms.
        let bearer = format!("Bearer {}", shared.host.token);
        for target in ["http://127.0.0.1/xfer/in/f", "http://evil.example/xfer/in/f"] {
            let reply =
                Connection::open(shared.host.port).request("GET", target, &[("Authorization", &bearer)], b"");
            assert_eq!(reply.status, 400, "{target}");
        }
        for raw in
            ["GET /xfer/in\0/f HTTP/1.1\r\n", "GET /xfer/in/f HTTP/9.9\r\n", "GET xfer/in/f HTTP/1.1\r\n"]
        {
            let mut connection = Connection::open(shared.host.port);
            let head =
                format!("{raw}Host: 127.0.0.1\r\nAuthorization: {bearer}\r\nConnection: close\r\n\r\n");
            connection.write(head.as_bytes()).unwrap();
            let mut answer = String::new();
            let _ = connection.socket().read_to_string(&mut answer);
            assert!(!answer.contains("inside"), "{raw:?}: {answer}");
        }
        assert_eq!(shared.get("/alias/f").text(), "inside", "links within the folder are fine");
        assert_eq!(shared.put("/alias/g", "through"), 201);
        assert_eq!(shared.read("in/g").unwrap(), b"through");
    }
}

#[test]
fn one_single_file_can_be_read_and_nothing_else() {
    for version in VERSIONS {
        let mut shared = Shared::start(version);
        shared.write("a (1) & b.txt", "the file");
        let file = shared.root().join("a (1) & b.txt");
        let result = ok(&shared.client.call("xfer_share", &json!({ "path": file }).to_string()));
        let name = "a%20%281%29%20%26%20b.txt";
        let line = result["usage"]["download"].as_str().unwrap();
        assert!(line.ends_with(&format!("/xfer/{name}")), "{line}");
        for path in ["", "/", &format!("/{name}"), "/a%20(1)%20&%20b.txt"] {
            assert_eq!(shared.get(path).text(), "the file", "{path}");
        }
        assert_eq!(shared.get("/other").status, 404);
        for method in ["PUT", "MKCOL", "PATCH"] {
            for path in ["/?part", &format!("/{name}?part"), "/new?part"] {
                let reply = shared.ask(method, path, &[], b"x");
                assert_eq!(reply.status, 405, "{method} {path}");
                assert_eq!(reply.header("allow").unwrap(), "GET, HEAD, OPTIONS, PROPFIND");
                assert!(reply.json()["error"].as_str().unwrap().contains("one single file"));
            }
        }
        // Refused before a byte of it is asked for.
        let mut waits = Connection::open(shared.host.port);
        let bearer = format!("Bearer {}", shared.host.token);
        let headers =
            [("Authorization", &*bearer), ("Expect", "100-continue"), ("Content-Length", "9999999999")];
        waits.send("PUT", "/xfer/f", &headers, b"").unwrap();
        assert_eq!(waits.read_head().unwrap().status, 405);
        assert_eq!(shared.ask("DELETE", "/", &[], b"").status, 403);
        assert_eq!(shared.ask("HEAD", &format!("/{name}?part"), &[], b"").status, 404);
        assert_eq!(
            shared.ask("OPTIONS", "/", &[], b"").header("allow").unwrap(),
            "GET, HEAD, OPTIONS, PROPFIND"
        );
        let properties = shared.ask("PROPFIND", "/", &[("Depth", "1")], b"");
        assert_eq!(properties.status, 207);
        let text = properties.text();
        assert!(
            text.contains("<D:collection/>") && text.contains(&format!("<D:href>/xfer/{name}</D:href>")),
            "{text}"
        );
        assert!(text.contains("a (1) &amp; b.txt") && text.contains("<D:getcontentlength>8<"), "{text}");
        assert_eq!(shared.ask("PROPFIND", "/other", &[], b"").status, 404);
        assert_eq!(shared.names(""), ["a (1) & b.txt"]);
    }
}

#[test]
fn a_single_file_that_became_something_else_is_not_found() {
    let mut shared = Shared::start("0.46.0");
    std::fs::write(shared.outside().join("f"), "SECRET").unwrap();
    shared.write("d/f", "the file");
    let (dir, file) = (shared.root().join("d"), shared.root().join("d/f"));
    ok(&shared.client.call("xfer_share", &json!({ "path": file }).to_string()));
    let refused = |how: &str| {
        for (method, path) in [("GET", "/"), ("GET", "/f"), ("HEAD", "/f"), ("PROPFIND", "/")] {
            let reply = shared.ask(method, path, &[], b"");
            assert_eq!(reply.status, 404, "{how}: {method} {path}");
            assert!(method == "HEAD" || reply.text().contains("no longer there"), "{how}: {}", reply.text());
        }
    };
    std::fs::remove_file(&file).unwrap();
    refused("removed");
    symlink(shared.outside().join("f"), &file).unwrap();
    refused("a link");
    std::fs::rename(&dir, shared.root().join("moved")).unwrap();
    symlink(shared.outside(), &dir).unwrap();
    refused("a link above it");
    std::fs::remove_file(&dir).unwrap();
    shared.write("d/f", "again");
    assert_eq!(shared.get("/f").text(), "again", "and it still works");
}

#[test]
fn the_credentials_are_seen_nowhere() {
    for version in VERSIONS {
        let mut shared = Shared::with(version, Setup::default().env("A2MCP_LOG", "trace"));
        shared.write("f", "x");
        let port = shared.result["port"].as_u64().unwrap() as u16;
        let mut direct = Connection::open(port);
        assert_eq!(direct.request("GET", "/xfer/f", &[], b"").status, 401, "dufs itself wants credentials");
        let mut everything = String::new();
        for reply in [
            shared.get("/f"),
            shared.get("/"),
            shared.get("/?json"),
            shared.ask("GET", "/f", &[("Authorization", "Basic YTpi")], b""),
            shared.ask("PROPFIND", "/", &[], b""),
            shared.ask("OPTIONS", "/", &[], b""),
        ] {
            assert!(reply.header("www-authenticate").is_none());
            everything += &format!("{:?}{}", reply.headers, reply.text());
        }
        // The note in the keeper's memory is the only place; a copy of it from there.
        let password = password(&shared.host.instance);
        everything += &format!("{}{}", shared.status(), shared.host.status());
        everything += &shared.result.to_string();
        everything += &shared.host.log();
        everything += &format!("{:?}{:?}", shared.host.audit(), shared.host.frames());
        for pid in [shared.dufs_pid(), shared.host.child.id(), std::process::id()] {
            everything += &String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/cmdline")).unwrap());
            everything += &String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/environ")).unwrap());
        }
        let run = a2mcp::rundir::open().unwrap();
        let files = [run.as_path(), shared.host.dir.path(), &shared.host.path("a2mcp.state")];
        for entry in files.iter().flat_map(|dir| std::fs::read_dir(dir).unwrap().flatten()) {
            if entry.file_type().unwrap().is_file() {
                everything += &std::fs::read_to_string(entry.path()).unwrap_or_default();
            }
        }
        assert!(everything.len() > 4000);
        use base64::Engine as _;
        let pair = base64::engine::general_purpose::STANDARD.encode(format!("a2mcp:{password}"));
        for secret in [password.as_str(), &pair] {
            assert!(!everything.contains(secret), "the credentials are in the open");
        }
        let with = [("Authorization", format!("Basic {pair}"))];
        let reply = direct.request("GET", "/xfer/f", &[(with[0].0, &with[0].1)], b"");
        assert_eq!((reply.status, reply.text().as_str()), (200, "x"), "they are the ones in force");
    }
}

/// The password of the running share, from the keeper's note.
fn password(instance: &str) -> String {
    let mut keeper =
        std::os::unix::net::UnixStream::connect(a2mcp::keeper::socket_path(instance).unwrap()).unwrap();
    keeper.write_all(b"{\"verb\":\"hello\",\"protocol\":1}\n{\"verb\":\"status\"}\n").unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(keeper));
    let status: Value = serde_json::from_str(&lines.nth(1).unwrap().unwrap()).unwrap();
    let children = status["ok"]["children"].as_array().unwrap().clone();
    let note = children.last().unwrap()["note"].as_str().unwrap().to_owned();
    serde_json::from_str::<Value>(&note).unwrap()["password"].as_str().unwrap().to_owned()
}

#[test]
fn a_share_ends_with_its_time() {
    let mut shared = Shared::start("0.46.0");
    shared.write("f", "x");
    let share = json!({ "path": shared.root(), "ttlSeconds": 1 }).to_string();
    let result = ok(&shared.client.call("xfer_share", &share));
    assert_eq!(shared.get("/f").status, 200);
    eventually("the end", || (shared.get("/f").status == 404).then_some(()));
    assert_eq!(shared.status(), json!({"serving": false}));
    eventually("the record", || {
        shared.audited().last().is_some_and(|last| last["why"] == "ttl expired").then_some(())
    });
    assert!(!listens(result["port"].as_u64().unwrap()));
    assert_eq!(shared.host.status()["share"], Value::Null);
}

#[test]
fn variables_of_the_hosts_environment_change_nothing() {
    let setup = Setup::default()
        .env("DUFS_ALLOW_ALL", "true")
        .env("DUFS_ALLOW_SYMLINK", "true")
        .env("DUFS_ENABLE_CORS", "true")
        .env("DUFS_PATH_PREFIX", "other")
        .env("DUFS_SERVE_PATH", "/etc")
        .env("DUFS_PORT", "1")
        .env("RUST_BACKTRACE", "full");
    let shared = Shared::with("0.46.0", setup);
    let environ = std::fs::read(format!("/proc/{}/environ", shared.dufs_pid())).unwrap();
    let environ = String::from_utf8_lossy(&environ).into_owned();
    let is_left = environ.split('\0').any(|name| name.starts_with("DUFS_") || name.starts_with("RUST_"));
    assert!(!is_left, "{environ:?}");
    let run = a2mcp::rundir::open().unwrap();
    let begins = format!("{}-", shared.host.port);
    let socket = crate::share::names(&run).into_iter().find(|name| name.starts_with(&begins)).unwrap();
    let mode = std::fs::metadata(run.join(&socket)).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&mode) & 0o777, 0o600, "{socket}");
    std::fs::write(shared.outside().join("secret"), "SECRET").unwrap();
    symlink(shared.outside().join("secret"), shared.root().join("file")).unwrap();
    shared.write("f", "x");
    let reply = shared.get("/f");
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, None));
    assert_eq!(shared.get("/file").status, 404);
}
