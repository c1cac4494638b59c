//! What a ring costs in which nothing happens.

use std::sync::Arc;

use crate::flawed::Flawed;
use crate::ring::{MINUTE, ROOMY, Ring};

/// Each comparison went through all blocks of the range on both sides, every minute.
#[test]
fn an_idle_round_looks_at_no_block() {
    let mut ring = Ring::new(21, 0);
    let stores: Vec<Arc<Flawed>> = (0..5).map(|_| Arc::new(Flawed::new(ROOMY))).collect();
    for store in &stores {
        ring.join(store.clone());
    }
    ring.settle();
    for from in (0..2000).step_by(200) {
        ring.put(0, from..from + 200);
    }
    ring.until_replicated();
    ring.sim.run_for(10 * MINUTE);
    let read = || stores.iter().map(|store| store.read()).sum::<u64>();
    let rounds = || -> u64 { ring.up().map(|m| m.dht.repair_status().rounds).sum() };
    let (read_before, rounds_before) = (read(), rounds());
    ring.sim.run_for(30 * MINUTE);
    let (read, rounds) = (read() - read_before, rounds() - rounds_before);
    assert!(rounds >= 5 * 20, "{rounds}");
    // A node that looks for strays takes one block to find each other root by.
    assert!(read <= rounds * 4, "{read} blocks read in {rounds} rounds");
}
