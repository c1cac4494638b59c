//! Inodes: 128 bytes, and where inodes are larger, what ext4 keeps behind them.
//!
//! | offset | bytes | ext2's name |
//! |---|---|---|
//! | 0 | 2 | `i_mode` |
//! | 2 | 2 | `i_uid`, low half |
//! | 4 | 4 | `i_size`, low half |
//! | 8 | 4 | `i_atime` |
//! | 12 | 4 | `i_ctime` |
//! | 16 | 4 | `i_mtime` |
//! | 20 | 4 | `i_dtime`; while on the orphan list: the next orphan |
//! | 24 | 2 | `i_gid`, low half |
//! | 26 | 2 | `i_links_count` |
//! | 28 | 4 | `i_blocks`, in units of 512 bytes |
//! | 32 | 4 | `i_flags` |
//! | 40 | 60 | `i_block`: 12 direct, 1 indirect, 1 doubly, 1 triply; or a short link target; or a device |
//! | 100 | 4 | `i_generation` |
//! | 104 | 4 | `i_file_acl`: the block of extended attributes |
//! | 108 | 4 | `i_size`, high half, of regular files |
//! | 120 | 2 | `i_uid`, high half |
//! | 122 | 2 | `i_gid`, high half |
//! | 128 | 2 | `i_extra_isize` |
//! | 132 | 4 | `i_ctime_extra` |
//! | 136 | 4 | `i_mtime_extra` |
//! | 140 | 4 | `i_atime_extra` |
//! | 144 | 4 | `i_crtime` |
//! | 148 | 4 | `i_crtime_extra` |
//!
//! An *extra* holds nanoseconds above two bits that lengthen the seconds; where an inode has
//! no room for it, times are whole seconds between 1901 and 2038.

use atoll_vfs::{FileKind, FileTime};

use super::{put_u16, put_u32, u16_at, u32_at};

/// Pointers in an inode.
pub const POINTERS: usize = 15;
/// Pointers that name data blocks themselves.
pub const DIRECT: usize = 12;
/// The longest link target that stands in the inode itself, bytes, without a NUL.
pub const SHORT_TARGET_BYTES: usize = 59;

/// `EXT2_SYNC_FL`, `EXT2_IMMUTABLE_FL`, `EXT2_APPEND_FL`, `EXT2_NODUMP_FL`, `EXT2_NOATIME_FL`,
/// `EXT2_DIRSYNC_FL`, and the older `SECRM`, `UNRM`, `COMPR`, `NOTAIL`, `JOURNAL_DATA`: what
/// the kernel's ext2 hands on to new files (`EXT2_FL_INHERITED`).
const INHERITED_FLAGS: u32 = 0x1 | 0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x4000 | 0x8000 | 0x10000;
/// Those of the inherited flags that files other than directories take (`EXT2_REG_FLMASK`,
/// `EXT2_OTHER_FLMASK`).
const REGULAR_FLAGS: u32 = !(0x10000 | TOP_DIRECTORY);
const OTHER_FLAGS: u32 = 0x40 | 0x80;
/// What `FS_IOC_GETFLAGS` shows (`EXT2_FL_USER_VISIBLE`).
pub const VISIBLE_FLAGS: u32 = 0x0003_dfff;
/// What `FS_IOC_SETFLAGS` changes (`EXT2_FL_USER_MODIFIABLE`).
pub const MODIFIABLE_FLAGS: u32 = 0x0003_80ff;
/// `EXT2_IMMUTABLE_FL`.
pub const IMMUTABLE: u32 = 0x10;
/// `EXT2_APPEND_FL`.
pub const APPEND_ONLY: u32 = 0x20;
/// `EXT2_NOATIME_FL`.
pub const NO_ATIME: u32 = 0x80;
/// `EXT2_INDEX_FL`: an indexed directory.
pub const INDEXED: u32 = 0x1000;
/// `EXT2_TOPDIR_FL`: a directory whose subdirectories are spread (Orlov).
pub const TOP_DIRECTORY: u32 = 0x20000;
/// TFS's: a transparent file, or a directory whose new files are. ext2 and ext4 do not use
/// this bit and keep it.
pub const TRANSPARENT: u32 = 0x0080_0000;

