//! CFS §5.2 and Figure 11: copies of popular blocks along the lookup's path.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, CacheAt, Dht, DhtConfig, GetError, ReplicaChoice, rpc};
use atoll_key::{BlockHash, BlockKind, SecretKey, SignedBlock};
use atoll_net::{CallError, Peer, Request};
use atoll_overlay::chord::TablePolicy;
use atoll_sim::{Sim, SimConfig};
use bytes::Bytes;

use crate::perfect;
use crate::ring::{Ring, block};

const MINUTE: Duration = Duration::from_secs(60);

/// As in the paper: the first question is enough, and the root is asked for the block.
fn paper(cache_at: CacheAt) -> DhtConfig {
    DhtConfig {
        cache_at,
        cache_asks: 1,
        cache_bytes: 1 << 20,
        replicas: 1,
        replica_choice: ReplicaChoice::Root,
        ..DhtConfig::default()
    }
}

/// Fetches one block from nodes all over the ring; the calls each fetch took.
fn calls_of_fetches(sim: &Sim, dhts: &[Arc<Dht>], fetches: usize) -> Vec<usize> {
    let (hash, bytes) = block(7);
    let put = dhts[0].put(vec![(hash, bytes)]);
    sim.block_on(MINUTE, put).expect("ends").expect("a healthy ring");
    let one = |n: usize| {
        let dht = dhts[n * 7919 % dhts.len()].clone();
        let lookup = async move { dht.lookup(hash).await };
        let found = sim.block_on(MINUTE, lookup).expect("ends").expect("it is there");
        // The copy is on its way.
        sim.run_for(Duration::from_secs(1));
        found.trace.calls()
    };
    (1..=fetches).map(one).collect()
}

fn mean(calls: &[usize]) -> f64 {
    calls.iter().sum::<usize>() as f64 / calls.len() as f64
}

/// "The RPC counts decrease significantly after just a few lookups."
#[test]
fn figure_11_later_fetches_of_a_block_take_fewer_calls() {
    let run = |cache_at| {
        let sim = Sim::new(SimConfig { seed: 11, ..SimConfig::default() });
        let dhts = perfect::ring_of(&sim, 128, TablePolicy::Fingers, &paper(cache_at));
        let calls = calls_of_fetches(&sim, &dhts, 60);
        let sent: u64 = dhts.iter().map(|dht| dht.stats().cache_sent).sum();
        sim.shut_down();
        (mean(&calls[..10]), mean(&calls[50..]), sent)
    };
    let (uncached, last, none) = run(CacheAt::Off);
    assert!((uncached - last).abs() < 1.0, "nothing is cached: {uncached} then {last}");
    let (_, last, sent) = run(CacheAt::SecondToLast);
    assert!(last < 0.7 * uncached, "{last} calls, {uncached} without a cache");
    let (_, last_whole, sent_whole) = run(CacheAt::WholePath);
    assert!(last_whole <= last, "{last_whole} with copies all along the path, {last} with one");
    assert!(none == 0 && sent < sent_whole, "{sent} and {sent_whole} copies sent");
}

/// Where the tables are full, the first question went to the root and was answered: it served
/// nearly all readers of a popular block, whatever copies there were (§5.2).
#[test]
fn with_full_tables_all_copies_of_a_popular_block_are_read() {
    let sim = Sim::new(SimConfig { seed: 52, ..SimConfig::default() });
    let config = DhtConfig { cache_at: CacheAt::Off, cache_bytes: 0, ..DhtConfig::default() };
    let dhts = perfect::ring_of(&sim, 64, TablePolicy::default(), &config);
    sim.run_for(10 * MINUTE);
    let calls = calls_of_fetches(&sim, &dhts, 120);
    assert!(mean(&calls) < 1.3, "{} calls: the tables are not full", mean(&calls));
    let mut served: Vec<u64> = dhts.iter().map(|dht| dht.stats().served).collect();
    served.sort_unstable();
    let (all, busiest) = (served.iter().sum::<u64>(), served[served.len() - 1]);
    sim.shut_down();
    assert!(busiest * 100 < all * 60, "the busiest served {busiest} of {all}");
}

#[test]
fn what_is_fetched_once_sends_no_copies_about() {
    let ring = Ring::new(1, 12);
    ring.put(0, 0..100);
    ring.assert_readable(0..0);
    for n in 0..100 {
        ring.try_get(n as usize % 12, block(n).0).expect("it is there");
    }
    ring.sim.run_for(MINUTE);
    let sent: u64 = ring.members.iter().map(|m| m.dht.stats().cache_sent).sum();
    assert!(sent <= 2, "{sent} copies of blocks that were asked for once");
    let cached: u64 = ring.members.iter().map(|m| m.dht.stats().cache_blocks).sum();
    assert!(cached <= 2, "{cached} blocks cached");
}

