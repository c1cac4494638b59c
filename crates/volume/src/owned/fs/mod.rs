//! A volume that a mount shows and does not change.
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

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_dht::GetError;
use atoll_env::Env;
use atoll_vfs::{
    Attr, AttrReply, Caller, Entry, Errno, FileKind, Handle, InodeNumber, OpenFlags, Opened,
    PersistentHandle, SeekTo, StatFs, check_name,
};
use bytes::Bytes;

use self::inodes::{Inodes, Known};
use super::fault::Fault;
use super::read::error::shown_path;
use super::read::snapshot::{Snapshot, joined, read_xattrs};
use super::read::{ReadError, Volume};
use crate::blocks::ahead::ReadAhead;
use crate::blocks::directory;
use crate::blocks::error::BlockError;
use crate::blocks::file::File;
use crate::format::{Content, DirectoryEntry, DirectoryRef};
use crate::handle_table::{GENERATION, HandleTable};
use crate::mount::{About, Engine, FOREVER, Found, Front, Listed, OpenId, Place};

/// A published volume, or one as it was at a time, read-only.
pub type VolumeFs = Front<PublishedEngine>;

/// What a [`VolumeFs`] is made of.
pub struct PublishedEngine {
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
    Directory(Arc<OpenDirectory>),
}

#[derive(Clone)]
struct OpenFile {
    file: File,
    ahead: Arc<Mutex<ReadAhead>>,
}

struct OpenDirectory {
    entry: DirectoryEntry,
    directory: DirectoryRef,
    snapshot: Arc<Snapshot>,
}

/// A file of a listing: its entry, in which version, and how long that may be believed.
pub(crate) struct ListedFile {
    entry: DirectoryEntry,
    seen: u64,
    ttl: Duration,
}

impl VolumeFs {
    /// Serves `volume`. Files whose owners the volume does not say belong to `uid` and `gid`.
    pub fn new(env: Env, volume: Arc<Volume>, uid: u32, gid: u32) -> VolumeFs {
        let snapshot = volume.current();
        let inodes = Mutex::new(Inodes::new(snapshot.root.entry(), snapshot.version));
        let (shows_owners, handles) = (true, None);
        Front::over(PublishedEngine { env, volume, uid, gid, shows_owners, handles, inodes })
    }

    /// The same; everything appears as owned by the user and group given, also where the volume
    /// says otherwise.
    pub fn with_one_owner(env: Env, volume: Arc<Volume>, uid: u32, gid: u32) -> VolumeFs {
        let mut fs = VolumeFs::new(env, volume, uid, gid);
        fs.engine_mut().expect("it is not shared yet").shows_owners = false;
        fs
    }

    /// The same; files have handles, which `table` makes last over restarts.
    ///
    /// # Panics
    /// If it was cloned.
    #[must_use]
    pub fn with_handles(mut self, table: Arc<HandleTable>) -> VolumeFs {
        let engine = self.engine_mut().expect("it is not shared yet");
        engine.handles = Some(table);
        engine.inodes().by_path();
        self
    }
}

impl PublishedEngine {
    /// How many inode numbers the kernel holds, and how many files and directories it has
    /// open.
    pub fn held(&self) -> (usize, usize) {
        let inodes = self.inodes();
        (inodes.table.len(), inodes.table.opens().count())
    }

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

    /// A directory in the newest version.
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

    fn open_file(&self, (inode, handle): OpenId) -> Result<OpenFile, Fault> {
        match self.inodes().table.opened(inode, handle)? {
            Open::File(open) => Ok(open.clone()),
            Open::Directory(_) => Err(Errno::EBADF.into()),
        }
    }

