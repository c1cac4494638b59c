//! A node that has moved to another address.
//!
//! A check has found the node's key at the new address. Its old address in the tables would stay
//! for ever: a node that restarts after moving has the same position, so it is no nearer than
//! itself; and calls to the old address travel on the connection that it has opened from the new
//! one, and are answered.

use atoll_net::Peer;

use super::Servers;
use crate::Node;

impl Servers {
    /// `peer` was found at this address: nowhere else any more. Entries of the tables get the new
    /// address; where positions follow from addresses the old ones go.
    pub(super) fn relocate(&mut self, peer: Peer) {
        let has_moved = |node: &Node| node.peer.id == peer.id && node.peer.addr != peer.addr;
        let there = |node: &Node| Node::at(peer, node.virtual_server);
        for server in &mut self.servers {
            let entries = server.state.known();
            let (stays, goes): (Vec<Node>, Vec<Node>) =
                entries.into_iter().filter(has_moved).partition(|node| there(node).id == node.id);
            if !stays.is_empty() {
                server.state.replace(&|node| if has_moved(node) { there(node) } else { *node });
                // The head answers from elsewhere: its list is fetched anew.
                server.seen = None;
            }
            if !goes.is_empty() {
                server.state.forget(&|node| goes.contains(node));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use atoll_env::Instant;
    use atoll_key::{IdProfile, PeerId};

    use super::*;
    use crate::VirtualServerId;
    use crate::chord::ring::state::Told;
    use crate::chord::trust::admission::Rules;

    const NOW: Instant = Instant(5_000_000_000);

    fn peer(n: u8, host: u8) -> Peer {
        let addr = SocketAddr::from((Ipv4Addr::new(10, 77, 0, host), 7000));
        Peer { id: PeerId([n; 32]), addr }
    }

    fn node(profile: IdProfile, n: u8, host: u8) -> Node {
        Node::at(peer(n, host), VirtualServerId { profile, index: 0 })
    }

    /// A node that has another one for successor, predecessor and finger.
    fn beside(profile: IdProfile, other: Node) -> Servers {
        let rules = Rules { profile, ..Rules::default() };
        let mut servers = Servers::new(peer(1, 1), 1, rules, 4.into(), 0);
        servers.admit(other.peer, 1, NOW);
        let told = Told { predecessor: None, successors: Vec::new() };
        servers.with(0, NOW, |state, judge| {
            state.join(other, &told, judge);
            state.notified(other);
            state.fingers.set(500, other);
        });
        assert_eq!(servers.state(0).and_then(|state| state.head()), Some(other));
        servers
    }

    /// A laptop that changed networks and whose node had started anew was listed at its former
    /// address for as long as it kept a connection open from the new one.
    #[test]
    fn a_node_that_was_found_elsewhere_is_listed_there() {
        let (before, after) = (node(IdProfile::Identity, 2, 1), node(IdProfile::Identity, 2, 2));
        let mut servers = beside(IdProfile::Identity, before);
        servers.settle(NOW);
        servers.admit(after.peer, 1, NOW);
        let state = servers.state(0).expect("it runs");
        assert_eq!((state.head(), state.predecessor()), (Some(after), Some(after)));
        assert!(state.known().iter().all(|known| *known == after), "{:?}", state.known());
        assert!(servers.settle(NOW).changed, "others are told");
        servers.check_invariants(NOW);
    }

    #[test]
    fn where_positions_follow_from_addresses_the_old_one_is_forgotten() {
        let before = node(IdProfile::Address, 2, 1);
        let mut servers = beside(IdProfile::Address, before);
        servers.admit(peer(2, 2), 1, NOW);
        let state = servers.state(0).expect("it runs");
        assert!(!state.known().contains(&before), "{:?}", state.known());
        servers.check_invariants(NOW);
    }
}
