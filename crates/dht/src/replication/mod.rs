//! Keeping k copies of every block (CFS §5.1), and giving up the others.

mod copying;
pub(crate) mod eviction;
mod exchange;
pub(crate) mod handoff;
mod joining;
mod losses;
mod obstacle;
pub(crate) mod pointer_upkeep;
pub mod reconcile;
pub(crate) mod released;
pub(crate) mod repair;
mod state;
pub(crate) mod status;
pub(crate) mod store;
pub(crate) mod upkeep;
mod writes;

use std::sync::Arc;

use atoll_key::{Key, PeerId};

use crate::context::layer_above;
use crate::diversion::Diversion;
use crate::most_peers::Present;
use crate::multiset::UnderWay;
use crate::placement::present_replicas;
use crate::rpc::Background;
use handoff::Handoff;
use joining::JoinTurns;
use losses::Losses;
use state::Repair;
use status::RepairStatus;
use writes::MAX_ABANDONED;

/// The state of repair, of handoff and of writes under way.
pub(crate) struct Replication {
    diversion: Arc<Diversion>,
    pub repair: Repair,
    /// Replica sets that have disappeared.
    losses: Losses,
    /// Ranges of blocks that belong to other nodes.
    pub handoff: Handoff,
    /// Whose turn it is to be joined with what is held.
    pub join_turns: JoinTurns,
    /// Held while copies are dropped.
    eviction: futures_util::lock::Mutex<()>,
    /// Blocks that this node is sending to replicas, as the root of a put. A replica that is compared
    /// with meanwhile lacks them, and repair would send them a second time: over a slow line, where
    /// puts take longest, they took twice as long. If the put fails, the next comparison finds them
    /// missing.
    pub in_flight: UnderWay<(PeerId, Key)>,
    /// Writes whose callers have given up.
    abandoned: Background,
}
layer_above!(Replication, diversion: Arc<Diversion>);

impl Replication {
    pub(crate) fn new(diversion: Arc<Diversion>) -> Replication {
        Replication {
            losses: Losses::remembering(&*diversion.durable, diversion.env.now()),
            diversion,
            repair: Repair::default(),
            handoff: Handoff::default(),
            join_turns: JoinTurns::default(),
            eviction: futures_util::lock::Mutex::default(),
            in_flight: UnderWay::default(),
            abandoned: Background::new(MAX_ABANDONED),
        }
    }

    /// The state of repair, for people.
    pub(crate) fn status(&self) -> RepairStatus {
        let served = self.overlay.served_ranges(self.config.replicas);
        let lost = self.losses.report();
        let wanted = u32::try_from(self.config.replicas).expect("k is small");
        RepairStatus {
            vanished_nodes: lost.nodes,
            vanished_ring_ppm: lost.ring_ppm,
            vanished_since_unix_ms: lost.since_unix_ms,
            ..self.repair.status(&served, wanted, self.requests.count())
        }
    }

    /// The operator says that nodes which are not there are gone for good.
    ///
    /// # Errors
    /// If it cannot be recorded.
    pub(crate) async fn forget_absent(&self) -> Result<(), String> {
        self.expected.expect_only(present_replicas(self));
        self.most_peers.expect_only(Present::of(&*self.overlay, self.transport.local().id));
        self.losses.forget();
        self.losses.remember(&*self.durable).await;
        let is_saved = self.expected.remember(&*self.durable).await;
        match self.most_peers.remember(&*self.durable).await && is_saved {
            true => Ok(()),
            false => Err("the number of nodes expected could not be saved".to_owned()),
        }
    }
}
