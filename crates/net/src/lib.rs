//! Peers and calls between them.
//!
//! A [`Transport`] carries a [`Request`] to a [`Peer`] and brings back its [`Reply`]
//! or a [`CallError`]; a [`Service`] answers what arrives. The real transport is TCP
//! with TLS 1.3 (`tcp`), the simulated one lives in `atoll-sim`. This crate does not
//! know what messages mean: a header is opaque bytes that the caller writes, and bulk bytes
//! travel beside it as `parts`, which no layer copies or re-encodes.
//!
//! The `tcp` and `unix` modules name tokio and read the clock: they run only for real.

#[allow(clippy::disallowed_methods, reason = "the real transport runs only on tokio")]
pub mod tcp;
#[allow(clippy::disallowed_methods, reason = "a real socket runs only on tokio")]
pub mod unix;

pub mod frame;
pub mod header;
pub mod hello;
mod members;
#[allow(clippy::disallowed_methods, reason = "connections run only on tokio")]
pub mod mux;
pub mod stats;

pub use hello::{Secret, Secrets, Verdict, Versions};
pub use members::{Admission, Members, Proven};
pub use stats::{NetStats, RefusalReason};
pub use tcp::{NetworkAuth, StartError, TcpConfig, TcpTransport};
pub use unix::{LOCAL_CALLER, UnixClient, UnixServeError, UnixServer, WhenAbsent, serve_unix};

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_key::PeerId;
use bytes::Bytes;

/// Another node: who it is and where it listens.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Peer {
    /// Its public key, proven by the handshake.
    pub id: PeerId,
    /// Where it accepts connections.
    pub addr: SocketAddr,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.id, self.addr)
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.id, self.addr)
    }
}

/// The largest message, header and parts together, in bytes: a batch of blocks.
pub const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// A method that no service owns: any answer to it, also a refusal, shows that the peer lives.
pub const PROBE: u16 = 0x0000;
/// The longest header, in bytes.
pub const MAX_HEADER_BYTES: usize = 256 << 10;
/// The most parts in one message.
pub const MAX_PARTS: usize = 1024;

/// A call. `method` selects what the header means; see the crate that owns the method.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Which call it is. `0x01xx` overlay, `0x02xx` dht, `0x03xx` control socket,
    /// `0x04xx` pools.
    pub method: u16,
    /// The call's arguments, in the owner's encoding.
    pub header: Bytes,
    /// Bulk bytes, such as blocks. All parts of a message that arrived share one buffer:
    /// keeping one part keeps them all, so copy a part that is to be kept for long.
    pub parts: Vec<Bytes>,
}

/// The answer to a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// The result, in the method owner's encoding.
    pub header: Bytes,
    /// Bulk bytes, such as blocks; they share one buffer as those of a request do.
    pub parts: Vec<Bytes>,
}

/// A peer's reasoned "no": the call arrived and was understood or found malformed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text} (code {code})")]
pub struct Refusal {
    /// One of the constants below, or the method owner's own from 100 up.
    pub code: u16,
    /// For people: what was refused and why. At most 1 KiB is sent.
    pub text: String,
}

impl Refusal {
    /// The request could not be decoded or breaks a limit.
    pub const MALFORMED: u16 = 1;
    /// No service here has the method.
    pub const UNKNOWN_METHOD: u16 = 2;
    /// Too much at once; try again later.
    pub const OVERLOADED: u16 = 3;
    /// The service failed on its own account.
    pub const INTERNAL: u16 = 4;

    /// A refusal with a reason for people.
    pub fn new(code: u16, text: impl Into<String>) -> Refusal {
        Refusal { code, text: text.into() }
    }
}

/// Why a call brought no reply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// No connection could be made, or it broke: the peer may be gone.
    #[error("cannot reach the peer: {0}")]
    Unreachable(String),
    /// The deadline passed: the peer may be slow or gone.
    #[error("no answer in time")]
    TimedOut,
    /// The peer answered with a refusal.
    #[error("refused: {0}")]
    Refused(#[from] Refusal),
    /// The request is larger than the limits of this crate; nothing was sent.
    #[error("the message exceeds the limits")]
    TooLarge,
}

