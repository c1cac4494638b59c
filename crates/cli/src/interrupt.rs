//! Ctrl-C and SIGTERM: stop cleanly the first time, at once the second.

use std::future::Future;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::failure::{Exit, Failure};
use crate::messages;

/// SIGINT and SIGTERM, for callers that treat the second signal differently from the first.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Listens for signals from now on.
    pub(crate) fn new() -> Signals {
        let listen = |kind| signal(kind).expect("the runtime has signals on");
        Signals {
            interrupt: listen(SignalKind::interrupt()),
            terminate: listen(SignalKind::terminate()),
        }
    }

    /// Resolves at the next signal. Cancel-safe.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    /// Lets the next signal end the process at once.
    pub(crate) fn exit_at_next(mut self) {
        tokio::spawn(async move {
            self.next().await;
            messages::finish();
            std::process::exit(Exit::Interrupted as i32);
        });
    }
}

/// Resolves at the first SIGINT or SIGTERM; a second one ends the process.
pub(crate) async fn requested() {
    let mut signals = Signals::new();
    signals.next().await;
    signals.exit_at_next();
}

/// Does `work` unless a signal comes first; then drops it and fails with `advice`.
pub(crate) async fn or_interrupted<T>(
    work: impl Future<Output = Result<T, Failure>>,
    advice: &str,
) -> Result<T, Failure> {
    tokio::select! {
        done = work => done,
        () = requested() => Err(Failure::new(Exit::Interrupted, "interrupted").advice(advice)),
    }
}
