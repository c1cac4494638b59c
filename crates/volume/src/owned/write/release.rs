//! What a volume does not need any more leaves the ring: a release, signed with the volume's key, has replicas remove it
//! within minutes ([`VolumeRelease`]).
//!
//! Of what was put by this mount, and of what the root needed that was walked before, a block is released if it is in none of
//! these:
//!
//! - what the walk of the newest root has found, with the old states that are kept and the roots that were taken over
//!   (`reachable`): a walk that found anything lost releases nothing;
//! - what was put since that walk began: whatever a later root has that the walked one did not was put for it;
//! - what open files without a name and open directories show.
//!
//! That is looked at while no flush runs, and after the ring has said that the newest root is this mount's. The
//! release is of the moment before the ring was asked: what is put again later stays, even if replicas hear of the put first, also
//! what another writer puts who has taken over since. The base of
//! the spool is then the newest root, too, so nothing in the spool follows an older one.
//!
//! What is released too late is harmless, and one block too many is lost. So a block of which anything is in doubt waits for
//! the next walk. What waits is in memory: of a mount that dies it ends with its lease.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_dht::PutError;
use atoll_env::Instant;
use atoll_key::BlockHash;
use atoll_key::kinds::{MAX_RELEASED, VolumeRelease};
use futures_util::stream::{self, StreamExt};

use super::Shared;
use crate::blocks::outbox::PutLog;
use crate::keep::Keep;
use crate::owned::reachable::{self, Needed};
use crate::owned::remove::clock_ahead_ms;
use crate::owned::root::Root;

/// Blocks that wait to be released, at most; of more, blocks stay until their leases end. A guess: 256 GiB of data blocks.
const MAX_WAITING: usize = 4 << 20;

/// Releases sent at once.
const AT_ONCE: usize = 8;

/// How long releases of one moment are sent: replicas take none of more than ten minutes ago.
const SEND_LIMIT: Duration = Duration::from_secs(300);

/// How long the end of a mount waits for them.
const END_LIMIT: Duration = Duration::from_secs(10);

/// When blocks that wait are looked at again although the tree is the same.
const AGAIN_AFTER: Duration = Duration::from_secs(600);

/// When they are if the ring has not heard of a release.
const RESEND_AFTER: Duration = Duration::from_secs(60);

/// How often a release is tried that not all replicas have heard of. Then the blocks end with their leases.
const MAX_ATTEMPTS: u32 = 30;

/// See the module.
#[derive(Default)]
pub(super) struct UnneededBlocks {
    /// What was put since the last walk began.
    pub(super) put: PutLog,
    /// Held from the beginning of a walk until what it has found is released.
    pub(super) walking: futures_util::lock::Mutex<()>,
    state: Mutex<State>,
    /// How far this machine's clock is ahead of the node's, milliseconds.
    ahead_ms: AtomicU64,
    /// About how many bytes only old states need, as the last walk found.
    old_bytes: AtomicU64,
    /// Roots that are to be kept, and that the ring did not take yet: nothing is released before.
    unkept: Mutex<Vec<Root>>,
}

#[derive(Default)]
struct State {
    /// What may not be needed, and how often it was tried to release it.
    waiting: BTreeMap<BlockHash, u32>,
    again_at: Option<Instant>,
    /// The root that was walked last, or that the mount began with.
    walked: Option<Root>,
}

impl UnneededBlocks {
    /// A mount begins with a root.
    pub(super) fn begin(&self, root: Root) {
        self.state().walked = Some(root);
    }

    /// A root of another writer is to be kept with the next flush.
    pub(super) fn keep_later(&self, root: Root) {
        self.unkept.lock().expect("no holder of this lock panics").push(root);
    }

    /// Roots that the next flush is to keep.
    pub(super) fn unkept(&self) -> Vec<Root> {
        self.unkept.lock().expect("no holder of this lock panics").clone()
    }

