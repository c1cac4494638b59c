//! `DiskStore`: blocks in an append-only log of segments, found by an index.
//!
//! Layers, from below: [`crate::disk`] (files), [`crate::segment`] (bytes of the log),
//! [`crate::engine`] (index, catalogue, threads), `reading` (records), `writer` and `reclaim` (the
//! only code that changes the log), `recover` (opening), and this file: the face towards async
//! callers, who never wait for the disk themselves, except that `info`, `list` and `renew` may
//! read index pages that are not cached.
//!
//! The format and the reasoning about crashes are in `docs/design/store.md`.

mod reading;
mod reclaim;
mod recover;
mod writer;

use std::any::Any;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use atoll_env::BoxFuture;
use atoll_key::{Key, KeyRange};
use bytes::Bytes;

use crate::disk::{Disk, RealDisk};
use crate::engine::entry::IndexEntry;
use crate::engine::shared::Shared;
use crate::engine::threads::{Engine, Writer as _};
use crate::engine::{self, DiskConfig, OpenError};
use crate::log::reading::{Log, ReadFailure};
use crate::log::reclaim::WORTHWHILE_SHARE;
use crate::log::writer::Writer;
use crate::summary::{Changed, Question};
use crate::{
    BlockInfo, BlockStore, DiskFailure, Owner, OwnerUsage, Owners, Part, ScrubStep, StoreError,
    StoredBlock, Summary, Usage,
};

pub use recover::OpenReport;

/// Times a read is tried again because the block was moved meanwhile.
const MAX_MOVES: usize = 16;

/// Blocks on disk. Dropping it ends its threads after they did what is queued, and
/// commits the index; that may take a moment.
pub struct DiskStore {
    inner: Arc<Inner>,
    report: OpenReport,
}

struct Inner {
    log: Arc<Log>,
    engine: Engine<Writer>,
    // Dropped last: until then no other store may open the directory.
    _lock: Box<dyn Any + Send + Sync>,
}

impl DiskStore {
    /// Opens the store in `dir`, making it if there is none.
    pub fn open(dir: &Path, config: DiskConfig) -> Result<DiskStore, OpenError> {
        DiskStore::open_on(Arc::new(RealDisk::new(dir)?), config)
    }

    /// Opens the store on any disk, with threads of its own.
    pub fn open_on(disk: Arc<dyn Disk>, config: DiskConfig) -> Result<DiskStore, OpenError> {
        DiskStore::open_with(disk, config, |shared, writer| Engine::start("store", shared, writer))
    }

    /// Opens the store on any disk without threads: each call does its work when its
    /// future is first polled, so a simulated run stays deterministic. The index is then
    /// committed by amount of work only, not by time; [`DiskStore::flush`] helps.
    pub fn open_inline(disk: Arc<dyn Disk>, config: DiskConfig) -> Result<DiskStore, OpenError> {
        DiskStore::open_with(disk, config, |shared, writer| Ok(Engine::inline(shared, writer)))
    }

    fn open_with(
        disk: Arc<dyn Disk>,
        config: DiskConfig,
        start: impl FnOnce(Arc<Shared>, Writer) -> io::Result<Engine<Writer>>,
    ) -> Result<DiskStore, OpenError> {
        let lock = engine::lock(&*disk)?;
        let shared = Arc::new(Shared::new(disk, config));
        let log = Arc::new(Log::new(shared.clone()));
        let (writer, report) = recover::recover(log.clone())?;
        let engine = start(shared, writer)?;
        let inner = Arc::new(Inner { log, engine, _lock: lock });
        Ok(DiskStore { inner, report })
    }

    /// What opening found.
    pub fn report(&self) -> &OpenReport {
        &self.report
    }

    /// Changes the capacity, bytes. A store that takes more than that refuses new blocks until
    /// blocks are removed and [`BlockStore::reclaim`] has given back their space.
    pub fn set_capacity(&self, capacity_bytes: u64) {
        self.inner.log.shared.set_capacity(capacity_bytes);
    }

