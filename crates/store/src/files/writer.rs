//! The one writer of a `FileStore`: files first, then the catalogue, sometimes the index.
//!
//! Order of things, and why a crash at any point is harmless:
//!
//! 1. A block's file is written. The catalogue does not know it: it is a stray file.
//! 2. The catalogue takes it. Reads see it.
//! 3. Sometimes the index is committed.
//! 4. A file is removed only after the catalogue has forgotten it.
//!
//! What the last commit of the index lacks is forgotten with the process: new files are strays
//! then, of which the next sweep makes blocks again, and entries of removed files are lost
//! replicas.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use atoll_key::{BlockKind, Key, MAX_BLOCK_BYTES};
use bytes::Bytes;

use super::place::{Failure, Place};
use crate::disk;
use crate::engine::committer::Committer;
use crate::engine::entry::IndexEntry;
use crate::engine::threads::{self, Writer as _};
use crate::{BlockInfo, Owner, StoreError, StoredBlock};

pub(crate) struct Writer {
    pub(crate) place: Arc<Place>,
    committer: Committer,
    next_sequence: u64,
}

/// How many files that belonged to no block were adopted and removed.
#[derive(Clone, Copy, Default)]
pub(crate) struct Swept {
    pub(crate) adopted: u64,
    pub(crate) removed: u64,
}

/// The change to one key.
struct Planned {
    entry: IndexEntry,
    /// The bytes to write, if they are new.
    bytes: Option<Bytes>,
}

impl Writer {
    pub(crate) fn new(place: Arc<Place>, committer: Committer, next_sequence: u64) -> Writer {
        Writer { place, committer, next_sequence }
    }

    /// Keeps a batch, all or nothing.
    pub(crate) fn put(&mut self, batch: Vec<StoredBlock>) -> Result<(), StoreError> {
        self.committer.check_backlog(&self.place.shared)?;
        let mut planned: BTreeMap<Key, Planned> = BTreeMap::new();
        for block in batch {
            let key = block.info.key;
            let held = match planned.get(&key) {
                Some(planned) => Some(planned.entry),
                None => self.place.lookup(&key)?.filter(|held| self.is_there(&key, held)),
            };
            let before = planned.remove(&key).and_then(|planned| planned.bytes);
            if let Some(mut change) = self.plan(held, block)? {
                change.bytes = change.bytes.or(before);
                planned.insert(key, change);
            } else if let (Some(entry), Some(bytes)) = (held, before) {
                planned.insert(key, Planned { entry, bytes: Some(bytes) });
            }
        }
        self.check_room(&planned)?;
        self.write_files(&planned)?;
        self.take(&planned)
    }

    /// Whether a block's file is there: a block is not kept by a file that has vanished. One that
    /// cannot be looked at now is believed to be.
    fn is_there(&self, key: &Key, held: &IndexEntry) -> bool {
        !matches!(self.place.probe(key, held), Err(Failure::Lost))
    }

    /// What keeping `block` changes, if anything; see [`crate::BlockStore::put`].
    fn plan(
        &mut self,
        held: Option<IndexEntry>,
        block: StoredBlock,
    ) -> Result<Option<Planned>, StoreError> {
        let StoredBlock { info, bytes } = block;
        let len = bytes.len();
        if len > MAX_BLOCK_BYTES {
            return Err(StoreError::Io(format!("block {} of {len} bytes is too long", info.key)));
        }
        let lease = held.map_or(0, |held| held.expires_unix_secs);
        let expires_unix_secs = info.expires_unix_secs.max(lease);
        if let Some(held) = held.filter(|held| !info.kind.replaces(info.version, held.version)) {
            let entry = held.extended(expires_unix_secs, info.owner);
            return Ok((expires_unix_secs > lease).then_some(Planned { entry, bytes: None }));
        }
        self.next_sequence += 1;
        let entry = IndexEntry {
            segment: 0,
            offset: crc32fast::hash(&bytes),
            len_bytes: u32::try_from(len).expect("at most MAX_BLOCK_BYTES"),
            kind: info.kind,
            version: info.version,
            expires_unix_secs,
            sequence: self.next_sequence,
            owner: info.owner,
        };
        Ok(Some(Planned { entry, bytes: Some(bytes) }))
    }

