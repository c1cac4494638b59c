//! The calls of a [`vfs::FileSystem`](atoll_vfs::FileSystem) over the network: a *gateway*, which mounts a pool or serves it over
//! NFS, works on the file system of the member that serves it.
//!
//! ```text
//! client    RemoteFs: a file system whose calls are made by the server; goes on over lost calls and restarts
//! server    RemoteServer: makes the calls of clients, each change once
//! locking   the locks of clients: who waits, when they end, what other members are told
//! spread    SpreadFs: one file system over the groups of a pool
//! sessions  what each client has open and holds, and the replies that are kept for it
//! route     how calls reach the server
//! wire      methods and messages
//! decoders  all of them at once, for fuzzing
//! ```
//!
//! Three promises, in `docs/design/pool-calls.md`: a change is made once, however often its message arrives; after a restart of
//! the server a client goes on with what it had open; and bytes that were written and not yet made durable survive the server.

mod client;
pub mod decoders;
mod locking;
mod route;
mod server;
mod sessions;
mod spread;
mod wire;

pub(crate) use client::REOPENED_WITHIN;
pub use client::RemoteFs;
pub(crate) use locking::LockKeeper;
pub use route::{PeerRoute, Route};
pub use server::RemoteServer;
pub(crate) use sessions::SESSION_TIME;
pub use spread::{OpenGroup, SpreadFs};
pub use wire::METHODS;
pub(crate) use wire::ReplicaRead;
