//! The steady clock of a host, which may run faster or slower than virtual time.

/// See the module. Times are nanoseconds since the simulation began.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct HostClock {
    /// When its rate was set, in virtual time.
    since: u64,
    /// What it showed then.
    showed: u64,
    /// How much faster it runs, parts per million.
    ahead_ppm: i32,
}

const MILLION: i128 = 1_000_000;

impl HostClock {
    /// Changes its rate. What it shows does not jump.
    pub(crate) fn set_rate(&mut self, now: u64, ahead_ppm: i32) {
        assert!(i128::from(ahead_ppm) > -MILLION, "a clock does not stand still");
        *self = HostClock { since: now, showed: self.shows(now), ahead_ppm };
    }

    fn rate(self) -> i128 {
        MILLION + i128::from(self.ahead_ppm)
    }

    /// What it shows at a virtual time that is not before the rate was set.
    pub(crate) fn shows(self, now: u64) -> u64 {
        let passed = i128::from(now.saturating_sub(self.since)) * self.rate() / MILLION;
        self.showed.saturating_add(u64::try_from(passed).unwrap_or(u64::MAX))
    }

    /// The first virtual time at which it shows `at` or more.
    pub(crate) fn when(self, at: u64) -> u64 {
        let left = i128::from(at.saturating_sub(self.showed)) * MILLION;
        let left = (left + self.rate() - 1) / self.rate();
        self.since.saturating_add(u64::try_from(left).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_runs_at_its_rate_and_does_not_jump_when_that_changes() {
        let mut clock = HostClock::default();
        assert_eq!((clock.shows(7), clock.when(7)), (7, 7));
        clock.set_rate(1_000_000, 50_000);
        assert_eq!(clock.shows(1_000_000), 1_000_000);
        assert_eq!(clock.shows(3_000_000), 3_100_000);
        clock.set_rate(3_000_000, -50_000);
        assert_eq!(clock.shows(3_000_000), 3_100_000);
        assert_eq!(clock.shows(4_000_000), 4_050_000);
        for at in [3_100_000, 3_100_001, 4_049_999, 4_050_000, 9_999_999] {
            let due = clock.when(at);
            assert!(clock.shows(due) >= at && (due == 3_000_000 || clock.shows(due - 1) < at));
        }
        assert_eq!(clock.when(u64::MAX), u64::MAX);
    }
}
