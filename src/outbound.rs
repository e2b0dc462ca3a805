//! Requests to servers elsewhere: one GET over a connection of its own, HTTP/1.1, TLS where the URL
//! says `https`, through the proxy the environment names.
//!
//! It follows no redirect and keeps no time: both are the caller's policy. TLS trusts the roots of
//! the system, read at the first use and kept. Error texts name hosts, never a URL's query or a
//! proxy's password.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use bytes::Bytes;
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, ACCEPT_ENCODING, HOST, HeaderValue, USER_AGENT};
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::task::AbortOnDropHandle;

use crate::config::Proxy;
use crate::text::clean;

/// How long one address of a name is tried before the next one.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// A longer head is refused.
const MAX_HEAD: usize = 64 * 1024;

/// An `http` or `https` URL, without user name and fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    is_tls: bool,
    host: String,
    port: u16,
    /// Begins with a slash.
    path: String,
}

impl Url {
    /// Reads an absolute URL.
    ///
    /// # Errors
    /// What is wrong with it, without showing it.
    pub fn parse(text: &str) -> Result<Url, &'static str> {
        let text = text.split('#').next().unwrap_or_default();
        let uri: Uri = text.parse().map_err(|_| "it is no URL")?;
        let is_tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err("it does not begin with http:// or https://"),
        };
        let authority = uri.authority().ok_or("it names no host")?;
        if authority.as_str().contains('@') {
            return Err("it holds a user name");
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err("it names no host");
        }
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        let slash = if path.starts_with('/') { "" } else { "/" };
        Ok(Url {
            is_tls,
            host: host.to_owned(),
            port: authority.port_u16().unwrap_or(if is_tls { 443 } else { 80 }),
            path: format!("{slash}{path}"),
        })
    }

    /// What a `Location` header on this URL's answer means.
    ///
    /// # Errors
    /// As [`Url::parse`].
    pub fn join(&self, location: &str) -> Result<Url, &'static str> {
        if location.contains("://") && !location.starts_with('/') {
            return Url::parse(location);
        }
        let scheme = if self.is_tls { "https" } else { "http" };
        if location.starts_with("//") {
            return Url::parse(&format!("{scheme}:{location}"));
        }
        let base = self.path.split('?').next().unwrap_or("/");
        let folder = base.rsplit_once('/').map_or("", |(folder, _)| folder);
        let path =
            if location.starts_with('/') { location.to_owned() } else { format!("{folder}/{location}") };
        Url::parse(&format!("{scheme}://{}{path}", self.authority()))
    }

    /// The same place with something added to its path; a query is dropped.
    pub fn below(&self, path: &str) -> Url {
        let base = self.path.split('?').next().unwrap_or("/").trim_end_matches('/');
        Url { path: format!("{base}/{path}"), ..self.clone() }
    }

    /// Whether it is spoken to over TLS.
    pub fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// Whether it has a query.
    pub fn has_query(&self) -> bool {
        self.path.contains('?')
    }

    fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        let usual = if self.is_tls { 443 } else { 80 };
        if self.port == usual { host } else { format!("{host}:{}", self.port) }
    }
}

/// As it may be shown: without its query, which may be a signature.
impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "https" } else { "http" };
        let path = self.path.split('?').next().unwrap_or("/");
        write!(f, "{scheme}://{}{}", clean(&self.authority(), 260), clean(path, 400))
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum OutboundError {
    /// The host, or the proxy before it, cannot be reached.
    #[error("no connection to {host}: {why}")]
    Unreachable {
        /// Host and port.
        host: String,
        /// Why.
        why: String,
    },
    /// The other end does not prove who it is.
    #[error("no secure connection to {host}: {why}")]
    Insecure {
        /// Host and port.
        host: String,
        /// Why.
        why: String,
    },
    /// What came back is no HTTP, or nothing came.
    #[error("no answer from {host}: {why}")]
    NoAnswer {
        /// Host and port.
        host: String,
        /// Why.
        why: String,
    },
}

