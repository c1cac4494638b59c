//! Admission: before a node stores blocks, it verifies them against their keys, charges them to an
//! account, and reserves room for them or refuses them (CFS §5.4, §5.5).
//!
//! A block that is not what its key says is dropped and counted against its sender. The account
//! follows from the block's [`Origin`]; only then is it decided whether there is room.

use atoll_key::Key;
use atoll_net::{Peer, Refusal};
use atoll_store::{BlockInfo, Owner, StoredBlock};

use crate::accounting::Accounting;
use crate::accounting::attribution::{self, Charge, Copy};
use crate::accounting::owner::{is_carrier, owner_of};
use crate::accounting::quota::{ChargeClass, Reservation, Want, cost_bytes};
use crate::accounting::receipt::{BAD_RECEIPT, CLOCK_SLACK_SECS, Receipt};
use crate::rpc::{Block, BlockHeader, PutStatus, WireReceipt};

/// Where blocks come from, which decides whom they are charged to (CFS §5.4).
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    /// Their publisher has said that it wants them kept, and is where it says.
    Publisher { receipt: Receipt, owner: Owner },
    /// Some node has them.
    Carrier,
    /// A member of their replica set has no room for them.
    Diverted,
}

impl Origin {
    /// Checks the receipt of a message of `from`'s about `keys`, if it carries one.
    pub(crate) async fn of(
        accounting: &Accounting,
        from: &Peer,
        receipt: Option<WireReceipt>,
        keys: &[Key],
    ) -> Result<Origin, Refusal> {
        let Some(receipt) = receipt else { return Ok(Origin::Carrier) };
        let receipt = Receipt::from_wire(receipt, keys.iter().copied())?;
        let bad = |text: String| Err(Refusal::new(BAD_RECEIPT, text));
        if !receipt.covers(keys) {
            return bad("the receipt is for other blocks".to_owned());
        }
        let now = accounting.env.unix_ms() / 1000;
        if receipt.lease_left_secs(now, 0).is_none() {
            let (issued, hours) = (receipt.issued_unix_secs, now / 3600);
            let off = (issued / 3600).abs_diff(hours);
            return bad(format!("the receipt was made {off} hours from now, by the clock here"));
        }
        if !accounting.verified.is_signed(&receipt, &*accounting.attestor) {
            return bad("the receipt is not signed by its publisher".to_owned());
        }
        let publisher = receipt.publisher;
        if publisher.id == accounting.transport.local().id {
            if !accounting.confirmations.is_mine(&receipt.digest()) {
                return bad("this node did not make the receipt in its name".to_owned());
            }
        } else {
            // A publisher that sends its receipt itself has made it: the connection has proven its key.
            let shown = (publisher.id != from.id).then(|| receipt.digest());
            accounting.confirm(from, publisher, shown).await?;
        }
        let owner = owner_of(&publisher.id, publisher.addr.ip());
        Ok(Origin::Publisher { receipt, owner })
    }

    /// This node publishes blocks with these keys itself.
    pub(crate) fn own(accounting: &Accounting, lease_secs: u64, keys: &[Key]) -> Origin {
        let (me, now) = (accounting.transport.local(), accounting.env.unix_ms() / 1000);
        let keys = keys.iter().copied();
        let receipt = Receipt::sign(&*accounting.attestor, me, now, lease_secs, keys);
        accounting.confirmations.issued(receipt.digest());
        accounting.verified.remember(receipt.fingerprint());
        Origin::Publisher { receipt, owner: owner_of(&me.id, me.addr.ip()) }
    }

    /// The receipt for a message about `keys`.
    pub(crate) fn to_wire(&self, keys: impl Iterator<Item = Key>) -> Option<WireReceipt> {
        match self {
            Origin::Publisher { receipt, .. } => Some(receipt.to_wire(keys)),
            Origin::Carrier | Origin::Diverted => None,
        }
    }
}

/// A block that was found sound and charged.
#[derive(Clone, Debug)]
pub(crate) struct Sound {
    /// As it came.
    pub block: Block,
    /// As it is stored, with its owner and the end of its lease.
    pub stored: StoredBlock,
    /// The part of its owner's quota that the block may use.
    pub class: ChargeClass,
}

/// Blocks of a batch that have room here while `room` lives.
pub(crate) struct Admitted {
    /// In the order of the batch.
    pub sound: Vec<Sound>,
    /// For each block of the batch: why it was refused, or nothing of those in `sound`.
    pub refused: Vec<Option<PutStatus>>,
    pub room: Reservation,
}

