//! The index on disk: a redb database from keys to places in the log.
//!
//! It is a cache of the log with one difference: extended leases and removals of expired
//! blocks are only here. It never runs ahead of the log: a commit says of itself up to
//! which synced place of the log it is true (its checkpoint), and whoever opens it
//! replays the log from there. If it is lost or unreadable it is made again from the log.
//!
//! Tables of `index.redb`:
//!
//! | table | key | value |
//! |---|---|---|
//! | `blocks2` | key, 64 bytes | `Entry`, 78 bytes |
//! | `owners` | owner, 32 bytes | blocks held for it, bytes of them |
//! | `segments` | number | salt, length, bytes of live records, removals |
//! | `meta` | name | number: `layout`, `segment`, `offset`, `next_sequence`, `blocks`, `block_bytes` |

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use atoll_key::{BlockKind, Key};
use redb::{
    Database, ReadOnlyTable, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition,
};

use crate::disk::{Disk, DiskFile};
use crate::segment::{OWNER_BYTES, record_bytes};
use crate::{BlockInfo, Holding, Owner, index_layout1};

/// The file's name.
pub(crate) const FILE_NAME: &str = "index.redb";
/// The name of one that could not be read.
const DAMAGED_FILE_NAME: &str = "index.redb.damaged";

pub(crate) const LAYOUT: u64 = 2;
pub(crate) const ENTRY_BYTES: usize = 78;
const ENTRY_CRC_OFFSET: usize = ENTRY_BYTES - 4;

pub(crate) const BLOCKS: TableDefinition<&[u8; 64], &[u8; ENTRY_BYTES]> =
    TableDefinition::new("blocks2");
pub(crate) const OWNERS: TableDefinition<&[u8; OWNER_BYTES], (u64, u64)> =
    TableDefinition::new("owners");
pub(crate) const SEGMENTS: TableDefinition<u64, (u64, u64, u64, u64)> =
    TableDefinition::new("segments");
pub(crate) const META: TableDefinition<&str, u64> = TableDefinition::new("meta");

/// Where a block is and what is known of it.
///
/// | offset | bytes | field |
/// |---|---|---|
/// | 0 | 8 | segment |
/// | 8 | 4 | offset of the record in it |
/// | 12 | 4 | length of the block |
/// | 16 | 1 | kind |
/// | 17 | 1 | 1 if the record's header carries an owner, otherwise 0 |
/// | 18 | 8 | version |
/// | 26 | 8 | end of the lease |
/// | 34 | 8 | sequence number |
/// | 42 | 32 | owner: publisher, address |
/// | 74 | 4 | CRC-32 of the key and bytes 0..74 |
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Entry {
    pub(crate) segment: u64,
    pub(crate) offset: u32,
    pub(crate) len_bytes: u32,
    pub(crate) kind: BlockKind,
    /// Whether the record's header carries an owner: perhaps not the present one.
    pub(crate) long_header: bool,
    pub(crate) version: u64,
    pub(crate) expires_unix_secs: u64,
    pub(crate) sequence: u64,
    pub(crate) owner: Owner,
}

impl Entry {
    pub(crate) fn info(&self, key: Key) -> BlockInfo {
        BlockInfo {
            key,
            kind: self.kind,
            version: self.version,
            expires_unix_secs: self.expires_unix_secs,
            len_bytes: self.len_bytes,
            owner: self.owner,
        }
    }

    /// What its record takes in the log.
    pub(crate) fn record_bytes(&self) -> u64 {
        record_bytes(self.len_bytes, self.long_header)
    }

    /// The same block with the lease and the owner of `other`, if that lease is longer.
    pub(crate) fn leased_as(self, other: &Entry) -> Entry {
        if other.expires_unix_secs <= self.expires_unix_secs {
            return self;
        }
        Entry { expires_unix_secs: other.expires_unix_secs, owner: other.owner, ..self }
    }

    /// The same block leased until `expires_unix_secs` for `owner`, or for whom it was if
    /// that is nobody.
    pub(crate) fn extended(self, expires_unix_secs: u64, owner: Owner) -> Entry {
        let owner = if owner == Owner::NOBODY { self.owner } else { owner };
        Entry { expires_unix_secs, owner, ..self }
    }

