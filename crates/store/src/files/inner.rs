//! What a `FileStore` does beside what every engine does: looking after files that may vanish.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_key::Key;

use super::directory::BlockDir;
use super::place::{Failure, Place};
use super::writer::{Swept, Writer};
use crate::engine::entry::IndexEntry;
use crate::engine::threads::Engine;
use crate::summary::Question;
use crate::{Part, StoreError, StoredBlock};

/// How long after the last end of a lease that has passed a block is kept whose lease is not
/// known: days in which its publisher renews it, and neighbours compare. A guess.
const ADOPTED_LEASE: Duration = Duration::from_secs(8 * 24 * 3600);

/// Times a read is tried again because the block was replaced meanwhile.
const MAX_REPLACED: usize = 16;

/// What a step of [`crate::FileStore::look_after`] found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Care {
    /// Files opened.
    pub checked: u64,
    /// Blocks whose files had vanished; they are no longer held.
    pub lost: u64,
    /// Where the next step begins; `None` when all have been gone through.
    pub next: Option<Key>,
}

pub(crate) struct Inner {
    pub(crate) place: Arc<Place>,
    pub(crate) engine: Engine<Writer>,
    // Dropped last: until then no other store may open the index.
    pub(crate) _lock: Box<dyn Any + Send + Sync>,
}

impl Inner {
    pub(crate) async fn get(&self, key: Key) -> Result<Option<StoredBlock>, StoreError> {
        for _ in 0..MAX_REPLACED {
            if self.place.is_away() {
                return Ok(None);
            }
            let Some(entry) = self.place.lookup(&key)? else { return Ok(None) };
            let place = self.place.clone();
            match self.engine.read(move || place.read(&key, &entry)).await? {
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
        let gone = self.engine.write(0, move |writer| writer.forget(&keys)).await?;
        if !gone.is_empty() {
            tracing::debug!(count = gone.len(), "blocks have vanished; repair restores them");
            self.place.lost_blocks.fetch_add(gone.len() as u64, Ordering::Relaxed);
        }
        Ok(gone)
    }

    /// The entry of a block whose file is there and has the right length.
    pub(crate) fn look_for(&self, key: &Key) -> Result<Option<IndexEntry>, StoreError> {
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
        self.engine.write_soon(move |writer| {
            // If that fails, the next look finds it again.
            let gone = writer.forget(&[(key, Some(sequence))]).unwrap_or_default();
            place.lost_blocks.fetch_add(gone.len() as u64, Ordering::Relaxed);
        });
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
            let (entries, more) = self.engine.page(from)?;
            care.checked += entries.len() as u64;
            let place = self.place.clone();
            let lost = self.engine.read(move || vanished(&place, &entries)).await?;
            care.lost += self.lose(lost).await?.len() as u64;
            next = more;
        }
        care.next = next;
        Ok(care)
    }

    /// Reads a block's file; a lost one is forgotten and not reported as damaged: files may
    /// vanish here.
    pub(crate) async fn check(&self, key: Key, entry: IndexEntry) -> Result<bool, StoreError> {
        let place = self.place.clone();
        let read = self.engine.read(move || place.read(&key, &entry)).await?;
        if matches!(read, Err(Failure::Lost)) {
            self.lose(vec![(key, entry.sequence)]).await?;
        }
        Ok(false)
    }

    pub(crate) async fn summarize(
        &self,
        question: Question,
        now_unix_secs: u64,
    ) -> Result<Vec<Part>, StoreError> {
        if self.place.is_away() {
            return Ok(question.of_nothing());
        }
        self.engine.summarize(question, now_unix_secs).await
    }

    pub(crate) async fn remove_expired(&self, now_unix_secs: u64) -> Result<u64, StoreError> {
        self.place.passed_unix_secs.fetch_max(now_unix_secs, Ordering::Relaxed);
        if self.place.is_away() {
            return Ok(0);
        }
        let forget = |expired: Vec<Key>| {
            self.engine.write(0, move |writer| writer.forget_expired(&expired, now_unix_secs))
        };
        self.engine.remove_expired(now_unix_secs, forget).await
    }

    /// Makes blocks again of files that belong to none, or removes them. A crash or the loss of
    /// the index leaves such files.
    pub(crate) async fn sweep(&self) -> Result<(), StoreError> {
        let mut swept = Swept::default();
        let passed = self.place.passed_unix_secs.load(Ordering::Relaxed);
        let expires = (passed > 0).then(|| passed.saturating_add(ADOPTED_LEASE.as_secs()));
        for number in 0..BlockDir::fan_out() {
            if self.place.is_away() {
                break;
            }
            let step = self.engine.write(0, move |writer| writer.sweep(number, expires)).await?;
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
fn vanished(place: &Place, entries: &[(Key, IndexEntry)]) -> Vec<(Key, u64)> {
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
