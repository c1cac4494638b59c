//! What all threads of an open store share: disk, limits, catalogue.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::disk::Disk;
use crate::engine::catalog::Catalog;
use crate::engine::error::IndexError;
use crate::{DiskConfig, DiskFailure, StoreError, Usage};

pub(crate) struct Shared {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) config: DiskConfig,
    pub(crate) catalog: Catalog,
    /// No lease ends before this; 0 if unknown. Spares `remove_expired` its walk.
    pub(crate) earliest_expiry: AtomicU64,
    /// What the store may take on its disk at present, bytes.
    capacity_bytes: AtomicU64,
    disk_failure: Mutex<Option<DiskFailure>>,
}

impl From<IndexError> for StoreError {
    fn from(error: IndexError) -> StoreError {
        StoreError::Io(error.to_string())
    }
}

impl Shared {
    pub(crate) fn new(disk: Arc<dyn Disk>, config: DiskConfig) -> Shared {
        Shared {
            disk,
            capacity_bytes: AtomicU64::new(config.capacity_bytes),
            config,
            catalog: Catalog::default(),
            earliest_expiry: AtomicU64::new(0),
            disk_failure: Mutex::default(),
        }
    }

    pub(crate) fn disk_failure(&self) -> Option<DiskFailure> {
        self.disk_failure.lock().expect("no panic while the lock is held").clone()
    }

    /// The disk has failed to write, though it is not full.
    pub(crate) fn note_failure(&self, why: &str) {
        let mut failure = self.disk_failure.lock().expect("no panic while the lock is held");
        let since_unix_secs =
            failure.as_ref().map_or_else(|| self.disk.unix_secs(), |first| first.since_unix_secs);
        *failure = Some(DiskFailure { why: why.to_owned(), since_unix_secs });
    }

    /// The disk has written something, to the end.
    pub(crate) fn note_success(&self) {
        *self.disk_failure.lock().expect("no panic while the lock is held") = None;
    }

    /// A block's lease ends at `expires_unix_secs`.
    pub(crate) fn note_lease(&self, expires_unix_secs: u64) {
        self.earliest_expiry.fetch_min(expires_unix_secs, Ordering::Relaxed);
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn set_capacity(&self, capacity_bytes: u64) {
        self.capacity_bytes.store(capacity_bytes, Ordering::Relaxed);
    }

    pub(crate) fn usage(&self) -> Usage {
        let state = self.catalog.read();
        Usage {
            blocks: state.checkpoint().blocks,
            block_bytes: state.checkpoint().block_bytes,
            disk_bytes: state.disk_bytes(),
            capacity_bytes: self.capacity_bytes(),
        }
    }
}
