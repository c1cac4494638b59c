//! One front for all file systems of this crate: it answers a front end's calls
//! ([`atoll_vfs::FileSystem`]) over an engine, which knows one kind of volume.
//!
//! ```text
//! gateway ─► FileSystem ─► mount (calls, deadlines, errno, listings, user.atoll.status) ─► engine
//! ```
//!
//! The engines are the published volume (read-only), the volume that one mount writes, the shared
//! volume, and the past states of a shared volume. Each keeps its inodes and its opens in an
//! [`atoll_vfs::InodeTable`] under its own lock, since most calls need both and its own state
//! together.
//!
//! Invariants:
//!
//! - Each call ends within 60 seconds.
//! - An engine's fault becomes an errno, and is logged, in one place.
//! - A listing never ends with an empty page while names follow.
//! - `user.atoll.status` of the root directory can be read while nothing else can be.
//!
//! It does not know what a volume consists of, which version a call sees, or how long an answer
//! stays true: an engine says all of that.

mod engine;

use std::future::poll_fn;
use std::ops::Deref;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use atoll_env::sleep;
use atoll_vfs::{
    Answer, AttrReply, Caller, CreateVerifier, DirEntry, Entry, Errno, FileKind, FileSystem,
    Handle, InodeNumber, InvalidationQueue, Locks, OpenFlags, Opened, PersistentHandle,
    RenameFlags, SeekTo, SetAttr, StatFs, Writer, XattrFlags,
};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};

pub(crate) use self::engine::{About, Birth, Call, Engine, Found, Listed, OpenId, Place};

/// How long a call may take. Each block has a deadline of its own, but a call may need several, one
/// after the other; a process that waits for a mount cannot be killed. Guess.
pub(crate) const CALL_LIMIT: Duration = Duration::from_secs(60);

/// How long names and attributes may be believed that never change behind the kernel's back: a day,
/// since some kernels overflow on more.
pub(crate) const FOREVER: Duration = Duration::from_secs(24 * 60 * 60);

/// The attribute of the root directory that says whether the mount works, and why not. It is
/// not listed, so that copies do not take it along.
const STATUS_XATTR: &[u8] = b"user.atoll.status";

/// A volume as a file system. Cheap to clone. It dereferences to its engine, for what one kind of
/// volume offers beyond a file system.
pub struct Front<E> {
    engine: Arc<E>,
}

impl<E> Front<E> {
    pub(crate) fn over(engine: E) -> Front<E> {
        Front { engine: Arc::new(engine) }
    }

    /// The engine, before the front is cloned.
    pub(crate) fn engine_mut(&mut self) -> Option<&mut E> {
        Arc::get_mut(&mut self.engine)
    }
}

impl<E> Clone for Front<E> {
    fn clone(&self) -> Front<E> {
        Front { engine: self.engine.clone() }
    }
}

impl<E> Deref for Front<E> {
    type Target = E;

    fn deref(&self) -> &E {
        &self.engine
    }
}

/// Ends a call within the limit, and says what the program is told.
async fn answered<E: Engine, T>(
    engine: &E,
    about: About<'_>,
    call: impl Call<T, E::Fault>,
) -> Result<T, Errno> {
    let mut call = pin!(call);
    // Most calls find all they need in memory: those need no timer.
    let mut timer = None;
    let done = poll_fn(|context| match call.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => {
            let timer = timer.get_or_insert_with(|| sleep(&**engine.env(), CALL_LIMIT));
            timer.as_mut().poll(context).map(|()| None)
        }
    });
    let Some(done) = done.await else {
        engine.report_late(about);
        return Err(Errno::ETIMEDOUT);
    };
    match done {
        Ok(value) => Ok(value),
        Err(fault) => Err(engine.report(about, fault).await),
    }
}

/// The answer of a call of the engine: `answer!(front, about, engine => call)`.
macro_rules! answer {
    ($front:ident, $about:expr, $engine:ident => $call:expr) => {{
        let $engine = $front.engine.clone();
        Box::pin(async move { answered(&*$engine, $about, $call).await })
    }};
}

/// A page of a listing, not empty unless the listing has ended.
async fn page<E: Engine>(
    engine: &E,
    open: OpenId,
    mut cookie: u64,
    limit: usize,
    with_entries: bool,
) -> Result<Vec<DirEntry>, E::Fault> {
    let (directory, _) = open;
    loop {
        let names = engine.names(open, cookie, limit).await?;
        let Some(last) = names.last() else { return Ok(Vec::new()) };
        cookie = last.cookie;
        let mut page = Vec::with_capacity(names.len());
        if E::READS_AT_ONCE > 1 && with_entries {
            let found = stream::iter(names).map(|listed| async move {
                let found = engine.listed(directory, &listed, true).await;
                (listed, found)
            });
            let mut found = pin!(found.buffered(E::READS_AT_ONCE));
            while let Some((listed, found)) = found.next().await {
                page.extend(dir_entry(listed, found));
            }
        } else {
            for listed in names {
                let found = engine.listed(directory, &listed, with_entries).await;
                page.extend(dir_entry(listed, found));
            }
        }
        // Names that are gone since are left out, and an empty answer means the end.
        if !page.is_empty() {
            return Ok(page);
        }
    }
}

