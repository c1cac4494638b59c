//! Summaries of stores with random histories must be those of plain sets.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use atoll_key::{BlockKind, Key, KeyRange};
use atoll_store::disk::FaultyDisk;
use atoll_store::{
    Backend, BlockInfo, BlockStore, ContributedStore, DiskStore, FileStore, MAX_PARTS, MemoryStore,
    Merged, Owner, StoredBlock, Summary,
};
use bytes::Bytes;
use proptest::prelude::*;

use crate::fixture::{Random, file_config, open_inline, wait};

/// Runs of keys that look alike: spread over the ring, or equal but for a few digits.
fn key(family: u8, n: u64) -> Key {
    let spread = Random(n).next().to_be_bytes();
    let mut bytes = match family {
        0 => [0; 64],
        family => [family; 64],
    };
    match family {
        0 => bytes[..8].copy_from_slice(&spread),
        1 => bytes[62..].copy_from_slice(&(n as u16).to_be_bytes()),
        _ => {
            bytes[20] = (n % 3) as u8;
            bytes[30..38].copy_from_slice(&spread);
        }
    }
    Key(bytes)
}

#[derive(Clone, Debug)]
struct Run {
    family: u8,
    first: u64,
    count: u64,
}

impl Run {
    fn keys(&self) -> Vec<Key> {
        (self.first..self.first + self.count).map(|n| key(self.family, n)).collect()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Put(Run, u64, u64),
    Remove(Run),
    Renew(Run, u64),
    Expire(u64),
    Other,
    Ask(u64, u64),
}

fn run() -> impl Strategy<Value = Run> {
    (0..3u8, 0..600u64, 1..400u64).prop_map(|(family, first, count)| Run { family, first, count })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (run(), 0..3u64, 0..100u64).prop_map(|(run, v, until)| Step::Put(run, v, until)),
        2 => run().prop_map(Step::Remove),
        2 => (run(), 0..120u64).prop_map(|(run, until)| Step::Renew(run, until)),
        1 => (0..60u64).prop_map(Step::Expire),
        2 => Just(Step::Other),
        5 => (0..110u64, any::<u64>()).prop_map(|(now, seed)| Step::Ask(now, seed)),
    ]
}

fn digits(key: &Key) -> Vec<u8> {
    key.0.iter().flat_map(|byte| [byte >> 4, byte & 15]).collect()
}

/// The digest as its definition says.
fn digest(items: &[(Key, u64)]) -> [u8; 32] {
    let mut message = Vec::new();
    if items.len() <= 64 {
        message.extend_from_slice(b"atoll summary list");
        for (key, version) in items {
            message.extend_from_slice(&key.0);
            message.extend_from_slice(&version.to_be_bytes());
        }
    } else {
        let all: Vec<Vec<u8>> = items.iter().map(|(key, _)| digits(key)).collect();
        let differ = (0..128).find(|i| all.iter().any(|digits| digits[*i] != all[0][*i]));
        let differ = differ.expect("keys differ");
        message.extend_from_slice(b"atoll summary branch");
        for digit in 0..16 {
            let part = items.iter().zip(&all).filter(|(_, digits)| digits[differ] == digit);
            let part: Vec<(Key, u64)> = part.map(|(item, _)| *item).collect();
            if !part.is_empty() {
                message.push(digit);
                message.extend_from_slice(&(part.len() as u64).to_be_bytes());
                message.extend_from_slice(&digest(&part));
            }
        }
    }
    blake3::hash(&message).into()
}

/// Version and lease of each block held.
#[derive(Default)]
struct Model(BTreeMap<Key, (u64, u64)>);

impl Model {
    fn summary(&self, range: &KeyRange, now: u64) -> Summary {
        let live = self.0.iter().filter(|(key, held)| range.contains(key) && held.1 > now);
        let items: Vec<(Key, u64)> = live.map(|(key, held)| (*key, held.0)).collect();
        match items.len() as u64 {
            0 => Summary::EMPTY,
            count => Summary { digest: digest(&items), count },
        }
    }

    fn put(&mut self, store: &dyn BlockStore, run: &Run, version: u64, until: u64) {
        let block = |key| {
            let kind = if version == 0 { BlockKind::Content } else { BlockKind::Signed };
            let (expires_unix_secs, owner) = (until, Owner::NOBODY);
            let info = BlockInfo { key, kind, version, expires_unix_secs, len_bytes: 1, owner };
            StoredBlock { info, bytes: Bytes::from_static(b"x") }
        };
        let keys = run.keys();
        wait(store.put(keys.iter().map(|key| block(*key)).collect())).expect("there is room");
        for key in keys {
            let held = self.0.entry(key).or_insert((version, until));
            *held = (held.0.max(version), held.1.max(until));
        }
    }

    fn renew(&mut self, store: &dyn BlockStore, run: &Run, until: u64) {
        store.renew(&run.keys(), until, Owner::NOBODY).expect("renewed");
        for key in run.keys() {
            if let Some(held) = self.0.get_mut(&key) {
                held.1 = held.1.max(until);
            }
        }
    }

