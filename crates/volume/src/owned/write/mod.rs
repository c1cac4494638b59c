//! A volume mounted read-write by its owner: the write-back cache of D2 §7 over the blocks of CFS
//! §3.
//!
//! ```text
//! WritableFs ─► Tree (what differs from the ring, plain data) ─► flush ─► blocks, then the root
//! ```
//!
//! - [`tree`]: the state. A call that needs something stored fetches it and is made again.
//! - [`spool`]: what is not on the ring yet, on this machine's disk.
//! - [`keep`]: the leases of what was written.
//! - [`release`]: what is not needed any more leaves the ring.
//! - [`history`]: old states are kept, and brought back.
//! - [`HandleTable`]: where files are by number, for handles that last over restarts.
//! - [`copy`]: a file or directory of one is copied to where it was.
//! - [`flush`]: one task turns changes into blocks and puts the next root.
//! - [`fs`]: the calls of [`FileSystem`](atoll_vfs::FileSystem).
//!
//! Promises:
//!
//! - A reader of the volume sees the whole tree as it was at one moment, between two calls; only
//!   contents that the ring has no room for are as they were stored last ([`flush`]).
//! - After `fsync` of any file, everything that was done before it is on the ring, durable as the
//!   ring acknowledges puts, but contents of other files that find no room.
//! - After `close` of a file that was open for writing, everything that was done before it is in the
//!   spool, if there is one, and survives crashes of the mount and of the machine: the next mount
//!   brings it to the ring.
//! - Changes are on the ring within some ten seconds while it answers.
//! - One mount writes at a time. A second one is refused while the first one has said within two
//!   minutes that it writes; if it is let in by force, the first one's next root is refused, and it
//!   changes nothing any more. What it had not brought to the ring stays in its spool.
//!
//! It does not know where keys are kept, nor how blocks are replicated.

mod copy;
mod flush;
mod fs;
mod history;
mod keep;
mod opening;
mod release;
mod spool;
mod tree;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_dht::{Blocks, GetError, PutError};
use atoll_env::{Env, Instant, Notify, timeout};
use atoll_key::{BlockHash, ReadKey, SecretKey, SignedBlock, VolumeCipher};
use atoll_vfs::{Errno, FileTime};
use futures_channel::oneshot;

pub use self::copy::{Copied, CopyError};
pub use self::fs::WritableFs;
pub use self::history::RestoreError;
pub use self::keep::{LeaseKeeper, NoLeaseKeeper};
use self::release::UnneededBlocks;
use self::spool::Spool;
pub use self::spool::{SPOOL_BASE, SPOOL_RECORDS};
use self::tree::{Loaded, Need, Tree};
use super::fault::Fault;
use super::read::ReadError;
use super::root::{MountState, Root};
use super::sealed_root::RootError;
use crate::blocks::cache::BlockCache;
use crate::blocks::directory;
use crate::blocks::edit_file::{NoSwap, SwapIn};
use crate::blocks::error::BlockError;
use crate::blocks::form::BlockForm;
use crate::blocks::pace::Wanted;
use crate::format::{DirectoryRef, Owner, xattrs};
use crate::handle_table::HandleTable;
use crate::keep::Keep;
use crate::room::LastRoom;

/// How to write a volume.
#[derive(Clone, Debug)]
pub struct WriteOptions {
    /// Blocks kept in memory that the ring has.
    pub cache_bytes: u64,
    /// How far to read ahead of a sequential reader, at most.
    pub read_ahead_bytes: u64,
    /// Changed bytes kept in memory: a writer waits for the ring when there are more.
    pub max_changed_bytes: u64,
    /// The read key of an encrypted volume.
    pub read_key: Option<ReadKey>,
    /// Who owns what the volume has no owner for: user and group.
    pub owner: (u32, u32),
    /// Write although another mount has said that it does. That one is fenced.
    pub take_over: bool,
    /// Bytes in the spool: a writer waits for the ring when there are more.
    pub max_spool_bytes: u64,
    /// `close` waits for the ring.
    pub sync: bool,
    /// Which old states are kept from now on, if not the same as before.
    pub keep: Option<Keep>,
    /// Where files are by number. If there is none, the mount has no file handles.
    pub handles: Option<Arc<HandleTable>>,
}

