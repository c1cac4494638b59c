//! What every store promises, checked over all of them by one suite.

use std::sync::Arc;

use atoll_key::kinds::counter::counter;
use atoll_key::{BlockKind, Key, KeyRange};
use atoll_store::disk::FaultyDisk;
use atoll_store::{
    Backend, BlockStore, ContributedStore, DiskStore, Holding, MemoryStore, Owner, StoreError,
    StoredBlock,
};

use crate::fixture::{
    block, contents, key, open_files, owned, owner, recount_owners, small_config, wait,
};

const NOBODY: Owner = Owner::NOBODY;

/// Runs `test` over each kind of store.
fn check(test: impl Fn(&dyn BlockStore)) {
    test(&MemoryStore::new(64 << 20));

    let inline = DiskStore::open_inline(Arc::new(FaultyDisk::new(1)), small_config());
    let inline = inline.expect("opens");
    test(&inline);
    inline.check_invariants();

    let cold = FaultyDisk::new(2);
    cold.set_cold(true);
    let threads = DiskStore::open_on(Arc::new(cold), small_config()).expect("opens");
    test(&threads);
    threads.check_invariants();

    let dir = tempfile::tempdir().expect("a directory");
    let real = DiskStore::open(dir.path(), small_config()).expect("opens");
    test(&real);
    real.check_invariants();

    let [a, b, c] = ["a", "b", "c"].map(|name| dir.path().join(name));
    let files = open_files(&a);
    test(&files);
    files.check_invariants();
    // With all blocks, and with none, in the backend that is being left.
    let contributed = ContributedStore::new(Backend::Files(Arc::new(open_files(&b))), None);
    test(&contributed);
    let other = Arc::new(open_files(&c));
    let former = Some(contributed.present());
    wait(former.iter().next().expect("one").store().remove_expired(u64::MAX)).expect("emptied");
    test(&ContributedStore::new(Backend::Files(other.clone()), former));
    other.check_invariants();
}

fn put(store: &dyn BlockStore, batch: Vec<StoredBlock>) {
    wait(store.put(batch)).expect("there is room");
}

fn get(store: &dyn BlockStore, n: u64) -> Option<StoredBlock> {
    wait(store.get(&key(n))).expect("readable")
}

#[test]
fn what_was_put_is_got_back_byte_for_byte() {
    check(|store| {
        let lens = [0, 1, 7, 8, 9, 111, 112, 4096, 65_536, 1 << 20];
        let batch: Vec<_> = (0..).zip(lens).map(|(n, len)| block(n, 0, len, 9)).collect();
        put(store, batch.clone());
        for (n, block) in batch.into_iter().enumerate() {
            assert_eq!(store.info(&block.info.key), Ok(Some(block.info)));
            assert_eq!(get(store, n as u64), Some(block));
        }
        assert_eq!(get(store, 999), None);
        assert_eq!(store.info(&key(999)), Ok(None));
    });
}

#[test]
fn only_a_higher_version_replaces_a_block() {
    check(|store| {
        put(store, vec![block(1, 5, 100, 10)]);
        put(store, vec![block(1, 4, 200, 10)]);
        assert_eq!(get(store, 1), Some(block(1, 5, 100, 10)));
        let mut other = block(1, 5, 100, 10);
        other.bytes = contents(77, 0, 100);
        put(store, vec![other]);
        assert_eq!(get(store, 1), Some(block(1, 5, 100, 10)), "an equal version changes nothing");
        put(store, vec![block(1, 6, 50, 10)]);
        assert_eq!(get(store, 1), Some(block(1, 6, 50, 10)));
        assert_eq!(store.usage().block_bytes, 50);
    });
}

