//! The transparent file system (TFS): an ext2 file system in user space whose free blocks
//! may hold *transparent files*, which cost ordinary files neither room nor speed and may
//! vanish at any moment. After J. Cipar, M. Corner and E. Berger, "TFS: A Transparent File
//! System for Contributory Storage" (FAST 2007); the format is in `docs/design/tfs.md`.
//!
//! From the ground:
//!
//! | module | what |
//! |---|---|
//! | [`device`] | an image or block device as four calls, and a double that loses power |
//! | `format` | ext2's structures as plain data: superblock, descriptors, inodes, entries |
//! | `records` | what TFS adds, as plain data: header, summaries, extents, tags |
//! | `meta` | metadata blocks in memory, transactions, the journal |
//! | [`avoid`] | which places transparent data keeps away from (§3.3) |
//! | `states` | the five states of a block and their transitions (Figure 2) |
//! | [`ext2`] | an ext2 file system as transactions: blocks, inodes, directories, transparent maps |
//! | [`fs`] | the mounted file system: locks, life cycle, [`atoll_vfs::FileSystem`] |
//! | [`mkfs`], [`check`] | making one, and looking at one from outside |
//! | [`Progress`] | how far the two have come, for who waits |
//! | [`map`], [`stat`] | where which blocks lie (Figure 10), and how others ask for it |
//!
//! It knows nothing of the network, of nodes or of FUSE.

pub mod avoid;
mod bitmap;
pub mod check;
pub mod device;
pub mod ext2;
pub mod format;
pub mod fs;
pub mod map;
pub mod meta;
pub mod mkfs;
mod progress;
pub mod records;
mod runs;
pub mod stat;
pub mod states;

pub use progress::Progress;
