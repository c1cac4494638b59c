//! Which nodes should hold a block: roots and replica sets (CFS §5.1, §5.3).

use std::collections::BTreeMap;

use atoll_env::timeout;
use atoll_key::Key;
use atoll_overlay::Node;
use futures_util::{StreamExt, stream};

use crate::context::Context;
use crate::rpc::{Block, short_hash};

/// Replica sets that are looked up for one message. A guess: a batch has one root.
pub(crate) const MAX_SETS: usize = 4;
/// Roots looked up at once.
const LOOKUPS_AT_ONCE: usize = 16;

/// Blocks by their root: its replica set, the root first, and their numbers.
pub(crate) type Groups = BTreeMap<Node, (Vec<Node>, Vec<usize>)>;

/// Adds a block to those of the first of `set`.
pub(crate) fn add_to(groups: &mut Groups, set: Vec<Node>, index: usize) {
    groups.entry(set[0]).or_insert_with(|| (set, Vec::new())).1.push(index);
}

/// A replica set, its root first, or why the root could not be found.
type Set = Result<Vec<Node>, String>;

async fn find(context: &Context, key: Key) -> Set {
    let found = context.overlay.find_replica_set(&key, context.config.replicas).await;
    let set = found.map_err(|error| error.to_string())?;
    if set.is_empty() { Err("the ring has no nodes".to_owned()) } else { Ok(set) }
}

/// The replica set of each key. Each root is looked up for itself: a node that misleads one lookup
/// misleads the put of one block.
pub(crate) async fn replica_sets(context: &Context, keys: &[Key]) -> Vec<Set> {
    let finds = stream::iter(keys.to_vec()).map(|key| find(context, key));
    finds.buffered(LOOKUPS_AT_ONCE).collect().await
}

/// The replica set of each key. A root is that of all keys up to its position: of keys that stand
/// close together each root is looked up once or twice, however many they are.
pub(crate) async fn shared_replica_sets(context: &Context, keys: &[Key]) -> Vec<Set> {
    let mut sets = vec![Err(String::new()); keys.len()];
    let mut sorted: Vec<usize> = (0..keys.len()).collect();
    sorted.sort_by_key(|index| keys[*index]);
    let mut parts = vec![sorted];
    loop {
        parts.retain(|part| !part.is_empty());
        if parts.is_empty() {
            return sets;
        }
        let find = |part: Vec<usize>| async move { (find(context, keys[part[0]]).await, part) };
        let finds = stream::iter(parts.drain(..)).map(find);
        let found: Vec<_> = finds.buffered(LOOKUPS_AT_ONCE).collect().await;
        for (set, mut part) in found {
            let first = keys[part[0]];
            let upto = set.as_ref().map_or(first, |set| *set[0].id.key()).distance_from(&first);
            let mut rest = part.split_off(
                part.partition_point(|index| keys[*index].distance_from(&first) <= upto),
            );
            part.iter().for_each(|index| sets[*index].clone_from(&set));
            // Both halves at once: if each key has another root that takes few rounds.
            parts.push(rest.split_off(rest.len() / 2));
            parts.push(rest);
        }
    }
}

/// Items grouped by the roots of their keys, each with the first `peers` nodes from its root on.
/// At most `limit` roots are looked up; of other items nothing is said, nor of those after a root
/// that is not found.
pub(crate) async fn by_root<T>(
    context: &Context,
    mut items: Vec<T>,
    key: impl Fn(&T) -> Key,
    peers: usize,
    limit: usize,
) -> Vec<(Vec<Node>, Vec<T>)> {
    items.sort_by_key(&key);
    let mut groups = Vec::new();
    while let Some(first) = items.first().map(&key).filter(|_| groups.len() < limit) {
        let patience = context.config.call_limit / 4;
        let found =
            timeout(&*context.env, patience, context.overlay.find_replica_set(&first, peers)).await;
        let Ok(Ok(nodes)) = found else { break };
        let Some(root) = nodes.first() else { break };
        let upto = root.id.key().distance_from(&first);
        let (its, others) =
            items.into_iter().partition(|item| key(item).distance_from(&first) <= upto);
        items = others;
        groups.push((nodes, its));
    }
    groups
}

/// The nodes that should hold the blocks whose root is this virtual server of this node, which
/// comes first; alone if it no longer runs.
pub(crate) fn replica_set(context: &Context, root: &Node) -> Vec<Node> {
    context.overlay.own_replica_set(root, context.config.replicas).unwrap_or_else(|| vec![*root])
}

/// A short hash of a replica set, by which a root and a caller see whether they mean the same one.
pub(crate) fn set_tag(set: &[Node]) -> u64 {
    let mut hasher = blake3::Hasher::new_derive_key("atoll v2 replica set");
    for node in set {
        hasher.update(&node.id.0.0);
    }
    short_hash(hasher.finalize())
}

/// For the reply to a put: the tag of the first block's replica set, if that is a mutable block of
/// which this node is the root.
pub(crate) fn tag_for_put(context: &Context, blocks: &[Block]) -> Option<u64> {
    let keys: Option<Vec<Key>> =
        blocks.iter().map(|block| block.is_mutable().then_some(block.header.key)).collect();
    let keys = keys?;
    let groups = context.overlay.group_by_own_root(&keys);
    let of_all = groups.first().filter(|(_, indices)| indices.len() == keys.len());
    of_all.map(|(root, _)| set_tag(&replica_set(context, root)))
}

/// A key's replica set, if this node is its root.
pub(crate) fn own_set(context: &Context, key: &Key) -> Option<Vec<Node>> {
    let groups = context.overlay.group_by_own_root(std::slice::from_ref(key));
    groups.first().map(|(root, _)| replica_set(context, root))
}

/// The tag of a key's replica set, if this node is its root.
pub(crate) fn own_set_tag(context: &Context, key: &Key) -> Option<u64> {
    own_set(context, key).map(|set| set_tag(&set))
}

/// How many other nodes of a replica set this node sees at present, at most k − 1.
pub(crate) fn present_replicas(context: &Context) -> usize {
    let sets = context.overlay.own_replica_sets(context.config.replicas);
    let others = sets.iter().map(|set| set.len() - 1);
    others.max().expect("a node has at least one virtual server")
}

/// How many members a replica set has of which these are there, those expected back included.
pub(crate) fn size_of(context: &Context, set: &[Node]) -> usize {
    set.len().max(expected_replicas(context) + 1)
}

/// The replicas a put must count on, see [`ExpectedReplicas::update`](crate::expected_replicas::ExpectedReplicas::update).
pub(crate) fn expected_replicas(context: &Context) -> usize {
    let replicas = present_replicas(context);
    if !context.config.mechanisms.expected_replicas {
        return replicas;
    }
    context.expected.update(context.env.now(), replicas)
}

/// Whether this node belongs to the replica set of a block, as far as it knows.
pub(crate) fn is_member(context: &Context, key: &Key) -> bool {
    let set = context.overlay.known_replica_set(key, context.config.replicas);
    set.is_some_and(|set| set.iter().any(|node| context.is_me(node)))
}
