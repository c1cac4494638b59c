//! Members that answer at the last moment, with next to nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use atoll_dht::rpc::{self, Fetch, Prove};
use atoll_env::{BoxFuture, Env, sleep};
use atoll_key::Key;
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_store::MemoryStore;

use crate::ring::{MINUTE, ROOMY, Ring, block};

/// Just within the limit of a call.
const DRIP: Duration = Duration::from_secs(9);
const BLOCKS: u32 = 1200;

/// Sends one block, or proves one, and that late.
struct Dripper {
    honest: Arc<dyn Service>,
    env: Env,
    drips: Arc<AtomicBool>,
}

impl Dripper {
    /// The same request, for one block.
    fn first_of(request: &Request) -> Option<Request> {
        let header = match request.method {
            rpc::FETCH => {
                let fetch: Fetch = rpc::from_header(&request.header).ok()?;
                rpc::to_header(&Fetch { keys: fetch.keys[..1].to_vec() })
            }
            rpc::PROVE => {
                let Prove { nonce, keys } = rpc::from_header(&request.header).ok()?;
                rpc::to_header(&Prove { nonce, keys: keys[..1].to_vec() })
            }
            _ => return None,
        };
        Some(Request { header, ..request.clone() })
    }
}

impl Service for Dripper {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let first = Dripper::first_of(&request).filter(|_| self.drips.load(Ordering::Relaxed));
        let Some(first) = first else { return self.honest.handle(from, request) };
        let (pause, answer) = (sleep(&*self.env, DRIP), self.honest.handle(from, first));
        Box::pin(async move {
            pause.await;
            answer.await
        })
    }
}

/// A ring of eight that holds blocks, and a dripper among them, its number, and whether it drips.
fn ring(seed: u64) -> (Ring, usize, Arc<AtomicBool>) {
    let mut ring = Ring::new(seed, 7);
    let drips = Arc::new(AtomicBool::new(false));
    let (env, shared) = (ring.sim.env(ring.members[0].host), drips.clone());
    let dripper = ring.join_as(Arc::new(MemoryStore::new(ROOMY)), move |honest| {
        Arc::new(Dripper { honest, env: env.clone(), drips: shared.clone() })
    });
    ring.settle();
    ring.put(0, 0..BLOCKS);
    ring.until_replicated();
    (ring, dripper, drips)
}

/// The members after `member` on the ring, in order.
fn after(ring: &Ring, member: usize) -> Vec<usize> {
    let mut others: Vec<usize> = (0..ring.members.len()).filter(|i| *i != member).collect();
    let me = *ring.node(member).id.key();
    others.sort_by_key(|i| ring.node(*i).id.key().distance_from(&me));
    others
}

/// Keys of blocks whose root is `member`.
fn rooted_at(ring: &Ring, member: usize) -> Vec<Key> {
    let keys = (0..BLOCKS).map(|n| block(n).0.key());
    keys.filter(|key| ring.root(key) == member).collect()
}

fn remove(ring: &Ring, member: usize, keys: &[Key]) {
    ring.remove(member, keys.to_vec());
    ring.members[member].dht.repair_now();
}

fn holds(ring: &Ring, member: usize, key: &Key) -> bool {
    ring.info(member, key).is_some()
}

/// A node lacked blocks that two others held, asked the slow one first, and would have got the last
/// of them after half an hour.
#[test]
fn a_member_that_sends_drop_by_drop_delays_repair_by_no_more_than_its_time() {
    let mut asked_first = 0;
    for seed in [1, 2] {
        let (ring, dripper, drips) = ring(seed);
        let has_it = |member: &usize| after(&ring, *member)[..2].contains(&dripper);
        let others = (0..8).filter(|i| *i != dripper).filter(has_it);
        let roots: Vec<usize> = others.filter(|i| rooted_at(&ring, *i).len() > 40).collect();
        drips.store(true, Ordering::Relaxed);
        for root in roots {
            let set = &after(&ring, root)[..2];
            let other = set.iter().find(|i| **i != dripper).expect("three copies");
            let id = |member: usize| ring.node(member).peer.id;
            asked_first += usize::from(id(dripper) < id(*other));
            let keys = rooted_at(&ring, root);
            remove(&ring, root, &keys);
            let has_all = |_: &_| keys.iter().all(|key| holds(&ring, root, key));
            let repaired = ring.sim.run_until_true(2 * MINUTE, has_all);
            let lacking = keys.iter().filter(|key| !holds(&ring, root, key)).count();
            assert!(repaired, "{lacking} of {} are lacking, seed {seed}", keys.len());
        }
    }
    assert!(asked_first > 0, "nobody asked the slow one first");
}

/// A node that handed strays over waited for proofs, one by one, denied having the blocks
/// meanwhile, and compared with none of its replicas.
#[test]
fn a_member_that_proves_drop_by_drop_delays_no_round_and_few_removals() {
    let mut asked = 0;
    for seed in 3..8 {
        let (ring, dripper, drips) = ring(seed);
        let theirs = rooted_at(&ring, dripper);
        if theirs.len() < 40 {
            continue;
        }
        asked += 1;
        let set = ring.replica_set(&theirs[0]);
        let keeper = (1..8).find(|i| !set.contains(i)).expect("8 nodes, 3 replicas");
        drips.store(true, Ordering::Relaxed);
        for key in &theirs {
            ring.store(keeper, vec![ring.held(dripper, key).expect("held")]);
        }
        ring.members[keeper].dht.repair_now();
        ring.sim.run_for(MINUTE / 6);
        let own = rooted_at(&ring, keeper);
        remove(&ring, keeper, &own);
        let has_all = |_: &_| own.iter().all(|key| holds(&ring, keeper, key));
        assert!(ring.sim.run_until_true(MINUTE, has_all), "a round waits, seed {seed}");
        let are_gone = |_: &_| theirs.iter().all(|key| !holds(&ring, keeper, key));
        assert!(ring.sim.run_until_true(4 * MINUTE, are_gone), "strays stay, seed {seed}");
        assert!(theirs.iter().all(|key| ring.holders(key).len() == 3));
    }
    assert!(asked > 2, "two of three times the slow one is among the first asked");
}
