//! Which ranges of files may differ between the members of a pool, since not all of them have made durable what was written
//! there. Plain data.
//!
//! A *mark* is one MiB of one file. It is in the journals of all members before the first byte is written there, and stays until
//! all of them have synced the file. A member that may have lost bytes gets its marked ranges from the primary again.
//!
//! **A member that was away** has missed bytes also in ranges that were marked and synced meanwhile. So marks are remembered after
//! they are cleared, until all members of the pool have everything ([`PoolChange::LogBegins`]).
//!
//! **A file that is written from front to back** gets marks ahead of its writes, so that it takes few changes: as many marks at once as the
//! run of ranges has that was written directly before them, 64 at most ([`Marks::to_add`]). Marks behind the end of a file cost nothing
//! when ranges are handed over.
//!
//! A sync covers what was written before it began. Writes go on meanwhile, so a mark is cleared only if no write began or ended in
//! its range between the beginning of the sync and its end.

use std::collections::{BTreeMap, BTreeSet};

use crate::change::{BirthKind, PoolChange};
use crate::layout::FileId;

/// Bytes of one mark.
pub(crate) const MARK_BYTES: u64 = 1 << 20;

/// More marks than a change of one file makes singly: it marks the whole file.
const MAX_SINGLE: u64 = 256;

/// The most marks of one file that a run of writes makes at once. A guess: a member that lost power gets up to so many ranges again that
/// nobody has written to, if the file was longer than what was written.
const MAX_AHEAD: u64 = 64;

/// The mark that stands for all of a file.
pub(crate) const WHOLE: u64 = u64::MAX;

#[derive(Clone, Copy, Default, Debug)]
struct Mark {
    writing: u32,
    /// Whether this member has begun a write there, as the primary.
    is_written: bool,
    /// When a write began or ended there last, or it was made ([`Marks::clock`]).
    changes: u64,
}

/// See the module.
#[derive(Default, Debug)]
pub(crate) struct Marks {
    /// Counts what happens to marks. It never repeats, also for a mark that was cleared and made again.
    clock: u64,
    files: BTreeMap<FileId, BTreeMap<u64, Mark>>,
    /// All marks that there were since all members had everything.
    since_all: MarkTable,
    /// Files without marks of which it is to be known whether they get one.
    watched: BTreeSet<FileId>,
}

/// Marks of files.
pub(crate) type MarkTable = BTreeMap<FileId, BTreeSet<u64>>;

/// Marks of one file that are remembered singly; with more, all of the file is marked.
const MAX_REMEMBERED: usize = 4096;

/// The marks of a file when a sync of it began.
#[derive(Clone, Debug)]
pub(crate) struct MarksBefore {
    /// Whose they are.
    pub(crate) id: FileId,
    changes: BTreeMap<u64, u64>,
}

/// The marks that bytes `offset..offset + len` of a file lie in.
pub(crate) fn marks_of(offset: u64, len: u64) -> Vec<u64> {
    let first = offset / MARK_BYTES;
    let last = offset.saturating_add(len.max(1) - 1) / MARK_BYTES;
    match last - first < MAX_SINGLE {
        true => (first..=last).collect(),
        false => vec![WHOLE],
    }
}

impl Marks {
    /// A change is decided.
    pub(crate) fn note(&mut self, change: &PoolChange) {
        match change {
            PoolChange::Make { id, birth, .. } if birth.what == BirthKind::Regular => {
                self.add(*id, &[0]);
            }
            PoolChange::Marked { id, marks } => self.add(*id, marks),
            PoolChange::Synced { id, kept, .. } => self.keep(*id, kept),
            PoolChange::AllSynced { kept } => {
                let kept: BTreeMap<&FileId, &Vec<u64>> =
                    kept.iter().map(|(id, marks)| (id, marks)).collect();
                for id in self.files.keys().copied().collect::<Vec<_>>() {
                    self.keep(id, kept.get(&id).map_or(&[], |marks| &marks[..]));
                }
            }
            PoolChange::LogBegins => self.since_all = self.all(),
            // Whoever is away had the same bytes, too.
            PoolChange::Verified { id, .. } => drop(self.since_all.remove(id)),
            _ => {}
        }
    }

