//! The machine with given clocks: minutes pass in no time.

use super::*;

const NAME: &str = "a-b.trycloudflare.com";

/// A machine and the time.
struct World {
    machine: Machine,
    now: Instant,
    children: u64,
}

fn child(number: u64) -> Child {
    Child { number, process: Identity { pid: 100 + number as u32, start_time: number } }
}

impl World {
    fn new() -> Self {
        Self { machine: Machine::default(), now: Instant::now(), children: 0 }
    }

    fn pass(&mut self, seconds: u64) -> Vec<Do> {
        self.now += Duration::from_secs(seconds);
        self.machine.tick(self.now, 0.0)
    }

    /// The keeper starts the next process.
    fn start(&mut self) -> Child {
        self.children += 1;
        let child = child(self.children);
        assert_eq!(self.machine.spawned(Ok(child), self.now, 0.0), []);
        child
    }

    fn saw(&mut self, child: Child, ready: Option<bool>, facts: Facts) -> Vec<Do> {
        self.machine.saw(child, Some(NAME.into()), ready, facts, self.now, 0.0)
    }

    fn ended(&mut self, child: Child, facts: Facts) -> Vec<Do> {
        self.machine.ended(child.process, Exit::Code(1), facts, None, self.now, 0.0)
    }

    fn probed(&mut self, child: Child, verdict: Verdict) -> Vec<Do> {
        self.machine.probed(child, verdict, self.now, 0.0)
    }

    /// From nothing to a process that runs.
    fn opening(&mut self) -> Child {
        assert_eq!(self.machine.open(self.now), [Do::Obtain]);
        assert_eq!(self.machine.obtained(Ok(())), [Do::Spawn(BTreeSet::new())]);
        self.start()
    }

    /// From a process to a verified tunnel.
    fn connect(&mut self, child: Child) {
        assert_eq!(self.saw(child, Some(true), Facts::default()), [Do::Opened(NAME.into())]);
        assert_eq!(self.pass(1), [Do::Probe(child, NAME.into())]);
        assert_eq!(self.probed(child, Verdict::Right), [Do::Tell(News::Open)]);
        assert!(matches!(self.machine.state(), State::Open(up) if up.doubt().is_none()));
    }

    fn open(&mut self) -> Child {
        let child = self.opening();
        self.connect(child);
        child
    }

    fn failure(&self) -> &Failure {
        match self.machine.state() {
            State::Failed(failure) => failure,
            state => panic!("{state:?}"),
        }
    }
}

fn fatal(failure: Failure) -> Facts {
    Facts { fatal: Some(failure), ..Facts::default() }
}

fn trouble(failure: Failure) -> Facts {
    Facts { trouble: Some(failure), ..Facts::default() }
}

#[test]
fn it_is_open_when_the_edge_is_connected_and_not_when_it_has_a_name() {
    let mut world = World::new();
    let child = world.opening();
    assert_eq!(world.saw(child, Some(false), Facts::default()), []);
    assert!(matches!(world.machine.state(), State::Opening(_)));
    assert_eq!(world.machine.name(), Some(NAME), "allowed from here on");
    assert_eq!(world.saw(child, None, Facts::default()), [], "silence is no readiness");
    world.connect(child);
}

#[test]
fn opening_twice_makes_one_process_and_again_probes_anew() {
    let mut world = World::new();
    assert_eq!(world.machine.open(world.now), [Do::Obtain]);
    assert_eq!(world.machine.open(world.now), []);
    assert_eq!(world.machine.obtained(Ok(())), [Do::Spawn(BTreeSet::new())]);
    assert_eq!(world.machine.open(world.now), []);
    let child = world.start();
    world.connect(child);
    assert_eq!(world.machine.open(world.now), [Do::Probe(child, NAME.into())]);
    assert_eq!(world.machine.open(world.now), [], "one probe at a time");
    assert_eq!(world.probed(child, Verdict::Right), [], "nothing new");
}

#[test]
fn no_name_in_30_s_and_no_connection_in_60_s_are_failures() {
    let mut world = World::new();
    let child = world.opening();
    world.now += Duration::from_secs(29);
    assert_eq!(world.machine.saw(child, None, None, Facts::default(), world.now, 0.0), []);
    let todo = world.pass(1);
    assert_eq!(todo, [Do::Stop(child), Do::NotOpened(Failure::NoName(NAME_TIME))]);

    let mut world = World::new();
    let child = world.opening();
    assert_eq!(world.saw(child, Some(false), trouble(Failure::EdgeClosed)), []);
    assert_eq!(world.pass(59), []);
    let why = Failure::NotConnected(CONNECT_TIME, Some(Box::new(Failure::EdgeClosed)));
    assert_eq!(world.pass(1), [Do::Stop(child), Do::NotOpened(why.clone())]);
    assert_eq!(world.failure(), &why);
    assert_eq!(world.machine.name(), None);
}

