//! The memory that all routes of one walk share: which nodes were asked, which answered, which are
//! dead, and the nodes known after the key. Plain data.

use std::collections::{BTreeMap, BTreeSet};

use atoll_env::Instant;
use atoll_key::{Key, PeerId};
use atoll_net::Peer;

use super::{Trace, WalkLimits};
use crate::peer_book::{Misdeed, Standing};
use crate::{Node, Overlay};

/// The longest root list believed: more than any replica set, less than a flood.
pub(super) const MAX_ROOTS_TAKEN: usize = 64;

/// A distance, and the node at it: of two peer addresses with one key, one may be false.
pub(super) type Place = (Key, Peer);

/// Whether and when the walk looks into this node's own tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OwnTable {
    /// This node is not on the ring that is walked.
    NotUsed,
    Unread,
    /// Read when so many nodes had failed; worth reading again after further failures.
    ReadAfterFailures(usize),
}

impl OwnTable {
    /// Whether reading it may bring something new, now that so many nodes have failed.
    pub(super) fn is_worth_reading(self, failures: usize) -> bool {
        match self {
            OwnTable::NotUsed => false,
            OwnTable::Unread => true,
            OwnTable::ReadAfterFailures(then) => then < failures,
        }
    }
}

/// See the module.
pub(super) struct Memory<'w> {
    pub key: Key,
    pub me: Node,
    pub overlay: &'w dyn Overlay,
    /// The time when the walker last looked.
    pub now: Instant,
    pub limits: WalkLimits,
    pub questions: usize,
    /// About how many nodes are on the ring.
    pub nodes: f64,
    /// How long successor lists are. As a rule half as many nodes before a root know it.
    pub list_length: f64,
    /// The questions asked, by peer: all virtual servers of a node know the same.
    /// By key and address: a false address must not stand in the way of the right one.
    pub asked: BTreeSet<(Peer, bool)>,
    /// Nodes that gave no answer or refused one.
    pub failed: BTreeSet<Peer>,
    /// Those of them that may be dead.
    pub dead: Vec<Peer>,
    /// Nodes that others named, and that left a call of this node unanswered of late.
    pub presumed_dead: BTreeSet<Peer>,
    /// Nodes that said they are the root, with the successors they told, or were found to be
    /// the first live one; by their distance after the key.
    pub root_claims: BTreeMap<Key, (Node, Option<Vec<Node>>)>,
    /// Nodes after the key that answered or were named.
    pub roots_known: BTreeMap<Place, Node>,
    /// The nodes that each peer named, to tell which peers are worth believing.
    pub named: BTreeMap<PeerId, Vec<Peer>>,
    pub misdeeds: Vec<(PeerId, Misdeed)>,
    pub failure_reports: usize,
    pub own_table: OwnTable,
    /// Peers that named nodes as a key's root and its successors that are too far apart for
    /// that, and where the first of them is.
    pub doubted: Vec<(PeerId, Key)>,
    pub trace: Trace,
}

impl<'w> Memory<'w> {
    pub(super) fn new(key: Key, overlay: &'w dyn Overlay, limits: WalkLimits) -> Memory<'w> {
        let neighbourhood = overlay.neighbourhood();
        Memory {
            key,
            me: neighbourhood.me,
            overlay,
            now: Instant::default(),
            limits,
            questions: 0,
            nodes: overlay.estimated_nodes(),
            list_length: neighbourhood.successors.len() as f64,
            asked: BTreeSet::new(),
            failed: BTreeSet::new(),
            dead: Vec::new(),
            presumed_dead: BTreeSet::new(),
            root_claims: BTreeMap::new(),
            roots_known: BTreeMap::new(),
            named: BTreeMap::new(),
            misdeeds: Vec::new(),
            failure_reports: 0,
            own_table: OwnTable::NotUsed,
            doubted: Vec::new(),
            trace: Trace::default(),
        }
    }

    pub(super) fn distance_before(&self, node: &Node) -> Key {
        self.key.distance_from(node.id.key())
    }

    pub(super) fn distance_after(&self, node: &Node) -> Key {
        node.id.key().distance_from(&self.key)
    }

    /// Whether this node has lied so often of late that others are asked first.
    pub(super) fn is_avoided(&self, node: &Node) -> bool {
        self.overlay.peer_book().is_avoided(&node.peer.id, self.now)
    }

    pub(super) fn standing(&self, node: &Node) -> Standing {
        self.overlay.peer_book().standing(&node.peer, self.now)
    }

    /// Whether a call to the node was left unanswered of late, by this walk or another, so
    /// that it is as if it were not there while others are. A node that is merely slow still is the
    /// root, if the walk looks for the root.
    pub(super) fn seems_dead(&self, node: &Node) -> bool {
        match self.standing(node) {
            Standing::Answers => false,
            Standing::Late => self.limits.replicas > 0,
            Standing::Silent => true,
        }
    }
}
