//! The calls of a mount, each answered by the module that knows; those for the past go to `history`.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::RingRoom;
use atoll_env::Env;
use atoll_vfs::{
    AttrReply, Caller, CreateVerifier, Entry, Errno, InodeNumber, InvalidationQueue, Locks,
    OpenFlags, Opened, PersistentHandle, RenameFlags, SeekTo, SetAttr, StatFs, Writer, XattrFlags,
};
use bytes::Bytes;

use super::history::{self, LogOf, PastEngine};
use super::listing::READS_AT_ONCE;
use super::locks::SharedLocks;
use super::names;
use super::state::VirtualXattr;
use super::{Freshness, Shared, SharedEngine, reply};
use crate::mount::{About, Birth, Engine, Found, Listed, OpenId, Place};
use crate::room;
use crate::shared::entries::Entries;
use crate::shared::fault::Fault;
use crate::shared::inode::{Contents, InodeKey, MAX_LINKS};
use crate::shared::table::ROOT;

/// A file of a listing.
pub(crate) enum ListedFile {
    Present(InodeKey),
    Past(history::Place),
}

/// Whether a name of the root directory is that of the past.
fn is_top((parent, name): Place<'_>) -> bool {
    parent == ROOT && name == history::NAME
}

/// Why a name cannot be made.
fn check_made(place: Place<'_>) -> Result<(), Errno> {
    check_present(place.0)?;
    if is_top(place) { Err(Errno::EEXIST) } else { Ok(()) }
}

/// Why a name cannot be removed or moved.
fn check_removed(place: Place<'_>) -> Result<(), Errno> {
    check_present(place.0)?;
    if is_top(place) { Err(Errno::EPERM) } else { Ok(()) }
}

/// Why an inode cannot be changed.
fn check_present(inode: u64) -> Result<(), Errno> {
    if history::is_past(inode) { Err(Errno::EROFS) } else { Ok(()) }
}

impl SharedEngine {
    /// The past, if an inode is of it.
    fn past_of(&self, inode: u64) -> Option<&PastEngine> {
        history::is_past(inode).then_some(&self.past)
    }
}

impl Engine for SharedEngine {
    type Fault = Fault;
    type File = ListedFile;

    const READS_AT_ONCE: usize = READS_AT_ONCE;

    fn env(&self) -> &Env {
        &self.shared.env
    }

    async fn report(&self, _: About<'_>, fault: Fault) -> Errno {
        fault.logged()
    }

    async fn status(&self) -> String {
        self.shared.status().await
    }

    fn locks(&self) -> Option<Arc<dyn Locks>> {
        Some(Arc::new(SharedLocks(self.shared.clone())))
    }

    fn invalidations(&self) -> Option<Arc<InvalidationQueue>> {
        Some(self.shared.invalidations.clone())
    }

    async fn lookup(&self, place: Place<'_>) -> Result<Entry, Fault> {
        match self.past_of(place.0) {
            Some(past) => past.lookup(place).await,
            None if is_top(place) => self.past.top().await,
            None => self.shared.lookup(place.0, place.1).await,
        }
    }

    async fn parent(&self, inode: u64) -> Result<Entry, Fault> {
        if let Some(past) = self.past_of(inode) {
            return past.parent(inode).await;
        }
        let (shared, age) = (&self.shared, self.shared.names_age());
        let (key, directory) = shared.directory(inode, age).await?;
        let above = directory.inode().links.iter().next().map(|link| link.directory);
        shared.entry(above.unwrap_or(key), age).await
    }

    async fn handle_of(&self, inode: u64) -> Result<PersistentHandle, Fault> {
        if let Some(past) = self.past_of(inode) {
            return past.handle_of(inode).await;
        }
        let key = self.shared.table().node(inode)?.key;
        Ok(PersistentHandle::new(Bytes::copy_from_slice(&key.0))?)
    }

