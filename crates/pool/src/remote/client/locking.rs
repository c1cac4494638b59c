//! [`Locks`] by calls of the server, which keeps the locks of all mounts of the pool ([`crate::locks`]).
//!
//! **In order.** Calls about one owner's locks on one file follow each other, also those that their callers have given up: a lock that is
//! taken too late is given up before the next call of that owner, and an unlock whose answer was lost is repeated until it has one. A call
//! that does not wait for a lock fails if those before it take too long; an unlock is done later all the same.
//!
//! **Waiting.** The server is asked for as long as it takes, a fifth of a second at a time, over restarts of it. Another call of the same owner, or the end of
//! the caller, ends the call at the server at once.
//!
//! **What a lock shows.** Before a lock is answered, the front end has dropped what it has cached of the bytes of files that are open here, and of
//! attributes that it was told and would still believe. Before it is given up, bytes of the file that this client would send again are made
//! durable, so that they never replace what the next holder writes.
//!
//! **Losing locks.** The server ends the locks of a client that is silent for too long; a server that was restarted knows none. The client
//! finds out by the answer to any call under a lock, which it makes every [`KEEP_PERIOD`] if there is no other
//! ([`super::own_locks`] has what follows).

use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use atoll_env::{Env, Notify, sleep, timeout};
use atoll_vfs::{Answer, Errno, FileLock, InodeNumber, Invalidation, LockOwner, LockRange, Locks};
use futures_channel::oneshot;
use futures_util::future::{Either, join, select};

use super::super::wire::{FileCall, FileReply};
use super::attempt::Asked;
use super::exchange::ClientSession;
use super::own_locks::HeldLocks;
use super::unstable::UnstableChange;
use super::{Client, LockKey, OpenAtClient, OpenKind};
use crate::locks::{LockSession, WireLock};
use crate::turns::Turn;

/// How often the server hears of a client that has locks: several times in the time after which it takes them.
const KEEP_PERIOD: Duration = Duration::from_secs(3);
/// Between attempts to give a lock up.
const RETRY_EVERY: Duration = Duration::from_secs(1);
/// How long a call waits for those before it of the same owner, as long as for an answer of its own.
const TURN_LIMIT: Duration = Duration::from_secs(30);
/// How long the kernel may take to drop pages. A guess: it waits for reads under way.
const DROP_LIMIT: Duration = Duration::from_secs(10);

/// See the module.
pub(super) struct RemoteLocks {
    client: Arc<Client>,
}

impl RemoteLocks {
    pub(super) fn new(client: Arc<Client>) -> RemoteLocks {
        RemoteLocks { client }
    }

    /// Runs a call as a task, which goes on when its caller gives it up.
    fn task<T: Send + 'static, F>(
        &self,
        work: impl FnOnce(Arc<Client>, oneshot::Sender<Result<T, Errno>>) -> F + Send + 'static,
    ) -> Answer<T>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let client = self.client.clone();
        Box::pin(async move {
            let (sender, answer) = oneshot::channel();
            let env = client.exchange.env.clone();
            env.spawn(Box::pin(work(client, sender)));
            answer.await.unwrap_or(Err(Errno::EIO))
        })
    }
}

impl Locks for RemoteLocks {
    fn conflict(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
        wanted: FileLock,
    ) -> Answer<Option<FileLock>> {
        let find = FileCall::FindLock { inode: inode.0, owner: owner.0, wanted: wanted.into() };
        self.task(async move |client, answer| {
            let found = match client.ask(find, None, None, None).await {
                Ok(Asked { reply: FileReply::FoundLock(found), .. }) => {
                    found.map(FileLock::try_from).transpose().map_err(|_| Errno::EPROTO)
                }
                Ok(_) => Err(Errno::EPROTO),
                Err(errno) => Err(errno),
            };
            let _ = answer.send(found);
        })
    }

