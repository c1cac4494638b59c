//! The daemon as a whole: its status, its settings, and the request to stop.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use atoll_env::{Env, Instant};
use atoll_key::IdProfile;
use atoll_net::{TcpTransport, Transport};
use atoll_store::{BlockStore, ContributedStore};
use tokio::sync::watch;

use crate::config::VirtualServers;
use crate::control::body::Json;
use crate::control::calls::{NodeStatus, Ping, SetSettings, ShowSettings, Shutdown};
use crate::control::message::{ChangeSettings, Empty};
use crate::control::server::Calls;
use crate::dir::NodeDir;
use crate::health;
use crate::memory;
use crate::network::Network;
use crate::settings::SettingsStore;
use crate::status::{NodeSettings, Status, hex};
use crate::subsystem::Subsystem;

/// The process that runs the node's subsystems.
pub(crate) struct Daemon {
    pub env: Env,
    pub started: Instant,
    pub dir: NodeDir,
    pub network: Network,
    pub listen: SocketAddr,
    pub transport: Arc<TcpTransport>,
    pub settings: Arc<SettingsStore>,
    pub store: Arc<ContributedStore>,
    pub subsystems: Vec<Arc<dyn Subsystem>>,
    /// Set when a client asks the node to stop.
    pub stop: watch::Sender<bool>,
}

impl Daemon {
    /// All control calls: those of the subsystems and its own.
    pub(crate) fn calls(self: &Arc<Self>) -> Calls {
        let mut calls = Calls::default();
        for subsystem in &self.subsystems {
            subsystem.clone().control_calls(&mut calls);
        }
        calls.on::<Ping>(|Empty {}| Box::pin(async { Ok(Ok(Empty {})) }));
        let stop = self.stop.clone();
        calls.on::<Shutdown>(move |Empty {}| {
            stop.send_replace(true);
            Box::pin(async { Ok(Ok(Empty {})) })
        });
        let daemon = self.clone();
        calls.on_blocking::<NodeStatus>(move |Empty {}| Ok(Json(daemon.status())));
        let daemon = self.clone();
        calls.on_blocking::<ShowSettings>(move |Empty {}| Ok(Json(daemon.node_settings())));
        let daemon = self.clone();
        calls.on_blocking::<SetSettings>(move |change| {
            daemon.change_settings(change)?;
            Ok(Json(daemon.node_settings()))
        });
        calls.complete()
    }

    /// The node's state. Reads some small files and changes nothing.
    pub(crate) fn status(&self) -> Status {
        let net = self.transport.stats();
        let local = self.transport.local();
        let refused = net.refusals.iter().map(|(why, count)| (why.name().to_owned(), *count));
        let overloaded =
            (net.calls_overloaded > 0).then(|| ("overloaded".to_owned(), net.calls_overloaded));
        let mut status = Status {
            version: env!("CARGO_PKG_VERSION").into(),
            dir: self.dir.root().display().to_string(),
            process: std::process::id(),
            peer_id: hex(&local.id.0),
            listen: self.listen.to_string(),
            advertise: local.addr.to_string(),
            network_id: self.network.id().to_string(),
            uptime_secs: self.env.now().since(self.started).as_secs(),
            refusals: refused.chain(overloaded).collect::<BTreeMap<_, _>>(),
            connections: net.connections,
            received_bytes: net.bytes_in,
            sent_bytes: net.bytes_out,
            resident_bytes: memory::resident_bytes(),
            ..Status::default()
        };
        self.subsystems.iter().for_each(|subsystem| subsystem.report(&mut status));
        health::judge(&mut status);
        status
    }

    fn change_settings(&self, change: ChangeSettings) -> Result<(), String> {
        self.settings.change(|settings| {
            if let Some(count) = change.virtual_servers {
                settings.set_virtual_servers(match count {
                    0 => VirtualServers::Auto,
                    count => VirtualServers::Count(count),
                })?;
            }
            change.cache_bytes.map_or(Ok(()), |bytes| settings.set_cache_bytes(bytes))
        })
    }

    fn node_settings(&self) -> NodeSettings {
        let settings = self.settings.present();
        let virtual_servers = settings.virtual_servers();
        let storage_bytes = self.store.usage().capacity_bytes;
        NodeSettings {
            virtual_servers: virtual_servers.to_string(),
            positions: virtual_servers.count(storage_bytes),
            cache_bytes: settings.cache_bytes(),
            storage_bytes,
            node_ids: match self.network.profile {
                IdProfile::Address => "address".into(),
                IdProfile::Identity => "identity".into(),
            },
            replicas: self.network.replicas,
        }
    }
}
