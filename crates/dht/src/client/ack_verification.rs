//! Whether what a root says is borne out by others (CFS §8).
//!
//! A root answers for its whole replica set. One that lies could acknowledge blocks, or
//! renewals, and do nothing; nobody would notice before a block is wanted. So whoever puts or
//! renews asks one of the other replicas, chosen at random once the root has answered,
//! whether it has what it should have: the version, and at least half of the lease. Among
//! honest nodes that is one short question a batch; of a renewal it is the renewal itself, and a
//! replica that had not been told of it yet says so, which confirms nothing. If that replica does
//! not confirm a block, the publisher asks the remaining ones. It puts a block that too few confirm at each replica
//! that lacks it; what a majority has, the root may still be sending, so that waits a while.
//!
//! **Invariant:** nobody is believed alone. A root counts as a copy only if another replica
//! bears it out, and a replica that denies what it has makes nothing fail: it gets another
//! copy. Who refuses a signed block because there is a newer one must show that one.
//!
//! What it does not do: a root that leaves out a single replica is noticed only when that one
//! is asked, once in k − 1 batches; otherwise its blocks have a copy less. A root that lies
//! together with most of its replicas is believed. One that refuses blocks as full or over quota is believed too: a
//! put fails, and says who refused. Where the walk names nobody after the root, as with one copy
//! (k = 1), there is nobody to ask.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{random_below, sleep};
use atoll_key::{Key, PeerId};
use atoll_net::CallError;
use atoll_overlay::Node;
use atoll_overlay::peer_book::Misdeed;
use futures_util::future::join_all;

use super::votes::Votes;
use crate::accounting::admission::Origin;
use crate::client::Client;
use crate::diversion::follow::shows_newer;
use crate::holdings::vouch;
use crate::placement::size_of;
use crate::replication::store::{put_message, store_put};
use crate::rpc::put_times::WaitsFor;
use crate::rpc::quorum::{Calls, Event, answers};
use crate::rpc::{
    Block, BlockHeader, PutStatus, Renew, RenewReply, RenewStatus, Vouched, is_majority,
};
use crate::server::renew::{ask_to_renew, part_of, renew_at};

/// What a replica should hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected {
    pub key: Key,
    pub version: u64,
    pub lease_secs: u64,
}

impl Expected {
    fn is_met(&self, said: &Option<Vouched>) -> bool {
        let met =
            |said: &Vouched| said.version >= self.version && said.lease_secs >= self.lease_secs / 2;
        said.as_ref().is_some_and(met)
    }
}

/// A block of which not everybody asked has what the root says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Doubt {
    /// Its place in the batch.
    index: usize,
    /// Who has it, of the replicas beside the root.
    holders: Vec<PeerId>,
}

impl Doubt {
    /// Whether enough nodes have the block when so many more have got it: half of a replica set
    /// of that size, the root being one if anybody bears it out.
    fn is_settled(&self, given: usize, size: usize) -> bool {
        let root = usize::from(!self.holders.is_empty());
        2 * (root + self.holders.len() + given) >= size
    }
}

/// Which of the blocks a node has as they should be; `None` if it does not answer.
pub(crate) async fn has(client: &Client, node: &Node, expected: &[Expected]) -> Option<Vec<bool>> {
    let said = vouch::ask(client, node, expected.iter().map(|e| e.key).collect()).await?;
    Some(expected.iter().zip(&said).map(|(expected, said)| expected.is_met(said)).collect())
}

/// The nodes after the root in an order that it cannot know. Those that left a call unanswered
/// come late, and this node last: it may be the only one that a false root has sent blocks to.
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
    calls.ask(
        node,
        0,
        async move { has(&asker, &node, &expected).await.ok_or(CallError::TimedOut) },
    );
}

/// What the first of `others` says that answers what `ask` asks. The next is asked when one is
/// overdue.
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

