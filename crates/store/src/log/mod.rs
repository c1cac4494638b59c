//! `DiskStore`: blocks in an append-only log of segments, found by an index.
//!
//! Layers, from below: [`crate::disk`] (files), [`crate::segment`] (bytes of the log),
//! `index` (redb), `catalog` (index and uncommitted changes as one), `writer` and
//! `reclaim` (the only code that changes anything), `recover` (opening), and this file:
//! the face towards async callers.
//!
//! A store runs one writer thread and a few reader threads; async callers hand them work
//! through bounded queues and never wait for the disk themselves, except that `info`,
//! `list` and `renew` may read index pages that are not cached. Opened *inline* it has no
//! threads: each call does its work when polled. That is how simulated nodes use it.

pub(crate) mod reclaim;
pub(crate) mod recover;
pub(crate) mod writer;

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_key::{Key, KeyRange};
use bytes::Bytes;
use futures_channel::oneshot;

use crate::disk::{Disk, RealDisk};
use crate::engine::index::Entry;
use crate::engine::queue::Queue;
use crate::engine::shared::{ReadFailure, Shared};
use crate::log::reclaim::{Need, STEP_BYTES, WORTHWHILE_SHARE};
use crate::log::writer::{Command, Reply, Writer};
use crate::summary::{Changed, Question};
use crate::{
    BlockInfo, BlockStore, DiskFailure, Owner, OwnerUsage, Owners, Part, ScrubStep, StoreError,
    StoredBlock, Summary, Usage,
};
use recover::{OpenError, OpenReport};

/// How a [`DiskStore`] behaves. Start from the default.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskConfig {
    /// What the store may take on its disk, index and garbage included, bytes. A part of
    /// it stays free so that compaction and index have room to work (see `store.md`).
    pub capacity_bytes: u64,
    /// Length at which a segment ends, bytes; at most a 16th of the capacity is used.
    pub segment_bytes: u64,
    /// Memory for pages of the index, bytes.
    pub index_cache_bytes: usize,
    /// Bytes of blocks that may wait for the writer before `put` waits.
    pub queue_bytes: usize,
    /// Threads that read what is not cached.
    pub reader_threads: usize,
    /// Segment files kept open.
    pub open_segments: usize,
    /// Bytes left free on the disk for others (and for the index) before it counts as full.
    pub free_reserve_bytes: u64,
    /// Changed blocks after which the index is committed.
    pub commit_entries: usize,
    /// Bytes of log after which the index is committed.
    pub commit_bytes: u64,
    /// Time after which the index is committed.
    pub commit_interval: Duration,
}

impl Default for DiskConfig {
    fn default() -> DiskConfig {
        DiskConfig {
            capacity_bytes: 10 << 30,
            segment_bytes: 64 << 20,
            index_cache_bytes: 4 << 20,
            queue_bytes: 16 << 20,
            reader_threads: 2,
            open_segments: 64,
            free_reserve_bytes: 16 << 20,
            commit_entries: 8192,
            commit_bytes: 128 << 20,
            commit_interval: Duration::from_secs(15),
        }
    }
}

/// Weight of a command beside its blocks, so that small ones are bounded as well.
const COMMAND_BYTES: usize = 1 << 10;

/// Commands one group commit may answer.
pub(crate) const MAX_GROUP: usize = 64;

/// Reads that may wait for a reader thread.
pub(crate) const MAX_QUEUED_READS: usize = 256;

/// Uncommitted changes at which `renew` waits for a commit, as a multiple of
/// `commit_entries`: bounds the memory of mass renewals.
pub(crate) const RENEW_BACKLOG: usize = 4;

/// Blocks looked at in one go while looking for expired ones.
pub(crate) const EXPIRY_PAGE: usize = 1024;

/// Times a read is tried again because the block was moved meanwhile.
const MAX_MOVES: usize = 16;

pub(crate) type ReadJob = Box<dyn FnOnce() + Send>;

