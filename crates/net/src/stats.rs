//! What the transport counts, for `status`.
//!
//! Counters are atomics that the connections bump; [`NetStats`] is a copy of them at
//! one moment. Bytes are frames as they stand before encryption, so TLS and TCP
//! overhead is not in them. The number of counts per peer is bounded.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use atoll_key::PeerId;

use crate::{CallError, Reply};

/// The most peers whose malformed frames are counted apart. A guess: a private network
/// has few members that misbehave.
const MAX_MALFORMED_PEERS: usize = 1024;

/// Why an incoming connection was refused before it could carry calls.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum RefusalReason {
    /// More unauthenticated connections than are allowed at once.
    TooManyHandshakes,
    /// The TLS handshake failed: no Ed25519 raw key, no TLS 1.3, no `atoll/2`, or garbage.
    Tls,
    /// The handshake was not over within its deadline.
    HandshakeTimedOut,
    /// The proof of the network secret was malformed.
    MalformedProof,
    /// The proof was not made with this network's secret.
    WrongSecret,
    /// The secret was proven, but there is no protocol version that both speak.
    WrongVersion,
    /// The secret was proven, but the network profile differs.
    WrongProfile,
    /// A node that was removed from the network.
    Removed,
    /// Only a secret that has been replaced was proven.
    SecretReplaced,
    /// On a Unix socket: another user's process.
    WrongUser,
}

impl RefusalReason {
    /// Every reason, in the order of the handshake.
    pub const ALL: [RefusalReason; 10] = [
        RefusalReason::TooManyHandshakes,
        RefusalReason::Tls,
        RefusalReason::HandshakeTimedOut,
        RefusalReason::MalformedProof,
        RefusalReason::WrongSecret,
        RefusalReason::WrongVersion,
        RefusalReason::WrongProfile,
        RefusalReason::Removed,
        RefusalReason::SecretReplaced,
        RefusalReason::WrongUser,
    ];

    /// A short name for metrics and JSON, such as `wrong_secret`.
    pub fn name(self) -> &'static str {
        match self {
            RefusalReason::TooManyHandshakes => "too_many_handshakes",
            RefusalReason::Tls => "tls",
            RefusalReason::HandshakeTimedOut => "handshake_timed_out",
            RefusalReason::MalformedProof => "malformed_proof",
            RefusalReason::WrongSecret => "wrong_secret",
            RefusalReason::WrongVersion => "wrong_version",
            RefusalReason::WrongProfile => "wrong_profile",
            RefusalReason::Removed => "removed",
            RefusalReason::SecretReplaced => "secret_replaced",
            RefusalReason::WrongUser => "wrong_user",
        }
    }
}

impl fmt::Display for RefusalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RefusalReason::TooManyHandshakes => "too many handshakes at once",
            RefusalReason::Tls => "the TLS handshake failed",
            RefusalReason::HandshakeTimedOut => "the handshake took too long",
            RefusalReason::MalformedProof => "the proof of the network secret is malformed",
            RefusalReason::WrongSecret => "the network secret is not known to it",
            RefusalReason::WrongVersion => "it speaks no protocol version that this node speaks",
            RefusalReason::WrongProfile => "its network profile differs",
            RefusalReason::Removed => "it was removed from the network",
            RefusalReason::SecretReplaced => "it knows only a network secret that was replaced",
            RefusalReason::WrongUser => "it belongs to another user",
        })
    }
}

/// A copy of the counters at one moment. All count from the start of the transport,
/// except `connections`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NetStats {
    /// Bytes of frames received.
    pub bytes_in: u64,
    /// Bytes of frames sent.
    pub bytes_out: u64,
    /// Calls of this node that are over, whatever became of them.
    pub calls_made: u64,
    /// Those of them that brought no reply (a refusal counts as a reply).
    pub calls_failed: u64,
    /// Requests given to the service.
    pub calls_served: u64,
    /// Requests refused because too many, or too large ones, were being served, or because
    /// too many replies were not read yet.
    pub calls_overloaded: u64,
    /// Authenticated connections open now.
    pub connections: u64,
    /// Authenticated connections accepted.
    pub connections_accepted: u64,
    /// Connections dialled and authenticated.
    pub connections_dialled: u64,
    /// Dials that failed.
    pub dials_failed: u64,
    /// Incoming connections refused, by reason; reasons that never occurred are absent.
    pub refusals: BTreeMap<RefusalReason, u64>,
    /// Malformed frames by the peer that sent them; each closed its connection.
    pub malformed_frames: BTreeMap<PeerId, u64>,
}