#[test]
fn what_ends_before_it_was_open_is_not_started_again() {
    let mut world = World::new();
    let child = world.opening();
    let why = Failure::Page("500".into());
    assert_eq!(world.ended(child, fatal(why.clone())), [Do::NotOpened(why)]);
    assert_eq!(world.pass(3600), []);
    assert_eq!(world.machine.open(world.now), [Do::Obtain], "the operator may try again at once");
}

#[test]
fn a_refused_service_is_left_alone_for_a_minute_and_longer_each_time() {
    let mut world = World::new();
    for minutes in [1, 2, 4] {
        let child = world.opening();
        assert_eq!(world.ended(child, fatal(Failure::RateLimited)), [Do::NotOpened(Failure::RateLimited)]);
        assert_eq!(world.pass(minutes * 60 - 1), []);
        assert_eq!(world.machine.open(world.now), []);
        assert_eq!(world.machine.wait(world.now), Some(Duration::from_secs(1)));
        world.pass(1);
        assert_eq!(world.machine.wait(world.now), None);
    }
    world.open();
    world.machine.close();
    let child = world.opening();
    world.ended(child, fatal(Failure::RateLimited));
    assert_eq!(world.machine.wait(world.now), Some(LIMIT_PAUSE), "an opening that worked ends the series");
}

#[test]
fn what_dies_after_opening_is_opened_again_and_given_up_after_five_ends_in_30_s() {
    let mut world = World::new();
    let mut child = world.open();
    let why = Failure::Ended(Exit::Code(1), String::new());
    let todo = world.ended(child, Facts::default());
    assert_eq!(todo, [Do::Over(NAME.into(), Some(why.clone())), Do::Tell(News::Reopening(why.clone()))]);
    assert!(world.machine.due().unwrap() > world.now && world.machine.is_open());
    for _ in 0..3 {
        assert_eq!(world.pass(2), [Do::Spawn(BTreeSet::new())]);
        child = world.start();
        assert_eq!(world.ended(child, Facts::default()), [], "said once");
    }
    assert_eq!(world.pass(2), [Do::Spawn(BTreeSet::new())]);
    child = world.start();
    let often = Failure::TooOften(Box::new(why));
    let todo = world.ended(child, Facts::default());
    assert_eq!(todo, [Do::NotOpened(often.clone()), Do::Tell(News::Failed(often))]);
    assert_eq!(world.pass(3600), []);
    assert!(!world.machine.is_open());
}

#[test]
fn an_opening_again_that_is_refused_waits_and_tries_again() {
    let mut world = World::new();
    let child = world.open();
    world.ended(child, Facts::default());
    for minutes in [1, 2, 4, 8] {
        let start = world.machine.due().unwrap();
        world.now = start;
        assert_eq!(world.machine.tick(world.now, 0.0), [Do::Spawn(BTreeSet::new())]);
        let child = world.start();
        assert_eq!(world.ended(child, fatal(Failure::RateLimited)), []);
        assert_eq!(world.machine.due(), Some(world.now + Duration::from_secs(60 * minutes)));
    }
    world.now = world.machine.due().unwrap();
    world.machine.tick(world.now, 0.0);
    let child = world.start();
    let todo = world.ended(child, fatal(Failure::RateLimited));
    assert_eq!(todo[0], Do::NotOpened(Failure::RateLimited), "not for ever");
}

#[test]
fn a_tunnel_deleted_on_the_other_side_is_replaced_at_once() {
    let mut world = World::new();
    let child = world.open();
    assert_eq!(world.saw(child, Some(true), trouble(Failure::Deleted)), [], "it is connected");
    let todo = world.saw(child, Some(false), trouble(Failure::Deleted));
    assert_eq!(
        todo,
        [
            Do::Stop(child),
            Do::Over(NAME.into(), Some(Failure::Deleted)),
            Do::Tell(News::Reopening(Failure::Deleted))
        ]
    );
    assert_eq!(world.pass(1), [Do::Spawn(BTreeSet::new())]);
    let next = world.start();
    assert_eq!(world.ended(child, Facts::default()), [], "the old one's end is nobody's");
    assert_eq!(world.saw(child, Some(true), Facts::default()), []);
    assert_eq!(world.probed(child, Verdict::Right), []);
    world.connect(next);
}

