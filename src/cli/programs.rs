//! `a2mcp install dufs` and `a2mcp install cloudflared`: the pinned build, downloaded or from a file.
//! What is done and refused belongs to [`crate::install`]; here are its words, its progress, and the
//! audit record, which is written before a byte is asked for.

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio_util::task::TaskTracker;

use super::target::Target;
use super::{operate, out};
use crate::audit::{Audit, Record};
use crate::config::{Env, store};
use crate::install::{Installed, Installer, Progress, Tool};

/// How often progress is said where nobody sees a line change.
const SAY_EVERY: Duration = Duration::from_secs(10);

/// Arguments of `a2mcp install dufs` and `a2mcp install cloudflared`.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ProgramArgs {
    /// The release file of the pinned build, fetched by other means; nothing is downloaded.
    #[arg(long, value_name = "FILE")]
    pub from: Option<PathBuf>,
    /// Machine-readable output.
    #[arg(long)]
    pub json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    tool: &'a str,
    version: Option<&'a str>,
    path: &'a str,
    sha256: &'a str,
    /// False: it was there already.
    installed: bool,
}

/// Installs one program.
///
/// # Errors
/// What went wrong, and the way out.
pub async fn install(tool: Tool, args: ProgramArgs, target: &Target, env: &Env) -> Result<u8, String> {
    let dir = target.agent_dir(env).await?;
    dir.create().map_err(|error| format!("cannot create {}: {error}", dir.root().display()))?;
    let installer = Installer::new(&dir, env);
    let tasks = TaskTracker::new();
    let audit = Audit::start(dir.audit_file(), &tasks);
    let mut record = None;
    let mut shown = Shown::new(tool);
    let done = installer
        .install(tool, args.from.as_deref(), async |progress| {
            shown.show(&progress);
            if let Some(args) = progress.audit_args() {
                audit.write(Record::action("xfer", None, &args.to_string(), false)).await;
                record = Some(args);
            }
        })
        .await;
    shown.end();
    if let (Err(error), Some(args)) = (&done, &mut record) {
        args["error"] = error.to_string().into();
        audit.write(Record::action("xfer", None, &args.to_string(), true)).await;
    }
    let installed = done.map_err(|error| error.to_string())?;
    let is_new = record.is_some();
    let printed = if args.json {
        operate::print_json(&Report {
            tool: tool.name(),
            version: installed.version.as_deref(),
            path: &installed.path.to_string_lossy(),
            sha256: &installed.sha256,
            installed: is_new,
        })
    } else {
        let version = installed.version.as_deref().unwrap_or("(unknown version)");
        let (path, hash) = (installed.path.display(), &installed.sha256);
        let what = if is_new { "Installed" } else { "Installed already:" };
        operate::print(&format!("{what} {tool} {version}: {path}\nsha256 {hash}"))
    };
    // The operator may be surprised that another one is used.
    let config = store::load_readonly(&dir).map(|(config, _)| config).unwrap_or_default();
    let value = match tool {
        Tool::Dufs => config.xfer_dufs,
        Tool::Cloudflared => config.xfer_cloudflared,
    };
    if let Ok(Some(Installed { path, .. })) = installer.find(tool, &value).await
        && path != installed.path
    {
        let path = path.display();
        out::note(&format!("not this one is used but {path}, which the config or the PATH names"));
    }
    printed
}

/// Progress, for a person who watches and for a log.
struct Shown {
    tool: Tool,
    is_watched: bool,
    said_at: Instant,
    has_line: bool,
}

impl Shown {
    fn new(tool: Tool) -> Shown {
        let is_watched = std::io::stderr().is_terminal();
        Shown { tool, is_watched, said_at: Instant::now(), has_line: false }
    }

    fn show(&mut self, progress: &Progress) {
        match progress {
            Progress::Waiting => {
                let tool = self.tool;
                out::note(&format!("{tool} is being installed by another process; waiting for it"));
            }
            Progress::Installing { asset, sha256, from, .. } => {
                out::note(&format!("installing {asset} (sha256 {sha256}) from {from}"));
            }
            Progress::Received { bytes, total } => {
                let text = received(*bytes, *total);
                if self.is_watched {
                    out::line(&text);
                    self.has_line = true;
                } else if self.said_at.elapsed() >= SAY_EVERY {
                    self.said_at = Instant::now();
                    out::note(&text);
                }
            }
            Progress::Unpacking => self.end(),
        }
    }

    /// Leaves the line that was changing.
    fn end(&mut self) {
        if std::mem::take(&mut self.has_line) {
            out::line("");
        }
    }
}

fn received(bytes: u64, total: u64) -> String {
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let percent = (bytes * 100).checked_div(total).unwrap_or(0).min(100);
    format!("{:.1} of {:.1} MB ({percent} %)", mb(bytes), mb(total))
}
