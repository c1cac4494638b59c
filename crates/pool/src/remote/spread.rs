//! One file system over all groups of a pool: each call goes to the group that has its file.
//!
//! A number says which group that is. For a name of a file of another group a directory's group answers that file's number, and the
//! other one is asked for the rest. A change that concerns several groups the first one that is asked sees to.
//!
//! It does not know how calls reach a group.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, Instant};
use atoll_vfs::{
    Answer, AttrReply, Caller, CreateVerifier, DirEntry, Entry, Errno, FileKind, FileLock,
    FileSystem, Handle, InodeFlags, InodeNumber, InvalidationQueue, LockOwner, LockRange, Locks,
    OpenFlags, Opened, PersistentHandle, RenameFlags, SeekTo, SetAttr, StatFs, Writer, XattrFlags,
};
use bytes::Bytes;
use futures_util::future::join_all;

use crate::layout::GroupNumber;

/// A name is looked up again so often if what it led to is gone.
const MAX_LOOKUPS: usize = 8;

/// A group that could not be opened is not tried again for so long.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// So many files of a listing are asked for at once.
const MAX_ASKED: usize = 64;

/// Begins to work with a group's file system.
pub trait OpenGroup: Send + Sync + 'static {
    /// The file system of a group.
    ///
    /// # Errors
    /// [`Errno::ETIMEDOUT`] if it does not answer.
    fn open(&self, group: GroupNumber) -> BoxFuture<'static, Result<Arc<dyn FileSystem>, Errno>>;
}

/// Of one group, once it was needed.
type OpenedGroup = Arc<futures_util::lock::Mutex<OpeningGroup>>;

#[derive(Default)]
enum OpeningGroup {
    #[default]
    Closed,
    Open(Arc<dyn FileSystem>),
    /// It could not be opened, then.
    Failed(Instant, Errno),
}

struct SpreadGroups {
    env: Env,
    /// The group that has the root.
    first: Arc<dyn FileSystem>,
    open: Arc<dyn OpenGroup>,
    opened: Mutex<BTreeMap<GroupNumber, OpenedGroup>>,
    /// Those that are open, for calls that do not wait.
    ready: Mutex<BTreeMap<GroupNumber, Arc<dyn FileSystem>>>,
    /// What all of them say that the front end must no longer believe.
    invalidations: Arc<InvalidationQueue>,
}

/// See the module.
#[derive(Clone)]
pub struct SpreadFs {
    groups: Arc<SpreadGroups>,
}

impl SpreadGroups {
    /// The file system of a group.
    async fn of(&self, group: GroupNumber) -> Result<Arc<dyn FileSystem>, Errno> {
        if let Some(fs) = self.ready(group) {
            return Ok(fs);
        }
        let opened = {
            let mut all = self.opened.lock().expect("no holder of this lock panics");
            all.entry(group).or_default().clone()
        };
        let mut opened = opened.lock().await;
        match &*opened {
            OpeningGroup::Open(fs) => return Ok(fs.clone()),
            // Whoever has waited for that attempt does not make another one.
            OpeningGroup::Failed(at, errno) if self.env.now().since(*at) < TRY_AGAIN_AFTER => {
                return Err(*errno);
            }
            OpeningGroup::Closed | OpeningGroup::Failed(..) => {}
        }
        let fs = match self.open.open(group).await {
            Ok(fs) => fs,
            Err(errno) => {
                *opened = OpeningGroup::Failed(self.env.now(), errno);
                return Err(errno);
            }
        };
        self.pass_invalidations_on(&*fs);
        self.ready.lock().expect("no holder of this lock panics").insert(group, fs.clone());
        *opened = OpeningGroup::Open(fs.clone());
        Ok(fs)
    }

    /// What a group's file system says goes to the front end, and is settled when that has heard it.
    fn pass_invalidations_on(&self, fs: &dyn FileSystem) {
        let Some(queue) = fs.invalidations() else { return };
        let all = Arc::downgrade(&self.invalidations);
        self.env.spawn(Box::pin(async move {
            loop {
                let invalidation = queue.next().await;
                let Some(all) = all.upgrade() else {
                    queue.unserved();
                    return;
                };
                all.push(invalidation);
                all.settled().await;
            }
        }));
    }

    fn ready(&self, group: GroupNumber) -> Option<Arc<dyn FileSystem>> {
        match group {
            GroupNumber::FIRST => Some(self.first.clone()),
            _ => self.ready.lock().expect("no holder of this lock panics").get(&group).cloned(),
        }
    }

