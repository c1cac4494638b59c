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

use super::backoff::SetBack;
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

/// The time for one peer. When it is dropped, the work with the peer has ended, for whatever
/// reason: if the peer was slow, it is left alone.
pub(crate) struct PeerBudget<'a> {
    rpc: &'a Rpc,
    peer: PeerId,
    until: Instant,
    limit: Duration,
    use_of: Use,
}

/// What the time was used for.
#[derive(Debug, Default)]
struct Use {
    waited: Duration,
    blocks: u64,
    bytes: u64,
}

impl<'a> PeerBudget<'a> {
    /// For the work with `peer` from now on.
    pub(crate) fn of(rpc: &'a Rpc, peer: PeerId) -> PeerBudget<'a> {
        let now = rpc.env.now();
        let limit = match rpc.backoff.is_fit(&peer, now) {
            _ if !rpc.config.mechanisms.peer_budgets => Duration::from_secs(24 * 3600),
            true => PEER_LIMIT,
            false => UNFIT_LIMIT,
        };
        PeerBudget { rpc, peer, until: now + limit, limit, use_of: Use::default() }
    }

    /// For another peer, on whom the work with this one depends.
    pub(crate) fn within(&self, peer: PeerId) -> PeerBudget<'a> {
        let mut other = PeerBudget::of(self.rpc, peer);
        other.until = other.until.min(self.until);
        other
    }

    /// What is left.
    pub(crate) fn left(&self) -> Duration {
        self.until.since(self.rpc.env.now())
    }

    /// Waits for the peer to answer; `None` if the time is over before it does.
    pub(crate) async fn wait<T>(&mut self, answer: impl Future<Output = T>) -> Option<T> {
        let began = self.rpc.env.now();
        let answer = timeout(&*self.rpc.env, self.left(), answer).await;
        self.use_of.waited += self.rpc.env.now().since(began);
        answer.ok()
    }

    /// Calls the peer; `None` if the time is over before it answers.
    ///
    /// # Errors
    /// If the call fails.
    pub(crate) async fn call<M: Method>(
        &mut self,
        to: &Node,
        request: &M,
        parts: Vec<Bytes>,
    ) -> Result<Option<Answered<M>>, CallError> {
        self.wait(self.rpc.call(to, request, parts)).await.transpose()
    }

    /// The peer has sent, taken, or proven to have, blocks.
    pub(crate) fn moved(&mut self, blocks: u64, bytes: u64) {
        self.use_of.blocks += blocks;
        self.use_of.bytes += bytes;
    }
}

impl Drop for PeerBudget<'_> {
    fn drop(&mut self) {
        if self.use_of.is_slow(self.limit) {
            tracing::info!(peer = ?self.peer, used = ?self.use_of, "a peer answers too slowly");
            self.rpc.backoff.set_back(self.peer, self.rpc.env.now(), SetBack::Slow);
        }
    }
}

impl Use {
    fn is_slow(&self, limit: Duration) -> bool {
        let secs = limit.as_secs();
        self.waited * 2 > limit
            && self.bytes < SLOW_BYTES_PER_SEC * secs
            && self.blocks < SLOW_BLOCKS_PER_SEC * secs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_is_a_peer_that_moves_next_to_nothing_while_it_is_waited_for() {
        let secs = Duration::from_secs;
        let is_slow = |waited, blocks, bytes| Use { waited, blocks, bytes }.is_slow(PEER_LIMIT);
        assert!(is_slow(secs(31), 7, 7 * 8192), "a block a call");
        assert!(!is_slow(secs(29), 0, 0), "a call or two that end late");
        assert!(!is_slow(secs(60), 30, 2 << 20), "large blocks on a poor line");
        assert!(!is_slow(secs(60), 300, 30_000), "small ones");
    }
}
