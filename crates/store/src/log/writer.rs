//! The one writer of a `DiskStore`: appends to the log, syncs it, commits the index.
//!
//! Order of things, and why power loss at any point is harmless:
//!
//! 1. Records are appended to the last segment; no reader sees them yet.
//! 2. The segment is synced, once for all batches that wait (group commit).
//! 3. The catalogue takes the changes; from now on reads see them. Callers are answered.
//! 4. Sometimes the index is committed. It covers only what was synced before, so it
//!    never points to bytes that may vanish. Changes that it lacks are replayed from the log.
//! 5. Only after a commit that no longer mentions a segment is its file removed.
//!
//! After a failed sync the contents of the disk are unknown (the kernel may have dropped the
//! pages), so the writer refuses everything until the store is opened again.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;

use atoll_key::{Key, MAX_BLOCK_BYTES};
use bytes::Bytes;

use crate::disk::{self, DiskFile};
use crate::engine::catalog::Change;
use crate::engine::committer::Committer;
use crate::engine::entry::IndexEntry;
use crate::engine::error::IndexError;
use crate::engine::index::{self};
use crate::engine::threads::{self, Reply, Writer as _};
use crate::log::reading::Log;
use crate::segment::{
    self, ALIGNMENT, FIRST_RECORD_OFFSET, RecordBody, RecordHeader, SegmentHeader,
};
use crate::{MAX_GROWTH_BYTES, Owner, StoreError, StoredBlock};

/// Bytes one call may append; offsets in a segment have 32 bits.
const MAX_BATCH_BYTES: u64 = 1 << 30;

/// The segment that is written to.
#[derive(Debug)]
pub(crate) struct Active {
    pub(crate) number: u64,
    pub(crate) salt: u64,
    pub(crate) file: Arc<dyn DiskFile>,
    pub(crate) len_bytes: u64,
}

/// How much of the space that is kept free an append may use.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Headroom {
    /// None of it: new blocks.
    Kept,
    /// What is kept for new versions of blocks that are held. Their records become garbage with
    /// the next version, and compaction gives their space back.
    ForVersions,
    /// All of it: removals, and copies that precede a larger deletion.
    Used,
}

impl Headroom {
    /// What an append of `records` may use.
    fn of(records: &[Record]) -> Headroom {
        let adds = |record: &&Record| record.header.value_bytes() > 0;
        match records.iter().filter(adds).all(|record| record.replaces) {
            true if records.iter().any(|record| adds(&record)) => Headroom::ForVersions,
            // Longer leases.
            true => Headroom::Used,
            false => Headroom::Kept,
        }
    }
}

/// A record to append.
pub(crate) struct Record {
    pub(crate) header: RecordHeader,
    pub(crate) value: Bytes,
    /// What the index snapshot said of the key, see [`Found`].
    pub(crate) indexed: Option<IndexEntry>,
    /// A version of the block was held before that was hardly shorter.
    pub(crate) replaces: bool,
}

/// What the writer knows of a key.
#[derive(Clone, Copy, Default)]
pub(crate) struct Found {
    /// What will be held once everything appended is synced.
    pub(crate) held: Option<IndexEntry>,
    /// What the index says, if nothing newer is in memory.
    pub(crate) indexed: Option<IndexEntry>,
}

/// A segment that is being compacted.
#[derive(Clone, Copy)]
pub(crate) struct Compacting {
    pub(super) number: u64,
    /// What lies before has been dealt with.
    pub(super) offset: u64,
}

pub(crate) struct Writer {
    pub(crate) log: Arc<Log>,
    committer: Committer,
    pub(crate) active: Active,
    pub(crate) next_sequence: u64,
    /// Appended, but not synced.
    unsynced: Vec<(Key, Option<IndexEntry>, Change)>,
    /// The same as it will be looked up.
    unsynced_entries: BTreeMap<Key, Option<IndexEntry>>,
    waiting: Vec<Reply<()>>,
    failed: Option<String>,
    log_bytes_since_commit: u64,
    /// Segments whose live records cannot all be read; compacting them is no use.
    pub(crate) stuck: std::collections::BTreeSet<u64>,
    pub(crate) compacting: Option<Compacting>,
    /// The pass of background compaction: it is about segments before this one.
    pub(crate) pass: Option<u64>,
    /// Lengths of all segments removed.
    pub(crate) removed_bytes: u64,
}

