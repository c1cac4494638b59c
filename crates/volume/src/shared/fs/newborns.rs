//! Creating regular files (Pastis §3.1: what a program does to a file reaches the ring at the close).
//!
//! A file that a program creates is a *newborn*: it is in memory alone until it is closed or synced, or has
//! been open for [`MAX_AGE`]. Then its data, its inode and its name are written, in this order; the inode and the name
//! together, if they lie on the same nodes ([`super::near`]). So a small file takes one round trip, however it was
//! made, and its inode and its directory are written once. All programs of this machine see it from the beginning.
//!
//! A file that is created with `O_EXCL` gets its inode and name at once, since programs use such files as locks. One that is
//! locked gets them before, and becomes the file that has the name if another mount has made one ([`super::locks`]).
//!
//! Files of one directory that wait for their names at the same time get them in one version of the directory.
//!
//! Invariants: a newborn has a view with changes; what a program sees of its name it sees of no other
//! mount's before the close. If another mount has made the same name meanwhile, both files stay: the one that was named
//! later appears as `NAME~USER~TIME`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_key::kinds::certified::Dot;
use atoll_vfs::{Caller, Entry, Errno, FileKind, Handle, OpenFlags, Opened, check_name};
use bytes::Bytes;

use super::files::Held;
use super::names::{entries, modified, named, new_attributes};
use super::{Freshness, Shared, Version};
use crate::shared::fault::Fault;
use crate::shared::inode::{self, Contents, Inode, InodeKey, Link, Written};
use crate::shared::inodes::{Base, Together};
use crate::shared::table::Birthplace;

/// How long a file may be open without a name. A guess: logs appear while they are written.
pub(super) const MAX_AGE: Duration = Duration::from_secs(5);

/// How often a newborn is written that other programs write meanwhile, before it becomes another file.
const MAX_ROUNDS: usize = 4;

/// What had the name that was to be taken from a newborn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unlinked {
    /// A newborn, which has no name any more.
    Newborn,
    /// It has a name on the ring: perhaps not this one, which another file has.
    OnRing(InodeKey),
    /// Nothing, or another file.
    Other,
}

/// A newborn that waits for its name.
type Waiting = (u64, InodeKey, Bytes);

impl Shared {
    /// Makes and opens a file, or opens the one that has the name.
    pub(super) async fn create(
        self: &Arc<Self>,
        caller: Caller,
        (parent, name): (u64, &Bytes),
        mode: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, Opened), Fault> {
        match self.bear(caller, (parent, name), mode, flags).await {
            Err(Fault { errno: Errno::EEXIST, .. }) if !flags.has(OpenFlags::EXCLUSIVE) => {
                let entry = self.lookup(parent, name).await?;
                let number = entry.attr.inode.0;
                // The lookup is taken back if the open fails or is given up.
                let mut held = Held { shared: self, number, lookups: 1, handle: None };
                let opened = self.open(number, flags, caller.pid).await?;
                held.handle = Some(opened.handle.0);
                let attr = self.attr(number).await?;
                std::mem::forget(held);
                Ok((Entry { attr, ..entry }, opened))
            }
            made => made,
        }
    }

    /// The same; its name is on the ring before the call returns.
    pub(super) async fn create_named(
        self: &Arc<Self>,
        caller: Caller,
        (parent, name): (u64, &Bytes),
        mode: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, Opened), Fault> {
        let (entry, opened) = self.create(caller, (parent, name), mode, flags).await?;
        let number = entry.attr.inode.0;
        let held = Held { shared: self, number, lookups: 1, handle: Some(opened.handle.0) };
        let unnamed = Unnamed { shared: self, number };
        if let Err(fault) = self.name_newborn(number).await {
            // The caller hears that there is no such file.
            let taken_back = match self.unlink_newborn(parent, name).await {
                Ok(Unlinked::OnRing(key)) => self.unlink_named((parent, name), Some(key)).await,
                Ok(Unlinked::Newborn | Unlinked::Other) => Ok(()),
                Err(kept) => Err(kept),
            };
            if let Err(kept) = taken_back {
                tracing::debug!("a file that was not created may get its name: {kept:?}");
            }
            std::mem::forget(unnamed);
            return Err(fault);
        }
        std::mem::forget((unnamed, held));
        Ok((entry, opened))
    }

