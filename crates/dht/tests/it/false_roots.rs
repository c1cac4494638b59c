//! Roots that acknowledge what they do not do. A publisher learns of it at once, not when
//! the block is wanted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use atoll_dht::rpc::{self, PutReply, PutStatus, RenewReply, RenewStatus};
use atoll_dht::{Blocks, DhtConfig, PutError};
use atoll_env::BoxFuture;
use atoll_key::{BlockHash, Key, SecretKey, SignedBlock};
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_overlay::Overlay;
use atoll_sim::SimConfig;
use atoll_store::MemoryStore;

use crate::ring::{ROOMY, Ring, block, prompt};

const MINUTE: Duration = Duration::from_secs(60);
/// Short: what is renewed after two thirds of it has much to lose.
const LEASE: Duration = Duration::from_secs(3600);

/// What a false root does with blocks and renewals.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lie {
    /// Acknowledges them and forgets them.
    Nothing,
    /// Sends blocks on with a lease of a second.
    ShortLease,
    /// Says, as a root and as a replica, that there is a newer one.
    Superseded,
    /// Answers each renewal as a root with this for every block.
    Renewal(RenewStatus),
}

struct FalseRoot {
    honest: Arc<dyn Service>,
    lie: Lie,
    lies: Arc<AtomicBool>,
}

impl FalseRoot {
    /// The answer to a request as to the root, if it is one to lie to.
    fn acknowledge(&self, request: &Request) -> Option<Reply> {
        let header = match request.method {
            rpc::PUT => {
                let put: rpc::Put = rpc::from_header(&request.header).ok()?;
                let stored = PutStatus::Stored { copies: 3, wanted: 3 };
                let statuses = vec![stored; put.blocks.0.len()].into();
                put.as_root.then(|| {
                    rpc::to_header(&PutReply { statuses, set: None, promises: Vec::new().into() })
                })
            }
            rpc::RENEW => return FalseRoot::renewal(request, RenewStatus::Held),
            _ => None,
        };
        header.map(|header| Reply { header, parts: Vec::new() })
    }

    /// The answer to a renewal as to the root, with `status` for every block.
    fn renewal(request: &Request, status: RenewStatus) -> Option<Reply> {
        let renew: rpc::Renew = rpc::from_header(&request.header).ok()?;
        let statuses = vec![status; renew.names.len()];
        let header = rpc::to_header(&RenewReply { statuses, over: None });
        renew.as_root.then_some(Reply { header, parts: Vec::new() })
    }

    /// Says that there is a newer block of each key.
    fn refuse(request: &Request) -> Option<Reply> {
        if request.method != rpc::PUT {
            return None;
        }
        let newer = PutStatus::Superseded { held: u64::MAX - 1 };
        let statuses = vec![newer; request.parts.len()].into();
        let header = rpc::to_header(&PutReply { statuses, set: None, promises: Vec::new().into() });
        Some(Reply { header, parts: Vec::new() })
    }

    /// The same put, with leases of a second.
    fn shortened(request: &Request) -> Option<Request> {
        if request.method != rpc::PUT {
            return None;
        }
        let mut put: rpc::Put = rpc::from_header(&request.header).ok()?;
        put.blocks.0.iter_mut().for_each(|header| header.lease_secs = 1);
        Some(Request { header: rpc::to_header(&put), ..request.clone() })
    }
}

impl Service for FalseRoot {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let lies = self.lies.load(Ordering::Relaxed);
        match self.lie {
            Lie::Nothing if lies => {
                if let Some(reply) = self.acknowledge(&request) {
                    return Box::pin(async move { Ok(reply) });
                }
            }
            Lie::ShortLease if lies => {
                if let Some(shortened) = FalseRoot::shortened(&request) {
                    return self.honest.handle(from, shortened);
                }
            }
            Lie::Renewal(state) if lies && request.method == rpc::RENEW => {
                if let Some(reply) = FalseRoot::renewal(&request, state) {
                    return Box::pin(async move { Ok(reply) });
                }
            }
            Lie::Superseded if lies => {
                if let Some(reply) = FalseRoot::refuse(&request) {
                    return Box::pin(async move { Ok(reply) });
                }
            }
            _ => {}
        }
        self.honest.handle(from, request)
    }
}

