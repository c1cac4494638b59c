//! ext2's structures on disk, as plain data: little-endian, checked when they are read.
//!
//! After "The Second Extended Filesystem" (R. Card, T. Ts'o, S. Tweedie 1994) and the
//! layout e2fsprogs 1.47 writes for `mke2fs -t ext2`. Names of fields are ours, with ext2's
//! in the byte tables. Nothing here reads a disk.

pub mod entry;
pub mod features;
pub mod group;
pub mod inode;
pub mod superblock;

/// Length of a group descriptor, bytes.
pub const DESCRIPTOR_BYTES: usize = 32;

/// The two bytes at `at`.
///
/// # Panics
/// If they lie outside `bytes`; callers pass structures of fixed length.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

/// The four bytes at `at`; panics as [`u16_at`] does.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// The eight bytes at `at`; panics as [`u16_at`] does.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Puts `value` at `at`; panics as [`u16_at`] does.
pub(crate) fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

/// Puts `value` at `at`; panics as [`u16_at`] does.
pub(crate) fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// Puts `value` at `at`; panics as [`u16_at`] does.
pub(crate) fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}
