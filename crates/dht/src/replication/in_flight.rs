//! Which blocks this node is sending to which replicas, as the root of a put.
//!
//! Repair may compare this node with a replica while a put to it is in progress. The replica lacks
//! those blocks, and repair would send them a second time: over a slow line, where puts take
//! longest, that made puts take twice as long. So repair leaves blocks in flight to the put. If the
//! put fails, the next comparison finds them missing.

use std::sync::{Arc, Mutex, MutexGuard};

use atoll_key::{Key, PeerId};

use crate::multiset::Counts;

/// See the module. As large as the puts in flight.
#[derive(Debug, Default)]
pub(crate) struct InFlight(Mutex<Counts<(PeerId, Key)>>);

/// A batch on its way to a node, until this is dropped.
#[derive(Debug)]
pub(crate) struct BatchInFlight {
    all: Arc<InFlight>,
    to: PeerId,
    keys: Vec<Key>,
}

impl InFlight {
    fn lock(&self) -> MutexGuard<'_, Counts<(PeerId, Key)>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// These blocks are being sent to `to`.
    pub(crate) fn sends(self: &Arc<Self>, to: PeerId, keys: Vec<Key>) -> BatchInFlight {
        let mut all = self.lock();
        keys.iter().for_each(|key| all.add((to, *key)));
        drop(all);
        BatchInFlight { all: self.clone(), to, keys }
    }

    /// Whether a block is on its way to `to`.
    pub(super) fn is_in_flight(&self, to: &PeerId, key: &Key) -> bool {
        self.lock().of(&(*to, *key)) > 0
    }
}

impl Drop for BatchInFlight {
    fn drop(&mut self) {
        let mut all = self.all.lock();
        self.keys.iter().for_each(|key| all.take(&(self.to, *key)));
    }
}
