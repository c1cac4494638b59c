//! Attributes: of the plain files, set through the journal.

use atoll_vfs::{AttrReply, Caller, Errno, FileKind, Handle, SetAttr, SetTime, XattrFlags};
use bytes::Bytes;

use super::{PoolFs, TTL};
use crate::change::{NewTime, PoolChange};
use crate::disk::{ACCESS_LIST, DEFAULT_LIST, Disk, DiskResult, Stat};
use crate::layout::FileId;
use crate::messages::OWN_ATTRIBUTES;

/// The longest value of an attribute, bytes (Linux `XATTR_SIZE_MAX`).
const MAX_VALUE_BYTES: usize = 64 << 10;

impl<D: Disk> PoolFs<D> {
    /// What is known of a file.
    pub(super) async fn stat(&self, id: FileId) -> DiskResult<Stat> {
        let node = self.member.node(id).await?;
        let stat = self.member.stat(id, &node).await?;
        self.check_not_removed(id, &stat)?;
        Ok(stat)
    }

    /// That nobody has removed a file by hand whose node is open.
    pub(super) fn check_not_removed(&self, id: FileId, stat: &Stat) -> DiskResult<()> {
        let mut held = self.member.held();
        if stat.nlink > 0 || held.is_nameless(id) {
            return Ok(());
        }
        held.drop_node(id);
        Err(Errno::ESTALE)
    }

    pub(super) async fn set_attributes(
        &self,
        id: FileId,
        handle: Option<Handle>,
        changes: SetAttr,
    ) -> DiskResult<AttrReply> {
        let _changing = self.member.begin_change().await?;
        let _turn = self.member.turns.write(id.0).await;
        let node = self.member.node(id).await?;
        let before = self.member.stat(id, &node).await?;
        let disk = &self.member.disk;
        if let Some(size_bytes) = changes.size_bytes {
            match before.kind {
                FileKind::Regular => {}
                FileKind::Directory => return Err(Errno::EISDIR),
                _ => return Err(Errno::EINVAL),
            }
            let open = handle.map(|handle| self.opened_file(id, handle)).and_then(Result::ok);
            let file = match open {
                Some((file, _)) => file,
                None => disk.open(&node).await?,
            };
            self.member.set_length(id, &file, size_bytes).await?;
        }
        let (uid, gid) = (changes.uid, changes.gid);
        let mode = changes.mode.map(|mode| mode & 0o7777);
        let time = |time: SetTime| match time {
            SetTime::Now => NewTime::Now(disk.now().into()),
            SetTime::To(time) => NewTime::To(time.into()),
        };
        let (atime, mtime) = (changes.atime.map(time), changes.mtime.map(time));
        if uid.is_some() || gid.is_some() || mode.is_some() || atime.is_some() || mtime.is_some() {
            if mode.is_some() && before.kind == FileKind::Symlink {
                return Err(Errno::EOPNOTSUPP);
            }
            let change = PoolChange::Attributes { id, mode, uid, gid, atime, mtime };
            self.member.change(change).await?;
        }
        let stat = self.member.stat(id, &node).await?;
        Ok(AttrReply { attr: self.attr(id, &stat)?, ttl: TTL })
    }

    /// Has the names and attributes of these files survive a crash: the journal has them; lengths are on the files.
    pub(super) async fn persist_files(&self, ids: &[FileId]) -> DiskResult<()> {
        for id in ids {
            if self.member.held().resized(*id).is_some() {
                self.sync_length(*id).await?;
            }
        }
        self.member.sync_changes().await
    }

    async fn sync_length(&self, id: FileId) -> DiskResult<()> {
        let node = match self.member.node(id).await {
            // It is gone meanwhile.
            Err(Errno::ESTALE) => return Ok(()),
            node => node?,
        };
        let file = self.member.disk.open(&node).await?;
        self.member.sync_bytes(id, &file, true).await
    }

    pub(super) async fn attribute(&self, id: FileId, name: &[u8]) -> DiskResult<Bytes> {
        check_attribute(name).map_err(|errno| match errno {
            Errno::EPERM => Errno::ENODATA,
            errno => errno,
        })?;
        let node = self.member.node(id).await?;
        self.member.disk.xattr(&node, name).await
    }

