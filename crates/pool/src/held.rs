//! Files that somebody holds by their number: how often, and their open nodes.
//!
//! A node that is open is found without a walk, and keeps a file alive whose last name is gone. At most so many are kept as the
//! disk allows ([`Disk::max_nodes`]); the oldest go first, but never that of a file without a name.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use atoll_vfs::{FileTime, Handle, OpenFlags};

use crate::disk::{Disk, Listed};
use crate::layout::FileId;

/// A file that somebody holds.
struct HeldFile<N> {
    lookups: u64,
    opens: u64,
    node: Option<N>,
    /// Its last name is gone.
    is_nameless: bool,
    /// Length and times when it was last closed: what the kernel has cached is true if they still are.
    closed_as: Option<Contents>,
}

/// What changes with a file's bytes.
pub(crate) type Contents = (u64, FileTime, FileTime);

/// An open file or directory.
pub(crate) enum Open<D: Disk> {
    /// A file.
    File(FileId, D::File, OpenFlags),
    /// The names of a directory as they were when it was opened, or read again from its beginning.
    Directory(FileId, std::sync::Arc<Vec<Listed>>),
}

impl<D: Disk> Clone for Open<D> {
    fn clone(&self) -> Open<D> {
        match self {
            Open::File(id, file, flags) => Open::File(*id, file.clone(), *flags),
            Open::Directory(id, names) => Open::Directory(*id, names.clone()),
        }
    }
}

/// See the module.
pub(crate) struct Held<D: Disk> {
    files: BTreeMap<FileId, HeldFile<D::Node>>,
    opens: BTreeMap<Handle, Open<D>>,
    last_handle: u64,
    /// Files whose length was set, which is not durable yet.
    resized: BTreeSet<FileId>,
    /// Files with an open node, by when it was kept.
    nodes: VecDeque<FileId>,
    max_nodes: usize,
}

impl<D: Disk> Held<D> {
    pub(crate) fn new(max_nodes: usize) -> Held<D> {
        Held {
            files: BTreeMap::new(),
            opens: BTreeMap::new(),
            last_handle: 0,
            resized: BTreeSet::new(),
            nodes: VecDeque::new(),
            max_nodes,
        }
    }

    fn entry(&mut self, id: FileId) -> &mut HeldFile<D::Node> {
        self.files.entry(id).or_insert(HeldFile {
            lookups: 0,
            opens: 0,
            node: None,
            is_nameless: false,
            closed_as: None,
        })
    }

    /// Counts a lookup.
    pub(crate) fn look_up(&mut self, id: FileId) {
        self.entry(id).lookups += 1;
    }

    /// Takes lookups back.
    pub(crate) fn forget(&mut self, id: FileId, count: u64) {
        if let Some(file) = self.files.get_mut(&id) {
            file.lookups = file.lookups.saturating_sub(count);
            self.reap(id);
        }
    }

    fn reap(&mut self, id: FileId) {
        let nobody = |file: &HeldFile<_>| file.lookups == 0 && file.opens == 0;
        // An open node may be asked for again; it goes when others need its place, but a file without a name at once.
        if self
            .files
            .get(&id)
            .is_some_and(|file| nobody(file) && (file.is_nameless || file.node.is_none()))
        {
            self.files.remove(&id);
        }
    }

    /// Whether somebody holds the file.
    pub(crate) fn is_held(&self, id: FileId) -> bool {
        self.files.get(&id).is_some_and(|file| file.lookups > 0 || file.opens > 0)
    }

    /// The open node of a file.
    pub(crate) fn node(&self, id: FileId) -> Option<D::Node> {
        self.files.get(&id)?.node.clone()
    }

    /// Whether the last name of a file that is held is gone.
    pub(crate) fn is_nameless(&self, id: FileId) -> bool {
        self.files.get(&id).is_some_and(|file| file.is_nameless)
    }

    /// Keeps a file's node open.
    pub(crate) fn keep_node(&mut self, id: FileId, node: D::Node) {
        if self.entry(id).node.replace(node).is_none() {
            self.nodes.push_back(id);
        }
        let mut passes = self.nodes.len();
        while self.nodes.len() > self.max_nodes && passes > 0 {
            passes -= 1;
            let Some(oldest) = self.nodes.pop_front() else { break };
            match self.files.get_mut(&oldest) {
                Some(file) if file.is_nameless || oldest == id => self.nodes.push_back(oldest),
                Some(file) => {
                    file.node = None;
                    self.reap(oldest);
                }
                None => {}
            }
        }
    }

    /// The file's last name is gone; whoever holds it keeps it alive by its node.
    pub(crate) fn lose_name(&mut self, id: FileId) {
        if let Some(file) = self.files.get_mut(&id) {
            file.is_nameless = true;
            self.reap(id);
        }
        if !self.files.contains_key(&id) {
            self.resized.remove(&id);
        }
    }

    /// Opens a file or directory.
    pub(crate) fn open(&mut self, open: Open<D>) -> Handle {
        let (Open::File(id, ..) | Open::Directory(id, _)) = open;
        self.entry(id).opens += 1;
        self.last_handle += 1;
        let handle = Handle(self.last_handle);
        self.opens.insert(handle, open);
        handle
    }

    /// What is open under a handle.
    pub(crate) fn opened(&self, id: FileId, handle: Handle) -> Option<Open<D>> {
        let open = self.opens.get(&handle)?;
        let (Open::File(of, ..) | Open::Directory(of, _)) = open;
        (*of == id).then(|| open.clone())
    }

    /// Ends an open.
    pub(crate) fn close(&mut self, handle: Handle, contents: Option<Contents>) {
        let Some(Open::File(id, ..) | Open::Directory(id, _)) = self.opens.remove(&handle) else {
            return;
        };
        if let Some(file) = self.files.get_mut(&id) {
            file.opens = file.opens.saturating_sub(1);
            file.closed_as = contents;
            self.reap(id);
        }
    }

    /// Whether the file is as it was when it was last closed.
    pub(crate) fn is_as_closed(&self, id: FileId, contents: Contents) -> bool {
        self.files.get(&id).is_some_and(|file| file.closed_as == Some(contents))
    }

    /// Notes that a length was set.
    pub(crate) fn note_resized(&mut self, id: FileId) {
        self.resized.insert(id);
    }

    /// Whether a length was set that is not durable; the caller makes it durable now.
    pub(crate) fn take_resized(&mut self, id: FileId) -> bool {
        self.resized.remove(&id)
    }

    /// All files whose length is not durable; the caller makes everything durable now.
    pub(crate) fn take_all_resized(&mut self) -> BTreeSet<FileId> {
        std::mem::take(&mut self.resized)
    }
}