    fn lock(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
        wanted: FileLock,
        waits: bool,
    ) -> Answer<()> {
        self.task(async move |client, answer| {
            client.lock((inode, owner), wanted, waits, answer).await;
        })
    }

    fn unlock(&self, inode: InodeNumber, owner: LockOwner, range: LockRange) -> Answer<()> {
        self.task(async move |client, answer| {
            client.unlock((inode, owner), range, answer).await;
        })
    }
}

fn lock_call(
    (session, over): (Option<LockSession>, LockSession),
    (inode, owner): LockKey,
    wanted: FileLock,
    waits: bool,
) -> FileCall {
    let (inode, owner, wanted) = (inode.0, owner.0, wanted.into());
    FileCall::Lock { session, inode, owner, wanted, waits, over }
}

/// What became of one attempt to take a lock.
enum Taken {
    Yes,
    /// Another one has it, or its wait was ended; nothing has changed.
    NotYet,
    No(Errno),
    /// It may be held at the server.
    Unknown,
}

impl Client {
    /// The turn of an owner on a file; ends a wait of that owner at the server.
    async fn lock_turn(&self, key: LockKey) -> Turn<LockKey> {
        self.waits(|waits| waits.get(&key).cloned()).into_iter().for_each(|wait| wait.notify());
        self.lock_turns.write(key).await
    }

    fn waits<T>(
        &self,
        work: impl FnOnce(&mut std::collections::BTreeMap<LockKey, Arc<Notify>>) -> T,
    ) -> T {
        work(&mut self.waits.lock().expect("no holder of this lock panics"))
    }

    async fn lock(
        self: &Arc<Self>,
        key: LockKey,
        wanted: FileLock,
        waits: bool,
        mut answer: oneshot::Sender<Result<(), Errno>>,
    ) {
        loop {
            let coming = self.lock_turn(key);
            let turn = match waits {
                true => coming.await,
                false => match timeout(&*self.exchange.env, TURN_LIMIT, coming).await {
                    Ok(turn) => turn,
                    Err(_) => {
                        let _ = answer.send(Err(Errno::EIO));
                        return;
                    }
                },
            };
            if answer.is_canceled() {
                return;
            }
            let before = self.own_locks().held(key.0, key.1);
            let taken = self.take_lock(key, wanted, waits, &mut answer).await;
            let outcome = match taken {
                Taken::NotYet if waits => continue,
                Taken::NotYet => Err(Errno::EAGAIN),
                Taken::No(errno) => Err(errno),
                Taken::Unknown if waits => {
                    self.settle(key, turn).await;
                    continue;
                }
                Taken::Unknown => {
                    self.settle_later(key, turn);
                    let _ = answer.send(Err(Errno::EIO));
                    return;
                }
                Taken::Yes if self.show_newest(key.0).await => Ok(()),
                Taken::Yes => {
                    self.own_locks().keep(key.0, key.1, before);
                    self.settle_later(key, turn);
                    let _ = answer.send(Err(Errno::EIO));
                    return;
                }
            };
            if answer.send(outcome) == Err(Ok(())) {
                // Nobody waits for it any more.
                self.own_locks().keep(key.0, key.1, before);
                self.settle(key, turn).await;
            }
            return;
        }
    }

    /// Tries to take a lock once. The caller has the owner's turn.
    async fn take_lock(
        self: &Arc<Self>,
        key: LockKey,
        wanted: FileLock,
        waits: bool,
        answer: &mut oneshot::Sender<Result<(), Errno>>,
    ) -> Taken {
        loop {
            let (session, over) = {
                let own = self.own_locks();
                match own.check(wanted.through) {
                    Ok(()) => (own.session(), own.over()),
                    Err(errno) => return Taken::No(errno),
                }
            };
            let call = lock_call((session, over), key, wanted, waits);
            let asked = match waits {
                true => self.ask_waiting(key, call, answer).await,
                false => self.ask(call, None, None, None).await,
            };
            return match asked {
                Ok(Asked { reply: FileReply::Locked(granted), session, .. }) => {
                    match self.note_granted(granted, &session, key, wanted) {
                        Ok(()) => Taken::Yes,
                        Err(errno) => Taken::No(errno),
                    }
                }
                // The session was over: this may be a lock of the next.
                Ok(Asked { reply: FileReply::LocksLost, .. }) => continue,
                Ok(_) => Taken::No(Errno::EPROTO),
                Err(Errno::EAGAIN) => Taken::NotYet,
                Err(Errno::EIO | Errno::ETIMEDOUT) => Taken::Unknown,
                Err(errno) => Taken::No(errno),
            };
        }
    }

