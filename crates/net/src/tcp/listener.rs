//! Accepts connections, authenticates them, and counts and logs those it refuses.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Inner;
use super::handshake::{HANDSHAKE_LIMIT, Refused, Stream};
use super::recent::Recent;
use crate::{Peer, RefusalReason};

/// Pause when the system cannot accept, such as for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// So many places of an origin at which a member has proven itself before do not count when
/// the table is full: some nodes behind one address, or one that dials again. A guess.
const FAVOURED_PLACES: usize = 8;
/// At most one refusal is logged in this time, so that a stranger cannot fill the disk.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// Accepts until it is aborted.
pub(super) async fn listen(inner: Arc<Inner>, listener: TcpListener) {
    loop {
        let (tcp, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Some((place, crowded_out)) = inner.handshakes.take(from.ip()) else {
            inner.refuse(from, &RefusalReason::TooManyHandshakes.into());
            continue;
        };
        let task = inner.clone();
        inner.spawn(async move {
            let admitted = tokio::select! {
                admitted = task.admit(tcp, from) => admitted,
                // The sender is never used, only dropped.
                _ = crowded_out => Err(RefusalReason::TooManyHandshakes.into()),
            };
            drop(place);
            match admitted {
                Ok(Some((stream, peer))) => task.accepted(stream, peer, from),
                Ok(None) => {}
                Err(refused) => task.refuse(from, &refused),
            }
        });
    }
}

/// The places for connections that have not proven the secret yet.
///
/// A newcomer is admitted even if all are taken: then the oldest connection of the origin
/// that holds the most places is closed. Origins at which a member has proven itself before
/// have [`FAVOURED_PLACES`] that do not count. So neither one origin nor many keep members
/// out: a stranger would have to replace every place within the round trip or two that a
/// member's handshake takes, and cannot close the handshake of a member that was here before.
#[derive(Clone)]
pub(super) struct Handshakes {
    max: usize,
    table: Arc<Mutex<Table>>,
}

#[derive(Default)]
struct Table {
    serial: u64,
    /// By age. A connection ends when the sender of its place is dropped.
    places: BTreeMap<u64, (IpAddr, oneshot::Sender<()>)>,
    /// Origins at which a member has proven itself.
    members: Recent<IpAddr>,
}

impl Table {
    /// The connection that makes room: the oldest of the origin that holds the most beyond what it
    /// is favoured with.
    fn heaviest(&self) -> Option<u64> {
        let mut held: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for (origin, _) in self.places.values() {
            *held.entry(*origin).or_default() += 1;
        }
        for (origin, count) in &mut held {
            if self.members.contains(origin) {
                *count = count.saturating_sub(FAVOURED_PLACES);
            }
        }
        // The oldest comes last, and `max_by_key` takes the last.
        let by_age = self.places.iter().rev();
        by_age.max_by_key(|(_, (origin, _))| held[origin]).map(|(serial, _)| *serial)
    }
}

/// A place taken, until it is dropped.
pub(super) struct Place {
    serial: u64,
    table: Arc<Mutex<Table>>,
}

impl Handshakes {
    pub(super) fn new(max: usize) -> Handshakes {
        Handshakes { max: max.max(1), table: Arc::default() }
    }

    /// A member has proven itself at this address.
    pub(super) fn proven(&self, at: IpAddr) {
        self.lock().members.note(origin(at));
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no holder panics")
    }

    /// A place, and what resolves when it must be given up. None if all places are held by
    /// origins of members and the newcomer's is not one.
    fn take(&self, from: IpAddr) -> Option<(Place, oneshot::Receiver<()>)> {
        let mut table = self.lock();
        let (hold, given_up) = oneshot::channel();
        table.serial += 1;
        let serial = table.serial;
        table.places.insert(serial, (origin(from), hold));
        if table.places.len() > self.max
            && let Some(out) = table.heaviest()
        {
            table.places.remove(&out);
            if out == serial {
                return None;
            }
        }
        Some((Place { serial, table: self.table.clone() }, given_up))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.table.lock().expect("no holder panics").places.remove(&self.serial);
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
    /// Authenticates a connection and waits for its first frame, which a dialler sends at
    /// once. None if the dialler only checked which node is here: such a connection
    /// carries no calls, and must not replace one that does.
    async fn admit(
        &self,
        tcp: TcpStream,
        from: SocketAddr,
    ) -> Result<Option<(Stream, Peer)>, Refused> {
        let (mut stream, peer) = self.identity.accept(tcp, from).await?;
        self.handshakes.proven(from.ip());
        match tokio::time::timeout(HANDSHAKE_LIMIT, stream.begins()).await {
            Ok(true) => Ok(Some((stream, peer))),
            Ok(false) => Ok(None),
            Err(_) => Err(RefusalReason::HandshakeTimedOut.into()),
        }
    }

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
pub(super) struct RefusalLog {
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

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn is_over(receiver: &mut oneshot::Receiver<()>) -> bool {
        receiver.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    #[test]
    fn the_oldest_of_the_most_crowded_origin_makes_way_for_a_newcomer() {
        let handshakes = Handshakes::new(4);
        let take = |from: &str| handshakes.take(ip(from)).expect("a newcomer is admitted");
        let mut crowd: Vec<_> = (1..=4).map(|_| take("2001:db8::1")).collect();
        let (_other, mut other) = take("::ffff:192.0.2.1");
        let (_own, _) = take("2001:db8::ffff");
        let states: Vec<bool> = crowd.iter_mut().map(|(_, receiver)| is_over(receiver)).collect();
        assert_eq!(states, [true, true, false, false], "the crowd's two oldest");
        assert!(!is_over(&mut other));
        drop((crowd, _other, _own));
        assert!(handshakes.lock().places.is_empty());
    }

    /// Strangers at as many addresses as there are places held all of them, each with a
    /// connection that said nothing.
    #[test]
    fn strangers_at_many_addresses_keep_nobody_out() {
        let handshakes = Handshakes::new(64);
        let stranger = |n: u32| IpAddr::from(std::net::Ipv4Addr::from(0x0a00_0000 + n));
        let mut strangers: Vec<_> = (0..64).filter_map(|n| handshakes.take(stranger(n))).collect();
        assert_eq!(strangers.len(), 64);
        let (_place, mut newcomer) = handshakes.take(ip("192.0.2.1")).expect("admitted");
        assert!(is_over(&mut strangers[0].1), "the oldest went");
        // It is here for as long as 63 more take to come, and a member for good.
        strangers.extend((64..127).filter_map(|n| handshakes.take(stranger(n))));
        assert!(!is_over(&mut newcomer));
        handshakes.proven(ip("192.0.2.1"));
        strangers.extend((127..1000).filter_map(|n| handshakes.take(stranger(n))));
        assert!(!is_over(&mut newcomer));
    }

    #[test]
    fn a_member_makes_way_for_no_stranger_and_a_crowd_at_its_address_does() {
        let handshakes = Handshakes::new(FAVOURED_PLACES + 1);
        handshakes.proven(ip("192.0.2.1"));
        let mut members: Vec<_> =
            (0..=FAVOURED_PLACES).filter_map(|_| handshakes.take(ip("192.0.2.1"))).collect();
        let (place, _) = handshakes.take(ip("192.0.2.2")).expect("the ninth is not favoured");
        assert!(is_over(&mut members[0].1));
        drop(place);
        handshakes.proven(ip("192.0.2.3"));
        let (_member, _) = handshakes.take(ip("192.0.2.3")).expect("a place is free");
        assert!(handshakes.take(ip("192.0.2.2")).is_none(), "only members are here");
        assert!(members[1..].iter_mut().all(|(_, receiver)| !is_over(receiver)));
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
