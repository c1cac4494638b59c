//! The block layer's journal (`atoll_dht::journal`) in a node's directory: `ring/journal-0` and
//! `ring/journal-1`, of which each new generation takes the place of the older one.
//!
//! Records are written, and never synced: what was written survives the process, not the machine.
//! So each file names the boot of the machine in which it was written, and counts in no other.
//!
//! A file:
//!
//! | bytes | |
//! |---|---|
//! | 4 | `ATJL` |
//! | 4 | layout, 1 |
//! | 16 | boot ID (`/proc/sys/kernel/random/boot_id`) |
//! | 8 | number of the generation; 0 for the first |
//! | 8 | BLAKE3 of the bytes above, cut |
//!
//! and then records, each of 4 bytes length, 4 bytes checksum of these, 8 bytes checksum of the record's bytes, and these.
//! A checksum is BLAKE3, cut, of the generation's number, the record's offset and what it is of. Numbers are
//! big-endian.
//!
//! Only the last record of the last generation may be cut short, by the death of the process that wrote it.
//! Whatever else is not as it should be makes all of it void. A file appears with its first record, under its name
//! or not at all.
//!
//! One thread writes. When that fails, both files are removed, so that the next incarnation recovers nothing.
//!
//! It does not know what the records mean.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use atoll_dht::journal::{Journal, MAX_JOURNAL_RECORD_BYTES};
use atoll_env::{BoxFuture, Instant};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::watch;

use crate::dir::create_private_file;

const MAGIC: [u8; 4] = *b"ATJL";
const LAYOUT: u32 = 1;
const HEAD_BYTES: usize = 40;
const RECORD_HEAD_BYTES: usize = 16;
/// A generation that is longer is given up, with all of the journal. A guess: a hundred thousand records a second.
const MAX_GENERATION_BYTES: u64 = 256 << 20;

/// See the module.
pub(crate) struct DirJournal {
    recovered: Mutex<Option<Vec<Vec<u8>>>>,
    state: Mutex<Appending>,
    written: watch::Receiver<Written>,
    writer: Option<JoinHandle<()>>,
}

/// What is appended to.
struct Appending {
    /// `None`: the journal is closed.
    to: Option<Sender<Command>>,
    /// How many commands were sent.
    count: u64,
}

enum Command {
    Append(Vec<u8>),
    BeginGeneration,
}

#[derive(Clone, Default)]
struct Written {
    /// How many commands were done.
    count: u64,
    /// Why the files may be there without all that was appended.
    failure: Option<String>,
}

impl DirJournal {
    /// The journal in a directory, as earlier incarnations of this boot have left it. Waits for the disk.
    ///
    /// # Errors
    /// If its thread cannot be started.
    pub(crate) fn open(dir: &Path) -> io::Result<DirJournal> {
        DirJournal::of_boot(dir, boot_id())
    }

    fn of_boot(dir: &Path, boot: Option<[u8; 16]>) -> io::Result<DirJournal> {
        let (tell, written) = watch::channel(Written::default());
        let (to, commands) = channel();
        let (recovered, end) = match boot.and_then(|boot| recover(dir, &boot)) {
            Some((records, end)) => (Some(records), Some(end)),
            None => (None, None),
        };
        let writer =
            Writer { dir: dir.to_owned(), boot, place: Place::Nowhere, is_in_doubt: false };
        let writer = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || writer.goes_on(end).run(&commands, &tell))?;
        Ok(DirJournal {
            recovered: Mutex::new(recovered),
            state: Mutex::new(Appending { to: Some(to), count: 0 }),
            written,
            writer: Some(writer),
        })
    }

    fn state(&self) -> MutexGuard<'_, Appending> {
        self.state.lock().expect("no holder of this lock panics")
    }

    fn send(&self, command: Command) {
        let mut state = self.state();
        state.count += 1;
        // The writer runs for as long as this sender exists.
        let _ = state.to.as_ref().map(|to| to.send(command));
    }
}

