//! **Never someone else's bytes.** Power cuts at thousands of moments of runs in which ordinary
//! files overwrite transparent ones: afterwards a transparent file is its own, block by block
//! in a version it had, or gone; ordinary files hold no other file's bytes, and what was synced;
//! e2fsck finds nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_tfs::device::{Device, FaultyDevice};
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_tfs::mkfs::mkfs;
use atoll_vfs::{Errno, FileSystem, InodeNumber, OpenFlags, RenameFlags, SetAttr, Writer};
use bytes::Bytes;

use crate::calls::{ME, ROOT, contribution};
use crate::dice::Dice;
use crate::e2fsck::assert_clean;
use crate::mkfs::options;
use crate::recorder::{Playback, Recorder};

const BLOCK: usize = 1024;
/// Bytes that tell whose they are: file, place, write.
const CELL: usize = 32;
const SLOTS: u64 = 12;
const LONGEST_TRANSPARENT: u64 = 90_000;
const LONGEST_ORDINARY: u64 = 500_000;

/// The file of some bytes, where in it, and which write wrote them.
fn owned(id: u64, stamp: u64, offset: u64, len: usize) -> Vec<u8> {
    let first = offset / CELL as u64;
    let last = (offset + len as u64).div_ceil(CELL as u64);
    let mut bytes = Vec::with_capacity(((last - first) as usize) * CELL);
    for cell in first..last {
        for word in [id, cell, stamp, 0x6174_6f6c_6c74_6673] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
    }
    let skip = (offset - first * CELL as u64) as usize;
    bytes[skip..skip + len].to_vec()
}

/// A name of the workload: a slot in one of the two directories of transparent files, or of
/// ordinary ones.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Slot {
    Transparent(u64),
    Ordinary(u64),
}

impl Slot {
    fn name(self) -> String {
        match self {
            Slot::Transparent(n) => format!("t{n}"),
            Slot::Ordinary(n) => format!("o{n}"),
        }
    }
}

#[derive(Clone, Debug)]
struct File {
    id: u64,
    bytes: Vec<u8>,
}

/// What the run knows of its files.
#[derive(Default)]
struct Model {
    files: BTreeMap<Slot, File>,
    /// Every block that a transparent file had or was being given, with the zeros behind its
    /// end: file, block, hash.
    blocks: BTreeSet<(u64, usize, [u8; 32])>,
    /// The files that a name stood for.
    ids: BTreeMap<Slot, BTreeSet<u64>>,
    last_id: u64,
    /// What happened, by the operations that the device had seen then.
    events: Vec<(usize, Event)>,
}

enum Event {
    /// A call begins that changes these names or what they stand for.
    Touched(Slot),
    /// All that was done is durable: the ordinary files.
    Synced(BTreeMap<Slot, Vec<u8>>),
}

impl Model {
    fn note_blocks(&mut self, id: u64, bytes: &[u8], from: usize) {
        for (index, block) in bytes.chunks(BLOCK).enumerate().skip(from / BLOCK) {
            self.blocks.insert((id, index, hash_of(block)));
        }
    }
}

fn hash_of(block: &[u8]) -> [u8; 32] {
    let mut whole = block.to_vec();
    whole.resize(BLOCK, 0);
    *blake3::hash(&whole).as_bytes()
}

struct Run {
    tfs: Tfs,
    recorder: Recorder,
    parent: InodeNumber,
    model: Model,
    dice: Dice,
    stamp: u64,
}

impl Run {
    fn holder(&self, slot: Slot) -> InodeNumber {
        if matches!(slot, Slot::Transparent(_)) { self.parent } else { ROOT }
    }

    fn touch(&mut self, slot: Slot) {
        let at = self.recorder.count();
        self.model.events.push((at, Event::Touched(slot)));
    }

    fn any_slot(&mut self, transparent: bool) -> Slot {
        let n = self.dice.below(SLOTS);
        if transparent { Slot::Transparent(n) } else { Slot::Ordinary(n) }
    }

