//! `a2mcp wrap` in front of npm `@modelcontextprotocol/server-everything`, next to other programs that put
//! a stdio server behind HTTP (npm `supergateway`, PyPI `mcp-proxy`), and next to that server alone over
//! its pipes, which is the most any of them can reach. All run the same `echo`, in turns, in one run.
//!
//! Each peer runs as its documentation says, its log going nowhere, with one session; supergateway answers
//! by streams, the others with JSON.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal};
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Pace;
use crate::endpoint::Endpoint;
use crate::load::{COUNTER, Connections, Request, Until};
use crate::report::median;

const CONCURRENCY: [usize; 3] = [1, 8, 64];
const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// What `wrap` should be against `supergateway`: concurrency, times.
const AIMS: [(usize, f64); 2] = [(1, 5.0), (64, 10.0)];
const NAMES: [&str; 4] = ["server alone", "a2mcp wrap", "supergateway", "mcp-proxy"];
const WRAP: usize = 1;
const SUPERGATEWAY: usize = 2;

/// What one program did at one concurrency: per round the rate, the median and the 99th percentile.
struct Row {
    concurrency: usize,
    who: usize,
    rounds: Vec<(f64, Duration, Duration)>,
}

/// Everything one run found.
pub(crate) struct Comparison {
    rows: Vec<Row>,
}

pub(crate) fn measure(binary: &Path, pace: &Pace, next_id: &mut u64) -> Result<Comparison> {
    let mut alone = Alone::start()?;
    let wrap = Gateway::wrap(binary)?;
    let others = [Gateway::supergateway()?, Gateway::mcp_proxy()?];
    let mut rows = Vec::new();
    for concurrency in CONCURRENCY {
        rows.extend((0..NAMES.len()).map(|who| Row { concurrency, who, rounds: Vec::new() }));
    }
    let gateways = [&wrap, &others[0], &others[1]];
    for _ in 0..pace.rounds {
        for row in &mut rows {
            let found = match row.who.checked_sub(1) {
                None => alone.drive(row.concurrency, pace.segment, next_id)?,
                Some(index) => {
                    let gateway = gateways[index];
                    let mut connections = Connections::open(gateway.endpoint.address, row.concurrency)?;
                    connections.drive(&gateway.echo, Until::Elapsed(pace.warm_up), next_id)?;
                    let segment = connections
                        .drive(&gateway.echo, Until::Elapsed(pace.segment), next_id)
                        .with_context(|| format!("{} at {}", NAMES[row.who], row.concurrency))?;
                    (segment.rate(), segment.percentile(0.5), segment.percentile(0.99))
                }
            };
            row.rounds.push(found);
        }
    }
    for gateway in others.into_iter().chain([wrap]) {
        gateway.stop()?;
    }
    alone.stop()?;
    Ok(Comparison { rows })
}

impl Row {
    fn rate(&self) -> f64 {
        median(self.rounds.iter().map(|round| round.0))
    }

    fn micros(&self, of: impl Fn(&(f64, Duration, Duration)) -> Duration) -> f64 {
        median(self.rounds.iter().map(|round| of(round).as_secs_f64() * 1e6))
    }
}

impl Comparison {
    fn row(&self, who: usize, concurrency: usize) -> Option<&Row> {
        self.rows.iter().find(|row| row.who == who && row.concurrency == concurrency)
    }

    /// The median of the ratios within each round, where both saw the same machine.
    fn times_supergateway(&self, row: &Row) -> Option<f64> {
        let peer = self.row(SUPERGATEWAY, row.concurrency)?;
        Some(median(row.rounds.iter().zip(&peer.rounds).map(|(own, peer)| own.0 / peer.0)))
    }

    /// Concurrency, aim, figure.
    fn aims(&self) -> impl Iterator<Item = (usize, f64, f64)> {
        AIMS.iter().filter_map(|&(concurrency, aim)| {
            Some((concurrency, aim, self.times_supergateway(self.row(WRAP, concurrency)?)?))
        })
    }

