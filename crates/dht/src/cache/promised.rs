//! Mutable blocks that this node shows without asking the ring, as long as their replicas' call-back
//! promises last (see [`crate::holdings::promises`]).
//!
//! Invariants:
//!
//! - A block is kept only if a majority of its replica set has made a promise and no replica that answered has
//!   refused one, and from before the first of them was asked for as long as those of a majority last ([`kept_time`]).
//!   That is a fifteenth less than the promise lasts by the replicas' clocks, which may run at other rates, and is
//!   measured by both clocks of this node: it may have slept, or have been stopped.
//! - Once a writer has told this node of a change, no block is kept that was asked for before: what is
//!   kept is dropped, and reads under way keep nothing. A put by this node's own clients counts as told.
//!
//! It does not know versions: what is kept is what the newest read or put had.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Moment;
use atoll_key::{Key, PeerId};
use bytes::Bytes;

use crate::blocks::HeldBlock;
use crate::rpc::PROMISE_TIME;

/// How long a block is kept: a promise's time, less what clocks may differ by.
fn kept_time(promised: Duration) -> Duration {
    promised.min(PROMISE_TIME) * 14 / 15
}

/// For how long the promises of a majority of a replica set of `size` last, if `promised` are all that were made.
pub(crate) fn promised_by_majority(mut promised: Vec<Duration>, size: usize) -> Option<Duration> {
    promised.sort_unstable_by(|a, b| b.cmp(a));
    promised.get(size / 2).copied()
}

/// Bytes of blocks that are kept, each with [`OVERHEAD_BYTES`]. A guess: some ten thousand small files.
const MAX_BYTES: usize = 32 << 20;
const OVERHEAD_BYTES: usize = 512;
/// Readers that were told, remembered. A guess.
const MAX_TOLD: usize = 4_096;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Promised {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    kept: BTreeMap<Key, Kept>,
    /// The order in which blocks were kept; those that have been replaced since are skipped.
    order: VecDeque<(u64, Key)>,
    next_place: u64,
    kept_bytes: usize,
    /// Reads and puts under way, by the number of their promises, and whether a change was told since they
    /// began.
    asking: BTreeMap<(Key, u64), bool>,
    told: BTreeSet<(PeerId, u64)>,
    told_order: VecDeque<(PeerId, u64)>,
}

#[derive(Debug)]
struct Kept {
    place: u64,
    block: HeldBlock,
    until: Moment,
}

fn cost(bytes: &Bytes) -> usize {
    bytes.len() + OVERHEAD_BYTES
}

impl State {
    fn drop_kept(&mut self, key: &Key) {
        if let Some(kept) = self.kept.remove(key) {
            self.kept_bytes -= cost(&kept.block.bytes);
        }
    }

    fn keep(&mut self, key: Key, block: HeldBlock, until: Moment) {
        self.drop_kept(&key);
        let place = self.next_place;
        self.next_place += 1;
        self.kept_bytes += cost(&block.bytes);
        self.kept.insert(key, Kept { place, block, until });
        self.order.push_back((place, key));
        while self.kept_bytes > MAX_BYTES || self.order.len() > 2 * self.kept.len() + 16 {
            let Some((place, key)) = self.order.pop_front() else { break };
            if self.kept.get(&key).is_some_and(|kept| kept.place == place) {
                match self.kept_bytes > MAX_BYTES {
                    true => self.drop_kept(&key),
                    // Only the list is too long: it stays, as if it were kept just now.
                    false => self.order.push_back((place, key)),
                }
            }
        }
    }

    fn changed(&mut self, key: &Key, but: Option<u64>) {
        self.drop_kept(key);
        for ((_, number), is_broken) in self.asking.range_mut((*key, 0)..=(*key, u64::MAX)) {
            *is_broken |= but != Some(*number);
        }
    }
}

impl Promised {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// The block, if it can be shown without asking.
    pub(crate) fn get(&self, key: &Key, now: Moment) -> Option<HeldBlock> {
        let state = self.state();
        let kept = state.kept.get(key).filter(|kept| !now.until(kept.until).is_zero())?;
        Some(kept.block.clone())
    }

    /// A read or put of the block begins `now`, which asks for promises of this `number`.
    pub(crate) fn ask(&self, key: Key, number: u64, now: Moment) -> Asking {
        self.state().asking.insert((key, number), false);
        Asking { state: self.state.clone(), place: (key, number), asked: now }
    }

    /// A writer says that it has changed the block.
    pub(crate) fn changed(&self, key: &Key) {
        self.state().changed(key, None);
    }

    /// Whether that reader was not told before that its promise of this number has been broken.
    pub(crate) fn is_untold(&self, reader: PeerId, number: u64) -> bool {
        !self.state().told.contains(&(reader, number))
    }

    /// The reader was told, or its promise has ended.
    pub(crate) fn told(&self, reader: PeerId, number: u64) {
        let mut state = self.state();
        if state.told.insert((reader, number)) {
            state.told_order.push_back((reader, number));
            if state.told_order.len() > MAX_TOLD
                && let Some(oldest) = state.told_order.pop_front()
            {
                state.told.remove(&oldest);
            }
        }
    }
}

/// A read or put that asks for promises, until it is dropped.
pub(crate) struct Asking {
    state: Arc<Mutex<State>>,
    place: (Key, u64),
    asked: Moment,
}

impl Asking {
    /// The number of the promises.
    pub(crate) fn number(&self) -> u64 {
        self.place.1
    }

    /// Keeps the block that was read, unless a change of it was told meanwhile. A majority of its replicas has promised to
    /// tell of changes for as long as `promised`.
    pub(crate) fn keep(self, block: HeldBlock, promised: Duration) {
        let mut state = self.state.lock().expect("no holder of this lock panics");
        if state.asking.get(&self.place) == Some(&false) {
            state.keep(self.place.0, block, self.asked + kept_time(promised));
        }
    }

