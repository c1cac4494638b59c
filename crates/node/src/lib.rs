//! The daemon: a node of the ring on one machine, and the client of its control socket.
//!
//! - [`Node`] starts and stops the subsystems: members, blocks, ring, published volumes,
//!   contribution, and any that are made outside this crate ([`Subsystem`]).
//! - [`client::Client`] is how commands and mounts reach it.
//! - [`JoinCode`] lets other nodes join; [`Status`] describes a node's state.
//!
//! It runs only for real, on tokio. It does not know files: to it a volume is a key, a
//! source directory's name, and a list of blocks to keep alive.

#![allow(
    clippy::disallowed_methods,
    reason = "the daemon runs only on tokio; protocol code gets its time and tasks from here"
)]

mod address;
mod blocks;
mod build;
pub mod client;
mod config;
mod contribution;
mod control;
mod counted;
mod daemon;
pub mod decoders;
mod dir;
mod health;
mod join_code;
mod membership;
mod memory;
mod network;
mod node;
mod open;
mod peers;
mod policy;
mod private;
mod process;
mod ring;
mod scope;
mod settings;
mod shell_word;
mod status;
mod subsystem;
mod tree_walk;
mod volumes;

pub use atoll_dht::Share;
pub use atoll_key::IdProfile;
pub use atoll_net::Versions;
pub use atoll_store::FlagCheck;
pub use client::{
    Client, ClientError, ClientOptions, Invitation, Keep, QuotaChange, QuotaShare, SettingsChange,
    Volume,
};
pub use config::{
    DEFAULT_CACHE_BYTES, DEFAULT_LISTEN, DEFAULT_STORAGE_BYTES, MIN_STORAGE_BYTES, NodeConfig,
    Protocol, StartError, VirtualServers,
};
pub use control::outside::{CallRange, MAX_OUTSIDE_BYTES, OUTSIDE_CALLS};
pub use control::server::Calls;
pub use control::volume_error::VolumeError;
pub use counted::counted;
pub use dir::{
    DirError, create_atomically, default_dir, make_private_dir, read_secret, write_atomically,
};
pub use join_code::{JoinCode, JoinCodeError, MAX_BOOTSTRAP};
pub use network::{DEFAULT_REPLICAS, MAX_REPLICAS, Network, NetworkId};
pub use node::Node;
pub use peers::PeerList;
pub use policy::Policy;
pub use private::{PrivateDirectory, enclosing};
pub use process::daemon_runtime;
pub use shell_word::shell_word;
pub use status::{
    AskedNode, AwayNode, BlockCopy, BlockReplicas, BlockUser, Cache, Clock, ContributionStatus,
    Diverted, Health, LockUser, Member, MemberList, Moving, NodeSettings, OpenReplica,
    QuotaAccount, QuotaStatus, Reclaimed, Repair, ReplicaReport, RingCount, RingNode, Rotated,
    Status, StatusPart, StatusRow, UsesReport, VolumeStatus, WrongClock,
};
pub use subsystem::{MakeSubsystem, NodeParts, Subsystem};
pub use tree_walk::TreeWalk;
pub use volumes::{MAX_NAME_BYTES, check_name};
