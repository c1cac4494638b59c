//! Nodes that lie about the copies they keep for members without room.

use std::sync::Arc;

use atoll_dht::DhtConfig;
use atoll_dht::durable::DurableState;
use atoll_dht::rpc::{
    self, AskHoldings, DivertReply, Diverted, HeldCopy, HoldingsReply, Pointing, PutStatus,
};
use atoll_key::Key;
use atoll_net::{Reply, Request, Service};
use atoll_store::MemoryStore;

use crate::faulty::{ALL, altered, faulty, made_up_proofs, reply_to, takes_all};
use crate::ring::{HOUR, MINUTE, ROOMY, Ring, block};

const SEEDS: std::ops::Range<u64> = 1..4;

/// What a false holder does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lie {
    /// Says that it has taken what it throws away, and makes up proofs.
    TakesNothing,
    /// Takes a block for one member, and says so to all.
    TakesOnce,
    /// Says that it has endless room, and keeps copies as others do.
    HasEndlessRoom,
    /// Says that it still has all copies.
    HasAll,
}

/// What it says instead of what is true, without keeping anything.
fn takes_nothing(request: &Request) -> Option<Reply> {
    reply_to(request, takes_all).or_else(|| reply_to(request, made_up_proofs))
}

/// Changes what it says of the copies it keeps.
fn boast(lie: Lie, request: &Request, reply: &mut Reply) {
    match request.method {
        rpc::DIVERT => {
            let mut said: DivertReply = rpc::from_header(&reply.header).expect("honest");
            if lie == Lie::TakesOnce {
                let status = PutStatus::Stored { copies: 1, wanted: 1 };
                said.blocks.0.fill(Diverted { status, held: Some(KEPT) });
            }
            said.spare_bytes = u64::MAX;
            reply.header = rpc::to_header(&said);
        }
        rpc::HOLDINGS => {
            let mut said: HoldingsReply = rpc::from_header(&reply.header).expect("honest");
            let asked: AskHoldings = rpc::from_header(&request.header).expect("honest");
            if asked.pointing == Pointing::Yes && lie != Lie::HasEndlessRoom {
                said.held.0.fill(Some(KEPT));
            }
            said.spare_bytes = u64::MAX;
            reply.header = rpc::to_header(&said);
        }
        _ => {}
    }
}

fn false_holder(honest: Arc<dyn Service>, lie: Lie) -> Arc<dyn Service> {
    let honest = altered(honest, move |request, reply| boast(lie, request, reply));
    faulty(honest, move |_, request| takes_nothing(request).filter(|_| lie == Lie::TakesNothing))
}

const KEPT: HeldCopy = HeldCopy { lease_secs: 30 * 24 * 3600, ..ALL };

/// `roomy` honest nodes, `full` ones, and a false holder, the last.
fn ring(seed: u64, roomy: usize, full: usize, lie: Lie) -> Ring {
    let mut ring = Ring::new(seed, roomy);
    for _ in 0..full {
        ring.join(Arc::new(MemoryStore::new(0)));
    }
    ring.join_as(Arc::new(MemoryStore::new(ROOMY)), move |honest| false_holder(honest, lie));
    ring.settle();
    ring
}

/// One after another: each put chooses anew.
fn put_one_by_one(ring: &Ring, count: u32) {
    (0..count).for_each(|n| ring.put(0, n..n + 1));
}

fn key(n: u32) -> Key {
    block(n).0.key()
}

/// Blocks that the last node keeps outside their replica sets.
fn kept_by_last(ring: &Ring, count: u32) -> Vec<Key> {
    let last = ring.members.len() - 1;
    let keeps =
        |key: &Key| ring.holders(key).contains(&last) && !ring.replica_set(key).contains(&last);
    (0..count).map(key).filter(keeps).collect()
}

/// A node that claimed the most room was given all copies, and each counted on its word.
#[test]
fn a_copy_counts_only_when_its_holder_proves_it() {
    for seed in SEEDS {
        let ring = ring(seed, 5, 1, Lie::TakesNothing);
        let liar = ring.members.len() - 1;
        put_one_by_one(&ring, 60);
        for n in (0..60).filter(|n| !ring.replica_set(&key(*n)).contains(&liar)) {
            assert_eq!(ring.holders(&key(n)).len(), 3, "block {n}, seed {seed}");
        }
    }
}