    fn open_directory(&self, (inode, handle): OpenId) -> Result<Arc<OpenDirectory>, Fault> {
        match self.inodes().table.opened(inode, handle)? {
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

impl Engine for PublishedEngine {
    type Fault = Fault;
    type File = ListedFile;

    fn env(&self) -> &Env {
        &self.env
    }

    async fn report(&self, (inode, name): About<'_>, fault: Fault) -> Errno {
        let error = match fault {
            Fault::Errno(errno) => return errno,
            Fault::Block(error) => error,
        };
        let mut path = self.inodes().path(InodeNumber(inode));
        if let Some(name) = name {
            path = joined(&path, name);
        }
        let error = self.volume.explained(error.at(&path)).await;
        match &error {
            // Said once for all that fails while it lasts, where it is noticed.
            ReadError::Fetch { source: GetError::Unavailable { .. }, .. } => {
                tracing::debug!(volume = ?self.volume.id(), "{error}");
            }
            _ => tracing::warn!(volume = ?self.volume.id(), "{error}"),
        }
        error.errno()
    }

    fn report_late(&self, (inode, _): About<'_>) {
        let path = shown_path(&self.inodes().path(InodeNumber(inode)));
        tracing::warn!(volume = ?self.volume.id(), path, "a call took too long");
    }

    async fn status(&self) -> String {
        self.volume.status().to_string()
    }

    fn missing_ttl(&self) -> Duration {
        self.volume.fresh_for()
    }

    async fn lookup(&self, (parent, name): Place<'_>) -> Result<Entry, Fault> {
        check_name(name)?;
        let (inode, entry, snapshot) = self.look_up(InodeNumber(parent), name).await?;
        Ok(self.found(inode, &entry, self.ttl(&snapshot)))
    }

    async fn parent(&self, inode: u64) -> Result<Entry, Fault> {
        let parent = self.inodes().parent(InodeNumber(inode)).ok_or(Errno::ESTALE)?;
        let (entry, _, snapshot) = self.directory(parent).await?;
        self.inodes().table.look_up(parent.0);
        Ok(self.found(parent, &entry, self.ttl(&snapshot)))
    }

    async fn handle_of(&self, inode: u64) -> Result<PersistentHandle, Fault> {
        self.handle(InodeNumber(inode)).await
    }

    async fn by_handle(&self, handle: &PersistentHandle) -> Result<Entry, Fault> {
        let (inode, generation) = handle.number()?;
        if generation != GENERATION {
            return Err(Errno::ESTALE.into());
        }
        let entry = self.hold_number(inode).await?;
        Ok(self.found(inode, &entry, self.volume.fresh_for()))
    }

    fn forget(&self, inode: u64, count: u64) {
        self.inodes().forget(InodeNumber(inode), count);
    }

    async fn getattr(&self, inode: u64, handle: Option<u64>) -> Result<AttrReply, Fault> {
        let opened = handle.and_then(|handle| self.open_directory((inode, handle)).ok());
        let inode = InodeNumber(inode);
        let entry = match opened {
            Some(open) => open.entry.clone(),
            None => self.entry(inode).await?.0,
        };
        Ok(AttrReply { attr: self.attr(inode, &entry), ttl: self.attr_ttl(&entry) })
    }

    async fn readlink(&self, inode: u64) -> Result<Bytes, Fault> {
        match self.entry(InodeNumber(inode)).await?.0.content {
            Content::Symlink(target) => Ok(target),
            _ => Err(Errno::EINVAL.into()),
        }
    }

    async fn open(&self, _: Caller, inode: u64, flags: OpenFlags) -> Result<Opened, Fault> {
        let (entry, snapshot) = self.entry(InodeNumber(inode)).await?;
        let (size_bytes, hash) = match entry.content {
            Content::Regular { size_bytes, inode, .. } => (size_bytes, inode),
            Content::Directory(_) => return Err(Errno::EISDIR.into()),
            Content::Symlink(_) => return Err(Errno::ELOOP.into()),
            Content::Special { .. } | Content::Linked { .. } => return Err(Errno::ENXIO.into()),
        };
        if flags.writes() || flags.has(OpenFlags::TRUNCATE) {
            return Err(Errno::EROFS.into());
        }
        let file = File::open(&snapshot.cache, hash, size_bytes).await?;
        let mut inodes = self.inodes();
        let open = Open::File(OpenFile { file, ahead: Arc::default() });
        let handle = Handle(inodes.table.open(inode, open)?);
        let keep_cache = inodes.is_content(FileKind::Regular);
        Ok(Opened { handle, keep_cache, direct_io: false })
    }

    async fn read(&self, open: OpenId, offset: u64, len: u32) -> Result<Bytes, Fault> {
        let open = self.open_file(open)?;
        self.read_ahead(&open, offset, len);
        Ok(open.file.read(offset, len).await?)
    }

    async fn seek(&self, open: OpenId, offset: u64, to: SeekTo) -> Result<u64, Fault> {
        let open = self.open_file(open)?;
        let size = open.file.shape().map_or(0, |shape| shape.size_bytes);
        if offset >= size {
            return Err(Errno::ENXIO.into());
        }
        let found = open.file.seek(offset, to == SeekTo::Data).await?;
        if to == SeekTo::Data && found >= size {
            return Err(Errno::ENXIO.into());
        }
        Ok(found)
    }

    async fn close(&self, (inode, handle): OpenId) -> Result<(), Fault> {
        let closed = self.inodes().table.close(inode, handle, |_, _| {});
        Ok(closed.map(drop)?)
    }

    async fn opendir(&self, inode: u64) -> Result<u64, Fault> {
        let (entry, directory, snapshot) = self.directory(InodeNumber(inode)).await?;
        let open = Open::Directory(Arc::new(OpenDirectory { entry, directory, snapshot }));
        Ok(self.inodes().table.open(inode, open)?)
    }

    /// A cookie is the number of entries before the next one.
    async fn names(
        &self,
        open: OpenId,
        cookie: u64,
        limit: usize,
    ) -> Result<Vec<Listed<ListedFile>>, Fault> {
        let open = self.open_directory(open)?;
        let mut next = cookie;
        let mut names = Vec::new();
        while names.len() < limit {
            let found = match directory::leaf_at(&open.snapshot.cache, &open.directory, next).await
            {
                // The next call reports the error.
                Err(_) if !names.is_empty() => break,
                found => found.map_err(BlockError::from)?,
            };
            let Some((leaf, from)) = found else { break };
            let (ttl, seen) = (self.ttl(&open.snapshot), open.snapshot.version);
            for entry in leaf.entries().iter().skip(from).take(limit - names.len()) {
                let entry = match open.snapshot.resolved(entry.clone()).await {
                    Err(_) if !names.is_empty() => return Ok(names),
                    entry => entry?,
                };
                next += 1;
                let (name, kind) = (entry.name.clone(), entry.kind());
                let file = ListedFile { entry, seen, ttl };
                names.push(Listed { name, kind, cookie: next, file });
            }
        }
        Ok(names)
    }

    async fn listed(&self, directory: u64, listed: &Listed<ListedFile>, with_entry: bool) -> Found {
        let ListedFile { entry, seen, ttl } = &listed.file;
        let directory = InodeNumber(directory);
        if !with_entry {
            return Found::Number(self.inodes().number(directory, entry).0);
        }
        let inode = self.inodes().enter(directory, entry, *seen);
        Found::Entry(self.found(inode, entry, *ttl))
    }

    async fn statfs(&self) -> StatFs {
        let snapshot = self.volume.current();
        let root = &snapshot.root;
        let block_size_bytes = 1u32 << root.block_size_log2;
        StatFs {
            block_size_bytes,
            blocks: root.bytes.div_ceil(u64::from(block_size_bytes)),
            files: root.files.saturating_add(root.dirs).saturating_add(root.symlinks),
            ..StatFs::default()
        }
    }

    async fn getxattr(&self, inode: u64, name: &Bytes) -> Result<Bytes, Fault> {
        let (entry, snapshot) = self.entry(InodeNumber(inode)).await?;
        let all = read_xattrs(&snapshot.cache, &entry).await?;
        let found = all.into_iter().find(|(known, _)| known == name);
        Ok(found.ok_or(Errno::ENODATA)?.1)
    }

    async fn listxattr(&self, inode: u64) -> Result<Vec<Bytes>, Fault> {
        let (entry, snapshot) = self.entry(InodeNumber(inode)).await?;
        let all = read_xattrs(&snapshot.cache, &entry).await?;
        Ok(all.into_iter().map(|(name, _)| name).collect())
    }
}
