//! A record of each change, so that it can be made again after a crash ([`spool`]).
//!
//! Files are named by number, and the tree on the ring has no table of numbers: before the first
//! record that names a stored file comes one that says where it is. A record is written down in the
//! order of the changes, and made again on the same tree it finds every file where it was.
//!
//! Changes to files that have no name are not recorded: no later mount could show them. What was
//! recorded of the data of a file that was removed or emptied since is superfluous, and the spool may
//! drop it.
//!
//! [`spool`]: super::super::spool

use std::collections::BTreeSet;

use atoll_vfs::{
    Caller, Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FileKind, FileTime, RenameFlags, SetAttr,
    SetTime, XattrFlags,
};
use bytes::Bytes;
use minicbor::{Decode, Encode};

use super::{Body, FIRST_DERIVED, Loaded, Place, ROOT, Stop, Tree};
use crate::blocks::edit_file::{HeldBytes, NewData};
use crate::mount::Birth;

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(in crate::owned::write) enum Record {
    /// The stored file `inode` is under this name.
    #[n(0)]
    Found {
        #[n(0)]
        inode: u64,
        #[n(1)]
        name: Name,
    },
    /// The stored file is in the table of links.
    #[n(1)]
    FoundLinked {
        #[n(0)]
        inode: u64,
    },
    #[n(2)]
    Make {
        #[n(0)]
        inode: u64,
        #[n(1)]
        name: Name,
        #[n(2)]
        kind: u8,
        /// Of a symbolic link.
        #[cbor(n(3), with = "raw")]
        target: Bytes,
        /// Of a device.
        #[n(4)]
        rdev: u64,
        #[n(5)]
        mode: u32,
        #[n(6)]
        uid: u32,
        #[n(7)]
        gid: u32,
        #[n(8)]
        now: Time,
    },
    #[n(3)]
    Link {
        #[n(0)]
        inode: u64,
        #[n(1)]
        name: Name,
        #[n(2)]
        now: Time,
    },
    #[n(4)]
    Unlink {
        #[n(0)]
        name: Name,
        #[n(1)]
        now: Time,
    },
    #[n(5)]
    Rmdir {
        #[n(0)]
        name: Name,
        #[n(1)]
        now: Time,
    },
    #[n(6)]
    Rename {
        #[n(0)]
        from: Name,
        #[n(1)]
        to: Name,
        #[n(2)]
        exchange: bool,
        #[n(3)]
        now: Time,
    },
    #[n(7)]
    Set {
        #[n(0)]
        inode: u64,
        #[n(1)]
        mode: Option<u32>,
        #[n(2)]
        uid: Option<u32>,
        #[n(3)]
        gid: Option<u32>,
        #[n(4)]
        size_bytes: Option<u64>,
        #[n(5)]
        atime: Option<Time>,
        #[n(6)]
        mtime: Option<Time>,
        #[n(7)]
        now: Time,
    },
    #[n(8)]
    Write {
        #[n(0)]
        inode: u64,
        #[n(1)]
        offset: u64,
        #[cbor(n(2), with = "raw")]
        data: Bytes,
        #[n(3)]
        now: Time,
    },
    #[n(9)]
    Allocate {
        #[n(0)]
        inode: u64,
        #[n(1)]
        offset: u64,
        #[n(2)]
        len: u64,
        #[n(3)]
        mode: i32,
        #[n(4)]
        now: Time,
    },
    #[n(10)]
    SetXattr {
        #[n(0)]
        inode: u64,
        #[cbor(n(1), with = "raw")]
        name: Bytes,
        /// None if the attribute is removed.
        #[n(2)]
        value: Option<Value>,
        #[n(3)]
        now: Time,
    },
    /// Stands where the data of a file was that is gone.
    #[n(11)]
    Dropped,
}

/// A name of a directory.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub(in crate::owned::write) struct Name {
    #[n(0)]
    parent: u64,
    #[cbor(n(1), with = "raw")]
    name: Bytes,
}

impl Name {
    pub(super) fn new((parent, name): (u64, &[u8])) -> Name {
        Name { parent, name: Bytes::copy_from_slice(name) }
    }

