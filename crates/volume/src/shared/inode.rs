//! The bytes of an inode, the payload of one sibling of a certified block. As in Pastis (§3), it has the
//! file's attributes and says where the contents are, and the entries of a directory that is not large
//! are in the inode itself.
//!
//! | bytes | field |
//! |---|---|
//! | 1 | layout: 1, or 3 with an origin |
//! | 104 | of layout 3: who wrote what the owner has signed anew ([`Origin`]) |
//! | 1 | kind: 1 regular file, 2 directory, 3 symbolic link, 4 FIFO, 5 socket, 6 character device, 7 block device |
//! | 2 | mode, at most `0o7777` |
//! | 4 + 4 | user, group |
//! | 12 × 3 | times of modification, change and access: 8 seconds since 1970 (signed), 4 nanoseconds |
//! | 2 | number of links, at most 512 |
//! | 56 each | links, ascending: 24 the dot of the write that added it (16 writer, 8 height), 32 key of the directory |
//! | 4 + n | length of the [xattr block](crate::format::xattrs), 0 if there are no attributes; its bytes, at most 32 KiB |
//! | 32 | hash of the newest block of a [past version](super::past), 0 if there is none |
//! | | **regular file:** 24 the dot of the write that made its contents, 8 when, milliseconds since 1970; 8 length; 8 space taken, in units of 512 bytes; unless the length is 0: 1 where its [inode block](crate::format::inode) is, 0 here, 1 elsewhere; its bytes, at most 16 KiB, or its hash (32) |
//! | | **directory:** 1 where its entries are, 0 here, 1 elsewhere; 4 their number; entries ascending, or 2 number of [leaves](super::entries), their hashes (32 each) |
//! | | **symbolic link:** 2 + m length of the target, target |
//! | | **device:** 8 device number. **FIFO, socket:** nothing |
//!
//! Entry of a directory:
//!
//! | bytes | field |
//! |---|---|
//! | 1 + n | name |
//! | 24 | the dot of the write that added it |
//! | 32 | key of the inode |
//! | 1 | kind of the inode |
//! | 8 | when it was added, milliseconds since 1970 |
//!
//! *Links* are what a link count is in other file systems: each says which directory names the inode.
//! Counts cannot be merged, and sets can.
//!
//! An inode has one encoding. Decoding checks every length before it is used.

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_key::kinds::certified::{Dot, MAX_PAYLOAD_BYTES, WriterId};
use atoll_key::{BlockHash, Key};
use atoll_vfs::{FileKind, FileTime};
use bytes::Bytes;

use super::add_wins::Element;
use super::entries::{Entries, Leaf};
use super::origin::Origin;
use crate::format::cursor::{Cursor, put_mode, put_time, put_u64};
use crate::format::directory::{kind_code, kind_of, put_name, take_name, take_target};
use crate::format::{FormatError, InodeBlock, MAX_FILE_BYTES, shown, xattrs};

const LAYOUT: u8 = 1;
/// With an [`Origin`]; 2 is that of [sealed](super::sealing) payloads.
const LAYOUT_WITH_ORIGIN: u8 = 3;
/// The most names of a file.
pub const MAX_LINKS: usize = 512;
/// An inode block of at most so many bytes lies in the inode.
pub const MAX_INLINE_BYTES: usize = 16 << 10;
/// The most bytes of extended attributes.
pub const MAX_XATTR_BYTES: usize = 32 << 10;
/// The shortest entry: a name of one byte.
const MIN_ENTRY_BYTES: usize = 2 + 24 + 32 + 1 + 8;
/// The entries of a directory lie in its inode if they have at most so many bytes: some 200 names. A
/// version of a larger one is a leaf and its inode, instead of all its entries for each replica.
const MAX_INLINE_ENTRY_BYTES: usize = 16 << 10;
const LINK_BYTES: usize = 24 + 32;
const HERE: u8 = 0;
const ELSEWHERE: u8 = 1;

/// Where an inode lives on the ring: the first half of its key; the second is zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct InodeKey(pub [u8; 32]);

impl InodeKey {
    /// Of the inode that lives there.
    pub fn of(key: &Key) -> InodeKey {
        InodeKey(*key.0.first_chunk().expect("a key has 64 bytes"))
    }

    /// The key on the ring.
    pub fn key(&self) -> Key {
        Key::hashed(self.0)
    }
}