    /// Asks for a lock and waits, until the caller gives it up or another call of the owner comes.
    async fn ask_waiting(
        self: &Arc<Self>,
        key: LockKey,
        call: FileCall,
        answer: &mut oneshot::Sender<Result<(), Errno>>,
    ) -> Result<Asked, Errno> {
        let wake = Arc::new(Notify::default());
        self.waits(|waits| waits.insert(key, wake.clone()));
        let woken = pin!(wake.notified());
        let stopped = select(answer.cancellation(), woken);
        let asked = match select(pin!(self.ask(call, None, None, None)), stopped).await {
            Either::Left((asked, _)) => asked,
            Either::Right((stopped, asking)) => {
                // A caller that waits on goes on after the other call.
                let keeps_place = matches!(stopped, Either::Right(_));
                let (inode, owner) = (key.0.0, key.1.0);
                let stop = FileCall::StopWaiting { inode, owner, keeps_place };
                join(asking, self.ask(stop, None, None, None)).await.0
            }
        };
        self.waits(|waits| waits.remove(&key));
        asked
    }

    fn note_granted(
        self: &Arc<Self>,
        granted: LockSession,
        session: &ClientSession,
        (inode, owner): LockKey,
        lock: FileLock,
    ) -> Result<(), Errno> {
        let mut own = self.own_locks();
        if let Some(current) = own.session()
            && current < granted
        {
            let lost = own.lose(current);
            self.drop_written(lost);
        }
        own.grant((granted, session.verifier), inode, owner, lock)?;
        if !std::mem::replace(&mut own.is_kept, true) {
            let env = self.exchange.env.clone();
            env.spawn(Box::pin(keep_session(env.clone(), Arc::downgrade(self))));
        }
        Ok(())
    }

    async fn unlock(
        self: &Arc<Self>,
        key: LockKey,
        range: LockRange,
        answer: oneshot::Sender<Result<(), Errno>>,
    ) {
        let mut coming = pin!(self.lock_turn(key));
        let (turn, answer) = match timeout(&*self.exchange.env, TURN_LIMIT, coming.as_mut()).await {
            Ok(turn) => (turn, Some(answer)),
            Err(_) => {
                let _ = answer.send(Err(Errno::EIO));
                (coming.await, None)
            }
        };
        let outcome = self.unlock_in_turn(key, range, turn).await;
        if let Some(answer) = answer {
            let _ = answer.send(outcome);
        }
    }

    async fn unlock_in_turn(
        self: &Arc<Self>,
        key: LockKey,
        range: LockRange,
        turn: Turn<LockKey>,
    ) -> Result<(), Errno> {
        let (inode, owner) = key;
        let kept = {
            let mut own = self.own_locks();
            if own.tell_lost(inode, owner, range) {
                return Err(Errno::EIO);
            }
            own.after_unlock(inode, owner, range)
        };
        let Some(kept) = kept else { return Ok(()) };
        self.write_pages_back(inode).await;
        self.make_unsendable(inode).await;
        match self.keep_locks(key, kept.clone()).await {
            Ok(is_done) => {
                let mut own = self.own_locks();
                if !is_done {
                    own.tell_lost(inode, owner, range);
                }
                own.keep(inode, owner, kept);
                // Else its session is over, of which the owner is told.
                is_done.then_some(()).ok_or(Errno::EIO)
            }
            Err(Errno::ENOLCK) => Err(Errno::ENOLCK),
            Err(_) => {
                self.own_locks().keep(inode, owner, kept);
                self.settle_later(key, turn);
                Err(Errno::EIO)
            }
        }
    }

