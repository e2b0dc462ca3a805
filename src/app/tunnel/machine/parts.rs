//! What the machine is told of, what it orders, and what it knows of a process.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Failure;
use crate::process::Identity;

/// A process of the keeper's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::app::tunnel) struct Child {
    /// The keeper's number for it.
    pub(in crate::app::tunnel) number: u64,
    /// Tells it from every other process.
    pub(in crate::app::tunnel) process: Identity,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::app::tunnel) enum Do {
    /// Look for the program; then [`Machine::obtained`](super::Machine::obtained).
    Obtain,
    /// Start it without these flags; then [`Machine::spawned`](super::Machine::spawned).
    Spawn(BTreeSet<String>),
    /// End this process.
    Stop(Child),
    /// Fetch a nonce through this name; then [`Machine::probed`](super::Machine::probed).
    Probe(Child, String),
    /// It is open under this name.
    Opened(String),
    /// The tunnel of this name is over; why, unless the operator closed it.
    Over(String, Option<Failure>),
    /// It was never opened.
    NotOpened(Failure),
    /// People should hear how it stands: its first verdict, or a change of it.
    Tell(News),
}

/// What people should hear.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::app::tunnel) enum News {
    /// It is open; verified or not.
    Open,
    /// A later probe came through.
    Verified,
    /// It was lost and is opened again.
    Reopening(Failure),
    /// It was lost and is not opened again.
    Failed(Failure),
}

/// Whether the way through the public name is proven.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::app::tunnel) enum Proof {
    /// Not tried yet.
    Pending,
    /// The nonce came back right at that time.
    Verified(Instant),
    /// It did not, for this reason.
    Unverified(String),
}

/// A process that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::app::tunnel) struct Up {
    /// Which.
    pub(in crate::app::tunnel) child: Child,
    /// Since when.
    pub(in crate::app::tunnel) since: Instant,
    /// The tunnel's host name.
    pub(in crate::app::tunnel) name: Option<String>,
    /// Where to ask it.
    pub(in crate::app::tunnel) metrics: Option<u16>,
    /// What it speaks with the edge.
    pub(in crate::app::tunnel) protocol: Option<String>,
    /// UDP is blocked, so it is not QUIC.
    pub(in crate::app::tunnel) fell_back: bool,
    /// When it first was connected; it is open since.
    pub(in crate::app::tunnel) open_since: Option<Instant>,
    /// Since when the link is down.
    pub(in crate::app::tunnel) down_since: Option<Instant>,
    /// See there.
    pub(in crate::app::tunnel) proof: Proof,
    /// It was verified at some time.
    pub(in crate::app::tunnel) was_verified: bool,
    /// What people heard: nothing, that it is open, or that it is verified.
    pub(in crate::app::tunnel) told: Option<bool>,
    pub(in crate::app::tunnel) misses: u32,
    pub(in crate::app::tunnel) is_probing: bool,
    pub(in crate::app::tunnel) next_probe: Instant,
    pub(in crate::app::tunnel) reached_cloudflare: bool,
    pub(in crate::app::tunnel) trouble: Option<Failure>,
}

/// How it stands, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::app::tunnel) enum State<'a> {
    /// Nobody wants one.
    Closed,
    /// On the way; the text says where.
    Opening(String),
    /// The edge is connected.
    Open(&'a Up),
    /// It could not be opened, or not again.
    Failed(&'a Failure),
}

impl Up {
    pub(in crate::app::tunnel) fn new(child: Child, since: Instant) -> Self {
        Self {
            child,
            since,
            name: None,
            metrics: None,
            protocol: None,
            fell_back: false,
            open_since: None,
            down_since: None,
            proof: Proof::Pending,
            was_verified: false,
            told: None,
            misses: 0,
            is_probing: false,
            next_probe: since,
            reached_cloudflare: false,
            trouble: None,
        }
    }

    /// When to look at it again, `each` at the latest.
    pub(in crate::app::tunnel) fn next_look(&self, now: Instant, each: Duration) -> Duration {
        let probe = self.next_probe.saturating_duration_since(now).max(Duration::from_millis(1));
        if self.is_probing { each } else { probe.min(each) }
    }

    /// Whether people may be told how it stands: it was probed, and is not being probed now.
    pub(in crate::app::tunnel) fn is_judged(&self) -> bool {
        self.told.is_some() && !self.is_probing
    }

    /// Why it does not count as verified.
    pub(in crate::app::tunnel) fn doubt(&self) -> Option<String> {
        match (&self.down_since, &self.proof) {
            (Some(_), _) => Some("the link to Cloudflare is down, cloudflared connects again".into()),
            (None, Proof::Pending) => Some("not probed yet".into()),
            (None, Proof::Unverified(why)) => Some(why.clone()),
            (None, Proof::Verified(_)) => None,
        }
    }
}

/// What an earlier sidecar knew of a process that still runs.
#[derive(Debug, Clone)]
pub(in crate::app::tunnel) struct Adopted {
    /// Which.
    pub(in crate::app::tunnel) child: Child,
    /// Since when.
    pub(in crate::app::tunnel) since: Instant,
    /// Its name.
    pub(in crate::app::tunnel) name: Option<String>,
    /// Where to ask it.
    pub(in crate::app::tunnel) metrics: Option<u16>,
    /// What it speaks.
    pub(in crate::app::tunnel) protocol: Option<String>,
    /// UDP is blocked.
    pub(in crate::app::tunnel) fell_back: bool,
    /// Since when it is open.
    pub(in crate::app::tunnel) open_since: Option<Instant>,
    /// Whether it ever was verified.
    pub(in crate::app::tunnel) was_verified: bool,
    /// Flags it was started without.
    pub(in crate::app::tunnel) dropped: BTreeSet<String>,
    /// What it is is known.
    pub(in crate::app::tunnel) has_program: bool,
}
