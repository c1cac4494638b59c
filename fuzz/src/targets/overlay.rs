//! What Chord nodes say to each other.

use std::fmt::Debug;

use atoll_env::Instant;
use atoll_overlay::Route;
use atoll_overlay::chord::messages::{
    self, Alive, AskRoute, Doubt, FailureReport, Introduce, Leaving, Nudge, Ping, Seen,
    Surroundings, VirtualIndex, WireKey, WireNode, WireNodes, WirePeer, WireRoute,
};
use atoll_overlay::chord::table::learn::{Learn, Learned};
use atoll_overlay::chord::table::sweep::Wish;
use atoll_overlay::chord::table::{self, Table};
use minicbor::{Decode, Encode};

use super::{Target, key, node, round_trip, target};

pub(super) fn targets() -> Vec<Target> {
    let nodes = || WireNodes(vec![node(1), node(2), node(3)]);
    let some = Some(WireNode(node(4)));
    let surroundings = [
        Surroundings { epoch: 77, predecessor: some, successors: Some(nodes()), doubt: None },
        Surroundings {
            epoch: u64::MAX,
            predecessor: None,
            successors: None,
            doubt: Some(Doubt::Unchecked),
        },
    ];
    let index = VirtualIndex;
    let seen = Seen { epoch: Some(3), to: index(1), from: index(2) };
    let alive = [
        Alive { joined: false, nonce: None, servers: None, peer: None, unix_ms: None },
        Alive {
            joined: true,
            nonce: Some(u64::MAX),
            servers: Some(128),
            peer: Some(WirePeer(node(7).peer)),
            unix_ms: Some(u64::MAX),
        },
    ];
    let leaving =
        Leaving { predecessor: some, successors: nodes(), from: index(9), remaining: index(4) };
    let routes =
        [Route::Root(nodes().0), Route::closer(nodes().0), Route::NotRoot(node(5)), Route::Nowhere];
    vec![
        message("overlay/ping", vec![Ping { to: index(5), nonce: Some(1 << 60) }, Ping::default()]),
        message("overlay/nudge", vec![Nudge { to: index(0), from: index(127) }, Nudge::default()]),
        message("overlay/alive", alive.into()),
        message("overlay/seen", vec![seen, Seen::default()]),
        message("overlay/surroundings", surroundings.into()),
        message("overlay/leaving", vec![leaving]),
        message("overlay/ask-route", vec![AskRoute { key: WireKey(key(1)), as_root: true }]),
        message("overlay/route", routes.into_iter().map(WireRoute).collect()),
        message("overlay/dead", vec![FailureReport { nodes: nodes() }]),
        message("overlay/meet", vec![Introduce { node: WireNode(node(6)), hops_left: 2 }]),
        message("overlay/learn", vec![learn()]),
        message("overlay/learned", vec![learned(), Learned::default()]),
        target("overlay/learn-answered", vec![messages::encode(&learn()).to_vec()], |input| {
            let Ok(learn) = messages::decode::<Learn>(input) else { return false };
            let answer = some_table().answer(&learn, now());
            assert!(answer.ages.len() <= learn.known.len() / 3, "an age for each tag");
            true
        }),
        target("overlay/learned-taken-in", vec![messages::encode(&learned()).to_vec()], take_in),
    ]
}

fn learn() -> Learn {
    Learn { after: 1 << 60, upto: 3 << 62, origin: 5, bits: 7, known: vec![1, 2, 3, 4, 5, 6] }
}

fn learned() -> Learned {
    Learned {
        upto: u64::MAX,
        near: 1 << 61,
        ages: vec![3, 127, 0x80 | 5],
        nodes: WireNodes((20..26).map(node).collect()),
        node_ages: vec![4, 5, 127, 6, 126, 1],
    }
}

/// The time of the tables below, seconds after their nodes' clocks began.
fn now() -> u32 {
    table::secs(Instant(100_000 * 1_000_000_000))
}

/// A node's table with its successors and some others in it.
fn some_table() -> Table {
    let mut ring: Vec<_> = (1..20).map(node).collect();
    ring.sort_by_key(|node| node.id);
    let mut table = Table::new(ring[0], 64, now() - 5000);
    table.set_own(&[(ring[0], ring[1..4].to_vec())], ring[0].peer.id, now() - 900);
    ring[1..].iter().for_each(|node| table.heard(node, now() - 900));
    table
}

/// A peer's answer goes into a table, which must stay one.
fn take_in(input: &[u8]) -> bool {
    let Ok(learned) = messages::decode::<Learned>(input) else { return false };
    let mut table = some_table();
    if let Wish::Ask(question) = table.next_question(30.0, now()) {
        table.take_in(&question, &learned, 30.0, |_| true, now());
        table.check_invariants();
    }
    true
}

fn message<T>(name: &'static str, values: Vec<T>) -> Target
where
    T: Encode<()> + for<'b> Decode<'b, ()> + PartialEq + Debug + 'static,
{
    round_trip(name, values, |m| messages::encode(m).to_vec(), |b| messages::decode::<T>(b))
}
