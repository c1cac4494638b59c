//! `READ`, `WATCH` and `CHANGED`: the version of a mutable block that is here, and when it changes.

use std::sync::Arc;

use atoll_env::sleep;
use atoll_net::{Peer, Refusal};
use bytes::Bytes;
use futures_util::future::{Either, select};

use super::Handle;
use crate::diversion::follow;
use crate::placement::own_set_tag;
use crate::rpc::{
    Answered, Block, Changed, ChangedReply, Read, ReadReply, Stamp, WATCH_WAIT, Watch, WatchReply,
    whole_ms,
};
use crate::server::Server;

impl Handle<Read> for Arc<Server> {
    async fn handle(
        &self,
        from: Peer,
        Read { key, with_bytes, promise }: Read,
        _: Vec<Bytes>,
    ) -> Result<Answered<Read>, Refusal> {
        // Before what is held is looked at: no change is missed.
        let promised = promise.and_then(|number| self.promise(key, from, number));
        let mut reply = ReadReply { set: own_set_tag(self, &key), ..ReadReply::default() };
        if self.pending.denies(&key) {
            return Ok((reply, Vec::new()));
        }
        let pointed = self.pointers.pointed(&key).map(|info| info.version);
        // The newer version of a block may be one that another node keeps.
        let here = self.read(&key).await;
        let here = here.filter(|held| pointed.is_none_or(|pointed| pointed <= held.info.version));
        let held = match here {
            Some(held) => Some(Block { header: self.header_of(&held.info), bytes: held.bytes }),
            None => follow::own(self, &key).await,
        };
        let verify = |block: Block| {
            let version = block.header.kind.verify(&key, &block.bytes).ok()?;
            Some((Stamp::of(version, &block.bytes), block))
        };
        let found = held.and_then(verify);
        reply.promised_ms = match promised {
            Some(lasts) if self.lease_journal.written().await.is_ok() => Some(whole_ms(lasts)),
            _ => None,
        };
        let Some((stamp, block)) = found else { return Ok((reply, Vec::new())) };
        reply.held = Some(stamp);
        if !with_bytes {
            return Ok((reply, Vec::new()));
        }
        self.counters.count_served([&block.bytes]);
        reply.block = Some(block.header);
        Ok((reply, vec![block.bytes]))
    }
}

impl Handle<Changed> for Arc<Server> {
    async fn handle(
        &self,
        _: Peer,
        Changed { key }: Changed,
        _: Vec<Bytes>,
    ) -> Result<Answered<Changed>, Refusal> {
        self.promised.changed(&key);
        Ok((ChangedReply {}, Vec::new()))
    }
}

impl Handle<Watch> for Arc<Server> {
    async fn handle(
        &self,
        from: Peer,
        Watch { key, seen }: Watch,
        _: Vec<Bytes>,
    ) -> Result<Answered<Watch>, Refusal> {
        let own = self.transport.local().id;
        let too_many = || Refusal::new(Refusal::OVERLOADED, "too many blocks are watched here");
        let watching = self.watches.watch(from.id, key, from.id == own).ok_or_else(too_many)?;
        let mut pause = sleep(&*self.env, WATCH_WAIT);
        let version = loop {
            let held = self.known(&key).filter(|info| info.kind.is_news(info.version, seen));
            if let Some(held) = held {
                break Some(held.version);
            }
            let changed = Box::pin(watching.changed());
            match select(changed, pause).await {
                Either::Left((_, rest)) => pause = rest,
                Either::Right(_) => break None,
            }
        };
        Ok((WatchReply { version }, Vec::new()))
    }
}
