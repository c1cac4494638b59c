//! Putting blocks on the ring (CFS Table 1: `put_h`, `put_s`; §5.1, §5.5).
//!
//! The node that puts finds each block's root and sends the root one message per batch;
//! the root stores the blocks, sends them on to its k − 1 successors, and answers when
//! a majority has them and all answers that are not overdue have come. So a publisher's uplink
//! carries each block once. What is missing from the rest is repair's work. Mutable blocks are
//! small and go to all replicas at once (`put_mutable`).
//!
//! Each block has its own outcome: what was stored is not put again, and what was not is looked
//! up and tried again until the deadline. No node's word is taken for the whole replica set
//! (`ack_verification`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Instant, sleep, timeout};
use atoll_key::{BlockId, Key, KeyRange, PeerId};
use atoll_overlay::Node;
use futures_util::future::join_all;

use super::get_mutable::saw;
use super::known_sets::{KnownSets, NamedNodes};
use super::put_batch::{Outcome, put_batch};
use super::put_mutable::{put_mutable, put_together};
use super::{Client, FIRST_PAUSE};
use crate::accounting::admission::Origin;
use crate::blocks::{NewBlock, PutError};
use crate::placement::{Groups, add_to, expected_replicas, present_replicas, replica_sets};
use crate::rpc::{Block, BlockHeader, MAX_BATCH_BLOCKS, MAX_KEYS, NAME_BYTES};

/// The most bytes of blocks in one message to a root, unless a single block is longer. Over a
/// slow line fewer are sent at a time.
const MOST_BATCH_BYTES: usize = 1 << 20;
/// The tags of a receipt for several messages may take one in so many bytes. A guess.
const SHARED_RECEIPT_SHARE: usize = 64;
/// The longest pause before trying again. A guess: rings notice a dead node in seconds.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A put is tried again for so long while nodes answer that they are full: other nodes may take their copies, or the replica
/// set may change. A guess.
const FULL_PATIENCE: Duration = Duration::from_secs(2);

/// What a put does with a block after an attempt in which the nodes answered that they are full.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IfFull {
    AskAgain,
    GiveUp,
}

/// Stores blocks; an outcome for each, in their order.
pub(crate) async fn put_blocks(
    client: &Arc<Client>,
    blocks: Vec<NewBlock>,
) -> Vec<Result<(), PutError>> {
    let mut outcomes = vec![Ok(()); blocks.len()];
    let pending = pending(client, blocks, &mut outcomes);
    put_all(client, pending, &mut outcomes).await;
    outcomes
}

/// The blocks that can be put, in their order; of the others, the outcome.
fn pending(
    client: &Client,
    blocks: Vec<NewBlock>,
    outcomes: &mut [Result<(), PutError>],
) -> Vec<Pending> {
    let lease = |asked: Option<u64>| asked.unwrap_or(client.config.lease.as_secs());
    let mut pending = Vec::new();
    for (place, NewBlock { id, bytes, lease_secs }) in blocks.into_iter().enumerate() {
        // The nodes that store it check a block that never changes.
        let version = if id.kind.is_mutable() { id.verify(&bytes) } else { Ok(0) };
        // Replicas ask the same; a certificate that has run out is known at once here.
        let admitted = id.kind.admit(None, &bytes, client.env.unix_ms());
        match version.map_err(PutError::from).and_then(|version| Ok((version, admitted?))) {
            Ok((version, ())) => {
                let BlockId { key, kind } = id;
                let header = BlockHeader { key, kind, lease_secs: lease(lease_secs) };
                let block = Block { header, bytes };
                let (holders, told) = (BTreeSet::new(), String::new());
                pending.push(Pending { place, block, version, holders, told });
            }
            Err(error) => outcomes[place] = Err(error),
        }
    }
    pending
}

/// Stores mutable blocks in their order, none without those before it; an outcome for each. Those that have the
/// replica set of the last one are put together.
pub(crate) async fn put_in_order(
    client: &Arc<Client>,
    blocks: Vec<NewBlock>,
) -> Vec<Result<(), PutError>> {
    let mut outcomes = vec![Ok(()); blocks.len()];
    let mut pending = pending(client, blocks, &mut outcomes);
    if outcomes.iter().all(Result::is_ok) && client.config.mechanisms.joint_puts {
        put_jointly(client, &mut pending, &mut outcomes).await;
    }
    for one in pending {
        if outcomes[..one.place].iter().all(Result::is_ok) {
            put_all(client, vec![one], &mut outcomes).await;
        }
    }
    if let Some(first) = outcomes.iter().position(Result::is_err) {
        let refused = outcomes[first].clone();
        outcomes[first..].fill(refused);
    }
    outcomes
}

