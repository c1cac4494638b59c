//! What a node does for its own clients: get, put and renew (CFS §4.1, Table 1).

mod ack_verification;
mod ask;
mod block_times;
pub(crate) mod get;
pub(crate) mod get_mutable;
pub(crate) mod inspect;
pub(crate) mod known_sets;
pub(crate) mod lock_leases;
pub(crate) mod put;
mod put_batch;
mod put_mutable;
mod recent;
pub(crate) mod release;
pub(crate) mod renew;
mod replica_selection;
pub(crate) mod room;
mod seen;
mod votes;

use std::sync::Arc;
use std::time::Duration;

use crate::context::layer_above;
use crate::server::Server;
use block_times::BlockTimes;
use known_sets::KnownSets;
use lock_leases::KnownVoters;
use replica_selection::HedgeBudget;
use room::LastRoom;
use seen::SeenVersions;

/// The first pause before trying again; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// What a node has learned while it served its own clients.
pub(crate) struct Client {
    server: Arc<Server>,
    hedges: HedgeBudget,
    /// How long replicas take to send a block: longer than a round trip.
    fetch_times: BlockTimes,
    /// Of mutable blocks.
    known_sets: KnownSets,
    /// The voters of the replica sets that keep locks.
    known_voters: KnownVoters,
    /// Mutable blocks are not read below these versions.
    seen: Arc<SeenVersions>,
    last_room: LastRoom,
}
layer_above!(Client, server: Arc<Server>);

impl Client {
    pub(crate) fn new(server: Arc<Server>) -> Client {
        Client {
            hedges: HedgeBudget::default(),
            fetch_times: BlockTimes::default(),
            known_sets: KnownSets::default(),
            known_voters: KnownVoters::default(),
            last_room: LastRoom::default(),
            seen: Arc::new(SeenVersions::remembered(&*server.durable)),
            server,
        }
    }

    /// Older versions of signed blocks than those seen before are read again.
    ///
    /// # Errors
    /// If it cannot be recorded.
    pub(crate) async fn forget_seen(&self) -> Result<(), String> {
        self.seen.forget_all();
        self.seen.save(&*self.durable).await
    }
}
