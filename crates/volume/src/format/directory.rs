//! Directory blocks: entries sorted by name in leaves, and above them, where one leaf is
//! not enough, interior blocks that list their children's first names.
//!
//! Where one block ends and the next begins is decided by the names themselves
//! ([`starts_block`]), so that a changed entry changes its own leaf and the interior
//! blocks above it, and no other.
//!
//! Block:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `ATDB` |
//! | 4 | 1 | layout, 1 |
//! | 5 | 1 | level: 0 a leaf, else its children are of level − 1 |
//! | 6 | 4 | number *n* of entries or children, at least 1 |
//! | 10 | … | *n* entries (leaf) or children (interior), names strictly ascending |
//!
//! DirectoryEntry:
//!
//! | bytes | field |
//! |---|---|
//! | 1 | kind: 1 regular file, 2 directory, 3 symbolic link, 4 FIFO, 5 socket, 6 character device, 7 block device, 8 one of several names |
//! | 1 | flags: 1 = has extended attributes, 2 = has an owner; others must be 0 |
//! | 2 | mode, at most `0o7777` |
//! | 8 + 4 | time of modification: seconds since 1970 (signed), nanoseconds |
//! | 1 + *n* | length of the name, name |
//! | | *regular file:* 8 length, 8 space taken in 512-byte units; 32 inode hash unless the length is 0 |
//! | | *directory:* 8 entries, 8 of them directories; 32 hash of its top block unless it is empty |
//! | | *link:* 2 + *m* length of the target, target |
//! | | *FIFO, socket:* nothing. *Device:* 8 device number |
//! | | *one of several names:* 1 kind of the file (1, 3 to 7), 8 inode number |
//! | 32 | hash of the xattr block, if flag 1 is set |
//! | 44 | owner, if flag 2 is set: 8 inode number, 4 user, 4 group, 4 number of names, 12 time of change, 12 time of access |
//!
//! A file with several names has its contents and attributes in the volume's *table of links*, a
//! directory whose names are inode numbers in 16 hexadecimal digits ([`link_name`]).
//!
//! Child: 32 hash, 8 entries below it, 8 of them directories, 1 + *n* its first name.
//!
//! A published tree has no owners: CFS publishes to everybody, and such a tree belongs to the user
//! who mounts it. Entries that a read-write mount has written have them.

use atoll_key::BlockHash;
use atoll_vfs::{FileKind, FileTime, MAX_NAME_BYTES};
use bytes::Bytes;

use super::cursor::{Cursor, put_hash, put_header, put_mode, put_time, put_u64};
use super::{FormatError, MAX_DIRECTORY_LEVELS, MAX_FILE_BYTES, MAX_TARGET_BYTES, shown};

const MAGIC: &[u8; 4] = b"ATDB";
const NAME: &str = "directory";

/// Bytes of a directory block before its first entry.
pub(crate) const HEADER_BYTES: usize = 10;

const FLAG_XATTRS: u8 = 1;
const FLAG_OWNER: u8 = 2;

const KIND_LINKED: u8 = 8;

/// The shortest an entry (a FIFO) can be, bytes: bounds what a count may claim.
const MIN_NODE_BYTES: usize = 18;

/// Where a directory's entries are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DirectoryRef {
    /// How many entries.
    pub entries: u64,
    /// How many of them are directories.
    pub subdirectories: u64,
    /// The top directory block; none if empty.
    pub hash: Option<BlockHash>,
}

/// What a directory says about one name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirectoryEntry {
    /// The name.
    pub name: Bytes,
    /// Permission bits, `0o7777` at most.
    pub mode: u32,
    /// Last change of contents.
    pub mtime: FileTime,
    /// What it is and where its contents are.
    pub content: Content,
    /// The block of its extended attributes, if it has any.
    pub xattrs: Option<BlockHash>,
    /// What a read-write mount keeps beside that; published trees have none.
    pub owner: Option<Owner>,
}

/// The attributes of a file in a volume that was written through a mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Owner {
    /// Its number, which it keeps as long as it exists; no other file of the volume gets it.
    pub inode: u64,
    /// Owning user.
    pub uid: u32,
    /// Owning group.
    pub gid: u32,
    /// Number of names; 1 for a directory.
    pub links: u32,
    /// Last change of contents or attributes.
    pub ctime: FileTime,
    /// Last access, as far as it was set.
    pub atime: FileTime,
}

