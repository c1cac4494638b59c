//! The path cache: which nodes keep a cached copy of a block, and which requests a copy may answer
//! (CFS §5.2, Figure 5).
//!
//! The path of a lookup is the node that fetches, the servers that gave it directions, and
//! the server that had the block. The second-to-last of them gets a copy: a server, if
//! there were directions from one, and otherwise the fetching node itself, which keeps what
//! it fetches in any case if it is asked for often enough here. As every further lookup
//! ends at such a copy and puts one a step farther from the root, there are as many copies
//! as the block is popular.
//!
//! A server says in its answer whether it would take a copy, and gets none otherwise: what
//! is fetched once and never again is not sent about.
//!
//! Only blocks that never change are cached: a copy of a signed block could be an old version.

mod lru;
mod popularity;
pub(crate) mod promised;

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_key::{InvalidBlock, Key};
use atoll_net::Peer;
use atoll_overlay::Node;
use atoll_overlay::walk::{Said, Trace};
use bytes::Bytes;

use crate::config::{CacheAt, MAX_LEASE};
use crate::context::layer_above;
use crate::rpc::{Background, Block, BlockHeader, CacheCopy, LookupReply, Rpc};
use crate::stats::add;
use lru::{Cache, Cached};

/// Copies on their way to others' caches at once. A guess.
const MAX_SENDING: usize = 16;

/// A node's cache, and copies on their way to the caches of others.
pub(crate) struct PathCache {
    rpc: Arc<Rpc>,
    cache: Mutex<Cache>,
    /// Copies on their way.
    sending: Background,
}
layer_above!(PathCache, rpc: Arc<Rpc>);

impl PathCache {
    pub(crate) fn new(rpc: Arc<Rpc>) -> PathCache {
        let config = &rpc.config;
        let cache = Cache::new(config.cache_bytes, config.cache_asks, rpc.random_bytes());
        PathCache { rpc, cache: Mutex::new(cache), sending: Background::new(MAX_SENDING) }
    }

    /// Whether this node takes part in caching.
    pub(crate) fn is_on(&self) -> bool {
        self.config.cache_at != CacheAt::Off && self.lock().limit_bytes() > 0
    }

    /// Bytes and blocks in the cache, and how many blocks have left it for others.
    pub(crate) fn usage(&self) -> (u64, u64, u64) {
        self.lock().usage()
    }

    /// Changes how much the cache may take.
    pub(crate) fn set_limit(&self, limit_bytes: u64) {
        self.lock().set_limit(limit_bytes);
    }

    fn lock(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().expect("no holder of this lock panics")
    }
}

/// A cached copy of `key`, which is asked for and not stored here.
pub(crate) fn own(cache: &PathCache, key: &Key) -> Option<Cached> {
    if !cache.is_on() {
        return None;
    }
    let now = cache.env.now();
    let found = {
        let mut held = cache.lock();
        held.asked(key);
        held.get(key, now)
    };
    let counter =
        if found.is_some() { &cache.counters.cache_hits } else { &cache.counters.cache_misses };
    add(counter, 1);
    found
}

/// The answer from the cache to a peer that asks for a block which is not stored here, with
/// the block.
pub(crate) fn serve(cache: &PathCache, key: &Key) -> Option<(LookupReply, Bytes)> {
    let block = own(cache, key)?;
    let now = cache.env.now();
    let header =
        BlockHeader { key: *key, kind: block.kind, lease_secs: block.until.since(now).as_secs() };
    Some((LookupReply::Cached(header), block.bytes))
}

/// Whether this node would cache `key`.
pub(crate) fn wants(cache: &PathCache, key: &Key) -> bool {
    cache.is_on() && cache.lock().wants(key)
}

/// A verified block in the form of the cache.
fn to_cache(cache: &PathCache, block: &Block) -> Cached {
    let lease_secs = block.header.lease_secs.min(MAX_LEASE.as_secs());
    let until = cache.env.now() + Duration::from_secs(lease_secs);
    Cached { kind: block.header.kind, bytes: block.bytes.clone(), until }
}

