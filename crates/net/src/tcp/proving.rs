//! A connection that is used before the listener's proof has arrived.
//!
//! The dialler sends its proof and its first requests together, which saves one of three round
//! trips. They are encrypted to the holder of the dialled key, so no stranger can read them. The
//! dialler reads frames only once the listener has proven the network's secret in time. If the
//! proof fails, reading fails, and with it the connection and every call on it.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use crate::hello::{self, HelloError, LENGTH_BYTES, Versions};

/// Why a dial failed, for people and for the log.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    /// TCP or TLS failed; also a key that is not the expected one.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// TLS could not be set up, or the peer does not speak this protocol.
    #[error("{0}")]
    Tls(String),
    /// The peer closed where its proof belongs.
    #[error(
        "the peer closed the connection during the handshake: it may belong to another network, \
         or the network's secret was replaced while this node was away"
    )]
    ClosedByPeer,
    /// The peer does not know the network secret.
    #[error("the peer does not prove the network secret: {0}")]
    Unproven(HelloError),
    /// There is no version that both speak.
    #[error("the peer speaks protocol {theirs}, this node {ours}: update the older of the two")]
    NoCommonVersion {
        /// What this node speaks.
        ours: Versions,
        /// What the peer speaks.
        theirs: Versions,
    },
    /// The peer told that its profile differs.
    #[error("the peer's network has another profile")]
    OtherProfile,
    /// The peer says that the network has removed this node.
    #[error("the peer says that this node was removed from the network")]
    RemovedHere,
    /// The peer says that this node's secret has been replaced.
    #[error("the peer says that the network's secret was replaced while this node was away")]
    SecretReplacedHere,
    /// The network has removed the peer.
    #[error("the peer was removed from the network")]
    Removed,
    /// The peer proves only a secret that has been replaced.
    #[error("the peer knows only a network secret that was replaced")]
    SecretReplaced,
    /// It took too long.
    #[error("the handshake took too long")]
    TimedOut,
}

/// How a dialled peer's proof came out, once that is known: what was wrong, if anything.
pub(super) type Outcome = Arc<OnceLock<Result<(), String>>>;

/// Checks a listener's hello.
type Check = Box<dyn FnOnce(&[u8]) -> Result<(), DialError> + Send>;

/// A stream that begins with the listener's hello, if it was dialled.
pub(super) struct Proving<S> {
    io: S,
    awaited: Option<Awaited>,
}

struct Awaited {
    hello: Vec<u8>,
    check: Option<Check>,
    limit: Pin<Box<Sleep>>,
    outcome: Outcome,
}

impl<S> Proving<S> {
    /// A stream whose peer has proven all there is to prove.
    pub(super) fn proven(io: S) -> Proving<S> {
        Proving { io, awaited: None }
    }

    /// A stream on which a hello comes first, that `check` must find right before `limit`.
    pub(super) fn awaiting(io: S, limit: Sleep, check: Check) -> (Proving<S>, Outcome) {
        let outcome = Outcome::default();
        let (limit, check) = (Box::pin(limit), Some(check));
        let awaited = Awaited { hello: Vec::new(), check, limit, outcome: outcome.clone() };
        (Proving { io, awaited: Some(awaited) }, outcome)
    }
}

impl<S: AsyncRead + Unpin> Proving<S> {
    /// Reads the hello and checks it. Cancel-safe.
    pub(super) fn poll_proof(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), DialError>> {
        let Some(awaited) = &mut self.awaited else { return Poll::Ready(Ok(())) };
        let result = ready!(awaited.poll(&mut self.io, cx));
        let told = match &result {
            Ok(()) => Ok(()),
            Err(error) => Err(error.to_string()),
        };
        // Told once: the hello is not awaited any more, or never will be.
        let _ = awaited.outcome.set(told);
        if result.is_ok() {
            self.awaited = None;
        }
        Poll::Ready(result)
    }
}

impl<S: AsyncBufRead + Unpin> Proving<S> {
    /// Waits for the first byte of a frame from a peer that has proven itself; it is not
    /// consumed. False when the peer closes without sending one.
    pub(super) async fn begins(&mut self) -> bool {
        self.io.fill_buf().await.is_ok_and(|bytes| !bytes.is_empty())
    }
}

impl Awaited {
    fn poll<S: AsyncRead + Unpin>(
        &mut self,
        io: &mut S,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), DialError>> {
        if self.limit.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(DialError::TimedOut));
        }
        loop {
            let wanted = match self.hello.first_chunk::<LENGTH_BYTES>() {
                None => LENGTH_BYTES,
                Some(field) => match hello::hello_bytes(*field) {
                    Ok(bytes) => bytes,
                    Err(error) => return Poll::Ready(Err(DialError::Unproven(error))),
                },
            };
            if self.hello.len() == wanted && wanted > LENGTH_BYTES {
                let check = self.check.take().ok_or(DialError::ClosedByPeer);
                return Poll::Ready(check.and_then(|check| check(&self.hello)));
            }
            let mut piece = [0; hello::MAX_HELLO_BYTES];
            let mut piece = ReadBuf::new(&mut piece[..wanted - self.hello.len()]);
            // Closed, in whatever way, where its proof belongs.
            let read = ready!(Pin::new(&mut *io).poll_read(cx, &mut piece));
            if read.is_err() || piece.filled().is_empty() {
                return Poll::Ready(Err(DialError::ClosedByPeer));
            }
            self.hello.extend_from_slice(piece.filled());
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Proving<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.awaited.is_some() {
            let proof = ready!(self.poll_proof(cx));
            proof.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Proving<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