impl Drop for DirJournal {
    /// Returns when all is written: a next incarnation may open the files.
    fn drop(&mut self) {
        self.state().to = None;
        let _ = self.writer.take().map(JoinHandle::join);
    }
}

impl Journal for DirJournal {
    /// Time since the machine started, also while it slept.
    fn now(&self) -> Instant {
        let since = clock_gettime(ClockId::Boottime);
        let since = Duration::try_from(since).unwrap_or_default();
        Instant(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
    }

    fn recover(&self) -> Option<Vec<Vec<u8>>> {
        self.recovered.lock().expect("no holder of this lock panics").take()
    }

    fn append(&self, record: Vec<u8>) {
        self.send(Command::Append(record));
    }

    fn begin_generation(&self) {
        self.send(Command::BeginGeneration);
    }

    fn written(&self) -> BoxFuture<'static, Result<(), String>> {
        let (count, mut written) = (self.state().count, self.written.clone());
        Box::pin(async move {
            let done = written.wait_for(|done| done.count >= count).await;
            let done = done.map_err(|_| "the journal's thread has ended".to_owned())?;
            done.failure.clone().map_or(Ok(()), Err)
        })
    }
}

/// Which start of the machine this is.
fn boot_id() -> Option<[u8; 16]> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = text.trim().chars().filter(|digit| *digit != '-').collect();
    let number = u128::from_str_radix(&digits, 16).ok()?;
    Some(number.to_be_bytes())
}

fn path(dir: &Path, generation: u64) -> PathBuf {
    dir.join(if generation.is_multiple_of(2) { "journal-0" } else { "journal-1" })
}

fn head(boot: &[u8; 16], generation: u64) -> Vec<u8> {
    let mut head = MAGIC.to_vec();
    head.extend_from_slice(&LAYOUT.to_be_bytes());
    head.extend_from_slice(boot);
    head.extend_from_slice(&generation.to_be_bytes());
    let sum = blake3::hash(&head);
    head.extend_from_slice(&sum.as_bytes()[..8]);
    head
}

/// The checksum of bytes that belong to the record at this offset of a generation.
fn checksum(generation: u64, offset: usize, bytes: &[u8]) -> [u8; 8] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&generation.to_be_bytes()).update(&(offset as u64).to_be_bytes()).update(bytes);
    *hasher.finalize().as_bytes().first_chunk().expect("32 bytes")
}

/// Appends a record to what will stand in a generation from its beginning, or from `before` bytes on.
fn frame(bytes: &mut Vec<u8>, generation: u64, before: u64, record: &[u8]) {
    let offset = usize::try_from(before).expect("files are short") + bytes.len();
    let len = u32::try_from(record.len()).expect("records are short");
    let len = len.to_be_bytes();
    bytes.extend_from_slice(&len);
    bytes.extend_from_slice(&checksum(generation, offset, &len)[..4]);
    bytes.extend_from_slice(&checksum(generation, offset, record));
    bytes.extend_from_slice(record);
}

/// A file of the journal, read.
struct Generation {
    number: u64,
    records: Vec<Vec<u8>>,
    /// Bytes of all that is whole.
    whole_bytes: u64,
    is_cut: bool,
}

impl Generation {
    fn parse(bytes: &[u8], boot: &[u8; 16]) -> Option<Generation> {
        let (read, mut rest) = bytes.split_at_checked(HEAD_BYTES)?;
        let number = u64::from_be_bytes(*read[24..].first_chunk()?);
        if read != head(boot, number) {
            return None;
        }
        let mut records = Vec::new();
        let whole = |rest: &[u8]| bytes.len() - rest.len();
        while let Some((record_head, after)) = rest.split_at_checked(RECORD_HEAD_BYTES) {
            let (offset, len) = (whole(rest), record_head.first_chunk::<4>()?);
            if record_head[4..8] != checksum(number, offset, len)[..4] {
                return None;
            }
            let len = u32::from_be_bytes(*len) as usize;
            if len > MAX_JOURNAL_RECORD_BYTES {
                return None;
            }
            let Some((record, after)) = after.split_at_checked(len) else { break };
            if record_head[8..] != checksum(number, offset, record) {
                return None;
            }
            records.push(record.to_vec());
            rest = after;
        }
        let whole_bytes = whole(rest) as u64;
        Some(Generation { number, records, whole_bytes, is_cut: !rest.is_empty() })
    }
}

