//! Bytes of transparent files that are open: every read compares tags, every write makes them.

use atoll_vfs::{Errno, FileTime};
use bytes::{Bytes, BytesMut};

use super::access::check_changeable;
use super::names::Failure;
use super::transparent::{BLOCKS_A_STEP, STEP_BLOCKS};
use super::{Core, Shared, errno};
use crate::ext2::{Ext2Error, Extent, Map, Run};
use crate::records::tag::Belongs;

/// Extents, new or old, that a step writes at most: the tags of each may lie in a block of
/// their own.
const EXTENTS_A_STEP: usize = 4;

impl Shared {
    /// The bytes of an extent, compared with their tags; `EIO` if they are not the file's.
    pub(super) fn read_tagged(&self, number: u32, extent: Extent) -> Result<BytesMut, Errno> {
        let block_bytes = self.block_bytes as usize;
        let mut bytes = BytesMut::zeroed(extent.len as usize * block_bytes);
        let at = u64::from(extent.start) * u64::from(self.block_bytes);
        self.device.read_at(at, &mut bytes).map_err(|_| Errno::EIO)?;
        let mut core = self.core();
        let generation = core.open_map(number).map_or(0, |map| map.entry.generation);
        for (i, block) in (0..).zip(bytes.chunks_exact(block_bytes)) {
            let belongs = Belongs { inode: number, generation, logical: extent.logical + i };
            let tag = core.ext2.tag_of(belongs, block);
            let Some((records, meta)) = core.ext2.records_and_meta() else {
                return Err(Errno::EIO);
            };
            let expected = records.tag(meta, extent.start + i).map_err(|error| errno(&error))?;
            if tag != expected {
                return Err(Errno::EIO);
            }
        }
        Ok(bytes)
    }

    /// Reads from a transparent file; the caller holds its lock.
    pub(super) fn read_transparent(
        &self,
        number: u32,
        offset: u64,
        len: u32,
    ) -> Result<Bytes, Errno> {
        let block_bytes = u64::from(self.block_bytes);
        let (extents, first, len) = {
            let core = self.core();
            let map = core.open_map(number).ok_or(Errno::EBADF)?;
            let len = map.entry.size_bytes.saturating_sub(offset).min(u64::from(len));
            if len == 0 {
                return Ok(Bytes::new());
            }
            let first = offset / block_bytes;
            let last = (offset + len - 1) / block_bytes;
            (map.extents_of(first as u32, (last - first + 1) as u32), first, len)
        };
        let mut bytes = BytesMut::new();
        for extent in extents {
            if extent.start == 0 {
                let zeros = extent.len as usize * block_bytes as usize;
                bytes.resize(bytes.len() + zeros, 0);
            } else {
                let read = self.read_tagged(number, extent);
                bytes.unsplit(read.inspect_err(|_| self.note_doubt(number))?);
            }
        }
        let skip = (offset - first * block_bytes) as usize;
        Ok(bytes.freeze().slice(skip..skip + len as usize))
    }

    /// Writes a part of `data` to a transparent file; the caller holds its lock.
    pub(super) fn write_transparent_some(
        &self,
        number: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<usize, Errno> {
        let block_bytes = u64::from(self.block_bytes);
        let first = offset / block_bytes;
        let last = (offset + data.len() as u64 - 1) / block_bytes;
        let count = (last - first + 1).min(u64::from(BLOCKS_A_STEP)) as u32;
        self.in_transaction(STEP_BLOCKS, |now| {
            // The former contents, if the step writes only a part of a block.
            let extents = self.fill_map(number, first as u32, count)?;
            let reached: u32 = extents.iter().map(|(extent, _)| extent.len).sum();
            let room = u64::from(reached) * block_bytes - offset % block_bytes;
            let len = room.min(data.len() as u64) as usize;
            let end = offset + len as u64;
            let mut from = 0;
            for (extent, is_new) in extents {
                let start = u64::from(extent.logical) * block_bytes;
                let stop = start + u64::from(extent.len) * block_bytes;
                let whole = offset <= start && end >= stop;
                let mut bytes = if is_new || whole {
                    BytesMut::zeroed((stop - start) as usize)
                } else {
                    self.read_tagged(number, extent)?
                };
                let (at, until) = (offset.max(start) - start, end.min(stop) - start);
                let part = &data[from..from + (until - at) as usize];
                bytes[at as usize..until as usize].copy_from_slice(part);
                from += part.len();
                self.write_tagged(number, extent, &bytes)?;
            }
            let mut core = self.core();
            core.set_transparent_size(number, now, |size| size.max(end))
                .map_err(Failure::Broken)?;
            Ok(len)
        })
    }

    /// Gives blocks to the holes of a range, as many as a step can, and returns the extents
    /// from its start on, with whether they are new.
    fn fill_map(
        &self,
        number: u32,
        first: u32,
        count: u32,
    ) -> Result<Vec<(Extent, bool)>, Failure> {
        let mut core = self.core();
        let mut open = core.maps.0.remove(&number).ok_or(Errno::EBADF)?;
        let mut filled = Vec::new();
        let mut outcome = Ok(());
        'all: for extent in open.map.extents_of(first, count) {
            if filled.len() >= EXTENTS_A_STEP {
                break;
            }
            if extent.start != 0 {
                filled.push((extent, false));
                continue;
            }
            let mut done = 0;
            while done < extent.len {
                if filled.len() >= EXTENTS_A_STEP {
                    break 'all;
                }
                let logical = extent.logical + done;
                match core.take_for_map(number, &mut open.map, logical, extent.len - done) {
                    Ok(run) => {
                        filled.push((Extent { logical, start: run.start, len: run.len }, true));
                        done += run.len;
                    }
                    Err(Ext2Error::NoSpace) if !filled.is_empty() => break 'all,
                    Err(error) => {
                        outcome = Err(error.into());
                        break 'all;
                    }
                }
            }
        }
        core.maps.0.insert(number, open);
        outcome.map(|()| filled)
    }

