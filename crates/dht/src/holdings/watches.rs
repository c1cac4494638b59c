//! Peers that wait for a newer version of a mutable block that is held here.
//!
//! A watcher sees every change or its latest result: it registers before it looks at what is held,
//! and is notified after a change is stored. Watches are bounded for each peer and in all, since
//! each holds an open call.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_env::Notify;
use atoll_key::{Key, PeerId};

use crate::multiset::Counts;

/// Watches in all. A guess: some megabytes of open calls.
const MAX_WATCHES: usize = 16_384;
/// Watches of one peer: a quarter of the calls that it may have open.
const MAX_OF_PEER: usize = 128;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Watches {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    waiting: BTreeMap<(Key, u64), Arc<Notify>>,
    by_peer: Counts<PeerId>,
    next_number: u64,
}

/// A watch, until it is dropped.
#[derive(Debug)]
pub(crate) struct Watching {
    state: Arc<Mutex<State>>,
    peer: PeerId,
    place: (Key, u64),
    changed: Arc<Notify>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("no holder of this lock panics")
}

impl Watches {
    /// `peer` watches the block, or this node itself (`is_own`), which opens no call; `None` if there
    /// are too many watches already.
    pub(crate) fn watch(&self, peer: PeerId, key: Key, is_own: bool) -> Option<Watching> {
        let mut state = lock(&self.state);
        if state.by_peer.of(&peer) >= MAX_OF_PEER && !is_own || state.waiting.len() >= MAX_WATCHES {
            return None;
        }
        state.by_peer.add(peer);
        let place = (key, state.next_number);
        state.next_number += 1;
        let changed = Arc::new(Notify::default());
        state.waiting.insert(place, changed.clone());
        Some(Watching { state: self.state.clone(), peer, place, changed })
    }

    /// The block has changed.
    pub(crate) fn changed(&self, key: &Key) {
        let state = lock(&self.state);
        let its = state.waiting.range((*key, 0)..=(*key, u64::MAX));
        its.for_each(|(_, watcher)| watcher.notify());
    }
}

impl Watching {
    /// Resolves when the block has changed since this last resolved. Cancel-safe.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        state.waiting.remove(&self.place);
        state.by_peer.take(&self.peer);
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
    fn only_watchers_of_the_block_that_changed_are_notified() {
        let watches = Watches::default();
        let [a, b] = [1, 2].map(|n| watches.watch(PeerId([1; 32]), key(n), false).expect("few"));
        watches.changed(&key(1));
        assert!(a.changed().now_or_never().is_some());
        assert!(a.changed().now_or_never().is_none() && b.changed().now_or_never().is_none());
    }

    #[test]
    fn one_peer_cannot_use_up_all_watches_and_gets_its_own_back() {
        let watches = Watches::default();
        let watch = |peer: u8| watches.watch(PeerId([peer; 32]), key(1), false);
        let mut of_one: Vec<Watching> = (0..MAX_OF_PEER).map(|_| watch(1).expect("few")).collect();
        assert!(watch(1).is_none() && watch(2).is_some());
        assert!(watches.watch(PeerId([1; 32]), key(1), true).is_some(), "its own node's");
        of_one.pop();
        assert!(watch(1).is_some());
        drop(of_one);
        let state = lock(&watches.state);
        assert!(state.waiting.is_empty() && state.by_peer.total() == 0);
    }
}
