//! The queue of claims to be checked (CFS §4.4), and the limits on checks.
//!
//! A check is of a peer address, key and address together; the answer says how many virtual servers
//! its node runs. Virtual servers of the same peer address that are claimed meanwhile wait for the
//! same outcome.
//!
//! A check dials an address that another node has named, so the number of checks is limited
//! whatever is claimed:
//! - [`MAX_UNDER_WAY`] at a time, [`CHECKS_PER_SEC`] on average, and [`MAX_PER_SOURCE`] in ten
//!   seconds for the claims of one peer.
//! - Claims of peers that caused fewer checks lately are served first, so that a flood of claims
//!   does not delay others for long. Checked peers count together with all others at their address,
//!   since keys are free and addresses are not. Strangers, whose address is only their word, cause
//!   half of all checks at most.
//! - One claim causes at most one connection to its target, so a node that is lied to dials a third
//!   party no more often than the liar calls the node. An IP address where [`MAX_REFUTED_NAMED`]
//!   claims have proved false is not dialled until the ten seconds are over; claims of a node about
//!   itself are accepted there longer ([`MAX_REFUTED_CALLERS`]), so that others cannot keep it out
//!   by naming its address.
//!
//! Plain data; time is an argument. `W` is a caller that waits for the outcome.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use atoll_env::Instant;
use atoll_key::PeerId;
use atoll_net::Peer;

use crate::Node;
use crate::chord::trust::limiter::{Cause, Limiter};

/// The most claims of others waiting, and of this node's own questions as many.
pub(crate) const MAX_WAITING: usize = 256;
/// The most checks under way.
pub(crate) const MAX_UNDER_WAY: usize = 16;
/// How many of these are kept for this node's own questions: claims of addresses that accept a call
/// and never answer it must not stop a node from joining.
const KEPT_FOR_OWN: usize = 4;
/// The most checks under way for the claims of one peer.
const MAX_UNDER_WAY_OF_ONE: usize = 4;
/// The most checks on average. A guess: a node that joins a ring makes some forty.
pub(crate) const CHECKS_PER_SEC: u32 = 32;
/// The most checks in a burst.
pub(crate) const MAX_BURST: u32 = 128;
/// The most checks for the claims of one peer in a window of the limiter.
pub(crate) const MAX_PER_SOURCE: u32 = 64;
/// After so many false claims in a window of the limiter, each made by another peer than the
/// claimed one, no more such claims are checked at the IP address they name. A guess.
pub(crate) const MAX_REFUTED_NAMED: u32 = 16;
/// The same for claims that callers make of themselves: each costs the caller a connection.
pub(crate) const MAX_REFUTED_CALLERS: u32 = 64;
/// The most checks for the claims of strangers in a window of the limiter: half of all that are
/// possible.
pub(crate) const MAX_FOR_STRANGERS: u32 = 160;
/// The most claims of strangers waiting.
pub(crate) const MAX_STRANGERS_WAITING: usize = MAX_WAITING / 2;
/// The most checks under way for strangers.
const MAX_UNDER_WAY_FOR_STRANGERS: usize = (MAX_UNDER_WAY - KEPT_FOR_OWN) / 2;
/// The most callers that wait for one check.
const MAX_WAITERS: usize = 64;

/// The maker of a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// This node itself wants to know.
    Own,
    /// A peer that was found at this address ([`crate::site::site`]) when it was checked.
    Known(PeerId, IpAddr),
    /// A peer that was not checked.
    Stranger(PeerId),
}

impl Origin {
    fn peer(&self) -> Option<PeerId> {
        match self {
            Origin::Own => None,
            Origin::Known(peer, _) | Origin::Stranger(peer) => Some(*peer),
        }
    }

    fn is_stranger(&self) -> bool {
        matches!(self, Origin::Stranger(_))
    }
}

