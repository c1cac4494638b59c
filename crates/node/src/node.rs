//! The daemon put together.
//!
//! [`Node::start`] opens the directory, then builds from the bottom up: transport, Chord,
//! block store, DHT; enters the ring; starts the renewer; and at last opens the control
//! socket, so that whoever can connect finds a whole node. [`Node::stop`] goes the other way.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Dht, DhtConfig};
use atoll_env::{BoxFuture, Env, Runtime, TokioRuntime, sleep, timeout};
use atoll_key::SecretKey;
use atoll_net::{
    NetworkAuth, Peer, Router, TcpConfig, TcpTransport, Transport, UnixServer, Versions, serve_unix,
};
use atoll_overlay::Overlay;
use atoll_overlay::chord::{self, Chord, ChordConfig, RememberedPeer};
use atoll_overlay::clock::network_time;
use atoll_overlay::walk::Selection;
use atoll_store::{BlockStore, ContributedStore, DiskStore, FlagCheck};
use tokio::sync::watch;

use crate::address::{self, AddressWatch};
use crate::blocks::disk_watch;
use crate::blocks::durable::DirState;
use crate::config::{NodeConfig, StartError};
use crate::contribution::{self, ContributionController, Opened as Storage};
use crate::control::server::{About, Control};
use crate::daemon::Report;
use crate::dir::{DirLock, NodeDir, SocketAddress};
use crate::membership::{self, Membership, MembershipService};
use crate::open::{Opened, open};
use crate::process::Signals;
use crate::ring::clock;
use crate::ring::join::{Bootstrap, JoinableRing, Place, RingJoin};
use crate::ring::warm_up;
use crate::scope::Scope;
use crate::settings::{Settings, SettingsStore};
use crate::status::Status;
use crate::volumes::Volumes;
use crate::volumes::lease_renewer::LeaseRenewer;

/// How long leaving the ring may take when stopping.
const LEAVE_LIMIT: Duration = Duration::from_secs(5);
/// How long the tasks may take to end when stopping.
const END_LIMIT: Duration = Duration::from_secs(5);

/// A running node. Dropping it stops it where it stands, as a crash would;
/// [`Node::stop`] takes leave.
pub struct Node {
    is_founder: bool,
    chord: Arc<Chord>,
    join: Arc<RingJoin>,
    settings: Arc<SettingsStore>,
    membership: Arc<Membership>,
    report: Arc<Report>,
    control: UnixServer,
    stop_asked: watch::Receiver<bool>,
    store: Arc<ContributedStore>,
    pointers: Arc<DiskStore>,
    works: Works,
    dir: NodeDir,
    /// Keeps the socket's path valid where it goes through a handle.
    _socket: SocketAddress,
    _lock: DirLock,
}

/// What runs of a node. Stops when dropped, also when a start fails half-way.
struct Works {
    scope: Arc<Scope>,
    transport: Arc<TcpTransport>,
}

