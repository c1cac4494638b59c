//! How fast bytes go over a connection that has some to carry.

use std::time::Duration;

use tokio::time::Instant;

/// Counts bytes and finds out when they go too slowly. Time is passed in.
pub(super) struct Pace {
    since: Instant,
    bytes: u64,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Pace {
        Pace { since: now, bytes: 0 }
    }

    pub(super) fn add(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// Nothing waits to be carried: counts anew from now.
    pub(super) fn restart(&mut self, now: Instant) {
        *self = Pace::new(now);
    }

    /// Whether fewer bytes than so many a second were carried during `window`; counts anew
    /// at the end of each.
    pub(super) fn is_too_slow(
        &mut self,
        now: Instant,
        window: Duration,
        least_per_sec: u64,
    ) -> bool {
        let passed = now.saturating_duration_since(self.since);
        if passed < window {
            return false;
        }
        let least = u128::from(least_per_sec) * passed.as_millis() / 1000;
        let is_slow = u128::from(self.bytes) < least;
        self.restart(now);
        is_slow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_carried_is_measured_over_each_window() {
        let began = Instant::now();
        let window = Duration::from_secs(80);
        let mut pace = Pace::new(began);
        let mut is_slow = |bytes: usize, secs: u64| {
            pace.add(bytes);
            pace.is_too_slow(began + Duration::from_secs(secs), window, 1000)
        };
        assert!(!is_slow(0, 79), "not yet");
        assert!(!is_slow(80_000, 80));
        assert!(is_slow(79_999, 160), "the first window's bytes do not count in the second");
        assert!(!is_slow(90_000, 250), "a late look expects more");
    }
}
