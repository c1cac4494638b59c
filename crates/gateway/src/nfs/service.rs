//! What is served, and what procedures need of it: the file of a handle, opens, locks of changes, the write verifier.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use atoll_vfs::{Answer, Attr, Caller, Errno, FileKind, FileSystem, InodeNumber};
use tokio::sync::{RwLock as AsyncRwLock, RwLockReadGuard, RwLockWriteGuard};

use super::clients::{ClientMachine, Clients};
use super::exports::Export;
use super::handles::HandleKey;
use super::listings::Listings;
use super::nfs3::{
    self, Attributes, FileHandle, SpecData, Status, Time, Verifier, WccAttr, WccData,
};
use super::opens::Opens;
use super::replies::Replies;
use super::rpc::Credential;

/// How long a call may take that changes nothing.
pub const LIMIT: Duration = Duration::from_secs(10);

/// Locks of directories that are being changed, and as many of other files; a guess at few enough collisions.
const CHANGE_LOCKS: usize = 256;

/// What a gateway is told at its start.
#[derive(Clone, Debug)]
pub struct Options {
    /// The secret of its handles: the same after a restart, so that clients go on.
    pub key: HandleKey,
    /// Told clients with each write. Another one at each start.
    pub verifier: u64,
    /// How long a call may take that changes nothing; [`LIMIT`].
    pub limit: Duration,
}

/// Serves exports.
pub struct Service {
    exports: RwLock<Vec<Arc<Export>>>,
    pub(super) key: HandleKey,
    verifier: Arc<AtomicU64>,
    pub(super) limit: Duration,
    pub(super) replies: Arc<Replies>,
    pub(super) opens: Opens,
    pub(super) clients: Clients,
    pub(super) listings: Listings,
    changes: Vec<AsyncRwLock<()>>,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").finish_non_exhaustive()
    }
}

impl Service {
    /// Without exports.
    pub fn new(options: Options) -> Arc<Service> {
        let verifier = Arc::new(AtomicU64::new(options.verifier));
        let lost = verifier.clone();
        Arc::new(Service {
            exports: RwLock::default(),
            key: options.key,
            verifier,
            limit: options.limit,
            replies: Arc::default(),
            opens: Opens::new(Arc::new(move || {
                lost.fetch_add(1, Ordering::SeqCst);
            })),
            clients: Clients::new(),
            listings: Listings::default(),
            changes: (0..2 * CHANGE_LOCKS).map(|_| AsyncRwLock::default()).collect(),
        })
    }

    /// Serves an export, in place of one with its path or id.
    pub fn add(&self, export: Export) {
        let mut exports = self.exports.write().expect("no holder of this lock panics");
        exports.retain(|other| other.path != export.path && other.id != export.id);
        exports.push(Arc::new(export));
    }

    /// Ends an export; whether there was one with this path.
    pub fn remove(&self, path: &str) -> bool {
        let mut exports = self.exports.write().expect("no holder of this lock panics");
        let before = exports.len();
        exports.retain(|export| export.path != path);
        exports.len() != before
    }

    /// What is served.
    pub fn exports(&self) -> Vec<Arc<Export>> {
        self.exports.read().expect("no holder of this lock panics").clone()
    }

    /// Machines that use it, or have used it.
    pub fn clients(&self) -> Vec<ClientMachine> {
        self.clients.list()
    }

    fn export(&self, id: u64) -> Option<Arc<Export>> {
        let exports = self.exports.read().expect("no holder of this lock panics");
        exports.iter().find(|export| export.id == id).cloned()
    }

    /// Told clients with each write and COMMIT: another one when what was written unstably may be lost.
    pub fn verifier(&self) -> Verifier {
        self.verifier.load(Ordering::SeqCst).to_be_bytes()
    }

    /// What was written unstably may be lost: clients write it again.
    pub(super) fn may_have_lost(&self) {
        self.verifier.fetch_add(1, Ordering::SeqCst);
    }

    /// Drops what file systems say of changes that others made: the gateway keeps nothing that they would invalidate.
    pub(super) fn drop_invalidations(&self) {
        for queue in self.exports().iter().filter_map(|export| export.fs.invalidations()) {
            while queue.try_next().is_some() {}
        }
    }

    /// Closes files that no client has used for a while; all, if `all`.
    pub fn close_idle(&self, all: bool) {
        self.opens.close_idle(all);
    }
}

/// A call being answered.
pub(super) struct Session {
    pub(super) service: Arc<Service>,
    pub(super) client: SocketAddr,
    pub(super) credential: Credential,
}

impl Session {
    /// The file of a handle.
    pub(super) async fn file(&self, handle: &FileHandle) -> Result<File, Status> {
        let (id, persistent) = self.service.key.open(handle)?;
        let export = self.service.export(id).ok_or(Status::Stale)?;
        if !export.admits(self.client.ip(), self.client.port()) {
            return Err(Status::Acces);
        }
        let caller = export.caller(&self.credential);
        let entry = export.fs.by_handle(caller, &persistent).await.map_err(stale)?;
        Ok(File::new(export, caller, entry.attr))
    }

    /// The file of a handle, to be changed.
    pub(super) async fn changed_file(&self, handle: &FileHandle) -> Result<File, Status> {
        let file = self.file(handle).await?;
        if file.export.read_only { Err(Status::RoFs) } else { Ok(file) }
    }

