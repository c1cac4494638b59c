//! Where files are, by inode number: what file handles need that last over restarts.
//!
//! A volume is read by names from its root; nothing in it leads from an inode number to a file. A
//! [`HandleTable`] has, for each number that a front end was given a handle of, the number of the
//! directory and the name there. A call with such a handle follows the directories up to the root,
//! looks the names down again, and compares the number that it finds. So an entry is a hint: one
//! that is missing or outdated makes a handle stale, and never leads to another file.
//!
//! The file is only appended to; all numbers are big-endian:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `ATHT`, 3 zero bytes, version 1 |
//! | 8 | … | records, one after another |
//!
//! | offset | bytes | field of a record |
//! |---|---|---|
//! | 0 | 4 | BLAKE3 of the rest of the record; its first bytes |
//! | 4 | 8 | number of the file |
//! | 12 | 8 | number of its directory |
//! | 20 | 1 | length of its name |
//! | 21 | … | its name there |
//!
//! Of several records of a file, the last one counts; the one before is its former place, for
//! renames that a crash undoes. A record is in the file (`write(2)`) when [`HandleTable::note`]
//! returns, and durable when the table is dropped or was written anew. What follows a record that
//! is not whole is cut off at opening.
//!
//! Invariants: at most `max_entries` entries; the file is written anew before it is longer than
//! twice what it needs and [`SLACK_BYTES`].

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use atoll_key::BlockHash;
use atoll_vfs::{Errno, InodeNumber, check_name};
use bytes::Bytes;
use rustix::fs::FlockOperation;

/// How often a number was used for another file before: volumes never use one again.
pub(crate) const GENERATION: u64 = 0;

const MAGIC: &[u8; 8] = b"ATHT\0\0\0\x01";
const CHECK_BYTES: usize = 4;
const RECORD_BYTES: usize = CHECK_BYTES + 8 + 8 + 1;

/// The most entries of a table. Each takes some 64 bytes of memory and its name.
const MAX_ENTRIES: usize = 1_000_000;

/// The file may be so much longer than twice what it needs. Guess.
const SLACK_BYTES: u64 = 1 << 20;

/// The most names on the way to a file. Guess: paths have 4,096 bytes.
const MAX_DEPTH: usize = 2048;

/// See the module. One table uses a file at a time.
pub struct HandleTable {
    state: Mutex<TableState>,
}

/// A name of a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Place {
    parent: u64,
    name: Box<[u8]>,
}

#[derive(Debug)]
struct TableEntry {
    place: Place,
    former: Option<Box<Place>>,
    /// When it was used last, by the table's own count; 0 if the file is gone.
    used: u64,
}

struct TableState {
    path: PathBuf,
    file: File,
    file_bytes: u64,
    /// Bytes of the records that a new file would have.
    needed_bytes: u64,
    /// The file is written anew when it is longer.
    rewrite_above: u64,
    /// A part of a record is at the file's end and could not be cut off.
    is_torn: bool,
    entries: BTreeMap<u64, TableEntry>,
    max_entries: usize,
    uses: u64,
}

impl HandleTable {
    /// Opens the table in the file at `path`, or makes one. This blocks for as long as it takes to
    /// read the file.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if another table uses the file; [`io::ErrorKind::InvalidData`]
    /// if the file is something else, or of a newer program.
    pub fn open(path: &Path) -> io::Result<HandleTable> {
        HandleTable::with_limit(path, MAX_ENTRIES)
    }

