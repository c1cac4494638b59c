//! `PUT`: storing blocks, and as their root sending them on to the replicas (CFS §5.1, §5.5).
//!
//! Writers send mutable blocks to all replicas themselves, so a root is sent none to pass on. A put
//! is acknowledged when a majority of the replica set has it and every replica whose answer is not overdue has answered.
//!
//! Mutable blocks that a writer puts together are stored in their order: none of them is stored without
//! those before it.

use std::sync::Arc;
use std::time::Duration;

use atoll_key::{Key, PeerId, QuotaClass};
use atoll_net::{CallError, Peer, Refusal};
use atoll_overlay::Node;
use atoll_store::Owner;
use bytes::Bytes;
use futures_util::future::join_all;

use super::Handle;
use crate::accounting::admission::{Admitted, Origin, admit, answers};
use crate::placement::{expected_replicas, replica_set, tag_for_put};
use crate::replication::store::{Overflow, put_message, store_admitted, store_put};
use crate::rpc::put_times::WaitsFor;
use crate::rpc::quorum::{Calls, Event};
use crate::rpc::{
    Answered, AskRoom, Block, OverQuota, PromisesReply, Put, PutReply, PutStatus, is_majority,
    leaves_no_majority, malformed, to_blocks, whole_ms,
};
use crate::server::Server;

impl Handle<Put> for Arc<Server> {
    async fn handle(
        &self,
        from: Peer,
        put: Put,
        parts: Vec<Bytes>,
    ) -> Result<Answered<Put>, Refusal> {
        let blocks = to_blocks(put.blocks, parts);
        if put.as_root && blocks.iter().any(Block::is_mutable) {
            return Err(malformed("a root passes on no mutable blocks"));
        }
        let keys: Vec<Key> = blocks.iter().map(|block| block.header.key).collect();
        let origin = Origin::of(self, &from, put.receipt, &keys).await?;
        let set = tag_for_put(self, &blocks);
        let joined = match blocks.iter().all(|block| block.header.kind.joins()) {
            true => blocks.clone(),
            false => Vec::new(),
        };
        let statuses = match put.as_root {
            true => store_as_root(self, &from, &origin, blocks).await?,
            false => store_put(self, &from, &origin, blocks).await?,
        };
        let stored = joined.iter().zip(&statuses).enumerate();
        let stored = stored.filter(|(_, (_, status))| matches!(status, PutStatus::Stored { .. }));
        // Before what is held is looked at: no change is missed.
        let made: Vec<(&Block, Option<Duration>)> = stored
            .map(|(at, (block, _))| {
                let number = put.promises.0.get(at);
                (block, number.and_then(|n| self.promise(block.header.key, from, *n)))
            })
            .collect();
        let is_any_made = made.iter().any(|(_, made)| made.is_some());
        let is_written = !is_any_made || self.lease_journal.written().await.is_ok();
        let mut promises = Vec::with_capacity(made.len());
        for (block, made) in made {
            promises.push(promised(self, &from, block, made.filter(|_| is_written)).await);
        }
        Ok((PutReply { statuses: statuses.into(), set, promises: promises.into() }, Vec::new()))
    }
}

/// The answer to the writer of a stored block about its readers. The writer gets the promise that was `made` only if the
/// block held is the one that it has put.
async fn promised(
    server: &Arc<Server>,
    writer: &Peer,
    Block { header, bytes }: &Block,
    made: Option<Duration>,
) -> PromisesReply {
    let (journal, key) = (&server.lease_journal, header.key);
    let is_as_put =
        made.is_some() && server.read(&key).await.is_some_and(|held| held.bytes == bytes);
    let promised_ms = made.filter(|_| is_as_put).map(whole_ms);
    let holders = server.promises.holders(journal.now(), &key, &writer.id).into();
    let forgotten_ms = whole_ms(journal.forgotten());
    PromisesReply { promised_ms, holders, forgotten_ms }
}

/// Stores a batch whose root this node is and sends it to the replicas; resolves when a
/// majority has it, and those that could still answer in their usual time have.
async fn store_as_root(
    server: &Arc<Server>,
    from: &Peer,
    origin: &Origin,
    blocks: Vec<Block>,
) -> Result<Vec<PutStatus>, Refusal> {
    let mut statuses = vec![PutStatus::NotRoot; blocks.len()];
    let keys: Vec<Key> = blocks.iter().map(|block| block.header.key).collect();
    let parts = server.overlay.group_by_own_root(&keys).into_iter().map(|(root, indices)| {
        let part = indices.iter().map(|index| blocks[*index].clone()).collect();
        async move { (indices, store_at_root(server, from, origin, &root, part).await) }
    });
    for (indices, part) in join_all(parts).await {
        for (index, status) in indices.into_iter().zip(part?) {
            statuses[index] = status;
        }
    }
    Ok(statuses)
}

