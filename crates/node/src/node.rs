//! The daemon put together.
//!
//! [`Node::start`] opens the directory and the store, then builds the list of subsystems from
//! the bottom up, serves peers, starts the subsystems one after the other, and at last opens the
//! control socket, so that a client that connects finds a whole node. [`Node::stop`] goes the
//! other way.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Runtime, TokioRuntime, sleep, timeout};
use atoll_net::{Peer, Router, TcpTransport, Transport, UnixServer, serve_unix};
use atoll_store::DiskStore;
use tokio::sync::watch;

use crate::address::{self, AddressWatch};
use crate::build::{Foundation, OnDisk, StartConfig};
use crate::config::{NodeConfig, Protocol, StartError};
use crate::daemon::Daemon;
use crate::dir::{DirLock, SocketAddress};
use crate::open::{Opened, open};
use crate::process::Signals;
use crate::ring::Ring;
use crate::scope::Scope;
use crate::status::Status;
use crate::subsystem::MakeSubsystem;

/// How long the tasks may take to end when stopping.
const END_LIMIT: Duration = Duration::from_secs(5);
/// How long the last users of the stores may take. A call that waits for a slow disk cannot be
/// cancelled, and a node that starts anew in this process cannot open a store that is in use. A
/// guess.
const STORE_LIMIT: Duration = Duration::from_secs(60);

/// A running node. Dropping it stops it where it stands, as a crash would;
/// [`Node::stop`] takes leave.
pub struct Node {
    is_founder: bool,
    daemon: Arc<Daemon>,
    control: UnixServer,
    stop_asked: watch::Receiver<bool>,
    pointers: Arc<DiskStore>,
    ring: Arc<Ring>,
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

impl Node {
    /// Starts a node; it runs until [`Node::stop`]. Must be called on a tokio runtime.
    ///
    /// Returns when the node has entered the ring, or after `config.join_patience`: it then
    /// goes on trying, and its status says so.
    pub async fn start(config: NodeConfig) -> Result<Node, StartError> {
        Node::start_with(config, &[]).await
    }

    /// As [`Node::start`], with subsystems that are made outside this crate: they start after the
    /// node's own, in this order, and stop before them.
    ///
    /// # Panics
    /// If two subsystems take the same method family or numbers of control calls.
    pub async fn start_with(
        config: NodeConfig,
        outside: &[MakeSubsystem],
    ) -> Result<Node, StartError> {
        let NodeConfig { lease, join_patience, flag, protocol, .. } = config;
        let has_code = config.join.is_some();
        let walk = config.walk.clone();
        let start = StartConfig { has_code, lease, walk, join_patience, flag, protocol };
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
        let (subsystems, ring) = foundation.subsystems(outside);
        daemon.subsystems = subsystems;
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
            ring,
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
                && watch.note_address(now)
            {
                return now;
            }
        }
    }

    /// Waits until another process of this node's key goes on in its place, as when the directory was
    /// copied, and returns where that listens. This node has left the ring then, and is to be stopped
    /// by [`Node::kill`]: its neighbours are the other's. Cancel-safe; one task waits at a time.
    pub async fn until_superseded(&self) -> SocketAddr {
        self.ring.superseded().await
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
    /// the sockets are free again. For a node that [was superseded](Node::until_superseded), and for
    /// tests of what others make of a crash.
    pub async fn kill(self) {
        self.control.shutdown().await;
        self.release().await;
    }

    async fn release(self) {
        let env = TokioRuntime::current();
        let Node { daemon, control, pointers, ring, running, _lock, .. } = self;
        let store = daemon.store.clone();
        running.stop(&env).await;
        drop((daemon, control, ring, running));
        // Calls that were being answered hold the store until they are dropped.
        let closing = async { (alone(&env, store).await, alone(&env, pointers).await) };
        match timeout(&env, STORE_LIMIT, closing).await {
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

/// Waits until `shared` has no other holder, and takes it.
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
    let mut families = BTreeSet::new();
    let mut router = Router::new();
    for subsystem in &daemon.subsystems {
        let Some((family, service)) = subsystem.clone().service() else { continue };
        assert!(families.insert(family), "family {family:#04x} has one service");
        router = router.route(family, service);
    }
    daemon.transport.serve(Arc::new(router.without(protocol.lacks)));
}
