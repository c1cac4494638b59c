//! Files that somebody holds by their number, what is open, and open nodes.
//!
//! A node that is open is found without a walk, and keeps a file alive whose last name is gone. At most so many are kept as the
//! disk allows ([`Disk::max_nodes`]); the oldest go first, but never that of a file without a name.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};

use atoll_vfs::{Errno, FileTime, Handle, InodeTable, OpenFlags, TableInode};

use crate::disk::{Disk, Listed};
use crate::layout::FileId;

/// A file that somebody holds, or whose node is open.
struct HeldFile<N> {
    node: Option<N>,
    /// Its last name is gone.
    is_nameless: bool,
    /// Length and times when it was last closed: what the kernel has cached is true if they still are.
    closed_as: Option<ContentsStamp>,
    /// A directory's names as somebody has them open, and as of when.
    listing: Option<(ContentsStamp, Weak<Vec<Listed>>)>,
}

impl<N> TableInode for HeldFile<N> {
    /// An open node may be asked for again, and goes when others need its place; but that of a file without a name at once.
    fn is_needed(&self) -> bool {
        self.node.is_some() && !self.is_nameless
    }
}

/// What changes with a file's bytes.
pub(crate) type ContentsStamp = (u64, FileTime, FileTime);

/// An open file or directory.
pub(crate) enum OpenInPool<D: Disk> {
    /// A file.
    File(D::File, OpenFlags),
    /// The names of a directory as they were when it was opened.
    Directory(Arc<Vec<Listed>>),
}

impl<D: Disk> Clone for OpenInPool<D> {
    fn clone(&self) -> OpenInPool<D> {
        match self {
            OpenInPool::File(file, flags) => OpenInPool::File(file.clone(), *flags),
            OpenInPool::Directory(names) => OpenInPool::Directory(names.clone()),
        }
    }
}

/// See the module.
pub(crate) struct HeldFiles<D: Disk> {
    table: InodeTable<HeldFile<D::Node>, OpenInPool<D>>,
    /// Files whose length was set, which is not durable yet, and when.
    resized: BTreeMap<FileId, u64>,
    resizes: u64,
    /// Files with an open node, by when it was kept; and some whose node is gone.
    nodes: VecDeque<FileId>,
    max_nodes: usize,
}

impl<D: Disk> HeldFiles<D> {
    pub(crate) fn new(max_nodes: usize) -> HeldFiles<D> {
        HeldFiles {
            table: InodeTable::without_root(1),
            resized: BTreeMap::new(),
            resizes: 0,
            nodes: VecDeque::new(),
            max_nodes,
        }
    }

    fn enter(&mut self, id: FileId) {
        if !self.table.contains(id.0) {
            let file = HeldFile { node: None, is_nameless: false, closed_as: None, listing: None };
            self.table.insert(id.0, None, file);
        }
    }

    /// Counts a lookup.
    pub(crate) fn look_up(&mut self, id: FileId) {
        self.enter(id);
        self.table.look_up(id.0);
    }

    /// Takes lookups back.
    pub(crate) fn forget(&mut self, id: FileId, count: u64) {
        self.table.forget(id.0, count, |_, _| ());
    }

    /// Whether somebody holds the file.
    pub(crate) fn is_held(&self, id: FileId) -> bool {
        self.table.is_held(id.0)
    }

    /// The open node of a file.
    pub(crate) fn node(&self, id: FileId) -> Option<D::Node> {
        self.table.get(id.0).ok()?.node.clone()
    }

    /// Whether the last name of a file that is held is gone.
    pub(crate) fn is_nameless(&self, id: FileId) -> bool {
        self.table.get(id.0).is_ok_and(|file| file.is_nameless)
    }