impl Works {
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

impl Drop for Works {
    fn drop(&mut self) {
        self.end();
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
        let opened = tokio::task::spawn_blocking(move || open(&config))
            .await
            .map_err(|error| StartError::Config(error.to_string()))??;
        let Opened { dir, lock, identity, network, settings, remembered, is_founder } = opened;
        let scope = Arc::new(Scope::new(Arc::new(TokioRuntime::current())));
        let env: Env = scope.clone();
        let started = env.now();
        let settings = Arc::new(settings);
        let present = settings.present();
        let Storage { store, rebuilt_index } = open_store(&dir, &present, flag).await?;
        let offered_bytes = store.usage().capacity_bytes;
        let durable = open_durable(&dir).await?;
        let pointers = durable.pointer_log();
        let volumes = Arc::new(Volumes::open(&dir)?);
        let attestor = Arc::new(SecretKey::from_seed(&identity.seed()));
        let membership = Membership::open(env.clone(), &dir, identity.peer_id(), network.network);
        let membership = Arc::new(membership?);
        let (transport, listen) =
            listen(identity, membership.clone(), protocol.versions, &present).await?;
        let works = Works { scope, transport: transport.clone() };
        let remember_port = |settings: &mut Settings| {
            settings.set_listen(listen);
            Ok(())
        };
        settings.change(remember_port).map_err(StartError::Config)?;

        let chord_config = ChordConfig {
            profile: membership.network().profile,
            virtual_servers: present.virtual_servers().count(offered_bytes),
            selection: Selection::Cost,
            bootstrap: network.bootstrap.as_slice().to_vec(),
            remembered: remembered.0.clone(),
            ..ChordConfig::default()
        };
        let chord = Chord::new(env.clone(), transport.clone(), chord_config);
        let network_now = membership.network();
        let replicas = network_now.replicas as usize;
        let dht_config = DhtConfig {
            replicas,
            lease,
            quota: present.quota(),
            cache_bytes: present.cache_bytes(),
            ..DhtConfig::default()
        };
        let dht = Dht::new(
            env.clone(),
            transport.clone(),
            chord.clone(),
            store.clone(),
            attestor,
            Arc::new(durable),
            dht_config,
        );
        let router = Router::new()
            .route(chord::messages::FAMILY, chord.clone())
            .route((atoll_dht::rpc::LOOKUP_STEP >> 8) as u8, dht.clone())
            .route(membership::FAMILY, Arc::new(MembershipService(membership.clone())))
            .without(protocol.lacks);
        transport.serve(Arc::new(router));
        if rebuilt_index || pointers.report().rebuilt_index {
            // Renewals since the blocks came are forgotten: publishers get time for new ones.
            let blocks = dht.extend_leases().await.map_err(|e| StartError::Store(e.to_string()))?;
            tracing::warn!(blocks, "the store's index was made anew; all leases begin again");
        }
        dht.start();

        let join = Arc::new(RingJoin::new(
            env.clone(),
            Arc::new(chord.clone()),
            dir.clone(),
            transport.local(),
            settings.clone(),
            remembered,
            Bootstrap { peers: network.bootstrap, is_new_code: has_code },
        ));
        // A node that was away is given the present secret while it enters.
        env.spawn(Box::pin(membership.clone().run(transport.clone())));
        join.begin(join_patience).await;
        env.spawn(Box::pin(join.clone().run()));
        env.spawn(Box::pin(disk_watch::run(env.clone(), dht.clone(), join.clone(), chord.clone())));
        env.spawn(Box::pin(warm_up::run(env.clone(), transport.clone(), chord.clone())));

        env.spawn(Box::pin(clock::watch(env.clone(), chord.clone())));

        // Leases end by the network's time.
        let time = network_time(env.clone(), chord.clone());
        let renewer =
            Arc::new(LeaseRenewer::new(time.clone(), dht.clone(), volumes.clone(), lease));
        env.spawn(Box::pin(renewer.clone().run()));

        let contributor = Arc::new(ContributionController {
            env: env.clone(),
            dir: dir.clone(),
            flag,
            settings: settings.clone(),
            store: store.clone(),
            overlay: chord.clone(),
            dht: dht.clone(),
            replicas: network_now.replicas,
            state: contribution::State::default(),
        });
        env.spawn(Box::pin(contributor.clone().run()));

        let report = Arc::new(Report {
            dir: dir.clone(),
            env: time.clone(),
            started,
            network: network_now,
            membership: membership.clone(),
            listen,
            lease,
            transport,
            overlay: chord.clone(),
            join: join.clone(),
            settings: settings.clone(),
            store: store.clone(),
            contributor,
            dht: dht.clone(),
            volumes: volumes.clone(),
            chord: chord.clone(),
        });
        let (stop, stop_asked) = watch::channel(false);
        let control =
            Control { env: time, blocks: dht, volumes, about: report.clone(), renewer, stop };
        let socket = dir.socket_address()?;
        let control = serve_unix(socket.path(), Arc::new(control))
            .map_err(|error| StartError::Socket(error.to_string()))?;
        Ok(Node {
            is_founder,
            chord,
            join,
            settings,
            membership,
            report,
            control,
            stop_asked,
            store,
            pointers,
            works,
            dir,
            _socket: socket,
            _lock: lock,
        })
    }