/// Blocks on disk. Dropping it ends its threads after they did what is queued, and
/// commits the index; that may take a moment.
pub struct DiskStore {
    inner: Arc<Inner>,
    threads: Vec<std::thread::JoinHandle<()>>,
    report: OpenReport,
}

struct Inner {
    shared: Arc<Shared>,
    mode: Mode,
    // Dropped last: until then nobody else may open the directory.
    _lock: Box<dyn Any + Send + Sync>,
}

enum Mode {
    Threads { commands: Arc<Queue<Command>>, reads: Arc<Queue<ReadJob>> },
    Inline(Box<Mutex<Writer>>),
}

impl DiskStore {
    /// Opens the store in `dir`, making it if there is none.
    pub fn open(dir: &Path, config: DiskConfig) -> Result<DiskStore, OpenError> {
        DiskStore::open_on(Arc::new(RealDisk::new(dir)?), config)
    }

    /// Opens the store on any disk, with threads of its own.
    pub fn open_on(disk: Arc<dyn Disk>, config: DiskConfig) -> Result<DiskStore, OpenError> {
        let (shared, writer, report, lock) = prepare(disk, config)?;
        let commands = Arc::new(Queue::new(shared.config.queue_bytes));
        let reads: Arc<Queue<ReadJob>> = Arc::new(Queue::new(MAX_QUEUED_READS));
        let mut threads = Vec::new();
        let queue = commands.clone();
        threads.push(start_thread("store-writer", move || write_loop(writer, &queue))?);
        for _ in 0..shared.config.reader_threads.max(1) {
            let queue = reads.clone();
            threads.push(start_thread("store-reader", move || read_loop(&queue))?);
        }
        let mode = Mode::Threads { commands, reads };
        let inner = Arc::new(Inner { shared, mode, _lock: lock });
        Ok(DiskStore { inner, threads, report })
    }

    /// Opens the store on any disk without threads: each call does its work when its
    /// future is first polled, so a simulated run stays deterministic. The index is then
    /// committed by amount of work only, not by time; [`DiskStore::flush`] helps.
    pub fn open_inline(disk: Arc<dyn Disk>, config: DiskConfig) -> Result<DiskStore, OpenError> {
        let (shared, writer, report, lock) = prepare(disk, config)?;
        let mode = Mode::Inline(Box::new(Mutex::new(writer)));
        let inner = Arc::new(Inner { shared, mode, _lock: lock });
        Ok(DiskStore { inner, threads: Vec::new(), report })
    }

    /// What opening found.
    pub fn report(&self) -> &OpenReport {
        &self.report
    }

    /// Changes what the store may take on its disk. What it takes beyond that stays until
    /// blocks are removed and [`BlockStore::reclaim`] has given back their space; until then
    /// nothing new is taken.
    pub fn set_capacity(&self, capacity_bytes: u64) {
        self.inner.shared.set_capacity(capacity_bytes);
    }

    /// Makes everything durable, extended leases and expiry included.
    pub fn flush(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.ask(Command::Flush, 0).await })
    }

    /// From now on tells `changed` of each change of what is held.
    pub(crate) fn watch(&self, changed: &Arc<Changed>) {
        self.inner.shared.catalog.watch(changed);
    }

    /// Does work that may wait for the disk where it may.
    pub(crate) async fn waiting<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, StoreError> {
        self.inner.waiting(|_| work()).await
    }

    /// Checks what always holds between the store's sums. For tests and simulators.
    ///
    /// # Panics
    /// If it does not hold.
    pub fn check_invariants(&self) {
        self.inner.shared.catalog.check_invariants();
    }
}

