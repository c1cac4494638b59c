//! The files that the kernel holds and has open, as plain data.
//!
//! Pastis §3.2: once a file is open, its cached copy is what is read and written until it is closed.
//! Here that copy is a [`View`], which all opens of a file share: its attributes, and its
//! contents over those that are stored.
//!
//! Invariants:
//!
//! - A file is in the table while the kernel holds its number or has it open, or while its view has
//!   changes.
//! - A number means one inode for as long as it is in the table, but for a newborn that becomes the file which another mount
//!   has given its name.
//! - A newborn is open or has changes, and its name leads to it.
//! - An open file has a view; a view with changes is never replaced by what is read.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::BlockHash;
use atoll_vfs::{Attr, Errno, FileKind, FileTime, InodeNumber, InodeTable, OpenFlags, TableInode};
use bytes::Bytes;

use super::inline_blocks::Pin;
use super::inode::{Attributes, Contents, FileData, Inode, InodeKey, Link};
use super::inodes::Version;
use crate::blocks::content::{Content, Stored};

pub(super) const ROOT: u64 = InodeNumber::ROOT.0;
/// Numbers above are those of the past.
const MOST_NUMBER: u64 = u64::MAX >> 1;
/// Directories above one, at most. A guess: paths have 4,096 bytes.
const MAX_DEPTH: usize = 2048;

/// An open file as this mount shows it.
pub(super) struct View {
    /// What the next version is based on.
    pub(super) version: Arc<Version>,
    pub(super) attributes: Attributes,
    pub(super) content: Content,
    /// Where the contents are that are stored, if there are any.
    pub(super) data: Option<FileData>,
    /// Keeps them readable, if they lie in the inode.
    pub(super) pin: Option<Arc<Pin>>,
    /// Grows with each change that is not in an inode yet; 0 if there is none.
    pub(super) changes: u64,
    /// Data that was replaced since the last version was written: on the ring, and not shown any more.
    pub(super) replaced: Vec<FileData>,
    /// When the data was read, or its leases were extended last.
    pub(super) kept_at: Instant,
    /// When others' changes were looked for last.
    pub(super) checked_at: Instant,
    /// Set if a program has overwritten the contents of [`View::version`] and had not read them: the version that it had
    /// read before.
    pub(super) unseen_since: Option<Arc<Version>>,
}

/// A file that the kernel knows.
pub(super) struct Node {
    pub(super) key: InodeKey,
    pub(super) kind: FileKind,
    pub(super) view: Option<View>,
    /// What it was when this mount took its last name away: what is written since goes nowhere.
    pub(super) orphan: Option<Arc<Version>>,
    /// Its name leads to an inode that has been removed: all that can be done with it is to remove it.
    pub(super) is_lost: bool,
    /// Another mount has removed it while it was open here.
    pub(super) is_nameless: bool,
    /// Where it was found last: its directory and its name there.
    pub(super) place: Option<(InodeKey, Bytes)>,
    /// Where its name is to be, if it is not on the ring yet.
    pub(super) birthplace: Option<Birthplace>,
    /// Held while the file's inode is written.
    pub(super) turn: Arc<futures_util::lock::Mutex<()>>,
    /// What the kernel has cached pages of.
    pub(super) in_kernel: Option<Stored>,
    /// How often changes were dropped, with a lock that was lost.
    pub(super) drops: u64,
}

/// Where a newborn is to have its name.
#[derive(Clone)]
pub(super) struct Birthplace {
    pub(super) directory: InodeKey,
    pub(super) name: Bytes,
    /// When it was created.
    pub(super) at: Instant,
    /// Its inode is on the ring, and its name is not.
    pub(super) is_stored: bool,
    /// Too few replicas took its inode and its name; some may have.
    pub(super) was_refused: bool,
}

/// The names of an open directory.
#[derive(Clone)]
pub(super) struct Listing {
    pub(super) version: Arc<Version>,
    /// Names that were not on the ring.
    pub(super) newborns: Vec<(Bytes, InodeKey, FileKind)>,
}

