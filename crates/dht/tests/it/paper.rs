//! The block layer against the papers, sentence by sentence: CFS (Dabek et al., SOSP 2001), §4.1,
//! §5 and §6.2, and replica diversion as in PAST (SOSP 2001, §3.3).
//!
//! Where Atoll departs from a sentence the test says so. Quotas (§5.4) are in `quotas.rs`, virtual
//! servers (§5.3) in `virtual_servers.rs`.

use std::sync::Arc;

use atoll_dht::rpc::{self, LookupReply, LookupStep};
use atoll_dht::{Blocks, DhtConfig, GetError, PutError};
use atoll_key::{BlockHash, Key, SecretKey, SignedBlock};
use atoll_store::MemoryStore;
use bytes::Bytes;

use crate::ring::{HOUR, MINUTE, ROOMY, Ring, block, prompt};

fn signed(version: u64) -> SignedBlock {
    let text = format!("version {version}");
    SignedBlock::sign(&SecretKey::from_seed(&[7; 32]), b"", version, text.as_bytes())
}

fn put_signed(ring: &Ring, from: usize, block: SignedBlock) -> Result<(), PutError> {
    let put = ring.members[from].dht.put_signed(block);
    ring.sim.block_on(MINUTE * 5, put).expect("puts have deadlines")
}

/// What one node answers a lookup's question, sent to it alone.
fn step(ring: &Ring, at: usize, key: Key) -> (LookupReply, Vec<Bytes>) {
    let step = LookupStep { key, as_root: false, may_be_cached: false };
    let request = rpc::to_request(&step, Vec::new());
    let call = ring.outsider().call(ring.node(at).peer, request, MINUTE);
    let reply = ring.sim.block_on(MINUTE, call).expect("ends").expect("answered");
    rpc::read_reply::<LookupStep>(0, reply).expect("well-formed")
}

/// §4.1: "Chord defines the node responsible for a key to be the successor of that key's ID."
#[test]
fn the_successor_of_a_key_holds_its_block() {
    let config = DhtConfig { replicas: 1, ..prompt() };
    let ring = Ring::configured(41, config, 9);
    ring.put(4, 0..50);
    for n in 0..50 {
        let key = block(n).0.key();
        assert_eq!(ring.holders(&key), [ring.root(&key)], "block {n}");
    }
}

/// §4.1: "when a node n joins the network, certain keys previously assigned to n's successor
/// become assigned to n ... No other changes in the assignment of keys to nodes need occur."
#[test]
fn a_join_moves_only_blocks_that_become_the_newcomers() {
    let config = DhtConfig { replicas: 1, ..prompt() };
    let mut ring = Ring::configured(42, config, 8);
    ring.put(0, 0..200);
    let place = |ring: &Ring| -> Vec<Vec<usize>> {
        (0..200).map(|n| ring.holders(&block(n).0.key())).collect()
    };
    let before = place(&ring);
    let newcomer = ring.join(Arc::new(MemoryStore::new(ROOMY)));
    ring.until_replicated();
    ring.sim.run_for(MINUTE * 10);
    let moved = before.iter().zip(place(&ring)).filter(|(before, after)| *before != after);
    let moved: Vec<Vec<usize>> = moved.map(|(_, after)| after).collect();
    assert!(moved.iter().all(|after| *after == [newcomer]), "{moved:?}");
    assert!(!moved.is_empty() && moved.len() < 200, "{} of 200 blocks moved", moved.len());
}

/// §5: "split each file system (and file) into blocks and distribute those blocks over many
/// servers. This arrangement balances the load of serving popular files over many servers."
#[test]
fn the_blocks_of_one_file_are_spread_over_all_servers() {
    let ring = Ring::new(5, 6);
    ring.put(0, 0..256);
    for (i, member) in ring.members.iter().enumerate() {
        let held = member.store.usage().blocks;
        assert!(held > 0 && held < 256, "node {i} holds {held} of 256 blocks");
    }
}

/// §5, Table 1: `put_h` "computes the block's key by hashing its contents"; §5.5: "the server will
/// accept the block if the supplied key is equal to the SHA-1 hash of the block's content" (here
/// BLAKE3).
#[test]
fn a_content_block_is_accepted_only_under_the_hash_of_its_bytes() {
    let ring = Ring::new(51, 4);
    let (hash, bytes) = block(1);
    let refused = ring.try_put(0, vec![(hash, Bytes::from_static(b"other bytes"))]);
    assert!(matches!(refused, Err(PutError::Invalid(_))), "{refused:?}");
    assert!(ring.holders(&hash.key()).is_empty());
    assert_eq!(ring.try_put(0, vec![(hash, bytes.clone())]), Ok(()));
    assert_eq!(ring.try_get(3, hash), Ok(bytes));
}

