//! The block layer as a subsystem: the DHT over the store, and the control calls for blocks.
//!
//! It does not know what the blocks are for.

mod disk_watch;
pub(crate) mod durable;
mod inspect;
mod journal;

use std::sync::Arc;

use atoll_dht::quota::Account;
use atoll_dht::{Blocks, Dht, RepairStage, Share};
use atoll_env::{BoxFuture, Env};
use atoll_key::{BlockId, Key};
use atoll_net::{Refusal, Service};
use atoll_store::{BlockStore, ContributedStore, DiskStore, Usage};

use crate::config::StartError;
use crate::control::blocks::{self, AskReplicas, AskUses, BlockList, Changed, Outcomes};
use crate::control::body::{Block, Json};
use crate::control::calls::{
    ForgetAbsent, Get, Lock, Put, PutInOrder, Reclaim, Release, Renew, Replicas, Room, SameSet,
    SetQuota, ShowQuota, Uses, Watch,
};
use crate::control::message::{Empty, GetFailed, Unfit, cut_refusal};
use crate::control::server::Calls;
use crate::counted::counted;
use crate::ring::Ring;
use crate::settings::SettingsStore;
use crate::status::{
    Cache, Diverted, OpenReplica, QuotaAccount, QuotaStatus, Reclaimed, Repair, Status, hex,
};
use crate::subsystem::Subsystem;

/// The most publishers, and the most addresses, that are listed with what they use.
const ACCOUNTS_SHOWN: usize = 64;
/// What one call may copy to give back disk space.
const RECLAIM_STEP_BYTES: u64 = 64 << 20;

/// The node's blocks and those of others that it keeps.
pub(crate) struct BlockLayer {
    pub env: Env,
    pub dht: Arc<Dht>,
    pub store: Arc<ContributedStore>,
    pub pointers: Arc<DiskStore>,
    pub settings: Arc<SettingsStore>,
    pub ring: Arc<Ring>,
    /// An index was rebuilt: renewals since the blocks came are forgotten.
    pub rebuilt_index: bool,
}

impl Subsystem for BlockLayer {
    fn service(self: Arc<Self>) -> Option<(u8, Arc<dyn Service>)> {
        Some(((atoll_dht::rpc::LOOKUP_STEP >> 8) as u8, self.dht.clone()))
    }

    fn control_calls(self: Arc<Self>, calls: &mut Calls) {
        block_calls(self.dht.clone(), calls);
        let layer = self.clone();
        calls.on_blocking::<ShowQuota>(move |Empty {}| Ok(Json(layer.quota_status())));
        let layer = self.clone();
        calls.on_blocking::<SetQuota>(move |change| {
            layer.settings.change(|settings| settings.change_quota(change))?;
            Ok(Json(layer.quota_status()))
        });
        let dht = self.dht.clone();
        calls.on::<ForgetAbsent>(move |Empty {}| {
            let dht = dht.clone();
            Box::pin(
                async move { Ok(dht.forget_absent().await.map(|_| Empty {}).map_err(Unfit::from)) },
            )
        });
        let dht = self.dht.clone();
        calls.on::<Replicas>(move |AskReplicas { ids }| {
            let dht = dht.clone();
            Box::pin(async move {
                let ids = ids.0.into_iter().map(BlockId::try_from);
                let keys = ids.map(|id| Ok(id?.key)).collect::<Result<Vec<Key>, Refusal>>()?;
                Ok(Ok(Json(inspect::replicas(&dht, keys).await)))
            })
        });
        let dht = self.dht.clone();
        calls.on::<Uses>(move |AskUses { id, lock }| {
            let dht = dht.clone();
            Box::pin(async move {
                let id: BlockId = id.try_into()?;
                Ok(Ok(Json(inspect::uses(&dht, id.key, Key(lock)).await)))
            })
        });
        let store = self.store.clone();
        calls.on::<Reclaim>(move |Empty {}| {
            let store = store.clone();
            Box::pin(async move {
                let freed = store.reclaim(RECLAIM_STEP_BYTES).await;
                let freed_bytes =
                    freed.map_err(|error| Refusal::new(Refusal::INTERNAL, error.to_string()))?;
                let Usage { block_bytes, disk_bytes, .. } = store.usage();
                Ok(Ok(Json(Reclaimed { freed_bytes, block_bytes, disk_bytes })))
            })
        });
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<(), StartError>> {
        Box::pin(async move {
            let dht = Arc::downgrade(&self.dht);
            self.settings.watch(move |settings| {
                if let Some(dht) = dht.upgrade() {
                    dht.set_quota(settings.quota());
                    dht.set_cache_bytes(settings.cache_bytes());
                }
            });
            if self.rebuilt_index || self.pointers.report().rebuilt_index {
                // Publishers get time for renewals that are forgotten.
                let blocks = self.dht.extend_leases().await;
                let blocks = blocks.map_err(|error| StartError::Store(error.to_string()))?;
                tracing::warn!(blocks, "the store's index was rebuilt; all leases begin again");
            }
            self.dht.start();
            let watch = disk_watch::run(self.env.clone(), self.dht.clone(), self.ring.clone());
            self.env.spawn(Box::pin(watch));
            Ok(())
        })
    }

    fn report(&self, status: &mut Status) {
        let usage = self.store.usage();
        let stats = self.dht.stats();
        status.blocks = usage.blocks;
        status.block_bytes = usage.block_bytes;
        status.disk_bytes = usage.disk_bytes;
        status.capacity_bytes = usage.capacity_bytes;
        status.rotten_blocks = stats.damaged_blocks;
        status.bad_blocks =
            stats.bad_blocks.iter().map(|(peer, count)| (hex(&peer.0), *count)).collect();
        status.diverted =
            Diverted { pointers: stats.pointers, held_for_others: stats.held_for_others };
        status.cache = Cache {
            blocks: stats.cache_blocks,
            bytes: stats.cache_bytes,
            limit_bytes: self.settings.present().cache_bytes(),
            hits: stats.cache_hits,
            misses: stats.cache_misses,
            evictions: stats.cache_evictions,
        };
        status.repair = self.repair();
        let failing = self.store.disk_failure().map(|failure| failure.why);
        status.disk_trouble = self.dht.disk_trouble().or(failing);
        let warnings = self.warnings(status);
        status.warnings.extend(warnings);
    }

    fn stop(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            if let Err(error) = self.store.flush().await {
                tracing::error!("the store could not be flushed: {error}");
            }
            if let Err(error) = self.pointers.flush().await {
                tracing::error!("the pointers could not be flushed: {error}");
            }
        })
    }
}

