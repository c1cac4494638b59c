//! Opening a store: checks the index against the log and brings it up to date.
//!
//! The log is the truth. From the index's checkpoint on it is replayed; if the index is
//! missing, unreadable or speaks of another log, everything is replayed into a new one.
//! Records are taken by sequence number: the highest that speaks of a key wins, so the
//! place of a record (compaction moves them) does not matter.
//!
//! Bytes that are no sound record are skipped and reported, not fatal: at the end of the log
//! they are usually the remains of unacknowledged writes at a power loss, elsewhere they are rot.
//!
//! **Recovery deletes nothing that may hold data.** Only files and ends of files that were never
//! written are removed. A segment whose header cannot be read is read with the salt that the
//! index knows, and gets a new header; one that the index does not know is renamed to
//! `….damaged`. Bytes behind the last sound record stay where they are, and the log goes on in a
//! new segment. An index that is made again is kept as `index.redb.damaged`.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::sync::Arc;

use atoll_key::Key;

use crate::disk::DiskFile;
use crate::engine::committer::Committer;
use crate::engine::entry::IndexEntry;
use crate::engine::error::IndexError;
use crate::engine::index::{Contents, Index, SegmentStat};
use crate::engine::{IndexFailure, OpenError};
use crate::log::reading::Log;
use crate::log::writer::{Active, Writer, create_segment};
use crate::segment::{
    self, FIRST_RECORD_OFFSET, InvalidHeader, Met, RecordBody, RecordHeader, SegmentHeader, Walk,
};

/// What opening a store found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OpenReport {
    /// The index was missing or unreadable and has been made again from the log.
    /// Extensions of leases by `renew` are lost then: the caller of `remove_expired`
    /// should leave publishers time to renew first.
    pub rebuilt_index: bool,
    /// Records read because the index did not know them yet.
    pub replayed_records: u64,
    /// Bytes behind the last sound record: usually writes that were never acknowledged.
    pub torn_bytes: u64,
    /// Unreadable bytes elsewhere in the part of the log that was replayed.
    pub damaged_bytes: u64,
    /// Segments whose header could not be read and was written anew from the index.
    pub repaired_segments: u64,
    /// Segments in the directory that were set aside as `….damaged`, now or earlier.
    pub damaged_segments: u64,
    /// Blocks the index knew in segments that are gone or have become shorter.
    pub lost_blocks: u64,
}

/// What is put behind the name of a segment that is set aside.
const DAMAGED_SUFFIX: &str = ".damaged";

/// Entries looked at in one go when segments have lost something.
const LOST_PAGE: usize = 4096;

/// A segment found on disk. It is not kept open: there may be more than a process may open.
struct Segment {
    salt: u64,
    len_bytes: u64,
}

/// What is in the directory.
#[derive(Default)]
struct Found {
    segments: BTreeMap<u64, Segment>,
    /// Segments whose header cannot be read, with their lengths.
    headless: BTreeMap<u64, u64>,
    /// The highest number of a segment, be it set aside; it is not used again.
    highest: u64,
}

/// Brings the catalogue of `log` up to the log and returns the writer for it.
pub(crate) fn recover(log: Arc<Log>) -> Result<(Writer, OpenReport), OpenError> {
    let mut report = OpenReport::default();
    let mut found = find_segments(&log, &mut report)?;
    let cache_bytes = log.shared.config.index_cache_bytes;
    let opened = match Index::open(log.shared.disk.clone(), cache_bytes) {
        Err(error @ IndexError::OtherLayout { .. }) => return Err(error.into()),
        opened => opened,
    };
    let known = opened.as_ref().ok().and_then(|(_, contents)| contents.as_ref());
    settle_headless(&log, &mut found, known.map(|c| &c.segments), &mut report)?;
    let why = match opened {
        Ok((index, contents)) => match contents.as_ref().and_then(|c| mismatch(c, &found)) {
            Some(why) => why,
            None => match bring_up(&log, &found, index, contents, report.clone()) {
                Err(OpenError::Index(IndexFailure(IndexError::Damaged(why)))) => why,
                brought_up => return brought_up,
            },
        },
        Err(IndexError::Damaged(why)) => why,
        Err(error) => return Err(error.into()),
    };
    tracing::warn!(why, "the index is made again from the log");
    report.rebuilt_index = true;
    log.shared.catalog.clear();
    let index = Index::create(log.shared.disk.clone(), cache_bytes)?;
    bring_up(&log, &found, index, None, report)
}

