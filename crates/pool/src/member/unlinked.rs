//! Regular files that clients have open and that lost their last name.
//!
//! On Linux such a file lives until the last open ends. Only the primary knows what clients have open, and it may die. So that the file
//! outlives it, the file gets a name that no client sees, its **open name**: `open-` and its number, beside the outside names of its group.
//! This is a change as any other, so all members have the file, its bytes are written and made durable everywhere, and a member that is
//! given all files gets it, too. When the last open ends, the primary removes the open name.
//!
//! A new primary does not know who has what open. Clients open their files again at it, also if they are idle: until
//! then any file may be open. A client that is cut off has as long as its session lasts: until then no open name goes that an earlier
//! primary gave ([`PoolMember::begin_unlinked`]).
//!
//! **Invariants.** A removal never fails for want of an open name: where none can be given the file lives as long as this primary.
//! An open name is removed only with the lock of its file. What clients are told of a file does not count its open name.
//!
//! **It does not know** who has files open ([`crate::held`]), and files that a change over several groups removes: those get no open name.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;
use atoll_vfs::{Errno, FileKind};

use super::{FoundFile, PoolMember};
use crate::change::{PoolChange, PoolPlace};
use crate::disk::{Disk, DiskResult};
use crate::layout::FileId;

/// Files with open names, and from when on each is removed unless it is open.
pub(crate) type UnlinkedFiles = BTreeMap<FileId, Instant>;

impl<D: Disk> PoolMember<D> {
    fn unlinked(&self) -> MutexGuard<'_, UnlinkedFiles> {
        self.unlinked.lock().expect("no holder of this lock panics")
    }

    /// Whether a file has an open name.
    pub(crate) fn is_unlinked(&self, id: FileId) -> bool {
        self.unlinked().contains_key(&id)
    }

    /// A file has got a name.
    pub(super) fn add_place(&self, id: FileId, place: &PoolPlace) {
        self.index.add_place(id, place);
        if place.is_open_name() {
            self.unlinked().insert(id, self.env.now());
        }
    }

    /// A file has lost a name.
    pub(super) fn remove_place(&self, id: FileId, place: &PoolPlace) {
        self.index.remove_place(id, place);
        if place.is_open_name() {
            self.unlinked().remove(&id);
        }
    }

    /// This member is the primary from now on: it looks which files have open names. Clients that reach it open their files again within
    /// `reopened`; sessions last for `session`.
    ///
    /// # Errors
    /// What the disk says.
    pub(crate) async fn begin_unlinked(
        &self,
        reopened: Duration,
        session: Duration,
    ) -> DiskResult<()> {
        let outside = self.node(FileId::outside(self.settings.group)).await?;
        let listed = self.disk.list(&outside).await?;
        let ids = listed.iter().filter_map(|found| FileId::of_open_name(&found.name));
        let now = self.env.now();
        *self.unlinked() = ids.map(|id| (id, now + session)).collect();
        *self.reopened.lock().expect("no holder of this lock panics") = now + reopened;
        Ok(())
    }

    /// A client has opened a file again: its open name goes when nobody has it open any more.
    pub(crate) fn note_opened(&self, id: FileId) {
        if let Some(due) = self.unlinked().get_mut(&id) {
            *due = self.env.now();
        }
    }

    fn may_be_open(&self, id: FileId) -> bool {
        self.held().is_open(id)
            || self.env.now() < *self.reopened.lock().expect("no holder of this lock panics")
    }

    /// Whether a file is to get an open name before it loses a name that clients see: that is its last one, and it may be open.
    pub(crate) fn needs_open_name(&self, found: &FoundFile) -> bool {
        let FoundFile { id, stat, .. } = found;
        let is_last = stat.kind == FileKind::Regular && stat.nlink == 1;
        self.in_group && is_last && self.may_be_open(*id)
    }

    /// Removes the open name of a file whose last open has ended, before long.
    pub(crate) fn end_unlinked_soon(self: &Arc<Self>, id: FileId) {
        if !self.is_unlinked(id) || self.held().is_open(id) {
            return;
        }
        let member = self.clone();
        self.env.spawn(Box::pin(async move {
            // What cannot be removed now is tried again.
            let _ = member.end_unlinked(id).await;
        }));
    }

    /// Removes the open names of files that are not open, of earlier primaries' those that nobody has opened again in time.
    pub(crate) async fn end_all_unlinked(self: &Arc<Self>) {
        let all: Vec<FileId> = self.unlinked().keys().copied().collect();
        for id in all {
            if let Err(errno) = self.end_unlinked(id).await {
                tracing::debug!("the open name of file {id} stays: {errno}");
                return;
            }
        }
    }

    async fn end_unlinked(self: &Arc<Self>, id: FileId) -> DiskResult<()> {
        let _changing = self.begin_change().await?;
        let outside = FileId::outside(self.settings.group);
        let _turns = self.turns.write_all([id.0, outside.0]).await;
        let is_due = self.unlinked().get(&id).is_some_and(|due| *due <= self.env.now());
        if !is_due || self.may_be_open(id) {
            return Ok(());
        }
        self.check_copies()?;
        let unlink = PoolChange::Unlink { id, at: PoolPlace::open_name(id), by: None };
        match self.change(unlink).await {
            // A crash has lost it.
            Err(Errno::ENOENT) => {
                self.unlinked().remove(&id);
                Ok(())
            }
            ended => ended.map(drop),
        }
    }
}
