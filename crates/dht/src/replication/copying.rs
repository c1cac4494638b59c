//! Copying blocks to or from one other node, as far as there is room and time.
//!
//! Nothing here holds more than a batch of blocks in memory.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use atoll_env::sleep;
use atoll_key::{Key, PeerId};
use atoll_net::CallError;
use atoll_overlay::Node;
use atoll_store::StoreError;

use super::Replication;
use super::obstacle::Obstacle;
use super::released;
use super::store::{put_message, store_here};
use crate::accounting::admission::Origin;
use crate::context::REPLY_BYTES;
use crate::diversion::{self, follow};
use crate::rpc::backoff::SetBack;
use crate::rpc::budget::PeerBudget;
use crate::rpc::{
    Block, Fetch, FetchReply, Item, MAX_BATCH_BLOCKS, PutStatus, There, is_majority, to_blocks,
};

/// Why an exchange ended early.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ExchangeError {
    #[error("call: {0}")]
    Call(#[from] CallError),
    #[error("store: {0}")]
    Store(#[from] StoreError),
    #[error("the other side's answer is not well-formed")]
    IllFormed,
    #[error("the other side's answers lead nowhere")]
    Endless,
    #[error("the other side is busy")]
    Later,
}

impl ExchangeError {
    /// Whether the exchange should be tried again at once: what failed is not what the other
    /// side says.
    pub(super) fn is_failure(&self) -> bool {
        !self.is_misbehaviour() && !matches!(self, ExchangeError::Later)
    }

    /// Whether the other side says what makes no sense, or no.
    pub(super) fn is_misbehaviour(&self) -> bool {
        use ExchangeError::{Call, Endless, IllFormed};
        matches!(self, IllFormed | Endless | Call(CallError::Refused(_)))
    }

    /// What keeps blocks from being copied.
    pub(super) fn obstacle(&self) -> Obstacle {
        match self {
            ExchangeError::Call(CallError::Refused(_)) => Obstacle::Refused,
            ExchangeError::Call(_) => Obstacle::Unreachable,
            ExchangeError::Store(_) => Obstacle::Disk,
            ExchangeError::IllFormed | ExchangeError::Endless => Obstacle::Senseless,
            ExchangeError::Later => Obstacle::Busy,
        }
    }
}

impl From<atoll_net::Refusal> for ExchangeError {
    fn from(refusal: atoll_net::Refusal) -> ExchangeError {
        ExchangeError::Call(refusal.into())
    }
}

/// What an exchange did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Blocks copied either way, and those that a put or another exchange is copying.
    pub moved: u64,
    /// Blocks that differ still, by what kept them from being copied.
    pub left: BTreeMap<Obstacle, u64>,
}

impl Outcome {
    /// So many blocks could not be copied.
    pub(super) fn leave(&mut self, blocks: u64, why: Obstacle) {
        if blocks > 0 {
            *self.left.entry(why).or_default() += blocks;
        }
    }
}

impl AddAssign for Outcome {
    fn add_assign(&mut self, other: Outcome) {
        self.moved += other.moved;
        other.left.into_iter().for_each(|(why, blocks)| self.leave(blocks, why));
    }
}

/// Of `items`, the keys that may be offered to `node`, which may be this one. Counts those that a
/// put is sending there as moved, and the others as left.
fn offered(
    replication: &Replication,
    node: &PeerId,
    items: &[Item],
    outcome: &mut Outcome,
) -> Vec<Key> {
    let (repair, now) = (&replication.repair, replication.env.now());
    let set_back = replication.backoff.set_back_for(node, now).map(|why| {
        let is_here = *node == replication.transport.local().id;
        if is_here { Obstacle::NoRoomHere } else { why.into() }
    });
    let leaves = replication.config.mechanisms.in_flight;
    let is_on_its_way = |item: &&Item| leaves && replication.in_flight.of(&(*node, item.key)) > 0;
    let (on_their_way, others): (Vec<&Item>, Vec<&Item>) = items.iter().partition(is_on_its_way);
    outcome.moved += on_their_way.len() as u64;
    let mut offered = Vec::with_capacity(others.len());
    for item in others {
        let refused = repair.refused_by(node, &item.key, now);
        match set_back.or(refused) {
            Some(why) => outcome.leave(1, why),
            None => offered.push(item.key),
        }
    }
    offered
}

