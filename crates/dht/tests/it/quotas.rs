//! CFS §5.4: "The most damaging technical form of abuse that CFS is likely to encounter is
//! malicious injection of large quantities of data."

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::receipt::{BAD_RECEIPT, Receipt};
use atoll_dht::rpc::{self, BlockHeader, Name, PutReply, PutStatus, Renew};
use atoll_dht::{Blocks, DhtConfig, PutError, QuotaConfig, Share, SimulatedKeys};
use atoll_env::BoxFuture;
use atoll_key::{BlockHash, BlockKind, Key, PeerId};
use atoll_net::{CallError, PROBE, Peer, Refusal, Reply, Request, Service, Transport};
use atoll_sim::{Connections, SimConfig, TcpModel};
use atoll_store::{MemoryStore, Owner};
use bytes::Bytes;

use crate::faulty::faulty;
use crate::flawed::Flawed;
use crate::ring::{HOUR, MINUTE, Ring, block, sized_block};

/// Small stores, of which a publisher may use 4 % and a carrier of copies 8 %.
pub(crate) const CAPACITY: u64 = 4 << 20;
pub(crate) const SHARE: u64 = CAPACITY / 25;
pub(crate) const COPY_SHARE: u64 = SHARE * 2;
pub(crate) const LEN: usize = 4000;

pub(crate) fn tight() -> DhtConfig {
    let share = Share::from_millionths(40_000);
    let quota = QuotaConfig {
        key_share: Some(share),
        address_share: Some(share),
        copy_share: Share::from_millionths(80_000),
        ..QuotaConfig::default()
    };
    DhtConfig { quota, put_limit: MINUTE / 6, ..DhtConfig::default() }
}

pub(crate) fn ring(seed: u64, count: usize) -> Ring {
    let mut ring = Ring::configured(seed, tight(), 0);
    for _ in 0..count {
        ring.join(Arc::new(MemoryStore::new(CAPACITY)));
    }
    ring.settle();
    ring
}

/// What a node keeps: by publishers' keys, and by addresses, with what keeping costs.
pub(crate) fn kept(ring: &Ring, member: usize) -> (BTreeMap<String, u64>, BTreeMap<String, u64>) {
    let report = ring.members[member].dht.quota_report(1000);
    let list = |accounts: Vec<atoll_dht::quota::Account>| {
        let name = |of: &atoll_dht::quota::Account| {
            let carrier = if of.is_carrier { "carrier " } else { "" };
            (format!("{carrier}{}", of.who), of.used_bytes)
        };
        accounts.iter().map(name).collect()
    };
    (list(report.keys), list(report.addresses))
}

