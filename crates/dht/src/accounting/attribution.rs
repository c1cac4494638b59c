//! Attributing copies that come without a receipt to an account: copies from repair, from readers
//! that heal a replica, and from nodes that hand over blocks (CFS §5.1).
//!
//! Receipts are not stored with blocks, so these copies have none. The receiver asks nodes that
//! should hold such a block if a majority of its replica set ever took it: the replica set, and
//! then the k nodes after it, which held the block while the set was away. If two of them vouch for
//! the block in the name of the same publisher, the copy is charged to that publisher, and leased
//! no longer than both say. The node that brings the copy counts as one of the two if it belongs to
//! the replica set. So one liar can neither have a victim charged nor store blocks at no account.
//!
//! A copy that no two nodes vouch for is charged to its *carrier*, the node that brought it. A
//! carrier that is a neighbour may use [`QuotaConfig::copy_share`] of this node, any other a
//! publisher's share. So carriers cannot fill a node, and the last holder of a block can still
//! restore its copies. A carrier's account is not vouched for elsewhere; the block is charged to
//! its publisher again once that renews it.
//!
//! A copy of a block that is held with a shorter lease extends that lease only if two nodes vouch.
//!
//! Not covered: two liars among the replicas of a block, or beside the receiver, that vouch for
//! each other. Where one machine can have many keys (the `identity` profile), one member can be
//! both. With two copies (k = 2), or two nodes, no two can vouch: all copies are charged to their
//! carriers.
//!
//! [`QuotaConfig::copy_share`]: crate::QuotaConfig::copy_share

use std::collections::{BTreeMap, BTreeSet};

use atoll_key::{BlockKind, Key, PeerId};
use atoll_net::{Peer, Refusal};
use atoll_overlay::Node;
use atoll_store::{BlockInfo, Owner};
use futures_util::future::join_all;

use crate::accounting::Accounting;
use crate::accounting::owner::{carrier, is_carrier};
use crate::accounting::quota::ChargeClass;
use crate::holdings::copies::ask_holdings;
use crate::lease_clock::least_lease;
use crate::placement::{MAX_SETS, by_root};
use crate::rpc::HeldCopy;

/// So many must say the same of a block.
const AGREE: usize = 2;

/// A copy to be judged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub key: Key,
    pub kind: BlockKind,
    pub version: u64,
    pub lease_secs: u64,
}

/// Whom a block is charged to, and for how long it may stay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charge {
    pub owner: Owner,
    pub lease_secs: u64,
    pub class: ChargeClass,
}

impl Charge {
    /// For what is held already: a copy extends no lease.
    const HELD: Charge = Charge { owner: Owner::NOBODY, lease_secs: 0, class: ChargeClass::Free };
}

/// Says for each copy that `from` brought whom it is charged to. `is_outside`: this node does not
/// belong to the replica sets, but keeps the copies for `from`, which does.
///
/// # Errors
/// If it has to be charged to `from`, which could not be confirmed at its address.
pub(crate) async fn charges(
    accounting: &Accounting,
    from: &Peer,
    copies: &[Copy],
    is_outside: bool,
) -> Result<Vec<Charge>, Refusal> {
    let mut charges = vec![Charge::HELD; copies.len()];
    let held: Vec<Held> = copies.iter().map(|copy| held(accounting, copy)).collect();
    let unknown: Vec<usize> = (0..copies.len()).filter(|i| held[*i] != Held::ForAsLong).collect();
    if unknown.is_empty() {
        return Ok(charges);
    }
    let mut hearing = Hearing::new(unknown.iter().map(|index| copies[*index]).collect());
    let mut is_near = is_neighbour(accounting, from);
    if accounting.config.mechanisms.vouching {
        let found = replica_sets(accounting, from, &hearing, is_outside).await;
        is_near |= found.has_carrier;
        hearing.ask(accounting, found.sets).await;
        if hearing.is_open() {
            hearing.ask(accounting, found.beyond).await;
        }
    }
    if hearing.is_open() {
        confirm(accounting, from).await?;
    }
    let owner = carrier(&from.id, from.addr.ip());
    let class = if is_near { ChargeClass::Copy } else { ChargeClass::Content };
    for (place, index) in unknown.into_iter().enumerate() {
        let brought = Charge { owner, lease_secs: copies[index].lease_secs, class };
        charges[index] = match (hearing.agreed(place), held[index]) {
            (Some(agreed), Held::Shorter(left)) if left >= least_lease(agreed.lease_secs) => {
                continue;
            }
            (Some(agreed), _) => agreed,
            // One node's word extends no lease that lasts.
            (None, Held::Shorter(_)) => continue,
            (None, _) => brought,
        };
    }
    Ok(charges)
}

/// What nodes say of copies.
struct Hearing {
    copies: Vec<Copy>,
    /// For each copy, the nodes that were asked and their answers.
    said: Vec<Vec<(PeerId, Option<HeldCopy>)>>,
}

impl Hearing {
    fn new(copies: Vec<Copy>) -> Hearing {
        let said = vec![Vec::new(); copies.len()];
        Hearing { copies, said }
    }

    /// Whether no two nodes have vouched for some copy.
    fn is_open(&self) -> bool {
        (0..self.copies.len()).any(|place| self.agreed(place).is_none())
    }

