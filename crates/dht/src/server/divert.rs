//! `DIVERT`: keeping copies for members of replica sets that have no room.
//!
//! A holder admits a diverted copy as it admits any: charged to the publisher whose receipt came
//! with it, or to whom the replica set vouches for, or to the member that brings it. It takes none
//! that it holds already or should hold itself, for then the block would have a copy less than
//! its members count. And one member can fill no more than a quarter of a node so.

use std::sync::Arc;

use atoll_key::Key;
use atoll_net::{Peer, Refusal};
use atoll_store::{BlockInfo, StoreError};
use bytes::Bytes;

use super::Handle;
use crate::accounting::admission::{Admitted, Origin, admit, answers};
use crate::accounting::quota::cost_bytes;
use crate::diversion::{has_room, holds_left, spare_bytes_for};
use crate::placement::is_member;
use crate::replication::store::{Overflow, store_admitted};
use crate::rpc::{Answered, Block, Divert, DivertReply, Diverted, HeldCopy, PutStatus, to_blocks};
use crate::server::Server;

/// A hold ends when its member has not asked for the copy for so long: then it has forgotten its
/// pointer, or is gone. A guess; members ask several times a day.
const HOLD_SECS: u64 = 24 * 3600;

impl Handle<Divert> for Arc<Server> {
    async fn handle(
        &self,
        from: Peer,
        divert: Divert,
        parts: Vec<Bytes>,
    ) -> Result<Answered<Divert>, Refusal> {
        let blocks = to_blocks(divert.blocks, parts);
        let keys: Vec<Key> = blocks.iter().map(|block| block.header.key).collect();
        let origin = match Origin::of(self, &from, divert.receipt, &keys).await? {
            Origin::Carrier => Origin::Diverted,
            publisher => publisher,
        };
        let taking = self.take(keys.iter().copied());
        let mut refused = refusals(self, &from, &blocks);
        for (key, refused) in keys.iter().zip(&mut refused) {
            if !taking.keys.contains(key) {
                *refused = Some(PutStatus::NotRoot);
            }
        }
        let some = blocks.into_iter().zip(&refused).filter(|(_, refused)| refused.is_none());
        let some = some.map(|(block, _)| block).collect();
        let Admitted { sound, refused: over, room } = admit(self, &from, &origin, some).await?;
        let stored = store_admitted(self, &origin, &sound, room, Overflow::Refused).await;
        let kept = |key, status: PutStatus| match status {
            PutStatus::Stored { .. } => held(self, key),
            _ => None,
        };
        let statuses = answers(refused, answers(over, stored));
        let answers: Vec<(PutStatus, Option<BlockInfo>)> =
            keys.iter().zip(statuses).map(|(key, status)| (status, kept(key, status))).collect();
        let infos = answers.iter().filter_map(|(_, info)| *info);
        let noted = self.pointers.hold(&from, infos, hold_until(self)).await;
        noted.map_err(|error| Refusal::new(Refusal::INTERNAL, error.to_string()))?;
        drop(taking);
        let blocks: Vec<Diverted> = answers
            .into_iter()
            .map(|(status, info)| Diverted {
                status,
                held: info.map(|info| HeldCopy::of(self, &info, None)),
            })
            .collect();
        let spare_bytes = spare_bytes_for(self, &from.id);
        Ok((DivertReply { blocks: blocks.into(), spare_bytes }, Vec::new()))
    }
}

/// Which of a member's blocks this node may not keep for it, and why.
fn refusals(server: &Server, from: &Peer, blocks: &[Block]) -> Vec<Option<PutStatus>> {
    let mut spare_bytes = spare_bytes_for(server, &from.id);
    let mut left = holds_left(server, &from.id);
    let refusal = |block: &Block| {
        let key = &block.header.key;
        let is_replaced = server.pointers.is_held_for(key, &from.id);
        if !is_replaced && (server.known(key).is_some() || is_member(server, key)) {
            return Some(PutStatus::NotRoot);
        }
        let is_there = is_replaced && held(server, key).is_some_and(|held| !held.kind.is_mutable());
        if is_there {
            return None;
        }
        if left == 0 || !has_room(spare_bytes, block.bytes.len()) {
            return Some(PutStatus::Full);
        }
        left -= 1;
        spare_bytes -= cost_bytes(u32::try_from(block.bytes.len()).unwrap_or(u32::MAX));
        None
    };
    blocks.iter().map(refusal).collect()
}

pub(super) fn held(server: &Server, key: &Key) -> Option<BlockInfo> {
    let error = |error: StoreError| tracing::warn!(%error, "a block could not be looked up");
    server.store.info(key).map_err(error).ok().flatten()
}

pub(super) fn hold_until(server: &Server) -> u64 {
    server.expiry(HOLD_SECS)
}
