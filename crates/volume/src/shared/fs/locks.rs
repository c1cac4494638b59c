//! Locks of `fcntl(2)` and `flock(2)` that hold across mounts, and exclusive creation (Pastis §7 names
//! both as future work).
//!
//! **What is locked.** Between mounts a whole file: a mount that has an exclusive lock on any byte of a
//! file holds the file's lock lease exclusively, mounts with shared locks share it. Programs of one
//! mount lock ranges of bytes, in a [`LockTable`]. So programs of two mounts that lock different bytes
//! of one file wait for each other; a program cannot tell that from a slower machine.
//!
//! **What a lock shows.** Before a mount gives up a lease, or shares it, all that was changed in it is on the ring:
//! contents, names, names that were removed, and inodes that have lost their last names. Left out are files that other
//! exclusive locks of this mount protect. Once a lease is granted, nothing that was read before is shown: names,
//! attributes and files that are opened are read again when they are used, and files that are open at once, for all
//! who have them open; the kernel has dropped its pages of these before the lock is answered. So what was done under a lock
//! of one mount is seen under the next lock of any other, whichever files it concerns.
//!
//! **A file without a name yet** gets it before it is locked, under the name's lease: else each mount would lock a file of its own. If
//! another mount has given the name to a file meanwhile, the open file becomes that one; what was written to it before
//! is kept beside, as `NAME~USER~TIME`.
//!
//! **A file that is removed while it is locked here** loses its name at once and its inode when the lease is given up,
//! with all that was written ([`removals`](super::removals)). So its next holder reads that, and that no link is left.
//!
//! **Losing a lock.** A lease that cannot be renewed, on the smaller side of a partition or while the
//! machine sleeps, is lost after 14 seconds, one before another mount can have it. Then
//!
//! - the locks of all programs of this mount on that file are gone;
//! - changes of the file that are not on the ring are dropped, by whichever program they were made. What one of these had
//!   overwritten and not read counts as not read again. A version that is on its way then is shown when the ring has it, though
//!   the call that has waited for it fails;
//! - writing, flushing and closing through files by which they were taken fails with `EIO`, until a lock
//!   is taken through the same file anew. Reading goes on.
//!
//! **How the version of the inode fences.** A version that is written under a lock is based on the one
//! that was read when the lock was granted, and nothing is signed once the lease is lost. A version that
//! was signed in time may still arrive late, after the next holder has written. Then neither covers the
//! other, since neither writer had seen the other's: the replicas join them, and nobody's contents are
//! replaced. Of two contents of one height those that were signed later are shown, which are the next
//! holder's; the late ones appear as `NAME~USER~TIME`.
//!
//! **Exclusive creation** of a name takes the lock lease of the directory and the name, reads the newest
//! directory under it, and gives it back when the name is there. Where locks are refused, `O_EXCL` fails
//! with `ENOLCK`; making directories, links and other names, and renaming with `RENAME_NOREPLACE`, goes on without the
//! lease there, and two names that were made at once appear side by side.
//!
//! **Moving a directory** to another one takes the volume's lease of directory moves, and fails with `ENOLCK` where locks
//! are refused.
//!
//! **Who may lock.** Every reader can take a shared lock. An exclusive lock fails with `EACCES` if the user may not write the
//! file, and with `EROFS` if the mount has no key. A member who is shut out loses his exclusive locks, as said above,
//! within some seconds.
//!
//! Not covered: changes that a program makes without a lock. Two mounts that each share a file's lease
//! and want it for themselves keep each other out until one of them gives it up, as two programs of one
//! machine do; the wait is not noticed as a deadlock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_dht::{LockMode, LockRefusal};
use atoll_env::{sleep, timeout};
use atoll_key::{BlockHash, Key};
use atoll_vfs::{
    Answer, Errno, FileLock, Handle, InodeNumber, Invalidation, LockKind, LockOwner, LockRange,
    LockTable, Locks,
};
use bytes::Bytes;
use futures_util::future::{Either, join, join_all, select};
use futures_util::stream::{self, StreamExt};

