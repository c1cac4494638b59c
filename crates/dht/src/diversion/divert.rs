//! Finding a node that keeps copies for this one, and handing them over.
//!
//! Nodes near on the ring and others that this node knows are asked how much room they have; one of
//! those with most gets the batch, chosen at random. (PAST takes the node with most: then a node
//! that claims most gets everything.) Nodes say how much room they have in every answer about
//! diverted copies, so a question of its own is seldom needed. A copy counts once its holder has
//! proven to have it, and no other member of the replica set has its copy there.

use std::collections::BTreeSet;
use std::time::Duration;

use atoll_env::{random_below, timeout};
use atoll_key::{Key, PeerId};
use atoll_net::CallError;
use atoll_overlay::peer_book::Standing;
use atoll_overlay::{Node, distinct_peers};
use atoll_store::{BlockInfo, StoreError, StoredBlock};
use futures_util::future::join_all;

use super::{SPARE_BLOCKS, follow};
use crate::accounting::admission::{Origin, Sound};
use crate::accounting::quota::cost_bytes;
use crate::diversion::Diversion;
use crate::holdings::copies::ask_holdings;
use crate::holdings::proof::has_taken;
use crate::placement::{MAX_SETS, by_root};
use crate::rpc::{
    AskHoldings, Block, Divert, DivertReply, Diverted, HeldCopy, Pointing, PutStatus, from_blocks,
};

/// Holders tried for one block.
const MAX_TRIES: usize = 4;
/// The room of so many nodes is asked for, if it is not known.
const MAX_ASKED: usize = 64;
/// They are waited for so long: a put waits for them.
const ASK_LIMIT: Duration = Duration::from_millis(500);
/// A batch is waited for so long, and longer by what a slow line takes for it.
const SEND_LIMIT: Duration = Duration::from_secs(1);
/// The slowest line that is waited for, bytes a second. A guess.
const SLOW_LINE: f64 = 1_048_576.0;
/// The choice is among so many nodes with most room: what nodes say of it cannot be checked, so a
/// node that claims most gets one copy in so many. A wider choice fills small nodes early, and then
/// copies find no room (measured by `atoll lab run capacity`).
const CHOICE: usize = 4;

/// Has blocks for which there is no room here kept by other nodes; one status a block.
pub(crate) async fn divert(
    diversion: &Diversion,
    origin: &Origin,
    sound: &[Sound],
) -> Vec<PutStatus> {
    let statuses = vec![PutStatus::Full; sound.len()];
    let mut batch = Batch { diversion, origin, sound, statuses };
    if diversion.config.divert {
        batch.send_to_present_holders().await;
        let key = |place: &usize| sound[*place].stored.info.key;
        let (places, replicas) = ((0..sound.len()).collect(), diversion.config.replicas);
        for (set, places) in by_root(diversion, places, key, replicas, MAX_SETS).await {
            batch.send_elsewhere(&set, &places).await;
        }
    }
    batch.statuses
}

/// Blocks on their way to holders.
struct Batch<'a> {
    diversion: &'a Diversion,
    origin: &'a Origin,
    sound: &'a [Sound],
    statuses: Vec<PutStatus>,
}

