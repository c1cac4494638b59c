//! What the node can tell about itself: its status, its volumes, an invitation.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::quota::Account;
use atoll_dht::{Dht, Share};
use atoll_env::{BoxFuture, Env, Instant};
use atoll_key::{IdProfile, PeerId, VolumeAddress};
use atoll_net::{Peer, TcpTransport, Transport};
use atoll_overlay::chord::Chord;
use atoll_overlay::{Node as RingPlace, Overlay};
use atoll_store::{BlockStore, Usage};

use crate::address;
use crate::blocks::disk_watch;
use crate::config::VirtualServers;
use crate::contribution::{ContributionController, ContributionStatus, Policy};
use crate::control::message::{ChangeQuota, ChangeSettings, Invited};
use crate::control::server::About;
use crate::dir::NodeDir;
use crate::join_code::JoinCode;
use crate::membership::Membership;
use crate::memory;
use crate::network::Network;
use crate::ring::clock;
use crate::ring::join::RingJoin;
use crate::settings::{Settings, SettingsStore};
use crate::status::{
    Cache, Diverted, MemberList, NodeSettings, QuotaAccount, QuotaStatus, Reclaimed, Repair,
    RingNode, Rotated, Status, VolumeStatus,
};
use crate::volumes::{self, Volumes};

/// Successors named in an invitation besides the node itself.
const INVITED_SUCCESSORS: usize = 3;
/// The most publishers, and the most addresses, that are listed with what they use.
const ACCOUNTS_SHOWN: usize = 64;

/// What one call may copy to give back disk space.
const RECLAIM_STEP_BYTES: u64 = 64 << 20;

/// The parts of a running node that have something to tell.
pub(crate) struct Report {
    pub dir: NodeDir,
    pub env: Env,
    pub started: Instant,
    pub network: Network,
    pub membership: Arc<Membership>,
    pub listen: SocketAddr,
    pub lease: Duration,
    pub transport: Arc<TcpTransport>,
    pub overlay: Arc<dyn Overlay>,
    pub join: Arc<RingJoin>,
    pub settings: Arc<SettingsStore>,
    pub store: Arc<dyn BlockStore>,
    pub contributor: Arc<ContributionController>,
    pub dht: Arc<Dht>,
    pub volumes: Arc<Volumes>,
    pub chord: Arc<Chord>,
}

impl About for Report {
    fn status(&self) -> Status {
        let places = self.overlay.neighbourhoods();
        let around = &places[0];
        let usage = self.store.usage();
        let net = self.transport.stats();
        let local = self.transport.local();
        let mut status = Status {
            version: env!("CARGO_PKG_VERSION").into(),
            dir: self.dir.root().display().to_string(),
            process: std::process::id(),
            peer_id: hex(&local.id.0),
            listen: self.listen.to_string(),
            advertise: local.addr.to_string(),
            network_id: self.network.id().to_string(),
            uptime_secs: self.env.now().since(self.started).as_secs(),
            joined: around.joined,
            positions: places.iter().map(|place| hex_key(&place.me)).collect(),
            predecessor: around.predecessor.as_ref().map(ring_node),
            successors: around.successors.iter().map(ring_node).collect(),
            estimated_nodes: self.overlay.estimated_peers(),
            blocks: usage.blocks,
            block_bytes: usage.block_bytes,
            disk_bytes: usage.disk_bytes,
            capacity_bytes: usage.capacity_bytes,
            rotten_blocks: self.dht.stats().damaged_blocks,
            repair: self.repair(),
            diverted: self.diverted(),
            cache: self.cache(),
            clock: clock::status(&self.overlay.clock()),
            refusals: BTreeMap::new(),
            bad_blocks: BTreeMap::new(),
            connections: net.connections,
            received_bytes: net.bytes_in,
            sent_bytes: net.bytes_out,
            resident_bytes: memory::resident_bytes(),
            volumes: self.volumes(),
            warnings: Vec::new(),
        };
        status.refusals = net
            .refusals
            .iter()
            .map(|(reason, count)| (reason.name().to_owned(), *count))
            .chain((net.calls_overloaded > 0).then(|| ("overloaded".into(), net.calls_overloaded)))
            .collect();
        let bad = self.dht.stats().bad_blocks;
        status.bad_blocks = bad.iter().map(|(peer, count)| (hex(&peer.0), *count)).collect();
        status.warnings = self.warnings(&status);
        status
    }

