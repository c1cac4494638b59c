//! Where each file is by its number: a database beside the files (redb), which can be made again from them.
//!
//! | table | key | value |
//! |---|---|---|
//! | `files` | number of the file | inode number (8 bytes), generation (8), slot (2; 0xffff: it lies in its parent), placeholders in it (4); big-endian |
//! | `inodes` | inode number | number of the file |
//! | `names` | number of the file (8 bytes), of the directory (8), the name | |
//! | `log` | order of a change that some member may lack, or that is not made yet | the change, as in the journal |
//! | `epochs` | order of the first change of an epoch | the epoch |
//! | `marks` | number of the file | its marks (8 bytes each), big-endian |
//! | `remembered` | number of the file | marks that it had since all members had everything |
//! | `calls` | a client | its last calls ([`crate::calls`]) |
//! | `meta` | `sequence`, `order`, `next`, `after` | the last record of the journal that is in it; the last change that was made; the next number for a file; after which change `log` begins |
//!
//! Changes stay in memory until a checkpoint writes them, all at once and durably. The journal has them until then.
//!
//! It knows nothing of the disk: callers say what they found there.

use std::collections::BTreeMap;
use std::fmt;
use std::io::ErrorKind;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard};

use redb::{
    Database, ReadOnlyTable, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition,
};

use crate::calls::DoneCalls;
use crate::change::{PoolChange, PoolPlace};
use crate::change_log::ChangeLog;
use crate::disk::DatabaseFile;
use crate::layout::{FileId, Slot};
use crate::marks::MarkTable;

const FILES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("files");
const INODES: TableDefinition<'_, u64, u64> = TableDefinition::new("inodes");
const NAMES: TableDefinition<'_, &[u8], ()> = TableDefinition::new("names");
const LOG: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("log");
const EPOCHS: TableDefinition<'_, u64, u64> = TableDefinition::new("epochs");
const MARKS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("marks");
const REMEMBERED: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("remembered");
const CALLS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("calls");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");

/// Memory for the database's pages.
const CACHE_BYTES: usize = 64 << 20;
const NO_SLOT: u16 = u16::MAX;

/// What is known of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileRecord {
    /// Its inode on the member's disk.
    pub(crate) ino: u64,
    /// The inode's generation.
    pub(crate) generation: u64,
    /// Where it lies, if it is a distributed directory.
    pub(crate) slot: Option<Slot>,
    /// How many placeholders are in it, if it is a directory; of a symbolic link, 1 if it is stored with an escape.
    pub(crate) placeholders: u32,
}

