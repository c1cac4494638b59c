//! Whether bytes and attributes are those that were written: each cell of a file, its length, and each attribute is a register
//! with one writer at a time, and a read finds the last value that was written, or one that a call writes meanwhile.
//!
//! A call of unknown outcome may write its value, or some of its cells, at any time until
//! [`Mark::Settled`]. After [`Mark::PowerLost`] what was not synced may be any value that it had since it last was.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use atoll_vfs::{Attr, Errno, FileKind, FileTime, InodeNumber, SetAttr, SetTime};
use bytes::Bytes;

use super::history::{Call, Called, Mark, Moment, Reply};
use super::me;
use super::steps::CELL_BYTES;

/// Calls before a wrong one that a message lists.
const SHOWN: usize = 25;

/// A value, as far as it is known.
#[derive(Clone, Debug)]
struct Register<T> {
    /// What it may be.
    now: BTreeSet<T>,
    /// What a loss of power may make of it.
    durable: BTreeSet<T>,
}

impl<T: Clone + Ord> Register<T> {
    fn new(value: T) -> Register<T> {
        let now = BTreeSet::from([value]);
        Register { durable: now.clone(), now }
    }

    fn set(&mut self, value: T) {
        self.now = BTreeSet::from([value.clone()]);
        self.durable.insert(value);
    }

    fn may_be_set(&mut self, value: T) {
        self.now.insert(value.clone());
        self.durable.insert(value);
    }

    fn sync(&mut self) {
        self.durable = self.now.clone();
    }

    fn lose_power(&mut self) {
        self.now.extend(self.durable.iter().cloned());
    }

    fn see(&mut self, value: T) {
        self.now = BTreeSet::from([value]);
    }
}

/// A length, bytes, as far as it is known: at least, at most.
#[derive(Clone, Copy, Debug)]
struct Length(u64, u64);

impl Length {
    fn or(self, other: Length) -> Length {
        Length(self.0.min(other.0), self.1.max(other.1))
    }
}

/// A change of a file.
#[derive(Clone, Debug)]
enum Change {
    Cells { first: u64, data: Bytes },
    Attributes(SetAttr),
    Xattr(Bytes, Option<Bytes>),
}

impl Change {
    fn of(called: &Called) -> Option<Change> {
        match called {
            Called::Write { offset, data, .. } => {
                let is_whole =
                    [*offset, data.len() as u64].iter().all(|n| n.is_multiple_of(CELL_BYTES));
                assert!(is_whole, "clients write whole cells");
                Some(Change::Cells { first: offset / CELL_BYTES, data: data.clone() })
            }
            Called::SetAttr(_, changes) => Some(Change::Attributes(*changes)),
            Called::SetXattr(_, name, value) => {
                Some(Change::Xattr(name.clone(), Some(value.clone())))
            }
            Called::RemoveXattr(_, name) => Some(Change::Xattr(name.clone(), None)),
            _ => None,
        }
    }

    /// The bytes that it gives a cell.
    fn cell(&self, cell: u64) -> Option<Bytes> {
        match self {
            Change::Cells { first, data } => {
                let at = usize::try_from(cell.checked_sub(*first)? * CELL_BYTES).ok()?;
                (at < data.len()).then(|| data.slice(at..at + CELL_BYTES as usize))
            }
            Change::Attributes(SetAttr { size_bytes: Some(size_bytes), .. }) => {
                (cell * CELL_BYTES >= *size_bytes).then(zeros)
            }
            _ => None,
        }
    }

    /// The length after it, of a file that had this one.
    fn length(&self, before: Length) -> Option<Length> {
        match self {
            Change::Cells { first, data } => {
                let end = first * CELL_BYTES + data.len() as u64;
                Some(Length(before.0.max(end), before.1.max(end)))
            }
            Change::Attributes(SetAttr { size_bytes: Some(size_bytes), .. }) => {
                Some(Length(*size_bytes, *size_bytes))
            }
            _ => None,
        }
    }

    fn attributes(&self) -> SetAttr {
        match self {
            Change::Attributes(changes) => *changes,
            _ => SetAttr::default(),
        }
    }

