//! Putting messages together without parsing their payloads, and the pipe's two ends.

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};

use super::store::Outcome;
use crate::frame::Frame;
use crate::frame::codec::OutBuffer;
use crate::frame::raw;

pub(super) fn notification(method: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","method":{},"params":"#, raw::quote(method))
}

pub(super) fn request(id: u64, method: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":{},"params":"#, raw::quote(method))
}

/// Queues a message: `head` up to a member's colon, then its text.
pub(super) fn push(out: &mut OutBuffer, head: String, text: Bytes) {
    let text = if text.is_empty() { Bytes::from_static(b"{}") } else { text };
    match Frame::from_parts(vec![head.into(), text, Bytes::from_static(b"}")]) {
        Ok(frame) => out.push(frame),
        // Results are cut to the limit before they come here.
        Err(error) => tracing::error!(%error, "a message was not sent"),
    }
}

pub(super) fn push_result(out: &mut OutBuffer, call_id: &str, outcome: &Outcome) {
    let (member, text) = match outcome {
        Outcome::Result(text) => ("result", text),
        Outcome::Error(text) => ("error", text),
    };
    let head = format!(r#"{}{{"callId":{},"{member}":"#, notification("bridge/result"), raw::quote(call_id));
    match Frame::from_parts(vec![head.into(), text.clone(), Bytes::from_static(b"}}")]) {
        Ok(frame) => out.push(frame),
        Err(error) => tracing::error!(%error, "a result was not sent"),
    }
}

/// Writes some of what waits; never completes without a writer.
pub(super) async fn write(
    writer: &mut Option<Box<dyn AsyncWrite + Unpin>>,
    out: &mut OutBuffer,
) -> io::Result<()> {
    match writer {
        None => std::future::pending().await,
        Some(writer) => match writer.write_buf(out).await? {
            0 => Err(io::ErrorKind::WriteZero.into()),
            _ => Ok(()),
        },
    }
}

/// Notes that a byte came: any byte counts as life.
pub(super) struct Heard {
    inner: Box<dyn AsyncRead + Unpin>,
    heard: Rc<Cell<bool>>,
}

impl Heard {
    pub(super) fn new(inner: Box<dyn AsyncRead + Unpin>, heard: Rc<Cell<bool>>) -> Self {
        Self { inner, heard }
    }
}

impl AsyncRead for Heard {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buf.filled().len();
        let poll = Pin::new(&mut self.inner).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.heard.set(true);
        }
        poll
    }
}
