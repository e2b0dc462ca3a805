//! The figures of one run and how they are shown.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use crate::aims::{self, ORIGINAL_LIST};
use crate::files::Files;
use crate::load::Segment;
use crate::process::Memory;

/// What is driven.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Operation {
    Floor,
    Ping,
    List,
    Echo,
    Streamed,
}

impl Operation {
    pub(crate) const ALL: [Self; 5] = [Self::Floor, Self::Ping, Self::List, Self::Echo, Self::Streamed];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Ping => "ping",
            Self::List => "tools/list",
            Self::Echo => "tools/call echo",
            Self::Streamed => "echo as a stream",
        }
    }
}

/// All segments of one operation at one concurrency.
pub(crate) struct Row {
    operation: Operation,
    concurrency: usize,
    segments: Vec<Segment>,
    cpu: Duration,
}

impl Row {
    pub(crate) fn new(operation: Operation, concurrency: usize) -> Self {
        Self { operation, concurrency, segments: Vec::new(), cpu: Duration::ZERO }
    }

    pub(crate) fn is(&self, operation: Operation, concurrency: usize) -> bool {
        self.operation == operation && self.concurrency == concurrency
    }

    pub(crate) fn add(&mut self, segment: Segment, cpu: Duration) {
        self.segments.push(segment);
        self.cpu += cpu;
    }

    fn rate(&self) -> f64 {
        median(self.segments.iter().map(Segment::rate))
    }

    fn micros(&self, share: f64) -> f64 {
        median(self.segments.iter().map(|segment| segment.percentile(share).as_secs_f64() * 1e6))
    }

    /// From the sums over all rounds: one segment is short against the clock's tick.
    fn cpu_micros(&self) -> f64 {
        let requests: u64 = self.segments.iter().map(Segment::requests).sum();
        self.cpu.as_secs_f64() * 1e6 / requests.max(1) as f64
    }

    /// The median of the ratios within each round, where both saw the same machine.
    fn share_of(&self, floor: &Row) -> f64 {
        median(self.segments.iter().zip(&floor.segments).map(|(own, floor)| own.rate() / floor.rate()))
    }
}

/// A run over a million calls, in batches of equal size.
#[derive(Default)]
pub(crate) struct Flatness {
    calls: u64,
    /// CPU time of the sidecar in a batch and its memory at the end, in KiB.
    batches: Vec<(Duration, u64)>,
}

impl Flatness {
    pub(crate) fn add(&mut self, calls: u64, cpu: Duration, resident_kib: u64) {
        self.calls += calls;
        self.batches.push((cpu, resident_kib));
    }

    /// From the end of the first tenth to the end of the last one.
    pub(crate) fn growth_kib(&self) -> u64 {
        let at = |index: usize| self.batches.get(index).map_or(0, |batch| batch.1);
        let tenth = (self.batches.len() / 10).max(1);
        at(self.batches.len().saturating_sub(1)).saturating_sub(at(tenth - 1))
    }

    /// CPU time of the last quarter over that of the first: other than the rate, it hardly depends on
    /// what else the machine does.
    pub(crate) fn cost_growth(&self) -> f64 {
        let cost = |batches: &[(Duration, u64)]| median(batches.iter().map(|batch| batch.0.as_secs_f64()));
        let quarter = (self.batches.len() / 4).max(1).min(self.batches.len());
        cost(&self.batches[self.batches.len() - quarter..]) / cost(&self.batches[..quarter])
    }
}

/// `read` in a real omp at one concurrency: per round the rate of the loop inside the process, and the
/// segment over HTTP.
pub(crate) struct InOmp {
    pub(crate) concurrency: usize,
    pub(crate) rounds: Vec<(f64, Segment)>,
}

impl InOmp {
    fn in_process(&self) -> f64 {
        median(self.rounds.iter().map(|(rate, _)| *rate))
    }

    fn over_http(&self) -> f64 {
        median(self.rounds.iter().map(|(_, segment)| segment.rate()))
    }

    fn micros(&self, share: f64) -> f64 {
        median(self.rounds.iter().map(|(_, segment)| segment.percentile(share).as_secs_f64() * 1e6))
    }

    fn share(&self) -> f64 {
        median(self.rounds.iter().map(|(rate, segment)| segment.rate() / rate))
    }
}

/// Everything one run found.
pub(crate) struct Figures {
    pub(crate) load_average: f64,
    pub(crate) starts: Vec<Duration>,
    pub(crate) rows: Vec<Row>,
    pub(crate) list_bytes: usize,
    pub(crate) idle: Memory,
    pub(crate) loaded: Memory,
    /// What an idle server stream costs, in KiB.
    pub(crate) stream_kib: f64,
    pub(crate) flatness: Option<Flatness>,
    /// Absent where there is no dufs.
    pub(crate) files: Option<Files>,
    pub(crate) omp: Vec<InOmp>,
}

impl Figures {
    pub(crate) fn start_ms(&self) -> f64 {
        median(self.starts.iter().map(|start| start.as_secs_f64() * 1e3))
    }

    fn share(&self, row: &Row) -> Option<f64> {
        let floor = self.rows.iter().find(|floor| floor.is(Operation::Floor, row.concurrency))?;
        Some(row.share_of(floor))
    }

    /// Calls answered by a stream against calls answered by JSON, the lowest over all concurrencies.
    pub(crate) fn worst_streamed(&self) -> Option<f64> {
        let streamed = self.rows.iter().filter(|row| row.operation == Operation::Streamed);
        let shares = streamed.filter_map(|row| {
            let plain = self.rows.iter().find(|plain| plain.is(Operation::Echo, row.concurrency))?;
            Some(row.share_of(plain))
        });
        shares.min_by(f64::total_cmp)
    }