/// Keeps a block that this node fetched and verified.
pub(crate) fn keep_own(cache: &PathCache, block: &Block) {
    if cache.is_on() && !block.is_mutable() {
        cache.lock().put(block.header.key, to_cache(cache, block));
    }
}

/// Sends a fetched content block to the caches that should have it.
pub(crate) fn spread(cache: &Arc<PathCache>, block: &Block, trace: &Trace, wanted: &[Node]) {
    if block.is_mutable() {
        return;
    }
    for node in receivers(cache.config.cache_at, trace, wanted) {
        cache.sending.run(&cache.env, send(cache.clone(), node, block.clone()));
    }
}

/// The servers that get a copy after a lookup with this trace, of those that want one.
fn receivers(cache_at: CacheAt, trace: &Trace, wanted: &[Node]) -> Vec<Node> {
    let directed = |said: &Said| matches!(said, Said::Closer(_) | Said::Root(_));
    let mut servers = trace.0.iter().filter(|asked| !asked.local && directed(&asked.said));
    let willing = |node: &Node| wanted.iter().any(|w| w.peer.id == node.peer.id);
    match cache_at {
        CacheAt::Off => Vec::new(),
        CacheAt::SecondToLast => {
            servers.next_back().map(|asked| asked.node).into_iter().filter(willing).collect()
        }
        CacheAt::WholePath => servers.map(|asked| asked.node).filter(willing).collect(),
    }
}

async fn send(cache: Arc<PathCache>, to: Node, block: Block) {
    add(&cache.counters.cache_sent, 1);
    let copy = CacheCopy { block: block.header };
    if let Err(error) = cache.call(&to, &copy, vec![block.bytes]).await {
        tracing::debug!(?to, %error, "a copy could not be sent to a cache");
    }
}

/// Takes a copy that a peer sends, if it is wanted, its sender has not sent too much, and
/// it is what its key says.
///
/// # Errors
/// If it is not what its key says.
pub(crate) fn take(cache: &PathCache, from: &Peer, block: &Block) -> Result<bool, InvalidBlock> {
    let (key, bytes) = (block.header.key, &block.bytes);
    let is_welcome = cache.is_on() && !block.is_mutable() && {
        let (mut held, len_bytes) = (cache.lock(), bytes.len() as u64);
        held.wants(&key) && held.may_send(from.id, len_bytes, cache.env.now())
    };
    let taken = is_welcome && matches!(cache.store.info(&key), Ok(None)) && {
        block.header.kind.verify(&key, bytes)?;
        cache.lock().put(key, to_cache(cache, block))
    };
    if !taken {
        add(&cache.counters.cache_refused, 1);
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use atoll_overlay::walk::Asked;

    use super::*;

    fn node(n: u8) -> Node {
        let addr = "127.0.0.1:1".parse().expect("an address");
        Node::of(Peer { id: atoll_key::PeerId([n; 32]), addr })
    }

    fn asked(n: u8, said: Said) -> Asked {
        Asked { node: node(n), as_root: said == Said::Done, local: n == 0, said }
    }

    #[test]
    fn the_second_to_last_server_gets_the_copy_if_it_wants_one() {
        let path = Trace(vec![
            asked(1, Said::Closer(3)),
            asked(2, Said::Root(node(3))),
            asked(3, Said::Absent),
            asked(4, Said::Done),
        ]);
        let all = [node(1), node(2), node(3)];
        assert_eq!(receivers(CacheAt::SecondToLast, &path, &all), [node(2)]);
        assert_eq!(receivers(CacheAt::SecondToLast, &path, &all[..1]), []);
        assert_eq!(receivers(CacheAt::WholePath, &path, &all), [node(1), node(2)]);
        assert_eq!(receivers(CacheAt::Off, &path, &all), []);
    }

    #[test]
    fn after_one_hop_the_second_to_last_is_the_fetching_node_itself() {
        let path = Trace(vec![asked(0, Said::Absent), asked(4, Said::Done)]);
        assert_eq!(receivers(CacheAt::SecondToLast, &path, &[node(0)]), []);
    }
}
