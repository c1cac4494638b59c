//! NFS version 3 (RFC 1813) for any [`FileSystem`](atoll_vfs::FileSystem), over TCP, with its mount protocol on the same port.
//!
//! ```text
//! server ── records ──► rpc ── Call ──► dispatch ──► procedures ──► FileSystem
//!                                         │             │ service: exports, handles, opens; access
//!                                         └ replies (retransmissions)
//! ```
//!
//! What a client is promised:
//!
//! - A handle names its file over restarts of the server, as long as the file system finds files by handle, and nobody can make one up
//!   (`handles`).
//! - A change that is sent twice is made once (`replies`). It is not answered before it is made; what changes nothing is answered
//!   within ten seconds, if only with "try again later".
//! - What COMMIT has answered is durable; if unstable writes may have been lost, the write verifier changes, and clients write them again.
//! - Permissions are checked here, by modes and access control lists (`access`), for the user that the client's machine names: an
//!   export lists the machines that it believes (`exports`).
//!
//! What it does not know: locks (NLM; clients mount with `nolock`), UDP, other versions, Kerberos.

mod access;
mod clients;
mod dispatch;
pub mod exports;
pub mod handles;
mod listings;
mod mount;
pub mod nfs3;
mod opens;
pub mod port_mapper;
mod procedures;
mod replies;
pub mod rpc;
mod server;
mod service;
pub mod xdr;

pub use clients::ClientMachine;
pub use exports::{Export, Network, Squash};
pub use handles::HandleKey;
pub use server::serve;
pub use service::{LIMIT, Options, Service};
