//! Content of a volume that its owner releases: it is gone from all replicas within minutes, unless it was put or renewed
//! since, and what missed the release does not bring it back.

use std::sync::Arc;

use atoll_dht::rpc::{ReleaseBlocks, ReleaseStatus};
use atoll_dht::{Blocks, DhtConfig, LeaseRenewal, NewBlock, PutError, Renewed};
use atoll_key::kinds::{Release, VolumeRelease};
use atoll_key::{BlockHash, BlockId, NotAdmitted, SecretKey};
use atoll_net::{CallError, Transport};

use crate::ring::{HOUR, MINUTE, Ring, block, prompt};

fn owner() -> SecretKey {
    SecretKey::from_seed(&[7; 32])
}

/// The content block of that number, of the volume of `owner`.
fn content_of(owner: &SecretKey, n: u32) -> NewBlock {
    let bytes = [&owner.volume_id().0[..], &block(n).1].concat();
    let id = BlockHash::of_volume_content(&bytes).volume_content_id();
    NewBlock { id, bytes: bytes.into(), lease_secs: None }
}

fn content(n: u32) -> NewBlock {
    content_of(&owner(), n)
}

fn now_secs(ring: &Ring) -> u64 {
    ring.sim.env(ring.members[0].host).unix_ms() / 1000
}

fn release_by(owner: &SecretKey, as_of: u64, ids: &[BlockId]) -> Release {
    let hash = |id: &BlockId| BlockHash(id.key.as_hash().expect("hashed"));
    let hashes: Vec<BlockHash> = ids.iter().map(hash).collect();
    VolumeRelease::sign(owner, as_of, &hashes).expect("some blocks").into()
}

fn ring(seed: u64) -> Ring {
    let ring = Ring::configured(seed, DhtConfig { expire_every: HOUR * 24, ..prompt() }, 5);
    ring.settle();
    ring
}

fn put_from(ring: &Ring, from: usize, blocks: Vec<NewBlock>) {
    let put = ring.sim.block_on(MINUTE * 5, ring.members[from].dht.put_blocks(blocks));
    let outcomes = put.expect("puts have deadlines");
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}

fn put(ring: &Ring, numbers: std::ops::Range<u32>) -> Vec<BlockId> {
    let blocks: Vec<NewBlock> = numbers.map(content).collect();
    let ids = blocks.iter().map(|block| block.id).collect();
    put_from(ring, 0, blocks);
    ring.until_replicated();
    ids
}

fn send(ring: &Ring, from: usize, release: Release) -> Vec<Result<(), PutError>> {
    let released = ring.members[from].dht.release_blocks(release);
    ring.sim.block_on(MINUTE * 5, released).expect("ends")
}

/// Releases as of the present second, which none of the blocks was put in.
fn release(ring: &Ring, from: usize, ids: &[BlockId]) {
    let told = send(ring, from, release_by(&owner(), now_secs(ring), ids));
    assert!(told.iter().all(Result::is_ok), "{told:?} (seed {})", ring.sim.seed());
}

fn held(ring: &Ring, ids: &[BlockId]) -> Vec<usize> {
    ids.iter().map(|id| ring.holders(&id.key).len()).collect()
}

#[test]
fn released_blocks_are_gone_from_all_replicas_within_minutes() {
    for seed in 0..4 {
        let ring = ring(seed);
        let ids = put(&ring, 0..10);
        release(&ring, 0, &ids[..5]);
        ring.sim.run_for(MINUTE);
        assert_eq!(held(&ring, &ids), [3; 10], "readers may be reading them");
        ring.sim.run_for(MINUTE * 2);
        assert_eq!(held(&ring, &ids), [0, 0, 0, 0, 0, 3, 3, 3, 3, 3], "seed {seed}");
        let used = ring.members.iter().map(|member| member.store.usage().blocks).sum::<u64>();
        assert_eq!(used, 15, "the room is back");
        // A second release has its own two minutes, and does not wait for a round of anything.
        release(&ring, 3, &ids[5..7]);
        ring.sim.run_for(MINUTE * 3);
        assert_eq!(held(&ring, &ids[5..]), [0, 0, 3, 3, 3]);
        ring.sim.run_for(HOUR * 5);
        assert_eq!(held(&ring, &ids), [0, 0, 0, 0, 0, 0, 0, 3, 3, 3], "repair brings none back");
        assert!(ring.up().all(|member| member.dht.repair_status().is_in_step()));
    }
}

