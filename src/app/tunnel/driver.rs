//! The tunnel's driver: the one task that owns the [`Machine`], tells it what happened, and does what
//! it says. It never waits itself; whatever takes time is a task that comes back as a [`Happened`].

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::time::timeout;

use super::failure::{self, Failure};
use super::log::Facts;
use super::machine::{Adopted, Child, Do, Machine, News, State};
use super::start::{self, Memory, Program};
use super::words::{self, Shown};
use super::{Happened, PURPOSE, probe};
use crate::app::keeping::{ChildEvent, Followed};
use crate::app::{Core, now_ms};
use crate::audit::Record;
use crate::frame::messages::Level;
use crate::keeper::wire::{ChildSignal, ChildStatus, Exit, Note};
use crate::process;
use crate::supervise::chance;

/// What cloudflared gets between SIGTERM and SIGKILL (contract 7).
const KILL_AFTER: Duration = Duration::from_secs(2);
/// How long a close waits for the end of the process.
const END_TIME: Duration = Duration::from_secs(3);
/// How often a process is looked at while it opens …
const LOOK: Duration = Duration::from_millis(150);
/// … and when it is open.
const LOOK_OPEN: Duration = Duration::from_secs(2);
/// How much of its output is read, in bytes.
const OUTPUT: usize = 32 << 10;
/// Ends that are remembered, should they be heard of before the start.
const MAX_ENDS: usize = 16;

impl Core {
    /// Owner of the machine. `was_open`: an earlier sidecar of this host says so.
    pub(in crate::app) async fn keep_tunnel(self: Rc<Self>, mut followed: Followed, was_open: bool) {
        let Some(mut inbox) = self.tunnel.inbox.take() else { return };
        let mut driver = Driver {
            core: self,
            machine: Machine::default(),
            program: None,
            is_looking: false,
            saved: String::new(),
            ends: VecDeque::new(),
        };
        driver.take_over(std::mem::take(&mut followed.inherited), was_open);
        driver.settle();
        loop {
            let pause = driver.pause();
            tokio::select! {
                Some(happened) = inbox.recv() => driver.happened(happened),
                Some(event) = followed.events.recv() => driver.event(event),
                () = tokio::time::sleep(pause) => driver.look(),
            }
            driver.settle();
        }
    }
}

struct Driver {
    core: Rc<Core>,
    machine: Machine,
    program: Option<Program>,
    /// One look at a time.
    is_looking: bool,
    /// The note as the keeper has it.
    saved: String,
    /// Processes whose ends were heard of while they were nobody's.
    ends: VecDeque<ChildStatus>,
}

impl Driver {
    fn take_over(&mut self, inherited: Vec<ChildStatus>, was_open: bool) {
        let now = Instant::now();
        let (mut running, ended): (Vec<_>, Vec<_>) =
            inherited.into_iter().partition(|child| child.exit.is_none());
        let Some(status) = running.pop() else {
            if was_open {
                let why = ended.last().map_or(Failure::KeeperLost, |child| {
                    Failure::Ended(child.exit.unwrap_or(Exit::Code(0)), failure::words(&child.last_words))
                });
                let todo = self.machine.missed(why, now, chance());
                self.perform(todo);
            }
            return;
        };
        for older in running {
            self.stop(Child { number: older.child, process: older.process });
        }
        let memory = Memory::read(&status.note.0);
        let ago = |ms: u64| now.checked_sub(Duration::from_millis(ms)).unwrap_or(now);
        self.program = memory.program;
        self.machine.adopt(
            Adopted {
                child: Child { number: status.child, process: status.process },
                since: ago(status.age_ms),
                name: memory.name,
                metrics: memory.metrics,
                protocol: memory.protocol,
                fell_back: memory.fell_back,
                open_since: memory.open_since_ms.map(|ms| ago(now_ms().saturating_sub(ms))),
                was_verified: memory.was_verified,
                dropped: memory.dropped,
                has_program: self.program.is_some(),
            },
            now,
        );
        tracing::info!(name = self.machine.name(), "the tunnel is taken over");
    }

