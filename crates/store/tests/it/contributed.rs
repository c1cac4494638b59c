//! Blocks move from one way of giving disk to another while the store is used.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use atoll_key::kinds::certified::{Author, Binding, Certificate, CertifiedBlock, WriterId};
use atoll_key::{BlockKind, GroupId, Key, KeyRange, SecretKey, UserId, VolumeId};
use atoll_store::disk::FaultyDisk;
use atoll_store::{
    Backend, BlockInfo, BlockStore, Busy, ContributedStore, DiskStore, Owner, StoreError,
    StoredBlock, farthest,
};

use crate::fixture::{Random, block, key, open_files, open_inline, small_config, wait};

fn log(seed: u64) -> Backend {
    Backend::Log(Arc::new(open_inline(&FaultyDisk::new(seed))))
}

fn files(dir: &Path, name: &str) -> Backend {
    Backend::Files(Arc::new(open_files(&dir.join(name))))
}

/// Moves all there is; returns how many steps that took and the backend that is empty then.
fn move_all(store: &ContributedStore, budget_bytes: u64) -> (u64, Backend) {
    let mut steps = 0;
    loop {
        steps += 1;
        let moved = wait(store.move_some(budget_bytes)).expect("moved");
        if let Some(emptied) = moved.emptied {
            return (steps, emptied);
        }
        assert!(steps < 10_000, "it ends");
    }
}

fn listed(store: &dyn BlockStore, range: KeyRange, limit: usize) -> Vec<Key> {
    let list = store.list(range, limit).expect("readable");
    list.into_iter().map(|info| info.key).collect()
}

#[test]
fn what_is_done_while_blocks_move_is_as_if_they_stood_still() {
    let temp = tempfile::tempdir().expect("a directory");
    for seed in 0..8 {
        let mut random = Random(seed);
        let dir = temp.path().join(seed.to_string());
        let backends = [log(seed), files(&dir, "one")];
        let store = ContributedStore::new(backends[0].clone(), None);
        let mut model: BTreeMap<Key, StoredBlock> = BTreeMap::new();
        for step in 0..600 {
            let n = random.below(60);
            match random.below(12) {
                0..=4 => {
                    let version = if n.is_multiple_of(3) { 0 } else { 1 + random.below(4) };
                    let len_bytes = 200 + 100 * (n % 7 + version) as usize;
                    let new = block(n, version, len_bytes, step);
                    wait(store.put(vec![new.clone()])).expect("kept");
                    let held = model.entry(new.info.key).or_insert_with(|| new.clone());
                    let lease = held.info.expires_unix_secs.max(step);
                    if new.info.version > held.info.version {
                        *held = new;
                    }
                    held.info.expires_unix_secs = lease;
                }
                5 => {
                    wait(store.remove(vec![key(n)])).expect("removed");
                    model.remove(&key(n));
                }
                6 => {
                    let lease = step + random.below(200);
                    let held = store.renew(&[key(n)], lease, Owner::NOBODY).expect("renewed");
                    assert_eq!(held, [model.contains_key(&key(n))], "seed {seed} step {step}");
                    if let Some(held) = model.get_mut(&key(n)) {
                        held.info.expires_unix_secs = held.info.expires_unix_secs.max(lease);
                    }
                }
                7 if step > 300 => {
                    wait(store.remove_expired(step - 250)).expect("removed");
                    model.retain(|_, held| held.info.expires_unix_secs >= step - 250);
                }
                8 => {
                    // There and back, whenever.
                    let to = &backends[random.below(2) as usize];
                    store.change_to(to.clone()).expect("between two backends");
                }
                9 | 10 => {
                    wait(store.move_some(random.below(5000))).expect("moved");
                }
                _ => {
                    let range = KeyRange::new(key(random.below(60)), key(random.below(60)));
                    let limit = random.below(40) as usize;
                    let mut held: Vec<Key> =
                        model.keys().filter(|key| range.contains(key)).copied().collect();
                    held.sort_by_key(|key| key.wrapping_sub(&range.after.next()));
                    held.truncate(limit);
                    assert_eq!(listed(&store, range, limit), held, "seed {seed} step {step}");
                }
            }
            let held = model.get(&key(n));
            let context = format!("seed {seed} step {step} block {n}");
            assert_eq!(wait(store.get(&key(n))).expect("read").as_ref(), held, "{context}");
            let info = store.info(&key(n)).expect("read");
            assert_eq!(info, held.map(|held| held.info), "{context}");
        }
        let all: Vec<Key> = model.keys().copied().collect();
        assert_eq!(listed(&store, KeyRange::full(), 1000), all, "seed {seed}");
    }
}

