//! The daemon put together.

use std::net::SocketAddr;
use std::path::Path;

use atoll_net::Peer;

use crate::config::{NodeConfig, StartError};
use crate::status::Status;

/// A running node.
pub struct Node {}

impl Node {
    /// Starts a node; it runs until [`Node::stop`].
    pub async fn start(config: NodeConfig) -> Result<Node, StartError> {
        let _ = config;
        unimplemented!()
    }

    /// The node's directory.
    pub fn dir(&self) -> &Path {
        unimplemented!()
    }

    /// Its address card: public key and advertised address.
    pub fn local(&self) -> Peer {
        unimplemented!()
    }

    /// Where it accepts connections.
    pub fn listen(&self) -> SocketAddr {
        unimplemented!()
    }

    /// Whether this start made the network (no join code, an empty directory).
    pub fn is_founder(&self) -> bool {
        unimplemented!()
    }

    /// Its state.
    pub fn status(&self) -> Status {
        unimplemented!()
    }

    /// Waits until the node should stop: SIGINT, SIGTERM, or a client's request.
    /// Returns what it was, for people. After it a second signal ends the process at once.
    pub async fn until_told_to_stop(&self) -> &'static str {
        unimplemented!()
    }

    /// Leaves the ring, finishes what is being written and closes the sockets.
    pub async fn stop(self) {
        unimplemented!()
    }
}

/// The tokio runtime for a daemon: few threads with small stacks.
pub fn daemon_runtime(worker_threads: usize) -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(worker_threads)
        .max_blocking_threads(8)
        .thread_stack_size(512 << 10)
        .thread_name("atoll")
        .enable_all()
        .build()
}
