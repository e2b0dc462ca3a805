//! One MCP session over Streamable HTTP, as small as a command line needs it: one request at a time,
//! JSON and event-stream answers, resumption, one new session when the server forgot ours.
//!
//! Every request has a connection of its own. Nothing here waits for ever except for the answer;
//! deadlines are the caller's.

use std::borrow::Cow;
use std::fmt;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde::de::{Deserialize, Deserializer, Visitor};
use serde_json::json;
use serde_json::value::RawValue;
use tokio::net::TcpStream;

use super::sse::Events;
use crate::config::Token;
use crate::text;

/// The newest protocol version this client knows.
const PROTOCOL: &str = "2025-11-25";
/// A larger JSON answer is refused; no frame of ours is.
const ANSWER_BYTES: usize = 256 * 1024 * 1024;
/// How much of an error body is looked at.
const REFUSAL_BYTES: usize = 64 * 1024;
/// How often a broken stream is resumed without a single event in between.
const RESUMES: u32 = 20;
/// For so long nobody may listen before a broken stream is given up. Whoever restarts a sidecar holds
/// its port meanwhile, or has it again sooner.
const REFUSED: Duration = Duration::from_secs(4);
/// How often that is tried, if the bridge asked for longer pauses.
const REFUSED_RETRY: Duration = Duration::from_secs(1);
/// What to do when the outcome of a call is not known.
const AGAIN: &str =
    "run the same command again soon: a call that still runs, or has just ended, is not run twice";

static SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
static VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");
static LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Why there is no result. [`super::exit_code`] maps it.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The command was used wrongly.
    #[error("{0}")]
    Usage(String),
    /// No connection, no MCP behind it, or the connection was lost.
    #[error("{0}")]
    Unreachable(String),
    /// 401.
    #[error(
        "unauthorized: the token is wrong, or was rotated; `a2mcp token` on the bridge's machine prints it"
    )]
    Unauthorized,
    /// 401 for the rest of an answer.
    #[error(
        "unauthorized: the token was replaced after the call had been sent, and the call may have been cancelled; \
         `a2mcp token` on the bridge's machine prints the new one"
    )]
    TokenReplaced,
    /// The person who waited stopped waiting.
    #[error("interrupted{}", if *is_cancelled { "; the call was cancelled" } else { "" })]
    Interrupted {
        /// The bridge took the cancellation of the request.
        is_cancelled: bool,
    },
    /// The deadline passed.
    #[error("time-out after {} s; a call may still be running: {AGAIN}", .0.as_secs_f32())]
    TimedOut(Duration),
    /// The bridge answered with an error.
    #[error("{message} ({code})")]
    Refused {
        /// JSON-RPC code or HTTP status.
        code: i64,
        /// In its words.
        message: String,
        /// The JSON-RPC error as it came, if one did.
        error: Option<Box<RawValue>>,
    },
}

/// Where a bridge is and what opens it.
pub struct Endpoint {
    host: String,
    port: u16,
    authority: HeaderValue,
    path: Uri,
    authorization: HeaderValue,
}

impl Endpoint {
    /// `url` is `http://HOST:PORT/PATH`.
    pub fn new(url: &str, token: &Token) -> Result<Endpoint, Failure> {
        let usage = |text: String| Failure::Usage(text);
        let uri: Uri = url.parse().map_err(|_| usage(format!("not a URL: {url}")))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(usage(
                    "this client speaks plain http only; for an https URL use the script of `a2mcp connect python`, \
                     or curl (`a2mcp connect curl`)"
                        .into(),
                ));
            }
            _ => return Err(usage(format!("the URL must begin with http://: {url}"))),
        }
        let authority = uri.authority().ok_or_else(|| usage(format!("the URL names no host: {url}")))?;
        if authority.as_str().contains('@') {
            return Err(usage(
                "the URL must not hold a user name or password; the token has its own option".into(),
            ));
        }
        let mut authorization = HeaderValue::from_str(&format!("Bearer {}", token.expose()))
            .map_err(|_| usage("the token holds characters that cannot be sent in a header".into()))?;
        authorization.set_sensitive(true);
        let host = authority.host();
        Ok(Endpoint {
            host: host.trim_start_matches('[').trim_end_matches(']').to_owned(),
            port: authority.port_u16().unwrap_or(80),
            authority: HeaderValue::from_str(authority.as_str())
                .map_err(|_| usage(format!("not a URL: {url}")))?,
            path: uri.path_and_query().map_or("/", |path| path.as_str()).parse().unwrap_or_default(),
            authorization,
        })
    }

    /// As people write it.
    fn address(&self) -> String {
        text::clean(&String::from_utf8_lossy(self.authority.as_bytes()), 120).into_owned()
    }

    fn unreachable(&self, error: &std::io::Error) -> Failure {
        Failure::Unreachable(format!("cannot reach {}: {error}; is the host running?", self.address()))
    }

    /// As [`Endpoint::unreachable`], when a call had been sent.
    fn gone(&self, error: &std::io::Error) -> Failure {
        Failure::Unreachable(format!(
            "the connection was lost, and nobody listens at {} any more ({error}): the host, it seems, has ended; \
             what became of the call is not known here, `a2mcp audit` on the bridge's machine may say it",
            self.address()
        ))
    }
}

