//! Peers that have not answered lately.

use std::net::SocketAddr;

use atoll_env::Instant;
use atoll_net::Peer;

/// Whether a peer left the last call made to it unanswered; the greater, the later it is
/// asked when there are others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Standing {
    /// Nothing is held against it.
    Answers,
    /// An answer is overdue and still waited for.
    Late,
    /// No answer came in time.
    Silent,
}

/// A call without an answer, held against a peer address for a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Silence {
    pub addr: SocketAddr,
    pub standing: Standing,
    pub until: Instant,
}

impl Silence {
    /// The standing of an address of the peer whose page it is on.
    pub(super) fn standing(&self, peer: &Peer, now: Instant) -> Standing {
        if self.addr == peer.addr && now < self.until { self.standing } else { Standing::Answers }
    }
}
