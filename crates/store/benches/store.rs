//! How fast a store on a real directory is. One run, one table; no framework:
//! `cargo bench -p atoll-store [DIR]`.

// Measuring is what this program is for.
#![allow(clippy::disallowed_methods)]

use std::path::PathBuf;
use std::time::Instant;

use atoll_key::{BlockKind, Key};
use atoll_store::{BlockInfo, BlockStore, DiskConfig, DiskStore, StoredBlock};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

mod measure;
use measure::{cpu, resident_mib, wait};

fn key(n: u64) -> Key {
    let mut bytes = [0; 64];
    let spread = n.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    bytes[..8].copy_from_slice(&spread.wrapping_mul(0xbf58_476d_1ce4_e5b9).to_be_bytes());
    bytes[8..16].copy_from_slice(&n.to_be_bytes());
    Key(bytes)
}

/// Puts `total` blocks of `len` bytes in batches of `batch`, `parallel` batches at a time.
fn put_all(store: &DiskStore, total: u64, len: usize, batch: u64, parallel: usize) {
    let bytes = Bytes::from(vec![0x5a; len]);
    let (started, cpu_before) = (Instant::now(), cpu());
    let mut next = 0;
    let mut puts = FuturesUnordered::new();
    wait(async {
        while next < total || !puts.is_empty() {
            while next < total && puts.len() < parallel {
                let block = |n| StoredBlock {
                    info: BlockInfo {
                        key: key(n),
                        kind: BlockKind::Content,
                        version: 0,
                        expires_unix_secs: 9,
                        len_bytes: len as u32,
                        owner: atoll_store::Owner { publisher: [1; 16], ip: [2; 16] },
                    },
                    bytes: bytes.clone(),
                };
                puts.push(store.put((next..next + batch).map(block).collect()));
                next += batch;
            }
            puts.next().await.expect("some are running").expect("there is room");
        }
    });
    let elapsed = started.elapsed();
    println!(
        "put {total} x {len} B, {batch} a batch, {parallel} at once: {:.0} MB/s, {:.1} us CPU a put, {} MiB resident",
        total as f64 * len as f64 / 1e6 / elapsed.as_secs_f64(),
        (cpu() - cpu_before).as_micros() as f64 / total as f64,
        resident_mib(),
    );
}

fn get_all(store: &DiskStore, total: u64, count: u64) {
    let started = Instant::now();
    for n in 0..count {
        wait(store.get(&key(n * 7919 % total))).expect("sound").expect("held");
    }
    println!("get: {:.1} us each", started.elapsed().as_micros() as f64 / count as f64);
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let base = args.first().map_or_else(std::env::temp_dir, PathBuf::from);
    for (total, len, batch, parallel) in
        [(24_000, 65_536, 16, 1), (24_000, 65_536, 16, 4), (100_000, 8192, 16, 4)]
    {
        let dir = tempfile::tempdir_in(&base).expect("a directory");
        let store = DiskStore::open(dir.path(), DiskConfig::default()).expect("opens");
        put_all(&store, total, len, batch, parallel);
        get_all(&store, total.min(4000), 40_000);
        drop(store);
        let started = Instant::now();
        let store = DiskStore::open(dir.path(), DiskConfig::default()).expect("opens");
        println!("reopen: {:.0} ms; {:?}\n", started.elapsed().as_secs_f64() * 1e3, store.usage());
    }
}
