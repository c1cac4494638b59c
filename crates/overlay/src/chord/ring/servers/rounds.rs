//! The changes that an answer or a call of a neighbour makes (Zave: stabilize and rectify). The
//! checks and pings that follow are returned; the driver makes them.

use std::time::Duration;

use atoll_env::Instant;
use atoll_key::PeerId;

use super::Servers;
use crate::Node;
use crate::chord::messages::Doubt;
use crate::chord::ring::state::{ChordState, Claim, Told};
use crate::chord::trust::admission::{Judge, Verdict};

/// How long a list must have been too short, and the same node have said that it follows the last
/// entry, before that node continues it: a node that has just joined may not know its predecessor
/// yet. A guess: some rounds of stabilising.
const SHORT_FOR: Duration = Duration::from_secs(8);

/// The answer of a virtual server's first successor to `NOTIFY`.
#[derive(Clone, Debug)]
pub struct SuccessorAnswer {
    /// The epoch of its surroundings.
    pub epoch: u64,
    /// Its predecessor.
    pub predecessor: Option<Node>,
    /// Its list, unless it has not changed since the epoch that was seen last.
    pub successors: Option<Vec<Node>>,
    /// Whether it believes that this node is where it says.
    pub doubt: Option<Doubt>,
}

/// The calls to make after an answer of the first successor.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AfterAnswer {
    /// A node that may be a nearer successor: to be asked.
    pub newer: Option<Node>,
    /// Nodes it named that were never checked: to be checked.
    pub unknown: Vec<Node>,
}

