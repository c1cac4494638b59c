//! Nodes that are stopped (SIGSTOP), go on, and are stopped again: reads, puts and lock requests pass over them.

use std::time::Duration;

use atoll_dht::{Blocks, LockLease, LockMode, LockStep, Wanted};
use atoll_key::Key;
use atoll_sim::{Latency, SimConfig};

use crate::certified::Inode;
use crate::ring::{MINUTE, Ring, block, prompt};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

fn ring(seed: u64) -> Ring {
    let sim =
        SimConfig { seed, latency: Latency::Flat(5 * MS), jitter: 0.3, ..SimConfig::default() };
    Ring::with(sim, prompt(), 8)
}

/// How long some work of the ring takes, in virtual time.
fn time<T>(ring: &Ring, work: impl Future<Output = T>) -> (T, Duration) {
    let start = ring.sim.now();
    let result = ring.sim.block_on(MINUTE * 5, work).expect("ends");
    (result, ring.sim.now().since(start))
}

/// The longest of reads and puts of an inode, and of gets and puts of blocks that never change, by nodes outside its
/// replica set, while a member of the set is stopped for 10 s, three times. The puts of blocks that never change apart.
fn longest(seed: u64, member: usize) -> [(Duration, String); 2] {
    let ring = ring(seed);
    let inode = Inode::on(&ring, 1);
    let set = ring.replica_set(&inode.key());
    let free: Vec<usize> = (0..8).filter(|at| !set.contains(at)).collect();
    let (mut last, mut all) = (inode.first.clone(), [const { (Duration::ZERO, String::new()) }; 2]);
    let mut note = |round: u32, at: Duration, what: &str, took: Duration| {
        let longest = &mut all[usize::from(what == "store")];
        if took > longest.0 {
            *longest = (took, format!("{what}, ends {at:?} after stop {round}"));
        }
    };
    inode.put(free[0], &last).expect("all are there");
    ring.put(free[0], 0..50);
    let host = ring.members[set[member]].host;
    for round in 0..3u32 {
        ring.sim.freeze(host);
        let began = ring.sim.now();
        let mut n = round * 1_000;
        while ring.sim.now().since(began) < 10 * SECOND {
            n += 1;
            let [reader, writer] = [free[n as usize % 5], free[(n as usize + 2) % 5]];
            let dht = |at: usize| ring.members[at].dht.clone();
            let (got, took) = time(&ring, dht(reader).get_block(inode.first.id(), Wanted::Newest));
            assert!(got.is_ok(), "seed {seed}: {got:?}");
            note(round, ring.sim.now().since(began), "read", took);
            last = inode.written(&last, writer, &format!("{n}"));
            let (put, took) = time(&ring, inode.putting(writer, &last));
            assert_eq!(put, [Ok(())], "seed {seed}");
            note(round, ring.sim.now().since(began), "put", took);
            let (got, took) = time(&ring, dht(reader).get(block(n % 50).0));
            assert!(got.is_ok(), "seed {seed}: {got:?}");
            note(round, ring.sim.now().since(began), "get", took);
            let (put, took) = time(&ring, dht(writer).put(vec![block(1_000_000 + n)]));
            assert_eq!(put, Ok(()), "seed {seed}");
            note(round, ring.sim.now().since(began), "store", took);
            assert_eq!(inode.get(reader).expect("held"), last, "seed {seed}");
            ring.sim.run_for(100 * MS);
        }
        ring.sim.thaw(host);
        ring.sim.run_for((3 + seed % 5) as u32 * SECOND);
    }
    all
}

/// Promises last two seconds there; a silent node is known to be in a second and a half. A put through a root that does not
/// know yet that the node before it is gone waits until it does: four seconds and a bit after the stop.
#[test]
fn a_node_that_is_stopped_again_and_again_delays_nothing_by_more_than_seconds() {
    for seed in 0..6 {
        for member in 0..3 {
            let [others, stores] = longest(500 + seed, member);
            assert!(others.0 < 3 * SECOND, "seed {seed}, member {member}: {others:?}");
            assert!(stores.0 < 6 * SECOND, "seed {seed}, member {member}: {stores:?}");
        }
    }
}

/// A member of the set that is not the root is not waited for. A holder whose root is stopped keeps its lease for some
/// seconds, by the voters that it knows.
#[test]
fn a_stopped_member_delays_renewals_of_a_lock_by_no_more_than_two_seconds() {
    for seed in 0..6 {
        let ring = ring(600 + seed);
        // New roots have no voters yet.
        ring.sim.run_for(MINUTE);
        let key = Key::hashed([seed as u8; 32]);
        let set = ring.replica_set(&key);
        let asker = (0..8).find(|at| !set.contains(at)).expect("eight nodes");
        let ask = |step, number| {
            let mode = LockMode::Exclusive;
            let ask = LockLease { key, holder: [7; 16], number, step, mode };
            time(&ring, ring.members[asker].dht.lock_lease(ask))
        };
        // Its first word makes the root note that it is one.
        let taken = (1..40).any(|n| {
            ring.sim.run_for(SECOND);
            ask(LockStep::Take, n * 4).0.is_ok()
        });
        assert!(taken, "seed {seed}");
        let root = ring.root(&key);
        for (n, stopped) in set.iter().filter(|at| **at != root).chain([&root]).enumerate() {
            let host = ring.members[*stopped].host;
            assert!(ask(LockStep::Renew, 1_000 + 100 * n as u64).0.is_ok(), "seed {seed}");
            ring.sim.freeze(host);
            let (renewed, took) = ask(LockStep::Renew, 1_004 + 100 * n as u64);
            assert!(renewed.is_ok(), "seed {seed}, root {}: {renewed:?}", *stopped == root);
            assert!(took < 2_300 * MS, "seed {seed}, root {}: {took:?}", *stopped == root);
            ring.sim.thaw(host);
            ring.sim.run_for(3 * SECOND);
        }
    }
}
