//! CFS §7.2.5: "a fraction of the servers fail without warning", and lookups go on.

use std::time::Duration;

use atoll_dht::{Blocks, CacheAt, DhtConfig, GetError, Mechanisms, ReplicaChoice, rpc};
use atoll_overlay::chord::{ChordConfig, TablePolicy};
use atoll_overlay::walk::Selection;
use atoll_sim::{HostConfig, Sim, SimConfig};
use futures_util::future::join_all;

use crate::perfect::ring_at_rest;
use crate::ring::{Ring, block};

const NODES: usize = 40;
const BLOCKS: u32 = 120;

/// Kills half the ring, all but node 0 being equally likely; returns it and how many blocks
/// have no living copy.
fn half_a_ring(seed: u64, config: DhtConfig) -> (Ring, usize) {
    let ring = Ring::configured(seed, config, NODES);
    ring.put(0, 0..BLOCKS);
    ring.until_replicated();
    let mut others: Vec<usize> = (1..NODES).collect();
    for _ in 0..NODES / 2 {
        let chosen = atoll_env::random_below(&*ring.sim.outside(), others.len() as u64) as usize;
        ring.sim.crash_silently(ring.members[others.swap_remove(chosen)].host);
    }
    let lost = (0..BLOCKS).filter(|n| ring.holders(&block(*n).0.key()).is_empty()).count();
    (ring, lost)
}

/// Questions of lookups that were not answered so far.
fn unanswered(sim: &Sim) -> u64 {
    let stats = sim.stats();
    let of_lookups = stats.methods.get(&rpc::LOOKUP_STEP).copied().unwrap_or_default();
    of_lookups.call_count - of_lookups.reply_count
}

/// "All of the lookup failures encountered in this experiment are due to all of a block's
/// replicas failing." With two seconds for each dead node on the way, others failed too.
#[test]
fn half_the_ring_dies_at_once_and_only_lookups_of_lost_blocks_fail() {
    for seed in 1..=3 {
        let (ring, lost) = half_a_ring(seed, DhtConfig::default());
        let before = unanswered(&ring.sim);
        let reader = ring.members[0].dht.clone();
        let all = (0..BLOCKS).map(|n| {
            let (reader, env) = (reader.clone(), ring.sim.outside());
            async move {
                let start = env.now();
                let got = reader.get(block(n).0).await;
                (got, env.now().since(start))
            }
        });
        let all = ring.sim.block_on(Duration::from_secs(60), join_all(all)).expect("deadlines");
        let failed: Vec<&GetError> = all.iter().filter_map(|(got, _)| got.as_ref().err()).collect();
        assert_eq!(failed.len(), lost, "seed {seed}: {failed:?}");
        let mut times: Vec<Duration> =
            all.iter().filter(|(got, _)| got.is_ok()).map(|(_, took)| *took).collect();
        times.sort_unstable();
        let (median, most) = (times[times.len() / 2], times[times.len() - 1]);
        assert!(median < Duration::from_secs(1), "seed {seed}: {median:?}");
        assert!(most < Duration::from_secs(8), "seed {seed}: {most:?}");
        let timeouts = (unanswered(&ring.sim) - before) as f64 / f64::from(BLOCKS);
        assert!(timeouts < 2.0, "seed {seed}: {timeouts} timeouts for each lookup");
    }
}

/// CFS Figure 15: fewer than one timeout a lookup at any share. "Before Chord starts rebuilding
/// its routing tables", all the others go on naming the dead; each costs one timeout all the
/// same. It was two and a half a lookup when each node that was named was asked.
#[test]
fn each_of_the_dead_is_asked_once_though_nobody_else_notices() {
    let sim = Sim::new(SimConfig { seed: 5, ..SimConfig::default() });
    let chord = ChordConfig {
        successors: 14,
        suspect_for: Duration::from_secs(24 * 3600),
        routes: 1,
        check_nodes: false,
        table: TablePolicy::Fingers,
        ..ChordConfig::default()
    };
    let dht = DhtConfig {
        replicas: 6,
        selection: Selection::NearestKey,
        routes: 1,
        replica_choice: ReplicaChoice::Root,
        mechanisms: Mechanisms::without_hedged_lookups(),
        cache_at: CacheAt::Off,
        call_limit: Duration::from_secs(1),
        ..DhtConfig::default()
    };
    let hosts = sim.add_hosts(128, &HostConfig::default());
    let ring = ring_at_rest(&sim, &hosts, &chord, &dht);
    let limit = Duration::from_secs(3600);
    let puts = join_all((0..BLOCKS).map(|n| ring[0].dht.put(vec![block(n)])));
    let puts = sim.block_on(limit, puts).expect("puts end");
    assert!(puts.iter().all(Result::is_ok));
    hosts[1..].iter().step_by(2).for_each(|host| sim.crash_silently(*host));
    let before = unanswered(&sim);
    let gets = (0..BLOCKS).map(|n| sim.block_on(limit, ring[0].dht.get(block(n).0)));
    let found = gets.filter(|got| matches!(got, Ok(Ok(_)))).count();
    assert!(found >= 114, "{found} of {BLOCKS}: all six copies die of one in 64");
    let timeouts = (unanswered(&sim) - before) as f64 / f64::from(BLOCKS);
    assert!(timeouts < 0.8, "{timeouts} timeouts for each lookup");
    sim.shut_down();
}
