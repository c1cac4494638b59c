//! The tree as the mount shows it, as plain data: what differs from the volume on the ring, and the
//! files that the kernel holds.
//!
//! A method that needs something stored that is not in memory changes nothing and returns
//! [`Stop::Need`]; the caller fetches it, adds it to [`Loaded`], and calls the method again. What
//! is loaded is named by hashes of contents, so that it cannot be out of date.
//!
//! Invariants:
//!
//! - A file is in the table while the kernel holds or has it open, while a change refers to it
//!   ([`Names`]), while a file below it is in the table, or while names in it have changed. Everything
//!   else is read again.
//! - Every file in the table but the root and removed ones has a *place*: a name in a directory that
//!   is in the table too, or the table of links.
//! - Whenever an entry would be written otherwise than it is stored, a change stands under its name.

mod attributes;
mod flush;
mod handles;
mod journal;
mod names;
mod namespace;
mod open;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use atoll_key::BlockHash;
use atoll_vfs::{Attr, Errno, FileKind, FileTime, InodeNumber, InodeTable, TableInode};
use bytes::Bytes;

pub(super) use self::flush::{DirectoryPlan, FilePlan, Flushed, Plan};
use self::handles::MovedFile;
pub(super) use self::handles::numbers_after_crash;
use self::journal::Journal;
pub(super) use self::journal::{Record, Restated};
use self::names::Names;
pub(super) use self::namespace::MAX_LINKS;
use self::open::Open;
pub(super) use self::open::OpenDirectory;
use crate::blocks::content::{Content, ContentNeed, ContentStop, LoadedContent, Stored};
use crate::blocks::edit_file::Swapped;
use crate::format::{self, DirectoryEntry, DirectoryRef, Owner, link_name};
use crate::owned::reachable;
use crate::owned::root::Root;

/// The number of the root directory.
const ROOT: u64 = InodeNumber::ROOT.0;

/// Numbers from here on are of files whose entries have none: trees that were published.
const FIRST_DERIVED: u64 = 1 << 63;

pub(super) type Xattrs = BTreeMap<Bytes, Bytes>;

/// Why a method did nothing.
#[derive(Clone, Debug)]
pub(super) enum Stop {
    /// It may not, or cannot.
    Errno(Errno),
    /// Something stored is needed first.
    Need(Need),
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Stop {
        Stop::Errno(errno)
    }
}

impl From<ContentStop> for Stop {
    fn from(stop: ContentStop) -> Stop {
        match stop {
            ContentStop::Errno(errno) => Stop::Errno(errno),
            ContentStop::Need(need) => Stop::Need(Need::Content(need)),
        }
    }
}

/// Something stored.
#[derive(Clone, Debug)]
pub(super) enum Need {
    /// The entry of a name, or that there is none.
    Name(DirectoryRef, Bytes),
    /// What a call on a file's contents needs.
    Content(ContentNeed),
    /// Extended attributes.
    Xattrs(BlockHash),
}

/// What was fetched for a call.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    pub(super) names: BTreeMap<(BlockHash, Bytes), Option<DirectoryEntry>>,
    pub(super) content: LoadedContent,
    pub(super) xattrs: BTreeMap<BlockHash, Xattrs>,
}

impl Loaded {
    fn name(&self, stored: DirectoryRef, name: &[u8]) -> Result<Option<&DirectoryEntry>, Stop> {
        let Some(hash) = stored.hash else { return Ok(None) };
        let key = (hash, Bytes::copy_from_slice(name));
        match self.names.get(&key) {
            Some(found) => Ok(found.as_ref()),
            None => Err(Stop::Need(Need::Name(stored, key.1))),
        }
    }

    fn xattrs(&self, hash: BlockHash) -> Result<&Xattrs, Stop> {
        self.xattrs.get(&hash).ok_or(Stop::Need(Need::Xattrs(hash)))
    }
}