/// What is not borne out of blocks that the root of the replica set `set`, its first, says
/// the set has. `ask_first` asks one of them at random, which should bear all out.
async fn doubts(
    client: &Arc<Client>,
    set: &[Node],
    expected: &[Expected],
    ask_first: impl Fn(&mut Calls<Vec<bool>>, Node),
) -> Vec<Doubt> {
    let mut others = shuffled(client, set).into_iter();
    let asks = client.config.mechanisms.verified_acks;
    if others.len() == 0 || expected.is_empty() || !asks {
        return Vec::new();
    }
    let first = first_answer(client, &mut others, ask_first).await;
    let lacking = |index: &usize| first.as_ref().is_none_or(|(_, held)| !held[*index]);
    let doubtful: Vec<usize> = (0..expected.len()).filter(lacking).collect();
    let mut doubts: Vec<Doubt> =
        doubtful.into_iter().map(|index| Doubt { index, holders: Vec::new() }).collect();
    if doubts.is_empty() {
        return doubts;
    }
    let expected: Vec<Expected> = doubts.iter().map(|doubt| expected[doubt.index]).collect();
    let answered = first.as_ref().map(|(node, _)| node.peer.id);
    let rest = set.iter().skip(1).filter(|node| Some(node.peer.id) != answered);
    let mut calls = Calls::new(client, WaitsFor::Replica);
    rest.for_each(|node| ask_whether(client, &mut calls, *node, &expected));
    let mut witnesses = usize::from(first.is_some());
    while calls.is_patient() {
        if let Some(Event::Answer(node, Ok(held))) = calls.next().await {
            witnesses += 1;
            for (doubt, held) in doubts.iter_mut().zip(held) {
                if held {
                    doubt.holders.push(node.peer.id);
                }
            }
        }
    }
    // One alone may be the liar.
    let is_false = witnesses >= 2.min(set.len() - 1);
    if is_false && doubts.iter().any(|doubt| doubt.holders.is_empty()) {
        let (root, now) = (&set[0], client.env.now());
        tracing::warn!(?root, count = doubts.len(), "a root's word is not borne out");
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

/// Looks whether blocks are where their root, the first of `set`, says in `statuses`; gives
/// them to the replicas that lack them, and says then what has become of them.
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
    for (index, status) in statuses.iter_mut().enumerate() {
        if matches!(status, PutStatus::Superseded { .. }) {
            match newest_shown(client, set, &blocks[index]).await {
                Some(held) => *status = PutStatus::Superseded { held },
                None => doubts.push(Doubt { index, holders: Vec::new() }),
            }
        }
    }
    let size = size_of(client, set);
    // The root may still be sending what a majority has to the others.
    let (late, doubts): (Vec<Doubt>, Vec<Doubt>) =
        doubts.into_iter().partition(|doubt| doubt.is_settled(0, size));
    if !late.is_empty() && client.config.mechanisms.later_puts {
        let kept = late.iter().map(|doubt| blocks[doubt.index].clone()).collect();
        put_later(client, set, origin, kept, late);
    }
    let told = put_at_replicas(client, set, origin, blocks, &doubts).await;
    let wanted = u32::try_from(size).expect("k is small");
    for doubt in doubts {
        let told = &told[doubt.index];
        let given = told.iter().filter(|status| matches!(status, PutStatus::Stored { .. })).count();
        let is_refused = |status: &&PutStatus| matches!(status, PutStatus::Superseded { .. });
        let over = told.iter().find(|status| matches!(status, PutStatus::OverQuota { .. }));
        let copies = u32::try_from(doubt.holders.len() + given).expect("k is small");
        let newer = match told.iter().find(is_refused) {
            Some(_) => newest_shown(client, set, &blocks[doubt.index]).await,
            None => None,
        };
        statuses[doubt.index] = match (newer, over) {
            (Some(held), _) => PutStatus::Superseded { held },
            _ if doubt.is_settled(given, size) => PutStatus::Stored { copies: wanted, wanted },
            (None, Some(over)) => *over,
            (None, None) => PutStatus::Stored { copies, wanted },
        };
    }
}

/// How long the root has to bring blocks to a replica that lacks them, before their publisher
/// does. A guess: as long as a call.
const PUT_LATER: Duration = Duration::from_secs(10);

/// Looks again, after a while, at the replicas that lacked `blocks`, each with its doubt, and
/// puts what they still lack.
fn put_later(
    client: &Arc<Client>,
    set: &[Node],
    origin: &Origin,
    blocks: Vec<Block>,
    mut doubts: Vec<Doubt>,
) {
    let (later, set, origin) = (client.clone(), set.to_vec(), origin.clone());
    client.background.run(client, async move {
        sleep(&*later.env, PUT_LATER).await;
        let expected: Vec<Expected> = blocks.iter().map(expect).collect();
        for (index, doubt) in doubts.iter_mut().enumerate() {
            doubt.index = index;
        }
        for node in &set[1..] {
            let held = has(&later, node, &expected).await.unwrap_or_default();
            for (doubt, _) in doubts.iter_mut().zip(held).filter(|(_, held)| *held) {
                doubt.holders.push(node.peer.id);
            }
        }
        put_at_replicas(&later, &set, &origin, &blocks, &doubts).await;
    });
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
        ask_to_store(client, &mut calls, node, origin, indices, given);
    }
    let mut told = vec![Vec::new(); blocks.len()];
    while calls.is_patient() {
        if let Some(Event::Answer(_, Ok((indices, answers)))) = calls.next().await {
            indices.into_iter().zip(answers).for_each(|(index, status)| told[index].push(status));
        }
    }
    calls.finish();
    told
}

