//! Whatever happens to a state, in whatever order, its invariants hold.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};

use atoll_key::{Key, PeerId};
use atoll_net::Peer;
use atoll_overlay::chord::ring::state::{ChordState, Told};
use atoll_overlay::chord::trust::admission::{Judge, Verdict};
use atoll_overlay::{Node, Route};
use proptest::prelude::*;

fn node(seed: u8) -> Node {
    Node::of(Peer { id: PeerId([seed; 32]), addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)) })
}

/// Something that can happen to a node, sensible or not.
#[derive(Clone, Debug)]
enum Event {
    Create,
    Join(u8, Option<u8>, Vec<u8>),
    StabilizeHead(Option<u8>, Vec<u8>),
    Stabilize(u8, Option<u8>, Vec<u8>),
    Adopt(u8, Option<u8>, Vec<u8>),
    Notified(u8),
    Failed(u8),
    Left(u8, Option<u8>, Vec<u8>),
    Finger(u32, u8),
    Prune,
    Unsuspect(u8),
    Uncheck(u8),
    Check(u8),
    Leave,
}

fn event() -> impl Strategy<Value = Event> {
    let who = 0u8..24;
    let maybe = proptest::option::of(who.clone());
    let list = proptest::collection::vec(who.clone(), 0..8);
    prop_oneof![
        1 => Just(Event::Create),
        2 => (who.clone(), maybe.clone(), list.clone()).prop_map(|(a, b, c)| Event::Join(a, b, c)),
        6 => (maybe.clone(), list.clone()).prop_map(|(b, c)| Event::StabilizeHead(b, c)),
        2 => (who.clone(), maybe.clone(), list.clone()).prop_map(|(a, b, c)| Event::Stabilize(a, b, c)),
        4 => (who.clone(), maybe.clone(), list.clone()).prop_map(|(a, b, c)| Event::Adopt(a, b, c)),
        6 => who.clone().prop_map(Event::Notified),
        6 => who.clone().prop_map(Event::Failed),
        2 => (who.clone(), maybe, list).prop_map(|(a, b, c)| Event::Left(a, b, c)),
        3 => (500u32..512, who.clone()).prop_map(|(e, n)| Event::Finger(e, n)),
        1 => Just(Event::Prune),
        2 => who.clone().prop_map(Event::Unsuspect),
        2 => who.clone().prop_map(Event::Uncheck),
        2 => who.prop_map(Event::Check),
        1 => Just(Event::Leave),
    ]
}

fn told(predecessor: Option<u8>, successors: &[u8]) -> Told {
    Told {
        predecessor: predecessor.map(node),
        successors: successors.iter().map(|n| node(*n)).collect(),
    }
}

/// The suspected nodes, and the unchecked ones.
#[derive(Default)]
struct Doubts {
    suspected: BTreeSet<Node>,
    unchecked: BTreeSet<Node>,
}

impl Doubts {
    fn judge(&self, node: &Node) -> Verdict {
        match (self.suspected.contains(node), self.unchecked.contains(node)) {
            (true, _) => Verdict::Suspected,
            (_, true) => Verdict::Unknown,
            _ => Verdict::Welcome,
        }
    }
}

fn apply(state: &mut ChordState, event: &Event, doubts: &mut Doubts) {
    let me = state.me();
    let alive = |doubts: &mut Doubts, who: u8| {
        doubts.suspected.remove(&node(who));
        doubts.unchecked.remove(&node(who));
    };
    match event {
        // A node has answered before it becomes a neighbour, and a claimant has been checked.
        Event::Join(at, ..) | Event::Adopt(at, ..) | Event::Notified(at) | Event::Finger(_, at) => {
            alive(doubts, *at);
        }
        Event::Failed(who) | Event::Left(who, ..) => {
            doubts.suspected.insert(node(*who));
        }
        Event::Unsuspect(who) => {
            doubts.suspected.remove(&node(*who));
        }
        Event::Uncheck(who) => {
            doubts.unchecked.insert(node(*who));
        }
        Event::Check(who) => {
            doubts.unchecked.remove(&node(*who));
        }
        _ => {}
    }
    let doubts = &*doubts;
    let judge: &Judge<'_> = &|node| doubts.judge(node);
    match event {
        Event::Create => state.create(),
        // A walk never finds the node that walks, and only a node on no ring joins.
        Event::Join(at, p, list) if node(*at) != me && !state.joined() => {
            state.join(node(*at), &told(*p, list), judge);
        }
        Event::StabilizeHead(p, list) => {
            if let Some(head) = state.head() {
                state.stabilize(&head, &told(*p, list), judge);
            }
        }
        Event::Stabilize(at, p, list) => {
            state.stabilize(&node(*at), &told(*p, list), judge);
        }
        Event::Adopt(at, p, list) => {
            state.adopt(node(*at), &told(*p, list), judge);
        }
        Event::Notified(by) => {
            state.notified(node(*by));
        }
        Event::Failed(who) => {
            state.forget(&|n| *n == node(*who));
        }
        Event::Left(who, p, list) => {
            state.left(&node(*who), &told(*p, list), &|n| *n == node(*who), judge);
        }
        Event::Finger(exponent, at) => {
            // Only members look for fingers.
            if state.joined() && !state.successors().is_empty() {
                state.set_finger(*exponent, node(*at));
            }
        }
        Event::Prune => state.prune_fingers(),
        Event::Leave => state.leave(),
        Event::Join(..) | Event::Unsuspect(_) | Event::Uncheck(_) | Event::Check(_) => {}
    }
}