/// The name of a file in the table of links.
pub fn link_name(inode: u64) -> Bytes {
    Bytes::from(format!("{inode:016x}"))
}

/// What an entry stands for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Content {
    /// A regular file.
    Regular {
        /// Length.
        size_bytes: u64,
        /// Space its data takes, in units of 512 bytes.
        blocks_512: u64,
        /// Its inode block; none if the file is empty.
        inode: Option<BlockHash>,
    },
    /// A directory.
    Directory(DirectoryRef),
    /// A symbolic link and its target.
    Symlink(Bytes),
    /// A FIFO, socket or device.
    Special {
        /// Which of them.
        kind: FileKind,
        /// Device number; 0 for others.
        rdev: u64,
    },
    /// One of several names of a file that is in the table of links.
    Linked {
        /// Its kind: anything but a directory.
        kind: FileKind,
        /// Its number.
        inode: u64,
    },
}

impl DirectoryEntry {
    /// What kind of file it is.
    pub fn kind(&self) -> FileKind {
        match self.content {
            Content::Regular { .. } => FileKind::Regular,
            Content::Directory(_) => FileKind::Directory,
            Content::Symlink(_) => FileKind::Symlink,
            Content::Special { kind, .. } | Content::Linked { kind, .. } => kind,
        }
    }

    /// Device number; 0 for what is no device.
    pub fn rdev(&self) -> u64 {
        match self.content {
            Content::Special { rdev, .. } => rdev,
            _ => 0,
        }
    }

    /// Length of a file, or of a link's target; for a directory its number of entries.
    pub fn size_bytes(&self) -> u64 {
        match &self.content {
            Content::Regular { size_bytes, .. } => *size_bytes,
            Content::Directory(directory) => directory.entries,
            Content::Symlink(target) => target.len() as u64,
            Content::Special { .. } | Content::Linked { .. } => 0,
        }
    }

    /// Appends the entry's bytes.
    ///
    /// # Panics
    /// If the name or target is longer than allowed: the caller read them from a system
    /// with the same limits.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(match self.content {
            Content::Linked { .. } => KIND_LINKED,
            _ => kind_code(self.kind()),
        });
        let flag = |set: bool, flag| if set { flag } else { 0 };
        out.push(flag(self.xattrs.is_some(), FLAG_XATTRS) | flag(self.owner.is_some(), FLAG_OWNER));
        put_mode(out, self.mode);
        put_time(out, self.mtime);
        put_name(out, &self.name);
        match &self.content {
            Content::Regular { size_bytes, blocks_512, inode } => {
                put_u64(out, *size_bytes);
                put_u64(out, *blocks_512);
                out.extend_from_slice(inode.as_ref().map_or(&[], |hash| &hash.0));
            }
            Content::Directory(directory) => put_directory(out, directory),
            Content::Symlink(target) => {
                assert!(target.len() <= MAX_TARGET_BYTES, "a link's target is a path");
                out.extend_from_slice(&(target.len() as u16).to_be_bytes());
                out.extend_from_slice(target);
            }
            Content::Special { kind, rdev } => {
                if matches!(kind, FileKind::CharDevice | FileKind::BlockDevice) {
                    put_u64(out, *rdev);
                }
            }
            Content::Linked { kind, inode } => {
                out.push(kind_code(*kind));
                put_u64(out, *inode);
            }
        }
        out.extend_from_slice(self.xattrs.as_ref().map_or(&[], |hash| &hash.0));
        if let Some(owner) = &self.owner {
            owner.encode(out);
        }
    }

    fn decode(cursor: &mut Cursor) -> Result<DirectoryEntry, FormatError> {
        let code = cursor.u8()?;
        let kind = match code {
            KIND_LINKED => None,
            code => Some(kind_of(code)?),
        };
        let flags = cursor.u8()?;
        if flags & !(FLAG_XATTRS | FLAG_OWNER) != 0 {
            return Err(FormatError::UnknownFlags(flags));
        }
        let mode = cursor.mode()?;
        let mtime = cursor.time()?;
        let name = take_name(cursor)?;
        let content = match kind {
            Some(FileKind::Regular) => decode_regular(cursor)?,
            Some(FileKind::Directory) => Content::Directory(take_directory(cursor)?),
            Some(FileKind::Symlink) => Content::Symlink(take_target(cursor)?),
            Some(kind @ (FileKind::CharDevice | FileKind::BlockDevice)) => {
                Content::Special { kind, rdev: cursor.u64()? }
            }
            Some(kind) => Content::Special { kind, rdev: 0 },
            None => decode_linked(cursor)?,
        };
        let xattrs = if flags & FLAG_XATTRS != 0 {
            let hash = cursor.optional_hash()?;
            Some(hash.ok_or(FormatError::BadReference("the hash of the xattr block is zero"))?)
        } else {
            None
        };
        let owner = match flags & FLAG_OWNER {
            0 => None,
            _ => Some(Owner::decode(cursor)?),
        };
        Ok(DirectoryEntry { name, mode, mtime, content, xattrs, owner })
    }
}

