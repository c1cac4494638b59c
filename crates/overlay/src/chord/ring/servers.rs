//! The virtual servers of one node and their shared state (CFS §5.3).
//!
//! Each virtual server is a [`ChordState`] of its own: position, predecessor, successor
//! list. Suspicions and checks are the node's ([`PeerAdmission`]), and so is the death of another
//! node, which takes all of that node's virtual servers with it. Routes come from all
//! tables together ([`routing`]), so that lookups take no more hops than with one
//! position a node.
//!
//! Epochs are shared too: a change to any neighbourhood takes the node's next one, so the
//! epoch of a neighbourhood says when it last changed, and the node's that of the last
//! change of all.
//!
//! Invariants ([`Servers::check_invariants`]): indices are 0, 1, 2 …, all of this node; no node
//! in any table is suspected; every state's own invariants.
//!
//! Plain data: no clock, no network, no task.

mod changes;
mod estimate;
mod moved;
mod rounds;

use std::collections::BTreeSet;

use atoll_env::Instant;
use atoll_key::{IdProfile, Key, PeerId};
use atoll_net::Peer;

use crate::chord::messages::Doubt;
use crate::chord::ring::list::ListLength;
use crate::chord::ring::routing;
use crate::chord::ring::state::{ChordState, Told};
use crate::chord::trust::admission::{Judge, PeerAdmission, Rules, Verdict};
use crate::chord::trust::audit_schedule::AuditSchedule;
use crate::{Neighbourhood, Node, Route, VirtualServerId};
pub use changes::News;
pub use rounds::{AfterAnswer, SuccessorAnswer};

/// One ring position and the state of its maintenance.
#[derive(Clone, Debug)]
pub struct VirtualServer {
    /// Its tables.
    pub state: ChordState,
    /// The surroundings whose change was last announced, and their epoch.
    published: Told,
    published_epoch: u64,
    /// The successor whose list ours was last rebuilt from, its epoch and ours then.
    pub(in crate::chord) seen: Option<(Node, u64, u64)>,
    /// The successor's doubt about this node's key and address, as it said last.
    pub(in crate::chord) doubt: Option<Doubt>,
    /// The surroundings that the successor told, if some nodes in them were not checked then.
    waiting: Option<(Node, Told)>,
    /// The last entry of a list too short, the node that says it follows, and since when.
    continuation: Option<(Node, Node, Instant)>,
    /// When the list is cross-checked next.
    pub(in crate::chord) audits: AuditSchedule,
    /// When the predecessor was last heard as such.
    pub(in crate::chord) predecessor_heard: Instant,
    /// When a neighbour last confirmed this place; see [`crate::Overlay::unconfirmed_for`].
    confirmed: Option<Instant>,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Servers {
    peer: Peer,
    profile: IdProfile,
    length: ListLength,
    servers: Vec<VirtualServer>,
    epoch: u64,
    /// Which nodes may enter the tables.
    pub admission: PeerAdmission,
}

/// How this node judges others, and itself.
#[derive(Clone, Copy)]
struct Judgement {
    peer: Peer,
    count: u16,
    now: Instant,
}

impl Judgement {
    fn of(self, admission: &PeerAdmission, node: &Node) -> Verdict {
        if node.peer.id != self.peer.id {
            return admission.judge(node, self.now);
        }
        // A node knows itself.
        let runs = node.peer == self.peer && node.virtual_server.index < self.count;
        if runs && admission.is_possible(node) { Verdict::Welcome } else { Verdict::Suspected }
    }
}

impl Servers {
    /// `count` virtual servers on no ring yet, whose epochs start at `epoch`.
    ///
    /// # Panics
    /// If `count` is zero.
    pub fn new(peer: Peer, count: u16, rules: Rules, length: ListLength, epoch: u64) -> Servers {
        let profile = rules.profile;
        let state = |index| {
            ChordState::new(Node::at(peer, VirtualServerId { profile, index }), length, epoch)
        };
        Servers::of((0..count).map(state).collect(), rules, length, Instant::default())
    }

