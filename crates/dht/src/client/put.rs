//! Putting blocks on the ring (CFS Table 1: `put_h`, `put_s`; §5.1, §5.5).
//!
//! The node that puts finds each block's root and sends the root one message per batch;
//! the root stores the blocks, sends them on to its k − 1 successors, and answers when
//! a majority has them and nobody is left whose answer is not overdue. So a publisher's uplink
//! carries each block once. What is missing from the rest is repair's work.
//!
//! A root that is stopped or dead does not hold a put up: when its answer is overdue
//! ([`PutTimes`](crate::rpc::put_times::PutTimes)) the publisher puts the batch at the replica set
//! itself and counts the majority itself. A root that left an earlier call unanswered is not
//! waited for at all. Only members of the replica set count, never a node after it: a reader of
//! a signed block hears a majority of the set, and must meet one that has the update.
//!
//! Each block has its own outcome: what was stored is not put again, and what was not is looked
//! up and tried again until the deadline. Nobody's word is taken for the whole replica set
//! (`witness`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Instant, sleep, timeout};
use atoll_key::{BlockHash, BlockKind, InvalidBlock, Key, PeerId, SignedBlock};
use atoll_net::CallError;
use atoll_overlay::Node;
use bytes::Bytes;
use futures_util::future::join_all;

use super::ack_verification::{
    Renewal, Said, ask_to_store, check_put, check_renewal, newest_shown,
};
use super::get::saw;
use super::votes::Votes;
use crate::accounting::admission::Origin;
use crate::blocks::PutError;
use crate::client::Client;
use crate::placement::{
    Groups, add_to, expected_replicas, present_replicas, replica_sets, shared_replica_sets, size_of,
};
use crate::replication::store::put_message;
use crate::rpc::put_times::WaitsFor;
use crate::rpc::quorum::{Calls, Event, answers};
use crate::rpc::{
    Block, BlockHeader, MAX_BATCH_BLOCKS, MAX_KEYS, Name, OverQuota, PutStatus, Renew, RenewReply,
    RenewStatus, is_majority,
};
use crate::server::put::store_as_root;
use crate::server::renew::{ask_to_renew, renew_at};
use crate::stats::add;

/// The most bytes of blocks in one message to a root, unless a single block is longer. Over a
/// slow line fewer are sent at a time.
const MOST_BATCH_BYTES: usize = 1 << 20;
/// The first pause before trying again; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause before trying again. A guess: rings notice a dead node in seconds.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

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
    /// Who took it, of replica sets of which too few did.
    holders: BTreeSet<PeerId>,
    /// What happened to it last.
    told: String,
}

