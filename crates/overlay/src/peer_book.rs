//! What a node knows of others first-hand: how fast they answer, and who lied.
//!
//! CFS §4.3 chooses next hops by measured latency and §5.1 replicas; §8 leaves malicious
//! nodes to the future. Both need a memory of peers that outlives a connection: this one.
//! It is bounded, and forgets whoever has not been heard of for the longest time.
//!
//! It believes nobody: only what this node has measured or caught itself goes in.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::PeerId;

/// The most peers kept.
pub const MAX_PEERS: usize = 4096;

/// See the module.
#[derive(Debug, Default)]
pub struct PeerBook {
    pages: Mutex<Pages>,
}

#[derive(Debug, Default)]
struct Pages {
    peers: BTreeMap<PeerId, Page>,
    /// The average of all calls ever made, seconds (CFS §4.3: d-bar).
    mean_secs: f64,
    calls: u64,
}

#[derive(Debug, Default)]
struct Page {
    /// Smoothed round trip and its deviation, seconds (RFC 6298).
    smoothed_secs: f64,
    deviation_secs: f64,
    calls: u64,
    heard: Instant,
}

impl PeerBook {
    /// A call to `peer` was answered after `took`.
    pub fn answered(&self, peer: &PeerId, took: Duration, now: Instant) {
        let secs = took.as_secs_f64();
        let mut pages = self.lock();
        pages.calls += 1;
        pages.mean_secs += (secs - pages.mean_secs) / pages.calls.min(1000) as f64;
        if pages.peers.len() >= MAX_PEERS && !pages.peers.contains_key(peer) {
            let oldest = pages.peers.iter().min_by_key(|(_, page)| page.heard).map(|(id, _)| *id);
            oldest.map(|id| pages.peers.remove(&id));
        }
        let page = pages.peers.entry(*peer).or_default();
        if page.calls == 0 {
            (page.smoothed_secs, page.deviation_secs) = (secs, secs / 2.0);
        } else {
            page.deviation_secs += ((secs - page.smoothed_secs).abs() - page.deviation_secs) / 4.0;
            page.smoothed_secs += (secs - page.smoothed_secs) / 8.0;
        }
        page.calls += 1;
        page.heard = now;
    }

    /// The smoothed round trip to `peer`, if it was ever measured.
    pub fn latency(&self, peer: &PeerId) -> Option<Duration> {
        self.lock().peers.get(peer).map(|page| Duration::from_secs_f64(page.smoothed_secs))
    }

    /// The average over all calls made (CFS §4.3: "the average latency of all the RPCs
    /// that node n has ever issued").
    pub fn mean_latency(&self) -> Option<Duration> {
        let pages = self.lock();
        (pages.calls > 0).then(|| Duration::from_secs_f64(pages.mean_secs))
    }

    fn lock(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().expect("nobody panics while holding the book")
    }
}
