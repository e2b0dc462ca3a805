//! Which sidecar, or which agent directory, a command means (contract 16): what was named, else the
//! only one there is. Where several could be meant, nothing is guessed: they are listed.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::out;
use crate::config::{AgentDir, Env, Token, store};
use crate::control::status::Status;
use crate::control::{self, Found};
use crate::keeper;
use crate::text::with_causes;

/// Between two sidecars of a host its keeper holds the port, and the next one is on its way: for so long
/// it is waited for …
const NEXT: Duration = Duration::from_secs(5);
/// … and so often looked for.
const NEXT_LOOK: Duration = Duration::from_millis(100);

/// What the command line named.
#[derive(Clone, Default)]
pub struct Target {
    /// `--agent-dir`.
    pub dir: Option<AgentDir>,
    /// `--pid`: a sidecar's process id, or its host's.
    pub pid: Option<u32>,
}

impl Target {
    /// All sidecars of this user that answered and are meant; those that did not are named on stderr. Waits
    /// a moment for one that is just being replaced.
    ///
    /// # Errors
    /// When they cannot be looked for.
    pub async fn running(&self) -> Result<Running, String> {
        let found = self.find().await.map_err(|error| format!("cannot look for sidecars: {error}"))?;
        let mut running = Running::default();
        for Found { socket, status } in &found {
            if let Err(error) = status {
                running.silent += 1;
                out::note(&format!("the sidecar behind {} does not answer: {error}", socket.display()));
            }
        }
        let picked = self.pick(found.iter()).into_iter();
        running.answered = picked.map(|(socket, status)| (socket.clone(), status.clone())).collect();
        Ok(running)
    }

    /// All sidecars of this user. Waits a moment for one that is meant and just being replaced.
    ///
    /// # Errors
    /// As [`control::find`].
    pub async fn find(&self) -> io::Result<Vec<Found>> {
        let begun = Instant::now();
        loop {
            let found = control::find().await?;
            let is_met = !self.pick(found.iter()).is_empty();
            if is_met || begun.elapsed() >= NEXT || !is_one_coming(&found) {
                return Ok(found);
            }
            tokio::time::sleep(NEXT_LOOK).await;
        }
    }

    /// The one sidecar that is meant, and its control socket.
    ///
    /// # Errors
    /// When there is none, or several.
    pub async fn sidecar(&self) -> Result<(PathBuf, Status), String> {
        let mut running = self.running().await?;
        match running.answered.len() {
            1 => Ok(running.answered.remove(0)),
            0 => Err(self.none(&running)),
            _ => Err(several(running.answered.iter().map(|(_, status)| status))),
        }
    }

    /// Why there is none.
    pub fn none(&self, running: &Running) -> String {
        match (self.pid, &self.dir) {
            _ if running.silent > 0 => "no sidecar answers; those named above may hang or be stopped".into(),
            (Some(pid), _) => format!("no sidecar has pid {pid}"),
            (None, Some(dir)) => format!("no sidecar runs for {}", dir.root().display()),
            (None, None) => "no sidecar runs; a host with the shim starts one, or try `a2mcp demo`".into(),
        }
    }

    /// The directory that needs no looking for: it was named, and no process beside it.
    fn named(&self) -> Option<&AgentDir> {
        self.dir.as_ref().filter(|_| self.pid.is_none())
    }

    /// The agent directory that is meant, with the files its sidecar uses if one runs.
    ///
    /// # Errors
    /// When several could be meant, or no home directory is known.
    pub async fn agent_dir(&self, env: &Env) -> Result<AgentDir, String> {
        if let Some(dir) = self.named() {
            return Ok(dir.clone());
        }
        let running = self.running().await?.answered;
        let running: Vec<_> = running.iter().map(|(socket, status)| (socket, status)).collect();
        self.dir_among(&running, env)
    }

