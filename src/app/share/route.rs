//! Answers `/xfer/` (contract 6): judges, passes on what may pass, and makes good what the file server
//! does in its own way. Bodies go through piece by piece; nothing here holds one.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::header::{
    ALLOW, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, EXPECT, HeaderMap, HeaderName, HeaderValue, IF_RANGE,
    LAST_MODIFIED, RANGE,
};
use hyper::http::response;
use hyper::{Method, Request, Response, StatusCode};

use super::tools::aside;
use super::{Phase, Share, Transfer};
use crate::app::{Core, endpoint, now_ms};
use crate::http::Body;
use crate::http::body::drain;
use crate::xfer::dufs;
use crate::xfer::path::{RoutePath, escaped, names_a_folder};
use crate::xfer::place::{self, Place, PlaceError};
use crate::xfer::rules::{self, ALLOW_FILE, ALLOW_FOLDER, Wish};
use crate::xfer::upstream::{Reply, Sent, UpstreamError};

/// What is read and thrown away of a body nobody wants.
const UNREAD: usize = 1 << 20;
/// Which parts of WebDAV there are: no locks.
const DAV: HeaderName = HeaderName::from_static("dav");
const DAV_CLASS: HeaderValue = HeaderValue::from_static("1");

impl Core {
    /// A request on the file route.
    pub(in crate::app) async fn transfer(self: Rc<Self>, request: Request<Incoming>) -> Response<Body> {
        let Some(share) = self.current_share() else {
            let (head, body) = request.into_parts();
            dismiss(&head.headers, body);
            return nothing(&self);
        };
        let transfer = Transfer::begin(&self);
        let (head, body) = request.into_parts();
        let (wish, path) = match judge(&share, &head.method, &head.uri) {
            Ok(judged) => judged,
            Err(refused) => {
                dismiss(&head.headers, body);
                return refused;
            }
        };
        if matches!(*share.phase.borrow(), Phase::Down | Phase::Failed(_)) && wish != Wish::Options {
            dismiss(&head.headers, body);
            return share.gone();
        }
        let share = match self.still_there(share, wish).await {
            Ok(share) => share,
            Err(refused) => {
                dismiss(&head.headers, body);
                return refused;
            }
        };
        match wish {
            Wish::Upload => return self.upload(share, path, head.headers, body, transfer).await,
            Wish::Continue => return self.resume_upload(share, path, head.headers, body, transfer).await,
            _ => dismiss(&head.headers, body),
        }
        let query = head.uri.query();
        match wish {
            Wish::Options => options(&share),
            Wish::PartSize => share.part_size(path).await,
            Wish::NewFolder => share.new_folder(&path, transfer).await,
            Wish::Properties if share.terms.is_file => share.file_properties(&path, &head.headers).await,
            _ => share.read(head.method, &path, query, &head.headers, transfer).await,
        }
    }

    /// The share as it serves what is at its path now: its file server may have to start anew for that.
    async fn still_there(&self, share: Rc<Share>, wish: Wish) -> Result<Rc<Share>, Response<Body>> {
        if wish == Wish::Options || !(share.terms.is_file || share.held.get().is_some()) {
            return Ok(share);
        }
        let found = share.inode().await;
        if share.terms.is_file && found.is_none() {
            let text = "the shared file is no longer there: it was removed or replaced by something else";
            return Err(words(StatusCode::NOT_FOUND, text));
        }
        if !share.is_another(found) {
            return Ok(share);
        }
        self.renew_share().await;
        let Some(now) = self.current_share() else { return Err(nothing(self)) };
        let serves = now.terms.id == share.terms.id && *now.phase.borrow() == Phase::Running;
        if serves { Ok(now) } else { Err(share.gone()) }
    }
}

