//! The locks that programs of this mount hold, as the server has them; and the open files whose locks are lost. Plain state.
//!
//! Locks are of one *lock session* ([`crate::locks`]). When it is over, all of them are lost at once: writing and locking through the
//! files by which they were taken fails until these are closed. Sessions have ascending numbers, so a late answer of one that is over is
//! known as such.

use std::collections::{BTreeMap, BTreeSet};

use atoll_vfs::{Errno, FileLock, Handle, InodeNumber, LockOwner, LockRange, RangeLocks};

use crate::locks::LockSession;

/// The locks on one file.
#[derive(Default, Debug)]
struct OwnLockedFile {
    locks: RangeLocks<LockOwner>,
    /// Open files through which an owner has taken locks since it holds some.
    through: BTreeSet<(LockOwner, u64)>,
}

/// What an owner holds of a file. It holds nothing of that in another session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct HeldLocks {
    pub(super) session: Option<LockSession>,
    pub(super) locks: Vec<FileLock>,
}

/// See the module.
#[derive(Default, Debug)]
pub(super) struct OwnLocks {
    session: Option<LockSession>,
    /// The write verifier of the servers that know the session.
    verifier: u64,
    /// Sessions up to this one are over.
    over: LockSession,
    files: BTreeMap<InodeNumber, OwnLockedFile>,
    /// Open files whose locks are lost.
    lost: BTreeSet<u64>,
    /// Owners that have lost their locks on a file, and were not told at an unlock.
    untold: BTreeSet<(InodeNumber, LockOwner)>,
    /// A task keeps the session alive.
    pub(super) is_kept: bool,
}

impl OwnLocks {
    /// The session in which locks are taken, if there is one.
    pub(super) fn session(&self) -> Option<LockSession> {
        self.session
    }

    /// Sessions up to this one are over.
    pub(super) fn over(&self) -> LockSession {
        self.over
    }

    /// The session, if it has to be kept: locks are held in it.
    pub(super) fn session_to_keep(&self) -> Option<LockSession> {
        self.session.filter(|_| !self.files.is_empty())
    }

    /// What an owner holds of a file, and in which session.
    pub(super) fn held(&self, inode: InodeNumber, owner: LockOwner) -> HeldLocks {
        HeldLocks { session: self.session, locks: self.of(inode, owner) }
    }

    fn of(&self, inode: InodeNumber, owner: LockOwner) -> Vec<FileLock> {
        self.files.get(&inode).map_or_else(Vec::new, |file| file.locks.of(owner).collect())
    }

    /// Whether locks may be taken through this open file: [`Errno::EIO`] if some were lost.
    pub(super) fn check(&self, through: Option<Handle>) -> Result<(), Errno> {
        match through {
            Some(Handle(handle)) if self.lost.contains(&handle) => Err(Errno::EIO),
            _ => Ok(()),
        }
    }

    /// The session of the locks under which a file is written to through an open file; through whichever it is that has locks, where
    /// the kernel writes pages back. [`Errno::EIO`] if they are lost.
    pub(super) fn under(
        &self,
        inode: InodeNumber,
        through: &[u64],
    ) -> Result<Option<LockSession>, Errno> {
        if through.iter().any(|handle| self.lost.contains(handle)) {
            return Err(Errno::EIO);
        }
        let is_locked =
            |file: &OwnLockedFile| file.through.iter().any(|(_, handle)| through.contains(handle));
        Ok(self.session.filter(|_| self.files.get(&inode).is_some_and(is_locked)))
    }

    /// A server with this write verifier has granted a lock in this session. [`Errno::EIO`] if that is over by now.
    pub(super) fn grant(
        &mut self,
        (session, verifier): (LockSession, u64),
        inode: InodeNumber,
        owner: LockOwner,
        lock: FileLock,
    ) -> Result<(), Errno> {
        let is_other = self.session.is_some_and(|current| current != session);
        if session <= self.over || is_other {
            return Err(Errno::EIO);
        }
        (self.session, self.verifier) = (Some(session), verifier);
        // By itself: that another owner has given up what it had may not have been answered yet.
        let mut locks = RangeLocks::default();
        locks.replace(owner, self.of(inode, owner));
        locks.lock(owner, lock)?;
        let file = self.files.entry(inode).or_default();
        file.locks.replace(owner, locks.of(owner));
        file.through.extend(lock.through.map(|Handle(handle)| (owner, handle)));
        self.untold.remove(&(inode, owner));
        Ok(())
    }

