//! Duplicates: other processes that run with this node's key.
//!
//! A node's directory that was copied (a snapshot of its machine, a backup that was restored beside
//! the original) and started makes two processes of one key. Both count as one node in replica sets
//! and majorities, while each stores other blocks. This module finds that out and ends one of them.
//!
//! - **Suspicion.** A peer that finds a key at another address than before tells the holder of the key
//!   both addresses ([`SEEN_AT`]). A node that joins sees its own key at another address in the tables
//!   around it, and knows the address that it had at its last start. Each is only an address to look
//!   at: most nodes have moved.
//! - **Proof.** The node calls its own key at that address ([`KEY_CLAIM`]). The transport takes an
//!   answer only from a holder of the key, and the callee a question only from one, so no peer can
//!   pretend a duplicate. The question carries a fresh nonce. A process that is asked one of its own
//!   nonces has reached itself, by an address translation or a relay.
//! - **Verdict.** Both sides of that call know both claims and come to the same result ([`yields`]):
//!   the process that has run longer goes on. Uptimes are measured by monotonic clocks, so a wrong
//!   wall clock decides nothing, and a copy that is started again and again never ends the original.
//!   The other one leaves the ring at once and tells no neighbour: its place is the other process's.
//!
//! Looks are checks in the queue of [`super::checks`], with its limits on the addresses that a peer may
//! make this node dial, and an address is looked at once in [`LOOK_AGAIN`]. Two processes of which
//! neither can dial the other are not found out.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use atoll_env::{Instant, Runtime};
use atoll_key::PeerId;
use atoll_net::{Peer, Refusal, Request};
use bytes::Bytes;
use futures_channel::oneshot;

use crate::chord::messages::{self, KEY_CLAIM, KeyClaim, SEEN_AT, SeenAt, WirePeer};
use crate::chord::trust::checks::Origin;
use crate::chord::trust::limiter::Limiter;
use crate::chord::{Chord, JoinError};

/// An address is looked at again after so long. A guess: two processes are found out within a minute,
/// and one that has moved calls its former address rarely.
const LOOK_AGAIN: Duration = Duration::from_secs(20);
/// The most addresses remembered as looked at.
const MAX_LOOKED: usize = 64;
/// Uptimes that differ by less are equal: two processes that were started together and call each other
/// at the same time must come to the same result, though their calls take a while. A guess: longer than
/// the limit of a call.
const EQUAL_UPTIME_MS: u64 = 3_000;

/// Another process that runs with this node's key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Duplicate {
    /// Where it listens.
    pub addr: SocketAddr,
    /// When it was found last.
    pub found: Instant,
    /// Whether it goes on, and this process must end.
    pub prevails: bool,
}

/// What is known of other processes with this node's key.
pub(in crate::chord) struct Duplicates {
    started: Instant,
    /// Decides between processes that have run equally long. Drawn when first needed: of two copies
    /// of a running machine, each draws its own.
    incarnation: Option<u64>,
    /// Nonces of this process's open questions, and whether it was asked them itself.
    asked: BTreeMap<u64, bool>,
    looked: BTreeMap<SocketAddr, Instant>,
    /// What this node has told other nodes of their addresses.
    pub told: Limiter,
    found: Option<Duplicate>,
}

impl Duplicates {
    pub(in crate::chord) fn new(started: Instant) -> Duplicates {
        Duplicates {
            started,
            incarnation: None,
            asked: BTreeMap::new(),
            looked: BTreeMap::new(),
            told: Limiter::default(),
            found: None,
        }
    }

    fn claim(&mut self, nonce: u64, env: &dyn Runtime) -> KeyClaim {
        let incarnation = *self.incarnation.get_or_insert_with(|| env.random_u64());
        let uptime = env.now().since(self.started);
        let uptime_ms = u64::try_from(uptime.as_millis()).unwrap_or(u64::MAX);
        KeyClaim { nonce, uptime_ms, incarnation }
    }

    fn was_looked_at(&self, addr: &SocketAddr, now: Instant) -> bool {
        self.looked.get(addr).is_some_and(|at| now.since(*at) < LOOK_AGAIN)
    }

    fn note_look(&mut self, addr: SocketAddr, now: Instant) {
        self.looked.retain(|_, at| now.since(*at) < LOOK_AGAIN);
        if self.looked.len() >= MAX_LOOKED {
            let oldest = self.looked.iter().min_by_key(|(_, at)| **at).map(|(addr, _)| *addr);
            oldest.map(|addr| self.looked.remove(&addr));
        }
        self.looked.insert(addr, now);
    }

    /// Where the process listens for which this one must end.
    fn superseded_by(&self) -> Option<SocketAddr> {
        self.found.filter(|found| found.prevails).map(|found| found.addr)
    }
}