/// What became of a block in one attempt.
#[derive(Debug)]
enum Outcome {
    Stored,
    /// Too few have it so far: these, and why the others have not.
    Again(BTreeSet<PeerId>, String),
    /// It will not be stored.
    Refused(PutError),
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
fn of_batch(part: usize, count: usize) -> String {
    if count > 1 { format!("{part} of {count} blocks: ") } else { String::new() }
}

/// If nodes are missing: that they are.
fn absent(client: &Client) -> String {
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

/// What a root's, or its replica set's, word for a block means.
fn judge(root: &Node, status: PutStatus) -> Outcome {
    let again = |told| Outcome::Again(BTreeSet::new(), told);
    match status {
        PutStatus::Stored { copies, wanted } if is_majority(copies, wanted) => Outcome::Stored,
        PutStatus::Stored { copies, wanted } => {
            again(format!("only {copies} of {wanted} nodes from {root} on have it"))
        }
        PutStatus::NotRoot => again(format!("{root} is not its root any more")),
        PutStatus::Failed => again(format!("the disk of {root} failed")),
        PutStatus::Full => Outcome::Refused(PutError::Full(format!("{root} is full"))),
        PutStatus::OverQuota { used_bytes, allowed_bytes, of } => {
            Outcome::Refused(over_quota(root, OverQuota { used_bytes, allowed_bytes, of }))
        }
        PutStatus::Invalid => Outcome::Refused(InvalidBlock::WrongHash.into()),
        PutStatus::Superseded { held } => {
            Outcome::Refused(PutError::Superseded { offered: 0, held })
        }
    }
}

fn over_quota(root: &Node, over: OverQuota) -> PutError {
    let OverQuota { used_bytes, allowed_bytes, of } = over;
    let who = format!("this node's {of}, on {root} or a replica of it,");
    PutError::OverQuota { used_bytes, allowed_bytes, who }
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

/// Puts a batch at the first of its replica set, and sees to it that it is where that says; if
/// the root does not answer in its usual time, puts it at all of the set. `holders` have blocks
/// of the batch already.
async fn put_batch(
    client: &Arc<Client>,
    set: &[Node],
    blocks: Vec<Block>,
    holders: Vec<BTreeSet<PeerId>>,
) -> Vec<Outcome> {
    let root = set[0];
    let keys: Vec<Key> = blocks.iter().map(|block| block.header.key).collect();
    let origin = Origin::own(client, client.config.lease.as_secs(), &keys);
    let all_again = |told: String| {
        holders.iter().map(|holders| Outcome::Again(holders.clone(), told.clone())).collect()
    };
    if client.is_me(&root) {
        return match store_as_root(client, &root.peer, &origin, blocks).await {
            Ok(statuses) => statuses.into_iter().map(|status| judge(&root, status)).collect(),
            Err(refusal) => all_again(format!("root {root}: {refusal}")),
        };
    }
    let mut calls = Calls::new(client, WaitsFor::Root);
    // A root that nobody can stand in for is waited for in any case.
    let mut by_root = set.len() == 1 || answers(client, &root);
    if by_root {
        ask_root_to_store(client, &mut calls, root, &origin, &blocks);
    }
    let counted = set.len();
    let mut direct =
        Direct { client, set, counted, origin: &origin, blocks: &blocks, holders: holders.clone() };
    let mut told = format!("root {root} does not answer");
    let mut tally = None;
    loop {
        if tally.is_none() && !calls.is_patient() && set.len() > 1 {
            direct.put(&mut calls, by_root);
            tally = Some(Tally::new(client, set, blocks.len()));
        }
        if let Some(tally) = &tally
            && direct.is_over(tally, calls.is_patient())
        {
            break;
        }
        match calls.next().await {
            Some(Event::Answer(node, Ok((_, mut statuses)))) if by_root && node == root => {
                if is_other_root(client, &statuses, &keys[0], &root).await {
                    by_root = false;
                    told = format!("{root} does not know yet that it is the root");
                    direct.counted = set.len() - 1;
                    if tally.is_some() {
                        direct.put_at(&mut calls, root);
                    }
                    continue;
                }
                calls.finish();
                check_put(client, set, &origin, &blocks, &mut statuses).await;
                return statuses.into_iter().map(|status| judge(&root, status)).collect();
            }
            Some(Event::Answer(node, Ok((indices, statuses)))) => {
                if let Some(tally) = &mut tally {
                    direct.note(tally, node, indices, statuses).await;
                }
            }
            Some(Event::Answer(node, Err(error))) if by_root && node == root => {
                if !error.is_failure_of_peer() {
                    return all_again(format!("root {root}: {error}"));
                }
                told = format!("root {root}: {error}");
            }
            Some(_) => {}
            None => break,
        }
    }
    calls.finish();
    direct.outcomes(tally, &told)
}

/// Whether the node that lookups lead to says all the same that it is not the root. It takes a
/// dead node before it for alive, or that one is unreachable from here alone; a newcomer between
/// the two would be found. Either may be so, so what counts is a majority of both sets: of the
/// members after the root, without the last.
async fn is_other_root(client: &Client, statuses: &[PutStatus], key: &Key, root: &Node) -> bool {
    let denies = statuses.iter().all(|status| *status == PutStatus::NotRoot);
    denies && is_still_named(client, key, root).await
}

/// Whether lookups lead to this root again.
async fn is_still_named(client: &Client, key: &Key, root: &Node) -> bool {
    client.overlay.find_successors(key).await.is_ok_and(|nodes| nodes.first() == Some(root))
}

/// Sends a batch to its root.
fn ask_root_to_store(
    client: &Arc<Client>,
    calls: &mut Calls<Said>,
    root: Node,
    origin: &Origin,
    blocks: &[Block],
) {
    let count = blocks.len();
    let bytes = blocks.iter().map(|block| block.bytes.len() as u64).sum();
    let (put, parts) = put_message(origin, blocks.to_vec(), true);
    let caller = client.clone();
    calls.ask(root, bytes, async move {
        let (reply, _) = caller.call(&root, &put, parts).await?;
        Ok(((0..count).collect(), reply.statuses.0))
    });
}

/// A batch that its publisher puts at the replica set itself, because the root does not answer.
struct Direct<'a> {
    client: &'a Arc<Client>,
    set: &'a [Node],
    origin: &'a Origin,
    blocks: &'a [Block],
    /// How many of the set count, from the first on.
    counted: usize,
    /// Who has each block.
    holders: Vec<BTreeSet<PeerId>>,
}

/// What the replicas said of each block, besides having it.
struct Tally {
    /// The size of the replica set of which a majority is wanted.
    wanted: u32,
    refused: Vec<Option<PutError>>,
    told: Vec<Option<String>>,
}

impl Tally {
    fn new(client: &Client, set: &[Node], blocks: usize) -> Tally {
        let wanted = u32::try_from(size_of(client, set)).expect("k is small");
        let refused = (0..blocks).map(|_| None).collect();
        Tally { wanted, refused, told: vec![None; blocks] }
    }
}

impl Direct<'_> {
    /// Sends each member of the set what it is not known to have; the root has been sent all
    /// if it was asked.
    fn put(&self, calls: &mut Calls<Said>, root_was_asked: bool) {
        for node in self.set.iter().skip(usize::from(root_was_asked)) {
            self.put_at(calls, *node);
        }
    }

    fn put_at(&self, calls: &mut Calls<Said>, node: Node) {
        let lacks = |index: &usize| !self.holders[*index].contains(&node.peer.id);
        let indices: Vec<usize> = (0..self.blocks.len()).filter(lacks).collect();
        let blocks: Vec<Block> = indices.iter().map(|i| self.blocks[*i].clone()).collect();
        if !blocks.is_empty() {
            ask_to_store(self.client, calls, node, self.origin, indices, blocks);
        }
    }

    fn copies(&self, index: usize) -> u32 {
        let holders = &self.holders[index];
        let counted = &self.set[..self.counted];
        counted.iter().filter(|node| holders.contains(&node.peer.id)).count() as u32
    }

    /// Whether nothing is left to wait for. Of signed blocks those that answer in time are all
    /// heard: one of them may refuse.
    fn is_over(&self, tally: &Tally, is_patient: bool) -> bool {
        let is_settled = |index: usize| {
            tally.refused[index].is_some() || is_majority(self.copies(index), tally.wanted)
        };
        let must_hear_all = self.blocks.iter().any(Block::is_mutable);
        !is_patient || !must_hear_all && (0..self.blocks.len()).all(is_settled)
    }

    async fn note(
        &mut self,
        tally: &mut Tally,
        node: Node,
        indices: Vec<usize>,
        statuses: Vec<PutStatus>,
    ) {
        for (index, status) in indices.into_iter().zip(statuses) {
            match status {
                PutStatus::Stored { .. } => {
                    self.holders[index].insert(node.peer.id);
                }
                PutStatus::Superseded { .. } => {
                    let shown = newest_shown(self.client, self.set, &self.blocks[index]).await;
                    let newer = shown.map(|held| PutError::Superseded { offered: 0, held });
                    tally.refused[index] = newer;
                }
                status => match judge(&node, status) {
                    Outcome::Refused(why @ PutError::OverQuota { .. }) => {
                        tally.refused[index] = Some(why);
                    }
                    Outcome::Refused(why) => tally.told[index] = Some(why.to_string()),
                    Outcome::Again(_, why) => tally.told[index] = Some(why),
                    Outcome::Stored => {}
                },
            }
        }
    }

    fn outcomes(self, tally: Option<Tally>, root_told: &str) -> Vec<Outcome> {
        let copies: Vec<u32> = (0..self.blocks.len()).map(|index| self.copies(index)).collect();
        let tally = tally.unwrap_or_else(|| Tally::new(self.client, self.set, copies.len()));
        let wanted = tally.wanted;
        let each = copies.into_iter().zip(tally.refused).zip(tally.told).zip(self.holders);
        each.map(|(((copies, refused), told), holders)| match refused {
            Some(why) => Outcome::Refused(why),
            None if is_majority(copies, wanted) => Outcome::Stored,
            None => {
                let told = told.map_or_else(String::new, |told| format!("; {told}"));
                let have = format!("only {copies} of {wanted} nodes of its replica set have it");
                Outcome::Again(holders, format!("{root_told}; {have}{told}"))
            }
        })
        .collect()
    }
}

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
    /// The keys that somebody else pays for and this publisher has no room for.
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
