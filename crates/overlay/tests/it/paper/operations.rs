//! Sentences of CFS §4 and §6.1, and Zave's operations, on the state of one virtual server.

use atoll_key::Key;
use atoll_overlay::chord::ring::state::{ChordState, Claim};
use atoll_overlay::{MAX_CLOSER, Node, Route};

use super::{all, all_but, fails, member, ring, told};

/// §4.1: the successor of an ID is "the node with the smallest ID that is greater than or
/// equal to" it, "with wrap-around".
#[test]
fn a_node_is_the_root_of_the_keys_from_its_predecessor_to_itself() {
    let ring = ring(8);
    let state = member(&ring, 0, 3);
    let own = *ring[0].id.key();
    let before = *ring[7].id.key();
    assert!(matches!(state.route(&own, false), Route::Root(list) if list[0] == ring[0]));
    assert!(matches!(state.route(&before.next(), false), Route::Root(list) if list[0] == ring[0]));
    assert!(!matches!(state.route(&before, false), Route::Root(list) if list[0] == ring[0]));
    // Around zero: the first node of the circle is the root of the largest key.
    assert!(matches!(state.route(&Key::MAX, false), Route::Root(list) if list[0] == ring[0]));
}

/// §4.2: "if the desired key is between the node and its successor, the latter node is the
/// key's successor".
#[test]
fn a_key_up_to_the_first_successor_belongs_to_it() {
    let ring = ring(40);
    let state = member(&ring, 5, 3);
    for key in [ring[5].id.key().next(), *ring[6].id.key()] {
        assert_eq!(state.route(&key, false), Route::Root(ring[6..9].to_vec()));
    }
}

/// §4.2: "all r successors would have to simultaneously fail in order to disrupt the ring".
#[test]
fn the_next_entry_takes_the_place_of_a_failed_successor() {
    let ring = ring(40);
    let mut state = member(&ring, 5, 3);
    fails(&mut state, &ring[6]);
    state.check_invariants();
    assert_eq!(state.head(), Some(ring[7]));
    let between = ring[5].id.key().next();
    assert_eq!(state.route(&between, false), Route::Root(ring[7..9].to_vec()));
}

/// §4.2: the i-th finger is "the first node that succeeds n by at least 2^(i-1)". Fingers
/// within the successor list are not kept.
#[test]
fn a_finger_is_the_first_node_at_least_a_power_of_two_away() {
    let ring = ring(200);
    let state = member(&ring, 17, 8);
    let me = ring[17].id.key();
    let list_ends = ring[25].id.key().distance_from(me);
    let mut kept = 0;
    for (exponent, finger) in state.fingers() {
        kept += 1;
        let least = Key::power_of_two(exponent);
        assert!(least > list_ends);
        let distance = |n: &Node| n.id.key().distance_from(me);
        let first = ring.iter().filter(|n| distance(n) >= least).min_by_key(|n| distance(n));
        assert_eq!(Some(&finger), first);
    }
    assert!((3..=7).contains(&kept), "about log2(200 / 8): {kept}");
}

/// Figure 3: `preceding_node_list` returns the fingers and successors in (n, id).
#[test]
fn nearer_nodes_are_fingers_and_successors_before_the_key_nearest_first() {
    let ring = ring(200);
    let state = member(&ring, 17, 8);
    let key = ring[150].id.key().previous();
    let route = state.route(&key, false);
    assert!(matches!(route, Route::Closer(_)), "far away");
    let list = route.nodes();
    assert!(list.len() <= MAX_CLOSER && !list.is_empty());
    let known = state.known();
    let mut before = Key::MIN;
    for node in &list {
        assert!(known.contains(node));
        assert!(node.id.key().strictly_between(ring[17].id.key(), &key));
        let distance = key.distance_from(node.id.key());
        assert!(distance > before, "nearest to the key first");
        before = distance;
    }
    let nearest = known
        .iter()
        .filter(|n| n.id.key().strictly_between(ring[17].id.key(), &key))
        .min_by_key(|n| key.distance_from(n.id.key()));
    assert_eq!(list.first(), nearest);
}

/// The successor list is knowledge too: a key between two of its entries has its root there.
#[test]
fn a_key_within_the_successor_list_has_its_root_there() {
    let ring = ring(40);
    let state = member(&ring, 5, 16);
    let key = ring[8].id.key().previous();
    assert_eq!(state.route(&key, false), Route::Root(ring[8..22].to_vec()));
    // Near its end, too few nodes follow for one of them to be alive for certain.
    let key = ring[20].id.key().previous();
    let Route::Closer(list) = state.route(&key, false) else { panic!("{key}") };
    assert_eq!(list[0], ring[19]);
}

