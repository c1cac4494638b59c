//! Mutable blocks: one round trip to a known replica set, versions, watching, tombstones, and
//! writers that meet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use atoll_dht::{
    Blocks, DhtConfig, GetError, HeldBlock, LeaseRenewal, Mechanisms, NewBlock, PutError, Renewed,
    Wanted, rpc,
};
use atoll_env::{BoxFuture, Env, sleep};
use atoll_key::{BlockId, Key, KeyRange, SecretKey, SignedBlock};
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_overlay::chord::TablePolicy;
use atoll_sim::{Latency, Sim, SimConfig};
use atoll_store::MemoryStore;
use futures_util::future::{join, join_all};

use crate::perfect;
use crate::ring::{MINUTE, ROOMY, Ring, block, prompt};

/// One way, between any two nodes.
const LATENCY: Duration = Duration::from_millis(50);
/// There and back; a call takes no other time in the simulator.
const ROUND_TRIP: Duration = Duration::from_millis(100);

fn signed(owner: u8, version: u64, payload: &[u8]) -> SignedBlock {
    SignedBlock::sign(&SecretKey::from_seed(&[owner; 32]), b"", version, payload)
}

/// A ring so large that a node's own tables do not name most replica sets.
fn large_ring(seed: u64) -> Ring {
    let sim = SimConfig { seed, latency: Latency::Flat(LATENCY), ..SimConfig::default() };
    Ring::with(sim, prompt(), 40)
}

fn run<T: Send + 'static>(ring: &Ring, work: BoxFuture<'static, T>) -> T {
    ring.sim.block_on(MINUTE * 5, work).expect("calls have deadlines")
}

fn timed<T: Send + 'static>(ring: &Ring, work: BoxFuture<'static, T>) -> (T, Duration) {
    let start = ring.sim.now();
    (run(ring, work), ring.sim.now().since(start))
}

fn put(ring: &Ring, at: usize, block: SignedBlock) -> Result<(), PutError> {
    run(ring, ring.members[at].dht.put_signed(block))
}

fn get(ring: &Ring, at: usize, id: BlockId, wanted: Wanted) -> Result<HeldBlock, GetError> {
    run(ring, ring.members[at].dht.get_block(id, wanted))
}

/// A node outside the block's replica set.
fn outside(ring: &Ring, id: BlockId) -> usize {
    let set = ring.replica_set(&id.key);
    (0..).find(|at| !set.contains(at)).expect("more nodes than replicas")
}

/// Pastis §3.3 caches replica sets, so that a block that is written or read again costs one round
/// trip.
#[test]
fn a_mutable_block_is_written_and_read_again_in_one_round_trip() {
    let ring = large_ring(1);
    for owner in 0..8 {
        let id = signed(owner, 0, b"").id();
        let (writer, reader) = (outside(&ring, id), outside(&ring, id) + 20);
        put(&ring, writer, signed(owner, 1, b"first")).expect("new");
        get(&ring, reader, id, Wanted::Newest).expect("there");
        let again = ring.members[writer].dht.put_signed(signed(owner, 2, b"second"));
        let (stored, took) = timed(&ring, again);
        assert_eq!(stored, Ok(()));
        assert_eq!(took, ROUND_TRIP, "writing {owner}");
        let again = ring.members[reader].dht.get_block(id, Wanted::Newest);
        let (held, took) = timed(&ring, again);
        assert_eq!(held.expect("there").version, 2);
        assert_eq!(took, ROUND_TRIP, "reading {owner}");
    }
}

/// The replica sets of these are found by two questions or more, the last of them to the root.
fn first_reads(early_questions: bool) -> Vec<Duration> {
    let latency = Latency::Flat(LATENCY);
    let sim = Sim::new(SimConfig { seed: 4, latency, ..SimConfig::default() });
    let mechanisms = Mechanisms { early_questions, ..Mechanisms::default() };
    let config = DhtConfig { mechanisms, ..prompt() };
    let dhts = perfect::ring_of(&sim, 200, TablePolicy::Fingers, &config);
    let blocks = (0..12).map(|owner| signed(owner, 1, b"payload"));
    let took = blocks.map(|block| {
        let id = block.id();
        let put = dhts[0].put_signed(block);
        sim.block_on(MINUTE, put).expect("it ends").expect("it is new");
        let began = sim.now();
        let read = sim.block_on(MINUTE, dhts[100].get_block(id, Wanted::Newest));
        assert_eq!(read.expect("it ends").expect("it is there").version, 1);
        sim.now().since(began)
    });
    let took = took.collect();
    sim.shut_down();
    took
}

