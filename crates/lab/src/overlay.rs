//! The overlay of a simulated node. Only this module builds one; the rest of the laboratory knows
//! [`Overlay`], and the switches of Chord's configuration.

use std::sync::Arc;

use atoll_env::{Env, Instant};
use atoll_net::{Peer, Service, Transport};
use atoll_overlay::chord::ring::state::ChordState;
use atoll_overlay::chord::table::{self, Evidence};
use atoll_overlay::chord::{Chord, ChordConfig};
use atoll_overlay::{Node, Overlay};

/// The adaptive tables of all nodes of a ring together hold at most so many entries (some 230
/// bytes each): a ring of 4,096 nodes has every node in every table.
const MAX_ENTRIES: usize = 16 << 20;

/// A node's part in the overlay, with the calls that only the laboratory makes. Clones are the same
/// node.
#[derive(Clone)]
pub(crate) struct OverlayNode(Arc<Chord>);

/// What an adaptive table begins with: a node that lives, and when it was last heard of.
pub(crate) struct KnownNode {
    pub node: Node,
    pub heard_secs_ago: u32,
}

impl OverlayNode {
    /// A node that is on no ring yet.
    pub(crate) fn new(env: Env, transport: Arc<dyn Transport>, config: ChordConfig) -> OverlayNode {
        OverlayNode(Chord::new(env, transport, config))
    }

    /// A node with these positions on a ring that has come to rest.
    pub(crate) fn at_rest(
        env: Env,
        transport: Arc<dyn Transport>,
        mut config: ChordConfig,
        positions: &[Node],
        circle: &[Node],
    ) -> OverlayNode {
        config.virtual_servers = u16::try_from(positions.len()).expect("so many fit a plan");
        let length = config.list_length();
        let perfect = |position: &Node| ChordState::perfect(*position, circle, length);
        let states = positions.iter().map(perfect).collect();
        OverlayNode(Chord::with_states(env, transport, config, states))
    }

    /// What this node's blocks go by.
    pub(crate) fn overlay(&self) -> Arc<dyn Overlay> {
        self.0.clone()
    }

    /// What answers other nodes' calls to the overlay.
    pub(crate) fn service(&self) -> Arc<dyn Service> {
        self.0.clone()
    }

    /// Starts what runs periodically, on a node that is on a ring.
    pub(crate) fn start(&self) {
        self.0.start();
    }

    /// Joins a ring through one of these peers, and says whether that succeeded.
    pub(crate) async fn join(&self, introducers: Vec<Peer>) -> bool {
        self.0.join(introducers).await.is_ok()
    }

    /// Fills this node's adaptive table with all that is `known`.
    pub(crate) fn fill_table(&self, known: &[KnownNode], now: Instant) {
        fill_tables(std::iter::once(self), known, now);
    }

    /// How many nodes the adaptive table has.
    #[cfg(test)]
    pub(crate) fn table_entries(&self) -> usize {
        self.0.table_entries()
    }
}

/// Fills the adaptive tables of a ring's nodes with what is `known`, as far as there is room.
pub(crate) fn fill_tables<'n>(
    nodes: impl ExactSizeIterator<Item = &'n OverlayNode>,
    known: &[KnownNode],
    now: Instant,
) {
    let bits = bits_of_a_table(known.len(), MAX_ENTRIES / nodes.len().max(1));
    let now = table::secs(now);
    let evidence =
        |known: &KnownNode| Evidence { node: known.node, heard: now - known.heard_secs_ago };
    for node in nodes {
        node.0.prefill(known.iter().map(evidence), bits);
    }
}

/// With how many bits (see `atoll_overlay::chord::table`) a table of a ring of so many
/// positions has about `room` entries: 2^bits in each octave of the distance that holds more.
fn bits_of_a_table(positions: usize, room: usize) -> u32 {
    let octaves = positions.max(2).ilog2() + 1;
    if positions <= room {
        // Hardly any two of so many positions then share a slot.
        return octaves + 4;
    }
    let entries = |bits: u32| (1usize << bits) * (octaves - bits) as usize;
    (0..octaves).rev().find(|bits| entries(*bits) <= room).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_large_rings_are_bounded() {
        assert_eq!(bits_of_a_table(4096, 8192), 17);
        assert_eq!(bits_of_a_table(65_536, 512), 5);
        assert_eq!(bits_of_a_table(1 << 20, 1), 0);
    }
}
