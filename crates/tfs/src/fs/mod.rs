//! The mounted file system: locks, transactions, life cycle.
//!
//! **One lock for metadata, none for waiting.** [`Ext2`] and what is open stand under one
//! mutex, held while memory is read and changed, and for reads of metadata that is not in
//! memory; never for data, a sync or a commit. Data is read and written under the file's own
//! lock, taken before the mutex.
//!
//! **The commit barrier.** Each call that changes something joins the running transaction: it
//! holds the barrier as a reader and says how many blocks of metadata it may change at most. A
//! commit holds it as the writer, for as long as it takes to fix the transaction. So a
//! transaction holds whole calls only, and the data that they wrote is in the device's hands when
//! the commit syncs it.
//!
//! **After an error of the device** in a commit it is not known what stands on the disk: the file
//! system refuses every change from then on, as a kernel does that remounts read-only.

mod access;
mod acls;
mod avoidance;
mod clean;
mod data;
mod held;
mod holes;
mod known;
mod mount;
mod names;
mod rename;
mod serve;
mod tagged;
mod transparent;
mod trouble;
mod upkeep;
mod usage;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock, RwLockReadGuard};
use std::time::Duration;

use atoll_env::{Env, Instant, Notify, Task};
use atoll_vfs::Errno;

use crate::device::Device;
use crate::ext2::{Ext2, Ext2Error, Records};
use crate::meta::{Commit, Journal};
use held::HeldInodes;
use names::Failure;
use transparent::OpenMaps;

pub use avoidance::Avoidance;
pub use clean::Cleaned;
pub(crate) use mount::read_records;
pub use mount::{MountError, MountOptions, MountReport, read_superblock};
pub(crate) use trouble::met;
pub use usage::Usage;

pub use crate::ext2::{AllocationObserver, Extent, GroupBitmaps, StateCounts, Verified};

/// How long the kernel may believe names and attributes: long, for this process alone changes
/// them.
const FOR_EVER: Duration = Duration::from_secs(3600);

/// And of transparent files, which may vanish.
const TRANSPARENT_TTL: Duration = Duration::from_secs(1);

/// Metadata blocks that changing an inode alone changes.
const INODE_BLOCKS: usize = 2;

/// A mounted file system. Clones are handles to the same one.
#[derive(Clone)]
pub struct Tfs {
    shared: Arc<Shared>,
}

/// Without what is in memory, which would be megabytes, and the key of tags.
impl std::fmt::Debug for Tfs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tfs").field("failure", &self.failure()).finish_non_exhaustive()
    }
}

struct Shared {
    env: Env,
    device: Arc<dyn Device>,
    journal: Journal,
    /// Readers: calls that change something. Writer: a commit that fixes its transaction.
    commit_barrier: RwLock<()>,
    /// Blocks that calls under way may still change.
    reserved_blocks: AtomicUsize,
    core: Mutex<Core>,
    /// Held by the commit under way.
    committing: Mutex<()>,
    /// Commits begun so far; only the commit under way changes it.
    commits_begun: AtomicU64,
    /// Why nothing can be changed any more.
    failed: OnceLock<String>,
    /// It is unmounted, or about to be.
    ended: AtomicBool,
    /// The running transaction fills up: committed beside the calls, it makes none wait.
    commit_due: Arc<Notify>,
    /// The task that commits, cleans and chooses avoided chunks.
    upkeep: OnceLock<Task>,
    read_only: bool,
    /// Reads renew access times.
    keeps_access_times: bool,
    block_bytes: u32,
}

/// What stands under the lock.
#[derive(Debug)]
struct Core {
    ext2: Ext2,
    held: HeldInodes,
    maps: OpenMaps,
    /// What the last cleaning on request removed.
    last_cleaned: Cleaned,
    /// Up to when the header counts the time that the histograms cover.
    chosen_at: Instant,
}

/// A call that changes something, as a part of the running transaction (jbd2's `handle_t`).
struct TransactionHandle<'a> {
    shared: &'a Shared,
    blocks: usize,
    _barrier: RwLockReadGuard<'a, ()>,
}

impl Drop for TransactionHandle<'_> {
    fn drop(&mut self) {
        self.shared.reserved_blocks.fetch_sub(self.blocks, Ordering::Relaxed);
    }
}

