//! A volume as a read-only [`FileSystem`], which a mount serves.
//!
//! Which version a call sees: `lookup`, `getattr` of a directory and `opendir` see the newest
//! (within the volume's `max_age`), an open directory shows the version it was opened in, and a
//! file always its own ([`inodes`]). So the kernel may cache names for the rest of `max_age`, and
//! contents and attributes of files without limit.
//!
//! With handles ([`VolumeFs::with_handles`]) a file is its path: it has the attributes of the newest
//! version, an open keeps the contents of its own, and nothing is cached for longer than names are.
//!
//! A published tree has no owners: everything belongs to the user who mounts. A volume that was
//! written through a mount has them.

mod handles;
mod inodes;

use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_dht::GetError;
use atoll_env::{Env, timeout};
use atoll_vfs::{
    Answer, Attr, AttrReply, Caller, DirEntry, Entry, Errno, FileKind, FileSystem, Handle,
    InodeNumber, OpenFlags, Opened, PersistentHandle, SeekTo, StatFs, check_name,
};
use bytes::Bytes;

use self::inodes::{Inodes, Known};
use super::read::error::shown_path;
use super::read::snapshot::{Snapshot, joined, read_xattrs};
use super::read::{ReadError, Volume};
use crate::blocks::ahead::ReadAhead;
use crate::blocks::directory;
use crate::blocks::error::BlockError;
use crate::blocks::file::File;
use crate::format::{Content, DirectoryEntry, DirectoryRef};
use crate::handle_table::{GENERATION, HandleTable};

/// How long attributes that never change may be believed: a day, since some kernels
/// overflow on more.
const FOREVER: Duration = Duration::from_secs(24 * 60 * 60);

/// The attribute of the root directory that says whether the mount works, and why not. It is
/// not listed, so that copies do not take it along.
const STATUS_XATTR: &[u8] = b"user.atoll.status";

/// How long a call may take. Each block has a deadline of its own, but a call may need
/// several, one after the other; a process that waits for a mount cannot be killed. Guess.
const CALL_LIMIT: Duration = Duration::from_secs(60);

/// A volume, as the kernel sees it.
#[derive(Clone)]
pub struct VolumeFs {
    shared: Arc<Shared>,
}

struct Shared {
    env: Env,
    volume: Arc<Volume>,
    uid: u32,
    gid: u32,
    /// Shows owners as the volume has them, where it has any.
    shows_owners: bool,
    /// Where files are by number, if they have handles.
    handles: Option<Arc<HandleTable>>,
    inodes: Mutex<Inodes>,
}

/// What a handle is of.
enum Open {
    File(OpenFile),
    Directory(OpenDirectory),
}

#[derive(Clone)]
struct OpenFile {
    file: File,
    ahead: Arc<Mutex<ReadAhead>>,
}

#[derive(Clone)]
struct OpenDirectory {
    entry: DirectoryEntry,
    directory: DirectoryRef,
    snapshot: Arc<Snapshot>,
}

/// What went wrong in one call.
enum Fault {
    Errno(Errno),
    Block(Box<BlockError>),
}

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Fault {
        Fault::Errno(errno)
    }
}

impl From<BlockError> for Fault {
    fn from(error: BlockError) -> Fault {
        Fault::Block(Box::new(error))
    }
}

impl VolumeFs {
    /// Serves `volume`. Files whose owners the volume does not say belong to `uid` and `gid`.
    pub fn new(env: Env, volume: Arc<Volume>, uid: u32, gid: u32) -> VolumeFs {
        let snapshot = volume.current();
        let inodes = Mutex::new(Inodes::new(snapshot.root.entry(), snapshot.version));
        let (shows_owners, handles) = (true, None);
        let shared = Shared { env, volume, uid, gid, shows_owners, handles, inodes };
        VolumeFs { shared: Arc::new(shared) }
    }

    /// The same; everything appears as owned by the user and group given, also where the volume
    /// says otherwise.
    pub fn with_one_owner(env: Env, volume: Arc<Volume>, uid: u32, gid: u32) -> VolumeFs {
        let mut fs = VolumeFs::new(env, volume, uid, gid);
        fs.shared_mut().shows_owners = false;
        fs
    }

