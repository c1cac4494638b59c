//! CFS §5.3: a real server acts as several virtual servers. The copies of a block are on
//! different real servers all the same, and a change in their number loses nothing.

use std::time::Duration;

use atoll_dht::{Blocks, DhtConfig};

use crate::ring::{MINUTE, Ring, block, prompt};

/// A ring whose nodes have these numbers of virtual servers.
fn ring(seed: u64, config: DhtConfig, virtual_servers: &[u16]) -> Ring {
    let ring = Ring::configured(seed, config, virtual_servers.len());
    for (member, count) in virtual_servers.iter().enumerate() {
        ring.set_virtual_servers(member, *count);
    }
    ring.settle();
    ring
}

#[test]
fn no_two_copies_of_a_block_are_on_one_machine() {
    let ring = ring(1, prompt(), &[1, 4, 16, 2, 8, 1]);
    ring.put(0, 0..300);
    // At once, without repair: a put counts its copies.
    for n in 0..300 {
        let holders = ring.holders(&block(n).0.key());
        assert_eq!(holders.len(), 3, "block {n} is on {holders:?}");
    }
    ring.until_replicated();
    ring.assert_placed(0..300);
    let held: Vec<u64> = ring.members.iter().map(|m| m.store.usage().blocks).collect();
    assert_eq!(held.iter().sum::<u64>(), 900);
    assert!(held[2] > held[0] && held[2] > held[5], "16 virtual servers hold more: {held:?}");
    let root: u64 = ring.members.iter().map(|m| m.dht.repair_status().root_blocks).sum();
    assert_eq!(root, 300, "each block has one root");
}

/// Where most positions are one machine's, the other copies are far away on the ring.
#[test]
fn copies_are_placed_across_a_machine_with_most_of_the_ring() {
    let ring = ring(2, prompt(), &[1, 48, 1, 1]);
    ring.put(0, 0..200);
    ring.until_replicated();
    ring.assert_placed(0..200);
    ring.assert_readable(0..20);
}

#[test]
fn the_crash_of_a_node_with_many_virtual_servers_loses_nothing() {
    let ring = ring(3, prompt(), &[2, 24, 1, 3, 8, 1, 2]);
    ring.put(0, 0..300);
    ring.until_replicated();
    ring.crash(1);
    ring.until_replicated();
    ring.assert_placed(0..300);
    ring.crash(4);
    ring.assert_readable(0..40);
    ring.until_replicated();
    ring.assert_placed(0..300);
}

#[test]
fn a_node_alone_with_many_virtual_servers_keeps_one_copy_of_each_block() {
    let ring = ring(4, prompt(), &[8]);
    ring.put(0, 0..50);
    ring.until_replicated();
    ring.assert_readable(0..50);
    let status = ring.members[0].dht.repair_status();
    assert_eq!((status.root_blocks, status.replicas_present), (50, 1));
}

fn changed_under_load(seed: u64) {
    let ring = ring(seed, prompt(), &[1, 4, 2, 8, 1, 3]);
    ring.put(0, 0..200);
    ring.until_replicated();
    let counts = [(3, 1), (0, 12), (1, 1), (3, 6), (0, 2), (4, 5), (2, 1), (5, 9)];
    let mut next = 200;
    for (step, (member, count)) in counts.into_iter().enumerate() {
        let chord = ring.members[member].chord.clone();
        let change = async move { chord.set_virtual_servers(count).await };
        // Blocks are read and put while positions come and go.
        let dht = ring.members[(member + 1) % 6].dht.clone();
        let reads = async move {
            for n in 0..60 {
                let n = (n * 7 + step as u32 * 31) % 200;
                let (hash, bytes) = block(n);
                assert_eq!(dht.get(hash).await, Ok(bytes), "block {n}, step {step}, seed {seed}");
            }
        };
        let dht = ring.members[(member + 2) % 6].dht.clone();
        let puts = async move {
            for n in next..next + 20 {
                dht.put(vec![block(n)]).await.expect("the ring is healthy");
            }
        };
        let all = futures_util::future::join3(change, reads, puts);
        let (changed, (), ()) = ring.sim.block_on(MINUTE * 10, all).expect("ends");
        changed.expect("not too many");
        next += 20;
        ring.sim.run_for(Duration::from_secs(5));
    }
    ring.until_replicated();
    // Strays go once their new holders have them.
    ring.sim.run_for(MINUTE * 10);
    ring.assert_placed(0..next);
    ring.assert_readable(0..20);
}

#[test]
fn virtual_servers_changed_under_load_lose_no_block() {
    for seed in 0..5 {
        changed_under_load(10 + seed);
    }
}

/// With one copy, a block whose position leaves cannot be found until it has been handed
/// over, and one whose root changes can be missed while it changes hands; none is lost.
#[test]
fn with_one_copy_blocks_of_a_position_that_left_are_handed_over() {
    let ring = ring(5, DhtConfig { replicas: 1, ..prompt() }, &[6, 1, 1, 2]);
    ring.put(1, 0..200);
    ring.set_virtual_servers(0, 1);
    ring.sim.run_for(MINUTE * 3);
    ring.assert_placed(0..200);
    ring.assert_readable(0..30);
    // A position that is added takes its blocks over from the node after it.
    ring.set_virtual_servers(1, 8);
    for n in 0..60 {
        let (hash, bytes) = block(n);
        let read = (0..3).find_map(|_| ring.try_get(2, hash).ok());
        assert_eq!(read, Some(bytes), "block {n}");
    }
    ring.sim.run_for(MINUTE * 3);
    ring.assert_placed(0..200);
}
