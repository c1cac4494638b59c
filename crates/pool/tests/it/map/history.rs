//! What members were told, and whether all of it can be true.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_env::Instant;
use atoll_pool::map::PoolMap;

/// A call that was answered.
#[derive(Clone, Debug)]
struct Answered {
    begun: Instant,
    ended: Instant,
    holds: u64,
}

#[derive(Default)]
struct Told {
    /// The one map of each epoch.
    maps: BTreeMap<u64, PoolMap>,
    answered: Vec<Answered>,
    /// Maps that were proposed, each with the map that its proposer knew.
    proposed: Vec<(PoolMap, PoolMap)>,
    /// How many proposers were told that their map holds.
    won: usize,
    wrong: Vec<String>,
}

/// See the module. Clones are the same history.
#[derive(Clone, Default)]
pub(super) struct History(Arc<Mutex<Told>>);

impl History {
    pub(super) fn new(first: &PoolMap) -> History {
        let history = History::default();
        history.seen(first);
        history
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// Somebody learned that this map was decided.
    pub(super) fn seen(&self, map: &PoolMap) {
        let mut told = self.told();
        let known = told.maps.entry(map.epoch).or_insert_with(|| map.clone()).clone();
        if known != *map {
            told.wrong.push(format!("two maps of an epoch: {known:?} and {map:?}"));
        }
    }

    /// Somebody who knows `current` is about to propose `map`.
    pub(super) fn proposing(&self, map: &PoolMap, current: &PoolMap) {
        self.told().proposed.push((map.clone(), current.clone()));
    }

    /// A call was answered: this map held meanwhile.
    pub(super) fn answered(&self, begun: Instant, ended: Instant, holds: &PoolMap) {
        self.seen(holds);
        self.told().answered.push(Answered { begun, ended, holds: holds.epoch });
    }

    /// A proposer was told that its map holds.
    pub(super) fn won(&self) {
        self.told().won += 1;
    }

    pub(super) fn count_won(&self) -> usize {
        self.told().won
    }

    pub(super) fn newest(&self) -> u64 {
        self.told().maps.keys().next_back().copied().unwrap_or(0)
    }

    /// Everything that cannot be true.
    pub(super) fn judge(&self) -> Result<(), String> {
        let mut told = self.told();
        let mut wrong = std::mem::take(&mut told.wrong);
        for (epoch, map) in told.maps.iter().filter(|(epoch, _)| **epoch > 1) {
            match told.maps.get(&(epoch - 1)) {
                None => wrong.push(format!("an epoch is left out before {map:?}")),
                Some(before) if !told.proposed.contains(&(map.clone(), before.clone())) => {
                    wrong.push(format!("nobody proposed {map:?} after {before:?}"));
                }
                Some(_) => {}
            }
        }
        // In the order in which calls ended: the newest map that was known by then.
        let mut by_end = told.answered.clone();
        by_end.sort_by_key(|call| call.ended);
        let mut newest = 0;
        let known: Vec<(Instant, u64)> = by_end
            .iter()
            .map(|call| {
                newest = newest.max(call.holds);
                (call.ended, newest)
            })
            .collect();
        for call in &told.answered {
            let before = known.partition_point(|(ended, _)| *ended < call.begun);
            if before > 0 && known[before - 1].1 > call.holds {
                wrong.push(format!("{call:?} was told less than calls that ended before it"));
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use atoll_key::PeerId;
    use atoll_net::Peer;
    use atoll_pool::PoolMembers;

    fn map(epoch: u64, primary: u8) -> PoolMap {
        let peer = |n: u8| Peer { id: PeerId([n; 32]), addr: ([10, 0, 0, n], 4711).into() };
        let founding = PoolMembers::new((1..=9).map(peer).collect()).unwrap();
        let primary = PeerId([primary; 32]);
        PoolMap { epoch, primary, members: [primary].into(), ..PoolMap::first(&founding) }
    }

    fn at(ms: u64) -> Instant {
        Instant(ms * 1_000_000)
    }

    #[test]
    fn each_lie_is_found() {
        let good = || {
            let history = History::new(&map(1, 1));
            history.proposing(&map(2, 2), &map(1, 1));
            history.answered(at(1), at(5), &map(2, 2));
            history
        };
        assert_eq!(good().judge(), Ok(()));
        let two = good();
        two.seen(&map(2, 3));
        assert!(two.judge().unwrap_err().contains("two maps"));
        let old = good();
        old.answered(at(4), at(9), &map(1, 1));
        assert_eq!(old.judge(), Ok(()), "it began before");
        old.answered(at(6), at(9), &map(1, 1));
        assert!(old.judge().unwrap_err().contains("told less"));
        let made_up = good();
        made_up.seen(&map(3, 3));
        assert!(made_up.judge().unwrap_err().contains("nobody proposed"));
        let left_out = good();
        left_out.proposing(&map(4, 3), &map(3, 3));
        left_out.seen(&map(4, 3));
        assert!(left_out.judge().unwrap_err().contains("left out"));
        let forked = good();
        forked.proposing(&map(3, 3), &map(2, 9));
        forked.seen(&map(3, 3));
        assert!(forked.judge().unwrap_err().contains("nobody proposed"));
    }
}
