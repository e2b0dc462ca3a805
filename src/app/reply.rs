//! The reply to a request that the host answers: JSON or stream, chosen late (contract 4.1), and what
//! becomes of the call when its caller is no longer there to take it.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::Stream as FutureStream;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{Response, StatusCode};

use super::exchange::{Cancel, Exchange, Outcome};
use super::streams::Reader;
use super::{Core, endpoint, now_ms};
use crate::http::body::Receipt;
use crate::http::{Body, ConnectionEvent};
use crate::mcp::reply::code;

impl Core {
    /// Waits for what an exchange has to say, and answers with JSON when that is one result soon
    /// enough, else with a stream.
    pub(super) async fn respond(self: Rc<Self>, exchange: Rc<Exchange>, connection: u64) -> Response<Body> {
        let mut waiting =
            Waiting { core: &self, exchange: &exchange, takeover: exchange.takeovers.get(), armed: true };
        let seat = exchange.seat();
        let stream_after = self.config.stream_after;
        let late = tokio::time::sleep(stream_after);
        let mut late = std::pin::pin!(late);
        let mut is_late = stream_after.is_zero();
        loop {
            if exchange.takeovers.get() != waiting.takeover {
                return endpoint::error(
                    StatusCode::OK,
                    &seat.rpc_id,
                    code::REFUSED,
                    "the same request came again on another connection, which gets the result",
                );
            }
            let outcome = exchange.outcome();
            let has_more = seat.stream.has_more_than_the_response();
            let is_plain =
                outcome.is_some() && !has_more && !matches!(outcome, Some(Outcome::Cancelled)) && !is_late;
            if let Some(outcome) = outcome
                && (is_plain || !seat.accepts_stream)
            {
                waiting.armed = false;
                return self.json_reply(&exchange, waiting.takeover, &outcome, &seat.rpc_id, connection);
            }
            if seat.accepts_stream && (is_late || has_more || exchange.outcome().is_some()) {
                waiting.armed = false;
                let reader = seat.stream.read(None);
                return self.stream_reply(&exchange, reader, connection);
            }
            tokio::select! {
                () = seat.stream.change() => {}
                () = late.as_mut(), if seat.accepts_stream && !is_late => is_late = true,
            }
        }
    }

    fn json_reply(
        self: &Rc<Self>,
        exchange: &Rc<Exchange>,
        takeover: u64,
        outcome: &Outcome,
        rpc_id: &str,
        connection: u64,
    ) -> Response<Body> {
        let parts = outcome.reply(rpc_id);
        if !exchange.is_call {
            return endpoint::json(StatusCode::OK, Body::from(parts));
        }
        let (core, exchange) = (self.clone(), exchange.clone());
        let receipt = Receipt::new(move |is_complete| {
            if exchange.takeovers.get() != takeover {
                return;
            }
            if is_complete {
                core.handed_over(&exchange, connection);
            } else {
                core.caller_left(&exchange);
            }
        });
        endpoint::json(StatusCode::OK, Body::Receipted(parts.into(), receipt))
    }

    /// A stream of what an exchange says.
    pub(super) fn stream_reply(
        self: &Rc<Self>,
        exchange: &Rc<Exchange>,
        reader: Reader,
        connection: u64,
    ) -> Response<Body> {
        stream_response(CallStream {
            core: self.clone(),
            exchange: exchange.clone(),
            takeover: exchange.takeovers.get(),
            connection,
            reader: Some(reader),
            is_complete: false,
        })
    }

    /// The response was handed to the connection; whether it arrived is seen later.
    fn handed_over(&self, exchange: &Exchange, connection: u64) {
        if !exchange.is_call {
            return;
        }
        if matches!(exchange.outcome(), Some(Outcome::Cancelled)) {
            return self.delivered(&exchange.key);
        }
        self.ledger.borrow_mut().handed_over(&exchange.key, now_ms());
        self.deliveries.borrow_mut().entry(connection).or_default().push(exchange.key.clone());
        self.sweep_wanted.notify_one();
    }

    /// The caller is gone without its response: the call is an orphan now.
    fn caller_left(&self, exchange: &Exchange) {
        if self.config.cancel_on_disconnect {
            self.cancel_call(exchange, Cancel::Caller);
        }
        if exchange.is_call {
            self.left(&exchange.key);
        }
    }

    /// What a connection tells about the responses handed to it.
    pub(super) fn connection_event(&self, connection: u64, event: ConnectionEvent) {
        let Some(calls) = self.deliveries.borrow_mut().remove(&connection) else { return };
        for call_id in calls {
            match event {
                ConnectionEvent::NextRequest | ConnectionEvent::Closed => self.delivered(&call_id),
                ConnectionEvent::Broken => self.left(&call_id),
            }
        }
    }
}

/// A reply that is a stream (contract 4.1).
pub(super) fn stream_response(body: impl FutureStream<Item = Bytes> + 'static) -> Response<Body> {
    let mut response = Response::new(Body::Stream(Box::pin(body)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform"));
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

/// The handler of a caller that waits; dropped while armed, the caller has gone.
struct Waiting<'a> {
    core: &'a Core,
    exchange: &'a Exchange,
    takeover: u64,
    armed: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.armed && self.exchange.takeovers.get() == self.takeover {
            self.core.caller_left(self.exchange);
        }
    }
}

/// A call's stream as a body.
struct CallStream {
    core: Rc<Core>,
    exchange: Rc<Exchange>,
    takeover: u64,
    connection: u64,
    reader: Option<Reader>,
    is_complete: bool,
}

impl FutureStream for CallStream {
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let Some(reader) = &mut self.reader else { return Poll::Ready(None) };
        let next = Pin::new(&mut *reader).poll_next(cx);
        if matches!(next, Poll::Ready(None)) {
            let is_complete = !reader.is_superseded();
            self.is_complete = is_complete;
        }
        next
    }
}

impl Drop for CallStream {
    fn drop(&mut self) {
        self.reader.take();
        if self.exchange.takeovers.get() != self.takeover {
            return;
        }
        if self.is_complete {
            self.core.handed_over(&self.exchange, self.connection);
        } else if !self.exchange.stream().is_read() {
            self.core.caller_left(&self.exchange);
        }
    }
}