    /// Makes a newborn and opens it.
    async fn bear(
        &self,
        caller: Caller,
        (parent, name): (u64, &Bytes),
        mode: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, Opened), Fault> {
        check_name(name)?;
        let (directory_key, directory) = self.living_directory(parent).await?;
        self.check_free(directory_key, &directory, name)?;
        let (now, time_ms) = (self.now(), self.env.unix_ms());
        let attributes = new_attributes(&directory, caller, (FileKind::Regular, mode), now);
        // The directory's writers may write what is made in it (design §4).
        let groups = directory.block.groups();
        let number = self.number_near(directory_key, &directory, groups).await;
        let made = self.inodes.begin(groups, number, |added| {
            let written = Written { dot: added, time_ms };
            let links = BTreeSet::from([Link { added, directory: directory_key }]);
            let contents = Contents::Regular { size_bytes: 0, blocks_512: 0, data: None, written };
            Inode { attributes, links, past: None, contents }
        });
        let (key, version) = made.await?;
        let mut view = self.view(version)?;
        view.changes = 1;
        let place = Birthplace {
            directory: directory_key,
            name: name.clone(),
            at: self.env.now(),
            is_stored: false,
            was_refused: false,
        };
        let mut table = self.table();
        // Another call may have created and named it meanwhile.
        let newest = self.inodes.known(directory_key).unwrap_or(directory);
        if table.newborn(directory_key, name).is_some() || newest.entry(name)?.is_some() {
            return Err(Errno::EEXIST.into());
        }
        let number = table.hold(key, FileKind::Regular);
        table.set_view(number, view)?;
        table.place(&key, directory_key, name);
        table.bear(number, place)?;
        let handle = table.open_file(number, flags, caller.pid)?;
        let stored = table.on_view(number, |view| view.content.stored)?;
        let node = table.node_mut(number)?;
        node.in_kernel = Some(stored);
        let attr = self.attr_here(number, node).ok_or(Errno::EIO)?;
        let opened = Opened { handle: Handle(handle), keep_cache: true, direct_io: false };
        Ok((super::entry(attr), opened))
    }

    /// The newborn that has a name, counted as one lookup.
    pub(super) fn newborn_entry(&self, parent: u64, name: &[u8]) -> Result<Option<Entry>, Errno> {
        let mut table = self.table();
        let directory = table.node(parent)?.key;
        let Some(number) = table.newborn(directory, name) else { return Ok(None) };
        let node = table.node(number)?;
        let (key, kind) = (node.key, node.kind);
        let attr = self.attr_here(number, node).ok_or(Errno::EIO)?;
        table.hold(key, kind);
        Ok(Some(super::entry(attr)))
    }

    /// Brings a file to the ring, if it is a newborn.
    pub(super) async fn name_newborn(&self, number: u64) -> Result<(), Fault> {
        let is_newborn = self.table().node(number)?.birthplace.is_some();
        if is_newborn { self.publish(number).await } else { Ok(()) }
    }

    /// Gives a newborn its name, or has it become the file to which another mount has given it. The caller has the lease
    /// of the name.
    pub(super) async fn name_or_become(
        &self,
        number: u64,
        Birthplace { directory, name, .. }: &Birthplace,
    ) -> Result<(), Fault> {
        let named = match self.inodes.read(*directory, Freshness::Newest).await {
            // Naming it finds that, too.
            Err(Fault { errno: Errno::ESTALE, .. }) => None,
            above => above?.entry(name)?,
        };
        let key = self.table().node(number)?.key;
        let other =
            named.filter(|entry| entry.inode != key && entry.file_kind() == FileKind::Regular);
        let Some(other) = other else { return self.name_newborn(number).await };
        let version = match self.read_without_conflicts(other.inode).await {
            Err(Fault { errno: Errno::ESTALE, .. }) => return self.name_newborn(number).await,
            version => version?,
        };
        let turn = self.table().node(number)?.turn.clone();
        for _ in 0..MAX_ROUNDS {
            if !self.is_unwritten(number)? {
                // What was written so far is kept beside.
                self.name_newborn(number).await?;
            }
            let _turn = turn.lock().await;
            // Another program may write it meanwhile.
            if self.is_unwritten(number)? {
                let mut table = self.table();
                table.become_other(number, other.inode, self.view(version)?)?;
                table.place(&other.inode, *directory, name);
                return Ok(());
            }
        }
        Err(Errno::EAGAIN.into())
    }