/// Where a file's entry is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// Nowhere: the root.
    Root,
    /// Under this name of this directory.
    Named(u64, Bytes),
    /// In the table of links: it has or had several names.
    Linked,
    /// Nowhere any more.
    Removed,
}

#[derive(Debug)]
enum Body {
    File(Content),
    Directory(Names),
    Symlink(Bytes),
    Special(FileKind, u64),
}

#[derive(Clone, Debug)]
enum NodeXattrs {
    Stored(Option<BlockHash>),
    Changed(Arc<Xattrs>),
}

/// A file in the table.
#[derive(Debug)]
struct Node {
    mode: u32,
    uid: u32,
    gid: u32,
    /// Number of names; 0 for a removed directory, else 1 for one.
    links: u32,
    atime: FileTime,
    mtime: FileTime,
    ctime: FileTime,
    body: Body,
    xattrs: NodeXattrs,
    place: Place,
    /// Changes that refer to it.
    changes: u64,
}

/// What the whole volume holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) files: u64,
    pub(super) dirs: u64,
    pub(super) symlinks: u64,
    pub(super) bytes: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Tree {
    /// A file stays below the directory of its place.
    nodes: InodeTable<Node, Open>,
    /// The table of links, by [`link_name`].
    links: Names,
    next_inode: u64,
    block_size_log2: u8,
    totals: Totals,
    is_root_changed: bool,
    /// Changes since the last flush began.
    changes: u64,
    /// Names that have changed and are not in a flush.
    unflushed_names: u64,
    /// Bytes of files and extended attributes that are not stored yet.
    held_bytes: u64,
    /// About how many of them are being flushed.
    flushing_bytes: u64,
    /// Nodes that the call under way brought into the table.
    entered: Vec<u64>,
    /// Files whose place has changed since [`Tree::take_moved`], if anybody asks.
    moved: Option<Vec<MovedFile>>,
    journal: Journal,
}

impl Tree {
    /// The tree of `root`; what it does not say belongs to `uid` and `gid`.
    pub(super) fn new(root: &Root, (uid, gid): (u32, u32)) -> Tree {
        let top = root.entry();
        let node = stored_node(&top, Place::Root, (uid, gid), root.block_size_log2);
        Tree {
            nodes: InodeTable::new(node),
            links: Names::of(root.mounted.links),
            next_inode: root.mounted.next_inode.max(ROOT + 1),
            block_size_log2: root.block_size_log2,
            totals: Totals {
                files: root.files,
                dirs: root.dirs,
                symlinks: root.symlinks,
                bytes: root.bytes,
            },
            is_root_changed: false,
            changes: 0,
            unflushed_names: 0,
            held_bytes: 0,
            flushing_bytes: 0,
            entered: Vec::new(),
            moved: None,
            journal: Journal::default(),
        }
    }

    /// Bytes of files and extended attributes that are not stored yet.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Those of them that no flush has begun to store.
    pub(super) fn changed_bytes(&self) -> u64 {
        self.held_bytes.saturating_sub(self.flushing_bytes)
    }

    /// Changed blocks in memory that no flush has begun to write: at least so many bytes of them, if
    /// there are as many.
    pub(super) fn in_memory(&self, bytes: u64) -> Vec<(u64, u64, Arc<Vec<u8>>)> {
        let files = self.nodes.iter().filter_map(|(inode, node)| match &node.body {
            Body::File(content) => Some((inode, content)),
            _ => None,
        });
        let blocks = files.flat_map(|(inode, content)| {
            content.in_memory().map(move |(block, data)| (inode, block, data.clone()))
        });
        let mut found = 0;
        blocks
            .take_while(|(_, _, data)| {
                let is_enough = found >= bytes;
                found += data.len() as u64;
                !is_enough
            })
            .collect()
    }

