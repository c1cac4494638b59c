//! CFS §5.5: "Publishers must periodically refresh their blocks if they wish CFS to
//! continue to store them."

use std::sync::Arc;
use std::sync::atomic::Ordering;

use atoll_dht::durable::DurableState;
use atoll_dht::rpc::{AskHoldings, Pointing};
use atoll_dht::{DhtConfig, Leased};
use atoll_key::{BlockKind, Key, KeyRange};
use atoll_net::header::WirePeer;
use atoll_store::{BlockInfo, BlockStore, MemoryStore, Owner, StoredBlock};
use bytes::Bytes;

use crate::flawed::Flawed;
use crate::ring::{HOUR, ROOMY, Ring, block, prompt};

fn short_leases() -> DhtConfig {
    DhtConfig { lease: 10 * HOUR, expire_every: HOUR / 4, expire_grace: HOUR, ..prompt() }
}

fn ring(seed: u64) -> Ring {
    Ring::configured(seed, short_leases(), 4)
}

fn renew(ring: &Ring, numbers: std::ops::Range<u32>) {
    assert_eq!(ring.renew(0, numbers.map(|n| block(n).0).collect()), Ok(Vec::new()));
}

#[test]
fn blocks_that_are_renewed_stay_and_others_go() {
    let ring = ring(1);
    ring.put(0, 0..20);
    for _ in 0..4 {
        ring.sim.run_for(6 * HOUR);
        renew(&ring, 0..10);
    }
    ring.assert_readable(0..10);
    for n in 10..20 {
        assert!(ring.holders(&block(n).0.key()).is_empty(), "block {n} outlived its lease");
    }
    let dropped: u64 = ring.members.iter().map(|m| m.dht.stats().expired_blocks).sum();
    assert_eq!(dropped, 30, "ten blocks on three nodes");
}

/// CFS §3.1: "blocks are stored for an agreed-upon finite interval": a publisher can choose it.
#[test]
fn blocks_are_kept_for_as_long_as_their_publisher_chose() {
    let ring = ring(8);
    ring.put(0, 0..10);
    let chosen = |hours: u32| Leased::over(ring.members[0].dht.clone(), Some(HOUR * hours));
    let put = chosen(30).put((10..20).map(block).collect());
    ring.sim.block_on(HOUR, put).expect("ends").expect("stored");
    let renewed = chosen(40).renew((0..5).map(|n| block(n).0).collect());
    assert_eq!(ring.sim.block_on(HOUR, renewed).expect("ends"), Ok(Vec::new()));
    // No lease is shortened.
    let renewed = chosen(1).renew((10..20).map(|n| block(n).0).collect());
    assert_eq!(ring.sim.block_on(HOUR, renewed).expect("ends"), Ok(Vec::new()));
    let there = || -> Vec<u32> {
        (0..20).filter(|n| !ring.holders(&block(*n).0.key()).is_empty()).collect()
    };
    ring.sim.run_for(12 * HOUR);
    assert_eq!(there(), Vec::from_iter((0..5).chain(10..20)));
    ring.sim.run_for(20 * HOUR);
    assert_eq!(there(), Vec::from_iter(0..5));
    ring.sim.run_for(10 * HOUR);
    assert_eq!(there(), []);
}

/// Any peer may ask whether blocks are held, and asking set the end of an ended lease to that
/// moment: a peer that asked once a day kept them for ever, at their publisher's expense.
#[test]
fn asking_whether_blocks_are_held_keeps_them_no_longer() {
    let ring = ring(6);
    ring.put(0, 0..20);
    let keys: Vec<Key> = (0..20).map(|n| block(n).0.key()).collect();
    let asker = ring.outsider();
    let ask = |to: usize| {
        let asked = AskHoldings { keys: keys.clone(), pointing: Pointing::No };
        let reply = ring.call(&asker, to, &asked, Vec::new()).expect("answered");
        reply.held.0.iter().flatten().count()
    };
    assert_eq!((0..4).map(ask).sum::<usize>(), 60, "20 blocks on three nodes");
    for _ in 0..28 {
        ring.sim.run_for(HOUR / 2);
        (0..4).for_each(|to| assert!(ask(to) <= 20));
    }
    assert!(keys.iter().all(|key| ring.holders(key).is_empty()), "they outlived their leases");
}

#[test]
fn repair_gives_a_copy_the_lease_that_is_left_and_no_more() {
    let mut ring = ring(2);
    ring.put(0, 0..20);
    ring.sim.run_for(6 * HOUR);
    ring.crash(1);
    ring.join(Arc::new(MemoryStore::new(ROOMY)));
    ring.until_replicated();
    ring.sim.run_for(6 * HOUR);
    let held: usize = (0..20).map(|n| ring.holders(&block(n).0.key()).len()).sum();
    assert_eq!(held, 0, "copies made by repair must not outlive the originals");
}

#[test]
fn clocks_an_hour_apart_lose_nothing_before_its_lease_ends() {
    let mut ring = Ring::configured(3, short_leases(), 0);
    for skew_hours in [-1, 0, 1, 0] {
        ring.join_skewed(skew_hours * 3_600_000);
    }
    ring.settle();
    ring.put(0, 0..20);
    ring.sim.run_for(9 * HOUR);
    ring.assert_placed(0..20);
}

