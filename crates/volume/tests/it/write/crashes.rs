//! Mounts that crash at any moment, while they begin, write, are overtaken or end, on a ring whose
//! answers get lost: each tree that is found was there between two calls, after the last close if
//! it is the next mount of the same machine, and after the last `fsync` if it is another's.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::{Blocks, MemoryBlocks, NewBlock, OverMemory, PutError};
use atoll_env::BoxFuture;
use atoll_vfs::memory::MemoryFs;
use atoll_vfs::{Caller, FileKind, FileSystem, InodeNumber};
use atoll_volume::owned::{WritableFs, WriteOptions};

use super::model::{Call, Dice, call, make, opened, shown};
use super::spool::{Crashing, MemorySpool};
use super::{created, env, mounted_with, secret};

type Shown = BTreeMap<Vec<u8>, String>;

/// Memory that is silent, or takes something and is silent, now and then.
struct Unsteady {
    blocks: MemoryBlocks,
    dice: Mutex<Dice>,
    /// Of 8 puts of a root so many go wrong; of other blocks as well.
    bad: AtomicU64,
}

impl OverMemory for Unsteady {
    fn memory(&self) -> &MemoryBlocks {
        &self.blocks
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let (is_bad, takes) = {
            let mut dice = self.dice.lock().expect("unpoisoned");
            (dice.below(8) < self.bad.load(Ordering::Relaxed), dice.below(2) == 0)
        };
        let count = blocks.len();
        let put = (!is_bad || takes).then(|| self.blocks.put_blocks(blocks));
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(2)).await;
            let outcome = match put {
                Some(put) => put.await,
                None => Vec::new(),
            };
            match is_bad {
                true => vec![Err(PutError::Unavailable("a test".into())); count],
                false => outcome,
            }
        })
    }
}

/// What was overtaken: the trees since the last close that a mount has answered.
type Overtaken = Vec<Shown>;

struct Story {
    seed: u64,
    dice: Dice,
    ring: Arc<Unsteady>,
    spools: [MemorySpool; 2],
    overtaken: [Option<Overtaken>; 2],
    /// The spool is a copy of the other machine's.
    is_copy: [bool; 2],
    current: usize,
    /// All calls, and what the tree was before and after each.
    calls: Vec<Call>,
    trees: Vec<Shown>,
    model: MemoryFs,
    /// Calls before the last close, and the last `fsync`.
    closed: usize,
    synced: usize,
}

async fn new_model() -> MemoryFs {
    let model = MemoryFs::new(env());
    let x = model.mknod(Caller::default(), InodeNumber::ROOT, b"x", FileKind::Regular, 0, 0);
    x.await.expect("makes");
    model
}

/// Whether a mount has ended, if it does not wait for ever for a machine that has crashed.
async fn ended(fs: &WritableFs) -> Option<bool> {
    let ended = tokio::time::timeout(Duration::from_secs(500), fs.end()).await;
    ended.ok().map(|ended| ended.is_ok())
}

impl Story {
    async fn new(seed: u64) -> Story {
        let dice = Mutex::new(Dice(seed ^ 0xabcd));
        let ring = Arc::new(Unsteady { blocks: MemoryBlocks::new(), dice, bad: AtomicU64::new(0) });
        let blocks: Arc<dyn Blocks> = ring.clone();
        created(&blocks, None, 12).await;
        let fs = super::mounted(&blocks, WriteOptions::default()).await.expect("mounts");
        fs.mknod(Caller::default(), InodeNumber::ROOT, b"x", FileKind::Regular, 0, 0)
            .await
            .expect("makes");
        fs.end().await.expect("ends");
        let model = new_model().await;
        let trees = vec![shown(&model).await];
        Story {
            seed,
            dice: Dice(seed),
            ring,
            spools: Default::default(),
            overtaken: [None, None],
            is_copy: [false; 2],
            current: 0,
            calls: Vec::new(),
            trees,
            model,
            closed: 0,
            synced: 0,
        }
    }

    /// Mounts, after crashes on the way.
    async fn mount(
        &mut self,
        machine: usize,
        take_over: bool,
    ) -> (WritableFs, Arc<Crashing<Unsteady>>) {
        for attempt in 0.. {
            if attempt > 4 {
                self.ring.bad.store(0, Ordering::Relaxed);
            }
            let lives_for = match attempt < 4 && self.dice.below(2) == 0 {
                true => self.dice.below(25),
                false => u64::MAX,
            };
            let computer = Arc::new(Crashing::new(&self.ring, &self.spools[machine]));
            computer.lives_for(lives_for);
            let blocks: Arc<dyn Blocks> = computer.clone();
            let options = WriteOptions { take_over, ..WriteOptions::default() };
            let opening = mounted_with(&blocks, options, Some(computer.spool.clone()));
            match tokio::time::timeout(Duration::from_secs(500), opening).await {
                Ok(Ok(fs)) if !computer.has_crashed() => return (fs, computer),
                Ok(Ok(_)) | Err(_) => computer.crash(self.dice.below(100)),
                Ok(Err(error)) => {
                    assert!(attempt < 5, "seed {}: {error}", self.seed);
                    computer.kill();
                }
            }
        }
        unreachable!("it goes on for ever")
    }

    /// Which of the trees since `from` a mount shows; the story goes on from there.
    async fn find(&mut self, fs: &WritableFs, from: usize) -> usize {
        let found = shown(fs).await;
        let at = self.trees.iter().rposition(|tree| *tree == found);
        let at = at.unwrap_or_else(|| panic!("seed {}: a tree that never was", self.seed));
        assert!(at >= from || self.trees[from] == found, "seed {}: {at} of {from}", self.seed);
        at
    }

