//! What a node tells its next incarnation on the same machine: records that survive the death of the
//! process, and not that of the machine.
//!
//! Leases and promises last for seconds and are granted hundreds of times a second. To wait for the disk
//! each time would cost more than they are worth, and a machine that has crashed takes longer to come
//! back than they last. So records are written without waiting for the disk.
//!
//! Records come in *generations*, of which the present one and the one before it are kept. The user
//! (`holdings::lease_journal`) begins a new one when the records of the one before the present one
//! have lost their meaning.
//!
//! **Invariant:** what a recovery returns is all that was [written](Journal::written) in the generations kept, in
//! the order in which it was appended; or it returns nothing.
//!
//! It does not know what the records mean.

use std::sync::{Arc, Mutex, MutexGuard};

use atoll_env::{BoxFuture, Env, Instant};

/// The longest record, bytes.
pub const MAX_JOURNAL_RECORD_BYTES: usize = 1 << 20;

/// Keeps records across the death of a process.
pub trait Journal: Send + Sync + 'static {
    /// Time since the machine started, also while it slept: it goes on from one incarnation of a node to the
    /// next.
    fn now(&self) -> Instant;

    /// What earlier incarnations have appended, the oldest first; `None` if some of it may be missing, for
    /// instance because the machine has started anew since. Called once, before anything is appended.
    fn recover(&self) -> Option<Vec<Vec<u8>>>;

    /// Appends a record of at most [`MAX_JOURNAL_RECORD_BYTES`], in the order of the calls. The first record
    /// after a recovery of nothing begins the journal, which is there with this record or not at all.
    fn append(&self, record: Vec<u8>);

    /// Ends the present generation: records of the one before it are dropped when the next one is appended.
    fn begin_generation(&self);

    /// Resolves when all that was appended before would survive the death of this process, or the next
    /// incarnation would recover nothing.
    ///
    /// # Errors
    /// What the system said, for people: the next incarnation may miss some of it and not notice.
    fn written(&self) -> BoxFuture<'static, Result<(), String>>;
}

/// The generation before the present one, and that.
type Generations = [Vec<Vec<u8>>; 2];

/// A journal in memory, for simulated nodes, whose tests hand it from one incarnation to the next.
#[derive(Clone, Debug, Default)]
pub struct MemoryJournal(Arc<Mutex<Option<Generations>>>);

impl MemoryJournal {
    fn lock(&self) -> MutexGuard<'_, Option<Generations>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// Forgets all, as a machine does that crashes.
    pub fn lose(&self) {
        *self.lock() = None;
    }

    /// The journal of a node whose machine has the clock of `env`.
    pub(crate) fn with_clock(&self, env: &Env) -> Arc<dyn Journal> {
        Arc::new(Clocked { records: self.clone(), env: env.clone() })
    }
}

struct Clocked {
    records: MemoryJournal,
    env: Env,
}

impl Journal for Clocked {
    fn now(&self) -> Instant {
        self.env.now()
    }

    fn recover(&self) -> Option<Vec<Vec<u8>>> {
        self.records.lock().as_ref().map(|generations| generations.concat())
    }

    fn append(&self, record: Vec<u8>) {
        self.records.lock().get_or_insert_default()[1].push(record);
    }

    fn begin_generation(&self) {
        if let Some([before, present]) = &mut *self.records.lock() {
            *before = std::mem::take(present);
        }
    }

    fn written(&self) -> BoxFuture<'static, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }
}
