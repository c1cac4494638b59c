//! Quotas: how many bytes and files those of a user, or those below a directory, may take. Plain state.
//!
//! ```text
//! shares   how the first group divides a limit among the groups
//! ```
//!
//! A file counts with its length, in whole pages of 4 KiB, a directory with one page, anything else with none; each counts as one file. It counts
//! for its owner, and for each limited directory above the first of its names, in the order of their directories' numbers. So what is
//! counted is the same on all members, whatever their disks are; `du` says the same of files without holes. Files without a name do not
//! count.
//!
//! The primary of a group counts what its group has ([`Quotas`]), and refuses what would take more than the group's **share** of a limit. In a pool
//! of one group that is the limit. Of several, the first group's primary divides each limit ([`shares`]): what it has given out never
//! exceeds the limit, unless more was used before there was one. So neither a message that is lost nor a primary that dies lets the
//! groups use more than the limit together.
//!
//! What is used is kept in step by each call that changes it. It is **counted** when a limit is new, when this member becomes the primary,
//! when a directory was moved into or out of a limited one, and once a day, file by file while clients work: what is below the
//! count's position is kept in step too, what is above it is still to be counted.
//!
//! The table is a change of the group ([`crate::change::PoolChange::Quotas`]), so all members have it. What is used changes with every call, and is written
//! there every few seconds: a new primary begins with that, until it has counted.
//!
//! **It does not know** who a file's owner is, where a file lies, or when the day is over.

pub(crate) mod shares;

use std::collections::BTreeMap;

use atoll_vfs::{Errno, FileKind};
use minicbor::{Decode, Encode};

use crate::layout::FileId;

/// Lengths are counted in pages of so many bytes.
const PAGE_BYTES: u64 = 4096;
/// The most limits of a pool: the table of them fits into a change.
pub(crate) const MAX_QUOTAS: usize = 256;

/// Whose files a limit is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
pub enum QuotaSubject {
    /// Those that a user owns.
    #[n(0)]
    User(#[n(0)] u32),
    /// A directory, by its number, and everything below it.
    #[n(1)]
    Directory(#[n(0)] u64),
}

/// What files take.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Encode, Decode)]
pub struct QuotaAmount {
    /// Bytes, in whole pages.
    #[n(0)]
    pub bytes: u64,
    /// How many there are.
    #[n(1)]
    pub files: u64,
}

impl QuotaAmount {
    /// More than there can be: no limit.
    pub const UNLIMITED: QuotaAmount = QuotaAmount { bytes: u64::MAX, files: u64::MAX };

    /// What a file of this kind and length takes.
    pub(crate) fn of(kind: FileKind, size_bytes: u64) -> QuotaAmount {
        let bytes = match kind {
            FileKind::Regular => pages(size_bytes),
            FileKind::Directory => PAGE_BYTES,
            _ => 0,
        };
        QuotaAmount { bytes, files: 1 }
    }

    pub(crate) fn plus(self, other: QuotaAmount) -> QuotaAmount {
        let bytes = self.bytes.saturating_add(other.bytes);
        QuotaAmount { bytes, files: self.files.saturating_add(other.files) }
    }

    pub(crate) fn minus(self, other: QuotaAmount) -> QuotaAmount {
        let bytes = self.bytes.saturating_sub(other.bytes);
        QuotaAmount { bytes, files: self.files.saturating_sub(other.files) }
    }

    pub(crate) fn at_least(self, other: QuotaAmount) -> QuotaAmount {
        QuotaAmount { bytes: self.bytes.max(other.bytes), files: self.files.max(other.files) }
    }
}

/// A length in whole pages, bytes.
pub(crate) fn pages(size_bytes: u64) -> u64 {
    size_bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX)
}

/// What a file takes, and who has to have room for it.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct QuotaCharge {
    pub(crate) subjects: Vec<QuotaSubject>,
    pub(crate) amount: QuotaAmount,
}

/// One limit, and how a group stands to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct QuotaRow {
    /// What all groups may take together.
    #[n(0)]
    pub limit: QuotaAmount,
    /// What this group may take.
    #[n(1)]
    pub share: QuotaAmount,
    /// What this group takes.
    #[n(2)]
    pub used: QuotaAmount,
    /// What the other groups take, as far as this one has heard.
    #[n(3)]
    pub elsewhere: QuotaAmount,
}

impl QuotaRow {
    /// What all groups take.
    pub fn used_by_all(&self) -> QuotaAmount {
        self.used.plus(self.elsewhere)
    }

    /// What may be taken in addition.
    pub fn left(&self) -> QuotaAmount {
        self.limit.minus(self.used_by_all())
    }
}

