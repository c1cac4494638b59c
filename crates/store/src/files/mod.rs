//! `FileStore`: one file for each block, in a directory whose files may vanish.
//!
//! This is how a node gives a transparent file system (TFS, §3 of the paper) all of its free
//! space: transparent files take nothing from ordinary ones, and may vanish at any time. **A
//! vanished file is a lost replica**: the store forgets the block, [`crate::BlockStore::list`]
//! no longer has it, and repair restores it from its other copies.
//!
//! A block's file holds exactly the block's bytes, so that one of 8 KiB takes two blocks of the
//! file system and not three. Its lease, its owner and a checksum of the bytes
//! are in an index like a `DiskStore`'s, in an ordinary directory, with the checksum in the place
//! of the offset in a segment. A file whose bytes do not match length and checksum, be
//! they torn or foreign, counts as lost: the store returns what it was given or nothing.
//!
//! - **Nothing is synced** but by [`FileStore::flush`]. `put` answers when the file is written. A
//!   power cut costs what the file system had not yet written, and what the index had not yet
//!   committed (at most `commit_interval`): replicas, which is what may be lost here at any time.
//! - **How a loss is noticed**: when the block is asked for, be it only whether it is there (a
//!   node vouches for what it holds, and never for a vanished file); by [`FileStore::look_after`],
//!   which opens one file after another (TFS checks a file's blocks when it is opened, so this
//!   is also the paper's cleaner, §3.1) and which the node runs so that all are gone through in
//!   bounded time; and by the scrubber, which reads them.
//! - **Away.** While the directory is not there (TFS is not mounted), the store shows itself
//!   empty: nothing is listed, nothing is taken, and nothing counts as lost.
//! - **Limits**: an inode of the file system for each block, and half of its smallest unit on
//!   average at each file's end, which [`crate::Usage::disk_bytes`] counts.
//!
//! A file that the index does not know becomes a block again if it is what its name says: a key
//! determines its block's bytes. So only leases and owners are lost with the index. `writer` says
//! which entries may be out of date after a crash.

mod directory;
mod inner;
mod place;
mod writer;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use atoll_env::BoxFuture;
use atoll_key::{Key, KeyRange};

use crate::disk::{Disk, RealDisk};
use crate::engine::committer::Committer;
use crate::engine::error::IndexError;
use crate::engine::index::{self, Index};
use crate::engine::shared::Shared;
use crate::engine::threads::{Engine, Writer as _};
use crate::engine::{self, DiskConfig, OpenError};
use crate::summary::{Changed, Question};
use crate::{
    BlockInfo, BlockStore, DiskFailure, Owner, OwnerUsage, Owners, Part, ScrubStep, StoreError,
    StoredBlock, Summary, Usage,
};
use directory::{BlockDir, OWNER_DIGITS};
pub use directory::{FlagCheck, Space, UnfitDir};
pub use inner::Care;
use inner::Inner;
use place::Place;
use writer::Writer;

/// How a [`FileStore`] behaves. Start from the default.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileConfig {
    /// Whether the directory must be transparent.
    pub flag: FlagCheck,
    /// Index, queues and threads, as for a `DiskStore`; the fields about segments are not used.
    /// The capacity limits what the store takes, however much is free.
    pub disk: DiskConfig,
}

impl Default for FileConfig {
    fn default() -> FileConfig {
        let disk = DiskConfig { capacity_bytes: u64::MAX, ..DiskConfig::default() };
        FileConfig { flag: FlagCheck::default(), disk }
    }
}