fn io_error(error: &io::Error) -> StoreError {
    StoreError::Io(error.to_string())
}

impl Writer {
    pub(crate) fn new(
        log: Arc<Log>,
        committer: Committer,
        active: Active,
        next_sequence: u64,
    ) -> Writer {
        Writer {
            log,
            committer,
            active,
            next_sequence,
            unsynced: Vec::new(),
            unsynced_entries: BTreeMap::new(),
            waiting: Vec::new(),
            failed: None,
            log_bytes_since_commit: 0,
            stuck: std::collections::BTreeSet::new(),
            compacting: None,
            pass: None,
            removed_bytes: 0,
        }
    }

    /// Answers a caller when what was appended has been synced.
    pub(crate) fn answer_when_synced(
        &mut self,
        appended: Result<(), StoreError>,
        reply: Reply<()>,
    ) {
        match appended {
            Ok(()) => self.waiting.push(reply),
            Err(error) => {
                let _ = reply.send(Err(error));
            }
        }
    }

    pub(crate) fn lookup(&self, key: &Key) -> Result<Found, StoreError> {
        match self.unsynced_entries.get(key) {
            Some(entry) => Ok(Found { held: *entry, indexed: None }),
            None => {
                let held = self.log.shared.catalog.lookup(key)?;
                Ok(Found { held, indexed: held })
            }
        }
    }

    /// Appends a batch of blocks.
    pub(crate) fn put(&mut self, batch: Vec<StoredBlock>) -> Result<(), StoreError> {
        let mut planned: BTreeMap<Key, IndexEntry> = BTreeMap::new();
        let mut records = Vec::with_capacity(batch.len());
        for block in batch {
            let key = block.info.key;
            let found = match planned.get(&key) {
                Some(entry) => Found { held: Some(*entry), indexed: None },
                None => self.lookup(&key)?,
            };
            let sequence = self.next_sequence + records.len() as u64;
            let Some((entry, record)) = plan(found, block, sequence)? else { continue };
            planned.insert(key, entry);
            records.push(record);
        }
        let headroom = Headroom::of(&records);
        self.append(records, headroom)
    }

    /// Forgets damaged blocks, so that repair may fetch them again.
    pub(crate) fn set_aside(&mut self, keys: Vec<(Key, Option<u64>)>) -> Result<(), StoreError> {
        for (key, _) in &keys {
            tracing::warn!(%key, "a damaged block is set aside");
        }
        self.remove(keys)
    }

    /// Appends removals of blocks: those that are still the ones of these sequence numbers, or
    /// whichever they are now (`None`).
    pub(crate) fn remove(&mut self, keys: Vec<(Key, Option<u64>)>) -> Result<(), StoreError> {
        let mut records: Vec<Record> = Vec::with_capacity(keys.len());
        for (key, sequence) in keys {
            let found = self.lookup(&key)?;
            let Some(entry) = found.held else { continue };
            if sequence.is_some_and(|sequence| sequence != entry.sequence) {
                continue;
            }
            let header = RecordHeader {
                key,
                sequence: self.next_sequence + records.len() as u64,
                owner: Owner::NOBODY,
                body: RecordBody::Removal { target_segment: entry.segment },
            };
            let indexed = found.indexed;
            records.push(Record { header, value: Bytes::new(), indexed, replaces: true });
        }
        self.append(records, Headroom::Used)
    }

    /// Appends records with new sequence numbers, all or nothing.
    fn append(&mut self, records: Vec<Record>, headroom: Headroom) -> Result<(), StoreError> {
        if records.is_empty() {
            return self.check_usable();
        }
        let need_bytes = records.iter().map(|r| r.header.record_bytes()).sum();
        self.ensure_room(need_bytes, headroom)?;
        let count = records.len() as u64;
        self.append_records(&records)?;
        self.next_sequence += count;
        Ok(())
    }

    pub(crate) fn check_usable(&self) -> Result<(), StoreError> {
        match &self.failed {
            Some(why) => Err(StoreError::Io(format!("{why}; open the store again"))),
            None => Ok(()),
        }
    }