    pub(crate) fn encode(&self, key: &Key) -> [u8; ENTRY_BYTES] {
        let mut out = [0; ENTRY_BYTES];
        out[..8].copy_from_slice(&self.segment.to_be_bytes());
        out[8..12].copy_from_slice(&self.offset.to_be_bytes());
        out[12..16].copy_from_slice(&self.len_bytes.to_be_bytes());
        out[16] = self.kind as u8;
        out[17] = u8::from(self.long_header);
        out[18..26].copy_from_slice(&self.version.to_be_bytes());
        out[26..34].copy_from_slice(&self.expires_unix_secs.to_be_bytes());
        out[34..42].copy_from_slice(&self.sequence.to_be_bytes());
        out[42..ENTRY_CRC_OFFSET].copy_from_slice(&encode_owner(&self.owner));
        let crc = entry_crc(key, &out[..ENTRY_CRC_OFFSET]);
        out[ENTRY_CRC_OFFSET..].copy_from_slice(&crc.to_be_bytes());
        out
    }

    fn decode(key: &Key, bytes: &[u8; ENTRY_BYTES]) -> Result<Entry, IndexError> {
        let crc = be32(bytes, ENTRY_CRC_OFFSET);
        let sound = crc == entry_crc(key, &bytes[..ENTRY_CRC_OFFSET]);
        let kind = BlockKind::from_u8(bytes[16]);
        let (Ok(kind), 0 | 1, true) = (kind, bytes[17], sound) else {
            return Err(IndexError::Damaged("an entry does not match its checksum".to_owned()));
        };
        let owner = bytes[42..ENTRY_CRC_OFFSET].try_into().expect("32 bytes");
        Ok(Entry {
            segment: be64(bytes, 0),
            offset: be32(bytes, 8),
            len_bytes: be32(bytes, 12),
            kind,
            long_header: bytes[17] == 1,
            version: be64(bytes, 18),
            expires_unix_secs: be64(bytes, 26),
            sequence: be64(bytes, 34),
            owner: decode_owner(owner),
        })
    }
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

pub(crate) fn entry_crc(key: &Key, fields: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&key.0);
    crc.update(fields);
    crc.finalize()
}

pub(crate) fn encode_owner(owner: &Owner) -> [u8; OWNER_BYTES] {
    let mut out = [0; OWNER_BYTES];
    out[..16].copy_from_slice(&owner.publisher);
    out[16..].copy_from_slice(&owner.ip);
    out
}

fn decode_owner(bytes: &[u8; OWNER_BYTES]) -> Owner {
    let half = |at: usize| bytes[at..at + 16].try_into().expect("16 bytes");
    Owner { publisher: half(0), ip: half(16) }
}

/// What is known of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SegmentStat {
    pub(crate) salt: u64,
    /// Length of the file that is known to be written, bytes.
    pub(crate) len_bytes: u64,
    /// Of that, records of blocks that are held.
    pub(crate) live_bytes: u64,
    /// Removal records in it.
    pub(crate) removals: u64,
}

/// Up to where of the log the index is true, and sums over it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Checkpoint {
    pub(crate) segment: u64,
    pub(crate) offset: u64,
    pub(crate) next_sequence: u64,
    pub(crate) blocks: u64,
    pub(crate) block_bytes: u64,
}

/// What is to be committed.
pub(crate) struct Frozen {
    pub(crate) changes: Arc<Changes>,
    /// Segments whose state has changed; those that are not in `segments` are gone.
    pub(crate) touched: BTreeSet<u64>,
    pub(crate) segments: BTreeMap<u64, SegmentStat>,
    /// What is held for those for whom more or less is held than before.
    pub(crate) owners: BTreeMap<Owner, Holding>,
    pub(crate) checkpoint: Checkpoint,
    /// Segments without live records; once this is committed nothing points to them.
    pub(crate) dead: Vec<u64>,
}

/// What has changed since the last commit: where blocks are now, `None` if nowhere.
pub(crate) type Changes = BTreeMap<Key, Option<Entry>>;

/// Why the index could not be read or written; the log knows everything it held.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum IndexError {
    /// What is in it makes no sense: it must be made again.
    #[error("the index is damaged: {0}")]
    Damaged(String),
    /// The disk failed; the index may be fine.
    #[error("the index cannot be reached: {0}")]
    Io(String),
}

impl From<io::Error> for IndexError {
    fn from(error: io::Error) -> IndexError {
        match error.kind() {
            io::ErrorKind::InvalidData
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::UnexpectedEof => IndexError::Damaged(error.to_string()),
            _ => IndexError::Io(error.to_string()),
        }
    }
}