impl Listing {
    /// Each name with the inode it stands for.
    pub(super) fn names(&self) -> Result<impl Iterator<Item = (Bytes, InodeKey, FileKind)>, Errno> {
        let named = self.version.names()?.iter();
        let named =
            named.map(|(name, entries)| (name.clone(), entries[0].inode, entries[0].file_kind()));
        Ok(named.chain(self.newborns.iter().cloned()))
    }
}

/// What a handle is of.
#[derive(Clone)]
pub(super) enum Open {
    File(SharedOpenFile),
    /// A directory as it was when it was opened.
    Directory(Listing),
}

/// An open file as one program has it.
#[derive(Clone)]
pub(super) struct SharedOpenFile {
    pub(super) flags: OpenFlags,
    /// The process that has opened it, 0 if unknown.
    pub(super) pid: u32,
    /// The contents that its program has seen: when it opened or locked the file, or read it last.
    seen: Arc<Version>,
}

impl TableInode for Node {
    fn is_needed(&self) -> bool {
        self.view.is_some()
    }
}

/// See the module.
pub(super) struct Table {
    nodes: InodeTable<Node, Open>,
    by_key: BTreeMap<InodeKey, u64>,
    /// Files that are not on the ring yet, by directory and name.
    newborns: BTreeMap<(InodeKey, Bytes), u64>,
    /// Changed bytes in memory.
    held_bytes: u64,
}

impl Table {
    /// A table of the root directory, which is always in it.
    pub(super) fn of_root(key: InodeKey) -> Table {
        Table {
            nodes: InodeTable::new(Node::new(key, FileKind::Directory)),
            by_key: BTreeMap::from([(key, ROOT)]),
            newborns: BTreeMap::new(),
            held_bytes: 0,
        }
    }

    pub(super) fn node(&self, number: u64) -> Result<&Node, Errno> {
        self.nodes.get(number)
    }

    pub(super) fn node_mut(&mut self, number: u64) -> Result<&mut Node, Errno> {
        self.nodes.get_mut(number)
    }

    /// Works on the view of an open file.
    pub(super) fn on_view<T>(
        &mut self,
        number: u64,
        work: impl FnOnce(&mut View) -> T,
    ) -> Result<T, Errno> {
        let node = self.nodes.get_mut(number)?;
        let view = node.view.as_mut().ok_or(Errno::EBADF)?;
        let held = view.content.held_bytes;
        let done = work(view);
        self.held_bytes = self.held_bytes - held + view.content.held_bytes;
        Ok(done)
    }

    /// The number of an inode that is in the table.
    pub(super) fn number_of(&self, key: &InodeKey) -> Option<u64> {
        self.by_key.get(key).copied()
    }

    /// The number that an inode has, or would have: derived from its key, so that all mounts give it
    /// the same one, unless another inode has taken that.
    pub(super) fn number_for(&self, key: &InodeKey) -> u64 {
        if let Some(number) = self.by_key.get(key) {
            return *number;
        }
        let first = u64::from_be_bytes(*key.0.first_chunk().expect("32 bytes"));
        let numbers = ROOT + 1..=MOST_NUMBER;
        self.nodes.free_number((first & MOST_NUMBER).max(ROOT + 1), numbers, |_| false)
    }

    /// Brings an inode into the table and counts a lookup of it.
    pub(super) fn hold(&mut self, key: InodeKey, kind: FileKind) -> u64 {
        let number = self.number_for(&key);
        self.by_key.insert(key, number);
        if !self.nodes.look_up(number) {
            self.nodes.insert_looked_up(number, None, Node::new(key, kind));
        }
        number
    }

    /// Takes back lookups.
    pub(super) fn forget(&mut self, number: u64, count: u64) {
        let by_key = &mut self.by_key;
        self.nodes.forget(number, count, |number, node| leave(by_key, number, &node));
        self.reap(number);
    }

