//! The peer book: a node's own measurements of other peers, and which of them lied.
//!
//! CFS §4.3 chooses next hops by measured latency and §5.1 replicas; §8 leaves malicious nodes to
//! the future. Both need a memory of peers that outlives a connection. Only this node's own
//! measurements and discoveries go in. A wrong that a peer did is a [`Misdeed`]; misdeeds add up to
//! a score that fades. A peer with a heavy score is avoided: asked last, never excluded, since any
//! node may be mistaken.
//!
//! A peer that left a call unanswered is asked last too ([`Standing`]), whichever node names it:
//! when many nodes have died at once others still name them, and asking each of the dead once is
//! enough. The silence is held against the peer address that was called, so that a false address
//! does not discredit a node. It is forgotten as soon as the node answers or calls, and in any case
//! after a while, each time a longer one.
//!
//! The book is bounded. It first forgets peers that were not heard of for the longest time, and
//! last those that it avoids, and therefore does not hear of.
//!
//! It does not know the questions. The caller says which answers are worth timing: small ones, or a
//! peer that takes large blocks would seem far away.

mod conduct;
mod silence;
mod timing;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::PeerId;
use atoll_net::Peer;

use crate::Mechanisms;
use conduct::{AVOIDED_FROM, Conduct};
use silence::Silence;
use timing::Timing;

pub use conduct::Misdeed;
pub use silence::Standing;

/// The most peers kept.
pub const MAX_PEERS: usize = 4096;
/// Of a full book, at most this share keeps its place for having lied: otherwise a flood
/// of liars would push out all others.
const MAX_LIARS: usize = MAX_PEERS / 4;
/// The expected time of a call before any was made. A guess: far away on one continent.
const FIRST_GUESS: Duration = Duration::from_millis(100);
/// The average over all calls forgets beyond so many, so that it follows a node that moves.
const MEAN_OVER_CALLS: u64 = 1000;
/// A peer that takes so many times its 95 % quantile has probably failed. A guess.
const PATIENCE_FACTOR: u32 = 8;
/// An answer is overdue after so many times the 95 % quantile. A guess: hardly any
/// answer of a peer that lives is.
const LATE_FACTOR: u32 = 2;
/// No answer is overdue before: a busy machine may need as long. A guess.
const LEAST_LATE: Duration = Duration::from_millis(100);
/// How long a silence is held against a peer at first. A guess: rings forget a dead node in
/// about that time.
const SILENCE_LASTS: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Debug)]
pub struct PeerBook {
    silence_lasts: Duration,
    mechanisms: Mechanisms,
    pages: Mutex<Pages>,
}

impl Default for PeerBook {
    fn default() -> PeerBook {
        PeerBook::with(SILENCE_LASTS, Mechanisms::default())
    }
}

#[derive(Debug, Default)]
struct Pages {
    peers: BTreeMap<PeerId, Page>,
    /// The average of all calls ever made, seconds (CFS §4.3: d-bar).
    mean_secs: f64,
    calls: u64,
    /// All calls as if of one peer: the estimate for peers that were never measured.
    all: Timing,
    /// Whether any peer was ever caught: most nodes never catch one, which saves a search.
    any_lied: bool,
    /// When all silences will have been forgotten: mostly no peer is silent, which saves a search.
    silences_end: Instant,
}

#[derive(Debug, Default)]
struct Page {
    timing: Timing,
    conduct: Conduct,
    silence: Option<Silence>,
    /// When it has last answered after it was silent.
    spoke_again: Option<Instant>,
    heard: Instant,
    /// When a call was last answered, whatever it was.
    lived: Option<Instant>,
}

impl PeerBook {
    /// A book in which the first silence of a peer is held against it for `silence_lasts`.
    pub fn with(silence_lasts: Duration, mechanisms: Mechanisms) -> PeerBook {
        PeerBook { silence_lasts, mechanisms, pages: Mutex::default() }
    }

    /// A call to `peer` was answered after `took`. A late answer to a call that it was silent during says nothing about its
    /// usual time: it was stopped. As with retransmissions (Karn's algorithm, RFC 6298 §3), the next call is timed.
    pub fn answered(&self, peer: &PeerId, took: Duration, now: Instant) {
        let secs = took.as_secs_f64();
        let mut pages = self.lock();
        let page = pages.page(peer, now);
        let is_late = took > late_after(page.timing.p95());
        if is_late && page.was_silent_within(took, now) {
            page.lives(now);
            return;
        }
        pages.calls += 1;
        pages.mean_secs += (secs - pages.mean_secs) / pages.calls.min(MEAN_OVER_CALLS) as f64;
        pages.all.answered(secs);
        let page = pages.page(peer, now);
        page.lives(now);
        page.timing.answered(secs);
        page.silence = None;
        page.heard = now;
    }