/// Pastis §3.3: "having the root node of the block directly forward the request … to the nodes in the replicas
/// set, thus saving the return trip to the caller".
#[test]
fn replicas_are_asked_while_the_root_is() {
    let (without, with) = (first_reads(false), first_reads(true));
    let saved = |(without, with): (&Duration, &Duration)| *without == *with + ROUND_TRIP;
    let lookups = without.iter().filter(|took| **took >= ROUND_TRIP * 3).count();
    assert!(lookups >= 9, "{without:?}");
    let saved = without.iter().zip(&with).filter(|both| saved(*both)).count();
    assert_eq!(saved, lookups, "{without:?} {with:?}");
}

/// A block of a key that has the replica set of another one, which this member knows.
fn near(ring: &Ring, at: usize, key: Key, version: u64) -> SignedBlock {
    let until = run(ring, ring.members[at].dht.same_set_until(key)).expect("it is known");
    let near = KeyRange::new(key.previous(), until);
    let secret = SecretKey::from_seed(&[99; 32]);
    let named = (0..20_000u32)
        .map(|n: u32| SignedBlock::sign(&secret, &n.to_be_bytes(), version, b"payload"));
    named.into_iter().find(|block| near.contains(&block.id().key)).expect("one of so many")
}

fn in_order(
    ring: &Ring,
    at: usize,
    blocks: [SignedBlock; 2],
) -> (Vec<Result<(), PutError>>, Duration) {
    let dht = &ring.members[at].dht;
    timed(ring, dht.put_in_order(blocks.into_iter().map(NewBlock::from).collect()))
}

#[test]
fn blocks_of_one_replica_set_are_put_in_order_in_one_round_trip() {
    let ring = large_ring(9);
    for owner in 0..6 {
        let above = signed(owner, 1, b"payload");
        let writer = outside(&ring, above.id());
        put(&ring, writer, above.clone()).expect("it is new");
        let below = near(&ring, writer, above.id().key, 1);
        assert_eq!(ring.replica_set(&below.id().key), ring.replica_set(&above.id().key));
        let newer = signed(owner, 2, b"payload");
        let (outcomes, took) = in_order(&ring, writer, [below.clone(), newer.clone()]);
        assert_eq!((outcomes, took), (vec![Ok(()), Ok(())], ROUND_TRIP), "owner {owner}");
        for block in [below, newer] {
            let held = get(&ring, writer, block.id(), Wanted::Newest).expect("is there");
            assert_eq!(held.version, block.version);
        }
    }
}

/// A directory never names an inode that is not there.
#[test]
fn no_replica_has_a_block_without_the_one_before_it() {
    let ring = large_ring(11);
    for owner in 0..6 {
        let above = signed(owner, 1, b"payload");
        let writer = outside(&ring, above.id());
        put(&ring, writer, above.clone()).expect("it is new");
        let lies_near = owner % 2 == 0;
        let newer = match lies_near {
            true => near(&ring, writer, above.id().key, 7),
            false => signed(owner + 50, 7, b"payload"),
        };
        put(&ring, writer, newer.clone()).expect("it is new");
        let older = SignedBlock::sign(
            &SecretKey::from_seed(&[if lies_near { 99 } else { owner + 50 }; 32]),
            &newer.name,
            3,
            b"older",
        );
        assert_eq!(older.id(), newer.id());
        let next = signed(owner, 2, b"payload");
        let (outcomes, _) = in_order(&ring, writer, [older, next.clone()]);
        let refused = Err(PutError::Superseded { offered: 3, held: 7 });
        assert_eq!(outcomes, [refused.clone(), refused], "owner {owner}");
        for at in ring.replica_set(&next.id().key) {
            let held = run(&ring, ring.members[at].dht.get_block(next.id(), Wanted::AtLeast(0)));
            assert_eq!(held.expect("is there").version, 1, "owner {owner}, replica {at}");
        }
    }
}

