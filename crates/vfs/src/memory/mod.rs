//! A read-write file system in memory: the reference that the conformance kit is checked
//! against, and what front ends are tested with.
//!
//! It has all that the trait offers but access control lists and inode flags: hard links, special
//! files, extended attributes, holes, unlinked open files, locks, persistent handles. One lock
//! guards its tables; bytes are copied outside it. Nothing is durable.
//!
//! [`MemoryFs::another_view`] makes a second file system over the same files, as another node's
//! mount of a shared volume: each view's front end is told of the changes made through the others.

mod content;
mod state;

use std::fmt;
use std::future::ready;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::Env;
use bytes::Bytes;

use crate::{
    Answer, AttrReply, Caller, CreateVerifier, DirEntry, Entry, Errno, FileKind, FileSystem,
    FileTime, Handle, InodeNumber, Invalidation, InvalidationQueue, LockTable, Locks,
    MAX_NAME_BYTES, OpenFlags, Opened, PersistentHandle, RenameFlags, SeekTo, SetAttr, StatFs,
    Writer, XattrFlags,
};
use content::Content;
use state::{Birth, Body, Open, State};

/// The longest extended attribute (Linux `XATTR_SIZE_MAX`).
const MAX_XATTR_BYTES: usize = 64 << 10;

/// A file system in memory. See the module.
pub struct MemoryFs {
    shared: Arc<Shared>,
    /// What other views have changed.
    invalidations: Arc<InvalidationQueue>,
    /// Whether there are no other views.
    is_only_view: bool,
}

/// What all views have in common.
struct Shared {
    state: Mutex<State>,
    env: Env,
    read_only: AtomicBool,
    locks: LockTable,
    views: Mutex<Vec<Weak<InvalidationQueue>>>,
}

impl fmt::Debug for MemoryFs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryFs").finish_non_exhaustive()
    }
}

fn answer<T: Send + 'static>(result: Result<T, Errno>) -> Answer<T> {
    Box::pin(ready(result))
}

fn now(env: &Env) -> FileTime {
    FileTime::from_unix_ms(env.unix_ms())
}

impl MemoryFs {
    /// An empty file system; its root belongs to user 0. Times come from `env`.
    pub fn new(env: Env) -> MemoryFs {
        MemoryFs::view(Arc::new(Shared {
            state: Mutex::new(State::new(now(&env))),
            env,
            read_only: AtomicBool::new(false),
            locks: LockTable::default(),
            views: Mutex::default(),
        }))
    }

    fn view(shared: Arc<Shared>) -> MemoryFs {
        let invalidations = Arc::<InvalidationQueue>::default();
        let mut views = shared.views.lock().expect("no holder of this lock panics");
        views.push(Arc::downgrade(&invalidations));
        drop(views);
        MemoryFs { shared, invalidations, is_only_view: false }
    }

    /// Lets the front end know that nothing changes but by its own calls.
    pub fn only_view(mut self) -> MemoryFs {
        self.is_only_view = true;
        self
    }

    /// A file system over the same files, whose front end hears of the changes made through this
    /// one, and the other way round.
    ///
    /// # Panics
    /// If this one is the [`only_view`](Self::only_view).
    pub fn another_view(&self) -> MemoryFs {
        assert!(!self.is_only_view, "the only view has no others");
        MemoryFs::view(self.shared.clone())
    }

    /// Lets front ends believe entries and attributes for `ttl`, and keep file contents
    /// from open to open if `keep_cache`. (Default: one second, no.)
    pub fn caching(self, ttl: Duration, keep_cache: bool) -> MemoryFs {
        let mut state = self.locked();
        state.ttl = ttl;
        state.keep_cache = keep_cache;
        drop(state);
        self
    }

    /// Refuses writes beyond `capacity_bytes` with [`Errno::ENOSPC`].
    pub fn capacity(self, capacity_bytes: u64) -> MemoryFs {
        self.locked().capacity_bytes = capacity_bytes;
        self
    }

    /// The locks that are held.
    pub fn lock_table(&self) -> &LockTable {
        &self.shared.locks
    }

    /// From now on refuses every change, or allows them again.
    pub fn set_read_only(&self, read_only: bool) {
        self.shared.read_only.store(read_only, Ordering::Release);
    }

    /// Checks link counts, parents and that no file is kept that nothing leads to.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn check_invariants(&self) {
        self.locked().check_invariants();
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().expect("no holder of this lock panics")
    }

    /// Runs a change, unless read-only.
    fn change<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut State, FileTime) -> Result<T, Errno>,
    ) -> Answer<T> {
        if self.shared.read_only.load(Ordering::Acquire) {
            return answer(Err(Errno::EROFS));
        }
        let mut state = self.locked();
        let outcome = work(&mut state, now(&self.shared.env));
        let changed = std::mem::take(&mut state.changed);
        drop(state);
        self.tell_other_views(&changed);
        answer(outcome)
    }

    fn tell_other_views(&self, changed: &[Invalidation]) {
        let mut views = self.shared.views.lock().expect("no holder of this lock panics");
        views.retain(|view| view.strong_count() > 0);
        for view in views.iter().filter_map(Weak::upgrade) {
            if !Arc::ptr_eq(&view, &self.invalidations) {
                changed.iter().cloned().for_each(|change| view.push(change));
            }
        }
    }

    fn make(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        birth: Birth,
    ) -> Answer<Entry> {
        self.change(|state, now| {
            let inode = state.make(caller, parent, name, birth, now)?;
            state.entry(inode)
        })
    }
}

