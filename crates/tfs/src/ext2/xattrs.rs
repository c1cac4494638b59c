//! Extended attributes: a block of them beside the inode, as ext2 keeps them; those that ext4
//! put into large inodes are read too.
//!
//! | offset | bytes | attribute block |
//! |---|---|---|
//! | 0 | 4 | magic `0xEA020000` |
//! | 4 | 4 | inodes that share the block |
//! | 8 | 4 | blocks, 1 |
//! | 12 | 4 | hash of all entries, 0: not to be shared |
//! | 16 | 16 | unused |
//!
//! | offset | bytes | entry, sorted by name index, name length, name |
//! |---|---|---|
//! | 0 | 1 | name length |
//! | 1 | 1 | name index: the prefix |
//! | 2 | 2 | where the value begins in the block |
//! | 4 | 4 | 0 |
//! | 8 | 4 | value length |
//! | 12 | 4 | hash of name and value |
//! | 16 | | the name, without its prefix |
//!
//! Values grow from the end of the block. A block that others share is left to them and another
//! one is taken: the one written last, if it holds the same attributes (files that inherit an
//! access control list do), else a new one.
//!
//! In an inode the same entries follow the magic, and values are counted from the first of
//! them. An attribute there that changes moves to the block.

use super::acl::AclKind;
use super::blocks::Run;
use super::{Ext2, Ext2Error, Goal, damaged};
use crate::format::inode::Inode;
use crate::format::{put_u16, put_u32, u16_at, u32_at};
use crate::meta::Part;

/// The longest value: what a block of 4 KiB holds beside its header and entry.
pub const MAX_VALUE_BYTES: usize = 4096 - 32 - 16 - 4;
const MAGIC: u32 = 0xEA02_0000;
/// Most inodes that share a block (Linux `EXT2_XATTR_REFCOUNT_MAX`).
const MAX_SHARERS: u32 = 1024;
const HEADER_BYTES: usize = 32;
const ENTRY_BYTES: usize = 16;
/// Prefixes by index (Linux `fs/ext4/xattr.h`). The two of access control lists are
/// [`AclKind`]'s.
const PREFIXES: &[(u8, &[u8])] = &[(1, b"user."), (4, b"trusted."), (6, b"security.")];

/// The attributes of a file: full names and values, sorted as they stand on disk.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Xattrs {
    entries: Vec<Xattr>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Xattr {
    index: u8,
    /// Without the prefix.
    name: Vec<u8>,
    value: Vec<u8>,
    /// Stands in the inode itself, where only other software writes.
    inline: bool,
}

impl Xattrs {
    /// The value of an attribute.
    pub fn value(&self, name: &[u8]) -> Option<&[u8]> {
        let (index, rest) = split(name)?;
        let found = self.entries.iter().find(|e| e.index == index && e.name == rest);
        found.map(|entry| &entry.value[..])
    }

    /// The full names.
    pub fn names(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        self.entries.iter().filter_map(|entry| {
            let acl = AclKind::ALL.into_iter().find(|kind| kind.index() == entry.index);
            if let Some(kind) = acl.filter(|_| entry.name.is_empty()) {
                return Some(kind.xattr().to_vec());
            }
            let prefix = PREFIXES.iter().find(|(index, _)| *index == entry.index)?.1;
            Some([prefix, &entry.name].concat())
        })
    }

    /// An access control list in its form on disk.
    pub fn acl(&self, kind: AclKind) -> Option<&[u8]> {
        let is_list = |entry: &&Xattr| entry.index == kind.index() && entry.name.is_empty();
        self.entries.iter().find(is_list).map(|entry| &entry.value[..])
    }

    /// Sets or removes an access control list, in its form on disk.
    pub fn set_acl(&mut self, kind: AclKind, value: Option<&[u8]>) {
        self.put(kind.index(), b"", value);
    }

    /// Sets or removes an attribute; false if its name has no prefix that is kept.
    pub fn set(&mut self, name: &[u8], value: Option<&[u8]>) -> bool {
        let Some((index, rest)) = split(name) else { return false };
        self.put(index, rest, value);
        true
    }

    fn put(&mut self, index: u8, name: &[u8], value: Option<&[u8]>) {
        self.entries.retain(|entry| (entry.index, &entry.name[..]) != (index, name));
        if let Some(value) = value {
            let (name, value) = (name.to_vec(), value.to_vec());
            self.entries.push(Xattr { index, name, value, inline: false });
            self.entries.sort_by(|a, b| {
                (a.index, a.name.len(), &a.name).cmp(&(b.index, b.name.len(), &b.name))
            });
        }
    }

    fn has_any(&self, inline: bool) -> bool {
        self.entries.iter().any(|entry| entry.inline == inline)
    }

