//! Inode numbers of a mounted volume.
//!
//! A directory's number comes from its parent's number and its name, so it stays the same
//! through updates. A file's or link's comes from these and from everything its directory
//! says about it, so a changed file has another number, and the data and attributes that the
//! kernel caches under a number stay true for ever. Numbers are hashes of these inputs, so they
//! are the same after a number was forgotten, and in listings that count no lookup. If a number
//! is already taken by another file (2^-64 for each pair, or a publisher's deliberate work), the
//! next one is used.

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

impl Inodes {
    pub(super) fn new(root: DirectoryEntry, version: u64) -> Inodes {
        let node = Node { parent: 1, entry: root, seen: version, lookups: 1, children: 0 };
        Inodes { nodes: BTreeMap::from([(InodeNumber::ROOT.0, node)]) }
    }

    /// The number of `entry` below directory `parent`.
    pub(super) fn number(&self, parent: InodeNumber, entry: &DirectoryEntry) -> InodeNumber {
        let is_directory = entry.kind() == FileKind::Directory;
        let mut identity = parent.0.to_be_bytes().to_vec();
        if is_directory {
            identity.extend_from_slice(&entry.name);
        } else {
            // No name begins with a NUL: no directory's identity is a file's.
            identity.push(0);
            entry.encode(&mut identity);
        }
        let hash = BlockHash::of(&identity).0;
        let first = u64::from_be_bytes(*hash.first_chunk().expect("a hash has 32 bytes"));
        let mut number = first.max(InodeNumber::ROOT.0 + 1);
        while let Some(node) = self.nodes.get(&number) {
            let same_name = node.parent == parent.0 && node.entry.name == entry.name;
            let same_kind = (node.entry.kind() == FileKind::Directory) == is_directory;
            if same_name && same_kind && (is_directory || node.entry == *entry) {
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
            if node.seen < seen {
                node.entry = entry.clone();
                node.seen = seen;
            }
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

    /// What a directory is in version `seen`.
    pub(super) fn update(&mut self, number: u64, entry: &DirectoryEntry, seen: u64) {
        if let Some(node) = self.nodes.get_mut(&number)
            && node.seen < seen
        {
            let name = node.entry.name.clone();
            node.entry = DirectoryEntry { name, ..entry.clone() };
            node.seen = seen;
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
