//! The calls of the trait, and what they answer.

use atoll_net::header::Capped;
use minicbor::{Decode, Encode};

use super::values::{
    WireAttrReply, WireCaller, WireDirEntry, WireEntry, WireSetAttr, WireStatFs, WireWriter,
};
use super::{Answer, MAX_LIST, MAX_LISTED};
use crate::locks::{LockSession, WireLock, WireLocks};

/// An open file or directory: its number in the session, and whether the kernel must not cache it. What it cached at earlier opens
/// is not known to be true: another gateway may have written since.
#[derive(Clone, Copy, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
pub(in crate::remote) struct WireOpened {
    #[n(0)]
    pub(in crate::remote) handle: u64,
    #[n(1)]
    pub(in crate::remote) direct_io: bool,
}

#[derive(Clone, Copy, PartialEq, Debug, Encode, Decode)]
pub(in crate::remote) struct Forgotten {
    #[n(0)]
    pub(in crate::remote) inode: u64,
    #[n(1)]
    pub(in crate::remote) count: u64,
}

/// A call of [`atoll_vfs::FileSystem`], each after the method of that name. Handles are numbers of the session; 0 is
/// [`atoll_vfs::Handle::NONE`].
#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are the arguments of the method")]
pub(in crate::remote) enum FileCall {
    #[n(0)]
    Lookup {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        parent: u64,
        #[cbor(n(2), with = "minicbor::bytes")]
        name: Vec<u8>,
    },
    #[n(1)]
    Parent {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        inode: u64,
    },
    #[n(2)]
    HandleOf {
        #[n(0)]
        inode: u64,
    },
    #[n(3)]
    ByHandle {
        #[n(0)]
        caller: WireCaller,
        #[cbor(n(1), with = "minicbor::bytes")]
        handle: Vec<u8>,
    },
    /// Only what the header says.
    #[n(4)]
    Forget,
    #[n(5)]
    GetAttr {
        #[n(0)]
        inode: u64,
        #[n(1)]
        handle: u64,
    },
    #[n(6)]
    SetAttr {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        inode: u64,
        #[n(2)]
        handle: u64,
        #[n(3)]
        changes: WireSetAttr,
        /// The session of the lock that a length is set under.
        #[n(4)]
        under: Option<LockSession>,
    },
    #[n(7)]
    ReadLink {
        #[n(0)]
        inode: u64,
    },
    #[n(8)]
    MakeNode {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        parent: u64,
        #[cbor(n(2), with = "minicbor::bytes")]
        name: Vec<u8>,
        #[n(3)]
        kind: u8,
        #[n(4)]
        mode: u32,
        #[n(5)]
        rdev: u64,
    },
    #[n(9)]
    CreateExclusive {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        parent: u64,
        #[cbor(n(2), with = "minicbor::bytes")]
        name: Vec<u8>,
        #[n(3)]
        mode: u32,
        #[cbor(n(4), with = "minicbor::bytes")]
        verifier: [u8; 8],
    },
    #[n(10)]
    MakeDirectory {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        parent: u64,
        #[cbor(n(2), with = "minicbor::bytes")]
        name: Vec<u8>,
        #[n(3)]
        mode: u32,
    },
    /// The target is the part.
    #[n(11)]
    Symlink {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        parent: u64,
        #[cbor(n(2), with = "minicbor::bytes")]
        name: Vec<u8>,
    },
    #[n(12)]
    Link {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        inode: u64,
        #[n(2)]
        parent: u64,
        #[cbor(n(3), with = "minicbor::bytes")]
        name: Vec<u8>,
    },
    #[n(13)]
    Unlink {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        parent: u64,
        #[cbor(n(2), with = "minicbor::bytes")]
        name: Vec<u8>,
    },
    #[n(14)]
    RemoveDirectory {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        parent: u64,
        #[cbor(n(2), with = "minicbor::bytes")]
        name: Vec<u8>,
    },
    #[n(15)]
    Rename {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        parent: u64,
        #[cbor(n(2), with = "minicbor::bytes")]
        name: Vec<u8>,
        #[n(3)]
        new_parent: u64,
        #[cbor(n(4), with = "minicbor::bytes")]
        new_name: Vec<u8>,
        #[n(5)]
        no_replace: bool,
        #[n(6)]
        exchange: bool,
    },
    #[n(16)]
    Open {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        inode: u64,
        #[n(2)]
        flags: i32,
        /// The client has it open already, or had: a file without a name is opened, too.
        #[cbor(n(3), default)]
        again: bool,
    },
    #[n(17)]
    Create {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        parent: u64,
        #[cbor(n(2), with = "minicbor::bytes")]
        name: Vec<u8>,
        #[n(3)]
        mode: u32,
        #[n(4)]
        flags: i32,
    },
    #[n(18)]
    Read {
        #[n(0)]
        inode: u64,
        #[n(1)]
        handle: u64,
        #[n(2)]
        offset: u64,
        #[n(3)]
        len: u32,
        /// The file is open for reading in this session: any member that has its bytes may answer.
        #[n(4)]
        anywhere: bool,
    },
    /// The bytes are the part.
    #[n(19)]
    Write {
        #[n(0)]
        writer: WireWriter,
        #[n(1)]
        inode: u64,
        #[n(2)]
        handle: u64,
        #[n(3)]
        offset: u64,
        /// The session of the lock that it is made under.
        #[n(4)]
        under: Option<LockSession>,
    },
    #[n(20)]
    Flush {
        #[n(0)]
        inode: u64,
        #[n(1)]
        handle: u64,
    },
    #[n(21)]
    Fsync {
        #[n(0)]
        inode: u64,
        #[n(1)]
        handle: u64,
        #[n(2)]
        data_only: bool,
    },
    #[n(22)]
    Seek {
        #[n(0)]
        inode: u64,
        #[n(1)]
        handle: u64,
        #[n(2)]
        offset: u64,
        #[n(3)]
        to_hole: bool,
    },
    #[n(23)]
    Allocate {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        inode: u64,
        #[n(2)]
        handle: u64,
        #[n(3)]
        offset: u64,
        #[n(4)]
        len: u64,
        #[n(5)]
        mode: i32,
        /// As with a write.
        #[n(6)]
        under: Option<LockSession>,
    },
    #[n(24)]
    Close {
        #[n(0)]
        inode: u64,
        #[n(1)]
        handle: u64,
    },
    #[n(25)]
    OpenDirectory {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        inode: u64,
    },
    #[n(26)]
    ReadDirectory {
        #[n(0)]
        inode: u64,
        #[n(1)]
        handle: u64,
        #[n(2)]
        cookie: u64,
        #[n(3)]
        limit: u32,
        #[n(4)]
        with_entries: bool,
    },
    #[n(27)]
    CloseDirectory {
        #[n(0)]
        inode: u64,
        #[n(1)]
        handle: u64,
    },
    #[n(28)]
    FsyncDirectory {
        #[n(0)]
        inode: u64,
        #[n(1)]
        handle: u64,
        #[n(2)]
        data_only: bool,
    },
    #[n(29)]
    Persist {
        #[n(0)]
        inodes: Capped<u64, MAX_LIST>,
    },
    #[n(30)]
    Sync,
    #[n(31)]
    StatFs {
        #[n(0)]
        inode: u64,
    },
    #[n(32)]
    InodeFlags {
        #[n(0)]
        inode: u64,
    },
    #[n(33)]
    SetInodeFlags {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        inode: u64,
        #[n(2)]
        flags: u32,
    },
    #[n(34)]
    GetXattr {
        #[n(0)]
        inode: u64,
        #[cbor(n(1), with = "minicbor::bytes")]
        name: Vec<u8>,
    },
    /// Answered by the names as one part, each ended by a NUL.
    #[n(35)]
    ListXattr {
        #[n(0)]
        inode: u64,
    },
    /// The value is the part.
    #[n(36)]
    SetXattr {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        inode: u64,
        #[cbor(n(2), with = "minicbor::bytes")]
        name: Vec<u8>,
        #[n(3)]
        create: bool,
        #[n(4)]
        replace: bool,
    },
    #[n(37)]
    RemoveXattr {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        inode: u64,
        #[cbor(n(2), with = "minicbor::bytes")]
        name: Vec<u8>,
    },
    /// [`atoll_vfs::Locks::conflict`].
    #[n(38)]
    FindLock {
        #[n(0)]
        inode: u64,
        #[n(1)]
        owner: u64,
        #[n(2)]
        wanted: WireLock,
    },
    /// [`atoll_vfs::Locks::lock`] in the client's session; without one in whichever it has, if that is greater than `over`, or a new
    /// one. One that waits does so for a moment.
    #[n(39)]
    Lock {
        #[n(0)]
        session: Option<LockSession>,
        #[n(1)]
        inode: u64,
        #[n(2)]
        owner: u64,
        #[n(3)]
        wanted: WireLock,
        #[n(4)]
        waits: bool,
        /// Sessions up to this one are over, as the client knows.
        #[n(5)]
        over: LockSession,
    },
    /// Gives up all that an owner has on a file but these locks.
    #[n(40)]
    KeepLocks {
        #[n(0)]
        session: Option<LockSession>,
        #[n(1)]
        inode: u64,
        #[n(2)]
        owner: u64,
        #[n(3)]
        kept: WireLocks,
    },
    /// Ends the wait of an owner for locks on a file. It keeps its place for a while if it will go on.
    #[n(41)]
    StopWaiting {
        #[n(0)]
        inode: u64,
        #[n(1)]
        owner: u64,
        #[n(2)]
        keeps_place: bool,
    },
    /// The client lives, and believes that it has this session.
    #[n(42)]
    KeepSession {
        #[n(0)]
        session: LockSession,
    },
    #[n(43)]
    LookupAll {
        #[n(0)]
        caller: WireCaller,
        #[n(1)]
        parent: u64,
        #[n(2)]
        names: Capped<WireName, MAX_LISTED>,
    },
}

