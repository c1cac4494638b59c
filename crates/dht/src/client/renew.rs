//! Extending leases (CFS §5.5: "Publishers must periodically refresh their blocks").
//!
//! The node that renews finds each block's root and sends it the names of the blocks; what the root
//! says is verified (`ack_verification`), and where it does not answer all of its replica set is
//! asked.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{sleep, timeout};
use atoll_key::{BlockHash, Key};
use atoll_net::CallError;
use atoll_overlay::Node;
use futures_util::future::join_all;

use super::Client;
use super::ack_verification::{Renewal, check_renewal};
use super::put::{FIRST_PAUSE, LONGEST_PAUSE, absent, of_batch};
use super::put_batch::{is_still_named, over_quota};
use super::votes::Votes;
use crate::accounting::admission::Origin;
use crate::blocks::PutError;
use crate::placement::{Groups, add_to, shared_replica_sets};
use crate::rpc::put_times::WaitsFor;
use crate::rpc::quorum::{Calls, Event, answers};
use crate::rpc::{MAX_KEYS, Name, Renew, RenewReply, RenewStatus};
use crate::server::renew::{ask_to_renew, renew_at};

/// A batch of renewals that gets no further is given up after so long. A guess: repair may copy
/// meanwhile what too few have.
const RENEW_STUCK: Duration = Duration::from_secs(20);

/// What has become of keys whose leases are to be extended.
#[derive(Default)]
struct Renewing {
    /// Whether the caller puts what is lacking.
    will_be_put: bool,
    held: Vec<bool>,
    /// Those not settled yet.
    todo: Vec<usize>,
    /// Why blocks charged to another publisher were not renewed: this one has no room for them.
    over: Option<PutError>,
    told: String,
}