    async fn by_handle(&self, handle: &PersistentHandle) -> Result<Entry, Fault> {
        let Ok(key) = handle.as_bytes().try_into().map(InodeKey) else {
            return self.past.by_handle(handle).await;
        };
        if self.shared.is_gone(key) {
            return Err(Errno::ESTALE.into());
        }
        match self.shared.entry(key, self.shared.names_age()).await {
            // Nobody has the inode, or it is another volume's.
            Err(Fault { errno: Errno::EIO, .. }) => Err(Errno::ESTALE.into()),
            found => found,
        }
    }

    fn forget(&self, inode: u64, count: u64) {
        match self.past_of(inode) {
            Some(past) => past.forget(inode, count),
            None => self.shared.table().forget(inode, count),
        }
    }

    async fn getattr(&self, inode: u64, handle: Option<u64>) -> Result<AttrReply, Fault> {
        if let Some(past) = self.past_of(inode) {
            return past.getattr(inode, handle).await;
        }
        self.shared.follow(inode).await;
        Ok(reply(self.shared.attr(inode).await?))
    }

    async fn setattr(
        &self,
        inode: u64,
        handle: Option<u64>,
        changes: SetAttr,
    ) -> Result<AttrReply, Fault> {
        check_present(inode)?;
        if let Some(handle) = handle {
            self.shared.check_lock(inode, handle)?;
        }
        self.shared.set(inode, handle, changes).await?;
        Ok(reply(self.shared.attr(inode).await?))
    }

    async fn readlink(&self, inode: u64) -> Result<Bytes, Fault> {
        match self.past_of(inode) {
            Some(past) => past.readlink(inode).await,
            None => self.shared.target(inode).await,
        }
    }

    async fn make(
        &self,
        caller: Caller,
        place: Place<'_>,
        birth: Birth,
        mode: u32,
    ) -> Result<Entry, Fault> {
        check_made(place)?;
        let birth = match birth {
            Birth::File => names::Birth::File,
            Birth::Directory => names::Birth::Other(Contents::Directory(Entries::default())),
            Birth::Symlink(target) => names::Birth::Other(names::symlink(target)?),
            Birth::Special(kind, rdev) => names::Birth::Other(Contents::Special { kind, rdev }),
        };
        let made = self.shared.make(caller, place, birth, mode);
        self.shared.exclusively(place, false, made).await
    }

    async fn make_exclusive(
        &self,
        caller: Caller,
        place: Place<'_>,
        mode: u32,
        verifier: CreateVerifier,
    ) -> Result<Entry, Fault> {
        check_made(place)?;
        let shared = &self.shared;
        let made = async {
            match shared.make(caller, place, names::Birth::Exclusive(verifier), mode).await {
                Err(Fault { errno: Errno::EEXIST, .. }) => {}
                made => return made,
            }
            let found = shared.lookup(place.0, place.1).await?;
            if verifier.has_made(&found.attr) {
                return Ok(found);
            }
            shared.table().forget(found.attr.inode.0, 1);
            Err(Errno::EEXIST.into())
        };
        shared.exclusively(place, true, made).await
    }

    async fn link(&self, inode: u64, place: Place<'_>) -> Result<Entry, Fault> {
        check_made(place)?;
        check_present(inode)?;
        self.shared.exclusively(place, false, self.shared.link(inode, place)).await
    }

    async fn remove(&self, place: Place<'_>, is_directory: bool) -> Result<(), Fault> {
        check_removed(place)?;
        match is_directory {
            true => self.shared.rmdir(place.0, place.1).await,
            false => self.shared.unlink(place.0, place.1).await,
        }
    }

    async fn rename(
        &self,
        from: Place<'_>,
        to: Place<'_>,
        flags: RenameFlags,
    ) -> Result<(), Fault> {
        check_removed(from)?;
        check_removed(to)?;
        let renamed = self.shared.rename(from, to, flags);
        match flags.no_replace {
            true => self.shared.exclusively(to, false, renamed).await,
            false => renamed.await,
        }
    }