    /// A call to `peer` was answered that says nothing about how fast it is.
    pub fn lives(&self, peer: &PeerId, now: Instant) {
        self.lock().page(peer, now).lives(now);
    }

    /// Whether `peer` has answered any call since then. If so, another call that is not answered
    /// in time says that it is slow, or that a line is, and not that it is dead.
    pub fn has_answered_since(&self, peer: &PeerId, then: Instant) -> bool {
        let pages = self.lock();
        pages.peers.get(peer).and_then(|page| page.lived).is_some_and(|lived| lived > then)
    }

    /// A call to `peer` brought no answer: until one does, it is expected to take longer,
    /// and others are asked first for a while.
    pub fn silent(&self, peer: &Peer, now: Instant) {
        let mut pages = self.lock();
        let page = pages.page(&peer.id, now);
        page.timing.silent();
        let lasts = self.silence_lasts * page.timing.backoff_of_silence();
        let silence = Silence { addr: peer.addr, standing: Standing::Silent, until: now + lasts };
        page.silence = Some(silence);
        pages.silences_end = pages.silences_end.max(silence.until);
    }

    /// A call to `peer` that is still waited for is overdue ([`PeerBook::late_after`]): until
    /// it is answered, others are asked first.
    pub fn late(&self, peer: &Peer, now: Instant) {
        let mut pages = self.lock();
        let page = pages.page(&peer.id, now);
        if page.standing(peer, now) == Standing::Answers {
            let until = now + self.silence_lasts;
            page.silence = Some(Silence { addr: peer.addr, standing: Standing::Late, until });
            pages.silences_end = pages.silences_end.max(until);
        }
    }

    /// Whether `peer` left the last call made to it unanswered.
    pub fn standing(&self, peer: &Peer, now: Instant) -> Standing {
        let pages = self.lock();
        if now >= pages.silences_end || !self.mechanisms.silence {
            return Standing::Answers;
        }
        pages.peers.get(&peer.id).map_or(Standing::Answers, |page| page.standing(peer, now))
    }

    /// How long a call to `peer` is waited for before another peer is asked as well: rather longer
    /// than it nearly always takes, or than all calls do while it was never measured.
    pub fn late_after(&self, peer: &PeerId) -> Duration {
        late_after(self.p95(peer))
    }

    /// The smoothed round trip to `peer`, if it was ever measured.
    pub fn latency(&self, peer: &PeerId) -> Option<Duration> {
        let pages = self.lock();
        let timing = pages.peers.get(peer)?.timing;
        timing.is_measured().then(|| timing.mean())
    }

    /// The average over all calls made (CFS §4.3: "the average latency of all the RPCs
    /// that node n has ever issued").
    pub fn mean_latency(&self) -> Option<Duration> {
        let pages = self.lock();
        (pages.calls > 0).then(|| Duration::from_secs_f64(pages.mean_secs))
    }

    /// How long the next call to `peer` will probably take: its own mean, or that of all;
    /// twice as long for every call in a row that it left unanswered.
    pub fn expected(&self, peer: &PeerId) -> Duration {
        let pages = self.lock();
        let timing = pages.timing_of(peer);
        let mean = match timing.is_measured() {
            true => timing.mean(),
            false if pages.calls > 0 => Duration::from_secs_f64(pages.mean_secs),
            false => FIRST_GUESS,
        };
        mean * timing.backoff()
    }

    /// The time within which `peer` answers 19 times of 20, as far as that is known: its
    /// own 95 % quantile, or that of all calls while it was never measured. A caller that waits
    /// longer may well ask another peer.
    pub fn p95(&self, peer: &PeerId) -> Duration {
        let pages = self.lock();
        let own = pages.timing_of(peer);
        match (own.is_measured(), pages.all.is_measured()) {
            (true, _) => own.p95(),
            (false, true) => pages.all.p95(),
            (false, false) => FIRST_GUESS * 2,
        }
    }