impl FileSystem for MemoryFs {
    fn lookup(&self, _caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<Entry> {
        let mut state = self.locked();
        answer(state.find(parent, name).and_then(|inode| state.entry(inode)))
    }

    fn parent(&self, _caller: Caller, inode: InodeNumber) -> Answer<Entry> {
        let mut state = self.locked();
        answer(state.parent_of(inode).and_then(|parent| state.entry(parent)))
    }

    fn handle_of(&self, inode: InodeNumber) -> Answer<PersistentHandle> {
        // No number is used again.
        let handle = self.locked().node(inode).map(|_| PersistentHandle::of_number(inode, 0));
        answer(handle)
    }

    fn by_handle(&self, _caller: Caller, handle: &PersistentHandle) -> Answer<Entry> {
        answer(handle.number().and_then(|(inode, _)| self.locked().entry(inode)))
    }

    fn locks(&self) -> Option<Arc<dyn Locks>> {
        Some(Arc::new(self.shared.locks.clone()))
    }

    fn invalidations(&self) -> Option<Arc<InvalidationQueue>> {
        (!self.is_only_view).then(|| self.invalidations.clone())
    }

    fn forget(&self, inode: InodeNumber, count: u64) {
        self.locked().forget(inode, count);
    }

    fn getattr(&self, inode: InodeNumber, _handle: Option<Handle>) -> Answer<AttrReply> {
        let state = self.locked();
        answer(state.attr(inode).map(|attr| AttrReply { attr, ttl: state.ttl }))
    }

    fn setattr(
        &self,
        _caller: Caller,
        inode: InodeNumber,
        _handle: Option<Handle>,
        changes: SetAttr,
    ) -> Answer<AttrReply> {
        self.change(|state, now| {
            state.set(inode, changes, now)?;
            Ok(AttrReply { attr: state.attr(inode)?, ttl: state.ttl })
        })
    }

    fn readlink(&self, inode: InodeNumber) -> Answer<Bytes> {
        let state = self.locked();
        answer(state.node(inode).and_then(|node| match &node.body {
            Body::Symlink(target) => Ok(target.clone()),
            _ => Err(Errno::EINVAL),
        }))
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
        let body = match kind {
            FileKind::Regular => Body::File(Content::default()),
            FileKind::Directory | FileKind::Symlink => return answer(Err(Errno::EINVAL)),
            _ => Body::Special,
        };
        self.make(caller, parent, name, Birth { body, kind, mode, rdev })
    }

    fn create_exclusive(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        verifier: CreateVerifier,
    ) -> Answer<Entry> {
        self.change(|state, now| {
            if let Ok(inode) = state.find(parent, name)
                && verifier.has_made(&state.attr(inode)?)
            {
                return state.entry(inode);
            }
            let body = Body::File(Content::default());
            let birth = Birth { body, kind: FileKind::Regular, mode, rdev: 0 };
            let inode = state.make(caller, parent, name, birth, now)?;
            let attr = &mut state.node_mut(inode)?.attr;
            (attr.atime, attr.mtime) = verifier.times();
            state.entry(inode)
        })
    }

    fn mkdir(&self, caller: Caller, parent: InodeNumber, name: &[u8], mode: u32) -> Answer<Entry> {
        let body = Body::directory(parent);
        self.make(caller, parent, name, Birth { body, kind: FileKind::Directory, mode, rdev: 0 })
    }

    fn symlink(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        target: &[u8],
    ) -> Answer<Entry> {
        let body = Body::Symlink(Bytes::copy_from_slice(target));
        let birth = Birth { body, kind: FileKind::Symlink, mode: 0o777, rdev: 0 };
        self.make(caller, parent, name, birth)
    }

    fn link(
        &self,
        _caller: Caller,
        inode: InodeNumber,
        new_parent: InodeNumber,
        new_name: &[u8],
    ) -> Answer<Entry> {
        self.change(|state, now| {
            state.link(inode, new_parent, new_name, now)?;
            state.entry(inode)
        })
    }

    fn unlink(&self, _caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        self.change(|state, now| state.unlink(parent, name, now))
    }

    fn rmdir(&self, _caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        self.change(|state, now| state.rmdir(parent, name, now))
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
        self.change(|state, now| state.rename((parent, name), (new_parent, new_name), flags, now))
    }

    fn open(&self, _caller: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened> {
        if flags.writes() || flags.has(OpenFlags::TRUNCATE) {
            return self.change(|state, now| state.open_file(inode, flags, now));
        }
        answer(self.locked().open_file(inode, flags, now(&self.shared.env)))
    }

    fn create(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
    ) -> Answer<(Entry, Opened)> {
        self.change(|state, now| {
            let inode = match state.find(parent, name) {
                Ok(_) if flags.has(OpenFlags::EXCLUSIVE) => return Err(Errno::EEXIST),
                Ok(inode) => inode,
                Err(_) => {
                    let body = Body::File(Content::default());
                    let birth = Birth { body, kind: FileKind::Regular, mode, rdev: 0 };
                    state.make(caller, parent, name, birth, now)?
                }
            };
            let opened = state.open_file(inode, flags, now)?;
            Ok((state.entry(inode)?, opened))
        })
    }

    fn read(&self, inode: InodeNumber, handle: Handle, offset: u64, len: u32) -> Answer<Bytes> {
        let state = self.locked();
        let pieces = match (state.opened(inode, handle), state.node(inode).map(|n| &n.body)) {
            (Err(errno), _) | (_, Err(errno)) => return answer(Err(errno)),
            (Ok(Open::File(flags)), Ok(Body::File(content))) if flags.reads() => {
                content.read(offset, len)
            }
            (Ok(_), Ok(Body::Directory { .. })) => return answer(Err(Errno::EISDIR)),
            _ => return answer(Err(Errno::EBADF)),
        };
        drop(state);
        answer(Ok(pieces.assemble()))
    }

    fn write(
        &self,
        writer: Writer,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        data: Bytes,
    ) -> Answer<u32> {
        self.change(|state, now| state.write(writer, inode, handle, offset, &data, now))
    }

    fn seek(&self, inode: InodeNumber, handle: Handle, offset: u64, to: SeekTo) -> Answer<u64> {
        let state = self.locked();
        answer(state.opened(inode, handle).and_then(|_| match &state.node(inode)?.body {
            Body::File(content) => content.seek(offset, to),
            _ => Err(Errno::EINVAL),
        }))
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
        self.change(|state, now| state.fallocate((inode, handle), offset, len, mode, now))
    }

    fn close(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        answer(self.locked().close(inode, handle))
    }

    fn has_lasting_cookies(&self) -> bool {
        true
    }

    fn opendir(&self, _caller: Caller, inode: InodeNumber) -> Answer<Opened> {
        answer(self.locked().open_directory(inode))
    }

    fn readdir(
        &self,
        inode: InodeNumber,
        handle: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Answer<Vec<DirEntry>> {
        answer(self.locked().list(inode, handle, cookie, limit, with_entries))
    }

    fn closedir(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        answer(self.locked().close(inode, handle))
    }

    fn statfs(&self, _inode: InodeNumber) -> Answer<StatFs> {
        const BLOCK_BYTES: u64 = 4096;
        let state = self.locked();
        let blocks = state.capacity_bytes.min(1 << 40) / BLOCK_BYTES;
        let blocks_free = blocks.saturating_sub(state.used_bytes() / BLOCK_BYTES);
        answer(Ok(StatFs {
            block_size_bytes: BLOCK_BYTES as u32,
            blocks,
            blocks_free,
            blocks_available: blocks_free,
            files: state.files() + (1 << 32),
            files_free: 1 << 32,
            max_links: state::MAX_LINKS,
            max_file_bytes: content::MAX_SIZE_BYTES,
            ..StatFs::default()
        }))
    }

    fn getxattr(&self, inode: InodeNumber, name: &[u8]) -> Answer<Bytes> {
        let state = self.locked();
        answer(
            state.node(inode).and_then(|node| node.xattrs.get(name).cloned().ok_or(Errno::ENODATA)),
        )
    }

    fn listxattr(&self, inode: InodeNumber) -> Answer<Vec<Bytes>> {
        let state = self.locked();
        answer(state.node(inode).map(|node| node.xattrs.keys().cloned().collect()))
    }

    fn setxattr(
        &self,
        _caller: Caller,
        inode: InodeNumber,
        name: &[u8],
        value: Bytes,
        flags: XattrFlags,
    ) -> Answer<()> {
        self.change(|state, now| {
            let node = state.node_mut(inode)?;
            if ![&b"user."[..], b"trusted.", b"security."].iter().any(|p| name.starts_with(p)) {
                return Err(Errno::EOPNOTSUPP);
            }
            if name.len() > MAX_NAME_BYTES || name.contains(&0) {
                return Err(Errno::ERANGE);
            }
            if value.len() > MAX_XATTR_BYTES {
                return Err(Errno::E2BIG);
            }
            match node.xattrs.contains_key(name) {
                true if flags.create => return Err(Errno::EEXIST),
                false if flags.replace => return Err(Errno::ENODATA),
                _ => {}
            }
            node.xattrs.insert(Bytes::copy_from_slice(name), value);
            node.attr.ctime = now;
            state.changed.push(Invalidation::Attributes(inode));
            Ok(())
        })
    }

    fn removexattr(&self, _caller: Caller, inode: InodeNumber, name: &[u8]) -> Answer<()> {
        self.change(|state, now| {
            let node = state.node_mut(inode)?;
            node.xattrs.remove(name).ok_or(Errno::ENODATA)?;
            node.attr.ctime = now;
            state.changed.push(Invalidation::Attributes(inode));
            Ok(())
        })
    }
}