impl FileRecord {
    fn encode(self) -> [u8; 22] {
        let mut bytes = [0; 22];
        bytes[..8].copy_from_slice(&self.ino.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.generation.to_be_bytes());
        bytes[16..18].copy_from_slice(&self.slot.map_or(NO_SLOT, Slot::number).to_be_bytes());
        bytes[18..].copy_from_slice(&self.placeholders.to_be_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<FileRecord> {
        let bytes: &[u8; 22] = bytes.try_into().ok()?;
        let slot = u16::from_be_bytes([bytes[16], bytes[17]]);
        Some(FileRecord {
            ino: u64::from_be_bytes(bytes[..8].try_into().ok()?),
            generation: u64::from_be_bytes(bytes[8..16].try_into().ok()?),
            slot: match slot {
                NO_SLOT => None,
                slot => Some(Slot::new(slot)?),
            },
            placeholders: u32::from_be_bytes(bytes[18..].try_into().ok()?),
        })
    }
}

type NameKey = Vec<u8>;

fn name_key(id: FileId, place: &PoolPlace) -> NameKey {
    [&id.0.to_be_bytes(), &place.parent.0.to_be_bytes(), &place.name[..]].concat()
}

fn place_of(key: &[u8]) -> Option<PoolPlace> {
    let (parent, name) = key.get(8..)?.split_first_chunk()?;
    Some(PoolPlace::new(FileId(u64::from_be_bytes(*parent)), name))
}

/// Entries that are not in the database yet; `None` and `false` are removed ones.
#[derive(Default, Clone)]
struct PendingEntries {
    files: BTreeMap<FileId, Option<FileRecord>>,
    inodes: BTreeMap<u64, Option<FileId>>,
    names: BTreeMap<NameKey, bool>,
}

/// What the database holds, as of the last checkpoint.
struct WrittenTables {
    files: ReadOnlyTable<u64, &'static [u8]>,
    inodes: ReadOnlyTable<u64, u64>,
    names: ReadOnlyTable<&'static [u8], ()>,
}

struct IndexState {
    /// Changes since the checkpoint before.
    now: PendingEntries,
    /// Changes that a checkpoint under way writes.
    writing: Option<Arc<PendingEntries>>,
    written: Arc<WrittenTables>,
}

/// See the module.
pub(crate) struct PoolIndex {
    database: Database,
    state: Mutex<IndexState>,
}

/// The database could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("the index: {text}")]
pub(crate) struct PoolIndexError {
    text: String,
    /// It is no index any more, or of another version: not just a call that failed.
    pub(crate) is_damaged: bool,
}

impl PoolIndexError {
    fn of(error: impl Into<redb::Error>) -> PoolIndexError {
        let error = error.into();
        let is_no_database =
            matches!(&error, redb::Error::Io(error) if error.kind() == ErrorKind::InvalidData);
        let is_damaged = is_no_database
            || matches!(
                error,
                redb::Error::Corrupted(_)
                    | redb::Error::UpgradeRequired(_)
                    | redb::Error::RepairAborted
                    | redb::Error::TableTypeMismatch { .. }
                    | redb::Error::TypeDefinitionChanged { .. }
            );
        PoolIndexError { text: error.to_string(), is_damaged }
    }
}

/// What a member has to know beside where its files are.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct GroupEntries {
    /// The log: where it begins, its epochs, and changes that the index has not.
    pub(crate) log: ChangeLog,
    /// The last change that is in the log.
    pub(crate) last: u64,
    /// The marks of files.
    pub(crate) marks: MarkTable,
    /// Marks that there were since all members had everything.
    pub(crate) remembered: MarkTable,
    /// The last calls that made changes.
    pub(crate) calls: DoneCalls,
}

/// What a checkpoint writes.
pub(crate) struct FrozenEntries {
    changed: Arc<PendingEntries>,
    group: GroupEntries,
    meta: IndexMeta,
}

impl FrozenEntries {
    /// The changes of the log that it writes.
    pub(crate) fn logged(&self) -> &BTreeMap<u64, PoolChange> {
        &self.group.log.recent
    }
}

/// The meta entries of an index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct IndexMeta {
    /// The last record of the journal that it has.
    pub(crate) sequence: u64,
    /// The last change of the pool that was decided by then.
    pub(crate) order: u64,
    /// The next number for a file, without its slot.
    pub(crate) next: u64,
}

impl PoolIndex {
    /// Opens the index in a file; none if it is empty, or no index.
    pub(crate) fn open(
        file: Arc<dyn DatabaseFile>,
    ) -> Result<(PoolIndex, Option<IndexMeta>), PoolIndexError> {
        let database =
            Database::builder().set_cache_size(CACHE_BYTES).create_with_backend(DiskBackend(file));
        let database = database.map_err(PoolIndexError::of)?;
        let work = database.begin_write().map_err(PoolIndexError::of)?;
        let meta = {
            work.open_table(FILES).map_err(PoolIndexError::of)?;
            work.open_table(INODES).map_err(PoolIndexError::of)?;
            work.open_table(NAMES).map_err(PoolIndexError::of)?;
            work.open_table(LOG).map_err(PoolIndexError::of)?;
            work.open_table(EPOCHS).map_err(PoolIndexError::of)?;
            work.open_table(MARKS).map_err(PoolIndexError::of)?;
            work.open_table(REMEMBERED).map_err(PoolIndexError::of)?;
            work.open_table(CALLS).map_err(PoolIndexError::of)?;
            let meta = work.open_table(META).map_err(PoolIndexError::of)?;
            let value =
                |name| Ok(meta.get(name).map_err(PoolIndexError::of)?.map(|value| value.value()));
            match (value("sequence")?, value("order")?, value("next")?) {
                (Some(sequence), Some(order), Some(next)) => {
                    Some(IndexMeta { sequence, order, next })
                }
                _ => None,
            }
        };
        work.commit().map_err(PoolIndexError::of)?;
        let written = Arc::new(snapshot(&database)?);
        let state = IndexState { now: PendingEntries::default(), writing: None, written };
        Ok((PoolIndex { database, state: Mutex::new(state) }, meta))
    }

