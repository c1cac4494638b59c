//! Putting blocks on the ring (CFS Table 1: `put_h`, `put_s`; §5.1, §5.5).
//!
//! The node that puts finds each block's root and sends the root one message per batch;
//! the root stores the blocks, sends them on to its k − 1 successors, and answers when
//! a majority has them and all answers that are not overdue have come. So a publisher's uplink
//! carries each block once. What is missing from the rest is repair's work.
//!
//! Each block has its own outcome: what was stored is not put again, and what was not is looked
//! up and tried again until the deadline. No node's word is taken for the whole replica set
//! (`ack_verification`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Instant, sleep, timeout};
use atoll_key::{BlockHash, BlockKind, Key, PeerId, SignedBlock};
use bytes::Bytes;
use futures_util::future::join_all;

use super::Client;
use super::get_signed::saw;
use super::put_batch::{Outcome, put_batch};
use crate::blocks::PutError;
use crate::placement::{Groups, add_to, expected_replicas, present_replicas, replica_sets};
use crate::rpc::{Block, BlockHeader, MAX_BATCH_BLOCKS};
use crate::stats::add;

/// The most bytes of blocks in one message to a root, unless a single block is longer. Over a
/// slow line fewer are sent at a time.
const MOST_BATCH_BYTES: usize = 1 << 20;
/// The first pause before trying again; doubled each time.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause before trying again. A guess: rings notice a dead node in seconds.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Stores content blocks.
pub(crate) async fn put_content(
    client: &Arc<Client>,
    blocks: Vec<(BlockHash, Bytes)>,
) -> Result<(), PutError> {
    let lease_secs = client.config.lease.as_secs();
    let kind = BlockKind::Content;
    let block = |(hash, bytes): (BlockHash, Bytes)| Block {
        header: BlockHeader { key: hash.key(), kind, lease_secs },
        bytes,
    };
    let count = blocks.len() as u64;
    put_all(client, blocks.into_iter().map(block).collect()).await?;
    add(&client.counters.puts, count);
    Ok(())
}

/// Stores a signed block.
pub(crate) async fn put_signed(client: &Arc<Client>, block: SignedBlock) -> Result<(), PutError> {
    let header = BlockHeader {
        key: block.key(),
        kind: BlockKind::Signed,
        lease_secs: client.config.lease.as_secs(),
    };
    let (key, offered) = (block.key(), block.version);
    let put = put_all(client, vec![Block { header, bytes: block.bytes().clone() }]).await;
    match put {
        Err(PutError::Superseded { held, .. }) => Err(PutError::Superseded { offered, held }),
        other => {
            if other.is_ok() {
                saw(client, key, offered);
            }
            other
        }
    }
}

/// What is still to be stored.
struct Pending {
    block: Block,
    /// The nodes that stored it, in earlier attempts that found no majority.
    holders: BTreeSet<PeerId>,
    /// What happened to it last.
    told: String,
}

async fn put_all(client: &Arc<Client>, blocks: Vec<Block>) -> Result<(), PutError> {
    let new = |block| Pending { block, holders: BTreeSet::new(), told: String::new() };
    let mut pending: Vec<Pending> = blocks.into_iter().map(new).collect();
    let count = pending.len();
    let mut pause = FIRST_PAUSE;
    let deadline = client.env.now() + client.config.put_limit;
    loop {
        let left = deadline.since(client.env.now());
        let attempt = timeout(&*client.env, left, put_once(client, &mut pending)).await;
        if let Ok(refused) = attempt {
            refused?;
            if pending.is_empty() {
                return Ok(());
            }
        }
        if attempt_was_last(client, pause, deadline) {
            return Err(unavailable(client, &pending, count));
        }
        sleep(&*client.env, pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn attempt_was_last(client: &Client, pause: Duration, deadline: Instant) -> bool {
    client.env.now() + pause > deadline
}

/// How many of a batch of `count` blocks are not acknowledged, and whose fault that is.
fn unavailable(client: &Client, pending: &[Pending], count: usize) -> PutError {
    let first = pending.iter().find(|pending| !pending.told.is_empty());
    let why = match first {
        Some(Pending { block, told, .. }) => format!("block {}: {told}", block.header.key),
        None => format!("no answer within {} s", client.config.put_limit.as_secs()),
    };
    PutError::Unavailable(format!("{}{why}{}", of_batch(pending.len(), count), absent(client)))
}

/// How much of a batch is meant, if it is one.
pub(super) fn of_batch(part: usize, count: usize) -> String {
    if count > 1 { format!("{part} of {count} blocks: ") } else { String::new() }
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

/// Tries once to store all that is pending; what succeeded is no longer pending.
///
/// # Errors
/// If blocks were refused; all others have had their attempt as well.
async fn put_once(client: &Arc<Client>, pending: &mut Vec<Pending>) -> Result<(), PutError> {
    let keys: Vec<Key> = pending.iter().map(|p| p.block.header.key).collect();
    let mut groups = Groups::new();
    for (index, set) in replica_sets(client, &keys).await.into_iter().enumerate() {
        match set {
            Ok(set) => add_to(&mut groups, set, index),
            Err(told) => pending[index].told = told,
        }
    }
    let room = usize::try_from(client.put_times.room_bytes()).unwrap_or(usize::MAX);
    let batch_bytes = room.min(MOST_BATCH_BYTES);
    let sends = groups.values().flat_map(|(set, indices)| {
        batches(pending, indices, batch_bytes).into_iter().map(move |batch| (set, batch))
    });
    let attempts = join_all(sends.map(|(set, batch)| {
        let blocks = batch.iter().map(|i| pending[*i].block.clone()).collect();
        let holders = batch.iter().map(|i| pending[*i].holders.clone()).collect();
        async move { (batch, put_batch(client, set, blocks, holders).await) }
    }))
    .await;
    let (mut is_done, mut refused) = (vec![false; pending.len()], Vec::new());
    for (batch, outcomes) in attempts {
        for (index, outcome) in batch.into_iter().zip(outcomes) {
            match outcome {
                Outcome::Stored => is_done[index] = true,
                Outcome::Again(holders, told) => {
                    (pending[index].holders, pending[index].told) = (holders, told);
                }
                Outcome::Refused(why) => refused.push(why),
            }
        }
    }
    let (part, count) = (refused.len(), pending.len());
    if let Some(why) = refused.into_iter().next() {
        return Err(match why {
            PutError::Full(who) => PutError::Full(of_batch(part, count) + &who),
            why => why,
        });
    }
    let mut is_done = is_done.into_iter();
    pending.retain(|_| !is_done.next().expect("one for each"));
    Ok(())
}

/// Cuts a group into batches of so many bytes, each of which fits one message.
fn batches(pending: &[Pending], indices: &[usize], batch_bytes: usize) -> Vec<Vec<usize>> {
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut bytes = 0;
    for index in indices {
        let len = pending[*index].block.bytes.len();
        match batches.last_mut() {
            Some(batch) if bytes + len <= batch_bytes && batch.len() < MAX_BATCH_BLOCKS => {
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
