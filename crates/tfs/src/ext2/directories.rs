//! Directories: names in linear blocks, found through an index in memory.
//!
//! On disk a directory is a file of blocks of entries (`format::entry`). Those that other
//! systems indexed (`dir_index`) are read as linear ones, which their format allows, and lose
//! the index when they change, as with the kernel's ext2. So that a large directory is not
//! read from its start for each name, its names' hashes are kept in memory with the blocks
//! they stand in, for as many directories as fit; others are searched from the start.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use atoll_vfs::FileKind;

use super::{Ext2, Ext2Error, Goal, damaged};
use crate::format::entry::{self, BrokenChain};
use crate::format::inode::{INDEXED, Inode};
use crate::meta::Part;

/// Directories of fewer blocks are searched as they are.
const INDEXED_FROM_BLOCKS: u32 = 4;
/// The most names in all indices, about 20 bytes each. A directory that has more of its own is
/// searched from its start, as all are by the kernel's ext2.
const MAX_INDEXED_NAMES: usize = 262_144;
/// The longest directory, blocks: 31 bits of length.
const MAX_BLOCKS: u32 = (1 << 31) / 4096;

/// An entry found, with its place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// The file.
    pub inode: u32,
    /// What the directory says it is.
    pub kind: Option<FileKind>,
    /// Byte of the directory where the entry begins.
    pub at: u64,
}

/// An entry listed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// Its name.
    pub name: Vec<u8>,
    /// The file.
    pub inode: u32,
    /// What the directory says it is.
    pub kind: Option<FileKind>,
    /// Byte of the directory behind the entry: where to go on.
    pub next: u64,
}

/// The index of one directory.
#[derive(Debug, Default)]
struct Index {
    /// Blocks in which a name of this hash stands; a hash may be listed for several.
    blocks: BTreeMap<(u32, u32), u16>,
    /// The largest spare room of each block, bytes.
    spare: Vec<u16>,
    age: u64,
}

/// The indices of the directories used last.
#[derive(Debug)]
pub(super) struct Indices {
    by_directory: BTreeMap<u32, Index>,
    names: usize,
    most_names: usize,
    clock: u64,
}

impl Default for Indices {
    fn default() -> Indices {
        let most_names = MAX_INDEXED_NAMES;
        Indices { by_directory: BTreeMap::new(), names: 0, most_names, clock: 0 }
    }
}

impl Indices {
    fn forget(&mut self, directory: u32) {
        if let Some(index) = self.by_directory.remove(&directory) {
            self.names -= index.blocks.len();
        }
    }

    fn keep(&mut self, directory: u32, mut index: Index) {
        self.forget(directory);
        self.clock += 1;
        index.age = self.clock;
        self.names += index.blocks.len();
        self.by_directory.insert(directory, index);
        self.make_room();
    }

    /// Notes a name that was added to a block of a directory, whose largest spare room is `spare`
    /// now.
    fn add(&mut self, directory: u32, name: &[u8], block: u32, spare: u16) {
        let Some(index) = self.by_directory.get_mut(&directory) else { return };
        self.clock += 1;
        index.age = self.clock;
        let count = index.blocks.entry((hash_of(name), block)).or_default();
        *count += 1;
        self.names += usize::from(*count == 1);
        index.spare[block as usize] = spare;
        self.make_room();
    }

    /// Notes a name that was removed.
    fn remove(&mut self, directory: u32, name: &[u8], block: u32, spare: u16) {
        let Some(index) = self.by_directory.get_mut(&directory) else { return };
        let key = (hash_of(name), block);
        if let Some(count) = index.blocks.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                index.blocks.remove(&key);
                self.names -= 1;
            }
        }
        index.spare[block as usize] = spare;
    }

    fn make_room(&mut self) {
        while self.names > self.most_names {
            let oldest = self.by_directory.iter().min_by_key(|(_, index)| index.age);
            let Some(oldest) = oldest.map(|(directory, _)| *directory) else { break };
            self.forget(oldest);
        }
    }
}

fn hash_of(name: &[u8]) -> u32 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish() as u32
}

fn largest_spare(block: &[u8]) -> Result<u16, BrokenChain> {
    let mut largest = 0;
    for entry in entry::entries(block) {
        largest = largest.max(entry?.spare_bytes());
    }
    Ok(largest as u16)
}

impl Ext2 {
    fn directory_blocks(&self, directory: u32, inode: &Inode) -> Result<u32, Ext2Error> {
        let block_bytes = self.meta.block_bytes() as u64;
        let blocks = inode.size_bytes / block_bytes;
        // One that is longer than the file system has some blocks twice.
        let most = MAX_BLOCKS.min(self.superblock().blocks());
        if !inode.size_bytes.is_multiple_of(block_bytes) || blocks > u64::from(most) {
            let size = inode.size_bytes;
            return damaged(format!("directory {directory} has an impossible length of {size}"));
        }
        Ok(blocks as u32)
    }

    fn directory_block(
        &mut self,
        directory: u32,
        inode: &Inode,
        index: u32,
    ) -> Result<u32, Ext2Error> {
        match self.block_of(inode, index)? {
            0 => damaged(format!("directory {directory} has a hole")),
            block => Ok(block),
        }
    }

