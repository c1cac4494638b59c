//! What becomes of a directory that has lost a name, and of the inode whose name was taken away.
//!
//! A name that a program removes is gone here at once, and on the ring a moment later: a program that removes many
//! waits for none of them. `fsync` of a directory and `sync` wait for the ring.
//!
//! An inode that loses its last name is removed after the call has returned, unless it is open here: nobody finds
//! it any more. A crash in between leaves an inode that nothing names; it ends with its lease.
//!
//! A file that is locked here loses its inode when the lock is given up ([`locks`](super::locks)), with all that was written until
//! then. The removal then refers to the inode as it was, kept for a day as a past version, so that the next holder of the
//! lock who has the file open reads its last contents.
//!
//! A removal counts for what its program was shown, and else for what was written before the call ([`Seen`]). Contents that another mount
//! has written after it, while the ring did not know of it, stay beside the name ([`lost`](super::lost)); so do those that were
//! written before, if the ring was out of reach at the call and they were not known here, and those that stood beside what was
//! shown ([`conflicts`](super::conflicts)). Clocks of mounts that differ can keep what was removed, or cover what was written within
//! that difference.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{Instant, sleep};
use atoll_vfs::{Errno, FileKind};
use bytes::Bytes;
use futures_util::future::join_all;

use super::conflicts::{Change, Seen};
use super::lost::Path;
use super::names::{entries, names_of};
use super::{Freshness, Shared, Version};
use crate::shared::fault::Fault;
use crate::shared::inode::{self, Contents, Inode, InodeKey, Link};
use crate::shared::inodes::Base;

/// Inodes that are removed at once.
const REMOVALS_AT_ONCE: usize = 32;
/// Inodes that wait to be removed; a call that finds so many removes its own one before it returns. A guess: what a
/// ring removes in some seconds.
const MAX_WAITING: usize = 4_096;
/// How often a removal is tried of a file that others write meanwhile.
const MAX_ROUNDS: usize = 8;

/// How often it is looked whether inodes have been removed that are waited for. A guess: below a round trip.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How long the contents of a file can be read that was removed while it was locked. A guess: programs that have it open look
/// at it when they get the lock, and open it anew.
const KEPT_FOR_HOLDERS_SECS: u64 = 24 * 3600;

/// Inodes that have lost a name and have to hear of it.
#[derive(Default)]
pub(super) struct Removals {
    waiting: Mutex<VecDeque<Removal>>,
    /// Those that wait and those that are being removed.
    going: Mutex<BTreeSet<InodeKey>>,
    /// Held by the task that removes them.
    turn: futures_util::lock::Mutex<()>,
}

/// A name, and the directory that it is in.
pub(super) type Place = (InodeKey, Bytes);

/// An inode that has lost names of a directory, or a link.
pub(super) struct Removal {
    pub(super) key: InodeKey,
    place: Place,
    lost: Lost,
    pub(super) seen: Seen,
}

/// What an inode has lost.
#[derive(Clone, Copy)]
pub(super) enum Lost {
    /// So many names.
    Names(usize),
    /// The link of a name that was not made.
    Link(Link),
}

impl Lost {
    /// The links that go, if `directory` has `left` names of the inode. A link more than those and what was lost may be of a
    /// name which is just being made.
    fn links(&self, links: &BTreeSet<Link>, directory: InodeKey, left: usize) -> Vec<Link> {
        let here = links.iter().filter(|link| link.directory == directory).copied();
        let here: Vec<Link> = here.collect();
        let surplus = here.len().saturating_sub(left);
        match self {
            Lost::Names(count) => here.into_iter().take(surplus.min(*count)).collect(),
            Lost::Link(lost) => here.into_iter().filter(|one| one == lost).take(surplus).collect(),
        }
    }
}

/// A link for a name that is about to be made. Unless it is kept it goes again, also if the call is given up: at the
/// next look at what waits to be removed.
pub(super) struct NewLink<'a> {
    shared: &'a Shared,
    key: InodeKey,
    place: Place,
    link: Option<Link>,
}