/// Why a store of files could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenFilesError {
    /// The directory cannot be used.
    #[error(transparent)]
    Dir(#[from] UnfitDir),
    /// The index cannot be used.
    #[error(transparent)]
    Index(#[from] OpenError),
}

impl From<io::Error> for OpenFilesError {
    fn from(error: io::Error) -> OpenFilesError {
        OpenError::Io(error).into()
    }
}

impl From<IndexError> for OpenFilesError {
    fn from(error: IndexError) -> OpenFilesError {
        OpenError::from(error).into()
    }
}

/// Blocks as files of a directory. Dropping it ends its threads after they did what is
/// queued, and commits the index.
pub struct FileStore {
    inner: Arc<Inner>,
    adopted_blocks: u64,
}

/// The name of the file beside the index that says whose the directory's blocks are.
const OWNER_FILE: &str = "owner";

impl FileStore {
    /// Opens the store whose index is in `index_dir` and whose blocks are in `blocks_dir`. If
    /// there is none it is made, in a directory that is fit for it.
    ///
    /// A store whose directory is not there opens nevertheless, [away](FileStore::look).
    pub fn open(
        index_dir: &Path,
        blocks_dir: &Path,
        config: FileConfig,
    ) -> Result<FileStore, OpenFilesError> {
        FileStore::open_with(index_dir, blocks_dir, config, |shared, writer| {
            Engine::start("files", shared, writer)
        })
    }

    /// Opens it without threads: each call does its work when its future is first polled.
    pub fn open_inline(
        index_dir: &Path,
        blocks_dir: &Path,
        config: FileConfig,
    ) -> Result<FileStore, OpenFilesError> {
        FileStore::open_with(index_dir, blocks_dir, config, |shared, writer| {
            Ok(Engine::inline(shared, writer))
        })
    }

    fn open_with(
        index_dir: &Path,
        blocks_dir: &Path,
        config: FileConfig,
        start: impl FnOnce(Arc<Shared>, Writer) -> io::Result<Engine<Writer>>,
    ) -> Result<FileStore, OpenFilesError> {
        let disk: Arc<dyn Disk> = Arc::new(RealDisk::new(index_dir)?);
        let lock = engine::lock(&*disk)?;
        let (writer, adopted_blocks) = prepare(disk, index_dir, blocks_dir, config)?;
        let place = writer.place.clone();
        let engine = start(place.shared.clone(), writer)?;
        Ok(FileStore { inner: Arc::new(Inner { place, engine, _lock: lock }), adopted_blocks })
    }

    /// Whether a new store could be made in `blocks_dir`.
    ///
    /// # Errors
    /// Why not.
    pub fn check_fit(blocks_dir: &Path, flag: FlagCheck) -> Result<(), UnfitDir> {
        directory::check_fit(blocks_dir, None, flag)
    }

    /// Whether `blocks_dir` could be the directory of the store whose index is, or would be, in
    /// `index_dir`.
    ///
    /// # Errors
    /// Why not.
    pub fn check_reopen(
        index_dir: &Path,
        blocks_dir: &Path,
        flag: FlagCheck,
    ) -> Result<(), UnfitDir> {
        let owner = std::fs::read_to_string(index_dir.join(OWNER_FILE)).ok();
        directory::check_fit(blocks_dir, owner.as_deref(), flag)
    }

    /// Where the blocks are.
    pub fn dir(&self) -> &Path {
        self.inner.place.dir.path()
    }

    /// Looks whether the directory is there, and how full its file system is. Waits for the
    /// disk.
    ///
    /// # Errors
    /// Why it is away, in words.
    pub fn look(&self) -> Result<Space, String> {
        self.inner.place.look()
    }

    /// The same on a reader thread.
    pub(crate) async fn look_aside(&self) -> Result<Space, String> {
        let place = self.inner.place.clone();
        self.inner.engine.read(move || place.look()).await.map_err(|error| error.to_string())?
    }

    /// Takes the directory again after it has been made anew; its former blocks are lost.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn take_again(&self) -> Result<(), UnfitDir> {
        self.inner.place.dir.take()?;
        let _ = self.look();
        Ok(())
    }

    /// Changes what the store may take.
    pub fn set_capacity(&self, capacity_bytes: u64) {
        self.inner.place.shared.set_capacity(capacity_bytes);
    }

    /// Blocks whose files had vanished, since it was opened.
    pub fn lost_blocks(&self) -> u64 {
        self.inner.place.lost_blocks.load(Ordering::Relaxed)
    }

    /// Blocks found when it was opened without an index, or with a damaged one. Their leases have
    /// ended, until they are renewed.
    pub fn adopted_blocks(&self) -> u64 {
        self.adopted_blocks
    }

    /// Opens and closes the files of up to `limit` blocks from `from` on (from the start if
    /// `None`) and forgets those that have vanished.
    pub fn look_after(
        &self,
        from: Option<Key>,
        limit: usize,
    ) -> BoxFuture<'static, Result<Care, StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.look_after(from, limit).await })
    }

    /// Makes all that was written, and the index, durable.
    pub fn flush(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.engine.write(0, Writer::flush).await })
    }

    /// Takes all blocks, the index and every trace of the store away.
    pub fn remove_all(self, index_dir: &Path) -> io::Result<()> {
        let dir = self.inner.place.dir.clone();
        drop(self);
        dir.give_up()?;
        std::fs::remove_dir_all(index_dir)
    }

    /// From now on tells `changed` of each change of what is held.
    pub(crate) fn watch(&self, changed: &Arc<Changed>) {
        self.inner.place.shared.catalog.watch(changed);
    }

    /// How often the directory has come or gone.
    pub(crate) fn comings(&self) -> u64 {
        self.inner.place.comings.load(Ordering::Relaxed)
    }

    /// Does work that may wait for the disk on a reader thread.
    pub(crate) async fn waiting<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, StoreError> {
        self.inner.engine.read(work).await
    }

    /// Checks what always holds between the store's sums. For tests.
    ///
    /// # Panics
    /// If it does not hold.
    pub fn check_invariants(&self) {
        self.inner.place.shared.catalog.check_holdings();
    }
}

