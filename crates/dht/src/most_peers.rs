//! Whether this node's side of the network has most of the nodes that there were of late.
//!
//! Replica sets re-form from the nodes that can be reached, so that on each side of a partition a
//! lock would find a majority of *its* replica set. Locks are therefore granted only where more
//! than half of the network's nodes are left: that is one side at most.
//!
//! The record is the most nodes that were seen; it survives a restart. It follows a network that
//! shrinks after [`SHRINK_AFTER`], and only by less than half at a time: half a network that was
//! cut off never takes itself for all there is, however long it lasts. An operator ends that
//! ([`Dht::forget_absent`](crate::Dht::forget_absent)).
//!
//! Nodes in the successor lists are counted, up to this one itself where a list goes around the
//! ring: exactly all then. Lists that are long and do not are those of a large ring, and tell the
//! number by their density, with an error of about a quarter for 16 nodes. While nodes join, that
//! estimate is far too high at times, so it counts when it has lasted for [`GROW_AFTER`]. On such a
//! ring two sides that are about equally large may both be refused, or, each for the locks of few
//! keys, both be served.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::PeerId;
use atoll_net::header::{from_header, to_header};
use atoll_overlay::{Neighbourhood, Overlay};
use minicbor::{Decode, Encode};

use crate::durable::DurableState;

/// How long fewer nodes than before must be all there are before half of those is enough. A guess:
/// longer than a night without power in one of two buildings.
const SHRINK_AFTER: Duration = Duration::from_secs(24 * 3600);

/// How long an estimate must not be lower to be believed. A guess: joining takes seconds.
const GROW_AFTER: Duration = Duration::from_secs(120);

/// A list of so many nodes that does not go around the ring is one of a large ring, and not of one
/// that is just forming. A guess: lists have 16 entries.
const LONG_LIST: usize = 12;

/// The durable record.
const RECORD: &str = "most-peers";

/// What that record holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
struct Record {
    /// The most nodes of late, this one included.
    #[n(0)]
    most: u64,
}

/// How many nodes there are, this one included.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Present {
    /// At least so many, by name; all of them if a list goes around the ring.
    Counted(u64),
    /// About so many.
    Estimated(f64),
}

impl Present {
    /// As the overlay sees it.
    pub(crate) fn of(overlay: &dyn Overlay, own: PeerId) -> Present {
        let hoods = overlay.neighbourhoods();
        let joined = || hoods.iter().filter(|hood| hood.joined);
        let all: BTreeSet<PeerId> = joined()
            .flat_map(|hood| &hood.successors)
            .map(|node| node.peer.id)
            .filter(|id| *id != own)
            .collect();
        match joined().any(goes_around) || all.len() < LONG_LIST {
            true => Present::Counted(all.len() as u64 + 1),
            false => Present::Estimated(overlay.estimated_peers()),
        }
    }

    fn count(self) -> u64 {
        match self {
            Present::Counted(count) => count,
            Present::Estimated(about) => about.round().max(1.0) as u64,
        }
    }
}

/// Whether the list of successors ends with the predecessor, or goes beyond it.
fn goes_around(hood: &Neighbourhood) -> bool {
    match &hood.predecessor {
        Some(before) => hood.successors.iter().any(|node| node.id == before.id),
        None => hood.successors.is_empty(),
    }
}

/// See the module.
pub(crate) struct MostPeers {
    state: Mutex<State>,
    /// The number that a restart would find.
    saved: futures_util::lock::Mutex<u64>,
    /// Whether an earlier run of this node has left a record.
    has_run_before: bool,
}

struct State {
    most: u64,
    /// Since when there have been fewer, and the most there have been since.
    fewer: Option<(Instant, u64)>,
    /// Since when estimates have been higher, and the lowest of them.
    more: Option<(Instant, u64)>,
}

impl MostPeers {
    /// With what an earlier run of this node has seen.
    pub(crate) fn remembering(durable: &dyn DurableState) -> MostPeers {
        let record = durable.load(RECORD).and_then(|bytes| from_header::<Record>(&bytes).ok());
        let most = record.map_or(0, |record| record.most);
        let state = Mutex::new(State { most, fewer: None, more: None });
        MostPeers { state, saved: most.into(), has_run_before: record.is_some() }
    }

