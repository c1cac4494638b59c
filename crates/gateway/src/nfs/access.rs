//! Who may do what: the checks that a kernel makes for a local file system and for a FUSE mount, and that a server of
//! NFS makes itself, from modes and access control lists (`acl(5)`).
//!
//! As Linux' server does (`nfsd_permission`): root may read and write everything; the owner of a file may read and write it whatever
//! its mode says, since a program that opened it before its mode was changed goes on, and NFS knows no opens; who may
//! execute a file may read it.

use atoll_vfs::{Attr, Caller, Errno, FileKind, FileSystem};

/// Bits of permissions.
pub(super) const READ: u32 = 4;
pub(super) const WRITE: u32 = 2;
pub(super) const EXECUTE: u32 = 1;

const STICKY: u32 = 0o1000;
const ACCESS_LIST: &[u8] = b"system.posix_acl_access";

/// Whether the caller has all of these bits by the file's mode, list and owner.
pub(super) async fn may(
    fs: &dyn FileSystem,
    attr: &Attr,
    caller: &Caller,
    bits: u32,
) -> Result<bool, Errno> {
    if caller.uid == 0 {
        let is_executable = attr.kind == FileKind::Directory || attr.mode & 0o111 != 0;
        return Ok(bits & EXECUTE == 0 || is_executable);
    }
    if caller.uid == attr.uid {
        return Ok(attr.mode >> 6 & bits == bits);
    }
    let list = if fs.has_acls() && attr.mode & 0o070 != 0 {
        match fs.getxattr(attr.inode, ACCESS_LIST).await {
            Ok(list) => Some(list),
            Err(Errno::ENODATA | Errno::EOPNOTSUPP) => None,
            Err(error) => return Err(error),
        }
    } else {
        None
    };
    match list {
        Some(list) => listed(&list, attr, caller, bits).ok_or(Errno::EIO),
        None if caller.is_member(attr.gid) => Ok(attr.mode >> 3 & bits == bits),
        None => Ok(attr.mode & bits == bits),
    }
}

/// What an access control list says, for a caller who is neither root nor the owner. None: the bytes are no list.
///
/// Version 2 of the attribute: a header of four bytes, then entries of tag, permissions (two bytes each) and number (four), little-endian.
fn listed(list: &[u8], attr: &Attr, caller: &Caller, bits: u32) -> Option<bool> {
    const USER: u16 = 2;
    const GROUP_OBJ: u16 = 4;
    const GROUP: u16 = 8;
    const MASK: u16 = 16;
    const OTHER: u16 = 32;
    let (version, entries) = list.split_first_chunk()?;
    if u32::from_le_bytes(*version) != 2 || entries.len() % 8 != 0 {
        return None;
    }
    let entries = || {
        entries.chunks_exact(8).map(|entry| {
            let half = |at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
            let number = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
            (half(0), u32::from(half(2)), number)
        })
    };
    let mask = entries().find(|(tag, ..)| *tag == MASK).map_or(7, |(_, mask, _)| mask);
    let has = |permissions: u32| permissions & bits == bits;
    if let Some((_, permissions, _)) =
        entries().find(|(tag, _, uid)| *tag == USER && *uid == caller.uid)
    {
        return Some(has(permissions & mask));
    }
    let mut is_in_a_group = false;
    for (tag, permissions, gid) in entries() {
        let is_member = match tag {
            GROUP_OBJ => caller.is_member(attr.gid),
            GROUP => caller.is_member(gid),
            _ => false,
        };
        if is_member && has(permissions & mask) {
            return Some(true);
        }
        is_in_a_group |= is_member;
    }
    let (_, permissions, _) = entries().find(|(tag, ..)| *tag == OTHER)?;
    Some(!is_in_a_group && has(permissions))
}

/// The caller must have these bits.
pub(super) async fn check(
    fs: &dyn FileSystem,
    attr: &Attr,
    caller: &Caller,
    bits: u32,
) -> Result<(), Errno> {
    if may(fs, attr, caller, bits).await? { Ok(()) } else { Err(Errno::EACCES) }
}

/// The caller must be allowed to read the contents of a regular file.
pub(super) async fn check_read(
    fs: &dyn FileSystem,
    attr: &Attr,
    caller: &Caller,
) -> Result<(), Errno> {
    if caller.uid == attr.uid || may(fs, attr, caller, READ).await? {
        return Ok(());
    }
    check(fs, attr, caller, EXECUTE).await
}

