//! Answers HTTP with the core: sessions, then dispatch (contract 1 from step 7 on, 3, 4). The one
//! place where HTTP status and JSON-RPC code are chosen.

use std::rc::Rc;

use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};

use super::calls::{Caller, Prepared};
use super::exchange::{Cancel, Exchange};
use super::reply::stream_response;
use super::streams::Reader;
use super::{Core, Phase, VERSION, beside, host_llm, now_ms};
use crate::frame::envelope::EnvelopeError;
use crate::frame::raw::{RawObject, quote, string};
use crate::frame::{Message, Shape};
use crate::http::guard::bearer;
use crate::http::{Body, ConnectionEvent, Endpoint, Head, Health, MAX_BODY, Passage, Refusal};
use crate::ledger::is_same_id;
use crate::mcp::reply::{self, code};
use crate::mcp::session::{Hold, Session};
use crate::mcp::sse::Position;
use crate::mcp::{VERSIONS, negotiate};

const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");

impl Endpoint for Core {
    fn health(&self) -> Health {
        if self.phase.get() == Phase::Stopping {
            Health::Unready("stopping")
        } else if self.link.is_stalled() {
            Health::Unready("host_stalled")
        } else if self.known_catalogue().is_none() {
            Health::Unready("starting")
        } else {
            Health::Ready
        }
    }

    fn allows_name(&self, name: &str) -> bool {
        self.config.host.eq_ignore_ascii_case(name)
            || self.config.allowed_hosts.iter().any(|allowed| allowed == name)
            || self.tunnel.is_named(name)
    }

    fn answers(&self, nonce: &str) -> Option<String> {
        self.tunnel.answer(nonce)
    }

    fn crosses(&self, name: &str) -> Option<Passage> {
        self.crosses_tunnel(name)
    }

    fn authorizes(&self, authorization: Option<&[u8]>) -> bool {
        let presented = authorization.and_then(bearer);
        let passes = presented.is_some_and(|token| self.token.borrow().matches(token));
        if !passes {
            let count = self.unauthorized.get() + 1;
            self.unauthorized.set(count);
            if count == 1 || count.is_multiple_of(50) {
                tracing::warn!("[a2mcp] {count} unauthorized attempt(s)");
            }
        }
        passes
    }

    fn refuse(&self, refusal: Refusal) -> Response<Body> {
        let (status, code, message) = match refusal {
            Refusal::BadHost => (StatusCode::BAD_REQUEST, code::INVALID_REQUEST, "invalid request"),
            Refusal::ForbiddenHost => (StatusCode::FORBIDDEN, code::REFUSED, "forbidden host"),
            Refusal::ForbiddenOrigin => (StatusCode::FORBIDDEN, code::REFUSED, "forbidden origin"),
            Refusal::Unauthorized => (StatusCode::UNAUTHORIZED, code::REFUSED, "unauthorized"),
            Refusal::TooLarge => {
                let message = format!("request body exceeds the limit of {MAX_BODY} bytes");
                return error(StatusCode::PAYLOAD_TOO_LARGE, "null", code::REFUSED, &message);
            }
            Refusal::Cut => (StatusCode::BAD_REQUEST, code::PARSE, "parse error"),
            Refusal::TimedOut => (StatusCode::REQUEST_TIMEOUT, code::REFUSED, "request body timed out"),
            Refusal::Overloaded => {
                return busy("null", "too many large request bodies at once; try again");
            }
            Refusal::Internal => (StatusCode::INTERNAL_SERVER_ERROR, code::INTERNAL, "internal error"),
        };
        error(status, "null", code, message)
    }

    fn connection(&self, connection: u64, event: ConnectionEvent) {
        self.connection_event(connection, event);
    }

    fn is_draining(&self) -> bool {
        self.phase.get() != Phase::Serving
    }