    /// Compares summaries of ranges of all kinds, and their parts.
    fn compare(&self, store: &dyn BlockStore, now: u64, seed: u64) {
        let mut random = Random(seed);
        let mut end = || match random.below(3) {
            0 => key(random.below(3) as u8, random.below(1000)),
            1 => key(0, random.next()),
            _ => key(random.below(3) as u8, random.below(1000)).previous(),
        };
        let mut ranges: Vec<KeyRange> = (0..6).map(|_| KeyRange::new(end(), end())).collect();
        ranges.push(KeyRange::full());
        let whole = end();
        ranges.push(KeyRange::new(whole, whole));
        let found = wait(store.summaries(ranges.clone(), now)).expect("readable");
        for (range, found) in ranges.iter().zip(found) {
            assert_eq!(found, self.summary(range, now), "{range} at {now}");
        }
        self.descend(store, now, ranges[seed as usize % ranges.len()], 0);
    }

    /// Cuts as far down as there are cuts.
    fn descend(&self, store: &dyn BlockStore, now: u64, range: KeyRange, depth: u32) {
        assert!(depth < 8, "each cut leads on");
        let parts = wait(store.cut(range, now)).expect("readable");
        assert!(parts.len() <= MAX_PARTS);
        let (mut after, whole) = (range.after, self.summary(&range, now));
        for part in &parts {
            assert_eq!((part.range.after, part.summary), (after, self.summary(&part.range, now)));
            after = part.range.upto;
        }
        assert_eq!(after, range.upto, "the parts make up the range");
        assert_eq!(parts.iter().map(|part| part.summary.count).sum::<u64>(), whole.count);
        assert_eq!(parts.len() == 1, whole.count <= 64);
        if parts.len() > 1 {
            let largest = parts.iter().max_by_key(|part| part.summary.count);
            self.descend(store, now, largest.expect("some").range, depth + 1);
        }
    }

    /// Does a step in `store`; `other` is what only this kind of store does.
    fn run(&mut self, store: &dyn BlockStore, step: &Step, other: &mut dyn FnMut(&mut Model)) {
        match step {
            Step::Put(run, version, until) => self.put(store, run, *version, *until),
            Step::Remove(run) => {
                wait(store.remove(run.keys())).expect("removed");
                let gone = run.keys();
                self.0.retain(|key, _| !gone.contains(key));
            }
            Step::Renew(run, until) => self.renew(store, run, *until),
            Step::Expire(now) => {
                wait(store.remove_expired(*now)).expect("removed");
                self.0.retain(|_, held| held.1 >= *now);
            }
            Step::Other => other(self),
            Step::Ask(now, seed) => self.compare(store, *now, *seed),
        }
    }
}

/// Removes every ninth file; the store must have noticed when this returns.
fn take_files(dir: &Path, store: &FileStore, model: &mut Model) {
    let before: Vec<Key> = model.0.keys().copied().collect();
    let mut number = 0;
    for entry in std::fs::read_dir(dir.join("blocks")).expect("there") {
        let path = entry.expect("readable").path();
        for file in std::fs::read_dir(&path).into_iter().flatten() {
            number += 1;
            if number % 9 == 0 {
                std::fs::remove_file(file.expect("readable").path()).expect("removed");
            }
        }
    }
    let mut from = None;
    loop {
        from = wait(store.look_after(from, 1000)).expect("looked").next;
        if from.is_none() {
            break;
        }
    }
    for key in before {
        if store.info(&key).expect("readable").is_none() {
            model.0.remove(&key);
        }
    }
}

fn files(dir: &Path) -> FileStore {
    let [index, blocks] = ["index", "blocks"].map(|name| dir.join(name));
    std::fs::create_dir_all(&blocks).expect("made");
    FileStore::open_inline(&index, &blocks, file_config()).expect("opens")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_memory_store_sums_up_what_it_holds(steps in proptest::collection::vec(step(), 1..30)) {
        let store = MemoryStore::new(1 << 30);
        let mut model = Model::default();
        for step in &steps {
            model.run(&store, step, &mut |_| ());
        }
    }

    #[test]
    fn a_log_sums_up_what_it_holds(steps in proptest::collection::vec(step(), 1..30)) {
        let disk = FaultyDisk::new(1);
        let store = open_inline(&disk);
        let mut model = Model::default();
        for step in &steps {
            let mut reclaim = |_: &mut Model| assert!(wait(store.reclaim(1 << 20)).is_ok());
            model.run(&store, step, &mut reclaim);
        }
    }

    #[test]
    fn two_backends_are_summed_up_as_one(
        steps in proptest::collection::vec(step(), 1..30),
        change_at in 0..20usize,
    ) {
        let [disk, other] = [1, 2].map(FaultyDisk::new);
        let backends = [disk, other].map(|disk| Arc::<DiskStore>::new(open_inline(&disk)));
        let store = ContributedStore::new(Backend::Log(backends[0].clone()), None);
        let mut model = Model::default();
        for (at, step) in steps.iter().enumerate() {
            if at == change_at {
                store.change_to(Backend::Log(backends[1].clone())).expect("nothing moves");
            }
            model.run(&store, step, &mut |_| drop(wait(store.move_some(100)).expect("moved")));
        }
    }
}

