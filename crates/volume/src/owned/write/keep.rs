//! Keeping the leases of what a mount has written.
//!
//! The blocks of the newest version and of the old states that it keeps are listed by a walk over
//! them, and the list is given to the [`LeaseKeeper`], which renews their leases from then on; blocks
//! that no kept state needs are on no list. They are [released](super::release), or end with their leases (CFS §3.1). A walk reads every directory and every inode block
//! with pointers, so one begins only when [`WALK_SHARE`] times as long as the last one took has
//! passed, and when the mount ends. Until a block is on a list, the lease that its put gave it
//! keeps it.

use std::sync::Weak;
use std::time::Duration;

use atoll_env::{BoxFuture, Instant, sleep};
use atoll_key::{BlockHash, SignedBlock};

use super::{FlushError, Shared, Tops};
use crate::owned::reachable;
use crate::owned::root::Root;

/// The least time between two walks.
const WALK_EVERY: Duration = Duration::from_secs(30);

/// How many times as long as a walk takes passes before the next. Guess: a twentieth of the time.
const WALK_SHARE: u32 = 20;

/// Renews the leases of the blocks of a volume's newest version.
pub trait LeaseKeeper: Send + Sync + 'static {
    /// Keeps these blocks and this root, and none that it kept for older versions of the volume.
    /// Resolves when that is durable.
    fn keep(
        &self,
        root: SignedBlock,
        blocks: Vec<BlockHash>,
    ) -> BoxFuture<'static, Result<(), String>>;
}

/// Keeps nothing: the blocks end with the leases that their puts gave them.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoLeaseKeeper;

impl LeaseKeeper for NoLeaseKeeper {
    fn keep(&self, _: SignedBlock, _: Vec<BlockHash>) -> BoxFuture<'static, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }
}

/// Runs until the mount ends.
pub(super) async fn run(shared: Weak<Shared>) {
    let mut pause = WALK_EVERY;
    loop {
        let Some(mount) = shared.upgrade() else { return };
        let env = mount.env.clone();
        drop(mount);
        sleep(&*env, pause).await;
        let Some(mount) = shared.upgrade() else { return };
        if mount.has_ended() || mount.check_fence().is_err() {
            return;
        }
        let began: Instant = env.now();
        if let Err(error) = mount.keep().await {
            tracing::warn!("{error}");
        }
        pause = WALK_EVERY.max(env.now().since(began) * WALK_SHARE);
    }
}

impl Shared {
    /// Gives the newest version's blocks to the keeper, unless it has them, and releases what is not needed.
    pub(super) async fn keep(&self) -> Result<(), FlushError> {
        // What was put since a walk began is known for one walk at a time.
        let _one = self.releases.walking.lock().await;
        let (block, root, put) = {
            let head = self.head.lock().await;
            let tree = tops(&head.root);
            let is_listed =
                *self.listed.lock().expect("no holder of this lock panics") == Some(tree);
            if is_listed && !self.has_ended() && !self.releases.is_due(self.env.now()) {
                return Ok(());
            }
            // No flush runs: what was put until now is in this root, in an older one, or in none.
            (head.block.clone(), head.root.clone(), self.releases.put.take())
        };
        let walked = reachable::blocks_of(&self.cache, &root).await;
        let walked =
            walked.inspect_err(|_| self.releases.wait(put.iter().copied(), self.env.now()));
        let unread =
            |error: crate::blocks::error::BlockError| FlushError::Lease(error.at(b"").to_string());
        let needed = walked.map_err(unread)?;
        let kept = self.keeper.keep(block, needed.blocks.clone()).await;
        if kept.is_ok() {
            *self.listed.lock().expect("no holder of this lock panics") = Some(tops(&root));
        }
        self.release_unneeded(root, needed, put).await;
        kept.map_err(FlushError::Lease)
    }
}

fn tops(root: &Root) -> Tops {
    let mounted = &root.mounted;
    (root.directory, mounted.links, mounted.history, mounted.replaced, root.xattrs)
}