#[test]
fn a_link_that_is_down_is_waited_for_while_there_is_no_network_and_replaced_when_there_is() {
    let mut world = World::new();
    let child = world.open();
    assert_eq!(world.saw(child, Some(false), Facts::default()), []);
    let doubt = |world: &World| world.machine.up().unwrap().doubt();
    assert!(doubt(&world).unwrap().contains("down"));
    for _ in 0..60 {
        for todo in [world.pass(60), world.pass(0)] {
            if !todo.is_empty() {
                assert_eq!(todo, [Do::Probe(child, NAME.into())]);
                assert_eq!(world.probed(child, Verdict::Unclear("no network".into())), []);
            }
        }
    }
    let todo = world.pass(61);
    assert_eq!(todo, [Do::Probe(child, NAME.into())]);
    let todo = world.probed(child, Verdict::Wrong("530".into()));
    assert_eq!(todo[..2], [Do::Stop(child), Do::Over(NAME.into(), Some(Failure::Down(DOWN_TIME)))]);
}

#[test]
fn a_link_that_comes_back_keeps_its_name() {
    let mut world = World::new();
    let child = world.open();
    world.saw(child, Some(false), Facts::default());
    world.pass(100);
    world.probed(child, Verdict::Wrong("530".into()));
    world.saw(child, Some(true), Facts::default());
    assert_eq!(world.pass(1), [Do::Probe(child, NAME.into())]);
    assert_eq!(world.probed(child, Verdict::Right), [], "nobody heard of it, nobody needs to");
    assert!(world.machine.up().unwrap().doubt().is_none());
}

#[test]
fn a_silent_loss_is_found_by_the_slow_probe() {
    let mut world = World::new();
    let child = world.open();
    assert_eq!(world.pass(PROBE_EACH.as_secs()), [Do::Probe(child, NAME.into())]);
    let silence = || Verdict::Wrong("no answer".into());
    assert_eq!(world.probed(child, silence()), []);
    assert!(world.machine.up().unwrap().doubt().is_some());
    assert_eq!(world.pass(1), [Do::Probe(child, NAME.into())]);
    assert_eq!(world.probed(child, Verdict::Unclear("here".into())), [], "says nothing about the tunnel");
    for _ in 0..2 {
        assert_eq!(world.pass(60), [Do::Probe(child, NAME.into())]);
        assert_eq!(world.probed(child, silence()), []);
    }
    assert_eq!(world.pass(60), [Do::Probe(child, NAME.into())]);
    let todo = world.probed(child, silence());
    assert_eq!(todo[0], Do::Stop(child));
    assert!(matches!(todo.last(), Some(Do::Tell(News::Reopening(Failure::Silent(_))))));
}

#[test]
fn what_never_was_verified_is_never_replaced_for_that() {
    let mut world = World::new();
    let child = world.opening();
    assert_eq!(world.saw(child, Some(true), Facts::default()), [Do::Opened(NAME.into())]);
    let mut told = Vec::new();
    for _ in 0..100 {
        assert_eq!(world.pass(60), [Do::Probe(child, NAME.into())]);
        told.extend(world.probed(child, Verdict::Wrong("403".into())));
    }
    assert_eq!(told, [Do::Tell(News::Open)], "people hear once that it is not verified");
    world.pass(60);
    assert_eq!(world.probed(child, Verdict::Right), [Do::Tell(News::Verified)]);
}

#[test]
fn unknown_flags_are_left_out_one_by_one_unless_they_matter() {
    let flag = |name: &str| Facts {
        unknown_flag: Some(name.into()),
        ..fatal(Failure::Usage(format!("flag provided but not defined: -{name}")))
    };
    let mut world = World::new();
    let child = world.opening();
    assert_eq!(world.ended(child, flag("output")), [Do::Spawn(["output".to_owned()].into())]);
    let child = world.start();
    let both: BTreeSet<String> = ["output", "management-diagnostics"].map(str::to_owned).into();
    assert_eq!(world.ended(child, flag("management-diagnostics")), [Do::Spawn(both)]);
    let child = world.start();
    assert!(
        matches!(world.ended(child, flag("output"))[..], [Do::NotOpened(Failure::Usage(_))]),
        "not for ever"
    );
    let child = world.opening();
    assert!(matches!(world.ended(child, flag("protocol"))[..], [Do::NotOpened(Failure::Usage(_))]));
}

