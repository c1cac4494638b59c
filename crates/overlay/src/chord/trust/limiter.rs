//! Limits on the work that peers may cause.
//!
//! A call of a peer may make this node dial, ping or pass on. Such work is counted by its causes in
//! windows of [`WINDOW`], and not done beyond the limits below. Keys are free and addresses are
//! not, so work is counted by address where that is known.
//!
//! CFS Figure 5 alerts the previous hop of a node that failed: `REPORT_FAILED`. The receiver pings
//! the reported nodes before it believes the report, so a report of sixteen nodes would turn one
//! call into sixteen. A failure that the pings left out would have shown is detected by the next
//! stabilize round or the next call.
//!
//! Plain data; time is an argument.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::PeerId;
use atoll_net::Peer;

/// The length of a window.
pub(crate) const WINDOW: Duration = Duration::from_secs(10);
/// The most pings for the failure reports of one peer. A guess: two full reports.
const PINGS_OF_ONE: u32 = 32;
/// The most for the reports of all together. A guess: when half of all nodes have died, a node
/// of one position has some twenty dead ones in its tables.
const PINGS_OF_ALL: u32 = 96;
/// The most introductions taken of one peer. A guess: when two rings close, a node of some virtual
/// servers passes on one for each of them.
const INTRODUCTIONS_OF_ONE: u32 = 32;
/// The most of all peers together. A guess: eight that pass on as many as they may.
const INTRODUCTIONS_OF_ALL: u32 = 256;

/// The most nodes told of their addresses, each once.
const ADDRESSES_TOLD: u32 = 32;

/// The causes by which work is counted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Cause {
    /// All peers.
    All,
    /// All peers that were not checked.
    Strangers,
    /// One peer.
    Peer(PeerId),
    /// All peers that were found at this address ([`crate::site::site`]).
    Site(IpAddr),
    /// The peer that the work is about.
    Target(Peer),
    /// False claims of this IP address, and whether the claimed peer made them itself.
    False(IpAddr, bool),
}

/// How much work each cause has made in this window.
#[derive(Debug, Default)]
pub(crate) struct Limiter {
    began: Instant,
    counts: BTreeMap<Cause, u32>,
}

impl Limiter {
    /// Clears the counts if another window begins.
    pub(crate) fn turn(&mut self, now: Instant) {
        if now.since(self.began) >= WINDOW {
            *self = Limiter { began: now, counts: BTreeMap::new() };
        }
    }

    pub(crate) fn count(&self, cause: Cause) -> u32 {
        self.counts.get(&cause).copied().unwrap_or(0)
    }

    pub(crate) fn add(&mut self, cause: Cause) {
        *self.counts.entry(cause).or_default() += 1;
    }

    /// Counts a piece of work unless that would exceed a limit; returns whether to do it.
    fn admit(&mut self, limits: &[(Cause, u32)], now: Instant) -> bool {
        self.turn(now);
        let may = limits.iter().all(|(cause, most)| self.count(*cause) < *most);
        if may {
            limits.iter().for_each(|(cause, _)| self.add(*cause));
        }
        may
    }

    /// Whether to ping `reported`, which `by` says is dead.
    pub(crate) fn admit_ping(&mut self, reported: Peer, by: PeerId, now: Instant) -> bool {
        let (one, all) = ((Cause::Peer(by), PINGS_OF_ONE), (Cause::All, PINGS_OF_ALL));
        self.admit(&[one, all, (Cause::Target(reported), 1)], now)
    }

    /// Whether to take an introduction made by this peer.
    pub(crate) fn admit_introduction(&mut self, by: PeerId, now: Instant) -> bool {
        let one = (Cause::Peer(by), INTRODUCTIONS_OF_ONE);
        self.admit(&[one, (Cause::All, INTRODUCTIONS_OF_ALL)], now)
    }

    /// Whether to tell this peer at which addresses it was seen.
    pub(crate) fn admit_addresses(&mut self, peer: PeerId, now: Instant) -> bool {
        self.admit(&[(Cause::Peer(peer), 1), (Cause::All, ADDRESSES_TOLD)], now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u16) -> PeerId {
        let mut id = [0; 32];
        id[..2].copy_from_slice(&n.to_be_bytes());
        PeerId(id)
    }

    fn peer(n: u16) -> Peer {
        Peer { id: id(n), addr: ([127, 0, 0, 1], 1).into() }
    }

    #[test]
    fn reports_cause_a_bounded_number_of_pings_by_each_peer_and_by_all() {
        let mut reports = Limiter::default();
        let now = Instant(5_000_000_000);
        let mut taken = |by: u16, reported: std::ops::Range<u16>, now| {
            reported.filter(|n| reports.admit_ping(peer(*n), id(by), now)).count() as u32
        };
        assert_eq!(taken(1, 100..110, now), 10);
        assert_eq!(taken(2, 100..110, now), 0, "they have just been pinged");
        assert_eq!(taken(1, 100..500, now), PINGS_OF_ONE - 10);
        let all: u32 = (2..900).map(|by| taken(by, 500..900, now)).sum();
        assert_eq!(all, PINGS_OF_ALL - PINGS_OF_ONE);
        assert_eq!(taken(1, 100..110, now + WINDOW), 10);
    }
}