    /// Blocks were swapped out, unless they are others by now.
    pub(super) fn swap_out(&mut self, blocks: &[(u64, u64, Arc<Vec<u8>>)], to: &[Swapped]) {
        for ((inode, block, data), swapped) in blocks.iter().zip(to) {
            // A file that was removed meanwhile may have left the table.
            let _ = self.change_content(*inode, |content| {
                content.swap_out(*block, data, *swapped);
                Ok(())
            });
        }
    }

    /// Whether any block is swapped out.
    pub(super) fn has_swapped(&self) -> bool {
        self.nodes.iter().any(|(_, node)| match &node.body {
            Body::File(content) => content.has_swapped(),
            _ => false,
        })
    }

    /// Changes since the last flush began.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// Names that have changed and are not in a flush; a flush that fails gives its own back.
    pub(super) fn unflushed_names(&self) -> u64 {
        self.unflushed_names
    }

    fn count_unflushed_names(&self) -> u64 {
        let count = |names: &Names| names.changed.len() as u64;
        let in_directories = self.nodes.iter().filter_map(|(_, node)| match &node.body {
            Body::Directory(names) => Some(count(names)),
            _ => None,
        });
        in_directories.sum::<u64>() + count(&self.links)
    }

    /// Files in the table.
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// What programs may read here that is in no newer version: files without a name, and directories as they were
    /// when they were opened.
    pub(super) fn shown_by_open_files(&self) -> reachable::Open {
        let mut shown = reachable::Open::default();
        for (_, node) in self.nodes.iter().filter(|(_, node)| node.place == Place::Removed) {
            match &node.body {
                Body::File(content) => shown.files.extend(content.stored.inode),
                Body::Directory(names) => shown.directories.extend(names.stored.hash),
                Body::Symlink(_) | Body::Special(..) => {}
            }
            if let NodeXattrs::Stored(Some(hash)) = node.xattrs {
                shown.xattrs.push(hash);
            }
        }
        for (.., open) in self.nodes.opens() {
            if let Open::Directory(directory) = open {
                shown.directories.extend(directory.stored.hash);
            }
        }
        shown
    }

    /// What the whole volume holds.
    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    fn node(&self, inode: u64) -> Result<&Node, Stop> {
        Ok(self.nodes.get(inode)?)
    }

    fn node_mut(&mut self, inode: u64) -> Result<&mut Node, Stop> {
        Ok(self.nodes.get_mut(inode)?)
    }

    fn names(&self, inode: u64) -> Result<&Names, Stop> {
        match &self.node(inode)?.body {
            Body::Directory(names) => Ok(names),
            _ => Err(Errno::ENOTDIR.into()),
        }
    }

    fn names_mut(&mut self, inode: u64) -> &mut Names {
        match self.nodes.get_mut(inode).map(|node| &mut node.body) {
            Ok(Body::Directory(names)) => names,
            _ => unreachable!("the caller has seen that it is a directory in the table"),
        }
    }

    /// The file that `name` of directory `parent` means, brought into the table.
    fn child(&mut self, parent: u64, name: &[u8], loaded: &Loaded) -> Result<Option<u64>, Stop> {
        let names = self.names(parent)?;
        atoll_vfs::check_name(name)?;
        if let Some(change) = names.change(name) {
            return Ok(change);
        }
        let stored = names.stored;
        match loaded.name(stored, name)? {
            Some(entry) => Ok(Some(self.enter_stored(parent, entry, loaded)?)),
            None => Ok(None),
        }
    }

    /// Brings a stored entry of directory `parent` into the table.
    fn enter_stored(
        &mut self,
        parent: u64,
        entry: &DirectoryEntry,
        loaded: &Loaded,
    ) -> Result<u64, Stop> {
        if let format::Content::Linked { inode, .. } = entry.content {
            return self.enter_linked(inode, loaded);
        }
        let name = Bytes::copy_from_slice(&entry.name);
        let number = self.number_of(parent, entry);
        if self.nodes.contains(number) {
            return Ok(number);
        }
        let (uid, gid) = self.default_owner();
        let node = stored_node(entry, Place::Named(parent, name), (uid, gid), self.block_size_log2);
        self.nodes.insert(number, Some(parent), node);
        self.entered.push(number);
        Ok(number)
    }

