//! Uploads (contract 6): into a file of a hidden name beside the final one, then moved over it in one
//! step. What is cut is kept under the hidden name until the share ends, and can be continued.
//!
//! An upload is a task of its own: when its caller vanishes, the file server still writes what came,
//! and only then may somebody go on with the rest.

use std::rc::Rc;
use std::time::Duration;

use hyper::body::{Body as _, Incoming};
use hyper::header::{CONTENT_LENGTH, CONTENT_RANGE, HeaderMap, HeaderName, HeaderValue, IF_NONE_MATCH};
use hyper::{Method, Response, StatusCode};
use tokio::sync::oneshot;

use super::route::{Broken, dismiss, misplaced, words};
use super::tools::aside;
use super::{Share, Transfer};
use crate::app::Core;
use crate::http::Body;
use crate::xfer::path::RoutePath;
use crate::xfer::place::{Place, PlaceError};
use crate::xfer::rules::{UPDATE_RANGE, UPLOAD_LENGTH};
use crate::xfer::upstream::{Sent, Upload, UploadEnd};

/// A caller that sends nothing for so long is gone; what it sent is kept.
const PATIENCE: Duration = Duration::from_secs(60);
/// Most cut uploads that are kept; of further ones nothing is.
const MAX_PARTS: usize = 1024;

/// A name is being uploaded, as long as this lives.
struct Uploading {
    core: Rc<Core>,
    share: Rc<Share>,
    path: RoutePath,
}

impl Uploading {
    fn begin(core: &Rc<Core>, share: &Rc<Share>, path: &RoutePath) -> Option<Self> {
        let is_first = share.uploading.borrow_mut().insert(path.clone());
        is_first.then(|| Self { core: core.clone(), share: share.clone(), path: path.clone() })
    }
}

impl Drop for Uploading {
    fn drop(&mut self) {
        self.share.uploading.borrow_mut().remove(&self.path);
        self.core.call_ended.notify_waiters();
    }
}

/// How much a request is to bring.
#[derive(Clone, Copy)]
enum Extent {
    /// A whole file.
    All,
    /// The rest of one of `total` bytes, of which `from` are here.
    Rest { from: u64, total: u64 },
}

impl Core {
    /// `PUT`.
    pub(super) async fn upload(
        self: &Rc<Self>,
        share: Rc<Share>,
        path: RoutePath,
        headers: HeaderMap,
        body: Incoming,
        transfer: Transfer,
    ) -> Response<Body> {
        let refuse = |body: Incoming, refused: Response<Body>| {
            dismiss(&headers, body);
            refused
        };
        if headers.contains_key(CONTENT_RANGE) {
            let text = "PUT replaces a whole file; to continue a cut upload use PATCH with ?part";
            return refuse(body, words(StatusCode::BAD_REQUEST, text));
        }
        let Some(uploading) = Uploading::begin(self, &share, &path) else { return refuse(body, busy()) };
        let only_new = headers.get(IF_NONE_MATCH).is_some_and(|tag| tag.as_bytes() == b"*");
        let (root, at, part) = (share.terms.path.clone(), path.clone(), path.part(&share.terms.id));
        let begun = aside(move || {
            let place = Place::open(&root, &at, true)?;
            if only_new && place.look(&root)?.is_some() {
                return Ok(false);
            }
            place.begin(&root, part.split().map(|(_, name)| name).unwrap_or_default())?;
            Ok::<_, PlaceError>(true)
        });
        match begun.await {
            Err(error) => return refuse(body, misplaced(&error)),
            Ok(false) => {
                return refuse(body, words(StatusCode::PRECONDITION_FAILED, "a file of this name exists"));
            }
            Ok(true) => {}
        }
        share.parts.borrow_mut().remove(&path);
        take(uploading, body, Extent::All, transfer).await
    }