/// §5, Table 1: "The block's Chord key will be the hash of pubkey"; §5.5: "the block must be signed
/// by a public key whose SHA-1 hash is the block's CFS key".
#[test]
fn a_signed_block_is_found_under_the_hash_of_its_publishers_key_alone() {
    let ring = Ring::new(52, 4);
    let mine = signed(1);
    put_signed(&ring, 1, mine.clone()).expect("a healthy ring");
    let get = ring.members[3].dht.get_signed(mine.key());
    let got = ring.sim.block_on(MINUTE, get).expect("ends").expect("it is there");
    assert_eq!(got, mine);
    let theirs = SignedBlock::sign(&SecretKey::from_seed(&[8; 32]), b"", 9, b"forged");
    assert_ne!(theirs.key(), mine.key(), "another key cannot replace it");
    put_signed(&ring, 2, theirs).expect("it has a place of its own");
    let get = ring.members[0].dht.get_signed(mine.key());
    assert_eq!(ring.sim.block_on(MINUTE, get).expect("ends"), Ok(mine));
}

/// §5.1: "DHash places a block's replicas at the k servers immediately after the
/// block's successor" (here k counts the successor's copy).
#[test]
fn a_put_reaches_exactly_the_replica_set_and_every_node_can_read() {
    let ring = Ring::new(1, 8);
    ring.put(3, 0..60);
    ring.assert_placed(0..60);
    ring.assert_readable(0..60);
}

/// §5.1: "after a block's successor server fails, the block is immediately available
/// at the block's new successor".
#[test]
fn a_block_is_readable_at_once_after_its_root_and_a_replica_crash() {
    let ring = Ring::new(3, 8);
    let (hash, bytes) = block(77);
    ring.put(0, 77..78);
    let set = ring.replica_set(&hash.key());
    let reader = (0..8).find(|i| !set.contains(i)).expect("8 nodes, 3 replicas");
    let mut by_distance = set.clone();
    by_distance.sort_by_key(|i| ring.node(*i).id.key().distance_from(&hash.key()));
    ring.crash(by_distance[0]);
    ring.crash(by_distance[1]);
    assert_eq!(ring.try_get(reader, hash), Ok(bytes));
}

/// §5.1: the root makes sure "that all k of its successor servers have a copy of
/// the block at all times".
#[test]
fn repair_restores_k_copies_after_crashes_again_and_again() {
    let ring = Ring::new(4, 9);
    ring.put(0, 0..80);
    for victims in [[1, 2], [3, 4], [5, 6]] {
        victims.iter().for_each(|v| ring.crash(*v));
        ring.until_replicated();
        ring.assert_placed(0..80);
    }
    ring.assert_readable(0..80);
}

/// §5.1: "If the successor server fails, the block's new successor assumes responsibility for the
/// block."
#[test]
fn the_new_successor_of_a_block_counts_it_as_its_own() {
    let ring = Ring::new(53, 6);
    ring.put(0, 0..40);
    let roots = |ring: &Ring| ring.up().map(|m| m.dht.repair_status().root_blocks).sum::<u64>();
    assert_eq!(roots(&ring), 40);
    let victim = ring.root(&block(7).0.key());
    ring.crash(victim);
    ring.until_replicated();
    assert_eq!(roots(&ring), 40, "each block has a root again");
    ring.assert_placed(0..40);
}

/// §5.2: "DHash stores replicas in predictable places, so it can ensure that enough replicas always
/// exist. In contrast, the number of cached copies cannot easily be counted".
#[test]
fn cached_copies_are_not_replicas() {
    let ring = Ring::configured(3, DhtConfig { cache_asks: 1, ..DhtConfig::default() }, 12);
    ring.put(0, 0..1);
    let (hash, _) = block(0);
    for at in 0..12 {
        ring.try_get(at, hash).expect("it is there");
    }
    let cached: u64 = ring.members.iter().map(|m| m.dht.stats().cache_blocks).sum();
    assert!(cached >= 9, "every fetching node has a copy, and some on the way: {cached}");
    assert_eq!(ring.holders(&hash.key()), ring.replica_set(&hash.key()));
    for member in ring.holders(&hash.key()) {
        ring.remove(member, vec![hash.key()]);
        ring.members[member].dht.repair_now();
    }
    ring.sim.run_for(MINUTE * 3);
    assert!(ring.holders(&hash.key()).is_empty(), "repair took a cached copy for a replica");
    assert_eq!(ring.renew(0, vec![hash]), Ok(vec![hash]), "it is lacking");
}

/// §5.5: "a way that allows only the publisher of a file system to modify it". The version, which
/// is signed, decides which of its blocks is the newer one.
#[test]
fn a_signed_block_is_replaced_by_a_higher_version_only() {
    let ring = Ring::new(11, 6);
    let other = SignedBlock::sign(&SecretKey::from_seed(&[7; 32]), b"", 7, b"another seven");
    put_signed(&ring, 0, signed(5)).expect("first");
    put_signed(&ring, 1, signed(7)).expect("higher");
    let superseded = |offered| Err(PutError::Superseded { offered, held: 7 });
    assert_eq!(put_signed(&ring, 2, signed(6)), superseded(6));
    assert_eq!(put_signed(&ring, 2, other), superseded(7));
    assert_eq!(put_signed(&ring, 3, signed(7)), Ok(()), "the same again is fine");
    for at in 0..6 {
        let get = ring.members[at].dht.get_signed(signed(0).key());
        assert_eq!(ring.sim.block_on(MINUTE, get).expect("ends"), Ok(signed(7)));
    }
}

