//! Peer admission: which nodes may enter a node's tables (CFS §4.4).
//!
//! All virtual servers of a node share one [`PeerAdmission`]. It remembers which peers were found
//! dead, or left, a short time ago. The lists of other nodes still name them, and must not bring
//! them back. A dead node is dead with all its virtual servers; a node that gave up some of them
//! lives on without these.
//!
//! A suspicion applies to a peer address, not to a key: a claim that puts a node's key at a wrong
//! address must not discredit that node.
//!
//! It also remembers which peers have been checked: the key answered at the address and stated how
//! many virtual servers it runs. A check is valid for [`CHECK_LASTS`] and for the last address
//! seen of a key. At most [`MAX_CHECKED`] are kept. Keys cost nothing, so many keys at one address
//! displace only each other, and never a peer in the tables ([`PeerAdmission::make_room`]).
//!
//! Plain data; time is an argument.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::{IdProfile, PeerId};
use atoll_net::Peer;

use crate::site::site;
use crate::{MAX_VIRTUAL_SERVERS, Node};

/// Whether a named node may enter the tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It may enter the tables.
    Welcome,
    /// It has not been checked: list entries after it wait for the outcome.
    Unknown,
    /// It was found dead, gone, or not where it was claimed to be: it is skipped.
    Suspected,
}

/// How a table asks whether a node may enter it.
pub type Judge<'a> = dyn Fn(&Node) -> Verdict + 'a;

/// The most suspicions of each kind: more than the checks that can fail while one lasts
/// ([`crate::chord::trust::checks`]), so that a flood of false claims drives no true one out.
pub const MAX_SUSPECTS: usize = 512;

/// The most checked peers remembered.
pub const MAX_CHECKED: usize = 8192;
/// How many checked peers are forgotten at once when room is needed, so that a flood does not cost
/// a search for each.
const FORGOTTEN_AT_ONCE: usize = 64;
/// How long a check is believed; a node in a list stays there while it is checked again. A guess: an
/// address may change hands within a day, and four calls an hour for each neighbour are nothing.
/// Less than the life of a clock's vote ([`crate::clock`]), which a check renews.
pub const CHECK_LASTS: Duration = Duration::from_secs(1800);

/// The network's rules for a node's position.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// How positions are derived.
    pub profile: IdProfile,
    /// Virtual indices lie below.
    pub max_virtual_servers: u16,
    /// Whether nodes are checked; see [`crate::chord::ChordConfig::check_nodes`].
    pub check: bool,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            profile: IdProfile::default(),
            max_virtual_servers: MAX_VIRTUAL_SERVERS,
            check: true,
        }
    }
}

/// The address at which a key answered, and the number of virtual servers it stated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Checked {
    addr: SocketAddr,
    servers: u16,
    at: Instant,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct PeerAdmission {
    rules: Rules,
    checked: BTreeMap<PeerId, Checked>,
    /// Peers found dead, and until when hearsay that they live is not believed.
    dead: BTreeMap<Peer, Instant>,
    /// The same for single virtual servers of peers that live.
    vacant: BTreeMap<Node, Instant>,
}

impl PeerAdmission {
    /// Without any checked or suspected peer.
    pub fn new(rules: Rules) -> PeerAdmission {
        PeerAdmission { rules, ..PeerAdmission::default() }
    }

    /// Whether `node` may enter the tables.
    pub fn judge(&self, node: &Node, now: Instant) -> Verdict {
        if !self.is_possible(node) || self.is_suspected(node, now) {
            return Verdict::Suspected;
        }
        let admits = |checked: &Checked| {
            checked.addr == node.peer.addr
                && node.virtual_server.index < checked.servers
                && now.since(checked.at) < CHECK_LASTS
        };
        match self.checked.get(&node.peer.id) {
            _ if !self.rules.check => Verdict::Welcome,
            Some(checked) if admits(checked) => Verdict::Welcome,
            _ => Verdict::Unknown,
        }
    }

    /// Whether a node can have this place at all in this network.
    pub fn is_possible(&self, node: &Node) -> bool {
        node.virtual_server.profile == self.rules.profile
            && node.virtual_server.index < self.rules.max_virtual_servers
    }

