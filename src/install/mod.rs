//! How the sidecar gets dufs and cloudflared (contract 14): the config's path, else PATH, else what
//! was installed earlier, else a pinned build, downloaded.
//!
//! It finds and fetches; running the programs, auditing and the words to callers are others'
//! business. A download is checked against its pinned hash before anything is unpacked, and lands in
//! `~/.local/share/a2mcp/bin` by one rename. What a2mcp did not install is never replaced, and what
//! vanished after it was installed is reported instead of being fetched over and over.
//!
//! One installation of a program at a time: within a process those who come later wait for the
//! first and share its outcome; between processes a lock file does the same.

mod error;
mod fetch;
mod lookup;
pub mod pins;
mod place;
mod registry;
mod unpack;

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use crate::config::{AgentDir, Env};
use crate::outbound::Outbound;

pub use error::{Download, InstallError};
pub use pins::Pin;
use registry::Entry;

/// A program that the sidecar runs as a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// The file server.
    Dufs,
    /// The tunnel.
    Cloudflared,
}

impl Tool {
    /// Its file name, and its name in the config.
    pub fn name(self) -> &'static str {
        match self {
            Tool::Dufs => "dufs",
            Tool::Cloudflared => "cloudflared",
        }
    }

    /// Variables that change what it does, by how their names begin: no child of ours may see them.
    pub fn scrubbed_env(self) -> &'static [&'static str] {
        match self {
            // Those of Rust, too: its error would be lost in a backtrace.
            Tool::Dufs => &["DUFS_", "RUST_"],
            Tool::Cloudflared => &["TUNNEL_", "NO_TLS_VERIFY", "NO_AUTOUPDATE", "LOCAL_SSH_PORT"],
        }
    }
}

impl fmt::Display for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A program that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// What it says its version is, if it says so.
    pub version: Option<String>,
    /// Where it is; absolute.
    pub path: PathBuf,
    /// Its hash, lower-case hex.
    pub sha256: String,
    /// Whether a2mcp put it there, now or earlier.
    pub downloaded: bool,
}

/// What goes on before there is an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The same program is being installed already, by this process or another.
    Waiting,
    /// About to be fetched, unpacked and installed: the moment for the audit record.
    Installing {
        /// The file.
        asset: &'static str,
        /// Its pinned hash.
        sha256: &'static str,
        /// Its version.
        version: &'static str,
        /// From where: a URL without query, or a file.
        from: String,
    },
    /// So much has arrived; said at least every second while bytes arrive.
    Received {
        /// Bytes.
        bytes: u64,
        /// Of so many.
        total: u64,
    },
    /// All bytes are there.
    Unpacking,
}

impl Progress {
    /// What the audit record `install` says of it: asset and pinned hash. `None` for all but
    /// [`Progress::Installing`].
    pub fn audit_args(&self) -> Option<serde_json::Value> {
        let Progress::Installing { asset, sha256, version, from } = self else { return None };
        Some(serde_json::json!({
            "action": "install", "asset": asset, "sha256": sha256, "version": version, "from": from,
        }))
    }
}

/// How much and how long.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most bytes of an asset.
    pub bytes: u64,
    /// Most bytes that come out of one.
    pub unpacked: u64,
    /// How long no byte may arrive; runs from before the request.
    pub silence: Duration,
    /// How long it may take in all.
    pub total: Duration,
    /// How many redirects are followed.
    pub redirects: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes: 64 << 20,
            unpacked: 256 << 20,
            silence: Duration::from_secs(30),
            total: Duration::from_secs(600),
            redirects: 5,
        }
    }
}

/// Finds and installs programs for one agent directory. Holds everything it knows of its surroundings
/// from the start on; share one per process, so that installations of the same program meet.
pub struct Installer {
    pins: Vec<Pin>,
    limits: Limits,
    home: Option<PathBuf>,
    cwd: PathBuf,
    path: OsString,
    base: Option<OsString>,
    outbound: Outbound,
    /// The agent directory's list.
    registry: PathBuf,
    /// One installation of a program at a time; when the last one failed, and why.
    turns: [Mutex<Option<(Instant, InstallError)>>; 2],
}

impl Installer {
    /// For an agent directory, with the pins of this build.
    pub fn new(dir: &AgentDir, env: &Env) -> Installer {
        Installer {
            pins: pins::table(),
            limits: Limits::default(),
            home: env.home.clone().filter(|home| home.is_absolute()),
            cwd: env.cwd.clone(),
            path: env.path.clone().unwrap_or_default(),
            base: env.download_base.clone(),
            outbound: Outbound::new(env.proxy.clone()),
            turns: Default::default(),
            registry: dir.installs_file(),
        }
    }

    /// The same with other pins.
    pub fn with_pins(mut self, pins: &[Pin]) -> Installer {
        self.pins = pins.to_vec();
        self
    }

    /// The same with other limits.
    pub fn with_limits(mut self, limits: Limits) -> Installer {
        self.limits = limits;
        self
    }

    /// The program for a config value (`xfer.dufs`, `xfer.cloudflared`): at that path when it holds a
    /// slash, else from PATH, else installed earlier, else downloaded now. Long: up to ten minutes.
    ///
    /// `announce` is awaited: with [`Progress::Installing`] before a byte is asked for.
    ///
    /// # Errors
    /// [`InstallError`]: its text says what to do.
    pub async fn obtain(
        &self,
        tool: Tool,
        config_value: &str,
        announce: impl AsyncFnMut(Progress),
    ) -> Result<Installed, InstallError> {
        match self.find(tool, config_value).await? {
            Some(found) => Ok(found),
            None => self.install(tool, None, announce).await,
        }
    }

