//! The connection pool: open connections, dials under way, and the back-off after failed dials.
//!
//! One connection per peer carries the calls of both sides, whichever side dialled it. When both
//! sides dial at once, the connection that the smaller key dialled stays. The larger key closes
//! its own as soon as it has both, after the calls on it have ended. The smaller key must not
//! close the other one: the larger key may not have accepted the one that stays yet, and would
//! have none. A connection that comes later replaces the old one: its peer dialled because it
//! considers the old one dead.
//! Plain data: time is passed in.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use atoll_key::PeerId;
use tokio::sync::watch;
use tokio::time::Instant;

use super::handshake::HANDSHAKE_LIMIT;
use super::recent::Recent;
use crate::Peer;
use crate::mux::Mux;

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const LONGEST_BACKOFF: Duration = Duration::from_secs(2);
/// The most peers remembered as failed; the past ones are forgotten beyond it.
const MAX_BACKOFFS: usize = 4096;

/// The most connections of one peer, those being let go included: more than two come
/// only from a peer that dials again and again.
const MAX_OF_PEER: usize = 4;

/// Connections being let go, for each one that may be open: one in this many.
const DRAIN_SHARE: usize = 4;

/// How a dial ended; none while it is under way.
pub(super) type Dialled = watch::Receiver<Option<Result<Mux, String>>>;

/// The other end of a connection, by who made it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Remote {
    /// This node, by dialling that address.
    Dialled(SocketAddr),
    /// The peer, from that address.
    Accepted(IpAddr),
}

impl Remote {
    pub(super) fn ip(&self) -> IpAddr {
        match self {
            Remote::Dialled(addr) => addr.ip().to_canonical(),
            Remote::Accepted(ip) => ip.to_canonical(),
        }
    }

    fn is_dialled_here(&self) -> bool {
        matches!(self, Remote::Dialled(_))
    }
}

struct Connection {
    mux: Mux,
    serial: u64,
    remote: Remote,
    since: Instant,
    last_use: u64,
}

struct Backoff {
    wait: Duration,
    until: Instant,
    why: String,
}

/// The connections of one transport.
pub(super) struct Pool {
    local: PeerId,
    max_connections: usize,
    /// Open ones. More than one per peer only while one of them is being let go, or the peer
    /// is about to do so.
    connections: BTreeMap<PeerId, Vec<Connection>>,
    pub dials: BTreeMap<Peer, Dialled>,
    backoffs: BTreeMap<Peer, Backoff>,
    /// Peers whose key has answered where they listen.
    reached: Recent<Peer>,
    /// Counts uses, to order connections by their last one.
    uses: u64,
    serials: u64,
}

impl Pool {
    pub(super) fn new(local: PeerId, max_connections: usize) -> Pool {
        Pool {
            local,
            max_connections: max_connections.max(1),
            connections: BTreeMap::new(),
            dials: BTreeMap::new(),
            backoffs: BTreeMap::new(),
            reached: Recent::default(),
            uses: 0,
            serials: 0,
        }
    }

    /// An open connection to `id`, which counts as used now.
    pub(super) fn use_open(&mut self, id: &PeerId) -> Option<Mux> {
        self.uses += 1;
        let connection = self.connections.get_mut(id)?.iter_mut().find(|one| one.mux.is_open())?;
        connection.last_use = self.uses;
        Some(connection.mux.clone())
    }

    fn find_open(&self, id: &PeerId) -> Option<&Connection> {
        self.connections.get(id)?.iter().find(|one| one.mux.is_open())
    }

    /// An open connection to `id`, for a look.
    pub(super) fn open(&self, id: &PeerId) -> Option<&Mux> {
        self.find_open(id).map(|one| &one.mux)
    }

    /// Where the other end of the open connection to `id` is.
    pub(super) fn remote_ip(&self, id: &PeerId) -> Option<IpAddr> {
        self.find_open(id).map(|one| one.remote.ip())
    }