/// An answer whose body still comes.
pub struct Answer {
    /// Head and body.
    pub response: Response<Incoming>,
    _connection: AbortOnDropHandle<()>,
}

/// Sends requests.
#[derive(Default)]
pub struct Outbound {
    proxy: Proxy,
    tls: OnceCell<Arc<ClientConfig>>,
}

impl Outbound {
    /// Through these proxies, if any.
    pub fn new(proxy: Proxy) -> Outbound {
        Outbound { proxy, tls: OnceCell::new() }
    }

    /// Asks for `url`. Ends when the head of the answer is there, or never: bound it.
    ///
    /// # Errors
    /// [`OutboundError`].
    pub async fn get(&self, url: &Url) -> Result<Answer, OutboundError> {
        let socket = self.reach(url).await?;
        if url.is_tls {
            return ask(url, self.secure(url, socket).await?, url.authority()).await;
        }
        ask(url, socket, url.authority()).await
    }

    /// Whether the host can be reached and proves who it is; nothing is asked. Bound it.
    ///
    /// # Errors
    /// [`OutboundError`].
    pub async fn greet(&self, url: &Url) -> Result<(), OutboundError> {
        let socket = self.reach(url).await?;
        if url.is_tls {
            self.secure(url, socket).await?;
        }
        Ok(())
    }

    async fn secure(&self, url: &Url, socket: TcpStream) -> Result<TlsStream<TcpStream>, OutboundError> {
        let host = url.authority();
        let config = self.tls.get_or_try_init(roots).await.map_err(|why| insecure(&host, why))?;
        let name = ServerName::try_from(url.host.clone())
            .map_err(|_| insecure(&host, "that is no name a certificate could be for".into()))?;
        let connecting = TlsConnector::from(Arc::clone(config)).connect(name, socket).await;
        connecting.map_err(|error| {
            let is_tls = error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>());
            match is_tls {
                true => insecure(&host, clean(&error.to_string(), 200).into_owned()),
                false => unreachable(&host, &error),
            }
        })
    }

    /// A connection to the host, or through the proxy to it.
    async fn reach(&self, url: &Url) -> Result<TcpStream, OutboundError> {
        let host = url.authority();
        // Plain http is for a mirror nearby; only TLS may go through somebody else's machine.
        let proxy = if url.is_tls { self.proxy.for_host(&url.host) } else { None };
        let Some(proxy) = proxy else {
            return connect(&url.host, url.port).await.map_err(|error| unreachable(&host, &error));
        };
        let through = |why: &str| OutboundError::Unreachable {
            host: host.clone(),
            why: format!("{why} (HTTPS_PROXY)"),
        };
        let (proxy_host, proxy_port, credentials) = proxy.map_err(through)?;
        let mut socket = connect(&proxy_host, proxy_port).await.map_err(|error| {
            through(&format!("the proxy {}:{proxy_port} cannot be reached: {error}", clean(&proxy_host, 200)))
        })?;
        tunnel(&mut socket, url, credentials.as_deref()).await.map_err(|error| {
            through(&format!(
                "the proxy {}:{proxy_port} does not let us through: {error}",
                clean(&proxy_host, 200)
            ))
        })?;
        Ok(socket)
    }
}

/// Asks a proxy for a connection to the host of `url`.
async fn tunnel(socket: &mut TcpStream, url: &Url, credentials: Option<&str>) -> io::Result<()> {
    let host = if url.host.contains(':') { format!("[{}]", url.host) } else { url.host.clone() };
    let to = format!("{host}:{}", url.port);
    let mut head = format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n");
    if let Some(credentials) = credentials {
        let encoded = base64::engine::general_purpose::STANDARD.encode(credentials);
        head.push_str(&format!("Proxy-Authorization: Basic {encoded}\r\n"));
    }
    head.push_str("\r\n");
    socket.write_all(head.as_bytes()).await?;
    // Byte by byte, so that nothing of what the host says itself is taken; it is a short head.
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        if answer.len() >= 8192 {
            return Err(io::Error::other("its answer does not end"));
        }
        answer.push(socket.read_u8().await?);
    }
    let line = String::from_utf8_lossy(&answer);
    let line = line.lines().next().unwrap_or_default();
    match line.split(' ').nth(1) {
        Some(code) if code.len() == 3 && code.starts_with('2') => Ok(()),
        _ => Err(io::Error::other(clean(line, 100).into_owned())),
    }
}