#[test]
fn a_node_that_asks_again_and_again_answers_itself() {
    let ring = Ring::new(2, 12);
    ring.put(0, 0..20);
    for _ in 0..3 {
        (0..20).for_each(|n| drop(ring.try_get(5, block(n).0).expect("it is there")));
    }
    let before = ring.members[5].dht.stats().get_calls;
    (0..20).for_each(|n| drop(ring.try_get(5, block(n).0).expect("it is there")));
    let stats = ring.members[5].dht.stats();
    assert_eq!(stats.get_calls, before, "all from its own store and cache");
    assert!(stats.cache_hits >= 10 && stats.cache_blocks >= 10, "{stats:?}");
}

fn send_copy(ring: &Ring, from: usize, bytes: &[u8]) -> Result<bool, CallError> {
    let key = BlockHash::of(bytes).key();
    send(ring, from, rpc::BlockHeader { key, kind: BlockKind::Content, lease_secs: 1000 }, bytes)
}

fn send(
    ring: &Ring,
    from: usize,
    block: rpc::BlockHeader,
    bytes: &[u8],
) -> Result<bool, CallError> {
    let header = rpc::to_header(&rpc::CacheCopy { block });
    let parts = vec![Bytes::copy_from_slice(bytes)];
    let request = Request { method: rpc::CACHE, header, parts };
    let to: Peer = ring.node(0).peer;
    let transport = ring.sim.transport(ring.members[from].host);
    let call = transport.call(to, request, Duration::from_secs(5));
    let reply = ring.sim.block_on(MINUTE, call).expect("calls have deadlines")?;
    let reply: rpc::CacheReply = rpc::from_header(&reply.header).map_err(CallError::from)?;
    Ok(reply.taken)
}

#[test]
fn copies_that_nobody_asked_for_are_not_taken() {
    let config = DhtConfig { cache_asks: 1, cache_bytes: 100_000, ..DhtConfig::default() };
    let ring = Ring::with(SimConfig { seed: 4, ..SimConfig::default() }, config, 3);
    for n in 0..500u32 {
        let mut bytes = vec![7; 2000];
        bytes[..4].copy_from_slice(&n.to_be_bytes());
        assert_eq!(send_copy(&ring, 1, &bytes), Ok(false));
    }
    let stats = ring.members[0].dht.stats();
    assert_eq!((stats.cache_blocks, stats.cache_bytes, stats.cache_refused), (0, 0, 500));
}

/// Somebody who asks for each of its blocks before it sends it gets them in, but never
/// beyond the limit, and bad ones never.
#[test]
fn a_flood_of_copies_keeps_to_the_limit_and_bad_ones_are_refused() {
    let config = DhtConfig {
        cache_asks: 1,
        cache_bytes: 50_000,
        get_limit: Duration::from_secs(2),
        ..DhtConfig::default()
    };
    let ring = Ring::with(SimConfig { seed: 5, ..SimConfig::default() }, config, 12);
    let mut taken = 0;
    for n in 0..100u32 {
        let mut bytes = vec![9; 2000];
        bytes[..4].copy_from_slice(&n.to_be_bytes());
        let hash = BlockHash::of(&bytes);
        let step = rpc::LookupStep { key: hash.key(), as_root: false, may_be_cached: true };
        let header = rpc::to_header(&step);
        let request = Request { method: rpc::LOOKUP_STEP, header, parts: Vec::new() };
        let transport = ring.sim.transport(ring.members[1].host);
        let call = transport.call(ring.node(0).peer, request, Duration::from_secs(5));
        ring.sim.block_on(MINUTE, call).expect("ends").expect("answered");
        let header =
            rpc::BlockHeader { key: hash.key(), kind: BlockKind::Content, lease_secs: 1000 };
        if n < 10 {
            assert!(send(&ring, 1, header, b"something else").is_err(), "not what the key says");
        }
        taken += u64::from(send_copy(&ring, 1, &bytes).expect("answered"));
    }
    let stats = ring.members[0].dht.stats();
    assert!(taken >= 10 && stats.cache_bytes <= 50_000, "{taken} taken: {stats:?}");
    assert_eq!(stats.bad_blocks.get(&ring.node(1).peer.id), Some(&10));
}

fn signed(version: u64) -> SignedBlock {
    SignedBlock::sign(&SecretKey::from_seed(&[9; 32]), b"", version, b"payload")
}

/// A signed block that somebody sends is not taken: it could be an old one.
#[test]
fn nobody_can_push_a_signed_block_into_a_cache() {
    let config = DhtConfig { cache_asks: 1, ..DhtConfig::default() };
    let ring = Ring::with(SimConfig { seed: 7, ..SimConfig::default() }, config, 12);
    let old = signed(1);
    let get = ring.members[0].dht.get_signed(old.key());
    let missing = ring.sim.block_on(MINUTE, get).expect("ends");
    assert!(matches!(missing, Err(GetError::NotFound { .. })), "{missing:?}");
    let kind = BlockKind::Signed;
    let header = rpc::BlockHeader { key: old.key(), kind, lease_secs: 1000 };
    assert_eq!(send(&ring, 1, header, old.bytes()), Ok(false));
    assert_eq!(ring.members[0].dht.stats().cache_blocks, 0);
}