/// The story: an older version that was put again, with a longer lease, stayed alone when the
/// newer one expired in the backend it was still in.
#[test]
fn a_newer_version_does_not_expire_before_an_older_one() {
    let temp = tempfile::tempdir().expect("a directory");
    let store = ContributedStore::new(log(1), None);
    let newer = block(3, 4, 900, 10);
    wait(store.put(vec![newer.clone()])).expect("kept");
    store.change_to(files(temp.path(), "one")).expect("nothing moves");
    wait(store.put(vec![block(3, 2, 700, 50)])).expect("its lease counts");
    wait(store.remove_expired(20)).expect("nothing has expired");
    move_all(&store, u64::MAX);
    let held = wait(store.get(&newer.info.key)).expect("read").expect("held");
    assert_eq!((held.info.version, held.info.expires_unix_secs), (4, 50));
    assert_eq!(held.bytes, newer.bytes);
}

/// The story: a newer version that was put, with a shorter lease, while blocks moved expired
/// before the older one in the former backend, which was returned again then.
#[test]
fn a_newer_version_has_the_longer_lease_of_the_one_it_replaces() {
    let temp = tempfile::tempdir().expect("a directory");
    let store = ContributedStore::new(log(1), None);
    wait(store.put(vec![block(3, 2, 700, 50)])).expect("kept");
    store.change_to(files(temp.path(), "one")).expect("nothing moves");
    let newer = block(3, 4, 900, 10);
    wait(store.put(vec![newer.clone()])).expect("kept");
    wait(store.remove_expired(20)).expect("nothing has expired");
    let held = wait(store.get(&newer.info.key)).expect("read").expect("held");
    assert_eq!((held.info.version, held.info.expires_unix_secs), (4, 50));
    assert_eq!(held.bytes, newer.bytes);
}

/// Two who wrote one inode at once, and both of them joined.
fn certified() -> [StoredBlock; 3] {
    let secret = |n| SecretKey::from_seed(&[n; 32]);
    let (group, volume) = (secret(100), VolumeId(secret(101).public()));
    let binding = Binding::new(volume, [1; 16], &[GroupId(group.public())]).expect("one group");
    let create = |n: u8| {
        let user = UserId(secret(n).public());
        let certificate = Certificate::issue(&group, user, 0, 1000);
        let author =
            Author { secret: secret(n), certificate, writer: WriterId::new(&user, [n; 8]) };
        CertifiedBlock::create(binding.clone(), &author, 5000, &[n]).expect("a member")
    };
    let (one, two) = (create(1), create(2));
    let both = one.join(&two).expect("one inode");
    [one, two, both].map(|block| {
        let info = BlockInfo {
            key: block.key(),
            kind: BlockKind::Certified,
            version: block.version(),
            expires_unix_secs: 10,
            len_bytes: block.bytes().len() as u32,
            owner: Owner::NOBODY,
        };
        StoredBlock { info, bytes: block.bytes().clone() }
    })
}

/// The story: a block that was joined while blocks moved was replaced by the half of it that came
/// from the former backend: a write was lost that had been acknowledged.
#[test]
fn what_is_joined_while_blocks_move_stays_joined() {
    let temp = tempfile::tempdir().expect("a directory");
    let [one, _, both] = certified();
    let key = both.info.key;
    for there_and_back in [false, true] {
        let backends = [log(1), files(temp.path(), &format!("{there_and_back}"))];
        let store = ContributedStore::new(backends[0].clone(), None);
        wait(store.put(vec![one.clone()])).expect("kept");
        store.change_to(backends[1].clone()).expect("nothing moves");
        wait(store.put(vec![both.clone()])).expect("kept");
        if there_and_back {
            store.change_to(backends[0].clone()).expect("between two backends");
        }
        assert_eq!(wait(store.get(&key)).expect("read"), Some(both.clone()));
        wait(store.move_some(u64::MAX)).expect("moved");
        assert_eq!(wait(store.get(&key)).expect("read"), Some(both.clone()));
    }
}

