//! Releasing blocks at all replicas of each.
//!
//! A block counts as released when every node of its replica set has said so: repair brings a block
//! back, for as long as its lease was, from a replica that has not heard of the release.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_key::kinds::{Release, ReleaseEffect};
use atoll_key::{Key, NotAdmitted, PeerId};
use atoll_net::CallError;
use atoll_overlay::Node;
use futures_util::future::join_all;

use super::Client;
use crate::blocks::PutError;
use crate::placement::{shared_replica_sets, size_of};
use crate::rpc::{ReleaseBlocks, ReleaseStatus};

/// Sends a release to the replica sets of its blocks; an outcome for each, in the order of
/// [`Release::keys`].
pub(crate) async fn release_blocks(
    client: &Arc<Client>,
    release: Release,
) -> Vec<Result<(), PutError>> {
    let keys: Vec<Key> = release.keys().collect();
    if let ReleaseEffect::Removed { as_of_unix_secs } = release.effect() {
        // Whatever is put from here later has a receipt of this time or later.
        let (time_ms, now_ms) = (as_of_unix_secs.saturating_mul(1000), client.env.unix_ms());
        if time_ms > now_ms {
            let refused = NotAdmitted::Clock { time_ms, now_ms };
            return vec![Err(PutError::NotAdmitted(refused)); keys.len()];
        }
    }
    let sets = shared_replica_sets(client, &keys).await;
    let nodes = sets.iter().flatten().flatten();
    let nodes: BTreeMap<PeerId, Node> = nodes.map(|node| (node.peer.id, *node)).collect();
    let request = ReleaseBlocks { release, is_pointed: false };
    let asks = nodes.into_iter().map(|(id, node)| {
        let request = &request;
        async move {
            let called = client.call(&node, request, Vec::new()).await;
            (id, called.map(|(reply, _)| reply.statuses))
        }
    });
    let said: BTreeMap<PeerId, Result<Vec<ReleaseStatus>, CallError>> =
        join_all(asks).await.into_iter().collect();
    let outcome = |(index, set): (usize, Result<Vec<Node>, String>)| {
        let set = set.map_err(PutError::Unavailable)?;
        let wanted = size_of(client, &set);
        for node in &set {
            match &said[&node.peer.id] {
                Ok(statuses) if statuses[index] == ReleaseStatus::Refused => {
                    let told = format!("{node} holds it as none of theirs");
                    return Err(PutError::Unavailable(told));
                }
                Ok(statuses) if statuses[index] == ReleaseStatus::PutSince => {
                    let told = format!("{node} was given it since");
                    return Err(PutError::Unavailable(told));
                }
                Ok(_) => {}
                Err(error) => return Err(PutError::Unavailable(format!("{node}: {error}"))),
            }
        }
        match set.len() < wanted {
            true => {
                let told = format!("only {} of {wanted} nodes are there", set.len());
                Err(PutError::Unavailable(told))
            }
            false => Ok(()),
        }
    };
    sets.into_iter().enumerate().map(outcome).collect()
}