/// What a request wants, and of what.
#[expect(clippy::result_large_err, reason = "the refusal is the response; it is moved once")]
fn judge(share: &Share, method: &Method, uri: &hyper::Uri) -> Result<(Wish, RoutePath), Response<Body>> {
    let path =
        RoutePath::parse(uri.path()).map_err(|bad| words(StatusCode::BAD_REQUEST, &bad.to_string()))?;
    if path.is_hidden() {
        return Err(words(StatusCode::NOT_FOUND, "not found"));
    }
    if share.terms.is_file && matches!(method.as_str(), "PUT" | "PATCH" | "MKCOL") {
        let mut refused = words(
            StatusCode::METHOD_NOT_ALLOWED,
            "this share is one single file: it can be read only; to upload, share a directory",
        );
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static(ALLOW_FILE));
        return Err(refused);
    }
    let wish = rules::judge(method, uri.query()).map_err(|(status, why)| words(status, why))?;
    if wish == Wish::Upload && names_a_folder(uri.path()) {
        return Err(not_for_folders("a path that ends in '/' names a folder: give the file's name, too"));
    }
    Ok((wish, path))
}

impl Share {
    /// Asks the file server; what goes wrong with it is the log's alone.
    pub(super) async fn ask(
        &self,
        method: Method,
        target: &str,
        headers: HeaderMap,
        body: Sent,
    ) -> Result<Response<Reply>, Broken> {
        let upstream = self.upstream.borrow().clone();
        let reply = upstream.ask(method, target, headers, body).await.map_err(|error| self.broken(&error))?;
        if reply.status() == StatusCode::UNAUTHORIZED {
            tracing::warn!(port = self.port.get(), "the file server does not know our credentials");
            return Err(Broken);
        }
        Ok(reply)
    }

    /// Whether its file server answers at all.
    pub(super) async fn answers(&self) -> bool {
        self.ask(Method::GET, dufs::HEALTH, HeaderMap::new(), Sent::Nothing).await.is_ok()
    }

    /// The answer when its file server cannot be asked.
    pub(super) fn gone(&self) -> Response<Body> {
        if self.is_over() {
            return words(StatusCode::NOT_FOUND, "the share has ended; nothing more of it is served");
        }
        let text = match &*self.phase.borrow() {
            Phase::Failed(_) => {
                "the file server of the share died too often and was given up: xfer_status says why, and \
                 xfer_share shares it again"
            }
            _ => "the file server of the share does not answer; try again in a moment",
        };
        words(StatusCode::BAD_GATEWAY, text)
    }

    /// Whether it ended while a request on it was under way.
    pub(super) fn is_over(&self) -> bool {
        self.has_ended.get() || self.terms.is_over(now_ms())
    }

    fn broken(&self, error: &UpstreamError) -> Broken {
        tracing::warn!(port = self.port.get(), "{}", crate::text::with_causes(error));
        Broken
    }

    /// A file, a listing, an archive, properties.
    async fn read(
        self: &Rc<Self>,
        method: Method,
        path: &RoutePath,
        query: Option<&str>,
        headers: &HeaderMap,
        transfer: Transfer,
    ) -> Response<Body> {
        let target = match query {
            Some(query) => format!("{path}?{query}"),
            None => path.to_string(),
        };
        let mut headers = rules::request_headers(headers);
        let mut ranges = headers.get_all(RANGE).iter();
        let range = ranges.next().filter(|_| ranges.next().is_none());
        let range = range.and_then(|range| range.to_str().ok()).map(str::to_owned);
        // A server may answer a range with the whole.
        if !range.as_deref().is_some_and(rules::passes_range) {
            headers.remove(RANGE);
            headers.remove(IF_RANGE);
        }
        let mut reply = match self.ask(method.clone(), &target, headers.clone(), Sent::Nothing).await {
            Ok(reply) => reply,
            Err(Broken) => return self.gone(),
        };
        if reply.status() == StatusCode::RANGE_NOT_SATISFIABLE
            && let Some(range) = range
            && let Some(clamped) = size_of(&reply).and_then(|size| rules::clamp_range(&range, size))
            && let Ok(clamped) = HeaderValue::try_from(clamped)
        {
            headers.insert(RANGE, clamped);
            reply = match self.ask(method.clone(), &target, headers, Sent::Nothing).await {
                Ok(reply) => reply,
                Err(Broken) => return self.gone(),
            };
        }
        if reply.status().is_server_error() {
            return self.unread(path).await;
        }
        // A file, whatever is asked of it, has a length.
        let is_archive = reply.status() == StatusCode::OK
            && rules::asks_for_archive(query)
            && !reply.headers().contains_key(CONTENT_LENGTH);
        if is_archive && method == Method::GET {
            return self.archive(reply, path, transfer).await;
        }
        relay(reply, transfer)
    }