/// A crash left one in each backend.
#[test]
fn what_two_backends_hold_of_a_block_is_joined_in_the_end() {
    let temp = tempfile::tempdir().expect("a directory");
    let [one, two, both] = certified();
    let backends = [log(1), files(temp.path(), "one")];
    wait(backends[0].store().put(vec![one])).expect("kept");
    wait(backends[1].store().put(vec![two])).expect("kept");
    let store = ContributedStore::new(backends[1].clone(), Some(backends[0].clone()));
    wait(store.move_some(u64::MAX)).expect("moved");
    assert_eq!(wait(store.get(&both.info.key)).expect("read"), Some(both));
}

#[test]
fn every_block_is_in_one_backend_in_the_end() {
    let temp = tempfile::tempdir().expect("a directory");
    let given: Vec<_> = (0..200).map(|n| block(n, n % 3, 1000, 9)).collect();
    let first = log(1);
    let store = ContributedStore::new(first.clone(), None);
    wait(store.put(given.clone())).expect("kept");
    drop(first);
    for name in ["one", "two"] {
        store.change_to(files(temp.path(), name)).expect("nothing moves");
        let third = files(temp.path(), &format!("{name} more"));
        assert_eq!(store.change_to(third).err(), Some(Busy), "one thing after another");
        let (steps, emptied) = move_all(&store, 10_000);
        assert!(steps > 5, "bit by bit: {steps}");
        assert!(store.former().is_none());
        assert_eq!(emptied.store().usage().blocks, 0);
        let usage = store.usage();
        assert_eq!((usage.blocks, usage.block_bytes), (200, 200_000));
    }
    store.change_to(log(2)).expect("nothing moves");
    move_all(&store, u64::MAX);
    for block in &given {
        assert_eq!(wait(store.get(&block.info.key)), Ok(Some(block.clone())));
    }
}

/// A move that was interrupted goes on where the two backends are opened again.
#[test]
fn an_interrupted_move_has_lost_nothing() {
    let temp = tempfile::tempdir().expect("a directory");
    let (disk, dir) = (FaultyDisk::new(5), temp.path());
    let given: Vec<_> = (0..150).map(|n| block(n, 0, 1000, 9)).collect();
    {
        let store = ContributedStore::new(Backend::Log(Arc::new(open_inline(&disk))), None);
        wait(store.put(given.clone())).expect("kept");
        store.change_to(files(dir, "one")).expect("nothing moves");
        wait(store.move_some(60_000)).expect("moved");
        wait(store.flush()).expect("durable");
    }
    let backends = (files(dir, "one"), Backend::Log(Arc::new(open_inline(&disk))));
    assert!(backends.0.store().usage().blocks > 0 && backends.1.store().usage().blocks > 0);
    let store = ContributedStore::new(backends.0, Some(backends.1));
    for block in &given {
        assert_eq!(wait(store.get(&block.info.key)), Ok(Some(block.clone())));
    }
    move_all(&store, u64::MAX);
    assert_eq!(store.usage().blocks, 150);
}

fn drop_farthest(store: &ContributedStore, position: Key, want_bytes: u64) -> usize {
    let chosen = store.farthest(&[position], want_bytes).expect("listed");
    let keys: Vec<Key> = chosen.into_iter().map(|info| info.key).collect();
    let count = keys.len();
    wait(store.remove(keys)).expect("removed");
    count
}