    fn state(&self) -> MutexGuard<'_, IndexState> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// What is known of a file.
    pub(crate) fn file(&self, id: FileId) -> Result<Option<FileRecord>, PoolIndexError> {
        let written = {
            let state = self.state();
            let changed = state.layers().find_map(|layer| layer.files.get(&id));
            if let Some(changed) = changed {
                return Ok(*changed);
            }
            state.written.clone()
        };
        let found = written.files.get(id.0).map_err(PoolIndexError::of)?;
        let Some(found) = found else { return Ok(None) };
        match FileRecord::decode(found.value()) {
            Some(record) => Ok(Some(record)),
            None => Err(PoolIndexError {
                text: format!("the record of file {id} is damaged"),
                is_damaged: true,
            }),
        }
    }

    /// The file of an inode.
    pub(crate) fn by_inode(&self, ino: u64) -> Result<Option<FileId>, PoolIndexError> {
        let written = {
            let state = self.state();
            let changed = state.layers().find_map(|layer| layer.inodes.get(&ino));
            if let Some(changed) = changed {
                return Ok(*changed);
            }
            state.written.clone()
        };
        let found = written.inodes.get(ino).map_err(PoolIndexError::of)?;
        Ok(found.map(|id| FileId(id.value())))
    }

    /// The names of a file, in the order of their directories' numbers.
    pub(crate) fn places(&self, id: FileId) -> Result<Vec<PoolPlace>, PoolIndexError> {
        let from = id.0.to_be_bytes().to_vec();
        let until = id.0.checked_add(1).map(|next| next.to_be_bytes().to_vec());
        let within = |key: &[u8]| key.starts_with(&from);
        let mut all = BTreeMap::new();
        let written = {
            let state = self.state();
            let layers: Vec<_> = state.layers().collect();
            for layer in layers.into_iter().rev() {
                let after =
                    layer.names.range::<[u8], _>((Bound::Included(&from[..]), Bound::Unbounded));
                all.extend(
                    after.take_while(|(key, _)| within(key)).map(|(key, is)| (key.clone(), *is)),
                );
            }
            state.written.clone()
        };
        let range = (
            Bound::Included(&from[..]),
            until.as_ref().map_or(Bound::Unbounded, |until| Bound::Excluded(&until[..])),
        );
        for entry in written.names.range::<&[u8]>(range).map_err(PoolIndexError::of)? {
            let (key, ()) =
                entry.map(|(key, _)| (key.value().to_vec(), ())).map_err(PoolIndexError::of)?;
            all.entry(key).or_insert(true);
        }
        Ok(all.iter().filter(|(_, is)| **is).filter_map(|(key, _)| place_of(key)).collect())
    }

    /// Whether a file has this name.
    pub(crate) fn has_place(&self, id: FileId, place: &PoolPlace) -> Result<bool, PoolIndexError> {
        let key = name_key(id, place);
        let written = {
            let state = self.state();
            let changed = state.layers().find_map(|layer| layer.names.get(&key));
            if let Some(changed) = changed {
                return Ok(*changed);
            }
            state.written.clone()
        };
        Ok(written.names.get(&key[..]).map_err(PoolIndexError::of)?.is_some())
    }

    /// How many entries wait for a checkpoint.
    pub(crate) fn pending(&self) -> usize {
        let state = self.state();
        state.now.files.len() + state.now.names.len()
    }

    /// Says what is known of a file.
    pub(crate) fn put_file(&self, id: FileId, record: FileRecord) {
        let mut state = self.state();
        state.now.files.insert(id, Some(record));
        state.now.inodes.insert(record.ino, Some(id));
    }

    /// Forgets a file that is gone; `record` is what was known of it.
    pub(crate) fn remove_file(&self, id: FileId, record: FileRecord) -> Result<(), PoolIndexError> {
        // The inode may be another file's by now.
        let is_its_own = self.by_inode(record.ino)? == Some(id);
        let mut state = self.state();
        state.now.files.insert(id, None);
        if is_its_own {
            state.now.inodes.insert(record.ino, None);
        }
        Ok(())
    }

    /// Adds a name.
    pub(crate) fn add_place(&self, id: FileId, place: &PoolPlace) {
        self.state().now.names.insert(name_key(id, place), true);
    }

    /// Removes a name.
    pub(crate) fn remove_place(&self, id: FileId, place: &PoolPlace) {
        self.state().now.names.insert(name_key(id, place), false);
    }