    fn happened(&mut self, happened: Happened) {
        let now = Instant::now();
        match happened {
            Happened::Opening(reply) => {
                let answer = match self.machine.wait(now) {
                    Some(wait) => Err(words::wait(wait)),
                    None => Ok(()),
                };
                let todo = self.machine.open(now);
                self.perform(todo);
                // Seen before it is answered.
                self.settle();
                let _ = reply.send(answer);
            }
            Happened::Closing(why, reply) => {
                let was_one = !matches!(self.machine.state(), State::Closed | State::Failed(_));
                let process = self.machine.up().map(|up| up.child.process);
                let todo = self.machine.close();
                self.perform(todo);
                self.settle();
                if was_one {
                    tracing::info!(why, "the tunnel closes");
                }
                tokio::task::spawn_local(async move {
                    if let Some(process) = process {
                        let _ = timeout(END_TIME, process::ended(process)).await;
                    }
                    let _ = reply.send(was_one);
                });
            }
            Happened::Progress(step) => self.machine.progress(step),
            Happened::Obtained(found) => {
                let found = found.map(|program| drop(self.program.replace(program)));
                let todo = self.machine.obtained(found);
                self.perform(todo);
            }
            Happened::Spawned(started) => {
                let child = started.as_ref().ok().copied();
                let todo = self.machine.spawned(started, now, chance());
                self.perform(todo);
                let early =
                    self.ends.iter().position(|end| Some(end.process) == child.map(|child| child.process));
                if let Some(end) = early.and_then(|at| self.ends.remove(at)) {
                    self.account_for(end);
                }
            }
            Happened::Saw { child, name, ready, facts } => {
                self.is_looking = false;
                let todo = self.machine.saw(child, name, ready, facts, now, chance());
                self.perform(todo);
            }
            Happened::Probed(child, verdict) => {
                if !matches!(verdict, probe::Verdict::Right) {
                    tracing::info!(?verdict, "the tunnel's probe did not come through");
                }
                let todo = self.machine.probed(child, verdict, now, chance());
                self.perform(todo);
            }
            Happened::Ended { process, exit, facts, gone } => {
                let gone = self.program.as_ref().filter(|_| gone).map(Program::vanished);
                let todo = self.machine.ended(process, exit, facts, gone, now, chance());
                self.perform(todo);
            }
        }
    }

    fn event(&mut self, event: ChildEvent) {
        match event {
            ChildEvent::Ended(end) => self.ended(end),
            ChildEvent::KeeperLost => {
                let todo = self.machine.keeper_lost();
                self.perform(todo);
            }
            ChildEvent::KeeperBack(children) => {
                if let Some(current) = self.machine.up().map(|up| up.child.process) {
                    match children.into_iter().find(|child| child.process == current) {
                        Some(child) if child.exit.is_none() => {}
                        Some(ended) => self.ended(ended),
                        None => {
                            let todo = self.machine.keeper_lost();
                            self.perform(todo);
                        }
                    }
                }
                let todo = self.machine.keeper_back(Instant::now(), chance());
                self.perform(todo);
            }
        }
    }

    /// A process has ended; it may be an old one, or one whose start is not known yet.
    fn ended(&mut self, end: ChildStatus) {
        if self.machine.up().is_some_and(|up| up.child.process == end.process) {
            self.account_for(end);
        } else {
            self.ends.push_back(end);
            let excess = self.ends.len().saturating_sub(MAX_ENDS);
            self.ends.drain(..excess);
        }
    }

    /// Reads the last words of a process that has ended.
    fn account_for(&self, end: ChildStatus) {
        let Some(exit) = end.exit else { return };
        let core = self.core.clone();
        let path = self.program.as_ref().map(|program| program.path.clone());
        tokio::task::spawn_local(async move {
            let output = core.keeping.output(end.child, OUTPUT).await.unwrap_or_default();
            let facts = Facts::read(&output.stdout, &output.stderr);
            let gone = path.is_some_and(|path| start::is_gone(&path));
            let ended = Happened::Ended { process: end.process, exit, facts, gone };
            let _ = core.tunnel.happened.send(ended).await;
        });
    }

    /// When to look again without being told to.
    fn pause(&self) -> Duration {
        match (self.machine.up(), self.machine.due()) {
            (Some(up), _) if up.open_since.is_none() || up.down_since.is_some() => LOOK,
            // A probe that is due is not kept waiting.
            (Some(up), _) => up.next_look(Instant::now(), LOOK_OPEN),
            (None, Some(due)) => due.saturating_duration_since(Instant::now()),
            (None, None) => Duration::from_secs(3600),
        }
    }

    /// Asks the process how it is, or lets the time pass.
    fn look(&mut self) {
        let now = Instant::now();
        let todo = self.machine.tick(now, chance());
        self.perform(todo);
        let Some(up) = self.machine.up().filter(|_| !self.is_looking) else { return };
        self.is_looking = true;
        let (child, port, wants_name) = (up.child, up.metrics, up.name.is_none());
        let wants_log = up.open_since.is_none() || up.down_since.is_some() || up.protocol.is_none();
        let core = self.core.clone();
        tokio::task::spawn_local(async move {
            let facts = match wants_log {
                true => {
                    let output = core.keeping.output(child.number, OUTPUT).await.unwrap_or_default();
                    Facts::read(&output.stdout, &output.stderr)
                }
                false => Facts::default(),
            };
            let said = match port.or(facts.metrics) {
                Some(port) => probe::metrics(port, wants_name).await,
                None => probe::Metrics::default(),
            };
            let saw = Happened::Saw { child, name: said.name, ready: said.ready, facts };
            let _ = core.tunnel.happened.send(saw).await;
        });
    }

