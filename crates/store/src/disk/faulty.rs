//! A disk in memory that misbehaves on purpose, and the same way for the same seed.

use std::any::Any;
use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::sync::{Arc, Mutex, MutexGuard};

use super::{Disk, DiskFile};

/// What survives power loss as a whole or not at all.
const SECTOR_BYTES: usize = 512;

/// What a disk can be told to fail.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Operation {
    /// Reading from a file.
    Read,
    /// Writing to a file or changing its length.
    Write,
    /// Making a file durable.
    Sync,
    /// Creating, removing, renaming a file or making that durable.
    Directory,
}

/// A disk in memory that misbehaves on purpose. Clones are handles to the same disk.
///
/// Unsynced writes live apart from durable bytes; [`FaultyDisk::power_cycle`] lets a
/// random part of them survive: none, all, a prefix cut within a write, or any subset
/// of sectors.
#[derive(Clone, Debug)]
pub struct FaultyDisk {
    world: Arc<Mutex<World>>,
}

#[derive(Debug)]
struct World {
    random: u64,
    /// Counts power cycles; handles of an earlier one are dead.
    epoch: u64,
    powered: bool,
    operations: u64,
    power_fails_at: Option<u64>,
    failures: BTreeMap<Operation, u32>,
    cold: bool,
    capacity_bytes: u64,
    locked: bool,
    names: BTreeMap<String, u64>,
    durable_names: BTreeMap<String, u64>,
    unsynced_names: Vec<NameChange>,
    files: BTreeMap<u64, FileState>,
    next_file: u64,
}

#[derive(Debug, Default)]
struct FileState {
    bytes: Vec<u8>,
    durable: Vec<u8>,
    unsynced: Vec<Change>,
    handles: u32,
}

#[derive(Debug, Clone)]
enum NameChange {
    Link(String, u64),
    Unlink(String),
}

#[derive(Debug, Clone)]
enum Change {
    Write(usize, Vec<u8>),
    Length(usize),
}

fn apply_name(names: &mut BTreeMap<String, u64>, change: &NameChange) {
    match change {
        NameChange::Link(name, file) => names.insert(name.clone(), *file),
        NameChange::Unlink(name) => names.remove(name),
    };
}

fn write_into(bytes: &mut Vec<u8>, offset: usize, data: &[u8]) {
    let end = offset + data.len();
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[offset..end].copy_from_slice(data);
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    match change {
        Change::Write(offset, data) => write_into(bytes, *offset, data),
        Change::Length(len) => bytes.resize(*len, 0),
    }
}

fn power_lost() -> io::Error {
    io::Error::other("the power is off")
}

impl World {
    /// SplitMix64: any generator would do, this one is four lines.
    fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next_random() % bound.max(1) as u64) as usize
    }

    /// Counts an operation that changes the disk; at the appointed one the power goes.
    /// The caller has already recorded the change as unsynced.
    fn count(&mut self) -> io::Result<()> {
        self.operations += 1;
        if self.power_fails_at.is_some_and(|at| self.operations >= at) {
            self.powered = false;
            return Err(power_lost());
        }
        Ok(())
    }

    fn check(&mut self, operation: Operation) -> io::Result<()> {
        if !self.powered {
            return Err(power_lost());
        }
        if let Some(left) = self.failures.get_mut(&operation)
            && *left > 0
        {
            *left -= 1;
            return Err(io::Error::other("injected failure"));
        }
        Ok(())
    }

    fn used_bytes(&self) -> u64 {
        self.names.values().map(|file| self.files[file].bytes.len() as u64).sum()
    }

    fn check_room(&self, file: u64, len: usize) -> io::Result<()> {
        let grown = len.saturating_sub(self.files[&file].bytes.len()) as u64;
        if grown > 0 && self.used_bytes() + grown > self.capacity_bytes {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }

    fn change_name(&mut self, change: NameChange) -> io::Result<()> {
        apply_name(&mut self.names, &change);
        self.unsynced_names.push(change);
        self.count()
    }

    fn change_file(&mut self, file: u64, change: Change) -> io::Result<()> {
        let state = self.files.get_mut(&file).expect("a handle keeps its file");
        apply(&mut state.bytes, &change);
        state.unsynced.push(change);
        self.count()
    }

    /// Forgets a file that has neither a name nor a handle.
    fn forget_if_unused(&mut self, file: u64) {
        let named = self.names.values().chain(self.durable_names.values()).any(|f| *f == file);
        let held = self.files.get(&file).is_some_and(|state| state.handles > 0);
        if !named && !held {
            self.files.remove(&file);
        }
    }

    /// What of a file's unsynced changes survives.
    fn lose_unsynced(&mut self, unsynced: &[Change], durable: &mut Vec<u8>) {
        match self.below(4) {
            0 => {}
            1 => unsynced.iter().for_each(|change| apply(durable, change)),
            2 => {
                let whole = self.below(unsynced.len() + 1);
                unsynced[..whole].iter().for_each(|change| apply(durable, change));
                if let Some(Change::Write(offset, data)) = unsynced.get(whole) {
                    let sectors = self.below(data.len() / SECTOR_BYTES + 1);
                    write_into(durable, *offset, &data[..cut(*offset, data, sectors)]);
                }
            }
            _ => unsynced.iter().for_each(|change| match change {
                Change::Write(offset, data) => self.lose_sectors(*offset, data, durable),
                length if self.below(2) == 0 => apply(durable, length),
                Change::Length(_) => {}
            }),
        }
    }

    fn lose_sectors(&mut self, offset: usize, data: &[u8], durable: &mut Vec<u8>) {
        let mut start = 0;
        while start < data.len() {
            let stop = start + cut(offset + start, &data[start..], 1);
            if self.below(2) == 0 {
                write_into(durable, offset + start, &data[start..stop]);
            }
            start = stop;
        }
    }
}

