//! The superblock: 1,024 bytes at byte 1,024, with copies in other groups.
//!
//! | offset | bytes | ext2's name |
//! |---|---|---|
//! | 0 | 4 | `s_inodes_count` |
//! | 4 | 4 | `s_blocks_count` |
//! | 8 | 4 | `s_r_blocks_count` |
//! | 12 | 4 | `s_free_blocks_count` |
//! | 16 | 4 | `s_free_inodes_count` |
//! | 20 | 4 | `s_first_data_block` |
//! | 24 | 4 | `s_log_block_size` |
//! | 28 | 4 | `s_log_frag_size` |
//! | 32 | 4 | `s_blocks_per_group` |
//! | 36 | 4 | `s_frags_per_group` |
//! | 40 | 4 | `s_inodes_per_group` |
//! | 44 | 4 | `s_mtime` |
//! | 48 | 4 | `s_wtime` |
//! | 52 | 2 | `s_mnt_count` |
//! | 54 | 2 | `s_max_mnt_count` |
//! | 56 | 2 | `s_magic` |
//! | 58 | 2 | `s_state` |
//! | 60 | 2 | `s_errors` |
//! | 62 | 2 | `s_minor_rev_level` |
//! | 64 | 4 | `s_lastcheck` |
//! | 68 | 4 | `s_checkinterval` |
//! | 72 | 4 | `s_creator_os` |
//! | 76 | 4 | `s_rev_level` |
//! | 80 | 2 | `s_def_resuid` |
//! | 82 | 2 | `s_def_resgid` |
//! | 84 | 4 | `s_first_ino` |
//! | 88 | 2 | `s_inode_size` |
//! | 90 | 2 | `s_block_group_nr` |
//! | 92 | 4 | `s_feature_compat` |
//! | 96 | 4 | `s_feature_incompat` |
//! | 100 | 4 | `s_feature_ro_compat` |
//! | 104 | 16 | `s_uuid` |
//! | 120 | 16 | `s_volume_name` |
//! | 136 | 64 | `s_last_mounted` |
//! | 206 | 2 | `s_reserved_gdt_blocks` |
//! | 232 | 4 | `s_last_orphan` |
//! | 236 | 16 | `s_hash_seed` |
//! | 252 | 1 | `s_def_hash_version` |
//! | 256 | 4 | `s_default_mount_opts` |
//! | 264 | 4 | `s_mkfs_time` |
//! | 348 | 2 | `s_min_extra_isize` |
//! | 350 | 2 | `s_want_extra_isize` |
//! | 352 | 4 | `s_flags` |
//!
//! What is not in the table is kept as it stands.

use thiserror::Error;

use super::features::{Features, UnknownFeatures};
use super::{put_u16, put_u32, u16_at, u32_at};

/// Where it stands on the device, bytes.
pub const SUPERBLOCK_OFFSET: u64 = 1024;
/// Its length, bytes.
pub const SUPERBLOCK_BYTES: usize = 1024;
/// `s_magic`.
pub const MAGIC: u16 = 0xEF53;
/// `EXT2_VALID_FS` in `s_state`: unmounted in order.
pub const STATE_VALID: u16 = 1;
/// `EXT2_ERROR_FS` in `s_state`: errors were found.
pub const STATE_ERRORS: u16 = 2;
/// The root directory's inode.
pub const ROOT_INODE: u32 = 2;
/// `EXT2_BOOT_LOADER_INO`, which nothing uses: TFS's records.
pub const RECORDS_INODE: u32 = 5;
/// `EXT2_RESIZE_INO`.
pub const RESIZE_INODE: u32 = 7;
/// The first inode of ordinary files where the superblock does not say.
pub const OLD_FIRST_INODE: u32 = 11;
/// The length of an inode, bytes, where the superblock does not say.
const OLD_INODE_BYTES: u16 = 128;

/// Why bytes are no superblock that can be used.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum SuperblockError {
    /// There is no ext2 here.
    #[error("this is not an ext2 file system (no magic number in its superblock)")]
    NotExt2,
    /// Features.
    #[error(transparent)]
    Features(#[from] UnknownFeatures),
    /// A field contradicts another, or the device.
    #[error("the superblock is damaged: {0}; `e2fsck` can restore it from a copy")]
    Damaged(String),
}

/// A superblock that is consistent in itself: every number derived from it lies within
/// the device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Superblock {
    bytes: Box<[u8; SUPERBLOCK_BYTES]>,
}

