//! A random course of faults.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use atoll_dht::rpc::PutStatus;
use atoll_dht::{Blocks, DhtConfig};
use atoll_env::{Env, random_below};
use atoll_key::{BlockHash, Key, PeerId, SecretKey, SignedBlock};
use atoll_net::{Peer, Service};
use atoll_overlay::Node;
use atoll_overlay::chord::ChordConfig;
use atoll_sim::{HostConfig, HostId, SimConfig};
use bytes::Bytes;

use super::Model;
use super::disk::Disk;
use super::liar::{Lies, liar};
use crate::full::refusing;
use crate::ring::{HOUR, MINUTE, Ring, block};

const LEASE: Duration = Duration::from_secs(4 * 3600);
const GRACE: Duration = Duration::from_secs(3600);
/// Faults of a scenario.
const FAULTS: usize = 5;
/// Kinds of faults.
const KINDS: u64 = 9;
/// One scenario in so many keeps the usual pace of upkeep, which takes three times as long to run.
const UNHURRIED_EXCEPT: u64 = 8;
/// Owners of signed blocks.
const SIGNERS: u64 = 2;

pub(super) struct Scenario {
    ring: Ring,
    model: Model,
    /// Chooses; its numbers are the seed's.
    env: Env,
    /// Whose disk is full.
    full: Vec<Arc<AtomicBool>>,
    /// Who takes no block.
    refuses: Vec<Arc<AtomicBool>>,
    /// For how long the publisher asks.
    lease: Duration,
    liars: Vec<usize>,
    /// What these said of the blocks of the present put or renewal.
    lies: Lies,
    next_block: u32,
    versions: [u64; SIGNERS as usize],
}

impl Scenario {
    pub(super) fn new(seed: u64) -> Scenario {
        let sim = SimConfig { seed, ..SimConfig::default() };
        let config = DhtConfig {
            lease: LEASE,
            expire_every: HOUR / 6,
            expire_grace: GRACE,
            repair_every: 5 * MINUTE,
            stray_grace: [Duration::ZERO, HOUR, 72 * HOUR][seed as usize % 3],
            put_limit: 20 * (MINUTE / 60),
            ..DhtConfig::default()
        };
        let mut ring = Ring::with(sim, config, 0);
        if !seed.is_multiple_of(UNHURRIED_EXCEPT) {
            ring.chord = unhurried();
        }
        let env = ring.sim.outside();
        let mut scenario = Scenario {
            ring,
            model: Model::default(),
            env,
            full: Vec::new(),
            refuses: Vec::new(),
            lease: LEASE,
            liars: Vec::new(),
            lies: Lies::default(),
            next_block: 0,
            versions: [0; SIGNERS as usize],
        };
        let count = 6 + scenario.below(3) as usize;
        let with_liars = scenario.below(3) == 0;
        for _ in 0..count {
            scenario.join(false);
        }
        scenario.run_for(MINUTE);
        if with_liars {
            scenario.join(true);
            if count > 7 {
                scenario.join_apart();
            }
        }
        scenario.run_for(MINUTE);
        scenario
    }

    pub(super) fn run(mut self) {
        self.put();
        // Each kind comes first in as many scenarios as any other.
        let first = self.ring.sim.seed() % KINDS;
        let rest: Vec<u64> = (1..FAULTS).map(|_| self.below(KINDS)).collect();
        for kind in std::iter::once(first).chain(rest) {
            let after = match kind {
                0 => self.absence(),
                1 => self.expired_return(),
                2 => self.power_cut(),
                3 => self.growth(),
                4 => self.partition(),
                5 => self.full_disk(),
                6 => self.destroyed_disk(),
                7 => self.clocks(),
                _ => self.ambush(),
            };
            self.model.check(&self.ring, after);
            self.put();
            self.renew();
            self.model.check(&self.ring, after);
        }
        self.run_for(2 * HOUR);
        self.renew();
        self.run_for(2 * HOUR);
        self.model.check(&self.ring, "the end");
        self.read_all();
    }

    fn below(&self, bound: u64) -> u64 {
        random_below(&*self.env, bound)
    }

    fn some_minutes(&self, upto: u64) -> Duration {
        MINUTE * (1 + self.below(upto)) as u32
    }

    fn is_up(&self, member: usize) -> bool {
        self.ring.sim.is_up(self.ring.members[member].host)
    }

    fn run_for(&mut self, span: Duration) {
        self.ring.sim.run_for(span);
        let up = self.ring.up().count();
        self.model.pass(span, up);
    }