    fn volumes(&self) -> Vec<VolumeStatus> {
        let names = self.volumes.names().unwrap_or_default();
        names.iter().map(|name| volume_status(&self.volumes, name, self.lease)).collect()
    }

    fn invite(&self) -> Invited {
        let around = self.overlay.neighbourhood();
        let successors = around.successors.iter().map(|node| node.peer).take(INVITED_SUCCESSORS);
        let peers = std::iter::once(self.transport.local()).chain(successors);
        let code = JoinCode::new(self.membership.network(), peers);
        let warning = if code.is_loopback_only() {
            Some(format!(
                "the node listens on {}: this code works on this machine only; \
                 for others, start it with --listen 0.0.0.0:PORT",
                self.listen
            ))
        } else if !around.joined {
            Some("the node has no place on the ring yet".into())
        } else {
            None
        };
        Invited { code: code.to_string(), warning }
    }

    fn reclaim(&self) -> BoxFuture<'static, Result<Reclaimed, String>> {
        let store = self.store.clone();
        Box::pin(async move {
            let freed = store.reclaim(RECLAIM_STEP_BYTES).await;
            let freed_bytes = freed.map_err(|error| error.to_string())?;
            let Usage { block_bytes, disk_bytes, .. } = store.usage();
            Ok(Reclaimed { freed_bytes, block_bytes, disk_bytes })
        })
    }

    fn quota(&self, change: ChangeQuota) -> Result<QuotaStatus, String> {
        if change != ChangeQuota::default() {
            self.settings.change(|settings| settings.change_quota(change))?;
            self.dht.set_quota(self.settings.present().quota());
        }
        Ok(self.quota_status())
    }

    fn contribute(
        &self,
        policy: Option<Policy>,
        abandon: bool,
    ) -> Result<ContributionStatus, String> {
        if abandon {
            self.contributor.abandon_former()?;
        }
        if let Some(policy) = &policy {
            self.contributor.change(policy)?;
            self.follow_storage();
        }
        Ok(self.contributor.status())
    }

    fn change_settings(&self, change: ChangeSettings) -> Result<NodeSettings, String> {
        let virtual_servers = change.virtual_servers.map(|count| match count {
            0 => VirtualServers::Auto,
            count => VirtualServers::Count(count),
        });
        let mut checked = self.settings.present();
        let apply = |settings: &mut Settings| {
            virtual_servers.map_or(Ok(()), |count| settings.set_virtual_servers(count))?;
            change.cache_bytes.map_or(Ok(()), |bytes| settings.set_cache_bytes(bytes))
        };
        apply(&mut checked)?;
        if change.forget_absent == Some(true) {
            // This runs on a thread that may block.
            tokio::runtime::Handle::current().block_on(self.dht.forget_absent())?;
        }
        if (change.virtual_servers, change.cache_bytes) == (None, None) {
            return Ok(self.node_settings());
        }
        self.settings.change(apply)?;
        let settings = self.node_settings();
        self.dht.set_cache_bytes(settings.cache_bytes);
        if change.virtual_servers.is_some() {
            self.take_places(settings.positions);
        }
        Ok(settings)
    }

    fn members(&self) -> MemberList {
        let known: Vec<Peer> =
            self.overlay.known_nodes().into_iter().map(|node| node.peer).collect();
        let connected = self.transport.connected();
        self.membership.list(self.transport.local(), &known, &connected)
    }

    fn rotate(
        &self,
        remove: Vec<PeerId>,
        overlap: Duration,
    ) -> BoxFuture<'static, Result<Rotated, String>> {
        let (membership, transport) = (self.membership.clone(), self.transport.clone());
        Box::pin(membership.rotate(transport, remove, overlap))
    }
}

impl Report {
    fn take_places(&self, positions: u16) {
        let chord = self.chord.clone();
        // Joining asks others, who may be slow; `status` shows the places as they come.
        self.env.spawn(Box::pin(async move {
            if let Err(error) = chord.set_virtual_servers(positions).await {
                tracing::error!("the number of virtual servers stays: {error}");
            }
        }));
    }