    fn mtime(&self) -> Option<Option<FileTime>> {
        match (self, self.attributes().mtime) {
            (_, Some(SetTime::To(time))) => Some(Some(time)),
            (_, Some(SetTime::Now)) | (Change::Cells { .. }, None) => Some(None),
            _ => self.attributes().size_bytes.map(|_| None),
        }
    }
}

fn zeros() -> Bytes {
    const ZEROS: [u8; CELL_BYTES as usize] = [0; CELL_BYTES as usize];
    Bytes::from_static(&ZEROS)
}

/// What is known of a file.
#[derive(Clone, Debug)]
struct FileContents {
    kind: FileKind,
    target: Option<Bytes>,
    /// Those that were ever written.
    cells: Arc<BTreeMap<u64, Register<Bytes>>>,
    length: Length,
    durable_length: Length,
    mode: Register<u32>,
    uid: Register<u32>,
    gid: Register<u32>,
    /// None: any time.
    mtime: Register<Option<FileTime>>,
    xattrs: BTreeMap<Bytes, Register<Option<Bytes>>>,
    /// Changes that may be made at any time.
    open: BTreeMap<usize, Change>,
}

impl FileContents {
    fn new(
        kind: FileKind,
        mode: u32,
        (uid, gid): (u32, u32),
        target: Option<Bytes>,
    ) -> FileContents {
        FileContents {
            kind,
            target,
            cells: Arc::default(),
            length: Length(0, 0),
            durable_length: Length(0, 0),
            mode: Register::new(mode),
            uid: Register::new(uid),
            gid: Register::new(gid),
            mtime: Register::new(None),
            xattrs: BTreeMap::new(),
            open: BTreeMap::new(),
        }
    }

    /// What `change` may or must do to all registers.
    fn make(&mut self, change: &Change, is_certain: bool) {
        fn put<T: Clone + Ord>(register: &mut Register<T>, value: T, is_certain: bool) {
            if is_certain { register.set(value) } else { register.may_be_set(value) }
        }
        let cells: Vec<u64> = match change {
            Change::Cells { first, data } => {
                (*first..first + data.len() as u64 / CELL_BYTES).collect()
            }
            _ => self.cells.keys().copied().collect(),
        };
        for cell in cells {
            if let Some(bytes) = change.cell(cell) {
                let cells = Arc::make_mut(&mut self.cells);
                put(cells.entry(cell).or_insert_with(|| Register::new(zeros())), bytes, is_certain);
            }
        }
        if let Some(length) = change.length(self.length) {
            self.durable_length = self.durable_length.or(length);
            self.length = if is_certain { length } else { self.length.or(length) };
        }
        let SetAttr { mode, uid, gid, .. } = change.attributes();
        let values = [(&mut self.mode, mode), (&mut self.uid, uid), (&mut self.gid, gid)];
        for (register, value) in values {
            if let Some(value) = value {
                put(register, value, is_certain);
            }
        }
        if let Some(mtime) = change.mtime() {
            put(&mut self.mtime, mtime, is_certain);
        }
        if is_certain {
            // The journal has them.
            for register in [&mut self.mode, &mut self.uid, &mut self.gid] {
                register.sync();
            }
            self.mtime.sync();
        }
        if let Change::Xattr(name, value) = change {
            let register = self.xattrs.entry(name.clone()).or_insert_with(|| Register::new(None));
            put(register, value.clone(), is_certain);
        }
    }

    fn sync(&mut self) {
        Arc::make_mut(&mut self.cells).values_mut().for_each(Register::sync);
        self.xattrs.values_mut().for_each(Register::sync);
        self.durable_length = self.length;
    }

    fn lose_power(&mut self) {
        Arc::make_mut(&mut self.cells).values_mut().for_each(Register::lose_power);
        self.xattrs.values_mut().for_each(Register::lose_power);
        self.length = self.length.or(self.durable_length);
    }

    /// The changes of unknown outcome have been made, or never will be.
    fn settle(&mut self, calls: &[Call]) {
        let open = std::mem::take(&mut self.open);
        for (index, change) in open {
            match is_unknown(&calls[index]) {
                true => self.make(&change, false),
                false => {
                    self.open.insert(index, change);
                }
            }
        }
    }

