//! A pool of one member as a [`FileSystem`] (koshad of Kosha §4, without peers).
//!
//! Attributes, times and bytes are those of the plain files. A file's number is its [`FileId`] for as long as the pool exists, so
//! handles last. Directories that lie in slots look like any other: a client never sees a placeholder.
//!
//! Changes of names and attributes are acknowledged when they are in the journal and on the plain files, without waiting for the
//! device; [`FileSystem::persist`] and [`FileSystem::fsync`] wait. Bytes are the plain file's: durable after `fsync`.

mod attributes;
mod calls;
mod crossing;
mod files;
mod names;

use std::any::Any;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use atoll_env::{Elapsed, Env, sleep, timeout};
use atoll_vfs::{
    Answer, Attr, AttrReply, Caller, CreateVerifier, DirEntry, Entry, Errno, FileKind, FileSystem,
    Handle, InodeNumber, OpenFlags, Opened, PersistentHandle, RenameFlags, SeekTo, SetAttr, StatFs,
    Writer, XattrFlags,
};
use bytes::Bytes;
use futures_channel::oneshot;

use self::calls::entry_elsewhere;
use crate::calls::CallOrigin;
use crate::change::BirthKind;
use crate::crossings::HeldByCrossings;
use crate::disk::{Disk, DiskResult, Stat};
use crate::layout::{FileId, GroupNumber, Referral};
use crate::member::{OpenError, OpenReport, PoolMember, PoolSettings};
use crate::placement::GroupRoom;
use crate::quota::{QuotaAmount, QuotaRow, QuotaSubject, QuotaTable};
use crate::siblings::SiblingGroups;

/// How long a call of a pool of several waits for the others.
const CALL_LIMIT: Duration = Duration::from_secs(30);

/// How long a call waits for a greater share of a limit of which other groups have a share, too.
const SHARE_LIMIT: Duration = Duration::from_secs(4);
/// Between attempts meanwhile.
const SHARE_RETRY_EVERY: Duration = Duration::from_millis(100);
/// How often a pool of one looks whether files are to be counted for limits.
const COUNT_LOOK_EVERY: Duration = Duration::from_secs(1);
/// After so many looks, about a day, they are counted in any case: somebody may have changed files by hand.
const LOOKS_A_COUNT: u64 = 24 * 3600;

/// How long names and attributes may be believed: somebody may change the plain files by hand.
const TTL: Duration = Duration::from_secs(1);

/// See the module. Clones are handles to the same one.
pub struct PoolFs<D: Disk> {
    member: Arc<PoolMember<D>>,
    /// The pool's other groups.
    siblings: Option<Arc<dyn SiblingGroups>>,
    /// The call that this was made for, whose change is made once.
    origin: Option<CallOrigin>,
    /// What is to be dropped when the call is done: each call has a clone of this.
    kept: Option<Arc<dyn Any + Send + Sync>>,
    /// Writes of files that the call has looked at meanwhile: it is answered when they have ended.
    awaited: Arc<AwaitedWrites>,
}

/// Writes that some members may not have, and that a call has seen.
#[derive(Default)]
struct AwaitedWrites(Mutex<Vec<oneshot::Receiver<()>>>);

impl AwaitedWrites {
    /// Waits until they have ended: all members have them, or this member takes no part any more.
    async fn end(&self) {
        let awaited = std::mem::take(&mut *self.0.lock().expect("no holder of this lock panics"));
        for write in awaited {
            // It ends by being dropped.
            let _ = write.await;
        }
    }
}

impl<D: Disk> Clone for PoolFs<D> {
    fn clone(&self) -> PoolFs<D> {
        let PoolFs { member, siblings, origin, kept, awaited } = self;
        let (member, siblings, kept) = (member.clone(), siblings.clone(), kept.clone());
        PoolFs { member, siblings, origin: *origin, kept, awaited: awaited.clone() }
    }
}

impl<D: Disk> PoolFs<D> {
    /// Opens the only member's disk, and makes again what a crash has undone.
    pub async fn open(env: Env, disk: D) -> Result<(PoolFs<D>, OpenReport), OpenError> {
        let (member, report) = PoolMember::open(env, disk).await?;
        if member.has_quotas() {
            member.quotas().want_count();
            begin_counting(&member);
        }
        Ok((
            PoolFs { member, siblings: None, origin: None, kept: None, awaited: Arc::default() },
            report,
        ))
    }

    /// The file system of a primary.
    pub(crate) fn of_primary(
        member: Arc<PoolMember<D>>,
        siblings: Option<Arc<dyn SiblingGroups>>,
    ) -> PoolFs<D> {
        PoolFs { member, siblings, origin: None, kept: None, awaited: Arc::default() }
    }

