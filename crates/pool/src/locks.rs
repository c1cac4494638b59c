//! The locks that clients of a pool hold on files (`fcntl(2)`, `flock(2)`), as every member of the epoch knows them. Plain state: it knows no
//! time and no network.
//!
//! A *lock session* is the time in which a client's locks are good: it begins with the client's first lock, and ends when the client ends
//! or is silent for too long. Its number is one of the pool, never given twice to a client, and says in every call under a lock which
//! session that lock is of. A session is *retired* first: nothing is done in it any more, while its locks still keep others out; then it
//! ends, and they are gone.
//!
//! The primary changes this state and hands each [`LockChange`] to the others, in order. A change says what is held after it, so
//! making it twice is harmless. A [`LockCopy`] is another member's: it follows one primary from a whole state on.
//!
//! **Invariants.** No two holders have locks that conflict. Every lock is one of a session that has not ended.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Included};

use atoll_key::PeerId;
use atoll_net::header::Capped;
use atoll_vfs::{
    Errno, FileLock, Handle, InodeNumber, LockKind, LockParty, LockRange, MAX_OFFSET, RangeLocks,
};
use bytes::Bytes;
use minicbor::{Decode, Encode};

use crate::calls::ClientKey;

/// The most locks of a pool, so that all of them fit into one message; and of the clients of one peer, so that no peer takes all. Guesses:
/// programs take few.
const MAX_LOCKS: usize = 8192;
const MAX_LOCKS_OF_PEER: usize = MAX_LOCKS / 4;
/// The most locks that one owner has on one file.
pub(crate) const MAX_LOCKS_OF_OWNER: usize = 1024;
/// The most lock sessions: as many as a server has sessions of clients.
const MAX_SESSIONS: usize = 1024;
/// A client that names a greater number as that of an earlier session gets no other: half of the numbers are left for the others then.
const MAX_NAMED_SESSION: LockSession = 1 << 63;

/// A number of a lock session. Those of a pool ascend.
pub(crate) type LockSession = u64;

/// Who holds a lock: an owner of a client, in a session.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
pub(crate) struct LockHolder {
    #[n(0)]
    pub(crate) client: ClientKey,
    #[n(1)]
    pub(crate) session: LockSession,
    /// As the client's front end names it.
    #[n(2)]
    pub(crate) owner: u64,
}

impl LockParty for LockHolder {
    fn is_of_same_front_end(&self, other: &LockHolder) -> bool {
        (self.client, self.session) == (other.client, other.session)
    }
}

/// A [`FileLock`] as bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct WireLock {
    #[n(0)]
    is_exclusive: bool,
    #[n(1)]
    first: u64,
    #[n(2)]
    last: u64,
    #[n(3)]
    pid: u32,
    /// The client's number of the open file.
    #[n(4)]
    through: Option<u64>,
}

impl From<FileLock> for WireLock {
    fn from(FileLock { kind, range, pid, through }: FileLock) -> WireLock {
        let is_exclusive = kind == LockKind::Exclusive;
        let through = through.map(|handle| handle.0);
        WireLock { is_exclusive, first: range.first, last: range.last, pid, through }
    }
}

impl TryFrom<WireLock> for FileLock {
    type Error = Errno;

    fn try_from(lock: WireLock) -> Result<FileLock, Errno> {
        let WireLock { is_exclusive, first, last, pid, through } = lock;
        if last < first || last > MAX_OFFSET {
            return Err(Errno::EINVAL);
        }
        let kind = if is_exclusive { LockKind::Exclusive } else { LockKind::Shared };
        let range = LockRange { first, last };
        Ok(FileLock { kind, range, pid, through: through.map(Handle) })
    }
}

/// All that an owner holds on a file.
pub(crate) type WireLocks = Capped<WireLock, MAX_LOCKS_OF_OWNER>;

/// One change of the locks.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum LockChange {
    /// A session began.
    #[n(0)]
    Began {
        #[n(0)]
        client: ClientKey,
        #[n(1)]
        session: LockSession,
    },
    /// A session ended, and its locks with it.
    #[n(1)]
    Ended {
        #[n(0)]
        client: ClientKey,
        #[n(1)]
        session: LockSession,
    },
    /// A holder has these locks on a file, and no others.
    #[n(2)]
    Held {
        #[n(0)]
        inode: u64,
        #[n(1)]
        holder: LockHolder,
        #[n(2)]
        locks: WireLocks,
    },
}

/// A change that no primary makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ImpossibleChange;

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct PoolLocks {
    files: BTreeMap<InodeNumber, RangeLocks<LockHolder>>,
    /// Those that have not ended, and whether each is retired.
    sessions: BTreeMap<(ClientKey, LockSession), bool>,
    last_session: LockSession,
    /// How many locks each client has that has some, and how many there are.
    of_clients: BTreeMap<ClientKey, usize>,
    count: usize,
}

