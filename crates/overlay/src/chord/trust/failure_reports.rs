//! The limit on pings that failure reports may cause.
//!
//! CFS Figure 5 alerts the previous hop of a node that failed: `REPORT_FAILED`. The receiver pings
//! the reported nodes before it believes the report, so a report of sixteen nodes would turn one
//! call into sixteen. Pings are therefore limited: within ten seconds one for each reported node,
//! [`MAX_OF_ONE`] for the reports of one peer and [`MAX_TOGETHER`] for those of all peers. A
//! failure that these pings miss is detected by the next stabilize round or the next call.
//!
//! Plain data; time is an argument.

use std::collections::{BTreeMap, BTreeSet};

use atoll_env::Instant;
use atoll_key::PeerId;
use atoll_net::Peer;

use crate::chord::trust::checks::WINDOW;

/// The most pings for the reports of one peer in a [`WINDOW`]. A guess: two full reports.
pub(crate) const MAX_OF_ONE: usize = 32;
/// The most for the reports of all together. A guess: when half of all nodes have died, a node
/// of one position has some twenty dead ones in its tables.
pub(crate) const MAX_TOGETHER: usize = 96;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct FailureReports {
    began: Instant,
    caused: BTreeMap<PeerId, usize>,
    pinged: BTreeSet<Peer>,
}

impl FailureReports {
    /// Counts a ping of `reported`, which `by` says is dead, unless a limit is reached; returns
    /// whether to ping it.
    pub(crate) fn admit(&mut self, reported: Peer, by: PeerId, now: Instant) -> bool {
        if now.since(self.began) >= WINDOW {
            *self = FailureReports { began: now, ..FailureReports::default() };
        }
        let caused = self.caused.get(&by).copied().unwrap_or(0);
        let may = caused < MAX_OF_ONE && self.pinged.len() < MAX_TOGETHER;
        let is_taken = may && self.pinged.insert(reported);
        if is_taken {
            self.caused.insert(by, caused + 1);
        }
        is_taken
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
        let mut reports = FailureReports::default();
        let now = Instant(5_000_000_000);
        let mut taken = |by: u16, reported: std::ops::Range<u16>, now| {
            reported.filter(|n| reports.admit(peer(*n), id(by), now)).count()
        };
        assert_eq!(taken(1, 100..110, now), 10);
        assert_eq!(taken(2, 100..110, now), 0, "they have just been pinged");
        assert_eq!(taken(1, 100..500, now), MAX_OF_ONE - 10);
        let all: usize = (2..900).map(|by| taken(by, 500..900, now)).sum();
        assert_eq!(all, MAX_TOGETHER - MAX_OF_ONE);
        assert_eq!(taken(1, 100..110, now + WINDOW), 10);
    }
}