    /// Has the server give up what an owner has beside `kept`. False if their session is over.
    async fn keep_locks(
        self: &Arc<Self>,
        (inode, owner): LockKey,
        HeldLocks { session, locks: kept }: HeldLocks,
    ) -> Result<bool, Errno> {
        let kept: Vec<WireLock> = kept.into_iter().map(WireLock::from).collect();
        let (inode, owner, kept) = (inode.0, owner.0, kept.into());
        let call = FileCall::KeepLocks { session, inode, owner, kept };
        match self.ask(call, None, None, None).await?.reply {
            FileReply::Nothing => Ok(true),
            FileReply::LocksLost => Ok(false),
            _ => Err(Errno::EPROTO),
        }
    }

    /// Has the server know what an owner holds, which may have more there.
    async fn settle(self: &Arc<Self>, key: LockKey, turn: Turn<LockKey>) {
        settle(self.exchange.env.clone(), Arc::downgrade(self), key, turn).await;
    }

    fn settle_later(self: &Arc<Self>, key: LockKey, turn: Turn<LockKey>) {
        let env = self.exchange.env.clone();
        env.spawn(Box::pin(settle(env.clone(), Arc::downgrade(self), key, turn)));
    }

    /// Has the server give back what an owner held before a lock that it was granted replaced it. False if it cannot be had again.
    async fn retake(self: &Arc<Self>, key: LockKey, before: &HeldLocks) -> Result<bool, Errno> {
        for lock in &before.locks {
            let over = self.own_locks().over();
            let call = lock_call((before.session, over), key, *lock, false);
            match self.ask(call, None, None, None).await {
                Ok(Asked { reply: FileReply::Locked(_), .. }) => {}
                Err(errno @ (Errno::EIO | Errno::ETIMEDOUT)) => return Err(errno),
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Makes a file's bytes durable that would be sent again to a server that has lost them; what cannot be is lost.
    async fn make_unsendable(self: &Arc<Self>, inode: InodeNumber) {
        if self.unstable().has(inode.0) && self.sync_file(inode.0).await.is_err() {
            self.unstable().fail(inode.0);
        }
    }

    /// Has the front end write back pages of a file that a program has changed by a mapping.
    async fn write_pages_back(&self, inode: InodeNumber) {
        if !self.invalidations.is_served() {
            return;
        }
        self.invalidations.push(Invalidation::Data { inode, bytes: 0..u64::MAX });
        if !self.has_dropped().await {
            tracing::warn!(inode = inode.0, "pages may be written after their lock was given up");
        }
    }

    /// Waits until the front end has dropped what it was told to; false if that takes too long.
    async fn has_dropped(&self) -> bool {
        timeout(&*self.exchange.env, DROP_LIMIT, self.invalidations.settled()).await.is_ok()
    }

    /// Has the front end drop what it has cached of open files, and attributes and names that it was told just now: others may have
    /// changed them before the lock was taken. False if that takes too long.
    async fn show_newest(&self, locked: InodeNumber) -> bool {
        if !self.invalidations.is_served() {
            return true;
        }
        let mut files: Vec<u64> = {
            let opens = self.opens();
            let files = opens.opens.values().filter(|open| open.kind != OpenKind::Directory);
            files.map(|open| open.inode).collect()
        };
        files.push(locked.0);
        for inode in files.into_iter().map(InodeNumber) {
            self.invalidations.push(Invalidation::Data { inode, bytes: 0..u64::MAX });
        }
        let told = self.recent().take(self.exchange.env.now());
        told.into_iter().for_each(|told| self.invalidations.push(told));
        let has_dropped = self.has_dropped().await;
        if !has_dropped {
            tracing::warn!("the kernel keeps what it had before a lock was taken: it is not taken");
        }
        has_dropped
    }

    // ---- what is written under locks ----

    /// The session of the locks under which this open file is written to. [`Errno::EIO`] if they are lost. Pages that the kernel writes
    /// back may be those of any open file.
    pub(super) fn locks_under(
        &self,
        open: &OpenAtClient,
        are_pages: bool,
    ) -> Result<Option<LockSession>, Errno> {
        let through: Vec<u64> = match are_pages {
            true => {
                let opens = self.opens();
                let same = opens.opens.values().filter(|other| other.inode == open.inode);
                same.map(|other| other.number).collect()
            }
            false => vec![open.number],
        };
        self.own_locks().under(InodeNumber(open.inode), &through)
    }

    /// Keeps a change that was made under locks until it is durable, unless they are lost by now.
    pub(super) fn keep_written(
        &self,
        inode: u64,
        session: &ClientSession,
        change: UnstableChange,
        under: Option<LockSession>,
    ) -> Result<(), Errno> {
        // Held until the change is kept: who loses the locks drops it.
        let own = self.own_locks();
        if under.is_some_and(|under| own.session() != Some(under)) {
            return Err(Errno::EIO);
        }
        self.keep_unstable(inode, session, change);
        drop(own);
        Ok(())
    }

    /// A lock session is over.
    pub(super) fn lose_locks(&self, session: LockSession) {
        let mut own = self.own_locks();
        let lost = own.lose(session);
        self.drop_written(lost);
    }

    /// Calls are made by a server with this write verifier from now on.
    pub(super) fn note_verifier(&self, verifier: u64) {
        let mut own = self.own_locks();
        let lost = own.note_verifier(verifier);
        self.drop_written(lost);
    }

    /// What was written to files whose locks are lost is not sent again: others may have them by now.
    fn drop_written(&self, lost: Vec<InodeNumber>) {
        for inode in lost {
            tracing::warn!(inode = inode.0, "the locks on a file are lost");
            let mut unstable = self.unstable();
            if unstable.has(inode.0) {
                unstable.fail(inode.0);
            }
        }
    }
}

/// Has the server know what an owner holds, until it does, or the client or its session ends.
async fn settle(env: Env, client: Weak<Client>, key: LockKey, turn: Turn<LockKey>) {
    let mut was_retaken = false;
    while let Some(client) = client.upgrade() {
        let kept = client.own_locks().held(key.0, key.1);
        match client.keep_locks(key, kept.clone()).await {
            Err(Errno::EIO | Errno::ETIMEDOUT) => {}
            // It has less: an exclusive lock has become a shared one, in a call that its caller has given up.
            Err(Errno::EINVAL) if !kept.locks.is_empty() => {
                match client.retake(key, &kept).await {
                    Ok(true) if !was_retaken => was_retaken = true,
                    Ok(_) => {
                        client.make_unsendable(key.0).await;
                        client.own_locks().lose_owner(key.0, key.1);
                    }
                    Err(_) => sleep(&*env, RETRY_EVERY).await,
                }
                continue;
            }
            _ => break,
        }
        drop(client);
        sleep(&*env, RETRY_EVERY).await;
    }
    drop(turn);
}

/// Tells the server that this client lives, as long as it has locks.
async fn keep_session(env: Env, client: Weak<Client>) {
    loop {
        sleep(&*env, KEEP_PERIOD).await;
        let Some(client) = client.upgrade() else { return };
        let session = {
            let mut own = client.own_locks();
            let session = own.session_to_keep();
            own.is_kept = session.is_some();
            session
        };
        let Some(session) = session else { return };
        // Whatever becomes of it, the next one follows.
        let _ = client.ask(FileCall::KeepSession { session }, None, None, None).await;
    }
}
