//! What nodes say of the blocks they hold: version, lease, whom they charge them to, and which
//! other node keeps them.

use atoll_key::Key;
use atoll_overlay::Node;
use atoll_store::StoreError;

use crate::holdings::Holdings;
use crate::rpc::{Vouch, Vouched};

/// What this node says of blocks.
///
/// # Errors
/// If the store fails.
pub(crate) async fn vouch(
    holdings: &Holdings,
    keys: &[Key],
) -> Result<Vec<Option<Vouched>>, StoreError> {
    let mut vouched = Vec::with_capacity(keys.len());
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
        vouched.push(live.map(|held| Vouched {
            version: held.version,
            lease_secs: holdings.lease_left(&held),
            publisher: held.owner.publisher,
            ip: held.owner.ip,
            holder,
        }));
    }
    Ok(vouched)
}

/// What a node, which may be this one, says of blocks; `None` if it does not answer.
pub(crate) async fn ask(
    holdings: &Holdings,
    node: &Node,
    keys: Vec<Key>,
) -> Option<Vec<Option<Vouched>>> {
    if holdings.is_me(node) {
        return vouch(holdings, &keys).await.ok();
    }
    let (reply, _) = holdings.call(node, &Vouch { keys }, Vec::new()).await.ok()?;
    Some(reply.vouched.0)
}
