//! The calls of a mount; `listing` finds names, `handles` files by their handles.

mod handles;
mod listing;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_env::timeout;
use atoll_vfs::{
    Answer, AttrReply, Caller, CreateVerifier, DirEntry, Entry, Errno, FileKind, FileSystem,
    Handle, InodeNumber, OpenFlags, Opened, PersistentHandle, RenameFlags, SeekTo, SetAttr, StatFs,
    Writer, XattrFlags,
};
use bytes::Bytes;

use self::listing::Listed;
use super::tree::{Birth, Loaded, MAX_LINKS, Stop, Tree};
use super::{FlushError, Shared, WriteOptions};
use crate::blocks::error::{BlockError, LoadError};
use crate::blocks::read_pieces::{Readers, seek_to};
use crate::counted::counted;
use crate::handle_table::GENERATION;
use crate::room;

/// How long names and attributes may be believed: only this mount changes them. A day, since some
/// kernels overflow on more.
const FOREVER: Duration = Duration::from_secs(24 * 60 * 60);

/// How long a call may take; a process that waits for a mount cannot be killed. Guess.
const CALL_LIMIT: Duration = Duration::from_secs(60);

/// How often a call fetches something stored before it is given up. A rename needs a name, its
/// place in the table of links and the same of the name it replaces; each may change meanwhile.
const MAX_LOADS: usize = 64;

/// Changed names kept in memory before a flush begins: each costs some hundred bytes.
const MAX_NAMES: u64 = 100_000;

/// The attribute of the root directory that says whether the mount works, and why not.
const STATUS_XATTR: &[u8] = b"user.atoll.status";

/// See the module `write`.
#[derive(Clone)]
pub struct WritableFs {
    pub(super) shared: Arc<Shared>,
    readers: Arc<Readers>,
}

pub(super) enum Fault {
    Errno(Errno),
    Block(BlockError),
}

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Fault {
        Fault::Errno(errno)
    }
}

impl From<BlockError> for Fault {
    fn from(error: BlockError) -> Fault {
        Fault::Block(error)
    }
}

impl From<LoadError> for Fault {
    fn from(error: LoadError) -> Fault {
        match error {
            LoadError::Block(error) => Fault::Block(error),
            LoadError::Swap(why) => {
                tracing::error!("{why}");
                Fault::Errno(Errno::EIO)
            }
        }
    }
}

impl From<FlushError> for Fault {
    fn from(error: FlushError) -> Fault {
        Fault::Errno(error.errno())
    }
}

