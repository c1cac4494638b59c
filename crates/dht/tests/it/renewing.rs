//! What it costs a publisher to keep a large volume alive.

use std::sync::Arc;

use atoll_dht::rpc::{HOLDINGS, MAX_KEYS, RENEW};
use atoll_dht::{Blocks, Dht, DhtConfig};
use atoll_key::BlockHash;
use atoll_overlay::chord::messages::ROUTE;
use atoll_sim::{Sim, SimConfig};

use crate::perfect::ring_with;
use crate::ring::{HOUR, Ring, block};

/// Calls and bytes so far by these methods.
fn traffic(sim: &Sim, methods: &[u16]) -> (u64, u64) {
    let methods: Vec<_> =
        methods.iter().filter_map(|m| sim.stats().methods.get(m).cloned()).collect();
    let calls = methods.iter().map(|m| m.call_count).sum();
    (calls, methods.iter().map(|m| m.request_bytes + m.reply_bytes).sum())
}

/// Puts so many blocks and renews them as a keeper does: in ring order, a batch at a time; the
/// calls and bytes that renewing took by all methods, and the bytes without finding the roots.
fn cost(sim: &Sim, dht: &Arc<Dht>, count: u32) -> (u64, u64, u64) {
    let put = dht.put((0..count).map(block).collect());
    sim.block_on(HOUR, put).expect("ends").expect("healthy");
    sim.run_for(HOUR);
    let (all, asked) = ([ROUTE, RENEW, HOLDINGS], [RENEW, HOLDINGS]);
    let before = (traffic(sim, &all), traffic(sim, &asked));
    let mut hashes: Vec<BlockHash> = (0..count).map(|n| block(n).0).collect();
    hashes.sort_unstable();
    for batch in hashes.chunks(MAX_KEYS) {
        let renewed = sim.block_on(HOUR, dht.renew(batch.to_vec())).expect("ends");
        assert_eq!(renewed, Ok(Vec::new()));
    }
    let after = (traffic(sim, &all), traffic(sim, &asked));
    (after.0.0 - before.0.0, after.0.1 - before.0.1, after.1.1 - before.1.1)
}

#[test]
fn renewing_costs_at_most_100_bytes_a_block_all_told() {
    let ring = Ring::new(21, 8);
    let (calls, bytes, _) = cost(&ring.sim, &ring.members[0].dht, 2000);
    assert!(bytes <= 100 * 2000, "{bytes} bytes");
    // Publisher, root, two replicas and a witness; a batch may end within a root's part.
    assert!(calls <= 4 * (8 + 2) + 8, "{calls} calls");
}

/// Each block's root was looked up for itself.
#[test]
fn roots_of_a_large_ring_are_looked_up_once_not_once_a_block() {
    const NODES: usize = 64;
    let sim = Sim::new(SimConfig { seed: 22, ..SimConfig::default() });
    let dhts = ring_with(&sim, NODES, &DhtConfig::default());
    let (calls, _, bytes) = cost(&sim, &dhts[0], 6000);
    assert!(calls <= 12 * NODES as u64, "{calls} calls");
    assert!(bytes <= 100 * 6000, "{bytes} bytes");
    sim.shut_down();
}
