//! The shared state of repair: what it has found, what it was told of, how fast it may go.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::{Key, PeerId};
use atoll_overlay::ServedRanges;

use crate::replication::obstacle::Obstacle;
use crate::replication::status::{OpenReplica, RepairStage, RepairStatus};
use crate::rpc::backoff::{Backoff, SetBack};

/// Blocks remembered that a node refused.
const MAX_DECLINED: usize = 8192;
/// How long such a block is not offered to it again. A guess.
const DECLINED_FOR: Duration = Duration::from_secs(3600);

/// After so long a block that one node was asked for is fetched from another as well. A guess: a
/// mebibyte over a line that is not poor.
const FETCH_PATIENCE: Duration = Duration::from_secs(1);

/// How many bytes a second repair may copy. A guess: half of a gigabit link.
const REPAIR_BYTES_PER_SEC: f64 = 67_108_864.0;

/// The shared state of repair.
#[derive(Default)]
pub(crate) struct Repair {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    status: RepairStatus,
    /// What the last pass has found.
    compared: Option<Compared>,
    next_slot: Instant,
    /// Blocks that are being fetched, and since when: exchanges with several nodes go on side by
    /// side.
    fetching: BTreeMap<Key, Instant>,
    /// Blocks that a node refused: until when they are not offered to it, and why.
    declined: BTreeMap<(PeerId, Key), (Instant, Obstacle)>,
}

/// What a pass over all replicas has found.
pub(super) struct Compared {
    /// The ranges, and the replicas that they were compared with.
    pub served: ServedRanges,
    /// How many requests for repair there were when it began.
    pub requests: u64,
    /// Whether no replica differed.
    pub is_equal: bool,
    /// The replicas that differ still.
    pub open: Vec<OpenReplica>,
}

/// Blocks that are being fetched from one node, until this is dropped.
pub(crate) struct Fetching<'a> {
    repair: &'a Repair,
    pub keys: Vec<Key>,
    since: Instant,
}

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        let mut state = self.repair.lock();
        for key in &self.keys {
            // Another node may have been asked since.
            if state.fetching.get(key) == Some(&self.since) {
                state.fetching.remove(key);
            }
        }
    }
}

impl Repair {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// `node` refused a block. Beyond [`MAX_DECLINED`] it is left alone as a whole.
    pub(super) fn decline(
        &self,
        node: PeerId,
        key: Key,
        why: Obstacle,
        now: Instant,
        backoff: &Backoff,
    ) {
        let is_remembered = {
            let mut state = self.lock();
            if state.declined.len() >= MAX_DECLINED {
                state.declined.retain(|_, (until, _)| *until > now);
            }
            let has_room = state.declined.len() < MAX_DECLINED;
            if has_room {
                state.declined.insert((node, key), (now + DECLINED_FOR, why));
            }
            has_room
        };
        if !is_remembered {
            backoff.set_back(node, now, SetBack::Refuses);
        }
    }

    /// Why a block is not offered to `node`, which has refused it of late.
    pub(super) fn refused_by(&self, node: &PeerId, key: &Key, now: Instant) -> Option<Obstacle> {
        let state = self.lock();
        let refused = state.declined.get(&(*node, *key)).filter(|(until, _)| *until > now);
        refused.map(|(_, why)| *why)
    }

    /// Begins to fetch those of `keys` that another node has not just been asked for, and says how
    /// many it has.
    pub(super) fn begin_fetch(&self, mut keys: Vec<Key>, now: Instant) -> (Fetching<'_>, u64) {
        let (mut state, wanted) = (self.lock(), keys.len());
        keys.retain(|key| {
            let asked = state.fetching.get(key);
            let is_due = asked.is_none_or(|since| now.since(*since) >= FETCH_PATIENCE);
            if is_due {
                state.fetching.insert(*key, now);
            }
            is_due
        });
        let others = (wanted - keys.len()) as u64;
        (Fetching { repair: self, keys, since: now }, others)
    }

    /// A pass over all replicas has ended.
    pub(super) fn pass_ended(&self, compared: Compared, root_blocks: u64, unix_ms: u64) {
        let mut state = self.lock();
        state.status.root_blocks = root_blocks;
        state.status.rounds += 1;
        state.status.last_round_unix_ms = unix_ms;
        state.compared = Some(compared);
    }

    pub(super) fn queue(&self, blocks: u64) {
        self.lock().status.queue_blocks += blocks;
    }

    pub(super) fn unqueue(&self, blocks: u64) {
        let mut state = self.lock();
        state.status.queue_blocks = state.status.queue_blocks.saturating_sub(blocks);
    }

    pub(super) fn done(&self, blocks: u64, bytes: u64) {
        let mut state = self.lock();
        state.status.repaired_blocks += blocks;
        state.status.repaired_bytes += bytes;
    }

    /// Counts new blocks of which this node is the root, put since the last round; the next round counts anew.
    pub(crate) fn count_root_blocks(&self, new: u64) {
        self.lock().status.root_blocks += new;
    }

    /// Reserves the time that copying `bytes` may take; copying may go on at the result.
    pub(super) fn pace(&self, now: Instant, bytes: u64) -> Instant {
        let mut state = self.lock();
        let cost = Duration::from_secs_f64(bytes as f64 / REPAIR_BYTES_PER_SEC);
        state.next_slot = state.next_slot.max(now) + cost;
        state.next_slot
    }

    /// The state of repair, given what the node is responsible for at present, how many copies each
    /// block should have, and how many requests for repair there were.
    pub(super) fn status(
        &self,
        served: &ServedRanges,
        replicas_wanted: u32,
        requests: u64,
    ) -> RepairStatus {
        let copies = served.ranges.iter().map(|range| range.replicas.len() as u32 + 1);
        let replicas_present = copies.min().unwrap_or(0);
        let state = self.lock();
        let stage = match &state.compared {
            _ if !served.complete => RepairStage::NoPlace,
            None => RepairStage::NotCompared,
            Some(compared) if compared.served != *served => RepairStage::NewNeighbours,
            Some(compared) if !compared.is_equal => RepairStage::Differing,
            Some(compared) if compared.requests != requests => RepairStage::Requested,
            Some(_) => RepairStage::InStep,
        };
        let compared = state.compared.as_ref().filter(|_| stage == RepairStage::Differing);
        let open = compared.map_or(Vec::new(), |compared| compared.open.clone());
        let left_blocks: u64 = open.iter().map(|replica| replica.blocks).sum();
        RepairStatus {
            replicas_wanted,
            replicas_present,
            stage,
            fully_replicated: stage == RepairStage::InStep && replicas_present >= replicas_wanted,
            queue_blocks: state.status.queue_blocks.max(left_blocks),
            open,
            ..state.status.clone()
        }
    }
}
