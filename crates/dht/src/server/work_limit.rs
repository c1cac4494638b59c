//! Limits on the work that peers may cause here: answering some requests costs far more than
//! sending them.
//!
//! Each peer has a few requests of a kind answered at a time, and a few more are answered for all
//! peers together. The cost of an answer is a debt that is paid off at a steady rate, once for the
//! peer and once for all peers together (a token bucket each). Peers in this node's routing tables
//! have a rate of their own, so that many strangers cannot keep neighbours from being answered. A
//! peer whose debt is worth more than [`CREDIT_SECS`] is refused until the debt has shrunk.
//!
//! Not covered: a neighbour that is not in this node's tables, such as a node before its
//! predecessor, counts as a stranger.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use atoll_env::Instant;
use atoll_key::PeerId;
use atoll_net::Refusal;

use crate::multiset::Counts;

/// So many seconds of work may be done for a peer before it has to wait. A guess.
const CREDIT_SECS: u64 = 60;
/// Peers whose debts are remembered one by one. A guess; the debt of all bounds the others.
const MAX_PEERS: usize = 1024;

/// What may be done for others, in some unit of work a second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Requests answered at once.
    pub at_once: usize,
    /// Of one peer.
    pub of_one: usize,
    /// For one peer.
    pub peer: u64,
    /// For all that are not in this node's tables.
    pub strangers: u64,
    /// For all that are.
    pub known: u64,
}

impl Limits {
    /// Nothing is limited.
    pub(super) const NONE: Limits = Limits {
        at_once: usize::MAX,
        of_one: usize::MAX,
        peer: u64::MAX,
        strangers: u64::MAX,
        known: u64::MAX,
    };
}

/// The requests being answered, and the debts of peers.
#[derive(Debug)]
pub(crate) struct WorkLimiter {
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Whose requests are being answered.
    answering: Counts<PeerId>,
    peers: BTreeMap<PeerId, Debt>,
    strangers: Debt,
    known: Debt,
}

#[derive(Clone, Copy, Debug, Default)]
struct Debt {
    work: u64,
    at: Instant,
}

impl Debt {
    fn pay_off(&mut self, now: Instant, rate: u64) {
        let millis = u64::try_from(now.since(self.at).as_millis()).unwrap_or(u64::MAX);
        let paid = millis.saturating_mul(rate) / 1000;
        // Otherwise a short time would pay nothing, however often it passes.
        if paid > 0 || self.work == 0 {
            (self.work, self.at) = (self.work.saturating_sub(paid), now);
        }
    }

    fn is_within(&mut self, now: Instant, rate: u64) -> bool {
        self.pay_off(now, rate);
        self.work < rate.saturating_mul(CREDIT_SECS)
    }
}

/// A peer's permit to have a request answered, until this is dropped.
pub(crate) struct Permit<'a> {
    limiter: &'a WorkLimiter,
    peer: PeerId,
    is_known: bool,
}

