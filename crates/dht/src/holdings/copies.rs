//! What nodes say of the blocks they hold: version, lease, whom they charge them to, and which
//! other node keeps them.

use atoll_key::Key;
use atoll_overlay::Node;
use atoll_store::{BlockInfo, StoreError};

use crate::holdings::Holdings;
use crate::rpc::{AskHoldings, HeldCopy, Pointing};

impl HeldCopy {
    /// What `holdings` says of a block that it holds, or that `holder` keeps for it.
    pub(crate) fn of(holdings: &Holdings, held: &BlockInfo, holder: Option<[u8; 32]>) -> HeldCopy {
        HeldCopy {
            version: held.version,
            lease_secs: holdings.lease_left(held),
            publisher: held.owner.publisher,
            ip: held.owner.ip,
            holder,
        }
    }
}

/// What this node says of blocks.
///
/// # Errors
/// If the store fails.
pub(crate) async fn held_copies(
    holdings: &Holdings,
    keys: &[Key],
) -> Result<Vec<Option<HeldCopy>>, StoreError> {
    let mut copies = Vec::with_capacity(keys.len());
    for key in keys {
        let here = holdings.store.info(key)?;
        let records = &holdings.pointers;
        let pointed = if here.is_none() { records.pointed(key) } else { None };
        let holder = match pointed {
            Some(_) => records.holder(key).await.map(|holder| holder.id.0),
            None => None,
        };
        let held = here.or(pointed);
        let live =
            held.filter(|held| holdings.lease_left(held) > 0 && !holdings.pending.denies(key));
        copies.push(live.map(|held| HeldCopy::of(holdings, &held, holder)));
    }
    Ok(copies)
}

/// What a node says of blocks; `None` if it does not answer in a quarter
/// of a call's time: other callers wait for that.
pub(crate) async fn ask_holdings(
    holdings: &Holdings,
    node: &Node,
    keys: Vec<Key>,
) -> Option<Vec<Option<HeldCopy>>> {
    let asked = AskHoldings { keys, pointing: Pointing::No };
    let call = holdings.call(node, &asked, Vec::new());
    let (reply, _) = holdings.within(holdings.config.call_limit / 4, call).await.ok()?;
    Some(reply.held.0)
}
