//! What a primary and its backups say to each other, as bytes (`docs/design/pool.md`): CBOR headers, bytes of files beside them.
//!
//! Methods `0x0500` to `0x0503`, and `0x0506` (`0x0504` and `0x0505` are [`crate::map`]'s). A member answers members of its pool alone, and
//! begins a session only with one that is the primary of a map that is no older than the one it knows. The headers of all calls of the
//! family `0x05` begin with
//! the 16 bytes that name the pool, for a node may have members of several ([`crate::routing`]).

use atoll_key::PeerId;
use atoll_net::Peer;
use bytes::Bytes;
use minicbor::{Decode, Encode};

use crate::change::{MAX_CHANGE_BYTES, PoolChange};
use crate::layout::FileId;
use crate::members::PoolMembers;
use crate::pool_map::PoolMap;

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

/// The most bytes of a file in one message.
pub(crate) const MAX_ITEM_BYTES: usize = 1 << 20;

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
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
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
    /// The last change that it has made.
    #[n(3)]
    pub(crate) applied: u64,
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
}

/// A change of who the members of a pool are. The answer is the map that was decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum PoolEdit {
    /// Another member, or one that listens elsewhere by now.
    #[n(0)]
    Enrol(#[cbor(n(0), with = "crate::members::peer")] Peer),
    /// A member goes: it need not be there.
    #[n(1)]
    Remove(#[cbor(n(0), with = "crate::pool_map::peer_key")] PeerId),
}

/// The answer to items and beats.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct BackupReport {
    /// Room on its disk, bytes.
    #[n(0)]
    pub(crate) free_bytes: u64,
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
            ItemKind::Sync { .. } | ItemKind::SyncAll { .. } => bytes == 0,
        }
    }

    /// The file that it is about.
    pub(crate) fn file(&self) -> Option<FileId> {
        match self {
            ItemKind::Write { id, .. }
            | ItemKind::SetLength { id, .. }
            | ItemKind::Allocate { id, .. }
            | ItemKind::Sync { id, .. }
            | ItemKind::Mend { id, .. } => Some(*id),
            ItemKind::Append { .. } | ItemKind::SyncAll { .. } => None,
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
            | ItemKind::SyncAll { after } => *after,
            ItemKind::Append { .. } => 0,
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
        || decode::<BeginSession>(bytes).is_some()
        || decode::<Beat>(bytes).is_some()
        || decode::<PoolEdit>(bytes).is_some()
        || decode::<HelloReply>(bytes).is_some()
        || decode::<BackupReport>(bytes).is_some()
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
    ];
    let item = |what| ItemHeader { session, number: 4, answered: 3, released: 8, what };
    let mut messages: Vec<Vec<u8>> =
        kinds.into_iter().map(|what| encode(&item(what)).to_vec()).collect();
    let begin =
        BeginSession { session, map: map.clone(), last: 9, released: 8, withdrawn: vec![5] };
    messages.push(encode(&begin).to_vec());
    messages.push(encode(&Beat { session, released: 8, map: Some(map) }).to_vec());
    messages.push(encode(&Beat { session, released: 8, map: None }).to_vec());
    messages.push(encode(&PoolEdit::Enrol(peer(3))).to_vec());
    messages.push(encode(&PoolEdit::Remove(peer(2).id)).to_vec());
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_read_back_and_what_is_cut_off_is_none() {
        let session = GroupSession { number: u64::MAX, primary_run: 1, backup_run: 2 };
        let what = ItemKind::Sync { id: FileId(3), after: 4, mtime: (i64::MIN, 5) };
        let header = ItemHeader { session, number: 1, answered: 1, released: 9, what };
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
    }
}
