//! The locks of a server's clients at work ([`crate::locks`]): who waits for one, when a session ends, and what the other members are told.
//!
//! **Granted** is a lock when all members of the epoch know it. Changes are handed to them in order, those that come while some are on
//! their way together.
//!
//! **Terms.** A client that the server has not heard of for [`TERM`] loses its locks. The terms of all begin anew when this server begins,
//! and when its process stood still.
//!
//! **Writes under a lock** say the session that the lock is of, and are refused when it is over. One that has begun is waited for before
//! the locks of its session go, and before its client's unlock of that file is done; so nothing that was written under a lock arrives
//! when another one has it.
//!
//! **Waiting.** A lock that is waited for is tried again when others go, in the order in which it was asked for. A client asks for
//! [`WAIT_LIMIT`] at a time, and keeps its place if it asks again within [`PLACE_LIMIT`]. No peer's clients have more than a part of
//! all places.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{Env, Instant, sleep, timeout};
use atoll_vfs::{Errno, FileLock, InodeNumber};
use bytes::Bytes;
use futures_channel::oneshot;

use super::wire::{FileCall, FileReply};
use crate::backups::{BackupLink, Backups, HandedItem};
use crate::calls::ClientKey;
use crate::disk::DiskResult;
use crate::locks::{self, LockChange, LockHolder, LockPlace, LockSession, PoolLocks, WireLock};
use crate::messages::{GroupSession, ItemKind};

/// A client that was not heard of for so long loses its locks (`POOL.md`; NFSv4 servers give 90 s, here a program on another machine waits).
pub(super) const TERM: Duration = Duration::from_secs(15);
/// How often silent clients are looked for.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A look that comes so late says that this process stood still.
const STOOD_STILL: Duration = Duration::from_secs(3);
/// How long a call waits for a lock. Such a call is numbered, and holds up the numbers of its client: no more than a few hundred calls are
/// made until it has its answer.
const WAIT_LIMIT: Duration = Duration::from_millis(200);
/// How long the place of one that does not ask again is kept.
const PLACE_LIMIT: Duration = Duration::from_secs(3);
/// The most locks that are waited for, and of them those of one peer's clients; guesses.
const MAX_WAITING: usize = 4096;
const MAX_WAITING_OF_PEER: usize = MAX_WAITING / 4;
/// The most changes that are handed at once: those of owners with few locks, and few of owners with many, fit into one message.
const MAX_HANDED: usize = 16;

/// What became of a call about locks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LockOutcome {
    /// It is done, in this session.
    Done(LockSession),
    /// The session that the call names is over.
    SessionOver,
}

/// A lock that is waited for.
struct WaitingLock {
    number: u64,
    inode: InodeNumber,
    holder: LockHolder,
    wanted: FileLock,
    /// The call that waits; else since when there was none.
    call: Result<oneshot::Sender<()>, Instant>,
}

/// A write that has begun under a lock.
#[derive(Clone, Copy, PartialEq, Eq)]
struct WriteUnderWay {
    client: ClientKey,
    session: LockSession,
    inode: InodeNumber,
}

#[derive(Default)]
struct KeeperState {
    locks: PoolLocks,
    /// The locks after the changes that are on their way, or were: those of `sequence`.
    sent: PoolLocks,
    /// Changes that are made here and not on their way to other members.
    unsent: Vec<LockChange>,
    /// How many changes were made, and how many of them all members have.
    made: u64,
    handed: u64,
    is_handing: bool,
    /// This member has stopped its work as the primary: nothing is handed any more.
    has_ended: bool,
    /// Counts what is handed.
    sequence: u64,
    /// Calls that wait until changes up to this one are handed.
    waiting_for_members: Vec<(u64, oneshot::Sender<()>)>,
    /// In the order in which they were first asked for.
    waiting: Vec<WaitingLock>,
    last_waiting: u64,
    /// When each client with a session was heard of.
    heard: BTreeMap<ClientKey, Instant>,
    writes: BTreeMap<u64, WriteUnderWay>,
    last_write: u64,
    /// Calls that wait for writes to end.
    waiting_for_writes: Vec<oneshot::Sender<()>>,
}

/// See the module.
pub(crate) struct LockKeeper {
    env: Env,
    /// Those that have to know the locks, too.
    others: Option<Arc<Backups>>,
    state: Mutex<KeeperState>,
    own: Weak<LockKeeper>,
}

impl LockKeeper {
    /// Keeps the locks of a server that is alone. It knows none of an earlier one's.
    pub(super) fn alone(env: &Env) -> Arc<LockKeeper> {
        LockKeeper::start(env, None, PoolLocks::default(), 0)
    }