impl Servers {
    /// `head`, the first successor of virtual server `index`, has answered: rebuilds the list from
    /// its list (Zave's *stabilize*).
    pub fn take_in(
        &mut self,
        index: u16,
        head: &Node,
        answer: SuccessorAnswer,
        now: Instant,
    ) -> AfterAnswer {
        let SuccessorAnswer { epoch, predecessor, successors, doubt } = answer;
        if let Some(server) = self.server_mut(index) {
            server.doubt = doubt;
            let is_followed = predecessor.is_some_and(|node| node.id == server.state.me().id);
            if is_followed && server.state.predecessor().is_none() {
                server.confirmed = Some(now);
            }
        }
        let Some(successors) = successors else {
            let newer = |state: &mut ChordState, judge: &Judge<'_>| {
                state.newer_successor(predecessor, judge)
            };
            let newer = self.with(index, now, newer).flatten();
            return AfterAnswer { newer, ..AfterAnswer::default() };
        };
        let told = Told { predecessor, successors };
        let newer = self.with(index, now, |state, judge| state.stabilize(head, &told, judge));
        let unknown = self.keep_waiting(index, *head, told, now);
        if let Some(server) = self.server_mut(index) {
            server.seen = Some((*head, epoch, server.state.epoch()));
        }
        AfterAnswer { newer: newer.flatten(), unknown }
    }

    /// `head`, the first successor of virtual server `index`, has told its surroundings. They are
    /// kept until all nodes in them have been checked. Returns the unchecked nodes.
    pub fn keep_waiting(&mut self, index: u16, head: Node, told: Told, now: Instant) -> Vec<Node> {
        let unknown: Vec<Node> = told
            .successors
            .iter()
            .filter(|node| self.judge(node, now) == Verdict::Unknown)
            .copied()
            .collect();
        if let Some(server) = self.server_mut(index) {
            server.waiting = (!unknown.is_empty()).then_some((head, told));
        }
        unknown
    }

    /// The corroborated nodes of all lists.
    pub fn corroborated(&self) -> Vec<Node> {
        self.states().flat_map(|state| state.corroborated()).copied().collect()
    }

    /// `node` has told its surroundings. Returns whether it is the node that may continue a list
    /// too short; once it has been that for [`SHORT_FOR`], the list is continued.
    pub(in crate::chord) fn continue_list(
        &mut self,
        index: u16,
        node: &Node,
        told: &Told,
        now: Instant,
    ) -> bool {
        let Some(server) = self.server_mut(index) else { return false };
        if !server.state.is_continued_by(node, told) {
            return false;
        }
        let last = server.state.successors().last().copied();
        let since = match server.continuation {
            Some((end, by, since)) if Some(end) == last && by == *node => since,
            _ => now,
        };
        server.continuation = last.map(|end| (end, *node, since));
        if now.since(since) >= SHORT_FOR {
            self.with(index, now, |state, judge| {
                if judge(node) == Verdict::Welcome {
                    state.continue_with(*node, told, judge);
                }
            });
        }
        true
    }

    /// Zave's *rectify*: `claimant` takes virtual server `index` for its successor. Returns a
    /// predecessor to be pinged: only if it is dead may the claimant replace it. One heard of in
    /// the last `recently` is taken to live.
    pub fn rectify(
        &mut self,
        index: u16,
        claimant: Node,
        now: Instant,
        recently: Duration,
    ) -> Option<Node> {
        self.predecessor_lives(index, &claimant, now);
        // One that is known and suspected has been pinged since it called.
        let claim = self.with(index, now, |state, judge| {
            (judge(&claimant) == Verdict::Welcome).then(|| state.notified(claimant))
        });
        if let Some(server) = self.server_mut(index)
            && server.state.predecessor() == Some(claimant)
        {
            server.confirmed = Some(now);
        }
        let Some(Some(Claim::Nearer(present))) = claim else { return None };
        let heard = self.server(index)?.predecessor_heard;
        let is_own = present.peer.id == self.peer.id;
        (!is_own && now.since(heard) > recently).then_some(present)
    }

    /// `node` has called or answered: if it is the predecessor of virtual server `index`, that
    /// one lives.
    pub fn predecessor_lives(&mut self, index: u16, node: &Node, now: Instant) {
        if let Some(server) = self.server_mut(index)
            && server.state.predecessor().is_some_and(|p| p.id == node.id)
        {
            server.predecessor_heard = now;
        }
    }

    /// See [`crate::Overlay::unconfirmed_for`].
    pub fn unconfirmed_for(&self, own: &Node, now: Instant) -> Duration {
        let server = self.own(own).and_then(|index| self.server(index));
        let Some(server) = server.filter(|server| server.state.joined()) else {
            return Duration::MAX;
        };
        match server.state.predecessor().or(server.state.head()) {
            Some(node) if node.peer.id != self.peer.id => {
                server.confirmed.map_or(Duration::MAX, |at| now.since(at))
            }
            _ => Duration::ZERO,
        }
    }

    /// Takes in again the lists that had to wait. Returns the nodes that are still unchecked, with
    /// the peer that named them.
    pub fn take_waiting(&mut self, now: Instant) -> Vec<(PeerId, Vec<Node>)> {
        let mut unknown = Vec::new();
        for index in 0..self.count() {
            let waiting = self.server_mut(index).and_then(|server| server.waiting.take());
            let Some((head, told)) = waiting else { continue };
            let is_head = self.state(index).and_then(ChordState::head) == Some(head);
            if is_head {
                self.with(index, now, |state, judge| state.stabilize(&head, &told, judge));
                unknown.push((head.peer.id, self.keep_waiting(index, head, told, now)));
            }
        }
        unknown
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use atoll_net::Peer;

    use super::*;
    use crate::chord::trust::admission::Rules;

    #[test]
    fn a_place_is_confirmed_by_the_calls_and_the_word_of_neighbours_alone() {
        let now = |secs: u64| Instant::default() + Duration::from_secs(secs);
        let peer = |n: u8| {
            let addr = SocketAddr::from((Ipv4Addr::new(10, 77, 0, n), 7000));
            Peer { id: PeerId([n; 32]), addr }
        };
        let mut servers = Servers::new(peer(1), 1, Rules::default(), 4.into(), 0);
        let own = servers.position(0);
        let unconfirmed = |servers: &Servers, secs| servers.unconfirmed_for(&own, now(secs));
        let secs = Duration::from_secs;
        let mut others = [2, 3].map(|n| Node::of(peer(n)));
        others.iter().for_each(|node| servers.admit(node.peer, 1, now(5)));
        others.sort_unstable_by_key(|node| node.id.key().distance_from(own.id.key()));
        let [after, before] = others;
        let told = Told { predecessor: Some(before), successors: vec![before] };
        servers.with(0, now(5), |state, judge| state.join(after, &told, judge));
        servers.settle(now(5));
        let state = servers.state(0).expect("it runs");
        assert_eq!((state.head(), state.predecessor()), (Some(after), Some(before)));
        assert_eq!(unconfirmed(&servers, 5), Duration::MAX, "its neighbours were only told to it");
        servers.rectify(0, before, now(6), secs(1));
        assert_eq!(unconfirmed(&servers, 14), secs(8));
        // The predecessor answers its pings, and stabilises with another node.
        let answer = |predecessor| {
            let (epoch, successors) = (1, Some(Vec::new()));
            SuccessorAnswer { epoch, predecessor, successors, doubt: None }
        };
        servers.predecessor_lives(0, &before, now(16));
        servers.take_in(0, &after, answer(Some(own)), now(16));
        assert_eq!(unconfirmed(&servers, 16), secs(10));
        servers.rectify(0, before, now(17), secs(1));
        assert_eq!(unconfirmed(&servers, 26), secs(9));
        // It is out of reach. The successor may take another node for its predecessor.
        servers.forget(&|node| *node == before);
        servers.settle(now(30));
        assert_eq!(unconfirmed(&servers, 30), secs(13), "that it is lost confirms nothing");
        servers.take_in(0, &after, answer(Some(before)), now(39));
        assert_eq!(unconfirmed(&servers, 39), secs(22));
        servers.take_in(0, &after, answer(Some(own)), now(41));
        assert_eq!(unconfirmed(&servers, 50), secs(9));
        // A node that becomes its predecessor by calling it.
        servers.rectify(0, before, now(55), secs(1));
        assert_eq!(unconfirmed(&servers, 56), secs(1));
        servers.forget(&|_| true);
        servers.settle(now(60));
        assert_eq!(unconfirmed(&servers, 90), Duration::ZERO, "it is alone");
    }
}
