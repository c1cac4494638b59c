//! PAST §3.3: a node without room keeps a pointer to a node that took the copy.

use std::sync::Arc;

use atoll_dht::rpc::{self, BlockHeader, Divert, LookupReply, LookupStep, PutStatus};
use atoll_dht::{Blocks, DhtConfig};
use atoll_key::{BlockHash, BlockKind, Key, SecretKey, SignedBlock};
use atoll_net::{Peer, Service, Transport};
use atoll_store::{DiskFailure, MemoryStore};
use bytes::Bytes;

use crate::faulty::{faulty, reply_to};
use crate::flawed::Flawed;
use crate::ring::{HOUR, MINUTE, ROOMY, Ring, block, prompt, sized_block};

const SEEDS: std::ops::Range<u64> = 1..4;

/// `roomy` nodes and then `full` ones that take no block at all.
fn ring_with(seed: u64, config: DhtConfig, roomy: usize, full: usize) -> Ring {
    let mut ring = Ring::configured(seed, config, roomy);
    for _ in 0..full {
        ring.join(Arc::new(MemoryStore::new(0)));
    }
    ring.settle();
    ring
}

fn ring(seed: u64, roomy: usize, full: usize) -> Ring {
    ring_with(seed, DhtConfig::default(), roomy, full)
}

/// How many copies nodes keep for others, and how many pointers there are.
fn diverted(ring: &Ring) -> (u64, u64) {
    let stats: Vec<_> = ring.up().map(|member| member.dht.stats()).collect();
    (
        stats.iter().map(|stats| stats.held_for_others).sum(),
        stats.iter().map(|stats| stats.pointers).sum(),
    )
}

/// Every block has three copies, of which those of full members are elsewhere.
fn assert_three_copies(ring: &Ring, numbers: std::ops::Range<u32>) {
    for n in numbers {
        let key = block(n).0.key();
        let holders = ring.holders(&key);
        assert_eq!(holders.len(), 3, "block {n} is at {holders:?}, seed {}", ring.sim.seed());
    }
}

fn assert_at_least_three_copies(ring: &Ring, numbers: std::ops::Range<u32>) {
    for n in numbers {
        let holders = ring.holders(&block(n).0.key());
        assert!(holders.len() >= 3, "block {n} is at {holders:?}, seed {}", ring.sim.seed());
    }
}

fn signed(version: u64) -> SignedBlock {
    let text = format!("version {version}");
    SignedBlock::sign(&SecretKey::from_seed(&[7; 32]), b"x", version, text.as_bytes())
}

/// One node of five with no room made every publish fail: as a root it refused, and as a
/// replica it was missed.
#[test]
fn a_full_node_is_no_hole_in_the_ring() {
    for seed in SEEDS {
        let ring = ring(seed, 4, 1);
        ring.put(0, 0..100);
        assert_three_copies(&ring, 0..100);
        ring.assert_readable(0..100);
        let of_full = |n: &u32| ring.replica_set(&block(*n).0.key()).contains(&4);
        let expected = (0..100).filter(of_full).count() as u64;
        assert!(expected > 20, "it belongs to three fifths of the sets");
        assert_eq!(diverted(&ring), (expected, expected), "seed {seed}");
        let hashes = (0..100).map(|n| block(n).0).collect();
        assert_eq!(ring.renew(1, hashes), Ok(Vec::new()), "all are held");
        ring.until_replicated();
    }
}

#[test]
fn two_full_nodes_of_a_replica_set_have_their_copies_at_two_others() {
    for seed in SEEDS {
        let ring = ring(seed, 5, 2);
        ring.put(0, 0..100);
        assert_three_copies(&ring, 0..100);
        ring.assert_readable(0..100);
        ring.until_replicated();
    }
}

/// Where no node outside the replica set has room, a majority of it is enough; where the
/// majority is full, the put fails and says so.
#[test]
fn a_put_succeeds_as_long_as_a_majority_is_stored_anywhere() {
    let ring3 = ring(1, 2, 1);
    ring3.put(0, 0..20);
    for n in 0..20 {
        assert_eq!(ring3.holders(&block(n).0.key()), [0, 1], "block {n}");
    }
    ring3.assert_readable(0..20);
    let full = ring_with(1, DhtConfig { put_limit: MINUTE, ..DhtConfig::default() }, 1, 2);
    full.try_put(0, (0..5).map(block).collect()).expect_err("one of three is no majority");
}