    fn in_directory<T>(
        &self,
        directory: u32,
        result: Result<T, BrokenChain>,
    ) -> Result<T, Ext2Error> {
        result.or_else(|error| damaged(format!("directory {directory}: {error}")))
    }

    /// Looks for a name in one block.
    fn find_in_block(
        &mut self,
        directory: u32,
        inode: &Inode,
        index: u32,
        name: &[u8],
    ) -> Result<Option<Found>, Ext2Error> {
        let block = self.directory_block(directory, inode, index)?;
        let bytes = self.meta.read(block)?;
        let base = u64::from(index) * bytes.len() as u64;
        for entry in entry::entries(&bytes) {
            let entry = self.in_directory(directory, entry)?;
            if entry.inode != 0 && entry.name == name {
                let at = base + entry.at as u64;
                return Ok(Some(Found { inode: entry.inode, kind: entry.kind, at }));
            }
        }
        Ok(None)
    }

    /// The entry of a name.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if the directory is.
    pub fn find_entry(
        &mut self,
        directory: u32,
        inode: &Inode,
        name: &[u8],
    ) -> Result<Option<Found>, Ext2Error> {
        let blocks = self.directory_blocks(directory, inode)?;
        if blocks >= INDEXED_FROM_BLOCKS && self.make_index(directory, inode, blocks)? {
            let hash = hash_of(name);
            let index = &self.indices.by_directory[&directory];
            let candidates: Vec<u32> =
                index.blocks.range((hash, 0)..=(hash, u32::MAX)).map(|((_, b), _)| *b).collect();
            for block in candidates {
                if let Some(found) = self.find_in_block(directory, inode, block, name)? {
                    return Ok(Some(found));
                }
            }
            return Ok(None);
        }
        for block in 0..blocks {
            if let Some(found) = self.find_in_block(directory, inode, block, name)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Makes sure that a directory has its index in memory; false if it is too large.
    fn make_index(
        &mut self,
        directory: u32,
        inode: &Inode,
        blocks: u32,
    ) -> Result<bool, Ext2Error> {
        let indices = &mut self.indices;
        if let Some(index) = indices.by_directory.get_mut(&directory) {
            indices.clock += 1;
            index.age = indices.clock;
            return Ok(true);
        }
        // At most a quarter of all, by what a directory of this length may hold at least.
        if blocks as usize * self.meta.block_bytes() / 32 > self.indices.most_names / 4 {
            return Ok(false);
        }
        let mut index = Index::default();
        for number in 0..blocks {
            let block = self.directory_block(directory, inode, number)?;
            let bytes = self.meta.read(block)?;
            let mut spare = 0;
            for entry in entry::entries(&bytes) {
                let entry = self.in_directory(directory, entry)?;
                spare = spare.max(entry.spare_bytes());
                if entry.inode != 0 {
                    *index.blocks.entry((hash_of(entry.name), number)).or_default() += 1;
                }
            }
            index.spare.push(spare as u16);
        }
        self.indices.keep(directory, index);
        Ok(true)
    }

    /// Adds an entry, whose name the directory must not have. The directory's inode in memory
    /// is changed; the caller writes it.
    ///
    /// # Errors
    /// [`Ext2Error::NoSpace`]; nothing that anybody would see is changed then.
    pub fn add_entry(
        &mut self,
        directory: u32,
        inode: &mut Inode,
        name: &[u8],
        file: (u32, FileKind),
        goal: Goal,
    ) -> Result<(), Ext2Error> {
        let kind = self.superblock().features().has_filetype().then_some(file.1);
        let need = entry::entry_bytes(name.len());
        let blocks = self.directory_blocks(directory, inode)?;
        let number = match self.block_with_room(directory, inode, blocks, need)? {
            Some(number) => number,
            None => self.grow_directory(directory, inode, blocks, goal)?,
        };
        inode.flags &= !INDEXED;
        let block = self.directory_block(directory, inode, number)?;
        let bytes = self.meta.change(block, Part::Ordinary)?;
        let room = entry::entries(bytes)
            .filter_map(Result::ok)
            .find(|entry| entry.spare_bytes() >= need)
            .map(|entry| entry.at);
        let Some(at) = room else {
            return damaged(format!("directory {directory}: no room where there was some"));
        };
        entry::insert(bytes, at, file.0, kind, name);
        let spare = largest_spare(bytes);
        let spare = self.in_directory(directory, spare)?;
        self.indices.add(directory, name, number, spare);
        Ok(())
    }

    fn block_with_room(
        &mut self,
        directory: u32,
        inode: &Inode,
        blocks: u32,
        need: usize,
    ) -> Result<Option<u32>, Ext2Error> {
        if let Some(index) = self.indices.by_directory.get(&directory) {
            let found = index.spare.iter().position(|spare| usize::from(*spare) >= need);
            return Ok(found.map(|number| number as u32));
        }
        for number in 0..blocks {
            let block = self.directory_block(directory, inode, number)?;
            let spare = largest_spare(&self.meta.read(block)?);
            if usize::from(self.in_directory(directory, spare)?) >= need {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    fn grow_directory(
        &mut self,
        directory: u32,
        inode: &mut Inode,
        blocks: u32,
        goal: Goal,
    ) -> Result<u32, Ext2Error> {
        if blocks >= MAX_BLOCKS {
            return Err(Ext2Error::NoSpace);
        }
        let last = if blocks == 0 { 0 } else { self.block_of(inode, blocks - 1)? };
        let goal = if last == 0 { goal } else { Goal { block: last + 1, ..goal } };
        let made = self.make_way(inode, blocks, goal);
        let block = match made.and_then(|()| self.allocate_for_names(inode, goal)) {
            Ok(block) => block,
            Err(error) => {
                // Indirect blocks that were made belong to the directory.
                self.put_inode(directory, inode)?;
                return Err(error);
            }
        };
        entry::clear(self.meta.blank(block, Part::Ordinary)?);
        self.put_block(inode, blocks, block)?;
        let block_bytes = self.meta.block_bytes();
        inode.count_blocks(1, block_bytes as u32);
        inode.size_bytes += block_bytes as u64;
        if let Some(index) = self.indices.by_directory.get_mut(&directory) {
            index.spare.push(block_bytes as u16);
        }
        Ok(blocks)
    }

    /// Removes the entry of `name` at byte `at`, as [`Ext2::find_entry`] gave it. The
    /// directory's inode in memory is changed; the caller writes it.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if there is none.
    pub fn remove_entry(
        &mut self,
        directory: u32,
        inode: &mut Inode,
        name: &[u8],
        at: u64,
    ) -> Result<(), Ext2Error> {
        let block_bytes = self.meta.block_bytes() as u64;
        let number = (at / block_bytes) as u32;
        inode.flags &= !INDEXED;
        let block = self.directory_block(directory, inode, number)?;
        let bytes = self.meta.change(block, Part::Ordinary)?;
        let removed =
            entry::remove(bytes, (at % block_bytes) as usize).and_then(|()| largest_spare(bytes));
        let spare = self.in_directory(directory, removed)?;
        self.indices.remove(directory, name, number, spare);
        Ok(())
    }

    /// Makes the entry at byte `at` mean another file.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if the directory is.
    pub fn replace_entry(
        &mut self,
        directory: u32,
        inode: &Inode,
        at: u64,
        file: (u32, FileKind),
    ) -> Result<(), Ext2Error> {
        let kind = self.superblock().features().has_filetype().then_some(file.1);
        let block_bytes = self.meta.block_bytes() as u64;
        let block = self.directory_block(directory, inode, (at / block_bytes) as u32)?;
        let bytes = self.meta.change(block, Part::Ordinary)?;
        entry::replace(bytes, (at % block_bytes) as usize, file.0, kind);
        Ok(())
    }

    /// Entries from byte `from` on, at most `limit`; `.` and `..` are among them. Entries do
    /// not move, so that one that stays is listed once however others come and go.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if the directory is.
    pub fn list_entries(
        &mut self,
        directory: u32,
        inode: &Inode,
        from: u64,
        limit: usize,
    ) -> Result<Vec<Listed>, Ext2Error> {
        let block_bytes = self.meta.block_bytes() as u64;
        let blocks = self.directory_blocks(directory, inode)?;
        let mut listed = Vec::new();
        let first = u32::try_from(from / block_bytes).unwrap_or(u32::MAX);
        for number in first..blocks {
            let block = self.directory_block(directory, inode, number)?;
            let bytes = self.meta.read(block)?;
            let base = u64::from(number) * block_bytes;
            for entry in entry::entries(&bytes) {
                let entry = self.in_directory(directory, entry)?;
                if entry.inode == 0 || base + (entry.at as u64) < from {
                    continue;
                }
                if listed.len() >= limit {
                    return Ok(listed);
                }
                listed.push(Listed {
                    name: entry.name.to_vec(),
                    inode: entry.inode,
                    kind: entry.kind,
                    // Any byte behind the entry's beginning will do: room it has to spare
                    // may become another entry's.
                    next: base + entry.at as u64 + 4,
                });
            }
        }
        Ok(listed)
    }

    /// Whether a directory has no names but `.` and `..`.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if the directory is.
    pub fn is_empty_directory(&mut self, directory: u32, inode: &Inode) -> Result<bool, Ext2Error> {
        let mut from = 0;
        loop {
            let listed = self.list_entries(directory, inode, from, 64)?;
            let Some(last) = listed.last() else { return Ok(true) };
            if listed.iter().any(|entry| entry.name != b"." && entry.name != b"..") {
                return Ok(false);
            }
            from = last.next;
        }
    }

    /// Names in memory, and the most there may be.
    #[cfg(test)]
    pub(super) fn indexed_names(&mut self) -> (usize, &mut usize) {
        (self.indices.names, &mut self.indices.most_names)
    }

    /// Forgets what is known of a directory that is gone.
    pub fn forget_directory(&mut self, directory: u32) {
        self.indices.forget(directory);
    }
}
