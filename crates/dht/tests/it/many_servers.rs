//! CFS §5.3 under churn: nodes of many virtual servers come, leave and are killed. No block is
//! lost, no two copies share a machine, and lookups take no more calls than where each node has
//! one position.

use std::sync::Arc;

use atoll_dht::Blocks;
use atoll_overlay::MAX_VIRTUAL_SERVERS;
use atoll_store::MemoryStore;

use crate::ring::{MINUTE, ROOMY, Ring, block, prompt};

const BLOCKS: u32 = 120;

fn ring(seed: u64, nodes: usize, virtual_servers: u16) -> Ring {
    let ring = Ring::configured(seed, prompt(), nodes);
    for member in 0..nodes {
        ring.set_virtual_servers(member, virtual_servers);
    }
    ring.settle();
    ring
}

/// The mean of calls that the lookup of a root takes.
fn mean_calls(ring: &Ring) -> f64 {
    let (mut calls, mut lookups) = (0, 0);
    for member in ring.up() {
        for n in 0..40 {
            let (key, chord) = (block(n).0.key(), member.chord.clone());
            let walk = async move { chord.find_root_traced(&key).await };
            let found = ring.sim.block_on(MINUTE, walk).expect("ends").expect("finds it");
            calls += found.trace.calls();
            lookups += 1;
        }
    }
    calls as f64 / f64::from(lookups)
}

/// What happens to a node.
#[derive(Clone, Copy, Debug)]
enum Event {
    Joins,
    Leaves(usize),
    IsKilled(usize),
    Restarts(usize),
    Changes(usize, u16),
}

/// Lets it happen. At once, before any node has noticed, blocks are read and put; these are
/// counted in `next`.
fn happen(ring: &mut Ring, event: Event, virtual_servers: u16, next: &mut u32) {
    let (seed, reader) = (ring.sim.seed(), ring.members[0].dht.clone());
    let reads = {
        let reader = reader.clone();
        async move {
            for n in (0..BLOCKS).step_by(5) {
                let (hash, bytes) = block(n);
                assert_eq!(reader.get(hash).await, Ok(bytes), "block {n}, {event:?}, seed {seed}");
            }
        }
    };
    let numbers = *next..*next + 10;
    let put = reader.put(numbers.clone().map(block).collect());
    match event {
        Event::Joins => {
            let newcomer = ring.join(Arc::new(MemoryStore::new(ROOMY)));
            ring.set_virtual_servers(newcomer, virtual_servers);
        }
        Event::Leaves(member) => {
            let chord = ring.members[member].chord.clone();
            ring.sim.block_on(MINUTE, async move { chord.leave().await }).expect("ends");
            ring.crash(member);
        }
        Event::IsKilled(member) => ring.sim.crash_silently(ring.members[member].host),
        Event::Restarts(member) => {
            ring.restart(member);
            ring.set_virtual_servers(member, virtual_servers);
        }
        Event::Changes(member, count) => ring.set_virtual_servers(member, count),
    }
    let both = futures_util::future::join(reads, put);
    let ((), put) = ring.sim.block_on(MINUTE * 10, both).expect("both have deadlines");
    assert_eq!(put, Ok(()), "{event:?}, seed {seed}");
    *next = numbers.end;
    ring.until_replicated();
    for n in 0..*next {
        // By machine, each of which counts once.
        let holders = ring.holders(&block(n).0.key());
        assert!(holders.len() >= 3, "block {n} is on {holders:?}, {event:?}, seed {seed}");
    }
}

/// Strays are gone and everything is where it belongs.
fn assert_at_rest(ring: &Ring, blocks: u32) {
    ring.sim.run_for(MINUTE * 10);
    ring.assert_placed(0..blocks);
    for n in 0..blocks {
        let (hash, bytes) = block(n);
        assert_eq!(ring.try_get(0, hash), Ok(bytes), "block {n}, seed {}", ring.sim.seed());
    }
}

#[test]
fn nodes_of_sixteen_virtual_servers_come_and_go_and_lose_no_block() {
    use Event::{IsKilled, Joins, Leaves, Restarts};
    let mut ring = ring(1, 7, 16);
    ring.put(0, 0..BLOCKS);
    let mut next = BLOCKS;
    ring.until_replicated();
    let events = [IsKilled(2), Joins, Leaves(4), Restarts(2), IsKilled(7), Joins, IsKilled(1)];
    for event in events {
        happen(&mut ring, event, 16, &mut next);
    }
    assert_at_rest(&ring, next);
    let many = mean_calls(&ring);
    for member in 0..ring.members.len() {
        if ring.sim.is_up(ring.members[member].host) {
            ring.set_virtual_servers(member, 1);
        }
    }
    ring.settle();
    let one = mean_calls(&ring);
    println!("{many:.2} calls a lookup with 16 virtual servers each, {one:.2} with one");
    assert!(many <= one + 0.3, "{many} > {one}");
}

#[test]
fn two_nodes_of_as_many_virtual_servers_as_there_may_be_come_and_go_and_lose_no_block() {
    use Event::{Changes, IsKilled, Restarts};
    let mut ring = ring(3, 11, 8);
    for member in [1, 2] {
        ring.set_virtual_servers(member, MAX_VIRTUAL_SERVERS);
    }
    ring.settle();
    ring.put(0, 0..BLOCKS);
    let mut next = BLOCKS;
    ring.until_replicated();
    let before = mean_calls(&ring);
    for event in [IsKilled(1), Changes(2, 1), Restarts(1)] {
        happen(&mut ring, event, MAX_VIRTUAL_SERVERS, &mut next);
    }
    assert_at_rest(&ring, next);
    let after = mean_calls(&ring);
    println!("{before:.2} calls a lookup with 128 virtual servers each, {after:.2} after churn");
    assert!(after <= before + 0.3, "{after} > {before}");
}
