//! What a follower may answer without asking the primary: reads of files whose bytes all members have, under a read lease.
//!
//! A lease counts from the moment at which this member *got* a beat, and is given by a later beat of the same session that was sent when
//! the answer to the first one had come: so its time had begun before the primary looked how long its own lease lasts. Beats
//! overlap, so a later one says which of them it counts from ([`ReadLease::since`]).
//!
//! A file with bytes that came in this session is read at the primary until all members are known to have them: another member may still
//! show what was there before. Plain state.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use atoll_env::Moment;

use crate::backups::LEASE;
use crate::layout::FileId;
use crate::messages::ReadLease;

/// Beats that are remembered: more than come while a lease lasts.
const MAX_BEATS: usize = 32;
/// Items that are remembered; with more, no file is settled until the last of these is.
const MAX_UNSETTLED: usize = 4096;

/// A lease as this member counts it.
#[derive(Clone, Copy, Debug)]
struct HeldLease {
    until: Moment,
    boot: u64,
}

/// Of one session. See the module.
#[derive(Default, Debug)]
pub(super) struct ReplicaReads {
    /// The last beats, and when they came first.
    beats: VecDeque<(u64, Moment)>,
    lease: Option<HeldLease>,
    /// All members have the bytes of all items before this one.
    settled: u64,
    /// Items that some member may lack the bytes of.
    items: BTreeMap<u64, FileId>,
    /// The last of them of each file.
    last_items: BTreeMap<FileId, u64>,
    /// One of the items before this one was not remembered.
    forgotten: u64,
}

impl ReplicaReads {
    /// A beat has come, with a lease or without one.
    pub(super) fn note_beat(&mut self, number: u64, lease: Option<ReadLease>, now: Moment) {
        if let Some(ReadLease { since, remaining_ms, boot }) = lease
            && let Some((_, came)) = self.beats.iter().find(|(beat, _)| *beat == since)
        {
            let lasts = Duration::from_millis(remaining_ms.into()).min(LEASE);
            let until = *came + lasts;
            // An earlier one may come late.
            if self.lease.is_none_or(|held| held.until.steady < until.steady || held.boot != boot) {
                self.lease = Some(HeldLease { until, boot });
            }
        }
        // One that comes twice has come the first time: the primary may have had that answer.
        if self.beats.back().is_none_or(|(last, _)| *last < number) {
            self.beats.push_back((number, now));
            if self.beats.len() > MAX_BEATS {
                self.beats.pop_front();
            }
        }
    }

    /// An item has come that changes bytes of a file.
    pub(super) fn note_item(&mut self, number: u64, id: FileId) {
        if number < self.settled {
            return;
        }
        if self.items.len() >= MAX_UNSETTLED {
            self.forgotten = self.forgotten.max(number.saturating_add(1));
            return;
        }
        self.items.insert(number, id);
        let last = self.last_items.entry(id).or_default();
        *last = number.max(*last);
    }

    /// All members have the bytes of all items before this one.
    pub(super) fn note_settled(&mut self, settled: u64) {
        self.settled = self.settled.max(settled);
        while let Some(first) = self.items.first_entry()
            && *first.key() < self.settled
        {
            let (number, id) = first.remove_entry();
            if self.last_items.get(&id) == Some(&number) {
                self.last_items.remove(&id);
            }
        }
    }

    /// Whether clients of this run of the primary's server may be answered.
    pub(super) fn is_leased(&self, boot: u64, now: Moment) -> bool {
        self.lease.is_some_and(|lease| lease.boot == boot && !now.until(lease.until).is_zero())
    }

    /// Whether all members have all bytes of a file that came in this session.
    pub(super) fn is_settled(&self, id: FileId) -> bool {
        self.settled >= self.forgotten && !self.last_items.contains_key(&id)
    }
}

#[cfg(test)]
mod tests {
    use atoll_env::Instant;

    use super::*;

    const BOOT: u64 = 7;
    const FILE: FileId = FileId(9);

