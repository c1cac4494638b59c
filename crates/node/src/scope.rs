//! A runtime whose tasks end with the node.
//!
//! The parts of a node start tasks and let them run; the daemon would end them by
//! ending. But a node can also be stopped inside a living process, and then must let go of
//! its files and sockets: so it gives its parts a [`Scope`] for a runtime, ends that, and
//! waits until every task has been dropped.

use atoll_env::{BoxFuture, Env, Instant, Runtime, Task};
use tokio::sync::watch;

/// A [`Runtime`] that can end all tasks started through it.
pub(crate) struct Scope {
    outer: Env,
    ended: watch::Sender<bool>,
    live: watch::Sender<usize>,
}

impl Scope {
    pub(crate) fn new(outer: Env) -> Scope {
        Scope { outer, ended: watch::Sender::new(false), live: watch::Sender::new(0) }
    }

    /// Ends all tasks at their next suspension, and those started later at once.
    pub(crate) fn end(&self) {
        self.ended.send_replace(true);
    }

    /// Resolves when no task is left.
    pub(crate) async fn all_ended(&self) {
        let mut live = self.live.subscribe();
        live.wait_for(|count| *count == 0).await.expect("the sender is ours");
    }
}

/// Counts one live task.
struct Alive(watch::Sender<usize>);

impl Alive {
    fn begin(live: &watch::Sender<usize>) -> Alive {
        live.send_modify(|count| *count += 1);
        Alive(live.clone())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl Runtime for Scope {
    fn now(&self) -> Instant {
        self.outer.now()
    }

    fn unix_ms(&self) -> u64 {
        self.outer.unix_ms()
    }

    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        self.outer.sleep_until(at)
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) -> Task {
        let alive = Alive::begin(&self.live);
        let mut ended = self.ended.subscribe();
        self.outer.spawn(Box::pin(async move {
            // Dropped last, after the task itself.
            let _alive = alive;
            tokio::select! {
                biased;
                _ = ended.wait_for(|ended| *ended) => {}
                () = task => {}
            }
        }))
    }

    fn random_u64(&self) -> u64 {
        self.outer.random_u64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use atoll_env::TokioRuntime;
    use std::sync::Arc;

    #[tokio::test]
    async fn ending_a_scope_drops_what_its_tasks_hold() {
        let scope = Scope::new(Arc::new(TokioRuntime::current()));
        let held = Arc::new(());
        for _ in 0..3 {
            let mine = held.clone();
            scope.spawn(Box::pin(async move {
                let _mine = mine;
                std::future::pending::<()>().await;
            }));
        }
        let aborted = scope.spawn(Box::pin(std::future::pending()));
        scope.spawn(Box::pin(async {}));
        aborted.abort();
        scope.end();
        scope.all_ended().await;
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[tokio::test]
    async fn a_task_started_too_late_does_not_run() {
        let scope = Scope::new(Arc::new(TokioRuntime::current()));
        scope.end();
        let ran = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let flag = ran.clone();
        scope.spawn(Box::pin(async move {
            flag.store(true, std::sync::atomic::Ordering::Relaxed);
        }));
        scope.all_ended().await;
        assert!(!ran.load(std::sync::atomic::Ordering::Relaxed));
    }
}