impl WritableFs {
    pub(super) fn of(shared: Arc<Shared>) -> WritableFs {
        let WriteOptions { read_ahead_bytes, cache_bytes, .. } = shared.options;
        let readers = Readers::new(shared.cache.clone(), read_ahead_bytes, cache_bytes);
        WritableFs { shared, readers: Arc::new(readers) }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Flushes everything and lets another mount write. Called once no call is made any more. What
    /// cannot be flushed is in the spool.
    pub async fn end(&self) -> Result<(), FlushError> {
        self.shared.has_ended.store(true, Ordering::Release);
        let ended = self.write_and_resign().await;
        if let Some(spool) = &self.shared.spool {
            spool.finish().await;
        }
        ended
    }

    async fn write_and_resign(&self) -> Result<(), FlushError> {
        // Another mount may write as soon as this one has resigned.
        if self.shared.has_resigned().await {
            return self.shared.keep().await;
        }
        let flushed = self.shared.flushed(None).await;
        match &flushed {
            // The next mount tries again.
            Err(FlushError::LeftOut { .. }) if self.shared.has_spooled().await => {}
            _ => flushed.clone()?,
        }
        self.shared.resign(flushed.is_err()).await?;
        self.shared.keep().await.and(flushed)
    }

    /// Where changes lie that an earlier mount has left and that could not be made again, in the
    /// spool's directory.
    pub fn set_aside(&self) -> Option<String> {
        self.shared.set_aside.lock().expect("no holder of this lock panics").clone()
    }

    /// The newest version that this mount has put.
    pub async fn version(&self) -> u64 {
        self.shared.head.lock().await.block.version
    }

    /// Checks the state in memory.
    ///
    /// # Panics
    /// If it contradicts itself.
    pub fn check_invariants(&self) {
        self.shared.tree().check_invariants();
    }

    /// Changed bytes in memory.
    pub fn held_bytes(&self) -> u64 {
        self.shared.tree().held_bytes()
    }

    /// How many files and directories are in memory.
    pub fn files_in_memory(&self) -> usize {
        self.shared.tree().len()
    }

    /// The names whose files differ from the ring's, by path, and whether they mean something now.
    pub async fn changed_names(&self) -> Result<Vec<(Vec<u8>, bool)>, Errno> {
        let (mut all, linked) = self.shared.tree().changed_names();
        if !linked.is_empty() {
            all.extend(self.names_of(&linked).await?.into_iter().map(|path| (path, true)));
        }
        all.sort();
        Ok(all)
    }

    /// Runs a call on the tree; what it needs is fetched.
    pub(super) async fn on_tree<T>(
        &self,
        mut call: impl FnMut(&mut Tree, &Loaded) -> Result<T, Stop>,
    ) -> Result<T, Fault> {
        let mut loaded = Loaded::default();
        for _ in 0..MAX_LOADS {
            let done = {
                let mut tree = self.shared.tree();
                let done = call(&mut tree, &loaded);
                tree.settle();
                self.shared.keep_records(&mut tree);
                self.keep_moved(&mut tree);
                done
            };
            match done {
                Ok(value) => return Ok(value),
                Err(Stop::Errno(errno)) => return Err(errno.into()),
                Err(Stop::Need(need)) => self.shared.load(need, &mut loaded).await?,
            }
        }
        tracing::warn!("a call needed more than {MAX_LOADS} blocks");
        Err(Errno::EIO.into())
    }

    /// Runs a call that changes something.
    async fn change<T>(
        &self,
        call: impl FnMut(&mut Tree, &Loaded) -> Result<T, Stop>,
    ) -> Result<T, Fault> {
        self.shared.check_fence()?;
        if self.is_full(1) {
            self.shared.free_spool().await;
        }
        match self.is_full(1) {
            true => self.shared.flushed_while(|| self.is_full(1)).await?,
            false => self.shared.make_room().await?,
        }
        self.take_away(call).await
    }

    /// Runs a call that brings no data. Where the ring has no room for what is held, removing and
    /// cutting files must not wait for room.
    async fn take_away<T>(
        &self,
        call: impl FnMut(&mut Tree, &Loaded) -> Result<T, Stop>,
    ) -> Result<T, Fault> {
        self.shared.check_fence()?;
        if let Some(spool) = &self.shared.spool {
            spool.room().await;
        }
        if self.is_full(2) {
            self.shared.flushed_while(|| self.is_full(2)).await?;
        }
        let done = self.on_tree(call).await?;
        if self.is_full(1) {
            self.shared.free_spool().await;
        }
        Ok(done)
    }

    /// A file that is left out takes no more data, until it can be stored. One of which a block is lost
    /// takes some, since that is mended by overwriting it; others keep room beside it.
    async fn check_left_out(&self, inode: InodeNumber) -> Result<(), Fault> {
        match self.shared.check_left_out(Some(inode.0)) {
            Err(error) if error.is_lost() && !self.is_full(1) && !self.shared.holds_half() => {
                Ok(())
            }
            Err(_) => Ok(self.shared.flushed(Some(inode.0)).await?),
            Ok(()) => Ok(()),
        }
    }

    /// Whether so many times as much waits for the ring as may, names in memory or records on disk.
    fn is_full(&self, times: u64) -> bool {
        let spooled = self.shared.spool.as_ref().map_or(0, |spool| spool.bytes());
        spooled >= self.shared.options.max_spool_bytes.saturating_mul(times)
            || self.shared.tree().unflushed_names() >= MAX_NAMES * times
    }

    fn answer<T, W>(&self, work: impl FnOnce(WritableFs) -> W) -> Answer<T>
    where
        T: Send + 'static,
        W: Future<Output = Result<T, Fault>> + Send + 'static,
    {
        let env = self.shared.env.clone();
        let work = work(self.clone());
        Box::pin(async move {
            match timeout(&*env, CALL_LIMIT, work).await {
                Ok(Ok(value)) => Ok(value),
                Ok(Err(Fault::Errno(errno))) => Err(errno),
                Ok(Err(Fault::Block(error))) => {
                    let error = error.at(b"");
                    tracing::warn!("{error}");
                    Err(error.errno())
                }
                Err(_) => Err(Errno::ETIMEDOUT),
            }
        })
    }

    /// The reply for a file of which a lookup was counted.
    fn entry(&self, tree: &Tree, inode: u64) -> Result<Entry, Stop> {
        let attr = tree.attr(inode)?;
        Ok(Entry { attr, generation: GENERATION, name_ttl: FOREVER, attr_ttl: FOREVER })
    }

    fn make(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        birth: Birth,
        mode: u32,
    ) -> Answer<Entry> {
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move {
            let now = fs.shared.now();
            fs.change(|tree, loaded| {
                let place = (parent.0, &name[..]);
                let inode = tree.make(caller, place, birth.clone(), mode, now, loaded)?;
                fs.entry(tree, inode)
            })
            .await
        })
    }

