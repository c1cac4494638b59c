//! A file system with one fault, around a sound one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use atoll_env::{BoxFuture, Env, Runtime, TokioRuntime};
use atoll_vfs::kit::{Features, Restart, RestartSubject, SharedSubject, Subject, Tree};
use atoll_vfs::memory::MemoryFs;
use atoll_vfs::{
    Answer, AttrReply, Caller, CreateVerifier, DirEntry, Entry, Errno, FALLOC_PUNCH_HOLE,
    FALLOC_ZERO_RANGE, FileKind, FileLock, FileSystem, Handle, InodeNumber, Invalidation,
    InvalidationQueue, LockKind, LockOwner, LockRange, LockTable, Locks, OpenFlags, Opened,
    PersistentHandle, RenameFlags, SeekTo, SetAttr, SetTime, StatFs, Writer, XattrFlags,
};
use bytes::Bytes;

use crate::reference::filled;

/// What is wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    Nothing,
    LosesTheLastByte,
    FailsPastTheEnd,
    ShortReads,
    MixesUpParallelReads,
    WrongLinkCount,
    UnstableNumbers,
    SkipsAtPageBoundaries,
    RepeatsAtPageBoundaries,
    IgnoresTheLimit,
    ListsDots,
    HugeCookies,
    ListsWrongKinds,
    OmitsEntries,
    MissingIsEio,
    AcceptsLongNames,
    AcceptsAnyNumber,
    TimesWithoutNanoseconds,
    DropsSetIdBits,
    CutsXattrs,
    AllowsWrites,
    OpensForWriting,
    SaysEverythingIsAHole,
    Panics,
    Hangs,
    IgnoresExclusive,
    TellsOfOneName,
    TellsOfShorterFiles,
    KeepsHalfAVerifier,
    TakesAnyVerifier,
    ForgetsVerifiers,
    AppendsAtTheOffset,
    AppendsMappedPages,
    KeepsBytesCutOff,
    IgnoresNoReplace,
    RemovesFullDirectories,
    ListsLive,
    LosesSetTimes,
    IgnoresTruncate,
    FindsDeletedFilesByHandle,
    FindsNothingByHandle,
    FindsByName,
    LocksExcludeNobody,
    LocksAreAllExclusive,
    UnlocksWholeLocks,
    RefusedUpgradesUnlock,
    WaitsForNoLock,
    ProcessesKeepThemselvesOut,
    TakesLocksAfterInterrupts,
    TellsOfNoBytes,
    TellsOfNoDeletion,
    TellsItself,
    KeepsBytesPunched,
    LengthensWhatItPunches,
}

/// [`MemoryFs`] with a fault.
pub(crate) struct Broken {
    inner: Arc<MemoryFs>,
    fault: Fault,
    calls: AtomicU64,
}

/// The kit's view of it; a read-only one holds one tree for all.
pub(crate) struct BrokenSubject {
    pub fault: Fault,
    pub base: Option<Arc<MemoryFs>>,
}

impl Subject for BrokenSubject {
    fn name(&self) -> String {
        format!("{:?}", self.fault)
    }

    fn features(&self) -> Features {
        Features { read_only: self.base.is_some(), ..Features::FULL }
    }

    fn env(&self) -> Env {
        Arc::new(TokioRuntime::current())
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        Box::pin(async move {
            let inner = match &self.base {
                Some(base) => base.clone(),
                None => filled(&tree, false).await,
            };
            let calls = AtomicU64::new(0);
            Ok(Arc::new(Broken { inner, fault: self.fault, calls }) as Arc<dyn FileSystem>)
        })
    }
}

/// Memory that outlives what is served from it.
struct BrokenLife {
    inner: Arc<MemoryFs>,
    fault: Fault,
    /// Where the next one begins to count calls.
    calls: u64,
}

impl Restart for BrokenLife {
    fn fs(&self) -> Arc<dyn FileSystem> {
        let (inner, calls) = (self.inner.clone(), AtomicU64::new(self.calls));
        Arc::new(Broken { inner, fault: self.fault, calls })
    }

    fn restart(&mut self) -> BoxFuture<'_, Result<(), String>> {
        // The first number of the next one is wrong, if numbers are unstable.
        self.calls = 49;
        Box::pin(async { Ok(()) })
    }
}