    /// As a publisher has it: renewals on time.
    fn run_and_renew(&mut self, span: Duration) {
        let mut left = span;
        while left > Duration::ZERO {
            let step = left.min(self.lease / 3);
            self.run_for(step);
            self.renew();
            left -= step;
        }
    }

    fn join(&mut self, lies: bool) -> usize {
        self.join_on(HostConfig::default(), lies)
    }

    fn join_on(&mut self, host: HostConfig, lies: bool) -> usize {
        let full = Arc::new(AtomicBool::new(false));
        let disk = Arc::new(Disk::new(full.clone()));
        let refuses = Arc::new(AtomicBool::new(false));
        let disguise = self.disguise(self.ring.members.len(), lies, refuses.clone());
        let member = self.ring.join_host_as(host, disk, disguise);
        self.full.push(full);
        self.refuses.push(refuses);
        if lies {
            self.liars.push(member);
        }
        member
    }

    /// Makes an honest service lie, or refuse while it is told to.
    fn disguise(
        &self,
        member: usize,
        lies: bool,
        refuses: Arc<AtomicBool>,
    ) -> impl Fn(Arc<dyn Service>) -> Arc<dyn Service> + use<> {
        let noted = self.lies.clone();
        let publisher = lies.then(|| self.ring.node(0).peer.id);
        move |honest| match publisher {
            Some(publisher) => liar(honest, member, publisher, noted.clone()),
            None => refusing(honest, refuses.clone(), PutStatus::Failed),
        }
    }

    /// Adds a second liar, unless it comes to stand beside the first.
    fn join_apart(&mut self) {
        let member = self.join(true);
        let order = self.order();
        let place = |of: usize| order.iter().position(|m| *m == of).expect("it is up");
        let apart = place(member).abs_diff(place(self.liars[0]));
        if apart.min(order.len() - apart) < 4 {
            self.ring.crash(member);
        }
    }

    fn restart(&mut self, member: usize) {
        let lies = self.liars.contains(&member);
        let disguise = self.disguise(member, lies, self.refuses[member].clone());
        self.ring.restart_as(member, disguise);
    }

    /// The publisher asks for other leases from now on.
    fn set_lease(&mut self, lease: Duration) {
        self.lease = lease;
        self.ring.config.lease = lease;
        self.ring.crash(0);
        self.restart(0);
        self.run_for(MINUTE);
    }

    /// Nodes that are up, in ring order.
    fn order(&self) -> Vec<usize> {
        let mut up: Vec<usize> = (0..self.ring.members.len()).filter(|m| self.is_up(*m)).collect();
        up.sort_by_key(|member| *self.ring.node(*member).id.key());
        up
    }

    /// One to three neighbours, without the publisher.
    fn neighbours(&self) -> Vec<usize> {
        let order = self.order();
        let count = (1 + self.below(3) as usize).min(order.len() - 3);
        let at = self.below(order.len() as u64) as usize;
        let some = (0..count).map(|i| order[(at + i) % order.len()]);
        some.filter(|member| *member != 0).collect()
    }

    fn hosts(&self, members: &[usize]) -> Vec<HostId> {
        members.iter().map(|member| self.ring.members[*member].host).collect()
    }

    /// Cuts members off from all others, who are up.
    fn cut_off(&self, away: &[usize]) {
        let rest: Vec<usize> = (0..self.ring.members.len()).filter(|m| !away.contains(m)).collect();
        self.ring.sim.heal();
        self.ring.sim.partition(&[&self.hosts(away), &self.hosts(&rest)]);
    }

    fn put(&mut self) {
        self.lies.clear();
        let from = self.next_block;
        self.next_block += 12;
        let blocks: Vec<(BlockHash, Bytes)> = (from..self.next_block).map(block).collect();
        if self.ring.try_put(0, blocks.clone()).is_ok() {
            for (hash, bytes) in blocks {
                self.acknowledged(hash.key(), bytes, 0);
            }
        }
        let signer = self.below(SIGNERS) as usize;
        let version = self.versions[signer] + 1;
        let payload = Bytes::from(format!("{signer} {version}"));
        let secret = SecretKey::from_seed(&[signer as u8 + 1; 32]);
        let signed = SignedBlock::sign(&secret, b"", version, &payload);
        let key = signed.key();
        let put = self.ring.members[0].dht.put_signed(signed);
        // A put that failed may have left its block somewhere.
        self.versions[signer] = version;
        if self.ring.sim.block_on(HOUR, put).expect("puts have deadlines").is_ok() {
            self.acknowledged(key, payload, version);
        }
    }