/// One name of an inode: which directory names it, and the write that added the name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Link {
    /// The write that added it.
    pub added: Dot,
    /// The directory.
    pub directory: InodeKey,
}

impl Element for Link {
    fn added(&self) -> Dot {
        self.added
    }
}

/// What a directory says about one name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Entry {
    /// The name.
    pub name: Bytes,
    /// The write that added it.
    pub added: Dot,
    /// What it names.
    pub inode: InodeKey,
    /// The kind of that.
    pub kind: u8,
    /// When it was added, by the writer's clock, milliseconds since 1970.
    pub time_ms: u64,
}

impl Element for Entry {
    fn added(&self) -> Dot {
        self.added
    }
}

impl Entry {
    /// How many bytes it has when encoded.
    pub(super) fn encoded_bytes(&self) -> usize {
        MIN_ENTRY_BYTES - 1 + self.name.len()
    }

    /// An entry that the write `added` makes.
    pub fn new(
        name: Bytes,
        (inode, kind): (InodeKey, FileKind),
        added: Dot,
        time_ms: u64,
    ) -> Entry {
        Entry { name, added, inode, kind: kind_code(kind), time_ms }
    }

    /// The kind of the inode that it names.
    pub fn file_kind(&self) -> FileKind {
        kind_of(self.kind).expect("checked when it was decoded")
    }
}

/// What is the same for all kinds.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Attributes {
    /// Permission bits, `0o7777` at most.
    pub mode: u32,
    /// Owning user.
    pub uid: u32,
    /// Owning group.
    pub gid: u32,
    /// Last change of contents.
    pub mtime: FileTime,
    /// Last change of contents or attributes.
    pub ctime: FileTime,
    /// Last access, as far as it was set.
    pub atime: FileTime,
    /// Extended attributes, names ascending; at most [`MAX_XATTR_BYTES`] encoded.
    pub xattrs: Vec<(Bytes, Bytes)>,
    /// Who wrote the version, if the owner has signed it anew.
    pub origin: Option<Origin>,
}

/// Where the bytes of a regular file that is not empty are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FileData {
    /// The inode block is here.
    Here(InodeBlock),
    /// The inode block is a content block.
    Elsewhere(BlockHash),
}

/// The write that made the contents of a file. Versions that change attributes alone keep it, so that
/// they do not compete with contents that others wrote at the same time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Written {
    /// The write.
    pub dot: Dot,
    /// When, by the writer's clock, milliseconds since 1970.
    pub time_ms: u64,
}

impl Element for Written {
    fn added(&self) -> Dot {
        self.dot
    }
}

/// What an inode stands for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Contents {
    /// A regular file.
    Regular {
        /// Length.
        size_bytes: u64,
        /// Space its data takes, in units of 512 bytes.
        blocks_512: u64,
        /// Its data; none if it is empty.
        data: Option<FileData>,
        /// The write that made them.
        written: Written,
    },
    /// A directory.
    Directory(Entries),
    /// A directory whose entries lie elsewhere and were not read.
    Unread {
        /// How many entries.
        entries: usize,
        /// The leaves that they lie in.
        leaves: Vec<BlockHash>,
    },
    /// A symbolic link and its target.
    Symlink(Bytes),
    /// A FIFO, socket or device.
    Special {
        /// Which of them.
        kind: FileKind,
        /// Device number; 0 for others.
        rdev: u64,
    },
}

impl Contents {
    /// Whether both are the same, whoever wrote them.
    pub fn is_same(&self, other: &Contents) -> bool {
        match (self, other) {
            (
                Contents::Regular { size_bytes, data, .. },
                Contents::Regular { size_bytes: other_bytes, data: other_data, .. },
            ) => size_bytes == other_bytes && data == other_data,
            _ => self == other,
        }
    }

    /// Whether `next`, which replaces them, lacks bytes of a file or names of a directory.
    pub(super) fn is_lost_with(&self, next: &Contents) -> bool {
        match (self, next) {
            (Contents::Regular { size_bytes: 0, .. }, _) => false,
            (Contents::Directory(before), Contents::Directory(next)) => next.lacks_one_of(before),
            _ => !self.is_same(next),
        }
    }