    /// The file server could not read something; it does not say why.
    async fn unread(&self, path: &RoutePath) -> Response<Body> {
        let (root, path) = (self.terms.path.clone(), path.clone());
        match aside(move || place::may_read(&root, &path)).await {
            Ok(()) => words(StatusCode::INTERNAL_SERVER_ERROR, "the file server could not read it"),
            Err(error) => misplaced(&error),
        }
    }

    /// `MKCOL`: one folder, in one that exists.
    async fn new_folder(self: &Rc<Self>, path: &RoutePath, transfer: Transfer) -> Response<Body> {
        let (root, at) = (self.terms.path.clone(), path.clone());
        let place = match aside(move || Place::open(&root, &at, false)).await {
            Ok(place) => Some(place),
            // The shared folder itself: it exists.
            Err(PlaceError::IsAFolder) => None,
            Err(error) => return misplaced(&error),
        };
        let method = Method::from_bytes(b"MKCOL").unwrap_or_default();
        match self.ask(method, &path.to_string(), HeaderMap::new(), Sent::Nothing).await {
            // It does not say why.
            Ok(reply) if reply.status().is_server_error() => {
                match aside(move || place.map_or(Ok(()), |place| place.may_write())).await {
                    Ok(()) => {
                        words(StatusCode::CONFLICT, "the file server could not make a folder of this name")
                    }
                    Err(error) => misplaced(&error),
                }
            }
            Ok(reply) => relay(reply, transfer),
            Err(Broken) => self.gone(),
        }
    }

    /// `PROPFIND` on a share of one file, which the file server answers with the file: a folder with
    /// nothing else in it.
    async fn file_properties(self: &Rc<Self>, path: &RoutePath, headers: &HeaderMap) -> Response<Body> {
        let name = self.terms.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_folder = path.names().is_empty();
        if !is_folder && path.names() != [name] {
            return words(StatusCode::NOT_FOUND, "not found");
        }
        let target = format!("/xfer/{}", escaped(name));
        let reply = match self.ask(Method::HEAD, &target, HeaderMap::new(), Sent::Nothing).await {
            Ok(reply) if reply.status().is_success() => reply,
            Ok(_) => return words(StatusCode::NOT_FOUND, "not found"),
            Err(Broken) => return self.gone(),
        };
        let header =
            |name| reply.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let shown = name.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let response = |href: &str, properties: &str| {
            format!(
                "<D:response><D:href>{href}</D:href><D:propstat><D:prop>{properties}</D:prop>\
                 <D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>"
            )
        };
        let mut list = String::new();
        if is_folder {
            list += &response("/xfer/", "<D:resourcetype><D:collection/></D:resourcetype>");
        }
        if !is_folder || headers.get("depth").is_none_or(|depth| depth != "0") {
            list += &response(
                &target,
                &format!(
                    "<D:displayname>{shown}</D:displayname><D:getcontentlength>{}</D:getcontentlength>\
                     <D:getlastmodified>{}</D:getlastmodified><D:resourcetype/>",
                    header(CONTENT_LENGTH),
                    header(LAST_MODIFIED)
                ),
            );
        }
        let text = format!(
            "<?xml version=\"1.0\" encoding=\"utf-8\"?><D:multistatus xmlns:D=\"DAV:\">{list}</D:multistatus>"
        );
        let mut response = Response::new(Body::from(Bytes::from(text)));
        *response.status_mut() = StatusCode::MULTI_STATUS;
        let xml = HeaderValue::from_static("application/xml; charset=utf-8");
        response.headers_mut().insert(CONTENT_TYPE, xml);
        response
    }
}