/// A session; [`Session::close`] it when it is no longer needed.
pub(super) struct Session<'a> {
    endpoint: &'a Endpoint,
    id: Option<HeaderValue>,
    version: Option<HeaderValue>,
    next_id: u64,
    /// The request whose answer is waited for, if it can be cancelled.
    pending: Option<u64>,
    /// Shows what the server says while a call runs.
    notify: fn(&str),
}

/// What may go wrong inside; a lost session is begun again once.
enum Trouble {
    SessionLost,
    /// Nobody listens.
    Closed(std::io::Error),
    Failed(Failure),
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Trouble {
        Trouble::Failed(failure)
    }
}

impl<'a> Session<'a> {
    /// Connects with the first request.
    pub(super) fn new(endpoint: &'a Endpoint, notify: fn(&str)) -> Session<'a> {
        Session { endpoint, id: None, version: None, next_id: 0, pending: None, notify }
    }

    /// Sends one request and waits for its result.
    pub(super) async fn request(
        &mut self,
        method: &str,
        params: &RawValue,
    ) -> Result<Box<RawValue>, Failure> {
        for _ in 0..2 {
            if self.id.is_none() {
                self.initialize().await?;
            }
            match self.exchange(method, params).await {
                Ok(result) => return Ok(result),
                Err(Trouble::Failed(failure)) => return Err(failure),
                Err(Trouble::Closed(error)) => return Err(self.endpoint.unreachable(&error)),
                Err(Trouble::SessionLost) => (self.id, self.version) = (None, None),
            }
        }
        Err(Failure::Unreachable("the bridge forgets its sessions at once".into()))
    }

    /// Withdraws the request whose waiting was dropped; whether the server took that.
    pub(super) async fn cancel(&self) -> bool {
        let Some(id) = self.pending else { return false };
        let cancelled = json!({
            "jsonrpc": "2.0",
            "method": "notifications/cancelled",
            "params": {"requestId": id, "reason": "interrupted"},
        });
        self.post(cancelled.to_string().into()).await.is_ok()
    }

    /// Tells the server that the session is over. Failing to is no failure.
    pub(super) async fn close(self) {
        if self.id.is_some() {
            let _ = self.send(Method::DELETE, None, &[]).await;
        }
    }

    async fn initialize(&mut self) -> Result<(), Failure> {
        let params = raw(&json!({
            "protocolVersion": PROTOCOL,
            "capabilities": {},
            "clientInfo": {"name": "a2mcp", "version": env!("CARGO_PKG_VERSION")},
        }));
        let result = match self.exchange("initialize", &params).await {
            Ok(result) => result,
            Err(Trouble::Failed(failure)) => return Err(failure),
            Err(Trouble::Closed(error)) => return Err(self.endpoint.unreachable(&error)),
            Err(Trouble::SessionLost) => {
                return Err(Failure::Unreachable("no MCP endpoint at this URL".into()));
            }
        };
        #[derive(serde::Deserialize)]
        struct Initialized {
            #[serde(rename = "protocolVersion")]
            version: String,
        }
        let version = serde_json::from_str::<Initialized>(result.get()).ok();
        self.version = version.and_then(|version| HeaderValue::from_str(&version.version).ok());
        let initialized = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
        match self.post(initialized.into()).await {
            Ok(_) => Ok(()),
            Err(Trouble::Failed(failure)) => Err(failure),
            Err(Trouble::Closed(error)) => Err(self.endpoint.unreachable(&error)),
            Err(Trouble::SessionLost) => {
                Err(Failure::Unreachable("the bridge forgot the session at once".into()))
            }
        }
    }

    async fn exchange(&mut self, method: &str, params: &RawValue) -> Result<Box<RawValue>, Trouble> {
        self.next_id += 1;
        let id = self.next_id;
        // Built as text: the arguments must arrive byte for byte.
        let method_json = json!(method);
        let body =
            format!(r#"{{"jsonrpc":"2.0","id":{id},"method":{method_json},"params":{}}}"#, params.get());
        // The specification has `initialize` never cancelled.
        self.pending = (method != "initialize").then_some(id);
        let response = self.post(body.into()).await?;
        if method == "initialize" {
            self.id = response.headers().get(&SESSION_ID).cloned();
        }
        self.answer(response, id).await
    }

    /// The answer to request `id`, from one JSON body or from an event stream and its resumptions.
    async fn answer(&mut self, mut response: Response<Incoming>, id: u64) -> Result<Box<RawValue>, Trouble> {
        let (mut last_id, mut retry, mut fruitless) = (None, Duration::from_secs(1), 0);
        loop {
            match content_type(&response).as_str() {
                "application/json" => {
                    let body = Limited::new(response.into_body(), ANSWER_BYTES).collect().await;
                    let body = body.map_err(|error| lost(&error.to_string()))?.to_bytes();
                    return result_of(&String::from_utf8_lossy(&body), id)
                        .unwrap_or_else(|| {
                            Err(Failure::Unreachable("the answer belongs to no request".into()))
                        })
                        .map_err(Trouble::Failed);
                }
                "text/event-stream" => {}
                other => {
                    let other = text::clean(other, 60);
                    return Err(
                        Failure::Unreachable(format!("no MCP endpoint: it answers with `{other}`")).into()
                    );
                }
            }
            let mut events = Events::default();
            let mut body = response.into_body();
            while let Some(Ok(frame)) = body.frame().await {
                let Some(bytes) = frame.data_ref() else { continue };
                let mut found = None;
                let notify = self.notify;
                let pushed = events.push(bytes, |event| {
                    fruitless = 0;
                    if let Some(id) = event.id {
                        last_id = Some(id);
                    }
                    if let Some(ms) = event.retry_ms {
                        retry = Duration::from_millis(ms.min(30_000));
                    }
                    if !event.data.is_empty() && found.is_none() {
                        found = result_of(&event.data, id);
                        if found.is_none() {
                            note_of(&event.data, notify);
                        }
                    }
                });
                pushed.map_err(|_| Failure::Unreachable("the bridge sends an event without end".into()))?;
                if let Some(result) = found {
                    return result.map_err(Trouble::Failed);
                }
            }
            let Some(last) = &last_id else { return Err(lost("the stream ended").into()) };
            let mut refused_since = None;
            response = loop {
                fruitless += 1;
                if fruitless > RESUMES {
                    return Err(lost("the stream cannot be resumed").into());
                }
                let pause = if refused_since.is_some() { retry.min(REFUSED_RETRY) } else { retry };
                tokio::time::sleep(pause).await;
                match self.resume(last).await {
                    Ok(response) => break response,
                    Err(Trouble::Closed(error)) => {
                        // That costs nothing: only its time is limited.
                        fruitless -= 1;
                        let since = *refused_since.get_or_insert_with(Instant::now);
                        if since.elapsed() >= REFUSED {
                            return Err(self.endpoint.gone(&error).into());
                        }
                        continue;
                    }
                    Err(Trouble::Failed(Failure::Unreachable(_))) => {}
                    Err(Trouble::SessionLost) => return Err(lost("the session ended during the call").into()),
                    Err(Trouble::Failed(Failure::Refused { message, .. })) => {
                        return Err(lost(&message).into());
                    }
                    Err(Trouble::Failed(Failure::Unauthorized)) => return Err(Failure::TokenReplaced.into()),
                    Err(failed) => return Err(failed),
                }
                refused_since = None;
            };
        }
    }

    async fn post(&self, body: Bytes) -> Result<Response<Incoming>, Trouble> {
        let headers = [
            (CONTENT_TYPE, HeaderValue::from_static("application/json")),
            (ACCEPT, HeaderValue::from_static("application/json, text/event-stream")),
        ];
        self.send(Method::POST, Some(body), &headers).await
    }

    async fn resume(&self, last_id: &str) -> Result<Response<Incoming>, Trouble> {
        let last_id = HeaderValue::from_str(last_id).map_err(|_| lost("the stream cannot be resumed"))?;
        let headers =
            [(ACCEPT, HeaderValue::from_static("text/event-stream")), (LAST_EVENT_ID.clone(), last_id)];
        self.send(Method::GET, None, &headers).await
    }

    /// Sends one HTTP request on a new connection; anything but a 2xx becomes trouble.
    async fn send(
        &self,
        method: Method,
        body: Option<Bytes>,
        headers: &[(HeaderName, HeaderValue)],
    ) -> Result<Response<Incoming>, Trouble> {
        let Endpoint { host, port, authority, path, authorization } = self.endpoint;
        let stream =
            TcpStream::connect((host.as_str(), *port)).await.map_err(|error| match error.kind() {
                std::io::ErrorKind::ConnectionRefused => Trouble::Closed(error),
                _ => self.endpoint.unreachable(&error).into(),
            })?;
        let _ = stream.set_nodelay(true);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| lost(&error.to_string()))?;
        // Ends by itself when the response's body is read or dropped.
        tokio::spawn(connection);

        let mut request = Request::new(Full::new(body.unwrap_or_default()));
        *request.method_mut() = method;
        *request.uri_mut() = path.clone();
        let map = request.headers_mut();
        map.insert(HOST, authority.clone());
        map.insert(AUTHORIZATION, authorization.clone());
        if let Some(id) = &self.id {
            map.insert(SESSION_ID.clone(), id.clone());
        }
        if let Some(version) = &self.version {
            map.insert(VERSION.clone(), version.clone());
        }
        map.extend(headers.iter().cloned());
        let response = sender.send_request(request).await.map_err(|error| lost(&error.to_string()))?;
        if response.status().is_success() { Ok(response) } else { Err(self.refusal(response).await) }
    }

    async fn refusal(&self, response: Response<Incoming>) -> Trouble {
        let status = response.status();
        if status == StatusCode::UNAUTHORIZED {
            return Failure::Unauthorized.into();
        }
        let body = match response.body().size_hint().lower() {
            0..=0xffff => Limited::new(response.into_body(), REFUSAL_BYTES).collect().await.ok(),
            _ => None,
        };
        let body = body.map(|body| body.to_bytes()).unwrap_or_default();
        let error = serde_json::from_slice::<Message>(&body).ok().and_then(|message| message.error);
        let said = error.and_then(|error| serde_json::from_str::<RpcError>(error.get()).ok());
        let message = said.map_or_else(
            || status.canonical_reason().unwrap_or("unknown status").to_owned(),
            |error| error.message.0,
        );
        let code = i64::from(status.as_u16());
        match status {
            StatusCode::NOT_FOUND if self.id.is_some() => Trouble::SessionLost,
            StatusCode::BAD_REQUEST | StatusCode::PAYLOAD_TOO_LARGE => {
                Failure::Refused { code, message, error: error.map(ToOwned::to_owned) }.into()
            }
            _ => Failure::Unreachable(format!("HTTP {code}: {}", text::clean(&message, 300))).into(),
        }
    }
}

/// A JSON-RPC message as far as it matters here.
#[derive(serde::Deserialize)]
struct Message<'a> {
    #[serde(borrow, default)]
    id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    method: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    params: Option<&'a RawValue>,
    #[serde(borrow, default)]
    result: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(serde::Deserialize)]
