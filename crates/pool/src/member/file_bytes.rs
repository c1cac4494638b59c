//! Bytes and lengths of files, on all members (PacificA, section 2.2; the pool's design, *Bytes and sizes*).
//!
//! The primary writes to its own plain file, and hands what it wrote to its backups; a write is answered when all have it, though
//! it is durable nowhere yet. Before the first write into a range since the file was last synced, all members journal that the
//! range may differ ([`crate::marks`]). A sync is one on all members; then one change clears the marks that it covers.
//!
//! One write of a file is under way at a time, which the caller's lock of the file sees to, so all members write in one order. What the
//! primary shows of a file is answered when no member lacks it ([`PoolMember::until_written`]), since others may be asked next
//! ([`PoolMember::read_here`]).
//!
//! A file without a name is the primary's alone.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use atoll_env::timeout;
use atoll_vfs::{Errno, FileKind};
use bytes::Bytes;
use futures_channel::oneshot;

use super::PoolMember;
use crate::backups::{BackupLink, Backups, HandedItem};
use crate::change::{MAX_CHANGE_BYTES, PoolChange};
use crate::disk::{Disk, DiskResult, TimeToSet};
use crate::index::FileRecord;
use crate::layout::FileId;
use crate::marks::{MARK_BYTES, WHOLE, marks_of};
use crate::messages::{ItemKind, MAX_ITEM_BYTES};

/// How long a sync of all members may take before it is given up.
const SYNC_ALL_LIMIT: Duration = Duration::from_secs(60);
/// Marks of a file that a change names; more are one, of the whole file.
const MAX_KEPT_MARKS: usize = 4096;

/// Modes of `fallocate(2)` that do the same when they are done again.
const REPEATABLE_MODES: i32 =
    atoll_vfs::FALLOC_KEEP_SIZE | atoll_vfs::FALLOC_PUNCH_HOLE | atoll_vfs::FALLOC_ZERO_RANGE;

/// `FALLOC_FL_INSERT_RANGE`: what comes after is moved.
const INSERTS_RANGE: i32 = 0x20;

/// A write into ranges that are marked.
struct MarkedWrite<'a, D: Disk> {
    member: &'a PoolMember<D>,
    id: FileId,
    marks: Vec<u64>,
}

impl<D: Disk> Drop for MarkedWrite<'_, D> {
    fn drop(&mut self) {
        self.member.marks().end_write(self.id, &self.marks);
        self.member.writes().remove(&self.id);
    }
}

/// Files that are being written, which some members may not have: one write of a file at a time, and those who wait for its end. They
/// are woken when it is dropped.
pub(crate) type WritesUnderWay = BTreeMap<FileId, Vec<oneshot::Sender<()>>>;

impl<D: Disk> PoolMember<D> {
    /// Those that get this file's bytes.
    fn followers(&self, id: FileId) -> Option<Arc<Backups>> {
        self.backups().filter(|_| !self.held().is_nameless(id))
    }

