//! What a person is told of a block: what each of its replicas says, and which nodes use it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::rpc::{self, AskUses, BlockReader, LockUse, USES, UsesReply};
use atoll_dht::{Blocks, Dht, LockLease, LockMode, LockStep, Replica, ReplicaCopy, Uses};
use atoll_key::{Key, PeerId};
use atoll_net::{Reply, Service};
use atoll_store::MemoryStore;

use crate::certified::Inode;
use crate::faulty::faulty;
use crate::ring::{MINUTE, ROOMY, Ring, block};

fn replicas(ring: &Ring, at: usize, keys: Vec<Key>) -> Vec<Vec<Replica>> {
    let dht: Arc<Dht> = ring.members[at].dht.clone();
    let asked = async move { dht.replicas(keys).await };
    let found = ring.sim.block_on(MINUTE, asked).expect("calls have deadlines");
    found.into_iter().map(|set| set.expect("the root is found")).collect()
}

/// The key of a lock that stands where a block does.
fn lock_of(key: &Key) -> Key {
    let mut lock = key.0;
    lock[32..].copy_from_slice(&[7; 32]);
    Key(lock)
}

fn uses(ring: &Ring, at: usize, key: Key) -> Uses {
    let dht: Arc<Dht> = ring.members[at].dht.clone();
    let asked = async move { dht.uses(key, lock_of(&key)).await };
    ring.sim.block_on(MINUTE, asked).expect("calls have deadlines").expect("the set is found")
}

/// Three replicas, of which one is behind, one lacks the block, and one does not answer.
#[test]
fn each_replica_says_what_it_has_and_one_that_is_silent_is_named() {
    let ring = Ring::new(1, 8);
    let inode = Inode::on(&ring, 1);
    let key = inode.key();
    inode.put(0, &inode.first).expect("all are there");
    let held = ring.replica_set(&key);
    let at = (0..8).find(|at| !held.contains(at)).expect("eight nodes");
    let versions = |of: &[Replica]| -> Vec<Option<u64>> {
        of.iter().map(|one| one.said.clone().expect("it answers").map(|c| c.version)).collect()
    };
    let first = inode.first.version();
    let all = replicas(&ring, at, vec![key]).remove(0);
    assert_eq!(versions(&all), [Some(first); 3]);
    let member = |one: &Replica| (0..8).find(|at| ring.node(*at).peer == one.peer);
    let set: Vec<usize> = all.iter().map(|one| member(one).expect("a member")).collect();
    assert_eq!(BTreeSet::from_iter(&set), BTreeSet::from_iter(&held));
    assert_eq!(set[0], ring.root(&key), "the root first");

    let second = inode.written(&inode.first, 0, "second");
    inode.store(set[0], &second);
    ring.remove(set[1], vec![key]);
    let found = replicas(&ring, at, vec![key]).remove(0);
    assert_eq!(versions(&found), [Some(second.version()), None, Some(first)]);
    let Ok(Some(ReplicaCopy { lease_secs, is_diverted, .. })) = found[0].said else {
        panic!("{found:?}")
    };
    assert!(lease_secs > 3600 && !is_diverted, "{found:?}");

    ring.crash(set[2]);
    let found = replicas(&ring, at, vec![key]).remove(0);
    let silent = found.iter().filter(|one| one.said.is_err()).map(|one| one.peer);
    assert_eq!(silent.collect::<Vec<_>>(), [ring.node(set[2]).peer]);
}

/// A file has many blocks: each node is asked once about all that it should hold.
#[test]
fn many_blocks_are_asked_for_with_one_call_to_each_node() {
    let ring = Ring::new(2, 8);
    ring.put(0, 0..200);
    let keys: Vec<Key> = (0..200).map(|n| block(n).0.key()).collect();
    let before = ring.calls_of(rpc::HOLDINGS);
    let found = replicas(&ring, 1, keys.clone());
    assert!(ring.calls_of(rpc::HOLDINGS) - before <= 8, "at most one call to each node");
    for (key, set) in keys.iter().zip(found) {
        let expected = ring.replica_set(key).into_iter().map(|at| ring.node(at).peer);
        assert_eq!(BTreeSet::from_iter(set.iter().map(|one| one.peer)), expected.collect());
        assert!(set.iter().all(|one| matches!(one.said, Ok(Some(_)))), "{set:?}");
    }
}

