//! Random joins, leaves and crashes, with Zave's invariants asserted after every step.

use std::time::Duration;

use atoll_key::NodeId;
use atoll_overlay::Neighbourhood;
use atoll_overlay::chord::ChordConfig;
use atoll_sim::{HostId, Loss, SimConfig};

use super::cluster::{Cluster, Dice, MINUTE, lan};

/// Zave's assumption: "no failure leaves a member without a live successor".
fn may_fail(victim: NodeId, live: &[Neighbourhood]) -> bool {
    live.iter().filter(|n| n.joined && n.me.id != victim).all(|member| {
        member
            .successors
            .iter()
            .any(|s| s.id != victim && live.iter().any(|n| n.me.id == s.id && n.joined))
    })
}

/// Grows a ring and lets nodes come and go; returns it as it is in the middle of it all.
fn churned(sim: SimConfig, events: usize, silent: bool) -> Cluster {
    let seed = sim.seed;
    let config = ChordConfig { successors: 4, ..ChordConfig::default() };
    let cluster = Cluster::grown(sim, config, 5);
    cluster.run_until_ideal(MINUTE);
    // The base: r + 1 members that stay.
    let stay = cluster.hosts();
    let base = stay.iter().map(|h| cluster.chord(*h).me().id).collect();
    cluster.watch(base);
    let mut dice = Dice(seed);
    for _ in 0..events {
        let hosts = cluster.hosts();
        let come_and_go: Vec<HostId> =
            hosts.iter().filter(|h| !stay.contains(h)).copied().collect();
        let joins = dice.below(100) < 55 || come_and_go.is_empty();
        if joins && hosts.len() < 40 {
            let host = cluster.add();
            cluster.join_in_background(host, stay[dice.below(stay.len())]);
        } else if !come_and_go.is_empty() {
            let victim = come_and_go[dice.below(come_and_go.len())];
            if may_fail(cluster.chord(victim).me().id, &cluster.live()) {
                match dice.below(3) {
                    0 => cluster.leave(victim),
                    1 if silent => cluster.crash_silently(victim),
                    _ => cluster.crash(victim),
                }
            }
        }
        // Often several at once, sometimes a pause that lets the ring settle.
        let pause_ms = [0, 0, 3, 40, 400, 2500][dice.below(6)];
        cluster.sim.run_for(Duration::from_millis(pause_ms));
    }
    cluster
}

#[test]
fn the_invariants_hold_at_every_step_of_a_churning_ring() {
    for seed in 1..=12 {
        let cluster = churned(lan(seed), 120, false);
        let took = cluster.run_until_ideal(MINUTE);
        assert!(cluster.live().len() >= 5, "seed {seed}, at rest after {took:?}");
    }
}

#[test]
fn the_invariants_hold_when_machines_vanish_and_callers_must_time_out() {
    // 664: a burst of joins behind a dead node sent a joiner back more nodes than the walk
    // would follow; it then took a farther node for its successor and skipped the base.
    for seed in [21, 22, 23, 24, 25, 26, 664] {
        let cluster = churned(lan(seed), 100, true);
        cluster.run_until_ideal(MINUTE * 2);
    }
}

#[test]
fn a_ring_that_loses_messages_is_whole_again_when_they_arrive() {
    // False suspicions are possible here, so the invariants are asked for at the end only.
    for seed in 31..=34 {
        let sim = SimConfig { loss: Loss::Drop { chance: 0.05 }, ..lan(seed) };
        let config = ChordConfig { successors: 4, ..ChordConfig::default() };
        let cluster = Cluster::perfect(sim, config, 24, true);
        cluster.run_secs(120);
        for host in cluster.hosts().into_iter().take(3) {
            cluster.crash(host);
        }
        cluster.run_secs(30);
        cluster.sim.set_loss(Loss::None);
        cluster.run_until_ideal(MINUTE * 2);
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = |seed| {
        let cluster = churned(lan(seed), 60, true);
        cluster.run_secs(20);
        (cluster.sim.trace_hash(), cluster.sim.event_count())
    };
    assert_eq!(run(41), run(41));
    assert_ne!(run(41).0, run(42).0);
}