impl Owner {
    fn encode(&self, out: &mut Vec<u8>) {
        put_u64(out, self.inode);
        for number in [self.uid, self.gid, self.links] {
            out.extend_from_slice(&number.to_be_bytes());
        }
        put_time(out, self.ctime);
        put_time(out, self.atime);
    }

    pub(crate) fn decode(cursor: &mut Cursor) -> Result<Owner, FormatError> {
        let inode = cursor.u64()?;
        let (uid, gid, links) = (cursor.u32()?, cursor.u32()?, cursor.u32()?);
        if inode == 0 || links == 0 {
            return Err(FormatError::BadReference("a file has the number 0, or no names"));
        }
        Ok(Owner { inode, uid, gid, links, ctime: cursor.time()?, atime: cursor.time()? })
    }

    /// The owner as the root of a volume has it.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut out = Vec::with_capacity(44);
        self.encode(&mut out);
        out
    }
}

pub(crate) fn kind_code(kind: FileKind) -> u8 {
    match kind {
        FileKind::Regular => 1,
        FileKind::Directory => 2,
        FileKind::Symlink => 3,
        FileKind::Fifo => 4,
        FileKind::Socket => 5,
        FileKind::CharDevice => 6,
        FileKind::BlockDevice => 7,
    }
}

pub(crate) fn kind_of(code: u8) -> Result<FileKind, FormatError> {
    Ok(match code {
        1 => FileKind::Regular,
        2 => FileKind::Directory,
        3 => FileKind::Symlink,
        4 => FileKind::Fifo,
        5 => FileKind::Socket,
        6 => FileKind::CharDevice,
        7 => FileKind::BlockDevice,
        code => return Err(FormatError::UnknownKind(code)),
    })
}

fn decode_linked(cursor: &mut Cursor) -> Result<Content, FormatError> {
    let kind = kind_of(cursor.u8()?)?;
    let inode = cursor.u64()?;
    if kind == FileKind::Directory || inode == 0 {
        return Err(FormatError::BadReference("a directory, or no file, has several names"));
    }
    Ok(Content::Linked { kind, inode })
}

fn decode_regular(cursor: &mut Cursor) -> Result<Content, FormatError> {
    let size_bytes = cursor.u64()?;
    let blocks_512 = cursor.u64()?;
    if size_bytes > MAX_FILE_BYTES {
        return Err(FormatError::FileTooLong(size_bytes));
    }
    if blocks_512 > size_bytes.div_ceil(512) {
        return Err(FormatError::Mismatch {
            what: "space taken by a file, against its length",
            stated: blocks_512,
            found: size_bytes.div_ceil(512),
        });
    }
    let inode = match size_bytes {
        0 => None,
        _ => Some(
            cursor
                .optional_hash()?
                .ok_or(FormatError::BadReference("the hash of an inode block is zero"))?,
        ),
    };
    Ok(Content::Regular { size_bytes, blocks_512, inode })
}

/// The target of a symbolic link: length and bytes.
pub(crate) fn take_target(cursor: &mut Cursor) -> Result<Bytes, FormatError> {
    let len = usize::from(cursor.u16()?);
    if len == 0 {
        return Err(FormatError::BadTarget("it is empty"));
    }
    if len > MAX_TARGET_BYTES {
        return Err(FormatError::BadTarget("it is longer than a path can be"));
    }
    let target = cursor.take(len)?;
    if target.contains(&0) {
        return Err(FormatError::BadTarget("it has a NUL in it"));
    }
    Ok(target)
}