/// Fetches blocks from `at`, which is `other` or keeps them for it, verifies and stores them, as
/// far as there is room and time.
pub(super) async fn take(
    replication: &Replication,
    other: &Node,
    at: &Node,
    items: &[Item],
    time: &mut PeerBudget<'_>,
) -> Result<Outcome, ExchangeError> {
    let mut outcome = Outcome::default();
    let me = replication.transport.local().id;
    let mut wanted = offered(replication, &me, items, &mut outcome);
    let released = released::stay_released(replication, &wanted).await;
    wanted.retain(|key| !released.contains(key));
    let versions: BTreeMap<Key, u64> = items.iter().map(|item| (item.key, item.version)).collect();
    let is_lacking = |key: &Key| {
        let known = replication.known(key);
        known.is_none_or(|known| known.kind.replaces(versions[key], known.version))
    };
    let mut elsewhere: BTreeMap<PeerId, (Node, Vec<Item>)> = BTreeMap::new();
    while !wanted.is_empty() {
        // Another exchange may have brought some of them since, or be about to.
        let batch = wanted.drain(..wanted.len().min(MAX_BATCH_BLOCKS));
        let lacking = batch.filter(is_lacking).collect();
        let (asked, elsewhere_asked) =
            replication.repair.begin_fetch(lacking, replication.env.now());
        outcome.moved += elsewhere_asked;
        if asked.keys.is_empty() {
            continue;
        }
        let fetch = Fetch { keys: asked.keys.clone() };
        let Some((reply, parts)) = time.call(at, &fetch, Vec::new()).await? else {
            outcome.leave((asked.keys.len() + wanted.len()) as u64, Obstacle::Slow);
            return Ok(outcome);
        };
        let asked = &asked.keys;
        let FetchReply { blocks: headers, there } = reply;
        // An answer may stop early because it is full, never with nothing: what stands after
        // the last block in it, of use or not, is asked for again.
        let place = |named: &Key| asked.iter().position(|key| key == named);
        let named = headers.0.iter().map(|header| &header.key);
        if let Some(last) = named.chain(there.0.iter().map(|at| &at.key)).filter_map(place).max() {
            wanted.splice(0..0, asked[last + 1..].iter().copied());
        }
        for There { key, holder } in there.0 {
            let item = items.iter().find(|item| item.key == key && asked.contains(&key));
            // A pointer is followed once.
            if at.peer.id == other.peer.id && holder.id != me {
                let its = elsewhere.entry(holder.id);
                its.or_insert_with(|| (Node::of(holder), Vec::new())).1.extend(item);
            }
        }
        let blocks = to_blocks(headers, parts);
        let blocks = blocks.into_iter().filter(|block| is_good(replication, at, asked, block));
        if !store_taken(replication, other, blocks.collect(), &mut outcome, time).await {
            outcome.leave(wanted.len() as u64, Obstacle::NoRoomHere);
            return Ok(outcome);
        }
    }
    take_elsewhere(replication, other, elsewhere, &mut outcome, time).await?;
    Ok(outcome)
}

/// Stores a batch that was fetched for `other`; false if this node has no room for any of it.
async fn store_taken(
    replication: &Replication,
    other: &Node,
    batch: Vec<Block>,
    outcome: &mut Outcome,
    time: &mut PeerBudget<'_>,
) -> bool {
    let bytes = batch.iter().map(|block| block.bytes.len() as u64).sum();
    let count = batch.len() as u64;
    time.moved(count, bytes);
    if count == 0 {
        // Gone since it was listed, or expired: not ours to copy.
        return true;
    }
    let me = replication.transport.local().id;
    let version = |block: &Block| replication.known(&block.header.key).map(|held| held.version);
    let before: Vec<Option<u64>> = batch.iter().map(version).collect();
    let statuses = store_here(replication, &other.peer, &batch).await;
    let kept = statuses.iter().filter(|status| is_settled(status)).count() as u64;
    if kept == 0 && diversion::has_no_room(replication) {
        replication.backoff.set_back(me, replication.env.now(), SetBack::Full);
        outcome.leave(count, Obstacle::NoRoomHere);
        return false;
    }
    if kept == count {
        replication.backoff.kept(&me);
    }
    let is_left = |status: &PutStatus| !is_settled(status) && *status != PutStatus::Released;
    for (block, status) in batch.iter().zip(&statuses).filter(|(_, status)| is_left(status)) {
        let why = Obstacle::here(status);
        outcome.leave(1, why);
        // A block that found no account, or whose time has not come, is not fetched again soon.
        if replication.known(&block.header.key).is_none() {
            let now = replication.env.now();
            replication.repair.decline(me, block.header.key, why, now, &replication.backoff);
        }
    }
    // What brought nothing new to a block that joins is no progress: it would be fetched for ever while
    // the other side cannot take this one's.
    let adds_nothing = |at: &usize| {
        let block = &batch[*at];
        is_settled(&statuses[*at]) && block.header.kind.joins() && version(block) == before[*at]
    };
    let known = (0..batch.len()).filter(adds_nothing).count() as u64;
    outcome.leave(known, Obstacle::NotJoined);
    outcome.moved += kept - known;
    replication.repair.done(kept, bytes);
    pace(replication, bytes).await;
    true
}

