//! What is durable of a simulated disk, and what a crash leaves of the rest.

use std::collections::BTreeSet;

use atoll_vfs::{FileKind, FileTime};
use bytes::Bytes;

use super::contents::FileContents;
use super::generator::Generator;
use super::machine::Machine;
use super::tree::{DiskLimits, DiskTree, Effect, Id, Inode, InodeBody, TreeChange};
use crate::disk::DiskResult;

/// What of the changes of names and attributes that were not synced a power loss takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loss {
    /// All after some moment, as on ext4 and XFS, whose journals are in order. What was synced later than others comes with
    /// all before it.
    Ordered,
    /// Each of them, or not, as far as the rest then still makes sense. A file that has a name keeps one: no file system that has a
    /// journal or copies on write loses the last one because the change that gave the file another one is lost. Without either (ext2) that happens.
    Arbitrary,
}

/// A change that may not be durable.
pub(super) struct LogEntry {
    change: TreeChange,
    effect: Effect,
    now: FileTime,
    /// The inode numbers that it took or may have freed.
    numbers: Vec<u64>,
}

/// The bytes of a file when it was synced, with the times that go with them.
pub(super) struct Synced {
    contents: FileContents,
    mtime: FileTime,
    ctime: FileTime,
    /// How many changes were in the log.
    at: usize,
}

/// What a change depends on, or changes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum ChangeKey {
    /// That a file exists, and under which names.
    File(Id),
    Attributes(Id),
    Name(Id, Bytes),
    /// All names of a directory.
    Names(Id),
    /// Who has an inode number.
    Number(u64),
}

impl LogEntry {
    pub(super) fn new(
        tree: &DiskTree,
        change: TreeChange,
        effect: Effect,
        now: FileTime,
    ) -> LogEntry {
        let ids = [effect.file, effect.other].into_iter().flatten();
        let numbers = ids.filter_map(|id| Some(tree.inode(id).ok()?.number)).collect();
        LogEntry { change, effect, now, numbers }
    }

    /// What it changes.
    fn changes(&self) -> Vec<ChangeKey> {
        let places = match &self.change {
            TreeChange::Make { place, .. }
            | TreeChange::Link { place, .. }
            | TreeChange::Unlink(place)
            | TreeChange::Rmdir(place) => vec![place],
            TreeChange::Rename { from, to, .. } => vec![from, to],
            TreeChange::SetMode(id, ..)
            | TreeChange::SetOwner(id, ..)
            | TreeChange::SetTimes(id, ..)
            | TreeChange::SetXattr(id, ..) => return vec![ChangeKey::Attributes(*id)],
        };
        let mut keys: Vec<ChangeKey> =
            self.numbers.iter().map(|number| ChangeKey::Number(*number)).collect();
        keys.extend(
            [self.effect.file, self.effect.other].into_iter().flatten().map(ChangeKey::File),
        );
        for (dir, name) in places {
            keys.extend([ChangeKey::Name(*dir, name.clone()), ChangeKey::Names(*dir)]);
        }
        keys
    }

    /// What must be as it was for this change to have had the same outcome.
    fn needs(&self) -> Vec<ChangeKey> {
        let mut keys = self.changes();
        for key in &mut keys {
            if let ChangeKey::Names(dir) = key {
                *key = ChangeKey::File(*dir);
            }
        }
        match self.change {
            TreeChange::Rmdir(_) => keys.extend(self.effect.file.map(ChangeKey::Names)),
            TreeChange::Rename { flags, .. } if !flags.exchange => {
                keys.extend(self.effect.other.map(ChangeKey::Names));
            }
            _ => {}
        }
        keys
    }

    /// Whether the change would take the last name from a file that has one in `live`.
    fn takes_last_name(&self, tree: &DiskTree, live: &DiskTree) -> bool {
        let place = match &self.change {
            TreeChange::Unlink(place) | TreeChange::Rmdir(place) => place,
            TreeChange::Rename { to, flags, .. } if !flags.exchange => to,
            _ => return false,
        };
        let Some(id) = tree.at(place).ok().flatten() else { return false };
        let is_last = tree
            .inode(id)
            .is_ok_and(|inode| inode.nlink == 1 || inode.kind() == FileKind::Directory);
        is_last && live.inode(id).is_ok_and(|inode| inode.nlink > 0)
    }

