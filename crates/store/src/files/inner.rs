//! What a `FileStore` does: handing work to its threads, and the walks through all blocks.

use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_key::{Key, KeyRange};
use futures_channel::oneshot;

use super::directory::BlockDir;
use super::writer::{Swept, Writer};
use super::{Care, Failure, Place};
use crate::engine::index::Entry;
use crate::engine::queue::Queue;
use crate::log::{EXPIRY_PAGE, Ending, MAX_GROUP, RENEW_BACKLOG, ReadJob, stopped};
use crate::summary::Question;
use crate::{Part, ScrubStep, StoreError, StoredBlock};

/// How long after the last end of a lease that has passed a block is kept whose lease is not
/// known: days in which its publisher renews it, and neighbours compare. A guess.
const ADOPTED_LEASE: Duration = Duration::from_secs(8 * 24 * 3600);

pub(crate) struct Inner {
    pub(crate) place: Arc<Place>,
    pub(crate) mode: Mode,
    // Dropped last: until then nobody else may open the index.
    pub(crate) _lock: Box<dyn Any + Send + Sync>,
}

pub(crate) type WriteJob = Box<dyn FnOnce(&mut Writer) + Send>;

pub(crate) enum Mode {
    Threads { writes: Arc<Queue<WriteJob>>, reads: Arc<Queue<ReadJob>> },
    Inline(Box<Mutex<Writer>>),
}

/// Serves writes until the queue is closed. The clock decides only when the index is
/// committed, which no caller can see but by crashing.
#[allow(clippy::disallowed_methods)]
pub(crate) fn write_loop(mut writer: Writer, writes: &Queue<WriteJob>) {
    let _ending = Ending(writes);
    let interval = writer.place.shared.config.commit_interval;
    let mut committed_at = std::time::Instant::now();
    loop {
        let patience = if writer.has_uncommitted() { interval } else { interval * 4 };
        let Some(jobs) = writes.pop(MAX_GROUP, patience) else { break };
        jobs.into_iter().for_each(|job| job(&mut writer));
        if committed_at.elapsed() >= interval {
            if writer.has_uncommitted() {
                let _ = writer.commit();
            }
            committed_at = std::time::Instant::now();
        }
    }
}

/// Weight of a write beside its blocks, so that small ones are bounded as well.
const JOB_BYTES: usize = 1 << 10;

/// Times a read is tried again because the block was replaced meanwhile.
const MAX_REPLACED: usize = 16;

/// Blocks listed at once by what goes through all of them.
const PAGE_BLOCKS: usize = 64;

/// Some blocks, and where the next ones begin, if there are any.
type Page = (Vec<(Key, Entry)>, Option<Key>);