    /// The same; files have handles, which `table` makes last over restarts.
    ///
    /// # Panics
    /// If it was cloned.
    #[must_use]
    pub fn with_handles(mut self, table: Arc<HandleTable>) -> VolumeFs {
        let shared = self.shared_mut();
        shared.handles = Some(table);
        shared.inodes().by_path();
        self
    }

    fn shared_mut(&mut self) -> &mut Shared {
        Arc::get_mut(&mut self.shared).expect("it is not shared yet")
    }

    /// How many inode numbers the kernel holds, and how many files and directories it has
    /// open.
    pub fn held(&self) -> (usize, usize) {
        let inodes = self.shared.inodes();
        (inodes.table.len(), inodes.table.opens().count())
    }

    /// Runs a call; a block that is missing or bad is reported here, once, with its path.
    fn answer<T, W>(
        &self,
        inode: InodeNumber,
        name: Option<&[u8]>,
        work: impl FnOnce(Arc<Shared>) -> W,
    ) -> Answer<T>
    where
        T: Send + 'static,
        W: Future<Output = Result<T, Fault>> + Send + 'static,
    {
        let shared = self.shared.clone();
        let name = name.map(Bytes::copy_from_slice);
        let work = work(shared.clone());
        Box::pin(async move {
            let Ok(result) = timeout(&*shared.env, CALL_LIMIT, work).await else {
                let path = shown_path(&shared.inodes().path(inode));
                tracing::warn!(volume = ?shared.volume.id(), path, "a call took too long");
                return Err(Errno::ETIMEDOUT);
            };
            match result {
                Ok(value) => Ok(value),
                Err(Fault::Errno(errno)) => Err(errno),
                Err(Fault::Block(error)) => {
                    let mut path = shared.inodes().path(inode);
                    if let Some(name) = name {
                        path = joined(&path, &name);
                    }
                    let error = shared.volume.explained(error.at(&path)).await;
                    match &error {
                        // Said once for all that fails while it lasts, where it is noticed.
                        ReadError::Fetch { source: GetError::Unavailable { .. }, .. } => {
                            tracing::debug!(volume = ?shared.volume.id(), "{error}");
                        }
                        _ => tracing::warn!(volume = ?shared.volume.id(), "{error}"),
                    }
                    Err(error.errno())
                }
            }
        })
    }
}

