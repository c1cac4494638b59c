//! Locks on ranges of bytes, as `fcntl(2)` has them, and on whole files, as `flock(2)` has them.
//!
//! Both are locks of a *lock owner* on a range: for `fcntl` a process or an open file (`F_SETLK`,
//! `F_OFD_SETLK`), for `flock` an open file and all bytes. A local file system of Linux keeps the two kinds
//! apart. The front end cannot (see `gateway::fuse::locks`), so locks of both kinds exclude each other, as over NFS, with
//! one exception: a process never waits for a lock that it holds itself by the other call. Programs take both, since they do
//! not know which of them a file system honours. Two owners of one process that lock through one open file are
//! its process and that open file, so their locks are of different kinds ([`FileLock::through`]).
//!
//! A file system without [`Locks`] leaves them to the front end (FUSE: to the kernel), which is
//! right wherever one mount is the only way to the files. [`LockTable`] is for those that serve
//! several mounts from one process; file systems of several nodes have [`Locks`] of their own.
//!
//! Deadlocks are not looked for, as for `F_OFD_SETLKW` and NFSv4: `EDEADLK` is never returned, and
//! processes that wait for each other's locks wait until one of them is interrupted.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use crate::Answer;
use crate::types::{Errno, Handle, InodeNumber};

/// The greatest offset in a file: a range that ends here lasts to the end, wherever that is.
pub const MAX_OFFSET: u64 = i64::MAX as u64;

/// Most locks on one file. A guess: far more than any program takes, little memory.
const MAX_LOCKS_PER_FILE: usize = 65_536;

/// An owner of locks: a process or an open file. Front ends take care that no two owners of theirs
/// have one number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LockOwner(pub u64);

/// How a lock excludes others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockKind {
    /// For reading: excludes exclusive locks of others.
    Shared,
    /// For writing: excludes all locks of others.
    Exclusive,
}

/// Bytes of a file, first and last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockRange {
    /// The first byte.
    pub first: u64,
    /// The last byte, not before the first.
    pub last: u64,
}

impl LockRange {
    /// All bytes.
    pub const WHOLE: LockRange = LockRange { first: 0, last: MAX_OFFSET };

    fn overlaps(self, other: LockRange) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    /// Whether no byte lies between the two.
    fn touches(self, other: LockRange) -> bool {
        self.first <= other.last.saturating_add(1) && other.first <= self.last.saturating_add(1)
    }
}

/// A lock that is wanted, or held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileLock {
    /// How it excludes others.
    pub kind: LockKind,
    /// What it covers.
    pub range: LockRange,
    /// The process that asked for it, which `F_GETLK` tells others; 0 if it is not known.
    pub pid: u32,
    /// The open file it was asked for through, if that is known. A file system whose locks can be lost, because the
    /// nodes that keep them cannot be reached, then fails what is written through this file with [`Errno::EIO`] until
    /// a lock is taken through it anew.
    pub through: Option<Handle>,
}

impl FileLock {
    /// Whether two owners that hold these locks are one process, which uses `fcntl` and `flock` on one open file.
    fn is_of_the_same_process(&self, other: &FileLock) -> bool {
        self.pid != 0
            && self.pid == other.pid
            && self.through.is_some()
            && self.through == other.through
    }
}

/// The locks of a file system. The inode is open while an owner holds or wants locks on it; the
/// front end unlocks all that an owner holds when its process or its open file ends.
pub trait Locks: Send + Sync + 'static {
    /// A lock that keeps `owner` from having `wanted`.
    fn conflict(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
        wanted: FileLock,
    ) -> Answer<Option<FileLock>>;

    /// Takes a lock. It replaces what the owner held of the range: an exclusive lock becomes a
    /// shared one and the other way round, in one step. Where another owner's lock conflicts,
    /// nothing changes: [`Errno::EAGAIN`], or the call `waits` until none does.
    ///
    /// Dropped before it has answered, a call that waits leaves no lock.
    fn lock(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
        wanted: FileLock,
        waits: bool,
    ) -> Answer<()>;

    /// Gives up what the owner holds of the range.
    fn unlock(&self, inode: InodeNumber, owner: LockOwner, range: LockRange) -> Answer<()>;
}

/// [`Locks`] in memory.
#[derive(Clone, Debug, Default)]
pub struct LockTable {
    tables: Arc<Mutex<Tables>>,
}

