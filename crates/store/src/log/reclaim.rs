//! Giving back space: removing dead segments, compacting mostly dead ones.
//!
//! A block that is replaced, removed or expired leaves its record behind as garbage. A
//! segment without live records is removed as a whole; from one that is mostly garbage
//! the live records are copied to the end of the log first. A copy keeps its sequence
//! number, so it never wins over anything newer.
//!
//! Compaction goes step by step, so that no caller waits for more than a step: on request
//! ([`crate::BlockStore::reclaim`]), before a put is refused for want of room, and in a store with
//! threads all the time: if more than a [`DUE_SHARE`]th of what is live is garbage, the writer
//! copies [`STEP_BYTES`] now and then, and without rest if more than a [`URGENT_SHARE`]th is.
//!
//! A removal record matters only if the index is lost, and then only while the record
//! it removes is still in the log; compaction copies it exactly as long as that.

use std::time::Duration;

use bytes::Bytes;

use crate::StoreError;
use crate::engine::index::SegmentStat;
use crate::engine::threads::Writer as _;
use crate::log::writer::{Compacting, Headroom, Record, Writer};
use crate::segment::{FIRST_RECORD_OFFSET, Met, RecordBody, RecordHeader, Walk, record_bytes};

/// A segment is worth compacting if at least one byte in so many is garbage (a guess:
/// at 8, freeing a byte costs copying at most seven).
pub(crate) const WORTHWHILE_SHARE: u64 = 8;

/// Segments a put may have compacted to make room for itself.
const MAX_COMPACTIONS_PER_PUT: usize = 4;

/// Bytes of records copied in one append, and in one step of compaction.
const STEP_BYTES: u64 = 1 << 20;

/// Compaction by itself begins when there is one byte of garbage to so many live ones.
const DUE_SHARE: u64 = 4;

/// It goes on without rest when there is one byte of garbage to so many live ones.
const URGENT_SHARE: u64 = 2;

/// What background compaction may copy a second: little beside what a disk can do.
const COMPACT_BYTES_PER_SEC: u64 = 8 << 20;

/// Less garbage than so many segments hold is no reason to compact by itself.
const LEAST_SEGMENTS: u64 = 2;

fn garbage_bytes(stat: &SegmentStat) -> u64 {
    stat.len_bytes.saturating_sub(stat.live_bytes)
}

/// The same without removals: those that still matter would only be copied to and fro.
fn spare_bytes(stat: &SegmentStat) -> u64 {
    garbage_bytes(stat).saturating_sub(stat.removals * record_bytes(0))
}

fn is_worthwhile(stat: &SegmentStat) -> bool {
    stat.live_bytes == 0 || garbage_bytes(stat) * WORTHWHILE_SHARE >= stat.len_bytes
}

/// What a step of compaction did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Step {
    /// Bytes of records copied.
    pub(crate) copied_bytes: u64,
    /// Lengths of segments removed.
    pub(crate) removed_bytes: u64,
    /// The pass is about segments before this one, so it skips those that it writes itself.
    pub(crate) before: u64,
    /// Nothing more is worth compacting, or there is no room for it.
    pub(crate) is_last: bool,
}

/// Whether compaction should go on by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Need {
    None,
    Due,
    Urgent,
}

/// What a walk for compaction has found and not yet dealt with.
#[derive(Default)]
struct Found {
    copies: Vec<Record>,
    copy_bytes: u64,
    damaged: Vec<(atoll_key::Key, Option<u64>)>,
}

impl Writer {
    /// Gives back space by copying about [`STEP_BYTES`], or less where segments are small. The
    /// first step of a pass is asked for without, the others with what the first said.
    pub(crate) fn reclaim_step(&mut self, before: Option<u64>) -> Result<Step, StoreError> {
        self.settle()?;
        let removed_before = self.removed_bytes;
        if self.compacting.is_none() {
            self.roll_if_wasteful()?;
            self.commit()?;
        }
        let before = before.unwrap_or(self.active.number);
        let mut step = Step { is_last: true, before, ..Step::default() };
        let next = self.compacting.map(|now| now.number);
        let worthwhile = || self.worthwhile_segments().into_iter().find(|n| *n < before);
        if let Some(number) = next.or_else(worthwhile) {
            let copied = self.compact(number, 0)?;
            self.settle()?;
            step.copied_bytes = copied.unwrap_or(0);
            step.is_last = copied.is_none();
            if copied.is_some() && self.compacting.is_none() {
                self.commit()?;
                if self.log.shared.catalog.read().segments().contains_key(&number) {
                    self.stuck.insert(number);
                }
            }
        }
        step.removed_bytes = self.removed_bytes - removed_before;
        Ok(step)
    }

