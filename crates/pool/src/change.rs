//! One change of names and attributes, as the journal keeps it. Bytes and sizes of files are not in it: they are made durable
//! where they are.
//!
//! CBOR, fields by number (`docs/design/pool.md`). A change names files by their numbers, so that it can be made again whatever
//! stands under a name by then.

use atoll_vfs::{FileKind, FileTime};
use minicbor::{Decode, Encode};

use crate::calls::{CallOrigin, DoneCall};
use crate::disk::Making;
use crate::layout::{self, FileId, GroupNumber, LinkForm, Referral, Slot};
use crate::quota::QuotaTable;
use crate::scrub::ContentDigest;

/// The longest encoded change, bytes: an extended attribute of 64 KiB, with room to spare.
pub(crate) const MAX_CHANGE_BYTES: usize = 68 << 10;

/// A name in a directory.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
pub(crate) struct PoolPlace {
    /// The directory.
    #[n(0)]
    pub(crate) parent: FileId,
    /// The name.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub(crate) name: Vec<u8>,
}

impl PoolPlace {
    pub(crate) fn new(parent: FileId, name: &[u8]) -> PoolPlace {
        PoolPlace { parent, name: name.to_vec() }
    }

    /// Where a file has its open name ([`FileId::open_name`]).
    pub(crate) fn open_name(id: FileId) -> PoolPlace {
        PoolPlace { parent: FileId::outside(id.group()), name: id.open_name() }
    }

    /// Whether no client sees the name: it is that of a file that is open and has lost its names.
    pub(crate) fn is_open_name(&self) -> bool {
        self.parent == FileId::outside(self.parent.group())
            && FileId::of_open_name(&self.name).is_some()
    }
}

/// What a new file is.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum BirthKind {
    /// A regular file.
    #[n(0)]
    Regular,
    /// A directory that lies in its parent.
    #[n(1)]
    Directory,
    /// A directory that lies in a slot.
    #[n(2)]
    Distributed(#[n(0)] Slot),
    /// A symbolic link to what a user wrote.
    #[n(3)]
    Symlink(#[cbor(n(0), with = "minicbor::bytes")] Vec<u8>),
    /// A FIFO.
    #[n(4)]
    Fifo,
    /// A socket.
    #[n(5)]
    Socket,
    /// A character device.
    #[n(6)]
    CharDevice(#[n(0)] u64),
    /// A block device.
    #[n(7)]
    BlockDevice(#[n(0)] u64),
    /// A name of a file of another group.
    #[n(8)]
    Referral(#[n(0)] Referral),
}

impl BirthKind {
    /// The kind as file systems say it.
    pub(crate) fn kind(&self) -> FileKind {
        match self {
            BirthKind::Regular => FileKind::Regular,
            BirthKind::Directory | BirthKind::Distributed(_) => FileKind::Directory,
            BirthKind::Symlink(_) | BirthKind::Referral(_) => FileKind::Symlink,
            BirthKind::Fifo => FileKind::Fifo,
            BirthKind::Socket => FileKind::Socket,
            BirthKind::CharDevice(_) => FileKind::CharDevice,
            BirthKind::BlockDevice(_) => FileKind::BlockDevice,
        }
    }

    /// The kind of a FIFO, socket or device; none for any other.
    pub(crate) fn special(kind: FileKind, rdev: u64) -> Option<BirthKind> {
        Some(match kind {
            FileKind::Fifo => BirthKind::Fifo,
            FileKind::Socket => BirthKind::Socket,
            FileKind::CharDevice => BirthKind::CharDevice(rdev),
            FileKind::BlockDevice => BirthKind::BlockDevice(rdev),
            FileKind::Regular | FileKind::Directory | FileKind::Symlink => return None,
        })
    }

    /// What the disk is asked to make; `stored` is the target of a symbolic link as it is stored.
    pub(crate) fn making<'a>(&self, stored: &'a [u8]) -> Making<'a> {
        match self {
            BirthKind::Regular => Making::File,
            BirthKind::Directory | BirthKind::Distributed(_) => Making::Directory,
            BirthKind::Symlink(_) | BirthKind::Referral(_) => Making::Symlink(stored),
            BirthKind::Fifo | BirthKind::Socket => Making::Special(self.kind(), 0),
            BirthKind::CharDevice(rdev) | BirthKind::BlockDevice(rdev) => {
                Making::Special(self.kind(), *rdev)
            }
        }
    }

    /// The target of a symbolic link as it is stored, `steps` below a distributed directory, nothing for any other; none if it is
    /// too long.
    pub(crate) fn stored_target(&self, steps: usize) -> Option<Vec<u8>> {
        match self {
            BirthKind::Symlink(target) => layout::escape(target),
            BirthKind::Referral(referral) => Some(referral.target(steps)),
            _ => Some(Vec::new()),
        }
    }

    /// In what form a symbolic link is stored.
    pub(crate) fn link_form(&self) -> LinkForm {
        match self {
            BirthKind::Symlink(target) if layout::needs_escape(target) => LinkForm::Escaped,
            BirthKind::Referral(referral) => LinkForm::Referral(*referral),
            _ => LinkForm::Plain,
        }
    }

    /// Whether it stands in its directory for a directory that lies elsewhere.
    pub(crate) fn is_counted(&self) -> bool {
        match self {
            BirthKind::Distributed(_) => true,
            BirthKind::Referral(referral) => referral.kind == FileKind::Directory,
            _ => false,
        }
    }

    /// The slot of a distributed directory.
    pub(crate) fn slot(&self) -> Option<Slot> {
        match self {
            BirthKind::Distributed(slot) => Some(*slot),
            _ => None,
        }
    }
}

/// What a file is made with.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct FileBirth {
    #[n(0)]
    pub(crate) what: BirthKind,
    #[n(1)]
    pub(crate) uid: u32,
    #[n(2)]
    pub(crate) gid: u32,
    /// Permission bits, as the caller asked for them.
    #[n(3)]
    pub(crate) mode: u32,
    /// The directory has a default access control list, which gets the last word on the mode.
    #[n(5)]
    pub(crate) is_listed: bool,
    /// Access and modification time, where they are not those of the call.
    #[n(4)]
    pub(crate) times: Option<(Time, Time)>,
}

impl FileBirth {
    /// Whether the mode is to be exactly that of this record.
    pub(crate) fn sets_mode(&self) -> bool {
        !self.is_listed && !matches!(self.what, BirthKind::Symlink(_))
    }
}

/// A time of a file: seconds since 1970, nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct Time {
    #[n(0)]
    secs: i64,
    #[n(1)]
    nanos: u32,
}

