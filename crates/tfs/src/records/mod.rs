//! What TFS adds to ext2, as plain data: the header, the summaries of groups, the maps of
//! transparent files. All of it stands in inode [`RECORDS_INODE`]; the byte tables are in
//! `docs/design/tfs.md`. Nothing here reads a disk.
//!
//! [`RECORDS_INODE`]: crate::format::superblock::RECORDS_INODE

pub mod header;
pub mod layout;
pub mod map;
pub mod summary;
pub mod tag;