    /// Whether an earlier run of this node may have granted locks.
    pub(crate) fn has_run_before(&self) -> bool {
        self.has_run_before
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Notes that `now` there are so many nodes, this one included; whether that is more than half
    /// of those there were.
    pub(crate) fn note(&self, now: Instant, seen: Present) -> bool {
        let present = seen.count();
        let mut state = self.lock();
        if present >= state.most {
            state.fewer = None;
            let (since, least) = state.more.unwrap_or((now, present));
            let least = least.min(present);
            state.more = Some((since, least));
            if matches!(seen, Present::Counted(_)) {
                (state.most, state.more) = (present, None);
            } else if now.since(since) >= GROW_AFTER {
                (state.most, state.more) = (least, Some((now, present)));
            }
            return true;
        }
        state.more = None;
        let (since, most) = state.fewer.unwrap_or((now, present));
        let most = most.max(present);
        state.fewer = Some((since, most));
        if now.since(since) > SHRINK_AFTER {
            if most * 2 > state.most {
                state.most = most;
            }
            state.fewer = (present < state.most).then_some((now, present));
        }
        present * 2 > state.most
    }

    /// The operator says that there are no more than so many.
    pub(crate) fn expect_only(&self, present: Present) {
        *self.lock() = State { most: present.count(), fewer: None, more: None };
    }

    /// Makes the record durable; whether a restart would find at least as many nodes as were seen.
    pub(crate) async fn remember(&self, durable: &dyn DurableState) -> bool {
        let mut saved = self.saved.lock().await;
        let most = self.lock().most;
        if *saved == most {
            return true;
        }
        match durable.save(RECORD, to_header(&Record { most }).to_vec()).await {
            Ok(()) => *saved = most,
            Err(error) => tracing::error!(%error, "the number of nodes could not be saved"),
        }
        *saved >= most
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::durable::MemoryState;

    fn at(hours: u64) -> Instant {
        Instant::default() + Duration::from_secs(3600 * hours)
    }

    #[test]
    fn more_than_half_of_the_nodes_are_needed() {
        for (before, left, is_enough) in [
            (1, 1, true),
            (2, 1, false),
            (5, 2, false),
            (5, 3, true),
            (11, 5, false),
            (11, 6, true),
        ] {
            let peers = MostPeers::remembering(&MemoryState::default());
            assert!(peers.note(at(0), Present::Counted(before)));
            assert_eq!(peers.note(at(1), Present::Counted(left)), is_enough, "{left} of {before}");
        }
    }

    #[test]
    fn a_network_that_shrinks_slowly_is_followed_and_a_minority_waits_for_the_operator() {
        let run = |counts: &[u64]| {
            let peers = MostPeers::remembering(&MemoryState::default());
            peers.note(at(0), Present::Counted(11));
            let noted = (1..).zip(counts).map(|(day, count)| {
                peers.note(at(48 * day), Present::Counted(*count));
                peers.note(at(48 * day + 25), Present::Counted(*count))
            });
            (noted.last(), peers)
        };
        assert_eq!(run(&[6, 4, 3, 2]).0, Some(true));
        let (last, peers) = run(&[5, 5, 5, 5]);
        assert_eq!(last, Some(false));
        peers.expect_only(Present::Counted(5));
        let note = |count| peers.note(at(1000), Present::Counted(count));
        assert!(note(3) && !note(2));
    }

    #[test]
    fn a_restart_does_not_forget_how_many_there_were() {
        let durable = MemoryState::default();
        let first = MostPeers::remembering(&durable);
        assert!(!first.has_run_before());
        first.note(at(0), Present::Counted(5));
        assert!(first.remember(&durable).now_or_never().expect("memory"));
        let second = MostPeers::remembering(&durable);
        assert!(second.has_run_before());
        let note = |count| second.note(at(0), Present::Counted(count));
        assert!(!note(2) && note(3));
    }

    /// A node that was joining recorded far more nodes than there were, and granted no lock for a day.
    #[test]
    fn an_estimate_counts_when_it_has_lasted() {
        let at = |secs| Instant::default() + Duration::from_secs(secs);
        let peers = MostPeers::remembering(&MemoryState::default());
        peers.note(at(0), Present::Estimated(500.0));
        assert!(peers.note(at(1), Present::Counted(6)));
        for (secs, about) in [(10, 100.0), (60, 80.0), (131, 90.0)] {
            peers.note(at(secs), Present::Estimated(about));
        }
        assert!(peers.note(at(132), Present::Estimated(41.0)));
        assert!(!peers.note(at(133), Present::Estimated(40.0)));
    }
}