impl Shared {
    fn inodes(&self) -> MutexGuard<'_, Inodes> {
        self.inodes.lock().expect("no holder of this lock panics")
    }

    /// What `inode` is in the newest version; contents are what they always were. A path that is
    /// gone, or leads to another kind of file is [`Errno::ESTALE`], which makes the kernel look its path
    /// up again.
    async fn entry(&self, inode: InodeNumber) -> Result<(DirectoryEntry, Arc<Snapshot>), Fault> {
        let snapshot = self.volume.snapshot().await;
        let known = {
            let mut inodes = self.inodes();
            if !inodes.is_root_of(snapshot.version) {
                let root = snapshot.root.entry();
                inodes.update(InodeNumber::ROOT.0, &root, snapshot.version);
            }
            inodes.known(inode, snapshot.version).ok_or(Errno::ESTALE)?
        };
        let (mut entry, names) = match known {
            Known::Content(entry) => return Ok((entry, snapshot)),
            Known::Path { above, names } => (above, names),
        };
        for (number, name, kind) in names {
            let Content::Directory(directory) = entry.content else {
                return Err(Errno::ESTALE.into());
            };
            let found = snapshot.find(&directory, &name).await?;
            entry = found.filter(|found| found.kind() == kind).ok_or(Errno::ESTALE)?;
            self.inodes().update(number, &entry, snapshot.version);
        }
        Ok((entry, snapshot))
    }

    async fn directory(
        &self,
        inode: InodeNumber,
    ) -> Result<(DirectoryEntry, DirectoryRef, Arc<Snapshot>), Fault> {
        let (entry, snapshot) = self.entry(inode).await?;
        match entry.content {
            Content::Directory(directory) => Ok((entry, directory, snapshot)),
            _ => Err(Errno::ENOTDIR.into()),
        }
    }

    /// What a name means in the newest version, counted as one lookup.
    async fn look_up(
        &self,
        parent: InodeNumber,
        name: &[u8],
    ) -> Result<(InodeNumber, DirectoryEntry, Arc<Snapshot>), Fault> {
        let (_, directory, snapshot) = self.directory(parent).await?;
        let entry = snapshot.find(&directory, name).await?.ok_or(Errno::ENOENT)?;
        let inode = self.inodes().enter(parent, &entry, snapshot.version);
        Ok((inode, entry, snapshot))
    }

    fn attr(&self, inode: InodeNumber, entry: &DirectoryEntry) -> Attr {
        let snapshot = self.volume.current();
        let owner = entry.owner.filter(|_| self.shows_owners);
        let (nlink, blocks_512) = match &entry.content {
            Content::Directory(directory) => {
                (u32::try_from(directory.subdirectories).unwrap_or(u32::MAX).saturating_add(2), 0)
            }
            Content::Regular { blocks_512, .. } => {
                (entry.owner.map_or(1, |owner| owner.links), *blocks_512)
            }
            _ => (entry.owner.map_or(1, |owner| owner.links), 0),
        };
        Attr {
            inode,
            kind: entry.kind(),
            mode: entry.mode,
            nlink,
            uid: owner.map_or(self.uid, |owner| owner.uid),
            gid: owner.map_or(self.gid, |owner| owner.gid),
            rdev: entry.rdev(),
            size_bytes: entry.size_bytes(),
            blocks_512,
            block_size_bytes: 1 << snapshot.root.block_size_log2,
            atime: entry.owner.map_or(entry.mtime, |owner| owner.atime),
            mtime: entry.mtime,
            ctime: entry.owner.map_or(entry.mtime, |owner| owner.ctime),
        }
    }

    fn attr_ttl(&self, entry: &DirectoryEntry) -> Duration {
        match self.inodes().is_content(entry.kind()) {
            true => FOREVER,
            false => self.volume.fresh_for(),
        }
    }

    /// An entry under a number whose lookup was counted. `name_ttl` is of when the entry
    /// was found.
    fn found(&self, inode: InodeNumber, entry: &DirectoryEntry, name_ttl: Duration) -> Entry {
        let attr_ttl = match self.inodes().is_content(entry.kind()) {
            true => FOREVER,
            false => name_ttl,
        };
        Entry { attr: self.attr(inode, entry), generation: GENERATION, name_ttl, attr_ttl }
    }

    /// How long what was found in `snapshot` may be believed: not at all once there is a
    /// newer one.
    fn ttl(&self, snapshot: &Snapshot) -> Duration {
        let fresh_for = self.volume.fresh_for();
        if self.volume.current().version == snapshot.version { fresh_for } else { Duration::ZERO }
    }

    fn open_file(&self, inode: InodeNumber, handle: Handle) -> Result<OpenFile, Fault> {
        match self.inodes().table.opened(inode.0, handle.0)? {
            Open::File(open) => Ok(open.clone()),
            Open::Directory(_) => Err(Errno::EBADF.into()),
        }
    }

    fn open_directory(&self, inode: InodeNumber, handle: Handle) -> Result<OpenDirectory, Fault> {
        match self.inodes().table.opened(inode.0, handle.0)? {
            Open::Directory(open) => Ok(open.clone()),
            Open::File(_) => Err(Errno::EBADF.into()),
        }
    }

    fn read_ahead(&self, open: &OpenFile, offset: u64, len: u32) {
        let Some(shape) = open.file.shape().filter(|shape| !shape.is_inline()) else { return };
        let cache_bytes = self.volume.options().cache_bytes;
        // Twice the window: while half is on its way, there is more to ask for, or the window
        // would not learn that it may grow.
        let window_bytes = open.file.window_bytes().saturating_mul(2);
        let limit = self.volume.options().read_ahead_bytes.min(cache_bytes / 4).min(window_bytes);
        let plan = {
            let mut ahead = open.ahead.lock().expect("no holder of this lock panics");
            ahead.on_read(offset, u64::from(len), limit, shape.size_bytes)
        };
        if let Some((from, upto)) = plan {
            let size = shape.block_size_bytes();
            open.file.prefetch(from / size..upto.div_ceil(size));
        }
    }
}