#[test]
fn what_is_put_or_renewed_after_a_release_stays() {
    let ring = ring(10);
    let ids = put(&ring, 0..4);
    release(&ring, 0, &ids);
    ring.sim.run_for(MINUTE);
    let renewal = LeaseRenewal { ids: vec![ids[0]], lease_secs: None, will_be_put: false };
    let renewed = ring.sim.block_on(MINUTE * 5, ring.members[0].dht.renew_blocks(renewal));
    assert_eq!(renewed.expect("ends"), [Ok(Renewed::Held)]);
    put_from(&ring, 0, vec![content(1)]);
    ring.sim.run_for(HOUR);
    assert_eq!(held(&ring, &ids), [3, 3, 0, 0]);
    // What is gone can be put again, and stays.
    put_from(&ring, 1, vec![content(2)]);
    ring.sim.run_for(HOUR);
    assert_eq!(held(&ring, &ids), [3, 3, 3, 0]);
}

/// The release was on its way while the block was put again: replicas hear of it last.
#[test]
fn a_release_that_arrives_late_does_not_remove_what_was_put_since() {
    let ring = ring(11);
    let ids = put(&ring, 0..2);
    let early = now_secs(&ring);
    ring.sim.run_for(MINUTE);
    put_from(&ring, 0, vec![content(0)]);
    let told = send(&ring, 0, release_by(&owner(), early, &ids[..1]));
    assert!(told[0].is_err(), "its sender hears that it counted for nothing: {told:?}");
    // A put and a release of one second: the put may have been the later one.
    put_from(&ring, 0, vec![content(1)]);
    let told = send(&ring, 0, release_by(&owner(), now_secs(&ring), &ids[1..]));
    assert!(told[0].is_err(), "{told:?}");
    ring.sim.run_for(HOUR);
    assert_eq!(held(&ring, &ids), [3, 3]);
}

#[test]
fn a_release_of_a_time_to_come_is_refused_by_the_node_that_is_to_send_it() {
    let ring = ring(12);
    let ids = put(&ring, 0..1);
    let told = send(&ring, 0, release_by(&owner(), now_secs(&ring) + 5, &ids));
    let Err(PutError::NotAdmitted(NotAdmitted::Clock { time_ms, now_ms })) = &told[0] else {
        panic!("{told:?}");
    };
    assert!(time_ms > now_ms, "it says what time it is there");
    ring.sim.run_for(MINUTE * 5);
    assert_eq!(held(&ring, &ids), [3]);
}

#[test]
fn replicas_that_were_restarted_meanwhile_remove_what_was_released() {
    let mut ring = ring(13);
    let ids = put(&ring, 0..6);
    release(&ring, 0, &ids[..3]);
    for member in 0..5 {
        ring.crash(member);
        ring.sim.run_for(MINUTE / 30);
        ring.restart(member);
    }
    ring.settle();
    ring.sim.run_for(MINUTE * 4);
    assert_eq!(held(&ring, &ids), [0, 0, 0, 3, 3, 3]);
    ring.sim.run_for(HOUR * 2);
    assert_eq!(held(&ring, &ids), [0, 0, 0, 3, 3, 3]);
}

#[test]
fn a_copy_that_missed_the_release_does_not_come_back_by_repair() {
    for seed in 20..24 {
        let mut ring = ring(seed);
        let ids = put(&ring, 0..8);
        let away = *ring.replica_set(&ids[0].key).last().expect("three");
        ring.crash(away);
        ring.settle();
        let asker = (0..5).find(|i| *i != away).expect("others");
        // The others make up the replica sets now, and all of them hear of it.
        ring.sim.run_for(MINUTE * 10);
        let told = send(&ring, asker, release_by(&owner(), now_secs(&ring), &ids));
        assert!(told.iter().all(Result::is_ok), "{told:?} (seed {seed})");
        ring.sim.run_for(MINUTE * 5);
        assert_eq!(held(&ring, &ids), [0; 8], "seed {seed}");
        ring.restart(away);
        ring.settle();
        ring.sim.run_for(HOUR * 24);
        for id in &ids {
            let holders = ring.holders(&id.key);
            assert!(holders.iter().all(|holder| *holder == away), "{holders:?} (seed {seed})");
        }
        let missed = ids.iter().filter(|id| !ring.holders(&id.key).is_empty()).count();
        assert!(missed > 0, "it has missed none (seed {seed})");
        // It ends with its lease, and does not count as lacking copies meanwhile.
        assert!(ring.up().all(|member| member.dht.repair_status().is_in_step()), "seed {seed}");
        // Its publisher can bring it back.
        put_from(&ring, asker, vec![content(0)]);
        ring.sim.run_for(HOUR * 3);
        assert_eq!(held(&ring, &ids[..1]), [3], "seed {seed}");
    }
}