impl CallError {
    /// Whether the peer seems to have failed, as opposed to having refused.
    pub fn is_failure_of_peer(&self) -> bool {
        matches!(self, CallError::Unreachable(_) | CallError::TimedOut)
    }

    /// Whether the peer lives and does not know the method, because it runs another version. The
    /// caller uses another method or goes without the answer.
    pub fn is_unknown_method(&self) -> bool {
        matches!(self, CallError::Refused(refusal) if refusal.code == Refusal::UNKNOWN_METHOD)
    }
}

/// Answers calls.
pub trait Service: Send + Sync + 'static {
    /// Answers one call of `from`, whose identity the transport has proven (its
    /// address is the one it claims to listen on). Dropped when the caller gave up.
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>>;
}

/// Carries calls to peers.
pub trait Transport: Send + Sync + 'static {
    /// This node's own identity and address.
    fn local(&self) -> Peer;

    /// Calls `to` and waits for its reply, at most until `limit` has passed.
    /// Dropping the future gives the call up. A reply is only ever taken from the
    /// holder of `to.id`.
    fn call(
        &self,
        to: Peer,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>>;

    /// Whether the holder of `to.id` answers at `to.addr` right now (CFS §4.4): a reply
    /// over a connection that it opened proves its key, not that it listens there. So it
    /// is answered over a connection that was dialled to that address, an open one or a new
    /// one. Where dialling fails, a peer that was reached at that address before, and answers
    /// over a connection from its IP address, is alive and has not moved.
    ///
    /// # Errors
    /// As [`Transport::call`]; never a refusal.
    fn reach(&self, to: Peer, limit: Duration) -> BoxFuture<'static, Result<(), CallError>> {
        // Enough for a transport whose calls go to the address and nowhere else.
        let request = Request { method: PROBE, ..Request::default() };
        let answer = self.call(to, request, limit);
        Box::pin(async move {
            match answer.await {
                Ok(_) | Err(CallError::Refused(_)) => Ok(()),
                Err(error) => Err(error),
            }
        })
    }

    /// Calls the process that answers at `addr` with this node's own key, over a connection that is
    /// dialled there: another process with the same key, or this one. A [`Transport::call`] to the
    /// own key may be answered here without a connection.
    fn call_own_key(
        &self,
        addr: SocketAddr,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        // Enough for a transport whose calls go to the address and nowhere else.
        self.call(Peer { id: self.local().id, addr }, request, limit)
    }

    /// The IP address at the other end of the open connection with a peer, whichever side
    /// made it. The handshake has proven the peer's key there. `None` if no connection is
    /// open, or if this transport does not know.
    fn remote_ip(&self, _peer: &PeerId) -> Option<IpAddr> {
        None
    }

    /// Smoothed round-trip time to a peer, if it has been measured.
    fn round_trip(&self, peer: &PeerId) -> Option<Duration>;

    /// Sets who answers incoming calls; before this they are refused as overloaded.
    fn serve(&self, service: Arc<dyn Service>);
}

/// Sends each call to the service that owns the upper byte of its method.
#[derive(Default, Clone)]
pub struct Router {
    services: Vec<(u8, Arc<dyn Service>)>,
    lacks: &'static [u16],
}

impl Router {
    /// A router that knows no method yet.
    pub fn new() -> Router {
        Router::default()
    }

    /// Routes methods `family << 8 ..= family << 8 | 0xff` to `service`.
    #[must_use]
    pub fn route(mut self, family: u8, service: Arc<dyn Service>) -> Router {
        self.services.push((family, service));
        self
    }

    /// Does not know these methods, as a node from before they were added. For tests.
    #[must_use]
    pub fn without(mut self, lacks: &'static [u16]) -> Router {
        self.lacks = lacks;
        self
    }
}

impl Service for Router {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let family = (request.method >> 8) as u8;
        let known = self.services.iter().find(|(known, _)| *known == family);
        match known.filter(|_| !self.lacks.contains(&request.method)) {
            Some((_, service)) => service.handle(from, request),
            None => {
                let text = format!("method {:#06x} is not known here", request.method);
                Box::pin(async move { Err(Refusal::new(Refusal::UNKNOWN_METHOD, text)) })
            }
        }
    }
}