    /// Whether a read that began in this state, during which the changes that are open were made or not, may find these bytes.
    fn check_cell(&self, cell: u64, found: &[u8]) -> Result<(), String> {
        let mut expected: Vec<Bytes> = match self.cells.get(&cell) {
            Some(register) => register.now.iter().cloned().collect(),
            None => vec![zeros()],
        };
        expected.extend(self.open.values().filter_map(|change| change.cell(cell)));
        match expected.iter().any(|bytes| bytes.starts_with(found)) {
            true => Ok(()),
            false => {
                let text = |bytes: &[u8]| format!("{:?}", String::from_utf8_lossy(bytes));
                let expected: Vec<String> = expected.iter().map(|bytes| text(bytes)).collect();
                Err(format!("cell {cell} is {}, and not {}", text(found), expected.join(" or ")))
            }
        }
    }

    fn check_length(&self, found: u64) -> Result<(), String> {
        // Each open change may follow each other one.
        let mut expected = self.length;
        for _ in 0..2 {
            for change in self.open.values() {
                expected = change.length(expected).map_or(expected, |length| expected.or(length));
            }
        }
        match (expected.0..=expected.1).contains(&found) {
            true => Ok(()),
            false => Err(format!("it has {found} bytes, and not {}..={}", expected.0, expected.1)),
        }
    }

    fn check_attributes(&self, attr: &Attr) -> Result<(), String> {
        if attr.kind != self.kind {
            return Err(format!("it is a {:?}, and not a {:?}", attr.kind, self.kind));
        }
        let may_be = |register: &Register<u32>, found: u32, open: fn(SetAttr) -> Option<u32>| {
            register.now.contains(&found)
                || self.open.values().any(|change| open(change.attributes()) == Some(found))
        };
        let wrong = |what: &str, found: u32, register: &Register<u32>| {
            Err(format!("its {what} is {found:o} (octal), and not of {:?} (decimal)", register.now))
        };
        if !may_be(&self.mode, attr.mode, |changes| changes.mode) {
            return wrong("mode", attr.mode, &self.mode);
        }
        if !may_be(&self.uid, attr.uid, |changes| changes.uid) {
            return wrong("owner", attr.uid, &self.uid);
        }
        if !may_be(&self.gid, attr.gid, |changes| changes.gid) {
            return wrong("group", attr.gid, &self.gid);
        }
        if self.kind != FileKind::Regular {
            return Ok(());
        }
        let mut times =
            self.mtime.now.iter().copied().chain(self.open.values().filter_map(Change::mtime));
        if !times.any(|time| time.is_none_or(|time| time == attr.mtime)) {
            let set = &self.mtime.now;
            return Err(format!("it was last written at {:?}, and not at {set:?}", attr.mtime));
        }
        self.check_length(attr.size_bytes)
    }

    fn check_xattr(
        &self,
        name: &Bytes,
        is_right: impl Fn(&Option<Bytes>) -> bool,
    ) -> Result<(), String> {
        let mut expected: Vec<Option<Bytes>> = match self.xattrs.get(name) {
            Some(register) => register.now.iter().cloned().collect(),
            None => vec![None],
        };
        expected.extend(self.open.values().filter_map(|change| match change {
            Change::Xattr(other, value) if other == name => Some(value.clone()),
            _ => None,
        }));
        match expected.iter().any(is_right) {
            true => Ok(()),
            false => Err(format!("its attribute {name:?} is none of {expected:?}")),
        }
    }

    /// Whether a call may have had its answer if it began in this state.
    fn check(&self, call: &Call) -> Result<(), String> {
        match (&call.called, call.outcome()) {
            // It was gone again when its call was answered that made it.
            (_, Some(Ok(Reply::Attr(attr)))) if attr.nlink == 0 => Ok(()),
            (_, Some(Ok(Reply::Attr(attr)))) => self.check_attributes(attr),
            (Called::Read { offset, len, .. }, Some(Ok(Reply::Bytes(bytes)))) => {
                if bytes.len() < *len as usize {
                    self.check_length(offset + bytes.len() as u64)?;
                }
                let first = offset / CELL_BYTES;
                (first..)
                    .zip(bytes.chunks(CELL_BYTES as usize))
                    .try_for_each(|(cell, found)| self.check_cell(cell, found))
            }
            (Called::ReadLink(_), Some(Ok(Reply::Bytes(target)))) => match &self.target {
                Some(expected) if expected != target => {
                    Err(format!("it leads to {target:?}, and not to {expected:?}"))
                }
                _ => Ok(()),
            },
            (Called::GetXattr(_, name), Some(Ok(Reply::Bytes(found)))) => {
                self.check_xattr(name, |value| value.as_ref() == Some(found))
            }
            (Called::GetXattr(_, name), Some(Err(Errno::ENODATA))) => {
                self.check_xattr(name, Option::is_none)
            }
            (Called::ListXattr(_), Some(Ok(Reply::Xattrs(names)))) => {
                let all: BTreeSet<&Bytes> = names.iter().chain(self.xattrs.keys()).collect();
                all.into_iter().try_for_each(|name| {
                    self.check_xattr(name, |value| value.is_some() == names.contains(name))
                })
            }
            _ => Ok(()),
        }
    }

