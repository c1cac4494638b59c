//! How long a put may take before its node is taken for slow, and not waited for.
//!
//! A put carries up to a mebibyte, so what short answers take says little: over a slow line a
//! healthy put takes many seconds, and putting the blocks elsewhere as well would make it slower
//! still. So the wait is a base, which covers round trips, handshakes and the disks of a replica
//! set, and the time that the line needs for all bytes that this node is sending, at the rate
//! that it has measured itself. A put that is late and arrives lowers that rate.
//!
//! It knows neither blocks nor calls. The table of peers is bounded as the peer book is.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::PeerId;
use atoll_overlay::peer_book::PeerBook;

/// A publisher waits for the root at least so long. A guess: half of what one slow node may
/// delay an acknowledgement, the other half being for the puts that follow.
const PUBLISHER_BASE: Duration = Duration::from_millis(500);
/// A root waits for its replicas at least so long: it must answer before its publisher gives up.
const ROOT_BASE: Duration = Duration::from_millis(200);
/// A root is given so many of its short answers, which 19 times of 20 are no longer: the way
/// there and back, from there to its replicas, and what a root waits for those.
const ROOT_ROUND_TRIPS: u32 = 8;
/// And so many before the first put to it was answered: connections are opened and publishers
/// confirmed, at the root and then at its replicas.
const COLD_ROOT_ROUND_TRIPS: u32 = 24;
/// A replica is given so many.
const REPLICA_ROUND_TRIPS: u32 = 3;
/// And so many before the first.
const COLD_REPLICA_ROUND_TRIPS: u32 = 8;
/// The line's rate before any was measured. A guess: 2 Mbit/s. The first answers correct it.
const FIRST_BYTES_PER_SEC: f64 = (256 << 10) as f64;
/// Puts with less on the line than this measure round trips and not the rate.
const LEAST_MEASURED_BYTES: u64 = 64 << 10;
/// What a new measurement leaves of the earlier ones.
const FORGETTING: f64 = 0.75;

/// For whom is waited.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitsFor {
    /// A publisher waits for a root, or for replicas in its stead.
    Root,
    /// A root waits for its replicas, or a publisher for one question to a replica.
    Replica,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct PutTimes {
    /// Who has answered this node as a publisher, and who as a root: how long it took matters
    /// less than whether this is the first time.
    roots: PeerBook,
    replicas: PeerBook,
    line: Mutex<Line>,
}

/// What this node is sending.
#[derive(Debug, Default)]
struct Line {
    under_way_bytes: u64,
    /// Sums over past puts, the older the less: bytes that were on the line, and seconds.
    measured_bytes: f64,
    measured_secs: f64,
}

/// A put under way, until this is dropped.
#[derive(Debug)]
pub(crate) struct Sending {
    times: Arc<PutTimes>,
    waits_for: WaitsFor,
    bytes: u64,
    start: Instant,
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.times.lock().under_way_bytes -= self.bytes;
    }
}

impl Sending {
    /// The put was answered; `line_bytes` were on the line with it and before it.
    /// What round trips take counts against the line: the rate is rather too low than too high.
    pub fn answered(&self, peer: &PeerId, line_bytes: u64, now: Instant) {
        let took = now.since(self.start);
        self.times.book(self.waits_for).answered(peer, took, now);
        if line_bytes >= LEAST_MEASURED_BYTES {
            let mut line = self.times.lock();
            line.measured_bytes = line.measured_bytes * FORGETTING + line_bytes as f64;
            line.measured_secs = line.measured_secs * FORGETTING + took.as_secs_f64();
        }
    }
}

