//! What a caller may do, as far as the front end cannot tell. It checks modes, owners and access
//! control lists; only this module knows the rest:
//!
//! - **Inode flags** (`chattr(1)`). The kernel that serves a FUSE mount never learns them, so
//!   each call that changes something asks here, as the kernel's own file systems ask
//!   `IS_IMMUTABLE` and `IS_APPEND`. The tables of `may_delete`, `may_create`, `may_open`,
//!   `notify_change` and `xattr_permission` (Linux `fs/namei.c`, `fs/attr.c`, `fs/xattr.c`):
//!
//!   | | immutable | append-only |
//!   |---|---|---|
//!   | open for writing, write | refused | with `O_APPEND` only, never `O_TRUNC` |
//!   | truncate, mode, owner, explicit times, attributes | refused | refused |
//!   | times to now | refused | allowed |
//!   | another name for it; removing, renaming, replacing it | refused | refused |
//!   | a new name in it | refused | allowed |
//!   | removing or renaming a name in it | refused | refused |
//!
//! - **Reserved blocks**: root, and the user and group that the superblock names, may use
//!   them. The writer counts, not the owner of the file.
//! - **TFS's own settings**: whether a file is transparent is its owner's choice; what concerns
//!   the whole file system is the choice of the owner of its topmost directory; root may both.

use atoll_vfs::{Caller, Errno, FileKind, InodeFlags, InodeNumber, OpenFlags, SetAttr, SetTime};

use super::held::to_ext2;
use super::{Core, INODE_BLOCKS, Shared, Tfs};
use crate::format::inode::{APPEND_ONLY, IMMUTABLE, Inode, MODIFIABLE_FLAGS, VISIBLE_FLAGS};
use crate::format::superblock::ROOT_INODE;

const ROOT_USER: u32 = 0;

fn refuse_flags(inode: &Inode, flags: u32) -> Result<(), Errno> {
    if inode.flags & flags == 0 { Ok(()) } else { Err(Errno::EPERM) }
}

/// For what an immutable inode refuses and an append-only one allows; a new name in a
/// directory is one.
pub(super) fn check_mutable(inode: &Inode) -> Result<(), Errno> {
    refuse_flags(inode, IMMUTABLE)
}

/// For what both refuse.
pub(super) fn check_changeable(inode: &Inode) -> Result<(), Errno> {
    refuse_flags(inode, IMMUTABLE | APPEND_ONLY)
}

/// Before a name of `inode` is taken out of `directory`.
pub(super) fn check_removable(directory: &Inode, inode: &Inode) -> Result<(), Errno> {
    check_changeable(directory)?;
    check_changeable(inode)
}

/// Before a file is opened.
pub(super) fn check_open(inode: &Inode, flags: OpenFlags) -> Result<(), Errno> {
    let truncates = flags.has(OpenFlags::TRUNCATE);
    if flags.writes() || truncates {
        check_mutable(inode)?;
    }
    if truncates || (flags.writes() && !flags.has(OpenFlags::APPEND)) {
        refuse_flags(inode, APPEND_ONLY)?;
    }
    Ok(())
}

/// Before attributes are changed; the length is checked where it is.
pub(super) fn check_setattr(inode: &Inode, changes: &SetAttr) -> Result<(), Errno> {
    let SetAttr { mode, uid, gid, atime, mtime, .. } = changes;
    let explicit = [atime, mtime].iter().any(|time| matches!(time, Some(SetTime::To(_))));
    if mode.is_some() || uid.is_some() || gid.is_some() || explicit {
        check_changeable(inode)?;
    }
    if atime.is_some() || mtime.is_some() {
        check_mutable(inode)?;
    }
    Ok(())
}

/// For what only the owner of an inode and root may do.
pub(super) fn check_owner(caller: Caller, inode: &Inode) -> Result<(), Errno> {
    if [ROOT_USER, inode.uid].contains(&caller.uid) { Ok(()) } else { Err(Errno::EPERM) }
}

impl Core {
    /// Whether a caller may use the blocks kept for the administrator.
    pub(super) fn may_use_reserve(&self, caller: Caller) -> bool {
        let superblock = self.ext2.superblock();
        let (uid, gid) = (superblock.reserved_uid().into(), superblock.reserved_gid().into());
        [ROOT_USER, uid].contains(&caller.uid) || (gid != 0 && caller.is_member(gid))
    }
}

impl Tfs {
    /// Before a setting of the whole file system is changed, which is set on its topmost
    /// directory; `EINVAL` elsewhere.
    pub(crate) fn check_administrator(
        &self,
        caller: Caller,
        number: InodeNumber,
    ) -> Result<(), Errno> {
        if number != InodeNumber::ROOT {
            return Err(Errno::EINVAL);
        }
        check_owner(caller, &self.shared.core().live_inode(ROOT_INODE)?)
    }
}

impl Shared {
    pub(super) fn inode_flags(&self, number: InodeNumber) -> Result<InodeFlags, Errno> {
        let number = to_ext2(number)?;
        Ok(InodeFlags(self.core().live_inode(number)?.flags & VISIBLE_FLAGS))
    }

    pub(super) fn set_inode_flags(
        &self,
        caller: Caller,
        number: InodeNumber,
        flags: InodeFlags,
    ) -> Result<(), Errno> {
        let number = to_ext2(number)?;
        let _handle = self.join_transaction(INODE_BLOCKS)?;
        let mut core = self.core();
        let mut inode = core.live_inode(number)?;
        if !matches!(inode.kind(), Ok(FileKind::Regular | FileKind::Directory)) {
            return Err(Errno::ENOTTY);
        }
        check_owner(caller, &inode)?;
        let changed = (inode.flags ^ flags.0) & MODIFIABLE_FLAGS;
        if changed & (IMMUTABLE | APPEND_ONLY) != 0 && caller.uid != ROOT_USER {
            return Err(Errno::EPERM);
        }
        // While a file stays immutable its other flags do too, as with ext4.
        if changed != 0 && inode.flags & flags.0 & IMMUTABLE != 0 {
            return Err(Errno::EPERM);
        }
        inode.flags ^= changed;
        inode.ctime = self.now();
        core.ext2.put_inode(number, &inode).map_err(|error| self.broken(&error))
    }
}