/// How many checks the claims of one origin have caused: all peers at its address together, and it
/// alone. Lower counts are served first; `None`, for this node's own questions, before all.
type Rank = Option<(u32, u32)>;

/// See the module.
pub(crate) struct CheckQueue<W> {
    waiting: BTreeMap<Peer, Claim<W>>,
    under_way: BTreeMap<Peer, Claim<W>>,
    /// Checks that claims have caused, and false claims.
    caused: Limiter,
    /// How many have ever been queued.
    claims: u64,
    /// Checks that may start now, and when that was last reckoned.
    allowance: f64,
    reckoned: Instant,
}

/// Claims of one peer address.
#[derive(Debug)]
pub(crate) struct Claim<W> {
    /// The peer that made it: of several, the one of the lowest rank.
    origin: Origin,
    /// Its place in the order of arrival, which decides between claims of equal rank.
    nth: u64,
    /// The virtual indices claimed: never more than there are.
    pub indices: BTreeSet<u16>,
    /// Callers that wait for the outcome.
    pub waiters: Vec<W>,
}

impl<W> Claim<W> {
    fn add(&mut self, node: &Node, waiter: Option<W>) {
        self.indices.insert(node.virtual_server.index);
        if self.waiters.len() < MAX_WAITERS {
            self.waiters.extend(waiter);
        }
    }
}

impl<W> Default for CheckQueue<W> {
    fn default() -> CheckQueue<W> {
        CheckQueue {
            waiting: BTreeMap::new(),
            under_way: BTreeMap::new(),
            caused: Limiter::default(),
            claims: 0,
            allowance: f64::from(MAX_BURST),
            reckoned: Instant::default(),
        }
    }
}

impl<W> CheckQueue<W> {
    /// Queues a check of `node`. A waiter is dropped if there is no room.
    pub(crate) fn ask(&mut self, node: Node, origin: Origin, waiter: Option<W>) {
        if let Some(claim) = self.under_way.get_mut(&node.peer) {
            claim.add(&node, waiter);
            return;
        }
        if !self.waiting.contains_key(&node.peer) {
            if !self.make_room(&node.peer, origin) {
                return;
            }
            self.claims += 1;
            let nth = self.claims;
            let claim = Claim { origin, nth, indices: BTreeSet::new(), waiters: Vec::new() };
            self.waiting.insert(node.peer, claim);
        }
        let present = self.waiting[&node.peer].origin;
        // A liar's claim of the same peer address must not delay the check for an honest peer.
        let is_sooner =
            self.rank(origin) < self.rank(present) && self.may_check(&node.peer, origin);
        let claim = self.waiting.get_mut(&node.peer).expect("it is there, or was just put there");
        claim.add(&node, waiter);
        if is_sooner {
            claim.origin = origin;
        }
    }

    /// Makes room for one more claim, if need be by dropping one of higher rank. Returns whether
    /// there is room.
    fn make_room(&mut self, peer: &Peer, origin: Origin) -> bool {
        let waits = |is: &dyn Fn(&Origin) -> bool| {
            self.waiting.values().filter(|claim| is(&claim.origin)).count()
        };
        let is_stranger = origin.is_stranger();
        let is_full = match origin {
            // This node's own questions have room of their own.
            Origin::Own => return waits(&|other| *other == Origin::Own) < MAX_WAITING,
            _ if !self.may_check(peer, origin) => return false,
            _ if waits(&|other| other.peer() == origin.peer()) >= MAX_PER_SOURCE as usize => {
                return false;
            }
            _ => {
                let too_strange =
                    is_stranger && waits(&Origin::is_stranger) >= MAX_STRANGERS_WAITING;
                too_strange || waits(&|other| *other != Origin::Own) >= MAX_WAITING
            }
        };
        if !is_full {
            return true;
        }
        let others = self.waiting.iter().filter(|(_, claim)| {
            claim.origin != Origin::Own && (!is_stranger || claim.origin.is_stranger())
        });
        let last = others.max_by_key(|(_, claim)| (self.rank(claim.origin), claim.nth));
        let later = last.filter(|(_, claim)| self.rank(claim.origin) > self.rank(origin));
        let later = later.map(|(peer, _)| *peer);
        later.is_some_and(|peer| self.waiting.remove(&peer).is_some())
    }