/// How many bytes of `data`, written at `offset`, lie before the end of its `sectors`th sector.
fn cut(offset: usize, data: &[u8], sectors: usize) -> usize {
    let end = (offset / SECTOR_BYTES + sectors) * SECTOR_BYTES;
    end.saturating_sub(offset).min(data.len())
}

impl FaultyDisk {
    /// An empty, unlimited, faultless disk; `seed` decides all its random choices.
    pub fn new(seed: u64) -> FaultyDisk {
        let world = World {
            random: seed,
            epoch: 0,
            powered: true,
            operations: 0,
            power_fails_at: None,
            failures: BTreeMap::new(),
            cold: false,
            capacity_bytes: u64::MAX,
            locked: false,
            names: BTreeMap::new(),
            durable_names: BTreeMap::new(),
            unsynced_names: Vec::new(),
            files: BTreeMap::new(),
            next_file: 0,
        };
        FaultyDisk { world: Arc::new(Mutex::new(world)) }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().expect("no panic while the lock is held")
    }

    /// Changes (writes, syncs, creations, …) made so far.
    pub fn operations(&self) -> u64 {
        self.world().operations
    }

    /// Cuts the power at the `operations`th change from now; 1 is the next. From then
    /// on everything fails until [`FaultyDisk::power_cycle`].
    pub fn fail_power_after(&self, operations: u64) {
        let mut world = self.world();
        world.power_fails_at = Some(world.operations + operations);
    }

    /// Whether the power is on.
    pub fn is_powered(&self) -> bool {
        self.world().powered
    }

    /// Power off, if it is not, and on again: unsynced changes are lost in part, every
    /// open handle and lock is dead, injected failures are forgotten.
    pub fn power_cycle(&self) {
        let mut world = self.world();
        world.epoch += 1;
        world.powered = true;
        world.power_fails_at = None;
        world.failures.clear();
        world.locked = false;
        let changes = std::mem::take(&mut world.unsynced_names);
        let surviving = world.below(changes.len() + 1);
        changes[..surviving].iter().for_each(|c| apply_name(&mut world.durable_names, c));
        world.names = world.durable_names.clone();
        let mut files = std::mem::take(&mut world.files);
        files.retain(|file, _| world.names.values().any(|named| named == file));
        for state in files.values_mut() {
            let unsynced = std::mem::take(&mut state.unsynced);
            world.lose_unsynced(&unsynced, &mut state.durable);
            state.bytes = state.durable.clone();
            state.handles = 0;
        }
        world.files = files;
    }

    /// A process dies: handles and locks are dead, but everything written stays.
    pub fn kill_process(&self) {
        let mut world = self.world();
        world.epoch += 1;
        world.locked = false;
        world.files.values_mut().for_each(|state| state.handles = 0);
    }

    /// The next `times` operations of this kind fail with an I/O error.
    pub fn fail_next(&self, operation: Operation, times: u32) {
        self.world().failures.insert(operation, times);
    }

    /// Limits the sum of the lengths of all files.
    pub fn set_capacity(&self, capacity_bytes: u64) {
        self.world().capacity_bytes = capacity_bytes;
    }

