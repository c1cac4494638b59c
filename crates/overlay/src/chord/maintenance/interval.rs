//! The adaptive interval of stabilisation and of the search for other rings: every period while
//! anything changes, up to [`MAX_FACTOR`] periods while nothing does.
//!
//! CFS §4.2 leaves the period of stabilisation open. One call a second to the successor and one
//! from the predecessor cost half a kilobyte a second, half of the budget of all maintenance. The
//! neighbourhood of a node with sixteen successors that each stay for two hours changes every few
//! minutes. In between rounds may be rarer, and the traffic saved goes to the routing table. Any
//! change restores the period: here, and at the neighbours, which are told of changes at once.
//!
//! It does not define a change: the caller passes a number that changes with it.

/// Rounds without a change before the interval doubles. A guess.
const ROUNDS_A_FACTOR: u32 = 8;
/// The longest interval, in periods. A guess: a successor that fails is detected after half of
/// that and a call's limit on average; lookups do not wait for it.
pub(in crate::chord) const MAX_FACTOR: u32 = 4;

/// How many rounds found nothing changed.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::chord) struct AdaptiveInterval {
    seen: Option<u64>,
    rounds: u32,
}

impl AdaptiveInterval {
    /// Records the end of a round. `state` changes when anything does that the interval adapts
    /// to; `expects_change` says that something will probably change soon.
    pub(in crate::chord) fn record_round(&mut self, state: u64, expects_change: bool) {
        if expects_change || self.seen != Some(state) {
            self.rounds = 0;
        } else {
            self.rounds = self.rounds.saturating_add(1);
        }
        self.seen = Some(state);
    }

    /// Something has changed, or will.
    pub(in crate::chord) fn reset(&mut self) {
        self.rounds = 0;
    }

    /// Periods to the next round: 1, 2 or 4.
    pub(in crate::chord) fn factor(&self) -> u32 {
        (1 << (self.rounds / ROUNDS_A_FACTOR).min(2)).min(MAX_FACTOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_grows_while_nothing_changes_and_is_restored_at_once_by_a_change() {
        let mut interval = AdaptiveInterval::default();
        let mut factors = Vec::new();
        for _ in 0..40 {
            interval.record_round(7, false);
            factors.push(interval.factor());
        }
        assert!(factors.is_sorted());
        assert_eq!((factors.first(), factors.last()), (Some(&1), Some(&MAX_FACTOR)));
        assert_eq!(factors.iter().filter(|f| **f == 2).count(), ROUNDS_A_FACTOR as usize);
        interval.record_round(8, false);
        assert_eq!(interval.factor(), 1);
        (0..40).for_each(|_| interval.record_round(8, false));
        interval.record_round(8, true);
        assert_eq!(interval.factor(), 1);
        (0..40).for_each(|_| interval.record_round(8, false));
        interval.reset();
        assert_eq!(interval.factor(), 1);
    }
}
