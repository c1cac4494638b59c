//! The summary of what two stores hold together.

use std::collections::BTreeMap;

use atoll_env::BoxFuture;
use atoll_key::{Key, KeyRange};

use super::digest::{self, Interval, Item, LIST_ITEMS};
use super::{Part, Summary};
use crate::{BlockInfo, BlockStore, StoreError};

/// Where the two stores together have at most this many blocks, the blocks are read.
const READ_ITEMS: u64 = 256;

/// Blocks read from a store at once.
const PAGE_ITEMS: usize = 1024;

/// Two stores whose blocks are summarized as one set, each key with the higher version.
///
/// Where the second holds nothing, the digests that the first has stored are used: the cost is
/// in proportion to what the second holds.
#[derive(Clone, Copy)]
pub struct Merged<'a> {
    /// The blocks of this one count.
    pub store: &'a dyn BlockStore,
    /// Some of this one's count too.
    pub other: &'a dyn BlockStore,
    /// Which of them do.
    pub counts: fn(&BlockInfo) -> bool,
    /// Leases end by this time.
    pub now_unix_secs: u64,
}

impl Merged<'_> {
    /// The summary of a range.
    ///
    /// # Errors
    /// If a store cannot be read.
    pub async fn summary(&self, range: KeyRange) -> Result<Summary, StoreError> {
        if self.held(self.other, &[range]).await?.1 == 0 {
            return Ok(self.held(self.store, &[range]).await?.0[0]);
        }
        self.within(Interval::FULL, 0, range).await
    }

    /// Cuts a range as [`BlockStore::cut`] does, where the blocks of the store lie that holds
    /// more. It stays whole if neither holds more than 64.
    ///
    /// # Errors
    /// If a store cannot be read.
    pub async fn cut(&self, range: KeyRange) -> Result<Vec<Part>, StoreError> {
        let (_, here) = self.held(self.store, &[range]).await?;
        let (_, there) = self.held(self.other, &[range]).await?;
        let larger = if there > here { self.other } else { self.store };
        let mut parts = larger.cut(range, self.now_unix_secs).await?;
        for part in &mut parts {
            part.summary = self.summary(part.range).await?;
        }
        Ok(parts)
    }

    /// What `store` holds in each of `ranges`, and how many blocks in all.
    async fn held(
        &self,
        store: &dyn BlockStore,
        ranges: &[KeyRange],
    ) -> Result<(Vec<Summary>, u64), StoreError> {
        let found = store.summaries(ranges.to_vec(), self.now_unix_secs).await?;
        let count = found.iter().map(|summary| summary.count).sum();
        Ok((found, count))
    }

    /// What of `range` has its first `digits` digits from the interval `at`.
    fn within(
        &self,
        at: Interval,
        digits: usize,
        range: KeyRange,
    ) -> BoxFuture<'_, Result<Summary, StoreError>> {
        Box::pin(async move {
            let pieces = at.pieces(&range);
            if pieces.is_empty() {
                return Ok(Summary::EMPTY);
            }
            let (here, count) = self.held(self.store, &pieces).await?;
            let (_, others) = self.held(self.other, &pieces).await?;
            if let ([summary], 0) = (&here[..], others) {
                return Ok(*summary);
            }
            if count + others <= READ_ITEMS {
                return self.read(&pieces);
            }
            let mut parts = Vec::new();
            for digit in 0..16 {
                let child = Interval::child(at.first(), digits, digit);
                let part = self.within(child, digits + 1, range).await?;
                if part.count > 0 {
                    parts.push((digit, part.count, part.digest));
                }
            }
            let count = parts.iter().map(|(_, count, _)| count).sum();
            match &parts[..] {
                [(_, count, digest)] => Ok(Summary { digest: *digest, count: *count }),
                // Most of what the other holds does not count.
                _ if count <= LIST_ITEMS as u64 => self.read(&pieces),
                _ => Ok(Summary { digest: digest::of_parts(parts.into_iter()), count }),
            }
        })
    }

    /// Sums up the blocks of ranges by reading them.
    fn read(&self, ranges: &[KeyRange]) -> Result<Summary, StoreError> {
        let mut versions: BTreeMap<Key, u64> = BTreeMap::new();
        let all: fn(&BlockInfo) -> bool = |_| true;
        for (store, counts) in [(self.store, all), (self.other, self.counts)] {
            for range in ranges {
                let mut rest = Some(*range);
                while let Some(range) = rest {
                    let infos = store.list(range, PAGE_ITEMS)?;
                    let last = infos.last().filter(|_| infos.len() == PAGE_ITEMS);
                    rest = last
                        .filter(|last| last.key != range.upto)
                        .map(|last| KeyRange::new(last.key, range.upto));
                    let live = |info: &&BlockInfo| info.expires_unix_secs > self.now_unix_secs;
                    for info in infos.iter().filter(live).filter(|info| counts(info)) {
                        let version = versions.entry(info.key).or_default();
                        *version = (*version).max(info.version);
                    }
                }
            }
        }
        if versions.is_empty() {
            return Ok(Summary::EMPTY);
        }
        let items = versions.into_iter().map(|(key, version)| Item { key, version });
        let items: Vec<Item> = items.collect();
        Ok(Summary { digest: digest::of_items(&items), count: items.len() as u64 })
    }
}
