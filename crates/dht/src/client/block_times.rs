//! How long replicas take to send a block, and from when on one is slow or overdue.
//!
//! A block takes longer than a short answer: over an idle connection, whose window has shrunk to
//! its initial size, 64 KiB take three round trips or more (RFC 6928), and blocks requested
//! together queue behind each other. So a replica that has not sent several blocks of late gets
//! that much time before it is slow; otherwise the first blocks of every cold read would be
//! requested twice. Afterwards its own 95 % quantile counts. (CFS §5.1 asks one replica and waits.)
//!
//! Blocks in transit from a replica delay the next one from there: by a share of a round trip each
//! while the connection's window grows, and by transmission time afterwards. Replica selection goes
//! by [`BlockTimes::expected`], which counts them, so that a near replica does not get all requests
//! while other lines are idle.
//!
//! It knows neither blocks nor calls. The table is bounded as the peer book is; the count of
//! blocks in transit has no more peers than there are calls.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::PeerId;
use atoll_overlay::peer_book::{MAX_PEERS, PeerBook};

use crate::multiset::{Begun, UnderWay};

/// A block over a connection at rest takes so many short answers: 10, 20 and 40 segments
/// are sent in three, and the request goes before.
const COLD_ROUND_TRIPS: u32 = 4;
/// And so much longer: others come at the same time. A guess: 1 MiB at 100 Mbit/s.
const COLD_QUEUE: Duration = Duration::from_millis(100);
/// A replica that has sent so many blocks in a row is judged by how long those took. A guess.
const WARM_BLOCKS: u32 = 8;
/// A row ends with a pause of this. A guess: TCP's window has decayed by then (RFC 2861).
const REST: Duration = Duration::from_secs(1);
/// A replica is not overdue before its short answers would have come so many times...
const LATE_IN_SHORT_ANSWERS: u32 = 4;
/// ... nor before this many halves of the time after which it was slow.
const LATE_IN_HALVES: u32 = 3;

/// A block under way delays the next from the same replica by this share of a round trip. A
/// guess: of 64 KiB over connections of 100 Mbit/s, simulated, 0.3 was the best of a few.
const DELAY_PER_BLOCK: f64 = 0.3;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct BlockTimes {
    book: PeerBook,
    rows: Mutex<BTreeMap<PeerId, Row>>,
    /// The sender of each block that is on its way.
    under_way: UnderWay<PeerId>,
}

/// Blocks that came one after another.
#[derive(Clone, Copy, Debug)]
struct Row {
    blocks: u32,
    last: Instant,
}

impl BlockTimes {
    /// `peer` is asked for a block, until the result is dropped.
    pub(super) fn asked(&self, peer: PeerId) -> Begun<PeerId> {
        self.under_way.begin(vec![peer])
    }

    /// How long a block from `peer` will take compared with one from another: a measure to
    /// choose by, not a time. `round_trip` is that of a short answer.
    pub(super) fn expected(&self, peer: &PeerId, round_trip: Duration) -> Duration {
        let blocks = self.under_way.of(peer);
        round_trip.mul_f64(1.0 + DELAY_PER_BLOCK * blocks as f64)
    }

    /// `peer` has sent a block, which took so long.
    pub(super) fn answered(&self, peer: &PeerId, took: Duration, now: Instant) {
        self.book.answered(peer, took, now);
        let mut rows = self.rows.lock().expect("no holder of this lock panics");
        if rows.len() >= MAX_PEERS && !rows.contains_key(peer) {
            rows.retain(|_, row| now.since(row.last) < REST);
            // That many at once: the first in order makes room.
            if rows.len() >= MAX_PEERS {
                rows.pop_first();
            }
        }
        let row = rows.entry(*peer).or_insert(Row { blocks: 0, last: now });
        let blocks = if now.since(row.last) < REST { row.blocks + 1 } else { 1 };
        *row = Row { blocks, last: now };
    }

    /// After how long `peer` is slow with a block, whose short answers `short` knows.
    pub(super) fn slow_after(&self, peer: &PeerId, short: &PeerBook, now: Instant) -> Duration {
        let usual = self.book.p95(peer);
        if self.is_warm(peer, now) {
            return usual;
        }
        usual.max(short.expected(peer) * COLD_ROUND_TRIPS + COLD_QUEUE)
    }

    /// After how long it is overdue, and has probably failed.
    pub(super) fn late_after(&self, peer: &PeerId, short: &PeerBook, now: Instant) -> Duration {
        let slow = self.slow_after(peer, short, now) * LATE_IN_HALVES / 2;
        self.book.late_after(peer).max(short.p95(peer) * LATE_IN_SHORT_ANSWERS).max(slow)
    }

    fn is_warm(&self, peer: &PeerId, now: Instant) -> bool {
        let rows = self.rows.lock().expect("no holder of this lock panics");
        let is_warm = |row: &Row| row.blocks >= WARM_BLOCKS && now.since(row.last) < REST;
        rows.get(peer).is_some_and(is_warm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(ms: u64) -> Instant {
        Instant::default() + MS * ms as u32
    }

    /// The first hedges of every cold read were for nothing: blocks were judged by what
    /// short answers take.
    #[test]
    fn who_has_sent_few_blocks_of_late_is_given_the_round_trips_of_a_cold_connection() {
        let (times, short, peer) = (BlockTimes::default(), PeerBook::default(), PeerId([1; 32]));
        (0..20).for_each(|n| short.answered(&peer, MS * 50, at(n)));
        let cold = times.slow_after(&peer, &short, at(20));
        assert!(cold >= MS * 300, "{cold:?}");
        (0..WARM_BLOCKS.into()).for_each(|n| times.answered(&peer, MS * 60, at(100 + n)));
        let warm = times.slow_after(&peer, &short, at(110));
        assert!(warm < MS * 120, "{warm:?}");
        assert!(times.late_after(&peer, &short, at(110)) > warm);
        let rested = times.slow_after(&peer, &short, at(3000));
        assert!(rested >= MS * 300, "{rested:?}");
    }

    #[test]
    fn what_is_under_way_makes_a_near_replica_seem_farther_until_it_has_come() {
        let (times, near, far) = (BlockTimes::default(), PeerId([1; 32]), PeerId([2; 32]));
        let is_nearer = || times.expected(&near, MS * 50) < times.expected(&far, MS * 100);
        let few: Vec<_> = (0..3).map(|_| times.asked(near)).collect();
        assert!(is_nearer());
        let more = times.asked(near);
        assert!(!is_nearer());
        let also_there = times.asked(far);
        assert!(is_nearer());
        drop((few, more, also_there));
        assert!(is_nearer() && times.under_way.of(&near) + times.under_way.of(&far) == 0);
    }

    #[test]
    fn no_more_peers_are_kept_than_in_the_peer_book() {
        let times = BlockTimes::default();
        for n in 0..MAX_PEERS as u32 + 100 {
            let mut id = [0; 32];
            id[..4].copy_from_slice(&n.to_be_bytes());
            times.answered(&PeerId(id), MS, at(u64::from(n) / 10));
        }
        assert_eq!(times.rows.lock().expect("a lock").len(), MAX_PEERS);
    }
}