/// A replica set that is in use is looked up again before it would be forgotten, and nobody waits for that.
#[test]
fn a_replica_set_in_use_is_not_waited_for_each_minute() {
    let ring = large_ring(10);
    let id = signed(1, 0, b"").id();
    let writer = outside(&ring, id);
    for version in 1..20 {
        let (stored, took) =
            timed(&ring, ring.members[writer].dht.put_signed(signed(1, version, b"payload")));
        assert_eq!(stored, Ok(()));
        assert!(version == 1 || took == ROUND_TRIP, "version {version} took {took:?}");
        ring.sim.run_for(Duration::from_secs(15));
    }
}

#[test]
fn a_replica_set_that_is_asked_about_is_looked_up_before_it_is_used() {
    let ring = large_ring(12);
    let block = signed(1, 1, b"payload");
    let writer = outside(&ring, block.id());
    let same_set_until = || run(&ring, ring.members[writer].dht.same_set_until(block.id().key));
    assert_eq!(same_set_until(), None);
    ring.sim.run_for(Duration::from_secs(2));
    assert!(same_set_until().is_some());
    let (stored, took) = timed(&ring, ring.members[writer].dht.put_signed(block.clone()));
    assert_eq!((stored, took), (Ok(()), ROUND_TRIP));
}

/// A writer and a reader remember a replica set; then its root dies, or a node joins before it.
#[test]
fn a_remembered_replica_set_that_has_changed_is_looked_up_again() {
    for seed in 0..6 {
        let mut ring = large_ring(100 + seed);
        let id = signed(1, 0, b"").id();
        let (writer, reader) = (outside(&ring, id), outside(&ring, id) + 20);
        put(&ring, writer, signed(1, 1, b"first")).expect("new");
        get(&ring, reader, id, Wanted::Newest).expect("there");
        if seed % 2 == 0 {
            ring.crash(ring.root(&id.key));
            ring.sim.run_for(Duration::from_secs(20));
        } else {
            let before = ring.root(&id.key);
            // The chance is one in forty for each.
            while ring.root(&id.key) == before {
                ring.join(Arc::new(MemoryStore::new(ROOMY)));
            }
            ring.sim.run_for(Duration::from_secs(5));
        }
        put(&ring, writer, signed(1, 2, b"second")).expect("the set is looked up");
        let set = ring.replica_set(&id.key);
        let holds = |at: &&usize| {
            let held = ring.members[**at].store.info(&id.key).expect("memory");
            held.is_some_and(|held| held.version == 2)
        };
        let holders = set.iter().filter(holds).count();
        assert!(holders >= 2, "{holders} of the present set hold it, seed {seed}");
        assert_eq!(get(&ring, reader, id, Wanted::Newest).expect("there").version, 2);
    }
}

#[test]
fn each_block_of_a_batch_has_its_own_lease_and_outcome() {
    let ring = Ring::new(3, 6);
    put(&ring, 0, signed(1, 5, b"")).expect("new");
    let (short, long) = (NewBlock::from(block(1)), NewBlock::from(block(2)));
    let batch = vec![
        NewBlock { lease_secs: Some(1000), ..short.clone() },
        signed(1, 4, b"").into(),
        NewBlock { lease_secs: Some(90_000), ..long.clone() },
        NewBlock { bytes: block(3).1, ..NewBlock::from(block(4)) },
        signed(1, 6, b"").into(),
    ];
    let outcomes = run(&ring, ring.members[2].dht.put_blocks(batch));
    assert_eq!(outcomes[0], Ok(()));
    assert!(matches!(outcomes[1], Err(PutError::Superseded { offered: 4, .. })), "{outcomes:?}");
    assert_eq!(outcomes[2], Ok(()));
    assert!(matches!(outcomes[3], Err(PutError::Invalid(_))), "{outcomes:?}");
    assert_eq!(outcomes[4], Ok(()));
    ring.sim.run_for(Duration::from_secs(10));
    let leases = |id: BlockId| {
        let infos = ring.members.iter().filter_map(|m| m.store.info(&id.key).expect("memory"));
        infos.map(|info| info.expires_unix_secs).max().expect("held")
    };
    let longer = leases(long.id) - leases(short.id);
    assert!((88_900..=89_100).contains(&longer), "{longer} s");
    let ids = vec![short.id, block(99).0.id(), long.id];
    let renewal = LeaseRenewal { ids, lease_secs: Some(200_000), will_be_put: false };
    let renewed = run(&ring, ring.members[3].dht.renew_blocks(renewal));
    assert_eq!(renewed, [Ok(Renewed::Held), Ok(Renewed::Lacking), Ok(Renewed::Held)]);
    assert!(leases(short.id).abs_diff(leases(long.id)) < 100, "both were renewed");
}