impl NewLink<'_> {
    /// The name is there.
    pub(super) fn keep(mut self) {
        self.link = None;
    }

    /// The name is not there.
    pub(super) async fn undo(mut self) {
        if let Some(link) = self.link {
            self.shared.drop_links(self.key, self.place.clone(), Lost::Link(link)).await;
            self.link = None;
        }
    }
}

impl Drop for NewLink<'_> {
    fn drop(&mut self) {
        if let Some(link) = self.link.take() {
            let (key, seen) = (self.key, self.shared.seen(self.key));
            let removal = Removal { key, place: self.place.clone(), lost: Lost::Link(link), seen };
            self.shared.wait_to_be_removed(removal);
        }
    }
}

impl Removals {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<Removal>> {
        self.waiting.lock().expect("no holder of this lock panics")
    }
}

impl Shared {
    /// As [`Shared::drop_links`] of so many names, after the call if nobody can see the difference. `seen` is what this
    /// mount knew when the program asked for it.
    pub(super) async fn drop_names_soon(
        self: &Arc<Self>,
        key: InodeKey,
        place: Place,
        lost_names: usize,
        seen: Seen,
    ) {
        let known = self.inodes.known(key).filter(|known| known.inode().links.len() <= 1);
        let mut removal = Removal { key, place, lost: Lost::Names(lost_names), seen };
        if known.is_some() {
            match self.remove_with_lock(removal) {
                None => return,
                Some(unlocked) => removal = unlocked,
            }
        }
        let is_shown_gone = known.is_some_and(|known| self.show_gone(key, known));
        // Whether others have given it another name is to be seen when the ring is within reach.
        let waits = is_shown_gone || self.spool.is_offline();
        if !waits || self.removals.waiting().len() >= MAX_WAITING {
            // First the name, then the link.
            if let Err(fault) = self.inodes.put_behind(removal.place.0).await {
                self.note(Some(&fault));
            }
            return self.remove(removal).await;
        }
        self.wait_to_be_removed(removal);
        let shared = self.clone();
        self.env.spawn(Box::pin(async move {
            // Whoever has the turn sees this one too, or the next retry does.
            if let Some(_turn) = shared.removals.turn.try_lock() {
                shared.remove_waiting().await;
            }
        }));
    }

    /// Removes an inode with the others that wait for it.
    pub(super) fn wait_to_be_removed(&self, removal: Removal) {
        if matches!(removal.lost, Lost::Names(_)) {
            self.going().insert(removal.key);
        }
        self.removals.waiting().push_back(removal);
    }

    /// Shows a file without a name from now on; whether that is all that this mount has to do at once: it is not
    /// open.
    fn show_gone(&self, key: InodeKey, known: Arc<Version>) -> bool {
        let mut table = self.table();
        let Some(number) = table.number_of(&key) else { return true };
        let is_open = table.opens(number) > 0;
        let Ok(node) = table.node_mut(number) else { return true };
        if is_open || node.view.is_some() {
            return false;
        }
        node.orphan = Some(known);
        true
    }

    fn path_to(&self, (directory, name): &Place) -> Path {
        self.table().path_to(*directory, name.clone())
    }