const KIND_BITS: u16 = 0o170000;

/// An inode, decoded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inode {
    /// Kind and permissions; 0 in an inode that was never used.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Owning group.
    pub gid: u32,
    /// Length, bytes.
    pub size_bytes: u64,
    /// Last access.
    pub atime: FileTime,
    /// Last change of anything.
    pub ctime: FileTime,
    /// Last change of contents.
    pub mtime: FileTime,
    /// When it was made, where there is room for it.
    pub crtime: FileTime,
    /// When it was deleted, seconds since 1970; or the next orphan.
    pub dtime: u32,
    /// Number of names.
    pub links: u16,
    /// Space taken, in units of 512 bytes, indirect blocks included.
    pub blocks_512: u32,
    /// Flags.
    pub flags: u32,
    /// Block pointers, or a short link target, or a device.
    pub pointers: [u32; POINTERS],
    /// Tells uses of the same number apart.
    pub generation: u32,
    /// Block of extended attributes, 0: none.
    pub xattr_block: u32,
}

/// What an inode may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("mode {0:#o} is of no kind of file")]
pub struct UnknownKind(pub u16);

/// The flags that a new file of a kind takes from its directory (`ext2_mask_flags`).
pub fn inherited_flags(directory: u32, kind: FileKind) -> u32 {
    let taken = match kind {
        FileKind::Directory => u32::MAX,
        FileKind::Regular => REGULAR_FLAGS,
        _ => OTHER_FLAGS,
    };
    directory & INHERITED_FLAGS & taken
}

/// The bits of a kind in `i_mode`.
pub fn kind_bits(kind: FileKind) -> u16 {
    match kind {
        FileKind::Fifo => 0o010000,
        FileKind::CharDevice => 0o020000,
        FileKind::Directory => 0o040000,
        FileKind::BlockDevice => 0o060000,
        FileKind::Regular => 0o100000,
        FileKind::Symlink => 0o120000,
        FileKind::Socket => 0o140000,
    }
}

fn decode_time(secs: u32, extra: u32) -> FileTime {
    // Two bits of epoch are added to the signed seconds (ext4's way since Linux 4.3).
    let secs = i64::from(secs as i32) + (i64::from(extra & 3) << 32);
    FileTime { secs, nanos: (extra >> 2).min(999_999_999) }
}

/// Seconds and extra of a time, clamped to what they can hold as the kernel clamps it: beyond the
/// first and last moment there are no nanoseconds (`timestamp_truncate`).
fn encode_time(time: FileTime, has_extra: bool) -> (u32, u32) {
    const FIRST: i64 = i32::MIN as i64;
    let last = if has_extra { FIRST + (1 << 34) - 1 } else { i64::from(i32::MAX) };
    let secs = time.secs.clamp(FIRST, last);
    let epoch = ((secs - FIRST) >> 32) as u32;
    let nanos = if secs == time.secs { time.nanos.min(999_999_999) } else { 0 };
    (secs as u32, epoch | nanos << 2)
}

impl Inode {
    /// An inode without any content.
    pub fn blank() -> Inode {
        Inode {
            mode: 0,
            uid: 0,
            gid: 0,
            size_bytes: 0,
            atime: FileTime::default(),
            ctime: FileTime::default(),
            mtime: FileTime::default(),
            crtime: FileTime::default(),
            dtime: 0,
            links: 0,
            blocks_512: 0,
            flags: 0,
            pointers: [0; POINTERS],
            generation: 0,
            xattr_block: 0,
        }
    }

    /// What it is.
    ///
    /// # Errors
    /// [`UnknownKind`] for a mode that is none.
    pub fn kind(&self) -> Result<FileKind, UnknownKind> {
        Ok(match self.mode & KIND_BITS {
            0o010000 => FileKind::Fifo,
            0o020000 => FileKind::CharDevice,
            0o040000 => FileKind::Directory,
            0o060000 => FileKind::BlockDevice,
            0o100000 => FileKind::Regular,
            0o120000 => FileKind::Symlink,
            0o140000 => FileKind::Socket,
            _ => return Err(UnknownKind(self.mode)),
        })
    }