    /// Keeps other changes through this gateway away from these files, so that what is told of them before and after
    /// a change is told of this one.
    pub(super) async fn lock<const N: usize>(
        &self,
        files: [&File; N],
    ) -> Vec<RwLockWriteGuard<'_, ()>> {
        let mut chosen = files.map(File::change_lock).to_vec();
        // In one order, directories first, so that no two calls wait for each other.
        chosen.sort_unstable();
        chosen.dedup();
        let mut guards = Vec::with_capacity(chosen.len());
        for at in chosen {
            guards.push(self.service.changes[at].write().await);
        }
        guards
    }

    /// Keeps changes away that tell what a file that is no directory was like before, while its contents are changed. The
    /// caller may have locked a directory.
    pub(super) async fn share(&self, file: &File) -> RwLockReadGuard<'_, ()> {
        self.service.changes[file.change_lock()].read().await
    }

    /// Has a change of names or attributes survive a crash before it is answered.
    pub(super) async fn persist(&self, file: &File, inodes: &[InodeNumber]) -> Result<(), Errno> {
        if file.export.answers_early {
            return Ok(());
        }
        let (fs, inodes) = (file.fs().clone(), inodes.to_vec());
        waiting_for_disk(move || fs.persist(&inodes)).await
    }

    /// The handle of a file.
    pub(super) async fn handle(&self, file: &File) -> Result<FileHandle, Errno> {
        let handle = file.fs().handle_of(file.attr.inode).await?;
        Ok(self.service.key.seal(file.export.id, &handle))
    }
}

/// Makes a call that waits for a disk, perhaps before it returns: on a thread of its own, so that other calls go on, and that
/// the waits of several become one.
pub(super) async fn waiting_for_disk(
    call: impl FnOnce() -> Answer<()> + Send + 'static,
) -> Result<(), Errno> {
    match tokio::task::spawn_blocking(call).await {
        Ok(answer) => answer.await,
        // It has panicked, or the process ends.
        Err(_) => Err(Errno::EIO),
    }
}

/// A handle whose file cannot be found.
fn stale(errno: Errno) -> Status {
    match errno {
        Errno::ENOENT => Status::Stale,
        errno => Status::of(errno),
    }
}

/// A file, for the caller of a call. Its number is held until this is dropped.
pub(super) struct File {
    pub(super) export: Arc<Export>,
    pub(super) caller: Caller,
    pub(super) attr: Attr,
    is_held: bool,
}

impl Drop for File {
    fn drop(&mut self) {
        if self.is_held {
            self.export.fs.forget(self.attr.inode, 1);
        }
    }
}

impl File {
    /// Of an entry, whose lookup this takes over.
    pub(super) fn new(export: Arc<Export>, caller: Caller, attr: Attr) -> File {
        File { export, caller, attr, is_held: true }
    }

    /// Drops it and leaves its lookup to the caller.
    pub(super) fn keep_lookup(mut self) {
        self.is_held = false;
    }

    /// Another file of the same call.
    pub(super) fn beside(&self, attr: Attr) -> File {
        File::new(self.export.clone(), self.caller, attr)
    }

    pub(super) fn fs(&self) -> &Arc<dyn FileSystem> {
        &self.export.fs
    }

    /// Which of the locks of changes is its own.
    fn change_lock(&self) -> usize {
        let at = (self.export.id ^ self.attr.inode.0) as usize % CHANGE_LOCKS;
        if self.attr.kind == FileKind::Directory { at } else { CHANGE_LOCKS + at }
    }

    pub(super) fn inode(&self) -> InodeNumber {
        self.attr.inode
    }

    /// Attributes as they were found.
    pub(super) fn attributes(&self) -> Attributes {
        attributes_of(self.export.id, &self.attr)
    }

    /// Attributes as they are now.
    pub(super) async fn now(&self) -> Option<Attributes> {
        let found = self.fs().getattr(self.inode(), None).await.ok()?;
        Some(attributes_of(self.export.id, &found.attr))
    }

    /// Before a change: notes the attributes as they are now.
    pub(super) async fn refresh(&mut self) -> Result<WccAttr, Errno> {
        self.attr = self.fs().getattr(self.inode(), None).await?.attr;
        Ok(WccAttr {
            size: self.attr.size_bytes,
            mtime: Time::of(self.attr.mtime),
            ctime: Time::of(self.attr.ctime),
        })
    }

    /// After a change that began with this. What a file was like before is not told if others than this gateway change the file
    /// system: a client would take a change of theirs that came between for a part of its own, and keep what it has cached.
    pub(super) async fn changed(&self, before: Option<WccAttr>) -> WccData {
        let before = before.filter(|_| self.fs().invalidations().is_none());
        WccData { before, after: self.now().await }
    }
}

/// Major and minor number of a device, as Linux puts them into 64 bits.
pub(super) fn device(rdev: u64) -> SpecData {
    let part = |bits: u64| u32::try_from(bits).expect("cut to 32 bits");
    SpecData {
        major: part((rdev >> 8 & 0xfff) | (rdev >> 32 & 0xffff_f000)),
        minor: part((rdev & 0xff) | (rdev >> 12 & 0xffff_ff00)),
    }
}

/// The reverse of [`device`].
pub(super) fn rdev(device: &SpecData) -> u64 {
    let (major, minor) = (u64::from(device.major), u64::from(device.minor));
    (minor & 0xff)
        | (major & 0xfff) << 8
        | (minor & 0xffff_ff00) << 12
        | (major & 0xffff_f000) << 32
}

pub(super) fn attributes_of(fsid: u64, attr: &Attr) -> Attributes {
    Attributes {
        kind: nfs3::FileType::of(attr.kind),
        mode: attr.mode,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        size: attr.size_bytes,
        used: attr.blocks_512.saturating_mul(512),
        rdev: device(attr.rdev),
        fsid,
        fileid: attr.inode.0,
        atime: Time::of(attr.atime),
        mtime: Time::of(attr.mtime),
        ctime: Time::of(attr.ctime),
    }
}