    /// Whether there is so much garbage that compaction should go on by itself.
    fn compaction_need(&self) -> Need {
        if self.check_usable().is_err() {
            return Need::None;
        }
        let (mut garbage, mut live) = (0, 0);
        for (number, stat) in self.log.shared.catalog.read().segments() {
            live += stat.live_bytes;
            if *number != self.active.number && !self.stuck.contains(number) {
                garbage += spare_bytes(stat);
            }
        }
        let least_bytes = LEAST_SEGMENTS * self.log.segment_bytes();
        match garbage.saturating_sub(least_bytes) {
            excess if excess * URGENT_SHARE > live => Need::Urgent,
            excess if excess * DUE_SHARE > live => Need::Due,
            _ => Need::None,
        }
    }

    /// A step of compaction without a request, if there is need of it.
    pub(crate) fn compact_in_background(&mut self) -> Option<Duration> {
        let rest_ms = match self.compaction_need() {
            Need::None => return None,
            Need::Due => STEP_BYTES * 1000 / COMPACT_BYTES_PER_SEC,
            Need::Urgent => 0,
        };
        match self.reclaim_step(self.pass) {
            Ok(step) if !step.is_last => {
                self.pass = Some(step.before);
                return Some(Duration::from_millis(rest_ms));
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "garbage cannot be compacted"),
        }
        // The next look is at the next commit.
        self.pass = None;
        None
    }

    /// Tries to make room for an append; the caller looks whether it worked.
    pub(crate) fn make_room(
        &mut self,
        need_bytes: u64,
        headroom: Headroom,
    ) -> Result<(), StoreError> {
        let missing_bytes = self.missing_bytes(need_bytes, headroom)?;
        let (garbage, has_dead) = {
            let state = self.log.shared.catalog.read();
            let worthwhile = |(number, stat): &(&u64, &SegmentStat)| {
                is_worthwhile(stat) && !self.stuck.contains(number)
            };
            let stats = || state.segments().iter().filter(worthwhile);
            (
                stats().map(|(_, stat)| garbage_bytes(stat)).sum::<u64>(),
                stats().any(|(_, stat)| stat.live_bytes == 0),
            )
        };
        if garbage < missing_bytes {
            return Ok(());
        }
        self.roll_if_wasteful()?;
        if has_dead || self.has_uncommitted() {
            self.commit()?;
        }
        for number in self.worthwhile_segments().into_iter().take(MAX_COMPACTIONS_PER_PUT) {
            if self.missing_bytes(need_bytes, headroom)? == 0 {
                break;
            }
            if self.compact(number, u64::MAX)?.is_none() {
                break;
            }
            self.settle()?;
            self.commit()?;
        }
        Ok(())
    }

    /// Ends the last segment if half of it is garbage, so that it can be compacted.
    fn roll_if_wasteful(&mut self) -> Result<(), StoreError> {
        let stat = self.log.shared.catalog.read().segments().get(&self.active.number).copied();
        let wasteful = stat.is_some_and(|stat| {
            stat.len_bytes > FIRST_RECORD_OFFSET && garbage_bytes(&stat) * 2 >= stat.len_bytes
        });
        if wasteful && self.missing_bytes(FIRST_RECORD_OFFSET, Headroom::Used)? == 0 {
            self.roll()?;
            // Moves the checkpoint into the new segment, so that the old one may go.
            self.settle()?;
        }
        Ok(())
    }

    /// Segments to compact, those first that leave least to copy.
    fn worthwhile_segments(&self) -> Vec<u64> {
        let state = self.log.shared.catalog.read();
        let mut segments: Vec<(u64, u64)> = state
            .segments()
            .iter()
            .filter(|(number, stat)| {
                **number != self.active.number
                    && is_worthwhile(stat)
                    && !self.stuck.contains(number)
            })
            .map(|(number, stat)| (stat.len_bytes - spare_bytes(stat), *number))
            .collect();
        segments.sort_unstable();
        segments.into_iter().map(|(_, number)| number).collect()
    }

