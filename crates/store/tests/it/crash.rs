//! Power loss at random moments: what was acknowledged is there, what was not is there
//! whole or not at all.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_key::{Key, KeyRange};
use atoll_store::disk::{FaultyDisk, Operation};
use atoll_store::{BlockInfo, BlockStore, DiskStore, Owner, StoreError, StoredBlock};
use futures_util::future::join_all;

use crate::fixture::{
    Random, block, contents, key, open_inline, owned, owner, recount_owners, small_config, wait,
};

const KEYS: u64 = 40;
const OWNERS: u64 = 8;
const LONGEST_LEASE: u64 = 120;

/// A block in so far as it matters here; its bytes follow from number and version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Held {
    version: u64,
    len_bytes: usize,
    /// The lease that was acknowledged as durable.
    durable_lease: u64,
    /// The lease with renewals that may be lost.
    lease: u64,
    /// The owners that it may be charged to, one bit for each owner: with a renewal its change of
    /// the owner may be lost.
    owners: u8,
}

/// What may be found under a key after power loss.
#[derive(Clone, Default, Debug)]
struct Slot {
    now: Option<Held>,
    /// It expired and was removed, which may be forgotten until the index is committed.
    maybe_back: Option<Held>,
    /// What an unacknowledged operation would have made of it, one after another.
    in_flight: Vec<Option<Held>>,
}

#[derive(Default)]
struct Expectation(BTreeMap<u64, Slot>);

impl Expectation {
    fn slot(&mut self, n: u64) -> &mut Slot {
        self.0.entry(n).or_default()
    }

    fn after_put(held: Option<Held>, new: &StoredBlock) -> Held {
        let asked = new.info.expires_unix_secs;
        let by = bit(&new.info.owner);
        match held {
            Some(held) if held.version >= new.info.version => Held {
                // A put that asks for no more than is held writes nothing.
                durable_lease: if asked > held.lease { asked } else { held.durable_lease },
                lease: held.lease.max(asked),
                owners: if asked > held.lease { by } else { held.owners },
                ..held
            },
            held => {
                let lease = held.map_or(0, |held| held.lease).max(asked);
                let (version, len_bytes) = (new.info.version, new.bytes.len());
                Held { version, len_bytes, durable_lease: lease, lease, owners: by }
            }
        }
    }

    /// Notes what an operation changes: for certain if it was acknowledged.
    fn settle(&mut self, acknowledged: bool, changes: BTreeMap<u64, Vec<Option<Held>>>) {
        for (n, states) in changes {
            let slot = self.slot(n);
            if acknowledged {
                let held = states.last().copied().flatten();
                *slot = Slot {
                    maybe_back: slot.maybe_back.filter(|_| held.is_none()),
                    ..Slot { now: held, ..Slot::default() }
                };
            } else {
                slot.in_flight = states;
            }
        }
    }

    /// Compares a reopened store and takes over what it turned out to hold.
    fn check(&mut self, store: &DiskStore) {
        store.check_invariants();
        recount_owners(store);
        let listed = store.list(KeyRange::full(), usize::MAX).expect("readable");
        assert_eq!(listed.len() as u64, store.usage().blocks);
        for n in 0..KEYS {
            let slot = self.slot(n).clone();
            let found = wait(store.get(&key(n))).expect("undamaged");
            let mut allowed = vec![slot.now];
            allowed.extend(slot.maybe_back.map(Some));
            allowed.extend(&slot.in_flight);
            let matching = allowed.into_iter().find(|state| matches(n, &found, state));
            let Some(state) = matching else {
                panic!("block {n} is {:?}, expected {slot:?}", found.map(|f| f.info));
            };
            let (lease, owners) = found
                .map_or((0, 0), |found| (found.info.expires_unix_secs, bit(&found.info.owner)));
            let now = state.map(|held| Held { durable_lease: lease, lease, owners, ..held });
            self.0.insert(n, Slot { now, ..Slot::default() });
        }
    }
}

fn bit(of: &Owner) -> u8 {
    let number = (1..=OWNERS).find(|n| owner(*n) == *of).expect("one of ours");
    1 << (number - 1)
}

fn matches(n: u64, found: &Option<StoredBlock>, state: &Option<Held>) -> bool {
    match (found, state) {
        (None, None) => true,
        (Some(found), Some(held)) => {
            // Of a block that expired and was put again the older, longer lease may come
            // back; what must not happen is that it is shorter than acknowledged.
            let lease = held.durable_lease..=LONGEST_LEASE;
            found.info.version == held.version
                && found.bytes == contents(n, held.version, held.len_bytes)
                && lease.contains(&found.info.expires_unix_secs)
                && held.owners & bit(&found.info.owner) != 0
        }
        _ => false,
    }
}

