//! The version of the volume that the ring has now, for files that cannot be read this time.
//!
//! An entry of the source that cannot be read keeps its previous version: its entry is
//! copied, and every block below it is named to the upload, which renews it and tells the
//! recorder of it. For that only directory, inode and indirect blocks are fetched, no data blocks.
//!
//! The threads that read the source [ask](Ask) and wait; the task of the publish answers.

use std::sync::Arc;

use atoll_dht::{Blocks, GetError};
use atoll_env::Env;
use atoll_key::{BlockHash, SignedBlock, VolumeCipher, VolumeId};
use atoll_vfs::FileKind;
use futures_channel::mpsc::UnboundedReceiver;
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::PublishError;
use super::run::{Ask, Run, Tallies};
use crate::blocks::budget::Budget;
use crate::blocks::cache::BlockCache;
use crate::blocks::error::BlockError;
use crate::format::{Content, DirectoryEntry};
use crate::owned::reachable::{Below, Node};
use crate::owned::read::{ReadError, Snapshot};
use crate::owned::sealed_root;

/// Memory for directory blocks of the previous version.
const CACHE_BYTES: u64 = 8 << 20;

/// Blocks of one kept tree that are fetched at once.
const FETCHES: usize = 32;

/// Blocks of kept trees that were named to the upload and not renewed yet.
const MAX_RENEWALS: usize = 8192;

/// The previous version.
pub(super) struct Previous {
    snapshot: Option<Snapshot>,
    /// Why it cannot be asked for, if the ring did not say.
    unknown: Option<GetError>,
    renewals: Arc<Budget>,
}

impl Previous {
    /// Of the ring's answer for the volume's root. A root that this publish's cipher does
    /// not open has nothing that could be kept: its blocks are sealed in another way.
    pub(super) fn new(
        env: &Env,
        blocks: &Arc<dyn Blocks>,
        id: VolumeId,
        cipher: Option<&VolumeCipher>,
        present: Result<SignedBlock, GetError>,
    ) -> Previous {
        let renewals = Budget::new(MAX_RENEWALS);
        let block = match present {
            Ok(block) => block,
            Err(error) => {
                let unknown = matches!(error, GetError::Unavailable { .. }).then_some(error);
                return Previous { snapshot: None, unknown, renewals };
            }
        };
        let root = sealed_root::decode(&block.payload, cipher).ok();
        // Nor has one that is written through mounts: its owner can release its blocks.
        let root = root.filter(|root| !root.mounted.has_own_blocks);
        let snapshot = root.map(|root| {
            let ring = (blocks.clone(), root.form(id, cipher.cloned()));
            let cache = BlockCache::new(env.clone(), ring, CACHE_BYTES);
            Snapshot { id, version: block.version, root, cache, read_ahead_bytes: 0 }
        });
        Previous { snapshot, unknown: None, renewals }
    }

    /// Answers all questions; ends when no more can come.
    pub(super) async fn serve(self, run: Arc<Run>, asks: UnboundedReceiver<Ask>) {
        // Each of the threads that read waits for its answer, so these are few.
        let (this, run) = (&self, &*run);
        let answer = |ask: Ask| async move {
            match this.keep(run, &ask.path).await {
                // The thread that asked may have been stopped meanwhile.
                Ok(entry) => drop(ask.answer.send(entry)),
                Err(error) => run.fail(error),
            }
        };
        asks.for_each_concurrent(None, answer).await;
    }

    /// The entry at `path` of the previous version, if there is one.
    async fn keep(&self, run: &Run, path: &[u8]) -> Result<Option<DirectoryEntry>, PublishError> {
        let unavailable = |source: GetError| PublishError::Previous {
            path: String::from_utf8_lossy(path).into_owned(),
            source,
        };
        if let Some(error) = &self.unknown {
            return Err(unavailable(error.clone()));
        }
        let Some(snapshot) = &self.snapshot else { return Ok(None) };
        let entry = match snapshot.resolve(path).await {
            Ok(item) => item.entry,
            Err(ReadError::Fetch { source: source @ GetError::Unavailable { .. }, .. }) => {
                return Err(unavailable(source));
            }
            Err(error) => {
                tracing::debug!(%error, "no previous version");
                return Ok(None);
            }
        };
        let mut waiting = self.tell_entry(run, &entry).await;
        let mut fetches = FuturesUnordered::new();
        loop {
            while fetches.len() < FETCHES
                && let Some(node) = waiting.pop()
            {
                fetches.push(self.below(run, &snapshot.cache, node));
            }
            let Some(below) = fetches.next().await else { return Ok(Some(entry)) };
            waiting.extend(below.map_err(unavailable)?);
        }
    }

    /// Names a block to the upload.
    async fn tell(&self, run: &Run, hash: BlockHash) {
        run.renew(hash, self.renewals.acquire(1).await);
    }

    /// Counts an entry and names its own blocks; returns the one that leads to others.
    async fn tell_entry(&self, run: &Run, entry: &DirectoryEntry) -> Vec<Node> {
        if let Some(xattrs) = entry.xattrs {
            self.tell(run, xattrs).await;
        }
        let tallies = &run.tallies;
        match entry.kind() {
            FileKind::Directory => Tallies::add(&tallies.dirs, 1),
            FileKind::Symlink => Tallies::add(&tallies.symlinks, 1),
            _ => Tallies::add(&tallies.files, 1),
        }
        if let Content::Regular { size_bytes, .. } = entry.content {
            Tallies::add(&tallies.bytes, size_bytes);
        }
        match Node::of_entry(entry) {
            Some((node, true)) => vec![node],
            Some((node, false)) => {
                self.tell(run, node.hash()).await;
                Vec::new()
            }
            None => Vec::new(),
        }
    }

    /// Names a block and the data blocks right below it; returns the blocks that lead further
    /// down. A block that the ring has lost leads nowhere, and is counted when its renewal fails.
    async fn below(
        &self,
        run: &Run,
        cache: &Arc<BlockCache>,
        node: Node,
    ) -> Result<Vec<Node>, GetError> {
        self.tell(run, node.hash()).await;
        match node.below(cache).await {
            Ok(Below { entries, mut nodes, data }) => {
                for entry in &entries {
                    nodes.extend(self.tell_entry(run, entry).await);
                }
                for hash in data {
                    self.tell(run, hash).await;
                }
                Ok(nodes)
            }
            Err(BlockError::Fetch(error @ GetError::Unavailable { .. })) => Err(error),
            Err(error) => {
                tracing::debug!(?error, "a block of the previous version cannot be read");
                Ok(Vec::new())
            }
        }
    }
}