macro_rules! fields32 {
    ($($name:ident, $set:ident, $at:literal, $text:literal;)*) => {
        $(
            #[doc = $text]
            pub fn $name(&self) -> u32 {
                u32_at(&self.bytes[..], $at)
            }

            #[doc = concat!("Sets [`", stringify!($name), "`](Self::", stringify!($name), ").")]
            pub fn $set(&mut self, value: u32) {
                put_u32(&mut self.bytes[..], $at, value);
            }
        )*
    };
}

macro_rules! fields16 {
    ($($name:ident, $set:ident, $at:literal, $text:literal;)*) => {
        $(
            #[doc = $text]
            pub fn $name(&self) -> u16 {
                u16_at(&self.bytes[..], $at)
            }

            #[doc = concat!("Sets [`", stringify!($name), "`](Self::", stringify!($name), ").")]
            pub fn $set(&mut self, value: u16) {
                put_u16(&mut self.bytes[..], $at, value);
            }
        )*
    };
}

impl Superblock {
    fields32! {
        inodes, set_inodes, 0, "Inodes in all.";
        blocks, set_blocks, 4, "Blocks in all.";
        reserved_blocks, set_reserved_blocks, 8, "Blocks only the owner named in the superblock may use.";
        free_blocks, set_free_blocks, 12, "Blocks free.";
        free_inodes, set_free_inodes, 16, "Inodes free.";
        first_data_block, set_first_data_block, 20, "The block of the superblock: 1 with blocks of 1 KiB, else 0.";
        log_block_size, set_log_block_size, 24, "Block size as a power of two, from 1 KiB.";
        log_fragment_size, set_log_fragment_size, 28, "Fragment size, as the block's.";
        blocks_per_group, set_blocks_per_group, 32, "Blocks in a group.";
        fragments_per_group, set_fragments_per_group, 36, "Fragments in a group.";
        inodes_per_group, set_inodes_per_group, 40, "Inodes in a group.";
        mount_time, set_mount_time, 44, "When it was mounted last, seconds since 1970.";
        write_time, set_write_time, 48, "When the superblock was written last, seconds since 1970.";
        last_check, set_last_check, 64, "When it was checked last, seconds since 1970.";
        check_interval, set_check_interval, 68, "Longest time between checks, seconds.";
        creator_os, set_creator_os, 72, "Which system made it; 0 is Linux.";
        revision, set_revision, 76, "0: fixed inodes; 1: with features.";
        first_inode_field, set_first_inode_field, 84, "First inode of ordinary files (revision 1).";
        last_orphan, set_last_orphan, 232, "Head of the list of inodes without a name that were in use.";
        default_mount_options, set_default_mount_options, 256, "What a mount assumes.";
        made_time, set_made_time, 264, "When the file system was made, seconds since 1970.";
        flags, set_flags, 352, "Which hash indexed directories use.";
    }

    fields16! {
        mount_count, set_mount_count, 52, "Mounts since the last check.";
        max_mount_count, set_max_mount_count, 54, "Mounts after which a check is due.";
        state, set_state, 58, "[`STATE_VALID`], [`STATE_ERRORS`].";
        errors, set_errors, 60, "What to do about errors: 1 go on, 2 read only, 3 panic.";
        inode_size_field, set_inode_size_field, 88, "Length of an inode, bytes (revision 1).";
        group_of_copy, set_group_of_copy, 90, "The group this copy stands in.";
        reserved_uid, set_reserved_uid, 80, "Which user besides root may use the reserved blocks.";
        reserved_gid, set_reserved_gid, 82, "Which group may; 0: none.";
        reserved_descriptor_blocks, set_reserved_descriptor_blocks, 206, "Blocks kept after the group descriptors, for growing.";
        min_extra_inode_bytes, set_min_extra_inode_bytes, 348, "Room each inode has beyond the first 128 bytes.";
        want_extra_inode_bytes, set_want_extra_inode_bytes, 350, "Room a new inode should have beyond the first 128 bytes.";
    }

    /// An empty one, for `mkfs`; magic and revision are set.
    pub fn blank() -> Superblock {
        let mut blank = Superblock { bytes: Box::new([0; SUPERBLOCK_BYTES]) };
        put_u16(&mut blank.bytes[..], 56, MAGIC);
        blank.set_revision(1);
        blank
    }

