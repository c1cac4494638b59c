//! File systems made of blocks.
//!
//! [`owned`] is CFS's (§3): one publisher signs, everybody reads. It sees the ring only
//! as [`atoll_dht::Blocks`] and knows nothing of routing, replicas or peers. [`window`] says
//! how many blocks to have on their way at once.

pub mod owned;
pub mod window;