fn dir_entry<F>(listed: Listed<F>, found: Found) -> Option<DirEntry> {
    let Listed { name, kind, cookie, .. } = listed;
    let (inode, entry) = match found {
        Found::Entry(entry) => (entry.attr.inode, Some(entry)),
        Found::Number(number) => (InodeNumber(number), None),
        Found::Gone => return None,
    };
    Some(DirEntry { name, kind, inode, cookie, entry })
}

fn make<E: Engine>(
    front: &Front<E>,
    caller: Caller,
    (parent, name): (InodeNumber, &[u8]),
    birth: Birth,
    mode: u32,
) -> Answer<Entry> {
    let name = Bytes::copy_from_slice(name);
    answer!(front, (parent.0, Some(&name)), engine => {
        engine.make(caller, (parent.0, &name), birth, mode)
    })
}

fn remove<E: Engine>(
    front: &Front<E>,
    (parent, name): (InodeNumber, &[u8]),
    is_directory: bool,
) -> Answer<()> {
    let name = Bytes::copy_from_slice(name);
    answer!(front, (parent.0, Some(&name)), engine => {
        engine.remove((parent.0, &name), is_directory)
    })
}

fn change_xattr<E: Engine>(
    front: &Front<E>,
    (inode, name): (InodeNumber, &[u8]),
    value: Option<Bytes>,
    flags: XattrFlags,
) -> Answer<()> {
    let name = Bytes::copy_from_slice(name);
    answer!(front, (inode.0, None), engine => engine.setxattr(inode.0, &name, value, flags))
}

impl<E: Engine> FileSystem for Front<E> {
    fn lookup(&self, _: Caller, parent: InodeNumber, name: &[u8]) -> Answer<Entry> {
        let name = Bytes::copy_from_slice(name);
        answer!(self, (parent.0, Some(&name)), engine => engine.lookup((parent.0, &name)))
    }

    fn parent(&self, _: Caller, inode: InodeNumber) -> Answer<Entry> {
        answer!(self, (inode.0, None), engine => engine.parent(inode.0))
    }

    fn handle_of(&self, inode: InodeNumber) -> Answer<PersistentHandle> {
        answer!(self, (inode.0, None), engine => engine.handle_of(inode.0))
    }

    fn by_handle(&self, _: Caller, handle: &PersistentHandle) -> Answer<Entry> {
        let handle = handle.clone();
        answer!(self, (InodeNumber::ROOT.0, None), engine => engine.by_handle(&handle))
    }

    fn locks(&self) -> Option<Arc<dyn Locks>> {
        self.engine.locks()
    }

    fn invalidations(&self) -> Option<Arc<InvalidationQueue>> {
        self.engine.invalidations()
    }

    fn missing_ttl(&self) -> Duration {
        self.engine.missing_ttl()
    }

    fn forget(&self, inode: InodeNumber, count: u64) {
        self.engine.forget(inode.0, count);
    }

    fn getattr(&self, inode: InodeNumber, handle: Option<Handle>) -> Answer<AttrReply> {
        let handle = handle.map(|handle| handle.0);
        answer!(self, (inode.0, None), engine => engine.getattr(inode.0, handle))
    }

    fn setattr(
        &self,
        _: Caller,
        inode: InodeNumber,
        handle: Option<Handle>,
        changes: SetAttr,
    ) -> Answer<AttrReply> {
        let handle = handle.map(|handle| handle.0);
        answer!(self, (inode.0, None), engine => engine.setattr(inode.0, handle, changes))
    }

    fn readlink(&self, inode: InodeNumber) -> Answer<Bytes> {
        answer!(self, (inode.0, None), engine => engine.readlink(inode.0))
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
        let birth = match kind {
            FileKind::Regular => Birth::File,
            FileKind::Directory | FileKind::Symlink => {
                return Box::pin(async { Err(Errno::EINVAL) });
            }
            kind => Birth::Special(kind, rdev),
        };
        make(self, caller, (parent, name), birth, mode)
    }

    fn create_exclusive(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        verifier: CreateVerifier,
    ) -> Answer<Entry> {
        let name = Bytes::copy_from_slice(name);
        answer!(self, (parent.0, Some(&name)), engine => {
            engine.make_exclusive(caller, (parent.0, &name), mode, verifier)
        })
    }

    fn mkdir(&self, caller: Caller, parent: InodeNumber, name: &[u8], mode: u32) -> Answer<Entry> {
        make(self, caller, (parent, name), Birth::Directory, mode)
    }

    fn symlink(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        target: &[u8],
    ) -> Answer<Entry> {
        let target = Bytes::copy_from_slice(target);
        make(self, caller, (parent, name), Birth::Symlink(target), 0o777)
    }

    fn link(
        &self,
        _: Caller,
        inode: InodeNumber,
        new_parent: InodeNumber,
        new_name: &[u8],
    ) -> Answer<Entry> {
        let name = Bytes::copy_from_slice(new_name);
        answer!(self, (new_parent.0, Some(&name)), engine => {
            engine.link(inode.0, (new_parent.0, &name))
        })
    }