    /// What the pool was made with.
    pub fn settings(&self) -> PoolSettings {
        self.member.settings
    }

    /// The limits of a pool of one, after a count of all files.
    pub async fn quotas(&self) -> Result<QuotaTable, Errno> {
        self.member.count_for_quotas().await?;
        Ok(self.member.quotas().table().clone())
    }

    /// The limits, and what calls have kept in step with them. For tests.
    #[doc(hidden)]
    pub fn quotas_as_kept(&self) -> QuotaTable {
        self.member.quotas().table().clone()
    }

    /// Sets a limit of a pool of one, or removes it.
    ///
    /// # Errors
    /// Why it is not set, for people.
    pub async fn set_quota(
        &self,
        subject: QuotaSubject,
        limit: Option<QuotaAmount>,
    ) -> Result<(), String> {
        let next = self.member.quotas().table().with(subject, limit, true)?;
        let is_first = !self.member.has_quotas();
        let set = self.member.edit_quotas(|_| next).await;
        if is_first {
            begin_counting(&self.member);
        }
        set.map_err(|errno| format!("the pool's disk: {errno}"))
    }

    /// Makes everything durable, and brings the index up to date: the next start has nothing to do.
    pub async fn end(&self) -> Result<(), Errno> {
        self.member.checkpoint().await
    }

    fn call<T: Send + 'static, F>(&self, work: impl FnOnce(PoolFs<D>) -> F) -> Answer<T>
    where
        F: Future<Output = DiskResult<T>> + Send + 'static,
    {
        let awaited: Arc<AwaitedWrites> = Arc::default();
        let work = work(PoolFs { awaited: awaited.clone(), ..self.clone() });
        match self.member.in_group {
            false => Box::pin(work),
            true => self.call_apart(async move {
                let done = work.await;
                awaited.end().await;
                done
            }),
        }
    }

    /// The call looks at a file: it is answered when all members have what was being written of it by then, for the next one may be made
    /// on another member.
    fn note_seen(&self, id: FileId) {
        if let Some(write) = self.member.until_written(id) {
            self.awaited.0.lock().expect("no holder of this lock panics").push(write);
        }
    }

    /// A call that goes on when its caller gives it up: others have half of it. It answers within [`CALL_LIMIT`].
    fn call_apart<T: Send + 'static>(
        &self,
        work: impl Future<Output = DiskResult<T>> + Send + 'static,
    ) -> Answer<T> {
        let env = self.member.env.clone();
        let (sender, answer) = oneshot::channel();
        env.spawn(Box::pin(async move {
            let _ = sender.send(work.await);
        }));
        Box::pin(async move {
            match timeout(&*env, CALL_LIMIT, answer).await {
                Ok(Ok(answer)) => answer,
                // It may still be done.
                Ok(Err(oneshot::Canceled)) | Err(Elapsed) => Err(Errno::EIO),
            }
        })
    }

    /// Does what takes room in a directory, or for a file, again for a while if the group's share of a limit was too small for it: other groups may have more than they need.
    async fn with_share<T, F>(&self, at: FileId, work: impl Fn() -> F) -> DiskResult<T>
    where
        F: Future<Output = DiskResult<T>> + Send,
    {
        if self.siblings().is_some()
            && let Some(unknown) = self.member.unknown_above(at)?
        {
            // Without an answer it does not count for limits of directories there yet.
            let _ = self.learn_above(unknown).await;
        }
        let env = &self.member.env;
        let until = env.now() + SHARE_LIMIT;
        loop {
            match work().await {
                Err(Errno::EDQUOT)
                    if self.siblings().is_some()
                        && self.member.quotas().may_get_more()
                        && env.now() < until =>
                {
                    sleep(&**env, SHARE_RETRY_EVERY).await;
                }
                done => return done,
            }
        }
    }

    /// Attributes as callers see them.
    /// How many names clients see of a file that is no directory.
    fn seen_links(&self, id: FileId, stat: &Stat) -> u32 {
        stat.nlink.saturating_sub(u32::from(self.member.is_unlinked(id)))
    }

    fn attr(&self, id: FileId, stat: &Stat) -> DiskResult<Attr> {
        self.note_seen(id);
        let nlink = match stat.kind {
            // Below a placeholder is a directory, too.
            FileKind::Directory if stat.nlink > 1 => {
                let placeholders = self.member.record(id)?.map_or(0, |record| record.placeholders);
                stat.nlink.saturating_add(placeholders)
            }
            _ => self.seen_links(id, stat),
        };
        Ok(Attr {
            inode: id.inode(),
            kind: stat.kind,
            mode: stat.mode,
            nlink,
            uid: stat.uid,
            gid: stat.gid,
            rdev: stat.rdev,
            size_bytes: stat.size_bytes,
            blocks_512: stat.blocks_512,
            block_size_bytes: stat.block_size_bytes,
            atime: stat.atime,
            mtime: stat.mtime,
            ctime: stat.ctime,
        })
    }

    /// The entry of a file, counted as one lookup; of a file of another group its number and kind alone.
    fn entry(&self, id: FileId, stat: &Stat) -> DiskResult<Entry> {
        if let Some(Referral { file, kind, .. }) = self.referral(id, stat.kind)? {
            return Ok(entry_elsewhere(file, kind));
        }
        let attr = self.attr(id, stat)?;
        self.member.held().look_up(id);
        Ok(Entry { attr, generation: 0, name_ttl: TTL, attr_ttl: TTL })
    }
}