    /// The peer was found at its address and runs so many virtual servers.
    pub fn admit(&mut self, peer: Peer, servers: u16, now: Instant) {
        if self.checked.len() >= MAX_CHECKED && !self.checked.contains_key(&peer.id) {
            let oldest = self.checked.iter().min_by_key(|(_, c)| c.at).map(|(id, _)| *id);
            oldest.map(|id| self.checked.remove(&id));
        }
        self.checked.insert(peer.id, Checked { addr: peer.addr, servers, at: now });
        self.dead.remove(&peer);
        self.vacant.retain(|node, _| node.peer != peer);
    }

    /// Whether a checked peer has to be forgotten before this one is remembered.
    pub fn is_full_for(&self, peer: &PeerId) -> bool {
        self.checked.len() >= MAX_CHECKED && !self.checked.contains_key(peer)
    }

    /// Forgets some checked peers other than those that `keeps` names: of the address with the
    /// most of them those checked longest ago.
    pub fn make_room(&mut self, keeps: &dyn Fn(&PeerId) -> bool) {
        let mut crowds: BTreeMap<IpAddr, Vec<(Instant, PeerId)>> = BTreeMap::new();
        for (id, checked) in self.checked.iter().filter(|(id, _)| !keeps(id)) {
            crowds.entry(site(checked.addr.ip())).or_default().push((checked.at, *id));
        }
        let oldest = |crowd: &Vec<(Instant, PeerId)>| crowd.iter().map(|(at, _)| *at).min();
        let most = crowds.into_values().max_by_key(|crowd| (crowd.len(), Reverse(oldest(crowd))));
        let mut crowd = most.unwrap_or_default();
        crowd.sort_unstable();
        crowd.truncate((crowd.len() / 2).clamp(1, FORGOTTEN_AT_ONCE));
        for (_, id) in crowd {
            self.checked.remove(&id);
        }
    }

    /// The address at which the peer was found when it was checked.
    pub fn addr_of(&self, peer: &PeerId) -> Option<SocketAddr> {
        self.checked.get(peer).map(|checked| checked.addr)
    }

    /// Where the peer was found when it was checked; see [`site`].
    pub fn site_of(&self, peer: &PeerId) -> Option<IpAddr> {
        self.checked.get(peer).map(|checked| site(checked.addr.ip()))
    }

    /// Whether the peer address was ever found right, and its key has not moved since.
    pub fn was_checked(&self, peer: &Peer) -> bool {
        !self.rules.check || self.checked.get(&peer.id).is_some_and(|c| c.addr == peer.addr)
    }

    /// How many virtual servers the peer said it runs, when it was checked.
    pub fn servers_of(&self, peer: &PeerId) -> Option<u16> {
        self.checked.get(peer).map(|checked| checked.servers)
    }

    /// Whether the node, or its peer as a whole, was found dead not long ago.
    pub fn is_suspected(&self, node: &Node, now: Instant) -> bool {
        let holds = |until: Option<&Instant>| until.is_some_and(|until| now < *until);
        holds(self.dead.get(&node.peer)) || holds(self.vacant.get(node))
    }

    /// Whether there is any suspicion.
    pub fn has_suspects(&self) -> bool {
        !self.dead.is_empty() || !self.vacant.is_empty()
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
        assert!(self.checked.len() <= MAX_CHECKED, "too many checked peers");
        assert!(self.dead.len() <= MAX_SUSPECTS, "too many suspected peers");
        assert!(self.vacant.len() <= MAX_SUSPECTS, "too many suspected nodes");
    }
}

