//! Evidence: which nodes live and which are dead, and by whose word.
//!
//! What this node has seen for itself counts at once, and so do its successor lists. What others
//! say is limited: one voice makes an entry that is not used, a second one makes it sure
//! ([`Trust`]); one voice that calls a node dead makes it less wanted, a second one removes it.

use atoll_key::PeerId;

use super::entry::{Entry, place_of};
use super::{GRAVE_SECS, MAX_GRAVES, Table};
use crate::Node;

/// A node that has died.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grave {
    pub died: u32,
    pub tag: [u8; 3],
    /// Whether only others have found it dead.
    is_told: bool,
}

impl Grave {
    /// Whether it speaks against evidence that the node lived in that second.
    fn outweighs(&self, heard: u32, now: u32) -> bool {
        heard <= self.died || (!self.is_told && now < self.died.saturating_add(GRAVE_SECS))
    }
}

/// What a node tells of another one that lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// The node.
    pub node: Node,
    /// Second in which it was last known to live.
    pub heard: u32,
    /// Second since which it lives, if that is known.
    pub since: Option<u32>,
}

/// What makes an entry sure besides this node's own experience.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trust {
    /// The word of two peers: where a position follows from the key, any node that answers has it.
    TwoPeers,
    /// Nothing: where it follows from the address, that has to be checked (CFS §4.4).
    OwnChecks,
}

impl Table {
    /// A node between those of a successor list that is not in it is dead, or so
    /// new that it will be heard of again.
    pub(super) fn mourn(&mut self, place: u64, successors: &[Node], now: u32) {
        let live: Vec<u64> = successors.iter().map(|n| place_of(n.id.key())).collect();
        let Some(last) = live.last() else { return };
        let gone: Vec<(u64, [u8; 3])> = self
            .places(place, *last)
            .filter(|at| !live.contains(at))
            .map(|at| (at, self.entries[&at].tag()))
            .collect();
        for (at, tag) in gone {
            self.remove(at);
            self.bury(at, Grave { died: now, tag, is_told: true });
        }
    }

    pub(super) fn record_neighbour(&mut self, node: &Node, heard: u32, now: u32) {
        let place = place_of(node.id.key());
        self.graves.remove(&place);
        match self.entries.get_mut(&place) {
            Some(entry) if *entry.peer_id() == node.peer.id => {
                entry.heard = entry.heard.max(heard);
                entry.doubter = 0;
                entry.moved(node);
                self.make_sure(place);
            }
            _ => {
                self.remove(place);
                let mut entry = Entry::new(node, heard, None);
                entry.sure = true;
                self.insert(place, entry, now);
            }
        }
    }

    // --- evidence ---------------------------------------------------------------------

    /// The node has answered a call that only members of a ring answer, just now.
    pub fn heard(&mut self, node: &Node, now: u32) {
        self.record_neighbour(node, now, now);
    }

    /// The peer has called, or answered what anybody may: it lives. A stranger enters by that
    /// no further than by its own word.
    pub fn called(&mut self, node: &Node, now: u32) {
        if !self.refreshed(node, now) {
            let place = place_of(node.id.key());
            if self.graves.get(&place).is_some_and(|grave| grave.died < now) {
                self.graves.remove(&place);
            }
            let said = Evidence { node: *node, heard: now, since: None };
            self.named(&said, &node.peer.id, now);
        }
    }

    /// The node lives. Returns whether it is in the table, at that address.
    pub fn refreshed(&mut self, node: &Node, now: u32) -> bool {
        match self.entries.get_mut(&place_of(node.id.key())) {
            Some(entry) if entry.peer() == node.peer => {
                Table::confirm(entry, now);
                true
            }
            _ => false,
        }
    }

    /// Takes what is given as true, to begin at rest. `since` is when this node started.
    pub fn prefill(
        &mut self,
        known: impl Iterator<Item = Evidence>,
        since: u32,
        bits: u32,
        now: u32,
    ) {
        self.since = since;
        self.has_begun = true;
        self.set_bits(bits, now);
        let mut count = 0usize;
        for said in known {
            let place = place_of(said.node.id.key());
            let mut entry = Entry::new(&said.node, said.heard, said.since);
            entry.sure = true;
            self.sweeps.met(entry.up_secs());
            if !self.entries.contains_key(&place) && self.insert(place, entry, now) {
                count += 1;
            } else if let (Some(entry), Some(since)) = (self.entries.get_mut(&place), said.since) {
                entry.since = since.min(entry.heard);
                entry.is_dated = true;
            }
        }
        // As good as what it was given.
        self.coverage = if count > 0 { 0.95 } else { self.coverage };
    }

