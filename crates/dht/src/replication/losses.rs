//! Noticing that whole replica sets have disappeared.
//!
//! A node can compare only what it and its neighbours hold. When all k holders of a block fail
//! together, no node that is left knows that the block existed, and every comparison among the
//! survivors ends without a difference. The node *before* them on the ring can still tell: its
//! successor list named them in order. If k nodes that followed each other are gone at once, the
//! blocks whose replica set they were are on no node that can be reached.
//!
//! The list judged by is the last one that was unchanged for [`SETTLED`], since only then has
//! repair had the time to give blocks to other nodes. So a loss is never missed because nodes
//! fail a minute apart; one may be reported although repair was just quick enough.
//!
//! Both the ranges reported and the settled lists survive a restart: half of a ring may be gone
//! after a power cut of all of it. A node that has just started judges by a list of an earlier run
//! only after [`SETTLED`], when all that came back with it have been found.
//!
//! **Invariant:** a range is reported until one of its nodes is seen again, or the operator says
//! that they are gone for good ([`Losses::forget`]).
//!
//! What it does not know: which blocks there were, or whether a node farther away keeps a
//! copy.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::{Key, KeyRange, PeerId};
use atoll_net::header::Capped;
use atoll_overlay::wire::{WireKey, WireNodes};
use atoll_overlay::{MAX_VIRTUAL_SERVERS, Neighbourhood, Node, distinct_peers};
use minicbor::{Decode, Encode};

use crate::durable::DurableState;
use crate::rpc::{from_header, to_header};

/// How long a successor list must have been unchanged for its blocks to have all copies. A
/// guess: some rounds of repair.
const SETTLED: Duration = Duration::from_secs(300);
/// Ranges reported at most; a successor list is far shorter.
const MAX_RANGES: usize = 256;
/// The durable record.
const RECORD: &str = "losses";

/// What the record holds.
#[derive(Encode, Decode)]
#[cbor(map)]
struct Record {
    /// As [`State::settled`].
    #[n(0)]
    settled: Capped<WireNodes, { MAX_VIRTUAL_SERVERS as usize }>,
    #[n(1)]
    ranges: Capped<LostRange, MAX_RANGES>,
}

/// A range whose whole replica set is gone.
#[derive(Clone, Encode, Decode)]
#[cbor(map)]
struct LostRange {
    #[n(0)]
    after: WireKey,
    #[n(1)]
    upto: WireKey,
    /// Keys of 32 bytes.
    #[cbor(n(2), with = "minicbor::bytes")]
    peers: Vec<u8>,
    #[n(3)]
    since_unix_ms: u64,
}

/// What has disappeared, all ranges together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Loss {
    /// Nodes gone.
    pub nodes: u32,
    /// Millionths of the ring whose blocks had all their copies on them.
    pub ring_ppm: u32,
    /// When this was first noticed, milliseconds since 1970; 0 if nothing is lost.
    pub since_unix_ms: u64,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Losses {
    state: Mutex<State>,
    /// The record as a restart would find it.
    remembered: futures_util::lock::Mutex<Vec<u8>>,
}

#[derive(Default)]
struct State {
    /// Of each virtual server, itself and its successors, when they had settled.
    settled: Vec<Vec<Node>>,
    /// The same at the last look, and since when it has been so.
    present: Vec<Vec<Node>>,
    since: Instant,
    /// Lists of an earlier run are judged by from this moment on.
    judged_from: Instant,
    /// Ranges lost, by their end.
    ranges: BTreeMap<Key, LostRange>,
}

impl LostRange {
    fn fraction(&self) -> f64 {
        KeyRange::new(self.after.0, self.upto.0).fraction()
    }

    fn peers(&self) -> impl Iterator<Item = PeerId> + '_ {
        self.peers.as_chunks().0.iter().map(|peer| PeerId(*peer))
    }
}

impl State {
    fn record(&self) -> Record {
        Record {
            settled: Capped(self.settled.iter().cloned().map(WireNodes).collect()),
            ranges: Capped(self.ranges.values().cloned().collect()),
        }
    }
}

impl Losses {
    /// What an earlier run of this node knew.
    pub(super) fn remembering(durable: &dyn DurableState, now: Instant) -> Losses {
        let bytes = durable.load(RECORD).unwrap_or_default();
        let losses = Losses { remembered: bytes.clone().into(), ..Losses::default() };
        if let Ok(record) = from_header::<Record>(&bytes) {
            let mut state = losses.lock();
            state.settled = record.settled.0.into_iter().map(|nodes| nodes.0).collect();
            let ranges = record.ranges.0.into_iter();
            state.ranges = ranges.map(|lost| (lost.upto.0, lost)).collect();
            (state.since, state.judged_from) = (now, now + SETTLED);
        }
        losses
    }

    /// Makes what is known now survive a restart.
    pub(super) async fn remember(&self, durable: &dyn DurableState) {
        let mut remembered = self.remembered.lock().await;
        let record = to_header(&self.lock().record()).to_vec();
        if *remembered == record {
            return;
        }
        match durable.save(RECORD, record.clone()).await {
            Ok(()) => *remembered = record,
            Err(error) => tracing::error!(%error, "lost replica sets could not be saved"),
        }
    }

