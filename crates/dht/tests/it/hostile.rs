//! Liars, garbage and damage.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::reconcile::{Answer, Claim, Item, Summary};
use atoll_dht::rpc::{self, BlockHeader, Put, Reconcile, ReconcileReply};
use atoll_key::{BlockHash, BlockKind, Key, KeyRange};
use atoll_net::{CallError, Refusal, Reply, Request, Service};
use atoll_store::{BlockInfo, MemoryStore, Owner, StoredBlock};
use bytes::Bytes;

use crate::faulty::{altered, faulty, flip_a_bit, reply_to, stores_all};
use crate::flawed::Flawed;
use crate::ring::{MINUTE, ROOMY, Ring, block};

/// Answers honestly but flips a bit of every block it serves.
fn liar(honest: Arc<dyn Service>) -> Arc<dyn Service> {
    altered(honest, |_, reply| flip_a_bit(reply))
}

#[test]
fn garbage_from_the_root_is_dropped_counted_and_fetched_elsewhere() {
    let mut ring = Ring::new(1, 5);
    let liar = ring.join_as(Arc::new(MemoryStore::new(ROOMY)), liar);
    ring.settle();
    ring.put(0, 0..60);
    for n in 0..60 {
        let (hash, bytes) = block(n);
        assert_eq!(ring.try_get(0, hash), Ok(bytes), "block {n}");
    }
    let stats = ring.members[0].dht.stats();
    let liar = ring.node(liar).peer.id;
    assert!(stats.bad_blocks.get(&liar).is_some_and(|count| *count > 0), "{stats:?}");
    assert_eq!(stats.bad_blocks.len(), 1, "only the liar is marked");
}

/// Acknowledges blocks and does not keep them.
fn forgetful(honest: Arc<dyn Service>) -> Arc<dyn Service> {
    faulty(honest, |_, request| {
        let is_copy = rpc::from_header::<Put>(&request.header).is_ok_and(|put| !put.as_root);
        reply_to(request, |put| stores_all(put, 1)).filter(|_| is_copy)
    })
}

/// Repair gave it all its blocks again, once a second, for ever.
#[test]
fn a_replica_that_forgets_what_it_takes_is_given_less_and_less() {
    let mut ring = Ring::new(11, 3);
    let liar = ring.join_as(Arc::new(MemoryStore::new(ROOMY)), forgetful);
    ring.settle();
    ring.put(0, 0..100);
    ring.sim.run_for(MINUTE * 10);
    let before = ring.bytes_of(rpc::PUT);
    ring.sim.run_for(MINUTE * 60);
    let sent = ring.bytes_of(rpc::PUT) - before;
    // Every block to it once is about 100 × 300 bytes.
    assert!(sent < 10 * 30_000, "{sent} bytes in an hour");
    let unsure = |i: &usize| !ring.members[*i].dht.repair_status().fully_replicated;
    let others = (0..4).filter(|i| *i != liar);
    assert!(others.clone().filter(unsure).count() > 0, "its copies count as missing");
    for n in 0..100 {
        let holders = ring.holders(&block(n).0.key());
        assert!(holders.len() >= 2, "block {n} is only at {holders:?}");
    }
}

/// One request could ask for 64 comparisons of everything.
#[test]
fn a_request_for_many_comparisons_is_answered_in_part() {
    let ring = Ring::new(12, 1);
    let info = |key| BlockInfo {
        key,
        kind: BlockKind::Content,
        version: 0,
        expires_unix_secs: u64::MAX,
        len_bytes: 4,
        owner: Owner::NOBODY,
    };
    let stored = (0..20_000u32).map(|n| {
        let bytes = Bytes::copy_from_slice(&n.to_be_bytes());
        StoredBlock { info: info(BlockHash::of(&bytes).key()), bytes }
    });
    ring.store(0, stored.collect());
    let outsider = ring.outsider();
    let compare = |claims: usize| {
        let summary = Summary { digest: [1; 32], count: 1 };
        let claims = vec![Claim { range: KeyRange::full(), summary }; claims];
        ring.call(&outsider, 0, &Reconcile { claims }, Vec::new())
    };
    let reply = compare(64).expect("answered");
    // 16,384 blocks looked at, of which two summaries and a cut are taken for 1,536.
    assert_eq!(reply.answers.0.len(), 11);
    assert!(compare(1).is_ok(), "the turn was not given back");
}