    /// Takes bytes from a disk of `device_len_bytes`, if they can be used.
    ///
    /// # Errors
    /// [`SuperblockError`], with what is wrong.
    pub fn decode(
        bytes: &[u8; SUPERBLOCK_BYTES],
        device_len_bytes: u64,
    ) -> Result<Superblock, SuperblockError> {
        if u16_at(bytes, 56) != MAGIC {
            return Err(SuperblockError::NotExt2);
        }
        let superblock = Superblock { bytes: Box::new(*bytes) };
        if superblock.revision() > 1 {
            let revision = superblock.revision();
            return Err(SuperblockError::Damaged(format!("revision {revision} is unknown")));
        }
        superblock.features().check()?;
        superblock.check_geometry(device_len_bytes).map_err(SuperblockError::Damaged)?;
        Ok(superblock)
    }

    fn check_geometry(&self, device_len_bytes: u64) -> Result<(), String> {
        let must = |holds: bool, problem: &dyn Fn() -> String| {
            if holds { Ok(()) } else { Err(problem()) }
        };
        let log = self.log_block_size();
        must(log <= 2, &|| format!("block size 2^{} KiB is not 1, 2 or 4 KiB", log))?;
        let block_bytes = u64::from(self.block_bytes());
        must(self.log_fragment_size() == log, &|| "fragments differ from blocks".to_owned())?;
        let first = u32::from(log == 0);
        must(self.first_data_block() == first, &|| {
            format!("the first block is {}, not {first}", self.first_data_block())
        })?;
        let blocks = self.blocks();
        must(u64::from(blocks) * block_bytes <= device_len_bytes, &|| {
            format!("it has {blocks} blocks, the device only {}", device_len_bytes / block_bytes)
        })?;
        must(blocks > first + 8, &|| format!("{blocks} blocks are no file system"))?;
        let per_group = self.blocks_per_group();
        // One block of bitmap for each group, and whole bytes in it.
        must(
            per_group >= 256
                && u64::from(per_group) <= 8 * block_bytes
                && per_group.is_multiple_of(8),
            &|| format!("{per_group} blocks in a group are impossible"),
        )?;
        must(self.fragments_per_group() == per_group, &|| {
            "fragments in a group differ from blocks".to_owned()
        })?;
        let inode_bytes = u64::from(self.inode_bytes());
        must(
            inode_bytes >= 128 && inode_bytes <= block_bytes && inode_bytes.is_power_of_two(),
            &|| format!("inodes of {inode_bytes} bytes are impossible"),
        )?;
        let inodes_per_group = self.inodes_per_group();
        must(
            inodes_per_group >= 8
                && u64::from(inodes_per_group) <= 8 * block_bytes
                && inodes_per_group.is_multiple_of(8)
                && u64::from(inodes_per_group) * inode_bytes % block_bytes == 0,
            &|| format!("{inodes_per_group} inodes in a group are impossible"),
        )?;
        let groups = self.groups();
        let own = u64::from(self.inode_table_blocks()) + u64::from(self.descriptor_blocks()) + 3;
        must(own < u64::from(per_group), &|| {
            "inode table and descriptors fill their group".to_owned()
        })?;
        must(u64::from(self.inodes()) == u64::from(groups) * u64::from(inodes_per_group), &|| {
            format!("{} inodes in {groups} groups of {inodes_per_group}", self.inodes())
        })?;
        must(self.first_inode() > RESIZE_INODE && self.first_inode() < self.inodes(), &|| {
            format!("inode {} cannot be the first of ordinary files", self.first_inode())
        })?;
        must(u32::from(self.reserved_descriptor_blocks()) <= self.block_bytes() / 4, &|| {
            "more blocks are kept for descriptors than there can be".to_owned()
        })?;
        must(self.free_blocks() <= blocks, &|| "more blocks are free than there are".to_owned())?;
        must(self.free_inodes() <= self.inodes(), &|| {
            "more inodes are free than there are".to_owned()
        })?;
        must(self.reserved_blocks() <= blocks, &|| {
            "more blocks are reserved than there are".to_owned()
        })
    }

    /// The bytes as they stand on disk.
    pub fn bytes(&self) -> &[u8; SUPERBLOCK_BYTES] {
        &self.bytes
    }

    /// The feature sets; none in revision 0.
    pub fn features(&self) -> Features {
        if self.revision() == 0 {
            return Features::default();
        }
        Features {
            compatible: u32_at(&self.bytes[..], 92),
            incompatible: u32_at(&self.bytes[..], 96),
            read_only_compatible: u32_at(&self.bytes[..], 100),
        }
    }

    /// Sets the feature sets.
    pub fn set_features(&mut self, features: Features) {
        put_u32(&mut self.bytes[..], 92, features.compatible);
        put_u32(&mut self.bytes[..], 96, features.incompatible);
        put_u32(&mut self.bytes[..], 100, features.read_only_compatible);
    }

