//! The parts that a node is made of.
//!
//! [`crate::Node::start`] builds a list of subsystems and asks each for what it contributes, so
//! that a new one (a kind of volume, a pool) is a new module and an entry in that list.

use std::sync::Arc;

use atoll_env::BoxFuture;
use atoll_net::Service;

use crate::config::StartError;
use crate::control::server::Calls;
use crate::status::Status;

/// A part of the node, from its start to its stop.
pub(crate) trait Subsystem: Send + Sync + 'static {
    /// The method family that peers call it by, and the service that answers. Served before any
    /// subsystem starts.
    fn service(self: Arc<Self>) -> Option<(u8, Arc<dyn Service>)> {
        None
    }

    /// Registers its control calls.
    fn control_calls(self: Arc<Self>, calls: &mut Calls);

    /// Starts what it does on its own. Subsystems start one after the other, in the order of the
    /// node's list.
    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<(), StartError>> {
        Box::pin(async { Ok(()) })
    }

    /// Adds its part to the node's status. Changes nothing; may read the disk.
    fn report(&self, status: &mut Status);

    /// Finishes before the node stops, in the reverse order of the starts: takes leave of others
    /// and writes down what must survive.
    fn stop(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async {})
    }
}
