//! The ring as a subsystem: Chord, joining it, the peers to remember, open connections, clocks,
//! other processes of this node's key.

pub(crate) mod clock;
mod duplicates;
pub(crate) mod join;
mod warm_up;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{BoxFuture, Env, timeout};
use atoll_net::{Peer, Service, TcpTransport, Transport};
use atoll_overlay::census::{self, Census};
use atoll_overlay::chord::{self, Chord, RememberedPeer};
use atoll_overlay::{Node as RingPlace, Overlay};
use atoll_store::{BlockStore, ContributedStore};

pub(crate) use self::duplicates::remember_address;
use self::join::{JoinableRing, Place, RingJoin};
use crate::address;
use crate::config::StartError;
use crate::control::body::Json;
use crate::control::calls::CountNodes;
use crate::control::message::{Empty, Unfit};
use crate::control::server::Calls;
use crate::settings::SettingsStore;
use crate::status::{RingCount, RingNode, Status, hex};
use crate::subsystem::Subsystem;

/// How long telling the neighbours that this node leaves may take.
const LEAVE_LIMIT: Duration = Duration::from_secs(5);
/// Ring positions that are counted at most: a lookup for each sixteen.
const MAX_COUNTED: usize = 4096;

/// This node's places on the ring.
pub(crate) struct Ring {
    pub env: Env,
    pub transport: Arc<TcpTransport>,
    pub chord: Arc<Chord>,
    pub join: Arc<RingJoin>,
    pub settings: Arc<SettingsStore>,
    /// Its capacity decides how many virtual servers `auto` means.
    pub store: Arc<ContributedStore>,
    pub listen: SocketAddr,
    pub join_patience: Duration,
}

impl Ring {
    /// Takes as many places as the settings say: by default as many as the offered storage is
    /// worth (CFS §5.3). Returns at once, because joining waits for others; `status` shows the
    /// places as they come.
    pub(crate) fn follow_settings(&self) {
        let capacity_bytes = self.store.usage().capacity_bytes;
        let positions = self.settings.present().virtual_servers().count(capacity_bytes);
        if usize::from(positions) == self.chord.neighbourhoods().len() {
            return;
        }
        let chord = self.chord.clone();
        self.env.spawn(Box::pin(async move {
            if let Err(error) = chord.set_virtual_servers(positions).await {
                tracing::error!("the number of virtual servers stays: {error}");
            }
        }));
    }

    /// Waits until another process of this node's key goes on in its place, and returns where that
    /// listens: this one has left the ring, and has to end. Cancel-safe.
    pub(crate) async fn superseded(&self) -> SocketAddr {
        let by = self.chord.superseded().await;
        // A later start looks there first.
        remember_address(&self.settings, by);
        by
    }

    /// Leaves the ring for good.
    pub(crate) async fn leave(&self) {
        self.join.leave();
        if timeout(&*self.env, LEAVE_LIMIT, self.chord.leave()).await.is_err() {
            tracing::warn!("the neighbours did not hear our leaving in time; they will notice");
        }
    }
}

impl Subsystem for Ring {
    fn service(self: Arc<Self>) -> Option<(u8, Arc<dyn Service>)> {
        Some((chord::messages::FAMILY, self.chord.clone()))
    }

    fn control_calls(self: Arc<Self>, calls: &mut Calls) {
        calls.on::<CountNodes>(move |Empty {}| {
            let chord = self.chord.clone();
            Box::pin(async move {
                let counted = census::count(&*chord, MAX_COUNTED).await;
                let counted = counted.map_err(|error| Unfit::from(error.to_string()));
                Ok(counted
                    .map(|Census { peers: nodes, is_whole }| Json(RingCount { nodes, is_whole })))
            })
        });
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<(), StartError>> {
        Box::pin(async move {
            let ring = Arc::downgrade(&self);
            self.settings.watch(move |_| {
                ring.upgrade().into_iter().for_each(|ring| ring.follow_settings());
            });
            self.join.begin(self.join_patience).await;
            if self.chord.superseded_by().is_some() {
                return Err(StartError::Superseded { by: self.superseded().await });
            }
            let Ring { env, transport, chord, join, .. } = &*self;
            env.spawn(Box::pin(join.clone().run()));
            env.spawn(Box::pin(warm_up::run(env.clone(), transport.clone(), chord.clone())));
            env.spawn(Box::pin(clock::watch(env.clone(), chord.clone())));
            env.spawn(Box::pin(duplicates::watch(env.clone(), chord.clone())));
            Ok(())
        })
    }

    fn report(&self, status: &mut Status) {
        let places = self.chord.neighbourhoods();
        let around = &places[0];
        status.joined = around.joined;
        status.positions = places.iter().map(|place| hex_key(&place.me)).collect();
        status.predecessor = around.predecessor.as_ref().map(ring_node);
        status.successors = around.successors.iter().map(ring_node).collect();
        status.estimated_nodes = self.chord.estimated_peers();
        let known = census::known(&places);
        status.known_nodes = known.is_whole.then_some(known.peers);
        status.clock = clock::status(&self.chord.clock());
        status.warnings.extend(self.join.trouble());
        if let Some(peer) = self.chord.doubted_by() {
            status.warnings.push(format!(
                "the node at {} cannot reach this one at {}: let incoming connections through to \
                 that port, or start with --advertise IP:PORT as others see it",
                peer.addr,
                self.transport.local().addr
            ));
        }
        let duplicate = self.chord.duplicate();
        status.warnings.extend(duplicates::warning(duplicate, self.env.now()));
        status.warnings.extend(address::trouble(self.listen));
        status.warnings.extend(clock::warnings(&status.clock));
    }

    fn stop(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            self.leave().await;
            let join = self.join.clone();
            let _ = tokio::task::spawn_blocking(move || join.remember()).await;
        })
    }
}

fn ring_node(node: &RingPlace) -> RingNode {
    RingNode { id: hex_key(node), addr: node.peer.addr.to_string(), peer_id: hex(&node.peer.id.0) }
}

/// A ring position: its hash, when it is one, else all of it.
fn hex_key(node: &RingPlace) -> String {
    let key = node.id.key();
    key.as_hash().map_or_else(|| hex(&key.0), |hash| hex(&hash))
}

impl JoinableRing for Arc<Chord> {
    fn create(&self) {
        Chord::create(self);
    }

    fn join(&self, peers: Vec<Peer>) -> BoxFuture<'static, Result<(), String>> {
        let chord = self.clone();
        Box::pin(async move { Chord::join(&chord, peers).await.map_err(|e| e.to_string()) })
    }

    fn is_superseded(&self) -> bool {
        self.superseded_by().is_some()
    }

    fn place(&self) -> Place {
        let around = self.neighbourhood();
        let me = around.me.peer.id;
        match (around.joined, around.successors.iter().all(|node| node.peer.id == me)) {
            (false, _) => Place::Nowhere,
            (true, true) => Place::Alone,
            (true, false) => Place::Among,
        }
    }

    fn remembered(&self) -> Vec<RememberedPeer> {
        Chord::remembered(self)
    }

    fn epoch(&self) -> u64 {
        Overlay::epoch(&**self)
    }

    fn changed(&self, epoch: u64) -> BoxFuture<'static, u64> {
        Overlay::changed(&**self, epoch)
    }
}
