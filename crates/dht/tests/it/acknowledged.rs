//! What was acknowledged is durable on a majority of its replica set: the ways in which
//! that could become untrue.

use std::time::Duration;

use atoll_dht::{Blocks, DhtConfig, PutError};
use atoll_key::BlockHash;
use atoll_sim::{Sim, SimConfig};

use crate::ring::{Ring, block};

const MINUTE: Duration = Duration::from_secs(60);

fn impatient(seed: u64, config: DhtConfig, count: usize) -> Ring {
    let config = DhtConfig { put_limit: Duration::from_secs(20), ..config };
    Ring::with(SimConfig { seed, ..SimConfig::default() }, config, count)
}

fn cut_off_first(ring: &Ring) {
    let hosts: Vec<_> = ring.members.iter().map(|m| m.host).collect();
    ring.sim.partition(&[&hosts[..1], &hosts[1..]]);
    ring.sim.run_for(MINUTE);
}

/// The blocks of a refused put stayed on the root alone. The publisher's next try asked
/// whether the ring has them, was told yes, and skipped them.
#[test]
fn blocks_whose_put_was_refused_do_not_count_as_held() {
    let ring = impatient(1, DhtConfig::default(), 3);
    cut_off_first(&ring);
    assert!(matches!(ring.try_put(0, (0..20).map(block).collect()), Err(PutError::Unavailable(_))));
    let hashes: Vec<BlockHash> = (0..20).map(|n| block(n).0).collect();
    let renewed = ring.members[0].dht.renew(hashes);
    let renewed = ring.sim.block_on(MINUTE, renewed).expect("ends");
    assert!(matches!(renewed, Err(PutError::Unavailable(_))), "{renewed:?}");
}

/// Every stray was dropped when the root said that it has the block, though it was the
/// only one of its replica set: one crash from being lost.
#[test]
fn a_stray_is_kept_until_a_majority_of_the_replica_set_has_the_block() {
    let ring = Ring::new(2, 7);
    ring.put(0, 0..1);
    let key = block(0).0.key();
    let mut set = ring.replica_set(&key);
    set.sort_by_key(|i| ring.node(*i).id.key().distance_from(&key));
    let stray = (0..7).find(|i| !set.contains(i)).expect("7 nodes, 3 replicas");
    let get = ring.members[set[0]].store.get(&key);
    let held = ring.sim.block_on(MINUTE, get).expect("ends").expect("memory").expect("held");
    let strays = ring.members[stray].store.put(vec![held]);
    ring.sim.block_on(MINUTE, strays).expect("ends").expect("memory");
    for replica in &set[1..] {
        let removed = ring.members[*replica].store.remove(vec![key]);
        ring.sim.block_on(MINUTE, removed).expect("ends").expect("memory");
    }
    ring.members[stray].dht.repair_now();
    let dropped = |_: &Sim| !ring.holders(&key).contains(&stray);
    assert!(ring.sim.run_until_true(MINUTE * 5, dropped), "the stray stays for ever");
    assert!(ring.holders(&key).len() >= 2, "only {:?} have it", ring.holders(&key));
}
