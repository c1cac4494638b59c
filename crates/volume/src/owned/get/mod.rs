//! Copying a file or tree of a volume to this machine's disk.
//!
//! ```text
//! walk ─► entries ─► up to max_files at once: fetch ─► write (threads) ─► rename
//! ```
//!
//! One walk lists the directories, in order of their names, and runs ahead of the files;
//! files are fetched many at once, and large ones many blocks at once, as the volume's
//! window ([`crate::blocks::window`]) allows, and within one budget of bytes in memory. A file is
//! written as `.NAME.atoll-part` and renamed when it is complete, so a file under its own name
//! is whole. An interrupted copy goes on where it was: files of the right length and time
//! are left alone, and blocks of a part are kept if their bytes have the hash that the
//! volume says. (Files are not synced one by one: after a power failure a file may be there
//! and its bytes not, as after `cp`.)
//!
//! A block that cannot be fetched hides the files below it and no others: the copy goes on,
//! reports at its end the files that it could not read, and another run tries them again. Only a
//! ring that is silent for [`SILENCE`] ends it early. A directory that lies deeper than a volume's
//! directories may ([`MAX_DEPTH`](crate::format::MAX_DEPTH)) is reported as one that could not be read.

mod dest;
mod failures;
mod pool;
mod walk;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use atoll_dht::GetError;
use atoll_key::{BlockHash, MAX_BLOCK_BYTES};
use atoll_vfs::FileKind;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};

use self::dest::{Attributes, DestDir, part_name, wrong};
use self::failures::Failures;
pub use self::failures::Unread;
use self::pool::Pool;
use self::walk::{Found, Into};
use super::progress::{Phase, Progress};
use super::read::snapshot::read_xattrs;
use super::read::{Item, ReadError, Snapshot, Volume};
use crate::blocks::budget::Budget;
use crate::blocks::error::BlockError;
use crate::blocks::file::{File, Place};
use crate::format::inode::Shape;
use crate::format::{Content, DirectoryEntry, FormatError};

/// Threads that write. Guess: some wait for the disk while others use the processor.
const WRITER_THREADS: usize = 4;

/// Blocks of one file begun at once. The volume's window limits how many are fetched, and the
/// budget how many are in memory.
const BLOCKS_AT_ONCE: usize = 512;

/// How long the ring may give no block at all, while some are asked for, before the copy is
/// given up: each further one would take as long. Guess.
const SILENCE: Duration = Duration::from_secs(60);

/// Missing blocks of one file after which the rest of it is not tried: a few blocks can describe
/// a file of more missing ones than could ever be asked for.
const MAX_UNREAD_BLOCKS: u32 = 4096;

/// How to copy.
#[derive(Clone, Debug)]
pub struct GetOptions {
    /// Files being copied at once.
    pub max_files: usize,
    /// Bytes fetched (or asked for) and not yet written.
    pub max_in_flight_bytes: usize,
    /// Keep set-user-id and set-group-id bits. Off: a publisher is not trusted that far.
    pub set_id: bool,
}

impl Default for GetOptions {
    fn default() -> GetOptions {
        GetOptions { max_files: 64, max_in_flight_bytes: 32 << 20, set_id: false }
    }
}

/// What was copied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gotten {
    /// Regular files written.
    pub files: u64,
    /// Regular files that were there already (same length and time).
    pub files_kept: u64,
    /// Directories made or found.
    pub dirs: u64,
    /// Symbolic links made or found.
    pub symlinks: u64,
    /// FIFOs, sockets and devices, which are left out.
    pub special: u64,
    /// Lengths of the files written, but for what was resumed.
    pub bytes: u64,
    /// Bytes found already there in files an earlier run left unfinished.
    pub bytes_resumed: u64,
    /// Files that could not be read and are missing or incomplete; the first
    /// [`MAX_LISTED`](super::MAX_LISTED).
    pub unread: Vec<Unread>,
    /// How many there are: files, and entries of directories.
    pub unread_count: u64,
    /// The ring was silent, and what was left was not tried.
    pub gave_up: bool,
}

/// Why a copy was ended. The files written stay, and another run goes on from them.
#[derive(Debug, thiserror::Error)]
pub enum GetTreeError {
    /// The volume could not be read.
    #[error("{0}")]
    Read(Box<ReadError>),
    /// The disk could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The threads that write ended before their work (a bug of this program).
    #[error("the work was stopped before its end")]
    Stopped,
}