    fn encode(&self, block: &mut [u8]) -> Result<(), Ext2Error> {
        block.fill(0);
        put_u32(block, 0, MAGIC);
        put_u32(block, 4, 1);
        put_u32(block, 8, 1);
        self.encode_entries(block, HEADER_BYTES, 0, false)
    }

    /// Entries from `at` on, in bytes that are 0 there; values are counted from `values`.
    fn encode_entries(
        &self,
        block: &mut [u8],
        at: usize,
        values: usize,
        inline: bool,
    ) -> Result<(), Ext2Error> {
        let mut at = at;
        let mut end = block.len();
        for entry in self.entries.iter().filter(|entry| entry.inline == inline) {
            let len = (ENTRY_BYTES + entry.name.len()).next_multiple_of(4);
            let value_len = entry.value.len().next_multiple_of(4);
            // Four zero bytes end the entries.
            if at + len + 4 + value_len > end {
                return Err(Ext2Error::NoSpace);
            }
            end -= value_len;
            block[end..end + entry.value.len()].copy_from_slice(&entry.value);
            block[at] = entry.name.len() as u8;
            block[at + 1] = entry.index;
            put_u16(block, at + 2, if entry.value.is_empty() { 0 } else { (end - values) as u16 });
            put_u32(block, at + 8, entry.value.len() as u32);
            put_u32(block, at + 12, hash_of(&entry.name, &entry.value));
            block[at + ENTRY_BYTES..at + ENTRY_BYTES + entry.name.len()]
                .copy_from_slice(&entry.name);
            at += len;
        }
        Ok(())
    }

    /// Entries from `at` on; values are counted from `values`.
    fn decode(bytes: &[u8], at: usize, values: usize, inline: bool) -> Option<Vec<Xattr>> {
        let mut entries = Vec::new();
        let mut at = at;
        while at + 4 <= bytes.len() && u32_at(bytes, at) != 0 {
            let head = bytes.get(at..at + ENTRY_BYTES)?;
            let name_len = usize::from(head[0]);
            let name = bytes.get(at + ENTRY_BYTES..at + ENTRY_BYTES + name_len)?.to_vec();
            let len = u32_at(head, 8) as usize;
            let start = values + usize::from(u16_at(head, 2));
            let value = if len == 0 { &[] } else { bytes.get(start..start.checked_add(len)?)? };
            // A value in an inode of its own: `ea_inode`, which is refused.
            if u32_at(head, 4) != 0 {
                return None;
            }
            entries.push(Xattr { index: head[1], name, value: value.to_vec(), inline });
            at += (ENTRY_BYTES + name_len).next_multiple_of(4);
        }
        Some(entries)
    }
}

fn split(name: &[u8]) -> Option<(u8, &[u8])> {
    PREFIXES.iter().find_map(|(index, prefix)| {
        name.strip_prefix(*prefix).filter(|rest| !rest.is_empty()).map(|rest| (*index, rest))
    })
}

/// Where the attributes begin that stand in an inode itself, if any do.
fn inline_xattrs(raw: &[u8]) -> Option<usize> {
    if raw.len() <= 128 {
        return None;
    }
    let extra = 128 + usize::from(u16_at(raw, 128));
    (extra + 8 <= raw.len() && u32_at(raw, extra) == MAGIC).then_some(extra)
}

/// The hash of an entry, as e2fsck checks it (`ext2fs_ext_attr_hash_entry`).
fn hash_of(name: &[u8], value: &[u8]) -> u32 {
    let mut hash = 0u32;
    for byte in name {
        hash = (hash << 5) ^ (hash >> 27) ^ u32::from(*byte);
    }
    for word in value.chunks(4) {
        let mut bytes = [0; 4];
        bytes[..word.len()].copy_from_slice(word);
        hash = (hash << 16) ^ (hash >> 16) ^ u32::from_le_bytes(bytes);
    }
    hash
}

impl Ext2 {
    /// The attributes of a file.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if they are.
    pub fn xattrs(&mut self, number: u32, inode: &Inode) -> Result<Xattrs, Ext2Error> {
        let mut entries = Vec::new();
        let (block, at) = self.inode_place(number)?;
        let len = self.superblock.inode_bytes() as usize;
        let bytes = self.meta.read(block)?;
        let raw = &bytes[at..at + len];
        if let Some(extra) = inline_xattrs(raw) {
            match Xattrs::decode(raw, extra + 4, extra + 4, true) {
                Some(inline) => entries.extend(inline),
                None => return damaged(format!("the attributes in inode {number}")),
            }
        }
        if inode.xattr_block != 0 {
            self.check_xattr_block(inode.xattr_block)?;
            let bytes = self.meta.read(inode.xattr_block)?;
            match Xattrs::decode(&bytes, HEADER_BYTES, 0, false) {
                Some(in_block) if u32_at(&bytes, 0) == MAGIC && u32_at(&bytes, 8) == 1 => {
                    entries.extend(in_block);
                }
                _ => return damaged(format!("the attributes of inode {number}")),
            }
        }
        Ok(Xattrs { entries })
    }

