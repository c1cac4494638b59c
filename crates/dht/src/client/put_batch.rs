//! Putting one batch of blocks that never change at their replica set, through the root or without
//! it.
//!
//! A root that is stopped or dead does not hold a put up: when its answer is overdue
//! ([`PutTimes`](crate::rpc::put_times::PutTimes)) the publisher puts the batch at the replica set
//! itself and counts the majority itself. A root that left an earlier call unanswered is not
//! waited for at all. Only members of the replica set count, never a node after it: a reader of
//! a mutable block hears a majority of the set, and must meet one that has the update.

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_key::{InvalidBlock, Key, PeerId};
use atoll_overlay::Node;

use super::Client;
use super::ack_verification::{PutKind, Said, ask_to_store, check_put, expect};
use crate::accounting::admission::Origin;
use crate::blocks::PutError;
use crate::diversion::follow::shows_newer;
use crate::placement::size_of;
use crate::replication::store::put_message;
use crate::rpc::put_times::WaitsFor;
use crate::rpc::quorum::{Calls, Event, answers};
use crate::rpc::{Block, OverQuota, PutStatus, is_majority, leaves_no_majority};

/// What became of a block in one attempt.
#[derive(Debug)]
pub(super) enum Outcome {
    Stored,
    /// Too few have it so far: these, and why the others have not.
    Again(BTreeSet<PeerId>, String),
    /// It will not be stored.
    Refused(PutError),
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
        PutStatus::Failed => again(format!("the disk of {root} takes nothing now")),
        PutStatus::Full => Outcome::Refused(PutError::Full(format!("{root} of the ring is full"))),
        PutStatus::OverQuota { used_bytes, allowed_bytes, of } => {
            Outcome::Refused(over_quota(root, OverQuota { used_bytes, allowed_bytes, of }))
        }
        PutStatus::Invalid => Outcome::Refused(InvalidBlock::WrongHash.into()),
        PutStatus::NotAdmitted => again(format!(
            "{root} says that its writer's certificate is not valid now, or that it was not written now"
        )),
        PutStatus::Released => again(format!("{root} takes it for a copy of what was released")),
        // Of a mutable block the replica has to show the newer version (`Direct::note`).
        PutStatus::Superseded { .. } => again(format!("{root} does not keep it")),
    }
}

pub(super) fn over_quota(root: &Node, over: OverQuota) -> PutError {
    let OverQuota { used_bytes, allowed_bytes, of } = over;
    let who = format!("this node's {of}, on {root} or a replica of it,");
    PutError::OverQuota { used_bytes, allowed_bytes, who }
}

