//! The state that the threads and the task of one publish share: the budget of bytes in flight,
//! the blocks seen, the tallies, and whether to stop.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, mpsc};

use atoll_env::Env;
use atoll_key::{BlockHash, VolumeCipher};
use bytes::Bytes;
use futures_channel::mpsc::UnboundedSender;

use super::stat_cache::StatCache;
use super::{Omission, Omissions, PublishError, PublishOptions};
use crate::blocks::budget::Permit;
use crate::format::{DirectoryEntry, DirectoryRef, FormatError};
use crate::owned::progress::Progress;

/// A question for the entry that the previous version has at `path`. The answer comes when
/// all of its blocks are named to the upload; none comes if the work is to end.
pub(super) struct Ask {
    pub(super) path: Vec<u8>,
    pub(super) answer: mpsc::SyncSender<Option<DirectoryEntry>>,
}

/// Hashes remembered per generation; two generations are kept. A duplicate further back
/// costs a question to the ring and nothing else.
const SEEN_PER_GENERATION: usize = 128 << 10;

/// A block on its way to the ring.
pub(super) struct Outgoing {
    pub(super) hash: BlockHash,
    pub(super) block: Block,
}

/// What is known of a block on its way.
pub(super) enum Block {
    /// Its bytes.
    Read(Bytes),
    /// It is one of the previous version's, to be renewed.
    Previous {
        /// Held until it is renewed.
        _permit: Permit,
    },
    /// It is one of a file that was not read, to be renewed.
    Unread,
}

/// What a block that was not read counts in the budget: about its memory.
const UNREAD_BYTES: usize = 128;

impl Block {
    /// What it counts in the budget of bytes in flight.
    pub(super) fn len(&self) -> usize {
        match self {
            Block::Read(bytes) => bytes.len(),
            Block::Previous { .. } => 0,
            Block::Unread => UNREAD_BYTES,
        }
    }
}

/// Why an entry of the source cannot be published as it is.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The system refuses to read it: the publish fails unless the options say otherwise.
    Unreadable(String),
    /// It did not stay the same while it was read, which is no fault.
    Changing,
}

/// What is said of an entry that did not stay the same.
const CHANGING: &str = "it changed each time it was read";

/// The work is to end: it failed elsewhere, or the publish was cancelled.
#[derive(Debug)]
pub(super) struct Stopped;

/// Why a directory block could not be handed on.
pub(super) enum EmitError {
    Stopped,
    Format(FormatError),
}

impl From<Stopped> for EmitError {
    fn from(_: Stopped) -> EmitError {
        EmitError::Stopped
    }
}

impl From<FormatError> for EmitError {
    fn from(error: FormatError) -> EmitError {
        EmitError::Format(error)
    }
}

/// The source's top directory, all published.
#[derive(Clone, Debug)]
pub(super) struct Top {
    pub(super) mode: u32,
    pub(super) mtime: atoll_vfs::FileTime,
    pub(super) directory: DirectoryRef,
    pub(super) xattrs: Option<BlockHash>,
}

#[derive(Default)]
pub(super) struct Tallies {
    pub(super) files: AtomicU64,
    pub(super) dirs: AtomicU64,
    pub(super) symlinks: AtomicU64,
    pub(super) special: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) blocks: AtomicU64,
    pub(super) unread_files: AtomicU64,
}

impl Tallies {
    pub(super) fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }
}

pub(super) struct Run {
    pub(super) env: Env,
    pub(super) options: PublishOptions,
    pub(super) stat_cache: Option<StatCache>,
    pub(super) progress: Arc<dyn Progress>,
    pub(super) tallies: Tallies,
    cipher: Option<VolumeCipher>,
    outbox: UnboundedSender<Outgoing>,
    asks: UnboundedSender<Ask>,
    stopped: AtomicBool,
    in_flight: Mutex<InFlight>,
    room: Condvar,
    seen: Mutex<Seen>,
    /// Kept apart from `seen`: a block that was queued to be renewed may be read later, and must
    /// then be uploaded if the ring lacks it.
    renewed: Mutex<Seen>,
    /// The same, of files that were not read: if the ring lacks such a block, its file is read.
    unread: Mutex<Seen>,
    /// Blocks of files that were not read which the ring lacks.
    lost: Mutex<BTreeSet<BlockHash>>,
    outcome: Mutex<Outcome>,
}