    /// Opens a table of at most `max_entries` entries, and at least one.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn with_limit(path: &Path, max_entries: usize) -> io::Result<HandleTable> {
        let file = locked(path)?;
        let mut state = TableState {
            path: path.to_path_buf(),
            file,
            file_bytes: 0,
            needed_bytes: 0,
            rewrite_above: SLACK_BYTES,
            is_torn: false,
            entries: BTreeMap::new(),
            max_entries: max_entries.max(1),
            uses: 0,
        };
        state.read()?;
        Ok(HandleTable { state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, TableState> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// How many files the table knows.
    pub fn len(&self) -> usize {
        self.state().entries.len()
    }

    /// Whether it knows none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the table knows file `number`.
    pub fn has(&self, number: u64) -> bool {
        self.state().entries.contains_key(&number)
    }

    /// Notes that file `number` is under `name` of directory `parent`. If that is news, it is in
    /// the file when this returns.
    ///
    /// # Errors
    /// Those of writing to the file; [`io::ErrorKind::InvalidInput`] for what is no name.
    pub fn note(&self, number: u64, parent: u64, name: &[u8]) -> io::Result<()> {
        self.state().note(number, parent, name)
    }

    /// Notes all names that lead to a file, each with its number and its directory's: without one of them the others lead nowhere.
    /// [`Errno::EIO`] if the file of the table does not take them.
    pub(crate) fn note_all(&self, names: Vec<(u64, u64, Bytes)>) -> Result<(), Errno> {
        for (number, parent, name) in names {
            self.note(number, parent, &name).map_err(|error| {
                tracing::warn!("a file handle cannot be kept: {self:?}: {error}");
                Errno::EIO
            })?;
        }
        Ok(())
    }

    /// Notes that file `number` is in use: others go first when there are too many.
    pub fn touch(&self, number: u64) {
        let mut state = self.state();
        state.uses += 1;
        let used = state.uses;
        if let Some(entry) = state.entries.get_mut(&number).filter(|entry| entry.used > 0) {
            entry.used = used;
        }
    }

    /// Notes that file `number` is gone: its entry is the first that goes.
    pub fn retire(&self, number: u64) {
        let mut state = self.state();
        if let Some(entry) = state.entries.get_mut(&number)
            && std::mem::replace(&mut entry.used, 0) > 0
        {
            let bytes = entry.record_bytes();
            state.needed_bytes -= bytes;
        }
    }

    /// The names that lead from the root to file `number`, each with the number of its file. Those
    /// of files in `outdated` are their former ones. `None` if the table has no such names.
    pub fn path(&self, number: u64, outdated: &BTreeSet<u64>) -> Option<Vec<(u64, Box<[u8]>)>> {
        let mut state = self.state();
        state.uses += 1;
        let used = state.uses;
        let mut names = Vec::new();
        let mut at = number;
        while at != InodeNumber::ROOT.0 {
            if names.len() == MAX_DEPTH {
                return None;
            }
            let entry = state.entries.get_mut(&at)?;
            if entry.used > 0 {
                entry.used = used;
            }
            let place = match outdated.contains(&at) {
                true => entry.former.as_deref()?,
                false => &entry.place,
            };
            names.push((at, place.name.clone()));
            at = place.parent;
        }
        names.reverse();
        Some(names)
    }
}

impl fmt::Debug for HandleTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandleTable({})", self.state().path.display())
    }
}

impl Drop for HandleTable {
    fn drop(&mut self) {
        // What a crash of the machine would take is looked up again.
        if let Ok(state) = self.state.get_mut() {
            let _ = state.file.sync_data();
        }
    }
}

/// The file at `path`, which is made if it is not there, and which nobody else has.
fn locked(path: &Path) -> io::Result<File> {
    loop {
        let mut options = OpenOptions::new();
        let file = options.read(true).append(true).create(true).mode(0o600).open(path)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        // The one who had it may have put another one in its place meanwhile.
        let (ours, now) = (file.metadata()?, std::fs::metadata(path)?);
        if (ours.dev(), ours.ino()) == (now.dev(), now.ino()) {
            return Ok(file);
        }
    }
}

