//! Certified blocks on a ring: concurrent writes are joined wherever they meet, and nothing that was
//! acknowledged is lost (Pastis §3.1, §3.3, §3.4).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::rpc::{self, ReadReply, Stamp};
use atoll_dht::{Blocks, DhtConfig, GetError, NewBlock, Obstacle, PutError, Wanted};
use atoll_env::BoxFuture;
use atoll_key::kinds::certified::{Author, Binding, Certificate, CertifiedBlock, WriterId};
use atoll_key::{BlockKind, GroupId, Key, NotAdmitted, SecretKey, UserId, VolumeId};
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_sim::{HostId, SimConfig};
use atoll_store::{BlockInfo, MemoryStore, Owner, StoredBlock};
use bytes::Bytes;
use futures_util::future::join_all;

use crate::flawed::Flawed;
use crate::quotas;
use crate::ring::{HOUR, MINUTE, ROOMY, Ring, prompt};

/// The people who share one inode, on a ring.
pub(crate) struct Inode<'a> {
    pub ring: &'a Ring,
    pub group: SecretKey,
    pub first: CertifiedBlock,
}

fn secret(n: u8) -> SecretKey {
    SecretKey::from_seed(&[n; 32])
}

impl Inode<'_> {
    /// An inode that is not on the ring yet.
    pub(crate) fn on(ring: &Ring, number: u8) -> Inode<'_> {
        let group = secret(100);
        let volume = VolumeId(secret(101).public());
        let binding = Binding::new(volume, [number; 16], &[GroupId(group.public())]);
        let author = author(ring, &group, 0, HOUR * 24 * 365);
        let first =
            CertifiedBlock::create(binding.expect("one group"), &author, now_ms(ring), b"first");
        Inode { ring, group, first: first.expect("a member") }
    }

    pub(crate) fn key(&self) -> Key {
        self.first.key()
    }

    /// The version that user number `at` writes in place of `seen`.
    pub(crate) fn written(
        &self,
        seen: &CertifiedBlock,
        at: usize,
        payload: &str,
    ) -> CertifiedBlock {
        let author = author(self.ring, &self.group, at as u8, HOUR * 24 * 365);
        seen.write(&author, now_ms(self.ring), Some(payload.as_bytes())).expect("a member")
    }

    pub(crate) fn putting(
        &self,
        at: usize,
        block: &CertifiedBlock,
    ) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.ring.members[at].dht.put_blocks(vec![new_block(block)])
    }

    pub(crate) fn put(&self, at: usize, block: &CertifiedBlock) -> Result<(), PutError> {
        let put = self.ring.sim.block_on(MINUTE * 5, self.putting(at, block));
        put.expect("puts have deadlines").remove(0)
    }

    pub(crate) fn get(&self, at: usize) -> Result<CertifiedBlock, GetError> {
        let get = self.ring.members[at].dht.get_block(self.first.id(), Wanted::Newest);
        let held = self.ring.sim.block_on(MINUTE * 5, get).expect("gets have deadlines")?;
        Ok(CertifiedBlock::decode(&held.bytes).expect("verified"))
    }

    /// What each node of the replica set holds.
    fn held(&self) -> Vec<CertifiedBlock> {
        let set = self.ring.replica_set(&self.key());
        let held = set.into_iter().filter_map(|at| self.ring.held(at, &self.key()));
        held.map(|held| CertifiedBlock::decode(&held.bytes).expect("verified")).collect()
    }

    /// When the leases of this inode end: with that which a replica holds, or late.
    fn expires(&self) -> u64 {
        let holders = self.ring.holders(&self.key());
        let infos = holders.into_iter().filter_map(|at| self.ring.info(at, &self.key()));
        infos.map(|info| info.expires_unix_secs).max().unwrap_or(u64::MAX / 2)
    }

    /// Puts a block into one node's store, past the node.
    pub(crate) fn store(&self, at: usize, block: &CertifiedBlock) {
        let info = BlockInfo {
            key: block.key(),
            kind: BlockKind::Certified,
            version: block.version(),
            expires_unix_secs: self.expires(),
            len_bytes: block.bytes().len() as u32,
            owner: Owner::NOBODY,
        };
        self.ring.store(at, vec![StoredBlock { info, bytes: block.bytes().clone() }]);
    }
}

