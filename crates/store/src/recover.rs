//! Opening a store: what the index says, checked against the log and brought up to it.
//!
//! The log is the truth. From the index's checkpoint on it is replayed; if the index is
//! missing, unreadable or speaks of another log, everything is replayed into a new one.
//! Records are taken by sequence number: the highest that speaks of a key wins, so the
//! place of a record (compaction moves them) does not matter.
//!
//! Bytes that are no sound record are skipped, not fatal: at the end of the log they are
//! what power loss left of writes nobody was told of, and are cut off; elsewhere they
//! are rot, and are reported.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use crate::disk::DiskFile;
use crate::index::{Contents, Entry, Index, IndexError};
use crate::segment::{
    self, FIRST_RECORD_OFFSET, InvalidHeader, LAYOUT, Met, RecordBody, RecordHeader, SegmentHeader,
    Walk,
};
use crate::shared::Shared;
use crate::writer::{Active, Writer, commit_frozen, create_segment};

/// What opening a store found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OpenReport {
    /// The index was missing or unreadable and has been made again from the log.
    /// Extensions of leases by `renew` are lost then: whoever calls `remove_expired`
    /// should leave publishers time to renew first.
    pub rebuilt_index: bool,
    /// Records read because the index did not know them yet.
    pub replayed_records: u64,
    /// Bytes cut off the end of the log: writes that were never acknowledged.
    pub truncated_bytes: u64,
    /// Unreadable bytes elsewhere in the part of the log that was replayed.
    pub damaged_bytes: u64,
    /// Segments that could not be read at all; renamed to `….damaged`.
    pub damaged_segments: u64,
}

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it open.
    #[error("the store is in use: {0}")]
    Locked(String),
    /// Written by a newer version of this program, which alone should touch it.
    #[error("segment {name} was written by a newer version (layout {layout})")]
    Newer {
        /// The segment's file.
        name: String,
        /// Its layout.
        layout: u32,
    },
    /// The disk failed.
    #[error("cannot open the store: {0}")]
    Io(#[from] io::Error),
    /// The index could not be opened, nor a new one be made.
    #[error("cannot open the store: {0}")]
    Index(IndexFailure),
}

/// What was wrong with the index.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct IndexFailure(IndexError);

impl From<IndexError> for OpenError {
    fn from(error: IndexError) -> OpenError {
        OpenError::Index(IndexFailure(error))
    }
}

/// A segment found on disk.
struct Segment {
    layout: u32,
    file: Arc<dyn DiskFile>,
    salt: u64,
    len_bytes: u64,
}

/// Brings the catalogue of `shared` up to the log and returns the writer for it.
pub(crate) fn recover(shared: Arc<Shared>) -> Result<(Writer, OpenReport), OpenError> {
    let mut report = OpenReport::default();
    let segments = find_segments(&shared, &mut report)?;
    let cache_bytes = shared.config.index_cache_bytes;
    let why = match Index::open(shared.disk.clone(), cache_bytes) {
        Ok((index, contents)) => match contents.as_ref().and_then(|c| mismatch(c, &segments)) {
            Some(why) => why,
            None => match bring_up(&shared, &segments, index, contents, report.clone()) {
                Err(OpenError::Index(IndexFailure(IndexError::Damaged(why)))) => why,
                brought_up => return brought_up,
            },
        },
        Err(IndexError::Damaged(why)) => why,
        Err(error) => return Err(error.into()),
    };
    tracing::warn!(why, "the index is made again from the log");
    report.rebuilt_index = true;
    shared.catalog.clear();
    let index = Index::create(shared.disk.clone(), cache_bytes)?;
    bring_up(&shared, &segments, index, None, report)
}

