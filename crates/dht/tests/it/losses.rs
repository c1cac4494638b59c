//! What survivors say when whole replica sets are gone.

use std::time::Duration;

use crate::ring::{Ring, block};

/// Half of the nodes died, a tenth of the blocks were gone, and every survivor said that
/// replication was complete.
#[test]
fn survivors_say_that_whole_replica_sets_are_gone_until_they_are_back() {
    for seed in [1, 2, 3] {
        let mut ring = Ring::new(seed, 12);
        ring.put(0, 0..200);
        ring.until_replicated();
        ring.sim.run_for(Duration::from_secs(400));
        let victims: Vec<usize> = ring.replica_set(&block(0).0.key());
        victims.iter().for_each(|victim| ring.crash(*victim));
        ring.until_replicated();
        let lost = (0..200).filter(|n| ring.holders(&block(*n).0.key()).is_empty()).count();
        assert!(lost > 0, "seed {seed}: the set of a block is gone");
        let told = |ring: &Ring| {
            let states = ring.up().map(|member| member.dht.repair_status());
            states.map(|state| (state.vanished_nodes, state.vanished_ring_ppm)).max()
        };
        let (nodes, ring_ppm) = told(&ring).expect("some are up");
        assert_eq!(nodes, 3, "seed {seed}");
        assert!(ring_ppm > 0, "seed {seed}");
        // The one that tells it forgot it at its restart.
        let survivors: Vec<usize> = (0..12).filter(|member| !victims.contains(member)).collect();
        for survivor in survivors {
            ring.crash(survivor);
            ring.restart(survivor);
            ring.sim.run_for(Duration::from_secs(30));
        }
        ring.until_replicated();
        assert_eq!(told(&ring), Some((nodes, ring_ppm)), "seed {seed}");
        ring.restart(victims[1]);
        ring.until_replicated();
        ring.sim.run_for(Duration::from_secs(120));
        assert_eq!(told(&ring), Some((0, 0)), "seed {seed}: one of them has all of it");
    }
}
