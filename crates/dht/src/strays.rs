//! Blocks that a node holds without belonging to their replica set any more (CFS §5.1).
//!
//! They are left over when a node joins before this one, when one of this node's virtual
//! servers leaves its position (§5.3), or by chance. They are given to their root, and
//! dropped once it says that a majority of the replica set has them and one of the set
//! bears it out; until then whoever asks here gets them.
//!
//! **Invariant:** a block that was put or renewed here while its handing over was under way
//! stays: whoever sent it counts on this node. [`Strays`] sees to that.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};

use atoll_env::random_below;
use atoll_key::{BlockKind, Key, KeyRange};
use atoll_net::Request;
use atoll_overlay::{Node, distinct_peers};
use atoll_store::BlockInfo;

use crate::exchange::{ExchangeError, give};
use crate::inner::Inner;
use crate::messages::{self, MAX_RENEW_KEYS, Renew, RenewReply, from_header, to_header};
use crate::reconcile::Item;
use crate::repair_state::Duties;

/// Keys put while strays are handed over that are remembered; after more, none is dropped.
const MAX_TOUCHED: usize = 16_384;

/// What is being handed over, and what came in meanwhile. One handing over at a time.
#[derive(Default)]
pub(crate) struct Strays {
    watch: Mutex<Option<Watch>>,
    /// Held while blocks are removed.
    gate: futures_util::lock::Mutex<()>,
}

struct Watch {
    range: KeyRange,
    touched: BTreeSet<Key>,
    removing: BTreeSet<Key>,
}

impl Strays {
    fn lock(&self) -> MutexGuard<'_, Option<Watch>> {
        self.watch.lock().expect("no holder of this lock panics")
    }

    /// Blocks with these keys are about to be stored or renewed here: they are strays no
    /// longer. Waits for a removal of them that has begun.
    pub async fn keep(&self, keys: impl Iterator<Item = &Key>) {
        let mut leaving = false;
        if let Some(watch) = self.lock().as_mut() {
            for key in keys.filter(|key| watch.range.contains(key)) {
                leaving |= watch.removing.contains(key);
                if watch.touched.len() <= MAX_TOUCHED {
                    watch.touched.insert(*key);
                }
            }
        }
        if leaving {
            drop(self.gate.lock().await);
        }
    }

    fn watch(&self, range: KeyRange) {
        let (touched, removing) = (BTreeSet::new(), BTreeSet::new());
        *self.lock() = Some(Watch { range, touched, removing });
    }

    /// Of `keys`, those that nobody has put since the watch began.
    fn untouched(&self, keys: Vec<Key>) -> Vec<Key> {
        let mut guard = self.lock();
        let Some(watch) = guard.as_mut().filter(|w| w.touched.len() <= MAX_TOUCHED) else {
            return Vec::new();
        };
        let untouched: Vec<Key> =
            keys.into_iter().filter(|key| !watch.touched.contains(key)).collect();
        watch.removing = untouched.iter().copied().collect();
        untouched
    }

    fn end(&self) {
        *self.lock() = None;
    }
}

/// Gives blocks this node should no longer hold to their roots, then drops them.
pub(crate) async fn hand_over_strays(inner: &Inner, duties: &Duties) -> Result<(), ExchangeError> {
    let scopes = &duties.scopes;
    if !duties.complete || scopes.is_empty() || scopes[0].range.is_full() {
        return Ok(());
    }
    for (i, scope) in scopes.iter().enumerate() {
        let next = &scopes[(i + 1) % scopes.len()];
        if scope.range.upto != next.range.after {
            let gap = KeyRange::new(scope.range.upto, next.range.after);
            let ended = hand_over_gap(inner, gap).await;
            inner.strays.end();
            ended?;
        }
    }
    Ok(())
}

/// Goes through the blocks held in a part of the ring where this node is no root.
async fn hand_over_gap(inner: &Inner, gap: KeyRange) -> Result<(), ExchangeError> {
    let mut cursor = gap.after;
    while cursor != gap.upto {
        let elsewhere = KeyRange::new(cursor, gap.upto);
        let Some(first) = inner.store.list(elsewhere, 1)?.first().copied() else {
            return Ok(());
        };
        let Ok(nodes) = inner.root_list(&first.key).await else { return Ok(()) };
        let Some(root) = nodes.first().copied() else { return Ok(()) };
        if inner.is_me(&root) || !elsewhere.contains(&root.id.0) {
            // The ring has changed under us: only the next round can tell.
            return Ok(());
        }
        let replica_set = distinct_peers(&nodes, inner.config.replicas);
        let full = replica_set.len() == inner.config.replicas;
        if full && !replica_set.iter().any(|node| inner.is_me(node)) {
            let others: Vec<Node> = replica_set.into_iter().skip(1).collect();
            hand_over(inner, &root, &others, KeyRange::new(cursor, root.id.0)).await?;
        }
        cursor = root.id.0;
    }
    Ok(())
}