    async fn open(&self, caller: Caller, inode: u64, flags: OpenFlags) -> Result<Opened, Fault> {
        match self.past_of(inode) {
            Some(past) => past.open(caller, inode, flags).await,
            None => self.shared.open(inode, flags, caller.pid).await,
        }
    }

    async fn create(
        &self,
        caller: Caller,
        place: Place<'_>,
        mode: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, Opened), Fault> {
        check_made(place)?;
        if flags.has(OpenFlags::EXCLUSIVE) {
            let created = self.shared.create_named(caller, place, mode, flags);
            return self.shared.exclusively(place, true, created).await;
        }
        self.shared.create(caller, place, mode, flags).await
    }

    async fn read(&self, open: OpenId, offset: u64, len: u32) -> Result<Bytes, Fault> {
        match self.past_of(open.0) {
            Some(past) => past.read(open, offset, len).await,
            None => self.shared.read(open, offset, len).await,
        }
    }

    async fn write(
        &self,
        writer: Writer,
        open: OpenId,
        offset: u64,
        data: &Bytes,
    ) -> Result<u32, Fault> {
        check_present(open.0)?;
        self.shared.write(writer, open, offset, data).await
    }

    async fn flush(&self, (inode, handle): OpenId) -> Result<(), Fault> {
        if let Some(past) = self.past_of(inode) {
            return past.flush((inode, handle)).await;
        }
        let shared = &self.shared;
        let flags = shared.table().flags(inode, handle)?;
        shared.check_lock(inode, handle)?;
        // An open may empty a file that it does not write.
        match flags.writes() || flags.has(OpenFlags::TRUNCATE) {
            true => shared.publish(inode).await?,
            false => shared.name_newborn(inode).await?,
        }
        // With a lock that ran out meanwhile went what was written.
        Ok(shared.check_lock(inode, handle)?)
    }

    async fn fsync(&self, (inode, handle): OpenId) -> Result<(), Fault> {
        if history::is_past(inode) {
            return Ok(());
        }
        self.shared.check_lock(inode, handle)?;
        self.shared.publish(inode).await?;
        Ok(self.shared.check_lock(inode, handle)?)
    }

    /// Of the root directory, everything: so a program asks whether the mount may end.
    async fn fsyncdir(&self, inode: u64) -> Result<(), Fault> {
        match inode {
            ROOT => self.shared.store_all().await,
            _ if history::is_past(inode) => Ok(()),
            _ => self.shared.put_removals().await,
        }
    }

    async fn persist(&self, inodes: &[InodeNumber]) -> Result<(), Fault> {
        for inode in inodes {
            match self.shared.publish(inode.0).await {
                // It is gone.
                Err(Fault { errno: Errno::ESTALE, .. }) => {}
                published => published?,
            }
        }
        self.shared.put_removals().await
    }

    async fn sync(&self) -> Result<(), Fault> {
        self.shared.finish_removals().await;
        self.shared.store_all().await
    }

    async fn seek(&self, open: OpenId, offset: u64, to: SeekTo) -> Result<u64, Fault> {
        match self.past_of(open.0) {
            Some(past) => past.seek(open, offset, to).await,
            None => self.shared.seek(open, offset, to).await,
        }
    }

    async fn fallocate(&self, open: OpenId, range: (u64, u64), mode: i32) -> Result<(), Fault> {
        check_present(open.0)?;
        self.shared.fallocate(open, range, mode).await
    }

    async fn close(&self, open: OpenId) -> Result<(), Fault> {
        match self.past_of(open.0) {
            Some(past) => past.close(open).await,
            None => self.shared.close(open.0, open.1).await,
        }
    }

    async fn opendir(&self, inode: u64) -> Result<u64, Fault> {
        match self.past_of(inode) {
            Some(past) => past.opendir(inode).await,
            None => self.shared.open_directory(inode).await,
        }
    }

