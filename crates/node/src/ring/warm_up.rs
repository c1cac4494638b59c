//! Connection warm-up: keeps connections open to the nodes in the overlay's tables.
//!
//! A first call to a peer costs two round trips before it is sent: TCP, then TLS with the proof
//! of the network's secret. The paper's servers spoke UDP and had no such cost (CFS §6). So
//! a node calls the nodes of its tables to which no connection is open, the neighbours first. An
//! open connection costs only the transport's keep-alive. The call's duration is also the first
//! measurement of the peer's latency (§4.3).
//!
//! It runs for real only: the simulator has connections of its own.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Env, jittered, sleep};
use atoll_net::{PROBE, Peer, Request, Transport};
use atoll_overlay::Overlay;
use futures_util::future::join_all;

/// How often it looks for nodes without a connection. A guess: a node that has just joined soon
/// knows the latency of its neighbours.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The most peers to which connections are kept open: an eighth of what the transport
/// keeps. A guess.
const MAX_WARM: usize = 64;
/// The most connections opened in one look: a handshake takes 1.5 ms of a processor.
const MAX_AT_ONCE: usize = 8;
/// How long a peer may take to answer.
const LIMIT: Duration = Duration::from_secs(5);

/// Keeps connections open, for ever.
pub(crate) async fn run(env: Env, transport: Arc<dyn Transport>, overlay: Arc<dyn Overlay>) {
    loop {
        sleep(&*env, jittered(&*env, LOOK_EVERY)).await;
        let cold = cold(&*transport, &*overlay);
        join_all(cold.into_iter().map(|peer| connect(&env, &transport, &overlay, peer))).await;
    }
}

/// Known nodes without an open connection.
fn cold(transport: &dyn Transport, overlay: &dyn Overlay) -> Vec<Peer> {
    let me = transport.local().id;
    let neighbours = overlay
        .neighbourhoods()
        .into_iter()
        .flat_map(|hood| hood.predecessor.into_iter().chain(hood.successors));
    let mut seen = BTreeSet::from([me]);
    neighbours
        .chain(overlay.known_nodes())
        .map(|node| node.peer)
        .filter(|peer| seen.insert(peer.id))
        .take(MAX_WARM)
        .filter(|peer| transport.round_trip(&peer.id).is_none())
        .take(MAX_AT_ONCE)
        .collect()
}

/// Opens a connection and measures the round trip over it.
async fn connect(
    env: &Env,
    transport: &Arc<dyn Transport>,
    overlay: &Arc<dyn Overlay>,
    peer: Peer,
) {
    let probe = || transport.call(peer, Request { method: PROBE, ..Request::default() }, LIMIT);
    // The first call pays for the handshake; the second is what a call takes.
    if probe().await.is_err_and(|error| error.is_failure_of_peer()) {
        // Its neighbours notice a failure by themselves; a distant node may only be slow.
        return;
    }
    let began = env.now();
    if !probe().await.is_err_and(|error| error.is_failure_of_peer()) {
        overlay.peer_book().answered(&peer.id, env.now().since(began), env.now());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use atoll_env::{BoxFuture, TokioRuntime};
    use atoll_key::{Key, PeerId};
    use atoll_net::{CallError, Refusal, Reply, Service};
    use atoll_overlay::peer_book::PeerBook;
    use atoll_overlay::walk::WalkError;
    use atoll_overlay::{Neighbourhood, Node, Route};

    use super::*;

    fn peer(n: u8) -> Peer {
        Peer { id: PeerId([n; 32]), addr: ([10, 0, 0, n], 7543).into() }
    }

    /// Knows who is connected, and connects by a call.
    #[derive(Default)]
    struct Wires(Mutex<BTreeSet<PeerId>>);

    impl Transport for Wires {
        fn local(&self) -> Peer {
            peer(0)
        }
        fn call(
            &self,
            to: Peer,
            _: Request,
            _: Duration,
        ) -> BoxFuture<'static, Result<Reply, CallError>> {
            self.0.lock().expect("lock").insert(to.id);
            let refusal = Refusal::new(Refusal::UNKNOWN_METHOD, "a probe");
            Box::pin(async { Err(refusal.into()) })
        }
        fn round_trip(&self, peer: &PeerId) -> Option<Duration> {
            self.0.lock().expect("lock").contains(peer).then_some(Duration::from_millis(1))
        }
        fn serve(&self, _: Arc<dyn Service>) {}
    }

    /// Node 0 and its successors.
    struct Place(Vec<Node>, PeerBook);

    impl Overlay for Place {
        fn neighbourhoods(&self) -> Vec<Neighbourhood> {
            vec![Neighbourhood {
                epoch: 0,
                me: Node::of(peer(0)),
                predecessor: None,
                successors: self.0.clone(),
                joined: true,
            }]
        }
        fn epoch(&self) -> u64 {
            0
        }
        fn peer_book(&self) -> &PeerBook {
            &self.1
        }
        fn route(&self, _: &Key, _: bool) -> Route {
            Route::Nowhere
        }
        fn report_failure(&self, _: &Peer) {}
        fn find_root(&self, _: &Key) -> BoxFuture<'static, Result<Vec<Node>, WalkError>> {
            Box::pin(async { Err(WalkError::NotJoined) })
        }
        fn changed(&self, _: u64) -> BoxFuture<'static, u64> {
            Box::pin(std::future::pending())
        }
        fn estimated_nodes(&self) -> f64 {
            1.0
        }
    }

    #[tokio::test]
    async fn nodes_without_a_connection_are_called_and_measured_a_few_at_a_time() {
        let successors = (0..100).map(|n| Node::of(peer(n))).collect();
        let overlay: Arc<dyn Overlay> = Arc::new(Place(successors, PeerBook::default()));
        let wires = Arc::new(Wires::default());
        let transport: Arc<dyn Transport> = wires.clone();
        let env: Env = Arc::new(TokioRuntime::current());
        let mut connected = 0;
        loop {
            let cold = cold(&*transport, &*overlay);
            assert!(cold.len() <= MAX_AT_ONCE && !cold.contains(&peer(0)), "not itself");
            if cold.is_empty() {
                break;
            }
            for peer in cold {
                connect(&env, &transport, &overlay, peer).await;
                assert!(overlay.peer_book().latency(&peer.id).is_some());
                connected += 1;
            }
        }
        assert_eq!(connected, MAX_WARM);
    }
}