    /// Keeps a file's node open.
    pub(crate) fn keep_node(&mut self, id: FileId, node: D::Node) {
        self.enter(id);
        if let Ok(file) = self.table.get_mut(id.0)
            && file.node.replace(node).is_none()
        {
            self.nodes.push_back(id);
        }
        let mut passes = self.nodes.len();
        while self.nodes.len() > self.max_nodes && passes > 0 {
            passes -= 1;
            let Some(oldest) = self.nodes.pop_front() else { break };
            match self.table.get_mut(oldest.0) {
                Ok(file) if file.is_nameless || oldest == id => self.nodes.push_back(oldest),
                Ok(file) => {
                    file.node = None;
                    self.table.reap(oldest.0, |_, _| ());
                }
                Err(_) => {}
            }
        }
    }

    /// Lets go of a node that leads to nothing any more.
    pub(crate) fn drop_node(&mut self, id: FileId) {
        if let Ok(file) = self.table.get_mut(id.0) {
            file.node = None;
            self.table.reap(id.0, |_, _| ());
        }
    }

    /// The file's last name is gone; whoever holds it keeps it alive by its node.
    pub(crate) fn lose_name(&mut self, id: FileId) {
        if let Ok(file) = self.table.get_mut(id.0) {
            file.is_nameless = true;
            self.table.reap(id.0, |_, _| ());
        }
        if !self.table.contains(id.0) {
            self.resized.remove(&id);
        }
    }

    /// Opens a file or directory.
    pub(crate) fn open(&mut self, id: FileId, open: OpenInPool<D>) -> Result<Handle, Errno> {
        self.enter(id);
        self.table.open(id.0, open).map(Handle)
    }

    /// What is open under a handle; [`Errno::EBADF`] if it is none of this file.
    pub(crate) fn opened(&self, id: FileId, handle: Handle) -> Result<OpenInPool<D>, Errno> {
        self.table.opened(id.0, handle.0).cloned()
    }

    /// Whether somebody has the file open.
    pub(crate) fn is_open(&self, id: FileId) -> bool {
        self.table.open_count(id.0) > 0
    }

    /// Ends an open.
    pub(crate) fn close(
        &mut self,
        id: FileId,
        handle: Handle,
        contents: Option<ContentsStamp>,
    ) -> Result<(), Errno> {
        if let Ok(file) = self.table.get_mut(id.0) {
            file.closed_as = contents;
        }
        self.table.close(id.0, handle.0, |_, _| ()).map(|_| ())
    }

    /// Whether the file is as it was when it was last closed.
    pub(crate) fn is_as_closed(&self, id: FileId, contents: ContentsStamp) -> bool {
        self.table.get(id.0).is_ok_and(|file| file.closed_as == Some(contents))
    }

    /// The names of a directory, if somebody has them open and it has not changed since.
    pub(crate) fn listing(&self, id: FileId, as_of: ContentsStamp) -> Option<Arc<Vec<Listed>>> {
        let (then, names) = self.table.get(id.0).ok()?.listing.as_ref()?;
        names.upgrade().filter(|_| *then == as_of)
    }

    /// Keeps the names of a directory for as long as somebody has them open.
    pub(crate) fn keep_listing(
        &mut self,
        id: FileId,
        as_of: ContentsStamp,
        names: &Arc<Vec<Listed>>,
    ) {
        if let Ok(file) = self.table.get_mut(id.0) {
            file.listing = Some((as_of, Arc::downgrade(names)));
        }
    }

    /// A directory's names change: clocks are too coarse to tell.
    pub(crate) fn forget_listing(&mut self, id: FileId) {
        if let Ok(file) = self.table.get_mut(id.0) {
            file.listing = None;
        }
    }

    /// Notes that a length is set.
    pub(crate) fn note_resized(&mut self, id: FileId) {
        self.resizes += 1;
        self.resized.insert(id, self.resizes);
    }

    /// When a length was set last that is not durable.
    pub(crate) fn resized(&self, id: FileId) -> Option<u64> {
        self.resized.get(&id).copied()
    }

    /// All of them.
    pub(crate) fn all_resized(&self) -> BTreeMap<FileId, u64> {
        self.resized.clone()
    }

    /// Notes that a length is durable, unless it was set again since.
    pub(crate) fn end_resized(&mut self, id: FileId, was: Option<u64>) {
        if was.is_some() && self.resized.get(&id).copied() == was {
            self.resized.remove(&id);
        }
    }
}