impl fmt::Debug for DiskStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskStore").field("disk", &self.inner.shared.disk).finish_non_exhaustive()
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        if let Mode::Threads { commands, reads } = &self.inner.mode {
            commands.close();
            reads.close();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

type Prepared = (Arc<Shared>, Writer, OpenReport, Box<dyn Any + Send + Sync>);

fn prepare(disk: Arc<dyn Disk>, config: DiskConfig) -> Result<Prepared, OpenError> {
    let lock = disk.lock().map_err(|error| match error.kind() {
        std::io::ErrorKind::WouldBlock => OpenError::Locked(error.to_string()),
        _ => OpenError::Io(error),
    })?;
    let shared = Arc::new(Shared::new(disk, config));
    let (writer, report) = recover::recover(shared.clone())?;
    Ok((shared, writer, report, lock))
}

/// The disk blocks whoever asks it, so the store has threads that may be blocked.
pub(crate) fn start_thread(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(work)
}

/// What compaction by itself may copy: little beside what a disk can do.
const COMPACT_BYTES_PER_SEC: u64 = 8 << 20;

/// Serves commands until the queue is closed. The clock decides only when the index is
/// committed and how fast garbage is compacted, which no caller can see but by crashing.
#[allow(clippy::disallowed_methods)]
fn write_loop(mut writer: Writer, commands: &Queue<Command>) {
    let _ending = Ending(commands);
    let interval = writer.shared.config.commit_interval;
    let mut committed_at = std::time::Instant::now();
    // Whether the last look found garbage to compact, in which pass, and when to go on with it.
    let (mut need, mut before, mut compact_at) = (Need::None, None, committed_at);
    loop {
        let idle = if writer.has_uncommitted() { interval } else { interval * 4 };
        let patience = match need {
            Need::None => idle,
            _ => idle.min(compact_at.saturating_duration_since(std::time::Instant::now())),
        };
        let Some(group) = commands.pop(MAX_GROUP, patience) else { break };
        writer.run(group);
        let now = std::time::Instant::now();
        if now.duration_since(committed_at) >= interval {
            if writer.has_uncommitted() {
                let _ = writer.settle().and_then(|()| writer.commit());
            }
            committed_at = now;
            if need == Need::None {
                need = writer.compaction_need();
            }
        }
        if need != Need::None && now >= compact_at {
            (need, before) = compact_some(&mut writer, before);
            let rest = match need {
                Need::Urgent => 0,
                _ => STEP_BYTES * 1000 / COMPACT_BYTES_PER_SEC,
            };
            compact_at = std::time::Instant::now() + Duration::from_millis(rest);
        }
    }
}

/// A step of compaction in a pass; returns whether there is need of more, and in which pass.
fn compact_some(writer: &mut Writer, before: Option<u64>) -> (Need, Option<u64>) {
    match writer.reclaim_step(before) {
        Ok(step) if !step.is_last => (writer.compaction_need(), Some(step.before)),
        // The next look is at the next commit.
        Ok(_) => (Need::None, None),
        Err(error) => {
            tracing::warn!(%error, "garbage cannot be compacted");
            (Need::None, None)
        }
    }
}

/// Closes a queue when the thread that serves it ends, also by a panic: who waits for an
/// answer then gets an error instead of waiting forever.
pub(crate) struct Ending<'a, T>(pub(crate) &'a Queue<T>);

impl<T> Drop for Ending<'_, T> {
    fn drop(&mut self) {
        self.0.close();
        while self.0.pop(MAX_GROUP, Duration::ZERO).is_some() {}
    }
}

pub(crate) fn read_loop(reads: &Queue<ReadJob>) {
    let _ending = Ending(reads);
    // Waking up for nothing now and then does no harm.
    while let Some(jobs) = reads.pop(1, Duration::from_secs(3600)) {
        jobs.into_iter().for_each(|job| job());
    }
}

pub(crate) fn stopped() -> StoreError {
    StoreError::Io("the store has been closed".to_owned())
}

impl Inner {
    /// Hands a command to the writer and waits for its answer.
    async fn ask<T>(
        &self,
        command: impl FnOnce(Reply<T>) -> Command,
        weight_bytes: usize,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        let command = command(reply);
        match &self.mode {
            Mode::Inline(writer) => {
                writer.lock().expect("no panic while the lock is held").run(vec![command]);
            }
            Mode::Threads { commands, .. } => {
                let pushed = commands.push(command, weight_bytes + COMMAND_BYTES).await;
                pushed.map_err(|_closed| stopped())?;
            }
        }
        answer.await.unwrap_or_else(|_canceled| Err(stopped()))
    }