#[test]
fn on_a_small_ring_the_root_is_followed_by_all_others() {
    let ring = ring(5);
    let state = member(&ring, 1, 16);
    let key = ring[4].id.key().previous();
    let whole = vec![ring[4], ring[0], ring[1], ring[2], ring[3]];
    let Route::Root(list) = state.route(&key, false) else { panic!("the whole ring is known") };
    let mut expected = vec![ring[4], ring[0]];
    expected.extend([ring[1], ring[2], ring[3]]);
    assert_eq!(list, expected);
    assert_eq!(list, whole);
}

/// Asked as the root, a node never sends the asker around the ring.
#[test]
fn a_node_asked_as_the_root_that_is_not_the_root_names_its_predecessor() {
    let ring = ring(40);
    let state = member(&ring, 5, 3);
    for (at, _) in ring.iter().enumerate().filter(|(at, _)| *at != 5) {
        assert_eq!(state.route(ring[at].id.key(), true), Route::NotRoot(ring[4]));
    }
    assert!(matches!(state.route(ring[5].id.key(), true), Route::Root(_)));
}

/// §6.1: the r nodes of the list cover the fraction f of the ring: r / f servers.
#[test]
fn the_estimate_is_r_over_f() {
    let ring = ring(200);
    let state = member(&ring, 17, 8);
    let covered = ring[25].id.key().distance_from(ring[17].id.key()).as_fraction();
    assert_eq!(state.estimated_nodes(), 8.0 / covered);
    assert_eq!(member(&ring[..5], 2, 8).estimated_nodes(), 5.0);
}

/// §4.2: "n then asks that successor for its successor list".
#[test]
fn a_newcomer_takes_over_its_successors_list() {
    let ring = ring(40);
    let mut newcomer = ChordState::new(ring[5], 4, 0);
    let others: Vec<Node> = ring.iter().filter(|n| **n != ring[5]).copied().collect();
    let successor = ChordState::perfect(ring[6], &others, 4);
    newcomer.join(ring[6], &successor.told(), &all);
    newcomer.check_invariants();
    assert_eq!(newcomer.successors(), &ring[6..10]);
    assert_eq!(newcomer.predecessor(), Some(ring[4]));
}

#[test]
fn two_nodes_make_a_ring() {
    let ring = ring(2);
    let (mut a, mut b) = (ChordState::new(ring[0], 4, 0), ChordState::new(ring[1], 4, 0));
    a.create();
    b.join(ring[0], &a.told(), &all);
    assert_eq!((b.head(), b.predecessor()), (Some(ring[0]), Some(ring[0])));
    assert_eq!(a.notified(ring[1]), Claim::Adopted(None));
    assert_eq!((a.head(), a.predecessor()), (Some(ring[1]), Some(ring[1])));
}

/// Zave, *stabilize from successor*: the list is the successor and its list.
#[test]
fn stabilising_rebuilds_the_list_from_the_successors() {
    let ring = ring(40);
    let mut state = member(&ring, 5, 4);
    // The successor lost ring[8] and has seen ring[10].
    let said = told(Some(ring[5]), &[ring[7], ring[9], ring[10], ring[11]]);
    assert_eq!(state.stabilize(&ring[6], &said, &all), None);
    assert_eq!(state.successors(), &[ring[6], ring[7], ring[9], ring[10]]);
}

/// Zave, *stabilize from predecessor*: a nearer node is adopted once it has answered.
#[test]
fn the_successors_predecessor_is_adopted_only_after_it_has_answered() {
    let whole = ring(40);
    let without: Vec<Node> = whole.iter().filter(|n| **n != whole[6]).copied().collect();
    let mut state = ChordState::perfect(whole[5], &without, 4);
    assert_eq!(state.head(), Some(whole[7]));
    let said = told(Some(whole[6]), &without[7..11]);
    assert_eq!(state.stabilize(&whole[7], &said, &all), Some(whole[6]));
    assert_eq!(state.head(), Some(whole[7]), "named is not adopted");
    assert!(state.adopt(whole[6], &told(Some(whole[5]), &whole[7..11]), &all));
    assert_eq!(state.successors(), &whole[6..10]);
}