    /// Brings a file of the table of links into the table of files.
    fn enter_linked(&mut self, inode: u64, loaded: &Loaded) -> Result<u64, Stop> {
        if self.nodes.get(inode).is_ok_and(|node| node.place == Place::Linked) {
            return Ok(inode);
        }
        let entry = loaded.name(self.links.stored, &link_name(inode))?;
        let is_file = |entry: &&DirectoryEntry| {
            !matches!(entry.content, format::Content::Linked { .. } | format::Content::Directory(_))
                && entry.owner.is_some_and(|owner| owner.inode == inode)
        };
        let entry = entry.filter(is_file).ok_or(Errno::EIO)?;
        let owner = self.default_owner();
        if self.nodes.contains(inode) {
            return Err(Errno::EIO.into());
        }
        let node = stored_node(entry, Place::Linked, owner, self.block_size_log2);
        self.nodes.insert(inode, None, node);
        self.entered.push(inode);
        Ok(inode)
    }

    fn default_owner(&self) -> (u32, u32) {
        let root = &self.nodes[ROOT];
        (root.uid, root.gid)
    }

    /// The number of a stored entry of directory `parent`: its own, or one derived from its place,
    /// if no other file has that.
    fn number_of(&self, parent: u64, entry: &DirectoryEntry) -> u64 {
        let is_same = |node: &Node| matches!(&node.place, Place::Named(p, n) if *p == parent && *n == entry.name);
        if let Some(owner) = &entry.owner
            && owner.inode > ROOT
            && self.nodes.get(owner.inode).map_or(true, is_same)
        {
            return owner.inode;
        }
        let hash = BlockHash::of(&[&parent.to_be_bytes(), &entry.name[..]].concat()).0;
        let first = u64::from_be_bytes(*hash.first_chunk().expect("a hash has 32 bytes"));
        self.nodes.free_number(first | FIRST_DERIVED, FIRST_DERIVED..=u64::MAX, is_same)
    }

    /// Notes that the entry of `inode` is to be written anew.
    fn touch(&mut self, inode: u64) {
        self.changes += 1;
        match self.nodes[inode].place.clone() {
            Place::Root => self.is_root_changed = true,
            Place::Named(parent, name) => self.set_name(parent, name, Some(inode)),
            Place::Linked => self.set_link(inode, Some(inode)),
            Place::Removed => {}
        }
    }

    /// Changes what a name means. Counts are the caller's.
    fn set_name(&mut self, parent: u64, name: Bytes, slot: Option<u64>) {
        let before = self.names_mut(parent).changed.insert(name, slot);
        self.unflushed_names += u64::from(before.is_none());
        self.refer(slot, before.flatten());
    }

    fn set_link(&mut self, inode: u64, slot: Option<u64>) {
        let before = self.links.changed.insert(link_name(inode), slot);
        self.unflushed_names += u64::from(before.is_none());
        self.refer(slot, before.flatten());
    }

    fn refer(&mut self, to: Option<u64>, instead_of: Option<u64>) {
        if let Some(node) = to.and_then(|inode| self.nodes.get_mut(inode).ok()) {
            node.changes += 1;
        }
        if let Some(inode) = instead_of {
            self.unrefer(inode);
        }
    }

    fn unrefer(&mut self, inode: u64) {
        if let Ok(node) = self.nodes.get_mut(inode) {
            node.changes -= 1;
            self.reap(inode);
        }
    }

    /// The table, and what is to be done for each file that leaves it.
    fn table(&mut self) -> (&mut InodeTable<Node, Open>, impl FnMut(u64, Node)) {
        let Tree { nodes, held_bytes, unflushed_names, .. } = self;
        let left = |_, node: Node| {
            *held_bytes -= node.xattrs.held_bytes();
            match &node.body {
                Body::File(content) => *held_bytes -= content.held_bytes,
                Body::Directory(names) => *unflushed_names -= names.changed.len() as u64,
                _ => {}
            }
        };
        (nodes, left)
    }

