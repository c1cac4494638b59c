//! File systems made of blocks.
//!
//! - [`format`](mod@format): the bytes of directory, inode, pointer and attribute blocks.
//! - [`keep`]: which old states of a volume are kept.
//! - [`blocks`]: fetching blocks, checked and cached, so many at once as the line bears.
//! - `mount`: the calls of a mount, over an engine for each kind of volume.
//! - [`owned`]: the file system of CFS (§3): one publisher signs, everybody reads.
//!
//! - [`shared`]: the file system of Pastis: many people write, no server.
//! - [`SpoolDirectory`]: where mounts keep on disk what the ring does not have yet.
//! - [`HandleTable`]: where files are by number, for handles that last over restarts.
//!
//! Each knows only those before it, [`SpoolDirectory`] and [`HandleTable`]. The ring is seen only as [`atoll_dht::Blocks`]; nothing here
//! knows routing, replicas or peers.

pub mod blocks;
mod counted;
pub mod format;
mod handle_table;
pub mod keep;
mod mount;
pub mod owned;
mod room;
pub mod shared;
mod spool_directory;

pub use handle_table::HandleTable;
pub use spool_directory::SpoolDirectory;