impl Default for WriteOptions {
    fn default() -> WriteOptions {
        WriteOptions {
            cache_bytes: 32 << 20,
            read_ahead_bytes: 16 << 20,
            max_changed_bytes: 64 << 20,
            read_key: None,
            owner: (0, 0),
            take_over: false,
            max_spool_bytes: 1 << 30,
            sync: false,
            keep: None,
            handles: None,
        }
    }
}

/// Why a volume cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// Its root cannot be read.
    #[error("the volume's root cannot be read: {0}")]
    Get(#[from] GetError),
    /// Its root is not one that this program and key can read.
    #[error("{0}")]
    Root(#[from] RootError),
    /// Another mount writes it.
    #[error(
        "another mount writes the volume; if it is gone without having ended, the volume is free \
         in {left_secs} s"
    )]
    Busy {
        /// How long its claim lasts yet.
        left_secs: u64,
    },
    /// The root that names this mount as the writer was not put.
    #[error("the volume cannot be written: {0}")]
    Flush(#[from] FlushError),
    /// What an earlier mount has left in the spool cannot be read.
    #[error("{0}")]
    Spool(String),
    /// What is left in the spool cannot be made again, since the ring does not answer.
    #[error("what is left in the spool cannot be brought to the ring: {0}")]
    Replay(String),
}

/// Why changes are not on the ring.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlushError {
    /// The ring did not take blocks.
    #[error("{0}")]
    Put(PutError),
    /// A block that is needed beside the new ones cannot be read.
    #[error("a block cannot be read: {0}")]
    Block(Box<ReadError>),
    /// Something else that is needed cannot be read.
    #[error("a block cannot be read: {0}")]
    Read(String),
    /// What was written is more than a volume can hold.
    #[error("the volume cannot hold what was written: {0}")]
    Format(String),
    /// The leases of the volume's blocks cannot be kept.
    #[error("the blocks' leases cannot be kept: {0}")]
    Lease(String),
    /// Another writer has put a root.
    #[error(
        "another writer has put version {version} of the volume: this mount changes nothing any more"
    )]
    Fenced {
        /// The root that it has put.
        version: u64,
    },
    /// The new contents of some files cannot be stored; all else is on the ring.
    #[error("{what} is not stored: {error}")]
    LeftOut {
        /// Which, for people.
        what: String,
        /// Why one of them is not.
        error: Box<FlushError>,
    },
    /// This is what a mount has left that another writer has fenced.
    #[error("these changes were set aside: they can be read, and nothing can be changed")]
    SetAside,
}

impl FlushError {
    /// As the kernel understands it.
    fn errno(&self) -> Errno {
        match self {
            FlushError::Put(PutError::Full(_)) => Errno::ENOSPC,
            FlushError::Put(PutError::OverQuota { .. }) => Errno::EDQUOT,
            FlushError::Put(PutError::Unavailable(_)) => Errno::ETIMEDOUT,
            FlushError::Fenced { .. } | FlushError::SetAside => Errno::EROFS,
            FlushError::LeftOut { error, .. } => error.errno(),
            FlushError::Block(error) => error.errno(),
            _ => Errno::EIO,
        }
    }

    /// Whether the ring has no room for what was put, but may have some for less.
    fn is_no_room(&self) -> bool {
        match self {
            FlushError::LeftOut { error, .. } => error.is_no_room(),
            error => {
                matches!(error, FlushError::Put(PutError::Full(_) | PutError::OverQuota { .. }))
            }
        }
    }

    /// Whether a block is lost that is needed beside the new ones.
    fn is_lost(&self) -> bool {
        match self {
            FlushError::LeftOut { error, .. } => error.is_lost(),
            FlushError::Block(error) => error.errno() == Errno::EIO,
            _ => false,
        }
    }

    /// Whether other files may be stored although one was not.
    fn leaves_others(&self) -> bool {
        self.is_no_room() || self.is_lost()
    }
}

/// Files whose contents the last flush has left out, and why.
struct LeftOut {
    files: BTreeMap<u64, FlushError>,
    since: Instant,
}

