//! `LOOKUP_STEP`: the block, or where to ask next (CFS Figure 5, server side).

use std::sync::Arc;

use atoll_net::{Peer, Refusal};
use atoll_overlay::Route;
use bytes::Bytes;

use super::Handle;
use crate::cache;
use crate::rpc::{Answered, LookupReply, LookupStep};
use crate::server::Server;

impl Handle<LookupStep> for Arc<Server> {
    async fn handle(
        &self,
        _: Peer,
        step: LookupStep,
        _: Vec<Bytes>,
    ) -> Result<Answered<LookupStep>, Refusal> {
        let LookupStep { key, as_root, may_be_cached } = step;
        if let Some(block) = self.read(&key).await.filter(|_| !self.pending.denies(&key)) {
            self.counters.count_served([&block.bytes]);
            return Ok((LookupReply::Found(self.header_of(&block.info)), vec![block.bytes]));
        }
        if let Some(holder) = self.pointers.holder(&key).await {
            return Ok((LookupReply::There(holder), Vec::new()));
        }
        // A caller that asks a root or a replica asks for what is stored, and must learn if it
        // is not.
        let may_be_cached = may_be_cached && !as_root && !self.pending.denies(&key);
        if may_be_cached && let Some((found, bytes)) = cache::serve(&self.cache, &key) {
            self.counters.count_served([&bytes]);
            return Ok((found, vec![bytes]));
        }
        let answer = match self.overlay.route(&key, as_root) {
            Route::Root(nodes) if self.is_me(&nodes[0]) => LookupReply::Absent(nodes[1..].to_vec()),
            route if may_be_cached && cache::wants(&self.cache, &key) => LookupReply::Wanted(route),
            route => LookupReply::Route(route),
        };
        Ok((answer, Vec::new()))
    }
}
