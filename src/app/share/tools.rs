//! `xfer_share`, `xfer_status`, `xfer_stop`: the sidecar's own tools. They never reach the host, its
//! registry or its approval gate.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::sync::{Semaphore, oneshot};

use super::owner::Command;
use super::{Phase, Share};
use crate::app::exchange::Exchange;
use crate::app::{Core, now_ms};
use crate::config::follow_links;
use crate::control;
use crate::frame::raw::quote;
use crate::install::{Progress, Tool};
use crate::mcp::call::ToolResult;
use crate::rundir;
use crate::text::{clean, rfc3339, with_causes};
use crate::xfer::{Installed, ROUTE, Terms};

/// How long a share lasts unless the caller says otherwise.
const DEFAULT_TTL: u64 = 3600;
/// How long one may last.
const MAX_TTL: u64 = 366 * 86_400;
/// For so long other bridges are asked what is theirs.
const OTHERS: Duration = Duration::from_secs(1);
/// So many entries of what is to be shared are looked at for a bridge's directory.
const MAX_LOOK: usize = 20_000;
/// So much file work goes on at a time.
pub(in crate::app) const FILE_THREADS: usize = 8;
static FILE_WORK: Semaphore = Semaphore::const_new(FILE_THREADS);
/// Never shared, nor anything inside.
const SYSTEM: [&str; 3] = ["/proc", "/sys", "/dev"];
/// But this one, which holds files like any other place.
const MEMORY: &str = "/dev/shm";
/// Where agents keep their own files, below the home.
const AGENT_DIRS: [&str; 2] = [".omp/agent", ".a2mcp"];
/// Said instead of a public address (contract 5).
const NO_TUNNEL: &str = "no public address — `/a2mcp tunnel` is closed; use an SSH port forward to the \
                         bridge port, or ask the operator to run `/a2mcp tunnel`";

/// The three, as `tools/list` shows them.
pub(in crate::app) const OWN_TOOLS: [(&str, &str); 3] = [
    (
        "xfer_share",
        r#"{"name":"xfer_share","title":"Share files","description":"Serves a file or a folder of this machine over HTTP on the bridge's /xfer/ route, behind the same bearer token, until it expires. Callers download (Range works), list (?json), get a folder as an archive (?zip) and upload (PUT). One share at a time: a second one replaces the first. The result holds ready-to-use curl lines; put the token in the place of <TOKEN>.","inputSchema":{"type":"object","properties":{"path":{"type":"string","description":"The file or folder to serve; ~ is the home of the host, a relative path is meant against its working directory"},"ttlSeconds":{"type":"integer","minimum":1,"maximum":31622400,"default":3600,"description":"For how long, in seconds"}},"required":["path"]},"annotations":{"title":"Share files","readOnlyHint":false,"destructiveHint":false,"idempotentHint":false,"openWorldHint":true}}"#,
    ),
    (
        "xfer_status",
        r#"{"name":"xfer_status","title":"Show the share","description":"Says what xfer_share serves now, where, and until when.","inputSchema":{"type":"object","properties":{}},"annotations":{"title":"Show the share","readOnlyHint":true,"destructiveHint":false,"idempotentHint":true,"openWorldHint":false}}"#,
    ),
    (
        "xfer_stop",
        r#"{"name":"xfer_stop","title":"Stop sharing","description":"Ends what xfer_share serves. What was uploaded stays.","inputSchema":{"type":"object","properties":{}},"annotations":{"title":"Stop sharing","readOnlyHint":false,"destructiveHint":false,"idempotentHint":true,"openWorldHint":false}}"#,
    ),
];

/// One of the sidecar's own tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::app) enum OwnTool {
    Share,
    Status,
    Stop,
}

impl OwnTool {
    /// The one of this name.
    pub(in crate::app) fn named(name: &str) -> Option<Self> {
        match name {
            "xfer_share" => Some(Self::Share),
            "xfer_status" => Some(Self::Status),
            "xfer_stop" => Some(Self::Stop),
            _ => None,
        }
    }
}