/// Whoever's clocks are an hour ahead or behind: what is renewed stays, what is not goes,
/// though not at once.
#[test]
fn clocks_off_by_an_hour_lose_nothing_that_is_renewed() {
    for (subset, skew_hours) in [(0b0001u32, 1), (0b1010, -1), (0b0110, 1), (0b1011, -1)] {
        let config = DhtConfig {
            lease: HOUR,
            expire_every: HOUR / 6,
            expire_grace: HOUR,
            repair_every: HOUR / 6,
            ..DhtConfig::default()
        };
        let mut ring = Ring::configured(u64::from(subset), config, 0);
        for member in 0..4 {
            let wrong = subset >> member & 1 == 1;
            ring.join_skewed(if wrong { skew_hours * 3_600_000 } else { 0 });
        }
        ring.settle();
        ring.put(1, 0..12);
        ring.sim.run_for(HOUR * 3 / 4);
        renew(&ring, 0..6);
        ring.sim.run_for(HOUR * 3 / 4);
        let late = (6..12).filter(|n| !ring.holders(&block(*n).0.key()).is_empty()).count();
        assert_eq!(late, 6, "dropped before the grace period was over, subset {subset:04b}");
        renew(&ring, 0..6);
        ring.sim.run_for(HOUR * 3 / 4);
        ring.assert_placed(0..6);
        ring.assert_readable(0..2);
        for n in 6..12 {
            let holders = ring.holders(&block(n).0.key());
            assert!(holders.is_empty(), "block {n} is still at {holders:?}, subset {subset:04b}");
        }
    }
}

/// A node that starts with its clock a year ahead takes all that it holds for expired. It
/// drops nothing at once; until it may, repair has told it the leases that are left.
#[test]
fn a_clock_that_is_a_year_ahead_at_boot_costs_no_block() {
    let mut ring = Ring::configured(5, short_leases(), 3);
    ring.put(0, 0..20);
    let store = Arc::new(MemoryStore::new(ROOMY));
    for n in 0..20 {
        let get = ring.members[0].store.get(&block(n).0.key());
        let held = ring.sim.block_on(HOUR, get).expect("ends").expect("memory").expect("held");
        ring.sim.block_on(HOUR, store.put(vec![held])).expect("ends").expect("memory");
    }
    ring.join_skewed_with(store, 365 * 24 * 3_600_000);
    ring.sim.run_for(HOUR / 10);
    let expired = ring.members[3].dht.stats().expired_blocks;
    assert_eq!(expired, 0, "nothing is dropped at boot");
    ring.sim.run_for(2 * HOUR);
    ring.until_replicated();
    ring.assert_placed(0..20);
    ring.assert_readable(0..20);
    ring.sim.run_for(9 * HOUR + HOUR / 2);
    let held: usize = (0..20).map(|n| ring.holders(&block(n).0.key()).len()).sum();
    assert_eq!(held, 0, "and no copy outlives its lease");
}

/// A store that had to rebuild its index has forgotten renewals: blocks whose first lease
/// is long over must not be dropped before their publishers can renew them.
#[test]
fn a_node_that_forgot_renewals_grants_a_new_lease_to_all_it_holds() {
    let ring = ring(4);
    ring.put(0, 0..20);
    ring.sim.run_for(9 * HOUR);
    for member in &ring.members {
        let held = member.store.usage().blocks;
        let extended = ring.sim.block_on(HOUR, member.dht.extend_leases()).expect("ends");
        assert_eq!(extended, Ok(held));
    }
    ring.sim.run_for(9 * HOUR);
    ring.assert_placed(0..20);
}

/// The record of a node's lease clock was damaged. A new record was saved before the leases had been
/// extended; after a crash within seconds the next start found nothing to extend. Pointers to
/// diverted copies were never extended.
#[test]
fn leases_are_extended_before_a_new_clock_is_remembered() {
    let mut ring = ring(7);
    let store = Arc::new(Flawed::new(ROOMY));
    let member = ring.join(store.clone());
    ring.settle();
    ring.put(0, 0..40);
    ring.sim.run_for(8 * HOUR);
    ring.crash(member);
    let durable = ring.members[member].durable.clone();
    let pointers = durable.pointers();
    let lost = durable.save("lease-clock", vec![]);
    ring.sim.block_on(HOUR, lost).expect("ends").expect("memory");
    store.refuses_renewals.store(true, Ordering::Relaxed);
    ring.restart(member);
    ring.sim.run_for(HOUR / 60);
    ring.crash(member);
    store.refuses_renewals.store(false, Ordering::Relaxed);
    let now = ring.sim.env(ring.members[0].host).unix_ms() / 1000;
    let bytes = Bytes::from(WirePeer(ring.node(0).peer).to_bytes());
    let info = BlockInfo {
        key: block(1000).0.key(),
        kind: BlockKind::Content,
        version: 0,
        expires_unix_secs: now + 60,
        len_bytes: u32::try_from(bytes.len()).expect("short"),
        owner: Owner::NOBODY,
    };
    let pointed = pointers.put(vec![StoredBlock { info, bytes }]);
    ring.sim.block_on(HOUR, pointed).expect("ends").expect("memory");
    ring.restart(member);
    ring.sim.run_for(HOUR / 1800);
    let all = KeyRange::new(Key::MAX, Key::MAX);
    let held = store.list(all, 1000).expect("memory");
    let records = pointers.list(all, 1000).expect("memory");
    assert!(held.len() > 10 && records.len() == 1, "{} and {}", held.len(), records.len());
    for info in held.iter().chain(&records) {
        let left_secs = info.expires_unix_secs - now;
        assert!(left_secs > 9 * HOUR.as_secs(), "{}: {left_secs} s left", info.key);
    }
}