use super::removals::Removal;
use super::{Freshness, Shared};
use crate::mount::CALL_LIMIT;
use crate::shared::fault::Fault;
use crate::shared::inode::InodeKey;
use crate::shared::lock_lease::Held;
use crate::shared::sealing::Sealing;
use crate::shared::table::{ROOT, View};

/// The pauses between attempts to get a lock that another mount has: random up to the first, then up
/// to twice as long each time until the last. Guesses: some round trips, and what people notice.
const FIRST_PAUSE: Duration = Duration::from_millis(40);
const LAST_PAUSE: Duration = Duration::from_millis(640);

/// Nothing is signed under a lease that lasts no longer than this: the clocks of two machines, by which
/// concurrent contents of one height are ordered, differ by less. A guess.
const SIGN_WITHIN: Duration = Duration::from_secs(2);

/// Open files that are read at once when a lock is granted.
const REFRESHED_AT_ONCE: usize = 32;

/// How long the kernel may take to drop pages. A guess: it waits for reads under way.
const KERNEL_LIMIT: Duration = Duration::from_secs(10);

/// The locks of one mount.
pub(super) struct FileLocks {
    /// Those of programs, among themselves.
    table: LockTable,
    state: Mutex<State>,
    /// This mount among the holders of file leases.
    holder: [u8; 16],
}

#[derive(Default)]
struct State {
    files: BTreeMap<u64, LockedFile>,
    /// Open files through which a lock was taken that is lost.
    lost: BTreeSet<u64>,
}

#[derive(Default)]
struct LockedFile {
    lease: Option<Held>,
    /// Held while the lease is taken, changed or given up.
    turn: Arc<futures_util::lock::Mutex<()>>,
    /// Open files through which locks were taken since the lease is here.
    handles: BTreeSet<u64>,
    /// Its last name was removed here while it was locked.
    removal: Option<Removal>,
    /// How many calls are about this file.
    users: usize,
}

/// Why a lock was not taken.
enum NotYet {
    /// A program of this mount has one.
    Here,
    /// Another mount has the lease.
    Elsewhere,
    /// The nodes that keep the lease are new: it can be had soon.
    Settling,
    Failed(Fault),
}

impl From<Fault> for NotYet {
    fn from(fault: Fault) -> NotYet {
        NotYet::Failed(fault)
    }
}

impl From<LockRefusal> for NotYet {
    fn from(refusal: LockRefusal) -> NotYet {
        match refusal {
            LockRefusal::Held => NotYet::Elsewhere,
            LockRefusal::Settling => NotYet::Settling,
            LockRefusal::NoMajority(_) => NotYet::Failed(no_lock(&refusal)),
        }
    }
}

fn no_lock(refusal: &LockRefusal) -> Fault {
    Fault::new(Errno::ENOLCK, refusal)
}

fn mode_of(kind: LockKind) -> LockMode {
    match kind {
        LockKind::Shared => LockMode::Shared,
        LockKind::Exclusive => LockMode::Exclusive,
    }
}

/// The key of a file's lock: that of its inode, so that the nodes which hold the inode keep the lock,
/// and 32 other bytes.
pub(super) fn file_key(inode: InodeKey) -> Key {
    lock_key(inode, BlockHash::of(b"atoll v1 file lock"))
}

/// The key of a name's lock: that of its directory, and 32 other bytes.
fn name_key(directory: InodeKey, name: &[u8], sealing: &Sealing) -> Key {
    lock_key(directory, sealing.hash_name(&[b"atoll v1 name lock", name].concat()))
}

fn lock_key(inode: InodeKey, what: BlockHash) -> Key {
    let mut key = [0; 64];
    let (place, rest) = key.split_at_mut(32);
    place.copy_from_slice(&inode.0);
    rest.copy_from_slice(&what.0);
    Key(key)
}

impl FileLocks {
    pub(super) fn new(holder: [u8; 16]) -> FileLocks {
        FileLocks { table: LockTable::default(), state: Mutex::default(), holder }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }
}

