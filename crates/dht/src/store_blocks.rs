//! Putting blocks on the ring (CFS Table 1: `put_h`, `put_s`; §5.1, §5.5).
//!
//! The node that puts finds each block's root and sends the root one message per batch;
//! the root stores the blocks, sends them on to its k − 1 successors, and answers when
//! they have answered. So a publisher's uplink carries each block once. A put succeeds
//! when a majority of each block's replica set has it durably; what is missing from the
//! rest is repair's work. A root that has changed, failed or moved is looked up again,
//! until the deadline. Nobody's word is taken for the whole replica set (`witness`).

use std::collections::BTreeMap;
use std::time::Duration;

use atoll_env::{sleep, timeout};
use atoll_key::{BlockHash, BlockKind, InvalidBlock, Key, SignedBlock};
use atoll_net::header::Capped;
use atoll_net::{CallError, Request};
use atoll_overlay::{Node, distinct_peers};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream;

use crate::admission::Origin;
use crate::blocks::PutError;
use crate::inner::{Block, Inner};
use crate::messages::{
    self, BlockHeader, MAX_BATCH_BLOCKS, MAX_RENEW_KEYS, Put, PutReply, PutStatus, Renew,
    RenewReply, from_header, is_majority, to_header,
};
use crate::quota::OverQuota;
use crate::renewals::renew_here;
use crate::replicas::store_as_root;
use crate::stats::add;
use crate::witness::{check_put, check_renewal};

/// Bytes of blocks in one message to a root, unless a single block is longer.
const BATCH_BYTES: usize = 1 << 20;
/// Roots looked up at once.
const LOOKUPS_AT_ONCE: usize = 16;
/// The first pause before trying again; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause before trying again.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Stores content blocks.
pub(crate) async fn put_content(
    inner: &Inner,
    blocks: Vec<(BlockHash, Bytes)>,
) -> Result<(), PutError> {
    let lease_secs = inner.config.lease.as_secs();
    let kind = BlockKind::Content as u8;
    let block = |(hash, bytes): (BlockHash, Bytes)| Block {
        header: BlockHeader { key: hash.key(), kind, lease_secs },
        bytes,
    };
    let count = blocks.len() as u64;
    put_all(inner, blocks.into_iter().map(block).collect()).await?;
    add(&inner.counters.puts, count);
    Ok(())
}

/// Stores a signed block.
pub(crate) async fn put_signed(inner: &Inner, block: SignedBlock) -> Result<(), PutError> {
    let header = BlockHeader {
        key: block.key(),
        kind: BlockKind::Signed as u8,
        lease_secs: inner.config.lease.as_secs(),
    };
    let offered = block.version;
    let put = put_all(inner, vec![Block { header, bytes: block.bytes().clone() }]).await;
    match put {
        Err(PutError::Superseded { held, .. }) => Err(PutError::Superseded { offered, held }),
        other => other,
    }
}

/// What is still to be stored, and what happened to it last.
struct Pending {
    block: Block,
    told: String,
}