    /// With tables that exist already, one for each virtual server in order. All nodes in them
    /// count as checked at `now`, with as many virtual servers as this node, and this node's
    /// places on the ring as confirmed.
    ///
    /// # Panics
    /// If there are none, or their indices are not 0, 1, 2 … of one node and profile.
    pub fn of(states: Vec<ChordState>, rules: Rules, length: ListLength, now: Instant) -> Servers {
        let first = states.first().expect("a node has a virtual server").me();
        let epoch = states.iter().map(ChordState::epoch).max().unwrap_or(0);
        let mut servers = Servers {
            peer: first.peer,
            profile: first.virtual_server.profile,
            length,
            servers: Vec::new(),
            epoch,
            admission: PeerAdmission::new(rules),
        };
        for mut state in states {
            assert_eq!(
                state.me(),
                servers.position(servers.count()),
                "virtual servers come in order"
            );
            state.set_length(length);
            servers.push(state);
        }
        let on_ring = servers.servers.iter_mut().filter(|server| server.state.joined());
        on_ring.for_each(|server| server.confirmed = Some(now));
        let count = servers.count();
        for node in servers.known() {
            let seen = servers.admission.servers_of(&node.peer.id).unwrap_or(count);
            servers.admission.admit(node.peer, seen.max(node.virtual_server.index + 1), now);
        }
        servers
    }

    fn push(&mut self, state: ChordState) {
        self.servers.push(VirtualServer {
            published: state.told(),
            published_epoch: state.epoch(),
            state,
            seen: None,
            doubt: None,
            waiting: None,
            continuation: None,
            audits: AuditSchedule::default(),
            predecessor_heard: Instant::default(),
            confirmed: None,
        });
    }

    // --- questions --------------------------------------------------------------------

    /// How many.
    pub fn count(&self) -> u16 {
        u16::try_from(self.servers.len()).expect("there are at most MAX_VIRTUAL_SERVERS")
    }

    /// The ring position of this node's virtual server `index`, whether it runs or not.
    pub fn position(&self, index: u16) -> Node {
        Node::at(self.peer, VirtualServerId { profile: self.profile, index })
    }

    /// Virtual server `index`, if it runs.
    pub fn server(&self, index: u16) -> Option<&VirtualServer> {
        self.servers.get(usize::from(index))
    }

    pub(in crate::chord) fn server_mut(&mut self, index: u16) -> Option<&mut VirtualServer> {
        self.servers.get_mut(usize::from(index))
    }

    /// The tables of virtual server `index`, if it runs.
    pub fn state(&self, index: u16) -> Option<&ChordState> {
        self.server(index).map(|server| &server.state)
    }

    /// The tables of all virtual servers, by index.
    pub fn states(&self) -> impl Iterator<Item = &ChordState> + Clone {
        self.servers.iter().map(|server| &server.state)
    }

    /// The peer address was found right, and its node runs so many virtual servers. No node in the
    /// tables is forgotten for it; its own entries there have this address from now on.
    pub fn admit(&mut self, peer: Peer, servers: u16, now: Instant) {
        if self.admission.is_full_for(&peer.id) {
            let known: BTreeSet<PeerId> =
                self.known().into_iter().map(|node| node.peer.id).collect();
            self.admission.make_room(&|id| known.contains(id));
        }
        self.admission.admit(peer, servers, now);
        self.relocate(peer);
    }

    /// Which of this node's virtual servers `node` is.
    pub fn own(&self, node: &Node) -> Option<u16> {
        let index = node.virtual_server.index;
        let is_own = node.peer == self.peer && node.virtual_server.profile == self.profile;
        (is_own && index < self.count()).then_some(index)
    }

    /// Changes whenever any neighbourhood does; see [`crate::Overlay::epoch`].
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether any virtual server is on a ring.
    pub fn joined(&self) -> bool {
        self.states().any(ChordState::joined)
    }

    /// Whether no other node is in any successor list.
    pub fn is_alone(&self) -> bool {
        let other = |node: &Node| node.peer.id != self.peer.id;
        !self.states().any(|state| state.successors().iter().any(other))
    }

    /// The surroundings of each.
    pub fn neighbourhoods(&self) -> Vec<Neighbourhood> {
        self.states().map(ChordState::neighbourhood).collect()
    }

    /// Every node in any table, each once; this node's own virtual servers among them.
    pub fn known(&self) -> Vec<Node> {
        let mut known: Vec<Node> = self.states().flat_map(ChordState::nodes).collect();
        known.sort_unstable();
        known.dedup();
        known
    }

    /// Where to ask next for `key`; see [`crate::Overlay::route`].
    pub fn route(&self, key: &Key, as_root: bool) -> Route {
        routing::route(self.states(), key, as_root)
    }

    /// The nearest other node known before `key`, if it is nearer than this node.
    pub fn preceding(&self, key: &Key) -> Option<Node> {
        routing::closer(self.states(), key).first().copied()
    }

    /// The virtual server before whose first successor `node` would belong.
    pub fn would_adopt(&self, node: &Node) -> Option<u16> {
        let adopts = |index: &u16| self.state(*index).is_some_and(|s| s.would_adopt(&node.id));
        (0..self.count()).find(adopts)
    }

    // --- changes ----------------------------------------------------------------------