/// A new kind touches `key::kinds` only: no store knows the counter, whose counts are replaced
/// only by much higher ones.
#[test]
fn a_kind_that_no_store_knows_is_kept_by_its_own_rules() {
    let put_count = |store: &dyn BlockStore, count| {
        let (key, bytes) = counter(b"a test's counter", count);
        let kind = BlockKind::Counter;
        let version = kind.verify(&key, &bytes).expect("valid");
        let mut block = block(1, version, bytes.len(), 10);
        (block.info.key, block.info.kind, block.bytes) = (key, kind, bytes.into());
        put(store, vec![block]);
        let held = wait(store.get(&key)).expect("readable").expect("held");
        assert_eq!(held.info.kind, kind);
        assert_eq!(kind.verify(&key, &held.bytes), Ok(held.info.version));
        held.info.version
    };
    check(|store| {
        let held = [20, 21, 29, 30, 20].map(|count| put_count(store, count));
        assert_eq!(held, [20, 20, 20, 30, 30]);
    });
}

#[test]
fn within_a_batch_the_highest_version_stays() {
    check(|store| {
        put(store, vec![block(1, 2, 30, 1), block(1, 7, 40, 1), block(1, 3, 50, 9)]);
        assert_eq!(get(store, 1), Some(block(1, 7, 40, 9)));
        assert_eq!((store.usage().blocks, store.usage().block_bytes), (1, 40));
    });
}

#[test]
fn a_lease_never_shortens() {
    check(|store| {
        let lease = || store.info(&key(1)).expect("readable").map(|i| i.expires_unix_secs);
        put(store, vec![block(1, 1, 10, 50)]);
        put(store, vec![block(1, 1, 10, 40)]);
        assert_eq!(lease(), Some(50), "put again");
        put(store, vec![block(1, 1, 10, 60)]);
        assert_eq!(lease(), Some(60), "put again for longer");
        put(store, vec![block(1, 2, 10, 55)]);
        assert_eq!(lease(), Some(60), "a new version");
        assert_eq!(store.renew(&[key(1), key(2)], 30, NOBODY), Ok(vec![true, false]));
        assert_eq!(lease(), Some(60), "renewed for less");
        assert_eq!(store.renew(&[key(2), key(1)], 90, NOBODY), Ok(vec![false, true]));
        assert_eq!(lease(), Some(90), "renewed for longer");
    });
}

#[test]
fn only_shortening_a_lease_ends_it_sooner_and_a_renewal_extends_it_again() {
    check(|store| {
        let held =
            || store.info(&key(1)).expect("readable").map(|i| (i.expires_unix_secs, i.owner));
        put(store, vec![owned(block(1, 1, 10, 50), owner(2)), block(2, 1, 10, 15)]);
        store.shorten(&[key(1), key(2), key(3)], 20).expect("readable");
        assert_eq!(held(), Some((20, owner(2))), "charged as before");
        assert_eq!(store.info(&key(2)).expect("readable").expect("held").expires_unix_secs, 15);
        assert_eq!(store.info(&key(3)), Ok(None));
        store.renew(&[key(1)], 30, NOBODY).expect("readable");
        assert_eq!(held(), Some((30, owner(2))));
        store.shorten(&[key(1)], 20).expect("readable");
        assert_eq!(wait(store.remove_expired(21)), Ok(2));
        assert_eq!(held(), None);
        assert_eq!(store.usage().blocks, 0);
    });
}

/// CFS §5.4 charges publishers for what they have stored: here, for as long as they ask.
#[test]
fn a_block_is_charged_to_whoever_gave_it_the_lease_it_has() {
    check(|store| {
        let charged = || store.info(&key(1)).expect("readable").map(|info| info.owner);
        put(store, vec![owned(block(1, 1, 10, 50), owner(2))]);
        put(store, vec![owned(block(1, 1, 10, 50), owner(3))]);
        assert_eq!(charged(), Some(owner(2)), "put again for no longer");
        put(store, vec![owned(block(1, 1, 10, 60), owner(3))]);
        assert_eq!(charged(), Some(owner(3)), "put again for longer");
        put(store, vec![owned(block(1, 1, 10, 70), NOBODY)]);
        assert_eq!(charged(), Some(owner(3)), "a longer lease from nobody");
        store.renew(&[key(1)], 80, NOBODY).expect("readable");
        assert_eq!(charged(), Some(owner(3)), "renewed by nobody");
        store.renew(&[key(1)], 75, owner(5)).expect("readable");
        assert_eq!(charged(), Some(owner(3)), "renewed for less");
        store.renew(&[key(1)], 90, owner(5)).expect("readable");
        assert_eq!(charged(), Some(owner(5)), "renewed for longer");
        put(store, vec![owned(block(1, 2, 30, 10), owner(4))]);
        assert_eq!(charged(), Some(owner(4)), "a higher version");
        let all = Holding { blocks: 1, block_bytes: 30 };
        assert_eq!(store.usage_of(&owner(4)).publisher, all);
        assert_eq!(store.usage_of(&owner(4)).ip, all);
        assert_eq!(store.owners(9).publishers, [(owner(4).publisher, all)]);
        put(store, vec![owned(block(2, 1, 7, 10), NOBODY)]);
        put(store, vec![owned(block(2, 1, 7, 11), owner(7))]);
        assert_eq!(store.usage_of(&NOBODY).publisher, Holding::default());
        let two = store.info(&key(2)).expect("readable").map(|info| info.owner);
        assert_eq!(two, Some(owner(7)), "nobody's becomes somebody's");
        assert_eq!(get(store, 2).map(|found| found.bytes), Some(block(2, 1, 7, 11).bytes));
        wait(store.remove_expired(1000)).expect("removed");
        assert_eq!(store.owners(9).ips, []);
        recount_owners(store);
    });
}

