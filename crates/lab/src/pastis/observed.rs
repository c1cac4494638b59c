//! The block operations of one client, watched: where a file system's time goes.
//!
//! Pastis §5.5, Figure 9, splits the time of a benchmark into that of reading and writing content-hash
//! blocks, of writing inodes (UCBs there) and of reading inodes. Operations run side by side, so each
//! moment is charged to one kind: to reading an inode if one is being read, else to writing one, else
//! to content blocks. The parts add up to the time in which the client waits for the ring.
//!
//! Lock leases are asked for only where all nodes do their upkeep: others grant none, since they do not know how long
//! they have been the roots of their keys.
//!
//! It does not know files.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_dht::{
    Blocks, GetError, HeldBlock, LeaseRenewal, LockGrant, LockLease, LockRefusal, NewBlock,
    PutError, Renewed, RingRoom, Wanted,
};
use atoll_env::{BoxFuture, Env, Instant};
use atoll_key::{BlockId, Key};
use bytes::Bytes;

/// What an operation is about, in the order of Figure 9's bars from below.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Work {
    /// Reading or writing blocks that never change.
    Content,
    /// Writing an inode or a record.
    WriteInode,
    /// Reading an inode or a record.
    ReadInode,
}

/// Seconds and operations of each kind of work, by its number.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Spent {
    pub secs: [f64; 3],
    pub operations: [u64; 3],
}

impl Spent {
    /// What was spent since `before`.
    pub(super) fn since(&self, before: &Spent) -> Spent {
        let secs = std::array::from_fn(|n| self.secs[n] - before.secs[n]);
        let operations = std::array::from_fn(|n| self.operations[n] - before.operations[n]);
        Spent { secs, operations }
    }
}

/// A block that was written: its bytes, and those of the version before.
#[derive(Clone, Debug)]
pub(super) struct Written {
    pub bytes: Bytes,
    pub before: Option<Bytes>,
}

#[derive(Default)]
struct State {
    under_way: [usize; 3],
    charged_to: Instant,
    spent: Spent,
    written: BTreeMap<BlockId, Written>,
}

/// See the module.
pub(super) struct Observed {
    blocks: Arc<dyn Blocks>,
    env: Env,
    /// Whether lock leases are asked for.
    locks: bool,
    state: Arc<Mutex<State>>,
}

/// An operation that is under way.
struct Operation {
    work: Work,
    env: Env,
    state: Arc<Mutex<State>>,
}

impl State {
    /// Charges the time since the last change.
    fn charge(&mut self, now: Instant) {
        let secs = now.since(self.charged_to).as_secs_f64();
        self.charged_to = now;
        if let Some(work) = self.under_way.iter().rposition(|count| *count > 0) {
            self.spent.secs[work] += secs;
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("no holder of this lock panics")
}

impl Operation {
    fn begin(work: Work, env: &Env, state: &Arc<Mutex<State>>) -> Operation {
        let mut now = lock(state);
        now.charge(env.now());
        now.under_way[work as usize] += 1;
        now.spent.operations[work as usize] += 1;
        Operation { work, env: env.clone(), state: state.clone() }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let mut now = lock(&self.state);
        now.charge(self.env.now());
        now.under_way[self.work as usize] -= 1;
    }
}

impl Observed {
    /// Watches what is asked of `blocks`; lock leases are asked for if `locks` says so.
    pub(super) fn new(env: Env, blocks: Arc<dyn Blocks>, locks: bool) -> Arc<Observed> {
        Arc::new(Observed { blocks, env, locks, state: Arc::default() })
    }

    /// What was spent so far.
    pub(super) fn spent(&self) -> Spent {
        let mut state = lock(&self.state);
        state.charge(self.env.now());
        state.spent
    }

    /// Every block that was written, as it was written last.
    pub(super) fn written(&self) -> BTreeMap<BlockId, Written> {
        lock(&self.state).written.clone()
    }

    fn begin_put(&self, blocks: &[NewBlock]) -> Operation {
        let is_inode = blocks.iter().any(|block| block.id.kind.is_mutable());
        let operation = self.begin(if is_inode { Work::WriteInode } else { Work::Content });
        let mut state = lock(&self.state);
        for NewBlock { id, bytes, .. } in blocks {
            let before = state.written.remove(id).map(|written| written.bytes);
            state.written.insert(*id, Written { bytes: bytes.clone(), before });
        }
        operation
    }

    fn begin(&self, work: Work) -> Operation {
        Operation::begin(work, &self.env, &self.state)
    }
}

impl Blocks for Observed {
    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        let work = if id.kind.is_mutable() { Work::ReadInode } else { Work::Content };
        let operation = self.begin(work);
        let held = self.blocks.get_block(id, wanted);
        Box::pin(async move {
            let _operation = operation;
            held.await
        })
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let operation = self.begin_put(&blocks);
        let outcomes = self.blocks.put_blocks(blocks);
        Box::pin(async move {
            let _operation = operation;
            outcomes.await
        })
    }

    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let operation = self.begin_put(&blocks);
        let outcomes = self.blocks.put_in_order(blocks);
        Box::pin(async move {
            let _operation = operation;
            outcomes.await
        })
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        let operation = self.begin(Work::Content);
        let outcomes = self.blocks.renew_blocks(renewal);
        Box::pin(async move {
            let _operation = operation;
            outcomes.await
        })
    }

    fn same_set_until(&self, key: Key) -> BoxFuture<'static, Option<Key>> {
        self.blocks.same_set_until(key)
    }

    fn room(&self) -> BoxFuture<'static, Option<RingRoom>> {
        self.blocks.room()
    }

    fn lock_lease(&self, ask: LockLease) -> BoxFuture<'static, Result<LockGrant, LockRefusal>> {
        if self.locks {
            return self.blocks.lock_lease(ask);
        }
        Box::pin(async { Err(LockRefusal::NoMajority("no node knows its neighbours".into())) })
    }

    fn watch(
        &self,
        id: BlockId,
        seen: u64,
    ) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>> {
        // A long poll: nothing waits for it.
        self.blocks.watch(id, seen)
    }
}