impl RestartSubject for BrokenSubject {
    fn start(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Box<dyn Restart>, String>> {
        Box::pin(async move {
            let inner = filled(&tree, false).await;
            Ok(Box::new(BrokenLife { inner, fault: self.fault, calls: 0 }) as Box<dyn Restart>)
        })
    }
}

/// A lock table with a fault.
struct BrokenLocks {
    inner: LockTable,
    fault: Fault,
}

impl Locks for BrokenLocks {
    fn conflict(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
        wanted: FileLock,
    ) -> Answer<Option<FileLock>> {
        self.inner.conflict(inode, owner, wanted)
    }

    fn lock(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
        mut wanted: FileLock,
        waits: bool,
    ) -> Answer<()> {
        match self.fault {
            Fault::LocksExcludeNobody => return answer(Ok(())),
            Fault::LocksAreAllExclusive => wanted.kind = LockKind::Exclusive,
            Fault::ProcessesKeepThemselvesOut => wanted.through = None,
            Fault::WaitsForNoLock => return self.inner.lock(inode, owner, wanted, false),
            Fault::RefusedUpgradesUnlock if !waits => {
                let taken = self.inner.lock(inode, owner, wanted, false);
                let unlocked = self.inner.clone();
                return Box::pin(async move {
                    let taken = taken.await;
                    if taken.is_err() {
                        unlocked.unlock(inode, owner, wanted.range).await?;
                    }
                    taken
                });
            }
            Fault::TakesLocksAfterInterrupts if waits => {
                let (tell, told) = futures_channel::oneshot::channel();
                let taken = self.inner.lock(inode, owner, wanted, true);
                // The task goes on when the call that waits is dropped.
                drop(TokioRuntime::current().spawn(Box::pin(async move {
                    let _ = tell.send(taken.await);
                })));
                return Box::pin(async move { told.await.unwrap_or(Err(Errno::EIO)) });
            }
            _ => {}
        }
        self.inner.lock(inode, owner, wanted, waits)
    }