    /// Copies what is live in a segment to the end of the log, step by step until `budget_bytes`
    /// have been copied; goes on where it stopped the last time. Returns the bytes copied; `None`
    /// if room ran out.
    fn compact(&mut self, number: u64, budget_bytes: u64) -> Result<Option<u64>, StoreError> {
        let resumed = self.compacting.take().filter(|now| now.number == number);
        let stat = self.log.shared.catalog.read().segments().get(&number).copied();
        let Some(stat) = stat else { return Ok(Some(0)) };
        let from = resumed.map_or(FIRST_RECORD_OFFSET, |now| now.offset);
        let io = |error: std::io::Error| StoreError::Io(error.to_string());
        let file = self.log.segments.open(&*self.log.shared.disk, number).map_err(io)?;
        let mut walk = Walk::new(&*file, stat.salt, from, stat.len_bytes);
        let mut found = Found::default();
        let mut copied_bytes = 0;
        let step_bytes = STEP_BYTES.min(self.log.segment_bytes() / 4);
        while let Some(met) = walk.step().map_err(io)? {
            let Met::Record { offset, header } = met else { continue };
            self.consider(number, offset, header, &mut walk, &mut found)?;
            if found.copy_bytes >= step_bytes {
                copied_bytes += found.copy_bytes;
                if !self.copy(&mut found)? {
                    return Ok(None);
                }
                if copied_bytes >= budget_bytes {
                    self.set_aside(std::mem::take(&mut found.damaged))?;
                    let offset = offset + header.record_bytes();
                    self.compacting = Some(Compacting { number, offset });
                    return Ok(Some(copied_bytes));
                }
            }
        }
        copied_bytes += found.copy_bytes;
        if !self.copy(&mut found)? {
            return Ok(None);
        }
        self.set_aside(std::mem::take(&mut found.damaged))?;
        self.settle()?;
        self.log.shared.catalog.clear_removals(number);
        let left = self.log.shared.catalog.read().segments().get(&number).map(|s| s.live_bytes);
        if left.is_some_and(|live_bytes| live_bytes > 0) {
            // Live records under damaged headers; a scrub will set them aside.
            tracing::warn!(segment = number, "some live records of a segment cannot be found");
            self.stuck.insert(number);
        }
        Ok(Some(copied_bytes))
    }

    /// Notes what is to be done about one record of a segment that is compacted.
    fn consider(
        &mut self,
        number: u64,
        offset: u64,
        header: RecordHeader,
        walk: &mut Walk<'_>,
        found: &mut Found,
    ) -> Result<(), StoreError> {
        let known = self.lookup(&header.key)?;
        let (body, owner, value) = match header.body {
            RecordBody::Lease { .. } => return Ok(()),
            RecordBody::Removal { target_segment } => {
                let target_exists =
                    self.log.shared.catalog.read().segments().contains_key(&target_segment);
                if known.held.is_some() || !target_exists || target_segment == number {
                    return Ok(());
                }
                (header.body, header.owner, Bytes::new())
            }
            RecordBody::Block { kind, version, len_bytes, value_crc, .. } => {
                let Some(held) = known.held else { return Ok(()) };
                if (held.segment, u64::from(held.offset)) != (number, offset) {
                    return Ok(());
                }
                let value = walk.value(offset, &header);
                let Some(value) = value.map_err(|e| StoreError::Io(e.to_string()))? else {
                    found.damaged.push((header.key, Some(header.sequence)));
                    return Ok(());
                };
                let expires_unix_secs = held.expires_unix_secs;
                let body =
                    RecordBody::Block { kind, version, expires_unix_secs, len_bytes, value_crc };
                (body, held.owner, Bytes::copy_from_slice(value))
            }
        };
        let header = RecordHeader { body, owner, ..header };
        found.copy_bytes += header.record_bytes();
        found.copies.push(Record { header, value, indexed: known.indexed, replaces: true });
        Ok(())
    }

    /// Appends copies; `false` if there is no room for them.
    fn copy(&mut self, found: &mut Found) -> Result<bool, StoreError> {
        let copies = std::mem::take(&mut found.copies);
        let copy_bytes = std::mem::take(&mut found.copy_bytes);
        if copies.is_empty() {
            return Ok(true);
        }
        if self.missing_bytes(copy_bytes, Headroom::Used)? > 0 {
            return Ok(false);
        }
        match self.append_records(&copies) {
            Err(StoreError::Full { .. }) => Ok(false),
            appended => appended.map(|()| true),
        }
    }

    /// Removes the files of segments the committed index does not mention any more.
    pub(crate) fn drop_segments(&mut self, dead: &[u64]) {
        for number in dead {
            let (stat, is_oldest) = {
                let state = self.log.shared.catalog.read();
                let oldest = state.segments().keys().next().copied();
                (state.segments().get(number).copied(), oldest == Some(*number))
            };
            let Some(stat) = stat else { continue };
            // Its removals may still be needed; compaction looks at them one by one.
            if stat.removals > 0 && !is_oldest {
                continue;
            }
            self.log.segments.forget(*number);
            match self.log.shared.disk.remove(&crate::segment::file_name(*number)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    tracing::warn!(segment = number, %error, "a dead segment stays for now");
                }
                _ => {
                    self.removed_bytes += stat.len_bytes;
                    self.log.shared.catalog.forget_segment(*number);
                    self.stuck.remove(number);
                }
            }
        }
    }
}