impl From<ReadError> for GetTreeError {
    fn from(error: ReadError) -> GetTreeError {
        GetTreeError::Read(Box::new(error))
    }
}

#[derive(Default)]
struct Tallies {
    files: AtomicU64,
    files_kept: AtomicU64,
    dirs: AtomicU64,
    symlinks: AtomicU64,
    special: AtomicU64,
    bytes: AtomicU64,
    bytes_resumed: AtomicU64,
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

/// What all files of one copy share.
struct Copy {
    snapshot: Arc<Snapshot>,
    options: GetOptions,
    progress: Arc<dyn Progress>,
    pool: Pool,
    budget: Arc<Budget>,
    tallies: Tallies,
    failures: Failures,
}

/// Copies `item` (a file, link or whole directory) of `snapshot`; it becomes `dest`.
///
/// A directory's contents go into `dest`, which is made if it is not there; other files
/// in it stay. A file, link or directory of the volume replaces a file or link of the
/// same name; a file in place of a directory is an error. A symbolic link is followed
/// only if it is `dest` itself and `item` a directory. Modes, times, links, holes and
/// extended attributes are as published, owners are not. (Of a file left alone because its
/// length and time are right, only the mode is set again.)
///
/// Dropping the future stops the copy after what is being written.
pub async fn get_tree(
    snapshot: Arc<Snapshot>,
    item: &Item,
    dest: &Path,
    options: GetOptions,
    progress: Arc<dyn Progress>,
) -> Result<Gotten, GetTreeError> {
    let pool = Pool::start(WRITER_THREADS)
        .map_err(|source| GetTreeError::Write { path: dest.into(), source })?;
    progress.phase(Phase::Copy);
    let failures = Failures::new(snapshot.cache.env().clone());
    let copy = Copy {
        snapshot,
        budget: Budget::new(options.max_in_flight_bytes),
        options,
        progress,
        pool,
        tallies: Tallies::default(),
        failures,
    };
    let result = copy.run(item, dest).await;
    // Directories get their attributes as the last of what they hold is done.
    let idle = copy.pool.idle().await;
    let gave_up = matches!(result, Err(Ended::Silence));
    match result {
        Err(Ended::Error(error)) => return Err(error),
        Ok(()) | Err(Ended::Silence) => idle?,
    }
    let tallies = &copy.tallies;
    let (unread, unread_count) = copy.failures.take();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Ok(Gotten {
        files: count(&tallies.files),
        files_kept: count(&tallies.files_kept),
        dirs: count(&tallies.dirs),
        symlinks: count(&tallies.symlinks),
        special: count(&tallies.special),
        bytes: count(&tallies.bytes),
        bytes_resumed: count(&tallies.bytes_resumed),
        unread,
        unread_count,
        gave_up,
    })
}

/// How often a copy goes on from a newer version. A guess: blocks of a version are there for minutes after the next, and
/// each time more is there already.
const MAX_VERSIONS: u32 = 16;

/// As [`get_tree`], but goes on from the volume's newest version if blocks of the snapshot are gone: a volume that is
/// written through mounts releases what newer versions do not need. What is copied by then stays, also what is not in the newer
/// version. `told` hears of each version that it goes on from; the last one is returned.
pub async fn get_newest(
    volume: &Arc<Volume>,
    (snapshot, item): (Arc<Snapshot>, Item),
    dest: &Path,
    options: GetOptions,
    progress: Arc<dyn Progress>,
    told: &(dyn Fn(u64) + Sync),
) -> Result<(Gotten, Arc<Snapshot>), GetTreeError> {
    let (mut snapshot, mut item) = (snapshot, item);
    let copied = get_tree(snapshot.clone(), &item, dest, options.clone(), progress.clone()).await;
    let mut copied = copied?;
    for _ in 1..MAX_VERSIONS {
        if !copied.lacks_blocks() {
            break;
        }
        let Some(newer) = volume.newer_than(snapshot.version).await else { break };
        // It may be gone there.
        let Ok(again) = newer.resolve(&item.path).await else { break };
        told(newer.version);
        (snapshot, item) = (newer, again);
        let more = get_tree(snapshot.clone(), &item, dest, options.clone(), progress.clone());
        copied = more.await?.after(copied);
    }
    Ok((copied, snapshot))
}

impl Gotten {
    /// Whether blocks were nowhere on the ring.
    fn lacks_blocks(&self) -> bool {
        let is_lost = |unread: &Unread| {
            matches!(unread.error, ReadError::Fetch { source: GetError::NotFound { .. }, .. })
        };
        !self.gave_up && self.unread.iter().any(is_lost)
    }

