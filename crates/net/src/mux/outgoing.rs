//! What is being written: encoded heads and headers, and between them the parts of
//! messages, which are handed to the stream where they lie.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::AsyncWrite;

use super::shared::{Queued, SendPermit};

/// A part up to this size is copied beside its header: cheaper than a slice of its own.
const COPY_BYTES: usize = 1024;
/// The most slices in one write.
const MAX_SLICES: usize = 64;

/// A batch of frames being written.
#[derive(Default)]
pub(super) struct Outgoing {
    segments: VecDeque<Bytes>,
    encoding: BytesMut,
    /// Released when the batch is written.
    permits: Vec<SendPermit>,
}

impl Outgoing {
    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.encoding.is_empty()
    }

    /// Appends a frame and returns how many bytes it has on the wire.
    pub(super) fn push(&mut self, queued: Queued) -> usize {
        let before = self.encoding.len();
        let mut bytes = 0;
        self.permits.extend(queued.permit);
        let parts = queued.frame.encode_start(&mut self.encoding);
        bytes += self.encoding.len() - before;
        for part in parts {
            bytes += part.len();
            if part.len() <= COPY_BYTES {
                self.encoding.extend_from_slice(&part);
            } else {
                self.seal();
                self.segments.push_back(part);
            }
        }
        bytes
    }

    fn seal(&mut self) {
        if !self.encoding.is_empty() {
            self.segments.push_back(self.encoding.split().freeze());
        }
    }

    /// Writes until nothing is left; the number of bytes written so far is added to
    /// `written`. Cancel-safe: what is written is forgotten at once.
    pub(super) fn poll_write<S: AsyncWrite + Unpin>(
        &mut self,
        io: &mut S,
        cx: &mut Context<'_>,
        written: &mut usize,
    ) -> Poll<io::Result<()>> {
        self.seal();
        while !self.segments.is_empty() {
            let mut slices = [IoSlice::new(&[]); MAX_SLICES];
            let count = self.segments.len().min(MAX_SLICES);
            for (slice, segment) in slices.iter_mut().zip(&self.segments) {
                *slice = IoSlice::new(segment);
            }
            let sent = ready!(Pin::new(&mut *io).poll_write_vectored(cx, &slices[..count]))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            *written += sent;
            self.forget(sent);
        }
        self.permits.clear();
        Poll::Ready(Ok(()))
    }

    fn forget(&mut self, mut sent: usize) {
        while sent > 0 {
            let first = self.segments.front_mut().expect("no more is sent than there is");
            if sent < first.len() {
                first.advance(sent);
                return;
            }
            sent -= first.len();
            self.segments.pop_front();
        }
    }
}
