//! What the source's files were when they were last read, so that a later publish need not read
//! them again (as the index of git).
//!
//! A file is taken as unchanged if its length, inode number, and times of modification and of status
//! change are what they were. The ring is still asked for each of its blocks; if it lacks one, all
//! files that have it are read. So a record can only ever be wrong about what the file's bytes are,
//! which these rules guard:
//!
//! - A file is remembered if both times lie [`SETTLED_AFTER`] back when its reading begins. A change
//!   that begins later has another time, however coarse the file system's clock is.
//! - A file that is open for writing, or mapped, when its reading begins is not remembered: write(2)
//!   moves the times when it begins and may end much later, and writes through a map need not move
//!   them at once. (Of other users' files the kernel does not tell.)
//! - The file system must keep times of status change: a volume of erofs or squashfs, for instance,
//!   has those of its making, and the next image may have the same
//!   ([`SourceFilter::trusts_times`](super::SourceFilter::trusts_times)).
//! - Records of another volume, read key or block size are dropped.
//!
//! One file holds all records of a volume: a header, then records as below, of which a later one
//! replaces an earlier one of the same path. What does not end whole, or does not have its checksum,
//! ends the file. One publish at a time uses it (`flock`); another one remembers nothing.
//!
//! | bytes | field of a record |
//! |---|---|
//! | 8 | checksum of the rest: the first bytes of its hash ([`BlockHash::of`]) |
//! | 4 | how many hashes |
//! | 16 | path below the source: the first bytes of its hash |
//! | 8, 8, 12, 12 | length, inode number, mtime, ctime (seconds, nanoseconds) |
//! | 8 | what the file takes on the ring, in units of 512 bytes |
//! | 1 | bit 0: the first hash is of the extended attributes; bit 1: the next is the inode block's |
//! | 32 each | hashes of all blocks of the file |
//!
//! So the file is about a two-thousandth of the source, at 64 KiB a block, and 100 bytes a file. It
//! is read whole when a publish begins. In memory are 16 bytes for each file, 8 for each that is
//! read, and the hashes of the files that are being published, at most [`MAX_HASHES`] each.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_key::BlockHash;
use rustix::fs::{FlockOperation, Stat};

/// How long a file must not have changed to be remembered.
pub(super) const SETTLED_AFTER: Duration = Duration::from_secs(60);

const MAGIC: &[u8; 8] = b"ATSC\0\0\0\x01";

/// A header: the magic, and what the records are of.
const HEADER_BYTES: usize = 8 + 32;

const CHECKSUM_BYTES: usize = 8;

/// Bytes of a record before its hashes.
const FIXED_BYTES: usize = CHECKSUM_BYTES + 4 + 16 + 8 + 8 + 12 + 12 + 8 + 1;

/// The most hashes of a record: the blocks of a file of 64 GiB at 64 KiB each. A longer file is read
/// each time.
pub(super) const MAX_HASHES: usize = 1 << 20;

/// Bytes of records that nothing needs, beside as many as are needed, before the file is written
/// anew.
const SLACK_BYTES: u64 = 1 << 20;

/// In an index entry: this publish has found the file unchanged.
const IS_FOUND: u64 = 1 << 63;

/// What changes when a file does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stamp {
    size_bytes: u64,
    inode: u64,
    mtime: (i64, u32),
    ctime: (i64, u32),
}

impl Stamp {
    pub(super) fn of(stat: &Stat) -> Stamp {
        Stamp {
            size_bytes: stat.st_size as u64,
            inode: stat.st_ino,
            mtime: (stat.st_mtime, stat.st_mtime_nsec as u32),
            ctime: (stat.st_ctime, stat.st_ctime_nsec as u32),
        }
    }

    pub(super) fn is_settled(&self, now_unix_ms: u64) -> bool {
        let newest = self.mtime.0.max(self.ctime.0);
        let settled = (now_unix_ms / 1000).saturating_sub(SETTLED_AFTER.as_secs());
        i64::try_from(settled).is_ok_and(|settled| newest < settled)
    }
}

/// A path below the source, as records name it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct PathId([u8; 16]);

impl PathId {
    pub(super) fn of(path: &Path) -> PathId {
        let hash = BlockHash::of(path.as_os_str().as_bytes());
        PathId(hash.0[..16].try_into().expect("a hash has 32 bytes"))
    }

    fn order(&self) -> u64 {
        u64::from_be_bytes(self.0[..8].try_into().expect("it has 16 bytes"))
    }
}

/// The blocks of a file.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct FileBlocks {
    /// What the file takes on the ring, in units of 512 bytes.
    pub(super) blocks_512: u64,
    /// The block of its extended attributes.
    pub(super) xattrs: Option<BlockHash>,
    /// Its inode block.
    pub(super) inode: Option<BlockHash>,
    /// Its indirect and data blocks.
    pub(super) others: Vec<BlockHash>,
}

impl FileBlocks {
    /// All of them.
    pub(super) fn hashes(&self) -> impl Iterator<Item = &BlockHash> {
        self.xattrs.iter().chain(&self.inode).chain(&self.others)
    }
}