    /// Whether reads that must not wait find nothing cached.
    pub fn set_cold(&self, cold: bool) {
        self.world().cold = cold;
    }

    /// The bytes of a file as they read now; `None` if it does not exist.
    pub fn contents(&self, name: &str) -> Option<Vec<u8>> {
        let world = self.world();
        Some(world.files[world.names.get(name)?].bytes.clone())
    }

    /// Replaces a file's bytes, durably, as a user with a hex editor would; makes the
    /// file if it does not exist.
    pub fn overwrite(&self, name: &str, bytes: Vec<u8>) {
        let mut world = self.world();
        let file = match world.names.get(name) {
            Some(file) => *file,
            None => {
                world.next_file += 1;
                world.next_file
            }
        };
        world.names.insert(name.to_owned(), file);
        world.durable_names.insert(name.to_owned(), file);
        let state = world.files.entry(file).or_default();
        state.unsynced.clear();
        state.durable = bytes.clone();
        state.bytes = bytes;
    }

    /// Flips one bit of a file, durably. Nothing happens beyond its end.
    pub fn flip_bit(&self, name: &str, bit: u64) {
        let Some(mut bytes) = self.contents(name) else { return };
        let Some(byte) = usize::try_from(bit / 8).ok().and_then(|at| bytes.get_mut(at)) else {
            return;
        };
        *byte ^= 1 << (bit % 8);
        self.overwrite(name, bytes);
    }

    fn handle(&self, world: &mut World, file: u64) -> Arc<dyn DiskFile> {
        world.files.entry(file).or_default().handles += 1;
        Arc::new(FaultyFile { world: self.world.clone(), file, epoch: world.epoch })
    }
}

struct FaultyLock {
    world: Arc<Mutex<World>>,
    epoch: u64,
}

impl Drop for FaultyLock {
    fn drop(&mut self) {
        let mut world = self.world.lock().expect("no panic while the lock is held");
        if world.epoch == self.epoch {
            world.locked = false;
        }
    }
}

impl Disk for FaultyDisk {
    fn lock(&self) -> io::Result<Box<dyn Any + Send + Sync>> {
        let mut world = self.world();
        if world.locked {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "held by another store"));
        }
        world.locked = true;
        Ok(Box::new(FaultyLock { world: self.world.clone(), epoch: world.epoch }))
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let mut world = self.world();
        world.check(Operation::Directory)?;
        if world.names.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        world.next_file += 1;
        let file = world.next_file;
        let handle = self.handle(&mut world, file);
        let changed = world.change_name(NameChange::Link(name.to_owned(), file));
        drop(world);
        changed.map(|()| handle)
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let mut world = self.world();
        if !world.powered {
            return Err(power_lost());
        }
        let file = *world.names.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(self.handle(&mut world, file))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut world = self.world();
        world.check(Operation::Directory)?;
        let file = *world.names.get(name).ok_or(io::ErrorKind::NotFound)?;
        world.change_name(NameChange::Unlink(name.to_owned()))?;
        world.forget_if_unused(file);
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut world = self.world();
        world.check(Operation::Directory)?;
        let file = *world.names.get(from).ok_or(io::ErrorKind::NotFound)?;
        apply_name(&mut world.names, &NameChange::Unlink(from.to_owned()));
        world.unsynced_names.push(NameChange::Unlink(from.to_owned()));
        world.change_name(NameChange::Link(to.to_owned(), file))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let world = self.world();
        if !world.powered {
            return Err(power_lost());
        }
        Ok(world.names.keys().cloned().collect())
    }

    fn sync_dir(&self) -> io::Result<()> {
        let mut world = self.world();
        world.check(Operation::Directory)?;
        world.count()?;
        let changes = std::mem::take(&mut world.unsynced_names);
        changes.iter().for_each(|change| apply_name(&mut world.durable_names, change));
        let files: Vec<u64> = world.files.keys().copied().collect();
        files.into_iter().for_each(|file| world.forget_if_unused(file));
        Ok(())
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let world = self.world();
        Ok(world.capacity_bytes.saturating_sub(world.used_bytes()))
    }

    fn random_u64(&self) -> io::Result<u64> {
        Ok(self.world().next_random())
    }

    /// It has no clock.
    fn unix_secs(&self) -> u64 {
        0
    }
}

#[derive(Debug)]
struct FaultyFile {
    world: Arc<Mutex<World>>,
    file: u64,
    epoch: u64,
}