/// Registers the calls that [`Blocks`] has.
pub(crate) fn block_calls(blocks: Arc<dyn Blocks>, calls: &mut Calls) {
    let source = blocks.clone();
    calls.on::<Get>(move |call| {
        let source = source.clone();
        Box::pin(async move {
            let found = source.get_block(call.id.try_into()?, call.wanted()).await;
            Ok(GetFailed::unless_sent(found.map(|held| held.bytes)).map(Block::of))
        })
    });
    let target = blocks.clone();
    calls.on::<Put>(move |BlockList(list)| {
        let stored = target.put_blocks(list);
        Box::pin(async move { Ok(Ok(Outcomes::of_put(stored.await))) })
    });
    let target = blocks.clone();
    calls.on::<Renew>(move |renew| {
        let target = target.clone();
        Box::pin(async move {
            let renewed = target.renew_blocks(renew.try_into()?).await;
            Ok(Ok(Outcomes::of_renewal(renewed)))
        })
    });
    let target = blocks.clone();
    calls.on::<PutInOrder>(move |BlockList(list)| {
        let stored = target.put_in_order(list);
        Box::pin(async move { Ok(Ok(Outcomes::of_put(stored.await))) })
    });
    let target = blocks.clone();
    calls.on::<SameSet>(move |call| {
        let until = target.same_set_until(Key(call.key));
        Box::pin(async move { Ok(Ok(blocks::SameSet { until: until.await.map(|key| key.0) })) })
    });
    let target = blocks.clone();
    calls.on::<Release>(move |ask| {
        let released = target.release_blocks(ask.release);
        Box::pin(async move { Ok(Ok(Outcomes::of_put(released.await))) })
    });
    let target = blocks.clone();
    calls.on::<Room>(move |Empty {}| {
        let room = target.room();
        Box::pin(async move { Ok(Ok(room.await.into())) })
    });
    let target = blocks.clone();
    calls.on::<Lock>(move |ask| {
        let target = target.clone();
        Box::pin(async move { Ok(target.lock_lease(ask.into()).await.map_err(cut_refusal)) })
    });
    calls.on::<Watch>(move |call| {
        let blocks = blocks.clone();
        Box::pin(async move {
            let changed = blocks.watch(call.id.try_into()?, call.seen).await;
            let changed = match changed {
                Ok(None) => return Ok(Ok(Changed(None))),
                Ok(Some(held)) => Ok(held.bytes),
                Err(error) => Err(error),
            };
            Ok(GetFailed::unless_sent(changed).map(|bytes| Changed(Some(bytes))))
        })
    });
}