    fn going(&self) -> MutexGuard<'_, BTreeSet<InodeKey>> {
        self.removals.going.lock().expect("no holder of this lock panics")
    }

    /// Inodes that wait to be removed, or are being removed.
    pub(super) fn removals_under_way(&self) -> usize {
        self.going().len()
    }

    /// Whether a file has lost its last name here and the kernel does not hold it.
    pub(super) fn is_gone(&self, key: InodeKey) -> bool {
        self.table().number_of(&key).is_none() && self.going().contains(&key)
    }

    /// A file has a name after all.
    pub(super) fn show_named(&self, key: InodeKey) {
        let mut table = self.table();
        let node = table.number_of(&key).and_then(|number| table.node_mut(number).ok());
        node.into_iter().for_each(|node| (node.orphan, node.is_nameless) = (None, false));
    }

    /// The same of one whose name was found, if no program here has it open as it was when its last name went: another
    /// mount has named it since.
    pub(super) fn show_named_unused(&self, key: InodeKey) {
        let mut table = self.table();
        let unopened = table.number_of(&key).filter(|number| table.opens(*number) == 0);
        let node = unopened.and_then(|number| table.node_mut(number).ok());
        let unused = node.filter(|node| node.view.is_none());
        unused.into_iter().for_each(|node| node.orphan = None);
    }

    /// Has the ring hear that a directory has lost names.
    pub(super) fn put_removals_soon(self: &Arc<Self>, directory: InodeKey) {
        // One of its names may be a lock: what was removed elsewhere before goes first.
        let before: Vec<InodeKey> = self.inodes.behind();
        let shared = self.clone();
        self.env.spawn(Box::pin(async move {
            for other in before.into_iter().filter(|other| *other != directory) {
                // That directory's own task tells what fails.
                let _ = shared.inodes.put_behind(other).await;
            }
            if let Err(fault) = shared.inodes.put_behind(directory).await {
                shared.note(Some(&fault));
            }
        }));
    }

    /// Has the ring hear of all names that were removed; the first fault if that fails.
    pub(super) async fn put_removals(&self) -> Result<(), Fault> {
        let puts = self.inodes.behind().into_iter().map(|key| self.inodes.put_behind(key));
        join_all(puts).await.into_iter().collect()
    }

    /// Has the ring hear of all names that were removed, and removes the inodes that wait for it.
    pub(super) async fn finish_removals(&self) {
        let _turn = self.removals.turn.lock().await;
        if let Err(fault) = self.put_removals().await {
            return self.note(Some(&fault));
        }
        self.remove_waiting().await;
    }

    /// Has the ring hear of all names that were removed until now, and removes the inodes that wait for it.
    pub(super) async fn settle_removals(&self) -> Result<(), Fault> {
        self.put_removals().await?;
        let going: Vec<InodeKey> = self.going().iter().copied().collect();
        let is_one_left = || {
            let left = self.going();
            going.iter().any(|key| left.contains(key))
        };
        while is_one_left() {
            if self.spool.is_offline() {
                return Err(Fault::new(
                    Errno::ETIMEDOUT,
                    "inodes are removed when the ring is back",
                ));
            }
            // Programs may remove more all the time, so this does not wait for another task's turn to end.
            let has_removed = match self.removals.turn.try_lock() {
                Some(_turn) => self.remove_some().await?,
                None => false,
            };
            if !has_removed {
                sleep(&*self.env, LOOK_EVERY).await;
            }
        }
        Ok(())
    }

    /// Removes the inodes that wait for it.
    async fn remove_waiting(&self) {
        loop {
            match self.remove_some().await {
                Ok(true) => {}
                Ok(false) => return,
                Err(fault) => return self.note(Some(&fault)),
            }
        }
    }

    /// Removes some of the inodes that wait for it, each after its name is gone from the ring; whether there may be more. A
    /// fault if none of them can be removed now.
    async fn remove_some(&self) -> Result<bool, Fault> {
        let next: Vec<Removal> = {
            let mut waiting = self.removals.waiting();
            let count = waiting.len().min(REMOVALS_AT_ONCE);
            waiting.drain(..count).collect()
        };
        if next.is_empty() {
            return Ok(false);
        }
        // Those that are added from now on may have names still.
        let put = self.put_removals().await;
        if put.is_err() || self.spool.is_offline() {
            let mut waiting = self.removals.waiting();
            next.into_iter().rev().for_each(|removal| waiting.push_front(removal));
            return put.map(|()| false);
        }
        let removals = next.into_iter().map(|removal| async move {
            let key = removal.key;
            let tried = self.try_remove(removal).await;
            if tried.is_ok() {
                self.going().remove(&key);
            }
            tried
        });
        let tried = join_all(removals).await;
        let is_in_vain = tried.iter().all(Result::is_err);
        let mut why = None;
        for left in tried.into_iter().filter_map(Result::err) {
            let (removal, fault) = *left;
            self.removals.waiting().push_back(removal);
            why = Some(fault);
        }
        why.filter(|_| is_in_vain).map_or(Ok(true), Err)
    }

    /// Notes in an inode that a directory has lost names of it, or does not get one; removes the inode if it has none
    /// anywhere.
    pub(super) async fn drop_links(&self, key: InodeKey, place: Place, lost: Lost) {
        self.remove(Removal { key, place, lost, seen: self.seen(key) }).await;
    }

    /// Removes an inode whose name is gone from the ring, unless it has other names; later, if that is not possible now.
    pub(super) async fn remove(&self, removal: Removal) {
        if let Err(left) = self.try_remove(removal).await {
            self.wait_to_be_removed(left.0);
        }
    }

    /// The same; the removal, if it is to be tried again, and why: the ring is out of reach, or has no room. What fails else
    /// leaves an inode that ends with its lease.
    async fn try_remove(&self, mut removal: Removal) -> Result<(), Box<(Removal, Fault)>> {
        let Removal { key, place, lost, seen } = &mut removal;
        let (key, path) = (*key, self.path_to(place));
        match self.try_drop_links(key, place, *lost, seen).await {
            Err(fault @ Fault { errno: Errno::ETIMEDOUT | Errno::ENOSPC | Errno::EDQUOT, .. }) => {
                return Err(Box::new((removal, fault)));
            }
            Err(fault) => {
                tracing::debug!("a removed name is still in its inode: {fault:?}");
            }
            Ok(true) => return Ok(()),
            Ok(false) => {}
        }
        self.check_named(key, path).await;
        Ok(())
    }

    /// Adds a link for a name that is about to be made.
    pub(super) async fn new_link(
        &self,
        key: InodeKey,
        place: &Place,
    ) -> Result<NewLink<'_>, Fault> {
        let mut new = NewLink { shared: self, key, place: place.clone(), link: None };
        let (now, directory) = (self.now(), place.0);
        let linked = self.change(key, |inode, added| {
            // Unless it is there from an attempt before.
            if new.link.is_none_or(|link| !inode.links.contains(&link)) {
                let link = Link { added, directory };
                new.link = Some(link);
                inode.links.insert(link);
            }
            inode.attributes.ctime = now;
            Ok(())
        });
        let fault = match linked.await {
            Ok(()) => return Ok(new),
            // Its removal is known, and that of its name not yet.
            Err(Fault { errno: Errno::ESTALE, .. }) => Errno::ENOENT.into(),
            Err(fault) => fault,
        };
        new.undo().await;
        Err(fault)
    }

    /// As [`Shared::drop_links`]; whether links are left. [`Errno::ENOTEMPTY`] of a directory in which there are names,
    /// [`Errno::ESTALE`] of an inode that was removed.
    async fn try_drop_links(
        &self,
        key: InodeKey,
        place: &Place,
        lost: Lost,
        seen: &mut Seen,
    ) -> Result<bool, Fault> {
        for _ in 0..MAX_ROUNDS {
            match self.try_drop_links_once(key, place, lost, seen).await {
                // Somebody has written it meanwhile.
                Err(fault) if fault.is_conflict => {}
                done => return done,
            }
        }
        Err(Fault::conflict())
    }

    async fn try_drop_links_once(
        &self,
        key: InodeKey,
        place: &Place,
        lost: Lost,
        seen: &mut Seen,
    ) -> Result<bool, Fault> {
        // Before the directory: a mount that gives the inode another name there changes the inode afterwards.
        let newest = self.inodes.read(key, Freshness::Newest).await?;
        // As the directory is now that the ring has heard of the removal: another mount may have given the inode
        // another name, and whoever does so from now on finds that the one here is gone.
        let directory = place.0;
        let left_names = match self.inodes.read(directory, Freshness::Latest).await {
            Ok(version) => names_of(version.inode(), key),
            Err(Fault { errno: Errno::ESTALE, .. }) => 0,
            Err(fault) => return Err(fault),
        };
        let now = self.now();
        let drop_links = |inode: &mut Inode| {
            for link in lost.links(&inode.links, directory, left_names) {
                inode.links.remove(&link);
            }
            inode.attributes.ctime = now;
        };
        let mut left = newest.inode().clone();
        drop_links(&mut left);
        if !left.links.is_empty() && left.links == newest.inode().links {
            self.show_named(key);
            return Ok(true);
        }
        let has_links = !left.links.is_empty();
        let (newest, stays) = match has_links {
            true => (newest, true),
            false => {
                let (change, path) = (Change::Removal(seen), self.path_to(place));
                let kept = self.keep_unseen(key, newest, change, &path).await?;
                (kept.version, kept.shows_unseen)
            }
        };
        // `check_named` gives a file without links the name `NAME~USER~TIME`.
        if stays {
            let kept = self.change(key, |inode, _| {
                drop_links(inode);
                Ok(())
            });
            self.show_named(key);
            return kept.await.map(|()| has_links);
        }
        // Those who have it open go on reading and writing, and nothing of that is kept.
        let turn = {
            let mut table = self.table();
            let number = table.number_of(&key);
            number.and_then(|number| {
                let node = table.node_mut(number).ok()?;
                node.orphan = Some(newest.clone());
                Some(node.turn.clone())
            })
        };
        let _turn = match &turn {
            Some(turn) => Some(turn.lock().await),
            None => None,
        };
        let kept_secs = if seen.was_locked { KEPT_FOR_HOLDERS_SECS } else { 0 };
        let written = self.inodes.replace(key, Base::Version(&newest), kept_secs, |inode, _| {
            drop_links(inode);
            match &inode.contents {
                Contents::Directory(entries) if !entries.is_empty() => Err(Errno::ENOTEMPTY),
                _ => Ok(((), inode.links.is_empty())),
            }
        });
        match written.await {
            Err(fault) => {
                if newest.inode().contents.kind() == FileKind::Directory {
                    self.show_named(key);
                }
                return Err(fault);
            }
            // It has got another name here meanwhile.
            Ok((_, Some(_))) => self.show_named(key),
            Ok((_, None)) => {
                let data = match &newest.inode().contents {
                    Contents::Regular { data, .. } => data.clone(),
                    _ => None,
                };
                self.releases.note_data(key, &newest, data.into_iter().collect());
            }
        }
        Ok(false)
    }

    /// Names an inode again whose name was taken away.
    pub(super) async fn restore_name(
        &self,
        directory: InodeKey,
        entry: &inode::Entry,
    ) -> Result<(), Fault> {
        let restored = self.inodes.update(directory, Base::Newest, |inode, dot| {
            let entries = entries(inode)?;
            if entries.iter().all(|there| there.inode != entry.inode) {
                entries.insert(inode::Entry { added: dot, ..entry.clone() });
            }
            Ok(())
        });
        restored.await?;
        Ok(())
    }

    pub(super) fn watch_removed(&self, parent: InodeKey, entry: inode::Entry) {
        let mut removed = self.removed.lock().expect("no holder of this lock panics");
        removed.push((parent, entry, self.env.now()));
    }

    /// Names directories again that were removed here while another mount made a name in them: such a
    /// removal does not count, and what was made there must be found.
    /// Looks once at each that was removed at least `age` ago.
    pub(super) async fn restore_removed(&self, age: Duration) {
        let now = self.env.now();
        let due: Vec<_> = {
            let mut removed = self.removed.lock().expect("no holder of this lock panics");
            let is_due = |at: Instant| now.since(at) >= age;
            let due = removed.iter().filter(|(_, _, at)| is_due(*at)).cloned().collect();
            removed.retain(|(_, _, at)| !is_due(*at));
            due
        };
        for (parent, entry, _) in due {
            match self.restore_if_living(parent, &entry).await {
                Ok(()) | Err(Fault { errno: Errno::ESTALE, .. }) => {}
                Err(fault) => {
                    tracing::debug!("a removed directory is looked at again: {fault:?}");
                    self.watch_removed(parent, entry);
                }
            }
        }
    }

    async fn restore_if_living(&self, parent: InodeKey, entry: &inode::Entry) -> Result<(), Fault> {
        let version = self.inodes.read(entry.inode, Freshness::Newest).await?;
        if version.is_empty_directory() {
            return Ok(());
        }
        self.show_named(entry.inode);
        for link in &version.inode().links {
            match self.inodes.read(link.directory, Freshness::Latest).await {
                // It was renamed.
                Ok(above) if names_of(above.inode(), entry.inode) > 0 => return Ok(()),
                Ok(_) | Err(Fault { errno: Errno::ESTALE, .. }) => {}
                Err(fault) => return Err(fault),
            }
        }
        let linked = self.change(entry.inode, |inode, added| {
            if inode.links.is_empty() {
                inode.links.insert(Link { added, directory: parent });
            }
            Ok(())
        });
        linked.await?;
        tracing::info!("a removed directory is named again: another mount made names in it");
        self.restore_name(parent, entry).await
    }

    pub(super) async fn check_empty(&self, key: InodeKey) -> Result<(), Fault> {
        if !self.table().newborns_of(&key).is_empty() {
            return Err(Errno::ENOTEMPTY.into());
        }
        match self.inodes.read(key, Freshness::Newest).await {
            Ok(version) if version.is_empty_directory() => Ok(()),
            Ok(_) => Err(Errno::ENOTEMPTY.into()),
            // It has been removed, and its name is left.
            Err(Fault { errno: Errno::ESTALE, .. }) => Ok(()),
            Err(fault) => Err(fault),
        }
    }

    /// Removes the inode of a directory whose name is gone. If that fails the directory has its name again: with
    /// [`Errno::ENOTEMPTY`], if somebody has made a name in it meanwhile.
    pub(super) async fn remove_directory(
        &self,
        parent: InodeKey,
        entry: &inode::Entry,
        lost_names: usize,
    ) -> Result<(), Fault> {
        let (place, lost) = ((parent, entry.name.clone()), Lost::Names(lost_names));
        match self.try_drop_links(entry.inode, &place, lost, &mut self.seen(entry.inode)).await {
            Ok(_) => self.watch_removed(parent, entry.clone()),
            Err(Fault { errno: Errno::ESTALE, .. }) => {}
            Err(fault) => {
                if let Err(unnamed) = self.restore_name(parent, entry).await {
                    tracing::warn!("a directory has lost its name for now: {unnamed:?}");
                    self.watch_removed(parent, entry.clone());
                }
                return Err(fault);
            }
        }
        Ok(())
    }

    /// Removes what a rename has replaced; `seen` is what this mount knew of it before.
    pub(super) async fn replaced(
        self: &Arc<Self>,
        target: &inode::Entry,
        directory: InodeKey,
        seen: Seen,
    ) {
        match target.file_kind() {
            FileKind::Directory => {
                // The directory appears beside the one that has replaced it.
                if let Err(fault) = self.remove_directory(directory, target, 1).await {
                    tracing::warn!("a directory that was replaced has its name again: {fault:?}");
                }
            }
            _ => {
                let place = (directory, target.name.clone());
                self.drop_names_soon(target.inode, place, 1, seen).await;
            }
        }
    }
}
