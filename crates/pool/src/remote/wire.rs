//! Methods and messages, byte for byte in `docs/design/pool-calls.md`.
//!
//! Headers are CBOR; bulk bytes (what is read and written, values of attributes, targets of links) travel beside the header as the
//! only part. Every list has a cap that is checked before it is read, and values that a file system could not mean (a kind, a
//! name, a time) are refused where they are decoded.

use std::ops::RangeInclusive;
use std::time::Duration;

use atoll_net::header::Capped;
use atoll_vfs::{
    Attr, AttrReply, Caller, CreateVerifier, DirEntry, Entry, Errno, FileKind, FileTime, Groups,
    InodeNumber, MAX_COOKIE, RenameFlags, SeekTo, SetAttr, SetTime, StatFs, Writer, XattrFlags,
    check_name,
};
use bytes::Bytes;
use minicbor::{Decode, Encode};

/// The methods of this module; others of the pools' family `0x04` are another's.
pub const METHODS: RangeInclusive<u16> = 0x0440..=0x044f;

/// Begins a session: [`Begin`], answered by [`Begun`].
pub(super) const BEGIN: u16 = 0x0440;
/// Keeps a session: [`SessionCall`], answered by an empty header.
pub(super) const RENEW: u16 = 0x0441;
/// Ends a session: [`SessionCall`], answered by an empty header.
pub(super) const END: u16 = 0x0442;
/// A call of the file system: [`CallHeader`], answered by [`Answer`] of [`FileReply`].
pub(super) const CALL: u16 = 0x0443;

/// Refusal: the server has no such session of this peer.
pub(super) const UNKNOWN_SESSION: u16 = 100;
/// Refusal: the numbered call has arrived and is not done yet; ask again.
pub(super) const AT_WORK: u16 = 101;
/// Refusal: the client has said that it waits for no such number any more.
pub(super) const GIVEN_UP: u16 = 102;

/// The most bytes that one call reads or writes.
pub(super) const MAX_DATA_BYTES: usize = 1 << 20;
/// The most entries of a directory in one reply: with their attributes they fit into a header (a test).
pub(super) const MAX_LISTED: usize = 512;
/// The most elements of other lists.
pub(super) const MAX_LIST: usize = 1024;
/// The most groups of a caller beside the first (RFC 5531, `AUTH_SYS`); of more the first are sent.
const MAX_GROUPS: usize = 16;