    /// How long to wait for an answer of `peer` before it is taken for failed: much longer
    /// than it usually takes and at least `least`; twice as long after every call in a row
    /// that it left unanswered, since it may be slow and not dead; at most `most`.
    pub fn patience(&self, peer: &PeerId, least: Duration, most: Duration) -> Duration {
        let usual = self.p95(peer) * PATIENCE_FACTOR;
        let backoff = self.lock().timing_of(peer).backoff();
        (usual.max(least) * backoff).min(most)
    }

    /// `peer` was caught by this node itself.
    pub fn lied(&self, peer: &PeerId, misdeed: Misdeed, now: Instant) {
        let mut pages = self.lock();
        pages.any_lied = true;
        pages.page(peer, now).conduct.lied(misdeed, now);
    }

    /// From 1, never caught at anything, down to 0; one half where avoidance begins.
    pub fn trust(&self, peer: &PeerId, now: Instant) -> f64 {
        AVOIDED_FROM / (AVOIDED_FROM + self.lock().score(peer, now))
    }

    /// Whether `peer` has lied so often of late that others are asked first.
    pub fn is_avoided(&self, peer: &PeerId, now: Instant) -> bool {
        self.mechanisms.conduct && self.lock().score(peer, now) >= AVOIDED_FROM
    }

    /// All avoided peers, and their [trust](PeerBook::trust): for people.
    pub fn avoided(&self, now: Instant) -> Vec<(PeerId, f64)> {
        let pages = self.lock();
        let scores = pages.peers.iter().map(|(id, page)| (*id, page.conduct.score(now)));
        let avoided = scores.filter(|(_, score)| *score >= AVOIDED_FROM);
        avoided.map(|(id, score)| (id, AVOIDED_FROM / (AVOIDED_FROM + score))).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().expect("no thread panics while holding the book")
    }
}

/// After how long an answer is overdue that comes within so long 19 times of 20.
fn late_after(p95: Duration) -> Duration {
    (p95 * LATE_FACTOR).max(LEAST_LATE)
}

impl Page {
    /// It has answered. A late answer leaves it late.
    fn lives(&mut self, now: Instant) {
        if self.is_silent() {
            (self.silence, self.spoke_again) = (None, Some(now));
        }
        self.lived = Some(now);
    }

    /// Whether it has left a call unanswered and answered none since.
    fn is_silent(&self) -> bool {
        self.silence.is_some_and(|silence| silence.standing == Standing::Silent)
    }

    /// Whether it was silent at any time since `span` before `now`.
    fn was_silent_within(&self, span: Duration, now: Instant) -> bool {
        self.is_silent() || self.spoke_again.is_some_and(|then| then + span > now)
    }

    fn standing(&self, peer: &Peer, now: Instant) -> Standing {
        self.silence.map_or(Standing::Answers, |silence| silence.standing(peer, now))
    }
}

impl Pages {
    fn timing_of(&self, peer: &PeerId) -> Timing {
        self.peers.get(peer).map(|page| page.timing).unwrap_or_default()
    }

    fn score(&self, peer: &PeerId, now: Instant) -> f64 {
        if !self.any_lied {
            return 0.0;
        }
        self.peers.get(peer).map_or(0.0, |page| page.conduct.score(now))
    }

