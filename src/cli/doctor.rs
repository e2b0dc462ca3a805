//! `a2mcp doctor`: looks at everything that can be wrong around a bridge and says what to do about
//! each finding. Reads only.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::target::Target;
use super::{exit, install, operate, out};
use crate::config::{AgentDir, Env, is_loopback, store};
use crate::control::Found;
use crate::control::status::{Status, Tunnel};
use crate::frame::messages::Server;
use crate::install::{Installer, Tool};
use crate::process::Identity;
use crate::text::{clean, with_causes};
use crate::{process, state};

/// Arguments of `a2mcp doctor`.
#[derive(clap::Args)]
pub struct DoctorArgs {
    /// Machine-readable output.
    #[arg(long)]
    json: bool,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Finding {
    /// Whether it is as it should be.
    ok: bool,
    /// What was found.
    what: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

fn fine(what: impl Into<String>) -> Finding {
    Finding { ok: true, what: what.into(), fix: None }
}

fn wrong(what: impl Into<String>, fix: impl Into<String>) -> Finding {
    Finding { ok: false, what: what.into(), fix: Some(fix.into()) }
}

/// Looks at everything; exit code 1 when something is wrong.
///
/// # Errors
/// When not even the agent directory is known.
pub async fn run(args: DoctorArgs, target: &Target, env: &Env) -> Result<u8, String> {
    let dir = target.agent_dir(env).await?;
    let mut findings = vec![directory(&dir)];
    findings.extend(config(&dir));
    findings.extend(shim(&dir));
    findings.push(audit(dir.audit_file()));
    findings.extend(programs(&dir, env).await);
    findings.extend(sidecars(&dir).await);
    if args.json {
        operate::print_json(&findings)?;
    } else {
        for finding in &findings {
            let mark = if finding.ok { "ok   " } else { "WRONG" };
            let fix = finding.fix.as_ref().map(|fix| format!("\n      fix: {fix}")).unwrap_or_default();
            out::print_foreign(&format!("{mark} {}{fix}", finding.what))
                .map_err(|error| format!("cannot write the output: {error}"))?;
        }
    }
    Ok(if findings.iter().all(|finding| finding.ok) { 0 } else { exit::FAILED })
}

fn directory(dir: &AgentDir) -> Finding {
    let root = shown(dir.root());
    match std::fs::metadata(dir.root()) {
        Ok(meta) if meta.is_dir() && meta.permissions().mode() & 0o022 != 0 => wrong(
            format!("others can write to {root}: they can replace config and token"),
            format!("chmod go-w {root}"),
        ),
        Ok(meta) if meta.is_dir() => fine(format!("agent directory {root}")),
        Ok(_) => wrong(format!("{root} is no directory"), "name the right one with --agent-dir"),
        Err(error) => wrong(
            format!("agent directory {root}: {error}"),
            "start the host once, or name the right one with --agent-dir",
        ),
    }
}

fn config(dir: &AgentDir) -> Vec<Finding> {
    let file = shown(dir.config_file());
    if !dir.config_file().exists() {
        return vec![fine(format!("no config yet: {file} is made when the bridge first starts"))];
    }
    let mut findings = Vec::new();
    match store::load_readonly(dir) {
        Err(error) => findings.push(wrong(
            with_causes(&error),
            "correct the file, or move it away (a new one gets a new token); until then the bridge refuses to start, a running one goes on",
        )),
        Ok((config, warnings)) => {
            findings.push(fine(format!("config {file}")));
            findings.extend(
                warnings
                    .into_iter()
                    .map(|warning| wrong(warning, "correct the config, or leave it if it is meant")),
            );
            if is_loopback(&config.host) && config.allowed_hosts.is_empty() {
                findings.push(fine("listens on this machine only"));
            }
        }
    }
    findings
}

fn shim(dir: &AgentDir) -> Vec<Finding> {
    #[derive(Deserialize)]
    struct Installed {
        binary: String,
        #[serde(default)]
        version: String,
    }
    let marker = dir.extension_dir().join(install::BINARY_FILE);
    let reinstall = "run `a2mcp install omp` with the binary that is to be used";
    let Ok(text) = std::fs::read(&marker) else {
        return vec![fine(
            "the omp extension is not installed in this agent directory (`a2mcp install omp`)",
        )];
    };
    let Ok(installed) = serde_json::from_slice::<Installed>(&text) else {
        return vec![wrong(format!("{} cannot be read", shown(&marker)), reinstall)];
    };
    let binary = Path::new(&installed.binary);
    let is_runnable =
        std::fs::metadata(binary).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0);
    let mut findings = Vec::new();
    if is_runnable {
        findings.push(fine(format!("the omp extension starts {}", shown(binary))));
    } else {
        findings.push(wrong(
            format!("the omp extension starts {}, which cannot be run", shown(binary)),
            reinstall,
        ));
    }
    if installed.version != crate::app::VERSION {
        findings.push(wrong(
            format!(
                "the omp extension is of version {}, this binary of {}",
                clean(&installed.version, 20),
                crate::app::VERSION
            ),
            reinstall,
        ));
    }
    findings
}

fn audit(file: &Path) -> Finding {
    let shown = shown(file);
    let parent = file.parent().unwrap_or(Path::new("/"));
    let may_write = |path: &Path| rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok();
    let is_writable =
        if file.exists() { file.is_file() && may_write(file) } else { !parent.exists() || may_write(parent) };
    if is_writable {
        fine(format!("audit {shown}"))
    } else {
        wrong(
            format!("audit {shown} cannot be written: calls go on, but are not recorded"),
            "make it writable, or set A2MCP_AUDIT",
        )
    }
}

/// The programs that the bridge runs when it is asked to share a file or to open a tunnel.
async fn programs(dir: &AgentDir, env: &Env) -> Vec<Finding> {
    let installer = Installer::new(dir, env);
    let config = store::load_readonly(dir).map(|(config, _)| config).unwrap_or_default();
    let mut findings = Vec::new();
    for (tool, value) in [(Tool::Dufs, &config.xfer_dufs), (Tool::Cloudflared, &config.xfer_cloudflared)] {
        findings.push(match (installer.find(tool, value).await, installer.pin(tool)) {
            (Ok(Some(found)), _) => {
                let version = found.version.as_deref().unwrap_or("of unknown version");
                fine(format!("{tool} {version}: {}", shown(&found.path)))
            }
            (Ok(None), Ok(pin)) => fine(format!(
                "{tool} is not here; {} is downloaded when it is first needed (`a2mcp install {tool}` does it now)",
                pin.version
            )),
            (Ok(None), Err(error)) => fine(error.to_string()),
            (Err(error), _) => wrong(error.to_string(), format!("`a2mcp install {tool}`, or correct the config")),
        });
    }
    findings
}

async fn sidecars(dir: &AgentDir) -> Vec<Finding> {
    let target = Target { dir: Some(dir.clone()), pid: None };
    let found = match target.find().await {
        Ok(found) => found,
        Err(error) => {
            return vec![wrong(
                format!("cannot look for sidecars: {error}"),
                "repair the directory it names",
            )];
        }
    };
    let mut findings = Vec::new();
    let mut running = 0;
    let root = dir.root().display().to_string();
    for Found { socket, status } in found {
        match status {
            Err(error) => findings.push(wrong(
                format!("the sidecar behind {} does not answer: {error}", shown(&socket)),
                "it may hang; its host kills it after a while, or end it by its pid",
            )),
            Ok(status) if status.agent_dir == root => {
                running += 1;
                findings.extend(sidecar(&status));
            }
            Ok(_) => {}
        }
    }
    if running == 0 {
        findings.push(no_sidecar(dir));
    }
    findings
}

fn no_sidecar(dir: &AgentDir) -> Finding {
    let Some(port) = state::remembered_port(dir) else {
        return fine("no sidecar runs for this agent directory");
    };
    let log = shown(&dir.stderr(port));
    let last = state::read(&dir.state_file(port)).ok().flatten();
    if last.is_some_and(|last: state::State| last.host.is_alive() && last.host != Identity::current()) {
        return wrong(
            "no sidecar runs, but its host does",
            format!("type /a2mcp in the host: it says why; /a2mcp restart starts it again; the log is {log}"),
        );
    }
    match process::listener_on(port) {
        Some((pid, name)) => wrong(
            format!("no sidecar runs; its last port {port} is held by process {pid} ({})", clean(&name, 40)),
            "the next start takes another port, and clients need the new URL, unless that process ends first",
        ),
        None => {
            fine(format!("no sidecar runs for this agent directory; the next one takes port {port} again"))
        }
    }
}

fn sidecar(status: &Status) -> Vec<Finding> {
    let at = format!("sidecar pid {} at {}", status.pid, status.url);
    let mut findings = Vec::new();
    findings.push(match status.health.as_str() {
        "ready" => fine(format!("{at} is ready")),
        "host_stalled" => wrong(
            format!("{at}: the host has not answered for {} s", status.host.heard_ago_ms / 1000),
            "the host's process is busy or stopped; calls wait until it goes on",
        ),
        "starting" => wrong(
            format!("{at} has no tool list yet"),
            match &status.host.server {
                None => "wait for the host's main session; /a2mcp in the host says more",
                Some(_) => {
                    "wait for the wrapped server to list its tools; what it writes is in the terminal of `a2mcp wrap`"
                }
            },
        ),
        other => wrong(format!("{at} is {}", clean(other, 40)), "look again in a moment"),
    });
    findings.extend(status.host.server.as_ref().and_then(server));
    let list_error = status.host.server.as_ref().and_then(|server| server.list_error.as_ref());
    findings.extend(list_error.map(|error| {
        wrong(
            format!("the wrapped server's tools cannot be listed: {}", clean(error, 300)),
            "mend the server and start `a2mcp wrap` anew, or `a2mcp restart`, which asks it again",
        )
    }));
    if status.version != crate::app::VERSION {
        findings.push(wrong(
            format!(
                "{at} is of version {}, this binary of {}",
                clean(&status.version, 20),
                crate::app::VERSION
            ),
            "`a2mcp restart` starts the binary that is installed now",
        ));
    }
    match &status.keeper {
        None => findings.push(wrong(
            format!("{at} has no keeper: should it die, its port is closed until the next one runs"),
            "`a2mcp logs` says why; it is tried again by itself",
        )),
        Some(keeper) if keeper.note.is_some() => findings.push(wrong(
            keeper.note.clone().unwrap_or_default(),
            "`a2mcp stop`, then /a2mcp restart in the host",
        )),
        Some(keeper) if keeper.uptime_ms.is_none() => findings.push(wrong(
            format!("the keeper, process {}, does not answer", keeper.pid),
            format!("end it (kill -KILL {}): the next one is started at once", keeper.pid),
        )),
        Some(keeper) => {
            findings.push(fine(format!("its port is held by the keeper, process {}", keeper.pid)))
        }
    }
    if let Some(share) = &status.share {
        let path = clean(&share.path, 200).into_owned();
        findings.push(match share.state.strip_prefix("failed: ") {
            Some(reason) => wrong(
                format!("the file server of the share of {path} keeps dying: {}", clean(reason, 200)),
                "mend that, then share it again (xfer_share)",
            ),
            None => fine(format!("{path} is shared until {}", clean(&share.expires_at, 40))),
        });
    }
    findings.extend(status.tunnel.as_ref().and_then(tunnel));
    if status.paused {
        findings.push(wrong(format!("{at} is paused: new calls are refused"), "`a2mcp resume`"));
    }
    if status.audit_failures > 0 {
        findings.push(wrong(
            format!(
                "{} audit record(s) could not be written to {}",
                status.audit_failures,
                clean(&status.audit_file, 200)
            ),
            "make room or make it writable; `a2mcp logs` says why",
        ));
    }
    if status.unauthorized > 0 {
        // Anybody on this machine can cause it: worth knowing, but nothing is broken.
        findings.push(fine(format!(
            "{} request(s) came without the right token (an old client? `a2mcp connect` configures it anew)",
            status.unauthorized
        )));
    }
    if !status.odd_names.is_empty() {
        let names: Vec<_> = status.odd_names.iter().take(10).map(|name| clean(name, 60)).collect();
        findings.push(wrong(
            format!("tool names that some clients refuse: {}", names.join(", ")),
            "rename them in the host, or remove them with \"deny\" in the config",
        ));
    }
    findings.extend(
        status
            .notes
            .iter()
            .map(|note| wrong(note.clone(), "undo the change, or make it right and restart what it names")),
    );
    findings
}

/// The server that `a2mcp wrap` keeps.
fn server(server: &Server) -> Option<Finding> {
    let reason = server.reason.as_ref().map_or("not known".into(), |reason| clean(reason, 300));
    Some(match server.state.as_str() {
        "running" => fine(format!("the wrapped server runs ({} restart(s))", server.restarts)),
        "failed" => wrong(
            format!("the wrapped server ended again and again, calls are refused; its last end: {reason}"),
            "see what it wrote in the terminal of `a2mcp wrap` and try its command by itself; it is tried again every minute, and at once when `a2mcp wrap` is started anew",
        ),
        "starting" if server.restarts > 0 => wrong(
            format!(
                "the wrapped server ended and is being started again, calls wait; its last end: {reason}"
            ),
            "look again in a moment",
        ),
        _ => return None,
    })
}

/// Nothing is to be said of a tunnel nobody opened.
fn tunnel(tunnel: &Tunnel) -> Option<Finding> {
    let why = tunnel.why.as_ref().map(|why| clean(why, 300).into_owned()).unwrap_or_default();
    Some(match (tunnel.state.as_str(), &tunnel.url) {
        ("open", Some(url)) => fine(format!(
            "reachable from the internet at {}, with the token (`a2mcp tunnel stop` closes it)",
            clean(url, 300)
        )),
        (state, Some(url)) => wrong(
            format!("the tunnel {} is {}: {why}", clean(url, 300), clean(state, 40)),
            "`a2mcp tunnel` probes it again; or this machine alone cannot see it: try the URL from elsewhere",
        ),
        ("failed", None) => wrong(
            format!("the tunnel failed: {why}"),
            tunnel.advice.as_ref().map_or_else(
                || "`a2mcp tunnel` tries again".into(),
                |advice| clean(advice, 500).into_owned(),
            ),
        ),
        ("closed", None) => return None,
        (state, None) => fine(format!("the tunnel is {}: {why}", clean(state, 40))),
    })
}

fn shown(path: &Path) -> String {
    clean(&path.to_string_lossy(), 300).into_owned()
}
