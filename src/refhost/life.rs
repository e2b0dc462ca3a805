//! One sidecar's life as the shim sees it: hello, frames both ways, pings, the polite end, and
//! reading its stdout to the end after its death (contract 15 and 17).
//!
//! ```text
//! greeting ──hello result──▶ serving ──bridge/stop──▶ stopping ──goodbye──▶ closing ──▶ ended
//! ```
//! Every deadline ends in a kill; a life always ends with the process reaped.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{FutureExt, StreamExt};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::io::AsyncWrite;
use tokio::sync::mpsc;
use tokio::task::{Id, JoinError};
use tokio_util::codec::FramedRead;
use tokio_util::sync::CancellationToken;

use super::launch::{Exit, Sidecar};
use super::shim::{AskedCall, Core, Order, error_text, refuse};
use super::store::Outcome;
use super::supervise::{Ending, Last, Liveness, Tick};
use super::tools::{Pending, Report};
use super::wire::{Asked, Heard, Outbox, write};
use crate::frame::messages::{
    Command, Goodbye, GoodbyeReason, Hello, HelloResult, Resume, RpcError, Stop, code,
};
use crate::frame::raw::{self, RawObject};
use crate::frame::{Envelope, FrameCodec, FrameError, Shape};

/// While so many bytes wait for the pipe, finished tools and reports wait too.
const HIGH_WATER: usize = 4 << 20;
/// Frames handled in one go after the first.
const FRAMES_PER_TURN: usize = 64;
/// Frames handled in one go at a tick.
const FRAMES_PER_TICK: usize = 10_000;
/// How long a dead process's output is read on, should somebody else hold it open.
const DRAIN: Duration = Duration::from_secs(1);
/// How long a process may outlive the end of its output, or of its input.
const LINGER: Duration = Duration::from_secs(2);
/// What a polite stop may take beyond its grace.
const STOP_MARGIN: Duration = Duration::from_secs(1);

/// How a life ended.
pub(super) enum End {
    /// This side stopped it.
    Stopped,
    /// It ended by itself.
    Ended {
        /// Whether `hello` had been answered.
        greeted: bool,
        /// How.
        ending: Ending,
    },
}