fn check_route(state: &ChordState, key: &Key, as_root: bool) {
    let me = state.me();
    match state.route(key, as_root) {
        Route::Root(list) => {
            assert!(!list.is_empty());
            let mut ids: Vec<_> = list.iter().map(|n| n.id).collect();
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids.len(), list.len(), "no node twice: {list:?}");
        }
        Route::Closer(list) => {
            assert!(!as_root && !list.is_empty() && list.len() <= atoll_overlay::MAX_CLOSER);
            assert!(list.iter().all(|node| node.id.key().strictly_between(me.id.key(), key)));
        }
        Route::NotRoot(before) => assert!(as_root && Some(before) == state.predecessor()),
        // Not on a ring; or all true successors are lost.
        Route::Nowhere => assert!(!state.joined() || state.head().is_some()),
    }
}

proptest! {
    #[test]
    fn any_events_keep_the_invariants_and_routes_in_form(
        r in 1usize..6,
        events in proptest::collection::vec(event(), 0..60),
        key in any::<[u8; 32]>(),
    ) {
        let mut state = ChordState::new(node(0), r, 0);
        let mut doubts = Doubts::default();
        for event in &events {
            let before = (state.neighbourhood(), state.epoch());
            let known_before = state.known();
            apply(&mut state, event, &mut doubts);
            state.check_invariants();
            for node in state.known() {
                prop_assert!(!doubts.suspected.contains(&node), "{:?} is suspected", node);
                let is_new = !known_before.contains(&node);
                prop_assert!(!is_new || doubts.judge(&node) == Verdict::Welcome, "{:?}", node);
            }
            let same = {
                let (mut a, mut b) = (before.0, state.neighbourhood());
                (a.epoch, b.epoch) = (0, 0);
                a == b
            };
            prop_assert_eq!(same, before.1 == state.epoch(), "epoch after {:?}", event);
            for key in [Key::hashed(key), *state.me().id.key(), state.me().id.key().next()] {
                check_route(&state, &key, false);
                check_route(&state, &key, true);
            }
        }
    }

    /// Pure convergence: nodes with any live successors, stabilised in turn, get it right.
    #[test]
    fn rounds_of_stabilisation_make_any_connected_ring_ideal(
        seeds in proptest::collection::btree_set(any::<u8>(), 2..20),
        r in 2usize..6,
    ) {
        let nodes: Vec<Node> = seeds.iter().map(|s| node(*s)).collect();
        // Every node joins through the first node alone, knowing no other.
        let mut states: Vec<ChordState> =
            nodes.iter().map(|n| ChordState::new(*n, r, 0)).collect();
        states[0].create();
        for state in &mut states[1..] {
            state.join(nodes[0], &Told::default(), &|_| Verdict::Welcome);
        }
        for _ in 0..nodes.len() * 3 {
            for at in 0..states.len() {
                stabilize(&mut states, at);
            }
        }
        let live: Vec<_> = states.iter().map(ChordState::neighbourhood).collect();
        prop_assert_eq!(atoll_overlay::checker::check_ideal(&live, r), Ok(()));
    }
}

fn stabilize(states: &mut [ChordState], at: usize) {
    let judge: &Judge<'_> = &|_| Verdict::Welcome;
    let Some(head) = states[at].head() else { return };
    let index = |node: Node| states.iter().position(|s| s.me() == node).unwrap();
    let said = states[index(head)].told();
    if let Some(newer) = states[at].stabilize(&head, &said, judge) {
        let index = states.iter().position(|s| s.me() == newer).unwrap();
        let said = states[index].told();
        states[at].adopt(newer, &said, judge);
    }
    let (me, head) = (states[at].me(), states[at].head().unwrap());
    let index = states.iter().position(|s| s.me() == head).unwrap();
    states[index].notified(me);
}
