//! Inode numbers of a mounted volume.
//!
//! A directory's number comes from its parent's number and its name, so it stays the same
//! through updates. A file's or link's comes from these and from everything its directory
//! says about it, so a changed file has another number, and the data and attributes that the
//! kernel caches under a number stay true for ever. All names of a file with several share a
//! number, which comes from what is said of the file without a name. Numbers are hashes of these
//! inputs, so they are the same after a number was forgotten, and in listings that count no lookup.
//! If a number is already taken by another file (2^-64 for each pair, or a publisher's deliberate
//! work), the next one is used.

use std::collections::BTreeMap;

use atoll_key::BlockHash;
use atoll_vfs::{FileKind, InodeNumber};
use bytes::Bytes;

use crate::format::DirectoryEntry;
use crate::owned::read::snapshot::joined;

/// The files that the kernel holds lookups of, and the directories above them.
pub(super) struct Inodes {
    nodes: BTreeMap<u64, Node>,
}

struct Node {
    parent: u64,
    /// What is known of it. A file's never changes; a directory's is of version `seen`.
    entry: DirectoryEntry,
    seen: u64,
    lookups: u64,
    /// Nodes in the table that have this one as parent.
    children: u64,
}

/// What the table knows of a number.
#[derive(Clone, Debug)]
pub(super) enum Known {
    /// A file or link: all there is to know.
    Leaf(DirectoryEntry),
    /// A directory, to be looked up below `above`, which is of the version asked for, by
    /// these names, each with its number.
    Directory { above: DirectoryEntry, names: Vec<(u64, Bytes)> },
}

/// Whether other names may lead to the same file.
fn has_several_names(entry: &DirectoryEntry) -> bool {
    entry.kind() != FileKind::Directory && entry.owner.is_some_and(|owner| owner.links > 1)
}

fn nameless(entry: &DirectoryEntry) -> DirectoryEntry {
    DirectoryEntry { name: Bytes::new(), ..entry.clone() }
}

impl Inodes {
    pub(super) fn new(root: DirectoryEntry, version: u64) -> Inodes {
        let node = Node { parent: 1, entry: root, seen: version, lookups: 1, children: 0 };
        Inodes { nodes: BTreeMap::from([(InodeNumber::ROOT.0, node)]) }
    }

    /// The number of `entry` below directory `parent`.
    pub(super) fn number(&self, parent: InodeNumber, entry: &DirectoryEntry) -> InodeNumber {
        let is_directory = entry.kind() == FileKind::Directory;
        let mut identity = Vec::new();
        if is_directory {
            identity.extend_from_slice(&parent.0.to_be_bytes());
            identity.extend_from_slice(&entry.name);
        } else {
            // No directory has the number 0.
            let above = if has_several_names(entry) { 0 } else { parent.0 };
            identity.extend_from_slice(&above.to_be_bytes());
            // No name begins with a NUL: no directory's identity is a file's.
            identity.push(0);
            match has_several_names(entry) {
                true => nameless(entry).encode(&mut identity),
                false => entry.encode(&mut identity),
            }
        }
        let hash = BlockHash::of(&identity).0;
        let first = u64::from_be_bytes(*hash.first_chunk().expect("a hash has 32 bytes"));
        let mut number = first.max(InodeNumber::ROOT.0 + 1);
        while let Some(node) = self.nodes.get(&number) {
            let same_name = node.parent == parent.0 && node.entry.name == entry.name;
            let same_kind = (node.entry.kind() == FileKind::Directory) == is_directory;
            let same = match has_several_names(entry) {
                true => nameless(&node.entry) == nameless(entry),
                false => same_name && same_kind && (is_directory || node.entry == *entry),
            };
            if same {
                break;
            }
            number = number.wrapping_add(1).max(InodeNumber::ROOT.0 + 1);
        }
        InodeNumber(number)
    }

    /// Counts a lookup of `entry`, found in `parent` in version `seen`.
    pub(super) fn enter(
        &mut self,
        parent: InodeNumber,
        entry: &DirectoryEntry,
        seen: u64,
    ) -> InodeNumber {
        let number = self.number(parent, entry);
        if let Some(node) = self.nodes.get_mut(&number.0) {
            node.lookups = node.lookups.saturating_add(1);
            self.update(number.0, entry, seen);
            return number;
        }
        // Names are slices of directory blocks; the table must not keep those in memory.
        let mut entry = entry.clone();
        entry.name = Bytes::copy_from_slice(&entry.name);
        if let crate::format::Content::Symlink(target) = &mut entry.content {
            *target = Bytes::copy_from_slice(target);
        }
        let node = Node { parent: parent.0, entry, seen, lookups: 1, children: 0 };
        self.nodes.insert(number.0, node);
        if let Some(above) = self.nodes.get_mut(&parent.0) {
            above.children += 1;
        }
        number
    }

