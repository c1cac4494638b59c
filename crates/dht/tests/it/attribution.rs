//! Copies come without a receipt: whom they are charged to, whichever node brings them and
//! whichever nodes vouch for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use atoll_dht::rpc::{AskHoldings, HeldCopy, HoldingsReply};
use atoll_key::{Key, PeerId};
use atoll_net::{Peer, Service};
use atoll_store::{MemoryStore, Owner};

use crate::faulty::{ALL, faulty, reply_to};
use crate::quotas::{
    CAPACITY, COPY_SHARE, LEN, kept, kept_for, key_name, now_secs, owner_of, owners, put_with,
    ring, send, used,
};
use crate::ring::{HOUR, ROOMY, Ring, block, sized_block};

/// Copies come without a receipt: a flood in their disguise is charged to the node that brings it.
#[test]
fn a_flood_disguised_as_repair_fills_no_more_than_its_carriers_share() {
    let ring = ring(9, 8);
    let liar = ring.members[2].host;
    let transport = ring.sim.transport(liar);
    for n in 0..300 {
        let blocks = [sized_block(50_000 + n, LEN)];
        for to in (0..8).filter(|to| *to != 2) {
            let request = put_with(None, &blocks, n % 2 == 0, 1000);
            let _ = send(&ring, &transport, to, request);
        }
    }
    let name = key_name(&ring.node(2).peer.id);
    let mut most = 0;
    for to in 0..8 {
        let (keys, _) = kept(&ring, to);
        let all: u64 = keys.values().sum();
        assert!(all <= COPY_SHARE * 3, "{to} keeps {all} of it: {keys:?}");
        assert_eq!(used(&keys, &name), 0, "nothing counts as published by it");
        let own = keys.iter().filter(|(name, _)| name.starts_with("carrier")).map(|(_, used)| used);
        let largest = own.max().copied().unwrap_or(0);
        assert!(largest <= COPY_SHARE, "{largest} of {COPY_SHARE}");
        most = most.max(largest);
    }
    assert!(most > COPY_SHARE / 2, "as a neighbour it may bring some: {most}");
    ring.put(3, 0..40);
    ring.assert_readable(0..40);
}

#[test]
fn copies_extend_no_lease() {
    let ring = ring(10, 5);
    ring.put(0, 0..10);
    let infos = |ring: &Ring| -> Vec<_> {
        let full = atoll_key::KeyRange::full();
        ring.members.iter().flat_map(|m| m.store.list(full, 100).expect("memory")).collect()
    };
    let before = infos(&ring);
    ring.sim.run_for(HOUR);
    let transport = ring.sim.transport(ring.members[2].host);
    for n in 0..10 {
        for to in 0..5 {
            let request = put_with(None, &[block(n)], false, 60 * 24 * 3600);
            if ring.holders(&block(n).0.key()).contains(&to) {
                send(&ring, &transport, to, request).expect("taken");
            }
        }
    }
    assert_eq!(infos(&ring), before);
}

#[test]
fn repair_keeps_whom_a_block_is_charged_to() {
    let mut ring = Ring::new(11, 7);
    ring.put(0, 0..60);
    let publisher = owner_of(&ring.node(0).peer);
    ring.crash(3);
    ring.join(Arc::new(MemoryStore::new(ROOMY)));
    ring.until_replicated();
    ring.crash(5);
    ring.join(Arc::new(MemoryStore::new(ROOMY)));
    ring.until_replicated();
    ring.assert_placed(0..60);
    for n in 0..60 {
        let owners = owners(&ring, &block(n).0.key());
        assert!(owners.iter().all(|owner| *owner == publisher), "block {n}: {owners:?}");
    }
}

/// Two of three copies are lost at once: no two nodes can vouch for the third, and still it is
/// brought back to three; when the publisher renews, it is the publisher's again.
#[test]
fn the_last_copy_of_a_block_is_repaired_and_charged_rightly_when_renewed() {
    let ring = Ring::new(12, 6);
    ring.put(0, 0..20);
    let publisher = owner_of(&ring.node(0).peer);
    for n in 0..20 {
        let key = block(n).0.key();
        for lost in &ring.holders(&key)[1..] {
            ring.remove(*lost, vec![key]);
        }
    }
    ring.members.iter().for_each(|member| member.dht.repair_now());
    ring.until_replicated();
    ring.assert_placed(0..20);
    let strange = |ring: &Ring| {
        let owners = (0..20).flat_map(|n| owners(ring, &block(n).0.key()));
        owners.filter(|owner| *owner != publisher).count()
    };
    assert!(strange(&ring) > 0, "some were vouched for by nobody");
    assert_eq!(ring.renew(0, (0..20).map(|n| block(n).0).collect()), Ok(Vec::new()));
    assert_eq!(strange(&ring), 0);
}