/// DirectoryEntry counts and hash of a directory, as the root and entries hold them.
pub(crate) fn put_directory(out: &mut Vec<u8>, directory: &DirectoryRef) {
    put_u64(out, directory.entries);
    put_u64(out, directory.subdirectories);
    out.extend_from_slice(directory.hash.as_ref().map_or(&[], |hash| &hash.0));
}

pub(crate) fn take_directory(cursor: &mut Cursor) -> Result<DirectoryRef, FormatError> {
    let (entries, subdirectories) = take_counts(cursor)?;
    let hash = match entries {
        0 => None,
        _ => Some(
            cursor
                .optional_hash()?
                .ok_or(FormatError::BadReference("the hash of a directory block is zero"))?,
        ),
    };
    Ok(DirectoryRef { entries, subdirectories, hash })
}

fn take_counts(cursor: &mut Cursor) -> Result<(u64, u64), FormatError> {
    let entries = cursor.u64()?;
    let subdirectories = cursor.u64()?;
    if subdirectories > entries {
        return Err(FormatError::Mismatch {
            what: "subdirectories, against entries",
            stated: subdirectories,
            found: entries,
        });
    }
    Ok((entries, subdirectories))
}

pub(crate) fn put_name(out: &mut Vec<u8>, name: &[u8]) {
    assert!(name.len() <= MAX_NAME_BYTES, "a name is at most 255 bytes long");
    out.push(name.len() as u8);
    out.extend_from_slice(name);
}

pub(crate) fn take_name(cursor: &mut Cursor) -> Result<Bytes, FormatError> {
    let len = usize::from(cursor.u8()?);
    let name = cursor.take(len)?;
    let reason = match &name[..] {
        b"" => "it is empty",
        b"." | b".." => "it means a directory",
        name if name.contains(&b'/') => "it has a slash in it",
        name if name.contains(&0) => "it has a NUL in it",
        _ => return Ok(name),
    };
    Err(FormatError::BadName { name: shown(&name), reason })
}

/// A block below an interior directory block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Child {
    /// Its hash.
    pub hash: BlockHash,
    /// Entries in all leaves below it.
    pub entries: u64,
    /// How many of those are directories.
    pub subdirectories: u64,
    /// The name of the first of those.
    pub first_name: Bytes,
}

impl Child {
    /// Appends the child's bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_hash(out, Some(&self.hash));
        put_u64(out, self.entries);
        put_u64(out, self.subdirectories);
        put_name(out, &self.first_name);
    }

    fn decode(cursor: &mut Cursor) -> Result<Child, FormatError> {
        let hash = cursor
            .optional_hash()?
            .ok_or(FormatError::BadReference("the hash of a directory block is zero"))?;
        let (entries, subdirectories) = take_counts(cursor)?;
        Ok(Child { hash, entries, subdirectories, first_name: take_name(cursor)? })
    }
}

/// What a directory block lists.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Nodes {
    /// Entries, in a leaf.
    Leaf(Vec<DirectoryEntry>),
    /// Blocks of the level below.
    Interior(Vec<Child>),
}

/// A directory block, read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirectoryBlock {
    /// 0 for a leaf; one more than its children's for an interior block.
    pub level: u8,
    /// Its entries or children; at least one, names strictly ascending.
    pub nodes: Nodes,
}

impl DirectoryBlock {
    /// Reads a block.
    pub fn decode(block: &Bytes) -> Result<DirectoryBlock, FormatError> {
        let mut cursor = Cursor::header(block, MAGIC, NAME)?;
        let level = cursor.u8()?;
        if level >= MAX_DIRECTORY_LEVELS {
            return Err(FormatError::TooManyLevels(level.saturating_add(1)));
        }
        let count = cursor.u32()? as usize;
        if count == 0 {
            return Err(FormatError::BadReference("a directory block is empty"));
        }
        if count > cursor.len() / MIN_NODE_BYTES {
            return Err(FormatError::Truncated);
        }
        let nodes = if level == 0 {
            Nodes::Leaf(decode_sorted(&mut cursor, count, DirectoryEntry::decode, |e| &e.name)?)
        } else {
            Nodes::Interior(decode_sorted(&mut cursor, count, Child::decode, |c| &c.first_name)?)
        };
        cursor.end()?;
        Ok(DirectoryBlock { level, nodes })
    }