/// Makes room by dropping the entry that runs out soonest.
fn insert_bounded<K: Ord + Copy>(map: &mut BTreeMap<K, Instant>, key: K, until: Instant) {
    if map.len() >= MAX_SUSPECTS && !map.contains_key(&key) {
        let soonest = map.iter().min_by_key(|(_, until)| **until).map(|(key, _)| *key);
        if let Some(soonest) = soonest {
            map.remove(&soonest);
        }
    }
    map.insert(key, until);
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::VirtualServerId;

    const NOW: Instant = Instant(5_000_000_000);

    fn peer(n: u16, port: u16) -> Peer {
        let mut id = [0; 32];
        id[..2].copy_from_slice(&n.to_be_bytes());
        Peer { id: PeerId(id), addr: SocketAddr::from((Ipv4Addr::LOCALHOST, port)) }
    }

    fn node(n: u16, index: u16) -> Node {
        Node::at(peer(n, 1), VirtualServerId { index, ..VirtualServerId::default() })
    }

    #[test]
    fn a_false_peer_address_does_not_discredit_the_true_one() {
        let mut admission = PeerAdmission::default();
        admission.admit(peer(1, 1), 1, NOW);
        admission.suspect_peer(peer(1, 2), NOW + Duration::from_secs(10));
        assert_eq!(admission.judge(&Node::of(peer(1, 2)), NOW), Verdict::Suspected);
        assert_eq!(admission.judge(&node(1, 0), NOW), Verdict::Welcome);
    }

    #[test]
    fn a_node_of_another_profile_or_beyond_the_highest_index_is_suspected() {
        let rules = Rules { max_virtual_servers: 4, check: false, ..Rules::default() };
        let admission = PeerAdmission::new(rules);
        assert_eq!(admission.judge(&node(1, 3), NOW), Verdict::Welcome);
        assert_eq!(admission.judge(&node(1, 4), NOW), Verdict::Suspected);
        let other = VirtualServerId { profile: IdProfile::Address, index: 0 };
        assert_eq!(admission.judge(&Node::at(peer(1, 1), other), NOW), Verdict::Suspected);
    }

    #[test]
    fn a_suspected_peer_is_suspected_with_all_its_virtual_servers() {
        let mut admission = PeerAdmission::default();
        admission.admit(peer(1, 1), 3, NOW);
        let until = NOW + Duration::from_secs(10);
        admission.suspect_node(node(1, 1), until);
        let verdicts = |admission: &PeerAdmission| {
            [0, 1, 2].map(|index| admission.judge(&node(1, index), NOW))
        };
        let (welcome, suspected) = (Verdict::Welcome, Verdict::Suspected);
        assert_eq!(verdicts(&admission), [welcome, suspected, welcome]);
        admission.suspect_peer(peer(1, 1), until);
        assert_eq!(verdicts(&admission), [suspected; 3]);
        admission.expire(until);
        assert_eq!(verdicts(&admission), [welcome; 3], "they were checked");
    }

    #[test]
    fn checks_and_suspicions_are_bounded() {
        let mut admission = PeerAdmission::default();
        for n in 0..20_000 {
            let now = NOW + Duration::from_millis(u64::from(n));
            admission.admit(peer(n, 1), 1, now);
            admission.suspect_peer(peer(n, 2), now);
            admission.suspect_node(node(n, 1), now);
            admission.check_invariants();
        }
        let now = NOW + Duration::from_secs(20);
        assert_eq!(admission.judge(&node(19_999, 0), now), Verdict::Welcome, "the last one");
    }

    /// Keys are free: a peer with 20,000 of them at one address had all others forgotten.
    #[test]
    fn many_keys_at_one_address_displace_no_checked_peer_elsewhere_or_in_the_tables() {
        let mut admission = PeerAdmission::default();
        let elsewhere = |n: u16| Peer {
            addr: SocketAddr::from((Ipv4Addr::new(10, 0, 0, n as u8), 1)),
            ..peer(n, 1)
        };
        (0..100).for_each(|n| admission.admit(elsewhere(n), 1, NOW));
        // A neighbour that happens to be at the flooder's own address.
        admission.admit(peer(100, 1), 1, NOW);
        for n in 101..20_000 {
            let now = NOW + Duration::from_millis(u64::from(n));
            if admission.is_full_for(&peer(n, 1).id) {
                admission.make_room(&|id| *id == peer(100, 1).id);
            }
            admission.admit(peer(n, 1), 1, now);
            admission.check_invariants();
        }
        let now = NOW + Duration::from_secs(20);
        let is_known = |peer| admission.judge(&Node::of(peer), now) == Verdict::Welcome;
        assert!((0..100).all(|n| is_known(elsewhere(n))));
        assert!(is_known(peer(100, 1)) && is_known(peer(19_999, 1)));
        assert!(!is_known(peer(101, 1)), "the flooder's own first");
    }
}
