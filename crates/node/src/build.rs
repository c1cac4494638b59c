//! Building a node's subsystems from its directory and its configuration.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Dht, DhtConfig};
use atoll_env::Env;
use atoll_key::SecretKey;
use atoll_net::{NetworkAuth, TcpConfig, TcpTransport, Transport};
use atoll_overlay::chord::{Chord, ChordConfig};
use atoll_overlay::clock::network_time;
use atoll_overlay::walk::Selection;
use atoll_store::{BlockStore, ContributedStore, DiskStore, FlagCheck};

use crate::blocks::BlockLayer;
use crate::blocks::durable::DirState;
use crate::config::{Protocol, StartError};
use crate::contribution::{self, ContributionController, Opened as OpenedStore};
use crate::dir::NodeDir;
use crate::membership::{Membership, NetworkMembers};
use crate::network::StoredNetwork;
use crate::peers::PeerMemory;
use crate::ring::join::{Bootstrap, RingJoin};
use crate::ring::{self, Ring};
use crate::scope::Scope;
use crate::settings::{Settings, SettingsStore};
use crate::subsystem::{MakeSubsystem, NodeParts, Subsystem};
use crate::tree_walk::TreeWalk;
use crate::volumes::{PublishedVolumes, Volumes};

/// What the subsystems are built from.
pub(crate) struct Foundation {
    pub env: Env,
    pub dir: NodeDir,
    pub settings: Arc<SettingsStore>,
    pub store: Arc<ContributedStore>,
    /// An index was rebuilt: renewals since the blocks came are forgotten.
    rebuilt_index: bool,
    durable: Arc<DirState>,
    pub pointers: Arc<DiskStore>,
    volumes: Arc<Volumes>,
    pub membership: Arc<Membership>,
    pub transport: Arc<TcpTransport>,
    pub listen: SocketAddr,
    /// Signs the receipts of what this node publishes.
    attestor: Arc<SecretKey>,
    bootstrap: Bootstrap,
    remembered: PeerMemory,
    /// The address that others were told before this start.
    former_address: Option<SocketAddr>,
    pub lease: Duration,
    pub walk: Option<Arc<dyn TreeWalk>>,
    pub join_patience: Duration,
    pub flag: FlagCheck,
}

impl Foundation {
    /// Starts the transport and puts together what is on disk.
    pub(crate) async fn build(
        identity: SecretKey,
        network: StoredNetwork,
        disk: OnDisk,
        scope: &Arc<Scope>,
        config: StartConfig,
    ) -> Result<Foundation, StartError> {
        let OnDisk { dir, settings, opened, durable, volumes, remembered } = disk;
        let env: Env = scope.clone();
        let attestor = Arc::new(SecretKey::from_seed(&identity.seed()));
        let membership =
            Arc::new(Membership::open(env.clone(), &dir, identity.peer_id(), network.network)?);
        let (transport, listen) =
            listen(identity, membership.clone(), config.protocol, &settings.present()).await?;
        let former_address = settings.present().told_address();
        let remember_port = |settings: &mut Settings| {
            settings.set_listen(listen);
            Ok(())
        };
        settings.change(remember_port).map_err(StartError::Config)?;
        ring::remember_address(&settings, transport.local().addr);
        Ok(Foundation {
            env,
            dir,
            settings,
            store: opened.store,
            rebuilt_index: opened.rebuilt_index,
            pointers: durable.pointer_log(),
            durable: Arc::new(durable),
            volumes: Arc::new(volumes),
            membership,
            transport,
            listen,
            attestor,
            bootstrap: Bootstrap { peers: network.bootstrap, is_new_code: config.has_code },
            remembered,
            former_address,
            lease: config.lease,
            walk: config.walk,
            join_patience: config.join_patience,
            flag: config.flag,
        })
    }

    fn chord(&self) -> Arc<Chord> {
        let offered_bytes = self.store.usage().capacity_bytes;
        let config = ChordConfig {
            profile: self.membership.network().profile,
            virtual_servers: self.settings.present().virtual_servers().count(offered_bytes),
            selection: Selection::Cost,
            bootstrap: self.bootstrap.peers.as_slice().to_vec(),
            remembered: self.remembered.0.clone(),
            former_address: self.former_address,
            ..ChordConfig::default()
        };
        Chord::new(self.env.clone(), self.transport.clone(), config)
    }

    fn dht(&self, chord: &Arc<Chord>) -> Arc<Dht> {
        let settings = self.settings.present();
        let config = DhtConfig {
            replicas: self.membership.network().replicas as usize,
            lease: self.lease,
            quota: settings.quota(),
            cache_bytes: settings.cache_bytes(),
            ..DhtConfig::default()
        };
        Dht::new(
            self.env.clone(),
            self.transport.clone(),
            chord.clone(),
            self.store.clone(),
            self.attestor.clone(),
            self.durable.clone(),
            config,
        )
    }