    /// Writes anywhere in a file, which may be new.
    async fn write(&mut self, slot: Slot) {
        self.touch(slot);
        let transparent = matches!(slot, Slot::Transparent(_));
        let longest = if transparent { LONGEST_TRANSPARENT } else { LONGEST_ORDINARY };
        let mut at = self.dice.below(longest / 2);
        let mut len = self.dice.below(longest / 2) as usize + 1;
        if !transparent {
            // Whole sectors, which survive whole.
            (at, len) = (at / 512 * 512, len.div_ceil(512) * 512);
        }
        let holder = self.holder(slot);
        let flags = OpenFlags::READ_WRITE;
        let opened = self.tfs.create(ME, holder, slot.name().as_bytes(), 0o644, flags).await;
        let (entry, opened) = match opened {
            Ok(opened) => opened,
            // Lost: opening it took its name away.
            Err(Errno::ENOENT) => {
                self.model.files.remove(&slot);
                return;
            }
            Err(Errno::ENOSPC) => return,
            Err(errno) => panic!("{slot:?}: {errno:?}"),
        };
        let number = entry.attr.inode;
        if !self.model.files.contains_key(&slot) {
            self.model.last_id += 1;
            let id = self.model.last_id;
            self.model.files.insert(slot, File { id, bytes: Vec::new() });
            self.model.ids.entry(slot).or_default().insert(id);
        }
        self.stamp += 1;
        let mut file = self.model.files[&slot].clone();
        let before = file.bytes.len();
        assert_eq!(entry.attr.size_bytes as usize, before, "{slot:?} has its length");
        let data = owned(file.id, self.stamp, at, len);
        let end = at as usize + len;
        file.bytes.resize(before.max(end), 0);
        file.bytes[at as usize..end].copy_from_slice(&data);
        if transparent {
            self.model.note_blocks(file.id, &file.bytes, before.min(at as usize));
        }
        let written =
            self.tfs.write(Writer::At(ME), number, opened.handle, at, Bytes::from(data)).await;
        let done = match written {
            Ok(done) => done as usize,
            Err(Errno::ENOSPC) => 0,
            Err(errno) => panic!("{slot:?}: {errno:?}"),
        };
        if done < len {
            // Its present contents are read from the file system.
            let longest = file.bytes.len() as u32;
            let bytes = self.tfs.read(number, opened.handle, 0, longest).await.unwrap();
            file.bytes = bytes.to_vec();
            if transparent {
                self.model.note_blocks(file.id, &file.bytes, 0);
            }
        }
        self.model.files.insert(slot, file);
        self.tfs.close(number, opened.handle).await.unwrap();
        self.tfs.forget(number, 1);
    }

    async fn remove(&mut self, slot: Slot) {
        self.touch(slot);
        match self.tfs.unlink(ME, self.holder(slot), slot.name().as_bytes()).await {
            Ok(()) => assert!(self.model.files.remove(&slot).is_some(), "{slot:?} was there"),
            Err(errno) => {
                assert_eq!((errno, self.model.files.contains_key(&slot)), (Errno::ENOENT, false));
            }
        }
    }

    async fn resize(&mut self, slot: Slot) {
        let Some(mut file) = self.model.files.get(&slot).cloned() else { return };
        self.touch(slot);
        let size = self.dice.below(file.bytes.len() as u64 * 5 / 4 + 1) as usize;
        let size = if matches!(slot, Slot::Ordinary(_)) { size / 512 * 512 } else { size };
        let before = file.bytes.len();
        file.bytes.resize(size, 0);
        if matches!(slot, Slot::Transparent(_)) {
            self.model.note_blocks(file.id, &file.bytes, before.min(size));
        }
        let entry = self.tfs.lookup(ME, self.holder(slot), slot.name().as_bytes()).await.unwrap();
        let number = entry.attr.inode;
        let changes = SetAttr { size_bytes: Some(size as u64), ..SetAttr::default() };
        match self.tfs.setattr(ME, number, None, changes).await {
            Ok(_) => {
                self.model.files.insert(slot, file);
            }
            Err(Errno::ENOENT) => {
                self.model.files.remove(&slot);
            }
            Err(errno) => panic!("{slot:?}: {errno:?}"),
        }
        self.tfs.forget(number, 1);
    }