impl BlockLayer {
    fn quota_status(&self) -> QuotaStatus {
        let report = self.dht.quota_report(ACCOUNTS_SHOWN);
        let part = |share: Share| f64::from(share.millionths()) / 1e6;
        let account = |account: &Account| QuotaAccount {
            who: account.who.to_string(),
            brought: account.is_carrier,
            used_bytes: account.used_bytes,
            blocks: account.blocks,
            allowed_bytes: account.allowed_bytes,
        };
        QuotaStatus {
            estimated_nodes: report.estimated_nodes,
            capacity_bytes: report.capacity_bytes,
            publisher_nodes: report.settings.publisher_nodes,
            floor_share: part(report.settings.floor_share),
            key_share_set: report.settings.key_share.map(part),
            address_share_set: report.settings.address_share.map(part),
            key_share: part(report.key_share),
            key_allowed_bytes: report.key_allowed_bytes,
            address_share: part(report.address_share),
            address_allowed_bytes: report.address_allowed_bytes,
            keys: report.keys.iter().map(account).collect(),
            addresses: report.addresses.iter().map(account).collect(),
            refused_blocks: report.refused_blocks,
        }
    }

    fn repair(&self) -> Repair {
        let repair = self.dht.repair_status();
        Repair {
            queue_blocks: repair.queue_blocks,
            fully_replicated: repair.fully_replicated,
            replicas_wanted: repair.replicas_wanted,
            replicas_present: repair.replicas_present,
            stage: stage_name(repair.stage).to_owned(),
            open: repair.open.iter().map(open_replica).collect(),
            root_blocks: repair.root_blocks,
            repaired_blocks: repair.repaired_blocks,
            repaired_bytes: repair.repaired_bytes,
            rounds: repair.rounds,
            last_round_unix_ms: repair.last_round_unix_ms,
            vanished_nodes: repair.vanished_nodes,
            vanished_ring_share: f64::from(repair.vanished_ring_ppm) / 1e6,
            vanished_since_unix_ms: repair.vanished_since_unix_ms,
        }
    }

    fn warnings(&self, status: &Status) -> Vec<String> {
        let mut warnings = Vec::new();
        warnings.extend(self.dht.disk_trouble().map(|why| disk_watch::warning(&why)));
        warnings.extend(loss_warning(&status.repair));
        if let Some(failure) = self.store.disk_failure() {
            let secs = (self.env.unix_ms() / 1000).saturating_sub(failure.since_unix_secs);
            let (why, time) = (failure.why, counted(secs / 60, "minute", "minutes"));
            warnings.push(format!("the disk has not taken a write for {time}: {why}"));
        }
        if status.rotten_blocks > 0 {
            let rotten = counted(
                status.rotten_blocks,
                "block has rotted on disk and is",
                "blocks have rotted on disk and are",
            );
            warnings.push(format!("{rotten} fetched again: look after the disk"));
        }
        for (peer, count) in &status.bad_blocks {
            let blocks = counted(
                *count,
                "block that does not match its key",
                "blocks that do not match their keys",
            );
            warnings.push(format!("node {peer} sent {blocks}"));
        }
        warnings
    }
}

/// As the status names it.
fn stage_name(stage: RepairStage) -> &'static str {
    match stage {
        RepairStage::NoPlace => "no_place",
        RepairStage::NotCompared => "not_compared",
        RepairStage::NewNeighbours => "new_neighbours",
        RepairStage::Requested => "requested",
        RepairStage::Differing => "differing",
        RepairStage::InStep => "in_step",
    }
}

fn open_replica(open: &atoll_dht::OpenReplica) -> OpenReplica {
    OpenReplica {
        peer_id: hex(&open.peer.id.0),
        addr: open.peer.addr.to_string(),
        blocks: open.blocks,
        why: open.why.to_string(),
    }
}

/// Blocks that the surviving nodes cannot repair.
fn loss_warning(repair: &Repair) -> Option<String> {
    (repair.vanished_nodes > 0).then(|| {
        format!(
            "{} neighbours disappeared together: blocks that only they had, of about {:.2} % of \
             the ring, cannot be read until one of them is back (if none will be: `atoll settings \
             --forget-absent`)",
            repair.vanished_nodes,
            repair.vanished_ring_share * 100.0
        )
    })
}