    async fn post(self: Rc<Self>, head: Head, body: Bytes) -> Response<Body> {
        let size = body.len();
        let message = match beside(size, move || Message::parse(&body)).await {
            Ok(message) => message,
            Err(EnvelopeError::NotJson) => {
                return error(StatusCode::BAD_REQUEST, "null", code::PARSE, "parse error");
            }
            Err(EnvelopeError::NotAnObject) => return invalid("null"),
        };
        let id = message.reply_id.as_str();
        if message.shape == Shape::Answer {
            return match self.session(&head, id) {
                Ok(caller) => {
                    self.caller_answers(&caller.sid, &message);
                    accepted()
                }
                Err(refused) => refused,
            };
        }
        let (true, true, Some(method)) =
            (message.is_version_2, message.has_usable_id, message.method.as_deref())
        else {
            return invalid(id);
        };
        let params = message.params_text();
        if method == "initialize" {
            return self.initialize(id, params).await;
        }
        let caller = match self.session(&head, id) {
            Ok(caller) => caller,
            Err(refused) => return refused,
        };
        if method.starts_with("notifications/") {
            self.caller_notifies(&caller.sid, method, params);
            return accepted();
        }
        let accepts_stream = head.accepts_stream && self.config.streaming;
        let exchange = match method {
            "ping" => return ok(reply::short_result(id, "{}")),
            "tools/list" => {
                return match self.catalogue().await {
                    Some(catalogue) => ok(reply::result(id, catalogue.result.clone())),
                    None => error(StatusCode::OK, id, code::REFUSED, "host not ready"),
                };
            }
            "logging/setLevel" => {
                return if self.set_level(&caller.sid, params).await {
                    ok(reply::short_result(id, "{}"))
                } else {
                    error(StatusCode::OK, id, code::INVALID_PARAMS, "level must be one of RFC 5424's names")
                };
            }
            "tools/call" => {
                let params = message.params.clone();
                let prepared = beside(size, move || Prepared::of(params.as_ref())).await;
                match self.start_call(caller, id, accepts_stream, prepared) {
                    Ok(exchange) => exchange,
                    Err(full) => return busy(id, full),
                }
            }
            _ if !self.host_offers(method) => {
                return error(StatusCode::OK, id, code::METHOD_NOT_FOUND, "method not found");
            }
            "resources/subscribe" | "resources/unsubscribe" => {
                match self.subscribe(&caller.sid, method, params).await {
                    Err(wrong) => return error(StatusCode::OK, id, code::INVALID_PARAMS, wrong),
                    Ok(false) => return ok(reply::short_result(id, "{}")),
                    Ok(true) => self.start_relay(caller, id, accepts_stream, method, params),
                }
            }
            _ => self.start_relay(caller, id, accepts_stream, method, params),
        };
        // The body's bytes that the host needs live on inside the exchange.
        drop(message);
        self.respond(exchange, head.connection).await
    }

    async fn get(self: Rc<Self>, head: Head) -> Response<Body> {
        if head.session.is_none() || !self.config.streaming {
            return no_stream();
        }
        let caller = match self.session(&head, "null") {
            Ok(caller) => caller,
            Err(refused) => return refused,
        };
        let Some(last) = &head.last_event_id else {
            return stream_response(self.listen(&caller.sid, None));
        };
        match Position::parse(last) {
            Some(position) if Self::is_server_stream(&position) => {
                stream_response(self.listen(&caller.sid, Some(&position)))
            }
            Some(position) => match self.resume(&caller.sid, &position) {
                Some((exchange, reader)) => self.stream_reply(&exchange, reader, head.connection),
                None => unknown_stream(),
            },
            None => unknown_stream(),
        }
    }

    async fn delete(self: Rc<Self>, head: Head) -> Response<Body> {
        if let Some(sid) = &head.session
            && self.sessions.borrow_mut().close(sid)
        {
            let calls = self.ledger.borrow().connected_of_session(sid);
            self.cancel_calls(&calls, Cancel::SessionEnded);
            self.session_gone(sid);
            self.save().await;
        }
        let mut response = Response::new(Body::Empty);
        *response.status_mut() = StatusCode::NO_CONTENT;
        response
    }