    /// As [`Target::agent_dir`], but with the files its sidecar uses also where the directory was named.
    ///
    /// # Errors
    /// As [`Target::agent_dir`]; and when several sidecars of it use different files.
    pub async fn files(&self, env: &Env) -> Result<AgentDir, String> {
        let running = match (self.running().await, self.named()) {
            (Ok(running), _) => running.answered,
            (Err(_), Some(dir)) => return Ok(dir.clone()),
            (Err(error), None) => return Err(error),
        };
        let Some((_, first)) = running.first() else { return self.dir_among(&[], env) };
        let files = |status: &Status| (status.agent_dir.clone(), status.audit_file.clone());
        if running.iter().any(|(_, status)| files(status) != files(first)) {
            return Err(several(running.iter().map(|(_, status)| status)));
        }
        Ok(dir_of(first, env))
    }

    /// The agent directory that is meant, when these sidecars run.
    ///
    /// # Errors
    /// As [`Target::agent_dir`].
    pub fn dir_among(&self, running: &[(&PathBuf, &Status)], env: &Env) -> Result<AgentDir, String> {
        if let Some(dir) = self.named() {
            return Ok(dir.clone());
        }
        let Some((_, first)) = running.first() else {
            if let Some(pid) = self.pid {
                return Err(format!("no sidecar has pid {pid}"));
            }
            let root = AgentDir::default_root(env);
            let root = root.ok_or("no home directory is known; name one with --agent-dir DIR")?;
            return Ok(AgentDir::new(root, env));
        };
        if running.iter().any(|(_, status)| status.agent_dir != first.agent_dir) {
            return Err(several(running.iter().map(|(_, status)| *status)));
        }
        Ok(dir_of(first, env))
    }

    /// Those of the sidecars found that answered and are meant.
    pub fn pick<'a>(&self, found: impl Iterator<Item = &'a Found>) -> Vec<(&'a PathBuf, &'a Status)> {
        let root = self.dir.as_ref().map(|dir| dir.root().display().to_string());
        found
            .filter_map(|found| Some((&found.socket, found.status.as_ref().ok()?)))
            .filter(|(_, status)| root.as_ref().is_none_or(|root| status.agent_dir == *root))
            .filter(|(_, status)| self.pid.is_none_or(|pid| status.pid == pid || status.host.pid == pid))
            .collect()
    }

    /// URL and token of the one sidecar that is meant.
    ///
    /// # Errors
    /// When there is none, or several, or its config cannot be read.
    pub async fn bridge(&self, env: &Env) -> Result<(String, Token), String> {
        let (_, status) = self.sidecar().await?;
        let dir = dir_of(&status, env);
        let file = dir.config_file().display();
        let (config, _) = store::load_readonly(&dir).map_err(|error| with_causes(&error))?;
        let token = config.token.ok_or_else(|| format!("{file} holds no token; was the directory moved?"))?;
        Ok((status.url, token))
    }
}

/// Whether there is a keeper more than sidecars: the next one of its host is on its way. One that does not
/// answer has a keeper, too.
fn is_one_coming(found: &[Found]) -> bool {
    let answered: Vec<&Status> = found.iter().filter_map(|found| found.status.as_ref().ok()).collect();
    let is_kept = |pid: u32| {
        answered.iter().any(|status| status.keeper.as_ref().is_some_and(|keeper| keeper.pid == pid))
    };
    let silent = found.len() - answered.len();
    keeper::live().map_or(true, |keepers| keepers.into_iter().filter(|pid| !is_kept(*pid)).count() > silent)
}

/// Sidecars that were found.
#[derive(Default)]
pub struct Running {
    /// Control sockets and what was said behind them.
    pub answered: Vec<(PathBuf, Status)>,
    /// How many said nothing.
    pub silent: usize,
}

/// The agent directory of a running sidecar, with the files it uses: its environment counts, not ours.
pub fn dir_of(status: &Status, env: &Env) -> AgentDir {
    let dir = AgentDir::new(&status.agent_dir, env);
    if status.config_file.is_empty() { dir } else { dir.with_files(&status.config_file, &status.audit_file) }
}

fn several<'a>(running: impl Iterator<Item = &'a Status>) -> String {
    let brief = |status: &Status| {
        format!("pid {} {} {} ({})", status.pid, status.url, status.host.name, status.agent_dir)
    };
    let list: Vec<String> = running.map(brief).collect();
    format!("several sidecars run; choose one with --pid: {}", list.join(" | "))
}