/// A call about the locks of one file: while there is one, the file's entry stays.
struct Using {
    shared: Arc<Shared>,
    number: u64,
    turn: Arc<futures_util::lock::Mutex<()>>,
}

impl Using {
    fn of(shared: &Arc<Shared>, number: u64) -> Using {
        let mut state = shared.locks.state();
        let file = state.files.entry(number).or_default();
        file.users += 1;
        Using { shared: shared.clone(), number, turn: file.turn.clone() }
    }
}

impl Drop for Using {
    fn drop(&mut self) {
        let mut state = self.shared.locks.state();
        let Some(file) = state.files.get_mut(&self.number) else { return };
        file.users -= 1;
        if file.users > 0 || self.shared.locks.table.held(InodeNumber(self.number)).is_some() {
            return;
        }
        if file.lease.is_none() {
            state.files.remove(&self.number);
            return;
        }
        // A call was given up between the lease and the lock.
        let (shared, number) = (self.shared.clone(), self.number);
        let env = self.shared.env.clone();
        drop(state);
        env.spawn(Box::pin(async move {
            if let Err(fault) = shared.give_up(number).await {
                tracing::warn!("a lock that nobody waits for is given up: {fault:?}");
            }
        }));
    }
}

impl Shared {
    /// Works on the entry of a file that has locks.
    fn on_locked<T>(&self, number: u64, work: impl FnOnce(&mut LockedFile) -> T) -> Option<T> {
        self.locks.state().files.get_mut(&number).map(work)
    }

    /// How long this mount still has a file's lease; `None` if it has none.
    fn lease_left(&self, number: u64) -> Option<Duration> {
        self.on_locked(number, |file| file.lease.as_ref().map(Held::left)).flatten()
    }

    /// Whether this mount has a file's lease.
    pub(super) fn has_lock(&self, number: u64) -> bool {
        self.lease_left(number).is_some()
    }

    /// Takes a lock, waiting for others if `waits`.
    async fn lock(
        self: Arc<Self>,
        number: u64,
        owner: LockOwner,
        wanted: FileLock,
        waits: bool,
    ) -> Result<(), Fault> {
        let inode = InodeNumber(number);
        let settling_until = self.env.now() + CALL_LIMIT;
        let mut pause = FIRST_PAUSE;
        loop {
            let refused = match self.try_lock(number, owner, wanted).await {
                Ok(()) => return Ok(()),
                Err(refused) => refused,
            };
            match refused {
                NotYet::Failed(fault) => return Err(fault),
                NotYet::Settling if self.env.now() >= settling_until => {
                    return Err(no_lock(&LockRefusal::Settling));
                }
                NotYet::Here | NotYet::Elsewhere if !waits => return Err(Errno::EAGAIN.into()),
                NotYet::Here => {
                    self.locks.table.until_free(inode, owner, wanted).await?;
                    continue;
                }
                NotYet::Elsewhere | NotYet::Settling => self.pause(&mut pause).await,
            }
        }
    }

    /// Waits for a random time, and longer the next time.
    async fn pause(&self, most: &mut Duration) {
        let most_ns = most.as_nanos() as u64;
        let pause = Duration::from_nanos(most_ns / 4 + self.env.random_u64() % most_ns);
        *most = (*most * 2).min(LAST_PAUSE);
        sleep(&*self.env, pause).await;
    }

    async fn try_lock(
        self: &Arc<Self>,
        number: u64,
        owner: LockOwner,
        wanted: FileLock,
    ) -> Result<(), NotYet> {
        let inode = InodeNumber(number);
        let using = Using::of(self, number);
        let _turn = using.turn.lock().await;
        self.note_loss(number);
        if self.locks.table.conflict(inode, owner, wanted).await.map_err(Fault::from)?.is_some() {
            return Err(NotYet::Here);
        }
        self.name_before_lock(number).await?;
        if wanted.kind == LockKind::Exclusive {
            self.check_may_lock(number, Freshness::Within(Duration::MAX)).await?;
        }
        self.lease_for(number, mode_of(wanted.kind)).await?;
        let taken = self.locks.table.lock(inode, owner, wanted, false).await;
        match taken {
            Err(Errno::EAGAIN) => return Err(NotYet::Here),
            taken => taken.map_err(Fault::from)?,
        }
        self.note_seen_under_lock(number, wanted);
        if let Some(Handle(handle)) = wanted.through {
            let mut state = self.locks.state();
            state.lost.remove(&handle);
            state.files.entry(number).or_default().handles.insert(handle);
        }
        Ok(())
    }