impl<D: Disk> FileSystem for PoolFs<D> {
    fn lookup(&self, _caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<Entry> {
        let name = name.to_vec();
        self.call(async move |pool| pool.look_up(parent.into(), &name).await)
    }

    fn parent(&self, _caller: Caller, inode: InodeNumber) -> Answer<Entry> {
        self.call(async move |pool| pool.parent_entry(inode.into()).await)
    }

    fn handle_of(&self, inode: InodeNumber) -> Answer<PersistentHandle> {
        self.call(async move |pool| {
            let id = FileId::from(inode);
            let is_known = pool.member.held().is_held(id) || pool.member.record(id)?.is_some();
            match is_known {
                // No number is used again.
                true => Ok(PersistentHandle::of_number(inode, 0)),
                false => Err(Errno::ESTALE),
            }
        })
    }

    fn by_handle(&self, _caller: Caller, handle: &PersistentHandle) -> Answer<Entry> {
        let number = handle.number();
        self.call(async move |pool| match number? {
            (inode, 0) => {
                let id = FileId::from(inode);
                if pool.siblings().is_some() {
                    // Another group may have decided that it is made, or has another name.
                    let needed = HeldByCrossings::of_file(id);
                    pool.member.until_free(&needed, CALL_LIMIT / 3).await?;
                }
                let stat = pool.stat(id).await?;
                // It only waits to be removed.
                match pool.member.is_unlinked(id) && !pool.member.held().is_held(id) {
                    true => Err(Errno::ESTALE),
                    false => pool.entry(id, &stat),
                }
            }
            _ => Err(Errno::ESTALE),
        })
    }

    fn has_acls(&self) -> bool {
        true
    }

    fn forget(&self, inode: InodeNumber, count: u64) {
        self.member.held().forget(inode.into(), count);
    }

    fn getattr(&self, inode: InodeNumber, _handle: Option<Handle>) -> Answer<AttrReply> {
        self.call(async move |pool| {
            // Another group may have decided that the file loses or gets a name here: how many it has is to be right. It is said
            // all the same if that takes too long: the file is open.
            if let Err(needed) = pool.member.check_free(|| HeldByCrossings::of_file(inode.into())) {
                let _ = pool.member.until_free(&needed, CALL_LIMIT / 3).await;
            }
            let stat = pool.stat(inode.into()).await?;
            Ok(AttrReply { attr: pool.attr(inode.into(), &stat)?, ttl: TTL })
        })
    }

    fn setattr(
        &self,
        _caller: Caller,
        inode: InodeNumber,
        handle: Option<Handle>,
        changes: SetAttr,
    ) -> Answer<AttrReply> {
        self.call(async move |pool| {
            let set = || pool.set_attributes(inode.into(), handle, changes);
            pool.with_share(inode.into(), set).await
        })
    }

    fn readlink(&self, inode: InodeNumber) -> Answer<Bytes> {
        self.call(async move |pool| {
            let node = pool.member.node(inode.into()).await?;
            match pool.member.disk.stat(&node).await?.kind {
                FileKind::Symlink => pool.member.read_link(&node).await,
                _ => Err(Errno::EINVAL),
            }
        })
    }

    fn mknod(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        kind: FileKind,
        mode: u32,
        rdev: u64,
    ) -> Answer<Entry> {
        let name = name.to_vec();
        self.call(async move |pool| {
            let what = match kind {
                FileKind::Regular => BirthKind::Regular,
                kind => BirthKind::special(kind, rdev).ok_or(Errno::EINVAL)?,
            };
            pool.entry_once(pool.make(caller, parent.into(), &name, what, mode, None)).await
        })
    }

    fn create_exclusive(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        verifier: CreateVerifier,
    ) -> Answer<Entry> {
        let name = name.to_vec();
        self.call(async move |pool| {
            let made = pool
                .make(caller, parent.into(), &name, BirthKind::Regular, mode, Some(verifier))
                .await;
            if made != Err(Errno::EEXIST) {
                return made;
            }
            let entry = pool.look_up(parent.into(), &name).await?;
            if verifier.has_made(&entry.attr) {
                return Ok(entry);
            }
            pool.member.held().forget(entry.attr.inode.into(), 1);
            Err(Errno::EEXIST)
        })
    }

    fn mkdir(&self, caller: Caller, parent: InodeNumber, name: &[u8], mode: u32) -> Answer<Entry> {
        let name = name.to_vec();
        self.call(async move |pool| {
            let what = BirthKind::Directory;
            pool.entry_once(pool.make(caller, parent.into(), &name, what, mode, None)).await
        })
    }

    fn symlink(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        target: &[u8],
    ) -> Answer<Entry> {
        let (name, target) = (name.to_vec(), target.to_vec());
        self.call(async move |pool| {
            let what = BirthKind::Symlink(target);
            pool.entry_once(pool.make(caller, parent.into(), &name, what, 0o777, None)).await
        })
    }

    fn link(
        &self,
        _caller: Caller,
        inode: InodeNumber,
        new_parent: InodeNumber,
        new_name: &[u8],
    ) -> Answer<Entry> {
        let name = new_name.to_vec();
        self.call(async move |pool| {
            pool.entry_once(pool.link_name(inode.into(), new_parent.into(), &name)).await
        })
    }

    fn unlink(&self, _caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let name = name.to_vec();
        self.call(async move |pool| pool.once(pool.remove(parent.into(), &name, false)).await)
    }

    fn rmdir(&self, _caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let name = name.to_vec();
        self.call(async move |pool| pool.once(pool.remove(parent.into(), &name, true)).await)
    }

    fn rename(
        &self,
        _caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        new_parent: InodeNumber,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> Answer<()> {
        let (name, new_name) = (name.to_vec(), new_name.to_vec());
        self.call(async move |pool| {
            let (from, to) = ((parent.into(), &name[..]), (new_parent.into(), &new_name[..]));
            pool.once(pool.rename_name(from, to, flags)).await
        })
    }

    fn open(&self, _caller: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened> {
        self.call(async move |pool| pool.open_file(inode.into(), flags).await)
    }

    fn create(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
    ) -> Answer<(Entry, Opened)> {
        let name = name.to_vec();
        self.call(async move |pool| {
            pool.create_once(caller, parent.into(), &name, mode, flags).await
        })
    }

    fn read(&self, inode: InodeNumber, handle: Handle, offset: u64, len: u32) -> Answer<Bytes> {
        self.call(async move |pool| pool.read_file(inode.into(), handle, offset, len).await)
    }

    fn write(
        &self,
        writer: Writer,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        data: Bytes,
    ) -> Answer<u32> {
        self.call(async move |pool| {
            let write = || pool.write_file(writer, inode.into(), handle, offset, data.clone());
            pool.with_share(inode.into(), write).await
        })
    }

    fn fsync(&self, inode: InodeNumber, handle: Handle, data_only: bool) -> Answer<()> {
        self.call(async move |pool| pool.sync_file(inode.into(), handle, data_only).await)
    }

    fn seek(&self, inode: InodeNumber, handle: Handle, offset: u64, to: SeekTo) -> Answer<u64> {
        self.call(async move |pool| {
            let (file, _) = pool.opened_file(inode.into(), handle)?;
            let found = pool.member.disk.seek(&file, offset, to).await;
            pool.note_seen(inode.into());
            found
        })
    }

    fn fallocate(
        &self,
        _caller: Caller,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        len: u64,
        mode: i32,
    ) -> Answer<()> {
        self.call(async move |pool| pool.allocate(inode.into(), handle, offset, len, mode).await)
    }

    fn close(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.call(async move |pool| pool.close_file(inode.into(), handle).await)
    }

    fn opendir(&self, _caller: Caller, inode: InodeNumber) -> Answer<Opened> {
        self.call(async move |pool| pool.open_directory(inode.into()).await)
    }

    fn readdir(
        &self,
        inode: InodeNumber,
        handle: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Answer<Vec<DirEntry>> {
        self.call(async move |pool| {
            pool.list(inode.into(), handle, cookie, limit, with_entries).await
        })
    }

    fn closedir(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.call(async move |pool| pool.member.held().close(inode.into(), handle, None))
    }

    fn fsyncdir(&self, _inode: InodeNumber, _handle: Handle, _data_only: bool) -> Answer<()> {
        self.call(async move |pool| pool.member.sync_changes().await)
    }

    fn persist(&self, inodes: &[InodeNumber]) -> Answer<()> {
        let ids: Vec<FileId> = inodes.iter().map(|inode| FileId::from(*inode)).collect();
        self.call(async move |pool| pool.persist_files(&ids).await)
    }

    fn sync(&self) -> Answer<()> {
        self.call(async move |pool| {
            pool.member.mend_and_sync_members().await?;
            pool.member.checkpoint().await
        })
    }

    fn statfs(&self, inode: InodeNumber) -> Answer<StatFs> {
        self.call(async move |pool| {
            let own = pool.member.room_of_all().await?;
            if pool.member.has_quotas() {
                let limits = pool.member.limited_above(inode.into())?;
                if !limits.is_empty() {
                    let tightest = pool.member.quotas().tightest(&limits);
                    return Ok(limited(own, tightest));
                }
            }
            match pool.siblings() {
                // Any other file says where there is room for it: in its group.
                Some(siblings) if inode == InodeNumber::ROOT => {
                    Ok(with_others(own, pool.group(), &siblings.rooms()))
                }
                _ => Ok(own),
            }
        })
    }

    fn getxattr(&self, inode: InodeNumber, name: &[u8]) -> Answer<Bytes> {
        let name = name.to_vec();
        self.call(async move |pool| pool.attribute(inode.into(), &name).await)
    }

    fn listxattr(&self, inode: InodeNumber) -> Answer<Vec<Bytes>> {
        self.call(async move |pool| pool.attribute_names(inode.into()).await)
    }

    fn setxattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        name: &[u8],
        value: Bytes,
        flags: XattrFlags,
    ) -> Answer<()> {
        let name = name.to_vec();
        self.call(async move |pool| {
            pool.once(pool.set_attribute(caller, inode.into(), &name, &value, flags)).await
        })
    }

    fn removexattr(&self, _caller: Caller, inode: InodeNumber, name: &[u8]) -> Answer<()> {
        let name = name.to_vec();
        self.call(async move |pool| pool.once(pool.remove_attribute(inode.into(), &name)).await)
    }
}

fn begin_counting<D: Disk>(member: &Arc<PoolMember<D>>) {
    member.env.spawn(Box::pin(keep_counted(Arc::downgrade(member))));
}

/// Counts what files take of limits when the pool is opened, and when that is not sure any more, as long as it is at work.
async fn keep_counted<D: Disk>(member: Weak<PoolMember<D>>) {
    let mut looks = 0;
    loop {
        looks += 1;
        let env = {
            let Some(member) = member.upgrade().filter(|member| !member.has_failed()) else {
                return;
            };
            if looks % LOOKS_A_COUNT == 0 {
                member.quotas().want_count();
            }
            let is_due = member.quotas().is_count_due();
            if is_due && member.count_for_quotas().await.is_err() {
                return;
            }
            member.env.clone()
        };
        sleep(&*env, COUNT_LOOK_EVERY).await;
    }
}

/// The room of a file's group, as far as the limits of the directories above it leave that.
fn limited(own: StatFs, tightest: Option<(QuotaRow, QuotaRow)>) -> StatFs {
    let Some((bytes, files)) = tightest else { return own };
    let mut room = own;
    if bytes.limit.bytes != u64::MAX {
        let unit = u64::from(own.block_size_bytes).max(1);
        let left = (bytes.left().bytes / unit).min(own.blocks_available);
        room.blocks = bytes.used_by_all().bytes.div_ceil(unit).saturating_add(left);
        (room.blocks_free, room.blocks_available) = (left, left);
    }
    if files.limit.files != u64::MAX {
        let left = files.left().files.min(own.files_free);
        room.files = files.used_by_all().files.saturating_add(left);
        room.files_free = left;
    }
    room
}

/// The room of a group, and of all others as far as it is known. Files are counted of its own alone.
fn with_others(own: StatFs, group: GroupNumber, rooms: &[GroupRoom]) -> StatFs {
    let mut sum = own;
    let unit = u64::from(own.block_size_bytes).max(1);
    for room in rooms.iter().filter(|room| room.group != group) {
        sum.blocks = sum.blocks.saturating_add(room.size / unit);
        sum.blocks_free = sum.blocks_free.saturating_add(room.free / unit);
        sum.blocks_available = sum.blocks_available.saturating_add(room.free / unit);
    }
    sum
}