    /// The key has answered at the address.
    pub(super) fn note_reached(&mut self, peer: Peer) {
        self.reached.note(peer);
    }

    /// An open connection that was dialled to this very address.
    pub(super) fn dialled_to(&self, to: &Peer) -> Option<Mux> {
        let open = self.find_open(&to.id)?;
        (open.remote == Remote::Dialled(to.addr)).then(|| open.mux.clone())
    }

    /// An open connection with a peer at the IP address of one that was reached before.
    pub(super) fn reached_before(&self, to: &Peer) -> Option<Mux> {
        let open = self.find_open(&to.id)?;
        let is_there = open.remote.ip() == to.addr.ip().to_canonical();
        (is_there && self.reached.contains(to)).then(|| open.mux.clone())
    }

    /// Takes a new connection in and returns its serial number, for [`Pool::remove`].
    pub(super) fn add(&mut self, id: PeerId, mux: Mux, remote: Remote, now: Instant) -> u64 {
        let dialled_here = remote.is_dialled_here();
        // A peer we dialled may still fail to prove itself.
        if !dialled_here {
            self.forgive(&id);
        }
        self.serials += 1;
        self.uses += 1;
        let new = Connection { mux, serial: self.serials, remote, since: now, last_use: self.uses };
        let of_peer = self.connections.entry(id).or_default();
        let peer_lets_go = self.local < id;
        for old in of_peer.iter().filter(|old| old.mux.is_open()) {
            let at_once = now.saturating_duration_since(old.since) < HANDSHAKE_LIMIT;
            match at_once && old.remote.is_dialled_here() != dialled_here {
                true if peer_lets_go => {}
                true if dialled_here => new.mux.go_away(),
                _ => old.mux.go_away(),
            }
        }
        if of_peer.len() >= MAX_OF_PEER {
            let surplus = of_peer.iter().position(|one| !one.mux.is_open()).unwrap_or(0);
            of_peer.remove(surplus).mux.close("the peer has too many connections");
        }
        of_peer.push(new);
        self.evict(id);
        self.serials
    }

    /// Lets the least recently used connections go that are too many; idle ones first.
    /// Closes those that have been let go longest, when they are too many.
    fn evict(&mut self, newest: PeerId) {
        let open: usize =
            self.connections.values().flatten().filter(|one| one.mux.is_open()).count();
        for _ in self.max_connections..open {
            let others = self.connections.iter().filter(|(id, _)| **id != newest);
            let open = others.flat_map(|(_, of_peer)| of_peer).filter(|one| one.mux.is_open());
            match open.min_by_key(|one| (!one.mux.is_idle(), one.last_use)) {
                Some(least) => least.mux.go_away(),
                None => return,
            }
        }
        let all = self.connections.values().flatten();
        let mut let_go: Vec<&Connection> =
            all.filter(|one| !one.mux.is_open() && !one.mux.is_closed()).collect();
        let_go.sort_unstable_by_key(|one| one.serial);
        let surplus = let_go.len().saturating_sub(self.max_connections.div_ceil(DRAIN_SHARE));
        for oldest in &let_go[..surplus] {
            oldest.mux.close("too many connections are being let go");
        }
    }

    /// Forgets a connection that is over.
    pub(super) fn remove(&mut self, id: &PeerId, serial: u64) {
        if let Some(of_peer) = self.connections.get_mut(id) {
            of_peer.retain(|one| one.serial != serial);
            if of_peer.is_empty() {
                self.connections.remove(id);
            }
        }
    }

    /// Why `to` must not be dialled again yet.
    pub(super) fn backing_off(&self, to: &Peer, now: Instant) -> Option<&str> {
        let backoff = self.backoffs.get(to)?;
        (now < backoff.until).then_some(backoff.why.as_str())
    }

