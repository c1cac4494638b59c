//! CFS §5.1: the client fetches a block from the nearest of its replicas; and does not wait
//! for one that has become slow.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, CacheAt, DhtConfig, Mechanisms, ReplicaChoice, rpc};
use atoll_env::{BoxFuture, Env, sleep};
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_sim::{Connections, HostConfig, Latency, SimConfig, TcpModel};
use atoll_store::MemoryStore;
use futures_util::future::{join_all, ready};
use futures_util::{StreamExt, stream};

use crate::ring::{ROOMY, Ring, block, sized_block};

const MINUTE: Duration = Duration::from_secs(60);
const BLOCKS: u32 = 400;

/// Answers honestly but keeps whoever asks for a block waiting.
struct Slow {
    inner: Arc<dyn Service>,
    env: Env,
    delay: Duration,
}

impl Service for Slow {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let delay = match request.method {
            rpc::LOOKUP_STEP => self.delay,
            _ => Duration::ZERO,
        };
        let (answer, pause) = (self.inner.handle(from, request), sleep(&*self.env, delay));
        Box::pin(async move {
            pause.await;
            answer.await
        })
    }
}

fn config() -> DhtConfig {
    DhtConfig { cache_at: CacheAt::Off, ..DhtConfig::default() }
}

fn unhedged() -> DhtConfig {
    DhtConfig { mechanisms: Mechanisms::without_hedged_lookups(), ..config() }
}

/// A ring of six honest nodes and one that is slow now and then, with blocks.
fn ring_with_slow(config: DhtConfig, slow_from: Duration) -> Ring {
    let mut ring = Ring::with(SimConfig { seed: 1, ..SimConfig::default() }, config, 6);
    let env = ring.sim.env(ring.members[0].host);
    ring.join_as(Arc::new(MemoryStore::new(ROOMY)), |dht| {
        Arc::new(Slow { inner: dht, env: env.clone(), delay: slow_from })
    });
    ring.settle();
    ring.put(0, 0..BLOCKS);
    ring.until_replicated();
    ring
}

fn time_to_fetch_all(ring: &Ring, at: usize) -> Duration {
    let start = ring.sim.now();
    (0..BLOCKS).for_each(|n| drop(ring.try_get(at, block(n).0).expect("it is there")));
    ring.sim.now().since(start)
}

#[test]
fn the_nearest_replica_serves_most_and_a_far_one_little() {
    let served = |replica_choice| {
        let config = DhtConfig { replica_choice, ..config() };
        let mut ring = Ring::with(SimConfig { seed: 2, ..SimConfig::default() }, config, 5);
        let far = HostConfig { access_delay: MINUTE / 300, ..HostConfig::default() };
        let far = ring.join_host(far);
        ring.settle();
        ring.put(0, 0..BLOCKS);
        ring.until_replicated();
        for at in 0..5 {
            time_to_fetch_all(&ring, at);
        }
        ring.members[far].dht.stats().served
    };
    let (by_root, by_nearest) = (served(ReplicaChoice::Root), served(ReplicaChoice::Nearest));
    assert!(by_root >= 30, "the far node is the root of some: {by_root}");
    assert!(by_nearest * 3 < by_root, "{by_nearest} from afar, {by_root} as root");
}

#[test]
fn replicas_about_equally_near_share_the_load() {
    let config = DhtConfig { replicas: 3, ..unhedged() };
    let ring = Ring::with(SimConfig { seed: 3, jitter: 0.0, ..SimConfig::default() }, config, 4);
    ring.put(0, 0..BLOCKS);
    ring.until_replicated();
    (0..BLOCKS).for_each(|n| drop(ring.try_get(0, block(n).0).expect("it is there")));
    let served: Vec<u64> = ring.members[1..].iter().map(|m| m.dht.stats().served).collect();
    let total: u64 = served.iter().sum();
    assert!(served.iter().all(|count| *count * 8 > total), "{served:?}");
}

#[test]
fn a_slow_replica_is_hedged_within_the_budget() {
    let slow = Duration::from_millis(900);
    let hedged = ring_with_slow(config(), slow);
    let with = time_to_fetch_all(&hedged, 1);
    let stats = hedged.members[1].dht.stats();
    assert!(stats.hedges > 0 && stats.hedges_won > 0, "{stats:?}");
    assert!(stats.hedges <= stats.gets / 20 + 8, "more than 5 % and a burst of 8: {stats:?}");
    assert!(stats.hedges_won <= stats.hedges);
    let plain = ring_with_slow(unhedged(), slow);
    let without = time_to_fetch_all(&plain, 1);
    assert_eq!(plain.members[1].dht.stats().hedges, 0);
    assert!(with <= without, "{with:?} with hedges, {without:?} without");
}