impl Core {
    /// Does what one of the own tools is asked.
    pub(in crate::app) async fn run_own_tool(
        self: &Rc<Self>,
        tool: OwnTool,
        exchange: &Exchange,
        arguments: &[u8],
    ) -> ToolResult {
        let sid = &exchange.seat().sid;
        let done = match tool {
            OwnTool::Share => self.xfer_share(exchange, sid, arguments).await,
            OwnTool::Status => Ok(self.xfer_status()),
            OwnTool::Stop => self.xfer_stop(sid).await,
        };
        match done {
            Ok(value) => {
                let text = quote(&format!("{value:#}"));
                let text = format!(r#"{{"content":[{{"type":"text","text":{text}}}],"isError":false}}"#);
                ToolResult { text: text.into(), is_error: false }
            }
            Err(reason) => ToolResult::error(&reason),
        }
    }

    async fn xfer_share(
        self: &Rc<Self>,
        exchange: &Exchange,
        sid: &str,
        arguments: &[u8],
    ) -> Result<Value, String> {
        let arguments: Map<String, Value> = serde_json::from_slice(arguments).unwrap_or_default();
        let path = arguments.get("path").and_then(Value::as_str).filter(|path| !path.is_empty());
        let path = path.ok_or("xfer_share needs a 'path' — the file or directory to serve")?;
        let ttl_seconds = ttl(arguments.get("ttlSeconds"))?;
        let wanted = self.expand(path);
        let mut forbidden = self.own_files();
        forbidden.others = self.other_bridges().await;
        let (path, is_file) = aside(move || examine(&wanted, &forbidden)).await?;
        let (program, installed) = self.file_server(Some(exchange)).await?;
        let (answer, answered) = oneshot::channel();
        // Its time begins when it serves: starting it, or getting the program, may take a while.
        let terms = Terms {
            id: format!("{:08x}", uuid::Uuid::new_v4().as_fields().0),
            path,
            is_file,
            started_ms: now_ms(),
            expires_ms: now_ms() + ttl_seconds * 1000,
            ttl_seconds,
        };
        let command = Command::Share { terms, program, installed, sid: sid.to_owned(), answer };
        let opened = async {
            self.shares.commands.send(command).await.ok()?;
            answered.await.ok()
        };
        let (share, replaced) = opened.await.ok_or("the bridge is stopping")??;
        Ok(self.describe(&share, replaced))
    }

    /// Judges what is shared again, before a file server is let loose on it anew: it may be something
    /// else by now.
    pub(super) async fn judge_again(&self, terms: &Terms) -> Result<(), String> {
        let (own, path, is_file) = (self.own_files(), terms.path.clone(), terms.is_file);
        let found = aside(move || reason_against(&path, &own)).await?;
        match found == (terms.path.clone(), is_file) {
            true => Ok(()),
            false => Err("it was replaced by something else".into()),
        }
    }

    /// The file server's program, and what is known of it when this bridge installed it; gets it when
    /// it is nowhere, which `exchange` is told of.
    pub(super) async fn file_server(
        &self,
        exchange: Option<&Exchange>,
    ) -> Result<(PathBuf, Option<Installed>), String> {
        let found = self.obtain(Tool::Dufs, async |progress: &Progress| {
            if let Some(exchange) = exchange {
                tell(exchange, progress);
            }
        });
        match found.await {
            Ok(found) => {
                let installed = found.downloaded.then(|| Installed {
                    version: found.version.unwrap_or_default(),
                    path: found.path.clone(),
                    sha256: found.sha256,
                });
                Ok((found.path, installed))
            }
            Err(error) => Err(with_causes(&error)),
        }
    }

    fn describe(&self, share: &Share, replaced: bool) -> Value {
        let base = self.url();
        let public = self.public_url();
        let name = match (share.terms.is_file, share.terms.path.file_name().and_then(|name| name.to_str())) {
            (true, Some(name)) => crate::xfer::path::escaped(name),
            _ => "<name>".to_owned(),
        };
        let at = |base: &str| format!("{}{ROUTE}", base.trim_end_matches('/'));
        let curl = |how: &str, base: &str| {
            format!("curl -H 'Authorization: Bearer <TOKEN>' {how} {}{name}", at(base))
        };
        json!({
            "url": at(&base),
            "publicUrl": public.as_deref().map(at),
            "route": ROUTE,
            "path": share.terms.shown_path(),
            "port": share.port.get(),
            "replaced": replaced,
            "startedAt": rfc3339(share.terms.started_ms),
            "expiresAt": rfc3339(share.terms.expires_ms),
            "usage": {
                "download": curl("-O", &base),
                "upload": if share.terms.is_file {
                    "nothing can be uploaded: this share is one single file".to_owned()
                } else {
                    curl("-T <local>", &base)
                },
                "public": public.as_deref().map_or(NO_TUNNEL.to_owned(), |public| curl("-O", public)),
            },
            "installed": { "dufs": share.installed },
        })
    }

    fn xfer_status(&self) -> Value {
        let Some(share) = self.current_share() else {
            return match &*self.shares.unservable.borrow() {
                Some((path, reason)) => json!({ "serving": false, "path": path, "failed": reason }),
                None => json!({ "serving": false }),
            };
        };
        if let Phase::Failed(reason) = &*share.phase.borrow() {
            return json!({ "serving": false, "path": share.terms.shown_path(), "failed": reason });
        }
        let at = |base: &str| format!("{}{ROUTE}", base.trim_end_matches('/'));
        json!({
            "serving": true,
            "path": share.terms.shown_path(),
            "port": share.port.get(),
            "url": at(&self.url()),
            "publicUrl": self.public_url().as_deref().map(at),
            "route": ROUTE,
            "startedAt": rfc3339(share.terms.started_ms),
            "expiresAt": rfc3339(share.terms.expires_ms),
        })
    }

    async fn xfer_stop(&self, sid: &str) -> Result<Value, String> {
        let (answer, answered) = oneshot::channel();
        let _ = self.shares.commands.send(Command::Stop { sid: sid.to_owned(), answer }).await;
        Ok(match answered.await.ok().flatten() {
            Some(path) => json!({ "stopped": true, "path": path }),
            None => json!({ "stopped": false, "note": "nothing was shared" }),
        })
    }

    /// A path as the host means it.
    fn expand(&self, path: &str) -> PathBuf {
        let (home, cwd) = (Path::new(&self.hello.host.home), Path::new(&self.hello.host.cwd));
        let path = match path.strip_prefix('~') {
            Some("") => home.to_path_buf(),
            Some(rest) if rest.starts_with('/') => home.join(rest.trim_start_matches('/')),
            _ => PathBuf::from(path),
        };
        Path::new("/").join(cwd).join(path)
    }

    /// What no share may touch: our own directories and files, and other bridges' as far as known.
    fn own_files(&self) -> OwnFiles {
        let canonical = |path: &Path| {
            let path = follow_links(path);
            path.canonicalize().unwrap_or_else(|_| {
                let parent = path.parent().and_then(|parent| parent.canonicalize().ok());
                parent.unwrap_or_default().join(path.file_name().unwrap_or_default())
            })
        };
        let mut dirs: Vec<(PathBuf, &str)> = [self.dir.root(), &self.dir.state_dir()]
            .map(|dir| (canonical(dir), "its agent directory"))
            .into();
        let homes = [Some(Path::new(&self.hello.host.home)), self.installer.home()];
        let known = homes.into_iter().flatten().flat_map(|home| AGENT_DIRS.map(|dir| home.join(dir)));
        let others = known.map(|dir| (dir, "an agent directory"));
        let others = others.chain(rundir::open().ok().map(|dir| (dir, "the directory of its sockets")));
        let programs = self.installer.dirs().into_iter().map(|dir| (dir, "the directory of its programs"));
        dirs.extend(others.chain(programs).filter_map(|(dir, what)| Some((dir.canonicalize().ok()?, what))));
        OwnFiles {
            dirs,
            others: Vec::new(),
            files: vec![
                canonical(self.dir.config_file()),
                self.dir.config_file().to_path_buf(),
                canonical(self.dir.audit_file()),
                self.dir.audit_file().to_path_buf(),
                canonical(&self.dir.stderr(self.address.port())),
            ],
        }
    }

    /// What belongs to the user's other bridges that run now, as far as they say so at once.
    async fn other_bridges(&self) -> Vec<PathBuf> {
        let found = tokio::time::timeout(OTHERS, control::find()).await;
        let others = found.into_iter().flatten().flatten().filter_map(|found| found.status.ok());
        let others = others.filter(|status| status.pid != std::process::id());
        others
            .flat_map(|status| [status.agent_dir, status.config_file, status.audit_file])
            .filter_map(|path| Path::new(&path).canonicalize().ok())
            .collect()
    }
}

/// What a caller hears of a program that is being installed.
fn tell(exchange: &Exchange, progress: &Progress) {
    match progress {
        Progress::Received { bytes, total } => {
            let members = format!(r#","total":{total},"message":"downloading the file server""#);
            exchange.tell_progress(*bytes as f64, &bytes.to_string(), &members);
        }
        Progress::Installing { version, .. } => {
            let data = quote(&format!("installing the file server, dufs {version}"));
            let text = format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"level":"info","logger":"a2mcp","data":{data}}}}}"#
            );
            exchange.tell(vec![text.into()]);
        }
        Progress::Waiting | Progress::Unpacking => {}
    }
}

