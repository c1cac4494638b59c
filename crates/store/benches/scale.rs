//! What a store of many blocks costs: memory, index, opening, a put, a summary.
//! `cargo bench -p atoll-store --bench scale [BLOCKS] [DIR] [BLOCK_BYTES] [SEGMENT_KIB]`.
//!
//! With blocks of a few bytes the index is as large as that of a store of BLOCKS blocks of
//! 8 KiB, and the log is not. With short segments there are as many as in a log of full size:
//! `10000000 DIR 8 64` has the index of 80 GB in blocks of 8 KiB, and the segments of 1 TB.

// Measuring is what this program is for.
#![allow(clippy::disallowed_methods)]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use atoll_key::{BlockKind, Key, KeyRange};
use atoll_store::{BlockInfo, BlockStore, DiskConfig, DiskStore, StoredBlock};
use bytes::Bytes;

mod measure;
use measure::{cpu, resident_mib, wait};

const NOW: u64 = 1_700_000_000;
const BATCH: u64 = 512;

fn hashed(n: u64) -> Key {
    Key::hashed(blake3::hash(&n.to_be_bytes()).into())
}

fn block(n: u64, bytes: &Bytes) -> StoredBlock {
    let info = BlockInfo {
        key: hashed(n),
        kind: BlockKind::Content,
        version: 0,
        expires_unix_secs: NOW + 1_000_000 + n % 1_000_000,
        len_bytes: u32::try_from(bytes.len()).expect("small"),
        owner: atoll_store::Owner { publisher: [1; 16], ip: [2; 16] },
    };
    StoredBlock { info, bytes: bytes.clone() }
}

fn open(dir: &Path, segment_bytes: u64) -> DiskStore {
    let capacity_bytes = 4 << 40;
    let config = DiskConfig { capacity_bytes, segment_bytes, ..DiskConfig::default() };
    DiskStore::open(dir, config).expect("opens")
}

fn timed<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let (started, cpu_before, resident) = (Instant::now(), cpu(), resident_mib());
    let result = work();
    println!(
        "{what}: {:?}, {:?} of CPU, {} MiB resident (before: {resident})",
        started.elapsed(),
        cpu() - cpu_before,
        resident_mib(),
    );
    result
}

fn latencies(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!("{what}: median {:?}, 99 % {:?}, longest {:?}", at(0.5), at(0.99), at(1.0));
}

fn put_all(store: &DiskStore, blocks: u64, bytes: &Bytes) {
    for first in (0..blocks).step_by(BATCH as usize) {
        let batch = (first..(first + BATCH).min(blocks)).map(|n| block(n, bytes)).collect();
        wait(store.put(batch)).expect("there is room");
    }
    wait(store.flush()).expect("flushed");
}

fn summarize(store: &DiskStore) {
    let ask = || wait(store.summaries(vec![KeyRange::full()], NOW)).expect("readable");
    timed("first summary", ask);
    timed("the same again, 1,000 times", || (0..1000).for_each(|_| drop(ask())));
    let mut times = Vec::new();
    let part = KeyRange::new(hashed(3), hashed(4));
    for n in 0..200 {
        wait(store.remove(vec![hashed(n * 997)])).expect("removed");
        let started = Instant::now();
        wait(store.summaries(vec![KeyRange::full(), part], NOW)).expect("readable");
        times.push(started.elapsed());
    }
    latencies("summaries of two ranges after a change", times);
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let number =
        |at: usize, default| args.get(at).map_or(default, |n| n.parse().expect("a number"));
    let blocks: u64 = number(0, 100_000);
    let base = args.get(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let bytes = Bytes::from(vec![0x5a; number(2, 8) as usize]);
    let dir = tempfile::tempdir_in(base).expect("a directory");
    let segment_bytes = number(3, 64 << 10) << 10;
    let store = open(dir.path(), segment_bytes);
    timed(&format!("put {blocks} blocks"), || put_all(&store, blocks, &bytes));
    let index = std::fs::metadata(dir.path().join("index.redb")).expect("there").len();
    println!("index: {} MiB, {} bytes a block", index >> 20, index / blocks);
    let files = std::fs::read_dir(dir.path()).expect("there").count();
    println!("{files} files, segments but for two or three");
    let times = (blocks..blocks + 500).map(|n| {
        let started = Instant::now();
        wait(store.put(vec![block(n, &bytes)])).expect("there is room");
        started.elapsed()
    });
    latencies("one put", times.collect());
    let times = (0..2000).map(|n| {
        let started = Instant::now();
        store.info(&hashed(n * 7919 % blocks)).expect("readable").expect("held");
        started.elapsed()
    });
    latencies("one look into the index", times.collect());
    summarize(&store);
    timed("close", || drop(store));
    let store = timed("open", || open(dir.path(), segment_bytes));
    println!("{:?}", store.usage());
}