#[test]
fn copies_are_made_anew_when_their_holder_dies() {
    for seed in SEEDS {
        let ring = ring(seed, 6, 1);
        ring.put(0, 0..100);
        let held = |member: &usize| ring.members[*member].dht.stats().held_for_others;
        let holder = (0..6).max_by_key(held).expect("six");
        assert!(held(&holder) > 0);
        ring.crash(holder);
        ring.sim.run_for(HOUR / 2);
        assert_three_copies(&ring, 0..100);
        ring.until_replicated();
        ring.assert_readable(0..100);
    }
}

/// The member's pointers are on its disk, not in its memory. Where the ring has noticed that it was
/// away, another node has got a copy as well and holds have ended; they begin again when the member
/// asks its holders.
#[test]
fn pointers_survive_a_restart_of_the_node_that_has_them() {
    for seed in 1..25 {
        let mut ring = ring(seed, 5, 1);
        ring.put(0, 0..60);
        let before = diverted(&ring);
        ring.crash(5);
        ring.restart(5);
        assert_eq!(diverted(&ring).1, before.1, "seed {seed}");
        ring.until_replicated();
        ring.assert_readable(0..60);
        for _ in 0..12 {
            ring.sim.run_for(MINUTE);
            assert_eq!(diverted(&ring).1, before.1, "seed {seed}");
            assert_at_least_three_copies(&ring, 0..60);
        }
        assert_eq!(diverted(&ring), before, "seed {seed}");
    }
}

/// While a member was away its holders let copies go, since the ring had made others. When it came
/// back its pointers, which led nowhere, counted as copies for ten minutes: the others were dropped
/// and two were left.
#[test]
fn a_member_that_comes_back_soon_finds_which_copies_its_holders_have_let_go() {
    for seed in 1..41 {
        let mut ring = ring_with(seed, prompt(), 5, 1);
        ring.put(0, 0..60);
        ring.crash(5);
        ring.sim.run_for(MINUTE / 3);
        ring.restart(5);
        ring.sim.run_for(3 * MINUTE);
        assert_at_least_three_copies(&ring, 0..60);
    }
}

#[test]
fn copies_leave_their_holder_when_the_node_that_points_to_them_is_gone() {
    for seed in SEEDS {
        let ring = ring(seed, 6, 1);
        ring.put(0, 0..60);
        ring.crash(6);
        ring.sim.run_for(10 * MINUTE);
        ring.until_replicated();
        ring.assert_readable(0..60);
        for n in 0..60 {
            let key = block(n).0.key();
            let (set, holders) = (ring.replica_set(&key), ring.holders(&key));
            assert!(set.iter().all(|member| holders.contains(member)), "block {n}");
        }
        ring.sim.run_for(50 * HOUR);
        assert_eq!(diverted(&ring).0, 0, "seed {seed}");
    }
}

#[test]
fn readers_get_the_newest_version_of_a_signed_block_wherever_it_is_kept() {
    for seed in 1..8 {
        let ring = ring(seed, 5, 2);
        for version in 1..=4 {
            let put = ring.members[version as usize].dht.put_signed(signed(version));
            ring.sim.block_on(MINUTE, put).expect("ends").expect("taken");
            for reader in 0..7 {
                let got = ring.members[reader].dht.get_signed(signed(1).key());
                let got = ring.sim.block_on(MINUTE, got).expect("ends").expect("is there");
                assert_eq!(got.version, version, "at {reader}, seed {seed}");
            }
            ring.sim.run_for(MINUTE);
            let key = signed(1).key();
            for holder in ring.holders(&key) {
                let held = ring.info(holder, &key).map(|held| held.version);
                assert_eq!(held, Some(version), "at {holder}");
            }
            assert_eq!(ring.holders(&key).len(), 3, "seed {seed}");
        }
        let old = ring.members[0].dht.put_signed(signed(2));
        let old = ring.sim.block_on(MINUTE, old).expect("ends");
        assert!(old.is_err(), "an older version is refused");
    }
}

