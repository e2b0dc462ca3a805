//! The process environment, read once at start. Everything below takes an [`Env`] instead of asking
//! the process again: tests build one, and nothing changes under a running sidecar.
//!
//! It holds no secret that it would show: the token lives in the config file only, and a proxy's
//! password stays inside [`Proxy`].

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::Proxy;

/// What a2mcp wants to know of its environment. Empty variables count as unset.
#[derive(Clone, Debug, Default)]
pub struct Env {
    /// `HOME`.
    pub home: Option<PathBuf>,
    /// `PATH`, for looking up dufs and cloudflared.
    pub path: Option<OsString>,
    /// `A2MCP_CONFIG`: the config file, wherever the agent directory is.
    pub config: Option<PathBuf>,
    /// `A2MCP_AUDIT`: the audit file, wherever the agent directory is.
    pub audit: Option<PathBuf>,
    /// `A2MCP_DOWNLOAD_BASE`: where to download from instead of GitHub.
    pub download_base: Option<OsString>,
    /// `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`, in either case.
    pub proxy: Proxy,
    /// `PI_CODING_AGENT_DIR`: omp's own way to move its agent directory.
    pub pi_agent_dir: Option<PathBuf>,
    /// The real user id.
    pub uid: u32,
    /// The working directory at start; relative paths are meant against it.
    pub cwd: PathBuf,
}

impl Env {
    /// Reads the environment of this process.
    pub fn capture() -> Env {
        let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let text = |names: &[&str]| names.iter().find_map(|name| var(name)?.into_string().ok());
        let proxy = text(&["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"]);
        Env {
            home: var("HOME").map(PathBuf::from),
            path: var("PATH"),
            config: var("A2MCP_CONFIG").map(PathBuf::from),
            audit: var("A2MCP_AUDIT").map(PathBuf::from),
            download_base: var("A2MCP_DOWNLOAD_BASE"),
            proxy: Proxy::new(proxy, text(&["no_proxy", "NO_PROXY"])),
            pi_agent_dir: var("PI_CODING_AGENT_DIR").map(PathBuf::from),
            uid: rustix::process::getuid().as_raw(),
            cwd: std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/")),
        }
    }

    /// `path` as an absolute path without `.` parts. Links and `..` are left to the file system.
    pub fn absolute(&self, path: &Path) -> PathBuf {
        self.cwd.join(path).components().collect()
    }
}
