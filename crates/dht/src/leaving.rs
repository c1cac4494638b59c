//! Blocks about to be removed though their leases last: what happens to them meanwhile.
//!
//! **Invariants.** A block that was put or renewed here since its removal began stays: its sender
//! counts on this node. And [`Leaving::denies`] what is dropped because others hold it: of two
//! nodes that drop the same block at once neither may rely on the other, and nobody can prove
//! to have a block with bytes got from here. Each denies having it before it asks the other, so
//! at least one of them is told no.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};

use atoll_key::Key;
use atoll_store::{BlockStore, StoreError};

/// What is leaving, and what came in meanwhile. One batch at a time.
#[derive(Default)]
pub(crate) struct Leaving {
    watch: Mutex<Option<Watch>>,
    /// Held while blocks are removed.
    gate: futures_util::lock::Mutex<()>,
}

struct Watch {
    keys: BTreeSet<Key>,
    touched: BTreeSet<Key>,
    removing: BTreeSet<Key>,
}

impl Leaving {
    fn lock(&self) -> MutexGuard<'_, Option<Watch>> {
        self.watch.lock().expect("no holder of this lock panics")
    }

    /// Blocks with these keys are about to be stored or renewed here: they leave no longer.
    /// Waits for a removal of them that has begun.
    pub async fn keep(&self, keys: impl Iterator<Item = &Key>) {
        let mut leaving = false;
        if let Some(watch) = self.lock().as_mut() {
            for key in keys.filter(|key| watch.keys.contains(*key)) {
                if watch.removing.contains(key) {
                    // Its bytes go now: to be counted on before that would let others drop theirs.
                    leaving = true;
                } else {
                    watch.touched.insert(*key);
                }
            }
        }
        if leaving {
            drop(self.gate.lock().await);
        }
    }

    /// Whether others must not count on this node for a block.
    pub fn denies(&self, key: &Key) -> bool {
        let guard = self.lock();
        guard.as_ref().is_some_and(|watch| watch.keys.contains(key) && !watch.touched.contains(key))
    }

    /// Begins to notice what comes in.
    pub fn watch(&self, keys: BTreeSet<Key>) {
        let (touched, removing) = (BTreeSet::new(), BTreeSet::new());
        *self.lock() = Some(Watch { keys, touched, removing });
    }

    /// Removes those of `keys` that nobody has put or renewed since the watch began, and says
    /// which they are.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn remove_untouched(
        &self,
        store: &dyn BlockStore,
        keys: Vec<Key>,
    ) -> Result<Vec<Key>, StoreError> {
        let _gate = self.gate.lock().await;
        let untouched = self.untouched(keys);
        if !untouched.is_empty() {
            store.remove(untouched.clone()).await?;
        }
        Ok(untouched)
    }

    /// Of `keys`, those that nobody has put since the watch began.
    fn untouched(&self, keys: Vec<Key>) -> Vec<Key> {
        let mut guard = self.lock();
        let Some(watch) = guard.as_mut() else { return Vec::new() };
        let untouched: Vec<Key> =
            keys.into_iter().filter(|key| !watch.touched.contains(key)).collect();
        watch.removing = untouched.iter().copied().collect();
        untouched
    }

    /// Nothing is leaving any more.
    pub fn end(&self) {
        *self.lock() = None;
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn key(n: u8) -> Key {
        Key::hashed([n; 32])
    }

    #[test]
    fn what_is_put_while_it_leaves_stays() {
        let leaving = Leaving::default();
        leaving.keep([key(1)].iter()).now_or_never().expect("nothing leaves yet");
        leaving.watch((1..9).map(key).collect());
        leaving.keep([key(2), key(20)].iter()).now_or_never().expect("nothing is removed yet");
        assert_eq!(leaving.untouched(vec![key(1), key(2), key(3)]), [key(1), key(3)]);
    }

    #[test]
    fn a_put_waits_for_the_removal_of_the_same_block() {
        let leaving = Leaving::default();
        leaving.watch((1..9).map(key).collect());
        let gate = leaving.gate.lock().now_or_never().expect("free");
        leaving.untouched(vec![key(1)]);
        assert!(leaving.keep([key(2)].iter()).now_or_never().is_some());
        assert!(leaving.keep([key(1)].iter()).now_or_never().is_none(), "put before the removal");
        drop(gate);
        assert!(leaving.keep([key(1)].iter()).now_or_never().is_some());
    }
}