    /// All that were needed so far.
    fn all_ready(&self) -> Vec<Arc<dyn FileSystem>> {
        let ready = self.ready.lock().expect("no holder of this lock panics");
        [self.first.clone()].into_iter().chain(ready.values().cloned()).collect()
    }

    async fn having(&self, inode: InodeNumber) -> Result<Arc<dyn FileSystem>, Errno> {
        self.of(GroupNumber::of(inode)).await
    }

    /// What the group of file `asked` has answered; of a file of another group, what that one says. [`Errno::ESTALE`] if it is gone.
    async fn resolved(&self, asked: InodeNumber, entry: Entry) -> Result<Entry, Errno> {
        let (group, inode) = (GroupNumber::of(asked), entry.attr.inode);
        if GroupNumber::of(inode) == group {
            return Ok(entry);
        }
        // Nobody holds it there.
        self.of(group).await?.forget(inode, 1);
        self.entry_of(inode).await
    }

    /// What a file's group says of it.
    async fn entry_of(&self, inode: InodeNumber) -> Result<Entry, Errno> {
        let fs = self.having(inode).await?;
        fs.by_handle(Caller::default(), &PersistentHandle::of_number(inode, 0)).await
    }

    /// Asks other groups for the entries of their files in a directory. What cannot be had is listed without.
    async fn fill_in(&self, directory: InodeNumber, listed: &mut [DirEntry]) {
        let own = GroupNumber::of(directory);
        let mut wanted = Vec::new();
        for (at, entry) in listed.iter().enumerate() {
            if entry.entry.is_none() && GroupNumber::of(entry.inode) != own {
                wanted.push((at, entry.inode));
            }
        }
        for some in wanted.chunks(MAX_ASKED) {
            let mut asked = Vec::new();
            for (_, inode) in some {
                asked.push(self.entry_of(*inode));
            }
            for ((at, _), entry) in some.iter().zip(join_all(asked).await) {
                listed[*at].entry = entry.ok();
            }
        }
    }

    async fn lookup(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: Vec<u8>,
    ) -> Result<Entry, Errno> {
        let fs = self.having(parent).await?;
        for _ in 0..MAX_LOOKUPS {
            let entry = fs.lookup(caller, parent, &name).await?;
            match self.resolved(parent, entry).await {
                // It was just removed or replaced.
                Err(Errno::ESTALE) => {}
                found => return found,
            }
        }
        Err(Errno::EIO)
    }

    async fn lookup_all(
        &self,
        caller: Caller,
        parent: InodeNumber,
        names: Vec<Bytes>,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        let fs = self.having(parent).await?;
        let mut found = fs.lookup_all(caller, parent, names.clone()).await?;
        let own = GroupNumber::of(parent);
        let mut elsewhere = Vec::new();
        for (at, answer) in found.iter().enumerate() {
            if let Ok(entry) = answer
                && GroupNumber::of(entry.attr.inode) != own
            {
                elsewhere.push((at, *entry));
            }
        }
        for some in elsewhere.chunks(MAX_ASKED) {
            let asked = some.iter().map(|(_, entry)| self.resolved(parent, *entry));
            for ((at, _), answer) in some.iter().zip(join_all(asked).await) {
                found[*at] = match answer {
                    // It was just removed or replaced.
                    Err(Errno::ESTALE) => self.lookup(caller, parent, names[*at].to_vec()).await,
                    answer => answer,
                };
            }
        }
        Ok(found)
    }

    async fn parent(&self, caller: Caller, inode: InodeNumber) -> Result<Entry, Errno> {
        let fs = self.having(inode).await?;
        let entry = fs.parent(caller, inode).await?;
        let found = entry.attr.inode;
        if GroupNumber::of(found) == GroupNumber::of(inode) {
            return Ok(entry);
        }
        // The referral of the directory itself: it lies in the one that is sought.
        fs.forget(found, 1);
        self.having(found).await?.parent(caller, found).await
    }

