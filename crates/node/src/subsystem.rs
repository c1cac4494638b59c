//! The parts that a node is made of.
//!
//! [`crate::Node::start_with`] builds a list of subsystems and asks each for what it contributes:
//! a service for peers, control calls, a part of the status, and what it does between start and
//! stop. The node's own come first; a crate above this one adds others by a [`MakeSubsystem`]
//! each, so that a new one (a kind of volume, a pool) is an entry in the list that `atoll up`
//! passes.

use std::path::PathBuf;
use std::sync::Arc;

use atoll_dht::Blocks;
use atoll_env::{BoxFuture, Env};
use atoll_net::{Service, Transport};

use crate::config::StartError;
use crate::control::server::Calls;
use crate::status::Status;

/// A part of the node, from its start to its stop.
///
/// All subsystems register their services before the first of them starts, and their control
/// calls before the control socket opens, which is after the last has started.
pub trait Subsystem: Send + Sync + 'static {
    /// The method family that peers call it by (the upper byte of a method's number), and the
    /// service that answers. Peers may call it as soon as the node listens, before it has
    /// started.
    ///
    /// No two subsystems of a node have one family: the start panics then.
    fn service(self: Arc<Self>) -> Option<(u8, Arc<dyn Service>)> {
        None
    }

    /// Registers its control calls; see [`Calls::range`].
    fn control_calls(self: Arc<Self>, calls: &mut Calls) {
        let _ = calls;
    }

    /// Starts what it does on its own. Subsystems start one after the other, in the order of the
    /// node's list.
    ///
    /// # Errors
    /// Why the node cannot be started. Those that have started end then without being stopped,
    /// as in a crash.
    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<(), StartError>> {
        Box::pin(async { Ok(()) })
    }

    /// Adds its part to the node's status: one made outside this crate writes to
    /// [`Status::parts`] under its own name, and to [`Status::warnings`]. Changes nothing; may
    /// read the disk.
    fn report(&self, status: &mut Status) {
        let _ = status;
    }

    /// Finishes before the node stops, in the reverse order of the starts: takes leave of others
    /// and writes down what must survive. Not called when the node is killed.
    fn stop(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async {})
    }
}

/// Makes a subsystem at each start of a node: one that moves to another address starts anew in
/// its process. State that is to outlive such a start belongs to the closure.
pub type MakeSubsystem = Arc<dyn Fn(NodeParts) -> Arc<dyn Subsystem> + Send + Sync>;

/// What a node gives to a subsystem that is made outside this crate. The node's files are free
/// for another start when all clones of these are dropped, so nothing keeps them longer than the
/// subsystem lives.
#[derive(Clone)]
pub struct NodeParts {
    /// Its tasks end with the node, and its wall clock is the network's.
    pub env: Env,
    /// The node's directory.
    pub dir: PathBuf,
    /// Calls to peers.
    pub transport: Arc<dyn Transport>,
    /// Blocks on the ring.
    pub blocks: Arc<dyn Blocks>,
}
