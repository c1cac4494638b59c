//! What a flush has to write, and what it comes to.
//!
//! Between [`Tree::begin_flush`] and its end, the changes that are being written lie in layers of
//! their own, below changes made meanwhile. If the flush fails, they are joined again.
//!
//! The contents of some files may be *left out*: those stay changed, and their entries are written with
//! what is stored of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use atoll_key::BlockHash;
use bytes::Bytes;

use super::names::{Names, Slots};
use super::{Body, Node, NodeXattrs, Place, ROOT, Totals, Tree, Xattrs};
use crate::blocks::content::Stored;
use crate::blocks::edit_file::NewData;
use crate::format::inode::Shape;
use crate::format::{self, DirectoryEntry, DirectoryRef, Owner};

/// A file whose contents are to be written.
#[derive(Debug)]
pub(in crate::owned::write) struct FilePlan {
    pub(in crate::owned::write) inode: u64,
    pub(in crate::owned::write) stored: Stored,
    /// The stored file is zeros from here on.
    pub(in crate::owned::write) cut: u64,
    /// What it becomes; `None` if it becomes empty.
    pub(in crate::owned::write) shape: Option<Shape>,
    pub(in crate::owned::write) new: BTreeMap<u64, NewData>,
}

/// An entry to be written. If the flush writes contents or attributes of the file, those take the
/// place of the entry's.
#[derive(Debug)]
pub(in crate::owned::write) struct Template {
    /// Which file; `None` if the entry only refers to the table of links.
    pub(in crate::owned::write) inode: Option<u64>,
    pub(in crate::owned::write) entry: DirectoryEntry,
}

/// A directory whose names are to be written.
#[derive(Debug)]
pub(in crate::owned::write) struct DirectoryPlan {
    pub(in crate::owned::write) inode: u64,
    pub(in crate::owned::write) stored: DirectoryRef,
    pub(in crate::owned::write) changes: Vec<(Bytes, Option<Template>)>,
}

/// All that is to be written.
#[derive(Debug)]
pub(in crate::owned::write) struct Plan {
    pub(in crate::owned::write) files: Vec<FilePlan>,
    pub(in crate::owned::write) xattrs: Vec<(u64, Arc<Xattrs>)>,
    /// The table of links, whose files are in no directory.
    pub(in crate::owned::write) links: DirectoryPlan,
    /// Those below others first; the root is the last, if it is written.
    pub(in crate::owned::write) directories: Vec<DirectoryPlan>,
    /// The root directory as an entry.
    pub(in crate::owned::write) root: Template,
    pub(in crate::owned::write) totals: Totals,
    pub(in crate::owned::write) next_inode: u64,
    /// Files whose changed contents are not written.
    pub(in crate::owned::write) left_out: BTreeSet<u64>,
    /// Whether anything has changed since the last flush, beside what that one has left out.
    pub(in crate::owned::write) is_news: bool,
}

impl Plan {
    /// The entries of files that are left out: the stored directory, and the entry to be written.
    pub(in crate::owned::write) fn entries_left_out(
        &self,
    ) -> impl Iterator<Item = (u64, DirectoryRef, u64, &DirectoryEntry)> {
        self.directories.iter().flat_map(|directory| {
            directory.changes.iter().filter_map(|(_, template)| {
                let Template { inode, entry } = template.as_ref()?;
                let inode = match (inode, &entry.content) {
                    (None, format::Content::Linked { inode, .. }) => *inode,
                    (inode, _) => (*inode)?,
                };
                let is_left_out = self.left_out.contains(&inode);
                is_left_out.then_some((directory.inode, directory.stored, inode, entry))
            })
        })
    }
}

/// What was written.
#[derive(Debug, Default)]
pub(in crate::owned::write) struct Flushed {
    pub(in crate::owned::write) files: BTreeMap<u64, Stored>,
    pub(in crate::owned::write) xattrs: BTreeMap<u64, Option<BlockHash>>,
    pub(in crate::owned::write) directories: BTreeMap<u64, DirectoryRef>,
    pub(in crate::owned::write) links: DirectoryRef,
    pub(in crate::owned::write) left_out: BTreeSet<u64>,
}