    async fn closedir(&self, open: OpenId) -> Result<(), Fault> {
        match self.past_of(open.0) {
            Some(past) => past.close(open).await,
            None => Ok(self.shared.table().close(open.0, open.1)?),
        }
    }

    async fn names(
        &self,
        open: OpenId,
        cookie: u64,
        limit: usize,
    ) -> Result<Vec<Listed<ListedFile>>, Fault> {
        match self.past_of(open.0) {
            Some(past) => {
                let names = past.names(open, cookie, limit).await?.into_iter();
                Ok(names.map(|listed| listed.map(ListedFile::Past)).collect())
            }
            None => {
                let names = self.shared.names(open, cookie, limit).await?.into_iter();
                Ok(names.map(|listed| listed.map(ListedFile::Present)).collect())
            }
        }
    }

    async fn listed(&self, directory: u64, listed: &Listed<ListedFile>, with_entry: bool) -> Found {
        match listed.file {
            ListedFile::Present(key) => {
                self.shared.listed((directory, &listed.name), key, with_entry).await
            }
            ListedFile::Past(place) => self.past.found_at(directory, place, with_entry).await,
        }
    }

    async fn statfs(&self) -> StatFs {
        self.shared.sizes().await
    }

    async fn getxattr(&self, inode: u64, name: &Bytes) -> Result<Bytes, Fault> {
        if let Some(past) = self.past_of(inode) {
            return past.getxattr(inode, name).await;
        }
        let shared = &self.shared;
        if let Some(of) = LogOf::parse(name) {
            let key = shared.table().node(inode)?.key;
            return shared.log(key, of).await;
        }
        if let Some(xattr) = VirtualXattr::of(name) {
            return shared.virtual_xattr(inode, xattr).await;
        }
        let all = shared.xattrs(inode).await?;
        let found = all.into_iter().find(|(known, _)| known == name);
        Ok(found.ok_or(Errno::ENODATA)?.1)
    }

    async fn listxattr(&self, inode: u64) -> Result<Vec<Bytes>, Fault> {
        match self.past_of(inode) {
            Some(past) => past.listxattr(inode).await,
            None => {
                Ok(self.shared.xattrs(inode).await?.into_iter().map(|(name, _)| name).collect())
            }
        }
    }

    async fn setxattr(
        &self,
        inode: u64,
        name: &Bytes,
        value: Option<Bytes>,
        flags: XattrFlags,
    ) -> Result<(), Fault> {
        check_present(inode)?;
        match value {
            Some(value) => self.shared.set_xattr(inode, name, value, flags).await,
            None => self.shared.remove_xattr(inode, name).await,
        }
    }
}

impl Shared {
    /// The target of a symbolic link, which never changes.
    async fn target(&self, number: u64) -> Result<Bytes, Fault> {
        let (key, orphan) = {
            let table = self.table();
            let node = table.node(number)?;
            (node.key, node.orphan.clone())
        };
        let version = match orphan {
            Some(orphan) => orphan,
            None => self.inodes.read(key, Freshness::Within(Duration::MAX)).await?,
        };
        match &version.inode().contents {
            Contents::Symlink(target) => Ok(target.clone()),
            _ => Err(Errno::EINVAL.into()),
        }
    }

    /// The sizes of the volume.
    pub(super) async fn sizes(&self) -> StatFs {
        // Offline there is room in the spool. Online the volume may take what the ring has; how much of
        // that it holds is not counted.
        let room = match self.spool.room_offline() {
            Some((total_bytes, used_bytes)) => {
                let free_bytes = total_bytes.saturating_sub(used_bytes);
                Some(RingRoom { total_bytes, free_bytes, available_bytes: free_bytes })
            }
            None => self.last_room.ask(&self.env, &*self.blocks).await,
        };
        // It has no number of inodes to share out.
        let sizes = room::sizes(room, 0, 1 << self.block_size_log2);
        StatFs { max_links: MAX_LINKS as u32, ..sizes }
    }
}
