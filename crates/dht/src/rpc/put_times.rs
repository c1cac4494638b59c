//! How long a put may take before it is overdue, and how much this node sends at a time.
//!
//! A put carries up to a mebibyte, so the latency of short answers says little about it: over a
//! slow line a healthy put takes many seconds, and sending the blocks elsewhere as well would make
//! it slower still. The wait is therefore a base, which covers round trips, handshakes and the
//! disks of a replica set, plus the time that the line needs for all bytes that this node is
//! sending, at the rate measured by earlier puts. A put that arrives late lowers that rate, unless
//! a put that began no earlier and is no shorter has arrived before it: then its peer was slow, not
//! the line.
//!
//! A full line delays everything else that this node sends, including its answers to pings, and its
//! peers would take it for dead. So a node sends at most what its line carries in [`LINE_HOLDS`] at
//! a time; further puts wait in a queue and are not overdue meanwhile. As with TCP's slow start,
//! little is sent before the line was measured.
//!
//! It knows neither blocks nor calls. The table of peers is bounded as the peer book is.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use atoll_env::{Env, Instant, Notify};
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
/// A root that has answered puts is given no longer, whatever its answers took, besides the time of the line. A guess:
/// one that was stopped answers late when it goes on, and is not given as long the next time.
const MOST_OF_ROOT: Duration = Duration::from_secs(4);
/// And a replica. A guess.
const MOST_OF_REPLICA: Duration = Duration::from_secs(2);
/// The line's rate before any was measured. A guess: 256 kbit/s, the uplink of a slow line. The
/// first answers correct it.
const FIRST_BYTES_PER_SEC: f64 = (32 << 10) as f64;
/// Puts with less on the line than this measure round trips and not the rate.
const LEAST_MEASURED_BYTES: u64 = 32 << 10;
/// No more is sent at a time than the line carries in so long, round trips included. A guess: a
/// node that does not answer the overlay's calls for twice as long is taken for dead.
const LINE_HOLDS: Duration = Duration::from_secs(2);
/// So much may be sent at a time over any line, and before the line was measured. A guess: what
/// a line of 256 kbit/s carries in [`LINE_HOLDS`].
const LEAST_ROOM_BYTES: u64 = 64 << 10;
/// The rate is that of about the last so many seconds in which puts were under way.
const REMEMBERED_SECS: f64 = 5.0;

/// What a caller waits for.
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
    /// The peers that have answered this node as a publisher, and as a root. Whether a peer has
    /// answered before matters more than how long it took.
    roots: PeerBook,
    replicas: PeerBook,
    line: Mutex<Line>,
    /// Held by the put that is next to get room on the line.
    next: futures_util::lock::Mutex<()>,
    has_room: Notify,
}

/// What this node is sending.
#[derive(Debug, Default)]
struct Line {
    /// The puts under way, by number.
    puts: BTreeMap<u64, OnLine>,
    next_number: u64,
    /// When a put was answered last, or began while none was under way.
    since: Instant,
    /// Sums over past puts, the older the less: bytes that were answered, and seconds.
    measured_bytes: f64,
    measured_secs: f64,
}

/// A put that is under way.
#[derive(Debug)]
struct OnLine {
    start: Instant,
    bytes: u64,
    /// Nobody waits for it: a dead node must not keep others from being sent to.
    is_overdue: bool,
    /// A put that began no earlier and is no shorter was answered. Puts share the line, so this
    /// one has left it.
    is_carried: bool,
}

/// A put that waits for room on the line or is under way, until this is dropped.
#[derive(Debug)]
pub(crate) struct Sending {
    times: Arc<PutTimes>,
    waits_for: WaitsFor,
    bytes: u64,
    /// Its number, and when it began.
    begun: OnceLock<(u64, Instant)>,
}

impl Drop for Sending {
    fn drop(&mut self) {
        if let Some((number, _)) = self.begun.get() {
            self.times.lock().puts.remove(number);
            self.times.has_room.notify();
        }
    }
}

