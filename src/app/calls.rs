//! One `tools/call` on its way: ledger, audit `start`, host, audit `done`, outcome.
//!
//! A call is a task of its own. The caller's handler only waits for the outcome: it may vanish at any
//! moment, and what must still happen (the audit's end, keeping the result) happens here. Calls of an
//! earlier sidecar take up where that one left off, from the note the shim kept.

use std::rc::Rc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::time::Duration;

use super::exchange::{Cancel, Exchange, Outcome, Seat};
use super::share::OwnTool;
use super::streams::Stream;
use super::{Core, now_ms};
use crate::audit::{Args, Outcome as AuditOutcome, Record};
use crate::crash;
use crate::frame::messages::{InFlight, InFlightState, RpcError, code};
use crate::frame::raw::{RawObject, quote};
use crate::host::LinkError;
use crate::ledger::{self, Newcomer, Phase, Verdict};
use crate::mcp::call::{NO_MAIN, NOT_EXPOSED, ToolCall, ToolResult};
use crate::text::rfc3339;

/// The format of a call's note (contract 17).
const NOTE_VERSION: u32 = 1;
/// How often the ledger is swept while there is something to sweep.
const SWEEP_EVERY: Duration = Duration::from_millis(250);
/// For how long acknowledgements are collected. Short: a sidecar that dies before it sent one leaves
/// the next an ended call that looks like nobody had its result.
const ACK_AFTER: Duration = Duration::from_millis(20);

/// What the shim keeps for a later sidecar and hands back in `inFlight`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Note {
    v: u32,
    sid: String,
    rpc_id: String,
    /// The caller's progress token, its own text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<String>,
    /// Base64 of the ledger's digest.
    digest: String,
    /// Which token the call was made under: a keyed hash, not the token.
    bound: String,
    /// The redacted arguments, for the audit.
    args: String,
    #[serde(default)]
    started_ms: u64,
    /// When its caller left; absent while there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    left_ms: Option<u64>,
    /// When it ended with nobody there: the replay window began then, however many sidecars follow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ended_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    has_moved_on: bool,
    /// Somebody sent it again: the result says so to whoever gets it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_attached: bool,
}

/// A `tools/call` read, digested and redacted: everything that takes time with large arguments.
pub struct Prepared {
    call: Option<ToolCall>,
    digest: ledger::Digest,
    args: Args,
}

impl Prepared {
    /// From the parameters; blocks for as long as they are.
    pub fn of(params: Option<&Bytes>) -> Self {
        let call = ToolCall::parse(params);
        let (tool, arguments) =
            call.as_ref().map_or(("", &b"{}"[..]), |call| (&*call.name, call.arguments()));
        Self {
            digest: ledger::digest(tool, arguments),
            args: Args::redact(std::str::from_utf8(arguments).unwrap_or("{}")),
            call,
        }
    }

    fn tool(&self) -> &str {
        self.call.as_ref().map_or("", |call| &call.name)
    }
}

/// Who asks.
#[derive(Debug, Clone)]
pub struct Caller {
    /// The session's id.
    pub sid: String,
    /// The client's name, for people.
    pub client_name: String,
}

