//! What a node can say about the replication of the blocks it is responsible for.

use atoll_net::Peer;

pub use super::obstacle::Obstacle;

/// How far the comparison with the present replicas has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RepairStage {
    /// A virtual server of this node has no place on the ring, or does not know its range.
    #[default]
    NoPlace,
    /// No round has ended since the node started.
    NotCompared,
    /// The replicas, or the ranges, are others than those compared last.
    NewNeighbours,
    /// Copies were found missing since the last round.
    Requested,
    /// The last pass found differences: blocks were being copied, or could not be.
    Differing,
    /// The last pass found no difference: all replicas that are present hold the same blocks.
    InStep,
}

/// A replica that differed from this node at the end of the last pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenReplica {
    /// The replica.
    pub peer: Peer,
    /// What kept blocks from being copied.
    pub why: Obstacle,
    /// How many blocks; 1 if that is not known.
    pub blocks: u64,
}

/// The state of repair, as `status` shows it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RepairStatus {
    /// Blocks this node is the root of: as counted by the last round, and those put since.
    pub root_blocks: u64,
    /// Copies each block should have: k, also where the ring has fewer nodes.
    pub replicas_wanted: u32,
    /// Nodes, this one included, that are there to hold copies of each of this root's blocks; k at
    /// most, the fewest if they differ by range.
    pub replicas_present: u32,
    /// How far the comparison with them has come.
    pub stage: RepairStage,
    /// The replicas that could not be brought into step, if the stage is
    /// [`RepairStage::Differing`].
    pub open: Vec<OpenReplica>,
    /// Copies found missing on a neighbour (or here) and not yet restored.
    pub queue_blocks: u64,
    /// Whether all blocks of this root have all k copies: as many nodes are there, and the last
    /// reconciliation with each of them ended without a difference.
    pub fully_replicated: bool,
    /// Copies sent or fetched by repair since the node started.
    pub repaired_blocks: u64,
    /// Bytes of them.
    pub repaired_bytes: u64,
    /// Rounds of reconciliation finished since the node started.
    pub rounds: u64,
    /// When the last round ended, milliseconds since 1970; 0 before the first.
    pub last_round_unix_ms: u64,
    /// Neighbours that disappeared together and were whole replica sets: the blocks that only
    /// they had are on no node that can be reached until one of them is back.
    pub vanished_nodes: u32,
    /// Millionths of the ring whose blocks these are.
    pub vanished_ring_ppm: u32,
    /// When that was noticed, milliseconds since 1970; 0 if it was not.
    pub vanished_since_unix_ms: u64,
}

impl RepairStatus {
    /// Whether all replicas that are there hold the same blocks, also where they are fewer than k.
    pub fn is_in_step(&self) -> bool {
        self.stage == RepairStage::InStep
    }
}
