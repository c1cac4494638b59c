//! What a mounted file system does by itself: it commits within a second, and when the running
//! transaction fills up, cleans up after overwritten transparent files (§3.1) and chooses the
//! chunks to avoid (§3.3).

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use atoll_env::{Env, Notify, timeout};

use super::Shared;

/// How much of what calls have done a crash may take back. A fifth of ext3's, because `sync` is
/// not heard of: the kernel tells the server of a `fuse` mount nothing of sync(2) and syncfs(2).
const COMMIT_EVERY: Duration = Duration::from_secs(1);
/// A guess: overwritten blocks are of no use, but there is no hurry.
const CLEAN_EVERY: Duration = Duration::from_secs(30);
/// The most transparent files that are removed in one round of the cleaner, which runs beside
/// the user's own work. A guess.
const FILES_A_ROUND: u64 = 64;
/// "Periodically", says the paper, and no more (§3.3); the histograms cover days.
const CHOOSE_EVERY: Duration = Duration::from_secs(600);

impl Shared {
    /// Starts the task; it ends with the mount.
    pub(super) fn start_upkeep(self: &Arc<Shared>) {
        let (env, due) = (self.env.clone(), self.commit_due.clone());
        let task = self.env.spawn(Box::pin(keep_up(env, due, Arc::downgrade(self))));
        let _ = self.upkeep.set(task);
    }

    fn has_changes(&self) -> bool {
        !self.core().ext2.meta.is_settled()
    }
}

/// Errors end all changes, and the next call says so.
async fn keep_up(env: Env, due: Arc<Notify>, shared: Weak<Shared>) {
    let mut clean_at = env.now() + CLEAN_EVERY;
    let mut choose_at = env.now() + CHOOSE_EVERY;
    loop {
        let _ = timeout(&*env, COMMIT_EVERY, due.notified()).await;
        let Some(shared) = shared.upgrade() else { return };
        if shared.ended.load(Ordering::SeqCst) || shared.failed.get().is_some() {
            return;
        }
        let now = env.now();
        if now >= clean_at {
            clean_at = now + CLEAN_EVERY;
            let _ = shared.clean_overwritten(FILES_A_ROUND);
        }
        if now >= choose_at {
            choose_at = now + CHOOSE_EVERY;
            let _ = shared.choose_avoided();
        }
        if shared.has_changes() {
            let _ = shared.commit();
        }
    }
}