    /// Adds features. A file system of revision 0 becomes one of revision 1, which has feature
    /// sets (the kernel's `ext2_update_dynamic_rev`).
    pub fn add_features(&mut self, features: Features) {
        self.set_features(self.features().with(features));
        if self.revision() == 0 {
            self.set_first_inode_field(OLD_FIRST_INODE);
            self.set_inode_size_field(OLD_INODE_BYTES);
            self.set_revision(1);
        }
    }

    /// The file system's UUID.
    pub fn uuid(&self) -> [u8; 16] {
        self.bytes[104..120].try_into().expect("sixteen bytes")
    }

    /// Sets the UUID.
    pub fn set_uuid(&mut self, uuid: [u8; 16]) {
        self.bytes[104..120].copy_from_slice(&uuid);
    }

    /// Sets the seed of indexed directories' hashes, and the hash (1: half MD4).
    pub fn set_directory_hash(&mut self, seed: [u8; 16], version: u8) {
        self.bytes[236..252].copy_from_slice(&seed);
        self.bytes[252] = version;
    }

    /// The volume's name, up to its first NUL.
    pub fn label(&self) -> &[u8] {
        let field = &self.bytes[120..136];
        &field[..field.iter().position(|byte| *byte == 0).unwrap_or(field.len())]
    }

    /// Sets the volume's name; what is beyond 16 bytes is cut off.
    pub fn set_label(&mut self, label: &[u8]) {
        let len = label.len().min(16);
        self.bytes[120..136].fill(0);
        self.bytes[120..120 + len].copy_from_slice(&label[..len]);
    }

    /// Size of a block, bytes.
    pub fn block_bytes(&self) -> u32 {
        1024 << self.log_block_size()
    }

    /// Number of block groups.
    pub fn groups(&self) -> u32 {
        (self.blocks() - self.first_data_block()).div_ceil(self.blocks_per_group())
    }

    /// Size of an inode, bytes.
    pub fn inode_bytes(&self) -> u32 {
        let bytes = if self.revision() == 0 { OLD_INODE_BYTES } else { self.inode_size_field() };
        u32::from(bytes)
    }

    /// Whether times of new inodes have nanoseconds: there is room for the last extra of the three that `utimensat(2)` and changes set.
    pub fn has_nanoseconds(&self) -> bool {
        const ATIME_EXTRA_END: u32 = 16;
        let room = self.inode_bytes().saturating_sub(OLD_INODE_BYTES.into());
        room.min(self.want_extra_inode_bytes().into()) >= ATIME_EXTRA_END
    }

    /// First inode of ordinary files.
    pub fn first_inode(&self) -> u32 {
        if self.revision() == 0 { OLD_FIRST_INODE } else { self.first_inode_field() }
    }

    /// Blocks of each group's inode table.
    pub fn inode_table_blocks(&self) -> u32 {
        let bytes = u64::from(self.inodes_per_group()) * u64::from(self.inode_bytes());
        bytes.div_ceil(u64::from(self.block_bytes())) as u32
    }

    /// Blocks that all group descriptors take.
    pub fn descriptor_blocks(&self) -> u32 {
        let bytes = u64::from(self.groups()) * super::DESCRIPTOR_BYTES as u64;
        bytes.div_ceil(u64::from(self.block_bytes())) as u32
    }

    /// The first block of a group.
    pub fn first_block_of_group(&self, group: u32) -> u32 {
        self.first_data_block() + group * self.blocks_per_group()
    }

    /// Blocks of a group; the last may have fewer.
    pub fn blocks_of_group(&self, group: u32) -> u32 {
        let first = self.first_block_of_group(group);
        (self.blocks() - first).min(self.blocks_per_group())
    }

    /// Whether a group holds copies of the superblock and the descriptors.
    pub fn group_has_copy(&self, group: u32) -> bool {
        let power_of = |base: u32| {
            let mut power = base;
            while power < group {
                power = power.saturating_mul(base);
            }
            power == group
        };
        !self.features().has_sparse_super()
            || group <= 1
            || power_of(3)
            || power_of(5)
            || power_of(7)
    }

    /// Blocks that the copies of superblock and descriptors take in a group.
    pub fn copy_blocks_of_group(&self, group: u32) -> u32 {
        if self.group_has_copy(group) { 1 + self.descriptor_blocks() } else { 0 }
    }