#[test]
fn renewals_reach_copies_wherever_they_are_kept() {
    let config = DhtConfig {
        lease: 10 * HOUR,
        expire_every: HOUR / 4,
        expire_grace: HOUR,
        ..DhtConfig::default()
    };
    let ring = ring_with(3, config, 4, 1);
    ring.put(0, 0..40);
    for _ in 0..5 {
        ring.sim.run_for(6 * HOUR);
        let hashes = (0..30).map(|n| block(n).0).collect();
        assert_eq!(ring.renew(0, hashes), Ok(Vec::new()));
    }
    ring.sim.run_for(HOUR / 2);
    assert_three_copies(&ring, 0..30);
    ring.assert_readable(0..30);
    for n in 30..40 {
        assert!(ring.holders(&block(n).0.key()).is_empty(), "block {n} outlived its lease");
    }
    let (held, pointers) = diverted(&ring);
    assert!(held > 0 && held == pointers, "{held} {pointers}");
}

#[test]
fn a_ring_with_diverted_copies_costs_nothing_at_rest() {
    let ring = ring(4, 4, 1);
    ring.put(0, 0..200);
    ring.until_replicated();
    ring.sim.run_for(30 * MINUTE);
    let copying = [rpc::FETCH, rpc::PUT, rpc::DIVERT, rpc::LOOKUP_STEP];
    let bytes = || copying.map(|method| ring.bytes_of(method));
    let (before, compared) = (bytes(), ring.bytes_of(rpc::RECONCILE));
    ring.sim.run_for(HOUR);
    let after = bytes();
    assert_eq!(after[..3], before[..3], "nothing is copied");
    // Of each question about pointers one block is looked at.
    assert!(after[3] - before[3] < 20_000, "{} bytes", after[3] - before[3]);
    let compared = ring.bytes_of(rpc::RECONCILE) - compared;
    assert!(compared < 60 * 5 * 2 * 1000, "{compared} bytes");
}

/// A root without room fetched the same blocks every three seconds, for ever.
#[test]
fn a_root_seldom_fetches_what_nobody_has_room_for() {
    let mut ring = Ring::configured(5, DhtConfig::default(), 0);
    for _ in 0..3 {
        ring.join(Arc::new(MemoryStore::new(210_000)));
    }
    ring.settle();
    for n in 0..50 {
        ring.try_put(0, vec![sized_block(n, 4000)]).expect("there is room for that");
    }
    ring.join(Arc::new(MemoryStore::new(0)));
    ring.sim.run_for(10 * MINUTE);
    let before = ring.bytes_of(rpc::FETCH);
    ring.sim.run_for(HOUR);
    let fetched = ring.bytes_of(rpc::FETCH) - before;
    assert!(fetched < 12 * 200_000, "{fetched} bytes of 200,000 in an hour");
}

#[test]
fn a_copy_that_its_holder_has_lost_is_made_anew() {
    let ring = ring(6, 5, 1);
    ring.put(0, 0..60);
    let holder = (0..5).find(|m| ring.members[*m].dht.stats().held_for_others > 3);
    let holder = holder.expect("copies of 36 sets are elsewhere");
    let is_stray = |n: &u32| !ring.replica_set(&block(*n).0.key()).contains(&holder);
    let held = |n: &u32| ring.holders(&block(*n).0.key()).contains(&holder);
    let strays: Vec<Key> =
        (0..60).filter(|n| is_stray(n) && held(n)).map(|n| block(n).0.key()).collect();
    assert!(!strays.is_empty());
    ring.remove(holder, strays);
    ring.sim.run_for(20 * MINUTE);
    assert_three_copies(&ring, 0..60);
}

#[test]
fn copies_come_home_when_there_is_room() {
    let mut ring = ring(7, 5, 1);
    ring.put(0, 0..60);
    ring.crash(5);
    ring.members[5].store = Arc::new(MemoryStore::new(ROOMY));
    ring.restart(5);
    ring.sim.run_for(30 * MINUTE);
    assert_eq!(diverted(&ring), (0, 0));
    ring.until_replicated();
    for n in 0..60 {
        let key = block(n).0.key();
        assert!(ring.replica_set(&key).iter().all(|member| ring.holders(&key).contains(member)));
    }
}

/// A node whose disk failed went on as a member, and every put to it failed.
#[test]
fn a_node_whose_disk_does_not_write_keeps_pointers() {
    let mut ring = Ring::new(8, 4);
    let broken = ring.join(Arc::new(Flawed::broken()));
    ring.settle();
    ring.put(0, 0..60);
    assert_three_copies(&ring, 0..60);
    ring.assert_readable(0..60);
    let trouble = ring.members[broken].dht.disk_trouble();
    assert!(trouble.is_some_and(|why| why.contains("input/output")));
    assert_eq!(ring.members[0].dht.disk_trouble(), None);
}

