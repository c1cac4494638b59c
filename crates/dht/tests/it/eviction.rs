//! TFS §2, dynamic contribution: a node whose owner wants his disk back gives copies up, and
//! nothing is lost by it.

use std::sync::Arc;

use atoll_dht::{Blocks, DhtConfig};
use atoll_key::KeyRange;
use atoll_store::{BlockInfo, MemoryStore};
use futures_util::future::{join, join_all};

use crate::faulty::{faulty, made_up_proofs, reply_to};
use crate::ring::{HOUR, ROOMY, Ring, block};

const BLOCKS: u32 = 60;

/// Repair does not run between a put and the end of a test.
fn ring(seed: u64, count: usize) -> Ring {
    let config = DhtConfig { repair_every: 100 * HOUR, ..DhtConfig::default() };
    let ring = Ring::configured(seed, config, count);
    ring.put(0, 0..BLOCKS);
    ring
}

fn held(ring: &Ring, member: usize) -> Vec<BlockInfo> {
    ring.members[member].store.list(KeyRange::full(), 1000).expect("memory does not fail")
}

/// Members give up all that they hold, at once; how many blocks each then did give up.
fn give_up(ring: &Ring, members: &[usize]) -> Vec<usize> {
    let given = members.iter().map(|member| {
        let (dht, blocks) = (ring.members[*member].dht.clone(), held(ring, *member));
        async move { dht.give_up(blocks).await.expect("memory does not fail").len() }
    });
    ring.sim.block_on(HOUR, join_all(given.collect::<Vec<_>>())).expect("ends")
}

fn copies(ring: &Ring, n: u32) -> usize {
    ring.holders(&block(n).0.key()).len()
}

#[test]
fn what_others_hold_is_given_up_and_still_read() {
    let ring = ring(1, 8);
    let before = held(&ring, 3).len();
    assert!(before > 0);
    assert_eq!(give_up(&ring, &[3]), [before]);
    assert_eq!(held(&ring, 3), []);
    (0..BLOCKS).for_each(|n| assert!(copies(&ring, n) >= 2, "block {n}"));
    ring.assert_readable(0..BLOCKS);
}

#[test]
fn what_too_few_others_hold_is_kept() {
    let ring = ring(2, 8);
    let mut kept = 0;
    for n in 0..BLOCKS {
        let holders = ring.holders(&block(n).0.key());
        if let Some(other) = holders.iter().find(|at| holders.contains(&3) && **at != 3) {
            ring.remove(*other, vec![block(n).0.key()]);
            kept += 1;
        }
    }
    assert!(kept > 0);
    assert_eq!(give_up(&ring, &[3]), [0]);
    assert_eq!(held(&ring, 3).len(), kept);
}

/// All owners of a laboratory come back from lunch.
#[test]
fn nodes_that_give_up_at_once_do_not_count_on_each_other() {
    for seed in 0..20 {
        let ring = ring(100 + seed, 8);
        let all: Vec<usize> = (0..8).collect();
        for _round in 0..3 {
            give_up(&ring, &all);
            for n in 0..BLOCKS {
                assert!(copies(&ring, n) >= 2, "block {n}, seed {seed}: {}", copies(&ring, n));
            }
        }
        ring.assert_readable(0..BLOCKS);
    }
}

#[test]
fn one_that_lies_about_what_it_holds_does_not_cost_the_last_copy() {
    let config = DhtConfig { repair_every: 100 * HOUR, ..DhtConfig::default() };
    let mut ring = Ring::configured(4, config, 3);
    let liar = ring.join_as(Arc::new(MemoryStore::new(ROOMY)), |honest| {
        faulty(honest, |_, request| reply_to(request, made_up_proofs))
    });
    ring.settle();
    ring.put(0, 0..BLOCKS);
    let of_liar: Vec<_> = held(&ring, liar).into_iter().map(|info| info.key).collect();
    assert!(!of_liar.is_empty());
    ring.remove(liar, of_liar);
    give_up(&ring, &[0, 1, 2]);
    give_up(&ring, &[0, 1, 2]);
    (0..BLOCKS).for_each(|n| assert!(copies(&ring, n) >= 1, "block {n}"));
}

#[test]
fn a_block_that_is_put_while_it_is_given_up_stays() {
    for seed in 0..20 {
        let ring = ring(200 + seed, 8);
        let (dht, blocks) = (ring.members[3].dht.clone(), held(&ring, 3));
        let putter = ring.members[5].dht.clone();
        let again: Vec<_> = (0..BLOCKS).map(block).collect();
        let both = join(
            async move { dht.give_up(blocks).await.expect("memory does not fail") },
            async move { putter.put(again).await.expect("the ring is healthy") },
        );
        ring.sim.block_on(HOUR, both).expect("ends");
        (0..BLOCKS).for_each(|n| assert!(copies(&ring, n) >= 2, "block {n}, seed {seed}"));
    }
}
