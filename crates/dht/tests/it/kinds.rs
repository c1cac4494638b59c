//! The block layer decides nothing by a block's kind: one that only `key::kinds` knows is
//! verified, replicated, replaced and repaired by the kind's own rules.

use std::time::Duration;

use atoll_dht::rpc::{self, PutStatus};
use atoll_key::kinds::counter::counter;
use atoll_key::{BlockKind, Key};
use atoll_net::Request;
use bytes::Bytes;

use crate::ring::Ring;

const MINUTE: Duration = Duration::from_secs(60);

const NAME: &[u8; 16] = b"a test's counter";

/// Puts bytes as a counter at the root of `key`.
fn put(ring: &Ring, key: Key, bytes: Vec<u8>) -> PutStatus {
    let kind = BlockKind::Counter;
    let header = rpc::BlockHeader { key, kind, lease_secs: 100_000 };
    let put = rpc::Put { blocks: vec![header].into(), as_root: true, receipt: None };
    let parts = vec![Bytes::from(bytes)];
    let request = Request { method: rpc::PUT, header: rpc::to_header(&put), parts };
    let root = ring.node(ring.root(&key)).peer;
    let call = ring.outsider().call(root, request, Duration::from_secs(30));
    let reply = ring.sim.block_on(MINUTE, call).expect("calls have deadlines").expect("answered");
    rpc::from_header::<rpc::PutReply>(&reply.header).expect("well-formed").statuses.0[0]
}

/// The counts at the members that hold the counter, which are its replica set.
fn counts(ring: &Ring, key: &Key) -> Vec<u64> {
    let (mut holders, mut set) = (ring.holders(key), ring.replica_set(key));
    holders.sort();
    set.sort();
    assert_eq!(holders, set);
    let held = holders.iter().map(|i| ring.members[*i].store.info(key).expect("memory"));
    held.map(|info| info.expect("held").version).collect()
}

#[test]
fn a_kind_that_no_module_knows_passes_through_the_block_layer() {
    let ring = Ring::new(31, 6);
    ring.settle();
    let (key, twenty) = counter(NAME, 20);
    let put_count = |count| put(&ring, key, counter(NAME, count).1);

    assert_eq!(put(&ring, key, counter(b"another counter.", 20).1), PutStatus::Invalid);
    assert!(matches!(put(&ring, key, twenty), PutStatus::Stored { .. }));
    ring.sim.run_for(MINUTE * 2);
    assert_eq!(counts(&ring, &key), [20, 20, 20]);

    assert_eq!(put_count(10), PutStatus::Superseded { held: 20 }, "lower");
    assert_eq!(put_count(25), PutStatus::Superseded { held: 20 }, "too little higher");
    assert!(matches!(put_count(30), PutStatus::Stored { .. }));
    ring.sim.run_for(MINUTE * 2);
    assert_eq!(counts(&ring, &key), [30, 30, 30]);

    ring.crash(ring.root(&key));
    ring.sim.run_for(MINUTE * 10);
    assert_eq!(counts(&ring, &key), [30, 30, 30], "repair has replaced the lost copy");
}