    /// Makes everything durable, extended leases and expiry included.
    pub fn flush(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.engine.write(0, |writer| writer.commit_all()).await })
    }

    /// From now on tells `changed` of each change of what is held.
    pub(crate) fn watch(&self, changed: &Arc<Changed>) {
        self.inner.log.shared.catalog.watch(changed);
    }

    /// Does work that may wait for the disk on a reader thread.
    pub(crate) async fn waiting<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, StoreError> {
        self.inner.engine.read(work).await
    }

    /// Checks what always holds between the store's sums. For tests and simulators.
    ///
    /// # Panics
    /// If it does not hold.
    pub fn check_invariants(&self) {
        self.inner.log.shared.catalog.check_invariants();
    }
}

impl fmt::Debug for DiskStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskStore")
            .field("disk", &self.inner.log.shared.disk)
            .finish_non_exhaustive()
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        self.inner.engine.stop();
    }
}

impl Inner {
    async fn get(&self, key: Key) -> Result<Option<StoredBlock>, StoreError> {
        for _ in 0..MAX_MOVES {
            let Some(entry) = self.engine.lookup(&key)? else { return Ok(None) };
            match self.read(key, entry).await {
                Ok(bytes) => return Ok(Some(StoredBlock { info: entry.info(key), bytes })),
                Err(ReadFailure::Gone) => {}
                Err(ReadFailure::Io(error)) => return Err(StoreError::Io(error.to_string())),
                Err(ReadFailure::Damaged) => {
                    // Not if it was moved or removed while it was read.
                    let now = self.engine.lookup(&key)?;
                    if now.is_some_and(|now| same_place(&now, &entry)) {
                        self.set_aside(vec![(key, Some(entry.sequence))]).await?;
                        return Err(StoreError::Corrupted { key });
                    }
                }
            }
        }
        // Its segment is missing under a running store: rot of another kind.
        Err(StoreError::Io(format!("the segment of block {key} cannot be found")))
    }

    async fn read(&self, key: Key, entry: IndexEntry) -> Result<Bytes, ReadFailure> {
        if let Some(bytes) = self.log.read_cached(&key, &entry)? {
            return Ok(bytes);
        }
        let log = self.log.clone();
        let read = self.engine.read(move || log.read_waiting(&key, &entry)).await;
        read.map_err(|error| ReadFailure::Io(io::Error::other(error.to_string())))?
    }

    async fn set_aside(&self, damaged: Vec<(Key, Option<u64>)>) -> Result<(), StoreError> {
        let append = move |writer: &mut Writer, reply| {
            let appended = writer.set_aside(damaged);
            writer.answer_when_synced(appended, reply);
        };
        self.engine.ask(0, append).await
    }

    /// Reads a block from the medium; sets it aside and says so if it is damaged.
    async fn check(&self, key: Key, entry: IndexEntry) -> Result<bool, StoreError> {
        let log = self.log.clone();
        let read = self.engine.read(move || match log.read_medium(&key, &entry) {
            // A sector that fails twice is as good as damaged.
            Err(ReadFailure::Io(_)) => log.read_medium(&key, &entry),
            read => read,
        });
        if matches!(read.await?, Ok(_) | Err(ReadFailure::Gone)) {
            return Ok(false);
        }
        // Not if it was moved while it was read.
        let is_damaged = self.engine.lookup(&key)?.is_some_and(|now| same_place(&now, &entry));
        if is_damaged {
            self.set_aside(vec![(key, Some(entry.sequence))]).await?;
        }
        Ok(is_damaged)
    }

