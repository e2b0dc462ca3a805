//! When the next sidecar starts, and when a silent one counts as hung (contract 15). Pure: callers
//! say what happened and what time it is, and do what they are told.
//!
//! ```text
//! start ──hello answered──▶ serving ──death──▶ start (at once; from the 3rd death in 10 s on after 1 s)
//!   └─ended before──▶ start, 5 in a row ──▶ failed      goodbye stop ──▶ stopped     exit 78 ──▶ refused
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::launch::Exit;
use crate::frame::messages::{GoodbyeReason, RpcError, code};

/// The exit code that asks for the next sidecar (contract 16).
pub const EXIT_RESTART: i32 = 75;
/// The exit code that says the config was refused (contract 16).
pub const EXIT_REFUSED: i32 = 78;

/// So many starts in a row may end before `hello` was answered.
const FAILED_STARTS: u32 = 5;
/// Deaths are counted over this time …
const DEATH_WINDOW: Duration = Duration::from_secs(10);
/// … and from this one on the next start waits …
const DEATHS_UNTIL_PAUSE: usize = 3;
/// … for so long.
const PAUSE: Duration = Duration::from_secs(1);

/// How a sidecar's life ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// It said goodbye with `restart`, or left with [`EXIT_RESTART`].
    AskedForRestart,
    /// It said goodbye with `stop`.
    Stopped,
    /// It refused the config or the protocol; the reason is for people.
    Refused(String),
    /// Trying again cannot help, e.g. its port is taken; the reason is for people.
    Hopeless(String),
    /// Anything else; the reason is for people.
    Died(String),
}

/// What is known of a sidecar's end.
#[derive(Debug, Clone)]
pub struct Last {
    /// How its process ended.
    pub exit: Exit,
    /// The reason of its goodbye.
    pub goodbye: Option<GoodbyeReason>,
    /// Its error to `hello`.
    pub refusal: Option<RpcError>,
    /// Why this side ended it.
    pub verdict: Option<String>,
    /// The last line it wrote to stderr.
    pub words: Option<String>,
}

impl Last {
    /// What that means. What was said counts more than how the process ended.
    pub fn judge(self) -> Ending {
        let Self { exit, goodbye, refusal, verdict, words } = self;
        if let Some(error) = refusal {
            return match i32::try_from(error.code) {
                Ok(code::PORT_BUSY) => Ending::Hopeless(error.message),
                Ok(code::CONFIG_REFUSED | code::PROTOCOL_NOT_SPOKEN) => Ending::Refused(error.message),
                _ if exit == Exit::Code(EXIT_REFUSED) => Ending::Refused(error.message),
                _ => Ending::Died(error.message),
            };
        }
        match (goodbye, exit) {
            (Some(GoodbyeReason::Stop), _) => Ending::Stopped,
            (Some(GoodbyeReason::Restart), _) | (_, Exit::Code(EXIT_RESTART)) => Ending::AskedForRestart,
            (_, Exit::Code(EXIT_REFUSED)) => {
                Ending::Refused(words.unwrap_or_else(|| "it gave no reason".to_owned()))
            }
            _ => Ending::Died(match (verdict, words) {
                (Some(verdict), _) => verdict,
                (None, Some(words)) => format!("{exit}; its last words: {words}"),
                (None, None) => exit.to_string(),
            }),
        }
    }
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Start another one after this pause.
    Start(Duration),
    /// Do not: it was stopped.
    Stopped,
    /// Do not: it refuses; the reason is for people.
    Refused(String),
    /// Do not: it cannot be started; the reason is for people.
    Failed(String),
}

/// Decides about the next start.
#[derive(Debug, Default)]
pub struct RestartPolicy {
    has_greeted: bool,
    failed_starts: u32,
    deaths: VecDeque<Instant>,
}

impl RestartPolicy {
    /// The sidecar answered `hello`: its start succeeded.
    pub fn greeted(&mut self) {
        self.has_greeted = true;
        self.failed_starts = 0;
    }

    /// A sidecar's life ended at `now`.
    pub fn ended(&mut self, ending: Ending, now: Instant) -> Next {
        let had_greeted = std::mem::take(&mut self.has_greeted);
        let reason = match ending {
            Ending::Stopped => return Next::Stopped,
            Ending::Refused(reason) => return Next::Refused(reason),
            Ending::Hopeless(reason) => return Next::Failed(reason),
            // Planned, so it is no death. Before hello nothing was planned: that start failed.
            Ending::AskedForRestart if had_greeted => return Next::Start(Duration::ZERO),
            Ending::AskedForRestart => "it asked for a restart before it served".to_owned(),
            Ending::Died(reason) => reason,
        };
        if !had_greeted {
            self.failed_starts += 1;
            if self.failed_starts >= FAILED_STARTS {
                self.failed_starts = 0;
                return Next::Failed(format!(
                    "{FAILED_STARTS} starts in a row failed, the last one: {reason}"
                ));
            }
        }
        self.deaths.push_back(now);
        self.deaths.retain(|death| now.saturating_duration_since(*death) < DEATH_WINDOW);
        let pause = if self.deaths.len() >= DEATHS_UNTIL_PAUSE { PAUSE } else { Duration::ZERO };
        Next::Start(pause)
    }
}

/// How often a sidecar is pinged.
pub const PING_EVERY: Duration = Duration::from_secs(5);
/// So many pings in a row without an answer, and without any byte, mean a hung sidecar.
const UNANSWERED: u32 = 3;
/// A tick that comes later than this was late because this process stood still, not the sidecar.
const LATE: Duration = Duration::from_secs(1);