    /// Keeps the locks of a primary that begins: those that the members know, of which `sequence` was handed last.
    pub(crate) fn of_primary(
        env: &Env,
        others: &Arc<Backups>,
        (locks, sequence): (PoolLocks, u64),
    ) -> Arc<LockKeeper> {
        LockKeeper::start(env, Some(others.clone()), locks, sequence)
    }

    fn start(
        env: &Env,
        others: Option<Arc<Backups>>,
        locks: PoolLocks,
        sequence: u64,
    ) -> Arc<LockKeeper> {
        let now = env.now();
        let heard = locks.sessions().map(|(client, _)| (client, now)).collect();
        let sent = locks.clone();
        let state = KeeperState { locks, sent, sequence, heard, ..KeeperState::default() };
        let keeper = Arc::new_cyclic(|own| LockKeeper {
            env: env.clone(),
            others,
            state: Mutex::new(state),
            own: own.clone(),
        });
        env.spawn(Box::pin(end_silent(env.clone(), Arc::downgrade(&keeper))));
        keeper
    }

    fn state(&self) -> MutexGuard<'_, KeeperState> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// How many sessions there are, and how many locks.
    pub(crate) fn counts(&self) -> (usize, usize) {
        self.state().locks.counts()
    }

    // ---- other members ----

    /// Gives all members all that there is, before anything is served.
    pub(crate) async fn hand_whole(&self) -> DiskResult<()> {
        let Some(others) = &self.others else { return Ok(()) };
        let (what, bytes) = self.whole();
        others.hand(what, bytes).await
    }

    /// Gives a member all that there is, which gets all changes from now on.
    pub(crate) async fn hand_whole_to(
        &self,
        link: &Arc<BackupLink>,
        session: GroupSession,
    ) -> DiskResult<()> {
        let (what, bytes) = self.whole();
        link.hand_over(session, HandedItem::new(what, bytes)).await
    }

    fn whole(&self) -> (ItemKind, Bytes) {
        let state = self.state();
        let (sequence, last_session) = (state.sequence, state.locks.last_session());
        let place = LockPlace { sequence, last_session, is_whole: true };
        (ItemKind::Locks(place), locks::encode_whole(&state.sent))
    }

    /// Notes a change that was made, for it to be handed to the others.
    fn note(&self, state: &mut KeeperState, change: LockChange) {
        if state.has_ended {
            return;
        }
        state.made += 1;
        if self.others.is_none() {
            state.handed = state.made;
            return;
        }
        state.unsent.push(change);
        if !std::mem::replace(&mut state.is_handing, true)
            && let Some(own) = self.own.upgrade()
        {
            self.env.spawn(Box::pin(async move { own.hand_unsent().await }));
        }
    }

    async fn hand_unsent(&self) {
        let Some(others) = &self.others else { return };
        loop {
            let (what, bytes, upto) = {
                let mut state = self.state();
                let state = &mut *state;
                if state.unsent.is_empty() {
                    state.is_handing = false;
                    return;
                }
                let count = state.unsent.len().min(MAX_HANDED);
                let changes: Vec<LockChange> = state.unsent.drain(..count).collect();
                for change in &changes {
                    let sent = state.sent.apply(change.clone());
                    sent.expect("a change that was made here can be made again");
                }
                state.sequence = state.sequence.saturating_add(1);
                let (sequence, last_session) = (state.sequence, state.locks.last_session());
                let place = LockPlace { sequence, last_session, is_whole: false };
                let upto = state.made - state.unsent.len() as u64;
                (ItemKind::Locks(place), locks::encode(&changes), upto)
            };
            let handed = others.hand(what, bytes).await;
            let mut state = self.state();
            if handed.is_err() {
                state.has_ended = true;
                state.unsent.clear();
                state.waiting_for_members.clear();
                return;
            }
            state.handed = upto;
            let waiting = std::mem::take(&mut state.waiting_for_members);
            for (number, call) in waiting {
                if number <= upto {
                    // Its caller may be gone.
                    let _ = call.send(());
                } else {
                    state.waiting_for_members.push((number, call));
                }
            }
        }
    }

    /// Waits until all members know all changes that were made by now. [`Errno::EIO`] if they do not get to know them.
    async fn all_know(&self) -> Result<(), Errno> {
        let known = {
            let mut state = self.state();
            if state.has_ended {
                return Err(Errno::EIO);
            }
            if state.handed >= state.made {
                return Ok(());
            }
            let (sender, known) = oneshot::channel();
            let made = state.made;
            state.waiting_for_members.push((made, sender));
            known
        };
        known.await.map_err(|oneshot::Canceled| Errno::EIO)
    }