/// Replays what the index lacks.
fn bring_up(
    shared: &Arc<Shared>,
    segments: &BTreeMap<u64, Segment>,
    index: Index,
    contents: Option<Contents>,
    mut report: OpenReport,
) -> Result<(Writer, OpenReport), OpenError> {
    report.rebuilt_index |= contents.is_none() && !segments.is_empty();
    let shared = shared.clone();
    let mut recovery = Recovery { shared, index, report, next_sequence: 1, commits: true };
    let from = recovery.begin(contents, segments)?;
    let active = recovery.replay(segments, from)?;
    let Recovery { shared, index, report, next_sequence, .. } = recovery;
    let mut writer = Writer::new(shared, index, active, next_sequence);
    writer.settle().map_err(|error| io::Error::other(error.to_string()))?;
    match writer.commit_index() {
        Err(error @ IndexError::Damaged(_)) => Err(error.into()),
        // A full disk, say. What it lacks is in memory, and in the log.
        Ok(()) | Err(IndexError::Io(_)) => Ok((writer, report)),
    }
}

/// Opens all segments and reads their headers; sets aside what is none.
fn find_segments(
    shared: &Shared,
    report: &mut OpenReport,
) -> Result<BTreeMap<u64, Segment>, OpenError> {
    let mut found = BTreeMap::new();
    for name in shared.disk.list()? {
        let Some(number) = segment::parse_file_name(&name) else { continue };
        let file = shared.disk.open(&name)?;
        let mut start = [0; FIRST_RECORD_OFFSET as usize];
        let read = file.read_at(0, &mut start)?;
        match segment::decode_segment_start(&start[..read]) {
            // Power was lost while the segment was made, so nothing is in it.
            _ if file.len()? < FIRST_RECORD_OFFSET => shared.disk.remove(&name)?,
            Ok(SegmentHeader { layout, number: stated, salt }) if stated == number => {
                let len_bytes = file.len()?;
                found.insert(number, Segment { layout, file, salt, len_bytes });
            }
            Err(InvalidHeader::Newer(layout)) => return Err(OpenError::Newer { name, layout }),
            Err(_) if start.iter().all(|byte| *byte == 0) => shared.disk.remove(&name)?,
            Ok(_) | Err(_) => {
                tracing::error!(name, "a segment without a sound header is set aside");
                shared.disk.rename(&name, &format!("{name}.damaged"))?;
                report.damaged_segments += 1;
            }
        }
    }
    Ok(found)
}

/// Why an index cannot be one of this log.
fn mismatch(contents: &Contents, segments: &BTreeMap<u64, Segment>) -> Option<String> {
    for (number, stat) in &contents.segments {
        match segments.get(number) {
            None if stat.live_bytes > 0 => return Some(format!("segment {number} is missing")),
            Some(segment) if segment.salt != stat.salt => {
                return Some(format!("segment {number} is not the one it knows"));
            }
            Some(segment) if segment.len_bytes < stat.len_bytes => {
                return Some(format!("segment {number} is shorter than it was"));
            }
            _ => {}
        }
    }
    let Contents { checkpoint, .. } = contents;
    match segments.get(&checkpoint.segment) {
        Some(segment) if segment.len_bytes >= checkpoint.offset => None,
        _ => Some("the log ends before the place it knows".to_owned()),
    }
}

struct Recovery {
    shared: Arc<Shared>,
    index: Index,
    report: OpenReport,
    next_sequence: u64,
    /// Whether the index takes commits.
    commits: bool,
}

impl Recovery {
    /// Loads what the index knows; returns from where on the log is to be replayed.
    fn begin(
        &mut self,
        contents: Option<Contents>,
        segments: &BTreeMap<u64, Segment>,
    ) -> Result<(u64, u64), OpenError> {
        let catalog = &self.shared.catalog;
        let Some(mut contents) = contents else {
            return Ok((0, FIRST_RECORD_OFFSET));
        };
        contents.segments.retain(|number, _| segments.contains_key(number));
        let checkpoint = contents.checkpoint;
        self.next_sequence = checkpoint.next_sequence;
        catalog.load(contents);
        catalog.set_snapshot(self.index.snapshot()?, self.index.len_bytes()?);
        for (number, segment) in segments {
            let known = catalog.read().segments().contains_key(number);
            if !known && *number < checkpoint.segment {
                // It was dead, and to be removed when the power went.
                catalog.add_segment(*number, segment.salt, segment.len_bytes);
            }
        }
        Ok((checkpoint.segment, checkpoint.offset))
    }