    /// What both runs of one copy have done; this one is the later.
    fn after(self, earlier: Gotten) -> Gotten {
        Gotten {
            files: self.files + earlier.files,
            files_kept: self.files_kept.saturating_sub(earlier.files),
            bytes: self.bytes + earlier.bytes,
            bytes_resumed: self.bytes_resumed + earlier.bytes_resumed,
            ..self
        }
    }
}

/// Why a copy ends before its end.
enum Ended {
    /// The disk, or this program.
    Error(GetTreeError),
    /// The ring does not answer any more.
    Silence,
}

impl From<GetTreeError> for Ended {
    fn from(error: GetTreeError) -> Ended {
        Ended::Error(error)
    }
}

impl Copy {
    async fn run(&self, item: &Item, dest: &Path) -> Result<(), Ended> {
        let whole_volume = item.path.is_empty();
        if whole_volume {
            let info = self.snapshot.info();
            self.progress.discovered(info.files, info.bytes);
            self.progress.discovery_ended();
        }
        if item.entry.kind() != FileKind::Directory {
            return self.one(item, dest).await;
        }
        let attributes = self.directory_attributes(item).await?;
        let (pool, path) = (self.pool.shared().clone(), dest.to_path_buf());
        let top = self.pool.run(move || DestDir::top(&pool, &path, attributes)).await?;
        add(&self.tallies.dirs, 1);
        walk::walk(self, item, top, !whole_volume)?
            .map_ok(|found| self.entry(found))
            .try_buffer_unordered(self.options.max_files.max(1))
            .try_for_each(|()| async { Ok(()) })
            .await
    }

    /// A copy of one file or link.
    async fn one(&self, item: &Item, dest: &Path) -> Result<(), Ended> {
        self.progress.discovered(1, item.entry.size_bytes());
        self.progress.discovery_ended();
        let path = dest.to_path_buf();
        let name = dest
            .file_name()
            .map(|name| Bytes::copy_from_slice(std::os::unix::ffi::OsStrExt::as_bytes(name)));
        let Some(name) = name else {
            let source = std::io::Error::other("it names no file");
            return Err(GetTreeError::Write { path, source }.into());
        };
        let fd = self.pool.run(move || DestDir::holding(&path)).await?;
        let part = part_name(&name);
        let into = Into::Bare { fd: Arc::new(fd), dest: dest.to_path_buf() };
        self.entry(Found { item: item.clone(), into, name, part }).await
    }

    /// Copies a file or link, and notes the parts that cannot be read.
    async fn entry(&self, found: Found) -> Result<(), Ended> {
        let path = found.item.path.clone();
        let copied = match found.item.entry.content.clone() {
            Content::Symlink(target) => self.link(found, target).await,
            Content::Regular { size_bytes, inode, .. } => self.file(found, size_bytes, inode).await,
            Content::Special { .. } | Content::Linked { .. } => {
                add(&self.tallies.special, 1);
                Ok(())
            }
            Content::Directory(_) => unreachable!("the walk makes directories itself"),
        };
        match copied {
            Err(GetTreeError::Read(error)) => self.unread(path, *error, 0),
            other => other.map_err(Ended::Error),
        }
    }

    /// Notes a block that cannot be fetched; the copy goes on unless the ring has been silent for
    /// too long. An invalid block ends it: its publisher signed nonsense.
    fn unread(&self, path: Bytes, error: ReadError, hidden_entries: u64) -> Result<(), Ended> {
        if !matches!(error, ReadError::Fetch { .. }) {
            return Err(GetTreeError::from(error).into());
        }
        let silent = self.failures.is_silence(&error);
        self.failures.note(Unread { path, hidden_entries, error });
        if silent { Err(Ended::Silence) } else { Ok(()) }
    }

    /// Notes a directory that lies too deep below the top of the copy, with what is in it. What lies beside it is
    /// copied.
    fn too_deep(&self, item: &Item) {
        let (hash, hidden_entries) = match &item.entry.content {
            Content::Directory(directory) => (directory.hash, directory.entries),
            _ => (None, 0),
        };
        let hash = hash.unwrap_or(BlockHash([0; 32]));
        let error = BlockError::Bad { hash, source: FormatError::TooDeep }.at(&item.path);
        self.failures.note(Unread { path: item.path.clone(), hidden_entries, error });
    }