    fn place(&self) -> (u64, &[u8]) {
        (self.parent, &self.name)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(transparent)]
pub(in crate::owned::write) struct Value(#[cbor(n(0), with = "raw")] Bytes);

/// Seconds and nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub(in crate::owned::write) struct Time(#[n(0)] i64, #[n(1)] u32);

impl From<FileTime> for Time {
    fn from(time: FileTime) -> Time {
        Time(time.secs, time.nanos)
    }
}

impl From<Time> for FileTime {
    fn from(Time(secs, nanos): Time) -> FileTime {
        FileTime { secs, nanos: nanos.min(999_999_999) }
    }
}

mod raw {
    use bytes::Bytes;
    use minicbor::encode::Write;
    use minicbor::{Decoder, Encoder};

    pub(super) fn encode<C, W: Write>(
        bytes: &Bytes,
        to: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), minicbor::encode::Error<W::Error>> {
        to.bytes(bytes)?.ok()
    }

    pub(super) fn decode<C>(
        from: &mut Decoder<'_>,
        _: &mut C,
    ) -> Result<Bytes, minicbor::decode::Error> {
        Ok(Bytes::copy_from_slice(from.bytes()?))
    }
}

/// Records that make the contents of a file, of what is stored of it.
#[derive(Debug)]
pub(in crate::owned::write) struct Restated {
    inode: u64,
    /// Where it is, its length, and its holes.
    pub(in crate::owned::write) first: Vec<Record>,
    /// The data, by offset.
    pub(in crate::owned::write) data: Vec<(u64, HeldBytes)>,
    now: Time,
    /// Its times.
    pub(in crate::owned::write) last: Record,
}

impl Restated {
    /// The record that brings data.
    pub(in crate::owned::write) fn write(&self, offset: u64, data: Bytes) -> Record {
        Record::Write { inode: self.inode, offset, data, now: self.now }
    }
}

impl Record {
    /// About how long it is when it is written down, bytes.
    pub(in crate::owned::write) fn len(&self) -> usize {
        100 + match self {
            Record::Write { data, .. } => data.len(),
            Record::SetXattr { name, value, .. } => {
                name.len() + value.as_ref().map_or(0, |Value(value)| value.len())
            }
            Record::Make { name, target, .. } => name.name.len() + target.len(),
            Record::Rename { from, to, .. } => from.name.len() + to.name.len(),
            Record::Found { name, .. }
            | Record::Link { name, .. }
            | Record::Unlink { name, .. }
            | Record::Rmdir { name, .. } => name.name.len(),
            Record::FoundLinked { .. }
            | Record::Set { .. }
            | Record::Allocate { .. }
            | Record::Dropped => 0,
        }
    }

    /// The file whose data it brings, and of how many bytes.
    pub(in crate::owned::write) fn data_of(&self) -> Option<(u64, u64)> {
        match self {
            Record::Write { inode, data, .. } => Some((*inode, data.len() as u64)),
            _ => None,
        }
    }
}

/// Records that the spool has not taken yet.
#[derive(Debug, Default)]
pub(super) struct Journal {
    is_kept: bool,
    records: Vec<Record>,
    /// Where files are that the change under way names.
    noted: Vec<Record>,
    /// Files that records may name.
    found: BTreeSet<u64>,
    /// Files that records which were made again have put into the table.
    held: Vec<u64>,
    /// Files of whose data nothing is left that records have brought.
    emptied: Vec<u64>,
}

impl Tree {
    /// From now on changes are recorded.
    pub(in crate::owned::write) fn keep_journal(&mut self) {
        self.journal.is_kept = true;
    }

    /// Lets go of the files that replayed records have named.
    pub(in crate::owned::write) fn end_replay(&mut self) {
        for inode in std::mem::take(&mut self.journal.held) {
            self.forget(inode, 1);
        }
    }

    /// The records since the last call.
    pub(in crate::owned::write) fn take_records(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.journal.records)
    }

    /// The files that were removed or emptied since the last call: earlier records of their data are
    /// superfluous.
    pub(in crate::owned::write) fn take_emptied(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.journal.emptied)
    }