    async fn host_llm(self: Rc<Self>, head: Head, body: Bytes) -> Response<Body> {
        match self.switch_host_llm(&head, &body).await {
            host_llm::Answer::Switched(status) => json(StatusCode::OK, Body::from(status)),
            host_llm::Answer::Malformed => {
                plain_error(StatusCode::BAD_REQUEST, "expected a JSON object with a boolean \"enabled\"")
            }
            host_llm::Answer::NotOffered => {
                plain_error(StatusCode::NOT_IMPLEMENTED, "this host cannot switch its model requests off")
            }
            host_llm::Answer::Refused(reason) => plain_error(StatusCode::INTERNAL_SERVER_ERROR, &reason),
        }
    }

    async fn xfer(self: Rc<Self>, request: hyper::Request<hyper::body::Incoming>) -> Response<Body> {
        self.transfer(request).await
    }
}

impl Core {
    /// Contract 1, step 9.
    #[expect(clippy::result_large_err, reason = "the refusal is the response; it is moved once")]
    fn session(&self, head: &Head, id: &str) -> Result<Caller, Response<Body>> {
        let Some(sid) = &head.session else {
            return Err(error(StatusCode::BAD_REQUEST, id, code::REFUSED, "missing mcp-session-id"));
        };
        let caller = match self.sessions.borrow_mut().touch(sid, now_ms()) {
            Some(session) => Caller { sid: session.id.clone(), client_name: session.client_name.clone() },
            None => return Err(error(StatusCode::NOT_FOUND, id, code::REFUSED, "unknown session")),
        };
        match &head.protocol_version {
            Some(version) if !VERSIONS.contains(&version.as_str()) => {
                Err(error(StatusCode::BAD_REQUEST, id, code::REFUSED, "unsupported protocol version"))
            }
            _ => Ok(caller),
        }
    }

    async fn initialize(&self, id: &str, params: Option<&str>) -> Response<Body> {
        let params = params.and_then(RawObject::parse).unwrap_or_default();
        let version = negotiate(params.get("protocolVersion").and_then(string).as_deref());
        let client =
            params.get("clientInfo").and_then(|info| RawObject::parse(info.get())).unwrap_or_default();
        let text = |key| client.get(key).and_then(string).unwrap_or_default();
        let capabilities =
            params.get("capabilities").map(|json| json.get()).filter(|json| json.len() <= 4096);
        let session = Session::new(
            uuid::Uuid::new_v4().to_string(),
            now_ms(),
            version,
            (&text("name"), &text("version")),
            capabilities.unwrap_or_default().to_owned(),
        );
        let sid = session.id.clone();
        let opened = self.sessions.borrow_mut().open(session, |sid| self.hold(sid));
        match opened {
            Err(full) => return busy(id, &full.to_string()),
            Ok(Some(evicted)) => {
                let client = crate::text::clean(&evicted.client_name, 40);
                tracing::info!(%client, "a session made room for a newer one");
                self.session_gone(&evicted.id);
            }
            Ok(None) => {}
        }
        self.save().await;
        let mut response = ok(reply::short_result(id, &self.initialize_result(version)));
        if let Ok(sid) = HeaderValue::try_from(sid) {
            response.headers_mut().insert(SESSION, sid);
        }
        response
    }

