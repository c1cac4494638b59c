//! Locks, where the file system keeps them.

use std::sync::Arc;
use std::time::Duration;

use crate::kit::probe::{During, Outcome, Probe, Stop, ensure, fail, refused, same};
use crate::kit::{Check, checks};
use crate::{
    Errno, FileLock, Handle, InodeNumber, LockKind, LockOwner, LockRange, Locks, MAX_OFFSET,
};

pub(super) const CHECKS: &[Check] = checks![
    an_exclusive_lock_keeps_others_from_its_bytes,
    shared_locks_exclude_exclusive_ones_alone,
    unlocking_the_middle_leaves_both_ends,
    locks_that_touch_become_one,
    a_lock_is_upgraded_and_downgraded_in_place,
    locks_of_one_file_leave_others_alone,
    a_waiting_lock_is_taken_when_the_other_goes,
    a_downgrade_lets_waiting_readers_in,
    an_interrupted_wait_leaves_no_lock,
    a_process_does_not_keep_itself_out_by_the_other_kind_of_lock,
];

/// How long a lock is given to be taken that must not be. Too short, and a fault is missed now
/// and then; nothing fails that should not.
const NOT_TAKEN_WITHIN: Duration = Duration::from_millis(50);

const SHARED: LockKind = LockKind::Shared;
const EXCLUSIVE: LockKind = LockKind::Exclusive;

/// Three owners.
const A: LockOwner = LockOwner(1);
const B: LockOwner = LockOwner(u64::MAX);
const C: LockOwner = LockOwner(3);

/// A file and the locks on it.
struct Locked {
    locks: Arc<dyn Locks>,
    inode: InodeNumber,
    probe: Probe,
}

fn lock(kind: LockKind, first: u64, last: u64) -> FileLock {
    FileLock { kind, range: LockRange { first, last }, pid: 77, through: None }
}

impl Locked {
    async fn new(probe: Probe) -> Outcome<Locked> {
        let Some(locks) = probe.fs.locks() else {
            return Err(Stop::Skipped("it leaves locks to the front end"));
        };
        let inode = probe.inode("file").await?;
        Ok(Locked { locks, inode, probe })
    }

    async fn take(&self, owner: LockOwner, wanted: FileLock) -> Outcome {
        let taken = self.locks.lock(self.inode, owner, wanted, false).await;
        taken.during(format_args!("{owner:?} takes {wanted:?}"))
    }

    async fn is_refused(&self, owner: LockOwner, wanted: FileLock) -> Outcome {
        let taken = self.locks.lock(self.inode, owner, wanted, false).await;
        refused(format_args!("{owner:?} takes {wanted:?}"), taken, &[Errno::EAGAIN])
    }

    async fn unlock(&self, owner: LockOwner, first: u64, last: u64) -> Outcome {
        let range = LockRange { first, last };
        self.locks.unlock(self.inode, owner, range).await.during("unlock")
    }

    /// The lock that keeps `owner` from these bytes.
    async fn conflict(
        &self,
        owner: LockOwner,
        kind: LockKind,
        first: u64,
        last: u64,
    ) -> Outcome<Option<FileLock>> {
        self.locks.conflict(self.inode, owner, lock(kind, first, last)).await.during("conflict")
    }
}

async fn an_exclusive_lock_keeps_others_from_its_bytes(probe: Probe) -> Outcome {
    let file = Locked::new(probe).await?;
    same("an unlocked file", file.conflict(A, EXCLUSIVE, 0, MAX_OFFSET).await?, None)?;
    let held = lock(EXCLUSIVE, 100, 199);
    file.take(A, held).await?;
    for (first, last) in [(0, 100), (100, 100), (150, 160), (199, 500), (0, MAX_OFFSET)] {
        for kind in [SHARED, EXCLUSIVE] {
            file.is_refused(B, lock(kind, first, last)).await?;
            same("conflict", file.conflict(B, kind, first, last).await?, Some(held))?;
        }
        same("with itself", file.conflict(A, EXCLUSIVE, first, last).await?, None)?;
    }
    file.take(B, lock(EXCLUSIVE, 0, 99)).await?;
    file.take(B, lock(EXCLUSIVE, 200, MAX_OFFSET)).await?;
    file.unlock(A, 0, MAX_OFFSET).await?;
    file.take(B, held).await?;
    file.unlock(B, 0, MAX_OFFSET).await
}

