//! When a copy may be dropped (`docs/design/dht.md`): never the last that a lease keeps.

use std::sync::Arc;

use atoll_dht::DhtConfig;
use atoll_dht::durable::DurableState;
use atoll_key::{BlockHash, KeyRange, PeerId};
use atoll_net::Peer;
use atoll_overlay::Node;
use atoll_sim::{HostConfig, HostId};
use atoll_store::MemoryStore;

use crate::faulty::denier;
use crate::ring::{HOUR, MINUTE, ROOMY, Ring, block, prompt};

fn short_leases() -> DhtConfig {
    DhtConfig { lease: 10 * HOUR, expire_every: HOUR / 4, expire_grace: 3 * HOUR, ..prompt() }
}

fn ring(seed: u64, config: DhtConfig, count: usize) -> Ring {
    Ring::configured(seed, config, count)
}

/// Members in ring order.
fn in_order(ring: &Ring) -> Vec<usize> {
    let mut all: Vec<usize> = (0..ring.members.len()).collect();
    all.sort_by_key(|member| *ring.node(*member).id.key());
    all
}

/// Three members in a row, none of them the first.
fn three_neighbours(ring: &Ring) -> Vec<usize> {
    let order = in_order(ring);
    let from = |at: usize| (0..3).map(|i| order[(at + i) % order.len()]).collect::<Vec<_>>();
    (0..order.len()).map(from).find(|three| !three.contains(&0)).expect("there are more than three")
}

fn renew(ring: &Ring, numbers: std::ops::Range<u32>) -> Vec<BlockHash> {
    ring.renew(0, numbers.map(|n| block(n).0).collect()).unwrap_or_default()
}

fn lost(ring: &Ring, numbers: std::ops::Range<u32>) -> Vec<u32> {
    numbers.filter(|n| ring.holders(&block(*n).0.key()).is_empty()).collect()
}

/// A whole replica set was away, and its leases stood still or ended, while the others repaired and
/// the publisher renewed. When the set came back, the others were told that it held the blocks
/// and dropped theirs, whose leases lasted; then those of the set ended.
#[test]
fn renewed_blocks_survive_the_return_of_a_set_whose_leases_end_sooner() {
    const BLOCKS: u32 = 200;
    for (seed, count) in [(1, 9), (2, 12), (3, 8)] {
        let mut ring = ring(seed, short_leases(), count);
        ring.put(0, 0..BLOCKS);
        ring.until_replicated();
        let away = three_neighbours(&ring);
        let mut set = away.clone();
        set.sort_unstable();
        let is_theirs = |n: &u32| ring.replica_set(&block(*n).0.key()) == set;
        assert!((0..BLOCKS).any(|n| is_theirs(&n)));
        // One after another, so that the others can repair.
        for member in &away {
            ring.crash(*member);
            ring.until_replicated();
        }
        // A publisher's lease is its own affair.
        ring.config.lease = 60 * HOUR;
        ring.crash(0);
        ring.restart(0);
        ring.settle();
        assert!(renew(&ring, 0..BLOCKS).is_empty(), "the others have all blocks, seed {seed}");
        for member in &away {
            ring.restart(*member);
        }
        // The set's leases and their grace are over before the next renewal.
        ring.sim.run_for(18 * HOUR);
        renew(&ring, 0..BLOCKS);
        ring.sim.run_for(HOUR);
        assert_eq!(lost(&ring, 0..BLOCKS), [], "seed {seed}");
    }
}

/// All nodes were off for longer than lease and grace, and the publisher's machine was switched on
/// last: it found nothing left to renew.
#[test]
fn a_power_cut_longer_than_a_lease_costs_no_block() {
    for (seed, off_hours, skew_hours) in [(2, 14, 0), (3, 500, 100_000), (4, 30, -100_000)] {
        let mut ring = ring(seed, short_leases(), 6);
        ring.put(0, 0..100);
        ring.until_replicated();
        (0..6).for_each(|member| ring.crash(member));
        ring.sim.run_for(off_hours * HOUR);
        for member in 1..6 {
            // Some wall clocks do not survive it either.
            if member % 2 == 0 {
                ring.sim.set_clock_skew_ms(ring.members[member].host, skew_hours * 3_600_000);
            }
            ring.restart(member);
        }
        ring.sim.run_for(5 * HOUR);
        ring.restart(0);
        ring.settle();
        assert!(renew(&ring, 0..100).is_empty(), "seed {seed}");
        assert_eq!(lost(&ring, 0..100), [], "seed {seed}");
    }
}

/// A node that is cut off from all others cannot be reached by publishers.
#[test]
fn leases_do_not_run_while_a_node_is_alone() {
    let mut ring = ring(5, short_leases(), 5);
    ring.put(0, 0..50);
    ring.until_replicated();
    let (alone, others) = ring.members.split_at(1);
    let others: Vec<HostId> = others.iter().map(|member| member.host).collect();
    ring.sim.partition(&[&[alone[0].host], &others]);
    let before = ring.members[0].store.usage().blocks;
    ring.sim.run_for(20 * HOUR);
    assert_eq!(ring.members[0].store.usage().blocks, before);
    let left: u64 = ring.members[1..].iter().map(|member| member.store.usage().blocks).sum();
    assert_eq!(left, 0, "with the others they ran");
    // Neither does a restart make it the first of a ring.
    ring.crash(0);
    (1..5).for_each(|member| ring.crash(member));
    ring.restart(0);
    ring.sim.run_for(20 * HOUR);
    assert_eq!(ring.members[0].store.usage().blocks, before);
}