/// Gives all blocks of `range` to their root and drops those it has, as far as one of the
/// others bears it out.
async fn hand_over(
    inner: &Inner,
    root: &Node,
    others: &[Node],
    range: KeyRange,
) -> Result<(), ExchangeError> {
    let mut todo = Some(range);
    while let Some(range) = todo {
        inner.strays.watch(range);
        let infos = inner.store.list(range, MAX_RENEW_KEYS)?;
        todo = match infos.last() {
            Some(last) if infos.len() == MAX_RENEW_KEYS && last.key != range.upto => {
                Some(KeyRange::new(last.key, range.upto))
            }
            _ => None,
        };
        let settled = settle_at(inner, root, &infos).await?;
        let settled = borne_out(inner, others, settled).await?;
        let gate = inner.strays.gate.lock().await;
        let settled = inner.strays.untouched(settled);
        if !settled.is_empty() {
            tracing::info!(count = settled.len(), ?root, "handed blocks over to their root");
            inner.store.remove(settled).await?;
        }
        drop(gate);
    }
    Ok(())
}

/// Gives the root what its replica set lacks; the blocks that a majority of it has then.
async fn settle_at(
    inner: &Inner,
    root: &Node,
    infos: &[BlockInfo],
) -> Result<Vec<Key>, ExchangeError> {
    let keys: Vec<_> = infos.iter().map(|info| info.key).collect();
    let count = keys.len();
    let header = to_header(&Renew { keys, lease_secs: 0, as_root: true, receipt: None });
    let request = Request { method: messages::RENEW, header, parts: Vec::new() };
    let held = from_header::<RenewReply>(&inner.call(root, request).await?.header)?.held;
    if held.len() != count {
        return Err(ExchangeError::IllFormed);
    }
    let now = inner.env.unix_ms() / 1000;
    let (mut settled, mut offered) = (Vec::new(), Vec::new());
    for (info, state) in infos.iter().zip(held) {
        // A signed block is always offered: the root may hold an older version.
        if state == 1 && info.kind == BlockKind::Content {
            settled.push(info.key);
        } else if info.expires_unix_secs > now {
            offered.push(Item { key: info.key, version: info.version });
        }
    }
    let outcome = give(inner, root, &offered, true).await?;
    if outcome.moved == offered.len() as u64 {
        settled.extend(offered.iter().map(|item| item.key));
    }
    Ok(settled)
}

/// Of the blocks that a root says its replica set has, those that one of the set, chosen
/// at random, holds too: a root that lies alone cannot have copies dropped. What is not
/// borne out is kept until the next round asks somebody else.
async fn borne_out(
    inner: &Inner,
    others: &[Node],
    keys: Vec<Key>,
) -> Result<Vec<Key>, ExchangeError> {
    if others.is_empty() || keys.is_empty() {
        return Ok(keys);
    }
    let witness = others[random_below(&*inner.env, others.len() as u64) as usize];
    let count = keys.len();
    let header =
        to_header(&Renew { keys: keys.clone(), lease_secs: 0, as_root: false, receipt: None });
    let request = Request { method: messages::RENEW, header, parts: Vec::new() };
    let held = from_header::<RenewReply>(&inner.call(&witness, request).await?.header)?.held;
    if held.len() != count {
        return Err(ExchangeError::IllFormed);
    }
    Ok(keys.into_iter().zip(held).filter(|(_, held)| *held == 1).map(|(key, _)| key).collect())
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn key(n: u8) -> Key {
        Key::hashed([n; 32])
    }

    #[test]
    fn what_is_put_during_a_handing_over_stays() {
        let strays = Strays::default();
        strays.keep([key(1)].iter()).now_or_never().expect("nothing is handed over");
        strays.watch(KeyRange::new(key(0), key(9)));
        strays.keep([key(2), key(20)].iter()).now_or_never().expect("nothing is removed yet");
        assert_eq!(strays.untouched(vec![key(1), key(2), key(3)]), [key(1), key(3)]);
    }

    #[test]
    fn a_put_waits_for_the_removal_of_the_same_block() {
        let strays = Strays::default();
        strays.watch(KeyRange::new(key(0), key(9)));
        let gate = strays.gate.lock().now_or_never().expect("free");
        strays.untouched(vec![key(1)]);
        assert!(strays.keep([key(2)].iter()).now_or_never().is_some());
        assert!(strays.keep([key(1)].iter()).now_or_never().is_none(), "put before the removal");
        drop(gate);
        assert!(strays.keep([key(1)].iter()).now_or_never().is_some());
    }

    #[test]
    fn nothing_is_dropped_when_too_much_came_in_to_remember() {
        let strays = Strays::default();
        strays.watch(KeyRange::full());
        let many: Vec<Key> = (0..=MAX_TOUCHED as u32)
            .map(|n| atoll_key::BlockHash::of(&n.to_be_bytes()).key())
            .collect();
        strays.keep(many.iter()).now_or_never().expect("nothing is removed yet");
        assert_eq!(strays.untouched(vec![key(1)]), []);
    }
}