    // ---- sessions ----

    /// A client has called.
    pub(super) fn hear(&self, client: ClientKey) {
        let now = self.env.now();
        if let Some(heard) = self.state().heard.get_mut(&client) {
            *heard = now;
        }
    }

    /// Whether a session is that of a client now.
    pub(super) fn is_session_of(&self, client: ClientKey, session: LockSession) -> bool {
        self.state().locks.session_of(client) == Some(session)
    }

    /// A client has ended.
    pub(super) fn end(&self, client: ClientKey) {
        let session = self.state().locks.session_of(client);
        if let Some(session) = session {
            self.end_later(client, session);
        }
    }

    fn end_later(&self, client: ClientKey, session: LockSession) {
        if let Some(own) = self.own.upgrade() {
            self.env.spawn(Box::pin(async move { own.end_session(client, session).await }));
        }
    }

    /// Ends a session: nothing begins in it any more, and its locks go when what has begun is done.
    async fn end_session(&self, client: ClientKey, session: LockSession) {
        {
            let mut state = self.state();
            if !state.locks.retire(client, session) {
                return;
            }
            tracing::debug!(session, "the locks of a client end");
            let is_its =
                |one: &WaitingLock| (one.holder.client, one.holder.session) == (client, session);
            state.waiting.retain(|one| !is_its(one));
        }
        let is_its = |write: &WriteUnderWay| (write.client, write.session) == (client, session);
        self.until_written(is_its).await;
        let mut state = self.state();
        let (change, freed) = state.locks.end(client, session);
        if !state.locks.sessions().any(|(other, _)| other == client) {
            state.heard.remove(&client);
        }
        self.note(&mut state, change);
        self.grant(&mut state, freed);
    }

    // ---- locks ----

    /// A lock that keeps an owner of a client from having `wanted`.
    pub(super) fn conflict(
        &self,
        client: ClientKey,
        inode: InodeNumber,
        owner: u64,
        wanted: FileLock,
    ) -> Option<FileLock> {
        let state = self.state();
        // No session has the number 0: such a holder is another one than all that have locks.
        let session = state.locks.session_of(client).unwrap_or(0);
        state.locks.conflict(inode, LockHolder { client, session, owner }, wanted)
    }

    /// Takes a lock in the client's session; without one in that which it has, or a new one. [`Errno::EAGAIN`] if another
    /// holder has one that conflicts, also after waiting for a while.
    ///
    /// To a client without a session those up to `over` are over: it was told so, by a server before this one, whose members may not
    /// have known it.
    pub(super) async fn lock(
        &self,
        (client, session, over): (ClientKey, Option<LockSession>, LockSession),
        inode: InodeNumber,
        owner: u64,
        wanted: FileLock,
        waits: bool,
    ) -> Result<LockOutcome, Errno> {
        let current = self.state().locks.session_of(client);
        if let (None, Some(current)) = (session, current)
            && current <= over
        {
            self.end_session(client, current).await;
        }
        let (session, waiting) = {
            let mut state = self.state();
            let state = &mut *state;
            let session = match (session, state.locks.session_of(client)) {
                (Some(said), current) if current != Some(said) => {
                    return Ok(LockOutcome::SessionOver);
                }
                (_, Some(current)) => current,
                (_, None) => {
                    let (session, change) = state.locks.begin(client, over)?;
                    state.heard.insert(client, self.env.now());
                    self.note(state, change);
                    session
                }
            };
            let holder = LockHolder { client, session, owner };
            match state.locks.lock(inode, holder, wanted) {
                Ok(change) => {
                    state.waiting.retain(|one| !one.is_for(inode, holder, wanted));
                    if let Some(change) = change {
                        self.note(state, change);
                        // An exclusive lock may have become a shared one.
                        self.grant(state, [inode]);
                    }
                    (session, None)
                }
                Err(Errno::EAGAIN) if waits => {
                    (session, Some(self.begin_wait(state, inode, holder, wanted)?))
                }
                Err(errno) => return Err(errno),
            }
        };
        if let Some((number, mut granted)) = waiting {
            let is_granted = match timeout(&*self.env, WAIT_LIMIT, &mut granted).await {
                Ok(granted) => granted.is_ok(),
                Err(_) => {
                    let mut state = self.state();
                    let now = self.env.now();
                    let still = state.waiting.iter_mut().find(|one| one.number == number);
                    still.into_iter().for_each(|one| one.call = Err(now));
                    matches!(granted.try_recv(), Ok(Some(())))
                }
            };
            if !is_granted {
                return Err(Errno::EAGAIN);
            }
        }
        self.all_know().await?;
        Ok(LockOutcome::Done(session))
    }

