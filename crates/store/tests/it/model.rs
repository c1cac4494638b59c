//! Random operations on a store and on a plain map must tell the same.

use std::collections::BTreeMap;

use atoll_key::{Key, KeyRange};
use atoll_store::disk::FaultyDisk;
use atoll_store::{BlockStore, MemoryStore, Owner, StoredBlock};
use proptest::prelude::*;

use crate::fixture::{block, key, open_inline, owned, owner, recount_owners, wait};

#[derive(Clone, Debug)]
enum Step {
    Put(Vec<(u64, u64, usize, u64, u64)>),
    Remove(Vec<u64>),
    Renew(Vec<u64>, u64, u64),
    Expire(u64),
    Reclaim(u64),
    Reopen,
    Kill,
}

fn step() -> impl Strategy<Value = Step> {
    let number = 0..24u64;
    let put = (number.clone(), 0..4u64, 0..3000usize, 0..100u64, 0..8u64);
    prop_oneof![
        6 => proptest::collection::vec(put, 1..6).prop_map(Step::Put),
        2 => proptest::collection::vec(number.clone(), 1..4).prop_map(Step::Remove),
        1 => (proptest::collection::vec(number, 1..6), 0..100u64, 0..8u64)
            .prop_map(|(keys, until, by)| Step::Renew(keys, until, by)),
        1 => (0..60u64).prop_map(Step::Expire),
        1 => (0..200_000u64).prop_map(Step::Reclaim),
        1 => Just(Step::Reopen),
        1 => Just(Step::Kill),
    ]
}

/// The rules of a store in their plainest form.
#[derive(Default)]
struct Model(BTreeMap<Key, StoredBlock>);

/// A longer lease passes the block to the owner who gives it, unless that is `NOBODY`.
fn extend(held: &mut StoredBlock, until: u64, by: Owner) {
    if until > held.info.expires_unix_secs {
        held.info.expires_unix_secs = until;
        if by != Owner::NOBODY {
            held.info.owner = by;
        }
    }
}

impl Model {
    fn put(&mut self, mut new: StoredBlock) {
        if let Some(held) = self.0.get_mut(&new.info.key) {
            if new.info.version <= held.info.version {
                extend(held, new.info.expires_unix_secs, new.info.owner);
                return;
            }
            let lease = held.info.expires_unix_secs.max(new.info.expires_unix_secs);
            new.info.expires_unix_secs = lease;
        }
        self.0.insert(new.info.key, new);
    }

    fn renew(&mut self, keys: &[Key], until: u64, by: Owner) -> Vec<bool> {
        let renew = |key| match self.0.get_mut(key) {
            Some(held) => {
                extend(held, until, by);
                true
            }
            None => false,
        };
        keys.iter().map(renew).collect()
    }

    fn expire(&mut self, now: u64) -> u64 {
        let before = self.0.len();
        self.0.retain(|_, held| held.info.expires_unix_secs >= now);
        (before - self.0.len()) as u64
    }

    fn compare(&self, store: &dyn BlockStore) {
        let infos: Vec<_> = self.0.values().map(|held| held.info).collect();
        assert_eq!(store.list(KeyRange::full(), usize::MAX), Ok(infos));
        for (key, held) in &self.0 {
            assert_eq!(wait(store.get(key)), Ok(Some(held.clone())));
        }
        let usage = store.usage();
        let bytes: u64 = self.0.values().map(|held| held.bytes.len() as u64).sum();
        assert_eq!((usage.blocks, usage.block_bytes), (self.0.len() as u64, bytes));
        recount_owners(store);
    }

    /// Does a step here and in `store`, which must answer the same.
    fn both(&mut self, store: &dyn BlockStore, step: &Step) {
        match step {
            Step::Put(blocks) => {
                let make = |(n, v, len, until, by): &(u64, u64, usize, u64, u64)| {
                    owned(block(*n, *v, *len, *until), owner(*by))
                };
                let batch: Vec<_> = blocks.iter().map(make).collect();
                wait(store.put(batch.clone())).expect("there is room");
                batch.into_iter().for_each(|block| self.put(block));
            }
            Step::Remove(numbers) => {
                let keys: Vec<Key> = numbers.iter().map(|n| key(*n)).collect();
                keys.iter().for_each(|key| drop(self.0.remove(key)));
                wait(store.remove(keys)).expect("removed");
            }
            Step::Renew(numbers, until, by) => {
                let keys: Vec<Key> = numbers.iter().map(|n| key(*n)).collect();
                let by = owner(*by);
                assert_eq!(store.renew(&keys, *until, by), Ok(self.renew(&keys, *until, by)));
            }
            Step::Expire(now) => {
                assert_eq!(wait(store.remove_expired(*now)), Ok(self.expire(*now)));
            }
            Step::Reclaim(budget) => drop(wait(store.reclaim(*budget)).expect("reclaimed")),
            Step::Reopen | Step::Kill => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn a_disk_store_is_a_map_with_rules(steps in proptest::collection::vec(step(), 1..40)) {
        let disk = FaultyDisk::new(1);
        let mut store = open_inline(&disk);
        let mut model = Model::default();
        for step in &steps {
            model.both(&store, step);
            match step {
                // A killed process loses what `renew` and `remove_expired` kept in memory.
                Step::Kill => {
                    wait(store.flush()).expect("flushed");
                    disk.kill_process();
                    drop(store);
                    store = open_inline(&disk);
                    assert!(!store.report().rebuilt_index);
                }
                Step::Reopen => {
                    drop(store);
                    store = open_inline(&disk);
                    assert_eq!(store.report().replayed_records, 0, "closed in order");
                }
                _ => {}
            }
            store.check_invariants();
            model.compare(&store);
        }
    }

    #[test]
    fn a_memory_store_is_a_map_with_rules(steps in proptest::collection::vec(step(), 1..40)) {
        let store = MemoryStore::new(1 << 30);
        let mut model = Model::default();
        for step in &steps {
            model.both(&store, step);
            model.compare(&store);
        }
    }
}
