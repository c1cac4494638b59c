//! A bucket of bytes that fills at the budgeted rate and is drained by real traffic.
//!
//! Accordion, NSDI 2005: the user names a rate, and a node explores with the part of it that its
//! other traffic leaves. It counts every overlay message this node sends or receives as part of its
//! upkeep, requests and replies, headers and [`MESSAGE_OVERHEAD_BYTES`] each. Lookups are not
//! upkeep. The bucket may be overdrawn by as much as it holds, so that a burst is paid for later
//! and not at once forgotten.

use atoll_env::Instant;
use std::time::Duration;

/// Bytes on the wire of a message besides its header: TCP and IP headers, a TLS record,
/// our frame. A guess, the simulator's own.
pub const MESSAGE_OVERHEAD_BYTES: usize = 96;
/// The bucket holds the rate of so many seconds. A guess: longer than any period of upkeep, shorter
/// than people watch.
const BURST_SECS: u64 = 30;

/// A newcomer may spend the rate of so many seconds in advance: its table is empty, and sessions
/// are far longer.
const ADVANCE_SECS: u64 = 128;

/// See the module.
#[derive(Clone, Debug)]
pub struct Budget {
    bytes_per_sec: u64,
    tokens: i64,
    filled_at: Instant,
}

impl Budget {
    /// A newcomer's bucket.
    pub fn new(bytes_per_sec: u64, now: Instant) -> Budget {
        let mut budget = Budget { bytes_per_sec, tokens: 0, filled_at: now };
        let advance = bytes_per_sec.saturating_mul(ADVANCE_SECS);
        budget.tokens = i64::try_from(advance).unwrap_or(i64::MAX / 2);
        budget
    }

    /// It has its table already and is no newcomer.
    pub fn forgo_advance(&mut self) {
        self.tokens = self.tokens.min(0);
    }

    fn most(&self) -> i64 {
        i64::try_from(self.bytes_per_sec.saturating_mul(BURST_SECS)).unwrap_or(i64::MAX / 2)
    }

    /// A message with a header of `header_bytes` was sent or received.
    pub fn spend(&mut self, header_bytes: usize, now: Instant) {
        self.fill(now);
        let bytes = (header_bytes + MESSAGE_OVERHEAD_BYTES) as u64;
        let floor = -self.most().max(1);
        self.tokens = (self.tokens - i64::try_from(bytes).unwrap_or(i64::MAX / 2)).max(floor);
    }

    fn fill(&mut self, now: Instant) {
        let elapsed = now.since(self.filled_at);
        let bytes = elapsed.as_nanos() * u128::from(self.bytes_per_sec) / 1_000_000_000;
        if bytes == 0 {
            return;
        }
        // Only the time that was turned into whole bytes is over.
        let used = bytes * 1_000_000_000 / u128::from(self.bytes_per_sec);
        self.filled_at =
            self.filled_at + Duration::from_nanos(u64::try_from(used).unwrap_or(u64::MAX));
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX / 2);
        let filled = self.tokens.saturating_add(bytes).min(self.most());
        self.tokens = self.tokens.max(filled);
    }

    /// How long until `bytes` can be spent without overdrawing; zero if they can be now.
    /// At most `limit`.
    pub fn wait_for(&mut self, bytes: usize, now: Instant, limit: Duration) -> Duration {
        self.fill(now);
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX / 2).min(self.most());
        let lacking = u128::try_from(bytes.saturating_sub(self.tokens)).unwrap_or(0);
        let rate = u128::from(self.bytes_per_sec.max(1));
        let nanos = lacking * 1_000_000_000 / rate;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).min(limit)
    }

    /// Whether it is overdrawn by more than half of the most.
    pub fn is_exhausted(&self, now: Instant) -> bool {
        let mut filled = self.clone();
        filled.fill(now);
        filled.tokens < -self.most() / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Instant {
        Instant::default() + Duration::from_secs(secs)
    }

    #[test]
    fn spending_waits_for_the_rate_and_no_longer() {
        let mut budget = Budget::new(100, at(0));
        let limit = Duration::from_secs(1000);
        assert_eq!(budget.wait_for(3000, at(0), limit), Duration::ZERO);
        budget.spend(12_800 - MESSAGE_OVERHEAD_BYTES, at(0));
        assert_eq!(budget.wait_for(500, at(0), limit), Duration::from_secs(5));
        assert_eq!(budget.wait_for(500, at(4), limit), Duration::from_secs(1));
        assert_eq!(budget.wait_for(500, at(5), limit), Duration::ZERO);
    }

    #[test]
    fn neither_credit_nor_debt_grows_without_bound() {
        let mut budget = Budget::new(100, at(0));
        for _ in 0..100 {
            budget.spend(1000, at(0));
        }
        assert!(budget.is_exhausted(at(0)));
        let limit = Duration::from_secs(1000);
        assert_eq!(budget.wait_for(0, at(0), limit), Duration::from_secs(BURST_SECS));
        budget.spend(0, at(100_000));
        assert!(budget.wait_for(3000, at(100_000), limit) > Duration::ZERO, "no more than full");
        assert!(!budget.is_exhausted(at(100_000)));
    }

    #[test]
    fn small_steps_of_time_are_not_lost() {
        let mut budget = Budget::new(7, at(0));
        budget.spend(7 * 128 - MESSAGE_OVERHEAD_BYTES, at(0));
        let mut now = at(0);
        for _ in 0..1000 {
            now = now + Duration::from_millis(1);
            budget.fill(now);
        }
        assert_eq!(budget.tokens, 7);
    }

    #[test]
    fn a_budget_of_zero_waits_for_the_limit() {
        let mut budget = Budget::new(0, at(0));
        budget.spend(1, at(0));
        assert_eq!(
            budget.wait_for(1, at(9), Duration::from_secs(60)),
            Duration::from_secs(1).min(Duration::from_secs(60))
        );
    }
}