    /// They are kept.
    pub(super) fn note_kept(&self) {
        self.unkept.lock().expect("no holder of this lock panics").clear();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Whether anything is to be looked at although the tree is the same.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let is_time = self.state().again_at.is_some_and(|at| at <= now);
        is_time || !self.put.is_empty()
    }

    /// Blocks wait for the next walk.
    pub(super) fn wait(&self, blocks: impl IntoIterator<Item = BlockHash>, now: Instant) {
        self.wait_with(blocks.into_iter().map(|hash| (hash, 0)), now + AGAIN_AFTER);
    }

    fn wait_with(&self, blocks: impl IntoIterator<Item = (BlockHash, u32)>, again_at: Instant) {
        let mut state = self.state();
        for (hash, attempts) in blocks {
            if state.waiting.len() < MAX_WAITING {
                state.waiting.insert(hash, attempts);
            }
        }
        if !state.waiting.is_empty() {
            state.again_at = Some(state.again_at.map_or(again_at, |at| at.min(again_at)));
        }
    }
}

impl Shared {
    /// Releases what is not needed any more, after a walk of `root` found what is `needed`; `put` is what was put before the
    /// walk began.
    pub(super) async fn release_unneeded(
        &self,
        root: Root,
        needed: Needed,
        put: BTreeSet<BlockHash>,
    ) {
        if !self.form.is_releasable() {
            return;
        }
        let old_bytes = needed.old_data_blocks << root.block_size_log2;
        self.releases.old_bytes.store(old_bytes, Ordering::Relaxed);
        let now = self.env.now();
        let walked = {
            let mut state = self.releases.state();
            state.again_at = None;
            state.walked.clone()
        };
        let is_certain = needed.are_all && self.releases.unkept().is_empty();
        if !is_certain || self.check_fence().is_err() {
            return self.releases.wait(put, now);
        }
        let replaced = match &walked {
            Some(old) => reachable::not_needed(&self.cache, old, &needed).await,
            None => Ok(Vec::new()),
        };
        let replaced = match replaced {
            Ok(replaced) => replaced,
            Err(error) => {
                tracing::debug!("what was replaced is not known yet: {}", error.at(b""));
                return self.releases.wait(put, now);
            }
        };
        let mut candidates = {
            let mut state = self.releases.state();
            state.walked = Some(root);
            std::mem::take(&mut state.waiting)
        };
        for hash in put.into_iter().chain(replaced) {
            candidates.entry(hash).or_insert(0);
        }
        candidates.retain(|hash, _| !needed.has(hash));
        drop(needed);
        if candidates.is_empty() {
            return;
        }
        match self.checked(&mut candidates).await {
            Ok((waiting, as_of)) => {
                self.releases.wait_with(waiting, now + AGAIN_AFTER);
                self.send_releases(candidates, as_of).await;
            }
            Err(why) => {
                tracing::debug!("nothing is released yet: {why}");
                self.releases.wait_with(candidates, now + AGAIN_AFTER);
            }
        }
    }

    /// When the room of removed files is back on the ring, for people.
    pub(super) fn when_room_is_back(&self) -> String {
        let keep = self.releases.state().walked.as_ref().map(|root| root.mounted.keep);
        if !self.form.is_releasable() {
            return "the room of files that are removed is back when their leases end, within 30 days, and later while \
                    old states have them: this volume was published, and others may have its blocks"
                .into();
        }
        if keep.is_none_or(|keep| keep == Keep::NONE) {
            return "the room of files that are removed is back within minutes".into();
        }
        let old_mib = self.releases.old_bytes.load(Ordering::Relaxed).div_ceil(1 << 20);
        format!(
            "the room of files that are removed is back minutes after the last old state that has them is dropped. \
             About {old_mib} MiB are in old states only: after `atoll mount --keep none` they are back within minutes"
        )
    }