    async fn rename(&mut self, from: Slot, to: Slot) {
        self.touch(from);
        self.touch(to);
        let (holder, new_holder) = (self.holder(from), self.holder(to));
        let (name, new_name) = (from.name(), to.name());
        let flags = RenameFlags::default();
        // Before the call: a crash in its middle may leave it done.
        if let Some(file) = self.model.files.get(&from) {
            self.model.ids.entry(to).or_default().insert(file.id);
        }
        let renamed =
            self.tfs.rename(ME, holder, name.as_bytes(), new_holder, new_name.as_bytes(), flags);
        match renamed.await {
            Ok(()) => {
                let file = self.model.files.remove(&from).expect("it was renamed");
                self.model.files.insert(to, file);
            }
            Err(errno) => {
                assert_eq!((errno, self.model.files.contains_key(&from)), (Errno::ENOENT, false));
            }
        }
    }

    /// Opens and reads a file: what the model says, or it is lost.
    async fn look(&mut self, slot: Slot) {
        let Some(file) = self.model.files.get(&slot).cloned() else { return };
        let found = read(&self.tfs, self.holder(slot), &slot.name()).await;
        match (found, slot) {
            (Ok(bytes), _) => assert!(bytes == file.bytes, "{slot:?} is what was written"),
            (Err(Errno::ENOENT), Slot::Transparent(_)) => {
                self.model.files.remove(&slot);
            }
            (Err(errno), _) => panic!("{slot:?}: {errno:?}"),
        }
    }

    async fn sync(&mut self) {
        self.tfs.sync().await.unwrap();
        let files = self.model.files.iter();
        let ordinary = files.filter(|(slot, _)| matches!(slot, Slot::Ordinary(_)));
        let ordinary = ordinary.map(|(slot, file)| (*slot, file.bytes.clone())).collect();
        self.model.events.push((self.recorder.count(), Event::Synced(ordinary)));
    }

    async fn step(&mut self) {
        let transparent = self.dice.one_in(2);
        let slot = self.any_slot(transparent);
        match self.dice.below(20) {
            0..9 => self.write(slot).await,
            9..11 => self.remove(slot).await,
            11..13 => self.resize(slot).await,
            13 => {
                let to = self.any_slot(transparent);
                self.rename(slot, to).await;
            }
            14..17 => self.look(slot).await,
            17 => {
                self.tfs.clean().unwrap();
                self.model_forgets_lost().await;
            }
            _ => self.sync().await,
        }
    }

    /// Cleaning took the names of lost files away.
    async fn model_forgets_lost(&mut self) {
        let slots: Vec<Slot> = self.model.files.keys().copied().collect();
        for slot in slots {
            if self.tfs.lookup(ME, self.holder(slot), slot.name().as_bytes()).await.is_ok() {
                let entry = self.tfs.lookup(ME, self.holder(slot), slot.name().as_bytes()).await;
                self.tfs.forget(entry.unwrap().attr.inode, 2);
            } else {
                assert!(matches!(slot, Slot::Transparent(_)), "{slot:?}");
                self.model.files.remove(&slot);
            }
        }
    }
}