struct OwnFiles {
    /// No share is in one, nor holds one; and what it is.
    dirs: Vec<(PathBuf, &'static str)>,
    /// No share is or holds one.
    files: Vec<PathBuf>,
    /// Nor one of these, which are other bridges'.
    others: Vec<PathBuf>,
}

impl OwnFiles {
    fn forbids(&self, path: &Path) -> Option<String> {
        let is_system = |system: &&&str| path.starts_with(system) && !path.starts_with(MEMORY);
        if let Some(system) = SYSTEM.iter().find(is_system) {
            return Some(format!("{system} is the system's own and never shared"));
        }
        let touches = |dir: &Path| dir.starts_with(path) || path.starts_with(dir);
        if let Some((dir, what)) = self.dirs.iter().find(|(dir, _)| touches(dir)) {
            let how = if dir.starts_with(path) { "it holds" } else { "it is inside" };
            let how = if dir == path { "it is" } else { how };
            return Some(format!("{how} this bridge's own files ({what}); name another directory"));
        }
        if self.files.iter().any(|file| file.starts_with(path)) {
            return Some("it holds this bridge's config, audit or log; name another directory".into());
        }
        if self.others.iter().any(|other| other.starts_with(path)) {
            return Some("it holds the files of another bridge; name another directory".into());
        }
        if path.ancestors().any(is_agents) {
            return Some(
                "it is or is inside the agent directory of another bridge; name another directory".into(),
            );
        }
        let inside = bridge_inside(path)?;
        let inside = clean(&inside.to_string_lossy(), 400).into_owned();
        Some(format!("it holds the agent directory of another bridge, {inside}; name another directory"))
    }
}

/// Whether it looks like the directory of a bridge, running or not.
fn is_agents(dir: &Path) -> bool {
    ["a2mcp.json", "a2mcp.state"].iter().all(|name| dir.join(name).symlink_metadata().is_ok())
}

/// The first directory of a bridge among the first [`MAX_LOOK`] entries below `root`, level by level; its
/// path from there.
fn bridge_inside(root: &Path) -> Option<PathBuf> {
    let mut folders = VecDeque::from([root.to_path_buf()]);
    let mut seen = 0;
    while let Some(folder) = folders.pop_front() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            seen += 1;
            if seen > MAX_LOOK {
                return None;
            }
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let folder = entry.path();
            if is_agents(&folder) {
                return folder.strip_prefix(root).ok().map(Path::to_path_buf);
            }
            folders.push_back(folder);
        }
    }
    None
}