    /// Replays the log from a place on; returns the segment to go on writing.
    fn replay(
        &mut self,
        segments: &BTreeMap<u64, Segment>,
        (first, offset): (u64, u64),
    ) -> Result<Active, OpenError> {
        let last = segments.keys().next_back().copied();
        let mut active = None;
        for (number, segment) in segments.range(first..) {
            let from = if *number == first { offset } else { FIRST_RECORD_OFFSET };
            let end = self.replay_segment(*number, segment, from)?;
            if Some(*number) == last {
                let file = segment.file.clone();
                let resumed = self.resume(*number, segment.salt, file, end)?;
                // What an older program would misread goes into a segment it refuses.
                active = (segment.layout == LAYOUT).then_some(resumed);
            } else {
                self.report.damaged_bytes += segment.len_bytes - end;
            }
            self.shared.catalog.set_synced(*number, end);
        }
        match active {
            Some(active) => Ok(active),
            None => {
                // Above everything that was ever there, also what is set aside.
                let known = self.shared.catalog.read().checkpoint().segment;
                Ok(create_segment(&self.shared, known.max(last.unwrap_or(0)) + 1)?)
            }
        }
    }

    /// Goes on writing the last segment at `end`, where its last sound record ends.
    fn resume(
        &mut self,
        number: u64,
        salt: u64,
        file: Arc<dyn DiskFile>,
        end: u64,
    ) -> Result<Active, OpenError> {
        let len_bytes = file.len()?;
        if len_bytes > end {
            self.report.truncated_bytes += len_bytes - end;
            file.set_len(end)?;
            file.sync()?;
        }
        self.shared.catalog.set_segment_len(number, end);
        self.shared.files.insert(number, file.clone());
        Ok(Active { number, salt, file, len_bytes: end })
    }

    /// Replays one segment; returns where its last sound record ends.
    fn replay_segment(
        &mut self,
        number: u64,
        segment: &Segment,
        from: u64,
    ) -> Result<u64, OpenError> {
        let Segment { file, salt, len_bytes, .. } = segment;
        if !self.shared.catalog.read().segments().contains_key(&number) {
            self.shared.catalog.add_segment(number, *salt, *len_bytes);
        }
        // A process that was killed may have left records in the page cache only; they
        // must not be answered for before they are durable.
        file.sync()?;
        self.shared.catalog.set_segment_len(number, *len_bytes);
        let mut walk = Walk::new(&**file, *salt, from, *len_bytes);
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
        let catalog = &self.shared.catalog;
        let found = |held: Option<Entry>| match header.body {
            RecordBody::Block { kind, version, expires_unix_secs, len_bytes, .. } => {
                if held.is_some_and(|held| held.sequence > header.sequence) {
                    return None;
                }
                let entry = Entry {
                    segment: number,
                    offset: u32::try_from(offset).ok()?,
                    len_bytes,
                    kind,
                    long_header: header.has_owner(),
                    version,
                    expires_unix_secs,
                    sequence: header.sequence,
                    owner: header.owner,
                };
                let leased = held.map_or(entry, |held| entry.leased_as(&held));
                // Whoever replaced a block has it from then on.
                let replaced = held.is_none_or(|held| held.sequence != header.sequence);
                let owner = if replaced { header.owner } else { leased.owner };
                Some(Some(Entry { owner, ..leased }))
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
        let catalog = &self.shared.catalog;
        if !self.commits || catalog.uncommitted() < self.shared.config.commit_entries {
            return Ok(());
        }
        catalog.set_synced(segment, offset);
        catalog.set_next_sequence(self.next_sequence);
        match commit_frozen(&self.shared, &mut self.index) {
            Ok(_dead) => Ok(()),
            Err(error @ IndexError::Damaged(_)) => Err(error.into()),
            Err(error @ IndexError::Io(_)) => {
                tracing::warn!(%error, "the index cannot be written while the log is replayed");
                self.commits = false;
                Ok(())
            }
        }
    }
}
