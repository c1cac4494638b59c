//! What the daemon asks of its process: a tokio runtime, limits, signals.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The tokio runtime for a daemon: few threads, because each takes memory of its own
/// even when idle.
///
/// The process may then open as many files as the system lets it (connections, sockets and
/// segments together can exceed the usual 1,024), and leaves no core file when it crashes.
pub fn daemon_runtime(worker_threads: usize) -> std::io::Result<tokio::runtime::Runtime> {
    let files = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files }) {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
    // The memory holds the node's keys and the network's secret.
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    if let Err(error) = setrlimit(Resource::Core, none) {
        tracing::debug!(%error, "a crash may leave a core file");
    }
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(worker_threads)
        .max_blocking_threads(8)
        .thread_stack_size(1 << 20)
        .thread_name("atoll")
        .enable_all()
        .build()
}

/// SIGINT and SIGTERM.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    pub(crate) fn listen() -> Signals {
        let on = |kind| signal(kind).expect("these signals can be caught");
        Signals { interrupt: on(SignalKind::interrupt()), terminate: on(SignalKind::terminate()) }
    }

    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "interrupted",
            _ = self.terminate.recv() => "terminated",
        }
    }
}