    async fn link(&self, found: Found, target: Bytes) -> Result<(), GetTreeError> {
        let Found { item, into, name, part } = found;
        let (mtime, dir) = (item.entry.mtime, into.clone());
        let made = move || {
            dest::make_link(into.fd(), &part, &name, &target, mtime)
                .map_err(wrong(&into.path_of(&name)))
        };
        self.pool.run_on(dir.fd(), made).await?;
        add(&self.tallies.symlinks, 1);
        Ok(())
    }

    async fn file(
        &self,
        found: Found,
        size_bytes: u64,
        inode: Option<BlockHash>,
    ) -> Result<(), GetTreeError> {
        let entry = &found.item.entry;
        if !found.into.is_fresh() {
            let (into, name) = (found.into.clone(), found.name.clone());
            let (mode, mtime) = (self.mode(entry), entry.mtime);
            let there = move || Ok(dest::is_there(into.fd(), &name, size_bytes, mode, mtime));
            if self.pool.run(there).await? {
                add(&self.tallies.files_kept, 1);
                self.progress.done(1, size_bytes);
                return Ok(());
            }
        }
        let at = |error: BlockError| error.at(&found.item.path);
        let attributes = self.attributes(entry, &found.item.path).await?;
        let block_bytes = size_bytes.min(MAX_BLOCK_BYTES as u64) as usize;
        let permit = self.budget.acquire(block_bytes).await;
        let file = File::open_kept(&self.snapshot.cache, inode, size_bytes, false);
        let file = file.await.map_err(at)?;
        self.failures.heard();
        match file.inline() {
            Some(bytes) => {
                let Found { into, name, part, .. } = found;
                let dir = into.clone();
                let write = move || {
                    let written = dest::write_whole(into.fd(), &part, &name, &bytes, &attributes);
                    drop(permit);
                    written.map_err(wrong(&into.path_of(&name)))
                };
                self.pool.run_on(dir.fd(), write).await?;
                add(&self.tallies.bytes, size_bytes);
                self.progress.done(1, size_bytes);
            }
            None => {
                // The pointers stay in memory, and are few; the blocks ask for their own.
                drop(permit);
                self.blocks(found, file, attributes).await?;
            }
        }
        add(&self.tallies.files, 1);
        Ok(())
    }

    /// A file of many blocks, each written where it belongs as it comes.
    async fn blocks(
        &self,
        found: Found,
        file: File,
        attributes: Attributes,
    ) -> Result<(), GetTreeError> {
        let shape = file.shape().expect("a file without an inode is inline");
        let (into, part) = (found.into.clone(), found.part.clone());
        let path = found.into.path_of(&found.name);
        let open_path = path.clone();
        let open = move || {
            let (fd, len) = dest::open_part(into.fd(), &part).map_err(wrong(&open_path))?;
            if len != shape.size_bytes {
                rustix::fs::ftruncate(&fd, shape.size_bytes).map_err(wrong(&open_path))?;
            }
            Ok((Arc::new(fd), len > 0))
        };
        let (fd, resumed) = self.pool.run_on(found.into.fd(), open).await?;
        let all = self.all_blocks(&found, &file, &fd, &path, resumed);
        let (data_bytes, resumed_bytes) = all.await?;
        add(&self.tallies.bytes_resumed, resumed_bytes);
        add(&self.tallies.bytes, shape.size_bytes - resumed_bytes);
        // Progress heard of the data; the rest is holes.
        self.progress.done(1, shape.size_bytes - data_bytes);
        let Found { into, name, part, .. } = found;
        let dir = into.clone();
        let complete =
            move || dest::complete(into.fd(), &part, &name, &fd, &attributes).map_err(wrong(&path));
        self.pool.run_on(dir.fd(), complete).await
    }