/// More renewals than may wait for a commit of the index: they are committed in between.
#[test]
fn mass_renewals_reach_every_block() {
    check(|store| {
        let keys: Vec<Key> = (0..600).map(key).collect();
        put(store, (0..600).map(|n| block(n, 0, 10, 5)).collect());
        for lease in [10, 20, 30] {
            assert_eq!(store.renew(&keys, lease, NOBODY), Ok(vec![true; 600]));
        }
        let list = store.list(KeyRange::full(), 1000).expect("readable");
        assert!(list.len() == 600 && list.iter().all(|info| info.expires_unix_secs == 30));
    });
}

#[test]
fn only_expired_blocks_are_removed_with_their_leases() {
    check(|store| {
        put(store, (0..100).map(|n| block(n, 0, 100, n)).collect());
        assert_eq!(wait(store.remove_expired(0)), Ok(0));
        assert_eq!(wait(store.remove_expired(30)), Ok(30));
        assert_eq!(wait(store.remove_expired(30)), Ok(0));
        assert_eq!((get(store, 29), store.usage().blocks), (None, 70));
        assert_eq!(get(store, 30), Some(block(30, 0, 100, 30)));
        store.renew(&[key(31)], 1000, NOBODY).expect("readable");
        put(store, vec![block(200, 0, 10, 5)]);
        assert_eq!(wait(store.remove_expired(40)), Ok(10), "all below 40 but 31, and 200");
        assert!(get(store, 31).is_some() && get(store, 200).is_none());
    });
}

#[test]
fn what_was_removed_is_gone_until_put_again() {
    check(|store| {
        put(store, vec![block(1, 0, 100, 9), block(2, 0, 100, 9)]);
        wait(store.remove(vec![key(1), key(3), key(1)])).expect("removed");
        assert_eq!((get(store, 1), get(store, 2).is_some()), (None, true));
        assert_eq!(store.usage().blocks, 1);
        put(store, vec![block(1, 0, 100, 9)]);
        assert_eq!(get(store, 1), Some(block(1, 0, 100, 9)));
    });
}

#[test]
fn a_range_is_listed_in_ring_order_whatever_is_committed() {
    check(|store| {
        for n in 0..200 {
            put(store, vec![block(n, 0, 10, n)]);
        }
        wait(store.remove((0..200).step_by(3).map(key).collect())).expect("removed");
        let mut held: Vec<Key> = (0..200).filter(|n| n % 3 != 0).map(key).collect();
        held.sort();
        let listed = |range, limit| -> Vec<Key> {
            let list = store.list(range, limit).expect("readable");
            list.into_iter().map(|info| info.key).collect()
        };
        assert_eq!(listed(KeyRange::full(), usize::MAX), held);
        let ranges = [(held[3], held[90]), (held[90], held[3]), (held[5], held[5])];
        for range in ranges.map(|(after, upto)| KeyRange::new(after, upto)) {
            let start = held.iter().position(|k| *k == range.after).expect("held");
            let ring = held[start + 1..].iter().chain(&held[..=start]).copied();
            let expected: Vec<Key> = ring.filter(|key| range.contains(key)).collect();
            for limit in [0, 1, 7, 1000] {
                let most = limit.min(expected.len());
                assert_eq!(listed(range, limit), expected[..most], "{range}, {limit}");
            }
        }
    });
}

