//! Where to ask next for a key, from the tables of all virtual servers of a node.
//!
//! CFS §5.3: virtual servers "on the same physical server ... take short-cuts through each
//! others' routing tables", which "exactly compensates for the increased number of
//! servers". For each key two of them matter: the first at or after it, which may be its
//! root, and the last before it, whose successor list covers the gap between them. Nodes on
//! the way are taken from all tables.

use atoll_key::{Key, KeyRange};

use crate::chord::ring::state::ChordState;
use crate::{MAX_CLOSER, Node, Route};

/// See [`crate::Overlay::route`]; `servers` are the virtual servers of one node.
pub(crate) fn route<'a>(
    servers: impl Iterator<Item = &'a ChordState> + Clone,
    key: &Key,
    as_root: bool,
) -> Route {
    let Some((before, at)) = around(servers.clone(), key) else { return Route::Nowhere };
    match at.predecessor() {
        None if at.successors().is_empty() => Route::Root(vec![at.me()]),
        Some(p) if KeyRange::new(*p.id.key(), *at.me().id.key()).contains(key) => root_is(at),
        Some(p) if as_root => Route::NotRoot(p),
        None if as_root => before.root_in_successors(key).unwrap_or_else(|| root_is(at)),
        _ => before.root_in_successors(key).unwrap_or_else(|| {
            let closer = closer(servers, key);
            if closer.is_empty() { Route::Nowhere } else { Route::closer(closer) }
        }),
    }
}

fn root_is(server: &ChordState) -> Route {
    let list = std::iter::once(server.me()).chain(server.successors().iter().copied());
    Route::Root(list.collect())
}

/// The last virtual server on the ring strictly before `key` and the first at or after it;
/// the same one if there is only one.
fn around<'a>(
    servers: impl Iterator<Item = &'a ChordState> + Clone,
    key: &Key,
) -> Option<(&'a ChordState, &'a ChordState)> {
    let joined = servers.filter(|server| server.joined());
    let last = key.previous();
    let before = joined.clone().min_by_key(|s| last.distance_from(s.me().id.key()))?;
    let at = joined.min_by_key(|s| s.me().id.key().distance_from(key))?;
    Some((before, at))
}

/// CFS Figure 3, `preceding_node_list`, over all tables: the nodes known between the last
/// virtual server before the key and the key, nearest to the key first. None is this node.
pub(crate) fn closer<'a>(
    servers: impl Iterator<Item = &'a ChordState> + Clone,
    key: &Key,
) -> Vec<Node> {
    let Some((before, _)) = around(servers.clone(), key) else { return Vec::new() };
    let (me, after) = (before.me().peer.id, *before.me().id.key());
    let mut nodes: Vec<(Key, Node)> = servers
        .flat_map(ChordState::nodes)
        .filter(|n| n.peer.id != me && n.id.key().strictly_between(&after, key))
        .map(|n| (key.distance_from(n.id.key()), n))
        .collect();
    nodes.sort_unstable();
    nodes.dedup_by_key(|(_, node)| node.id);
    nodes.truncate(MAX_CLOSER);
    nodes.into_iter().map(|(_, node)| node).collect()
}