async fn shared_locks_exclude_exclusive_ones_alone(probe: Probe) -> Outcome {
    let file = Locked::new(probe).await?;
    for owner in [A, B] {
        file.take(owner, lock(SHARED, 0, 9)).await?;
    }
    file.is_refused(C, lock(EXCLUSIVE, 9, 9)).await?;
    file.is_refused(A, lock(EXCLUSIVE, 0, 0)).await?;
    file.unlock(B, 0, MAX_OFFSET).await?;
    file.take(A, lock(EXCLUSIVE, 0, 0)).await?;
    file.unlock(A, 0, MAX_OFFSET).await
}

async fn unlocking_the_middle_leaves_both_ends(probe: Probe) -> Outcome {
    let file = Locked::new(probe).await?;
    file.take(A, lock(EXCLUSIVE, 0, MAX_OFFSET)).await?;
    file.unlock(A, 100, 199).await?;
    same("left", file.conflict(B, SHARED, 0, 150).await?, Some(lock(EXCLUSIVE, 0, 99)))?;
    let right = lock(EXCLUSIVE, 200, MAX_OFFSET);
    same("right", file.conflict(B, SHARED, 150, 200).await?, Some(right))?;
    file.take(B, lock(EXCLUSIVE, 100, 199)).await?;
    // An owner may give up a lock that it does not hold.
    file.unlock(A, 120, 130).await?;
    file.is_refused(A, lock(SHARED, 150, 150)).await?;
    file.unlock(A, 0, MAX_OFFSET).await?;
    file.unlock(B, 0, MAX_OFFSET).await
}

async fn locks_that_touch_become_one(probe: Probe) -> Outcome {
    let file = Locked::new(probe).await?;
    for (first, last) in [(0, 9), (20, 29), (10, 19), (25, 35)] {
        file.take(A, lock(EXCLUSIVE, first, last)).await?;
    }
    same("one lock", file.conflict(B, SHARED, 5, 5).await?, Some(lock(EXCLUSIVE, 0, 35)))?;
    // One of another kind does not join.
    file.take(A, lock(SHARED, 36, 40)).await?;
    same("still", file.conflict(B, EXCLUSIVE, 5, 5).await?, Some(lock(EXCLUSIVE, 0, 35)))?;
    file.take(B, lock(SHARED, 36, 40)).await?;
    file.unlock(A, 0, MAX_OFFSET).await?;
    file.unlock(B, 0, MAX_OFFSET).await
}

async fn a_lock_is_upgraded_and_downgraded_in_place(probe: Probe) -> Outcome {
    let file = Locked::new(probe).await?;
    file.take(A, lock(SHARED, 0, 99)).await?;
    file.take(A, lock(EXCLUSIVE, 40, 59)).await?;
    file.take(B, lock(SHARED, 0, 39)).await?;
    file.is_refused(B, lock(SHARED, 0, 40)).await?;
    file.take(A, lock(SHARED, 40, 59)).await?;
    file.take(B, lock(SHARED, 0, 99)).await?;
    // An upgrade that is refused leaves what was held.
    file.is_refused(A, lock(EXCLUSIVE, 0, 99)).await?;
    file.unlock(B, 0, MAX_OFFSET).await?;
    same("held", file.conflict(B, EXCLUSIVE, 0, 99).await?, Some(lock(SHARED, 0, 99)))?;
    file.unlock(A, 0, MAX_OFFSET).await
}

async fn locks_of_one_file_leave_others_alone(probe: Probe) -> Outcome {
    let other = probe.inode("directory").await?;
    let file = Locked::new(probe).await?;
    file.take(A, lock(EXCLUSIVE, 0, MAX_OFFSET)).await?;
    let wanted = lock(EXCLUSIVE, 0, MAX_OFFSET);
    file.locks.lock(other, B, wanted, false).await.during("a lock on another file")?;
    file.locks.unlock(other, B, LockRange::WHOLE).await.during("unlock")?;
    file.unlock(A, 0, MAX_OFFSET).await
}

