//! Which variants of ext2 are understood. All others are refused by name.

use atoll_vfs::FileKind;
use thiserror::Error;

use super::inode::Inode;

/// `EXT2_FEATURE_COMPAT_EXT_ATTR`.
pub const EXT_ATTR: u32 = 0x8;
/// `EXT2_FEATURE_COMPAT_RESIZE_INODE`.
pub const RESIZE_INODE: u32 = 0x10;
/// `EXT2_FEATURE_COMPAT_DIR_INDEX`.
pub const DIR_INDEX: u32 = 0x20;
/// `EXT2_FEATURE_INCOMPAT_FILETYPE`.
pub const FILETYPE: u32 = 0x2;
/// `EXT2_FEATURE_RO_COMPAT_SPARSE_SUPER`.
pub const SPARSE_SUPER: u32 = 0x1;
/// `EXT2_FEATURE_RO_COMPAT_LARGE_FILE`.
pub const LARGE_FILE: u32 = 0x2;

/// From this length on a regular file needs [`LARGE_FILE`].
const LARGE_FILE_BYTES: u64 = 1 << 31;

/// Names as `dumpe2fs` prints them (e2fsprogs, `lib/e2p/feature.c`).
const COMPATIBLE: &[(u32, &str)] = &[
    (0x1, "dir_prealloc"),
    (0x2, "imagic_inodes"),
    (0x4, "has_journal"),
    (EXT_ATTR, "ext_attr"),
    (RESIZE_INODE, "resize_inode"),
    (DIR_INDEX, "dir_index"),
    (0x40, "lazy_bg"),
    (0x80, "exclude_inode"),
    (0x100, "snapshot_bitmap"),
    (0x200, "sparse_super2"),
    (0x400, "fast_commit"),
    (0x800, "stable_inodes"),
    (0x1000, "orphan_file"),
];

const INCOMPATIBLE: &[(u32, &str)] = &[
    (0x1, "compression"),
    (FILETYPE, "filetype"),
    (0x4, "needs_recovery"),
    (0x8, "journal_dev"),
    (0x10, "meta_bg"),
    (0x40, "extent"),
    (0x80, "64bit"),
    (0x100, "mmp"),
    (0x200, "flex_bg"),
    (0x400, "ea_inode"),
    (0x1000, "dirdata"),
    (0x2000, "metadata_csum_seed"),
    (0x4000, "large_dir"),
    (0x8000, "inline_data"),
    (0x10000, "encrypt"),
    (0x20000, "casefold"),
];

const READ_ONLY_COMPATIBLE: &[(u32, &str)] = &[
    (SPARSE_SUPER, "sparse_super"),
    (LARGE_FILE, "large_file"),
    (0x4, "btree_dir"),
    (0x8, "huge_file"),
    (0x10, "uninit_bg"),
    (0x20, "dir_nlink"),
    (0x40, "extra_isize"),
    (0x80, "has_snapshot"),
    (0x100, "quota"),
    (0x200, "bigalloc"),
    (0x400, "metadata_csum"),
    (0x800, "replica"),
    (0x1000, "read-only"),
    (0x2000, "project"),
    (0x4000, "shared_blocks"),
    (0x8000, "verity"),
    (0x10000, "orphan_present"),
];

/// The feature sets of a superblock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Features {
    /// `s_feature_compat`.
    pub compatible: u32,
    /// `s_feature_incompat`.
    pub incompatible: u32,
    /// `s_feature_ro_compat`.
    pub read_only_compatible: u32,
}

/// Features that are not understood.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error(
    "the file system has features that TFS does not understand: {}; it reads and writes what \
     `mke2fs -t ext2` makes", names.join(", ")
)]
pub struct UnknownFeatures {
    /// Their names.
    pub names: Vec<String>,
}

fn names_of(set: u32, known: &[(u32, &str)], kind: &str) -> Vec<String> {
    (0..32)
        .map(|bit| 1u32 << bit)
        .filter(|bit| set & bit != 0)
        .map(|bit| match known.iter().find(|(value, _)| *value == bit) {
            Some((_, name)) => (*name).to_owned(),
            None => format!("{kind} feature {bit:#x}"),
        })
        .collect()
}

impl Features {
    /// What `mke2fs -t ext2` sets.
    pub const MADE_BY_MKFS: Features = Features {
        compatible: EXT_ATTR | RESIZE_INODE | DIR_INDEX,
        incompatible: FILETYPE,
        read_only_compatible: SPARSE_SUPER | LARGE_FILE,
    };

    /// Refuses what is not understood.
    ///
    /// # Errors
    /// [`UnknownFeatures`], with the names.
    pub fn check(self) -> Result<(), UnknownFeatures> {
        let names = Features::MADE_BY_MKFS.missing(self);
        if names.is_empty() { Ok(()) } else { Err(UnknownFeatures { names }) }
    }

    /// Those that a file system gets when its first file needs them, as from the kernel.
    pub const SET_WHEN_NEEDED: Features =
        Features { compatible: EXT_ATTR, incompatible: 0, read_only_compatible: LARGE_FILE };

    /// Those of [`Features::SET_WHEN_NEEDED`] that a file system with such an inode must have.
    pub fn needed_by(inode: &Inode) -> Features {
        let is_large =
            inode.kind() == Ok(FileKind::Regular) && inode.size_bytes >= LARGE_FILE_BYTES;
        Features {
            compatible: if inode.xattr_block == 0 { 0 } else { EXT_ATTR },
            incompatible: 0,
            read_only_compatible: if is_large { LARGE_FILE } else { 0 },
        }
    }

    /// These and those.
    pub fn with(self, other: Features) -> Features {
        Features {
            compatible: self.compatible | other.compatible,
            incompatible: self.incompatible | other.incompatible,
            read_only_compatible: self.read_only_compatible | other.read_only_compatible,
        }
    }

    /// Names of those of `other` that are not among these.
    pub fn missing(self, other: Features) -> Vec<String> {
        let mut names =
            names_of(other.incompatible & !self.incompatible, INCOMPATIBLE, "incompatible");
        names.extend(names_of(other.compatible & !self.compatible, COMPATIBLE, "compatible"));
        names.extend(names_of(
            other.read_only_compatible & !self.read_only_compatible,
            READ_ONLY_COMPATIBLE,
            "read-only compatible",
        ));
        names
    }

    /// Whether directory entries carry the kind of the file.
    pub fn has_filetype(self) -> bool {
        self.incompatible & FILETYPE != 0
    }

    /// Whether only some groups have copies of the superblock.
    pub fn has_sparse_super(self) -> bool {
        self.read_only_compatible & SPARSE_SUPER != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        assert_eq!(Features::MADE_BY_MKFS.check(), Ok(()));
        assert_eq!(Features::default().check(), Ok(()), "the oldest ext2 has no features");
        let with = |compatible, incompatible, read_only_compatible| {
            Features { compatible, incompatible, read_only_compatible }.check().unwrap_err().names
        };
        assert_eq!(
            with(0x4, 0x2 | 0x40 | 0x200, 0x400),
            ["extent", "flex_bg", "has_journal", "metadata_csum"]
        );
        assert_eq!(with(0, 1 << 30, 0), ["incompatible feature 0x40000000"]);
    }
}
