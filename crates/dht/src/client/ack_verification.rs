//! Verifying what a root acknowledges with another replica (CFS §8 asks that one malicious server
//! cannot lose data).
//!
//! A root answers for its whole replica set. A root that lies could acknowledge blocks, or
//! renewals, and do nothing; the loss would be noticed only when a block is wanted. So the
//! publisher samples: it asks one of the other replicas, chosen at random once the root has
//! answered, whether that holds the right version for at least half of the lease. Among honest
//! nodes that is one short question a batch. After a renewal the question is the renewal itself; a
//! replica that the root had not told of it answers so ([`RenewStatus::Late`]), which confirms
//! nothing.
//!
//! If the sampled replica does not confirm a block, the publisher asks the remaining replicas and
//! sends the block to each one that lacks it, unless a majority has the block already: the root may
//! still be sending it, and repair brings what is missing after that.
//!
//! **Invariant:** no single node is believed. A root counts as a copy only if another replica
//! confirms it. A replica that denies what it has makes no put fail: it is sent another copy. A
//! node that refuses a mutable block because a newer one exists must show the newer one.
//!
//! Not covered: a root that leaves out one replica is noticed only when that replica is sampled,
//! once in k − 1 batches; until then its blocks have one copy less. A root that lies together with
//! most of its replicas is believed, and so is one that refuses blocks as full or over quota: the
//! put fails and names it. With one copy (k = 1) there is no other replica to ask.

use std::sync::Arc;

use atoll_env::random_below;
use atoll_key::{Key, PeerId};
use atoll_net::CallError;
use atoll_overlay::Node;
use atoll_overlay::peer_book::Misdeed;

use super::votes::Votes;
use crate::accounting::admission::Origin;
use crate::client::Client;
use crate::holdings::copies::ask_holdings;
use crate::placement::size_of;
use crate::replication::store::put_message;
use crate::rpc::put_times::WaitsFor;
use crate::rpc::quorum::{Calls, Event, answers};
use crate::rpc::{
    Block, BlockHeader, HeldCopy, PromisesReply, PutReply, PutStatus, Renew, RenewReply,
    RenewStatus, is_majority,
};
use crate::server::renew::{ask_to_renew, part_of};

/// A block that a replica should hold, as the root acknowledged it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected {
    pub key: Key,
    pub version: u64,
    pub lease_secs: u64,
}

impl Expected {
    fn is_met(&self, said: &Option<HeldCopy>) -> bool {
        let met = |said: &HeldCopy| {
            said.version >= self.version && said.lease_secs >= self.lease_secs / 2
        };
        said.as_ref().is_some_and(met)
    }
}

/// A block that not every replica asked holds as the root says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Doubt {
    /// Its place in the batch.
    index: usize,
    /// The replicas beside the root that have it.
    holders: Vec<PeerId>,
}

impl Doubt {
    /// Whether enough nodes have the block once `given` more have got it: half of a replica set of
    /// that size. The root counts as one if another replica confirms it.
    fn is_settled(&self, given: usize, size: usize) -> bool {
        let root = usize::from(!self.holders.is_empty());
        2 * (root + self.holders.len() + given) >= size
    }
}

/// The nodes after the root in an order that the root cannot predict. Nodes that left a call
/// unanswered come late, and this node last: a false root may have sent blocks to it alone.
fn shuffled(client: &Client, set: &[Node]) -> Vec<Node> {
    let mut others: Vec<Node> = set.iter().skip(1).copied().collect();
    for i in (1..others.len()).rev() {
        others.swap(i, random_below(&*client.env, i as u64 + 1) as usize);
    }
    others.sort_by_key(|node| (client.is_me(node), !answers(client, node)));
    others
}

/// Asks a node which of the blocks it has as they should be.
fn ask_whether(
    client: &Arc<Client>,
    calls: &mut Calls<Vec<bool>>,
    node: Node,
    expected: &[Expected],
) {
    let (asker, expected) = (client.clone(), expected.to_vec());
    calls.ask(node, 0, async move {
        let said = ask_holdings(&asker, &node, expected.iter().map(|e| e.key).collect()).await;
        let said = said.ok_or(CallError::TimedOut)?;
        Ok(expected.iter().zip(&said).map(|(expected, said)| expected.is_met(said)).collect())
    });
}

/// The first answer of `others`, which `ask` asks one after another: the next when one is overdue.
async fn first_answer(
    client: &Arc<Client>,
    others: &mut impl Iterator<Item = Node>,
    ask: impl Fn(&mut Calls<Vec<bool>>, Node),
) -> Option<(Node, Vec<bool>)> {
    let mut calls = Calls::new(client, WaitsFor::Replica);
    loop {
        while !calls.is_patient()
            && let Some(node) = others.next()
        {
            ask(&mut calls, node);
        }
        if let Event::Answer(node, Ok(held)) = calls.next().await? {
            return Some((node, held));
        }
    }
}

