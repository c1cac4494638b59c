//! What every part of a node's block layer works with: the layers below it, the configuration,
//! the clock of leases, and the counters.

use std::sync::Arc;

use atoll_env::Env;
use atoll_key::PeerId;
use atoll_net::Transport;
use atoll_overlay::{Node, Overlay};
use atoll_store::{BlockInfo, BlockStore};

use crate::config::{DhtConfig, MAX_LEASE};
use crate::durable::DurableState;
use crate::expected_replicas::ExpectedReplicas;
use crate::lease_clock::LeaseClock;
use crate::most_peers::MostPeers;
use crate::stats::Counters;

/// Blocks in one message stop at this many bytes (one block at least is sent).
pub(crate) const REPLY_BYTES: usize = 1 << 20;

/// See the module.
pub(crate) struct Context {
    pub env: Env,
    pub transport: Arc<dyn Transport>,
    pub overlay: Arc<dyn Overlay>,
    pub store: Arc<dyn BlockStore>,
    /// What survives a restart besides the blocks.
    pub durable: Arc<dyn DurableState>,
    pub config: DhtConfig,
    /// What leases are measured by.
    pub clock: LeaseClock,
    /// How many replicas a put must count on.
    pub expected: ExpectedReplicas,
    /// Whether this side of the network has most of its nodes.
    pub most_peers: MostPeers,
    pub counters: Counters,
}

impl Context {
    /// Whether `node` is one of this node's own virtual servers.
    pub(crate) fn is_me(&self, node: &Node) -> bool {
        node.peer.id == self.transport.local().id
    }

    /// Whether a peer is in this node's routing tables.
    pub(crate) fn is_known_peer(&self, peer: &PeerId) -> bool {
        self.overlay.known_nodes().iter().any(|node| node.peer.id == *peer)
    }

    /// 32 random bytes.
    pub(crate) fn random_bytes(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.env.random_u64().to_be_bytes());
        }
        bytes
    }

    /// What the lease clock says, seconds.
    pub(crate) fn lease_now(&self) -> u64 {
        self.clock.secs(self.env.now())
    }

    /// When a lease of `lease_secs` from now ends, by the lease clock.
    pub(crate) fn expiry(&self, lease_secs: u64) -> u64 {
        let lease_secs = lease_secs.min(MAX_LEASE.as_secs());
        self.lease_now().saturating_add(lease_secs)
    }

    /// How long the lease of a stored block still lasts, seconds; 0 if it has ended.
    pub(crate) fn lease_left(&self, info: &BlockInfo) -> u64 {
        info.expires_unix_secs.saturating_sub(self.lease_now())
    }
}

/// Makes a part of the block layer give access to the part below it: `$Upper` keeps that in its
/// field `$field`.
macro_rules! layer_above {
    ($Upper:ty, $field:ident: $Lower:ty) => {
        impl std::ops::Deref for $Upper {
            type Target = $Lower;

            fn deref(&self) -> &$Lower {
                &self.$field
            }
        }
    };
}
pub(crate) use layer_above;
