//! What a primary and its backups say to each other, as bytes (`docs/design/pool.md`): CBOR headers, bytes of files beside them.
//!
//! Methods `0x0500` to `0x0503`, `0x0506` and `0x0508` to `0x050f` (`0x0504`, `0x0505` and `0x0507` are [`crate::map`]'s). A member answers members of its pool alone, and
//! begins a session only with one that is the primary of a map that is no older than the one it knows. The headers of all calls of the
//! family `0x05` begin with
//! the 16 bytes that name the pool, for a node may have members of several ([`crate::routing`]).

mod quotas;
mod scrub;

use atoll_key::PeerId;
use atoll_net::Peer;
use atoll_vfs::{FileKind, check_name};
use bytes::Bytes;
use minicbor::{Decode, Encode};

use crate::change::{
    BirthKind, CrossingId, CrossingPart, FileBirth, MAX_CHANGE_BYTES, PoolChange, PoolPlace,
};
use crate::crossings::CrossingRecord;
use crate::layout::{FileId, kind_letter};
use crate::locks::{self, LockPlace};
use crate::members::PoolMembers;
use crate::pool_map::PoolMap;
use crate::quota::QuotaTable;
use crate::roster::RosterEdit;
use crate::witnesses::Witness;

pub(crate) use self::quotas::{QUOTAS, QuotaCall, QuotaReply};
pub(crate) use self::scrub::{
    CHECK, MAX_LOOK_RANGES, MAX_LOOKS, NamesOutcome, RestoreStep, SCRUB, ScrubAsk, ScrubCall,
    ScrubReply,
};

/// Asks a backup where it stands.
pub(crate) const HELLO: u16 = 0x0500;
/// Begins a session with it.
pub(crate) const BEGIN: u16 = 0x0501;
/// Hands it one change, or bytes of a file.
pub(crate) const ITEM: u16 = 0x0502;
/// Says up to where changes are made.
pub(crate) const BEAT: u16 = 0x0503;

/// Asks the primary that a member comes or goes.
pub(crate) const EDIT: u16 = 0x0506;
/// What the primary of one group asks that of another.
pub(crate) const CROSSING: u16 = 0x050a;
/// Asks a member of a group, or any machine of the pool about its first one, for the newest map that it knows: no header, and the answer is
/// the map.
pub(crate) const MAP: u16 = 0x050b;
/// Asks a node without files whether it is there: the header is the newest map.
pub(crate) const WITNESS: u16 = 0x050f;
/// Has a member discard its files, to be given all of them.
pub(crate) const COPY: u16 = 0x0508;
/// Hands it names, and what goes with them.
pub(crate) const COPY_BATCH: u16 = 0x0509;

/// The most bytes of a file in one message.
pub(crate) const MAX_ITEM_BYTES: usize = 1 << 20;
/// The longest extended attribute, and the longest list of their names (Linux `XATTR_SIZE_MAX`, `XATTR_LIST_MAX`), bytes.
const MAX_XATTR_BYTES: usize = 64 << 10;
/// Extended attributes that begin so are Atoll's own.
pub(crate) const OWN_ATTRIBUTES: &[u8] = b"trusted.atoll.";

/// Refusals of a backup, beside those of the network.
pub(crate) mod refused {
    /// There is no such session: the primary begins another one.
    pub(crate) const NO_SESSION: u16 = 100;
    /// Its disk failed, or is not as it should be.
    pub(crate) const DISK: u16 = 101;
    /// The caller is no member, or not the primary any more: there is a newer map, or this member has proposed one.
    pub(crate) const NOT_PRIMARY: u16 = 102;
    /// It has made changes that the primary does not know.
    pub(crate) const PRIMARY_IS_OLDER: u16 = 103;
    /// The caller is no member, or no voter, of the pool.
    pub(crate) const NOT_A_MEMBER: u16 = 104;
    /// A call of the file system may have been made, but another member may be the primary by now.
    pub(crate) const UNCONFIRMED: u16 = 105;
    /// Who the members are cannot be changed so.
    pub(crate) const EDIT: u16 = 106;
    /// The pool has no such group.
    pub(crate) const NO_GROUP: u16 = 108;
    /// Its disk does not do what is asked of a copy.
    pub(crate) const COPY: u16 = 109;
    /// The primary leaves its part to another member first: it is to be asked again.
    pub(crate) const HANDS_OVER: u16 = 107;
}

