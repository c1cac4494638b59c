//! Bytes of files: reading, writing, lengths, holes.
//!
//! Data goes straight to the device, metadata into the transaction. Within one
//! transaction blocks are given to the file, filled and linked, so that no commit sees one without
//! the other; a block's bytes outside what was written are zeros.

use std::borrow::Cow;

use atoll_vfs::{
    Caller, Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, FileKind, FileTime,
    Handle, InodeNumber, SeekTo, SetAttr, SetTime, Writer,
};
use bytes::{Bytes, BytesMut};

use super::access::{check_changeable, check_mutable, check_setattr};
use super::held::to_ext2;
use super::names::Failure;
use super::serve::XATTR_BLOCKS;
use super::{Core, INODE_BLOCKS, Shared, errno};
use crate::ext2::{BLOCKS_A_STEP, Ext2Error, Extent};
use crate::format::inode::{Inode, NO_ATIME};

/// How old an access time may be before a read renews it (as Linux's `relatime`).
const ACCESS_TIME_SECS: i64 = 24 * 3600;
/// The longest write that is copied to have its last block's zeros behind it.
const MAX_PADDED_BYTES: usize = 256 << 10;

impl Core {
    /// The rest of a file's last block, to be zeroed when the file's length changes: other
    /// systems may have left anything there.
    fn tail_of(&mut self, inode: &Inode) -> Result<Option<(u64, usize)>, Ext2Error> {
        let block_bytes = self.ext2.meta.block_bytes() as u64;
        let (last, within) = (inode.size_bytes / block_bytes, inode.size_bytes % block_bytes);
        if within == 0 {
            return Ok(None);
        }
        let block = self.ext2.block_of(inode, last as u32)?;
        let at = u64::from(block) * block_bytes + within;
        Ok((block != 0).then_some((at, (block_bytes - within) as usize)))
    }
}

impl Shared {
    fn block_bytes(&self) -> u64 {
        self.block_bytes as u64
    }

    /// Bytes of the extents of a file, zeros for holes.
    fn read_extents(&self, extents: &[Extent], skip: u64, len: usize) -> Result<Bytes, Errno> {
        let mut bytes = BytesMut::zeroed(len);
        let mut at = 0;
        let mut skip = skip;
        for extent in extents {
            let extent_bytes = u64::from(extent.len) * self.block_bytes();
            let take = usize::try_from(extent_bytes - skip).unwrap_or(usize::MAX).min(len - at);
            if extent.start != 0 {
                let from = u64::from(extent.start) * self.block_bytes() + skip;
                let into = &mut bytes[at..at + take];
                self.device.read_at(from, into).map_err(|_| Errno::EIO)?;
            }
            at += take;
            skip = 0;
        }
        Ok(bytes.freeze())
    }

    pub(super) fn read(
        &self,
        number: InodeNumber,
        handle: Handle,
        offset: u64,
        len: u32,
    ) -> Result<Bytes, Errno> {
        let number = to_ext2(number)?;
        let lock = {
            let mut core = self.core();
            if !core.held.opened(number, handle)?.flags.reads() {
                return Err(Errno::EBADF);
            }
            core.held.lock_of(number)
        };
        let _readers = lock.read().expect("no holder of this lock panics");
        if self.is_open_transparent(number) {
            return self.read_transparent(number, offset, len);
        }
        let (extents, skip, len, stale) = {
            let mut core = self.core();
            let inode = core.live_inode(number)?;
            let left = inode.size_bytes.saturating_sub(offset);
            let len = left.min(u64::from(len));
            if len == 0 {
                return Ok(Bytes::new());
            }
            let first = offset / self.block_bytes();
            let last = (offset + len - 1) / self.block_bytes();
            let count = (last - first + 1) as u32;
            let extents = core.ext2.extents(&inode, first as u32, count).map_err(|e| errno(&e))?;
            let skip = offset % self.block_bytes();
            (extents, skip, len as usize, self.access_is_stale(&inode))
        };
        let bytes = self.read_extents(&extents, skip, len)?;
        if stale {
            self.note_access(number);
        }
        Ok(bytes)
    }