    /// As [`Installer::obtain`], without downloading: `None` when it would have to.
    ///
    /// # Errors
    /// As [`Installer::obtain`].
    pub async fn find(&self, tool: Tool, config_value: &str) -> Result<Option<Installed>, InstallError> {
        if config_value.contains(['/', '\\']) {
            return self.configured(tool, self.expand(config_value)).await.map(Some);
        }
        let (path, name) = (self.path.clone(), config_value.to_owned());
        if let Some(found) = blocking(move || lookup::on_path(&path, &name)).await {
            return self.describe(tool, found, false).await.map(Some);
        }
        match self.installed(tool).await? {
            Some(entry) => self.describe(tool, entry.path, true).await.map(Some),
            None => Ok(None),
        }
    }

    /// Installs the pinned build from `from`, or downloads it; nothing is done when that build is
    /// installed and intact.
    ///
    /// # Errors
    /// As [`Installer::obtain`].
    pub async fn install(
        &self,
        tool: Tool,
        from: Option<&Path>,
        mut announce: impl AsyncFnMut(Progress),
    ) -> Result<Installed, InstallError> {
        let (asked, turn) = (Instant::now(), &self.turns[tool as usize]);
        let mut last = match turn.try_lock() {
            Ok(last) => last,
            Err(_) => {
                announce(Progress::Waiting).await;
                turn.lock().await
            }
        };
        // Whoever waited for an attempt that failed meanwhile has its answer.
        if let Some((_, error)) = last.as_ref().filter(|(at, _)| *at > asked) {
            return Err(error.clone());
        }
        let done = self.install_alone(tool, from, announce).await;
        *last = done.as_ref().err().map(|error| (Instant::now(), error.clone()));
        done
    }

    /// The pinned build for this platform.
    ///
    /// # Errors
    /// When there is none.
    pub fn pin(&self, tool: Tool) -> Result<Pin, InstallError> {
        let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
        let fits = |pin: &&Pin| (pin.tool, pin.os, pin.arch) == (tool, os, arch);
        let pin = self.pins.iter().find(fits).copied();
        pin.ok_or_else(|| InstallError::NotOffered { tool, platform: format!("{os} on {arch}") })
    }

    /// The home it installs into.
    pub fn home(&self) -> Option<&Path> {
        self.home.as_deref()
    }

    /// The directories of what is installed.
    pub fn dirs(&self) -> Vec<PathBuf> {
        let shared = self.shared_registry();
        let registries = [Some(&self.registry), shared.as_ref()];
        let programs = registries.into_iter().flatten().flat_map(|file| {
            let entries = [Tool::Dufs, Tool::Cloudflared].map(|tool| registry::read(file, tool));
            entries.into_iter().flatten().filter_map(|entry| Some(entry.path.parent()?.to_path_buf()))
        });
        let mut dirs: Vec<PathBuf> = programs.collect();
        dirs.extend(shared.as_ref().and_then(|file| file.parent()).map(Path::to_path_buf));
        dirs
    }

    /// Where programs are installed.
    fn bin(&self) -> Option<PathBuf> {
        Some(self.home.as_deref()?.join(".local/share/a2mcp/bin"))
    }

    /// The list that all agent directories share, beside the programs.
    fn shared_registry(&self) -> Option<PathBuf> {
        Some(self.home.as_deref()?.join(".local/share/a2mcp/installs.json"))
    }

    /// A path of the config: `~/` is the home, relative ones are meant against the working directory.
    fn expand(&self, value: &str) -> PathBuf {
        match (value.strip_prefix("~/"), &self.home) {
            (Some(rest), Some(home)) => home.join(rest),
            _ => self.cwd.join(value).components().collect(),
        }
    }

    async fn configured(&self, tool: Tool, path: PathBuf) -> Result<Installed, InstallError> {
        let file = path.clone();
        match blocking(move || lookup::may_run(&file)).await {
            Ok(()) => self.describe(tool, path, false).await,
            Err(error) => {
                let why = match error.kind() {
                    io::ErrorKind::NotFound => "there is no such file".to_owned(),
                    io::ErrorKind::PermissionDenied => "it may not be run".to_owned(),
                    _ => error.to_string(),
                };
                Err(InstallError::Configured { tool, path, why })
            }
        }
    }

    /// What was installed earlier and is still what it was.
    async fn installed(&self, tool: Tool) -> Result<Option<Entry>, InstallError> {
        let lists = [Some(self.registry.clone()), self.shared_registry()];
        blocking(move || {
            let mut gone = None;
            for entry in lists.into_iter().flatten().filter_map(|list| registry::read(&list, tool)) {
                match lookup::sha256(&entry.path).ok() {
                    Some(hash) if hash == entry.sha256 => return Ok(Some(entry)),
                    found => {
                        let Entry { path, sha256, .. } = entry;
                        gone.get_or_insert(InstallError::Vanished { tool, path, sha256, found });
                    }
                }
            }
            gone.map_or(Ok(None), Err)
        })
        .await
    }

    async fn describe(&self, tool: Tool, path: PathBuf, downloaded: bool) -> Result<Installed, InstallError> {
        let not_runnable = |source: io::Error| InstallError::NotRunnable {
            tool,
            path: path.clone(),
            cause: Arc::new(source),
        };
        let file = path.clone();
        let sha256 = blocking(move || lookup::sha256(&file)).await.map_err(not_runnable)?;
        let version = lookup::version(tool, &path).await.map_err(not_runnable)?;
        Ok(Installed { version, path, sha256, downloaded })
    }
}

/// Does what may wait for a disk beside the one thread of the sidecar.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// A path as it may be shown.
fn shown(path: &Path) -> String {
    crate::text::clean(&path.to_string_lossy(), 400).into_owned()
}
