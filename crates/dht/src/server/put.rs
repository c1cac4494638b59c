//! `PUT`: storing blocks, and as their root sending them on to the replicas (CFS §5.1, §5.5).
//!
//! Writers send mutable blocks to all replicas themselves, so a root is sent none to pass on. A
//! put is acknowledged when a majority of the replica
//! set has it and every replica whose answer is not overdue has answered.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_key::{Key, PeerId, QuotaClass};
use atoll_net::{CallError, Peer, Refusal};
use atoll_overlay::Node;
use atoll_store::Owner;
use bytes::Bytes;
use futures_util::future::join_all;

use super::Handle;
use crate::accounting::admission::{Admitted, Origin, admit};
use crate::placement::{expected_replicas, own_set_tag, replica_set};
use crate::replication::store::{Overflow, put_message, store_admitted, store_put};
use crate::rpc::put_times::WaitsFor;
use crate::rpc::quorum::{Calls, Event};
use crate::rpc::{
    Answered, AskRoom, Block, OverQuota, Put, PutReply, PutStatus, is_majority, malformed,
    to_blocks,
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
        let statuses = match put.as_root {
            true => store_as_root(self, &from, &origin, blocks).await?,
            false => store_put(self, &from, &origin, blocks).await?,
        };
        let set = keys.first().and_then(|key| own_set_tag(self, key));
        Ok((PutReply { statuses: statuses.into(), set }, Vec::new()))
    }
}

/// Stores a batch whose root this node is and sends it to the replicas; resolves when a
/// majority has it, and those that could still answer in their usual time have.
pub(crate) async fn store_as_root(
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
    let admitted = admit(server, from, origin, blocks).await?;
    let Admitted { blocks: mine, stored, indices, refused, added_bytes, room } = admitted;
    let mut statuses: Vec<PutStatus> =
        refused.into_iter().map(|status| status.unwrap_or(PutStatus::Failed)).collect();
    if mine.is_empty() {
        return Ok(statuses);
    }
    if let Some(over) = room_at_replicas(server, root, origin, &mine, added_bytes).await {
        for index in indices {
            statuses[index] = over.into();
        }
        return Ok(statuses);
    }
    let is_new = |block: &&Block| server.known(&block.header.key).is_none();
    let new = mine.iter().filter(is_new).count();
    // The network first: it works while this node writes.
    let replicated = replicate(server, root, origin, &mine);
    let stored = store_admitted(server, origin, &mine, stored, room, Overflow::Diverted);
    let (acknowledged, own) = futures_util::join!(replicated, stored);
    if own.iter().all(|status| matches!(status, PutStatus::Stored { .. })) {
        server.count_root_blocks(new as u64);
    }
    // What was counted on must hold after a restart as well.
    let is_remembered = server.expected.remember(&*server.durable).await;
    let all =
        own.into_iter().enumerate().map(|(i, own)| acknowledged.status(i, own, is_remembered));
    for (index, status) in indices.into_iter().zip(all) {
        statuses[index] = status;
    }
    Ok(statuses)
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

/// How many replicas took each block of a batch.
struct Acknowledged {
    copies: Vec<u32>,
    /// Why one of them will not have the block, whatever the others say: the publisher is over
    /// quota there. (If a majority could overrule a quota, repair would bring the block there all
    /// the same.)
    refused: Vec<Option<PutStatus>>,
    wanted: usize,
}

impl Acknowledged {
    /// What became of one block, of which this node said `own`. Without `is_remembered` what was
    /// counted on would not hold after a restart.
    fn status(&self, position: usize, own: PutStatus, is_remembered: bool) -> PutStatus {
        let wanted = u32::try_from(self.wanted + 1).expect("k is small");
        let is_here = matches!(own, PutStatus::Stored { .. });
        let copies = u32::from(is_here) + self.copies[position];
        match (own, self.refused[position]) {
            (PutStatus::Stored { .. }, Some(refused)) => refused,
            (PutStatus::Stored { .. }, None) if !is_remembered => PutStatus::Failed,
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
    let mut stored: BTreeMap<PeerId, Vec<bool>> = BTreeMap::new();
    let mut asked: Vec<PeerId> = Vec::new();
    let mut refused = vec![None; blocks.len()];
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
        let copies = copies_in(&set, &stored, blocks.len());
        let is_settled = |(copies, refused): (&u32, &Option<PutStatus>)| {
            refused.is_some() || is_majority(1 + copies, wanted as u32 + 1)
        };
        let are_settled = copies.iter().zip(&refused).all(is_settled);
        let event = match are_settled && !calls.is_patient() {
            true => None,
            false => calls.next().await,
        };
        let Some(event) = event else {
            calls.finish();
            return Acknowledged { copies, refused, wanted };
        };
        if let Event::Answer(node, answer) = event {
            let statuses = answer.unwrap_or_default();
            let has = note_answer(server, statuses, &mut refused);
            stored.insert(node.peer.id, has);
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
    let in_flight = server.sends(node.peer.id, keys);
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

/// Which blocks of a batch a replica has stored, by what it answered; notes in `refused` why it
/// will not have others.
fn note_answer(
    server: &Server,
    statuses: Vec<PutStatus>,
    refused: &mut [Option<PutStatus>],
) -> Vec<bool> {
    let mut has = vec![false; refused.len()];
    for (i, status) in statuses.into_iter().enumerate() {
        match status {
            PutStatus::Stored { .. } => has[i] = true,
            PutStatus::OverQuota { .. } => refused[i] = Some(status),
            _ => {}
        }
    }
    if has.iter().zip(&*refused).any(|(has, refused)| !has && refused.is_none()) {
        server.requests.kick();
    }
    has
}

/// How many of `set` have stored each block of a batch.
fn copies_in(set: &[Node], stored: &BTreeMap<PeerId, Vec<bool>>, blocks: usize) -> Vec<u32> {
    let members = || set.iter().filter_map(|node| stored.get(&node.peer.id));
    (0..blocks).map(|i| members().filter(|has| has[i]).count() as u32).collect()
}