    fn at(ms: u64) -> Moment {
        Moment { steady: Instant(0), unix_ms: 1_000 } + Duration::from_millis(ms)
    }

    fn lease(since: u64, remaining_ms: u16) -> Option<ReadLease> {
        Some(ReadLease { since, remaining_ms, boot: BOOT })
    }

    /// When a lease ends, looked for in steps of a millisecond.
    fn ends(reads: &ReplicaReads) -> Option<u64> {
        (0..2_000).rev().find(|ms| reads.is_leased(BOOT, at(*ms))).map(|last| last + 1)
    }

    #[test]
    fn a_lease_counts_from_the_beat_that_was_answered() {
        let mut reads = ReplicaReads::default();
        reads.note_beat(1, None, at(100));
        assert_eq!(ends(&reads), None);
        reads.note_beat(2, None, at(150));
        reads.note_beat(3, lease(1, 240), at(200));
        assert_eq!(ends(&reads), Some(340));
        reads.note_beat(4, lease(2, 100), at(230));
        assert_eq!(ends(&reads), Some(340), "an earlier end");
        reads.note_beat(5, lease(4, 240), at(250));
        assert_eq!(ends(&reads), Some(470));
        assert!(!reads.is_leased(BOOT + 1, at(260)), "another run of the server");
    }

    #[test]
    fn no_lease_is_longer_than_a_promise_or_counts_from_a_beat_that_did_not_come() {
        let mut reads = ReplicaReads::default();
        reads.note_beat(4, lease(3, 240), at(100));
        assert_eq!(ends(&reads), None);
        reads.note_beat(5, lease(4, u16::MAX), at(150));
        assert_eq!(ends(&reads), Some(350));
        // A beat that comes twice counts from the first time.
        reads.note_beat(4, None, at(400));
        reads.note_beat(6, lease(4, 240), at(450));
        assert_eq!(ends(&reads), Some(350));
    }

    #[test]
    fn a_lease_ends_by_the_clock_that_has_advanced_further() {
        let mut reads = ReplicaReads::default();
        reads.note_beat(1, None, at(100));
        reads.note_beat(2, lease(1, 250), at(150));
        assert!(reads.is_leased(BOOT, at(200)));
        let slept = Moment { steady: at(200).steady, ..at(400) };
        assert!(!reads.is_leased(BOOT, slept));
    }

    #[test]
    fn a_file_is_settled_when_all_members_have_its_last_item() {
        let mut reads = ReplicaReads::default();
        let other = FileId(10);
        for (number, id) in [(4, FILE), (5, other), (6, FILE)] {
            reads.note_item(number, id);
        }
        reads.note_settled(5);
        assert_eq!([reads.is_settled(FILE), reads.is_settled(other)], [false, false]);
        reads.note_settled(6);
        assert_eq!([reads.is_settled(FILE), reads.is_settled(other)], [false, true]);
        reads.note_settled(2);
        reads.note_item(5, other);
        assert!(reads.is_settled(other), "it comes once more, late");
        reads.note_settled(7);
        assert!(reads.is_settled(FILE));
        assert!(reads.items.is_empty() && reads.last_items.is_empty());
    }

    #[test]
    fn with_too_many_items_no_file_is_settled() {
        let mut reads = ReplicaReads::default();
        let most = MAX_UNSETTLED as u64;
        for number in 0..most {
            reads.note_item(number, FILE);
        }
        assert!(reads.is_settled(FileId(10)));
        reads.note_item(most, FileId(10));
        assert!(!reads.is_settled(FileId(10)) && !reads.is_settled(FileId(11)));
        assert_eq!(reads.items.len(), MAX_UNSETTLED);
        reads.note_settled(most);
        assert!(!reads.is_settled(FileId(10)));
        reads.note_settled(most + 1);
        assert!(reads.is_settled(FileId(10)));
    }

    #[test]
    fn few_beats_are_remembered() {
        let mut reads = ReplicaReads::default();
        for number in 0..1_000 {
            reads.note_beat(number, None, at(number));
        }
        assert_eq!(reads.beats.len(), MAX_BEATS);
    }
}