    /// A majority of k disks have what was acknowledged. A liar that was sent it may stand for one of
    /// them, also if nodes that joined meanwhile have taken its place in the replica set.
    fn acknowledged(&mut self, key: Key, bytes: Bytes, version: u64) {
        self.model.acknowledged(key, bytes, version, self.lease);
        let set = self.ring.replica_set(&key);
        let lies = self.lies.of(&key);
        let copies = self.model.disks(&self.ring, &key).len();
        let seed = self.ring.sim.seed();
        assert!(
            copies + lies >= 2,
            "seed {seed}: ACKNOWLEDGED {key} v{version} on {:?}; {lies} liars took it; set: {set:?}; liars: {:?}; without room: {:?}",
            self.model.disks(&self.ring, &key),
            self.liars,
            self.without_room()
        );
        if copies == 0 {
            // Two liars side by side: nothing was promised by anybody honest.
            self.model.promises.remove(&key);
        }
    }

    /// Who takes nothing at present.
    fn without_room(&self) -> Vec<usize> {
        let is_set = |member: &usize| {
            self.full[*member].load(Ordering::Relaxed)
                || self.refuses[*member].load(Ordering::Relaxed)
        };
        (0..self.ring.members.len()).filter(is_set).collect()
    }

    fn renew(&mut self) {
        if !self.is_up(0) {
            return;
        }
        self.lies.clear();
        let contents = self.model.promises.values().filter(|promise| promise.version == 0);
        let hashes: Vec<BlockHash> =
            contents.map(|promise| BlockHash::of(&promise.bytes)).collect();
        let renewed = self.ring.members[0].dht.renew(hashes.clone());
        let Ok(lacking) = self.ring.sim.block_on(HOUR, renewed).expect("ends") else { return };
        // What two liars of three say of a renewal promises nothing.
        let is_promised =
            |hash: &&BlockHash| !lacking.contains(hash) && self.lies.of(&hash.key()) < 2;
        for hash in hashes.iter().filter(is_promised) {
            self.model.renewed(&hash.key(), self.lease);
        }
    }