/// Tries once to put blocks together; what was stored or refused is no longer pending then.
async fn put_jointly(
    client: &Arc<Client>,
    pending: &mut Vec<Pending>,
    outcomes: &mut [Result<(), PutError>],
) {
    let Some(named) = common_set(client, pending) else { return };
    let blocks = pending.iter().map(|one| one.block.clone()).collect();
    let holders = pending.iter().map(|one| one.holders.clone()).collect();
    let together = put_together(client, blocks, holders, &named);
    let Ok(results) = timeout(&*client.env, client.config.put_limit, together).await else {
        return;
    };
    let results = (0..).zip(results).collect();
    note_results(client, pending, (results, IfFull::AskAgain), outcomes);
}

/// The replica set that blocks have in common, if that is known without a lookup.
fn common_set(client: &Arc<Client>, pending: &[Pending]) -> Option<NamedNodes> {
    let last = pending.last()?;
    let key = last.block.header.key;
    let named = KnownSets::known(client, &key, false)?;
    let same = KeyRange::new(key.previous(), *named.nodes.first()?.id.key());
    let goes_along = |one: &Pending| {
        let BlockHeader { key, kind, lease_secs } = one.block.header;
        let is_alike = kind == last.block.header.kind && lease_secs == last.block.header.lease_secs;
        kind.is_mutable() && is_alike && same.contains(&key)
    };
    let keys: BTreeSet<Key> = pending.iter().map(|one| one.block.header.key).collect();
    if !pending.iter().all(goes_along) || keys.len() < pending.len() {
        return None;
    }
    let bytes: usize = pending.iter().map(|one| one.block.bytes.len()).sum();
    if pending.len() > MAX_BATCH_BLOCKS || bytes > MOST_BATCH_BYTES {
        return None;
    }
    pending.iter().for_each(|one| KnownSets::note_same(client, one.block.header.key, &key));
    Some(named)
}

/// What is still to be stored.
struct Pending {
    /// Its place in the batch.
    place: usize,
    block: Block,
    version: u64,
    /// The nodes that stored it, in earlier attempts that found no majority.
    holders: BTreeSet<PeerId>,
    /// What happened to it last.
    told: String,
}

