//! A disk without room, and the room that garbage takes.

use std::sync::Arc;
use std::time::Duration;

use atoll_store::disk::FaultyDisk;
use atoll_store::{BlockStore, DiskConfig, DiskStore, StoreError};

use crate::fixture::{Random, block, key, open_inline, small_config, wait};

#[test]
fn a_full_disk_refuses_batches_whole_and_loses_nothing() {
    for seed in 0..20 {
        let disk = FaultyDisk::new(seed);
        disk.set_capacity((4 << 20) + seed * 1000);
        let mut kept = Vec::new();
        {
            let store = open_inline(&disk);
            for batch in (0..3000u64).step_by(5) {
                match wait(store.put((batch..batch + 5).map(|n| block(n, 0, 3000, 9)).collect())) {
                    Ok(()) => kept.extend(batch..batch + 5),
                    Err(error) => assert!(matches!(error, StoreError::Full { .. }), "{error}"),
                }
            }
            assert!(kept.len() > 100, "{}", kept.len());
            assert_eq!(store.usage().blocks, kept.len() as u64);
        }
        disk.power_cycle();
        let store = open_inline(&disk);
        assert_eq!(store.usage().blocks, kept.len() as u64);
        for n in &kept {
            assert_eq!(wait(store.get(&key(*n))), Ok(Some(block(*n, 0, 3000, 9))), "block {n}");
        }
        // Room that appears is used at once.
        disk.set_capacity(u64::MAX);
        wait(store.put(vec![block(9999, 0, 3000, 9)])).expect("there is room again");
    }
}

#[test]
fn a_full_disk_takes_new_versions_of_what_is_held() {
    let disk = FaultyDisk::new(3);
    disk.set_capacity(12 << 20);
    let config = DiskConfig { free_reserve_bytes: 2 << 20, ..small_config() };
    let store = DiskStore::open_inline(Arc::new(disk.clone()), config).expect("opens");
    let versions = |version| (0..20).map(|n| block(n, version, 1000, 9)).collect();
    wait(store.put(versions(1))).expect("there is room");
    let mut next = 20;
    for len in [100_000, 3000, 10] {
        while wait(store.put(vec![block(next, 0, len, 9)])).is_ok() {
            next += 1;
        }
    }
    for version in 2..20 {
        wait(store.put(versions(version))).expect("the half of the reserve is for these");
    }
    wait(store.put(vec![block(next, 0, 3000, 9)])).expect_err("it is new");
}

#[test]
fn the_error_names_the_disk_when_that_is_what_is_full() {
    let disk = FaultyDisk::new(1);
    disk.set_capacity(4 << 20);
    let store = open_inline(&disk);
    let error = (0..3000)
        .find_map(|n| wait(store.put(vec![block(n, 0, 9000, 9)])).err())
        .expect("4 MiB do not hold 27");
    let StoreError::Full { used_bytes, capacity_bytes } = error else { panic!("{error}") };
    assert!(used_bytes <= 4 << 20 && capacity_bytes <= 4 << 20, "{used_bytes} {capacity_bytes}");
}

#[test]
fn the_capacity_is_never_exceeded_and_garbage_makes_room() {
    let disk = FaultyDisk::new(7);
    let config = DiskConfig { capacity_bytes: 8 << 20, ..small_config() };
    let store = DiskStore::open_inline(Arc::new(disk.clone()), config).expect("opens");
    let mut random = Random(7);
    let mut refused = 0;
    // Six times the capacity goes through the store, of which it holds a fraction.
    for round in 0..1600u64 {
        let n = random.below(200);
        match wait(store.put((0..10).map(|i| block(n + i * 200, round + 1, 3000, 9)).collect())) {
            Ok(()) => {}
            Err(StoreError::Full { .. }) => {
                assert_eq!(store.disk_failure(), None, "to be full is not to fail");
                refused += 1;
                wait(store.remove((0..10).map(|i| key(n + i * 200)).collect())).expect("removed");
            }
            Err(error) => panic!("{error}"),
        }
        let disk_bytes = store.usage().disk_bytes;
        assert!(disk_bytes <= 8 << 20, "round {round}: {disk_bytes}");
    }
    store.check_invariants();
    assert!(refused < 800, "{refused} of 1600 refused");
    let on_disk = (8u64 << 20).saturating_sub(store.usage().disk_bytes);
    assert!(on_disk < 8 << 20);
}

