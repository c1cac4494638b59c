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
//!
//! Where files have handles ([`Inodes::by_path`]), a handle must lead to what is under the file's
//! path in the newest version. There a file's or link's number comes from its directory's number,
//! its name and its kind, and what is known of it changes with the version, as a directory's does.

use atoll_key::BlockHash;
use atoll_vfs::{FileKind, InodeNumber, InodeTable, TableInode};
use bytes::Bytes;

use super::Open;
use crate::format::{Content, DirectoryEntry};
use crate::owned::read::snapshot::joined;

const ROOT: u64 = InodeNumber::ROOT.0;

/// The files that the kernel holds or has open, and the directories above them.
pub(super) struct Inodes {
    pub(super) table: InodeTable<Node, Open>,
    /// A number is a path, not a content.
    is_by_path: bool,
}

pub(super) struct Node {
    parent: u64,
    /// What is known of it in version `seen`; of a content that is a number, for ever.
    entry: DirectoryEntry,
    seen: u64,
}

impl TableInode for Node {}

/// What the table knows of a number.
#[derive(Clone, Debug)]
pub(super) enum Known {
    /// A file or link that is a content: all there is to know.
    Content(DirectoryEntry),
    /// What is to be looked up below `above`, which is of the version asked for, by these names,
    /// each with its number and its kind.
    Path { above: DirectoryEntry, names: Vec<(u64, Bytes, FileKind)> },
}

fn nameless(entry: &DirectoryEntry) -> DirectoryEntry {
    DirectoryEntry { name: Bytes::new(), ..entry.clone() }
}

/// An entry's content. Targets are slices of directory blocks; the table must not keep those in
/// memory.
fn own_content(entry: &DirectoryEntry) -> Content {
    match &entry.content {
        Content::Symlink(target) => Content::Symlink(Bytes::copy_from_slice(target)),
        content => content.clone(),
    }
}

/// A kind as part of a path's identity, from which numbers come: it must never change.
fn kind_number(kind: FileKind) -> u8 {
    match kind {
        FileKind::Directory => 0,
        FileKind::Regular => 1,
        FileKind::Symlink => 2,
        FileKind::Fifo => 3,
        FileKind::Socket => 4,
        FileKind::CharDevice => 5,
        FileKind::BlockDevice => 6,
    }
}

impl Inodes {
    pub(super) fn new(root: DirectoryEntry, version: u64) -> Inodes {
        let root = Node { parent: ROOT, entry: root, seen: version };
        Inodes { table: InodeTable::new(root), is_by_path: false }
    }

    /// From now on a file's number is its path. Called before any number is given out.
    pub(super) fn by_path(&mut self) {
        self.is_by_path = true;
    }

    /// Whether the number of a file of this kind always means the same content.
    pub(super) fn is_content(&self, kind: FileKind) -> bool {
        kind != FileKind::Directory && !self.is_by_path
    }

    /// Whether other names may lead to the same number.
    fn has_several_names(&self, entry: &DirectoryEntry) -> bool {
        self.is_content(entry.kind()) && entry.owner.is_some_and(|owner| owner.links > 1)
    }