    /// The block's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; HEADER_BYTES];
        let count = match &self.nodes {
            Nodes::Leaf(entries) => {
                entries.iter().for_each(|entry| entry.encode(&mut out));
                entries.len()
            }
            Nodes::Interior(children) => {
                children.iter().for_each(|child| child.encode(&mut out));
                children.len()
            }
        };
        write_header(&mut out, self.level, count);
        out
    }

    /// Entries below the block, and how many of them are directories.
    pub fn counts(&self) -> (u64, u64) {
        match &self.nodes {
            Nodes::Leaf(entries) => {
                let dirs = entries.iter().filter(|e| e.kind() == FileKind::Directory).count();
                (entries.len() as u64, dirs as u64)
            }
            Nodes::Interior(children) => children.iter().fold((0, 0), |(entries, dirs), c| {
                (c.entries.saturating_add(entries), c.subdirectories.saturating_add(dirs))
            }),
        }
    }

    /// The entries of a leaf; none of an interior block.
    pub fn entries(&self) -> &[DirectoryEntry] {
        match &self.nodes {
            Nodes::Leaf(entries) => entries,
            Nodes::Interior(_) => &[],
        }
    }

    /// The name of the block's first entry or child.
    pub fn first_name(&self) -> &Bytes {
        match &self.nodes {
            Nodes::Leaf(entries) => &entries[0].name,
            Nodes::Interior(children) => &children[0].first_name,
        }
    }

    /// The name of the block's last entry or child.
    pub fn last_name(&self) -> &Bytes {
        match &self.nodes {
            Nodes::Leaf(entries) => &entries[entries.len() - 1].name,
            Nodes::Interior(children) => &children[children.len() - 1].first_name,
        }
    }

    /// Checks the block against what points to it: `stated` entries and directories.
    pub fn check_counts(&self, stated: (u64, u64)) -> Result<(), FormatError> {
        let found = self.counts();
        let what = "entries of a directory block";
        if found.0 != stated.0 {
            return Err(FormatError::Mismatch { what, stated: stated.0, found: found.0 });
        }
        let what = "subdirectories in a directory block";
        if found.1 != stated.1 {
            return Err(FormatError::Mismatch { what, stated: stated.1, found: found.1 });
        }
        Ok(())
    }

    /// Checks the block against its place below an interior block of `level`: `child`
    /// points to it, and all of its names lie before `next`.
    pub fn check_place(
        &self,
        level: u8,
        child: &Child,
        next: Option<&Bytes>,
    ) -> Result<(), FormatError> {
        if self.level + 1 != level {
            return Err(FormatError::Mismatch {
                what: "level of a directory block",
                stated: u64::from(level) - 1,
                found: u64::from(self.level),
            });
        }
        self.check_counts((child.entries, child.subdirectories))?;
        if *self.first_name() != child.first_name {
            return Err(FormatError::Unsorted { name: shown(self.first_name()) });
        }
        if next.is_some_and(|next| self.last_name() >= next) {
            return Err(FormatError::Unsorted { name: shown(self.last_name()) });
        }
        Ok(())
    }
}

fn decode_sorted<T>(
    cursor: &mut Cursor,
    count: usize,
    decode: impl Fn(&mut Cursor) -> Result<T, FormatError>,
    name: impl Fn(&T) -> &Bytes,
) -> Result<Vec<T>, FormatError> {
    let mut nodes: Vec<T> = Vec::with_capacity(count);
    for _ in 0..count {
        let node = decode(cursor)?;
        if nodes.last().is_some_and(|last| name(last) >= name(&node)) {
            return Err(FormatError::Unsorted { name: shown(name(&node)) });
        }
        nodes.push(node);
    }
    Ok(nodes)
}

/// Fills in the header of a block whose nodes were appended after [`HEADER_BYTES`] zeros.
pub(crate) fn write_header(out: &mut [u8], level: u8, count: usize) {
    let mut header = Vec::with_capacity(HEADER_BYTES);
    put_header(&mut header, MAGIC);
    header.push(level);
    header.extend_from_slice(&(count as u32).to_be_bytes());
    out[..HEADER_BYTES].copy_from_slice(&header);
}

/// Whether `name` begins a new block of `level`, given that the block before it is large
/// enough: one name in 128 does, by another byte of its hash for each level.
pub fn starts_block(name: &[u8], level: u8) -> bool {
    BlockHash::of(name).0[usize::from(level)] & 0x7f == 0
}
