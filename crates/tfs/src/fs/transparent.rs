//! Transparent files that are open (§3.1, §3.2): opening checks the blocks, one lost block and
//! the file is gone; while it is open its blocks are pinned; every read compares tags.

use std::collections::BTreeMap;

use atoll_vfs::{Errno, FileKind, FileTime};
use bytes::{Bytes, BytesMut};

use super::held::Ending;
use super::names::Failure;
use super::{Core, Shared, errno};
use crate::ext2::{Ext2Error, Extent, Map, Run};
use crate::format::inode::{APPEND_ONLY, IMMUTABLE, Inode, POINTERS, TRANSPARENT};
use crate::records::map::MapEntry;
use crate::records::tag::Belongs;

/// Blocks that a step writes or compares at most: their tags lie in few blocks.
const BLOCKS_A_STEP: u32 = 64;
/// Metadata blocks that a step changes at most: for each of its runs bitmaps, summary, heads
/// of two extents; tags, map entry, inode.
pub(super) const STEP_BLOCKS: usize = 40;
/// Extents, new or old, that a step writes at most: the tags of each may lie in a block of
/// their own.
const EXTENTS_A_STEP: usize = 4;

/// The epoch of a file whose tags are to be compared when it is opened next; the first is 1.
const NEVER: u32 = 0;

/// The attribute that says whether a file is transparent, or new files in a directory will be.
pub(super) const TRANSPARENT_XATTR: &[u8] = b"user.tfs.transparent";

/// The maps of all transparent files that are open.
#[derive(Debug, Default)]
pub(super) struct OpenMaps(BTreeMap<u32, OpenMap>);

#[derive(Debug)]
struct OpenMap {
    map: Map,
    opens: u32,
    /// All tags were compared in this epoch, or the file has grown since it was empty.
    compared: bool,
}

/// What an open found.
pub(super) enum Look {
    /// It is open.
    Open,
    /// It is pinned; its tags are to be compared.
    Compare {
        /// Which file has the inode.
        generation: u32,
    },
    /// It is lost.
    Lost {
        /// Which file has the inode.
        generation: u32,
    },
}

impl Core {
    /// The map of a transparent file that is open.
    pub(super) fn open_map(&self, number: u32) -> Option<&Map> {
        self.maps.0.get(&number).map(|open| &open.map)
    }

    /// What is known of a transparent file, open or not.
    pub(super) fn map_entry(
        &mut self,
        number: u32,
        inode: &Inode,
    ) -> Result<Option<MapEntry>, Ext2Error> {
        if let Some(map) = self.open_map(number) {
            return Ok(Some(map.entry));
        }
        let Some((records, meta)) = self.ext2.records_and_meta() else { return Ok(None) };
        let entry = records.map_entry(meta, number)?;
        let longest = self.ext2.longest_file_bytes();
        let own = |e: &MapEntry| e.generation == inode.generation && e.size_bytes <= longest;
        Ok(entry.filter(own))
    }

    /// Notes a new transparent file, or a new directory of an old one.
    pub(super) fn put_transparent_parent(
        &mut self,
        number: u32,
        inode: &Inode,
        parent: u32,
    ) -> Result<(), Ext2Error> {
        let found = self.map_entry(number, inode)?;
        let Some((records, meta)) = self.ext2.records_and_meta() else { return Ok(()) };
        let epoch = records.header().epoch;
        let new = MapEntry {
            generation: inode.generation,
            parent,
            first_extent: 0,
            blocks: 0,
            size_bytes: 0,
            epoch,
        };
        let entry = found.map_or(new, |entry| MapEntry { parent, ..entry });
        records.put_map_entry(meta, number, Some(&entry))?;
        if let Some(open) = self.maps.0.get_mut(&number) {
            open.map.entry = entry;
        }
        Ok(())
    }

    /// Opens a transparent file as far as that needs no data.
    pub(super) fn look(&mut self, number: u32) -> Result<Look, Errno> {
        if let Some(open) = self.maps.0.get_mut(&number) {
            open.opens += 1;
            // Another call compares, and may find it lost: this one does not wait for it.
            let generation = open.map.entry.generation;
            return Ok(if open.compared { Look::Open } else { Look::Compare { generation } });
        }
        let inode = self.live_inode(number)?;
        let generation = inode.generation;
        let map = self.ext2.load_map(number, &inode).map_err(|error| errno(&error))?;
        let Some(map) = map else { return Ok(Look::Lost { generation }) };
        let Some((records, _)) = self.ext2.records_and_meta() else {
            return Ok(Look::Lost { generation });
        };
        for extent in &map.extents {
            records.pin(Run { start: extent.start, len: extent.len });
        }
        let compared = map.entry.epoch == records.header().epoch || map.extents.is_empty();
        self.maps.0.insert(number, OpenMap { map, opens: 1, compared });
        Ok(if compared { Look::Open } else { Look::Compare { generation } })
    }