    /// `PATCH …?part`.
    pub(super) async fn resume_upload(
        self: &Rc<Self>,
        share: Rc<Share>,
        path: RoutePath,
        headers: HeaderMap,
        body: Incoming,
        transfer: Transfer,
    ) -> Response<Body> {
        let refuse = |body: Incoming, status: StatusCode, text: &str| {
            dismiss(&headers, body);
            words(status, text)
        };
        let text = |name: &HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
        if text(&UPDATE_RANGE) != Some("append") {
            return refuse(
                body,
                StatusCode::BAD_REQUEST,
                "a cut upload is continued with X-Update-Range: append",
            );
        }
        let Some(total) = text(&UPLOAD_LENGTH).and_then(|total| total.parse::<u64>().ok()) else {
            let text = "X-Upload-Length must say how many bytes the whole file has";
            return refuse(body, StatusCode::BAD_REQUEST, text);
        };
        let Some(uploading) = Uploading::begin(self, &share, &path) else {
            dismiss(&headers, body);
            return busy();
        };
        let from = match share.size_of_part(&path).await {
            Ok(Some(size)) => size,
            Ok(None) => return refuse(body, StatusCode::NOT_FOUND, NO_PART),
            Err(error) => {
                dismiss(&headers, body);
                return misplaced(&error);
            }
        };
        let rest = total.checked_sub(from);
        if rest.is_none_or(|rest| body.size_hint().exact().is_some_and(|length| length > rest)) {
            let text = format!(
                "{from} of {total} bytes are here and the request brings too many: ask for the size with \
                 HEAD and ?part, and send what follows"
            );
            return refuse(body, StatusCode::CONFLICT, &text);
        }
        take(uploading, body, Extent::Rest { from, total }, transfer).await
    }
}

const NO_PART: &str = "there is no cut upload of this name; PUT the whole file";

fn busy() -> Response<Body> {
    words(StatusCode::CONFLICT, "this name is being uploaded by another request")
}

/// Runs the upload as a task and waits for what becomes of it.
async fn take(uploading: Uploading, body: Incoming, extent: Extent, transfer: Transfer) -> Response<Body> {
    let (answer, answered) = oneshot::channel();
    let (tasks, share) = (uploading.core.tasks.clone(), uploading.share.clone());
    tasks.spawn_local(async move {
        let response = uploading.run(body, extent).await;
        drop((uploading, transfer));
        let _ = answer.send(response);
    });
    answered.await.unwrap_or_else(|_| share.gone())
}

impl Uploading {
    async fn run(&self, body: Incoming, extent: Extent) -> Response<Body> {
        let limit = match extent {
            Extent::All => None,
            Extent::Rest { from, total } => Some(total - from),
        };
        let part = self.path.part(&self.share.terms.id);
        let (upload, progress) = Upload::new(body, limit, PATIENCE);
        let mut headers = HeaderMap::new();
        headers.insert(UPDATE_RANGE, HeaderValue::from_static("append"));
        let sent = Sent::Upload(Box::new(upload));
        let written = self.share.ask(Method::PATCH, &part.to_string(), headers, sent).await;
        let end = progress.end.get();
        let received = progress.received.get();
        let status = written.map(|reply| reply.status());
        if end == UploadEnd::Running {
            // It answered before it had all: what still comes is not for it.
            progress.end.set(UploadEnd::Cut);
        }
        let is_written = matches!(status, Ok(status) if status.is_success());
        let is_whole = match extent {
            Extent::All => true,
            Extent::Rest { from, total } => from + received == total,
        };
        if is_written && end == UploadEnd::Whole && is_whole {
            return self.put_in_place(&part).await;
        }
        self.keep(matches!(extent, Extent::All) && received == 0).await;
        match (status, end) {
            (Err(Broken), _) => self.share.gone(),
            (Ok(_), _) if self.share.is_over() => self.share.gone(),
            (Ok(status), UploadEnd::Whole) if status.is_success() => {
                let mut response = Response::new(Body::Empty);
                *response.status_mut() = StatusCode::NO_CONTENT;
                response
            }
            (Ok(status), UploadEnd::TooLong) if status.is_success() => {
                words(StatusCode::BAD_REQUEST, "the request brought more than X-Upload-Length says")
            }
            (Ok(status), UploadEnd::Cut) if status.is_success() => {
                words(StatusCode::REQUEST_TIMEOUT, "the upload stopped; what came is kept, see ?part")
            }
            (Ok(StatusCode::NOT_FOUND | StatusCode::FORBIDDEN), _) => {
                words(StatusCode::CONFLICT, "the folder of the upload was changed meanwhile")
            }
            (Ok(_), _) => self.not_written().await,
        }
    }

