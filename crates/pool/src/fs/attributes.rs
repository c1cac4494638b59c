//! Attributes: of the plain files, set through the journal.
//!
//! **In a pool of several members a call that sets values which the file has makes no change** of the pool: a change costs a sync of all
//! members' journals, and programs that copy trees make many such calls. The primary compares with its own file, which shows all
//! changes that were decided before: each holds the file's lock until the primary has made it. The call still sets the file's change
//! time, which is each member's own, on the primary. Times that a call sets always make a change: equal ones may be the primary's alone.

use atoll_vfs::{AttrReply, Caller, Errno, FileKind, Handle, SetAttr, SetTime, XattrFlags};
use bytes::Bytes;

use super::{PoolFs, TTL};
use crate::change::{NewTime, PoolChange};
use crate::disk::{
    ACCESS_LIST, CAPABILITY, DEFAULT_LIST, Disk, DiskResult, Stat, mode_of_minimal_list,
};
use crate::layout::FileId;
use crate::messages::OWN_ATTRIBUTES;

/// The longest value of an attribute, bytes (Linux `XATTR_SIZE_MAX`).
const MAX_VALUE_BYTES: usize = 64 << 10;

const SET_UID: u32 = 0o4000;
const SET_GID: u32 = 0o2000;
/// A mode's permissions of owner, group and others.
const PERMISSIONS: u32 = 0o777;

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
        self.member.check_copies()?;
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
            let sets_owner = uid.is_some() || gid.is_some();
            // The change names the mode, too: after a crash the mode of an earlier change is set after the owner.
            let mode = mode.or_else(|| mode_taken_by_owner(&before).filter(|_| sets_owner));
            let sets_nothing = atime.is_none()
                && mtime.is_none()
                && uid.is_none_or(|uid| uid == before.uid)
                && gid.is_none_or(|gid| gid == before.gid)
                && mode.is_none_or(|mode| mode == before.mode)
                && !(sets_owner && self.may_have_capability(&node, &before).await);
            if self.member.in_group && sets_nothing {
                self.set_change_time(&node, &before).await?;
            } else {
                let change = PoolChange::Attributes { id, mode, uid, gid, atime, mtime };
                self.member.change_file(id, change).await?;
            }
        }
        let stat = self.member.stat(id, &node).await?;
        Ok(AttrReply { attr: self.attr(id, &stat)?, ttl: TTL })
    }

    /// Whether a file may have an attribute that a new owner takes away.
    async fn may_have_capability(&self, node: &D::Node, stat: &Stat) -> bool {
        let is_without = async || {
            let capability = self.member.disk.xattr(node, CAPABILITY).await;
            matches!(capability, Err(Errno::ENODATA | Errno::EOPNOTSUPP))
        };
        stat.kind == FileKind::Regular && !is_without().await
    }

    /// Sets a file's change time, on this member alone, by setting an attribute that the file has.
    async fn set_change_time(&self, node: &D::Node, stat: &Stat) -> DiskResult<()> {
        let disk = &self.member.disk;
        match stat.kind {
            FileKind::Symlink => disk.set_owner(node, Some(stat.uid), Some(stat.gid)).await,
            _ => disk.set_mode(node, stat.mode).await,
        }
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
        self.member.check_copies()?;
        let node = self.member.node(id).await?;
        let before = self.member.disk.stat(&node).await?;
        let stands = match self.member.disk.xattr(&node, name).await {
            Ok(stands) => Some(stands),
            Err(Errno::ENODATA) => None,
            Err(errno) => return Err(errno),
        };
        if stands.is_some() && flags.create {
            return Err(Errno::EEXIST);
        }
        if stands.is_none() && flags.replace {
            return Err(Errno::ENODATA);
        }
        if self.member.in_group {
            let takes_set_gid = name == ACCESS_LIST && before.mode & SET_GID != 0;
            if stands.as_deref() == Some(value) && !takes_set_gid {
                return self.set_change_time(&node, &before).await;
            }
            // A call that must find no list is made once: its change has to name it, which one of attributes cannot.
            if name == ACCESS_LIST
                && stands.is_none()
                && !flags.create
                && let Some(permissions) = mode_of_minimal_list(value)
            {
                return self.set_permissions(caller, id, (&node, &before), permissions).await;
            }
        }
        let change = PoolChange::Extended {
            id,
            name: name.to_vec(),
            value: Some(value.to_vec()),
            by: self.origin,
        };
        self.member.change_file(id, change).await?;
        if name == ACCESS_LIST {
            self.keep_set_gid_of_members(caller, &node, &before).await?;
            self.note_mode(id, &node, &before).await?;
        }
        Ok(())
    }

    /// Gives a file without an access control list one that says no more than a mode: the file gets these permissions, and no list.
    async fn set_permissions(
        &self,
        caller: Caller,
        id: FileId,
        (node, before): (&D::Node, &Stat),
        permissions: u32,
    ) -> DiskResult<()> {
        let mut mode = before.mode & !PERMISSIONS | permissions;
        if !keeps_set_gid(caller, before) {
            mode &= !SET_GID;
        }
        if mode == before.mode {
            return self.set_change_time(node, before).await;
        }
        let mode = Some(mode);
        let change =
            PoolChange::Attributes { id, mode, uid: None, gid: None, atime: None, mtime: None };
        self.member.change_file(id, change).await
    }

    /// A list that sets the mode takes set-group-ID away from a file of a group that its owner is not in (`chmod(2)`); the kernel
    /// under the disk asks whether *this process* is in it.
    async fn keep_set_gid_of_members(
        &self,
        caller: Caller,
        node: &D::Node,
        before: &Stat,
    ) -> DiskResult<()> {
        let after = self.member.disk.stat(node).await?;
        if before.mode & after.mode & SET_GID != 0 && !keeps_set_gid(caller, before) {
            self.member.disk.set_mode(node, after.mode & !SET_GID).await?;
        }
        Ok(())
    }

    pub(super) async fn remove_attribute(&self, id: FileId, name: &[u8]) -> DiskResult<()> {
        check_attribute(name)?;
        let _changing = self.member.begin_change().await?;
        let _turn = self.member.turns.write(id.0).await;
        self.member.check_copies()?;
        let node = self.member.node(id).await?;
        let before = self.member.disk.stat(&node).await?;
        match self.member.disk.xattr(&node, name).await {
            Ok(_) => {}
            // Without a list the mode is what there is.
            Err(Errno::ENODATA) if name == ACCESS_LIST || name == DEFAULT_LIST => return Ok(()),
            Err(errno) => return Err(errno),
        }
        let change = PoolChange::Extended { id, name: name.to_vec(), value: None, by: self.origin };
        self.member.change_file(id, change).await?;
        if name == ACCESS_LIST {
            self.note_mode(id, &node, &before).await?;
        }
        Ok(())
    }

    /// An access control list has set the mode: after a crash an earlier mode must not be set again. In a pool of several members a mode that
    /// the list has left as it was needs no change: it is the last that the journal has, if it has one.
    async fn note_mode(&self, id: FileId, node: &D::Node, before: &Stat) -> DiskResult<()> {
        let mode = self.member.disk.stat(node).await?.mode;
        if self.member.in_group && mode == before.mode {
            return Ok(());
        }
        let mode = Some(mode);
        let change =
            PoolChange::Attributes { id, mode, uid: None, gid: None, atime: None, mtime: None };
        self.member.change_file(id, change).await
    }
}

/// The mode that a file has after its owner was set, if that takes bits away (Linux: `chown_common`, for a process that may set any mode).
fn mode_taken_by_owner(before: &Stat) -> Option<u32> {
    const GROUP_EXECUTES: u32 = 0o010;
    let taken = match before.mode & GROUP_EXECUTES {
        // Without the right to execute, set-group-ID once meant mandatory locks.
        0 => SET_UID,
        _ => SET_UID | SET_GID,
    };
    let loses = !matches!(before.kind, FileKind::Directory | FileKind::Symlink);
    (loses && before.mode & taken != 0).then_some(before.mode & !taken)
}

/// Whether a caller who changes a file's mode may leave it set-group-ID (`chmod(2)`).
fn keeps_set_gid(caller: Caller, before: &Stat) -> bool {
    caller.uid == 0 || caller.is_member(before.gid)
}

fn check_attribute(name: &[u8]) -> DiskResult<()> {
    match name.starts_with(OWN_ATTRIBUTES) {
        true => Err(Errno::EPERM),
        false if name.is_empty() || name.contains(&0) => Err(Errno::ERANGE),
        false if name.len() > 255 => Err(Errno::ERANGE),
        false => Ok(()),
    }
}