    /// As many places on the ring as the storage now offered is worth (CFS §5.3), unless
    /// somebody counted them.
    fn follow_storage(&self) {
        let settings = self.node_settings();
        if self.settings.present().virtual_servers() == VirtualServers::Auto {
            self.take_places(settings.positions);
        }
    }

    fn quota_status(&self) -> QuotaStatus {
        let report = self.dht.quota_report(ACCOUNTS_SHOWN);
        let part = |share: Share| f64::from(share.millionths()) / 1e6;
        let account = |account: &Account| QuotaAccount {
            who: account.who.to_string(),
            brought: account.is_bearer,
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

    fn node_settings(&self) -> NodeSettings {
        let settings = self.settings.present();
        let virtual_servers = settings.virtual_servers();
        NodeSettings {
            virtual_servers: virtual_servers.to_string(),
            positions: virtual_servers.count(self.store.usage().capacity_bytes),
            cache_bytes: settings.cache_bytes(),
            storage_bytes: self.store.usage().capacity_bytes,
            node_ids: match self.network.profile {
                IdProfile::Address => "address".into(),
                IdProfile::Identity => "identity".into(),
            },
            replicas: self.network.replicas,
        }
    }

    fn cache(&self) -> Cache {
        let stats = self.dht.stats();
        Cache {
            blocks: stats.cache_blocks,
            bytes: stats.cache_bytes,
            limit_bytes: self.settings.present().cache_bytes(),
            hits: stats.cache_hits,
            misses: stats.cache_misses,
            evictions: stats.cache_evictions,
        }
    }

    fn repair(&self) -> Repair {
        let repair = self.dht.repair_status();
        Repair {
            queue_blocks: repair.queue_blocks,
            fully_replicated: repair.fully_replicated,
            replicas_wanted: repair.replicas_wanted,
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

    fn diverted(&self) -> Diverted {
        let stats = self.dht.stats();
        Diverted { pointers: stats.pointers, held_for_others: stats.held_for_others }
    }

    fn warnings(&self, status: &Status) -> Vec<String> {
        let mut warnings: Vec<String> = self.join.trouble().into_iter().collect();
        warnings.extend(self.membership.warning());
        if let Some(peer) = self.chord.doubted_by() {
            warnings.push(format!(
                "the node at {} cannot reach this one at {}: let incoming connections through to \
                 that port, or start with --advertise IP:PORT as others see it",
                peer.addr, status.advertise
            ));
        }
        warnings.extend(address::trouble(self.listen));
        warnings.extend(clock::warnings(&status.clock));
        warnings.extend(self.dht.disk_trouble().map(|why| disk_watch::warning(&why)));
        let contribution = self.contributor.status();
        // Where the disk decides, being full is as it should be.
        if contribution.size_bytes.is_some() && status.disk_bytes > status.capacity_bytes / 20 * 19
        {
            let advice =
                "the store is nearly full; give it more with `atoll contribute fixed SIZE`";
            warnings.push(advice.into());
        }
        warnings.extend(contribution.warnings);
        warnings.extend(loss_warning(&status.repair));
        if let Some(failure) = self.store.disk_failure() {
            let secs = (self.env.unix_ms() / 1000).saturating_sub(failure.since_unix_secs);
            let (why, minutes) = (failure.why, secs / 60);
            warnings.push(format!("the disk has not taken a write for {minutes} minutes: {why}"));
        }
        if status.rotten_blocks > 0 {
            let rotten = status.rotten_blocks;
            warnings.push(format!(
                "{rotten} blocks have rotted on disk and are fetched again: look after the disk"
            ));
        }
        for (peer, count) in &status.bad_blocks {
            warnings.push(format!("node {peer} sent {count} blocks that do not match their keys"));
        }
        let now_secs = self.env.unix_ms() / 1000;
        let lease_secs = self.lease.as_secs();
        warnings.extend(
            status.volumes.iter().flat_map(|volume| volume_warnings(volume, now_secs, lease_secs)),
        );
        warnings
    }
}

/// What survivors cannot repair.
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

/// What somebody should know about a volume.
fn volume_warnings(volume: &VolumeStatus, now_secs: u64, lease_secs: u64) -> Vec<String> {
    let name = &volume.name;
    let mut warnings = Vec::new();
    if volume.lost_blocks > 0 {
        let lost = volume.lost_blocks;
        let source = volume.source.as_deref().unwrap_or("its directory");
        warnings.push(format!(
            "{lost} blocks of volume {name} were on no node that answered at the last renewal: if \
             no node is missing, publish {source} again"
        ));
    }
    let left_secs = volume.lease_expires_unix_secs.saturating_sub(now_secs);
    // Renewal is due when two thirds are left; by half something has gone wrong.
    if volume.root_version > 0 && left_secs < lease_secs / 2 {
        warnings.push(format!(
            "volume {name} has not been renewed; its blocks may go in {} hours",
            left_secs / 3600
        ));
    }
    if let Some(trouble) = &volume.trouble {
        warnings.push(format!("volume {name} could not be renewed: {trouble}"));
    }
    warnings
}

fn volume_status(volumes: &Volumes, name: &str, lease: Duration) -> VolumeStatus {
    let kept = volumes.kept(name);
    let mut status = VolumeStatus {
        name: name.to_owned(),
        refreshed_unix_secs: kept.refreshed_unix_secs,
        lost_blocks: kept.lost_blocks,
        trouble: kept.trouble,
        renewing_blocks: kept.pass.map(|pass| pass.next),
        ..VolumeStatus::default()
    };
    let mut trouble = Vec::new();
    match volumes.key(name) {
        Ok(key) => status.address = VolumeAddress(key.volume_id()).to_string(),
        Err(error) => trouble.push(error.to_string()),
    }
    match volumes.read_key(name) {
        Ok(read_key) => status.encrypted = read_key.is_some(),
        Err(error) => trouble.push(error.to_string()),
    }
    match volumes.source(name) {
        Ok(source) => status.source = source.map(|path| path.display().to_string()),
        Err(error) => trouble.push(error.to_string()),
    }
    match volumes.manifest(name) {
        Ok(Some(manifest)) => {
            status.root_version = manifest.root().version;
            status.kept_blocks = manifest.count();
            status.lease_expires_unix_secs = volumes::lease_end(kept.refreshed_unix_secs, lease);
        }
        // What was kept until it was unpublished has its last leases still.
        Ok(None) => {
            status.lease_expires_unix_secs = volumes::lease_end(kept.refreshed_unix_secs, lease);
            status.lost_blocks = 0;
            status.trouble = None;
        }
        Err(error) => trouble.push(error.to_string()),
    }
    if !trouble.is_empty() {
        status.trouble = Some(trouble.join("; "));
    }
    status
}

fn ring_node(node: &RingPlace) -> RingNode {
    RingNode { id: hex_key(node), addr: node.peer.addr.to_string(), peer_id: hex(&node.peer.id.0) }
}

/// A ring position: its hash, when it is one, else all of it.
fn hex_key(node: &RingPlace) -> String {
    let key = node.id.key();
    key.as_hash().map_or_else(|| hex(&key.0), |hash| hex(&hash))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    data_encoding::HEXLOWER.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_blocks_say_what_to_do() {
        let volume = VolumeStatus {
            name: "docs".into(),
            source: Some("/srv/docs".into()),
            lost_blocks: 3,
            ..VolumeStatus::default()
        };
        let warnings = volume_warnings(&volume, 0, 1);
        let expected = "3 blocks of volume docs were on no node that answered at the last renewal: \
                        if no node is missing, publish /srv/docs again";
        assert_eq!(warnings, [expected]);
    }

    #[test]
    fn a_volume_about_to_expire_is_told() {
        let day = 24 * 3600;
        let volume = VolumeStatus {
            name: "docs".into(),
            root_version: 1,
            lease_expires_unix_secs: 130 * day,
            ..VolumeStatus::default()
        };
        assert!(volume_warnings(&volume, 110 * day, 30 * day).is_empty());
        let late = volume_warnings(&volume, 128 * day, 30 * day);
        assert!(late[0].contains("48 hours"), "{late:?}");
    }
}
