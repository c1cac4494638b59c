//! Peers met before, so that a node finds its ring again after a partition or restart.
//!
//! Bounded; when it is full, a newcomer replaces a random peer now and then, so that
//! during a long partition the far side is not forgotten at once.

use std::collections::BTreeMap;

use atoll_env::{Runtime, random_below};
use atoll_key::PeerId;
use atoll_net::Peer;

/// The most peers remembered.
pub const MAX_REMEMBERED: usize = 64;
/// When full, one newcomer in so many is taken. A guess.
const TAKE_ONE_IN: u64 = 16;

/// See the module.
pub struct RememberedPeers {
    me: PeerId,
    peers: BTreeMap<PeerId, Peer>,
}

impl RememberedPeers {
    /// Remembers nobody yet, and never `me`.
    pub fn new(me: Peer) -> RememberedPeers {
        RememberedPeers { me: me.id, peers: BTreeMap::new() }
    }

    /// Notes a peer and where it listens now.
    pub fn add(&mut self, peer: Peer, env: &dyn Runtime) {
        if peer.id == self.me {
            return;
        }
        if let Some(known) = self.peers.get_mut(&peer.id) {
            *known = peer;
            return;
        }
        if self.peers.len() >= MAX_REMEMBERED {
            if random_below(env, TAKE_ONE_IN) != 0 {
                return;
            }
            let nth = random_below(env, MAX_REMEMBERED as u64) as usize;
            let victim = *self.peers.keys().nth(nth).expect("the table is full");
            self.peers.remove(&victim);
        }
        self.peers.insert(peer.id, peer);
    }

    /// Forgets a peer that has left in good order.
    pub fn remove(&mut self, id: &PeerId) {
        self.peers.remove(id);
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = Peer> + '_ {
        self.peers.values().copied()
    }
}