impl PoolLocks {
    /// No locks; sessions that begin have greater numbers than this.
    pub(crate) fn after(last_session: LockSession) -> PoolLocks {
        PoolLocks { last_session, ..PoolLocks::default() }
    }

    // ---- sessions ----

    /// The session of a client in which something may be done.
    pub(crate) fn session_of(&self, client: ClientKey) -> Option<LockSession> {
        let all = self.sessions.range((client, 0)..=(client, u64::MAX));
        let (last, is_retired) = all.last()?;
        (!is_retired).then_some(last.1)
    }

    /// Begins a session of a client that has none, and to which those up to `over` are over. [`Errno::ENOLCK`] if there are too many.
    pub(crate) fn begin(
        &mut self,
        client: ClientKey,
        over: LockSession,
    ) -> Result<(LockSession, LockChange), Errno> {
        if self.sessions.len() >= MAX_SESSIONS || over > MAX_NAMED_SESSION {
            return Err(Errno::ENOLCK);
        }
        let session = self.last_session.max(over).checked_add(1).ok_or(Errno::ENOLCK)?;
        self.last_session = session;
        self.sessions.insert((client, session), false);
        Ok((session, LockChange::Began { client, session }))
    }

    /// Does nothing more in a session; false if it has ended, or ends already.
    pub(crate) fn retire(&mut self, client: ClientKey, session: LockSession) -> bool {
        match self.sessions.get_mut(&(client, session)) {
            Some(is_retired) => !std::mem::replace(is_retired, true),
            None => false,
        }
    }

    /// Ends a session. Returns the files that had locks of it.
    pub(crate) fn end(
        &mut self,
        client: ClientKey,
        session: LockSession,
    ) -> (LockChange, Vec<InodeNumber>) {
        self.sessions.remove(&(client, session));
        let (mut freed, mut gone) = (Vec::new(), 0);
        self.files.retain(|inode, locks| {
            let before = locks.len();
            locks.retain(|holder| (holder.client, holder.session) != (client, session));
            if locks.len() < before {
                freed.push(*inode);
                gone += before - locks.len();
            }
            !locks.is_empty()
        });
        self.recount(client, gone, 0);
        (LockChange::Ended { client, session }, freed)
    }

    /// All sessions.
    pub(crate) fn sessions(&self) -> impl Iterator<Item = (ClientKey, LockSession)> {
        self.sessions.keys().copied()
    }

