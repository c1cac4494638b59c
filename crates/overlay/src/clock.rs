//! The network's time.
//!
//! Leases and receipts need wall clocks that agree within an hour. A machine without a battery for
//! its clock starts in 1970, and others are set wrongly. So nodes tell each other their wall clocks
//! when they check each other (`chord::messages::Alive`), and each takes the median of the clocks
//! it was told first-hand and of its own for the network's time, provided that there are at least
//! [`MIN_CLOCKS`] and that its own clock is not among a majority that agrees. A minority of liars
//! therefore moves no honest node's time: where the own clock is right, it agrees with the honest
//! majority, and where it is wrong, the median lies between the clocks of honest nodes.
//!
//! An address has one vote, whatever runs there (an IPv6 network of 64 bits too): keys cost
//! nothing. Votes are kept against monotonic time, so that setting the own clock is seen at once.
//! Nodes tell their own clock, never the corrected one.
//!
//! [`network_time`] makes a [`Runtime`] whose wall clock is corrected so.
//!
//! Plain data otherwise; time is an argument.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{BoxFuture, Env, Instant, Runtime, Task};
use atoll_net::Peer;

use crate::Overlay;
use crate::site::site;

/// Clocks that differ by no more agree. A guess: machines that ask a time server are within a
/// second, and two that both are so far off still agree within the hour that receipts allow.
pub const TOLERANCE: Duration = Duration::from_secs(600);
/// The fewest clocks, the own one included, that make a majority.
pub const MIN_CLOCKS: usize = 3;
/// The most addresses whose clocks are kept.
pub const MAX_VOTES: usize = 64;
/// How long a vote counts: twice as long as it takes until neighbours are checked again.
const VOTE_LASTS: Duration = Duration::from_secs(3600);
/// Later clocks are not believed: the year 10000.
const MAX_UNIX_MS: u64 = 253_402_300_800_000;

/// A peer's clock, as the peer said.
#[derive(Clone, Copy, Debug)]
struct Vote {
    peer: Peer,
    /// Its wall clock less this node's monotonic time, milliseconds.
    ahead_ms: i64,
    at: Instant,
}

/// The clocks of others, as they said themselves.
#[derive(Clone, Debug, Default)]
pub struct ClockVotes(BTreeMap<IpAddr, Vote>);

/// How this node's clock stands among others.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ClockReport {
    /// How many other addresses have told their clocks lately.
    pub compared: usize,
    /// How many of them agree with this node's clock.
    pub agreeing: usize,
    /// The difference of the network's time from this node's clock, milliseconds; 0
    /// unless a majority contradicts it.
    pub correction_ms: i64,
    /// Peers whose clocks are wrong by the network's time, and by how much, milliseconds; none
    /// if no majority agrees.
    pub wrong: Vec<(Peer, i64)>,
    /// If no majority agrees: peers whose clocks contradict this node's, and by how much they are
    /// ahead of it, milliseconds.
    pub undecided: Vec<(Peer, i64)>,
}

fn monotonic_ms(now: Instant) -> i64 {
    i64::try_from(now.as_nanos() / 1_000_000).unwrap_or(i64::MAX)
}

fn agrees(difference_ms: i64) -> bool {
    u128::from(difference_ms.unsigned_abs()) <= TOLERANCE.as_millis()
}

impl ClockVotes {
    /// `peer`, which was reached at its address, says that its wall clock is at `unix_ms`.
    pub fn heard(&mut self, peer: Peer, unix_ms: u64, now: Instant) {
        if unix_ms > MAX_UNIX_MS {
            return;
        }
        let address = site(peer.addr.ip());
        if self.0.len() >= MAX_VOTES && !self.0.contains_key(&address) {
            let oldest = self.0.iter().min_by_key(|(_, vote)| vote.at).map(|(at, _)| *at);
            oldest.map(|oldest| self.0.remove(&oldest));
        }
        let ahead_ms = unix_ms.cast_signed() - monotonic_ms(now);
        self.0.insert(address, Vote { peer, ahead_ms, at: now });
    }

