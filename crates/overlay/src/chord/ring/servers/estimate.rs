//! How many nodes there are, from the density of the successor lists (CFS §6.1).

use std::collections::{BTreeMap, BTreeSet};

use atoll_key::PeerId;

use super::Servers;
use crate::Node;
use crate::chord::ring::state::ChordState;

impl Servers {
    /// Ring positions of all nodes, by CFS §6.1's r / f, over all lists of this node.
    pub fn estimated_nodes(&self) -> f64 {
        let joined = self.states().filter(|state| state.joined());
        if let Some(state) = joined.clone().find(|state| state.knows_whole_ring()) {
            return state.estimated_nodes();
        }
        let covered: f64 = joined.clone().filter_map(ChordState::covered).sum();
        let entries: usize = joined.clone().map(|state| state.successors().len()).sum();
        if covered > 0.0 { entries as f64 / covered } else { 1.0 }
    }

    /// Physical nodes: exact where the lists hold the whole ring. Elsewhere the positions
    /// estimated, scaled by the part of a node that each listed position is: a node that runs v
    /// virtual servers, as it said when it was checked, turns up v times as often.
    pub fn estimated_peers(&self) -> f64 {
        let joined = || self.states().filter(|state| state.joined());
        // A list that goes around the ring holds every node.
        let whole =
            |state: &&ChordState| state.knows_whole_ring() && !state.successors().is_empty();
        if let Some(state) = joined().find(whole) {
            let all: BTreeSet<PeerId> = state.successors().iter().map(|n| n.peer.id).collect();
            return (all.iter().filter(|id| **id != self.peer.id).count() + 1) as f64;
        }
        let listed: Vec<&Node> = joined().flat_map(|state| state.successors()).collect();
        if listed.is_empty() {
            return 1.0;
        }
        // How many virtual servers each runs, as far as its positions in the lists show.
        let mut runs: BTreeMap<PeerId, u16> = BTreeMap::new();
        for node in &listed {
            let shown = runs.entry(node.peer.id).or_insert(1);
            *shown = (*shown).max(node.virtual_server.index.saturating_add(1));
        }
        for (id, runs) in &mut runs {
            let own = (*id == self.peer.id).then(|| self.count());
            *runs = (*runs).max(own.or(self.admission.servers_of(id)).unwrap_or(1));
        }
        let parts: f64 = listed.iter().map(|node| 1.0 / f64::from(runs[&node.peer.id])).sum();
        (self.estimated_nodes() * parts / listed.len() as f64).max(1.0)
    }
}
