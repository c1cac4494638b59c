//! Nodes that are full, refuse or are slow: what is done with others goes on (rule R5).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use atoll_dht::reconcile::{Claim, Summary};
use atoll_dht::rpc::{self, Put, PutReply, PutStatus, Reconcile, ReconcileReply};
use atoll_dht::{Blocks, PutError};
use atoll_env::{BoxFuture, Env, sleep};
use atoll_key::{KeyRange, PeerId, SecretKey, SignedBlock};
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Service};
use atoll_overlay::Node;
use atoll_sim::HostConfig;
use atoll_store::MemoryStore;
use futures_util::future::{join, join_all};

use crate::faulty::{faulty, reply_to};
use crate::ring::{MINUTE, ROOMY, Ring, block, sized_block};

/// Takes no block while it is told to.
pub(crate) fn refusing(
    honest: Arc<dyn Service>,
    refuses: Arc<AtomicBool>,
    status: PutStatus,
) -> Arc<dyn Service> {
    faulty(honest, move |_, request| {
        let refused = |put: Put| vec![status; put.blocks.0.len()].into();
        reply_to(request, |put| PutReply {
            statuses: refused(put),
            set: None,
            promises: Vec::new().into(),
        })
        .filter(|_| refuses.load(Ordering::Relaxed))
    })
}

/// One node was full. Nodes joined before those whose copies it should have kept; these gave none of
/// the blocks that were no longer theirs to the new nodes, and 164 of 200 could not be read.
#[test]
fn one_full_node_does_not_keep_its_neighbours_from_handing_blocks_over() {
    for (seed, status) in [(4, PutStatus::Full), (5, PutStatus::Failed)] {
        let mut ring = Ring::new(seed, 8);
        let refuses = Arc::new(AtomicBool::new(false));
        let shared = refuses.clone();
        let full = ring.join_as(Arc::new(MemoryStore::new(ROOMY)), move |honest| {
            refusing(honest, shared.clone(), status)
        });
        ring.settle();
        refuses.store(true, Ordering::Relaxed);
        let mut order: Vec<usize> = (0..ring.members.len()).collect();
        order.sort_by_key(|member| *ring.node(*member).id.key());
        let at = order.iter().position(|member| *member == full).expect("it joined");
        // The two nodes of whose replica sets it is a member, and the one before.
        let [next, holder, last] = [1, 2, 3].map(|n| order[(at + order.len() - n) % order.len()]);
        let of = |root: usize, count| {
            let is_its = |n: &u32| ring.root(&block(*n).0.key()) == root;
            (0..).filter(is_its).take(count).collect::<Vec<u32>>()
        };
        let (blocks, others) = (of(holder, 200), of(next, 20));
        for n in blocks.iter().chain(&others) {
            ring.try_put(0, vec![block(*n)]).expect("acknowledged by two of three");
        }
        // Five join in the nearer half of the holder's range, so that it keeps the rest. They do not
        // repair until all are there: the first would fetch the blocks as their root.
        ring.config.repair_settle = 2 * MINUTE;
        let (place, before) = (*ring.node(holder).id.key(), *ring.node(last).id.key());
        let gap = place.distance_from(&before).as_fraction();
        let addr = ring.node(0).peer.addr;
        let ids = (0u64..).map(|n| {
            let mut id = [9; 32];
            id[..8].copy_from_slice(&n.to_be_bytes());
            PeerId(id)
        });
        let is_there = |id: &PeerId| {
            let node = Node::of(Peer { id: *id, addr });
            place.distance_from(node.id.key()).as_fraction() < gap / 2.0
        };
        let first_new = ring.members.len();
        for id in ids.filter(is_there).take(5) {
            let host = HostConfig { identity: Some(id), ..HostConfig::default() };
            ring.join_host(host);
        }
        ring.sim.run_for(60 * MINUTE);
        let set_of = |n: &u32| ring.replica_set(&block(*n).0.key());
        let is_new = |n: &&u32| set_of(n).iter().all(|member| *member >= first_new);
        assert!(blocks.iter().filter(is_new).count() > 20, "blocks of new nodes only");
        for n in blocks {
            let (hash, bytes) = block(n);
            let (holders, set) = (ring.holders(&hash.key()), set_of(&n));
            let in_place = set.iter().filter(|member| holders.contains(member)).count();
            assert!(in_place >= 2, "block {n} is at {holders:?}, belongs to {set:?}, seed {seed}");
            assert_eq!(ring.try_get(0, hash), Ok(bytes), "block {n}, seed {seed}");
        }
    }
}