/// A ring of eight and a false root among them, its number, and whether it lies by now.
fn ring(seed: u64, lie: Lie) -> (Ring, usize, Arc<AtomicBool>) {
    let config = DhtConfig { put_limit: MINUTE / 2, lease: LEASE, ..prompt() };
    let mut ring = Ring::with(SimConfig { seed, ..SimConfig::default() }, config, 7);
    let lies = Arc::new(AtomicBool::new(false));
    let shared = lies.clone();
    let liar = ring.join_as(Arc::new(MemoryStore::new(ROOMY)), move |honest| {
        Arc::new(FalseRoot { honest, lie, lies: shared.clone() })
    });
    ring.settle();
    (ring, liar, lies)
}

/// The replica set of `key`, its root first.
fn set_of(ring: &Ring, key: &Key) -> Vec<usize> {
    let mut set = ring.replica_set(key);
    set.sort_by_key(|i| ring.node(*i).id.key().distance_from(key));
    set
}

/// Numbers of blocks whose root is `member`.
fn rooted_at(ring: &Ring, member: usize, from: u32) -> Vec<u32> {
    (from..).filter(|n| set_of(ring, &block(*n).0.key())[0] == member).take(30).collect()
}

/// The replicas of a block beside its root that hold it.
fn held_beside_root(ring: &Ring, key: &Key) -> usize {
    let beside = &set_of(ring, key)[1..];
    ring.holders(key).iter().filter(|holder| beside.contains(holder)).count()
}

fn renew(ring: &Ring, from: usize, numbers: &[u32]) -> Result<Vec<BlockHash>, PutError> {
    let renewed = ring.members[from].dht.renew(numbers.iter().map(|n| block(*n).0).collect());
    ring.sim.block_on(MINUTE, renewed).expect("renewals have deadlines")
}

fn signed(secret: &SecretKey, version: u64) -> SignedBlock {
    SignedBlock::sign(secret, b"", version, b"root")
}

/// When the leases of a block's copies beside the root end.
fn ends(ring: &Ring, key: &Key) -> Vec<u64> {
    let info = |i: &usize| ring.members[*i].store.info(key).expect("memory");
    set_of(ring, key)[1..].iter().filter_map(info).map(|info| info.expires_unix_secs).collect()
}

/// The publisher was told that three nodes have a block that nobody had.
#[test]
fn a_put_through_a_root_that_stores_nothing_reaches_the_replicas_all_the_same() {
    let (ring, liar, lies) = ring(1, Lie::Nothing);
    let numbers = rooted_at(&ring, liar, 0);
    lies.store(true, Ordering::Relaxed);
    let publishers: Vec<usize> = (0..7).filter(|i| *i != liar).collect();
    for (n, publisher) in numbers.iter().zip(publishers.iter().cycle()) {
        ring.try_put(*publisher, vec![block(*n)]).expect("the replicas are honest");
        assert_eq!(held_beside_root(&ring, &block(*n).0.key()), 2, "block {n}");
    }
    let batch: Vec<_> = rooted_at(&ring, liar, 10_000).into_iter().map(block).collect();
    ring.try_put(0, batch.clone()).expect("the replicas are honest");
    for (hash, _) in &batch {
        assert_eq!(held_beside_root(&ring, &hash.key()), 2);
    }
    let (book, now) = (ring.members[0].chord.peer_book(), ring.sim.now());
    assert!(book.trust(&ring.node(liar).peer.id, now) < 1.0, "it was caught");
    let others = (1..7).map(|i| ring.node(i).peer.id);
    assert!(others.clone().all(|id| book.trust(&id, now) == 1.0), "nobody else was");
    ring.crash(liar);
    for n in numbers {
        assert_eq!(ring.try_get(0, block(n).0), Ok(block(n).1));
    }
}

