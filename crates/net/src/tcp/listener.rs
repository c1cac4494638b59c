//! Accepts connections, authenticates them, and counts and logs those it refuses.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::Instant;

use super::Inner;
use crate::RefusalReason;

/// Pause when the system cannot accept, such as for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// At most one refusal is logged in this time, so that a stranger cannot fill the disk.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// Accepts until it is aborted.
pub async fn listen(inner: Arc<Inner>, listener: TcpListener) {
    loop {
        let (tcp, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(slot) = inner.handshakes.clone().try_acquire_owned() else {
            inner.refuse(from, RefusalReason::TooManyHandshakes);
            continue;
        };
        let task = inner.clone();
        inner.spawn(async move {
            let accepted = task.identity.accept(tcp, from).await;
            drop(slot);
            match accepted {
                Ok((stream, peer)) => drop(task.connected(stream, peer, false)),
                Err(reason) => task.refuse(from, reason),
            }
        });
    }
}

impl Inner {
    fn refuse(&self, from: SocketAddr, reason: RefusalReason) {
        self.counters().refused(reason);
        if let Some(unlogged) = self.refusal_log.admit(Instant::now()) {
            tracing::warn!(%from, unlogged, "refused a connection: {reason}");
        }
    }
}

/// Lets one refusal in a while be logged.
#[derive(Default)]
pub struct RefusalLog {
    /// When one was logged last, and how many were not since then.
    last: Mutex<(Option<Instant>, u64)>,
}

impl RefusalLog {
    /// Whether to log now; if so, how many were passed over before.
    fn admit(&self, now: Instant) -> Option<u64> {
        let mut last = self.last.lock().expect("no holder panics");
        if last.0.is_some_and(|at| now.saturating_duration_since(at) < LOG_EVERY) {
            last.1 += 1;
            return None;
        }
        let unlogged = last.1;
        *last = (Some(now), 0);
        Some(unlogged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_of_refusals_is_logged_once_and_counted() {
        let log = RefusalLog::default();
        let now = Instant::now();
        assert_eq!(log.admit(now), Some(0));
        for _ in 0..5 {
            assert_eq!(log.admit(now + LOG_EVERY / 2), None);
        }
        assert_eq!(log.admit(now + LOG_EVERY), Some(5));
        assert_eq!(log.admit(now + 2 * LOG_EVERY), Some(0));
    }
}
