//! `GET …?zip`: an archive of a folder, never one that only looks whole. What is known beforehand to be
//! missing is said in words; what goes wrong later breaks the connection off.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::{Body as HttpBody, Frame};
use hyper::{Response, StatusCode};

use super::route::{relayed, words};
use super::tools::aside;
use super::{Share, Transfer};
use crate::http::Body;
use crate::text;
use crate::xfer::archive::{Ending, Step, Survey};
use crate::xfer::path::RoutePath;
use crate::xfer::upstream::Reply;

/// Most characters of a path in a refusal.
const MAX_SHOWN: usize = 300;

impl Share {
    /// The archive of the folder at `path` that the file server has begun; it waits until it is read.
    pub(super) async fn archive(
        &self,
        reply: Response<Reply>,
        path: &RoutePath,
        transfer: Transfer,
    ) -> Response<Body> {
        if let Some((missing, error)) = self.unreadable(path).await {
            let shown = missing.to_string_lossy();
            let text = format!(
                "the archive would not be whole: '{}' cannot be read: {error}",
                text::clean(&shown, MAX_SHOWN)
            );
            let status = match error.kind() {
                io::ErrorKind::PermissionDenied => StatusCode::FORBIDDEN,
                _ => StatusCode::INTERNAL_SERVER_ERROR,
            };
            return words(status, &text);
        }
        let (head, mut body) = reply.into_parts();
        let first = match body.frame().await {
            Some(Ok(frame)) => frame,
            Some(Err(_)) => return self.gone(),
            None => {
                let text = "the archive cannot be made: something in this folder cannot be read";
                return words(StatusCode::INTERNAL_SERVER_ERROR, text);
            }
        };
        let archive = Archive { first: Some(first), body, ending: Ending::default(), transfer };
        relayed(&head, archive)
    }

    /// What in the folder at `path` the file server will not be able to read.
    async fn unreadable(&self, path: &RoutePath) -> Option<(std::path::PathBuf, io::Error)> {
        let mut survey = Survey::new(&self.terms.path, path);
        loop {
            let step;
            (survey, step) = aside(move || {
                let step = survey.step();
                (survey, step)
            })
            .await;
            match step {
                Step::Goes => {}
                Step::Fine => return None,
                Step::Lacks(path, error) => return Some((path, error)),
            }
        }
    }
}

/// An archive on its way to the caller.
struct Archive {
    first: Option<Frame<Bytes>>,
    body: Reply,
    ending: Ending,
    transfer: Transfer,
}

impl HttpBody for Archive {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let frame = match self.first.take() {
            Some(first) => Some(Ok(first)),
            None => {
                let frame = Pin::new(&mut self.body).poll_frame(cx);
                ready!(self.transfer.allow(frame, cx))
            }
        };
        if let Some(Ok(frame)) = &frame
            && let Some(piece) = frame.data_ref()
        {
            self.ending.pass(piece);
        }
        if frame.is_none() && !self.ending.is_whole() {
            tracing::warn!("the file server ended an archive early: it could not read something");
            let text = "the archive is not whole";
            return Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::UnexpectedEof, text))));
        }
        Poll::Ready(frame)
    }
}
