//! Chord's implementation of the [`Overlay`] trait, for the crates above.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_key::Key;
use atoll_net::Peer;
use futures_channel::oneshot;

use super::Chord;
use crate::clock::ClockReport;
use crate::peer_book::PeerBook;
use crate::walk::{Start, WalkError, WalkLimits};
use crate::{Named, Neighbourhood, Node, Overlay, Route};

impl Overlay for Chord {
    fn neighbourhoods(&self) -> Vec<Neighbourhood> {
        self.lock().servers.neighbourhoods()
    }

    fn neighbourhood(&self) -> Neighbourhood {
        self.lock().servers.state(0).expect("there is always a first").neighbourhood()
    }

    fn epoch(&self) -> u64 {
        self.lock().servers.epoch()
    }

    fn unconfirmed_for(&self, own: &Node) -> Duration {
        self.lock().servers.unconfirmed_for(own, self.env.now())
    }

    fn peer_book(&self) -> &PeerBook {
        &self.peer_book
    }

    fn route(&self, key: &Key, as_root: bool) -> Route {
        self.routed(key, as_root)
    }

    fn known_nodes(&self) -> Vec<Node> {
        let mut known = self.lock().servers.known();
        known.extend(self.table_sample());
        known.retain(|node| !self.owns(node));
        known
    }

    fn likely_roots(&self, key: &Key) -> Vec<Node> {
        self.guess_roots(key)
    }

    fn record_answer(&self, node: &Node) {
        self.table_refreshed(node);
    }

    fn probe(&self, peer: &Peer) {
        if self.lock().servers.admission.was_checked(peer) {
            self.probe_soon(self.place(*peer, 0));
        }
    }

    fn report_failure(&self, failed: &Peer) {
        let node = Node::at(*failed, self.me().virtual_server);
        if self.owns(&node) {
            return;
        }
        self.found_dead(*failed);
        // The caller may have given up too early, so the node is pinged. If the address was never
        // checked, it may have been false from the beginning, and is not pinged.
        if self.lock().servers.admission.was_checked(failed) {
            self.probe_soon(node);
        }
    }

    fn send_failure_report(&self, at: &Peer, failed: Vec<Peer>) -> BoxFuture<'static, bool> {
        let (chord, at) = (self.arc(), Node::at(*at, self.me().virtual_server));
        Box::pin(async move { chord.call_report_failed(at, &failed).await.is_ok() })
    }

    fn find_root(&self, key: &Key) -> BoxFuture<'static, Result<Vec<Node>, WalkError>> {
        self.find_root_telling(key, Box::new(|_| {}))
    }

    fn find_root_telling(
        &self,
        key: &Key,
        named: Named,
    ) -> BoxFuture<'static, Result<Vec<Node>, WalkError>> {
        let (chord, key) = (self.arc(), *key);
        // The caller does not wait for a dead node on the way.
        let limits = WalkLimits { hedge: true, ..self.root_limits() };
        Box::pin(async move {
            let named = Arc::new(named);
            Ok(chord.walk_to_root_telling(&key, Start::OwnTables, limits, &named).await?.value)
        })
    }

    fn changed(&self, epoch: u64) -> BoxFuture<'static, u64> {
        let mut inner = self.lock();
        let now = inner.servers.epoch();
        if now != epoch {
            return Box::pin(std::future::ready(now));
        }
        let (sender, receiver) = oneshot::channel();
        inner.waiters.retain(|waiter| !waiter.is_canceled());
        inner.waiters.push(sender);
        Box::pin(async move {
            match receiver.await {
                Ok(epoch) => epoch,
                // The overlay is gone and will not change any more.
                Err(_) => std::future::pending().await,
            }
        })
    }

    fn clock(&self) -> ClockReport {
        self.clocks().report(self.env.unix_ms(), self.env.now())
    }

    fn clock_correction_ms(&self) -> i64 {
        if !self.config.mechanisms.clocks {
            return 0;
        }
        self.clocks().correction_ms(self.env.unix_ms(), self.env.now())
    }

    fn estimated_nodes(&self) -> f64 {
        self.lock().servers.estimated_nodes()
    }

    fn estimated_peers(&self) -> f64 {
        self.lock().servers.estimated_peers()
    }
}
