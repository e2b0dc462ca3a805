//! What the tunnel does, as a pure machine: it is told what happened and when, and answers what is to
//! be done. It does no I/O and reads no clock; the driver brings both.
//!
//! ```text
//! closed ──operator──▶ opening ──edge connected──▶ open, not verified ◀──probe──▶ open
//!   ▲                    │  ▲                              │
//!   └──operator──        │  └── lost: another process, another name (5 in 30 s: failed)
//!                        └──▶ failed(reason)
//! ```
//!
//! Each process counts as a generation: what is heard of an older one (its end, a probe of it) changes
//! nothing.

mod parts;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::failure::Failure;
use super::log::Facts;
use super::probe::Verdict;
use crate::keeper::wire::Exit;
use crate::process::Identity;
use crate::supervise::{Next, Restarts};
pub(super) use parts::{Adopted, Child, Do, News, Proof, State, Up};

/// How long the host name may take (contract 7).
pub(super) const NAME_TIME: Duration = Duration::from_secs(30);
/// How long the connection to the edge may take (contract 7).
pub(super) const CONNECT_TIME: Duration = Duration::from_secs(60);
/// The pause after a 429, doubled with each further one.
pub(super) const LIMIT_PAUSE: Duration = Duration::from_secs(60);
/// Most 429s in a row that are waited out.
const MAX_LIMITS: u32 = 5;
/// A link that is down for so long, while Cloudflare can be reached, does not come back.
pub(super) const DOWN_TIME: Duration = Duration::from_secs(180);
/// Between the connection and the first probe: DNS learns a new name only now, and a resolver that
/// was asked too early remembers that there is none.
const FIRST_PROBE: Duration = Duration::from_secs(1);
/// Between the probes of a tunnel that works.
pub(super) const PROBE_EACH: Duration = Duration::from_secs(60);
/// So many probes that reached Cloudflare and did not come through mean that a tunnel that worked is
/// lost, whatever its process says.
const SILENT_PROBES: u32 = 3;
/// So many failed probes, or this time, are waited for before people hear that it is not verified.
const PATIENT_PROBES: u32 = 3;
const PATIENCE: Duration = Duration::from_secs(10);

/// Flags that a cloudflared may not know yet and that it works without.
const DISPENSABLE: [&str; 3] = ["output", "max-edge-addr-retries", "management-diagnostics"];

#[derive(Debug, Clone, PartialEq, Eq)]
enum Run {
    /// Nothing runs and nothing is wanted.
    None,
    /// The program is looked for.
    Obtaining,
    /// The keeper starts it.
    Spawning,
    Up(Box<Up>),
    /// It was lost and starts again later.
    Pausing {
        until: Instant,
        why: Failure,
    },
    /// It was lost with its keeper, and the next one is not there yet.
    Orphaned,
}

/// The machine.
#[derive(Debug)]
pub(super) struct Machine {
    run: Run,
    /// It was open since the operator opened it: then a loss is mended.
    was_open: bool,
    failed: Option<Failure>,
    /// No other try before.
    not_before: Option<Instant>,
    limits: u32,
    restarts: Restarts,
    /// How far the search for the program is.
    step: String,
    /// The program was found since the operator opened it.
    has_program: bool,
    /// Flags this binary does not know.
    dropped: BTreeSet<String>,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            run: Run::None,
            was_open: false,
            failed: None,
            not_before: None,
            limits: 0,
            restarts: Restarts::default(),
            step: String::new(),
            has_program: false,
            dropped: BTreeSet::new(),
        }
    }
}