fn now_ms(ring: &Ring) -> u64 {
    ring.sim.outside().unix_ms()
}

/// A writer, with a certificate that lasts so long.
fn author(ring: &Ring, group: &SecretKey, n: u8, lasts: Duration) -> Author {
    let (secret, now_secs) = (secret(n), now_ms(ring) / 1000);
    let user = UserId(secret.public());
    let certificate = Certificate::issue(group, user, now_secs - 60, now_secs + lasts.as_secs());
    Author { writer: WriterId::new(&user, [n; 8]), secret, certificate }
}

pub(crate) fn new_block(block: &CertifiedBlock) -> NewBlock {
    NewBlock { id: block.id(), bytes: block.bytes().clone(), lease_secs: None }
}

fn payloads(block: &CertifiedBlock) -> BTreeSet<String> {
    let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).expect("a test's");
    block.siblings().iter().map(|sibling| text(&sibling.payload)).collect()
}

fn texts(all: &[&str]) -> BTreeSet<String> {
    all.iter().map(|text| (*text).to_owned()).collect()
}

/// Two wrote at once; in Pastis the earlier write is lost.
#[test]
fn writes_that_meet_are_both_kept_on_all_replicas() {
    for seed in 0..10 {
        let sim = SimConfig { seed, jitter: 0.8, ..SimConfig::default() };
        let ring = Ring::with(sim, prompt(), 7);
        let inode = Inode::on(&ring, 1);
        assert_eq!(inode.put(0, &inode.first), Ok(()));
        let names: Vec<String> = (0..6).map(|n| format!("{n}")).collect();
        let puts = (0..6).map(|at| inode.putting(at, &inode.written(&inode.first, at, &names[at])));
        let outcomes = ring.sim.block_on(MINUTE * 5, join_all(puts)).expect("end");
        assert!(outcomes.iter().flatten().all(Result::is_ok), "{outcomes:?}, seed {seed}");
        let all: BTreeSet<String> = names.into_iter().collect();
        for at in 0..7 {
            assert_eq!(payloads(&inode.get(at).expect("held")), all, "at {at}, seed {seed}");
        }
        ring.sim.run_for(MINUTE);
        let held = inode.held();
        assert_eq!(held.len(), 3);
        assert!(held.iter().all(|one| *one == held[0] && payloads(one) == all), "seed {seed}");
        // Who has seen them all may put one in their place.
        let merged = inode.written(&held[0], 6, "merged");
        assert_eq!(inode.put(6, &merged), Ok(()));
        assert_eq!(payloads(&inode.get(2).expect("held")), texts(&["merged"]));
    }
}

/// Each pair of three writes has one replica in common, and all three none: a reader that takes the
/// newest block of any one replica misses one that was acknowledged.
#[test]
fn a_reader_joins_what_the_replicas_hold() {
    let ring = Ring::new(2, 6);
    let inode = Inode::on(&ring, 1);
    let writes: Vec<CertifiedBlock> =
        (0..3).map(|at| inode.written(&inode.first, at, &format!("{at}"))).collect();
    let set = ring.replica_set(&inode.key());
    for (place, at) in set.iter().enumerate() {
        let two = writes[place].join(&writes[(place + 1) % 3]).expect("one inode");
        inode.store(*at, &two);
    }
    let outside = (0..6).find(|at| !set.contains(at)).expect("six nodes");
    assert_eq!(payloads(&inode.get(outside).expect("held")), texts(&["0", "1", "2"]));
    // It has told the replicas.
    ring.sim.run_for(Duration::from_secs(5));
    assert!(inode.held().iter().all(|held| held.siblings().len() == 3));
}

/// Replicas of a block that nobody reads compared versions, took the higher, and would have stopped.
#[test]
fn repair_brings_replicas_with_different_siblings_together() {
    for seed in 0..12 {
        let ring = Ring::new(20 + seed, 5);
        let inode = Inode::on(&ring, seed as u8);
        let set = ring.replica_set(&inode.key());
        for (at, name) in set.iter().zip(["a", "b", "c"]) {
            inode.store(*at, &inode.written(&inode.first, *at, name));
        }
        ring.sim.run_for(HOUR);
        let held = inode.held();
        assert!(held.iter().all(|held| held.siblings().len() == 3), "seed {seed}: {held:?}");
    }
}