    /// Changes the tables of one virtual server, which sees which nodes it may take in. `None` if
    /// it does not run.
    pub fn with<R>(
        &mut self,
        index: u16,
        now: Instant,
        change: impl FnOnce(&mut ChordState, &Judge<'_>) -> R,
    ) -> Option<R> {
        self.admission.expire(now);
        let judge = Judgement { peer: self.peer, count: self.count(), now };
        let Servers { servers, admission, .. } = self;
        let server = servers.get_mut(usize::from(index))?;
        Some(change(&mut server.state, &|node| judge.of(admission, node)))
    }

    /// Whether `node`, which may be this node's own, may enter the tables.
    pub fn judge(&self, node: &Node, now: Instant) -> Verdict {
        Judgement { peer: self.peer, count: self.count(), now }.of(&self.admission, node)
    }

    /// Makes a ring of this node's virtual servers alone.
    pub fn create(&mut self) {
        if self.joined() {
            return;
        }
        let mut ring: Vec<Node> = (0..self.count()).map(|index| self.position(index)).collect();
        ring.sort_unstable_by_key(|node| node.id);
        for server in &mut self.servers {
            let epoch = server.state.epoch();
            server.state = ChordState::perfect(server.state.me(), &ring, self.length);
            server.state.set_epoch(epoch + 1);
        }
    }

    /// Forgets nodes that are gone, in all tables.
    pub fn forget(&mut self, gone: &dyn Fn(&Node) -> bool) {
        for server in &mut self.servers {
            server.state.forget(gone);
        }
        self.fall_back();
    }

    /// A virtual server that has lost all successors goes on from the nodes that the others know,
    /// themselves included.
    fn fall_back(&mut self) {
        let is_lost = |state: &ChordState| state.joined() && state.successors().is_empty();
        if self.servers.len() < 2 || !self.states().any(is_lost) {
            return;
        }
        let mut others = self.known();
        others.extend(self.states().filter(|s| s.joined()).map(ChordState::me));
        for server in self.servers.iter_mut().filter(|server| is_lost(&server.state)) {
            server.state.fall_back(&others);
        }
    }

    /// A virtual server that has lost all successors goes on from one of these that may enter its
    /// tables.
    pub fn fall_back_on(&mut self, known: &[Node], now: Instant) {
        for index in 0..self.count() {
            self.with(index, now, |state, judge| {
                let welcome: Vec<Node> =
                    known.iter().filter(|node| judge(node) == Verdict::Welcome).copied().collect();
                state.fall_back(&welcome);
            });
        }
    }

    /// Adds virtual servers on no ring yet, until there are `count`.
    pub fn grow(&mut self, count: u16) {
        while self.count() < count {
            let state = ChordState::new(self.position(self.count()), self.length, self.epoch);
            self.push(state);
            self.epoch += 1;
        }
    }

    /// Gives up the last virtual server, unless it is the only one. Returns it with its
    /// surroundings.
    pub fn shrink(&mut self) -> Option<(Node, Told)> {
        if self.servers.len() < 2 {
            return None;
        }
        let gone = self.servers.pop()?;
        self.epoch += 1;
        let (me, told) = (gone.state.me(), gone.state.told());
        if gone.state.joined() {
            self.neighbour_left(&me, &told, &|node| node.id == me.id, Instant::default());
        }
        Some((me, told))
    }

    /// `leaver` has left in good order, and with it all nodes that are `gone`.
    pub fn neighbour_left(
        &mut self,
        leaver: &Node,
        told: &Told,
        gone: &dyn Fn(&Node) -> bool,
        now: Instant,
    ) {
        for index in 0..self.count() {
            self.with(index, now, |state, judge| state.left(leaver, told, gone, judge));
        }
        self.fall_back();
    }

    /// Leaves the ring with all virtual servers.
    pub fn leave(&mut self) {
        for server in &mut self.servers {
            server.state.leave();
            (server.seen, server.doubt, server.waiting) = (None, None, None);
            (server.audits, server.continuation) = (AuditSchedule::default(), None);
            server.confirmed = None;
        }
    }

    /// Panics with a description if an invariant of the module does not hold.
    pub fn check_invariants(&self, now: Instant) {
        for (index, state) in self.states().enumerate() {
            state.check_invariants();
            assert_eq!(
                usize::from(state.me().virtual_server.index),
                index,
                "virtual servers are in order"
            );
            for node in state.nodes() {
                let me = state.me();
                let is_suspected = self.judge(&node, now) == Verdict::Suspected;
                assert!(!is_suspected, "{me:?}: {node:?} is dead, impossible here or does not run");
            }
        }
        self.admission.check_invariants();
    }
}