    /// How often a file is open.
    pub(super) fn opens(&self, number: u64) -> u64 {
        self.nodes.open_count(number)
    }

    /// Drops the view of a file that is not open and has no changes, and the file if nothing else keeps it here.
    pub(super) fn reap(&mut self, number: u64) {
        let is_open = self.opens(number) > 0;
        let Ok(node) = self.nodes.get_mut(number) else { return };
        if let Some(view) = node.view.take_if(|view| !is_open && !view.has_changes()) {
            self.held_bytes -= view.content.held_bytes;
        }
        let by_key = &mut self.by_key;
        self.nodes.reap(number, |number, node| leave(by_key, number, &node));
    }

    /// Shows a file as `view` says from now on.
    pub(super) fn set_view(&mut self, number: u64, view: View) -> Result<(), Errno> {
        let node = self.nodes.get_mut(number)?;
        self.held_bytes += view.content.held_bytes;
        if let Some(before) = node.view.replace(view) {
            self.held_bytes -= before.content.held_bytes;
        }
        Ok(())
    }

    /// A file has been created that is not on the ring.
    pub(super) fn bear(&mut self, number: u64, place: Birthplace) -> Result<(), Errno> {
        self.newborns.insert((place.directory, place.name.clone()), number);
        self.node_mut(number)?.birthplace = Some(place);
        Ok(())
    }

    /// A file that the kernel knows has this name.
    pub(super) fn place(&mut self, key: &InodeKey, directory: InodeKey, name: &Bytes) {
        let node = self.by_key.get(key).and_then(|number| self.nodes.get_mut(*number).ok());
        node.into_iter().for_each(|node| node.place = Some((directory, name.clone())));
    }

    /// The directories that lead to a name, as they were found last, the nearest first; each with a name in it: the first
    /// `name`, of each other one the directory before.
    pub(super) fn path_to(&self, directory: InodeKey, name: Bytes) -> Vec<(InodeKey, Bytes)> {
        let mut path = vec![(directory, name)];
        // What is moved while it is followed may lead in a circle.
        while path.len() < MAX_DEPTH
            && let Some(last) = path.last()
            && let Some(node) =
                self.number_of(&last.0).and_then(|number| self.nodes.get(number).ok())
            && let Some(place) = &node.place
        {
            path.push(place.clone());
        }
        path
    }

    /// The path of a file below the highest directory that is known here, as it was found last.
    pub(super) fn path_of(&self, number: u64) -> Option<String> {
        let node = self.nodes.get(number).ok().filter(|node| node.orphan.is_none())?;
        let born = node.birthplace.as_ref().map(|born| (born.directory, born.name.clone()));
        let (directory, name) = born.or_else(|| node.place.clone())?;
        let path = self.path_to(directory, name).into_iter().rev();
        let names: Vec<String> =
            path.map(|(_, name)| String::from_utf8_lossy(&name).into_owned()).collect();
        Some(names.join("/"))
    }

    /// A newborn has its name now, or will have none.
    pub(super) fn name(&mut self, number: u64) {
        let place = self.nodes.get_mut(number).ok().and_then(|node| node.birthplace.take());
        if let Some(place) = place {
            self.newborns.remove(&(place.directory, place.name));
        }
    }

    /// A newborn becomes the file that has its name on the ring, which nobody has open here. The kernel may know that by
    /// another number; the name leads to this one from now on.
    pub(super) fn become_other(
        &mut self,
        number: u64,
        key: InodeKey,
        view: View,
    ) -> Result<(), Errno> {
        let has_view = |other| self.nodes.get(other).is_ok_and(|node| node.view.is_some());
        if self.number_of(&key).is_some_and(|other| self.opens(other) > 0 || has_view(other)) {
            return Err(Errno::ESTALE);
        }
        self.name(number);
        let before = std::mem::replace(&mut self.node_mut(number)?.key, key);
        if self.by_key.get(&before) == Some(&number) {
            self.by_key.remove(&before);
        }
        self.by_key.insert(key, number);
        self.set_view(number, view)
    }