proptest! {
    // Thousands of files take their time.
    #![proptest_config(ProptestConfig { cases: 5, ..ProptestConfig::default() })]

    #[test]
    fn files_that_vanish_leave_the_summary(steps in proptest::collection::vec(step(), 1..15)) {
        let temp = tempfile::tempdir().expect("a directory");
        let store = files(temp.path());
        let mut model = Model::default();
        for step in &steps {
            model.run(&store, step, &mut |model| take_files(temp.path(), &store, model));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn two_stores_are_summed_up_as_one_set(
        one in proptest::collection::vec(step(), 1..20),
        other in proptest::collection::vec(step(), 1..10),
        (now, seed) in (0..100u64, any::<u64>()),
    ) {
        let stores = [(); 2].map(|()| MemoryStore::new(1 << 30));
        let mut models = [Model::default(), Model::default()];
        for ((store, model), steps) in stores.iter().zip(&mut models).zip([&one, &other]) {
            for step in steps {
                model.run(store, step, &mut |_| ());
            }
        }
        let [one, other] = models;
        let counts: [fn(&BlockInfo) -> bool; 2] = [|_| true, |info| info.key.0[63] % 2 == 0];
        for counts in counts {
            let mut both = Model(one.0.clone());
            for (key, held) in &other.0 {
                let info = stores[1].info(key).expect("readable").expect("held");
                if held.1 > now && counts(&info) {
                    let known = both.0.entry(*key).or_insert(*held);
                    // A block that has expired in one store is not there.
                    *known = if known.1 > now { (known.0.max(held.0), u64::MAX) } else { *held };
                }
            }
            let merged = Merged { store: &stores[0], other: &stores[1], counts, now_unix_secs: now };
            let mut random = Random(seed);
            let mut end = || key(random.below(3) as u8, random.below(1000));
            let mut ranges: Vec<KeyRange> = (0..6).map(|_| KeyRange::new(end(), end())).collect();
            ranges.push(KeyRange::full());
            for range in ranges {
                let whole = both.summary(&range, now);
                prop_assert_eq!(wait(merged.summary(range)).expect("readable"), whole);
                let mut after = range.after;
                for part in wait(merged.cut(range)).expect("readable") {
                    prop_assert_eq!(part.range.after, after);
                    prop_assert_eq!(part.summary, both.summary(&part.range, now));
                    after = part.range.upto;
                }
                prop_assert_eq!(after, range.upto);
            }
        }
    }
}

/// A store that has held other blocks, in another order and of another kind, has the same
/// summary of what is held by both.
#[test]
fn equal_blocks_have_equal_summaries_whatever_else_is_held() {
    let (a, b) = (MemoryStore::new(1 << 30), open_inline(&FaultyDisk::new(1)));
    let run = |family, first, count| Run { family, first, count };
    let (mut in_a, mut in_b) = (Model::default(), Model::default());
    in_a.put(&a, &run(1, 0, 900), 1, 50);
    in_b.put(&b, &run(1, 300, 600), 1, 60);
    in_b.put(&b, &run(0, 0, 500), 1, 60);
    in_b.put(&b, &run(1, 0, 300), 1, 70);
    let both = KeyRange::new(key(1, 0).previous(), key(1, 899));
    let ask = |store: &dyn BlockStore, range| wait(store.summaries(vec![range], 9)).expect("read");
    assert_eq!(ask(&a, both), ask(&b, both));
    assert_eq!(ask(&a, both)[0].count, 900);
    assert_ne!(ask(&a, KeyRange::full()), ask(&b, KeyRange::full()));
}

/// A store whose directory is away shows nothing, and concludes nothing from that.
#[test]
fn the_summary_of_a_directory_comes_back_with_it() {
    let temp = tempfile::tempdir().expect("a directory");
    let log = Arc::new(open_inline(&FaultyDisk::new(1)));
    let files = Arc::new(files(temp.path()));
    let store = ContributedStore::new(Backend::Log(log), Some(Backend::Files(files.clone())));
    let mut model = Model::default();
    model.put(&*files, &Run { family: 2, first: 0, count: 300 }, 0, 50);
    model.compare(&store, 9, 1);
    let [blocks, elsewhere] = ["blocks", "elsewhere"].map(|name| temp.path().join(name));
    std::fs::rename(&blocks, &elsewhere).expect("moved");
    files.look().expect_err("away");
    Model::default().compare(&store, 9, 1);
    Model::default().compare(&*files, 9, 1);
    std::fs::rename(&elsewhere, &blocks).expect("moved");
    files.look().expect("there");
    model.compare(&store, 9, 1);
    model.compare(&*files, 9, 1);
}