    /// Notes that records have nothing of a file's data that is needed. The number that a stored
    /// file has by its place may become another file's.
    pub(super) fn note_emptied(&mut self, inode: u64) {
        if self.journal.is_kept && inode < FIRST_DERIVED {
            self.journal.emptied.push(inode);
        }
    }

    /// Later records are read without those before.
    pub(in crate::owned::write) fn restart_journal(&mut self) {
        self.journal.found.clear();
    }

    /// Makes sure that a record may name a file. Called before the change, and says whether to record it.
    pub(super) fn note_place(&mut self, inode: u64) -> bool {
        if !self.journal.is_kept {
            return false;
        }
        let Some(above) = self.place_records(inode, &self.journal.found) else { return false };
        self.journal.noted.extend(above);
        self.nodes.get(inode).is_ok_and(|node| node.place != Place::Removed)
    }

    /// The records that say where a file is, below those that are `known`; `None` if it has no name.
    fn place_records(&self, inode: u64, known: &BTreeSet<u64>) -> Option<Vec<Record>> {
        let mut above = Vec::new();
        let mut at = inode;
        while at != ROOT && !known.contains(&at) {
            let record = match self.nodes.get(at).map(|node| &node.place) {
                Ok(Place::Named(parent, name)) => {
                    let record = Record::Found { inode: at, name: Name::new((*parent, name)) };
                    at = *parent;
                    record
                }
                Ok(Place::Linked) => {
                    let record = Record::FoundLinked { inode: at };
                    at = ROOT;
                    record
                }
                Ok(Place::Root | Place::Removed) | Err(_) => return None,
            };
            above.push(record);
        }
        above.reverse();
        Some(above)
    }

    /// What makes the contents of a file that a flush leaves out, of what is stored of it. `None` if it
    /// has no name.
    pub(in crate::owned::write) fn restated(&self, inode: u64) -> Option<Restated> {
        let mut first = self.place_records(inode, &BTreeSet::new())?;
        let node = self.nodes.get(inode).ok()?;
        let Body::File(content) = &node.body else { return None };
        let (mtime, ctime) = (Time::from(node.mtime), Time::from(node.ctime));
        let set = |size_bytes, mtime| Record::Set {
            inode,
            mode: None,
            uid: None,
            gid: None,
            size_bytes,
            atime: None,
            mtime,
            now: ctime,
        };
        if content.cut < content.stored.size_bytes {
            first.push(set(Some(content.cut), None));
        }
        first.push(set(Some(content.size_bytes), None));
        let mut data = Vec::new();
        for (block, new) in &content.changed {
            let offset = block << content.block_size_log2;
            match new {
                NewData::Hole => first.push(Record::Allocate {
                    inode,
                    offset,
                    len: 1 << content.block_size_log2,
                    mode: FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE,
                    now: ctime,
                }),
                NewData::Whole(bytes) => data.push((offset, bytes.clone())),
                NewData::Pages(pages) => {
                    let at = |page: &u64| offset + page * content.page_bytes();
                    data.extend(pages.iter().map(|(page, bytes)| (at(page), bytes.clone())));
                }
            }
        }
        Some(Restated { inode, first, data, now: ctime, last: set(None, Some(mtime)) })
    }

    /// Records a change that was made, if [`note_place`](Self::note_place) said so.
    pub(super) fn record(&mut self, is_recorded: bool, record: impl FnOnce() -> Record) {
        if is_recorded {
            let journal = &mut self.journal;
            journal.noted.push(record());
            for record in &journal.noted {
                if let Record::Found { inode, .. }
                | Record::FoundLinked { inode }
                | Record::Make { inode, .. } = record
                {
                    journal.found.insert(*inode);
                }
            }
            journal.records.append(&mut journal.noted);
        }
    }

    /// Ends a call: if it has changed nothing, nothing is recorded.
    pub(super) fn settle_journal(&mut self) {
        self.journal.noted.clear();
    }