/// A name of a directory.
#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(transparent)]
pub(in crate::remote) struct WireName(
    #[cbor(n(0), with = "minicbor::bytes")] pub(in crate::remote) Vec<u8>,
);

/// How long a client goes on with a call, and what it says then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::remote) enum CallClass {
    /// Changes nothing.
    Reads,
    /// Changes something.
    Changes,
    /// Makes something durable, which may take long.
    Syncs,
}

impl FileCall {
    /// Whether the server does the call once, however often it arrives: it changes files, or what the session holds.
    pub(in crate::remote) fn is_numbered(&self) -> bool {
        use FileCall as Call;
        !matches!(
            self,
            Call::HandleOf { .. }
                | Call::GetAttr { .. }
                | Call::ReadLink { .. }
                | Call::Read { .. }
                | Call::Seek { .. }
                | Call::StatFs { .. }
                | Call::InodeFlags { .. }
                | Call::GetXattr { .. }
                | Call::ListXattr { .. }
                | Call::FindLock { .. }
                | Call::StopWaiting { .. }
                | Call::KeepSession { .. }
        )
    }

    /// Whether the call would answer something else if it was made a second time, and makes a change that says which call made it.
    pub(in crate::remote) fn is_made_once(&self) -> bool {
        use FileCall as Call;
        match self {
            Call::MakeNode { .. }
            | Call::MakeDirectory { .. }
            | Call::Symlink { .. }
            | Call::Link { .. }
            | Call::Unlink { .. }
            | Call::RemoveDirectory { .. }
            | Call::Rename { .. }
            | Call::Create { .. }
            | Call::RemoveXattr { .. } => true,
            Call::SetXattr { create, replace, .. } => *create || *replace,
            _ => false,
        }
    }