    /// Under a lock a program sees what was done before it: in the file that is locked, and in those that the process has open,
    /// which the lock may be for.
    fn note_seen_under_lock(&self, number: u64, lock: FileLock) {
        let mut table = self.table();
        lock.through.iter().for_each(|Handle(handle)| table.see(number, *handle));
        table.see_all_of(lock.pid);
    }

    /// A user who may not write a file does not keep others from it, as NFS servers have it. The lease itself tells of a
    /// file that is gone, or of a ring that is out of reach.
    async fn check_may_lock(&self, number: u64, freshness: Freshness) -> Result<(), Fault> {
        let key = self.table().node(number)?.key;
        let Ok(version) = self.inodes.read(key, freshness).await else {
            return Ok(());
        };
        match self.check_may_write(&version).await {
            Err(fault) if matches!(fault.errno, Errno::EACCES | Errno::EROFS) => Err(fault),
            _ => Ok(()),
        }
    }

    /// Gives up exclusive locks of files that the user may not write any more.
    pub(super) async fn check_locks(&self) {
        let held: Vec<u64> = {
            let state = self.locks.state();
            let is_exclusive = |file: &LockedFile| {
                file.lease.as_ref().is_some_and(|lease| lease.mode() == LockMode::Exclusive)
            };
            state.files.iter().filter(|(_, file)| is_exclusive(file)).map(|(n, _)| *n).collect()
        };
        let checks = held.into_iter().map(async |number| {
            if let Err(fault) = self.check_may_lock(number, Freshness::Newest).await {
                self.lose(number);
                tracing::info!("a lock is given up: {fault:?}");
            }
        });
        join_all(checks).await;
    }

    /// Has the lease of a file at least in this mode; if it was not here, what the file shows is the
    /// newest version then. The caller has the lease's turn.
    async fn lease_for(self: &Arc<Self>, number: u64, mode: LockMode) -> Result<(), NotYet> {
        let change = {
            let mut state = self.locks.state();
            let file = state.files.get_mut(&number).expect("it is in use");
            file.lease.as_ref().map(|lease| match lease.mode() >= mode {
                true => None,
                false => Some(lease.changing(mode)),
            })
        };
        match change {
            Some(None) => return Ok(()),
            Some(Some(change)) => return Ok(change.await?),
            None => {}
        }
        let key = self.table().node(number).map_err(Fault::from)?.key;
        let lease = self.lessee.take(file_key(key), self.locks.holder, mode).await?;
        self.on_locked(number, |file| file.lease = Some(lease));
        self.inodes.note_grant();
        let refreshed = match timeout(&*self.env, CALL_LIMIT, self.refresh(number)).await {
            Ok(refreshed) => refreshed,
            Err(_) => Err(Errno::ETIMEDOUT.into()),
        };
        if let Err(fault) = refreshed {
            self.on_locked(number, |file| file.lease = None);
            return Err(fault.into());
        }
        Ok(())
    }

    /// Shows what is open as it is now, and makes the kernel forget what it has of older versions: the file that was
    /// locked, and those that its lock may protect.
    async fn refresh(&self, number: u64) -> Result<(), Fault> {
        // What was written before the lock, without one.
        self.publish(number).await?;
        let others = self.table().open_unchanged();
        let others = others.into_iter().filter(|other| *other != number && !self.has_lock(*other));
        let others = stream::iter(others).map(async |other| {
            // As it was opened, if it cannot be read: what it shows then is told by the next call.
            if let Err(fault) = self.show_newest(other, Freshness::Newest).await {
                tracing::debug!("an open file is shown as it was: {fault:?}");
            }
        });
        let others = others.buffer_unordered(REFRESHED_AT_ONCE).collect::<()>();
        let (shown, ()) = join(self.show_newest(number, Freshness::Latest), others).await;
        // Not within their turns: the kernel waits for writes, and a write may wait for the turn.
        self.kernel_has_dropped().await;
        shown
    }

