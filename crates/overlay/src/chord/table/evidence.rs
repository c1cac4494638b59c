//! Evidence: which nodes live and which are dead, and by whose word.
//!
//! This node's own observations count at once, and so do its successor lists. The word of others
//! counts less: one peer makes an entry that is not used, a second one makes it sure
//! ([`Trust`]). Deaths are not taken from others, except from the node whose successor the dead one
//! would be.
//!
//! The deaths that are noticed say how old evidence may become
//! ([`Table::acceptable_staleness_secs`]).

use atoll_key::PeerId;

use super::entry::{Entry, place_of};
use super::{DEATH_REMEMBERED_SECS, MAX_DEATHS, Table};
use crate::Node;

/// Evidence may become so old that one in so many nodes has died meanwhile.
const ONE_IN_DEAD: f64 = 20.0;
/// Bounds of the acceptable staleness, seconds. Guesses: a sweep of thousands of nodes takes about
/// the least; in an hour addresses change.
const LEAST_STALENESS_SECS: f64 = 120.0;
const MOST_STALENESS_SECS: f64 = 3600.0;
/// A node probably lives while its evidence is no older than so many times the acceptable
/// staleness: 0.95 to that power is 0.86.
const LIKELY_TIMES: u32 = 3;
/// Lives and deaths are counted over about so many observations. A guess.
const COUNTED_OVER: f64 = 1024.0;

/// One node's word that another one lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// The node.
    pub node: Node,
    /// Second in which it was last known to live.
    pub heard: u32,
}

/// The evidence that makes an entry sure besides this node's own observations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trust {
    /// The word of two peers: where a position follows from the key, any node that answers has it.
    TwoPeers,
    /// Nothing: where it follows from the address, that has to be checked (CFS §4.4).
    OwnChecks,
}

/// How long nodes were seen to live, and how many were found dead.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lifetimes {
    seen_secs: f64,
    deaths: f64,
}

impl Lifetimes {
    /// A node was known to live so long ago; whether it still does was found out now.
    pub(super) fn saw(&mut self, age_secs: u32, has_died: bool) {
        let keep = 1.0 - 1.0 / COUNTED_OVER;
        self.seen_secs = self.seen_secs * keep + f64::from(age_secs);
        self.deaths = self.deaths * keep + f64::from(u8::from(has_died));
    }
}

impl Table {
    /// How old evidence may become, by the share of nodes that die.
    pub(super) fn acceptable_staleness_secs(&self) -> u32 {
        let Lifetimes { seen_secs, deaths } = self.lifetimes;
        let stale = seen_secs / deaths.max(1.0) / ONE_IN_DEAD;
        stale.clamp(LEAST_STALENESS_SECS, MOST_STALENESS_SECS) as u32
    }

    /// Whether an entry's node probably lives: such entries are next hops, are told to others and
    /// keep their slots.
    pub(super) fn is_likely(&self, entry: &Entry, now: u32) -> bool {
        entry.age_secs(now) <= LIKELY_TIMES * self.acceptable_staleness_secs()
    }

    /// A node between those of a successor list that is not in it is dead, or so
    /// new that it will be heard of again.
    pub(super) fn drop_missing(&mut self, place: u64, successors: &[Node], now: u32) {
        let live: Vec<u64> = successors.iter().map(|n| place_of(n.id.key())).collect();
        let Some(last) = live.last() else { return };
        let gone: Vec<u64> = self.places(place, *last).filter(|at| !live.contains(at)).collect();
        gone.into_iter().for_each(|at| self.record_death(at, now));
    }

    /// The node was known to live in second `heard`: by this node's own experience or its successor
    /// list.
    pub(super) fn record_neighbour(&mut self, node: &Node, heard: u32, now: u32) {
        let place = place_of(node.id.key());
        self.deaths.remove(&place);
        match self.entries.get_mut(&place) {
            Some(entry) if *entry.peer_id() == node.peer.id => {
                entry.heard = entry.heard.max(heard);
                entry.moved(node);
                self.make_sure(place);
            }
            _ => {
                self.remove(place);
                self.insert(place, Entry::new(node, heard, None), now);
            }
        }
    }