impl WorkLimiter {
    pub(super) fn new(limits: Limits) -> WorkLimiter {
        WorkLimiter { limits, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Takes a permit.
    ///
    /// # Errors
    /// While an earlier request of the same peer is being answered, too many are, or too much
    /// has been done for it: the peer should ask later.
    pub(super) fn acquire(
        &self,
        peer: PeerId,
        is_known: bool,
        now: Instant,
    ) -> Result<Permit<'_>, Refusal> {
        let later = |text: &str| Err(Refusal::new(Refusal::OVERLOADED, text));
        let (mut guard, limits) = (self.lock(), &self.limits);
        let state = &mut *guard;
        if state.answering.of(&peer) >= limits.of_one {
            return later("fewer requests of this kind at a time");
        }
        if state.answering.total() >= limits.at_once {
            return later("others are being answered");
        }
        let is_free =
            state.peers.get_mut(&peer).is_none_or(|debt| debt.is_within(now, limits.peer));
        let of_all = match is_known {
            true => state.known.is_within(now, limits.known),
            false => state.strangers.is_within(now, limits.strangers),
        };
        if !is_free || !of_all {
            return later("enough work has been done for now");
        }
        state.answering.add(peer);
        Ok(Permit { limiter: self, peer, is_known })
    }
}

impl Permit<'_> {
    /// The peer's request has cost so much.
    pub(super) fn spend(&self, work: u64, now: Instant) {
        let (mut guard, limits) = (self.limiter.lock(), &self.limiter.limits);
        let state = &mut *guard;
        if state.peers.len() >= MAX_PEERS && !state.peers.contains_key(&self.peer) {
            state.peers.retain(|_, debt| {
                debt.pay_off(now, limits.peer);
                debt.work > 0
            });
            if state.peers.len() >= MAX_PEERS {
                state.peers.pop_first();
            }
        }
        let of_all = if self.is_known { &mut state.known } else { &mut state.strangers };
        let own = state.peers.entry(self.peer).or_insert(Debt { work: 0, at: now });
        for debt in [own, of_all] {
            debt.work = debt.work.saturating_add(work);
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.limiter.lock().answering.take(&self.peer);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LIMITS: Limits = Limits { at_once: 2, of_one: 1, peer: 10, strangers: 20, known: 40 };

    fn at(secs: u64) -> Instant {
        Instant::default() + Duration::from_secs(secs)
    }

    fn peer(n: u16) -> PeerId {
        let mut id = [0; 32];
        id[..2].copy_from_slice(&n.to_be_bytes());
        PeerId(id)
    }

    #[test]
    fn each_peer_has_one_request_answered_at_a_time_and_few_are_at_once() {
        let limiter = WorkLimiter::new(LIMITS);
        let permit = limiter.acquire(peer(1), false, at(0));
        assert!(permit.is_ok() && limiter.acquire(peer(1), false, at(0)).is_err());
        let other = limiter.acquire(peer(2), true, at(0));
        assert!(other.is_ok() && limiter.acquire(peer(3), true, at(0)).is_err(), "two at once");
        drop(permit);
        assert!(limiter.acquire(peer(1), false, at(0)).is_ok());
    }

    #[test]
    fn a_peer_may_have_several_requests_answered_where_the_limits_say_so() {
        let limiter = WorkLimiter::new(Limits { at_once: 3, of_one: 2, ..LIMITS });
        let first = limiter.acquire(peer(1), false, at(0));
        let second = limiter.acquire(peer(1), false, at(0));
        assert!(first.is_ok() && second.is_ok() && limiter.acquire(peer(1), false, at(0)).is_err());
        drop(first);
        assert!(limiter.acquire(peer(1), false, at(0)).is_ok());
    }

    #[test]
    fn a_peer_that_has_cost_much_waits_and_others_do_not() {
        let limiter = WorkLimiter::new(LIMITS);
        limiter.acquire(peer(1), false, at(0)).expect("free").spend(700, at(0));
        assert!(limiter.acquire(peer(1), false, at(9)).is_err());
        assert!(limiter.acquire(peer(2), false, at(9)).is_ok());
        assert!(
            limiter.acquire(peer(1), false, at(11)).is_ok(),
            "700 less 110 is a minute's worth"
        );
    }

    #[test]
    fn however_many_strangers_ask_their_work_is_bounded_and_known_peers_are_answered() {
        let limiter = WorkLimiter::new(LIMITS);
        let mut spent = 0;
        for n in 0..5000u16 {
            let now = at(u64::from(n) / 100);
            if let Ok(permit) = limiter.acquire(peer(n), false, now) {
                permit.spend(100, now);
                spent += 100;
            }
        }
        assert!(spent <= 20 * (60 + 50) + 100, "{spent}");
        assert!(limiter.acquire(peer(9000), true, at(50)).is_ok());
        assert!(limiter.lock().peers.len() <= MAX_PEERS);
    }
}