    /// The lowest share of the floor over all concurrencies.
    pub(crate) fn worst_share(&self, operation: Operation) -> Option<f64> {
        let rows = self.rows.iter().filter(|row| row.operation == operation);
        rows.filter_map(|row| self.share(row)).min_by(f64::total_cmp)
    }

    fn times_original(row: &Row) -> Option<f64> {
        let original = ORIGINAL_LIST.iter().find(|(concurrency, _)| *concurrency == row.concurrency)?;
        Some(row.rate() / original.1)
    }

    /// `read` in a real omp against the loop inside it, the lowest over all concurrencies.
    pub(crate) fn worst_in_omp(&self) -> Option<f64> {
        self.omp.iter().map(InOmp::share).min_by(f64::total_cmp)
    }

    /// `tools/list` against the original, the lowest over all concurrencies.
    pub(crate) fn worst_list(&self) -> Option<f64> {
        let rows = self.rows.iter().filter(|row| row.operation == Operation::List);
        rows.filter_map(Self::times_original).min_by(f64::total_cmp)
    }
}

/// For people.
pub(crate) fn table(figures: &Figures) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_table(&mut text, figures);
    text
}

fn write_table(text: &mut String, figures: &Figures) -> std::fmt::Result {
    writeln!(
        text,
        "a2mcp with the reference host; tools/list {} bytes; load average at the start {:.2}",
        figures.list_bytes, figures.load_average
    )?;
    writeln!(text)?;
    writeln!(
        text,
        "{:<17} {:>4} {:>10} {:>10} {:>10} {:>10} {:>9} {:>9}",
        "operation", "conn", "req/s", "p50 µs", "p99 µs", "CPU µs", "of floor", "x orig."
    )?;
    for row in &figures.rows {
        let share = match row.operation {
            Operation::Floor => String::new(),
            _ => figures.share(row).map_or_else(String::new, |share| format!("{:.0} %", share * 100.0)),
        };
        let times = match row.operation {
            Operation::List => {
                Figures::times_original(row).map_or_else(String::new, |times| format!("{times:.1}"))
            }
            _ => String::new(),
        };
        writeln!(
            text,
            "{:<17} {:>4} {:>10.0} {:>10.0} {:>10.0} {:>10.1} {share:>9} {times:>9}",
            row.operation.name(),
            row.concurrency,
            row.rate(),
            row.micros(0.50),
            row.micros(0.99),
            row.cpu_micros(),
        )?;
    }
    writeln!(text)?;
    for row in &figures.omp {
        writeln!(
            text,
            "read in omp, {:>2} at once: {:.0}/s in the process, {:.0}/s over HTTP ({:.0} %), p50 {:.0} µs, p99 {:.0} µs",
            row.concurrency,
            row.in_process(),
            row.over_http(),
            row.share() * 100.0,
            row.micros(0.50),
            row.micros(0.99),
        )?;
    }
    for line in figures.files.iter().flat_map(Files::lines) {
        writeln!(text, "{line}")?;
    }
    for (when, memory) in [("idle", figures.idle), ("after the load", figures.loaded)] {
        writeln!(
            text,
            "sidecar memory {when}: {} KiB resident, {} KiB of it private, peak {} KiB",
            memory.resident_kib, memory.private_kib, memory.peak_kib
        )?;
    }
    writeln!(text)?;
    for line in aims::lines(figures) {
        writeln!(text, "{line}")?;
    }
    Ok(())
}

/// For machines: one line.
pub(crate) fn json(figures: &Figures, misses: &[String]) -> Value {
    let rows: Vec<Value> = figures
        .rows
        .iter()
        .map(|row| {
            json!({
                "operation": row.operation.name(),
                "concurrency": row.concurrency,
                "requestsPerSecond": row.rate(),
                "p50Micros": row.micros(0.50),
                "p99Micros": row.micros(0.99),
                "cpuMicros": row.cpu_micros(),
                "shareOfFloor": figures.share(row),
            })
        })
        .collect();
    let omp: Vec<Value> = figures
        .omp
        .iter()
        .map(|row| {
            json!({
                "concurrency": row.concurrency,
                "inProcessPerSecond": row.in_process(),
                "overHttpPerSecond": row.over_http(),
                "share": row.share(),
                "p50Micros": row.micros(0.50),
                "p99Micros": row.micros(0.99),
            })
        })
        .collect();
    let memory = |memory: Memory| {
        json!({
            "residentKib": memory.resident_kib,
            "privateKib": memory.private_kib,
            "peakKib": memory.peak_kib,
        })
    };
    json!({
        "loadAverage": figures.load_average,
        "startMillis": figures.start_ms(),
        "listBytes": figures.list_bytes,
        "rows": rows,
        "idle": memory(figures.idle),
        "loaded": memory(figures.loaded),
        "idleStreamKib": figures.stream_kib,
        "million": figures.flatness.as_ref().map(|flat| json!({
            "calls": flat.calls,
            "growthKib": flat.growth_kib(),
            "costGrowth": flat.cost_growth(),
        })),
        "files": figures.files.as_ref().map(|files| json!({
            "bytes": files.bytes,
            "getShare": files.get_share(),
            "putShare": files.put_share(),
            "smallShare": files.small_share(),
            "echoTimes": files.echo_times(),
            "growthKib": files.growth_kib,
        })),
        "readInOmp": omp,
        "misses": misses,
    })
}

pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}