/// §5.5: "Publishers must periodically refresh their blocks if they wish CFS to continue to store
/// them. A CFS server may delete blocks that have not been refreshed recently."
#[test]
fn blocks_that_are_not_refreshed_are_deleted_and_others_stay() {
    let config = DhtConfig { lease: HOUR * 10, expire_grace: HOUR, ..prompt() };
    let ring = Ring::configured(55, config, 4);
    ring.put(0, 0..20);
    for _ in 0..4 {
        ring.sim.run_for(HOUR * 5);
        let hashes: Vec<BlockHash> = (10..20).map(|n| block(n).0).collect();
        assert_eq!(ring.renew(0, hashes), Ok(Vec::new()), "the ring holds all of them");
    }
    for n in 0..10 {
        assert!(ring.holders(&block(n).0.key()).is_empty(), "block {n} was not refreshed");
    }
    ring.assert_placed(10..20);
}

/// §6.2, Figure 5: `lookup_step` "returns that data" where the server stores it, "the closest
/// predecessor of key" where it does not, and "an error if n' is the true successor of the key but
/// does not store its associated data".
#[test]
fn a_lookup_step_returns_the_block_a_nearer_server_or_that_it_does_not_exist() {
    let ring = Ring::new(62, 10);
    let (hash, bytes) = block(3);
    ring.put(0, 3..4);
    let set = ring.replica_set(&hash.key());
    for at in 0..10 {
        match step(&ring, at, hash.key()) {
            (LookupReply::Found(header), parts) => {
                assert!(set.contains(&at), "node {at} stores it");
                assert_eq!((header.key, &parts[..]), (hash.key(), &[bytes.clone()][..]));
            }
            (LookupReply::Route(_), _) => assert!(!set.contains(&at), "node {at} does not"),
            (other, _) => panic!("node {at}: {other:?}"),
        }
    }
    let nowhere = BlockHash::of(b"never stored").key();
    let (reply, _) = step(&ring, ring.root(&nowhere), nowhere);
    assert!(matches!(reply, LookupReply::Absent(_)), "{reply:?}");
}

/// §6.2: lookup "returns the data associated with key or an error if it cannot be found".
#[test]
fn what_is_nowhere_is_not_found_and_the_error_says_who_was_asked() {
    let ring = Ring::new(10, 5);
    let hash = BlockHash::of(b"never stored");
    match ring.try_get(0, hash) {
        Err(GetError::NotFound { key, told }) => {
            assert_eq!(key, hash.key());
            assert!(told.contains("should have it and does not"), "{told}");
        }
        other => panic!("{other:?}"),
    }
}

/// `roomy` nodes and then one that takes no block at all.
fn with_a_full_node(seed: u64, config: DhtConfig, roomy: usize) -> Ring {
    let mut ring = Ring::configured(seed, config, roomy);
    ring.join(Arc::new(MemoryStore::new(0)));
    ring.settle();
    ring
}

/// PAST §3.3, replica diversion: a member of the replica set without room has its copy kept by a
/// node outside the set and holds a pointer to it, so that the block has k copies all the same and
/// is found from the member.
#[test]
fn a_full_member_has_its_copies_kept_outside_the_replica_set_and_points_there() {
    let ring = with_a_full_node(33, DhtConfig::default(), 5);
    ring.put(0, 0..60);
    let full = 5;
    let of_full: Vec<u32> =
        (0..60).filter(|n| ring.replica_set(&block(*n).0.key()).contains(&full)).collect();
    assert!(of_full.len() > 10, "it belongs to half of the sets");
    for n in &of_full {
        let key = block(*n).0.key();
        let (set, holders) = (ring.replica_set(&key), ring.holders(&key));
        assert_eq!(holders.len(), 3, "block {n} is at {holders:?}");
        let outside: Vec<usize> =
            holders.into_iter().filter(|holder| !set.contains(holder)).collect();
        let (reply, _) = step(&ring, full, key);
        let LookupReply::There(holder) = reply else { panic!("block {n}: {reply:?}") };
        assert_eq!([holder], [ring.node(outside[0]).peer], "the pointer leads to the copy");
    }
    assert_eq!(ring.members[full].dht.stats().pointers, of_full.len() as u64);
    ring.assert_readable(0..60);
}

/// PAST §3.3: diversion serves a node that lacks room. Without it, such a node is a hole: the
/// block has a copy less.
#[test]
fn without_diversion_a_full_member_has_no_copy() {
    let ring = with_a_full_node(34, DhtConfig { divert: false, ..DhtConfig::default() }, 5);
    let (hash, bytes) = (0..60)
        .map(block)
        .find(|(hash, _)| ring.replica_set(&hash.key()).contains(&5) && ring.root(&hash.key()) != 5)
        .expect("it belongs to half of the sets");
    assert_eq!(ring.try_put(0, vec![(hash, bytes)]), Ok(()), "two of three are a majority");
    ring.sim.run_for(MINUTE * 10);
    assert_eq!(ring.holders(&hash.key()).len(), 2);
}