    /// Waits for a lock, at the place that it had if it was waited for before.
    fn begin_wait(
        &self,
        state: &mut KeeperState,
        inode: InodeNumber,
        holder: LockHolder,
        wanted: FileLock,
    ) -> Result<(u64, oneshot::Receiver<()>), Errno> {
        let now = self.env.now();
        let is_there = |one: &WaitingLock| match one.call {
            Ok(ref call) => !call.is_canceled(),
            Err(since) => now.since(since) < PLACE_LIMIT,
        };
        state.waiting.retain(is_there);
        let (sender, granted) = oneshot::channel();
        let had = state.waiting.iter_mut().find(|one| one.is_for(inode, holder, wanted));
        if let Some(place) = had {
            place.call = Ok(sender);
            return Ok((place.number, granted));
        }
        let (low, high) = holder.client.of_same_peer();
        let is_of_peer = |one: &&WaitingLock| (low..=high).contains(&one.holder.client);
        if state.waiting.len() >= MAX_WAITING
            || state.waiting.iter().filter(is_of_peer).count() >= MAX_WAITING_OF_PEER
        {
            return Err(Errno::ENOLCK);
        }
        state.last_waiting += 1;
        let number = state.last_waiting;
        state.waiting.push(WaitingLock { number, inode, holder, wanted, call: Ok(sender) });
        Ok((number, granted))
    }

    /// Gives those who wait for locks on these files what is free.
    fn grant(&self, state: &mut KeeperState, freed: impl IntoIterator<Item = InodeNumber>) {
        let freed: BTreeSet<InodeNumber> = freed.into_iter().collect();
        let mut at = 0;
        while let Some(one) = state.waiting.get(at) {
            let (inode, holder, wanted) = (one.inode, one.holder, one.wanted);
            let is_waited_for = one.call.as_ref().is_ok_and(|call| !call.is_canceled());
            if !freed.contains(&inode) || !is_waited_for {
                at += 1;
                continue;
            }
            match state.locks.lock(inode, holder, wanted) {
                Ok(change) => {
                    change.into_iter().for_each(|change| self.note(state, change));
                    if let Ok(call) = state.waiting.remove(at).call {
                        let _ = call.send(());
                    }
                }
                Err(_) => at += 1,
            }
        }
    }

    /// Ends the calls of an owner that wait for locks on a file, and gives up their places unless they are called for again.
    pub(super) fn stop_waiting(
        &self,
        client: ClientKey,
        inode: InodeNumber,
        owner: u64,
        keeps_place: bool,
    ) {
        let mut state = self.state();
        let is_its = |one: &WaitingLock| {
            (one.inode, one.holder.client, one.holder.owner) == (inode, client, owner)
        };
        state.waiting.retain(|one| keeps_place || !is_its(one));
        let now = self.env.now();
        for one in state.waiting.iter_mut().filter(|one| is_its(one) && one.call.is_ok()) {
            one.call = Err(now);
        }
    }

    /// Gives up all that an owner of a client has on a file but `kept`, when what was written under it is done.
    pub(super) async fn keep(
        &self,
        (client, session): (ClientKey, Option<LockSession>),
        inode: InodeNumber,
        owner: u64,
        kept: &[FileLock],
    ) -> Result<LockOutcome, Errno> {
        self.stop_waiting(client, inode, owner, true);
        let is_its = |write: &WriteUnderWay| write.client == client && write.inode == inode;
        self.until_written(is_its).await;
        let current = {
            let mut state = self.state();
            let current = state.locks.session_of(client);
            let current = match (session, current) {
                (None, None) => return Ok(LockOutcome::SessionOver),
                (Some(said), current) if current != Some(said) => {
                    return Ok(LockOutcome::SessionOver);
                }
                (_, current) => current.unwrap_or(0),
            };
            let holder = LockHolder { client, session: current, owner };
            if let Some(change) = state.locks.keep(inode, holder, kept)? {
                self.note(&mut state, change);
                self.grant(&mut state, [inode]);
            }
            current
        };
        self.all_know().await?;
        Ok(LockOutcome::Done(current))
    }

    // ---- writes under locks ----

