//! The operator's tunnel (contract 7): a `cloudflared` in the keeper that gives the endpoint a public
//! name. Opened and closed by the operator alone, never through HTTP.
//!
//! [`machine`] decides, purely; [`driver`] owns it, tells it of the operator, the keeper, cloudflared's
//! metrics port and log ([`log`]) and the probes ([`probe`]), and does what it says; here is what the
//! rest of the sidecar sees of it. [`failure`] names what goes wrong, [`crossing`] counts the requests that
//! come through, [`start`] is how cloudflared is started, [`words`] what people read.
//!
//! What a later sidecar must know travels in the keeper's note of the child; the state file says only
//! that a tunnel was open, so that its loss meanwhile is noticed.

mod crossing;
mod driver;
mod failure;
mod log;
mod machine;
mod probe;
mod start;
mod words;

use std::cell::{Cell, RefCell};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use super::Core;
use crate::config::Proxy;
use crate::frame::messages::Level;
use crate::http::Passage;
use crate::keeper::wire::Exit;
use crate::outbound::Outbound;
use crate::process::Identity;
use failure::Failure;
use log::Facts;
use machine::Child;
use start::Program;

pub use words::{Shown, opened};

/// What the keeper knows it as.
pub const PURPOSE: &str = "tunnel";

/// The core's handle on it.
pub struct Tunnel {
    happened: mpsc::Sender<Happened>,
    inbox: RefCell<Option<mpsc::Receiver<Happened>>>,
    nonce: probe::Nonce,
    outbound: Outbound,
    shown: watch::Sender<Shown>,
    crossing: crossing::Crossing,
    /// The state file is to say that one is open.
    is_open: Cell<bool>,
    /// Commands typed in the host that wait for the outcome: it is their answer then, no notice.
    asked_in_host: Cell<u32>,
}

/// What the driver is told.
enum Happened {
    Opening(oneshot::Sender<Result<(), String>>),
    Closing(&'static str, oneshot::Sender<bool>),
    Progress(String),
    Obtained(Result<Program, Failure>),
    Spawned(Result<Child, Failure>),
    Saw { child: Child, name: Option<String>, ready: Option<bool>, facts: Facts },
    Probed(Child, probe::Verdict),
    Ended { process: Identity, exit: Exit, facts: Facts, gone: bool },
}

impl Tunnel {
    /// No tunnel yet.
    pub fn new(proxy: Proxy) -> Self {
        let (happened, inbox) = mpsc::channel(64);
        Self {
            happened,
            inbox: RefCell::new(Some(inbox)),
            nonce: probe::Nonce::default(),
            outbound: Outbound::new(proxy),
            shown: watch::Sender::new(Shown::default()),
            crossing: crossing::Crossing::default(),
            is_open: Cell::new(false),
            asked_in_host: Cell::new(0),
        }
    }

    /// Whether `name` is the tunnel's (lower case).
    pub fn is_named(&self, name: &str) -> bool {
        self.shown.borrow().name.as_deref() == Some(name)
    }

    /// Whether one is open, for the state file.
    pub fn is_open(&self) -> bool {
        self.is_open.get()
    }

    /// The answer to a nonce of ours (contract 10).
    pub fn answer(&self, nonce: &str) -> Option<String> {
        self.nonce.answer(nonce)
    }
}

impl Core {
    /// The public URL of the endpoint, without a path, while the tunnel is open.
    pub fn public_url(&self) -> Option<String> {
        self.tunnel.shown.borrow().url()
    }

    /// How the tunnel stands.
    pub fn tunnel_shown(&self) -> Shown {
        let mut shown = self.tunnel.shown.borrow().clone();
        shown.in_flight = self.tunnel.crossing.in_flight();
        shown.peak = self.tunnel.crossing.peak();
        shown
    }

    /// Opens it, or says why not now; [`Core::tunnel_settled`] waits for the outcome.
    ///
    /// # Errors
    /// When Cloudflare is to be left alone for a while.
    pub async fn open_tunnel(&self) -> Result<(), String> {
        let (reply, answer) = oneshot::channel();
        let _ = self.tunnel.happened.send(Happened::Opening(reply)).await;
        answer.await.unwrap_or_else(|_| Err("the bridge is ending".into()))
    }

    /// Closes it and waits for its process' end; whether there was one.
    pub async fn close_tunnel(&self) -> bool {
        let (reply, answer) = oneshot::channel();
        let _ = self.tunnel.happened.send(Happened::Closing("operator", reply)).await;
        answer.await.unwrap_or(false)
    }

    /// Begins to close it for the end of the bridge; the keeper does the rest.
    pub(super) async fn end_tunnel(&self, why: &'static str) {
        let (reply, _) = oneshot::channel();
        let order = self.tunnel.happened.send(Happened::Closing(why, reply));
        if timeout(Duration::from_millis(100), order).await.is_ok() {
            let mut shown = self.tunnel.shown.subscribe();
            let _ = timeout(Duration::from_millis(300), shown.wait_for(|shown| shown.name.is_none())).await;
        }
    }

    /// Waits until it is clear whether it is open and verified; at most `limit`. With `in_host` the
    /// outcome is the answer to who typed it there.
    pub async fn tunnel_settled(&self, limit: Duration, in_host: bool) -> Shown {
        let waiting = &self.tunnel.asked_in_host;
        waiting.set(waiting.get() + u32::from(in_host));
        let mut shown = self.tunnel.shown.subscribe();
        let _ = timeout(limit, shown.wait_for(|shown| !shown.is_pending)).await;
        waiting.set(waiting.get() - u32::from(in_host));
        self.tunnel_shown()
    }

    /// A request came with this `Host`; counted when it came through the tunnel.
    pub(super) fn crosses_tunnel(&self, name: &str) -> Option<Passage> {
        if !self.tunnel.is_named(name) {
            return None;
        }
        let (passage, is_crowded) = self.tunnel.crossing.enter();
        if is_crowded {
            self.notify(Level::Warning, words::crowded());
        }
        Some(passage)
    }
}
