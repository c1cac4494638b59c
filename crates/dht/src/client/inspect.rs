//! What a person asks about a block: which nodes should hold it, what each of them says, and which nodes use it.
//!
//! Nothing is read, copied or repaired by it: the answers are the replicas' own words, and are shown as
//! such.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_key::{Key, PeerId};
use atoll_net::Peer;
use atoll_overlay::Node;
use futures_util::StreamExt;
use futures_util::stream;

use super::Client;
use crate::locks::LockMode;
use crate::placement::shared_replica_sets;
use crate::rpc::{AskHoldings, AskUses, HeldCopy, MAX_KEYS, Pointing};

/// Nodes that are asked at once. A guess.
const ASKED_AT_ONCE: usize = 16;

/// What a node that should hold a block says of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// The node.
    pub peer: Peer,
    /// What it holds, nothing, or why it has not said.
    pub said: Result<Option<ReplicaCopy>, String>,
}

/// What a replica says that it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaCopy {
    /// Its version.
    pub version: u64,
    /// Seconds its lease still has.
    pub lease_secs: u64,
    /// Whether another node keeps it for the replica, which has no room.
    pub is_diverted: bool,
}

/// The nodes that use a mutable block and its lock, as its replicas know them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// Nodes that have read or written the block in the last 15 s and were promised to be told of the next
    /// change; how long the promise lasts.
    pub readers: BTreeMap<Peer, Duration>,
    /// Nodes that have a lease of the lock at any replica, and in which mode.
    pub locks: BTreeMap<PeerId, LockMode>,
    /// Replicas that have answered, and those that have not.
    pub replicas: (usize, usize),
}

/// The replicas of each block, the root first; or why its root was not found.
pub(crate) async fn replicas(
    client: &Arc<Client>,
    keys: Vec<Key>,
) -> Vec<Result<Vec<Replica>, String>> {
    let sets = shared_replica_sets(client, &keys).await;
    let mut asks: BTreeMap<Node, Vec<usize>> = BTreeMap::new();
    for (index, set) in sets.iter().enumerate() {
        for node in set.iter().flatten() {
            asks.entry(*node).or_default().push(index);
        }
    }
    let asks = asks.into_iter().flat_map(|(node, indices)| {
        let chunks: Vec<_> = indices.chunks(MAX_KEYS).map(<[usize]>::to_vec).collect();
        chunks.into_iter().map(move |chunk| (node, chunk))
    });
    let asked = asks.map(|(node, chunk)| {
        let its = chunk.iter().map(|index| keys[*index]).collect();
        async move { (node, chunk, ask(client, &node, its).await) }
    });
    let answers: Vec<_> = stream::iter(asked).buffer_unordered(ASKED_AT_ONCE).collect().await;
    let mut said = BTreeMap::new();
    for (node, chunk, answer) in answers {
        for (place, index) in chunk.into_iter().enumerate() {
            let of_block = answer.as_ref().map(|held| held[place]).map_err(String::clone);
            said.insert((node, index), of_block);
        }
    }
    let mut of_block = |index: usize, node: Node| {
        let said = said.remove(&(node, index)).expect("each of the set was asked");
        Replica { peer: node.peer, said }
    };
    let named = sets.into_iter().enumerate();
    named
        .map(|(index, set)| {
            set.map(|set| set.into_iter().map(|node| of_block(index, node)).collect())
        })
        .collect()
}

async fn ask(
    client: &Arc<Client>,
    node: &Node,
    keys: Vec<Key>,
) -> Result<Vec<Option<ReplicaCopy>>, String> {
    let asked = AskHoldings { keys, pointing: Pointing::No };
    let answer = client.call(node, &asked, Vec::new()).await;
    let (reply, _) = answer.map_err(|error| error.to_string())?;
    let copy = |HeldCopy { version, lease_secs, holder, .. }: HeldCopy| ReplicaCopy {
        version,
        lease_secs,
        is_diverted: holder.is_some(),
    };
    Ok(reply.held.0.into_iter().map(|held| held.map(copy)).collect())
}

/// Which nodes use a mutable block, and the lock that stands where it does.
///
/// # Errors
/// If the replicas cannot be found.
pub(crate) async fn uses(client: &Arc<Client>, key: Key, lock: Key) -> Result<Uses, String> {
    let set = shared_replica_sets(client, &[key]).await.pop().expect("one for each key")?;
    let ask = AskUses { key, lock };
    let calls = set.iter().map(|node| client.call(node, &ask, Vec::new()));
    let mut uses = Uses::default();
    for answer in futures_util::future::join_all(calls).await {
        let Ok((reply, _)) = answer else {
            uses.replicas.1 += 1;
            continue;
        };
        uses.replicas.0 += 1;
        for reader in reply.readers.0 {
            let left = uses.readers.entry(reader.peer).or_default();
            *left = (*left).max(Duration::from_millis(reader.left_ms));
        }
        for lock in reply.locks.0 {
            let mode = uses.locks.entry(PeerId(lock.peer_id)).or_insert(lock.mode);
            *mode = (*mode).max(lock.mode);
        }
    }
    Ok(uses)
}