    fn unlock(&self, inode: InodeNumber, owner: LockOwner, range: LockRange) -> Answer<()> {
        match self.fault {
            Fault::UnlocksWholeLocks => self.inner.unlock(inode, owner, LockRange::WHOLE),
            _ => self.inner.unlock(inode, owner, range),
        }
    }
}

impl SharedSubject for BrokenSubject {
    fn make_two(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<[Arc<dyn FileSystem>; 2], String>> {
        Box::pin(async move {
            let inner = filled(&tree, false).await;
            let views = [Arc::new(inner.another_view()), inner];
            Ok(views.map(|inner| {
                Arc::new(Broken { inner, fault: self.fault, calls: AtomicU64::new(0) })
                    as Arc<dyn FileSystem>
            }))
        })
    }
}

impl Broken {
    fn has(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    /// Every so many calls.
    fn now_and_then(&self, period: u64) -> bool {
        self.calls.fetch_add(1, Ordering::Relaxed) % period == period - 1
    }

    fn spoil(&self, mut entry: Entry) -> Entry {
        if self.has(Fault::UnstableNumbers) && self.now_and_then(50) {
            entry.attr.inode.0 += 1;
        }
        if self.has(Fault::TimesWithoutNanoseconds) {
            entry.attr.mtime.nanos = 0;
        }
        if self.has(Fault::DropsSetIdBits) {
            entry.attr.mode &= 0o777;
        }
        entry
    }
}

fn answer<T: Send + 'static>(result: Result<T, Errno>) -> Answer<T> {
    Box::pin(async move { result })
}

impl FileSystem for Broken {
    fn lookup(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<Entry> {
        if self.has(Fault::Panics) {
            panic!("on purpose");
        }
        if self.has(Fault::Hangs) {
            return Box::pin(std::future::pending());
        }
        let found = self.inner.lookup(caller, parent, name);
        let mut found = futures_util::FutureExt::now_or_never(found).expect("it never waits");
        if self.has(Fault::MissingIsEio) && found == Err(Errno::ENOENT) {
            found = Err(Errno::EIO);
        }
        if self.has(Fault::AcceptsLongNames) && found == Err(Errno::ENAMETOOLONG) {
            found = Err(Errno::ENOENT);
        }
        answer(found.map(|entry| self.spoil(entry)))
    }

    fn parent(&self, caller: Caller, inode: InodeNumber) -> Answer<Entry> {
        self.inner.parent(caller, inode)
    }

    fn handle_of(&self, inode: InodeNumber) -> Answer<PersistentHandle> {
        self.inner.handle_of(inode)
    }

    fn by_handle(&self, caller: Caller, handle: &PersistentHandle) -> Answer<Entry> {
        let found = self.inner.by_handle(caller, handle);
        if self.has(Fault::FindsNothingByHandle) {
            return answer(Err(Errno::ESTALE));
        }
        if self.has(Fault::FindsByName) {
            return self.inner.lookup(caller, InodeNumber::ROOT, b"file");
        }
        if !self.has(Fault::FindsDeletedFilesByHandle) {
            return found;
        }
        // As if its number had been given to another file.
        let other = self.inner.lookup(caller, InodeNumber::ROOT, b"empty");
        Box::pin(async move {
            match found.await {
                Err(Errno::ESTALE) => other.await,
                found => found,
            }
        })
    }

    fn locks(&self) -> Option<Arc<dyn Locks>> {
        let inner = self.inner.lock_table().clone();
        Some(Arc::new(BrokenLocks { inner, fault: self.fault }))
    }

    fn invalidations(&self) -> Option<Arc<InvalidationQueue>> {
        let queue = self.inner.invalidations()?;
        let mut told: Vec<Invalidation> = std::iter::from_fn(|| queue.try_next()).collect();
        for invalidation in &mut told {
            *invalidation = match (self.fault, invalidation.clone()) {
                (Fault::TellsOfNoBytes, Invalidation::Data { inode, .. }) => {
                    Invalidation::Attributes(inode)
                }
                (Fault::TellsOfNoDeletion, Invalidation::Deleted { parent, name, .. }) => {
                    Invalidation::Name { parent, name }
                }
                (_, invalidation) => invalidation,
            };
        }
        told.into_iter().for_each(|invalidation| queue.push(invalidation));
        if self.has(Fault::TellsItself) && self.now_and_then(2) {
            queue.push(Invalidation::Attributes(InodeNumber::ROOT));
        }
        Some(queue)
    }

    fn forget(&self, inode: InodeNumber, count: u64) {
        self.inner.forget(inode, count);
    }

    fn getattr(&self, inode: InodeNumber, handle: Option<Handle>) -> Answer<AttrReply> {
        let inode = match inode {
            InodeNumber(0 | 1_000_000..) if self.has(Fault::AcceptsAnyNumber) => InodeNumber::ROOT,
            inode => inode,
        };
        let wrong = self.has(Fault::WrongLinkCount);
        let reply = self.inner.getattr(inode, handle);
        Box::pin(async move {
            let mut reply = reply.await?;
            reply.attr.nlink += u32::from(wrong);
            Ok(reply)
        })
    }

    fn setattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        handle: Option<Handle>,
        mut changes: SetAttr,
    ) -> Answer<AttrReply> {
        if self.has(Fault::KeepsBytesCutOff) && changes.size_bytes.is_some_and(|size| size > 0) {
            // As if the bytes behind the end were not cut: extending brings one back.
            let inner = self.inner.clone();
            return Box::pin(async move {
                let before = inner.getattr(inode, None).await?.attr.size_bytes;
                let reply = inner.setattr(caller, inode, handle, changes).await?;
                if reply.attr.size_bytes > before {
                    let opened = inner.open(caller, inode, OpenFlags::WRITE).await?;
                    let ghost = Bytes::from_static(b"x");
                    inner.write(Writer::At(caller), inode, opened.handle, before, ghost).await?;
                    inner.close(inode, opened.handle).await?;
                }
                Ok(reply)
            });
        }
        if self.has(Fault::LosesSetTimes) {
            changes.mtime = None;
        }
        self.inner.setattr(caller, inode, handle, changes)
    }

    fn readlink(&self, inode: InodeNumber) -> Answer<Bytes> {
        self.inner.readlink(inode)
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
        self.inner.mknod(caller, parent, name, kind, mode, rdev)
    }

