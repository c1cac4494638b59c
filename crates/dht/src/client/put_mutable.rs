//! Putting a mutable block at its replica set, in one round trip if the set is known.
//!
//! The writer's node sends the block to all replicas at once and counts the majority itself, so no
//! single node is believed, and hears which replica holds another version. It waits for every
//! replica whose answer is not overdue, because one of them may refuse. A remembered replica set
//! counts only if its root confirms it (`known_sets`).
//!
//! Two writers that hold one key may write different blocks of one version at the same time. At
//! most one of them finds a majority; the other is told that its block is superseded. A replica
//! may keep the loser's block until the next version; a reader takes the block of a version that
//! most replicas hold.

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_key::PeerId;
use atoll_overlay::distinct_peers;

use super::Client;
use super::put_batch::{Direct, Outcome, Tally};
use crate::accounting::admission::Origin;
use crate::rpc::Block;
use crate::rpc::put_times::WaitsFor;
use crate::rpc::quorum::{Calls, Event};

/// Puts a mutable block at its replica set. `holders` have it already.
pub(super) async fn put_mutable(
    client: &Arc<Client>,
    block: Block,
    holders: BTreeSet<PeerId>,
) -> Outcome {
    let key = block.header.key;
    let named = match client.known_sets.find(client, &key).await {
        Ok(named) => named,
        Err(error) => return Outcome::Again(holders, error.to_string()),
    };
    let set = distinct_peers(&named.nodes, client.config.replicas);
    let origin = Origin::own(client, block.header.lease_secs, &[key]);
    let blocks = [block];
    let mut direct = Direct::new(client, &set, &origin, &blocks, vec![holders]);
    let mut tally = Tally::new(client, &set, 1);
    let mut calls = Calls::new(client, WaitsFor::Replica);
    direct.put(&mut calls, false);
    let mut root_says = None;
    while !direct.is_over(&tally, calls.is_patient()) {
        match calls.next().await {
            Some(Event::Answer(node, Ok(said))) => {
                if node == set[0] {
                    root_says = said.set;
                }
                direct.note(&mut tally, node, said).await;
            }
            Some(_) => {}
            None => break,
        }
    }
    calls.finish();
    let holders = direct.holders[0].clone();
    let outcome = direct.outcomes(Some(tally), "").pop().expect("one block has one outcome");
    let is_confirmed = named.is_confirmed(&set, root_says);
    if !is_confirmed {
        client.known_sets.forget(&key);
    }
    if !matches!(outcome, Outcome::Stored) {
        return outcome;
    }
    if !is_confirmed {
        return Outcome::Again(holders, "its replica set has changed".to_owned());
    }
    // What was counted on must hold after a restart as well.
    match client.expected.remember(&*client.durable).await {
        true => outcome,
        false => Outcome::Again(holders, "this node's disk failed".to_owned()),
    }
}
