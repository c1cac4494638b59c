//! Who may enter a node's tables: suspicions, and (CFS §4.4) checks.
//!
//! All virtual servers of a node share one gate. It knows which peers were found dead, or
//! left, not long ago, so that the lists of others, which still name them, do not bring
//! them back. A dead node is dead with all its virtual servers; one that gave up some of
//! them lives on without these.
//!
//! Suspicions are held against a whole card, key and address: a card with another node's
//! key and a wrong address must not discredit the node itself.
//!
//! Plain data; time is an argument.

use std::collections::BTreeMap;

use atoll_env::Instant;
use atoll_net::Peer;

use crate::Node;

/// What is known of a node that somebody names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It may enter the tables.
    Welcome,
    /// It has not been checked: whoever comes after it has to wait for the outcome.
    Unknown,
    /// It was found dead, or gone, or an impostor: as if it were not there.
    Suspected,
}

/// How one asks the gate from inside a table.
pub type Judge<'a> = dyn Fn(&Node) -> Verdict + 'a;

/// The most suspicions of each kind.
pub const MAX_SUSPECTS: usize = 256;

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Gate {
    /// Until when a peer found dead is not believed to live on hearsay.
    dead: BTreeMap<Peer, Instant>,
    /// The same for single virtual servers of peers that live.
    vacant: BTreeMap<Node, Instant>,
}

impl Gate {
    /// What is known of `node`.
    pub fn judge(&self, node: &Node, now: Instant) -> Verdict {
        if self.is_suspected(node, now) { Verdict::Suspected } else { Verdict::Welcome }
    }

    /// Whether the node, or its peer as a whole, was found dead not long ago.
    pub fn is_suspected(&self, node: &Node, now: Instant) -> bool {
        let holds = |until: Option<&Instant>| until.is_some_and(|until| now < *until);
        holds(self.dead.get(&node.peer)) || holds(self.vacant.get(node))
    }

    /// A peer is dead, or has left, with all its virtual servers.
    pub fn suspect_peer(&mut self, peer: Peer, until: Instant) {
        insert_bounded(&mut self.dead, peer, until);
    }

    /// A peer no longer runs one of its virtual servers.
    pub fn suspect_node(&mut self, node: Node, until: Instant) {
        insert_bounded(&mut self.vacant, node, until);
    }

    /// The node has answered: it lives.
    pub fn unsuspect(&mut self, node: &Node) {
        self.dead.remove(&node.peer);
        self.vacant.remove(node);
    }

    /// Forgets suspicions that have run out.
    pub fn expire(&mut self, now: Instant) {
        self.dead.retain(|_, until| now < *until);
        self.vacant.retain(|_, until| now < *until);
    }

    /// Panics with a description if a bound is broken.
    pub fn check_invariants(&self) {
        assert!(self.dead.len() <= MAX_SUSPECTS, "everybody is suspected");
        assert!(self.vacant.len() <= MAX_SUSPECTS, "everybody is suspected");
    }
}

/// Makes room by dropping what runs out soonest.
fn insert_bounded<K: Ord + Copy>(map: &mut BTreeMap<K, Instant>, key: K, until: Instant) {
    if map.len() >= MAX_SUSPECTS && !map.contains_key(&key) {
        let soonest = map.iter().min_by_key(|(_, until)| **until).map(|(key, _)| *key);
        if let Some(soonest) = soonest {
            map.remove(&soonest);
        }
    }
    map.insert(key, until);
}
