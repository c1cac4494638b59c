//! `HOLDINGS`: which blocks this node holds and whom it charges them to, and what it keeps for a
//! member of a replica set that has no room (PAST §3.3).

use std::sync::Arc;

use atoll_key::Key;
use atoll_net::{Peer, Refusal};
use atoll_overlay::Node;
use atoll_store::{BlockInfo, StoreError};
use bytes::Bytes;

use super::Handle;
use super::divert::{held, hold_until};
use crate::diversion::{holds_left, is_held_for_others, spare_bytes_for};
use crate::holdings::copies::held_copies;
use crate::placement::{MAX_SETS, by_root, is_member};
use crate::rpc::{Answered, AskHoldings, HeldCopy, HoldingsReply, Pointing};
use crate::server::Server;

impl Handle<AskHoldings> for Arc<Server> {
    async fn handle(
        &self,
        from: Peer,
        asked: AskHoldings,
        _: Vec<Bytes>,
    ) -> Result<Answered<AskHoldings>, Refusal> {
        let AskHoldings { keys, pointing } = asked;
        let held = match pointing {
            Pointing::No => held_copies(self, &keys).await,
            Pointing::Yes => keep(self, &from, &keys).await,
            Pointing::NoLonger => {
                let count = keys.len();
                release(self, &from, keys).await;
                Ok(vec![None; count])
            }
        };
        let held = held.map_err(|e| Refusal::new(Refusal::INTERNAL, e.to_string()))?;
        let spare_bytes = spare_bytes_for(self, &from.id);
        Ok((HoldingsReply { held: held.into(), spare_bytes }, Vec::new()))
    }
}

/// What is kept here for `from`, which points here for `keys`; it is kept on.
async fn keep(
    server: &Server,
    from: &Peer,
    keys: &[Key],
) -> Result<Vec<Option<HeldCopy>>, StoreError> {
    let mut answers = vec![None; keys.len()];
    let (until, mut forgotten) = (hold_until(server), Vec::new());
    for (place, key) in keys.iter().enumerate() {
        let Some(info) = held(server, key) else { continue };
        // A member of the replica set keeps its own copy and no other node's.
        if is_member(server, key) || server.pending.denies(key) {
            continue;
        }
        if server.pointers.extend_hold(key, &from.id, until) {
            answers[place] = Some(HeldCopy::of(server, &info, None));
        } else if !is_held_for_others(server, key) {
            // It was forgotten here.
            forgotten.push((place, info));
        }
    }
    let again = held_again(server, from, forgotten).await;
    for (place, info) in &again {
        answers[*place] = Some(HeldCopy::of(server, info, None));
    }
    server.pointers.hold(from, again.into_iter().map(|(_, info)| info), until).await?;
    Ok(answers)
}

/// Ends what is kept for `from`.
async fn release(server: &Server, from: &Peer, keys: Vec<Key>) {
    let is_kept = |key: &Key| server.pointers.is_held_for(key, &from.id);
    let gone: Vec<Key> = keys.into_iter().filter(is_kept).collect();
    server.handoff.hasten(&gone, server.env.now());
    server.pointers.forget(gone).await;
}

/// Of blocks that a peer says it points here for, and no hold of it is noted for, those that are
/// held for it again: as far as it belongs to their replica sets, and within its share. Otherwise
/// any peer could keep strays here for ever.
async fn held_again(
    server: &Server,
    from: &Peer,
    forgotten: Vec<(usize, BlockInfo)>,
) -> Vec<(usize, BlockInfo)> {
    let left = usize::try_from(holds_left(server, &from.id)).unwrap_or(usize::MAX);
    let replicas = server.config.replicas;
    let sets = by_root(server, forgotten, |(_, info)| info.key, replicas, MAX_SETS).await;
    let is_member = |set: &[Node]| set.iter().any(|node| node.peer.id == from.id);
    let its = sets.into_iter().filter(|(set, _)| is_member(set));
    its.flat_map(|(_, blocks)| blocks).take(left).collect()
}