    fn ensure_room(&mut self, need_bytes: u64, headroom: Headroom) -> Result<(), StoreError> {
        self.check_usable()?;
        self.committer.check_backlog(&self.log.shared)?;
        if need_bytes > MAX_BATCH_BYTES {
            return Err(StoreError::Io(format!("a batch of {need_bytes} bytes is too large")));
        }
        if self.missing_bytes(need_bytes, headroom)? == 0 {
            return Ok(());
        }
        self.settle()?;
        self.make_room(need_bytes, headroom)?;
        if self.missing_bytes(need_bytes, headroom)? == 0 { Ok(()) } else { Err(self.full()) }
    }

    /// How many bytes too few there are to append `need_bytes`.
    pub(crate) fn missing_bytes(
        &self,
        need_bytes: u64,
        headroom_use: Headroom,
    ) -> Result<u64, StoreError> {
        let (disk_bytes, index_bytes) = {
            let state = self.log.shared.catalog.read();
            (state.disk_bytes(), state.index_bytes())
        };
        let (headroom, versions) = (self.log.headroom_bytes(), self.log.room_for_versions_bytes());
        let free_reserve_bytes = self.log.shared.config.free_reserve_bytes;
        let (kept_bytes, reserve_bytes) = match headroom_use {
            // redb doubles its file when it must grow.
            Headroom::Kept => (index_bytes + headroom + versions, free_reserve_bytes),
            // Keys that the index has do not make it grow, nor does removing them.
            Headroom::ForVersions => (headroom, free_reserve_bytes / 2),
            Headroom::Used => (0, 0),
        };
        let mut wanted_bytes = disk_bytes + need_bytes + kept_bytes;
        if self.active.len_bytes + need_bytes > self.log.segment_bytes() {
            wanted_bytes += FIRST_RECORD_OFFSET;
        }
        let free_bytes = self.log.shared.disk.free_bytes().map_err(|error| io_error(&error))?;
        let capacity_bytes = self.log.shared.capacity_bytes();
        // A store that was given less than it takes must be able to remove and to compact.
        let is_shrinking = headroom_use == Headroom::Used && disk_bytes > capacity_bytes;
        let over_cap = if is_shrinking { 0 } else { wanted_bytes.saturating_sub(capacity_bytes) };
        Ok(over_cap.max((need_bytes + reserve_bytes).saturating_sub(free_bytes)))
    }

    /// The error for a batch that does not fit. If the disk is full before the store is, the
    /// error names the disk's limit.
    pub(crate) fn full(&self) -> StoreError {
        let usage = self.log.shared.usage();
        let free_bytes = self.log.shared.disk.free_bytes().unwrap_or(0);
        let free_bytes = free_bytes.saturating_sub(self.log.shared.config.free_reserve_bytes);
        StoreError::Full {
            used_bytes: usage.disk_bytes,
            capacity_bytes: usage.capacity_bytes.min(usage.disk_bytes.saturating_add(free_bytes)),
        }
    }

    /// Writes records behind the last one, as they are.
    pub(crate) fn append_records(&mut self, records: &[Record]) -> Result<(), StoreError> {
        let need_bytes: u64 = records.iter().map(|r| r.header.record_bytes()).sum();
        let is_empty = self.active.len_bytes <= FIRST_RECORD_OFFSET;
        if !is_empty && self.active.len_bytes + need_bytes > self.log.segment_bytes() {
            self.roll()?;
        }
        let start = self.active.len_bytes;
        if let Err(error) = write_records(&self.active, records) {
            if let Err(also) = self.active.file.set_len(start) {
                self.fail(&format!("cannot undo a failed write: {also}"));
            }
            return Err(self.write_error(&error));
        }
        self.active.len_bytes = start + need_bytes;
        self.log_bytes_since_commit += need_bytes;
        self.log.shared.catalog.set_segment_len(self.active.number, self.active.len_bytes);
        self.note(records, start);
        Ok(())
    }

