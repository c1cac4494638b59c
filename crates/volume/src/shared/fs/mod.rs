//! A shared volume as a file system: `names` makes and removes files, `newborns` creates them,
//! `near` and `drawn` say where they lie, `renames` moves them, `places` leaves a directory one name, `removals` removes inodes,
//! `listing` lists directories, `ahead` reads inodes ahead of lookups, `files` reads and writes, `follow` shows in open files what others have written, `calls` has the calls of a file system, `attributes` changes what else an inode says, `state` tells what this mount knows of a file, `conflicts` keeps what was
//! written at the same time;
//! `lost` shows names without inodes, and names files again that were removed while they were written;
//! `offline` brings to the ring what was written while it was out of reach; `locks` keeps programs of all mounts
//! out of each other's way. `history` shows what was before.
//!
//! What is promised, and when, is in `docs/design/shared.md`.

mod ahead;
mod attributes;
mod calls;
mod conflicts;
mod drawn;
mod files;
mod follow;
mod history;
mod listing;
mod locks;
mod lost;
mod names;
mod near;
mod newborns;
mod offline;
mod places;
mod releases;
mod removals;
mod renames;
mod state;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_dht::{Blocks, GetError};
use atoll_env::{Env, Instant, sleep, timeout};
use atoll_key::{SecretKey, VolumeId};
use atoll_vfs::{Attr, AttrReply, Entry, Errno, FileKind, FileTime, InvalidationQueue};

use self::ahead::LookupAhead;
use self::drawn::Drawn;
use self::history::PastEngine;
pub use self::history::PastFs;
use self::locks::FileLocks;
use self::lost::Looks;
use self::near::NearKeys;
pub use self::offline::Spooled;
use self::releases::Releases;
use self::removals::Removals;
use super::access::{Credentials, NotAllowed, NotReader, ReadAccess, VolumeRecord};
use super::consistency::Consistency;
use super::fault::Fault;
use super::inline_blocks::InlineBlocks;
use super::inode::{self, InodeKey};
use super::inodes::{Freshness, Inodes, Version};
use super::lock_lease::Lessee;
use super::spool::SpooledBlocks;
use super::table::{Node, ROOT, Table, attr_of, attr_of_lost};
use crate::blocks::cache::BlockCache;
use crate::blocks::form::BlockForm;
use crate::blocks::read_pieces::Readers;
use crate::counted::counted;
use crate::format::FormatError;
use crate::keep::Keep;
use crate::mount::Front;
use crate::room::LastRoom;
use crate::spool_directory::SpoolDirectory;

/// How often what could not be written when its file was closed is tried again. Guess.
const RETRY_EVERY: Duration = Duration::from_secs(5);
/// What the ring has no room for is tried again after so many times that. A guess.
const MOST_ROUNDS_BETWEEN: u32 = 24;

/// How long the status may wait for the ring, to say whether the user may write. A guess.
const STATUS_LIMIT: Duration = Duration::from_secs(5);

/// How to mount a shared volume.
#[derive(Clone, Debug)]
pub struct SharedOptions {
    /// Blocks kept in memory that the ring has.
    pub cache_bytes: u64,
    /// How far to read ahead of a sequential reader, at most.
    pub read_ahead_bytes: u64,
    /// Changed bytes kept in memory: a writer waits for the ring when there are more.
    pub max_changed_bytes: u64,
    /// How old names and attributes may be that are shown without asking the ring. What an open shows
    /// follows from the consistency alone.
    pub names_max_age: Duration,
    /// Whether the inodes of a directory are read ahead of a program that looks up its names in order.
    pub read_inodes_ahead: bool,
    /// Whether blocks that this mount has replaced are released, instead of staying until their leases end.
    pub releases_replaced: bool,
    /// When what others have written is seen, of files that do not say it themselves.
    pub consistency: Consistency,
    /// How much may wait on disk for the ring, of a mount that has a directory for that.
    pub max_spool_bytes: u64,
}

impl Default for SharedOptions {
    fn default() -> SharedOptions {
        SharedOptions {
            cache_bytes: 32 << 20,
            read_ahead_bytes: 16 << 20,
            max_changed_bytes: 64 << 20,
            names_max_age: Duration::from_secs(1),
            read_inodes_ahead: true,
            releases_replaced: true,
            consistency: Consistency::CloseToOpen,
            max_spool_bytes: 1 << 30,
        }
    }
}

