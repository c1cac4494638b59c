//! The real runtime: tokio's clock and tasks, the operating system's randomness.
//!
//! All runtimes of a process count from one moment, so an [`Instant`] of one can be compared with those of another, made
//! hours later.

use std::sync::LazyLock;
use std::time::Duration;

use tokio::runtime::Handle;

use crate::{BoxFuture, Instant, Runtime, Task};

/// The moment all runtimes of this process count from: before any of them, since a paused clock of tokio stands at
/// the moment when it was made.
static BEGAN: LazyLock<std::time::Instant> = LazyLock::new(|| {
    let now = tokio::time::Instant::now().into_std();
    now.checked_sub(Duration::from_secs(3600)).unwrap_or(now)
});

/// [`Runtime`] on a tokio runtime.
#[derive(Clone, Debug)]
pub struct TokioRuntime {
    handle: Handle,
}

impl TokioRuntime {
    /// On the tokio runtime that `handle` belongs to.
    pub fn new(handle: Handle) -> TokioRuntime {
        TokioRuntime { handle }
    }

    /// On the tokio runtime of the calling task.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn current() -> TokioRuntime {
        TokioRuntime::new(Handle::current())
    }
}

impl Runtime for TokioRuntime {
    fn now(&self) -> Instant {
        let elapsed = tokio::time::Instant::now().into_std().duration_since(*BEGAN).as_nanos();
        Instant(u64::try_from(elapsed).expect("a process runs for less than 584 years"))
    }

    fn unix_ms(&self) -> u64 {
        let since_1970 = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or(Duration::ZERO);
        u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
    }

    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        let at = tokio::time::Instant::from_std(*BEGAN + Duration::from_nanos(at.as_nanos()));
        // The timer belongs to our runtime, not to the one the future is polled on.
        let _guard = self.handle.enter();
        Box::pin(tokio::time::sleep_until(at))
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) -> Task {
        let abort = self.handle.spawn(task).abort_handle();
        Task::new(move || abort.abort())
    }

    fn random_u64(&self) -> u64 {
        getrandom::u64().expect("the operating system gives randomness")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Elapsed, timeout};

    #[tokio::test(start_paused = true)]
    async fn a_timeout_drops_work_that_never_ends() {
        let env = TokioRuntime::current();
        let (began, never) = (env.now(), std::future::pending::<()>());
        assert_eq!(timeout(&env, Duration::from_secs(5), never).await, Err(Elapsed));
        assert_eq!(timeout(&env, Duration::from_secs(5), async { 3 }).await, Ok(3));
        assert!(env.now().since(began) >= Duration::from_secs(5));
    }

    /// A node compared the time of a walk through a volume with that of a runtime made a day later, which had just begun:
    /// it took the volume as walked today for ever.
    #[tokio::test(start_paused = true)]
    async fn a_runtime_made_later_tells_the_same_time() {
        let first = TokioRuntime::current();
        let began = first.now();
        first.sleep_until(began + Duration::from_secs(86_400)).await;
        let second = TokioRuntime::current();
        assert_eq!(second.now().since(began), Duration::from_secs(86_400));
        second.sleep_until(began + Duration::from_secs(86_405)).await;
        assert_eq!(first.now().since(began), Duration::from_secs(86_405));
    }

    #[tokio::test(start_paused = true)]
    async fn an_aborted_task_goes_no_further() {
        let env = TokioRuntime::current();
        let token = Arc::new(());
        let held = token.clone();
        let task = env.spawn(Box::pin(async move {
            let _held = held;
            std::future::pending::<()>().await;
        }));
        tokio::task::yield_now().await;
        task.abort();
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(Arc::strong_count(&token), 1);
    }
}