    /// The node's directory.
    pub fn dir(&self) -> &Path {
        self.dir.root()
    }

    /// Its peer address: public key and advertised address.
    pub fn local(&self) -> Peer {
        self.works.transport.local()
    }

    /// Where it accepts connections.
    pub fn listen(&self) -> SocketAddr {
        self.report.listen
    }

    /// Whether this start made the network (no join code, an empty directory).
    pub fn is_founder(&self) -> bool {
        self.is_founder
    }

    /// Its state. Reads some small files.
    pub fn status(&self) -> Status {
        self.report.status()
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
        let advertise = self.settings.present().advertise();
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
        let env = TokioRuntime::current();
        self.control.shutdown().await;
        self.join.leave();
        if timeout(&env, LEAVE_LIMIT, self.chord.leave()).await.is_err() {
            tracing::warn!("the neighbours did not hear our leaving in time; they will notice");
        }
        let (join, membership) = (self.join.clone(), self.membership.clone());
        let remember = move || {
            join.remember();
            membership.save_all();
        };
        let _ = tokio::task::spawn_blocking(remember).await;
        if let Err(error) = self.store.flush().await {
            tracing::error!("the store could not be flushed: {error}");
        }
        if let Err(error) = self.pointers.flush().await {
            tracing::error!("the pointers could not be flushed: {error}");
        }
        self.let_go().await;
    }

    /// Stops where it stands, as a crash would, but returns only when the directory and
    /// the sockets are free again. For tests of what others make of a crash.
    pub async fn kill(self) {
        self.control.shutdown().await;
        self.let_go().await;
    }

    async fn let_go(self) {
        let env = TokioRuntime::current();
        let Node {
            chord, join, membership, report, control, store, pointers, works, _lock, ..
        } = self;
        works.stop(&env).await;
        drop((chord, join, membership, report, control, works));
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
        write!(f, "Node({:?}, {})", self.local(), self.dir.root().display())
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

async fn open_durable(dir: &NodeDir) -> Result<DirState, StartError> {
    let dir = dir.clone();
    tokio::task::spawn_blocking(move || DirState::open(&dir))
        .await
        .map_err(|error| StartError::Store(error.to_string()))?
}

/// The transport, and where it listens.
async fn listen(
    identity: SecretKey,
    membership: Arc<Membership>,
    versions: Versions,
    settings: &Settings,
) -> Result<(Arc<TcpTransport>, SocketAddr), StartError> {
    let profile = membership.network().profile_bytes();
    let auth = NetworkAuth { members: membership, versions, profile };
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

/// Opens the store, off the async threads: it may have a log to replay.
async fn open_store(
    dir: &NodeDir,
    settings: &Settings,
    flag: FlagCheck,
) -> Result<Storage, StartError> {
    let (dir, settings) = (dir.clone(), settings.clone());
    tokio::task::spawn_blocking(move || Storage::open(&dir, &settings, flag))
        .await
        .map_err(|error| StartError::Store(error.to_string()))?
}

impl JoinableRing for Arc<Chord> {
    fn create(&self) {
        Chord::create(self);
    }

    fn join(&self, peers: Vec<Peer>) -> BoxFuture<'static, Result<(), String>> {
        let chord = self.clone();
        Box::pin(async move { Chord::join(&chord, peers).await.map_err(|e| e.to_string()) })
    }

    fn place(&self) -> Place {
        let around = self.neighbourhood();
        let me = around.me.peer.id;
        match (around.joined, around.successors.iter().all(|node| node.peer.id == me)) {
            (false, _) => Place::Nowhere,
            (true, true) => Place::Alone,
            (true, false) => Place::Among,
        }
    }

    fn remembered(&self) -> Vec<RememberedPeer> {
        Chord::remembered(self)
    }

    fn epoch(&self) -> u64 {
        Overlay::epoch(&**self)
    }

    fn changed(&self, epoch: u64) -> BoxFuture<'static, u64> {
        Overlay::changed(&**self, epoch)
    }
}
