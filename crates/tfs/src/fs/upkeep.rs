//! What a mounted file system does by itself: it commits every few seconds, and when the running
//! transaction fills up, cleans up after overwritten transparent files (§3.1) and chooses the
//! chunks to avoid (§3.3).

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use atoll_env::{Env, timeout};

use super::Shared;

/// How much of what calls have done a crash may take back (ext3's commit interval).
const COMMIT_EVERY: Duration = Duration::from_secs(5);
/// A guess: overwritten blocks are of no use to anybody, but in no hurry.
const CLEAN_EVERY: Duration = Duration::from_secs(30);
/// The most transparent files that are removed in one round of the cleaner, which runs beside
/// the user's own work. A guess.
const FILES_A_ROUND: u64 = 64;
/// "Periodically", says the paper, and no more (§3.3); the histograms cover days.
const CHOOSE_EVERY: Duration = Duration::from_secs(600);

/// Tells the task that the running transaction fills up: committed beside the calls, it makes none
/// of them wait.
#[derive(Debug, Default)]
pub(super) struct CommitDue {
    is_due: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl CommitDue {
    pub(super) fn tell(&self) {
        if !self.is_due.swap(true, Ordering::SeqCst) {
            let waker = self.waker.lock().expect("no holder of this lock panics").take();
            waker.into_iter().for_each(Waker::wake);
        }
    }

    async fn wait(&self) {
        poll_fn(|context| {
            let waker = context.waker().clone();
            *self.waker.lock().expect("no holder of this lock panics") = Some(waker);
            match self.is_due.swap(false, Ordering::SeqCst) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }
}

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
async fn keep_up(env: Env, due: Arc<CommitDue>, shared: Weak<Shared>) {
    let mut clean_at = env.now() + CLEAN_EVERY;
    let mut choose_at = env.now() + CHOOSE_EVERY;
    loop {
        let _ = timeout(&*env, COMMIT_EVERY, due.wait()).await;
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