/// Twelve nodes as far apart as sites of the Internet, with TCP between them and a file of
/// sixteen blocks that nobody has read: each block comes once. When blocks were judged by
/// what short answers take, the first eight hedges fired, all for nothing.
#[test]
fn a_cold_read_of_a_healthy_ring_hedges_hardly_anything_and_receives_little_twice() {
    let mut hedges = Vec::new();
    for seed in 1..5 {
        let sim = SimConfig {
            seed,
            latency: Latency::Sphere { max: Duration::from_millis(150) },
            connections: Connections::Tcp(TcpModel::today()),
            ..SimConfig::default()
        };
        let ring = Ring::with(sim, config(), 12);
        let blocks: Vec<_> = (0..16).map(|n| sized_block(n, 64 << 10)).collect();
        ring.try_put(0, blocks.clone()).expect("the ring is healthy");
        ring.until_replicated();
        ring.sim.run_for(MINUTE);
        let served = || ring.members.iter().map(|m| m.dht.stats().served_bytes).sum::<u64>();
        for at in 1..12 {
            let dht = &ring.members[at].dht;
            let (before, stats) = (served(), dht.stats());
            let held = blocks.iter().filter(|(hash, _)| ring.holders(&hash.key()).contains(&at));
            let wanted = ((16 - held.count()) as u64) << 16;
            let gets = join_all(blocks.iter().map(|(hash, _)| dht.get(*hash)));
            let got = ring.sim.block_on(MINUTE, gets).expect("gets have deadlines");
            assert!(got.iter().all(Result::is_ok), "{got:?}");
            let fired = dht.stats().hedges - stats.hedges;
            let twice = served() - before - wanted;
            assert!(fired <= 2 && twice <= 2 << 16, "seed {seed}, {at}: {fired}, {twice} bytes");
            hedges.push(fired);
        }
    }
    assert!(hedges.iter().sum::<u64>() <= 4, "{hedges:?} of 11 blocks each");
}

/// How long three nodes take, together, to read 240 blocks of 64 KiB over lines of 100 Mbit/s.
fn bulk_read_secs(config: &DhtConfig, seed: u64) -> f64 {
    let sim = SimConfig {
        seed,
        latency: Latency::Sphere { max: Duration::from_millis(150) },
        connections: Connections::Tcp(TcpModel::today()),
        ..SimConfig::default()
    };
    let mut ring = Ring::with(sim, config.clone(), 1);
    let rate = Some(12_500_000);
    let line = HostConfig {
        upload_bytes_per_sec: rate,
        download_bytes_per_sec: rate,
        ..HostConfig::default()
    };
    for _ in 0..9 {
        ring.join_host(line.clone());
    }
    ring.settle();
    let blocks: Vec<_> = (0..240).map(|n| sized_block(n, 64 << 10)).collect();
    for part in blocks.chunks(30) {
        ring.try_put(0, part.to_vec()).expect("the ring is healthy");
    }
    ring.until_replicated();
    ring.sim.run_for(MINUTE);
    let start = ring.sim.now();
    for at in 1..4 {
        let (dht, hashes) = (ring.members[at].dht.clone(), blocks.clone());
        let gets = stream::iter(hashes).map(move |(hash, _)| dht.get(hash)).buffer_unordered(64);
        let got = ring.sim.block_on(MINUTE * 5, gets.all(|got| ready(got.is_ok())));
        assert_eq!(got, Ok(true), "seed {seed}, {at}");
    }
    ring.sim.now().since(start).as_secs_f64()
}

/// A near replica's line is soon full: farther ones send as well.
#[test]
fn a_bulk_read_uses_the_lines_of_several_replicas() {
    let mut by_distance_alone = config();
    by_distance_alone.mechanisms.busy_replicas = false;
    let secs = |config: &DhtConfig| (1..16).map(|seed| bulk_read_secs(config, seed)).sum::<f64>();
    let (with, without) = (secs(&config()), secs(&by_distance_alone));
    assert!(with < 0.95 * without, "{with} s, and {without} s by distance alone");
}

/// The nearest replica may have lost the block: the next is asked, and the first is healed.
#[test]
fn a_replica_without_the_block_is_passed_over_and_healed() {
    let ring = Ring::with(SimConfig { seed: 4, ..SimConfig::default() }, config(), 6);
    ring.put(0, 0..40);
    ring.until_replicated();
    for n in 0..40 {
        let key = block(n).0.key();
        let set = ring.replica_set(&key);
        for member in &set[..2] {
            let removed = ring.members[*member].store.remove(vec![key]);
            ring.sim.block_on(MINUTE, removed).expect("ends").expect("memory");
        }
    }
    for n in 0..40 {
        let (hash, bytes) = block(n);
        assert_eq!(ring.try_get(n as usize % 6, hash), Ok(bytes), "block {n}");
    }
    ring.sim.run_for(Duration::from_secs(1));
    let copies: usize = (0..40).map(|n| ring.holders(&block(n).0.key()).len()).sum();
    assert!(copies > 40, "healed before repair has run: {copies}");
}