/// Replays what the index lacks.
fn bring_up(
    log: &Arc<Log>,
    found: &Found,
    index: Index,
    contents: Option<Contents>,
    mut report: OpenReport,
) -> Result<(Writer, OpenReport), OpenError> {
    report.rebuilt_index |= contents.is_none() && !found.segments.is_empty();
    let (log, committer) = (log.clone(), Committer::new(index));
    let mut recovery = Recovery { log, committer, report, next_sequence: 1 };
    let from = recovery.begin(contents, found)?;
    let active = recovery.replay(found, from)?;
    let Recovery { log, committer, report, next_sequence } = recovery;
    let mut writer = Writer::new(log, committer, active, next_sequence);
    writer.settle().map_err(|error| io::Error::other(error.to_string()))?;
    match writer.commit() {
        // The disk is full, for instance. The changes are in memory and in the log.
        Ok(()) | Err(IndexError::Io(_)) => Ok((writer, report)),
        Err(error) => Err(error.into()),
    }
}

/// Opens all segments and reads their headers.
fn find_segments(log: &Log, report: &mut OpenReport) -> Result<Found, OpenError> {
    let mut found = Found::default();
    let mut unreadable = None;
    for name in log.shared.disk.list()? {
        let set_aside = name.strip_suffix(DAMAGED_SUFFIX);
        let Some(number) = segment::parse_file_name(set_aside.unwrap_or(&name)) else { continue };
        found.highest = found.highest.max(number);
        if set_aside.is_some() {
            report.damaged_segments += 1;
            continue;
        }
        let file = log.shared.disk.open(&name)?;
        let len_bytes = file.len()?;
        let mut start = [0; FIRST_RECORD_OFFSET as usize];
        let read = match file.read_at(0, &mut start).or_else(|_| file.read_at(0, &mut start)) {
            Ok(read) => read,
            Err(error) => {
                unreadable = Some(error);
                0
            }
        };
        let is_unwritten = read > 0 && start.iter().all(|byte| *byte == 0);
        match segment::decode_segment_start(&start[..read]) {
            // Power was lost while the segment was made, so nothing is in it.
            _ if len_bytes < FIRST_RECORD_OFFSET => log.shared.disk.remove(&name)?,
            Err(_) if is_unwritten && len_bytes == FIRST_RECORD_OFFSET => {
                log.shared.disk.remove(&name)?;
            }
            Ok(SegmentHeader { number: stated, salt }) if stated == number => {
                found.segments.insert(number, Segment { salt, len_bytes });
            }
            Err(InvalidHeader::OtherLayout(layout)) => {
                return Err(OpenError::OtherLayout { name, layout: layout.into() });
            }
            Ok(_) | Err(_) => drop(found.headless.insert(number, len_bytes)),
        }
    }
    match unreadable {
        // The disk fails; that says nothing of the segments.
        Some(error) if found.segments.is_empty() => Err(error.into()),
        _ => Ok(found),
    }
}

/// Reads segments without a header with the salt that the index knows, and sets the others
/// aside.
fn settle_headless(
    log: &Log,
    found: &mut Found,
    known: Option<&BTreeMap<u64, SegmentStat>>,
    report: &mut OpenReport,
) -> Result<(), OpenError> {
    for (number, len_bytes) in std::mem::take(&mut found.headless) {
        let name = segment::file_name(number);
        let Some(stat) = known.and_then(|known| known.get(&number)) else {
            tracing::error!(name, "a segment without a sound header is set aside");
            log.shared.disk.rename(&name, &format!("{name}{DAMAGED_SUFFIX}"))?;
            report.damaged_segments += 1;
            continue;
        };
        tracing::error!(name, "the header of a segment cannot be read; the index knows it");
        let salt = stat.salt;
        let start = segment::encode_segment_start(&SegmentHeader { number, salt });
        let written = log.shared.disk.open(&name).and_then(|file| {
            file.write_at(0, &mut [IoSlice::new(&start)])?;
            file.sync()
        });
        if let Err(error) = written {
            tracing::error!(name, %error, "the header cannot be written");
        }
        found.segments.insert(number, Segment { salt, len_bytes });
        report.repaired_segments += 1;
    }
    Ok(())
}

/// Why an index cannot be one of this log.
fn mismatch(contents: &Contents, found: &Found) -> Option<String> {
    let other = contents.segments.iter().find(|(number, stat)| {
        found.segments.get(number).is_some_and(|segment| segment.salt != stat.salt)
    });
    other.map(|(number, _)| format!("segment {number} is not the one it knows"))
}