    /// By how much the clocks of others are ahead of the own one.
    fn differences(&self, own_unix_ms: u64, now: Instant) -> Vec<(Peer, i64)> {
        let own = own_unix_ms.min(MAX_UNIX_MS).cast_signed() - monotonic_ms(now);
        let fresh = self.0.values().filter(|vote| now.since(vote.at) < VOTE_LASTS);
        fresh.map(|vote| (vote.peer, vote.ahead_ms - own)).collect()
    }

    /// The difference of the network's time from the own clock, milliseconds.
    pub fn correction_ms(&self, own_unix_ms: u64, now: Instant) -> i64 {
        correction_ms(&self.differences(own_unix_ms, now))
    }

    /// How the own clock stands among others.
    pub fn report(&self, own_unix_ms: u64, now: Instant) -> ClockReport {
        let differences = self.differences(own_unix_ms, now);
        let correction_ms = correction_ms(&differences);
        let off = |(peer, ahead): &(Peer, i64)| (*peer, ahead - correction_ms);
        let mut wrong: Vec<(Peer, i64)> = differences.iter().map(off).collect();
        wrong.retain(|(_, off_ms)| !agrees(*off_ms));
        let right = differences.len() - wrong.len() + usize::from(correction_ms == 0);
        let mut undecided = Vec::new();
        if right * 2 <= differences.len() + 1 {
            wrong.clear();
            undecided.extend(differences.iter().filter(|(_, ahead)| !agrees(*ahead)));
        }
        ClockReport {
            compared: differences.len(),
            agreeing: differences.iter().filter(|(_, ahead)| agrees(*ahead)).count(),
            correction_ms,
            wrong,
            undecided,
        }
    }
}

/// The median of all clocks, the own one included, unless half of all agree with the own one.
fn correction_ms(differences: &[(Peer, i64)]) -> i64 {
    let mut clocks: Vec<i64> = differences.iter().map(|(_, ahead)| *ahead).chain([0]).collect();
    let agreeing = clocks.iter().filter(|ahead| agrees(**ahead)).count();
    if clocks.len() < MIN_CLOCKS || agreeing * 2 >= clocks.len() {
        return 0;
    }
    clocks.sort_unstable();
    let middle = clocks.len() / 2;
    // Of two in the middle, the one nearer to the own clock.
    let medians = &clocks[(clocks.len() - 1) / 2..=middle];
    let median = medians.iter().copied().min_by_key(|ahead| ahead.unsigned_abs());
    median.filter(|ahead| !agrees(*ahead)).unwrap_or(0)
}

/// `env` with its wall clock corrected by the clocks that `overlay` has heard of.
pub fn network_time(env: Env, overlay: Arc<dyn Overlay>) -> Env {
    Arc::new(NetworkTime { env, overlay })
}

/// A runtime whose wall clock is the network's.
struct NetworkTime {
    env: Env,
    overlay: Arc<dyn Overlay>,
}

impl Runtime for NetworkTime {
    fn now(&self) -> Instant {
        self.env.now()
    }

    fn unix_ms(&self) -> u64 {
        self.env.unix_ms().saturating_add_signed(self.overlay.clock_correction_ms())
    }

    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        self.env.sleep_until(at)
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) -> Task {
        self.env.spawn(task)
    }

    fn random_u64(&self) -> u64 {
        self.env.random_u64()
    }
}

#[cfg(test)]
mod tests {
    use std::iter::repeat_n;

    use atoll_key::PeerId;
    use proptest::prelude::*;

    use super::*;

    const NOW: Instant = Instant(5_000_000_000);
    const TRUE_MS: u64 = 1_800_000_000_000;
    const YEAR_MS: i64 = 365 * 24 * 3600 * 1000;

    fn peer(n: u8) -> Peer {
        Peer { id: PeerId([n; 32]), addr: ([10, 0, 0, n], 1).into() }
    }

    /// Peers whose clocks are off by so much, each at an address of its own.
    fn votes(off_ms: &[i64]) -> ClockVotes {
        let mut votes = ClockVotes::default();
        for (n, off) in (1..).zip(off_ms) {
            votes.heard(peer(n), TRUE_MS.saturating_add_signed(*off), NOW);
        }
        votes
    }

