//! What a node must not forget: how many others there were, and which versions it has seen.

use std::time::Duration;

use atoll_dht::{Blocks, DhtConfig, GetError, PutError};
use atoll_key::{Key, SecretKey, SignedBlock};

use crate::ring::{MINUTE, Ring, block};

fn signed(seed: u8, version: u64) -> SignedBlock {
    SignedBlock::sign(&SecretKey::from_seed(&[seed; 32]), b"", version, b"root")
}

fn impatient(seed: u64, count: usize) -> Ring {
    let limit = Duration::from_secs(10);
    let config = DhtConfig { put_limit: limit, get_limit: limit, ..DhtConfig::default() };
    Ring::configured(seed, config, count)
}

fn put_root(ring: &Ring, at: usize, root: SignedBlock) -> Result<(), PutError> {
    let put = ring.members[at].dht.put_signed(root);
    ring.sim.block_on(MINUTE * 5, put).expect("ends")
}

fn root_version(ring: &Ring, at: usize, key: Key) -> Result<u64, GetError> {
    let get = ring.members[at].dht.get_signed(key);
    ring.sim.block_on(MINUTE, get).expect("ends").map(|block| block.version)
}

/// The first node back after a power cut acknowledged writes alone, as if it had never been on
/// a ring.
#[test]
fn after_an_outage_of_all_nothing_is_acknowledged_before_a_majority_is_back() {
    for seed in 1..=3 {
        let mut ring = impatient(seed, 5);
        ring.put(0, 0..20);
        put_root(&ring, 0, signed(1, 1)).expect("healthy");
        (0..5).for_each(|member| ring.crash(member));
        ring.restart(0);
        // However long it stays alone.
        for _ in 0..3 {
            let alone = ring.try_put(0, vec![block(1000)]).expect_err("one of three");
            assert!(alone.to_string().contains("only 1 of 3 nodes"), "{alone}");
            assert!(put_root(&ring, 0, signed(1, 2)).is_err());
            let here = (0..20).map(block).find(|b| ring.holders(&b.0.key()).contains(&0));
            assert!(here.is_none_or(|b| ring.try_get(0, b.0).is_ok()), "reading goes on");
            ring.sim.run_for(MINUTE * 15);
        }
        ring.restart(1);
        ring.settle();
        ring.try_put(0, vec![block(1000)]).expect("two of three");
        put_root(&ring, 1, signed(1, 3)).expect("two of three");
    }
}

#[test]
fn the_word_of_the_operator_makes_the_nodes_that_are_there_the_ring() {
    let mut ring = impatient(4, 3);
    ring.put(0, 0..20);
    (0..3).for_each(|member| ring.crash(member));
    ring.restart(2);
    assert!(ring.try_put(2, vec![block(1000)]).is_err());
    let word = ring.members[2].dht.forget_absent();
    ring.sim.block_on(MINUTE, word).expect("ends").expect("saved");
    ring.try_put(2, vec![block(1000)]).expect("this is all there is");
    // It holds after a restart, and ends when there are others again.
    ring.crash(2);
    ring.restart(2);
    ring.try_put(2, vec![block(1001)]).expect("this is all there is");
    ring.restart(0);
    ring.settle();
    ring.crash(0);
    ring.sim.run_for(MINUTE);
    assert!(ring.try_put(2, vec![block(1002)]).is_err(), "there were two");
}

/// Three members in a row on the ring, none of them 0, and a volume whose root they hold.
fn volume_of_three(ring: &Ring) -> Option<(Vec<usize>, u8)> {
    let mut order: Vec<usize> = (0..ring.members.len()).collect();
    order.sort_by_key(|member| *ring.node(*member).id.key());
    let in_a_row = |at: usize| (0..3).map(|i| order[(at + i) % order.len()]).collect::<Vec<_>>();
    let three = (0..order.len()).map(in_a_row).find(|three| !three.contains(&0))?;
    let mut sorted = three.clone();
    sorted.sort_unstable();
    let seed = (1..=255u8).find(|seed| ring.replica_set(&signed(*seed, 1).key()) == sorted)?;
    Some((three, seed))
}

/// A replica set was cut off while the rest of the ring acknowledged an update. When it came
/// back, its old root was read again, by readers that had seen the new one.
#[test]
fn a_reader_that_has_seen_an_update_never_reads_the_older_version_again() {
    let mut looked_at = 0;
    for seed in 1..=6 {
        let ring = Ring::new(seed, 12);
        let Some((away, volume)) = volume_of_three(&ring) else { continue };
        looked_at += 1;
        let key = signed(volume, 1).key();
        put_root(&ring, 0, signed(volume, 1)).expect("healthy");
        let others: Vec<usize> = (0..12).filter(|member| !away.contains(member)).collect();
        let hosts = |members: &[usize]| -> Vec<_> {
            members.iter().map(|member| ring.members[*member].host).collect()
        };
        ring.sim.partition(&[&hosts(&away), &hosts(&others)]);
        ring.sim.run_for(MINUTE * 20);
        put_root(&ring, 0, signed(volume, 2)).expect("a majority of the present set");
        for reader in &others {
            assert_eq!(root_version(&ring, *reader, key), Ok(2), "seed {seed}");
        }
        ring.sim.heal();
        let healed = ring.sim.now();
        while ring.sim.now().since(healed) < MINUTE * 2 {
            for reader in &others {
                let read = root_version(&ring, *reader, key);
                assert_eq!(read, Ok(2), "seed {seed}, {:?}", ring.sim.now().since(healed));
            }
            ring.sim.run_for(Duration::from_millis(400));
        }
        // Those that came back have the update, and so have their readers.
        for reader in 0..12 {
            assert_eq!(root_version(&ring, reader, key), Ok(2), "seed {seed}");
        }
    }
    assert!(looked_at >= 2, "{looked_at} of 6 rings");
}

/// All nodes that have an update are lost for good, but one reader knows that there was one.
#[test]
fn an_older_version_is_read_only_on_the_word_of_the_operator() {
    let mut ring = impatient(7, 6);
    put_root(&ring, 0, signed(3, 5)).expect("healthy");
    let key = signed(3, 5).key();
    let reader = (0..6).find(|m| !ring.holders(&key).contains(m)).expect("six nodes, three copies");
    assert_eq!(root_version(&ring, reader, key), Ok(5));
    ring.sim.run_for(Duration::from_secs(2));
    // The ring as it was before the update.
    let old = signed(3, 4);
    for member in ring.holders(&key) {
        ring.remove(member, vec![key]);
    }
    let other = (1..6).find(|member| *member != reader).expect("six");
    put_root(&ring, other, old).expect("nobody knows of a newer one");
    ring.crash(reader);
    ring.restart(reader);
    ring.settle();
    let told = root_version(&ring, reader, key).expect_err("a rollback").to_string();
    assert!(told.contains("version 4") && told.contains("version 5"), "{told}");
    assert_eq!(root_version(&ring, other, key), Ok(4), "it has never seen another");
    let word = ring.members[reader].dht.forget_absent();
    ring.sim.block_on(MINUTE, word).expect("ends").expect("saved");
    assert_eq!(root_version(&ring, reader, key), Ok(4));
}