/// Where a journal that was recovered goes on.
struct End {
    generation: u64,
    whole_bytes: u64,
}

/// The records that are there, and where they end; `None` if some may be missing.
fn recover(dir: &Path, boot: &[u8; 16]) -> Option<(Vec<Vec<u8>>, End)> {
    let read = |number| -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        let file = match File::open(path(dir, number)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        file.take(MAX_GENERATION_BYTES + 1).read_to_end(&mut bytes)?;
        Ok((bytes.len() as u64 <= MAX_GENERATION_BYTES).then_some(bytes))
    };
    let mut generations = Vec::new();
    for number in [0, 1] {
        if let Some(bytes) = read(number).ok()? {
            let generation = Generation::parse(&bytes, boot)?;
            if generation.number % 2 != number || generation.records.is_empty() {
                return None;
            }
            generations.push(generation);
        }
    }
    generations.sort_by_key(|generation| generation.number);
    let is_whole = match &generations[..] {
        [first] => first.number == 0,
        [before, last] => before.number + 1 == last.number && !before.is_cut,
        _ => false,
    };
    let last = generations.last().filter(|_| is_whole)?;
    let end = End { generation: last.number, whole_bytes: last.whole_bytes };
    Some((generations.into_iter().flat_map(|generation| generation.records).collect(), end))
}

/// The thread that writes.
struct Writer {
    dir: PathBuf,
    boot: Option<[u8; 16]>,
    place: Place,
    /// Whether files may be there that lack something.
    is_in_doubt: bool,
}

/// Where the next record goes.
enum Place {
    /// Nothing is there: it begins the journal.
    Nowhere,
    /// Into a file, at its end.
    File { file: File, generation: u64, len: u64 },
    /// It begins the generation of this number.
    New(u64),
    /// Nowhere: the files were removed.
    Off,
}

impl Writer {
    /// Goes on where a journal was recovered.
    fn goes_on(mut self, end: Option<End>) -> Writer {
        if let Some(End { generation, whole_bytes: len }) = end {
            let file = OpenOptions::new().write(true).open(path(&self.dir, generation));
            // What was cut short was not answered.
            let opened = file.and_then(|mut file| {
                file.set_len(len)?;
                file.seek(SeekFrom::Start(len))?;
                Ok(file)
            });
            match opened {
                Ok(file) => self.place = Place::File { file, generation, len },
                // The next incarnation would find what this one does not go on from.
                Err(error) => self.give_up(&error),
            }
        }
        self
    }

    fn run(mut self, commands: &Receiver<Command>, tell: &watch::Sender<Written>) {
        let mut count = 0;
        while let Ok(first) = commands.recv() {
            let mut bytes = Vec::new();
            let mut done = Ok(());
            for command in std::iter::once(first).chain(commands.try_iter()) {
                count += 1;
                done = done.and_then(|()| self.take(command, &mut bytes));
            }
            let done = done.and_then(|()| self.write(&mut bytes));
            if let Err(error) = done {
                self.give_up(&error);
            }
            self.is_in_doubt = self.is_in_doubt && remove_all(&self.dir).is_err();
            let failure = self.is_in_doubt.then(|| "the journal cannot be written".to_owned());
            tell.send_modify(|written| *written = Written { count, failure });
        }
    }

