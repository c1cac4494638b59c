//! What the primary asks a member about its copies of files, and has it do to them ([`crate::scrub`]).

use minicbor::{Decode, Encode};

use super::{GroupSession, MAX_ITEM_BYTES, MAX_XATTR_BYTES, is_attribute};
use crate::change::FileBirth;
use crate::layout::FileId;
use crate::scrub::{CopyLook, FileLook, LookAt};

/// What the primary asks a member about its copies of files ([`crate::scrub`]).
pub(crate) const SCRUB: u16 = 0x050c;
/// Asks a group's primary how far its scrub is, or to begin one: the header is a CBOR bool, the answer a
/// [`ScrubReport`](crate::ScrubReport).
pub(crate) const CHECK: u16 = 0x050d;
/// A step of making a file again; one file of a member is, at a time.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum RestoreStep {
    /// Makes it, empty, beside the tree, if there is room for so many bytes.
    #[n(0)]
    Begin {
        #[n(0)]
        birth: FileBirth,
        #[n(1)]
        size_bytes: u64,
    },
    /// Bytes of it, beside this.
    #[n(1)]
    Bytes {
        #[n(0)]
        offset: u64,
    },
    /// An extended attribute.
    #[n(2)]
    Xattr {
        #[cbor(n(0), with = "minicbor::bytes")]
        name: Vec<u8>,
    },
    /// It has everything: it is made durable, with this length.
    #[n(3)]
    Finish {
        #[n(0)]
        birth: FileBirth,
        #[n(1)]
        size_bytes: u64,
    },
    /// It gets its names.
    #[n(4)]
    End(#[n(0)] FileBirth),
    /// It is not made again after all.
    #[n(5)]
    GiveUp,
}

impl RestoreStep {
    fn is_sound(&self, bytes: usize) -> bool {
        let fits = |end: Option<u64>| end.is_some_and(|end| end <= i64::MAX as u64);
        match self {
            RestoreStep::End(birth) => bytes == 0 && birth.mode <= 0o7777,
            RestoreStep::GiveUp => bytes == 0,
            RestoreStep::Bytes { offset } => {
                bytes <= MAX_ITEM_BYTES && fits(offset.checked_add(bytes as u64))
            }
            RestoreStep::Xattr { name } => bytes <= MAX_XATTR_BYTES && is_attribute(name),
            RestoreStep::Begin { birth, size_bytes }
            | RestoreStep::Finish { birth, size_bytes } => {
                bytes == 0 && birth.mode <= 0o7777 && fits(Some(*size_bytes))
            }
        }
    }
}

/// What the primary asks a member about its copies, when that has made all changes up to `after`.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct ScrubCall {
    #[n(0)]
    pub(crate) session: GroupSession,
    #[n(1)]
    pub(crate) after: u64,
    #[n(2)]
    pub(crate) ask: ScrubAsk,
}

/// The most files that are looked at in one call.
pub(crate) const MAX_LOOKS: usize = 64;
/// The most ranges that are looked at in one call.
pub(crate) const MAX_LOOK_RANGES: u64 = 64;