impl TableState {
    /// Reads the file, and cuts off what is not whole.
    fn read(&mut self) -> io::Result<()> {
        let mut reader = BufReader::with_capacity(1 << 20, self.file.try_clone()?);
        let mut magic = [0; MAGIC.len()];
        match filled(&mut reader, &mut magic)? {
            true if magic != *MAGIC => {
                let why = "it is not a table of file handles that this program knows";
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            true => {}
            // It was being made.
            false => {
                self.file.set_len(0)?;
                self.file.write_all(MAGIC)?;
            }
        }
        self.file_bytes = MAGIC.len() as u64;
        while let Some((number, place)) = take_record(&mut reader)? {
            self.file_bytes += place.record_bytes();
            self.insert(number, place);
        }
        if self.file.metadata()?.len() > self.file_bytes {
            tracing::warn!("the end of {} was not written whole: cut off", self.path.display());
            self.file.set_len(self.file_bytes)?;
        }
        self.rewrite_above = self.needed_bytes * 2 + SLACK_BYTES;
        self.rewrite_if_long();
        Ok(())
    }

    fn note(&mut self, number: u64, parent: u64, name: &[u8]) -> io::Result<()> {
        if let Some(entry) = self.entries.get_mut(&number)
            && entry.used > 0
            && entry.place.parent == parent
            && *entry.place.name == *name
        {
            self.uses += 1;
            entry.used = self.uses;
            return Ok(());
        }
        if check_name(name).is_err() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let place = Place { parent, name: name.into() };
        self.append(&place.record(number))?;
        self.insert(number, place);
        self.rewrite_if_long();
        Ok(())
    }

    fn append(&mut self, record: &[u8]) -> io::Result<()> {
        if self.is_torn {
            self.rewrite()?;
        }
        if let Err(error) = self.file.write_all(record) {
            self.is_torn = self.file.set_len(self.file_bytes).is_err();
            return Err(error);
        }
        self.file_bytes += record.len() as u64;
        Ok(())
    }

    /// Takes a place that is in the file.
    fn insert(&mut self, number: u64, place: Place) {
        self.uses += 1;
        let mut entry = TableEntry { place, former: None, used: self.uses };
        if let Some(before) = self.entries.remove(&number) {
            if before.used > 0 {
                self.needed_bytes -= before.record_bytes();
            }
            entry.former = match before.place == entry.place {
                true => before.former,
                false => Some(Box::new(before.place)),
            };
        }
        self.needed_bytes += entry.record_bytes();
        self.entries.insert(number, entry);
        if self.entries.len() > self.max_entries {
            self.drop_oldest();
        }
    }

    /// Drops an eighth of the entries, those of files that are gone and the ones that were used
    /// least recently.
    fn drop_oldest(&mut self) {
        let mut uses: Vec<u64> = self.entries.values().map(|entry| entry.used).collect();
        let dropped = uses.len().div_ceil(8);
        let (_, oldest, _) = uses.select_nth_unstable(dropped - 1);
        let oldest = *oldest;
        self.entries.retain(|_, entry| entry.used > oldest);
        self.needed_bytes = self.entries.values().map(TableEntry::record_bytes).sum();
    }

    fn rewrite_if_long(&mut self) {
        if self.file_bytes <= self.rewrite_above {
            return;
        }
        if self.file_bytes <= self.needed_bytes * 2 + SLACK_BYTES {
            self.rewrite_above = self.needed_bytes * 2 + SLACK_BYTES;
        } else if let Err(error) = self.rewrite() {
            tracing::warn!("{} cannot be written anew: {error}", self.path.display());
            self.rewrite_above = self.file_bytes * 2;
        }
    }

    /// Writes a new file of what is needed, and puts it in place of the old one.
    fn rewrite(&mut self) -> io::Result<()> {
        let mut name = OsString::from(".new-");
        name.push(self.path.file_name().unwrap_or_default());
        let name = self.path.with_file_name(name);
        let _ = std::fs::remove_file(&name);
        let mut options = OpenOptions::new();
        let file = options.read(true).append(true).create_new(true).mode(0o600).open(&name)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        out.write_all(MAGIC)?;
        let mut kept: Vec<_> = self.entries.iter().filter(|(_, entry)| entry.used > 0).collect();
        kept.sort_unstable_by_key(|(_, entry)| entry.used);
        let mut bytes = MAGIC.len() as u64;
        for (number, entry) in kept {
            for place in entry.former.as_deref().into_iter().chain([&entry.place]) {
                out.write_all(&place.record(*number))?;
                bytes += place.record_bytes();
            }
        }
        let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_data()?;
        std::fs::rename(&name, &self.path)?;
        (self.file, self.file_bytes, self.is_torn) = (file, bytes, false);
        self.rewrite_above = self.needed_bytes * 2 + SLACK_BYTES;
        self.entries.retain(|_, entry| entry.used > 0);
        Ok(())
    }
}

impl TableEntry {
    fn record_bytes(&self) -> u64 {
        let former = self.former.as_ref().map_or(0, |former| former.record_bytes());
        self.place.record_bytes() + former
    }
}

impl Place {
    fn record_bytes(&self) -> u64 {
        (RECORD_BYTES + self.name.len()) as u64
    }

