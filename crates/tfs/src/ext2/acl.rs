//! POSIX access control lists (POSIX.1e draft 17, as Linux has them; `acl(5)`).
//!
//! **Who enforces them.** The kernel: a file system that
//! [has ACLs](atoll_vfs::FileSystem::has_acls) is mounted with `FUSE_POSIX_ACL`, and the kernel
//! then asks for the attribute `system.posix_acl_access` of each inode that a user other
//! than its owner uses. A list that cannot be read is an error there, so no user gets in by
//! damage.
//!
//! **What is left to TFS**, since the kernel leaves it to the server of a FUSE mount:
//!
//! - both forms of a list, and whether it is one ([`Acl::from_xattr`], [`Acl::from_disk`]);
//! - mode and access list in step: setting a list sets the mode ([`Acl::mode`]), a `chmod` sets
//!   the entries that the mode shows ([`Acl::set_mode`]); a list that says no more than a mode
//!   ([`Acl::is_minimal`]) is not kept;
//! - inheritance ([`Acl::inherit`]): a directory's default list takes the umask's place.
//!
//! **Two forms.** Programs see version 2 (`struct posix_acl_xattr_header` and `_entry`), the
//! disk has version 1 (`ext2_acl_header`, `ext2_acl_entry`), in attributes of the name
//! indexes 2 (access) and 3 (default) whose names are empty. Numbers are little-endian in both.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 4 | version |
//! | 4 | | entries: |
//! | +0 | 2 | tag, below |
//! | +2 | 2 | permissions: 4 read, 2 write, 1 execute |
//! | +4 | 4 | user or group; other tags: on disk missing, for programs `0xffff_ffff` |
//!
//! | tag | for whom | how many, in this order |
//! |---|---|---|
//! | 1 | the owner | one |
//! | 2 | a user | any number |
//! | 4 | the owning group | one |
//! | 8 | a group | any number |
//! | 16 | mask: the most that any user, the owning group and any group of this list may have | one if there are users or groups, else at most one |
//! | 32 | all others | one |

use crate::format::{put_u16, put_u32, u16_at, u32_at};

const USER_OBJ: u16 = 1;
const USER: u16 = 2;
const GROUP_OBJ: u16 = 4;
const GROUP: u16 = 8;
const MASK: u16 = 16;
const OTHER: u16 = 32;

const XATTR_VERSION: u32 = 2;
const DISK_VERSION: u32 = 1;
const HEADER_BYTES: usize = 4;
const ENTRY_BYTES: usize = 8;
const SHORT_ENTRY_BYTES: usize = 4;
/// The number of an entry that names no user or group.
const NOBODY: u32 = u32::MAX;
/// Permission bits of a mode.
const PERMISSIONS: u16 = 0o777;

/// Which list of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AclKind {
    /// Says who may use the file.
    Access,
    /// Of a directory: what is made in it begins with this list.
    Default,
}

impl AclKind {
    /// Both.
    pub const ALL: [AclKind; 2] = [AclKind::Access, AclKind::Default];

