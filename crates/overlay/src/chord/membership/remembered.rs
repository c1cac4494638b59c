//! Remembered peers: a node finds its ring again after a partition or restart.
//!
//! Two rings merge when any node of one calls any node of the other. While a node is cut off it
//! must therefore not forget the nodes on the far side, however long that lasts and whatever other
//! nodes it meets. Of the [`MAX_REMEMBERED`] peers remembered, the [`MAX_ELDERS`] that were met
//! first are *elders*: an elder makes room for another peer only when [`GIVEN_UP`] calls in a row
//! have failed, which takes two years. The others are replaced at random, so that some have been
//! alive lately. Peers that the user named (`bootstrap`) are kept beside them as long as the node
//! runs.
//!
//! A peer that does not answer is called again after growing intervals, at most [`MAX_INTERVAL`]
//! apart.
//!
//! Plain data; time and randomness are arguments.

use std::collections::BTreeMap;
use std::time::Duration;

use atoll_env::{Instant, Runtime, jittered, random_below};
use atoll_key::PeerId;
use atoll_net::Peer;

/// The most peers remembered, besides those that the user named.
pub const MAX_REMEMBERED: usize = 64;
/// How many of them, the first ones met, are not displaced by others.
const MAX_ELDERS: usize = 32;
/// The most peer addresses that the user named.
const MAX_NAMED: usize = 64;
/// When all is full, one newcomer in so many is taken. A guess.
const TAKE_ONE_IN: u64 = 16;
/// The longest interval between two calls of a peer that does not answer: so long two small
/// rings that can reach each other again may stay apart. A guess.
const MAX_INTERVAL: Duration = Duration::from_secs(3600);
/// An elder may be forgotten after so many unanswered calls: two years of [`MAX_INTERVAL`].
const GIVEN_UP: u32 = 2 * 365 * 24;

/// A peer to be kept for the next start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RememberedPeer {
    /// Where it was found last.
    pub peer: Peer,
    /// So many calls in a row it has not answered.
    pub failures: u32,
}

/// A peer, and when it may be called again.
#[derive(Clone, Copy, Debug)]
struct Entry {
    peer: Peer,
    /// The order in which peers were met.
    met: u64,
    failures: u32,
    due: Instant,
}

impl Entry {
    fn failed(&mut self, base: Duration, env: &dyn Runtime) {
        self.failures = self.failures.saturating_add(1);
        let doublings = (self.failures - 1).min(16);
        let interval = base.saturating_mul(1 << doublings).min(MAX_INTERVAL);
        self.due = env.now() + jittered(env, interval);
    }
}

/// See the module.
pub(crate) struct RememberedPeers {
    me: PeerId,
    /// By key and address: that of a peer known at another address is a second way to it.
    named: Vec<Entry>,
    peers: BTreeMap<PeerId, Entry>,
    met: u64,
}

impl RememberedPeers {
    /// Without any peer; never remembers `me`.
    pub(crate) fn new(me: Peer) -> RememberedPeers {
        RememberedPeers { me: me.id, named: Vec::new(), peers: BTreeMap::new(), met: 0 }
    }

    /// Takes over a peer of an earlier run; they come in the order in which they were met.
    pub(crate) fn restore(&mut self, RememberedPeer { peer, failures }: RememberedPeer) {
        if peer.id != self.me && self.peers.len() < MAX_REMEMBERED {
            self.insert(peer, failures);
        }
    }

    /// Notes a peer address that the user named and that has not been checked.
    pub(crate) fn name(&mut self, peer: Peer) {
        let is_known = self.iter().any(|known| known == peer);
        if peer.id == self.me || is_known {
            return;
        }
        if self.named.len() >= MAX_NAMED {
            self.named.remove(0);
        }
        self.named.push(Entry { peer, met: 0, failures: 0, due: Instant::default() });
    }