    fn check_xattr_block(&mut self, block: u32) -> Result<(), Ext2Error> {
        let (group, _) = self.group_of_block(block)?;
        self.check_not_metadata(group, Run { start: block, len: 1 })
    }

    /// Writes the attributes of a file. The inode in memory is changed; the caller writes it.
    /// Attributes that stand in the inode itself stay there until they are changed.
    ///
    /// # Errors
    /// [`Ext2Error::NoSpace`] if they do not fit into a block, or none is free; nothing is
    /// changed then.
    pub fn put_xattrs(
        &mut self,
        number: u32,
        inode: &mut Inode,
        xattrs: &Xattrs,
        privileged: bool,
    ) -> Result<(), Ext2Error> {
        let mut bytes = vec![0; self.meta.block_bytes()];
        xattrs.encode(&mut bytes)?;
        let inline = self.encode_inline_xattrs(number, xattrs)?;
        if !xattrs.has_any(false) {
            self.put_inline_xattrs(number, &inline)?;
            return self.release_xattrs(inode);
        }
        let shared = match inode.xattr_block {
            0 => true,
            block => u32_at(&self.meta.read(block)?, 4) > 1,
        };
        if shared {
            let (block, sharers) = match self.last_if_same(&bytes)? {
                Some((block, sharers)) => (block, sharers + 1),
                None => {
                    let block = self.goal_of_inode(number);
                    let goal = Goal { block, inode: number, grows: false, privileged };
                    (self.allocate(goal, 1)?.start, 1)
                }
            };
            put_u32(&mut bytes, 4, sharers);
            self.meta.blank(block, Part::Ordinary)?.copy_from_slice(&bytes);
            self.release_xattrs(inode)?;
            inode.xattr_block = block;
            inode.count_blocks(1, self.superblock.block_bytes());
        } else {
            self.meta.blank(inode.xattr_block, Part::Ordinary)?.copy_from_slice(&bytes);
        }
        self.last_xattr_block = Some(inode.xattr_block);
        self.put_inline_xattrs(number, &inline)
    }

    /// The block of attributes that was written last and how many inodes share it, if it
    /// holds the same as `bytes` and one more may share it.
    fn last_if_same(&mut self, bytes: &[u8]) -> Result<Option<(u32, u32)>, Ext2Error> {
        let Some(block) = self.last_xattr_block else { return Ok(None) };
        let last = self.meta.read(block)?;
        let sharers = u32_at(&last, 4);
        let same = last[..4] == bytes[..4] && last[8..] == bytes[8..];
        Ok((same && sharers < MAX_SHARERS).then_some((block, sharers)))
    }

    /// The end of an inode with those attributes in it that were not changed; nothing if
    /// there were none.
    fn encode_inline_xattrs(&mut self, number: u32, xattrs: &Xattrs) -> Result<Vec<u8>, Ext2Error> {
        let (block, at) = self.inode_place(number)?;
        let len = self.superblock.inode_bytes() as usize;
        let Some(extra) = inline_xattrs(&self.meta.read(block)?[at..at + len]) else {
            return Ok(Vec::new());
        };
        let mut bytes = vec![0; len - extra];
        if xattrs.has_any(true) {
            put_u32(&mut bytes, 0, MAGIC);
            xattrs.encode_entries(&mut bytes, 4, 4, true)?;
        }
        Ok(bytes)
    }

    fn put_inline_xattrs(&mut self, number: u32, bytes: &[u8]) -> Result<(), Ext2Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        let (block, at) = self.inode_place(number)?;
        let end = at + self.superblock.inode_bytes() as usize;
        let block = self.meta.change(block, Part::Ordinary)?;
        block[end - bytes.len()..end].copy_from_slice(bytes);
        Ok(())
    }

    /// Gives back a file's block of attributes, or its share in one.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if it is no such block.
    pub fn release_xattrs(&mut self, inode: &mut Inode) -> Result<(), Ext2Error> {
        let block = std::mem::take(&mut inode.xattr_block);
        if block == 0 {
            return Ok(());
        }
        inode.blocks_512 = inode.blocks_512.saturating_sub(self.superblock.block_bytes() / 512);
        self.check_xattr_block(block)?;
        let bytes = self.meta.read(block)?;
        let sharers = u32_at(&bytes, 4);
        if u32_at(&bytes, 0) != MAGIC {
            return damaged(format!("block {block} holds no attributes"));
        }
        drop(bytes);
        if sharers > 1 {
            put_u32(self.meta.change(block, Part::Ordinary)?, 4, sharers - 1);
            return Ok(());
        }
        if self.last_xattr_block == Some(block) {
            self.last_xattr_block = None;
        }
        self.release(Run { start: block, len: 1 })
    }
}