impl FaultyFile {
    fn world(&self) -> io::Result<MutexGuard<'_, World>> {
        let world = self.world.lock().expect("no panic while the lock is held");
        if !world.powered || world.epoch != self.epoch {
            return Err(power_lost());
        }
        Ok(world)
    }
}

impl Drop for FaultyFile {
    fn drop(&mut self) {
        let mut world = self.world.lock().expect("no panic while the lock is held");
        if world.epoch != self.epoch {
            return;
        }
        if let Some(state) = world.files.get_mut(&self.file) {
            state.handles = state.handles.saturating_sub(1);
        }
        world.forget_if_unused(self.file);
    }
}

impl DiskFile for FaultyFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.world()?.files[&self.file].bytes.len() as u64)
    }

    fn write_at(&self, offset: u64, parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        let mut world = self.world()?;
        world.check(Operation::Write)?;
        let data: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
        let offset = usize::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        world.check_room(self.file, offset + data.len())?;
        world.change_file(self.file, Change::Write(offset, data))
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut world = self.world()?;
        world.check(Operation::Read)?;
        let bytes = &world.files[&self.file].bytes;
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        let read = buffer.len().min(bytes.len() - start);
        buffer[..read].copy_from_slice(&bytes[start..start + read]);
        Ok(read)
    }

    fn read_cached(&self, offset: u64, buffer: &mut [u8]) -> io::Result<bool> {
        if self.world()?.cold {
            return Ok(false);
        }
        Ok(self.read_at(offset, buffer)? == buffer.len())
    }

    fn forget_cached(&self, _offset: u64, _len_bytes: u64) {}

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        let mut world = self.world()?;
        world.check(Operation::Write)?;
        let len = usize::try_from(len_bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        world.check_room(self.file, len)?;
        world.change_file(self.file, Change::Length(len))
    }

    fn sync(&self) -> io::Result<()> {
        let mut world = self.world()?;
        world.check(Operation::Sync)?;
        world.count()?;
        let state = world.files.get_mut(&self.file).expect("a handle keeps its file");
        let unsynced = std::mem::take(&mut state.unsynced);
        unsynced.iter().for_each(|change| apply(&mut state.durable, change));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(file: &dyn DiskFile, offset: u64, data: &[u8]) -> io::Result<()> {
        file.write_at(offset, &mut [IoSlice::new(data)])
    }

    #[test]
    fn synced_bytes_survive_and_some_seed_loses_unsynced_ones() {
        let mut outcomes = std::collections::BTreeSet::new();
        for seed in 0..64 {
            let disk = FaultyDisk::new(seed);
            let file = disk.create("f").expect("created");
            write(&*file, 0, &[1; 1024]).expect("written");
            file.sync().expect("synced");
            disk.sync_dir().expect("synced");
            write(&*file, 1024, &[2; 2048]).expect("written");
            disk.power_cycle();
            assert!(file.len().is_err(), "the handle is dead");
            let bytes = disk.contents("f").expect("the name was synced");
            assert_eq!(bytes[..1024], [1; 1024]);
            outcomes.insert(bytes);
        }
        assert!(outcomes.len() > 5, "none, all, prefixes and subsets: {}", outcomes.len());
    }

    #[test]
    fn a_name_that_was_not_synced_may_vanish_with_its_synced_file() {
        let survived = (0..64)
            .filter(|seed| {
                let disk = FaultyDisk::new(*seed);
                disk.create("f").expect("created").sync().expect("synced");
                disk.power_cycle();
                disk.contents("f").is_some()
            })
            .count();
        assert!(survived > 0 && survived < 64, "{survived}");
    }

    #[test]
    fn a_full_disk_refuses_growth_only() {
        let disk = FaultyDisk::new(1);
        disk.set_capacity(1000);
        let file = disk.create("f").expect("created");
        write(&*file, 0, &[1; 900]).expect("fits");
        let error = write(&*file, 900, &[1; 200]).expect_err("does not fit");
        assert!(crate::disk::is_full(&error));
        write(&*file, 0, &[2; 900]).expect("overwriting needs no room");
        assert_eq!(disk.free_bytes().expect("known"), 100);
    }

    #[test]
    fn a_removed_file_stays_readable_through_its_handle() {
        let disk = FaultyDisk::new(1);
        let file = disk.create("f").expect("created");
        write(&*file, 0, b"abc").expect("written");
        disk.remove("f").expect("removed");
        disk.sync_dir().expect("synced");
        let mut buffer = [0; 3];
        assert_eq!(file.read_at(0, &mut buffer).expect("read"), 3);
        assert_eq!(&buffer, b"abc");
    }
}