/// Pastis §3.3: a reader that knows the version it needs need not hear a majority.
#[test]
fn a_reader_that_needs_at_least_a_version_takes_the_first_block_that_fits() {
    let ring = large_ring(4);
    let id = signed(1, 0, b"").id();
    let reader = outside(&ring, id);
    put(&ring, reader + 20, signed(1, 7, b"")).expect("new");
    assert_eq!(get(&ring, reader, id, Wanted::AtLeast(7)).expect("there").version, 7);
    // Two of three replicas fall silent; no majority can be heard.
    let set = ring.replica_set(&id.key);
    set[..2].iter().for_each(|at| ring.crash(*at));
    let held = ring.members[reader].dht.get_block(id, Wanted::AtLeast(7));
    let (held, took) = timed(&ring, held);
    assert_eq!(held.expect("one replica has it").version, 7);
    assert!(took < Duration::from_secs(2), "{took:?}");
    match get(&ring, reader, id, Wanted::AtLeast(8)) {
        Err(GetError::Unavailable { told, .. }) => assert!(told.contains("version 8"), "{told}"),
        other => panic!("there is no version 8: {other:?}"),
    }
}

#[test]
fn a_watcher_hears_of_an_update_at_once_and_of_silence_after_a_while() {
    let ring = large_ring(5);
    let id = signed(1, 0, b"").id();
    let (writer, watcher) = (outside(&ring, id) + 20, outside(&ring, id));
    put(&ring, writer, signed(1, 1, b"first")).expect("new");
    let watch = |seen| ring.members[watcher].dht.watch(id, seen);
    assert_eq!(run(&ring, watch(0)).expect("held").expect("newer").version, 1);

    let (quiet, took) = timed(&ring, watch(1));
    assert_eq!(quiet, Ok(None));
    assert!(took >= Duration::from_secs(30) && took < Duration::from_secs(40), "{took:?}");

    let pause = Duration::from_secs(7);
    let (env, dht) = (ring.sim.env(ring.members[writer].host), ring.members[writer].dht.clone());
    let write = async move {
        sleep(&*env, pause).await;
        dht.put_signed(signed(1, 2, b"second")).await
    };
    let both = Box::pin(join(watch(1), write));
    let ((heard, written), took) = timed(&ring, both);
    assert_eq!(written, Ok(()));
    assert_eq!(heard.expect("held").expect("newer").version, 2);
    assert!(took < pause + 5 * ROUND_TRIP, "{took:?}");

    // One replica dies meanwhile: the others go on.
    ring.crash(ring.replica_set(&id.key)[0]);
    let (quiet, took) = timed(&ring, watch(2));
    assert_eq!(quiet, Ok(None));
    assert!(took >= Duration::from_secs(30), "{took:?}");
}

/// Says of each watched block that there is a newer version.
struct Crier(Arc<dyn Service>, Arc<AtomicBool>);

impl Service for Crier {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        if request.method == rpc::WATCH && self.1.load(Ordering::Relaxed) {
            let header = rpc::to_header(&rpc::WatchReply { version: Some(u64::MAX) });
            return Box::pin(async { Ok(Reply { header, parts: Vec::new() }) });
        }
        self.0.handle(from, request)
    }
}

/// A ring of so many honest nodes, and so many after them that are what `disguise` makes of them
/// once the flag says so.
fn ring_with(
    seed: u64,
    honest: usize,
    others: usize,
    disguise: impl Fn(Arc<dyn Service>, Arc<AtomicBool>, Env) -> Arc<dyn Service>,
) -> (Ring, Arc<AtomicBool>) {
    let mut ring = Ring::new(seed, honest);
    let (flag, env) = (Arc::new(AtomicBool::new(false)), ring.sim.outside());
    for _ in 0..others {
        let store = Arc::new(MemoryStore::new(ROOMY));
        ring.join_as(store, |dht| disguise(dht, flag.clone(), env.clone()));
    }
    ring.settle();
    (ring, flag)
}