impl Batch<'_> {
    /// A block whose copy a node keeps already, of this version or an older one, stays there.
    async fn send_to_present_holders(&mut self) {
        let keys: Vec<Key> = self.sound.iter().map(|sound| sound.stored.info.key).collect();
        for (holder, places) in follow::by_holder(self.diversion, &keys).await {
            self.send(&[], &Node::of(holder), &places).await;
        }
    }

    /// Sends blocks of one replica set to nodes outside it.
    async fn send_elsewhere(&mut self, set: &[Node], places: &[usize]) {
        let mut tried: BTreeSet<PeerId> = set.iter().map(|node| node.peer.id).collect();
        tried.insert(self.diversion.transport.local().id);
        for _ in 0..MAX_TRIES {
            let left: Vec<usize> = places.iter().copied().filter(|p| self.is_open(*p)).collect();
            let costs =
                left.iter().map(|place| cost_bytes(self.sound[*place].stored.info.len_bytes));
            let Some(least_bytes) = costs.min() else { return };
            let Some(holder) = choose(self.diversion, &tried, least_bytes * SPARE_BLOCKS).await
            else {
                return;
            };
            tried.insert(holder.peer.id);
            self.send(set, &holder, &left).await;
        }
    }

    fn is_open(&self, place: usize) -> bool {
        !matches!(self.statuses[place], PutStatus::Stored { .. } | PutStatus::Superseded { .. })
    }

    /// Sends blocks to one node; those that it proves to have, and that no other member of `set`
    /// counts on it for, are stored.
    async fn send(&mut self, set: &[Node], holder: &Node, places: &[usize]) {
        let answer = match self.ask(holder, places).await {
            Ok(answer) => answer,
            Err(error) => {
                tracing::info!(?holder, %error, "a node did not take copies for this one");
                self.diversion.learn(*holder, 0, self.diversion.env.now());
                return;
            }
        };
        let (now, spare_bytes) = (self.diversion.env.now(), answer.spare_bytes);
        self.diversion.learn(*holder, spare_bytes, now);
        let mut taken: Vec<(usize, BlockInfo)> = Vec::new();
        for (place, Diverted { status, held }) in places.iter().zip(answer.blocks.0) {
            match (status, held) {
                (PutStatus::Stored { .. }, Some(held)) => {
                    taken.push((*place, self.noted(*place, &held)));
                }
                (PutStatus::Superseded { .. }, _) => self.statuses[*place] = status,
                // Another node may take it.
                _ => {}
            }
        }
        self.retain_proven(holder, &mut taken).await;
        let kept = taken.iter().map(|(_, info)| *info).collect();
        let counted = note(self.diversion, set, holder, kept).await;
        for (place, info) in taken {
            match &counted {
                Ok(counted) if counted.contains(&info.key) => {
                    self.statuses[place] = PutStatus::Stored { copies: 1, wanted: 1 };
                }
                Ok(_) => {}
                Err(_) => self.statuses[place] = PutStatus::Failed,
            }
        }
        if let Err(error) = counted {
            tracing::error!(%error, "pointers could not be written");
        }
    }

    /// Keeps of what `holder` says it has taken what it proves to have; lets it go of the rest.
    async fn retain_proven(&self, holder: &Node, taken: &mut Vec<(usize, BlockInfo)>) {
        let diversion = self.diversion;
        let blocks: Vec<&StoredBlock> =
            taken.iter().map(|(place, _)| &self.sound[*place].stored).collect();
        let proofs =
            timeout(&*diversion.env, SEND_LIMIT, has_taken(diversion, holder, &blocks)).await;
        let mut proofs = proofs.unwrap_or_else(|_| vec![false; taken.len()]).into_iter();
        let mut unproven = Vec::new();
        taken.retain(|(_, info)| {
            let is_proven = proofs.next().expect("one for each block");
            if !is_proven {
                unproven.push(info.key);
            }
            is_proven
        });
        if !unproven.is_empty() {
            tracing::warn!(?holder, count = unproven.len(), "a node does not prove what it took");
            diversion.learn(*holder, 0, diversion.env.now());
            follow::release(diversion, &holder.peer, unproven).await;
        }
    }

    async fn ask(&self, holder: &Node, places: &[usize]) -> Result<DivertReply, CallError> {
        let some: Vec<Block> =
            places.iter().map(|place| self.sound[*place].block.clone()).collect();
        let bytes: usize = some.iter().map(|block| block.bytes.len()).sum();
        let receipt = self.origin.to_wire(some.iter().map(|block| block.header.key));
        let (blocks, parts) = from_blocks(some);
        let limit = SEND_LIMIT + Duration::from_secs_f64(bytes as f64 / SLOW_LINE);
        let divert = Divert { blocks, receipt };
        let (reply, _) =
            self.diversion.within(limit, self.diversion.call(holder, &divert, parts)).await?;
        Ok(reply)
    }

    /// What is noted of a block that the holder says it keeps so.
    fn noted(&self, place: usize, held: &HeldCopy) -> BlockInfo {
        let info = self.sound[place].stored.info;
        let expires_unix_secs = self.diversion.expiry(held.lease_secs);
        BlockInfo { owner: held.owner(), expires_unix_secs, ..info }
    }
}

/// Notes that `holder` keeps these, and says which of them count: not those that another member
/// of `set` has it keep as well, since both would be one copy. Of those that count, a copy that was
/// here is out of date, and one that another node kept is no longer needed.
async fn note(
    diversion: &Diversion,
    set: &[Node],
    holder: &Node,
    kept: Vec<BlockInfo>,
) -> Result<BTreeSet<Key>, StoreError> {
    if kept.is_empty() {
        return Ok(BTreeSet::new());
    }
    let keys: Vec<Key> = kept.iter().map(|info| info.key).collect();
    let mut before = follow::by_holder(diversion, &keys).await;
    before.retain(|(was, _)| was.id != holder.peer.id);
    diversion.pointers.point(&holder.peer, kept.clone()).await?;
    // Asked after the pointers were written: of two members that choose the same holder at once,
    // at least one sees the other's.
    let shared = shared(diversion, set, holder, &keys).await;
    follow::come_home(diversion, shared.iter().copied().collect()).await;
    for (was, places) in before {
        follow::release(diversion, &was, places.iter().map(|place| keys[*place]).collect()).await;
    }
    let counted: Vec<BlockInfo> =
        kept.into_iter().filter(|info| !shared.contains(&info.key)).collect();
    let outdated = |new: &&BlockInfo| {
        let held = diversion.store.info(&new.key).ok().flatten();
        held.is_some_and(|held| held.version < new.version)
    };
    let outdated: Vec<Key> = counted.iter().filter(outdated).map(|info| info.key).collect();
    if !outdated.is_empty() {
        diversion.store.remove(outdated).await?;
    }
    Ok(counted.into_iter().map(|info| info.key).collect())
}