/// What the calls and the flushes share.
struct Shared {
    env: Env,
    blocks: Arc<dyn Blocks>,
    keeper: Arc<dyn LeaseKeeper>,
    cache: Arc<BlockCache>,
    cipher: Option<VolumeCipher>,
    /// How the ring has the volume's blocks.
    form: BlockForm,
    secret: SecretKey,
    options: WriteOptions,
    /// Where changes wait for the ring.
    spool: Option<Arc<Spool>>,
    /// Names this mount, and its spool, among all writers.
    spool_id: [u8; 16],
    /// Where changes lie that an earlier mount has left and that could not be made again.
    set_aside: Mutex<Option<String>>,
    tree: Mutex<Tree>,
    /// The newest root. Held while one is put.
    head: futures_util::lock::Mutex<Head>,
    /// Wakes the flush task.
    wake: Arc<Notify>,
    waiters: Mutex<Vec<Waiter>>,
    /// Dropped when a flush ends.
    flush_ends: Mutex<Vec<oneshot::Sender<()>>>,
    /// Why this mount may not write, or not any more.
    fence: Mutex<Option<FlushError>>,
    /// Why the last flush failed, if it did.
    trouble: Mutex<Option<FlushError>>,
    /// Locked before the tree.
    left_out: Mutex<Option<LeftOut>>,
    /// The tree whose blocks the keeper has.
    listed: Mutex<Option<Tops>>,
    /// Blocks that are not needed any more.
    releases: UnneededBlocks,
    has_ended: AtomicBool,
    last_room: LastRoom,
}

/// Bytes swapped out at once.
const SWAP_BYTES: u64 = 8 << 20;

/// How long a writer waits for a flush before changes are swapped out: a ring that takes less than
/// half of [`WriteOptions::max_changed_bytes`] in this time is slower than the disk. Guess.
const FLUSH_PATIENCE: Duration = Duration::from_millis(500);

/// A caller that waits for a flush.
struct Waiter {
    /// The file that it waits for; `None` if it waits for all.
    about: Option<u64>,
    sender: oneshot::Sender<Result<(), FlushError>>,
}

/// The newest root that this mount has put or read.
struct Head {
    block: SignedBlock,
    root: Root,
    /// The next one, if it is not known whether the ring has it: no other may have its version.
    unsure: Option<(SignedBlock, Root)>,
}

/// What a version's trees hang on: the root directory, the table of links, the history, the roots that were taken
/// over, and the root's extended attributes.
type Tops = (DirectoryRef, DirectoryRef, DirectoryRef, DirectoryRef, Option<BlockHash>);