#[test]
fn a_replica_that_speaks_of_versions_it_cannot_show_ends_no_watch() {
    let (ring, lies) = ring_with(6, 3, 1, |dht, lies, _| Arc::new(Crier(dht, lies)));
    let of_liar = |owner: &u8| ring.replica_set(&signed(*owner, 0, b"").id().key).contains(&3);
    let owner = (0..).find(of_liar).expect("one of many");
    let id = signed(owner, 0, b"").id();
    put(&ring, 0, signed(owner, 1, b"")).expect("new");
    lies.store(true, Ordering::Relaxed);
    let (heard, took) = timed(&ring, ring.members[0].dht.watch(id, 1));
    assert_eq!(heard, Ok(None), "nothing has changed");
    assert!(took >= Duration::from_secs(30), "{took:?}");
}

/// Such a replica ended the watch of a block that had been removed before, or was never there.
#[test]
fn a_replica_that_speaks_of_versions_ends_no_watch_of_a_block_that_is_not_there() {
    let (ring, lies) = ring_with(6, 3, 1, |dht, lies, _| Arc::new(Crier(dht, lies)));
    let of_liar = |owner: &u8| ring.replica_set(&signed(*owner, 0, b"").key()).contains(&3);
    let mut owners = (0..=255).filter(of_liar);
    let [removed, missing] = [(); 2].map(|()| owners.next().expect("some of many"));
    put(&ring, 0, signed(removed, 1, b"")).expect("new");
    let tombstone = SignedBlock::sign_tombstone(&SecretKey::from_seed(&[removed; 32]), b"", 2);
    assert_eq!(run(&ring, ring.members[0].dht.remove_blocks(vec![tombstone.into()])), [Ok(())]);
    lies.store(true, Ordering::Relaxed);
    for (owner, seen) in [(removed, 2), (missing, 0)] {
        let watch = ring.members[0].dht.watch(signed(owner, 0, b"").id(), seen);
        assert_eq!(run(&ring, watch), Ok(None), "nothing has changed since {seen}");
    }
}

/// Takes so long to answer a put.
struct SlowDisk(Arc<dyn Service>, Arc<AtomicBool>, Env, Duration);

impl Service for SlowDisk {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let is_slow = request.method == rpc::PUT && self.1.load(Ordering::Relaxed);
        let pause = if is_slow { self.3 } else { Duration::ZERO };
        let (pause, answer) = (sleep(&*self.2, pause), self.0.handle(from, request));
        Box::pin(async move {
            pause.await;
            answer.await
        })
    }
}

/// The writer gave up each attempt when the slow majority was overdue, sent the block again, and
/// failed after a minute although all replicas had it.
#[test]
fn a_majority_of_slow_disks_takes_mutable_blocks() {
    for millis in [300, 1500, 4000] {
        let slow = move |dht, slow, env| -> Arc<dyn Service> {
            Arc::new(SlowDisk(dht, slow, env, Duration::from_millis(millis)))
        };
        let (ring, is_slow) = ring_with(30, 2, 6, slow);
        is_slow.store(true, Ordering::Relaxed);
        for owner in 0..6 {
            for version in 1..3 {
                let stored = put(&ring, 0, signed(owner, version, b""));
                assert_eq!(stored, Ok(()), "{millis} ms, {owner}, version {version}");
            }
        }
    }
}

