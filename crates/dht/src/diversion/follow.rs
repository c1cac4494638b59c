//! Following pointers: asking the holder of a diverted copy for it.
//!
//! A pointer is followed once. Any answer of a holder but the block itself counts as not having it,
//! so chains and cycles of pointers, honest or not, cost one call.

use std::collections::BTreeMap;

use atoll_key::kinds::{Release, ReleaseEffect};
use atoll_key::{Key, NotAdmitted, PeerId};
use atoll_net::{CallError, Peer, Refusal};
use atoll_overlay::Node;
use bytes::Bytes;
use futures_util::future::join_all;

use crate::accounting::admission::Origin;
use crate::diversion::Diversion;
use crate::rpc::{
    AskHoldings, Block, BlockHeader, Fetch, LookupReply, LookupStep, Name, Pointing, ReleaseBlocks,
    ReleaseStatus, Renew, RenewReply, RenewStatus,
};

/// A refusal's code for a pointer that led to no block; made here, never sent.
const NOT_THERE: u16 = 102;

/// Of blocks that other nodes keep for this one: by whom, with their places in `keys`.
pub(crate) async fn by_holder(diversion: &Diversion, keys: &[Key]) -> Vec<(Peer, Vec<usize>)> {
    let mut holders: BTreeMap<PeerId, (Peer, Vec<usize>)> = BTreeMap::new();
    for (place, key) in keys.iter().enumerate() {
        if let Some(holder) = diversion.pointers.holder(key).await {
            holders.entry(holder.id).or_insert((holder, Vec::new())).1.push(place);
        }
    }
    holders.into_values().collect()
}

/// Asks `holder` for a block that `pointing` says it keeps; the block is not verified.
///
/// # Errors
/// If it does not have it, which is said of the pointing node: the walk has asked that one.
pub(crate) async fn ask_holder(
    diversion: &Diversion,
    pointing: &Node,
    holder: Peer,
    key: Key,
) -> Result<(BlockHeader, Vec<Bytes>), CallError> {
    let fails = |why: String| {
        let text = format!("points to {holder} for it, {why}");
        CallError::from(Refusal::new(NOT_THERE, text))
    };
    if holder.id == pointing.peer.id {
        return Err(fails("itself".to_owned()));
    }
    let step = LookupStep { key, as_root: true, may_be_cached: false };
    let answer = diversion.call(&Node::of(holder), &step, Vec::new()).await;
    match answer.map_err(|e| fails(e.to_string()))? {
        (LookupReply::Found(header), parts) => Ok((header, parts)),
        _ => Err(fails("which does not have it".to_owned())),
    }
}

/// A block that another node keeps for this one, verified.
pub(crate) async fn own(diversion: &Diversion, key: &Key) -> Option<Block> {
    let holder = diversion.pointers.holder(key).await?;
    let me = Node::of(diversion.transport.local());
    let (header, parts) = match ask_holder(diversion, &me, holder, *key).await {
        Ok(answer) => answer,
        Err(error) => {
            tracing::info!(%key, %error, "a diverted copy could not be fetched");
            diversion.pointer_doubts.notify();
            return None;
        }
    };
    let bytes = parts.into_iter().next().unwrap_or_default();
    match header.kind.verify(key, &bytes) {
        Ok(_) => Some(Block { header: BlockHeader { key: *key, ..header }, bytes }),
        Err(error) => {
            tracing::warn!(%key, from = %holder, %error, "dropped a bad block");
            diversion.counters.mark(holder.id);
            diversion.pointer_doubts.notify();
            None
        }
    }
}

/// The bytes that a node has of a block, itself or by its pointer; not verified.
pub(crate) async fn bytes_at(diversion: &Diversion, node: &Node, key: Key) -> Option<Bytes> {
    let (limit, fetch) = (diversion.config.call_limit / 4, Fetch { keys: vec![key] });
    let asked = diversion.within(limit, diversion.call(node, &fetch, Vec::new())).await;
    let (reply, parts) = asked.ok()?;
    if let Some(bytes) = parts.into_iter().next() {
        return Some(bytes);
    }
    let holder = reply.there.0.first()?.holder;
    let (_, parts) = ask_holder(diversion, node, holder, key).await.ok()?;
    parts.into_iter().next()
}

/// The version of the block that a node holds instead of this one, because this one does not supersede
/// it or its writer has not seen enough of it. Any node can say that there is one, and name any number.
pub(crate) async fn shows_newer(diversion: &Diversion, node: &Node, block: &Block) -> Option<u64> {
    let BlockHeader { key, kind, .. } = block.header;
    if !kind.is_mutable() {
        return None;
    }
    let bytes = bytes_at(diversion, node, key).await?;
    let held = kind.verify(&key, &bytes).ok()?;
    let offered = kind.verify(&key, &block.bytes).ok()?;
    let stays = match kind.joins() {
        true => {
            let admitted = kind.admit(Some(&bytes), &block.bytes, diversion.env.unix_ms());
            admitted == Err(NotAdmitted::Outdated)
        }
        false => bytes != block.bytes && !kind.supersedes(offered, held),
    };
    stays.then_some(held)
}