    /// For people.
    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(
            text,
            "{:<14} {:>4} {:>10} {:>10} {:>10} {:>14}",
            "echo through", "conn", "calls/s", "p50 µs", "p99 µs", "x supergateway"
        );
        for row in &self.rows {
            let times = self.times_supergateway(row).map_or_else(String::new, |times| format!("{times:.1}"));
            let _ = writeln!(
                text,
                "{:<14} {:>4} {:>10.0} {:>10.0} {:>10.0} {times:>14}",
                NAMES[row.who],
                row.concurrency,
                row.rate(),
                row.micros(|round| round.1),
                row.micros(|round| round.2),
            );
        }
        let _ = writeln!(text);
        for (concurrency, aim, figure) in self.aims() {
            let met = if figure >= aim { "met" } else { "missed" };
            let what = format!("wrap, times supergateway at {concurrency}");
            let _ = writeln!(text, "{what:<68} {figure:>8.2}   aim >= {aim:<6} {met}");
        }
        text
    }

    /// The figures that close the gate, in words.
    pub(crate) fn misses(&self, tolerance: f64) -> Vec<String> {
        let misses = self.aims().filter(|(_, aim, figure)| figure * tolerance < *aim);
        let words = |(concurrency, aim, figure): (usize, f64, f64)| {
            format!("wrap, times supergateway at {concurrency}: {figure:.2}, far below the aim of {aim}")
        };
        misses.map(words).collect()
    }

    /// For machines: one line.
    pub(crate) fn json(&self, misses: &[String]) -> Value {
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|row| {
                json!({
                    "program": NAMES[row.who],
                    "concurrency": row.concurrency,
                    "callsPerSecond": row.rate(),
                    "p50Micros": row.micros(|round| round.1),
                    "p99Micros": row.micros(|round| round.2),
                    "timesSupergateway": self.times_supergateway(row),
                })
            })
            .collect();
        json!({ "wrap": rows, "misses": misses })
    }
}

fn installed(part: &str) -> Result<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/real-parts").join(part);
    ensure!(path.exists(), "target/real-parts/{part} is missing: run tests/setup, which installs it");
    Ok(path)
}

fn server() -> Result<[String; 2]> {
    let script = installed("servers/node_modules/@modelcontextprotocol/server-everything/dist/index.js")?;
    Ok(["node".to_owned(), script.to_str().context("an odd path")?.to_owned()])
}

/// A program that serves the server over HTTP. Its process group ends with it.
struct Gateway {
    child: Child,
    endpoint: Endpoint,
    echo: Request,
    _dir: TempDir,
}