/// A record.
#[derive(PartialEq, Eq, Debug)]
struct Record {
    path: PathId,
    stamp: Stamp,
    blocks: FileBlocks,
}

impl Record {
    fn encode(&self) -> Vec<u8> {
        let FileBlocks { blocks_512, xattrs, inode, .. } = &self.blocks;
        let mut out = vec![0; CHECKSUM_BYTES];
        out.extend((self.blocks.hashes().count() as u32).to_be_bytes());
        out.extend(self.path.0);
        let Stamp { size_bytes, inode: number, mtime, ctime } = self.stamp;
        out.extend(size_bytes.to_be_bytes());
        out.extend(number.to_be_bytes());
        for (secs, nanos) in [mtime, ctime] {
            out.extend(secs.to_be_bytes());
            out.extend(nanos.to_be_bytes());
        }
        out.extend(blocks_512.to_be_bytes());
        out.push(u8::from(xattrs.is_some()) | u8::from(inode.is_some()) << 1);
        self.blocks.hashes().for_each(|hash| out.extend(hash.0));
        let checksum = BlockHash::of(&out[CHECKSUM_BYTES..]);
        out[..CHECKSUM_BYTES].copy_from_slice(&checksum.0[..CHECKSUM_BYTES]);
        out
    }

    /// The next record; `None` if what follows is none.
    fn read(from: &mut impl Read) -> io::Result<Option<Record>> {
        let mut bytes = vec![0; FIXED_BYTES];
        if !fill(from, &mut bytes)? {
            return Ok(None);
        }
        let count = u32::from_be_bytes(array(&bytes[CHECKSUM_BYTES..])) as usize;
        if count > MAX_HASHES {
            return Ok(None);
        }
        bytes.resize(FIXED_BYTES + count * 32, 0);
        if !fill(from, &mut bytes[FIXED_BYTES..])? {
            return Ok(None);
        }
        let checksum = BlockHash::of(&bytes[CHECKSUM_BYTES..]);
        if checksum.0[..CHECKSUM_BYTES] != bytes[..CHECKSUM_BYTES] {
            return Ok(None);
        }
        let mut rest = &bytes[CHECKSUM_BYTES + 4..];
        let path = PathId(take(&mut rest));
        let mut number = || u64::from_be_bytes(take(&mut rest));
        let (size_bytes, inode) = (number(), number());
        let mut time =
            || (i64::from_be_bytes(take(&mut rest)), u32::from_be_bytes(take(&mut rest)));
        let (mtime, ctime) = (time(), time());
        let blocks_512 = u64::from_be_bytes(take(&mut rest));
        let [flags] = take(&mut rest);
        let mut hashes = rest.chunks_exact(32).map(|hash| BlockHash(array(hash)));
        let mut hash_if = |bit: u8| if flags & bit == 0 { None } else { hashes.next() };
        let (xattrs, file_inode) = (hash_if(1), hash_if(2));
        if file_inode.is_some() != (size_bytes > 0) {
            return Ok(None);
        }
        let blocks = FileBlocks { blocks_512, xattrs, inode: file_inode, others: hashes.collect() };
        Ok(Some(Record { path, stamp: Stamp { size_bytes, inode, mtime, ctime }, blocks }))
    }

    fn len_bytes(&self) -> u64 {
        (FIXED_BYTES + 32 * self.blocks.hashes().count()) as u64
    }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes[..N].try_into().expect("so many bytes were taken")
}

fn take<const N: usize>(from: &mut &[u8]) -> [u8; N] {
    let taken = array(from);
    *from = &from[N..];
    taken
}

/// Fills `buffer`; whether there were so many bytes.
fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match from.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// A file, read from some place on.
struct At<'a> {
    file: &'a File,
    place: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.place)?;
        self.place += count as u64;
        Ok(count)
    }
}

/// By [`PathId::order`]: where the record begins, and [`IS_FOUND`].
type Index = Vec<(u64, AtomicU64)>;

/// The records of one volume.
pub(super) struct StatCache {
    path: PathBuf,
    header: [u8; HEADER_BYTES],
    file: File,
    index: Index,
    /// Bytes of the records that this publish has found.
    found_bytes: AtomicU64,
    /// Blocks that the ring lacks: files of them are not found.
    lost: BTreeSet<BlockHash>,
    appended: Mutex<Appended>,
}

/// The records of files that this publish has read.
struct Appended {
    writer: BufWriter<File>,
    /// Where each begins.
    places: Vec<u64>,
    begin: u64,
    end: u64,
    /// Nothing follows: others use the file, or a record of which a part was written ends it.
    has_ended: bool,
}

