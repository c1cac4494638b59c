//! Fetches, checks and sends blocks, for every file system made of blocks.
//!
//! - [`window`] and `pace`: how many blocks to have on their way at once.
//! - `cache`: blocks in memory; a block that several readers want is fetched once.
//! - `directory` and `file`: names and bytes, block by block. Each block is checked against the
//!   pointer to it (levels, counts, lengths, order of names) before it is used.
//! - `edit_directory` and `edit_file`: the same with changes, as new blocks beside the old ones.
//! - `form`: how blocks are on the ring.
//! - `content`: the bytes of a file that is being written, over what is stored of it.
//! - `read_pieces`: reading such a file, and searching it for holes.
//! - `outbox`: new blocks on their way to the ring.
//! - `ahead`: how far to read ahead of a reader.
//! - `budget`: the memory of blocks that are not written or sent yet.
//!
//! It sees the ring only as [`atoll_dht::Blocks`] and knows neither roots nor paths.

pub(crate) mod ahead;
pub(crate) mod budget;
pub(crate) mod cache;
pub(crate) mod content;
pub(crate) mod directory;
pub(crate) mod edit_directory;
pub(crate) mod edit_file;
pub(crate) mod error;
pub(crate) mod file;
pub(crate) mod form;
pub(crate) mod outbox;
pub(crate) mod pace;
pub(crate) mod read_pieces;
pub mod window;

pub use cache::Outage;