    /// Notes a peer that was found where it listens now.
    pub(crate) fn met(&mut self, peer: Peer, env: &dyn Runtime) {
        if peer.id == self.me {
            return;
        }
        if let Some(known) = self.peers.get_mut(&peer.id) {
            (known.peer, known.failures) = (peer, 0);
            return;
        }
        if self.peers.len() >= MAX_REMEMBERED {
            let Some(victim) = self.victim(env) else { return };
            self.peers.remove(&victim);
        }
        self.insert(peer, 0);
    }

    fn insert(&mut self, peer: Peer, failures: u32) {
        let due = Instant::default();
        self.peers.insert(peer.id, Entry { peer, met: self.met, failures, due });
        self.met += 1;
    }

    /// The peer that makes room for another, if any does.
    fn victim(&self, env: &dyn Runtime) -> Option<PeerId> {
        let given_up = self.peers.values().find(|entry| entry.failures >= GIVEN_UP);
        if let Some(entry) = given_up {
            return Some(entry.peer.id);
        }
        if random_below(env, TAKE_ONE_IN) != 0 {
            return None;
        }
        let nth = random_below(env, (MAX_REMEMBERED - MAX_ELDERS) as u64) as usize;
        Some(self.by_age()[MAX_ELDERS + nth].peer.id)
    }

    /// A call to this peer address has not been answered. `base` is the interval after the first
    /// failure.
    pub(crate) fn failed(&mut self, peer: &Peer, base: Duration, env: &dyn Runtime) {
        let entries = self.named.iter_mut().chain(self.peers.values_mut());
        entries.filter(|entry| entry.peer == *peer).for_each(|entry| entry.failed(base, env));
    }

    /// This peer address has answered a call.
    pub(crate) fn answered(&mut self, peer: &Peer) {
        let entries = self.named.iter_mut().chain(self.peers.values_mut());
        entries.filter(|entry| entry.peer == *peer).for_each(|entry| entry.failures = 0);
    }

    /// One of those that `may_be` called now, at random; when `hurried`, whenever it was called
    /// last. Peer addresses that the user named, those that did not answer the last time and all
    /// others have their turns equally often, however many there are of each.
    pub(crate) fn choose(
        &self,
        may_be: impl Fn(&Peer) -> bool,
        hurried: bool,
        env: &dyn Runtime,
    ) -> Option<Peer> {
        let now = env.now();
        let is_ready = |entry: &&Entry| {
            may_be(&entry.peer) && (hurried || entry.failures == 0 || entry.due <= now)
        };
        let (silent, others): (Vec<&Entry>, Vec<&Entry>) =
            self.peers.values().filter(is_ready).partition(|entry| entry.failures > 0);
        let mut kinds = [self.named.iter().filter(is_ready).collect(), silent, others].to_vec();
        kinds.retain(|kind| !kind.is_empty());
        let kind = kinds.get(random_below(env, kinds.len().max(1) as u64) as usize)?;
        Some(kind[random_below(env, kind.len() as u64) as usize].peer)
    }

    /// Their addresses, and those that the user named.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Peer> + '_ {
        self.named.iter().chain(self.peers.values()).map(|entry| entry.peer)
    }

    /// The peers to keep for the next start: those met, in that order.
    pub(crate) fn kept(&self) -> Vec<RememberedPeer> {
        let kept = |entry: &Entry| RememberedPeer { peer: entry.peer, failures: entry.failures };
        self.by_age().iter().map(kept).collect()
    }

    fn by_age(&self) -> Vec<Entry> {
        let mut entries: Vec<Entry> = self.peers.values().copied().collect();
        entries.sort_unstable_by_key(|entry| entry.met);
        entries
    }
}

#[cfg(test)]
mod tests {
    use atoll_sim::{HostConfig, Sim, SimConfig};

    use super::*;

    const BASE: Duration = Duration::from_secs(20);

    fn peer(n: u16, last: u8) -> Peer {
        let mut id = [0; 32];
        id[..2].copy_from_slice(&n.to_be_bytes());
        Peer { id: PeerId(id), addr: ([10, 0, 0, last], 1).into() }
    }

