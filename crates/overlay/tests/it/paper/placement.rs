//! CFS §4.1, §4.4, §5.1 and §5.3: where keys, nodes and copies belong.

use atoll_env::Instant;
use atoll_key::{IdProfile, Key};
use atoll_overlay::chord::ring::state::ChordState;
use atoll_overlay::chord::trust::admission::{CHECK_LASTS, PeerAdmission, Rules, Verdict};
use atoll_overlay::{Node, Route, VirtualServerId, distinct_peers};

use super::{fails, member, ring};

const NOW: Instant = Instant(5_000_000_000);

fn keys() -> impl Iterator<Item = Key> {
    (0..=255).map(|n| Key::hashed([n; 32]))
}

/// The root of a key, as the node says that holds it.
fn root(ring: &[Node], key: &Key) -> Node {
    let says_so = |me: &&Node| {
        let route = ChordState::perfect(**me, ring, 4).route(key, true);
        matches!(route, Route::Root(list) if list[0] == **me)
    };
    let mut roots = ring.iter().filter(says_so);
    let root = *roots.next().expect("every key has a root");
    assert_eq!(roots.next(), None, "and one only");
    root
}

/// §4.1: "when a node n joins the network, certain keys previously assigned to n's successor
/// become assigned to n. When node n leaves the network, all of n's assigned keys are reassigned
/// to its successor. No other changes in the assignment of keys to nodes need occur."
#[test]
fn a_join_moves_keys_from_the_successor_only_and_a_leave_moves_them_back() {
    let whole = ring(20);
    let without: Vec<Node> = whole.iter().filter(|node| **node != whole[7]).copied().collect();
    let mut moved = 0;
    for key in keys() {
        let (with, before) = (root(&whole, &key), root(&without, &key));
        if with == whole[7] {
            assert_eq!(before, whole[8]);
            moved += 1;
        } else {
            assert_eq!(before, with);
        }
    }
    assert!(moved > 0, "some of the keys are its own");
}

/// §4.4: "a Chord node ID must be of the form h(x), where ... x is the node's IP address
/// concatenated with a virtual node index" (the `address` profile; `identity` hashes the key).
#[test]
fn a_position_follows_from_the_address_or_the_key_and_the_index() {
    let peer = ring(1)[0].peer;
    let at = |profile, index, peer| Node::at(peer, VirtualServerId { profile, index }).id;
    let elsewhere = atoll_net::Peer { addr: ([10, 0, 0, 9], 1).into(), ..peer };
    let other_port = atoll_net::Peer { addr: (peer.addr.ip(), 9).into(), ..peer };
    let (address, identity) = (IdProfile::Address, IdProfile::Identity);
    assert_ne!(at(address, 0, peer), at(address, 1, peer));
    assert_ne!(at(address, 0, peer), at(address, 0, elsewhere));
    assert_eq!(at(address, 0, peer), at(address, 0, other_port), "one address, one ID");
    assert_ne!(at(identity, 0, peer), at(identity, 1, peer));
    assert_eq!(at(identity, 0, peer), at(identity, 0, elsewhere), "the key decides");
}

/// §4.4: "The virtual node index must fall between 0 and some small maximum. As a result, a node
/// cannot easily control the choice of its own Chord ID."
#[test]
fn an_index_beyond_the_maximum_is_refused_even_of_a_checked_peer() {
    let rules = Rules { max_virtual_servers: 4, ..Rules::default() };
    let mut admission = PeerAdmission::new(rules);
    let peer = ring(1)[0].peer;
    admission.admit(peer, 128, NOW);
    let judge = |index| {
        let id = VirtualServerId { index, ..VirtualServerId::default() };
        admission.judge(&Node::at(peer, id), NOW)
    };
    assert_eq!([judge(0), judge(3)], [Verdict::Welcome; 2]);
    assert_eq!([judge(4), judge(127)], [Verdict::Suspected; 2]);
}

/// §4.4: "If the node at that IP address admits to having n's ID, and the claimed IP address and
/// virtual node index hash to the ID, then the existing node accepts n."
#[test]
fn a_node_is_accepted_at_the_address_and_with_the_indices_it_admitted_to() {
    let mut admission = PeerAdmission::new(Rules::default());
    let peer = ring(1)[0].peer;
    let id = |index| VirtualServerId { index, ..VirtualServerId::default() };
    assert_eq!(admission.judge(&Node::at(peer, id(0)), NOW), Verdict::Unknown);
    admission.admit(peer, 2, NOW);
    assert_eq!(admission.judge(&Node::at(peer, id(1)), NOW), Verdict::Welcome);
    assert_eq!(admission.judge(&Node::at(peer, id(2)), NOW), Verdict::Unknown);
    let elsewhere = atoll_net::Peer { addr: ([10, 0, 0, 9], 1).into(), ..peer };
    assert_eq!(admission.judge(&Node::at(elsewhere, id(0)), NOW), Verdict::Unknown);
    assert_eq!(admission.judge(&Node::at(peer, id(1)), NOW + CHECK_LASTS), Verdict::Unknown);
    admission.admit(elsewhere, 1, NOW);
    assert_eq!(admission.judge(&Node::at(elsewhere, id(0)), NOW), Verdict::Welcome);
    assert_eq!(admission.judge(&Node::at(peer, id(0)), NOW), Verdict::Unknown, "it has moved");
}

/// §5.1: the replicas are "at the k servers immediately after the block's successor on the Chord
/// ring" (here the successor holds one of the k); "after a block's successor server fails, the
/// block is immediately available at the block's new successor".
#[test]
fn the_new_successor_of_a_failed_root_holds_a_replica_already() {
    let ring = ring(40);
    let mut before = member(&ring, 5, 8);
    let key = ring[6].id.key().previous();
    let set = |state: &ChordState| match state.route(&key, false) {
        Route::Root(list) => distinct_peers(&list, 3),
        route => panic!("{route:?}"),
    };
    assert_eq!(set(&before), ring[6..9]);
    fails(&mut before, &ring[6]);
    assert_eq!(set(&before), ring[7..10], "two of three hold it, the first among them");
}

/// §5.3 with §5.1: several virtual servers of one server never hold two of a block's replicas.
#[test]
fn the_replicas_of_a_block_are_on_different_servers() {
    let id = |index| VirtualServerId { index, ..VirtualServerId::default() };
    let peers: Vec<_> = ring(5).iter().map(|node| node.peer).collect();
    let mut all: Vec<Node> =
        peers.iter().flat_map(|peer| (0..8).map(|index| Node::at(*peer, id(index)))).collect();
    all.sort_unstable_by_key(|node| node.id);
    for me in &all {
        let set = ChordState::perfect(*me, &all, 16).neighbourhood().replica_set(3);
        assert_eq!(distinct_peers(&set, 3).len(), 3, "{me:?}");
        assert_eq!(set[0], *me);
    }
}