/// The file server cannot be asked; the log says why.
#[derive(Debug)]
pub(super) struct Broken;

/// Reads and throws away some of a body nobody wants, so that its sender sees the answer. One that waits
/// to be told to send it is answered without.
pub(super) fn dismiss(headers: &HeaderMap, body: Incoming) {
    if !headers.contains_key(EXPECT) {
        drain(body, UNREAD);
    }
}

/// A refusal in words.
pub(super) fn words(status: StatusCode, text: &str) -> Response<Body> {
    endpoint::plain_error(status, text)
}

/// Nothing is shared, and why if that is not what somebody asked for.
fn nothing(core: &Core) -> Response<Body> {
    match &*core.shares.unservable.borrow() {
        Some((_, reason)) => {
            words(StatusCode::NOT_FOUND, &format!("nothing is shared: the last share had to end: {reason}"))
        }
        None => words(StatusCode::NOT_FOUND, "nothing is shared"),
    }
}

/// Where something cannot go.
pub(super) fn misplaced(error: &PlaceError) -> Response<Body> {
    use std::io::ErrorKind;
    let status = match error {
        PlaceError::Outside => StatusCode::FORBIDDEN,
        PlaceError::NotAFolder | PlaceError::NoFolder => StatusCode::CONFLICT,
        PlaceError::IsAFolder => StatusCode::METHOD_NOT_ALLOWED,
        PlaceError::NotAFile | PlaceError::PartIsAFolder | PlaceError::PartChanged => StatusCode::CONFLICT,
        PlaceError::Exists => StatusCode::PRECONDITION_FAILED,
        PlaceError::Io(error) => match error.kind() {
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => StatusCode::FORBIDDEN,
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => StatusCode::INSUFFICIENT_STORAGE,
            ErrorKind::InvalidFilename => StatusCode::BAD_REQUEST,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        },
    };
    match (error, status) {
        (PlaceError::Io(error), StatusCode::FORBIDDEN) => {
            words(status, &format!("the user that the bridge runs as may not do this here: {error}"))
        }
        (PlaceError::Io(error), _) => words(status, &format!("the file system refuses this: {error}")),
        (error, StatusCode::METHOD_NOT_ALLOWED) => not_for_folders(&error.to_string()),
        (error, _) => words(status, &error.to_string()),
    }
}

fn not_for_folders(text: &str) -> Response<Body> {
    let mut refused = words(StatusCode::METHOD_NOT_ALLOWED, text);
    refused.headers_mut().insert(ALLOW, HeaderValue::from_static(ALLOW_FOLDER));
    refused
}

fn options(share: &Share) -> Response<Body> {
    let mut response = Response::new(Body::Empty);
    let allow = if share.terms.is_file { ALLOW_FILE } else { ALLOW_FOLDER };
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
    response.headers_mut().insert(DAV, DAV_CLASS);
    response
}

/// The size of the file that a reply of 416 is about.
fn size_of(reply: &Response<Reply>) -> Option<u64> {
    let range = reply.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes */")?.parse().ok()
}

/// A reply of the file server as the caller's.
fn relay(reply: Response<Reply>, transfer: Transfer) -> Response<Body> {
    let (head, body) = reply.into_parts();
    relayed(&head, Relayed { body, transfer })
}

/// The head of a reply of the file server as the caller's, with a body made of its.
pub(super) fn relayed(
    head: &response::Parts,
    body: impl HttpBody<Data = Bytes, Error = std::io::Error> + 'static,
) -> Response<Body> {
    let mut response = Response::new(Body::Relayed(Box::pin(body)));
    *response.status_mut() = head.status;
    *response.headers_mut() = rules::reply_headers(&head.headers);
    response
}

struct Relayed {
    body: Reply,
    transfer: Transfer,
}

impl HttpBody for Relayed {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<std::io::Result<Frame<Bytes>>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        self.transfer.allow(frame, cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
