//! Random churn: safety first (nothing acknowledged is lost while fewer than k nodes
//! fail at once), then heal and demand that repair ends.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::DhtConfig;
use atoll_sim::{Loss, SimConfig};
use atoll_store::MemoryStore;

use crate::ring::{ROOMY, Ring, block};

/// A small generator of choices, so that a seed is a scenario.
struct Choices(u64);

impl Choices {
    fn below(&mut self, bound: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % bound
    }
}

/// Nodes come, crash and return, and change their virtual servers up to `max_servers`.
fn churn(seed: u64, loss: Loss, max_servers: usize) {
    let sim = SimConfig { seed, loss, jitter: 0.3, ..SimConfig::default() };
    let mut ring = Ring::with(sim, DhtConfig::default(), 7);
    let mut choices = Choices(seed);
    let mut acknowledged = Vec::new();
    let mut next = 0;
    for _round in 0..8 {
        for _ in 0..5 {
            let up: Vec<usize> =
                (0..ring.members.len()).filter(|i| ring.sim.is_up(ring.members[*i].host)).collect();
            let from = up[choices.below(up.len())];
            let numbers = next..next + 4;
            next += 4;
            if ring.try_put(from, numbers.clone().map(block).collect()).is_ok() {
                acknowledged.extend(numbers);
            }
        }
        if max_servers > 1 {
            let up: Vec<usize> =
                (0..ring.members.len()).filter(|i| ring.sim.is_up(ring.members[*i].host)).collect();
            let count = 1 + choices.below(max_servers) as u16;
            ring.set_virtual_servers(up[choices.below(up.len())], count);
        }
        let down = (0..ring.members.len()).find(|i| !ring.sim.is_up(ring.members[*i].host));
        match (choices.below(3), down) {
            (0, Some(down)) => ring.restart(down),
            (1, _) if ring.members.len() < 12 => {
                ring.join(Arc::new(MemoryStore::new(ROOMY)));
            }
            _ if ring.up().count() > 5 => {
                let up: Vec<usize> = (0..ring.members.len())
                    .filter(|i| ring.sim.is_up(ring.members[*i].host))
                    .collect();
                ring.crash(up[choices.below(up.len())]);
                ring.crash(up[choices.below(up.len())]);
            }
            _ => {}
        }
        // At most two crash before repair has had its time: k = 3.
        ring.until_replicated();
        for n in &acknowledged {
            let holders = ring.holders(&block(*n).0.key()).len();
            assert!(holders > 0, "block {n} is lost, seed {seed}");
        }
    }
    ring.sim.set_loss(Loss::None);
    ring.until_replicated();
    let reader = (0..ring.members.len())
        .find(|i| ring.sim.is_up(ring.members[*i].host))
        .expect("somebody is up");
    for n in acknowledged {
        let (hash, bytes) = block(n);
        assert_eq!(ring.try_get(reader, hash), Ok(bytes), "block {n}, seed {seed}");
    }
}

#[test]
fn nothing_acknowledged_is_lost_under_churn() {
    for seed in 0..30 {
        churn(seed, Loss::None, 1);
    }
}

#[test]
fn nothing_acknowledged_is_lost_under_churn_on_a_lossy_network() {
    let first_timeout = Duration::from_millis(200);
    for seed in 100..115 {
        churn(seed, Loss::Retransmit { chance: 0.02, first_timeout }, 1);
    }
}

#[test]
fn nothing_acknowledged_is_lost_while_virtual_servers_come_and_go() {
    for seed in 200..210 {
        churn(seed, Loss::None, 6);
    }
}