#[test]
fn an_update_of_a_signed_block_through_such_a_root_replaces_the_old_one() {
    let (ring, liar, lies) = ring(2, Lie::Nothing);
    let secrets = (0..=255).map(|n| SecretKey::from_seed(&[n; 32]));
    let is_liars = |secret: &SecretKey| set_of(&ring, &signed(secret, 1).key())[0] == liar;
    let secret = secrets.into_iter().find(is_liars).expect("one in eight");
    let put = |version| {
        let put = ring.members[0].dht.put_signed(signed(&secret, version));
        ring.sim.block_on(MINUTE, put).expect("puts have deadlines")
    };
    assert_eq!(put(1), Ok(()));
    lies.store(true, Ordering::Relaxed);
    assert_eq!(put(2), Ok(()));
    let get = ring.members[3].dht.get_signed(signed(&secret, 1).key());
    let got = ring.sim.block_on(MINUTE, get).expect("gets have deadlines");
    assert_eq!(got.map(|block| block.version), Ok(2));
}

/// "Held", said the root, and the publisher did not put what nobody had; or let leases end
/// that it thought it had renewed.
#[test]
fn renewing_through_such_a_root_renews_at_the_replicas_or_says_what_is_lacking() {
    let (ring, liar, lies) = ring(3, Lie::Nothing);
    let (held, lacking) = (rooted_at(&ring, liar, 0), rooted_at(&ring, liar, 10_000));
    ring.try_put(0, held.iter().map(|n| block(*n)).collect()).expect("nobody lies yet");
    lies.store(true, Ordering::Relaxed);
    ring.sim.run_for(LEASE * 2 / 3);
    let before = ring.sim.env(ring.members[0].host).unix_ms() / 1000;
    assert_eq!(renew(&ring, 0, &held), Ok(Vec::new()));
    for n in held {
        let ends = ends(&ring, &block(n).0.key());
        assert!(ends.len() == 2 && ends.iter().all(|end| *end > before + 3500), "{n}");
    }
    let lacks: Vec<BlockHash> = lacking.iter().map(|n| block(*n).0).collect();
    assert_eq!(renew(&ring, 0, &lacking), Ok(lacks));
}

/// "Not held", said the root of blocks that two others held, and their publisher took them for
/// lost; or "I cannot tell", for ever, and their leases ended; or something else yet.
#[test]
fn a_root_that_denies_blocks_is_not_believed_without_asking_the_others() {
    use RenewStatus::{Lacking, Late, OverQuota, Undecided};
    for (seed, status) in [(9, Lacking), (10, Undecided), (12, OverQuota), (13, Late)] {
        let (ring, liar, lies) = ring(seed, Lie::Renewal(status));
        let (held, lacking) = (rooted_at(&ring, liar, 0), rooted_at(&ring, liar, 10_000));
        ring.try_put(0, held.iter().map(|n| block(*n)).collect()).expect("nobody lies yet");
        lies.store(true, Ordering::Relaxed);
        ring.sim.run_for(LEASE * 2 / 3);
        let before = ring.sim.env(ring.members[0].host).unix_ms() / 1000;
        assert_eq!(renew(&ring, 0, &held), Ok(Vec::new()), "{status:?}");
        for n in held {
            let ends = ends(&ring, &block(n).0.key());
            assert!(
                ends.len() == 2 && ends.iter().all(|end| *end > before + 3500),
                "{status:?}: {n}"
            );
        }
        let lacks: Vec<BlockHash> = lacking.iter().map(|n| block(*n).0).collect();
        assert_eq!(renew(&ring, 0, &lacking), Ok(lacks), "{status:?}: what nobody has");
    }
}

