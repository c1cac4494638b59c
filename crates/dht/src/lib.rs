//! Blocks on a ring.
//!
//! [`Blocks`] is what file systems see of it: put and get by key, whoever stores them.
//! [`Dht`] is a node's part in it: CFS's DHash layer (§5) on any
//! [`Overlay`](atoll_overlay::Overlay), with the lookup integrated as in §6.2.
//!
//! **Invariants:** every block is verified against its key before it is stored and after it
//! is fetched; what was acknowledged is durable on a majority of its replica set; everything
//! ends by a deadline.
//!
//! It does not know files, nor how the overlay finds its way.

mod admission;
mod allowance;
mod block_times;
pub mod blocks;
mod cache;
mod confirm;
mod copies;
mod counts;
mod diversion;
pub mod durable;
mod exchange;
mod fetch;
mod giving_up;
mod groups;
mod holdings;
mod inner;
mod lease_clock;
mod leaving;
mod lookup;
mod losses;
mod mechanisms;
pub mod messages;
mod node;
mod owner;
mod path_cache;
mod proof;
mod put_times;
mod quorum;
pub mod quota;
pub mod receipt;
pub mod reconcile;
mod renewals;
mod repair;
mod repair_state;
mod replicas;
mod seen;
mod serve;
mod stats;
mod status;
mod store_blocks;
mod strays;
mod turns;
mod under_way;
mod upkeep;
mod votes;
mod witness;
mod writes;

pub use blocks::{Blocks, GetError, MemoryBlocks, PutError};
pub use inner::{CacheAt, DhtConfig, ReplicaChoice};
pub use lookup::Fetched;
pub use mechanisms::Mechanisms;
pub use node::Dht;
pub use quota::{QuotaConfig, QuotaReport, Share};
pub use receipt::{Attestor, SimulatedKeys};
pub use stats::DhtStats;
pub use status::RepairStatus;
