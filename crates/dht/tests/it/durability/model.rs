//! What was promised, and whether it holds.

use std::collections::BTreeMap;
use std::time::Duration;

use atoll_key::Key;
use bytes::Bytes;

use crate::ring::Ring;

/// A block that a put acknowledged.
#[derive(Clone, Debug)]
pub(super) struct Promise {
    /// Its bytes; of a signed block its payload.
    pub bytes: Bytes,
    pub version: u64,
    /// Until when its lease lasts, in time in which nodes were up.
    until: Duration,
}

#[derive(Default)]
pub(super) struct Model {
    pub promises: BTreeMap<Key, Promise>,
    /// Time in which at least two nodes were up.
    passed: Duration,
}

impl Model {
    /// Time passes on a ring with so many nodes up; ended leases are forgotten.
    pub(super) fn pass(&mut self, span: Duration, up: usize) {
        if up >= 2 {
            self.passed += span;
        }
        let passed = self.passed;
        self.promises.retain(|_, promise| promise.until > passed);
    }

    /// A put was acknowledged.
    pub(super) fn acknowledged(&mut self, key: Key, bytes: Bytes, version: u64, lease: Duration) {
        let until = self.passed + lease;
        self.promises.insert(key, Promise { bytes, version, until });
    }

    /// A renewal was.
    pub(super) fn renewed(&mut self, key: &Key, lease: Duration) {
        let until = self.passed + lease;
        if let Some(promise) = self.promises.get_mut(key) {
            promise.until = promise.until.max(until);
        }
    }

    /// Who has a promised block on disk, whether up or not.
    pub(super) fn disks(&self, ring: &Ring, key: &Key) -> Vec<usize> {
        let version = self.promises[key].version;
        let has = |member: &usize| {
            let info = ring.members[*member].store.info(key).expect("memory");
            info.is_some_and(|info| info.version >= version)
        };
        (0..ring.members.len()).filter(has).collect()
    }

    /// Fails if a promised block is nowhere.
    pub(super) fn check(&self, ring: &Ring, after: &str) {
        let is_lost = |key: &&Key| self.disks(ring, key).is_empty();
        let lost: Vec<&Key> = self.promises.keys().filter(is_lost).collect();
        assert!(
            lost.is_empty(),
            "seed {}, after {after}: LOST {} of {} blocks: {:?}",
            ring.sim.seed(),
            lost.len(),
            self.promises.len(),
            &lost[..lost.len().min(3)]
        );
    }
}