#[test]
fn a_removed_block_stays_removed_though_a_replica_slept_through_it() {
    let mut ring = Ring::new(7, 6);
    let id = signed(1, 0, b"").id();
    put(&ring, 0, signed(1, 1, b"old")).expect("new");
    let sleeper = ring.replica_set(&id.key)[0];
    ring.crash(sleeper);
    ring.sim.run_for(MINUTE);
    let awake = (0..6).find(|at| *at != sleeper).expect("five others");
    let tombstone = SignedBlock::sign_tombstone(&SecretKey::from_seed(&[1; 32]), b"", 2);
    let removed = ring.members[awake].dht.remove_blocks(vec![tombstone.clone().into()]);
    assert_eq!(run(&ring, removed), [Ok(())]);
    ring.restart(sleeper);
    let tombstone = tombstone.bytes().clone();
    let gone = Err(GetError::Removed { key: id.key, version: 2, tombstone: tombstone.into() });
    for at in 0..6 {
        assert_eq!(get(&ring, at, id, Wanted::Newest), gone, "{at}");
    }
    ring.until_replicated();
    assert_eq!(get(&ring, sleeper, id, Wanted::Newest), gone);
    let superseded = Err(PutError::Superseded { offered: 1, held: 2 });
    assert_eq!(put(&ring, sleeper, signed(1, 1, b"old")), superseded);
    assert_eq!(
        put(&ring, sleeper, signed(1, 3, b"new")),
        Ok(()),
        "a higher version brings it back"
    );
    assert_eq!(get(&ring, awake, id, Wanted::Newest).expect("back").version, 3);
}

/// Two machines hold one key and write the same version: at most one is told that it did. A writer
/// that hears of the other's block gives up, even with a majority: repair copied the other one when
/// a replica died, and what had been acknowledged was gone.
#[test]
fn of_two_writers_of_one_version_at_most_one_succeeds_and_the_next_version_settles_it() {
    for seed in 0..30 {
        let sim = SimConfig { seed, ..SimConfig::default() };
        let ring = Ring::with(sim, DhtConfig::default(), 7);
        let id = signed(1, 0, b"").id();
        put(&ring, 0, signed(1, 1, b"first")).expect("new");
        let block = |at: u8, version| signed(1, version, &[b'a' + at]);
        let writers =
            [0, 1, 2].map(|at| ring.members[usize::from(at)].dht.put_signed(block(at, 2)));
        let outcomes = run(&ring, Box::pin(join_all(writers)));
        let winners: Vec<u8> = (0..3).filter(|at| outcomes[usize::from(*at)].is_ok()).collect();
        assert!(winners.len() <= 1, "{outcomes:?}, seed {seed}");
        for outcome in outcomes.iter().filter(|outcome| outcome.is_err()) {
            let is_told = matches!(outcome, Err(PutError::Superseded { offered: 2, held: 2 }));
            assert!(is_told, "{outcome:?}, seed {seed}");
        }
        for (at, winner) in (0..7).flat_map(|at| winners.iter().map(move |winner| (at, winner))) {
            let held = get(&ring, at, id, Wanted::Newest).expect("there");
            assert_eq!(held.bytes, block(*winner, 2).bytes(), "at {at}, seed {seed}");
        }
        put(&ring, 1, block(1, 3)).expect("a higher version");
        ring.crash(ring.replica_set(&id.key)[0]);
        let reader = (0..7).find(|at| ring.sim.is_up(ring.members[*at].host)).expect("six are up");
        ring.until_replicated();
        let held = get(&ring, reader, id, Wanted::Newest).expect("there");
        assert_eq!(held.bytes, block(1, 3).bytes(), "seed {seed}");
    }
}

/// The writer whose block a majority took was told that it is stored, though the root had another
/// writer's; a replica died, repair copied the root's, and the acknowledged block was gone.
#[test]
fn a_block_of_which_a_replica_holds_another_of_the_same_version_is_not_acknowledged() {
    let config = DhtConfig { put_limit: Duration::from_secs(3), ..prompt() };
    let ring = Ring::with(SimConfig { seed: 100, ..SimConfig::default() }, config, 10);
    let owner = (0..).find(|n| !ring.replica_set(&signed(*n, 0, b"").key()).contains(&0));
    let owner = owner.expect("one of many");
    let id = signed(owner, 0, b"").id();
    let set = ring.replica_set(&id.key);
    let outside: Vec<usize> = (0..10).filter(|at| !set.contains(at)).collect();
    put(&ring, outside[0], signed(owner, 1, b"first")).expect("new");
    let host = |at: usize| ring.members[at].host;
    ring.sim.cut(&[host(outside[1])], &[host(set[1]), host(set[2])]);
    assert!(put(&ring, outside[1], signed(owner, 2, b"loser")).is_err(), "one of three");
    ring.sim.heal();
    let superseded = Err(PutError::Superseded { offered: 2, held: 2 });
    assert_eq!(put(&ring, outside[2], signed(owner, 2, b"other")), superseded);
}