    fn check_room(&self, planned: &BTreeMap<Key, Planned>) -> Result<(), StoreError> {
        let unit_bytes = self.place.unit_bytes();
        let on_disk = |entry: &IndexEntry| u64::from(entry.len_bytes).next_multiple_of(unit_bytes);
        let (mut need_bytes, mut freed_bytes) = (0, 0);
        for (key, change) in planned.iter().filter(|(_, change)| change.bytes.is_some()) {
            need_bytes += on_disk(&change.entry);
            // The file of the version before is removed.
            freed_bytes += self.place.lookup(key)?.as_ref().map_or(0, on_disk);
        }
        let usage = self.place.usage();
        if need_bytes > freed_bytes
            && usage.disk_bytes + need_bytes - freed_bytes > usage.capacity_bytes
        {
            let (used_bytes, capacity_bytes) = (usage.disk_bytes, usage.capacity_bytes);
            return Err(StoreError::Full { used_bytes, capacity_bytes });
        }
        Ok(())
    }

    /// The error for a batch that the file system has no space for: it is full before the store.
    fn disk_full(&self) -> StoreError {
        let used_bytes = self.place.usage().disk_bytes;
        StoreError::Full { used_bytes, capacity_bytes: used_bytes }
    }

    fn write_files(&self, planned: &BTreeMap<Key, Planned>) -> Result<(), StoreError> {
        let dir = &self.place.dir;
        let mut written = Vec::new();
        for (key, change) in planned {
            let Some(bytes) = &change.bytes else { continue };
            let wrote = dir.write(key, change.entry.version, bytes);
            if let Err(error) = wrote {
                for (key, version) in written {
                    let _ = dir.remove(key, version);
                }
                return Err(match error {
                    error if disk::is_full(&error) => self.disk_full(),
                    _ if self.place.look().is_err() => self.place.away(),
                    error => {
                        let why = format!("cannot write a block's file: {error}");
                        self.place.shared.note_failure(&why);
                        StoreError::Io(error.to_string())
                    }
                });
            }
            written.push((key, change.entry.version));
        }
        if !written.is_empty() {
            self.place.shared.note_success();
        }
        Ok(())
    }

    /// Takes the planned changes, whose files are written, into the catalogue.
    fn take(&mut self, planned: &BTreeMap<Key, Planned>) -> Result<(), StoreError> {
        let keys: Vec<Key> = planned.keys().copied().collect();
        let mut replaced = Vec::new();
        let catalog = &self.place.shared.catalog;
        catalog.set_next_sequence(self.next_sequence + 1);
        catalog.update(&keys, |i, held| {
            let Planned { entry, bytes } = &planned[&keys[i]];
            match (bytes, held) {
                // It was lost, or removed, since it was planned.
                (None, None) => None,
                // It may have been renewed since.
                (None, Some(held)) => {
                    Some(Some(held.extended(entry.expires_unix_secs, entry.owner)))
                        .filter(|_| held.expires_unix_secs < entry.expires_unix_secs)
                }
                (Some(_), held) => {
                    replaced.extend(held.map(|held| (keys[i], held.version)));
                    let leased = held.map_or(*entry, |held| entry.leased_as(&held));
                    Some(Some(IndexEntry { owner: entry.owner, ..leased }))
                }
            }
        })?;
        for change in planned.values() {
            self.place.shared.note_lease(change.entry.expires_unix_secs);
        }
        for (key, version) in replaced {
            if planned[&key].entry.version != version {
                self.remove_file(&key, version);
            }
        }
        Ok(())
    }

    /// Forgets blocks: those that are still the ones of these sequence numbers, or whichever
    /// they are now (`None`). Returns those forgotten.
    pub(crate) fn forget(&mut self, keys: &[(Key, Option<u64>)]) -> Result<Vec<Key>, StoreError> {
        self.forget_if(keys, |_| true)
    }

    /// Forgets those of `keys` whose leases have ended; returns how many.
    pub(crate) fn forget_expired(
        &mut self,
        keys: &[Key],
        now_unix_secs: u64,
    ) -> Result<u64, StoreError> {
        let keys: Vec<_> = keys.iter().map(|key| (*key, None)).collect();
        let place = self.place.clone();
        let gone = self.forget_if(&keys, |held| {
            let is_expired = held.expires_unix_secs < now_unix_secs;
            if !is_expired {
                // Renewed since it was listed.
                place.shared.note_lease(held.expires_unix_secs);
            }
            is_expired
        })?;
        Ok(gone.len() as u64)
    }