/// Segments that the index knows longer than they are, with the length that is left.
fn shortened(contents: &Contents, found: &Found) -> BTreeMap<u64, u64> {
    let left = |number| found.segments.get(number).map_or(0, |segment| segment.len_bytes);
    let known = contents.segments.iter().map(|(number, stat)| (*number, stat, left(number)));
    known
        .filter(|(_, stat, left)| stat.live_bytes > 0 && *left < stat.len_bytes)
        .map(|(number, _, left)| (number, left))
        .collect()
}

/// Whether there are only zeros in a part of a file.
fn is_unwritten(file: &dyn DiskFile, mut at: u64, end: u64) -> io::Result<bool> {
    let mut buffer = vec![0; 64 << 10];
    while at < end {
        let read = file.read_at(at, &mut buffer)?;
        if buffer[..read].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        if read == 0 {
            break;
        }
        at += read as u64;
    }
    Ok(true)
}

struct Recovery {
    log: Arc<Log>,
    committer: Committer,
    report: OpenReport,
    next_sequence: u64,
}

impl Recovery {
    /// Loads what the index knows; returns from where on the log is to be replayed.
    fn begin(
        &mut self,
        contents: Option<Contents>,
        found: &Found,
    ) -> Result<(u64, u64), OpenError> {
        let catalog = &self.log.shared.catalog;
        let Some(contents) = contents else {
            return Ok((0, FIRST_RECORD_OFFSET));
        };
        let checkpoint = contents.checkpoint;
        let shortened = shortened(&contents, found);
        let gone = |number: &&u64| !found.segments.contains_key(number);
        let gone: Vec<u64> = contents.segments.keys().filter(gone).copied().collect();
        self.next_sequence = checkpoint.next_sequence;
        catalog.load(contents);
        self.committer.load_snapshot(&self.log.shared)?;
        if !shortened.is_empty() {
            self.report.lost_blocks = self.forget_lost(&shortened)?;
            let lost_blocks = self.report.lost_blocks;
            tracing::error!(lost_blocks, ?shortened, "segments are gone or shorter than known");
        }
        gone.iter().for_each(|number| catalog.forget_segment(*number));
        for (number, segment) in &found.segments {
            let known = catalog.read().segments().contains_key(number);
            if !known && *number < checkpoint.segment {
                // It was dead, and to be removed when the power went.
                catalog.add_segment(*number, segment.salt, segment.len_bytes);
            }
        }
        Ok((checkpoint.segment, checkpoint.offset))
    }

    /// Forgets the blocks of segments beyond the length that is left of them; returns how many.
    fn forget_lost(&self, left: &BTreeMap<u64, u64>) -> Result<u64, OpenError> {
        let catalog = &self.log.shared.catalog;
        let (mut from, mut lost) = (Some(Key::MIN), 0);
        while let Some(first) = from {
            let page = catalog.indexed_page(&first, LOST_PAGE)?;
            let is_lost = |entry: &IndexEntry| {
                let end = u64::from(entry.offset) + entry.record_bytes();
                left.get(&entry.segment).is_some_and(|left| end > *left)
            };
            let keys: Vec<Key> =
                page.iter().filter(|(_, entry)| is_lost(entry)).map(|(key, _)| *key).collect();
            catalog.update(&keys, |_, held| held.map(|_| None))?;
            lost += keys.len() as u64;
            let last = page.last().filter(|_| page.len() == LOST_PAGE);
            from = last.filter(|(key, _)| *key != Key::MAX).map(|(key, _)| key.next());
        }
        for (number, left) in left {
            catalog.set_segment_len(*number, *left);
        }
        Ok(lost)
    }

    /// Replays the log from a place on; returns the segment to go on writing.
    fn replay(&mut self, found: &Found, (first, offset): (u64, u64)) -> Result<Active, OpenError> {
        let last = found.segments.keys().next_back().copied();
        let mut active = None;
        for (number, segment) in found.segments.range(first..) {
            let from = if *number == first { offset } else { FIRST_RECORD_OFFSET };
            let end = self.replay_segment(*number, segment, from)?;
            if Some(*number) == last {
                active = self.resume(*number, segment, end)?;
            } else {
                self.report.damaged_bytes += segment.len_bytes - end;
            }
            self.log.shared.catalog.set_synced(*number, end);
        }
        match active {
            Some(active) => Ok(active),
            None => {
                // Above everything that was ever there, also what is set aside.
                let known = self.log.shared.catalog.read().checkpoint().segment;
                Ok(create_segment(&self.log, known.max(found.highest) + 1)?)
            }
        }
    }