/// A store whose disk failed while no client put anything, as at a compaction, was that of a member
/// in good health until the next put.
#[test]
fn a_disk_that_fails_between_puts_is_noticed_for_good() {
    let mut ring = Ring::new(9, 4);
    let store = Arc::new(Flawed::new(ROOMY));
    let failing = ring.join(store.clone());
    let dht = ring.members[failing].dht.clone();
    dht.check_disk();
    assert_eq!(dht.disk_trouble(), None);
    let failure = DiskFailure { why: "cannot write the log".to_owned(), since_unix_secs: 7 };
    *store.failure.lock().expect("not poisoned") = Some(failure);
    dht.check_disk();
    *store.failure.lock().expect("not poisoned") = None;
    dht.check_disk();
    assert!(dht.disk_trouble().is_some_and(|why| why.contains("log")), "it has left by now");
}

/// Says of every block that a peer keeps it.
fn points(to: Peer) -> impl Fn(Arc<dyn Service>) -> Arc<dyn Service> {
    move |honest| {
        faulty(honest, move |_, request| reply_to(request, |_: LookupStep| LookupReply::There(to)))
    }
}

/// Two that point to each other, and one that points to no member.
#[test]
fn readers_follow_a_pointer_once() {
    let mut ring = Ring::new(9, 6);
    ring.put(0, 0..40);
    let outsider = ring.outsider().local();
    let first = ring.node(0).peer;
    let mut to = first;
    for _ in 0..2 {
        let liar = ring.join_as(Arc::new(MemoryStore::new(ROOMY)), points(to));
        to = ring.node(liar).peer;
    }
    ring.join_as(Arc::new(MemoryStore::new(ROOMY)), points(outsider));
    ring.settle();
    let before = ring.calls_of(rpc::LOOKUP_STEP);
    for n in 0..40 {
        let (hash, bytes) = block(n);
        for reader in 0..6 {
            assert_eq!(ring.try_get(reader, hash), Ok(bytes.clone()), "block {n} at {reader}");
        }
    }
    let asked = ring.calls_of(rpc::LOOKUP_STEP) - before;
    assert!(asked < 40 * 6 * 8, "{asked} questions for 240 reads");
}

/// Has a node keep a block as for a member without room.
fn divert(
    ring: &Ring,
    from: &Arc<dyn Transport>,
    to: usize,
    hash: BlockHash,
    bytes: Bytes,
) -> PutStatus {
    let header = BlockHeader { key: hash.key(), kind: BlockKind::Content, lease_secs: 86_400 };
    let divert = Divert { blocks: vec![header].into(), receipt: None };
    ring.call(from, to, &divert, vec![bytes]).expect("answered").blocks.0[0].status
}

/// A member that only says that it has no room cannot fill another.
#[test]
fn nobody_can_fill_more_than_a_quarter_of_a_node_with_what_it_diverts() {
    let mut ring = Ring::new(10, 4);
    let victim = ring.join(Arc::new(MemoryStore::new(2_000_000)));
    ring.settle();
    let liar = ring.sim.transport(ring.members[0].host);
    let mut taken = 0;
    for n in 0..600 {
        let (hash, bytes) = sized_block(n, 4000);
        if ring.replica_set(&hash.key()).contains(&victim) {
            continue;
        }
        let status = divert(&ring, &liar, victim, hash, bytes);
        taken += usize::from(matches!(status, PutStatus::Stored { .. }));
    }
    assert!((50..140).contains(&taken), "{taken} of 4 kB each in 2 MB");
}

/// The same member may not have the copy that is its own counted as another's.
#[test]
fn a_node_keeps_no_copy_for_others_of_what_it_holds_itself() {
    let ring = Ring::new(11, 5);
    ring.put(0, 0..20);
    let liar = ring.sim.transport(ring.members[0].host);
    for n in 0..20 {
        let (hash, bytes) = block(n);
        for holder in ring.holders(&hash.key()).into_iter().filter(|holder| *holder != 0) {
            let status = divert(&ring, &liar, holder, hash, bytes.clone());
            assert_eq!(status, PutStatus::NotRoot);
        }
    }
    assert_eq!(diverted(&ring), (0, 0));
}