impl From<redb::Error> for IndexError {
    fn from(error: redb::Error) -> IndexError {
        match error {
            redb::Error::Io(error) => error.into(),
            redb::Error::PreviousIo | redb::Error::DatabaseClosed => {
                IndexError::Io(error.to_string())
            }
            _ => IndexError::Damaged(error.to_string()),
        }
    }
}

macro_rules! index_error_from {
    ($($error:ty),*) => { $(
        impl From<$error> for IndexError {
            fn from(error: $error) -> IndexError {
                redb::Error::from(error).into()
            }
        }
    )* };
}

index_error_from!(
    redb::CommitError,
    redb::DatabaseError,
    redb::StorageError,
    redb::TableError,
    redb::TransactionError
);

/// Runs `work`, which calls redb. On damaged pages redb may panic; to us that is only an
/// index that must be made again.
fn guarded<T>(work: impl FnOnce() -> Result<T, IndexError>) -> Result<T, IndexError> {
    std::panic::catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(IndexError::Damaged("its pages contradict each other".to_owned())))
}

/// One committed state of the index, readable while later ones are committed.
pub(crate) struct Snapshot {
    /// Differs between any two snapshots of one open store.
    pub(crate) generation: u64,
    /// `None` only while it is dropped.
    blocks: Option<BlocksTable>,
}

type BlocksTable = ReadOnlyTable<&'static [u8; 64], &'static [u8; ENTRY_BYTES]>;

impl Drop for Snapshot {
    fn drop(&mut self) {
        drop_guarded(self.blocks.take());
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        drop_guarded(self.database.take());
    }
}

/// After a panic redb's locks are poisoned and its destructors panic as well.
fn drop_guarded<T>(value: T) {
    let dropped = guarded(|| {
        drop(value);
        Ok(())
    });
    if let Err(error) = dropped {
        tracing::warn!(%error, "the index was not closed in order");
    }
}

impl Snapshot {
    fn table(&self) -> &BlocksTable {
        self.blocks.as_ref().expect("taken only when dropped")
    }

    pub(crate) fn lookup(&self, key: &Key) -> Result<Option<Entry>, IndexError> {
        guarded(|| match self.table().get(&key.0)? {
            Some(value) => Ok(Some(Entry::decode(key, value.value())?)),
            None => Ok(None),
        })
    }

    /// Up to `limit` entries from `first` to `last`, both included.
    pub(crate) fn range(
        &self,
        first: &Key,
        last: &Key,
        limit: usize,
    ) -> Result<Vec<(Key, Entry)>, IndexError> {
        guarded(|| {
            let mut found = Vec::new();
            for item in self.table().range::<&[u8; 64]>(&first.0..=&last.0)?.take(limit) {
                let (key, value) = item?;
                let key = Key(*key.value());
                found.push((key, Entry::decode(&key, value.value())?));
            }
            Ok(found)
        })
    }
}

/// The open database.
pub(crate) struct Index {
    disk: Arc<dyn Disk>,
    cache_bytes: usize,
    file: Arc<dyn DiskFile>,
    database: Option<Database>,
    generation: u64,
}

/// What an index holds beside its blocks.
pub(crate) struct Contents {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) segments: BTreeMap<u64, SegmentStat>,
    pub(crate) owners: BTreeMap<Owner, Holding>,
}