impl FileSystem for VolumeFs {
    fn lookup(&self, _: Caller, parent: InodeNumber, name: &[u8]) -> Answer<Entry> {
        let wanted = check_name(name).map(|()| Bytes::copy_from_slice(name));
        self.answer(parent, Some(name), |shared| async move {
            let (inode, entry, snapshot) = shared.look_up(parent, &wanted?).await?;
            Ok(shared.found(inode, &entry, shared.ttl(&snapshot)))
        })
    }

    fn parent(&self, _: Caller, inode: InodeNumber) -> Answer<Entry> {
        self.answer(inode, None, |shared| async move {
            let parent = shared.inodes().parent(inode).ok_or(Errno::ESTALE)?;
            let (entry, _, snapshot) = shared.directory(parent).await?;
            shared.inodes().table.look_up(parent.0);
            Ok(shared.found(parent, &entry, shared.ttl(&snapshot)))
        })
    }

    fn handle_of(&self, inode: InodeNumber) -> Answer<PersistentHandle> {
        self.answer(inode, None, move |shared| async move { shared.handle(inode).await })
    }

    fn by_handle(&self, _: Caller, handle: &PersistentHandle) -> Answer<Entry> {
        let number = handle.number();
        self.answer(InodeNumber::ROOT, None, |shared| async move {
            let (inode, generation) = number?;
            if generation != GENERATION {
                return Err(Errno::ESTALE.into());
            }
            let entry = shared.hold_number(inode).await?;
            Ok(shared.found(inode, &entry, shared.volume.fresh_for()))
        })
    }

    fn missing_ttl(&self) -> Duration {
        self.shared.volume.fresh_for()
    }

    fn forget(&self, inode: InodeNumber, count: u64) {
        self.shared.inodes().forget(inode, count);
    }

    fn getattr(&self, inode: InodeNumber, handle: Option<Handle>) -> Answer<AttrReply> {
        self.answer(inode, None, move |shared| async move {
            let opened = handle.and_then(|handle| shared.open_directory(inode, handle).ok());
            let entry = match opened {
                Some(open) => open.entry,
                None => shared.entry(inode).await?.0,
            };
            Ok(AttrReply { attr: shared.attr(inode, &entry), ttl: shared.attr_ttl(&entry) })
        })
    }

    fn readlink(&self, inode: InodeNumber) -> Answer<Bytes> {
        self.answer(inode, None, move |shared| async move {
            match shared.entry(inode).await?.0.content {
                Content::Symlink(target) => Ok(target),
                _ => Err(Errno::EINVAL.into()),
            }
        })
    }