/// A stray that says something else must be joined before it is dropped.
#[test]
fn a_stray_is_dropped_only_when_its_siblings_are_where_they_belong() {
    for seed in 0..6 {
        let ring = Ring::new(40 + seed, 8);
        let inode = Inode::on(&ring, seed as u8);
        let (here, there) =
            (inode.written(&inode.first, 1, "here"), inode.written(&inode.first, 2, "there"));
        assert_eq!(inode.put(0, &here), Ok(()));
        let set = ring.replica_set(&inode.key());
        let stray = (0..8).find(|at| !set.contains(at)).expect("eight nodes");
        inode.store(stray, &there);
        ring.sim.run_for(HOUR * 3);
        assert!(!ring.holders(&inode.key()).contains(&stray), "the stray stays, seed {seed}");
        for held in inode.held() {
            assert_eq!(payloads(&held), texts(&["here", "there"]), "seed {seed}");
        }
    }
}

/// Each would be joined with what was held before, and the later one stored would drop the other.
#[test]
fn writes_that_reach_a_slow_disk_together_are_both_kept() {
    let mut ring = Ring::configured(50, DhtConfig { replicas: 1, ..prompt() }, 0);
    for _ in 0..3 {
        let delay = Duration::from_millis(200);
        ring.join(Arc::new(Flawed::slow(ROOMY, ring.sim.outside(), delay)));
    }
    ring.settle();
    let inode = Inode::on(&ring, 1);
    assert_eq!(inode.put(0, &inode.first), Ok(()));
    let puts =
        (0..3).map(|at| inode.putting(at, &inode.written(&inode.first, at, &format!("{at}"))));
    let outcomes = ring.sim.block_on(MINUTE * 5, join_all(puts)).expect("end");
    assert!(outcomes.iter().flatten().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(payloads(&inode.get(1).expect("held")), texts(&["0", "1", "2"]));
}

/// A put whose caller gave up was still on its way into the store, joined with what was held
/// before, and took the place of one that was acknowledged meanwhile.
#[test]
fn a_write_that_is_given_up_takes_the_place_of_none() {
    let mut ring = Ring::configured(52, DhtConfig { replicas: 1, ..prompt() }, 0);
    let disks: Vec<Arc<Flawed>> = (0..2).map(|_| Arc::new(Flawed::new(ROOMY))).collect();
    for disk in &disks {
        ring.join(disk.clone());
    }
    ring.settle();
    let inode = Inode::on(&ring, 1);
    assert_eq!(inode.put(0, &inode.first), Ok(()));
    let root = ring.root(&inode.key());
    let stall = (ring.sim.outside(), Duration::from_secs(5));
    *disks[root].stall.lock().expect("not poisoned") = Some(stall);
    let block = inode.written(&inode.first, 1, "given up");
    let header =
        rpc::BlockHeader { key: block.key(), kind: BlockKind::Certified, lease_secs: 1000 };
    let put = rpc::Put {
        blocks: vec![header].into(),
        as_root: false,
        receipt: None,
        promises: Vec::new().into(),
    };
    let request = rpc::to_request(&put, vec![block.bytes().clone()]);
    let other = ring.sim.transport(ring.members[1 - root].host);
    let call = other.call(ring.node(root).peer, request, Duration::from_secs(1));
    assert!(ring.sim.block_on(MINUTE, call).expect("has a deadline").is_err());
    assert_eq!(inode.put(1 - root, &inode.written(&inode.first, 2, "acknowledged")), Ok(()));
    ring.sim.run_for(MINUTE);
    let held = payloads(&inode.get(root).expect("held"));
    assert!(held.contains("acknowledged"), "{held:?}");
}

/// Acknowledges blocks that it does not store.
struct Forgetful(Arc<dyn Service>);

impl Service for Forgetful {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        if request.method != rpc::PUT {
            return self.0.handle(from, request);
        }
        let put: rpc::Put = rpc::from_header(&request.header).expect("a member's");
        let stored = rpc::PutStatus::Stored { copies: 1, wanted: 1 };
        let statuses = vec![stored; put.blocks.0.len()].into();
        let header =
            rpc::to_header(&rpc::PutReply { statuses, set: None, promises: Vec::new().into() });
        Box::pin(async move { Ok(Reply { header, parts: Vec::new() }) })
    }
}