impl Shared {
    fn tree(&self) -> MutexGuard<'_, Tree> {
        self.tree.lock().expect("no holder of this lock panics")
    }

    fn now(&self) -> FileTime {
        FileTime::from_unix_ms(self.env.unix_ms())
    }

    fn check_fence(&self) -> Result<(), FlushError> {
        match &*self.fence.lock().expect("no holder of this lock panics") {
            Some(fenced) => Err(fenced.clone()),
            None => Ok(()),
        }
    }

    fn fence(&self, version: u64) -> FlushError {
        let fenced = FlushError::Fenced { version };
        *self.fence.lock().expect("no holder of this lock panics") = Some(fenced.clone());
        tracing::error!("{fenced}");
        fenced
    }

    fn left_out(&self) -> MutexGuard<'_, Option<LeftOut>> {
        self.left_out.lock().expect("no holder of this lock panics")
    }

    /// That the last flush has not left out the contents of this file, or of any that has a name.
    fn check_left_out(&self, about: Option<u64>) -> Result<(), FlushError> {
        let left_out = self.left_out();
        let Some(LeftOut { files, .. }) = &*left_out else { return Ok(()) };
        let error = match about {
            Some(inode) => files.get(&inode).map(|error| (inode, error, 0)),
            None => {
                let tree = self.tree();
                let mut named = files.iter().filter(|(inode, _)| tree.is_named(**inode));
                named.next().map(|(inode, error)| (*inode, error, named.count()))
            }
        };
        let Some((inode, error, others)) = error else { return Ok(()) };
        let mut what = self.name_of(inode);
        if others > 0 {
            what += &format!(" (and {others} more)");
        }
        Err(FlushError::LeftOut { what, error: Box::new(error.clone()) })
    }

    /// A file's path, for people.
    fn name_of(&self, inode: u64) -> String {
        match self.tree().path(inode) {
            Some(path) => String::from_utf8_lossy(&path).into_owned(),
            None => "a file with no name, or several".to_owned(),
        }
    }

    /// Keeps the outcome of a flush, for the mount's status.
    fn note(&self, outcome: &Result<(), FlushError>) {
        let outcome = outcome.clone().and_then(|()| self.check_left_out(None));
        let told = {
            let mut trouble = self.trouble.lock().expect("no holder of this lock panics");
            std::mem::replace(&mut *trouble, outcome.clone().err())
        };
        if let Err(error) = &outcome
            && told.as_ref() != Some(error)
        {
            tracing::warn!("changes are not on the ring: {error}");
        }
    }

    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    fn waiters(&self) -> MutexGuard<'_, Vec<Waiter>> {
        self.waiters.lock().expect("no holder of this lock panics")
    }

    fn take_waiters(&self) -> Vec<Waiter> {
        std::mem::take(&mut self.waiters())
    }

    fn has_waiters(&self) -> bool {
        !self.waiters().is_empty()
    }

    fn fail_waiters(&self, error: &FlushError) {
        for waiter in self.take_waiters() {
            // Those that waited may have given up.
            let _ = waiter.sender.send(Err(error.clone()));
        }
    }

    /// Hands the records of a call over to the spool.
    fn keep_records(&self, tree: &mut Tree) {
        let (records, emptied) = (tree.take_records(), tree.take_emptied());
        let Some(spool) = &self.spool else { return };
        if !records.is_empty() && spool.append(records) {
            tree.restart_journal();
        }
        spool.note_emptied(&emptied);
    }

    /// Resolves when file `inode`, which was written, may be closed: what was done before is in the
    /// spool, or on the ring.
    async fn kept(&self, inode: u64) -> Result<(), FlushError> {
        let is_kept = match &self.spool {
            Some(spool) if !self.options.sync => spool.synced().await.is_ok(),
            spool => spool.is_none() && !self.options.sync,
        };
        if is_kept { Ok(()) } else { self.flushed(Some(inode)).await }
    }

    /// Waits for the ring, while `is_full`.
    async fn flushed_while(&self, is_full: impl Fn() -> bool) -> Result<(), FlushError> {
        let flushed = self.flushed(None).await;
        self.check_fence()?;
        if is_full() { flushed } else { Ok(()) }
    }

    /// Makes room in memory: on disk if there is a spool, else on the ring.
    async fn make_room(&self) -> Result<(), FlushError> {
        let most = self.options.max_changed_bytes;
        if self.tree().changed_bytes() >= most / 2 {
            self.wake.notify();
        }
        if self.tree().held_bytes() < most {
            return Ok(());
        }
        if let Some(spool) = &self.spool {
            // Whatever a flush takes away need not be written to the disk and read again.
            if self.has_trouble() || !self.flush_ends_soon().await {
                // A disk that fails has been said; what is being flushed stays in memory.
                let _ = self.swap_out(spool).await;
            }
            if self.tree().held_bytes() < 2 * most {
                return Ok(());
            }
        }
        self.flushed_while(|| self.tree().held_bytes() >= most).await
    }

    /// Whether half of the changes are in memory that may be.
    fn holds_half(&self) -> bool {
        self.tree().held_bytes() >= self.options.max_changed_bytes / 2
    }

    /// Whether all that was written is in the spool, if not on the ring.
    async fn has_spooled(&self) -> bool {
        match &self.spool {
            Some(spool) => spool.synced().await.is_ok(),
            None => false,
        }
    }

    fn has_trouble(&self) -> bool {
        self.trouble.lock().expect("no holder of this lock panics").is_some()
    }

    /// Resolves when the flush that is under way has ended, or takes too long; whether there is
    /// room then.
    async fn flush_ends_soon(&self) -> bool {
        let (sender, receiver) = oneshot::channel();
        self.flush_ends.lock().expect("no holder of this lock panics").push(sender);
        // No answer comes; the sender is dropped.
        let ended = timeout(&*self.env, FLUSH_PATIENCE, receiver).await.is_ok();
        ended && self.tree().held_bytes() < self.options.max_changed_bytes
    }

    /// Writes changed blocks to the swap file until few are left in memory.
    async fn swap_out(&self, spool: &Spool) -> std::io::Result<()> {
        let _swapping = spool.swapping().await;
        let most = self.options.max_changed_bytes;
        while self.tree().changed_bytes() >= most / 4 {
            let blocks = self.tree().in_memory(SWAP_BYTES.min(most / 8));
            if blocks.is_empty() {
                break;
            }
            let swapped = spool.swap_out(blocks.iter().map(|(_, _, data)| data)).await;
            let swapped = swapped.inspect_err(|error| {
                tracing::warn!("changes cannot be swapped out: {error}");
            })?;
            self.tree().swap_out(&blocks, &swapped);
        }
        Ok(())
    }

    /// Empties the swap file if nothing in it is needed.
    async fn clear_swap(&self) {
        let Some(spool) = &self.spool else { return };
        let _swapping = spool.swapping().await;
        if spool.has_swap()
            && !self.tree().has_swapped()
            && let Err(error) = spool.swap_clear().await
        {
            tracing::warn!("the swap file cannot be emptied: {error}");
        }
    }

    /// Frees what the spool holds of files that are gone. While a flush runs, the swap file stays: the
    /// flush may read from it what was removed since it began.
    async fn free_spool(&self) {
        let Some(spool) = &self.spool else { return };
        spool.drop_emptied().await;
        if let Some(_no_flush) = self.head.try_lock() {
            self.clear_swap().await;
        }
    }

    /// Where changes are swapped out to.
    fn swap(&self) -> &dyn SwapIn {
        match &self.spool {
            Some(spool) => &**spool,
            None => &NoSwap,
        }
    }

    /// Resolves when all changes made before are on the ring, or were tried in vain. Contents that find
    /// no room are an error if they are of file `about`, or if that is `None`.
    async fn flushed(&self, about: Option<u64>) -> Result<(), FlushError> {
        let (sender, receiver) = oneshot::channel();
        self.waiters().push(Waiter { about, sender });
        self.wake.notify();
        let ended = || FlushError::Read("the mount has ended".into());
        receiver.await.unwrap_or_else(|_| Err(ended()))
    }

    /// Fetches what a call needs.
    async fn load(&self, need: Need, loaded: &mut Loaded) -> Result<(), Fault> {
        match need {
            Need::Name(stored, name) => {
                let found = directory::find(&self.cache, &stored, &name).await?;
                let hash = stored.hash.expect("an empty directory has no names to look for");
                loaded.names.insert((hash, name), found);
            }
            Need::Content(need) => loaded.content.load(need, &self.cache, self.swap()).await?,
            Need::Xattrs(hash) => {
                let bytes = self.cache.get(hash, Wanted::Now(1 << 10)).await?;
                let all = xattrs::decode(&bytes).map_err(BlockError::bad(hash))?;
                loaded.xattrs.insert(hash, all.into_iter().collect());
            }
        }
        Ok(())
    }
}

fn random_id(env: &Env) -> [u8; 16] {
    let mut id = [0; 16];
    for part in id.chunks_mut(8) {
        part.copy_from_slice(&env.random_u64().to_be_bytes());
    }
    id
}

/// An empty volume's root: its top directory belongs to `owner`.
pub fn empty_root(env: &Env, label: &str, owner: (u32, u32), block_size_log2: u8) -> Root {
    let now = env.unix_ms();
    let time = FileTime::from_unix_ms(now);
    Root {
        block_size_log2,
        mode: 0o755,
        mtime: time,
        published_unix_ms: now,
        files: 0,
        dirs: 1,
        symlinks: 0,
        bytes: 0,
        directory: DirectoryRef::default(),
        label: Some(label.to_owned()),
        xattrs: None,
        mounted: MountState {
            owner: Some(Owner {
                inode: 1,
                uid: owner.0,
                gid: owner.1,
                links: 1,
                ctime: time,
                atime: time,
            }),
            next_inode: 2,
            has_own_blocks: true,
            ..MountState::default()
        },
    }
}
