//! The speed of the sidecar, measured next to a bare hyper server ("the floor") in one run.
//!
//! `cargo bench --bench bridge` starts the reference host with its sidecar and the floor, drives both
//! in turns over keep-alive connections and prints requests per second, latency, CPU and memory, and
//! how they stand to their aims; files go through `/xfer/` and directly to dufs, where tests/setup has
//! built one. `--quick` takes about 30 s, `--million` adds a run over a million
//! calls, `--omp` one in a real omp, `--json` is for machines, `--gate` fails when a figure is ten
//! times worse than its aim; `--wrap` measures `a2mcp wrap` instead, next to others of its kind. All load comes from one thread of this process; run it on a quiet
//! machine with two cores at least.

mod aims;
mod catalogue;
mod endpoint;
mod files;
mod load;
mod omp;
mod process;
mod report;
mod server;
mod wrap;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Parser;

use load::{Connections, Until};
use report::{Figures, Flatness, Operation, Row};
use server::{Bridge, Floor};

/// Measures the sidecar with the reference host against a bare hyper server.
#[derive(Parser)]
#[command(name = "bridge")]
struct Options {
    /// Short segments and fewer rounds: about 30 s.
    #[arg(long)]
    quick: bool,
    /// Also a million `tools/call`, to see whether speed and memory stay flat.
    #[arg(long)]
    million: bool,
    /// Also `read` in a real omp (installed by tests/setup), next to a loop inside that omp.
    #[arg(long)]
    omp: bool,
    /// Measures `a2mcp wrap` instead, next to other programs that put a stdio server behind HTTP (all
    /// installed by tests/setup).
    #[arg(long)]
    wrap: bool,
    /// One line of JSON on stdout in place of the table.
    #[arg(long)]
    json: bool,
    /// Exit code 1 when a figure is worse than its aim by more than a factor of ten.
    #[arg(long)]
    gate: bool,
    /// Measure this binary in place of the one built with the bench.
    #[arg(long, value_name = "PATH", default_value = env!("CARGO_BIN_EXE_a2mcp"))]
    binary: PathBuf,
    /// Run as the floor: answer every request with a body of this many bytes.
    #[arg(long, value_name = "BYTES", hide = true)]
    floor: Option<usize>,
    /// What `cargo bench` passes to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

/// How long one look at one operation takes, and how often it is repeated.
struct Pace {
    starts: usize,
    rounds: usize,
    warm_up: Duration,
    segment: Duration,
}

impl Pace {
    fn of(options: &Options) -> Self {
        let (starts, rounds, segment) = if options.quick { (3, 3, 400) } else { (9, 7, 1500) };
        Self { starts, rounds, warm_up: Duration::from_millis(100), segment: Duration::from_millis(segment) }
    }
}

const CONCURRENCY: [usize; 3] = [1, 8, 64];
/// Long enough for what a start leaves behind (freed pages, first audit write) to settle.
const SETTLE: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<ExitCode> {
    if let Some(bytes) = options.floor {
        server::serve_floor(bytes)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = std::io::stdout().lock();
    let misses = if options.wrap {
        warn_when_busy();
        let pace = Pace::of(options);
        let found = wrap::measure(&options.binary, &pace, &mut load::FIRST_ID.clone())?;
        let misses = found.misses(aims::TOLERANCE);
        if options.json {
            writeln!(out, "{}", found.json(&misses))?;
        } else {
            write!(out, "{}", found.table())?;
        }
        misses
    } else {
        let figures = measure(options)?;
        let misses = aims::misses(&figures);
        if options.json {
            writeln!(out, "{}", report::json(&figures, &misses))?;
        } else {
            write!(out, "{}", report::table(&figures))?;
        }
        misses
    };
    if !options.gate {
        return Ok(ExitCode::SUCCESS);
    }
    for miss in &misses {
        eprintln!("gate: {miss}");
    }
    if misses.is_empty() {
        eprintln!("gate: no figure is worse than its aim by more than a factor of ten");
        return Ok(ExitCode::SUCCESS);
    }
    Ok(ExitCode::FAILURE)
}

fn measure(options: &Options) -> Result<Figures> {
    let pace = Pace::of(options);
    let load_average = warn_when_busy();
    let catalogue = catalogue::write()?;

    let mut starts = Vec::new();
    for _ in 0..pace.starts {
        let bridge = Bridge::start(&options.binary, catalogue.path(), "{}")?;
        starts.push(bridge.first_answer);
        bridge.stop()?;
    }

    let bridge = Bridge::start(&options.binary, catalogue.path(), "{}")?;
    std::thread::sleep(SETTLE);
    let idle = process::memory(bridge.pid)?;
    let ping = bridge.endpoint.ping()?;
    let list = bridge.endpoint.list()?;
    let echo = bridge.endpoint.echo()?;
    let streaming = Bridge::start(&options.binary, catalogue.path(), r#"{"streamAfterMs":0}"#)?;
    let streamed = streaming.endpoint.streamed_echo()?;
    let floor = Floor::start(ping.body_len())?;
    let fixed = floor.request(&ping)?;

    let mut rows: Vec<Row> = Vec::new();
    for operation in Operation::ALL {
        rows.extend(CONCURRENCY.map(|concurrency| Row::new(operation, concurrency)));
    }
    let mut next_id = load::FIRST_ID;
    for _ in 0..pace.rounds {
        // The operations take turns inside a round: what the machine does meanwhile hits all alike.
        for concurrency in CONCURRENCY {
            for operation in Operation::ALL {
                let (address, pid, request) = match operation {
                    Operation::Floor => (floor.address, floor.pid(), &fixed),
                    Operation::Ping => (bridge.endpoint.address, bridge.pid, &ping),
                    Operation::List => (bridge.endpoint.address, bridge.pid, &list),
                    Operation::Streamed => (streaming.endpoint.address, streaming.pid, &streamed),
                    Operation::Echo => (bridge.endpoint.address, bridge.pid, &echo),
                };
                let mut connections = Connections::open(address, concurrency)?;
                connections.drive(request, Until::Elapsed(pace.warm_up), &mut next_id)?;
                let before = process::cpu(pid)?;
                let segment = connections
                    .drive(request, Until::Elapsed(pace.segment), &mut next_id)
                    .with_context(|| format!("{} at {concurrency}", operation.name()))?;
                let cpu = process::cpu(pid)? - before;
                let Some(row) = rows.iter_mut().find(|row| row.is(operation, concurrency)) else {
                    bail!("no row for {} at {concurrency}", operation.name());
                };
                row.add(segment, cpu);
            }
        }
    }
    let flatness = if options.million { Some(million(&bridge, &echo, &mut next_id)?) } else { None };
    let loaded = process::memory(bridge.pid)?;
    let stream_kib = idle_streams(&streaming)?;
    floor.stop()?;
    streaming.stop()?;
    bridge.stop()?;
    let files = files::measure(&options.binary, catalogue.path(), options.quick, &mut next_id)?;
    let omp = if options.omp { omp::measure(&options.binary, &pace, &mut next_id)? } else { Vec::new() };
    Ok(Figures {
        load_average,
        starts,
        rows,
        list_bytes: list.body_len(),
        idle,
        loaded,
        stream_kib,
        flatness,
        files,
        omp,
    })
}

/// The load average, which is said when it is high.
fn warn_when_busy() -> f64 {
    let load_average = process::load_average();
    if load_average > 0.5 {
        eprintln!("bench: the load average is {load_average:.2}; the figures are those of a busy machine");
    }
    load_average
}

/// What one of 1,000 idle server streams costs in resident memory, in KiB.
fn idle_streams(bridge: &Bridge) -> Result<f64> {
    const STREAMS: usize = 1000;
    /// The bridge gives a session so many.
    const PER_SESSION: usize = 16;
    a2mcp::process::raise_open_files();
    let before = process::memory(bridge.pid)?.resident_kib;
    let mut streams = Vec::new();
    while streams.len() < STREAMS {
        let session = bridge.endpoint.another()?;
        for _ in 0..PER_SESSION {
            streams.push(session.listen()?);
        }
    }
    std::thread::sleep(SETTLE);
    let grown = process::memory(bridge.pid)?.resident_kib.saturating_sub(before);
    Ok(grown as f64 / streams.len() as f64)
}

/// A million calls in batches; what matters is how the last ones compare with the first ones.
fn million(bridge: &Bridge, echo: &load::Request, next_id: &mut u64) -> Result<Flatness> {
    const BATCH: u64 = 50_000;
    const BATCHES: u64 = 20;
    let mut flatness = Flatness::default();
    let mut connections = Connections::open(bridge.endpoint.address, 64)?;
    for batch in 1..=BATCHES {
        let before = process::cpu(bridge.pid)?;
        let segment = connections.drive(echo, Until::Count(BATCH), next_id)?;
        let cpu = process::cpu(bridge.pid)? - before;
        let resident = process::memory(bridge.pid)?.resident_kib;
        let calls = batch * BATCH;
        eprintln!("bench: {calls:>9} calls, {:>7.0}/s, CPU {cpu:.2?}, {resident} KiB", segment.rate());
        flatness.add(BATCH, cpu, resident);
    }
    Ok(flatness)
}