/// Whether the process of `mine` must end for the one of `theirs`. The two sides of a call, of which
/// one has `asked`, always come to opposite results.
fn yields(mine: &KeyClaim, theirs: &KeyClaim, asked: bool) -> bool {
    if mine.uptime_ms.abs_diff(theirs.uptime_ms) >= EQUAL_UPTIME_MS {
        return mine.uptime_ms < theirs.uptime_ms;
    }
    match mine.incarnation == theirs.incarnation {
        // The memory of a running machine was copied.
        true => asked,
        false => mine.incarnation > theirs.incarnation,
    }
}

impl Chord {
    /// The last other process with this node's key that was found.
    pub fn duplicate(&self) -> Option<Duplicate> {
        self.lock().trust.duplicates.found
    }

    /// Where the process listens that has this node's key and goes on: this one has left the ring for
    /// good, and must end.
    pub fn superseded_by(&self) -> Option<SocketAddr> {
        self.lock().trust.duplicates.superseded_by()
    }

    /// Waits for [`Chord::superseded_by`]. One task waits at a time. Cancel-safe.
    pub async fn superseded(&self) -> SocketAddr {
        loop {
            if let Some(addr) = self.superseded_by() {
                return addr;
            }
            self.superseded_due.notified().await;
        }
    }

    // --- a peer's side ----------------------------------------------------------------

    /// The key of `peer` is at its address, and was, or is, at `other` too. Tells the holder of the
    /// key, which finds out whether that is itself.
    pub(in crate::chord) fn tell_addresses(&self, peer: Peer, other: SocketAddr) {
        let now = self.env.now();
        if !self.lock().trust.duplicates.told.admit_addresses(peer.id, now) {
            return;
        }
        let elsewhere = Peer { addr: other, ..peer };
        let header = messages::encode(&SeenAt { one: WirePeer(peer), other: WirePeer(elsewhere) });
        let (chord, node) = (self.arc(), self.place(peer, 0));
        self.env.spawn(Box::pin(async move {
            // If it does not arrive, the next peer that finds the key elsewhere tells it.
            let _ = chord.call_raw(&node, SEEN_AT, header).await;
        }));
    }

    // --- the node's side --------------------------------------------------------------

    /// A peer says that it has seen this node's key at two addresses.
    pub(in crate::chord) fn answer_seen_at(
        &self,
        from: Peer,
        header: &[u8],
    ) -> Result<Bytes, Refusal> {
        let seen: SeenAt = messages::decode(header)?;
        let me = self.transport.local().id;
        for WirePeer(peer) in [seen.one, seen.other] {
            if peer.id == me {
                self.look_soon(peer.addr, Some(from.id), None);
            }
        }
        Ok(Bytes::new())
    }

    /// A process of this node's key asks for the claim of this one.
    pub(in crate::chord) fn answer_key_claim(
        &self,
        from: Peer,
        header: &[u8],
    ) -> Result<Bytes, Refusal> {
        if from.id != self.transport.local().id {
            return Err(Refusal::new(Refusal::MALFORMED, "only this node's key claims it"));
        }
        let theirs: KeyClaim = messages::decode(header)?;
        let (mine, is_itself) = {
            let mut inner = self.lock();
            let duplicates = &mut inner.trust.duplicates;
            let own = duplicates.asked.get_mut(&theirs.nonce);
            let is_itself = own.map(|was_asked| *was_asked = true).is_some();
            (duplicates.claim(theirs.nonce, &*self.env), is_itself)
        };
        if !is_itself {
            self.found_duplicate(from.addr, yields(&mine, &theirs, false));
        }
        Ok(messages::encode(&mine))
    }

    /// Looks whether another process of this node's key is at the address where this node was when it
    /// ran before.
    pub(in crate::chord) fn look_at_former_address(&self) {
        if let Some(addr) = self.config.former_address {
            self.look_soon(addr, None, None);
        }
    }

    /// Looks whether another process of this node's key is at `addr`, and waits for the outcome.
    /// Returns whether this process must end.
    pub(in crate::chord) async fn is_superseded_from(&self, addr: SocketAddr) -> bool {
        let (waiter, outcome) = oneshot::channel();
        self.look_soon(addr, None, Some(waiter));
        // Without an outcome where the address was looked at just now.
        let _ = outcome.await;
        self.superseded_by().is_some()
    }

    /// Has an address looked at that `source` has named, `None` for this node itself.
    fn look_soon(
        &self,
        addr: SocketAddr,
        source: Option<PeerId>,
        waiter: Option<oneshot::Sender<bool>>,
    ) {
        let me = self.transport.local();
        if addr == me.addr || addr.ip().is_unspecified() || addr.port() == 0 {
            return;
        }
        {
            let now = self.env.now();
            let mut inner = self.lock();
            if inner.trust.duplicates.was_looked_at(&addr, now) {
                return;
            }
            let origin = source.map_or(Origin::Own, |source| inner.origin(Some(source)));
            let elsewhere = self.place(Peer { addr, ..me }, 0);
            inner.trust.checks.ask(elsewhere, origin, waiter);
        }
        self.start_checks();
    }