    fn open(&self, _: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened> {
        self.answer(inode, None, move |shared| async move {
            let (entry, snapshot) = shared.entry(inode).await?;
            let (size_bytes, hash) = match entry.content {
                Content::Regular { size_bytes, inode, .. } => (size_bytes, inode),
                Content::Directory(_) => return Err(Errno::EISDIR.into()),
                Content::Symlink(_) => return Err(Errno::ELOOP.into()),
                Content::Special { .. } | Content::Linked { .. } => {
                    return Err(Errno::ENXIO.into());
                }
            };
            if flags.writes() || flags.has(OpenFlags::TRUNCATE) {
                return Err(Errno::EROFS.into());
            }
            let file = File::open(&snapshot.cache, hash, size_bytes).await?;
            let mut inodes = shared.inodes();
            let open = Open::File(OpenFile { file, ahead: Arc::default() });
            let handle = Handle(inodes.table.open(inode.0, open)?);
            let keep_cache = inodes.is_content(FileKind::Regular);
            Ok(Opened { handle, keep_cache, direct_io: false })
        })
    }

    fn read(&self, inode: InodeNumber, handle: Handle, offset: u64, len: u32) -> Answer<Bytes> {
        self.answer(inode, None, move |shared| async move {
            let open = shared.open_file(inode, handle)?;
            shared.read_ahead(&open, offset, len);
            Ok(open.file.read(offset, len).await?)
        })
    }

    fn seek(&self, inode: InodeNumber, handle: Handle, offset: u64, to: SeekTo) -> Answer<u64> {
        self.answer(inode, None, move |shared| async move {
            let open = shared.open_file(inode, handle)?;
            let size = open.file.shape().map_or(0, |shape| shape.size_bytes);
            if offset >= size {
                return Err(Errno::ENXIO.into());
            }
            let found = open.file.seek(offset, to == SeekTo::Data).await?;
            if to == SeekTo::Data && found >= size {
                return Err(Errno::ENXIO.into());
            }
            Ok(found)
        })
    }

    fn close(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        let closed = self.shared.inodes().table.close(inode.0, handle.0, |_, _| {});
        Box::pin(ready(closed.map(drop)))
    }

    fn opendir(&self, _: Caller, inode: InodeNumber) -> Answer<Opened> {
        self.answer(inode, None, move |shared| async move {
            let (entry, directory, snapshot) = shared.directory(inode).await?;
            let open = Open::Directory(OpenDirectory { entry, directory, snapshot });
            let handle = Handle(shared.inodes().table.open(inode.0, open)?);
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
        self.answer(inode, None, move |shared| async move {
            let open = shared.open_directory(inode, handle)?;
            let cache = &open.snapshot.cache;
            // A cookie is the number of entries before the next one.
            let mut next = cookie;
            let mut out = Vec::new();
            while out.len() < limit {
                let found = match directory::leaf_at(cache, &open.directory, next).await {
                    // The next call reports the error; the lookups counted so far must arrive.
                    Err(_) if !out.is_empty() => break,
                    found => found.map_err(BlockError::from)?,
                };
                let Some((leaf, from)) = found else { break };
                let ttl = shared.ttl(&open.snapshot);
                for entry in leaf.entries().iter().skip(from).take(limit - out.len()) {
                    let entry = match open.snapshot.resolved(entry.clone()).await {
                        Err(_) if !out.is_empty() => return Ok(out),
                        entry => &entry?,
                    };
                    next += 1;
                    let number = if with_entries {
                        shared.inodes().enter(inode, entry, open.snapshot.version)
                    } else {
                        shared.inodes().number(inode, entry)
                    };
                    out.push(DirEntry {
                        name: entry.name.clone(),
                        kind: entry.kind(),
                        inode: number,
                        cookie: next,
                        entry: with_entries.then(|| shared.found(number, entry, ttl)),
                    });
                }
            }
            Ok(out)
        })
    }

    fn closedir(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.close(inode, handle)
    }

    fn statfs(&self, _: InodeNumber) -> Answer<StatFs> {
        let snapshot = self.shared.volume.current();
        let root = &snapshot.root;
        let block_size_bytes = 1u32 << root.block_size_log2;
        let statfs = StatFs {
            block_size_bytes,
            blocks: root.bytes.div_ceil(u64::from(block_size_bytes)),
            files: root.files.saturating_add(root.dirs).saturating_add(root.symlinks),
            ..StatFs::default()
        };
        Box::pin(async move { Ok(statfs) })
    }

    fn getxattr(&self, inode: InodeNumber, name: &[u8]) -> Answer<Bytes> {
        if inode == InodeNumber::ROOT && name == STATUS_XATTR {
            // From memory: also while nothing else can be read.
            let status = self.shared.volume.status().to_string();
            return Box::pin(async move { Ok(Bytes::from(status)) });
        }
        let wanted = Bytes::copy_from_slice(name);
        self.answer(inode, None, move |shared| async move {
            let (entry, snapshot) = shared.entry(inode).await?;
            let all = read_xattrs(&snapshot.cache, &entry).await?;
            let found = all.into_iter().find(|(name, _)| *name == wanted);
            Ok(found.ok_or(Errno::ENODATA)?.1)
        })
    }

    fn listxattr(&self, inode: InodeNumber) -> Answer<Vec<Bytes>> {
        self.answer(inode, None, move |shared| async move {
            let (entry, snapshot) = shared.entry(inode).await?;
            let all = read_xattrs(&snapshot.cache, &entry).await?;
            Ok(all.into_iter().map(|(name, _)| name).collect())
        })
    }
}