    /// Whether nothing is lost if an open file becomes another one: nothing was written to it that the ring does not have.
    fn is_unwritten(&self, number: u64) -> Result<bool, Errno> {
        let mut table = self.table();
        let is_stored = table.node(number)?.birthplace.as_ref().map(|place| place.is_stored);
        table.on_view(number, |view| match is_stored {
            None => !view.has_changes(),
            Some(is_stored) => {
                !is_stored && !view.content.is_changed && view.content.size_bytes == 0
            }
        })
    }

    /// The same of the file that has a name.
    pub(super) async fn name_newborn_at(&self, parent: u64, name: &Bytes) -> Result<(), Fault> {
        let newborn = {
            let table = self.table();
            table.newborn(table.node(parent)?.key, name)
        };
        match newborn {
            Some(number) => self.name_newborn(number).await,
            None => Ok(()),
        }
    }

    /// Brings those newborns to the ring that have been open for long.
    pub(super) async fn name_old_newborns(&self) {
        let now = self.env.now();
        let old = self.table().newborns_before(now, MAX_AGE);
        for number in old {
            match self.name_newborn(number).await {
                // It may have been closed meanwhile.
                Ok(()) => self.table().reap(number),
                Err(fault) => self.note(Some(&fault)),
            }
        }
    }

    /// Takes the name of a newborn away, if one has it. Of most the ring has never heard.
    pub(super) async fn unlink_newborn(
        &self,
        parent: u64,
        name: &Bytes,
    ) -> Result<Unlinked, Fault> {
        let (directory, turn) = {
            let table = self.table();
            let directory = table.node(parent)?.key;
            let Some(number) = table.newborn(directory, name) else { return Ok(Unlinked::Other) };
            (directory, table.node(number)?.turn.clone())
        };
        let (number, key, was_refused) = {
            let _turn = turn.lock().await;
            let mut table = self.table();
            let Some(number) = table.newborn(directory, name) else { return Ok(Unlinked::Other) };
            let node = table.node(number)?;
            let (key, place) = (node.key, node.birthplace.as_ref());
            let (is_stored, was_refused) =
                place.map_or((false, false), |place| (place.is_stored, place.was_refused));
            if !is_stored {
                table.name(number);
                table.make_orphan(number)?;
                if !was_refused {
                    return Ok(Unlinked::Newborn);
                }
            }
            (number, key, !is_stored)
        };
        if !was_refused {
            // Its name may be on the ring although that was not acknowledged: it is removed as any other.
            self.publish(number).await?;
            return Ok(Unlinked::OnRing(key));
        }
        // One replica may have taken what others had no room for.
        let newest = self.inodes.read(directory, Freshness::Latest).await;
        let named = newest.ok().map(|newest| newest.entry(name)).transpose()?.flatten();
        let is_named = named.is_some_and(|entry| entry.inode == key);
        Ok(if is_named { Unlinked::OnRing(key) } else { Unlinked::Newborn })
    }

    /// Names a newborn whose inode is on the ring, and others of its directory that wait for their names.
    pub(super) async fn name_stored(&self, number: u64) -> Result<(), Fault> {
        let (directory, turn) = {
            let mut table = self.table();
            let Some(place) = &mut table.node_mut(number)?.birthplace else { return Ok(()) };
            place.is_stored = true;
            let directory = place.directory;
            let above = table.number_of(&directory).and_then(|above| table.node(above).ok());
            (directory, above.map(|above| above.turn.clone()))
        };
        let _turn = match &turn {
            Some(turn) => Some(turn.lock().await),
            None => None,
        };
        if self.table().node(number)?.birthplace.is_none() {
            return Ok(());
        }
        let waiting = self.waiting_names(&directory, None);
        let name = self.naming(&waiting);
        let added = self.inodes.update(directory, Base::Newest, name).await;
        self.note_named(waiting, added.map(drop))
    }