    /// Takes from `candidates` those that may be needed, and returns them; and as of when all others are not, seconds since
    /// 1970.
    ///
    /// # Errors
    /// Why that cannot be said.
    async fn checked(
        &self,
        candidates: &mut BTreeMap<BlockHash, u32>,
    ) -> Result<(Vec<(BlockHash, u32)>, u64), String> {
        // No flush runs while this is held.
        let head = self.head.lock().await;
        if head.unsure.is_some() {
            return Err("it is not known whether the ring has the newest root".into());
        }
        self.check_fence().map_err(|error| error.to_string())?;
        // Before the ring is asked: another writer's root may be there a moment later, and what is put for the next one
        // must count as put since.
        let ahead_ms = self.releases.ahead_ms.load(Ordering::Relaxed);
        let now_unix_secs = self.env.unix_ms().saturating_sub(ahead_ms) / 1000;
        if !self.is_on_ring(&head.block).await.map_err(|error| error.to_string())? {
            return Err("another writer has put a root".into());
        }
        if let Some(spool) = &self.spool {
            // Then no file in it follows an older root.
            spool.finish().await;
            if let Some(failure) = spool.failure() {
                return Err(failure);
            }
        }
        let open = self.tree().shown_by_open_files();
        let shown = reachable::blocks_of_open(&self.cache, open).await;
        let shown = shown.map_err(|error| error.at(b"").to_string())?;
        let may_be_needed = |hash: &BlockHash| self.releases.put.has(hash) || shown.contains(hash);
        let kept: Vec<(BlockHash, u32)> = candidates
            .iter()
            .filter(|(hash, _)| may_be_needed(hash))
            .map(|(h, n)| (*h, *n))
            .collect();
        candidates.retain(|hash, _| !may_be_needed(hash));
        // A second earlier: the two clocks tell it at different moments.
        Ok((kept, now_unix_secs.saturating_sub(1)))
    }

    /// Sends releases of one moment, as long as replicas take them; blocks of which not all have heard wait.
    async fn send_releases(&self, blocks: BTreeMap<BlockHash, u32>, as_of_unix_secs: u64) {
        let limit = if self.has_ended() { END_LIMIT } else { SEND_LIMIT };
        let (until, blocks) = (self.env.now() + limit, Vec::from_iter(blocks));
        let some: Vec<_> = blocks.chunks(MAX_RELEASED).map(<[_]>::to_vec).collect();
        let sends = some.into_iter().map(|some| self.send_release(some, as_of_unix_secs, until));
        let left: Vec<Vec<(BlockHash, u32)>> =
            stream::iter(sends).buffer_unordered(AT_ONCE).collect().await;
        let left = left.into_iter().flatten().filter(|(_, attempts)| *attempts < MAX_ATTEMPTS);
        self.releases.wait_with(left, self.env.now() + RESEND_AFTER);
    }

    /// Sends one release; the blocks of which not all replicas have heard. Nothing is sent after `until`.
    async fn send_release(
        &self,
        mut some: Vec<(BlockHash, u32)>,
        as_of_unix_secs: u64,
        until: Instant,
    ) -> Vec<(BlockHash, u32)> {
        if self.env.now() >= until || self.check_fence().is_err() {
            return some;
        }
        let hashes: Vec<BlockHash> = some.iter().map(|(hash, _)| *hash).collect();
        let release = VolumeRelease::sign(&self.secret, as_of_unix_secs, &hashes);
        let release = release.expect("no more than a release has room for");
        // The release has its blocks in their order, as this list has.
        let mut outcomes = self.blocks.release_blocks(release.into()).await.into_iter();
        some.retain_mut(|(_, attempts)| match outcomes.next() {
            Some(Ok(())) => false,
            outcome => {
                outcome.iter().filter_map(|o| o.as_ref().err()).for_each(|e| self.note_clock(e));
                *attempts += 1;
                true
            }
        });
        some
    }

    /// Notes how far this clock is ahead of the node's, if that says so. Several releases may be refused at once.
    fn note_clock(&self, error: &PutError) {
        if let Some(ahead_ms) = clock_ahead_ms(&self.env, error) {
            self.releases.ahead_ms.store(ahead_ms, Ordering::Relaxed);
        }
    }
}