    /// Compacts step by step: others get their turn in between. Ends only with a whole segment.
    async fn reclaim(&self, budget_bytes: u64) -> Result<u64, StoreError> {
        let (mut copied_bytes, mut removed_bytes, mut before) = (0, 0u64, None);
        loop {
            let step = self.engine.write(0, move |writer| writer.reclaim_step(before)).await?;
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

    /// Forgets those of `expired` that have not been renewed since they were listed. That is
    /// not written to the log, see `store.md`.
    async fn forget_expired(&self, expired: Vec<Key>, now: u64) -> Result<u64, StoreError> {
        let shared = self.log.shared.clone();
        let forget = move || {
            let mut removed = vec![false; expired.len()];
            shared.catalog.update(&expired, |i, entry| {
                let entry = entry?;
                if entry.expires_unix_secs >= now {
                    shared.note_lease(entry.expires_unix_secs);
                    return None;
                }
                removed[i] = true;
                Some(None)
            })?;
            Ok(removed.into_iter().filter(|removed| *removed).count() as u64)
        };
        self.engine.read(forget).await?
    }
}

fn same_place(a: &IndexEntry, b: &IndexEntry) -> bool {
    (a.segment, a.offset) == (b.segment, b.offset)
}

impl BlockStore for DiskStore {
    fn put(&self, batch: Vec<StoredBlock>) -> BoxFuture<'static, Result<(), StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let weight_bytes = batch.iter().map(|block| block.bytes.len()).sum();
            let append = move |writer: &mut Writer, reply| {
                let appended = writer.put(batch);
                writer.answer_when_synced(appended, reply);
            };
            inner.engine.ask(weight_bytes, append).await
        })
    }

    fn get(&self, key: &Key) -> BoxFuture<'static, Result<Option<StoredBlock>, StoreError>> {
        let (inner, key) = (self.inner.clone(), *key);
        Box::pin(async move { inner.get(key).await })
    }

    fn info(&self, key: &Key) -> Result<Option<BlockInfo>, StoreError> {
        Ok(self.inner.log.shared.catalog.lookup(key)?.map(|entry| entry.info(*key)))
    }

    fn list(&self, range: KeyRange, limit: usize) -> Result<Vec<BlockInfo>, StoreError> {
        Ok(self.inner.log.shared.catalog.list(range, limit)?)
    }

    fn summaries(
        &self,
        ranges: Vec<KeyRange>,
        now_unix_secs: u64,
    ) -> BoxFuture<'static, Result<Vec<Summary>, StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let parts = inner.engine.summarize(Question::Summaries(ranges), now_unix_secs).await?;
            Ok(parts.into_iter().map(|part| part.summary).collect())
        })
    }

    fn cut(
        &self,
        range: KeyRange,
        now_unix_secs: u64,
    ) -> BoxFuture<'static, Result<Vec<Part>, StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.engine.summarize(Question::Cut(range), now_unix_secs).await })
    }

    fn renew(
        &self,
        keys: &[Key],
        expires_unix_secs: u64,
        owner: Owner,
    ) -> Result<Vec<bool>, StoreError> {
        self.inner.engine.renew(keys, expires_unix_secs, owner, |_| Ok(true))
    }

    fn shorten(&self, keys: &[Key], expires_unix_secs: u64) -> Result<(), StoreError> {
        self.inner.engine.shorten(keys, expires_unix_secs)
    }

    fn flush(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        DiskStore::flush(self)
    }

    fn remove(&self, keys: Vec<Key>) -> BoxFuture<'static, Result<(), StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let weight_bytes = keys.len() * size_of::<Key>();
            let append = move |writer: &mut Writer, reply| {
                let appended = writer.remove(keys.into_iter().map(|key| (key, None)).collect());
                writer.answer_when_synced(appended, reply);
            };
            inner.engine.ask(weight_bytes, append).await
        })
    }

    fn remove_expired(&self, now_unix_secs: u64) -> BoxFuture<'static, Result<u64, StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let forget = |expired| inner.forget_expired(expired, now_unix_secs);
            inner.engine.remove_expired(now_unix_secs, forget).await
        })
    }

    fn usage(&self) -> Usage {
        self.inner.log.shared.usage()
    }

    fn disk_failure(&self) -> Option<DiskFailure> {
        self.inner.log.shared.disk_failure()
    }

    fn usage_of(&self, owner: &Owner) -> OwnerUsage {
        self.inner.log.shared.catalog.read().usage_of(owner)
    }

    fn owners(&self, limit: usize) -> Owners {
        self.inner.log.shared.catalog.read().largest_owners(limit)
    }

    fn scrub(
        &self,
        from: Option<Key>,
        budget_bytes: u64,
    ) -> BoxFuture<'static, Result<ScrubStep, StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            inner.engine.scrub(from, budget_bytes, |key, entry| inner.check(key, entry)).await
        })
    }

    fn reclaim(&self, budget_bytes: u64) -> BoxFuture<'static, Result<u64, StoreError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.reclaim(budget_bytes).await })
    }
}
