//! A file system whose calls are made by a server, over lost messages, broken connections and restarts of the server.
//!
//! ```text
//! filesystem  vfs::FileSystem: each method as a call
//! contents    bytes of open files; kept until they are durable
//! directories listings, which go on after a restart
//! attempt     a call in the session of the moment, with what the session needs before: handles, unstable bytes
//! locking     locks: taken at the server, kept alive, lost
//! own_locks   the locks that programs of this mount hold
//! recent      attributes and names that were told just now
//! exchange    calls of one session until there is an answer; sessions
//! unstable    changes of bytes that are sent again if the server dies
//! listing     half-read directories
//! held        numbers that the front end holds
//! ```
//!
//! Every call runs as a task, so that one that its caller gives up is still heard of: what it was given is given back. A handle of
//! the client stands for an inode, flags, and whatever handle the present session has for them: after a restart of the server a
//! file is opened again when it is needed.

mod attempt;
mod contents;
mod directories;
mod exchange;
mod filesystem;
mod held;
mod listing;
mod locking;
mod own_locks;
mod recent;
mod unstable;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{Env, Notify};
use atoll_vfs::{Entry, Errno, Handle, InodeNumber, InvalidationQueue, LockOwner, OpenFlags};
use bytes::Bytes;
use futures_util::future::select;

use self::exchange::{ClientSession, Exchange, Patience, Stop};
use self::held::HeldNumbers;
use self::listing::HalfRead;
use self::own_locks::OwnLocks;
use self::recent::{RecentlyTold, Told};
use self::unstable::{UnstableChange, UnstableFiles};
use super::route::Route;
use super::wire::{Begun, CallClass, FileCall, WireCaller};
use crate::turns::Turns;

/// How often a session is renewed: often enough that a few lost calls do not end it.
const RENEW_PERIOD: Duration = Duration::from_secs(30);
/// How often the client looks what it has to do.
const TICK: Duration = Duration::from_secs(5);
/// After a server began, clients have opened again what they have open, if they can reach it: at the tick after next.
pub(crate) const REOPENED_WITHIN: Duration = Duration::from_secs(10);
/// Between attempts to write again what a group refuses for now, since it has fewer members than changes need; a guess.
const REFUSED_RETRY_EVERY: Duration = Duration::from_millis(500);
/// How long a call waits for others of its file before it begins.
const WAIT_LIMIT: Duration = Duration::from_secs(30);
/// How long numbers wait to be forgotten, for more of them.
const FORGET_DELAY: Duration = Duration::from_millis(100);

/// See the module.
pub struct RemoteFs {
    client: Arc<Client>,
}

impl std::fmt::Debug for RemoteFs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteFs").finish_non_exhaustive()
    }
}

impl RemoteFs {
    /// The file system of the server that `route` leads to. It is told there when this is dropped; what it has not made durable
    /// until then ([`atoll_vfs::FileSystem::sync`]) is the server's to lose.
    ///
    /// # Errors
    /// [`Errno::ETIMEDOUT`] if the server does not answer; [`Errno::ENFILE`] if it has too many clients.
    pub async fn begin(env: Env, route: Arc<dyn Route>) -> Result<RemoteFs, Errno> {
        let exchange = Exchange::new(env.clone(), route);
        let patience = Patience::new(env.now(), CallClass::Reads);
        let begun = exchange.begin(&patience).await;
        let (_, features) = begun.map_err(|stop| match stop {
            Stop::Errno(errno) => errno,
            Stop::OutOfTime | Stop::Lost { .. } => patience.errno(),
        })?;
        let client = Arc::new(Client {
            exchange,
            features,
            opens: Mutex::default(),
            held: Mutex::default(),
            unstable: Mutex::default(),
            ends: Mutex::default(),
            order: Turns::default(),
            sending: Turns::default(),
            making_room: futures_util::lock::Mutex::new(()),
            own_locks: Mutex::default(),
            lock_turns: Turns::default(),
            waits: Mutex::default(),
            invalidations: Arc::default(),
            recent: Mutex::default(),
            has_no_flush: AtomicBool::new(false),
            reads_at_server: AtomicBool::new(false),
            work: Arc::default(),
        });
        let (weak, work) = (Arc::downgrade(&client), client.work.clone());
        env.spawn(Box::pin(keep_up(env.clone(), weak, work)));
        Ok(RemoteFs { client })
    }