/// A publisher asks which of its blocks are there, which few are, and all the set was asked about
/// each: publishing took a tenth longer.
#[test]
fn a_root_is_asked_alone_about_blocks_that_will_be_put_and_are_not_there() {
    let (ring, liar, lies) = ring(9, Lie::Renewal(RenewStatus::Undecided));
    let asked = || ring.sim.stats().methods.get(&rpc::RENEW).map_or(0, |m| m.call_count);
    let publisher = &ring.members[0].dht;
    let hashes =
        |numbers: &[u32]| -> Vec<BlockHash> { numbers.iter().map(|n| block(*n).0).collect() };
    let run = |renewed: BoxFuture<'static, Result<Vec<BlockHash>, PutError>>| {
        ring.sim.block_on(MINUTE, renewed).expect("ends").expect("is answered")
    };
    let lacking = hashes(&rooted_at(&ring, liar, 10_000));
    let before = asked();
    assert_eq!(run(publisher.renew_or_lack(lacking.clone())), lacking);
    let alone = asked() - before;
    assert_eq!(run(publisher.renew(lacking.clone())), lacking);
    assert_eq!(alone, 1, "the root, which asks no replica");
    assert!(asked() - before > 3 * alone, "who will not put them asks others as well");
    // A root that says neither is not believed, here as there.
    let held = rooted_at(&ring, liar, 0);
    ring.try_put(0, held.iter().map(|n| block(*n)).collect()).expect("nobody lies yet");
    lies.store(true, Ordering::Relaxed);
    assert_eq!(run(publisher.renew_or_lack(hashes(&held))), []);
}

#[test]
fn a_root_that_shortens_leases_is_found_out() {
    let (ring, liar, lies) = ring(4, Lie::ShortLease);
    let numbers = rooted_at(&ring, liar, 0);
    lies.store(true, Ordering::Relaxed);
    ring.try_put(0, numbers.iter().map(|n| block(*n)).collect()).expect("the replicas are honest");
    let now = ring.sim.env(ring.members[0].host).unix_ms() / 1000;
    for n in numbers {
        let ends = ends(&ring, &block(n).0.key());
        assert!(ends.iter().all(|end| *end > now + 3500), "block {n}: {ends:?}");
    }
}

/// A node that holds the last copies of blocks which are not its own any more gave them to a
/// root that said it has them, and dropped them.
#[test]
fn strays_are_not_dropped_on_the_word_of_the_root_alone() {
    let (ring, liar, lies) = ring(8, Lie::Nothing);
    let numbers = rooted_at(&ring, liar, 0);
    ring.try_put(0, numbers.iter().map(|n| block(*n)).collect()).expect("nobody lies yet");
    let keys: Vec<Key> = numbers.iter().map(|n| block(*n).0.key()).collect();
    let set = set_of(&ring, &keys[0]);
    let stray = (0..8).find(|i| !set.contains(i)).expect("8 nodes, 3 replicas");
    lies.store(true, Ordering::Relaxed);
    for key in &keys {
        let get = ring.members[set[1]].store.get(key);
        let held = ring.sim.block_on(MINUTE, get).expect("ends").expect("memory").expect("held");
        let put = ring.members[stray].store.put(vec![held]);
        ring.sim.block_on(MINUTE, put).expect("ends").expect("memory");
        for member in set.iter() {
            let removed = ring.members[*member].store.remove(vec![*key]);
            ring.sim.block_on(MINUTE, removed).expect("ends").expect("memory");
        }
    }
    for _ in 0..5 {
        ring.members[stray].dht.repair_now();
        ring.sim.run_for(MINUTE);
    }
    assert!(keys.iter().all(|key| ring.holders(key).len() >= 2), "the last copies are gone");
    lies.store(false, Ordering::Relaxed);
    for _ in 0..5 {
        ring.members[stray].dht.repair_now();
        ring.sim.run_for(MINUTE);
    }
    for n in numbers {
        ring.assert_placed(n..n + 1);
    }
}