    async fn go_on_from(&mut self, at: usize) {
        self.calls.truncate(at);
        self.trees.truncate(at + 1);
        self.closed = self.closed.min(at);
        self.synced = self.synced.min(at);
        self.model = new_model().await;
        for call in &self.calls {
            let _ = make(&self.model, call).await;
        }
        assert_eq!(self.trees.last(), Some(&shown(&self.model).await));
    }

    async fn work(&mut self, fs: &WritableFs, machine: &Crashing<Unsteady>, steps: u64) {
        for _ in 0..steps {
            match self.dice.below(16) {
                0..=2 => {
                    let closed =
                        opened(fs, b"x", async |inode, handle| fs.flush(inode, handle).await);
                    if closed.await.is_ok() {
                        self.closed = self.calls.len();
                    }
                }
                3 => {
                    if fs.sync().await.is_ok() {
                        (self.closed, self.synced) = (self.calls.len(), self.calls.len());
                    }
                }
                4 => self.ring.bad.store(self.dice.below(9), Ordering::Relaxed),
                5 => self.ring.bad.store(0, Ordering::Relaxed),
                6 => tokio::time::sleep(Duration::from_millis(self.dice.below(3000))).await,
                7 => tokio::time::sleep(Duration::from_millis(self.dice.below(8))).await,
                8 => drop(futures_util::FutureExt::now_or_never(fs.sync())),
                _ => {
                    let call = call(&mut self.dice);
                    let found = make(fs, &call).await;
                    if found == Err(atoll_vfs::Errno::EROFS)
                        || machine.has_crashed() && found == Err(atoll_vfs::Errno::ETIMEDOUT)
                    {
                        return;
                    }
                    let expected = make(&self.model, &call).await;
                    assert_eq!(found, expected, "seed {}: {call:?}", self.seed);
                    self.calls.push(call);
                    self.trees.push(shown(&self.model).await);
                }
            }
            if machine.has_crashed() {
                return;
            }
        }
    }

    /// What was set aside is what another machine has overtaken.
    async fn check_set_aside(&mut self) {
        let overtaken = self.overtaken[self.current].take();
        let aside = self.spools[self.current].below("aside");
        let is_there = self.spools[self.current].discard("aside");
        if std::mem::take(&mut self.is_copy[self.current]) {
            // It may have what the other machine has not written yet, or has written since.
            return;
        }
        let Some(trees) = overtaken else {
            assert!(!is_there, "seed {}: set aside, and not overtaken", self.seed);
            return;
        };
        if !is_there {
            assert!(trees.is_empty(), "seed {}: what was closed is lost", self.seed);
            return;
        }
        if !aside.names().contains(&"base".to_owned()) {
            // The machine has crashed before any record was durable: the base is, before the first of them.
            assert!(trees.is_empty(), "seed {}: what was closed follows nothing", self.seed);
            return;
        }
        let disk = Crashing::new(&self.ring, &aside).spool;
        let (blocks, options) = (self.ring.clone(), WriteOptions::default());
        let opened = WritableFs::open_set_aside(env(), blocks, secret(), options, disk).await;
        let (left, missing) = opened.expect("opens");
        assert_eq!(missing, None, "seed {}", self.seed);
        let found = shown(&left).await;
        assert!(trees.is_empty() || trees.contains(&found), "seed {}: overtaken", self.seed);
    }

    async fn tell(&mut self) {
        let (mut fs, mut machine) = self.mount(0, false).await;
        for _ in 0..10 {
            if self.dice.below(2) == 0 {
                machine.lives_for(self.dice.below(60));
            }
            let steps = self.dice.below(25);
            self.work(&fs, &machine, steps).await;
            if self.dice.below(6) == 0 {
                self.spools[1 - self.current] = self.spools[self.current].copied();
                self.overtaken[1 - self.current] = None;
                self.is_copy[1 - self.current] = true;
            }
            match self.dice.below(4) {
                0 => {
                    if ended(&fs).await == Some(true) {
                        (self.closed, self.synced) = (self.calls.len(), self.calls.len());
                    }
                    machine.kill();
                }
                1 => machine.kill(),
                2 => machine.crash(self.dice.below(100)),
                _ => {
                    let other = 1 - self.current;
                    let (taker, taken) = self.mount(other, true).await;
                    let at = self.find(&taker, self.synced).await;
                    let steps = self.dice.below(12);
                    self.work(&fs, &machine, steps).await;
                    match self.dice.below(3) {
                        0 => machine.kill(),
                        1 => machine.crash(self.dice.below(100)),
                        _ => {
                            if ended(&fs).await == Some(false) && !machine.has_crashed() {
                                self.closed = self.calls.len();
                            }
                            machine.crash(self.dice.below(100));
                        }
                    }
                    // What the ring had anyway need not be set aside.
                    let lost = self.closed > at && self.trees[self.closed] != self.trees[at];
                    let trees = if lost { self.trees[self.closed..].to_vec() } else { Vec::new() };
                    self.overtaken[self.current] = Some(trees);
                    self.current = other;
                    self.go_on_from(at).await;
                    (fs, machine) = (taker, taken);
                    self.check_set_aside().await;
                    continue;
                }
            }
            drop(fs);
            (fs, machine) = self.mount(self.current, false).await;
            self.check_set_aside().await;
            let at = self.find(&fs, self.closed).await;
            self.go_on_from(at).await;
            fs.check_invariants();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn every_tree_that_is_found_was_there() {
    for seed in 1..=60 {
        Story::new(seed).await.tell().await;
    }
}