    fn perform(&mut self, todo: Vec<Do>) {
        for item in todo {
            match item {
                Do::Obtain => {
                    let core = self.core.clone();
                    tokio::task::spawn_local(async move {
                        let told = async |step| {
                            let _ = core.tunnel.happened.send(Happened::Progress(step)).await;
                        };
                        let found = start::obtain(&core, told).await;
                        let _ = core.tunnel.happened.send(Happened::Obtained(found)).await;
                    });
                }
                Do::Spawn(dropped) => {
                    let Some(program) = self.program.clone() else { continue };
                    self.saved = String::new();
                    let core = self.core.clone();
                    tokio::task::spawn_local(async move {
                        let started = start::spawn(&core, &program, &dropped).await;
                        let _ = core.tunnel.happened.send(Happened::Spawned(started)).await;
                    });
                }
                Do::Stop(child) => self.stop(child),
                Do::Probe(child, name) => {
                    let core = self.core.clone();
                    tokio::task::spawn_local(async move {
                        let verdict = core.tunnel.nonce.probe(&core.tunnel.outbound, &name).await;
                        let _ = core.tunnel.happened.send(Happened::Probed(child, verdict)).await;
                    });
                }
                Do::Opened(name) => {
                    tracing::info!(name, "the tunnel is open");
                    self.audit(&words::Audited { action: "start", url: Some(&name), error: None });
                }
                Do::Over(name, why) => {
                    if let Some(why) = &why {
                        tracing::warn!(name, %why, "the tunnel is lost");
                    }
                    self.audit(&words::Audited { action: "stop", url: Some(&name), error: why.as_ref() });
                }
                Do::NotOpened(why) => {
                    tracing::warn!(%why, "no tunnel");
                    self.audit(&words::Audited { action: "start", url: None, error: Some(&why) });
                }
                Do::Tell(news) => self.tell(&news),
            }
        }
    }

    fn stop(&self, child: Child) {
        let core = self.core.clone();
        tokio::task::spawn_local(async move {
            let stopped = core.keeping.signal(child.number, ChildSignal::Term, Some(KILL_AFTER)).await;
            if let Err(error) = stopped {
                tracing::warn!(%error, pid = child.process.pid, "the keeper does not end cloudflared");
            }
        });
    }

    fn audit(&self, audited: &words::Audited<'_>) {
        let record =
            Record::action(PURPOSE, None, &audited.args(self.core.address.port()), audited.error.is_some());
        let core = self.core.clone();
        self.core.tasks.spawn_local(async move { core.audit.write(record).await });
    }

    fn tell(&self, news: &News) {
        let (level, text) = match news {
            News::Open => {
                let shown = self.view();
                let level = if shown.why.is_some() { Level::Warning } else { Level::Info };
                (level, words::opened(&shown, self.core.tool_count()))
            }
            News::Verified => (Level::Info, words::verified(&self.view())),
            News::Reopening(why) => (Level::Warning, words::reopening(why)),
            News::Failed(why) => (Level::Error, words::failed(why)),
        };
        // Whoever asked for it in the host gets it as the answer.
        let is_answer = matches!(news, News::Open) && self.core.tunnel.asked_in_host.get() > 0;
        if !is_answer {
            self.core.notify(level, format!("a2mcp: {text}"));
        }
    }

    fn view(&self) -> Shown {
        words::shown(&self.machine, self.program.as_ref())
    }

    /// Makes what others see follow the machine: the view, the state file, the keeper's note.
    fn settle(&mut self) {
        let shown = self.view();
        let tunnel = &self.core.tunnel;
        if tunnel.shown.borrow().name != shown.name {
            tunnel.crossing.begin_anew();
        }
        tunnel.shown.send_if_modified(|old| {
            let is_new = *old != shown;
            *old = shown;
            is_new
        });
        if tunnel.is_open.replace(self.machine.is_open()) != self.machine.is_open() {
            self.core.save_tunnel();
        }
        let (Some(up), Some(program)) = (self.machine.up(), &self.program) else { return };
        let note = Memory::of(up, program, self.machine.dropped()).write();
        if note != self.saved {
            self.saved.clone_from(&note);
            let (core, number) = (self.core.clone(), up.child.number);
            tokio::task::spawn_local(async move {
                if let Err(error) = core.keeping.set_note(number, Note(note)).await {
                    tracing::warn!(%error, "a later sidecar will know less of the tunnel");
                }
            });
        }
    }
}