    async fn create(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: Vec<u8>,
        mode: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, Opened), Errno> {
        let fs = self.having(parent).await?;
        match fs.create(caller, parent, &name, mode, flags).await {
            // Something is there, and may be a name of a file of another group.
            Err(Errno::ELOOP) => {}
            created => return created,
        }
        let entry = self.lookup(caller, parent, name).await?;
        let (inode, fs) = (entry.attr.inode, self.having(entry.attr.inode).await?);
        let opened = match entry.attr.kind {
            FileKind::Symlink => Err(Errno::ELOOP),
            _ => fs.open(caller, inode, flags).await,
        };
        match opened {
            Ok(opened) if flags.has(OpenFlags::TRUNCATE) => {
                let AttrReply { attr, ttl } = fs.getattr(inode, Some(opened.handle)).await?;
                Ok((Entry { attr, attr_ttl: ttl, ..entry }, opened))
            }
            Ok(opened) => Ok((entry, opened)),
            Err(errno) => {
                fs.forget(inode, 1);
                Err(errno)
            }
        }
    }

    async fn persist(&self, inodes: Vec<InodeNumber>) -> Result<(), Errno> {
        let mut of_groups: BTreeMap<GroupNumber, Vec<InodeNumber>> = BTreeMap::new();
        for inode in inodes {
            of_groups.entry(GroupNumber::of(inode)).or_default().push(inode);
        }
        for (group, inodes) in of_groups {
            self.of(group).await?.persist(&inodes).await?;
        }
        Ok(())
    }
}

impl SpreadFs {
    /// Of the file system of the group that has the root; others are opened when they are needed.
    pub fn new(env: Env, first: Arc<dyn FileSystem>, open: Arc<dyn OpenGroup>) -> SpreadFs {
        let (opened, ready, invalidations) = (Mutex::default(), Mutex::default(), Arc::default());
        let groups = SpreadGroups { env, first, open, opened, ready, invalidations };
        groups.pass_invalidations_on(&*groups.first);
        SpreadFs { groups: Arc::new(groups) }
    }

    /// A call of the group that has a file.
    fn having<T: Send + 'static, F>(
        &self,
        inode: InodeNumber,
        call: impl FnOnce(Arc<dyn FileSystem>) -> F + Send + 'static,
    ) -> Answer<T>
    where
        F: Future<Output = Result<T, Errno>> + Send + 'static,
    {
        let groups = self.groups.clone();
        Box::pin(async move { call(groups.having(inode).await?).await })
    }

    /// A call of a directory's group that gives a file a name, and answers its entry.
    fn entry(
        &self,
        parent: InodeNumber,
        call: impl FnOnce(&dyn FileSystem) -> Answer<Entry> + Send + 'static,
    ) -> Answer<Entry> {
        let groups = self.groups.clone();
        Box::pin(async move {
            let fs = groups.having(parent).await?;
            let entry = call(&*fs).await?;
            match groups.resolved(parent, entry).await {
                // It was made, and removed by somebody else since: it is one without names.
                Err(Errno::ESTALE) => Ok(entry),
                resolved => resolved,
            }
        })
    }
}

/// Locks of files of all groups: each is its file's group's.
struct SpreadLocks {
    groups: Arc<SpreadGroups>,
}

impl SpreadLocks {
    fn having<T: Send + 'static, F>(
        &self,
        inode: InodeNumber,
        call: impl FnOnce(Arc<dyn Locks>) -> F + Send + 'static,
    ) -> Answer<T>
    where
        F: Future<Output = Result<T, Errno>> + Send + 'static,
    {
        let groups = self.groups.clone();
        Box::pin(async move {
            let locks = groups.having(inode).await?.locks();
            call(locks.ok_or(Errno::EOPNOTSUPP)?).await
        })
    }
}

impl Locks for SpreadLocks {
    fn conflict(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
        wanted: FileLock,
    ) -> Answer<Option<FileLock>> {
        self.having(inode, move |locks| locks.conflict(inode, owner, wanted))
    }

    fn lock(
        &self,
        inode: InodeNumber,
        owner: LockOwner,
        wanted: FileLock,
        waits: bool,
    ) -> Answer<()> {
        self.having(inode, move |locks| locks.lock(inode, owner, wanted, waits))
    }

    fn unlock(&self, inode: InodeNumber, owner: LockOwner, range: LockRange) -> Answer<()> {
        self.having(inode, move |locks| locks.unlock(inode, owner, range))
    }
}

