//! How far work on a whole file system has come, for who waits for it.
//!
//! Work is counted in parts: about as many blocks as it writes or reads one after another. It is
//! known beforehand how many there are, but for what only shows on the way.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts how far some work has come, for a listener if there is one. Clones count together.
#[derive(Clone, Default)]
pub struct Progress(Option<Arc<Parts>>);

struct Parts {
    tell: Box<dyn Fn(u64, u64) + Send + Sync>,
    done: AtomicU64,
    total: AtomicU64,
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

impl Progress {
    /// Has `tell` told of each step: parts done, parts in all as far as known. The thread that
    /// works calls it, often.
    pub fn new(tell: impl Fn(u64, u64) + Send + Sync + 'static) -> Progress {
        let (done, total) = (AtomicU64::new(0), AtomicU64::new(0));
        Progress(Some(Arc::new(Parts { tell: Box::new(tell), done, total })))
    }

    /// There is so much more to do.
    pub(crate) fn expect(&self, parts: u64) {
        if let Some(all) = &self.0 {
            all.total.fetch_add(parts, Ordering::Relaxed);
        }
    }

    /// So much of it is done.
    pub(crate) fn done(&self, parts: u64) {
        if let Some(all) = &self.0 {
            let done = all.done.fetch_add(parts, Ordering::Relaxed) + parts;
            (all.tell)(done, all.total.load(Ordering::Relaxed));
        }
    }
}