    /// The attribute that programs know the list by.
    pub fn xattr(self) -> &'static [u8] {
        match self {
            AclKind::Access => b"system.posix_acl_access",
            AclKind::Default => b"system.posix_acl_default",
        }
    }

    /// The kind of list that an attribute is, if it is one.
    pub fn of_xattr(name: &[u8]) -> Option<AclKind> {
        AclKind::ALL.into_iter().find(|kind| kind.xattr() == name)
    }

    /// Its name index on disk.
    pub fn index(self) -> u8 {
        match self {
            AclKind::Access => 2,
            AclKind::Default => 3,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct AclEntry {
    tag: u16,
    permissions: u16,
    id: u32,
}

/// A list, valid: see the table of tags.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Acl {
    entries: Vec<AclEntry>,
}

impl Acl {
    /// From the form of programs; none if it is no list.
    pub fn from_xattr(bytes: &[u8]) -> Option<Acl> {
        let entries = entries_after_header(bytes, XATTR_VERSION)?;
        let chunks = entries.chunks_exact(ENTRY_BYTES);
        if !chunks.remainder().is_empty() {
            return None;
        }
        let entries = chunks.map(|entry| {
            let tag = u16_at(entry, 0);
            let id = if names_somebody(tag) { u32_at(entry, 4) } else { NOBODY };
            AclEntry { tag, permissions: u16_at(entry, 2), id }
        });
        Acl::checked(entries.collect())
    }

    /// In the form of programs.
    pub fn to_xattr(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES + ENTRY_BYTES * self.entries.len()];
        put_u32(&mut bytes, 0, XATTR_VERSION);
        for (i, entry) in self.entries.iter().enumerate() {
            let at = HEADER_BYTES + ENTRY_BYTES * i;
            put_u16(&mut bytes, at, entry.tag);
            put_u16(&mut bytes, at + 2, entry.permissions);
            put_u32(&mut bytes, at + 4, entry.id);
        }
        bytes
    }

    /// From the form on disk; none if it is no list.
    pub fn from_disk(bytes: &[u8]) -> Option<Acl> {
        let mut rest = entries_after_header(bytes, DISK_VERSION)?;
        let mut entries = Vec::new();
        while !rest.is_empty() {
            let tag = u16_at(rest.get(..SHORT_ENTRY_BYTES)?, 0);
            let len = if names_somebody(tag) { ENTRY_BYTES } else { SHORT_ENTRY_BYTES };
            let entry = rest.get(..len)?;
            let id = if names_somebody(tag) { u32_at(entry, 4) } else { NOBODY };
            entries.push(AclEntry { tag, permissions: u16_at(entry, 2), id });
            rest = &rest[len..];
        }
        Acl::checked(entries)
    }

    /// In the form on disk.
    pub fn to_disk(&self) -> Vec<u8> {
        let mut bytes = DISK_VERSION.to_le_bytes().to_vec();
        for entry in &self.entries {
            bytes.extend_from_slice(&entry.tag.to_le_bytes());
            bytes.extend_from_slice(&entry.permissions.to_le_bytes());
            if names_somebody(entry.tag) {
                bytes.extend_from_slice(&entry.id.to_le_bytes());
            }
        }
        bytes
    }

    fn checked(entries: Vec<AclEntry>) -> Option<Acl> {
        let acl = Acl { entries };
        acl.is_valid().then_some(acl)
    }

    /// As the kernel's `posix_acl_valid`.
    fn is_valid(&self) -> bool {
        let count = |tag: u16| self.entries.iter().filter(|entry| entry.tag == tag).count();
        let known = [USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER];
        let once = [USER_OBJ, GROUP_OBJ, OTHER].into_iter().all(|tag| count(tag) == 1);
        let needs_mask = count(USER) + count(GROUP) > 0;
        once && count(MASK) <= 1
            && (count(MASK) == 1 || !needs_mask)
            && self.entries.is_sorted_by_key(|entry| entry.tag)
            && self.entries.iter().all(|entry| {
                known.contains(&entry.tag)
                    && entry.permissions <= 7
                    && (entry.id != NOBODY || !names_somebody(entry.tag))
            })
    }

    /// Whether it says no more than a mode does.
    pub fn is_minimal(&self) -> bool {
        self.entries.iter().all(|entry| matches!(entry.tag, USER_OBJ | GROUP_OBJ | OTHER))
    }

    /// The permissions that a mode shows of it: of the group those of the mask, where there is one.
    pub fn mode(&self) -> u16 {
        let shown = |tag: u16, shift: u16| self.permissions(tag) << shift;
        shown(USER_OBJ, 6) | shown(self.group_class(), 3) | shown(OTHER, 0)
    }

    /// Gives the entries that a mode shows the permissions of `mode` (`chmod(2)`).
    pub fn set_mode(&mut self, mode: u16) {
        let group_class = self.group_class();
        for (tag, shift) in [(USER_OBJ, 6), (group_class, 3), (OTHER, 0)] {
            for entry in self.entries.iter_mut().filter(|entry| entry.tag == tag) {
                entry.permissions = mode >> shift & 7;
            }
        }
    }

    /// As the default list of a directory, makes itself the access list of a file that is made
    /// there with `mode`, and returns the mode that the file gets: of the permissions asked
    /// for those that the list allows.
    pub fn inherit(&mut self, mode: u16) -> u16 {
        self.set_mode(mode & self.mode());
        mode & !PERMISSIONS | self.mode()
    }

    /// The entry that a mode's group bits show.
    fn group_class(&self) -> u16 {
        if self.entries.iter().any(|entry| entry.tag == MASK) { MASK } else { GROUP_OBJ }
    }

    fn permissions(&self, tag: u16) -> u16 {
        self.entries.iter().find(|entry| entry.tag == tag).map_or(0, |entry| entry.permissions)
    }
}

fn names_somebody(tag: u16) -> bool {
    matches!(tag, USER | GROUP)
}