impl FileSystem for SpreadFs {
    fn lookup(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<Entry> {
        let (groups, name) = (self.groups.clone(), name.to_vec());
        Box::pin(async move { groups.lookup(caller, parent, name).await })
    }

    fn lookup_all(
        &self,
        caller: Caller,
        parent: InodeNumber,
        names: Vec<Bytes>,
    ) -> Answer<Vec<Result<Entry, Errno>>> {
        let groups = self.groups.clone();
        Box::pin(async move { groups.lookup_all(caller, parent, names).await })
    }

    fn parent(&self, caller: Caller, inode: InodeNumber) -> Answer<Entry> {
        let groups = self.groups.clone();
        Box::pin(async move { groups.parent(caller, inode).await })
    }

    fn handle_of(&self, inode: InodeNumber) -> Answer<PersistentHandle> {
        self.having(inode, move |fs| fs.handle_of(inode))
    }

    fn by_handle(&self, caller: Caller, handle: &PersistentHandle) -> Answer<Entry> {
        let handle = handle.clone();
        match handle.number() {
            Ok((inode, _)) => self.having(inode, move |fs| fs.by_handle(caller, &handle)),
            Err(errno) => Box::pin(async move { Err(errno) }),
        }
    }

    fn locks(&self) -> Option<Arc<dyn Locks>> {
        self.groups.first.locks()?;
        Some(Arc::new(SpreadLocks { groups: self.groups.clone() }))
    }

    fn invalidations(&self) -> Option<Arc<InvalidationQueue>> {
        self.groups.first.invalidations()?;
        Some(self.groups.invalidations.clone())
    }

    fn has_acls(&self) -> bool {
        self.groups.first.has_acls()
    }

    fn missing_ttl(&self) -> Duration {
        self.groups.first.missing_ttl()
    }

    fn forget(&self, inode: InodeNumber, count: u64) {
        if let Some(fs) = self.groups.ready(GroupNumber::of(inode)) {
            fs.forget(inode, count);
        }
    }

    fn getattr(&self, inode: InodeNumber, handle: Option<Handle>) -> Answer<AttrReply> {
        self.having(inode, move |fs| fs.getattr(inode, handle))
    }

    fn setattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        handle: Option<Handle>,
        changes: SetAttr,
    ) -> Answer<AttrReply> {
        self.having(inode, move |fs| fs.setattr(caller, inode, handle, changes))
    }

    fn readlink(&self, inode: InodeNumber) -> Answer<Bytes> {
        self.having(inode, move |fs| fs.readlink(inode))
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
        self.entry(parent, move |fs| fs.mknod(caller, parent, &name, kind, mode, rdev))
    }

    fn create_exclusive(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        verifier: CreateVerifier,
    ) -> Answer<Entry> {
        let (groups, name) = (self.groups.clone(), name.to_vec());
        Box::pin(async move {
            let fs = groups.having(parent).await?;
            match fs.create_exclusive(caller, parent, &name, mode, verifier).await {
                Err(Errno::EEXIST) => {}
                made => return made,
            }
            // It may have been made, and moved to another name in another group since.
            let entry = groups.lookup(caller, parent, name).await?;
            if verifier.has_made(&entry.attr) {
                return Ok(entry);
            }
            groups.having(entry.attr.inode).await?.forget(entry.attr.inode, 1);
            Err(Errno::EEXIST)
        })
    }

    fn mkdir(&self, caller: Caller, parent: InodeNumber, name: &[u8], mode: u32) -> Answer<Entry> {
        let name = name.to_vec();
        self.entry(parent, move |fs| fs.mkdir(caller, parent, &name, mode))
    }

    fn symlink(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        target: &[u8],
    ) -> Answer<Entry> {
        let (name, target) = (name.to_vec(), target.to_vec());
        self.entry(parent, move |fs| fs.symlink(caller, parent, &name, &target))
    }

    fn link(
        &self,
        caller: Caller,
        inode: InodeNumber,
        new_parent: InodeNumber,
        new_name: &[u8],
    ) -> Answer<Entry> {
        let name = new_name.to_vec();
        self.entry(new_parent, move |fs| fs.link(caller, inode, new_parent, &name))
    }

    fn unlink(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let name = name.to_vec();
        self.having(parent, move |fs| fs.unlink(caller, parent, &name))
    }

    fn rmdir(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let name = name.to_vec();
        self.having(parent, move |fs| fs.rmdir(caller, parent, &name))
    }