/// Stores blocks whose root is one virtual server of this node.
async fn store_at_root(
    server: &Arc<Server>,
    from: &Peer,
    origin: &Origin,
    root: &Node,
    blocks: Vec<Block>,
) -> Result<Vec<PutStatus>, Refusal> {
    let Admitted { sound, refused, room } = admit(server, from, origin, blocks).await?;
    if sound.is_empty() {
        return Ok(answers(refused, []));
    }
    let mine: Vec<Block> = sound.iter().map(|sound| sound.block.clone()).collect();
    if let Some(over) = room_at_replicas(server, root, origin, &mine, room.bytes()).await {
        return Ok(answers(refused, std::iter::repeat(over.into())));
    }
    let is_new = |block: &&Block| server.known(&block.header.key).is_none();
    let new = mine.iter().filter(is_new).count();
    // The network first: it works while this node writes.
    let replicated = replicate(server, root, origin, &mine);
    let stored = store_admitted(server, origin, &sound, room, Overflow::Diverted);
    let (acknowledged, own) = futures_util::join!(replicated, stored);
    if own.iter().all(|status| matches!(status, PutStatus::Stored { .. })) {
        server.repair.count_root_blocks(new as u64);
    }
    // What was counted on must hold after a restart as well.
    let is_remembered = server.expected.remember(&*server.durable).await;
    let wanted = u32::try_from(acknowledged.wanted + 1).expect("k is small");
    let all = acknowledged.blocks.iter().zip(own);
    Ok(answers(refused, all.map(|(block, own)| block.status(own, wanted, is_remembered))))
}

/// Whether a replica has no room for a publisher's batch, asked only of one that has used
/// much already: what the root and others took of a put that fails would stay, and repair
/// could bring it where there is no room for it.
async fn room_at_replicas(
    server: &Arc<Server>,
    root: &Node,
    origin: &Origin,
    blocks: &[Block],
    added_bytes: u64,
) -> Option<OverQuota> {
    let Origin::Publisher { owner, .. } = origin else { return None };
    let peers = server.overlay.estimated_peers();
    if added_bytes == 0
        || !server.config.mechanisms.room_questions
        || !server.quota.is_near_limit(&*server.store, peers, *owner)
    {
        return None;
    }
    let is_root = blocks.iter().any(|b| b.header.kind.quota_class() == QuotaClass::Root);
    let Owner { publisher, ip } = *owner;
    let asked = AskRoom { publisher, ip, bytes: added_bytes, is_root };
    let mut calls = Calls::new(server, WaitsFor::Replica);
    for node in replica_set(server, root).into_iter().skip(1) {
        let server = server.clone();
        calls.ask(node, 0, async move {
            let (reply, _) = server.call(&node, &asked, Vec::new()).await?;
            Ok(reply.over)
        });
    }
    // A replica that does not answer will not take the blocks either.
    while calls.is_patient() {
        if let Some(Event::Answer(_, Ok(Some(over)))) = calls.next().await {
            return Some(over);
        }
    }
    None
}

/// What replicas said of a batch.
struct Acknowledged {
    blocks: Vec<BlockCopies>,
    /// How many of them are counted on.
    wanted: usize,
}

/// What replicas said of one block.
#[derive(Clone, Default)]
struct BlockCopies {
    /// Those that have stored it.
    stored: Vec<PeerId>,
    /// How many of those belong to the replica set.
    copies: u32,
    /// Those that have no room for it, and how many of those belong to the replica set.
    without_room: Vec<PeerId>,
    full: u32,
    /// Why one of them will not have the block, whatever the others say: the publisher is over
    /// quota there. (If a majority could overrule a quota, repair would bring the block there all
    /// the same.)
    refused: Option<PutStatus>,
}