#[derive(Debug, Default)]
struct Tables {
    /// Files with locks, or with tasks that wait for one.
    files: BTreeMap<InodeNumber, LockedFile>,
    /// Numbers of tasks that wait are used once, also when a file has left the table.
    last_waiter: u64,
}

/// An owner of locks in a table of owners of several front ends.
pub trait LockParty: Copy + Eq {
    /// Whether both are owners of one front end: processes and open files of the same number are the same then.
    fn is_of_same_front_end(&self, other: &Self) -> bool;
}

impl LockParty for LockOwner {
    fn is_of_same_front_end(&self, _other: &LockOwner) -> bool {
        true
    }
}

/// The locks that are held on the ranges of one file. Plain state, which knows of no waiting.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RangeLocks<O> {
    /// Of one owner, no two overlap, and no two of one kind touch.
    held: Vec<(O, FileLock)>,
}

impl<O> Default for RangeLocks<O> {
    fn default() -> RangeLocks<O> {
        RangeLocks { held: Vec::new() }
    }
}

impl<O: LockParty> RangeLocks<O> {
    /// Whether nobody holds a lock.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// How many locks are held.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// All locks, with their owners.
    pub fn iter(&self) -> impl Iterator<Item = &(O, FileLock)> {
        self.held.iter()
    }

    /// The locks of one owner.
    pub fn of(&self, owner: O) -> impl Iterator<Item = FileLock> {
        self.held.iter().filter(move |(other, _)| *other == owner).map(|(_, held)| *held)
    }

    /// A lock that keeps `owner` from having `wanted`.
    pub fn conflict(&self, owner: O, wanted: FileLock) -> Option<FileLock> {
        let conflicts = |(other, held): &&(O, FileLock)| {
            let is_one_process =
                other.is_of_same_front_end(&owner) && held.is_of_the_same_process(&wanted);
            *other != owner
                && !is_one_process
                && held.range.overlaps(wanted.range)
                && [held.kind, wanted.kind].contains(&LockKind::Exclusive)
        };
        self.held.iter().find(conflicts).map(|(_, held)| *held)
    }

    /// Takes the range out of what the owner holds; parts on both sides of it stay.
    pub fn cut(&mut self, owner: O, range: LockRange) {
        let mut rest = Vec::new();
        self.held.retain(|(other, held)| {
            if *other != owner || !held.range.overlaps(range) {
                return true;
            }
            if held.range.first < range.first {
                let left = LockRange { last: range.first - 1, ..held.range };
                rest.push((owner, FileLock { range: left, ..*held }));
            }
            if held.range.last > range.last {
                let right = LockRange { first: range.last + 1, ..held.range };
                rest.push((owner, FileLock { range: right, ..*held }));
            }
            false
        });
        self.held.append(&mut rest);
    }

    /// Takes a lock, which replaces what the owner held of the range. [`Errno::EAGAIN`] if another owner's conflicts;
    /// [`Errno::ENOLCK`] if there are too many.
    pub fn lock(&mut self, owner: O, mut wanted: FileLock) -> Result<(), Errno> {
        if self.conflict(owner, wanted).is_some() {
            return Err(Errno::EAGAIN);
        }
        if self.held.len() >= MAX_LOCKS_PER_FILE {
            return Err(Errno::ENOLCK);
        }
        self.cut(owner, wanted.range);
        self.held.retain(|(other, held)| {
            let joins =
                *other == owner && held.kind == wanted.kind && held.range.touches(wanted.range);
            if joins {
                wanted.range.first = wanted.range.first.min(held.range.first);
                wanted.range.last = wanted.range.last.max(held.range.last);
            }
            !joins
        });
        self.held.push((owner, wanted));
        Ok(())
    }

    /// Takes the locks of those owners away that `stays` does not name.
    pub fn retain(&mut self, stays: impl Fn(&O) -> bool) {
        self.held.retain(|(owner, _)| stays(owner));
    }

    /// Replaces all that an owner holds.
    pub fn replace(&mut self, owner: O, held: impl IntoIterator<Item = FileLock>) {
        self.retain(|other| *other != owner);
        self.held.extend(held.into_iter().map(|lock| (owner, lock)));
    }
}

/// The locks on one file.
#[derive(Debug, Default)]
struct LockedFile {
    held: RangeLocks<LockOwner>,
    /// Tasks that wait for any of them to go.
    waiting: BTreeMap<u64, Waker>,
    /// Those of them that shall try again.
    woken: Vec<Waker>,
}