/// A publisher that was told "there is version 2^64 - 2" signed the last version there is; a
/// keeper took the volume for another machine's, and let it expire.
#[test]
fn who_says_that_a_block_is_superseded_must_show_by_what() {
    let (ring, liar, lies) = ring(7, Lie::Superseded);
    lies.store(true, Ordering::Relaxed);
    let (mut as_root, mut as_replica) = (0, 0);
    for n in 0..=30 {
        let secret = SecretKey::from_seed(&[n; 32]);
        let put = |version, from: usize| {
            let put = ring.members[from].dht.put_signed(signed(&secret, version));
            ring.sim.block_on(MINUTE, put).expect("puts have deadlines")
        };
        let key = signed(&secret, 1).key();
        let place = set_of(&ring, &key).iter().position(|i| *i == liar);
        as_root += usize::from(place == Some(0));
        as_replica += usize::from(place.is_some_and(|place| place > 0));
        assert_eq!(put(7, 0), Ok(()), "{place:?}");
        assert_eq!(put(9, 1), Ok(()), "{place:?}");
        let superseded = Err(PutError::Superseded { offered: 8, held: 9 });
        assert_eq!(put(8, 2), superseded, "{place:?}: what is true can be shown");
        let get = ring.members[3].dht.get_signed(key);
        let got = ring.sim.block_on(MINUTE, get).expect("gets have deadlines");
        assert_eq!(got.map(|block| block.version), Ok(9));
    }
    assert!(as_root > 0 && as_replica > 0);
    // Content has no versions.
    ring.put(0, 0..60);
}

/// Denies all that it is asked whether it holds.
struct Denier(Arc<dyn Service>);

impl Service for Denier {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        if request.method != rpc::HOLDINGS {
            return self.0.handle(from, request);
        }
        Box::pin(async move {
            let asked: rpc::AskHoldings = rpc::from_header(&request.header)?;
            let held = vec![None; asked.keys.len()].into();
            let header = rpc::to_header(&rpc::HoldingsReply { held, spare_bytes: 0 });
            Ok(Reply { header, parts: Vec::new() })
        })
    }
}

/// Otherwise one liar could have honest roots distrusted, or puts fail.
#[test]
fn a_replica_that_denies_what_it_has_costs_a_copy_and_no_more() {
    let mut ring = Ring::new(5, 7);
    let denier = ring.join_as(Arc::new(MemoryStore::new(ROOMY)), |honest| Arc::new(Denier(honest)));
    ring.settle();
    ring.put(0, 0..100);
    ring.assert_placed(0..100);
    let renewed = ring.members[0].dht.renew((0..100).map(|n| block(n).0).collect());
    assert_eq!(ring.sim.block_on(MINUTE, renewed).expect("ends"), Ok(Vec::new()));
    let (book, now) = (ring.members[0].chord.peer_book(), ring.sim.now());
    for i in (1..8).filter(|i| *i != denier) {
        assert_eq!(book.trust(&ring.node(i).peer.id, now), 1.0, "{i} is honest");
    }
}

#[test]
fn among_honest_nodes_a_put_costs_one_small_question_more() {
    let ring = Ring::new(6, 8);
    let count = |method| {
        let stats = ring.sim.stats();
        stats.methods.get(&method).map_or(0, |method| method.call_count)
    };
    ring.put(0, 0..1);
    let before = (count(rpc::PUT), count(rpc::HOLDINGS), ring.bytes_of(rpc::HOLDINGS));
    for n in 1..101 {
        ring.put(0, n..n + 1);
    }
    let puts = count(rpc::PUT) - before.0;
    let questions = count(rpc::HOLDINGS) - before.1;
    let bytes = ring.bytes_of(rpc::HOLDINGS) - before.2;
    assert!(questions <= 100 && bytes < 100 * 200, "{questions} questions, {bytes} bytes");
    assert!(puts <= 300, "{puts}");
}
