//! Locks of `fcntl(2)` and `flock(2)` that the file system keeps ([`Locks`]).
//!
//! The kernel names a lock owner with each request: for `F_SETLK` a process (its table of open
//! files), for `F_OFD_SETLK` and `flock` an open file. fuser does not say which of the three it is (it drops the
//! flag `FUSE_LK_FLOCK`), so `flock` and `fcntl` locks exclude each other, as over NFS, but for those of one process
//! through one open file: there, two owners are the process and the open file, and their locks of different
//! kinds. (A process that takes `F_SETLK` and `F_OFD_SETLK` locks through one open file does not keep itself out either.)
//!
//! **Giving up.** A process gives up its locks on a file with any `close(2)` of it, of which the
//! kernel tells by FLUSH; an open file gives up its own with its last close, RELEASE, and the
//! kernel forgets to say so for `F_OFD_SETLK`. So this module remembers who locked what, through
//! which handle. Locks left when a mount ends without RELEASEs (`umount -f`) are given up then.
//!
//! **Interrupts.** A process that waits for a lock and gets a signal asks by INTERRUPT for the
//! answer EINTR. fuser 0.18 does not pass that on: it refuses it, and the kernel sends none ever
//! after. But then the signal stays pending until the request is answered, and `/proc/PID/status`
//! shows it. So a lock that is waited for is dropped, and EINTR answered, when the thread that
//! waits is seen to have a signal that it does not block. (The thread waits for the answer, so its
//! number is its own.) A signal for the process as a whole counts when it is seen
//! twice: another thread may be about to take it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_vfs::{Errno, FileLock, Handle, InodeNumber, LockKind, LockOwner, LockRange, Locks};
use futures_util::future::{Either, select};

use super::thread_status::ThreadStatus;

/// The types of `struct flock` (fcntl(2)).
const F_RDLCK: i32 = 0;
const F_WRLCK: i32 = 1;
const F_UNLCK: i32 = 2;

/// How often a thread that waits is looked at. A guess: people notice 100 ms, and a look takes 20
/// µs.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What a lock request asks for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wanted {
    Lock(FileLock),
    Unlock(LockRange),
}

impl Wanted {
    /// What a request through an open file asks for.
    pub(super) fn decode(
        handle: Handle,
        kind: i32,
        (first, last): (u64, u64),
        pid: u32,
    ) -> Result<Wanted, Errno> {
        if last < first {
            return Err(Errno::EINVAL);
        }
        let range = LockRange { first, last };
        let lock = |kind| Wanted::Lock(FileLock { kind, range, pid, through: Some(handle) });
        match kind {
            F_RDLCK => Ok(lock(LockKind::Shared)),
            F_WRLCK => Ok(lock(LockKind::Exclusive)),
            F_UNLCK => Ok(Wanted::Unlock(range)),
            _ => Err(Errno::EINVAL),
        }
    }
}

/// The type by which `struct flock` says what a lock is.
pub(super) fn type_of(lock: Option<FileLock>) -> i32 {
    match lock.map(|lock| lock.kind) {
        Some(LockKind::Shared) => F_RDLCK,
        Some(LockKind::Exclusive) => F_WRLCK,
        None => F_UNLCK,
    }
}

/// The owner of a lock, and the open file it was taken through.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Holder {
    pub(super) inode: InodeNumber,
    pub(super) handle: Handle,
    pub(super) owner: LockOwner,
}

/// The file system's locks, and who of this mount may hold some.
pub(super) struct MountLocks {
    locks: Arc<dyn Locks>,
    holders: Mutex<BTreeSet<Holder>>,
}

impl MountLocks {
    pub(super) fn new(locks: Arc<dyn Locks>) -> MountLocks {
        MountLocks { locks, holders: Mutex::default() }
    }