#[test]
fn repair_takes_no_garbage_over() {
    let mut ring = Ring::new(2, 3);
    ring.put(0, 0..40);
    let liar = ring.join_as(Arc::new(MemoryStore::new(ROOMY)), liar);
    ring.sim.run_for(MINUTE * 5);
    ring.join(Arc::new(MemoryStore::new(ROOMY)));
    ring.sim.run_for(MINUTE * 5);
    for i in (0..ring.members.len()).filter(|i| *i != liar) {
        for n in 0..40 {
            let (hash, bytes) = block(n);
            assert!(ring.held(i, &hash.key()).is_none_or(|held| held.bytes == bytes));
        }
    }
}

/// Calls the first member with a raw request.
fn call(ring: &Ring, request: Request) -> Result<Reply, CallError> {
    let call = ring.outsider().call(ring.node(0).peer, request, Duration::from_secs(5));
    ring.sim.block_on(MINUTE, call).expect("calls have deadlines")
}

fn put_request(key: Key, kind: BlockKind, bytes: &[u8]) -> Request {
    let header = BlockHeader { key, kind, lease_secs: 1000 };
    let put = Put {
        blocks: vec![header].into(),
        as_root: false,
        receipt: None,
        promises: Vec::new().into(),
    };
    let parts = vec![Bytes::copy_from_slice(bytes)];
    Request { method: rpc::PUT, header: rpc::to_header(&put), parts }
}

/// The header of a put of one block, with another number for its kind.
fn with_kind(header: &Bytes, key: &Key, kind: u8) -> Bytes {
    let mut header = header.to_vec();
    let at = header.windows(64).position(|bytes| bytes == key.0).expect("its key");
    // Field 1 follows field 0, the key.
    assert_eq!(header[at + 64..at + 66], [1, BlockKind::Content as u8]);
    header[at + 65] = kind;
    header.into()
}

fn put_status(ring: &Ring, request: Request) -> rpc::PutStatus {
    let reply = call(ring, request).expect("answered");
    let reply: rpc::PutReply = rpc::from_header(&reply.header).expect("well-formed");
    reply.statuses.0[0]
}

#[test]
fn malformed_requests_are_refused_with_what_is_wrong() {
    let ring = Ring::new(3, 2);
    let key = block(1).0.key();
    let mut unpaired = put_request(key, BlockKind::Content, b"x");
    unpaired.parts.push(Bytes::new());
    let mut of_unknown_kind = put_request(key, BlockKind::Content, b"x");
    of_unknown_kind.header = with_kind(&of_unknown_kind.header, &key, 9);
    let garbage =
        |method| Request { method, header: Bytes::from_static(&[0xff; 40]), parts: vec![] };
    let cases = [
        (garbage(rpc::LOOKUP_STEP), Refusal::MALFORMED),
        (garbage(rpc::PUT), Refusal::MALFORMED),
        (garbage(rpc::RENEW), Refusal::MALFORMED),
        (garbage(rpc::RECONCILE), Refusal::MALFORMED),
        (garbage(rpc::FETCH), Refusal::MALFORMED),
        (garbage(0x02ff), Refusal::UNKNOWN_METHOD),
        (unpaired, Refusal::MALFORMED),
        (of_unknown_kind, Refusal::MALFORMED),
    ];
    for (request, code) in cases {
        let method = request.method;
        match call(&ring, request) {
            Err(CallError::Refused(refusal)) => {
                assert_eq!(refusal.code, code, "{method:#06x}: {refusal}");
                assert!(!refusal.text.is_empty());
            }
            other => panic!("{method:#06x}: {other:?}"),
        }
    }
}

#[test]
fn blocks_that_are_not_what_their_key_says_are_not_stored() {
    let ring = Ring::new(4, 2);
    let (hash, bytes) = block(1);
    let cases = [
        ("wrong bytes", put_request(hash.key(), BlockKind::Content, b"something else")),
        ("content as signed", put_request(hash.key(), BlockKind::Signed, &bytes)),
        ("unhashed key", put_request(Key::MAX, BlockKind::Content, &bytes)),
    ];
    for (what, request) in cases {
        assert_eq!(put_status(&ring, request), rpc::PutStatus::Invalid, "{what}");
    }
    assert!(ring.holders(&hash.key()).is_empty() && ring.holders(&Key::MAX).is_empty());
    let marked: u64 = ring.members[0].dht.stats().bad_blocks.values().sum();
    assert_eq!(marked, 3, "each is counted");
}

#[test]
fn a_lease_longer_than_allowed_is_cut() {
    let ring = Ring::new(5, 1);
    let (hash, bytes) = block(1);
    let header = BlockHeader { key: hash.key(), kind: BlockKind::Content, lease_secs: u64::MAX };
    let put = Put {
        blocks: vec![header].into(),
        as_root: true,
        receipt: None,
        promises: Vec::new().into(),
    };
    ring.call(&ring.outsider(), 0, &put, vec![bytes]).expect("answered");
    let info = ring.info(0, &hash.key()).expect("stored");
    let now = ring.sim.env(ring.members[0].host).unix_ms() / 1000;
    assert!(info.expires_unix_secs <= now + atoll_dht::MAX_LEASE.as_secs());
}