impl Machine {
    /// How it stands.
    pub(super) fn state(&self) -> State<'_> {
        match &self.run {
            Run::None => self.failed.as_ref().map_or(State::Closed, State::Failed),
            Run::Obtaining if self.step.is_empty() => State::Opening("looking for cloudflared".into()),
            Run::Obtaining => State::Opening(self.step.clone()),
            Run::Spawning => State::Opening("starting cloudflared".into()),
            Run::Up(up) if up.open_since.is_some() => State::Open(up),
            Run::Up(up) => State::Opening(match (&up.name, &up.trouble) {
                (None, _) => "waiting for a name from Cloudflare".into(),
                (Some(name), None) => format!("connecting {name} with Cloudflare's edge"),
                (Some(name), Some(trouble)) => {
                    format!("connecting {name} with Cloudflare's edge ({trouble})")
                }
            }),
            Run::Pausing { why, .. } => {
                State::Opening(format!("it was lost and is opened again soon ({why})"))
            }
            Run::Orphaned => State::Opening("waiting for the next keeper".into()),
        }
    }

    /// The process that runs.
    pub(super) fn up(&self) -> Option<&Up> {
        match &self.run {
            Run::Up(up) => Some(up),
            _ => None,
        }
    }

    /// The name that `Host` may have: from the moment it is known until the tunnel is over.
    pub(super) fn name(&self) -> Option<&str> {
        self.up()?.name.as_deref()
    }

    /// Whether the operator wants one and it was open: a later sidecar then cares for it.
    pub(super) fn is_open(&self) -> bool {
        self.was_open && self.run != Run::None
    }

    /// Flags it is started without.
    pub(super) fn dropped(&self) -> &BTreeSet<String> {
        &self.dropped
    }

    /// The operator opens it. Again means: verify it now.
    pub(super) fn open(&mut self, now: Instant) -> Vec<Do> {
        match &mut self.run {
            Run::None => {}
            Run::Up(up) if up.open_since.is_some() => {
                up.next_probe = now;
                return self.tick(now, 0.0);
            }
            _ => return Vec::new(),
        }
        if self.not_before.is_some_and(|at| now < at) {
            return Vec::new();
        }
        *self = Self { run: Run::Obtaining, limits: self.limits, ..Self::default() };
        vec![Do::Obtain]
    }

    /// How long a refused service is still left alone.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        let left = self.not_before?.saturating_duration_since(now);
        (self.run == Run::None && !left.is_zero()).then_some(left)
    }

    /// The operator, or the end of the bridge, closes it.
    pub(super) fn close(&mut self) -> Vec<Do> {
        let run = std::mem::replace(&mut self.run, Run::None);
        self.failed = None;
        self.was_open = false;
        match run {
            Run::Up(up) => {
                let over = up.open_since.and(up.name).map(|name| Do::Over(name, None));
                [Do::Stop(up.child)].into_iter().chain(over).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The search for the program has come so far.
    pub(super) fn progress(&mut self, step: String) {
        self.step = step;
    }

    /// The program was found, or not.
    pub(super) fn obtained(&mut self, found: Result<(), Failure>) -> Vec<Do> {
        match found {
            _ if self.run != Run::Obtaining => Vec::new(),
            Ok(()) => {
                self.has_program = true;
                self.spawn()
            }
            Err(failure) => self.fail(failure),
        }
    }

    fn spawn(&mut self) -> Vec<Do> {
        if !self.has_program {
            self.run = Run::Obtaining;
            return vec![Do::Obtain];
        }
        self.run = Run::Spawning;
        vec![Do::Spawn(self.dropped.clone())]
    }

    /// The keeper has started it, or not.
    pub(super) fn spawned(&mut self, started: Result<Child, Failure>, now: Instant, chance: f64) -> Vec<Do> {
        match started {
            Ok(child) if self.run == Run::Spawning => {
                self.run = Run::Up(Box::new(Up::new(child, now)));
                Vec::new()
            }
            // It was closed meanwhile.
            Ok(child) => vec![Do::Stop(child)],
            Err(_) if self.run != Run::Spawning => Vec::new(),
            // Another start finds the same.
            Err(failure @ (Failure::Vanished { .. } | Failure::NotStarted(_))) => self.fail(failure),
            Err(failure) => self.lost(None, failure, now, chance),
        }
    }

    /// Takes over what an earlier sidecar had opened.
    pub(super) fn adopt(&mut self, up: Adopted, now: Instant) {
        let mut running = Up::new(up.child, up.since);
        running.name = up.name;
        running.metrics = up.metrics;
        running.protocol = up.protocol;
        running.fell_back = up.fell_back;
        running.open_since = up.open_since.filter(|_| running.name.is_some());
        running.told = running.open_since.map(|_| up.was_verified);
        running.was_verified = up.was_verified;
        if up.was_verified {
            running.proof = Proof::Verified(now);
        }
        running.next_probe = now + FIRST_PROBE;
        self.was_open = running.open_since.is_some();
        self.dropped = up.dropped;
        self.has_program = up.has_program;
        self.run = Run::Up(Box::new(running));
    }

    /// A tunnel that an earlier sidecar had open is not there any more.
    pub(super) fn missed(&mut self, why: Failure, now: Instant, chance: f64) -> Vec<Do> {
        self.was_open = true;
        self.lost_again(why, now, chance)
    }

    /// What its metrics port and its log say. `ready`: whether it is connected, when it said so.
    pub(super) fn saw(
        &mut self,
        child: Child,
        name: Option<String>,
        ready: Option<bool>,
        facts: Facts,
        now: Instant,
        chance: f64,
    ) -> Vec<Do> {
        let Run::Up(up) = &mut self.run else { return Vec::new() };
        if up.child != child {
            return Vec::new();
        }
        up.metrics = up.metrics.or(facts.metrics);
        up.protocol = facts.protocol.or(up.protocol.take());
        up.fell_back |= facts.fell_back;
        up.trouble = facts.trouble;
        up.name = up.name.take().or(name).or(facts.name);
        let Some(name) = up.name.clone() else { return self.tick(now, chance) };
        let mut todo = Vec::new();
        match ready {
            Some(true) if up.open_since.is_none() => {
                up.open_since = Some(now);
                up.next_probe = now + FIRST_PROBE;
                self.was_open = true;
                self.limits = 0;
                todo.push(Do::Opened(name));
            }
            Some(true) if up.down_since.take().is_some() => {
                // Back under the same name: looked at soon.
                up.misses = 0;
                up.next_probe = now + FIRST_PROBE;
            }
            Some(false) if up.open_since.is_some() => {
                if up.down_since.is_none() {
                    up.down_since = Some(now);
                    up.reached_cloudflare = false;
                }
                if up.trouble == Some(Failure::Deleted) {
                    return self.lose(Failure::Deleted, now, chance);
                }
            }
            _ => {}
        }
        todo.extend(self.tick(now, chance));
        todo
    }

    /// A process has ended. `gone` names the program, when its file is not there any more.
    pub(super) fn ended(
        &mut self,
        process: Identity,
        exit: Exit,
        facts: Facts,
        gone: Option<Failure>,
        now: Instant,
        chance: f64,
    ) -> Vec<Do> {
        let Run::Up(up) = &self.run else { return Vec::new() };
        if up.child.process != process {
            return Vec::new();
        }
        if let Some(flag) = facts.unknown_flag.filter(|flag| DISPENSABLE.contains(&flag.as_str()))
            && self.dropped.insert(flag)
        {
            return self.spawn();
        }
        // Whoever was killed did not end for what it had complained of.
        let complaint = facts.fatal.or(facts.trouble).filter(|_| matches!(exit, Exit::Code(_)));
        let why = complaint.unwrap_or(Failure::Ended(exit, facts.last));
        let name = self.over();
        let Some(vanished) = gone else { return self.lost(name, why, now, chance) };
        let over = name.map(|name| Do::Over(name, Some(vanished.clone())));
        over.into_iter().chain(self.fail(vanished)).collect()
    }

    /// A probe came back.
    pub(super) fn probed(&mut self, child: Child, verdict: Verdict, now: Instant, chance: f64) -> Vec<Do> {
        let Run::Up(up) = &mut self.run else { return Vec::new() };
        if up.child != child {
            return Vec::new();
        }
        up.is_probing = false;
        let why = match verdict {
            Verdict::Right => {
                up.proof = Proof::Verified(now);
                (up.was_verified, up.reached_cloudflare, up.misses) = (true, true, 0);
                up.next_probe = now + PROBE_EACH;
                return match up.told.replace(true) {
                    None => vec![Do::Tell(News::Open)],
                    Some(false) => vec![Do::Tell(News::Verified)],
                    Some(true) => Vec::new(),
                };
            }
            Verdict::Unclear(why) => {
                up.reached_cloudflare = false;
                why
            }
            Verdict::Wrong(why) => {
                up.reached_cloudflare = true;
                why
            }
        };
        up.misses = if up.was_verified && !up.reached_cloudflare { 0 } else { up.misses + 1 };
        up.next_probe = now + pause(up.misses);
        up.proof = Proof::Unverified(why.clone());
        if up.was_verified && up.reached_cloudflare && up.down_since.is_none() && up.misses >= SILENT_PROBES {
            return self.lose(Failure::Silent(why), now, chance);
        }
        let open_for = up.open_since.map(|since| now.saturating_duration_since(since));
        if up.told.is_none() && (up.misses >= PATIENT_PROBES || open_for >= Some(PATIENCE)) {
            up.told = Some(false);
            return vec![Do::Tell(News::Open)];
        }
        self.tick(now, chance)
    }

    /// The keeper has died, and what it ran with it.
    pub(super) fn keeper_lost(&mut self) -> Vec<Do> {
        let Run::Up(_) = &self.run else { return Vec::new() };
        let name = self.over();
        self.run = Run::Orphaned;
        name.map(|name| Do::Over(name, Some(Failure::KeeperLost))).into_iter().collect()
    }

    /// There is a keeper again.
    pub(super) fn keeper_back(&mut self, now: Instant, chance: f64) -> Vec<Do> {
        if self.run != Run::Orphaned {
            return Vec::new();
        }
        self.lost_again(Failure::KeeperLost, now, chance)
    }

    /// Time has passed; see [`Machine::due`].
    pub(super) fn tick(&mut self, now: Instant, chance: f64) -> Vec<Do> {
        match &mut self.run {
            Run::Pausing { until, .. } if *until <= now => self.spawn(),
            Run::Up(up) if up.open_since.is_none() => {
                let age = now.saturating_duration_since(up.since);
                let why = match &up.name {
                    None if age >= NAME_TIME => Failure::NoName(NAME_TIME),
                    Some(_) if age >= CONNECT_TIME => {
                        Failure::NotConnected(CONNECT_TIME, up.trouble.clone().map(Box::new))
                    }
                    _ => return Vec::new(),
                };
                self.lose(why, now, chance)
            }
            Run::Up(up) => {
                let is_down =
                    up.down_since.is_some_and(|since| now.saturating_duration_since(since) >= DOWN_TIME);
                if is_down && up.reached_cloudflare {
                    return self.lose(Failure::Down(DOWN_TIME), now, chance);
                }
                if up.is_probing || now < up.next_probe {
                    return Vec::new();
                }
                up.is_probing = true;
                up.name.clone().map(|name| Do::Probe(up.child, name)).into_iter().collect()
            }
            _ => Vec::new(),
        }
    }

    /// When [`Machine::tick`] is due; a process that runs is looked at anyway.
    pub(super) fn due(&self) -> Option<Instant> {
        match &self.run {
            Run::Pausing { until, .. } => Some(*until),
            _ => None,
        }
    }

    /// Gives up a process that still runs.
    fn lose(&mut self, why: Failure, now: Instant, chance: f64) -> Vec<Do> {
        let child = self.up().map(|up| up.child);
        let name = self.over();
        let mut todo: Vec<Do> = child.map(Do::Stop).into_iter().collect();
        todo.extend(self.lost(name, why, now, chance));
        todo
    }

    /// The process is over; its name, when it was open.
    fn over(&mut self) -> Option<String> {
        match std::mem::replace(&mut self.run, Run::None) {
            Run::Up(up) => up.open_since.and(up.name),
            _ => None,
        }
    }

    /// Nothing runs any more, and nobody asked for that.
    fn lost(&mut self, name: Option<String>, why: Failure, now: Instant, chance: f64) -> Vec<Do> {
        let mut todo: Vec<Do> =
            name.clone().map(|name| Do::Over(name, Some(why.clone()))).into_iter().collect();
        if why.is_rate_limit() {
            self.limits += 1;
            let pause = LIMIT_PAUSE * (1 << (self.limits - 1).min(MAX_LIMITS));
            self.not_before = Some(now + pause);
        }
        if !self.was_open {
            todo.extend(self.fail(why));
            return todo;
        }
        let until = match (why.is_rate_limit(), self.not_before) {
            (true, _) if self.limits >= MAX_LIMITS => {
                todo.extend(self.fail(why));
                return todo;
            }
            (true, Some(at)) => at,
            _ => match self.restarts.ended(now, chance) {
                Next::After(pause) => now + pause,
                Next::Failed => {
                    todo.extend(self.fail(Failure::TooOften(Box::new(why))));
                    return todo;
                }
            },
        };
        // Said once for each tunnel that was lost, not for each try after that.
        if name.is_some() {
            todo.push(Do::Tell(News::Reopening(why.clone())));
        }
        self.run = Run::Pausing { until, why };
        todo
    }

    /// The same for a tunnel whose end was accounted for earlier.
    fn lost_again(&mut self, why: Failure, now: Instant, chance: f64) -> Vec<Do> {
        let mut todo = self.lost(None, why.clone(), now, chance);
        if self.run != Run::None {
            todo.push(Do::Tell(News::Reopening(why)));
        }
        todo
    }

    fn fail(&mut self, why: Failure) -> Vec<Do> {
        self.run = Run::None;
        self.failed = Some(why.clone());
        let was_open = std::mem::take(&mut self.was_open);
        let mut todo = vec![Do::NotOpened(why.clone())];
        if was_open {
            todo.push(Do::Tell(News::Failed(why)));
        }
        todo
    }
}

/// Between a failed probe and the next one.
fn pause(misses: u32) -> Duration {
    Duration::from_secs(match misses {
        0 => 30,
        1 => 1,
        2 => 2,
        3 => 5,
        4 => 10,
        5 => 20,
        _ => 60,
    })
}
