//! What Chord nodes say to each other.

use std::fmt::Debug;

use atoll_overlay::Route;
use atoll_overlay::chord::messages::{
    self, Alive, AskRoute, Dead, Doubt, Leaving, Meet, Nudge, Ping, Seen, Surroundings,
    VirtualIndex, WireKey, WireNode, WireNodes, WirePeer, WireRoute,
};
use minicbor::{Decode, Encode};

use super::{Target, key, node, round_trip};

pub fn targets() -> Vec<Target> {
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
        Alive { joined: false, nonce: None, servers: None, peer: None },
        Alive {
            joined: true,
            nonce: Some(u64::MAX),
            servers: Some(128),
            peer: Some(WirePeer(node(7).peer)),
        },
    ];
    let leaving =
        Leaving { predecessor: some, successors: nodes(), from: index(9), remaining: index(4) };
    let routes =
        [Route::Root(nodes().0), Route::closer(nodes().0), Route::Back(node(5)), Route::Nowhere];
    vec![
        message("overlay/ping", vec![Ping { to: index(5), nonce: Some(1 << 60) }, Ping::default()]),
        message("overlay/nudge", vec![Nudge { to: index(0), from: index(127) }, Nudge::default()]),
        message("overlay/alive", alive.into()),
        message("overlay/seen", vec![seen, Seen::default()]),
        message("overlay/surroundings", surroundings.into()),
        message("overlay/leaving", vec![leaving]),
        message("overlay/ask-route", vec![AskRoute { key: WireKey(key(1)), as_root: true }]),
        message("overlay/route", routes.into_iter().map(WireRoute).collect()),
        message("overlay/dead", vec![Dead { nodes: nodes() }]),
        message("overlay/meet", vec![Meet { node: WireNode(node(6)), hops_left: 2 }]),
    ]
}

fn message<T>(name: &'static str, values: Vec<T>) -> Target
where
    T: Encode<()> + for<'b> Decode<'b, ()> + PartialEq + Debug + 'static,
{
    round_trip(name, values, |m| messages::encode(m).to_vec(), |b| messages::decode::<T>(b))
}