impl PutTimes {
    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().expect("no holder of this lock panics")
    }

    fn book(&self, waits_for: WaitsFor) -> &PeerBook {
        match waits_for {
            WaitsFor::Root => &self.roots,
            WaitsFor::Replica => &self.replicas,
        }
    }

    /// `bytes` are being sent from now on.
    pub fn sending(self: &Arc<Self>, waits_for: WaitsFor, bytes: u64, now: Instant) -> Sending {
        self.lock().under_way_bytes += bytes;
        Sending { times: self.clone(), waits_for, bytes, start: now }
    }

    /// All bytes being sent at present.
    pub fn under_way_bytes(&self) -> u64 {
        self.lock().under_way_bytes
    }

    /// How long a put to `peer` is waited for, while `line_bytes` share the line; `short` knows
    /// what short answers of the peer take.
    pub fn patience(
        &self,
        peer: &PeerId,
        waits_for: WaitsFor,
        line_bytes: u64,
        short: &PeerBook,
    ) -> Duration {
        let is_warm = self.book(waits_for).latency(peer).is_some();
        let (base, round_trips) = match (waits_for, is_warm) {
            (WaitsFor::Root, true) => (PUBLISHER_BASE, ROOT_ROUND_TRIPS),
            (WaitsFor::Root, false) => (PUBLISHER_BASE, COLD_ROOT_ROUND_TRIPS),
            (WaitsFor::Replica, true) => (ROOT_BASE, REPLICA_ROUND_TRIPS),
            (WaitsFor::Replica, false) => (ROOT_BASE, COLD_REPLICA_ROUND_TRIPS),
        };
        // The replicas of a near root may be far.
        let others = short.mean_latency().unwrap_or_default();
        base.max(short.p95(peer).max(others) * round_trips) + self.lock().time_of(line_bytes)
    }
}

impl Line {
    fn time_of(&self, bytes: u64) -> Duration {
        let rate = match self.measured_secs > 0.0 {
            true => self.measured_bytes / self.measured_secs,
            false => FIRST_BYTES_PER_SEC,
        };
        Duration::from_secs_f64((bytes as f64 / rate).min(3600.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const PEER: PeerId = PeerId([1; 32]);

    fn at(ms: u64) -> Instant {
        Instant::default() + MS * ms as u32
    }

    #[test]
    fn a_slow_line_is_not_taken_for_a_stopped_node() {
        let (times, short) = (Arc::new(PutTimes::default()), PeerBook::default());
        (0..20).for_each(|n| short.answered(&PEER, MS * 5, at(n)));
        let patience = |bytes| times.patience(&PEER, WaitsFor::Root, bytes, &short);
        // 16 puts of a mebibyte at once, at 1 Mbit/s.
        let sending: Vec<Sending> =
            (0..16).map(|_| times.sending(WaitsFor::Root, 1 << 20, at(0))).collect();
        assert_eq!(times.under_way_bytes(), 16 << 20);
        sending.iter().for_each(|put| put.answered(&PEER, 16 << 20, at(134_000)));
        drop(sending);
        assert_eq!(times.under_way_bytes(), 0);
        assert!(patience(1 << 20) > MS * 8_000, "{:?}", patience(1 << 20));
        assert!(patience(100) < MS * 520, "{:?}", patience(100));
    }

    #[test]
    fn a_fast_line_leaves_the_base() {
        let (times, short) = (Arc::new(PutTimes::default()), PeerBook::default());
        (0..20).for_each(|n| short.answered(&PEER, MS * 2, at(n)));
        for (waits_for, most) in [(WaitsFor::Root, 530), (WaitsFor::Replica, 230)] {
            times.sending(waits_for, 1 << 20, at(0)).answered(&PEER, 1 << 20, at(20));
            let patience = times.patience(&PEER, waits_for, 1 << 20, &short);
            assert!(patience < MS * most, "{waits_for:?}: {patience:?}");
        }
    }

    #[test]
    fn the_first_put_to_a_far_peer_is_given_its_handshakes() {
        let (times, short) = (Arc::new(PutTimes::default()), PeerBook::default());
        (0..20).for_each(|n| short.answered(&PEER, MS * 100, at(n)));
        let patience = || times.patience(&PEER, WaitsFor::Root, 0, &short);
        assert!(patience() > MS * 1_900, "{:?}", patience());
        times.sending(WaitsFor::Root, 100, at(0)).answered(&PEER, 100, at(900));
        assert!(patience() < MS * 1_300, "{:?}", patience());
    }
}