/// Replicas with a higher version prove nothing about siblings that they lack.
#[test]
fn a_stray_is_kept_while_replicas_do_not_show_its_siblings() {
    let mut ring = Ring::new(51, 8);
    let (first, set) = {
        let inode = Inode::on(&ring, 1);
        let newer = inode.written(&inode.written(&inode.first, 1, "seen"), 1, "here");
        assert_eq!(inode.put(0, &newer), Ok(()));
        (inode.first.clone(), ring.replica_set(&inode.key()))
    };
    for at in &set {
        ring.crash(*at);
        ring.restart_as(*at, |honest| Arc::new(Forgetful(honest)));
    }
    ring.settle();
    let inode = Inode { ring: &ring, group: secret(100), first };
    let stray = (0..8).find(|at| !set.contains(at)).expect("eight nodes");
    inode.store(stray, &inode.written(&inode.first, 2, "there"));
    ring.sim.run_for(HOUR * 3);
    assert!(ring.holders(&inode.key()).contains(&stray), "its sibling is lost");
}

/// A certificate that has run out, a false time, and a rebinding.
#[test]
fn what_is_put_is_checked_by_the_writers_node_and_by_the_replicas() {
    let ring = Ring::new(3, 5);
    let inode = Inode::on(&ring, 1);
    assert_eq!(inode.put(0, &inode.first), Ok(()));
    let short = author(&ring, &inode.group, 1, MINUTE * 8);
    let write = |payload: &[u8]| inode.first.write(&short, now_ms(&ring), Some(payload));
    let in_time = write(b"in time").expect("valid now");
    let late = write(b"late").expect("valid now");
    assert_eq!(inode.put(1, &in_time), Ok(()));
    ring.sim.run_for(MINUTE * 9);
    let expired = NotAdmitted::Expired { not_after_secs: short.certificate.not_after_secs };
    assert_eq!(inode.put(1, &late), Err(PutError::NotAdmitted(expired)));
    let other = inode.written(&inode.first, 2, "at another time");
    ring.sim.run_for(MINUTE * 11);
    let refused = inode.put(1, &other);
    assert!(
        matches!(refused, Err(PutError::NotAdmitted(NotAdmitted::Clock { .. }))),
        "{refused:?}"
    );
    // The file is there all the same, and with it the write of one who may write no longer.
    ring.sim.run_for(HOUR * 48);
    assert_eq!(payloads(&inode.get(4).expect("held")), texts(&["in time"]));
}

#[test]
fn a_writer_who_has_not_seen_eight_siblings_is_told_to_read() {
    let ring = Ring::new(4, 5);
    let inode = Inode::on(&ring, 1);
    for at in 0..8 {
        let at = at as usize;
        assert_eq!(inode.put(at % 5, &inode.written(&inode.first, at, &format!("{at}"))), Ok(()));
    }
    let ninth = inode.written(&inode.first, 9, "ninth");
    let refused = inode.put(0, &ninth);
    assert!(matches!(refused, Err(PutError::Superseded { .. })), "{refused:?}");
    let seen = inode.get(0).expect("held");
    assert_eq!(inode.put(0, &inode.written(&seen, 9, "after reading")), Ok(()));
    assert_eq!(payloads(&inode.get(3).expect("held")), texts(&["after reading"]));
}

#[test]
fn a_watcher_hears_of_a_concurrent_write_and_a_removed_inode_is_gone() {
    let ring = Ring::new(5, 5);
    let inode = Inode::on(&ring, 1);
    let one = inode.written(&inode.first, 1, "one");
    assert_eq!(inode.put(1, &one), Ok(()));
    let watched = ring.members[3].dht.watch(one.id(), one.version());
    let two = inode.putting(2, &inode.written(&inode.first, 2, "two"));
    let both = futures_util::future::join(watched, two);
    let (heard, _) = ring.sim.block_on(MINUTE * 5, both).expect("ends");
    let heard = heard.expect("in time").expect("a change");
    let heard = CertifiedBlock::decode(&heard.bytes).expect("verified");
    assert_eq!(payloads(&heard), texts(&["one", "two"]));
    let author = author(&ring, &inode.group, 3, HOUR);
    let removed = heard.write(&author, now_ms(&ring), None).expect("a member");
    let tombstone = ring.members[0].dht.remove_blocks(vec![new_block(&removed)]);
    assert_eq!(ring.sim.block_on(MINUTE * 5, tombstone).expect("ends"), [Ok(())]);
    assert!(matches!(inode.get(2), Err(GetError::Removed { .. })));
}

