//! Giving back space: removing dead segments, compacting mostly dead ones.
//!
//! A block that is replaced, removed or expired leaves its record behind as garbage. A
//! segment without live records is removed as a whole; from one that is mostly garbage
//! the live records are copied to the end of the log first. A copy keeps its sequence
//! number, so it never wins over anything newer.
//!
//! A removal record matters only if the index is lost, and then only while the record
//! it removes is still in the log; compaction copies it exactly as long as that.

use bytes::Bytes;

use crate::StoreError;
use crate::index::SegmentStat;
use crate::segment::{FIRST_RECORD_OFFSET, Met, RecordBody, RecordHeader, Walk};
use crate::writer::{Record, Room, Writer};

/// A segment is worth compacting if at least one byte in so many is garbage (a guess:
/// at 8, freeing a byte costs copying at most seven).
const WORTHWHILE_SHARE: u64 = 8;

/// Segments a put may have compacted to make room for itself.
const MAX_COMPACTIONS_PER_PUT: usize = 4;

/// Bytes of records copied in one append.
const COPY_BYTES: u64 = 1 << 20;

fn garbage_bytes(stat: &SegmentStat) -> u64 {
    stat.len_bytes.saturating_sub(stat.live_bytes)
}

fn is_worthwhile(stat: &SegmentStat) -> bool {
    stat.live_bytes == 0 || garbage_bytes(stat) * WORTHWHILE_SHARE >= stat.len_bytes
}

/// What a walk for compaction has found and not yet dealt with.
#[derive(Default)]
struct Found {
    copies: Vec<Record>,
    copy_bytes: u64,
    damaged: Vec<(atoll_key::Key, Option<u64>)>,
}

impl Writer {
    /// Gives back space by copying at most about `budget_bytes`.
    pub(crate) fn reclaim(&mut self, budget_bytes: u64) -> Result<u64, StoreError> {
        self.settle()?;
        let before = self.shared.usage().disk_bytes;
        self.roll_if_wasteful()?;
        self.commit()?;
        let mut budget_bytes = budget_bytes;
        for number in self.worthwhile_segments() {
            let Some(copied) = self.compact(number, budget_bytes)? else { break };
            budget_bytes = budget_bytes.saturating_sub(copied);
        }
        self.settle()?;
        self.commit()?;
        Ok(before.saturating_sub(self.shared.usage().disk_bytes))
    }

    /// Tries to make room for an append; the caller looks whether it worked.
    pub(crate) fn make_room(&mut self, need_bytes: u64, room: Room) -> Result<(), StoreError> {
        let missing_bytes = self.missing_bytes(need_bytes, room)?;
        let (garbage, has_dead) = {
            let state = self.shared.catalog.read();
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
            if self.missing_bytes(need_bytes, room)? == 0 {
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
        let stat = self.shared.catalog.read().segments().get(&self.active.number).copied();
        let wasteful = stat.is_some_and(|stat| {
            stat.len_bytes > FIRST_RECORD_OFFSET && garbage_bytes(&stat) * 2 >= stat.len_bytes
        });
        if wasteful && self.missing_bytes(FIRST_RECORD_OFFSET, Room::Reserved)? == 0 {
            self.roll()?;
            // Moves the checkpoint into the new segment, so that the old one may go.
            self.settle()?;
        }
        Ok(())
    }

    /// Segments to compact, the emptiest first.
    fn worthwhile_segments(&self) -> Vec<u64> {
        let state = self.shared.catalog.read();
        let mut segments: Vec<(u64, u64)> = state
            .segments()
            .iter()
            .filter(|(number, stat)| {
                **number != self.active.number
                    && is_worthwhile(stat)
                    && !self.stuck.contains(number)
            })
            .map(|(number, stat)| (stat.live_bytes, *number))
            .collect();
        segments.sort_unstable();
        segments.into_iter().map(|(_, number)| number).collect()
    }

    /// Copies what is live in a segment to the end of the log, up to about
    /// `budget_bytes`. Returns the bytes copied; `None` if budget or room ran out first.
    fn compact(&mut self, number: u64, budget_bytes: u64) -> Result<Option<u64>, StoreError> {
        let stat = self.shared.catalog.read().segments().get(&number).copied();
        let Some(stat) = stat else { return Ok(Some(0)) };
        if stat.live_bytes > budget_bytes {
            return Ok(None);
        }
        let io = |error: std::io::Error| StoreError::Io(error.to_string());
        let file = self.shared.files.open(&*self.shared.disk, number).map_err(io)?;
        let mut walk = Walk::new(&*file, stat.salt, FIRST_RECORD_OFFSET, stat.len_bytes);
        let mut found = Found::default();
        let mut copied_bytes = 0;
        while let Some(met) = walk.step().map_err(io)? {
            let Met::Record { offset, header } = met else { continue };
            self.consider(number, offset, header, &mut walk, &mut found)?;
            if found.copy_bytes >= COPY_BYTES {
                copied_bytes += found.copy_bytes;
                if !self.copy(&mut found)? {
                    return Ok(None);
                }
            }
        }
        copied_bytes += found.copy_bytes;
        if !self.copy(&mut found)? {
            return Ok(None);
        }
        self.set_aside(std::mem::take(&mut found.damaged))?;
        self.settle()?;
        self.shared.catalog.clear_removals(number);
        let left = self.shared.catalog.read().segments().get(&number).map(|s| s.live_bytes);
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
                    self.shared.catalog.read().segments().contains_key(&target_segment);
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
        found.copies.push(Record { header, value, indexed: known.indexed });
        Ok(())
    }

    /// Appends copies; `false` if there is no room for them.
    fn copy(&mut self, found: &mut Found) -> Result<bool, StoreError> {
        let copies = std::mem::take(&mut found.copies);
        let copy_bytes = std::mem::take(&mut found.copy_bytes);
        if copies.is_empty() {
            return Ok(true);
        }
        if self.missing_bytes(copy_bytes, Room::Reserved)? > 0 {
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
                let state = self.shared.catalog.read();
                let oldest = state.segments().keys().next().copied();
                (state.segments().get(number).copied(), oldest == Some(*number))
            };
            let Some(stat) = stat else { continue };
            // Its removals may still be needed; compaction looks at them one by one.
            if stat.removals > 0 && !is_oldest {
                continue;
            }
            self.shared.files.forget(*number);
            match self.shared.disk.remove(&crate::segment::file_name(*number)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    tracing::warn!(segment = number, %error, "a dead segment stays for now");
                }
                _ => {
                    self.shared.catalog.forget_segment(*number);
                    self.stuck.remove(number);
                }
            }
        }
    }
}
