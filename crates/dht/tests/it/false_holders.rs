//! Nodes that lie about the copies they keep for members without room.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::DhtConfig;
use atoll_dht::durable::DurableState;
use atoll_dht::rpc::{
    self, Divert, DivertReply, Diverted, Hold, HoldReply, Proof, Prove, ProveReply, PutStatus,
    Vouched,
};
use atoll_env::BoxFuture;
use atoll_key::Key;
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_sim::SimConfig;
use atoll_store::MemoryStore;

use crate::ring::{ROOMY, Ring, block};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
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

struct FalseHolder {
    honest: Arc<dyn Service>,
    lie: Lie,
}

const KEPT: Vouched = Vouched {
    version: 0,
    lease_secs: 30 * 24 * 3600,
    publisher: [7; 16],
    ip: [0; 16],
    holder: None,
};

impl FalseHolder {
    /// What it says instead of what is true.
    fn spoil(&self, request: &Request, truth: Option<Reply>) -> Reply {
        let header = match request.method {
            rpc::DIVERT => {
                let mut reply = match truth {
                    Some(truth) => rpc::from_header(&truth.header).expect("honest"),
                    None => taken_none(request),
                };
                if matches!(self.lie, Lie::TakesNothing | Lie::TakesOnce) {
                    let status = PutStatus::Stored { copies: 1, wanted: 1 };
                    reply.blocks.0.fill(Diverted { status, held: Some(KEPT) });
                }
                reply.spare_bytes = u64::MAX;
                rpc::to_header(&reply)
            }
            rpc::HOLD => {
                let truth = truth.expect("is asked").header;
                let mut reply: HoldReply = rpc::from_header(&truth).expect("honest");
                let asked: Hold = rpc::from_header(&request.header).expect("honest");
                if asked.keep && self.lie != Lie::HasEndlessRoom {
                    reply.held.0.fill(Some(KEPT));
                }
                reply.spare_bytes = u64::MAX;
                rpc::to_header(&reply)
            }
            _ => {
                let asked: Prove = rpc::from_header(&request.header).expect("honest");
                let made_up = Proof { version: 0, lease_secs: u64::MAX, mac: asked.nonce };
                let proofs = vec![Some(made_up); asked.keys.len()].into();
                rpc::to_header(&ProveReply { proofs })
            }
        };
        Reply { header, parts: Vec::new() }
    }
}

fn taken_none(request: &Request) -> DivertReply {
    let asked: Divert = rpc::from_header(&request.header).expect("honest");
    let failed = Diverted { status: PutStatus::Failed, held: None };
    DivertReply { blocks: vec![failed; asked.blocks.0.len()].into(), spare_bytes: 0 }
}

impl Service for FalseHolder {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let is_thrown_away =
            self.lie == Lie::TakesNothing && [rpc::DIVERT, rpc::PROVE].contains(&request.method);
        let is_spoilt = is_thrown_away || [rpc::DIVERT, rpc::HOLD].contains(&request.method);
        if !is_spoilt {
            return self.honest.handle(from, request);
        }
        let this = FalseHolder { honest: self.honest.clone(), lie: self.lie };
        Box::pin(async move {
            let truth = match is_thrown_away {
                true => None,
                false => Some(this.honest.handle(from, request.clone()).await?),
            };
            Ok(this.spoil(&request, truth))
        })
    }
}

/// `roomy` honest nodes, `full` ones, and a false holder, the last.
fn ring(seed: u64, roomy: usize, full: usize, lie: Lie) -> Ring {
    let mut ring = Ring::new(seed, roomy);
    for _ in 0..full {
        ring.join(Arc::new(MemoryStore::new(0)));
    }
    ring.join_as(Arc::new(MemoryStore::new(ROOMY)), move |honest| {
        Arc::new(FalseHolder { honest, lie })
    });
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
    let removed = ring.members[last].store.remove(kept.clone());
    ring.sim.block_on(MINUTE, removed).expect("ends").expect("memory");
    ring.sim.run_for(HOUR / 2);
    let lacking = kept.iter().filter(|key| ring.holders(key).len() < 3).count();
    assert_eq!(lacking, 0, "of {} copies that were dropped", kept.len());
}

/// Any peer could keep blocks from ever being dropped, or given to their replica sets, at a node
/// that no longer belonged to these: it said that it pointed there for them.
#[test]
fn nobody_outside_a_replica_set_keeps_strays_where_they_are() {
    let config = DhtConfig { stray_grace: HOUR, ..DhtConfig::default() };
    let mut ring = Ring::with(SimConfig { seed: 5, ..SimConfig::default() }, config, 5);
    ring.put(0, 0..60);
    let outsider = ring.outsider();
    for _ in 0..4 {
        ring.join(Arc::new(MemoryStore::new(ROOMY)));
        for _ in 0..5 {
            ring.sim.run_for(MINUTE);
            for member in 0..ring.members.len() {
                let keys: Vec<Key> = (0..60).map(key).collect();
                let header = rpc::to_header(&Hold { keys, keep: true });
                let request = Request { method: rpc::HOLD, header, parts: Vec::new() };
                let call = outsider.call(ring.node(member).peer, request, MINUTE);
                ring.sim.block_on(HOUR, call).expect("ends").expect("answered");
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