    /// The node has answered a call that only members of a ring answer, just now.
    pub fn heard(&mut self, node: &Node, now: u32) {
        self.record_neighbour(node, now, now);
    }

    /// The node has answered a call that any peer may answer: it lives. Returns whether it is in
    /// the table, at that address.
    pub fn refreshed(&mut self, node: &Node, now: u32) -> bool {
        match self.entries.get_mut(&place_of(node.id.key())) {
            Some(entry) if entry.peer() == node.peer => {
                entry.heard = entry.heard.max(now);
                true
            }
            _ => false,
        }
    }

    /// The peer has called: it lives. A stranger enters by that no further than by its own word,
    /// and not at all where it would have to be checked.
    pub fn called(&mut self, node: &Node, now: u32) {
        if self.refreshed(node, now) || self.trust == Trust::OwnChecks {
            return;
        }
        let place = place_of(node.id.key());
        // Unless it was found dead this very second.
        if self.deaths.get(&place).is_some_and(|until| *until < now + DEATH_REMEMBERED_SECS) {
            self.deaths.remove(&place);
        }
        self.named(&Evidence { node: *node, heard: now }, &node.peer.id, now);
    }

    /// Takes the given nodes as sure, to begin at rest.
    pub fn prefill(&mut self, known: impl Iterator<Item = Evidence>, bits: u32, now: u32) {
        self.set_bits(bits, now);
        for said in known {
            let place = place_of(said.node.id.key());
            if !self.entries.contains_key(&place) {
                self.insert(place, Entry::new(&said.node, said.heard, None), now);
            }
        }
        // About all that it was given.
        self.coverage = 0.95;
    }

    /// `teller` says that a node lives. Returns whether it is in the table now.
    pub fn named(&mut self, said: &Evidence, teller: &PeerId, now: u32) -> bool {
        let place = place_of(said.node.id.key());
        let heard = said.heard.min(now);
        let teller = short(teller);
        if self.deaths.get(&place).is_some_and(|until| heard <= *until) {
            return false;
        }
        self.deaths.remove(&place);
        let Some(entry) = self.entries.get_mut(&place) else {
            if self.unsure >= self.most_unsure() {
                return false;
            }
            return self.insert(place, Entry::new(&said.node, heard, Some(teller)), now);
        };
        if *entry.peer_id() != said.node.peer.id {
            return false;
        }
        entry.heard = entry.heard.max(heard);
        if entry.teller != teller && self.trust == Trust::TwoPeers {
            self.make_sure(place);
        }
        true
    }

    /// The node could not be checked, and need not be dead: an unsure entry is dropped.
    pub fn drop_unsure(&mut self, node: &Node) {
        let place = place_of(node.id.key());
        if self.entries.get(&place).is_some_and(|entry| !entry.sure) {
            self.remove(place);
        }
    }

    /// The peer did not answer this node: it is out, with all its virtual servers.
    pub fn failed(&mut self, peer: &PeerId, now: u32) {
        let of_peer = self.entries.iter().filter(|(_, entry)| entry.peer_id() == peer);
        let dead: Vec<u64> = of_peer.map(|(place, _)| *place).collect();
        dead.into_iter()
            .for_each(|place| self.record_death(place, now.saturating_add(DEATH_REMEMBERED_SECS)));
    }

    /// A node is dead: others are believed that it lives only if they heard it after this second.
    pub(super) fn record_death(&mut self, place: u64, until: u32) {
        self.remove(place);
        if self.deaths.len() >= MAX_DEATHS && !self.deaths.contains_key(&place) {
            let oldest = self.deaths.iter().min_by_key(|(_, until)| **until).map(|(at, _)| *at);
            oldest.map(|at| self.deaths.remove(&at));
        }
        self.deaths.insert(place, until);
    }
}

/// A peer in short.
fn short(peer: &PeerId) -> u32 {
    let [a, b, c, d, ..] = peer.0;
    u32::from_be_bytes([a, b, c, d])
}