    /// Shows the newest version of a file to all who have it open, unless it has changes.
    async fn show_newest(&self, number: u64, freshness: Freshness) -> Result<(), Fault> {
        let (key, turn) = {
            let table = self.table();
            let node = table.node(number)?;
            if node.orphan.is_some() {
                return Ok(());
            }
            (node.key, node.turn.clone())
        };
        let _turn = turn.lock().await;
        let mut version = match self.inodes.read(key, freshness).await {
            Err(Fault { errno: Errno::ESTALE, .. }) => return self.show_removed(number, key).await,
            version => version?,
        };
        if freshness == Freshness::Latest && !version.merged.conflicts.is_empty() {
            version = self.read_without_conflicts(key).await?;
        }
        let mut table = self.table();
        let node = table.node(number)?;
        let is_clean = node.view.as_ref().is_some_and(|view| !view.has_changes());
        if is_clean {
            table.set_view(number, self.view(version)?)?;
            table.node_mut(number)?.is_nameless = false;
            self.drop_pages(&mut table, number)?;
        }
        Ok(())
    }

    /// Shows an open file that another mount has removed: without a link, and, if that mount had it locked, with its last
    /// contents. What is written to it all the same is kept beside. The caller has the file's turn.
    async fn show_removed(&self, number: u64, key: InodeKey) -> Result<(), Fault> {
        let left = self.inodes.left_by_removal(key).await.unwrap_or_else(|fault| {
            tracing::debug!("the last contents of a removed file cannot be read: {fault:?}");
            None
        });
        let mut table = self.table();
        let node = table.node_mut(number)?;
        node.is_nameless = true;
        let clean = node.view.as_ref().filter(|view| !view.has_changes());
        if let Some((inode, base)) = left.zip(clean.map(|view| view.version.clone())) {
            table.set_view(number, self.view_of(base, &inode)?)?;
            self.drop_pages(&mut table, number)?;
        }
        Ok(())
    }

    /// Has the kernel drop pages of a file that are not what its view stores.
    pub(super) fn drop_pages(
        &self,
        table: &mut crate::shared::table::Table,
        number: u64,
    ) -> Result<(), Errno> {
        let stored = table.on_view(number, |view| view.content.stored)?;
        let node = table.node_mut(number)?;
        if node.in_kernel != Some(stored) {
            node.in_kernel = Some(stored);
            let inode = InodeNumber(number);
            self.invalidations.push(Invalidation::Data { inode, bytes: 0..u64::MAX });
        }
        Ok(())
    }

    pub(super) async fn kernel_has_dropped(&self) {
        if timeout(&*self.env, KERNEL_LIMIT, self.invalidations.settled()).await.is_err() {
            tracing::warn!("the kernel does not drop what it has of a file that was locked");
        }
    }

    async fn unlock(
        self: Arc<Self>,
        number: u64,
        owner: LockOwner,
        range: LockRange,
    ) -> Result<(), Fault> {
        let inode = InodeNumber(number);
        if self.on_locked(number, |_| ()).is_none() {
            return Ok(self.locks.table.unlock(inode, owner, range).await?);
        }
        let using = Using::of(&self, number);
        let _turn = using.turn.lock().await;
        self.note_loss(number);
        self.locks.table.unlock(inode, owner, range).await?;
        self.yield_lease(number).await
    }

    /// Gives up a lease for which there is no lock.
    async fn give_up(self: &Arc<Self>, number: u64) -> Result<(), Fault> {
        let using = Using::of(self, number);
        let _turn = using.turn.lock().await;
        self.note_loss(number);
        self.yield_lease(number).await
    }