async fn read(tfs: &Tfs, parent: InodeNumber, name: &str) -> Result<Vec<u8>, Errno> {
    let entry = tfs.lookup(ME, parent, name.as_bytes()).await?;
    let number = entry.attr.inode;
    let opened = tfs.open(ME, number, OpenFlags::READ).await;
    let bytes = match &opened {
        Ok(opened) => {
            let bytes = tfs.read(number, opened.handle, 0, entry.attr.size_bytes as u32).await;
            tfs.close(number, opened.handle).await?;
            // Opening compares what is not trusted: what is open can be read.
            assert!(bytes.is_ok(), "{name} is open and can be read");
            bytes
        }
        Err(errno) => Err(*errno),
    };
    tfs.forget(number, 1);
    bytes.map(|bytes| bytes.to_vec())
}

fn mounted(device: Arc<dyn Device>) -> Tfs {
    let env = Arc::new(TokioRuntime::current());
    let options = MountOptions { background: false, cache_bytes: 1 << 20, ..Default::default() };
    Tfs::mount(env, device, &options).unwrap().0
}

/// A run of the workload, recorded.
async fn run(image: &[u8], seed: u64, steps: u64) -> (Recorder, Model) {
    let recorder = Recorder::of(image.to_vec());
    let tfs = mounted(Arc::new(recorder.clone()));
    let parent = contribution(&tfs).await;
    tfs.sync().await.unwrap();
    let model = Model::default();
    let dice = Dice::new(seed);
    let mut run = Run { tfs, recorder, parent, model, dice, stamp: 0 };
    for n in 0..SLOTS {
        run.write(Slot::Transparent(n)).await;
        run.write(Slot::Ordinary(n)).await;
    }
    for _ in 0..steps {
        run.step().await;
    }
    assert_eq!(run.tfs.failure(), None);
    (run.recorder, run.model)
}

/// What the checks saw, so that they are known to have looked.
#[derive(Default, Debug)]
struct Seen {
    crashes: u64,
    whole: u64,
    lost: u64,
    synced: u64,
    checked_by_e2fsck: u64,
}

impl Model {
    /// The blocks are one file's that had this name, each in a version it had.
    fn is_own(&self, slot: Slot, bytes: &[u8]) -> bool {
        self.ids.get(&slot).is_some_and(|ids| {
            ids.iter().any(|id| {
                let mut blocks = bytes.chunks(BLOCK).enumerate();
                blocks.all(|(n, block)| self.blocks.contains(&(*id, n, hash_of(block))))
            })
        })
    }

    /// Every cell is one file's that had this name, at its place, or zeros.
    fn is_nobody_elses(&self, slot: Slot, bytes: &[u8]) -> bool {
        let Some(ids) = self.ids.get(&slot) else { return bytes.is_empty() };
        bytes.chunks(CELL).enumerate().all(|(n, cell)| {
            let word = |at: usize| u64::from_le_bytes(cell[8 * at..8 * at + 8].try_into().unwrap());
            let own = || ids.contains(&word(0)) && word(1) == n as u64;
            cell.iter().all(|byte| *byte == 0) || (cell.len() == CELL && own())
        })
    }

    /// The ordinary files that were synced before operation `at` and not touched since.
    fn kept(&self, at: usize) -> BTreeMap<Slot, &Vec<u8>> {
        let mut kept = BTreeMap::new();
        for (_, event) in self.events.iter().filter(|(when, _)| *when <= at) {
            match event {
                Event::Synced(files) => kept = files.iter().map(|(s, b)| (*s, b)).collect(),
                Event::Touched(slot) => {
                    kept.remove(slot);
                }
            }
        }
        kept
    }