    fn unlink(&self, _: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        remove(self, (parent, name), false)
    }

    fn rmdir(&self, _: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        remove(self, (parent, name), true)
    }

    fn rename(
        &self,
        _: Caller,
        parent: InodeNumber,
        name: &[u8],
        new_parent: InodeNumber,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> Answer<()> {
        let (name, new_name) = (Bytes::copy_from_slice(name), Bytes::copy_from_slice(new_name));
        answer!(self, (parent.0, Some(&name)), engine => {
            engine.rename((parent.0, &name), (new_parent.0, &new_name), flags)
        })
    }

    fn open(&self, caller: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened> {
        answer!(self, (inode.0, None), engine => engine.open(caller, inode.0, flags))
    }

    fn create(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
    ) -> Answer<(Entry, Opened)> {
        let name = Bytes::copy_from_slice(name);
        answer!(self, (parent.0, Some(&name)), engine => {
            engine.create(caller, (parent.0, &name), mode, flags)
        })
    }

    fn read(&self, inode: InodeNumber, handle: Handle, offset: u64, len: u32) -> Answer<Bytes> {
        answer!(self, (inode.0, None), engine => engine.read((inode.0, handle.0), offset, len))
    }

    fn write(
        &self,
        writer: Writer,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        data: Bytes,
    ) -> Answer<u32> {
        answer!(self, (inode.0, None), engine => {
            engine.write(writer, (inode.0, handle.0), offset, &data)
        })
    }

    fn flush(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        answer!(self, (inode.0, None), engine => engine.flush((inode.0, handle.0)))
    }

    fn fsync(&self, inode: InodeNumber, handle: Handle, _: bool) -> Answer<()> {
        answer!(self, (inode.0, None), engine => engine.fsync((inode.0, handle.0)))
    }

    fn seek(&self, inode: InodeNumber, handle: Handle, offset: u64, to: SeekTo) -> Answer<u64> {
        answer!(self, (inode.0, None), engine => engine.seek((inode.0, handle.0), offset, to))
    }

    fn fallocate(
        &self,
        _: Caller,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        len: u64,
        mode: i32,
    ) -> Answer<()> {
        answer!(self, (inode.0, None), engine => {
            engine.fallocate((inode.0, handle.0), (offset, len), mode)
        })
    }

    fn close(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        answer!(self, (inode.0, None), engine => engine.close((inode.0, handle.0)))
    }

    fn opendir(&self, _: Caller, inode: InodeNumber) -> Answer<Opened> {
        answer!(self, (inode.0, None), engine => async {
            let handle = Handle(engine.opendir(inode.0).await?);
            Ok(Opened { handle, keep_cache: false, direct_io: false })
        })
    }

    fn readdir(
        &self,
        inode: InodeNumber,
        handle: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Answer<Vec<DirEntry>> {
        answer!(self, (inode.0, None), engine => {
            page(&*engine, (inode.0, handle.0), cookie, limit, with_entries)
        })
    }

    fn closedir(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        answer!(self, (inode.0, None), engine => engine.closedir((inode.0, handle.0)))
    }

    fn fsyncdir(&self, inode: InodeNumber, _: Handle, _: bool) -> Answer<()> {
        answer!(self, (inode.0, None), engine => engine.fsyncdir(inode.0))
    }

    fn persist(&self, inodes: &[InodeNumber]) -> Answer<()> {
        let inodes = inodes.to_vec();
        answer!(self, (InodeNumber::ROOT.0, None), engine => engine.persist(&inodes))
    }

    fn sync(&self) -> Answer<()> {
        answer!(self, (InodeNumber::ROOT.0, None), engine => engine.sync())
    }

    fn statfs(&self, _: InodeNumber) -> Answer<StatFs> {
        let engine = self.engine.clone();
        Box::pin(async move { Ok(engine.statfs().await) })
    }

    fn getxattr(&self, inode: InodeNumber, name: &[u8]) -> Answer<Bytes> {
        if inode == InodeNumber::ROOT && name == STATUS_XATTR {
            let engine = self.engine.clone();
            return Box::pin(async move { Ok(engine.status().await.into()) });
        }
        let name = Bytes::copy_from_slice(name);
        answer!(self, (inode.0, None), engine => engine.getxattr(inode.0, &name))
    }

    fn listxattr(&self, inode: InodeNumber) -> Answer<Vec<Bytes>> {
        answer!(self, (inode.0, None), engine => engine.listxattr(inode.0))
    }

    fn setxattr(
        &self,
        _: Caller,
        inode: InodeNumber,
        name: &[u8],
        value: Bytes,
        flags: XattrFlags,
    ) -> Answer<()> {
        change_xattr(self, (inode, name), Some(value), flags)
    }

    fn removexattr(&self, _: Caller, inode: InodeNumber, name: &[u8]) -> Answer<()> {
        change_xattr(self, (inode, name), None, XattrFlags::default())
    }
}
