//! `CACHE`: a copy for this node's cache (CFS §5.2).

use std::sync::Arc;

use atoll_net::{Peer, Refusal};
use bytes::Bytes;

use super::Handle;
use crate::cache;
use crate::rpc::{Answered, Block, CacheCopy, CacheReply, malformed};
use crate::server::Server;

impl Handle<CacheCopy> for Arc<Server> {
    async fn handle(
        &self,
        from: Peer,
        copy: CacheCopy,
        parts: Vec<Bytes>,
    ) -> Result<Answered<CacheCopy>, Refusal> {
        let bytes = parts.into_iter().next().expect("the table says that it has one part");
        let block = Block { header: copy.block, bytes };
        let taken = cache::take(&self.cache, &from, &block).map_err(|error| {
            tracing::warn!(key = %block.header.key, %from, %error, "dropped a bad block");
            self.counters.mark(from.id);
            malformed(format_args!("a bad block: {error}"))
        })?;
        Ok((CacheReply { taken }, Vec::new()))
    }
}