    async fn check(&self, tfs: &Tfs, at: usize, story: &str, seen: &mut Seen) {
        let parent = tfs.lookup(ME, ROOT, b"contributed").await.unwrap().attr.inode;
        let kept = self.kept(at);
        for n in 0..SLOTS {
            let slot = Slot::Transparent(n);
            match read(tfs, parent, &slot.name()).await {
                Ok(bytes) => {
                    assert!(self.is_own(slot, &bytes), "{story}: {slot:?} holds foreign bytes");
                    seen.whole += 1;
                }
                Err(errno) => {
                    assert_eq!(errno, Errno::ENOENT, "{story}: {slot:?}");
                    seen.lost += 1;
                }
            }
            let slot = Slot::Ordinary(n);
            match (read(tfs, ROOT, &slot.name()).await, kept.get(&slot)) {
                (Ok(bytes), Some(synced)) => {
                    assert!(bytes == **synced, "{story}: {slot:?} was synced");
                    seen.synced += 1;
                }
                (Ok(bytes), None) => {
                    let own = self.is_nobody_elses(slot, &bytes);
                    assert!(own, "{story}: {slot:?} holds foreign bytes");
                }
                (Err(errno), synced) => {
                    assert_eq!((errno, synced), (Errno::ENOENT, None), "{story}: {slot:?}");
                }
            }
        }
        assert_eq!(tfs.failure(), None, "{story}");
    }
}

/// Crashes a run of `seed` at about `points` of its operations.
async fn crash_at(image: &[u8], seed: u64, steps: u64, points: u64, seen: &mut Seen) {
    let (recorder, model) = run(image, seed, steps).await;
    let operations = recorder.operations();
    let mut dice = Dice::new(seed ^ 0x5eed);
    let mut playback = Playback::of(image.to_vec());
    // From where the directory of transparent files is durable.
    let synced = |operation: &crate::recorder::Operation| {
        matches!(operation, crate::recorder::Operation::Sync)
    };
    let first = operations.iter().enumerate().filter(|(_, o)| synced(o)).nth(5).unwrap().0;
    let every = ((operations.len() - first) as u64).div_ceil(points).max(1);
    for (at, operation) in operations.iter().enumerate() {
        playback.play(operation);
        if at < first || !dice.one_in(every) {
            continue;
        }
        let story = format!("seed {seed}, crash after operation {at} of {}", operations.len());
        let remains = Arc::new(playback.crashed(&mut dice));
        seen.crashes += 1;
        if dice.one_in(16) {
            // The mount that makes it whole crashes too.
            let device = FaultyDevice::holding(remains.bytes(), dice.next());
            device.cut_power_at(dice.below(12));
            let env = Arc::new(TokioRuntime::current());
            let _ = Tfs::mount(env, Arc::new(device.clone()), &MountOptions::default());
            device.power_cycle();
            let tfs = mounted(Arc::new(device));
            model.check(&tfs, at + 1, &format!("{story} and while recovering"), seen).await;
            continue;
        }
        let tfs = mounted(remains.clone());
        model.check(&tfs, at + 1, &story, seen).await;
        if dice.one_in(64) {
            tfs.clean().unwrap();
            model.check(&tfs, at + 1, &format!("{story} and cleaned"), seen).await;
            tfs.unmount().unwrap();
            assert_clean(&remains.bytes(), &story);
            seen.checked_by_e2fsck += 1;
        }
    }
}

fn blank(mib: usize) -> Vec<u8> {
    let device = FaultyDevice::new(mib << 20, 1);
    mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), &options(BLOCK as u32)).unwrap();
    device.bytes()
}

/// `ATOLL_TFS_CRASH_SEEDS` asks for more runs.
#[tokio::test]
async fn after_a_crash_at_any_moment_a_transparent_file_is_its_own_or_gone() {
    let seeds = std::env::var("ATOLL_TFS_CRASH_SEEDS").ok().and_then(|text| text.parse().ok());
    let mut seen = Seen::default();
    // One group, and two.
    let images = [blank(4), blank(10)];
    for seed in 0..seeds.unwrap_or(8) {
        crash_at(&images[seed as usize % 2], seed, 120, 420, &mut seen).await;
    }
    assert!(seen.crashes > 2000 && seen.checked_by_e2fsck > 10, "{seen:?}");
    assert!(seen.whole > seen.crashes && seen.lost > seen.crashes, "{seen:?}");
    assert!(seen.synced > seen.crashes, "{seen:?}");
}
