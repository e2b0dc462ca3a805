//! When a wrapped server that ended starts again. Pure.
//!
//! ```text
//! starting ──initialize answered──▶ running ──end──▶ starting (at once, then after 0.5, 1, 2 s)
//!     └──end, no answer──▶ starting, later    5 ends in 30 s, or 5 starts without answer ──▶ failed, tried every minute
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// So many ends within [`WINDOW`], or failed starts in a row, mean failed.
const LIMIT: usize = 5;
const WINDOW: Duration = Duration::from_secs(30);
/// The pauses before the starts after that: the second end on, in order.
const PAUSES: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(2)];
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
    ends: VecDeque<Instant>,
    failed_starts: usize,
}

impl Respawn {
    /// A server ended at `now`; `had_answered` says whether its start had succeeded.
    pub(super) fn ended(&mut self, had_answered: bool, now: Instant) -> Next {
        self.failed_starts = if had_answered { 0 } else { self.failed_starts + 1 };
        self.ends.retain(|end| now.saturating_duration_since(*end) < WINDOW);
        self.ends.push_back(now);
        if self.ends.len() >= LIMIT || self.failed_starts >= LIMIT {
            return Next::Failed(FAILED_PAUSE);
        }
        let recent = self.ends.len().max(self.failed_starts);
        Next::Start(PAUSES.get(recent - 1).copied().unwrap_or(FAILED_PAUSE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nexts(ends: &[(u64, bool)]) -> Vec<Next> {
        let (mut respawn, start) = (Respawn::default(), Instant::now());
        ends.iter().map(|(at, answered)| respawn.ended(*answered, start + Duration::from_secs(*at))).collect()
    }

    #[test]
    fn a_server_that_dies_now_and_then_starts_at_once() {
        let start = Next::Start(Duration::ZERO);
        assert_eq!(
            nexts(&[(0, true), (40, true), (80, true), (120, true), (160, true), (200, true)]),
            [start; 6]
        );
    }

    #[test]
    fn five_ends_in_thirty_seconds_are_a_failure_and_the_pauses_grow_before() {
        let found = nexts(&[(0, true), (1, true), (2, true), (3, true), (5, true), (66, true)]);
        let mut expected: Vec<Next> = PAUSES.map(Next::Start).to_vec();
        expected.extend([Next::Failed(FAILED_PAUSE), Next::Start(Duration::ZERO)]);
        assert_eq!(found, expected);
    }

    #[test]
    fn a_start_that_fails_slowly_fails_too_and_stays_so_until_one_succeeds() {
        let slow: Vec<(u64, bool)> = (0..7).map(|n| (n * 100, false)).collect();
        let found = nexts(&slow);
        assert_eq!(found[3], Next::Start(PAUSES[3]));
        assert_eq!(found[4..], [Next::Failed(FAILED_PAUSE); 3]);
        let found = nexts(&[(0, false), (100, false), (200, false), (300, false), (400, true), (500, false)]);
        assert_eq!(found[4..], [Next::Start(Duration::ZERO), Next::Start(Duration::ZERO)]);
    }
}
