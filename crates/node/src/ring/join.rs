//! Joining the ring, and rejoining it.
//!
//! A node that knows no peers founds a ring of its own. A node that knows peers (remembered from
//! earlier runs, or named by its join code) joins through them, and keeps trying. While none of
//! them answers:
//!
//! - A newcomer that has never had a place on the ring waits: a ring of its own would be
//!   a second one, and it holds no blocks that others could need.
//! - A node that has been a member (or founded the network) serves alone, so that the
//!   blocks it holds can be read, and so that nodes that lost power together do not wait for
//!   each other for ever. Its status says so. Chord keeps calling the remembered peers; as soon
//!   as one answers, the two rings merge.
//!
//! The overlay remembers peers (`chord::RememberedPeer`); they are written to disk as they
//! change. The peers of a join code given at this start are asked before the remembered ones:
//! a user gives a code because the remembered peers do not help. The same node may be in both
//! lists, remembered at its old address and named at its new one.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, jittered, sleep, timeout};
use atoll_net::Peer;
use atoll_overlay::chord::RememberedPeer;

use crate::dir::NodeDir;
use crate::peers::{self, PeerList, PeerMemory};
use crate::settings::SettingsStore;

/// Wait between two rounds of trying.
const RETRY: Duration = Duration::from_secs(5);
/// The least time between two writes of the known peers.
const SETTLE: Duration = Duration::from_millis(500);

/// What joining needs of the overlay.
pub(crate) trait JoinableRing: Send + Sync + 'static {
    /// Founds a ring of one.
    fn create(&self);
    /// Joins the ring of the first of `peers` that answers. Not while on a ring.
    fn join(&self, peers: Vec<Peer>) -> BoxFuture<'static, Result<(), String>>;
    /// Whether another process of this node's key goes on in its place: it has left for good.
    fn is_superseded(&self) -> bool;
    /// Whether this node has a place, and whether it is there alone.
    fn place(&self) -> Place;
    /// The peers the overlay remembers, those met first in front.
    fn remembered(&self) -> Vec<RememberedPeer>;
    /// Changes whenever the neighbourhood does.
    fn epoch(&self) -> u64;
    /// Resolves when the neighbourhood is no longer the one of `epoch`.
    fn changed(&self, epoch: u64) -> BoxFuture<'static, u64>;
}

/// A node's place on the ring, as far as joining cares.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    Nowhere,
    Alone,
    Among,
}

/// Brings a node onto the ring and remembers the peers it knows.
pub(crate) struct RingJoin {
    env: Env,
    ring: Arc<dyn JoinableRing>,
    dir: NodeDir,
    me: Peer,
    bootstrap: Bootstrap,
    settings: Arc<SettingsStore>,
    state: Mutex<State>,
}

/// The peers that a join code names.
pub(crate) struct Bootstrap {
    pub peers: PeerList,
    /// Whether the code was given at this start.
    pub is_new_code: bool,
}

struct State {
    saved: PeerMemory,
    trouble: Option<String>,
    /// The node is leaving the ring: being nowhere is what it wants.
    leaving: bool,
}

impl RingJoin {
    /// `saved` are the peers on disk, which the overlay remembers.
    pub(crate) fn new(
        env: Env,
        ring: Arc<dyn JoinableRing>,
        dir: NodeDir,
        me: Peer,
        settings: Arc<SettingsStore>,
        saved: PeerMemory,
        bootstrap: Bootstrap,
    ) -> RingJoin {
        let state = State { saved, trouble: None, leaving: false };
        RingJoin { env, ring, dir, me, bootstrap, settings, state: Mutex::new(state) }
    }

    /// The peers to join through, in order: those of a code given at this start, or else those
    /// that answered their last call.
    fn known(&self) -> Vec<Peer> {
        let remembered = self.ring.remembered();
        let (alive, silent): (Vec<_>, Vec<_>) =
            remembered.into_iter().partition(|known| known.failures == 0);
        let peers = |known: Vec<RememberedPeer>| known.into_iter().map(|known| known.peer);
        let named = self.bootstrap.peers.as_slice().iter().copied();
        let (first, then) = if self.bootstrap.is_new_code {
            (named.chain(peers(alive)).collect::<Vec<_>>(), Vec::new())
        } else {
            (peers(alive).collect(), named.collect())
        };
        let all = first.into_iter().chain(then).chain(peers(silent));
        peers::distinct(all).filter(|peer| peer.id != self.me.id).collect()
    }

