//! `READ` and `WATCH`: the version of a mutable block that is here, now and when it changes.

use std::sync::Arc;

use atoll_env::sleep;
use atoll_key::Key;
use atoll_net::{Peer, Refusal};
use bytes::Bytes;
use futures_util::future::{Either, select};

use super::Handle;
use crate::diversion::{Diversion, follow};
use crate::holdings::Holdings;
use crate::placement::own_set_tag;
use crate::rpc::{Answered, Block, Read, ReadReply, Stamp, WATCH_WAIT, Watch, WatchReply};
use crate::server::Server;

impl Handle<Read> for Arc<Server> {
    async fn handle(
        &self,
        _: Peer,
        Read { key, with_bytes }: Read,
        _: Vec<Bytes>,
    ) -> Result<Answered<Read>, Refusal> {
        Ok(read(self, key, with_bytes).await)
    }
}

/// What this node says of a mutable block.
pub(crate) async fn read(
    diversion: &Diversion,
    key: Key,
    with_bytes: bool,
) -> (ReadReply, Vec<Bytes>) {
    let mut reply = ReadReply { set: own_set_tag(diversion, &key), ..ReadReply::default() };
    if diversion.pending.denies(&key) {
        return (reply, Vec::new());
    }
    let pointed = diversion.pointers.pointed(&key).map(|info| info.version);
    // The newer version of a block may be one that another node keeps.
    let here = diversion.read(&key).await;
    let here = here.filter(|held| pointed.is_none_or(|pointed| pointed <= held.info.version));
    let held = match here {
        Some(held) => Some(Block { header: diversion.header_of(&held.info), bytes: held.bytes }),
        None => follow::own(diversion, &key).await,
    };
    let verify = |block: Block| {
        let version = block.header.kind.verify(&key, &block.bytes).ok()?;
        Some((Stamp::of(version, &block.bytes), block))
    };
    let Some((stamp, block)) = held.and_then(verify) else { return (reply, Vec::new()) };
    reply.held = Some(stamp);
    if !with_bytes {
        return (reply, Vec::new());
    }
    diversion.counters.count_served([&block.bytes]);
    reply.block = Some(block.header);
    (reply, vec![block.bytes])
}

impl Handle<Watch> for Arc<Server> {
    async fn handle(
        &self,
        from: Peer,
        Watch { key, seen }: Watch,
        _: Vec<Bytes>,
    ) -> Result<Answered<Watch>, Refusal> {
        let version = newer(self, from, key, seen).await?;
        Ok((WatchReply { version }, Vec::new()))
    }
}

/// The version of a mutable block that is here once it is above `seen`; `None` if it is not for a
/// while.
///
/// # Errors
/// If too much is watched already.
pub(crate) async fn newer(
    holdings: &Holdings,
    from: Peer,
    key: Key,
    seen: u64,
) -> Result<Option<u64>, Refusal> {
    let own = holdings.transport.local().id;
    let too_many = || Refusal::new(Refusal::OVERLOADED, "too many blocks are watched here");
    let watching = holdings.watches.watch(from.id, key, from.id == own).ok_or_else(too_many)?;
    let mut pause = sleep(&*holdings.env, WATCH_WAIT);
    loop {
        let held = holdings.known(&key).map(|info| info.version);
        if held.is_some_and(|version| version > seen) {
            return Ok(held);
        }
        let changed = Box::pin(watching.changed());
        match select(changed, pause).await {
            Either::Left((_, rest)) => pause = rest,
            Either::Right(_) => return Ok(None),
        }
    }
}
