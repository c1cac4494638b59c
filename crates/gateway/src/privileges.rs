//! Set-user-ID and set-group-ID bits that a write, a truncation, a reservation of space or a change
//! of owner takes away.

use atoll_vfs::{Attr, Caller, Errno, FileKind, FileSystem, InodeNumber, SetAttr};

const SET_UID: u32 = 0o4000;
const SET_GID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o010;

/// The mode of a file without the bits, if it has any of them. Without the group's right to
/// execute, set-group-ID means something else and stays for root and members of the file's group.
pub(crate) fn reduced_mode(attr: &Attr, caller: Caller) -> Option<u32> {
    if attr.kind == FileKind::Directory || attr.mode & (SET_UID | SET_GID) == 0 {
        return None;
    }
    let keeps_set_gid =
        attr.mode & GROUP_EXECUTE == 0 && (caller.uid == 0 || caller.is_member(attr.gid));
    let reduced = attr.mode & !(SET_UID | if keeps_set_gid { 0 } else { SET_GID });
    (reduced != attr.mode).then_some(reduced)
}

/// The mode of a new file that is no directory. Set-group-ID with the right to execute is not for callers outside of the group that
/// the file takes from its directory (Linux: `mode_strip_sgid`).
pub(crate) fn new_mode(directory: &Attr, caller: Caller, mode: u32) -> u32 {
    let runs_as_group = mode & SET_GID != 0 && mode & GROUP_EXECUTE != 0;
    let is_outside = caller.uid != 0 && !caller.is_member(directory.gid);
    if directory.mode & SET_GID != 0 && runs_as_group && is_outside {
        mode & !SET_GID
    } else {
        mode
    }
}

pub(crate) async fn reduced_mode_of(
    fs: &dyn FileSystem,
    caller: Caller,
    inode: InodeNumber,
) -> Result<Option<u32>, Errno> {
    Ok(reduced_mode(&fs.getattr(inode, None).await?.attr, caller))
}

/// `changes` of attributes, with the mode that they bring about. The superuser's truncation
/// leaves the bits, and every change of owner takes them.
pub(crate) async fn with_reduced_mode(
    fs: &dyn FileSystem,
    caller: Caller,
    inode: InodeNumber,
    changes: SetAttr,
) -> Result<SetAttr, Errno> {
    let owner = changes.uid.is_some() || changes.gid.is_some();
    let truncated = changes.size_bytes.is_some() && caller.uid != 0;
    if changes.mode.is_some() || !(owner || truncated) {
        return Ok(changes);
    }
    Ok(SetAttr { mode: reduced_mode_of(fs, caller, inode).await?, ..changes })
}