    /// Writes whole blocks of a transparent file and their tags. Where the device refuses (an
    /// image with holes on a disk that is full) only this file is lost.
    fn write_tagged(&self, number: u32, extent: Extent, bytes: &[u8]) -> Result<(), Failure> {
        let at = u64::from(extent.start) * u64::from(self.block_bytes);
        let written = self.device.write_at(at, bytes);
        let mut core = self.core();
        if let Err(error) = written {
            core.doubt(number).map_err(Failure::Broken)?;
            let full = error.kind() == std::io::ErrorKind::StorageFull;
            return Err(Failure::Refused(if full { Errno::ENOSPC } else { Errno::EIO }));
        }
        let generation = core.open_map(number).map_or(0, |map| map.entry.generation);
        for (i, block) in (0..).zip(bytes.chunks_exact(self.block_bytes as usize)) {
            let belongs = Belongs { inode: number, generation, logical: extent.logical + i };
            let tag = core.ext2.tag_of(belongs, block);
            if let Some((records, meta)) = core.ext2.records_and_meta() {
                records.put_tag(meta, extent.start + i, tag).map_err(Failure::Broken)?;
            }
        }
        Ok(())
    }

    /// Cuts an open transparent file off, or lengthens it with a hole; the caller holds its
    /// lock.
    pub(super) fn set_transparent_size(&self, number: u32, size: u64) -> Result<(), Errno> {
        let block_bytes = u64::from(self.block_bytes);
        {
            let mut core = self.core();
            check_changeable(&core.live_inode(number)?)?;
            if size > core.ext2.longest_file_bytes() {
                return Err(Errno::EFBIG);
            }
        }
        let keep = size.div_ceil(block_bytes) as u32;
        loop {
            let _handle = self.join_transaction(STEP_BLOCKS)?;
            let now = self.now();
            let cut = self.core().cut_open_map(number, keep);
            let cut = cut.map_err(|error| self.broken(&error))?.ok_or(Errno::EBADF)?;
            if cut {
                self.zero_behind(number, size)?;
            }
            let reach = |old: u64| if cut { size } else { old };
            let set = self.core().set_transparent_size(number, now, reach);
            set.map_err(|error| self.broken(&error))?;
            if cut {
                return Ok(());
            }
        }
    }

    /// What lies behind the end of a file within its last block becomes zeros.
    fn zero_behind(&self, number: u32, size: u64) -> Result<(), Errno> {
        let (block, within) =
            (size / u64::from(self.block_bytes), size % u64::from(self.block_bytes));
        let last = self.core().open_map(number).map(|map| map.extents_of(block as u32, 1));
        match last.and_then(|extents| extents.first().copied()) {
            Some(extent) if extent.start != 0 && within != 0 => {
                let mut bytes = self.read_tagged(number, extent)?;
                bytes[within as usize..].fill(0);
                self.write_tagged(number, extent, &bytes).map_err(|failure| match failure {
                    Failure::Refused(errno) => errno,
                    Failure::Space(error) | Failure::Broken(error) => self.broken(&error),
                })
            }
            _ => Ok(()),
        }
    }
}

impl Core {
    fn take_for_map(
        &mut self,
        number: u32,
        map: &mut Map,
        logical: u32,
        want: u32,
    ) -> Result<Run, Ext2Error> {
        let run = self.ext2.allocate_transparent(want)?;
        self.ext2.add_to_map(number, map, logical, run)?;
        if let Some((records, _)) = self.ext2.records_and_meta() {
            records.pin(run);
        }
        Ok(run)
    }

    /// Gives back blocks of an open map; whether all beyond `keep` are gone, none if it is
    /// not open.
    fn cut_open_map(&mut self, number: u32, keep: u32) -> Result<Option<bool>, Ext2Error> {
        let Some(mut open) = self.maps.0.remove(&number) else { return Ok(None) };
        // A step changes its last extents only.
        let from = open.map.extents.len().saturating_sub(EXTENTS_A_STEP + 1);
        let before = open.map.extents[from..].to_vec();
        let cut = self.ext2.cut_map(number, &mut open.map, keep);
        if let Some((records, _)) = self.ext2.records_and_meta() {
            let after = open.map.extents.get(from..).unwrap_or_default();
            before.iter().for_each(|e| records.unpin(Run { start: e.start, len: e.len }));
            after.iter().for_each(|e| records.pin(Run { start: e.start, len: e.len }));
        }
        self.maps.0.insert(number, open);
        cut.map(Some)
    }

    /// Changes the length that an open transparent file has.
    fn set_transparent_size(
        &mut self,
        number: u32,
        now: FileTime,
        change: impl FnOnce(u64) -> u64,
    ) -> Result<(), Ext2Error> {
        let Some(open) = self.maps.0.get_mut(&number) else { return Ok(()) };
        open.map.entry.size_bytes = change(open.map.entry.size_bytes);
        let entry = open.map.entry;
        if let Some((records, meta)) = self.ext2.records_and_meta() {
            records.put_map_entry(meta, number, Some(&entry))?;
        }
        let mut inode = self.ext2.inode(number)?;
        inode.mtime = now;
        inode.ctime = now;
        self.ext2.put_inode(number, &inode)
    }
}