/// What has left the log must not hang on a commit that is still to come.
#[test]
fn what_has_been_moved_survives_a_crash_at_once() {
    let temp = tempfile::tempdir().expect("a directory");
    let dir = temp.path();
    let store = ContributedStore::new(log(6), None);
    wait(store.put((0..50).map(|n| block(n, 0, 1000, 9)).collect())).expect("kept");
    store.change_to(files(dir, "one")).expect("nothing moves");
    let moved = wait(store.move_some(20_000)).expect("moved");
    let left = store.former().expect("not empty").store().usage().blocks;
    assert!(moved.blocks > 0 && left == 50 - moved.blocks);
    // The disk is now as a killed process leaves it.
    std::fs::create_dir_all(dir.join("crashed")).expect("made");
    std::fs::rename(dir.join("one/blocks"), dir.join("crashed/blocks")).expect("renamed");
    std::fs::create_dir(dir.join("crashed/index")).expect("made");
    for entry in std::fs::read_dir(dir.join("one/index")).expect("there") {
        let entry = entry.expect("readable");
        let copy = dir.join("crashed/index").join(entry.file_name());
        std::fs::copy(entry.path(), copy).expect("copied");
    }
    let crashed = open_files(&dir.join("crashed"));
    assert_eq!(crashed.usage().blocks, moved.blocks);
    for info in crashed.list(KeyRange::full(), 99).expect("readable") {
        assert!(wait(crashed.get(&info.key)).expect("read").is_some());
    }
}

/// The story: a full destination makes backend by giving up copies, and one that was not mounted
/// called itself full; a node gave up all it had.
#[test]
fn a_destination_that_is_away_is_not_full() {
    let temp = tempfile::tempdir().expect("a directory");
    let [blocks, away] = ["one/blocks", "away"].map(|name| temp.path().join(name));
    let store = ContributedStore::new(log(7), None);
    wait(store.put((0..100).map(|n| block(n, 0, 1000, 9)).collect())).expect("kept");
    store.change_to(files(temp.path(), "one")).expect("nothing moves");
    wait(store.move_some(20_000)).expect("moved");
    let here = store.present().store().usage().blocks;
    std::fs::rename(&blocks, &away).expect("unmounted");
    std::fs::create_dir(&blocks).expect("an empty mount point");
    for _ in 0..3 {
        let failed = wait(store.move_some(20_000));
        assert!(matches!(failed, Err(StoreError::Away { .. })), "{failed:?}");
    }
    assert_eq!(std::fs::read_dir(&blocks).expect("there").count(), 0, "nothing is written there");
    assert_eq!(store.usage().blocks, 100 - here, "all that the log had");
    std::fs::remove_dir(&blocks).expect("removed");
    std::fs::rename(&away, &blocks).expect("mounted");
    let Backend::Files(backend) = store.present() else { panic!("files") };
    backend.look().expect("back");
    drop(backend);
    move_all(&store, u64::MAX);
    assert_eq!(store.usage().blocks, 100);
}

/// The story: a directory showed no blocks while it was away, was there again a moment later,
/// and was removed with all blocks, for it had been empty.
#[test]
fn a_former_backend_that_comes_back_is_not_taken_for_empty() {
    let temp = tempfile::tempdir().expect("a directory");
    let [blocks, away] = ["one/blocks", "away"].map(|name| temp.path().join(name));
    let store = ContributedStore::new(files(temp.path(), "one"), None);
    wait(store.put((0..100).map(|n| block(n, 0, 1000, 9)).collect())).expect("kept");
    store.change_to(log(8)).expect("nothing moves");
    std::fs::rename(&blocks, &away).expect("unmounted");
    // The first to notice reads a block and does not find it.
    assert!(matches!(wait(store.move_some(1000)), Ok(moved) if moved.emptied.is_none()));
    assert!(matches!(wait(store.move_some(1000)), Ok(moved) if moved.blocks == 0));
    std::fs::rename(&away, &blocks).expect("mounted");
    // The directory has not been looked at since.
    let moved = wait(store.move_some(1000)).expect("moved");
    assert!(moved.emptied.is_none(), "it has all the blocks");
    move_all(&store, u64::MAX);
    assert_eq!(store.present().store().usage().blocks, 100);
}