    /// The node says of itself that it runs for so long.
    pub(super) fn said_up(&mut self, node: &Node, up_secs: u32, now: u32) {
        if let Some(entry) = self.entries.get_mut(&place_of(node.id.key())) {
            entry.since = now.saturating_sub(up_secs).min(entry.heard);
            entry.is_dated = true;
        }
    }

    /// `teller` says that a node lives. Returns whether it is in the table now.
    pub fn named(&mut self, said: &Evidence, teller: &PeerId, now: u32) -> bool {
        let place = place_of(said.node.id.key());
        let heard = said.heard.min(now);
        let teller = short(teller);
        if self.graves.get(&place).is_some_and(|grave| grave.outweighs(heard, now)) {
            return false;
        }
        self.graves.remove(&place);
        let Some(entry) = self.entries.get_mut(&place) else {
            if self.unsure >= self.most_unsure() {
                return false;
            }
            let mut entry = Entry::new(&said.node, heard, said.since);
            entry.teller = teller;
            return self.insert(place, entry, now);
        };
        if *entry.peer_id() != said.node.peer.id {
            return false;
        }
        Table::confirm(entry, heard);
        if let Some(since) = said.since {
            // The first to say is believed, and who says much less: nobody is to win by
            // claiming more. Small differences are rounding.
            let up = said.heard.saturating_sub(since);
            if !entry.is_dated || up < entry.up_secs() / 2 {
                entry.since = since.min(entry.heard);
                entry.is_dated = true;
            }
        }
        if !entry.sure && entry.teller != teller && self.trust == Trust::TwoPeers {
            self.make_sure(place);
        }
        true
    }

    fn confirm(entry: &mut Entry, heard: u32) {
        entry.heard = entry.heard.max(heard);
        if entry.doubter != 0 && heard > entry.doubted {
            entry.doubter = 0;
        }
    }

    /// `teller` says that the node at `place` was dead in second `died`. Evidence of life
    /// from later stands against it. The word of two is enough to drop the node, and that of
    /// one whose successor it would be.
    pub(super) fn doubt(&mut self, place: u64, died: u32, teller: &PeerId, is_neighbour: bool) {
        let teller = short(teller);
        let Some(entry) = self.entries.get_mut(&place) else { return };
        if entry.heard >= died {
            return;
        }
        if is_neighbour || !(entry.doubter == 0 || entry.doubter == teller) {
            let tag = entry.tag();
            self.remove(place);
            self.bury(place, Grave { died, tag, is_told: true });
        } else {
            (entry.doubter, entry.doubted) = (teller, died);
        }
    }

    /// The node could not be checked, and need not be dead: what is only hearsay goes.
    pub fn not_borne_out(&mut self, node: &Node) {
        let place = place_of(node.id.key());
        if self.entries.get(&place).is_some_and(|entry| !entry.sure) {
            self.remove(place);
        }
    }

    /// The peer did not answer this node: it is out, with all its virtual servers.
    pub fn failed(&mut self, peer: &PeerId, now: u32) {
        let dead: Vec<(u64, [u8; 3])> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.peer_id() == peer)
            .map(|(place, entry)| (*place, entry.tag()))
            .collect();
        for (place, tag) in dead {
            self.remove(place);
            self.bury(place, Grave { died: now, tag, is_told: false });
        }
    }

    pub(super) fn bury(&mut self, place: u64, grave: Grave) {
        if self.graves.len() >= MAX_GRAVES && !self.graves.contains_key(&place) {
            let oldest = self.graves.iter().min_by_key(|(_, grave)| grave.died).map(|(at, _)| *at);
            oldest.map(|at| self.graves.remove(&at));
        }
        self.graves.insert(place, grave);
    }
}

/// A peer in short, never 0.
fn short(peer: &PeerId) -> u32 {
    let [a, b, c, d, ..] = peer.0;
    u32::from_be_bytes([a, b, c, d]).max(1)
}