/// What is on its way: bytes of blocks to the ring, and files and directories that were
/// found and are not finished.
#[derive(Default)]
struct InFlight {
    bytes: usize,
    jobs: usize,
}

#[derive(Default)]
struct Seen {
    young: BTreeSet<BlockHash>,
    old: BTreeSet<BlockHash>,
}

impl Seen {
    fn contains(&self, hash: &BlockHash) -> bool {
        self.old.contains(hash) || self.young.contains(hash)
    }

    /// Whether `hash` is new.
    fn insert(&mut self, hash: BlockHash) -> bool {
        if self.old.contains(&hash) || !self.young.insert(hash) {
            return false;
        }
        if self.young.len() >= SEEN_PER_GENERATION {
            self.old = std::mem::take(&mut self.young);
        }
        true
    }
}

#[derive(Default)]
struct Outcome {
    top: Option<Top>,
    error: Option<PublishError>,
    omissions: Omissions,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder of this lock panics")
}

impl Run {
    pub(super) fn new(
        env: Env,
        options: PublishOptions,
        stat_cache: Option<StatCache>,
        cipher: Option<VolumeCipher>,
        progress: Arc<dyn Progress>,
        outbox: UnboundedSender<Outgoing>,
        asks: UnboundedSender<Ask>,
    ) -> Run {
        Run {
            env,
            options,
            stat_cache,
            progress,
            tallies: Tallies::default(),
            cipher,
            outbox,
            asks,
            stopped: AtomicBool::new(false),
            in_flight: Mutex::default(),
            room: Condvar::new(),
            seen: Mutex::default(),
            renewed: Mutex::default(),
            unread: Mutex::default(),
            lost: Mutex::default(),
            outcome: Mutex::default(),
        }
    }

    /// Hands a block on to be uploaded, unless this run did already; waits while too
    /// many bytes are on their way.
    pub(super) fn emit(&self, block: Vec<u8>) -> Result<BlockHash, Stopped> {
        let block = match &self.cipher {
            None => block,
            Some(cipher) => cipher.seal(&block),
        };
        let hash = BlockHash::of(&block);
        if lock(&self.seen).insert(hash) {
            if !lock(&self.unread).contains(&hash) {
                Tallies::add(&self.tallies.blocks, 1);
            }
            self.acquire(block.len())?;
            let block = Block::Read(Bytes::from(block));
            self.outbox.unbounded_send(Outgoing { hash, block }).map_err(|_| Stopped)?;
        }
        Ok(hash)
    }

    /// Hands a block of the previous version on to be renewed, unless this run read it too.
    pub(super) fn renew(&self, hash: BlockHash, permit: Permit) {
        if lock(&self.seen).contains(&hash) || !lock(&self.renewed).insert(hash) {
            return;
        }
        Tallies::add(&self.tallies.blocks, 1);
        // Once the run is stopped, the upload takes no more.
        let _ = self
            .outbox
            .unbounded_send(Outgoing { hash, block: Block::Previous { _permit: permit } });
    }

    /// Hands a block of a file that was not read on to be renewed; waits while too much is on its
    /// way.
    pub(super) fn renew_unread(&self, hash: BlockHash) -> Result<(), Stopped> {
        if lock(&self.seen).contains(&hash) || !lock(&self.unread).insert(hash) {
            return Ok(());
        }
        Tallies::add(&self.tallies.blocks, 1);
        let block = Block::Unread;
        self.acquire(block.len())?;
        self.outbox.unbounded_send(Outgoing { hash, block }).map_err(|_| Stopped)
    }

    /// The ring lacks these blocks of files that were not read.
    pub(super) fn lose(&self, blocks: BTreeSet<BlockHash>) {
        lock(&self.lost).extend(blocks);
    }

    /// The blocks whose files must be read after all.
    pub(super) fn take_lost(&self) -> BTreeSet<BlockHash> {
        std::mem::take(&mut lock(&self.lost))
    }

    fn acquire(&self, bytes: usize) -> Result<(), Stopped> {
        let limit = self.options.max_in_flight_bytes;
        self.wait_for_room(|held| {
            let fits = held.bytes == 0 || held.bytes.saturating_add(bytes) <= limit;
            if fits {
                held.bytes += bytes;
            }
            fits
        })
    }