    /// Drops a file from the table, and those above it, that nothing keeps there.
    fn reap(&mut self, inode: u64) {
        let (nodes, left) = self.table();
        nodes.reap(inode, left);
    }

    /// Ends a call: drops what it brought into the table and nothing keeps there.
    pub(super) fn settle(&mut self) {
        self.settle_journal();
        for inode in std::mem::take(&mut self.entered) {
            self.reap(inode);
        }
    }

    /// Changes a file's content, and the sums over all files with it.
    fn change_content<T>(
        &mut self,
        inode: u64,
        change: impl FnOnce(&mut Content) -> Result<T, ContentStop>,
    ) -> Result<T, Stop> {
        let node = self.nodes.get_mut(inode)?;
        let Body::File(content) = &mut node.body else { return Err(Errno::EBADF.into()) };
        let (held, size) = (content.held_bytes, content.size_bytes);
        let done = change(content);
        self.held_bytes = self.held_bytes - held + content.held_bytes;
        if node.links > 0 {
            let others = self.totals.bytes.saturating_sub(size);
            self.totals.bytes = others.saturating_add(content.size_bytes);
        }
        Ok(done?)
    }

    /// The attributes of a file.
    pub(super) fn attr(&self, inode: u64) -> Result<Attr, Stop> {
        let node = self.node(inode)?;
        let (size_bytes, blocks_512) = match &node.body {
            Body::File(content) => (content.size_bytes, content.blocks_512()),
            Body::Directory(names) => (names.entries, 0),
            Body::Symlink(target) => (target.len() as u64, 0),
            Body::Special(..) => (0, 0),
        };
        let nlink = match &node.body {
            Body::Directory(names) if node.links > 0 => {
                u32::try_from(names.subdirectories).unwrap_or(u32::MAX).saturating_add(2)
            }
            _ => node.links,
        };
        Ok(Attr {
            inode: InodeNumber(inode),
            kind: node.kind(),
            mode: node.mode,
            nlink,
            uid: node.uid,
            gid: node.gid,
            rdev: if let Body::Special(_, rdev) = node.body { rdev } else { 0 },
            size_bytes,
            blocks_512,
            block_size_bytes: 1 << self.block_size_log2,
            atime: node.atime,
            mtime: node.mtime,
            ctime: node.ctime,
        })
    }

    /// The changed names of all directories that have a name, by path, and whether they mean a file;
    /// and the changed files of the table of links that none of these names mean.
    pub(super) fn changed_names(&self) -> (Vec<(Vec<u8>, bool)>, BTreeSet<u64>) {
        let mut all = Vec::new();
        let mut linked: BTreeSet<u64> = self.links.changes().into_values().flatten().collect();
        for (inode, node) in self.nodes.iter() {
            if let (Body::Directory(names), Some(above)) = (&node.body, self.path(inode)) {
                for (name, slot) in names.changes() {
                    let path = [&above[..], &name].join(&b'/');
                    all.push((path.strip_prefix(b"/").unwrap_or(&path).to_vec(), slot.is_some()));
                    if let Some(inode) = slot {
                        linked.remove(&inode);
                    }
                }
            }
        }
        (all, linked)
    }

    /// The path of a file: empty of the root; none of a removed one, or one with several names.
    pub(super) fn path(&self, mut inode: u64) -> Option<Vec<u8>> {
        let mut names = Vec::new();
        loop {
            match &self.nodes.get(inode).ok()?.place {
                Place::Root => break,
                Place::Named(parent, name) => {
                    names.push(name.clone());
                    inode = *parent;
                }
                Place::Linked | Place::Removed => return None,
            }
        }
        names.reverse();
        Some(names.join(&b'/'))
    }