/// Renames an index that cannot be used, so that the next one is made from the log. The one set
/// aside is the latest of its kind: it has leases that the log does not.
pub(crate) fn set_aside(disk: &dyn Disk) -> io::Result<()> {
    match disk.rename(FILE_NAME, DAMAGED_FILE_NAME) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Index {
    /// Opens the index; `None` of contents if it has just been made.
    pub(crate) fn open(
        disk: Arc<dyn Disk>,
        cache_bytes: usize,
    ) -> Result<(Index, Option<Contents>), IndexError> {
        let file = match disk.open(FILE_NAME) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let file = disk.create(FILE_NAME)?;
                disk.sync_dir()?;
                file
            }
            opened => opened?,
        };
        let database = open_database(file.clone(), cache_bytes)?;
        guarded(|| index_layout1::bring_up(&database))?;
        let index = Index { disk, cache_bytes, file, database: Some(database), generation: 0 };
        let contents = guarded(|| index.contents())?;
        Ok((index, contents))
    }

    /// Sets aside whatever is there and makes an empty index.
    pub(crate) fn create(disk: Arc<dyn Disk>, cache_bytes: usize) -> Result<Index, IndexError> {
        set_aside(&*disk)?;
        Ok(Index::open(disk, cache_bytes)?.0)
    }

    /// Opens the database again after it failed: redb refuses everything after an I/O
    /// error, also when the reason (a full disk, say) is gone.
    pub(crate) fn reopen(&mut self) -> Result<(), IndexError> {
        drop_guarded(self.database.take());
        self.file = self.disk.open(FILE_NAME)?;
        self.database = Some(open_database(self.file.clone(), self.cache_bytes)?);
        Ok(())
    }

    pub(crate) fn len_bytes(&self) -> Result<u64, IndexError> {
        Ok(self.file.len()?)
    }

    pub(crate) fn database(&self) -> Result<&Database, IndexError> {
        self.database
            .as_ref()
            .ok_or_else(|| IndexError::Io("it could not be opened again".to_owned()))
    }

    fn contents(&self) -> Result<Option<Contents>, IndexError> {
        let transaction = self.database()?.begin_read()?;
        let meta = match transaction.open_table(META) {
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
            table => table?,
        };
        let number = |name: &str| -> Result<u64, IndexError> {
            let value =
                meta.get(name)?.ok_or_else(|| IndexError::Damaged(format!("no {name} in it")))?;
            Ok(value.value())
        };
        if number("layout")? != LAYOUT {
            let layout = number("layout")?;
            return Err(IndexError::Damaged(format!("layout {layout} is not {LAYOUT}")));
        }
        let checkpoint = Checkpoint {
            segment: number("segment")?,
            offset: number("offset")?,
            next_sequence: number("next_sequence")?,
            blocks: number("blocks")?,
            block_bytes: number("block_bytes")?,
        };
        let mut segments = BTreeMap::new();
        for item in transaction.open_table(SEGMENTS)?.iter()? {
            let (segment, stat) = item?;
            let (salt, len_bytes, live_bytes, removals) = stat.value();
            segments.insert(segment.value(), SegmentStat { salt, len_bytes, live_bytes, removals });
        }
        let mut owners = BTreeMap::new();
        for item in transaction.open_table(OWNERS)?.iter()? {
            let (owner, held) = item?;
            let (blocks, block_bytes) = held.value();
            owners.insert(decode_owner(owner.value()), Holding { blocks, block_bytes });
        }
        let blocks = owners.values().map(|held| held.blocks).fold(0, u64::wrapping_add);
        if blocks != checkpoint.blocks {
            return Err(IndexError::Damaged("its owners do not have all of its blocks".to_owned()));
        }
        Ok(Some(Contents { checkpoint, segments, owners }))
    }

    /// The last committed state. An index that was just made must be committed to first.
    pub(crate) fn snapshot(&mut self) -> Result<Snapshot, IndexError> {
        let blocks = guarded(|| Ok(self.database()?.begin_read()?.open_table(BLOCKS)?))?;
        self.generation += 1;
        Ok(Snapshot { generation: self.generation, blocks: Some(blocks) })
    }

    /// Makes changes and the state of the touched segments durable, in one step.
    /// The log must have been synced up to the checkpoint.
    pub(crate) fn commit(&mut self, frozen: &Frozen) -> Result<Snapshot, IndexError> {
        guarded(|| self.write(frozen))?;
        self.snapshot()
    }

    fn write(&self, frozen: &Frozen) -> Result<(), IndexError> {
        let Frozen { changes, touched, segments, owners, checkpoint, .. } = frozen;
        let transaction = self.database()?.begin_write()?;
        {
            let mut blocks = transaction.open_table(BLOCKS)?;
            for (key, entry) in &**changes {
                match entry {
                    Some(entry) => blocks.insert(&key.0, &entry.encode(key))?,
                    None => blocks.remove(&key.0)?,
                };
            }
            let mut table = transaction.open_table(SEGMENTS)?;
            for number in touched {
                match segments.get(number) {
                    Some(s) => {
                        let stat = (s.salt, s.len_bytes, s.live_bytes, s.removals);
                        table.insert(number, stat)?
                    }
                    None => table.remove(number)?,
                };
            }
            let mut table = transaction.open_table(OWNERS)?;
            for (owner, held) in owners {
                let key = encode_owner(owner);
                match held.blocks {
                    0 => table.remove(&key)?,
                    blocks => table.insert(&key, (blocks, held.block_bytes))?,
                };
            }
            let mut meta = transaction.open_table(META)?;
            for (name, number) in [
                ("layout", LAYOUT),
                ("segment", checkpoint.segment),
                ("offset", checkpoint.offset),
                ("next_sequence", checkpoint.next_sequence),
                ("blocks", checkpoint.blocks),
                ("block_bytes", checkpoint.block_bytes),
            ] {
                meta.insert(name, number)?;
            }
        }
        transaction.commit()?;
        Ok(())
    }
}