#[test]
fn a_backend_too_small_gets_the_nearest_blocks() {
    let given: Vec<_> = (0..800).map(|n| block(n, 0, 10_000, 9)).collect();
    let store = ContributedStore::new(log(1), None);
    wait(store.put(given.clone())).expect("kept");
    let small = log(2);
    small.set_capacity(6 << 20);
    store.change_to(small).expect("nothing moves");
    let position = key(77);
    let emptied = loop {
        match wait(store.move_some(1 << 20)) {
            Ok(moved) if moved.emptied.is_some() => break moved.emptied,
            Ok(_) => {}
            Err(StoreError::Full { .. }) => {
                assert_eq!(drop_farthest(&store, position, 100_000), 10);
            }
            Err(error) => panic!("{error}"),
        }
    };
    drop(emptied);
    let left = listed(&store, KeyRange::full(), 1000);
    assert!((200..620).contains(&left.len()), "{}", left.len());
    // Those dropped are the farthest of those that had not been moved when there was no backend.
    let distance = |key: &Key| position.wrapping_sub(key);
    let dropped = given.iter().map(|block| block.info.key).filter(|key| !left.contains(key));
    let nearest_dropped = dropped.map(|key| distance(&key)).min().expect("some");
    let nearer = left.iter().filter(|key| distance(key) < nearest_dropped).count();
    assert!(nearer > left.len() / 4, "{nearer} of {}", left.len());
}

#[test]
fn the_farthest_copies_go_first() {
    let store = open_inline(&FaultyDisk::new(1));
    wait(store.put((0..300).map(|n| block(n, 0, 1000, 9)).collect())).expect("kept");
    let mut random = Random(9);
    for places in [0, 1, 3, 10] {
        let positions: Vec<Key> = (0..places).map(|_| key(random.next())).collect();
        let chosen = farthest(&store, &positions, 100_000).expect("chosen");
        assert_eq!(chosen.len(), 100);
        if positions.is_empty() {
            continue;
        }
        let reach = |key: &Key| {
            let of = positions.iter().map(|place| place.wrapping_sub(key));
            of.min().expect("some place")
        };
        let farthest: Vec<Key> = chosen.iter().map(|info| reach(&info.key)).collect();
        let kept = listed(&store, KeyRange::full(), 1000);
        let kept = kept.iter().filter(|key| !chosen.iter().any(|info| info.key == **key));
        let far = kept.map(reach).max().expect("some");
        let beyond = farthest.iter().filter(|reach| **reach < far).count();
        // By pages of an arc, not one by one.
        assert!(beyond <= 64, "{beyond} of {places} places");
    }
}

/// Dynamic contribution (§2): "delete contributory files until the contribution level falls
/// below a lower watermark".
#[test]
fn a_store_shrinks_to_what_it_is_given() {
    let store = DiskStore::open_inline(Arc::new(FaultyDisk::new(3)), small_config());
    let store = Arc::new(store.expect("opens"));
    let contributed = ContributedStore::new(Backend::Log(store.clone()), None);
    wait(contributed.put((0..2000).map(|n| block(n, 0, 10_000, 9)).collect())).expect("kept");
    for capacity_bytes in [10 << 20, 3 << 20, 20 << 20, 0] {
        contributed.present().set_capacity(capacity_bytes);
        let mut steps = 0;
        while store.usage().disk_bytes > capacity_bytes && store.usage().blocks > 0 {
            let excess_bytes = store.usage().disk_bytes - capacity_bytes;
            drop_farthest(&contributed, key(1), excess_bytes);
            while wait(contributed.reclaim(u64::MAX)).expect("reclaimed") > 0 {}
            steps += 1;
            assert!(steps < 20, "{:?}", store.usage());
        }
        let usage = store.usage();
        assert!(usage.disk_bytes <= capacity_bytes + (1 << 20), "{usage:?}");
        assert!(usage.block_bytes >= capacity_bytes.min(3 << 20) / 2, "no more than need be");
        let full = wait(contributed.put((5000..5700).map(|n| block(n, 0, 10_000, 9)).collect()));
        let has_room = capacity_bytes == 20 << 20;
        assert_eq!(full.is_ok(), has_room, "{capacity_bytes}: {full:?}");
        store.check_invariants();
    }
}
