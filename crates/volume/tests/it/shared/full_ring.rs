//! No node of the ring has room for anything new, and names are removed all the same.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_dht::{Blocks, DhtConfig};
use atoll_env::BoxFuture;
use atoll_sim::SimConfig;
use atoll_store::MemoryStore;
use atoll_vfs::{Errno, FileSystem};
use atoll_volume::keep::Keep;
use atoll_volume::shared::{SharedFs, SharedOptions};

use super::mounts::created_keeping;
use super::offline::{Machine, ROOT, Setting, me, names, read, write};
use crate::simulated_ring::Ring;

/// Of each node.
const CAPACITY_BYTES: u64 = 3 << 20;
const MINUTE: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(1800);

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// A ring of five small nodes, and a mount with a spool.
fn full_ring(seed: u64) -> (Ring, SharedFs) {
    let sim = SimConfig { seed, ..SimConfig::default() };
    let mut ring = Ring::with(sim, DhtConfig::default(), 0);
    for _ in 0..5 {
        ring.join(Arc::new(MemoryStore::new(CAPACITY_BYTES)));
    }
    ring.settle();
    let options = SharedOptions { names_max_age: Duration::ZERO, ..SharedOptions::default() };
    let machine = Machine::at(&ring, 0, 1, options);
    let env = machine.env.clone();
    let blocks: Arc<dyn Blocks> = machine.node.clone();
    let made = created_keeping(&env, &blocks, false, Keep::NONE);
    ring.sim.block_on(LONG, made).expect("calls have deadlines");
    let fs = ring.sim.block_on(LONG, machine.mounted()).expect("calls have deadlines");
    (ring, fs)
}

/// Writes files of `len` bytes until one finds no room, which is removed; the names of the others.
async fn filled(fs: &SharedFs, len: usize) -> Vec<String> {
    let mut kept = Vec::new();
    loop {
        let name = format!("{len} {}", kept.len());
        match write(fs, ROOT, &name, noise(len, kept.len() as u64)).await {
            Ok(()) => kept.push(name),
            Err(errno) => {
                assert_eq!(errno, Errno::ENOSPC);
                fs.unlink(me(), ROOT, name.as_bytes()).await.expect("removed");
                return kept;
            }
        }
    }
}

/// `rm` writes the directory and a tombstone anew, for which no node had room: nothing could be removed. The mount took a
/// full ring for one that is gone, and put a gibibyte into its spool. And a file that had found no room appeared again after
/// it was removed.
#[test]
fn names_are_removed_from_a_full_ring() {
    for seed in 9901..9904 {
        let (ring, fs) = full_ring(seed);
        let run = |what: &str, work: BoxFuture<'_, ()>| {
            let began = ring.sim.now();
            ring.sim.block_on(LONG, work).expect("calls have deadlines");
            let took = ring.sim.now().since(began);
            assert!(took < MINUTE, "{what} took {took:?}, seed {seed}");
        };
        let mut kept = Vec::new();
        let fill = async {
            for len in [100_000, 20_000, 6_000, 0] {
                kept.extend(filled(&fs, len).await);
            }
        };
        run("filling", Box::pin(fill));
        assert!((20..200).contains(&kept.len()), "{} files, seed {seed}", kept.len());
        let remove = async {
            for name in kept.iter().skip(1) {
                fs.unlink(me(), ROOT, name.as_bytes()).await.expect("removed");
            }
            fs.sync().await.expect("is on the ring");
            let left = names(&fs, ROOT).await.expect("lists");
            assert_eq!(left.into_iter().collect::<Vec<_>>(), kept[..1], "seed {seed}");
            assert_eq!(*read(&fs, ROOT, &kept[0]).await.expect("is there"), noise(100_000, 0));
        };
        run("removing", Box::pin(remove));
    }
}

/// The mount looks for the name that one node may have, and finds another file there.
#[test]
fn removing_a_file_that_found_no_room_leaves_another_of_its_name() {
    let all = Setting::new(9911);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "before", "x")).expect("is written");
    all.machine.node.is_full.store(true, Ordering::Relaxed);
    assert_eq!(all.run(write(&fs, ROOT, "f", "mine")).err(), Some(Errno::ENOSPC));
    all.run(write(&all.others[0], ROOT, "f", "theirs")).expect("is written");
    all.machine.node.is_full.store(false, Ordering::Relaxed);
    // Unless the mount has stored its file meanwhile, the name is that of the other one.
    all.run(fs.unlink(me(), ROOT, b"f")).expect("removed");
    all.wait(MINUTE);
    assert_eq!(all.run(read(&all.others[0], ROOT, "f")).expect("is there"), "theirs");
    assert_eq!(all.run(names(&all.others[1], ROOT)).expect("lists").len(), 2);
}