/// Zave, *rectify*: a farther node replaces the predecessor only after that was found dead.
#[test]
fn a_predecessor_gives_way_to_a_nearer_one_or_when_it_is_dead() {
    let ring = ring(40);
    let mut state = member(&ring, 5, 4);
    assert_eq!(state.notified(ring[3]), Claim::Nearer(ring[4]));
    assert_eq!(state.predecessor(), Some(ring[4]));
    fails(&mut state, &ring[4]);
    assert_eq!(state.predecessor(), None);
    assert_eq!(state.notified(ring[3]), Claim::Adopted(None));
    assert_eq!(state.notified(ring[4]), Claim::Adopted(Some(ring[3])));
    assert_eq!(state.notified(ring[4]), Claim::Known);
}

/// Why there are suspicions: the lists of others still name the dead.
#[test]
fn a_dead_node_does_not_come_back_by_hearsay_until_the_suspicion_runs_out() {
    let ring = ring(40);
    let mut state = member(&ring, 5, 4);
    fails(&mut state, &ring[7]);
    let suspecting = all_but(ring[7]);
    let said = told(Some(ring[5]), &ring[7..11]);
    state.stabilize(&ring[6], &said, &suspecting);
    assert_eq!(state.successors(), &[ring[6], ring[8], ring[9], ring[10]]);
    let said_before = told(Some(ring[7]), &[]);
    assert_eq!(state.newer_successor(said_before.predecessor, &suspecting), None);
    state.stabilize(&ring[6], &said, &all);
    assert_eq!(state.successors(), &ring[6..10]);
    state.check_invariants();
}

#[test]
fn a_list_that_is_out_of_order_is_cut_where_it_goes_wrong() {
    let ring = ring(40);
    for (said, kept) in [
        (vec![ring[7], ring[7], ring[8]], 2),
        (vec![ring[8], ring[7]], 2),
        (vec![ring[7], ring[5], ring[8]], 2),
        (vec![ring[5]], 1),
        (vec![ring[6]], 1),
    ] {
        let mut state = member(&ring, 5, 4);
        state.stabilize(&ring[6], &told(Some(ring[5]), &said), &all);
        state.check_invariants();
        assert_eq!(state.successors().len(), kept, "{said:?}");
    }
}

#[test]
fn a_node_that_leaves_is_closed_over_on_both_sides() {
    let ring = ring(40);
    let leaver = member(&ring, 6, 4);
    let (mut before, mut after) = (member(&ring, 5, 4), member(&ring, 7, 4));
    let gone = |node: &Node| *node == ring[6];
    before.left(&ring[6], &leaver.told(), &gone, &all);
    after.left(&ring[6], &leaver.told(), &gone, &all);
    assert_eq!(before.successors(), &ring[7..11]);
    assert_eq!(after.predecessor(), Some(ring[5]));
    before.check_invariants();
    after.check_invariants();
}

#[test]
fn a_node_without_successors_falls_back_to_the_nearest_node_and_names_no_root_meanwhile() {
    let ring = ring(200);
    let lost = |at: usize| {
        let mut state = member(&ring, at, 4);
        for node in &ring[at + 1..at + 5] {
            fails(&mut state, node);
        }
        state.check_invariants();
        state
    };
    // A node whose nearest finger is not by chance the next node.
    let at = (0..190).find(|at| lost(*at).head() != Some(ring[at + 5])).expect("there are many");
    let mut state = lost(at);
    let head = state.head().expect("a finger");
    let before_it = head.id.key().previous();
    assert_eq!(state.route(&before_it, false), Route::Nowhere);
    // Stabilisation walks back until no node is nearer; then the node knows again.
    let next = ring[at + 5];
    assert_eq!(state.stabilize(&head, &told(Some(next), &[]), &all), Some(next));
    assert!(state.adopt(next, &told(None, &ring[at + 6..at + 9]), &all));
    assert_eq!(state.route(next.id.key(), false), Route::Nowhere);
    let said = told(Some(ring[at]), &ring[at + 6..at + 9]);
    assert_eq!(state.stabilize(&next, &said, &all), None);
    assert!(matches!(state.route(next.id.key(), false), Route::Root(l) if l[0] == next));
}

#[test]
fn every_change_of_the_neighbourhood_has_an_epoch_of_its_own() {
    let ring = ring(40);
    let mut state = ChordState::new(ring[5], 4, 900);
    let mut epochs = vec![state.epoch()];
    state.create();
    epochs.push(state.epoch());
    state.notified(ring[9]);
    epochs.push(state.epoch());
    fails(&mut state, &ring[9]);
    epochs.push(state.epoch());
    state.leave();
    epochs.push(state.epoch());
    assert!(epochs.is_sorted_by(|a, b| a < b), "{epochs:?}");
    state.leave();
    assert_eq!(Some(&state.epoch()), epochs.last(), "nothing changed");
}