    fn is_open_transparent(&self, number: u32) -> bool {
        self.core().open_map(number).is_some()
    }

    fn access_is_stale(&self, inode: &Inode) -> bool {
        if inode.flags & NO_ATIME != 0 {
            return false;
        }
        let now = self.now();
        let old = now.secs.saturating_sub(inode.atime.secs) >= ACCESS_TIME_SECS;
        self.keeps_access_times && (inode.atime <= inode.mtime || inode.atime <= inode.ctime || old)
    }

    /// Renews an access time; one that cannot be is no error of the read.
    fn note_access(&self, number: u32) {
        let Ok(_handle) = self.join_transaction(INODE_BLOCKS) else { return };
        let mut core = self.core();
        if let Ok(mut inode) = core.live_inode(number) {
            inode.atime = self.now();
            if let Err(error) = core.ext2.put_inode(number, &inode) {
                self.broken(&error);
            }
        }
    }

    /// Writes where `writer` says: at `offset`, or at the end of the file.
    pub(super) fn write(
        &self,
        writer: Writer,
        number: InodeNumber,
        handle: Handle,
        offset: u64,
        data: &[u8],
    ) -> Result<u32, Errno> {
        let number = to_ext2(number)?;
        let (lock, open) = {
            let mut core = self.core();
            (core.held.lock_of(number), core.held.opened(number, handle)?)
        };
        if !open.flags.writes() {
            return Err(Errno::EBADF);
        }
        let _writer = lock.write().expect("no holder of this lock panics");
        let transparent = self.is_open_transparent(number);
        let (offset, privileged) = {
            let mut core = self.core();
            let mut inode = core.live_inode(number)?;
            // Data in a mapping was changed while that was allowed.
            let privileged = match writer {
                Writer::At(caller) | Writer::Cached(caller) => {
                    check_changeable(&inode)?;
                    core.may_use_reserve(caller)
                }
                Writer::AtEnd(caller) => {
                    check_mutable(&inode)?;
                    core.may_use_reserve(caller)
                }
                Writer::Mapping => open.privileged,
            };
            if let Some(map) = core.open_map(number) {
                inode.size_bytes = map.entry.size_bytes;
            }
            let longest = core.ext2.longest_file_bytes();
            let appends = matches!(writer, Writer::AtEnd(_));
            let offset = if appends { inode.size_bytes } else { offset };
            if offset.checked_add(data.len() as u64).is_none_or(|end| end > longest) {
                return Err(Errno::EFBIG);
            }
            (offset, privileged)
        };
        let mut done = 0;
        while done < data.len() {
            let (at, rest) = (offset + done as u64, &data[done..]);
            let written = if transparent {
                self.write_transparent_some(number, at, rest)
            } else {
                self.write_some(number, at, rest, privileged)
            };
            match written {
                Ok(written) => done += written,
                Err(_) if done > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(done as u32)
    }

    /// Writes a part of `data` that one step finds space for.
    fn write_some(
        &self,
        number: u32,
        offset: u64,
        data: &[u8],
        privileged: bool,
    ) -> Result<usize, Errno> {
        let block_bytes = self.block_bytes();
        let first = offset / block_bytes;
        let last = (offset + data.len() as u64 - 1) / block_bytes;
        let count = (last - first + 1) as u32;
        self.in_transaction(BLOCKS_A_STEP + INODE_BLOCKS, |now| {
            let (extents, given, reached, inode) = {
                let mut core = self.core();
                let mut inode = core.live_inode(number)?;
                let filled =
                    core.ext2.fill_holes(number, &mut inode, first as u32, count, privileged);
                // Also when nothing was found: indirect blocks that were made belong to the file.
                core.ext2.put_inode(number, &inode).map_err(Failure::Broken)?;
                let (given, reached) = filled?;
                let extents =
                    core.ext2.extents(&inode, first as u32, reached).map_err(Failure::Broken)?;
                (extents, given, reached, inode)
            };
            let skip = (offset % block_bytes) as usize;
            let room = reached as usize * block_bytes as usize - skip;
            let len = room.min(data.len());
            let end = offset + len as u64;
            // From here the file has the blocks, with foreign bytes until they are filled.
            let unfilled = |error| self.unfilled(number, &given, error);
            // The rest of a new last block is written with the data, in one go.
            let (padded, padded_end) = self.padded(&given, &data[..len], end);
            self.fill_edges(&given, offset, padded_end).map_err(unfilled)?;
            if offset > inode.size_bytes {
                let tail = self.core().tail_of(&inode).map_err(Failure::Broken)?;
                self.zero(tail).map_err(Failure::Broken)?;
            }
            self.write_extents(&extents, skip as u64, &padded).map_err(unfilled)?;
            let mut core = self.core();
            // Its attributes may have changed meanwhile.
            let mut inode = core.live_inode(number)?;
            inode.size_bytes = inode.size_bytes.max(end);
            inode.mtime = now;
            inode.ctime = now;
            core.ext2.put_inode(number, &inode).map_err(Failure::Broken)?;
            Ok(len)
        })
    }

    /// What follows from an error while blocks that were given to a file are filled. Where the
    /// device has no room for them (an image with holes on a disk that is full) the file loses
    /// them again.
    fn unfilled(&self, number: u32, given: &[Extent], error: std::io::Error) -> Failure {
        if error.kind() != std::io::ErrorKind::StorageFull {
            return Failure::Broken(Ext2Error::Meta(crate::meta::MetaError::Write(error)));
        }
        let mut core = self.core();
        let taken_back = core.ext2.inode(number).and_then(|mut inode| {
            core.ext2.take_back(&mut inode, given)?;
            core.ext2.put_inode(number, &inode)
        });
        match taken_back {
            Ok(()) => Failure::Refused(Errno::ENOSPC),
            Err(error) => Failure::Broken(error),
        }
    }

    fn write_extents(&self, extents: &[Extent], skip: u64, data: &[u8]) -> std::io::Result<()> {
        let mut at = 0;
        let mut skip = skip;
        for extent in extents {
            let extent_bytes = u64::from(extent.len) * self.block_bytes();
            let take = usize::try_from(extent_bytes - skip).unwrap_or(usize::MAX);
            let take = take.min(data.len() - at);
            let to = u64::from(extent.start) * self.block_bytes() + skip;
            self.device.write_at(to, &data[at..at + take])?;
            at += take;
            skip = 0;
        }
        Ok(())
    }

    /// Data that ends at `end`, with zeros to the end of its last block if that was given for it,
    /// and where it ends then.
    fn padded<'a>(&self, given: &[Extent], data: &'a [u8], end: u64) -> (Cow<'a, [u8]>, u64) {
        let block_bytes = self.block_bytes();
        let last = end / block_bytes;
        let is_new = given.last().is_some_and(|extent| {
            let start = u64::from(extent.logical);
            (start..start + u64::from(extent.len)).contains(&last)
        });
        // A long write's zeros are not worth a copy of it.
        if end.is_multiple_of(block_bytes) || !is_new || data.len() > MAX_PADDED_BYTES {
            return (Cow::Borrowed(data), end);
        }
        let padded_end = (last + 1) * block_bytes;
        let padded_len = data.len() + (padded_end - end) as usize;
        let mut padded = Vec::with_capacity(padded_len);
        padded.extend_from_slice(data);
        padded.resize(padded_len, 0);
        (Cow::Owned(padded), padded_end)
    }

    /// Zeros what a write of `offset..end` leaves of the blocks that were given for it.
    fn fill_edges(&self, given: &[Extent], offset: u64, end: u64) -> std::io::Result<()> {
        for extent in given {
            let start = u64::from(extent.logical) * self.block_bytes();
            let stop = start + u64::from(extent.len) * self.block_bytes();
            let disk = u64::from(extent.start) * self.block_bytes();
            for (from, to) in [(start, offset.min(stop)), (end.max(start), stop)] {
                if from < to {
                    let zeros = vec![0; (to - from) as usize];
                    self.device.write_at(disk + (from - start), &zeros)?;
                }
            }
        }
        Ok(())
    }

    /// Zeros a range of the device.
    pub(super) fn zero(&self, range: Option<(u64, usize)>) -> Result<(), Ext2Error> {
        let Some((at, len)) = range else { return Ok(()) };
        self.device
            .write_at(at, &vec![0; len])
            .map_err(|error| Ext2Error::Meta(crate::meta::MetaError::Write(error)))
    }

    pub(super) fn setattr(
        &self,
        caller: Caller,
        number: InodeNumber,
        changes: SetAttr,
    ) -> Result<atoll_vfs::AttrReply, Errno> {
        let number = to_ext2(number)?;
        check_setattr(&self.core().live_inode(number)?, &changes)?;
        if let Some(size) = changes.size_bytes {
            self.set_size(number, size)?;
        }
        if (SetAttr { size_bytes: None, ..changes }) == SetAttr::default() {
            let mut core = self.core();
            let inode = core.live_inode(number)?;
            return core.attr_reply(number, &inode);
        }
        self.with_space(INODE_BLOCKS + XATTR_BLOCKS, |core, now| {
            let mut inode = core.live_inode(number)?;
            let time = |set: SetTime| match set {
                SetTime::Now => now,
                SetTime::To(time) => time,
            };
            if let Some(mode) = changes.mode {
                core.change_acl_mode(caller, number, &mut inode, mode as u16)?;
                inode.mode = inode.mode & !0o7777 | (mode & 0o7777) as u16;
            }
            inode.uid = changes.uid.unwrap_or(inode.uid);
            inode.gid = changes.gid.unwrap_or(inode.gid);
            inode.atime = changes.atime.map_or(inode.atime, time);
            inode.mtime = changes.mtime.map_or(inode.mtime, time);
            inode.ctime = now;
            let kept = core.keep_inode(number, &inode)?;
            Ok(core.attr_reply(number, &kept)?)
        })
    }

    /// Cuts a file off, or lengthens it with a hole.
    pub(super) fn set_size(&self, number: u32, size: u64) -> Result<(), Errno> {
        let (lock, transparent) = {
            let mut core = self.core();
            let inode = core.live_inode(number)?;
            check_changeable(&inode)?;
            (core.held.lock_of(number), inode.is_transparent_file())
        };
        if transparent {
            // Opened for as long as it takes: its blocks must be its own.
            self.open_transparent(number)?;
            let _writer = lock.write().expect("no holder of this lock panics");
            let set = self.set_transparent_size(number, size);
            self.core().close_transparent(number);
            return set;
        }
        let _writer = lock.write().expect("no holder of this lock panics");
        self.set_ordinary_size(number, size)
    }

    /// The caller holds the file's lock as a writer.
    fn set_ordinary_size(&self, number: u32, size: u64) -> Result<(), Errno> {
        let keep = size.div_ceil(self.block_bytes());
        loop {
            let _handle = self.join_transaction(BLOCKS_A_STEP + INODE_BLOCKS)?;
            let mut core = self.core();
            let mut inode = core.live_inode(number)?;
            match inode.kind() {
                Ok(FileKind::Regular) => {}
                Ok(FileKind::Directory) => return Err(Errno::EISDIR),
                _ => return Err(Errno::EINVAL),
            }
            let old_size = inode.size_bytes;
            if size > old_size && size > core.ext2.longest_file_bytes() {
                return Err(Errno::EFBIG);
            }
            let now = self.now();
            let mut done = true;
            if size < old_size {
                done = core
                    .ext2
                    .cut_off(number, &mut inode, keep as u32)
                    .map_err(|error| self.broken(&error))?;
            }
            if done {
                // Both ways: what lies behind the shorter of the two ends becomes zeros.
                inode.size_bytes = size.min(old_size);
                let tail = core.tail_of(&inode).map_err(|error| self.broken(&error))?;
                self.zero(tail).map_err(|error| self.broken(&error))?;
                inode.size_bytes = size;
            }
            inode.mtime = now;
            inode.ctime = now;
            core.ext2.put_inode(number, &inode).map_err(|error| self.broken(&error))?;
            if done {
                return Ok(());
            }
        }
    }

    pub(super) fn seek(
        &self,
        number: InodeNumber,
        handle: Handle,
        offset: u64,
        to: SeekTo,
    ) -> Result<u64, Errno> {
        let number = to_ext2(number)?;
        let lock = {
            let mut core = self.core();
            core.held.opened(number, handle)?;
            core.held.lock_of(number)
        };
        let _readers = lock.read().expect("no holder of this lock panics");
        let (inode, map, disk_blocks) = {
            let mut core = self.core();
            let mut inode = core.live_inode(number)?;
            let map = core.open_map(number).cloned();
            if let Some(map) = &map {
                inode.size_bytes = map.entry.size_bytes;
            }
            (inode, map, core.ext2.superblock().blocks())
        };
        if offset >= inode.size_bytes {
            return Err(Errno::ENXIO);
        }
        let end = inode.size_bytes.div_ceil(self.block_bytes()) as u32;
        let mut at = (offset / self.block_bytes()) as u32;
        // A piece at a time: a file may be very long, the answer near, and others wait for the
        // lock of metadata.
        const PIECE_BLOCKS: u32 = 4096;
        let mut data_blocks = 0u64;
        while at < end {
            let count = PIECE_BLOCKS.min(end - at);
            let extents = match &map {
                Some(map) => map.extents_of(at, count),
                None => self.core().ext2.extents(&inode, at, count).map_err(|e| errno(&e))?,
            };
            let wanted = extents.iter().find(|e| (e.start != 0) == (to == SeekTo::Data));
            if let Some(extent) = wanted {
                return Ok(offset.max(u64::from(extent.logical) * self.block_bytes()));
            }
            let data = extents.iter().filter(|e| e.start != 0);
            data_blocks += data.map(|e| u64::from(e.len)).sum::<u64>();
            if data_blocks > u64::from(disk_blocks) {
                let circle = format!("inode {number} has more blocks than the disk");
                return Err(errno(&Ext2Error::Damaged(circle)));
            }
            at += count;
        }
        match to {
            SeekTo::Data => Err(Errno::ENXIO),
            SeekTo::Hole => Ok(inode.size_bytes),
        }
    }

    /// `fallocate(2)`: blocks of zeros for a range, with or without lengthening the file, or a
    /// hole. Transparent files, which no space can be reserved for, refuse all of it.
    pub(super) fn fallocate(
        &self,
        caller: Caller,
        number: InodeNumber,
        handle: Handle,
        offset: u64,
        len: u64,
        mode: i32,
    ) -> Result<(), Errno> {
        let keeps_size = mode & FALLOC_KEEP_SIZE != 0;
        let punches = mode & FALLOC_PUNCH_HOLE != 0;
        let zeroes = mode & FALLOC_ZERO_RANGE != 0;
        let known = FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE | FALLOC_ZERO_RANGE;
        if mode & !known != 0 || punches && (zeroes || !keeps_size) {
            return Err(Errno::EOPNOTSUPP);
        }
        let number = to_ext2(number)?;
        let end = offset.checked_add(len).filter(|_| len > 0).ok_or(Errno::EINVAL)?;
        let lock = {
            let mut core = self.core();
            if !core.held.opened(number, handle)?.flags.writes() {
                return Err(Errno::EBADF);
            }
            let inode = core.live_inode(number)?;
            if zeroes || punches {
                check_changeable(&inode)?
            } else {
                check_mutable(&inode)?
            }
            if !punches && end > core.ext2.longest_file_bytes() {
                return Err(Errno::EFBIG);
            }
            if core.open_map(number).is_some() {
                return Err(Errno::EOPNOTSUPP);
            }
            core.held.lock_of(number)
        };
        let _writer = lock.write().expect("no holder of this lock panics");
        // Blocks beyond the end of a file are an error to e2fsck of an ext2 file system.
        if keeps_size && !punches && end > self.size_of(number)? {
            return Err(Errno::EOPNOTSUPP);
        }
        if punches || zeroes {
            self.make_zeros(number, offset, end)?;
        }
        if punches {
            return Ok(());
        }
        let before = self.size_of(number)?;
        let filled = self.fill(caller, number, offset, end);
        // The kernel knows nothing of a length that an error leaves.
        if filled.is_err() && self.size_of(number)? > before {
            self.set_ordinary_size(number, before)?;
        }
        filled
    }

    /// Gives blocks of zeros to the holes among the bytes `offset..end`, and lengthens the file
    /// on the way: blocks beyond its end are an error to e2fsck.
    fn fill(&self, caller: Caller, number: u32, offset: u64, end: u64) -> Result<(), Errno> {
        let mut at = (offset / self.block_bytes()) as u32;
        let stop = end.div_ceil(self.block_bytes()) as u32;
        while at < stop {
            // At most so much is zeroed while the commit barrier is held.
            const PIECE_BLOCKS: u32 = 256;
            at += self.in_transaction(BLOCKS_A_STEP + INODE_BLOCKS, |now| {
                let mut core = self.core();
                let mut inode = core.live_inode(number)?;
                let count = PIECE_BLOCKS.min(stop - at);
                let privileged = core.may_use_reserve(caller);
                let filled = core.ext2.fill_holes(number, &mut inode, at, count, privileged);
                core.ext2.put_inode(number, &inode).map_err(Failure::Broken)?;
                let (given, reached) = filled?;
                let reached_bytes = (u64::from(at) + u64::from(reached)) * self.block_bytes();
                inode.size_bytes = inode.size_bytes.max(reached_bytes.min(end));
                inode.mtime = now;
                inode.ctime = now;
                core.ext2.put_inode(number, &inode).map_err(Failure::Broken)?;
                drop(core);
                self.fill_edges(&given, u64::MAX, u64::MAX)
                    .map_err(|error| self.unfilled(number, &given, error))?;
                Ok(reached)
            })?;
        }
        Ok(())
    }

    fn size_of(&self, number: u32) -> Result<u64, Errno> {
        Ok(self.core().live_inode(number)?.size_bytes)
    }

    /// Runs a change that may find no space. Blocks that rest are set free by a commit, and the
    /// change is tried again; where others took them first, once more, before all others.
    pub(super) fn in_transaction<T>(
        &self,
        blocks: usize,
        mut work: impl FnMut(FileTime) -> Result<T, Failure>,
    ) -> Result<T, Errno> {
        let must_wait = |outcome: &_| matches!(outcome, Err(Failure::Space(Ext2Error::NoSpaceYet)));
        let mut pass_and_work = || {
            let _handle = self.join_transaction(blocks)?;
            work(self.now())
        };
        let mut outcome = pass_and_work();
        if must_wait(&outcome) {
            self.commit()?;
            outcome = pass_and_work();
        }
        if must_wait(&outcome) {
            outcome = self.commit_and(|| work(self.now()));
        }
        match outcome {
            Ok(done) => Ok(done),
            Err(Failure::Refused(errno)) => Err(errno),
            Err(Failure::Space(error)) => Err(errno(&error)),
            Err(Failure::Broken(error)) => Err(self.broken(&error)),
        }
    }
}