    /// Counts another lookup of a number in the table.
    pub(super) fn enter_again(&mut self, number: InodeNumber) {
        if let Some(node) = self.nodes.get_mut(&number.0) {
            node.lookups = node.lookups.saturating_add(1);
        }
    }

    /// Takes back lookups, and drops inodes that are no longer held.
    pub(super) fn forget(&mut self, number: InodeNumber, count: u64) {
        let Some(node) = self.nodes.get_mut(&number.0) else { return };
        node.lookups = node.lookups.saturating_sub(count);
        let mut number = number.0;
        while let Some(node) = self.nodes.get(&number) {
            if node.lookups > 0 || node.children > 0 || number == InodeNumber::ROOT.0 {
                break;
            }
            let parent = node.parent;
            self.nodes.remove(&number);
            if let Some(above) = self.nodes.get_mut(&parent) {
                above.children -= 1;
            }
            number = parent;
        }
    }

    /// What is known of `number`, to be brought to version `version`.
    pub(super) fn known(&self, number: InodeNumber, version: u64) -> Option<Known> {
        let mut node = self.nodes.get(&number.0)?;
        if node.entry.kind() != FileKind::Directory {
            return Some(Known::Leaf(node.entry.clone()));
        }
        let mut names = Vec::new();
        let mut at = number.0;
        while node.seen != version && at != InodeNumber::ROOT.0 {
            names.push((at, node.entry.name.clone()));
            at = node.parent;
            node = self.nodes.get(&at)?;
        }
        names.reverse();
        Some(Known::Directory { above: node.entry.clone(), names })
    }

    /// Whether the root is of another version than `version`.
    pub(super) fn is_root_of(&self, version: u64) -> bool {
        self.nodes.get(&InodeNumber::ROOT.0).is_some_and(|root| root.seen == version)
    }

    /// Notes that version `seen` has the inode `number`, and what a directory's entry is there.
    pub(super) fn update(&mut self, number: u64, entry: &DirectoryEntry, seen: u64) {
        if let Some(node) = self.nodes.get_mut(&number)
            && node.seen < seen
        {
            node.seen = seen;
            // A file's entry says under its number what it always said.
            if entry.kind() == FileKind::Directory {
                let name = node.entry.name.clone();
                node.entry = DirectoryEntry { name, ..entry.clone() };
            }
        }
    }

    /// The directory above `number`.
    pub(super) fn parent(&self, number: InodeNumber) -> Option<InodeNumber> {
        self.nodes.get(&number.0).map(|node| InodeNumber(node.parent))
    }

    /// The path of `number`, for messages.
    pub(super) fn path(&self, number: InodeNumber) -> Bytes {
        let mut names = Vec::new();
        let mut at = number.0;
        while let Some(node) = self.nodes.get(&at).filter(|_| at != InodeNumber::ROOT.0) {
            names.push(node.entry.name.clone());
            at = node.parent;
        }
        names.iter().rev().fold(Bytes::new(), |path, name| joined(&path, name))
    }

    /// How many numbers are in the table.
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Content, DirectoryRef, Owner};

    fn directory(name: &'static [u8]) -> DirectoryEntry {
        DirectoryEntry {
            name: Bytes::from_static(name),
            mode: 0o755,
            mtime: Default::default(),
            content: Content::Directory(DirectoryRef::default()),
            xattrs: None,
            owner: None,
        }
    }

    fn linked(name: Bytes) -> DirectoryEntry {
        let content = Content::Regular { size_bytes: 0, blocks_512: 0, inode: None };
        let owner = Some(Owner { inode: 9, links: 2, ..Owner::default() });
        DirectoryEntry { name, content, owner, ..directory(b"") }
    }

    #[test]
    fn the_path_of_a_file_with_several_names_is_one_of_them() {
        let mut inodes = Inodes::new(directory(b""), 1);
        let one = inodes.enter(InodeNumber::ROOT, &directory(b"one"), 1);
        let two = inodes.enter(InodeNumber::ROOT, &directory(b"two"), 1);
        let file = inodes.enter(one, &linked(Bytes::from_static(b"x")), 1);
        assert_eq!(inodes.enter(two, &linked(Bytes::from_static(b"y")), 2), file);
        let path = inodes.path(file);
        assert!(path == b"one/x"[..] || path == b"two/y"[..], "{path:?} is not in the volume");
    }

    #[test]
    fn the_table_does_not_keep_directory_blocks_in_memory_after_an_update() {
        let mut inodes = Inodes::new(directory(b""), 1);
        let name = Bytes::from_static(b"name");
        let file = inodes.enter(InodeNumber::ROOT, &linked(name), 1);
        let block = Bytes::from(b"name and the rest of a directory block".to_vec());
        inodes.enter(InodeNumber::ROOT, &linked(block.slice(..4)), 2);
        assert_eq!(inodes.len(), 2);
        let _ = file;
        assert!(block.is_unique(), "the block stays in memory");
    }
}