    fn record(&self, number: u64) -> Vec<u8> {
        let len = u8::try_from(self.name.len()).expect("the name was checked");
        let numbers = [number.to_be_bytes(), self.parent.to_be_bytes()].concat();
        let checked = [&numbers[..], &[len], &self.name].concat();
        [&check(&checked)[..], &checked].concat()
    }
}

fn check(bytes: &[u8]) -> [u8; CHECK_BYTES] {
    *BlockHash::of(bytes).0.first_chunk().expect("a hash has 32 bytes")
}

/// The next record; `None` at the end, and at one that is not whole.
fn take_record(reader: &mut impl Read) -> io::Result<Option<(u64, Place)>> {
    let mut bytes = [0; RECORD_BYTES + u8::MAX as usize];
    if !filled(reader, &mut bytes[..RECORD_BYTES])? {
        return Ok(None);
    }
    let end = RECORD_BYTES + usize::from(bytes[RECORD_BYTES - 1]);
    if !filled(reader, &mut bytes[RECORD_BYTES..end])? {
        return Ok(None);
    }
    let (found, checked) = bytes[..end].split_at(CHECK_BYTES);
    let name = &bytes[RECORD_BYTES..end];
    if found != check(checked) || check_name(name).is_err() {
        return Ok(None);
    }
    let word = |at: usize| u64::from_be_bytes(*checked[at..].first_chunk().expect("it has 17"));
    Ok(Some((word(0), Place { parent: word(8), name: name.into() })))
}

/// Fills `buffer`; false if there are too few bytes.
fn filled(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match reader.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path_of(table: &HandleTable, number: u64) -> Option<Vec<String>> {
        let names = table.path(number, &BTreeSet::new())?;
        Some(names.iter().map(|(_, name)| String::from_utf8_lossy(name).into_owned()).collect())
    }

    fn noted(path: &Path) -> HandleTable {
        let table = HandleTable::open(path).unwrap();
        table.note(10, 1, b"dir").unwrap();
        table.note(11, 10, b"file").unwrap();
        table.note(12, 1, b"other").unwrap();
        table
    }

    #[test]
    fn what_was_noted_is_there_after_reopening() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("handles");
        let table = noted(&path);
        table.note(12, 10, b"moved").unwrap();
        assert_eq!(HandleTable::open(&path).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(table);
        let table = HandleTable::open(&path).unwrap();
        assert_eq!(path_of(&table, 1), Some(vec![]));
        assert_eq!(path_of(&table, 11).unwrap(), ["dir", "file"]);
        assert_eq!(path_of(&table, 12).unwrap(), ["dir", "moved"]);
        let former = table.path(12, &BTreeSet::from([12])).unwrap();
        assert_eq!(former, [(12, b"other"[..].into())]);
        assert_eq!(table.path(11, &BTreeSet::from([11])), None);
        assert_eq!(path_of(&table, 13), None);
        let long = table.note(13, 1, &[b'x'; 256]).unwrap_err();
        assert_eq!(long.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(table.len(), 3);
    }

    #[test]
    fn a_cycle_and_a_missing_parent_lead_nowhere() {
        let place = tempfile::tempdir().unwrap();
        let table = HandleTable::open(&place.path().join("handles")).unwrap();
        table.note(10, 11, b"a").unwrap();
        table.note(11, 10, b"b").unwrap();
        table.note(12, 13, b"c").unwrap();
        table.note(14, 14, b"d").unwrap();
        for number in [10, 11, 12, 14] {
            assert_eq!(path_of(&table, number), None);
        }
    }

    #[test]
    fn a_file_in_use_outlives_others_in_a_full_table() {
        let place = tempfile::tempdir().unwrap();
        let table = HandleTable::with_limit(&place.path().join("handles"), 16).unwrap();
        table.note(10, 1, b"in use").unwrap();
        for number in 11..100 {
            table.touch(10);
            table.note(number, 1, format!("{number}").as_bytes()).unwrap();
        }
        assert_eq!(path_of(&table, 10).unwrap(), ["in use"]);
        assert_eq!(path_of(&table, 11), None);
        table.retire(10);
        table.touch(10);
        for number in 100..110 {
            table.note(number, 1, format!("{number}").as_bytes()).unwrap();
        }
        assert_eq!(path_of(&table, 10), None, "what is gone is not in use");
    }

    #[test]
    fn a_torn_end_is_cut_off_and_what_is_before_it_stays() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("handles");
        drop(noted(&path));
        let whole = std::fs::read(&path).unwrap();
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            let table = HandleTable::open(&path).unwrap();

            let first = "dir".len() + RECORD_BYTES;
            let second = first + "file".len() + RECORD_BYTES;
            let expected = [first, second].into_iter().filter(|end| MAGIC.len() + end <= len);
            assert_eq!(table.len(), expected.count(), "{len} bytes");
            table.note(99, 1, b"later").unwrap();
            drop(table);
            let table = HandleTable::open(&path).unwrap();
            assert_eq!(path_of(&table, 99).unwrap(), ["later"], "{len} bytes");
        }
    }