    /// The number of `entry` below directory `parent`.
    pub(super) fn number(&self, parent: InodeNumber, entry: &DirectoryEntry) -> InodeNumber {
        let kind = entry.kind();
        let is_content = self.is_content(kind);
        let has_several_names = self.has_several_names(entry);
        // No directory has the number 0.
        let above = if has_several_names { 0 } else { parent.0 };
        let mut identity = above.to_be_bytes().to_vec();
        // No name begins with a NUL: no directory's identity is a file's.
        match kind {
            FileKind::Directory => identity.extend_from_slice(&entry.name),
            _ if has_several_names => {
                identity.push(0);
                nameless(entry).encode(&mut identity);
            }
            _ if is_content => {
                identity.push(0);
                entry.encode(&mut identity);
            }
            _ => {
                identity.extend_from_slice(&[0, kind_number(kind)]);
                identity.extend_from_slice(&entry.name);
            }
        }
        let hash = BlockHash::of(&identity).0;
        let first = u64::from_be_bytes(*hash.first_chunk().expect("a hash has 32 bytes"));
        let is_same = |node: &Node| {
            let same_name = node.parent == parent.0 && node.entry.name == entry.name;
            match has_several_names {
                true => nameless(&node.entry) == nameless(entry),
                false if is_content => same_name && node.entry == *entry,
                false => same_name && node.entry.kind() == kind,
            }
        };
        let number = self.table.free_number(first.max(ROOT + 1), ROOT + 1..=u64::MAX, is_same);
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
        if self.table.look_up(number.0) {
            self.update(number.0, entry, seen);
            return number;
        }
        let entry = DirectoryEntry {
            name: Bytes::copy_from_slice(&entry.name),
            content: own_content(entry),
            ..entry.clone()
        };
        let above = Some(parent.0).filter(|parent| self.table.contains(*parent));
        self.table.insert_looked_up(number.0, above, Node { parent: parent.0, entry, seen });
        number
    }

    /// Takes back lookups.
    pub(super) fn forget(&mut self, number: InodeNumber, count: u64) {
        self.table.forget(number.0, count, |_, _| {});
    }

    /// What is known of `number`, to be brought to version `version`.
    pub(super) fn known(&self, number: InodeNumber, version: u64) -> Option<Known> {
        let mut node = self.table.get(number.0).ok()?;
        if self.is_content(node.entry.kind()) {
            return Some(Known::Content(node.entry.clone()));
        }
        let mut names = Vec::new();
        let mut at = number.0;
        while node.seen != version && at != ROOT {
            names.push((at, node.entry.name.clone(), node.entry.kind()));
            at = node.parent;
            node = self.table.get(at).ok()?;
        }
        names.reverse();
        Some(Known::Path { above: node.entry.clone(), names })
    }

    /// Whether the root is of another version than `version`.
    pub(super) fn is_root_of(&self, version: u64) -> bool {
        self.table[ROOT].seen == version
    }

    /// Notes that version `seen` has the inode `number`, and what its entry is there.
    pub(super) fn update(&mut self, number: u64, entry: &DirectoryEntry, seen: u64) {
        // A content's entry says under its number what it always said.
        let is_content = self.is_content(entry.kind());
        if let Ok(node) = self.table.get_mut(number)
            && node.seen < seen
        {
            node.seen = seen;
            if !is_content {
                let name = node.entry.name.clone();
                node.entry = DirectoryEntry { name, content: own_content(entry), ..entry.clone() };
            }
        }
    }

    /// The names that lead from the root to `number`, beginning with its own, each with its number
    /// and its directory's.
    pub(super) fn names_above(&self, number: InodeNumber) -> Option<Vec<(u64, u64, Bytes)>> {
        let mut names = Vec::new();
        let mut at = number.0;
        while at != ROOT {
            let node = self.table.get(at).ok()?;
            names.push((at, node.parent, node.entry.name.clone()));
            at = node.parent;
        }
        Some(names)
    }

    /// The directory above `number`.
    pub(super) fn parent(&self, number: InodeNumber) -> Option<InodeNumber> {
        self.table.get(number.0).ok().map(|node| InodeNumber(node.parent))
    }

    /// The path of `number`, for messages.
    pub(super) fn path(&self, number: InodeNumber) -> Bytes {
        let mut names = Vec::new();
        let mut at = number.0;
        while let Ok(node) = self.table.get(at)
            && at != ROOT
        {
            names.push(node.entry.name.clone());
            at = node.parent;
        }
        names.iter().rev().fold(Bytes::new(), |path, name| joined(&path, name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{DirectoryRef, Owner};

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
        assert_eq!(inodes.table.len(), 2);
        let _ = file;
        assert!(block.is_unique(), "the block stays in memory");
    }
}