    fn holders(&self) -> MutexGuard<'_, BTreeSet<Holder>> {
        self.holders.lock().expect("no holder of this lock panics")
    }

    /// The lock that keeps `holder` from having what it wants.
    pub(super) async fn conflict(
        &self,
        holder: Holder,
        wanted: Wanted,
    ) -> Result<Option<FileLock>, Errno> {
        match wanted {
            Wanted::Lock(lock) => self.locks.conflict(holder.inode, holder.owner, lock).await,
            Wanted::Unlock(_) => Err(Errno::EINVAL),
        }
    }

    /// Locks or unlocks; a lock that another keeps away is waited for until `waiter` gets a signal,
    /// if there is one.
    pub(super) async fn set(
        &self,
        holder: Holder,
        wanted: Wanted,
        waiter: Option<u32>,
    ) -> Result<(), Errno> {
        let lock = match wanted {
            Wanted::Unlock(range) => {
                return self.locks.unlock(holder.inode, holder.owner, range).await;
            }
            Wanted::Lock(lock) => lock,
        };
        self.holders().insert(holder);
        let Holder { inode, owner, .. } = holder;
        let Some(thread) = waiter else {
            return self.locks.lock(inode, owner, lock, false).await;
        };
        let taken = self.locks.lock(inode, owner, lock, true);
        match select(taken, Box::pin(signalled(thread))).await {
            Either::Left((taken, _)) => taken,
            Either::Right(((), _)) => Err(Errno::EINTR),
        }
    }

    /// Gives up what a process holds of a file, when it closes it.
    pub(super) async fn end_owner(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
    ) -> Result<(), Errno> {
        self.give_up(|holder| holder.inode == inode && holder.owner == owner).await
    }

    /// Gives up what is held through an open file, when it ends.
    pub(super) async fn end_open(&self, inode: InodeNumber, handle: Handle) -> Result<(), Errno> {
        self.give_up(|holder| holder.inode == inode && holder.handle == handle).await
    }

    /// Gives up all, when the mount ends.
    pub(super) async fn end_all(&self) -> Result<(), Errno> {
        self.give_up(|_| true).await
    }

    async fn give_up(&self, ends: impl Fn(&Holder) -> bool) -> Result<(), Errno> {
        let ended: Vec<Holder> = {
            let mut holders = self.holders();
            let ended = holders.iter().copied().filter(&ends).collect();
            holders.retain(|holder| !ends(holder));
            ended
        };
        let mut given_up = Ok(());
        for Holder { inode, owner, .. } in ended {
            // One that cannot bring to the ring what was written under it leaves no other lock behind.
            given_up = given_up.and(self.locks.unlock(inode, owner, LockRange::WHOLE).await);
        }
        given_up
    }
}

/// Ends when `thread` has a signal to take.
async fn signalled(thread: u32) {
    let mut before = Signals::None;
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let now = ThreadStatus::of(thread).map_or(Signals::None, |status| signals(&status));
        match (before, now) {
            (_, Signals::OfThread) | (Signals::OfProcess, Signals::OfProcess) => return,
            (_, now) => before = now,
        }
    }
}

/// Signals that wait to be taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Signals {
    None,
    /// By any thread of a process.
    OfProcess,
    OfThread,
}

/// The signals that a thread has not taken yet. Ignored ones never wait.
fn signals(status: &ThreadStatus) -> Signals {
    let mask = |name: &str| {
        status.field(name).and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0)
    };
    let taken = !mask("SigBlk");
    if mask("SigPnd") & taken != 0 {
        Signals::OfThread
    } else if mask("ShdPnd") & taken != 0 {
        Signals::OfProcess
    } else {
        Signals::None
    }
}

#[cfg(test)]
mod tests {
    use atoll_vfs::LockTable;
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn signals_that_are_blocked_do_not_interrupt() {
        let status = |own: &str, shared: &str, blocked: &str| {
            let text =
                format!("SigQ:\t0/1\nSigPnd:\t{own}\nShdPnd:\t{shared}\nSigBlk:\t{blocked}\n");
            ThreadStatus::from_text(&text)
        };
        let (none, interrupt) = ("0000000000000000", "0000000000000002");
        assert_eq!(signals(&status(none, none, none)), Signals::None);
        assert_eq!(signals(&status(interrupt, none, none)), Signals::OfThread);
        assert_eq!(signals(&status(none, interrupt, none)), Signals::OfProcess);
        assert_eq!(signals(&status(interrupt, interrupt, interrupt)), Signals::None);
    }

    #[test]
    fn a_process_loses_its_locks_by_any_close_and_an_open_file_by_its_own() {
        let table = LockTable::default();
        let locks = MountLocks::new(Arc::new(table.clone()));
        let inode = InodeNumber(5);
        let holder =
            |handle, owner| Holder { inode, handle: Handle(handle), owner: LockOwner(owner) };
        let take = |holder: Holder, first| {
            let wanted = Wanted::decode(holder.handle, F_WRLCK, (first, first), 1).unwrap();
            locks.set(holder, wanted, None).now_or_never().unwrap().unwrap();
        };
        let is_locked = |byte| {
            let wanted = Wanted::decode(Handle(99), F_RDLCK, (byte, byte), 1).unwrap();
            let conflict = locks.conflict(holder(99, 99), wanted).now_or_never().unwrap();
            conflict.unwrap().is_some()
        };
        take(holder(1, 10), 0);
        take(holder(2, 20), 1);
        take(holder(2, 21), 2);
        take(holder(3, 10), 3);
        locks.end_owner(inode, LockOwner(10)).now_or_never().unwrap().unwrap();
        assert_eq!([0, 1, 2, 3].map(is_locked), [false, true, true, false]);
        locks.end_open(inode, Handle(2)).now_or_never().unwrap().unwrap();
        assert_eq!([1, 2].map(is_locked), [false, false]);
        take(holder(4, 40), 4);
        locks.end_all().now_or_never().unwrap().unwrap();
        assert!(table.is_empty());
        assert!(locks.holders().is_empty());
    }
}