    fn create_exclusive(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        mut verifier: CreateVerifier,
    ) -> Answer<Entry> {
        if self.has(Fault::KeepsHalfAVerifier) {
            verifier.0[..4].fill(0);
        }
        let made = self.inner.create_exclusive(caller, parent, name, mode, verifier);
        let there = self.inner.lookup(caller, parent, name);
        let (fault, inner) = (self.fault, self.inner.clone());
        Box::pin(async move {
            match fault {
                Fault::TakesAnyVerifier => made.await.or(there.await),
                Fault::ForgetsVerifiers => {
                    let entry = made.await?;
                    let now = Some(SetTime::Now);
                    let times = SetAttr { atime: now, mtime: now, ..SetAttr::default() };
                    let attr = inner.setattr(caller, entry.attr.inode, None, times).await?.attr;
                    Ok(Entry { attr, ..entry })
                }
                _ => made.await,
            }
        })
    }

    fn mkdir(&self, caller: Caller, parent: InodeNumber, name: &[u8], mode: u32) -> Answer<Entry> {
        if self.has(Fault::AllowsWrites) {
            return self.inner.lookup(caller, parent, b"empty");
        }
        self.inner.mkdir(caller, parent, name, mode)
    }

    fn symlink(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        target: &[u8],
    ) -> Answer<Entry> {
        self.inner.symlink(caller, parent, name, target)
    }

    fn link(
        &self,
        caller: Caller,
        inode: InodeNumber,
        new_parent: InodeNumber,
        new_name: &[u8],
    ) -> Answer<Entry> {
        self.inner.link(caller, inode, new_parent, new_name)
    }

    fn unlink(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        self.inner.unlink(caller, parent, name)
    }

    fn rmdir(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let removed = self.inner.rmdir(caller, parent, name);
        if self.has(Fault::RemovesFullDirectories) {
            return Box::pin(async move {
                match removed.await {
                    Err(Errno::ENOTEMPTY) => Ok(()),
                    outcome => outcome,
                }
            });
        }
        removed
    }

    fn rename(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        new_parent: InodeNumber,
        new_name: &[u8],
        mut flags: RenameFlags,
    ) -> Answer<()> {
        flags.no_replace &= !self.has(Fault::IgnoresNoReplace);
        self.inner.rename(caller, parent, name, new_parent, new_name, flags)
    }