    /// Puts the first version of a newborn, what `edit` makes of `base`, together with its name. `None` if another
    /// newborn of its directory is being named, or its replicas refuse it: it is then put by itself.
    pub(super) async fn store_and_name(
        &self,
        number: u64,
        (key, base): (InodeKey, &Arc<Version>),
        edit: impl FnMut(&mut Inode, Dot) -> Result<(), Errno>,
    ) -> Result<Option<(Arc<Version>, Result<(), Fault>)>, Fault> {
        let (directory, turn) = {
            let table = self.table();
            let Some(place) = &table.node(number)?.birthplace else { return Ok(None) };
            let above = table.number_of(&place.directory).and_then(|above| table.node(above).ok());
            (place.directory, above.map(|above| above.turn.clone()))
        };
        let turn = turn.as_ref().map(|turn| turn.try_lock());
        if turn.as_ref().is_some_and(Option::is_none) {
            return Ok(None);
        }
        let waiting = self.waiting_names(&directory, Some(number));
        let name = self.naming(&waiting);
        let above = (directory, Base::Newest);
        match self.inodes.update_in((key, base), edit, above, name).await? {
            Together::Stored(version, named) => {
                if let Some(place) = &mut self.table().node_mut(number)?.birthplace {
                    place.is_stored = true;
                }
                Ok(Some((version, self.note_named(waiting, named))))
            }
            // The directory has been removed: what becomes of the file is found out step by step.
            Together::Neither(Fault { errno: Errno::ESTALE, .. }) | Together::Refused(_) => {
                Ok(None)
            }
            Together::Neither(fault) => {
                if let Some(place) = &mut self.table().node_mut(number)?.birthplace {
                    place.was_refused = true;
                }
                self.note_refused(directory, &fault);
                Err(fault)
            }
        }
    }

    /// The newborns of a directory that wait for their names, whose inodes are on the ring, and `one` besides.
    fn waiting_names(&self, directory: &InodeKey, one: Option<u64>) -> Vec<Waiting> {
        let table = self.table();
        let stored = table.newborns_of(directory).into_iter().filter_map(|(name, number)| {
            let node = table.node(number).ok()?;
            let is_stored = node.birthplace.as_ref()?.is_stored || Some(number) == one;
            is_stored.then_some((number, node.key, name))
        });
        stored.collect()
    }

    /// Gives newborns their names in a directory.
    fn naming(&self, waiting: &[Waiting]) -> impl FnMut(&mut Inode, Dot) -> Result<(), Errno> {
        let (now, time_ms) = (self.now(), self.env.unix_ms());
        move |inode, dot| {
            for (_, key, name) in waiting {
                let is_there = |found: &Vec<inode::Entry>| found.iter().any(|e| e.inode == *key);
                if !named(inode, name)?.as_ref().is_some_and(is_there) {
                    let entry =
                        inode::Entry::new(name.clone(), (*key, FileKind::Regular), dot, time_ms);
                    entries(inode)?.insert(entry);
                }
            }
            modified(inode, now);
            Ok(())
        }
    }

    /// Notes what became of names.
    fn note_named(&self, waiting: Vec<Waiting>, named: Result<(), Fault>) -> Result<(), Fault> {
        match named {
            Ok(()) => {
                let mut table = self.table();
                waiting.iter().for_each(|(number, ..)| table.name(*number));
                Ok(())
            }
            Err(Fault { errno: Errno::ESTALE, .. }) => {
                // Another mount has removed the directory: nothing leads to the file any more.
                let mut table = self.table();
                for (number, ..) in waiting {
                    table.name(number);
                    table.make_orphan(number)?;
                }
                Err(Errno::ENOENT.into())
            }
            Err(fault) => Err(fault),
        }
    }
}

/// A newborn whose creation is given up: it gets no name, unless its inode is on the ring already.
struct Unnamed<'a> {
    shared: &'a Shared,
    number: u64,
}

impl Drop for Unnamed<'_> {
    fn drop(&mut self) {
        let mut table = self.shared.table();
        let place = table.node(self.number).ok().and_then(|node| node.birthplace.as_ref());
        if place.is_some_and(|place| !place.is_stored) {
            table.name(self.number);
            // It is there.
            let _ = table.make_orphan(self.number);
        }
    }
}