/// Why a volume cannot be mounted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Its root cannot be read.
    #[error("the volume's root cannot be read: {0}")]
    Get(#[from] GetError),
    /// Its root is not that of a shared volume.
    #[error("the volume's record is bad: {0}")]
    Record(#[from] FormatError),
    /// It is encrypted, and the user cannot read it.
    #[error(transparent)]
    NotReader(#[from] NotReader),
    /// Its root directory cannot be read.
    #[error("the root directory cannot be read: {0}")]
    Directory(String),
    /// What an earlier mount has left on disk cannot be read.
    #[error("the spool cannot be read: {0}")]
    Spool(String),
}

/// Files whose last changes are not on the ring.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} not on the ring ({paths}): {why}", counted(*files as u64, "file has changes that are", "files have changes that are"))]
pub struct EndError {
    /// How many.
    pub files: usize,
    /// Some of them, for people.
    pub paths: String,
    /// What was said of the last one.
    pub why: String,
    /// Whether it was that there is no room.
    is_for_room: bool,
}

impl EndError {
    fn of((files, paths): (usize, String), Fault { errno, why, .. }: Fault) -> EndError {
        let is_for_room = matches!(errno, Errno::ENOSPC | Errno::EDQUOT);
        let why = why.unwrap_or_else(|| errno.to_string());
        EndError { files, paths, why, is_for_room }
    }
}

/// A shared volume.
pub type SharedFs = Front<SharedEngine>;

/// See the module.
pub struct SharedEngine {
    shared: Arc<Shared>,
    /// What is below `.atoll`.
    past: PastEngine,
}

struct Shared {
    env: Env,
    last_room: LastRoom,
    /// The volume's name for people.
    label: String,
    /// The ring's, and those that lie in inodes.
    blocks: Arc<dyn Blocks>,
    inline: Arc<InlineBlocks>,
    cache: Arc<BlockCache>,
    readers: Readers,
    inodes: Inodes,
    spool: SpooledBlocks,
    /// Held while what is spooled is brought to the ring.
    bringing: futures_util::lock::Mutex<()>,
    lessee: Lessee,
    locks: FileLocks,
    /// What the kernel must drop because another mount has written it.
    invalidations: Arc<InvalidationQueue>,
    options: SharedOptions,
    block_size_log2: u8,
    /// Which old versions are kept.
    keep: Keep,
    created_unix_ms: u64,
    table: Mutex<Table>,
    /// Why what was written last could not be brought to the ring.
    trouble: Mutex<Option<String>>,
    /// Directories that were removed here a short while ago, each with its parent, its name, and when.
    removed: Mutex<Vec<(InodeKey, inode::Entry, Instant)>>,
    removals: Removals,
    /// Directories of which names are being dropped that do not count.
    settling: Mutex<BTreeSet<InodeKey>>,
    releases: Releases,
    /// Files that were written a moment ago.
    written: Mutex<Looks>,
    ahead: Mutex<LookupAhead>,
    near: NearKeys,
    drawn: Drawn,
    has_ended: AtomicBool,
}

impl SharedFs {
    /// Opens a volume: read-only without a user's key. Of an encrypted volume, the user must be a reader.
    pub async fn open(
        env: Env,
        blocks: Arc<dyn Blocks>,
        volume: VolumeId,
        user: Option<SecretKey>,
        options: SharedOptions,
    ) -> Result<SharedFs, OpenError> {
        let spool = SpooledBlocks::without_spool(env.clone(), blocks, volume);
        SharedFs::open_over(env, spool, volume, user, options).await
    }

    /// The same for a user who may write, with a directory of which this mount is the only user: what is written
    /// while the ring is out of reach waits there, and what earlier mounts of this user have left there is brought to the
    /// ring.
    pub async fn open_spooled(
        env: Env,
        blocks: Arc<dyn Blocks>,
        (volume, user): (VolumeId, SecretKey),
        options: SharedOptions,
        directory: Arc<dyn SpoolDirectory>,
    ) -> Result<SharedFs, OpenError> {
        let (owner, files) = ((volume, user.user_id()), (directory, options.max_spool_bytes));
        let spool = SpooledBlocks::open(env.clone(), blocks, owner, files).await;
        let spool = spool.map_err(|error| OpenError::Spool(error.to_string()))?;
        let opened = SharedFs::open_over(env, spool, volume, Some(user), options).await?;
        let shared = &opened.shared;
        shared.env.spawn(Box::pin(offline::run(Arc::downgrade(shared))));
        Ok(opened)
    }

    async fn open_over(
        env: Env,
        spool: SpooledBlocks,
        volume: VolumeId,
        user: Option<SecretKey>,
        options: SharedOptions,
    ) -> Result<SharedFs, OpenError> {
        let blocks: Arc<dyn Blocks> = Arc::new(spool.clone());
        let root = blocks.get_signed(volume.root_key()).await?;
        let record = VolumeRecord::decode(&root.payload)?;
        let reading = ReadAccess::new(env.clone(), blocks.clone(), (volume, &record), user.clone());
        let reading = reading.await?;
        let inline = InlineBlocks::over(blocks.clone(), reading.sealing().clone());
        let over: Arc<dyn Blocks> = inline.clone();
        let cache =
            BlockCache::new(env.clone(), (over.clone(), BlockForm::default()), options.cache_bytes);
        let readers = Readers::new(cache.clone(), options.read_ahead_bytes, options.cache_bytes);
        let credentials = Credentials::new(env.clone(), blocks.clone(), user);
        let keeping = (options.consistency, record.keep);
        let lessee = Lessee::new(env.clone(), blocks.clone());
        let holder =
            (u128::from(env.random_u64()) << 64 | u128::from(env.random_u64())).to_be_bytes();
        let shared = Arc::new(Shared {
            label: record.label,
            inodes: Inodes::new(
                env.clone(),
                (spool.clone(), cache.clone()),
                volume,
                (credentials, reading),
                keeping,
            ),
            env,
            spool,
            bringing: Default::default(),
            lessee,
            locks: FileLocks::new(holder),
            invalidations: Arc::default(),
            blocks: over,
            inline,
            last_room: LastRoom::default(),
            cache,
            readers,
            options,
            block_size_log2: record.block_size_log2,
            keep: record.keep,
            created_unix_ms: record.created_unix_ms,
            table: Mutex::new(Table::of_root(record.root)),
            trouble: Mutex::default(),
            removed: Mutex::default(),
            removals: Removals::default(),
            settling: Mutex::default(),
            releases: Releases::default(),
            written: Mutex::default(),
            ahead: Mutex::default(),
            near: NearKeys::default(),
            drawn: Drawn::default(),
            has_ended: AtomicBool::new(false),
        });
        let root = shared.inodes.read(record.root, Freshness::Newest).await;
        let why = |fault: Fault| fault.why.unwrap_or_else(|| fault.errno.to_string());
        let root = root.map_err(|fault| OpenError::Directory(why(fault)))?;
        if root.inode().contents.kind() != FileKind::Directory {
            return Err(OpenError::Directory("it is not one".into()));
        }
        shared.env.spawn(Box::pin({
            let (shared, groups) = (shared.clone(), root.block.groups().to_vec());
            async move {
                if shared.inodes.credentials.may_write(&groups).await {
                    shared.draw_directories(&groups);
                }
            }
        }));
        shared.env.spawn(Box::pin(retry(Arc::downgrade(&shared))));
        shared.env.spawn(Box::pin(releases::run(Arc::downgrade(&shared))));
        let past = PastEngine::of(shared.clone());
        Ok(Front::over(SharedEngine { shared, past }))
    }
}

impl SharedEngine {
    /// The volume as it was at a time, milliseconds since 1970, read-only: of each file the newest version
    /// that was there then and is kept. `None` if nothing is kept of that time.
    ///
    /// # Errors
    /// If its root directory of that time cannot be read.
    pub async fn at(&self, unix_ms: u64) -> Result<Option<PastFs>, String> {
        match PastEngine::mounted_at(self.shared.clone(), unix_ms).await {
            Ok(past) => Ok(Some(Front::over(past))),
            Err(Fault { errno: Errno::ENOENT, .. }) => Ok(None),
            Err(Fault { errno, why, .. }) => Err(why.unwrap_or_else(|| errno.to_string())),
        }
    }

    /// The times of the states that are kept now, milliseconds since 1970.
    pub fn states(&self) -> BTreeSet<u64> {
        self.past.states()
    }

    /// Whether the user may write the root directory now.
    pub async fn may_write(&self) -> bool {
        let shared = &self.shared;
        match shared.directory(ROOT, Freshness::Within(Duration::MAX)).await {
            Ok((_, root)) => shared.inodes.credentials.may_write(root.block.groups()).await,
            Err(_) => false,
        }
    }

    /// Writes what files have that were written and not closed. Called once no call is made any more. What is spooled
    /// is brought to the ring if that is within reach.
    pub async fn end(&self) -> Result<(), EndError> {
        let shared = &self.shared;
        shared.has_ended.store(true, Ordering::Release);
        if shared.spool.is_offline() {
            self.write_all().await?;
            // What is left is told by `spooled`.
            let _ = shared.bring_spooled().await;
            if shared.spool.is_offline() {
                return Ok(());
            }
        }
        shared.restore_removed(Duration::ZERO).await;
        shared.finish_removals().await;
        let written = self.write_all().await;
        let release = shared.release_replaced();
        let _ = timeout(&*shared.env, releases::END_LIMIT, release).await;
        written
    }

    async fn write_all(&self) -> Result<(), EndError> {
        let shared = &self.shared;
        shared.publish_all(false).await?;
        shared.check_written().await;
        let removed = shared.put_removals().await;
        removed.map_err(|fault| {
            EndError::of((shared.inodes.behind().len(), "removed names".into()), fault)
        })
    }

    /// What waits on disk for the ring, if anything does.
    pub fn spooled(&self) -> Option<Spooled> {
        self.shared.spooled()
    }

    /// Changed bytes in memory.
    pub fn held_bytes(&self) -> u64 {
        self.shared.table().held_bytes()
    }

    /// How many files are in memory because the kernel knows them or they have changes.
    pub fn files_in_memory(&self) -> usize {
        self.shared.table().len()
    }
}

/// Brings files to the ring that could not be written when they were closed, until the mount ends. While it has no
/// room it is tried less and less often: each time costs the line of all that waits.
async fn retry(shared: Weak<Shared>) {
    let (mut pause, mut rounds_left) = (1, 0);
    loop {
        let Some(env) = shared.upgrade().map(|shared| shared.env.clone()) else { return };
        sleep(&*env, RETRY_EVERY).await;
        let Some(shared) = shared.upgrade() else { return };
        if shared.has_ended.load(Ordering::Acquire) {
            return;
        }
        if !shared.spool.is_offline() {
            shared.restore_removed(RETRY_EVERY).await;
        }
        shared.finish_removals().await;
        shared.check_written().await;
        shared.check_locks().await;
        shared.inodes.credentials.look_ahead().await;
        if rounds_left > 0 {
            rounds_left -= 1;
            continue;
        }
        shared.name_old_newborns().await;
        // What failed is told by the status.
        pause = match shared.publish_all(true).await {
            Err(error) if error.is_for_room => (2 * pause).min(MOST_ROUNDS_BETWEEN),
            _ => 1,
        };
        rounds_left = pause - 1;
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no holder of this lock panics")
    }

    fn now(&self) -> FileTime {
        FileTime::from_unix_ms(self.env.unix_ms())
    }

    /// How old names and attributes may be.
    fn names_age(&self) -> Freshness {
        Freshness::Within(self.options.names_max_age)
    }

    fn random_number(&self) -> [u8; 16] {
        let (first, second) = (self.env.random_u64(), self.env.random_u64());
        (u128::from(first) << 64 | u128::from(second)).to_be_bytes()
    }

    /// A directory that the kernel knows.
    async fn directory(
        &self,
        number: u64,
        freshness: Freshness,
    ) -> Result<(InodeKey, Arc<Version>), Fault> {
        let (key, orphan) = {
            let table = self.table();
            let node = table.node(number)?;
            if node.kind != FileKind::Directory {
                return Err(Errno::ENOTDIR.into());
            }
            (node.key, node.orphan.clone())
        };
        let version = match orphan {
            Some(version) => version,
            None => self.inodes.read(key, freshness).await?,
        };
        match version.inode().contents.kind() {
            FileKind::Directory => Ok((key, version)),
            _ => Err(Errno::ENOTDIR.into()),
        }
    }

    /// The attributes of a file as far as they are in memory: it is open, or has no name any more.
    fn attr_here(&self, number: u64, node: &Node) -> Option<Attr> {
        if node.is_lost {
            return Some(attr_of_lost(number, node.kind));
        }
        let mut attr = match (&node.view, &node.orphan) {
            (Some(view), _) => view.attr(number),
            (None, Some(orphan)) => attr_of(number, orphan.inode(), self.block_size_log2),
            (None, None) => return None,
        };
        if node.orphan.is_some() || node.is_nameless || self.is_removed_with_lock(number) {
            attr.nlink = 0;
        }
        Some(attr)
    }

    /// The attributes of a file that the kernel knows.
    async fn attr(&self, number: u64) -> Result<Attr, Fault> {
        let key = {
            let table = self.table();
            let node = table.node(number)?;
            if let Some(attr) = self.attr_here(number, node) {
                return Ok(attr);
            }
            node.key
        };
        let version = self.inodes.read(key, self.names_age()).await?;
        Ok(attr_of(number, version.inode(), self.block_size_log2))
    }

    /// The entry of an inode, counted as one lookup.
    async fn entry(&self, key: InodeKey, freshness: Freshness) -> Result<Entry, Fault> {
        let number = self.table().number_of(&key);
        if let Some(number) = number {
            self.follow(number).await;
        }
        {
            let mut table = self.table();
            if let Some(number) = table.number_of(&key)
                && !table.node(number)?.is_lost
                && let Some(attr) = self.attr_here(number, table.node(number)?)
            {
                table.hold(key, attr.kind);
                return Ok(entry(attr));
            }
        }
        let version = self.inodes.read(key, freshness).await?;
        Ok(self.hold(key, &version))
    }

    /// The entry of an inode that was just read or written, counted as one lookup.
    fn hold(&self, key: InodeKey, version: &Version) -> Entry {
        let mut table = self.table();
        let number = table.hold(key, version.inode().contents.kind());
        table.node_mut(number).into_iter().for_each(|node| node.is_lost = false);
        let here = table.node(number).ok().and_then(|node| self.attr_here(number, node));
        entry(here.unwrap_or_else(|| attr_of(number, version.inode(), self.block_size_log2)))
    }

    /// What the attribute of the root directory says: `ok` if the mount works.
    async fn status(&self) -> String {
        if let Some(waits) = self.spool.waiting_told() {
            return waits;
        }
        let told = self.pending_status();
        match self.why_not_written().await {
            Some(why) if told == "ok" => format!("the root directory cannot be written: {why}"),
            Some(why) => format!("{told}; the root directory cannot be written: {why}"),
            None => told,
        }
    }

    /// Why a user who has a key may not write the root directory; `None` if that is not known now.
    async fn why_not_written(&self) -> Option<NotAllowed> {
        let credentials = &self.inodes.credentials;
        if self.spool.is_offline() || credentials.user().is_none() {
            return None;
        }
        let allowed = async {
            let (_, root) = self.directory(ROOT, self.names_age()).await.ok()?;
            credentials.check(root.block.groups()).await.err()
        };
        let why = timeout(&*self.env, STATUS_LIMIT, allowed).await.ok().flatten();
        why.filter(|why| !matches!(why, NotAllowed::Unknown { .. }))
    }

    fn pending_status(&self) -> String {
        let (changed, held) = {
            let table = self.table();
            (table.changed(false).len() + self.inodes.behind().len(), table.held_bytes())
        };
        let trouble = self.trouble.lock().expect("no holder of this lock panics").clone();
        if let Some(Spooled { files, bytes, why, .. }) = self.spooled() {
            let alone = |why| {
                let files = counted(changed as u64, "file is", "files are");
                format!("; {files} in memory alone ({}): {why}", self.changed_paths())
            };
            let told = trouble.filter(|_| changed > 0).map(alone).unwrap_or_default();
            return match files {
                0 => format!("no file waits in the spool; {why}{told}"),
                _ => {
                    let files = counted(files as u64, "file waits", "files wait");
                    format!("{files} in the spool ({bytes} bytes); {why}{told}")
                }
            };
        }
        let files = counted(changed as u64, "file", "files");
        let what = format!("{files} with {}", counted(held, "changed byte", "changed bytes"));
        match (trouble, changed) {
            (Some(why), 1..) => {
                let verb = if changed == 1 { "waits" } else { "wait" };
                format!("{what} {verb} for the ring ({}): {why}", self.changed_paths())
            }
            (_, 0) => "ok".into(),
            (None, 1) => format!("ok; {what} is not closed yet"),
            (None, _) => format!("ok; {what} are not closed yet"),
        }
    }
}

/// The kernel asks again each time: only the ring knows what others have changed.
fn entry(attr: Attr) -> Entry {
    Entry { attr, generation: 0, name_ttl: Duration::ZERO, attr_ttl: Duration::ZERO }
}

fn reply(attr: Attr) -> AttrReply {
    AttrReply { attr, ttl: Duration::ZERO }
}