    /// Fetches and writes every block, also past those that cannot be read. Returns how many
    /// bytes of data there are, and how many of them were there already.
    async fn all_blocks(
        &self,
        found: &Found,
        file: &File,
        fd: &Arc<OwnedFd>,
        path: &Path,
        resumed: bool,
    ) -> Result<(u64, u64), GetTreeError> {
        let shape = file.shape().expect("it has blocks");
        let at = |error: BlockError| GetTreeError::from(error.at(&found.item.path));
        let tried = data_blocks(file, shape).map(|place| async {
            let (block, hash) = place.map_err(at)?;
            self.block(found, file, fd, path, block, hash, resumed).await
        });
        let mut tried = pin!(tried.buffer_unordered(BLOCKS_AT_ONCE));
        let (mut data_bytes, mut resumed_bytes) = (0, 0);
        let (mut unread, mut unread_blocks) = (None, 0);
        while let Some(tried) = tried.next().await {
            match tried {
                Ok((len, there)) => {
                    data_bytes += len;
                    resumed_bytes += if there { len } else { 0 };
                }
                // The rest of it can be fetched by the next run.
                Err(GetTreeError::Read(error))
                    if matches!(*error, ReadError::Fetch { .. })
                        && unread_blocks < MAX_UNREAD_BLOCKS
                        && !self.failures.is_silence(&error) =>
                {
                    unread_blocks += 1;
                    unread.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        unread.map_or(Ok((data_bytes, resumed_bytes)), |error| Err(GetTreeError::Read(error)))
    }

    /// One block: left as it is if it is there, else fetched and written. Returns its
    /// length, and whether it was there.
    #[allow(clippy::too_many_arguments)]
    async fn block(
        &self,
        found: &Found,
        file: &File,
        fd: &Arc<OwnedFd>,
        path: &Path,
        block: u64,
        hash: BlockHash,
        resumed: bool,
    ) -> Result<(u64, bool), GetTreeError> {
        let shape = file.shape().expect("it has blocks");
        let offset = block << shape.block_size_log2;
        let len = shape.block_len_bytes(block) as usize;
        let permit = self.budget.acquire(len).await;
        if resumed {
            let (fd, path) = (fd.clone(), path.to_path_buf());
            let cache = self.snapshot.cache.clone();
            let there = move || {
                let present = dest::read_at(&fd, offset, len).map_err(wrong(&path))?;
                Ok(present.is_some_and(|bytes| cache.hash_of(&bytes) == hash))
            };
            if self.pool.run(there).await? {
                self.progress.done(0, len as u64);
                return Ok((len as u64, true));
            }
        }
        let fetched = file.fetch_once(block, hash).await;
        let bytes = fetched.map_err(|error| error.at(&found.item.path))?;
        self.failures.heard();
        let (file_fd, path) = (fd.clone(), path.to_path_buf());
        let write = move || {
            let written = dest::write_at(&file_fd, &bytes, offset);
            drop((bytes, permit));
            written.map_err(wrong(&path))
        };
        self.pool.run_on(fd, write).await?;
        self.progress.done(0, len as u64);
        Ok((len as u64, false))
    }

    /// The attributes of a directory; those that cannot be read are noted and left out.
    async fn directory_attributes(&self, item: &Item) -> Result<Attributes, Ended> {
        match self.attributes(&item.entry, &item.path).await {
            Ok(attributes) => Ok(attributes),
            Err(error) => {
                self.unread(item.path.clone(), error, 0)?;
                let (mode, mtime) = (self.mode(&item.entry), item.entry.mtime);
                Ok(Attributes { mode, mtime, xattrs: Vec::new() })
            }
        }
    }

    async fn attributes(
        &self,
        entry: &DirectoryEntry,
        path: &[u8],
    ) -> Result<Attributes, ReadError> {
        let xattrs = read_xattrs(&self.snapshot.cache, entry).await;
        let xattrs = xattrs.map_err(|error| error.at(path))?;
        Ok(Attributes { mode: self.mode(entry), mtime: entry.mtime, xattrs })
    }

    fn mode(&self, entry: &DirectoryEntry) -> u32 {
        if self.options.set_id { entry.mode } else { entry.mode & 0o1777 }
    }
}

/// The blocks of a file that are not holes: number and hash; or an error, for the blocks of
/// an indirect block that cannot be read.
fn data_blocks(
    file: &File,
    shape: Shape,
) -> impl stream::Stream<Item = Result<(u64, BlockHash), BlockError>> + '_ {
    stream::unfold(0, move |mut block| async move {
        while block < shape.data_blocks() {
            match file.place_past(block).await {
                Ok(Place::HoleUpto(upto)) => block = upto,
                Ok(Place::Block(hash)) => return Some((Ok((block, hash)), block + 1)),
                Err((error, past)) => return Some((Err(error), past)),
            }
        }
        None
    })
}