/// A session: random, chosen by the client.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
#[cbor(transparent)]
pub(super) struct SessionId(#[cbor(n(0), with = "minicbor::bytes")] pub(super) [u8; 16]);

/// What was asked, or why the file system refused.
#[derive(Clone, PartialEq, Debug, Encode, Decode)]
pub(super) enum Answer<T> {
    #[n(0)]
    Done(#[n(0)] T),
    #[n(1)]
    Failed(#[n(0)] i32),
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
pub(super) struct Begin {
    #[n(0)]
    pub(super) session: SessionId,
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
pub(super) struct Begun {
    /// Of this run of the server: random.
    #[n(0)]
    pub(super) boot: u64,
    #[n(1)]
    pub(super) has_acls: bool,
    #[n(2)]
    pub(super) has_stateless_directories: bool,
    #[n(3)]
    pub(super) has_lasting_cookies: bool,
    #[n(4)]
    pub(super) missing_ttl_nanos: u64,
}

/// What each call of a session begins with.
#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
pub(super) struct SessionCall {
    #[n(0)]
    pub(super) session: SessionId,
    #[n(1)]
    pub(super) boot: u64,
    /// The lowest number whose answer the client still waits for.
    #[n(2)]
    pub(super) lowest: u64,
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
pub(super) struct CallHeader {
    #[n(0)]
    pub(super) of: SessionCall,
    /// Which call of the session it is: one for all attempts. None: it may be done twice.
    #[n(1)]
    pub(super) number: Option<u64>,
    #[n(2)]
    pub(super) call: FileCall,
    /// Lookups that the session takes back before a numbered call.
    #[n(3)]
    pub(super) forgotten: Capped<Forgotten, MAX_LIST>,
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
pub(super) struct WireCaller {
    #[n(0)]
    uid: u32,
    #[n(1)]
    gid: u32,
    #[n(2)]
    pid: u32,
    #[n(3)]
    umask: u32,
    #[n(4)]
    groups: Capped<u32, MAX_GROUPS>,
}

impl WireCaller {
    /// The caller of a call that changes something, with its groups: to be asked before the call is answered.
    pub(super) fn with_groups(caller: &Caller) -> WireCaller {
        let mut groups = match &caller.groups {
            Groups::None => Vec::new(),
            Groups::Listed(groups) => groups.as_slice().to_vec(),
            Groups::OnDemand(find) => find(caller),
        };
        groups.truncate(MAX_GROUPS);
        WireCaller { groups: groups.into(), ..WireCaller::alone(caller) }
    }

    /// The caller of a call that changes nothing.
    pub(super) fn alone(caller: &Caller) -> WireCaller {
        let Caller { uid, gid, pid, umask, .. } = *caller;
        WireCaller { uid, gid, pid, umask, groups: Vec::new().into() }
    }

    pub(super) fn caller(&self) -> Caller {
        let groups = match self.groups.0.as_slice() {
            [] => Groups::None,
            groups => Groups::listed(groups),
        };
        Caller { uid: self.uid, gid: self.gid, pid: self.pid, umask: self.umask, groups }
    }
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
pub(super) enum WireWriter {
    #[n(0)]
    At(#[n(0)] WireCaller),
    #[n(1)]
    AtEnd(#[n(0)] WireCaller),
    #[n(2)]
    Mapping,
}

impl From<&Writer> for WireWriter {
    fn from(writer: &Writer) -> WireWriter {
        match writer {
            Writer::At(caller) => WireWriter::At(WireCaller::alone(caller)),
            Writer::AtEnd(caller) => WireWriter::AtEnd(WireCaller::alone(caller)),
            Writer::Mapping => WireWriter::Mapping,
        }
    }
}

impl From<&WireWriter> for Writer {
    fn from(writer: &WireWriter) -> Writer {
        match writer {
            WireWriter::At(caller) => Writer::At(caller.caller()),
            WireWriter::AtEnd(caller) => Writer::AtEnd(caller.caller()),
            WireWriter::Mapping => Writer::Mapping,
        }
    }
}

/// A value of the wire that no file system means.
#[derive(Debug)]
pub(super) struct Meaningless;

#[derive(Clone, Copy, PartialEq, Debug, Encode, Decode)]
pub(super) struct WireTime {
    #[n(0)]
    secs: i64,
    #[n(1)]
    nanos: u32,
}

impl From<FileTime> for WireTime {
    fn from(FileTime { secs, nanos }: FileTime) -> WireTime {
        WireTime { secs, nanos }
    }
}

impl TryFrom<WireTime> for FileTime {
    type Error = Meaningless;

    fn try_from(WireTime { secs, nanos }: WireTime) -> Result<FileTime, Meaningless> {
        if nanos < 1_000_000_000 { Ok(FileTime { secs, nanos }) } else { Err(Meaningless) }
    }
}

#[derive(Clone, Copy, PartialEq, Debug, Encode, Decode)]
pub(super) enum WireSetTime {
    #[n(0)]
    Now,
    #[n(1)]
    To(#[n(0)] WireTime),
}

fn set_time(time: Option<WireSetTime>) -> Result<Option<SetTime>, Meaningless> {
    Ok(match time {
        None => None,
        Some(WireSetTime::Now) => Some(SetTime::Now),
        Some(WireSetTime::To(time)) => Some(SetTime::To(time.try_into()?)),
    })
}

#[derive(Clone, Copy, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
pub(super) struct WireSetAttr {
    #[n(0)]
    mode: Option<u32>,
    #[n(1)]
    uid: Option<u32>,
    #[n(2)]
    gid: Option<u32>,
    #[n(3)]
    size_bytes: Option<u64>,
    #[n(4)]
    atime: Option<WireSetTime>,
    #[n(5)]
    mtime: Option<WireSetTime>,
}

impl From<SetAttr> for WireSetAttr {
    fn from(SetAttr { mode, uid, gid, size_bytes, atime, mtime }: SetAttr) -> WireSetAttr {
        let time = |time| match time {
            SetTime::Now => WireSetTime::Now,
            SetTime::To(time) => WireSetTime::To(time.into()),
        };
        let (atime, mtime) = (atime.map(time), mtime.map(time));
        WireSetAttr { mode, uid, gid, size_bytes, atime, mtime }
    }
}

impl TryFrom<WireSetAttr> for SetAttr {
    type Error = Meaningless;

    fn try_from(changes: WireSetAttr) -> Result<SetAttr, Meaningless> {
        let WireSetAttr { mode, uid, gid, size_bytes, atime, mtime } = changes;
        let (atime, mtime) = (set_time(atime)?, set_time(mtime)?);
        Ok(SetAttr { mode, uid, gid, size_bytes, atime, mtime })
    }
}

/// Kinds by their numbers.
const KINDS: [FileKind; 7] = [
    FileKind::Regular,
    FileKind::Directory,
    FileKind::Symlink,
    FileKind::Fifo,
    FileKind::Socket,
    FileKind::CharDevice,
    FileKind::BlockDevice,
];

pub(super) fn kind_number(kind: FileKind) -> u8 {
    KINDS.iter().position(|known| *known == kind).expect("all kinds have numbers") as u8
}

pub(super) fn kind(number: u8) -> Result<FileKind, Meaningless> {
    KINDS.get(usize::from(number)).copied().ok_or(Meaningless)
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
pub(super) struct WireAttr {
    #[n(0)]
    inode: u64,
    #[n(1)]
    kind: u8,
    #[n(2)]
    mode: u32,
    #[n(3)]
    nlink: u32,
    #[n(4)]
    uid: u32,
    #[n(5)]
    gid: u32,
    #[n(6)]
    rdev: u64,
    #[n(7)]
    size_bytes: u64,
    #[n(8)]
    blocks_512: u64,
    #[n(9)]
    block_size_bytes: u32,
    #[n(10)]
    atime: WireTime,
    #[n(11)]
    mtime: WireTime,
    #[n(12)]
    ctime: WireTime,
}

impl From<&Attr> for WireAttr {
    fn from(attr: &Attr) -> WireAttr {
        WireAttr {
            inode: attr.inode.0,
            kind: kind_number(attr.kind),
            mode: attr.mode,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            rdev: attr.rdev,
            size_bytes: attr.size_bytes,
            blocks_512: attr.blocks_512,
            block_size_bytes: attr.block_size_bytes,
            atime: attr.atime.into(),
            mtime: attr.mtime.into(),
            ctime: attr.ctime.into(),
        }
    }
}

impl TryFrom<&WireAttr> for Attr {
    type Error = Meaningless;

    fn try_from(attr: &WireAttr) -> Result<Attr, Meaningless> {
        if attr.inode == 0 || attr.mode > 0o7777 {
            return Err(Meaningless);
        }
        Ok(Attr {
            inode: InodeNumber(attr.inode),
            kind: kind(attr.kind)?,
            mode: attr.mode,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            rdev: attr.rdev,
            size_bytes: attr.size_bytes,
            blocks_512: attr.blocks_512,
            block_size_bytes: attr.block_size_bytes,
            atime: attr.atime.try_into()?,
            mtime: attr.mtime.try_into()?,
            ctime: attr.ctime.try_into()?,
        })
    }
}

pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
pub(super) struct WireAttrReply {
    #[n(0)]
    attr: WireAttr,
    #[n(1)]
    ttl_nanos: u64,
}

impl From<&AttrReply> for WireAttrReply {
    fn from(reply: &AttrReply) -> WireAttrReply {
        WireAttrReply { attr: (&reply.attr).into(), ttl_nanos: nanos(reply.ttl) }
    }
}

impl TryFrom<&WireAttrReply> for AttrReply {
    type Error = Meaningless;

    fn try_from(reply: &WireAttrReply) -> Result<AttrReply, Meaningless> {
        let ttl = Duration::from_nanos(reply.ttl_nanos);
        Ok(AttrReply { attr: (&reply.attr).try_into()?, ttl })
    }
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
pub(super) struct WireEntry {
    #[n(0)]
    attr: WireAttr,
    #[n(1)]
    generation: u64,
    #[n(2)]
    name_ttl_nanos: u64,
    #[n(3)]
    attr_ttl_nanos: u64,
}

impl From<&Entry> for WireEntry {
    fn from(entry: &Entry) -> WireEntry {
        WireEntry {
            attr: (&entry.attr).into(),
            generation: entry.generation,
            name_ttl_nanos: nanos(entry.name_ttl),
            attr_ttl_nanos: nanos(entry.attr_ttl),
        }
    }
}

impl TryFrom<&WireEntry> for Entry {
    type Error = Meaningless;

    fn try_from(entry: &WireEntry) -> Result<Entry, Meaningless> {
        Ok(Entry {
            attr: (&entry.attr).try_into()?,
            generation: entry.generation,
            name_ttl: Duration::from_nanos(entry.name_ttl_nanos),
            attr_ttl: Duration::from_nanos(entry.attr_ttl_nanos),
        })
    }
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
pub(super) struct WireDirEntry {
    #[cbor(n(0), with = "minicbor::bytes")]
    name: Vec<u8>,
    #[n(1)]
    kind: u8,
    #[n(2)]
    inode: u64,
    #[n(3)]
    cookie: u64,
    #[n(4)]
    entry: Option<WireEntry>,
}

impl From<&DirEntry> for WireDirEntry {
    fn from(listed: &DirEntry) -> WireDirEntry {
        WireDirEntry {
            name: listed.name.to_vec(),
            kind: kind_number(listed.kind),
            inode: listed.inode.0,
            cookie: listed.cookie,
            entry: listed.entry.as_ref().map(WireEntry::from),
        }
    }
}

impl TryFrom<WireDirEntry> for DirEntry {
    type Error = Meaningless;

    fn try_from(listed: WireDirEntry) -> Result<DirEntry, Meaningless> {
        if check_name(&listed.name).is_err() || !(1..=MAX_COOKIE).contains(&listed.cookie) {
            return Err(Meaningless);
        }
        Ok(DirEntry {
            name: Bytes::from(listed.name),
            kind: kind(listed.kind)?,
            inode: InodeNumber(listed.inode),
            cookie: listed.cookie,
            entry: listed.entry.as_ref().map(Entry::try_from).transpose()?,
        })
    }
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
pub(super) struct WireStatFs {
    #[n(0)]
    block_size_bytes: u32,
    #[n(1)]
    blocks: u64,
    #[n(2)]
    blocks_free: u64,
    #[n(3)]
    blocks_available: u64,
    #[n(4)]
    files: u64,
    #[n(5)]
    files_free: u64,
    #[n(6)]
    max_name_bytes: u32,
    #[n(7)]
    max_links: u32,
    #[n(8)]
    max_file_bytes: u64,
    #[n(9)]
    time_granularity_nanos: u64,
}

impl From<&StatFs> for WireStatFs {
    fn from(stat: &StatFs) -> WireStatFs {
        WireStatFs {
            block_size_bytes: stat.block_size_bytes,
            blocks: stat.blocks,
            blocks_free: stat.blocks_free,
            blocks_available: stat.blocks_available,
            files: stat.files,
            files_free: stat.files_free,
            max_name_bytes: stat.max_name_bytes,
            max_links: stat.max_links,
            max_file_bytes: stat.max_file_bytes,
            time_granularity_nanos: nanos(stat.time_granularity),
        }
    }
}

impl From<&WireStatFs> for StatFs {
    fn from(stat: &WireStatFs) -> StatFs {
        StatFs {
            block_size_bytes: stat.block_size_bytes,
            blocks: stat.blocks,
            blocks_free: stat.blocks_free,
            blocks_available: stat.blocks_available,
            files: stat.files,
            files_free: stat.files_free,
            max_name_bytes: stat.max_name_bytes,
            max_links: stat.max_links,
            max_file_bytes: stat.max_file_bytes.min(i64::MAX as u64),
            time_granularity: Duration::from_nanos(stat.time_granularity_nanos),
        }
    }
}

/// An open file or directory: its number in the session, and whether the kernel must not cache it. What it cached at earlier opens
/// is not known to be true: another gateway may have written since.
#[derive(Clone, Copy, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
pub(super) struct WireOpened {
    #[n(0)]
    pub(super) handle: u64,
    #[n(1)]
    pub(super) direct_io: bool,
}

#[derive(Clone, Copy, PartialEq, Debug, Encode, Decode)]
pub(super) struct Forgotten {
    #[n(0)]
    pub(super) inode: u64,
    #[n(1)]
    pub(super) count: u64,
}

/// A call of [`atoll_vfs::FileSystem`], each after the method of that name. Handles are numbers of the session; 0 is
/// [`atoll_vfs::Handle::NONE`].
#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are the arguments of the method")]
pub(super) enum FileCall {
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
}

/// How long a client goes on with a call, and what it says then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CallClass {
    /// Changes nothing.
    Reads,
    /// Changes something.
    Changes,
    /// Makes something durable, which may take long.
    Syncs,
}

impl FileCall {
    /// Whether the server does the call once, however often it arrives: it changes files, or what the session holds.
    pub(super) fn is_numbered(&self) -> bool {
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
        )
    }

    /// Whether a client that does not know if the call was made by a session that is gone may have it made by another.
    pub(super) fn is_repeatable(&self) -> bool {
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
            | Call::RemoveXattr { .. } => false,
            Call::SetXattr { create, replace, .. } => !create && !replace,
            Call::Write { writer, .. } => !matches!(writer, WireWriter::AtEnd(_)),
            _ => true,
        }
    }

    pub(super) fn class(&self) -> CallClass {
        use FileCall as Call;
        match self {
            Call::Fsync { .. }
            | Call::FsyncDirectory { .. }
            | Call::Persist { .. }
            | Call::Sync
            | Call::Flush { .. } => CallClass::Syncs,
            Call::Lookup { .. }
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

    /// Fills in the handle that the session has for the open file.
    pub(super) fn set_handle(&mut self, number: u64) {
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
pub(super) enum FileReply {
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
}

impl From<Meaningless> for Errno {
    fn from(_: Meaningless) -> Errno {
        Errno::EPROTO
    }
}

pub(super) fn seek_to(to_hole: bool) -> SeekTo {
    if to_hole { SeekTo::Hole } else { SeekTo::Data }
}

pub(super) fn rename_flags(no_replace: bool, exchange: bool) -> RenameFlags {
    RenameFlags { no_replace, exchange }
}

pub(super) fn xattr_flags(create: bool, replace: bool) -> XattrFlags {
    XattrFlags { create, replace }
}

pub(super) fn create_verifier(bytes: [u8; 8]) -> CreateVerifier {
    CreateVerifier(bytes)
}

#[cfg(test)]
mod tests {
    use atoll_net::MAX_HEADER_BYTES;
    use atoll_net::header::{from_header, to_header};
    use proptest::prelude::*;

    use super::*;

    fn attr() -> WireAttr {
        let time = WireTime { secs: i64::MIN, nanos: 999_999_999 };
        WireAttr {
            inode: u64::MAX,
            kind: 0,
            mode: 0o7777,
            nlink: u32::MAX,
            uid: u32::MAX,
            gid: u32::MAX,
            rdev: u64::MAX,
            size_bytes: u64::MAX,
            blocks_512: u64::MAX,
            block_size_bytes: u32::MAX,
            atime: time,
            mtime: time,
            ctime: time,
        }
    }

    fn listed() -> WireDirEntry {
        let (generation, ttl) = (u64::MAX, u64::MAX);
        let entry =
            WireEntry { attr: attr(), generation, name_ttl_nanos: ttl, attr_ttl_nanos: ttl };
        let (name, inode, cookie) = (vec![b'x'; 255], u64::MAX, MAX_COOKIE);
        WireDirEntry { name, kind: 0, inode, cookie, entry: Some(entry) }
    }

    #[test]
    fn the_longest_listing_fits_into_a_header() {
        let reply = Answer::Done(FileReply::Listing(vec![listed(); MAX_LISTED].into()));
        let header = to_header(&reply);
        assert!(header.len() < MAX_HEADER_BYTES, "{}", header.len());
        assert_eq!(from_header(&header), Ok(reply));
    }

    #[test]
    fn values_that_nobody_means_are_refused() {
        assert!(Attr::try_from(&attr()).is_ok());
        for bad in [
            WireAttr { inode: 0, ..attr() },
            WireAttr { kind: 7, ..attr() },
            WireAttr { mode: 0o10000, ..attr() },
            WireAttr { mtime: WireTime { secs: 0, nanos: 1_000_000_000 }, ..attr() },
        ] {
            assert!(Attr::try_from(&bad).is_err(), "{bad:?}");
        }
        assert!(DirEntry::try_from(listed()).is_ok());
        for bad in [
            WireDirEntry { name: b"..".to_vec(), ..listed() },
            WireDirEntry { name: b"a/b".to_vec(), ..listed() },
            WireDirEntry { name: vec![b'x'; 256], ..listed() },
            WireDirEntry { cookie: 0, ..listed() },
            WireDirEntry { cookie: MAX_COOKIE + 1, ..listed() },
            WireDirEntry { kind: 9, ..listed() },
        ] {
            assert!(DirEntry::try_from(bad.clone()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn of_many_groups_the_first_are_sent() {
        let caller = Caller { groups: Groups::OnDemand(|_| (0..40).collect()), ..me() };
        let sent = to_header(&WireCaller::with_groups(&caller));
        let arrived = from_header::<WireCaller>(&sent).unwrap().caller();
        assert!(arrived.is_member(15) && !arrived.is_member(16));
        let long = to_header(&vec![7u32; MAX_GROUPS + 1]);
        assert!(from_header::<Capped<u32, MAX_GROUPS>>(&long).is_err());
    }

    fn me() -> Caller {
        Caller { uid: 1, gid: 2, pid: 3, umask: 0o22, groups: Groups::None }
    }

    fn messages() -> Vec<CallHeader> {
        let caller = WireCaller::alone(&me());
        let of = SessionCall { session: SessionId([7; 16]), boot: 9, lowest: 3 };
        let name = b"name".to_vec();
        let changes =
            SetAttr { size_bytes: Some(7), mtime: Some(SetTime::Now), ..SetAttr::default() };
        let calls = [
            FileCall::Lookup { caller: caller.clone(), parent: 1, name: name.clone() },
            FileCall::SetAttr {
                caller: caller.clone(),
                inode: 2,
                handle: 0,
                changes: changes.into(),
            },
            FileCall::Write { writer: WireWriter::AtEnd(caller), inode: 2, handle: 1, offset: 0 },
            FileCall::Forget,
            FileCall::Sync,
            FileCall::GetXattr { inode: 2, name },
        ];
        let forgotten = Capped(vec![Forgotten { inode: 4, count: 2 }]);
        let message = |call| {
            let (of, forgotten) = (of.clone(), forgotten.clone());
            CallHeader { of, number: Some(5), call, forgotten }
        };
        calls.map(message).to_vec()
    }

    #[test]
    fn messages_read_back_and_cut_ones_are_refused() {
        for message in messages() {
            let header = to_header(&message);
            assert_eq!(from_header(&header), Ok(message));
            for cut in 0..header.len() {
                assert!(from_header::<CallHeader>(&header[..cut]).is_err());
            }
        }
    }

    proptest! {
        #[test]
        fn foreign_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = from_header::<CallHeader>(&bytes);
            let _ = from_header::<Answer<FileReply>>(&bytes);
            let _ = from_header::<Answer<Begun>>(&bytes);
            let _ = from_header::<SessionCall>(&bytes);
        }

        #[test]
        fn damaged_messages_are_read_or_refused(which in 0usize..6, at in any::<prop::sample::Index>(), byte: u8) {
            let mut bytes = to_header(&messages()[which]).to_vec();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = from_header::<CallHeader>(&bytes);
        }
    }
}