/// A replica that has removed a block was away when it was put again: it takes a copy from the others.
#[test]
fn a_replica_that_missed_a_later_put_gets_a_copy_by_repair() {
    for seed in 30..34 {
        let mut ring = ring(seed);
        let ids = put(&ring, 0..4);
        release(&ring, 0, &ids);
        ring.sim.run_for(MINUTE * 4);
        assert_eq!(held(&ring, &ids), [0; 4]);
        let set = ring.replica_set(&ids[0].key);
        let away = set[1];
        ring.crash(away);
        let asker = (0..5).find(|i| *i != away).expect("others");
        put_from(&ring, asker, (0..4).map(content).collect());
        ring.restart(away);
        ring.settle();
        ring.sim.run_for(HOUR * 3);
        for id in &ids {
            let (mut holders, mut set) = (ring.holders(&id.key), ring.replica_set(&id.key));
            holders.sort_unstable();
            set.sort_unstable();
            assert_eq!(holders, set, "seed {seed}");
        }
    }
}

#[test]
fn nobody_else_releases_a_volumes_content_and_plain_content_is_not_released() {
    let ring = ring(14);
    let ids = put(&ring, 0..1);
    let stranger = SecretKey::from_seed(&[8; 32]);
    let tell = |release: Release, id: &BlockId| -> Result<Vec<ReleaseStatus>, CallError> {
        let request = ReleaseBlocks { release, is_pointed: false };
        let outsider: Arc<dyn Transport> = ring.outsider();
        let called = ring.call(&outsider, ring.root(&id.key), &request, Vec::new());
        called.map(|reply| reply.statuses)
    };
    let now = now_secs(&ring);
    let told = tell(release_by(&stranger, now, &ids), &ids[0]).expect("answered");
    assert_eq!(told, [ReleaseStatus::Refused]);
    let mut forged = release_by(&owner(), now, &ids).to_bytes();
    *forged.last_mut().expect("long") ^= 1;
    let forged = Release::decode(&forged.into()).expect("well-formed");
    assert!(tell(forged, &ids[0]).is_err(), "a wrong signature");
    assert!(tell(release_by(&owner(), now - 3600, &ids), &ids[0]).is_err(), "a replay");

    let bytes = content(1).bytes;
    let plain = NewBlock::from((BlockHash::of(&bytes), bytes));
    let id = plain.id;
    put_from(&ring, 0, vec![plain]);
    ring.until_replicated();
    let told = tell(release_by(&owner(), now_secs(&ring), &[id]), &id).expect("answered");
    assert_eq!(told, [ReleaseStatus::Refused]);
    ring.sim.run_for(HOUR);
    assert_eq!((held(&ring, &ids), held(&ring, &[id])), (vec![3], vec![3]));
}

/// Whoever has heard of a release can send it again for ten minutes.
#[test]
fn a_release_that_is_sent_again_does_not_remove_what_a_node_with_a_slow_clock_has_put_since() {
    let config = DhtConfig { expire_every: HOUR * 24, ..prompt() };
    let mut ring = Ring::configured(15, config, 5);
    ring.join_skewed(-240_000);
    ring.settle();
    let ids = put(&ring, 0..2);
    ring.sim.run_for(MINUTE);
    let release = release_by(&owner(), now_secs(&ring), &ids);
    let told = send(&ring, 0, release.clone());
    assert!(told.iter().all(Result::is_ok), "{told:?}");
    ring.sim.run_for(MINUTE);
    // Its receipt is of a time before the release.
    put_from(&ring, 5, vec![content(0)]);
    let outsider: Arc<dyn Transport> = ring.outsider();
    for node in 0..6 {
        let again = ReleaseBlocks { release: release.clone(), is_pointed: false };
        ring.call(&outsider, node, &again, Vec::new()).expect("it is answered");
    }
    ring.sim.run_for(HOUR);
    assert_eq!(held(&ring, &ids), [3, 0]);
}

/// Of three nodes one was away when a block was put again, and one of the others has gone since: no majority of
/// three can say that it was put.
#[test]
fn the_last_two_nodes_of_a_small_ring_both_hold_what_was_put_again() {
    let config = DhtConfig { expire_every: HOUR * 24, ..prompt() };
    for seed in 40..43 {
        let mut ring = Ring::configured(seed, config.clone(), 3);
        ring.settle();
        let ids = put(&ring, 0..4);
        ring.sim.run_for(MINUTE);
        release(&ring, 0, &ids);
        ring.sim.run_for(MINUTE * 4);
        assert_eq!(held(&ring, &ids), [0; 4]);
        ring.crash(2);
        put_from(&ring, 0, (0..4).map(content).collect());
        ring.crash(1);
        ring.restart(2);
        ring.settle();
        ring.sim.run_for(HOUR * 12);
        assert_eq!(held(&ring, &ids), [2; 4], "seed {seed}");
    }
}
