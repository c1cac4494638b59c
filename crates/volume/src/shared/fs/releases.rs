//! Blocks that the versions of this mount have replaced: their leases end sooner (DESIGN: a release signed by a
//! writer), so that a file which is rewritten again and again takes no more room than its versions do that are kept.
//!
//! What a version referred to and the next one does not is noted when the ring has acknowledged that, and
//! released some time later. Before that, the inode is read from all replicas: what any of its
//! siblings refers to stays, and so does what the files that are open here are about to. A file whose contents
//! were written at the same time, or replaced unread, is left alone: they may have become a file of its own, which refers to
//! blocks of this inode.
//!
//! A release leaves a block two days, and once a day a node of the volume's extends whatever an inode refers to: so
//! what is released in vain, because others refer to it again at the same moment, is not lost. Conversely an open
//! file may show what others have replaced: its leases are extended for as long as it is open.
//!
//! A block that an old version refers to which is kept stays until that is kept no more, and so does the block of the old
//! version itself.
//!
//! What is noted is in memory: a mount that dies releases nothing of it, and the blocks end with their leases.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::sleep;
use atoll_key::BlockHash;
use atoll_key::kinds::certified::{CertifiedBlock, MIN_RELEASED_LEASE_SECS};
use atoll_vfs::Errno;

use super::{Freshness, Shared, Version};
use crate::format::inode::Data;
use crate::shared::fault::Fault;
use crate::shared::inode::{Contents, FileData, InodeKey};
use crate::shared::inodes::{KeptVersion, MAX_BASE_AGE};
use crate::shared::reach::Reach;

/// How often blocks are released. A guess: what is written in between is looked at once.
const EVERY: Duration = Duration::from_secs(60);
/// Inodes of which blocks wait to be released; of more, blocks stay until their leases end.
const MAX_WAITING: usize = 8_192;
/// Contents of one inode that wait to be released.
const MAX_CONTENTS: usize = 4_096;
/// How often a release is tried that not all replicas have heard of: for half an hour.
const MAX_ATTEMPTS: u32 = 30;
/// How long the end of a mount waits for releases.
pub(super) const END_LIMIT: Duration = Duration::from_secs(5);
/// How often the leases of an open file are extended: twice before a release ends.
const KEEP_EVERY: Duration = Duration::from_secs(12 * 3600);

/// What versions of one inode referred to that were replaced.
struct Replaced {
    /// A version that covers these, or the last one of an inode that was removed.
    block: CertifiedBlock,
    data: Vec<FileData>,
    blocks: BTreeSet<BlockHash>,
    attempts: u32,
}

/// See the module.
#[derive(Default)]
pub(super) struct Releases {
    waiting: Mutex<BTreeMap<InodeKey, Replaced>>,
}

impl Releases {
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<InodeKey, Replaced>> {
        self.waiting.lock().expect("no holder of this lock panics")
    }

    /// A file's data was replaced by `version`.
    pub(super) fn note_data(&self, key: InodeKey, version: &Version, mut data: Vec<FileData>) {
        // A small file is all in its inode.
        data.retain(|data| !matches!(data, FileData::Here(block) if is_inline(&block.data)));
        if data.is_empty() {
            return;
        }
        let (block, blocks) = (version.block.clone(), BTreeSet::new());
        self.note(key, Replaced { block, data, blocks, attempts: 0 });
    }

    fn note(&self, key: InodeKey, replaced: Replaced) {
        let mut waiting = self.waiting();
        let is_full = waiting.len() >= MAX_WAITING;
        match waiting.get_mut(&key) {
            Some(before) => {
                if replaced.block.includes(&before.block) {
                    before.block = replaced.block;
                }
                before.data.extend(replaced.data);
                before.data.truncate(MAX_CONTENTS);
                before.blocks.extend(replaced.blocks);
            }
            None if is_full => {
                tracing::debug!("too many inodes wait for releases: blocks stay for their leases");
            }
            None => drop(waiting.insert(key, replaced)),
        }
    }
}

fn is_inline(data: &Data) -> bool {
    matches!(data, Data::Inline(_))
}

/// Releases what was replaced, and keeps what is open, until the mount ends.
pub(super) async fn run(shared: Weak<Shared>) {
    loop {
        let Some(env) = shared.upgrade().map(|shared| shared.env.clone()) else { return };
        sleep(&*env, EVERY).await;
        let Some(shared) = shared.upgrade() else { return };
        if shared.has_ended.load(std::sync::atomic::Ordering::Acquire) {
            return;
        }
        shared.keep_open_data().await;
        shared.release_replaced().await;
    }
}

