//! Replica diversion: a full node is no hole in the ring (PAST, SOSP 2001, §3.3; D2 §6).
//!
//! A member of a block's replica set that has no room has its copy kept by a node outside the
//! set, the *holder*, and keeps a *pointer* to it. The pointer counts as the member's copy:
//! reconciliation lists it, questions about the block are answered from it, and readers are told
//! to ask the holder, which costs them one call more. The holder stores an ordinary copy, charged
//! to the publisher, and a *hold*: for which member it keeps it, so that it is no stray.
//!
//! - [`divert`] finds a holder and hands blocks over.
//! - `server::divert` and `server::holdings` are the holder's part.
//! - [`follow`] gets blocks, and extends leases, through pointers.
//! - `replication::pointer_upkeep` checks every pointer now and then, and takes copies home when
//!   there is room.
//!
//! **Invariants.** A pointer is written after the holder has said that the copy is durable. A
//! pointer leads to a copy and never to another pointer: a holder that is full says so. No node
//! holds two copies of one block, for itself and for others or for two others. A pointer is not
//! a copy, so dropping one loses nothing: the holder keeps its copy as a stray until the replica
//! set is proven to have it, and repair fetches the block again for the member.
//!
//! It does not know how repair compares ranges, nor which node publishes.

mod divert;
pub(crate) mod follow;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::{Key, PeerId};
use atoll_overlay::Node;
use atoll_store::BlockInfo;

pub(crate) use divert::{ask_rooms, divert};

use crate::accounting::Accounting;
use crate::accounting::quota::{Share, cost_bytes};
use crate::context::layer_above;

/// A node takes copies for others while it has room for so many more blocks of that size: its
/// own come first. PAST's threshold `t_div` of 0.05 is 20. A guess.
const SPARE_BLOCKS: u64 = 8;
/// How long another node's word on its room is good for.
const SPARE_LASTS: Duration = Duration::from_secs(30);
/// Nodes whose room is remembered.
const MAX_KNOWN: usize = 1024;
/// What one member may have kept here for it, of this node's capacity: a member that only says
/// that it is full cannot fill others.
const MEMBER_SHARE_MILLIONTHS: u32 = 250_000;

/// What nodes know of each other's room.
type Rooms = BTreeMap<PeerId, (Node, u64, Instant)>;

/// A node's part in diversion, above what it has accounts of.
pub(crate) struct Diversion {
    accounting: Arc<Accounting>,
    /// What other nodes have said of their room, and when.
    rooms: Mutex<Rooms>,
    /// Blocks that are being taken for others.
    taking: Mutex<BTreeSet<Key>>,
}
layer_above!(Diversion, accounting: Arc<Accounting>);

/// Blocks that are being taken for a member, until this is dropped: two members that are full
/// and choose the same holder at once would otherwise have one copy for both.
pub(crate) struct Taking<'a> {
    of: &'a Diversion,
    pub keys: Vec<Key>,
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        let mut taking = self.of.taking.lock().expect("no holder of this lock panics");
        for key in &self.keys {
            taking.remove(key);
        }
    }
}

impl Diversion {
    pub(crate) fn new(accounting: Arc<Accounting>) -> Diversion {
        Diversion { accounting, rooms: Mutex::default(), taking: Mutex::default() }
    }

    /// Begins to take those of `keys` that are not being taken for another member.
    pub(crate) fn take(&self, keys: impl Iterator<Item = Key>) -> Taking<'_> {
        let mut taking = self.taking.lock().expect("no holder of this lock panics");
        let keys = keys.filter(|key| taking.insert(*key)).collect();
        Taking { of: self, keys }
    }

    fn lock(&self) -> MutexGuard<'_, Rooms> {
        self.rooms.lock().expect("no holder of this lock panics")
    }

    /// `node` has said how much it would take for others.
    pub(crate) fn learn(&self, node: Node, spare_bytes: u64, now: Instant) {
        let mut rooms = self.lock();
        if rooms.len() >= MAX_KNOWN && !rooms.contains_key(&node.peer.id) {
            rooms.retain(|_, (_, _, at)| now.since(*at) < SPARE_LASTS);
            if rooms.len() >= MAX_KNOWN {
                rooms.pop_first();
            }
        }
        rooms.insert(node.peer.id, (node, spare_bytes, now));
    }

    /// The nodes whose room is known, and how much they have.
    fn known_rooms(&self, now: Instant) -> BTreeMap<PeerId, (Node, u64)> {
        let rooms = self.lock();
        let fresh = rooms.iter().filter(|(_, (_, _, at))| now.since(*at) < SPARE_LASTS);
        fresh.map(|(id, (node, spare_bytes, _))| (*id, (*node, *spare_bytes))).collect()
    }
}

/// Whether the store takes nothing.
pub(crate) fn has_no_room(diversion: &Diversion) -> bool {
    diversion.headroom.free_bytes(diversion.store.usage()) == 0
}

/// Whether this node keeps its copy of a block for another: then it is no stray.
pub(crate) fn is_held_for_others(diversion: &Diversion, key: &Key) -> bool {
    diversion.pointers.is_held(key, diversion.expiry(0))
}

/// Ends holds of `blocks` for nodes that do not belong to their replica `set`: a node
/// that is no member cannot keep a block from being dropped.
pub(crate) async fn end_foreign_holds(diversion: &Diversion, set: &[Node], blocks: &[BlockInfo]) {
    let records = &diversion.pointers;
    let is_foreign = |key: &Key| {
        records.is_held(key, 0) && !set.iter().any(|node| records.is_held_for(key, &node.peer.id))
    };
    let foreign = blocks.iter().map(|info| info.key).filter(is_foreign);
    records.forget(foreign.collect()).await;
}

/// What this node would keep for a member of another replica set, bytes.
pub(crate) fn spare_bytes_for(diversion: &Diversion, member: &PeerId) -> u64 {
    if !diversion.config.divert || holds_left(diversion, member) == 0 {
        return 0;
    }
    diversion.headroom.free_bytes(diversion.store.usage())
}

/// Whether there is room for a block of another member's among `spare_bytes`.
pub(crate) fn has_room(spare_bytes: u64, len_bytes: usize) -> bool {
    let cost = cost_bytes(u32::try_from(len_bytes).unwrap_or(u32::MAX));
    cost.saturating_mul(SPARE_BLOCKS) <= spare_bytes
}

/// How many more blocks a member may have kept here.
pub(crate) fn holds_left(diversion: &Diversion, member: &PeerId) -> u64 {
    let usage = diversion.store.usage();
    let mean_bytes = usage.block_bytes / usage.blocks.max(1);
    let share_bytes = Share::from_millionths(MEMBER_SHARE_MILLIONTHS).of(usage.capacity_bytes);
    let blocks = share_bytes / (mean_bytes + cost_bytes(0));
    blocks.saturating_sub(diversion.pointers.held_for(member))
}