impl Core {
    /// Starts a call, or finds the one that this is again.
    ///
    /// # Errors
    /// Too many calls run: nothing was dispatched.
    pub fn start_call(
        self: &Rc<Self>,
        caller: Caller,
        rpc_id: &str,
        accepts_stream: bool,
        prepared: Prepared,
    ) -> Result<Rc<Exchange>, &'static str> {
        let call_id = uuid::Uuid::new_v4().to_string();
        let newcomer = Newcomer { sid: &caller.sid, rpc_id, tool: prepared.tool(), digest: prepared.digest };
        let verdict = self.ledger.borrow_mut().admit(&call_id, &newcomer, now_ms());
        let moved_on = self.ledger.borrow_mut().take_moved_on();
        moved_on.iter().for_each(|call_id| self.renew_note(call_id));
        let seat = |key: &str| Seat {
            sid: caller.sid.clone(),
            rpc_id: rpc_id.to_owned(),
            progress_token: prepared.call.as_ref().and_then(|call| call.progress_token.clone()),
            accepts_stream,
            stream: Stream::new(key.to_owned(), self.next_epoch()),
        };
        match verdict {
            Verdict::TooMany => Err("too many calls are in flight; try again"),
            Verdict::Attach(earlier) => {
                let Some(exchange) = self.exchanges.borrow().get(&earlier).cloned() else {
                    return Err("the earlier call is just ending; try again");
                };
                self.attach(&exchange, seat(&earlier), &prepared);
                Ok(exchange)
            }
            Verdict::New => {
                let exchange = Exchange::new(call_id.clone(), true, seat(&call_id));
                self.exchanges.borrow_mut().insert(call_id, exchange.clone());
                let (core, running) = (self.clone(), exchange.clone());
                self.tasks.spawn_local(async move { core.run_call(&running, &caller, prepared).await });
                Ok(exchange)
            }
        }
    }

    /// A re-sent call takes the seat of the one that runs or has run.
    fn attach(self: &Rc<Self>, exchange: &Rc<Exchange>, seat: Seat, prepared: &Prepared) {
        tracing::info!(call = exchange.key, "the same call came again: attached to the one that ran already");
        exchange.take_seat(seat);
        self.ask_again(exchange);
        let is_first = self.attached.borrow_mut().insert(exchange.key.clone());
        if is_first && let Some(outcome) = exchange.outcome() {
            // Said again, now with the mark.
            self.replace_outcome(exchange, self.marked(&exchange.key, outcome));
        }
        let sid = &exchange.seat().sid;
        let record = Record::attached(&exchange.key, sid, prepared.tool(), &prepared.args);
        self.tasks.spawn_local(self.audit.write(record));
        self.renew_note(&exchange.key);
    }

    /// Tells the shim what a later sidecar must know of a call by now: whose it is, and since when
    /// nobody waits for it.
    pub(super) fn renew_note(&self, call_id: &str) {
        let seat = self.exchanges.borrow().get(call_id).map(|exchange| exchange.seat());
        let (mut notes, ledger) = (self.notes.borrow_mut(), self.ledger.borrow());
        // A call whose host was not asked yet has no note; it gets all this with the question.
        let (Some(seat), Some(note), Some(entry)) = (seat, notes.get_mut(call_id), ledger.get(call_id))
        else {
            return;
        };
        note.sid.clone_from(&seat.sid);
        note.rpc_id.clone_from(&seat.rpc_id);
        note.token = seat.token_text();
        note.left_ms = entry.left_ms();
        note.ended_ms = entry.ended_ms();
        note.has_moved_on = entry.has_moved_on();
        note.is_attached = self.attached.borrow().contains(call_id);
        let params = serde_json::json!({ "callId": call_id, "note": &*note });
        let link = self.link.clone();
        self.tasks.spawn_local(async move {
            let _ = link.notify("bridge/note", &params).await;
        });
    }

    /// The caller's connection broke, or ended before the response was out.
    pub(super) fn left(&self, call_id: &str) {
        self.ledger.borrow_mut().left(call_id, now_ms());
        self.renew_note(call_id);
        self.sweep_wanted.notify_one();
    }

    /// The caller came back by `Last-Event-ID`.
    pub(super) fn returned(&self, call_id: &str) {
        self.ledger.borrow_mut().returned(call_id);
        self.renew_note(call_id);
    }

    async fn run_call(self: Rc<Self>, exchange: &Rc<Exchange>, caller: &Caller, prepared: Prepared) {
        let tool = prepared.tool().to_owned();
        let Prepared { call, args, .. } = prepared;
        self.tell_if_stalled(exchange);
        crash::at("before-audit-start");
        self.audit.write(Record::start(&exchange.key, &caller.sid, &tool, &args)).await;
        crash::at("after-audit-start");
        let asked = tokio::select! {
            answer = self.ask_host(exchange, caller, call, &args) => answer,
            () = exchange.cancelled.cancelled() => Err(Unanswered::Cancelled),
        };
        self.conclude(exchange, &tool, (&args, false), asked).await;
    }

    /// Audits the end of a call, unless that is on record already (an earlier sidecar wrote it and died
    /// before the caller had the answer), and hands its outcome to whoever waits.
    async fn conclude(
        self: &Rc<Self>,
        exchange: &Rc<Exchange>,
        tool: &str,
        (args, on_record): (&Args, bool),
        asked: Asked,
    ) {
        let call_id = &exchange.key;
        let seat = exchange.seat();
        let sid = &seat.sid;
        let (outcome, record) = match asked {
            Ok(result) => {
                let record = Record::done(call_id, sid, tool, args, result.is_error);
                (Outcome::Result(result), record)
            }
            Err(Unanswered::Cancelled) => {
                self.ledger.borrow_mut().cancelled(call_id);
                let record = Record::ended(call_id, sid, tool, args, AuditOutcome::Cancelled);
                let outcome = match exchange.cause() {
                    Cancel::Caller | Cancel::SessionEnded => Outcome::Cancelled,
                    cause @ (Cancel::Operator | Cancel::Stopping) => {
                        Outcome::Result(ToolResult::error(cause.reason()))
                    }
                };
                (outcome, record)
            }
            Err(Unanswered::Unknown(text)) => {
                let record = Record::ended(call_id, sid, tool, args, AuditOutcome::Unknown);
                (Outcome::Result(ToolResult::error(&text)), record)
            }
        };
        if !on_record {
            self.audit.write(record).await;
            crash::at("done-written");
        }
        let outcome =
            if self.attached.borrow().contains(call_id) { self.marked(call_id, outcome) } else { outcome };
        let ended_before = self.notes.borrow().get(call_id).and_then(|note| note.ended_ms);
        let ended_ms = ended_before.unwrap_or_else(now_ms).min(now_ms());
        self.ledger.borrow_mut().ended(call_id, outcome.weight(), ended_ms);
        exchange.finish(outcome);
        let is_orphan = self.ledger.borrow().get(call_id).is_some_and(ledger::Entry::is_orphan);
        if is_orphan && ended_before.is_none() {
            self.renew_note(call_id);
        }
        self.drop_questions_of(call_id, "the call has ended");
        self.call_ended.notify_waiters();
        self.sweep_wanted.notify_one();
    }

    /// An outcome that reaches a caller who sent the call again says so.
    fn marked(&self, call_id: &str, outcome: Outcome) -> Outcome {
        let started = self.ledger.borrow().get(call_id).map_or(0, |entry| entry.started_ms);
        match outcome {
            Outcome::Result(result) => Outcome::Result(mark_attached(result, call_id, started)),
            other => other,
        }
    }

    async fn ask_host(
        self: &Rc<Self>,
        exchange: &Exchange,
        caller: &Caller,
        call: Option<ToolCall>,
        args: &Args,
    ) -> Asked {
        let call = match call {
            Some(call) if !self.denied.covers(&call.name) => call,
            _ => return Ok(ToolResult::error(NOT_EXPOSED)),
        };
        if self.paused.get() {
            return Ok(ToolResult::error("paused by the operator"));
        }
        if let Some(tool) = OwnTool::named(&call.name) {
            self.ledger.borrow_mut().set_phase(&exchange.key, Phase::Running);
            // Boxed: such a call is rare and its future large; every call would carry the room for it.
            return Ok(Box::pin(self.run_own_tool(tool, exchange, call.arguments())).await);
        }
        if self.catalogue().await.is_none() {
            return Ok(ToolResult::error(NO_MAIN));
        }
        let call_id = &exchange.key;
        self.ledger.borrow_mut().set_phase(call_id, Phase::Running);
        let seat = exchange.seat();
        let entry = self.ledger.borrow().get(call_id).map(|entry| (entry.digest, entry.started_ms));
        let (digest, started_ms) = entry.unwrap_or_default();
        let note = Note {
            v: NOTE_VERSION,
            sid: seat.sid.clone(),
            rpc_id: seat.rpc_id.clone(),
            token: seat.token_text(),
            digest: base64(&digest),
            bound: self.token_mark(),
            args: args.as_str().to_owned(),
            started_ms,
            ..Note::default()
        };
        let note_text = serde_json::to_string(&note).unwrap_or_else(|_| "{}".into());
        self.notes.borrow_mut().insert(call_id.clone(), note);
        let params = call.host_params(call_id, &note_text, &caller.sid, &caller.client_name);
        // From here on only the link holds the arguments, and only until they are sent.
        drop(call);
        let id = self.link.next_id();
        // Dropped by a cancel, it tells the host; answered, it has nothing to tell.
        let mut dispatched = Dispatched { core: self, id, reason: None };
        dispatched.reason = Some(exchange);
        let answer = self.link.request_with_id(id, "tools/call", params).await;
        dispatched.reason = None;
        crash::at("result-read");
        match answer.map(crate::host::Answer::into_result) {
            Ok(answer) => answered(answer).await,
            Err(LinkError::TooLarge(reason)) => Ok(ToolResult::error(&reason)),
            Err(LinkError::Ended) => Err(Unanswered::Unknown(host_gone(call_id))),
        }
    }

    /// Cancels exchanges; how many of them had not been yet.
    pub fn cancel_calls(&self, keys: &[String], cause: Cancel) -> usize {
        let exchanges = self.exchanges.borrow();
        let found: Vec<_> = keys.iter().filter_map(|key| exchanges.get(key).cloned()).collect();
        drop(exchanges);
        found.into_iter().filter(|exchange| self.cancel_call(exchange, cause)).count()
    }

    /// Cancels one; from this moment on nothing attaches to it. Whether it had not been cancelled yet.
    pub(super) fn cancel_call(&self, exchange: &Exchange, cause: Cancel) -> bool {
        let is_first = exchange.cancel(cause);
        if is_first {
            self.ledger.borrow_mut().cancelled(&exchange.key);
        }
        is_first
    }

    /// Calls of an earlier sidecar become orphans of this one.
    pub(super) fn inherit_calls(self: &Rc<Self>) {
        let call_ids: Vec<_> = self.hello.in_flight.iter().map(|call| call.call_id.as_str()).collect();
        let on_record = crate::audit::ended(self.dir.audit_file(), &call_ids);
        for call in &self.hello.in_flight {
            let note: Option<Note> =
                call.note.as_ref().and_then(|note| serde_json::from_str(note.get()).ok());
            let note = note.filter(|note| note.v == NOTE_VERSION).unwrap_or_else(|| {
                // Nobody can come back to it, but its end is audited.
                tracing::warn!(
                    call = call.call_id,
                    "the note of an earlier sidecar's call is not understood"
                );
                Note::default()
            });
            let inherited = ledger::Inherited {
                call_id: call.call_id.clone(),
                sid: note.sid.clone(),
                rpc_id: note.rpc_id.clone(),
                tool: call.tool.clone(),
                digest: unbase64(&note.digest).unwrap_or_default(),
                started_ms: note.started_ms,
                left_ms: note.left_ms,
                has_moved_on: note.has_moved_on,
                attachable: note.bound == self.token_mark() && call.state != InFlightState::Cancelled,
            };
            self.ledger.borrow_mut().inherit(inherited, now_ms());
            let seat = Seat {
                sid: note.sid.clone(),
                rpc_id: note.rpc_id.clone(),
                progress_token: note.token.clone().map(Bytes::from),
                accepts_stream: true,
                stream: Stream::new(call.call_id.clone(), self.next_epoch()),
            };
            let exchange = Exchange::new(call.call_id.clone(), true, seat);
            self.exchanges.borrow_mut().insert(call.call_id.clone(), exchange.clone());
            let args = Args::redacted_before(&note.args);
            if note.is_attached {
                self.attached.borrow_mut().insert(call.call_id.clone());
            }
            let has_ended = note.ended_ms.is_some();
            self.notes.borrow_mut().insert(call.call_id.clone(), note);
            let (answer, late) = tokio::sync::oneshot::channel();
            // The note's end is written after the record, which may be rotated away by now.
            let on_record = has_ended || on_record.contains(call.call_id.as_str());
            let (core, call) = (self.clone(), call.clone());
            if matches!(call.state, InFlightState::Running | InFlightState::Finished) {
                self.late_results.borrow_mut().insert(call.call_id.clone(), answer);
            }
            self.tasks.spawn_local(async move {
                core.run_inherited(&exchange, &call, (&args, on_record), late).await;
            });
        }
    }

    /// Says of the inherited calls that their callers left with the earlier sidecar, where that one did
    /// not: the next one is not to count from its own start.
    pub(super) fn note_inherited(&self) {
        for call in &self.hello.in_flight {
            let is_said = self.notes.borrow().get(&call.call_id).is_none_or(|note| note.left_ms.is_some());
            if !is_said {
                self.renew_note(&call.call_id);
            }
        }
    }

    /// Cancels the inherited calls of a token that was replaced since, and nobody was there to do it.
    pub(super) fn cancel_replaced(&self) {
        let mark = self.token_mark();
        let notes = self.notes.borrow();
        // A note that is not understood says nothing.
        let is_replaced = |note: &Note| !note.bound.is_empty() && note.bound != mark;
        let replaced = notes.iter().filter(|(_, note)| is_replaced(note)).map(|(call_id, _)| call_id.clone());
        let replaced: Vec<String> = replaced.collect();
        drop(notes);
        self.cancel_calls(&replaced, Cancel::SessionEnded);
    }

    async fn run_inherited(
        self: Rc<Self>,
        exchange: &Rc<Exchange>,
        call: &InFlight,
        (args, on_record): (&Args, bool),
        late: tokio::sync::oneshot::Receiver<Result<Bytes, RpcError>>,
    ) {
        let asked = match call.state {
            InFlightState::Cancelled => Err(Unanswered::Cancelled),
            InFlightState::Dropped => Ok(ToolResult::error(&dropped_text(&call.call_id))),
            InFlightState::Running | InFlightState::Finished => tokio::select! {
                answer = late => match answer {
                    Ok(answer) => answered(answer).await,
                    Err(_) => Err(Unanswered::Unknown(host_gone(&call.call_id))),
                },
                () = exchange.cancelled.cancelled() => {
                    let reason = exchange.cause().reason();
                    let params = serde_json::json!({ "callId": call.call_id, "reason": reason });
                    let _ = self.link.notify("bridge/cancel", &params).await;
                    Err(Unanswered::Cancelled)
                }
            },
        };
        self.late_results.borrow_mut().remove(&call.call_id);
        self.conclude(exchange, &call.tool, (args, on_record), asked).await;
    }

    /// The shim may forget these calls; sent in batches.
    pub(super) fn acknowledge(&self, call_ids: impl IntoIterator<Item = String>) {
        let mut waiting = self.acknowledged.borrow_mut();
        let was_empty = waiting.is_empty();
        waiting.extend(call_ids);
        if was_empty && !waiting.is_empty() {
            self.acks_wanted.notify_one();
        }
        self.sweep_wanted.notify_one();
    }

    fn take_acks(&self) -> Option<serde_json::Value> {
        let call_ids = std::mem::take(&mut *self.acknowledged.borrow_mut());
        (!call_ids.is_empty()).then(|| serde_json::json!({ "callIds": call_ids }))
    }

    /// Sends what is acknowledged and not said yet.
    pub(super) async fn send_acks(&self) {
        if let Some(params) = self.take_acks() {
            let _ = self.link.notify("bridge/ack", &params).await;
        }
    }

    /// Owner of the ledger's clock: sweeps while there is something to sweep, and sends acks.
    pub(super) async fn keep_ledger(self: Rc<Self>) {
        loop {
            let idle = !self.ledger.borrow().needs_sweeping() && self.acknowledged.borrow().is_empty();
            if idle {
                self.sweep_wanted.notified().await;
            }
            tokio::select! {
                () = tokio::time::sleep(SWEEP_EVERY) => {}
                () = self.acks_wanted.notified() => tokio::time::sleep(ACK_AFTER).await,
            }
            self.sweep();
            self.send_acks().await;
        }
    }

    fn sweep(&self) {
        let sweep = self.ledger.borrow_mut().sweep(now_ms());
        for call_id in &sweep.drop {
            let exchange = self.exchanges.borrow().get(call_id).cloned();
            if let Some(exchange) = exchange {
                let dropped = Outcome::Result(ToolResult::error(&dropped_text(call_id)));
                self.replace_outcome(&exchange, dropped);
            }
        }
        self.forgotten(sweep.forget);
    }

    /// Another outcome in place of the one that nobody has read: it is the stream's response from now
    /// on, and the old one's bytes are free.
    fn replace_outcome(&self, exchange: &Exchange, outcome: Outcome) {
        exchange.replace_outcome(outcome);
        exchange.take_seat(exchange.seat().again(self.next_epoch()));
    }

    /// These calls are out of the ledger: their results go, here and at the shim.
    fn forgotten(&self, call_ids: Vec<String>) {
        for call_id in &call_ids {
            self.exchanges.borrow_mut().remove(call_id);
            self.notes.borrow_mut().remove(call_id);
            self.attached.borrow_mut().remove(call_id);
        }
        self.acknowledge(call_ids);
    }

    /// The response of a call reached its caller for certain.
    pub(super) fn delivered(&self, call_id: &str) {
        if self.ledger.borrow_mut().forget(call_id).is_some() {
            self.forgotten(vec![call_id.to_owned()]);
        }
    }
}

