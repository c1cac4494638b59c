//! Blocks of an inode's content, and what its writers release: leases end sooner, at all replicas, and
//! nobody else can have that.

use std::sync::Arc;

use atoll_dht::rpc::{RELEASE, ReleaseBlocks, ReleaseReply, ReleaseStatus};
use atoll_dht::{Blocks, DhtConfig, LeaseRenewal, NewBlock, PutError, Renewed};
use atoll_key::kinds::Release;
use atoll_key::kinds::certified::{
    Author, Binding, Certificate, CertifiedBlock, InodeRelease, MIN_RELEASED_LEASE_SECS, WriterId,
};
use atoll_key::{BlockHash, BlockId, GroupId, Key, SecretKey, UserId, VolumeId};
use atoll_net::{CallError, Request, Service, Transport};
use atoll_store::MemoryStore;
use bytes::Bytes;

use crate::faulty::{faulty, reply_to};
use crate::ring::{HOUR, MINUTE, ROOMY, Ring, block, prompt};

/// What an inode of that number, of a group of that number, holds on to.
struct Inode {
    block: CertifiedBlock,
    author: Author,
}

fn secret(n: u8) -> SecretKey {
    SecretKey::from_seed(&[n; 32])
}

fn now_ms(ring: &Ring) -> u64 {
    ring.sim.env(ring.members[0].host).unix_ms()
}

fn inode(ring: &Ring, number: u8, group: u8) -> Inode {
    let (user, now) = (UserId(secret(3).public()), now_ms(ring));
    let certificate = Certificate::issue(&secret(group), user, now / 1000 - 600, now / 1000 + 3600);
    let author = Author { secret: secret(3), certificate, writer: WriterId::new(&user, [0; 8]) };
    let volume = VolumeId(secret(101).public());
    let groups = [GroupId(secret(group).public())];
    let binding = Binding::new(volume, [number; 16], &groups).expect("one group");
    let block = CertifiedBlock::create(binding, &author, now, b"inode").expect("a member");
    Inode { block, author }
}

impl Inode {
    /// The content block of that number.
    fn content(&self, n: u32) -> NewBlock {
        let bytes = [&self.block.key().0[..32], &block(n).1].concat();
        let id = BlockHash::of_inode_content(&bytes).inode_content_id();
        NewBlock { id, bytes: bytes.into(), lease_secs: None }
    }

    fn release(&self, ring: &Ring, ids: &[BlockId]) -> Release {
        let (now_ms, blocks) = (now_ms(ring), hashes(ids));
        let release = InodeRelease::sign(&self.block, &self.author, now_ms, 0, &blocks);
        release.expect("a member").into()
    }
}

fn hashes(ids: &[BlockId]) -> Vec<BlockHash> {
    ids.iter().map(|id| BlockHash(id.key.as_hash().expect("hashed"))).collect()
}

fn config() -> DhtConfig {
    DhtConfig { expire_every: HOUR, ..prompt() }
}

fn ring(seed: u64) -> Ring {
    let ring = Ring::configured(seed, config(), 5);
    ring.settle();
    ring
}

fn put(ring: &Ring, blocks: Vec<NewBlock>) -> Vec<BlockId> {
    let ids = blocks.iter().map(|block| block.id).collect();
    let put = ring.sim.block_on(MINUTE * 5, ring.members[0].dht.put_blocks(blocks));
    assert!(put.expect("puts have deadlines").iter().all(Result::is_ok));
    ring.until_replicated();
    ids
}

fn release(ring: &Ring, from: usize, release: Release) -> Vec<Result<(), PutError>> {
    let released = ring.members[from].dht.release_blocks(release);
    ring.sim.block_on(MINUTE * 5, released).expect("ends")
}

fn held(ring: &Ring, ids: &[BlockId]) -> Vec<usize> {
    ids.iter().map(|id| ring.holders(&id.key).len()).collect()
}

/// Two days, the day of grace, and a look at what has expired.
fn pass_the_lease(ring: &Ring) {
    ring.sim.run_for(HOUR * 24 * 3 + HOUR * 3);
}

#[test]
fn released_blocks_are_gone_from_all_replicas_after_lease_and_grace() {
    let ring = ring(1);
    let inode = inode(&ring, 1, 100);
    let ids = put(&ring, (0..10).map(|n| inode.content(n)).collect());
    // Any member of the network may bring it: the signature counts.
    let told = release(&ring, 4, inode.release(&ring, &ids[..5]));
    assert_eq!(told, vec![Ok(()); 5]);
    ring.sim.run_for(HOUR * 47);
    assert_eq!(held(&ring, &ids), [3; 10], "they stay for two days");
    let read = ring.members[2].dht.get_block(ids[0], atoll_dht::Wanted::Newest);
    assert!(ring.sim.block_on(MINUTE, read).expect("ends").is_ok());
    pass_the_lease(&ring);
    assert_eq!(held(&ring, &ids), [0, 0, 0, 0, 0, 3, 3, 3, 3, 3]);
    ring.sim.run_for(HOUR * 24);
    assert_eq!(held(&ring, &ids[..5]), [0; 5], "repair brings none of them back");
}

