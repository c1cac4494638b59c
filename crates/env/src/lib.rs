//! Time, tasks and randomness, behind one trait.
//!
//! Protocol code asks only a [`Runtime`] for these and so runs unchanged on tokio
//! (the `tokio` module here) and in the deterministic simulator (`atoll-sim`). A
//! simulated run is reproduced exactly from its seed; therefore nothing above this
//! crate may read a clock, start a task or draw a random number by other means.
//!
//! It knows nothing of peers, blocks or files.

mod moment;
mod notify;
pub mod panics;
// This is the one place where a real clock is read.
#[allow(clippy::disallowed_methods)]
mod tokio_runtime;

use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::{Either, select};

pub use moment::Moment;
pub use notify::Notify;
pub use tokio_runtime::TokioRuntime;

/// A boxed future that can move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A shared handle to a runtime, as protocol code holds it.
pub type Env = Arc<dyn Runtime>;

/// A point of monotonic time: nanoseconds since the runtime began.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Instant(pub u64);

impl Instant {
    /// Nanoseconds since the runtime began.
    pub fn as_nanos(self) -> u64 {
        self.0
    }

    /// Time since `earlier`; zero if `earlier` is later.
    pub fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl std::ops::Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, delay: Duration) -> Instant {
        let nanos = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        Instant(self.0.saturating_add(nanos))
    }
}

/// What protocol code may ask of the machine it runs on.
pub trait Runtime: Send + Sync + 'static {
    /// Monotonic time.
    fn now(&self) -> Instant;

    /// Wall-clock time, milliseconds since 1970. May jump; used only for the times of
    /// receipts, for what people read, and beside the steady clock in a [`Moment`].
    fn unix_ms(&self) -> u64;

    /// Resolves at `at`, or at once if that has passed. Cancel-safe.
    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()>;

    /// Starts a task. It runs until it ends or is aborted; dropping the handle lets it run.
    fn spawn(&self, task: BoxFuture<'static, ()>) -> Task;

    /// 64 random bits. Cryptographically strong on a real runtime.
    fn random_u64(&self) -> u64;
}

/// A started task.
pub struct Task {
    abort: Box<dyn Fn() + Send + Sync>,
}

impl Task {
    /// For implementations of [`Runtime`]: a handle that stops its task by `abort`.
    pub fn new(abort: impl Fn() + Send + Sync + 'static) -> Task {
        Task { abort: Box::new(abort) }
    }

    /// Stops the task at its next suspension. Nothing happens if it has ended.
    pub fn abort(&self) {
        (self.abort)();
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Task")
    }
}

/// A deadline passed before the work was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Elapsed;

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the deadline passed")
    }
}

impl std::error::Error for Elapsed {}

/// Waits for `delay`.
pub fn sleep(env: &dyn Runtime, delay: Duration) -> BoxFuture<'static, ()> {
    env.sleep_until(env.now() + delay)
}

/// Runs `work` for at most `limit`; drops it when the limit passes.
pub async fn timeout<F: Future>(
    env: &dyn Runtime,
    limit: Duration,
    work: F,
) -> Result<F::Output, Elapsed> {
    match select(pin!(work), sleep(env, limit)).await {
        Either::Left((output, _)) => Ok(output),
        Either::Right(((), _)) => Err(Elapsed),
    }
}

/// Lets other tasks of the thread run, once: for work that takes long and waits for nothing.
pub async fn yield_now() {
    let mut has_yielded = false;
    let once = std::future::poll_fn(|context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    });
    once.await;
}

/// A random number below `bound`, without bias that matters (bound is far below 2^64).
///
/// # Panics
/// If `bound` is zero.
pub fn random_below(env: &dyn Runtime, bound: u64) -> u64 {
    assert!(bound > 0, "nothing is below zero");
    env.random_u64() % bound
}

/// `period` with up to a quarter taken away at random, so that many nodes that
/// started together do not stay in step.
pub fn jittered(env: &dyn Runtime, period: Duration) -> Duration {
    let quarter = u64::try_from(period.as_nanos() / 4).unwrap_or(u64::MAX).max(1);
    period.saturating_sub(Duration::from_nanos(random_below(env, quarter)))
}