    /// What a call has found is how it is from now on.
    fn see(&mut self, call: &Call) {
        match (&call.called, call.outcome()) {
            (_, Some(Ok(Reply::Attr(attr)))) => {
                self.mode.see(attr.mode);
                self.uid.see(attr.uid);
                self.gid.see(attr.gid);
                if self.kind == FileKind::Regular {
                    self.length = Length(attr.size_bytes, attr.size_bytes);
                }
            }
            (Called::Read { offset, .. }, Some(Ok(Reply::Bytes(bytes)))) => {
                for (cell, found) in (offset / CELL_BYTES..).zip(bytes.chunks(CELL_BYTES as usize))
                {
                    let is_sure = self.cells.get(&cell).is_none_or(|register| {
                        register.now.len() == 1 && register.now.iter().all(|value| value == found)
                    });
                    if !is_sure && found.len() as u64 == CELL_BYTES {
                        let cells = Arc::make_mut(&mut self.cells);
                        let register = cells.get_mut(&cell).expect("it is not sure");
                        register.see(Bytes::copy_from_slice(found));
                    }
                }
            }
            (Called::GetXattr(_, name), Some(found)) => {
                let value = match found {
                    Ok(Reply::Bytes(value)) => Some(value.clone()),
                    Err(Errno::ENODATA) => None,
                    _ => return,
                };
                if let Some(register) = self.xattrs.get_mut(name) {
                    register.see(value);
                }
            }
            _ => {}
        }
    }
}

/// Whether nobody knows if the call was made. Fewer bytes may be written than were given.
fn is_unknown(call: &Call) -> bool {
    match (&call.called, call.outcome()) {
        (_, None) => true,
        (Called::Write { data, .. }, Some(Ok(Reply::Written(written)))) => {
            (*written as usize) < data.len()
        }
        _ => false,
    }
}

/// The file that a call is about: one that it names by number, or has found.
fn subject(call: &Call) -> Option<InodeNumber> {
    match call.outcome() {
        Some(Ok(Reply::Attr(attr))) => Some(attr.inode),
        _ => call.called.inode(),
    }
}

/// That all bytes and attributes that were found are ones that were written.
pub(crate) fn explain((calls, moments): (&[Call], &[Moment])) -> Result<(), String> {
    let mut files: BTreeMap<InodeNumber, FileContents> = BTreeMap::new();
    // The file as it was when the call began, with all changes that may have been made since.
    let mut begun: BTreeMap<usize, FileContents> = BTreeMap::new();
    for moment in moments {
        match *moment {
            Moment::Begin(index) => {
                let call = &calls[index];
                let Some(inode) = subject(call) else { continue };
                let Some(file) = files.get_mut(&inode) else { continue };
                if let Some(change) = Change::of(&call.called) {
                    for (other, file) in &mut begun {
                        if subject(&calls[*other]) == Some(inode) {
                            file.open.insert(index, change.clone());
                        }
                    }
                    file.open.insert(index, change);
                }
                if call.ended.is_some() {
                    begun.insert(index, file.clone());
                }
            }
            Moment::End(index) => {
                let call = &calls[index];
                let Some(inode) = subject(call) else { continue };
                end(&mut files, begun.remove(&index), calls, index).map_err(|why| {
                    let lines = calls
                        .iter()
                        .filter(|other| subject(other) == Some(inode) && other.begun <= call.begun)
                        .filter(|other| !matches!(other.called, Called::Lookup(_)))
                        .map(|call| format!("  {}\n", call.line()))
                        .collect::<Vec<_>>();
                    let last = lines[lines.len().saturating_sub(SHOWN)..].concat();
                    let (inode, line) = (inode.0, call.line());
                    format!("file {inode:016x}: {why}:\n  {line}\ncalls of it before:\n{last}")
                })?;
            }
            Moment::Mark(Mark::Settled) => {
                files.values_mut().for_each(|file| file.settle(calls));
            }
            Moment::Mark(Mark::PowerLost) => files.values_mut().for_each(FileContents::lose_power),
        }
    }
    Ok(())
}