/// The first group's map and a number: grants of shares in the order in which they were made.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug, Encode, Decode)]
pub(crate) struct GrantNumber {
    #[n(0)]
    pub(crate) epoch: u64,
    #[n(1)]
    pub(crate) count: u64,
}

/// All limits, as a group has them.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct QuotaTable {
    pub(crate) rows: BTreeMap<QuotaSubject, QuotaRow>,
    /// The last grant of shares; older ones are refused.
    pub(crate) granted: GrantNumber,
    /// Whether all files were counted since the last limit was set.
    pub(crate) is_counted: bool,
}

impl QuotaTable {
    /// The limits.
    pub fn rows(&self) -> &BTreeMap<QuotaSubject, QuotaRow> {
        &self.rows
    }

    /// The table with a limit, or without it; in a pool of one group that has all of it.
    ///
    /// # Errors
    /// Why it cannot be set, for people.
    pub(crate) fn with(
        &self,
        subject: QuotaSubject,
        limit: Option<QuotaAmount>,
        is_only_group: bool,
    ) -> Result<QuotaTable, &'static str> {
        let mut next = self.clone();
        let Some(limit) = limit else {
            next.rows.remove(&subject);
            return Ok(next);
        };
        if !next.rows.contains_key(&subject) && next.rows.len() >= MAX_QUOTAS {
            return Err("the pool has as many limits as it can have");
        }
        let none = QuotaAmount::default();
        let new = QuotaRow { limit, share: none, used: none, elsewhere: none };
        let row = next.rows.entry(subject).or_insert(new);
        row.limit = limit;
        if is_only_group {
            row.share = limit;
        }
        Ok(next)
    }

    /// Whether all files of the group were counted.
    pub fn is_counted(&self) -> bool {
        self.is_counted
    }
}

/// A count of all files that is under way.
#[derive(Debug)]
struct QuotaCount {
    /// Files up to this one are counted.
    upto: FileId,
    counted: BTreeMap<QuotaSubject, QuotaAmount>,
}

/// The limits at a member that makes changes. See the module.
#[derive(Default, Debug)]
pub(crate) struct Quotas {
    table: QuotaTable,
    /// What calls that are under way are going to take.
    reserved: BTreeMap<QuotaSubject, QuotaAmount>,
    /// What was wanted in vain, of each since that was asked before.
    wanted: BTreeMap<QuotaSubject, QuotaAmount>,
    counting: Option<QuotaCount>,
    is_count_due: bool,
    /// Whether all members know what is used.
    is_recorded: bool,
    /// Whether other groups have not counted all their files.
    counts_elsewhere: bool,
}

impl Quotas {
    pub(crate) fn is_empty(&self) -> bool {
        self.table.rows.is_empty()
    }

    pub(crate) fn table(&self) -> &QuotaTable {
        &self.table
    }

    /// The table as people see it.
    pub(crate) fn shown(&self) -> QuotaTable {
        let mut table = self.table.clone();
        table.is_counted &= !self.counts_elsewhere;
        table
    }

    /// Whether all other groups have counted their files.
    pub(crate) fn note_elsewhere_counted(&mut self, are_counted: bool) {
        self.counts_elsewhere = !are_counted;
    }

    /// The table as a change says it, or an index.
    pub(crate) fn set_table(&mut self, table: QuotaTable) {
        self.wanted.retain(|subject, _| table.rows.contains_key(subject));
        self.reserved.retain(|subject, _| table.rows.contains_key(subject));
        if table.rows.keys().any(|subject| !self.table.rows.contains_key(subject)) {
            self.is_count_due = true;
        }
        self.table = table;
    }

    /// The table with other limits and shares, at the member that counts: what is used stays as it is known by now.
    pub(crate) fn set_limits(&mut self, mut table: QuotaTable) {
        table.is_counted = self.table.is_counted;
        for (subject, row) in &mut table.rows {
            match self.table.rows.get(subject) {
                Some(known) => row.used = known.used,
                None => table.is_counted = false,
            }
        }
        self.set_table(table);
    }

    pub(crate) fn limits_directories(&self) -> bool {
        matches!(self.table.rows.keys().next_back(), Some(QuotaSubject::Directory(_)))
    }

    pub(crate) fn limits(&self, subject: QuotaSubject) -> bool {
        self.table.rows.contains_key(&subject)
    }

    /// Whether a limit is divided, so that this group's share may become greater.
    pub(crate) fn may_get_more(&self) -> bool {
        self.wanted.iter().any(|(subject, wanted)| {
            let fits = |row: &QuotaRow| row.left().at_least(*wanted) == row.left();
            self.table.rows.get(subject).is_some_and(|row| row.share != row.limit && fits(row))
        })
    }