    /// Does what is asked, or prepares the `bytes` that are to be written next.
    fn take(&mut self, command: Command, bytes: &mut Vec<u8>) -> io::Result<()> {
        let record = match command {
            Command::Append(record) => record,
            Command::BeginGeneration => {
                self.write(bytes)?;
                if let Place::File { generation, .. } = self.place {
                    self.place = Place::New(generation + 1);
                }
                return Ok(());
            }
        };
        if record.len() > MAX_JOURNAL_RECORD_BYTES {
            return Err(io::Error::other("a record is too long"));
        }
        let (generation, before) = match &self.place {
            Place::Off => return Ok(()),
            Place::File { generation, len, .. } => (*generation, *len),
            Place::New(generation) => (*generation, 0),
            Place::Nowhere => (0, 0),
        };
        if before == 0 && bytes.is_empty() {
            let Some(boot) = &self.boot else {
                return Err(io::Error::other("the system does not say which boot this is"));
            };
            *bytes = head(boot, generation);
        }
        frame(bytes, generation, before, &record);
        Ok(())
    }

    /// Writes what was prepared.
    fn write(&mut self, bytes: &mut Vec<u8>) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let bytes = std::mem::take(bytes);
        let (file, generation, len) = match &mut self.place {
            Place::Off => return Ok(()),
            Place::File { file, len, .. } => {
                file.write_all(&bytes)?;
                *len += bytes.len() as u64;
                return match *len > MAX_GENERATION_BYTES {
                    true => Err(io::Error::other("a generation is too long")),
                    false => Ok(()),
                };
            }
            Place::New(generation) => {
                (begin(&self.dir, *generation, &bytes)?, *generation, bytes.len())
            }
            Place::Nowhere => {
                remove_all(&self.dir)?;
                (begin(&self.dir, 0, &bytes)?, 0, bytes.len())
            }
        };
        self.place = Place::File { file, generation, len: len as u64 };
        Ok(())
    }

    /// Has the next incarnation recover nothing.
    fn give_up(&mut self, error: &io::Error) {
        let was_off = matches!(self.place, Place::Off);
        self.place = Place::Off;
        self.is_in_doubt = remove_all(&self.dir).is_err();
        if !was_off {
            tracing::error!(%error, "locks will wait after a restart: the journal is given up");
        }
    }
}

/// A new file in the place of the older one, with these bytes.
fn begin(dir: &Path, generation: u64, bytes: &[u8]) -> io::Result<File> {
    let beside = dir.join("journal.new");
    let mut file = create_private_file(&beside)?;
    file.write_all(bytes)?;
    fs::rename(&beside, path(dir, generation))?;
    Ok(file)
}

