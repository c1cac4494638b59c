//! How much memory peers can make this node hold, over all connections of one transport.
//!
//! A [`Ledger`] counts bytes of one kind by connection, by peer and in all. A connection that
//! needs more than is left of its peer's share or of the total gets it if another connection holds
//! more than twice as much: the largest holder's connection is closed, and its memory is free.
//! Otherwise the request for memory fails. So members that read slowly, or that never finish their
//! frames, cannot keep memory from others; and when many connections hold about the same, which is
//! honest load, none is closed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use atoll_key::PeerId;

use super::{
    MAX_HELD_REPLY_BYTES, MAX_PARTIAL_BYTES, MAX_PEER_PARTIAL_BYTES, MAX_PEER_SERVING_BYTES,
    MAX_REPLIES_BYTES, MAX_SERVING_BYTES,
};

/// A connection, to a ledger that has to close it.
pub(super) trait Closable: Send + Sync + 'static {
    /// Ends the connection.
    fn close(&self, why: &str);
}

/// What all connections of one transport may hold.
pub struct Budget {
    /// Requests being served.
    pub(super) serving: Arc<Ledger>,
    /// Bulk replies that are not written yet.
    pub(super) replies: Arc<Ledger>,
    /// Frames of which a part has arrived.
    pub(super) partial: Arc<Ledger>,
}

impl Default for Budget {
    fn default() -> Budget {
        Budget {
            serving: Ledger::new(MAX_PEER_SERVING_BYTES, MAX_SERVING_BYTES),
            replies: Ledger::new(MAX_HELD_REPLY_BYTES, MAX_REPLIES_BYTES),
            partial: Ledger::new(MAX_PEER_PARTIAL_BYTES, MAX_PARTIAL_BYTES),
        }
    }
}

impl Budget {
    /// For connections that all come from one peer: what there is in all is its share.
    pub fn of_one_peer() -> Budget {
        Budget {
            serving: Ledger::new(MAX_SERVING_BYTES, MAX_SERVING_BYTES),
            replies: Ledger::new(MAX_REPLIES_BYTES, MAX_REPLIES_BYTES),
            partial: Ledger::new(MAX_PARTIAL_BYTES, MAX_PARTIAL_BYTES),
        }
    }
}

/// Bytes of one kind that are held for peers.
pub(super) struct Ledger {
    max_peer: usize,
    max_total: usize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    serial: u64,
    total: usize,
    peers: BTreeMap<PeerId, usize>,
    connections: BTreeMap<u64, Holder>,
}

/// One connection.
struct Holder {
    peer: PeerId,
    bytes: usize,
    connection: Weak<dyn Closable>,
}

impl Table {
    fn of_peer(&self, peer: &PeerId) -> usize {
        self.peers.get(peer).copied().unwrap_or(0)
    }

    fn add(&mut self, serial: u64, bytes: usize) {
        let Some(holder) = self.connections.get_mut(&serial) else { return };
        holder.bytes += bytes;
        self.total += bytes;
        *self.peers.entry(holder.peer).or_default() += bytes;
    }

    fn subtract(&mut self, serial: u64, bytes: usize) {
        let Some(holder) = self.connections.get_mut(&serial) else { return };
        holder.bytes -= bytes;
        self.total -= bytes;
        let of_peer = self.peers.get_mut(&holder.peer).expect("it holds these bytes");
        *of_peer -= bytes;
        if *of_peer == 0 {
            self.peers.remove(&holder.peer);
        }
    }

    /// Forgets a connection and all that it holds.
    fn remove(&mut self, serial: u64) -> Option<Holder> {
        let bytes = self.connections.get(&serial)?.bytes;
        if bytes > 0 {
            self.subtract(serial, bytes);
        }
        self.connections.remove(&serial)
    }

    fn largest_of(&self, peer: &PeerId) -> Option<(u64, usize)> {
        let of_peer = self.connections.iter().filter(|(_, holder)| holder.peer == *peer);
        of_peer.map(|(serial, holder)| (*serial, holder.bytes)).max_by_key(|(_, bytes)| *bytes)
    }

    fn check_invariants(&self) {
        debug_assert_eq!(self.total, self.peers.values().sum::<usize>());
        debug_assert_eq!(self.total, self.connections.values().map(|h| h.bytes).sum::<usize>());
    }
}