    fn ring(self, chord: &Arc<Chord>) -> Arc<Ring> {
        let join = RingJoin::new(
            self.env.clone(),
            Arc::new(chord.clone()),
            self.dir,
            self.transport.local(),
            self.settings.clone(),
            self.remembered,
            self.bootstrap,
        );
        Arc::new(Ring {
            env: self.env,
            transport: self.transport,
            chord: chord.clone(),
            join: Arc::new(join),
            settings: self.settings,
            store: self.store,
            listen: self.listen,
            join_patience: self.join_patience,
        })
    }

    /// The node's subsystems, in the order in which they start, and its ring again. A node that was away is given
    /// the network's present secret while it joins, so the members come first; those made outside
    /// come last.
    pub(crate) fn subsystems(
        self,
        outside: &[MakeSubsystem],
    ) -> (Vec<Arc<dyn Subsystem>>, Arc<Ring>) {
        let chord = self.chord();
        let dht = self.dht(&chord);
        let members = NetworkMembers {
            env: self.env.clone(),
            membership: self.membership.clone(),
            transport: self.transport.clone(),
            overlay: chord.clone(),
            listen: self.listen,
        };
        let volumes = PublishedVolumes::new(
            network_time(self.env.clone(), chord.clone()),
            dht.clone(),
            self.volumes.clone(),
            self.lease,
            self.walk.clone(),
        );
        let parts = NodeParts {
            env: network_time(self.env.clone(), chord.clone()),
            dir: self.dir.root().to_owned(),
            transport: self.transport.clone(),
            blocks: dht.clone(),
        };
        let (env, dir, flag) = (self.env.clone(), self.dir.clone(), self.flag);
        let (settings, store) = (self.settings.clone(), self.store.clone());
        let (pointers, rebuilt_index) = (self.pointers.clone(), self.rebuilt_index);
        let replicas = self.membership.network().replicas;
        let ring = self.ring(&chord);
        let blocks = BlockLayer {
            env: network_time(env.clone(), chord.clone()),
            dht: dht.clone(),
            store: store.clone(),
            pointers,
            settings: settings.clone(),
            ring: ring.clone(),
            rebuilt_index,
        };
        let contribution = ContributionController {
            env,
            dir,
            flag,
            settings,
            store,
            overlay: chord,
            dht,
            ring: ring.clone(),
            replicas,
            state: contribution::State::default(),
        };
        let mut subsystems: Vec<Arc<dyn Subsystem>> = vec![
            Arc::new(members),
            Arc::new(blocks),
            ring.clone(),
            Arc::new(volumes),
            Arc::new(contribution),
        ];
        subsystems.extend(outside.iter().map(|make| make(parts.clone())));
        (subsystems, ring)
    }
}

/// What a start's configuration says that is not remembered.
#[derive(Clone)]
pub(crate) struct StartConfig {
    pub has_code: bool,
    pub lease: Duration,
    pub walk: Option<Arc<dyn TreeWalk>>,
    pub join_patience: Duration,
    pub flag: FlagCheck,
    pub protocol: Protocol,
}

/// What the directory holds, opened.
pub(crate) struct OnDisk {
    pub dir: NodeDir,
    pub settings: Arc<SettingsStore>,
    opened: OpenedStore,
    durable: DirState,
    volumes: Volumes,
    remembered: PeerMemory,
}

impl OnDisk {
    /// Opens the store and the small records. Waits for the disk: the store may have a log to
    /// replay.
    pub(crate) fn open(
        dir: NodeDir,
        settings: SettingsStore,
        remembered: PeerMemory,
        flag: FlagCheck,
    ) -> Result<OnDisk, StartError> {
        let opened = OpenedStore::open(&dir, &settings.present(), flag)?;
        let durable = DirState::open(&dir)?;
        let volumes = Volumes::open(&dir)?;
        Ok(OnDisk { settings: Arc::new(settings), opened, durable, volumes, remembered, dir })
    }
}

/// The transport, and where it listens.
async fn listen(
    identity: SecretKey,
    membership: Arc<Membership>,
    protocol: Protocol,
    settings: &Settings,
) -> Result<(Arc<TcpTransport>, SocketAddr), StartError> {
    let profile = membership.network().profile_bytes();
    let auth = NetworkAuth { members: membership, versions: protocol.versions, profile };
    let mut config = TcpConfig::new(identity, auth, settings.listen());
    config.advertise = settings.advertise();
    if config.advertise.is_some() && config.listen.port() == 0 {
        // The transport tells only the port of the address it advertises.
        config.listen.set_port(free_port(config.listen)?);
    }
    let listen = config.listen;
    let transport = TcpTransport::start(config).await.map_err(|error| match error {
        atoll_net::StartError::Listen { addr, source } => {
            StartError::Listen { addr, reason: source.to_string() }
        }
        error => StartError::Config(error.to_string()),
    })?;
    let port = if listen.port() == 0 { transport.local().addr.port() } else { listen.port() };
    Ok((transport, SocketAddr::new(listen.ip(), port)))
}

/// A port that is free now.
fn free_port(listen: SocketAddr) -> Result<u16, StartError> {
    TcpListener::bind(listen)
        .and_then(|listener| listener.local_addr())
        .map(|addr| addr.port())
        .map_err(|error| StartError::Listen { addr: listen, reason: error.to_string() })
}