    /// Notes of an open file that its tags are to be compared when it is opened next.
    fn doubt(&mut self, number: u32) -> Result<(), Ext2Error> {
        let Some(open) = self.maps.0.get_mut(&number) else { return Ok(()) };
        open.map.entry.epoch = NEVER;
        open.compared = false;
        let entry = open.map.entry;
        let Some((records, meta)) = self.ext2.records_and_meta() else { return Ok(()) };
        records.put_map_entry(meta, number, Some(&entry))
    }

    /// Ends an open of a transparent file.
    pub(super) fn close_transparent(&mut self, number: u32) {
        let Some(open) = self.maps.0.get_mut(&number) else { return };
        open.opens -= 1;
        if open.opens > 0 {
            return;
        }
        let open = self.maps.0.remove(&number).expect("it is there");
        if let Some((records, _)) = self.ext2.records_and_meta() {
            for extent in &open.map.extents {
                records.unpin(Run { start: extent.start, len: extent.len });
            }
        }
    }

    /// Takes away the name of a file that is lost; it then ends as any without a name, here and
    /// now if nobody holds it. The name is found by looking through the directory. (To other
    /// software it is an empty file, which may have been given more names: each goes when it is
    /// opened by, and the file with the last.)
    fn lose(
        &mut self,
        number: u32,
        generation: u32,
        now: FileTime,
    ) -> Result<Option<Ending>, Ext2Error> {
        let mut inode = self.ext2.inode(number)?;
        // Another call may have been here first, and the number be another file's by now.
        if inode.links == 0 || inode.generation != generation || !inode.is_transparent_file() {
            return Ok(None);
        }
        let entry = {
            let Some((records, meta)) = self.ext2.records_and_meta() else { return Ok(None) };
            records.map_entry(meta, number)?
        };
        // The record may be damaged: then the directory in which it was found last has it. A
        // file whose name cannot be found stays; a name without a file would be damage.
        let parents = [entry.map(|entry| entry.parent), self.held.parent_of(number)];
        let names = inode.links;
        for parent in parents.into_iter().flatten() {
            if inode.links > 0 && self.remove_name_of(number, parent, now)? {
                inode.links -= 1;
            }
        }
        if inode.links == names {
            return Ok(None);
        }
        inode.ctime = now;
        if inode.links > 0 {
            self.ext2.put_inode(number, &inode)?;
            return Ok(None);
        }
        self.add_orphan(number, &mut inode)?;
        self.ext2.put_inode(number, &inode)?;
        Ok((!self.held.is_held(number)).then(|| Ending::of(number, &inode)))
    }

    /// Whether a directory had the name of a file, which it has no longer.
    fn remove_name_of(
        &mut self,
        number: u32,
        parent: u32,
        now: FileTime,
    ) -> Result<bool, Ext2Error> {
        let Ok(mut directory) = self.ext2.inode(parent) else { return Ok(false) };
        if directory.kind() != Ok(FileKind::Directory) || directory.links == 0 {
            return Ok(false);
        }
        let mut from = 0;
        loop {
            let listed = self.ext2.list_entries(parent, &directory, from, 256)?;
            let Some(last) = listed.last() else { return Ok(false) };
            from = last.next;
            if let Some(entry) = listed.into_iter().find(|entry| entry.inode == number) {
                let found = self.ext2.find_entry(parent, &directory, &entry.name)?;
                if let Some(found) = found.filter(|found| found.inode == number) {
                    self.ext2.remove_entry(parent, &mut directory, &entry.name, found.at)?;
                    directory.mtime = now;
                    directory.ctime = now;
                    self.ext2.put_inode(parent, &directory)?;
                    return Ok(true);
                }
                return Ok(false);
            }
        }
    }
}

impl Shared {
    /// Makes a directory's new files transparent, or an empty file; or ordinary again.
    pub(super) fn set_transparent(&self, number: u32, on: bool) -> Result<(), Errno> {
        let _passage = self.pass(STEP_BLOCKS)?;
        let mut core = self.core();
        let mut inode = core.live_inode(number)?;
        let directory = match inode.kind() {
            Ok(FileKind::Directory) => true,
            Ok(FileKind::Regular) => false,
            _ => return Err(Errno::EOPNOTSUPP),
        };
        if (inode.flags & TRANSPARENT != 0) == on {
            return Ok(());
        }
        // A file's contents cannot be moved while it may be open, and it must have one name.
        let size = match core.map_entry(number, &inode).map_err(|error| errno(&error))? {
            Some(entry) if !on => entry.size_bytes,
            _ => inode.size_bytes,
        };
        if !directory && (size > 0 || inode.links > 1 || inode.pointers != [0; POINTERS]) {
            return Err(Errno::EOPNOTSUPP);
        }
        if core.open_map(number).is_some() || (!directory && core.held.is_open(number)) {
            return Err(Errno::EBUSY);
        }
        inode.flags = inode.flags & !TRANSPARENT | if on { TRANSPARENT } else { 0 };
        inode.ctime = self.now();
        let mut work = || {
            core.ext2.put_inode(number, &inode)?;
            if !directory {
                if on {
                    // Whoever names it has found it by its one name.
                    let parent = core.held.parent_of(number).unwrap_or(0);
                    core.put_transparent_parent(number, &inode, parent)?;
                } else if let Some((records, meta)) = core.ext2.records_and_meta() {
                    records.put_map_entry(meta, number, None)?;
                }
            }
            core.ext2.note_transparent(number, directory, on)
        };
        work().map_err(|error| self.broken(&error))
    }

