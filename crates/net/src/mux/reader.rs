//! From a byte stream to frames, without allocating what a peer merely claims.
//!
//! Bytes arrive in a small staging buffer. A frame that fits is copied out of it, so
//! that keeping a small message does not keep a large buffer alive. The body of a larger
//! one is read straight into a buffer of its own, which its header and parts then share.
//! That buffer starts with at most [`FIRST_CHUNK_BYTES`] and grows only when full, to at
//! most twice what has arrived.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};

use crate::frame::{Frame, FrameError, HEAD_BYTES, Head};

/// Size of the staging buffer, in bytes: one TLS record.
const STAGING_BYTES: usize = 16 << 10;
/// What a large frame gets before its first byte has arrived: a block of 64 KiB and a
/// few more, as a root is sent them, fit without growing.
pub(super) const FIRST_CHUNK_BYTES: usize = 512 << 10;

/// Cuts a byte stream into frames.
pub(super) struct FrameReader {
    staging: Box<[u8]>,
    start: usize,
    end: usize,
    /// A frame whose body is read into a buffer of its own.
    large: Option<(Head, BytesMut)>,
}

impl FrameReader {
    pub(super) fn new() -> FrameReader {
        FrameReader { staging: vec![0; STAGING_BYTES].into(), start: 0, end: 0, large: None }
    }

    /// The next frame, if all of it has arrived.
    pub(super) fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        if let Some((head, body)) = &mut self.large {
            if body.len() < head.body_bytes() {
                return Ok(None);
            }
            let (head, body) = (*head, std::mem::take(body));
            self.large = None;
            return head.with_body(body.freeze()).map(Some);
        }
        let arrived = &self.staging[self.start..self.end];
        let Some((head, rest)) = arrived.split_first_chunk::<HEAD_BYTES>() else {
            return Ok(None);
        };
        let head = Head::decode(head)?;
        if let Some(body) = rest.get(..head.body_bytes()) {
            let body = Bytes::copy_from_slice(body);
            self.start += HEAD_BYTES + body.len();
            return head.with_body(body).map(Some);
        }
        if HEAD_BYTES + head.body_bytes() > STAGING_BYTES {
            let mut body = BytesMut::with_capacity(head.body_bytes().min(FIRST_CHUNK_BYTES));
            body.extend_from_slice(rest);
            self.start = self.end;
            self.large = Some((head, body));
        }
        Ok(None)
    }

    /// Reads more, once [`FrameReader::next_frame`] has returned none; 0 is the end of
    /// the stream. Cancel-safe.
    pub(super) fn poll_fill<S: AsyncRead + Unpin>(
        &mut self,
        io: &mut S,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        if let Some((head, body)) = &mut self.large {
            let missing = head.body_bytes() - body.len();
            if body.len() == body.capacity() {
                body.reserve(missing.min(body.len()));
            }
            let room = missing.min(body.capacity() - body.len());
            return pin!(io.read_buf(&mut body.limit(room))).poll(cx);
        }
        if self.start > 0 {
            self.staging.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let mut free = ReadBuf::new(&mut self.staging[self.end..]);
        ready!(Pin::new(io).poll_read(cx, &mut free))?;
        let read = free.filled().len();
        self.end += read;
        Poll::Ready(Ok(read))
    }

    /// The memory of a large frame that has begun and not ended.
    pub(super) fn partial_bytes(&self) -> usize {
        self.large.as_ref().map_or(0, |(_, body)| body.capacity())
    }

    /// Whether the stream may end here: not within a frame.
    pub(super) fn at_boundary(&self) -> bool {
        self.large.is_none() && self.start == self.end
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use proptest::prelude::*;

    use super::*;
    use crate::{MAX_MESSAGE_BYTES, Reply, Request};

    /// Hands out a byte stream in pieces of the given sizes, over and over.
    struct Pieces<'a> {
        bytes: &'a [u8],
        sizes: std::iter::Cycle<std::slice::Iter<'a, usize>>,
    }

    impl AsyncRead for Pieces<'_> {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            let size = *self.sizes.next().expect("never ends");
            let (piece, rest) =
                self.bytes.split_at(size.min(buf.remaining()).min(self.bytes.len()));
            buf.put_slice(piece);
            self.bytes = rest;
            Poll::Ready(Ok(()))
        }
    }

    fn read_all(reader: &mut FrameReader, bytes: &[u8], sizes: &[usize]) -> Vec<Frame> {
        let mut io = Pieces { bytes, sizes: sizes.iter().cycle() };
        let mut cx = Context::from_waker(Waker::noop());
        let mut frames = Vec::new();
        loop {
            while let Some(frame) = reader.next_frame().expect("well formed") {
                frames.push(frame);
            }
            let Poll::Ready(Ok(read)) = reader.poll_fill(&mut io, &mut cx) else {
                panic!("pieces are always ready")
            };
            if read == 0 {
                return frames;
            }
        }
    }

    fn message(bytes: usize) -> Frame {
        let part = Bytes::from(vec![bytes as u8; bytes]);
        Frame::Reply(bytes as u64, Reply { header: Bytes::from_static(b"h"), parts: vec![part] })
    }

    proptest! {
        #[test]
        fn frames_arrive_however_the_stream_is_cut(
            bytes in proptest::collection::vec(prop_oneof![0..200usize, 10_000..400_000usize], 0..8),
            sizes in proptest::collection::vec(1..70_000usize, 1..5),
        ) {
            let frames: Vec<Frame> = bytes.into_iter().map(message).collect();
            let stream: Vec<u8> = frames.iter().flat_map(|frame| frame.clone().encode()).collect();
            let mut reader = FrameReader::new();
            prop_assert_eq!(read_all(&mut reader, &stream, &sizes), frames);
            prop_assert!(reader.at_boundary());
        }
    }

    #[test]
    fn a_claim_of_four_mebibytes_allocates_only_a_chunk() {
        let encoded = message(MAX_MESSAGE_BYTES - 1).encode();
        let mut reader = FrameReader::new();
        for arrived in [100, 1000, 300_000, 1_000_000] {
            let mut reader = FrameReader::new();
            assert_eq!(read_all(&mut reader, &encoded[..arrived], &[50_000]), []);
            let (_, body) = reader.large.as_ref().expect("a large frame has begun");
            let most = (2 * arrived).max(FIRST_CHUNK_BYTES);
            assert!(body.capacity() <= most, "{} for {arrived}", body.capacity());
            assert!(!reader.at_boundary());
        }
        assert_eq!(read_all(&mut reader, &encoded, &[50_000]).len(), 1);
    }

    #[test]
    fn a_small_message_does_not_keep_the_staging_buffer_alive() {
        let request = Request { method: 1, header: Bytes::from_static(b"hello"), parts: vec![] };
        let encoded = Frame::Request(1, request).encode();
        let mut reader = FrameReader::new();
        let frames = read_all(&mut reader, &encoded, &[7]);
        let [Frame::Request(1, request)] = &frames[..] else { panic!("one request") };
        assert!(!reader.staging.as_ptr_range().contains(&request.header.as_ptr()));
    }

    #[test]
    fn a_lying_head_is_refused_before_its_body_arrives() {
        let mut encoded = message(100_000).encode().to_vec();
        encoded[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
        let mut reader = FrameReader::new();
        let mut cx = Context::from_waker(Waker::noop());
        let read = reader.poll_fill(&mut &encoded[..HEAD_BYTES], &mut cx);
        assert!(matches!(read, Poll::Ready(Ok(HEAD_BYTES))));
        assert_eq!(reader.next_frame(), Err(FrameError::HeaderTooLong(u32::MAX)));
    }
}