impl Flushed {
    /// The entry as it is to be written.
    pub(in crate::owned::write) fn complete(&self, template: Template) -> DirectoryEntry {
        let Template { inode, mut entry } = template;
        let Some(inode) = inode else { return entry };
        if let Some(file) = self.files.get(&inode) {
            entry.content = regular(*file);
        }
        if let Some(directory) = self.directories.get(&inode) {
            entry.content = format::Content::Directory(*directory);
        }
        if let Some(xattrs) = self.xattrs.get(&inode) {
            entry.xattrs = *xattrs;
        }
        entry
    }
}

fn regular(Stored { inode, size_bytes, blocks_512 }: Stored) -> format::Content {
    format::Content::Regular { size_bytes, blocks_512, inode }
}

impl Tree {
    /// Whether there is anything to flush.
    pub(in crate::owned::write) fn is_changed(&self) -> bool {
        self.changes > 0
    }

    /// Hands the changes over to a flush, without the contents of the files in `left_out`. `None` if
    /// there are no changes, unless the flush is to try again what former ones have left out.
    pub(in crate::owned::write) fn begin_flush(
        &mut self,
        left_out: &BTreeSet<u64>,
        tries_again: bool,
    ) -> Option<Plan> {
        let is_news = self.is_changed();
        if !is_news && !tries_again {
            return None;
        }
        let order = self.changed_directories();
        self.restart_journal();
        self.changes = 0;
        self.flushing_bytes = self.held_bytes;
        self.is_root_changed = false;
        let mut plan = Plan {
            files: Vec::new(),
            xattrs: Vec::new(),
            links: DirectoryPlan { inode: 0, stored: self.links.stored, changes: Vec::new() },
            directories: Vec::new(),
            root: self.template(ROOT, &Bytes::new()),
            totals: self.totals,
            next_inode: self.next_inode,
            left_out: left_out.clone(),
            is_news,
        };
        let mut files = BTreeSet::new();
        for inode in order {
            let names = self.names_mut(inode);
            let stored = names.stored;
            let slots = begin(&mut names.changed, &mut names.flushing);
            let changes = self.templates(&slots, false, &mut files);
            plan.directories.push(DirectoryPlan { inode, stored, changes });
        }
        let slots = begin(&mut self.links.changed, &mut self.links.flushing);
        plan.links.changes = self.templates(&slots, true, &mut files);
        self.unflushed_names = self.count_unflushed_names();
        files.insert(ROOT);
        // Files that are open and have no name would fill the memory; what is written of them ends
        // with its lease.
        let is_nameless = |node: &Node| node.place == Place::Removed;
        files.extend(self.nodes.iter().filter(|(_, n)| is_nameless(n)).map(|(inode, _)| inode));
        for inode in files {
            self.plan_node(inode, &mut plan);
        }
        Some(plan)
    }

    /// The directories with changed names and all above them, those below others first.
    fn changed_directories(&mut self) -> Vec<u64> {
        let changed = |node: &Node| match &node.body {
            Body::Directory(names) => !names.changed.is_empty() && node.links > 0,
            _ => false,
        };
        let mut waiting: Vec<u64> =
            self.nodes.iter().filter(|(_, node)| changed(node)).map(|(inode, _)| inode).collect();
        let mut found = BTreeSet::new();
        while let Some(inode) = waiting.pop() {
            if !found.insert(inode) {
                continue;
            }
            if let Place::Named(parent, _) = &self.nodes[inode].place {
                waiting.push(*parent);
                self.touch(inode);
            }
        }
        let mut order: Vec<(usize, u64)> =
            found.into_iter().map(|inode| (self.depth(inode), inode)).collect();
        order.sort_by_key(|(depth, inode)| (std::cmp::Reverse(*depth), *inode));
        order.into_iter().map(|(_, inode)| inode).collect()
    }