    /// Opens a transparent file: `ENOENT` if it is lost, and then it is gone.
    pub(super) fn open_transparent(&self, number: u32) -> Result<(), Errno> {
        let look = self.core().look(number)?;
        match look {
            Look::Open => Ok(()),
            Look::Compare { generation } => match self.all_tags_match(number) {
                Ok(true) => self.note_compared(number),
                Ok(false) => {
                    self.core().close_transparent(number);
                    self.lose(number, generation)
                }
                Err(errno) => {
                    self.core().close_transparent(number);
                    Err(errno)
                }
            },
            Look::Lost { generation } => self.lose(number, generation),
        }
    }

    /// Other software moved a file to another directory.
    pub(super) fn note_parent(&self, number: u32, parent: u32) -> Result<(), Errno> {
        let _passage = self.pass(1)?;
        let mut core = self.core();
        let inode = core.live_inode(number)?;
        let put = core.put_transparent_parent(number, &inode, parent);
        put.map_err(|error| self.broken(&error))
    }

    fn note_compared(&self, number: u32) -> Result<(), Errno> {
        if let Some(open) = self.core().maps.0.get_mut(&number) {
            open.compared = true;
        }
        if self.read_only {
            return Ok(());
        }
        let _passage = self.pass(2)?;
        let mut core = self.core();
        let epoch = core.ext2.records().map_or(0, |records| records.header().epoch);
        let Some(open) = core.maps.0.get_mut(&number) else { return Ok(()) };
        open.map.entry.epoch = epoch;
        let entry = open.map.entry;
        let Some((records, meta)) = core.ext2.records_and_meta() else { return Ok(()) };
        let put = records.put_map_entry(meta, number, Some(&entry));
        put.map_err(|error| self.broken(&error))
    }

    /// A read has found bytes that are not the file's: whoever opens it next is told that it is
    /// gone. Nothing is lost if this cannot be noted.
    fn note_doubt(&self, number: u32) {
        let Ok(_passage) = self.pass(1) else { return };
        let doubted = self.core().doubt(number);
        if let Err(error) = doubted {
            self.broken(&error);
        }
    }

    /// Takes away the name of a file, and the file if nobody holds it: `ENOENT` says so.
    pub(super) fn lose(&self, number: u32, generation: u32) -> Result<(), Errno> {
        if !self.read_only {
            let ending = {
                let _passage = self.pass(STEP_BLOCKS)?;
                let now = self.now();
                let lost = self.core().lose(number, generation, now);
                lost.map_err(|error| self.broken(&error))?
            };
            ending.map_or(Ok(()), |ending| self.end_inode(ending))?;
        }
        Err(Errno::ENOENT)
    }

    /// Compares all blocks of an open file with their tags.
    fn all_tags_match(&self, number: u32) -> Result<bool, Errno> {
        let extents = self.core().open_map(number).map_or_else(Vec::new, |m| m.extents.clone());
        for extent in extents {
            let mut done = 0;
            while done < extent.len {
                let len = BLOCKS_A_STEP.min(extent.len - done);
                let part =
                    Extent { logical: extent.logical + done, start: extent.start + done, len };
                match self.read_tagged(number, part) {
                    Ok(_) => {}
                    Err(Errno::EIO) => return Ok(false),
                    Err(errno) => return Err(errno),
                }
                done += len;
            }
        }
        Ok(true)
    }

    /// The bytes of an extent, compared with their tags; `EIO` if they are not the file's.
    fn read_tagged(&self, number: u32, extent: Extent) -> Result<BytesMut, Errno> {
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
        self.with_passage(STEP_BLOCKS, |now| {
            // What stood there before, if the step writes only a part of a block.
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
            if core.live_inode(number)?.flags & (IMMUTABLE | APPEND_ONLY) != 0 {
                return Err(Errno::EPERM);
            }
            if size > core.ext2.longest_file_bytes() {
                return Err(Errno::EFBIG);
            }
        }
        let keep = size.div_ceil(block_bytes) as u32;
        loop {
            let _passage = self.pass(STEP_BLOCKS)?;
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