/// A root without room fetched the same blocks again every few seconds, and its strays stayed.
#[test]
fn a_full_root_does_not_fetch_the_same_blocks_for_ever() {
    let mut ring = Ring::new(5, 5);
    let small = ring.join(Arc::new(MemoryStore::new(400_000)));
    ring.settle();
    let rooted = (0..).map(|n| sized_block(n, 4000)).filter(|b| ring.root(&b.0.key()) == small);
    let mut refused = 0;
    for block in rooted.take(150) {
        refused += usize::from(ring.try_put(0, vec![block]).is_err());
    }
    assert!(refused > 0 || ring.members[small].store.usage().disk_bytes > 350_000);
    // A stray that fits.
    let stray = (0..)
        .map(|n| block(1_000_000 + n))
        .find(|b| !ring.replica_set(&b.0.key()).contains(&small));
    let (hash, _) = stray.clone().expect("one of many");
    ring.try_put(0, vec![stray.expect("one of many")]).expect("elsewhere there is room");
    let holder = ring.holders(&hash.key())[0];
    ring.store(small, vec![ring.held(holder, &hash.key()).expect("held")]);
    ring.sim.run_for(10 * MINUTE);
    let before = ring.bytes_of(rpc::FETCH) + ring.bytes_of(rpc::PUT);
    ring.sim.run_for(60 * MINUTE);
    let moved = ring.bytes_of(rpc::FETCH) + ring.bytes_of(rpc::PUT) - before;
    assert!(moved < 1 << 20, "{} KiB in an idle hour", moved >> 10);
    assert!(!ring.holders(&hash.key()).contains(&small), "the stray stays");
}

/// Answers comparisons late.
struct Slow(Arc<dyn Service>, Env, Duration);

impl Service for Slow {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let delay = if request.method == rpc::RECONCILE { self.2 } else { Duration::ZERO };
        let (slept, answer) = (sleep(&*self.1, delay), self.0.handle(from, request));
        Box::pin(async move {
            slept.await;
            answer.await
        })
    }
}

/// A comparison of many blocks took longer than a call may, and the node that answered was taken
/// for dead.
#[test]
fn a_slow_comparison_ends_and_nobody_is_taken_for_dead() {
    let mut ring = Ring::new(6, 4);
    let env = ring.sim.outside();
    let slow = ring.join_as(Arc::new(MemoryStore::new(ROOMY)), move |honest| {
        Arc::new(Slow(honest, env.clone(), Duration::from_secs(15)))
    });
    ring.settle();
    ring.put(0, 0..50);
    ring.sim.run_for(5 * MINUTE);
    let id = ring.node(slow).peer.id;
    let epochs: Vec<u64> = ring.members.iter().map(epoch).collect();
    ring.sim.run_for(30 * MINUTE);
    assert_eq!(ring.members.iter().map(epoch).collect::<Vec<_>>(), epochs, "{id}");
    assert!(ring.members.iter().all(|m| m.dht.repair_status().fully_replicated));
}

fn epoch(member: &crate::ring::Member) -> u64 {
    atoll_overlay::Overlay::epoch(&*member.chord)
}

