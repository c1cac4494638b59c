//! What Chord nodes say to each other.

use std::fmt::Debug;

use atoll_overlay::Route;
use atoll_overlay::chord::messages::{
    self, Alive, AskRoute, Dead, Leaving, Meet, Seen, Surroundings, WireKey, WireNode, WireNodes,
    WireRoute,
};
use minicbor::{Decode, Encode};

use super::{Target, key, node, round_trip};

pub fn targets() -> Vec<Target> {
    let nodes = || WireNodes(vec![node(1), node(2), node(3)]);
    let some = Some(WireNode(node(4)));
    let surroundings = [
        Surroundings { epoch: 77, predecessor: some, successors: Some(nodes()) },
        Surroundings { epoch: u64::MAX, predecessor: None, successors: None },
    ];
    let routes =
        [Route::Root(nodes().0), Route::closer(nodes().0), Route::Back(node(5)), Route::Nowhere];
    vec![
        message("overlay/alive", vec![Alive { joined: true }, Alive { joined: false }]),
        message("overlay/seen", vec![Seen { epoch: Some(3) }, Seen { epoch: None }]),
        message("overlay/surroundings", surroundings.into()),
        message("overlay/leaving", vec![Leaving { predecessor: some, successors: nodes() }]),
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
