//! What slow, silent and greedy peers can do to those who are charged, or move (CFS §5.4).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use atoll_dht::receipt::Receipt;
use atoll_dht::rpc::{self, Name, PutReply, PutStatus, Renew, RenewReply, RenewStatus};
use atoll_dht::{Blocks, QuotaConfig, Share, SimulatedKeys};
use atoll_env::BoxFuture;
use atoll_key::{BlockHash, BlockKind};
use atoll_net::{Peer, Refusal, Reply, Request, Service, Transport};
use atoll_store::{BlockInfo, MemoryStore, Owner, StoredBlock};
use futures_util::future::join_all;

use crate::quotas::{
    Agreeable, face, now_secs, owner_of, put_of, put_with, ring_and_flooder, send,
};
use crate::ring::{MINUTE, ROOMY, Ring, block};

/// Answers nothing until it is told to.
#[derive(Default)]
struct Sulking(AtomicBool);

impl Service for Sulking {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        if self.0.load(Ordering::Relaxed) {
            return Agreeable.handle(from, request);
        }
        Box::pin(std::future::pending())
    }
}

/// Shows node 0 a receipt of each face, all at once, and waits for `limit`.
fn show(ring: &Ring, from: &Arc<dyn Transport>, faces: &[Peer], limit: Duration) -> usize {
    let shown = faces.iter().enumerate().map(|(n, face)| {
        let block = block(n as u32);
        let put = put_of(*face, now_secs(ring), &[block.0.key()], &[block], false);
        from.call(ring.node(0).peer, put, limit)
    });
    let answers = ring.sim.block_on(MINUTE, join_all(shown)).expect("calls have deadlines");
    answers.into_iter().filter(Result::is_ok).count()
}

/// They stayed among those being asked, and after four at an address, or 64, nobody new
/// could publish there until the node was restarted.
#[test]
fn questions_that_were_given_up_are_in_nobodys_way() {
    let faces: Vec<Peer> = (0..9).map(|n| face(n, n)).collect();
    let (ring, flooder) = ring_and_flooder(31, 4, faces.iter().copied());
    let sulking = Arc::new(Sulking::default());
    flooder.serve(sulking.clone());
    for _ in 0..5 {
        assert_eq!(show(&ring, &flooder, &faces[..8], Duration::from_secs(1)), 0);
    }
    sulking.0.store(true, Ordering::Relaxed);
    assert_eq!(show(&ring, &flooder, &faces[8..], Duration::from_secs(5)), 1);
    assert_eq!(show(&ring, &flooder, &faces[..1], Duration::from_secs(5)), 1);
}

/// Anybody can sign receipts as a hundred publishers at addresses where nobody answers.
#[test]
fn publishers_that_never_answer_keep_no_others_waiting() {
    let faces: Vec<Peer> = (0..100).map(|n| face(n, n)).collect();
    let (ring, flooder) = ring_and_flooder(32, 4, faces.iter().copied());
    flooder.serve(Arc::new(Sulking::default()));
    for to in 0..4 {
        for (n, face) in faces.iter().enumerate() {
            let block = block(1000 + n as u32);
            let put = put_of(*face, now_secs(&ring), &[block.0.key()], &[block], false);
            let call = flooder.call(ring.node(to).peer, put, MINUTE);
            ring.sim.env(ring.members[1].host).spawn(Box::pin(async move {
                let _ = call.await;
            }));
        }
    }
    ring.sim.run_for(Duration::from_secs(1));
    let put = ring.members[2].dht.put(vec![block(1)]);
    assert_eq!(ring.sim.block_on(Duration::from_secs(2), put), Ok(Ok(())));
}

/// Answers everything but what it holds.
struct Unvouching(Arc<dyn Service>);

impl Service for Unvouching {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        if request.method == rpc::HOLDINGS {
            return Box::pin(std::future::pending());
        }
        self.0.handle(from, request)
    }
}

/// Whoever brought the copy gave up before the one that was asked did: one such node kept its
/// neighbours from being repaired for ever.
#[test]
fn a_neighbour_that_never_vouches_does_not_keep_copies_away() {
    let mut ring = Ring::new(33, 3);
    ring.join_as(Arc::new(MemoryStore::new(ROOMY)), |dht| Arc::new(Unvouching(dht)));
    ring.settle();
    let from = ring.outsider();
    from.serve(Arc::new(Agreeable));
    let limit = atoll_dht::DhtConfig::default().call_limit;
    for to in 0..3 {
        let put = put_with(None, &[block(50 + to as u32)], false, 3600);
        let call = from.call(ring.node(to).peer, put, limit);
        let reply = ring.sim.block_on(MINUTE, call).expect("ends").expect("answered in time");
        let reply: PutReply = rpc::from_header(&reply.header).expect("well-formed");
        assert!(matches!(reply.statuses.0[..], [PutStatus::Stored { .. }]), "{reply:?}");
    }
}