impl Inner {
    /// Has the writer do something.
    pub(crate) async fn write<T: Send + 'static>(
        &self,
        weight_bytes: usize,
        work: impl FnOnce(&mut Writer) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        match &self.mode {
            Mode::Inline(writer) => work(&mut writer.lock().expect("no panic while it is held")),
            Mode::Threads { writes, .. } => {
                let (reply, answer) = oneshot::channel();
                let job: WriteJob = Box::new(move |writer| {
                    let _ = reply.send(work(writer));
                });
                writes.push(job, weight_bytes + JOB_BYTES).await.map_err(|_closed| stopped())?;
                answer.await.unwrap_or_else(|_canceled| Err(stopped()))
            }
        }
    }

    /// Waits for a commit of the index if there is far too much to commit.
    pub(crate) fn bound_backlog(&self) {
        let limit = self.place.shared.config.commit_entries.saturating_mul(RENEW_BACKLOG);
        if self.place.shared.catalog.uncommitted() < limit {
            return;
        }
        match &self.mode {
            Mode::Inline(writer) => {
                writer.lock().expect("no panic while it is held").commit_if_much()
            }
            Mode::Threads { writes, .. } => {
                let (reply, answer) = std::sync::mpsc::sync_channel(1);
                let job: WriteJob = Box::new(move |writer| {
                    writer.commit_if_much();
                    let _ = reply.send(());
                });
                if writes.push_now(job).is_ok() {
                    // Whether it worked or the writer has ended: there is no more to wait for.
                    let _ = answer.recv();
                }
            }
        }
    }

    /// Does work that may wait for the disk where it may.
    pub(super) async fn waiting<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Place) -> T + Send + 'static,
    ) -> Result<T, StoreError> {
        let Mode::Threads { reads, .. } = &self.mode else { return Ok(work(&self.place)) };
        let (reply, answer) = oneshot::channel();
        let place = self.place.clone();
        let job: ReadJob = Box::new(move || {
            let _ = reply.send(work(&place));
        });
        reads.push(job, 1).await.map_err(|_closed| stopped())?;
        answer.await.map_err(|_canceled| stopped())
    }

    pub(crate) async fn get(&self, key: Key) -> Result<Option<StoredBlock>, StoreError> {
        for _ in 0..MAX_REPLACED {
            if self.place.is_away() {
                return Ok(None);
            }
            let Some(entry) = self.place.lookup(&key)? else { return Ok(None) };
            match self.waiting(move |place| place.read(&key, &entry)).await? {
                Ok(bytes) => return Ok(Some(StoredBlock { info: entry.info(key), bytes })),
                Err(Failure::Unknown(_)) if self.place.is_away() => return Ok(None),
                Err(Failure::Unknown(why)) => return Err(StoreError::Io(why)),
                // Unless it was replaced meanwhile, the next look finds nothing.
                Err(Failure::Lost) => self.lose(vec![(key, entry.sequence)]).await.map(drop)?,
            }
        }
        Ok(None)
    }

    /// Forgets blocks whose files have vanished, if they are still the same; returns which.
    async fn lose(&self, lost: Vec<(Key, u64)>) -> Result<Vec<Key>, StoreError> {
        let keys: Vec<_> = lost.into_iter().map(|(key, n)| (key, Some(n))).collect();
        let gone = self.write(0, move |writer| writer.forget(&keys)).await?;
        if !gone.is_empty() {
            tracing::debug!(count = gone.len(), "blocks have vanished; repair restores them");
            self.place.lost_blocks.fetch_add(gone.len() as u64, Ordering::Relaxed);
        }
        Ok(gone)
    }

    /// The entry of a block whose file is there and has the right length.
    pub(crate) fn look_for(&self, key: &Key) -> Result<Option<Entry>, StoreError> {
        for _ in 0..MAX_REPLACED {
            if self.place.is_away() {
                return Ok(None);
            }
            let Some(entry) = self.place.lookup(key)? else { return Ok(None) };
            match self.place.probe(key, &entry) {
                Ok(()) => return Ok(Some(entry)),
                Err(Failure::Unknown(_)) if self.place.is_away() => return Ok(None),
                Err(Failure::Unknown(why)) => return Err(StoreError::Io(why)),
                // Replaced meanwhile?
                Err(Failure::Lost) if self.place.lookup(key)? != Some(entry) => {}
                Err(Failure::Lost) => {
                    self.lose_soon(*key, entry.sequence);
                    return Ok(None);
                }
            }
        }
        Ok(None)
    }

    /// Has the writer forget a block whose file has vanished, without waiting for it.
    fn lose_soon(&self, key: Key, sequence: u64) {
        let place = self.place.clone();
        let job: WriteJob = Box::new(move |writer| {
            // If that fails, the next look finds it again.
            let gone = writer.forget(&[(key, Some(sequence))]).unwrap_or_default();
            place.lost_blocks.fetch_add(gone.len() as u64, Ordering::Relaxed);
        });
        match &self.mode {
            Mode::Inline(writer) => job(&mut writer.lock().expect("no panic while it is held")),
            Mode::Threads { writes, .. } => drop(writes.push_now(job)),
        }
    }

    /// Up to [`PAGE_BLOCKS`] entries from `from` on, and where to go on.
    fn page(&self, from: Key) -> Result<Page, StoreError> {
        let range = KeyRange::new(from.previous(), Key::MAX);
        let range = if from == Key::MIN { KeyRange::full() } else { range };
        let infos = self.place.shared.catalog.list(range, PAGE_BLOCKS)?;
        let mut entries = Vec::with_capacity(infos.len());
        for info in &infos {
            entries.extend(self.place.lookup(&info.key)?.map(|entry| (info.key, entry)));
        }
        let last = infos.last().filter(|last| infos.len() == PAGE_BLOCKS && last.key != Key::MAX);
        Ok((entries, last.map(|last| last.key.next())))
    }

    pub(crate) async fn look_after(
        &self,
        from: Option<Key>,
        limit: usize,
    ) -> Result<Care, StoreError> {
        let mut care = Care::default();
        let mut next = Some(from.unwrap_or(Key::MIN));
        while let Some(from) = next.filter(|_| care.checked < limit as u64) {
            if self.place.is_away() {
                return Ok(Care { next: None, ..care });
            }
            let (entries, more) = self.page(from)?;
            care.checked += entries.len() as u64;
            let lost = self.waiting(move |place| vanished(place, &entries)).await?;
            care.lost += self.lose(lost).await?.len() as u64;
            next = more;
        }
        care.next = next;
        Ok(care)
    }

    pub(crate) async fn scrub(
        &self,
        from: Option<Key>,
        budget_bytes: u64,
    ) -> Result<ScrubStep, StoreError> {
        let mut step = ScrubStep::default();
        let mut next = Some(from.unwrap_or(Key::MIN));
        while let Some(from) = next.filter(|_| !self.place.is_away()) {
            let (entries, more) = self.page(from)?;
            next = more;
            for (key, entry) in entries {
                if step.checked > 0 && step.checked_bytes >= budget_bytes {
                    step.next = Some(key);
                    return Ok(step);
                }
                step.checked += 1;
                step.checked_bytes += u64::from(entry.len_bytes);
                let read = self.waiting(move |place| place.read(&key, &entry)).await?;
                // No damage, to those who ask: files may vanish here.
                if matches!(read, Err(Failure::Lost)) {
                    self.lose(vec![(key, entry.sequence)]).await?;
                }
            }
        }
        Ok(step)
    }

    pub(crate) async fn summarize(
        &self,
        question: Question,
        now: u64,
    ) -> Result<Vec<Part>, StoreError> {
        if self.place.is_away() {
            return Ok(question.of_nothing());
        }
        let mut asked = self.place.shared.catalog.summaries.ask(question, now).await;
        let mut answer = asked.step(None)?;
        while answer.is_none() {
            let step = self.waiting(move |place| {
                let list = |range, limit| Ok(place.shared.catalog.list(range, limit)?);
                let answer = asked.step(Some(&list));
                (asked, answer)
            });
            let (going_on, stepped) = step.await?;
            (asked, answer) = (going_on, stepped?);
        }
        Ok(answer.unwrap_or_default())
    }

    pub(crate) async fn remove_expired(&self, now_unix_secs: u64) -> Result<u64, StoreError> {
        self.place.passed_unix_secs.fetch_max(now_unix_secs, Ordering::Relaxed);
        let earliest = &self.place.shared.earliest_expiry;
        if self.place.is_away() || earliest.load(Ordering::Relaxed) >= now_unix_secs {
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
        let (mut range, mut removed) = (KeyRange::full(), 0);
        loop {
            let page = self.write(0, move |writer| expire_page(writer, range, now_unix_secs));
            let (last, count) = page.await?;
            removed += count;
            match last {
                Some(last) if last != Key::MAX => range = KeyRange::new(last, Key::MAX),
                _ => return Ok(removed),
            }
        }
    }

    /// Makes blocks again of files that belong to none, or removes them: what a crash left, or
    /// the loss of the index.
    pub(crate) async fn sweep(&self) -> Result<(), StoreError> {
        let mut swept = Swept::default();
        let passed = self.place.passed_unix_secs.load(Ordering::Relaxed);
        let expires = (passed > 0).then(|| passed.saturating_add(ADOPTED_LEASE.as_secs()));
        for number in 0..BlockDir::fan_out() {
            if self.place.is_away() {
                break;
            }
            let step = self.write(0, move |writer| writer.sweep(number, expires)).await?;
            swept.adopted += step.adopted;
            swept.removed += step.removed;
        }
        let Swept { adopted, removed } = swept;
        if removed > 0 {
            tracing::info!(removed, "files that belonged to no block have been removed");
        }
        if adopted > 0 {
            tracing::warn!(adopted, "blocks have been found that the index did not know");
        }
        Ok(())
    }
}