/// One random operation; `Err` once the power is off.
fn operate(
    store: &DiskStore,
    expected: &mut Expectation,
    random: &mut Random,
) -> Result<(), StoreError> {
    let some_keys = |random: &mut Random| -> Vec<u64> {
        (0..1 + random.below(5)).map(|_| random.below(KEYS)).collect()
    };
    match random.below(12) {
        0..=5 => {
            let mut changes: BTreeMap<u64, Vec<Option<Held>>> = BTreeMap::new();
            let mut batch = Vec::new();
            for n in some_keys(random) {
                let len_bytes = random.below(4000) as usize;
                let new = block(n, random.below(5), len_bytes, random.below(100));
                let new = owned(new, owner(1 + random.below(OWNERS)));
                let states = changes.entry(n).or_default();
                let before = expected.slot(n).now;
                let held = states.last().copied().unwrap_or(before);
                if !states.is_empty() && held.is_some_and(|held| new.info.version <= held.version) {
                    // Only the lease may survive, without the version it was written for.
                    let info = BlockInfo { version: 0, ..new.info };
                    let lease = StoredBlock { info, ..new.clone() };
                    let only = before.map(|before| Expectation::after_put(Some(before), &lease));
                    states.insert(0, only);
                }
                states.push(Some(Expectation::after_put(held, &new)));
                batch.push(new);
            }
            let put = wait(store.put(batch));
            expected.settle(put.is_ok(), changes);
            put
        }
        6..=7 => {
            let numbers = some_keys(random);
            let removed = wait(store.remove(numbers.iter().map(|n| key(*n)).collect()));
            let changes = numbers.into_iter().map(|n| (n, vec![None])).collect();
            expected.settle(removed.is_ok(), changes);
            removed
        }
        8 => {
            let until = random.below(LONGEST_LEASE);
            let by = owner(1 + random.below(OWNERS));
            for n in some_keys(random) {
                store.renew(&[key(n)], until, by)?;
                if let Some(held) = &mut expected.slot(n).now
                    && until > held.lease
                {
                    held.lease = until;
                    held.owners |= bit(&by);
                }
            }
            Ok(())
        }
        9 => {
            let now = random.below(30);
            wait(store.remove_expired(now))?;
            for slot in expected.0.values_mut() {
                if let Some(held) = slot.now.filter(|held| held.lease < now) {
                    // Its lease may be older on disk than in memory.
                    *slot = Slot { maybe_back: Some(held), ..Slot::default() };
                }
            }
            Ok(())
        }
        10 => wait(store.reclaim(random.below(100_000))).map(drop),
        _ => wait(store.scrub(None, 20_000)).map(drop),
    }
}

/// Several lives of one disk, each ended by power loss at a random change.
fn lose_power_again_and_again(seed: u64) {
    let disk = FaultyDisk::new(seed);
    let mut random = Random(seed ^ 0xabcd);
    let mut expected = Expectation::default();
    let mut opened_before = false;
    for _ in 0..5 {
        disk.fail_power_after(1 + random.below(120));
        let opened = DiskStore::open_inline(Arc::new(disk.clone()), small_config());
        if let Ok(store) = opened {
            assert!(!(opened_before && store.report().rebuilt_index), "{:?}", store.report());
            // If the power went while it was opened, its index may still be empty.
            opened_before |= disk.is_powered();
            if disk.is_powered() {
                expected.check(&store);
            }
            while disk.is_powered() {
                let done = operate(&store, &mut expected, &mut random);
                assert!(done.is_ok() || !disk.is_powered(), "{done:?} on a sound disk");
            }
        }
        disk.power_cycle();
    }
    let store = open_inline(&disk);
    expected.check(&store);
    for _ in 0..20 {
        operate(&store, &mut expected, &mut random).expect("a sound disk");
    }
    drop(store);
    expected.check(&open_inline(&disk));
}

#[test]
fn acknowledged_blocks_survive_power_loss_at_any_change() {
    for seed in 0..400 {
        let run = std::panic::catch_unwind(|| lose_power_again_and_again(seed));
        assert!(run.is_ok(), "seed {seed} failed: lose_power_again_and_again({seed}) repeats it");
    }
}

/// A killed process loses nothing it has written, synced or not, and answered or not.
#[test]
fn a_killed_process_loses_no_acknowledged_block() {
    for seed in 0..100 {
        let disk = FaultyDisk::new(seed);
        let mut random = Random(seed);
        let mut expected = Expectation::default();
        for _ in 0..4 {
            let store = open_inline(&disk);
            expected.check(&store);
            for _ in 0..random.below(40) {
                operate(&store, &mut expected, &mut random).expect("a sound disk");
            }
            disk.kill_process();
        }
        expected.check(&open_inline(&disk));
    }
}