#[test]
fn a_full_store_refuses_the_whole_batch_and_keeps_what_it_has() {
    check(|store| {
        let capacity_bytes = store.usage().capacity_bytes;
        let mut kept = 0;
        let error = loop {
            match wait(store.put((kept..kept + 4).map(|n| block(n, 0, 1 << 20, 9)).collect())) {
                Ok(()) => kept += 4,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, StoreError::Full { .. }), "{error}");
        assert!(kept >= 48, "only {kept} MiB of 64 were usable");
        assert_eq!(store.usage().blocks, kept);
        assert!(store.usage().disk_bytes <= capacity_bytes);
        assert!((kept..kept + 4).all(|n| get(store, n).is_none()));
        assert!((0..kept).all(|n| get(store, n) == Some(block(n, 0, 1 << 20, 9))));
        wait(store.remove((0..8).map(key).collect())).expect("a full store can remove");
        put(store, (100..104).map(|n| block(n, 0, 1 << 20, 9)).collect());
        assert!(store.usage().disk_bytes <= capacity_bytes);
    });
}

/// `rm` is such a put: without room for it nothing could be removed from a full ring.
#[test]
fn a_full_store_takes_new_versions_of_what_it_has() {
    check(|store| {
        let versions = |version| (0..4).map(|n| block(n, version, 1000, 9)).collect();
        put(store, versions(1));
        let mut next = 4;
        for len in [1 << 20, 100_000, 1000, 10] {
            while wait(store.put(vec![block(next, 0, len, 9)])).is_ok() {
                next += 1;
            }
        }
        for version in 2..500 {
            put(store, versions(version));
        }
        // Somewhat longer ones too.
        put(store, (0..4).map(|n| block(n, 500, 1100, 9)).collect());
        let mixed = vec![block(0, 501, 1000, 9), block(next, 0, 100_000, 9)];
        let refused = wait(store.put(mixed)).expect_err("one of them is new");
        assert!(matches!(refused, StoreError::Full { .. }), "{refused}");
        assert!((0..4).all(|n| get(store, n) == Some(block(n, 500, 1100, 9))));
    });
}

#[test]
fn a_scrub_visits_every_block_within_its_budgets() {
    check(|store| {
        put(store, (0..150).map(|n| block(n, 0, 1000, 9)).collect());
        let (mut from, mut checked, mut steps) = (None, 0, 0);
        loop {
            let step = wait(store.scrub(from, 10_000)).expect("readable");
            assert!(step.checked_bytes <= 11_000 && step.damaged.is_empty());
            checked += step.checked;
            steps += 1;
            from = step.next;
            if from.is_none() {
                break;
            }
        }
        assert_eq!(checked, 150);
        assert!(steps >= 14, "{steps}");
    });
}

#[test]
fn puts_and_gets_from_many_threads_do_not_disturb_each_other() {
    check(|store| {
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    for round in 0..20 {
                        let first = thread * 1000 + round * 4;
                        put(store, (first..first + 4).map(|n| block(n, 0, 2000, 9)).collect());
                        for n in first..first + 4 {
                            assert_eq!(get(store, n), Some(block(n, 0, 2000, 9)));
                        }
                        wait(store.remove(vec![key(first)])).expect("removed");
                        store.renew(&[key(first + 1)], 99, NOBODY).expect("readable");
                        if round % 8 == 0 {
                            wait(store.reclaim(1 << 20)).expect("reclaimed");
                        }
                    }
                });
            }
        });
        assert_eq!(store.usage().blocks, 4 * 20 * 3);
        for n in (0..4).flat_map(|t| (0..80).map(move |i| t * 1000 + i)) {
            let expected = (n % 4 != 0).then(|| block(n, 0, 2000, if n % 4 == 1 { 99 } else { 9 }));
            assert_eq!(get(store, n), expected, "block {n}");
        }
    });
}