    /// Gives up what this mount has of a lease beyond what its programs' locks need. What was changed
    /// is on the ring before. The caller has the lease's turn.
    async fn yield_lease(&self, number: u64) -> Result<(), Fault> {
        let mode = self.on_locked(number, |file| file.lease.as_ref().map(Held::mode)).flatten();
        let Some(mode) = mode else { return Ok(()) };
        let needed = self.locks.table.held(InodeNumber(number)).map(mode_of);
        if needed.is_some_and(|needed| needed >= mode) {
            return Ok(());
        }
        if mode == LockMode::Exclusive
            && let Err(fault) = self.publish_within_lease(number).await
        {
            // Nobody else may see half of it, nor have it replace what is written next.
            self.lose(number);
            return Err(fault);
        }
        let settled = self.settle_within_lease(number).await;
        if let Some(removal) = self.on_locked(number, |file| file.removal.take()).flatten() {
            self.remove(removal).await;
        }
        let change = {
            let mut state = self.locks.state();
            let Some(file) = state.files.get_mut(&number) else { return Ok(()) };
            match needed {
                Some(needed) => file.lease.as_ref().map(|lease| lease.changing(needed)),
                None => {
                    file.handles.clear();
                    file.lease = None;
                    None
                }
            }
        };
        if let Some(change) = change {
            // Others wait a little longer if it fails.
            let _ = change.await;
        }
        settled
    }