fn end(
    files: &mut BTreeMap<InodeNumber, FileContents>,
    begun: Option<FileContents>,
    calls: &[Call],
    index: usize,
) -> Result<(), String> {
    let call = &calls[index];
    let Some(inode) = subject(call) else { return Ok(()) };
    let Some(file) = files.get_mut(&inode) else {
        let file = match (&call.called, call.outcome()) {
            (Called::Make { kind, mode, target, .. }, _) => {
                let target = (*kind == FileKind::Symlink).then(|| target.clone());
                FileContents::new(*kind, *mode, (me().uid, me().gid), target)
            }
            // One that a call without an answer has made.
            (_, Some(Ok(Reply::Attr(attr)))) => {
                FileContents::new(attr.kind, attr.mode, (attr.uid, attr.gid), None)
            }
            _ => return Ok(()),
        };
        let checked = call.outcome().map_or(Ok(()), |_| file.check(call));
        files.insert(inode, file);
        return checked;
    };
    let is_quiet = begun.as_ref().is_some_and(|begun| {
        begun.open.keys().all(|other| *other != index && is_unknown(&calls[*other]))
    });
    if let Some(begun) = begun {
        begun.check(call)?;
    }
    if is_quiet {
        file.see(call);
    }
    if call.outcome().is_some() && !is_unknown(call) {
        let change = file.open.remove(&index);
        if let (Some(change), Some(Ok(_))) = (change, call.outcome()) {
            file.make(&change, true);
        }
    }
    if is_quiet && matches!((&call.called, call.outcome()), (Called::Sync(_), Some(Ok(_)))) {
        file.sync();
    }
    Ok(())
}

mod tests {
    use super::*;
    use crate::workload::history::History;
    use crate::workload::steps::Stamp;
    use crate::workload::{ROOT, env, run};

    const FILE: InodeNumber = InodeNumber(7);

    fn attr(size_bytes: u64) -> Attr {
        let time = FileTime::default();
        Attr {
            inode: FILE,
            kind: FileKind::Regular,
            mode: 0o644,
            nlink: 1,
            uid: me().uid,
            gid: me().gid,
            rdev: 0,
            size_bytes,
            blocks_512: 0,
            block_size_bytes: 4096,
            atime: time,
            mtime: time,
            ctime: time,
        }
    }

    fn cells(number: u64, first_cell: u64, count: u64) -> Bytes {
        Stamp { client: 0, number }.cells(FILE, first_cell, count)
    }

    /// What happens to one file.
    #[derive(Clone)]
    enum Told {
        /// Two cells are written by the write with this number.
        Write(u64),
        /// That write has no answer.
        Lost(u64),
        /// The first two cells are those of these writes; 0: zeros.
        Read(u64, u64),
        /// A read of those, which begins before a write and ends before it.
        ReadWhile(u64, (u64, u64)),
        Length(u64),
        Sync,
        Settled,
        PowerLost,
    }
    use Told::{Length as Long, Lost, PowerLost, Read, ReadWhile, Settled, Sync, Write};