/// One connection of a primary's run and a backup's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct GroupSession {
    /// Greater than that of any session of the backup's run before; the first is 1.
    #[n(0)]
    pub(crate) number: u64,
    /// The primary's run: random bits, others at each start.
    #[n(1)]
    pub(crate) primary_run: u64,
    /// The backup's run.
    #[n(2)]
    pub(crate) backup_run: u64,
}

/// Where a backup stands.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct HelloReply {
    #[n(0)]
    pub(crate) run: u64,
    /// The number of the last session of this run; 0 if there was none: it may have missed things since it was a member.
    #[n(1)]
    pub(crate) session: u64,
    /// The last change that it has durably.
    #[n(2)]
    pub(crate) last: u64,
    /// The epoch of that one.
    #[n(4)]
    pub(crate) last_epoch: u64,
    /// The newest epochs of its log, oldest first: the first change of each, and the epoch.
    #[n(9)]
    pub(crate) epochs: Vec<(u64, u64)>,
    /// The last change that it has made.
    #[n(3)]
    pub(crate) applied: u64,
    /// None if it is complete, whatever it may have missed since.
    #[n(8)]
    pub(crate) copying: Option<CopyStage>,
}

/// How far a member is that is given all files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum CopyStage {
    /// It may have any of the names: they are copied anew.
    #[n(0)]
    Names,
    /// It has all names, and the bytes of some files.
    #[n(1)]
    Bytes(#[n(0)] CopiedBytes),
}

/// How far a member is that has all names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct CopiedBytes {
    /// The change as of which it has them.
    #[n(0)]
    pub(crate) order: u64,
    /// It has the bytes of all files up to this one, durably.
    #[n(1)]
    pub(crate) upto: u64,
    /// Of how many files.
    #[n(2)]
    pub(crate) done: CopyAmount,
    /// And of how many there were.
    #[n(3)]
    pub(crate) all: CopyAmount,
}

/// An amount of regular files.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct CopyAmount {
    #[n(0)]
    pub(crate) files: u64,
    #[n(1)]
    pub(crate) bytes: u64,
}

/// A member discards its files: it is given all.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct BeginCopy {
    #[n(0)]
    pub(crate) session: GroupSession,
    /// The map by which the caller is the primary.
    #[n(1)]
    pub(crate) map: PoolMap,
    /// The change as of which it is given the names.
    #[n(2)]
    pub(crate) order: u64,
    /// The first change of that one's epoch, and the epoch.
    #[n(3)]
    pub(crate) epoch: (u64, u64),
    /// The next number for a file.
    #[n(4)]
    pub(crate) next: u64,
    /// Room that the caller's disk has used, bytes.
    #[n(5)]
    pub(crate) used_bytes: u64,
}

/// A part of what it is given; a [`CopyBatch`] goes beside it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct CopyHeader {
    #[n(0)]
    pub(crate) session: GroupSession,
    /// Counts batches of the session; the first is 1. The next is sent when the one before was answered.
    #[n(1)]
    pub(crate) number: u64,
}

/// A batch is no longer, bytes, unless a single entry is.
pub(crate) const MAX_BATCH_BYTES: usize = 256 << 10;

/// Marks of a file.
pub(crate) type CopiedMarks = (FileId, Vec<u64>);