    /// Brings to the ring what was changed here, while a file's lease lasts. If the ring takes some of it not now, the mount
    /// keeps and repeats that as always, and does not keep others from the lock for it.
    async fn settle_within_lease(&self, number: u64) -> Result<(), Fault> {
        let settled = async {
            let changed = self.table().changed(false);
            let changed = changed.into_iter().filter(|other| *other != number);
            let unlocked = changed.filter(|other| !self.has_alone(*other));
            let published = join_all(unlocked.map(|other| self.publish(other))).await;
            let is_fault = |published: &Result<(), Fault>| {
                // It was closed meanwhile.
                published.as_ref().is_err_and(|fault| fault.errno != Errno::ESTALE)
            };
            let removed = self.settle_removals().await;
            published.into_iter().find(is_fault).unwrap_or(Ok(())).and(removed)
        };
        match timeout(&*self.env, CALL_LIMIT, settled).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(fault)) => {
                self.note(Some(&fault));
                Err(fault)
            }
            Err(_) => Err(Errno::ETIMEDOUT.into()),
        }
    }

    /// Takes over the removal of an inode whose last name was removed, until its lock is given up; gives it back if it
    /// is not locked here.
    pub(super) fn remove_with_lock(&self, removal: Removal) -> Option<Removal> {
        let Some(number) = self.table().number_of(&removal.key) else { return Some(removal) };
        let mut removal = Some(removal);
        self.on_locked(number, |file| {
            if file.lease.as_ref().is_some_and(|lease| !lease.left().is_zero())
                && file.removal.is_none()
            {
                file.removal = removal.take();
                file.removal.iter_mut().for_each(|removal| removal.seen.was_locked = true);
            }
        });
        removal
    }

    /// Whether the last name of a file was removed here while it was locked.
    pub(super) fn is_removed_with_lock(&self, number: u64) -> bool {
        self.on_locked(number, |file| file.removal.is_some()).unwrap_or(false)
    }

    /// Gives a newborn its name, so that other mounts lock the same file.
    async fn name_before_lock(self: &Arc<Self>, number: u64) -> Result<(), Fault> {
        let Some(place) = self.table().node(number)?.birthplace.clone() else { return Ok(()) };
        let lock = name_key(place.directory, &place.name, self.inodes.reading.sealing());
        let named = async {
            let Some(lease) = self.lease_of(lock, true).await? else {
                return Err(Errno::ENOLCK.into());
            };
            self.inodes.note_grant();
            within(&lease, self.name_or_become(number, &place)).await
        };
        timeout(&*self.env, CALL_LIMIT, named).await.unwrap_or(Err(Errno::ETIMEDOUT.into()))
    }

    async fn publish_within_lease(&self, number: u64) -> Result<(), Fault> {
        loop {
            let left = self.lease_left(number).ok_or(Errno::EIO)?;
            if left.is_zero() {
                return Err(Fault::new(Errno::EIO, "the lock was lost"));
            }
            match timeout(&*self.env, left, self.publish(number)).await {
                // The file was closed and forgotten: nothing is left to write.
                Ok(Err(Fault { errno: Errno::ESTALE, .. })) => return Ok(()),
                Ok(published) => return published,
                // It may have been renewed meanwhile.
                Err(_) => {}
            }
        }
    }

    /// Notices that the lease of a file has run out.
    pub(super) fn note_loss(&self, number: u64) {
        if self.lease_left(number).is_some_and(|left| left.is_zero()) {
            self.lose(number);
            tracing::warn!("a lock was lost: the nodes that keep it could not be reached");
        }
    }

    /// Whether this mount has a file to itself, as far as it knows.
    pub(super) fn has_alone(&self, number: u64) -> bool {
        let mode = self.on_locked(number, |file| file.lease.as_ref().map(Held::mode)).flatten();
        mode == Some(LockMode::Exclusive)
    }

    /// Whether a version of a file may be signed now: not shortly before its lock runs out, nor after. A lock that the
    /// mount `had_alone` when the version's data was taken is given up only after that is on the ring, so if it is gone,
    /// it is lost.
    pub(super) fn check_signs(&self, number: u64, had_alone: bool) -> Result<(), Fault> {
        self.note_loss(number);
        match self.lease_left(number) {
            Some(left) if left < SIGN_WITHIN => {
                Err(Fault::new(Errno::EIO, "the lock is about to be lost"))
            }
            None if had_alone => Err(Fault::new(Errno::EIO, "the lock was lost")),
            _ => Ok(()),
        }
    }

    /// Takes the locks of a file from their owners, and drops what they have written since.
    fn lose(&self, number: u64) {
        let inode = InodeNumber(number);
        let removal = {
            let mut state = self.locks.state();
            let Some(file) = state.files.get_mut(&number) else { return };
            file.lease = None;
            let handles = std::mem::take(&mut file.handles);
            let removal = file.removal.take();
            state.lost.extend(handles);
            removal
        };
        removal.into_iter().for_each(|removal| self.wait_to_be_removed(removal));
        self.locks.table.clear(inode);
        let mut table = self.table();
        let changed = table.node(number).ok().and_then(|node| node.view.as_ref());
        let Some(changed) = changed.filter(|view| view.has_changes()) else { return };
        let (version, unseen_since) = (changed.version.clone(), changed.unseen_since.clone());
        let dropped: Result<View, Errno> = self.view(version.clone());
        if let Ok(view) = dropped
            && table.set_view(number, view).is_ok()
        {
            if let Ok(node) = table.node_mut(number) {
                node.in_kernel = None;
                node.drops += 1;
            }
            unseen_since.iter().for_each(|read| table.unsee(number, &version, read));
            let _ = self.drop_pages(&mut table, number);
        }
    }

    /// Refuses what would be written through an open file whose lock is lost.
    pub(super) fn check_lock(&self, number: u64, handle: u64) -> Result<(), Errno> {
        self.note_loss(number);
        match self.locks.state().lost.contains(&handle) {
            true => Err(Errno::EIO),
            false => Ok(()),
        }
    }

    /// An open file is closed.
    pub(super) fn forget_open_file(&self, handle: u64) {
        self.locks.state().lost.remove(&handle);
    }

    /// Makes a name while no other mount makes it. Without a majority `work` is done all the same,
    /// unless it `needs_lock`.
    pub(super) async fn exclusively<T>(
        &self,
        (parent, name): (u64, &Bytes),
        needs_lock: bool,
        work: impl Future<Output = Result<T, Fault>> + Send,
    ) -> Result<T, Fault> {
        let key = self.table().node(parent)?.key;
        let lock = name_key(key, name, self.inodes.reading.sealing());
        let Some(lease) = self.lease_of(lock, needs_lock).await? else { return work.await };
        // The name may be a lock: what its former owner has changed is seen from now on.
        self.inodes.note_grant();
        within(&lease, work).await
    }

    /// Moves a directory to another one while no other mount moves one.
    pub(super) async fn while_no_directory_moves<T>(
        &self,
        work: impl Future<Output = Result<T, Fault>> + Send,
    ) -> Result<T, Fault> {
        let root = self.table().node(ROOT)?.key;
        let lock = lock_key(root, BlockHash::of(b"atoll v1 directory moves lock"));
        match self.lease_of(lock, true).await? {
            Some(lease) => within(&lease, work).await,
            None => Err(Errno::ENOLCK.into()),
        }
    }

    /// Takes a lock lease exclusively, waiting for others; `None` without a majority, unless it `is_needed`.
    async fn lease_of(&self, lock: Key, is_needed: bool) -> Result<Option<Held>, Fault> {
        let mut pause = FIRST_PAUSE;
        loop {
            let holder = self.random_number();
            match self.lessee.take(lock, holder, LockMode::Exclusive).await {
                Ok(lease) => return Ok(Some(lease)),
                Err(LockRefusal::Held) => {}
                Err(LockRefusal::Settling) if is_needed => {}
                Err(refusal) if is_needed => return Err(no_lock(&refusal)),
                Err(_) => return Ok(None),
            }
            self.pause(&mut pause).await;
        }
    }
}