impl StatCache {
    /// Opens the file at `path`, whose records are of what `of` stands for, or makes one. `None` if
    /// another publish uses it.
    pub(super) fn open(
        path: &Path,
        of: BlockHash,
        lost: BTreeSet<BlockHash>,
    ) -> io::Result<Option<StatCache>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.open(path)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            locked => locked?,
        }
        let mut header = [0; HEADER_BYTES];
        header[..MAGIC.len()].copy_from_slice(MAGIC);
        header[MAGIC.len()..].copy_from_slice(&of.0);
        let (index, end) = match read_index(&file, &header)? {
            Some(read) => read,
            None => {
                file.set_len(0)?;
                file.write_all_at(&header, 0)?;
                (Vec::new(), HEADER_BYTES as u64)
            }
        };
        file.set_len(end)?;
        file.seek(SeekFrom::Start(end))?;
        let writer = BufWriter::with_capacity(64 << 10, file.try_clone()?);
        let new = Appended { writer, places: Vec::new(), begin: end, end, has_ended: false };
        let (path, appended) = (path.to_path_buf(), Mutex::new(new));
        let found_bytes = AtomicU64::new(0);
        Ok(Some(StatCache { path, header, file, index, found_bytes, lost, appended }))
    }

    /// The blocks of the file at `path`, if it has not changed since they were read.
    pub(super) fn find(&self, path: PathId, stamp: &Stamp) -> Option<FileBlocks> {
        let at = self.index.binary_search_by_key(&path.order(), |(order, _)| *order).ok()?;
        let place = &self.index[at].1;
        let record = self.record(place.load(Ordering::Relaxed) & !IS_FOUND).ok()??;
        let is_of_file = record.path == path && record.stamp == *stamp;
        if !is_of_file || record.blocks.hashes().any(|hash| self.lost.contains(hash)) {
            return None;
        }
        if place.fetch_or(IS_FOUND, Ordering::Relaxed) & IS_FOUND == 0 {
            self.found_bytes.fetch_add(record.len_bytes(), Ordering::Relaxed);
        }
        Some(record.blocks)
    }

    fn record(&self, place: u64) -> io::Result<Option<Record>> {
        Record::read(&mut BufReader::with_capacity(1 << 10, At { file: &self.file, place }))
    }

    /// Remembers a file that was read. `stamp` is from before the reading.
    pub(super) fn note(&self, path: PathId, stamp: Stamp, blocks: FileBlocks) {
        let record = Record { path, stamp, blocks }.encode();
        let mut new = self.appended();
        if new.has_ended {
            return;
        }
        if let Err(error) = new.writer.write_all(&record) {
            new.has_ended = true;
            tracing::warn!("the next publish reads files again: {}: {error}", self.path.display());
            return;
        }
        let place = new.end;
        new.places.push(place);
        new.end += record.len() as u64;
    }

    fn appended(&self) -> MutexGuard<'_, Appended> {
        self.appended.lock().expect("no holder of this lock panics")
    }

    /// Makes what was remembered durable, and lets others use the file. When all of the source was
    /// walked, what is not of it any more is dropped if that is much.
    pub(super) fn finish(&self, is_whole: bool) -> io::Result<()> {
        let mut new = self.appended();
        let written = match std::mem::replace(&mut new.has_ended, true) {
            true => Ok(()),
            false => self.write(&mut new, is_whole),
        };
        rustix::fs::flock(&self.file, FlockOperation::Unlock)?;
        written
    }

    fn write(&self, new: &mut Appended, is_whole: bool) -> io::Result<()> {
        new.writer.flush()?;
        let needed_bytes = self.found_bytes.load(Ordering::Relaxed) + new.end - new.begin;
        if !is_whole || new.end <= 2 * needed_bytes + SLACK_BYTES {
            return self.file.sync_data();
        }
        let found = self.index.iter().map(|(_, place)| place.load(Ordering::Relaxed));
        let found = found.filter(|place| place & IS_FOUND != 0).map(|place| place & !IS_FOUND);
        let mut needed: Vec<u64> = found.chain(new.places.iter().copied()).collect();
        needed.sort_unstable();
        // No volume has a name that begins with a dot.
        let mut name = OsString::from(".new-");
        name.push(self.path.file_name().unwrap_or_default());
        let name = self.path.with_file_name(name);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut out = BufWriter::new(options.open(&name)?);
        out.write_all(&self.header)?;
        for place in needed {
            if let Some(record) = self.record(place)? {
                out.write_all(&record.encode())?;
            }
        }
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_data()?;
        std::fs::rename(name, &self.path)
    }
}

/// The places of a file's records, and where they end; `None` if they are of something else.
fn read_index(file: &File, header: &[u8; HEADER_BYTES]) -> io::Result<Option<(Index, u64)>> {
    let mut reader = BufReader::with_capacity(1 << 20, At { file, place: 0 });
    let mut found = [0; HEADER_BYTES];
    if !fill(&mut reader, &mut found)? || found != *header {
        return Ok(None);
    }
    let mut end = HEADER_BYTES as u64;
    let mut places = Vec::new();
    while let Some(record) = Record::read(&mut reader)? {
        places.push((record.path.order(), end));
        end += record.len_bytes();
    }
    places.sort_unstable_by_key(|(order, place)| (*order, u64::MAX - place));
    places.dedup_by_key(|(order, _)| *order);
    let index = places.into_iter().map(|(order, place)| (order, AtomicU64::new(place)));
    Ok(Some((index.collect(), end)))
}