/// The sum overflowed while the quota was locked.
#[test]
fn asking_for_room_for_any_number_of_bytes_is_refused() {
    let (ring, from) = ring_and_flooder(34, 4, [face(1, 1)].into_iter());
    let put = put_of(face(1, 1), now_secs(&ring), &[block(1).0.key()], &[block(1)], false);
    send(&ring, &from, 0, put).expect("taken");
    let Owner { publisher, ip } = owner_of(&face(1, 1));
    let ask = rpc::AskRoom { publisher, ip, bytes: u64::MAX, is_root: false };
    let header = rpc::to_header(&ask);
    let request = Request { method: rpc::ROOM, header, parts: Vec::new() };
    let call = from.call(ring.node(0).peer, request, Duration::from_secs(5));
    let reply = ring.sim.block_on(MINUTE, call).expect("ends").expect("answered");
    let reply: rpc::AskRoomReply = rpc::from_header(&reply.header).expect("one");
    assert!(reply.over.is_some());
}

/// A lease extended at node 0 for `publisher`: whether each block is held, or why not.
fn renew(
    ring: &Ring,
    from: &Arc<dyn Transport>,
    publisher: Peer,
    of: &[BlockHash],
) -> Vec<RenewStatus> {
    let keys: Vec<_> = of.iter().map(BlockHash::key).collect();
    let lease_secs = 60 * 24 * 3600;
    let (signer, now) = (SimulatedKeys(publisher.id), now_secs(ring));
    let receipt = Receipt::sign(&signer, publisher, now, lease_secs, keys.iter().copied());
    let receipt = Some(receipt.to_wire(keys.iter().copied()));
    let names = keys.iter().map(Name::of).collect();
    let renew = Renew { names, lease_secs, as_root: false, receipt, will_be_put: None };
    let header = rpc::to_header(&renew);
    let request = Request { method: rpc::RENEW, header, parts: Vec::new() };
    let call = from.call(ring.node(0).peer, request, Duration::from_secs(20));
    let reply = ring.sim.block_on(MINUTE, call).expect("ends").expect("answered");
    rpc::from_header::<RenewReply>(&reply.header).expect("well-formed").statuses
}

/// As after the network has grown.
fn nearly_nothing() -> QuotaConfig {
    let share = Share::from_millionths(1);
    QuotaConfig { key_share: Some(share), address_share: Some(share), ..QuotaConfig::default() }
}

#[test]
fn a_publisher_that_is_over_quota_and_moves_keeps_its_blocks() {
    let (before, after) = (face(1, 1), face(1, 2));
    let (ring, from) = ring_and_flooder(35, 4, [before, after, face(3, 1)].into_iter());
    for n in 0..5 {
        let put = put_of(before, now_secs(&ring), &[block(n).0.key()], &[block(n)], false);
        let stored = send(&ring, &from, 0, put).expect("taken");
        assert!(matches!(stored[..], [PutStatus::Stored { .. }]), "{stored:?}");
    }
    ring.members[0].dht.set_quota(nearly_nothing());
    let hashes: Vec<BlockHash> = (0..5).map(|n| block(n).0).collect();
    assert_eq!(renew(&ring, &from, after, &hashes), [RenewStatus::Held; 5]);
    for hash in &hashes {
        let held = ring.members[0].store.info(&hash.key()).expect("memory").expect("held");
        assert_eq!(held.owner, owner_of(&after));
        assert!(held.expires_unix_secs > now_secs(&ring) + 50 * 24 * 3600);
    }
    ring.sim.run_for(MINUTE * 120);
    assert_eq!(
        renew(&ring, &from, face(3, 1), &hashes[..1]),
        [RenewStatus::OverQuota],
        "somebody else's"
    );
}

#[test]
fn blocks_from_before_owners_were_kept_are_renewed_without_room() {
    let publisher = face(1, 1);
    let (ring, from) = ring_and_flooder(36, 4, [publisher].into_iter());
    let old = (0..5).map(|n| {
        let (hash, bytes) = block(n);
        let info = BlockInfo {
            key: hash.key(),
            kind: BlockKind::Content,
            version: 0,
            expires_unix_secs: now_secs(&ring) + 3600,
            len_bytes: bytes.len() as u32,
            owner: Owner::NOBODY,
        };
        StoredBlock { info, bytes }
    });
    let put = ring.members[0].store.put(old.collect());
    ring.sim.block_on(MINUTE, put).expect("ends").expect("memory");
    ring.members[0].dht.set_quota(nearly_nothing());
    let hashes: Vec<BlockHash> = (0..5).map(|n| block(n).0).collect();
    assert_eq!(renew(&ring, &from, publisher, &hashes), [RenewStatus::Late; 5]);
    for hash in &hashes {
        let held = ring.members[0].store.info(&hash.key()).expect("memory").expect("held");
        assert_eq!(held.owner, Owner::NOBODY);
        assert!(held.expires_unix_secs > now_secs(&ring) + 50 * 24 * 3600);
    }
}