    fn depth(&self, mut inode: u64) -> usize {
        let mut depth = 0;
        while let Place::Named(parent, _) = &self.nodes[inode].place {
            inode = *parent;
            depth += 1;
        }
        depth
    }

    fn templates(
        &self,
        slots: &Slots,
        is_links: bool,
        files: &mut BTreeSet<u64>,
    ) -> Vec<(Bytes, Option<Template>)> {
        let mut changes = Vec::with_capacity(slots.len());
        for (name, slot) in slots {
            let template = slot.map(|inode| {
                let node = &self.nodes[inode];
                if node.place == Place::Linked && !is_links {
                    return Template { inode: None, entry: link_entry(name, inode, node) };
                }
                files.insert(inode);
                self.template(inode, name)
            });
            changes.push((name.clone(), template));
        }
        changes
    }

    /// The entry of a file under `name`, with what of it is stored.
    fn template(&self, inode: u64, name: &Bytes) -> Template {
        let node = &self.nodes[inode];
        let content = match &node.body {
            Body::File(content) => regular(content.stored),
            Body::Directory(names) => format::Content::Directory(names.stored),
            Body::Symlink(target) => format::Content::Symlink(target.clone()),
            Body::Special(kind, rdev) => format::Content::Special { kind: *kind, rdev: *rdev },
        };
        let xattrs = match node.xattrs {
            NodeXattrs::Stored(hash) => hash,
            NodeXattrs::Changed(_) => None,
        };
        let entry = DirectoryEntry {
            name: name.clone(),
            mode: node.mode,
            mtime: node.mtime,
            content,
            xattrs,
            owner: Some(node.owner(inode)),
        };
        Template { inode: Some(inode), entry }
    }

    fn plan_node(&mut self, inode: u64, plan: &mut Plan) {
        let node = self.nodes.get_mut(inode).expect("a change refers to it");
        if let NodeXattrs::Changed(xattrs) = &node.xattrs {
            plan.xattrs.push((inode, xattrs.clone()));
        }
        if let Body::File(content) = &mut node.body
            && content.is_changed
            && plan.left_out.contains(&inode)
        {
            if node.links > 0 {
                let others = plan.totals.bytes.saturating_sub(content.size_bytes);
                plan.totals.bytes = others.saturating_add(content.stored.size_bytes);
            }
        } else if let Body::File(content) = &mut node.body
            && content.is_changed
        {
            content.begin_flush();
            plan.files.push(FilePlan {
                inode,
                stored: content.stored,
                cut: content.flushing_cut,
                shape: content.shape(),
                new: content.flushing.clone(),
            });
        }
    }

    /// What was planned is stored; `planned` are the attributes that were written.
    pub(in crate::owned::write) fn end_flush(
        &mut self,
        flushed: &Flushed,
        planned: &[(u64, Arc<Xattrs>)],
    ) {
        self.flushing_bytes = 0;
        for (inode, stored) in &flushed.files {
            // A file that was removed meanwhile may have left the table.
            let _ = self.change_content(*inode, |content| {
                content.end_flush(*stored);
                Ok(())
            });
        }
        for (inode, xattrs) in planned {
            if let Ok(node) = self.nodes.get_mut(*inode)
                && let NodeXattrs::Changed(now) = &node.xattrs
                && Arc::ptr_eq(now, xattrs)
            {
                self.held_bytes -= node.xattrs.held_bytes();
                node.xattrs = NodeXattrs::Stored(flushed.xattrs.get(inode).copied().flatten());
            }
        }
        self.links.stored = flushed.links;
        let done = end(&mut self.links, &flushed.left_out);
        done.into_iter().for_each(|inode| self.unrefer(inode));
        for (inode, stored) in &flushed.directories {
            let Ok(node) = self.nodes.get_mut(*inode) else { continue };
            let Body::Directory(names) = &mut node.body else { continue };
            names.stored = *stored;
            let done = end(names, &flushed.left_out);
            done.into_iter().for_each(|inode| self.unrefer(inode));
            self.reap(*inode);
        }
        self.unflushed_names = self.count_unflushed_names();
    }