/// What a node said of the blocks of a batch with these numbers.
pub(crate) type Said = (Vec<usize>, Vec<PutStatus>);

/// Puts blocks at one replica, which may be this node; they have these numbers in their batch.
pub(crate) fn ask_to_store(
    client: &Arc<Client>,
    calls: &mut Calls<Said>,
    node: Node,
    origin: &Origin,
    indices: Vec<usize>,
    blocks: Vec<Block>,
) {
    let bytes = blocks.iter().map(|block| block.bytes.len() as u64).sum();
    let (storer, origin) = (client.clone(), origin.clone());
    calls.ask(node, bytes, async move {
        let statuses = put_at(&storer, &node, &origin, blocks).await?;
        Ok((indices, statuses))
    });
}

/// The highest version that any of `set` can show of a signed block that supersedes this one.
pub(crate) async fn newest_shown(client: &Client, set: &[Node], block: &Block) -> Option<u64> {
    let shown = join_all(set.iter().map(|node| shows_newer(client, node, block))).await;
    shown.into_iter().flatten().max()
}

fn expect(block: &Block) -> Expected {
    let BlockHeader { key, kind, lease_secs } = block.header;
    let version = kind.verify(&key, &block.bytes).unwrap_or(0);
    Expected { key, version, lease_secs }
}

/// Puts blocks at one replica, which may be this node.
async fn put_at(
    client: &Client,
    node: &Node,
    origin: &Origin,
    blocks: Vec<Block>,
) -> Result<Vec<PutStatus>, CallError> {
    if client.is_me(node) {
        return Ok(store_put(client, &node.peer, origin, blocks).await?);
    }
    let (put, parts) = put_message(origin, blocks, false);
    let (reply, _) = client.call(node, &put, parts).await?;
    Ok(reply.statuses.0)
}

/// A renewal whose outcome is looked at.
pub(crate) struct Renewal<'a> {
    pub origin: &'a Origin,
    pub renew: &'a Renew,
    pub keys: &'a [Key],
    /// Whether the publisher puts what is lacking.
    pub will_be_put: bool,
}

/// Looks whether leases end when the root, the first of `set`, says in `reply`; renews them
/// at the replicas where they do not, and says then which blocks are held: as in
/// [`RenewReply`], with [`RenewStatus::Undecided`] for those of which too few are known to be.
///
/// Where the root says that a block is held, the witness is sent the renewal itself: its names and
/// one byte for each are a sixth of a question for keys, and it has renewed the blocks in any case
/// then. It says which of them it had not been told to renew before. Where the root says anything
/// else, all other members are sent the renewal, and a majority of the set decides; but a root is
/// believed that lacks what will be put, which is most of what a publisher asks for.
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
        let (asker, origin, part) = (client.clone(), origin.clone(), part.clone());
        calls.ask(node, 0, async move {
            let reply = renew_at(&asker, &node, &origin, &part).await?;
            Ok(reply.statuses.iter().map(|status| *status == RenewStatus::Held).collect())
        });
    };
    let mut doubts = doubts(client, set, &expected, ask).await;
    doubts.iter_mut().for_each(|doubt| doubt.index = said[doubt.index]);
    let unheld = denied.iter().map(|index| Doubt { index: *index, holders: Vec::new() });
    let open: Vec<Doubt> = doubts.iter().cloned().chain(unheld).collect();
    let mut calls = Calls::new(client, WaitsFor::Root);
    for (node, indices) in lacking(set, &open) {
        ask_to_renew(client, &mut calls, node, origin, renew, indices);
    }
    let mut told = Votes::new(client, set, statuses.len());
    while calls.is_patient() {
        if let Some(Event::Answer(_, Ok((indices, theirs)))) = calls.next().await {
            told.count(indices, &theirs);
        }
    }
    calls.finish();
    for doubt in doubts {
        let (has, lacks) = told.of(doubt.index);
        statuses[doubt.index] = match doubt.is_settled(has, size_of(client, set)) {
            true => RenewStatus::Held,
            // Nobody has it but the root, if that: it should be put again.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn set(count: u8) -> Vec<Node> {
        let addr = "127.0.0.1:1".parse().expect("an address");
        (0..count).map(|n| Node::of(atoll_net::Peer { id: PeerId([n; 32]), addr })).collect()
    }

    #[test]
    fn a_root_counts_only_if_another_bears_it_out() {
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