async fn put_all(inner: &Inner, blocks: Vec<Block>) -> Result<(), PutError> {
    let mut pending: Vec<Pending> =
        blocks.into_iter().map(|block| Pending { block, told: String::new() }).collect();
    let mut pause = FIRST_PAUSE;
    let deadline = inner.env.now() + inner.config.put_limit;
    loop {
        let left = deadline.since(inner.env.now());
        let Ok(result) = timeout(&*inner.env, left, put_once(inner, &mut pending)).await else {
            return Err(PutError::Unavailable(format!(
                "{} blocks were not acknowledged within {} s",
                pending.len(),
                inner.config.put_limit.as_secs()
            )));
        };
        result?;
        let Some(first) = pending.first() else { return Ok(()) };
        if inner.env.now() + pause > deadline {
            return Err(PutError::Unavailable(format!(
                "block {}: {} (and {} more)",
                first.block.header.key,
                first.told,
                pending.len() - 1
            )));
        }
        sleep(&*inner.env, pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Tries once to store all that is pending; what succeeded is no longer pending.
async fn put_once(inner: &Inner, pending: &mut Vec<Pending>) -> Result<(), PutError> {
    let keys: Vec<Key> = pending.iter().map(|p| p.block.header.key).collect();
    let mut groups = Groups::new();
    for (index, set) in replica_sets(inner, &keys).await.into_iter().enumerate() {
        match set {
            Ok(set) => add_to(&mut groups, set, index),
            Err(told) => pending[index].told = told,
        }
    }
    let sends = groups.values().flat_map(|(set, indices)| {
        batches(pending, indices).into_iter().map(move |batch| (set, batch))
    });
    let answers = join_all(sends.map(|(set, batch)| {
        let blocks: Vec<Block> = batch.iter().map(|i| pending[*i].block.clone()).collect();
        async move { (set[0], batch, put_at_root(inner, set, blocks).await) }
    }))
    .await;
    let mut done = vec![false; pending.len()];
    for (root, batch, answer) in answers {
        match answer {
            Ok(statuses) => {
                for (index, status) in batch.into_iter().zip(statuses) {
                    match judge(&root, status)? {
                        None => done[index] = true,
                        Some(told) => pending[index].told = told,
                    }
                }
            }
            Err(error) => {
                for index in batch {
                    pending[index].told = format!("root {root:?}: {error}");
                }
            }
        }
    }
    let mut index = 0;
    pending.retain(|_| {
        index += 1;
        !done[index - 1]
    });
    Ok(())
}

/// Whether a status is success (`None`), worth another try (the reason), or final.
fn judge(root: &Node, status: PutStatus) -> Result<Option<String>, PutError> {
    match status {
        PutStatus::Stored { copies, wanted } if is_majority(copies, wanted) => Ok(None),
        PutStatus::Stored { copies, wanted } => {
            Ok(Some(format!("only {copies} of {wanted} nodes from {root:?} on have it")))
        }
        PutStatus::NotRoot => Ok(Some(format!("{root:?} is not its root any more"))),
        PutStatus::Failed => Ok(Some(format!("the disk of {root:?} failed"))),
        PutStatus::Full => Err(PutError::Full(format!("{root:?} is full"))),
        PutStatus::OverQuota { used_bytes, allowed_bytes, of } => {
            Err(over_quota(root, OverQuota { used_bytes, allowed_bytes, of }))
        }
        PutStatus::Invalid => Err(InvalidBlock::WrongHash.into()),
        PutStatus::Superseded { held } => Err(PutError::Superseded { offered: 0, held }),
    }
}

fn over_quota(root: &Node, over: OverQuota) -> PutError {
    let OverQuota { used_bytes, allowed_bytes, of } = over;
    let who = format!("this node's {of}, on {root:?} or a replica of it,");
    PutError::OverQuota { used_bytes, allowed_bytes, who }
}

/// Cuts a group into batches that fit one message.
fn batches(pending: &[Pending], indices: &[usize]) -> Vec<Vec<usize>> {
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut bytes = 0;
    for index in indices {
        let len = pending[*index].block.bytes.len();
        match batches.last_mut() {
            Some(batch) if bytes + len <= BATCH_BYTES && batch.len() < MAX_BATCH_BLOCKS => {
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

/// Puts a batch at the first of its replica set, and sees to it that it is where that says.
async fn put_at_root(
    inner: &Inner,
    set: &[Node],
    blocks: Vec<Block>,
) -> Result<Vec<PutStatus>, CallError> {
    let root = &set[0];
    let keys: Vec<Key> = blocks.iter().map(|block| block.header.key).collect();
    let origin = Origin::own(inner, inner.config.lease.as_secs(), &keys);
    if inner.is_me(root) {
        return Ok(store_as_root(inner, &root.peer, &origin, blocks).await?);
    }
    let headers: Vec<BlockHeader> = blocks.iter().map(|block| block.header).collect();
    let parts = blocks.iter().map(|block| block.bytes.clone()).collect();
    let receipt = origin.to_wire(keys.into_iter());
    let header = to_header(&Put { blocks: headers.into(), as_root: true, receipt });
    let reply = inner.call(root, Request { method: messages::PUT, header, parts }).await?;
    let PutReply { statuses: Capped(mut statuses) } = from_header(&reply.header)?;
    if statuses.len() != blocks.len() {
        return Err(malformed("statuses do not match the blocks sent"));
    }
    check_put(inner, set, &origin, &blocks, &mut statuses).await;
    Ok(statuses)
}

fn malformed(text: &str) -> CallError {
    CallError::Refused(atoll_net::Refusal::new(atoll_net::Refusal::MALFORMED, text))
}

/// Blocks by their root: its replica set, the root first, and their numbers.
type Groups = BTreeMap<Node, (Vec<Node>, Vec<usize>)>;

/// Adds a block to those of the first of `set`.
fn add_to(groups: &mut Groups, set: Vec<Node>, index: usize) {
    groups.entry(set[0]).or_insert_with(|| (set, Vec::new())).1.push(index);
}

/// The replica set of each key, its root first, or why the root could not be found.
async fn replica_sets(inner: &Inner, keys: &[Key]) -> Vec<Result<Vec<Node>, String>> {
    let find = |key: Key| async move {
        let set = distinct_peers(&inner.root_list(&key).await?, inner.config.replicas);
        if set.is_empty() { Err("the ring has no nodes".to_owned()) } else { Ok(set) }
    };
    stream::iter(keys.to_vec()).map(find).buffered(LOOKUPS_AT_ONCE).collect().await
}

/// Extends leases; returns the blocks the ring lacks, in the order given.
pub(crate) async fn renew(
    inner: &Inner,
    hashes: Vec<BlockHash>,
) -> Result<Vec<BlockHash>, PutError> {
    let keys: Vec<Key> = hashes.iter().map(BlockHash::key).collect();
    let mut held = vec![false; keys.len()];
    let mut todo: Vec<usize> = (0..keys.len()).collect();
    let mut over = None;
    let mut pause = FIRST_PAUSE;
    let deadline = inner.env.now() + inner.config.put_limit;
    while !todo.is_empty() {
        let left = deadline.since(inner.env.now());
        let asked = renew_once(inner, &keys, &todo, &mut held, &mut over);
        let Ok((again, told)) = timeout(&*inner.env, left, asked).await else {
            return Err(PutError::Unavailable(format!(
                "the roots of {} blocks did not answer within {} s",
                todo.len(),
                inner.config.put_limit.as_secs()
            )));
        };
        todo = again;
        if todo.is_empty() {
            break;
        }
        if inner.env.now() + pause > deadline {
            return Err(PutError::Unavailable(told));
        }
        sleep(&*inner.env, pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    // What could be renewed has been.
    if let Some(over) = over {
        return Err(over);
    }
    Ok(hashes.into_iter().zip(held).filter(|(_, held)| !held).map(|(hash, _)| hash).collect())
}

/// Asks the roots once; returns which keys have to be asked for again, and why.
async fn renew_once(
    inner: &Inner,
    keys: &[Key],
    todo: &[usize],
    held: &mut [bool],
    over: &mut Option<PutError>,
) -> (Vec<usize>, String) {
    let wanted: Vec<Key> = todo.iter().map(|index| keys[*index]).collect();
    let (mut groups, mut again, mut told) = (Groups::new(), Vec::new(), String::new());
    for (index, set) in todo.iter().zip(replica_sets(inner, &wanted).await) {
        match set {
            Ok(set) => add_to(&mut groups, set, *index),
            Err(error) => {
                again.push(*index);
                told = error;
            }
        }
    }
    let asks = groups.values().flat_map(|(set, indices)| {
        indices.chunks(MAX_RENEW_KEYS).map(move |chunk| (set, chunk.to_vec()))
    });
    let answers = join_all(asks.map(|(set, chunk)| async move {
        let keys = chunk.iter().map(|index| keys[*index]).collect();
        let answer = renew_at_root(inner, set, keys).await;
        (set[0], chunk, answer)
    }))
    .await;
    for (root, chunk, answer) in answers {
        match answer {
            Ok(RenewReply { held: states, over: why }) => {
                if let Some(why) = why {
                    *over = Some(over_quota(&root, why));
                }
                for (index, state) in chunk.into_iter().zip(states) {
                    match state {
                        2 => {
                            told = format!("{root:?} is not the root any more");
                            again.push(index);
                        }
                        3 => {
                            told =
                                format!("too few of the nodes from {root:?} on have it or answer");
                            again.push(index);
                        }
                        state => held[index] = state == 1 || state == 4,
                    }
                }
            }
            Err(error) => {
                told = format!("root {root:?}: {error}");
                again.extend(chunk);
            }
        }
    }
    again.sort_unstable();
    (again, told)
}

/// Renews at the first of a replica set, and sees to it that what that says is so.
async fn renew_at_root(
    inner: &Inner,
    set: &[Node],
    keys: Vec<Key>,
) -> Result<RenewReply, CallError> {
    let (root, count) = (&set[0], keys.len());
    let lease_secs = inner.config.lease.as_secs();
    let origin = Origin::own(inner, lease_secs, &keys);
    let receipt = origin.to_wire(keys.iter().copied());
    let renew = Renew { keys, lease_secs, as_root: true, receipt };
    if inner.is_me(root) {
        return Ok(renew_here(inner, &origin, &renew).await?);
    }
    let header = to_header(&renew);
    let request = Request { method: messages::RENEW, header, parts: Vec::new() };
    let mut reply: RenewReply = from_header(&inner.call(root, request).await?.header)?;
    if reply.held.len() != count {
        return Err(malformed("answers do not match the keys sent"));
    }
    check_renewal(inner, set, &origin, &renew, &mut reply.held).await;
    Ok(reply)
}