pub(super) struct Life {
    reader: FramedRead<Heard, FrameCodec>,
    writer: Option<Box<dyn AsyncWrite + Unpin>>,
    exited: Pending<Exit>,
    kill: CancellationToken,
    last_words: Box<dyn Fn() -> Option<String>>,
    heard: Rc<Cell<bool>>,
    liveness: Liveness,
    out: Outbox,
    phase: Phase,
    deadline: Option<Instant>,
    stopped_by_us: bool,
    goodbye: Option<GoodbyeReason>,
    refusal: Option<RpcError>,
    verdict: Option<String>,
    bad_frames: u64,
    restarts: u64,
    greeted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Greeting,
    Serving,
    Stopping,
    /// What waits is written, then the input is closed.
    Closing,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CallIdParams {
    call_id: String,
    #[serde(default)]
    note: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AckParams {
    call_ids: Vec<String>,
}

impl Life {
    pub(super) fn new(sidecar: Sidecar, ping_every: Duration, restarts: u64) -> Self {
        let heard = Rc::new(Cell::new(false));
        let output = Heard::new(sidecar.output, heard.clone());
        Self {
            reader: FramedRead::with_capacity(output, FrameCodec::default(), 64 << 10),
            writer: Some(sidecar.input),
            exited: sidecar.exited,
            kill: sidecar.kill,
            last_words: sidecar.last_words,
            heard,
            liveness: Liveness::new(ping_every, Instant::now()),
            out: Outbox::default(),
            phase: Phase::Greeting,
            deadline: None,
            stopped_by_us: false,
            goodbye: None,
            refusal: None,
            verdict: None,
            bad_frames: 0,
            restarts,
            greeted: false,
        }
    }

    pub(super) async fn run(
        mut self,
        core: &mut Core,
        orders: &mut mpsc::Receiver<Order>,
        port: &mut Option<u16>,
    ) -> End {
        self.greet(core, *port);
        let mut exit = None;
        let mut output_ended = false;
        let mut orders_open = true;
        let state = core.state.clone();
        while exit.is_none() || !output_ended {
            let has_room = self.out.len() < HIGH_WATER;
            let serves = matches!(self.phase, Phase::Serving | Phase::Stopping);
            let deadline = self.deadline.unwrap_or_else(|| self.liveness.due());
            tokio::select! {
                frame = self.reader.next(), if !output_ended => {
                    output_ended = self.read(core, port, frame);
                    // What came with it is taken at once: a turn of this loop costs more than a frame.
                    for _ in 0..FRAMES_PER_TURN {
                        match self.reader.next().now_or_never() {
                            Some(frame) if !output_ended => output_ended = self.read(core, port, frame),
                            _ => break,
                        }
                    }
                    if output_ended && exit.is_none() {
                        self.end_by(LINGER);
                    }
                }
                status = &mut self.exited, if exit.is_none() => {
                    exit = Some(status);
                    self.writer = None;
                    // What a stopped one still said is of no use to anybody.
                    output_ended |= self.stopped_by_us;
                    self.deadline = Some(Instant::now() + DRAIN);
                }
                written = write(&mut self.writer, &mut self.out), if self.writes() => {
                    if let Err(error) = written {
                        // It does not read any more; what it still says is read to the end.
                        tracing::debug!(%error, "writing to the sidecar failed");
                        self.writer = None;
                        self.out.clear();
                        self.end_by(LINGER);
                    }
                }
                Some(done) = core.tasks.join_next_with_id(), if has_room && !core.tasks.is_empty() => {
                    // What was ordered before an end comes before it: a withdrawn question, a changed list.
                    while let Ok(order) = orders.try_recv() {
                        self.obey(core, order);
                    }
                    self.finished(core, done);
                    while self.out.len() < HIGH_WATER
                        && let Some(done) = core.tasks.try_join_next_with_id()
                    {
                        self.finished(core, done);
                    }
                }
                Some(report) = core.reports.recv(), if serves && has_room => self.report(report),
                () = state.changed.notified(), if serves => self.send_state(core),
                order = orders.recv(), if orders_open => match order {
                    Some(order) => self.obey(core, order),
                    None => orders_open = false,
                },
                () = tokio::time::sleep_until(self.liveness.due().into()), if exit.is_none() => {
                    // What had arrived counts, however late this tick is.
                    for _ in 0..FRAMES_PER_TICK {
                        match self.reader.next().now_or_never() {
                            Some(frame) if !output_ended => output_ended = self.read(core, port, frame),
                            _ => break,
                        }
                    }
                    self.tick();
                }
                () = tokio::time::sleep_until(deadline.into()), if self.deadline.is_some() => {
                    if exit.is_some() {
                        output_ended = true;
                    } else {
                        self.escalate();
                    }
                }
            }
            if self.phase == Phase::Closing && self.out.is_empty() && self.writer.take().is_some() {
                self.end_by(LINGER);
            }
        }
        self.end(exit.unwrap_or(Exit::Unknown))
    }

    fn greet(&mut self, core: &Core, port: Option<u16>) {
        let hello = Hello {
            resume: port.map(|port| Resume { port }),
            in_flight: core.store.in_flight(),
            ..core.config.hello.clone()
        };
        self.out.ask("bridge/hello", json(&hello), Asked::Hello);
    }

    /// The hello result came: earlier results follow it, oldest first, then the state.
    fn serve(&mut self, core: &Core, hello: &HelloResult) {
        self.greeted = true;
        if self.phase == Phase::Greeting {
            self.phase = Phase::Serving;
        }
        core.observer.ready(hello, self.restarts);
        for (call_id, outcome) in core.store.finished_before(core.generation) {
            self.out.result(call_id, outcome);
        }
        self.send_state(core);
    }

    fn writes(&self) -> bool {
        self.writer.is_some() && !self.out.is_empty()
    }

    /// Takes what the reader gave; `true` when nothing more will come.
    fn read(
        &mut self,
        core: &mut Core,
        port: &mut Option<u16>,
        frame: Option<Result<Bytes, FrameError>>,
    ) -> bool {
        match frame {
            Some(Ok(frame)) => {
                self.receive(core, port, &frame);
                false
            }
            None => true,
            Some(Err(error)) => {
                if !matches!(error, FrameError::Cut { .. }) {
                    self.verdict.get_or_insert(format!("its stream cannot be read: {error}"));
                    self.kill.cancel();
                }
                true
            }
        }
    }

    fn receive(&mut self, core: &mut Core, port: &mut Option<u16>, frame: &Bytes) {
        let envelope = match Envelope::parse(frame) {
            Ok(envelope) => envelope,
            Err(error) => return self.bad_frame(frame, &error.to_string()),
        };
        let slice =
            |raw: Option<&RawValue>| raw.map_or_else(Bytes::new, |raw| frame.slice_ref(raw.get().as_bytes()));
        let params = slice(envelope.params);
        match (envelope.shape(), envelope.method.as_deref()) {
            (Shape::Request, Some("tools/call")) => {
                self.call(core, frame, slice(envelope.id), envelope.params)
            }
            (Shape::Request, Some("bridge/ping")) => {
                let lag = self.liveness.lag().as_secs_f64() * 1000.0;
                let result = format!(r#"{{"lagMs":{lag:.0}}}"#).into();
                self.out.answer(&slice(envelope.id), &Outcome::Result(result));
            }
            (Shape::Request, Some(method)) => core.answer_later(slice(envelope.id), method, params),
            (Shape::Notification, Some(method)) => {
                if let Err(error) = self.notified(core, method, &params) {
                    self.bad_frame(frame, &format!("{method}: {error}"));
                }
            }
            (Shape::Answer, _) => {
                let id = envelope.id.and_then(|id| id.get().parse().ok());
                match id.and_then(|id| self.out.asked(id)) {
                    Some(asked) => {
                        let answer = match envelope.error {
                            Some(error) => Err(serde_json::from_str(error.get()).unwrap_or(RpcError {
                                code: code::FAILED.into(),
                                message: "unreadable error".into(),
                            })),
                            None => Ok(slice(envelope.result)),
                        };
                        self.answered(core, port, asked, answer);
                    }
                    None => self.bad_frame(frame, "an answer that nobody waits for"),
                }
            }
            _ => self.bad_frame(frame, "neither request nor answer"),
        }
    }

    fn call(&mut self, core: &mut Core, frame: &Bytes, id: Bytes, params: Option<&RawValue>) {
        let object = params.and_then(|params| RawObject::parse(params.get())).unwrap_or_default();
        let meta = object.get("_meta").and_then(|meta| RawObject::parse(meta.get())).unwrap_or_default();
        let call = meta.get("a2mcp/call").and_then(|call| serde_json::from_str(call.get()).ok());
        let Some(CallIdParams { call_id, note }) = call else {
            let message = "tools/call without _meta[\"a2mcp/call\"]".into();
            let error = RpcError { code: code::INVALID_PARAMS.into(), message };
            return self.out.answer(&id, &Outcome::Error(error_text(&error)));
        };
        let name = object.get("name").and_then(raw::string).unwrap_or_default().into_owned();
        let slice = |raw: &RawValue| frame.slice_ref(raw.get().as_bytes());
        let arguments = object.get("arguments").map_or(Bytes::from_static(b"{}"), slice);
        let params = params.map_or(Bytes::from_static(b"{}"), slice);
        let asked = AskedCall { id: id.clone(), call_id, name, note, arguments, params };
        if let Some(outcome) = core.begin(asked) {
            self.out.answer(&id, &outcome);
        }
    }

    fn notified(&mut self, core: &mut Core, method: &str, params: &Bytes) -> Result<(), serde_json::Error> {
        match method {
            "notifications/cancelled" => {
                #[derive(Deserialize)]
                #[serde(rename_all = "camelCase")]
                struct Cancelled<'a> {
                    #[serde(borrow)]
                    request_id: &'a RawValue,
                }
                let cancelled: Cancelled<'_> = serde_json::from_slice(params)?;
                core.cancel_request(cancelled.request_id.get());
            }
            "bridge/cancel" => {
                let params: CallIdParams = serde_json::from_slice(params)?;
                core.cancel(&params.call_id);
            }
            "bridge/note" => {
                let params: CallIdParams = serde_json::from_slice(params)?;
                if let Some(note) = params.note
                    && !core.store.set_note(&params.call_id, note)
                {
                    tracing::debug!(call = ?params.call_id, "a note was not taken");
                }
            }
            "bridge/ack" => {
                let params: AckParams = serde_json::from_slice(params)?;
                core.store.acknowledge(params.call_ids.iter().map(String::as_str));
            }
            "bridge/notify" => core.observer.notice(&serde_json::from_slice(params)?),
            "bridge/goodbye" => {
                let goodbye: Goodbye = serde_json::from_slice(params)?;
                self.goodbye = Some(goodbye.reason);
                if self.stopped_by_us {
                    self.close();
                } else {
                    self.end_by(LINGER);
                }
            }
            _ => core.relay_notification(method, params.clone()),
        }
        Ok(())
    }

    fn answered(
        &mut self,
        core: &Core,
        port: &mut Option<u16>,
        asked: Asked,
        answer: Result<Bytes, RpcError>,
    ) {
        match (asked, answer) {
            (Asked::Hello, Ok(result)) => match serde_json::from_slice::<HelloResult>(&result) {
                Ok(hello) => {
                    *port = Some(hello.port);
                    self.serve(core, &hello);
                }
                Err(error) => {
                    self.verdict = Some(format!("its answer to hello cannot be read: {error}"));
                    self.kill.cancel();
                }
            },
            (Asked::Hello, Err(error)) => {
                self.refusal = Some(error);
                self.close();
            }
            (Asked::Ping, _) => {}
            // Closed either way: after an error it will not stop by being asked again.
            (Asked::Stop, _) => self.close(),
            (Asked::Command(reply), answer) => {
                let notice = answer.map_err(|error| error.message).and_then(|text| {
                    serde_json::from_slice(&text).map_err(|error| format!("unreadable answer: {error}"))
                });
                drop(reply.send(notice));
            }
            (Asked::Request { reply, .. }, answer) => drop(reply.send(answer)),
        }
    }

    fn obey(&mut self, core: &Core, order: Order) {
        match order {
            Order::Stop(grace) if self.phase == Phase::Serving => {
                self.stopped_by_us = true;
                self.phase = Phase::Stopping;
                let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
                self.out.ask("bridge/stop", json(&Stop { grace_ms }), Asked::Stop);
                self.end_by(grace.saturating_add(STOP_MARGIN));
            }
            Order::Stop(_) if self.phase != Phase::Greeting => self.stopped_by_us = true,
            // Nothing runs yet, or nothing may: the end of its input is what a sidecar follows.
            Order::Stop(_) | Order::StopNow => {
                self.stopped_by_us = true;
                core.cancel_all();
                self.phase = Phase::Closing;
                self.out.clear();
                self.writer = None;
                self.deadline = Some(Instant::now() + LINGER);
            }
            Order::Kill => {
                self.stopped_by_us = true;
                core.cancel_all();
                self.kill.cancel();
            }
            // Its reply is dropped, as if it had come to the sidecar before.
            Order::Request { .. } if self.phase == Phase::Greeting => {}
            order if self.phase != Phase::Serving => refuse(order),
            Order::Command(argv, reply) => {
                self.out.ask("bridge/command", json(&Command { argv }), Asked::Command(reply));
            }
            Order::CloseStream(call_id) => {
                self.out.notify("bridge/closeStream", json(&serde_json::json!({ "callId": call_id })));
            }
            Order::Notify(method, params) => self.out.notify(&method, params),
            Order::Request { tag, method, params, reply } => {
                self.out.ask(&method, params, Asked::Request { tag, reply });
            }
            Order::CancelRequest { tag, reason } => {
                if let Some(id) = self.out.forget_request(tag) {
                    let reason = raw::quote(&reason);
                    let params = format!(r#"{{"requestId":{id},"reason":{reason}}}"#);
                    self.out.notify("notifications/cancelled", params.into());
                }
            }
        }
    }

    /// Says goodbye, writes what waits and closes the sidecar's input.
    fn close(&mut self) {
        if self.phase != Phase::Closing {
            self.phase = Phase::Closing;
            if self.stopped_by_us {
                let goodbye = Goodbye { reason: GoodbyeReason::Host };
                self.out.notify("bridge/goodbye", json(&goodbye));
            }
            self.deadline = Some(Instant::now() + LINGER);
        }
    }

    /// A deadline passed: close the input first, then kill.
    fn escalate(&mut self) {
        if self.writer.take().is_some() {
            self.phase = Phase::Closing;
            self.out.clear();
            self.deadline = Some(Instant::now() + LINGER);
        } else {
            self.deadline = None;
            self.verdict.get_or_insert_with(|| "it did not end and was killed".to_owned());
            self.kill.cancel();
        }
    }

    /// Sets a deadline, unless an earlier one stands.
    fn end_by(&mut self, pause: Duration) {
        let at = Instant::now() + pause;
        self.deadline = Some(self.deadline.map_or(at, |earlier| earlier.min(at)));
    }

    fn tick(&mut self) {
        match self.liveness.tick(Instant::now(), self.heard.replace(false)) {
            Tick::Hung => {
                self.verdict = Some("it hung: three pings unanswered".to_owned());
                self.kill.cancel();
            }
            Tick::Ping if self.writer.is_some() => self.out.ask("bridge/ping", Bytes::new(), Asked::Ping),
            Tick::Ping => {}
        }
    }

    fn finished(&mut self, core: &mut Core, done: Result<(Id, Outcome), JoinError>) {
        let Some((origin, outcome)) = core.finished(done) else { return };
        // What a tool reported comes before its result.
        while let Ok(report) = core.reports.try_recv() {
            self.report(report);
        }
        if origin.generation == core.generation {
            self.out.answer(&origin.id, &outcome);
        } else if let Some(call_id) = origin.call_id
            && self.greeted
            && core.store.is_finished(&call_id)
        {
            self.out.result(&call_id, &outcome);
        }
    }

    fn report(&mut self, report: Report) {
        if self.greeted {
            self.out.notify(&report.method, report.params);
        }
    }

    fn send_state(&mut self, core: &Core) {
        self.out.notify("bridge/state", json(&core.state.message()));
    }

    fn bad_frame(&mut self, frame: &Bytes, why: &str) {
        self.bad_frames += 1;
        if self.bad_frames == 1 || self.bad_frames.is_multiple_of(50) {
            tracing::warn!(count = self.bad_frames, bytes = frame.len(), why = ?why, "frame ignored");
        }
    }

    fn end(self, exit: Exit) -> End {
        if self.stopped_by_us {
            return End::Stopped;
        }
        let last = Last {
            exit,
            goodbye: self.goodbye,
            refusal: self.refusal,
            verdict: self.verdict,
            words: (self.last_words)(),
        };
        End::Ended { greeted: self.greeted, ending: last.judge() }
    }
}

fn json(message: &impl Serialize) -> Bytes {
    // Only a map with keys that are no strings could fail; there is none.
    serde_json::to_vec(message).unwrap_or_default().into()
}