    /// Whether a client that does not know if the call was made by a session that is gone may have it made by another, also where
    /// the server does not remember.
    pub(in crate::remote) fn is_repeatable(&self) -> bool {
        let appends = matches!(self, FileCall::Write { writer: WireWriter::AtEnd(_), .. });
        !appends && !self.is_made_once()
    }

    pub(in crate::remote) fn class(&self) -> CallClass {
        use FileCall as Call;
        match self {
            Call::Fsync { .. }
            | Call::FsyncDirectory { .. }
            | Call::Persist { .. }
            | Call::Sync
            | Call::Flush { .. } => CallClass::Syncs,
            Call::Lookup { .. }
            | Call::LookupAll { .. }
            | Call::Parent { .. }
            | Call::ByHandle { .. }
            | Call::Forget
            | Call::Open { .. }
            | Call::Close { .. }
            | Call::OpenDirectory { .. }
            | Call::ReadDirectory { .. }
            | Call::CloseDirectory { .. } => CallClass::Reads,
            call if call.is_numbered() => CallClass::Changes,
            _ => CallClass::Reads,
        }
    }

    /// The file, and the session of the lock under which the call writes to it.
    pub(in crate::remote) fn under(&self) -> Option<(u64, LockSession)> {
        use FileCall as Call;
        match *self {
            Call::SetAttr { inode, under, .. }
            | Call::Write { inode, under, .. }
            | Call::Allocate { inode, under, .. } => under.map(|session| (inode, session)),
            _ => None,
        }
    }

