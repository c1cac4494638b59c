//! Node ID authentication (CFS §4.4): a claimed node enters a table only after a check.
//!
//! "Each such existing node sends a message to n's claimed IP address containing a nonce. If the
//! node at that IP address admits to having n's ID, and the claimed IP address and virtual node
//! index hash to the ID, then the existing node accepts n." Here the profile is the network's and
//! the index below its maximum ([`crate::chord::trust::admission`]); the ID is derived, never read;
//! the key answers at the claimed address over a connection dialled for the purpose
//! (`Transport::reach`); and the node, asked with a nonce, states that this peer address is its
//! own, how many virtual servers it runs, and that it is on a ring with the first of them. The last
//! part refutes a peer address that names another node's key at an address from which calls are
//! forwarded to it.
//!
//! It makes no difference whether a node speaks for itself or is named by another. A check is
//! remembered ([`crate::chord::trust::admission::CHECK_LASTS`]), so that a new neighbour costs two
//! small calls, not each message. Three things wait for an outcome: a list, which is accepted up to
//! its first unchecked entry; a claim to be a predecessor; any caller that asked.

use atoll_env::{Instant, random_below, timeout};
use atoll_key::PeerId;
use atoll_net::{CallError, Peer};
use futures_channel::oneshot;

use crate::chord::messages::{self, Alive, Doubt, Ping, VirtualIndex};
use crate::chord::trust::admission::Verdict;
use crate::chord::trust::checks::Origin;
use crate::chord::{Chord, Inner, calls};
use crate::peer_book::Standing;
use crate::{Node, Overlay, VirtualServerId};

/// The most peers whose clocks are checked again at a time.
const MAX_CLOCKS_ASKED: usize = 8;

/// The outcome of a check.
enum Outcome {
    /// The peer address is right, and its node runs so many virtual servers.
    Genuine { servers: u16, joined: bool },
    /// No answer, or another key's.
    Refuted,
    /// Too busy to say.
    Undecided,
}

impl Inner {
    /// The origin of a claim, as far as it counts for checking it.
    pub(in crate::chord) fn origin(&self, source: Option<PeerId>) -> Origin {
        let Some(peer) = source else { return Origin::Own };
        match self.servers.admission.site_of(&peer) {
            Some(site) => Origin::Known(peer, site),
            None => Origin::Stranger(peer),
        }
    }
}

impl Chord {
    pub(in crate::chord) fn judge(&self, node: &Node) -> Verdict {
        self.lock().servers.judge(node, self.env.now())
    }

    /// Whether `node` may enter the tables, if need be after a check, as a question of this node's
    /// own.
    pub(in crate::chord) async fn ensure_checked(&self, node: &Node) -> bool {
        self.ensure_checked_for(node, None).await
    }

    /// The same for a node that `source` has named, if that is not this node.
    pub(in crate::chord) async fn ensure_checked_for(
        &self,
        node: &Node,
        source: Option<PeerId>,
    ) -> bool {
        if self.judge(node) == Verdict::Welcome {
            return true;
        }
        self.checked_for(node, source).await;
        self.judge(node) == Verdict::Welcome
    }

    /// Has `node` checked, which `source` has named. Returns whether its peer address proved right;
    /// `None` if the check was undecided or there was no room for it.
    async fn checked_for(&self, node: &Node, source: Option<PeerId>) -> Option<bool> {
        if self.owns(node) || !self.lock().servers.admission.is_possible(node) {
            return Some(false);
        }
        let (sender, outcome) = oneshot::channel();
        {
            let mut inner = self.lock();
            let origin = inner.origin(source);
            inner.trust.checks.ask(*node, origin, Some(sender));
        }
        self.start_checks();
        outcome.await.ok()
    }

    /// Has nodes checked that `source` has named, `None` for this node itself.
    pub(in crate::chord) fn check_claims(&self, nodes: &[Node], source: Option<PeerId>) {
        if nodes.is_empty() {
            return;
        }
        {
            let mut inner = self.lock();
            let origin = inner.origin(source);
            for node in nodes {
                inner.trust.checks.ask(*node, origin, None);
            }
        }
        self.start_checks();
    }

    /// Checks whether a caller can be reached at its claimed address, and returns the doubt that is
    /// left after at most half a call limit, before the caller gives up.
    pub(in crate::chord) async fn check_caller(&self, from: Node) -> Option<Doubt> {
        if self.judge(&from) == Verdict::Welcome {
            return None;
        }
        let check = self.checked_for(&from, Some(from.peer.id));
        let ended = timeout(&*self.env, self.config.call_limit / 2, check).await;
        match ended {
            _ if self.judge(&from) == Verdict::Welcome => None,
            Ok(Some(false)) => Some(Doubt::Refuted),
            _ => Some(Doubt::Unchecked),
        }
    }

    /// Takes in the lists that waited for checks, as far as these are done.
    pub(in crate::chord) fn take_waiting(&self) {
        for (source, unknown) in self.update(|servers, now| servers.take_waiting(now)) {
            self.check_claims(&unknown, Some(source));
        }
    }

    /// Starts as many checks as may be under way.
    pub(in crate::chord) fn start_checks(&self) {
        loop {
            let now = self.env.now();
            let Some(peer) = self.lock().trust.checks.next(now) else { return };
            let chord = self.arc();
            self.env.spawn(Box::pin(async move {
                if peer.id == chord.transport.local().id {
                    chord.look_for_duplicate(peer).await;
                } else {
                    let outcome = chord.examine(peer).await;
                    chord.conclude(peer, outcome);
                }
                chord.start_checks();
            }));
        }
    }