    /// An owner holds these locks on a file, and no others; none if their session is over.
    pub(super) fn keep(&mut self, inode: InodeNumber, owner: LockOwner, kept: HeldLocks) {
        let kept = if kept.session == self.session { kept.locks } else { Vec::new() };
        let Some(file) = self.files.get_mut(&inode) else { return };
        if kept.is_empty() {
            file.through.retain(|(other, _)| *other != owner);
        }
        file.locks.replace(owner, kept);
        if file.locks.is_empty() {
            self.files.remove(&inode);
        }
    }

    /// What an owner would hold after an unlock; none if it holds nothing of the range.
    pub(super) fn after_unlock(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
        range: LockRange,
    ) -> Option<HeldLocks> {
        let mut locks = RangeLocks::default();
        locks.replace(owner, self.of(inode, owner));
        let before = locks.clone();
        locks.cut(owner, range);
        let session = self.session;
        (locks != before).then(|| HeldLocks { session, locks: locks.of(owner).collect() })
    }

    /// An owner's locks on a file cannot be had as it believes: they are lost, and those of others stay.
    pub(super) fn lose_owner(&mut self, inode: InodeNumber, owner: LockOwner) {
        let Some(file) = self.files.get_mut(&inode) else { return };
        let its = file.through.iter().filter(|(other, _)| *other == owner);
        self.lost.extend(its.map(|(_, handle)| *handle));
        self.untold.insert((inode, owner));
        let session = self.session;
        self.keep(inode, owner, HeldLocks { session, locks: Vec::new() });
    }

    /// Whether an owner's locks on a file were lost. Says so once at the unlock of all of the file.
    pub(super) fn tell_lost(
        &mut self,
        inode: InodeNumber,
        owner: LockOwner,
        range: LockRange,
    ) -> bool {
        match range == LockRange::WHOLE {
            true => self.untold.remove(&(inode, owner)),
            false => self.untold.contains(&(inode, owner)),
        }
    }

    /// A session is over. Returns the files whose locks are lost by that.
    pub(super) fn lose(&mut self, session: LockSession) -> Vec<InodeNumber> {
        self.over = self.over.max(session);
        if self.session.is_none_or(|current| current > session) {
            return Vec::new();
        }
        self.session = None;
        let files = std::mem::take(&mut self.files);
        for (inode, file) in &files {
            self.untold.extend(file.locks.iter().map(|(owner, _)| (*inode, *owner)));
            self.lost.extend(file.through.iter().map(|(_, handle)| *handle));
        }
        files.into_keys().collect()
    }

    /// Calls are made by a server with this write verifier: one that was restarted knows no locks of before. Returns the files
    /// whose locks are lost by that.
    pub(super) fn note_verifier(&mut self, verifier: u64) -> Vec<InodeNumber> {
        match self.session {
            Some(session) if self.verifier != verifier => self.lose(session),
            _ => Vec::new(),
        }
    }

    /// An open file is closed.
    pub(super) fn close(&mut self, handle: u64) {
        self.lost.remove(&handle);
    }
}

#[cfg(test)]
mod tests {
    use atoll_vfs::LockKind;

    use super::*;

    const FILE: InodeNumber = InodeNumber(7);
    const ME: LockOwner = LockOwner(1);

    fn lock(first: u64, last: u64, through: u64) -> FileLock {
        let range = LockRange { first, last };
        FileLock { kind: LockKind::Exclusive, range, pid: 1, through: Some(Handle(through)) }
    }

