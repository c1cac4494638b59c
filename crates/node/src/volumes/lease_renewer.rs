//! Renews the leases of the volumes published from this node.
//!
//! Blocks are kept for a lease and dropped unless it is renewed (CFS §3.1: publishers must
//! periodically ask for an extension). For each volume the renewer goes through its
//! manifest a third of a lease after the last time, so that two attempts may fail
//! altogether before anything is lost: it renews the content blocks in batches, several at
//! once, in ring order, and puts the signed root again. It has no blocks of its own; those the
//! ring has lost are counted and shown, because only publishing the directory again can bring
//! them back. Of a volume that mounts write it first looks for a newer version than the manifest's
//! (the module `follow`).
//!
//! **Invariant:** every hash of a manifest is tried equally often. How far a pass has come is on
//! disk (`Kept::pass`), and a restart continues there: if each began with the first hash, a
//! machine that runs for short times would never renew the last. For the same reason a batch that
//! no node answers for is tried once in a pass: the pass then continues with the next batch, and
//! is recorded as failed at its end.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, Leased, PutError};
use atoll_env::{Env, jittered, sleep};
use atoll_key::BlockHash;
use futures_util::{StreamExt, stream};

use super::manifest::Manifest;
use super::on_disk::RenewalPass;
use super::{Kept, Volumes, keys};
use crate::control::volume_error::VolumeError;
use crate::tree_walk::TreeWalk;

/// Blocks renewed by one call.
const BATCH: u64 = 1024;
/// Batches renewed at once. A guess: their blocks have different roots.
const WINDOW: usize = 16;
/// How often a batch is tried before it is put off.
const ATTEMPTS: u32 = 3;
/// After so many batches in a row that no node answered for, the pass is interrupted if no node
/// takes the root either: the ring cannot be reached, and each batch takes minutes to fail.
const MAX_UNANSWERED: u32 = 8;
/// Wait between two attempts.
const PAUSE: Duration = Duration::from_secs(2);
/// The wait before the volumes are looked at for the first time: the node has found its
/// neighbours by then. A guess.
const FIRST_LOOK: Duration = Duration::from_secs(20);
/// The longest wait before the volumes are looked at again.
const MAX_LOOK: Duration = Duration::from_secs(600);
/// How often the progress of a pass is made durable.
const SAVE_EVERY: Duration = Duration::from_secs(5);

/// Renews the leases of the volumes published from here.
pub(crate) struct LeaseRenewer {
    pub(super) env: Env,
    pub(super) blocks: Arc<dyn Blocks>,
    volumes: Arc<Volumes>,
    /// The lease of volumes whose publisher chose none.
    lease: Duration,
    pub(super) walk: Option<Arc<dyn TreeWalk>>,
    /// Held during a pass: two at once would save each other's progress.
    renewing: futures_util::lock::Mutex<()>,
    save_every: Duration,
}

impl LeaseRenewer {
    /// A renewer of `volumes`, whose blocks are leased for `lease` at a time.
    pub(crate) fn new(
        env: Env,
        blocks: Arc<dyn Blocks>,
        volumes: Arc<Volumes>,
        lease: Duration,
        walk: Option<Arc<dyn TreeWalk>>,
    ) -> LeaseRenewer {
        let renewing = futures_util::lock::Mutex::default();
        LeaseRenewer { env, blocks, volumes, lease, walk, renewing, save_every: SAVE_EVERY }
    }

    /// Looks at the volumes again and again; ends only by being aborted.
    pub(crate) async fn run(self: Arc<Self>) {
        let pause = (self.lease / 60).min(MAX_LOOK);
        sleep(&*self.env, jittered(&*self.env, pause.min(FIRST_LOOK))).await;
        loop {
            self.look().await;
            sleep(&*self.env, jittered(&*self.env, pause)).await;
        }
    }

    /// Refreshes the volumes for which it is time.
    pub(crate) async fn look(&self) {
        let names = match self.off_thread(|volumes| volumes.names()).await {
            Ok(names) => names,
            Err(error) => return tracing::warn!("cannot look at the volumes: {error}"),
        };
        for name in names {
            let volume = name.clone();
            let kept = self.off_thread(move |volumes| volumes.kept(&volume)).await;
            let lease = self.lease(&name).await;
            if is_due(&kept, self.now_unix_secs(), lease.unwrap_or(self.lease)) {
                let _ = self.go_on(&name).await;
            } else {
                let _ = self.let_go_if_moved(&name).await;
            }
        }
    }

    /// How long the blocks of a volume are kept at a time, if that was chosen. What cannot be read is told when the
    /// volume is renewed.
    async fn lease(&self, name: &str) -> Option<Duration> {
        let volume = name.to_owned();
        self.off_thread(move |volumes| volumes.lease(&volume)).await.ok().flatten()
    }