/// A node whose clock is two hours ahead kept what was written there. The root compared with it
/// every minute, could not take the block, and said "not checked yet" without a reason.
#[test]
fn a_block_of_the_future_is_named_as_what_keeps_replicas_apart() {
    for seed in 0..5 {
        let mut ring = Ring::with(SimConfig { seed, ..SimConfig::default() }, prompt(), 2);
        ring.join_skewed(2 * 3_600_000);
        ring.until_replicated();
        let ahead = ring.node(2).peer;
        let inode = Inode::on(&ring, 1);
        assert_eq!(inode.put(0, &inode.first), Ok(()), "seed {seed}");
        ring.settle();
        let written = {
            let author = author(&ring, &inode.group, 0, HOUR * 24 * 365);
            let at_ms = now_ms(&ring) + 2 * 3_600_000;
            inode.first.write(&author, at_ms, Some(b"ahead")).expect("a member")
        };
        inode.store(2, &written);
        let rounds = || -> u64 { ring.up().map(|m| m.dht.repair_status().rounds).sum() };
        ring.members.iter().for_each(|member| member.dht.repair_now());
        ring.sim.run_for(MINUTE * 3);
        let before = rounds();
        ring.sim.run_for(MINUTE * 10);
        let passes = rounds() - before;
        assert!(passes < 100, "seed {seed}: {passes} passes of three nodes in ten minutes");
        let all = (0..3).map(|at| (at, ring.members[at].dht.repair_status()));
        let open = all.clone().find(|(_, status)| !status.open.is_empty());
        let (root, status) =
            open.unwrap_or_else(|| panic!("seed {seed}: {:?}", all.collect::<Vec<_>>()));
        assert!(!status.fully_replicated && status.queue_blocks > 0, "seed {seed}: {status:?}");
        let named: Vec<_> = status.open.iter().map(|open| (open.peer, open.why)).collect();
        let is_named = match root {
            2 => named.iter().any(|(_, why)| *why == Obstacle::OfTheFuture),
            _ => named.contains(&(ahead, Obstacle::OfTheFutureHere)),
        };
        assert!(is_named, "seed {seed}: {named:?}");
        ring.sim.run_for(HOUR * 3);
        ring.until_replicated();
        let held = inode.held().iter().map(payloads).collect::<Vec<_>>();
        assert_eq!(held, vec![texts(&["ahead"]); 3], "seed {seed}: its time has come");
    }
}

/// A replica that lies about certified blocks.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// Holds nothing.
    Deny,
    /// Has the first version and no later one.
    Old,
    /// Sends other bytes than it says.
    Garbage,
    /// Speaks of a version that it does not show.
    Boast,
}

struct Liar {
    lie: Lie,
    honest: Arc<dyn Service>,
    first: CertifiedBlock,
}

impl Service for Liar {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        if request.method != rpc::READ {
            return self.honest.handle(from, request);
        }
        let (lie, first) = (self.lie, self.first.clone());
        let honest = self.honest.handle(from, request);
        Box::pin(async move {
            let mut reply = honest.await?;
            let mut said: ReadReply = rpc::from_header(&reply.header).expect("honest");
            match lie {
                Lie::Deny => (said.held, said.block, reply.parts) = (None, None, Vec::new()),
                Lie::Old if said.block.is_some() => reply.parts = vec![first.bytes().clone()],
                Lie::Garbage => {
                    for part in &mut reply.parts {
                        let mut bytes = part.to_vec();
                        let middle = bytes.len() / 2;
                        bytes[middle] ^= 1;
                        *part = bytes.into();
                    }
                }
                Lie::Boast => said.held = Some(Stamp { version: u64::MAX, digest: 7 }),
                Lie::Old => {}
            }
            if let (Lie::Old, Some(held)) = (lie, &mut said.held) {
                held.version = first.version();
            }
            reply.header = rpc::to_header(&said);
            Ok(reply)
        })
    }
}

