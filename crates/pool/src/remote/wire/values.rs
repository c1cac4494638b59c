//! Values of the trait as they travel.

use std::time::Duration;

use atoll_net::header::Capped;
use atoll_vfs::{
    Attr, AttrReply, Caller, DirEntry, Entry, Errno, FileKind, FileTime, Groups, InodeNumber,
    MAX_COOKIE, SetAttr, SetTime, StatFs, Writer, check_name,
};
use bytes::Bytes;
use minicbor::{Decode, Encode};

pub(in crate::remote) use crate::calls::kind_number;
use crate::calls::numbered_kind;

/// The most groups of a caller beside the first (RFC 5531, `AUTH_SYS`); of more the first are sent.
const MAX_GROUPS: usize = 16;

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
pub(in crate::remote) struct WireCaller {
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
    pub(in crate::remote) fn with_groups(caller: &Caller) -> WireCaller {
        let mut groups = match &caller.groups {
            Groups::None => Vec::new(),
            Groups::Listed(groups) => groups.as_slice().to_vec(),
            Groups::OnDemand(find) => find(caller),
        };
        groups.truncate(MAX_GROUPS);
        WireCaller { groups: groups.into(), ..WireCaller::alone(caller) }
    }

    /// The caller of a call that changes nothing.
    pub(in crate::remote) fn alone(caller: &Caller) -> WireCaller {
        let Caller { uid, gid, pid, umask, .. } = *caller;
        WireCaller { uid, gid, pid, umask, groups: Vec::new().into() }
    }

    pub(in crate::remote) fn caller(&self) -> Caller {
        let groups = match self.groups.0.as_slice() {
            [] => Groups::None,
            groups => Groups::listed(groups),
        };
        Caller { uid: self.uid, gid: self.gid, pid: self.pid, umask: self.umask, groups }
    }
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
pub(in crate::remote) enum WireWriter {
    #[n(0)]
    At(#[n(0)] WireCaller),
    #[n(1)]
    AtEnd(#[n(0)] WireCaller),
    #[n(2)]
    Mapping,
    /// At the end, if the file ends at the offset of the call.
    #[n(3)]
    AtEndIf(#[n(0)] WireCaller),
    /// As `AtEndIf`, for a call that may have been made there before.
    #[n(4)]
    AtEndAgain(#[n(0)] WireCaller),
}

impl From<&Writer> for WireWriter {
    fn from(writer: &Writer) -> WireWriter {
        match writer {
            Writer::At(caller) | Writer::Cached(caller) => {
                WireWriter::At(WireCaller::alone(caller))
            }
            Writer::AtEnd(caller) => WireWriter::AtEnd(WireCaller::alone(caller)),
            Writer::Mapping => WireWriter::Mapping,
        }
    }
}

impl From<&WireWriter> for Writer {
    fn from(writer: &WireWriter) -> Writer {
        match writer {
            WireWriter::At(caller) => Writer::At(caller.caller()),
            WireWriter::AtEnd(caller)
            | WireWriter::AtEndIf(caller)
            | WireWriter::AtEndAgain(caller) => Writer::AtEnd(caller.caller()),
            WireWriter::Mapping => Writer::Mapping,
        }
    }
}

/// A value of the wire that no file system means.
#[derive(Debug)]
pub(in crate::remote) struct Meaningless;

#[derive(Clone, Copy, PartialEq, Debug, Encode, Decode)]
pub(in crate::remote) struct WireTime {
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
pub(in crate::remote) enum WireSetTime {
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
pub(in crate::remote) struct WireSetAttr {
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

pub(in crate::remote) fn kind(number: u8) -> Result<FileKind, Meaningless> {
    numbered_kind(number).ok_or(Meaningless)
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
pub(in crate::remote) struct WireAttr {
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

pub(in crate::remote) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
pub(in crate::remote) struct WireAttrReply {
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
pub(in crate::remote) struct WireEntry {
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
pub(in crate::remote) struct WireDirEntry {
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
pub(in crate::remote) struct WireStatFs {
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

impl From<Meaningless> for Errno {
    fn from(_: Meaningless) -> Errno {
        Errno::EPROTO
    }
}

#[cfg(test)]
mod tests {
    use atoll_net::MAX_HEADER_BYTES;
    use atoll_net::header::{from_header, to_header};

    use super::super::{Answer, FileCall, FileReply, MAX_LISTED, WireName};
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
    fn the_most_names_and_entries_fit_into_a_header() {
        let caller = WireCaller::alone(&Caller::default());
        let names = vec![WireName(vec![b'x'; 255]); MAX_LISTED].into();
        let call = FileCall::LookupAll { caller, parent: u64::MAX, names };
        let (generation, ttl) = (u64::MAX, u64::MAX);
        let entry =
            WireEntry { attr: attr(), generation, name_ttl_nanos: ttl, attr_ttl_nanos: ttl };
        let found = vec![Answer::Done(entry); MAX_LISTED].into();
        let reply = to_header(&Answer::Done(FileReply::Found(found)));
        for header in [to_header(&call), reply] {
            // What a call's header has beside the call.
            assert!(header.len() + (64 << 10) < MAX_HEADER_BYTES, "{}", header.len());
        }
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
        let caller =
            Caller { groups: Groups::OnDemand(|_| (0..40).collect()), ..Caller::default() };
        let sent = to_header(&WireCaller::with_groups(&caller));
        let arrived = from_header::<WireCaller>(&sent).unwrap().caller();
        assert!(arrived.is_member(15) && !arrived.is_member(16));
        let long = to_header(&vec![7u32; MAX_GROUPS + 1]);
        assert!(from_header::<Capped<u32, MAX_GROUPS>>(&long).is_err());
    }
}