impl LockedFile {
    fn lock(&mut self, owner: LockOwner, wanted: FileLock) -> Result<(), Errno> {
        self.held.lock(owner, wanted)?;
        // An exclusive lock may have become a shared one.
        self.wake_all();
        Ok(())
    }

    fn wake_all(&mut self) {
        self.woken.extend(std::mem::take(&mut self.waiting).into_values());
    }
}

impl LockTable {
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().expect("no holder of this lock panics")
    }

    /// Works on a file's locks, then wakes the waiters that this concerns.
    fn with<T>(&self, inode: InodeNumber, work: impl FnOnce(&mut LockedFile) -> T) -> T {
        let mut tables = self.tables();
        let file = tables.files.entry(inode).or_default();
        let done = work(file);
        let woken = std::mem::take(&mut file.woken);
        if file.held.is_empty() && file.waiting.is_empty() {
            tables.files.remove(&inode);
        }
        drop(tables);
        woken.into_iter().for_each(Waker::wake);
        done
    }

    /// How many locks are waited for.
    pub fn waiting(&self) -> usize {
        self.tables().files.values().map(|file| file.waiting.len()).sum()
    }

    /// Waits until no other owner's lock keeps `owner` from `wanted`, and takes nothing.
    pub fn until_free(&self, inode: InodeNumber, owner: LockOwner, wanted: FileLock) -> Answer<()> {
        self.wait(inode, owner, wanted, false)
    }

    /// The strongest lock on a file, whoever holds it.
    pub fn held(&self, inode: InodeNumber) -> Option<LockKind> {
        let tables = self.tables();
        let held = &tables.files.get(&inode)?.held;
        match held.iter().any(|(_, lock)| lock.kind == LockKind::Exclusive) {
            true => Some(LockKind::Exclusive),
            false => held.iter().next().map(|_| LockKind::Shared),
        }
    }

    /// Takes all locks on a file from their owners.
    pub fn clear(&self, inode: InodeNumber) {
        self.with(inode, |file| {
            file.held = RangeLocks::default();
            file.wake_all();
        });
    }

    fn wait(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
        wanted: FileLock,
        takes: bool,
    ) -> Answer<()> {
        let mut tables = self.tables();
        tables.last_waiter += 1;
        let number = tables.last_waiter;
        Box::pin(Waiting { table: self.clone(), inode, owner, wanted, takes, number })
    }

    /// Whether no owner holds or waits for a lock.
    pub fn is_empty(&self) -> bool {
        self.tables().files.is_empty()
    }
}

impl Locks for LockTable {
    fn conflict(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
        wanted: FileLock,
    ) -> Answer<Option<FileLock>> {
        let found = self.with(inode, |file| file.held.conflict(owner, wanted));
        Box::pin(async move { Ok(found) })
    }

    fn lock(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
        wanted: FileLock,
        waits: bool,
    ) -> Answer<()> {
        if waits {
            return self.wait(inode, owner, wanted, true);
        }
        let taken = self.with(inode, |file| file.lock(owner, wanted));
        Box::pin(async move { taken })
    }

    fn unlock(&self, inode: InodeNumber, owner: LockOwner, range: LockRange) -> Answer<()> {
        self.with(inode, |file| {
            file.held.cut(owner, range);
            file.wake_all();
        });
        Box::pin(async { Ok(()) })
    }
}

/// A lock that is waited for: each time others' locks change it is tried again.
struct Waiting {
    table: LockTable,
    inode: InodeNumber,
    owner: LockOwner,
    wanted: FileLock,
    /// Whether it is taken when it is free.
    takes: bool,
    /// Its number among the tasks that wait.
    number: u64,
}

impl Future for Waiting {
    type Output = Result<(), Errno>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.table.with(self.inode, |file| {
            let outcome = match self.takes {
                true => file.lock(self.owner, self.wanted),
                false => match file.held.conflict(self.owner, self.wanted) {
                    Some(_) => Err(Errno::EAGAIN),
                    None => Ok(()),
                },
            };
            match outcome {
                Err(Errno::EAGAIN) => {
                    file.waiting.insert(self.number, context.waker().clone());
                    Poll::Pending
                }
                outcome => Poll::Ready(outcome),
            }
        })
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.table.with(self.inode, |file| file.waiting.remove(&self.number));
    }
}