#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum CopyBatch {
    /// Files and what they have, as changes that make them.
    #[n(0)]
    Files(#[n(0)] Vec<PoolChange>),
    /// Marks that files have.
    #[n(1)]
    Marks(#[n(0)] Vec<CopiedMarks>),
    /// Marks that they had since all members had everything.
    #[n(2)]
    Remembered(#[n(0)] Vec<CopiedMarks>),
    /// The last calls of a client: its key, its record ([`crate::calls`]).
    #[n(3)]
    Calls(
        #[cbor(n(0), with = "minicbor::bytes")] Vec<u8>,
        #[cbor(n(1), with = "minicbor::bytes")] Vec<u8>,
    ),
    /// A change over several groups that waits for something.
    #[n(5)]
    Crossing(#[n(0)] CrossingRecord),
    /// Limits of users and directories ([`crate::quota`]).
    #[n(6)]
    Quotas(#[n(0)] QuotaTable),
    /// That was all; so many regular files there are.
    #[n(4)]
    End(#[n(0)] CopyAmount),
}

impl CopyBatch {
    /// Whether it is as a batch may be: changes that make files, with names and attributes that can be.
    pub(crate) fn is_sound(&self) -> bool {
        match self {
            CopyBatch::Files(changes) => changes.iter().all(is_making),
            CopyBatch::Marks(_) | CopyBatch::Remembered(_) | CopyBatch::Crossing(_) => true,
            CopyBatch::Quotas(_) => true,
            CopyBatch::Calls(key, _) => key.len() == 16,
            CopyBatch::End(_) => true,
        }
    }
}

/// Whether a change is one of those by which a file is made that was there before.
fn is_making(change: &PoolChange) -> bool {
    let is_name = |name: &[u8]| check_name(name).is_ok();
    match change {
        PoolChange::Make { id, at, birth, by: None } => {
            !id.is_fixed() && is_name(&at.name) && birth.mode <= 0o7777 && !birth.is_listed
        }
        PoolChange::Link { id, at, by: None } => !id.is_fixed() && is_name(&at.name),
        PoolChange::Extended { name, value: Some(_), by: None, .. } => is_attribute(name),
        PoolChange::Attributes { mode, .. } => mode.is_none_or(|mode| mode <= 0o7777),
        _ => false,
    }
}

/// Whether a file may have an extended attribute of this name, as far as others than Atoll are to know.
fn is_attribute(name: &[u8]) -> bool {
    (1..=255).contains(&name.len()) && !name.contains(&0) && !name.starts_with(OWN_ATTRIBUTES)
}

#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct BeginSession {
    #[n(0)]
    pub(crate) session: GroupSession,
    /// The map by which the caller is the primary.
    #[n(4)]
    pub(crate) map: PoolMap,
    /// The last change that both have: those after it were never answered.
    #[n(1)]
    pub(crate) last: u64,
    /// The last change that is to be made.
    #[n(2)]
    pub(crate) released: u64,
    /// Changes that the backup has, and that were withdrawn by changes which it lacks.
    #[n(3)]
    pub(crate) withdrawn: Vec<u64>,
}

/// What is handed to a backup.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum ItemKind {
    /// A change to keep until it is released.
    #[n(0)]
    Append {
        #[n(0)]
        order: u64,
        /// A [`crate::change::PoolChange`].
        #[cbor(n(1), with = "minicbor::bytes")]
        change: Vec<u8>,
    },
    /// Bytes of a file, which was made by change `after` at the latest.
    #[n(1)]
    Write {
        #[n(0)]
        id: FileId,
        #[n(1)]
        after: u64,
        #[n(2)]
        offset: u64,
    },
    /// The length of a file.
    #[n(2)]
    SetLength {
        #[n(0)]
        id: FileId,
        #[n(1)]
        after: u64,
        #[n(2)]
        size_bytes: u64,
    },
    /// `fallocate(2)`.
    #[n(3)]
    Allocate {
        #[n(0)]
        id: FileId,
        #[n(1)]
        after: u64,
        #[n(2)]
        mode: i32,
        #[n(3)]
        offset: u64,
        #[n(4)]
        len: u64,
    },
    /// Makes a file durable.
    #[n(4)]
    Sync {
        #[n(0)]
        id: FileId,
        #[n(1)]
        after: u64,
        /// Modification time of the file on the primary: seconds since 1970, nanoseconds.
        #[n(2)]
        mtime: (i64, u32),
    },
    /// A range of a file as the primary has it, and the file's length.
    #[n(5)]
    Mend {
        #[n(0)]
        id: FileId,
        #[n(1)]
        after: u64,
        #[n(2)]
        offset: u64,
        #[n(3)]
        size_bytes: u64,
        /// As with [`ItemKind::Sync`]: writing what was there already changes it.
        #[n(4)]
        mtime: (i64, u32),
    },
    /// Makes all files durable.
    #[n(6)]
    SyncAll {
        #[n(0)]
        after: u64,
    },
    /// Changes of locks, as bytes beside it ([`crate::locks`]).
    #[n(7)]
    Locks(#[n(0)] LockPlace),
    /// Bytes of a file that is copied, and its length. A file that is not there is passed over.
    #[n(16)]
    Copy {
        #[n(0)]
        id: FileId,
        #[n(1)]
        offset: u64,
        #[n(2)]
        size_bytes: u64,
        /// As with [`ItemKind::Mend`].
        #[n(3)]
        mtime: (i64, u32),
    },
    /// All files up to this one are copied, so many: makes them durable, and notes it.
    #[n(17)]
    CopiedUpto {
        #[n(0)]
        id: FileId,
        #[n(1)]
        done: CopyAmount,
    },
    /// A file has the extended attributes of these names and no others: names, each with a NUL behind it.
    #[n(18)]
    XattrNames {
        #[n(0)]
        id: FileId,
        #[n(1)]
        after: u64,
    },
    /// An extended attribute of a file.
    #[n(19)]
    Xattr {
        #[n(0)]
        id: FileId,
        #[n(1)]
        after: u64,
        #[cbor(n(2), with = "minicbor::bytes")]
        name: Vec<u8>,
    },
    /// A file's other attributes: the modification time of a directory is each member's own.
    #[n(20)]
    State {
        #[n(0)]
        id: FileId,
        #[n(1)]
        after: u64,
        #[n(2)]
        mode: u32,
        #[n(3)]
        uid: u32,
        #[n(4)]
        gid: u32,
        #[n(5)]
        mtime: (i64, u32),
    },
    /// The member has everything, durably.
    #[n(21)]
    Complete,
}

#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct ItemHeader {
    #[n(0)]
    pub(crate) session: GroupSession,
    /// Counts items of the session.
    #[n(1)]
    pub(crate) number: u64,
    /// All items before this one are answered.
    #[n(2)]
    pub(crate) answered: u64,
    #[n(3)]
    pub(crate) released: u64,
    #[n(4)]
    pub(crate) what: ItemKind,
    /// All members have the bytes of all items before this one.
    #[n(5)]
    pub(crate) settled: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct Beat {
    #[n(0)]
    pub(crate) session: GroupSession,
    #[n(1)]
    pub(crate) released: u64,
    /// The map by which the caller is the primary, until it is known that the member has it.
    #[n(2)]
    pub(crate) map: Option<PoolMap>,
    /// Counts beats of the caller; the member keeps when it got the last ones.
    #[n(3)]
    pub(crate) number: u64,
    /// As in [`ItemHeader`].
    #[n(4)]
    pub(crate) settled: u64,
    /// By which the member may answer reads.
    #[n(5)]
    pub(crate) lease: Option<ReadLease>,
}

/// The right to answer reads: from the moment at which the member got one of its beats, for a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct ReadLease {
    /// A beat of this session that the caller had the answer to before it sent this one.
    #[n(0)]
    pub(crate) since: u64,
    /// How long the caller's own lease lasted when it sent this beat, milliseconds.
    #[n(1)]
    pub(crate) remaining_ms: u16,
    /// The run of the server whose clients may be answered ([`crate::remote`]).
    #[n(2)]
    pub(crate) boot: u64,
}

/// What stands under a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct FoundName {
    /// The file under that name: a referral, if it is one of another group.
    #[n(0)]
    pub(crate) id: FileId,
    /// The file that it stands for.
    #[n(1)]
    pub(crate) file: FileId,
    /// What that is.
    #[cbor(n(2), with = "kind_letter")]
    pub(crate) kind: FileKind,
    /// How deep a referral says that it lies ([`crate::layout::Referral`]).
    #[n(3)]
    pub(crate) depth: u8,
}

/// What the primary of one group asks that of another ([`crate::crossings`]).
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum CrossingCall {
    /// What stands under a name.
    #[n(0)]
    Look {
        #[n(0)]
        place: PoolPlace,
    },
    /// A new number for a file in a directory.
    #[n(6)]
    Number {
        #[n(0)]
        parent: FileId,
    },
    /// What a file is.
    #[n(1)]
    Kind {
        #[n(0)]
        id: FileId,
    },
    /// Which directories are above a file.
    #[n(2)]
    Above {
        #[n(0)]
        id: FileId,
    },
    /// Prepares a part.
    #[n(3)]
    Prepare {
        #[n(0)]
        crossing: CrossingId,
        #[n(1)]
        part: CrossingPart,
    },
    /// What became of a part.
    #[n(4)]
    Outcome {
        #[n(0)]
        crossing: CrossingId,
        #[n(1)]
        is_made: bool,
    },
    /// Asks what became of it.
    #[n(5)]
    Ask {
        #[n(0)]
        crossing: CrossingId,
    },
}

/// The answer.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum CrossingReply {
    #[n(0)]
    Done,
    /// What stands there, and a number for a referral of that directory.
    #[n(1)]
    Found {
        #[n(0)]
        found: Option<FoundName>,
        #[n(1)]
        fresh: FileId,
    },
    #[n(2)]
    Kind(#[cbor(n(0), with = "kind_letter")] FileKind),
    #[n(5)]
    Number(#[n(0)] FileId),
    /// The file itself if it is a directory, then those above it; and the referral to the last one in another group, none if that is the
    /// root.
    #[n(3)]
    Above {
        #[n(0)]
        directories: Vec<FileId>,
        #[n(1)]
        via: Option<FileId>,
    },
    /// Whether it is made; none if that is not decided.
    #[n(4)]
    Outcome(#[n(0)] Option<bool>),
}

/// A change of who the members of a pool are. The answer is the map that was decided.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum PoolEdit {
    /// Another member, or one that listens elsewhere by now.
    #[n(0)]
    Enrol(#[cbor(n(0), with = "crate::members::peer")] Peer),
    /// A member goes: it need not be there.
    #[n(1)]
    Remove(#[cbor(n(0), with = "crate::members::peer_key")] PeerId),
    /// The pool's other groups: of its first group alone.
    #[n(2)]
    Roster(#[n(0)] RosterEdit),
    /// Another node without files, or one in another incarnation or that listens elsewhere by now. [`PoolEdit::Remove`] is for these, too.
    #[n(3)]
    Witness(#[n(0)] Witness),
}

/// Answers the primary that this node without files is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct WitnessReply {
    #[n(0)]
    pub(crate) incarnation: u64,
    /// Of the newest map of the group that it knows.
    #[n(1)]
    pub(crate) epoch: u64,
}

/// The answer to items and beats.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct BackupReport {
    /// Room on its disk, bytes.
    #[n(0)]
    pub(crate) free_bytes: u64,
    /// The size of its disk, or of its part of it, bytes.
    #[n(2)]
    pub(crate) size_bytes: u64,
    /// The last change that it has made.
    #[n(1)]
    pub(crate) applied: u64,
}

pub(crate) fn encode(message: &impl Encode<()>) -> Bytes {
    Bytes::from(minicbor::to_vec(message).expect("a vector takes everything"))
}

/// Reads a message; none for bytes that are none, or that have something after it.
pub(crate) fn decode<'b, T: Decode<'b, ()>>(bytes: &'b [u8]) -> Option<T> {
    let mut decoder = minicbor::Decoder::new(bytes);
    let message = decoder.decode().ok()?;
    (decoder.position() == bytes.len()).then_some(message)
}

impl ItemKind {
    /// Whether lengths are as they may be, with so many bytes beside it.
    pub(crate) fn is_sound(&self, bytes: usize) -> bool {
        let fits = |offset: &u64, len: u64| {
            offset.checked_add(len).is_some_and(|end| end <= i64::MAX as u64)
        };
        match self {
            ItemKind::Append { change, .. } => change.len() <= MAX_CHANGE_BYTES && bytes == 0,
            ItemKind::Write { offset, .. } | ItemKind::Mend { offset, .. } => {
                bytes <= MAX_ITEM_BYTES && fits(offset, bytes as u64)
            }
            ItemKind::Allocate { offset, len, .. } => bytes == 0 && fits(offset, *len),
            ItemKind::SetLength { size_bytes, .. } => bytes == 0 && fits(size_bytes, 0),
            ItemKind::Sync { .. }
            | ItemKind::SyncAll { .. }
            | ItemKind::CopiedUpto { .. }
            | ItemKind::Complete => bytes == 0,
            ItemKind::Copy { offset, size_bytes, .. } => {
                bytes <= MAX_ITEM_BYTES
                    && fits(size_bytes, 0)
                    && offset.checked_add(bytes as u64).is_some_and(|end| end <= *size_bytes)
            }
            ItemKind::XattrNames { .. } => bytes <= MAX_XATTR_BYTES,
            ItemKind::Xattr { name, .. } => bytes <= MAX_XATTR_BYTES && is_attribute(name),
            ItemKind::State { mode, .. } => bytes == 0 && *mode <= 0o7777,
            ItemKind::Locks(_) => bytes <= MAX_ITEM_BYTES,
        }
    }

    /// Whether it may change what is read of a file.
    pub(crate) fn changes_bytes(&self) -> bool {
        matches!(
            self,
            ItemKind::Write { .. }
                | ItemKind::SetLength { .. }
                | ItemKind::Allocate { .. }
                | ItemKind::Mend { .. }
                | ItemKind::Copy { .. }
        )
    }

    /// The file that it is about.
    pub(crate) fn file(&self) -> Option<FileId> {
        match self {
            ItemKind::Write { id, .. }
            | ItemKind::SetLength { id, .. }
            | ItemKind::Allocate { id, .. }
            | ItemKind::Sync { id, .. }
            | ItemKind::Mend { id, .. }
            | ItemKind::Copy { id, .. }
            | ItemKind::XattrNames { id, .. }
            | ItemKind::Xattr { id, .. }
            | ItemKind::State { id, .. } => Some(*id),
            ItemKind::Append { .. }
            | ItemKind::SyncAll { .. }
            | ItemKind::CopiedUpto { .. }
            | ItemKind::Complete
            | ItemKind::Locks(_) => None,
        }
    }

    /// The change that is to be made before.
    pub(crate) fn after(&self) -> u64 {
        match self {
            ItemKind::Write { after, .. }
            | ItemKind::SetLength { after, .. }
            | ItemKind::Allocate { after, .. }
            | ItemKind::Sync { after, .. }
            | ItemKind::Mend { after, .. }
            | ItemKind::XattrNames { after, .. }
            | ItemKind::Xattr { after, .. }
            | ItemKind::State { after, .. }
            | ItemKind::SyncAll { after } => *after,
            ItemKind::Append { .. }
            | ItemKind::Copy { .. }
            | ItemKind::CopiedUpto { .. }
            | ItemKind::Complete
            | ItemKind::Locks(_) => 0,
        }
    }
}

/// For fuzzing: whether bytes are some message between members, a change that one carries included.
pub fn is_member_message(bytes: &[u8]) -> bool {
    let is_item = decode::<ItemHeader>(bytes).is_some_and(|header| match &header.what {
        ItemKind::Append { change, .. } => PoolChange::decode(change).is_some(),
        what => what.is_sound(0),
    });
    is_item
        || locks::decode(bytes).is_some()
        || decode::<BeginSession>(bytes).is_some()
        || decode::<Beat>(bytes).is_some()
        || decode::<PoolEdit>(bytes).is_some()
        || decode::<WitnessReply>(bytes).is_some()
        || decode::<HelloReply>(bytes).is_some()
        || decode::<BackupReport>(bytes).is_some()
        || decode::<BeginCopy>(bytes).is_some()
        || decode::<CopyHeader>(bytes).is_some()
        || decode::<CopyBatch>(bytes).is_some_and(|batch| batch.is_sound())
        || decode::<ScrubCall>(bytes).is_some_and(|call| call.ask.is_sound(0))
        || decode::<ScrubReply>(bytes).is_some()
        || decode::<QuotaCall>(bytes).is_some_and(|call| call.is_sound())
        || decode::<QuotaReply>(bytes).is_some()
}

/// For fuzzing: some such messages.
pub fn example_member_messages() -> Vec<Vec<u8>> {
    let session = GroupSession { number: 1, primary_run: 2, backup_run: 3 };
    let peer = |n: u8| Peer { id: PeerId([n; 32]), addr: ([10, 0, 0, n], 4711).into() };
    let members = PoolMembers::new(vec![peer(1), peer(2)]).expect("two members");
    let map = PoolMap { epoch: 4, run: 5, verifier: 1, ..PoolMap::first(&members) };
    let change = PoolChange::Marked { id: FileId(7), marks: vec![0, 1] }.encode();
    let kinds = [
        ItemKind::Append { order: 9, change },
        ItemKind::Write { id: FileId(7), after: 9, offset: 1 << 20 },
        ItemKind::Sync { id: FileId(7), after: 9, mtime: (-1, 5) },
        ItemKind::Locks(LockPlace { sequence: 4, last_session: 2, is_whole: true }),
        ItemKind::Copy { id: FileId(7), offset: 0, size_bytes: 3 << 20, mtime: (-1, 5) },
        ItemKind::CopiedUpto { id: FileId(7), done: CopyAmount { files: 2, bytes: 5 << 20 } },
        ItemKind::Xattr { id: FileId(7), after: 9, name: b"user.name".to_vec() },
        ItemKind::State { id: FileId(7), after: 9, mode: 0o644, uid: 1, gid: 2, mtime: (3, 4) },
        ItemKind::Complete,
    ];
    let item = |what| ItemHeader { session, number: 4, answered: 3, released: 8, what, settled: 3 };
    let mut messages: Vec<Vec<u8>> =
        kinds.into_iter().map(|what| encode(&item(what)).to_vec()).collect();
    let begin =
        BeginSession { session, map: map.clone(), last: 9, released: 8, withdrawn: vec![5] };
    messages.push(encode(&begin).to_vec());
    let lease = Some(ReadLease { since: 4, remaining_ms: 240, boot: 6 });
    for (map, lease) in [(Some(map.clone()), None), (None, None), (None, lease)] {
        let beat = Beat { session, released: 8, map, number: 5, settled: 3, lease };
        messages.push(encode(&beat).to_vec());
    }
    messages.push(encode(&PoolEdit::Enrol(peer(3))).to_vec());
    messages.push(encode(&PoolEdit::Remove(peer(2).id)).to_vec());
    let witness = Witness { peer: peer(5), incarnation: 6 };
    messages.push(encode(&PoolEdit::Witness(witness)).to_vec());
    messages.push(encode(&WitnessReply { incarnation: 6, epoch: 4 }).to_vec());
    messages.push(encode(&PoolEdit::Roster(RosterEdit::Begin(peer(4)))).to_vec());
    messages.push(encode(&PoolEdit::Roster(RosterEdit::Copies(2))).to_vec());
    let amount = CopyAmount { files: 2, bytes: 9 };
    let copied = CopiedBytes { order: 5, upto: 7, done: CopyAmount::default(), all: amount };
    let copying = Some(CopyStage::Bytes(copied));
    let epochs = vec![(1, 2), (3, 4)];
    let hello =
        HelloReply { run: 1, session: 2, last: 3, last_epoch: 4, epochs, applied: 3, copying };
    messages.push(encode(&hello).to_vec());
    let (epoch, next, used_bytes) = ((1, 4), 99, 1 << 30);
    let begin = BeginCopy { session, map, order: 9, epoch, next, used_bytes };
    messages.push(encode(&begin).to_vec());
    messages.push(encode(&CopyHeader { session, number: 1 }).to_vec());
    messages.extend(quotas::examples());
    messages.extend(scrub::examples(session));
    let at = PoolPlace::new(FileId::ROOT, b"name");
    let (what, times) = (BirthKind::Symlink(b"target".to_vec()), None);
    let birth = FileBirth { what, uid: 1, gid: 2, mode: 0o777, is_listed: false, times };
    let files = vec![
        PoolChange::Make { id: FileId(7), at: at.clone(), birth, by: None },
        PoolChange::Link { id: FileId(7), at, by: None },
    ];
    let batches = [
        CopyBatch::Files(files),
        CopyBatch::Marks(vec![(FileId(7), vec![0, u64::MAX])]),
        CopyBatch::Calls(vec![3; 16], vec![4; 33]),
        CopyBatch::Quotas(QuotaTable::default()),
        CopyBatch::End(amount),
    ];
    messages.extend(batches.iter().map(|batch| encode(batch).to_vec()));
    messages.push(locks::encode_whole(&locks::example()).to_vec());
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_read_back_and_what_is_cut_off_is_none() {
        let session = GroupSession { number: u64::MAX, primary_run: 1, backup_run: 2 };
        let what = ItemKind::Sync { id: FileId(3), after: 4, mtime: (i64::MIN, 5) };
        let header = ItemHeader { session, number: 1, answered: 1, released: 9, what, settled: 1 };
        let bytes = encode(&header);
        assert_eq!(decode::<ItemHeader>(&bytes), Some(header));
        for len in 0..bytes.len() {
            assert_eq!(decode::<ItemHeader>(&bytes[..len]), None);
        }
        assert_eq!(decode::<ItemHeader>(&[&bytes[..], &[0]].concat()), None);
    }

    #[test]
    fn lengths_that_cannot_be_are_refused() {
        let write = |offset| ItemKind::Write { id: FileId(1), after: 0, offset };
        assert!(write(0).is_sound(MAX_ITEM_BYTES));
        assert!(!write(0).is_sound(MAX_ITEM_BYTES + 1));
        assert!(!write(i64::MAX as u64).is_sound(1));
        assert!(!write(u64::MAX).is_sound(1));
        let append = ItemKind::Append { order: 1, change: vec![0; MAX_CHANGE_BYTES + 1] };
        assert!(!append.is_sound(0));
        let copy = |offset, size_bytes| ItemKind::Copy {
            id: FileId(1),
            offset,
            size_bytes,
            mtime: (0, 0),
        };
        assert!(copy(5, 7).is_sound(2));
        assert!(!copy(5, 7).is_sound(3));
        assert!(!copy(u64::MAX, u64::MAX).is_sound(0));
        let xattr = |name: &[u8]| ItemKind::Xattr { id: FileId(1), after: 0, name: name.to_vec() };
        assert!(xattr(b"user.a").is_sound(64 << 10));
        assert!(!xattr(b"user.a").is_sound((64 << 10) + 1));
        assert!(!xattr(b"trusted.atoll.id").is_sound(8));
        assert!(!xattr(b"").is_sound(8));
    }

    #[test]
    fn a_batch_makes_files_and_does_nothing_else() {
        let at = |name: &[u8]| PoolPlace::new(FileId(5), name);
        let make = |id, name: &[u8], mode, is_listed| {
            let (what, times) = (BirthKind::Regular, None);
            let birth = FileBirth { what, uid: 0, gid: 0, mode, is_listed, times };
            PoolChange::Make { id: FileId(id), at: at(name), birth, by: None }
        };
        let is_sound = |change| CopyBatch::Files(vec![change]).is_sound();
        assert!(is_sound(make(7, b"name", 0o644, false)));
        for name in [&b""[..], b".", b"..", b"a/b", b"a\0", &[b'n'; 256]] {
            assert!(!is_sound(make(7, name, 0o644, false)), "{name:?}");
            assert!(!is_sound(PoolChange::Link { id: FileId(7), at: at(name), by: None }));
        }
        assert!(!is_sound(make(1, b"name", 0o644, false)), "the root");
        assert!(!is_sound(make(7, b"name", 0o10644, false)));
        assert!(!is_sound(make(7, b"name", 0o644, true)));
        let extended = |name: &[u8], value: Option<&[u8]>| PoolChange::Extended {
            id: FileId(7),
            name: name.to_vec(),
            value: value.map(<[u8]>::to_vec),
            by: None,
        };
        assert!(is_sound(extended(b"user.a", Some(b"value"))));
        assert!(!is_sound(extended(b"user.a", None)));
        assert!(!is_sound(extended(b"trusted.atoll.id", Some(b"value"))));
        assert!(!is_sound(PoolChange::Unlink { id: FileId(7), at: at(b"name"), by: None }));
        assert!(!is_sound(PoolChange::LogBegins));
        assert!(!CopyBatch::Calls(vec![1; 15], Vec::new()).is_sound());
    }

    #[test]
    fn what_is_an_example_is_a_message_and_what_is_cut_off_is_none() {
        for message in example_member_messages() {
            assert!(is_member_message(&message), "{message:x?}");
            for len in 0..message.len() {
                assert!(!is_member_message(&message[..len]), "{message:x?} up to {len}");
            }
        }
    }
}
