//! One regular file becomes an inode block and data blocks.
//!
//! A file that has not changed since an earlier publish is not read
//! ([`stat_cache`](super::stat_cache)). Another one is read once, from front to back. Where the system says that it has a hole,
//! nothing is read; a data block that is all zeros becomes a hole whether the source has
//! one there or not, so that equal contents have equal blocks wherever they were copied
//! from. (A file that fits into its inode block is stored as it is.)

use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};

use atoll_key::BlockHash;
use atoll_vfs::FileKind;
use bytes::Bytes;
use rustix::fs::{SeekFrom, Stat};
use rustix::io::Errno;

use super::run::{Run, Stopped, Tallies};
use super::source::{SourceDir, is_open_for_writing, kind_of, mode_of, mtime_of, xattrs_of};
use super::stat_cache::{FileBlocks, MAX_HASHES, PathId, Stamp};
use crate::format::build::PointerBuilder;
use crate::format::inode::{self, Shape};
use crate::format::{Content, DirectoryEntry, is_zero};

/// How often a file that changes meanwhile is read. A guess: a file that is written from time to
/// time is read between two writes; for one that is written all the time no number suffices.
const ATTEMPTS: u32 = 3;

/// Why a file has no entry.
pub(super) enum FileError {
    /// The work is to end.
    Stopped,
    /// It is something else by now that a volume does not hold.
    Special,
    /// It is not there any more.
    Vanished,
    /// It cannot be read.
    Unreadable(String),
    /// It changed while it was read, or a directory or link has taken its place.
    Changed,
}

impl From<Stopped> for FileError {
    fn from(_: Stopped) -> FileError {
        FileError::Stopped
    }
}

impl From<Errno> for FileError {
    fn from(error: Errno) -> FileError {
        match error {
            Errno::NOENT => FileError::Vanished,
            // A link by now (it is not followed), or removed on an NFS server.
            Errno::LOOP | Errno::STALE => FileError::Changed,
            _ => FileError::Unreadable(error.to_string()),
        }
    }
}

/// Publishes a file and returns its entry. One that changes meanwhile is read again, a few
/// times.
pub(super) fn publish_file(
    run: &Run,
    dir: &SourceDir,
    name: &[u8],
) -> Result<DirectoryEntry, FileError> {
    let mut result = Err(FileError::Changed);
    for _ in 0..ATTEMPTS {
        result = publish_once(run, dir, name);
        if !matches!(result, Err(FileError::Changed)) {
            break;
        }
    }
    result
}

fn publish_once(run: &Run, dir: &SourceDir, name: &[u8]) -> Result<DirectoryEntry, FileError> {
    let path = PathId::of(&dir.path_of(name));
    if let Some(entry) = unread(run, dir, name, path)? {
        return Ok(entry);
    }
    let fd = dir.file(name)?;
    let is_written = is_open_for_writing(&fd);
    let before = rustix::fs::fstat(&fd)?;
    let stamp = Stamp::of(&before);
    match kind_of(&before) {
        FileKind::Regular => {}
        FileKind::Directory => return Err(FileError::Changed),
        _ => return Err(FileError::Special),
    }
    let cache = run
        .stat_cache
        .as_ref()
        .filter(|_| dir.has_times && !is_written && stamp.is_settled(run.env.unix_ms()));
    let (blocks, others) = (FileBlocks::default(), cache.map(|_| Vec::new()));
    let mut reader = Reader { run, fd: &fd, told_bytes: 0, blocks, others };
    reader.read(&before)?;
    if let Some(block) = xattrs_of(&fd).map_err(FileError::Unreadable)? {
        reader.blocks.xattrs = Some(run.emit(block)?);
    }
    if stamp != Stamp::of(&rustix::fs::fstat(&fd)?) {
        return Err(FileError::Changed);
    }
    let Reader { blocks, told_bytes, others, .. } = reader;
    let entry = published(run, name, &before, &blocks, told_bytes);
    if let Some((cache, others)) = cache.zip(others) {
        cache.note(path, stamp, FileBlocks { others, ..blocks });
    }
    Ok(entry)
}

/// The entry of a file that has not changed since an earlier publish.
fn unread(
    run: &Run,
    dir: &SourceDir,
    name: &[u8],
    path: PathId,
) -> Result<Option<DirectoryEntry>, FileError> {
    let cache = run.stat_cache.as_ref().filter(|_| dir.has_times && !run.options.checksum);
    let Some(cache) = cache else { return Ok(None) };
    let stat = dir.stat(name)?;
    let found = (kind_of(&stat) == FileKind::Regular).then(|| cache.find(path, &Stamp::of(&stat)));
    let Some(blocks) = found.flatten() else { return Ok(None) };
    for hash in blocks.hashes() {
        run.renew_unread(*hash)?;
    }
    Tallies::add(&run.tallies.unread_files, 1);
    Ok(Some(published(run, name, &stat, &blocks, 0)))
}