    /// The newborn of a name.
    pub(super) fn newborn(&self, directory: InodeKey, name: &[u8]) -> Option<u64> {
        self.newborns.get(&(directory, Bytes::copy_from_slice(name))).copied()
    }

    /// The newborns of a directory, by their names.
    pub(super) fn newborns_of(&self, directory: &InodeKey) -> Vec<(Bytes, u64)> {
        let from = (*directory, Bytes::new());
        let its = self.newborns.range(from..).take_while(|((above, _), _)| above == directory);
        its.map(|((_, name), number)| (name.clone(), *number)).collect()
    }

    /// Open newborns that were created at least `age` ago.
    pub(super) fn newborns_before(&self, now: Instant, age: Duration) -> Vec<u64> {
        let is_old = |number: &u64| {
            let node = self.nodes.get(*number).ok().filter(|_| self.opens(*number) > 0);
            let place = node.and_then(|node| node.birthplace.as_ref());
            place.is_some_and(|place| now.since(place.at) >= age)
        };
        self.newborns.values().copied().filter(is_old).collect()
    }

    /// An open file has no name any more: what is written to it from now on goes nowhere.
    pub(super) fn make_orphan(&mut self, number: u64) -> Result<(), Errno> {
        let node = self.node_mut(number)?;
        node.orphan = node.view.as_ref().map(|view| view.version.clone());
        Ok(())
    }

    /// How many files are in the table.
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn open(&mut self, number: u64, open: Open) -> Result<u64, Errno> {
        self.nodes.open(number, open)
    }

    pub(super) fn opened(&self, number: u64, handle: u64) -> Result<&Open, Errno> {
        self.nodes.opened(number, handle)
    }

    /// Opens a regular file, which has a view.
    pub(super) fn open_file(
        &mut self,
        number: u64,
        flags: OpenFlags,
        pid: u32,
    ) -> Result<u64, Errno> {
        let view = self.node(number)?.view.as_ref().ok_or(Errno::EBADF)?;
        let seen = view.version.clone();
        self.open(number, Open::File(SharedOpenFile { flags, pid, seen }))
    }

    /// How a file was opened.
    pub(super) fn flags(&self, number: u64, handle: u64) -> Result<OpenFlags, Errno> {
        match self.opened(number, handle)? {
            Open::File(open) => Ok(open.flags),
            Open::Directory(_) => Err(Errno::EBADF),
        }
    }

    /// A program sees the contents of a file that it has open.
    pub(super) fn see(&mut self, number: u64, handle: u64) {
        let Ok(Node { view: Some(view), .. }) = self.nodes.get(number) else { return };
        let Ok(Open::File(open)) = self.nodes.opened(number, handle) else { return };
        if Arc::ptr_eq(&view.version, &open.seen) {
            return;
        }
        let version = view.version.clone();
        if let Ok(Open::File(open)) = self.nodes.opened_mut(number, handle) {
            open.seen = version;
        }
    }

    /// A process sees the contents of all files that it has open.
    pub(super) fn see_all_of(&mut self, pid: u32) {
        let is_its = |open: &Open| matches!(open, Open::File(open) if open.pid == pid && pid != 0);
        let opens = self.nodes.opens().filter(|(.., open)| is_its(open));
        let its: Vec<(u64, u64)> = opens.map(|(handle, number, _)| (number, handle)).collect();
        its.into_iter().for_each(|(number, handle)| self.see(number, handle));
    }

    /// A program has changed the contents of a file that it has open, other than by an append.
    pub(super) fn overwritten(&mut self, number: u64, handle: u64) {
        let Ok(Open::File(open)) = self.nodes.opened(number, handle) else { return };
        let seen = open.seen.clone();
        let view = self.nodes.get_mut(number).ok().and_then(|node| node.view.as_mut());
        let Some(view) = view.filter(|view| !Arc::ptr_eq(&view.version, &seen)) else { return };
        if !view.version.inode().contents.is_same(&seen.inode().contents) {
            view.unseen_since.get_or_insert(seen);
        }
        self.see(number, handle);
    }