impl BlockCopies {
    /// What became of the block, of which this node said `own`. Without `is_remembered` what was
    /// counted on would not hold after a restart.
    fn status(&self, own: PutStatus, wanted: u32, is_remembered: bool) -> PutStatus {
        let is_here = matches!(own, PutStatus::Stored { .. });
        let copies = u32::from(is_here) + self.copies;
        let full = u32::from(own == PutStatus::Full) + self.full;
        match (own, self.refused) {
            (PutStatus::Stored { .. }, Some(refused)) => refused,
            (PutStatus::Stored { .. }, None) if !is_remembered => PutStatus::Failed,
            (PutStatus::Stored { .. }, None) if leaves_no_majority(full, wanted) => PutStatus::Full,
            (PutStatus::Stored { .. }, None) => PutStatus::Stored { copies, wanted },
            // A root without room, for which no other node has any, coordinates all the same.
            (PutStatus::Full | PutStatus::Failed, None)
                if is_remembered && is_majority(copies, wanted) =>
            {
                PutStatus::Stored { copies, wanted }
            }
            (other, _) => other,
        }
    }
}

/// The most nodes that one batch is sent to, beside the root: members of the replica set, and
/// those that became members when others failed meanwhile.
const MAX_TARGETS: usize = 12;

/// Sends a batch to the other k − 1 of the replica set of one virtual server, and to those that
/// replace them when they fail. Resolves when a majority has it and all answers that are not
/// overdue have come; the other calls go on.
async fn replicate(
    server: &Arc<Server>,
    root: &Node,
    origin: &Origin,
    blocks: &[Block],
) -> Acknowledged {
    let (put, parts) = put_message(origin, blocks.to_vec(), false);
    let bytes = blocks.iter().map(|block| block.bytes.len() as u64).sum();
    let mut calls = Calls::new(server, WaitsFor::Replica);
    let mut set = replica_set(server, root).split_off(1);
    let mut said = vec![BlockCopies::default(); blocks.len()];
    let mut asked: Vec<PeerId> = Vec::new();
    loop {
        for node in &set {
            if asked.len() < MAX_TARGETS && !asked.contains(&node.peer.id) {
                asked.push(node.peer.id);
                let keys = blocks.iter().map(|block| block.header.key).collect();
                let sent = send_to(server, *node, put.clone(), parts.clone(), keys);
                calls.ask(*node, bytes, sent);
            }
        }
        let wanted = expected_replicas(server);
        for block in &mut said {
            let among = |nodes: &[PeerId]| {
                set.iter().filter(|node| nodes.contains(&node.peer.id)).count() as u32
            };
            (block.copies, block.full) = (among(&block.stored), among(&block.without_room));
        }
        let all = wanted as u32 + 1;
        let is_settled = |block: &BlockCopies| {
            block.refused.is_some()
                || is_majority(1 + block.copies, all)
                || leaves_no_majority(block.full, all)
        };
        let are_settled = said.iter().all(is_settled);
        let event = match are_settled && !calls.is_patient() {
            true => None,
            false => calls.next().await,
        };
        let Some(event) = event else {
            calls.finish();
            return Acknowledged { blocks: said, wanted };
        };
        if let Event::Answer(node, answer) = event {
            note_answer(server, &node, answer.unwrap_or_default(), &mut said);
        }
        // One that failed may have left the set, and a new member is asked.
        if let Some(mut now) = server.overlay.own_replica_set(root, server.config.replicas) {
            set = now.split_off(1);
        }
    }
}

/// Sends a batch to one replica; repair leaves its blocks alone meanwhile.
fn send_to(
    server: &Arc<Server>,
    node: Node,
    put: Put,
    parts: Vec<Bytes>,
    keys: Vec<Key>,
) -> impl Future<Output = Result<Vec<PutStatus>, CallError>> + Send + 'static {
    let to_node = keys.into_iter().map(|key| (node.peer.id, key));
    let in_flight = server.in_flight.begin(to_node.collect());
    let server = server.clone();
    async move {
        let _in_flight = in_flight;
        let answer = server.call(&node, &put, parts).await;
        if answer.is_err() {
            server.requests.kick();
        }
        Ok(answer?.0.statuses.0)
    }
}

/// Notes what a replica answered of each block of a batch; nothing if its call failed.
fn note_answer(server: &Server, node: &Node, statuses: Vec<PutStatus>, said: &mut [BlockCopies]) {
    let mut is_lacking = statuses.is_empty();
    for (status, said) in statuses.into_iter().zip(said) {
        match status {
            PutStatus::Stored { .. } => said.stored.push(node.peer.id),
            PutStatus::Full => said.without_room.push(node.peer.id),
            PutStatus::OverQuota { .. } => said.refused = Some(status),
            _ => {}
        }
        let has = matches!(status, PutStatus::Stored { .. });
        is_lacking |= !has && said.refused.is_none();
    }
    if is_lacking {
        server.requests.kick();
    }
}