    /// What it is.
    pub fn kind(&self) -> FileKind {
        match self {
            Contents::Regular { .. } => FileKind::Regular,
            Contents::Directory(_) | Contents::Unread { .. } => FileKind::Directory,
            Contents::Symlink(_) => FileKind::Symlink,
            Contents::Special { kind, .. } => *kind,
        }
    }
}

impl Attributes {
    /// The extended attributes as a block.
    fn encode_xattrs(&self) -> Result<Vec<u8>, TooLarge> {
        let encoded = match self.xattrs.is_empty() {
            true => Vec::new(),
            false => xattrs::encode(&self.xattrs).ok_or(TooLarge::Xattrs)?,
        };
        if encoded.len() > MAX_XATTR_BYTES { Err(TooLarge::Xattrs) } else { Ok(encoded) }
    }

    /// That the extended attributes fit an inode.
    ///
    /// # Errors
    /// If they do not.
    pub(super) fn check_xattrs(&self) -> Result<(), TooLarge> {
        self.encode_xattrs().map(drop)
    }
}

/// The number of the inode that keeps contents of `inode` which were written at the same time as others:
/// all who make it make the same one.
pub(super) fn conflict_number(inode: &InodeKey, dot: &Dot) -> [u8; 16] {
    let height = dot.height.to_be_bytes();
    let named = [b"atoll v1 conflict", &inode.0[..], dot.writer.as_bytes(), &height].concat();
    *BlockHash::of(&named).0.first_chunk().expect("32 bytes")
}

/// An inode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inode {
    /// What is the same for all kinds.
    pub attributes: Attributes,
    /// Its names.
    pub links: BTreeSet<Link>,
    /// The newest of its [past versions](super::past) that are kept.
    pub past: Option<BlockHash>,
    /// What it is.
    pub contents: Contents,
}

/// Why an inode cannot be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooLarge {
    /// More than [`MAX_LINKS`] names.
    #[error("a file has at most {MAX_LINKS} names")]
    Links,
    /// More than [`MAX_XATTR_BYTES`] of extended attributes.
    #[error("a file has at most {MAX_XATTR_BYTES} bytes of extended attributes")]
    Xattrs,
    /// More than [`MAX_PAYLOAD_BYTES`] together.
    #[error("an inode has at most {MAX_PAYLOAD_BYTES} bytes")]
    Payload,
}

impl Inode {
    /// The payload, in the clear. In an encrypted volume, the ring must have its [leaves](Inode::leaves).
    ///
    /// # Errors
    /// If a part of it, or all of it, is too long.
    pub fn encode(&self) -> Result<Vec<u8>, TooLarge> {
        let Attributes { mode, uid, gid, mtime, ctime, atime, .. } = &self.attributes;
        let mut out = match &self.attributes.origin {
            None => vec![LAYOUT],
            Some(origin) => {
                let mut out = vec![LAYOUT_WITH_ORIGIN];
                origin.put(&mut out);
                out
            }
        };
        out.push(kind_code(self.contents.kind()));
        put_mode(&mut out, *mode);
        out.extend_from_slice(&uid.to_be_bytes());
        out.extend_from_slice(&gid.to_be_bytes());
        [mtime, ctime, atime].into_iter().for_each(|time| put_time(&mut out, *time));
        if self.links.len() > MAX_LINKS {
            return Err(TooLarge::Links);
        }
        out.extend_from_slice(&(self.links.len() as u16).to_be_bytes());
        for link in &self.links {
            put_dot(&mut out, &link.added);
            out.extend_from_slice(&link.directory.0);
        }
        let xattrs = self.attributes.encode_xattrs()?;
        put_len(&mut out, xattrs.len());
        out.extend_from_slice(&xattrs);
        out.extend_from_slice(&self.past.unwrap_or(BlockHash([0; 32])).0);
        match &self.contents {
            Contents::Regular { size_bytes, blocks_512, data, written } => {
                put_dot(&mut out, &written.dot);
                put_u64(&mut out, written.time_ms);
                put_u64(&mut out, *size_bytes);
                put_u64(&mut out, *blocks_512);
                match data {
                    None => {}
                    Some(FileData::Here(block)) => {
                        out.push(HERE);
                        let block = block.encode();
                        if block.len() > MAX_INLINE_BYTES {
                            return Err(TooLarge::Payload);
                        }
                        out.extend_from_slice(&block);
                    }
                    Some(FileData::Elsewhere(hash)) => {
                        out.push(ELSEWHERE);
                        out.extend_from_slice(&hash.0);
                    }
                }
            }
            Contents::Directory(entries) => {
                if self.leaves().is_empty() {
                    out.push(HERE);
                    put_len(&mut out, entries.len());
                    entries.iter().for_each(|entry| put_entry(&mut out, entry));
                } else {
                    let hashes: Vec<BlockHash> =
                        entries.leaves().iter().map(|leaf| leaf.hash()).collect();
                    put_leaves(&mut out, entries.len(), &hashes)?;
                }
            }
            Contents::Unread { entries, leaves } => put_leaves(&mut out, *entries, leaves)?,
            Contents::Symlink(target) => {
                let len = u16::try_from(target.len()).map_err(|_| TooLarge::Payload)?;
                out.extend_from_slice(&len.to_be_bytes());
                out.extend_from_slice(target);
            }
            Contents::Special { kind, rdev } => {
                if is_device(*kind) {
                    put_u64(&mut out, *rdev);
                }
            }
        }
        match out.len() {
            0..=MAX_PAYLOAD_BYTES => Ok(out),
            _ => Err(TooLarge::Payload),
        }
    }

