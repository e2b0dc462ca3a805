//! The order of checks (contract 1): what is judged first wins.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::rc::Rc;

use bytes::Bytes;
use futures_util::FutureExt;
use hyper::body::Incoming;
use hyper::header::{
    ACCEPT, ALLOW, AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue, ORIGIN,
};
use hyper::{Method, Request, Response, StatusCode};

use super::body::{self, Body, Budget};
use super::guard::{self, Name};
use super::{ConnectionEvent, Endpoint, Head, Health, Refusal};

/// Answers one request; a panic on the way becomes an internal error. `known` is told when the request
/// has shown the token.
pub(super) async fn handle<E: Endpoint>(
    endpoint: Rc<E>,
    connection: u64,
    budget: Budget,
    known: &impl Fn(),
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    endpoint.connection(connection, ConnectionEvent::NextRequest);
    let passage =
        match only(request.headers(), &HOST).and_then(|host| host.to_str().ok()).and_then(guard::host_name) {
            Some(Name::Other(name)) => endpoint.crosses(&name.to_ascii_lowercase()),
            _ => None,
        };
    let answer =
        AssertUnwindSafe(judge(endpoint.clone(), connection, budget, known, request)).catch_unwind().await;
    let mut answer = answer.unwrap_or_else(|_| endpoint.refuse(Refusal::Internal));
    if let Some(passage) = passage {
        answer = answer.map(|body| Body::Crossing(Box::new(body), passage));
    }
    if endpoint.is_draining() {
        answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(answer)
}

/// What is read and thrown away of the body of a stranger.
const UNREAD: usize = 1 << 20;

/// Where a path leads.
enum Place {
    Live,
    Nonce,
    Ready,
    NoSuchPage,
    Xfer,
    HostLlm,
    Mcp,
}

fn place(path: &str) -> Place {
    match path {
        "/livez" => Place::Live,
        "/readyz" | "/mcp/v1/health" => Place::Ready,
        "/authorize" | "/token" | "/register" => Place::NoSuchPage,
        "/host-llm" => Place::HostLlm,
        "/xfer" => Place::Xfer,
        _ if path.starts_with("/xfer/") => Place::Xfer,
        _ if path == "/.well-known" || path.starts_with("/.well-known/") => Place::NoSuchPage,
        _ if path.starts_with("/livez/") => Place::Nonce,
        _ => Place::Mcp,
    }
}

async fn judge<E: Endpoint>(
    endpoint: Rc<E>,
    connection: u64,
    budget: Budget,
    known: &impl Fn(),
    request: Request<Incoming>,
) -> Response<Body> {
    let method = request.method();
    let place = place(request.uri().path());
    let is_read = method == Method::GET || method == Method::HEAD;
    match place {
        // Anything but 404 on these makes clients drop a working static token and try OAuth.
        Place::NoSuchPage => return json(StatusCode::NOT_FOUND, br#"{"error":"not_found"}"#),
        Place::Live | Place::Ready | Place::Nonce if !is_read => return not_allowed("GET, HEAD"),
        Place::Live => return json(StatusCode::OK, br#"{"status":"ok"}"#),
        Place::Ready => return health(endpoint.health()),
        Place::Nonce => {
            let nonce = request.uri().path().trim_start_matches("/livez/");
            return match endpoint.answers(nonce) {
                Some(answer) => with(StatusCode::OK, Bytes::from(answer)),
                None => json(StatusCode::NOT_FOUND, br#"{"error":"not_found"}"#),
            };
        }
        Place::HostLlm if method != Method::POST => return not_allowed("POST"),
        Place::Mcp if !takes(method, request.headers()) => return not_allowed("POST, GET, DELETE"),
        Place::HostLlm | Place::Mcp | Place::Xfer => {}
    }
    if let Err(refusal) = knock(&*endpoint, &request) {
        body::drain(request.into_body(), UNREAD);
        return endpoint.refuse(refusal);
    }
    known();
    if matches!(place, Place::Xfer) {
        // Boxed: it would be most of every connection's future.
        return Box::pin(endpoint.xfer(request)).await;
    }
    let head = head(request.headers(), connection);
    if request.method() == Method::GET {
        return endpoint.get(head).await;
    }
    if request.method() == Method::DELETE {
        return endpoint.delete(head).await;
    }
    let is_host_llm = matches!(place, Place::HostLlm);
    match body::read(request.into_body(), &budget).await {
        Ok(body) if is_host_llm => endpoint.host_llm(head, body).await,
        Ok(body) => endpoint.post(head, body).await,
        Err(refusal) => endpoint.refuse(refusal),
    }
}

fn takes(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::POST || method == Method::DELETE || (method == Method::GET && accepts_stream(headers))
}

fn accepts_stream(headers: &HeaderMap) -> bool {
    headers.get_all(ACCEPT).iter().any(|value| value.to_str().is_ok_and(guard::names_event_stream))
}

/// `Host`, `Origin`, then the token.
fn knock<E: Endpoint>(endpoint: &E, request: &Request<Incoming>) -> Result<(), Refusal> {
    let headers = request.headers();
    let host = only(headers, &HOST).and_then(|host| host.to_str().ok()).and_then(guard::host_name);
    if request.uri().authority().is_some() {
        return Err(Refusal::BadHost);
    }
    match host {
        None => return Err(Refusal::BadHost),
        Some(Name::Other(name)) if !endpoint.allows_name(&name.to_ascii_lowercase()) => {
            return Err(Refusal::ForbiddenHost);
        }
        Some(_) => {}
    }
    for origin in headers.get_all(ORIGIN) {
        match origin.to_str().ok().and_then(guard::origin_name) {
            Some(Name::Local) => {}
            Some(Name::Other(name)) if endpoint.allows_name(&name.to_ascii_lowercase()) => {}
            _ => return Err(Refusal::ForbiddenOrigin),
        }
    }
    let authorization = only(headers, &AUTHORIZATION).map(|value| value.as_bytes());
    if endpoint.authorizes(authorization) { Ok(()) } else { Err(Refusal::Unauthorized) }
}

/// A header's value when it stands exactly once.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a HeaderValue> {
    let mut values = headers.get_all(name).iter();
    values.next().filter(|_| values.next().is_none())
}

fn head(headers: &HeaderMap, connection: u64) -> Head {
    let text = |name: &'static str| {
        only(headers, &HeaderName::from_static(name)).and_then(|value| value.to_str().ok()).map(str::to_owned)
    };
    Head {
        session: text("mcp-session-id"),
        protocol_version: text("mcp-protocol-version"),
        last_event_id: text("last-event-id"),
        accepts_stream: accepts_stream(headers),
        connection,
    }
}

fn health(health: Health) -> Response<Body> {
    match health {
        Health::Ready => json(StatusCode::OK, br#"{"status":"ok"}"#),
        Health::Unready(reason) => {
            let text = format!(r#"{{"status":"unavailable","reason":"{reason}"}}"#);
            with(StatusCode::SERVICE_UNAVAILABLE, Bytes::from(text))
        }
    }
}

fn not_allowed(methods: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::Empty);
    *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    response
}

fn json(status: StatusCode, text: &'static [u8]) -> Response<Body> {
    with(status, Bytes::from_static(text))
}

fn with(status: StatusCode, text: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}
