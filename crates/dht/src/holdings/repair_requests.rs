//! What repair is asked for: a round, because something is missing somewhere, and blocks that were
//! damaged here.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};

use atoll_env::Notify;
use atoll_key::Key;

/// Damaged blocks remembered one by one.
const MAX_DAMAGED: usize = 4096;

/// See the module.
#[derive(Default)]
pub(crate) struct RepairRequests {
    kicked: Notify,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    count: u64,
    damaged: BTreeSet<Key>,
}

impl RepairRequests {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// How many requests there were.
    pub(crate) fn count(&self) -> u64 {
        self.lock().count
    }

    /// Something is missing somewhere: a round should run.
    pub(crate) fn kick(&self) {
        self.lock().count += 1;
        self.kicked.notify();
    }

    /// Resolves when a round was requested since it last did. One waiter at a time.
    pub(crate) async fn wait_for_kick(&self) {
        self.kicked.notified().await;
    }

    /// A block was damaged here: it should be fetched again. Beyond [`MAX_DAMAGED`] only
    /// comparing ranges finds it.
    pub(crate) fn refetch(&self, key: Key) {
        {
            let mut state = self.lock();
            if state.damaged.len() < MAX_DAMAGED {
                state.damaged.insert(key);
            }
        }
        self.kick();
    }

    /// What was to be fetched again; the list is empty afterwards.
    pub(crate) fn take_damaged(&self) -> BTreeSet<Key> {
        std::mem::take(&mut self.lock().damaged)
    }
}