    /// The leaves that the payload refers to: those of a large directory.
    pub(super) fn leaves(&self) -> &[Arc<Leaf>] {
        match &self.contents {
            Contents::Directory(entries) if entries.encoded_bytes() > MAX_INLINE_ENTRY_BYTES => {
                entries.leaves()
            }
            _ => &[],
        }
    }

    /// Reads a payload in the clear.
    ///
    /// # Errors
    /// If it is not an inode.
    pub fn decode(payload: &Bytes) -> Result<Inode, FormatError> {
        let mut cursor = Cursor::new(payload);
        let origin = match cursor.u8()? {
            LAYOUT => None,
            LAYOUT_WITH_ORIGIN => Some(Origin::take(&mut cursor)?),
            other => return Err(FormatError::UnknownLayout(other)),
        };
        let kind = kind_of(cursor.u8()?)?;
        let (mode, uid, gid) = (cursor.mode()?, cursor.u32()?, cursor.u32()?);
        let (mtime, ctime, atime) = (cursor.time()?, cursor.time()?, cursor.time()?);
        let links = decode_links(&mut cursor)?;
        let xattr_bytes = cursor.u32()? as usize;
        if xattr_bytes > MAX_XATTR_BYTES {
            return Err(FormatError::TrailingBytes(xattr_bytes - MAX_XATTR_BYTES));
        }
        let xattrs = match xattr_bytes {
            0 => Vec::new(),
            _ => xattrs::decode(&cursor.take(xattr_bytes)?)?,
        };
        let attributes = Attributes { mode, uid, gid, mtime, ctime, atime, xattrs, origin };
        let past = cursor.optional_hash()?;
        let contents = match kind {
            FileKind::Regular => decode_regular(&mut cursor)?,
            FileKind::Directory => decode_directory(&mut cursor)?,
            FileKind::Symlink => Contents::Symlink(take_target(&mut cursor)?),
            _ => {
                let rdev = if is_device(kind) { cursor.u64()? } else { 0 };
                Contents::Special { kind, rdev }
            }
        };
        cursor.end()?;
        Ok(Inode { attributes, links, past, contents })
    }
}

fn is_device(kind: FileKind) -> bool {
    matches!(kind, FileKind::CharDevice | FileKind::BlockDevice)
}

fn put_len(out: &mut Vec<u8>, len: usize) {
    let len = u32::try_from(len).expect("an inode is short");
    out.extend_from_slice(&len.to_be_bytes());
}

fn put_leaves(out: &mut Vec<u8>, entries: usize, leaves: &[BlockHash]) -> Result<(), TooLarge> {
    out.push(ELSEWHERE);
    put_len(out, entries);
    let count = u16::try_from(leaves.len()).map_err(|_| TooLarge::Payload)?;
    out.extend_from_slice(&count.to_be_bytes());
    leaves.iter().for_each(|hash| out.extend_from_slice(&hash.0));
    Ok(())
}

pub(super) fn put_entry(out: &mut Vec<u8>, entry: &Entry) {
    put_name(out, &entry.name);
    put_dot(out, &entry.added);
    out.extend_from_slice(&entry.inode.0);
    out.push(entry.kind);
    put_u64(out, entry.time_ms);
}