    /// The hash of what every writer changes: mount and write time, mount count, time of
    /// the last check, state, numbers of blocks and inodes, features, UUID. While it is
    /// what TFS left, no other program has mounted, checked or resized the file system. Features
    /// that are set when a file needs them first count as set: TFS itself sets them while mounted.
    pub fn mark(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        for range in [0..8, 44..54, 58..60, 64..68] {
            hasher.update(&self.bytes[range]);
        }
        let features = self.features().with(Features::SET_WHEN_NEEDED);
        for set in [features.compatible, features.incompatible, features.read_only_compatible] {
            hasher.update(&set.to_le_bytes());
        }
        hasher.update(&self.uuid());
        *hasher.finalize().as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sound() -> Superblock {
        let mut superblock = Superblock::blank();
        superblock.set_blocks(16384);
        superblock.set_inodes(4096);
        superblock.set_log_block_size(2);
        superblock.set_log_fragment_size(2);
        superblock.set_blocks_per_group(32768);
        superblock.set_fragments_per_group(32768);
        superblock.set_inodes_per_group(4096);
        superblock.set_inode_size_field(256);
        superblock.set_first_inode_field(11);
        superblock.set_features(Features::MADE_BY_MKFS);
        superblock
    }

    fn decode(superblock: &Superblock) -> Result<Superblock, SuperblockError> {
        Superblock::decode(superblock.bytes(), 16384 * 4096)
    }

    #[test]
    fn one_fault_one_error() {
        assert_eq!(decode(&sound()), Ok(sound()));
        type Fault = (&'static str, fn(&mut Superblock));
        let faults: &[Fault] = &[
            ("block size", |s| s.set_log_block_size(3)),
            ("block size", |s| s.set_log_block_size(u32::MAX)),
            ("fragments differ", |s| s.set_log_fragment_size(0)),
            ("first block is 1", |s| s.set_first_data_block(1)),
            ("the device only", |s| s.set_blocks(16385)),
            ("no file system", |s| s.set_blocks(0)),
            ("blocks in a group", |s| s.set_blocks_per_group(0)),
            ("blocks in a group", |s| s.set_blocks_per_group(32769)),
            ("fragments in a group", |s| s.set_fragments_per_group(8)),
            ("inodes of 0 bytes", |s| s.set_inode_size_field(0)),
            ("inodes of 192 bytes", |s| s.set_inode_size_field(192)),
            ("inodes of 8192 bytes", |s| s.set_inode_size_field(8192)),
            ("0 inodes in a group", |s| s.set_inodes_per_group(0)),
            ("inodes in a group", |s| s.set_inodes_per_group(u32::MAX)),
            ("8192 inodes in", |s| s.set_inodes(8192)),
            ("first of ordinary files", |s| s.set_first_inode_field(2)),
            ("kept for descriptors", |s| s.set_reserved_descriptor_blocks(u16::MAX)),
            ("blocks are free", |s| s.set_free_blocks(u32::MAX)),
            ("inodes are free", |s| s.set_free_inodes(u32::MAX)),
            ("blocks are reserved", |s| s.set_reserved_blocks(u32::MAX)),
            ("revision 2", |s| s.set_revision(2)),
        ];
        for (expected, fault) in faults {
            let mut superblock = sound();
            fault(&mut superblock);
            let error = decode(&superblock).expect_err(expected).to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
        assert_eq!(
            Superblock::decode(&[0; SUPERBLOCK_BYTES], 1 << 30),
            Err(SuperblockError::NotExt2)
        );
    }

    #[test]
    fn copies_stand_in_groups_0_1_and_powers_of_3_5_and_7() {
        let superblock = sound();
        let with: Vec<u32> = (0..350).filter(|g| superblock.group_has_copy(*g)).collect();
        assert_eq!(with, [0, 1, 3, 5, 7, 9, 25, 27, 49, 81, 125, 243, 343]);
    }

    #[test]
    fn the_mark_changes_with_what_a_mount_writes() {
        let changes: &[fn(&mut Superblock)] = &[
            |s| s.set_mount_time(1),
            |s| s.set_write_time(1),
            |s| s.set_mount_count(1),
            |s| s.set_last_check(1),
            |s| s.set_state(1),
            |s| s.set_blocks(1),
            |s| s.set_uuid([1; 16]),
        ];
        for change in changes {
            let mut superblock = sound();
            change(&mut superblock);
            assert_ne!(superblock.mark(), sound().mark());
        }
        let mut superblock = sound();
        superblock.set_free_blocks(7);
        superblock.set_last_orphan(12);
        assert_eq!(superblock.mark(), sound().mark(), "these change while it is mounted");
    }
}