/// Fetches blocks that other nodes keep for `other`.
async fn take_elsewhere(
    replication: &Replication,
    other: &Node,
    elsewhere: BTreeMap<PeerId, (Node, Vec<Item>)>,
    outcome: &mut Outcome,
    time: &mut PeerBudget<'_>,
) -> Result<(), ExchangeError> {
    for (holder, its) in elsewhere.into_values() {
        let mut its_time = time.within(holder.peer.id);
        let taken = Box::pin(take(replication, other, &holder, &its, &mut its_time)).await;
        match taken {
            Ok(taken) => *outcome += taken,
            // Other replicas may have these too.
            Err(ExchangeError::Call(error)) => {
                tracing::info!(?holder, %error, "diverted copies could not be fetched");
                outcome.leave(its.len() as u64, Obstacle::Unreachable);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether a fetched block was asked for, is not expired, and is what its key says.
fn is_good(replication: &Replication, from: &Node, asked: &[Key], block: &Block) -> bool {
    let key = &block.header.key;
    if !asked.contains(key) || block.header.lease_secs == 0 {
        return false;
    }
    if let Err(error) = block.header.kind.verify(key, &block.bytes) {
        tracing::warn!(%key, ?from, %error, "dropped a bad block");
        replication.counters.mark(from.peer.id);
        return false;
    }
    true
}

/// Sends blocks to `other`, as to a replica, as far as it takes them in its time; also says which it
/// acknowledged.
pub(crate) async fn give(
    replication: &Replication,
    other: &Node,
    items: &[Item],
    time: &mut PeerBudget<'_>,
) -> Result<(Outcome, Vec<Key>), ExchangeError> {
    let (mut outcome, mut acknowledged) = (Outcome::default(), Vec::new());
    let keys = offered(replication, &other.peer.id, items, &mut outcome);
    let keys = released::not_refused(replication, &other.peer.id, keys);
    let mut keys = keys.into_iter().peekable();
    while keys.peek().is_some() {
        let blocks = read_batch(replication, &mut keys, &mut outcome).await;
        if blocks.is_empty() {
            continue;
        }
        let bytes: u64 = blocks.iter().map(|block| block.bytes.len() as u64).sum();
        let sent: Vec<Key> = blocks.iter().map(|block| block.header.key).collect();
        let (put, parts) = put_message(&Origin::Carrier, blocks, false);
        let Some((reply, _)) = time.call(other, &put, parts).await? else {
            outcome.leave((sent.len() + keys.count()) as u64, Obstacle::Slow);
            break;
        };
        let (now, id) = (replication.env.now(), other.peer.id);
        let (mut settled, mut is_full) = (0, false);
        for (key, status) in sent.iter().zip(&reply.statuses.0) {
            if is_settled(status) {
                settled += 1;
                acknowledged.push(*key);
                continue;
            }
            if *status == PutStatus::Released {
                // This node's copy ends with its lease.
                replication.releases.note_refused(id, *key, now);
                continue;
            }
            let why = Obstacle::there(status);
            outcome.leave(1, why);
            match status {
                PutStatus::Full => is_full = true,
                _ => replication.repair.decline(id, *key, why, now, &replication.backoff),
            }
        }
        outcome.moved += settled;
        replication.repair.done(settled, bytes);
        time.moved(settled, bytes);
        if is_full {
            replication.backoff.set_back(id, now, SetBack::Full);
            outcome.leave(keys.count() as u64, Obstacle::NoRoom);
            break;
        }
        pace(replication, bytes).await;
    }
    Ok((outcome, acknowledged))
}

/// Reads as many of the next blocks as go into one message, some of which other nodes may keep for
/// this one.
async fn read_batch(
    replication: &Replication,
    keys: &mut std::iter::Peekable<std::vec::IntoIter<Key>>,
    outcome: &mut Outcome,
) -> Vec<Block> {
    let (mut blocks, mut bytes) = (Vec::new(), 0);
    while bytes < REPLY_BYTES && blocks.len() < MAX_BATCH_BLOCKS {
        let Some(key) = keys.next() else { break };
        let block = match replication.store.get(&key).await {
            Ok(Some(held)) => {
                Some(Block { header: replication.header_of(&held.info), bytes: held.bytes })
            }
            Ok(None) => follow::own(replication, &key).await,
            Err(error) => {
                replication.note_store_error(&error);
                outcome.leave(1, Obstacle::Disk);
                None
            }
        };
        if let Some(block) = block.filter(|block| block.header.lease_secs > 0) {
            bytes += block.bytes.len();
            blocks.push(block);
        }
    }
    blocks
}

/// Whether the receiver now has the block or a better one.
fn is_settled(status: &PutStatus) -> bool {
    match status {
        PutStatus::Stored { copies, wanted } => is_majority(*copies, *wanted),
        PutStatus::Superseded { .. } => true,
        _ => false,
    }
}

/// Waits so that repair copies no faster than it may.
pub(crate) async fn pace(replication: &Replication, bytes: u64) {
    let until = replication.repair.pace(replication.env.now(), bytes);
    let wait = until.since(replication.env.now());
    if !wait.is_zero() {
        sleep(&*replication.env, wait).await;
    }
}