/// Puts a batch of `origin`'s at the first of its replica set, and sees to it that it is where that says; if
/// the root does not answer in its usual time, puts it at all of the set. `holders` have blocks
/// of the batch already.
pub(super) async fn put_batch(
    client: &Arc<Client>,
    set: &[Node],
    origin: &Origin,
    blocks: Vec<Block>,
    holders: Vec<BTreeSet<PeerId>>,
) -> Vec<Outcome> {
    let root = set[0];
    let all_again = |told: String| {
        holders.iter().map(|holders| Outcome::Again(holders.clone(), told.clone())).collect()
    };
    if client.is_me(&root) {
        let (put, parts) = put_message(origin, blocks, true);
        return match client.call(&root, &put, parts).await {
            Ok((reply, _)) => {
                reply.statuses.0.into_iter().map(|status| judge(&root, status)).collect()
            }
            Err(error) => all_again(format!("root {root}: {error}")),
        };
    }
    let mut calls = Calls::new(client, WaitsFor::Root);
    // A root without replicas is waited for in any case.
    let mut by_root = set.len() == 1 || answers(client, &root);
    if by_root {
        let all = ((0..blocks.len()).collect(), blocks.clone());
        ask_to_store(client, &mut calls, root, origin, PutKind::AsRoot, all);
    }
    let mut direct = Direct::new(client, set, origin, &blocks, holders.clone());
    let mut told = format!("root {root} does not answer");
    let mut tally = None;
    loop {
        if tally.is_none() && !calls.is_patient() && set.len() > 1 {
            direct.put(&mut calls, by_root);
            tally = Some(Tally::new(client, set, blocks.len()));
        }
        if let Some(tally) = &tally
            && (!calls.is_patient() || direct.is_settled(tally))
        {
            break;
        }
        match calls.next().await {
            Some(Event::Answer(node, Ok(Said { mut statuses, .. }))) if by_root && node == root => {
                if is_other_root(client, &statuses, &blocks[0].header.key, &root).await {
                    by_root = false;
                    told = format!("{root} does not know yet that it is the root");
                    direct.counted = set.len() - 1;
                    if tally.is_some() {
                        direct.put_at(&mut calls, root);
                    }
                    continue;
                }
                calls.finish();
                check_put(client, set, origin, &blocks, &mut statuses).await;
                return statuses.into_iter().map(|status| judge(&root, status)).collect();
            }
            Some(Event::Answer(node, Ok(said))) => {
                if let Some(tally) = &mut tally {
                    direct.note(tally, node, said).await;
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

/// Whether the node that lookups lead to denies that it is the root. Either it still takes the dead
/// node before it for alive, or that node is unreachable from here alone. (A newcomer between the
/// two would be found.) Since either may be true, a majority of both replica sets is needed: of the
/// members after this root, without the last.
async fn is_other_root(client: &Client, statuses: &[PutStatus], key: &Key, root: &Node) -> bool {
    let denies = statuses.iter().all(|status| *status == PutStatus::NotRoot);
    denies && is_still_named(client, key, root).await
}

/// Whether lookups lead to this root again.
pub(super) async fn is_still_named(client: &Client, key: &Key, root: &Node) -> bool {
    client.overlay.find_successors(key).await.is_ok_and(|nodes| nodes.first() == Some(root))
}

/// A batch that its publisher puts at the replica set itself.
pub(super) struct Direct<'a> {
    client: &'a Arc<Client>,
    set: &'a [Node],
    origin: &'a Origin,
    blocks: &'a [Block],
    /// As what replicas are sent them.
    kind: PutKind<'a>,
    /// How many of the set count, from the first on.
    counted: usize,
    /// The nodes that have each block.
    pub holders: Vec<BTreeSet<PeerId>>,
}

/// What the replicas said of the blocks, besides having them.
pub(super) struct Tally {
    /// The size of the replica set of which a majority is wanted.
    wanted: u32,
    each: Vec<Noted>,
}

/// What the replicas said of one block.
#[derive(Clone, Default)]
struct Noted {
    refused: Option<PutError>,
    /// Members of the replica set that have no room for it.
    full: BTreeSet<PeerId>,
    told: Option<String>,
}

impl Tally {
    pub(super) fn new(client: &Client, set: &[Node], blocks: usize) -> Tally {
        let wanted = u32::try_from(size_of(client, set)).expect("k is small");
        Tally { wanted, each: vec![Noted::default(); blocks] }
    }
}

impl<'a> Direct<'a> {
    pub(super) fn new(
        client: &'a Arc<Client>,
        set: &'a [Node],
        origin: &'a Origin,
        blocks: &'a [Block],
        holders: Vec<BTreeSet<PeerId>>,
    ) -> Direct<'a> {
        let (kind, counted) = (PutKind::AsReplica, set.len());
        Direct { client, set, origin, blocks, kind, counted, holders }
    }

    /// The same of mutable blocks, of whose next changes their writer wants to be told.
    pub(super) fn with_promises(self, numbers: &'a [u64]) -> Direct<'a> {
        Direct { kind: PutKind::Mutable(numbers), ..self }
    }

    /// Sends each member of the set what it is not known to have; the root has been sent all
    /// if it was asked.
    pub(super) fn put(&self, calls: &mut Calls<Said>, root_was_asked: bool) {
        for node in self.set.iter().skip(usize::from(root_was_asked)) {
            self.put_at(calls, *node);
        }
    }

    fn put_at(&self, calls: &mut Calls<Said>, node: Node) {
        let lacks = |index: &usize| !self.holders[*index].contains(&node.peer.id);
        let indices: Vec<usize> = (0..self.blocks.len()).filter(lacks).collect();
        let blocks: Vec<Block> = indices.iter().map(|i| self.blocks[*i].clone()).collect();
        if !blocks.is_empty() {
            ask_to_store(self.client, calls, node, self.origin, self.kind, (indices, blocks));
        }
    }

    fn copies(&self, index: usize) -> u32 {
        self.members(&self.holders[index])
    }

    /// How many of these count.
    fn members(&self, nodes: &BTreeSet<PeerId>) -> u32 {
        let counted = &self.set[..self.counted];
        counted.iter().filter(|node| nodes.contains(&node.peer.id)).count() as u32
    }

    /// Whether so many of the set have no room that the others are no majority.
    fn is_full(&self, index: usize, tally: &Tally) -> bool {
        let full = self.members(&tally.each[index].full);
        leaves_no_majority(full, tally.wanted)
    }

    /// Whether what becomes of each block is decided.
    pub(super) fn is_settled(&self, tally: &Tally) -> bool {
        let is_settled = |index: usize| {
            tally.each[index].refused.is_some()
                || is_majority(self.copies(index), tally.wanted)
                || self.is_full(index, tally)
        };
        (0..self.blocks.len()).all(is_settled)
    }

    pub(super) async fn note(&mut self, tally: &mut Tally, node: Node, said: Said) {
        for (index, status) in said.indices.into_iter().zip(said.statuses) {
            let noted = &mut tally.each[index];
            match status {
                PutStatus::Stored { .. } => {
                    self.holders[index].insert(node.peer.id);
                }
                PutStatus::Superseded { .. } => {
                    let block = &self.blocks[index];
                    match shows_newer(self.client, &node, block).await {
                        Some(held) => {
                            let offered = expect(block).version;
                            noted.refused = Some(PutError::Superseded { offered, held });
                        }
                        None => noted.told = Some(format!("{node} shows no newer version")),
                    }
                }
                status => match judge(&node, status) {
                    Outcome::Refused(why @ PutError::OverQuota { .. }) => {
                        noted.refused = Some(why);
                    }
                    Outcome::Refused(why) => {
                        if matches!(why, PutError::Full(_)) {
                            noted.full.insert(node.peer.id);
                        }
                        noted.told = Some(why.to_string());
                    }
                    Outcome::Again(_, why) => noted.told = Some(why),
                    Outcome::Stored => {}
                },
            }
        }
    }

    pub(super) fn outcomes(self, tally: Option<Tally>, root_told: &str) -> Vec<Outcome> {
        let tally = tally.unwrap_or_else(|| Tally::new(self.client, self.set, self.blocks.len()));
        let wanted = tally.wanted;
        let each = (0..self.blocks.len()).map(|at| (self.copies(at), self.is_full(at, &tally)));
        let each: Vec<(u32, bool)> = each.collect();
        let each = each.into_iter().zip(tally.each).zip(self.holders);
        each.map(|(((copies, is_full), noted), holders)| match noted.refused {
            Some(why) => Outcome::Refused(why),
            None if is_majority(copies, wanted) => Outcome::Stored,
            None if is_full => {
                let full = noted.full.len();
                let told = format!("{full} of {wanted} nodes that keep the block are full");
                Outcome::Refused(PutError::Full(told))
            }
            None => {
                let told = noted.told.map_or_else(String::new, |told| format!("; {told}"));
                let have = format!("only {copies} of {wanted} nodes of its replica set have it");
                let root = if root_told.is_empty() { "" } else { "; " };
                Outcome::Again(holders, format!("{root_told}{root}{have}{told}"))
            }
        })
        .collect()
    }
}