    /// Keeps room for what a call is going to take: [`Errno::EDQUOT`] if a limit leaves none. What takes nothing more is never refused.
    pub(crate) fn reserve(&mut self, charges: &[QuotaCharge]) -> Result<(), Errno> {
        let mut more: BTreeMap<QuotaSubject, QuotaAmount> = BTreeMap::new();
        for QuotaCharge { subjects, amount } in charges {
            for subject in subjects {
                let sum = more.entry(*subject).or_default();
                *sum = sum.plus(*amount);
            }
        }
        let exceeds = |subject: &QuotaSubject, more: &QuotaAmount| {
            let Some(row) = self.table.rows.get(subject) else { return false };
            let taken = row.used.plus(self.reserved.get(subject).copied().unwrap_or_default());
            (more.bytes > 0 && taken.bytes.saturating_add(more.bytes) > row.share.bytes)
                || (more.files > 0 && taken.files.saturating_add(more.files) > row.share.files)
        };
        let exceeded: BTreeMap<QuotaSubject, QuotaAmount> = more
            .iter()
            .filter(|(of, more)| exceeds(of, more))
            .map(|(of, more)| (*of, *more))
            .collect();
        if !exceeded.is_empty() {
            self.wanted.extend(exceeded);
            return Err(Errno::EDQUOT);
        }
        for (subject, more) in more {
            let sum = self.reserved.entry(subject).or_default();
            *sum = sum.plus(more);
        }
        Ok(())
    }

    /// A call for which room was kept has ended.
    pub(crate) fn release(&mut self, charges: &[QuotaCharge]) {
        for QuotaCharge { subjects, amount } in charges {
            for subject in subjects {
                if let Some(sum) = self.reserved.get_mut(subject) {
                    *sum = sum.minus(*amount);
                }
            }
        }
    }

    /// A file takes something else than before.
    pub(crate) fn note(&mut self, id: FileId, before: &QuotaCharge, after: &QuotaCharge) {
        if before == after {
            return;
        }
        self.is_recorded = false;
        let counted = self.counting.as_mut().filter(|count| count.upto >= id);
        let mut counted = counted.map(|count| &mut count.counted);
        for subject in &before.subjects {
            if let Some(row) = self.table.rows.get_mut(subject) {
                row.used = row.used.minus(before.amount);
            }
            if let Some(sum) = counted.as_mut().and_then(|counted| counted.get_mut(subject)) {
                *sum = sum.minus(before.amount);
            }
        }
        for subject in &after.subjects {
            if let Some(row) = self.table.rows.get_mut(subject) {
                row.used = row.used.plus(after.amount);
            }
            if let Some(counted) = &mut counted {
                let sum = counted.entry(*subject).or_default();
                *sum = sum.plus(after.amount);
            }
        }
    }

    /// What is known to be used is not to be trusted any more.
    pub(crate) fn want_count(&mut self) {
        self.is_count_due = true;
    }

    pub(crate) fn is_count_due(&self) -> bool {
        self.is_count_due && !self.is_empty()
    }

    /// Begins to count all files.
    pub(crate) fn begin_count(&mut self) {
        self.is_count_due = false;
        self.counting = Some(QuotaCount { upto: FileId(0), counted: BTreeMap::new() });
    }

    /// Counts a file; none is changed meanwhile.
    pub(crate) fn count(&mut self, charge: &QuotaCharge) {
        let Some(count) = &mut self.counting else { return };
        for subject in &charge.subjects {
            let sum = count.counted.entry(*subject).or_default();
            *sum = sum.plus(charge.amount);
        }
    }

    /// All files up to this one are counted.
    pub(crate) fn counted_upto(&mut self, id: FileId) {
        if let Some(count) = &mut self.counting {
            count.upto = id;
        }
    }

    /// All files are counted.
    pub(crate) fn end_count(&mut self) {
        // Where a directory was moved meanwhile it is the best that is known, until all is counted again.
        let Some(count) = self.counting.take() else { return };
        for (subject, row) in &mut self.table.rows {
            row.used = count.counted.get(subject).copied().unwrap_or_default();
        }
        self.table.is_counted = true;
        self.is_recorded = false;
    }

    /// Whether other members may not know what is used.
    pub(crate) fn is_to_be_recorded(&self) -> bool {
        !self.is_recorded && !self.is_empty()
    }

    pub(crate) fn note_recorded(&mut self, is_recorded: bool) {
        self.is_recorded = is_recorded;
    }