fn entries_after_header(bytes: &[u8], version: u32) -> Option<&[u8]> {
    let header = bytes.get(..HEADER_BYTES)?;
    (u32_at(header, 0) == version).then_some(&bytes[HEADER_BYTES..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Tag, permissions, user or group.
    type Listed = (u16, u16, u32);

    fn acl(entries: &[Listed]) -> Option<Acl> {
        let entry = |(tag, permissions, id): &Listed| AclEntry {
            tag: *tag,
            permissions: *permissions,
            id: if names_somebody(*tag) { *id } else { NOBODY },
        };
        Acl::checked(entries.iter().map(entry).collect())
    }

    /// `u::rwx,u:1000:rw-,g::r-x,g:5:rwx,m::rw-,o::r--`.
    fn full() -> Acl {
        acl(&[(1, 7, 0), (2, 6, 1000), (4, 5, 0), (8, 7, 5), (16, 6, 0), (32, 4, 0)]).unwrap()
    }

    #[test]
    fn a_list_stands_on_disk_as_the_kernel_writes_it() {
        let disk = [
            &[1, 0, 0, 0][..],
            &[1, 0, 7, 0],
            &[2, 0, 6, 0, 0xe8, 3, 0, 0],
            &[4, 0, 5, 0],
            &[8, 0, 7, 0, 5, 0, 0, 0],
            &[16, 0, 6, 0],
            &[32, 0, 4, 0],
        ]
        .concat();
        assert_eq!(full().to_disk(), disk);
        assert_eq!(Acl::from_disk(&disk), Some(full()));
        let xattr = full().to_xattr();
        assert_eq!(xattr[..12], [2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255]);
        assert_eq!(Acl::from_xattr(&xattr), Some(full()));
        // Cut off anywhere it is none; nor is one form the other.
        for len in 0..disk.len() {
            assert_eq!(Acl::from_disk(&disk[..len]), None, "{len}");
        }
        for len in 0..xattr.len() {
            assert_eq!(Acl::from_xattr(&xattr[..len]), None, "{len}");
        }
        assert_eq!((Acl::from_disk(&xattr), Acl::from_xattr(&disk)), (None, None));
    }

    #[test]
    fn what_is_no_list_is_refused() {
        let cases: &[(&str, &[Listed])] = &[
            ("nothing", &[]),
            ("no owner", &[(4, 4, 0), (32, 4, 0)]),
            ("no group", &[(1, 4, 0), (32, 4, 0)]),
            ("no others", &[(1, 4, 0), (4, 4, 0)]),
            ("two owners", &[(1, 4, 0), (1, 4, 0), (4, 4, 0), (32, 4, 0)]),
            ("a user without a mask", &[(1, 4, 0), (2, 4, 7), (4, 4, 0), (32, 4, 0)]),
            ("a group without a mask", &[(1, 4, 0), (4, 4, 0), (8, 4, 7), (32, 4, 0)]),
            ("two masks", &[(1, 4, 0), (4, 4, 0), (16, 4, 0), (16, 4, 0), (32, 4, 0)]),
            ("another order", &[(4, 4, 0), (1, 4, 0), (32, 4, 0)]),
            ("an unknown tag", &[(1, 4, 0), (4, 4, 0), (3, 4, 0), (32, 4, 0)]),
            ("unknown permissions", &[(1, 8, 0), (4, 4, 0), (32, 4, 0)]),
            ("nobody", &[(1, 4, 0), (2, 4, NOBODY), (4, 4, 0), (16, 4, 0), (32, 4, 0)]),
        ];
        for (story, entries) in cases {
            assert_eq!(acl(entries), None, "{story}");
        }
        assert!(acl(&[(1, 7, 0), (4, 0, 0), (32, 0, 0)]).is_some_and(|acl| acl.is_minimal()));
        // A mask alone is allowed, and says more than a mode.
        assert!(
            acl(&[(1, 7, 0), (4, 0, 0), (16, 0, 0), (32, 0, 0)]).is_some_and(|a| !a.is_minimal())
        );
    }

    #[test]
    fn the_mode_shows_the_mask_and_sets_it() {
        let mut acl = full();
        assert_eq!(acl.mode(), 0o764, "the mask, not the group");
        acl.set_mode(0o4610);
        assert_eq!(acl.mode(), 0o610);
        assert_eq!(acl.permissions(GROUP_OBJ), 5, "a chmod changes the mask only");
        assert_eq!(acl.permissions(USER), 6);
    }

    /// `acl(5)`, object creation: permissions are those that both the default list and the mode
    /// asked for have; the umask has no part in it.
    #[test]
    fn what_is_made_gets_what_the_default_list_and_its_maker_allow() {
        for (asked, made) in [(0o666, 0o664), (0o777, 0o764), (0o600, 0o600), (0o2750, 0o2740)] {
            let mut acl = full();
            assert_eq!(acl.inherit(asked), made, "{asked:o}");
            assert_eq!(acl.mode(), made & 0o777, "{asked:o}");
            assert_eq!(acl.permissions(GROUP), 7, "behind the mask");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_list_that_comes_back_or_none(
            bytes in proptest::collection::vec(any::<u8>(), 0..80),
            version in 0u32..3,
        ) {
            let bytes = [&version.to_le_bytes()[..], &bytes].concat();
            if let Some(acl) = Acl::from_disk(&bytes) {
                prop_assert_eq!(acl.to_disk(), bytes.clone());
            }
            if let Some(acl) = Acl::from_xattr(&bytes) {
                prop_assert_eq!(Acl::from_disk(&acl.to_disk()), Some(acl));
            }
        }
    }
}
