//! What goes through many blocks: expiry, scrubbing, renewals, summaries.

use std::sync::atomic::Ordering;

use atoll_key::{Key, KeyRange};

use super::entry::IndexEntry;
use super::threads::{Engine, Writer};
use crate::summary::Question;
use crate::{BlockInfo, Owner, Part, ScrubStep, StoreError};

/// Blocks listed at once by what looks at each of them.
const PAGE_BLOCKS: usize = 64;

/// Blocks listed at once while looking for expired ones.
const EXPIRY_PAGE: usize = 1024;

/// Some blocks, and where the next ones begin, if there are any.
type Page = (Vec<(Key, IndexEntry)>, Option<Key>);

impl<W: Writer> Engine<W> {
    pub(crate) fn lookup(&self, key: &Key) -> Result<Option<IndexEntry>, StoreError> {
        Ok(self.shared.catalog.lookup(key)?)
    }

    /// Up to [`PAGE_BLOCKS`] entries from `from` on, and where to go on.
    pub(crate) fn page(&self, from: Key) -> Result<Page, StoreError> {
        let range = KeyRange::new(from.previous(), Key::MAX);
        let range = if from == Key::MIN { KeyRange::full() } else { range };
        let infos = self.shared.catalog.list(range, PAGE_BLOCKS)?;
        let mut entries = Vec::with_capacity(infos.len());
        for info in &infos {
            entries.extend(self.lookup(&info.key)?.map(|entry| (info.key, entry)));
        }
        let last = infos.last().filter(|last| infos.len() == PAGE_BLOCKS && last.key != Key::MAX);
        Ok((entries, last.map(|last| last.key.next())))
    }

    /// See [`crate::BlockStore::scrub`]; `check` reads a block, deals with a damaged one, and
    /// says whether to report it.
    pub(crate) async fn scrub<F: Future<Output = Result<bool, StoreError>>>(
        &self,
        from: Option<Key>,
        budget_bytes: u64,
        check: impl Fn(Key, IndexEntry) -> F,
    ) -> Result<ScrubStep, StoreError> {
        let mut step = ScrubStep::default();
        let mut next = Some(from.unwrap_or(Key::MIN));
        while let Some(from) = next {
            let (page, more) = self.page(from)?;
            next = more;
            for (key, entry) in page {
                if step.checked > 0 && step.checked_bytes >= budget_bytes {
                    step.next = Some(key);
                    return Ok(step);
                }
                step.checked += 1;
                step.checked_bytes += u64::from(entry.len_bytes);
                if check(key, entry).await? {
                    step.damaged.push(key);
                }
            }
        }
        Ok(step)
    }

    /// See [`crate::BlockStore::remove_expired`]; `remove` forgets those of a few blocks whose
    /// leases have not been extended meanwhile, and returns how many.
    pub(crate) async fn remove_expired<F: Future<Output = Result<u64, StoreError>>>(
        &self,
        now_unix_secs: u64,
        remove: impl Fn(Vec<Key>) -> F,
    ) -> Result<u64, StoreError> {
        let earliest = &self.shared.earliest_expiry;
        if earliest.load(Ordering::Relaxed) >= now_unix_secs {
            return Ok(0);
        }
        // Puts that come meanwhile lower it themselves.
        earliest.store(u64::MAX, Ordering::Relaxed);
        let removed = self.remove_expired_pages(now_unix_secs, remove).await;
        if removed.is_err() {
            earliest.store(0, Ordering::Relaxed);
        }
        removed
    }

    async fn remove_expired_pages<F: Future<Output = Result<u64, StoreError>>>(
        &self,
        now_unix_secs: u64,
        remove: impl Fn(Vec<Key>) -> F,
    ) -> Result<u64, StoreError> {
        let (mut range, mut removed) = (KeyRange::full(), 0);
        loop {
            let shared = self.shared.clone();
            let page = self.read(move || shared.catalog.list(range, EXPIRY_PAGE)).await??;
            let (expired, leased): (Vec<BlockInfo>, Vec<BlockInfo>) =
                page.iter().partition(|info| info.expires_unix_secs < now_unix_secs);
            leased.iter().for_each(|info| self.shared.note_lease(info.expires_unix_secs));
            removed += remove(expired.iter().map(|info| info.key).collect()).await?;
            match page.last().map(|info| info.key) {
                Some(last) if last != Key::MAX => range = KeyRange::new(last, Key::MAX),
                _ => return Ok(removed),
            }
        }
    }

    /// See [`crate::BlockStore::renew`]; a block for which `is_there` says no is not held.
    pub(crate) fn renew(
        &self,
        keys: &[Key],
        expires_unix_secs: u64,
        owner: Owner,
        is_there: impl Fn(&Key) -> Result<bool, StoreError>,
    ) -> Result<Vec<bool>, StoreError> {
        let mut held = Vec::with_capacity(keys.len());
        for chunk in keys.chunks(self.shared.config.commit_entries.max(1)) {
            self.bound_backlog();
            let there = chunk.iter().map(&is_there).collect::<Result<Vec<bool>, _>>()?;
            let before = held.len();
            held.resize(before + chunk.len(), false);
            self.shared.catalog.update(chunk, |i, entry| {
                held[before + i] = entry.is_some() && there[i];
                let entry = entry.filter(|_| there[i])?;
                let is_longer = entry.expires_unix_secs < expires_unix_secs;
                is_longer.then(|| Some(entry.extended(expires_unix_secs, owner)))
            })?;
        }
        Ok(held)
    }

    /// Has leases end sooner.
    pub(crate) fn shorten(&self, keys: &[Key], expires_unix_secs: u64) -> Result<(), StoreError> {
        for chunk in keys.chunks(self.shared.config.commit_entries.max(1)) {
            self.bound_backlog();
            self.shared.note_lease(expires_unix_secs);
            self.shared.catalog.update(chunk, |_, entry| {
                let entry = entry.filter(|entry| entry.expires_unix_secs > expires_unix_secs)?;
                Some(Some(IndexEntry { expires_unix_secs, ..entry }))
            })?;
        }
        Ok(())
    }

    /// Answers a question about summaries.
    pub(crate) async fn summarize(
        &self,
        question: Question,
        now_unix_secs: u64,
    ) -> Result<Vec<Part>, StoreError> {
        let mut asked = self.shared.catalog.summaries.ask(question, now_unix_secs).await;
        let mut answer = asked.step(None)?;
        while answer.is_none() {
            let shared = self.shared.clone();
            let step = self.read(move || {
                let list = |range, limit| Ok(shared.catalog.list(range, limit)?);
                let answer = asked.step(Some(&list));
                (asked, answer)
            });
            let (going_on, stepped) = step.await?;
            (asked, answer) = (going_on, stepped?);
        }
        Ok(answer.unwrap_or_default())
    }
}
