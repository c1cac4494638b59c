//! The daemon put together.
//!
//! [`Node::start`] opens the directory and the store, then builds the list of subsystems from
//! the bottom up, serves peers, starts the subsystems one after the other, and at last opens the
//! control socket, so that a client that connects finds a whole node. [`Node::stop`] goes the
//! other way.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Dht, DhtConfig};
use atoll_env::{Env, Runtime, TokioRuntime, sleep, timeout};
use atoll_key::SecretKey;
use atoll_net::{
    NetworkAuth, Peer, Router, TcpConfig, TcpTransport, Transport, UnixServer, serve_unix,
};
use atoll_overlay::chord::{Chord, ChordConfig};
use atoll_overlay::clock::network_time;
use atoll_overlay::walk::Selection;
use atoll_store::{BlockStore, ContributedStore, DiskStore, FlagCheck};
use tokio::sync::watch;

use crate::address::{self, AddressWatch};
use crate::blocks::BlockLayer;
use crate::blocks::durable::DirState;
use crate::config::{NodeConfig, Protocol, StartError};
use crate::contribution::{self, ContributionController, Opened as OpenedStore};
use crate::daemon::Daemon;
use crate::dir::{DirLock, NodeDir, SocketAddress};
use crate::membership::{Membership, NetworkMembers};
use crate::network::StoredNetwork;
use crate::open::{Opened, open};
use crate::process::Signals;
use crate::ring::Ring;
use crate::ring::join::{Bootstrap, RingJoin};
use crate::ring::peers::PeerMemory;
use crate::scope::Scope;
use crate::settings::{Settings, SettingsStore};
use crate::status::Status;
use crate::subsystem::Subsystem;
use crate::volumes::{PublishedVolumes, Volumes};

/// How long the tasks may take to end when stopping.
const END_LIMIT: Duration = Duration::from_secs(5);

/// A running node. Dropping it stops it where it stands, as a crash would;
/// [`Node::stop`] takes leave.
pub struct Node {
    is_founder: bool,
    daemon: Arc<Daemon>,
    control: UnixServer,
    stop_asked: watch::Receiver<bool>,
    pointers: Arc<DiskStore>,
    running: Running,
    /// Keeps the socket's path valid where it goes through a handle.
    _socket: SocketAddress,
    _lock: DirLock,
}

/// The node's tasks and connections. They end when it is dropped, also when a start fails
/// half-way.
struct Running {
    scope: Arc<Scope>,
    transport: Arc<TcpTransport>,
}

impl Running {
    async fn stop(&self, env: &dyn Runtime) {
        self.transport.shutdown().await;
        self.end();
        if timeout(env, END_LIMIT, self.scope.all_ended()).await.is_err() {
            tracing::warn!("some tasks did not end in time");
        }
    }