/// Two members without room chose the same holder, and one copy counted as two.
#[test]
fn two_members_do_not_count_one_copy_twice() {
    for seed in SEEDS {
        let ring = ring(seed, 4, 2, Lie::TakesOnce);
        ring.put(0, 0..100);
        for n in 0..100 {
            // What two had it keep, and then neither, is there for a while besides.
            assert!(ring.holders(&key(n)).len() >= 3, "block {n}, seed {seed}");
        }
    }
}

#[test]
fn claiming_endless_room_attracts_no_more_copies_than_others_get() {
    for seed in SEEDS {
        let ring = ring(seed, 8, 3, Lie::HasEndlessRoom);
        put_one_by_one(&ring, 120);
        let kept = kept_by_last(&ring, 120).len();
        let diverted: u64 = ring.up().map(|member| member.dht.stats().pointers).sum();
        assert!(diverted > 20, "{diverted} of 120 copies are diverted, seed {seed}");
        assert!(kept as u64 <= diverted / 3, "{kept} of {diverted}, seed {seed}");
    }
}

/// A check looked at one block of a thousand, and found out that this one was gone.
#[test]
fn a_holder_that_drops_everything_is_found_out_at_the_next_check() {
    let ring = ring(2, 3, 1, Lie::HasAll);
    put_one_by_one(&ring, 100);
    let kept = kept_by_last(&ring, 100);
    assert!(kept.len() > 10, "{}", kept.len());
    let last = ring.members.len() - 1;
    ring.remove(last, kept.clone());
    ring.sim.run_for(HOUR / 2);
    let lacking = kept.iter().filter(|key| ring.holders(key).len() < 3).count();
    assert_eq!(lacking, 0, "of {} copies that were dropped", kept.len());
}

/// Any peer could keep blocks from ever being dropped, or given to their replica sets, at a node
/// that no longer belonged to these: it said that it pointed there for them.
#[test]
fn nobody_outside_a_replica_set_keeps_strays_where_they_are() {
    let config = DhtConfig { stray_grace: HOUR, ..DhtConfig::default() };
    let mut ring = Ring::configured(5, config, 5);
    ring.put(0, 0..60);
    let outsider = ring.outsider();
    for _ in 0..4 {
        ring.join(Arc::new(MemoryStore::new(ROOMY)));
        for _ in 0..5 {
            ring.sim.run_for(MINUTE);
            for member in 0..ring.members.len() {
                let keys: Vec<Key> = (0..60).map(key).collect();
                let asked = AskHoldings { keys, pointing: Pointing::Yes };
                ring.call(&outsider, member, &asked, Vec::new()).expect("answered");
            }
        }
    }
    let held = |member: &crate::ring::Member| member.dht.stats().held_for_others;
    assert_eq!(ring.up().map(held).sum::<u64>(), 0, "held for a peer of no replica set");
    ring.sim.run_for(3 * HOUR);
    ring.assert_placed(0..60);
}

/// A holder kept the last copy for itself, because it held it for a member that had forgotten.
#[test]
fn a_block_that_is_held_for_a_member_is_given_to_a_set_that_lacks_it() {
    let mut ring = Ring::new(6, 6);
    let full = ring.join(Arc::new(MemoryStore::new(0)));
    ring.settle();
    ring.put(0, 0..60);
    let is_diverted = |n: &u32| ring.replica_set(&key(*n)).contains(&full);
    let diverted: Vec<Key> = (0..60).filter(is_diverted).map(key).collect();
    assert!(diverted.len() > 10);
    for at in
        diverted.iter().flat_map(|key| ring.replica_set(key).into_iter().map(move |m| (m, key)))
    {
        let (member, key) = at;
        let kept = [ring.members[member].store.clone(), ring.members[member].durable.pointers()];
        for store in kept {
            let removed = store.remove(vec![*key]);
            ring.sim.block_on(MINUTE, removed).expect("ends").expect("memory");
        }
    }
    ring.sim.run_for(8 * HOUR);
    for key in &diverted {
        let (set, holders) = (ring.replica_set(key), ring.holders(key));
        let has = |member: &&usize| **member == full || holders.contains(member);
        assert!(set.iter().all(|member| has(&member)), "{key} of {set:?} is at {holders:?}");
    }
}