    /// Whether it is a transparent file (not a directory): a regular file with the flag and
    /// nothing that ext2 would call its contents.
    pub fn is_transparent_file(&self) -> bool {
        self.mode & KIND_BITS == kind_bits(FileKind::Regular)
            && self.flags & TRANSPARENT != 0
            && self.size_bytes == 0
            && self.pointers == [0; POINTERS]
    }

    /// Counts blocks that were given to it.
    pub fn count_blocks(&mut self, blocks: u32, block_bytes: u32) {
        let units = blocks.saturating_mul(block_bytes / 512);
        self.blocks_512 = self.blocks_512.saturating_add(units);
    }

    /// Whether it is a symbolic link whose target stands in the inode: nothing but attributes
    /// has a block.
    pub fn is_short_link(&self, block_bytes: u32) -> bool {
        let attributes = if self.xattr_block == 0 { 0 } else { block_bytes / 512 };
        self.mode & KIND_BITS == kind_bits(FileKind::Symlink)
            && self.size_bytes <= SHORT_TARGET_BYTES as u64
            && self.blocks_512 <= attributes
    }

    /// From the bytes of an inode table; 128 of them at least.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn decode(bytes: &[u8]) -> Inode {
        let extra = extra_bytes(bytes);
        let extra_at = |at: usize| if at + 4 <= 128 + extra { u32_at(bytes, at) } else { 0 };
        let mode = u16_at(bytes, 0);
        // Of other kinds than regular files these bytes were a directory's ACL.
        let size_high = if mode & KIND_BITS == 0o100000 { u32_at(bytes, 108) } else { 0 };
        Inode {
            mode,
            uid: u32::from(u16_at(bytes, 2)) | u32::from(u16_at(bytes, 120)) << 16,
            gid: u32::from(u16_at(bytes, 24)) | u32::from(u16_at(bytes, 122)) << 16,
            size_bytes: u64::from(u32_at(bytes, 4)) | u64::from(size_high) << 32,
            atime: decode_time(u32_at(bytes, 8), extra_at(140)),
            ctime: decode_time(u32_at(bytes, 12), extra_at(132)),
            mtime: decode_time(u32_at(bytes, 16), extra_at(136)),
            crtime: decode_time(extra_at(144), extra_at(148)),
            dtime: u32_at(bytes, 20),
            links: u16_at(bytes, 26),
            blocks_512: u32_at(bytes, 28),
            flags: u32_at(bytes, 32),
            pointers: std::array::from_fn(|i| u32_at(bytes, 40 + 4 * i)),
            generation: u32_at(bytes, 100),
            xattr_block: u32_at(bytes, 104),
        }
    }

    /// Into the bytes of an inode table; what is not in the table above is left.
    ///
    /// # Panics
    /// If there are fewer than 128.
    pub fn encode(&self, bytes: &mut [u8]) {
        let extra = extra_bytes(bytes);
        let has_extra = |at: usize| at + 4 <= 128 + extra;
        put_u16(bytes, 0, self.mode);
        put_u16(bytes, 2, self.uid as u16);
        put_u16(bytes, 120, (self.uid >> 16) as u16);
        put_u16(bytes, 24, self.gid as u16);
        put_u16(bytes, 122, (self.gid >> 16) as u16);
        put_u32(bytes, 4, self.size_bytes as u32);
        put_u32(bytes, 108, (self.size_bytes >> 32) as u32);
        for (time, at, extra_at) in
            [(self.atime, 8, 140), (self.ctime, 12, 132), (self.mtime, 16, 136)]
        {
            let (secs, extra) = encode_time(time, has_extra(extra_at));
            put_u32(bytes, at, secs);
            if has_extra(extra_at) {
                put_u32(bytes, extra_at, extra);
            }
        }
        if has_extra(148) {
            let (secs, extra) = encode_time(self.crtime, true);
            put_u32(bytes, 144, secs);
            put_u32(bytes, 148, extra);
        }
        put_u32(bytes, 20, self.dtime);
        put_u16(bytes, 26, self.links);
        put_u32(bytes, 28, self.blocks_512);
        put_u32(bytes, 32, self.flags);
        for (i, pointer) in self.pointers.iter().enumerate() {
            put_u32(bytes, 40 + 4 * i, *pointer);
        }
        put_u32(bytes, 100, self.generation);
        put_u32(bytes, 104, self.xattr_block);
    }

    /// Clears the bytes of an inode table and gives them the room beyond 128 bytes that new
    /// inodes have: before the first [`encode`](Self::encode) of a new file.
    pub fn clear(bytes: &mut [u8], want_extra_bytes: u16) {
        bytes.fill(0);
        if bytes.len() > 128 {
            let room = (bytes.len() - 128).min(usize::from(want_extra_bytes)) & !3;
            put_u16(bytes, 128, room as u16);
        }
    }

    /// A device's number: in the second pointer as Linux encodes it today, if the first, of
    /// the old 16 bits, is 0.
    pub fn device(&self) -> u64 {
        let (major, minor) = match (self.pointers[0], self.pointers[1]) {
            (0, new) => ((new >> 8) & 0xfff, (new & 0xff) | ((new >> 12) & 0xf_ff00)),
            (old, _) => ((old >> 8) & 0xff, old & 0xff),
        };
        rustix::fs::makedev(major, minor)
    }

    /// Sets a device's number, as Linux does: the old encoding where it suffices.
    pub fn set_device(&mut self, device: u64) {
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        if major < 256 && minor < 256 {
            self.pointers[0] = major << 8 | minor;
        } else {
            self.pointers[0] = 0;
            self.pointers[1] = (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12);
        }
    }
}

