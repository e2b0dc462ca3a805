//! When a child that ended by itself is started again (design, "who may die"): soon, later each time,
//! and not at all once it has died too often. Pure: the caller brings the time and the chance.
//!
//! The sidecar's own restarts are the shim's to decide, by other rules (contract 15).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// So many ends …
const LIMIT: usize = 5;
/// … within this mean that another start is of no use.
const WITHIN: Duration = Duration::from_secs(30);
/// The pause after one end; doubled with each further one that [`WITHIN`] still holds.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// The ends of one child that count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restarts {
    ends: VecDeque<Instant>,
}

/// What follows an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Start it again after this pause.
    After(Duration),
    /// Five ends in 30 s: give up and say why.
    Failed,
}

impl Restarts {
    /// The child has ended at `now` without having been told to. `chance`, from 0 to 1, shortens the
    /// pause by up to half, so that what fails together does not start together.
    pub fn ended(&mut self, now: Instant, chance: f64) -> Next {
        self.ends.retain(|end| now.duration_since(*end) < WITHIN);
        self.ends.push_back(now);
        if self.ends.len() >= LIMIT {
            return Next::Failed;
        }
        let doubled = FIRST_PAUSE * (1 << (self.ends.len() - 1));
        Next::After(doubled.mul_f64(1.0 - 0.5 * chance.clamp(0.0, 1.0)))
    }
}

/// A chance for [`Restarts::ended`].
pub fn chance() -> f64 {
    let (high, _) = uuid::Uuid::new_v4().as_u64_pair();
    (high >> 32) as f64 / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_the_fifth_end_in_thirty_seconds_is_the_last() {
        let (mut restarts, start) = (Restarts::default(), Instant::now());
        let nexts: Vec<_> =
            (0..5).map(|second| restarts.ended(start + Duration::from_secs(second), 0.0)).collect();
        let pauses = [250, 500, 1000, 2000].map(|ms| Next::After(Duration::from_millis(ms)));
        assert_eq!(nexts[..4], pauses);
        assert_eq!(nexts[4], Next::Failed);
    }

    #[test]
    fn ends_that_are_long_past_do_not_count() {
        let (mut restarts, start) = (Restarts::default(), Instant::now());
        for minute in 0..50 {
            let next = restarts.ended(start + Duration::from_secs(60 * minute), 0.0);
            assert_eq!(next, Next::After(FIRST_PAUSE));
        }
        for second in 0..4 {
            restarts.ended(start + Duration::from_secs(4000 + 10 * second), 0.0);
        }
        let later = restarts.ended(start + Duration::from_secs(4040), 0.0);
        assert!(matches!(later, Next::After(_)), "three of the last four are within 30 s: {later:?}");
    }

    #[test]
    fn chance_shortens_a_pause_by_half_at_most() {
        for chance in [-1.0, 0.0, 0.5, 1.0, 7.0] {
            let Next::After(pause) = Restarts::default().ended(Instant::now(), chance) else { panic!() };
            assert!(pause >= FIRST_PAUSE / 2 && pause <= FIRST_PAUSE, "{chance}: {pause:?}");
        }
        assert!((0.0..=1.0).contains(&chance()));
    }
}