    /// Whether a file's contents differ from what is stored.
    pub(in crate::owned::write) fn has_changed_content(&self, inode: u64) -> bool {
        match self.nodes.get(inode).map(|node| &node.body) {
            Ok(Body::File(content)) => content.is_changed,
            _ => false,
        }
    }

    /// Whether a file has a name.
    pub(in crate::owned::write) fn is_named(&self, inode: u64) -> bool {
        self.nodes.get(inode).is_ok_and(|node| node.links > 0)
    }

    /// Whether `entry`, stored in directory `parent`, is of the file `inode`.
    pub(in crate::owned::write) fn is_entry_of(
        &self,
        inode: u64,
        parent: u64,
        entry: &DirectoryEntry,
    ) -> bool {
        match entry.content {
            format::Content::Linked { inode: linked, .. } => linked == inode,
            _ => self.number_of(parent, entry) == inode,
        }
    }

    /// Nothing was stored: all is to be flushed again, if it `is_news` to the ring.
    pub(in crate::owned::write) fn undo_flush(&mut self, is_news: bool) {
        self.changes += u64::from(is_news);
        self.flushing_bytes = 0;
        self.is_root_changed = true;
        let mut dropped = undo(&mut self.links.changed, &mut self.links.flushing);
        for (_, node) in self.nodes.iter_mut() {
            match &mut node.body {
                Body::Directory(names) => {
                    dropped.extend(undo(&mut names.changed, &mut names.flushing));
                }
                Body::File(content) => {
                    let held = content.held_bytes;
                    content.undo_flush();
                    self.held_bytes = self.held_bytes - held + content.held_bytes;
                }
                _ => {}
            }
        }
        self.unflushed_names = self.count_unflushed_names();
        dropped.into_iter().for_each(|inode| self.unrefer(inode));
        // Directories that were removed while their names were written.
        let removed = self.nodes.iter().filter(|(_, node)| node.place == Place::Removed);
        let removed: Vec<u64> = removed.map(|(inode, _)| inode).collect();
        removed.into_iter().for_each(|inode| self.reap(inode));
    }
}

fn begin(changed: &mut Slots, flushing: &mut Slots) -> Slots {
    assert!(flushing.is_empty(), "one flush at a time");
    *flushing = std::mem::take(changed);
    flushing.clone()
}

/// The names are stored, but those of files that were left out, which are to be written again.
/// Returns the files that a name does not refer to any more.
fn end(names: &mut Names, left_out: &BTreeSet<u64>) -> Vec<u64> {
    let flushing = std::mem::take(&mut names.flushing);
    let is_left_out = |slot: &Option<u64>| slot.is_some_and(|inode| left_out.contains(&inode));
    let (mut again, done): (Slots, Slots) =
        flushing.into_iter().partition(|(_, slot)| is_left_out(slot));
    let mut unreferred = undo(&mut names.changed, &mut again);
    unreferred.extend(done.into_values().flatten());
    unreferred
}

/// Joins the layers; returns the files that a later change has made a name no longer mean.
fn undo(changed: &mut Slots, flushing: &mut Slots) -> Vec<u64> {
    let mut dropped = Vec::new();
    for (name, slot) in std::mem::take(flushing) {
        match changed.entry(name) {
            std::collections::btree_map::Entry::Vacant(free) => {
                free.insert(slot);
            }
            std::collections::btree_map::Entry::Occupied(_) => dropped.extend(slot),
        }
    }
    dropped
}

/// The entry of one of several names.
fn link_entry(name: &Bytes, inode: u64, node: &Node) -> DirectoryEntry {
    DirectoryEntry {
        name: name.clone(),
        mode: 0,
        mtime: Default::default(),
        content: format::Content::Linked { kind: node.kind(), inode },
        xattrs: None,
        owner: None::<Owner>,
    }
}