/// Tells a holder that this node points to it for these blocks no longer. If the call fails, the
/// holds end by themselves.
pub(super) async fn release(diversion: &Diversion, holder: &Peer, keys: Vec<Key>) {
    let released = AskHoldings { keys, pointing: Pointing::NoLonger };
    if let Err(error) = diversion.call(&Node::of(*holder), &released, Vec::new()).await {
        tracing::info!(%holder, %error, "a holder could not be told that copies are not needed");
    }
}

/// Blocks are here now: forgets the pointers to copies of them elsewhere, and lets those go.
pub(crate) async fn come_home(diversion: &Diversion, keys: Vec<Key>) {
    let pointed = keys.into_iter().filter(|key| diversion.pointers.pointed(key).is_some());
    let keys: Vec<Key> = pointed.collect();
    let holders = by_holder(diversion, &keys).await;
    diversion.pointers.forget(keys.clone()).await;
    for (holder, places) in holders {
        release(diversion, &holder, places.iter().map(|place| keys[*place]).collect()).await;
    }
}

/// Extends the leases of blocks that other nodes keep for this one, as far as `reply` says that
/// they are not here.
pub(crate) async fn renew(
    diversion: &Diversion,
    origin: &Origin,
    keys: &[Option<Key>],
    lease_secs: u64,
    reply: &mut RenewReply,
) {
    let lacking =
        keys.iter().enumerate().filter(|(place, _)| reply.statuses[*place] == RenewStatus::Lacking);
    let pointed = |key: &Key| diversion.pointers.pointed(key).is_some();
    let lacking = lacking.filter_map(|(place, key)| Some((place, key.filter(pointed)?)));
    let (lacking, keys): (Vec<usize>, Vec<Key>) = lacking.unzip();
    let holders = by_holder(diversion, &keys).await;
    let calls = holders.iter().map(|(holder, places)| {
        let keys: Vec<Key> = places.iter().map(|place| keys[*place]).collect();
        async move { renew_at(diversion, origin, holder, &keys, lease_secs).await }
    });
    let answers = join_all(calls).await;
    for ((_, places), answer) in holders.iter().zip(answers) {
        let Some(RenewReply { statuses, over }) = answer else {
            diversion.pointer_doubts.notify();
            continue;
        };
        reply.over = reply.over.or(over);
        for (place, status) in places.iter().zip(statuses) {
            let is_held = status.is_held();
            reply.statuses[lacking[*place]] = if is_held { status } else { RenewStatus::Lacking };
            match status {
                RenewStatus::Held | RenewStatus::Late => {
                    extend(diversion, origin, &keys[*place], lease_secs)
                }
                // The copy is lost: repair brings another.
                RenewStatus::Lacking => {
                    diversion.pointers.forget(vec![keys[*place]]).await;
                    diversion.requests.kick();
                }
                _ => {}
            }
        }
    }
}

/// Has blocks that other nodes keep for this one released, as far as `statuses` say that they are not here.
pub(crate) async fn release_blocks(
    diversion: &Diversion,
    release: &Release,
    keys: &[Key],
    statuses: &mut [ReleaseStatus],
) {
    let lacking = (0..keys.len()).filter(|place| statuses[*place] == ReleaseStatus::Lacking);
    let pointed = |place: &usize| diversion.pointers.pointed(&keys[*place]).is_some();
    let lacking: Vec<usize> = lacking.filter(pointed).collect();
    let lacking_keys: Vec<Key> = lacking.iter().map(|place| keys[*place]).collect();
    for (holder, places) in by_holder(diversion, &lacking_keys).await {
        let request = ReleaseBlocks { release: release.clone(), is_pointed: true };
        let called = diversion.call(&Node::of(holder), &request, Vec::new()).await;
        for place in places.iter().map(|place| lacking[*place]) {
            // A holder that does not answer has not released it: the caller asks again.
            let said = called.as_ref().map(|(reply, _)| reply.statuses[place]);
            statuses[place] = said.unwrap_or(ReleaseStatus::Refused);
            if let (ReleaseStatus::Released, ReleaseEffect::EndsAfter { lease_secs }) =
                (statuses[place], release.effect())
            {
                let expires_unix_secs = diversion.expiry(u64::from(lease_secs));
                diversion.pointers.shorten(&keys[place], expires_unix_secs);
            }
        }
    }
}

fn extend(diversion: &Diversion, origin: &Origin, key: &Key, lease_secs: u64) {
    let Origin::Publisher { receipt, owner } = origin else { return };
    let now = diversion.env.unix_ms() / 1000;
    let lease_secs = receipt.lease_left_secs(now, lease_secs).unwrap_or(0);
    diversion.pointers.extend(key, diversion.expiry(lease_secs), *owner);
}

async fn renew_at(
    diversion: &Diversion,
    origin: &Origin,
    holder: &Peer,
    keys: &[Key],
    lease_secs: u64,
) -> Option<RenewReply> {
    let receipt = origin.to_wire(keys.iter().copied());
    let names = keys.iter().map(Name::of).collect();
    let renew = Renew { names, lease_secs, as_root: false, receipt, will_be_put: None };
    let (reply, _) = diversion.call(&Node::of(*holder), &renew, Vec::new()).await.ok()?;
    Some(reply)
}