#[test]
fn a_damaged_block_is_served_from_a_replica_and_repaired() {
    let mut ring = Ring::new(6, 2);
    let rotten = Arc::new(Flawed::new(ROOMY));
    let member = ring.join(rotten.clone());
    ring.settle();
    ring.put(0, 0..30);
    let (hash, bytes) = block(9);
    rotten.damage(hash.key());
    assert_eq!(ring.try_get(member, hash), Ok(bytes), "read at the damaged node itself");
    assert_eq!(ring.members[member].dht.stats().damaged_blocks, 1);
    ring.sim.run_for(Duration::from_secs(5));
    ring.assert_placed(0..30);
}

#[test]
fn a_put_of_a_wrong_hash_is_refused_at_the_first_node() {
    let ring = Ring::new(7, 3);
    let refused = ring.try_put(0, vec![(BlockHash::of(b"a"), Bytes::from_static(b"b"))]);
    assert!(matches!(refused, Err(atoll_dht::PutError::Invalid(_))), "{refused:?}");
}

/// Twice the number of copies a root claimed did not fit 32 bits.
#[test]
fn a_root_that_claims_four_billion_copies_breaks_nothing() {
    let mut ring = Ring::new(8, 3);
    ring.join_as(Arc::new(MemoryStore::new(ROOMY)), |honest| {
        faulty(honest, |_, request| reply_to(request, |put| stores_all(put, u32::MAX)))
    });
    ring.settle();
    ring.put(0, 0..50);
    ring.sim.run_for(MINUTE * 2);
    assert!(ring.members[0].dht.repair_status().rounds > 0);
}

/// Cuts every range a little shorter for ever, or lists blocks for ever that it will not send.
#[test]
fn a_replica_whose_answers_never_end_does_not_stop_repair() {
    let cut = |claim: &Claim| {
        let (after, upto) = (claim.range.after, claim.range.upto);
        let first = KeyRange::new(after, after.next());
        let rest = KeyRange::new(after.next(), upto);
        let summary = Summary { digest: [1; 32], count: 1 };
        match claim.summary.count {
            0 => Answer::Same,
            _ => {
                Answer::Parts(vec![Claim { range: first, summary }, Claim { range: rest, summary }])
            }
        }
    };
    let list = |claim: &Claim| {
        let upto = claim.range.after.next();
        Answer::Some { items: vec![Item { key: upto, version: 0 }], upto }
    };
    let answers: [fn(&Claim) -> Answer; 2] = [cut, list];
    for endless in answers {
        let mut ring = Ring::new(9, 2);
        ring.join_as(Arc::new(MemoryStore::new(ROOMY)), |honest| {
            faulty(honest, move |_, request| {
                reply_to(request, |asked: Reconcile| ReconcileReply {
                    answers: asked.claims.iter().map(endless).collect::<Vec<_>>().into(),
                })
            })
        });
        ring.settle();
        ring.put(0, 0..30);
        ring.sim.run_for(MINUTE * 20);
        ring.remove(1, (0..30).map(|n| block(n).0.key()).collect());
        ring.sim.run_for(MINUTE * 30);
        for n in (0..30).filter(|n| ring.holders(&block(*n).0.key()).contains(&0)) {
            let key = block(n).0.key();
            let mut set = ring.replica_set(&key);
            set.sort_by_key(|i| ring.node(*i).id.key().distance_from(&key));
            if set[0] != 2 {
                assert!(ring.holders(&key).contains(&1), "block {n} was not repaired");
            }
        }
    }
}

#[test]
fn a_root_does_not_pass_bad_blocks_on_and_is_not_blamed_for_them() {
    let ring = Ring::new(8, 3);
    let (hash, _) = block(1);
    let root = ring.root(&hash.key());
    let header = BlockHeader { key: hash.key(), kind: BlockKind::Content, lease_secs: 1000 };
    let put = Put {
        blocks: vec![header].into(),
        as_root: true,
        receipt: None,
        promises: Vec::new().into(),
    };
    let parts = vec![Bytes::from_static(b"something else")];
    ring.call(&ring.outsider(), root, &put, parts).expect("answered");
    for (i, member) in ring.members.iter().enumerate() {
        let marked: u64 = member.dht.stats().bad_blocks.values().sum();
        assert_eq!(marked, u64::from(i == root), "member {i}");
    }
}
