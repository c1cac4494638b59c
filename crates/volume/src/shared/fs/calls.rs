//! The calls of a file system, each answered by the module that knows.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::RingRoom;
use atoll_vfs::{
    Answer, AttrReply, Caller, CreateVerifier, DirEntry, Entry, Errno, FileKind, FileSystem,
    Handle, InodeNumber, InvalidationQueue, Locks, OpenFlags, Opened, PersistentHandle,
    RenameFlags, SeekTo, SetAttr, StatFs, Writer, XattrFlags,
};
use bytes::Bytes;

use super::locks::SharedLocks;
use super::names::{self, Birth};
use super::state::VirtualXattr;
use super::{Freshness, Present, STATUS_XATTR, reply};
use crate::room;
use crate::shared::entries::Entries;
use crate::shared::fault::Fault;
use crate::shared::inode::{Contents, InodeKey, MAX_LINKS};
use crate::shared::table::ROOT;

impl FileSystem for Present {
    fn locks(&self) -> Option<Arc<dyn Locks>> {
        Some(Arc::new(SharedLocks(self.shared.clone())))
    }

    fn invalidations(&self) -> Option<Arc<InvalidationQueue>> {
        Some(self.shared.invalidations.clone())
    }

    fn lookup(&self, _: Caller, parent: InodeNumber, name: &[u8]) -> Answer<Entry> {
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move { fs.lookup(parent.0, &name).await })
    }

    fn parent(&self, _: Caller, inode: InodeNumber) -> Answer<Entry> {
        self.answer(move |fs| async move {
            let (key, directory) = fs.directory(inode.0, fs.names_age()).await?;
            let above = directory.inode().links.iter().next().map(|link| link.directory);
            fs.entry(above.unwrap_or(key), fs.names_age()).await
        })
    }

    fn handle_of(&self, inode: InodeNumber) -> Answer<PersistentHandle> {
        self.answer(move |fs| async move {
            let key = fs.table().node(inode.0)?.key;
            Ok(PersistentHandle::new(Bytes::copy_from_slice(&key.0))?)
        })
    }

    fn by_handle(&self, _: Caller, handle: &PersistentHandle) -> Answer<Entry> {
        let key = handle.as_bytes().try_into().map(InodeKey).map_err(|_| Errno::ESTALE);
        self.answer(move |fs| async move {
            let key = key?;
            if fs.is_gone(key) {
                return Err(Errno::ESTALE.into());
            }
            match fs.entry(key, fs.names_age()).await {
                // Nobody has the inode, or it is another volume's.
                Err(Fault { errno: Errno::EIO, .. }) => Err(Errno::ESTALE.into()),
                found => found,
            }
        })
    }

    fn forget(&self, inode: InodeNumber, count: u64) {
        self.shared.table().forget(inode.0, count);
    }

    fn getattr(&self, inode: InodeNumber, _: Option<Handle>) -> Answer<AttrReply> {
        self.answer(move |fs| async move {
            fs.follow(inode.0).await;
            Ok(reply(fs.attr(inode.0).await?))
        })
    }

    fn setattr(
        &self,
        _: Caller,
        inode: InodeNumber,
        handle: Option<Handle>,
        changes: SetAttr,
    ) -> Answer<AttrReply> {
        self.answer(move |fs| async move {
            if let Some(handle) = handle {
                fs.check_lock(inode.0, handle.0)?;
            }
            fs.set(inode.0, handle.map(|handle| handle.0), changes).await?;
            Ok(reply(fs.attr(inode.0).await?))
        })
    }

    fn readlink(&self, inode: InodeNumber) -> Answer<Bytes> {
        self.answer(move |fs| async move {
            let (key, orphan) = {
                let table = fs.table();
                let node = table.node(inode.0)?;
                (node.key, node.orphan.clone())
            };
            let version = match orphan {
                Some(orphan) => orphan,
                // A link's target never changes.
                None => fs.inodes.read(key, Freshness::Within(Duration::MAX)).await?,
            };
            match &version.inode().contents {
                Contents::Symlink(target) => Ok(target.clone()),
                _ => Err(Errno::EINVAL.into()),
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
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move {
            let birth = match kind {
                FileKind::Regular => Birth::File,
                FileKind::Directory | FileKind::Symlink => return Err(Errno::EINVAL.into()),
                kind => Birth::Other(Contents::Special { kind, rdev }),
            };
            let made = fs.make(caller, (parent.0, &name), birth, mode);
            fs.exclusively((parent.0, &name), false, made).await
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
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move {
            let place = (parent.0, &name);
            let made = async {
                match fs.make(caller, place, Birth::Exclusive(verifier), mode).await {
                    Err(Fault { errno: Errno::EEXIST, .. }) => {}
                    made => return made,
                }
                let found = fs.lookup(parent.0, &name).await?;
                if verifier.has_made(&found.attr) {
                    return Ok(found);
                }
                fs.table().forget(found.attr.inode.0, 1);
                Err(Errno::EEXIST.into())
            };
            fs.exclusively(place, true, made).await
        })
    }

    fn mkdir(&self, caller: Caller, parent: InodeNumber, name: &[u8], mode: u32) -> Answer<Entry> {
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move {
            let birth = Birth::Other(Contents::Directory(Entries::default()));
            let made = fs.make(caller, (parent.0, &name), birth, mode);
            fs.exclusively((parent.0, &name), false, made).await
        })
    }

    fn symlink(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        target: &[u8],
    ) -> Answer<Entry> {
        let (name, target) = (Bytes::copy_from_slice(name), Bytes::copy_from_slice(target));
        self.answer(move |fs| async move {
            let birth = Birth::Other(names::symlink(target)?);
            let made = fs.make(caller, (parent.0, &name), birth, 0o777);
            fs.exclusively((parent.0, &name), false, made).await
        })
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
            let linked = fs.link(inode.0, (new_parent.0, &name));
            fs.exclusively((new_parent.0, &name), false, linked).await
        })
    }

    fn unlink(&self, _: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move { fs.unlink(parent.0, &name).await })
    }

    fn rmdir(&self, _: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move { fs.rmdir(parent.0, &name).await })
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
            let renamed = fs.rename((parent.0, &name), (new_parent.0, &new_name), flags);
            match flags.no_replace {
                true => fs.exclusively((new_parent.0, &new_name), false, renamed).await,
                false => renamed.await,
            }
        })
    }

    fn open(&self, caller: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened> {
        self.answer(move |fs| async move { fs.open(inode.0, flags, caller.pid).await })
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
            if flags.has(OpenFlags::EXCLUSIVE) {
                let created = fs.create_named(caller, (parent.0, &name), mode, flags);
                return fs.exclusively((parent.0, &name), true, created).await;
            }
            fs.create(caller, (parent.0, &name), mode, flags).await
        })
    }

    fn read(&self, inode: InodeNumber, handle: Handle, offset: u64, len: u32) -> Answer<Bytes> {
        self.answer(move |fs| async move { fs.read((inode.0, handle.0), offset, len).await })
    }

    fn write(
        &self,
        writer: Writer,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        data: Bytes,
    ) -> Answer<u32> {
        self.answer(
            move |fs| async move { fs.write(writer, (inode.0, handle.0), offset, &data).await },
        )
    }

    fn flush(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.answer(move |fs| async move {
            let flags = fs.table().flags(inode.0, handle.0)?;
            fs.check_lock(inode.0, handle.0)?;
            // An open may empty a file that it does not write.
            match flags.writes() || flags.has(OpenFlags::TRUNCATE) {
                true => fs.publish(inode.0).await?,
                false => fs.name_newborn(inode.0).await?,
            }
            // With a lock that ran out meanwhile went what was written.
            Ok(fs.check_lock(inode.0, handle.0)?)
        })
    }

    fn fsync(&self, inode: InodeNumber, handle: Handle, _: bool) -> Answer<()> {
        self.answer(move |fs| async move {
            fs.check_lock(inode.0, handle.0)?;
            fs.publish(inode.0).await?;
            Ok(fs.check_lock(inode.0, handle.0)?)
        })
    }

    /// Of the root directory, everything: so a program asks whether the mount may end.
    fn fsyncdir(&self, inode: InodeNumber, _: Handle, _: bool) -> Answer<()> {
        self.answer(move |fs| async move {
            match inode {
                InodeNumber::ROOT => fs.store_all().await,
                _ => fs.put_removals().await,
            }
        })
    }

    fn persist(&self, inodes: &[InodeNumber]) -> Answer<()> {
        let inodes = inodes.to_vec();
        self.answer(move |fs| async move {
            for inode in inodes {
                match fs.publish(inode.0).await {
                    // It is gone.
                    Err(Fault { errno: Errno::ESTALE, .. }) => {}
                    published => published?,
                }
            }
            fs.put_removals().await
        })
    }

    fn sync(&self) -> Answer<()> {
        self.answer(|fs| async move {
            fs.finish_removals().await;
            fs.store_all().await
        })
    }

    fn seek(&self, inode: InodeNumber, handle: Handle, offset: u64, to: SeekTo) -> Answer<u64> {
        self.answer(move |fs| async move { fs.seek((inode.0, handle.0), offset, to).await })
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
            fs.fallocate((inode.0, handle.0), (offset, len), mode).await
        })
    }

    fn close(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.answer(move |fs| async move { fs.close(inode.0, handle.0).await })
    }

    fn opendir(&self, _: Caller, inode: InodeNumber) -> Answer<Opened> {
        self.answer(move |fs| async move { fs.open_directory(inode.0).await })
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
            fs.list((inode.0, handle.0), cookie, limit, with_entries).await
        })
    }

    fn closedir(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        let closed = self.shared.table().close(inode.0, handle.0);
        Box::pin(async move { closed })
    }

    fn statfs(&self, _: InodeNumber) -> Answer<StatFs> {
        let shared = self.shared.clone();
        Box::pin(async move {
            // Offline there is room in the spool. Online the volume may take what the ring has; how much of
            // that it holds is not counted.
            let room = match shared.spool.room_offline() {
                Some((total_bytes, used_bytes)) => {
                    let free_bytes = total_bytes.saturating_sub(used_bytes);
                    Some(RingRoom { total_bytes, free_bytes, available_bytes: free_bytes })
                }
                None => shared.last_room.ask(&shared.env, &*shared.blocks).await,
            };
            // It has no number of inodes to share out.
            let sizes = room::sizes(room, 0, 1 << shared.block_size_log2);
            Ok(StatFs { max_links: MAX_LINKS as u32, ..sizes })
        })
    }

    fn getxattr(&self, inode: InodeNumber, name: &[u8]) -> Answer<Bytes> {
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move {
            if inode.0 == ROOT && &name[..] == STATUS_XATTR {
                return Ok(fs.status().await.into());
            }
            if let Some(xattr) = VirtualXattr::of(&name) {
                return fs.virtual_xattr(inode.0, xattr).await;
            }
            let all = fs.xattrs(inode.0).await?;
            let found = all.into_iter().find(|(known, _)| *known == name);
            Ok(found.ok_or(Errno::ENODATA)?.1)
        })
    }

    fn listxattr(&self, inode: InodeNumber) -> Answer<Vec<Bytes>> {
        self.answer(move |fs| async move {
            Ok(fs.xattrs(inode.0).await?.into_iter().map(|(name, _)| name).collect())
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
        self.answer(move |fs| async move { fs.set_xattr(inode.0, &name, value, flags).await })
    }

    fn removexattr(&self, _: Caller, inode: InodeNumber, name: &[u8]) -> Answer<()> {
        let name = Bytes::copy_from_slice(name);
        self.answer(move |fs| async move { fs.remove_xattr(inode.0, &name).await })
    }
}