/// Pastis §3.4: "a Pastis client will still behave correctly provided it can retrieve an inode's
/// replica which satisfies the consistency model".
#[test]
fn reads_are_right_while_one_replica_of_three_lies() {
    for (seed, lie) in [Lie::Deny, Lie::Old, Lie::Garbage, Lie::Boast].into_iter().enumerate() {
        let mut ring = Ring::configured(60 + seed as u64, DhtConfig::default(), 0);
        for _ in 0..5 {
            ring.join(Arc::new(MemoryStore::new(ROOMY)));
        }
        ring.settle();
        let (key, first) = {
            let inode = Inode::on(&ring, 1);
            (inode.key(), inode.first)
        };
        let liar = ring.replica_set(&key)[seed % 3];
        ring.crash(liar);
        ring.sim.run_for(MINUTE);
        let told = first.clone();
        ring.restart_as(liar, move |honest| Arc::new(Liar { lie, honest, first: told.clone() }));
        ring.settle();
        let inode = Inode { ring: &ring, group: secret(100), first };
        assert_eq!(inode.put(0, &inode.first), Ok(()), "{lie:?}");
        let mut newest = inode.first.clone();
        for round in 0..4 {
            let name = format!("{round}");
            newest = inode.written(&newest, round, &name);
            assert_eq!(inode.put(round, &newest), Ok(()), "{lie:?}");
            for at in (0..5).filter(|at| *at != liar) {
                let got = inode.get(at).unwrap_or_else(|error| panic!("{lie:?} {at}: {error}"));
                assert_eq!(payloads(&got), texts(&[&name]), "{lie:?} at {at}");
            }
        }
    }
}

/// A liar and a replica that has missed the last write say the same, and are a majority of three. A
/// reader that believed them gave back the version before (Pastis §3.4: with close-to-open "all inode
/// replicas are retrieved on a file open, meaning that the number of Byzantine nodes must be less
/// than k").
#[test]
fn a_liar_beside_a_stale_replica_hides_no_write() {
    for seed in 0..6 {
        let mut ring = Ring::new(80 + seed, 7);
        let (key, first) = {
            let inode = Inode::on(&ring, 1);
            (inode.key(), inode.first)
        };
        let set = ring.replica_set(&key);
        let (liar, stale) = (set[seed as usize % 3], set[(seed as usize + 1) % 3]);
        let told = first.clone();
        ring.crash(liar);
        ring.restart_as(liar, move |honest| {
            Arc::new(Liar { lie: Lie::Old, honest, first: told.clone() })
        });
        ring.settle();
        let inode = Inode { ring: &ring, group: secret(100), first };
        assert_eq!(inode.put(0, &inode.first), Ok(()));
        assert_eq!(inode.put(0, &inode.written(&inode.first, 0, "newest")), Ok(()));
        for at in (0..7).filter(|at| *at != liar) {
            inode.store(stale, &inode.first);
            let got = inode.get(at).expect("held");
            assert_eq!(payloads(&got), texts(&["newest"]), "at {at}, seed {seed}");
        }
    }
}