    /// Of which limits more was wanted than the group's share, since that was asked before.
    pub(crate) fn take_wanted(&mut self) -> BTreeMap<QuotaSubject, QuotaAmount> {
        std::mem::take(&mut self.wanted)
    }

    /// The least share of a limit that can be taken from this group: what it uses, and has promised.
    pub(crate) fn least_share(&self, subject: QuotaSubject) -> QuotaAmount {
        let reserved = self.reserved.get(&subject).copied().unwrap_or_default();
        self.table.rows.get(&subject).map_or(reserved, |row| row.used.plus(reserved))
    }

    /// Whether these limits leave room for this on all groups together.
    pub(crate) fn have_left(&self, charge: &QuotaCharge) -> bool {
        let rows = charge.subjects.iter().filter_map(|subject| self.table.rows.get(subject));
        rows.map(QuotaRow::left).all(|left| left.at_least(charge.amount) == left)
    }

    /// The limits of these that leave the least bytes and files, if there are any.
    pub(crate) fn tightest(&self, subjects: &[QuotaSubject]) -> Option<(QuotaRow, QuotaRow)> {
        let rows = subjects.iter().filter_map(|subject| self.table.rows.get(subject));
        let rows: Vec<QuotaRow> = rows.copied().collect();
        let bytes = rows.iter().min_by_key(|row| row.left().bytes)?;
        let files = rows.iter().min_by_key(|row| row.left().files)?;
        Some((*bytes, *files))
    }
}

/// An array: rows as pairs, the last grant, whether all is counted.
impl<C> Encode<C> for QuotaTable {
    fn encode<W: minicbor::encode::Write>(
        &self,
        encoder: &mut minicbor::Encoder<W>,
        context: &mut C,
    ) -> Result<(), minicbor::encode::Error<W::Error>> {
        encoder.array(3)?.array(self.rows.len() as u64)?;
        for (subject, row) in &self.rows {
            encoder.array(2)?.encode_with(subject, context)?.encode_with(row, context)?;
        }
        encoder.encode_with(self.granted, context)?.bool(self.is_counted)?;
        Ok(())
    }
}

impl<'b, C> Decode<'b, C> for QuotaTable {
    fn decode(
        decoder: &mut minicbor::Decoder<'b>,
        context: &mut C,
    ) -> Result<Self, minicbor::decode::Error> {
        let wrong = minicbor::decode::Error::message;
        if decoder.array()? != Some(3) {
            return Err(wrong("a table of limits has three parts"));
        }
        let count = decoder.array()?.filter(|count| *count <= MAX_QUOTAS as u64);
        let mut rows = BTreeMap::new();
        for _ in 0..count.ok_or_else(|| wrong("more limits than a pool has"))? {
            if decoder.array()? != Some(2) {
                return Err(wrong("a limit is whose it is, and a row"));
            }
            let subject: QuotaSubject = decoder.decode_with(context)?;
            if rows.keys().next_back().is_some_and(|last| *last >= subject) {
                return Err(wrong("limits are in ascending order"));
            }
            rows.insert(subject, decoder.decode_with(context)?);
        }
        let granted = decoder.decode_with(context)?;
        Ok(QuotaTable { rows, granted, is_counted: decoder.bool()? })
    }
}

