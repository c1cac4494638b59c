//! The tables of a [`MemoryFs`](super::MemoryFs): nodes, names and opens, as plain data
//! with plain methods. The trait's calls are thin over these.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::content::{Content, MAX_SIZE_BYTES};
use crate::{
    Attr, Caller, DirEntry, Entry, Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE,
    FileKind, FileTime, Handle, InodeNumber, InodeTable, Invalidation, OpenFlags, Opened,
    RenameFlags, SetAttr, SetTime, TableInode, Writer, check_name,
};

const SETGID: u32 = 0o2000;
pub(super) const MAX_LINKS: u32 = 65_000;

/// A file and what it holds.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) attr: Attr,
    pub(super) body: Body,
    pub(super) xattrs: BTreeMap<Bytes, Bytes>,
}

impl TableInode for Node {
    fn is_needed(&self) -> bool {
        self.attr.nlink > 0
    }
}

#[derive(Debug)]
pub(super) enum Body {
    File(Content),
    Directory {
        names: BTreeMap<Bytes, InodeNumber>,
        /// Where each name stands in listings, by when it was made.
        cookies: BTreeMap<Bytes, u64>,
        parent: InodeNumber,
    },
    Symlink(Bytes),
    /// FIFO, socket or device.
    Special,
}

impl Body {
    /// A directory without names.
    pub(super) fn directory(parent: InodeNumber) -> Body {
        Body::Directory { names: BTreeMap::new(), cookies: BTreeMap::new(), parent }
    }
}

/// The names of a directory in the order of their cookies.
type Listing = Arc<Vec<(u64, Bytes, InodeNumber, FileKind)>>;

/// An open file, or a directory's names as they were when it was read from its beginning.
#[derive(Debug, Clone)]
pub(super) enum Open {
    File(OpenFlags),
    Directory(Listing),
}

/// The time of a change: `now`, or just after the change before if that was within the same millisecond. By a
/// directory's time a kernel tells whether a listing that it keeps is of today, since it is not told of a name that it
/// does not know.
fn after(before: FileTime, now: FileTime) -> FileTime {
    let millisecond = |time: FileTime| (time.secs, time.nanos / 1_000_000);
    match millisecond(before) == millisecond(now) && before >= now {
        true if before.nanos % 1_000_000 < 999_999 => {
            FileTime { nanos: before.nanos + 1, ..before }
        }
        true => before,
        false => now,
    }
}

/// What a new file is to be.
pub(super) struct Birth {
    pub(super) body: Body,
    pub(super) kind: FileKind,
    pub(super) mode: u32,
    pub(super) rdev: u64,
}

/// The whole file system. A node is kept while it has a name, a lookup or an open.
#[derive(Debug)]
pub(super) struct State {
    nodes: InodeTable<Node, Open>,
    last_inode: u64,
    last_cookie: u64,
    pub(super) capacity_bytes: u64,
    pub(super) ttl: Duration,
    pub(super) keep_cache: bool,
    /// What other views are to be told of the change under way.
    pub(super) changed: Vec<Invalidation>,
}

impl State {
    pub(super) fn new(now: FileTime) -> State {
        let root = Node {
            attr: Attr {
                inode: InodeNumber::ROOT,
                kind: FileKind::Directory,
                mode: 0o755,
                nlink: 2,
                uid: 0,
                gid: 0,
                rdev: 0,
                size_bytes: 0,
                blocks_512: 0,
                block_size_bytes: 4096,
                atime: now,
                mtime: now,
                ctime: now,
            },
            body: Body::directory(InodeNumber::ROOT),
            xattrs: BTreeMap::new(),
        };
        State {
            nodes: InodeTable::new(root),
            last_inode: InodeNumber::ROOT.0,
            last_cookie: 0,
            capacity_bytes: u64::MAX,
            ttl: Duration::from_secs(1),
            keep_cache: false,
            changed: Vec::new(),
        }
    }

    pub(super) fn node(&self, inode: InodeNumber) -> Result<&Node, Errno> {
        self.nodes.get(inode.0)
    }