    pub(super) async fn attribute_names(&self, id: FileId) -> DiskResult<Vec<Bytes>> {
        let node = self.member.node(id).await?;
        let names = match self.member.disk.xattrs(&node).await {
            Err(Errno::EOPNOTSUPP) => return Ok(Vec::new()),
            names => names?,
        };
        Ok(names.into_iter().filter(|name| !name.starts_with(OWN_ATTRIBUTES)).collect())
    }

    pub(super) async fn set_attribute(
        &self,
        caller: Caller,
        id: FileId,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
    ) -> DiskResult<()> {
        check_attribute(name)?;
        if value.len() > MAX_VALUE_BYTES {
            return Err(Errno::E2BIG);
        }
        self.member.check_room()?;
        let _changing = self.member.begin_change().await?;
        let _turn = self.member.turns.write(id.0).await;
        let node = self.member.node(id).await?;
        let before = self.member.disk.stat(&node).await?;
        let stands = match self.member.disk.xattr(&node, name).await {
            Ok(_) => true,
            Err(Errno::ENODATA) => false,
            Err(errno) => return Err(errno),
        };
        if stands && flags.create {
            return Err(Errno::EEXIST);
        }
        if !stands && flags.replace {
            return Err(Errno::ENODATA);
        }
        let change = PoolChange::Extended {
            id,
            name: name.to_vec(),
            value: Some(value.to_vec()),
            by: self.origin,
        };
        self.member.change(change).await?;
        if name == ACCESS_LIST {
            self.keep_set_gid_of_members(caller, &node, &before).await?;
            self.note_mode(id, &node).await?;
        }
        Ok(())
    }

    /// A list that sets the mode takes set-group-ID away from a file of a group that its owner is not in (`chmod(2)`); the kernel
    /// under the disk asks whether *this process* is in it.
    async fn keep_set_gid_of_members(
        &self,
        caller: Caller,
        node: &D::Node,
        before: &Stat,
    ) -> DiskResult<()> {
        const SET_GID: u32 = 0o2000;
        let after = self.member.disk.stat(node).await?;
        if before.mode & SET_GID != 0
            && after.mode & SET_GID != 0
            && caller.uid != 0
            && !caller.is_member(before.gid)
        {
            self.member.disk.set_mode(node, after.mode & !SET_GID).await?;
        }
        Ok(())
    }

    pub(super) async fn remove_attribute(&self, id: FileId, name: &[u8]) -> DiskResult<()> {
        check_attribute(name)?;
        let _changing = self.member.begin_change().await?;
        let _turn = self.member.turns.write(id.0).await;
        let node = self.member.node(id).await?;
        match self.member.disk.xattr(&node, name).await {
            Ok(_) => {}
            // Without a list the mode is what there is.
            Err(Errno::ENODATA) if name == ACCESS_LIST || name == DEFAULT_LIST => return Ok(()),
            Err(errno) => return Err(errno),
        }
        let change = PoolChange::Extended { id, name: name.to_vec(), value: None, by: self.origin };
        self.member.change(change).await?;
        if name == ACCESS_LIST {
            self.note_mode(id, &node).await?;
        }
        Ok(())
    }

    /// An access control list has set the mode: an earlier one is not to be set again after a crash.
    async fn note_mode(&self, id: FileId, node: &D::Node) -> DiskResult<()> {
        let mode = Some(self.member.disk.stat(node).await?.mode);
        let change =
            PoolChange::Attributes { id, mode, uid: None, gid: None, atime: None, mtime: None };
        self.member.change(change).await.map(|_| ())
    }
}

fn check_attribute(name: &[u8]) -> DiskResult<()> {
    match name.starts_with(OWN_ATTRIBUTES) {
        true => Err(Errno::EPERM),
        false if name.is_empty() || name.contains(&0) => Err(Errno::ERANGE),
        false if name.len() > 255 => Err(Errno::ERANGE),
        false => Ok(()),
    }
}