    /// Begins a write under a lock of this session; none if that is over.
    pub(super) fn begin_write(
        &self,
        client: ClientKey,
        session: LockSession,
        inode: InodeNumber,
    ) -> Option<WriteUnderLock> {
        let keeper = self.own.upgrade()?;
        let mut state = self.state();
        if state.locks.session_of(client) != Some(session) {
            return None;
        }
        state.last_write += 1;
        let number = state.last_write;
        state.writes.insert(number, WriteUnderWay { client, session, inode });
        Some(WriteUnderLock { keeper, number })
    }

    /// Waits until those of these writes are done that have begun before.
    async fn until_written(&self, is_waited_for: impl Fn(&WriteUnderWay) -> bool) {
        let before = self.state().last_write;
        loop {
            let ended = {
                let mut state = self.state();
                if !state.writes.range(..=before).any(|(_, write)| is_waited_for(write)) {
                    return;
                }
                let (sender, ended) = oneshot::channel();
                state.waiting_for_writes.push(sender);
                ended
            };
            let _ = ended.await;
        }
    }
}

impl WaitingLock {
    fn is_for(&self, inode: InodeNumber, holder: LockHolder, wanted: FileLock) -> bool {
        (self.inode, self.holder, self.wanted) == (inode, holder, wanted)
    }
}

impl LockOutcome {
    fn reply(self, done: impl FnOnce(LockSession) -> FileReply) -> FileReply {
        match self {
            LockOutcome::Done(session) => done(session),
            LockOutcome::SessionOver => FileReply::LocksLost,
        }
    }
}

impl LockKeeper {
    /// Makes a call that is about locks.
    pub(super) async fn perform(
        &self,
        client: ClientKey,
        call: FileCall,
    ) -> Result<FileReply, Errno> {
        Ok(match call {
            FileCall::FindLock { inode, owner, wanted } => {
                let found = self.conflict(client, InodeNumber(inode), owner, wanted.try_into()?);
                FileReply::FoundLock(found.map(WireLock::from))
            }
            FileCall::Lock { session, inode, owner, wanted, waits, over } => {
                let (of, inode) = ((client, session, over), InodeNumber(inode));
                let done = self.lock(of, inode, owner, wanted.try_into()?, waits).await?;
                done.reply(FileReply::Locked)
            }
            FileCall::KeepLocks { session, inode, owner, kept } => {
                let kept: Result<Vec<FileLock>, Errno> =
                    kept.0.into_iter().map(FileLock::try_from).collect();
                let (of, inode) = ((client, session), InodeNumber(inode));
                let done = self.keep(of, inode, owner, &kept?).await?;
                done.reply(|_| FileReply::Nothing)
            }
            FileCall::StopWaiting { inode, owner, keeps_place } => {
                self.stop_waiting(client, InodeNumber(inode), owner, keeps_place);
                FileReply::Nothing
            }
            FileCall::KeepSession { session } if self.is_session_of(client, session) => {
                FileReply::Nothing
            }
            FileCall::KeepSession { .. } => FileReply::LocksLost,
            _ => return Err(Errno::EINVAL),
        })
    }
}

/// A write under a lock, under way until this is dropped.
pub(super) struct WriteUnderLock {
    keeper: Arc<LockKeeper>,
    number: u64,
}

impl Drop for WriteUnderLock {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.keeper.state();
            state.writes.remove(&self.number);
            std::mem::take(&mut state.waiting_for_writes)
        };
        for call in waiting {
            // It may have been given up.
            let _ = call.send(());
        }
    }
}

/// Ends the sessions of clients that are silent, and those that their clients have replaced.
async fn end_silent(env: Env, keeper: Weak<LockKeeper>) {
    let mut looked = env.now();
    loop {
        sleep(&*env, LOOK_EVERY).await;
        let Some(keeper) = keeper.upgrade() else { return };
        let now = env.now();
        let has_stood_still = now.since(looked) > STOOD_STILL;
        looked = now;
        let over: Vec<(ClientKey, LockSession)> = {
            let mut state = keeper.state();
            if has_stood_still {
                state.heard.values_mut().for_each(|heard| *heard = now);
            }
            let is_silent = |(client, _): &(ClientKey, LockSession)| {
                state.heard.get(client).is_none_or(|heard| now.since(*heard) >= TERM)
            };
            let silent = state.locks.sessions().filter(is_silent);
            silent.chain(state.locks.superseded()).collect()
        };
        over.into_iter().for_each(|(client, session)| keeper.end_later(client, session));
    }
}

#[cfg(test)]
mod tests;