/// Those of `keys` that another member of `set` says `holder` keeps for it. An honest holder
/// keeps a block for one member only.
async fn shared(diversion: &Diversion, set: &[Node], holder: &Node, keys: &[Key]) -> BTreeSet<Key> {
    let others = set.iter().filter(|node| !diversion.is_me(node));
    let asks = others.map(|node| {
        timeout(&*diversion.env, ASK_LIMIT, ask_holdings(diversion, node, keys.to_vec()))
    });
    let mut shared = BTreeSet::new();
    for said in join_all(asks).await.into_iter().filter_map(|said| said.ok().flatten()) {
        let same = |said: &Option<HeldCopy>| {
            said.is_some_and(|said| said.holder == Some(holder.peer.id.0))
        };
        shared.extend(keys.iter().zip(said).filter(|(_, said)| same(said)).map(|(key, _)| *key));
    }
    shared
}

/// One of the [`CHOICE`] nodes outside `tried` that have most room, if it is enough, at random.
async fn choose(diversion: &Diversion, tried: &BTreeSet<PeerId>, least_bytes: u64) -> Option<Node> {
    let known = diversion.known_rooms(diversion.env.now());
    let mut strangers = candidates(diversion, tried);
    strangers.retain(|node| !known.contains_key(&node.peer.id));
    strangers.truncate(MAX_ASKED.saturating_sub(known.len()));
    ask_room(diversion, &strangers).await;
    let known = diversion.known_rooms(diversion.env.now());
    let roomy = known
        .into_iter()
        .filter(|(id, (_, spare_bytes))| !tried.contains(id) && *spare_bytes >= least_bytes.max(1));
    let mut roomy: Vec<(u64, Node)> =
        roomy.map(|(_, (node, spare_bytes))| (spare_bytes, node)).collect();
    roomy.sort_unstable_by(|a, b| b.cmp(a));
    roomy.truncate(CHOICE);
    let at = random_below(&*diversion.env, roomy.len().max(1) as u64) as usize;
    roomy.get(at).map(|(_, node)| *node)
}

/// Nodes that may have room: the nearest on the ring first, then others this node knows, in
/// random order.
fn candidates(diversion: &Diversion, tried: &BTreeSet<PeerId>) -> Vec<Node> {
    let own = diversion.overlay.positions();
    let mut nodes: Vec<Node> =
        own.iter().flat_map(|own| diversion.overlay.successors_of(own)).collect();
    let mut others = diversion.overlay.known_nodes();
    while !others.is_empty() {
        let at = random_below(&*diversion.env, others.len() as u64) as usize;
        nodes.push(others.swap_remove(at));
    }
    let (book, now) = (diversion.overlay.peer_book(), diversion.env.now());
    let is_fit = |node: &Node| {
        !tried.contains(&node.peer.id)
            && book.standing(&node.peer, now) == Standing::Answers
            && !book.is_avoided(&node.peer.id, now)
    };
    let fit: Vec<Node> = nodes.into_iter().filter(is_fit).collect();
    distinct_peers(&fit, MAX_ASKED)
}

/// How much room the nodes have that this one knows, of those that answer.
pub(crate) async fn ask_rooms(diversion: &Diversion) -> Vec<u64> {
    let me = BTreeSet::from([diversion.transport.local().id]);
    let nodes = candidates(diversion, &me);
    let asks = nodes.iter().map(|node| async move {
        let asked = AskHoldings { keys: Vec::new(), pointing: Pointing::No };
        let answer = diversion.within(ASK_LIMIT, diversion.call(node, &asked, Vec::new())).await;
        answer.map(|(reply, _)| reply.spare_bytes)
    });
    join_all(asks).await.into_iter().flatten().collect()
}

/// Asks nodes how much room they have, and remembers it.
async fn ask_room(diversion: &Diversion, nodes: &[Node]) {
    let asks = nodes.iter().map(|node| async move {
        let asked = AskHoldings { keys: Vec::new(), pointing: Pointing::No };
        let answer = diversion.within(ASK_LIMIT, diversion.call(node, &asked, Vec::new())).await;
        let spare_bytes = answer.map_or(0, |(reply, _)| reply.spare_bytes);
        diversion.learn(*node, spare_bytes, diversion.env.now());
    });
    join_all(asks).await;
}
