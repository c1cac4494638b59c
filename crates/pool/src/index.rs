//! Where each file is by its number: a database beside the files (redb), which can be made again from them.
//!
//! | table | key | value |
//! |---|---|---|
//! | `files` | number of the file | inode number (8 bytes), generation (8), slot (2; 0xffff: it lies in its parent), placeholders in it (4), its kind (1), of a referral the file that it leads to (8) and how deep that lies (1); big-endian |
//! | `inodes` | inode number | number of the file |
//! | `names` | number of the file (8 bytes), of the directory (8), the name | |
//! | `log` | order of a change that some member may lack, or that is not made yet | the change, as in the journal |
//! | `epochs` | order of the first change of an epoch | the epoch |
//! | `marks` | number of the file | its marks (8 bytes each), big-endian |
//! | `remembered` | number of the file | marks that it had since all members had everything |
//! | `calls` | a client | its last calls ([`crate::calls`]) |
//! | `digests` | number of a file | the digest of its bytes (32 bytes), by which all members had the same and since which nobody wrote ([`crate::scrub`]) |
//! | `crossings` | counts | a change over several groups that waits for something ([`crate::crossings`]) |
//! | `quotas` | 0 | the limits, and what is used of them ([`crate::quota`]) |
//! | `meta` | `sequence`, `order`, `next`, `after`, `version` | the last record of the journal that is in it; the last change that was made; the next number for a file; after which change `log` begins; the version of these tables |
//!
//! Changes stay in memory until a checkpoint writes them, all at once and durably. The journal has them until then.
//!
//! It knows nothing of the disk: callers say what they found there.

use std::collections::BTreeMap;
use std::fmt;
use std::io::ErrorKind;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_vfs::FileKind;
use redb::{
    Database, ReadOnlyTable, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition,
};

use crate::calls::{DoneCalls, kind_number, numbered_kind};
use crate::change::{PoolChange, PoolPlace};
use crate::change_log::ChangeLog;
use crate::crossings::Crossings;
use crate::disk::{DatabaseFile, Stat};
use crate::layout::{FileId, LinkForm, Referral, Slot};
use crate::marks::MarkTable;
use crate::quota::QuotaTable;
use crate::scrub::ContentDigest;

const FILES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("files");
const INODES: TableDefinition<'_, u64, u64> = TableDefinition::new("inodes");
const NAMES: TableDefinition<'_, &[u8], ()> = TableDefinition::new("names");
const LOG: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("log");
const EPOCHS: TableDefinition<'_, u64, u64> = TableDefinition::new("epochs");
const MARKS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("marks");
const REMEMBERED: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("remembered");
const CALLS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("calls");
const CROSSINGS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("crossings");
const DIGESTS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("digests");
const QUOTAS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("quotas");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");

/// Memory for the database's pages.
const CACHE_BYTES: usize = 64 << 20;
const NO_SLOT: u16 = u16::MAX;
/// Of the tables. An index of another one is made again from the files.
const VERSION: u64 = 3;
const RECORD_BYTES: usize = 23;
const ESCAPED: u32 = 1;

/// What is known of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileRecord {
    /// Its inode on the member's disk.
    pub(crate) ino: u64,
    /// The inode's generation.
    pub(crate) generation: u64,
    /// Where it lies, if it is a distributed directory.
    pub(crate) slot: Option<Slot>,
    /// How many placeholders and referrals to directories are in it, if it is a directory; of a symbolic link, 1 if it is stored with an
    /// escape, and of a referral the number of the file's kind, plus 2.
    pub(crate) placeholders: u32,
    /// What it is.
    pub(crate) kind: FileKind,
    /// The file of another group that it is a name of, if it is a referral, and how deep that lies.
    pub(crate) leads_to: Option<(FileId, u8)>,
}

impl FileRecord {
    /// Of a file that the disk says this of; of a distributed directory, not of its placeholder.
    pub(crate) fn of(stat: &Stat, slot: Option<Slot>, placeholders: u32) -> FileRecord {
        let Stat { ino, generation, kind, .. } = *stat;
        FileRecord { ino, generation, slot, placeholders, kind, leads_to: None }
    }