    /// Does work that may wait for the disk where it may.
    async fn waiting<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Shared) -> T + Send + 'static,
    ) -> Result<T, StoreError> {
        let Mode::Threads { reads, .. } = &self.mode else {
            return Ok(work(&self.shared));
        };
        let (reply, answer) = oneshot::channel();
        let shared = self.shared.clone();
        let job: ReadJob = Box::new(move || {
            let _ = reply.send(work(&shared));
        });
        reads.push(job, 1).await.map_err(|_closed| stopped())?;
        answer.await.map_err(|_canceled| stopped())
    }

    async fn get(&self, key: Key) -> Result<Option<StoredBlock>, StoreError> {
        for _ in 0..MAX_MOVES {
            let Some(entry) = self.shared.catalog.lookup(&key)? else { return Ok(None) };
            match self.read(key, entry).await {
                Ok(bytes) => return Ok(Some(StoredBlock { info: entry.info(key), bytes })),
                Err(ReadFailure::Gone) => {}
                Err(ReadFailure::Io(error)) => return Err(StoreError::Io(error.to_string())),
                Err(ReadFailure::Damaged) => {
                    // Not if it was moved or removed while it was read.
                    let now = self.shared.catalog.lookup(&key)?;
                    if now.is_some_and(|now| same_place(&now, &entry)) {
                        self.set_aside(vec![(key, entry.sequence)]).await?;
                        return Err(StoreError::Corrupted { key });
                    }
                }
            }
        }
        // Its segment is missing under a running store: rot of another kind.
        Err(StoreError::Io(format!("the segment of block {key} cannot be found")))
    }

    async fn read(&self, key: Key, entry: Entry) -> Result<Bytes, ReadFailure> {
        if let Some(bytes) = self.shared.read_cached(&key, &entry)? {
            return Ok(bytes);
        }
        let read = self.waiting(move |shared| shared.read_waiting(&key, &entry)).await;
        read.map_err(|error| ReadFailure::Io(std::io::Error::other(error.to_string())))?
    }

    async fn set_aside(&self, damaged: Vec<(Key, u64)>) -> Result<(), StoreError> {
        self.ask(|reply| Command::SetAside(damaged, reply), 0).await
    }

    async fn scrub(&self, from: Option<Key>, budget_bytes: u64) -> Result<ScrubStep, StoreError> {
        const PAGE: usize = 64;
        let mut step = ScrubStep::default();
        let mut next = Some(from.unwrap_or(Key::MIN));
        while let Some(from) = next {
            let range = KeyRange::new(from.previous(), Key::MAX);
            let range = if from == Key::MIN { KeyRange::full() } else { range };
            let page = self.shared.catalog.list(range, PAGE)?;
            next = None;
            for info in &page {
                if step.checked > 0 && step.checked_bytes >= budget_bytes {
                    step.next = Some(info.key);
                    return Ok(step);
                }
                self.scrub_block(info.key, &mut step).await?;
                next = (info.key != Key::MAX).then(|| info.key.next());
            }
            if page.len() < PAGE {
                next = None;
            }
        }
        Ok(step)
    }

    async fn scrub_block(&self, key: Key, step: &mut ScrubStep) -> Result<(), StoreError> {
        let Some(entry) = self.shared.catalog.lookup(&key)? else { return Ok(()) };
        let read = self.waiting(move |shared| match shared.read_medium(&key, &entry) {
            // A sector that fails twice is as good as damaged.
            Err(ReadFailure::Io(_)) => shared.read_medium(&key, &entry),
            read => read,
        });
        step.checked += 1;
        step.checked_bytes += u64::from(entry.len_bytes);
        match read.await? {
            Ok(_) | Err(ReadFailure::Gone) => {}
            Err(ReadFailure::Damaged | ReadFailure::Io(_)) => {
                // Not if it was moved while it was read.
                if self.shared.catalog.lookup(&key)?.is_some_and(|now| same_place(&now, &entry)) {
                    self.set_aside(vec![(key, entry.sequence)]).await?;
                    step.damaged.push(key);
                }
            }
        }
        Ok(())
    }

    /// Compacts step by step: others get their turn in between. Ends only with a whole segment.
    async fn reclaim(&self, budget_bytes: u64) -> Result<u64, StoreError> {
        let (mut copied_bytes, mut removed_bytes, mut before) = (0, 0u64, None);
        loop {
            let step = self.ask(|reply| Command::Reclaim(before, reply), 0).await?;
            before = Some(step.before);
            copied_bytes += step.copied_bytes;
            removed_bytes += step.removed_bytes;
            // Removals that still matter only move: to gain less than that is to gain nothing.
            let freed_bytes = removed_bytes.saturating_sub(copied_bytes);
            let is_gain = freed_bytes > 0 && freed_bytes * WORTHWHILE_SHARE >= copied_bytes;
            if step.is_last || (is_gain && copied_bytes >= budget_bytes) {
                return Ok(if is_gain { freed_bytes } else { 0 });
            }
        }
    }

    async fn summarize(&self, question: Question, now: u64) -> Result<Vec<Part>, StoreError> {
        let mut asked = self.shared.catalog.summaries.ask(question, now).await;
        let mut answer = asked.step(None)?;
        while answer.is_none() {
            let step = self.waiting(move |shared| {
                let list = |range, limit| Ok(shared.catalog.list(range, limit)?);
                let answer = asked.step(Some(&list));
                (asked, answer)
            });
            let (going_on, stepped) = step.await?;
            (asked, answer) = (going_on, stepped?);
        }
        Ok(answer.unwrap_or_default())
    }

    async fn remove_expired(&self, now_unix_secs: u64) -> Result<u64, StoreError> {
        let earliest = &self.shared.earliest_expiry;
        if earliest.load(Ordering::Relaxed) >= now_unix_secs {
            return Ok(0);
        }
        // Puts that come meanwhile lower it themselves.
        earliest.store(u64::MAX, Ordering::Relaxed);
        let removed = self.remove_expired_pages(now_unix_secs).await;
        if removed.is_err() {
            earliest.store(0, Ordering::Relaxed);
        }
        removed
    }

    async fn remove_expired_pages(&self, now_unix_secs: u64) -> Result<u64, StoreError> {
        let mut removed = 0;
        let mut range = KeyRange::full();
        loop {
            let page = self.waiting(move |shared| expire_page(shared, range, now_unix_secs));
            let (last, count) = page.await??;
            removed += count;
            match last {
                Some(last) if last != Key::MAX => range = KeyRange::new(last, Key::MAX),
                _ => return Ok(removed),
            }
        }
    }

    fn renew(
        &self,
        keys: &[Key],
        expires_unix_secs: u64,
        owner: Owner,
    ) -> Result<Vec<bool>, StoreError> {
        let mut held = vec![false; keys.len()];
        let chunk = self.shared.config.commit_entries.max(1);
        for (part, chunk) in keys.chunks(chunk).enumerate().map(|(i, keys)| (i * chunk, keys)) {
            self.bound_backlog();
            self.shared.catalog.update(chunk, |i, entry| {
                held[part + i] = entry.is_some();
                let entry = entry.filter(|entry| entry.expires_unix_secs < expires_unix_secs)?;
                Some(Some(entry.extended(expires_unix_secs, owner)))
            })?;
        }
        Ok(held)
    }

    /// Waits for a commit of the index if there is far too much to commit.
    fn bound_backlog(&self) {
        let limit = self.shared.config.commit_entries.saturating_mul(RENEW_BACKLOG);
        if self.shared.catalog.uncommitted() < limit {
            return;
        }
        match &self.mode {
            Mode::Inline(writer) => {
                writer.lock().expect("no panic while the lock is held").run(Vec::new());
            }
            Mode::Threads { commands, .. } => {
                let (reply, answer) = std::sync::mpsc::sync_channel(1);
                if commands.push_now(Command::CommitNow(reply)).is_ok() {
                    // Whether it worked or the writer has ended: there is no more to wait for.
                    let _ = answer.recv();
                }
            }
        }
    }
}

