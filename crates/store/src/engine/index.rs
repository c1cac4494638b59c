//! The index on disk: a redb database from keys to places in the log.
//!
//! It is a cache of the log with one difference: extended leases and removals of expired
//! blocks are only here. It never runs ahead of the log: each commit records the synced position
//! of the log that it covers (its checkpoint), and recovery replays the log from there. If the
//! index is lost or unreadable it is made again from the log.
//!
//! Tables of `index.redb`:
//!
//! | table | key | value |
//! |---|---|---|
//! | `blocks` | key: 32 bytes if it is a hash, else 64 | `IndexEntry`, 44 bytes |
//! | `owners` | owner, 32 bytes | its number, blocks held for it, bytes of them |
//! | `segments` | number | salt, length, bytes of live records, removals |
//! | `meta` | name | number: `layout`, `segment`, `offset`, `next_sequence`, `blocks`, `block_bytes` |

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::sync::Arc;

use atoll_key::Key;
use redb::{
    Database, ReadOnlyTable, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition,
};

use super::entry::{ENTRY_BYTES, IndexEntry, OwnerNumbers};
use super::error::IndexError;
use crate::disk::{Disk, DiskFile};
use crate::{Holding, Owner};

/// The file's name.
pub(crate) const FILE_NAME: &str = "index.redb";
/// The name of one that could not be read.
const DAMAGED_FILE_NAME: &str = "index.redb.damaged";

/// The layout this code writes, and the only one it reads.
const LAYOUT: u64 = 4;

const BLOCKS: TableDefinition<&[u8], &[u8; ENTRY_BYTES]> = TableDefinition::new("blocks");
const OWNERS: TableDefinition<&[u8; Owner::BYTES], (u32, u64, u64)> =
    TableDefinition::new("owners");
const SEGMENTS: TableDefinition<u64, (u64, u64, u64, u64)> = TableDefinition::new("segments");
const META: TableDefinition<&str, u64> = TableDefinition::new("meta");

/// The key as the index has it: half of a hashed one is zeros.
fn encode_key(key: &Key) -> &[u8] {
    match key.as_hash() {
        Some(_) => &key.0[..32],
        None => &key.0,
    }
}

fn decode_key(bytes: &[u8]) -> Result<Key, IndexError> {
    let mut key = Key::MIN;
    match bytes.len() {
        32 | 64 => key.0[..bytes.len()].copy_from_slice(bytes),
        len => return Err(IndexError::Damaged(format!("a key of {len} bytes"))),
    }
    Ok(key)
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
    /// The holdings of owners for whom more or less is held than before.
    pub(crate) owners: BTreeMap<Owner, Holding>,
    pub(crate) checkpoint: Checkpoint,
    /// Segments without live records; once this is committed nothing points to them.
    pub(crate) dead: Vec<u64>,
}

/// What has changed since the last commit: where blocks are now, `None` if nowhere.
pub(crate) type Changes = BTreeMap<Key, Option<IndexEntry>>;

/// Runs `work`, which calls redb. On damaged pages redb may panic; to us that is only an
/// index that must be made again.
fn guarded<T>(work: impl FnOnce() -> Result<T, IndexError>) -> Result<T, IndexError> {
    atoll_env::panics::catch(work)
        .unwrap_or_else(|_| Err(IndexError::Damaged("its pages contradict each other".to_owned())))
}

/// One committed state of the index, readable while later ones are committed.
pub(crate) struct Snapshot {
    /// Differs between any two snapshots of one open store.
    pub(crate) generation: u64,
    /// `None` only while it is dropped.
    blocks: Option<BlocksTable>,
    owners: Arc<OwnerNumbers>,
}

type BlocksTable = ReadOnlyTable<&'static [u8], &'static [u8; ENTRY_BYTES]>;

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

    pub(crate) fn lookup(&self, key: &Key) -> Result<Option<IndexEntry>, IndexError> {
        guarded(|| match self.table().get(encode_key(key))? {
            Some(value) => Ok(Some(IndexEntry::decode(key, value.value(), &self.owners)?)),
            None => Ok(None),
        })
    }

    /// Up to `limit` entries from `first` to `last`, both included.
    pub(crate) fn range(
        &self,
        first: &Key,
        last: &Key,
        limit: usize,
    ) -> Result<Vec<(Key, IndexEntry)>, IndexError> {
        guarded(|| {
            let mut found = Vec::new();
            let range = encode_key(first)..=encode_key(last);
            for item in self.table().range::<&[u8]>(range)?.take(limit) {
                let (key, value) = item?;
                let key = decode_key(key.value())?;
                found.push((key, IndexEntry::decode(&key, value.value(), &self.owners)?));
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
    owners: Arc<OwnerNumbers>,
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
        let owners = Arc::default();
        let database = Some(database);
        let index = Index { disk, cache_bytes, file, database, generation: 0, owners };
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
        let layout = number("layout")?;
        if layout != LAYOUT {
            return Err(IndexError::OtherLayout { name: FILE_NAME, layout });
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
            let (number, blocks, block_bytes) = held.value();
            let owner = Owner::from_bytes(owner.value());
            self.owners.set(owner, number);
            owners.insert(owner, Holding { blocks, block_bytes });
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
        let owners = self.owners.clone();
        Ok(Snapshot { generation: self.generation, blocks: Some(blocks), owners })
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
                    Some(entry) => {
                        let owner = self.owners.number(&entry.owner);
                        blocks.insert(encode_key(key), &entry.encode(key, owner))?
                    }
                    None => blocks.remove(encode_key(key))?,
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
                let key = owner.to_bytes();
                match held.blocks {
                    0 => table.remove(&key)?,
                    blocks => {
                        let number = self.owners.number(owner);
                        table.insert(&key, (number, blocks, held.block_bytes))?
                    }
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
    fn keys_keep_their_order_in_the_index() {
        let hashed = |byte| Key::hashed([byte; 32]);
        let mut tail = hashed(7);
        tail.0[63] = 1;
        let mut keys = [hashed(0), hashed(7), tail, hashed(8), Key::MAX, hashed(7).next()];
        keys.sort();
        assert!(keys.is_sorted_by_key(|key| encode_key(key).to_vec()));
        for key in keys {
            assert_eq!(decode_key(encode_key(&key)).expect("a key"), key);
        }
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
                blocks.insert(&[round; 64][..], &[round; ENTRY_BYTES]).expect("inserted");
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
    fn an_index_of_another_layout_is_refused_and_stays() {
        let disk = FaultyDisk::new(1);
        for layout in [LAYOUT - 1, LAYOUT + 1] {
            let opened = Index::open(Arc::new(disk.clone()), 1 << 20).map(|(index, _)| index);
            let index = opened.unwrap_or_else(|error| panic!("{error}"));
            let transaction = index.database().expect("open").begin_write().expect("begun");
            let mut meta = transaction.open_table(META).expect("made");
            meta.insert("layout", layout).expect("inserted");
            drop(meta);
            transaction.commit().expect("committed");
            drop(index);
            let refused = Index::open(Arc::new(disk.clone()), 1 << 20).err();
            assert!(
                matches!(refused, Some(IndexError::OtherLayout { layout: found, .. }) if found == layout)
            );
            disk.remove(FILE_NAME).expect("it is still there");
        }
    }

    #[test]
    fn a_fresh_index_is_small() {
        let (index, contents) = Index::open(Arc::new(FaultyDisk::new(1)), 1 << 20).expect("opened");
        assert!(contents.is_none());
        let len_bytes = index.len_bytes().expect("known");
        assert!(len_bytes <= 2 << 20, "{len_bytes}");
    }
}