    /// How many sessions there are, and how many locks.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.sessions.len(), self.count)
    }

    /// The number of the last session.
    pub(crate) fn last_session(&self) -> LockSession {
        self.last_session
    }

    // ---- locks ----

    /// A lock that keeps `holder` from having `wanted`.
    pub(crate) fn conflict(
        &self,
        inode: InodeNumber,
        holder: LockHolder,
        wanted: FileLock,
    ) -> Option<FileLock> {
        self.files.get(&inode)?.conflict(holder, wanted)
    }

    /// Takes a lock: [`Errno::EAGAIN`] if another holder's conflicts, [`Errno::ENOLCK`] if there are too many. No change if it
    /// is held already.
    pub(crate) fn lock(
        &mut self,
        inode: InodeNumber,
        holder: LockHolder,
        wanted: FileLock,
    ) -> Result<Option<LockChange>, Errno> {
        if self.conflict(inode, holder, wanted).is_some() {
            return Err(Errno::EAGAIN);
        }
        let mut after = RangeLocks::default();
        after.replace(holder, self.of(inode, holder));
        after.lock(holder, wanted)?;
        self.hold(inode, holder, &after)
    }

    /// Gives up all that a holder has on a file but these locks. [`Errno::EINVAL`] if it does not have them; [`Errno::ENOLCK`]
    /// if they are too many. An exclusive lock may become a shared one.
    pub(crate) fn keep(
        &mut self,
        inode: InodeNumber,
        holder: LockHolder,
        kept: &[FileLock],
    ) -> Result<Option<LockChange>, Errno> {
        let held = self.of(inode, holder);
        let mut after = RangeLocks::default();
        for lock in kept {
            // Locks of one process do not conflict: it must be the same one as before, too.
            if !is_within(*lock, &held) || self.conflict(inode, holder, *lock).is_some() {
                return Err(Errno::EINVAL);
            }
            after.lock(holder, *lock)?;
        }
        self.hold(inode, holder, &after)
    }

    fn of(&self, inode: InodeNumber, holder: LockHolder) -> Vec<FileLock> {
        self.files.get(&inode).map_or_else(Vec::new, |locks| locks.of(holder).collect())
    }

    /// A holder has these locks from now on, which do not conflict with others'.
    fn hold(
        &mut self,
        inode: InodeNumber,
        holder: LockHolder,
        after: &RangeLocks<LockHolder>,
    ) -> Result<Option<LockChange>, Errno> {
        let before = self.of(inode, holder);
        let mut after: Vec<FileLock> = after.of(holder).collect();
        after.sort_unstable_by_key(|lock| lock.range.first);
        if before == after {
            return Ok(None);
        }
        if after.len() > before.len() {
            let more = after.len() - before.len();
            if after.len() > MAX_LOCKS_OF_OWNER
                || self.locks_of_peer(holder.client) + more > MAX_LOCKS_OF_PEER
                || self.count + more > MAX_LOCKS
            {
                return Err(Errno::ENOLCK);
            }
        }
        let locks = after.iter().copied().map(WireLock::from).collect::<Vec<_>>().into();
        self.set(inode, holder, after);
        Ok(Some(LockChange::Held { inode: inode.0, holder, locks }))
    }

    fn set(&mut self, inode: InodeNumber, holder: LockHolder, after: Vec<FileLock>) {
        let locks = self.files.entry(inode).or_default();
        let before = locks.len();
        locks.replace(holder, after);
        let now = locks.len();
        if locks.is_empty() {
            self.files.remove(&inode);
        }
        self.recount(holder.client, before, now);
    }

    /// A client has so many locks fewer, and so many more.
    fn recount(&mut self, client: ClientKey, fewer: usize, more: usize) {
        self.count = self.count + more - fewer;
        let of_client = self.of_clients.entry(client).or_default();
        *of_client = *of_client + more - fewer;
        if *of_client == 0 {
            self.of_clients.remove(&client);
        }
    }

    fn locks_of_peer(&self, client: ClientKey) -> usize {
        let (low, high) = client.of_same_peer();
        self.of_clients.range(low..=high).map(|(_, count)| count).sum()
    }

    // ---- copies ----

    /// Changes that make all of this of nothing.
    fn whole(&self) -> Vec<LockChange> {
        let began =
            |(client, session): (ClientKey, LockSession)| LockChange::Began { client, session };
        let mut all: Vec<LockChange> = self.sessions().map(began).collect();
        for (inode, locks) in &self.files {
            let mut holders: Vec<LockHolder> = locks.iter().map(|(holder, _)| *holder).collect();
            holders.sort_unstable();
            holders.dedup();
            for holder in holders {
                let held: Vec<WireLock> = locks.of(holder).map(WireLock::from).collect();
                all.push(LockChange::Held { inode: inode.0, holder, locks: held.into() });
            }
        }
        all
    }

    /// Makes a change that was made before: by another member, or here.
    pub(crate) fn apply(&mut self, change: LockChange) -> Result<(), ImpossibleChange> {
        match change {
            LockChange::Began { client, session } => {
                self.sessions.insert((client, session), false);
                self.last_session = self.last_session.max(session);
            }
            LockChange::Ended { client, session } => {
                self.end(client, session);
            }
            LockChange::Held { inode, holder, locks } => {
                let is_of_session = self.sessions.contains_key(&(holder.client, holder.session));
                let locks: Result<Vec<FileLock>, Errno> =
                    locks.0.into_iter().map(FileLock::try_from).collect();
                match locks {
                    Ok(locks) if is_of_session => self.set(InodeNumber(inode), holder, locks),
                    _ => return Err(ImpossibleChange),
                }
            }
        }
        Ok(())
    }

    fn is_within_limits(&self) -> bool {
        self.sessions.len() <= MAX_SESSIONS && self.count <= MAX_LOCKS
    }

    /// Sessions of clients that have begun another one since.
    pub(crate) fn superseded(&self) -> Vec<(ClientKey, LockSession)> {
        let is_older = |(client, session): &(ClientKey, LockSession)| {
            let later = (Excluded((*client, *session)), Included((*client, u64::MAX)));
            self.sessions.range(later).next().is_some()
        };
        self.sessions().filter(is_older).collect()
    }

    /// # Panics
    /// If an invariant of the module does not hold.
    #[cfg(test)]
    fn check_invariants(&self) {
        for locks in self.files.values() {
            assert!(!locks.is_empty());
            for (holder, lock) in locks.iter() {
                assert_eq!(locks.conflict(*holder, *lock), None, "{holder:?} {lock:?}");
                assert!(self.sessions.contains_key(&(holder.client, holder.session)));
            }
        }
        assert!(self.sessions.keys().all(|(_, session)| *session <= self.last_session));
        let mut of_clients = BTreeMap::new();
        for (holder, _) in self.files.values().flat_map(RangeLocks::iter) {
            *of_clients.entry(holder.client).or_default() += 1;
        }
        assert_eq!(self.count, of_clients.values().sum::<usize>());
        assert_eq!(self.of_clients, of_clients);
    }
}