    /// Refreshes all of one volume from its first block on, and records the outcome.
    ///
    /// # Errors
    /// As [`LeaseRenewer::go_on`].
    pub(crate) async fn refresh(&self, name: &str) -> Result<Kept, VolumeError> {
        let _one = self.renewing.lock().await;
        self.pass(name, true).await
    }

    /// Goes on refreshing one volume where the last pass was stopped, and records the outcome,
    /// which a failure's reason is part of.
    ///
    /// # Errors
    /// If there is no such volume, nothing has been published, or the list of what to keep
    /// is damaged.
    async fn go_on(&self, name: &str) -> Result<Kept, VolumeError> {
        let _one = self.renewing.lock().await;
        self.pass(name, false).await
    }

    async fn pass(&self, name: &str, anew: bool) -> Result<Kept, VolumeError> {
        self.let_go_if_moved(name).await?;
        let mut manifest = self.manifest(name).await?;
        let followed = self.follow(name, manifest.root().version).await;
        if followed == Ok(true) {
            manifest = self.manifest(name).await?;
        }
        let now = self.now_unix_secs();
        let volume = name.to_owned();
        let before = self.off_thread(move |volumes| volumes.kept(&volume)).await;
        let root_version = manifest.root().version;
        let unfinished = before.pass.filter(|_| !anew && before.root_version == root_version);
        let new = RenewalPass { began_unix_secs: now, ..RenewalPass::default() };
        let mut pass = unfinished.unwrap_or(new);
        let mut kept = Kept { root_version, tried_unix_secs: now, trouble: None, ..before };
        let trouble = self.renew_rest(name, &manifest, &mut kept, &mut pass).await;
        kept.pass = (pass.next < manifest.count()).then_some(pass);
        let unlisted = |why| format!("what was written last is not renewed: {why}");
        match trouble.or(followed.err().map(unlisted)) {
            None => {
                let (blocks, lost) = (manifest.count(), pass.lost_blocks);
                tracing::info!("volume {name}: {blocks} blocks kept, {lost} lost");
                kept.refreshed_unix_secs = pass.began_unix_secs;
                kept.lost_blocks = lost;
            }
            Some(trouble) => {
                tracing::warn!("volume {name}: its leases could not be renewed: {trouble}");
                kept.trouble = Some(trouble);
            }
        }
        self.save(name, &kept).await;
        Ok(kept)
    }

    /// Forgets a volume if the node to which it was moved has taken over.
    ///
    /// # Errors
    /// If it is gone then, or was before.
    async fn let_go_if_moved(&self, name: &str) -> Result<(), VolumeError> {
        let volume = name.to_owned();
        let secret = self.off_thread(move |volumes| volumes.secret(&volume)).await?;
        let Some(token) = secret.token else { return Ok(()) };
        match keys::is_taken_over(&*self.blocks, &secret.key, &token).await {
            Ok(false) => return Ok(()),
            Ok(true) => {}
            Err(error) => {
                tracing::warn!("volume {name}: cannot see whether it was taken over: {error}");
                return Ok(());
            }
        }
        let volume = name.to_owned();
        if !self.off_thread(move |volumes| volumes.forget_moved(&volume, &token)).await? {
            return Ok(());
        }
        tracing::info!("volume {name}: another node has taken over; it is forgotten here");
        Err(VolumeError::TakenOver { name: name.to_owned() })
    }

    /// The list of what to keep of a volume, compared with its checksum.
    async fn manifest(&self, name: &str) -> Result<Arc<Manifest>, VolumeError> {
        let volume = name.to_owned();
        let opened = self
            .off_thread(move |volumes| -> Result<Option<Manifest>, VolumeError> {
                volumes.key(&volume)?;
                let Some(manifest) = volumes.manifest(&volume)? else { return Ok(None) };
                manifest.check()?;
                Ok(Some(manifest))
            })
            .await;
        match opened {
            Ok(Some(manifest)) => Ok(Arc::new(manifest)),
            Ok(None) => Err(VolumeError::Unpublished { name: name.to_owned() }),
            // A user's typing error is no trouble of this node's.
            Err(error @ (VolumeError::Unknown { .. } | VolumeError::BadName { .. })) => Err(error),
            Err(error) => {
                tracing::error!("volume {name} is not kept alive: {error}");
                Err(error)
            }
        }
    }

    async fn save(&self, name: &str, kept: &Kept) {
        let (volume, kept) = (name.to_owned(), kept.clone());
        if let Err(error) = self.off_thread(move |volumes| volumes.set_kept(&volume, &kept)).await {
            tracing::warn!("volume {name}: cannot record its renewal: {error}");
        }
    }

