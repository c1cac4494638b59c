//! Reachability votes: other nodes confirm or refute that a joining node can be reached.
//!
//! A successor that cannot reach a joining node at the address where it says it listens tells it
//! so. Such a node would be on no successor list. It gives up with an error that tells its user
//! the remedy (`JoinError::Unreachable`). A single lying successor could keep a node off the ring
//! that way. The joining node therefore asks others to reach it as well (`REACH_ME`): the node
//! through which it joined, nodes asked on the way, and nodes around its position. Unless more of
//! them agree with the successor than contradict it, the node stays, and introduces itself to the
//! node before it, which the successor will not do.
//!
//! The cause is not known: a firewall between two nodes is no lie, and no peer is scored for it.

use atoll_env::random_below;
use atoll_net::Peer;
use futures_util::future::join_all;

use crate::Node;
use crate::chord::Chord;
use crate::chord::membership::lifecycle::JoinError;
use crate::chord::membership::ring_merge::INTRODUCE_HOPS;
use crate::chord::messages::Doubt;
use crate::chord::ring::state::ChordState;

/// How often a node that has not finished its check of this one is asked again: each answer takes
/// half a call's limit, and a check at most four limits.
const DOUBT_TRIES: usize = 8;
/// The most asked besides the successor. A guess: where one in five lies, four of seven do
/// once in thirty times.
const MAX_VOTERS: usize = 6;

impl Chord {
    /// Waits for the successor's check of this node, which joined with the help of those on
    /// `way`. If it failed, and others agree, the node is on no ring.
    pub(in crate::chord) async fn confirm_reachable(
        &self,
        way: Vec<Node>,
    ) -> Result<(), JoinError> {
        let doubt = || self.lock().servers.server(0).and_then(|server| server.doubt);
        for _ in 0..DOUBT_TRIES {
            if doubt() != Some(Doubt::Unchecked) {
                break;
            }
            self.stabilize_server(0).await;
        }
        let Some(by) = self.doubted_by() else { return Ok(()) };
        let asks = self.config.mechanisms.reachability_votes;
        let voters = if asks { self.choose_voters(&by, &way) } else { Vec::new() };
        let said = join_all(voters.iter().map(|voter| self.is_reached_by(voter))).await;
        let agree = 1 + said.iter().filter(|reaches| **reaches == Some(false)).count();
        let contradict = said.iter().filter(|reaches| **reaches == Some(true)).count();
        if agree > contradict {
            self.lock().maintenance.tasks.drain(..).for_each(|task| task.abort());
            self.update(|servers, _| servers.leave());
            return Err(JoinError::Unreachable { by, addr: self.transport.local().addr });
        }
        self.lock().trust.overruled = Some(by);
        self.introduce_itself(&way).await;
        Ok(())
    }

    /// The nodes to ask besides the successor: first the one through which this node has joined.
    fn choose_voters(&self, successor: &Peer, way: &[Node]) -> Vec<Node> {
        let mut others: Vec<Node> = way.iter().skip(1).copied().collect();
        others.extend(self.lock().servers.known());
        let may_ask = |node: &Node| node.peer != *successor && !self.owns(node);
        let mut chosen: Vec<Node> = way.iter().take(1).copied().filter(may_ask).collect();
        while chosen.len() < MAX_VOTERS {
            others.retain(|node| may_ask(node) && chosen.iter().all(|c| c.peer != node.peer));
            if others.is_empty() {
                break;
            }
            let nth = random_below(&*self.env, others.len() as u64) as usize;
            chosen.push(others[nth]);
        }
        chosen
    }

    /// Whether `voter` reaches this node; `None` if it does not say.
    async fn is_reached_by(&self, voter: &Node) -> Option<bool> {
        for _ in 0..DOUBT_TRIES {
            match self.call_reach_me(voter).await.ok()?.doubt {
                None => return Some(true),
                Some(Doubt::Refuted) => return Some(false),
                Some(Doubt::Unchecked) => {}
            }
        }
        None
    }

    /// Makes this node known to the one before it, from there and from where it joined.
    async fn introduce_itself(&self, way: &[Node]) {
        let (me, before) = {
            let inner = self.lock();
            let before = inner.servers.state(0).and_then(ChordState::predecessor);
            (inner.servers.position(0), before)
        };
        for node in before.into_iter().chain(way.first().copied()) {
            // If a call does not arrive, the next audit introduces this node again.
            let _ = self.call_introduce(&node, &me, INTRODUCE_HOPS).await;
        }
    }
}
