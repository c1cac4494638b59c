//! What was acknowledged is durable on a majority of its replica set: the ways in which
//! that could become untrue.

use std::time::Duration;

use atoll_dht::{Blocks, DhtConfig, PutError};
use atoll_key::{BlockHash, BlockKind, SecretKey, SignedBlock};
use atoll_sim::{Sim, SimConfig};
use atoll_store::{BlockInfo, StoredBlock};
use bytes::Bytes;

use crate::ring::{Ring, block, sized_block};

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

/// A node cut off became the root of everything and said that the ring lacks what the other
/// nodes hold: a keeper took its volumes for lost.
#[test]
fn a_node_cut_off_does_not_call_blocks_lost() {
    let ring = impatient(7, DhtConfig::default(), 5);
    ring.put(0, 0..40);
    let elsewhere = |hash: &BlockHash| !ring.holders(&hash.key()).contains(&0);
    let hashes: Vec<_> = (0..40).map(|n| block(n).0).filter(elsewhere).collect();
    assert!(!hashes.is_empty(), "5 nodes, 3 replicas");
    cut_off_first(&ring);
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

fn signed(version: u64, payload: &[u8]) -> SignedBlock {
    SignedBlock::sign(&SecretKey::from_seed(&[9; 32]), b"", version, payload)
}

/// Only the root compared the bytes: a root that had just taken over and did not have the
/// block yet accepted another one of the same version, its replicas acknowledged what they
/// had not stored, and nothing made them equal again.
#[test]
fn another_block_of_the_same_version_is_refused_by_a_root_that_lacks_the_first() {
    // Either may be the greater by its bytes, which is how a reader chooses.
    for (first, second) in [(b"one", b"two"), (b"two", b"one")] {
        let ring = Ring::new(5, 5);
        let (first, second) = (signed(7, first), signed(7, second));
        let key = first.key();
        let put = ring.members[0].dht.put_signed(first.clone());
        assert_eq!(ring.sim.block_on(MINUTE, put).expect("ends"), Ok(()));
        let mut set = ring.replica_set(&key);
        set.sort_by_key(|i| ring.node(*i).id.key().distance_from(&key));
        let removed = ring.members[set[0]].store.remove(vec![key]);
        ring.sim.block_on(MINUTE, removed).expect("ends").expect("memory");
        let put = ring.members[1].dht.put_signed(second);
        let refused = ring.sim.block_on(MINUTE, put).expect("ends");
        assert_eq!(refused, Err(PutError::Superseded { offered: 7, held: 7 }));
        ring.members[set[0]].dht.repair_now();
        ring.until_replicated();
        for member in &ring.members {
            let get = member.dht.get_signed(key);
            assert_eq!(ring.sim.block_on(MINUTE, get).expect("ends"), Ok(first.clone()));
        }
    }
}

#[test]
fn of_two_blocks_of_one_version_put_at_once_at_most_one_is_acknowledged() {
    for seed in 0..20 {
        let sim = SimConfig { seed, jitter: 0.8, ..SimConfig::default() };
        let ring = Ring::with(sim, DhtConfig::default(), 5);
        let blocks = [signed(3, b"one"), signed(3, b"two")];
        let puts = futures_util::future::join(
            ring.members[1].dht.put_signed(blocks[0].clone()),
            ring.members[2].dht.put_signed(blocks[1].clone()),
        );
        let (one, two) = ring.sim.block_on(MINUTE * 5, puts).expect("puts have deadlines");
        assert!(one.is_err() || two.is_err(), "both acknowledged, seed {seed}");
        for (put, block) in [one, two].into_iter().zip(blocks) {
            if put.is_ok() {
                let get = ring.members[3].dht.get_signed(block.key());
                assert_eq!(ring.sim.block_on(MINUTE, get).expect("ends"), Ok(block), "{seed}");
            }
        }
    }
}

/// A node that had not looked at its neighbours for longer than `SHRINK_AFTER` (a round of
/// repair can take hours) took the first look after it was cut off for the end of the wait.
#[test]
fn a_node_cut_off_after_a_quiet_hour_is_still_no_majority() {
    let config = DhtConfig { repair_every: MINUTE * 300, ..DhtConfig::default() };
    let ring = impatient(3, config, 2);
    ring.sim.run_for(MINUTE * 60);
    cut_off_first(&ring);
    for _ in 0..2 {
        let put = ring.try_put(0, (0..20).map(block).collect());
        assert!(matches!(put, Err(PutError::Unavailable(_))), "{put:?}");
    }
}

/// The wait began when the first of two neighbours failed, and ended soon after the second. And
/// a node that is left alone may be the one that was cut off, however long that lasts.
#[test]
fn a_ring_that_shrinks_twice_is_waited_for_twice_and_for_the_last_node_for_ever() {
    let ring = impatient(4, DhtConfig::default(), 3);
    ring.crash(1);
    ring.sim.run_for(MINUTE * 9);
    ring.crash(2);
    for wait in [3, 12, 600] {
        ring.sim.run_for(MINUTE * wait);
        let put = ring.try_put(0, (0..20).map(block).collect());
        assert!(matches!(put, Err(PutError::Unavailable(_))), "{put:?}");
    }
    let word = ring.members[0].dht.forget_absent();
    ring.sim.block_on(MINUTE, word).expect("ends").expect("saved");
    ring.put(0, 0..20);
}

/// Blocks in the hour after their lease are listed but not taken over. When a reply was full
/// of them, the blocks after them were not asked for again.
#[test]
fn expired_blocks_do_not_hide_others_from_repair() {
    let ring = Ring::new(6, 2);
    let before_first = ring.node(1).id;
    let root_is_first = |hash: &BlockHash| {
        let distance = |i: usize| ring.node(i).id.key().distance_from(&hash.key());
        distance(0) < distance(1)
    };
    let mut blocks: Vec<(BlockHash, Bytes)> =
        (0..400).map(|n| sized_block(n, 60_000)).filter(|(hash, _)| root_is_first(hash)).collect();
    // In the order in which the root meets them.
    blocks.sort_by_key(|(hash, _)| hash.key().distance_from(before_first.key()));
    blocks.truncate(60);
    let now = ring.sim.env(ring.members[1].host).unix_ms() / 1000;
    let stored = blocks.iter().enumerate().map(|(i, (hash, bytes))| StoredBlock {
        info: BlockInfo {
            key: hash.key(),
            kind: BlockKind::Content,
            version: 0,
            expires_unix_secs: if i < 30 { now - 60 } else { now + 100_000 },
            len_bytes: 60_000,
            owner: atoll_store::Owner::NOBODY,
        },
        bytes: bytes.clone(),
    });
    let put = ring.members[1].store.put(stored.collect());
    ring.sim.block_on(MINUTE, put).expect("ends").expect("memory");
    ring.members[0].dht.repair_now();
    ring.sim.run_for(Duration::from_secs(50));
    for (i, (hash, _)) in blocks.iter().enumerate() {
        let held = ring.members[0].store.info(&hash.key()).expect("memory").is_some();
        assert_eq!(held, i >= 30, "block {i} of {}", blocks.len());
    }
}
