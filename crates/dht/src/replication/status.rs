//! What a node can say about the replication of the blocks it is responsible for.

/// The state of repair, as `status` shows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RepairStatus {
    /// Blocks this node is the root of: as counted by the last round, and those put since.
    pub root_blocks: u64,
    /// Copies each block should have: k, or all nodes on a smaller ring.
    pub replicas_wanted: u32,
    /// Copies found missing on a neighbour (or here) and not yet restored.
    pub queue_blocks: u64,
    /// Whether the last reconciliation with every replica of the present neighbourhood
    /// ended without a difference: all blocks of this root have all their copies.
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