/// Judges whether a sidecar is hung, one tick at a time.
#[derive(Debug)]
pub struct Liveness {
    every: Duration,
    due: Instant,
    pinged: bool,
    silent_pings: u32,
    lag: Duration,
}

/// What a tick asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tick {
    /// Send a ping.
    Ping,
    /// Kill the sidecar.
    Hung,
}

impl Liveness {
    /// The first tick is due `every` after `now`.
    pub fn new(every: Duration, now: Instant) -> Self {
        Self { every, due: now + every, pinged: false, silent_pings: 0, lag: Duration::ZERO }
    }

    /// When the next tick is due.
    pub fn due(&self) -> Instant {
        self.due
    }

    /// How late the last tick came: the lag of this process's own loop.
    pub fn lag(&self) -> Duration {
        self.lag
    }

    /// A tick at `now`; `heard` says whether any byte came since the tick before. Whoever calls
    /// has read what had arrived first.
    pub fn tick(&mut self, now: Instant, heard: bool) -> Tick {
        self.lag = now.saturating_duration_since(self.due);
        if heard || self.lag > LATE {
            self.silent_pings = 0;
        } else if self.pinged {
            self.silent_pings += 1;
        }
        self.due = now + self.every;
        self.pinged = true;
        if self.silent_pings >= UNANSWERED { Tick::Hung } else { Tick::Ping }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn died() -> Ending {
        Ending::Died("exit code 1".into())
    }

    #[test]
    fn five_failed_starts_in_a_row_are_a_failure_that_names_the_last_reason() {
        let (mut policy, now) = (RestartPolicy::default(), Instant::now());
        for _ in 0..4 {
            assert!(matches!(policy.ended(died(), now), Next::Start(_)));
        }
        let Next::Failed(reason) = policy.ended(died(), now) else { panic!("the fifth fails") };
        assert!(reason.contains("exit code 1"), "{reason}");
    }

    #[test]
    fn an_answered_hello_forgets_the_failed_starts() {
        let (mut policy, now) = (RestartPolicy::default(), Instant::now());
        for _ in 0..20 {
            for _ in 0..4 {
                assert!(matches!(policy.ended(died(), now), Next::Start(_)));
            }
            policy.greeted();
            assert!(matches!(policy.ended(died(), now), Next::Start(_)));
        }
    }

    #[test]
    fn the_third_death_within_ten_seconds_and_later_ones_pause_a_second() {
        let (mut policy, start) = (RestartPolicy::default(), Instant::now());
        let mut die_at = |seconds: u64| {
            policy.greeted();
            policy.ended(died(), start + Duration::from_secs(seconds))
        };
        assert_eq!(die_at(0), Next::Start(Duration::ZERO));
        assert_eq!(die_at(4), Next::Start(Duration::ZERO));
        assert_eq!(die_at(9), Next::Start(PAUSE));
        assert_eq!(die_at(10), Next::Start(PAUSE), "4, 9 and 10");
        assert_eq!(die_at(25), Next::Start(Duration::ZERO));
    }

    #[test]
    fn a_planned_restart_is_no_death() {
        let (mut policy, now) = (RestartPolicy::default(), Instant::now());
        for _ in 0..10 {
            policy.greeted();
            assert_eq!(policy.ended(Ending::AskedForRestart, now), Next::Start(Duration::ZERO));
        }
    }

    #[test]
    fn asking_for_a_restart_before_serving_cannot_go_on_for_ever() {
        let (mut policy, now) = (RestartPolicy::default(), Instant::now());
        let nexts: Vec<_> = (0..5).map(|_| policy.ended(Ending::AskedForRestart, now)).collect();
        assert!(matches!(nexts.last(), Some(Next::Failed(_))), "{nexts:?}");
    }

    #[test]
    fn stopped_and_refused_are_final() {
        let (mut policy, now) = (RestartPolicy::default(), Instant::now());
        policy.greeted();
        assert_eq!(policy.ended(Ending::Stopped, now), Next::Stopped);
        assert_eq!(policy.ended(Ending::Refused("port".into()), now), Next::Refused("port".into()));
        assert_eq!(policy.ended(Ending::Hopeless("busy".into()), now), Next::Failed("busy".into()));
    }

    /// Ticks at the given seconds, with whether something was heard before each.
    fn ticks(ticks: &[(f64, bool)]) -> Vec<Tick> {
        let start = Instant::now();
        let mut liveness = Liveness::new(PING_EVERY, start);
        ticks.iter().map(|(at, heard)| liveness.tick(start + Duration::from_secs_f64(*at), *heard)).collect()
    }

    #[test]
    fn three_unanswered_pings_in_silence_mean_hung() {
        let verdicts = ticks(&[(5.0, false), (10.0, false), (15.0, false), (20.0, false)]);
        assert_eq!(verdicts, [Tick::Ping, Tick::Ping, Tick::Ping, Tick::Hung]);
    }

    #[test]
    fn any_byte_counts_as_life() {
        let verdicts = ticks(&[(5.0, false), (10.0, false), (15.0, false), (20.0, true), (25.0, false)]);
        assert_eq!(verdicts.last(), Some(&Tick::Ping));
    }

    #[test]
    fn a_late_tick_blames_this_process_and_counts_anew() {
        let verdicts = ticks(&[(5.0, false), (10.0, false), (15.0, false), (21.1, false), (26.1, false)]);
        assert!(!verdicts.contains(&Tick::Hung), "{verdicts:?}");
    }
}
