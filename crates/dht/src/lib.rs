//! Blocks on a ring.
//!
//! [`Blocks`] is what file systems see of it: put and get by key, whichever nodes store them.
//! [`Dht`] is a node's part in it: CFS's DHash layer (§5) on any
//! [`Overlay`](atoll_overlay::Overlay), with the lookup integrated as in §6.2.
//!
//! **Invariants:** every block is verified against its key before it is stored and after it
//! is fetched; what was acknowledged is durable on a majority of its replica set; everything
//! ends by a deadline.
//!
//! Each part owns its state; an arrow says which parts it uses, and there is no way back:
//!
//! ```text
//!                    node (wiring)
//!                      │
//!                    client        get, replica selection, put, ack verification
//!                      │
//!                    server        a handler for each method ─────────┐
//!                      │                                              │
//!                 replication      repair, handoff, eviction, expiry  │
//!                      │                                              │
//!                  diversion       copies on other nodes              ▼
//!                      │                                            cache
//!                  accounting      quotas, receipts, attribution      │
//!                      │                                              │
//!                   holdings       blocks, pointers, proofs           │
//!                      │                                              │
//!                     rpc          methods, messages, calls ◄─────────┘
//!                      │
//!                   context        env, transport, overlay, store, config, lease clock
//! ```
//!
//! A part dereferences to the part below it, so a function takes the lowest part that has what it
//! needs: one of `accounting` cannot reach the state of `replication`.
//!
//! It does not know files, nor how the overlay finds its way.

mod accounting;
pub mod blocks;
mod cache;
mod client;
mod config;
mod context;
mod diversion;
pub mod durable;
mod expected_replicas;
mod holdings;
pub mod journal;
mod lease_clock;
mod lease_upkeep;
mod leased;
pub mod locks;
mod mechanisms;
mod most_peers;
mod multiset;
mod node;
mod placement;
mod replication;
pub mod rpc;
mod server;
mod stats;

pub use accounting::quota::{QuotaConfig, QuotaReport, Share};
pub use accounting::receipt::{Attestor, SimulatedKeys};
pub use accounting::{quota, receipt};
pub use blocks::{
    Blocks, GetError, HeldBlock, LeaseRenewal, MemoryBlocks, NewBlock, OverMemory, PutError,
    Renewed, RingRoom, Wanted,
};
pub use client::get::Fetched;
pub use client::inspect::{Replica, ReplicaCopy, Uses};
pub use config::{CacheAt, DhtConfig, MAX_LEASE, ReplicaChoice};
pub use leased::{Leased, MIN_VOLUME_LEASE};
pub use locks::{LockGrant, LockLease, LockMode, LockRefusal, LockStep};
pub use mechanisms::Mechanisms;
pub use node::Dht;
pub use replication::reconcile;
pub use replication::status::{Obstacle, OpenReplica, RepairStage, RepairStatus};
pub use stats::DhtStats;
