//! `read` through the bridge in a real omp, next to a loop over the same tool inside that omp
//! (`loop.ts`), which is the most any bridge into it can reach.
//!
//! One omp runs both, in turns. It is what `tests/setup` installed, with the shim that `a2mcp install
//! omp` writes, in a home directory of its own.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use serde_json::json;
use tempfile::TempDir;

use crate::Pace;
use crate::endpoint::Endpoint;
use crate::load::{Connections, Until};
use crate::report::InOmp;

const CONCURRENCY: [usize; 2] = [8, 64];
const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(50);

/// omp starts only when some model is configured; nothing ever asks this one.
const MODELS: &str = "\
providers:
  bench:
    baseUrl: http://bench.invalid/v1
    api: anthropic-messages
    apiKey: not-a-real-key
    models:
      - id: offline
        name: unreachable
        contextWindow: 100000
";

pub(crate) fn measure(binary: &Path, pace: &Pace, next_id: &mut u64) -> Result<Vec<InOmp>> {
    let mut omp = Omp::start(binary)?;
    let arguments = json!({ "path": "small.txt" });
    let read = omp.endpoint.call("read", arguments.clone(), |text| text.contains("the first line"))?;
    // omp adds a remark when the same file is read again and again.
    let read = read.with_answers_of_any_length();
    let mut rows: Vec<InOmp> =
        CONCURRENCY.map(|concurrency| InOmp { concurrency, rounds: Vec::new() }).into();
    for _ in 0..pace.rounds {
        for row in &mut rows {
            let order = |time: Duration| {
                json!({
                    "tool": "read",
                    "arguments": arguments,
                    "concurrency": row.concurrency,
                    "millis": time.as_millis() as u64,
                })
            };
            omp.in_process(&order(pace.warm_up).to_string())?;
            let in_process = omp.in_process(&order(pace.segment).to_string())?;
            let mut connections = Connections::open(omp.endpoint.address, row.concurrency)?;
            connections.drive(&read, Until::Elapsed(pace.warm_up), next_id)?;
            let segment = connections.drive(&read, Until::Elapsed(pace.segment), next_id)?;
            row.rounds.push((in_process, segment));
        }
    }
    omp.stop()?;
    Ok(rows)
}

struct Omp {
    child: Child,
    _home: TempDir,
    endpoint: Endpoint,
    orders: BufReader<UnixStream>,
}

impl Omp {
    fn start(binary: &Path) -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let programs = root.join("target/real-parts/omp/node_modules/.bin");
        ensure!(programs.join("omp").exists(), "omp is not installed: run tests/setup");

        let home = tempfile::tempdir()?;
        let agent_dir = home.path().join(".omp/agent");
        let work = home.path().join("work");
        std::fs::create_dir_all(&agent_dir)?;
        std::fs::create_dir(&work)?;
        std::fs::write(agent_dir.join("models.yml"), MODELS)?;
        std::fs::write(
            work.join("small.txt"),
            "the first line\n".to_owned() + &"another line of text\n".repeat(12),
        )?;
        let installed = Command::new(binary)
            .args(["install", "omp", "--force", "--agent-dir"])
            .arg(&agent_dir)
            .output()
            .with_context(|| format!("cannot start {}", binary.display()))?;
        ensure!(
            installed.status.success(),
            "the shim was not installed: {}",
            String::from_utf8_lossy(&installed.stderr)
        );

        let socket = home.path().join("loop");
        let mut path = programs.clone().into_os_string();
        path.push(":/usr/bin:/bin");
        let log = std::fs::File::create(home.path().join("omp.log"))?;
        let mut child = Command::new(programs.join("omp"))
            .args(["--mode", "rpc", "-e"])
            .arg(root.join("tests/bench/loop.ts"))
            .current_dir(&work)
            .env_clear()
            .env("PATH", path)
            .env("HOME", home.path())
            .env("LANG", "C.UTF-8")
            .env("TERM", "dumb")
            .env("A2MCP_BENCH_LOOP", &socket)
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start omp")?;
        let met = meet(&mut child, &agent_dir, &socket);
        let (endpoint, orders) = met.map_err(|error| {
            let said = std::fs::read_to_string(home.path().join("omp.log")).unwrap_or_default();
            error.context(format!("omp did not come up with the bridge (it said: {:?})", said.trim()))
        })?;
        Ok(Self { child, _home: home, endpoint, orders: BufReader::new(orders) })
    }

    /// Calls per second of the loop inside the process.
    fn in_process(&mut self, order: &str) -> Result<f64> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Found {
            Done { calls: u64, millis: f64 },
            Failed { error: String },
        }
        writeln!(self.orders.get_mut(), "{order}")?;
        let mut line = String::new();
        self.orders.read_line(&mut line)?;
        match serde_json::from_str(&line).with_context(|| format!("no answer of the loop: {line}"))? {
            Found::Done { calls, millis } => Ok(calls as f64 / millis * 1e3),
            Found::Failed { error } => bail!("the loop in omp failed: {error}"),
        }
    }

    fn stop(mut self) -> Result<()> {
        drop(self.child.stdin.take());
        let deadline = Instant::now() + STOP_LIMIT;
        while self.child.try_wait()?.is_none() {
            ensure!(
                Instant::now() < deadline,
                "omp did not end within {STOP_LIMIT:?} of the end of its stdin"
            );
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

/// Waits for both: the bridge's port and the loop's socket.
fn meet(child: &mut Child, agent_dir: &Path, socket: &Path) -> Result<(Endpoint, UnixStream)> {
    let deadline = Instant::now() + START_LIMIT;
    let port: PathBuf = agent_dir.join("a2mcp.state/port");
    loop {
        let port = std::fs::read_to_string(&port).ok().and_then(|port| port.trim().parse::<u16>().ok());
        if let (Some(port), Ok(orders)) = (port, UnixStream::connect(socket)) {
            orders.set_read_timeout(Some(START_LIMIT))?;
            let endpoint = Endpoint::open(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), agent_dir)?;
            endpoint.initialized()?;
            return Ok((endpoint, orders));
        }
        if let Some(status) = child.try_wait()? {
            bail!("it ended: {status}");
        }
        ensure!(Instant::now() < deadline, "not ready within {START_LIMIT:?}");
        std::thread::sleep(POLL);
    }
}