/// Records that were written but not synced before a crash of the process must be synced
/// before anybody is told that they are held.
#[test]
fn what_a_reopened_store_holds_survives_power_loss_from_then_on() {
    for seed in 0..100 {
        let disk = FaultyDisk::new(seed);
        drop(open_inline(&disk));
        let store = open_inline(&disk);
        disk.fail_next(Operation::Sync, 1);
        let put = wait(store.put((0..8).map(|n| block(n, 0, 3000, 9)).collect()));
        assert!(put.is_err(), "the sync failed");
        disk.kill_process();
        let held: Vec<u64> = {
            let store = open_inline(&disk);
            (0..8)
                .filter(|n| wait(store.get(&key(*n))) == Ok(Some(block(*n, 0, 3000, 9))))
                .collect()
        };
        assert_eq!(held.len(), 8, "the page cache kept them");
        disk.power_cycle();
        let store = open_inline(&disk);
        for n in held {
            assert_eq!(wait(store.get(&key(n))), Ok(Some(block(n, 0, 3000, 9))), "seed {seed}");
        }
    }
}

/// Group commit: many batches at once, the power lost in the middle.
#[test]
fn batches_committed_together_survive_if_and_only_as_answered() {
    for seed in 0..40 {
        let disk = FaultyDisk::new(seed);
        drop(open_inline(&disk));
        let store = DiskStore::open_on(Arc::new(disk.clone()), small_config()).expect("opens");
        disk.fail_power_after(1 + Random(seed).below(200));
        let puts = (0..60).map(|i| {
            let put = store.put((i * 3..i * 3 + 3).map(|n| block(n, 0, 1500, 9)).collect());
            async move { put.await.is_ok() }
        });
        let answers = wait(join_all(puts));
        drop(store);
        disk.power_cycle();
        let store = open_inline(&disk);
        for (i, acknowledged) in (0u64..).zip(answers) {
            for n in i * 3..i * 3 + 3 {
                let found = wait(store.get(&key(n))).expect("undamaged");
                assert!(!acknowledged || found.is_some(), "seed {seed}: block {n} is lost");
                assert!(found.is_none_or(|found| found == block(n, 0, 1500, 9)));
            }
        }
    }
}

#[test]
fn after_a_failed_sync_nothing_is_acknowledged_until_reopened() {
    let disk = FaultyDisk::new(3);
    let store = open_inline(&disk);
    wait(store.put(vec![block(1, 0, 100, 9)])).expect("kept");
    disk.fail_next(Operation::Sync, 1);
    assert!(matches!(wait(store.put(vec![block(2, 0, 100, 9)])), Err(StoreError::Io(_))));
    assert!(matches!(wait(store.put(vec![block(3, 0, 100, 9)])), Err(StoreError::Io(_))));
    let failure = store.disk_failure().expect("it is said");
    assert!(failure.why.contains("sync"), "{failure:?}");
    assert!(matches!(wait(store.remove(vec![key(1)])), Err(StoreError::Io(_))));
    assert_eq!(wait(store.get(&key(1))), Ok(Some(block(1, 0, 100, 9))), "reads go on");
    drop(store);
    let store = open_inline(&disk);
    assert_eq!(store.disk_failure(), None);
    wait(store.put(vec![block(3, 0, 100, 9)])).expect("kept");
    assert!(wait(store.get(&key(1))).expect("readable").is_some());
}

#[test]
fn a_failed_write_refuses_its_batch_only() {
    let disk = FaultyDisk::new(4);
    let store = open_inline(&disk);
    disk.fail_next(Operation::Write, 1);
    let batch: Vec<_> = (0..4).map(|n| block(n, 0, 500, 9)).collect();
    assert!(matches!(wait(store.put(batch.clone())), Err(StoreError::Io(_))));
    assert_eq!(store.usage().blocks, 0);
    assert!(store.disk_failure().expect("it is said").why.contains("write"));
    wait(store.put(batch)).expect("kept");
    assert_eq!(store.disk_failure(), None, "it writes again");
    disk.power_cycle();
    let store = open_inline(&disk);
    assert_eq!(store.usage().blocks, 4);
    assert_eq!(store.report().damaged_bytes, 0);
}

/// The index fails to be written: everything stays readable, goes on, and survives.
#[test]
fn an_index_that_cannot_be_written_costs_nothing_but_a_replay() {
    for failing in 1..40 {
        let disk = FaultyDisk::new(failing);
        let store = open_inline(&disk);
        let keys: Vec<Key> = (0..10).map(key).collect();
        wait(store.put((0..10).map(|n| block(n, 0, 100, 9)).collect())).expect("kept");
        // `flush` writes nothing but the index here.
        disk.fail_next(if failing % 2 == 0 { Operation::Sync } else { Operation::Write }, 1);
        let flushed = wait(store.flush());
        assert!(matches!(flushed, Err(StoreError::Io(_))), "{flushed:?}");
        wait(store.put(vec![block(50, 0, 100, 9)])).expect("kept");
        assert_eq!(store.renew(&keys, 20, Owner::NOBODY), Ok(vec![true; 10]));
        wait(store.flush()).expect("the disk is sound again");
        drop(store);
        disk.power_cycle();
        let store = open_inline(&disk);
        assert_eq!(store.usage().blocks, 11);
        assert_eq!(store.info(&key(3)).expect("readable"), Some(block(3, 0, 100, 20).info));
    }
}
