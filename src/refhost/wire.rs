//! Putting messages together without parsing their payloads, and the pipe's two ends.

use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::oneshot;

use super::store::Outcome;
use crate::frame::Frame;
use crate::frame::codec::OutBuffer;
use crate::frame::messages::{Notice, RpcError};
use crate::frame::raw;

/// Messages on their way to a sidecar, and the requests among them that wait for an answer.
#[derive(Default)]
pub(super) struct Outbox {
    buffer: OutBuffer,
    asked: HashMap<u64, Asked>,
    last_id: u64,
}

/// What an answer of the sidecar belongs to.
pub(super) enum Asked {
    Hello,
    Ping,
    Stop,
    Command(oneshot::Sender<Result<Notice, String>>),
    Request { tag: u64, reply: oneshot::Sender<Result<Bytes, RpcError>> },
}

impl Outbox {
    /// Bytes that wait for the pipe.
    pub(super) fn len(&self) -> usize {
        self.buffer.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Forgets what waits for the pipe.
    pub(super) fn clear(&mut self) {
        self.buffer = OutBuffer::default();
    }

    /// A request with the text of its parameters (empty: none).
    pub(super) fn ask(&mut self, method: &str, params: Bytes, asked: Asked) {
        self.last_id += 1;
        let (id, method) = (self.last_id, raw::quote(method));
        self.asked.insert(id, asked);
        self.push(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":{method},"params":"#), params, "}");
    }

    /// Who waits for the answer to request `id`; nobody does afterwards.
    pub(super) fn asked(&mut self, id: u64) -> Option<Asked> {
        self.asked.remove(&id)
    }

    /// The id of the request that was tagged so; its answer is not waited for any more.
    pub(super) fn forget_request(&mut self, wanted: u64) -> Option<u64> {
        let is_it = |asked: &Asked| matches!(asked, Asked::Request { tag, .. } if *tag == wanted);
        let id = self.asked.iter().find_map(|(id, asked)| is_it(asked).then_some(*id))?;
        self.asked.remove(&id);
        Some(id)
    }

    pub(super) fn notify(&mut self, method: &str, params: Bytes) {
        let method = raw::quote(method);
        self.push(format!(r#"{{"jsonrpc":"2.0","method":{method},"params":"#), params, "}");
    }

    /// The answer to the request with the id text `id`.
    pub(super) fn answer(&mut self, id: &Bytes, outcome: &Outcome) {
        let (member, text) = outcome.member();
        let id = String::from_utf8_lossy(id);
        self.push(format!(r#"{{"jsonrpc":"2.0","id":{id},"{member}":"#), text.clone(), "}");
    }

    /// `bridge/result`: the end of a call that an earlier sidecar asked for.
    pub(super) fn result(&mut self, call_id: &str, outcome: &Outcome) {
        let (member, text) = outcome.member();
        let call_id = raw::quote(call_id);
        let head = format!(
            r#"{{"jsonrpc":"2.0","method":"bridge/result","params":{{"callId":{call_id},"{member}":"#
        );
        self.push(head, text.clone(), "}}");
    }

    fn push(&mut self, head: String, text: Bytes, tail: &'static str) {
        let text = if text.is_empty() { Bytes::from_static(b"{}") } else { text };
        match Frame::from_parts(vec![head.into(), text, Bytes::from_static(tail.as_bytes())]) {
            Ok(frame) => self.buffer.push(frame),
            // Results are cut to the limit before they come here.
            Err(error) => tracing::error!(%error, "a message was not sent"),
        }
    }
}

/// Writes some of what waits; never completes without a writer.
pub(super) async fn write(
    writer: &mut Option<Box<dyn AsyncWrite + Unpin>>,
    out: &mut Outbox,
) -> io::Result<()> {
    match writer {
        None => std::future::pending().await,
        Some(writer) => match writer.write_buf(&mut out.buffer).await? {
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