    /// What programs have written of a file is dropped, and its contents are those of `version` again, which one of them has
    /// overwritten and not read. Opens do not say which one: whoever has seen these contents counts as having read `read` alone.
    pub(super) fn unsee(&mut self, number: u64, version: &Arc<Version>, read: &Arc<Version>) {
        for (_, of, open) in self.nodes.opens_mut() {
            if let Open::File(open) = open
                && of == number
                && open.seen.inode().contents.is_same(&version.inode().contents)
            {
                open.seen = read.clone();
            }
        }
    }

    /// The listing of an open directory.
    pub(super) fn listing(&self, number: u64, handle: u64) -> Result<Listing, Errno> {
        match self.opened(number, handle)? {
            Open::Directory(listing) => Ok(listing.clone()),
            Open::File(_) => Err(Errno::ENOTDIR),
        }
    }

    /// Lists an open directory so from now on.
    pub(super) fn relist(&mut self, number: u64, handle: u64, listing: &Listing) {
        if let Ok(Open::Directory(listed)) = self.nodes.opened_mut(number, handle) {
            *listed = listing.clone();
        }
    }

    pub(super) fn close(&mut self, number: u64, handle: u64) -> Result<(), Errno> {
        let by_key = &mut self.by_key;
        self.nodes.close(number, handle, |number, node| leave(by_key, number, &node))?;
        self.reap(number);
        Ok(())
    }

    /// How many changes a file has that are not on the ring; `None` if it has none, or is not here any more.
    pub(super) fn changes(&self, number: u64) -> Option<u64> {
        let view = self.nodes.get(number).ok()?.view.as_ref()?;
        Some(view.changes).filter(|_| view.has_changes())
    }

    /// Files with changes that are not on the ring; if `abandoned`, of these such as are not open.
    pub(super) fn changed(&self, abandoned: bool) -> Vec<u64> {
        let is_one = |(number, node): &(u64, &Node)| {
            node.view.as_ref().is_some_and(View::has_changes)
                && !(abandoned && self.opens(*number) > 0)
        };
        self.nodes.iter().filter(is_one).map(|(number, _)| number).collect()
    }

    /// Open files without changes.
    pub(super) fn open_unchanged(&self) -> Vec<u64> {
        let is_one = |(number, node): &(u64, &Node)| {
            self.opens(*number) > 0 && node.view.as_ref().is_some_and(|view| !view.has_changes())
        };
        self.nodes.iter().filter(is_one).map(|(number, _)| number).collect()
    }

    /// Files that are open or have changes and whose data was kept at least `age` ago, and the data.
    pub(super) fn open_data(&self, now: Instant, age: Duration) -> Vec<(u64, FileData)> {
        let data = |(number, node): (u64, &Node)| {
            let view = node.view.as_ref().filter(|view| now.since(view.kept_at) >= age)?;
            let is_used = self.opens(number) > 0 || view.has_changes();
            Some((number, view.data.clone().filter(|_| is_used)?))
        };
        self.nodes.iter().filter_map(data).collect()
    }

    /// Changed bytes in memory.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }
}

/// A file leaves the table. Another one may have become what its key means.
fn leave(by_key: &mut BTreeMap<InodeKey, u64>, number: u64, node: &Node) {
    if by_key.get(&node.key) == Some(&number) {
        by_key.remove(&node.key);
    }
}

impl Node {
    fn new(key: InodeKey, kind: FileKind) -> Node {
        Node {
            key,
            kind,
            view: None,
            orphan: None,
            is_lost: false,
            is_nameless: false,
            place: None,
            birthplace: None,
            turn: Arc::default(),
            in_kernel: None,
            drops: 0,
        }
    }
}