    /// The record of a symbolic link that is stored in this form; any other file's as it is.
    pub(crate) fn with_form(self, form: LinkForm) -> FileRecord {
        match form {
            LinkForm::Plain => self,
            LinkForm::Escaped => FileRecord { placeholders: ESCAPED, ..self },
            LinkForm::Referral(Referral { file, kind, depth, .. }) => FileRecord {
                placeholders: u32::from(kind_number(kind)) + 2,
                leads_to: Some((file, depth)),
                ..self
            },
        }
    }

    /// Whether it is a user's symbolic link that is stored with an escape.
    pub(crate) fn is_escaped(&self) -> bool {
        self.kind == FileKind::Symlink && self.placeholders == ESCAPED
    }

    /// Which file of another group it stands for, as file `id`; none for any other file.
    pub(crate) fn referral(&self, id: FileId) -> Option<Referral> {
        let (file, depth) = self.leads_to?;
        let kind = u8::try_from(self.placeholders.checked_sub(2)?).ok()?;
        Some(Referral { id, file, kind: numbered_kind(kind)?, depth })
    }

    /// Whether it stands in its directory for a directory that lies elsewhere.
    pub(crate) fn is_counted(&self, id: FileId) -> bool {
        let is_distributed = self.slot.is_some() && self.kind == FileKind::Directory;
        is_distributed
            || self.referral(id).is_some_and(|referral| referral.kind == FileKind::Directory)
    }