    /// Joins the ring or, after `patience`, gives up for now; see the module's text.
    pub(crate) async fn begin(&self, patience: Duration) {
        let (known, was_member) = (self.known(), self.settings.present().has_joined());
        if known.is_empty() {
            self.ring.create();
        } else {
            match timeout(&*self.env, patience, self.ring.join(known)).await {
                Ok(Ok(())) => {}
                Ok(Err(reason)) => self.record_failure(was_member, &reason),
                Err(elapsed) => self.record_failure(was_member, &elapsed.to_string()),
            }
        }
        self.record_success();
    }

    /// Tries no more to get onto the ring: the node is about to leave it.
    pub(crate) fn leave(&self) {
        self.lock().leaving = true;
    }

    /// Keeps trying while this node has no place, and writes down the peers it meets as soon as
    /// it meets them: a node that lost them in a crash would found a second ring. Ends only by
    /// being aborted.
    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            let epoch = self.ring.epoch();
            self.retry().await;
            let join = self.clone();
            let _ = tokio::task::spawn_blocking(move || join.remember()).await;
            sleep(&*self.env, SETTLE).await;
            let pause = jittered(&*self.env, RETRY);
            let _ = timeout(&*self.env, pause, self.ring.changed(epoch)).await;
        }
    }

    /// One more attempt, if this node has no place yet; else a look at whether it is alone
    /// though it knows others.
    async fn retry(&self) {
        if self.lock().leaving {
            return;
        }
        let was_member = self.settings.present().has_joined();
        let known = self.known();
        match self.ring.place() {
            Place::Nowhere => {
                if let Err(reason) = self.ring.join(known).await {
                    self.record_failure(was_member, &reason);
                }
            }
            Place::Alone if !known.is_empty() => self.record_failure(was_member, "no answer"),
            Place::Alone | Place::Among => {}
        }
        self.record_success();
    }

    /// Why this node is not among others, for people.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.lock().trouble.clone()
    }

    /// Writes down the peers known now if they have changed. Blocks on the disk.
    pub(crate) fn remember(&self) {
        let known = PeerMemory(self.ring.remembered());
        if !known.is_news_after(&self.lock().saved) {
            return;
        }
        match known.save(&self.dir) {
            Ok(()) => self.lock().saved = known,
            Err(error) => tracing::warn!("cannot remember the peers: {error}"),
        }
    }

    /// No peer answers: serves alone if this node has been a member before.
    fn record_failure(&self, was_member: bool, reason: &str) {
        if self.ring.is_superseded() {
            return;
        }
        if was_member && self.ring.place() == Place::Nowhere {
            self.ring.create();
        }
        let count = self.known().len();
        let mut state = self.lock();
        let meanwhile = if was_member { "serving alone" } else { "not on the ring yet" };
        let trouble = format!(
            "no way onto the ring (nodes known: {count}): {reason}; {meanwhile}, trying again"
        );
        if state.trouble.is_none() {
            tracing::warn!("{trouble}");
        }
        state.trouble = Some(trouble);
    }

    /// Notes that the node has a place, if it has one.
    fn record_success(&self) {
        let place = self.ring.place();
        if place == Place::Among && self.lock().trouble.take().is_some() {
            tracing::info!("found the other nodes");
        }
        if place != Place::Nowhere && !self.settings.present().has_joined() {
            let joined = self.settings.change(|settings| {
                settings.set_joined();
                Ok(())
            });
            if let Err(error) = joined {
                tracing::warn!("cannot remember having joined: {error}");
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::NodeConfig;
    use atoll_env::TokioRuntime;
    use atoll_key::PeerId;

    /// A ring whose other nodes can be switched off.
    struct FakeRing {
        place: Mutex<Place>,
        reachable: Mutex<bool>,
        created: Mutex<u32>,
        superseded: Mutex<bool>,
        remembered: Mutex<Vec<RememberedPeer>>,
        /// The peers it was to join through the last time.
        asked: Mutex<Vec<Peer>>,
    }

    impl JoinableRing for Arc<FakeRing> {
        fn create(&self) {
            *self.created.lock().expect("lock") += 1;
            *self.place.lock().expect("lock") = Place::Alone;
        }
        fn join(&self, peers: Vec<Peer>) -> BoxFuture<'static, Result<(), String>> {
            assert!(!peers.is_empty() && self.place() == Place::Nowhere);
            *self.asked.lock().expect("lock") = peers;
            let ring = self.clone();
            Box::pin(async move {
                if !*ring.reachable.lock().expect("lock") {
                    return Err("nobody answers".into());
                }
                *ring.place.lock().expect("lock") = Place::Among;
                Ok(())
            })
        }
        fn is_superseded(&self) -> bool {
            *self.superseded.lock().expect("lock")
        }
        fn place(&self) -> Place {
            *self.place.lock().expect("lock")
        }
        fn remembered(&self) -> Vec<RememberedPeer> {
            self.remembered.lock().expect("lock").clone()
        }
        fn epoch(&self) -> u64 {
            0
        }
        fn changed(&self, _: u64) -> BoxFuture<'static, u64> {
            Box::pin(std::future::pending())
        }
    }

    fn peer(number: u8) -> Peer {
        let addr = std::net::SocketAddr::from(([10, 0, 0, number], 7543));
        Peer { id: PeerId([number; 32]), addr }
    }

    struct Scene {
        ring: Arc<FakeRing>,
        join: RingJoin,
        dir: NodeDir,
        _temp: tempfile::TempDir,
    }

    fn known(peer: Peer, failures: u32) -> RememberedPeer {
        RememberedPeer { peer, failures }
    }

    fn settings(dir: &NodeDir) -> SettingsStore {
        SettingsStore::open(dir, &NodeConfig::new(dir.root())).expect("read")
    }

    fn scene(
        was_member: bool,
        remembered: &[RememberedPeer],
        bootstrap: &[Peer],
        reachable: bool,
    ) -> Scene {
        let temp = tempfile::tempdir().expect("temp");
        let dir = NodeDir::at(temp.path());
        let ring = Arc::new(FakeRing {
            place: Mutex::new(Place::Nowhere),
            reachable: Mutex::new(reachable),
            created: Mutex::new(0),
            superseded: Mutex::new(false),
            remembered: Mutex::new(remembered.to_vec()),
            asked: Mutex::default(),
        });
        let settings = settings(&dir);
        if was_member {
            let joined = settings.change(|settings| {
                settings.set_joined();
                Ok(())
            });
            joined.expect("written");
        }
        let join = RingJoin::new(
            Arc::new(TokioRuntime::current()),
            Arc::new(ring.clone()),
            dir.clone(),
            peer(1),
            Arc::new(settings),
            PeerMemory(remembered.to_vec()),
            Bootstrap { peers: PeerList::new(bootstrap.iter().copied()), is_new_code: false },
        );
        Scene { ring, join, dir, _temp: temp }
    }

    const PATIENCE: Duration = Duration::from_secs(5);

    #[tokio::test]
    async fn a_node_that_knows_nobody_founds_a_ring() {
        let s = scene(false, &[], &[], true);
        s.join.begin(PATIENCE).await;
        assert_eq!((s.ring.place(), s.join.trouble()), (Place::Alone, None));
        assert!(settings(&s.dir).present().has_joined());
    }

    /// A node that was leaving was treated as one that had lost its ring, and founded a new one
    /// while it was stopping.
    #[tokio::test]
    async fn a_node_that_leaves_does_not_try_to_come_back() {
        let s = scene(true, &[known(peer(2), 0)], &[], true);
        s.join.begin(PATIENCE).await;
        assert_eq!(s.ring.place(), Place::Among);
        s.join.leave();
        *s.ring.place.lock().expect("lock") = Place::Nowhere;
        s.join.retry().await;
        assert_eq!((s.ring.place(), s.join.trouble()), (Place::Nowhere, None));
    }

    #[tokio::test]
    async fn a_node_that_was_superseded_does_not_serve_alone() {
        let s = scene(true, &[known(peer(2), 0)], &[], false);
        *s.ring.superseded.lock().expect("lock") = true;
        s.join.begin(PATIENCE).await;
        s.join.retry().await;
        assert_eq!((s.ring.place(), s.join.trouble()), (Place::Nowhere, None));
        assert_eq!(*s.ring.created.lock().expect("lock"), 0);
    }

    #[tokio::test]
    async fn a_newcomer_never_forms_a_second_ring() {
        let s = scene(false, &[], &[peer(2)], false);
        s.join.begin(PATIENCE).await;
        s.join.retry().await;
        assert_eq!((s.ring.place(), *s.ring.created.lock().expect("lock")), (Place::Nowhere, 0));
        let trouble = s.join.trouble().expect("told");
        assert!(trouble.contains("nobody answers") && trouble.contains("not on the ring yet"));
        assert!(!settings(&s.dir).present().has_joined());
        *s.ring.reachable.lock().expect("lock") = true;
        s.join.retry().await;
        assert_eq!((s.ring.place(), s.join.trouble()), (Place::Among, None));
        assert!(settings(&s.dir).present().has_joined());
    }

    #[tokio::test]
    async fn a_member_whose_peers_are_gone_serves_alone_and_finds_back() {
        let s = scene(true, &[known(peer(2), 0)], &[], false);
        s.join.begin(PATIENCE).await;
        assert_eq!(s.ring.place(), Place::Alone);
        assert!(s.join.trouble().is_some_and(|trouble| trouble.contains("serving alone")));
        s.join.retry().await;
        assert_eq!(*s.ring.created.lock().expect("lock"), 1, "founded once");
        *s.ring.place.lock().expect("lock") = Place::Among; // Chord merged the rings
        s.join.retry().await;
        assert_eq!(s.join.trouble(), None);
    }

    #[tokio::test]
    async fn peers_are_written_down_as_they_change() {
        let s = scene(true, &[known(peer(2), 0)], &[], true);
        s.join.begin(PATIENCE).await;
        s.join.remember();
        assert_eq!(PeerMemory::load(&s.dir).expect("none"), PeerMemory::default(), "no news");
        let met = vec![known(peer(2), 1), known(peer(9), 0)];
        *s.ring.remembered.lock().expect("lock") = met.clone();
        s.join.remember();
        assert_eq!(PeerMemory::load(&s.dir).expect("saved"), PeerMemory(met));
    }

    /// The peers of a join code given because all others have moved came behind all that were
    /// remembered, those remembered at another address were left out, and of more than 64
    /// none was asked.
    #[tokio::test]
    async fn the_peers_of_a_code_just_given_are_asked_first() {
        let mut remembered: Vec<RememberedPeer> = (100..164).map(|n| known(peer(n), 0)).collect();
        remembered[7].failures = 3;
        let moved = Peer { addr: ([10, 9, 9, 9], 7543).into(), ..peer(101) };
        let code = [moved, peer(2), peer(1), peer(102)];
        let mut s = scene(true, &remembered, &code, true);
        s.join.bootstrap.is_new_code = true;
        s.join.begin(PATIENCE).await;
        let asked = s.ring.asked.lock().expect("lock").clone();
        assert_eq!(asked[..4], [moved, peer(2), peer(102), peer(100)], "and not itself");
        assert_eq!(asked.len(), 64 + 2);
        assert_eq!(asked.last(), Some(&peer(107)), "who was silent comes last");
        // At a later start those that are known to live come first.
        s.join.bootstrap.is_new_code = false;
        assert_eq!(s.join.known()[..2], [peer(100), peer(101)]);
        assert_eq!(s.join.known()[63..], [moved, peer(2), peer(107)]);
    }
}