impl Shared {
    fn reach(&self) -> Reach<'_> {
        let (inline, cache) = (&self.inline, &self.cache);
        Reach { inline, cache, sealing: self.inodes.reading.sealing() }
    }

    /// Releases all that was noted.
    pub(super) async fn release_replaced(&self) {
        for replaced in self.inodes.take_replaced_leaves() {
            let (block, blocks) = (replaced.block, replaced.leaves);
            let leaves = Replaced { block, data: Vec::new(), blocks, attempts: 0 };
            self.releases.note(replaced.key, leaves);
        }
        let due = std::mem::take(&mut *self.releases.waiting());
        if !self.options.releases_replaced {
            return;
        }
        for (key, mut replaced) in due {
            if self.is_open_without_name(key) {
                self.releases.note(key, replaced);
                continue;
            }
            replaced.attempts += 1;
            let left = match self.release_of(key, &replaced).await {
                Ok(left) if left.is_empty() => continue,
                Ok(left) => Replaced { data: Vec::new(), blocks: left, ..replaced },
                Err(fault) => {
                    tracing::debug!("blocks are not released yet: {fault:?}");
                    replaced
                }
            };
            if left.attempts < MAX_ATTEMPTS {
                self.releases.note(key, left);
            }
        }
    }

    /// Whether programs here still read what was removed.
    fn is_open_without_name(&self, key: InodeKey) -> bool {
        let table = self.table();
        table.number_of(&key).is_some_and(|number| {
            table.opens(number) > 0 && table.node(number).is_ok_and(|node| node.orphan.is_some())
        })
    }

    /// Releases what versions of an inode referred to; the blocks of which not all replicas have heard that.
    async fn release_of(
        &self,
        key: InodeKey,
        replaced: &Replaced,
    ) -> Result<BTreeSet<BlockHash>, Fault> {
        // Nothing is written here meanwhile that would refer to the same blocks.
        let turn = {
            let table = self.table();
            let number = table.number_of(&key);
            number.and_then(|number| table.node(number).ok()).map(|node| node.turn.clone())
        };
        let _turn = match &turn {
            Some(turn) => Some(turn.lock().await),
            None => None,
        };
        let unread = |why: String| Fault::new(Errno::EIO, why);
        let (reach, mut needed) = (self.reach(), BTreeSet::new());
        let inode = match self.inodes.read(key, Freshness::Latest).await {
            Ok(newest) => {
                let is_single = newest.block.siblings().len() == 1;
                if !is_single || !newest.block.includes(&replaced.block) {
                    return Ok(BTreeSet::new());
                }
                reach.add_inode(&newest.block, &mut needed).await.map_err(unread)?;
                newest.block.clone()
            }
            Err(Fault { errno: Errno::ESTALE, .. }) => replaced.block.clone(),
            Err(fault) => return Err(fault),
        };
        let shown = {
            let table = self.table();
            let number = table.number_of(&key);
            let node = number.and_then(|number| table.node(number).ok());
            node.and_then(|node| node.view.as_ref()?.data.clone())
        };
        if let Some(shown) = shown {
            reach.add_data(&shown, &BTreeSet::new(), &mut needed).await.map_err(unread)?;
        }
        let mut gone = replaced.blocks.clone();
        for data in &replaced.data {
            reach.add_data(data, &needed, &mut gone).await.map_err(unread)?;
        }
        gone.retain(|hash| !needed.contains(hash));
        let mut left = BTreeSet::new();
        for (until_ms, blocks) in self.until_when(key, gone).await? {
            let lease_secs = until_ms.saturating_sub(self.env.unix_ms()) / 1000;
            left.extend(self.inodes.release(key, &inode, lease_secs, &blocks).await?);
        }
        Ok(left)
    }

    /// Until when old versions that are kept need blocks which the newest version does not refer to: milliseconds
    /// since 1970, 0 if none does for longer than a release leaves every block.
    async fn until_when(
        &self,
        key: InodeKey,
        mut gone: BTreeSet<BlockHash>,
    ) -> Result<BTreeMap<u64, BTreeSet<BlockHash>>, Fault> {
        let mut until: BTreeMap<u64, BTreeSet<BlockHash>> = BTreeMap::new();
        if gone.is_empty() {
            return Ok(until);
        }
        let left_ms = u64::from(MIN_RELEASED_LEASE_SECS) * 1000;
        let mut kept = self.inodes.kept_beyond(key, self.env.unix_ms() + left_ms).await?;
        gone.retain(|hash| kept.newest != Some(*hash));
        kept.versions.sort_by_key(|version| std::cmp::Reverse(version.until_ms));
        for KeptVersion { until_ms, block, inode } in kept.versions {
            let mut needed = BTreeSet::from([block]);
            match &inode.contents {
                Contents::Regular { data: Some(data), .. } => {
                    let found = self.reach().add_data(data, &BTreeSet::new(), &mut needed).await;
                    found.map_err(|why| Fault::new(Errno::EIO, why))?;
                }
                Contents::Unread { leaves, .. } => needed.extend(leaves),
                _ => {}
            }
            let blocks: BTreeSet<BlockHash> = gone.intersection(&needed).copied().collect();
            gone.retain(|hash| !blocks.contains(hash));
            until.entry(until_ms).or_default().extend(blocks);
        }
        until.entry(0).or_default().extend(gone);
        Ok(until)
    }

    /// Extends the leases of data that open files show, which others may have replaced.
    async fn keep_open_data(&self) {
        let due = self.table().open_data(self.env.now(), KEEP_EVERY);
        for (number, data) in due {
            if let Err(fault) = self.keep_data(number, &data).await {
                tracing::warn!("the data of an open file may be lost: {fault:?}");
            }
        }
    }

    async fn keep_data(&self, number: u64, data: &FileData) -> Result<(), Fault> {
        let (began, mut content) = (self.env.now(), BTreeSet::new());
        let found = self.reach().add_data(data, &BTreeSet::new(), &mut content).await;
        // What was found is kept in any case.
        self.inodes.renew(&content).await?;
        found.map_err(|why| Fault::new(Errno::EIO, why))?;
        Ok(self.table().on_view(number, |view| view.kept_at = began)?)
    }

    /// Before a version is written with data that was read long ago, which may have been released meanwhile: sees to
    /// it that the ring has it.
    pub(super) async fn check_reused(
        &self,
        number: u64,
        data: Option<&FileData>,
    ) -> Result<(), Fault> {
        let kept_at = self.table().on_view(number, |view| view.kept_at)?;
        match data {
            Some(data) if self.env.now().since(kept_at) >= MAX_BASE_AGE => {
                self.keep_data(number, data).await
            }
            _ => Ok(()),
        }
    }
}
