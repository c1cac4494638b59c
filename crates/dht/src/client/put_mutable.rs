//! Putting a mutable block at its replica set, in one round trip if the set is known.
//!
//! The writer's node sends the block to all replicas at once and counts the majority itself, so no
//! single node is believed, and hears which replica holds another version. It waits for every
//! replica whose answer is not overdue, because one of them may refuse, and for overdue ones while
//! no majority has answered. A remembered replica set counts only if its root confirms it
//! (`known_sets`).
//!
//! Two writers that hold one key may write different blocks of one version at the same time. A
//! writer that hears of another block of its version has failed, even if a majority took its own:
//! were the majority's next member to fail, repair could copy the other block. So at most one of
//! them succeeds, and a higher version settles the matter. Not covered: a writer that cannot reach
//! the replica with the other block.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::timeout;
use atoll_key::PeerId;
use atoll_overlay::distinct_peers;

use super::Client;
use super::put_batch::{Direct, Outcome, Tally};
use crate::accounting::admission::Origin;
use crate::rpc::Block;
use crate::rpc::put_times::WaitsFor;
use crate::rpc::quorum::{Calls, Event};

/// While no majority has answered, overdue answers are waited for so long: a majority of slow disks
/// stores the block, and a dead majority has left the ring then. A guess: half of a call.
const MOST_WAIT: Duration = Duration::from_secs(5);

/// Puts a mutable block at its replica set. `holders` have it already; the set is looked up `anew`
/// after an attempt that failed.
pub(super) async fn put_mutable(
    client: &Arc<Client>,
    block: Block,
    holders: BTreeSet<PeerId>,
    anew: bool,
) -> Outcome {
    let key = block.header.key;
    let named = match client.known_sets.find(client, &key, anew).await {
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
    let give_up = client.env.now() + MOST_WAIT;
    while calls.is_patient() || !direct.is_settled(&tally) {
        let left = give_up.since(client.env.now());
        match timeout(&*client.env, left, calls.next()).await {
            Ok(Some(Event::Answer(node, Ok(said)))) => {
                if node == set[0] {
                    root_says = said.set;
                }
                direct.note(&mut tally, node, said).await;
            }
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => break,
        }
    }
    calls.finish();
    let holders = direct.holders[0].clone();
    let outcome = direct.outcomes(Some(tally), "").pop().expect("one block has one outcome");
    if !matches!(outcome, Outcome::Stored) {
        return outcome;
    }
    if !named.is_confirmed(&set, root_says) {
        return Outcome::Again(holders, "its replica set has changed".to_owned());
    }
    // What was counted on must hold after a restart as well.
    match client.expected.remember(&*client.durable).await {
        true => outcome,
        false => Outcome::Again(holders, "this node's disk failed".to_owned()),
    }
}
