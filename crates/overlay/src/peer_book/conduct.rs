//! Misdeeds of a peer, and how long they are held against it.

use std::time::Duration;

use atoll_env::Instant;

/// Something a peer did that an honest, healthy node does not do, or not often.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Misdeed {
    /// Sent bytes that do not match their key. Proven.
    BadBlock,
    /// Did not have a block that it should hold and others do hold. A newcomer that is
    /// still being supplied looks the same for a while.
    DeniedBlock,
    /// Acknowledged a block that no node has to which it should have sent it.
    LostBlock,
    /// Asked for the way, named no node nearer to the key than itself.
    LedInCircles,
    /// Was named, or named itself, as the root of a key whose root is nearer, or did so
    /// amid neighbours too far apart to be neighbours.
    FalseRoot,
    /// Named nodes that do not answer.
    NamedDead,
}

impl Misdeed {
    /// How heavily it weighs: a peer with [`AVOIDED_FROM`] is avoided. All guesses; a misdeed that
    /// can happen to an honest node weighs so little that only many of them count.
    fn weight(self) -> f64 {
        match self {
            Misdeed::BadBlock => 2.0,
            Misdeed::FalseRoot | Misdeed::LostBlock => 0.4,
            Misdeed::LedInCircles | Misdeed::DeniedBlock => 0.25,
            Misdeed::NamedDead => 0.1,
        }
    }
}

/// A peer with so heavy a score is asked only when no other is left.
pub(super) const AVOIDED_FROM: f64 = 1.0;
/// A score halves in this time. A guess: long enough that a liar gains little by waiting,
/// short enough that a repaired node is used again the same hour.
const HALF_LIFE: Duration = Duration::from_secs(20 * 60);
/// No score is heavier: after three half-lives every peer gets another chance.
const HEAVIEST: f64 = 8.0;

/// A score that fades.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Conduct {
    score: f64,
    at: Instant,
}

impl Conduct {
    /// The peer did this at `now`.
    pub(super) fn lied(&mut self, misdeed: Misdeed, now: Instant) {
        self.score = (self.score(now) + misdeed.weight()).min(HEAVIEST);
        self.at = now;
    }

    /// The score now; 0 without a misdeed.
    pub(super) fn score(&self, now: Instant) -> f64 {
        if self.score == 0.0 {
            return 0.0;
        }
        let half_lives = now.since(self.at).as_secs_f64() / HALF_LIFE.as_secs_f64();
        self.score * (-half_lives).exp2()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Instant {
        Instant::default() + Duration::from_secs(secs)
    }

    #[test]
    fn one_bad_block_is_enough_and_one_stale_answer_is_not() {
        let mut conduct = Conduct::default();
        conduct.lied(Misdeed::NamedDead, at(0));
        assert!(conduct.score(at(0)) < AVOIDED_FROM);
        conduct.lied(Misdeed::BadBlock, at(0));
        assert!(conduct.score(at(0)) >= AVOIDED_FROM);
    }

    #[test]
    fn a_score_fades_and_is_bounded() {
        let mut conduct = Conduct::default();
        (0..1000).for_each(|_| conduct.lied(Misdeed::BadBlock, at(0)));
        assert!((conduct.score(at(0)) - HEAVIEST).abs() < 1e-9);
        let half = conduct.score(at(HALF_LIFE.as_secs()));
        assert!((half - HEAVIEST / 2.0).abs() < 1e-9, "{half}");
        assert!(conduct.score(at(4 * HALF_LIFE.as_secs())) < AVOIDED_FROM);
    }
}