    /// Neighbours are off, or cut off together, perhaps for longer than a lease, and come back at
    /// once; the others repair and the publisher renews meanwhile.
    fn absence(&mut self) -> &'static str {
        let away = self.neighbours();
        let is_cut = self.below(2) == 0;
        for count in 1..=away.len() {
            if is_cut {
                self.cut_off(&away[..count]);
            } else {
                self.ring.crash(away[count - 1]);
            }
            let span = self.some_minutes(12);
            self.run_for(span);
        }
        let span = [HOUR, LEASE + GRACE / 2, LEASE + GRACE / 4, 8 * HOUR][self.below(4) as usize];
        let renews_for_longer = self.below(2) == 0 && !is_cut;
        if renews_for_longer {
            self.set_lease(4 * LEASE);
            self.renew();
        }
        self.run_and_renew(span);
        self.ring.sim.heal();
        if is_cut {
            away.iter().for_each(|member| self.ring.crash(*member));
        }
        away.iter().for_each(|member| self.restart(*member));
        let span = self.some_minutes(30);
        self.run_for(span);
        // The next renewal comes when those away have dropped what was not renewed there.
        self.run_for(LEASE);
        if renews_for_longer {
            self.run_for(GRACE * 3 / 2);
            self.renew();
            self.set_lease(LEASE);
        }
        self.renew();
        if is_cut { "neighbours were cut off" } else { "neighbours were off" }
    }

    /// Up to three neighbours, cut off together: their clocks go on, while the others repair and
    /// the publisher renews. They return at once when their own leases have ended, and the copies
    /// of these are still there.
    fn expired_return(&mut self) -> &'static str {
        self.renew();
        let order = self.order();
        let at = self.below(order.len() as u64) as usize;
        let three = (0..3.min(order.len() - 3)).map(|i| order[(at + i) % order.len()]);
        let away: Vec<usize> = three.filter(|member| *member != 0).collect();
        // The last copies are not cut off before the others have some.
        for count in 1..=away.len() {
            self.cut_off(&away[..count]);
            self.run_for(12 * MINUTE);
        }
        let span = LEASE + MINUTE * self.below(40) as u32;
        self.run_and_renew(span);
        self.renew();
        self.ring.sim.heal();
        away.iter().for_each(|member| self.ring.crash(*member));
        away.iter().for_each(|member| self.restart(*member));
        // Nobody renews before the copies with ended leases have been dropped.
        self.run_for(GRACE * 3 / 2);
        self.model.check(&self.ring, "copies with ended leases returned");
        self.renew();
        "copies with ended leases returned"
    }

    /// Everybody is off for long. Some come back a good while before the publisher; if it comes
    /// first, it puts at once.
    fn power_cut(&mut self) -> &'static str {
        let mut all = self.order();
        all.iter().for_each(|member| self.ring.crash(*member));
        let span = HOUR * (1 + self.below(30)) as u32;
        self.run_for(span);
        all.sort_by_cached_key(|_| self.below(1 << 32));
        let is_first = self.below(2) == 0;
        all.sort_by_key(|member| (*member == 0) != is_first);
        for (i, member) in all.iter().enumerate() {
            self.restart(*member);
            if i == 0 && is_first {
                self.put();
            }
            if i + 2 == all.len() && !is_first {
                self.run_for(2 * HOUR);
            }
        }
        let span = self.some_minutes(30);
        self.run_for(span);
        "a power cut"
    }

    fn growth(&mut self) -> &'static str {
        for _ in 0..1 + self.below(4) {
            self.join(false);
            let span = self.some_minutes(3);
            self.run_for(span);
        }
        let span = self.some_minutes(90);
        self.run_for(span);
        "nodes joined"
    }

    /// The promised block that is farthest before its root.
    fn widest(&self) -> Option<Key> {
        let gap = |key: &&Key| self.ring.node(self.ring.root(key)).id.key().distance_from(key);
        self.model.promises.keys().max_by_key(gap).copied()
    }

    /// Nodes join with keys between a block and its root: they are its replica set now.
    fn join_between(&mut self, key: &Key, count: usize, lies: bool) -> Vec<usize> {
        let root = self.ring.node(self.ring.root(key));
        let gap = root.id.key().distance_from(key);
        let ids = (0..).map(|n: u64| {
            let mut id = [7; 32];
            id[..8].copy_from_slice(&n.to_be_bytes());
            PeerId(id)
        });
        let is_between = |id: &PeerId| {
            let peer = Peer { id: *id, addr: root.peer.addr };
            Node::of(peer).id.key().distance_from(key) < gap
        };
        let is_new = |id: &PeerId| self.ring.sim.host_of(id).is_none();
        let ids: Vec<PeerId> = ids.filter(|id| is_between(id) && is_new(id)).take(count).collect();
        let host = |id| HostConfig { identity: Some(id), ..HostConfig::default() };
        ids.into_iter().map(|id| self.join_on(host(id), lies)).collect()
    }

    /// Three liars join beside each other, and leave again.
    fn ambush(&mut self) -> &'static str {
        self.renew();
        let Some(victim) = self.widest() else { return "nothing" };
        let band = self.join_between(&victim, 3, true);
        let span = self.some_minutes(90) + HOUR;
        self.run_for(span);
        band.iter().for_each(|member| self.ring.crash(*member));
        let span = self.some_minutes(30);
        self.run_for(span);
        self.renew();
        "three liars beside each other"
    }

    /// Two sides; those of the smaller one join again when it is over.
    fn partition(&mut self) -> &'static str {
        let order = self.order();
        let count = 1 + self.below(order.len() as u64 / 2) as usize;
        let at = self.below(order.len() as u64) as usize;
        let side = (0..count).map(|i| order[(at + i * 2) % order.len()]);
        let mut side: Vec<usize> = side.filter(|member| *member != 0).collect();
        side.sort_unstable();
        side.dedup();
        self.cut_off(&side);
        let span = self.some_minutes(200);
        self.run_and_renew(span);
        self.put();
        self.ring.sim.heal();
        side.iter().for_each(|member| self.ring.crash(*member));
        side.iter().for_each(|member| self.restart(*member));
        let span = self.some_minutes(30);
        self.run_for(span);
        "a partition"
    }

    /// One node has no room, or refuses, while others join before the root of the replica set of which
    /// it is the last member. The root and the node after it lack nothing, and cannot give it what it
    /// lacks: all the same they hand over what belongs to those who joined, who would find it nowhere
    /// else. These do not repair until all are there.
    fn full_disk(&mut self) -> &'static str {
        let Some(key) = self.widest() else { return "nothing" };
        let order = self.order();
        let root = self.ring.root(&key);
        let at = order.iter().position(|member| *member == root).expect("it is up");
        let member = order[(at + 2) % order.len()];
        let fails = if self.below(2) == 0 { &self.full } else { &self.refuses }[member].clone();
        fails.store(true, Ordering::Relaxed);
        (0..4).for_each(|_| self.put());
        let settle = std::mem::replace(&mut self.ring.config.repair_settle, 2 * MINUTE);
        self.join_between(&key, 5, false);
        self.ring.config.repair_settle = settle;
        (0..4).for_each(|_| self.put());
        let span = self.some_minutes(60) + 2 * HOUR;
        self.run_and_renew(span);
        self.read_all();
        self.assert_handed_over(member);
        self.run_and_renew(LEASE);
        fails.store(false, Ordering::Relaxed);
        let span = self.some_minutes(60);
        self.run_for(span);
        "a node was full"
    }

    /// Most of each replica set have what was promised, as far as they take anything.
    fn assert_handed_over(&self, failing: usize) {
        for key in self.model.promises.keys() {
            let (set, disks) = (self.ring.replica_set(key), self.model.disks(&self.ring, key));
            let has = |member: &&usize| {
                disks.contains(member) || self.liars.contains(member) || **member == failing
            };
            assert!(
                set.iter().filter(has).count() >= 2,
                "seed {}: {key} STAYED on {disks:?}, belongs to {set:?}; without room: {failing}; liars: {:?}",
                self.ring.sim.seed(),
                self.liars
            );
        }
    }

    /// A disk is destroyed whose blocks are all on others too.
    fn destroyed_disk(&mut self) -> &'static str {
        if !self.liars.is_empty() {
            return self.growth();
        }
        self.run_for(HOUR);
        let is_spare = |member: &usize| {
            let elsewhere = |key: &Key| self.model.disks(&self.ring, key) != [*member];
            *member != 0 && self.model.promises.keys().all(elsewhere)
        };
        let spare: Vec<usize> = self.order().into_iter().filter(is_spare).collect();
        let Some(member) = spare.get(self.below(64) as usize % spare.len().max(1)).copied() else {
            return "nothing";
        };
        self.ring.crash(member);
        self.ring.members[member].store = Arc::new(Disk::new(self.full[member].clone()));
        self.ring.members[member].durable = Arc::default();
        let span = self.some_minutes(60);
        self.run_for(span);
        self.restart(member);
        let span = self.some_minutes(60);
        self.run_for(span);
        "a disk was destroyed"
    }

    /// Wall clocks jump, and are put right again.
    fn clocks(&mut self) -> &'static str {
        let order = self.order();
        let member = order[self.below(order.len() as u64) as usize];
        let hours = [2, -2, 30, -30, 10_000, -10_000, 480_000][self.below(7) as usize];
        let host = self.ring.members[member].host;
        self.ring.sim.set_clock_skew_ms(host, hours * 3_600_000);
        if member != 0 && self.below(2) == 0 {
            self.ring.crash(member);
            self.restart(member);
        }
        let span = self.some_minutes(150);
        self.run_and_renew(span);
        self.ring.sim.set_clock_skew_ms(host, 0);
        let span = self.some_minutes(90);
        self.run_for(span);
        "a clock jumped"
    }

    /// Every promised block can be read, and is what was put.
    fn read_all(&self) {
        let up = self.order();
        let seed = self.ring.sim.seed();
        for (key, promise) in &self.model.promises {
            let reader = up[self.below(up.len() as u64) as usize];
            let dht = self.ring.members[reader].dht.clone();
            let bytes = if promise.version > 0 {
                let get = self.ring.sim.block_on(HOUR, dht.get_signed(*key)).expect("ends");
                let got = get.map(|signed| (signed.version, signed.payload.clone()));
                got.map(|(version, payload)| {
                    let right = format!("{} {version}", payload[0] - b'0');
                    assert_eq!(payload, right.as_bytes(), "WRONG bytes, seed {seed}");
                    promise.bytes.clone()
                })
            } else {
                self.ring.try_get(reader, BlockHash::of(&promise.bytes))
            };
            assert_eq!(bytes.as_ref(), Ok(&promise.bytes), "{key} at {reader}, seed {seed}");
        }
    }
}

/// Nodes look after their places a fifth as often as usual: a scenario lasts days, and most of what
/// happens in these is upkeep of the ring.
fn unhurried() -> ChordConfig {
    let usual = ChordConfig::default();
    ChordConfig {
        stabilize_every: 5 * usual.stabilize_every,
        fix_fingers_every: 5 * usual.fix_fingers_every,
        merge_every: 5 * usual.merge_every,
        audit_every: 5 * usual.audit_every,
        table_budget_bytes_per_sec: usual.table_budget_bytes_per_sec / 5,
        ..usual
    }
}
