//! One regular file becomes an inode block and data blocks.
//!
//! A file is read once, from front to back. Where the system says that it has a hole,
//! nothing is read; a data block that is all zeros becomes a hole whether the source has
//! one there or not, so that equal contents have equal blocks wherever they were copied
//! from. (A file that fits into its inode block is stored as it is.)

use std::os::fd::{AsFd, OwnedFd};

use atoll_vfs::FileKind;
use bytes::Bytes;
use rustix::fs::{SeekFrom, Stat};
use rustix::io::Errno;

use super::run::{Run, Stopped, Tallies};
use super::source::{SourceDir, kind_of, mode_of, mtime_of, xattrs_of};
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
    let fd = dir.file(name)?;
    let before = rustix::fs::fstat(&fd)?;
    match kind_of(&before) {
        FileKind::Regular => {}
        FileKind::Directory => return Err(FileError::Changed),
        _ => return Err(FileError::Special),
    }
    let mut reader = Reader { run, fd: &fd, told_bytes: 0 };
    let result = reader.read(&before).and_then(|content| {
        let xattrs = match xattrs_of(&fd).map_err(FileError::Unreadable)? {
            Some(block) => Some(run.emit(block)?),
            None => None,
        };
        let after = rustix::fs::fstat(&fd)?;
        if stamp(&before) != stamp(&after) {
            return Err(FileError::Changed);
        }
        Ok(DirectoryEntry {
            name: Bytes::copy_from_slice(name),
            mode: mode_of(&before),
            mtime: mtime_of(&before),
            content,
            xattrs,
            owner: None,
        })
    });
    if result.is_ok() {
        let size = before.st_size as u64;
        Tallies::add(&run.tallies.files, 1);
        Tallies::add(&run.tallies.bytes, size);
        run.progress.done(1, size.saturating_sub(reader.told_bytes));
    }
    result
}

/// The attributes that change when a file does.
fn stamp(stat: &Stat) -> (i64, i64, u64, i64, u64) {
    let (mtime, ctime) = (stat.st_mtime, stat.st_ctime);
    (stat.st_size, mtime, stat.st_mtime_nsec, ctime, stat.st_ctime_nsec)
}

struct Reader<'a> {
    run: &'a Run,
    fd: &'a OwnedFd,
    told_bytes: u64,
}

impl Reader<'_> {
    fn read(&mut self, stat: &Stat) -> Result<Content, FileError> {
        let size_bytes = u64::try_from(stat.st_size)
            .map_err(|_| FileError::Unreadable("its length is negative".into()))?;
        if size_bytes == 0 {
            return Ok(Content::Regular { size_bytes, blocks_512: 0, inode: None });
        }
        let shape = Shape::new(size_bytes, self.run.block_size_log2)
            .map_err(|error| FileError::Unreadable(error.to_string()))?;
        let (block, blocks_512) = if shape.is_inline() {
            let len = size_bytes as usize;
            let mut block = inode::header(shape, len);
            self.fill(&mut block, 0, len)?;
            (block, size_bytes.div_ceil(512))
        } else {
            self.read_blocks(shape, stat)?
        };
        let inode = Some(self.run.emit(block)?);
        Ok(Content::Regular { size_bytes, blocks_512, inode })
    }

    fn read_blocks(&mut self, shape: Shape, stat: &Stat) -> Result<(Vec<u8>, u64), FileError> {
        let run = self.run;
        let mut sink = |block| run.emit(block).map_err(FileError::from);
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
                builder.push(run.emit(bytes)?, &mut sink)?;
                blocks_512 += (len as u64).div_ceil(512);
            }
            self.tell(len as u64);
            block += 1;
        }
        Ok((builder.finish(&mut sink)?, blocks_512))
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