    /// Goes on writing the last segment at `end`, where its last sound record ends; `None` if
    /// anything else has been written behind it.
    fn resume(
        &mut self,
        number: u64,
        segment: &Segment,
        end: u64,
    ) -> Result<Option<Active>, OpenError> {
        let Segment { salt, len_bytes } = segment;
        let file = self.log.segments.open(&*self.log.shared.disk, number)?;
        if *len_bytes > end {
            self.report.torn_bytes += len_bytes - end;
            if !is_unwritten(&*file, end, *len_bytes)? {
                return Ok(None);
            }
            file.set_len(end)?;
            file.sync()?;
        }
        self.log.shared.catalog.set_segment_len(number, end);
        Ok(Some(Active { number, salt: *salt, file, len_bytes: end }))
    }

    /// Replays one segment; returns where its last sound record ends.
    fn replay_segment(
        &mut self,
        number: u64,
        segment: &Segment,
        from: u64,
    ) -> Result<u64, OpenError> {
        let Segment { salt, len_bytes, .. } = segment;
        let file = self.log.segments.open(&*self.log.shared.disk, number)?;
        if !self.log.shared.catalog.read().segments().contains_key(&number) {
            self.log.shared.catalog.add_segment(number, *salt, *len_bytes);
        }
        // A process that was killed may have left records in the page cache only; they
        // must not be answered for before they are durable.
        file.sync()?;
        self.log.shared.catalog.set_segment_len(number, *len_bytes);
        let mut walk = Walk::new(&*file, *salt, from, *len_bytes);
        let mut end = from.max(FIRST_RECORD_OFFSET).min(*len_bytes);
        let mut skipped_bytes = 0;
        while let Some(met) = walk.step()? {
            match met {
                Met::Damage { len_bytes, .. } => skipped_bytes += len_bytes,
                Met::Record { offset, header } => {
                    let len_bytes = header.record_bytes();
                    self.next_sequence = self.next_sequence.max(header.sequence + 1);
                    if walk.value(offset, &header)?.is_none() {
                        skipped_bytes += len_bytes;
                        continue;
                    }
                    self.report.damaged_bytes += std::mem::take(&mut skipped_bytes);
                    end = offset + len_bytes;
                    self.report.replayed_records += 1;
                    self.apply(number, offset, &header)?;
                    self.commit_if_much(number, end)?;
                }
            }
        }
        Ok(end)
    }

    /// Takes one record, unless something newer is known of its key.
    fn apply(&self, number: u64, offset: u64, header: &RecordHeader) -> Result<(), OpenError> {
        let catalog = &self.log.shared.catalog;
        let found = |held: Option<IndexEntry>| match header.body {
            RecordBody::Block { kind, version, expires_unix_secs, len_bytes, .. } => {
                if held.is_some_and(|held| held.sequence > header.sequence) {
                    return None;
                }
                let entry = IndexEntry {
                    segment: number,
                    offset: u32::try_from(offset).ok()?,
                    len_bytes,
                    kind,
                    version,
                    expires_unix_secs,
                    sequence: header.sequence,
                    owner: header.owner,
                };
                let leased = held.map_or(entry, |held| entry.leased_as(&held));
                // A block belongs to the owner of the version that replaced it.
                let replaced = held.is_none_or(|held| held.sequence != header.sequence);
                let owner = if replaced { header.owner } else { leased.owner };
                Some(Some(IndexEntry { owner, ..leased }))
            }
            RecordBody::Removal { .. } => {
                let older = held.is_some_and(|held| held.sequence < header.sequence);
                older.then_some(None)
            }
            RecordBody::Lease { expires_unix_secs } => {
                let held = held.filter(|held| held.expires_unix_secs < expires_unix_secs)?;
                Some(Some(held.extended(expires_unix_secs, header.owner)))
            }
        };
        if matches!(header.body, RecordBody::Removal { .. }) {
            catalog.count_removals(number, 1);
        }
        catalog.update(&[header.key], |_, held| found(held))?;
        Ok(())
    }

    /// Commits the index now and then, so that replaying a whole log needs little memory.
    fn commit_if_much(&mut self, segment: u64, offset: u64) -> Result<(), OpenError> {
        let catalog = &self.log.shared.catalog;
        if self.committer.has_failed()
            || catalog.uncommitted() < self.log.shared.config.commit_entries
        {
            return Ok(());
        }
        catalog.set_synced(segment, offset);
        catalog.set_next_sequence(self.next_sequence);
        match self.committer.commit(&self.log.shared) {
            Ok(_dead) => Ok(()),
            // The rest is replayed into memory.
            Err(IndexError::Io(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