impl Sending {
    /// Resolves when there is room on the line; the put is under way then. Cancel-safe.
    pub(crate) async fn begin(&self, env: &Env) {
        let _next;
        if self.bytes > 0 {
            _next = self.times.next.lock().await;
            while !self.times.lock().has_room(self.bytes) {
                self.times.has_room.notified().await;
            }
        }
        self.begins(env.now());
    }

    /// The put is under way, whether or not there is room.
    pub(crate) fn begins(&self, now: Instant) {
        let mut line = self.times.lock();
        if line.held_bytes() == 0 {
            line.since = now;
        }
        let (number, bytes) = (line.next_number, self.bytes);
        line.next_number += 1;
        let put = OnLine { start: now, bytes, is_overdue: false, is_carried: false };
        line.puts.insert(number, put);
        self.begun.set((number, now)).expect("a put begins once");
    }

    /// When the put began; `None` while it waits for room.
    pub(crate) fn start(&self) -> Option<Instant> {
        self.begun.get().map(|(_, start)| *start)
    }

    /// Whether it sends no blocks.
    pub(crate) fn is_question(&self) -> bool {
        self.bytes == 0
    }

    /// Others need not wait for this put any more. Only of a put that is under way.
    pub(crate) fn give_up_room(&self) {
        let (number, _) = self.begun.get().expect("only what is under way has room");
        self.times.lock().puts.get_mut(number).expect("under way").is_overdue = true;
        self.times.has_room.notify();
    }

    /// The put was answered; `line_bytes` were on the line with it and before it. Puts share the
    /// line, so what counts is the time since another one was answered. What round trips take
    /// counts against the line: the rate is rather too low than too high.
    pub(crate) fn answered(&self, peer: &PeerId, line_bytes: u64, now: Instant) {
        let (number, start) = self.begun.get().copied().expect("only what was sent is answered");
        self.times.book(self.waits_for).answered(peer, now.since(start), now);
        if self.bytes == 0 {
            return; // A question goes before blocks, and says nothing about the line.
        }
        let mut line = self.times.lock();
        let secs = match line.puts[&number].is_carried {
            true => 0.0,
            false => now.since(std::mem::replace(&mut line.since, now)).as_secs_f64(),
        };
        line.carried(start, self.bytes);
        self.times.has_room.notify();
        if line_bytes >= LEAST_MEASURED_BYTES {
            let kept = REMEMBERED_SECS / (REMEMBERED_SECS + secs);
            line.measured_bytes = line.measured_bytes * kept + self.bytes as f64;
            line.measured_secs = line.measured_secs * kept + secs;
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

    /// A put of so many bytes, which has not begun.
    pub(crate) fn sending(self: &Arc<Self>, waits_for: WaitsFor, bytes: u64) -> Sending {
        Sending { times: self.clone(), waits_for, bytes, begun: OnceLock::new() }
    }

    /// All bytes being sent at present.
    pub(crate) fn under_way_bytes(&self) -> u64 {
        self.lock().on_line().map(|put| put.bytes).sum()
    }

    /// Those of puts that are waited for.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.lock().held_bytes()
    }

    /// The most bytes worth sending in one put.
    pub(crate) fn room_bytes(&self) -> u64 {
        self.lock().room_bytes()
    }

    /// How long a put to `peer` is waited for, while `line_bytes` share the line; `short` knows
    /// what short answers of the peer take.
    pub(crate) fn patience(
        &self,
        peer: &PeerId,
        waits_for: WaitsFor,
        line_bytes: u64,
        short: &PeerBook,
    ) -> Duration {
        let is_warm = self.book(waits_for).latency(peer).is_some();
        let (base, round_trips, most) = match (waits_for, is_warm) {
            (WaitsFor::Root, true) => (PUBLISHER_BASE, ROOT_ROUND_TRIPS, MOST_OF_ROOT),
            (WaitsFor::Root, false) => (PUBLISHER_BASE, COLD_ROOT_ROUND_TRIPS, Duration::MAX),
            (WaitsFor::Replica, true) => (ROOT_BASE, REPLICA_ROUND_TRIPS, MOST_OF_REPLICA),
            (WaitsFor::Replica, false) => (ROOT_BASE, COLD_REPLICA_ROUND_TRIPS, MOST_OF_REPLICA),
        };
        // The replicas of a near root may be far.
        let others = short.mean_latency().unwrap_or_default();
        let usual = base.max(short.p95(peer).max(others) * round_trips);
        usual.min(most) + self.line_time(line_bytes)
    }

    /// How long the line needs for so many bytes.
    pub(crate) fn line_time(&self, line_bytes: u64) -> Duration {
        self.lock().time_of(line_bytes)
    }
}

impl Line {
    fn bytes_per_sec(&self) -> f64 {
        match self.measured_secs > 0.0 {
            true => self.measured_bytes / self.measured_secs,
            false => FIRST_BYTES_PER_SEC,
        }
    }