fn ttl(value: Option<&Value>) -> Result<u64, String> {
    let seconds = match value {
        None | Some(Value::Null) => return Ok(DEFAULT_TTL),
        Some(value) => value.as_u64().or_else(|| {
            value
                .as_f64()
                .filter(|seconds| seconds.fract() == 0.0 && *seconds >= 0.0)
                .map(|seconds| seconds as u64)
        }),
    };
    seconds.filter(|seconds| (1..=MAX_TTL).contains(seconds)).ok_or_else(|| {
        format!("xfer_share: 'ttlSeconds' must be a whole number of seconds from 1 to {MAX_TTL}")
    })
}

/// The canonical path of what is to be shared, and whether it is one file; blocks.
fn examine(wanted: &Path, own: &OwnFiles) -> Result<(PathBuf, bool), String> {
    reason_against(wanted, own)
        .map_err(|reason| format!("cannot serve {}: {reason}", clean(&wanted.to_string_lossy(), 400)))
}

/// As [`examine`]; the reason alone.
fn reason_against(wanted: &Path, own: &OwnFiles) -> Result<(PathBuf, bool), String> {
    let cannot = |reason: &str| reason.to_owned();
    let path = wanted.canonicalize().map_err(|error| cannot(&error.to_string()))?;
    let meta = path.metadata().map_err(|error| cannot(&error.to_string()))?;
    if !meta.is_file() && !meta.is_dir() {
        return Err(cannot("it is neither a file nor a directory"));
    }
    if path.to_str().is_none() {
        return Err(cannot("its path is not UTF-8"));
    }
    if path == Path::new("/") {
        return Err(cannot("the whole file system is never shared; name the directory that is needed"));
    }
    if let Some(reason) = own.forbids(&path) {
        return Err(reason);
    }
    // What cannot be read now would be an empty listing later.
    let readable = match meta.is_dir() {
        true => std::fs::read_dir(&path).map(drop),
        false => std::fs::File::open(&path).map(drop),
    };
    readable.map_err(|error| cannot(&error.to_string()))?;
    Ok((path, meta.is_file()))
}