    /// Has the server alone answer reads, or any member that has the bytes: to measure the difference.
    #[doc(hidden)]
    pub fn read_at_server(&self, is_alone: bool) {
        self.client.reads_at_server.store(is_alone, Ordering::Relaxed);
    }
}

/// Renews the session; forgets numbers; sends unstable changes to a new server, and has old ones made durable.
async fn keep_up(env: Env, client: Weak<Client>, work: Arc<Notify>) {
    let mut renewed = env.now();
    loop {
        select(pin!(work.notified()), atoll_env::sleep(&*env, TICK)).await;
        if client.strong_count() > 0 {
            atoll_env::sleep(&*env, FORGET_DELAY).await;
        }
        let Some(client) = client.upgrade() else { return };
        if env.now().since(renewed) >= RENEW_PERIOD || client.has_open_files() {
            let patience = Patience::new(env.now(), CallClass::Reads);
            // The next call finds out what is wrong.
            let _ = client.exchange.renew(&patience).await;
            renewed = env.now();
        }
        client.open_again().await;
        client.forget_at_server().await;
        client.send_all_unstable().await;
        client.sync_aged().await;
    }
}

/// A file, and an owner of locks.
type LockKey = (InodeNumber, LockOwner);

/// What is open at the client.
struct OpenAtClient {
    /// Its handle.
    number: u64,
    inode: u64,
    kind: OpenKind,
    caller: WireCaller,
    /// Serial number of a session, and the handle there.
    at_server: futures_util::lock::Mutex<Option<(u64, u64)>>,
    /// For directories whose cookies do not last: the serial number of the session in which they were opened, and what was listed.
    half_read: Mutex<(u64, HalfRead)>,
    /// Held by the call that lists.
    listing: futures_util::lock::Mutex<()>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OpenKind {
    File(OpenFlags),
    Directory,
}

impl OpenAtClient {
    fn open_call(&self) -> FileCall {
        let (caller, inode) = (self.caller.clone(), self.inode);
        match self.kind {
            OpenKind::File(flags) => FileCall::Open { caller, inode, flags: flags.0, again: true },
            OpenKind::Directory => FileCall::OpenDirectory { caller, inode },
        }
    }
}

/// Files and directories that are open, by their handles.
#[derive(Default)]
struct OpensAtClient {
    opens: BTreeMap<u64, Arc<OpenAtClient>>,
    last: u64,
}

/// What tasks share.
struct Client {
    exchange: Exchange,
    features: Begun,
    opens: Mutex<OpensAtClient>,
    held: Mutex<HeldNumbers>,
    unstable: Mutex<UnstableFiles>,
    /// By inode: where open files ended when this client appended to them, unless it has changed them otherwise since.
    ends: Mutex<BTreeMap<u64, u64>>,
    /// By inode: lengths are set alone, so that it is known which bytes were written before.
    order: Turns,
    /// By inode: who sends its unstable changes again.
    sending: Turns,
    making_room: futures_util::lock::Mutex<()>,
    own_locks: Mutex<OwnLocks>,
    /// By file and owner: calls about locks follow each other.
    lock_turns: Turns<LockKey>,
    /// Calls that wait for a lock at the server, to be woken when another one of the same owner comes.
    waits: Mutex<BTreeMap<LockKey, Arc<Notify>>>,
    /// What the front end must not believe any more, once a lock is taken.
    invalidations: Arc<InvalidationQueue>,
    recent: Mutex<RecentlyTold>,
    /// The server delays no writes.
    has_no_flush: AtomicBool,
    /// No member but the server is to answer reads.
    reads_at_server: AtomicBool,
    /// Something is to be forgotten, or this ends.
    work: Arc<Notify>,
}

impl Drop for Client {
    fn drop(&mut self) {
        self.work.notify();
        self.exchange.end();
    }
}

impl Client {
    fn opens(&self) -> MutexGuard<'_, OpensAtClient> {
        self.opens.lock().expect("no holder of this lock panics")
    }