/// An attacker brought a victim's block with a lease of ninety days, and then the receipt by
/// which the victim had put it for one: the victim was charged for the ninety.
#[test]
fn nobody_is_charged_for_longer_than_he_has_signed_for() {
    let ring = ring(20, 5);
    let (victim, attacker) = (ring.node(0).peer, ring.outsider());
    let brought = block(1);
    let (key, blocks) = (brought.0.key(), std::slice::from_ref(&brought));
    let day = 24 * 3600;
    let replicas = ring.replica_set(&key);
    for to in &replicas {
        let copy = put_with(None, blocks, false, 90 * day);
        send(&ring, &attacker, *to, copy).expect("it is its carrier's");
    }
    // As the victim does: it is asked, and says that it made the receipt.
    ring.try_put(0, vec![brought.clone()]).expect("healthy");
    let now = now_secs(&ring);
    for to in replicas {
        let info = ring.info(to, &key).expect("held");
        let is_victims = info.owner == owner_of(&victim);
        assert!(!is_victims || info.expires_unix_secs <= now + 30 * day + 3600, "{info:?}");
    }
}

/// Says that it has whatever it is asked about, once it lies, and charges it to `owner`; to a new
/// publisher for each block if that is nobody.
fn false_witness(
    honest: Arc<dyn Service>,
    owner: Owner,
    lies: Arc<AtomicBool>,
) -> Arc<dyn Service> {
    let said = move |key: &Key| {
        let mut owner = owner;
        if owner == Owner::NOBODY {
            owner.publisher.copy_from_slice(&key.0[..16]);
            owner.ip.copy_from_slice(&key.0[16..32]);
            owner.ip[15] = 2;
        }
        let Owner { publisher, ip } = owner;
        Some(HeldCopy { publisher, ip, ..ALL })
    };
    faulty(honest, move |_, request| {
        let all = |asked: AskHoldings| HoldingsReply {
            held: asked.keys.iter().map(said).collect::<Vec<_>>().into(),
            spare_bytes: 0,
        };
        reply_to(request, all).filter(|_| lies.load(Ordering::Relaxed))
    })
}

/// A ring of seven and a false witness, to which an accomplice outside has brought 300 blocks
/// for each of the others.
fn ring_with_false_witness(seed: u64, owner: Owner) -> Ring {
    let mut ring = ring(seed, 7);
    let lies = Arc::new(AtomicBool::new(false));
    let shared = lies.clone();
    ring.join_as(Arc::new(MemoryStore::new(CAPACITY)), move |honest| {
        false_witness(honest, owner, shared.clone())
    });
    ring.settle();
    lies.store(true, Ordering::Relaxed);
    let accomplice = ring.outsider();
    let lies = Arc::new(AtomicBool::new(true));
    accomplice.serve(false_witness(Arc::new(crate::quotas::Agreeable), owner, lies));
    for n in 0..300 {
        let blocks = [sized_block(70_000 + n, LEN)];
        for to in 0..7 {
            let request = put_with(None, &blocks, n % 2 == 0, 1000);
            let _ = send(&ring, &accomplice, to, request);
        }
    }
    ring
}

/// One member, and a client of it with a key of its own, filled the nodes beside it in the
/// name of publishers that do not exist.
#[test]
fn one_false_witness_brings_no_more_in_than_its_carrier_may() {
    let ring = ring_with_false_witness(21, Owner::NOBODY);
    for to in 0..7 {
        let (keys, _) = kept(&ring, to);
        let all: u64 = keys.values().sum();
        assert!(all <= COPY_SHARE, "{to} keeps {all}: {} keys", keys.len());
        assert!(keys.keys().all(|name| name.starts_with("carrier")), "{keys:?}");
    }
    ring.put(3, 0..40);
    ring.assert_readable(0..40);
}

#[test]
fn one_false_witness_cannot_have_a_victim_charged() {
    let address = "10.9.9.9".parse().expect("an address");
    let victim = Peer { id: PeerId([77; 32]), addr: std::net::SocketAddr::new(address, 9) };
    let ring = ring_with_false_witness(22, owner_of(&victim));
    for (to, kept) in kept_for(&ring, &victim.id, address).into_iter().enumerate() {
        assert_eq!(kept, (0, 0), "{to}");
    }
}

/// A replica that is third after the root knows only the second of those before it.
#[test]
fn repair_keeps_the_publisher_with_six_copies_on_a_larger_ring() {
    let config = atoll_dht::DhtConfig { replicas: 6, ..crate::ring::prompt() };
    let sim = atoll_sim::SimConfig { seed: 23, ..Default::default() };
    let mut ring = Ring::with(sim, config, 20);
    ring.put(0, 0..100);
    let publisher = owner_of(&ring.node(0).peer);
    for victim in [3, 9, 14] {
        ring.crash(victim);
        ring.join(Arc::new(MemoryStore::new(ROOMY)));
        ring.until_replicated();
    }
    // Strays go with the next round of repair.
    ring.sim.run_for(std::time::Duration::from_secs(60));
    ring.assert_placed(0..100);
    for n in 0..100 {
        let owners = owners(&ring, &block(n).0.key());
        assert!(owners.iter().all(|owner| *owner == publisher), "block {n}: {owners:?}");
    }
}