impl Ledger {
    fn new(max_peer: usize, max_total: usize) -> Arc<Ledger> {
        Arc::new(Ledger { max_peer, max_total, table: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("nothing panics while holding it")
    }

    /// An account for a connection with `peer`.
    pub(super) fn open<C: Closable>(
        self: &Arc<Ledger>,
        peer: PeerId,
        connection: Weak<C>,
    ) -> Account {
        let mut table = self.lock();
        table.serial += 1;
        let serial = table.serial;
        table.connections.insert(serial, Holder { peer, bytes: 0, connection });
        Account { ledger: self.clone(), serial }
    }

    /// Counts `bytes` more for a connection, closing others if it must.
    fn take(&self, serial: u64, bytes: usize) -> bool {
        let mut closed = Vec::new();
        let taken = self.take_from(&mut self.lock(), serial, bytes, &mut closed);
        for holder in closed {
            if let Some(connection) = holder.connection.upgrade() {
                let peer = holder.peer;
                tracing::info!(%peer, bytes = holder.bytes, "closing a connection: {HOLDS_MOST}");
                connection.close(HOLDS_MOST);
            }
        }
        taken
    }

    fn take_from(
        &self,
        table: &mut Table,
        serial: u64,
        bytes: usize,
        closed: &mut Vec<Holder>,
    ) -> bool {
        // Each turn closes a connection.
        loop {
            let Some(own) = table.connections.get(&serial) else { return false };
            let (peer, own_bytes) = (own.peer, own.bytes);
            let of_peer = table.of_peer(&peer);
            let (largest, needs) = if of_peer + bytes > self.max_peer {
                (table.largest_of(&peer), own_bytes + bytes)
            } else if table.total + bytes > self.max_total {
                let largest = table.peers.iter().max_by_key(|(_, bytes)| **bytes);
                let of_largest = largest.and_then(|(peer, bytes)| {
                    table.largest_of(peer).map(|(serial, _)| (serial, *bytes))
                });
                (of_largest, of_peer + bytes)
            } else {
                table.add(serial, bytes);
                table.check_invariants();
                return true;
            };
            match largest {
                Some((largest, holds)) if holds > 2 * needs => {
                    closed.extend(table.remove(largest));
                }
                _ => return false,
            }
        }
    }
}

/// Why the connection of a largest holder is closed.
const HOLDS_MOST: &str = "its peer holds the most of the memory that others need";

/// A connection's account in a ledger.
pub(super) struct Account {
    ledger: Arc<Ledger>,
    serial: u64,
}

impl Account {
    /// Takes memory until the result is dropped. None if there is none for this connection.
    pub(super) fn hold(&self, bytes: usize) -> Option<Held> {
        let held = || Held { ledger: self.ledger.clone(), serial: self.serial, bytes };
        self.ledger.take(self.serial, bytes).then(held)
    }

    /// The connection is over: it holds nothing any more, whatever is dropped later.
    pub(super) fn close(&self) {
        self.ledger.lock().remove(self.serial);
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.close();
    }
}

/// Memory that is held for a connection, until it is dropped.
pub(super) struct Held {
    ledger: Arc<Ledger>,
    serial: u64,
    bytes: usize,
}

impl Held {
    /// Holds `bytes` from now on. False, and nothing has changed, if there is no memory.
    pub(super) fn resize(&mut self, bytes: usize) -> bool {
        if bytes > self.bytes && !self.ledger.take(self.serial, bytes - self.bytes) {
            return false;
        }
        if bytes < self.bytes {
            self.ledger.lock().subtract(self.serial, self.bytes - bytes);
        }
        self.bytes = bytes;
        true
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ledger.lock().subtract(self.serial, self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;

    impl Closable for Nothing {
        fn close(&self, _: &str) {}
    }

    fn account(ledger: &Arc<Ledger>, peer: u8) -> Account {
        ledger.open(PeerId([peer; 32]), Weak::<Nothing>::new())
    }

    fn holds(account: &Account) -> Option<usize> {
        account.ledger.lock().connections.get(&account.serial).map(|holder| holder.bytes)
    }

    #[test]
    fn a_peer_has_one_share_however_many_connections_it_has() {
        let ledger = Ledger::new(100, 1000);
        let [one, two, other] = [1, 1, 2].map(|peer| account(&ledger, peer));
        let _first = one.hold(60).expect("within the share");
        let _second = two.hold(40).expect("within the share");
        assert!(two.hold(1).is_none(), "60 are not more than twice 41");
        let _third = other.hold(100).expect("another's share");
        assert!(other.hold(1).is_none());
    }

    #[test]
    fn the_largest_holder_is_closed_for_one_that_needs_much_less() {
        let ledger = Ledger::new(100, 300);
        let slow: Vec<Account> = (1..=3).map(|peer| account(&ledger, peer)).collect();
        let mut held: Vec<Held> = slow
            .iter()
            .zip([100, 99, 100])
            .map(|(one, bytes)| one.hold(bytes).expect("room"))
            .collect();
        let honest = account(&ledger, 9);
        let mut small = honest.hold(1).expect("it is left");
        assert!(small.resize(10), "a slow one goes");
        let left: Vec<Option<usize>> = slow.iter().map(holds).collect();
        assert_eq!(left.iter().filter(|bytes| bytes.is_none()).count(), 1, "{left:?}");
        assert!(left.contains(&Some(99)), "not the one that holds least");
        // What is given back late is counted once.
        held.clear();
        assert_eq!(ledger.lock().total, 10);
        drop(small);
        assert_eq!(ledger.lock().total, 0);
        assert!(ledger.lock().peers.is_empty());
    }

    #[test]
    fn where_all_hold_the_same_nobody_is_closed() {
        let ledger = Ledger::new(100, 300);
        let all: Vec<Account> = (1..=31).map(|peer| account(&ledger, peer)).collect();
        let held: Vec<Option<Held>> = all.iter().map(|one| one.hold(10)).collect();
        assert_eq!(held.iter().filter(|held| held.is_none()).count(), 1);
        assert!(held[30].is_none(), "the last one does without");
        assert!(all.iter().all(|one| holds(one).is_some()));
    }

    #[test]
    fn a_connection_that_is_over_holds_nothing() {
        let ledger = Ledger::new(100, 100);
        let (one, two) = (account(&ledger, 1), account(&ledger, 2));
        let held = one.hold(100).expect("room");
        one.close();
        assert!(one.hold(1).is_none());
        let _all = two.hold(100).expect("all is free");
        drop(held);
        assert_eq!(ledger.lock().total, 100);
    }
}