    async fn examine(&self, peer: Peer) -> Outcome {
        let limit = self.config.call_limit;
        let mut reached = self.transport.reach(peer, limit).await;
        if matches!(reached, Err(CallError::TimedOut)) {
            reached = self.transport.reach(peer, limit).await;
        }
        if reached.is_err() {
            return Outcome::Refuted;
        }
        let nonce = self.env.random_u64();
        // A node that is on a ring at all is so with its first virtual server.
        let ping = Ping { to: VirtualIndex(0), nonce: Some(nonce) };
        let first = self.place(peer, 0);
        match self.call::<Alive>(&first, messages::PING, messages::encode(&ping)).await {
            Ok(alive) => self.admits(peer, nonce, &alive),
            Err(error) if calls::is_no_neighbour(&error) => Outcome::Refuted,
            Err(_) => Outcome::Undecided,
        }
    }

    fn admits(&self, peer: Peer, nonce: u64, alive: &Alive) -> Outcome {
        let servers = alive.servers.unwrap_or(1);
        let named = alive.peer.map(|named| named.0);
        let is_its_address = named == Some(peer);
        if let Some(named) = named
            && (named.id, alive.nonce) == (peer.id, Some(nonce))
            && !is_its_address
        {
            // Its key answers at both addresses.
            self.tell_addresses(named, peer.addr);
        }
        if alive.nonce != Some(nonce)
            || !is_its_address
            || servers == 0
            || servers > self.config.max_virtual_servers
        {
            return Outcome::Refuted;
        }
        if let Some(unix_ms) = alive.unix_ms {
            self.clocks().heard(peer, unix_ms, self.env.now());
        }
        Outcome::Genuine { servers, joined: alive.joined }
    }

    /// Looks again at wrong clocks, which may have been set meanwhile: of a few neighbours if
    /// the wrong one seems to be this node's, else of those concerned.
    pub(in crate::chord) fn recheck_clocks(&self) {
        let report = self.clock();
        let mut to_ask: Vec<Node> = if report.correction_ms == 0 {
            report.wrong.iter().map(|(peer, _)| self.place(*peer, 0)).collect()
        } else {
            let known = self.lock().servers.known();
            known.into_iter().filter(|node| !self.owns(node)).collect()
        };
        while to_ask.len() > MAX_CLOCKS_ASKED {
            to_ask.swap_remove(random_below(&*self.env, to_ask.len() as u64) as usize);
        }
        self.check_claims(&to_ask, None);
    }

    fn conclude(&self, peer: Peer, outcome: Outcome) {
        let is_refuted = matches!(outcome, Outcome::Refuted);
        let claim = self.lock().trust.checks.finished(&peer, is_refuted);
        let Some(claim) = claim else { return };
        let claimed: Vec<Node> =
            claim.indices.iter().map(|index| self.place(peer, *index)).collect();
        let verdict = match outcome {
            Outcome::Genuine { servers, joined } => {
                self.found_genuine(peer, servers, joined, &claimed);
                Some(true)
            }
            Outcome::Refuted => {
                self.found_dead(peer);
                Some(false)
            }
            Outcome::Undecided => None,
        };
        // Lists that waited for this node, one way or the other.
        self.take_waiting();
        if let Some(is_genuine) = verdict {
            for waiter in claim.waiters {
                let _ = waiter.send(is_genuine);
            }
        }
    }

    /// A peer address is right. Forgets those of the claimed virtual servers that it does not run.
    fn found_genuine(&self, peer: Peer, servers: u16, joined: bool, claimed: &[Node]) {
        let is_there = |node: &Node| joined && node.virtual_server.index < servers;
        let former = self.lock().servers.admission.addr_of(&peer.id);
        let is_admitted = self.update(|tables, now| {
            let is_admitted = claimed.iter().any(is_there) || tables.admission.was_checked(&peer);
            if is_admitted {
                tables.admit(peer, servers, now);
            }
            is_admitted
        });
        if is_admitted {
            self.lock().membership.remembered.met(peer, &*self.env);
            if let Some(former) = former.filter(|former| *former != peer.addr) {
                self.tell_addresses(peer, former);
            }
        }
        for node in claimed.iter().filter(|node| !is_there(node)) {
            self.found_vacant(node);
        }
    }

    /// The place of a peer's virtual server.
    pub(in crate::chord) fn place(&self, peer: Peer, index: u16) -> Node {
        Node::at(peer, VirtualServerId { profile: self.config.profile, index })
    }

    /// A peer has called: it is remembered, and checked again if it was taken for dead.
    pub(in crate::chord) fn heard(&self, from: &Peer) {
        let now: Instant = self.env.now();
        let node = self.place(*from, 0);
        let (was_checked, suspected) = {
            let mut inner = self.lock();
            let was_checked = inner.servers.admission.was_checked(from);
            if was_checked {
                inner.membership.remembered.met(*from, &*self.env);
            }
            (was_checked, inner.servers.admission.is_suspected(&node, now))
        };
        let silent = self.peer_book.standing(from, now) == Standing::Silent;
        // A call from it does not prove that this node reaches it.
        if (suspected || silent) && was_checked {
            self.check_claims(&[node], Some(from.id));
        }
    }
}