fn remove_all(dir: &Path) -> io::Result<()> {
    for path in [path(dir, 0), path(dir, 1), dir.join("journal.new")] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOOT: [u8; 16] = [7; 16];

    fn open(dir: &Path) -> DirJournal {
        DirJournal::of_boot(dir, Some(BOOT)).expect("a thread")
    }

    fn record(n: u8) -> Vec<u8> {
        vec![n; usize::from(n)]
    }

    /// What is recovered in this directory now, as numbers of records.
    fn recovered(dir: &Path) -> Option<Vec<u8>> {
        let records = open(dir).recover()?;
        assert!(records.iter().all(|bytes| *bytes == record(bytes[0])));
        Some(records.iter().map(|record| record[0]).collect())
    }

    /// A directory with two generations, of records 2 to 4 and 5 to 7, and one before that is gone.
    fn two_generations() -> tempfile::TempDir {
        let temp = tempfile::tempdir().expect("a directory");
        let journal = open(temp.path());
        assert_eq!(journal.recover(), None);
        for n in 1..8 {
            if n == 2 || n == 5 {
                journal.begin_generation();
            }
            journal.append(record(n));
        }
        temp
    }

    #[tokio::test]
    async fn records_of_two_generations_are_recovered_and_more_are_appended() {
        let temp = two_generations();
        let journal = open(temp.path());
        let records = journal.recover().expect("all is there");
        assert_eq!(records, (2..8).map(record).collect::<Vec<_>>());
        journal.append(record(8));
        journal.written().await.expect("written");
        // As a process that is killed would leave it.
        let copy = tempfile::tempdir().expect("a directory");
        for name in ["journal-0", "journal-1"] {
            fs::copy(temp.path().join(name), copy.path().join(name)).expect("copied");
        }
        assert_eq!(recovered(copy.path()), Some((2..9).collect()));
        journal.begin_generation();
        journal.append(record(9));
        drop(journal);
        assert_eq!(recovered(temp.path()), Some((5..10).collect()));
    }

    #[test]
    fn a_process_that_dies_while_it_writes_loses_that_record_alone() {
        let temp = two_generations();
        let last = temp.path().join("journal-0");
        let whole = fs::read(&last).expect("there");
        let of_last = RECORD_HEAD_BYTES + 7;
        for cut in 1..=of_last {
            fs::write(&last, &whole[..whole.len() - cut]).expect("written");
            assert_eq!(recovered(temp.path()), Some((2..7).collect()), "{cut} bytes less");
            // The rest of the record is not taken for a part of the next.
            open(temp.path()).append(record(9));
            assert_eq!(recovered(temp.path()), Some(vec![2, 3, 4, 5, 6, 9]));
        }
    }

    #[test]
    fn what_is_not_whole_is_void() {
        let change = |name: &str, at: usize| {
            let temp = two_generations();
            let path = temp.path().join(name);
            let mut bytes = fs::read(&path).expect("there");
            bytes[at] ^= 1;
            fs::write(&path, bytes).expect("written");
            recovered(temp.path())
        };
        for name in ["journal-0", "journal-1"] {
            let len = fs::read(two_generations().path().join(name)).expect("there").len();
            for at in 0..len {
                assert_eq!(change(name, at), None, "{name}, byte {at}");
            }
        }
        for name in ["journal-0", "journal-1"] {
            let temp = two_generations();
            fs::remove_file(temp.path().join(name)).expect("there");
            assert_eq!(recovered(temp.path()), None, "without {name}");
            let temp = two_generations();
            let file = OpenOptions::new().write(true).open(temp.path().join(name));
            file.and_then(|file| file.set_len(HEAD_BYTES as u64)).expect("cut");
            assert_eq!(recovered(temp.path()), None, "{name} without records");
        }
        let temp = two_generations();
        let file = OpenOptions::new().write(true).open(temp.path().join("journal-1"));
        file.and_then(|file| file.set_len(HEAD_BYTES as u64 + 20)).expect("cut");
        assert_eq!(recovered(temp.path()), None, "the older one is cut");
        let temp = two_generations();
        fs::copy(temp.path().join("journal-0"), temp.path().join("journal-1")).expect("copied");
        assert_eq!(recovered(temp.path()), None, "one twice");
    }

    #[test]
    fn another_boot_begins_anew() {
        for other in [Some([8; 16]), None] {
            let temp = two_generations();
            let journal = DirJournal::of_boot(temp.path(), other).expect("a thread");
            assert_eq!(journal.recover(), None);
            journal.append(record(1));
            drop(journal);
            assert_eq!(recovered(temp.path()), None, "what it was before must not come back");
        }
    }

    #[tokio::test]
    async fn where_nothing_can_be_written_nothing_is_recovered_later() {
        let temp = two_generations();
        // The next generation cannot be made.
        fs::create_dir(temp.path().join("journal.new")).expect("made");
        let journal = open(temp.path());
        journal.append(record(8));
        journal.written().await.expect("written");
        journal.begin_generation();
        journal.append(record(9));
        let failed = journal.written().await;
        assert!(
            failed.is_err(),
            "the files that are there lack a record, or one could not be removed"
        );
        fs::remove_dir(temp.path().join("journal.new")).expect("empty");
        journal.append(record(10));
        journal.written().await.expect("no file is there any more");
        drop(journal);
        assert_eq!(recovered(temp.path()), None);
    }

    #[test]
    fn the_clock_goes_on_from_one_incarnation_to_the_next() {
        let temp = tempfile::tempdir().expect("a temporary directory");
        let now = || DirJournal::open(temp.path()).expect("a thread").now();
        let since_boot = now();
        assert!(since_boot > Instant(0) && now() >= since_boot);
    }
}