    fn end(&self) {
        // The services hold the transport, and it them.
        self.transport.serve(Arc::new(Router::new()));
        self.scope.end();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

/// What the subsystems are built from.
struct Foundation {
    env: Env,
    dir: NodeDir,
    settings: Arc<SettingsStore>,
    store: Arc<ContributedStore>,
    /// An index was rebuilt: renewals since the blocks came are forgotten.
    rebuilt_index: bool,
    durable: Arc<DirState>,
    pointers: Arc<DiskStore>,
    volumes: Arc<Volumes>,
    membership: Arc<Membership>,
    transport: Arc<TcpTransport>,
    listen: SocketAddr,
    /// Signs the receipts of what this node publishes.
    attestor: Arc<SecretKey>,
    bootstrap: Bootstrap,
    remembered: PeerMemory,
    lease: Duration,
    join_patience: Duration,
    flag: FlagCheck,
}

impl Foundation {
    async fn build(
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
        let remember_port = |settings: &mut Settings| {
            settings.set_listen(listen);
            Ok(())
        };
        settings.change(remember_port).map_err(StartError::Config)?;
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
            lease: config.lease,
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

    /// The node's subsystems, in the order in which they start. A node that was away is given
    /// the network's present secret while it joins, so the members come first.
    fn subsystems(self) -> Vec<Arc<dyn Subsystem>> {
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
        );
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
        vec![Arc::new(members), Arc::new(blocks), ring, Arc::new(volumes), Arc::new(contribution)]
    }
}

/// What a start's configuration says that is not remembered.
#[derive(Clone, Copy)]
struct StartConfig {
    has_code: bool,
    lease: Duration,
    join_patience: Duration,
    flag: FlagCheck,
    protocol: Protocol,
}

/// What the directory holds, opened.
struct OnDisk {
    dir: NodeDir,
    settings: Arc<SettingsStore>,
    opened: OpenedStore,
    durable: DirState,
    volumes: Volumes,
    remembered: PeerMemory,
}

impl OnDisk {
    /// Opens the store and the small records. Waits for the disk: the store may have a log to
    /// replay.
    fn open(
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

impl Node {
    /// Starts a node; it runs until [`Node::stop`]. Must be called on a tokio runtime.
    ///
    /// Returns when the node has entered the ring, or after `config.join_patience`: it then
    /// goes on trying, and its status says so.
    pub async fn start(config: NodeConfig) -> Result<Node, StartError> {
        let NodeConfig { lease, join_patience, flag, protocol, .. } = config;
        let has_code = config.join.is_some();
        let start = StartConfig { has_code, lease, join_patience, flag, protocol };
        let Opened { dir, lock, identity, network, settings, remembered, is_founder } =
            on_disk_thread(move || open(&config)).await?;
        let scope = Arc::new(Scope::new(Arc::new(TokioRuntime::current())));
        let started = scope.now();
        let disk = on_disk_thread(move || OnDisk::open(dir, settings, remembered, flag)).await?;
        let foundation = Foundation::build(identity, network, disk, &scope, start).await?;
        let transport = foundation.transport.clone();
        let running = Running { scope, transport: transport.clone() };
        let pointers = foundation.pointers.clone();
        let (stop, stop_asked) = watch::channel(false);
        let mut daemon = Daemon {
            env: foundation.env.clone(),
            started,
            dir: foundation.dir.clone(),
            network: foundation.membership.network(),
            listen: foundation.listen,
            transport,
            settings: foundation.settings.clone(),
            store: foundation.store.clone(),
            subsystems: Vec::new(),
            stop,
        };
        daemon.subsystems = foundation.subsystems();
        let daemon = Arc::new(daemon);
        serve_peers(&daemon, protocol);
        for subsystem in &daemon.subsystems {
            subsystem.clone().start().await?;
        }
        let socket = daemon.dir.socket_address()?;
        let control = serve_unix(socket.path(), Arc::new(daemon.calls()))
            .map_err(|error| StartError::Socket(error.to_string()))?;
        Ok(Node {
            is_founder,
            daemon,
            control,
            stop_asked,
            pointers,
            running,
            _socket: socket,
            _lock: lock,
        })
    }

    /// The node's directory.
    pub fn dir(&self) -> &Path {
        self.daemon.dir.root()
    }

    /// Its peer address: public key and advertised address.
    pub fn local(&self) -> Peer {
        self.running.transport.local()
    }

    /// Where it accepts connections.
    pub fn listen(&self) -> SocketAddr {
        self.daemon.listen
    }

    /// Whether this start made the network (no join code, an empty directory).
    pub fn is_founder(&self) -> bool {
        self.is_founder
    }

    /// Its state. Reads some small files.
    pub fn status(&self) -> Status {
        self.daemon.status()
    }

    /// Waits until the node should stop: SIGINT, SIGTERM, or a client's request.
    /// Returns what it was, for people. After it a second signal ends the process at once.
    pub async fn until_told_to_stop(&self) -> &'static str {
        let mut signals = Signals::listen();
        let mut asked = self.stop_asked.clone();
        let why = tokio::select! {
            why = signals.next() => why,
            _ = asked.wait_for(|asked| *asked) => "a client asked for it",
        };
        tokio::spawn(async move {
            signals.next().await;
            std::process::exit(130);
        });
        why
    }

    /// Waits until this machine has another address than the one that others were told, and
    /// returns it; for ever where the user has said which to tell. A node started anew in
    /// this directory tells the new one. Cancel-safe.
    pub async fn until_moved(&self) -> IpAddr {
        let env = TokioRuntime::current();
        let mut watch = AddressWatch::new(self.local().addr.ip());
        let advertise = self.daemon.settings.present().advertise();
        loop {
            sleep(&env, address::LOOK_EVERY).await;
            if let Some(now) = address::found_now(self.listen(), advertise)
                && watch.has_moved(now)
            {
                return now;
            }
        }
    }

    /// Leaves the ring, finishes what is being written and closes the sockets.
    pub async fn stop(self) {
        self.control.shutdown().await;
        for subsystem in self.daemon.subsystems.iter().rev() {
            subsystem.clone().stop().await;
        }
        self.release().await;
    }

    /// Stops where it stands, as a crash would, but returns only when the directory and
    /// the sockets are free again. For tests of what others make of a crash.
    pub async fn kill(self) {
        self.control.shutdown().await;
        self.release().await;
    }

    async fn release(self) {
        let env = TokioRuntime::current();
        let Node { daemon, control, pointers, running, _lock, .. } = self;
        let store = daemon.store.clone();
        running.stop(&env).await;
        drop((daemon, control, running));
        // Calls that were being answered hold the store until they are dropped.
        let closing = async { (alone(&env, store).await, alone(&env, pointers).await) };
        match timeout(&env, END_LIMIT, closing).await {
            Ok(stores) => {
                let _ = tokio::task::spawn_blocking(move || drop(stores)).await;
            }
            Err(_) => tracing::warn!("the store is still in use"),
        }
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({:?}, {})", self.local(), self.dir().display())
    }
}

/// What nobody else holds any more.
async fn alone<T>(env: &TokioRuntime, mut shared: Arc<T>) -> T {
    loop {
        match Arc::try_unwrap(shared) {
            Ok(alone) => return alone,
            Err(held) => shared = held,
        }
        sleep(env, Duration::from_millis(5)).await;
    }
}

/// Runs `work` on a thread that may wait for the disk.
async fn on_disk_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StartError> + Send + 'static,
) -> Result<T, StartError> {
    let worked = tokio::task::spawn_blocking(work).await;
    worked.map_err(|error| StartError::Config(error.to_string()))?
}

/// Lets the subsystems answer peers.
fn serve_peers(daemon: &Daemon, protocol: Protocol) {
    let services = daemon.subsystems.iter().filter_map(|subsystem| subsystem.clone().service());
    let router =
        services.fold(Router::new(), |router, (family, service)| router.route(family, service));
    daemon.transport.serve(Arc::new(router.without(protocol.lacks)));
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
