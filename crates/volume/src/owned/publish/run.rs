//! What the threads and the task of one publish share: the budget of bytes in flight,
//! the blocks seen, the tallies, and whether to stop.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use atoll_key::{BlockHash, VolumeCipher};
use bytes::Bytes;
use futures_channel::mpsc::UnboundedSender;

use super::{PublishError, PublishOptions, Skipped};
use crate::owned::format::{DirectoryRef, FormatError};
use crate::owned::progress::Progress;

/// Hashes remembered per generation; two generations are kept. A duplicate further back
/// costs a question to the ring and nothing else.
const SEEN_PER_GENERATION: usize = 128 << 10;

/// Skipped paths that are kept for the report.
const MAX_SKIPPED_SHOWN: usize = 1000;

/// A block on its way to the ring.
pub(super) struct Outgoing {
    pub(super) hash: BlockHash,
    pub(super) bytes: Bytes,
}

/// The work is to end: it failed elsewhere, or nobody wants it any more.
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
}

impl Tallies {
    pub(super) fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }
}

pub(super) struct Run {
    pub(super) options: PublishOptions,
    pub(super) block_size_log2: u8,
    pub(super) progress: Arc<dyn Progress>,
    pub(super) tallies: Tallies,
    cipher: Option<VolumeCipher>,
    outbox: UnboundedSender<Outgoing>,
    stopped: AtomicBool,
    in_flight: Mutex<InFlight>,
    room: Condvar,
    seen: Mutex<Seen>,
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
    skipped: Vec<Skipped>,
    skipped_count: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder of this lock panics")
}

impl Run {
    pub(super) fn new(
        options: PublishOptions,
        cipher: Option<VolumeCipher>,
        progress: Arc<dyn Progress>,
        outbox: UnboundedSender<Outgoing>,
    ) -> Run {
        Run {
            block_size_log2: options.block_size_bytes.trailing_zeros() as u8,
            options,
            progress,
            tallies: Tallies::default(),
            cipher,
            outbox,
            stopped: AtomicBool::new(false),
            in_flight: Mutex::default(),
            room: Condvar::new(),
            seen: Mutex::default(),
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
            Tallies::add(&self.tallies.blocks, 1);
            self.acquire(block.len())?;
            self.outbox
                .unbounded_send(Outgoing { hash, bytes: Bytes::from(block) })
                .map_err(|_| Stopped)?;
        }
        Ok(hash)
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

    /// The ring has these bytes, or nobody will send them any more.
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

    /// Ends all work; what waits is woken.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        // Taking the lock orders this after the check of a thread about to wait.
        drop(lock(&self.in_flight));
        self.room.notify_all();
        self.outbox.close_channel();
    }

    /// Ends all work for this reason; the first one is kept.
    pub(super) fn fail(&self, error: PublishError) {
        lock(&self.outcome).error.get_or_insert(error);
        self.stop();
    }

    /// Leaves out what cannot be read, or ends all work, as the options say.
    pub(super) fn unreadable(&self, path: PathBuf, reason: String) -> Result<(), Stopped> {
        if !self.options.skip_unreadable {
            self.fail(PublishError::Source { path, reason });
            return Err(Stopped);
        }
        tracing::warn!(path = %path.display(), %reason, "left out of the volume");
        let mut outcome = lock(&self.outcome);
        outcome.skipped_count += 1;
        if outcome.skipped.len() < MAX_SKIPPED_SHOWN {
            outcome.skipped.push(Skipped { path, reason });
        }
        Ok(())
    }

    /// The top directory is finished: no more blocks come.
    pub(super) fn finish(&self, top: Top) {
        lock(&self.outcome).top = Some(top);
        self.outbox.close_channel();
    }

    /// What the threads found, once no more blocks come.
    pub(super) fn outcome(&self) -> Result<(Top, Vec<Skipped>, u64), PublishError> {
        let mut outcome = lock(&self.outcome);
        if let Some(error) = outcome.error.take() {
            return Err(error);
        }
        let top = outcome.top.clone().ok_or(PublishError::Stopped)?;
        Ok((top, std::mem::take(&mut outcome.skipped), outcome.skipped_count))
    }
}

/// Stops the run when dropped: by a publish nobody waits for any more.
pub(super) struct StopOnDrop(pub(super) Arc<Run>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Fails the run if its thread panics, so that nobody waits for it for ever.
pub(super) struct FailOnPanic(pub(super) Arc<Run>);

impl Drop for FailOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop();
        }
    }
}