    /// Takes what has changed for a checkpoint. One is made at a time.
    pub(crate) fn freeze(&self, meta: IndexMeta, group: GroupEntries) -> FrozenEntries {
        let mut state = self.state();
        let mut changed = std::mem::take(&mut state.now);
        // What a checkpoint could not write is written by the next.
        if let Some(before) = state.writing.take() {
            let mut all = Arc::unwrap_or_clone(before);
            all.files.append(&mut changed.files);
            all.inodes.append(&mut changed.inodes);
            all.names.append(&mut changed.names);
            changed = all;
        }
        let changed = Arc::new(changed);
        state.writing = Some(changed.clone());
        FrozenEntries { changed, group, meta }
    }

    /// Writes a checkpoint, durably. Blocks.
    pub(crate) fn write(&self, frozen: &FrozenEntries) -> Result<(), PoolIndexError> {
        let work = self.database.begin_write().map_err(PoolIndexError::of)?;
        {
            let mut files = work.open_table(FILES).map_err(PoolIndexError::of)?;
            for (id, record) in &frozen.changed.files {
                match record {
                    Some(record) => files.insert(id.0, &record.encode()[..]),
                    None => files.remove(id.0),
                }
                .map_err(PoolIndexError::of)?;
            }
            let mut inodes = work.open_table(INODES).map_err(PoolIndexError::of)?;
            for (ino, id) in &frozen.changed.inodes {
                match id {
                    Some(id) => inodes.insert(ino, id.0),
                    None => inodes.remove(ino),
                }
                .map_err(PoolIndexError::of)?;
            }
            let mut names = work.open_table(NAMES).map_err(PoolIndexError::of)?;
            for (key, is) in &frozen.changed.names {
                match is {
                    true => names.insert(&key[..], ()),
                    false => names.remove(&key[..]),
                }
                .map_err(PoolIndexError::of)?;
            }
            let GroupEntries { log, last, marks, remembered, calls: done } = &frozen.group;
            let mut changes = work.open_table(LOG).map_err(PoolIndexError::of)?;
            changes.retain_in(..=log.after, |_, _| false).map_err(PoolIndexError::of)?;
            changes.retain_in(last + 1.., |_, _| false).map_err(PoolIndexError::of)?;
            for (order, change) in &log.recent {
                changes.insert(order, &change.encode()[..]).map_err(PoolIndexError::of)?;
            }
            let mut epochs = work.open_table(EPOCHS).map_err(PoolIndexError::of)?;
            epochs.retain(|_, _| false).map_err(PoolIndexError::of)?;
            for (order, epoch) in &log.epochs {
                epochs.insert(order, epoch).map_err(PoolIndexError::of)?;
            }
            for (table, marks) in [(MARKS, marks), (REMEMBERED, remembered)] {
                let mut table = work.open_table(table).map_err(PoolIndexError::of)?;
                table.retain(|_, _| false).map_err(PoolIndexError::of)?;
                for (id, of_file) in marks {
                    let bytes: Vec<u8> =
                        of_file.iter().flat_map(|mark| mark.to_be_bytes()).collect();
                    table.insert(id.0, &bytes[..]).map_err(PoolIndexError::of)?;
                }
            }
            let mut calls = work.open_table(CALLS).map_err(PoolIndexError::of)?;
            calls.retain(|_, _| false).map_err(PoolIndexError::of)?;
            for (client, record) in done.records() {
                calls.insert(&client[..], &record[..]).map_err(PoolIndexError::of)?;
            }
            let mut meta = work.open_table(META).map_err(PoolIndexError::of)?;
            let IndexMeta { sequence, order, next } = frozen.meta;
            let after = ("after", log.after);
            for (name, value) in [("sequence", sequence), ("order", order), ("next", next), after] {
                meta.insert(name, value).map_err(PoolIndexError::of)?;
            }
        }
        work.commit().map_err(PoolIndexError::of)?;
        let written = Arc::new(snapshot(&self.database)?);
        let mut state = self.state();
        state.written = written;
        state.writing = None;
        Ok(())
    }