    #[test]
    fn a_flipped_bit_leaves_what_is_before_it() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("handles");
        drop(noted(&path));
        let whole = std::fs::read(&path).unwrap();
        for bit in 0..whole.len() * 8 {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, &bytes).unwrap();
            let table = match HandleTable::open(&path) {
                Ok(table) => table,
                Err(error) => {
                    assert!(bit / 8 < MAGIC.len(), "bit {bit}: {error}");
                    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
                    assert_eq!(std::fs::read(&path).unwrap(), bytes, "it is not changed");
                    continue;
                }
            };
            let ends = [24, 49, 75].map(|end: usize| MAGIC.len() + end);
            let left = ends.into_iter().filter(|end| *end <= bit / 8).count();
            assert_eq!(table.len(), left, "bit {bit}");
            assert_eq!(path_of(&table, 11).is_some(), left > 1, "bit {bit}");
        }
    }

    #[test]
    fn renames_to_and_fro_do_not_make_the_file_long() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("handles");
        let table = noted(&path);
        let name = |turn: u32| format!("{turn:0>200}");
        for turn in 0..20_000 {
            table.note(12, 1, name(turn % 7).as_bytes()).unwrap();
        }
        let bytes = std::fs::metadata(&path).unwrap().len();
        assert!(bytes < 2 * SLACK_BYTES, "{bytes} bytes");
        drop(table);
        let table = HandleTable::open(&path).unwrap();
        assert_eq!(path_of(&table, 12).unwrap(), [name(19_999 % 7)]);
        let former = table.path(12, &BTreeSet::from([12])).unwrap();
        assert_eq!(*former[0].1, *name(19_998 % 7).as_bytes());
        assert_eq!(path_of(&table, 11).unwrap(), ["dir", "file"]);
    }

    #[test]
    fn files_that_are_gone_leave_the_file_when_it_is_written_anew() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("handles");
        let table = noted(&path);
        let name = "x".repeat(250);
        for number in 100..10_000 {
            table.note(number, 1, name.as_bytes()).unwrap();
            table.retire(number);
        }
        assert!(std::fs::metadata(&path).unwrap().len() < 2 * SLACK_BYTES);
        assert!(table.len() < 9_000, "{}", table.len());
        // Back again.
        table.retire(11);
        table.note(11, 10, b"file").unwrap();
        drop(table);
        let table = HandleTable::open(&path).unwrap();
        assert_eq!(path_of(&table, 11).unwrap(), ["dir", "file"]);
    }

    #[test]
    fn a_full_table_drops_what_was_not_used_longest() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("handles");
        let table = HandleTable::with_limit(&path, 80).unwrap();
        table.note(2, 1, b"dir").unwrap();
        table.note(3, 2, b"used").unwrap();
        table.note(4, 2, b"not used").unwrap();
        for number in 100..1000 {
            table.note(number, 1, number.to_string().as_bytes()).unwrap();
            if number % 2 == 1 {
                table.retire(number);
            }
            assert_eq!(path_of(&table, 3).unwrap(), ["dir", "used"]);
            assert!(table.len() <= 80);
        }
        assert!(!table.has(4));
        assert!(table.has(998) && table.has(990));
        drop(table);
        let table = HandleTable::with_limit(&path, 8).unwrap();
        assert!((1..=8).contains(&table.len()), "{}", table.len());
    }

    #[test]
    fn any_bytes_are_read_without_panic() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("handles");
        proptest::proptest!(|(bytes: Vec<u8>)| {
            std::fs::write(&path, [&MAGIC[..], &bytes].concat()).unwrap();
            let table = HandleTable::open(&path).unwrap();
            proptest::prop_assert!(table.len() <= bytes.len() / RECORD_BYTES);
        });
    }
}
