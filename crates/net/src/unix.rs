//! The same calls over a Unix socket, between commands and the local node.
//!
//! Frames are those of TCP, without TLS and without a proof: the socket's mode (0600) and
//! the credentials the kernel reports let in only the same user and root. CFS §6.3 has
//! its clients talk to their local server in the same way. A client connects when it
//! must, and again when the node has restarted; a mount asks it to wait for that.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use atoll_key::PeerId;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::mux::{self, Mux, MuxError};
use crate::stats::{NetStats, RefusalReason, bump};
use crate::{CallError, Peer, Reply, Request, Service};

/// The caller that a service on a Unix socket sees: a process of the same user.
pub const LOCAL_CALLER: Peer = Peer {
    id: PeerId([0; 32]),
    addr: std::net::SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0),
};

/// Why a Unix socket could not be served.
#[derive(Debug, thiserror::Error)]
pub enum UnixServeError {
    /// Another process answers on this socket.
    #[error("another process already listens on {}", .0.display())]
    InUse(PathBuf),
    /// Something that is not a socket is in the way; it is left alone.
    #[error("{} exists and is not a socket", .0.display())]
    NotASocket(PathBuf),
    /// The path is longer than the system allows for sockets.
    #[error("the socket's path is longer than the {limit} bytes the system allows: {}", .path.display())]
    PathTooLong {
        /// The path asked for.
        path: PathBuf,
        /// The most bytes a socket's path may have here.
        limit: usize,
    },
    /// The system refused.
    #[error("cannot listen on {}: {source}", .path.display())]
    Io {
        /// The path asked for.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// What a call does when no server answers on the socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WhenAbsent {
    /// Returns [`CallError::Unreachable`] at once.
    Fail,
    /// Waits for the server to come back: until the call's deadline, but no longer than this
    /// from when the server was first missed, by whichever call. So a server that stays away
    /// holds up the first calls and none after them. The request may reach the service twice
    /// when the server dies under it, so it must be idempotent.
    Wait(Duration),
}

/// The most bytes in a socket's path: `sun_path` of Linux, less its NUL.
const MAX_PATH_BYTES: usize = 107;
/// The most connections at once; each command and each mount makes one.
const MAX_CONNECTIONS: usize = 1024;
/// Pause between attempts to reach a server that is away.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Pause when the system cannot accept, such as for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long a shutdown lets calls that are being served finish: long enough for the
/// reply to the call that asked for it.
const GRACE: Duration = Duration::from_millis(500);

/// A service on a Unix socket. Dropping it stops serving and removes the socket file.
pub struct UnixServer {
    path: PathBuf,
    /// Device and inode of our socket file: another server's is not removed.
    file: (u64, u64),
    context: mux::Context,
    /// The task that accepts; none once it is shut down.
    accepting: std::sync::Mutex<Option<JoinSet<()>>>,
    /// Asks that task to let the connections go and to end.
    stop: watch::Sender<bool>,
}

/// Serves `service` on a socket at `path` (mode 0600) to processes of the same user and
/// root. A stale socket file is replaced. Must be called within a tokio runtime.
pub fn serve_unix(path: &Path, service: Arc<dyn Service>) -> Result<UnixServer, UnixServeError> {
    let (listener, file) = listen(path)?;
    let budget = Arc::new(mux::Budget::of_one_peer());
    let context = mux::Context { budget, ..mux::Context::default() };
    *context.service.write().expect("no holder panics") = Some(service);
    let (stop, stopped) = watch::channel(false);
    let mut accepting = JoinSet::new();
    accepting.spawn(accept(listener, context.clone(), stopped));
    let accepting = std::sync::Mutex::new(Some(accepting));
    Ok(UnixServer { path: path.to_owned(), file, context, accepting, stop })
}

/// Binds under another name, so that the socket has its mode before it has its path.
fn listen(path: &Path) -> Result<(UnixListener, (u64, u64)), UnixServeError> {
    let failed = |source| UnixServeError::Io { path: path.to_owned(), source };
    let mut unnamed = path.as_os_str().to_owned();
    unnamed.push(".new");
    let unnamed = PathBuf::from(unnamed);
    if unnamed.as_os_str().len() > MAX_PATH_BYTES {
        let limit = MAX_PATH_BYTES - ".new".len();
        return Err(UnixServeError::PathTooLong { path: path.to_owned(), limit });
    }
    match fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(UnixServeError::NotASocket(path.to_owned()));
        }
        Ok(_) => match StdUnixStream::connect(path) {
            // Only a refused connection says that no process listens.
            Err(error)
                if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) => {}
            Err(error) => return Err(failed(error)),
            Ok(_) => return Err(UnixServeError::InUse(path.to_owned())),
        },
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    match fs::remove_file(&unnamed) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let listener = UnixListener::bind(&unnamed).map_err(failed)?;
    fs::set_permissions(&unnamed, fs::Permissions::from_mode(0o600)).map_err(failed)?;
    let meta = fs::symlink_metadata(&unnamed).map_err(failed)?;
    fs::rename(&unnamed, path).map_err(failed)?;
    Ok((listener, (meta.dev(), meta.ino())))
}