impl fmt::Debug for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileStore({})", self.dir().display())
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        self.inner.engine.stop();
    }
}

/// The sequence number of an index that knows nothing.
const FIRST_SEQUENCE: u64 = 1;

/// Opens index and directory; returns the writer, and how many blocks were found that a new
/// index did not know.
fn prepare(
    disk: Arc<dyn Disk>,
    index_dir: &Path,
    blocks_dir: &Path,
    config: FileConfig,
) -> Result<(Writer, u64), OpenFilesError> {
    let owner = owner_of(index_dir, &*disk)?;
    let dir = BlockDir::new(blocks_dir, &owner, config.flag);
    if !index_dir.join(index::FILE_NAME).exists() {
        // It is being made, or was when the last attempt was interrupted.
        dir.take()?;
    }
    let shared = Arc::new(Shared::new(disk, config.disk));
    let (committer, next_sequence) = open_index(&shared)?;
    let place = Arc::new(Place::new(shared, dir));
    let mut writer = Writer::new(place.clone(), committer, next_sequence);
    let mut adopted_blocks = 0;
    match place.look() {
        Err(why) => tracing::warn!(why, "the contributed directory is away"),
        Ok(_) if next_sequence == FIRST_SEQUENCE => adopted_blocks = adopt_all(&mut writer),
        Ok(_) => {}
    }
    Ok((writer, adopted_blocks))
}

/// Makes blocks again of all files that are what they are named; how many. They have no lease:
/// the caller, who is told, gives them one. Those that cannot be read now are tried again by
/// [`FileStore::reclaim`].
fn adopt_all(writer: &mut Writer) -> u64 {
    let mut adopted = 0;
    for number in 0..BlockDir::fan_out() {
        match writer.sweep(number, Some(0)) {
            Ok(swept) => adopted += swept.adopted,
            Err(error) => tracing::error!(%error, "blocks without an index cannot be looked at"),
        }
        writer.end_group();
    }
    if adopted > 0 {
        tracing::warn!(adopted, "the index was made again from the blocks' files");
    }
    adopted
}

/// What the owner file beside the index says; it is made if need be.
fn owner_of(index_dir: &Path, disk: &dyn Disk) -> io::Result<String> {
    match std::fs::read_to_string(index_dir.join(OWNER_FILE)) {
        Ok(owner) if owner.len() == OWNER_DIGITS => Ok(owner),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => {
            let owner = format!("{:016x}{:016x}", disk.random_u64()?, disk.random_u64()?);
            std::fs::write(index_dir.join(OWNER_FILE), &owner)?;
            disk.sync_dir()?;
            Ok(owner)
        }
    }
}

/// The index, made anew if it cannot be read, and the next sequence number.
fn open_index(shared: &Shared) -> Result<(Committer, u64), IndexError> {
    let (disk, cache_bytes) = (shared.disk.clone(), shared.config.index_cache_bytes);
    let (index, contents) = match Index::open(disk.clone(), cache_bytes) {
        Err(IndexError::Damaged(why)) => {
            tracing::error!(why, "the index of the blocks' files is damaged; it is set aside");
            (Index::create(disk, cache_bytes)?, None)
        }
        opened => opened?,
    };
    let mut committer = Committer::new(index);
    let Some(contents) = contents else {
        committer.commit(shared)?;
        return Ok((committer, FIRST_SEQUENCE));
    };
    let next_sequence = contents.checkpoint.next_sequence;
    shared.catalog.load(contents);
    committer.load_snapshot(shared)?;
    Ok((committer, next_sequence))
}

