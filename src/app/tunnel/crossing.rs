//! Counts the requests that are under way through the tunnel. A quick tunnel carries 200 at a time and
//! refuses the rest with 429, so the operator is warned once before that.

use std::cell::Cell;
use std::rc::Rc;

use crate::http::Passage;

/// Above so many requests the operator is warned.
pub(super) const CROWDED: u64 = 150;

/// The requests of one public name.
#[derive(Default)]
pub(super) struct Crossing(Rc<Counts>);

#[derive(Default)]
struct Counts {
    now: Cell<u64>,
    peak: Cell<u64>,
    warned: Cell<bool>,
}

impl Crossing {
    /// One more request; whether this is the moment to warn.
    pub(super) fn enter(&self) -> (Passage, bool) {
        let now = self.0.now.get() + 1;
        self.0.now.set(now);
        self.0.peak.set(self.0.peak.get().max(now));
        let is_crowded = now > CROWDED && !self.0.warned.replace(true);
        let counts = self.0.clone();
        (Passage::new(move || counts.now.set(counts.now.get() - 1)), is_crowded)
    }

    /// How many are under way.
    pub(super) fn in_flight(&self) -> u64 {
        self.0.now.get()
    }

    /// Most that ever were.
    pub(super) fn peak(&self) -> u64 {
        self.0.peak.get()
    }

    /// Another name: what is under way counts on, the warning may come again.
    pub(super) fn begin_anew(&self) {
        self.0.peak.set(self.0.now.get());
        self.0.warned.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_warning_comes_once_for_each_name() {
        let crossing = Crossing::default();
        let crowd = |count| (0..count).map(|_| crossing.enter()).collect::<Vec<_>>();
        let warnings = |crowd: &[(Passage, bool)]| crowd.iter().filter(|(_, warned)| *warned).count();
        let first = crowd(CROWDED);
        assert_eq!(warnings(&first), 0);
        assert_eq!(warnings(&crowd(5)), 1);
        assert_eq!((crossing.in_flight(), crossing.peak()), (CROWDED, CROWDED + 5));
        assert_eq!(warnings(&crowd(5)), 0);
        crossing.begin_anew();
        assert_eq!(warnings(&crowd(5)), 1);
        drop(first);
        assert_eq!(crossing.in_flight(), 0);
    }
}