/// Comparing costs the node that answers more than the one that asks.
#[test]
fn comparisons_for_strangers_are_bounded_in_all() {
    const BLOCKS: u32 = 2000;
    /// Two summaries and a cut, in blocks looked at.
    const COST: u64 = 2 * 256 + 1024;
    let ring = Ring::new(7, 3);
    for from in (0..BLOCKS).step_by(200) {
        ring.put(0, from..from + 200);
    }
    let summary = Summary { digest: [1; 32], count: 9 };
    let claim = Claim { range: KeyRange::full(), summary };
    let strangers: Vec<_> = (0..100).map(|_| ring.outsider()).collect();
    let (mut answered, mut refused) = (0u64, 0u64);
    let begin = ring.sim.now();
    while ring.sim.now().since(begin) < 2 * MINUTE {
        let header = rpc::to_header(&Reconcile { claims: vec![claim; 16] });
        let calls = strangers.iter().map(|stranger| {
            let request =
                Request { method: rpc::RECONCILE, header: header.clone(), parts: Vec::new() };
            stranger.call(ring.node(1).peer, request, MINUTE)
        });
        for answer in ring.sim.block_on(MINUTE, join_all(calls)).expect("ends") {
            match answer {
                Ok(reply) => {
                    let reply: ReconcileReply = rpc::from_header(&reply.header).expect("sound");
                    answered += reply.answers.0.len() as u64 * COST;
                }
                Err(CallError::Refused(refusal)) if refusal.code == Refusal::OVERLOADED => {
                    refused += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
        ring.sim.run_for(Duration::from_secs(1));
    }
    let bound = 100_000 * (60 + 121) + 16 * 16 * COST;
    assert!(answered <= bound && refused > 0, "{answered} of {bound}, {refused}");
    ring.until_replicated();
}

/// Its writer asked again and again for 40 s, and then said that the ring had not answered.
#[test]
fn a_mutable_block_for_which_most_of_its_set_have_no_room_is_refused_soon() {
    let mut ring = Ring::new(9, 0);
    for _ in 0..6 {
        ring.join(Arc::new(MemoryStore::new(0)));
    }
    ring.settle();
    let put = |block: SignedBlock| {
        let began = ring.sim.now();
        let put = ring.members[0].dht.put_signed(block);
        let outcome = ring.sim.block_on(10 * MINUTE, put).expect("it ends");
        (outcome, ring.sim.now().since(began))
    };
    for owner in 0..5 {
        let secret = SecretKey::from_seed(&[owner; 32]);
        let (outcome, took) = put(SignedBlock::sign(&secret, b"name", 1, b"first"));
        assert!(matches!(outcome, Err(PutError::Full(_))), "{outcome:?}");
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
}

/// A full node asks others to keep its copy, which may not answer in time: it is full for a moment.
#[test]
fn a_put_succeeds_though_all_nodes_are_full_for_a_moment() {
    let mut ring = Ring::new(10, 0);
    let refuses = Arc::new(AtomicBool::new(false));
    for _ in 0..6 {
        let shared = refuses.clone();
        ring.join_as(Arc::new(MemoryStore::new(ROOMY)), move |honest| {
            refusing(honest, shared.clone(), PutStatus::Full)
        });
    }
    ring.settle();
    refuses.store(true, Ordering::Relaxed);
    let env = ring.sim.env(ring.members[0].host);
    let (slept, later) = (sleep(&*env, Duration::from_secs(1)), refuses.clone());
    env.spawn(Box::pin(async move {
        slept.await;
        later.store(false, Ordering::Relaxed);
    }));
    let secret = SecretKey::from_seed(&[1; 32]);
    let signed = SignedBlock::sign(&secret, b"name", 1, b"first");
    let (name, blocks) = (ring.members[0].dht.clone(), (0..20).map(block).collect());
    let both = join(name.put_signed(signed), ring.members[1].dht.put(blocks));
    let outcomes = ring.sim.block_on(MINUTE, both).expect("they end");
    assert_eq!(outcomes, (Ok(()), Ok(())));
}
