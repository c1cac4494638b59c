//! Accepts connections, authenticates them, and counts and logs those it refuses.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Inner;
use super::handshake::Refused;
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
        let place = inner.handshakes.take(from.ip());
        let Some((place, crowded_out)) = place else {
            inner.refuse(from, &RefusalReason::TooManyHandshakes.into());
            continue;
        };
        let task = inner.clone();
        inner.spawn(async move {
            let accepted = tokio::select! {
                accepted = task.identity.accept(tcp, from) => accepted,
                // The sender is never used, only dropped.
                _ = crowded_out => Err(RefusalReason::TooManyHandshakes.into()),
            };
            drop(place);
            match accepted {
                Ok((stream, peer)) => drop(task.connected(stream, peer, None)),
                Err(refused) => task.refuse(from, &refused),
            }
        });
    }
}

/// The places for connections that have not proven the secret yet.
///
/// When all are taken, the origin with the most gives its oldest up to a newcomer whose
/// origin would still have no more than it: one stranger cannot keep all others out.
#[derive(Clone)]
pub struct Handshakes {
    max: usize,
    taken: Arc<Mutex<Taken>>,
}

#[derive(Default)]
struct Taken {
    serial: u64,
    /// By age. Who holds a place ends when its sender is dropped.
    places: BTreeMap<u64, (IpAddr, oneshot::Sender<()>)>,
}

/// A place taken, until it is dropped.
pub struct Place {
    serial: u64,
    taken: Arc<Mutex<Taken>>,
}

impl Handshakes {
    pub fn new(max: usize) -> Handshakes {
        Handshakes { max: max.max(1), taken: Arc::default() }
    }

    /// A place, and what resolves when it must be given up.
    fn take(&self, from: IpAddr) -> Option<(Place, oneshot::Receiver<()>)> {
        let origin = origin(from);
        let mut taken = self.taken.lock().expect("no holder panics");
        if taken.places.len() >= self.max {
            let of = |ip: IpAddr| taken.places.values().filter(|(other, _)| *other == ip).count();
            // Of the most crowded origins' places the oldest: `max_by_key` takes the last.
            let by_age = taken.places.iter().rev();
            let (serial, (crowded, _)) = by_age.max_by_key(|(_, (ip, _))| of(*ip))?;
            if of(*crowded) <= of(origin) + 1 {
                return None;
            }
            let serial = *serial;
            taken.places.remove(&serial);
        }
        let (hold, given_up) = oneshot::channel();
        taken.serial += 1;
        let serial = taken.serial;
        taken.places.insert(serial, (origin, hold));
        Some((Place { serial, taken: self.taken.clone() }, given_up))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.taken.lock().expect("no holder panics").places.remove(&self.serial);
    }
}

/// What one machine may choose freely counts as one: an IPv6 network of 64 bits.
fn origin(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from(u128::from(ip) >> 64 << 64).into(),
        ip => ip,
    }
}

impl Inner {
    fn refuse(&self, from: SocketAddr, refused: &Refused) {
        let Refused { reason, detail } = refused;
        self.counters().refused(*reason);
        if let Some(unlogged) = self.refusal_log.admit(Instant::now()) {
            let detail = detail.as_ref().map(|detail| format!(" ({detail})")).unwrap_or_default();
            tracing::warn!(%from, unlogged, "refused a connection: {reason}{detail}");
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
    fn the_most_crowded_origin_makes_way_and_nobody_else_does() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        let handshakes = Handshakes::new(4);
        let mut crowd: Vec<_> =
            (1..=4).map(|_| handshakes.take(ip("2001:db8::1")).expect("free")).collect();
        assert!(handshakes.take(ip("2001:db8::ffff")).is_none(), "it is the crowd's own");
        let other = handshakes.take(ip("::ffff:192.0.2.1")).expect("the crowd makes way");
        let ended = |receiver: &mut oneshot::Receiver<()>| {
            receiver.try_recv() == Err(oneshot::error::TryRecvError::Closed)
        };
        let states: Vec<bool> = crowd.iter_mut().map(|(_, receiver)| ended(receiver)).collect();
        assert_eq!(states, [true, false, false, false], "the oldest");
        let second = handshakes.take(ip("192.0.2.1")).expect("three to two");
        assert!(handshakes.take(ip("192.0.2.1")).is_none(), "two to two");
        drop((crowd, other, second));
        assert!(handshakes.taken.lock().expect("lock").places.is_empty());
    }

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