    fn open(&self, caller: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened> {
        let flags = match self.fault {
            Fault::OpensForWriting => OpenFlags::READ,
            Fault::IgnoresTruncate => OpenFlags(flags.0 & !OpenFlags::TRUNCATE),
            _ => flags,
        };
        self.inner.open(caller, inode, flags)
    }

    fn create(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
    ) -> Answer<(Entry, Opened)> {
        let dropped = if self.has(Fault::IgnoresExclusive) { OpenFlags::EXCLUSIVE } else { 0 };
        self.inner.create(caller, parent, name, mode, OpenFlags(flags.0 & !dropped))
    }

    fn read(&self, inode: InodeNumber, handle: Handle, mut offset: u64, len: u32) -> Answer<Bytes> {
        if self.has(Fault::MixesUpParallelReads) && self.now_and_then(40) {
            offset /= 2;
        }
        let (fault, read) = (self.fault, self.inner.read(inode, handle, offset, len));
        let attr = self.inner.getattr(inode, None);
        Box::pin(async move {
            let (data, size) = (read.await?, attr.await?.attr.size_bytes);
            Ok(match fault {
                Fault::LosesTheLastByte if offset + data.len() as u64 == size => {
                    data.slice(..data.len().saturating_sub(1))
                }
                Fault::FailsPastTheEnd if offset > size => return Err(Errno::EINVAL),
                Fault::ShortReads if data.len() > 65_536 => data.slice(..65_536),
                _ => data,
            })
        })
    }

    fn write(
        &self,
        writer: Writer,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        data: Bytes,
    ) -> Answer<u32> {
        let writer = match (self.fault, writer) {
            (Fault::AppendsAtTheOffset, Writer::AtEnd(caller)) => Writer::At(caller),
            (Fault::AppendsMappedPages, Writer::Mapping) => Writer::AtEnd(Caller::default()),
            _ => writer,
        };
        self.inner.write(writer, inode, handle, offset, data)
    }

    fn fallocate(
        &self,
        caller: Caller,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        len: u64,
        mode: i32,
    ) -> Answer<()> {
        let punches = mode & FALLOC_PUNCH_HOLE != 0;
        // Whole blocks alone.
        if self.has(Fault::KeepsBytesPunched) && punches {
            let (start, end) = (offset.next_multiple_of(4096), (offset + len) / 4096 * 4096);
            if start >= end {
                return answer(Ok(()));
            }
            return self.inner.fallocate(caller, inode, handle, start, end - start, mode);
        }
        if self.has(Fault::LengthensWhatItPunches) && punches {
            return self.inner.fallocate(caller, inode, handle, offset, len, FALLOC_ZERO_RANGE);
        }
        self.inner.fallocate(caller, inode, handle, offset, len, mode)
    }

    fn seek(&self, inode: InodeNumber, handle: Handle, offset: u64, to: SeekTo) -> Answer<u64> {
        if self.has(Fault::SaysEverythingIsAHole) && to == SeekTo::Data {
            return answer(Err(Errno::ENXIO));
        }
        self.inner.seek(inode, handle, offset, to)
    }

    fn close(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.inner.close(inode, handle)
    }

    fn has_lasting_cookies(&self) -> bool {
        self.inner.has_lasting_cookies()
    }

    fn opendir(&self, caller: Caller, inode: InodeNumber) -> Answer<Opened> {
        self.inner.opendir(caller, inode)
    }

    fn readdir(
        &self,
        inode: InodeNumber,
        handle: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Answer<Vec<DirEntry>> {
        let (fault, inner) = (self.fault, self.inner.clone());
        let cookie = match fault {
            Fault::SkipsAtPageBoundaries if cookie > 0 => cookie + 1,
            Fault::RepeatsAtPageBoundaries if cookie > 1 && limit > 1 => cookie - 1,
            Fault::HugeCookies => cookie & u64::from(u32::MAX),
            _ => cookie,
        };
        let limit = if fault == Fault::IgnoresTheLimit { limit.saturating_add(1) } else { limit };
        Box::pin(async move {
            if fault == Fault::ListsLive {
                // The names as they are now, not as they were, by where they stand among these.
                let live = inner.opendir(Caller::default(), inode).await?.handle;
                let all = inner.readdir(inode, live, 0, usize::MAX, with_entries).await;
                inner.closedir(inode, live).await?;
                let numbered = (1..).zip(all?).map(|(cookie, entry)| DirEntry { cookie, ..entry });
                return Ok(numbered.filter(|entry| entry.cookie > cookie).take(limit).collect());
            }
            let mut page = inner.readdir(inode, handle, cookie, limit, with_entries).await?;
            for entry in &mut page {
                match fault {
                    Fault::HugeCookies => entry.cookie |= 1 << 63,
                    Fault::ListsWrongKinds => entry.kind = FileKind::Regular,
                    Fault::OmitsEntries => entry.entry = None,
                    _ => {}
                }
            }
            if let (Fault::ListsDots, 0, Some(first)) = (fault, cookie, page.first().cloned()) {
                let name = Bytes::from_static(b".");
                page[0] = DirEntry { name, kind: FileKind::Directory, inode, ..first };
            }
            Ok(page)
        })
    }

    fn closedir(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.inner.closedir(inode, handle)
    }

    fn statfs(&self, inode: InodeNumber) -> Answer<StatFs> {
        let (fault, figures) = (self.fault, self.inner.statfs(inode));
        Box::pin(async move {
            let mut figures = figures.await?;
            match fault {
                Fault::TellsOfOneName => figures.max_links = 1,
                Fault::TellsOfShorterFiles => figures.max_file_bytes = 1 << 20,
                _ => {}
            }
            Ok(figures)
        })
    }

    fn getxattr(&self, inode: InodeNumber, name: &[u8]) -> Answer<Bytes> {
        let cut = self.has(Fault::CutsXattrs);
        let value = self.inner.getxattr(inode, name);
        Box::pin(async move {
            let value = value.await?;
            Ok(if cut { value.slice(..value.len().min(255)) } else { value })
        })
    }

    fn listxattr(&self, inode: InodeNumber) -> Answer<Vec<Bytes>> {
        self.inner.listxattr(inode)
    }

    fn setxattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        name: &[u8],
        value: Bytes,
        flags: XattrFlags,
    ) -> Answer<()> {
        self.inner.setxattr(caller, inode, name, value, flags)
    }

    fn removexattr(&self, caller: Caller, inode: InodeNumber, name: &[u8]) -> Answer<()> {
        self.inner.removexattr(caller, inode, name)
    }
}