/// Does some work while a lease lasts.
async fn within<T>(
    lease: &Held,
    work: impl Future<Output = Result<T, Fault>> + Send,
) -> Result<T, Fault> {
    match select(Box::pin(work), Box::pin(lease.lost())).await {
        Either::Left((done, _)) => done,
        Either::Right(_) => Err(Fault::new(Errno::ETIMEDOUT, "the lock of a name ran out")),
    }
}

/// The locks of a shared volume.
pub(super) struct SharedLocks(pub(super) Arc<Shared>);

fn answer<T: Send + 'static>(
    work: impl Future<Output = Result<T, Fault>> + Send + 'static,
) -> Answer<T> {
    Box::pin(async move { work.await.map_err(Fault::logged) })
}

impl Locks for SharedLocks {
    fn conflict(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
        wanted: FileLock,
    ) -> Answer<Option<FileLock>> {
        let shared = self.0.clone();
        answer(async move {
            if let Some(found) = shared.locks.table.conflict(inode, owner, wanted).await? {
                return Ok(Some(found));
            }
            // Whether another mount has it shows when it is taken. Which one does not.
            match shared.clone().probe(inode.0, wanted).await {
                true => Ok(None),
                false => Ok(Some(FileLock { pid: 0, range: LockRange::WHOLE, ..wanted })),
            }
        })
    }

    fn lock(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
        wanted: FileLock,
        waits: bool,
    ) -> Answer<()> {
        answer(self.0.clone().lock(inode.0, owner, wanted, waits))
    }

    fn unlock(&self, inode: InodeNumber, owner: LockOwner, range: LockRange) -> Answer<()> {
        answer(self.0.clone().unlock(inode.0, owner, range))
    }
}

impl Shared {
    /// Whether no other mount's lock keeps this one from a lock. What cannot be told counts as free.
    async fn probe(self: Arc<Self>, number: u64, wanted: FileLock) -> bool {
        let using = Using::of(&self, number);
        let _turn = using.turn.lock().await;
        self.note_loss(number);
        let mode = mode_of(wanted.kind);
        let here = self.on_locked(number, |file| file.lease.as_ref().map(Held::mode)).flatten();
        if here.is_some_and(|here| here >= mode) {
            return true;
        }
        let Ok(key) = self.table().node(number).map(|node| node.key) else { return true };
        match here {
            // To ask for more would change what is held.
            Some(_) => true,
            None => {
                let asked = self.lessee.take(file_key(key), self.locks.holder, mode).await;
                !matches!(asked, Err(LockRefusal::Held))
            }
        }
    }
}
