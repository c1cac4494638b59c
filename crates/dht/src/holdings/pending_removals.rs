//! Blocks that are about to be removed although their leases last.
//!
//! **Invariants.** A block that was put or renewed here since its removal began stays, because its
//! sender counts on this node; so does a block whose put or renewal was in progress then. This node
//! denies having the blocks under removal ([`PendingRemovals::denies`]): if two nodes drop the same
//! block at once, neither may rely on the other, and no node can prove to hold a block with bytes
//! fetched from here. Each node denies before it asks, so at least one of them is told no.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_key::Key;
use atoll_store::{BlockStore, StoreError};

use crate::multiset::Counts;

/// What is leaving, and what comes in meanwhile. One batch leaves at a time.
#[derive(Default)]
pub(crate) struct PendingRemovals {
    state: Arc<Mutex<State>>,
    /// Held while blocks are removed.
    gate: futures_util::lock::Mutex<()>,
}

#[derive(Default)]
struct State {
    /// Blocks that are about to leave and were not put or renewed since.
    leaving: BTreeSet<Key>,
    /// Those of them that are being removed.
    removing: BTreeSet<Key>,
    /// Blocks on their way into the store.
    arriving: Counts<Key>,
}

/// Blocks on their way into the store, until this is dropped: a removal that begins meanwhile
/// leaves them out. The store may have a batch in its queue when the removal begins, and would
/// remove what it has just acknowledged.
pub(crate) struct Arriving {
    state: Arc<Mutex<State>>,
    keys: Vec<Key>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("no holder of this lock panics")
}

impl Drop for Arriving {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        self.keys.iter().for_each(|key| state.arriving.take(key));
    }
}

impl PendingRemovals {
    /// Blocks with these keys are about to be stored or renewed here: they leave no longer, nor
    /// until the result is dropped. Waits for a removal of them that has begun.
    pub(crate) async fn keep(&self, keys: impl Iterator<Item = &Key>) -> Arriving {
        let keys: Vec<Key> = keys.copied().collect();
        let mut is_removed = false;
        {
            let mut state = lock(&self.state);
            for key in &keys {
                state.arriving.add(*key);
                // Its bytes go now: to be counted on before that would let others drop theirs.
                is_removed |= state.removing.contains(key);
                if !state.removing.contains(key) {
                    state.leaving.remove(key);
                }
            }
        }
        let arriving = Arriving { state: self.state.clone(), keys };
        if is_removed {
            drop(self.gate.lock().await);
        }
        arriving
    }

    /// Whether others must not count on this node for a block.
    pub(crate) fn denies(&self, key: &Key) -> bool {
        lock(&self.state).leaving.contains(key)
    }

    /// Begins to notice what comes in, or is about to.
    pub(crate) fn watch(&self, mut keys: BTreeSet<Key>) {
        let mut state = lock(&self.state);
        keys.retain(|key| state.arriving.of(key) == 0);
        (state.leaving, state.removing) = (keys, BTreeSet::new());
    }

    /// Removes those of `keys` that were not put or renewed since the watch began, and says
    /// which they are.
    ///
    /// # Errors
    /// If the store fails.
    pub(crate) async fn remove_untouched(
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

    /// Of `keys`, those that were not put since the watch began.
    fn untouched(&self, mut keys: Vec<Key>) -> Vec<Key> {
        let mut state = lock(&self.state);
        keys.retain(|key| state.leaving.contains(key));
        state.removing = keys.iter().copied().collect();
        keys
    }

    /// Nothing is leaving any more.
    pub(crate) fn end(&self) {
        self.watch(BTreeSet::new());
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
        let leaving = PendingRemovals::default();
        leaving.keep([key(1)].iter()).now_or_never().expect("nothing leaves yet");
        leaving.watch((1..9).map(key).collect());
        leaving.keep([key(2), key(20)].iter()).now_or_never().expect("nothing is removed yet");
        assert_eq!(leaving.untouched(vec![key(1), key(2), key(3)]), [key(1), key(3)]);
    }

    /// The put was in the store's queue when the removal began, was acknowledged, and the block
    /// was removed right after it.
    #[test]
    fn what_was_on_its_way_when_a_removal_began_stays() {
        let leaving = PendingRemovals::default();
        let keep = |n| leaving.keep([key(n)].iter()).now_or_never().expect("nothing leaves yet");
        let (put, again, ended) = (keep(1), keep(1), keep(2));
        drop(ended);
        leaving.watch((1..9).map(key).collect());
        assert!(!leaving.denies(&key(1)) && leaving.denies(&key(2)));
        assert_eq!(leaving.untouched(vec![key(1), key(2), key(3)]), [key(2), key(3)]);
        leaving.end();
        drop(put);
        leaving.watch((1..9).map(key).collect());
        assert_eq!(leaving.untouched(vec![key(1)]), [], "another put of it is under way");
        drop(again);
        leaving.watch((1..9).map(key).collect());
        assert_eq!(leaving.untouched(vec![key(1)]), [key(1)]);
    }

    #[test]
    fn a_put_waits_for_the_removal_of_the_same_block() {
        let leaving = PendingRemovals::default();
        leaving.watch((1..9).map(key).collect());
        let gate = leaving.gate.lock().now_or_never().expect("free");
        leaving.untouched(vec![key(1)]);
        assert!(leaving.keep([key(2)].iter()).now_or_never().is_some());
        assert!(leaving.keep([key(1)].iter()).now_or_never().is_none(), "put before the removal");
        drop(gate);
        assert!(leaving.keep([key(1)].iter()).now_or_never().is_some());
    }
}
