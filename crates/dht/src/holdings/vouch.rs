//! What nodes say of the blocks they hold: version, lease, whom they charge them to, and which
//! other node keeps them.

use atoll_key::Key;
use atoll_overlay::Node;
use atoll_store::StoreError;

use crate::inner::Inner;
use crate::rpc::{Vouch, Vouched};

/// What this node says of blocks.
///
/// # Errors
/// If the store fails.
pub(crate) async fn vouch(inner: &Inner, keys: &[Key]) -> Result<Vec<Option<Vouched>>, StoreError> {
    let mut vouched = Vec::with_capacity(keys.len());
    for key in keys {
        let here = inner.store.info(key)?;
        let records = &inner.diversion.records;
        let pointed = if here.is_none() { records.pointed(key) } else { None };
        let holder = match pointed {
            Some(_) => records.holder(key).await.map(|holder| holder.id.0),
            None => None,
        };
        let held = here.or(pointed);
        let live = held.filter(|held| inner.lease_left(held) > 0 && !inner.leaving.denies(key));
        vouched.push(live.map(|held| Vouched {
            version: held.version,
            lease_secs: inner.lease_left(&held),
            publisher: held.owner.publisher,
            ip: held.owner.ip,
            holder,
        }));
    }
    Ok(vouched)
}

/// What a node, which may be this one, says of blocks; `None` if it does not answer.
pub(crate) async fn ask(
    inner: &Inner,
    node: &Node,
    keys: Vec<Key>,
) -> Option<Vec<Option<Vouched>>> {
    if inner.is_me(node) {
        return vouch(inner, &keys).await.ok();
    }
    let (reply, _) = inner.call(node, &Vouch { keys }, Vec::new()).await.ok()?;
    Some(reply.vouched.0)
}