#[test]
fn readers_and_lock_holders_are_named_until_their_time_is_over() {
    let ring = Ring::new(3, 8);
    ring.sim.run_for(MINUTE);
    let inode = Inode::on(&ring, 1);
    let (key, id) = (inode.key(), |at: usize| ring.node(at).peer.id);
    inode.put(4, &inode.first).expect("all are there");
    assert_eq!(uses(&ring, 0, inode.written(&inode.first, 9, "x").key()).readers.len(), 1);
    inode.get(5).expect("held");
    let take = |at: usize, step, number| {
        let (dht, mode) = (ring.members[at].dht.clone(), LockMode::Exclusive);
        let (key, holder) = (lock_of(&key), [at as u8; 16]);
        let ask =
            async move { dht.lock_lease(LockLease { key, holder, number, step, mode }).await };
        ring.sim.block_on(MINUTE, ask).expect("requests have deadlines")
    };
    take(6, LockStep::Take, 4).expect("free");
    let found = uses(&ring, 0, key);
    let mut readers: Vec<PeerId> = found.readers.keys().map(|peer| peer.id).collect();
    readers.sort();
    let mut expected = vec![id(4), id(5)];
    expected.sort();
    assert_eq!(readers, expected);
    assert_eq!(found.locks.into_iter().collect::<Vec<_>>(), [(id(6), LockMode::Exclusive)]);
    assert_eq!(found.replicas, (3, 0));

    take(6, LockStep::Release, 8).expect("it has it");
    assert!(uses(&ring, 0, key).locks.is_empty());
    ring.sim.run_for(Duration::from_secs(15));
    let later = uses(&ring, 0, key);
    assert_eq!((later.readers.len(), later.locks.len(), later.replicas), (0, 0, (3, 0)));
}

/// A stranger's questions change nothing, and a liar's answers are bounded.
#[test]
fn a_reply_with_more_readers_than_there_can_be_counts_as_none() {
    let mut ring = Ring::new(4, 2);
    let reader = BlockReader { peer: ring.node(0).peer, left_ms: u64::MAX };
    let lock = LockUse { peer_id: [9; 32], mode: LockMode::Shared, left_ms: u64::MAX };
    let liar = move |honest: Arc<dyn Service>| -> Arc<dyn Service> {
        faulty(honest, move |_, request| {
            let (readers, locks) = (vec![reader; 65], vec![lock; 64]);
            let lie = UsesReply { readers: readers.into(), locks: locks.into() };
            (request.method == USES)
                .then(|| Reply { header: rpc::to_header(&lie), parts: Vec::new() })
        })
    };
    ring.join_as(Arc::new(MemoryStore::new(ROOMY)), liar);
    ring.settle();
    let inode = Inode::on(&ring, 1);
    inode.put(0, &inode.first).expect("all are there");
    let found = uses(&ring, 1, inode.key());
    assert_eq!(found.replicas, (2, 1));
    assert!(found.locks.is_empty() && found.readers.len() == 1, "{found:?}");

    let outsider = ring.outsider();
    let ask = AskUses { key: inode.key(), lock: lock_of(&inode.key()) };
    for at in 0..2 {
        let reply = ring.call(&outsider, at, &ask, Vec::new()).expect("answered");
        assert!(reply.locks.0.is_empty(), "{reply:?}");
        assert!(reply.readers.0.iter().all(|one| one.left_ms <= 15_000), "{reply:?}");
    }
    assert_eq!(inode.get(1).expect("held"), inode.first);
}