/// The caller must be allowed to write the contents of a regular file, or to change its length.
pub(super) async fn check_write(
    fs: &dyn FileSystem,
    attr: &Attr,
    caller: &Caller,
) -> Result<(), Errno> {
    if caller.uid == attr.uid { Ok(()) } else { check(fs, attr, caller, WRITE).await }
}

/// The caller must be allowed to make and remove names in a directory.
pub(super) async fn check_names(
    fs: &dyn FileSystem,
    directory: &Attr,
    caller: &Caller,
) -> Result<(), Errno> {
    check(fs, directory, caller, WRITE | EXECUTE).await
}

/// In a directory with the sticky bit only the owners of file and directory take a name away.
pub(super) fn check_sticky(directory: &Attr, file: &Attr, caller: &Caller) -> Result<(), Errno> {
    let is_owner = [0, directory.uid, file.uid].contains(&caller.uid);
    if directory.mode & STICKY == 0 || is_owner { Ok(()) } else { Err(Errno::EPERM) }
}

/// Only owner and root.
pub(super) fn check_owner(attr: &Attr, caller: &Caller) -> Result<(), Errno> {
    if [0, attr.uid].contains(&caller.uid) { Ok(()) } else { Err(Errno::EPERM) }
}

#[cfg(test)]
mod tests {
    use atoll_vfs::{FileTime, Groups, InodeNumber};

    use super::*;

    fn attr(mode: u32) -> Attr {
        let time = FileTime::default();
        Attr {
            inode: InodeNumber(2),
            kind: FileKind::Regular,
            mode,
            nlink: 1,
            uid: 1,
            gid: 10,
            rdev: 0,
            size_bytes: 0,
            blocks_512: 0,
            block_size_bytes: 4096,
            atime: time,
            mtime: time,
            ctime: time,
        }
    }

    fn list(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut bytes = 2u32.to_le_bytes().to_vec();
        for (tag, permissions, number) in entries {
            bytes.extend_from_slice(&tag.to_le_bytes());
            bytes.extend_from_slice(&permissions.to_le_bytes());
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn a_list_is_read_in_the_order_of_acl_5() {
        let user = |uid, gids: &[u32]| Caller {
            uid,
            gid: 99,
            groups: Groups::listed(gids),
            ..Caller::default()
        };
        // user:2:rw, user:3:-, group::r, group:20:w, mask:rw, other:x
        let list =
            list(&[(1, 7, 0), (2, 7, 2), (2, 0, 3), (4, 4, 0), (8, 2, 20), (16, 6, 0), (32, 1, 0)]);
        let says = |caller: &Caller, bits| listed(&list, &attr(0o660), caller, bits);
        assert_eq!(says(&user(2, &[]), READ | WRITE), Some(true));
        assert_eq!(says(&user(2, &[]), EXECUTE), Some(false), "beyond the mask");
        assert_eq!(
            says(&user(3, &[10, 20]), READ),
            Some(false),
            "a user's entry comes before groups"
        );
        assert_eq!(says(&user(4, &[10]), READ), Some(true));
        assert_eq!(says(&user(4, &[10, 20]), READ | WRITE), Some(false), "no entry has both");
        assert_eq!(
            says(&user(4, &[20]), EXECUTE),
            Some(false),
            "others' rights are not for members"
        );
        assert_eq!(says(&user(4, &[]), EXECUTE), Some(true));
        assert_eq!(listed(&list[..9], &attr(0), &user(4, &[]), READ), None);
        assert_eq!(listed(&[1, 0, 0, 0], &attr(0), &user(4, &[]), READ), None);
    }

    #[test]
    fn names_in_a_sticky_directory_are_their_owners() {
        let directory = Attr { uid: 5, ..attr(0o1777) };
        let caller = |uid| Caller { uid, ..Caller::default() };
        for (uid, is_allowed) in [(0, true), (5, true), (1, true), (2, false)] {
            assert_eq!(
                check_sticky(&directory, &attr(0o666), &caller(uid)).is_ok(),
                is_allowed,
                "{uid}"
            );
        }
        assert_eq!(check_sticky(&attr(0o777), &attr(0o666), &caller(2)), Ok(()));
    }
}