/// Runs file work beside the one thread everything else runs on. At most [`FILE_THREADS`] at a time: a file
/// system that hangs holds up the share and nothing else.
pub(super) async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    // It is never closed.
    let _permit = FILE_WORK.acquire().await;
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ttl_is_a_whole_number_of_seconds() {
        assert_eq!(ttl(None), Ok(3600));
        assert_eq!(ttl(Some(&Value::Null)), Ok(3600));
        assert_eq!(ttl(Some(&json!(5))), Ok(5));
        assert_eq!(ttl(Some(&json!(60.0))), Ok(60));
        for bad in [json!(0), json!(-1), json!(1.5), json!("60"), json!(1e300), json!([]), json!(31_622_401)]
        {
            assert!(ttl(Some(&bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_holds_our_own_files_is_not_shared() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        let agent = base.join("home/agent");
        std::fs::create_dir_all(agent.join("a2mcp.state")).unwrap();
        std::fs::create_dir_all(agent.join("exports")).unwrap();
        std::fs::create_dir_all(base.join("logs")).unwrap();
        std::fs::create_dir_all(base.join("fine")).unwrap();
        std::fs::create_dir_all(base.join("run/a2mcp/in")).unwrap();
        std::fs::create_dir_all(base.join("other/a2mcp.state")).unwrap();
        std::fs::create_dir_all(base.join("other/deep")).unwrap();
        std::fs::create_dir_all(base.join("near/a/idle/a2mcp.state")).unwrap();
        std::fs::write(base.join("near/a/idle/a2mcp.json"), "{}").unwrap();
        std::fs::write(base.join("other/a2mcp.json"), "{}").unwrap();
        std::fs::write(base.join("other/deep/f"), "").unwrap();
        std::fs::write(agent.join("a2mcp.json"), "{}").unwrap();
        std::os::unix::fs::symlink(&agent, base.join("fine/link")).unwrap();
        let own = OwnFiles {
            others: Vec::new(),
            dirs: vec![(agent.clone(), "its agent directory"), (base.join("run/a2mcp"), "sockets")],
            files: vec![agent.join("a2mcp.json"), base.join("logs/audit")],
        };
        for path in [
            PathBuf::from("/"),
            PathBuf::from("/./.."),
            base.clone(),
            base.join("home"),
            agent.clone(),
            agent.join("exports"),
            agent.join("exports/.."),
            base.join("run"),
            base.join("run/a2mcp/in"),
            base.join("other"),
            base.join("other/deep/f"),
            base.join("near"),
            PathBuf::from("/proc"),
            PathBuf::from("/proc/self/fd"),
            PathBuf::from("/sys/kernel"),
            PathBuf::from("/dev"),
            PathBuf::from("/dev/pts"),
            agent.join("a2mcp.state"),
            agent.join("a2mcp.json"),
            base.join("fine/link"),
            base.join("logs"),
            base.join("missing"),
            PathBuf::from("/dev/null"),
        ] {
            let refused = examine(&path, &own);
            assert!(refused.is_err_and(|why| why.starts_with("cannot serve ")), "{}", path.display());
        }
        assert_eq!(examine(&base.join("fine"), &own), Ok((base.join("fine"), false)));
    }
}