pub(crate) fn key_name(id: &PeerId) -> String {
    id.0[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn used(list: &BTreeMap<String, u64>, name: &str) -> u64 {
    list.get(name).copied().unwrap_or(0)
}

/// Bytes kept at each member for one key, and for one address.
pub(crate) fn kept_for(ring: &Ring, id: &PeerId, ip: IpAddr) -> Vec<(u64, u64)> {
    let of = |member| {
        let (keys, addresses) = kept(ring, member);
        (used(&keys, &key_name(id)), used(&addresses, &ip.to_string()))
    };
    (0..ring.members.len()).map(of).collect()
}

pub(crate) fn owners(ring: &Ring, key: &Key) -> Vec<Owner> {
    let info = |member: &crate::ring::Member| member.store.info(key).expect("memory");
    ring.up().filter_map(info).map(|info| info.owner).collect()
}

pub(crate) fn owner_of(peer: &Peer) -> Owner {
    let IpAddr::V4(ip) = peer.addr.ip() else { panic!("the simulator has IPv4") };
    let publisher = peer.id.0[..16].try_into().expect("16 of 32 bytes");
    Owner { publisher, ip: ip.to_ipv6_mapped().octets() }
}

pub(crate) fn now_secs(ring: &Ring) -> u64 {
    ring.sim.env(ring.members[0].host).unix_ms() / 1000
}

/// A put of `blocks` as `publisher` with the receipt that it would sign for `keys`.
pub(crate) fn put_of(
    publisher: Peer,
    issued_unix_secs: u64,
    keys: &[Key],
    blocks: &[(BlockHash, Bytes)],
    as_root: bool,
) -> Request {
    let lease_secs = 30 * 24 * 3600;
    let signer = SimulatedKeys(publisher.id);
    let keys = keys.iter().copied();
    let receipt = Receipt::sign(&signer, publisher, issued_unix_secs, lease_secs, keys);
    put_with(Some(receipt), blocks, as_root, lease_secs)
}

pub(crate) fn put_with(
    receipt: Option<Receipt>,
    blocks: &[(BlockHash, Bytes)],
    as_root: bool,
    lease_secs: u64,
) -> Request {
    let header = |(hash, _): &(BlockHash, Bytes)| BlockHeader {
        key: hash.key(),
        kind: BlockKind::Content,
        lease_secs,
    };
    let headers: Vec<BlockHeader> = blocks.iter().map(header).collect();
    let keys = headers.iter().map(|header| header.key);
    let receipt = receipt.map(|receipt| receipt.to_wire(keys));
    let put = rpc::Put { blocks: headers.into(), as_root, receipt, promises: Vec::new().into() };
    let parts = blocks.iter().map(|(_, bytes)| bytes.clone()).collect();
    Request { method: rpc::PUT, header: rpc::to_header(&put), parts }
}

pub(crate) fn send(
    ring: &Ring,
    from: &Arc<dyn Transport>,
    to: usize,
    request: Request,
) -> Result<Vec<PutStatus>, CallError> {
    let call = from.call(ring.node(to).peer, request, Duration::from_secs(30));
    let reply = ring.sim.block_on(MINUTE, call).expect("calls have deadlines")?;
    let reply: PutReply = rpc::from_header(&reply.header).expect("well-formed");
    Ok(reply.statuses.0)
}

fn assert_refused(answer: Result<Vec<PutStatus>, CallError>, what: &str) {
    match answer {
        Err(CallError::Refused(refusal)) => assert_eq!(refusal.code, BAD_RECEIPT, "{refusal}"),
        other => panic!("{what}: {other:?}"),
    }
}

/// An attacker with as many keys and addresses as it likes: all calls to them come here, and
/// it confirms whatever it is asked.
#[derive(Default)]
struct Homes(Mutex<BTreeMap<Peer, Peer>>);

struct Redirecting {
    inner: Arc<dyn Transport>,
    homes: Arc<Homes>,
}

impl Transport for Redirecting {
    fn local(&self) -> Peer {
        self.inner.local()
    }

    fn call(
        &self,
        to: Peer,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        let home = self.homes.0.lock().expect("not poisoned").get(&to).copied();
        self.inner.call(home.unwrap_or(to), request, limit)
    }

    fn round_trip(&self, peer: &PeerId) -> Option<Duration> {
        self.inner.round_trip(peer)
    }

    fn serve(&self, service: Arc<dyn Service>) {
        self.inner.serve(service);
    }
}

pub(crate) struct Agreeable;

impl Service for Agreeable {
    fn handle(&self, _: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let asked = rpc::from_header::<rpc::Confirm>(&request.header);
        Box::pin(async move {
            let reply = rpc::ConfirmReply { nonce: asked?.nonce, is_mine: true };
            Ok(Reply { header: rpc::to_header(&reply), parts: Vec::new() })
        })
    }
}

/// A ring, and an attacker outside it with the given keys and addresses.
pub(crate) fn ring_and_flooder(
    seed: u64,
    count: usize,
    faces: impl Iterator<Item = Peer>,
) -> (Ring, Arc<dyn Transport>) {
    let homes = Arc::new(Homes::default());
    let mut ring = Ring::configured(seed, tight(), 0);
    let via = homes.clone();
    ring.via = Box::new(move |inner| Arc::new(Redirecting { inner, homes: via.clone() }));
    for _ in 0..count {
        ring.join(Arc::new(MemoryStore::new(CAPACITY)));
    }
    ring.settle();
    let flooder = ring.outsider();
    flooder.serve(Arc::new(Agreeable));
    let home = flooder.local();
    homes.0.lock().expect("not poisoned").extend(faces.map(|face| (face, home)));
    (ring, flooder)
}

/// Offers each of 800 blocks to its root, as one of `faces` in turn; blocks stored.
fn flood(ring: &Ring, flooder: &Arc<dyn Transport>, faces: &[Peer]) -> usize {
    let mut stored = 0;
    for n in 0..800u32 {
        let block = sized_block(1_000_000 + n, LEN);
        let key = block.0.key();
        let root = ring.root(&key);
        let face = faces[n as usize % faces.len()];
        let request = put_of(face, now_secs(ring), &[key], std::slice::from_ref(&block), true);
        match send(ring, flooder, root, request).expect("answered")[0] {
            PutStatus::Stored { .. } => stored += 1,
            PutStatus::OverQuota { used_bytes, allowed_bytes, .. } => {
                assert!(used_bytes <= SHARE && allowed_bytes <= SHARE);
            }
            other => panic!("{other:?}"),
        }
    }
    stored
}

pub(crate) fn face(key: u8, address: u8) -> Peer {
    let mut id = [key; 32];
    id[0] = 1;
    Peer { id: PeerId(id), addr: format!("172.16.0.{address}:9").parse().expect("an address") }
}

/// Floods a ring as `faces`; `kept` says what of what is kept for them must be within a share.
fn assert_flood_is_bounded(seed: u64, faces: &[Peer], kept: impl Fn((u64, u64)) -> u64) {
    let (ring, flooder) = ring_and_flooder(seed, 8, faces.iter().copied());
    let stored = flood(&ring, &flooder, faces);
    assert!(stored > 40, "only {stored} were taken");
    ring.until_replicated();
    for of_flooder in kept_for(&ring, &faces[0].id, faces[0].addr.ip()).into_iter().map(kept) {
        assert!(of_flooder <= SHARE, "{of_flooder} of {SHARE}");
    }
    // An honest publisher beside it.
    ring.put(3, 0..40);
    ring.assert_readable(0..40);
}

#[test]
fn a_flood_from_one_address_under_many_keys_fills_no_more_than_its_share() {
    let faces: Vec<Peer> = (0..20).map(|key| face(key, 1)).collect();
    assert_flood_is_bounded(1, &faces, |(_, address)| address);
}

#[test]
fn a_flood_under_one_key_from_many_addresses_fills_no_more_than_its_share() {
    let faces: Vec<Peer> = (0..20).map(|address| face(1, address)).collect();
    assert_flood_is_bounded(2, &faces, |(key, _)| key);
}

/// The store had the batch in its queue when its room was given back: a publisher that put and
/// gave up, again and again, filled what it liked.
#[test]
fn puts_that_are_given_up_count_until_the_store_has_them() {
    let faces = [face(1, 1)];
    let (mut ring, flooder) = ring_and_flooder(18, 1, faces.into_iter());
    let env = ring.sim.env(ring.members[0].host);
    let slow = ring.join(Arc::new(Flawed::slow(CAPACITY, env, MINUTE)));
    ring.settle();
    for n in 0..100 {
        let block = sized_block(n, LEN);
        let request = put_of(faces[0], now_secs(&ring), &[block.0.key()], &[block], false);
        let call = flooder.call(ring.node(slow).peer, request, Duration::from_millis(500));
        let _ = ring.sim.block_on(MINUTE, call).expect("calls have deadlines");
    }
    ring.sim.run_for(MINUTE * 2);
    let (key, ip) = kept_for(&ring, &faces[0].id, faces[0].addr.ip())[slow];
    assert!(key == ip && key > SHARE / 2 && key <= SHARE, "{key} of {SHARE}");
}

#[test]
fn a_publisher_over_quota_is_told_what_it_uses_and_others_are_not_touched() {
    let ring = ring(3, 5);
    let mut refused = None;
    for n in 0..400 {
        if let Err(error) = ring.try_put(0, vec![sized_block(n, LEN)]) {
            refused = Some(error);
        }
    }
    let Some(PutError::OverQuota { used_bytes, allowed_bytes, who }) = refused else {
        panic!("{refused:?}")
    };
    assert!(used_bytes > SHARE * 6 / 10 && allowed_bytes <= SHARE * 3 / 4, "{used_bytes}");
    assert!(who.contains("this node's key"), "{who}");
    let me = ring.node(0).peer;
    for (key, ip) in kept_for(&ring, &me.id, me.addr.ip()) {
        assert!(key <= SHARE && ip == key, "{key} {ip}");
    }
    ring.put(1, 10_000..10_100);
    // More is allowed at run time, and at once.
    for member in &ring.members {
        member.dht.set_quota(QuotaConfig::default());
    }
    ring.put(0, 20_000..20_100);
}

#[test]
fn a_publisher_over_quota_can_still_update_its_root() {
    let ring = ring(4, 5);
    for n in 0..400 {
        let _ = ring.try_put(0, vec![sized_block(n, LEN)]);
    }
    assert!(matches!(
        ring.try_put(0, vec![sized_block(900, LEN)]),
        Err(PutError::OverQuota { .. })
    ));
    let secret = atoll_key::SecretKey::from_seed(&[9; 32]);
    for version in 1..20 {
        let root = atoll_key::SignedBlock::sign(&secret, b"", version, &[7; 600]);
        let put = ring.members[0].dht.put_signed(root);
        assert_eq!(ring.sim.block_on(MINUTE, put).expect("ends"), Ok(()), "version {version}");
    }
}

#[test]
fn what_is_forged_old_or_for_other_blocks_is_no_receipt() {
    let ring = ring(5, 5);
    let from = ring.outsider();
    let victim = ring.node(1).peer;
    let (mine, other) = (block(1), block(2));
    let blocks = std::slice::from_ref(&mine);
    let keys = [mine.0.key()];
    let now = now_secs(&ring);
    for as_root in [true, false] {
        for to in 0..5 {
            let somebody_else = Peer { id: PeerId([3; 32]), ..victim };
            let forged = Receipt::sign(
                &SimulatedKeys(somebody_else.id),
                victim,
                now,
                1000,
                keys.iter().copied(),
            );
            let forged = put_with(Some(forged), blocks, as_root, 1000);
            assert_refused(send(&ring, &from, to, forged), "forged");
            let for_others = put_of(victim, now, &[other.0.key()], blocks, as_root);
            assert_refused(send(&ring, &from, to, for_others), "for other blocks");
            for issued in [now - 25 * 3600, now + 25 * 3600] {
                let old = put_of(victim, issued, &keys, blocks, as_root);
                assert_refused(send(&ring, &from, to, old), "too old");
            }
        }
    }
    assert!(ring.holders(&mine.0.key()).is_empty());
    assert!(kept_for(&ring, &victim.id, victim.addr.ip()).iter().all(|kept| *kept == (0, 0)));
}

/// CFS §5.4: "this limit is not easy to subvert by simple forging of IP addresses".
#[test]
fn an_address_is_charged_only_if_the_publishers_key_answers_there() {
    let ring = ring(6, 5);
    let from = ring.outsider();
    let mine = block(1);
    let (blocks, keys, now) = (std::slice::from_ref(&mine), [mine.0.key()], now_secs(&ring));
    let nobody = "10.250.0.1:1".parse().expect("an address");
    for addr in [ring.node(1).peer.addr, nobody] {
        let claimed = Peer { addr, ..from.local() };
        for to in 0..5 {
            let put = put_of(claimed, now, &keys, blocks, false);
            assert_refused(send(&ring, &from, to, put), "somebody else's address");
        }
    }
    // Signed by the victim's key and shown by a node that recorded it, or can forge it:
    // the victim does not know it.
    let put = put_of(ring.node(1).peer, now, &keys, blocks, false);
    assert_refused(send(&ring, &from, 2, put.clone()), "not made by its publisher");
    assert_refused(send(&ring, &from, 1, put), "not made by this node");
    // Which does not lock the victim out.
    ring.put(1, 100..140);
    assert!(ring.holders(&mine.0.key()).is_empty());
}

/// A ring of five that holds 40 blocks of the first, and the puts that the last has seen of
/// them.
fn ring_and_recorded(seed: u64) -> (Ring, Vec<Request>) {
    let mut ring = ring(seed, 4);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let record = seen.clone();
    ring.join_as(Arc::new(MemoryStore::new(CAPACITY)), move |honest| {
        let seen = record.clone();
        faulty(honest, move |_, request| {
            if request.method == rpc::PUT {
                seen.lock().expect("not poisoned").push(request.clone());
            }
            None
        })
    });
    ring.settle();
    ring.put(0, 0..40);
    let recorded = seen.lock().expect("not poisoned").clone();
    assert!(!recorded.is_empty());
    (ring, recorded)
}

#[test]
fn a_replayed_receipt_keeps_no_block_alive_and_charges_nobody_else() {
    let (ring, recorded) = ring_and_recorded(7);
    let lease = |ring: &Ring, key: &Key| {
        ring.info(ring.holders(key)[0], key).expect("held").expires_unix_secs
    };
    let key_of = |request: &Request| {
        let put: rpc::Put = rpc::from_header(&request.header).expect("well-formed");
        assert!(put.receipt.is_some(), "the publisher's receipt goes to every replica");
        put.blocks.0[0].key
    };
    let before: Vec<u64> = recorded.iter().map(|request| lease(&ring, &key_of(request))).collect();
    let from = ring.outsider();
    for hours in [0, 20, 6] {
        ring.sim.run_for(HOUR * hours);
        for request in &recorded {
            for to in ring.holders(&key_of(request)) {
                // It is taken as another put of the same publisher's, or not at all.
                let _ = send(&ring, &from, to, request.clone());
            }
        }
    }
    for (request, before) in recorded.iter().zip(before) {
        let key = key_of(request);
        assert!(lease(&ring, &key) <= before + 3600, "an hour is what clocks may differ by");
        let publisher = owner_of(&ring.node(0).peer);
        assert!(owners(&ring, &key).iter().all(|owner| *owner == publisher));
    }
}

/// A root that sends its own blocks on in the name of a node that has published others.
#[test]
fn a_lying_root_cannot_charge_somebody_else() {
    let (ring, recorded) = ring_and_recorded(8);
    let before = kept_for(&ring, &ring.node(0).peer.id, ring.node(0).peer.addr.ip());
    let liar = ring.sim.transport(ring.members[4].host);
    let junk = block(777_777);
    for recorded in &recorded {
        let put: rpc::Put = rpc::from_header(&recorded.header).expect("well-formed");
        let headers =
            vec![BlockHeader { key: junk.0.key(), kind: BlockKind::Content, lease_secs: 1000 }];
        let put = rpc::Put { blocks: headers.into(), as_root: false, ..put };
        let request =
            Request { method: rpc::PUT, header: rpc::to_header(&put), parts: vec![junk.1.clone()] };
        for to in 0..4 {
            assert_refused(send(&ring, &liar, to, request.clone()), "for other blocks");
        }
    }
    assert_eq!(kept_for(&ring, &ring.node(0).peer.id, ring.node(0).peer.addr.ip()), before);
    assert!(ring.holders(&junk.0.key()).is_empty());
}

#[test]
fn whoever_renews_a_block_is_charged_for_it_and_needs_a_receipt() {
    let ring = ring(13, 5);
    ring.put(0, 0..10);
    ring.sim.run_for(HOUR * 2);
    let hashes: Vec<BlockHash> = (0..10).map(|n| block(n).0).collect();
    assert_eq!(ring.renew(1, hashes.clone()), Ok(Vec::new()));
    let other = owner_of(&ring.node(1).peer);
    for hash in &hashes {
        assert_eq!(owners(&ring, &hash.key()), vec![other; 3]);
    }
    let keys: Vec<Key> = hashes.iter().map(BlockHash::key).collect();
    for lease_secs in [0, 1000] {
        let names = keys.iter().map(Name::of).collect();
        let renew = Renew { names, lease_secs, as_root: false, receipt: None, will_be_put: None };
        let answer = ring.call(&ring.outsider(), 2, &renew, Vec::new());
        let refused = answer.expect_err("no receipt");
        assert!(matches!(&refused, CallError::Refused(r) if r.code == BAD_RECEIPT), "{refused}");
    }
}

#[test]
fn renewing_what_is_somebody_elses_needs_room() {
    let ring = ring(14, 4);
    for n in 0..400 {
        let _ = ring.try_put(0, vec![sized_block(n, LEN)]);
    }
    ring.put(1, 5_000..5_010);
    ring.sim.run_for(HOUR * 2);
    let own: Vec<BlockHash> = (0..20).map(|n| sized_block(n, LEN).0).collect();
    assert_eq!(ring.renew(0, own), Ok(Vec::new()), "its own");
    let others: Vec<BlockHash> = (0..18)
        .map(|n| sized_block(9_000 + n, LEN))
        .map(|(hash, bytes)| {
            ring.try_put(1, vec![(hash, bytes)]).expect("room");
            hash
        })
        .collect();
    ring.sim.run_for(HOUR * 2);
    let renewed = ring.renew(0, others);
    assert!(matches!(renewed, Err(PutError::OverQuota { .. })), "{renewed:?}");
}

/// Blocks that a member has no copy of: it puts them at their roots, which show its receipt to the other replicas.
fn elsewhere(ring: &Ring, publisher: usize) -> impl Iterator<Item = u32> {
    (0..).filter(move |n| !ring.replica_set(&block(*n).0.key()).contains(&publisher))
}

/// CFS §5.4's confirmation, and what it costs: nothing for an hour after the first. The root is shown the receipt by the
/// publisher itself.
#[test]
fn a_publisher_is_asked_to_confirm_once_an_hour() {
    let ring = Ring::new(15, 4);
    let asked = || ring.calls_of(rpc::CONFIRM);
    let n = elsewhere(&ring, 0).next().expect("one of so many");
    ring.put(0, n..n + 1);
    assert_eq!(asked(), 2);
    for _ in 1..5 {
        ring.sim.run_for(MINUTE * 10);
        ring.put(0, n..n + 1);
    }
    assert_eq!(asked(), 2);
    ring.sim.run_for(HOUR);
    ring.put(0, n..n + 1);
    assert_eq!(asked(), 4);
}

/// The replicas of a put dialled its publisher all at once to confirm it, though a connection
/// between them was open.
#[test]
fn a_publisher_is_confirmed_over_an_open_connection_and_dialled_only_without_one() {
    for size in [6, 120] {
        let connections = Connections::Tcp(TcpModel::today());
        let config = SimConfig { seed: 15, connections, ..SimConfig::default() };
        let ring = Ring::with(config, DhtConfig::default(), size);
        let count = || (ring.calls_of(PROBE), ring.calls_of(rpc::CONFIRM));
        let (dials, asked) = count();
        let publisher = size - 1;
        elsewhere(&ring, publisher).take(20).for_each(|n| ring.put(publisher, n..n + 1));
        let (dials, asked) = (count().0 - dials, count().1 - asked);
        assert!(asked >= 2, "{asked}");
        // On a ring of six, all have met and are connected.
        let is_right = if size == 6 { dials == 0 } else { (1..=asked).contains(&dials) };
        assert!(is_right, "{dials} of {asked}, {size} nodes");
    }
}

/// A dial that failed once kept a publisher from publishing for half a minute.
#[test]
fn a_publisher_that_could_not_be_asked_is_asked_again_in_seconds() {
    let ring = Ring::new(20, 4);
    let replica = ring.members[1].host;
    let publisher = ring.members[0].host;
    let first = block(1);
    let request = put_of(
        ring.node(0).peer,
        now_secs(&ring),
        &[first.0.key()],
        std::slice::from_ref(&first),
        false,
    );
    let carrier = ring.outsider();
    ring.sim.cut(&[replica], &[publisher]);
    assert_refused(send(&ring, &carrier, 1, request.clone()), "its publisher is away");
    ring.sim.heal();
    ring.sim.run_for(Duration::from_secs(2));
    let answer = send(&ring, &carrier, 1, request);
    // The publisher did not make this receipt; that it says so shows that it was asked.
    let Err(CallError::Refused(refusal)) = answer else { panic!("{answer:?}") };
    assert!(refusal.text.contains("did not make this receipt"), "{refusal}");
}

#[test]
fn the_report_says_who_uses_how_much_of_what() {
    let ring = ring(16, 4);
    ring.put(0, 0..40);
    let report = ring.members[1].dht.quota_report(10);
    assert_eq!(report.capacity_bytes, CAPACITY);
    let put_bytes = SHARE / 4 * 3;
    assert_eq!(report.key_allowed_bytes, put_bytes - put_bytes / 64);
    assert_eq!(report.settings, tight().quota);
    let account = report.keys.first().expect("somebody");
    assert_eq!(account.who.to_string(), key_name(&ring.node(0).peer.id));
    assert_eq!(account.blocks, ring.members[1].store.usage().blocks);
    assert_eq!(report.addresses[0].who.to_string(), ring.node(0).peer.addr.ip().to_string());
    assert_eq!(report.addresses[0].used_bytes, account.used_bytes);
    assert!((2.0..8.0).contains(&report.estimated_nodes), "{}", report.estimated_nodes);
}

/// No publisher is limited by default on a network as small as one publisher's allowance.
#[test]
fn a_small_network_limits_nobody_by_default() {
    let mut ring = Ring::configured(17, DhtConfig::default(), 0);
    for _ in 0..5 {
        ring.join(Arc::new(MemoryStore::new(CAPACITY)));
    }
    ring.settle();
    let mut last = Ok(());
    for n in 0..2000 {
        last = ring.try_put(0, vec![sized_block(n, LEN)]);
        if last.is_err() {
            break;
        }
    }
    // The node that finds no room first, the root or a replica, decides what the error is.
    assert!(last.is_err(), "2000 blocks are more than 5 nodes have room for");
    let fullest = ring.members.iter().map(|m| m.store.usage().disk_bytes).max();
    assert!(fullest > Some(CAPACITY * 4 / 5), "{fullest:?}");
}