/// Opens redb on `file`, and compares all of its pages with their checksums: redb itself
/// does so only after a crash, and else takes them at their word. A damaged page would
/// make it panic later, perhaps twice at once (in a commit and in what cleans up behind
/// it), which nothing can catch. That costs reading the index once: 0.3 s for a million
/// blocks, measured with the file in the page cache.
fn open_database(file: Arc<dyn DiskFile>, cache_bytes: usize) -> Result<Database, IndexError> {
    let mut database = guarded(|| {
        let mut builder = Database::builder();
        Ok(builder.set_cache_size(cache_bytes).create_with_backend(IndexFile(file))?)
    })?;
    match guarded(|| Ok(database.check_integrity()?)) {
        Ok(_sound_or_repaired) => Ok(database),
        Err(error) => {
            // Closing it means a commit. The file is about to be replaced anyway.
            std::mem::forget(database);
            Err(error)
        }
    }
}

/// redb's view of a file.
#[derive(Debug)]
struct IndexFile(Arc<dyn DiskFile>);

impl StorageBackend for IndexFile {
    fn len(&self) -> Result<u64, io::Error> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), io::Error> {
        match self.0.read_at(offset, out)? {
            read if read == out.len() => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn set_len(&self, len: u64) -> Result<(), io::Error> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> Result<(), io::Error> {
        self.0.sync()
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), io::Error> {
        self.0.write_at(offset, &mut [IoSlice::new(data)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::FaultyDisk;

    #[test]
    fn an_entry_reads_back() {
        let entry = Entry {
            segment: 1 << 40,
            offset: 7,
            len_bytes: 65_536,
            kind: BlockKind::Signed,
            long_header: true,
            version: u64::MAX,
            expires_unix_secs: 12,
            sequence: 99,
            owner: Owner { publisher: [4; 16], ip: [5; 16] },
        };
        let key = Key([3; 64]);
        assert_eq!(Entry::decode(&key, &entry.encode(&key)).expect("valid"), entry);
        for bit in 0..ENTRY_BYTES * 8 {
            let mut bytes = entry.encode(&key);
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Entry::decode(&key, &bytes).is_err(), "bit {bit}");
        }
        assert!(Entry::decode(&Key([4; 64]), &entry.encode(&key)).is_err(), "another's");
    }

    /// Found by fuzzing: redb took damaged pages at their word, panicked when the index was
    /// closed, and again while it cleaned up behind the first panic, which ends a process.
    #[test]
    fn damage_to_an_index_is_found_before_it_is_used() {
        let disk = FaultyDisk::new(1);
        {
            let opened = Index::open(Arc::new(disk.clone()), 1 << 20).expect("opened");
            let database = opened.0.database().expect("open");
            for round in 0..20u8 {
                let transaction = database.begin_write().expect("begun");
                let mut blocks = transaction.open_table(BLOCKS).expect("made");
                blocks.insert(&[round; 64], &[round; ENTRY_BYTES]).expect("inserted");
                drop(blocks);
                transaction.commit().expect("committed");
            }
        }
        let sound = disk.contents(FILE_NAME).expect("it is there");
        let places: Vec<usize> = (0..sound.len()).filter(|at| sound[*at] != 0).collect();
        let mut refused = 0;
        for seed in 0..200u64 {
            let mut bytes = sound.clone();
            for change in 0..8 {
                let draw = crc32fast::hash(&[seed as u8, change]) as usize;
                bytes[places[draw % places.len()]] ^= (draw >> 24) as u8;
            }
            let disk = FaultyDisk::new(1);
            disk.overwrite(FILE_NAME, bytes);
            refused += u32::from(Index::open(Arc::new(disk), 1 << 20).is_err());
        }
        assert!(refused > 100, "{refused}");
    }

    #[test]
    fn a_fresh_index_is_small() {
        let (index, contents) = Index::open(Arc::new(FaultyDisk::new(1)), 1 << 20).expect("opened");
        assert!(contents.is_none());
        let len_bytes = index.len_bytes().expect("known");
        assert!(len_bytes <= 2 << 20, "{len_bytes}");
    }
}