    /// What was put by one of this node's clients changes what others of them have read.
    pub(crate) fn changed(&self) {
        let mut state = self.state.lock().expect("no holder of this lock panics");
        state.changed(&self.place.0, Some(self.place.1));
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        let mut state = self.state.lock().expect("no holder of this lock panics");
        state.asking.remove(&self.place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> Key {
        Key::hashed([n; 32])
    }

    fn block(version: u64, len: usize) -> HeldBlock {
        HeldBlock { version, bytes: vec![0; len].into() }
    }

    fn at(secs: u64) -> Moment {
        Moment::default() + Duration::from_secs(secs)
    }

    fn kept(promised: &Promised, n: u8, secs: u64) -> Option<u64> {
        promised.get(&key(n), at(secs)).map(|held| held.version)
    }

    #[test]
    fn a_block_is_kept_for_less_than_the_promise_lasts() {
        let promised = Promised::default();
        promised.ask(key(1), 7, at(0)).keep(block(3, 10), PROMISE_TIME);
        assert_eq!((kept(&promised, 1, 13), kept(&promised, 1, 14)), (Some(3), None));
        assert!(promised.state().asking.is_empty());
        let woken = Moment { unix_ms: 14_000, ..at(1) };
        promised.ask(key(1), 8, at(0)).keep(block(3, 10), PROMISE_TIME);
        assert!(promised.get(&key(1), woken).is_none(), "this node has slept");
        let short = Duration::from_secs(3);
        promised.ask(key(1), 9, at(0)).keep(block(3, 10), short);
        let ms = |ms| Moment::default() + Duration::from_millis(ms);
        let is_kept = |now| promised.get(&key(1), now).is_some();
        assert_eq!([ms(2_799), ms(2_800)].map(is_kept), [true, false], "less than was promised");
        promised.ask(key(1), 10, at(0)).keep(block(3, 10), Duration::MAX);
        assert_eq!((kept(&promised, 1, 13), kept(&promised, 1, 14)), (Some(3), None));
    }

    #[test]
    fn what_a_majority_has_promised_for_that_long_counts() {
        let secs = |secs: &[u64]| secs.iter().map(|n| Duration::from_secs(*n)).collect();
        let lasts =
            |all: &[u64], size| promised_by_majority(secs(all), size).map(|time| time.as_secs());
        assert_eq!(lasts(&[2, 15, 4], 3), Some(4));
        assert_eq!((lasts(&[15, 2], 3), lasts(&[15], 3), lasts(&[], 1)), (Some(2), None, None));
        assert_eq!(
            (lasts(&[5, 6], 4), lasts(&[5, 6, 7], 4), lasts(&[9], 1)),
            (None, Some(5), Some(9))
        );
    }

    #[test]
    fn a_change_drops_what_is_kept_and_what_was_asked_for_before() {
        let promised = Promised::default();
        promised.ask(key(1), 1, at(0)).keep(block(1, 10), PROMISE_TIME);
        let (before, other) = (promised.ask(key(1), 2, at(1)), promised.ask(key(2), 3, at(1)));
        promised.changed(&key(1));
        let after = promised.ask(key(1), 4, at(1));
        assert_eq!(kept(&promised, 1, 1), None);
        before.keep(block(1, 10), PROMISE_TIME);
        assert_eq!(kept(&promised, 1, 1), None, "it was asked for before the change");
        other.keep(block(9, 10), PROMISE_TIME);
        after.keep(block(2, 10), PROMISE_TIME);
        assert_eq!((kept(&promised, 1, 1), kept(&promised, 2, 1)), (Some(2), Some(9)));
    }

    #[test]
    fn a_put_takes_the_place_of_what_was_read_while_it_was_under_way() {
        let promised = Promised::default();
        let (put, read) = (promised.ask(key(1), 1, at(0)), promised.ask(key(1), 2, at(0)));
        promised.ask(key(1), 3, at(0)).keep(block(1, 10), PROMISE_TIME);
        put.changed();
        assert_eq!(kept(&promised, 1, 0), None);
        read.keep(block(1, 10), PROMISE_TIME);
        assert_eq!(kept(&promised, 1, 0), None);
        put.keep(block(2, 10), PROMISE_TIME);
        assert_eq!(kept(&promised, 1, 0), Some(2));
    }

    #[test]
    fn what_is_kept_is_bounded_and_the_oldest_goes() {
        let promised = Promised::default();
        for n in 0..4 {
            promised.ask(key(n), 0, at(0)).keep(block(1, MAX_BYTES / 3), PROMISE_TIME);
        }
        assert_eq!([0, 1, 2, 3].map(|n| kept(&promised, n, 0)), [None, None, Some(1), Some(1)]);
        for _ in 0..1_000 {
            promised.ask(key(3), 0, at(0)).keep(block(2, 10), PROMISE_TIME);
        }
        let state = promised.state();
        assert!(state.order.len() < 50 && state.kept.len() == 2);
        assert_eq!(state.kept_bytes, MAX_BYTES / 3 + 10 + 2 * OVERHEAD_BYTES);
    }

    #[test]
    fn a_reader_is_told_once_of_each_of_its_promises() {
        let (promised, reader) = (Promised::default(), PeerId([1; 32]));
        assert!(promised.is_untold(reader, 1));
        promised.told(reader, 1);
        assert!(!promised.is_untold(reader, 1) && promised.is_untold(reader, 2));
        (2..2 + MAX_TOLD as u64).for_each(|number| promised.told(reader, number));
        assert!(promised.is_untold(reader, 1), "forgotten: it is told once more");
        assert_eq!(promised.state().told.len(), MAX_TOLD);
    }
}
