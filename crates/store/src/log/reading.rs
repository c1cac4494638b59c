//! The state that all threads of a `DiskStore` share, and reading records.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use atoll_key::Key;
use bytes::Bytes;

use crate::disk::{Disk, DiskFile};
use crate::engine::entry::IndexEntry;
use crate::engine::shared::Shared;
use crate::segment::{self, RECORD_HEADER_BYTES, RecordBody};

/// An open log.
pub(crate) struct Log {
    pub(crate) shared: Arc<Shared>,
    pub(crate) segments: OpenSegments,
}

/// Segments are never cut shorter than for a store of this size, however little is allowed at
/// the moment: a capacity that follows the disk may be nothing for an hour.
const LEAST_SEGMENTED_BYTES: u64 = 64 << 20;

/// Why a record could not be read.
#[derive(Debug)]
pub(crate) enum ReadFailure {
    /// Its segment is gone: it was moved, or removed, since it was looked up.
    Gone,
    /// Not what was written.
    Damaged,
    /// The disk failed.
    Io(io::Error),
}

impl Log {
    pub(crate) fn new(shared: Arc<Shared>) -> Log {
        let segments = OpenSegments::new(shared.config.open_segments);
        Log { shared, segments }
    }

    /// The length at which segments end: small enough that several fit.
    pub(crate) fn segment_bytes(&self) -> u64 {
        let least_bytes = self.shared.config.capacity_bytes.min(LEAST_SEGMENTED_BYTES);
        let capacity_bytes = self.shared.capacity_bytes().max(least_bytes);
        self.shared.config.segment_bytes.min(capacity_bytes / 16).clamp(4 << 10, 1 << 30)
    }

    /// What new blocks leave free, so that a segment can be compacted.
    pub(crate) fn headroom_bytes(&self) -> u64 {
        self.segment_bytes()
    }

    /// What new blocks leave free besides, for new versions of blocks that are held. Removing a
    /// name from a full ring writes such versions.
    pub(crate) fn room_for_versions_bytes(&self) -> u64 {
        self.segment_bytes() / 4
    }

    fn salt(&self, segment: u64) -> Option<u64> {
        self.shared.catalog.read().segments().get(&segment).map(|stat| stat.salt)
    }

    /// Reads and checks a record by `fill`, which fills a buffer from the segment's file
    /// or answers `None` if it would have to wait.
    fn read_by(
        &self,
        key: &Key,
        entry: &IndexEntry,
        fill: impl Fn(&dyn DiskFile, &mut [u8]) -> io::Result<Option<usize>>,
    ) -> Result<Option<Bytes>, ReadFailure> {
        let salt = self.salt(entry.segment).ok_or(ReadFailure::Gone)?;
        let file = match self.segments.open(&*self.shared.disk, entry.segment) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(ReadFailure::Gone);
            }
            file => file.map_err(ReadFailure::Io)?,
        };
        let mut buffer = vec![0; RECORD_HEADER_BYTES + entry.len_bytes as usize];
        match fill(&*file, &mut buffer).map_err(ReadFailure::Io)? {
            None => Ok(None),
            Some(read) if read == buffer.len() => {
                check(key, entry, salt, Bytes::from(buffer)).map(Some)
            }
            Some(_) => Err(ReadFailure::Damaged),
        }
    }

    /// Reads a block if that needs no waiting for the medium.
    pub(crate) fn read_cached(
        &self,
        key: &Key,
        entry: &IndexEntry,
    ) -> Result<Option<Bytes>, ReadFailure> {
        self.read_by(key, entry, |file, buffer| {
            let cached = file.read_cached(u64::from(entry.offset), buffer)?;
            Ok(cached.then_some(buffer.len()))
        })
    }

    /// Reads a block, waiting for the medium if need be.
    pub(crate) fn read_waiting(&self, key: &Key, entry: &IndexEntry) -> Result<Bytes, ReadFailure> {
        let read = self.read_by(key, entry, |file, buffer| {
            file.read_at(u64::from(entry.offset), buffer).map(Some)
        })?;
        Ok(read.expect("a waiting read does not give up"))
    }

    /// Reads a block from the medium rather than from a cache.
    pub(crate) fn read_medium(&self, key: &Key, entry: &IndexEntry) -> Result<Bytes, ReadFailure> {
        if let Ok(file) = self.segments.open(&*self.shared.disk, entry.segment) {
            file.forget_cached(u64::from(entry.offset), entry.record_bytes());
        }
        self.read_waiting(key, entry)
    }
}

/// The value in `record`, if all of it is what was written for `entry`.
fn check(key: &Key, entry: &IndexEntry, salt: u64, record: Bytes) -> Result<Bytes, ReadFailure> {
    let header = segment::decode_record_header(&record, salt).map_err(|_| ReadFailure::Damaged)?;
    let RecordBody::Block { len_bytes, value_crc, .. } = header.body else {
        return Err(ReadFailure::Damaged);
    };
    let expected = (header.key, header.sequence, len_bytes)
        == (*key, entry.sequence, entry.len_bytes)
        && crc32fast::hash(&record[RECORD_HEADER_BYTES..]) == value_crc;
    if expected { Ok(record.slice(RECORD_HEADER_BYTES..)) } else { Err(ReadFailure::Damaged) }
}

/// A file and when it was last used.
type OpenFile = (Arc<dyn DiskFile>, u64);

/// The segments' files, of which a bounded number is kept open.
#[derive(Debug)]
pub(crate) struct OpenSegments {
    most: usize,
    clock: AtomicU64,
    files: Mutex<BTreeMap<u64, OpenFile>>,
}

impl OpenSegments {
    pub(crate) fn new(most: usize) -> OpenSegments {
        OpenSegments { most: most.max(1), clock: AtomicU64::new(0), files: Mutex::default() }
    }

    /// The file of a segment, opened if need be.
    pub(crate) fn open(&self, disk: &dyn Disk, number: u64) -> io::Result<Arc<dyn DiskFile>> {
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        {
            let mut files = self.files.lock().expect("no panic while the lock is held");
            if let Some((file, used)) = files.get_mut(&number) {
                *used = now;
                return Ok(file.clone());
            }
        }
        let file = disk.open(&segment::file_name(number))?;
        self.insert(number, file.clone());
        Ok(file)
    }

    /// Keeps a file open, closing the one unused for longest if there are too many.
    pub(crate) fn insert(&self, number: u64, file: Arc<dyn DiskFile>) {
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        let mut files = self.files.lock().expect("no panic while the lock is held");
        files.insert(number, (file, now));
        if files.len() > self.most {
            let oldest = files.iter().min_by_key(|(_, (_, used))| *used).map(|(n, _)| *n);
            oldest.map(|number| files.remove(&number));
        }
    }

    pub(crate) fn forget(&self, number: u64) {
        self.files.lock().expect("no panic while the lock is held").remove(&number);
    }

    #[cfg(test)]
    fn count(&self) -> usize {
        self.files.lock().expect("no panic while the lock is held").len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::FaultyDisk;

    #[test]
    fn the_number_of_open_files_is_bounded() {
        let disk = FaultyDisk::new(1);
        for number in 0..20 {
            disk.create(&segment::file_name(number)).expect("created");
        }
        let files = OpenSegments::new(4);
        for number in (0..20).chain(0..20) {
            files.open(&disk, number).expect("opened");
            assert!(files.count() <= 4);
        }
        assert!(files.open(&disk, 99).is_err());
    }
}