    fn time_of(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64((bytes as f64 / self.bytes_per_sec()).min(3600.0))
    }

    fn room_bytes(&self) -> u64 {
        let room = self.bytes_per_sec() * LINE_HOLDS.as_secs_f64();
        (room as u64).max(LEAST_ROOM_BYTES)
    }

    fn on_line(&self) -> impl Iterator<Item = &OnLine> {
        self.puts.values().filter(|put| !put.is_carried)
    }

    /// Bytes of puts that are not overdue.
    fn held_bytes(&self) -> u64 {
        self.on_line().filter(|put| !put.is_overdue).map(|put| put.bytes).sum()
    }

    /// A put that began then, of so many bytes, was answered.
    fn carried(&mut self, start: Instant, bytes: u64) {
        let before = |put: &&mut OnLine| put.start <= start && put.bytes <= bytes;
        self.puts.values_mut().filter(before).for_each(|put| put.is_carried = true);
    }

    /// Whether so many bytes more may be sent now: what is longer than the room goes alone.
    fn has_room(&self, bytes: u64) -> bool {
        let held = self.held_bytes();
        held == 0 || held + bytes <= self.room_bytes()
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

    fn begun(times: &Arc<PutTimes>, waits_for: WaitsFor, bytes: u64) -> Sending {
        let put = times.sending(waits_for, bytes);
        put.begins(at(0));
        put
    }

    /// A node with a full line answers nobody in time.
    #[test]
    fn no_more_is_sent_than_the_line_carries_in_two_seconds() {
        let times = Arc::new(PutTimes::default());
        let fits = |bytes| times.lock().has_room(bytes);
        assert!(fits(1 << 20), "one put may be as long as it must");
        let first = begun(&times, WaitsFor::Root, 40 << 10);
        assert!(fits(24 << 10) && !fits(25 << 10), "the line is not known yet");
        first.answered(&PEER, 40 << 10, at(100));
        drop(first);
        // 400 KiB/s.
        let long = begun(&times, WaitsFor::Root, 700 << 10);
        assert!(fits(90 << 10) && !fits(110 << 10));
        long.give_up_room();
        assert!(fits(800 << 10), "nobody waits for a dead node");
        assert_eq!(times.under_way_bytes(), 700 << 10);
        drop(long);
        assert_eq!(times.under_way_bytes(), 0);
        // 8 KiB/s; much is forgotten of what was before.
        let slow = begun(&times, WaitsFor::Replica, 400 << 10);
        slow.answered(&PEER, 400 << 10, at(50_000));
        assert_eq!(times.room_bytes(), LEAST_ROOM_BYTES);
    }

    #[test]
    fn a_question_that_passes_blocks_does_not_make_the_line_seem_fast() {
        let times = Arc::new(PutTimes::default());
        let (put, before) = (begun(&times, WaitsFor::Root, 64 << 10), times.room_bytes());
        begun(&times, WaitsFor::Replica, 0).answered(&PEER, 64 << 10, at(5));
        assert_eq!(times.room_bytes(), before);
        // A short put that shares the line with a long one.
        begun(&times, WaitsFor::Root, 4 << 10).answered(&PEER, 68 << 10, at(500));
        put.answered(&PEER, 64 << 10, at(4_000));
        // 17 KiB/s, and not 68 KiB in half a second.
        assert_eq!(times.room_bytes(), LEAST_ROOM_BYTES);
    }

    #[test]
    fn a_slow_peer_is_not_taken_for_a_slow_line() {
        let times = Arc::new(PutTimes::default());
        let slow = begun(&times, WaitsFor::Replica, 64 << 10);
        let fast = begun(&times, WaitsFor::Replica, 64 << 10);
        fast.answered(&PEER, 128 << 10, at(10));
        assert_eq!(times.held_bytes(), 0, "the line has carried both");
        let before = times.room_bytes();
        slow.answered(&PEER, 128 << 10, at(8_000));
        assert!(times.room_bytes() >= before, "{} {before}", times.room_bytes());
    }

    #[test]
    fn a_slow_line_is_not_taken_for_a_stopped_node() {
        let (times, short) = (Arc::new(PutTimes::default()), PeerBook::default());
        (0..20).for_each(|n| short.answered(&PEER, MS * 5, at(n)));
        let patience = |bytes| times.patience(&PEER, WaitsFor::Root, bytes, &short);
        // 16 puts of a mebibyte at once, at 1 Mbit/s.
        let sending: Vec<Sending> =
            (0..16).map(|_| begun(&times, WaitsFor::Root, 1 << 20)).collect();
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
            begun(&times, waits_for, 1 << 20).answered(&PEER, 1 << 20, at(20));
            let patience = times.patience(&PEER, waits_for, 1 << 20, &short);
            assert!(patience < MS * most, "{waits_for:?}: {patience:?}");
        }
    }