/// The blocks that the root of `set`, its first node, says the set has and that a sampled replica
/// does not confirm. `ask_first` asks that replica.
async fn doubts(
    client: &Arc<Client>,
    set: &[Node],
    expected: &[Expected],
    ask_first: impl Fn(&mut Calls<Vec<bool>>, Node),
) -> Vec<Doubt> {
    let doubt = |index: usize| Doubt { index, holders: Vec::new() };
    let mut others = shuffled(client, set).into_iter();
    let asks = client.config.mechanisms.verified_acks;
    if expected.is_empty() || !asks {
        return Vec::new();
    }
    if others.len() == 0 {
        // A root that takes itself for a ring of one may not know yet the nodes that this one has met.
        let is_alone = size_of(client, set) == 1;
        return (0..expected.len()).filter(|_| !is_alone).map(doubt).collect();
    }
    let first = first_answer(client, &mut others, ask_first).await;
    let lacking = |index: &usize| first.as_ref().is_none_or(|(_, held)| !held[*index]);
    let doubtful: Vec<usize> = (0..expected.len()).filter(lacking).collect();
    let mut doubts: Vec<Doubt> = doubtful.into_iter().map(doubt).collect();
    if doubts.is_empty() {
        return doubts;
    }
    let expected: Vec<Expected> = doubts.iter().map(|doubt| expected[doubt.index]).collect();
    let answered = first.as_ref().map(|(node, _)| node.peer.id);
    let rest = set.iter().skip(1).filter(|node| Some(node.peer.id) != answered);
    let mut calls = Calls::new(client, WaitsFor::Replica);
    rest.for_each(|node| ask_whether(client, &mut calls, *node, &expected));
    let mut answered = usize::from(first.is_some());
    while calls.is_patient() {
        if let Some(Event::Answer(node, Ok(held))) = calls.next().await {
            answered += 1;
            for (doubt, held) in doubts.iter_mut().zip(held) {
                if held {
                    doubt.holders.push(node.peer.id);
                }
            }
        }
    }
    // One replica alone may be the liar.
    let is_false = answered >= 2.min(set.len() - 1);
    if is_false && doubts.iter().any(|doubt| doubt.holders.is_empty()) {
        let (root, now) = (&set[0], client.env.now());
        tracing::warn!(?root, count = doubts.len(), "no replica confirms what a root acknowledged");
        client.overlay.peer_book().lied(&root.peer.id, Misdeed::LostBlock, now);
    }
    doubts
}

/// The replicas beside the root, and the places in the batch of the blocks each may lack.
fn lacking(set: &[Node], doubts: &[Doubt]) -> Vec<(Node, Vec<usize>)> {
    let of = |node: &Node| {
        let lacks = |doubt: &&Doubt| !doubt.holders.contains(&node.peer.id);
        (*node, doubts.iter().filter(lacks).map(|doubt| doubt.index).collect::<Vec<usize>>())
    };
    set.iter().skip(1).map(of).filter(|(_, lacks)| !lacks.is_empty()).collect()
}

/// Checks whether blocks are where their root, the first of `set`, says in `statuses`; sends them
/// to the replicas that lack them, and updates `statuses` with the outcome.
pub(crate) async fn check_put(
    client: &Arc<Client>,
    set: &[Node],
    origin: &Origin,
    blocks: &[Block],
    statuses: &mut [PutStatus],
) {
    let stored: Vec<usize> =
        (0..blocks.len()).filter(|index| is_stored(&statuses[*index])).collect();
    let expected: Vec<Expected> = stored.iter().map(|index| expect(&blocks[*index])).collect();
    let ask = |calls: &mut _, node| ask_whether(client, calls, node, &expected);
    let mut doubts = doubts(client, set, &expected, ask).await;
    doubts.iter_mut().for_each(|doubt| doubt.index = stored[doubt.index]);
    // Nothing supersedes a block that never changes.
    let denied = (0..blocks.len()).filter(|i| matches!(statuses[*i], PutStatus::Superseded { .. }));
    doubts.extend(denied.map(|index| Doubt { index, holders: Vec::new() }));
    let size = size_of(client, set);
    // The root may still be sending what a majority has to the others; if not, repair does.
    doubts.retain(|doubt| !doubt.is_settled(0, size));
    let told = put_at_replicas(client, set, origin, blocks, &doubts).await;
    let wanted = u32::try_from(size).expect("k is small");
    for doubt in doubts {
        let told = &told[doubt.index];
        let given = told.iter().filter(|status| matches!(status, PutStatus::Stored { .. })).count();
        let over = told.iter().find(|status| matches!(status, PutStatus::OverQuota { .. }));
        let copies = u32::try_from(doubt.holders.len() + given).expect("k is small");
        statuses[doubt.index] = match over {
            _ if doubt.is_settled(given, size) => PutStatus::Stored { copies: wanted, wanted },
            Some(over) => *over,
            None => PutStatus::Stored { copies, wanted },
        };
    }
}

