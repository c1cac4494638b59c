//! A volume is written on a whole ring in the simulator, whose nodes crash and come back, with the
//! mount's own machine among them: nothing that an `fsync` has answered for is lost, and each tree
//! that a reader or the next mount finds was there between two calls.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, DhtConfig};
use atoll_key::SignedBlock;
use atoll_sim::{Loss, SimConfig};
use atoll_vfs::memory::MemoryFs;
use atoll_vfs::{Errno, FileSystem};
use atoll_volume::owned::{
    NoLeaseKeeper, Volume, VolumeFs, VolumeOptions, WritableFs, WriteOptions, empty_root,
};
use futures_util::FutureExt;

use super::model::{Call, Dice, call, make, shown};
use super::secret;

use crate::simulated_ring::Ring;

type Shown = BTreeMap<Vec<u8>, String>;

/// Nodes of the ring; three have each block.
const NODES: usize = 7;

/// Longer than any call takes: puts and gets have deadlines.
const LONG: Duration = Duration::from_secs(1800);

struct Story {
    seed: u64,
    dice: Dice,
    ring: Ring,
    /// The member whose machine has the mount.
    at: usize,
    /// What the tree was before and after each call that was answered.
    trees: Vec<Shown>,
    calls: Vec<Call>,
    model: MemoryFs,
    /// Calls before the last `fsync` that was answered.
    synced: usize,
}

impl Story {
    fn new(seed: u64, loss: Loss) -> Story {
        let sim = SimConfig { seed, loss, jitter: 0.3, ..SimConfig::default() };
        let ring = Ring::with(sim, DhtConfig::default(), NODES);
        let env = ring.sim.outside();
        let root = empty_root(&env, "test", (0, 0), 12).encode();
        let put = ring.members[0].dht.put_signed(SignedBlock::sign(&secret(), b"", 1, &root));
        ring.sim.block_on(LONG, put).expect("ends").expect("the ring is whole");
        let mut story = Story {
            seed,
            dice: Dice(seed),
            model: MemoryFs::new(env),
            ring,
            at: 0,
            trees: Vec::new(),
            calls: Vec::new(),
            synced: 0,
        };
        story.trees.push(story.block_on(shown(&story.model)));
        story
    }

    fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        let done = self.ring.sim.block_on(LONG, work);
        done.unwrap_or_else(|stuck| panic!("seed {}: {stuck}", self.seed))
    }

    fn some_member(&mut self) -> usize {
        let up: Vec<usize> =
            (0..NODES).filter(|m| self.ring.sim.is_up(self.ring.members[*m].host)).collect();
        up[self.dice.below(up.len() as u64) as usize]
    }

    /// Mounts at `self.at`; what it shows was there since the last `fsync`.
    fn mount(&mut self) -> WritableFs {
        let member = &self.ring.members[self.at];
        let (env, blocks) = (self.ring.sim.env(member.host), member.dht.clone());
        let options = WriteOptions { take_over: true, ..WriteOptions::default() };
        let keeper = Arc::new(NoLeaseKeeper);
        let opened = WritableFs::open(env, blocks, secret(), options, keeper, None);
        let fs = self.block_on(opened).unwrap_or_else(|e| panic!("seed {}: {e}", self.seed));
        let at = self.find(&fs);
        self.calls.truncate(at);
        self.trees.truncate(at + 1);
        self.model = MemoryFs::new(self.ring.sim.outside());
        for call in &self.calls {
            let _ = self.block_on(make(&self.model, call));
        }
        self.synced = at;
        fs
    }

    /// Which of the trees since the last `fsync` is shown.
    fn find(&self, fs: &dyn FileSystem) -> usize {
        let found = self.block_on(shown(fs));
        let at = self.trees.iter().rposition(|tree| *tree == found);
        let at = at.unwrap_or_else(|| panic!("seed {}: a tree that never was", self.seed));
        let synced = self.synced;
        assert!(
            at >= synced || self.trees[synced] == found,
            "seed {}: {at} of {synced}",
            self.seed
        );
        at
    }

    /// A reader on another machine sees a whole tree, which has what was synced.
    fn read(&mut self) {
        let member = self.some_member();
        let member = &self.ring.members[member];
        let (env, blocks) = (self.ring.sim.env(member.host), member.dht.clone());
        let (id, options) = (secret().volume_id(), VolumeOptions::default());
        let volume = self.block_on(Volume::open(env.clone(), blocks, id, options));
        let volume = volume.unwrap_or_else(|error| panic!("seed {}: {error}", self.seed));
        self.find(&VolumeFs::new(env, volume, 0, 0));
    }

    fn work(&mut self, fs: &WritableFs, steps: u64) {
        for _ in 0..steps {
            match self.dice.below(12) {
                0 => {
                    if self.block_on(fs.sync()).is_ok() {
                        self.synced = self.calls.len();
                    }
                }
                // Calls go on while a flush is under way, or is about to begin.
                1 => {
                    let _ = self.block_on(async { fs.sync().now_or_never() });
                }
                2 => self.ring.sim.run_for(Duration::from_millis(self.dice.below(400))),
                3 => self.ring.sim.run_for(Duration::from_secs(self.dice.below(15))),
                4 => self.read(),
                _ => {
                    let call = call(&mut self.dice);
                    let found = self.block_on(make(fs, &call));
                    // What a call needs may be out of reach; then it has changed nothing.
                    if found == Err(Errno::ETIMEDOUT) {
                        continue;
                    }
                    let expected = self.block_on(make(&self.model, &call));
                    assert_eq!(found, expected, "seed {}: {call:?}", self.seed);
                    self.calls.push(call);
                    self.trees.push(self.block_on(shown(&self.model)));
                }
            }
        }
    }

    /// Fewer nodes than there are copies crash while the mount writes, and come back.
    fn tell(&mut self) {
        let mut fs = self.mount();
        for _ in 0..6 {
            let steps = self.dice.below(12);
            self.work(&fs, steps);
            let mut crashed = Vec::new();
            for _ in 0..self.dice.below(3) {
                let member = self.some_member();
                if member != self.at {
                    self.ring.crash(member);
                    crashed.push(member);
                }
            }
            let steps = self.dice.below(20);
            self.work(&fs, steps);
            if crashed.len() < 2 && self.dice.below(2) == 0 {
                drop(fs);
                self.ring.crash(self.at);
                crashed.push(self.at);
                self.at = self.some_member();
                fs = self.mount();
                let steps = self.dice.below(12);
                self.work(&fs, steps);
            }
            // The harness tries to join once: the ring must have noticed.
            self.ring.settle();
            for member in crashed {
                self.ring.restart(member);
            }
            self.ring.until_replicated();
            self.read();
        }
        assert_eq!(self.block_on(fs.end()), Ok(()), "seed {}", self.seed);
        self.synced = self.calls.len();
        self.read();
        fs.check_invariants();
    }
}

#[test]
fn nothing_synced_is_lost_while_nodes_and_the_mount_crash() {
    for seed in 0..12 {
        Story::new(seed, Loss::None).tell();
    }
}

#[test]
fn nothing_synced_is_lost_on_a_network_that_loses_packets() {
    let first_timeout = Duration::from_millis(200);
    for seed in 100..106 {
        Story::new(seed, Loss::Retransmit { chance: 0.02, first_timeout }).tell();
    }
}