    /// The page of `peer`; a new one takes the place of another in a full book.
    fn page(&mut self, peer: &PeerId, now: Instant) -> &mut Page {
        if self.peers.len() >= MAX_PEERS && !self.peers.contains_key(peer) {
            let lied = |page: &Page| page.conduct.score(now) >= AVOIDED_FROM;
            let liars = self.peers.values().filter(|page| lied(page)).count();
            let keep_liars = liars <= MAX_LIARS;
            let standing = |page: &Page| (keep_liars && lied(page), page.heard);
            let least = self.peers.iter().min_by_key(|(_, page)| standing(page));
            if let Some(least) = least.map(|(id, _)| *id) {
                self.peers.remove(&least);
            }
        }
        self.peers.entry(*peer).or_insert_with(|| Page { heard: now, ..Page::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(n: u32) -> PeerId {
        let mut id = [0; 32];
        id[..4].copy_from_slice(&n.to_be_bytes());
        PeerId(id)
    }

    fn at_home(n: u32) -> Peer {
        Peer { id: peer(n), addr: ([127, 0, 0, 1], 1).into() }
    }

    fn at(secs: u64) -> Instant {
        Instant::default() + Duration::from_secs(secs)
    }

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn unknown_peers_are_thought_of_as_all_the_others() {
        let book = PeerBook::default();
        assert_eq!((book.latency(&peer(1)), book.mean_latency()), (None, None));
        assert_eq!(book.expected(&peer(1)), FIRST_GUESS);
        for n in 0..20 {
            book.answered(&peer(n), MS * 40, at(0));
        }
        assert_eq!(book.latency(&peer(99)), None);
        assert_eq!(book.expected(&peer(99)), MS * 40);
        assert!(book.p95(&peer(99)) > MS * 40 && book.p95(&peer(99)) < MS * 100);
    }

    #[test]
    fn a_call_limit_follows_the_answer_times_of_a_peer_and_grows_while_it_is_silent() {
        let (book, least, most) = (PeerBook::default(), MS * 2000, MS * 10_000);
        assert_eq!(book.patience(&peer(1), least, most), least);
        (0..50).for_each(|n| book.answered(&peer(1), MS * 500, at(n)));
        let usual = book.patience(&peer(1), least, most);
        assert!(usual > MS * 3500 && usual < MS * 6000, "{usual:?}");
        book.silent(&at_home(1), at(51));
        assert!(book.patience(&peer(1), least, most) > usual);
        (0..9).for_each(|n| book.silent(&at_home(1), at(52 + n)));
        assert_eq!(book.patience(&peer(1), least, most), most);
    }

    #[test]
    fn a_silent_peer_is_expected_to_take_longer_until_it_answers() {
        let book = PeerBook::default();
        book.answered(&peer(1), MS * 10, at(0));
        (0..3).for_each(|_| book.silent(&at_home(1), at(1)));
        assert_eq!(book.expected(&peer(1)), MS * 80);
        assert_eq!(book.latency(&peer(1)), Some(MS * 10));
        (0..1000).for_each(|_| book.silent(&at_home(1), at(1)));
        assert_eq!(book.expected(&peer(1)), MS * 640);
        book.answered(&peer(1), MS * 10, at(2));
        assert_eq!(book.expected(&peer(1)), MS * 10);
    }

    #[test]
    fn a_peer_that_left_a_call_unanswered_comes_last_until_it_answers_or_calls() {
        let book = PeerBook::default();
        let standing = |secs| book.standing(&at_home(1), at(secs));
        book.late(&at_home(1), at(100));
        assert_eq!((standing(100), standing(110)), (Standing::Late, Standing::Answers));
        book.silent(&at_home(1), at(101));
        book.late(&at_home(1), at(102));
        assert_eq!((standing(110), standing(111)), (Standing::Silent, Standing::Answers));
        book.answered(&peer(1), MS, at(103));
        assert_eq!(standing(103), Standing::Answers);
        book.silent(&at_home(1), at(104));
        book.lives(&peer(1), at(105));
        assert_eq!(standing(105), Standing::Answers, "an answer that is not timed will do");
        book.late(&at_home(1), at(106));
        book.lives(&peer(1), at(107));
        assert_eq!(standing(107), Standing::Late, "it is slow, and lives");
    }

    /// A node that was stopped for ten seconds was given as long from then on.
    #[test]
    fn what_a_stopped_peer_answers_when_it_goes_on_is_not_its_usual_time() {
        let book = PeerBook::default();
        (0..20).for_each(|n| book.answered(&peer(1), MS * 10, at(n)));
        let usual = (book.p95(&peer(1)), book.expected(&peer(1)), book.mean_latency());
        // Calls were under way when it was stopped, a ping was not answered, and others were made in vain.
        book.silent(&at_home(1), at(102));
        for took in [10_000, 9_000, 2_000, 1_000, 300] {
            book.answered(&peer(1), MS * took, at(110));
            let now = (book.p95(&peer(1)), book.mean_latency());
            assert_eq!(now, (usual.0, usual.2), "after {took} ms");
            assert_eq!(book.standing(&at_home(1), at(110)), Standing::Answers);
        }
        assert_eq!(book.expected(&peer(1)), usual.1 * 2, "until an answer is timed");
        book.answered(&peer(1), MS * 10, at(110));
        assert!(book.expected(&peer(1)) < MS * 11);
        // A peer that has become slow is silent first, and then given longer.
        book.silent(&at_home(1), at(200));
        book.answered(&peer(1), MS * 3_000, at(203));
        assert!(book.patience(&peer(1), MS * 2_000, MS * 10_000) > MS * 3_000);
        book.answered(&peer(1), MS * 3_000, at(207));
        assert!(book.expected(&peer(1)) > MS * 300, "it is known to be slow");
        // Slow and never silent, it is known to be slow.
        (0..20).for_each(|n| book.answered(&peer(2), MS * 10, at(n)));
        (0..10).for_each(|_| book.answered(&peer(2), Duration::from_secs(10), at(110)));
        assert!(book.p95(&peer(2)) > Duration::from_secs(5));
    }

    #[test]
    fn a_peer_that_answered_another_call_meanwhile_counts_as_alive() {
        let book = PeerBook::default();
        book.silent(&at_home(1), at(5));
        assert!(!book.has_answered_since(&peer(1), at(1)), "it was called, and did not answer");
        book.lives(&peer(1), at(7));
        assert!(book.has_answered_since(&peer(1), at(6)));
        assert!(!book.has_answered_since(&peer(1), at(7)));
        assert!(!book.has_answered_since(&peer(2), at(0)));
    }

    #[test]
    fn a_silence_is_remembered_longer_each_time_up_to_a_bound() {
        let book = PeerBook::default();
        let mut now = at(0);
        let mut lengths = Vec::new();
        for _ in 0..6 {
            book.silent(&at_home(1), now);
            let start = now;
            while book.standing(&at_home(1), now) == Standing::Silent {
                now = now + Duration::from_secs(1);
            }
            lengths.push(now.since(start).as_secs());
        }
        assert_eq!(lengths, [10, 20, 40, 80, 80, 80]);
    }

    #[test]
    fn a_false_address_does_not_discredit_the_node() {
        let book = PeerBook::default();
        let elsewhere = Peer { addr: ([127, 0, 0, 1], 2).into(), ..at_home(1) };
        book.silent(&elsewhere, at(0));
        assert_eq!(book.standing(&elsewhere, at(1)), Standing::Silent);
        assert_eq!(book.standing(&at_home(1), at(1)), Standing::Answers);
    }

    #[test]
    fn an_answer_is_overdue_rather_later_than_it_nearly_always_comes() {
        let book = PeerBook::default();
        assert_eq!(book.late_after(&peer(1)), FIRST_GUESS * 4);
        (0..50).for_each(|n| book.answered(&peer(1), MS * 2, at(n)));
        assert_eq!(book.late_after(&peer(1)), LEAST_LATE);
        (0..50).for_each(|n| book.answered(&peer(2), MS * 200, at(n)));
        let late = book.late_after(&peer(2));
        assert!(late > MS * 400 && late < MS * 600, "{late:?}");
    }

    #[test]
    fn a_liar_is_avoided_until_its_score_has_faded() {
        let book = PeerBook::default();
        assert!((book.trust(&peer(1), at(0)) - 1.0).abs() < 1e-9);
        (0..3).for_each(|_| book.lied(&peer(1), Misdeed::DeniedBlock, at(0)));
        assert!(!book.is_avoided(&peer(1), at(0)) && book.trust(&peer(1), at(0)) < 0.6);
        book.lied(&peer(1), Misdeed::DeniedBlock, at(0));
        assert!(book.is_avoided(&peer(1), at(0)) && !book.is_avoided(&peer(2), at(0)));
        assert_eq!(book.avoided(at(0)).len(), 1);
        assert!(!book.is_avoided(&peer(1), at(3600)));
    }

    /// Otherwise a liar would be forgiven as soon as it is no longer asked.
    #[test]
    fn a_full_book_keeps_its_liars_and_forgets_the_peer_heard_of_least_recently() {
        let book = PeerBook::default();
        book.lied(&peer(0), Misdeed::BadBlock, at(0));
        for n in 1..=MAX_PEERS as u32 + 9 {
            book.answered(&peer(n), MS, at(u64::from(n) / 100));
        }
        let pages = book.lock();
        assert_eq!(pages.peers.len(), MAX_PEERS);
        assert!(pages.peers.contains_key(&peer(0)) && !pages.peers.contains_key(&peer(1)));
        assert!(pages.peers.contains_key(&peer(MAX_PEERS as u32 + 9)));
    }

    #[test]
    fn a_flood_of_liars_does_not_fill_the_book() {
        let book = PeerBook::default();
        book.answered(&peer(9_000_000), MS, at(1));
        for n in 0..3 * MAX_PEERS as u32 {
            book.lied(&peer(n), Misdeed::BadBlock, at(0));
        }
        assert_eq!(book.lock().peers.len(), MAX_PEERS);
        assert!(book.latency(&peer(9_000_000)).is_some(), "heard of last, kept longest");
    }
}