    /// What the last checkpoint has said of the group; of the log all but its changes.
    pub(crate) fn group(&self) -> Result<GroupEntries, PoolIndexError> {
        let read = self.database.begin_read().map_err(PoolIndexError::of)?;
        let mut group = GroupEntries::default();
        let meta = read.open_table(META).map_err(PoolIndexError::of)?;
        let after = meta.get("after").map_err(PoolIndexError::of)?;
        group.log.after = after.map_or(0, |after| after.value());
        let changes = read.open_table(LOG).map_err(PoolIndexError::of)?;
        let last = changes.last().map_err(PoolIndexError::of)?;
        group.last = last.map_or(group.log.after, |(order, _)| order.value());
        let epochs = read.open_table(EPOCHS).map_err(PoolIndexError::of)?;
        for entry in epochs.iter().map_err(PoolIndexError::of)? {
            let (order, epoch) = entry.map_err(PoolIndexError::of)?;
            group.log.epochs.insert(order.value(), epoch.value());
        }
        for (table, marks) in [(MARKS, &mut group.marks), (REMEMBERED, &mut group.remembered)] {
            let table = read.open_table(table).map_err(PoolIndexError::of)?;
            for entry in table.iter().map_err(PoolIndexError::of)? {
                let (id, bytes) = entry.map_err(PoolIndexError::of)?;
                let (of_file, rest) = bytes.value().as_chunks();
                if !rest.is_empty() {
                    return Err(damaged("the marks of a file are damaged"));
                }
                let of_file = of_file.iter().map(|mark| u64::from_be_bytes(*mark)).collect();
                marks.insert(FileId(id.value()), of_file);
            }
        }
        let calls = read.open_table(CALLS).map_err(PoolIndexError::of)?;
        for entry in calls.iter().map_err(PoolIndexError::of)? {
            let (client, record) = entry.map_err(PoolIndexError::of)?;
            let added = group.calls.add_record(client.value(), record.value());
            added.ok_or_else(|| damaged("the calls of a client are damaged"))?;
        }
        Ok(group)
    }

    /// Changes of the log that the last checkpoint has written: those after `after`, at most so many.
    pub(crate) fn logged(
        &self,
        after: u64,
        most: usize,
    ) -> Result<BTreeMap<u64, PoolChange>, PoolIndexError> {
        let read = self.database.begin_read().map_err(PoolIndexError::of)?;
        let table = read.open_table(LOG).map_err(PoolIndexError::of)?;
        let mut changes = BTreeMap::new();
        for entry in table.range(after.saturating_add(1)..).map_err(PoolIndexError::of)?.take(most)
        {
            let (order, change) = entry.map_err(PoolIndexError::of)?;
            let change = PoolChange::decode(change.value());
            let change = change.ok_or_else(|| damaged("a change of the log is damaged"))?;
            changes.insert(order.value(), change);
        }
        Ok(changes)
    }

    /// All files of the last checkpoint, and what changed since, in the order of their numbers.
    pub(crate) fn all_files(&self) -> Result<BTreeMap<FileId, FileRecord>, PoolIndexError> {
        let state = self.state();
        let mut all = BTreeMap::new();
        for entry in state.written.files.iter().map_err(PoolIndexError::of)? {
            let (id, record) = entry.map_err(PoolIndexError::of)?;
            if let Some(record) = FileRecord::decode(record.value()) {
                all.insert(FileId(id.value()), record);
            }
        }
        let layers: Vec<_> = state.layers().collect();
        for layer in layers.into_iter().rev() {
            for (id, record) in &layer.files {
                match record {
                    Some(record) => all.insert(*id, *record),
                    None => all.remove(id),
                };
            }
        }
        Ok(all)
    }
}

impl IndexState {
    /// The newest first.
    fn layers(&self) -> impl Iterator<Item = &PendingEntries> {
        std::iter::once(&self.now).chain(self.writing.as_deref())
    }
}

fn damaged(text: &str) -> PoolIndexError {
    PoolIndexError { text: text.to_owned(), is_damaged: true }
}

fn snapshot(database: &Database) -> Result<WrittenTables, PoolIndexError> {
    let read = database.begin_read().map_err(PoolIndexError::of)?;
    Ok(WrittenTables {
        files: read.open_table(FILES).map_err(PoolIndexError::of)?,
        inodes: read.open_table(INODES).map_err(PoolIndexError::of)?,
        names: read.open_table(NAMES).map_err(PoolIndexError::of)?,
    })
}

/// The database's file on the member's disk.
struct DiskBackend(Arc<dyn DatabaseFile>);

impl fmt::Debug for DiskBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DiskBackend")
    }
}

impl StorageBackend for DiskBackend {
    fn len(&self) -> std::io::Result<u64> {
        self.0.size()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> std::io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> std::io::Result<()> {
        self.0.sync()
    }

    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.0.write(offset, data)
    }
}