#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum ScrubAsk {
    /// What it has of files.
    #[n(0)]
    Look(#[n(0)] Vec<LookAt>),
    /// Bytes of a file; with them goes what the file is to be made again as.
    #[n(1)]
    Read {
        #[n(0)]
        id: FileId,
        #[n(1)]
        offset: u64,
        #[n(2)]
        len: u32,
    },
    /// The names of a file's extended attributes, each with a NUL behind it.
    #[n(2)]
    XattrNames(#[n(0)] FileId),
    /// An extended attribute.
    #[n(3)]
    Xattr {
        #[n(0)]
        id: FileId,
        #[cbor(n(1), with = "minicbor::bytes")]
        name: Vec<u8>,
    },
    /// Puts the names of a file right, if it is under one of them.
    #[n(4)]
    MendNames(#[n(0)] FileId),
    /// Moves back what was moved into a directory by hand, and sets aside what is none of the pool's.
    #[n(5)]
    Tidy(#[n(0)] FileId),
    /// Copies a file to where nobody loses it.
    #[n(6)]
    SetAside(#[n(0)] FileId),
    /// Whether a file can be changed: nothing is.
    #[n(8)]
    Probe(#[n(0)] FileId),
    /// Makes a file again that is nowhere on the member's disk.
    #[n(7)]
    Restore {
        #[n(0)]
        id: FileId,
        #[n(1)]
        step: RestoreStep,
    },
}

impl ScrubAsk {
    /// Whether it asks for no more than one call may, with so many bytes beside it.
    pub(crate) fn is_sound(&self, bytes: usize) -> bool {
        match self {
            ScrubAsk::Restore { step, .. } => step.is_sound(bytes),
            _ if bytes > 0 => false,
            ScrubAsk::Look(files) => {
                let ranges = files.iter().fold(0, |sum: u64, at| sum.saturating_add(at.count));
                files.len() <= MAX_LOOKS && ranges <= MAX_LOOK_RANGES
            }
            ScrubAsk::Read { len, .. } => *len as usize <= MAX_ITEM_BYTES,
            ScrubAsk::Xattr { name, .. } => is_attribute(name),
            ScrubAsk::XattrNames(_)
            | ScrubAsk::MendNames(_)
            | ScrubAsk::Tidy(_)
            | ScrubAsk::SetAside(_)
            | ScrubAsk::Probe(_) => true,
        }
    }
}

/// The answer; bytes go beside it.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum ScrubReply {
    #[n(0)]
    Looks(#[n(0)] Vec<CopyLook>),
    /// Bytes, and how long the file is, and what it is to be made again as.
    #[n(1)]
    Bytes {
        #[n(0)]
        size_bytes: u64,
        #[n(1)]
        birth: FileBirth,
    },
    /// An extended attribute, or the names of all; false if there is none.
    #[n(2)]
    Attribute(#[n(0)] bool),
    /// The step is made.
    #[n(6)]
    Done,
    /// Whether a copy was set aside.
    #[n(3)]
    SetAside(#[n(0)] bool),
    #[n(4)]
    Tidied {
        #[n(0)]
        moved_back: u32,
        #[n(1)]
        set_aside: u32,
        /// Names that the disk did not let be put right.
        #[n(2)]
        refused: u32,
    },
    #[n(5)]
    Names(#[n(0)] NamesOutcome),
}

/// What became of the names of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum NamesOutcome {
    /// It has all of them, or is gone by a change since.
    #[n(0)]
    Right,
    /// It had some, and has all again.
    #[n(1)]
    Mended,
    /// It is nowhere on this disk.
    #[n(2)]
    Nowhere,
}

/// For fuzzing: some such messages.
pub(super) fn examples(session: GroupSession) -> Vec<Vec<u8>> {
    let id = FileId(7);
    let looks = vec![LookAt { id, first: 3, count: 2 }, LookAt { id, first: 0, count: 0 }];
    let asks = [
        ScrubAsk::Look(looks),
        ScrubAsk::Read { id, offset: 1 << 20, len: 1 << 20 },
        ScrubAsk::XattrNames(id),
        ScrubAsk::Xattr { id, name: b"user.name".to_vec() },
        ScrubAsk::Tidy(id),
        ScrubAsk::SetAside(id),
        ScrubAsk::Restore { id, step: RestoreStep::Xattr { name: b"user.name".to_vec() } },
    ];
    let calls = asks.into_iter().map(|ask| ScrubCall { session, after: 9, ask });
    let mut look = FileLook::new(atoll_vfs::FileKind::Regular, ([1; 32], Some([2; 32])), 5);
    look.add_range(&[3; 32]);
    let looks = vec![CopyLook::Unknown, CopyLook::Lost, CopyLook::There(look)];
    let replies = [
        ScrubReply::Looks(looks),
        ScrubReply::SetAside(true),
        ScrubReply::Names(NamesOutcome::Nowhere),
        ScrubReply::Tidied { moved_back: 1, set_aside: 2, refused: 3 },
    ];
    let calls = calls.map(|call| super::encode(&call).to_vec());
    calls.chain(replies.map(|reply| super::encode(&reply).to_vec())).collect()
}