    /// Remembers that dialling `to` failed.
    pub(super) fn dial_failed(&mut self, to: Peer, why: String, now: Instant) {
        if self.backoffs.len() >= MAX_BACKOFFS {
            self.backoffs.retain(|_, backoff| now < backoff.until);
        }
        let backoff = self.backoffs.entry(to).or_insert(Backoff {
            wait: FIRST_BACKOFF / 2,
            until: now,
            why: String::new(),
        });
        backoff.wait = (backoff.wait * 2).min(LONGEST_BACKOFF);
        backoff.until = now + backoff.wait;
        backoff.why = why;
    }

    /// The peer has proven itself: failures to dial it count no more.
    pub(super) fn forgive(&mut self, id: &PeerId) {
        self.backoffs.retain(|peer, _| peer.id != *id);
    }

    /// The peers whose connections are open.
    pub(super) fn connected(&self) -> Vec<PeerId> {
        let is_open = |of_peer: &[Connection]| of_peer.iter().any(|one| one.mux.is_open());
        let open = self.connections.iter().filter(|(_, of_peer)| is_open(of_peer));
        open.map(|(id, _)| *id).collect()
    }

    /// Closes those of the peers that `stays` does not hold for.
    pub(super) fn close_unless(&self, stays: impl Fn(&PeerId) -> bool, why: &str) {
        for (_, of_peer) in self.connections.iter().filter(|(id, _)| !stays(id)) {
            of_peer.iter().for_each(|one| one.mux.close(why));
        }
    }

    /// Closes all.
    pub(super) fn close_all(&mut self, why: &str) {
        for connection in self.connections.values().flatten() {
            connection.mux.close(why);
        }
    }
}

#[cfg(test)]
mod tests {
    use atoll_env::BoxFuture;

    use super::*;
    use crate::mux::Context;

    fn peer(number: u8) -> Peer {
        Peer { id: PeerId([number; 32]), addr: SocketAddr::from(([127, 0, 0, 1], number.into())) }
    }

    fn remote(dialled_here: bool) -> Remote {
        match dialled_here {
            true => Remote::Dialled(peer(0).addr),
            false => Remote::Accepted(peer(0).addr.ip()),
        }
    }

    /// A connection that is open as long as its driver, which never runs, is kept.
    fn live() -> (Mux, BoxFuture<'static, ()>) {
        let (io, _) = tokio::io::duplex(16);
        let (mux, driver) = Mux::new(io, peer(0), Context::default());
        (mux, Box::pin(driver))
    }

    #[tokio::test]
    async fn of_two_dialled_at_once_the_larger_key_lets_its_own_go() {
        let now = Instant::now();
        let (small, large) = (PeerId([1; 32]), PeerId([2; 32]));
        for dialled_first in [true, false] {
            // The smaller key does not know which of them the other has.
            let mut pool = Pool::new(small, 10);
            let (first, _keep_first) = live();
            let (second, _keep_second) = live();
            pool.add(large, first.clone(), remote(dialled_first), now);
            pool.add(large, second.clone(), remote(!dialled_first), now);
            assert!(first.is_open() && second.is_open());
            // Of the larger key's, what it accepted stays.
            let mut pool = Pool::new(large, 10);
            let (first, _keep_first) = live();
            let (second, _keep_second) = live();
            pool.add(small, first.clone(), remote(dialled_first), now);
            pool.add(small, second.clone(), remote(!dialled_first), now);
            assert_eq!((first.is_open(), second.is_open()), (!dialled_first, dialled_first));
        }
    }

    #[tokio::test]
    async fn a_later_connection_replaces_an_old_one() {
        let now = Instant::now();
        let mut pool = Pool::new(PeerId([1; 32]), 10);
        let (old, _keep_old) = live();
        let (new, _keep_new) = live();
        pool.add(PeerId([2; 32]), old.clone(), remote(true), now);
        pool.add(PeerId([2; 32]), new.clone(), remote(false), now + HANDSHAKE_LIMIT);
        assert_eq!((old.is_open(), new.is_open()), (false, true));
    }