fn same_place(a: &Entry, b: &Entry) -> bool {
    (a.segment, a.offset) == (b.segment, b.offset)
}

/// Forgets the expired blocks among the next ones of `range`; returns the last key looked
/// at, if there was any, and how many were forgotten.
fn expire_page(
    shared: &Shared,
    range: KeyRange,
    now_unix_secs: u64,
) -> Result<(Option<Key>, u64), StoreError> {
    let page = shared.catalog.list(range, EXPIRY_PAGE)?;
    let mut expired = Vec::new();
    for info in &page {
        if info.expires_unix_secs < now_unix_secs {
            expired.push(info.key);
        } else {
            shared.earliest_expiry.fetch_min(info.expires_unix_secs, Ordering::Relaxed);
        }
    }
    let mut removed = vec![false; expired.len()];
    shared.catalog.update(&expired, |i, entry| {
        let entry = entry?;
        // Renewed since it was listed?
        if entry.expires_unix_secs >= now_unix_secs {
            shared.earliest_expiry.fetch_min(entry.expires_unix_secs, Ordering::Relaxed);
            return None;
        }
        removed[i] = true;
        Some(None)
    })?;
    let removed = removed.into_iter().filter(|removed| *removed).count() as u64;
    Ok((page.last().map(|info| info.key), removed))
}