#[test]
fn a_renewal_after_a_release_saves_a_block() {
    let ring = ring(2);
    let inode = inode(&ring, 1, 100);
    let ids = put(&ring, (0..4).map(|n| inode.content(n)).collect());
    assert_eq!(release(&ring, 0, inode.release(&ring, &ids)), vec![Ok(()); 4]);
    ring.sim.run_for(HOUR * 24);
    let renewal = LeaseRenewal { ids: ids[..2].to_vec(), lease_secs: None, will_be_put: false };
    let renewed = ring.sim.block_on(MINUTE * 5, ring.members[1].dht.renew_blocks(renewal));
    assert_eq!(renewed.expect("ends"), [Ok(Renewed::Held), Ok(Renewed::Held)]);
    // So does putting it again.
    put(&ring, vec![inode.content(2)]);
    pass_the_lease(&ring);
    assert_eq!(held(&ring, &ids), [3, 3, 3, 0]);
}

/// What one replica says to a release.
fn tell(ring: &Ring, key: &Key, release: Release) -> Result<Vec<ReleaseStatus>, CallError> {
    let request = ReleaseBlocks { release, is_pointed: false };
    let outsider: Arc<dyn Transport> = ring.outsider();
    ring.call(&outsider, ring.root(key), &request, Vec::new()).map(|reply| reply.statuses)
}

fn left_secs(ring: &Ring, id: &BlockId) -> u64 {
    let info = ring.info(ring.root(&id.key), &id.key).expect("held");
    info.expires_unix_secs - now_ms(ring) / 1000
}

#[test]
fn only_writers_of_the_inode_release_its_content_and_only_now() {
    let ring = ring(3);
    let (own, other) = (inode(&ring, 1, 100), inode(&ring, 2, 100));
    let strange = inode(&ring, 1, 103);
    let ids = put(&ring, vec![own.content(0)]);
    let (id, key) = (ids[0], ids[0].key);
    let refused = |release| tell(&ring, &key, release).expect("answered");
    // Both sign for inodes of theirs, which the block does not belong to.
    assert_eq!(refused(other.release(&ring, &ids)), [ReleaseStatus::Refused], "another inode");
    assert_eq!(refused(strange.release(&ring, &ids)), [ReleaseStatus::Refused], "a stranger");

    let early = own.release(&ring, &ids);
    let flipped = {
        let mut bytes = early.to_bytes();
        *bytes.last_mut().expect("long") ^= 1;
        Release::decode(&bytes.into()).expect("well-formed")
    };
    assert!(tell(&ring, &key, flipped).is_err(), "a wrong signature");
    ring.sim.run_for(MINUTE * 11);
    assert!(tell(&ring, &key, early).is_err(), "a replay");
    ring.sim.run_for(HOUR);
    assert!(tell(&ring, &key, own.release(&ring, &ids)).is_err(), "an expired certificate");
    assert!(left_secs(&ring, &id) > 29 * 24 * 3600);

    let again = inode(&ring, 1, 100);
    assert_eq!(refused(again.release(&ring, &ids)), [ReleaseStatus::Released]);
    let least = u64::from(MIN_RELEASED_LEASE_SECS);
    assert!((least - 60..=least).contains(&left_secs(&ring, &id)), "no shorter than two days");
}

#[test]
fn plain_content_is_not_released_whatever_it_begins_with() {
    let ring = ring(4);
    let inode = inode(&ring, 1, 100);
    let bytes: Bytes = inode.content(0).bytes;
    let id = BlockHash::of(&bytes).id();
    let ids = put(&ring, vec![NewBlock { id, bytes, lease_secs: None }]);
    let told = tell(&ring, &id.key, inode.release(&ring, &ids)).expect("answered");
    assert_eq!(told, [ReleaseStatus::Refused]);
    assert!(left_secs(&ring, &id) > 29 * 24 * 3600);
    assert!(release(&ring, 0, inode.release(&ring, &ids))[0].is_err());
}

#[test]
fn a_replica_that_is_away_is_told_and_keeps_the_block_no_longer_than_its_lease() {
    let mut ring = ring(5);
    let inode = inode(&ring, 1, 100);
    let ids = put(&ring, vec![inode.content(0)]);
    let away = *ring.replica_set(&ids[0].key).last().expect("three");
    ring.crash(away);
    // It is not known yet that it is away.
    let asker = (0..5).find(|i| *i != away).expect("others");
    assert!(release(&ring, asker, inode.release(&ring, &ids))[0].is_err(), "one did not hear it");
    ring.restart(away);
    ring.settle();
    assert_eq!(release(&ring, asker, inode.release(&ring, &ids)), [Ok(())], "told again");
    pass_the_lease(&ring);
    assert_eq!(held(&ring, &ids), [0]);
}

#[test]
fn a_replica_that_answers_nonsense_does_not_count_as_told() {
    let mut ring = ring(6);
    let liar = |honest: Arc<dyn Service>| {
        faulty(honest, |_, request: &Request| {
            let nonsense = |_: ReleaseBlocks| ReleaseReply { statuses: Vec::new() };
            (request.method == RELEASE).then(|| reply_to(request, nonsense)).flatten()
        })
    };
    for _ in 0..4 {
        ring.join_as(Arc::new(MemoryStore::new(ROOMY)), liar);
    }
    ring.settle();
    let inode = inode(&ring, 1, 100);
    let ids = put(&ring, (0..12).map(|n| inode.content(n)).collect());
    let told = release(&ring, 0, inode.release(&ring, &ids));
    let order: Vec<Key> = inode.release(&ring, &ids).keys().collect();
    for (key, told) in order.iter().zip(told) {
        let has_liar = ring.replica_set(key).iter().any(|member| *member >= 5);
        assert_eq!(told.is_err(), has_liar, "{key}");
    }
    assert!(order.iter().any(|key| ring.replica_set(key).iter().any(|member| *member >= 5)));
}