    #[test]
    fn lost_locks_fail_what_is_done_through_their_files_until_these_are_closed() {
        let mut own = OwnLocks::default();
        own.grant((5, 100), FILE, ME, lock(0, 9, 3)).unwrap();
        own.grant((5, 100), FILE, ME, lock(10, 19, 4)).unwrap();
        assert_eq!(own.under(FILE, &[3]), Ok(Some(5)), "locks through two files are one");
        assert_eq!(own.under(FILE, &[8]), Ok(None), "without a lock");
        assert_eq!(own.under(InodeNumber(8), &[3]), Ok(None));
        assert_eq!(own.note_verifier(100), []);
        assert_eq!(own.note_verifier(101), [FILE]);
        assert_eq!(own.session(), None);
        for handle in [3, 4] {
            assert_eq!(own.under(FILE, &[handle]), Err(Errno::EIO));
            assert_eq!(own.check(Some(Handle(handle))), Err(Errno::EIO));
        }
        assert_eq!(own.under(FILE, &[8]), Ok(None));
        let range = LockRange { first: 0, last: 5 };
        assert!(own.tell_lost(FILE, ME, range) && own.tell_lost(FILE, ME, LockRange::WHOLE));
        assert!(!own.tell_lost(FILE, ME, LockRange::WHOLE));
        own.close(3);
        assert_eq!(own.check(Some(Handle(3))), Ok(()));
        assert_eq!(own.under(FILE, &[4]), Err(Errno::EIO));
    }

    #[test]
    fn late_answers_of_a_session_that_is_over_grant_nothing() {
        let mut own = OwnLocks::default();
        own.grant((5, 100), FILE, ME, lock(0, 9, 3)).unwrap();
        assert_eq!(own.lose(5), [FILE]);
        assert_eq!(own.lose(5), []);
        assert_eq!(own.grant((5, 100), FILE, ME, lock(0, 9, 4)), Err(Errno::EIO));
        own.grant((6, 100), FILE, ME, lock(0, 9, 4)).unwrap();
        assert_eq!(own.lose(5), [], "another is over");
        assert_eq!(own.under(FILE, &[4]), Ok(Some(6)));
        assert!(!own.tell_lost(FILE, ME, LockRange::WHOLE), "it has a lock again");
    }

    #[test]
    fn what_is_unlocked_is_no_longer_written_under_a_lock() {
        let mut own = OwnLocks::default();
        own.grant((5, 100), FILE, ME, lock(0, 9, 3)).unwrap();
        assert_eq!(own.after_unlock(FILE, ME, LockRange { first: 20, last: 30 }), None);
        let kept = own.after_unlock(FILE, ME, LockRange { first: 5, last: 30 }).unwrap();
        assert_eq!(kept.locks, [lock(0, 4, 3)]);
        own.keep(FILE, ME, kept);
        assert_eq!((own.under(FILE, &[3]), own.session_to_keep()), (Ok(Some(5)), Some(5)));
        let kept = own.after_unlock(FILE, ME, LockRange::WHOLE).unwrap();
        own.keep(FILE, ME, kept);
        assert_eq!((own.under(FILE, &[3]), own.session_to_keep()), (Ok(None), None));
        assert_eq!(own.session(), Some(5));
    }

    #[test]
    fn what_was_held_in_a_session_is_not_held_in_the_next() {
        let mut own = OwnLocks::default();
        own.grant((5, 100), FILE, ME, lock(0, 9, 3)).unwrap();
        let kept = own.after_unlock(FILE, ME, LockRange { first: 5, last: 9 }).unwrap();
        let held = own.held(FILE, ME);
        own.lose(5);
        let other = LockOwner(2);
        own.grant((6, 100), FILE, other, lock(20, 29, 4)).unwrap();
        for late in [kept, held] {
            assert_eq!(late.session, Some(5));
            own.keep(FILE, ME, late);
            assert_eq!(own.held(FILE, ME).locks, []);
        }
        assert_eq!(own.held(FILE, other).locks, [lock(20, 29, 4)]);
    }

    #[test]
    fn an_owner_that_has_not_what_it_believes_loses_its_locks_alone() {
        let mut own = OwnLocks::default();
        own.grant((5, 100), FILE, ME, lock(0, 9, 3)).unwrap();
        own.grant((5, 100), FILE, LockOwner(2), lock(20, 29, 4)).unwrap();
        own.lose_owner(FILE, ME);
        assert_eq!(own.under(FILE, &[3]), Err(Errno::EIO));
        assert_eq!(own.under(FILE, &[4]), Ok(Some(5)));
        assert!(own.tell_lost(FILE, ME, LockRange::WHOLE));
        assert_eq!((own.session(), own.held(FILE, ME).locks), (Some(5), Vec::new()));
    }
}