impl BlockStore for DiskStore {
    fn put(&self, batch: Vec<StoredBlock>) -> BoxFuture<'static, Result<(), StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let weight_bytes = batch.iter().map(|block| block.bytes.len()).sum();
            inner.ask(|reply| Command::Put(batch, reply), weight_bytes).await
        })
    }

    fn get(&self, key: &Key) -> BoxFuture<'static, Result<Option<StoredBlock>, StoreError>> {
        let (inner, key) = (self.inner.clone(), *key);
        Box::pin(async move { inner.get(key).await })
    }

    fn info(&self, key: &Key) -> Result<Option<BlockInfo>, StoreError> {
        Ok(self.inner.shared.catalog.lookup(key)?.map(|entry| entry.info(*key)))
    }

    fn list(&self, range: KeyRange, limit: usize) -> Result<Vec<BlockInfo>, StoreError> {
        Ok(self.inner.shared.catalog.list(range, limit)?)
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

    fn renew(
        &self,
        keys: &[Key],
        expires_unix_secs: u64,
        owner: Owner,
    ) -> Result<Vec<bool>, StoreError> {
        self.inner.renew(keys, expires_unix_secs, owner)
    }

    fn flush(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        DiskStore::flush(self)
    }

    fn remove(&self, keys: Vec<Key>) -> BoxFuture<'static, Result<(), StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let weight_bytes = keys.len() * size_of::<Key>();
            inner.ask(|reply| Command::Remove(keys, reply), weight_bytes).await
        })
    }

    fn remove_expired(&self, now_unix_secs: u64) -> BoxFuture<'static, Result<u64, StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.remove_expired(now_unix_secs).await })
    }

    fn usage(&self) -> Usage {
        self.inner.shared.usage()
    }

    fn disk_failure(&self) -> Option<DiskFailure> {
        self.inner.shared.disk_failure()
    }

    fn usage_of(&self, owner: &Owner) -> OwnerUsage {
        self.inner.shared.catalog.read().usage_of(owner)
    }

    fn owners(&self, limit: usize) -> Owners {
        self.inner.shared.catalog.read().largest_owners(limit)
    }

    fn scrub(
        &self,
        from: Option<Key>,
        budget_bytes: u64,
    ) -> BoxFuture<'static, Result<ScrubStep, StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.scrub(from, budget_bytes).await })
    }

    fn reclaim(&self, budget_bytes: u64) -> BoxFuture<'static, Result<u64, StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.reclaim(budget_bytes).await })
    }
}