struct RpcError {
    code: i64,
    message: Lossy,
}

/// The outcome in `text` if it answers request `id`.
fn result_of(text: &str, id: u64) -> Option<Result<Box<RawValue>, Failure>> {
    let no_rpc = || Some(Err(Failure::Unreachable("no MCP endpoint: the answer is not JSON-RPC".into())));
    let Ok(message) = serde_json::from_str::<Message<'_>>(text) else { return no_rpc() };
    if message.method.is_some() {
        return None;
    }
    if let Some(error) = message.error {
        let Ok(RpcError { code, message: Lossy(text) }) = serde_json::from_str(error.get()) else {
            return no_rpc();
        };
        return Some(Err(Failure::Refused { code, message: text, error: Some(error.to_owned()) }));
    }
    let ours = message.id.is_some_and(|found| found.get() == id.to_string());
    ours.then(|| Ok(message.result.map_or_else(|| raw(&json!(null)), ToOwned::to_owned)))
}

/// Passes on a log message; its data is a string, mostly.
fn note_of(text: &str, notify: fn(&str)) {
    #[derive(serde::Deserialize)]
    struct Log<'a> {
        #[serde(borrow)]
        data: &'a RawValue,
    }
    let Ok(Message { method: Some(method), params: Some(params), .. }) = serde_json::from_str(text) else {
        return;
    };
    if method == "notifications/message"
        && let Ok(Log { data }) = serde_json::from_str(params.get())
    {
        match serde_json::from_str::<Lossy>(data.get()) {
            Ok(Lossy(text)) => notify(&text),
            Err(_) => notify(data.get()),
        }
    }
}

/// A JSON string; lone surrogates become replacement characters instead of an error.
#[derive(Default)]
pub(super) struct Lossy(pub(super) String);

impl<'de> Deserialize<'de> for Lossy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Lossy, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Lossy;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Lossy, E> {
                Ok(Lossy(String::from_utf8_lossy(bytes).into_owned()))
            }
        }
        // serde_json gives a string's bytes here, surrogates in their three-byte form.
        deserializer.deserialize_bytes(Bytes)
    }
}

/// A value as raw text; serializing a `Value` cannot fail.
fn raw(value: &serde_json::Value) -> Box<RawValue> {
    RawValue::from_string(value.to_string()).unwrap_or_else(|_| RawValue::NULL.to_owned())
}

fn lost(reason: &str) -> Failure {
    Failure::Unreachable(format!("the connection was lost ({}); {AGAIN}", text::clean(reason, 200)))
}

fn content_type(response: &Response<Incoming>) -> String {
    let value = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    value.split(';').next().unwrap_or("").trim().to_ascii_lowercase()
}