    fn initialize_result(&self, version: &str) -> String {
        let title = self
            .hello
            .title
            .as_ref()
            .map(|title| format!(r#","title":{}"#, quote(title)))
            .unwrap_or_default();
        let instructions = self
            .hello
            .instructions
            .as_ref()
            .map(|text| format!(r#","instructions":{}"#, quote(text)))
            .unwrap_or_default();
        format!(
            r#"{{"protocolVersion":"{version}","capabilities":{},"serverInfo":{{"name":"a2mcp"{title},"version":"{VERSION}"}}{instructions}}}"#,
            self.server_capabilities()
        )
    }

    /// What keeps a session from being evicted.
    fn hold(&self, sid: &str) -> Hold {
        match self.ledger.borrow().hold(sid) {
            Hold::Idle if self.is_listening(sid) => Hold::Stream,
            hold => hold,
        }
    }

    /// A session is out of the table: everything that was only for it ends.
    pub(super) fn session_gone(&self, sid: &str) {
        self.session_ended(sid);
        self.settle_wants();
        let exchanges = self.exchanges.borrow();
        let relays = exchanges.values().filter(|exchange| !exchange.is_call && exchange.belongs_to(sid));
        let relays: Vec<String> = relays.map(|exchange| exchange.key.clone()).collect();
        drop(exchanges);
        self.cancel_calls(&relays, Cancel::SessionEnded);
    }

    fn caller_notifies(&self, sid: &str, method: &str, params: Option<&str>) {
        match method {
            "notifications/cancelled" => {
                let params = params.and_then(RawObject::parse).unwrap_or_default();
                let Some(request) = params.get("requestId") else { return };
                let mut keys = self.ledger.borrow().find(sid, request.get());
                let exchanges = self.exchanges.borrow();
                let relays = exchanges.values().filter(|exchange| {
                    let seat = exchange.seat();
                    !exchange.is_call && seat.sid == sid && is_same_id(&seat.rpc_id, request.get())
                });
                keys.extend(relays.map(|exchange| exchange.key.clone()));
                drop(exchanges);
                self.cancel_calls(&keys, Cancel::Caller);
            }
            "notifications/roots/list_changed" => {
                let link = self.link.clone();
                let params = Bytes::from(params.unwrap_or("{}").to_owned());
                self.tasks.spawn_local(async move {
                    let _ = link.notify_raw("notifications/roots/list_changed", params).await;
                });
            }
            _ => {}
        }
    }

    /// The call that a position names, when it is this session's, and a reader from there on.
    fn resume(&self, sid: &str, position: &Position) -> Option<(Rc<Exchange>, Reader)> {
        let exchange = self.exchanges.borrow().get(&position.stream).cloned()?;
        if !exchange.belongs_to(sid) {
            return None;
        }
        self.returned(&exchange.key);
        // Whatever its earlier connection still does tells nothing about this one.
        for calls in self.deliveries.borrow_mut().values_mut() {
            calls.retain(|call| *call != exchange.key);
        }
        let reader = exchange.stream().read(Some(position));
        Some((exchange, reader))
    }
}

fn ok(parts: Vec<Bytes>) -> Response<Body> {
    json(StatusCode::OK, Body::from(parts))
}

pub(super) fn error(status: StatusCode, id: &str, code: i32, message: &str) -> Response<Body> {
    json(status, Body::from(reply::error(id, code, message)))
}

fn invalid(id: &str) -> Response<Body> {
    error(StatusCode::BAD_REQUEST, id, code::INVALID_REQUEST, "invalid request")
}

/// Nothing was done; the same request may be sent again.
fn busy(id: &str, message: &str) -> Response<Body> {
    let mut response = error(StatusCode::SERVICE_UNAVAILABLE, id, code::REFUSED, message);
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("5"));
    response
}

pub(super) fn plain_error(status: StatusCode, message: &str) -> Response<Body> {
    json(status, Body::from(Bytes::from(format!(r#"{{"error":{}}}"#, quote(message)))))
}

fn accepted() -> Response<Body> {
    let mut response = Response::new(Body::Empty);
    *response.status_mut() = StatusCode::ACCEPTED;
    response
}

fn unknown_stream() -> Response<Body> {
    error(StatusCode::BAD_REQUEST, "null", code::REFUSED, "unknown stream")
}

fn no_stream() -> Response<Body> {
    let mut response = Response::new(Body::Empty);
    *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
    response.headers_mut().insert(hyper::header::ALLOW, HeaderValue::from_static("POST, DELETE"));
    response
}

/// A JSON reply.
pub(super) fn json(status: StatusCode, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