    fn encode(self) -> Vec<u8> {
        let mut bytes = vec![0; RECORD_BYTES];
        bytes[..8].copy_from_slice(&self.ino.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.generation.to_be_bytes());
        bytes[16..18].copy_from_slice(&self.slot.map_or(NO_SLOT, Slot::number).to_be_bytes());
        bytes[18..22].copy_from_slice(&self.placeholders.to_be_bytes());
        bytes[22] = kind_number(self.kind);
        if let Some((file, depth)) = self.leads_to {
            bytes.extend(file.0.to_be_bytes());
            bytes.push(depth);
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<FileRecord> {
        let (bytes, leads_to) = bytes.split_at_checked(RECORD_BYTES)?;
        let leads_to = match leads_to {
            [] => None,
            [file @ .., depth] => Some((FileId(u64::from_be_bytes(file.try_into().ok()?)), *depth)),
        };
        let slot = u16::from_be_bytes([bytes[16], bytes[17]]);
        Some(FileRecord {
            ino: u64::from_be_bytes(bytes[..8].try_into().ok()?),
            generation: u64::from_be_bytes(bytes[8..16].try_into().ok()?),
            slot: match slot {
                NO_SLOT => None,
                slot => Some(Slot::new(slot)?),
            },
            placeholders: u32::from_be_bytes(bytes[18..22].try_into().ok()?),
            kind: numbered_kind(bytes[22])?,
            leads_to,
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
    digests: BTreeMap<FileId, Option<ContentDigest>>,
}

/// What the database holds as of a checkpoint, whatever is written later.
pub(crate) struct WrittenTables {
    files: ReadOnlyTable<u64, &'static [u8]>,
    inodes: ReadOnlyTable<u64, u64>,
    names: ReadOnlyTable<&'static [u8], ()>,
    digests: ReadOnlyTable<u64, &'static [u8]>,
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
    /// It is of another version.
    pub(crate) is_other_version: bool,
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
        PoolIndexError { text: error.to_string(), is_damaged, is_other_version: false }
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
    /// Changes over several groups that wait for something.
    pub(crate) crossings: Crossings,
    /// Limits of users and directories.
    pub(crate) quotas: QuotaTable,
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

    /// What it has written of the group.
    pub(crate) fn into_group(self) -> GroupEntries {
        self.group
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
            work.open_table(CROSSINGS).map_err(PoolIndexError::of)?;
            work.open_table(DIGESTS).map_err(PoolIndexError::of)?;
            work.open_table(QUOTAS).map_err(PoolIndexError::of)?;
            let meta = work.open_table(META).map_err(PoolIndexError::of)?;
            let value =
                |name| Ok(meta.get(name).map_err(PoolIndexError::of)?.map(|value| value.value()));
            match (value("sequence")?, value("order")?, value("next")?) {
                (Some(sequence), Some(order), Some(next)) => {
                    if value("version")? != Some(VERSION) {
                        let text = "it is of another version";
                        return Err(PoolIndexError { is_other_version: true, ..damaged(text) });
                    }
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
        written.file(id)
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
        for place in written.places(id)? {
            all.entry(name_key(id, &place)).or_insert(true);
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
        state.now.files.len() + state.now.names.len() + state.now.digests.len()
    }

    /// Says what is known of a file.
    pub(crate) fn put_file(&self, id: FileId, record: FileRecord) {
        let mut state = self.state();
        state.now.files.insert(id, Some(record));
        state.now.inodes.insert(record.ino, Some(id));
    }

    /// A file is another inode from now on.
    pub(crate) fn replace_inode(
        &self,
        id: FileId,
        before: FileRecord,
        record: FileRecord,
    ) -> Result<(), PoolIndexError> {
        let was_its_own = self.by_inode(before.ino)? == Some(id);
        let mut state = self.state();
        if was_its_own {
            state.now.inodes.insert(before.ino, None);
        }
        state.now.files.insert(id, Some(record));
        state.now.inodes.insert(record.ino, Some(id));
        Ok(())
    }

    /// Forgets a file that is gone; `record` is what was known of it.
    pub(crate) fn remove_file(&self, id: FileId, record: FileRecord) -> Result<(), PoolIndexError> {
        // The inode may be another file's by now.
        let is_its_own = self.by_inode(record.ino)? == Some(id);
        self.forget_digest(id)?;
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

    /// The digest of a file's bytes, if it is known.
    pub(crate) fn digest(&self, id: FileId) -> Result<Option<ContentDigest>, PoolIndexError> {
        let written = {
            let state = self.state();
            let changed = state.layers().find_map(|layer| layer.digests.get(&id));
            if let Some(changed) = changed {
                return Ok(*changed);
            }
            state.written.clone()
        };
        let found = written.digests.get(id.0).map_err(PoolIndexError::of)?;
        let digest = found.map(|found| found.value().try_into());
        digest.transpose().map_err(|_| damaged(&format!("the digest of file {id} is damaged")))
    }

    /// Says what the digest of a file's bytes is.
    pub(crate) fn put_digest(&self, id: FileId, digest: ContentDigest) {
        self.state().now.digests.insert(id, Some(digest));
    }

    /// Forgets the digest of a file's bytes, if there is one.
    pub(crate) fn forget_digest(&self, id: FileId) -> Result<(), PoolIndexError> {
        if self.digest(id)?.is_some() {
            self.state().now.digests.insert(id, None);
        }
        Ok(())
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
            all.digests.append(&mut changed.digests);
            changed = all;
        }
        let changed = Arc::new(changed);
        state.writing = Some(changed.clone());
        FrozenEntries { changed, group, meta }
    }

    /// Writes a checkpoint, durably, and returns what the database holds by it. Blocks.
    pub(crate) fn write(
        &self,
        frozen: &FrozenEntries,
    ) -> Result<Arc<WrittenTables>, PoolIndexError> {
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
            let mut digests = work.open_table(DIGESTS).map_err(PoolIndexError::of)?;
            for (id, digest) in &frozen.changed.digests {
                match digest {
                    Some(digest) => digests.insert(id.0, &digest[..]),
                    None => digests.remove(id.0),
                }
                .map_err(PoolIndexError::of)?;
            }
            let GroupEntries { log, last, marks, remembered, calls: done, crossings, quotas } =
                &frozen.group;
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
            let mut kept = work.open_table(CROSSINGS).map_err(PoolIndexError::of)?;
            kept.retain(|_, _| false).map_err(PoolIndexError::of)?;
            for (number, record) in crossings.records().enumerate() {
                let record = minicbor::to_vec(&record).expect("a vector takes everything");
                kept.insert(number as u64, &record[..]).map_err(PoolIndexError::of)?;
            }
            let mut limits = work.open_table(QUOTAS).map_err(PoolIndexError::of)?;
            let table = minicbor::to_vec(quotas).expect("a vector takes everything");
            limits.insert(0, &table[..]).map_err(PoolIndexError::of)?;
            let mut meta = work.open_table(META).map_err(PoolIndexError::of)?;
            let IndexMeta { sequence, order, next } = frozen.meta;
            let (after, version) = (("after", log.after), ("version", VERSION));
            let stands = [("sequence", sequence), ("order", order), ("next", next)];
            for (name, value) in stands.into_iter().chain([after, version]) {
                meta.insert(name, value).map_err(PoolIndexError::of)?;
            }
        }
        work.commit().map_err(PoolIndexError::of)?;
        let written = Arc::new(snapshot(&self.database)?);
        let mut state = self.state();
        state.written = written.clone();
        state.writing = None;
        Ok(written)
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
        let crossings = read.open_table(CROSSINGS).map_err(PoolIndexError::of)?;
        for entry in crossings.iter().map_err(PoolIndexError::of)? {
            let (_, record) = entry.map_err(PoolIndexError::of)?;
            let record = minicbor::decode(record.value()).ok();
            let damaged = || damaged("a change over several groups is damaged");
            group.crossings.add(record.ok_or_else(damaged)?);
        }
        let limits = read.open_table(QUOTAS).map_err(PoolIndexError::of)?;
        if let Some(table) = limits.get(0).map_err(PoolIndexError::of)? {
            let table = minicbor::decode(table.value()).ok();
            group.quotas = table.ok_or_else(|| damaged("the limits are damaged"))?;
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

    /// The next files after one, in the order of their numbers, a few times `most` at most, and up to which number these are all that
    /// there are.
    pub(crate) fn files_after(
        &self,
        after: FileId,
        most: usize,
    ) -> Result<(FileId, Vec<(FileId, FileRecord)>), PoolIndexError> {
        let beyond = (Bound::Excluded(after), Bound::Unbounded);
        // Of each layer the first so many: what comes after the last of them all may be cut off.
        let mut last = FileId(u64::MAX);
        let mut all: BTreeMap<FileId, Option<FileRecord>> = BTreeMap::new();
        let written = {
            let state = self.state();
            let layers: Vec<_> = state.layers().collect();
            for layer in layers.into_iter().rev() {
                let next = layer.files.range(beyond).take(most);
                let next: Vec<_> = next.map(|(id, record)| (*id, *record)).collect();
                if next.len() == most {
                    last = last.min(next.last().map_or(last, |(id, _)| *id));
                }
                all.extend(next);
            }
            state.written.clone()
        };
        let next = written.files_after(after, most)?;
        if next.len() == most {
            last = last.min(next.last().map_or(last, |(id, _)| *id));
        }
        for (id, record) in next {
            all.entry(id).or_insert(Some(record));
        }
        let known = all.range(..=last);
        let found = known.filter_map(|(id, record)| Some((*id, (*record)?)));
        Ok((last, found.collect()))
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

impl WrittenTables {
    /// The next files after one, in the order of their numbers, at most so many.
    pub(crate) fn files_after(
        &self,
        after: FileId,
        most: usize,
    ) -> Result<Vec<(FileId, FileRecord)>, PoolIndexError> {
        let beyond = (Bound::Excluded(after.0), Bound::Unbounded);
        let entries = self.files.range::<u64>(beyond).map_err(PoolIndexError::of)?.take(most);
        let mut files = Vec::new();
        for entry in entries {
            let (id, record) = entry.map_err(PoolIndexError::of)?;
            let id = FileId(id.value());
            files.push((id, self.decoded(id, record.value())?));
        }
        Ok(files)
    }

    /// What was known of a file.
    pub(crate) fn file(&self, id: FileId) -> Result<Option<FileRecord>, PoolIndexError> {
        let found = self.files.get(id.0).map_err(PoolIndexError::of)?;
        found.map(|found| self.decoded(id, found.value())).transpose()
    }

    fn decoded(&self, id: FileId, record: &[u8]) -> Result<FileRecord, PoolIndexError> {
        let record = FileRecord::decode(record);
        record.ok_or_else(|| damaged(&format!("the record of file {id} is damaged")))
    }

    /// The names of a file, in the order of their directories' numbers.
    pub(crate) fn places(&self, id: FileId) -> Result<Vec<PoolPlace>, PoolIndexError> {
        let from = id.0.to_be_bytes();
        let until = id.0.checked_add(1).map(u64::to_be_bytes);
        let until = until.as_ref().map_or(Bound::Unbounded, |until| Bound::Excluded(&until[..]));
        let range = (Bound::Included(&from[..]), until);
        let mut places = Vec::new();
        for entry in self.names.range::<&[u8]>(range).map_err(PoolIndexError::of)? {
            let (key, _) = entry.map_err(PoolIndexError::of)?;
            places.extend(place_of(key.value()));
        }
        Ok(places)
    }
}

impl IndexState {
    /// The newest first.
    fn layers(&self) -> impl Iterator<Item = &PendingEntries> {
        std::iter::once(&self.now).chain(self.writing.as_deref())
    }
}

fn damaged(text: &str) -> PoolIndexError {
    PoolIndexError { text: text.to_owned(), is_damaged: true, is_other_version: false }
}

fn snapshot(database: &Database) -> Result<WrittenTables, PoolIndexError> {
    let read = database.begin_read().map_err(PoolIndexError::of)?;
    Ok(WrittenTables {
        files: read.open_table(FILES).map_err(PoolIndexError::of)?,
        inodes: read.open_table(INODES).map_err(PoolIndexError::of)?,
        names: read.open_table(NAMES).map_err(PoolIndexError::of)?,
        digests: read.open_table(DIGESTS).map_err(PoolIndexError::of)?,
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

#[cfg(test)]
mod tests {
    use super::*;

    const META_ALL: IndexMeta = IndexMeta { sequence: 3, order: 2, next: 9 };

    fn open(file: &std::fs::File) -> Result<(PoolIndex, Option<IndexMeta>), PoolIndexError> {
        PoolIndex::open(Arc::new(file.try_clone().unwrap()))
    }

    #[test]
    fn records_of_files_read_back() {
        for (kind, slot) in [
            (FileKind::Regular, None),
            (FileKind::Directory, Slot::new(0xfff)),
            (FileKind::Symlink, None),
            (FileKind::BlockDevice, None),
        ] {
            let leads_to = (kind == FileKind::Symlink).then_some((FileId(77), 3));
            let record =
                FileRecord { ino: 7, generation: u64::MAX, slot, placeholders: 1, kind, leads_to };
            assert_eq!(FileRecord::decode(&record.encode()), Some(record));
            assert_eq!(FileRecord::decode(&record.encode()[1..]), None);
        }
    }

    #[test]
    fn files_are_gone_through_in_pages_whatever_was_changed_since() {
        let file = tempfile::tempfile().unwrap();
        let (index, _) = open(&file).unwrap();
        let kind = FileKind::Regular;
        let record = |ino| FileRecord {
            ino,
            generation: 0,
            slot: None,
            placeholders: 0,
            kind,
            leads_to: None,
        };
        for id in (2..200).step_by(2) {
            index.put_file(FileId(id), record(id));
        }
        let written = index.write(&index.freeze(META_ALL, GroupEntries::default())).unwrap();
        for id in (3..100).step_by(3) {
            match id % 2 {
                0 => index.remove_file(FileId(id), record(id)).unwrap(),
                _ => index.put_file(FileId(id), record(id + 1000)),
            }
        }
        let _writing = index.freeze(META_ALL, GroupEntries::default());
        index.put_file(FileId(6), record(6));
        index.remove_file(FileId(9), record(1009)).unwrap();
        let expected = index.all_files().unwrap();
        for most in [1, 2, 7, 1000] {
            let (mut at, mut found) = (FileId(0), BTreeMap::new());
            while at != FileId(u64::MAX) {
                let (upto, page) = index.files_after(at, most).unwrap();
                assert!(upto > at && page.len() <= 3 * most);
                found.extend(page);
                at = upto;
            }
            assert_eq!(found, expected, "in pages of {most}");
        }
        let then = written.files_after(FileId(0), 1000).unwrap();
        assert_eq!(then.len(), 99, "as of the checkpoint");
        assert_eq!(written.file(FileId(9)).unwrap(), None);
    }

    #[test]
    fn an_index_of_another_version_is_refused() {
        let file = tempfile::tempfile().unwrap();
        let (index, meta) = open(&file).unwrap();
        assert_eq!(meta, None);
        index.write(&index.freeze(META_ALL, GroupEntries::default())).unwrap();
        drop(index);
        let (index, meta) = open(&file).unwrap();
        assert_eq!(meta, Some(META_ALL));
        let work = index.database.begin_write().unwrap();
        work.open_table(META).unwrap().remove("version").unwrap();
        work.commit().unwrap();
        drop(index);
        let refused = open(&file).map(|_| ()).unwrap_err();
        assert!(refused.is_damaged && refused.is_other_version);
    }
}