fn is_stored(status: &PutStatus) -> bool {
    matches!(status, PutStatus::Stored { copies, wanted } if is_majority(*copies, *wanted))
}

/// Puts doubtful blocks at the replicas that may lack them; what these say of each block of
/// the batch.
async fn put_at_replicas(
    client: &Arc<Client>,
    set: &[Node],
    origin: &Origin,
    blocks: &[Block],
    doubts: &[Doubt],
) -> Vec<Vec<PutStatus>> {
    let mut calls = Calls::new(client, WaitsFor::Root);
    for (node, indices) in lacking(set, doubts) {
        let given = indices.iter().map(|index| blocks[*index].clone()).collect();
        ask_to_store(client, &mut calls, node, origin, PutKind::AsReplica, (indices, given));
    }
    let mut told = vec![Vec::new(); blocks.len()];
    while calls.is_patient() {
        if let Some(Event::Answer(_, Ok(Said { indices, statuses, .. }))) = calls.next().await {
            indices.into_iter().zip(statuses).for_each(|(index, said)| told[index].push(said));
        }
    }
    calls.finish();
    told
}

/// As what blocks are put at a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PutKind<'a> {
    /// As their root, which sends them on.
    AsRoot,
    /// As a replica.
    AsReplica,
    /// As a replica, mutable blocks, of whose next changes the writer asks to be told by promises of these
    /// numbers.
    Mutable(&'a [u64]),
}

/// What a node said of blocks that were put there.
#[derive(Debug)]
pub(crate) struct Said {
    /// Their numbers in the batch.
    pub indices: Vec<usize>,
    /// What became of each of them.
    pub statuses: Vec<PutStatus>,
    /// The tag of the first one's replica set, if the node is its root.
    pub set: Option<u64>,
    /// The node's promises to readers of the mutable blocks that it has stored, one for each block.
    pub promises: Vec<PromisesReply>,
}

/// Puts blocks at one node, as their root or a replica; they have these numbers in their batch.
pub(crate) fn ask_to_store(
    client: &Arc<Client>,
    calls: &mut Calls<Said>,
    node: Node,
    origin: &Origin,
    kind: PutKind<'_>,
    (indices, blocks): (Vec<usize>, Vec<Block>),
) {
    let bytes = blocks.iter().map(|block| block.bytes.len() as u64).sum();
    let (mut put, parts) = put_message(origin, blocks, kind == PutKind::AsRoot);
    if let PutKind::Mutable(promises) = kind {
        let of = |index: &usize| promises.get(*index).copied();
        put.promises = indices.iter().filter_map(of).collect::<Vec<u64>>().into();
    }
    let caller = client.clone();
    calls.ask(node, bytes, async move {
        let (PutReply { statuses, set, promises }, _) = caller.call(&node, &put, parts).await?;
        Ok(Said { indices, statuses: statuses.0, set, promises: promises.0 })
    });
}

pub(crate) fn expect(block: &Block) -> Expected {
    let BlockHeader { key, kind, lease_secs } = block.header;
    let version = kind.verify(&key, &block.bytes).unwrap_or(0);
    Expected { key, version, lease_secs }
}

/// A renewal to be verified.
pub(crate) struct Renewal<'a> {
    pub origin: &'a Origin,
    pub renew: &'a Renew,
    pub keys: &'a [Key],
    /// Whether the publisher puts what is lacking.
    pub will_be_put: bool,
}