    /// The bytes are all there: over the final name with them.
    async fn put_in_place(&self, part: &RoutePath) -> Response<Body> {
        let mut headers = HeaderMap::new();
        let to = format!("http://localhost{}", self.path);
        if let Ok(to) = HeaderValue::try_from(to) {
            headers.insert(HeaderName::from_static("destination"), to);
        }
        let method = Method::from_bytes(b"MOVE").unwrap_or_default();
        let moved = self.share.ask(method, &part.to_string(), headers, Sent::Nothing).await;
        match moved.map(|reply| reply.status()) {
            Ok(status) if status.is_success() => {
                self.share.parts.borrow_mut().remove(&self.path);
                let mut response = Response::new(Body::Empty);
                *response.status_mut() = StatusCode::CREATED;
                response
            }
            Ok(status) => {
                tracing::warn!(%status, "the file server does not move an upload to its place");
                self.keep(false).await;
                let text = "the file cannot be put in place: its folder or its name was changed meanwhile; \
                            what came is kept, see ?part";
                words(StatusCode::CONFLICT, text)
            }
            Err(Broken) => {
                self.keep(false).await;
                self.share.gone()
            }
        }
    }

    /// What came is kept for whoever continues, unless it is nothing.
    async fn keep(&self, is_nothing: bool) {
        let is_full = self.share.parts.borrow().len() >= MAX_PARTS;
        if !is_nothing && !is_full {
            self.share.parts.borrow_mut().insert(self.path.clone());
            return;
        }
        let (root, at, part) =
            (self.share.terms.path.clone(), self.path.clone(), self.path.part(&self.share.terms.id));
        aside(move || {
            if let (Ok(place), Some((_, name))) = (Place::open(&root, &at, false), part.split()) {
                place.remove(name);
            }
        })
        .await;
    }

    /// The file server could not write; it does not say why.
    async fn not_written(&self) -> Response<Body> {
        let root = self.share.terms.path.clone();
        let is_full = aside(move || rustix::fs::statvfs(&root).is_ok_and(|disk| disk.f_bavail == 0)).await;
        if is_full {
            return words(
                StatusCode::INSUFFICIENT_STORAGE,
                "the disk of the share is full; what came is kept",
            );
        }
        let text = "the file server could not write the file; what came is kept, see ?part";
        words(StatusCode::INTERNAL_SERVER_ERROR, text)
    }
}

impl Share {
    async fn size_of_part(&self, path: &RoutePath) -> Result<Option<u64>, PlaceError> {
        let (root, at, part) = (self.terms.path.clone(), path.clone(), path.part(&self.terms.id));
        aside(move || match Place::open(&root, &at, false) {
            Ok(place) => place.part_size(part.split().map(|(_, name)| name).unwrap_or_default()),
            Err(PlaceError::NoFolder | PlaceError::IsAFolder | PlaceError::NotAFolder) => Ok(None),
            Err(error) => Err(error),
        })
        .await
    }

    /// `HEAD …?part`.
    pub(super) async fn part_size(&self, path: &RoutePath) -> Response<Body> {
        match self.size_of_part(path).await {
            Ok(Some(size)) => {
                let mut response = Response::new(Body::Empty);
                response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(size));
                response
            }
            Ok(None) => words(StatusCode::NOT_FOUND, NO_PART),
            Err(error) => misplaced(&error),
        }
    }
}