async fn ask(
    url: &Url,
    socket: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    host: String,
) -> Result<Answer, OutboundError> {
    let no_answer = |error: hyper::Error| OutboundError::NoAnswer {
        host: host.clone(),
        why: crate::text::with_causes(&error),
    };
    let mut builder = http1::Builder::new();
    builder.max_buf_size(MAX_HEAD);
    let (mut sender, connection) = builder.handshake(TokioIo::new(socket)).await.map_err(no_answer)?;
    let connection = AbortOnDropHandle::new(tokio::spawn(async move {
        let _ = connection.await;
    }));
    let mut request = Request::new(Empty::<Bytes>::new());
    *request.method_mut() = Method::GET;
    *request.uri_mut() = url.path.parse().unwrap_or_default();
    let headers = request.headers_mut();
    if let Ok(host) = HeaderValue::from_str(&host) {
        headers.insert(HOST, host);
    }
    headers.insert(USER_AGENT, HeaderValue::from_static(concat!("a2mcp/", env!("CARGO_PKG_VERSION"))));
    headers.insert(ACCEPT, HeaderValue::from_static("*/*"));
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    let response = sender.send_request(request).await.map_err(no_answer)?;
    Ok(Answer { response, _connection: connection })
}

async fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in tokio::net::lookup_host((host, port)).await? {
        match tokio::time::timeout(CONNECT_LIMIT, TcpStream::connect(address)).await {
            Ok(Ok(socket)) => return Ok(socket),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}

/// TLS with the system's roots. Reading them takes a moment.
async fn roots() -> Result<Arc<ClientConfig>, String> {
    let config = tokio::task::spawn_blocking(|| {
        let found = rustls_native_certs::load_native_certs();
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(found.certs);
        if roots.is_empty() {
            return Err(
                "this system has no root certificates; install its package ca-certificates".to_owned()
            );
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(|error| error.to_string())?;
        Ok(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
    });
    config.await.map_err(|error| error.to_string())?
}

fn insecure(host: &str, why: String) -> OutboundError {
    OutboundError::Insecure { host: clean(host, 260).into_owned(), why }
}

fn unreachable(host: &str, error: &io::Error) -> OutboundError {
    OutboundError::Unreachable {
        host: clean(host, 260).into_owned(),
        why: clean(&error.to_string(), 200).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn urls_are_read_and_shown_without_their_query() {
        assert_eq!(url("https://h/a?sig=secret#x").to_string(), "https://h/a");
        assert_eq!(url("http://h:80").to_string(), "http://h/");
        assert_eq!(url("https://[::1]:8443/a").to_string(), "https://[::1]:8443/a");
        for bad in ["", "h/a", "ftp://h/", "https://u:p@h/", "https:///a", "//h/a", "http://h o/"] {
            assert!(Url::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn locations_are_joined_as_a_browser_does() {
        let at = url("https://h:1/a/b?q");
        for (location, expected) in [
            ("https://other/x?y", "https://other/x?y"),
            ("//other/x", "https://other/x"),
            ("/x", "https://h:1/x"),
            ("x", "https://h:1/a/x"),
            ("/x?u=http://y", "https://h:1/x?u=http://y"),
        ] {
            assert_eq!(at.join(location).unwrap(), url(expected), "{location}");
        }
        assert!(at.join("https://u:p@other/x").is_err());
        assert_eq!(url("https://h/base/").below("a/b"), url("https://h/base/a/b"));
    }
}