async fn put_all(
    client: &Arc<Client>,
    mut pending: Vec<Pending>,
    outcomes: &mut [Result<(), PutError>],
) {
    let mut pause = FIRST_PAUSE;
    let began = client.env.now();
    let deadline = began + client.config.put_limit;
    while !pending.is_empty() {
        let now = client.env.now();
        let left = deadline.since(now);
        let if_full =
            if now.since(began) < FULL_PATIENCE { IfFull::AskAgain } else { IfFull::GiveUp };
        let attempt = put_once(client, &mut pending, if_full, outcomes);
        // A time limit that passes leaves what was not decided pending.
        let _ = timeout(&*client.env, left, attempt).await;
        if pending.is_empty() {
            return;
        }
        if attempt_was_last(client, pause, deadline) {
            for block in &pending {
                outcomes[block.place] = Err(unavailable(client, block));
            }
            return;
        }
        sleep(&*client.env, pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn attempt_was_last(client: &Client, pause: Duration, deadline: Instant) -> bool {
    client.env.now() + pause > deadline
}

/// Why a block is not acknowledged, and whose fault that is.
fn unavailable(client: &Client, Pending { block, told, .. }: &Pending) -> PutError {
    let why = match told.is_empty() {
        true => format!("no answer within {} s", client.config.put_limit.as_secs()),
        false => format!("block {}: {told}", block.header.key),
    };
    PutError::Unavailable(format!("{why}{}", absent(client)))
}

/// If nodes are missing: that they are.
pub(super) fn absent(client: &Client) -> String {
    let (present, expected) = (present_replicas(client) + 1, expected_replicas(client) + 1);
    if present >= expected {
        return String::new();
    }
    format!(
        "; only {present} of {expected} nodes that keep a block together are there (if the others \
         are gone for good: `atoll settings --forget-absent`)"
    )
}

/// Tries once to store all that is pending. What was stored or refused is no longer pending then.
async fn put_once(
    client: &Arc<Client>,
    pending: &mut Vec<Pending>,
    if_full: IfFull,
    outcomes: &mut [Result<(), PutError>],
) {
    let (mutable, content): (Vec<usize>, Vec<usize>) =
        (0..pending.len()).partition(|index| pending[*index].block.is_mutable());
    let puts = join_all(mutable.into_iter().map(|index| {
        let Pending { block, holders, told, .. } = &pending[index];
        let (block, holders, anew) = (block.clone(), holders.clone(), !told.is_empty());
        async move { (vec![index], vec![put_mutable(client, block, holders, anew).await]) }
    }));
    let (mut attempts, content) =
        futures_util::join!(puts, put_through_roots(client, pending, &content));
    attempts.extend(content);
    let results = attempts.into_iter().flat_map(|(batch, results)| batch.into_iter().zip(results));
    note_results(client, pending, (results.collect(), if_full), outcomes);
}

/// Notes what became of blocks in an attempt, by their numbers among those pending.
fn note_results(
    client: &Client,
    pending: &mut Vec<Pending>,
    (results, if_full): (Vec<(usize, Outcome)>, IfFull),
    outcomes: &mut [Result<(), PutError>],
) {
    let mut is_done = vec![false; pending.len()];
    for (index, result) in results {
        let Pending { place, version, ref holders, .. } = pending[index];
        let result = match result {
            Outcome::Refused(why @ PutError::Full(_)) if if_full == IfFull::AskAgain => {
                Outcome::Again(holders.clone(), why.to_string())
            }
            result => result,
        };
        is_done[index] = !matches!(result, Outcome::Again(..));
        match result {
            Outcome::Stored => {
                if pending[index].block.is_mutable() {
                    saw(client, pending[index].block.header.key, version);
                }
            }
            Outcome::Again(holders, told) => {
                (pending[index].holders, pending[index].told) = (holders, told);
            }
            Outcome::Refused(why) => outcomes[place] = Err(why),
        }
    }
    let mut is_done = is_done.into_iter();
    pending.retain(|_| !is_done.next().expect("one for each"));
}

/// Puts the blocks with these numbers, which never change, through their roots; says of each batch
/// what became of it.
async fn put_through_roots(
    client: &Arc<Client>,
    pending: &[Pending],
    content: &[usize],
) -> Vec<(Vec<usize>, Vec<Outcome>)> {
    let keys: Vec<Key> = content.iter().map(|index| pending[*index].block.header.key).collect();
    let (mut groups, mut attempts) = (Groups::new(), Vec::new());
    for (index, set) in content.iter().zip(replica_sets(client, &keys).await) {
        match set {
            Ok(set) => add_to(&mut groups, set, *index),
            Err(told) => {
                let again = Outcome::Again(pending[*index].holders.clone(), told);
                attempts.push((vec![*index], vec![again]));
            }
        }
    }
    let room = usize::try_from(client.put_times.room_bytes()).unwrap_or(usize::MAX);
    let batch_bytes = room.min(MOST_BATCH_BYTES);
    let sends: Vec<(&[Node], Vec<usize>)> = groups
        .values()
        .flat_map(|(set, indices)| {
            batches(pending, indices, batch_bytes).into_iter().map(move |batch| (&set[..], batch))
        })
        .collect();
    let shared = shared_receipt(client, pending, &sends);
    attempts.extend(
        join_all(sends.into_iter().map(|(set, batch)| {
            let blocks: Vec<Block> = batch.iter().map(|i| pending[*i].block.clone()).collect();
            let holders = batch.iter().map(|i| pending[*i].holders.clone()).collect();
            let origin = shared.clone().unwrap_or_else(|| {
                let keys: Vec<Key> = blocks.iter().map(|block| block.header.key).collect();
                Origin::own(client, blocks[0].header.lease_secs, &keys)
            });
            async move { (batch, put_batch(client, set, &origin, blocks, holders).await) }
        }))
        .await,
    );
    attempts
}

/// One receipt for all blocks of these batches, so that it is signed once, and verified once by each
/// node. None if its tags, which each batch then carries, are not few beside the blocks.
fn shared_receipt(
    client: &Client,
    pending: &[Pending],
    sends: &[(&[Node], Vec<usize>)],
) -> Option<Origin> {
    let blocks: Vec<&Block> =
        sends.iter().flat_map(|(_, batch)| batch).map(|index| &pending[*index].block).collect();
    let lease_secs = blocks.first()?.header.lease_secs;
    let block_bytes: usize = blocks.iter().map(|block| block.bytes.len()).sum();
    let tag_bytes = sends.len() * blocks.len() * NAME_BYTES;
    if sends.len() == 1
        || blocks.len() > MAX_KEYS
        || tag_bytes > block_bytes / SHARED_RECEIPT_SHARE
        || blocks.iter().any(|block| block.header.lease_secs != lease_secs)
    {
        return None;
    }
    let keys: Vec<Key> = blocks.iter().map(|block| block.header.key).collect();
    Some(Origin::own(client, lease_secs, &keys))
}

/// Cuts a group into batches of so many bytes and one lease, each of which fits one message.
fn batches(pending: &[Pending], indices: &[usize], batch_bytes: usize) -> Vec<Vec<usize>> {
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut bytes = 0;
    for index in indices {
        let len = pending[*index].block.bytes.len();
        let lease = |index: usize| pending[index].block.header.lease_secs;
        match batches.last_mut() {
            Some(batch)
                if bytes + len <= batch_bytes
                    && batch.len() < MAX_BATCH_BLOCKS
                    && lease(batch[0]) == lease(*index) =>
            {
                batch.push(*index);
                bytes += len;
            }
            _ => {
                batches.push(vec![*index]);
                bytes = len;
            }
        }
    }
    batches
}