/// Bytes in use beyond the first 128, as the inode says, never more than it has.
fn extra_bytes(bytes: &[u8]) -> usize {
    if bytes.len() <= 130 {
        return 0;
    }
    usize::from(u16_at(bytes, 128)).min(bytes.len() - 128)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_decode_and_what_was_decoded_encodes_to_itself(
            bytes in proptest::collection::vec(any::<u8>(), 256),
            large in any::<bool>(),
        ) {
            let len = if large { 256 } else { 128 };
            let inode = Inode::decode(&bytes[..len]);
            let mut again = bytes[..len].to_vec();
            inode.encode(&mut again);
            prop_assert_eq!(&Inode::decode(&again), &inode);
            let _ = (inode.kind(), inode.device());
        }

        #[test]
        fn times_keep_their_nanoseconds_where_there_is_room(
            secs in i64::from(i32::MIN)..(1i64 << 34) + i64::from(i32::MIN),
            nanos in 0u32..1_000_000_000,
        ) {
            let time = FileTime { secs, nanos };
            let mut bytes = [0; 256];
            Inode::clear(&mut bytes, 32);
            Inode { mtime: time, crtime: time, ..Inode::blank() }.encode(&mut bytes);
            let inode = Inode::decode(&bytes);
            prop_assert_eq!((inode.mtime, inode.crtime), (time, time));
        }

        #[test]
        fn devices_keep_their_number(major in 0u32..0x1000, minor in 0u32..0x10_0000) {
            let mut inode = Inode::blank();
            inode.set_device(rustix::fs::makedev(major, minor));
            prop_assert_eq!(inode.device(), rustix::fs::makedev(major, minor));
        }
    }

    #[test]
    fn small_inodes_have_whole_seconds_and_clamp_them() {
        let mut bytes = [0; 128];
        for (secs, kept) in [(1 << 40, i64::from(i32::MAX)), (-5, -5), (7, 7)] {
            let time = FileTime { secs, nanos: 9 };
            Inode { mtime: time, ..Inode::blank() }.encode(&mut bytes);
            assert_eq!(Inode::decode(&bytes).mtime, FileTime { secs: kept, nanos: 0 });
        }
    }
}