    fn status(&self) -> String {
        if let Err(fenced) = self.shared.check_fence() {
            return fenced.to_string();
        }
        let (held, changes) = {
            let tree = self.shared.tree();
            (tree.held_bytes(), tree.changes())
        };
        let spooled = self.shared.spool.as_ref().and_then(|spool| spool.failure());
        let trouble = self.shared.trouble.lock().expect("no holder of this lock panics").clone();
        let mut status = match trouble {
            Some(error @ FlushError::LeftOut { .. }) if spooled.is_none() => {
                let mended = if error.is_lost() {
                    "Save the file as a whole, or cut or remove it".to_owned()
                } else {
                    let when = self.shared.when_room_is_back();
                    format!("Remove it or other files, or give nodes more disk: {when}")
                };
                format!(
                    "{error}; its new contents wait in the spool and are tried again every half \
                     minute, all else is on the ring. {mended}"
                )
            }
            trouble => waiting(held, changes, trouble.map(|trouble| trouble.to_string())),
        };
        if let Some(error) = spooled {
            status +=
                &format!("; nothing is spooled any more, close(2) waits for the ring: {error}");
        }
        if let Some(name) = self.set_aside() {
            status += &format!("; what an earlier mount had not written lies in {name}");
        }
        status
    }
}

impl FileSystem for WritableFs {
    fn lookup(&self, _: Caller, parent: InodeNumber, name: &[u8]) -> Answer<Entry> {
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move {
            fs.on_tree(|tree, loaded| {
                let inode = tree.lookup(parent.0, &name, loaded)?;
                fs.entry(tree, inode)
            })
            .await
        })
    }

    fn parent(&self, _: Caller, inode: InodeNumber) -> Answer<Entry> {
        self.answer(move |fs| async move {
            fs.on_tree(|tree, _| {
                let parent = tree.parent(inode.0)?;
                fs.entry(tree, parent)
            })
            .await
        })
    }

    fn handle_of(&self, inode: InodeNumber) -> Answer<PersistentHandle> {
        self.answer(move |fs| async move { fs.handle(inode.0).await })
    }

    fn by_handle(&self, _: Caller, handle: &PersistentHandle) -> Answer<Entry> {
        let number = handle.number();
        self.answer(move |fs| async move {
            let (inode, generation) = number?;
            if generation != GENERATION {
                return Err(Errno::ESTALE.into());
            }
            fs.hold_number(inode.0).await?;
            fs.on_tree(|tree, _| fs.entry(tree, inode.0)).await
        })
    }

    fn missing_ttl(&self) -> Duration {
        FOREVER
    }

    fn forget(&self, inode: InodeNumber, count: u64) {
        self.shared.tree().forget(inode.0, count);
    }

    fn getattr(&self, inode: InodeNumber, _: Option<Handle>) -> Answer<AttrReply> {
        self.answer(move |fs| async move {
            let attr = fs.on_tree(|tree, _| tree.attr(inode.0)).await?;
            Ok(AttrReply { attr, ttl: FOREVER })
        })
    }

    fn setattr(
        &self,
        _: Caller,
        inode: InodeNumber,
        _: Option<Handle>,
        changes: SetAttr,
    ) -> Answer<AttrReply> {
        self.answer(move |fs| async move {
            let now = fs.shared.now();
            let changed = fs.take_away(|tree, loaded| {
                tree.set(inode.0, changes, now, loaded)?;
                tree.attr(inode.0)
            });
            Ok(AttrReply { attr: changed.await?, ttl: FOREVER })
        })
    }

    fn readlink(&self, inode: InodeNumber) -> Answer<Bytes> {
        self.answer(move |fs| async move { fs.on_tree(|tree, _| tree.target(inode.0)).await })
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
        self.make(caller, parent, name, birth, mode)
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
        self.answer(move |fs| async move {
            let now = fs.shared.now();
            fs.change(|tree, loaded| {
                let place = (parent.0, &name[..]);
                let inode = match tree.make(caller, place, Birth::File, mode, now, loaded) {
                    Ok(inode) => {
                        tree.set(inode, verifier.changes(), now, loaded)?;
                        inode
                    }
                    Err(Stop::Errno(Errno::EEXIST)) => {
                        let inode = tree.lookup(parent.0, &name, loaded)?;
                        if !verifier.has_made(&tree.attr(inode)?) {
                            tree.forget(inode, 1);
                            return Err(Errno::EEXIST.into());
                        }
                        inode
                    }
                    Err(stop) => return Err(stop),
                };
                fs.entry(tree, inode)
            })
            .await
        })
    }

    fn mkdir(&self, caller: Caller, parent: InodeNumber, name: &[u8], mode: u32) -> Answer<Entry> {
        self.make(caller, parent, name, Birth::Directory, mode)
    }

    fn symlink(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        target: &[u8],
    ) -> Answer<Entry> {
        let birth = Birth::Symlink(Bytes::copy_from_slice(target));
        self.make(caller, parent, name, birth, 0o777)
    }

    fn link(
        &self,
        _: Caller,
        inode: InodeNumber,
        new_parent: InodeNumber,
        new_name: &[u8],
    ) -> Answer<Entry> {
        let name = Bytes::copy_from_slice(new_name);
        self.answer(move |fs| async move {
            let now = fs.shared.now();
            fs.change(|tree, loaded| {
                tree.link(inode.0, (new_parent.0, &name), now, loaded)?;
                fs.entry(tree, inode.0)
            })
            .await
        })
    }

    fn unlink(&self, _: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move {
            let now = fs.shared.now();
            fs.take_away(|tree, loaded| tree.unlink(parent.0, &name, now, loaded)).await
        })
    }

    fn rmdir(&self, _: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move {
            let now = fs.shared.now();
            fs.take_away(|tree, loaded| tree.rmdir(parent.0, &name, now, loaded)).await
        })
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
        self.answer(move |fs| async move {
            let now = fs.shared.now();
            fs.change(|tree, loaded| {
                tree.rename((parent.0, &name), (new_parent.0, &new_name), flags, now, loaded)
            })
            .await
        })
    }

    fn open(&self, _: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened> {
        self.answer(move |fs| async move {
            let now = fs.shared.now();
            let open =
                |tree: &mut Tree, loaded: &Loaded| tree.open_file(inode.0, flags, now, loaded);
            let handle = match flags.writes() || flags.has(OpenFlags::TRUNCATE) {
                true => fs.change(open).await?,
                false => fs.on_tree(open).await?,
            };
            Ok(opened(handle))
        })
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
        self.answer(move |fs| async move {
            let now = fs.shared.now();
            fs.change(|tree, loaded| {
                let place = (parent.0, &name[..]);
                let inode = match tree.lookup(parent.0, &name, loaded) {
                    Ok(inode) if flags.has(OpenFlags::EXCLUSIVE) => {
                        tree.forget(inode, 1);
                        return Err(Errno::EEXIST.into());
                    }
                    Ok(inode) => inode,
                    Err(Stop::Errno(Errno::ENOENT)) => {
                        tree.make(caller, place, Birth::File, mode, now, loaded)?
                    }
                    Err(stop) => return Err(stop),
                };
                let opening = tree.open_file(inode, flags, now, loaded);
                if opening.is_err() {
                    // The call is made again, or fails.
                    tree.forget(inode, 1);
                }
                let handle = opening?;
                Ok((fs.entry(tree, inode)?, opened(handle)))
            })
            .await
        })
    }

    fn read(&self, inode: InodeNumber, handle: Handle, offset: u64, len: u32) -> Answer<Bytes> {
        self.answer(move |fs| async move {
            for _ in 0..MAX_LOADS {
                let (pieces, stored) =
                    fs.on_tree(|tree, _| tree.read(inode.0, handle.0, offset, len)).await?;
                let swap = fs.shared.swap();
                let found = fs.readers.assemble(pieces, stored, handle.0, len, swap).await?;
                if let Some(bytes) = found {
                    return Ok(bytes);
                }
            }
            Err(Errno::EIO.into())
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
        self.answer(move |fs| async move {
            let now = fs.shared.now();
            fs.check_left_out(inode).await?;
            fs.change(|tree, loaded| {
                tree.write(writer, (inode.0, handle.0), offset, &data, now, loaded)
            })
            .await
        })
    }

    fn flush(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.answer(move |fs| async move {
            fs.shared.check_fence()?;
            if fs.on_tree(|tree, _| tree.is_writable(inode.0, handle.0)).await? {
                fs.shared.kept(inode.0).await?;
            }
            Ok(())
        })
    }

    fn fsync(&self, inode: InodeNumber, _: Handle, _: bool) -> Answer<()> {
        self.answer(move |fs| async move { Ok(fs.shared.flushed(Some(inode.0)).await?) })
    }

    fn fsyncdir(&self, inode: InodeNumber, handle: Handle, data_only: bool) -> Answer<()> {
        self.fsync(inode, handle, data_only)
    }

    fn persist(&self, _: &[InodeNumber]) -> Answer<()> {
        self.answer(|fs| async move {
            match &fs.shared.spool {
                Some(spool) if spool.synced().await.is_ok() => Ok(()),
                _ => Ok(fs.shared.flushed(None).await?),
            }
        })
    }

    fn sync(&self) -> Answer<()> {
        self.answer(|fs| async move { Ok(fs.shared.flushed(None).await?) })
    }

    fn seek(&self, inode: InodeNumber, handle: Handle, offset: u64, to: SeekTo) -> Answer<u64> {
        self.answer(move |fs| async move {
            let layout = |at| fs.on_tree(move |tree, _| tree.layout(inode.0, handle.0, at));
            seek_to(&fs.shared.cache, offset, to, layout).await
        })
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
        self.answer(move |fs| async move {
            let now = fs.shared.now();
            fs.change(|tree, loaded| {
                tree.fallocate((inode.0, handle.0), (offset, len), mode, now, loaded)
            })
            .await
        })
    }

    fn close(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.readers.close(handle.0);
        self.answer(
            move |fs| async move { fs.on_tree(|tree, _| tree.close(inode.0, handle.0)).await },
        )
    }

    fn opendir(&self, _: Caller, inode: InodeNumber) -> Answer<Opened> {
        self.answer(move |fs| async move {
            let handle = fs.on_tree(|tree, _| tree.open_directory(inode.0)).await?;
            Ok(Opened { handle: Handle(handle), keep_cache: false, direct_io: false })
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
        self.answer(move |fs| async move {
            let open = fs
                .on_tree(|tree, _| match cookie {
                    0 => tree.rewind_directory(inode.0, handle.0),
                    _ => tree.opened_directory(inode.0, handle.0),
                })
                .await?;
            let mut entries = Vec::new();
            let mut cookie = cookie;
            while entries.is_empty() {
                let listed = fs.names_from(&open, cookie, limit).await?;
                let Some(last) = listed.last() else { break };
                cookie = last.cookie;
                for Listed { name, kind, inode: changed, cookie } in listed {
                    let found = fs
                        .on_tree(|tree, loaded| {
                            let child = tree.lookup(inode.0, &name, loaded)?;
                            let entry = fs.entry(tree, child)?;
                            if !with_entries {
                                tree.forget(child, 1);
                            }
                            Ok(entry)
                        })
                        .await;
                    let entry = match found {
                        Ok(entry) => entry,
                        Err(Fault::Errno(Errno::ENOENT | Errno::ESTALE)) if with_entries => {
                            continue;
                        }
                        Err(_) => {
                            let number = InodeNumber(changed.unwrap_or(u64::MAX));
                            entries.push(DirEntry {
                                name,
                                kind,
                                inode: number,
                                cookie,
                                entry: None,
                            });
                            continue;
                        }
                    };
                    let kept = with_entries.then_some(entry);
                    let inode = entry.attr.inode;
                    entries.push(DirEntry { name, kind, inode, cookie, entry: kept });
                }
            }
            Ok(entries)
        })
    }

    fn closedir(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.answer(
            move |fs| async move { fs.on_tree(|tree, _| tree.close(inode.0, handle.0)).await },
        )
    }

    fn statfs(&self, _: InodeNumber) -> Answer<StatFs> {
        let shared = self.shared.clone();
        Box::pin(async move {
            let room = shared.last_room.ask(&shared.env, &*shared.blocks).await;
            let totals = shared.tree().totals();
            let files = totals.files.saturating_add(totals.dirs).saturating_add(totals.symlinks);
            Ok(StatFs {
                files: 1 << 40,
                files_free: (1u64 << 40).saturating_sub(files),
                max_links: MAX_LINKS,
                ..room::sizes(room, totals.bytes, 4096)
            })
        })
    }

    fn getxattr(&self, inode: InodeNumber, name: &[u8]) -> Answer<Bytes> {
        if inode == InodeNumber::ROOT && name == STATUS_XATTR {
            let status = Bytes::from(self.status());
            return Box::pin(async move { Ok(status) });
        }
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move {
            let all = fs.on_tree(|tree, loaded| tree.xattrs(inode.0, loaded)).await?;
            Ok(all.get(&name).cloned().ok_or(Errno::ENODATA)?)
        })
    }

    fn listxattr(&self, inode: InodeNumber) -> Answer<Vec<Bytes>> {
        self.answer(move |fs| async move {
            let all = fs.on_tree(|tree, loaded| tree.xattrs(inode.0, loaded)).await?;
            Ok(all.keys().cloned().collect())
        })
    }

    fn setxattr(
        &self,
        _: Caller,
        inode: InodeNumber,
        name: &[u8],
        value: Bytes,
        flags: XattrFlags,
    ) -> Answer<()> {
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move {
            let now = fs.shared.now();
            fs.change(|tree, loaded| {
                tree.set_xattr(inode.0, &name, value.clone(), flags, now, loaded)
            })
            .await
        })
    }

    fn removexattr(&self, _: Caller, inode: InodeNumber, name: &[u8]) -> Answer<()> {
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move {
            let now = fs.shared.now();
            fs.change(|tree, loaded| tree.remove_xattr(inode.0, &name, now, loaded)).await
        })
    }
}

fn opened(handle: u64) -> Opened {
    Opened { handle: Handle(handle), keep_cache: true, direct_io: false }
}

/// What is not on the ring, and why, for the mount's status.
fn waiting(held_bytes: u64, changes: u64, trouble: Option<String>) -> String {
    let parts = [(held_bytes, "byte", "bytes"), (changes, "change", "changes")];
    let parts = parts.into_iter().filter(|(count, ..)| *count > 0);
    let parts = parts.map(|(count, one, many)| counted(count, one, many));
    let waits = parts.collect::<Vec<_>>().join(" and ");
    let verb = if held_bytes + changes == 1 { "waits" } else { "wait" };
    match (trouble, &waits[..]) {
        (None, "") => "ok".into(),
        (None, waits) => format!("ok; not on the ring yet: {waits}"),
        (Some(trouble), "") => format!("the ring could not be written last: {trouble}"),
        (Some(trouble), waits) => format!("{waits} {verb} for the ring: {trouble}"),
    }
}

#[cfg(test)]
mod tests {
    use super::waiting;

    #[test]
    fn a_status_counts_what_waits_as_people_do() {
        let trouble = || Some("no node".to_owned());
        assert_eq!(waiting(0, 0, None), "ok");
        assert_eq!(waiting(1, 0, None), "ok; not on the ring yet: 1 byte");
        assert_eq!(waiting(1, 0, trouble()), "1 byte waits for the ring: no node");
        assert_eq!(waiting(1, 1, trouble()), "1 byte and 1 change wait for the ring: no node");
        assert_eq!(waiting(9, 2, trouble()), "9 bytes and 2 changes wait for the ring: no node");
        assert_eq!(waiting(0, 0, trouble()), "the ring could not be written last: no node");
    }
}