impl Locked {
    /// That a lock waits until `then` has been done, and is taken afterwards.
    async fn waits_until(
        &self,
        owner: LockOwner,
        wanted: FileLock,
        then: impl Future<Output = Outcome>,
    ) -> Outcome {
        let mut waiting = self.locks.lock(self.inode, owner, wanted, true);
        let env = &*self.probe.env;
        match atoll_env::timeout(env, NOT_TAKEN_WITHIN, &mut waiting).await {
            Ok(taken) => return fail(format!("{wanted:?} was answered at once: {taken:?}")),
            Err(_) => then.await?,
        }
        waiting.await.during(format_args!("{owner:?} waited for {wanted:?}"))
    }
}

async fn a_waiting_lock_is_taken_when_the_other_goes(probe: Probe) -> Outcome {
    let file = Locked::new(probe).await?;
    file.take(A, lock(EXCLUSIVE, 0, 9)).await?;
    file.take(B, lock(SHARED, 20, 29)).await?;
    let both_go = async {
        file.unlock(A, 0, 9).await?;
        file.unlock(B, 20, 29).await
    };
    file.waits_until(C, lock(EXCLUSIVE, 5, 25), both_go).await?;
    file.is_refused(A, lock(SHARED, 5, 5)).await?;
    // One that waits takes what is free at once.
    let free = file.locks.lock(file.inode, A, lock(SHARED, 40, 50), true).await;
    free.during("a free lock")?;
    file.unlock(A, 0, MAX_OFFSET).await?;
    file.unlock(C, 0, MAX_OFFSET).await
}

async fn a_downgrade_lets_waiting_readers_in(probe: Probe) -> Outcome {
    let file = Locked::new(probe).await?;
    file.take(A, lock(EXCLUSIVE, 0, 9)).await?;
    let downgrade = file.take(A, lock(SHARED, 0, 9));
    file.waits_until(B, lock(SHARED, 0, 9), downgrade).await?;
    file.unlock(A, 0, MAX_OFFSET).await?;
    file.unlock(B, 0, MAX_OFFSET).await
}

async fn an_interrupted_wait_leaves_no_lock(probe: Probe) -> Outcome {
    let file = Locked::new(probe).await?;
    file.take(A, lock(EXCLUSIVE, 0, 9)).await?;
    let mut waiting = file.locks.lock(file.inode, B, lock(EXCLUSIVE, 0, 9), true);
    let answered = atoll_env::timeout(&*file.probe.env, NOT_TAKEN_WITHIN, &mut waiting).await;
    ensure(answered.is_err(), || "it is held by another".to_owned())?;
    drop(waiting);
    file.unlock(A, 0, MAX_OFFSET).await?;
    atoll_env::sleep(&*file.probe.env, NOT_TAKEN_WITHIN).await;
    same("nothing is locked", file.conflict(C, EXCLUSIVE, 0, MAX_OFFSET).await?, None)
}

async fn a_process_does_not_keep_itself_out_by_the_other_kind_of_lock(probe: Probe) -> Outcome {
    let file = Locked::new(probe).await?;
    // Mail programs take both, since they do not know which one a file system honours.
    let through = |handle| FileLock { through: Some(Handle(handle)), ..lock(EXCLUSIVE, 0, 9) };
    file.take(A, through(5)).await?;
    file.take(B, through(5)).await?;
    // Another open file of the process, and another process that has inherited the first, are others.
    file.is_refused(C, through(6)).await?;
    file.is_refused(C, FileLock { pid: 78, ..through(5) }).await?;
    file.is_refused(C, lock(EXCLUSIVE, 0, 9)).await?;
    // Each kind excludes others by itself.
    file.unlock(A, 0, MAX_OFFSET).await?;
    file.is_refused(C, through(6)).await?;
    file.unlock(B, 0, MAX_OFFSET).await?;
    file.take(C, through(6)).await?;
    file.unlock(C, 0, MAX_OFFSET).await
}