    /// Those of `wanted` that the file does not have.
    pub(crate) fn missing(&self, id: FileId, wanted: &[u64]) -> Vec<u64> {
        let Some(marks) = self.files.get(&id) else { return wanted.to_vec() };
        let is_missing = |mark: &&u64| !marks.contains_key(mark);
        wanted.iter().filter(is_missing).copied().collect()
    }

    /// The marks that a file of `size_bytes` gets before bytes are written to `wanted`: those of `wanted` that it lacks, and marks ahead. From
    /// the first mark that it lacks on, it gets as many as the run of written ranges has that ends there, if they are behind its end: where there are
    /// bytes that nobody writes, no member's are given to others. So each change marks twice as much as the one before, up to
    /// [`MAX_AHEAD`], and a write that continues no run marks its own ranges alone.
    pub(crate) fn to_add(&self, id: FileId, wanted: &[u64], size_bytes: u64) -> Vec<u64> {
        let mut missing = self.missing(id, wanted);
        let (Some(first), Some(file)) = (missing.first().copied(), self.files.get(&id)) else {
            return missing;
        };
        let is_written = |at: &u64| file.get(at).is_some_and(|mark| mark.is_written);
        let before = (0..first).rev().take(MAX_AHEAD as usize).take_while(is_written).count();
        let end = size_bytes.div_ceil(MARK_BYTES);
        let ahead = (first..first.saturating_add(before as u64))
            .filter(|at| *at >= end && !file.contains_key(at));
        missing.extend(ahead);
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    /// Adds marks.
    pub(crate) fn add(&mut self, id: FileId, marks: &[u64]) {
        self.clock += 1;
        self.watched.remove(&id);
        let file = self.files.entry(id).or_default();
        for mark in marks {
            let made = Mark { changes: self.clock, ..Mark::default() };
            file.entry(*mark).or_insert(made);
        }
        self.remember(id, marks.iter().copied());
    }

    /// Remembers marks that there were.
    pub(crate) fn remember(&mut self, id: FileId, marks: impl IntoIterator<Item = u64>) {
        let remembered = self.since_all.entry(id).or_default();
        remembered.extend(marks);
        if remembered.len() > MAX_REMEMBERED {
            *remembered = BTreeSet::from([WHOLE]);
        }
    }

    /// Leaves a file these marks and no others.
    fn keep(&mut self, id: FileId, kept: &[u64]) {
        let Some(marks) = self.files.get_mut(&id) else { return };
        marks.retain(|mark, _| kept.contains(mark));
        if marks.is_empty() {
            self.files.remove(&id);
        }
    }

    /// The file is gone.
    pub(crate) fn remove(&mut self, id: FileId) {
        self.files.remove(&id);
        self.since_all.remove(&id);
        self.watched.remove(&id);
    }

    /// Watches a file until it has a mark, or is gone: false if it has one. One watches at a time.
    pub(crate) fn watch(&mut self, id: FileId) -> bool {
        let is_quiet = !self.files.contains_key(&id);
        if is_quiet {
            self.watched.insert(id);
        }
        is_quiet
    }

    /// Whether nothing was marked since.
    pub(crate) fn is_watched(&self, id: FileId) -> bool {
        self.watched.contains(&id)
    }

    /// Watches no file any more.
    pub(crate) fn end_watch(&mut self) {
        self.watched.clear();
    }

    /// A write into ranges that are marked begins.
    pub(crate) fn begin_write(&mut self, id: FileId, marks: &[u64]) {
        self.clock += 1;
        let file = self.files.entry(id).or_default();
        for mark in marks {
            let mark = file.entry(*mark).or_default();
            mark.writing += 1;
            mark.is_written = true;
            mark.changes = self.clock;
        }
    }

    /// And ends.
    pub(crate) fn end_write(&mut self, id: FileId, marks: &[u64]) {
        self.clock += 1;
        let Some(file) = self.files.get_mut(&id) else { return };
        for mark in marks {
            if let Some(mark) = file.get_mut(mark) {
                mark.writing = mark.writing.saturating_sub(1);
                mark.changes = self.clock;
            }
        }
    }

    /// A sync of a file begins.
    pub(crate) fn before_sync(&self, id: FileId) -> MarksBefore {
        let marks = self.files.get(&id).into_iter().flatten();
        let is_quiet = |(_, mark): &(&u64, &Mark)| mark.writing == 0;
        let changes = marks.filter(is_quiet).map(|(at, mark)| (*at, mark.changes)).collect();
        MarksBefore { id, changes }
    }

    /// The marks that stay after a sync, which has ended.
    pub(crate) fn after_sync(&self, before: &MarksBefore) -> Vec<u64> {
        let marks = self.files.get(&before.id).into_iter().flatten();
        let stays = |(at, mark): &(&u64, &Mark)| before.changes.get(at) != Some(&mark.changes);
        marks.filter(stays).map(|(at, _)| *at).collect()
    }

    /// Whether the file has any.
    pub(crate) fn has_any(&self, id: FileId) -> bool {
        self.files.contains_key(&id)
    }

    /// All marks of all files.
    pub(crate) fn all(&self) -> MarkTable {
        self.files.iter().map(|(id, marks)| (*id, marks.keys().copied().collect())).collect()
    }

    /// All marks that there were since all members had everything.
    pub(crate) fn since_all_had_everything(&self) -> &MarkTable {
        &self.since_all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId(7);

    #[test]
    fn ranges_have_the_marks_that_they_touch() {
        assert_eq!(marks_of(0, 1), [0]);
        assert_eq!(marks_of(MARK_BYTES - 1, 2), [0, 1]);
        assert_eq!(marks_of(5 * MARK_BYTES, 0), [5]);
        assert_eq!(marks_of(0, u64::MAX), [WHOLE]);
        assert_eq!(marks_of(u64::MAX, 1), [u64::MAX / MARK_BYTES]);
    }

    /// Writes these ranges one after the other; the marks that each of these writes made.
    fn write_all(marks: &mut Marks, ranges: impl IntoIterator<Item = u64>) -> Vec<Vec<u64>> {
        let mut made = Vec::new();
        for at in ranges {
            let new = marks.to_add(FILE, &[at], 0);
            if !new.is_empty() {
                marks.add(FILE, &new);
                made.push(new);
            }
            marks.begin_write(FILE, &[at]);
            marks.end_write(FILE, &[at]);
        }
        made
    }

    #[test]
    fn a_file_that_is_written_in_order_is_marked_ahead_twice_as_far_each_time() {
        let mut marks = Marks::default();
        marks.note(&PoolChange::Marked { id: FILE, marks: vec![0] });
        let made = write_all(&mut marks, 0..1000);
        let begins: Vec<u64> = made.iter().map(|new| new[0]).collect();
        assert_eq!(begins[..7], [1, 2, 4, 8, 16, 32, 64]);
        assert_eq!(made[3], (8..16).collect::<Vec<_>>());
        assert!(made.iter().all(|new| new.len() as u64 <= MAX_AHEAD));
        assert_eq!(made.len(), 6 + (1000 - 64_usize).div_ceil(MAX_AHEAD as usize));
    }

    #[test]
    fn writes_here_and_there_make_their_own_marks() {
        let mut marks = Marks::default();
        let made = write_all(&mut marks, [7, 900, 3, 500, 40, 2, 39, 1000]);
        assert!(made.iter().all(|new| new.len() == 1), "{made:?}");
        // Ranges that are marked, and that nobody has written to, are no run.
        let mut marks = Marks::default();
        marks.add(FILE, &(0..64).collect::<Vec<_>>());
        assert_eq!(write_all(&mut marks, (0..10).map(|step| 64 * step)), {
            (1..10).map(|step| vec![64 * step]).collect::<Vec<_>>()
        });
    }

    #[test]
    fn marks_ahead_leave_out_those_that_there_are() {
        let mut marks = Marks::default();
        write_all(&mut marks, [6, 0, 1, 2, 3]);
        assert_eq!(marks.to_add(FILE, &[4], 0), [4, 5, 7]);
        assert_eq!(
            marks.to_add(FILE, &[3, 4, 5], 0),
            [4, 5, 7],
            "the write begins in the last range"
        );
        assert_eq!(marks.to_add(FILE, &[20, 21], 0), [20, 21]);
        assert_eq!(marks.to_add(FILE, &[3], 0), [0u64; 0]);
        assert_eq!(marks.to_add(FILE, &[WHOLE], 0), [WHOLE]);
        assert_eq!(marks.to_add(FileId(8), &[0, 1], 0), [0, 1], "a file without any");
    }

    /// The copy of the primary is not given to others where nobody writes: it may be the rotten one.
    #[test]
    fn a_file_that_is_overwritten_from_front_to_back_gets_no_marks_ahead_within_its_length() {
        let mut marks = Marks::default();
        write_all(&mut marks, 0..8);
        assert_eq!(marks.to_add(FILE, &[8], 100 * MARK_BYTES), [8]);
        assert_eq!(marks.to_add(FILE, &[8], 12 * MARK_BYTES + 1), [8, 13, 14, 15]);
        assert_eq!(marks.to_add(FILE, &[8], 8 * MARK_BYTES), (8..16).collect::<Vec<_>>());
    }

    /// What was not written is not kept by a sync, nor is a run longer for it.
    #[test]
    fn a_sync_clears_marks_ahead() {
        let mut marks = Marks::default();
        write_all(&mut marks, 0..5);
        assert_eq!(
            marks.to_add(FILE, &[8], 0),
            [8],
            "only half of the marks before it were written to"
        );
        let before = marks.before_sync(FILE);
        assert_eq!(marks.after_sync(&before), [0u64; 0]);
        marks.keep(FILE, &[]);
        assert_eq!(marks.to_add(FILE, &[5], 0), [5]);
    }

    /// POOL: a COMMIT clears marks only up to the writes that it covers.
    #[test]
    fn a_sync_clears_what_was_quiet_from_its_beginning_to_its_end() {
        let mut marks = Marks::default();
        marks.add(FILE, &[0, 1, 2, 3]);
        marks.begin_write(FILE, &[1]);
        let before = marks.before_sync(FILE);
        marks.end_write(FILE, &[1]);
        marks.begin_write(FILE, &[2]);
        marks.end_write(FILE, &[2]);
        marks.add(FILE, &[4]);
        assert_eq!(marks.after_sync(&before), [1, 2, 4]);
        marks.keep(FILE, &[1, 2, 4]);
        let before = marks.before_sync(FILE);
        assert_eq!(marks.after_sync(&before), [0u64; 0]);
        marks.keep(FILE, &[]);
        assert!(!marks.has_any(FILE));
        assert_eq!(marks.missing(FILE, &[3]), [3]);
    }

    #[test]
    fn cleared_marks_are_remembered_until_all_members_have_everything() {
        let mut marks = Marks::default();
        marks.add(FILE, &[0, 1]);
        marks.note(&PoolChange::Synced { id: FILE, upto: 0, kept: vec![1] });
        assert_eq!(marks.since_all_had_everything()[&FILE], BTreeSet::from([0, 1]));
        marks.note(&PoolChange::LogBegins);
        assert_eq!(marks.since_all_had_everything()[&FILE], BTreeSet::from([1]));
        marks.add(FILE, &(0..2 * MAX_REMEMBERED as u64).collect::<Vec<_>>());
        assert_eq!(marks.since_all_had_everything()[&FILE], BTreeSet::from([WHOLE]));
        marks.remove(FILE);
        assert!(marks.since_all_had_everything().is_empty());
    }

    /// Who comes back is not given again what a disk may have changed meanwhile.
    #[test]
    fn marks_of_a_file_that_is_the_same_on_all_are_forgotten() {
        let mut marks = Marks::default();
        marks.add(FILE, &[0, 1]);
        marks.add(FileId(8), &[2]);
        marks.note(&PoolChange::AllSynced { kept: Vec::new() });
        marks.note(&PoolChange::Verified { id: FILE, digest: [1; 32] });
        let remembered = marks.since_all_had_everything();
        assert_eq!(remembered.keys().copied().collect::<Vec<_>>(), [FileId(8)]);
    }

    /// Two syncs of one file overlap, and a write comes between their ends.
    #[test]
    fn a_mark_that_was_cleared_and_made_again_is_another_one() {
        let mut marks = Marks::default();
        let write = |marks: &mut Marks| {
            marks.add(FILE, &[0]);
            marks.begin_write(FILE, &[0]);
            marks.end_write(FILE, &[0]);
        };
        write(&mut marks);
        let (first, second) = (marks.before_sync(FILE), marks.before_sync(FILE));
        assert_eq!(marks.after_sync(&first), [0u64; 0]);
        marks.keep(FILE, &[]);
        write(&mut marks);
        assert_eq!(marks.after_sync(&second), [0], "its sync did not cover the later write");
    }
}