    /// Remembers the changes that records appended at `offset` make once they are synced.
    fn note(&mut self, records: &[Record], mut offset: u64) {
        for record in records {
            let RecordHeader { key, sequence, owner, body } = record.header;
            let held = match self.unsynced_entries.get(&key) {
                Some(entry) => *entry,
                None => self.log.shared.catalog.known(&key).unwrap_or(record.indexed),
            };
            let change = match (body, held) {
                (RecordBody::Removal { .. }, _) => Some(Change::Remove),
                (RecordBody::Lease { expires_unix_secs }, Some(entry)) => {
                    Some(Change::Extend(entry.extended(expires_unix_secs, owner)))
                }
                (RecordBody::Lease { .. }, None) => None,
                (RecordBody::Block { kind, version, expires_unix_secs, len_bytes, .. }, held) => {
                    let entry = IndexEntry {
                        segment: self.active.number,
                        offset: u32::try_from(offset).expect("segments are far below 4 GiB"),
                        len_bytes,
                        kind,
                        version,
                        expires_unix_secs,
                        sequence,
                        owner,
                    };
                    let moved = held.is_some_and(|held| held.sequence == sequence);
                    Some(if moved { Change::Move(entry) } else { Change::Put(entry) })
                }
            };
            offset += record.header.record_bytes();
            let Some(change) = change else { continue };
            let entry = match change {
                Change::Put(entry) | Change::Extend(entry) | Change::Move(entry) => Some(entry),
                Change::Remove => {
                    self.log.shared.catalog.count_removals(self.active.number, 1);
                    None
                }
            };
            self.unsynced_entries.insert(key, entry);
            self.unsynced.push((key, record.indexed, change));
        }
    }

    /// Begins a new segment.
    pub(crate) fn roll(&mut self) -> Result<(), StoreError> {
        if let Err(error) = self.active.file.sync() {
            self.fail(&format!("cannot sync the log: {error}"));
            return Err(io_error(&error));
        }
        let active = create_segment(&self.log, self.active.number + 1)
            .map_err(|error| self.write_error(&error))?;
        self.active = active;
        Ok(())
    }

    /// The error that reports a failed write.
    fn write_error(&self, error: &io::Error) -> StoreError {
        if disk::is_full(error) {
            return self.full();
        }
        self.log.shared.note_failure(&format!("cannot write the log: {error}"));
        io_error(error)
    }

    fn fail(&mut self, why: &str) {
        self.log.shared.note_failure(why);
        self.failed = Some(why.to_owned());
        tracing::error!(why, "the store refuses writes from now on");
    }

    /// Syncs the appended records, makes them visible, and answers the callers that wait.
    pub(crate) fn settle(&mut self) -> Result<(), StoreError> {
        let mut outcome = self.check_usable();
        if outcome.is_ok()
            && !self.unsynced.is_empty()
            && let Err(error) = self.active.file.sync()
        {
            self.fail(&format!("cannot sync the log: {error}"));
            outcome = Err(io_error(&error));
        }
        let unsynced = std::mem::take(&mut self.unsynced);
        self.unsynced_entries.clear();
        if outcome.is_ok() && !unsynced.is_empty() {
            self.log.shared.note_success();
        }
        if outcome.is_ok() {
            for (_, _, change) in &unsynced {
                if let Change::Put(entry) = change {
                    self.log.shared.note_lease(entry.expires_unix_secs);
                }
            }
            let catalog = &self.log.shared.catalog;
            catalog.apply(&unsynced, self.next_sequence);
            catalog.set_synced(self.active.number, self.active.len_bytes);
        }
        for reply in self.waiting.drain(..) {
            let _ = reply.send(outcome.clone());
        }
        outcome
    }

    /// Commits the index and removes the segments that it no longer mentions. Appended records
    /// must have been settled. On failure everything stays in memory and in the log.
    pub(crate) fn commit(&mut self) -> Result<(), IndexError> {
        assert!(self.unsynced.is_empty(), "the index never runs ahead of the log");
        match self.committer.commit(&self.log.shared) {
            Ok(dead) => {
                self.log_bytes_since_commit = 0;
                self.drop_segments(&dead);
                Ok(())
            }
            Err(error) => {
                if matches!(error, IndexError::Damaged(_)) {
                    // So that the next opening makes it again from the log.
                    let _ = index::set_aside(&*self.log.shared.disk);
                }
                Err(error)
            }
        }
    }
}

impl threads::Writer for Writer {
    fn begin_group(&mut self) {
        self.committer.reopen_if_failed(&self.log.shared);
    }

    fn end_group(&mut self) {
        let _ = self.settle();
        let config = &self.log.shared.config;
        if self.log.shared.catalog.uncommitted() >= config.commit_entries
            || self.log_bytes_since_commit >= config.commit_bytes
        {
            let _ = self.commit();
        }
    }