    /// The ring has these bytes, or they will not be sent any more.
    pub(super) fn release(&self, bytes: usize) {
        lock(&self.in_flight).bytes -= bytes;
        self.room.notify_all();
    }

    /// Waits until fewer than `limit` jobs are unfinished, and counts one more.
    pub(super) fn begin_job(&self, limit: usize) -> Result<(), Stopped> {
        self.wait_for_room(|held| {
            let fits = held.jobs < limit;
            if fits {
                held.jobs += 1;
            }
            fits
        })
    }

    pub(super) fn end_job(&self) {
        lock(&self.in_flight).jobs -= 1;
        self.room.notify_all();
    }

    fn wait_for_room(&self, mut take: impl FnMut(&mut InFlight) -> bool) -> Result<(), Stopped> {
        let mut held = lock(&self.in_flight);
        loop {
            if self.is_stopped() {
                return Err(Stopped);
            }
            if take(&mut held) {
                return Ok(());
            }
            held = self.room.wait(held).expect("no holder of this lock panics");
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Ends all work and wakes all threads that wait.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        // Taking the lock orders this after the check of a thread about to wait.
        drop(lock(&self.in_flight));
        self.room.notify_all();
        self.close();
    }

    fn close(&self) {
        self.outbox.close_channel();
        self.asks.close_channel();
    }

    /// Ends all work for this reason; the first one is kept.
    pub(super) fn fail(&self, error: PublishError) {
        lock(&self.outcome).error.get_or_insert(error);
        self.stop();
    }

    /// The entry in place of one that cannot be published as it is: its
    /// previous version, or nothing if there is none. Ends all work instead if the options
    /// have an unreadable entry fail the publish. Waits for the ring.
    pub(super) fn stand_in(
        &self,
        path: PathBuf,
        trouble: Trouble,
    ) -> Result<Option<DirectoryEntry>, Stopped> {
        let reason = match trouble {
            Trouble::Changing => CHANGING.to_string(),
            Trouble::Unreadable(reason) if self.options.skip_unreadable => reason,
            Trouble::Unreadable(reason) => {
                self.fail(PublishError::Source { path, reason });
                return Err(Stopped);
            }
        };
        let (answer, answered) = mpsc::sync_channel(1);
        let ask = Ask { path: path.as_os_str().as_bytes().to_vec(), answer };
        self.asks.unbounded_send(ask).map_err(|_| Stopped)?;
        let entry = answered.recv().map_err(|_| Stopped)?;
        let omissions = &mut lock(&self.outcome).omissions;
        let list = if entry.is_some() { &mut omissions.kept } else { &mut omissions.left_out };
        list.add(Omission { path, reason });
        Ok(entry)
    }

    /// A directory that is never published was met.
    pub(super) fn withheld(&self, path: PathBuf, reason: String) {
        lock(&self.outcome).omissions.withheld.add(Omission { path, reason });
    }

    /// Makes durable what is remembered of the files that were read; what is read later is not.
    /// `is_whole`: all of the source was walked, so what was not met is not of it any more.
    pub(super) fn remember(&self, is_whole: bool) {
        if let Some(cache) = &self.stat_cache
            && let Err(error) = cache.finish(is_whole)
        {
            tracing::warn!("the next publish may read all files: {error}");
        }
    }

    /// The top directory is finished: no more blocks come.
    pub(super) fn finish(&self, top: Top) {
        lock(&self.outcome).top = Some(top);
        self.close();
    }

    /// What the threads found, once no more blocks come.
    pub(super) fn outcome(&self) -> Result<(Top, Omissions), PublishError> {
        let mut outcome = lock(&self.outcome);
        if let Some(error) = outcome.error.take() {
            return Err(error);
        }
        let top = outcome.top.clone().ok_or(PublishError::Stopped)?;
        Ok((top, std::mem::take(&mut outcome.omissions)))
    }
}

/// Stops the run when dropped: it has ended, or the publish was cancelled.
pub(super) struct StopOnDrop(pub(super) Arc<Run>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
        self.0.remember(false);
    }
}

/// Fails the run if its thread panics, so that no other waits for it for ever.
pub(super) struct FailOnPanic(pub(super) Arc<Run>);

impl Drop for FailOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop();
        }
    }
}