/// Counts a file; its entry.
fn published(
    run: &Run,
    name: &[u8],
    stat: &Stat,
    blocks: &FileBlocks,
    told_bytes: u64,
) -> DirectoryEntry {
    let size_bytes = stat.st_size as u64;
    Tallies::add(&run.tallies.files, 1);
    Tallies::add(&run.tallies.bytes, size_bytes);
    run.progress.done(1, size_bytes.saturating_sub(told_bytes));
    let &FileBlocks { blocks_512, inode, xattrs, .. } = blocks;
    DirectoryEntry {
        name: Bytes::copy_from_slice(name),
        mode: mode_of(stat),
        mtime: mtime_of(stat),
        content: Content::Regular { size_bytes, blocks_512, inode },
        xattrs,
        owner: None,
    }
}

struct Reader<'a> {
    run: &'a Run,
    fd: &'a OwnedFd,
    told_bytes: u64,
    /// Those that were read so far, without data and indirect blocks.
    blocks: FileBlocks,
    /// Data and indirect blocks; `None` if they are too many, or not to be remembered.
    others: Option<Vec<BlockHash>>,
}

impl Reader<'_> {
    fn read(&mut self, stat: &Stat) -> Result<(), FileError> {
        let size_bytes = u64::try_from(stat.st_size)
            .map_err(|_| FileError::Unreadable("its length is negative".into()))?;
        if size_bytes == 0 {
            return Ok(());
        }
        let shape = Shape::new(size_bytes, self.run.options.block_size_log2())
            .map_err(|error| FileError::Unreadable(error.to_string()))?;
        let (block, blocks_512) = if shape.is_inline() {
            let len = size_bytes as usize;
            let mut block = inode::header(shape, len);
            self.fill(&mut block, 0, len)?;
            (block, size_bytes.div_ceil(512))
        } else {
            self.read_blocks(shape, stat)?
        };
        self.blocks.inode = Some(self.run.emit(block)?);
        self.blocks.blocks_512 = blocks_512;
        Ok(())
    }

    fn read_blocks(&mut self, shape: Shape, stat: &Stat) -> Result<(Vec<u8>, u64), FileError> {
        let run = self.run;
        let others = RefCell::new(self.others.take());
        let emit = |block| -> Result<BlockHash, FileError> {
            let hash = run.emit(block)?;
            let mut others = others.borrow_mut();
            if let Some(list) = others.as_mut() {
                list.push(hash);
            }
            // Two more may follow.
            if others.as_ref().is_some_and(|list| list.len() > MAX_HASHES - 2) {
                *others = None;
            }
            Ok(hash)
        };
        let mut sink = emit;
        let mut builder = PointerBuilder::new(shape);
        let mut blocks_512 = 0;
        // Asking for holes costs a call each; files that have all their space have none.
        let sparse = (stat.st_blocks as u64).saturating_mul(512) < shape.size_bytes;
        let mut data_end = if sparse { 0 } else { shape.size_bytes };
        let mut block = 0;
        while block < shape.data_blocks() {
            let start = block << shape.block_size_log2;
            if start >= data_end {
                let (data, end) = self.next_data(start, shape.size_bytes)?;
                let none = data >= shape.size_bytes;
                let first = if none { shape.data_blocks() } else { data >> shape.block_size_log2 };
                builder.push_hole(first - block, &mut sink)?;
                self.tell((first << shape.block_size_log2).min(shape.size_bytes) - start);
                block = first;
                data_end = end;
                continue;
            }
            let len = shape.block_len_bytes(block) as usize;
            let mut bytes = Vec::with_capacity(len);
            self.fill(&mut bytes, start, len)?;
            if is_zero(&bytes) {
                builder.push_hole(1, &mut sink)?;
            } else {
                builder.push(emit(bytes)?, &mut sink)?;
                blocks_512 += (len as u64).div_ceil(512);
            }
            self.tell(len as u64);
            block += 1;
        }
        let inode = builder.finish(&mut sink)?;
        self.others = others.into_inner();
        Ok((inode, blocks_512))
    }

    /// The next extent with data at or after `start`: its start and end. Both are the
    /// file's length if there is none.
    fn next_data(&self, start: u64, size_bytes: u64) -> Result<(u64, u64), FileError> {
        match rustix::fs::seek(self.fd, SeekFrom::Data(start)) {
            Ok(data) if data < size_bytes => {
                let end = rustix::fs::seek(self.fd, SeekFrom::Hole(data))?;
                Ok((data, end.clamp(data + 1, size_bytes)))
            }
            Ok(_) | Err(Errno::NXIO) => Ok((size_bytes, size_bytes)),
            // Not a file system that knows of holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok((start, size_bytes)),
            Err(error) => Err(error.into()),
        }
    }

    fn tell(&mut self, bytes: u64) {
        self.told_bytes += bytes;
        self.run.progress.done(0, bytes);
    }

    /// Appends exactly `len` bytes of the file at `offset`.
    fn fill(&self, out: &mut Vec<u8>, offset: u64, len: usize) -> Result<(), FileError> {
        let from = out.len();
        out.resize(from + len, 0);
        let mut done = 0;
        while done < len {
            if self.run.is_stopped() {
                return Err(FileError::Stopped);
            }
            let into = &mut out[from + done..];
            match rustix::io::pread(self.fd.as_fd(), into, offset + done as u64) {
                Ok(0) => return Err(FileError::Changed),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}