    fn has_uncommitted(&self) -> bool {
        self.log.shared.catalog.uncommitted() > 0 || self.log_bytes_since_commit > 0
    }

    fn commit_all(&mut self) -> Result<(), StoreError> {
        self.settle()?;
        Ok(self.commit()?)
    }

    fn background_step(&mut self) -> Option<Duration> {
        self.compact_in_background()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.settle().is_ok() && self.has_uncommitted() {
            let _ = self.commit();
        }
    }
}

/// The entry and the record that keep `block`; `None` if nothing would change.
fn plan(
    Found { held, indexed }: Found,
    block: StoredBlock,
    sequence: u64,
) -> Result<Option<(IndexEntry, Record)>, StoreError> {
    let StoredBlock { info, bytes } = block;
    if bytes.len() > MAX_BLOCK_BYTES {
        let len = bytes.len();
        return Err(StoreError::Io(format!("block {} of {len} bytes is too long", info.key)));
    }
    let lease = held.map_or(0, |held| held.expires_unix_secs);
    let expires_unix_secs = info.expires_unix_secs.max(lease);
    if let Some(held) = held
        && !info.kind.replaces(info.version, held.version)
    {
        let body = RecordBody::Lease { expires_unix_secs };
        let header = RecordHeader { key: info.key, sequence, owner: info.owner, body };
        let extended = held.extended(expires_unix_secs, info.owner);
        let record = Record { header, value: Bytes::new(), indexed, replaces: true };
        return Ok((expires_unix_secs > lease).then_some((extended, record)));
    }
    let body = RecordBody::Block {
        kind: info.kind,
        version: info.version,
        expires_unix_secs,
        len_bytes: u32::try_from(bytes.len()).expect("at most MAX_BLOCK_BYTES"),
        value_crc: crc32fast::hash(&bytes),
    };
    let header = RecordHeader { key: info.key, sequence, owner: info.owner, body };
    let entry = IndexEntry {
        // Where it will be is known once it is written.
        segment: 0,
        offset: 0,
        len_bytes: u32::try_from(bytes.len()).expect("at most MAX_BLOCK_BYTES"),
        kind: info.kind,
        version: info.version,
        expires_unix_secs,
        sequence,
        owner: info.owner,
    };
    let replaces =
        held.is_some_and(|held| bytes.len() <= held.len_bytes as usize + MAX_GROWTH_BYTES);
    Ok(Some((entry, Record { header, value: bytes, indexed, replaces })))
}

/// Writes records at the end of a segment in one call, without copying values.
fn write_records(active: &Active, records: &[Record]) -> io::Result<()> {
    const PADDING: [u8; ALIGNMENT] = [0; ALIGNMENT];
    let headers: Vec<_> =
        records.iter().map(|r| segment::encode_record_header(&r.header, active.salt)).collect();
    let mut parts = Vec::with_capacity(records.len() * 3);
    for (header, record) in headers.iter().zip(records) {
        parts.push(IoSlice::new(header));
        if !record.value.is_empty() {
            parts.push(IoSlice::new(&record.value));
        }
        let padding = record.value.len().next_multiple_of(ALIGNMENT) - record.value.len();
        if padding > 0 {
            parts.push(IoSlice::new(&PADDING[..padding]));
        }
    }
    active.file.write_at(active.len_bytes, &mut parts)
}

/// Makes segment `number`; it survives power loss from now on.
pub(crate) fn create_segment(log: &Log, number: u64) -> io::Result<Active> {
    let salt = log.shared.disk.random_u64()?;
    let name = segment::file_name(number);
    let file = log.shared.disk.create(&name)?;
    let start = segment::encode_segment_start(&SegmentHeader { number, salt });
    let made = file
        .write_at(0, &mut [IoSlice::new(&start)])
        .and_then(|()| file.sync())
        .and_then(|()| log.shared.disk.sync_dir());
    if let Err(error) = made {
        let _ = log.shared.disk.remove(&name);
        return Err(error);
    }
    log.segments.insert(number, file.clone());
    log.shared.catalog.add_segment(number, salt, FIRST_RECORD_OFFSET);
    Ok(Active { number, salt, file, len_bytes: FIRST_RECORD_OFFSET })
}