    #[tokio::test]
    async fn a_peer_cannot_pile_up_connections() {
        let mut pool = Pool::new(PeerId([1; 32]), 10);
        let all: Vec<_> = (0..MAX_OF_PEER + 2).map(|_| live()).collect();
        for (mux, _) in &all {
            pool.add(PeerId([2; 32]), mux.clone(), remote(false), Instant::now());
        }
        assert_eq!(pool.connections[&PeerId([2; 32])].len(), MAX_OF_PEER);
        assert_eq!(all.iter().filter(|(mux, _)| mux.is_open()).count(), 1);
    }

    #[tokio::test]
    async fn beyond_the_cap_the_least_recently_used_goes() {
        let now = Instant::now();
        let mut pool = Pool::new(PeerId([0; 32]), 2);
        let all: Vec<_> = (1..=3).map(|number| (PeerId([number; 32]), live())).collect();
        pool.add(all[0].0, all[0].1.0.clone(), remote(true), now);
        pool.add(all[1].0, all[1].1.0.clone(), remote(true), now);
        assert!(pool.use_open(&all[0].0).is_some());
        pool.add(all[2].0, all[2].1.0.clone(), remote(true), now);
        let open: Vec<bool> = all.iter().map(|(_, (mux, _))| mux.is_open()).collect();
        assert_eq!(open, [true, false, true]);
        assert!(pool.open(&all[1].0).is_none());
    }

    /// A member that makes keys up could have as many connections as it liked, each being
    /// let go for half a minute, and so take the process's file descriptors.
    #[tokio::test]
    async fn connections_being_let_go_are_capped_too() {
        let now = Instant::now();
        let mut pool = Pool::new(PeerId([0; 32]), 8);
        let all: Vec<_> = (1..=100).map(|number| (PeerId([number; 32]), live())).collect();
        for (id, (mux, _)) in &all {
            pool.add(*id, mux.clone(), remote(false), now);
        }
        let open = all.iter().filter(|(_, (mux, _))| mux.is_open()).count();
        let let_go: Vec<bool> = all.iter().map(|(_, (mux, _))| mux.is_closed()).collect();
        assert_eq!(open, 8);
        assert_eq!(let_go.iter().filter(|closed| !**closed).count(), 8 + 8 / DRAIN_SHARE);
        assert!(let_go.is_sorted_by(|a, b| a >= b), "the oldest went");
    }

    #[tokio::test]
    async fn back_off_doubles_to_a_bound_and_ends_with_a_connection() {
        let mut now = Instant::now();
        let mut pool = Pool::new(PeerId([0; 32]), 2);
        for wait_ms in [100, 200, 400, 800, 1600, 2000, 2000] {
            pool.dial_failed(peer(1), "refused".to_owned(), now);
            let end = now + Duration::from_millis(wait_ms);
            assert_eq!(pool.backing_off(&peer(1), end - Duration::from_millis(1)), Some("refused"));
            assert_eq!(pool.backing_off(&peer(1), end), None);
            now = end;
        }
        let elsewhere = Peer { addr: peer(2).addr, ..peer(1) };
        pool.dial_failed(peer(1), "refused".to_owned(), now);
        assert_eq!(pool.backing_off(&elsewhere, now), None);
        let (mux, _driver) = live();
        pool.add(peer(1).id, mux, remote(false), now);
        assert_eq!(pool.backing_off(&peer(1), now), None);
    }

    #[tokio::test]
    async fn failures_are_remembered_in_bounded_number() {
        let now = Instant::now();
        let mut pool = Pool::new(PeerId([0; 32]), 2);
        for number in 0..3 * MAX_BACKOFFS as u32 {
            let mut id = [0; 32];
            id[..4].copy_from_slice(&number.to_be_bytes());
            let to = Peer { id: PeerId(id), addr: peer(1).addr };
            pool.dial_failed(to, String::new(), now + FIRST_BACKOFF * (number / 1000));
        }
        assert!(pool.backoffs.len() <= MAX_BACKOFFS);
    }
}