    /// The check of this node's own key at another address.
    pub(in crate::chord) async fn look_for_duplicate(&self, elsewhere: Peer) {
        let found = self.call_key_claim(elsewhere.addr).await;
        if let Some(prevails) = found {
            self.found_duplicate(elsewhere.addr, prevails);
        }
        let claim = self.lock().trust.checks.finished(&elsewhere, found.is_none());
        for waiter in claim.into_iter().flat_map(|claim| claim.waiters) {
            let _ = waiter.send(found.is_some());
        }
    }

    /// Whether another process of this node's key answers at `addr`; if so, whether it prevails.
    async fn call_key_claim(&self, addr: SocketAddr) -> Option<bool> {
        let nonce = self.env.random_u64();
        let mine = {
            let now = self.env.now();
            let mut inner = self.lock();
            let duplicates = &mut inner.trust.duplicates;
            duplicates.note_look(addr, now);
            duplicates.asked.insert(nonce, false);
            duplicates.claim(nonce, &*self.env)
        };
        let header = messages::encode(&mine);
        let request = Request { method: KEY_CLAIM, header, parts: Vec::new() };
        let answer = self.transport.call_own_key(addr, request, self.config.call_limit).await;
        let is_itself = self.lock().trust.duplicates.asked.remove(&nonce).unwrap_or_default();
        if is_itself {
            return None;
        }
        // A refusal proves the key too, but its process may be starting or ending.
        let theirs: KeyClaim = messages::decode(&answer.ok()?.header).ok()?;
        Some(yields(&mine, &theirs, true))
    }

    fn found_duplicate(&self, addr: SocketAddr, prevails: bool) {
        {
            let found = self.env.now();
            let duplicates = &mut self.lock().trust.duplicates;
            if duplicates.superseded_by().is_some() {
                return;
            }
            duplicates.found = Some(Duplicate { addr, found, prevails });
        }
        if prevails {
            self.withdraw();
            self.superseded_due.notify();
        }
    }

    /// Leaves the ring without telling: the place is another process's.
    fn withdraw(&self) {
        self.lock().maintenance.tasks.drain(..).for_each(|task| task.abort());
        self.update(|servers, _| servers.leave());
    }

    /// Undoes what a join has done since this process was superseded.
    pub(in crate::chord) fn stay_superseded(&self) -> Result<(), JoinError> {
        match self.superseded_by() {
            Some(by) => {
                self.withdraw();
                Err(JoinError::Superseded { by })
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(uptime_ms: u64, incarnation: u64) -> KeyClaim {
        KeyClaim { nonce: 7, uptime_ms, incarnation }
    }

    /// Whatever they claim, exactly one of the two sides of a call goes on.
    #[test]
    fn of_two_processes_one_goes_on() {
        let hour = 3_600_000;
        let uptimes = [0, 1, EQUAL_UPTIME_MS - 1, EQUAL_UPTIME_MS, hour, u64::MAX];
        let claims = uptimes.iter().flat_map(|ms| [claim(*ms, 1), claim(*ms, 2)]);
        for asker in claims.clone() {
            for asked in claims.clone() {
                let (one, other) = (yields(&asker, &asked, true), yields(&asked, &asker, false));
                assert_ne!(one, other, "{asker:?} {asked:?}");
            }
        }
        assert!(yields(&claim(5_000, 1), &claim(hour, 2), false), "the one started later ends");
        assert!(!yields(&claim(hour, 2), &claim(5_000, 1), true));
        assert!(yields(&claim(0, 2), &claim(EQUAL_UPTIME_MS - 1, 1), true));
        assert!(!yields(&claim(0, 1), &claim(EQUAL_UPTIME_MS - 1, 2), true), "equally long");
    }

    /// Processes that call each other at the same time measure uptimes a while apart.
    #[test]
    fn crossing_calls_of_processes_started_together_have_one_result() {
        let slack = EQUAL_UPTIME_MS / 2;
        for late in [0, 1, 700, slack - 1] {
            let (one, other) = (|ms| claim(ms, 1), |ms| claim(ms, 2));
            let by_one = yields(&one(20_000), &other(20_000 + late), true);
            let by_other = yields(&one(20_000 + late), &other(20_000), false);
            assert_eq!((by_one, by_other), (false, false), "{late} ms");
        }
    }

    #[test]
    fn addresses_looked_at_are_remembered_for_a_while_and_in_bounded_number() {
        let now = Instant(5_000_000_000);
        let addr = |n: u16| SocketAddr::from(([10, 0, 0, 1], n));
        let mut duplicates = Duplicates::new(now);
        for n in 0..10_000 {
            duplicates.note_look(addr(n), now + Duration::from_millis(u64::from(n) / 10));
            assert!(duplicates.looked.len() <= MAX_LOOKED);
        }
        let last = now + Duration::from_millis(999);
        assert!(duplicates.was_looked_at(&addr(9_999), last));
        assert!(!duplicates.was_looked_at(&addr(9_999), last + LOOK_AGAIN));
    }
}