    fn forget_if(
        &mut self,
        keys: &[(Key, Option<u64>)],
        may_go: impl Fn(&IndexEntry) -> bool,
    ) -> Result<Vec<Key>, StoreError> {
        let only: Vec<Key> = keys.iter().map(|(key, _)| *key).collect();
        let mut gone: BTreeMap<Key, u64> = BTreeMap::new();
        self.place.shared.catalog.update(&only, |i, held| {
            let held = held?;
            if keys[i].1.is_some_and(|sequence| sequence != held.sequence) || !may_go(&held) {
                return None;
            }
            gone.insert(only[i], held.version);
            Some(None)
        })?;
        for (key, version) in &gone {
            self.remove_file(key, *version);
        }
        Ok(gone.into_keys().collect())
    }

    fn remove_file(&self, key: &Key, version: u64) {
        if let Err(error) = self.place.dir.remove(key, version) {
            tracing::debug!(%key, %error, "a block's file stays until the next sweep");
        }
    }

    /// Looks at the files of one directory that belong to no block held. Those that are what
    /// their names say become blocks again, with a lease until `expires_unix_secs`, or stay as
    /// they are where none can be given yet; the others are removed.
    pub(crate) fn sweep(
        &mut self,
        number: u32,
        expires_unix_secs: Option<u64>,
    ) -> Result<Swept, StoreError> {
        let io = |error: io::Error| StoreError::Io(error.to_string());
        let mut swept = Swept::default();
        for (key, version) in self.place.dir.names(number).map_err(io)? {
            let held = self.place.lookup(&key)?;
            if held.is_some_and(|held| held.version == version) {
                continue;
            }
            let is_superseded = held.is_some_and(|h| !h.kind.supersedes(version, h.version));
            match if is_superseded { Ok(None) } else { self.recognize(key, version) } {
                Err(error) => tracing::debug!(%key, %error, "a file without entry is not read"),
                Ok(None) => {
                    self.remove_file(&key, version);
                    swept.removed += 1;
                }
                Ok(Some(block)) => {
                    let Some(expires_unix_secs) = expires_unix_secs else { continue };
                    self.adopt(held, block, expires_unix_secs)?;
                    swept.adopted += 1;
                }
            }
        }
        Ok(swept)
    }

    /// The block in the file of this name, if it is one: the index alone knew its checksum, but
    /// a key says what its bytes are.
    fn recognize(&self, key: Key, version: u64) -> io::Result<Option<StoredBlock>> {
        let bytes = self.place.dir.contents(&key, version)?;
        let is_it = |kind: &&BlockKind| kind.verify(&key, &bytes) == Ok(version);
        Ok(BlockKind::ALL.iter().find(is_it).map(|&kind| {
            let len_bytes = u32::try_from(bytes.len()).expect("at most MAX_BLOCK_BYTES");
            let owner = Owner::NOBODY;
            let info = BlockInfo { key, kind, version, expires_unix_secs: 0, len_bytes, owner };
            StoredBlock { info, bytes: bytes.into() }
        }))
    }

    /// Takes a block whose file is there already.
    fn adopt(
        &mut self,
        held: Option<IndexEntry>,
        mut block: StoredBlock,
        expires_unix_secs: u64,
    ) -> Result<(), StoreError> {
        self.committer.check_backlog(&self.place.shared)?;
        block.info.expires_unix_secs = expires_unix_secs;
        let key = block.info.key;
        let planned = self.plan(held, block)?;
        self.take(&planned.map(|planned| (key, planned)).into_iter().collect())
    }

    /// Makes durable what has been written, then the index. Of a directory that is away,
    /// nothing is to be written.
    pub(crate) fn flush(&mut self) -> Result<(), StoreError> {
        if let Err(error) = self.place.dir.sync()
            && self.place.look().is_ok()
        {
            return Err(StoreError::Io(error.to_string()));
        }
        self.commit_all()
    }
}

impl threads::Writer for Writer {
    fn begin_group(&mut self) {
        self.committer.reopen_if_failed(&self.place.shared);
    }

    fn end_group(&mut self) {
        if self.place.shared.catalog.uncommitted() >= self.place.shared.config.commit_entries {
            let _ = self.commit_all();
        }
    }

    fn has_uncommitted(&self) -> bool {
        self.place.shared.catalog.uncommitted() > 0
    }

    fn commit_all(&mut self) -> Result<(), StoreError> {
        self.committer.commit(&self.place.shared)?;
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.has_uncommitted() {
            let _ = self.commit_all();
        }
    }
}