impl Shared {
    fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().expect("no holder of this lock panics")
    }

    /// For a call that changes at most `blocks` blocks of metadata; commits first if the running
    /// transaction has no room for them.
    fn join_transaction(&self, blocks: usize) -> Result<TransactionHandle<'_>, Errno> {
        self.join_transaction_if(blocks, || !self.ended.load(Ordering::SeqCst))
    }

    /// As [`Shared::join_transaction`], for an unmount's own work.
    fn join_transaction_at_end(&self, blocks: usize) -> Result<TransactionHandle<'_>, Errno> {
        self.join_transaction_if(blocks, || true)
    }

    fn join_transaction_if(
        &self,
        blocks: usize,
        open: impl Fn() -> bool,
    ) -> Result<TransactionHandle<'_>, Errno> {
        if self.read_only || self.failed.get().is_some() {
            return Err(Errno::EROFS);
        }
        // Or it would wait for ever.
        assert!(blocks <= self.journal.capacity(), "a call fits into a transaction");
        loop {
            let barrier = self.commit_barrier.read().expect("no holder of this lock panics");
            if !open() {
                return Err(Errno::EROFS);
            }
            let before = self.reserved_blocks.fetch_add(blocks, Ordering::Relaxed);
            let handle = TransactionHandle { shared: self, blocks, _barrier: barrier };
            let core = self.core();
            let meta = &core.ext2.meta;
            let (has_room, fills_up) = (meta.has_room(before + blocks), meta.fills_up());
            drop(core);
            if fills_up {
                self.commit_due.notify();
            }
            if has_room {
                return Ok(handle);
            }
            drop(handle);
            self.commit()?;
        }
    }

    /// Makes everything durable that calls have done by now. Those that ask during a commit share
    /// the next.
    fn commit(&self) -> Result<(), Errno> {
        // One that began already may have fixed its transaction before the call's changes.
        self.commit_up_to(self.commits_begun.load(Ordering::SeqCst) + 1)
    }

    /// Returns when so many commits have begun and ended.
    fn commit_up_to(&self, number: u64) -> Result<(), Errno> {
        if self.read_only {
            return Ok(());
        }
        let _one = self.committing.lock().expect("no holder of this lock panics");
        if self.failed.get().is_none() && self.commits_begun.load(Ordering::SeqCst) >= number {
            return Ok(());
        }
        let commit = {
            let _closed = self.commit_barrier.write().expect("no holder of this lock panics");
            self.fix_transaction()?
        };
        self.write_commit(&commit)
    }

    /// Commits, and does `work` before any other call changes anything: whatever was freed by
    /// then is free to it. All calls wait for as long as the commit takes.
    fn commit_and<T>(&self, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        let _one = self.committing.lock().expect("no holder of this lock panics");
        let _closed = self.commit_barrier.write().expect("no holder of this lock panics");
        if self.ended.load(Ordering::SeqCst) {
            return Err(Errno::EROFS.into());
        }
        let commit = self.fix_transaction()?;
        self.write_commit(&commit)?;
        work()
    }

    /// Fixes the running transaction; the caller holds the barrier as the writer.
    fn fix_transaction(&self) -> Result<Commit, Errno> {
        if self.failed.get().is_some() {
            return Err(Errno::EIO);
        }
        self.commits_begun.fetch_add(1, Ordering::SeqCst);
        let mut core = self.core();
        core.ext2.before_commit().map_err(|error| self.fail(&error))?;
        // Before the transaction, which may say that tags were compared in its epoch.
        if core.ext2.records().is_some_and(Records::is_header_due) {
            self.write_header(&mut core).map_err(|error| self.fail(&error))?;
        }
        Ok(core.ext2.meta.take())
    }

    fn write_commit(&self, commit: &Commit) -> Result<(), Errno> {
        match commit.write(&self.journal) {
            Ok(()) => {
                self.core().ext2.meta.finish();
                Ok(())
            }
            Err(error) => Err(self.fail(&error)),
        }
    }

    /// Ends all changes, for the reason given first.
    fn fail(&self, reason: &dyn std::fmt::Display) -> Errno {
        if self.failed.set(reason.to_string()).is_ok() {
            trouble::note(&format_args!("nothing is changed any more: {reason}"));
        }
        Errno::EIO
    }
}

impl Tfs {
    /// Makes everything durable that calls have done by now.
    ///
    /// # Errors
    /// `EIO` if the device failed; the file system then changes nothing any more.
    pub fn commit(&self) -> Result<(), Errno> {
        self.shared.commit()
    }

    /// The number that tells it from all other file systems (`uuid` in its superblock).
    pub fn uuid(&self) -> [u8; 16] {
        self.shared.core().ext2.superblock().uuid()
    }

    /// Why nothing can be changed any more, if that is so.
    pub fn failure(&self) -> Option<&str> {
        self.shared.failed.get().map(String::as_str)
    }
}

/// The error a caller of the file system sees.
fn errno(error: &Ext2Error) -> Errno {
    match error {
        Ext2Error::NoSpace | Ext2Error::NoSpaceYet | Ext2Error::NoInodes => Errno::ENOSPC,
        Ext2Error::Meta(_) | Ext2Error::Damaged(_) => {
            trouble::note(error);
            Errno::EIO
        }
    }
}

#[cfg(test)]
mod tests {
    use atoll_env::TokioRuntime;

    use super::*;
    use crate::device::FaultyDevice;
    use crate::mkfs::{MkfsOptions, mkfs};

    #[tokio::test]
    async fn a_commit_that_began_after_a_call_is_the_calls_own() {
        let device = FaultyDevice::new(16 << 20, 1);
        let shared: Arc<dyn Device> = Arc::new(device.clone());
        mkfs(&shared, &MkfsOptions::for_tests()).unwrap();
        let env = Arc::new(TokioRuntime::current());
        let quiet = MountOptions { background: false, ..MountOptions::default() };
        let (tfs, _) = Tfs::mount(env, Arc::new(device.clone()), &quiet).unwrap();
        let shared = &tfs.shared;
        // Two calls asked, and one of them committed.
        let number = shared.commits_begun.load(Ordering::SeqCst) + 1;
        shared.commit_up_to(number).unwrap();
        let operations = device.operations();
        shared.commit_up_to(number).unwrap();
        assert_eq!(device.operations(), operations, "the other finds it done");
        shared.commit().unwrap();
        assert!(device.operations() > operations, "who asks later waits for the next");
        // After an error no caller is told that it is durable.
        device.fail_writes(true);
        shared.commit_up_to(number + 2).unwrap_err();
        assert_eq!(shared.commit_up_to(number + 2), Err(Errno::EIO));
    }
}
