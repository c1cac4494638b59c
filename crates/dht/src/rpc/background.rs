//! Work that goes on although no caller waits for it, so much of it at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use atoll_env::Env;

/// See the module. Clones count together.
#[derive(Clone, Debug)]
pub(crate) struct Background {
    most: usize,
    count: Arc<AtomicUsize>,
}

impl Background {
    /// At most so many pieces of work at a time.
    pub(crate) fn new(most: usize) -> Background {
        Background { most, count: Arc::default() }
    }

    /// Does some work, or drops it if there is too much already.
    pub(crate) fn run(&self, env: &Env, work: impl Future<Output = ()> + Send + 'static) {
        let count = self.count.clone();
        if count.fetch_add(1, Ordering::Relaxed) >= self.most {
            count.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        env.spawn(Box::pin(async move {
            work.await;
            count.fetch_sub(1, Ordering::Relaxed);
        }));
    }
}