type Asked = Result<ToolResult, Unanswered>;

enum Unanswered {
    Cancelled,
    /// What ran it is gone; what it did is not known, in words.
    Unknown(String),
}

/// What the host's answer says.
async fn answered(answer: Result<Bytes, RpcError>) -> Asked {
    match answer {
        Ok(result) => Ok(super::beside(result.len(), move || ToolResult::from_host(result)).await),
        Err(error) if error.code == i64::from(code::OUTCOME_UNKNOWN) => {
            Err(Unanswered::Unknown(error.message))
        }
        Err(error) => Ok(ToolResult::error(&error.message)),
    }
}

fn host_gone(call_id: &str) -> String {
    format!(
        "outcome unknown: the host went away during call {call_id}; the tool may or may not have run to its end"
    )
}

/// A request that went to the host; a drop before its answer aborts the tool.
struct Dispatched<'a> {
    core: &'a Core,
    id: u64,
    reason: Option<&'a Exchange>,
}

impl Drop for Dispatched<'_> {
    fn drop(&mut self) {
        let Some(exchange) = self.reason else { return };
        let (link, id, reason) = (self.core.link.clone(), self.id, exchange.cause().reason());
        self.core.tasks.spawn_local(async move {
            let _ = link.cancel(id, reason).await;
        });
    }
}