impl View {
    /// A regular file as its inode says; the next version is based on `version`. `pin` keeps an inode block that lies in
    /// the inode where readers of files look.
    pub(super) fn of(
        version: Arc<Version>,
        inode: &Inode,
        (block_size_log2, now): (u8, Instant),
        pin: impl FnOnce(Vec<u8>) -> Arc<Pin>,
    ) -> Result<View, Errno> {
        let Contents::Regular { size_bytes, blocks_512, data, .. } = &inode.contents else {
            return Err(Errno::EINVAL);
        };
        let (hash, pin): (Option<BlockHash>, _) = match data {
            None => (None, None),
            Some(FileData::Elsewhere(hash)) => (Some(*hash), None),
            Some(FileData::Here(block)) => {
                let pin = pin(block.encode());
                (Some(pin.hash), Some(pin))
            }
        };
        let stored = Stored { inode: hash, size_bytes: *size_bytes, blocks_512: *blocks_512 };
        Ok(View {
            attributes: inode.attributes.clone(),
            content: Content::of(stored, block_size_log2),
            data: data.clone(),
            pin,
            changes: 0,
            replaced: Vec::new(),
            kept_at: now,
            checked_at: now,
            unseen_since: None,
            version,
        })
    }

    /// Changes the contents, in memory.
    pub(super) fn change<E>(
        &mut self,
        now: FileTime,
        change: impl FnOnce(&mut Content) -> Result<(), E>,
    ) -> Result<(), E> {
        change(&mut self.content)?;
        self.attributes.mtime = now;
        self.attributes.ctime = now;
        self.changes += 1;
        Ok(())
    }

    pub(super) fn has_changes(&self) -> bool {
        self.changes > 0
    }

    /// The inode as this mount shows it.
    pub(super) fn attr(&self, number: u64) -> Attr {
        let mut attr =
            attr(number, &self.version.inode().links, FileKind::Regular, &self.attributes);
        attr.size_bytes = self.content.size_bytes;
        attr.blocks_512 = self.content.blocks_512();
        attr.block_size_bytes = 1 << self.content.block_size_log2;
        attr
    }
}

/// The attributes of a name whose inode has been removed.
pub(super) fn attr_of_lost(number: u64, kind: FileKind) -> Attr {
    attr(number, [], kind, &Attributes::default())
}

/// The attributes of an inode that is not open.
pub(super) fn attr_of(number: u64, inode: &Inode, block_size_log2: u8) -> Attr {
    let kind = inode.contents.kind();
    let mut attr = attr(number, &inode.links, kind, &inode.attributes);
    attr.block_size_bytes = 1 << block_size_log2;
    match &inode.contents {
        Contents::Regular { size_bytes, blocks_512, .. } => {
            attr.size_bytes = *size_bytes;
            attr.blocks_512 = *blocks_512;
        }
        Contents::Directory(entries) => {
            attr.nlink = u32::try_from(entries.subdirectories()).unwrap_or(u32::MAX - 2) + 2;
            attr.size_bytes = entries.len() as u64;
        }
        Contents::Unread { .. } => unreachable!("the leaves of a version have been read"),
        Contents::Symlink(target) => attr.size_bytes = target.len() as u64,
        Contents::Special { rdev, .. } => attr.rdev = *rdev,
    }
    attr
}

fn attr<'a>(
    number: u64,
    links: impl IntoIterator<Item = &'a Link>,
    kind: FileKind,
    attributes: &Attributes,
) -> Attr {
    Attr {
        inode: InodeNumber(number),
        kind,
        mode: attributes.mode,
        nlink: links.into_iter().count() as u32,
        uid: attributes.uid,
        gid: attributes.gid,
        rdev: 0,
        size_bytes: 0,
        blocks_512: 0,
        block_size_bytes: 0,
        atime: attributes.atime,
        mtime: attributes.mtime,
        ctime: attributes.ctime,
    }
}