    /// Whether the change still means what it meant.
    fn makes_sense(&self, tree: &DiskTree) -> bool {
        let stands = |place, file: Option<Id>| tree.at(place).ok().flatten() == file;
        match &self.change {
            TreeChange::Make { inode, .. } => tree.is_free(inode.number),
            TreeChange::Unlink(place) | TreeChange::Rmdir(place) => stands(place, self.effect.file),
            TreeChange::Rename { from, to, flags } => {
                // Another file there would get a name that it never had.
                stands(from, self.effect.file) && (!flags.exchange || stands(to, self.effect.other))
            }
            TreeChange::Link { id, .. } => tree.inode(*id).is_ok_and(|inode| inode.nlink > 0),
            _ => true,
        }
    }
}

impl Machine {
    /// Makes a file durable, and the names by which it is reached.
    pub(super) fn sync_file(&mut self, id: Id, data_only: bool) -> DiskResult<()> {
        let contents = self.contents(id)?.clone();
        let inode = self.live.inode(id)?;
        let (mtime, ctime) = (inode.mtime, inode.ctime);
        let synced = Synced { contents, mtime, ctime, at: self.log.len() };
        self.synced.insert(id, synced);
        let mut needed = BTreeSet::from([ChangeKey::File(id)]);
        if !data_only {
            needed.insert(ChangeKey::Attributes(id));
        }
        for (at, entry) in self.log.iter().enumerate().rev() {
            if self.required.contains(&at) || entry.changes().iter().any(|key| needed.contains(key))
            {
                needed.extend(entry.needs());
                self.required.insert(at);
            }
        }
        Ok(())
    }

    /// What a power loss leaves.
    pub(super) fn left(&self, loss: Loss, mut dice: Generator) -> DiskTree {
        let mut left = self.durable.clone();
        left.limits = DiskLimits { blocks: u64::MAX, inodes: u64::MAX, links: u32::MAX };
        let least = self.required.last().map_or(0, |last| last + 1);
        let prefix = least + dice.below((self.log.len() - least) as u64 + 1) as usize;
        for (at, entry) in self.log.iter().enumerate() {
            self.put_synced(&mut left, at);
            let is_kept = match loss {
                Loss::Ordered => at < prefix,
                Loss::Arbitrary => self.required.contains(&at) || dice.coin(),
            };
            let is_possible = entry.makes_sense(&left)
                && (self.required.contains(&at) || !entry.takes_last_name(&left, &self.live));
            if is_kept && is_possible {
                // A change that cannot be made on what is left is lost too.
                let done = left.apply(&entry.change, entry.now);
                for id in done.ok().flatten().iter().flat_map(|effect| [effect.file, effect.other])
                {
                    id.into_iter().for_each(|id| left.remove_if_nameless(id));
                }
            }
        }
        self.put_synced(&mut left, self.log.len());
        left.remove_nameless(|_| false);
        let ids: Vec<Id> = left.ids().collect();
        for id in ids {
            self.tear(&mut left, id, &mut dice);
        }
        left.limits = self.live.limits;
        left
    }

    /// Puts in what was synced when the log had the length `at`.
    fn put_synced(&self, left: &mut DiskTree, at: usize) {
        for (id, synced) in self.synced.iter().filter(|(_, synced)| synced.at == at) {
            // One that had no names any more is gone.
            let _ = left.edit(*id, |inode| {
                inode.body = InodeBody::Regular(synced.contents.clone());
                (inode.mtime, inode.ctime) = (synced.mtime, synced.ctime);
            });
        }
    }

    /// Decides what is left of the bytes of a file.
    fn tear(&self, left: &mut DiskTree, id: Id, dice: &mut Generator) {
        let Some(InodeBody::Regular(new)) = self.live.inode(id).ok().map(|inode| &inode.body)
        else {
            return;
        };
        let torn = |inode: &mut Inode| {
            if let InodeBody::Regular(contents) = &mut inode.body {
                *contents = contents.torn(new, dice);
            }
        };
        left.edit(id, torn).expect("a file that is left");
    }
}