/// Writers on both sides of a partition, with crashes: when it has healed each acknowledged write is
/// there, or another that had seen it.
#[test]
fn nothing_acknowledged_is_lost_in_partitions_and_crashes() {
    for seed in 0..12 {
        let mut ring = Ring::new(200 + seed, 7);
        let env = ring.sim.outside();
        let random = |below: usize| (env.random_u64() % below as u64) as usize;
        let first = {
            let inode = Inode::on(&ring, seed as u8);
            assert_eq!(inode.put(0, &inode.first), Ok(()));
            inode.first
        };
        let mut acknowledged: Vec<CertifiedBlock> = vec![first.clone()];
        let (mut writes, mut crashed) = (0, None);
        for round in 0..6 {
            let hosts: Vec<HostId> = ring.members.iter().map(|member| member.host).collect();
            let cut = 1 + random(3);
            if round % 2 == 0 {
                ring.sim.partition(&[&hosts[..cut], &hosts[cut..]]);
            } else {
                ring.sim.heal();
                crashed.take().into_iter().for_each(|victim| ring.restart(victim));
            }
            if random(2) == 0 && crashed.is_none() {
                crashed = Some(random(7));
                crashed.into_iter().for_each(|victim| ring.crash(victim));
            }
            ring.sim.run_for(Duration::from_secs(random(90) as u64));
            for _ in 0..3 {
                let at = random(7);
                if !ring.sim.is_up(ring.members[at].host) {
                    continue;
                }
                let inode = Inode { ring: &ring, group: secret(100), first: first.clone() };
                // Readers find what they find; a writer covers what it has seen.
                let seen = inode.get(at).unwrap_or_else(|_| first.clone());
                writes += 1;
                let author = Author {
                    writer: WriterId::new(&UserId(secret(9).public()), [writes; 8]),
                    ..author(&ring, &inode.group, 9, HOUR * 24)
                };
                let text = format!("{writes}");
                let block = seen.write(&author, now_ms(&ring), Some(text.as_bytes()));
                let block = block.expect("a member");
                if inode.put(at, &block).is_ok() {
                    acknowledged.push(block);
                }
            }
        }
        ring.sim.heal();
        crashed.into_iter().for_each(|victim| ring.restart(victim));
        ring.sim.run_for(HOUR);
        let inode = Inode { ring: &ring, group: secret(100), first };
        assert!(acknowledged.len() > 4, "hardly any write succeeds, seed {seed}");
        for at in 0..7 {
            let got = inode.get(at).expect("healed");
            for block in &acknowledged {
                assert!(got.includes(block), "at {at} lacks {:?}, seed {seed}", payloads(block));
            }
        }
        let held = inode.held();
        assert!(held.iter().all(|one| *one == held[0]), "replicas differ, seed {seed}");
    }
}

/// Any node may send copies, without a receipt: with a time that has not come yet, a member used up
/// the heights of that time, and shut all others out.
#[test]
fn a_copy_from_the_future_is_refused() {
    let ring = Ring::new(6, 5);
    let inode = Inode::on(&ring, 1);
    assert_eq!(inode.put(0, &inode.first), Ok(()));
    let author = author(&ring, &inode.group, 1, HOUR * 24);
    let in_an_hour = now_ms(&ring) + HOUR.as_millis() as u64;
    let future = inode.first.write(&author, in_an_hour, Some(b"future")).expect("a member");
    let header =
        rpc::BlockHeader { key: inode.key(), kind: BlockKind::Certified, lease_secs: 1000 };
    let put = rpc::Put {
        blocks: vec![header].into(),
        as_root: false,
        receipt: None,
        promises: Vec::new().into(),
    };
    for at in ring.replica_set(&inode.key()) {
        let request = rpc::to_request(&put, vec![future.bytes().clone()]);
        let other = ring.sim.transport(ring.members[(at + 1) % 5].host);
        let call = other.call(ring.node(at).peer, request, MINUTE);
        let reply = ring.sim.block_on(MINUTE * 2, call).expect("has a deadline").expect("answers");
        let reply: rpc::PutReply = rpc::from_header(&reply.header).expect("honest");
        assert_eq!(reply.statuses.0, [rpc::PutStatus::NotAdmitted]);
    }
    assert_eq!(payloads(&inode.get(3).expect("held")), texts(&["first"]));
}

/// Of a block that was joined only the newest sibling was charged: eight in each inode were kept for
/// the price of one.
#[test]
fn siblings_that_join_what_is_held_use_up_the_quota() {
    let ring = quotas::ring(7, 5);
    let inode = Inode::on(&ring, 1);
    let long = "x".repeat(40_000);
    let writes = (0..8).map(|at| inode.written(&inode.first, at, &long));
    let outcomes: Vec<Result<(), PutError>> = writes.map(|block| inode.put(0, &block)).collect();
    let peer = ring.node(0).peer;
    for (of_key, _) in quotas::kept_for(&ring, &peer.id, peer.addr.ip()) {
        assert!(of_key <= quotas::SHARE, "{of_key} of {}: {outcomes:?}", quotas::SHARE);
    }
    let is_over =
        |outcome: &Result<(), PutError>| matches!(outcome, Err(PutError::OverQuota { .. }));
    assert!(outcomes[0].is_ok() && outcomes.last().is_some_and(is_over), "{outcomes:?}");
}
