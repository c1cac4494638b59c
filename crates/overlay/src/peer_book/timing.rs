//! How long one peer, or all of them together, take to answer.

use std::time::Duration;

/// The share of answers a quantile estimate is to cover.
const QUANTILE: f64 = 0.95;
/// An answer later than the quantile raises the estimate by this many deviations, an
/// earlier one lowers it so much less that both balance at [`QUANTILE`]. A guess: it is
/// near after some twenty answers, and covers rather more where a few come very late.
const GAIN: f64 = 1.0;
/// The least deviation that steps are taken from, as a share of the mean: or an estimate
/// could not come down again once answers take equally long.
const LEAST_DEVIATION: f64 = 1.0 / 8.0;
/// A quantile is at least this share above the mean, and at least [`GRANULARITY_SECS`]:
/// with peers that always take the same time, rounding is not lateness.
const MARGIN: f64 = 1.0 / 16.0;
/// RFC 6298 §2 calls it G. A guess: the delay that a scheduler may add.
const GRANULARITY_SECS: f64 = 0.001;
/// After so many calls in a row without an answer a peer is not thought slower still.
const MAX_BACKOFF: u32 = 6;
/// After so many it is not put last for longer still: one that comes back is to be noticed.
const MAX_SILENCE_BACKOFF: u32 = 3;

/// Running estimates: the mean and its deviation as in RFC 6298 (gains of 1/8 and 1/4),
/// and the 95 % quantile by stochastic approximation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Timing {
    smoothed_secs: f64,
    deviation_secs: f64,
    quantile_secs: f64,
    answers: u64,
    /// Calls without an answer since the last one.
    silences: u32,
}

impl Timing {
    /// A call was answered after `secs`.
    pub(super) fn answered(&mut self, secs: f64) {
        self.silences = 0;
        self.answers += 1;
        // The first call pays for the connection: a shorter second one is the measure.
        if self.answers == 1 || (self.answers == 2 && secs < self.smoothed_secs) {
            self.smoothed_secs = secs;
            self.deviation_secs = secs / 2.0;
            self.quantile_secs = secs * 1.5;
            return;
        }
        self.deviation_secs += ((secs - self.smoothed_secs).abs() - self.deviation_secs) / 4.0;
        self.smoothed_secs += (secs - self.smoothed_secs) / 8.0;
        let step = GAIN * self.deviation_secs.max(self.smoothed_secs * LEAST_DEVIATION);
        if secs > self.quantile_secs {
            self.quantile_secs += step * QUANTILE;
        } else {
            self.quantile_secs -= step * (1.0 - QUANTILE);
        }
    }

    /// A call was not answered.
    pub(super) fn silent(&mut self) {
        self.silences = (self.silences + 1).min(MAX_BACKOFF);
    }

    /// Whether anything was measured.
    pub(super) fn is_measured(&self) -> bool {
        self.answers > 0
    }

    /// The mean.
    pub(super) fn mean(&self) -> Duration {
        Duration::from_secs_f64(self.smoothed_secs)
    }

    /// The time within which 95 % of the answers come.
    pub(super) fn p95(&self) -> Duration {
        let margin = (self.smoothed_secs * MARGIN).max(GRANULARITY_SECS);
        Duration::from_secs_f64(self.quantile_secs.max(self.smoothed_secs + margin))
    }

    /// How much longer than measured to expect an answer: twice as long for every call
    /// that brought none (RFC 6298 §5.5).
    pub(super) fn backoff(&self) -> u32 {
        1 << self.silences
    }

    /// How many times as long as the first silence the present one is held against the peer.
    pub(super) fn backoff_of_silence(&self) -> u32 {
        1 << self.silences.saturating_sub(1).min(MAX_SILENCE_BACKOFF)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A generator of numbers from 0 to 1.
    fn dice(state: &mut u64) -> f64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (*state >> 11) as f64 / (1u64 << 53) as f64
    }

    #[test]
    fn the_quantile_covers_about_95_in_100_answers() {
        let mut state = 1;
        let mut exponential = || 0.05 - 0.02 * dice(&mut state).ln();
        let mut timing = Timing::default();
        for _ in 0..200 {
            timing.answered(exponential());
        }
        let mut covered = 0;
        for _ in 0..2000 {
            let secs = exponential();
            covered += u32::from(secs <= timing.p95().as_secs_f64());
            timing.answered(secs);
        }
        assert!((1860..=1960).contains(&covered), "{covered} of 2,000");
    }

    #[test]
    fn a_peer_that_has_become_slow_is_known_to_be_after_few_answers() {
        let mut timing = Timing::default();
        (0..50).for_each(|_| timing.answered(0.02));
        assert!(timing.p95() < Duration::from_millis(30), "{:?}", timing.p95());
        (0..10).for_each(|_| timing.answered(0.2));
        assert!(timing.p95() > Duration::from_millis(190), "{:?}", timing.p95());
    }

    #[test]
    fn the_first_call_which_opens_the_connection_is_forgotten_for_a_faster_one() {
        let mut timing = Timing::default();
        timing.answered(0.3);
        timing.answered(0.1);
        assert_eq!(timing.mean(), Duration::from_millis(100));
    }
}