/// Whether a holder has a lock, or a stronger one, by those that it has.
fn is_within(lock: FileLock, held: &[FileLock]) -> bool {
    let mut missing = vec![lock.range];
    for held in held {
        if held.kind == LockKind::Shared && lock.kind == LockKind::Exclusive {
            continue;
        }
        let (first, last) = (held.range.first, held.range.last);
        let rest = |range: LockRange| {
            let before = (range.first < first)
                .then(|| LockRange { last: range.last.min(first - 1), ..range });
            let after = (range.last > last)
                .then(|| LockRange { first: range.first.max(last + 1), ..range });
            before.into_iter().chain(after)
        };
        missing = missing.into_iter().flat_map(rest).collect();
    }
    missing.is_empty()
}

/// A whole state as bytes.
pub(crate) fn encode_whole(locks: &PoolLocks) -> Bytes {
    encode(&locks.whole())
}

/// Changes as bytes.
pub(crate) fn encode(changes: &[LockChange]) -> Bytes {
    Bytes::from(minicbor::to_vec(changes).expect("a vector takes everything"))
}

/// Reads changes; none for bytes that are none, or that have something after them.
pub(crate) fn decode(bytes: &[u8]) -> Option<Vec<LockChange>> {
    let mut decoder = minicbor::Decoder::new(bytes);
    let changes: Vec<LockChange> = decoder.decode().ok()?;
    (decoder.position() == bytes.len()).then_some(changes)
}

/// Two sessions, one with locks.
pub(crate) fn example() -> PoolLocks {
    let mut locks = PoolLocks::default();
    let client = |number| ClientKey::new(&PeerId([1; 32]), &[number; 16]);
    for number in 0..2 {
        locks.begin(client(number), 0).expect("there are few");
    }
    let holder = LockHolder { client: client(1), session: 2, owner: 9 };
    for (kind, first) in [(LockKind::Shared, 0), (LockKind::Exclusive, 1 << 40)] {
        let range = LockRange { first, last: first + 9 };
        let wanted = FileLock { kind, range, pid: 5, through: Some(Handle(3)) };
        locks.lock(InodeNumber(7), holder, wanted).expect("it is free");
    }
    locks
}

/// Where changes that a primary hands to others belong.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct LockPlace {
    /// Counts what is handed, from one primary to the next.
    #[n(0)]
    pub(crate) sequence: u64,
    /// The last session that has begun.
    #[n(1)]
    pub(crate) last_session: LockSession,
    /// They are all that there is; else those since the place before.
    #[n(2)]
    pub(crate) is_whole: bool,
}

/// What became of changes that were handed to a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CopyOutcome {
    /// It has them.
    Made,
    /// It lacks changes before them, or a whole state of this primary.
    TooEarly,
}

/// A copy of the primary's locks.
#[derive(Debug, Default)]
pub(crate) struct LockCopy {
    locks: PoolLocks,
    sequence: u64,
    /// The run of the primary that it follows.
    primary: Option<u64>,
}

impl LockCopy {
    /// Takes changes of a primary's run.
    pub(crate) fn take(
        &mut self,
        primary: u64,
        place: LockPlace,
        changes: &[u8],
    ) -> Result<CopyOutcome, ImpossibleChange> {
        let follows = self.primary == Some(primary);
        if follows && place.sequence <= self.sequence {
            return Ok(CopyOutcome::Made);
        }
        let is_next = follows && place.sequence.checked_sub(1) == Some(self.sequence);
        if !place.is_whole && !is_next {
            return Ok(CopyOutcome::TooEarly);
        }
        let changes = decode(changes).ok_or(ImpossibleChange)?;
        let mut after = if place.is_whole { PoolLocks::default() } else { self.locks.clone() };
        for change in changes {
            after.apply(change)?;
        }
        if !after.is_within_limits() {
            return Err(ImpossibleChange);
        }
        after.last_session = after.last_session.max(place.last_session);
        *self = LockCopy { locks: after, sequence: place.sequence, primary: Some(primary) };
        Ok(CopyOutcome::Made)
    }

    /// How many sessions there are, and how many locks.
    pub(crate) fn counts(&self) -> (usize, usize) {
        self.locks.counts()
    }

    /// The locks, and the sequence number that they have, for a member that becomes the primary of this epoch. One that was
    /// restarted knows none, and begins sessions with numbers that no primary before has reached.
    pub(crate) fn for_primary(self, epoch: u64) -> (PoolLocks, u64) {
        match self.primary {
            Some(_) => (self.locks, self.sequence),
            None => (PoolLocks::after(epoch << 32), 0),
        }
    }
}

#[cfg(test)]
mod tests;