    /// Renews the blocks of a manifest that `pass` has not come to, and its root; why it could
    /// not, if so. Blocks after one that cannot be renewed are renewed all the same.
    async fn renew_rest(
        &self,
        name: &str,
        manifest: &Arc<Manifest>,
        kept: &mut Kept,
        pass: &mut RenewalPass,
    ) -> Option<String> {
        // First: without the root no reader finds the blocks, whatever becomes of the rest.
        let blocks = Leased::over(self.blocks.clone(), self.lease(name).await);
        let root = self.put_root(&blocks, manifest).await.map_err(|error| error.to_string());
        let starts = (pass.next..manifest.count()).step_by(BATCH as usize);
        let batches =
            stream::iter(starts).map(|from| self.renew_batch(&blocks, manifest.clone(), from));
        let mut batches = batches.buffered(WINDOW);
        let (mut silent, mut saved, mut why) = (0, self.env.now(), None);
        while let Some((count, renewed)) = batches.next().await {
            let (lost, failed) = match renewed {
                Ok(lost) => (lost, 0),
                Err(error) => {
                    silent += u32::from(matches!(error, PutError::Unavailable(_)));
                    why.get_or_insert_with(|| error.to_string());
                    (0, count)
                }
            };
            if failed == 0 {
                silent = 0;
            }
            pass.next += count;
            pass.lost_blocks += lost;
            pass.failed_blocks += failed;
            if silent == MAX_UNANSWERED {
                if self.put_root(&blocks, manifest).await.is_err() {
                    return why;
                }
                silent = 0;
            }
            if self.env.now().since(saved) >= self.save_every {
                saved = self.env.now();
                kept.pass = Some(*pass);
                self.save(name, kept).await;
            }
        }
        let (failed, blocks) = (pass.failed_blocks, manifest.count());
        match why {
            _ if failed == 0 => root.err(),
            Some(why) => Some(format!("{failed} of {blocks} blocks could not be renewed: {why}")),
            None => Some(format!("{failed} of {blocks} blocks could not be renewed")),
        }
    }

    /// Renews the batch at `from`; how many blocks it has, and how many of them are lost.
    async fn renew_batch(
        &self,
        blocks: &Arc<dyn Blocks>,
        manifest: Arc<Manifest>,
        from: u64,
    ) -> (u64, Result<u64, PutError>) {
        let count = BATCH.min(manifest.count() - from);
        let read = tokio::task::spawn_blocking(move || manifest.hashes(from, BATCH)).await;
        let failed = |error: String| PutError::Unavailable(error);
        let batch = read.map_err(|error| failed(error.to_string()));
        match batch.and_then(|read| read.map_err(|error| failed(error.to_string()))) {
            Ok(batch) => (count, self.renew(blocks, batch).await),
            Err(error) => (count, Err(error)),
        }
    }

    async fn renew(
        &self,
        blocks: &Arc<dyn Blocks>,
        batch: Vec<BlockHash>,
    ) -> Result<u64, PutError> {
        let mut attempt = 1;
        loop {
            match blocks.renew(batch.clone()).await {
                Ok(lacking) => return Ok(lacking.len() as u64),
                // It has been renewed as far as there is room.
                Err(error @ PutError::OverQuota { .. }) => return Err(error),
                Err(error) if attempt == ATTEMPTS => return Err(error),
                Err(_) => attempt += 1,
            }
            sleep(&*self.env, PAUSE).await;
        }
    }

    async fn put_root(
        &self,
        blocks: &Arc<dyn Blocks>,
        manifest: &Manifest,
    ) -> Result<(), PutError> {
        let mut attempt = 1;
        loop {
            match blocks.put_signed(manifest.root().clone()).await {
                Ok(()) => return Ok(()),
                // Published from another machine since: that one keeps the newer root.
                Err(PutError::Superseded { .. }) => return Ok(()),
                Err(error) if attempt == ATTEMPTS => return Err(error),
                Err(_) => attempt += 1,
            }
            sleep(&*self.env, PAUSE).await;
        }
    }

    pub(super) async fn off_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Volumes) -> T + Send + 'static,
    ) -> T {
        let volumes = self.volumes.clone();
        tokio::task::spawn_blocking(move || work(&volumes))
            .await
            .expect("what runs here neither panics nor is aborted")
    }

    pub(super) fn now_unix_secs(&self) -> u64 {
        self.env.unix_ms() / 1000
    }
}

/// Whether it is time: a pass was interrupted, or a third of a lease has passed since the last
/// refresh; but a thirtieth after an attempt that failed. A clock that went back counts as time
/// passed.
fn is_due(kept: &Kept, now_unix_secs: u64, lease: Duration) -> bool {
    let since = |then: u64| now_unix_secs.checked_sub(then).unwrap_or(u64::MAX);
    (kept.pass.is_some() || since(kept.refreshed_unix_secs) >= lease.as_secs() / 3)
        && (kept.trouble.is_none() || since(kept.tried_unix_secs) >= lease.as_secs() / 30)
}

#[cfg(test)]
mod tests;