fn dropped_text(call_id: &str) -> String {
    format!(
        "the result of call {call_id} was dropped: too many results waited for their callers; the tool ran to its end and was not run again"
    )
}

/// A result for a caller who sent the call again (contract 4.2).
fn mark_attached(result: ToolResult, call_id: &str, started_ms: u64) -> ToolResult {
    let text = String::from_utf8_lossy(&result.text).into_owned();
    let Some(object) = RawObject::parse(&text) else { return result };
    let words = quote(&format!(
        "[a2mcp] result of the same call started {} (call {call_id}); it was not run again",
        rfc3339(started_ms)
    ));
    let content = object.get("content").map_or("[]", |content| content.get()).trim();
    let blocks = content.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or_default().trim();
    let comma = if blocks.is_empty() { "" } else { "," };
    let mut json = format!(r#"{{"content":[{blocks}{comma}{{"type":"text","text":{words}}}]"#);
    for (key, value) in &object.members {
        if !["content", "_meta"].iter().any(|own| crate::frame::raw::key_is(key, own)) {
            json.push_str(&format!(",{}:{}", key.get(), value.get()));
        }
    }
    let meta = object.get("_meta").and_then(|meta| RawObject::parse(meta.get())).unwrap_or_default();
    json.push_str(&format!(r#","_meta":{{"a2mcp/attached":"{call_id}""#));
    for (key, value) in &meta.members {
        json.push_str(&format!(",{}:{}", key.get(), value.get()));
    }
    json.push_str("}}");
    ToolResult { text: json.into(), is_error: result.is_error }
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD_NO_PAD.encode(bytes)
}

fn unbase64(text: &str) -> Option<ledger::Digest> {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD_NO_PAD.decode(text).ok()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attached_result_says_so_and_keeps_the_rest() {
        let result = |text: &str| ToolResult { text: text.to_owned().into(), is_error: false };
        let marked = mark_attached(
            result(r#"{"content":[{"type":"text","text":"a"}],"isError":false,"_meta":{"x":1.50}}"#),
            "c1",
            0,
        );
        assert_eq!(
            marked.text,
            r#"{"content":[{"type":"text","text":"a"},{"type":"text","text":"[a2mcp] result of the same call started 1970-01-01T00:00:00.000Z (call c1); it was not run again"}],"isError":false,"_meta":{"a2mcp/attached":"c1","x":1.50}}"#
        );
        let marked = mark_attached(result(r#"{"content":[ ]}"#), "c1", 0);
        assert!(
            marked.text.starts_with(br#"{"content":[{"type":"text""#)
                && serde_json::from_slice::<serde_json::Value>(&marked.text).is_ok()
        );
    }
}
