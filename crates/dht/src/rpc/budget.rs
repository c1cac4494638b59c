//! A time budget for each peer in a round of repair.
//!
//! Each call has a limit, but a peer that answers just in time, one block or proof at a time, could
//! hold up a batch for hours. So all calls to a peer in a round share one deadline. What is left
//! then is done in the next round. A peer that has moved next to nothing in that time is left alone
//! for a while ([`Backoff`](super::backoff::Backoff)) and gets a smaller budget until then.
//!
//! It does not know what is asked.

use std::time::Duration;

use atoll_env::{Instant, timeout};
use atoll_key::PeerId;
use atoll_net::CallError;
use atoll_overlay::Node;
use bytes::Bytes;

use super::{Answered, Method};
use crate::rpc::Rpc;

/// What a peer gets in a round. A guess: blocks of some gigabytes at the speed of a fast network.
pub(crate) const PEER_LIMIT: Duration = Duration::from_secs(60);
/// What a peer gets that has been slow, or has failed otherwise, of late. A guess: a call.
const UNFIT_LIMIT: Duration = Duration::from_secs(10);
/// Slow is a peer that is waited for in vain more than half of the time and moves less than this a
/// second, and fewer blocks than that. Guesses: a tenth of a poor line, and small blocks on it.
const SLOW_BYTES_PER_SEC: u64 = 16 << 10;
const SLOW_BLOCKS_PER_SEC: u64 = 4;

/// The time for one peer.
#[derive(Debug)]
pub(crate) struct PeerBudget {
    peer: PeerId,
    limit: Duration,
    until: Instant,
    waited: Duration,
    blocks: u64,
    bytes: u64,
}

impl PeerBudget {
    /// For the work with `peer` from now on.
    pub(crate) fn of(rpc: &Rpc, peer: PeerId) -> PeerBudget {
        let now = rpc.env.now();
        let limit = match rpc.backoff.is_fit(&peer, now) {
            _ if !rpc.config.mechanisms.peer_budgets => Duration::from_secs(24 * 3600),
            true => PEER_LIMIT,
            false => UNFIT_LIMIT,
        };
        PeerBudget { peer, limit, until: now + limit, waited: Duration::ZERO, blocks: 0, bytes: 0 }
    }

    /// For another peer, on whom the work with this one depends.
    pub(crate) fn within(&self, rpc: &Rpc, peer: PeerId) -> PeerBudget {
        let other = PeerBudget::of(rpc, peer);
        PeerBudget { until: other.until.min(self.until), ..other }
    }

    /// What is left.
    pub(crate) fn left(&self, now: Instant) -> Duration {
        self.until.since(now)
    }

    /// Whether nothing is left.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.left(now).is_zero()
    }

    /// Calls a peer; `None` if the time is over before it answers.
    ///
    /// # Errors
    /// If the call fails.
    pub(crate) async fn call<M: Method>(
        &mut self,
        rpc: &Rpc,
        to: &Node,
        request: &M,
        parts: Vec<Bytes>,
    ) -> Result<Option<Answered<M>>, CallError> {
        let began = rpc.env.now();
        let call = rpc.call(to, request, parts);
        let answer = timeout(&*rpc.env, self.left(began), call).await;
        self.waited(rpc.env.now().since(began));
        answer.ok().transpose()
    }

    /// The peer was waited for.
    pub(crate) fn waited(&mut self, time: Duration) {
        self.waited += time;
    }

    /// The peer has sent, taken, or proven to have, blocks.
    pub(crate) fn moved(&mut self, blocks: u64, bytes: u64) {
        self.blocks += blocks;
        self.bytes += bytes;
    }

    fn is_slow(&self) -> bool {
        let secs = self.limit.as_secs();
        self.waited * 2 > self.limit
            && self.bytes < SLOW_BYTES_PER_SEC * secs
            && self.blocks < SLOW_BLOCKS_PER_SEC * secs
    }

    /// The work with the peer has ended, for whatever reason. If it was slow, it is left alone.
    pub(crate) fn end(self, rpc: &Rpc) {
        if self.is_slow() {
            tracing::info!(peer = ?self.peer, waited = ?self.waited, "a peer answers too slowly");
            rpc.backoff.set_back(self.peer, rpc.env.now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_is_a_peer_that_moves_next_to_nothing_while_it_is_waited_for() {
        let secs = Duration::from_secs;
        let is_slow = |waited, blocks, bytes| {
            let (peer, until) = (PeerId([1; 32]), Instant::default());
            PeerBudget { peer, limit: PEER_LIMIT, until, waited, blocks, bytes }.is_slow()
        };
        assert!(is_slow(secs(31), 7, 7 * 8192), "a block a call");
        assert!(!is_slow(secs(29), 0, 0), "a call or two that end late");
        assert!(!is_slow(secs(60), 30, 2 << 20), "large blocks on a poor line");
        assert!(!is_slow(secs(60), 300, 30_000), "small ones");
    }
}
