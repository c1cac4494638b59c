//! The few small facts that a node's block layer must not forget at a restart.
//!
//! What is durable about blocks is in the store; what is durable about the *node's view of the
//! ring* is here: a handful of named records of at most [`MAX_RECORD_BYTES`] each, replaced as
//! a whole, and two stores of short records about blocks: those that other nodes keep for this one, and those
//! that were released. Each named record has one owner in this crate, which also defines its encoding and treats a
//! missing or unreadable record as a node that has never run.
//!
//! **Invariant:** after a power cut a record is the old one or the new one, never a mixture.
//!
//! It does not know what the records mean.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use atoll_env::{BoxFuture, Env};
use atoll_store::{BlockStore, MemoryStore};

use crate::journal::{Journal, MemoryJournal};

/// The largest record, bytes. A guess with room: the largest in use has some tens of KiB.
pub const MAX_RECORD_BYTES: usize = 4 << 20;

/// Keeps small named records across restarts.
pub trait DurableState: Send + Sync + 'static {
    /// The record called `name` (lower-case letters and hyphens), if there is one that can be
    /// read. Called while the node starts; may read a disk.
    fn load(&self, name: &'static str) -> Option<Vec<u8>>;

    /// Replaces the record called `name`; resolves when the new one would survive power loss.
    /// Dropped before that, the record is the old or the new one.
    ///
    /// # Errors
    /// What the system said, for people; the old record stays.
    fn save(&self, name: &'static str, record: Vec<u8>) -> BoxFuture<'static, Result<(), String>>;

    /// A store of its own, beside the blocks, for one short record a key: which node keeps the
    /// block for this one, or for which node this one keeps it (`holdings::pointers`). It must
    /// have room while the store of blocks has none.
    fn pointers(&self) -> Arc<dyn BlockStore>;

    /// A store of its own for one short record a key: which blocks were released, and are not to come back
    /// (`holdings::releases`). It must have room while the store of blocks has none.
    fn releases(&self) -> Arc<dyn BlockStore>;

    /// What survives the death of the process but need not survive that of the machine. Where there is no
    /// machine, its clock is that of `env`. Called once in the life of a node.
    fn journal(&self, env: &Env) -> Arc<dyn Journal>;
}

/// Records in memory: for simulated nodes, whose tests hand it from one incarnation of a node
/// to the next.
#[derive(Debug)]
pub struct MemoryState {
    records: Mutex<BTreeMap<&'static str, Vec<u8>>>,
    pointers: Arc<MemoryStore>,
    releases: Arc<MemoryStore>,
    journal: MemoryJournal,
}

/// The capacity of a simulated node's store of pointers, and of its store of releases, bytes.
const RECORD_BYTES: u64 = 1 << 30;

impl Default for MemoryState {
    fn default() -> MemoryState {
        let store = || Arc::new(MemoryStore::new(RECORD_BYTES));
        MemoryState {
            records: Mutex::default(),
            pointers: store(),
            releases: store(),
            journal: MemoryJournal::default(),
        }
    }
}

impl MemoryState {
    /// Forgets what a machine forgets that crashes.
    pub fn crash_machine(&self) {
        self.journal.lose();
    }
}

impl DurableState for MemoryState {
    fn load(&self, name: &'static str) -> Option<Vec<u8>> {
        self.records.lock().expect("no holder of this lock panics").get(name).cloned()
    }

    fn save(&self, name: &'static str, record: Vec<u8>) -> BoxFuture<'static, Result<(), String>> {
        self.records.lock().expect("no holder of this lock panics").insert(name, record);
        Box::pin(async { Ok(()) })
    }

    fn pointers(&self) -> Arc<dyn BlockStore> {
        self.pointers.clone()
    }

    fn releases(&self) -> Arc<dyn BlockStore> {
        self.releases.clone()
    }

    fn journal(&self, env: &Env) -> Arc<dyn Journal> {
        self.journal.with_clock(env)
    }
}