impl Gateway {
    fn wrap(binary: &Path) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let mut command = Command::new(binary);
        command.args(["wrap", "--json", "--agent-dir"]).arg(dir.path()).arg("--").args(server()?);
        command.env_remove("A2MCP_CONFIG").env_remove("A2MCP_AUDIT");
        let mut child = spawn(&mut command, Stdio::piped())?;
        let line = crate::server::first_line(&mut child)?;
        #[derive(Deserialize)]
        struct Ready {
            url: String,
            token: String,
        }
        let ready: Ready = serde_json::from_str(&line).with_context(|| format!("not ready but: {line}"))?;
        let endpoint = Endpoint::with_token(crate::server::address_of(&ready.url)?, &ready.token)?;
        endpoint.initialized()?;
        let echo = json_echo(&endpoint)?;
        Ok(Self { child, endpoint, echo, _dir: dir })
    }

    fn supergateway() -> Result<Self> {
        let script = installed("supergateway/node_modules/supergateway/dist/index.js")?;
        let port = free_port()?;
        let mut command = Command::new("node");
        command.arg(script).args(["--stdio", &server()?.map(|word| format!("'{word}'")).join(" ")]);
        command.args(["--outputTransport", "streamableHttp", "--stateful"]);
        command.args(["--port", &port.to_string()]);
        Self::meet(spawn(&mut command, Stdio::null())?, port, |endpoint| {
            endpoint.streamed("echo", arguments())
        })
    }

    fn mcp_proxy() -> Result<Self> {
        let port = free_port()?;
        let mut command = Command::new(installed("mcp-proxy/bin/mcp-proxy")?);
        command.args(["--port", &port.to_string(), "--"]).args(server()?);
        Self::meet(spawn(&mut command, Stdio::null())?, port, json_echo)
    }

    /// Waits until it opens a session.
    fn meet(child: Child, port: u16, echo: fn(&Endpoint) -> Result<Request>) -> Result<Self> {
        let mut child = Some(child);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let deadline = Instant::now() + START_LIMIT;
        loop {
            match Endpoint::with_token(address, "none") {
                Ok(endpoint) => {
                    endpoint.initialized()?;
                    let echo = echo(&endpoint)?;
                    let child = child.take().context("it was met before")?;
                    return Ok(Self { child, endpoint, echo, _dir: tempfile::tempdir()? });
                }
                Err(error) if Instant::now() > deadline => {
                    if let Some(mut child) = child {
                        end(&mut child);
                    }
                    return Err(error.context("it did not come up"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    fn stop(mut self) -> Result<()> {
        let pid = Pid::from_raw(self.child.id().cast_signed()).context("it has no process id")?;
        rustix::process::kill_process(pid, Signal::INT)?;
        let deadline = Instant::now() + STOP_LIMIT;
        while self.child.try_wait()?.is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

/// Ends a whole process group.
fn end(child: &mut Child) {
    if let Some(group) = Pid::from_raw(child.id().cast_signed()) {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    let _ = child.wait();
}

fn spawn(command: &mut Command, stdout: Stdio) -> Result<Child> {
    let program = command.get_program().to_owned();
    let command = command.stdin(Stdio::null()).stdout(stdout).stderr(Stdio::null()).process_group(0);
    command.spawn().with_context(|| format!("cannot start {}", program.display()))
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

fn json_echo(endpoint: &Endpoint) -> Result<Request> {
    endpoint.call("echo", arguments(), |echoed| echoed.contains(COUNTER))
}

fn arguments() -> Value {
    json!({ "message": format!("bench {COUNTER}") })
}

/// The server without anything in front of it.
struct Alone {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Alone {
    fn start() -> Result<Self> {
        let [node, script] = server()?;
        let mut child = Command::new(node)
            .arg(script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let input = child.stdin.take().context("no stdin")?;
        let output = BufReader::with_capacity(64 << 10, child.stdout.take().context("no stdout")?);
        let mut alone = Self { child, input, output };
        let hello = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
            "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"},
        }});
        let initialized = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        write!(alone.input, "{hello}\n{initialized}\n")?;
        alone.answer()?;
        Ok(alone)
    }

    /// The next line that is an answer, by its counter.
    fn answer(&mut self) -> Result<u64> {
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line)? == 0 {
                bail!("the server ended");
            }
            if let Some(at) = line.rfind("\"id\":") {
                let digits: String = line[at + 5..].chars().take_while(char::is_ascii_digit).collect();
                return Ok(digits.parse()?);
            }
        }
    }

    fn drive(
        &mut self,
        concurrency: usize,
        time: Duration,
        next_id: &mut u64,
    ) -> Result<(f64, Duration, Duration)> {
        let mut under_way = std::collections::HashMap::new();
        let mut latencies = Vec::new();
        let started = Instant::now();
        let mut send = |input: &mut ChildStdin, under_way: &mut std::collections::HashMap<u64, Instant>| {
            let id = *next_id;
            *next_id += 1;
            under_way.insert(id, Instant::now());
            writeln!(
                input,
                r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"echo","arguments":{{"message":"bench {id}"}}}}}}"#
            )
        };
        for _ in 0..concurrency {
            send(&mut self.input, &mut under_way)?;
        }
        while !under_way.is_empty() {
            let id = self.answer()?;
            latencies.extend(under_way.remove(&id).map(|sent| sent.elapsed()));
            if started.elapsed() < time {
                send(&mut self.input, &mut under_way)?;
            }
        }
        let elapsed = started.elapsed();
        latencies.sort_unstable();
        let at = |share: f64| {
            let last = latencies.len().saturating_sub(1) as f64;
            latencies.get((last * share).round() as usize).copied().unwrap_or_default()
        };
        Ok((latencies.len() as f64 / elapsed.as_secs_f64(), at(0.5), at(0.99)))
    }

    fn stop(mut self) -> Result<()> {
        drop(self.input);
        self.child.wait()?;
        Ok(())
    }
}