#[test]
fn a_binary_that_vanished_is_not_looked_for_again_and_again() {
    let gone = || Failure::Vanished { path: "/x".into(), sha256: "00".into() };
    let mut world = World::new();
    let child = world.open();
    let todo =
        world.machine.ended(child.process, Exit::Signal(9), Facts::default(), Some(gone()), world.now, 0.0);
    assert_eq!(
        todo,
        [Do::Over(NAME.into(), Some(gone())), Do::NotOpened(gone()), Do::Tell(News::Failed(gone()))]
    );
    assert_eq!(world.pass(3600), []);
    assert_eq!(world.machine.open(world.now), [Do::Obtain]);
    assert_eq!(world.machine.obtained(Ok(())), [Do::Spawn(BTreeSet::new())]);
    assert_eq!(world.machine.spawned(Err(gone()), world.now, 0.0), [Do::NotOpened(gone())]);
}

#[test]
fn closing_at_any_moment_leaves_nothing() {
    let mut world = World::new();
    assert_eq!(world.machine.close(), []);
    world.machine.open(world.now);
    assert_eq!(world.machine.close(), []);
    assert_eq!(world.machine.obtained(Ok(())), [], "too late");
    world.machine.open(world.now);
    world.machine.obtained(Ok(()));
    assert_eq!(world.machine.close(), []);
    assert_eq!(world.machine.spawned(Ok(child(7)), world.now, 0.0), [Do::Stop(child(7))], "started too late");
    let running = world.opening();
    assert_eq!(world.machine.close(), [Do::Stop(running)]);
    let open = world.open();
    assert_eq!(world.machine.close(), [Do::Stop(open), Do::Over(NAME.into(), None)]);
    assert_eq!(world.machine.state(), State::Closed);
    assert_eq!(world.ended(open, Facts::default()), []);
    let lost = world.open();
    world.ended(lost, Facts::default());
    assert_eq!(world.machine.close(), []);
    assert_eq!(world.pass(3600), [], "a pause ends with it");
}

#[test]
fn the_next_keeper_gets_a_new_tunnel() {
    let mut world = World::new();
    world.open();
    let todo = world.machine.keeper_lost();
    assert_eq!(todo, [Do::Over(NAME.into(), Some(Failure::KeeperLost))]);
    assert_eq!(world.machine.name(), None);
    assert_eq!(world.machine.keeper_back(world.now, 0.0), [Do::Tell(News::Reopening(Failure::KeeperLost))]);
    assert_eq!(world.machine.keeper_back(world.now, 0.0), []);
    assert_eq!(world.pass(1), [Do::Spawn(BTreeSet::new())]);
    let mut closed = World::new();
    assert_eq!(closed.machine.keeper_lost(), []);
    assert_eq!(closed.machine.keeper_back(closed.now, 0.0), []);
}

#[test]
fn a_later_sidecar_goes_on_with_what_runs_and_mends_what_does_not() {
    let adopted = |world: &World| Adopted {
        child: child(3),
        since: world.now,
        name: Some(NAME.into()),
        metrics: Some(1),
        protocol: Some("quic".into()),
        fell_back: false,
        open_since: Some(world.now),
        was_verified: true,
        dropped: ["output".to_owned()].into(),
        has_program: true,
    };
    let mut world = World::new();
    let known = adopted(&world);
    world.machine.adopt(known, world.now);
    assert!(matches!(world.machine.state(), State::Open(up) if up.doubt().is_none()));
    assert_eq!(world.saw(child(3), Some(true), Facts::default()), [], "it is not opened once more");
    assert_eq!(world.pass(1), [Do::Probe(child(3), NAME.into())]);
    assert_eq!(world.probed(child(3), Verdict::Right), [], "and not announced once more");
    world.ended(child(3), Facts::default());
    assert_eq!(world.pass(1), [Do::Spawn(["output".to_owned()].into())]);

    let mut world = World::new();
    let why = Failure::KeeperLost;
    assert_eq!(world.machine.missed(why.clone(), world.now, 0.0), [Do::Tell(News::Reopening(why))]);
    assert_eq!(world.pass(1), [Do::Obtain], "what it was is not known any more");
}