/// Checks whether leases end when the root, the first of `set`, says in `reply`; renews them at the
/// replicas where they do not, and updates `reply` with the outcome
/// ([`RenewStatus::Undecided`] for blocks that too few are known to hold).
///
/// If the root says that a block is held, the sampled replica is sent the renewal itself: its names
/// and one byte for each answer are a sixth of a question for keys, and the replica has renewed the
/// blocks then in any case. It says which of them it had not been told to renew before. If the root
/// says anything else, all other members are sent the renewal, and a majority of the set decides.
/// But a root is believed to lack blocks that will be put: a publisher asks for those most of the
/// time.
pub(crate) async fn check_renewal(
    client: &Arc<Client>,
    set: &[Node],
    &Renewal { origin, renew, keys, will_be_put }: &Renewal<'_>,
    reply: &mut RenewReply,
) {
    let statuses = &mut reply.statuses;
    // A root is also believed that the publisher's quota is used up, if it says which.
    let is_settled = |status: RenewStatus| match status {
        RenewStatus::Lacking => will_be_put,
        RenewStatus::OverQuota => reply.over.is_some(),
        _ => false,
    };
    let (said, denied): (Vec<usize>, Vec<usize>) = (0..statuses.len())
        .filter(|i| !is_settled(statuses[*i]))
        .partition(|i| statuses[*i] == RenewStatus::Held);
    let expect =
        |index: &usize| Expected { key: keys[*index], version: 0, lease_secs: renew.lease_secs };
    let expected: Vec<Expected> = said.iter().map(expect).collect();
    let part = part_of(origin, renew, &said);
    let ask = |calls: &mut Calls<Vec<bool>>, node: Node| {
        let (asker, part) = (client.clone(), part.clone());
        calls.ask(node, 0, async move {
            let (reply, _) = asker.call(&node, &part, Vec::new()).await?;
            Ok(reply.statuses.iter().map(|status| *status == RenewStatus::Held).collect())
        });
    };
    let mut doubts = doubts(client, set, &expected, ask).await;
    doubts.iter_mut().for_each(|doubt| doubt.index = said[doubt.index]);
    let unheld = denied.iter().map(|index| Doubt { index: *index, holders: Vec::new() });
    let open: Vec<Doubt> = doubts.iter().cloned().chain(unheld).collect();
    let mut told = renew_at_replicas(client, set, origin, renew, &open).await;
    for doubt in doubts {
        let (has, lacks) = told.of(doubt.index);
        statuses[doubt.index] = match doubt.is_settled(has, size_of(client, set)) {
            true => RenewStatus::Held,
            // At most the root has it: it should be put again.
            false if has == 0 && lacks + 1 == set.len() => RenewStatus::Lacking,
            false => RenewStatus::Undecided,
        };
    }
    for index in denied {
        if statuses[index] == RenewStatus::Lacking {
            told.lacks(index);
        }
        statuses[index] = match (statuses[index], told.status(index)) {
            // Another node may be the root by now, and have it.
            (RenewStatus::NotRoot, RenewStatus::Lacking) => RenewStatus::NotRoot,
            (_, status) => status,
        };
    }
    if statuses.contains(&RenewStatus::OverQuota) {
        reply.over = reply.over.or(told.over);
    }
}

/// Sends a renewal to the replicas that may lack some of its blocks, and counts what they say.
async fn renew_at_replicas(
    client: &Arc<Client>,
    set: &[Node],
    origin: &Origin,
    renew: &Renew,
    doubts: &[Doubt],
) -> Votes {
    let mut calls = Calls::new(client, WaitsFor::Root);
    for (node, indices) in lacking(set, doubts) {
        ask_to_renew(client, &mut calls, node, origin, renew, indices);
    }
    let mut told = Votes::new(client, set, renew.names.len());
    while calls.is_patient() {
        if let Some(Event::Answer(_, Ok((indices, theirs)))) = calls.next().await {
            told.count(indices, &theirs);
        }
    }
    calls.finish();
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(count: u8) -> Vec<Node> {
        let addr = "127.0.0.1:1".parse().expect("an address");
        (0..count).map(|n| Node::of(atoll_net::Peer { id: PeerId([n; 32]), addr })).collect()
    }

    #[test]
    fn a_root_counts_only_if_another_replica_confirms_it() {
        let doubt = |holders: usize| Doubt { index: 0, holders: vec![PeerId([9; 32]); holders] };
        // Replica set, holders, given, enough.
        for (count, holders, given, enough) in [
            (2, 0, 0, false),
            (2, 0, 1, true),
            (3, 0, 1, false),
            (3, 0, 2, true),
            (3, 1, 0, true),
            (6, 0, 2, false),
            (6, 0, 3, true),
            (6, 1, 0, false),
            (6, 2, 0, true),
        ] {
            let settled = doubt(holders).is_settled(given, count);
            assert_eq!(settled, enough, "{count} {holders} {given}");
        }
    }

    #[test]
    fn each_replica_gets_what_it_has_not_said_to_have() {
        let set = set(3);
        let doubts = [
            Doubt { index: 4, holders: vec![set[1].peer.id] },
            Doubt { index: 7, holders: Vec::new() },
        ];
        assert_eq!(lacking(&set, &doubts), [(set[1], vec![7]), (set[2], vec![4, 7])]);
        assert_eq!(lacking(&set, &doubts[..1]), [(set[2], vec![4])]);
    }
}
