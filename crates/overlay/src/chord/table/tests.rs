//! The table's invariants and admission, under any events.

use atoll_key::PeerId;
use atoll_net::Peer;
use proptest::prelude::*;

use super::learn::{Learn, Learned, Question};
use super::sweep::Wish;
use super::*;

const NOW: u32 = EPOCH_SECS + 100_000;

fn node(n: u64) -> Node {
    let mut id = [7; 32];
    id[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    id[24..].copy_from_slice(&n.to_be_bytes());
    Node::of(Peer { id: PeerId(id), addr: "10.0.0.1:4000".parse().unwrap() })
}

fn alive(n: u64, age: u32) -> Evidence {
    Evidence { node: node(n), heard: NOW - age }
}

fn table(max_entries: usize) -> Table {
    Table::new(node(0), max_entries, NOW - 1000)
}

#[derive(Clone, Debug)]
enum Event {
    Heard(u64),
    Named(u64, u64, u32),
    Failed(u64),
    Bits(u32),
    Called(u64),
    Seated(u64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (1u64..200).prop_map(Event::Heard),
        (1u64..200, 1u64..9, 0u32..2000).prop_map(|(n, by, age)| Event::Named(n, by, age)),
        (1u64..200).prop_map(Event::Failed),
        (0u32..12).prop_map(Event::Bits),
        (1u64..200).prop_map(Event::Called),
        (1u64..200).prop_map(Event::Seated),
    ]
}

proptest! {
    #[test]
    fn any_events_keep_the_invariants(events in prop::collection::vec(event(), 0..300)) {
        let mut table = table(64);
        for event in events {
            match event {
                Event::Heard(n) => table.heard(&node(n), NOW),
                Event::Called(n) => table.called(&node(n), NOW),
                Event::Named(n, by, age) => {
                    table.named(&alive(n, age), &node(by).peer.id, NOW);
                }
                Event::Failed(n) => table.failed(&node(n).peer.id, NOW),
                Event::Bits(bits) => table.set_bits(bits, NOW),
                Event::Seated(n) => {
                    let mut next: Vec<Node> = (n..n + 4).map(node).collect();
                    next.sort_by_key(|s| place_of(s.id.key()).wrapping_sub(place_of(node(0).id.key())));
                    table.set_own(&[(node(0), next)], node(0).peer.id, NOW);
                }
            }
            table.check_invariants();
        }
    }

    #[test]
    fn any_answer_and_any_question_are_survived(
        upto in any::<u64>(), near in any::<u64>(), ages in prop::collection::vec(any::<u8>(), 0..40),
        node_ages in prop::collection::vec(any::<u8>(), 0..40), known in prop::collection::vec(any::<u8>(), 0..90),
    ) {
        let mut table = table(1000);
        (1..100).for_each(|n| table.heard(&node(n), NOW));
        let Wish::Ask(question) = table.next_question(1000.0, NOW) else { panic!("all is fresh") };
        let nodes = crate::wire::WireNodes((200..220).map(node).collect());
        let answer = Learned { upto, near, ages, nodes, node_ages };
        table.take_in(&question, &answer, 1000.0, |_| true, NOW);
        table.check_invariants();
        table.answer(&Learn { after: upto, upto: near, origin: 3, bits: 255, known }, NOW);
    }
}

#[test]
fn a_flood_of_made_up_nodes_displaces_no_known_node_and_yields_no_next_hop() {
    let mut table = table(1000);
    table.set_bits(20, NOW);
    (1..300).for_each(|n| table.heard(&node(n), NOW));
    let liar = node(5).peer.id;
    for n in 1000..20_000 {
        table.named(&alive(n, 0), &liar, NOW);
    }
    table.check_invariants();
    assert!(table.len() <= 1000 && table.unsure <= 500, "{}", table.unsure);
    let held: Vec<Node> = table.entries.values().map(Entry::node).collect();
    assert!((1..300).all(|n| held.contains(&node(n))), "a live node was displaced");
    for n in 400..500 {
        let next = table.before(node(n).id.key(), NOW);
        assert!(!next.is_empty() && next.iter().all(|x| (1..300).any(|m| node(m) == *x)));
    }
}

#[test]
fn an_entry_named_by_one_peer_is_unsure_and_by_two_peers_sure() {
    let mut table = table(100);
    let (one, two) = (node(1).peer.id, node(2).peer.id);
    table.named(&alive(9, 0), &one, NOW);
    table.named(&alive(9, 0), &one, NOW);
    assert_eq!(table.unsure, 1);
    table.named(&alive(9, 0), &two, NOW);
    assert_eq!((table.len(), table.unsure), (1, 0));
    let mut table = self::table(100).trusting(Trust::OwnChecks);
    table.named(&alive(9, 0), &one, NOW);
    table.named(&alive(9, 0), &two, NOW);
    assert_eq!(table.unsure, 1);
}

/// As if a neighbour of the node had been asked about it.
fn asked_about(table: &mut Table, n: u64, age: u8, near: u64) {
    let (to, place) = (node(3), place_of(node(n).id.key()));
    let after = place_of(to.id.key());
    let learn = Learn { after, upto: place, origin: after, bits: 9, known: vec![0; 3] };
    let question = Question { to, learn, region: 0, places: vec![place] };
    let nodes = crate::wire::WireNodes::default();
    let answer = Learned { upto: place, near, ages: vec![age], nodes, node_ages: Vec::new() };
    table.take_in(&question, &answer, 100.0, |_| true, NOW);
}

#[test]
fn an_entry_unknown_to_its_predecessor_is_dropped_and_to_others_if_its_evidence_is_old() {
    let place = place_of(node(9).id.key());
    let far = place_of(node(3).id.key());
    for (heard_ago, near, stays) in
        [(15, far, true), (60, far, false), (15, place, false), (2, place, true)]
    {
        let mut table = table(100);
        table.heard(&node(9), NOW - heard_ago);
        asked_about(&mut table, 9, 127, near);
        assert_eq!(table.entries.contains_key(&place), stays, "{heard_ago} s, {near}");
    }
}

#[test]
fn evidence_may_be_older_where_nodes_live_longer() {
    let place = place_of(node(9).id.key());
    let staleness_where_one_in = |deaths: u32| {
        let mut table = table(100);
        for n in 0..2000 {
            table.remove(place);
            table.heard(&node(9), NOW - 200);
            asked_about(&mut table, 9, if n % deaths == 0 { 127 } else { 0 }, place);
        }
        table.acceptable_staleness_secs()
    };
    assert_eq!(table(1).acceptable_staleness_secs(), 120);
    let (short, long) = (staleness_where_one_in(40), staleness_where_one_in(1000));
    assert!((300..600).contains(&short), "200 s × 40 / 20 is 400: {short}");
    assert_eq!(long, 3600);
}

#[test]
fn a_node_that_did_not_answer_is_not_accepted_from_hearsay_for_a_while() {
    let mut table = table(100);
    table.heard(&node(9), NOW);
    table.failed(&node(9).peer.id, NOW);
    let later = NOW + DEATH_REMEMBERED_SECS / 2;
    let said = Evidence { node: node(9), heard: later };
    assert!(!table.named(&said, &node(1).peer.id, later));
    let much_later = NOW + DEATH_REMEMBERED_SECS + 1;
    let said = Evidence { heard: much_later, ..said };
    assert!(table.named(&said, &node(1).peer.id, much_later));
}

#[test]
fn fewer_bits_leave_a_density_that_falls_with_the_distance() {
    let mut table = table(10_000);
    table.set_bits(MAX_BITS, NOW);
    (1..4000).for_each(|n| table.heard(&node(n), NOW));
    table.set_bits(4, NOW);
    table.check_invariants();
    let me = place_of(node(0).id.key());
    let mut octaves = [0; 64];
    for n in table.entries.values().map(Entry::node) {
        octaves[place_of(n.id.key()).wrapping_sub(me).ilog2() as usize] += 1;
    }
    // Sixteen slots an octave, whatever its width, as far as there are nodes.
    assert!(octaves[58..].iter().all(|count| (14..=16).contains(count)), "{octaves:?}");
}
