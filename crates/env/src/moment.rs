//! A point of time by both clocks of a machine.
//!
//! The steady clock stands still while the machine sleeps, and the wall clock may be set back. What another machine
//! has promised for a time ends by the clock that has advanced further.
//!
//! It does not notice that the wall clock was set back while the machine slept.

use std::ops::Add;
use std::time::Duration;

use crate::{Instant, Runtime};

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Moment {
    /// By the steady clock.
    pub steady: Instant,
    /// By the wall clock: milliseconds since 1970.
    pub unix_ms: u64,
}

impl Moment {
    /// What the clocks say.
    pub fn now(env: &dyn Runtime) -> Moment {
        Moment { steady: env.now(), unix_ms: env.unix_ms() }
    }

    /// Time left until `later`: zero if that has passed by either clock.
    pub fn until(self, later: Moment) -> Duration {
        let wall = Duration::from_millis(later.unix_ms.saturating_sub(self.unix_ms));
        later.steady.since(self.steady).min(wall)
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    fn add(self, delay: Duration) -> Moment {
        let ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        Moment { steady: self.steady + delay, unix_ms: self.unix_ms.saturating_add(ms) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(steady_secs: u64, wall_secs: u64) -> Moment {
        Moment { steady: Instant(steady_secs * 1_000_000_000), unix_ms: wall_secs * 1_000 }
    }

    #[test]
    fn time_is_over_when_it_is_over_by_one_of_the_clocks() {
        let until = at(100, 1_000) + Duration::from_secs(14);
        let left = |steady, wall| at(steady, wall).until(until).as_secs();
        assert_eq!([left(100, 1_000), left(104, 1_004)], [14, 10]);
        assert_eq!(left(101, 1_500), 0, "the machine has slept");
        assert_eq!([left(113, 900), left(114, 900)], [1, 0], "the wall clock was set back");
    }
}