    /// Makes a recorded change again. The tree must be as it was then; if it shows that it is not,
    /// the error is [`Errno::EIO`] or the one that the call has met.
    pub(in crate::owned::write) fn replay(
        &mut self,
        record: &Record,
        loaded: &Loaded,
    ) -> Result<(), Stop> {
        match record {
            Record::Found { inode, name } => {
                let found = self.lookup(name.parent, &name.name, loaded)?;
                self.journal.held.push(found);
                same(found, *inode)
            }
            Record::FoundLinked { inode } => {
                self.enter_linked(*inode, loaded)?;
                self.hold(*inode);
                self.journal.held.push(*inode);
                Ok(())
            }
            Record::Make { inode, name, kind, target, rdev, mode, uid, gid, now } => {
                let birth = birth(*kind, target, *rdev)?;
                let caller = Caller { uid: *uid, gid: *gid, ..Caller::default() };
                let now = FileTime::from(*now);
                // The root may have passed over this number since.
                let next_inode = std::mem::replace(&mut self.next_inode, *inode);
                let made = self.make(caller, name.place(), birth, *mode, now, loaded);
                self.next_inode = self.next_inode.max(next_inode);
                let made = made?;
                self.journal.held.push(made);
                same(made, *inode)
            }
            Record::Link { inode, name, now } => {
                self.link(*inode, name.place(), (*now).into(), loaded)?;
                self.journal.held.push(*inode);
                Ok(())
            }
            Record::Unlink { name, now } => {
                self.unlink(name.parent, &name.name, (*now).into(), loaded)
            }
            Record::Rmdir { name, now } => {
                self.rmdir(name.parent, &name.name, (*now).into(), loaded)
            }
            Record::Rename { from, to, exchange, now } => {
                let flags = RenameFlags { exchange: *exchange, no_replace: false };
                self.rename(from.place(), to.place(), flags, (*now).into(), loaded)
            }
            Record::Set { inode, mode, uid, gid, size_bytes, atime, mtime, now } => {
                let to = |time: &Option<Time>| time.map(|time| SetTime::To(time.into()));
                let changes = SetAttr {
                    mode: *mode,
                    uid: *uid,
                    gid: *gid,
                    size_bytes: *size_bytes,
                    atime: to(atime),
                    mtime: to(mtime),
                };
                self.set(*inode, changes, (*now).into(), loaded)
            }
            Record::Write { inode, offset, data, now } => {
                self.write_at(*inode, *offset, data, (*now).into(), loaded)
            }
            Record::Allocate { inode, offset, len, mode, now } => {
                self.allocate(*inode, (*offset, *len), *mode, (*now).into(), loaded)
            }
            Record::SetXattr { inode, name, value, now } => match value {
                Some(Value(value)) => {
                    let (value, flags) = (value.clone(), XattrFlags::default());
                    self.set_xattr(*inode, name, value, flags, (*now).into(), loaded)
                }
                None => self.remove_xattr(*inode, name, (*now).into(), loaded),
            },
            Record::Dropped => Ok(()),
        }
    }
}

fn same(found: u64, recorded: u64) -> Result<(), Stop> {
    if found == recorded { Ok(()) } else { Err(Errno::EIO.into()) }
}

impl Value {
    pub(super) fn new(value: Bytes) -> Value {
        Value(value)
    }
}

const SPECIAL: [FileKind; 4] =
    [FileKind::Fifo, FileKind::Socket, FileKind::CharDevice, FileKind::BlockDevice];

/// What is made, as a number, a target and a device.
pub(super) fn parts(birth: &Birth) -> (u8, Bytes, u64) {
    match birth {
        Birth::File => (0, Bytes::new(), 0),
        Birth::Directory => (1, Bytes::new(), 0),
        Birth::Symlink(target) => (2, target.clone(), 0),
        Birth::Special(kind, rdev) => {
            let at = SPECIAL.iter().position(|special| special == kind);
            (3 + at.expect("all other kinds are in the list") as u8, Bytes::new(), *rdev)
        }
    }
}

fn birth(kind: u8, target: &Bytes, rdev: u64) -> Result<Birth, Stop> {
    Ok(match kind {
        0 => Birth::File,
        1 => Birth::Directory,
        2 => Birth::Symlink(target.clone()),
        special => {
            let kind = SPECIAL.get(usize::from(special) - 3).ok_or(Errno::EIO)?;
            Birth::Special(*kind, rdev)
        }
    })
}