impl From<FileTime> for Time {
    fn from(time: FileTime) -> Time {
        Time { secs: time.secs, nanos: time.nanos }
    }
}

impl From<Time> for FileTime {
    fn from(time: Time) -> FileTime {
        FileTime { secs: time.secs, nanos: time.nanos }
    }
}

/// A time that a file gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum NewTime {
    /// This time.
    #[n(0)]
    To(#[n(0)] Time),
    /// The time of the call: on the deciding member by its disk's clock when the change is made, which is this or a little later.
    #[n(1)]
    Now(#[n(0)] Time),
}

impl NewTime {
    pub(crate) fn time(self) -> Time {
        match self {
            NewTime::To(time) | NewTime::Now(time) => time,
        }
    }
}

/// Names a change over several groups ([`crate::crossings`]): random bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
pub(crate) struct CrossingId(#[n(0)] pub(crate) u64, #[n(1)] pub(crate) u64);

/// The part in it of a group that does not coordinate it.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct CrossingPart {
    /// The group that decides whether the change is made.
    #[n(0)]
    pub(crate) coordinator: GroupNumber,
    /// It moves a directory to another parent: one such change at a time.
    #[n(1)]
    pub(crate) moves: bool,
    /// The changes that the group makes, in this order.
    #[cbor(n(2), with = "parts")]
    pub(crate) changes: Vec<PoolChange>,
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum PoolChange {
    /// A new file.
    #[n(0)]
    Make {
        #[n(0)]
        id: FileId,
        #[n(1)]
        at: PoolPlace,
        #[n(2)]
        birth: FileBirth,
        /// The call that makes it, if it must be made once.
        #[n(3)]
        by: Option<CallOrigin>,
    },
    /// Another name.
    #[n(1)]
    Link {
        #[n(0)]
        id: FileId,
        #[n(1)]
        at: PoolPlace,
        /// The call that makes it, if it must be made once.
        #[n(2)]
        by: Option<CallOrigin>,
    },
    /// A name that is gone.
    #[n(2)]
    Unlink {
        #[n(0)]
        id: FileId,
        #[n(1)]
        at: PoolPlace,
        /// The call that makes it, if it must be made once.
        #[n(2)]
        by: Option<CallOrigin>,
    },
    /// A file under another name; `replaced` had that name before.
    #[n(3)]
    Rename {
        #[n(0)]
        id: FileId,
        #[n(1)]
        from: PoolPlace,
        #[n(2)]
        to: PoolPlace,
        #[n(3)]
        replaced: Option<FileId>,
        /// The call that makes it, if it must be made once.
        #[n(4)]
        by: Option<CallOrigin>,
    },
    /// Two files under each other's names.
    #[n(4)]
    Exchange {
        #[n(0)]
        id: FileId,
        #[n(1)]
        from: PoolPlace,
        #[n(2)]
        other: FileId,
        #[n(3)]
        to: PoolPlace,
        /// The call that makes it, if it must be made once.
        #[n(4)]
        by: Option<CallOrigin>,
    },
    /// Attributes that were set.
    #[n(5)]
    Attributes {
        #[n(0)]
        id: FileId,
        #[n(1)]
        mode: Option<u32>,
        #[n(2)]
        uid: Option<u32>,
        #[n(3)]
        gid: Option<u32>,
        #[n(4)]
        atime: Option<NewTime>,
        #[n(5)]
        mtime: Option<NewTime>,
    },
    /// An extended attribute that was set, or removed where there is no value.
    #[n(9)]
    Extended {
        #[n(0)]
        id: FileId,
        #[cbor(n(1), with = "minicbor::bytes")]
        name: Vec<u8>,
        #[cbor(n(2), with = "minicbor::bytes")]
        value: Option<Vec<u8>>,
        /// The call that makes it, if it must be made once.
        #[n(3)]
        by: Option<CallOrigin>,
    },
    /// The file is durable with its bytes: it is not made again, empty. And so are its attributes, unless its bytes alone were
    /// synced: what was set by changes up to `upto` is not set again.
    #[n(6)]
    Synced {
        #[n(0)]
        id: FileId,
        /// The order of a change.
        #[n(1)]
        upto: u64,
        /// The marks that the file keeps, on all members of a group ([`crate::marks`]).
        #[n(2)]
        kept: Vec<u64>,
    },
    /// Ranges of a file may differ between members from now on.
    #[n(10)]
    Marked {
        #[n(0)]
        id: FileId,
        #[n(1)]
        marks: Vec<u64>,
    },
    /// All members of the pool, none of which is away, have the same bytes of a file that has no marks: these, by their digest
    /// ([`crate::scrub`]).
    #[n(20)]
    Verified {
        #[n(0)]
        id: FileId,
        #[cbor(n(1), with = "minicbor::bytes")]
        digest: ContentDigest,
    },
    /// All files are durable on all members, but for what these marks say.
    #[n(11)]
    AllSynced {
        #[n(0)]
        kept: Vec<(FileId, Vec<u64>)>,
    },
    /// Everything up to this sequence number of the journal is on the disk and in the index.
    #[n(8)]
    Checkpoint {
        #[n(0)]
        sequence: u64,
        /// Since when the machine runs: attributes need not be set again if it has not stopped.
        #[n(1)]
        boot: u64,
        /// The last change that was decided by then.
        #[n(2)]
        order: u64,
    },
    /// A backup makes the changes up to this one: all members have them.
    #[n(12)]
    Released {
        #[n(0)]
        order: u64,
    },
    /// A member has become the primary of this epoch of the pool's map: the changes that follow are its.
    #[n(13)]
    Began {
        #[n(0)]
        epoch: u64,
    },
    /// All members of the pool have all changes before this one, and the same bytes but for the marks: logs begin here.
    #[n(14)]
    LogBegins,
    /// The change of this order failed.
    #[n(7)]
    Withdrawn {
        #[n(0)]
        order: u64,
    },
    /// This group's part of a change over several is prepared ([`crate::crossings`]).
    #[n(15)]
    Prepared {
        #[n(0)]
        crossing: CrossingId,
        #[n(1)]
        part: CrossingPart,
    },
    /// A change over several groups is decided, and this group's part of it made; `groups` are the others.
    #[n(16)]
    Decided {
        #[n(0)]
        crossing: CrossingId,
        #[n(1)]
        groups: Vec<GroupNumber>,
        #[cbor(n(2), with = "parts")]
        changes: Vec<PoolChange>,
    },
    /// Another group has decided: this group's part is made.
    #[n(17)]
    PartMade {
        #[n(0)]
        crossing: CrossingId,
        #[cbor(n(1), with = "parts")]
        changes: Vec<PoolChange>,
    },
    /// This group's part is not made, and never will be.
    #[n(18)]
    Abandoned {
        #[n(0)]
        crossing: CrossingId,
    },
    /// All other groups have made their parts of what was decided here.
    #[n(19)]
    Told {
        #[n(0)]
        crossing: CrossingId,
    },
    /// The limits of users and directories, and what is used of them ([`crate::quota`]).
    #[n(21)]
    Quotas {
        #[n(0)]
        table: QuotaTable,
    },
}

/// Changes that are parts of another one: those of names alone, so that they hold no further ones.
pub(crate) mod parts {
    use minicbor::decode::Error as DecodeError;
    use minicbor::encode::{Error as EncodeError, Write};
    use minicbor::{Decoder, Encoder};

    use super::PoolChange;

    /// The most of one group.
    const MAX_PARTS: u64 = 8;

    pub(crate) fn encode<C, W: Write>(
        changes: &[PoolChange],
        encoder: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        encoder.array(changes.len() as u64)?;
        for change in changes {
            encoder.bytes(&change.encode())?;
        }
        Ok(())
    }

    pub(crate) fn decode<C>(
        decoder: &mut Decoder<'_>,
        _: &mut C,
    ) -> Result<Vec<PoolChange>, DecodeError> {
        let wrong = DecodeError::message;
        let count = decoder.array()?.filter(|count| *count <= MAX_PARTS);
        let count = count.ok_or_else(|| wrong("a change has fewer parts"))?;
        let one = |bytes: &[u8]| {
            let mut tagged = Decoder::new(bytes);
            tagged.array()?;
            match tagged.u32()? {
                0..=4 => PoolChange::decode(bytes).ok_or_else(|| wrong("a part that is no change")),
                _ => Err(wrong("such a change is no part of another")),
            }
        };
        (0..count).map(|_| one(decoder.bytes()?)).collect()
    }
}

impl PoolChange {
    pub(crate) fn encode(&self) -> Vec<u8> {
        minicbor::to_vec(self).expect("a vector takes everything")
    }

    /// The changes that a member makes for this one, in this order: of a change over several groups its group's part, else this one alone.
    pub(crate) fn parts(&self) -> &[PoolChange] {
        match self {
            PoolChange::Decided { changes, .. } | PoolChange::PartMade { changes, .. } => changes,
            change => std::slice::from_ref(change),
        }
    }

    /// The files that a change of names makes, names or ends, and the names that it gives or takes.
    pub(crate) fn needs(&self) -> (Vec<FileId>, Vec<&PoolPlace>) {
        match self {
            PoolChange::Make { id, at, .. }
            | PoolChange::Link { id, at, .. }
            | PoolChange::Unlink { id, at, .. } => (vec![*id], vec![at]),
            PoolChange::Rename { id, from, to, replaced, .. } => {
                (replaced.iter().chain([id]).copied().collect(), vec![from, to])
            }
            PoolChange::Exchange { id, from, other, to, .. } => (vec![*id, *other], vec![from, to]),
            _ => (Vec::new(), Vec::new()),
        }
    }

    /// Whether it changes the names of a file.
    pub(crate) fn changes_names_of(&self, id: FileId) -> bool {
        self.parts().iter().any(|part| part.needs().0.contains(&id))
    }

    /// Whether a change of names may take room on the disk.
    pub(crate) fn takes_room(&self) -> bool {
        matches!(
            self,
            PoolChange::Make { .. } | PoolChange::Link { .. } | PoolChange::Rename { .. }
        )
    }

    /// The numbers that it gives to files, now or when it is decided.
    pub(crate) fn given_numbers(&self) -> impl Iterator<Item = FileId> {
        let parts = match self {
            PoolChange::Prepared { part, .. } => &part.changes,
            change => change.parts(),
        };
        parts.iter().filter_map(|part| match part {
            PoolChange::Make { id, .. } => Some(*id),
            _ => None,
        })
    }

    /// The call that makes it, if it must be made once, and how that call is answered when the change is made.
    pub(crate) fn done_call(&self) -> Option<(CallOrigin, DoneCall)> {
        if let PoolChange::Decided { changes, .. } = self {
            return changes.iter().find_map(PoolChange::done_call);
        }
        let (by, file) = match self {
            PoolChange::Make {
                birth: FileBirth { what: BirthKind::Referral(to), .. }, by, ..
            } => (by, Some((to.file, to.kind))),
            PoolChange::Make { id, birth, by, .. } => (by, Some((*id, birth.what.kind()))),
            // A directory has no second name; what it is else, its entry says.
            PoolChange::Link { id, by, .. } => (by, Some((*id, FileKind::Regular))),
            PoolChange::Unlink { by, .. }
            | PoolChange::Rename { by, .. }
            | PoolChange::Exchange { by, .. }
            | PoolChange::Extended { by, .. } => (by, None),
            PoolChange::Attributes { .. }
            | PoolChange::Synced { .. }
            | PoolChange::Marked { .. }
            | PoolChange::Verified { .. }
            | PoolChange::AllSynced { .. }
            | PoolChange::Checkpoint { .. }
            | PoolChange::Released { .. }
            | PoolChange::Began { .. }
            | PoolChange::LogBegins
            | PoolChange::Withdrawn { .. }
            | PoolChange::Prepared { .. }
            | PoolChange::Decided { .. }
            | PoolChange::PartMade { .. }
            | PoolChange::Abandoned { .. }
            | PoolChange::Told { .. }
            | PoolChange::Quotas { .. } => return None,
        };
        by.map(|by| (by, DoneCall { file }))
    }

    /// More bytes than it has when it is encoded.
    pub(crate) fn encoded_at_most(&self) -> usize {
        /// The most bytes that the numbers and field headers of a change take.
        const FIXED_BYTES: usize = 256;
        let of_kind = |what: &BirthKind| match what {
            BirthKind::Symlink(target) => target.len(),
            _ => 0,
        };
        FIXED_BYTES
            + match self {
                PoolChange::Make { at, birth, .. } => at.name.len() + of_kind(&birth.what),
                PoolChange::Link { at, .. } | PoolChange::Unlink { at, .. } => at.name.len(),
                PoolChange::Rename { from, to, .. } | PoolChange::Exchange { from, to, .. } => {
                    from.name.len() + to.name.len()
                }
                PoolChange::Extended { name, value, .. } => {
                    name.len() + value.as_ref().map_or(0, Vec::len)
                }
                PoolChange::Synced { kept: marks, .. } | PoolChange::Marked { marks, .. } => {
                    9 * marks.len()
                }
                PoolChange::AllSynced { kept } => {
                    kept.iter().map(|(_, marks)| 20 + 9 * marks.len()).sum()
                }
                PoolChange::Attributes { .. }
                | PoolChange::Verified { .. }
                | PoolChange::Checkpoint { .. }
                | PoolChange::Released { .. }
                | PoolChange::Began { .. }
                | PoolChange::LogBegins
                | PoolChange::Withdrawn { .. }
                | PoolChange::Abandoned { .. }
                | PoolChange::Told { .. } => 0,
                PoolChange::Quotas { table } => 128 * table.rows().len(),
                PoolChange::Prepared { part: CrossingPart { changes, .. }, .. }
                | PoolChange::Decided { changes, .. }
                | PoolChange::PartMade { changes, .. } => {
                    changes.iter().map(PoolChange::encoded_at_most).sum()
                }
            }
    }

    /// Reads a change back; none for bytes that are none.
    pub(crate) fn decode(bytes: &[u8]) -> Option<PoolChange> {
        minicbor::decode(bytes).ok()
    }
}

#[cfg(test)]
mod tests {
    use atoll_key::PeerId;

    use super::*;
    use crate::calls::ClientKey;

    #[test]
    fn changes_read_back_and_the_longest_fits() {
        let long = |fill| PoolPlace::new(FileId(u64::MAX), &[fill; 255]);
        let target = vec![b't'; crate::layout::MAX_TARGET_BYTES];
        let birth = FileBirth {
            what: BirthKind::Symlink(target),
            uid: u32::MAX,
            gid: u32::MAX,
            mode: 0o7777,
            is_listed: true,
            times: Some((FileTime { secs: i64::MIN, nanos: 1 }.into(), FileTime::default().into())),
        };
        let id = FileId(u64::MAX);
        let client = ClientKey::new(&PeerId([1; 32]), &[2; 16]);
        let by = Some(CallOrigin { client, number: u64::MAX, lowest: u64::MAX });
        let crossing = CrossingId(u64::MAX, u64::MAX);
        let rename =
            PoolChange::Rename { id, from: long(b'a'), to: long(b'b'), replaced: Some(id), by };
        let parts = vec![rename; 8];
        let part =
            CrossingPart { coordinator: GroupNumber::FIRST, moves: true, changes: parts.clone() };
        let changes = [
            PoolChange::Make { id, at: long(b'a'), birth, by },
            PoolChange::Link { id, at: long(b'a'), by },
            PoolChange::Unlink { id, at: long(b'a'), by },
            PoolChange::Rename { id, from: long(b'a'), to: long(b'b'), replaced: Some(id), by },
            PoolChange::Rename { id, from: long(b'a'), to: long(b'b'), replaced: None, by },
            PoolChange::Exchange { id, from: long(b'a'), other: id, to: long(b'b'), by },
            PoolChange::Attributes {
                id,
                mode: Some(1),
                uid: None,
                gid: Some(2),
                atime: Some(NewTime::Now(FileTime::default().into())),
                mtime: None,
            },
            PoolChange::Extended { id, name: vec![b'n'; 255], value: Some(vec![0; 64 << 10]), by },
            PoolChange::Extended { id, name: b"user.n".to_vec(), value: None, by },
            PoolChange::Extended { id, name: b"user.n".to_vec(), value: None, by: None },
            PoolChange::Synced { id, upto: u64::MAX, kept: vec![u64::MAX; 256] },
            PoolChange::Marked { id, marks: vec![u64::MAX; 256] },
            PoolChange::Verified { id, digest: [0xff; 32] },
            PoolChange::AllSynced { kept: vec![(id, vec![u64::MAX; 3]); 256] },
            PoolChange::Checkpoint { sequence: u64::MAX, boot: u64::MAX, order: u64::MAX },
            PoolChange::Withdrawn { order: u64::MAX },
            PoolChange::Released { order: u64::MAX },
            PoolChange::Began { epoch: u64::MAX },
            PoolChange::LogBegins,
            PoolChange::Abandoned { crossing },
            PoolChange::Told { crossing },
            PoolChange::Quotas { table: crate::quota::largest() },
            PoolChange::Prepared { crossing, part },
            PoolChange::PartMade { crossing, changes: parts.clone() },
            PoolChange::Decided { crossing, groups: vec![GroupNumber::FIRST; 64], changes: parts },
        ];
        for change in changes {
            let bytes = change.encode();
            assert!(bytes.len() <= MAX_CHANGE_BYTES, "{} bytes", bytes.len());
            assert_eq!(PoolChange::decode(&bytes), Some(change));
            assert_eq!(PoolChange::decode(&bytes[..bytes.len() - 1]), None);
        }
    }

    /// However deep somebody nests them.
    #[test]
    fn a_change_is_no_part_of_a_part() {
        let crossing = CrossingId(1, 2);
        let mut change =
            PoolChange::Link { id: FileId(7), at: PoolPlace::new(FileId(1), b"a"), by: None };
        for is_sound in [true, false, false] {
            change = PoolChange::PartMade { crossing, changes: vec![change] };
            assert_eq!(PoolChange::decode(&change.encode()).is_some(), is_sound);
        }
    }

    /// Records as they were before changes had calls: tag, and an array of as many fields.
    #[test]
    fn a_change_that_no_call_makes_is_as_short_as_ever() {
        let (id, at, by) = (FileId(7), PoolPlace::new(FileId(1), b"a"), None);
        let place = [0x82, 0x01, 0x41, b'a'];
        let link = PoolChange::Link { id, at: at.clone(), by };
        assert_eq!(link.encode(), [&[0x82, 0x01, 0x82, 0x07][..], &place].concat());
        let rename =
            PoolChange::Rename { id, from: at.clone(), to: at.clone(), replaced: None, by };
        let bytes = [&[0x82, 0x03, 0x83, 0x07][..], &place, &place].concat();
        assert_eq!(rename.encode(), bytes);
        let removed = PoolChange::Extended { id, name: b"a".to_vec(), value: None, by };
        assert_eq!(removed.encode(), [0x82, 0x09, 0x82, 0x07, 0x41, b'a']);
        for change in [link, rename, removed] {
            assert_eq!(PoolChange::decode(&change.encode()), Some(change));
        }
    }
}