    #[test]
    fn a_peer_whose_answers_came_late_is_not_given_as_long_the_next_time() {
        let (times, short) = (Arc::new(PutTimes::default()), PeerBook::default());
        let patience = |waits_for| times.patience(&PEER, waits_for, 0, &short);
        for waits_for in [WaitsFor::Root, WaitsFor::Replica] {
            begun(&times, waits_for, 100).answered(&PEER, 100, at(20));
        }
        (0..20).for_each(|n| short.answered(&PEER, MS * 20, at(n)));
        assert_eq!(patience(WaitsFor::Root), PUBLISHER_BASE);
        assert_eq!(patience(WaitsFor::Replica), ROOT_BASE);
        // Calls of ten seconds, as of a peer that was stopped.
        (0..20).for_each(|n| short.answered(&PEER, MS * 10_000, at(30_000 + n)));
        for waits_for in [WaitsFor::Root, WaitsFor::Replica] {
            begun(&times, waits_for, 100).answered(&PEER, 100, at(10_000));
        }
        assert_eq!(patience(WaitsFor::Root), MOST_OF_ROOT);
        assert_eq!(patience(WaitsFor::Replica), MOST_OF_REPLICA);
        // The time of the line comes on top: a full one is not a dead peer.
        let long = times.patience(&PEER, WaitsFor::Replica, 1 << 20, &short);
        assert!(long > MOST_OF_REPLICA + MS * 1_000, "{long:?}");
    }

    #[test]
    fn the_first_put_to_a_far_peer_is_given_its_handshakes() {
        let (times, short) = (Arc::new(PutTimes::default()), PeerBook::default());
        (0..20).for_each(|n| short.answered(&PEER, MS * 100, at(n)));
        let patience = || times.patience(&PEER, WaitsFor::Root, 0, &short);
        assert!(patience() > MS * 1_900, "{:?}", patience());
        begun(&times, WaitsFor::Root, 100).answered(&PEER, 100, at(900));
        assert!(patience() < MS * 1_300, "{:?}", patience());
    }
}