/// The ends of the leases in a store are by a clock whose record is lost.
#[test]
fn a_node_that_lost_its_lease_clock_gives_all_blocks_a_whole_lease() {
    for skew_hours in [0, 90_000, -90_000] {
        let mut ring = ring(6, short_leases(), 4);
        ring.put(0, 0..50);
        ring.until_replicated();
        ring.sim.run_for(9 * HOUR);
        ring.crash(2);
        ring.members[2].durable = Arc::default();
        ring.sim.set_clock_skew_ms(ring.members[2].host, skew_hours * 3_600_000);
        let before = ring.members[2].store.usage().blocks;
        ring.restart(2);
        ring.sim.run_for(9 * HOUR);
        assert_eq!(ring.members[2].store.usage().blocks, before, "off by {skew_hours} h");
    }
}

/// One member made keys until three fell between a block and its root, and joined with them:
/// the block was deleted by all honest nodes within seconds.
#[test]
fn nobody_has_a_block_deleted_by_saying_that_he_holds_it() {
    for seed in [7, 8, 9] {
        let mut ring = ring(seed, prompt(), 15);
        ring.put(0, 0..50);
        ring.until_replicated();
        let is_elsewhere = |n: &u32| !ring.replica_set(&block(*n).0.key()).contains(&0);
        let victim = (0..50).find(is_elsewhere).expect("most are");
        let (hash, bytes) = block(victim);
        let key = hash.key();
        let gap = ring.node(ring.root(&key)).id.key().distance_from(&key);
        let addr = ring.node(0).peer.addr;
        let ids = (0u64..).map(|n| {
            let mut id = [7; 32];
            id[..8].copy_from_slice(&n.to_be_bytes());
            PeerId(id)
        });
        let is_between =
            |id: &PeerId| Node::of(Peer { id: *id, addr }).id.key().distance_from(&key) < gap;
        let liars: Vec<usize> = ids
            .filter(is_between)
            .take(3)
            .map(|id| {
                let host = HostConfig { identity: Some(id), ..HostConfig::default() };
                let store = Arc::new(MemoryStore::new(ROOMY));
                ring.join_host_as(host, store, denier)
            })
            .collect();
        ring.sim.run_for(HOUR);
        liars.into_iter().for_each(|liar| ring.crash(liar));
        ring.sim.run_for(20 * MINUTE);
        assert_eq!(ring.try_get(0, hash), Ok(bytes), "seed {seed}");
    }
}

/// While room lasts, strays are kept for days after others have got them.
#[test]
fn strays_are_kept_for_their_grace_and_then_dropped() {
    let grace = 8 * HOUR;
    let config = DhtConfig { stray_grace: grace, ..DhtConfig::default() };
    let mut ring = ring(10, config, 5);
    ring.put(0, 0..200);
    ring.until_replicated();
    for _ in 0..5 {
        ring.join(Arc::new(MemoryStore::new(ROOMY)));
    }
    ring.until_replicated();
    let copies =
        |ring: &Ring| -> usize { (0..200).map(|n| ring.holders(&block(n).0.key()).len()).sum() };
    let joined = ring.sim.now();
    ring.sim.run_for(grace / 2);
    assert!(copies(&ring) > 700, "{}", copies(&ring));
    ring.sim.run_until(joined + grace + HOUR);
    ring.assert_placed(0..200);
}

/// A store that is nearly full has no room for other nodes' blocks.
#[test]
fn a_store_that_is_nearly_full_keeps_strays_for_minutes_only() {
    let mut ring = ring(11, DhtConfig::default(), 4);
    let small = ring.join(Arc::new(MemoryStore::new(60_000)));
    ring.settle();
    let put = |ring: &Ring, n| ring.try_put(0, vec![block(n)]);
    let full = (0..1000).find(|n| put(&ring, *n).is_err());
    assert!(full.is_some() || ring.members[small].store.usage().disk_bytes > 54_000);
    for _ in 0..6 {
        ring.join(Arc::new(MemoryStore::new(ROOMY)));
    }
    ring.sim.run_for(HOUR);
    let held = ring.members[small].store.list(KeyRange::full(), 1000).expect("memory");
    let strays = held.iter().filter(|info| !ring.replica_set(&info.key).contains(&small)).count();
    let used = ring.members[small].store.usage().disk_bytes;
    assert!(used < 54_000, "{used} bytes are used, {strays} of {} are strays", held.len());
}

/// The record by which a lease clock goes on is 9 bytes: the tests above count on it being saved.
#[test]
fn the_lease_clock_is_saved_within_a_minute_of_running() {
    let ring = ring(12, DhtConfig::default(), 2);
    let secs = |ring: &Ring| {
        let record = ring.members[1].durable.load("lease-clock").expect("saved at once");
        u64::from_be_bytes(record[..8].try_into().expect("8 bytes"))
    };
    let before = secs(&ring);
    ring.sim.run_for(HOUR);
    let passed = secs(&ring) - before;
    assert!((3600 - 80..=3600 + 80).contains(&passed), "{passed}");
}