    pub(super) fn node_mut(&mut self, inode: InodeNumber) -> Result<&mut Node, Errno> {
        self.nodes.get_mut(inode.0)
    }

    fn names(&self, inode: InodeNumber) -> Result<&BTreeMap<Bytes, InodeNumber>, Errno> {
        match &self.node(inode)?.body {
            Body::Directory { names, .. } => Ok(names),
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn enter_name(
        &mut self,
        parent: InodeNumber,
        name: &[u8],
        inode: InodeNumber,
    ) -> Result<(), Errno> {
        let name = Bytes::copy_from_slice(name);
        self.last_cookie += 1;
        let cookie = self.last_cookie;
        let Body::Directory { names, cookies, .. } = &mut self.node_mut(parent)?.body else {
            return Err(Errno::ENOTDIR);
        };
        names.insert(name.clone(), inode);
        cookies.entry(name.clone()).or_insert(cookie);
        self.changed.push(Invalidation::Name { parent, name });
        Ok(())
    }

    fn remove_name(&mut self, parent: InodeNumber, name: &[u8]) -> Result<(), Errno> {
        let Body::Directory { names, cookies, .. } = &mut self.node_mut(parent)?.body else {
            return Err(Errno::ENOTDIR);
        };
        names.remove(name);
        cookies.remove(name);
        let name = Bytes::copy_from_slice(name);
        self.changed.push(Invalidation::Name { parent, name });
        Ok(())
    }

    pub(super) fn parent_of(&self, inode: InodeNumber) -> Result<InodeNumber, Errno> {
        match self.node(inode)?.body {
            Body::Directory { parent, .. } => Ok(parent),
            _ => Err(Errno::ENOTDIR),
        }
    }

    pub(super) fn attr(&self, inode: InodeNumber) -> Result<Attr, Errno> {
        let node = self.node(inode)?;
        let mut attr = node.attr;
        match &node.body {
            Body::File(content) => {
                attr.size_bytes = content.size_bytes();
                attr.blocks_512 = content.used_bytes() / 512;
            }
            Body::Directory { names, .. } => attr.size_bytes = names.len() as u64,
            Body::Symlink(target) => attr.size_bytes = target.len() as u64,
            Body::Special => {}
        }
        Ok(attr)
    }

    /// The entry of `inode`, counted as one lookup.
    pub(super) fn entry(&mut self, inode: InodeNumber) -> Result<Entry, Errno> {
        let attr = self.attr(inode)?;
        self.nodes.look_up(inode.0);
        Ok(Entry { attr, generation: 0, name_ttl: self.ttl, attr_ttl: self.ttl })
    }

    pub(super) fn find(&self, parent: InodeNumber, name: &[u8]) -> Result<InodeNumber, Errno> {
        let names = self.names(parent)?;
        check_name(name)?;
        names.get(name).copied().ok_or(Errno::ENOENT)
    }

    pub(super) fn forget(&mut self, inode: InodeNumber, count: u64) {
        self.nodes.forget(inode.0, count, |_, _| {});
    }

    fn touch(&mut self, inode: InodeNumber, now: FileTime) {
        if let Ok(node) = self.nodes.get_mut(inode.0) {
            let time = after(node.attr.mtime, now);
            node.attr.mtime = time;
            node.attr.ctime = time;
            self.changed.push(Invalidation::Attributes(inode));
        }
    }

    /// That `name` can be made in `parent`.
    fn check_free(&self, parent: InodeNumber, name: &[u8]) -> Result<(), Errno> {
        match self.find(parent, name) {
            Ok(_) => Err(Errno::EEXIST),
            Err(Errno::ENOENT) if self.node(parent)?.attr.nlink == 0 => Err(Errno::ENOENT),
            Err(Errno::ENOENT) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    pub(super) fn make(
        &mut self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        birth: Birth,
        now: FileTime,
    ) -> Result<InodeNumber, Errno> {
        self.check_free(parent, name)?;
        let directory = self.node(parent)?.attr;
        let is_directory = birth.kind == FileKind::Directory;
        if is_directory && directory.nlink >= MAX_LINKS {
            return Err(Errno::EMLINK);
        }
        let inherits = directory.mode & SETGID != 0;
        let inherited = if inherits && is_directory { SETGID } else { 0 };
        self.last_inode += 1;
        let inode = InodeNumber(self.last_inode);
        let attr = Attr {
            inode,
            kind: birth.kind,
            mode: birth.mode & 0o7777 | inherited,
            nlink: if is_directory { 2 } else { 1 },
            uid: caller.uid,
            gid: if inherits { directory.gid } else { caller.gid },
            rdev: birth.rdev,
            size_bytes: 0,
            blocks_512: 0,
            block_size_bytes: 4096,
            atime: now,
            mtime: now,
            ctime: now,
        };
        let xattrs = BTreeMap::new();
        self.nodes.insert(inode.0, None, Node { attr, body: birth.body, xattrs });
        self.enter_name(parent, name, inode)?;
        if is_directory {
            self.node_mut(parent)?.attr.nlink += 1;
        }
        self.touch(parent, now);
        Ok(inode)
    }

    pub(super) fn link(
        &mut self,
        inode: InodeNumber,
        parent: InodeNumber,
        name: &[u8],
        now: FileTime,
    ) -> Result<(), Errno> {
        self.check_free(parent, name)?;
        let node = self.node_mut(inode)?;
        match (node.attr.kind, node.attr.nlink) {
            (FileKind::Directory, _) => return Err(Errno::EPERM),
            (_, 0) => return Err(Errno::ENOENT),
            (_, MAX_LINKS..) => return Err(Errno::EMLINK),
            _ => {}
        }
        node.attr.nlink += 1;
        node.attr.ctime = now;
        self.changed.push(Invalidation::Attributes(inode));
        self.enter_name(parent, name, inode)?;
        self.touch(parent, now);
        Ok(())
    }

    /// Takes the name away and what hangs on it; the caller has checked that it may go.
    fn detach(&mut self, parent: InodeNumber, name: &[u8], now: FileTime) -> Result<(), Errno> {
        let inode = self.find(parent, name)?;
        self.remove_name(parent, name)?;
        let node = self.node_mut(inode)?;
        node.attr.ctime = now;
        if node.attr.kind == FileKind::Directory {
            node.attr.nlink = 0;
            self.node_mut(parent)?.attr.nlink -= 1;
        } else {
            node.attr.nlink -= 1;
        }
        self.changed.push(match self.node(inode)?.attr.nlink {
            0 => Invalidation::Deleted { parent, name: Bytes::copy_from_slice(name), inode },
            _ => Invalidation::Attributes(inode),
        });
        self.touch(parent, now);
        self.nodes.reap(inode.0, |_, _| {});
        Ok(())
    }

    pub(super) fn unlink(
        &mut self,
        parent: InodeNumber,
        name: &[u8],
        now: FileTime,
    ) -> Result<(), Errno> {
        let inode = self.find(parent, name)?;
        if self.node(inode)?.attr.kind == FileKind::Directory {
            return Err(Errno::EISDIR);
        }
        self.detach(parent, name, now)
    }

    pub(super) fn rmdir(
        &mut self,
        parent: InodeNumber,
        name: &[u8],
        now: FileTime,
    ) -> Result<(), Errno> {
        let inode = self.find(parent, name)?;
        if !self.names(inode)?.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        self.detach(parent, name, now)
    }

    pub(super) fn rename(
        &mut self,
        (parent, name): (InodeNumber, &[u8]),
        (new_parent, new_name): (InodeNumber, &[u8]),
        flags: RenameFlags,
        now: FileTime,
    ) -> Result<(), Errno> {
        if flags.exchange && flags.no_replace {
            return Err(Errno::EINVAL);
        }
        let inode = self.find(parent, name)?;
        let target = match self.find(new_parent, new_name) {
            Ok(target) => Some(target),
            Err(Errno::ENOENT) if self.node(new_parent)?.attr.nlink > 0 => None,
            Err(errno) => return Err(errno),
        };
        self.check_no_cycle(inode, new_parent)?;
        match target {
            None if flags.exchange => return Err(Errno::ENOENT),
            Some(_) if flags.no_replace => return Err(Errno::EEXIST),
            Some(target) if target == inode => return Ok(()),
            Some(target) if flags.exchange => {
                self.check_no_cycle(target, parent)?;
                self.place(target, (new_parent, new_name), (parent, name))?;
            }
            Some(target) => {
                self.check_replaces(inode, target)?;
                self.detach(new_parent, new_name, now)?;
                self.remove_name(parent, name)?;
            }
            None => {
                self.remove_name(parent, name)?;
            }
        }
        self.place(inode, (parent, name), (new_parent, new_name))?;
        for changed in [Some(inode), target.filter(|_| flags.exchange)].into_iter().flatten() {
            self.node_mut(changed)?.attr.ctime = now;
            self.changed.push(Invalidation::Attributes(changed));
        }
        self.touch(parent, now);
        self.touch(new_parent, now);
        Ok(())
    }

    /// A directory does not move into itself or below itself.
    fn check_no_cycle(&self, inode: InodeNumber, into: InodeNumber) -> Result<(), Errno> {
        let mut above = into;
        loop {
            if above == inode {
                return Err(Errno::EINVAL);
            }
            if above == InodeNumber::ROOT {
                return Ok(());
            }
            above = self.parent_of(above)?;
        }
    }

    fn check_replaces(&self, inode: InodeNumber, target: InodeNumber) -> Result<(), Errno> {
        let is_directory = |i| self.node(i).map(|n| n.attr.kind == FileKind::Directory);
        match (is_directory(inode)?, is_directory(target)?) {
            (false, true) => Err(Errno::EISDIR),
            (true, false) => Err(Errno::ENOTDIR),
            (true, true) if !self.names(target)?.is_empty() => Err(Errno::ENOTEMPTY),
            _ => Ok(()),
        }
    }

    /// Enters `inode` under its new name and moves a directory's link to its parent.
    fn place(
        &mut self,
        inode: InodeNumber,
        (old_parent, _): (InodeNumber, &[u8]),
        (new_parent, new_name): (InodeNumber, &[u8]),
    ) -> Result<(), Errno> {
        self.enter_name(new_parent, new_name, inode)?;
        if let Body::Directory { parent, .. } = &mut self.node_mut(inode)?.body {
            *parent = new_parent;
            self.node_mut(old_parent)?.attr.nlink -= 1;
            self.node_mut(new_parent)?.attr.nlink += 1;
        }
        Ok(())
    }

    pub(super) fn set(
        &mut self,
        inode: InodeNumber,
        changes: SetAttr,
        now: FileTime,
    ) -> Result<(), Errno> {
        let node = self.nodes.get_mut(inode.0)?;
        if let Some(size_bytes) = changes.size_bytes {
            match &mut node.body {
                Body::File(content) => {
                    let bytes = size_bytes.min(content.size_bytes())..u64::MAX;
                    content.resize(size_bytes)?;
                    self.changed.push(Invalidation::Data { inode, bytes });
                }
                Body::Directory { .. } => return Err(Errno::EISDIR),
                _ => return Err(Errno::EINVAL),
            }
            node.attr.mtime = now;
        }
        let chosen = |time| match time {
            SetTime::Now => now,
            SetTime::To(time) => time,
        };
        let attr = &mut node.attr;
        attr.mode = changes.mode.map_or(attr.mode, |mode| mode & 0o7777);
        attr.uid = changes.uid.unwrap_or(attr.uid);
        attr.gid = changes.gid.unwrap_or(attr.gid);
        attr.atime = changes.atime.map_or(attr.atime, chosen);
        attr.mtime = changes.mtime.map_or(attr.mtime, chosen);
        if changes != SetAttr::default() {
            attr.ctime = now;
            self.changed.push(Invalidation::Attributes(inode));
        }
        Ok(())
    }

    fn open(&mut self, inode: InodeNumber, open: Open) -> Result<Opened, Errno> {
        let handle = Handle(self.nodes.open(inode.0, open)?);
        Ok(Opened { handle, keep_cache: self.keep_cache, direct_io: false })
    }

    pub(super) fn open_file(
        &mut self,
        inode: InodeNumber,
        flags: OpenFlags,
        now: FileTime,
    ) -> Result<Opened, Errno> {
        match self.node_mut(inode)?.body {
            Body::File(_) => {}
            Body::Directory { .. } => return Err(Errno::EISDIR),
            Body::Symlink(_) => return Err(Errno::ELOOP),
            Body::Special => return Err(Errno::ENXIO),
        }
        if flags.has(OpenFlags::TRUNCATE) {
            self.set(inode, SetAttr { size_bytes: Some(0), ..SetAttr::default() }, now)?;
        }
        self.open(inode, Open::File(flags))
    }

    pub(super) fn open_directory(&mut self, inode: InodeNumber) -> Result<Opened, Errno> {
        let names = self.listing(inode)?;
        self.open(inode, Open::Directory(names))
    }

    fn listing(&self, inode: InodeNumber) -> Result<Listing, Errno> {
        let Body::Directory { names, cookies, .. } = &self.node(inode)?.body else {
            return Err(Errno::ENOTDIR);
        };
        let mut listing = Vec::new();
        for (name, &child) in names {
            listing.push((cookies[name], name.clone(), child, self.node(child)?.attr.kind));
        }
        listing.sort_unstable_by_key(|(cookie, ..)| *cookie);
        Ok(Arc::new(listing))
    }

    pub(super) fn opened(&self, inode: InodeNumber, handle: Handle) -> Result<&Open, Errno> {
        self.nodes.opened(inode.0, handle.0)
    }

    pub(super) fn close(&mut self, inode: InodeNumber, handle: Handle) -> Result<(), Errno> {
        self.nodes.close(inode.0, handle.0, |_, _| {}).map(drop)
    }

    pub(super) fn list(
        &mut self,
        inode: InodeNumber,
        handle: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Result<Vec<DirEntry>, Errno> {
        let Open::Directory(names) = self.opened(inode, handle)? else {
            return Err(Errno::ENOTDIR);
        };
        let mut names = names.clone();
        if cookie == 0 {
            // From its beginning a directory is listed as it is now (POSIX, `rewinddir`). A kernel keeps the listing with
            // the directory's time, which it asks for after it has opened the directory.
            names = self.listing(inode)?;
            *self.nodes.opened_mut(inode.0, handle.0)? = Open::Directory(names.clone());
        }
        let first = names.partition_point(|(own, ..)| *own <= cookie);
        let mut entries = Vec::new();
        for (cookie, name, child, kind) in &names[first..] {
            if entries.len() >= limit {
                break;
            }
            if with_entries && self.find(inode, name) != Ok(*child) {
                continue;
            }
            let entry = if with_entries { Some(self.entry(*child)?) } else { None };
            let (name, kind, inode) = (name.clone(), *kind, *child);
            entries.push(DirEntry { name, kind, inode, cookie: *cookie, entry });
        }
        Ok(entries)
    }

    pub(super) fn used_bytes(&self) -> u64 {
        let used = |node: &Node| match &node.body {
            Body::File(content) => content.used_bytes(),
            _ => 0,
        };
        self.nodes.iter().map(|(_, node)| used(node)).sum()
    }

    pub(super) fn files(&self) -> u64 {
        self.nodes.len() as u64
    }

    /// Writes into a file, within the capacity.
    pub(super) fn write(
        &mut self,
        writer: Writer,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        data: &[u8],
        now: FileTime,
    ) -> Result<u32, Errno> {
        let Open::File(flags) = *self.opened(inode, handle)? else {
            return Err(Errno::EBADF);
        };
        if !flags.writes() {
            return Err(Errno::EBADF);
        }
        let limited = self.capacity_bytes != u64::MAX;
        let room = if limited { self.capacity_bytes.saturating_sub(self.used_bytes()) } else { 0 };
        let node = self.node_mut(inode)?;
        let Body::File(content) = &mut node.body else {
            return Err(Errno::EBADF);
        };
        let at = match writer {
            Writer::AtEnd(_) => content.size_bytes(),
            Writer::At(_) | Writer::Cached(_) | Writer::Mapping => offset,
        };
        if limited && content.cost_bytes(at, data.len() as u64) > room {
            return Err(Errno::ENOSPC);
        }
        content.write(at, data)?;
        node.attr.mtime = now;
        node.attr.ctime = now;
        let bytes = at..at.saturating_add(data.len() as u64);
        self.changed.push(Invalidation::Data { inode, bytes });
        Ok(u32::try_from(data.len()).expect("a write is below 4 GiB"))
    }

    /// Makes holes or zeros, or lengthens a file. Space is not reserved, only asked for:
    /// what is written takes it.
    pub(super) fn fallocate(
        &mut self,
        (inode, handle): (InodeNumber, Handle),
        offset: u64,
        len: u64,
        mode: i32,
        now: FileTime,
    ) -> Result<(), Errno> {
        let keeps_size = mode & FALLOC_KEEP_SIZE != 0;
        match mode & !FALLOC_KEEP_SIZE {
            0 | FALLOC_ZERO_RANGE => {}
            FALLOC_PUNCH_HOLE if keeps_size => {}
            _ => return Err(Errno::EOPNOTSUPP),
        }
        match *self.opened(inode, handle)? {
            Open::File(flags) if flags.writes() => {}
            _ => return Err(Errno::EBADF),
        }
        let end = offset.checked_add(len).filter(|_| len > 0).ok_or(Errno::EINVAL)?;
        let room = self.capacity_bytes.saturating_sub(self.used_bytes());
        let limited = self.capacity_bytes != u64::MAX;
        let node = self.node_mut(inode)?;
        let Body::File(content) = &mut node.body else {
            return Err(Errno::EBADF);
        };
        let reserves = mode & FALLOC_PUNCH_HOLE == 0;
        if reserves && end > MAX_SIZE_BYTES {
            return Err(Errno::EFBIG);
        }
        if reserves && limited && content.cost_bytes(offset, len) > room {
            return Err(Errno::ENOSPC);
        }
        if mode & !FALLOC_KEEP_SIZE != 0 {
            content.punch(offset..end);
        }
        if !keeps_size && end > content.size_bytes() {
            content.resize(end)?;
        }
        node.attr.mtime = now;
        node.attr.ctime = now;
        self.changed.push(Invalidation::Data { inode, bytes: offset..end });
        Ok(())
    }

    /// That counts and links agree with the tree.
    pub(super) fn check_invariants(&self) {
        let mut links: BTreeMap<InodeNumber, u32> = BTreeMap::new();
        let mut children: BTreeMap<InodeNumber, u32> = BTreeMap::new();
        for (number, node) in self.nodes.iter() {
            let inode = InodeNumber(number);
            let Body::Directory { names, .. } = &node.body else { continue };
            for child in names.values() {
                *links.entry(*child).or_default() += 1;
                if let Body::Directory { parent, .. } = self.nodes[child.0].body {
                    assert_eq!(parent, inode, "a directory knows its parent");
                    *children.entry(inode).or_default() += 1;
                }
            }
        }
        for (number, node) in self.nodes.iter() {
            let inode = &InodeNumber(number);
            let names = links.get(inode).copied().unwrap_or(0);
            let is_root = *inode == InodeNumber::ROOT;
            let expected = match (&node.body, is_root || names > 0) {
                (Body::Directory { .. }, true) => 2 + children.get(inode).copied().unwrap_or(0),
                (Body::Directory { .. }, false) => 0,
                _ => names,
            };
            assert_eq!(node.attr.nlink, expected, "link count of {inode:?}");
            assert!(number <= self.last_inode, "{inode:?} is not given out yet");
        }
        self.nodes.check_invariants();
    }
}