/// The live counters of one transport or one Unix server.
#[derive(Default, Debug)]
pub struct Counters {
    pub(crate) bytes_in: AtomicU64,
    pub(crate) bytes_out: AtomicU64,
    pub(crate) calls_made: AtomicU64,
    pub(crate) calls_failed: AtomicU64,
    pub(crate) calls_served: AtomicU64,
    pub(crate) calls_overloaded: AtomicU64,
    pub(crate) connections: AtomicU64,
    pub(crate) connections_accepted: AtomicU64,
    pub(crate) connections_dialled: AtomicU64,
    pub(crate) dials_failed: AtomicU64,
    refusals: [AtomicU64; RefusalReason::ALL.len()],
    malformed_frames: Mutex<BTreeMap<PeerId, u64>>,
}

pub(crate) fn bump(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

pub(crate) fn add(counter: &AtomicU64, amount: usize) {
    counter.fetch_add(amount as u64, Ordering::Relaxed);
}

impl Counters {
    pub(crate) fn refused(&self, reason: RefusalReason) {
        bump(&self.refusals[reason as usize]);
    }

    /// Counts a malformed frame. Some, the peer's count, for those that are worth a line
    /// of the log: the first, and ever fewer.
    pub(crate) fn malformed(&self, from: PeerId) -> Option<u64> {
        let mut counts = self.malformed_frames.lock().expect("no holder panics");
        if counts.len() >= MAX_MALFORMED_PEERS && !counts.contains_key(&from) {
            return None;
        }
        let count = counts.entry(from).or_default();
        *count += 1;
        count.is_power_of_two().then_some(*count)
    }

    /// Counts a call and what became of it.
    pub(crate) fn called(&self, result: &Result<Reply, CallError>) {
        bump(&self.calls_made);
        if result.as_ref().is_err_and(|error| !matches!(error, CallError::Refused(_))) {
            bump(&self.calls_failed);
        }
    }

    /// Incoming connections refused, by reason.
    pub fn refusals(&self) -> BTreeMap<RefusalReason, u64> {
        let counts = RefusalReason::ALL
            .iter()
            .map(|&reason| (reason, self.refusals[reason as usize].load(Ordering::Relaxed)));
        counts.filter(|&(_, count)| count > 0).collect()
    }

    /// All counters now.
    pub fn snapshot(&self) -> NetStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        NetStats {
            bytes_in: read(&self.bytes_in),
            bytes_out: read(&self.bytes_out),
            calls_made: read(&self.calls_made),
            calls_failed: read(&self.calls_failed),
            calls_served: read(&self.calls_served),
            calls_overloaded: read(&self.calls_overloaded),
            connections: read(&self.connections),
            connections_accepted: read(&self.connections_accepted),
            connections_dialled: read(&self.connections_dialled),
            dials_failed: read(&self.dials_failed),
            refusals: self.refusals(),
            malformed_frames: self.malformed_frames.lock().expect("no holder panics").clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_index_their_own_counters() {
        for (index, reason) in RefusalReason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, index);
            let counters = Counters::default();
            counters.refused(reason);
            assert_eq!(counters.refusals(), BTreeMap::from([(reason, 1)]));
        }
    }

    /// Each breach of the protocol was a line of the log: a member that connects and breaks
    /// it again and again could fill the disk.
    #[test]
    fn a_peer_that_breaks_the_protocol_again_and_again_is_logged_ever_less() {
        let counters = Counters::default();
        let logged: Vec<u64> =
            (0..1000).filter_map(|_| counters.malformed(PeerId([1; 32]))).collect();
        assert_eq!(logged, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]);
        let many = (0..2 * MAX_MALFORMED_PEERS as u32).filter_map(|index| {
            let mut id = [7; 32];
            id[..4].copy_from_slice(&index.to_be_bytes());
            counters.malformed(PeerId(id))
        });
        assert!(many.count() < MAX_MALFORMED_PEERS);
    }

    #[test]
    fn strangers_cannot_grow_the_table_of_malformed_frames() {
        let counters = Counters::default();
        for index in 0..2 * MAX_MALFORMED_PEERS as u32 {
            let mut id = [0; 32];
            id[..4].copy_from_slice(&index.to_be_bytes());
            counters.malformed(PeerId(id));
        }
        counters.malformed(PeerId([0; 32]));
        let counts = counters.snapshot().malformed_frames;
        assert_eq!(counts.len(), MAX_MALFORMED_PEERS);
        assert_eq!(counts[&PeerId([0; 32])], 2);
    }
}