    fn sim() -> (Sim, atoll_env::Env) {
        let sim = Sim::new(SimConfig { seed: 3, ..SimConfig::default() });
        let host = sim.add_host(HostConfig::default());
        let env = sim.env(host);
        (sim, env)
    }

    fn filled(env: &dyn Runtime) -> RememberedPeers {
        let mut peers = RememberedPeers::new(peer(0, 0));
        (1..=MAX_REMEMBERED as u16).for_each(|n| peers.met(peer(n, 1), env));
        peers
    }

    fn ids(peers: &RememberedPeers) -> Vec<PeerId> {
        peers.kept().iter().map(|kept| kept.peer.id).collect()
    }

    #[test]
    fn newcomers_displace_each_other_and_no_elder() {
        let (_sim, env) = sim();
        let mut peers = filled(&*env);
        let before = ids(&peers);
        for n in 0..10_000 {
            peers.met(peer(1000 + n, 1), &*env);
        }
        let after = ids(&peers);
        assert_eq!(after.len(), MAX_REMEMBERED);
        assert_eq!(after[..MAX_ELDERS], before[..MAX_ELDERS]);
        assert!(after[MAX_ELDERS..].iter().all(|id| !before.contains(id)));
    }

    #[test]
    fn an_elder_that_has_been_silent_for_years_makes_room() {
        let (_sim, env) = sim();
        let mut peers = filled(&*env);
        let silent = peer(7, 1);
        (1..GIVEN_UP).for_each(|_| peers.failed(&silent, BASE, &*env));
        (0..1000).for_each(|n| peers.met(peer(1000 + n, 1), &*env));
        assert!(ids(&peers).contains(&silent.id), "not yet");
        peers.failed(&silent, BASE, &*env);
        let mut restored = RememberedPeers::new(peer(0, 0));
        peers.kept().into_iter().for_each(|kept| restored.restore(kept));
        assert_eq!(restored.kept(), peers.kept(), "a restart forgets neither order nor failures");
        restored.met(peer(5000, 1), &*env);
        assert!(!ids(&restored).contains(&silent.id));
        assert_eq!(ids(&restored).last(), Some(&peer(5000, 1).id));
    }

    #[test]
    fn a_silent_peer_is_called_after_growing_intervals_up_to_a_bound() {
        let (sim, env) = sim();
        let mut peers = RememberedPeers::new(peer(0, 0));
        let silent = peer(1, 1);
        peers.met(silent, &*env);
        let mut waited = Vec::new();
        for _ in 0..12 {
            let began = sim.now();
            while peers.choose(|_| true, false, &*env).is_none() {
                sim.run_for(Duration::from_secs(1));
            }
            waited.push(sim.now().since(began).as_secs());
            peers.failed(&silent, BASE, &*env);
        }
        assert_eq!(waited[0], 0);
        assert!(waited[1] <= 30 && waited[4] > 60, "{waited:?}");
        assert!(waited[11] > 1800 && waited[11] < 2 * MAX_INTERVAL.as_secs(), "{waited:?}");
        assert_eq!(peers.choose(|_| true, true, &*env), Some(silent), "a node alone does not wait");
        peers.answered(&silent);
        assert_eq!(peers.choose(|_| true, false, &*env), Some(silent));
    }

    /// A node that has moved is known twice by its key: where it was, and where the user says.
    #[test]
    fn a_named_address_of_a_known_peer_is_tried_beside_the_known_one() {
        let (_sim, env) = sim();
        let mut peers = filled(&*env);
        let moved = peer(3, 9);
        peers.name(moved);
        peers.name(peer(4, 1));
        assert_eq!(peers.iter().count(), MAX_REMEMBERED + 1, "peer 4 is where it was");
        let named = (0..100).filter(|_| peers.choose(|_| true, true, &*env) == Some(moved));
        assert!(named.count() > 30, "it has its turn however many others there are");
        peers.met(moved, &*env);
        assert!(peers.kept().iter().any(|kept| kept.peer == moved));
    }
}