    fn rename(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        new_parent: InodeNumber,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> Answer<()> {
        let (name, new_name) = (name.to_vec(), new_name.to_vec());
        self.having(parent, move |fs| {
            fs.rename(caller, parent, &name, new_parent, &new_name, flags)
        })
    }

    fn open(&self, caller: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened> {
        self.having(inode, move |fs| fs.open(caller, inode, flags))
    }

    fn create(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
    ) -> Answer<(Entry, Opened)> {
        let (groups, name) = (self.groups.clone(), name.to_vec());
        Box::pin(async move { groups.create(caller, parent, name, mode, flags).await })
    }

    fn read(&self, inode: InodeNumber, handle: Handle, offset: u64, len: u32) -> Answer<Bytes> {
        self.having(inode, move |fs| fs.read(inode, handle, offset, len))
    }

    fn write(
        &self,
        writer: Writer,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        data: Bytes,
    ) -> Answer<u32> {
        self.having(inode, move |fs| fs.write(writer, inode, handle, offset, data))
    }

    fn flush(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.having(inode, move |fs| fs.flush(inode, handle))
    }

    fn fsync(&self, inode: InodeNumber, handle: Handle, data_only: bool) -> Answer<()> {
        self.having(inode, move |fs| fs.fsync(inode, handle, data_only))
    }

    fn seek(&self, inode: InodeNumber, handle: Handle, offset: u64, to: SeekTo) -> Answer<u64> {
        self.having(inode, move |fs| fs.seek(inode, handle, offset, to))
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
        self.having(inode, move |fs| fs.fallocate(caller, inode, handle, offset, len, mode))
    }

    fn close(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.having(inode, move |fs| fs.close(inode, handle))
    }

    fn has_stateless_directories(&self) -> bool {
        self.groups.first.has_stateless_directories()
    }

    fn has_lasting_cookies(&self) -> bool {
        self.groups.first.has_lasting_cookies()
    }

    fn opendir(&self, caller: Caller, inode: InodeNumber) -> Answer<Opened> {
        self.having(inode, move |fs| fs.opendir(caller, inode))
    }

    fn readdir(
        &self,
        inode: InodeNumber,
        handle: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Answer<Vec<DirEntry>> {
        let groups = self.groups.clone();
        Box::pin(async move {
            let fs = groups.having(inode).await?;
            let mut listed = fs.readdir(inode, handle, cookie, limit, with_entries).await?;
            if with_entries {
                groups.fill_in(inode, &mut listed).await;
            }
            Ok(listed)
        })
    }

    fn closedir(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.having(inode, move |fs| fs.closedir(inode, handle))
    }

    fn fsyncdir(&self, inode: InodeNumber, handle: Handle, data_only: bool) -> Answer<()> {
        self.having(inode, move |fs| fs.fsyncdir(inode, handle, data_only))
    }

    fn persist(&self, inodes: &[InodeNumber]) -> Answer<()> {
        let (groups, inodes) = (self.groups.clone(), inodes.to_vec());
        Box::pin(async move { groups.persist(inodes).await })
    }

    fn sync(&self) -> Answer<()> {
        let all = self.groups.all_ready();
        Box::pin(async move {
            for fs in all {
                fs.sync().await?;
            }
            Ok(())
        })
    }

    fn statfs(&self, inode: InodeNumber) -> Answer<StatFs> {
        self.having(inode, move |fs| fs.statfs(inode))
    }

    fn inode_flags(&self, inode: InodeNumber) -> Answer<InodeFlags> {
        self.having(inode, move |fs| fs.inode_flags(inode))
    }

    fn set_inode_flags(&self, caller: Caller, inode: InodeNumber, flags: InodeFlags) -> Answer<()> {
        self.having(inode, move |fs| fs.set_inode_flags(caller, inode, flags))
    }

    fn getxattr(&self, inode: InodeNumber, name: &[u8]) -> Answer<Bytes> {
        let name = name.to_vec();
        self.having(inode, move |fs| fs.getxattr(inode, &name))
    }

    fn listxattr(&self, inode: InodeNumber) -> Answer<Vec<Bytes>> {
        self.having(inode, move |fs| fs.listxattr(inode))
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
        self.having(inode, move |fs| fs.setxattr(caller, inode, &name, value, flags))
    }

    fn removexattr(&self, caller: Caller, inode: InodeNumber, name: &[u8]) -> Answer<()> {
        let name = name.to_vec();
        self.having(inode, move |fs| fs.removexattr(caller, inode, &name))
    }
}
