//! When a wrapped server that ended starts again. Pure.
//!
//! ```text
//! starting ──initialize answered──▶ running ──end──▶ starting, after a pause that grows
//!     └──end, no answer──▶ starting, later    5 ends in 30 s, or 5 starts without answer ──▶ failed, tried every minute
//! ```
//! The pauses and the first limit are those of every child ([`Restarts`]). A server that takes long to
//! fail never reaches that limit, hence the second. Other than a child of the sidecar it may come back by
//! itself, when what it needs is there again: nobody is there to ask for it.

use std::time::{Duration, Instant};

use crate::supervise::{self, Restarts};

/// So many failed starts in a row mean failed.
const LIMIT: u32 = 5;
/// How often a failed one is tried.
const FAILED_PAUSE: Duration = Duration::from_secs(60);

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// A start after this pause; callers wait for it.
    Start(Duration),
    /// A start after this pause; callers are told that it failed.
    Failed(Duration),
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Respawn {
    restarts: Restarts,
    failed_starts: u32,
}

impl Respawn {
    /// A server ended at `now`; `had_answered` says whether its start had succeeded. For `chance` see
    /// [`Restarts::ended`].
    pub(super) fn ended(&mut self, had_answered: bool, now: Instant, chance: f64) -> Next {
        self.failed_starts = if had_answered { 0 } else { self.failed_starts.saturating_add(1) };
        match self.restarts.ended(now, chance) {
            supervise::Next::After(pause) if self.failed_starts < LIMIT => Next::Start(pause),
            _ => Next::Failed(FAILED_PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn have_failed(ends: &[(u64, bool)]) -> Vec<bool> {
        let (mut respawn, start) = (Respawn::default(), Instant::now());
        let next = |(at, answered): &(u64, bool)| {
            respawn.ended(*answered, start + Duration::from_secs(*at), 0.0) == Next::Failed(FAILED_PAUSE)
        };
        ends.iter().map(next).collect()
    }

    #[test]
    fn a_server_that_dies_now_and_then_never_fails() {
        let ends: Vec<_> = (0..20).map(|n| (n * 40, true)).collect();
        assert_eq!(have_failed(&ends), [false; 20]);
    }

    #[test]
    fn five_ends_in_thirty_seconds_are_a_failure_until_it_holds_longer() {
        let ends = [(0, true), (1, true), (2, true), (3, true), (5, true), (66, true)];
        assert_eq!(have_failed(&ends), [false, false, false, false, true, false]);
    }

    #[test]
    fn five_starts_without_answer_are_one_however_slow_and_until_one_succeeds() {
        let slow: Vec<_> = (0..7).map(|n| (n * 100, false)).collect();
        assert_eq!(have_failed(&slow), [false, false, false, false, true, true, true]);
        let ends = [(0, false), (100, false), (200, false), (300, false), (400, true), (500, false)];
        assert_eq!(have_failed(&ends), [false; 6]);
    }
}