/// Checks a batch against its keys, charges it and reserves room for it.
pub(crate) async fn admit(
    accounting: &Accounting,
    from: &Peer,
    origin: &Origin,
    blocks: Vec<Block>,
) -> Result<Admitted, Refusal> {
    // A bad block goes no further: the replicas would take this node for its source.
    let verified: Vec<_> = blocks.iter().map(|block| verify(accounting, from, block)).collect();
    let mut refused: Vec<Option<PutStatus>> =
        verified.iter().map(|version| version.err()).collect();
    let versions = blocks.into_iter().zip(verified);
    let blocks: Vec<(Block, u64)> =
        versions.filter_map(|(block, version)| Some((block, version.ok()?))).collect();
    let copy = |(block, version): &(Block, u64)| {
        let BlockHeader { key, kind, lease_secs } = block.header;
        Copy { key, kind, version: *version, lease_secs }
    };
    let copies: Vec<Copy> = blocks.iter().map(copy).collect();
    let charges = charges_of(accounting, from, origin, &copies).await?;
    let mut sound: Vec<Sound> = Vec::with_capacity(blocks.len());
    for ((block, version), charge) in blocks.into_iter().zip(&charges) {
        let mut stored = accounting.to_store(&block, version);
        stored.info.owner = charge.owner;
        stored.info.expires_unix_secs = expires(accounting, origin, &block.header.key, charge);
        sound.push(Sound { block, stored, class: charge.class });
    }
    let wants: Vec<Want> = sound.iter().map(|sound| want(accounting, sound)).collect();
    let peers = accounting.overlay.estimated_peers();
    let (verdicts, room) = accounting.quota.reserve(&*accounting.store, peers, &wants);
    let mut verdicts = verdicts.into_iter().map(|verdict| verdict.err().map(PutStatus::from));
    let mut fits = Vec::with_capacity(sound.len());
    for refused in refused.iter_mut().filter(|refused| refused.is_none()) {
        *refused = verdicts.next().expect("one for each sound block");
        fits.push(refused.is_none());
    }
    let mut fits = fits.into_iter();
    sound.retain(|_| fits.next().expect("one for each sound block"));
    Ok(Admitted { sound, refused, room })
}

fn want(accounting: &Accounting, sound: &Sound) -> Want {
    let Sound { stored: StoredBlock { info, .. }, class, .. } = sound;
    Want { owner: info.owner, bytes: added_bytes(accounting, info), class: *class }
}

/// Reserves what a block that was joined with what is held needs beyond what was reserved for it as it
/// came.
pub(crate) fn reserve_joined(
    accounting: &Accounting,
    came: &Sound,
    joined: &Sound,
) -> Result<Reservation, PutStatus> {
    let mut more = want(accounting, joined);
    more.bytes = more.bytes.saturating_sub(want(accounting, came).bytes);
    let peers = accounting.overlay.estimated_peers();
    let (mut verdicts, room) = accounting.quota.reserve(&*accounting.store, peers, &[more]);
    verdicts.remove(0).map(|()| room).map_err(PutStatus::from)
}

/// The statuses of a batch, in its order: those in `refused`, and for the other blocks those of
/// `stored`.
pub(crate) fn answers(
    refused: Vec<Option<PutStatus>>,
    stored: impl IntoIterator<Item = PutStatus>,
) -> Vec<PutStatus> {
    let mut stored = stored.into_iter();
    let answer = |refused: Option<PutStatus>| {
        refused.unwrap_or_else(|| stored.next().expect("one for each block that is not refused"))
    };
    refused.into_iter().map(answer).collect()
}

/// Whom blocks are charged to, and how long each may stay.
async fn charges_of(
    accounting: &Accounting,
    from: &Peer,
    origin: &Origin,
    copies: &[Copy],
) -> Result<Vec<Charge>, Refusal> {
    let Origin::Publisher { receipt, owner } = origin else {
        let is_outside = matches!(origin, Origin::Diverted);
        return attribution::charges(accounting, from, copies, is_outside).await;
    };
    let now = accounting.env.unix_ms() / 1000;
    let charge = |copy: &Copy| Charge {
        owner: *owner,
        lease_secs: receipt.lease_left_secs(now, copy.lease_secs).unwrap_or(0),
        class: ChargeClass::of_published(copy.kind),
    };
    Ok(copies.iter().map(charge).collect())
}

/// When a block's lease ends. A publisher's word for what only its carrier was charged for makes it
/// the publisher's at once: a second more is what it takes. But no publisher is charged for longer
/// than he has signed for: what its carrier keeps for longer stays its carrier's.
pub(crate) fn expires(accounting: &Accounting, origin: &Origin, key: &Key, charge: &Charge) -> u64 {
    let expires = accounting.expiry(charge.lease_secs);
    let held = accounting.store.info(key).ok().flatten();
    match (origin, held) {
        (Origin::Publisher { .. }, Some(held))
            if is_carrier(&held.owner)
                && held.expires_unix_secs <= expires.saturating_add(CLOCK_SLACK_SECS) =>
        {
            expires.max(held.expires_unix_secs.saturating_add(1))
        }
        _ => expires,
    }
}

/// What more would be charged to a block's owner if it were stored. What is kept for a
/// publisher already is his from wherever he renews it: an address that changes, while he
/// is over quota because the network has grown, must not cost him his blocks.
pub(crate) fn added_bytes(accounting: &Accounting, new: &BlockInfo) -> u64 {
    let whole = cost_bytes(new.len_bytes);
    let Ok(Some(held)) = accounting.store.info(&new.key) else { return whole };
    let is_replaced = new.kind.replaces(new.version, held.version);
    match (is_replaced, new.owner.publisher == held.owner.publisher) {
        (true, true) => whole.saturating_sub(cost_bytes(held.len_bytes)),
        (true, false) => whole,
        (false, true) => 0,
        (false, false) if new.expires_unix_secs > held.expires_unix_secs => whole,
        (false, false) => 0,
    }
}

/// Checks one block against its key and against what is held; its version.
fn verify(accounting: &Accounting, from: &Peer, block: &Block) -> Result<u64, PutStatus> {
    let key = &block.header.key;
    let version = block.header.kind.verify(key, &block.bytes).map_err(|error| {
        tracing::warn!(%key, %from, %error, "dropped a bad block");
        accounting.counters.mark(from.id);
        PutStatus::Invalid
    })?;
    match accounting.known(key) {
        Some(held) if block.header.kind.supersedes(held.version, version) => {
            Err(PutStatus::Superseded { held: held.version })
        }
        _ => Ok(version),
    }
}
