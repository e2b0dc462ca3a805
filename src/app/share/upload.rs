//! Uploads (contract 6): into a file of a hidden name beside the final one, then moved over it in one
//! step. What is cut is kept under the hidden name until the share ends, and can be continued.
//!
//! A file is known by where it really is, not by the links that lead to it: only one upload of it goes on
//! at a time, and what was cut can be continued at any of its paths.
//!
//! An upload is a task of its own: when its caller vanishes, the file server still writes what came,
//! and only then may somebody go on with the rest.

use std::collections::HashSet;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use hyper::body::{Body as _, Incoming};
use hyper::header::{
    CONTENT_LENGTH, CONTENT_RANGE, HeaderMap, HeaderName, HeaderValue, IF_MATCH, IF_NONE_MATCH,
    IF_UNMODIFIED_SINCE,
};
use hyper::{Method, Response, StatusCode};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::route::{Broken, dismiss, misplaced, words};
use super::tools::aside;
use super::{Share, Transfer};
use crate::app::Core;
use crate::http::Body;
use crate::http::body::drain;
use crate::xfer::path::RoutePath;
use crate::xfer::place::{Place, PlaceError};
use crate::xfer::rules::{UPDATE_RANGE, UPLOAD_LENGTH, UPLOAD_OFFSET};
use crate::xfer::upstream::{Sent, Upload, UploadEnd, UploadRules};

/// A caller that sends nothing for so long is gone; what it sent is kept.
const PATIENCE: Duration = Duration::from_secs(60);
/// What is still read of an upload that the file server does not take: its sender is in the midst of it.
const UNREAD_REST: usize = 64 << 20;
/// Most cut uploads that are kept; of further ones nothing is.
const MAX_PARTS: usize = 1024;

/// A file is being uploaded, as long as this lives.
struct Uploading {
    core: Rc<Core>,
    share: Rc<Share>,
    path: RoutePath,
    conditions: Conditions,
}

/// What its caller wants to hold of what is there now, when it is judged and still when it is replaced
/// (RFC 9110, 13.1).
struct Conditions {
    /// Those that the file server can judge.
    headers: HeaderMap,
    /// There is something (`If-Match`, whichever).
    must_exist: bool,
    /// There is nothing (`If-None-Match: *`).
    must_be_new: bool,
}

impl Conditions {
    fn of(request: &HeaderMap) -> Self {
        let mut headers = HeaderMap::new();
        for name in [IF_MATCH, IF_UNMODIFIED_SINCE, IF_NONE_MATCH] {
            let values = request.get_all(&name).iter().filter(|value| value.as_bytes() != b"*");
            headers.extend(values.map(|value| (name.clone(), value.clone())));
        }
        Self {
            headers,
            must_exist: request.contains_key(IF_MATCH),
            must_be_new: request.get(IF_NONE_MATCH).is_some_and(|tag| tag.as_bytes() == b"*"),
        }
    }
}

