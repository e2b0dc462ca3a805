//! A sidecar with an open share over a real dufs, and requests on `/xfer/`.

use std::net::TcpStream;
use std::path::{Path, PathBuf};

use a2mcp::xfer::path::RoutePath;
use serde_json::{Value, json};

use crate::parts::root;
use crate::support::http::{Client, Connection, Reply};
use crate::support::{Host, Setup, eventually};

/// The versions of dufs that everything must work on.
pub(crate) const VERSIONS: [&str; 2] = ["0.46.0", "0.47.0"];

/// The program of one version; `tests/setup` builds it.
pub(crate) fn dufs(version: &str) -> PathBuf {
    let tools = root().join("target/tools");
    let path = match version {
        "0.46.0" => tools.join("bin/dufs"),
        other => tools.join(format!("dufs-{other}/bin/dufs")),
    };
    assert!(path.exists(), "{} is missing: run tests/setup, which builds it", path.display());
    path
}

/// A host with a folder that is shared.
pub(crate) struct Shared {
    pub(crate) host: Host,
    pub(crate) client: Client,
    /// The result of `xfer_share`.
    pub(crate) result: Value,
    dir: tempfile::TempDir,
}

impl Shared {
    pub(crate) fn start(version: &str) -> Self {
        Self::with(version, Setup::default())
    }

    pub(crate) fn with(version: &str, setup: Setup) -> Self {
        Self::of(&dufs(version), setup)
    }

    pub(crate) fn of(program: &Path, setup: Setup) -> Self {
        let host = setup.config(&config(program)).start();
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("root")).unwrap();
        std::fs::create_dir_all(dir.path().join("outside")).unwrap();
        let client = host.client();
        let mut shared = Self { host, client, result: Value::Null, dir };
        shared.share();
        shared
    }

    /// Shares the folder, again if need be.
    pub(crate) fn share(&mut self) {
        let path = self.root();
        self.result = ok(&self.client.call("xfer_share", &json!({ "path": path }).to_string()));
    }

    /// The shared folder.
    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join("root")
    }

    /// A folder beside it.
    pub(crate) fn outside(&self) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join("outside")
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.root().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.root().join(name)).ok()
    }

    /// Names in the shared folder, hidden ones too.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        names(&self.root().join(folder))
    }

    /// One request with the token; `path` begins behind `/xfer`.
    pub(crate) fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        self.host.http(method, &format!("/xfer{path}"), headers, body)
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        self.ask("GET", path, &[], b"")
    }

    pub(crate) fn put(&self, path: &str, body: impl AsRef<[u8]>) -> u16 {
        self.ask("PUT", path, &[], body.as_ref()).status
    }

    /// So many bytes of an unfinished upload are on the disk.
    pub(crate) fn arrived(&self, path: &str) -> Option<u64> {
        let (folder, name) = path.trim_start_matches('/').rsplit_once('/').unwrap_or(("", &path[1..]));
        // It has its hidden name by where it really is.
        let folder = self.root().join(folder).canonicalize().ok()?;
        let real = Path::new("/xfer").join(folder.strip_prefix(self.root()).unwrap()).join(name);
        let part = RoutePath::parse(real.to_str().unwrap()).unwrap().part("");
        let end = part.names().last().unwrap().rsplit('-').next().unwrap().to_owned();
        let entries = std::fs::read_dir(folder).unwrap().flatten();
        let mut parts = entries.filter(|entry| entry.file_name().to_string_lossy().ends_with(&end));
        Some(parts.next()?.metadata().ok()?.len())
    }

    /// The length that `HEAD …?part` says.
    pub(crate) fn part(&self, path: &str) -> Option<u64> {
        let reply = self.ask("HEAD", &format!("{path}?part"), &[], b"");
        match reply.status {
            200 => Some(reply.header("content-length").unwrap().parse().unwrap()),
            404 => None,
            status => panic!("{status}"),
        }
    }

    /// Sends the head of an upload of `length` bytes.
    pub(crate) fn begin_put(&self, path: &str, length: u64) -> Connection {
        self.begin_put_if(path, length, "")
    }

    /// As [`Shared::begin_put`], with more header lines.
    pub(crate) fn begin_put_if(&self, path: &str, length: u64, more: &str) -> Connection {
        let mut connection = Connection::open(self.host.port);
        let head = format!(
            "PUT /xfer{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {}\r\n{more}Content-Length: {length}\r\n\r\n",
            self.host.token
        );
        connection.write(head.as_bytes()).unwrap();
        connection
    }

    /// Uploads `bytes` of a file of `length` bytes, then breaks the connection; returns when what came
    /// is kept.
    pub(crate) fn cut_put(&self, path: &str, bytes: &[u8], length: u64) {
        let mut connection = self.begin_put(path, length);
        connection.write(bytes).unwrap();
        eventually("the bytes' arrival", || (self.arrived(path)? == bytes.len() as u64).then_some(()));
        connection.socket().shutdown(std::net::Shutdown::Both).unwrap();
        eventually("the end of the upload", || {
            let asked = self.ask("HEAD", &format!("{path}?part"), &[], b"");
            (asked.status != 409).then_some(())
        });
    }

    /// The pid of its dufs.
    pub(crate) fn dufs_pid(&self) -> u32 {
        dufs_pid(&self.host).expect("a dufs that runs")
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}/xfer{path}", self.host.port)
    }

    pub(crate) fn status(&mut self) -> Value {
        ok(&self.client.call("xfer_status", "{}"))
    }

    /// The share answers again.
    pub(crate) fn until_served(&self) {
        eventually("the file server", || (self.get("/").status == 200).then_some(()));
    }

    /// The arguments of the `xfer` records.
    pub(crate) fn audited(&self) -> Vec<Value> {
        audited(&self.host)
    }
}

pub(crate) fn audited(host: &Host) -> Vec<Value> {
    let records = host.audit();
    let own = records.iter().filter(|record| record["tool"] == "xfer");
    own.map(|record| {
        assert_eq!(record["phase"], "done");
        serde_json::from_str(record["args"].as_str().unwrap()).unwrap()
    })
    .collect()
}

pub(crate) fn config(program: &Path) -> String {
    json!({ "xfer": { "dufs": program } }).to_string()
}

/// The running child of a host's keeper that serves files.
pub(crate) fn dufs_pid(host: &Host) -> Option<u32> {
    let status = host.status();
    let children = status["keeper"]["children"].as_array()?;
    let running = children.iter().find(|child| child["purpose"] == "xfer" && child["state"] == "running");
    running.map(|child| child["pid"].as_u64().unwrap() as u32)
}

/// The JSON of a result's one text block, which is no error.
pub(crate) fn ok(result: &Value) -> Value {
    assert_eq!(result["isError"], false, "{result}");
    assert_eq!(result["content"].as_array().unwrap().len(), 1);
    serde_json::from_str(result["content"][0]["text"].as_str().unwrap()).unwrap()
}

/// The text of a result that is an error.
pub(crate) fn error(result: &Value) -> String {
    assert_eq!(result["isError"], true, "{result}");
    result["content"][0]["text"].as_str().unwrap().to_owned()
}

pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Whether anybody listens on a loopback port.
pub(crate) fn listens(port: u64) -> bool {
    TcpStream::connect(("127.0.0.1", port as u16)).is_ok()
}