impl BlockStore for FileStore {
    /// As the trait says but for one thing: nothing here survives power loss for certain.
    fn put(&self, batch: Vec<StoredBlock>) -> BoxFuture<'static, Result<(), StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            if inner.place.is_away() {
                return Err(inner.place.away());
            }
            let weight_bytes = batch.iter().map(|block| block.bytes.len()).sum();
            inner.engine.write(weight_bytes, move |writer| writer.put(batch)).await
        })
    }

    fn get(&self, key: &Key) -> BoxFuture<'static, Result<Option<StoredBlock>, StoreError>> {
        let (inner, key) = (self.inner.clone(), *key);
        Box::pin(async move { inner.get(key).await })
    }

    /// Opens the block's file: its holder vouches for it with this.
    fn info(&self, key: &Key) -> Result<Option<BlockInfo>, StoreError> {
        Ok(self.inner.look_for(key)?.map(|entry| entry.info(*key)))
    }

    fn list(&self, range: KeyRange, limit: usize) -> Result<Vec<BlockInfo>, StoreError> {
        if self.inner.place.is_away() {
            return Ok(Vec::new());
        }
        Ok(self.inner.place.shared.catalog.list(range, limit)?)
    }

    fn summaries(
        &self,
        ranges: Vec<KeyRange>,
        now_unix_secs: u64,
    ) -> BoxFuture<'static, Result<Vec<Summary>, StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let parts = inner.summarize(Question::Summaries(ranges), now_unix_secs).await?;
            Ok(parts.into_iter().map(|part| part.summary).collect())
        })
    }

    fn cut(
        &self,
        range: KeyRange,
        now_unix_secs: u64,
    ) -> BoxFuture<'static, Result<Vec<Part>, StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.summarize(Question::Cut(range), now_unix_secs).await })
    }

    /// Opens the blocks' files: a block whose file has vanished is not renewed.
    fn renew(
        &self,
        keys: &[Key],
        expires_unix_secs: u64,
        owner: Owner,
    ) -> Result<Vec<bool>, StoreError> {
        let is_there = |key: &Key| Ok(self.inner.look_for(key)?.is_some());
        self.inner.engine.renew(keys, expires_unix_secs, owner, is_there)
    }

    fn shorten(&self, keys: &[Key], expires_unix_secs: u64) -> Result<(), StoreError> {
        self.inner.engine.shorten(keys, expires_unix_secs)
    }

    fn flush(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        FileStore::flush(self)
    }

    fn remove(&self, keys: Vec<Key>) -> BoxFuture<'static, Result<(), StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let weight_bytes = keys.len() * size_of::<Key>();
            let keys: Vec<_> = keys.into_iter().map(|key| (key, None)).collect();
            inner.engine.write(weight_bytes, move |writer| writer.forget(&keys).map(drop)).await
        })
    }

    fn remove_expired(&self, now_unix_secs: u64) -> BoxFuture<'static, Result<u64, StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.remove_expired(now_unix_secs).await })
    }

    fn usage(&self) -> Usage {
        self.inner.place.usage()
    }

    fn disk_failure(&self) -> Option<DiskFailure> {
        self.inner.place.shared.disk_failure()
    }

    fn usage_of(&self, owner: &Owner) -> OwnerUsage {
        self.inner.place.shared.catalog.read().usage_of(owner)
    }

    fn owners(&self, limit: usize) -> Owners {
        self.inner.place.shared.catalog.read().largest_owners(limit)
    }

    /// Reads blocks; those lost are forgotten and not told as damaged.
    fn scrub(
        &self,
        from: Option<Key>,
        budget_bytes: u64,
    ) -> BoxFuture<'static, Result<ScrubStep, StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            if inner.place.is_away() {
                return Ok(ScrubStep::default());
            }
            inner.engine.scrub(from, budget_bytes, |key, entry| inner.check(key, entry)).await
        })
    }

    /// Makes blocks again of files that belong to none, or removes them; there is never more to
    /// give back. A block found gets some days of lease, counted from what
    /// [`BlockStore::remove_expired`] was told last.
    fn reclaim(&self, _budget_bytes: u64) -> BoxFuture<'static, Result<u64, StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.sweep().await.map(|()| 0) })
    }
}