/// Extends leases; returns the blocks the ring lacks, in the order given. If those `will_be_put`,
/// the root's word for that is enough.
pub(crate) async fn renew(
    client: &Arc<Client>,
    hashes: Vec<BlockHash>,
    will_be_put: bool,
) -> Result<Vec<BlockHash>, PutError> {
    let keys: Vec<Key> = hashes.iter().map(BlockHash::key).collect();
    let (held, todo) = (vec![false; keys.len()], (0..keys.len()).collect());
    let mut state = Renewing { held, todo, will_be_put, ..Renewing::default() };
    let mut pause = FIRST_PAUSE;
    let start = client.env.now();
    let (deadline, mut stuck) = (start + client.config.put_limit, start + RENEW_STUCK);
    while !state.todo.is_empty() {
        let (left, before) = (deadline.since(client.env.now()), state.todo.len());
        let asked = timeout(&*client.env, left, renew_once(client, &keys, &mut state)).await;
        let now = client.env.now();
        if state.todo.len() < before {
            stuck = now + RENEW_STUCK;
        }
        if state.todo.is_empty() {
            break;
        }
        if asked.is_err() || now + pause > deadline.min(stuck) {
            let (part, count, told) = (state.todo.len(), keys.len(), &state.told);
            let part = of_batch(part, count);
            return Err(PutError::Unavailable(format!("{part}{told}{}", absent(client))));
        }
        sleep(&*client.env, pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    // What could be renewed has been.
    if let Some(over) = state.over {
        return Err(over);
    }
    let lacking = hashes.into_iter().zip(state.held).filter(|(_, held)| !held);
    Ok(lacking.map(|(hash, _)| hash).collect())
}

/// Asks the roots once about all that is not settled.
async fn renew_once(client: &Arc<Client>, keys: &[Key], state: &mut Renewing) {
    let wanted: Vec<Key> = state.todo.iter().map(|index| keys[*index]).collect();
    let (mut groups, mut again) = (Groups::new(), Vec::new());
    for (index, set) in state.todo.iter().zip(shared_replica_sets(client, &wanted).await) {
        match set {
            Ok(set) => add_to(&mut groups, set, *index),
            Err(error) => {
                again.push(*index);
                state.told = error;
            }
        }
    }
    let asks = groups.values().flat_map(|(set, indices)| {
        indices.chunks(MAX_KEYS).map(move |chunk| (set, chunk.to_vec()))
    });
    let will_be_put = state.will_be_put;
    let answers = join_all(asks.map(|(set, chunk)| async move {
        let keys = chunk.iter().map(|index| keys[*index]).collect();
        (set[0], chunk, renew_batch(client, set, keys, will_be_put).await)
    }))
    .await;
    for (root, chunk, answer) in answers {
        match answer {
            Ok(RenewReply { statuses, over: why }) => {
                if let Some(why) = why {
                    state.over = Some(over_quota(&root, why));
                }
                for (index, said) in chunk.into_iter().zip(statuses) {
                    match said {
                        RenewStatus::NotRoot => {
                            state.told = format!("{root} is not the root any more");
                            again.push(index);
                        }
                        RenewStatus::Undecided => {
                            state.told =
                                format!("too few of the nodes from {root} on have it or answer");
                            again.push(index);
                        }
                        said => state.held[index] = said.is_held(),
                    }
                }
            }
            Err(error) => {
                state.told = format!("root {root}: {error}");
                again.extend(chunk);
            }
        }
    }
    again.sort_unstable();
    state.todo = again;
}

/// Renews at the first of a replica set, and sees to it that what that says is so; if the root
/// does not answer in its usual time, renews at all of the set.
async fn renew_batch(
    client: &Arc<Client>,
    set: &[Node],
    keys: Vec<Key>,
    will_be_put: bool,
) -> Result<RenewReply, CallError> {
    let (root, count) = (set[0], keys.len());
    let lease_secs = client.config.lease.as_secs();
    let origin = Origin::own(client, lease_secs, &keys);
    let receipt = origin.to_wire(keys.iter().copied());
    let names = keys.iter().map(Name::of).collect();
    let renew = Renew { names, lease_secs, as_root: true, receipt };
    if client.is_me(&root) {
        return renew_at(client, &root, &origin, &renew).await;
    }
    let mut calls = Calls::new(client, WaitsFor::Root);
    let mut by_root = set.len() == 1 || answers(client, &root);
    if by_root {
        let (caller, origin, renew) = (client.clone(), origin.clone(), renew.clone());
        calls.ask(root, 0, async move {
            Ok(((0..count).collect(), renew_at(&caller, &root, &origin, &renew).await?))
        });
    }
    let mut votes = Votes::new(client, set, count);
    let (mut is_direct, mut counted) = (false, set.len());
    loop {
        if !is_direct && !calls.is_patient() && set.len() > 1 {
            is_direct = true;
            for node in set[..counted].iter().skip(usize::from(by_root)) {
                ask_to_renew(client, &mut calls, *node, &origin, &renew, (0..count).collect());
            }
        }
        if is_direct && !calls.is_patient() {
            break;
        }
        match calls.next().await {
            Some(Event::Answer(node, Ok((_, mut reply)))) if by_root && node == root => {
                let denies = !is_direct
                    && reply.statuses.iter().all(|status| *status == RenewStatus::NotRoot);
                if denies && is_still_named(client, &keys[0], &root).await {
                    // As with puts, see `is_other_root`.
                    (by_root, counted) = (false, set.len() - 1);
                    continue;
                }
                calls.finish();
                let what = Renewal { origin: &origin, renew: &renew, keys: &keys, will_be_put };
                check_renewal(client, set, &what, &mut reply).await;
                return Ok(reply);
            }
            Some(Event::Answer(node, Err(error)))
                if by_root && node == root && (set.len() == 1 || !error.is_failure_of_peer()) =>
            {
                return Err(error);
            }
            Some(Event::Answer(_, Ok((indices, reply)))) => votes.count(indices, &reply),
            Some(_) => {}
            None => break,
        }
    }
    calls.finish();
    Ok(votes.result())
}
