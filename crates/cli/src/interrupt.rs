//! Ctrl-C and SIGTERM: stop cleanly the first time, at once the second.

use std::future::Future;

use tokio::signal::unix::{SignalKind, signal};

use crate::failure::{Exit, Failure};

/// Resolves at the first SIGINT or SIGTERM; a second one ends the process.
pub async fn requested() {
    let mut interrupt = signal(SignalKind::interrupt()).expect("the runtime has signals on");
    let mut terminate = signal(SignalKind::terminate()).expect("the runtime has signals on");
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    tokio::spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        std::process::exit(Exit::Interrupted as i32);
    });
}

/// Does `work` unless a signal comes first; then drops it and fails with `advice`.
pub async fn or_interrupted<T>(
    work: impl Future<Output = Result<T, Failure>>,
    advice: &str,
) -> Result<T, Failure> {
    tokio::select! {
        done = work => done,
        () = requested() => Err(Failure::new(Exit::Interrupted, "interrupted").advice(advice)),
    }
}