/// Accepts until it is asked to stop, or aborted; the connections' tasks end with it.
async fn accept(listener: UnixListener, context: mux::Context, mut stop: watch::Receiver<bool>) {
    let mut tasks = JoinSet::new();
    let mut open: Vec<Mux> = Vec::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!("cannot accept a local connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        while tasks.try_join_next().is_some() {}
        open.retain(Mux::is_open);
        if tasks.len() >= MAX_CONNECTIONS {
            context.counters.refused(RefusalReason::TooManyHandshakes);
            continue;
        }
        if !may_call(&stream) {
            context.counters.refused(RefusalReason::WrongUser);
            tracing::warn!("refused a local connection of another user");
            continue;
        }
        bump(&context.counters.connections_accepted);
        let (mux, driver) = Mux::new(stream, LOCAL_CALLER, context.clone());
        open.push(mux);
        tasks.spawn(driver);
    }
    drop(listener);
    open.iter().for_each(Mux::go_away);
    let gone = async { while tasks.join_next().await.is_some() {} };
    // Calls that are not over by then are cut off.
    let _ = tokio::time::timeout(GRACE, gone).await;
    tasks.shutdown().await;
}

/// Whether the process at the other end runs as this user, or as root.
fn may_call(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
}

impl UnixServer {
    /// The counters, for `status`.
    pub fn stats(&self) -> NetStats {
        self.context.counters.snapshot()
    }

    /// Stops listening, removes the socket file, lets calls that are being served finish
    /// for half a second, closes the connections and waits for their tasks to end.
    pub async fn shutdown(&self) {
        if let Some(mut accepting) = self.unlink() {
            self.stop.send_replace(true);
            while accepting.join_next().await.is_some() {}
        }
    }

    /// Removes the socket file; returns the accepting task the first time.
    fn unlink(&self) -> Option<JoinSet<()>> {
        let accepting = self.accepting.lock().expect("no holder panics").take()?;
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|meta| (meta.dev(), meta.ino()) == self.file);
        if ours {
            // If it cannot be removed, it is stale and will be replaced.
            let _ = fs::remove_file(&self.path);
        }
        Some(accepting)
    }
}

impl Drop for UnixServer {
    fn drop(&mut self) {
        // Dropping the set aborts its task, and with it the connections'.
        drop(self.unlink());
    }
}

/// Calls the server on a Unix socket over one connection, made when first needed and
/// again after the server's restart.
pub struct UnixClient {
    path: PathBuf,
    context: mux::Context,
    /// The connection, and the task that drives it. Held while connecting, so that
    /// callers share one attempt.
    connection: Mutex<Option<(Mux, JoinSet<()>)>>,
    /// When a call first found no server, if none was answered since.
    missed_since: std::sync::Mutex<Option<Instant>>,
}

impl UnixClient {
    /// A client of the socket at `path`. Nothing is connected yet. Calls must be made
    /// within a tokio runtime.
    pub fn new(path: &Path) -> UnixClient {
        UnixClient {
            path: path.to_owned(),
            context: mux::Context::default(),
            connection: Mutex::new(None),
            missed_since: std::sync::Mutex::default(),
        }
    }

    /// The same, but a server that answers no ping for as long as this counts as gone: one
    /// that is stopped or hangs keeps its socket and says nothing.
    #[must_use]
    pub fn gone_when_silent_for(mut self, limit: Duration) -> UnixClient {
        let keepalive = &mut self.context.keepalive;
        keepalive.tick = limit / 8;
        keepalive.idle_ping = limit / 2;
        keepalive.dead_after = limit / 2;
        self
    }

    /// Calls the server and waits for its reply, at most until `limit` has passed.
    /// Dropping the future gives the call up.
    pub async fn call(
        &self,
        request: Request,
        limit: Duration,
        when_absent: WhenAbsent,
    ) -> Result<Reply, CallError> {
        let deadline = Instant::now() + limit;
        let result = self.call_until(request, deadline, when_absent).await;
        self.context.counters.called(&result);
        result
    }

    async fn call_until(
        &self,
        request: Request,
        deadline: Instant,
        when_absent: WhenAbsent,
    ) -> Result<Reply, CallError> {
        let mut stale = true;
        loop {
            let (error, connects) = match tokio::time::timeout_at(deadline, self.connected()).await
            {
                Err(_) => return Err(CallError::TimedOut),
                Ok(Ok(mux)) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    let result = mux.call(request.clone(), left).await;
                    let again = match &result {
                        Err(MuxError::NotSent(_)) => std::mem::take(&mut stale),
                        _ => false,
                    };
                    match result.map_err(CallError::from) {
                        // It closed just now, and nothing was sent.
                        Err(CallError::Unreachable(_)) if again => continue,
                        Err(error @ CallError::Unreachable(_)) => (error, true),
                        result @ Err(CallError::TimedOut) => return result,
                        result => {
                            *self.missed_since() = None;
                            return result;
                        }
                    }
                }
                Ok(Err(error)) => {
                    let path = self.path.display();
                    (CallError::Unreachable(format!("nobody answers on {path}: {error}")), false)
                }
            };
            let WhenAbsent::Wait(patience) = when_absent else { return Err(error) };
            let now = Instant::now();
            let missed_since = *self.missed_since().get_or_insert(now);
            if now + RETRY_PAUSE >= deadline.min(missed_since + patience) {
                // One that can be connected to is there, and says nothing.
                return Err(if connects { CallError::TimedOut } else { error });
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    fn missed_since(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.missed_since.lock().expect("no holder of this lock panics")
    }

    async fn connected(&self) -> std::io::Result<Mux> {
        let mut connection = self.connection.lock().await;
        if let Some((mux, _)) = &*connection
            && mux.is_open()
        {
            return Ok(mux.clone());
        }
        let stream = UnixStream::connect(&self.path).await?;
        bump(&self.context.counters.connections_dialled);
        let (mux, driver) = Mux::new(stream, LOCAL_CALLER, self.context.clone());
        let mut task = JoinSet::new();
        task.spawn(driver);
        *connection = Some((mux.clone(), task));
        Ok(mux)
    }

    /// The counters.
    pub fn stats(&self) -> NetStats {
        self.context.counters.snapshot()
    }
}
