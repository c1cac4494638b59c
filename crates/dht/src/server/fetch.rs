//! `FETCH`: blocks by key, as many as fit one message.

use std::sync::Arc;

use atoll_net::{Peer, Refusal};
use bytes::Bytes;

use super::Handle;
use crate::context::REPLY_BYTES;
use crate::rpc::{Answered, Fetch, FetchReply, There};
use crate::server::Server;

impl Handle<Fetch> for Arc<Server> {
    async fn handle(
        &self,
        _: Peer,
        request: Fetch,
        _: Vec<Bytes>,
    ) -> Result<Answered<Fetch>, Refusal> {
        let (mut headers, mut parts, mut total) = (Vec::new(), Vec::new(), 0);
        let mut there = Vec::new();
        for key in request.keys {
            match self.read(&key).await {
                _ if self.pending.denies(&key) => {}
                Some(block) if total > 0 && total + block.bytes.len() > REPLY_BYTES => break,
                Some(block) => {
                    total += block.bytes.len();
                    headers.push(self.header_of(&block.info));
                    parts.push(block.bytes);
                }
                None => {
                    let holder = self.pointers.holder(&key).await;
                    there.extend(holder.map(|holder| There { key, holder }));
                }
            }
        }
        self.counters.count_served(&parts);
        Ok((FetchReply { blocks: headers.into(), there: there.into() }, parts))
    }
}