#[test]
fn reclaim_gives_back_dead_segments_and_compacts_within_its_budget() {
    let disk = FaultyDisk::new(9);
    let store = open_inline(&disk);
    for n in (0..400).step_by(4) {
        wait(store.put((n..n + 4).map(|n| block(n, 0, 4000, 9)).collect())).expect("kept");
    }
    let full = store.usage().disk_bytes;
    // The first half dies as a whole, of the second every other block.
    wait(store.remove((0..200).map(key).collect())).expect("removed");
    wait(store.remove((200..400).step_by(2).map(key).collect())).expect("removed");
    wait(store.reclaim(0)).expect("reclaimed");
    let whole = full - store.usage().disk_bytes;
    assert!((700_000..1_300_000).contains(&whole), "segments dead as a whole: {whole}");
    let freed = wait(store.reclaim(100_000)).expect("reclaimed");
    assert!((50_000..250_000).contains(&freed), "a byte copied frees one to two: {freed}");
    let freed = wait(store.reclaim(10 << 20)).expect("reclaimed");
    assert!(freed > 100_000, "{freed}");
    // A round leaves a little garbage of its own.
    let ends = (0..4).any(|_| wait(store.reclaim(10 << 20)) == Ok(0));
    assert!(ends, "reclaiming comes to an end");
    disk.power_cycle();
    let store = open_inline(&disk);
    assert_eq!(store.usage().blocks, 100);
    for n in (201..400).step_by(2) {
        assert_eq!(wait(store.get(&key(n))), Ok(Some(block(n, 0, 4000, 9))));
    }
}

#[test]
fn a_second_store_in_the_same_directory_is_refused_clearly() {
    let dir = tempfile::tempdir().expect("a directory");
    let first = DiskStore::open(dir.path(), small_config()).expect("opens");
    let second = DiskStore::open(dir.path(), small_config()).expect_err("in use");
    assert!(matches!(second, atoll_store::OpenError::Locked(_)));
    let expected = format!("the store is in use: held by process {}", std::process::id());
    assert_eq!(second.to_string(), expected);
    drop(first);
    DiskStore::open(dir.path(), small_config()).expect("free again");
}

/// The story: one call may copy 16 MiB, and segments in which more was live were never compacted,
/// nor those behind them: 1.3 GiB of blocks took 5.4 GiB.
#[test]
fn a_budget_smaller_than_a_segment_gives_back_space_all_the_same() {
    let disk = FaultyDisk::new(1);
    let store = open_inline(&disk);
    for n in 0..400 {
        wait(store.put(vec![block(n, 0, 1000, 9)])).expect("kept");
    }
    wait(store.remove((0..400).filter(|n| n % 2 == 0).map(key).collect())).expect("removed");
    let budget = 1000;
    let mut freed = 0;
    for _ in 0..400 {
        match wait(store.reclaim(budget)).expect("reclaimed") {
            0 => break,
            bytes => freed += bytes,
        }
    }
    assert!(freed > 150_000, "{freed}");
    assert_eq!(wait(store.reclaim(budget)), Ok(0), "it comes to an end");
    for n in 0..400 {
        let expected = (n % 2 == 1).then(|| block(n, 0, 1000, 9));
        assert_eq!(wait(store.get(&key(n))), Ok(expected));
    }
    store.check_invariants();
}

/// A store compacts by itself while it is used, so that garbage stays in proportion.
#[test]
#[allow(clippy::disallowed_methods)] // It waits for a thread of the store.
fn garbage_stays_in_proportion_without_being_asked_for() {
    let disk = FaultyDisk::new(1);
    let config = DiskConfig { commit_interval: Duration::from_millis(1), ..small_config() };
    let store = DiskStore::open_on(Arc::new(disk), config).expect("opens");
    for round in 0..10 {
        for n in 0..100 {
            wait(store.put(vec![block(n, round + 1, 2000, 9)])).expect("kept");
        }
    }
    let live_bytes = 100 * 2144;
    let bound_bytes = live_bytes + live_bytes / 2 + 4 * (32 << 10) + (2 << 20);
    let within = (0..6000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        store.usage().disk_bytes <= bound_bytes
    });
    assert!(within, "{:?}", store.usage());
    for n in 0..100 {
        assert_eq!(wait(store.get(&key(n))), Ok(Some(block(n, 10, 2000, 9))));
    }
}
