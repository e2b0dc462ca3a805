//! What the figures should be, and the gate: a figure ten times worse than its aim is a fault, not
//! a slow machine.

use crate::files::Files;
use crate::report::{Figures, Flatness, Operation};

/// One aim of the project.
struct Aim {
    what: &'static str,
    /// At least this; for sizes and times, at most this.
    aim: f64,
    is_limit: bool,
    figure: fn(&Figures) -> Option<f64>,
}

/// How much worse than its aim a figure may be before the gate closes.
pub(crate) const TOLERANCE: f64 = 10.0;

/// `tools/list` of the original, the in-process predecessor, per second at 1, 8 and 64 connections.
pub(crate) const ORIGINAL_LIST: [(usize, f64); 3] = [(1, 1_302.0), (8, 1_885.0), (64, 2_076.0)];

/// Source: the aims under "Speed" in the README.
const AIMS: &[Aim] = &[
    Aim {
        what: "ping, share of the floor",
        aim: 0.60,
        is_limit: false,
        figure: |f| f.worst_share(Operation::Ping),
    },
    Aim {
        what: "echo, share of the floor",
        aim: 0.25,
        is_limit: false,
        figure: |f| f.worst_share(Operation::Echo),
    },
    Aim { what: "tools/list, times the original", aim: 10.0, is_limit: false, figure: Figures::worst_list },
    Aim {
        what: "echo as a stream, share of echo as JSON",
        aim: 0.60,
        is_limit: false,
        figure: Figures::worst_streamed,
    },
    Aim { what: "an idle server stream, KiB", aim: 20.0, is_limit: true, figure: |f| Some(f.stream_kib) },
    Aim { what: "spawn to first 200, ms", aim: 50.0, is_limit: true, figure: |f| Some(f.start_ms()) },
    Aim {
        what: "idle RSS, MiB",
        aim: 5.0,
        is_limit: true,
        figure: |f| Some(f.idle.resident_kib as f64 / 1024.0),
    },
    Aim {
        what: "growth from 100,000 to 1,000,000 calls, MiB",
        aim: 1.0,
        is_limit: true,
        figure: |f| f.flatness.as_ref().map(|flat| flat.growth_kib() as f64 / 1024.0),
    },
    Aim {
        what: "CPU per call at the end of 1,000,000, times that at the beginning",
        aim: 1.1,
        is_limit: true,
        figure: |f| f.flatness.as_ref().map(Flatness::cost_growth),
    },
    Aim {
        what: "GET of a large file, share of dufs",
        aim: 0.85,
        is_limit: false,
        figure: |f| f.files.as_ref().map(Files::get_share),
    },
    Aim {
        what: "PUT of a large file, share of dufs",
        aim: 0.85,
        is_limit: false,
        figure: |f| f.files.as_ref().map(Files::put_share),
    },
    Aim {
        what: "GETs of 1 KB, 16 at once, share of dufs",
        aim: 0.60,
        is_limit: false,
        figure: |f| f.files.as_ref().map(Files::small_share),
    },
    Aim {
        what: "echo p99 during a download, times that without",
        aim: 3.0,
        is_limit: true,
        figure: |f| f.files.as_ref().map(Files::echo_times),
    },
    Aim {
        what: "growth over large transfers, MiB",
        aim: 16.0,
        is_limit: true,
        figure: |f| f.files.as_ref().map(|files| files.growth_kib as f64 / 1024.0),
    },
    Aim {
        what: "read in omp, share of a loop inside the process",
        aim: 0.85,
        is_limit: false,
        figure: Figures::worst_in_omp,
    },
];

/// A line per aim: what, figure, aim, whether it is met.
pub(crate) fn lines(figures: &Figures) -> Vec<String> {
    AIMS.iter()
        .filter_map(|aim| {
            let figure = (aim.figure)(figures)?;
            let met = if aim.is_met(figure, 1.0) { "met" } else { "missed" };
            let bound = if aim.is_limit { "<=" } else { ">=" };
            Some(format!("{:<68} {figure:>8.2}   aim {bound} {:<6} {met}", aim.what, aim.aim))
        })
        .collect()
}

/// The figures that close the gate, in words.
pub(crate) fn misses(figures: &Figures) -> Vec<String> {
    AIMS.iter()
        .filter_map(|aim| {
            let figure = (aim.figure)(figures)?;
            let miss = !aim.is_met(figure, TOLERANCE);
            miss.then(|| format!("{}: {figure:.2}, ten times worse than the aim of {}", aim.what, aim.aim))
        })
        .collect()
}

impl Aim {
    fn is_met(&self, figure: f64, tolerance: f64) -> bool {
        if self.is_limit { figure <= self.aim * tolerance } else { figure >= self.aim / tolerance }
    }
}