    /// That counts agree with what they count.
    ///
    /// # Panics
    /// If one does not.
    pub(super) fn check_invariants(&self) {
        let mut changes: BTreeMap<u64, u64> = BTreeMap::new();
        let all_names = self.nodes.iter().filter_map(|(_, node)| match &node.body {
            Body::Directory(names) => Some(names),
            _ => None,
        });
        for names in all_names.chain([&self.links]) {
            for inode in names.changed.values().chain(names.flushing.values()).flatten() {
                *changes.entry(*inode).or_default() += 1;
            }
        }
        let mut held_bytes = 0;
        for (inode, node) in self.nodes.iter() {
            let changes = changes.remove(&inode).unwrap_or(0);
            assert_eq!(node.changes, changes, "changes of {inode}");
            let above = match node.place {
                Place::Named(parent, _) => Some(parent),
                _ => None,
            };
            assert_eq!(self.nodes.above(inode), above, "the place of {inode}");
            assert_eq!(node.links == 0, node.place == Place::Removed, "links of {inode}");
            held_bytes += node.xattrs.held_bytes();
            if let Body::File(content) = &node.body {
                held_bytes += content.held_bytes;
                content.check_invariants();
            }
        }
        assert!(changes.is_empty(), "references to files that are gone");
        self.nodes.check_invariants();
        assert_eq!(self.held_bytes, held_bytes);
        assert_eq!(self.unflushed_names, self.count_unflushed_names());
    }
}

impl TableInode for Node {
    fn is_needed(&self) -> bool {
        self.changes > 0 || self.has_changed_names()
    }
}

impl Node {
    fn kind(&self) -> FileKind {
        match &self.body {
            Body::File(_) => FileKind::Regular,
            Body::Directory(_) => FileKind::Directory,
            Body::Symlink(_) => FileKind::Symlink,
            Body::Special(kind, _) => *kind,
        }
    }

    /// Whether a flush has names of this directory to write.
    fn has_changed_names(&self) -> bool {
        match &self.body {
            // Those of a removed directory are all gone, and no flush begins to write that.
            Body::Directory(names) => {
                !names.flushing.is_empty() || self.links > 0 && !names.changed.is_empty()
            }
            _ => false,
        }
    }

    fn is_directory(&self) -> bool {
        matches!(self.body, Body::Directory(_))
    }

    fn owner(&self, inode: u64) -> Owner {
        Owner {
            inode,
            uid: self.uid,
            gid: self.gid,
            links: self.links.max(1),
            ctime: self.ctime,
            atime: self.atime,
        }
    }
}

/// A file as it is stored.
fn stored_node(
    entry: &DirectoryEntry,
    place: Place,
    (uid, gid): (u32, u32),
    block_size_log2: u8,
) -> Node {
    let body = match &entry.content {
        format::Content::Regular { size_bytes, blocks_512, inode } => {
            let stored = Stored { inode: *inode, size_bytes: *size_bytes, blocks_512: *blocks_512 };
            Body::File(Content::of(stored, block_size_log2).holding_pages())
        }
        format::Content::Directory(directory) => Body::Directory(Names::of(*directory)),
        format::Content::Symlink(target) => Body::Symlink(Bytes::copy_from_slice(target)),
        format::Content::Special { kind, rdev } => Body::Special(*kind, *rdev),
        format::Content::Linked { .. } => unreachable!("it is looked up in the table of links"),
    };
    let owner = entry.owner.unwrap_or(Owner {
        inode: 0,
        uid,
        gid,
        links: 1,
        ctime: entry.mtime,
        atime: entry.mtime,
    });
    Node {
        mode: entry.mode,
        uid: owner.uid,
        gid: owner.gid,
        // Only a file in the table of links has more than this name.
        links: if place == Place::Linked { owner.links } else { 1 },
        atime: owner.atime,
        mtime: entry.mtime,
        ctime: owner.ctime,
        body,
        xattrs: NodeXattrs::Stored(entry.xattrs),
        place,
        changes: 0,
    }
}