    /// The directory and the name of the entry that the call answers, if it says so.
    pub(in crate::remote) fn name(&self) -> Option<(u64, &[u8])> {
        use FileCall as Call;
        match self {
            Call::Lookup { parent, name, .. }
            | Call::MakeNode { parent, name, .. }
            | Call::CreateExclusive { parent, name, .. }
            | Call::MakeDirectory { parent, name, .. }
            | Call::Symlink { parent, name, .. }
            | Call::Link { parent, name, .. }
            | Call::Create { parent, name, .. } => Some((*parent, name)),
            _ => None,
        }
    }

    /// The lock session that the call is made in.
    pub(in crate::remote) fn lock_session(&self) -> Option<LockSession> {
        use FileCall as Call;
        match *self {
            Call::Lock { session, .. } | Call::KeepLocks { session, .. } => session,
            Call::KeepSession { session } => Some(session),
            _ => self.under().map(|(_, session)| session),
        }
    }

    /// Fills in the handle that the session has for the open file.
    pub(in crate::remote) fn set_handle(&mut self, number: u64) {
        use FileCall as Call;
        match self {
            Call::GetAttr { handle, .. }
            | Call::SetAttr { handle, .. }
            | Call::Read { handle, .. }
            | Call::Write { handle, .. }
            | Call::Flush { handle, .. }
            | Call::Fsync { handle, .. }
            | Call::Seek { handle, .. }
            | Call::Allocate { handle, .. }
            | Call::Close { handle, .. }
            | Call::ReadDirectory { handle, .. }
            | Call::CloseDirectory { handle, .. }
            | Call::FsyncDirectory { handle, .. } => *handle = number,
            _ => {}
        }
    }
}

/// What a call answers.
#[derive(Clone, PartialEq, Debug, Encode, Decode)]
pub(in crate::remote) enum FileReply {
    #[n(0)]
    Nothing,
    #[n(1)]
    Entry(#[n(0)] WireEntry),
    #[n(2)]
    Attr(#[n(0)] WireAttrReply),
    #[n(3)]
    Opened(#[n(0)] WireOpened),
    #[n(4)]
    Created(#[n(0)] WireEntry, #[n(1)] WireOpened),
    /// The bytes are the part.
    #[n(5)]
    Bytes,
    /// How many bytes were written, and where they begin, if that is certain.
    #[n(6)]
    Written(#[n(0)] u32, #[n(1)] Option<u64>),
    #[n(7)]
    Offset(#[n(0)] u64),
    #[n(8)]
    Listing(#[n(0)] Capped<WireDirEntry, MAX_LISTED>),
    #[n(9)]
    StatFs(#[n(0)] WireStatFs),
    #[n(10)]
    Flags(#[n(0)] u32),
    #[n(11)]
    Handle(#[cbor(n(0), with = "minicbor::bytes")] Vec<u8>),
    /// Nothing was written: the file ends here.
    #[n(12)]
    EndsAt(#[n(0)] u64),
    /// The lock is held, in this session.
    #[n(13)]
    Locked(#[n(0)] LockSession),
    /// A lock that conflicts, if there is one.
    #[n(14)]
    FoundLock(#[n(0)] Option<WireLock>),
    /// Nothing was done: the lock session that the call names is over, and its locks are gone.
    #[n(15)]
    LocksLost,
    /// An entry of each name, or why there is none.
    #[n(16)]
    Found(#[n(0)] Capped<Answer<WireEntry>, MAX_LISTED>),
}