    /// Asks nodes about the copies with these numbers, each once about each: a machine may be
    /// named for several of its virtual servers.
    async fn ask(&mut self, accounting: &Accounting, asks: Vec<(Node, Vec<usize>)>) {
        let mut by_peer: BTreeMap<PeerId, (Node, BTreeSet<usize>)> = BTreeMap::new();
        for (node, places) in asks {
            let id = node.peer.id;
            let new = |place: &usize| self.said[*place].iter().all(|(asked, _)| *asked != id);
            let asked = by_peer.entry(id).or_insert_with(|| (node, BTreeSet::new()));
            asked.1.extend(places.into_iter().filter(new));
        }
        let asks = by_peer.into_values().filter(|(_, places)| !places.is_empty());
        let asks: Vec<(Node, BTreeSet<usize>)> = asks.collect();
        let answers = join_all(asks.iter().map(|(node, places)| {
            ask_holdings(
                accounting,
                node,
                places.iter().map(|place| self.copies[*place].key).collect(),
            )
        }))
        .await;
        for ((node, places), answer) in asks.into_iter().zip(answers) {
            let answer = answer.unwrap_or_else(|| vec![None; places.len()]);
            for (place, said) in places.into_iter().zip(answer) {
                self.said[place].push((node.peer.id, said));
            }
        }
    }

    /// Whom most, and at least [`AGREE`], say that they charge the copy to, and for as long as
    /// so many of them say.
    fn agreed(&self, place: usize) -> Option<Charge> {
        let copy = &self.copies[place];
        let mut by_owner: BTreeMap<Owner, Vec<u64>> = BTreeMap::new();
        for said in self.said[place].iter().filter_map(|(_, said)| said.as_ref()) {
            // A carrier bears out that it is there, not whose it is.
            if copy.kind.reaches(said.version, copy.version) && !is_carrier(&said.owner()) {
                by_owner.entry(said.owner()).or_default().push(said.lease_secs);
            }
        }
        let (owner, mut leases) = by_owner.into_iter().max_by_key(|(_, leases)| leases.len())?;
        leases.sort_unstable_by_key(|lease_secs| std::cmp::Reverse(*lease_secs));
        let lease_secs = copy.lease_secs.min(*leases.get(AGREE - 1)?);
        Some(Charge { owner, lease_secs, class: ChargeClass::Repair })
    }
}

/// How a block that a peer brings is held here already, in this version or a newer one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    /// It is not, or its lease has ended.
    Not,
    /// With a lease that ends before the copy's, after so many seconds.
    Shorter(u64),
    /// With a lease as long as the copy's.
    ForAsLong,
}

fn held(accounting: &Accounting, copy: &Copy) -> Held {
    let held = accounting.known(&copy.key);
    let is_as_new = |held: &BlockInfo| !copy.kind.replaces(copy.version, held.version);
    match held.filter(is_as_new).map(|held| accounting.lease_left(&held)) {
        None | Some(0) => Held::Not,
        Some(left) if left < least_lease(copy.lease_secs) => Held::Shorter(left),
        Some(_) => Held::ForAsLong,
    }
}

/// Makes sure that the node that brings copies is where it says.
async fn confirm(accounting: &Accounting, from: &Peer) -> Result<(), Refusal> {
    if from.id == accounting.transport.local().id {
        return Ok(());
    }
    accounting.confirm(from, *from, None).await
}

/// Whether `from` may share blocks with this node: it stands beside one of its virtual
/// servers, or is this node itself.
fn is_neighbour(accounting: &Accounting, from: &Peer) -> bool {
    let beside = |own: &Node| {
        let near = accounting.overlay.neighbours_of(own, 2 * accounting.config.replicas);
        near.iter().any(|node| node.peer.id == from.id)
    };
    from.id == accounting.transport.local().id || accounting.overlay.positions().iter().any(beside)
}

/// Whom to ask about copies.
#[derive(Default)]
struct ReplicaSets {
    /// The other members of the copies' replica sets, as far as this node belongs to them, or
    /// the node that brings the copies if this one is outside.
    sets: Vec<(Node, Vec<usize>)>,
    /// The k nodes after each set: they held the blocks while the set was away.
    beyond: Vec<(Node, Vec<usize>)>,
    /// Whether the node that brings the copies belongs to one of the sets.
    has_carrier: bool,
}

async fn replica_sets(
    accounting: &Accounting,
    from: &Peer,
    hearing: &Hearing,
    is_outside: bool,
) -> ReplicaSets {
    let places = (0..hearing.copies.len()).collect();
    let key = |place: &usize| hearing.copies[*place].key;
    let mut found = ReplicaSets::default();
    let k = accounting.config.replicas;
    for (near, its) in by_root(accounting, places, key, 2 * k, MAX_SETS).await {
        let (set, after) = near.split_at(k.min(near.len()));
        let member = if is_outside { from.id } else { accounting.transport.local().id };
        if set.iter().any(|node| node.peer.id == member) {
            found.has_carrier |= set.iter().any(|node| node.peer.id == from.id);
            let ask = |node: &Node| (!accounting.is_me(node)).then(|| (*node, its.clone()));
            found.sets.extend(set.iter().filter_map(ask));
            found.beyond.extend(after.iter().filter_map(ask));
        }
    }
    found
}