/// Those of `entries` whose files are gone.
fn vanished(place: &Place, entries: &[(Key, Entry)]) -> Vec<(Key, u64)> {
    let mut lost = Vec::new();
    for (key, entry) in entries {
        match place.probe(key, entry) {
            Ok(()) => {}
            Err(Failure::Lost) => lost.push((*key, entry.sequence)),
            Err(Failure::Unknown(_)) if place.is_away() => break,
            // One that cannot be opened now does not keep the others from being looked at.
            Err(Failure::Unknown(why)) => tracing::debug!(%key, why, "a file does not open"),
        }
    }
    lost
}

/// Forgets the expired blocks among the next ones of `range`; returns the last key looked at,
/// if there was any, and how many were forgotten.
fn expire_page(
    writer: &mut Writer,
    range: KeyRange,
    now_unix_secs: u64,
) -> Result<(Option<Key>, u64), StoreError> {
    let place = writer.place.clone();
    let page = place.shared.catalog.list(range, EXPIRY_PAGE)?;
    let mut expired = Vec::new();
    for info in &page {
        if info.expires_unix_secs < now_unix_secs {
            expired.extend(place.lookup(&info.key)?.map(|entry| (info.key, Some(entry.sequence))));
        } else {
            place.shared.earliest_expiry.fetch_min(info.expires_unix_secs, Ordering::Relaxed);
        }
    }
    let count = writer.forget_expired(&expired, now_unix_secs)?;
    Ok((page.last().map(|info| info.key), count))
}
