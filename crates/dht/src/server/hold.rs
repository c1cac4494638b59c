//! `HOLD`: what this node keeps for a member of a replica set that has no room (PAST §3.3).

use std::sync::Arc;

use atoll_key::Key;
use atoll_net::{Peer, Refusal};
use atoll_overlay::Node;
use atoll_store::BlockInfo;
use bytes::Bytes;

use super::Handle;
use super::divert::{held, hold_until, vouched};
use crate::diversion::{MAX_SETS, holds_left, is_held_for_others, spare_bytes_for};
use crate::placement::{by_root, is_member};
use crate::rpc::{Answered, Hold, HoldReply, Vouched};
use crate::server::Server;

impl Handle<Hold> for Arc<Server> {
    async fn handle(
        &self,
        from: Peer,
        hold: Hold,
        _: Vec<Bytes>,
    ) -> Result<Answered<Hold>, Refusal> {
        let Hold { keys, keep } = hold;
        let records = &self.pointers;
        let mut answers: Vec<Option<Vouched>> = vec![None; keys.len()];
        if keep {
            let (until, mut forgotten) = (hold_until(self), Vec::new());
            for (place, key) in keys.iter().enumerate() {
                let info = held(self, key);
                // A member of the replica set keeps its own copy and no other node's.
                if info.is_none() || is_member(self, key) || self.pending.denies(key) {
                    continue;
                }
                if !records.extend_hold(key, &from.id, until) {
                    // It was forgotten here, or the copy is kept for another member.
                    if !is_held_for_others(self, key) {
                        forgotten.extend(info.map(|info| (place, info)));
                    }
                    continue;
                }
                answers[place] = info.map(|info| vouched(self, &info));
            }
            let again = held_again(self, &from, forgotten).await;
            for (place, info) in &again {
                answers[*place] = Some(vouched(self, info));
            }
            let noted = records.hold(&from, again.into_iter().map(|(_, info)| info), until).await;
            noted.map_err(|error| Refusal::new(Refusal::INTERNAL, error.to_string()))?;
        } else {
            let gone: Vec<Key> =
                keys.into_iter().filter(|key| records.is_held_for(key, &from.id)).collect();
            self.hasten_handoff(&gone);
            records.forget(gone).await;
        }
        let spare_bytes = spare_bytes_for(self, &from.id);
        Ok((HoldReply { held: answers.into(), spare_bytes }, Vec::new()))
    }
}

/// Of blocks that a peer says it points here for, and no hold of it is noted for, those that are
/// held for it again: as far as it belongs to their replica sets, and within its share. Otherwise
/// anybody could keep strays here for ever.
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