    fn held(&self) -> MutexGuard<'_, HeldNumbers> {
        self.held.lock().expect("no holder of this lock panics")
    }

    fn own_locks(&self) -> MutexGuard<'_, OwnLocks> {
        self.own_locks.lock().expect("no holder of this lock panics")
    }

    fn recent(&self) -> MutexGuard<'_, RecentlyTold> {
        self.recent.lock().expect("no holder of this lock panics")
    }

    /// Attributes are told to the front end; returns how long it may believe them.
    fn tell_attributes(&self, inode: InodeNumber, ttl: Duration) -> Duration {
        match self.invalidations.is_served() {
            true => self.recent().tell(Told::Attributes(inode), ttl, self.exchange.env.now()),
            false => ttl,
        }
    }

    /// What is called so in a directory is told to the front end, with its attributes; says there how long it may believe them.
    fn tell_entry(&self, at: Option<(u64, Bytes)>, entry: &mut Entry) {
        entry.attr_ttl = self.tell_attributes(entry.attr.inode, entry.attr_ttl);
        if let Some((parent, name)) = at
            && self.invalidations.is_served()
        {
            let (told, now) = (Told::Name(InodeNumber(parent), name), self.exchange.env.now());
            entry.name_ttl = self.recent().tell(told, entry.name_ttl, now);
        }
    }

    fn unstable(&self) -> MutexGuard<'_, UnstableFiles> {
        self.unstable.lock().expect("no holder of this lock panics")
    }

    fn ends(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.ends.lock().expect("no holder of this lock panics")
    }

    /// Keeps what a session of this serial number has opened under a handle of the client; or what is opened when it is needed.
    fn keep_open(
        &self,
        inode: u64,
        kind: OpenKind,
        caller: WireCaller,
        at_server: Option<(u64, u64)>,
        serial: u64,
    ) -> Handle {
        let mut opens = self.opens();
        opens.last += 1;
        let number = opens.last;
        let open = OpenAtClient {
            number,
            inode,
            kind,
            caller,
            at_server: futures_util::lock::Mutex::new(at_server),
            half_read: Mutex::new((serial, HalfRead::default())),
            listing: futures_util::lock::Mutex::new(()),
        };
        opens.opens.insert(number, Arc::new(open));
        Handle(number)
    }

    fn opened(&self, inode: InodeNumber, handle: Handle) -> Result<Arc<OpenAtClient>, Errno> {
        let open = self.opens().opens.get(&handle.0).cloned();
        open.filter(|open| open.inode == inode.0).ok_or(Errno::EBADF)
    }

    fn opened_file(&self, inode: InodeNumber, handle: Handle) -> Result<Arc<OpenAtClient>, Errno> {
        let open = self.opened(inode, handle)?;
        if open.kind == OpenKind::Directory { Err(Errno::EISDIR) } else { Ok(open) }
    }

    fn opened_directory(
        &self,
        inode: InodeNumber,
        handle: Handle,
    ) -> Result<Arc<OpenAtClient>, Errno> {
        let open = self.opened(inode, handle)?;
        if open.kind == OpenKind::Directory { Ok(open) } else { Err(Errno::ENOTDIR) }
    }

    /// Whether somebody has the file open, and so asks whether its bytes were lost.
    fn has_open(&self, inode: u64) -> bool {
        self.open_file_of(inode).is_some()
    }

    fn open_file_of(&self, inode: u64) -> Option<Arc<OpenAtClient>> {
        let opens = self.opens();
        let mut files = opens.opens.values().filter(|open| open.kind != OpenKind::Directory);
        files.find(|open| open.inode == inode).cloned()
    }

    fn has_open_files(&self) -> bool {
        self.opens().opens.values().any(|open| open.kind != OpenKind::Directory)
    }

    /// Opens files at a new server that an earlier one had open: one that has lost its names lives only as long as somebody has it open there.
    async fn open_again(self: &Arc<Self>) {
        let files: Vec<Arc<OpenAtClient>> = {
            let opens = self.opens();
            let files = opens.opens.values().filter(|open| open.kind != OpenKind::Directory);
            files.cloned().collect()
        };
        for open in files {
            let again = self.run(CallClass::Reads, true, |attempt| {
                let open = open.clone();
                async move { attempt.handle(&open).await.map(drop) }
            });
            if let Err(Stop::OutOfTime | Stop::Lost { .. }) = again.await {
                return;
            }
        }
    }

    /// Takes lookups back, at the server before long.
    fn forget(&self, inode: InodeNumber, count: u64) {
        self.held().forget(inode.0, count);
        self.work.notify();
    }

    async fn forget_at_server(self: &Arc<Self>) {
        let has_more = || {
            let serial = self.exchange.current_session().map(|session| session.serial);
            serial.is_some_and(|serial| self.held().has_forgotten(serial))
        };
        while has_more() {
            // What is not forgotten now is when the session ends.
            if self.ask(FileCall::Forget, None, None, None).await.is_err() {
                return;
            }
        }
    }

    /// Keeps a change until it is durable.
    fn keep_unstable(&self, inode: u64, session: &ClientSession, change: UnstableChange) {
        let current = self.exchange.current_verifier();
        let now = self.exchange.env.now();
        self.unstable().keep(inode, (session.verifier, current), change, now);
    }

    /// The server cannot take a file's unstable changes.
    fn lose_unstable(&self, inode: u64, errno: Errno) {
        if matches!(errno, Errno::ESTALE | Errno::ENOENT) && !self.has_open(inode) {
            // The file is gone, and its bytes with it.
            self.unstable().end(inode, u64::MAX);
            return;
        }
        tracing::warn!(inode, %errno, "bytes that were not durable are lost");
        self.unstable().fail(inode);
        if !self.has_open(inode) {
            self.unstable().take_failure(inode);
        }
    }

    /// Sends unstable changes to a server that does not have them.
    async fn send_all_unstable(self: &Arc<Self>) {
        let inodes = self.unstable().all();
        for inode in inodes {
            let sent = self.run(CallClass::Changes, true, move |attempt| async move {
                attempt.send_unstable(inode).await
            });
            if sent.await == Err(Stop::OutOfTime) {
                return;
            }
        }
    }

    async fn sync_aged(self: &Arc<Self>) {
        let aged = self.unstable().aged(self.exchange.env.now());
        for inode in aged {
            if self.sync_file(inode).await == Err(Stop::OutOfTime) {
                return;
            }
        }
    }

    /// Waits for others; [`Errno::EIO`] if that takes too long.
    async fn within<T>(&self, limit: Duration, wait: impl Future<Output = T>) -> Result<T, Errno> {
        atoll_env::timeout(&*self.exchange.env, limit, wait).await.map_err(|_| Errno::EIO)
    }

    /// Has changes made durable until few enough are kept.
    async fn make_room(self: &Arc<Self>) {
        if self.unstable().too_much().is_none() {
            return;
        }
        let Ok(_turn) = self.within(WAIT_LIMIT, self.making_room.lock()).await else { return };
        loop {
            let Some(inode) = self.unstable().too_much() else { return };
            if self.sync_file(inode).await == Err(Stop::OutOfTime) {
                return;
            }
        }
    }

    /// Has a file's unstable changes made durable; those that cannot be are lost.
    async fn sync_file(self: &Arc<Self>, inode: u64) -> Result<(), Stop> {
        let synced = self.run(CallClass::Syncs, true, move |attempt| async move {
            let up_to = attempt.send_unstable(inode).await?;
            attempt.sync_file(inode).await?;
            Ok(up_to)
        });
        match synced.await {
            Ok(up_to) => {
                self.unstable().end(inode, up_to);
                Ok(())
            }
            Err(Stop::Errno(Errno::EMFILE | Errno::ENFILE)) => Err(Stop::OutOfTime),
            Err(Stop::Errno(errno)) => {
                self.lose_unstable(inode, errno);
                Err(Stop::Errno(errno))
            }
            Err(stop) => Err(stop),
        }
    }

    /// Counts the lookup of an entry.
    fn look_up(&self, session: &ClientSession, entry: &Entry) {
        self.held().look_up(entry.attr.inode.0, session.serial);
    }
}