    async fn begin_write(
        &self,
        id: FileId,
        (offset, len): (u64, u64),
        extended: Option<&D::File>,
    ) -> DiskResult<MarkedWrite<'_, D>> {
        let marks = marks_of(offset, len);
        // No mark is cleared between this look and the beginning of the write.
        let _marking = self.whole.read(super::whole::MARKS).await;
        let mut new = self.marks().missing(id, &marks);
        if !new.is_empty() {
            if let Some(file) = extended {
                let size_bytes = self.disk.stat_file(file).await?.size_bytes;
                new = self.marks().to_add(id, &marks, size_bytes);
            }
            self.change(PoolChange::Marked { id, marks: new }).await?;
        }
        self.marks().begin_write(id, &marks);
        self.writes().insert(id, Vec::new());
        Ok(MarkedWrite { member: self, id, marks })
    }

    fn writes(&self) -> MutexGuard<'_, WritesUnderWay> {
        self.writes.lock().expect("no holder of this lock panics")
    }

    /// Resolves when all members have what is being written of a file now; none if nothing is.
    pub(crate) fn until_written(&self, id: FileId) -> Option<oneshot::Receiver<()>> {
        let mut writes = self.writes();
        let waiting = writes.get_mut(&id)?;
        let (sender, receiver) = oneshot::channel();
        waiting.retain(|waiting| !waiting.is_canceled());
        waiting.push(sender);
        Some(receiver)
    }

    /// Writes bytes on all members; returns how many there was room for.
    pub(crate) async fn write_bytes(
        &self,
        id: FileId,
        file: &D::File,
        offset: u64,
        data: Bytes,
    ) -> DiskResult<usize> {
        let size_bytes = offset.saturating_add(data.len() as u64);
        self.while_growing(id, size_bytes, self.write_to_all(id, file, offset, data)).await
    }

    async fn write_to_all(
        &self,
        id: FileId,
        file: &D::File,
        offset: u64,
        data: Bytes,
    ) -> DiskResult<usize> {
        let Some(backups) = self.followers(id) else {
            return self.disk.write(file, offset, &data).await;
        };
        if backups.free_bytes() < data.len() as u64 {
            return Err(Errno::ENOSPC);
        }
        let _marked = self.begin_write(id, (offset, data.len() as u64), Some(file)).await?;
        let written = self.disk.write(file, offset, &data).await?;
        let mut sent = 0;
        while sent < written {
            let end = (sent + MAX_ITEM_BYTES).min(written);
            let at = offset.saturating_add(sent as u64);
            let what = ItemKind::Write { id, after: backups.needed_by(id), offset: at };
            backups.hand(what, data.slice(sent..end)).await?;
            sent = end;
        }
        Ok(written)
    }

    /// Sets a file's length on all members.
    pub(crate) async fn set_length(
        &self,
        id: FileId,
        file: &D::File,
        size_bytes: u64,
    ) -> DiskResult<()> {
        let work = self.set_length_of_all(id, file, size_bytes);
        self.while_growing(id, size_bytes, work).await
    }

    async fn set_length_of_all(
        &self,
        id: FileId,
        file: &D::File,
        size_bytes: u64,
    ) -> DiskResult<()> {
        self.held().note_resized(id);
        let Some(backups) = self.followers(id) else {
            return self.disk.set_len(file, size_bytes).await;
        };
        // What is taken away may come back where it is lost that it was, below a greater length.
        let before = self.disk.stat_file(file).await?.size_bytes;
        let len = before.saturating_sub(size_bytes).max(1);
        let _marked = self.begin_write(id, (size_bytes, len), None).await?;
        self.disk.set_len(file, size_bytes).await?;
        let what = ItemKind::SetLength { id, after: backups.needed_by(id), size_bytes };
        backups.hand(what, Bytes::new()).await
    }

    /// `fallocate(2)` on all members.
    pub(crate) async fn allocate_bytes(
        &self,
        id: FileId,
        file: &D::File,
        mode: i32,
        (offset, len): (u64, u64),
    ) -> DiskResult<()> {
        let work = self.allocate_on_all(id, file, mode, (offset, len));
        if mode & atoll_vfs::FALLOC_KEEP_SIZE != 0 {
            return work.await;
        }
        let begin = match mode & INSERTS_RANGE {
            0 => offset,
            _ => self.disk.stat_file(file).await?.size_bytes,
        };
        self.while_growing(id, begin.saturating_add(len), work).await
    }

    async fn allocate_on_all(
        &self,
        id: FileId,
        file: &D::File,
        mode: i32,
        (offset, len): (u64, u64),
    ) -> DiskResult<()> {
        let Some(backups) = self.followers(id) else {
            return self.disk.allocate(file, mode, offset, len).await;
        };
        // Ranges that are inserted or taken out would be so twice if a call is made again.
        if mode & !REPEATABLE_MODES != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if mode & atoll_vfs::FALLOC_PUNCH_HOLE == 0 && backups.free_bytes() < len {
            return Err(Errno::ENOSPC);
        }
        let _marked = self.begin_write(id, (offset, len), None).await?;
        self.disk.allocate(file, mode, offset, len).await?;
        let what = ItemKind::Allocate { id, after: backups.needed_by(id), mode, offset, len };
        backups.hand(what, Bytes::new()).await
    }

    /// Makes a file durable on all members, with its names.
    pub(crate) async fn sync_bytes(
        self: &Arc<Self>,
        id: FileId,
        file: &D::File,
        data_only: bool,
    ) -> DiskResult<()> {
        let resized = self.held().resized(id);
        // The number of a file that a crash may have to find again is durable with its bytes.
        let data_only = data_only && !self.is_in_journal(id);
        let Some(backups) = self.followers(id) else {
            let upto = if data_only { 0 } else { self.changes_so_far() };
            self.disk.sync_file(file, data_only).await?;
            self.held().end_resized(id, resized);
            if self.is_in_journal(id) {
                let _changing = self.begin_change().await?;
                self.change(PoolChange::Synced { id, upto, kept: Vec::new() }).await?;
            }
            return self.sync_changes().await;
        };
        self.wait_for_backups().await?;
        let (upto, before) = loop {
            let losses = backups.losses();
            self.mend_for_sync(id).await?;
            // Backups have made no more than that.
            let upto = if data_only { 0 } else { backups.released() };
            let before = self.marks().before_sync(id);
            let own = self.disk.sync_file(file, data_only);
            let mtime = self.disk.stat_file(file).await?.mtime;
            let after = backups.needed_by(id).max(upto);
            let what = ItemKind::Sync { id, after, mtime: (mtime.secs, mtime.nanos) };
            let (handed, own) = futures_util::join!(backups.hand(what, Bytes::new()), own);
            handed.and(own)?;
            // A backup that has lost bytes meanwhile may have synced the file before it got them again.
            if backups.losses() == losses {
                break (upto, before);
            }
        };
        self.held().end_resized(id, resized);
        if self.is_in_journal(id) || self.marks().has_any(id) {
            let _changing = self.begin_change().await?;
            // No write begins between the look at the marks and the change that clears them.
            let _turn = self.turns.write(id.0).await;
            let mut kept = self.marks().after_sync(&before);
            kept.extend(self.unmended(id));
            kept.sort_unstable();
            kept.dedup();
            if kept.len() > MAX_KEPT_MARKS {
                // One mark for all of the file, so that the change is short.
                kept = vec![WHOLE];
                self.change(PoolChange::Marked { id, marks: kept.clone() }).await?;
            }
            self.change(PoolChange::Synced { id, upto, kept }).await?;
        }
        self.sync_changes().await
    }

    /// Hands over all that a backup may have lost, and makes all files durable on all members.
    pub(crate) async fn mend_and_sync_members(self: &Arc<Self>) -> DiskResult<()> {
        let Some(backups) = self.backups() else { return Ok(()) };
        loop {
            let losses = backups.losses();
            for link in backups.members_to_mend() {
                while let Some(id) = link.next_to_mend()
                    && link.is_member()
                {
                    self.mend(&link, id).await?;
                }
            }
            self.sync_members().await?;
            if backups.losses() == losses {
                return Ok(());
            }
        }
    }

    /// Makes all files durable on all members, but for what some backup may have lost, so that few have marks.
    pub(crate) async fn sync_members(self: &Arc<Self>) -> DiskResult<()> {
        let Some(backups) = self.backups() else { return Ok(()) };
        let files = self.marks().all();
        if files.is_empty() {
            return Ok(());
        }
        let before: Vec<_> = {
            let marks = self.marks();
            files.keys().map(|id| marks.before_sync(*id)).collect()
        };
        let losses = backups.losses();
        let unmended: BTreeMap<_, _> = files.keys().map(|id| (*id, self.unmended(*id))).collect();
        // All that is released is made before it is synced.
        let what = ItemKind::SyncAll { after: backups.released() };
        self.wait_for_backups().await?;
        let all = async {
            let handed = backups.hand(what, Bytes::new());
            let (handed, own) = futures_util::join!(handed, self.disk.sync_all());
            handed.and(own)
        };
        timeout(&*self.env, SYNC_ALL_LIMIT, all).await.map_err(|_| Errno::ETIMEDOUT)??;
        if backups.losses() != losses {
            // A backup may have synced them before it got again what it had lost.
            return Ok(());
        }
        let _changing = self.begin_change().await?;
        // No write begins between the look at the marks and the change that clears them.
        let _marking = self.whole.write(super::whole::MARKS).await;
        let mut kept = Vec::new();
        for before in &before {
            let mut stays = self.marks().after_sync(before);
            stays.extend(unmended.get(&before.id).into_iter().flatten());
            stays.extend(self.unmended(before.id));
            if !stays.is_empty() {
                stays.sort_unstable();
                stays.dedup();
                kept.push((before.id, stays));
            }
        }
        // Files that were marked since.
        for (id, marks) in self.marks().all() {
            if !files.contains_key(&id) {
                kept.push((id, marks.into_iter().collect()));
            }
        }
        let change = PoolChange::AllSynced { kept };
        match change.encode().len() <= MAX_CHANGE_BYTES {
            true => self.change(change).await.map(|_| ()),
            // Too many files were written meanwhile: the next time.
            false => Ok(()),
        }
    }

    /// Ranges of a file that some member has not got again.
    fn unmended(&self, id: FileId) -> Vec<u64> {
        self.backups().map_or_else(Vec::new, |backups| backups.unmended(id))
    }

    async fn mend_for_sync(&self, id: FileId) -> DiskResult<()> {
        let members = self.backups().map_or_else(Vec::new, |backups| backups.members_to_mend());
        for link in members {
            if !link.to_mend(id).is_empty() {
                self.mend(&link, id).await?;
            }
        }
        Ok(())
    }

    /// Hands ranges of a file to a member that may lack them.
    pub(crate) async fn mend(&self, link: &Arc<BackupLink>, id: FileId) -> DiskResult<()> {
        let (losses, ranges) = (link.losses(), link.to_mend(id));
        let mut next = ranges.first().map(|first| if *first == WHOLE { 0 } else { *first });
        while let Some(mark) = next {
            let Some(size_bytes) = self.mend_range(link, id, mark).await? else { break };
            let after = mark + 1;
            let following = match ranges.contains(&WHOLE) {
                true => Some(after),
                false => ranges.iter().find(|range| **range >= after).copied(),
            };
            // The member has the file's length by now, and gets every later write as any other member does.
            next = following.filter(|next| next.saturating_mul(MARK_BYTES) < size_bytes);
        }
        link.end_mend(id, &ranges, losses);
        Ok(())
    }

    /// Hands over one range; returns how long the file is, none if there is none any more that others have. No write of the file is
    /// under way meanwhile.
    pub(crate) async fn mend_range(
        &self,
        link: &Arc<BackupLink>,
        id: FileId,
        mark: u64,
    ) -> DiskResult<Option<u64>> {
        let (_turn, node) = {
            // No directory moves while it is sought. A rename takes these locks in the same order.
            let _still = self.whole.read(super::whole::MOVES).await;
            (self.turns.write(id.0).await, self.node(id).await)
        };
        let node = match node {
            // It is gone, on all members.
            Err(Errno::ESTALE) if self.record(id)?.is_none() => return Ok(None),
            node => node?,
        };
        if self.disk.stat(&node).await?.kind != FileKind::Regular || self.held().is_nameless(id) {
            return Ok(None);
        }
        let file = self.disk.open(&node).await?;
        let stat = self.disk.stat_file(&file).await?;
        let (size_bytes, mtime) = (stat.size_bytes, (stat.mtime.secs, stat.mtime.nanos));
        let offset = mark.saturating_mul(MARK_BYTES).min(size_bytes);
        let len = (size_bytes - offset).min(MARK_BYTES) as usize;
        let bytes = self.disk.read(&file, offset, len).await?;
        let after = self.backups().map_or(0, |backups| backups.needed_by(id));
        let what = ItemKind::Mend { id, after, offset, size_bytes, mtime };
        link.give(HandedItem::new(what, bytes)).await?;
        Ok(Some(size_bytes))
    }

    // ---- on a backup ----

    /// Does what the primary has handed over, on this member alone. The changes that it needs are made.
    pub(crate) async fn take_bytes(&self, what: &ItemKind, bytes: &[u8]) -> DiskResult<()> {
        match what {
            ItemKind::SyncAll { .. } => return self.disk.sync_all().await,
            ItemKind::CopiedUpto { id, done } => return self.note_copied(*id, *done).await,
            ItemKind::Complete => return self.note_complete().await,
            ItemKind::XattrNames { .. } | ItemKind::Xattr { .. } | ItemKind::State { .. } => {
                return self.take_state(what, bytes).await;
            }
            _ => {}
        }
        let Some(id) = what.file() else { return Err(Errno::EINVAL) };
        let turn = self.turns.write(id.0).await;
        let (node, file) = {
            // No directory moves meanwhile.
            let _still = self.whole.read(super::whole::MOVES).await;
            let node = match self.node(id).await {
                // It was removed while it was synced, or is not there yet; then it has marks.
                Err(Errno::ESTALE)
                    if matches!(what, ItemKind::Sync { .. } | ItemKind::Copy { .. })
                        && self.record(id)?.is_none() =>
                {
                    return Ok(());
                }
                node => node?,
            };
            let file = self.disk.open(&node).await?;
            (node, file)
        };
        match what {
            ItemKind::Write { offset, .. } => self.write_here(&file, *offset, bytes).await,
            ItemKind::SetLength { size_bytes, .. } => self.disk.set_len(&file, *size_bytes).await,
            ItemKind::Allocate { mode, offset, len, .. } => {
                self.disk.allocate(&file, *mode, *offset, *len).await
            }
            ItemKind::Sync { mtime, .. } => {
                self.disk.set_times(&node, None, time_to_set(*mtime)).await?;
                // Reads and writes of the file do not wait for the device, as on the primary.
                drop(turn);
                self.disk.sync_file(&file, false).await
            }
            ItemKind::Mend { offset, size_bytes, mtime, .. } => {
                let range = (*offset, *size_bytes);
                self.mend_here((&node, &file), range, *mtime, bytes).await
            }
            ItemKind::Copy { offset, size_bytes, mtime, .. } => {
                let range = (*offset, *size_bytes);
                self.take_copied_bytes((&node, &file), range, bytes).await?;
                self.disk.set_times(&node, None, time_to_set(*mtime)).await
            }
            ItemKind::Append { .. }
            | ItemKind::SyncAll { .. }
            | ItemKind::CopiedUpto { .. }
            | ItemKind::XattrNames { .. }
            | ItemKind::Xattr { .. }
            | ItemKind::State { .. }
            | ItemKind::Complete
            | ItemKind::Locks(_) => Err(Errno::EINVAL),
        }
    }

    /// Gives a file this length, and these bytes at an offset.
    pub(crate) async fn mend_here(
        &self,
        (node, file): (&D::Node, &D::File),
        (offset, size_bytes): (u64, u64),
        mtime: (i64, u32),
        bytes: &[u8],
    ) -> DiskResult<()> {
        if self.disk.stat_file(file).await?.size_bytes != size_bytes {
            self.disk.set_len(file, size_bytes).await?;
        }
        self.write_here(file, offset, bytes).await?;
        self.disk.set_times(node, None, time_to_set(mtime)).await
    }

    /// Reads a regular file that has a name. No bytes of it are being written when `may_read` is asked, and until they are read. None if it may
    /// not be read, or a change of its names waits to be made: who has it open may have it without a name.
    pub(crate) async fn read_here(
        &self,
        id: FileId,
        (offset, len): (u64, usize),
        may_read: impl Fn() -> bool,
    ) -> DiskResult<Option<Bytes>> {
        // Before a lock that a write or a sync may have for long.
        if !may_read() {
            return Ok(None);
        }
        let (record, file) = {
            // No directory moves meanwhile. This is let go of before the file is locked: on a primary others take these locks in this
            // order, and on a backup in the other one.
            let _still = self.whole.read(super::whole::MOVES).await;
            let is_regular = |record: &FileRecord| record.kind == FileKind::Regular;
            let Some(record) = self.record(id)?.filter(is_regular) else { return Ok(None) };
            (record, self.disk.open(&self.node(id).await?).await?)
        };
        let _turn = self.turns.read(id.0).await;
        // It may be gone, or be another inode since it was made again.
        if !may_read() || self.awaits_names(id) || self.record(id)? != Some(record) {
            return Ok(None);
        }
        self.disk.read(&file, offset, len).await.map(Some)
    }

    pub(super) async fn write_here(
        &self,
        file: &D::File,
        offset: u64,
        bytes: &[u8],
    ) -> DiskResult<()> {
        match self.disk.write(file, offset, bytes).await? {
            written if written == bytes.len() => Ok(()),
            _ => Err(Errno::ENOSPC),
        }
    }
}

fn time_to_set((secs, nanos): (i64, u32)) -> Option<TimeToSet> {
    Some(TimeToSet::To(atoll_vfs::FileTime { secs, nanos }))
}
