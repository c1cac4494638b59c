//! `CONFIRM` and `ROOM`: which publisher is charged for blocks, and whether there is room for more
//! (CFS §5.4).

use std::sync::Arc;

use atoll_net::{Peer, Refusal};
use atoll_store::Owner;
use bytes::Bytes;

use super::Handle;
use crate::accounting::quota::{ChargeClass, Want};
use crate::rpc::{Answered, AskRoom, AskRoomReply, Confirm, ConfirmReply};
use crate::server::Server;

/// Whether this node made a receipt.
impl Handle<Confirm> for Arc<Server> {
    async fn handle(
        &self,
        _: Peer,
        asked: Confirm,
        _: Vec<Bytes>,
    ) -> Result<Answered<Confirm>, Refusal> {
        let is_mine = self.confirmations.is_mine(&asked.digest);
        Ok((ConfirmReply { nonce: asked.nonce, is_mine }, Vec::new()))
    }
}

/// Whether a publisher may put more.
impl Handle<AskRoom> for Arc<Server> {
    async fn handle(
        &self,
        _: Peer,
        asked: AskRoom,
        _: Vec<Bytes>,
    ) -> Result<Answered<AskRoom>, Refusal> {
        let AskRoom { publisher, ip, bytes, is_root } = asked;
        let class = if is_root { ChargeClass::Root } else { ChargeClass::Content };
        let want = Want { owner: Owner { publisher, ip }, bytes, class };
        let checked = self.quota.check(&*self.store, self.overlay.estimated_peers(), &want);
        Ok((AskRoomReply { over: checked.err() }, Vec::new()))
    }
}
