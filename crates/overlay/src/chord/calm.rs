//! How often to stabilise, and to look for other rings: every period while anything changes,
//! up to four times as rarely while nothing does.
//!
//! Chord's stabilisation is run "periodically" (CFS §4.2 leaves the period open); one call a
//! second to the successor, and one from the predecessor, cost half a kilobyte a second, half
//! of what upkeep may cost at all. A neighbourhood of sixteen nodes that each stay for two
//! hours changes every few minutes: in between the rounds may be rarer, and what is saved
//! goes to the routing table. (The walk that looks for other rings costs as much again.)
//! Whatever changes brings the period back, here and, because neighbours are told of changes
//! at once, with them.
//!
//! It does not know what a change is: the caller says what it saw.

/// Rounds at a pace before the next slower one. A guess.
const ROUNDS_A_PACE: u32 = 8;
/// The slowest pace, in periods. A guess: a successor that dies without a word is missed
/// after half of that and a call's limit on average; lookups do not wait for it.
pub(super) const MAX_PACE: u32 = 4;

/// How long nothing has changed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Calm {
    seen: Option<u64>,
    rounds: u32,
}

impl Calm {
    /// Notes the end of a round: `state` stands for everything that should stay as it is,
    /// and `doubts` says that something will likely change.
    pub(super) fn note(&mut self, state: u64, doubts: bool) {
        if doubts || self.seen != Some(state) {
            self.rounds = 0;
        } else {
            self.rounds = self.rounds.saturating_add(1);
        }
        self.seen = Some(state);
    }

    /// Something has changed, or will.
    pub(super) fn disturb(&mut self) {
        self.rounds = 0;
    }

    /// Periods to the next round: 1, 2 or 4.
    pub(super) fn pace(&self) -> u32 {
        (1 << (self.rounds / ROUNDS_A_PACE).min(2)).min(MAX_PACE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_become_rarer_while_nothing_changes_and_prompt_at_once_when_something_does() {
        let mut calm = Calm::default();
        let mut paces = Vec::new();
        for _ in 0..40 {
            calm.note(7, false);
            paces.push(calm.pace());
        }
        assert!(paces.is_sorted() && paces.first() == Some(&1) && paces.last() == Some(&MAX_PACE));
        assert_eq!(paces.iter().filter(|pace| **pace == 2).count(), ROUNDS_A_PACE as usize);
        calm.note(8, false);
        assert_eq!(calm.pace(), 1);
        (0..40).for_each(|_| calm.note(8, false));
        calm.note(8, true);
        assert_eq!(calm.pace(), 1);
        (0..40).for_each(|_| calm.note(8, false));
        calm.disturb();
        assert_eq!(calm.pace(), 1);
    }
}