impl Uploading {
    /// The upload of the file that really is at `path`; the refusal when there is one already, or when the
    /// share has ended while that was found out.
    #[expect(clippy::result_large_err, reason = "the refusal is the response; it is moved once")]
    fn begin(
        core: &Rc<Core>,
        share: &Rc<Share>,
        path: RoutePath,
        conditions: Conditions,
    ) -> Result<Self, Response<Body>> {
        if share.is_over() {
            return Err(share.gone());
        }
        if !share.uploading.borrow_mut().insert(path.clone()) {
            return Err(words(StatusCode::CONFLICT, UNDER_WAY));
        }
        Ok(Self { core: core.clone(), share: share.clone(), path, conditions })
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
        if headers.contains_key(UPDATE_RANGE) {
            let text =
                "X-Update-Range continues a cut upload: use PATCH with ?part; PUT replaces a whole file";
            return refuse(body, words(StatusCode::BAD_REQUEST, text));
        }
        let conditions = Conditions::of(&headers);
        // Before anything is made for it.
        if let Some(refused) = share.unmet(&path, &conditions).await {
            return refuse(body, refused);
        }
        let (place, path) = match share.place(path, true).await {
            Ok(found) => found,
            Err(error) => return refuse(body, misplaced(&error)),
        };
        let part = path.part(&share.terms.id);
        let must_be_new = conditions.must_be_new;
        let uploading = match Uploading::begin(self, &share, path, conditions) {
            Ok(uploading) => uploading,
            Err(refused) => return refuse(body, refused),
        };
        let root = share.terms.path.clone();
        let begun = aside(move || {
            if must_be_new && place.look(&root)?.is_some() {
                return Err(PlaceError::Exists);
            }
            let had_part = place.part_size(part.name())?.is_some();
            place.begin(&root, part.name())?;
            Ok(had_part)
        });
        let had_part = match begun.await {
            Ok(had_part) => had_part,
            Err(error) => return refuse(body, misplaced(&error)),
        };
        if share.parts.borrow_mut().remove(&uploading.path) && !had_part {
            share.has_strays.set(true);
        }
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
        // One that stands there twice says nothing.
        let text = |name: &HeaderName| {
            let mut values = headers.get_all(name).iter();
            let value = values.next().filter(|_| values.next().is_none());
            value.and_then(|value| value.to_str().ok()).map(str::trim)
        };
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
        let offset = text(&UPLOAD_OFFSET).and_then(|offset| offset.parse::<u64>().ok());
        if offset.is_none() && headers.contains_key(UPLOAD_OFFSET) {
            let text = "X-Upload-Offset must say at which byte of the file the request begins";
            return refuse(body, StatusCode::BAD_REQUEST, text);
        }
        let conditions = Conditions::of(&headers);
        if let Some(refused) = share.unmet(&path, &conditions).await {
            dismiss(&headers, body);
            return refused;
        }
        let found = share.place(path, false).await;
        let begun = match found {
            Ok((place, path)) => {
                Uploading::begin(self, &share, path, conditions).map(|uploading| (place, uploading))
            }
            Err(error) => Err(no_part(&error)),
        };
        let (place, uploading) = match begun {
            Ok(begun) => begun,
            Err(refused) => {
                dismiss(&headers, body);
                return refused;
            }
        };
        let part = uploading.path.part(&share.terms.id);
        let (root, must_be_new) = (share.terms.path.clone(), uploading.conditions.must_be_new);
        let found = aside(move || {
            if must_be_new && place.look(&root)?.is_some() {
                return Err(PlaceError::Exists);
            }
            place.part_size(part.name())
        });
        let from = match found.await {
            Ok(Some(size)) => size,
            Ok(None) => return refuse(body, StatusCode::NOT_FOUND, NO_PART),
            Err(error) => {
                dismiss(&headers, body);
                return misplaced(&error);
            }
        };
        if let Some(offset) = offset.filter(|offset| *offset != from) {
            let text =
                format!("the request begins at byte {offset}, but {from} bytes are here: send what follows");
            return refuse(body, StatusCode::CONFLICT, &text);
        }
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

const UNDER_WAY: &str =
    "this name is being uploaded by another request, or one that was cut is still being written";
const NO_PART: &str = "there is no cut upload of this name; PUT the whole file";

/// Why there is no cut upload at a path that leads nowhere.
fn no_part(error: &PlaceError) -> Response<Body> {
    match error {
        PlaceError::NoFolder | PlaceError::IsAFolder | PlaceError::NotAFolder => {
            words(StatusCode::NOT_FOUND, NO_PART)
        }
        error => misplaced(error),
    }
}

/// Runs the upload as a task and waits for what becomes of it.
async fn take(uploading: Uploading, body: Incoming, extent: Extent, transfer: Transfer) -> Response<Body> {
    let (answer, answered) = oneshot::channel();
    let (tasks, share) = (uploading.core.tasks.clone(), uploading.share.clone());
    tasks.spawn_local(async move {
        let response = uploading.run(body, extent, transfer.revoked()).await;
        drop((uploading, transfer));
        let _ = answer.send(response);
    });
    answered.await.unwrap_or_else(|_| share.gone())
}

impl Uploading {
    async fn run(&self, body: Incoming, extent: Extent, revoked: CancellationToken) -> Response<Body> {
        let (from, limit) = match extent {
            Extent::All => (0, None),
            Extent::Rest { from, total } => (from, Some(total - from)),
        };
        let part = self.path.part(&self.share.terms.id);
        let rules =
            UploadRules { limit, patience: PATIENCE, revoked, dismiss: |rest| drain(rest, UNREAD_REST) };
        let (upload, progress) = Upload::new(body, rules);
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
        let is_whole = limit.is_none_or(|limit| received == limit);
        if is_written && end == UploadEnd::Whole && is_whole {
            return self.put_in_place(from + received).await;
        }
        self.keep(matches!(extent, Extent::All) && received == 0).await;
        match (status, end) {
            // It said no and closed before it had read all: its answer may be lost on the way.
            (Err(Broken), _) if self.share.answers().await => self.not_written().await,
            (Err(Broken), _) => self.share.gone(),
            (Ok(_), _) if self.share.is_over() => self.share.gone(),
            (Ok(status), UploadEnd::Whole) if status.is_success() => {
                let mut response = Response::new(Body::Empty);
                *response.status_mut() = StatusCode::NO_CONTENT;
                response
            }
            (Ok(status), UploadEnd::TooLong) if status.is_success() => self.take_back(from).await,
            (Ok(status), UploadEnd::Malformed) if status.is_success() => words(
                StatusCode::BAD_REQUEST,
                "the request's chunks are malformed; what came is kept, see ?part",
            ),
            (Ok(status), UploadEnd::Revoked) if status.is_success() => {
                words(StatusCode::UNAUTHORIZED, "the token was replaced; what came is kept, see ?part")
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

    /// Does something with what has arrived: it gets the share, the folder and the hidden name. Blocking,
    /// so on a thread of its own.
    async fn at_part(
        &self,
        act: impl FnOnce(&Path, &Place, &str) -> Result<(), PlaceError> + Send + 'static,
    ) -> Result<(), PlaceError> {
        let (root, path, part) =
            (self.share.terms.path.clone(), self.path.clone(), self.path.part(&self.share.terms.id));
        aside(move || act(&root, &Place::open(&root, &path, false)?, part.name())).await
    }

    /// The rest was longer than it can be, so it does not belong where it was written: it began elsewhere,
    /// or is another file's.
    async fn take_back(&self, from: u64) -> Response<Body> {
        match self.at_part(move |_, place, part| place.cut_part(part, from)).await {
            Ok(()) => {
                let text = format!(
                    "the request brought more than X-Upload-Length leaves room for, so nothing of it was kept: \
                     {from} bytes are here; ask for the size with HEAD and ?part, and send what follows"
                );
                words(StatusCode::BAD_REQUEST, &text)
            }
            Err(error) => {
                // What is kept cannot be trusted.
                tracing::warn!(%error, "an upload that was too long cannot be taken back");
                self.keep(true).await;
                let text = "the request brought more than X-Upload-Length says; PUT the whole file";
                words(StatusCode::BAD_REQUEST, text)
            }
        }
    }

    /// The bytes are all there, so many: over the final name with them.
    async fn put_in_place(&self, size: u64) -> Response<Body> {
        if self.share.is_over() {
            self.keep(false).await;
            return self.share.gone();
        }
        if let Some(refused) = self.share.unmet(&self.path, &self.conditions).await {
            self.keep(false).await;
            return refused;
        }
        let must_be_new = self.conditions.must_be_new;
        let put = self.at_part(move |root, place, part| place.put(root, part, size, must_be_new));
        match put.await {
            Ok(()) => {
                self.share.parts.borrow_mut().remove(&self.path);
                let mut response = Response::new(Body::Empty);
                *response.status_mut() = StatusCode::CREATED;
                response
            }
            Err(PlaceError::PartChanged) => {
                self.keep(true).await;
                let text = "what had arrived was removed or replaced meanwhile; PUT the whole file";
                words(StatusCode::CONFLICT, text)
            }
            Err(error @ PlaceError::Exists) => {
                self.keep(false).await;
                misplaced(&error)
            }
            Err(error) => {
                tracing::warn!(%error, "an upload cannot be put in its place");
                self.keep(false).await;
                let text = format!(
                    "the file cannot be put in place, its folder or its name was changed meanwhile ({error}); ask \
                     with HEAD and ?part whether what came is still there"
                );
                words(StatusCode::CONFLICT, &text)
            }
        }
    }

    /// What came is kept for whoever continues, unless it is nothing.
    async fn keep(&self, is_nothing: bool) {
        if self.share.parts.borrow().len() >= MAX_PARTS {
            self.share.forget_vanished().await;
        }
        {
            let mut parts = self.share.parts.borrow_mut();
            if !is_nothing && (parts.contains(&self.path) || parts.len() < MAX_PARTS) {
                parts.insert(self.path.clone());
                return;
            }
            parts.remove(&self.path);
        }
        let (root, id, path) =
            (self.share.terms.path.clone(), self.share.terms.id.clone(), self.path.clone());
        if !aside(move || remove_part(&root, &id, &path)).await {
            self.share.has_strays.set(true);
        }
    }

    /// The file server could not write; it does not say why.
    async fn not_written(&self) -> Response<Body> {
        let root = self.share.terms.path.clone();
        let is_full = aside(move || rustix::fs::statvfs(&root).is_ok_and(|disk| disk.f_bavail == 0)).await;
        if is_full {
            return words(
                StatusCode::INSUFFICIENT_STORAGE,
                "the disk of the share is full; what came is kept until the share ends, see ?part",
            );
        }
        let text = "the file server could not write the file; what came is kept, see ?part";
        words(StatusCode::INTERNAL_SERVER_ERROR, text)
    }
}

impl Share {
    /// The folder of the file at `path`, and where that file really is.
    async fn place(&self, path: RoutePath, make: bool) -> Result<(Place, RoutePath), PlaceError> {
        let root = self.terms.path.clone();
        aside(move || {
            let place = Place::open(&root, &path, make)?;
            let real = place.real_path(&root)?.unwrap_or(path);
            Ok((place, real))
        })
        .await
    }

    /// Forgets cut uploads of which nothing is left: somebody removed it.
    async fn forget_vanished(&self) {
        let (root, id) = (self.terms.path.clone(), self.terms.id.clone());
        let parts = self.parts.borrow().clone();
        let vanished = aside(move || {
            let is_there = |path: &RoutePath| {
                let part = path.part(&id);
                let size = Place::open(&root, path, false).and_then(|place| place.part_size(part.name()));
                !matches!(size, Ok(None) | Err(PlaceError::NoFolder))
            };
            parts.into_iter().filter(|path| !is_there(path)).collect::<HashSet<_>>()
        });
        let vanished = vanished.await;
        if !vanished.is_empty() {
            // Or its folder was moved.
            self.has_strays.set(true);
        }
        self.parts.borrow_mut().retain(|path| !vanished.contains(path));
    }

    /// The refusal when a condition does not hold; the file server judges them for reads only. That nothing
    /// may be there is not judged here.
    async fn unmet(self: &Rc<Self>, path: &RoutePath, conditions: &Conditions) -> Option<Response<Body>> {
        let Conditions { headers, must_exist, .. } = conditions;
        if headers.is_empty() && !must_exist {
            return None;
        }
        let looked = self.ask(Method::HEAD, &path.to_string(), headers.clone(), Sent::Nothing).await;
        let is_met = match looked.map(|reply| reply.status()) {
            Ok(StatusCode::NOT_FOUND) => !*must_exist,
            Ok(StatusCode::PRECONDITION_FAILED | StatusCode::NOT_MODIFIED) => false,
            Ok(_) => true,
            Err(Broken) => return Some(self.gone()),
        };
        let text = "the file is not as the request's condition says: look at it again before you replace it";
        (!is_met).then(|| words(StatusCode::PRECONDITION_FAILED, text))
    }

    /// `HEAD …?part`.
    pub(super) async fn part_size(&self, path: RoutePath) -> Response<Body> {
        let (place, path) = match self.place(path, false).await {
            Ok(found) => found,
            Err(error) => return no_part(&error),
        };
        if self.uploading.borrow().contains(&path) {
            return words(StatusCode::CONFLICT, UNDER_WAY);
        }
        let part = path.part(&self.terms.id);
        match aside(move || place.part_size(part.name())).await {
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

/// Removes what is kept of the file at `path` in the share `id` of `root`; whether it was there. Blocks.
pub(super) fn remove_part(root: &Path, id: &str, path: &RoutePath) -> bool {
    Place::open(root, path, false).is_ok_and(|place| place.remove(path.part(id).name()))
}