    fn told(told: &[Told]) -> Result<(), String> {
        run(async {
            let history = History::new(env());
            let call = |called, reply| history.end(history.begin(0, 1, called), Ok(reply));
            let write =
                |number| Called::Write { inode: FILE, offset: 0, data: cells(number, 0, 2) };
            let read = Called::Read { inode: FILE, offset: 0, len: 128 };
            let bytes = |(first, second): (u64, u64)| {
                let cell =
                    |number, cell| if number == 0 { zeros() } else { cells(number, cell, 1) };
                Reply::Bytes([cell(first, 0), cell(second, 1)].concat().into())
            };
            let (kind, mode, target) = (FileKind::Regular, 0o644, Bytes::new());
            let at = (ROOT, Bytes::from_static(b"file"));
            call(Called::Make { at, kind, mode, target }, Reply::Attr(attr(0)));
            for told in told.iter().cloned() {
                match told {
                    Write(number) => call(write(number), Reply::Written(128)),
                    Lost(number) => drop(history.begin(0, 1, write(number))),
                    Read(first, second) => call(read.clone(), bytes((first, second))),
                    ReadWhile(number, found) => {
                        let reading = history.begin(1, 1, read.clone());
                        let writing = history.begin(0, 1, write(number));
                        history.end(reading, Ok(bytes(found)));
                        history.end(writing, Ok(Reply::Written(128)));
                    }
                    Long(size_bytes) => call(Called::GetAttr(FILE), Reply::Attr(attr(size_bytes))),
                    Sync => call(Called::Sync(FILE), Reply::Nothing),
                    Settled => history.settled(),
                    PowerLost => history.power_lost(),
                }
            }
            let (calls, moments) = history.read();
            explain((&calls, &moments))
        })
    }

    #[test]
    fn a_read_finds_the_last_bytes_that_were_written() {
        assert_eq!(told(&[Write(1), Write(2), Read(2, 2), Long(128)]), Ok(()));
        for wrong in [
            &[Write(1), Write(2), Read(1, 1)][..],
            &[Write(1), Write(2), Read(2, 1)],
            &[Write(1), Read(1, 0)],
            &[Write(1), Read(3, 3)],
            &[Write(1), Long(64)],
            &[Long(1)],
        ] {
            assert!(told(wrong).is_err());
        }
        let wrong = told(&[Write(1), Write(2), Read(2, 1)]).unwrap_err();
        assert!(
            wrong.contains("cell 1 is \"client 000 file 0000000000000007 write 0000001"),
            "{wrong}"
        );
    }

    #[test]
    fn a_read_beside_a_write_finds_some_of_it() {
        assert_eq!(told(&[Write(1), ReadWhile(2, (1, 2)), Read(2, 2)]), Ok(()));
        assert_eq!(told(&[Write(1), ReadWhile(2, (1, 1)), Read(2, 2)]), Ok(()));
        assert!(told(&[Write(1), ReadWhile(2, (1, 2)), Read(1, 2)]).is_err());
        assert!(told(&[Write(1), Write(2), ReadWhile(3, (1, 2))]).is_err());
    }

    #[test]
    fn a_write_without_an_answer_may_be_made_in_part_and_late() {
        assert_eq!(told(&[Write(1), Lost(2), Read(1, 1), Read(1, 2), Read(2, 2)]), Ok(()));
        assert_eq!(told(&[Write(1), Lost(2), Settled, Read(1, 2), Read(1, 2)]), Ok(()));
        assert!(told(&[Write(1), Lost(2), Settled, Read(1, 1), Read(1, 2)]).is_err());
        assert!(told(&[Write(1), Lost(2), Read(2, 2), Read(1, 2)]).is_err());
        assert_eq!(told(&[Lost(1), Long(0), Long(128)]), Ok(()));
        assert!(told(&[Lost(1), Long(129)]).is_err());
    }

    #[test]
    fn a_loss_of_power_takes_what_was_not_synced() {
        assert_eq!(told(&[Write(1), Sync, Write(2), Write(3), PowerLost, Read(1, 2)]), Ok(()));
        assert_eq!(told(&[Write(1), PowerLost, Long(0)]), Ok(()));
        assert!(told(&[Write(1), Write(2), Sync, PowerLost, Read(1, 2)]).is_err());
        assert!(told(&[Write(1), Sync, PowerLost, Long(0)]).is_err());
        assert!(told(&[Write(1), Sync, Write(2), PowerLost, Read(0, 2)]).is_err());
        // What was found once stays.
        assert!(told(&[Write(1), Sync, Write(2), PowerLost, Read(1, 2), Read(2, 2)]).is_err());
        assert!(told(&[Write(1), Write(2), Read(1, 2)]).is_err());
    }
}