    /// Whether a claim of `origin` is still accepted in this window.
    fn may_check(&self, peer: &Peer, origin: Origin) -> bool {
        let Some(source) = origin.peer() else { return true };
        let calls_itself = source == peer.id;
        let most = if calls_itself { MAX_REFUTED_CALLERS } else { MAX_REFUTED_NAMED };
        let caused = |cause| self.caused.count(cause);
        caused(Cause::Peer(source)) < MAX_PER_SOURCE
            && caused(Cause::False(peer.addr.ip(), calls_itself)) < most
            && (!origin.is_stranger() || caused(Cause::Strangers) < MAX_FOR_STRANGERS)
    }

    fn rank(&self, origin: Origin) -> Rank {
        let peer = origin.peer()?;
        let alone = self.caused.count(Cause::Peer(peer));
        match origin {
            Origin::Known(_, site) => Some((self.caused.count(Cause::Site(site)), alone)),
            _ => Some((alone, alone)),
        }
    }

    /// The next peer address to check now, which is under way from then on; `None` when nothing
    /// waits or nothing more may start yet.
    pub(crate) fn next(&mut self, now: Instant) -> Option<Peer> {
        self.caused.turn(now);
        let earned = now.since(self.reckoned).as_secs_f64() * f64::from(CHECKS_PER_SEC);
        self.allowance = (self.allowance + earned).min(f64::from(MAX_BURST));
        self.reckoned = now;
        if self.under_way.len() >= MAX_UNDER_WAY || self.allowance < 1.0 {
            return None;
        }
        let startable =
            self.waiting.iter().filter(|(peer, claim)| self.may_start(peer, claim.origin));
        let next = startable.min_by_key(|(_, claim)| (self.rank(claim.origin), claim.nth));
        let next = next.map(|(peer, _)| *peer)?;
        let claim = self.waiting.remove(&next).expect("it was just found");
        self.allowance -= 1.0;
        self.count(claim.origin);
        self.under_way.insert(next, claim);
        Some(next)
    }

    fn may_start(&self, peer: &Peer, origin: Origin) -> bool {
        let under_way = |is: &dyn Fn(&Origin) -> bool| {
            self.under_way.values().filter(|claim| is(&claim.origin)).count()
        };
        origin == Origin::Own
            || (under_way(&|other| *other != Origin::Own) < MAX_UNDER_WAY - KEPT_FOR_OWN
                && under_way(&|other| other.peer() == origin.peer()) < MAX_UNDER_WAY_OF_ONE
                && (!origin.is_stranger()
                    || under_way(&Origin::is_stranger) < MAX_UNDER_WAY_FOR_STRANGERS)
                && self.may_check(peer, origin))
    }

    /// A check has started for a claim of `origin`.
    fn count(&mut self, origin: Origin) {
        let together = match origin {
            Origin::Own => return,
            Origin::Known(_, site) => Cause::Site(site),
            Origin::Stranger(_) => Cause::Strangers,
        };
        self.caused.add(together);
        origin.peer().into_iter().for_each(|peer| self.caused.add(Cause::Peer(peer)));
    }

    /// The check of a peer address has ended. Returns its claim, with the callers that wait for it.
    pub(crate) fn finished(&mut self, peer: &Peer, is_refuted: bool) -> Option<Claim<W>> {
        let claim = self.under_way.remove(peer)?;
        if is_refuted && let Some(source) = claim.origin.peer() {
            self.caused.add(Cause::False(peer.addr.ip(), source == peer.id));
        }
        Some(claim)
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests;
