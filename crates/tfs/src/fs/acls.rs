//! Access control lists of files: reading and setting them, a `chmod`, and what a new file takes
//! from its directory. [`Acl`](crate::ext2::Acl) describes them and
//! their enforcement.

use atoll_vfs::{Caller, Errno, FileKind, InodeNumber};
use bytes::Bytes;

use super::access::check_changeable;
use super::held::to_ext2;
use super::names::Failure;
use super::serve::XATTR_BLOCKS;
use super::{Core, Shared, errno};
use crate::ext2::{Acl, AclKind, Ext2Error, Xattrs};
use crate::format::inode::Inode;

/// Set-group-ID.
const SET_GID: u16 = 0o2000;
/// What a program sends to remove a list: a header without entries.
const NO_ENTRIES_BYTES: usize = 4;

/// One list among attributes that were read.
fn acl_of(xattrs: &Xattrs, number: u32, kind: AclKind) -> Result<Option<Acl>, Ext2Error> {
    let Some(bytes) = xattrs.acl(kind) else { return Ok(None) };
    let damaged = || Ext2Error::Damaged(format!("the access control list of inode {number}"));
    Acl::from_disk(bytes).ok_or_else(damaged).map(Some)
}

impl Core {
    /// A list of a file. One that cannot be read is an error, never no list.
    pub(super) fn acl(
        &mut self,
        number: u32,
        inode: &Inode,
        kind: AclKind,
    ) -> Result<Option<Acl>, Errno> {
        let xattrs = self.ext2.xattrs(number, inode).map_err(|error| errno(&error))?;
        acl_of(&xattrs, number, kind).map_err(|error| errno(&error))
    }

    /// Gives a new file its mode, and the lists that follow from its directory's default list.
    pub(super) fn inherit(
        &mut self,
        caller: Caller,
        default: Option<Acl>,
        number: u32,
        inode: &mut Inode,
    ) -> Result<(), Ext2Error> {
        let kind = inode.kind();
        if kind == Ok(FileKind::Symlink) {
            return Ok(());
        }
        let Some(default) = default else {
            inode.mode &= !(caller.umask as u16 & 0o777);
            return Ok(());
        };
        let mut access = default.clone();
        inode.mode = access.inherit(inode.mode);
        let mut xattrs = Xattrs::default();
        if !access.is_minimal() {
            xattrs.set_acl(AclKind::Access, Some(&access.to_disk()));
        }
        if kind == Ok(FileKind::Directory) {
            xattrs.set_acl(AclKind::Default, Some(&default.to_disk()));
        }
        let privileged = self.may_use_reserve(caller);
        self.ext2.put_xattrs(number, inode, &xattrs, privileged)
    }

    /// Brings a file's access list in step with a mode that it is to get.
    pub(super) fn change_acl_mode(
        &mut self,
        caller: Caller,
        number: u32,
        inode: &mut Inode,
        mode: u16,
    ) -> Result<(), Failure> {
        let mut xattrs = self.ext2.xattrs(number, inode).map_err(|error| errno(&error))?;
        let acl = acl_of(&xattrs, number, AclKind::Access).map_err(|error| errno(&error))?;
        let Some(mut acl) = acl else { return Ok(()) };
        acl.set_mode(mode);
        xattrs.set_acl(AclKind::Access, Some(&acl.to_disk()));
        let privileged = self.may_use_reserve(caller);
        Ok(self.ext2.put_xattrs(number, inode, &xattrs, privileged)?)
    }
}

impl Shared {
    /// A list as the attribute that programs read.
    pub(super) fn acl_xattr(&self, number: InodeNumber, kind: AclKind) -> Result<Bytes, Errno> {
        let number = to_ext2(number)?;
        let mut core = self.core();
        let inode = core.live_inode(number)?;
        let acl = core.acl(number, &inode, kind)?.ok_or(Errno::ENODATA)?;
        Ok(Bytes::from(acl.to_xattr()))
    }

    /// Sets or removes a list, by the attribute that programs write.
    pub(super) fn change_acl(
        &self,
        caller: Caller,
        number: InodeNumber,
        kind: AclKind,
        value: Option<&[u8]>,
    ) -> Result<(), Errno> {
        let number = to_ext2(number)?;
        let set = value.filter(|value| value.len() != NO_ENTRIES_BYTES);
        let acl = set.map(|value| Acl::from_xattr(value).ok_or(Errno::EINVAL)).transpose()?;
        self.with_space(XATTR_BLOCKS, |core, now| {
            let mut inode = core.live_inode(number)?;
            check_changeable(&inode)?;
            match (inode.kind(), kind) {
                (Ok(FileKind::Directory), _) => {}
                (Ok(FileKind::Symlink), _) => return Err(Errno::EOPNOTSUPP.into()),
                (_, AclKind::Default) if acl.is_some() => return Err(Errno::EACCES.into()),
                _ => {}
            }
            let mut xattrs = core.ext2.xattrs(number, &inode).map_err(|error| errno(&error))?;
            if value.is_none() && xattrs.acl(kind).is_none() {
                return Err(Errno::ENODATA.into());
            }
            let kept = acl.as_ref().filter(|acl| kind == AclKind::Default || !acl.is_minimal());
            let bytes = kept.map(Acl::to_disk);
            xattrs.set_acl(kind, bytes.as_deref());
            let privileged = core.may_use_reserve(caller);
            core.ext2.put_xattrs(number, &mut inode, &xattrs, privileged)?;
            if let (AclKind::Access, Some(acl)) = (kind, &acl) {
                inode.mode = inode.mode & !0o777 | acl.mode();
                // As a chmod: only root and members of the group set this bit.
                if caller.uid != 0 && !caller.is_member(inode.gid) {
                    inode.mode &= !SET_GID;
                }
            }
            inode.ctime = now;
            core.ext2.put_inode(number, &inode)?;
            Ok(())
        })
    }
}
