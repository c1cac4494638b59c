//! The log of a pool's changes on one member, as far back as some member may lack them (the prepared and committed lists of PacificA,
//! MSR-TR-2008-25, section 2.2). Plain data: what is not in the index yet, and what is known of all of it.
//!
//! Orders are consecutive. Each primary begins with a change that says its epoch ([`PoolChange::Began`]), so that the logs of two
//! members can be compared: within one epoch one primary gives each order once, and nobody has a change of an epoch without having all
//! that its primary had when it began. So two logs that both have changes of an epoch are the same up to the last of these that both have
//! (the log matching of Raft, section 5.3 of *In Search of an Understandable Consensus Algorithm*). Of an epoch that one of them lacks the
//! primary may have been alone.
//!
//! The log begins with the last [`PoolChange::LogBegins`]; all members have everything before it.

use std::collections::BTreeMap;

use crate::change::PoolChange;

/// Changes that a log keeps; a member that lacks more has to be made anew. A guess: some days of work. A member that gets all of them
/// has them in memory at once, some hundred megabytes.
const MAX_CHANGES: u64 = 1_000_000;

/// The number of epochs that a member names. If the primary knows none of them, it takes the two logs for different from the start.
const MAX_EPOCHS: usize = 64;

/// See the module.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct ChangeLog {
    /// Changes that the index has not, by their order.
    pub(crate) recent: BTreeMap<u64, PoolChange>,
    /// All changes after this one are here or in the index.
    pub(crate) after: u64,
    /// The first order of each epoch, and the epoch; those before [`ChangeLog::after`] but for the last are forgotten.
    pub(crate) epochs: BTreeMap<u64, u64>,
}

impl ChangeLog {
    /// Adds a change.
    pub(crate) fn add(&mut self, order: u64, change: &PoolChange) {
        if let PoolChange::Began { epoch } = change {
            self.epochs.insert(order, *epoch);
        }
        self.recent.insert(order, change.clone());
    }

    /// Forgets changes after `last`: others get their orders.
    pub(crate) fn cut(&mut self, last: u64) {
        self.recent.split_off(&last.saturating_add(1));
        self.epochs.split_off(&last.saturating_add(1));
    }

    /// All members have the changes up to this one.
    pub(crate) fn begin_after(&mut self, order: u64) {
        self.after = self.after.max(order);
        self.recent = self.recent.split_off(&(self.after + 1));
        let last_before = self.epochs.range(..=self.after).next_back();
        if let Some(first) = last_before.map(|(order, _)| *order) {
            self.epochs = self.epochs.split_off(&first);
        }
    }

    /// A log that is too long begins later.
    pub(crate) fn bound(&mut self, last: u64) {
        if last.saturating_sub(self.after) > MAX_CHANGES {
            self.begin_after(last - MAX_CHANGES);
        }
    }

    /// The index has these changes. Some of their orders may have been given to others meanwhile.
    pub(crate) fn note_written(&mut self, written: &BTreeMap<u64, PoolChange>) {
        self.recent.retain(|order, change| written.get(order) != Some(change));
    }

    /// The epoch of the change with this order; 0 before the first.
    pub(crate) fn epoch_of(&self, order: u64) -> u64 {
        self.epochs.range(..=order).next_back().map_or(0, |(_, epoch)| *epoch)
    }

    /// The newest epochs, oldest first: each by its first order.
    pub(crate) fn newest_epochs(&self, last: u64) -> Vec<(u64, u64)> {
        let newest = self.epochs.range(..=last).rev().take(MAX_EPOCHS);
        let mut newest: Vec<(u64, u64)> = newest.map(|(first, epoch)| (*first, *epoch)).collect();
        newest.reverse();
        newest
    }

    /// The last change that a log has in common with this one, whose last change is `last` and that has these epochs
    /// ([`ChangeLog::newest_epochs`]).
    pub(crate) fn common(&self, mut last: u64, epochs: &[(u64, u64)]) -> u64 {
        let oldest_known = self.epochs.values().next().copied().unwrap_or(u64::MAX);
        for (first, epoch) in epochs.iter().rev().chain([&(0, 0)]) {
            // Before what is known of this log there is one epoch after the other that nobody has changes of who is not a member.
            if *epoch < oldest_known || self.epochs.values().any(|own| own == epoch) {
                let later = self.epochs.iter().find(|(_, own)| *own > epoch);
                return later.map_or(last, |(first, _)| last.min(first - 1));
            }
            last = last.min(first.saturating_sub(1));
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(changes: &[(u64, u64)]) -> ChangeLog {
        let mut log = ChangeLog::default();
        for (order, epoch) in changes {
            match epoch {
                0 => log.add(*order, &PoolChange::Withdrawn { order: *order }),
                epoch => log.add(*order, &PoolChange::Began { epoch: *epoch }),
            }
        }
        log
    }

    #[test]
    fn logs_are_the_same_up_to_the_older_ones_last_epoch() {
        // Epoch 2 from order 1, epoch 4 from order 5.
        let ours = log(&[(1, 2), (2, 0), (3, 0), (4, 0), (5, 4), (6, 0)]);
        assert_eq!([0, 1, 4, 5, 9].map(|order| ours.epoch_of(order)), [0, 2, 2, 4, 4]);
        assert_eq!(ours.common(3, &[(1, 2)]), 3, "it follows");
        assert_eq!(ours.common(7, &[(1, 2)]), 4, "changes of epoch 2 that were never answered");
        assert_eq!(ours.common(9, &[(1, 2), (5, 4)]), 9, "the caller looks how far its own goes");
        assert_eq!(ours.common(0, &[]), 0, "a new member");
        for first in 2..=7 {
            let common = ours.common(7, &[(1, 2), (first, 3)]);
            assert_eq!(
                common,
                4.min(first - 1),
                "a primary from order {first} that nobody followed"
            );
            let common = ours.common(7, &[(1, 2), (first, 5), (7, 6)]);
            assert_eq!(common, 4.min(first - 1), "one that began later than this log's last");
        }
        let theirs = log(&[(1, 2), (2, 0), (3, 3), (4, 5)]);
        assert_eq!(theirs.newest_epochs(3), [(1, 2), (3, 3)]);
    }

    #[test]
    fn a_log_that_begins_later_knows_the_epoch_before() {
        let mut ours = log(&[(1, 2), (2, 0), (3, 4), (4, 0), (5, 6), (6, 0)]);
        ours.begin_after(4);
        assert_eq!((ours.recent.len(), ours.epoch_of(4), ours.epoch_of(6)), (2, 4, 6));
        assert_eq!(ours.common(2, &[(1, 2)]), 2, "it is not known what it has");
        assert_eq!(ours.common(4, &[(1, 2), (3, 4)]), 4);
        ours.cut(4);
        assert_eq!((ours.recent.len(), ours.epoch_of(9)), (0, 4));
    }

    #[test]
    fn a_log_is_bounded() {
        let mut ours = log(&[(1, 2)]);
        ours.bound(MAX_CHANGES);
        assert_eq!(ours.after, 0);
        ours.bound(MAX_CHANGES + 7);
        assert_eq!((ours.after, ours.epoch_of(8)), (7, 2));
    }
}