#[cfg(test)]
pub(crate) fn largest() -> QuotaTable {
    let row = QuotaRow {
        limit: QuotaAmount::UNLIMITED,
        share: QuotaAmount::UNLIMITED,
        used: QuotaAmount::UNLIMITED,
        elsewhere: QuotaAmount::UNLIMITED,
    };
    let subject = |at: usize| QuotaSubject::Directory(u64::MAX - at as u64);
    let granted = GrantNumber { epoch: u64::MAX, count: u64::MAX };
    let rows = (0..MAX_QUOTAS).map(|at| (subject(at), row)).collect();
    QuotaTable { rows, granted, is_counted: true }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::{decode, encode};

    const ANN: QuotaSubject = QuotaSubject::User(7);
    const HOME: QuotaSubject = QuotaSubject::Directory(40);

    fn amount(bytes: u64, files: u64) -> QuotaAmount {
        QuotaAmount { bytes, files }
    }

    fn charge(subjects: &[QuotaSubject], bytes: u64) -> QuotaCharge {
        QuotaCharge { subjects: subjects.to_vec(), amount: amount(bytes, 1) }
    }

    fn limited(limits: &[(QuotaSubject, QuotaAmount)]) -> Quotas {
        let mut quotas = Quotas::default();
        let row = |limit| QuotaRow {
            limit,
            share: limit,
            used: QuotaAmount::default(),
            elsewhere: QuotaAmount::default(),
        };
        let rows = limits.iter().map(|(subject, limit)| (*subject, row(*limit))).collect();
        quotas.set_limits(QuotaTable { rows, ..QuotaTable::default() });
        quotas
    }

    fn used(quotas: &Quotas, subject: QuotaSubject) -> QuotaAmount {
        quotas.table().rows()[&subject].used
    }

    #[test]
    fn a_limit_is_never_exceeded_also_by_calls_under_way() {
        let mut quotas = limited(&[(ANN, amount(8192, 3)), (HOME, amount(4096, 100))]);
        let (both, hers) = (charge(&[ANN, HOME], 4096), charge(&[ANN], 4096));
        quotas.reserve(std::slice::from_ref(&both)).unwrap();
        assert_eq!(quotas.reserve(std::slice::from_ref(&both)), Err(Errno::EDQUOT));
        quotas.reserve(std::slice::from_ref(&hers)).unwrap();
        assert_eq!(quotas.reserve(&[charge(&[ANN], 1)]), Err(Errno::EDQUOT));
        quotas.reserve(&[charge(&[ANN], 0)]).unwrap();
        assert_eq!(quotas.reserve(&[charge(&[ANN], 0)]), Err(Errno::EDQUOT), "a fourth file");
        quotas.note(FileId(1), &QuotaCharge::default(), &both);
        quotas.release(&[both, hers]);
        assert_eq!(used(&quotas, ANN), amount(4096, 1));
        quotas.reserve(&[charge(&[ANN], 4096)]).unwrap();
        quotas.reserve(&[charge(&[QuotaSubject::User(8)], u64::MAX)]).unwrap();
    }

    #[test]
    fn who_has_more_than_a_limit_may_still_take_less() {
        let mut quotas = limited(&[(ANN, amount(4096, 10))]);
        quotas.note(FileId(1), &QuotaCharge::default(), &charge(&[ANN], 1 << 20));
        let renamed = QuotaCharge { subjects: vec![ANN], amount: QuotaAmount::default() };
        quotas.reserve(&[renamed]).unwrap();
        quotas.note(FileId(1), &charge(&[ANN], 1 << 20), &charge(&[ANN], 4096));
        assert_eq!(used(&quotas, ANN), amount(4096, 1));
    }

    /// Files on both sides of the position change, appear and vanish while all are counted.
    #[test]
    fn a_count_beside_calls_comes_to_what_there_is() {
        let mut quotas = limited(&[(ANN, QuotaAmount::UNLIMITED)]);
        assert!(quotas.is_count_due(), "nobody knows what there was before");
        quotas.begin_count();
        quotas.count(&charge(&[ANN], 4096));
        quotas.counted_upto(FileId(10));
        quotas.note(FileId(10), &charge(&[ANN], 4096), &charge(&[ANN], 8192));
        quotas.note(FileId(5), &QuotaCharge::default(), &charge(&[ANN], 4096));
        quotas.note(FileId(20), &QuotaCharge::default(), &charge(&[ANN], 1 << 30));
        quotas.count(&charge(&[ANN], 1 << 30));
        quotas.counted_upto(FileId(u64::MAX));
        quotas.end_count();
        assert_eq!(used(&quotas, ANN), amount(8192 + 4096 + (1 << 30), 3));
        assert!(quotas.table().is_counted());
        quotas.begin_count();
        quotas.want_count();
        quotas.end_count();
        assert_eq!(used(&quotas, ANN).files, 0, "nothing was counted");
        assert!(quotas.is_count_due(), "a directory was moved meanwhile");
    }

    #[test]
    fn tables_read_back_and_damaged_ones_are_none() {
        for table in [QuotaTable::default(), largest()] {
            let bytes = encode(&table);
            assert_eq!(decode(&bytes), Some(table));
            for len in 0..bytes.len().min(400) {
                assert_eq!(decode::<QuotaTable>(&bytes[..len]), None);
            }
        }
    }

    #[test]
    fn lengths_count_in_pages() {
        assert_eq!(QuotaAmount::of(FileKind::Regular, 0), amount(0, 1));
        assert_eq!(QuotaAmount::of(FileKind::Regular, 4097), amount(8192, 1));
        assert_eq!(QuotaAmount::of(FileKind::Regular, u64::MAX).bytes, u64::MAX);
        assert_eq!(QuotaAmount::of(FileKind::Directory, 12345), amount(4096, 1));
        assert_eq!(QuotaAmount::of(FileKind::Symlink, 20), amount(0, 1));
    }
}
