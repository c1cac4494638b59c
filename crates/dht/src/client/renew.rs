//! Extending leases (CFS §5.5: "Publishers must periodically refresh their blocks").
//!
//! The node that renews finds each block's root and sends it the names of the blocks; what the root
//! says is verified (`ack_verification`), and where it does not answer all of its replica set is
//! asked.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{sleep, timeout};
use atoll_key::Key;
use atoll_net::CallError;
use atoll_overlay::Node;
use futures_util::future::join_all;

use super::ack_verification::{Renewal, check_renewal};
use super::put::{LONGEST_PAUSE, absent};
use super::put_batch::{is_still_named, over_quota};
use super::votes::Votes;
use super::{Client, FIRST_PAUSE};
use crate::accounting::admission::Origin;
use crate::blocks::{LeaseRenewal, PutError, Renewed};
use crate::placement::{Groups, add_to, shared_replica_sets};
use crate::rpc::put_times::WaitsFor;
use crate::rpc::quorum::{Calls, Event, answers};
use crate::rpc::{MAX_KEYS, Name, Renew, RenewReply, RenewStatus};
use crate::server::renew::ask_to_renew;

/// A batch of renewals that gets no further is given up after so long. A guess: repair may copy
/// meanwhile what too few have.
const RENEW_STUCK: Duration = Duration::from_secs(20);

/// What has become of keys whose leases are to be extended.
struct Renewing {
    keys: Vec<Key>,
    lease_secs: u64,
    /// Whether the caller puts what is lacking.
    will_be_put: bool,
    /// Of each; an error is what was told last of one that is not settled.
    outcomes: Vec<Result<Renewed, PutError>>,
    /// Those not settled yet.
    todo: Vec<usize>,
}

impl Renewing {
    fn again(&mut self, indices: Vec<usize>, told: &str) {
        for index in indices {
            self.outcomes[index] = Err(PutError::Unavailable(told.to_owned()));
            self.todo.push(index);
        }
    }
}

/// Extends leases; an outcome for each block, in their order. If those that are lacking will be
/// put, the root's word for that is enough.
pub(crate) async fn renew_blocks(
    client: &Arc<Client>,
    LeaseRenewal { ids, lease_secs, will_be_put }: LeaseRenewal,
) -> Vec<Result<Renewed, PutError>> {
    let keys: Vec<Key> = ids.iter().map(|id| id.key).collect();
    let mut state = Renewing {
        outcomes: vec![Err(PutError::Unavailable(String::new())); keys.len()],
        todo: (0..keys.len()).collect(),
        lease_secs: lease_secs.unwrap_or(client.config.lease.as_secs()),
        will_be_put,
        keys,
    };
    let mut pause = FIRST_PAUSE;
    let start = client.env.now();
    let (deadline, mut stuck) = (start + client.config.put_limit, start + RENEW_STUCK);
    loop {
        let (left, before) = (deadline.since(client.env.now()), state.todo.len());
        let asked = timeout(&*client.env, left, renew_once(client, &mut state)).await;
        let now = client.env.now();
        if state.todo.len() < before {
            stuck = now + RENEW_STUCK;
        }
        if state.todo.is_empty() {
            return state.outcomes;
        }
        if asked.is_err() || now + pause > deadline.min(stuck) {
            let absent = absent(client);
            for index in state.todo {
                if let Err(PutError::Unavailable(told)) = &mut state.outcomes[index] {
                    if told.is_empty() {
                        *told = format!("no answer within {} s", client.config.put_limit.as_secs());
                    }
                    told.push_str(&absent);
                }
            }
            return state.outcomes;
        }
        sleep(&*client.env, pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Asks the roots once about all that is not settled.
async fn renew_once(client: &Arc<Client>, state: &mut Renewing) {
    let wanted: Vec<Key> = state.todo.iter().map(|index| state.keys[*index]).collect();
    let (mut groups, mut lost) = (Groups::new(), Vec::new());
    for (index, set) in state.todo.iter().zip(shared_replica_sets(client, &wanted).await) {
        match set {
            Ok(set) => add_to(&mut groups, set, *index),
            Err(error) => lost.push((*index, error)),
        }
    }
    let asks = groups.values().flat_map(|(set, indices)| {
        indices.chunks(MAX_KEYS).map(move |chunk| (set, chunk.to_vec()))
    });
    let asked = &*state;
    let answers = join_all(asks.map(|(set, chunk)| async move {
        (set[0], renew_batch(client, set, asked, &chunk).await, chunk)
    }))
    .await;
    state.todo.clear();
    lost.into_iter().for_each(|(index, error)| state.again(vec![index], &error));
    for (root, answer, chunk) in answers {
        let RenewReply { statuses, over } = match answer {
            Ok(reply) => reply,
            Err(error) => {
                state.again(chunk, &format!("root {root}: {error}"));
                continue;
            }
        };
        for (index, said) in chunk.into_iter().zip(statuses) {
            match (said, over) {
                (RenewStatus::NotRoot, _) => {
                    state.again(vec![index], &format!("{root} is not the root any more"));
                }
                (RenewStatus::Undecided, _) => {
                    let told = format!("too few of the nodes from {root} on have it or answer");
                    state.again(vec![index], &told);
                }
                (RenewStatus::OverQuota, Some(why)) => {
                    state.outcomes[index] = Err(over_quota(&root, why));
                }
                (said, _) if said.is_held() => state.outcomes[index] = Ok(Renewed::Held),
                _ => state.outcomes[index] = Ok(Renewed::Lacking),
            }
        }
    }
    state.todo.sort_unstable();
}

/// Renews at the first of a replica set, and sees to it that what that says is so; if the root
/// does not answer in its usual time, renews at all of the set.
async fn renew_batch(
    client: &Arc<Client>,
    set: &[Node],
    &Renewing { keys: ref all, lease_secs, will_be_put, .. }: &Renewing,
    chunk: &[usize],
) -> Result<RenewReply, CallError> {
    let (root, count) = (set[0], chunk.len());
    let keys: Vec<Key> = chunk.iter().map(|index| all[*index]).collect();
    let origin = Origin::own(client, lease_secs, &keys);
    let receipt = origin.to_wire(keys.iter().copied());
    let names = keys.iter().map(Name::of).collect();
    let will_be_put_field = will_be_put.then_some(true);
    let renew = Renew { names, lease_secs, as_root: true, receipt, will_be_put: will_be_put_field };
    if client.is_me(&root) {
        return Ok(client.call(&root, &renew, Vec::new()).await?.0);
    }
    let mut calls = Calls::new(client, WaitsFor::Root);
    let mut by_root = set.len() == 1 || answers(client, &root);
    if by_root {
        let (caller, renew) = (client.clone(), renew.clone());
        calls.ask(root, 0, async move {
            Ok(((0..count).collect(), caller.call(&root, &renew, Vec::new()).await?.0))
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