    #[test]
    fn a_wrong_clock_is_corrected_once_two_others_agree() {
        let wrong = TRUE_MS.saturating_add_signed(-56 * YEAR_MS);
        assert_eq!(votes(&[0]).correction_ms(wrong, NOW), 0, "one against one");
        assert_eq!(votes(&[0, 0]).correction_ms(wrong, NOW), 56 * YEAR_MS);
        let report = votes(&[0, 900, -900, YEAR_MS]).report(wrong, NOW);
        assert_eq!((report.compared, report.agreeing), (4, 0));
        assert!((report.correction_ms - 56 * YEAR_MS).abs() <= 900);
        assert_eq!(report.wrong.len(), 1);
        assert_eq!(report.wrong[0].0, peer(4));
    }

    #[test]
    fn a_small_difference_corrects_nothing() {
        let tolerance = TOLERANCE.as_millis() as i64;
        let votes = votes(&[tolerance; 5]);
        assert_eq!(votes.correction_ms(TRUE_MS, NOW), 0);
        assert_eq!(votes.correction_ms(TRUE_MS - 1, NOW), tolerance + 1);
    }

    #[test]
    fn setting_the_clock_right_is_seen_at_once_and_old_votes_do_not_count() {
        let votes = votes(&[0, 0, 0]);
        let later = NOW + Duration::from_secs(60);
        assert_eq!(votes.correction_ms(7_000, later), TRUE_MS as i64 + 60_000 - 7_000);
        assert_eq!(votes.correction_ms(TRUE_MS + 60_000, later), 0);
        assert_eq!(votes.correction_ms(7_000, NOW + VOTE_LASTS), 0);
    }

    #[test]
    fn an_address_has_one_vote_and_few_are_kept() {
        let mut votes = votes(&[0, 0, 0]);
        for n in 0..200 {
            let liar = Peer { id: PeerId([n; 32]), addr: ([10, 9, 9, 9], u16::from(n)).into() };
            votes.heard(liar, TRUE_MS + 9 * YEAR_MS as u64, NOW);
        }
        assert_eq!(votes.correction_ms(TRUE_MS, NOW), 0);
        assert_eq!(votes.report(TRUE_MS, NOW).wrong.len(), 1);
        (0..200).for_each(|n| votes.heard(peer(n), u64::MAX, NOW));
        assert_eq!(votes.report(TRUE_MS, NOW).compared, 4, "a senseless clock is no vote");
        (0..200).for_each(|n| votes.heard(peer(n), TRUE_MS, NOW));
        assert_eq!(votes.report(TRUE_MS, NOW).compared, MAX_VOTES);
    }

    #[test]
    fn an_even_split_of_clocks_corrects_no_clock_and_reports_none_as_wrong() {
        let votes = votes(&[0, YEAR_MS, YEAR_MS]);
        let report = votes.report(TRUE_MS, NOW);
        assert_eq!((report.correction_ms, report.wrong), (0, Vec::new()));
        assert_eq!(report.undecided, [(peer(2), YEAR_MS), (peer(3), YEAR_MS)]);
    }

    proptest! {
        #[test]
        fn a_minority_of_liars_moves_no_honest_nodes_time_beyond_the_tolerance(
            honest in 2usize..30,
            lies in proptest::collection::vec(any::<i32>(), 0..30),
            own in prop_oneof![Just(0i64), -1_000_000_000_000..1_000_000_000_000i64],
        ) {
            // The honest ones besides this node are a majority of all, this node included.
            let liars = lies.len().min(honest - 2);
            let lies = lies[..liars].iter().map(|secs| i64::from(*secs) * 1000);
            let all: Vec<i64> = repeat_n(0, honest).chain(lies).collect();
            let votes = votes(&all);
            let own_ms = TRUE_MS.saturating_add_signed(own);
            let correction = votes.correction_ms(own_ms, NOW);
            prop_assert!(agrees(own + correction), "{own} {correction} {all:?}");
            if agrees(own) {
                prop_assert_eq!(correction, 0);
            }
        }
    }
}
