//! The block layer decides nothing by a block's kind: one that only `key::kinds` knows is
//! verified, replicated, replaced and repaired by the kind's own rules.

use atoll_dht::{Blocks, GetError, LeaseRenewal, NewBlock, PutError, Renewed, Wanted};
use atoll_key::kinds::counter::counter;
use atoll_key::{BlockId, BlockKind, InvalidBlock, Key};
use bytes::Bytes;

use crate::ring::{MINUTE, Ring};

const NAME: &[u8; 16] = b"a test's counter";

fn new_block(key: Key, bytes: Vec<u8>) -> NewBlock {
    let id = BlockId { kind: BlockKind::Counter, key };
    NewBlock { id, bytes: Bytes::from(bytes), lease_secs: Some(100_000) }
}

fn put(ring: &Ring, block: NewBlock) -> Result<(), PutError> {
    let put = ring.members[0].dht.put_blocks(vec![block]);
    ring.sim.block_on(MINUTE * 5, put).expect("puts have deadlines").remove(0)
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
    let put_count = |count| put(&ring, new_block(key, counter(NAME, count).1));

    let other = new_block(key, counter(b"another counter.", 20).1);
    assert_eq!(put(&ring, other), Err(PutError::Invalid(InvalidBlock::WrongHash)));
    assert_eq!(put(&ring, new_block(key, twenty)), Ok(()));
    ring.sim.run_for(MINUTE * 2);
    assert_eq!(counts(&ring, &key), [20, 20, 20]);

    let superseded = |offered| Err(PutError::Superseded { offered, held: 20 });
    assert_eq!(put_count(10), superseded(10), "lower");
    assert_eq!(put_count(25), superseded(25), "too little higher");
    assert_eq!(put_count(30), Ok(()));
    ring.sim.run_for(MINUTE * 2);
    assert_eq!(counts(&ring, &key), [30, 30, 30]);

    ring.crash(ring.root(&key));
    ring.sim.run_for(MINUTE * 10);
    assert_eq!(counts(&ring, &key), [30, 30, 30], "repair has replaced the lost copy");

    let (id, reader) = (new_block(key, Vec::new()).id, &ring.up().last().expect("some").dht);
    let get = |wanted| ring.sim.block_on(MINUTE * 5, reader.get_block(id, wanted)).expect("ends");
    assert_eq!(get(Wanted::Newest).expect("held").version, 30);
    let lease_secs = Some(200_000);
    let renewal = LeaseRenewal { ids: vec![id], lease_secs, will_be_put: false };
    let renewed = ring.sim.block_on(MINUTE * 5, reader.renew_blocks(renewal)).expect("ends");
    assert_eq!(renewed, [Ok(Renewed::Held)]);
    assert_eq!(put_count(u64::MAX), Ok(()));
    let removed = get(Wanted::Newest).expect_err("removed");
    assert!(matches!(removed, GetError::Removed { version: u64::MAX, .. }), "{removed}");
}