    /// The operator says that what has disappeared will not come back.
    pub(super) fn forget(&self) {
        let mut state = self.lock();
        state.ranges.clear();
        state.settled.clear();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Takes notice of the node's surroundings; each block has `replicas` copies.
    pub(super) fn look(
        &self,
        neighbourhoods: &[Neighbourhood],
        replicas: usize,
        now: Instant,
        unix_ms: u64,
    ) {
        let list = |hood: &Neighbourhood| [&[hood.me], &hood.successors[..]].concat();
        let present: Vec<Vec<Node>> = neighbourhoods.iter().map(list).collect();
        let before = neighbourhoods.iter().filter_map(|hood| hood.predecessor.as_ref());
        let seen: BTreeSet<PeerId> =
            present.iter().flatten().chain(before).map(|node| node.peer.id).collect();
        let mut state = self.lock();
        state.ranges.retain(|_, lost| lost.peers().all(|peer| !seen.contains(&peer)));
        let is_judged = now >= state.judged_from;
        for list in state.settled.clone().iter().filter(|_| is_judged) {
            for lost in lost_ranges(list, &present, &seen, replicas, unix_ms) {
                if state.ranges.len() < MAX_RANGES {
                    state.ranges.entry(lost.upto.0).or_insert(lost);
                }
            }
        }
        if state.present != present {
            (state.present, state.since) = (present, now);
        } else if now.since(state.since) >= SETTLED {
            state.settled = present;
        }
    }

    /// What has disappeared and not come back.
    pub(super) fn report(&self) -> Loss {
        let state = self.lock();
        let peers: BTreeSet<PeerId> = state.ranges.values().flat_map(LostRange::peers).collect();
        let share: f64 = state.ranges.values().map(LostRange::fraction).sum();
        Loss {
            nodes: u32::try_from(peers.len()).expect("few nodes"),
            ring_ppm: (share * 1e6).round() as u32,
            since_unix_ms: state.ranges.values().map(|l| l.since_unix_ms).min().unwrap_or(0),
        }
    }
}

/// The ranges between two nodes of `list` whose whole replica set is gone.
fn lost_ranges(
    list: &[Node],
    present: &[Vec<Node>],
    seen: &BTreeSet<PeerId>,
    replicas: usize,
    unix_ms: u64,
) -> Vec<LostRange> {
    let Some(me) = list.first() else { return Vec::new() };
    let Some(now) = present.iter().find(|now| now[0].id == me.id) else { return Vec::new() };
    // A node farther than the present list reaches may be there.
    let reach = match now.last() {
        Some(last) if last.id != me.id => last.id.0.distance_from(&me.id.0),
        _ => me.id.0.previous().distance_from(&me.id.0),
    };
    let is_gone =
        |node: &Node| !seen.contains(&node.peer.id) && node.id.0.distance_from(&me.id.0) <= reach;
    let of = |at: usize| {
        let set = distinct_peers(&list[at..], replicas);
        let lost = set.len() == replicas && set.iter().all(is_gone);
        lost.then(|| LostRange {
            after: WireKey(list[at - 1].id.0),
            upto: WireKey(list[at].id.0),
            peers: set.iter().flat_map(|node| node.peer.id.0).collect(),
            since_unix_ms: unix_ms,
        })
    };
    (1..list.len()).filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use atoll_net::Peer;
    use futures_util::FutureExt;

    use super::*;
    use crate::durable::MemoryState;

    /// A node at `at` 256ths of the ring.
    fn node(at: u8) -> Node {
        let addr = "127.0.0.1:1".parse().expect("an address");
        let mut node = Node::of(Peer { id: PeerId([at; 32]), addr });
        let mut key = [0; 64];
        key[0] = at;
        node.id.0 = Key(key);
        node
    }

    fn around(me: u8, successors: &[u8]) -> Vec<Neighbourhood> {
        vec![Neighbourhood {
            epoch: 0,
            me: node(me),
            predecessor: Some(node(250)),
            successors: successors.iter().map(|at| node(*at)).collect(),
            joined: true,
        }]
    }

    fn at(secs: u64) -> Instant {
        Instant::default() + Duration::from_secs(secs)
    }

    fn settled(successors: &[u8]) -> Losses {
        let losses = Losses::default();
        losses.look(&around(0, successors), 3, at(0), 1);
        losses.look(&around(0, successors), 3, at(400), 1);
        losses
    }

    #[test]
    fn three_neighbours_that_vanish_together_take_their_blocks_with_them() {
        let losses = settled(&[10, 20, 30, 40, 50, 60]);
        assert_eq!(losses.report(), Loss::default());
        losses.look(&around(0, &[10, 50, 60]), 3, at(500), 7);
        // (10, 20] was on 20, 30 and 40; (20, 30] is on 50 too.
        let ring_ppm = 39_063;
        assert_eq!(losses.report(), Loss { nodes: 3, ring_ppm, since_unix_ms: 7 });
        losses.look(&around(0, &[10, 50, 60]), 3, at(2000), 9);
        assert_eq!(losses.report().since_unix_ms, 7, "told until one of them is back");
        losses.look(&around(0, &[10, 30, 50, 60]), 3, at(2100), 9);
        assert_eq!(losses.report(), Loss::default());
    }

    #[test]
    fn nodes_that_fail_a_minute_apart_are_counted_together_and_slow_ones_are_not() {
        let losses = settled(&[10, 20, 30, 40, 50, 60]);
        losses.look(&around(0, &[10, 30, 40, 50, 60]), 3, at(500), 2);
        losses.look(&around(0, &[10, 40, 50, 60]), 3, at(560), 3);
        losses.look(&around(0, &[10, 50, 60]), 3, at(620), 4);
        assert_eq!(losses.report().nodes, 3);
        let losses = settled(&[10, 20, 30, 40, 50, 60]);
        for (n, left) in [[10, 30, 40, 50, 60].as_slice(), &[10, 40, 50, 60], &[10, 50, 60]]
            .into_iter()
            .enumerate()
        {
            losses.look(&around(0, left), 3, at(1000 * (n as u64 + 1)), 5);
            losses.look(&around(0, left), 3, at(1000 * (n as u64 + 1) + 400), 5);
        }
        assert_eq!(losses.report(), Loss::default(), "repair had the time");
    }

    /// What a restart leaves of `losses`, at `secs` of the new run's clock.
    fn restarted(losses: &Losses, secs: u64) -> Losses {
        let disk = MemoryState::default();
        losses.remember(&disk).now_or_never().expect("nobody else saves");
        Losses::remembering(&disk, at(secs))
    }

    /// The node before the lost ones was restarted, and no node knew of the loss any more.
    #[test]
    fn what_is_lost_is_told_after_a_restart() {
        let losses = settled(&[10, 20, 30, 40, 50, 60]);
        losses.look(&around(0, &[10, 50, 60]), 3, at(500), 7);
        let told = losses.report();
        assert_eq!(told.nodes, 3);
        let losses = restarted(&losses, 0);
        assert_eq!(losses.report(), told);
        losses.look(&around(0, &[10, 50, 60]), 3, at(1), 9);
        assert_eq!(losses.report(), told);
        losses.look(&around(0, &[10, 40, 50, 60]), 3, at(2), 9);
        assert_eq!(losses.report(), Loss::default(), "one is back");

        let losses = settled(&[10, 20, 30, 40, 50, 60]);
        losses.look(&around(0, &[10, 50, 60]), 3, at(500), 7);
        losses.forget();
        assert_eq!(restarted(&losses, 0).report(), Loss::default(), "gone for good");
        losses.look(&around(0, &[10, 50, 60]), 3, at(600), 7);
        assert_eq!(losses.report(), Loss::default(), "and not found again");
    }

    /// The first of eight nodes, and these others of them: where their keys put them, since the
    /// record holds no positions.
    fn true_surroundings(successors: &[usize]) -> Vec<Neighbourhood> {
        let mut ring: Vec<Node> = (0..8).map(|n| Node::of(node(n).peer)).collect();
        ring.sort_by_key(|node| node.id);
        vec![Neighbourhood {
            epoch: 0,
            me: ring[0],
            predecessor: Some(ring[7]),
            successors: successors.iter().map(|n| ring[*n]).collect(),
            joined: true,
        }]
    }

    /// Power was cut for all, and came back for half of them.
    #[test]
    fn what_is_lost_while_a_node_was_off_is_noticed_when_the_others_had_time_to_come_back() {
        let losses = Losses::default();
        losses.look(&true_surroundings(&[1, 2, 3, 4, 5, 6]), 3, at(0), 1);
        losses.look(&true_surroundings(&[1, 2, 3, 4, 5, 6]), 3, at(400), 1);
        let losses = restarted(&losses, 0);
        for secs in [0, 60] {
            losses.look(&true_surroundings(&[]), 3, at(secs), 7);
            assert_eq!(losses.report(), Loss::default(), "none has been found yet");
        }
        losses.look(&true_surroundings(&[1, 5, 6]), 3, at(290), 7);
        assert_eq!(losses.report(), Loss::default());
        losses.look(&true_surroundings(&[1, 5, 6]), 3, at(310), 8);
        assert_eq!((losses.report().nodes, losses.report().since_unix_ms), (3, 8));
    }

    #[test]
    fn a_list_that_has_become_shorter_loses_nobody() {
        let losses = settled(&[10, 20, 30, 40, 50, 60]);
        losses.look(&around(0, &[10, 20]), 3, at(500), 7);
        assert_eq!(losses.report(), Loss::default(), "beyond its end nothing is known");
        losses.look(&around(0, &[]), 3, at(500), 7);
        assert_eq!(losses.report().nodes, 6, "alone on the ring");
    }
}