pub(super) fn take_entry(cursor: &mut Cursor) -> Result<Entry, FormatError> {
    let (name, added) = (take_name(cursor)?, take_dot(cursor)?);
    let inode = InodeKey(cursor.hash()?.0);
    let (kind, time_ms) = (cursor.u8()?, cursor.u64()?);
    kind_of(kind)?;
    Ok(Entry { name, added, inode, kind, time_ms })
}

fn put_dot(out: &mut Vec<u8>, dot: &Dot) {
    out.extend_from_slice(dot.writer.as_bytes());
    put_u64(out, dot.height);
}

fn take_dot(cursor: &mut Cursor) -> Result<Dot, FormatError> {
    let writer = cursor.take(16)?[..].try_into().expect("16 bytes");
    Ok(Dot { writer: WriterId::from_bytes(writer), height: cursor.u64()? })
}

fn decode_links(cursor: &mut Cursor) -> Result<BTreeSet<Link>, FormatError> {
    let count = usize::from(cursor.u16()?);
    if count > MAX_LINKS || count > cursor.len() / LINK_BYTES {
        return Err(FormatError::Truncated);
    }
    let mut links = BTreeSet::new();
    for _ in 0..count {
        let link = Link { added: take_dot(cursor)?, directory: InodeKey(cursor.hash()?.0) };
        if links.last().is_some_and(|last| *last >= link) {
            return Err(FormatError::BadReference("an inode's links are not in order"));
        }
        links.insert(link);
    }
    Ok(links)
}

fn decode_regular(cursor: &mut Cursor) -> Result<Contents, FormatError> {
    let written = Written { dot: take_dot(cursor)?, time_ms: cursor.u64()? };
    let (size_bytes, blocks_512) = (cursor.u64()?, cursor.u64()?);
    if size_bytes > MAX_FILE_BYTES {
        return Err(FormatError::FileTooLong(size_bytes));
    }
    if size_bytes == 0 {
        return Ok(Contents::Regular { size_bytes, blocks_512, data: None, written });
    }
    let data = match cursor.u8()? {
        HERE => {
            let len = cursor.len();
            if len > MAX_INLINE_BYTES {
                return Err(FormatError::TrailingBytes(len - MAX_INLINE_BYTES));
            }
            let block = InodeBlock::decode(&cursor.take(len)?)?;
            if block.shape.size_bytes != size_bytes {
                let (stated, found) = (size_bytes, block.shape.size_bytes);
                return Err(FormatError::Mismatch { what: "length of a file", stated, found });
            }
            FileData::Here(block)
        }
        ELSEWHERE => FileData::Elsewhere(cursor.hash()?),
        _ => return Err(FormatError::BadReference("a file's data is in an unknown place")),
    };
    Ok(Contents::Regular { size_bytes, blocks_512, data: Some(data), written })
}

fn decode_directory(cursor: &mut Cursor) -> Result<Contents, FormatError> {
    let place = cursor.u8()?;
    let count = cursor.u32()? as usize;
    match place {
        HERE => {}
        ELSEWHERE => {
            let leaves = usize::from(cursor.u16()?);
            if leaves > cursor.len() / 32 {
                return Err(FormatError::Truncated);
            }
            let leaves = (0..leaves).map(|_| cursor.hash()).collect::<Result<_, _>>()?;
            return Ok(Contents::Unread { entries: count, leaves });
        }
        _ => {
            return Err(FormatError::BadReference("a directory's entries are in an unknown place"));
        }
    }
    if count > cursor.len() / MIN_ENTRY_BYTES {
        return Err(FormatError::Truncated);
    }
    let mut entries: Vec<Entry> = Vec::new();
    for _ in 0..count {
        let entry = take_entry(cursor)?;
        if entries.last().is_some_and(|last| *last >= entry) {
            return Err(FormatError::Unsorted { name: shown(&entry.name) });
        }
        entries.push(entry);
    }
    let entries: Entries = entries.into_iter().collect();
    if entries.encoded_bytes() > MAX_INLINE_ENTRY_BYTES {
        return Err(FormatError::BadReference("a directory has too many entries in its inode"));
    }
    Ok(Contents::Directory(entries))
}
