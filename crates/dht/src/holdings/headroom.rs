//! How much room the store has left, as far as its refusals tell.

use std::sync::{Mutex, MutexGuard};

use atoll_store::{StoreError, Usage};

/// See the module.
#[derive(Default)]
pub(crate) struct Headroom(Mutex<State>);

#[derive(Default)]
struct State {
    /// How full the store was when it last refused a block for want of room.
    full_at: Option<Usage>,
    /// The first write that failed for another reason than room.
    disk_trouble: Option<String>,
}

impl Headroom {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// The store of blocks has refused a batch.
    pub(crate) fn store_failed(&self, error: &StoreError, usage: Usage) {
        match error {
            StoreError::Full { .. } | StoreError::Away { .. } => self.lock().full_at = Some(usage),
            StoreError::Io(_) | StoreError::Corrupted { .. } => self.disk_failed(error.to_string()),
        }
    }

    /// The disk does not take writes.
    pub(crate) fn disk_failed(&self, why: String) {
        self.lock().disk_trouble.get_or_insert_with(|| why.clone());
        tracing::error!(why, "blocks could not be written; they go to other nodes");
    }

    /// Why this node cannot write blocks, if it cannot.
    pub(crate) fn disk_trouble(&self) -> Option<String> {
        self.lock().disk_trouble.clone()
    }

    /// What the store has room for, bytes: nothing while it is as full as when it last refused.
    pub(crate) fn free_bytes(&self, usage: Usage) -> u64 {
        let state = self.lock();
        let is_full = state.full_at.is_some_and(|full| {
            full.capacity_bytes == usage.capacity_bytes && usage.disk_bytes >= full.disk_bytes
        });
        if is_full || state.disk_trouble.is_some() {
            return 0;
        }
        usage.capacity_bytes.saturating_sub(usage.disk_bytes)
    }
}
